"""A testee that misbehaves: ``python misbehaving_testee.py KIND [WHEN]``.

Until then it skips everything. WHEN is ``hello``, or a number n: every n-th request after it.
"""

import json
import os
import signal
import subprocess
import sys
import time

HELLO = {
    "protocol": 1,
    "name": "misbehaving",
    "language": "Python",
    "version": "0",
    "classes": ["one", "core", "stream"],
    "dtypes": ["f32"],
}


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def misbehave(kind: str, seq: int) -> None:
    if kind == "garbage":
        write("Segmentation fault? No, only a note.\n")
    elif kind == "not-an-object":
        write("[1, 2]\n")
    elif kind == "aside":
        print(json.dumps({"seq": seq, "bundles": []}), file=sys.stderr, flush=True)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "hang-with-child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
        time.sleep(3600)
    elif kind == "order":
        write(json.dumps({"seq": seq + 1, "bundles": []}) + "\n")
    elif kind == "half":
        write('{"seq": ')
        time.sleep(3600)
    elif kind == "half-exit":
        write('{"seq": ')
        os._exit(0)
    elif kind == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "exit":
        os._exit(3)
    elif kind == "closed":
        os.close(1)
        time.sleep(3600)
    elif kind == "flood":
        while True:
            write("x" * 65536)
    elif kind == "flood-aside":
        while True:
            sys.stderr.write("x" * 65536)
    elif kind == "malformed":
        write(json.dumps({"seq": seq}) + "\n")
    elif kind == "no-sequence":
        write(json.dumps({"bundles": []}) + "\n")
    elif kind == "failed":
        write(json.dumps({"seq": seq, "failed": "no idea \x1b[31m"}) + "\n")


def main() -> None:
    kind = sys.argv[1]
    when = sys.argv[2] if len(sys.argv) > 2 else "4"
    for line in sys.stdin:
        request = json.loads(line)
        seq, command = request["seq"], request["cmd"]
        if command == "hello" and when != "hello":
            write(json.dumps({"seq": seq, **HELLO}) + "\n")
        elif command == "stop":
            write(json.dumps({"seq": seq}) + "\n")
            return
        elif kind != "none" and (when == "hello" or seq % int(when) == 0):
            misbehave(kind, seq)
        else:
            write(json.dumps({"seq": seq, "skipped": "nothing is offered"}) + "\n")


main()
