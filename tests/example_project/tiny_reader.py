"""Reads of a bundle which tensors it holds, without any library."""

from __future__ import annotations

import struct

_ITEM_BYTES = {1: 8, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 16: 1, 17: 2, 18: 4, 19: 8, 24: 1, 25: 2, 26: 4, 27: 8, 32: 1}


def table(data: bytes) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, shape and payload bytes of each tensor. Raises ValueError for what is no bundle."""
    if data[:8] != b"\x89BDB\r\n\x1a\n" or len(data) < 96:
        raise ValueError("not a bundle")
    found = []
    at = 96
    for _ in range(struct.unpack_from("<I", data, 68)[0]):
        dtype, _, rank, _, length = data[at : at + 5]
        shape = struct.unpack_from(f"<{rank}Q", data, at + 8)
        at += 8 + 8 * rank
        size = 1
        for dim in shape:
            size *= dim
        size = size // 32 * 34 if dtype == 64 else size * _ITEM_BYTES[dtype]
        found.append((data[at : at + length].decode("ascii"), shape, size))
        at += (length + 7) // 8 * 8
    return found
