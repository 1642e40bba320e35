"""Every limit at one less, exact and one more, lowered and as it is by default."""

from __future__ import annotations

from ..book import Book
from ..builder import A, B, T, end, frame, head, record, u64

TITLE = "limits at minus one, exact and plus one (specification, 7)"

Q = 64
R = Q + 32
WIDE = ["address_64"]


def make(book: Book) -> None:
    good, bad = book.good, book.bad
    plain = B((T("x"),))
    h, f, e = plain.head(), plain.fragments()[0], plain.end()

    # head_bytes: the plain head's body has 56
    good("B10", "lowered-exact", "A head body of 56 bytes, limit 56.", plain, limits={"head_bytes": 56})
    good("B10", "lowered-minus-one", "One less than the limit (in steps of 8).", plain, limits={"head_bytes": 64})
    bad(
        "B10",
        "lowered-plus-one",
        "8 more than the limit.",
        plain.encode(),
        "limit_head_bytes",
        24,
        limits={"head_bytes": 48},
    )
    bad(
        "B10",
        "lowered-between",
        "The limit itself need be no multiple of 8.",
        plain.encode(),
        "limit_head_bytes",
        24,
        limits={"head_bytes": 55},
    )
    bad(
        "B10",
        "zero",
        "A limit of 0 refuses every head.",
        plain.encode(),
        "limit_head_bytes",
        24,
        limits={"head_bytes": 0},
    )
    bad(
        "truncated",
        "head-bytes-exact",
        "A head body of exactly 2^20 bytes passes B10; then the input ends.",
        frame(0x81, length=2**20),
        "truncated",
        64,
    )
    note = A(1, "bytes", bytes(65_520))
    good(
        "B10",
        "raised",
        "A head of over 2^20 bytes under a raised limit.",
        B(attributes=(A(1, "bytes", bytes(2**20)),)),
        limits={"head_bytes": 2**21, "attribute_bytes": 2**21},
    )

    # tensors
    several = B(tuple(T(f"t{i}", "u8", (0,)) for i in range(3)))
    good("D4", "lowered-minus-one", "Three tensors, limit 4.", several, limits={"tensors": 4})
    good("D4", "lowered-exact", "Three tensors, limit 3.", several, limits={"tensors": 3})
    bad(
        "D4",
        "lowered-plus-one",
        "Three tensors, limit 2.",
        several.encode(),
        "limit_tensors",
        Q + 4,
        limits={"tensors": 2},
    )
    bad("D4", "zero", "A limit of 0 refuses a tensor.", plain.encode(), "limit_tensors", Q + 4, limits={"tensors": 0})
    good("D4", "zero-none", "And no bundle without tensors.", B(), limits={"tensors": 0})
    for count in (255, 256):
        good(
            "D4",
            f"default-{count}",
            f"{count} tensors under the default limit of 256.",
            B(tuple(T(f"{i:03}", "u8", (0,)) for i in range(count))),
        )
    more = B(tuple(T(f"{i:03}", "u8", (0,)) for i in range(257)))
    bad("D4", "default-257", "257 tensors, all there.", more.encode(), "limit_tensors", Q + 4)
    good("D4", "raised", "The same under a raised limit.", more, limits={"tensors": 257})

    # name_bytes
    named = B((T("abc"),))
    good("D12", "lowered-minus-one", "A name of 3 bytes, limit 4.", named, limits={"name_bytes": 4})
    good("D12", "lowered-exact", "A name of 3 bytes, limit 3.", named, limits={"name_bytes": 3})
    bad(
        "D12",
        "lowered-plus-one",
        "A name of 3 bytes, limit 2.",
        named.encode(),
        "limit_name",
        R + 4,
        limits={"name_bytes": 2},
    )

    # rank
    cube = B((T("x", "u8", (1, 2, 3)),))
    good("D11", "lowered-minus-one", "Rank 3, limit 4: what a consumer built on ggml sets.", cube, limits={"rank": 4})
    good("D11", "lowered-exact", "Rank 3, limit 3.", cube, limits={"rank": 3})
    bad("D11", "lowered-plus-one", "Rank 3, limit 2.", cube.encode(), "limit_rank", R + 2, limits={"rank": 2})
    bad(
        "D11",
        "ggml",
        "Rank 5 for a consumer that holds 4 dimensions.",
        B((T("x", "u8", (1,) * 5),)).encode(),
        "limit_rank",
        R + 2,
        limits={"rank": 4},
    )
    good("D11", "zero", "A limit of 0 lets scalars pass.", B((T("x", "u8", ()),)), limits={"rank": 0})

    # dimension
    for size, outcome in ((4, "minus-one"), (5, "exact")):
        good(
            "D19",
            f"lowered-{outcome}",
            f"A dimension of {size}, limit 5.",
            B((T("x", "u8", (2, size)),)),
            limits={"dimension": 5},
        )
    bad(
        "D19",
        "lowered-plus-one",
        "A dimension of 6, limit 5.",
        B((T("x", "u8", (2, 6)),)).encode(),
        "limit_dimension",
        R + 16,
        limits={"dimension": 5},
    )
    for size, outcome in ((2**31 - 2, "minus-one"), (2**31 - 1, "exact")):
        good(
            "D19",
            f"default-{outcome}",
            f"A dimension of {size} beside a 0 under the default limit.",
            B((T("x", "u8", (size, 0)),)),
            else_error=("limit_payload_bytes", R + 8),
        )
    bad(
        "D19",
        "default-plus-one",
        "A dimension of 2^31 beside a 0.",
        B((T("x", "u8", (2**31, 0)),)).encode(),
        "limit_dimension",
        R + 8,
    )
    bad(
        "D19",
        "default-plus-one-bytes",
        "A dimension of 2^31 whose bytes would be within the limit.",
        head(record(dims=(2**31,), dtype="u8")) + end(),
        "limit_dimension",
        R + 8,
    )
    bad(
        "D19",
        "maximum-plus-one",
        "2^63 is over the largest limit.",
        B((T("x", "u8", (0, 2**63)),)).encode(),
        "limit_dimension",
        R + 16,
        limits={"dimension": 2**63 - 1, "payload_bytes": 2**63 - 1},
        flags=WIDE,
    )

    # payload_bytes, of one tensor and of all; 2^34 - 1 and 2^34 + 1 in dimensions below 2^31
    good("D23", "lowered-minus-one", "12 bytes, limit 13.", plain, limits={"payload_bytes": 13})
    good("D23", "lowered-exact", "12 bytes, limit 12.", plain, limits={"payload_bytes": 12})
    bad(
        "D23",
        "lowered-plus-one",
        "12 bytes, limit 11.",
        plain.encode(),
        "limit_payload_bytes",
        R + 8,
        limits={"payload_bytes": 11},
    )
    empty = B((T("x", "f32", (3, 0)),))
    good(
        "D23",
        "lowered-exact-by-0",
        "f32 [3, 0] counts as 12 bytes here, limit 12.",
        empty,
        limits={"payload_bytes": 12},
    )
    bad(
        "D23",
        "lowered-plus-one-by-0",
        "f32 [3, 0], limit 11.",
        empty.encode(),
        "limit_payload_bytes",
        R + 8,
        limits={"payload_bytes": 11},
    )
    good(
        "D23",
        "default-minus-one",
        "2^34 - 1 bytes beside a 0 under the default limit.",
        B((T("x", "u8", (131_071, 0, 131_073)),)),
        else_error=("limit_payload_bytes", R + 8),
        flags=WIDE,
    )
    good(
        "D23",
        "default-exact",
        "2^34 bytes beside a 0 under the default limit.",
        B((T("x", "u8", (2**17, 2**17, 0)),)),
        else_error=("limit_payload_bytes", R + 8),
        flags=WIDE,
    )
    bad(
        "D23",
        "default-plus-one",
        "2^34 + 1 bytes beside a 0.",
        B((T("x", "u8", (0, 685, 25_080_101)),)).encode(),
        "limit_payload_bytes",
        R + 8,
    )
    pair = B((T("x"), T("y", "u8", (5,))))
    good("D24", "lowered-minus-one", "12 and 5 bytes, limit 18.", pair, limits={"payload_bytes": 18})
    good("D24", "lowered-exact", "12 and 5 bytes, limit 17.", pair, limits={"payload_bytes": 17})
    bad(
        "D24",
        "lowered-plus-one",
        "12 and 5 bytes, limit 16.",
        pair.encode(),
        "limit_payload_bytes",
        R + 32,
        limits={"payload_bytes": 16},
    )

    # attribute_bytes
    small = B(attributes=(A(1, "bytes", bytes(8)),))
    good("D5", "lowered-minus-one", "16 attribute bytes, limit 17.", small, limits={"attribute_bytes": 17})
    good("D5", "lowered-exact", "16 attribute bytes, limit 16.", small, limits={"attribute_bytes": 16})
    bad(
        "D5",
        "lowered-plus-one",
        "16 attribute bytes, limit 15.",
        small.encode(),
        "limit_attribute_bytes",
        Q + 12,
        limits={"attribute_bytes": 15},
    )
    good("D5", "default-minus-one", "65,528 attribute bytes under the default limit.", B(attributes=(note,)))
    large = A(1, "bytes", bytes(65_528))
    good("D5", "default-exact", "65,536 attribute bytes.", B(attributes=(large,)))
    bad(
        "D5",
        "default-plus-one",
        "65,544 attribute bytes, all there.",
        B(attributes=(large, A(3, "bytes", b""))).encode(),
        "limit_attribute_bytes",
        Q + 12,
    )

    # fragments
    three = B((T("x", "u8", (65,)), T("y", "u8", (1,))), fragment_size=64)
    good("D26", "lowered-minus-one", "Three fragments, limit 4.", three, limits={"fragments": 4})
    good("D26", "lowered-exact", "Three fragments, limit 3.", three, limits={"fragments": 3})
    bad(
        "D26",
        "lowered-plus-one",
        "Three fragments, limit 2: the second tensor is over it.",
        three.encode(),
        "limit_fragments",
        Q + 16,
        limits={"fragments": 2},
    )
    bad(
        "D26",
        "unfragmented",
        "Three tensors of one fragment each, limit 2.",
        B((T("x"), T("y"), T("z"))).encode(),
        "limit_fragments",
        Q + 16,
        limits={"fragments": 2},
    )
    bad(
        "D26",
        "one-tensor",
        "Two fragments of one tensor, limit 1.",
        B((T("x", "u8", (65,)),), fragment_size=64).encode(),
        "limit_fragments",
        Q + 16,
        limits={"fragments": 1},
    )
    good(
        "D26",
        "one-tensor-exact",
        "64 bytes are one fragment of 64.",
        B((T("x", "u8", (64,)),), fragment_size=64),
        limits={"fragments": 1},
    )
    bad(
        "truncated",
        "fragments-exact",
        "2^20 fragments pass D26; then the input ends.",
        head(record(dims=(2**26,), dtype="u8"), fragment_size=64),
        "truncated",
        128,
    )
    bad(
        "D26",
        "default-plus-one",
        "2^20 + 1 fragments.",
        head(record(dims=(2**26 + 1,), dtype="u8"), fragment_size=64),
        "limit_fragments",
        Q + 16,
    )

    huge = {"dimension": 2**63 - 1, "payload_bytes": 2**63 - 1, "fragments": 2**32 - 1}
    bad(
        "D26",
        "wraps-32",
        "2^32 + 1 fragments at the largest limits.",
        head(record(dims=(2**38 + 1,), dtype="u8"), fragment_size=64),
        "limit_fragments",
        Q + 16,
        limits=huge,
        flags=WIDE,
    )
    # open_bundles
    for count in (15, 16):
        opened = tuple(B((T("x"),), number=i) for i in range(count))
        good(
            "B15",
            f"default-{count}",
            f"Stream: {count} bundles open at once under the default limit of 16.",
            *opened,
            data=b"".join(b.head() for b in opened) + b"".join(b.fragments()[0] + b.end() for b in opened),
            cls="stream",
        )
    heads = b"".join(B((T("x"),), number=i).head() for i in range(17))
    bad(
        "B15", "default-17", "Stream: a 17th.", heads, "limit_open_bundles", 16 * 128 + 16, cls="stream", flags=["many"]
    )
    a, b, c = (B((T("x"),), number=i) for i in range(3))
    both = (
        a.head()
        + b.head()
        + a.fragments()[0]
        + a.end()
        + c.head()
        + b.fragments()[0]
        + b.end()
        + c.fragments()[0]
        + c.end()
    )
    good(
        "B15",
        "lowered-exact",
        "Stream: two open, limit 2; a third after the first has ended.",
        a,
        b,
        c,
        data=both,
        cls="stream",
        limits={"open_bundles": 2},
    )
    bad(
        "B15",
        "lowered-plus-one",
        "Stream: two open, limit 1.",
        both,
        "limit_open_bundles",
        128 + 16,
        cls="stream",
        limits={"open_bundles": 1},
    )
    bad(
        "B15",
        "zero",
        "Stream: a limit of 0 refuses every bundle.",
        a.encode(),
        "limit_open_bundles",
        16,
        cls="stream",
        limits={"open_bundles": 0},
    )

    # extension_bytes
    for size, outcome in ((8, "minus-one"), (9, "exact")):
        good(
            "B50",
            f"lowered-{outcome}",
            f"An extension body of {size} bytes, limit 9.",
            plain,
            data=h + frame(1, bytes(size)) + f + e,
            limits={"extension_bytes": 9},
        )
    bad(
        "B50",
        "lowered-plus-one",
        "An extension body of 10 bytes, limit 9.",
        h + frame(1, bytes(10)) + f + e,
        "limit_extension_bytes",
        152,
        limits={"extension_bytes": 9},
    )
    good(
        "B50",
        "zero",
        "A limit of 0 lets empty extensions pass.",
        plain,
        data=h + frame(1) + f + e,
        limits={"extension_bytes": 0},
    )
    good("B50", "default-exact", "An extension body of 2^20 bytes.", plain, data=h + frame(1, bytes(2**20)) + f + e)
    bad(
        "B50",
        "default-plus-one",
        "An extension body of 2^20 + 1 bytes, all there.",
        h + frame(1, bytes(2**20 + 1)) + f + e,
        "limit_extension_bytes",
        152,
    )
    good(
        "7",
        "large-payload",
        "A payload of 2^20 bytes in 16 fragments.",
        B((T("x", "f32", (2**18,), bytes(2**20)),), (A(0x8006, "u64", u64(1)),), fragment_size=2**16),
    )
