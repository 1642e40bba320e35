"""Every fixed record of the format, declared once (specification, 2.1, 3, 3.1, 3.2).

The construct declarations are the executable field tables. The packers that the
codec uses are made from them by :func:`struct_format`; interpreting construct
for every frame would cost more than copying the payload of a decode step.
``tests/test_registry.py`` holds the declarations against the specification's tables.

All integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import construct

MAGIC: Final = b"\x89BDB\r\n\x1a\n"
MAJOR: Final = 1
#: Highest minor this codec knows; a bundle without kept unknowns is written with 0.
MINOR: Final = 0
ALIGNMENT: Final = 64

HEAD: Final = 0x81
FRAGMENT: Final = 0x82
END: Final = 0x83
CRITICAL_TYPE: Final = 0x80
REJECTED_FLAGS: Final = 0x0F

CHECKSUMS_ABSENT: Final = 1 << 0
#: Bits 1-15 of head_flags must be understood; none of them is defined yet.
UNKNOWN_HEAD_FLAGS: Final = 0xFFFE

LITTLE: Final = 1
BIG: Final = 2
NO_TOKEN_AXIS: Final = 255

CRITICAL_KEY: Final = 0x8000
KEY_NUMBER: Final = 0x3FFF

FRAME_HEADER = construct.Struct(
    "magic" / construct.Bytes(8),
    "type" / construct.Int8ul,
    "flags" / construct.Int8ul,
    "reserved" / construct.Int16ul,
    "major" / construct.Int16ul,
    "minor" / construct.Int16ul,
    "bundle_number" / construct.Int64ul,
    "body_length" / construct.Int64ul,
    "field_a" / construct.Int64ul,
    "field_b" / construct.Int64ul,
    "body_crc" / construct.Int32ul,
    "reserved_2" / construct.Int64ul,
    "header_crc" / construct.Int32ul,
)

HEAD_FIXED = construct.Struct(
    "head_flags" / construct.Int32ul,
    "tensor_count" / construct.Int32ul,
    "attribute_count" / construct.Int32ul,
    "attribute_bytes" / construct.Int32ul,
    "fragment_size" / construct.Int64ul,
    "reserved" / construct.Int64ul,
)

TENSOR_FIXED = construct.Struct(
    "dtype" / construct.Int8ul,
    "byte_order" / construct.Int8ul,
    "rank" / construct.Int8ul,
    "token_axis" / construct.Int8ul,
    "name_length" / construct.Int8ul,
    "reserved" / construct.Bytes(3),
)

ATTRIBUTE_FIXED = construct.Struct(
    "key" / construct.Int16ul,
    "type" / construct.Int8ul,
    "reserved" / construct.Int8ul,
    "value_length" / construct.Int32ul,
)


def struct_format(record: Any) -> str:
    """The ``struct`` format of a construct Struct of integers and byte strings.

    Raises TypeError for anything else, and for a field that is not little-endian:
    the format has neither.
    """
    parts = ["<"]
    for field in record.subcons:
        inner = field.subcon
        if isinstance(inner, construct.FormatField):
            order, code = inner.fmtstr
            if order != "<":
                raise TypeError(f"field {field.name} is not little-endian")
            parts.append(code)
        elif isinstance(inner, construct.Bytes):
            parts.append(f"{inner.sizeof()}s")
        else:
            raise TypeError(f"field {field.name} is no integer and no byte string")
    return "".join(parts)


def field_table(record: Any) -> dict[str, tuple[int, int]]:
    """name -> (offset, size) of every field of a construct Struct."""
    table: dict[str, tuple[int, int]] = {}
    offset = 0
    for field in record.subcons:
        size: int = field.sizeof()
        table[field.name] = (offset, size)
        offset += size
    return table


frame_header: Final = struct.Struct(struct_format(FRAME_HEADER))
#: The 60 bytes that header_crc covers: the same declaration without its last field.
frame_header_covered: Final = struct.Struct(struct_format(FRAME_HEADER)[:-1])
head_fixed: Final = struct.Struct(struct_format(HEAD_FIXED))
tensor_fixed: Final = struct.Struct(struct_format(TENSOR_FIXED))
attribute_fixed: Final = struct.Struct(struct_format(ATTRIBUTE_FIXED))
#: dims of a tensor record, by rank.
dims: Final = tuple(struct.Struct(f"<{rank}Q") for rank in range(9))
u32: Final = struct.Struct(construct.Int32ul.fmtstr)

_FRAME = field_table(FRAME_HEADER)
_HEAD = field_table(HEAD_FIXED)
_TENSOR = field_table(TENSOR_FIXED)
_ATTRIBUTE = field_table(ATTRIBUTE_FIXED)


def frame_offset(field: str) -> int:
    """Offset of a field in the frame header, in bytes."""
    return _FRAME[field][0]


def head_offset(field: str) -> int:
    """Offset of a field in the head body's fixed part, in bytes."""
    return _HEAD[field][0]


def tensor_offset(field: str) -> int:
    """Offset of a field in a tensor record's fixed part, in bytes."""
    return _TENSOR[field][0]


def attribute_offset(field: str) -> int:
    """Offset of a field in an attribute record's fixed part, in bytes."""
    return _ATTRIBUTE[field][0]


def pad8(size: int) -> int:
    """``size`` rounded up to a multiple of 8."""
    return (size + 7) & ~7


def pad64(size: int) -> int:
    """``size`` rounded up to a multiple of 64."""
    return (size + 63) & ~63
