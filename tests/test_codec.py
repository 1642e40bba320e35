"""Every check of the decoder and the encoder, with its name and offset.

The bytes are made field by field by the vectors' builder, not by the encoder: what both
of its halves misunderstand alike would otherwise pass. Each malformed input carries the step of
the specification's section 6 that it is to fail, and all its checksums are right
unless the checksum is the point.
"""

from __future__ import annotations

import pickle
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from boundary_bundle import (
    DTYPES,
    ERRORS,
    Attribute,
    Attributes,
    Bundle,
    BundleError,
    BundleReady,
    Decoder,
    Extension,
    Fragment,
    Head,
    Limits,
    Tensor,
    bits_equal,
    decode,
    encode,
    encode_parts,
)
from boundary_bundle.conformance.builder import (
    END,
    HEAD,
    MAGIC,
    attribute,
    end,
    fragment,
    frame,
    head,
    record,
    u64,
)

F64, F32, BF16, I32, U8, BOOL, Q8_0 = 1, 2, 4, 18, 24, 32, 64
TEXT = (Path(__file__).parent.parent / "spec" / "boundary-bundle.md").read_text("utf-8")


F = fragment(bytes(12))
BASE = head(record()) + F + end(1, 12)  # frames at 0, 128, 256; 320 bytes
#: x is f32 [32] in two fragments of 64 bytes; the fragments lie at 128 and 256.
SPLIT = head(record(dims=(32,)), fragment_size=64)
FIRST, SECOND = fragment(bytes(64)), fragment(bytes(64), 0, 64)
Q = 64  # of the first head's body
R = Q + 32  # of its first tensor record


# step, what is wrong, bytes, error, offset, and who is asked: (c)ore Decoder,
# (s)tream Decoder, (d)ecode, all three when nothing is said.
def case(step: str, what: str, data: bytes, name: str, offset: int, who: str = "csd", **options: Any) -> Any:
    return pytest.param(step, data, name, offset, who, options, id=f"{step}-{what}")


CASES = [
    # Unit A and B
    case("A1", "magic", frame(END, magic=b"\x09" + MAGIC[1:]), "bad_magic", 0),
    case("A1", "eight bytes are enough", b"\x89BDB\n\x1a\nX", "bad_magic", 0),
    case("A1", "second frame", head(record()) + b"\0" * 8, "bad_magic", 128),
    case("A1", "before the CRC", frame(END, magic=bytes(8), header_crc=1), "bad_magic", 0),
    case("B1", "header CRC", frame(END, header_crc=1), "header_crc", 60),
    case("B1", "before the major", frame(HEAD, major=2, header_crc=1), "header_crc", 60),
    case("B1", "fragment", head(record()) + fragment(bytes(12), header_crc=1), "header_crc", 188),
    case("B2", "major 2", head(major=2), "unsupported_major", 12),
    case("B2", "major 0, before reserved", head(major=0, reserved_2=1), "unsupported_major", 12),
    case("B3", "bytes 10-11", frame(HEAD, reserved=0x100, reserved_2=1), "header_reserved", 10),
    case("B4", "bytes 52-59", frame(HEAD, reserved_2=1 << 63, flags=1), "header_reserved", 52),
    case("B5", "flag 3", frame(0x84, flags=8), "header_flags", 9),
    case("B5", "flag 0 among ignorable ones", frame(HEAD, flags=0xF1), "header_flags", 9),
    case("B6", "0x84", frame(0x84), "unsupported_frame", 8),
    case("B6", "0x80", frame(0x80), "unsupported_frame", 8),
    case("B6", "private use", head(record()) + frame(0xC1, length=2**40), "unsupported_frame", 136),
    # heads
    case("B10", "over the default", frame(HEAD, length=2**20 + 8), "limit_head_bytes", 24),
    case("B10", "not a multiple of 8", frame(HEAD, length=2**64 - 1), "limit_head_bytes", 24),
    case("B10", "lowered", BASE, "limit_head_bytes", 24, limits=Limits(head_bytes=48)),
    case("B11", "24", frame(HEAD, bytes(24), 1, 1), "body_length", 24),
    case("B11", "0", frame(HEAD, a=1), "body_length", 24),
    case("B11", "36", frame(HEAD, bytes(36), 1), "body_length", 24),
    case("B12", "field_a", frame(HEAD, bytes(32), 1, 1), "head_fields", 32),
    case("B13", "field_b", frame(HEAD, bytes(32), 0, 1), "head_fields", 40),
    case("B14", "same number", head(record()) + head(), "bundle_already_open", 144),
    case("B14", "before B15", head() + head(), "bundle_already_open", 128 + 16, limits=Limits(open_bundles=1)),
    case("B15", "core", head() + head(number=8), "limit_open_bundles", 128 + 16, "cd"),
    case("B15", "core, whatever the limit", head() + head(number=8), "limit_open_bundles", 144, "cd",
         limits=Limits(open_bundles=9)),
    case("B15", "stream", head(number=1) + head(number=2) + head(number=3), "limit_open_bundles", 256 + 16, "s",
         limits=Limits(open_bundles=2)),
    # any other frame
    case("B20", "fragment first", F, "bundle_not_open", 16),
    case("B20", "extension first", frame(1), "bundle_not_open", 16),
    case("B20", "other number", head(record()) + fragment(bytes(12), number=8, minor=3), "bundle_not_open", 144),
    case("B20", "closed", BASE + end(1, 12), "bundle_not_open", 320 + 16, "cs"),
    case("B21", "fragment", head(record(), minor=1) + F, "frame_version", 128 + 14),
    case("B21", "extension", head(record()) + frame(1, minor=1), "frame_version", 128 + 14),
    case("B21", "end", head() + end(minor=1), "frame_version", 128 + 14),
    # fragments
    case("B30", "one past", head(record()) + fragment(bytes(12), 1), "fragment_tensor", 128 + 32),
    case("B30", "no tensors", head() + fragment(b"", 0, 9), "fragment_tensor", 128 + 32),
    case("B30", "2^63", head(record()) + fragment(bytes(12), 2**63), "fragment_tensor", 128 + 32),
    case("B31", "past the end", head(record()) + fragment(b"", 0, 12), "fragment_offset", 128 + 40),
    case("B31", "unfragmented, not 0", head(record()) + fragment(bytes(8), 0, 4), "fragment_offset", 128 + 40),
    case("B31", "off the grid", SPLIT + fragment(bytes(64), 0, 32), "fragment_offset", 128 + 40),
    case("B31", "on the grid, past the end", SPLIT + fragment(bytes(64), 0, 128), "fragment_offset", 128 + 40),
    case("B31", "2^64-64", SPLIT + fragment(bytes(64), 0, 2**64 - 64), "fragment_offset", 128 + 40),
    case("B31", "tensor of no bytes", head(record(dims=(0,))) + fragment(b""), "fragment_offset", 128 + 40),
    case("B32", "short", head(record()) + fragment(bytes(8)), "fragment_length", 128 + 24),
    case("B32", "empty", head(record()) + fragment(b""), "fragment_length", 128 + 24),
    case("B32", "long", head(record()) + fragment(bytes(13)), "fragment_length", 128 + 24),
    case("B32", "whole tensor although fragmented", SPLIT + fragment(bytes(128)), "fragment_length", 128 + 24),
    case("B32", "2^64-1", SPLIT + fragment(b"", length=2**64 - 1), "fragment_length", 128 + 24),
    case("B32", "last one too long", head(record(dims=(17,)), fragment_size=64) + fragment(bytes(64), 0, 64),
         "fragment_length", 128 + 24),
    case("B33", "second first", SPLIT + SECOND, "fragment_order", 128 + 32, "cd"),
    case("B33", "repeat", SPLIT + FIRST + FIRST, "fragment_order", 256 + 32, "cd"),
    case("B33", "repeat of the last", head(record()) + F + F, "fragment_order", 256 + 32, "cd"),
    case("B33", "tensors swapped", head(record(), record(b"y")) + fragment(bytes(12), 1), "fragment_order",
         192 + 32, "cd"),
    case("B33", "before B34", head(record(dims=(32,)), fragment_size=64, head_flags=1)
         + fragment(bytes(64), 0, 64), "fragment_order", 128 + 32, "cd"),
    case("B34", "checksum", head(record(), head_flags=1) + F, "payload_crc_present", 128 + 48),
    # ends
    case("B40", "body", head(record()) + frame(END, bytes(8), 9, 9), "body_length", 128 + 24),
    case("B41", "nothing came", head(record()) + end(0, 0), "fragment_missing", 128),
    case("B41", "one of two", SPLIT + FIRST + end(9, 9), "fragment_missing", 256),
    case("B42", "count", head(record()) + F + end(2, 0), "end_fragments", 256 + 32),
    case("B43", "bytes", head(record()) + F + end(1, 13), "end_payload_bytes", 256 + 40),
    case("B50", "default", head(record()) + frame(1, length=2**20 + 1), "limit_extension_bytes", 128 + 24),
    case("B50", "lowered", head(record()) + frame(1, bytes(9)), "limit_extension_bytes", 128 + 24,
         limits=Limits(extension_bytes=8)),
    # Unit C
    case("C1", "head", head(record(), head_flags=2, body_crc=1), "body_crc", 48),
    case("C1", "head of a bundle without checksums", head(record(), head_flags=1, body_crc=0), "body_crc", 48),
    case("C1", "fragment", head(record()) + fragment(bytes(12), body_crc=0, padding=b"\1" * 52), "body_crc", 176),
    case("C1", "extension without checksums", head(head_flags=1) + frame(1, b"abc", body_crc=0), "body_crc", 128 + 48),
    case("C1", "empty extension", head() + frame(1, body_crc=1), "body_crc", 128 + 48),
    case("C1", "end", head() + end(body_crc=1), "body_crc", 128 + 48),
    case("C2", "first byte", head(record()) + fragment(bytes(12), padding=b"\1" + bytes(51)), "frame_padding", 204),
    case("C2", "last byte", head(record()) + fragment(bytes(12), padding=bytes(51) + b"\1"), "frame_padding", 255),
    case("C2", "head, before D1", head(record(), head_flags=2, padding=bytes(3) + b"\x80" + bytes(4)), "frame_padding",
         64 + 59),
    case("C2", "extension", head() + frame(1, b"a", padding=b"\0\7" + bytes(61)), "frame_padding", 128 + 66),
    case("C2", "without checksums", head(record(), head_flags=1) + fragment(bytes(12), body_crc=0, padding=b"\1" * 52),
         "frame_padding", 204),
    case("C3", "other bytes", SPLIT + FIRST + fragment(b"\1" * 64), "fragment_conflict", 256 + 64, "s"),
    case("C3", "one bit at the end", SPLIT + FIRST + SECOND + fragment(bytes(63) + b"\1", 0, 64),
         "fragment_conflict", 384 + 64, "s"),
    case("C3", "before C4", head(record(dtype=BOOL)) + fragment(b"\0\1\0") + fragment(b"\0\2\0"),
         "fragment_conflict", 256 + 64, "s"),
    case("C4", "2", head(record(dtype=BOOL)) + fragment(b"\0\1\2"), "bool_value", 128 + 66),
    case("C4", "the first of two", head(record(dtype=BOOL)) + fragment(b"\0\xff\2"), "bool_value", 128 + 65),
    # Unit D, fixed part
    case("D1", "flag 1", head(record(), head_flags=2, head_reserved=1), "unsupported_head_flag", Q),
    case("D1", "flag 15", head(record(), head_flags=1 << 15), "unsupported_head_flag", Q),
    case("D2", "insists", head(record(), head_flags=1, head_reserved=1), "checksums_required", Q,
         require_checksums=True),
    case("D3", "reserved", head(head_reserved=1 << 56, tensor_count=300), "head_reserved", Q + 24),
    case("D4", "257", head(tensor_count=257, attribute_bytes=2**32 - 1), "limit_tensors", Q + 4),
    case("D4", "lowered", BASE, "limit_tensors", Q + 4, limits=Limits(tensors=0)),
    case("D5", "65544", head(attribute_bytes=65_544), "limit_attribute_bytes", Q + 12),
    case("D5", "no multiple of 8", head(attribute_bytes=65_537), "limit_attribute_bytes", Q + 12),
    case("D6", "more than there is", head(attribute_bytes=8, fragment_size=1), "attribute_block", Q + 12),
    case("D6", "no multiple of 8", head(record(), attribute_bytes=4), "attribute_block", Q + 12),
    case("D7", "32", head(record(), fragment_size=32, tensor_count=9), "fragment_size", Q + 16),
    case("D7", "2^64-1", head(fragment_size=2**64 - 1), "fragment_size", Q + 16),
    # tensor records
    case("D10", "none", head(tensor_count=1), "tensor_table", R),
    case("D10", "after one", head(record(), tensor_count=2), "tensor_table", R + 24),
    case("D10", "not into the attributes", head(record(), tensor_count=2, attributes=[attribute(1, 4, bytes(40))]),
         "tensor_table", R + 24),
    case("D11", "9", head(record(rank=9, name_length=0)), "limit_rank", R + 2),
    case("D11", "lowered", head(record(dims=(1,) * 5)), "limit_rank", R + 2, limits=Limits(rank=4)),
    case("D12", "64", head(record(b"a" * 64)), "limit_name", R + 4),
    case("D12", "lowered", head(record(b"abc", rank=5)), "limit_name", R + 4, limits=Limits(name_bytes=2)),
    case("D13", "0", head(record(b"", dtype=0)), "tensor_name", R + 4),
    case("D14", "rank", head(record(rank=2, dtype=0)), "tensor_table", R),
    case("D14", "name", head(record(name_length=9)), "tensor_table", R),
    case("D14", "not into the attributes", head(record(rank=2), attributes=[attribute(1, 4, b"")]), "tensor_table", R),
    case("D15", "0", head(record(dtype=0, order=9)), "unsupported_dtype", R),
    case("D15", "7", head(record(dtype=7)), "unsupported_dtype", R),
    case("D15", "255", head(record(dtype=255)), "unsupported_dtype", R),
    case("D16", "0", head(record(order=0, axis=1)), "tensor_byte_order", R + 1),
    case("D16", "3", head(record(order=3)), "tensor_byte_order", R + 1),
    case("D16", "big u8", head(record(dtype=U8, order=2)), "tensor_byte_order", R + 1),
    case("D16", "big bool", head(record(dtype=BOOL, order=2)), "tensor_byte_order", R + 1),
    case("D16", "big q8_0", head(record(dtype=Q8_0, dims=(32,), order=2)), "tensor_byte_order", R + 1),
    case("D17", "rank", head(record(axis=1, reserved=b"\0\0\1")), "tensor_token_axis", R + 3),
    case("D17", "254", head(record(axis=254)), "tensor_token_axis", R + 3),
    case("D17", "scalar", head(record(dims=(), axis=0)), "tensor_token_axis", R + 3),
    case("D18", "reserved", head(record(reserved=b"\0\0\1", dims=(2**31,))), "tensor_reserved", R + 5),
    case("D19", "2^31", head(record(dims=(1, 2**31))), "limit_dimension", R + 16),
    case("D19", "the first of two", head(record(dims=(2**63, 2**63))), "limit_dimension", R + 8),
    case("D19", "2^63 by 0", head(record(dims=(2**63, 0))), "limit_dimension", R + 8),
    case("D19", "0 by 2^63", head(record(dims=(0, 2**63))), "limit_dimension", R + 16),
    case("D19", "2^63 at the maximum", head(record(dims=(2**63,), dtype=U8)), "limit_dimension", R + 8,
         limits=Limits(dimension=2**63 - 1, payload_bytes=2**63 - 1)),
    case("D20", "scalar", head(record(dtype=Q8_0, dims=())), "tensor_block", R + 2),
    case("D21", "33", head(record(dtype=Q8_0, dims=(32, 33), axis=1)), "tensor_block", R + 16),
    case("D22", "innermost", head(record(dtype=Q8_0, dims=(2, 32), axis=1)), "tensor_token_axis", R + 3),
    case("D22", "before D23", head(record(dtype=Q8_0, dims=(2**31 - 1, 2**31 - 32), axis=1)), "tensor_token_axis",
         R + 3),
    case("D23", "bytes", head(record(dims=(2**16, 2**16 + 1))), "limit_payload_bytes", R + 8),
    case("D23", "zero counts as one", head(record(dims=(2**17, 0, 2**17))), "limit_payload_bytes", R + 8),
    case("D23", "wraps 64 bits", head(record(dims=(2**31 - 1,) * 8, dtype=F64)), "limit_payload_bytes", R + 8),
    case("D23", "2^63 by 0 at the maximum", head(record(dims=(2**63 - 1, 0), dtype=F64)), "limit_payload_bytes",
         R + 8, limits=Limits(dimension=2**63 - 1, payload_bytes=2**63 - 1)),
    case("D23", "0 by 2^63 at the maximum", head(record(dims=(0, 2**63 - 1), dtype=F64)), "limit_payload_bytes",
         R + 8, limits=Limits(dimension=2**63 - 1, payload_bytes=2**63 - 1)),
    case("D23", "blocks", head(record(dtype=Q8_0, dims=(3, 32))), "limit_payload_bytes", R + 8,
         limits=Limits(payload_bytes=101)),
    case("D23", "an empty row is a block", head(record(dtype=Q8_0, dims=(2, 0))), "limit_payload_bytes", R + 8,
         limits=Limits(payload_bytes=33)),
    case("D24", "sum", head(record(), record(b"y")), "limit_payload_bytes", R + 32, limits=Limits(payload_bytes=23)),
    case("D25", "q8_0", head(record(dtype=Q8_0, dims=(32,)), fragment_size=64), "fragment_size", Q + 16),
    case("D25", "q8_0 of no bytes", head(record(dtype=Q8_0, dims=(0,)), fragment_size=64), "fragment_size", Q + 16),
    case("D26", "one tensor", head(record(dims=(17,)), fragment_size=64), "limit_fragments", Q + 16,
         limits=Limits(fragments=1)),
    case("D26", "sum", head(record(), record(b"?")), "limit_fragments", Q + 16, limits=Limits(fragments=1)),
    case("D26", "default", head(record(dims=(2**25,)), fragment_size=64), "limit_fragments", Q + 16),
    case("D27", "space", head(record(b"ab c", padding=b"\0\0\0\1")), "tensor_name", R + 18),
    case("D27", "zero byte", head(record(b"\0")), "tensor_name", R + 16),
    case("D27", "not ASCII", head(record("\u00e9".encode())), "tensor_name", R + 16),
    case("D28", "padding", head(record(padding=bytes(6) + b"\1")), "record_padding", R + 23),
    case("D29", "name", head(record(), record(axis=0)), "tensor_duplicate", R + 24 + 16),
    case("D30", "extents", head(record(axis=0), record(b"y", dims=(4, 2), axis=1)), "token_count", R + 24 + 16),
    case("D30", "not only neighbours", head(record(axis=0), record(b"y"), record(b"z", dims=(5,), axis=0)),
         "token_count", R + 48 + 8),
    case("D40", "bytes left", head(record(), bytes(8), tensor_count=1), "tensor_table", R + 24),
    case("D40", "before attributes", head(bytes(8), tensor_count=0, attributes=[bytes(8)]), "tensor_table", R),
    # attribute records, at R when there is no tensor
    case("D50", "none", head(attribute_count=1), "attribute_block", R),
    case("D50", "after one", head(attributes=[attribute(1, 1, u64(1))], attribute_count=2), "attribute_block", R + 16),
    case("D50", "2^32-1", head(attributes=[attribute(1, 4, b"")], attribute_count=2**32 - 1), "attribute_block",
         R + 8),
    case("D51", "value", head(attributes=[attribute(0, 1, u64(1), length=9)]), "attribute_block", R + 4),
    case("D51", "2^32-1", head(attributes=[attribute(1, 4, u64(1), length=2**32 - 1)]), "attribute_block", R + 4),
    case("D52", "0", head(attributes=[attribute(0, 9, b"")]), "attribute_key", R),
    case("D52", "only high bits", head(attributes=[attribute(0xC000, 4, b"")]), "attribute_key", R),
    case("D53", "same", head(attributes=[attribute(1, 4, b""), attribute(1, 9, b"")]), "attribute_order", R + 8),
    case("D53", "less", head(attributes=[attribute(0x8003, 1, u64(1)), attribute(0x8001, 4, bytes(32))]),
         "attribute_order", R + 16),
    case("D54", "0", head(attributes=[attribute(1, 0, b"", reserved=1)]), "attribute_type", R + 2),
    case("D54", "6", head(attributes=[attribute(0x800F, 6, b"")]), "attribute_type", R + 2),
    case("D55", "reserved", head(attributes=[attribute(0x800F, 4, b"", reserved=1)]), "attribute_reserved", R + 3),
    case("D56", "unregistered", head(attributes=[attribute(0x8002, 1, b"")]), "unsupported_attribute", R),
    case("D56", "private use", head(attributes=[attribute(0xC001, 4, b"")]), "unsupported_attribute", R),
    case("D57", "n_tokens as i64", head(attributes=[attribute(0x8006, 2, b"")]), "attribute_type", R + 2),
    case("D57", "architecture as bytes", head(attributes=[attribute(2, 4, b"\xff")]), "attribute_type", R + 2),
    case("D58", "u64 of 4", head(attributes=[attribute(1, 1, bytes(4), padding=b"\1" * 4)]), "attribute_length", R + 4),
    case("D58", "i64 of 0", head(attributes=[attribute(1, 2, b"")]), "attribute_length", R + 4),
    case("D58", "f64 of 16", head(attributes=[attribute(1, 3, bytes(16))]), "attribute_length", R + 4),
    case("D58", "fingerprint of 31", head(attributes=[attribute(9, 4, bytes(31))]), "attribute_length", R + 4),
    case("D58", "fingerprint of 0", head(attributes=[attribute(0x8001, 4, b"")]), "attribute_length", R + 4),
    case("D59", "0x7F", head(attributes=[attribute(2, 5, b"ab\x7f", padding=b"\1" * 5)]), "attribute_value", R + 10),
    case("D59", "line feed in an unknown text", head(attributes=[attribute(1, 5, b"\n")]), "attribute_value", R + 8),
    case("D60", "padding", head(attributes=[attribute(2, 5, b"ab", padding=bytes(5) + b"\1")]), "record_padding",
         R + 15),
    case("D61", "other", head(record(axis=0), attributes=[attribute(0x8006, 1, u64(4))]), "token_count", R + 24 + 8),
    case("D61", "only its low half", head(record(axis=0), attributes=[attribute(0x8006, 1, u64(2**32 + 3))]),
         "token_count", R + 24 + 8),
    case("D70", "bytes left", head(attributes=[attribute(1, 4, b""), bytes(8)], attribute_count=1), "attribute_block",
         R + 8),
    case("D70", "none counted", head(attributes=[attribute(1, 4, b"")], attribute_count=0), "attribute_block", R),
]  # fmt: skip


def outcome(run: Callable[[], object]) -> tuple[str, int, int | None]:
    """Name, number and offset of the error that ``run`` raises."""
    with pytest.raises(BundleError) as caught:
        run()
    return caught.value.name, caught.value.number, caught.value.offset


def pieces(data: bytes, size: int, decoder: Decoder) -> list[Any]:
    """Feed in pieces, then finish; all events."""
    events: list[Any] = []
    for at in range(0, len(data), size):
        events += decoder.feed(data[at : at + size])
    decoder.finish()
    return events


@pytest.mark.parametrize(("step", "data", "name", "offset", "who", "options"), CASES)
def test_malformed(step: str, data: bytes, name: str, offset: int, who: str, options: dict[str, Any]) -> None:
    """A check that is missing, late, early or reports another place; and any difference
    between the decoders or between ways of cutting the input."""
    expected = (name, ERRORS[name][0], offset)
    if "d" in who:
        assert outcome(lambda: decode(data, **options)) == expected
    for kind in ("core", "stream"):
        if kind[0] in who:
            for size in (1, 7, 64, 100, len(data)):
                assert outcome(lambda: pieces(data, size, Decoder(kind, **options))) == expected  # noqa: B023


def test_each_step_has_a_malformed_input() -> None:
    """A step of section 6 whose deletion no test would notice."""
    steps = set(re.findall(r"^\| ([A-D]\d+) \|", TEXT, re.MULTILINE))
    assert {parameters.values[0] for parameters in CASES} == steps


def test_each_error_of_a_decoder_has_a_malformed_input() -> None:
    """An error number that nothing produces."""
    made = {parameters.values[2] for parameters in CASES} | {"need_more", "truncated", "trailing_bytes"}
    assert {name for name in ERRORS if not name.startswith("contract_")} == made


def test_first_error_waits_for_its_unit() -> None:
    """A check that runs before its unit is complete makes errors depend on the pieces."""
    bad = frame(HEAD, bytes(24), flags=1, header_crc=0)
    decoder = Decoder()
    assert decoder.feed(bad[:63]) == []
    assert decoder.need == 1
    with pytest.raises(BundleError, match="header_crc"):
        decoder.feed(bad[63:64])
    body = head(record(), head_flags=2)
    decoder = Decoder()
    assert decoder.feed(body[:-1]) == []
    with pytest.raises(BundleError, match="unsupported_head_flag"):
        decoder.feed(body[-1:])
    assert outcome(lambda: decode(bad[:63])) == ("truncated", 100, 63)
    assert outcome(lambda: decode(body[:-1])) == ("truncated", 100, len(body) - 1)


def test_every_truncation_is_truncated() -> None:
    """A short input that loops, waits, passes or is called something else."""
    data = head(record(axis=0), attributes=[attribute(0x8006, 1, u64(3))]) + frame(1, b"note") + F + end(1, 12)
    decode(data)
    for size in range(len(data)):
        expected = ("truncated", 100, size)
        assert outcome(lambda: decode(data[:size])) == expected  # noqa: B023
        if size:
            for kind in ("core", "stream"):
                assert outcome(lambda: pieces(data[:size], 50, Decoder(kind))) == expected  # noqa: B023
    Decoder().finish()


def test_trailing_bytes() -> None:
    """Bytes after the one bundle that go unseen; and a second bundle taken for garbage."""
    for extra in (b"\0", MAGIC, BASE):
        assert outcome(lambda: decode(BASE + extra)) == ("trailing_bytes", 101, len(BASE))  # noqa: B023
    events = Decoder().feed(BASE + BASE)
    assert [type(event) for event in events] == [Head, Fragment, BundleReady] * 2
    assert events[3].offset == len(BASE)


def test_a_failed_decoder_takes_nothing_more() -> None:
    """A decoder that goes on after an error, loses what was good before it, or keeps state."""
    decoder = Decoder("stream")
    with pytest.raises(BundleError) as caught:
        decoder.feed(BASE + head(number=9) + b"garbage!")
    assert (caught.value.name, caught.value.offset) == ("bad_magic", len(BASE) + 128)
    assert [type(event) for event in caught.value.events] == [Head, Fragment, BundleReady, Head]
    assert decoder.open_bundles == []
    for again in (lambda: decoder.feed(BASE), lambda: decoder.feed(b""), decoder.finish):
        with pytest.raises(BundleError) as repeated:
            again()
        assert (repeated.value.name, repeated.value.offset) == ("bad_magic", len(BASE) + 128)
        assert repeated.value.events == ()
    finished = Decoder()
    finished.finish()
    with pytest.raises(ValueError, match="ended"):
        finished.feed(BASE)


def test_an_error_says_where() -> None:
    """An error without tensor, field or values; one that does not survive a process border."""
    with pytest.raises(BundleError) as caught:
        decode(head(record(b"residual")) + fragment(bytes(11)))
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error).__name__ == "MalformedFrame"
    assert (error.frame, error.tensor, error.field, error.expected, error.found) == (
        1, "residual", "body_length", 12, 11,
    )  # fmt: skip
    for part in ("fragment_length", "byte 152", "'residual'", "expected 12", "found 11"):
        assert part in str(error)


# What must be accepted


def test_imports() -> None:
    """A codec that drags in what only its tests or the shard driver need."""
    script = "import sys, boundary_bundle; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert {"numpy", "construct", "ml_dtypes", "crc32c"} <= loaded
    assert not {"hypothesis", "pytest", "rich", "gguf"} & loaded
    inside = {name for name in run.stdout.split() if name.startswith("boundary_bundle.")}
    assert not {name for name in inside if name.split(".")[1] in ("testing", "native", "shards", "conformance", "cli")}


def test_crc_is_castagnoli() -> None:
    """Another CRC-32 under the same name."""
    assert crc32c(b"123456789") == 0xE3069283


def test_newer_minor_is_read() -> None:
    """A 1.0 decoder that refuses a 1.1 bundle although nothing critical is unknown."""
    unknown = attribute(0x0123, 5, b"kept"), attribute(0x4001, 3, bytes.fromhex("010000000000f07f"))
    data = b"".join(
        (
            head(record(), attributes=unknown, head_flags=0xFFFF0000, minor=1),
            frame(0x7F, b"note", 1, 2, minor=1),
            fragment(bytes(12), minor=1, flags=0xF0),
            end(1, 12, minor=1),
        )
    )
    bundle = decode(data)
    assert bundle.minor == 1
    assert bundle.attributes[0x0123] == "kept"
    extension = [event for event in Decoder().feed(data) if isinstance(event, Extension)][0]
    assert (extension.type, extension.field_a, extension.field_b, extension.body) == (0x7F, 1, 2, b"note")
    # Re-encoded: unknown attributes and the minor stay, ignorable bits and frames go.
    assert encode(bundle) == (
        head(record(), attributes=unknown, minor=1) + fragment(bytes(12), minor=1) + end(1, 12, minor=1)
    )


def test_canonical_bytes() -> None:
    """An encoder whose bytes differ from the text, read field by field."""
    values = np.array([[1.5, -0.0], [np.inf, 2.0], [0.25, 7.0]], "<f4")
    bundle = Bundle(
        [Tensor("residual", values, token_axis=0, byte_order="big"), Tensor("ids", np.arange(3, dtype="<i4"))],
        {"n_tokens": 3, "architecture": "llama", 0x0003: -2},
        number=2**64 - 1,
        fragment_size=64,
    )
    fields: dict[str, Any] = {"number": 2**64 - 1}
    expected = (
        head(
            record(b"residual", (3, 2), axis=0, order=2),
            record(b"ids", (3,), I32),
            attributes=[
                attribute(2, 5, b"llama"),
                attribute(3, 2, struct.pack("<q", -2)),
                attribute(0x8006, 1, u64(3)),
            ],
            fragment_size=64,
            **fields,
        )
        + fragment(values.astype(">f4").tobytes(), **fields)
        + fragment(np.arange(3, dtype="<i4").tobytes(), 1, **fields)
        + end(2, 36, **fields)
    )
    assert encode(bundle) == expected
    assert b"".join(encode_parts(bundle)) == expected
    assert bits_equal(decode(expected), bundle)


def test_empty_bundle() -> None:
    """A bundle of nothing at all that is refused."""
    assert encode(Bundle()) == head(number=0) + end(number=0)
    assert len(decode(encode(Bundle()))) == 0


GOLDEN = {  # value, its little-endian payload
    "f64": (np.float64(-2.5), "00000000000004c0"),
    "f32": (np.float32(1.5), "0000c03f"),
    "f16": (np.float16(1.5), "003e"),
    "bf16": (1.5, "c03f"),
    "f8_e4m3fn": (1.5, "3c"),
    "f8_e5m2": (1.5, "3e"),
    "i8": (np.int8(-2), "fe"),
    "i16": (np.int16(-2), "feff"),
    "i32": (np.int32(-2), "feffffff"),
    "i64": (np.int64(-2), "feffffffffffffff"),
    "u8": (np.uint8(0xAB), "ab"),
    "u16": (np.uint16(0xABCD), "cdab"),
    "u32": (np.uint32(0x89ABCDEF), "efcdab89"),
    "u64": (np.uint64(0x0123456789ABCDEF), "efcdab8967452301"),
    "bool": (np.bool_(True), "01"),
}


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_bytes(name: str, order: str) -> None:
    """A dtype of another width or order on the wire; a swap that swaps nothing (bfloat16)."""
    value, text = GOLDEN[name]
    row = DTYPES[name]
    array = np.array([value, 0], row.numpy)
    wire = bytes.fromhex(text) + bytes(row.block_bytes)
    if order == "big":
        if not row.both_orders:
            with pytest.raises(BundleError, match="tensor_byte_order"):
                encode(Bundle([Tensor("x", array, byte_order="big")]))
            return
        wire = wire[: row.block_bytes][::-1] + wire[row.block_bytes :]
    tensor = Tensor("x", array, byte_order=order)
    assert tensor.dtype == name
    assert bytes(tensor.payload()) == wire
    data = encode(Bundle([tensor], number=7))
    assert data == head(record(dims=(2,), dtype=row.code, order=1 + (order == "big"))) + fragment(wire) + end(
        1, len(wire)
    )
    found = decode(data)["x"]
    assert found.dtype == row.numpy
    assert found.dtype.isnative
    assert (found == array).all()


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("f64", (0x7FF0000000000001, 0xFFF8DEADBEEF0000, 0x8000000000000000, 1, 0x7FF0000000000000)),
        ("f32", (0x7F800001, 0xFFC12345, 0x80000000, 1, 0xFF800000)),
        ("f16", (0x7C01, 0xFE55, 0x8000, 1, 0xFC00)),
        ("bf16", (0x7F81, 0xFFC5, 0x8000, 1, 0xFF80)),
        ("f8_e4m3fn", (0x7F, 0xFF, 0x80, 1, 0x7E)),
        ("f8_e5m2", (0x7D, 0xFF, 0x80, 1, 0xFC)),
    ],
)
def test_bits_survive(name: str, bits: tuple[int, ...], order: str) -> None:
    """Signalling NaNs quieted, NaN payloads, subnormals or the sign of zero lost on the way,
    aligned or not."""
    row = DTYPES[name]
    if order == "big" and not row.both_orders:
        order = "little"
    array = np.array(bits, row.unsigned).view(row.numpy)
    data = encode(Bundle([Tensor("x", array, byte_order=order)]))
    for buffer in (data, memoryview(b"." + data)[1:]):
        assert decode(buffer)["x"].view(row.unsigned).tolist() == list(bits)


def test_attribute_bits_survive() -> None:
    """The NaN of an f64 attribute changed by reading and writing it."""
    raw = bytes.fromhex("010000000000f0ff")
    data = head(attributes=[attribute(1, 3, raw)]) + end()
    bundle = decode(data)
    assert np.isnan(bundle.attributes[1])
    assert encode(bundle) == data


def test_ranks_and_empty_shapes() -> None:
    """Rank 0 or 8, or a dimension of 0 in any place, refused or given bytes."""
    for rank in range(9):
        array = np.arange(2**rank, dtype=np.int16).reshape((2,) * rank)
        found = decode(encode(Bundle([Tensor("x", array)])))["x"]
        assert found.shape == array.shape
        assert (found == array).all()
        for zero in range(rank):
            shape = tuple(0 if axis == zero else 3 for axis in range(rank))
            data = encode(Bundle([Tensor("x", np.zeros(shape, np.float32))], fragment_size=64))
            assert data.count(MAGIC) == 2
            assert decode(data)["x"].shape == shape
    wide = decode(head(record(dims=(2**31 - 1, 0))) + end())
    assert wide["x"].shape == (2**31 - 1, 0)
    limits = Limits(dimension=2**63 - 1, payload_bytes=2**63 - 1)
    huge = head(record(dims=(0, 2**63 - 1), dtype=U8)) + end()
    assert decode(huge, limits=limits)["x"].shape == (0, 2**63 - 1)


def test_q8_0_blocks() -> None:
    """Block-quantised shapes counted in bytes, or their blocks taken apart."""
    blocks = np.arange(4 * 68, dtype=np.uint16).astype(np.uint8).reshape(4, 68)
    tensor = Tensor("x", blocks, dtype="q8_0", token_axis=0)
    assert tensor.shape == (4, 64)
    bundle = Bundle([tensor], number=7, fragment_size=1088)
    data = encode(bundle)
    assert data == head(record(dims=(4, 64), dtype=Q8_0, axis=0), fragment_size=1088) + fragment(
        blocks.tobytes()
    ) + end(1, 272)
    found = decode(data).tensor("x")
    assert (found.dtype, found.shape, found.array.shape) == ("q8_0", (4, 64), (4, 68))
    assert bits_equal(decode(data), bundle)
    empty = Tensor("x", np.zeros((3, 0), np.uint8), dtype="q8_0")
    assert decode(encode(Bundle([empty]))).tensor("x").shape == (3, 0)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_the_error_names_the_tensor_that_misses_a_fragment(gone: str) -> None:
    """A sentence that leaves the user with all tensors to look through."""
    data = encode(Bundle([Tensor("a", np.zeros(3, np.float32)), Tensor("b", np.zeros(3, np.float32))]))
    frames = {"a": data[-320:-192], "b": data[-192:-64]}
    with pytest.raises(BundleError) as caught:
        decode(data[:-320] + b"".join(frame for name, frame in frames.items() if name != gone) + data[-64:])
    assert (caught.value.name, caught.value.tensor) == (
        ("fragment_missing", "b") if gone == "b" else ("fragment_order", "b")
    )
    decoder = Decoder("stream")
    with pytest.raises(BundleError) as caught:
        decoder.feed(data.replace(frames[gone], b""))
    assert (caught.value.name, caught.value.tensor) == ("fragment_missing", gone)
    at = data.index(frames[gone]) + 64
    with pytest.raises(BundleError) as caught:
        Decoder("stream").feed(data[:at] + b"\1" + data[at + 1 :])
    assert (caught.value.name, caught.value.tensor) == ("body_crc", gone)


def test_a_decoder_is_of_one_class_or_the_other() -> None:
    """A misspelt class that decodes as a stream."""
    with pytest.raises(ValueError, match="'core' or 'stream'"):
        Decoder("streams")


def test_any_buffer_is_its_bytes() -> None:
    """A buffer of other elements, of more dimensions or with gaps that is read as something else, or copied in vain."""
    bundle = Bundle([Tensor("a", np.arange(64, dtype=np.float32))])
    whole = np.frombuffer(encode(bundle), np.uint8)
    for buffer in (whole.reshape(2, -1), whole.view(np.uint32), whole.view(np.uint32).reshape(-1, 4)):
        assert bits_equal(decode(buffer), bundle)
        assert np.shares_memory(decode(buffer)["a"], whole)
    for gaps in (np.repeat(whole, 2)[::2], np.repeat(whole.view(np.uint32), 3)[::3]):
        assert bits_equal(decode(gaps), bundle)
    for empty in (b"", np.zeros(0, np.uint32), np.zeros((0, 3), np.uint8)):
        with pytest.raises(BundleError, match="truncated"):
            decode(empty)


def test_views_and_copies() -> None:
    """A copy of every payload where a view would do; a writable or unaligned array."""
    values = np.arange(64, dtype=np.float32)
    data = encode(Bundle([Tensor("a", values), Tensor("b", values, byte_order="big"), Tensor("c", values[:16])]))
    whole = np.frombuffer(data, np.uint8)
    bundle = decode(data)
    assert np.shares_memory(bundle["a"], whole)
    assert np.shares_memory(bundle["c"], whole)
    assert not np.shares_memory(bundle["b"], whole)
    split = encode(Bundle([Tensor("a", values), Tensor("c", values[:16])], fragment_size=64))
    assert not np.shares_memory(decode(split)["a"], np.frombuffer(split, np.uint8))
    assert np.shares_memory(decode(split)["c"], np.frombuffer(split, np.uint8))
    shifted = bytearray(b"." + data)
    moved = decode(memoryview(shifted)[1:])
    assert not np.shares_memory(moved["a"], np.frombuffer(shifted, np.uint8))
    flat = decode(memoryview(bytearray(data)).cast("I"))
    for found in (bundle, decode(split), moved, flat, decode(bytearray(data)), decode(np.frombuffer(data, "u1"))):
        for tensor in found:
            assert not tensor.array.flags.writeable
            assert tensor.array.flags.aligned
            assert (tensor.array == values[: tensor.array.size]).all()


def test_parts_do_not_copy_payloads() -> None:
    """A payload copied although it is contiguous and in wire order."""
    values = np.arange(100, dtype=np.float32).reshape(10, 10)
    big = values.astype(">f4")
    tensors = [
        Tensor("a", values),
        Tensor("b", big, byte_order="big"),
        Tensor("c", values.T),
        Tensor("d", values, byte_order="big"),
        Tensor("e", big),
    ]
    parts = encode_parts(Bundle(tensors, fragment_size=128))
    shared = [
        any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts if len(part))
        for array in (values, big)
    ]
    assert shared == [True, True]
    own = [part for part in parts if np.shares_memory(np.frombuffer(part, np.uint8), values)]
    assert sum(map(len, own)) == values.nbytes
    bundle = decode(b"".join(parts))
    assert (bundle["c"] == values.T).all()
    for name in "abde":
        assert (bundle[name] == values).all()


# Encoder


def tensor_with(**changes: Any) -> Tensor:
    tensor = Tensor("x", np.zeros(3, np.float32))
    for name, value in changes.items():
        setattr(tensor, name, value)
    return tensor


ENCODER = [
    ("tensor_name", lambda: Bundle([tensor_with(name="")])),
    ("tensor_name", lambda: Bundle([tensor_with(name="a b")])),
    ("tensor_name", lambda: Bundle([tensor_with(name="caf\u00e9")])),
    ("tensor_name", lambda: Bundle([tensor_with(name="\udc80")])),
    ("limit_name", lambda: Bundle([tensor_with(name="x" * 64)])),
    ("limit_name", lambda: Bundle([tensor_with(name="x" * 300)])),
    ("tensor_duplicate", lambda: Bundle([tensor_with(), tensor_with()])),
    ("tensor_byte_order", lambda: Bundle([tensor_with(byte_order="native")])),
    ("tensor_byte_order", lambda: Bundle([Tensor("x", np.zeros(3, np.int8), byte_order="big")])),
    ("tensor_token_axis", lambda: Bundle([tensor_with(token_axis=1)])),
    ("tensor_token_axis", lambda: Bundle([tensor_with(token_axis=-1)])),
    ("tensor_token_axis", lambda: Bundle([tensor_with(token_axis=255)])),
    ("limit_rank", lambda: Bundle([Tensor("x", np.zeros((1,) * 9, np.int8))])),
    ("limit_dimension", lambda: Bundle([Tensor("x", np.zeros((2**31, 0), np.int8))])),
    ("limit_payload_bytes", lambda: Bundle([Tensor("x", np.zeros((2**30, 0, 2**30), np.int8))])),
    ("limit_tensors", lambda: Bundle([Tensor(f"x{index}", np.zeros(0)) for index in range(257)])),
    ("limit_fragments", lambda: Bundle([Tensor("x", np.broadcast_to(np.int8(0), (2**27,)))], fragment_size=64)),
    ("unsupported_dtype", lambda: Bundle([Tensor("x", np.zeros(3, np.complex64))])),
    ("unsupported_dtype", lambda: Bundle([Tensor("x", np.zeros(3, "M8[s]"))])),
    ("unsupported_dtype", lambda: Bundle([Tensor("x", np.zeros(3, object))])),
    ("unsupported_dtype", lambda: Bundle([Tensor("x", np.zeros(3, np.uint8), dtype="q4_0")])),
    ("tensor_block", lambda: Bundle([Tensor("x", np.zeros(33, np.uint8), dtype="q8_0")])),
    ("tensor_block", lambda: Bundle([Tensor("x", np.zeros((), np.uint8), dtype="q8_0")])),
    ("tensor_token_axis", lambda: Bundle([Tensor("x", np.zeros(34, np.uint8), dtype="q8_0", token_axis=0)])),
    ("fragment_size", lambda: Bundle([Tensor("x", np.zeros(34, np.uint8), dtype="q8_0")], fragment_size=64)),
    ("fragment_size", lambda: Bundle(fragment_size=32)),
    ("fragment_size", lambda: Bundle(fragment_size=-64)),
    ("fragment_size", lambda: Bundle(fragment_size=2**64)),
    ("token_count", lambda: Bundle([tensor_with(token_axis=0), Tensor("y", np.zeros(2), token_axis=0)])),
    ("token_count", lambda: Bundle([tensor_with(token_axis=0)], {"n_tokens": 4})),
    ("bool_value", lambda: Bundle([Tensor("x", np.array([0, 2], np.uint8).view(np.bool_))])),
    ("attribute_value", lambda: Bundle(attributes={"n_tokens": -1})),
    ("attribute_value", lambda: Bundle(attributes={"n_tokens": 2**64})),
    ("attribute_value", lambda: Bundle(attributes={1: -(2**63) - 1})),
    ("attribute_value", lambda: Bundle(attributes={"architecture": "\u00e9"})),
    ("attribute_value", lambda: Bundle(attributes={"architecture": "a\n"})),
    ("attribute_type", lambda: Bundle(attributes={"n_tokens": "4"})),
    ("attribute_type", lambda: Bundle(attributes=[Attribute.of("n_tokens", 4, "i64")])),
    ("attribute_type", lambda: Bundle(attributes=[Attribute(1, 6, b"")])),
    ("attribute_type", lambda: Bundle(attributes=[Attribute(1, 256, b"")])),
    ("attribute_length", lambda: Bundle(attributes={"model_fingerprint": b"short"})),
    ("attribute_length", lambda: Bundle(attributes=[Attribute(1, 1, b"")])),
    ("attribute_key", lambda: Bundle(attributes={0: 1})),
    ("attribute_key", lambda: Bundle(attributes={0x10001: 1})),
    ("attribute_key", lambda: Bundle(attributes={-1: 1})),
    ("unsupported_attribute", lambda: Bundle(attributes={0x8002: 1})),
    ("limit_attribute_bytes", lambda: Bundle(attributes={1: bytes(65_536)})),
    # Several things wrong: what a decoder would meet first.
    ("limit_head_bytes", lambda: Bundle(attributes={1: bytes(2**20)})),
    ("limit_head_bytes", lambda: Bundle([tensor_with(name="x" * 64)] * 20_000)),
    ("limit_tensors", lambda: Bundle([tensor_with()] * 257, {1: bytes(65_536)})),
    ("limit_attribute_bytes", lambda: Bundle([tensor_with(name="x" * 64)], {1: bytes(65_536)})),
]


@pytest.mark.parametrize(("name", "make"), ENCODER)
def test_encoder_refuses(name: str, make: Callable[[], Bundle]) -> None:
    """An encoder that writes what no decoder takes, or says it in other words."""
    with pytest.raises(BundleError) as caught:
        encode(make())
    assert (caught.value.name, caught.value.number) == (name, ERRORS[name][0])


def test_encoder_limits() -> None:
    """An encoder that ignores the limits it was given; a field that no header holds."""
    bundle = Bundle([tensor_with()])
    for name, limits in (
        ("limit_head_bytes", Limits(head_bytes=48)),
        ("limit_tensors", Limits(tensors=0)),
        ("limit_payload_bytes", Limits(payload_bytes=11)),
        ("limit_fragments", Limits(fragments=0)),
    ):
        with pytest.raises(BundleError, match=name):
            encode(bundle, limits=limits)
    for wrong in (Bundle(number=-1), Bundle(number=2**64), Bundle(minor=65_536), Bundle(minor=-1)):
        with pytest.raises(ValueError, match="is not 0 to"):
            encode(wrong)
    with pytest.raises(ValueError, match="holds i32"):
        Tensor("x", np.zeros(3, np.int32), dtype="f32")
    with pytest.raises(ValueError, match="its shape says 12"):
        encode(Bundle([tensor_with(array=np.zeros(2, np.float32))]))


# Stream decoding


def ready(events: Sequence[Any]) -> list[Bundle]:
    return [event.bundle for event in events if isinstance(event, BundleReady)]


def test_stream_order_repeats_and_interleaving() -> None:
    """Fragments put in the wrong place, a repeat counted, one bundle's bytes in another's."""
    values = [np.arange(40, dtype=np.int32) + 1000 * number for number in range(3)]
    cut = []
    for number in range(3):
        data = encode(
            Bundle(
                [Tensor("x", values[number], byte_order="big"), Tensor("y", values[number][:3])],
                number=number,
                fragment_size=64,
            )
        )
        at = [found.start() for found in re.finditer(re.escape(MAGIC), data)]
        cut.append([data[a:b] for a, b in zip(at, [*at[1:], len(data)], strict=True)])
        assert len(cut[-1]) == 6
    order = [(0, 0), (1, 0), (1, 4), (0, 3), (2, 0), (0, 1), (0, 3), (2, 1), (0, 4), (0, 2), (0, 2), (0, 5)]
    order += [(1, 3), (1, 2), (2, 4), (2, 3), (1, 1), (1, 5), (2, 2), (0, 0), (0, 1), (2, 5)]
    data = b"".join(cut[bundle][index] for bundle, index in order)
    for size in (1, 50, len(data)):
        decoder = Decoder("stream")
        events: list[Any] = []
        for at in range(0, len(data), size):
            events += decoder.feed(data[at : at + size])
        bundles = ready(events)
        assert [bundle.number for bundle in bundles] == [0, 1, 2]
        for bundle in bundles:
            assert (bundle["x"] == values[bundle.number]).all()
            assert (bundle["y"] == values[bundle.number][:3]).all()
        # Bundle 0 was opened again, as its number was free, and is still open.
        assert decoder.open_bundles == [0]
        fragments = [event for event in events if isinstance(event, Fragment)]
        assert all(event.provisional for event in fragments)
        assert len(fragments) == 3 * 4 + 1, "a repeat is no event"
        with pytest.raises(BundleError, match="truncated"):
            decoder.finish()


def test_empty_tensors_between_fragments() -> None:
    """Canonical order that stumbles over tensors without fragments."""
    arrays = {"a": np.zeros(0, "f4"), "b": np.ones(3, "f4"), "c": np.zeros((2, 0), "f4"), "d": np.ones(1, "f4")}
    arrays["e"] = np.zeros((0, 9), "i8")
    data = encode(Bundle([Tensor(name, array) for name, array in arrays.items()]))
    for bundle in (decode(data), *ready(Decoder("core").feed(data)), *ready(Decoder("stream").feed(data))):
        assert {tensor.name: tensor.array.shape for tensor in bundle} == {
            name: array.shape for name, array in arrays.items()
        }


def test_checksums_absent() -> None:
    """A payload without checksums refused; damage to it named as if it had one."""
    bundle = Bundle([tensor_with()], checksums=False)
    data = encode(bundle)
    assert not decode(data).checksums
    assert bits_equal(decode(data), bundle)
    assert outcome(lambda: decode(data, require_checksums=True))[0] == "checksums_required"


def test_memory_is_not_allocated_for_declared_sizes() -> None:
    """A buffer of the declared size made before the bytes have come."""
    opening = head(record(dims=(2**16, 2**15), dtype=F64)) + fragment(b"", length=2**34, body_crc=0)
    tracemalloc.start()
    try:
        decoder = Decoder("stream")
        decoder.feed(opening)
        decoder.feed(bytes(1000))
        with pytest.raises(BundleError, match="truncated"):
            decode(opening)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_small_fragments_do_not_hold_large_pieces() -> None:
    """Open bundles that keep all input alive through a view of a few of its bytes."""
    filler = frame(1, bytes(2**18))
    tracemalloc.start()
    try:
        decoder = Decoder("stream")
        decoder.feed(head(record(dims=(64, 16)), fragment_size=64))
        for index in range(60):
            decoder.feed(fragment(bytes(64), 0, 64 * index) + filler)
        assert tracemalloc.get_traced_memory()[0] < 2**21
    finally:
        tracemalloc.stop()


def test_feeding_is_linear() -> None:
    """Buffers joined anew for each piece: 128 GB of copying here instead of 32 MB."""
    data = encode(Bundle([Tensor("x", np.zeros(2**25, np.uint8))]))
    decoder = Decoder()
    events: list[Any] = []
    start = time.process_time()
    for at in range(0, len(data), 4096):
        events += decoder.feed(data[at : at + 4096])
    assert len(ready(events)) == 1
    assert time.process_time() - start < 5


def test_fed_buffers_may_be_used_again() -> None:
    """A view of a receive buffer that the caller fills anew."""
    data = encode(Bundle([Tensor("x", np.arange(500, dtype=np.int32))]))
    buffer = bytearray(data)
    bundle = ready(Decoder().feed(buffer))[0]
    buffer[:] = bytes(len(buffer))
    assert (bundle["x"] == np.arange(500)).all()


# Model


def test_attributes_mapping() -> None:
    """Attributes that do not come back by name and number, in order, with their types."""
    attributes = Attributes({"n_tokens": np.int64(4), "architecture": "llama", 0x0100: 1.5, 0x0101: b"", 0x0102: -1})
    assert list(attributes) == ["architecture", 0x0100, 0x0101, 0x0102, "n_tokens"]
    assert [record.type_name for record in attributes.records()] == ["text", "f64", "bytes", "i64", "u64"]
    assert attributes["n_tokens"] == attributes[0x8006] == 4
    assert attributes[0x0101] == b""
    assert attributes.get("n_layer") is None
    assert "n_layer" not in attributes
    attributes["layer_start"] = 3
    assert list(attributes.forwarded()) == ["architecture", 0x0100, 0x0101, 0x0102, "n_tokens"]
    del attributes[0x0100]
    assert len(attributes) == 5
    with pytest.raises(KeyError):
        attributes["no such name"] = 1
    # A key given twice, of which one would be lost (section 8).
    for twice in ([Attribute(2, 5, b"a"), Attribute(9, 4, bytes(32)), Attribute(2, 5, b"b")], {"n_seqs": 1, 0x8007: 2}):
        with pytest.raises(BundleError, match="attribute_order"):
            Attributes(twice)


def test_bits_equal_tells_apart() -> None:
    """An equality that takes -0.0 for 0.0, one NaN for none, or forgets a property."""

    def make(**changes: Any) -> Bundle:
        return Bundle([tensor_with(**changes)])

    nan = np.full(3, np.nan, np.float32)
    assert bits_equal(make(array=nan), make(array=nan.copy()))
    assert bits_equal(make(array=np.zeros(3, ">f4")), make())
    for changes in (
        {"array": -np.zeros(3, np.float32)},
        {"name": "y"},
        {"token_axis": 0},
        {"byte_order": "big"},
    ):
        assert not bits_equal(make(**changes), make())
    for other in (
        Bundle(),
        Bundle([tensor_with()], number=1),
        Bundle([tensor_with()], minor=1),
        Bundle([tensor_with()], fragment_size=64),
        Bundle([tensor_with()], checksums=False),
        Bundle([tensor_with()], {1: 1}),
        Bundle([Tensor("x", np.zeros(3, np.int32))]),
        Bundle([Tensor("x", np.zeros((3, 1), np.float32))]),
    ):
        assert not bits_equal(other, make())
