"""A testee to start from (spec/testee-protocol.md): boundary-bundle conformance -- python template.py

Fill in the functions with your codec; what it cannot do stays skipped.
"""

import json
import sys

HELLO = {
    "protocol": 1,
    "name": "template",
    "language": "Python",
    "version": "0",
    "classes": ["one", "core", "stream"],  # those that your codec has
    "dtypes": ["f32", "i32"],
}


def decode(request, data, pieces):
    """Decode ``data``, given in pieces of these sizes (None: whole), with request["class"].

    Return {"bundles": [...]}, and "error": {"name": ..., "number": ..., "offset": ...} if there was one.
    """
    return {"skipped": "no decoder yet"}


def encode(request, bundle):
    """Return {"data": hexadecimal digits}, or {"error": ...}."""
    return {"skipped": "no encoder yet"}


def answer(request):
    command = request["cmd"]
    if command == "hello":
        return HELLO
    if command == "stop":
        return {}
    if command in ("decode", "stream"):
        return decode(request, bytes.fromhex(request["data"]), request.get("pieces"))
    if command == "encode":
        return encode(request, request["bundle"])
    return {"skipped": f"unknown command {command}"}


for line in sys.stdin:
    request = json.loads(line)
    try:
        told = answer(request)
    except Exception as error:  # a fault of this program, not of the input
        told = {"failed": repr(error)}
    print(json.dumps({"seq": request["seq"], **told}), flush=True)
    if request["cmd"] == "stop":
        break
