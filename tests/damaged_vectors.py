"""The vectors of up to 512 bytes, to be damaged: cut short at each byte, and each byte changed.

Shared by the tests of both codecs (test_cross_codec.py) and of the other decoders (conformance/test_damage.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from crc32c import crc32c

from boundary_bundle.bundle import Limits
from boundary_bundle.conformance.vectors import Vector, load

VECTORS: dict[str, list[Vector]] = {}
for _vector in load():
    if len(_vector.data) <= 512:
        VECTORS.setdefault(_vector.file, []).append(_vector)


def small_vectors(file: str) -> Iterator[tuple[str, bytes, Limits]]:
    """Name, input and limits of the vectors of up to 512 bytes; an input that comes again with the same limits is
    left out."""
    seen = set()
    for vector in VECTORS[file]:
        key = vector.data, tuple(sorted(vector.limits.items()))
        if key not in seen:
            seen.add(key)
            yield f"{vector.file}/{vector.id}", vector.data, Limits(**vector.limits)


def places(data: bytes) -> list[tuple[int, int, bool] | None]:
    """For each byte the frame to repair when it changes, as (offset, body length, is it in the body);
    None where a repair would undo the change or there is no whole frame."""
    found: list[tuple[int, int, bool] | None] = [None] * len(data)
    at = 0
    while at + 64 <= len(data):
        length = int.from_bytes(data[at + 24 : at + 32], "little")
        end = at + 64 + (length + 63) // 64 * 64
        for index in range(at, min(end, len(data))):
            in_body = at + 64 <= index < at + 64 + length
            whole = at + 64 + length <= len(data)
            if index < at + 60:
                found[index] = (at, length, False)
            elif in_body and whole:
                found[index] = (at, length, True)
        at = end
    return found


def changed(data: bytes, at: int, value: int, frame: tuple[int, int, bool] | None) -> bytes:
    """``data`` with another byte at ``at``; with a ``frame`` of :func:`places` its checksums are true again."""
    damaged = bytearray(data)
    damaged[at] = value
    if frame is not None:
        begin, length, in_body = frame
        if in_body:
            body = bytes(damaged[begin + 64 : begin + 64 + length])
            damaged[begin + 48 : begin + 52] = crc32c(body).to_bytes(4, "little")
        damaged[begin + 60 : begin + 64] = crc32c(bytes(damaged[begin : begin + 60])).to_bytes(4, "little")
    return bytes(damaged)
