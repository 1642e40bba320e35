"""Tensor records: names, shapes, token axes, steps D10 to D40."""

from __future__ import annotations

from ..book import Book
from ..builder import A, B, T, attribute, end, head, record, u64

TITLE = "tensor records (specification, 3.1 and D10 to D40 of 6)"

Q = 64
R = Q + 32  # the first record; the one of `record()` is 24 bytes long
PLAIN = B((T("x"),))
REST = b"".join(PLAIN.fragments()) + PLAIN.end()
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/"
HUGE = {"dimension": 2**63 - 1, "payload_bytes": 2**63 - 1}


def make(book: Book) -> None:
    names(book)
    shapes(book)
    records(book)
    sizes(book)


def names(book: Book) -> None:
    good, bad = book.good, book.bad
    good("3.1", "name-1", "A name of one byte.", B((T("/"),)))
    good("3.1", "name-62", "A name of 62 bytes.", B((T("n" * 62),)))
    good("3.1", "name-63", "A name of 63 bytes.", B((T("n" * 63),)))
    for size in (7, 8, 9, 15, 16, 17):
        good("3.1", f"name-{size}", f"A name of {size} bytes: the record's padding follows.", B((T("n" * size),)))
    good("3.1", "alphabet", "Every byte that a name may hold.", B((T(ALPHABET[:33]), T(ALPHABET[33:]))))
    good(
        "3.1", "case", "Names differ by case, and one may begin with the other.", B((T("X"), T("x"), T("xx"), T(".x")))
    )
    good(
        "3.1",
        "each-begins-another",
        "Sixty-three names, of which each begins all that came before: a set of names that looks at hashes, or at "
        "beginnings, takes some for others.",
        B(tuple(T("n" * size, "u8", (0,)) for size in range(63, 0, -1))),
    )
    good(
        "3.1",
        "each-begins-another-few",
        "The same of sixteen names.",
        B(tuple(T("n" * size, "u8", (0,)) for size in range(16, 0, -1))),
    )
    good("3.1", "order", "The order of tensors is the producer's.", B((T("z"), T("a"), T("m"))))
    # Every neighbour of the alphabet's ranges, and what text handling trips over.
    for byte in (
        0x00,
        0x09,
        0x0A,
        0x1F,
        0x20,
        0x25,
        0x2C,
        0x3A,
        0x40,
        0x5B,
        0x5C,
        0x5E,
        0x60,
        0x7B,
        0x7F,
        0x80,
        0xC3,
        0xFF,
    ):
        bad(
            "D27",
            f"byte-{byte:02x}",
            f"Byte {byte:#04x} in a name.",
            head(record(b"a" + bytes([byte]) + b"b")) + REST,
            "tensor_name",
            R + 17,
        )
    bad(
        "D27",
        "first-of-two",
        "The first of two bytes is reported.",
        head(record(b"ab\0c\0")) + REST,
        "tensor_name",
        R + 18,
    )
    bad("D27", "last", "The last of 63 bytes.", head(record(b"a" * 62 + b" ")) + REST, "tensor_name", R + 16 + 62)
    bad(
        "D27",
        "before-D28",
        "The name comes before its padding.",
        head(record(b" ", padding=b"\1" * 7)) + REST,
        "tensor_name",
        R + 16,
    )
    for place in (0, 3, 6):
        pad = bytes(place) + b"\1" + bytes(6 - place)
        bad(
            "D28",
            f"byte-{place}",
            f"Byte {place} of the record's padding.",
            head(record(padding=pad)) + REST,
            "record_padding",
            R + 17 + place,
        )
    bad(
        "D28",
        "letter",
        "A name longer than it says: what is left of it is padding.",
        head(record(b"xy", name_length=1)) + REST,
        "record_padding",
        R + 17,
    )
    bad(
        "D28",
        "before-D29",
        "The padding comes before the second use of a name.",
        head(record(), record(padding=bytes(6) + b"\1")),
        "record_padding",
        R + 24 + 23,
    )
    double = B((T("x"), T("x")))
    bad("D29", "same-name", "Two tensors of one name.", double.encode(), "tensor_duplicate", R + 24 + 16)
    bad(
        "D29",
        "not-neighbours",
        "Another tensor between the two.",
        B((T("x"), T("y"), T("x"))).encode(),
        "tensor_duplicate",
        R + 48 + 16,
    )
    bad(
        "D29",
        "after-another",
        "Not the first tensor's name.",
        B((T("a"), T("b"), T("b"))).encode(),
        "tensor_duplicate",
        R + 48 + 16,
    )
    bad(
        "D29", "long", "Two names of 63 bytes.", B((T("n" * 63), T("n" * 63))).encode(), "tensor_duplicate", R + 80 + 16
    )
    bad(
        "D29",
        "other-shape",
        "Another dtype and shape do not help.",
        B((T("x"), T("x", "u8", (2, 2)))).encode(),
        "tensor_duplicate",
        R + 24 + 24,
    )
    bad(
        "D29",
        "before-D30",
        "The name comes before the token count.",
        head(record(axis=0), record(dims=(4,), axis=0)),
        "tensor_duplicate",
        R + 40,
    )


def shapes(book: Book) -> None:
    good, bad = book.good, book.bad
    for rank in range(9):
        shape = (2, 3, 1, 2, 1, 3, 1, 2)[:rank]
        good("3.1", f"rank-{rank}", f"Rank {rank}.", B((T("x", "i16", shape),)))
    for rank in range(1, 9):
        tensors = tuple(
            T(f"zero-{place}", "f32", tuple(0 if axis == place else 3 for axis in range(rank))) for place in range(rank)
        )
        good(
            "3.1",
            f"zero-dimension-rank-{rank}",
            f"Rank {rank} with a dimension of 0 in each place: zero bytes, no fragment.",
            B(tensors),
        )
    good("3.1", "zero-dimensions-all", "Every dimension is 0.", B((T("x", "f32", (0,) * 8),)))
    good(
        "3.1",
        "zero-dimension-fragmented",
        "Zero bytes with a fragment size: still no fragment.",
        B((T("x", "f32", (0, 5)), T("y", "u8", (65,))), fragment_size=64),
    )
    good(
        "3.1",
        "zero-dimension-between",
        "A tensor of zero bytes between two others: core order steps over it.",
        B((T("a"), T("b", "f32", (0,)), T("c"))),
    )
    good(
        "3.1",
        "zero-dimension-last",
        "Tensors of zero bytes first and last.",
        B((T("a", "f32", (0,)), T("b"), T("c", "u8", (2, 0)))),
    )
    good(
        "3.1",
        "ones",
        "Dimensions of 1 are dimensions.",
        B((T("x", "f32", (1, 1, 1)), T("y", "f32", (1,)), T("z", "f32", ()))),
    )
    good(
        "3.1",
        "one-name-many-dtypes",
        "Every dtype but one in a bundle.",
        B(
            tuple(
                T(d, d, (2,))
                for d in (
                    "f64",
                    "f32",
                    "f16",
                    "bf16",
                    "f8_e4m3fn",
                    "f8_e5m2",
                    "i8",
                    "i16",
                    "i32",
                    "i64",
                    "u8",
                    "u16",
                    "u32",
                    "u64",
                    "bool",
                )
            )
        ),
    )

    for rank, axis in ((1, 0), (2, 0), (2, 1), (3, 1), (8, 0), (8, 7)):
        shape = tuple(3 if place == axis else 1 for place in range(rank))
        good(
            "3.1",
            f"token-axis-{axis}-of-{rank}",
            f"Token axis {axis} of rank {rank}.",
            B((T("x", "f32", shape, axis=axis),)),
        )
    good(
        "3.1",
        "token-axis-zero",
        "A token axis of extent 0.",
        B((T("x", "f32", (0, 4), axis=0), T("y", "i32", (4, 0), axis=1)), (A(0x8006, "u64", u64(0)),)),
    )
    good(
        "3.1",
        "token-axes",
        "Token axes in different places, of one extent, beside tensors without.",
        B(
            (
                T("a", "f32", (3, 2), axis=0),
                T("b", "i32", (4, 3), axis=1),
                T("c", "u32", (4,)),
                T("d", "bool", (3,), axis=0),
            )
        ),
    )
    for rank, axis in ((0, 0), (1, 1), (1, 2), (2, 254), (8, 8)):
        shape = (1,) * rank
        bad(
            "D17",
            f"axis-{axis}-of-{rank}",
            f"Token axis {axis} of rank {rank}.",
            head(record(dims=shape, axis=axis)) + B((T("x", "f32", shape),)).fragments()[0] + end(1, 4),
            "tensor_token_axis",
            R + 3,
        )
    bad(
        "D17",
        "before-D18",
        "The token axis comes before the reserved bytes.",
        head(record(axis=1, reserved=b"\1\0\0")),
        "tensor_token_axis",
        R + 3,
    )
    uneven = B((T("a", "f32", (3,), axis=0), T("b", "f32", (4, 2), axis=0)))
    bad("D30", "extents", "Token axes of 3 and 4.", uneven.encode(), "token_count", R + 24 + 8)
    bad(
        "D30",
        "second-dimension",
        "The offset is that of the dimension.",
        B((T("a", "f32", (3,), axis=0), T("b", "f32", (3, 2), axis=1))).encode(),
        "token_count",
        R + 24 + 16,
    )
    bad(
        "D30",
        "not-neighbours",
        "A tensor without token axis between the two.",
        B((T("a", "f32", (3,), axis=0), T("b", "f32", (7,)), T("c", "f32", (5,), axis=0))).encode(),
        "token_count",
        R + 48 + 8,
    )
    bad(
        "D30",
        "first-is-zero",
        "An extent of 0 is an extent.",
        B((T("a", "f32", (0,), axis=0), T("b", "f32", (1,), axis=0))).encode(),
        "token_count",
        R + 24 + 8,
    )
    bad(
        "D30",
        "second-is-zero",
        "In a later tensor too.",
        B((T("a", "f32", (3,), axis=0), T("b", "f32", (0,), axis=0))).encode(),
        "token_count",
        R + 24 + 8,
    )
    bad(
        "D30",
        "before-D40",
        "The token count comes before the table's end.",
        head(record(axis=0), record("y", dims=(4,), axis=0), bytes(8), tensor_count=2),
        "token_count",
        R + 32,
    )


def records(book: Book) -> None:
    bad = book.bad
    empty = attribute(1, "bytes", b"")
    bad("D10", "none", "One tensor declared, no record.", head(tensor_count=1) + end(), "tensor_table", R)
    bad(
        "D10", "two-for-one", "Two declared, one record.", head(record(), tensor_count=2) + REST, "tensor_table", R + 24
    )
    bad(
        "D10",
        "into-the-attributes",
        "The attribute block is no record: read as one, its name would be empty.",
        head(record(), tensor_count=2, attributes=[empty]) + REST,
        "tensor_table",
        R + 24,
    )
    bad(
        "D10",
        "before-D11",
        "The attribute block is no record: read as one, its rank would be too large.",
        head(record(), tensor_count=2, attributes=[attribute(1, 9, bytes(8))]),
        "tensor_table",
        R + 24,
    )
    for rank in (9, 10, 255):
        bad(
            "D11",
            f"rank-{rank}",
            f"Rank {rank}.",
            head(record(dims=(1,) * rank, dtype="u8")) + end(),
            "limit_rank",
            R + 2,
        )
    bad(
        "D11",
        "before-D12",
        "The rank comes before the name's length.",
        head(record(b"a" * 64, dims=(1,) * 9)),
        "limit_rank",
        R + 2,
    )
    for size in (64, 65, 255):
        bad("D12", f"name-{size}", f"A name of {size} bytes.", head(record(b"a" * size)) + REST, "limit_name", R + 4)
    bad(
        "D12",
        "before-D14",
        "The name's length comes before the record's end.",
        head(record(name_length=255)),
        "limit_name",
        R + 4,
    )
    bad("D13", "no-name", "A name of no bytes.", head(record(b"")) + REST, "tensor_name", R + 4)
    bad(
        "D13",
        "before-D14",
        "An empty name comes before the record's end.",
        head(record(rank=8, name_length=0)),
        "tensor_name",
        R + 4,
    )
    bad(
        "D13",
        "eight-bytes",
        "A record of 8 bytes that fills its table: D10 lets it pass.",
        head(record(b"", ())) + end(),
        "tensor_name",
        R + 4,
    )
    bad("D14", "rank", "One dimension more than there is.", head(record(rank=2)) + REST, "tensor_table", R)
    bad(
        "D14",
        "name",
        "A name of 9 bytes where the table has room for 8.",
        head(record(name_length=9)) + REST,
        "tensor_table",
        R,
    )
    bad(
        "D14",
        "padding",
        "A name of 9 bytes needs padding; an attribute stands in its place.",
        head(record(b"abcdefgh", name_length=9), attributes=[attribute(0x61, "bytes", b"")]) + REST,
        "tensor_table",
        R,
    )
    bad(
        "D14",
        "into-the-attributes",
        "Dimensions may not reach into the attribute block.",
        head(record(rank=2), attributes=[empty]) + REST,
        "tensor_table",
        R,
    )
    bad(
        "D14",
        "before-D15",
        "The record's end comes before its dtype.",
        head(record(rank=2, dtype=0)),
        "tensor_table",
        R,
    )
    for code in (0, 7, 15, 20, 23, 28, 31, 33, 63, 65, 128, 255):
        bad(
            "D15",
            f"code-{code}",
            f"No dtype has the code {code}.",
            head(record(dtype=code)) + REST,
            "unsupported_dtype",
            R,
        )
    bad(
        "D15",
        "before-D16",
        "The dtype comes before the byte order.",
        head(record(dtype=0, order=0)),
        "unsupported_dtype",
        R,
    )
    for order in (0, 3, 255):
        bad(
            "D16",
            f"order-{order}",
            f"Byte order {order}.",
            head(record(order=order)) + REST,
            "tensor_byte_order",
            R + 1,
        )
    for dtype in ("f8_e4m3fn", "f8_e5m2", "i8", "u8", "bool"):
        tensor = T("x", dtype, (3,))
        bad(
            "D16",
            f"big-{dtype}",
            f"{dtype} has one byte an element and one legal byte order.",
            head(record(dtype=dtype, order=2)) + B((tensor,)).fragments()[0] + end(1, 3),
            "tensor_byte_order",
            R + 1,
        )
    blocks = B((T("x", "q8_0", (32,)),)).fragments()[0]
    bad(
        "D16",
        "big-q8_0",
        "Block-quantised dtypes are little-endian.",
        head(record(dtype="q8_0", dims=(32,), order=2)) + blocks + end(1, 34),
        "tensor_byte_order",
        R + 1,
    )
    bad(
        "D16",
        "before-D17",
        "The byte order comes before the token axis.",
        head(record(order=0, axis=1)),
        "tensor_byte_order",
        R + 1,
    )
    for place in range(3):
        zeros = bytes(place) + b"\x80" + bytes(2 - place)
        bad(
            "D18",
            f"byte-{5 + place}",
            f"Byte {5 + place} of a record; the offset is that of the field.",
            head(record(reserved=zeros)) + REST,
            "tensor_reserved",
            R + 5,
        )
    bad(
        "D18",
        "before-D19",
        "Reserved bytes come before the dimensions.",
        head(record(reserved=b"\0\0\1", dims=(2**31,))),
        "tensor_reserved",
        R + 5,
    )
    bad(
        "D40",
        "bytes-left",
        "8 bytes after the only record.",
        head(record(), bytes(8), tensor_count=1) + REST,
        "tensor_table",
        R + 24,
    )
    bad(
        "D40",
        "record-left",
        "A record that is not counted.",
        head(record(), record("y"), tensor_count=1) + REST,
        "tensor_table",
        R + 24,
    )
    bad("D40", "none-counted", "A record, but no tensor.", head(record(), tensor_count=0) + end(), "tensor_table", R)
    bad(
        "D40",
        "before-D50",
        "The tensor table comes before the attributes.",
        head(bytes(8), tensor_count=0, attributes=[bytes(8)]),
        "tensor_table",
        R,
    )


def sizes(book: Book) -> None:
    good, bad = book.good, book.bad
    bad(
        "D19",
        "first-of-two",
        "The first of two dimensions is reported.",
        head(record(dims=(1, 2**31, 2**63))),
        "limit_dimension",
        R + 16,
    )
    bad(
        "D19",
        "after-the-largest",
        "A dimension at the limit is not the one that is over it.",
        head(record(dims=(2**31 - 1, 2**31))),
        "limit_dimension",
        R + 16,
    )
    bad("D19", "2^63-by-0", "2^63 by 0.", head(record(dims=(2**63, 0))) + end(), "limit_dimension", R + 8)
    bad(
        "D19",
        "0-by-2^63",
        "0 by 2^63 gets the same answer.",
        head(record(dims=(0, 2**63))) + end(),
        "limit_dimension",
        R + 16,
    )
    bad(
        "D19",
        "2^64-1",
        "A dimension that is -1 to who reads it as signed.",
        head(record(dims=(2**64 - 1,), dtype="u8")),
        "limit_dimension",
        R + 8,
    )
    bad(
        "D19",
        "before-D20",
        "Dimensions come before blocks.",
        head(record(dtype="q8_0", dims=(2**31 + 1,))),
        "limit_dimension",
        R + 8,
    )
    bad(
        "D20", "scalar", "A block-quantised scalar.", head(record(dtype="q8_0", dims=())) + end(), "tensor_block", R + 2
    )
    for size in (1, 31, 33, 34, 63):
        bad(
            "D21",
            f"inner-{size}",
            f"An innermost dimension of {size} is no multiple of 32.",
            head(record(dtype="q8_0", dims=(64, size))) + end(),
            "tensor_block",
            R + 16,
        )
    bad(
        "D21",
        "outer-divides",
        "That the outer dimension divides does not help.",
        head(record(dtype="q8_0", dims=(32, 16))) + B((T("x", "q8_0", (512,)),)).fragments()[0] + end(1, 544),
        "tensor_block",
        R + 16,
    )
    bad(
        "D21",
        "before-D22",
        "The block comes before the token axis.",
        head(record(dtype="q8_0", dims=(33,), axis=0)),
        "tensor_block",
        R + 8,
    )
    inner = B((T("x", "q8_0", (2, 32)),))
    bad(
        "D22",
        "innermost",
        "The token axis of a block-quantised tensor is not innermost.",
        head(record(dtype="q8_0", dims=(2, 32), axis=1)) + inner.fragments()[0] + end(1, 68),
        "tensor_token_axis",
        R + 3,
    )
    bad(
        "D22",
        "rank-1",
        "So a block-quantised tensor of rank 1 has none.",
        head(record(dtype="q8_0", dims=(32,), axis=0)) + B((T("x", "q8_0", (32,)),)).fragments()[0] + end(1, 34),
        "tensor_token_axis",
        R + 3,
    )
    bad(
        "D22",
        "before-D23",
        "The token axis comes before the size.",
        head(record(dtype="q8_0", dims=(2**31 - 1, 2**31 - 32), axis=1)),
        "tensor_token_axis",
        R + 3,
    )
    bad(
        "D23",
        "2^17-by-0-by-2^17",
        "Zero dimensions count as 1.",
        head(record(dims=(2**17, 0, 2**17))) + end(),
        "limit_payload_bytes",
        R + 8,
    )
    bad(
        "D23",
        "zero-first",
        "The same with the 0 in front.",
        head(record(dims=(0, 2**17, 2**17))) + end(),
        "limit_payload_bytes",
        R + 8,
    )
    bad(
        "D23",
        "zero-last",
        "The same with the 0 behind.",
        head(record(dims=(2**17, 2**17, 0))) + end(),
        "limit_payload_bytes",
        R + 8,
    )
    bad(
        "D23",
        "wraps-64",
        "2^67 bytes.",
        head(record(dims=(2**30, 2**30, 16), dtype="f64")),
        "limit_payload_bytes",
        R + 8,
    )
    bad(
        "D23",
        "wraps-to-zero",
        "2^64 bytes, which wraps to 0, with a 0 besides.",
        head(record(dims=(2**30, 2**30, 16, 0), dtype="u8")) + end(),
        "limit_payload_bytes",
        R + 8,
    )
    bad(
        "D23",
        "eight-large",
        "Eight dimensions of 2^31 - 1.",
        head(record(dims=(2**31 - 1,) * 8, dtype="u8")),
        "limit_payload_bytes",
        R + 8,
    )
    for slug, dims in (("first", (2**40, 2**40, 1)), ("between", (1, 2**40, 2**40, 1, 1))):
        bad(
            "D23",
            f"wraps-{slug}",
            "2^80 elements at the largest limits, and dimensions of 1 behind them, which fit again.",
            head(record(dims=dims)) + end(),
            "limit_payload_bytes",
            R + 8,
            limits=HUGE,
            flags=["address_64"],
        )
    bad(
        "D23",
        "max-by-0",
        "2^63 - 1 by 0 elements of 8 bytes at the largest limits.",
        head(record(dims=(2**63 - 1, 0), dtype="f64")) + end(),
        "limit_payload_bytes",
        R + 8,
        limits=HUGE,
        flags=["address_64"],
    )
    bad(
        "D23",
        "0-by-max",
        "0 by 2^63 - 1 gets the same answer.",
        head(record(dims=(0, 2**63 - 1), dtype="f64")) + end(),
        "limit_payload_bytes",
        R + 8,
        limits=HUGE,
        flags=["address_64"],
    )
    good(
        "D23",
        "largest-by-0",
        "2^63 - 1 by 0 bytes at the largest limits.",
        B((T("x", "u8", (2**63 - 1, 0)),)),
        limits=HUGE,
        flags=["address_64"],
    )
    good(
        "D23",
        "0-by-largest",
        "0 by 2^63 - 1 bytes at the largest limits.",
        B((T("x", "u8", (0, 2**63 - 1)),)),
        limits=HUGE,
        flags=["address_64"],
    )
    bad(
        "D23",
        "blocks",
        "Three blocks are 102 bytes.",
        head(record(dtype="q8_0", dims=(3, 32))),
        "limit_payload_bytes",
        R + 8,
        limits={"payload_bytes": 101},
    )
    bad(
        "D23",
        "empty-row",
        "q8_0 [2, 0]: with 0 counted as 1 two elements, rounded up to one block of 34 bytes.",
        B((T("x", "q8_0", (2, 0)),)).encode(),
        "limit_payload_bytes",
        R + 8,
        limits={"payload_bytes": 33},
    )
    good(
        "D23",
        "empty-row-fits",
        "The same within the limit.",
        B((T("x", "q8_0", (2, 0)),)),
        limits={"payload_bytes": 34},
    )
    bad(
        "D23",
        "empty-rows",
        "q8_0 [33, 0]: 33 elements are two blocks of the whole product, not 33 of a row each.",
        B((T("x", "q8_0", (33, 0)),)).encode(),
        "limit_payload_bytes",
        R + 8,
        limits={"payload_bytes": 67},
    )
    good(
        "D23",
        "empty-rows-fit",
        "The same within the limit.",
        B((T("x", "q8_0", (33, 0)),)),
        limits={"payload_bytes": 68},
    )
    bad(
        "D23",
        "before-D24",
        "One tensor's size comes before the sum.",
        B((T("x"), T("y"))).head(),
        "limit_payload_bytes",
        R + 8,
        limits={"payload_bytes": 11},
    )
    good(
        "D24",
        "zeros-are-nothing",
        "In the sum a tensor with a zero dimension is 0 bytes, though D23 counts it as 12.",
        B((T("x"), T("y", "f32", (0, 3)), T("z", "f32", (3, 0)))),
        limits={"payload_bytes": 12},
    )
    bad(
        "D24",
        "default",
        "Twice 2^33 - 4 bytes, then 12: the third tensor is over the default.",
        head(record(dims=(2**31 - 1,)), record("y", dims=(2**31 - 1,)), record("z")),
        "limit_payload_bytes",
        R + 56,
        flags=["address_64"],
    )
    bad(
        "D24",
        "wraps",
        "A sum that wraps 63 and 64 bits at the largest limits.",
        head(
            record(dims=(2**63 - 1,), dtype="u8"),
            record("y", dims=(2**63 - 1,), dtype="u8"),
            record("z", dims=(2,), dtype="u8"),
        ),
        "limit_payload_bytes",
        R + 32,
        limits=HUGE,
        flags=["address_64"],
    )
    bad(
        "D24",
        "before-D25",
        "The sum comes before the fragment size.",
        head(record(dims=(3,)), record("y", dims=(32,), dtype="q8_0"), fragment_size=64),
        "limit_payload_bytes",
        R + 32,
        limits={"payload_bytes": 45},
    )
    for size in (64, 128, 1024, 1152):
        bad(
            "D25",
            f"size-{size}",
            f"A fragment size of {size} is no multiple of 34.",
            B((T("x", "q8_0", (2, 32)),), fragment_size=size).encode(),
            "fragment_size",
            Q + 16,
        )
    bad(
        "D25",
        "zero-bytes",
        "Also for a q8_0 tensor of zero bytes.",
        B((T("x", "q8_0", (0,)),), fragment_size=64).encode(),
        "fragment_size",
        Q + 16,
    )
    bad(
        "D25",
        "second-tensor",
        "The dtype of every tensor counts.",
        B((T("x"), T("y", "q8_0", (32,))), fragment_size=64).encode(),
        "fragment_size",
        Q + 16,
    )
    good(
        "D25",
        "q8_0-1088",
        "1088 is the least fragment size that q8_0 allows.",
        B((T("x", "q8_0", (33, 32)),), fragment_size=1088),
    )
    good("D25", "q8_0-unfragmented", "0 asks nothing of a dtype.", B((T("x", "q8_0", (33, 32)),)))
    bad(
        "D25",
        "before-D26",
        "The multiple comes before the number of fragments.",
        B((T("x"), T("y", "q8_0", (32,))), fragment_size=64).head(),
        "fragment_size",
        Q + 16,
        limits={"fragments": 1},
    )
    bad(
        "D26",
        "before-D27",
        "The number of fragments comes before the name.",
        head(record(), record(b"?")),
        "limit_fragments",
        Q + 16,
        limits={"fragments": 1},
    )
    good(
        "D26",
        "zeros-are-nothing",
        "A tensor of zero bytes has no fragment.",
        B((T("x"), T("y", "f32", (0,)), T("z", "f32", (0, 2)))),
        limits={"fragments": 1},
    )
