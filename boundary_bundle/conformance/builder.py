"""Bytes of bundles, good and bad, for the vectors (specification, sections 2 to 5).

Shares nothing with the codec: layout, CRC and registry codes stand here a second
time, so that a fault of the encoder cannot hide in the vectors made to find it.
Everything can be given otherwise than it should be; what is not given is right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

MAGIC: Final = bytes.fromhex("894244420d0a1a0a")
HEAD: Final = 0x81
FRAGMENT: Final = 0x82
END: Final = 0x83
NONE: Final = 255

#: name -> (code, elements a block, bytes a block, whether both byte orders are legal)
DTYPES: Final[dict[str, tuple[int, int, int, bool]]] = {
    "f64": (1, 1, 8, True),
    "f32": (2, 1, 4, True),
    "f16": (3, 1, 2, True),
    "bf16": (4, 1, 2, True),
    "f8_e4m3fn": (5, 1, 1, False),
    "f8_e5m2": (6, 1, 1, False),
    "i8": (16, 1, 1, False),
    "i16": (17, 1, 2, True),
    "i32": (18, 1, 4, True),
    "i64": (19, 1, 8, True),
    "u8": (24, 1, 1, False),
    "u16": (25, 1, 2, True),
    "u32": (26, 1, 4, True),
    "u64": (27, 1, 8, True),
    "bool": (32, 1, 1, False),
    "q8_0": (64, 32, 34, False),
}
TYPES: Final = {"u64": 1, "i64": 2, "f64": 3, "bytes": 4, "text": 5}
ORDERS: Final = {"little": 1, "big": 2}


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC: Final = _table()


def crc32c(data: bytes) -> int:
    """CRC32C of RFC 3720, one byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def frame(
    kind: int,
    body: bytes = b"",
    a: int = 0,
    b: int = 0,
    *,
    number: int = 7,
    minor: int = 0,
    major: int = 1,
    magic: bytes = MAGIC,
    flags: int = 0,
    reserved: int = 0,
    reserved_2: int = 0,
    length: int | None = None,
    body_crc: int | None = None,
    header_crc: int | None = None,
    padding: bytes | None = None,
) -> bytes:
    """One frame (2.1)."""
    covered = magic + struct.pack(
        "<BBHHHQQQQIQ",
        kind,
        flags,
        reserved,
        major,
        minor,
        number,
        len(body) if length is None else length,
        a,
        b,
        crc32c(body) if body_crc is None else body_crc,
        reserved_2,
    )
    crc = crc32c(covered) if header_crc is None else header_crc
    return covered + struct.pack("<I", crc) + body + (bytes(-len(body) % 64) if padding is None else padding)


def record(
    name: bytes | str = b"x",
    dims: Sequence[int] = (3,),
    dtype: str | int = "f32",
    *,
    order: int = 1,
    axis: int = NONE,
    reserved: bytes = bytes(3),
    rank: int | None = None,
    name_length: int | None = None,
    padding: bytes | None = None,
) -> bytes:
    """One tensor record (3.1); f32 [3] called x, 24 bytes long, unless said otherwise."""
    raw = name.encode() if isinstance(name, str) else name
    fixed = struct.pack(
        "<5B3s",
        DTYPES[dtype][0] if isinstance(dtype, str) else dtype,
        order,
        len(dims) if rank is None else rank,
        axis,
        len(raw) if name_length is None else name_length,
        reserved,
    )
    pad = bytes(-len(raw) % 8) if padding is None else padding
    return fixed + struct.pack(f"<{len(dims)}Q", *dims) + raw + pad


def attribute(
    key: int,
    kind: str | int,
    value: bytes,
    *,
    reserved: int = 0,
    length: int | None = None,
    padding: bytes | None = None,
) -> bytes:
    """One attribute record (3.2)."""
    code = TYPES[kind] if isinstance(kind, str) else kind
    fixed = struct.pack("<HBBI", key, code, reserved, len(value) if length is None else length)
    return fixed + value + (bytes(-len(value) % 8) if padding is None else padding)


def head(
    *records: bytes,
    attributes: Iterable[bytes] = (),
    head_flags: int = 0,
    tensor_count: int | None = None,
    attribute_count: int | None = None,
    attribute_bytes: int | None = None,
    fragment_size: int = 0,
    head_reserved: int = 0,
    **fields: Any,
) -> bytes:
    """A head frame (2.2, 3) over records; ``fields`` are those of :func:`frame`."""
    kept = list(attributes)
    block = b"".join(kept)
    fixed = struct.pack(
        "<IIIIQQ",
        head_flags,
        len(records) if tensor_count is None else tensor_count,
        len(kept) if attribute_count is None else attribute_count,
        len(block) if attribute_bytes is None else attribute_bytes,
        fragment_size,
        head_reserved,
    )
    return frame(HEAD, fixed + b"".join(records) + block, **fields)


def fragment(body: bytes, tensor: int = 0, offset: int = 0, **fields: Any) -> bytes:
    """A fragment frame (2.3)."""
    return frame(FRAGMENT, body, tensor, offset, **fields)


def end(fragments: int = 0, payload_bytes: int = 0, **fields: Any) -> bytes:
    """An end frame (2.4)."""
    return frame(END, b"", fragments, payload_bytes, **fields)


def pattern(size: int, dtype: str = "u8") -> bytes:
    """Payload bytes that differ from their neighbours."""
    if dtype == "bool":
        return bytes(index % 3 == 1 for index in range(size))
    return bytes((index * 37 + 11) & 255 for index in range(size))


@dataclass(frozen=True)
class T:
    """A tensor as a vector states it; ``payload`` in wire order, made up when absent."""

    name: str
    dtype: str = "f32"
    shape: tuple[int, ...] = (3,)
    payload: bytes | None = None
    axis: int | None = None
    order: str = "little"
    #: Bits of the elements, most significant digit first, when they are the point.
    elements: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        _, block_elements, block_bytes, _ = DTYPES[self.dtype]
        count = 1
        for dim in self.shape:
            count *= dim
        return count // block_elements * block_bytes

    @property
    def data(self) -> bytes:
        return pattern(self.size, self.dtype) if self.payload is None else self.payload

    def record(self) -> bytes:
        axis = NONE if self.axis is None else self.axis
        return record(self.name, self.shape, self.dtype, order=ORDERS[self.order], axis=axis)


@dataclass(frozen=True)
class A:
    """An attribute as a vector states it."""

    key: int
    type: str
    raw: bytes

    def record(self) -> bytes:
        return attribute(self.key, self.type, self.raw)


@dataclass(frozen=True)
class B:
    """A logical bundle."""

    tensors: tuple[T, ...] = ()
    attributes: tuple[A, ...] = ()
    number: int = 7
    minor: int = 0
    fragment_size: int = 0
    checksums: bool = True

    def head(self, **changes: Any) -> bytes:
        """Its head frame; ``changes`` are fields of :func:`head` and :func:`frame`."""
        fields: dict[str, Any] = {
            "attributes": [item.record() for item in self.attributes],
            "head_flags": 0 if self.checksums else 1,
            "fragment_size": self.fragment_size,
            "number": self.number,
            "minor": self.minor,
        }
        return head(*(tensor.record() for tensor in self.tensors), **(fields | changes))

    def fragments(self, **changes: Any) -> list[bytes]:
        """Its fragment frames in canonical order."""
        frames = []
        for index, tensor in enumerate(self.tensors):
            data = tensor.data
            step = self.fragment_size or len(data) or 1
            for offset in range(0, len(data), step):
                part = data[offset : offset + step]
                fields: dict[str, Any] = {"number": self.number, "minor": self.minor}
                if not self.checksums:
                    fields["body_crc"] = 0
                frames.append(fragment(part, index, offset, **(fields | changes)))
        return frames

    def end(self, **changes: Any) -> bytes:
        """Its end frame."""
        total = sum(len(tensor.data) for tensor in self.tensors)
        fields: dict[str, Any] = {"number": self.number, "minor": self.minor}
        return end(len(self.fragments()), total, **(fields | changes))

    def encode(self) -> bytes:
        """Its canonical form (section 9)."""
        return self.head() + b"".join(self.fragments()) + self.end()
