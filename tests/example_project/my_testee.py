"""The testee of this project: lines of JSON in, lines of JSON out."""

import json
import sys

import boundary_bundle
from boundary_bundle.conformance.testee_python import PythonTestee

codec = PythonTestee()
for line in sys.stdin:
    request = json.loads(line)
    answer = codec.answer(request)
    if request["cmd"] == "hello":
        answer |= {"name": "example project", "version": boundary_bundle.__version__}
    print(json.dumps(answer), flush=True)
    if request["cmd"] == "stop":
        break
