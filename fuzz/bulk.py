"""Runs one of the Python targets over mutations of its corpus, without feedback from coverage: what standalone.c is
to the C targets.

    bulk.py TARGET MUTATOR LIBRARY SECONDS CURRENT FOLDER...

Instrumented Python takes five to ten times as long. CURRENT holds the input that is run, its size (8 bytes) before it,
also when the process is gone. An input that takes a second of processor time is a finding.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import targets
from replay import inputs

MAX_SIZE = 8192
#: Of address space; numpy and the libraries take a part of it.
MAX_MEMORY = 2 << 30


def main(arguments: Sequence[str]) -> int:
    name, mutator, library, seconds, current = arguments[:5]
    target = targets.TARGETS[name]
    if name == "differential":
        targets.library = targets.Library(Path(library))
    c = ctypes.CDLL(mutator)
    c.fuzz_mutate.restype = ctypes.c_size_t
    c.fuzz_mutate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p]
    population = list(inputs(map(Path, arguments[5:])))
    with open(current, "wb+") as file:
        file.truncate(8 + MAX_SIZE)
        room = mmap.mmap(file.fileno(), 8 + MAX_SIZE)
    begin_of_data = ctypes.addressof(ctypes.c_char.from_buffer(room, 8))
    pack_size = struct.Struct("<Q").pack_into
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))

    executions = reached = accepted = 0
    seen = -1

    def on_tick(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen == executions:
            raise targets.Finding("one input takes over a second")
        seen = executions

    signal.signal(signal.SIGPROF, on_tick)
    signal.setitimer(signal.ITIMER_PROF, 1, 1)
    drawn = random.Random()  # nosec B311: which byte to change
    end = time.monotonic() + float(seconds)
    try:
        while time.monotonic() < end:
            for _ in range(64):
                data = drawn.choice(population)
                size = len(data)
                room[8 : 8 + size] = data
                for _ in range(drawn.randrange(1, 4)):
                    size = c.fuzz_mutate(begin_of_data, size, MAX_SIZE, drawn.getrandbits(32), None)
                pack_size(room, 0, size)
                if size < targets.CONTROL:
                    continue
                data = room[8 : 8 + size]
                executions += 1
                verdict = target(data)
                reached += targets.reaches_records(verdict, data[targets.CONTROL :])
                accepted += verdict is None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"fuzz: executions {executions} reached {reached} accepted {accepted}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
