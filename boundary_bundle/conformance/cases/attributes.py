"""Attribute records: steps D50 to D70."""

from __future__ import annotations

import struct
from typing import Any

from ..book import Book
from ..builder import A, B, T, attribute, end, head, u64

TITLE = "attribute records (specification, 3.2, 5.2 and D50 to D70 of 6)"

S = 64 + 32  # the first attribute record of a bundle without tensors


def only(*records: bytes, **changes: Any) -> bytes:
    """A bundle of nothing but these attribute records."""
    return head(attributes=records, **changes) + end()


def make(book: Book) -> None:
    values(book)
    records(book)
    registered(book)


def values(book: Book) -> None:
    good = book.good
    numbers = (0, 1, 255, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
    good(
        "3.2",
        "u64",
        "Unsigned integers of 64 bits.",
        B(attributes=tuple(A(1 + i, "u64", u64(n)) for i, n in enumerate(numbers) if 1 + i not in (2, 9))),
    )
    signed = (0, 1, -1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63))
    good(
        "3.2",
        "i64",
        "Signed integers of 64 bits.",
        B(attributes=tuple(A(0x100 + i, "i64", struct.pack("<q", n)) for i, n in enumerate(signed))),
    )
    bits = (
        *(0, 1 << 63, 1, (1 << 52) - 1, 1 << 52, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000),
        *(0xFFF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001, 0xFFFFDEADBEEF0001),
    )
    good(
        "3.2",
        "f64",
        "Floats: zeros, subnormals, infinities, NaNs with what they carry.",
        B(attributes=tuple(A(0x200 + i, "f64", u64(n)) for i, n in enumerate(bits))),
    )
    for size in (0, 1, 7, 8, 9, 16, 17):
        good(
            "3.2",
            f"bytes-{size}",
            f"A value of {size} bytes and its padding.",
            B(attributes=(A(1, "bytes", bytes(range(1, size + 1))),)),
        )
        good(
            "3.2",
            f"text-{size}",
            f"A text of {size} bytes; an empty value is a value.",
            B(attributes=(A(1, "text", b"t" * size),)),
        )
    good(
        "3.2",
        "text-alphabet",
        "Every byte that a text may hold.",
        B(attributes=(A(1, "text", bytes(range(0x20, 0x7F))),)),
    )
    good("3.2", "any-bytes", "Bytes are any bytes.", B(attributes=(A(1, "bytes", bytes(range(256))),)))
    good(
        "3.2",
        "keys",
        "The least and largest keys without the critical bit, private ones included.",
        B(attributes=tuple(A(key, "u64", u64(key)) for key in (0x0001, 0x3FFF, 0x4001, 0x7FFF))),
    )
    good(
        "3.2",
        "unknown-kept",
        "Unknown ancillary attributes of every type are kept and written again.",
        B(
            (T("x"),),
            (
                A(3, "u64", u64(1)),
                A(4, "i64", u64(2)),
                A(5, "f64", u64(3)),
                A(6, "bytes", b"abc"),
                A(7, "text", b"abc"),
            ),
        ),
    )


def records(book: Book) -> None:
    bad = book.bad
    empty = attribute(1, "bytes", b"")
    one = attribute(1, "u64", u64(1))
    bad("D50", "none", "One attribute declared, no record.", only(attribute_count=1), "attribute_block", S)
    bad("D50", "two-for-one", "Two declared, one record.", only(one, attribute_count=2), "attribute_block", S + 16)
    bad(
        "D50",
        "2^32-1",
        "2^32 - 1 attributes declared in a block of 8 bytes.",
        only(empty, attribute_count=2**32 - 1),
        "attribute_block",
        S + 8,
    )
    bad(
        "D51",
        "one-more",
        "A value of 9 bytes where the block holds 8.",
        only(attribute(1, "bytes", bytes(8), length=9)),
        "attribute_block",
        S + 4,
    )
    bad(
        "D51",
        "2^32-1",
        "A length that wraps 32 bits when padding is added.",
        only(attribute(1, "bytes", bytes(8), length=2**32 - 1)),
        "attribute_block",
        S + 4,
    )
    bad(
        "D51",
        "2^32-8",
        "A length that wraps 32 bits when the record's begin is added.",
        only(attribute(1, "bytes", bytes(8), length=2**32 - 8)),
        "attribute_block",
        S + 4,
    )
    bad(
        "D51",
        "2^31",
        "A length that is negative to who reads it as signed.",
        only(attribute(1, "bytes", bytes(8), length=2**31)),
        "attribute_block",
        S + 4,
    )
    bad(
        "D51",
        "before-D52",
        "The record's end comes before its key.",
        only(attribute(0, "u64", u64(1), length=9)),
        "attribute_block",
        S + 4,
    )
    bad("D52", "zero", "Key 0.", only(attribute(0, "bytes", b"")), "attribute_key", S)
    bad("D52", "private", "Only the private bit.", only(attribute(0x4000, "bytes", b"")), "attribute_key", S)
    bad(
        "D52",
        "critical",
        "Only the critical bit: a reserved key, not an unknown one.",
        only(attribute(0x8000, "bytes", b"")),
        "attribute_key",
        S,
    )
    bad("D52", "both", "Only the two high bits.", only(attribute(0xC000, "bytes", b"")), "attribute_key", S)
    bad(
        "D52",
        "before-D53",
        "0x4000 after 0x4001: the reserved key comes before the order.",
        only(attribute(0x4001, "bytes", b""), attribute(0x4000, "bytes", b"")),
        "attribute_key",
        S + 8,
    )
    bad("D53", "same", "The same key twice.", only(empty, empty), "attribute_order", S + 8)
    bad("D53", "less", "A key below the one before.", only(attribute(3, "bytes", b""), empty), "attribute_order", S + 8)
    bad(
        "D53",
        "critical-first",
        "Critical keys have the larger numbers and come last.",
        only(attribute(0x8005, "u64", u64(1)), attribute(2, "text", b"llama")),
        "attribute_order",
        S + 16,
    )
    bad(
        "D53",
        "before-D54",
        "The order comes before the type.",
        only(empty, attribute(1, 9, b"")),
        "attribute_order",
        S + 8,
    )
    for kind in (0, 6, 7, 128, 255):
        bad(
            "D54",
            f"type-{kind}",
            f"There is no type {kind}, and later minors add none.",
            only(attribute(1, kind, bytes(8))),
            "attribute_type",
            S + 2,
        )
    bad(
        "D54",
        "before-D55",
        "The type comes before the reserved byte.",
        only(attribute(1, 0, b"", reserved=1)),
        "attribute_type",
        S + 2,
    )
    for value in (1, 128, 255):
        bad(
            "D55",
            f"value-{value}",
            f"The reserved byte is {value}.",
            only(attribute(1, "bytes", b"", reserved=value)),
            "attribute_reserved",
            S + 3,
        )
    bad(
        "D55",
        "before-D56",
        "The reserved byte comes before the unknown key.",
        only(attribute(0x8002, "bytes", b"", reserved=1)),
        "attribute_reserved",
        S + 3,
    )
    for key in (0x8002, 0x8007 + 2, 0x8FFF, 0xBFFF):
        bad(
            "D56",
            f"{key:04x}",
            f"Key {key:#06x} is critical and not registered.",
            only(attribute(key, "u64", u64(1))),
            "unsupported_attribute",
            S,
        )
    for key in (0xC001, 0xFFFF):
        bad(
            "D56",
            f"private-{key:04x}",
            f"Key {key:#06x} is critical and private.",
            only(attribute(key, "bytes", b"")),
            "unsupported_attribute",
            S,
        )
    bad(
        "D56",
        "registered-without-its-bit",
        "n_layer's number with the private bit is another key.",
        only(attribute(0xC005, "u64", u64(1))),
        "unsupported_attribute",
        S,
    )
    bad(
        "D56",
        "before-D58",
        "The unknown key comes before the length.",
        only(attribute(0x8002, "u64", b"")),
        "unsupported_attribute",
        S,
    )
    for size in (0, 7, 9, 16):
        for number in ("u64", "i64", "f64"):
            bad(
                "D58",
                f"{number}-{size}",
                f"A value of type {number} of {size} bytes.",
                only(attribute(1, number, bytes(size))),
                "attribute_length",
                S + 4,
            )
    bad(
        "D58",
        "before-D60",
        "The length comes before the padding.",
        only(attribute(1, "u64", bytes(7), padding=b"\1")),
        "attribute_length",
        S + 4,
    )
    for byte in (0x00, 0x0A, 0x1F, 0x7F, 0x80, 0xC3, 0xFF):
        bad(
            "D59",
            f"byte-{byte:02x}",
            f"Byte {byte:#04x} in a text.",
            only(attribute(1, "text", b"ab" + bytes([byte]))),
            "attribute_value",
            S + 10,
        )
    book.good(
        "D59", "sound", "The text that the ones before hold but for their last byte.", B((), (A(1, "text", b"abc"),))
    )
    bad(
        "D59",
        "first-of-two",
        "The first of two bytes is reported.",
        only(attribute(2, "text", b"a\nb\n")),
        "attribute_value",
        S + 9,
    )
    bad(
        "D59",
        "before-D60",
        "The text comes before its padding.",
        only(attribute(1, "text", b"\n", padding=b"\1" * 7)),
        "attribute_value",
        S + 8,
    )
    for place in (0, 6):
        pad = bytes(place) + b"\1" + bytes(6 - place)
        bad(
            "D60",
            f"byte-{place}",
            f"Byte {place} of the record's padding.",
            only(attribute(1, "bytes", b"a", padding=pad)),
            "record_padding",
            S + 9 + place,
        )
    bad(
        "D60",
        "text",
        "A text longer than it says.",
        only(attribute(1, "text", b"ab", length=1)),
        "record_padding",
        S + 9,
    )
    bad(
        "D70",
        "bytes-left",
        "8 bytes after the only record.",
        only(empty, bytes(8), attribute_count=1),
        "attribute_block",
        S + 8,
    )
    bad(
        "D70",
        "record-left",
        "A record that is not counted.",
        only(one, attribute(3, "u64", u64(1)), attribute_count=1),
        "attribute_block",
        S + 16,
    )
    bad("D70", "none-counted", "A record, but no attribute.", only(one, attribute_count=0), "attribute_block", S)


def registered(book: Book) -> None:
    good, bad = book.good, book.bad
    every = (
        A(0x0002, "text", b"llama"),
        A(0x0009, "bytes", bytes(range(32))),
        A(0x8001, "bytes", bytes(range(32, 64))),
        A(0x8003, "u64", u64(10)),
        A(0x8004, "u64", u64(20)),
        A(0x8005, "u64", u64(30)),
        A(0x8006, "u64", u64(3)),
        A(0x8007, "u64", u64(2)),
        A(0x8008, "bytes", bytes(range(64, 96))),
    )
    good("5.2", "every", "Every registered attribute.", B((T("residual", "f32", (3, 4), axis=0),), every))
    good("5.2", "empty-architecture", "A registered text may be empty.", B(attributes=(A(2, "text", b""),)))
    good(
        "5.2",
        "token-request",
        "A token request has 0 in layer_start and layer_end.",
        B((T("token_ids", "i32", (1,), axis=0),), (A(0x8003, "u64", u64(0)), A(0x8004, "u64", u64(0)))),
    )
    for item in every:
        other = "bytes" if item.type != "bytes" else "text"
        bad(
            "D57",
            f"{item.key:04x}-{other}",
            f"Key {item.key:#06x} is registered as {item.type}.",
            only(attribute(item.key, other, item.raw)),
            "attribute_type",
            S + 2,
        )
    bad(
        "D57",
        "u64-as-i64",
        "n_tokens as i64: as long, but another type.",
        only(attribute(0x8006, "i64", u64(3))),
        "attribute_type",
        S + 2,
    )
    bad(
        "D57",
        "before-D58",
        "The type comes before the length.",
        only(attribute(0x8006, "i64", b"")),
        "attribute_type",
        S + 2,
    )
    for key, name in ((0x0009, "recipe_fingerprint"), (0x8001, "model_fingerprint"), (0x8008, "contract_fingerprint")):
        for size in (0, 31, 33):
            bad(
                "D58",
                f"{name}-{size}",
                f"A {name} of {size} bytes.",
                only(attribute(key, "bytes", bytes(size))),
                "attribute_length",
                S + 4,
            )
    tokens = T("x", "f32", (3, 2), axis=0)
    good("5.2", "n_tokens", "n_tokens is the extent of the token axes.", B((tokens,), (A(0x8006, "u64", u64(3)),)))
    good(
        "5.2",
        "n_tokens-alone",
        "Without a token axis n_tokens may be anything.",
        B((T("x", "f32", (3, 2)),), (A(0x8006, "u64", u64(2**64 - 1)),)),
    )
    at = S + 32 + 8  # its value, after a record of 32 bytes
    for value in (0, 2, 4, 2**32 + 3, 2**64 - 1):
        bad(
            "D61",
            f"value-{value}",
            f"n_tokens is {value}, the token axis has 3.",
            B((tokens,), (A(0x8006, "u64", u64(value)),)).encode(),
            "token_count",
            at,
        )
    bad(
        "D61",
        "zero-tokens",
        "n_tokens is 3, the token axis has 0.",
        B((T("x", "f32", (0, 2), axis=0),), (A(0x8006, "u64", u64(3)),)).encode(),
        "token_count",
        at,
    )
    bad(
        "D61",
        "before-D70",
        "The token count comes before the block's end.",
        head(tokens.record(), attributes=[attribute(0x8006, "u64", u64(4)), bytes(8)], attribute_count=1),
        "token_count",
        at,
    )
