"""Runs one of the Python targets under atheris.

    atheris_main.py TARGET MUTATOR LIBRARY COUNTS [ARGUMENTS OF LIBFUZZER]

MUTATOR is mutate.c as a shared library, LIBRARY the C codec's (differential alone looks at it). Into the
file COUNTS go three numbers of 64 bits: executions, those that reached the tensor records, bundles. libFuzzer
ends without running what Python runs at its exit, so they are there all the time.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from pathlib import Path

import atheris

# What reads the bytes; to instrument the rest would cost seconds at each start.
READERS = ("anatomy", "bundle", "cli.inspect", "cli.page", "decoder", "dtypes", "encoder", "errors", "layout")
with atheris.instrument_imports(include=[f"boundary_bundle.{name}" for name in READERS]):
    import targets


def main() -> None:
    name, mutator, library, counts_file = sys.argv[1:5]
    target = targets.TARGETS[name]
    if name == "differential":
        targets.library = targets.Library(Path(library))
    counts = [0, 0, 0]
    pack = struct.Struct("<3Q").pack_into
    with open(counts_file, "wb+") as file:
        file.write(bytes(24))
        file.flush()
        counted = mmap.mmap(file.fileno(), 24)
    c = ctypes.CDLL(mutator)
    c.fuzz_mutate.restype = ctypes.c_size_t
    c.fuzz_mutate.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p]
    c.fuzz_repair.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        if seed % 8 == 0 or len(data) < 80:
            data = atheris.Mutate(data, len(data))
        room = ctypes.create_string_buffer(bytes(data), max(max_size, len(data)))
        size = c.fuzz_mutate(room, len(data), max_size, seed, None)
        return room.raw[:size]

    def once(data: bytes) -> None:
        if len(data) < targets.CONTROL:
            return
        counts[0] += 1
        pack(counted, 0, *counts)
        verdict = target(data)
        counts[1] += targets.reaches_records(verdict, data[targets.CONTROL :])
        counts[2] += verdict is None

    atheris.Setup([sys.argv[0], *sys.argv[5:]], once, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
