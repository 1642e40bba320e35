"""Seed corpora and the dictionary, made from spec/vectors and spec/registry.json.

The input of every decoder target is 16 bytes of control and a datastream (mutate.h says what the
control is). The encoder target draws its description from the bytes; its seeds are pseudo-random
bytes of a fixed seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from boundary_bundle.bundle import ATTRIBUTES, LIMIT_MAXIMA, TENSOR_NAMES, Bundle, Limits, Tensor
from boundary_bundle.conformance.vectors import Vector, load
from boundary_bundle.encoder import encode

CONTROL = 16
LIMIT_NAMES = (
    *("head_bytes", "tensors", "name_bytes", "rank", "dimension", "payload_bytes"),
    *("attribute_bytes", "fragments", "open_bundles", "extension_bytes"),
)
REQUIRE_CHECKSUMS, PREPARED, CORE = 1, 2, 4
#: Of the C targets alone.
SINGLE, STARVED, NO_ERROR, CALLER = 8, 16, 32, 64
#: Of py-decoder and py-stream.
CONTRACT = 128
WHOLE, BYTES, SMALL, FRAMES, MIXED = range(5)
MAX_SEED = 4096


def limit_code(value: int, maximum: int) -> int:
    """The control byte that comes nearest to a limit."""
    return value + 2 if value <= 253 else 1 if value >= maximum // 2 else 0


def control(limits: dict[str, int], flags: int = 0, pieces: int = WHOLE, seed: int = 0) -> bytes:
    """The 16 bytes before a datastream."""
    codes = bytes(limit_code(limits[name], LIMIT_MAXIMA[name]) if name in limits else 0 for name in LIMIT_NAMES)
    return codes + bytes((flags, pieces)) + seed.to_bytes(4, "little")


def limits_of(data: bytes) -> Limits:
    """What fuzz_config of target.h makes of a control."""
    values: dict[str, int] = {}
    for name, code in zip(LIMIT_NAMES, data, strict=False):
        if code:
            values[name] = LIMIT_MAXIMA[name] if code == 1 else min(code - 2, LIMIT_MAXIMA[name])
    if values.get("open_bundles", 0) > 255:
        values["open_bundles"] = 255
    return Limits(**values)


def pieces_of(data: bytes, size: int) -> list[int]:
    """The pieces in which a stream target gives the datastream: fuzz_piece of mutate.c until they have ``size``."""
    mode, state = data[11] % 5, int.from_bytes(data[12:16], "little")
    some = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000)
    pieces = []
    while size > 0:
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        r = state >> 16
        piece = (size, 1, r % 12, 64, some[r % len(some)])[mode]
        pieces.append(min(piece, size))
        size -= pieces[-1]
    return pieces


def _of_vector(vector: Vector, index: int) -> Iterator[bytes]:
    require = REQUIRE_CHECKSUMS if "require_checksums" in vector.flags else 0
    core = 0 if vector.classes == ("stream",) else CORE
    yield control(vector.limits, require | core) + vector.data
    more = (0, SINGLE, STARVED, NO_ERROR, CALLER, CONTRACT)[index % 6]
    yield control(vector.limits, require | PREPARED | (core ^ CORE) | more, 1 + index % 4, index) + vector.data


def decoder_seeds() -> Iterator[bytes]:
    """Each vector of up to MAX_SEED bytes under its own limits: once whole, once in pieces, prepared and in the
    other class."""
    for index, vector in enumerate(load()):
        if len(vector.data) <= MAX_SEED:
            yield from _of_vector(vector, index)


def python_seeds() -> Iterator[bytes]:
    """Half of them for targets that are a hundred times slower: each vector once, in one way or the other."""
    for index, vector in enumerate(load()):
        if len(vector.data) <= MAX_SEED:
            yield list(_of_vector(vector, index))[index % 2]


def large_seeds() -> Iterator[bytes]:
    """Beyond a megabyte decoders put payloads together in another way. For coverage; no mutator sees these."""
    values = np.arange(300_000, dtype=np.int32)
    for fragment_size in (0, 1 << 16, 1 << 20, 1_048_640):
        for flags, pieces in ((CORE, WHOLE), (0, MIXED), (CORE, FRAMES)):
            bundle = Bundle([Tensor("a", values), Tensor("b", values)], fragment_size=fragment_size)
            yield control({}, flags, pieces) + encode(bundle)


def encoder_seeds() -> Iterator[bytes]:
    drawn = random.Random("encoder")  # nosec B311: the same seeds each time
    for size in (64, 128, 256, 512, 1024):
        for _ in range(16):
            yield bytes(CONTROL) + bytes(
                drawn.choice((drawn.randrange(256), drawn.randrange(200))) for _ in range(size)
            )


def tokens() -> Iterator[tuple[str, bytes]]:
    """Words of the dictionary: what a frame begins with, names, keys, and the numbers at which checks turn."""
    yield "magic", bytes.fromhex("894244420d0a1a0a")
    for name in TENSOR_NAMES:
        yield f"name_{name}", name.encode("ascii")
    for name, row in ATTRIBUTES.items():
        yield f"key_{name}", row[0].to_bytes(2, "little")
    for exponent in (6, 8, 16, 31, 32, 34, 53, 62, 63):
        for value in (2**exponent - 1, 2**exponent):
            yield f"number_{value}", value.to_bytes(8, "little")
    seen = set()
    for vector in load():
        for tensor in [tensor for bundle in vector.bundles for tensor in bundle.tensors]:
            if tensor.name not in seen and tensor.name not in TENSOR_NAMES:
                seen.add(tensor.name)
                yield f"vector_{len(seen)}", tensor.name.encode("ascii")


def write(folder: Path) -> dict[str, int]:
    """Write ``decode/``, ``python/``, ``large/``, ``encode/`` and ``dictionary``; how many files each has."""
    counts = {}
    for name, inputs in (
        *(("decode", decoder_seeds()), ("python", python_seeds())),
        *(("large", large_seeds()), ("encode", encoder_seeds())),
    ):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for data in inputs:
            (place / hashlib.sha256(data).hexdigest()).write_bytes(data)
        counts[name] = sum(1 for _ in place.iterdir())
    lines = []
    for name, word in tokens():
        text = "".join(f"\\x{byte:02x}" for byte in word)
        lines.append(f'{name.replace("/", "_").replace("-", "_").replace(".", "_")}="{text}"\n')
    (folder / "dictionary").write_text("".join(lines), encoding="ascii")
    counts["words"] = len(lines)
    return counts
