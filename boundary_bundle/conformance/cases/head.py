"""The head's fixed part: steps D1 to D7."""

from __future__ import annotations

from ..book import Book
from ..builder import A, B, T, attribute, head, record, u64

TITLE = "the head's fixed part (specification, 3 and D1 to D7 of 6)"

Q = 64
PLAIN = B((T("x"),))
REST = b"".join(PLAIN.fragments()) + PLAIN.end()
NOTE = attribute(1, "bytes", bytes(8))


def make(book: Book) -> None:
    good, bad = book.good, book.bad

    for bit in (1, 2, 7, 8, 14, 15):
        bad(
            "D1",
            f"bit-{bit}",
            f"Bit {bit} of head_flags must be understood.",
            PLAIN.head(head_flags=1 << bit) + REST,
            "unsupported_head_flag",
            Q,
        )
    bad(
        "D1",
        "among-known",
        "An unknown flag beside a known one.",
        PLAIN.head(head_flags=3) + REST,
        "unsupported_head_flag",
        Q,
    )
    bad(
        "D1",
        "before-D2",
        "An unknown flag comes before missing checksums.",
        PLAIN.head(head_flags=3),
        "unsupported_head_flag",
        Q,
        flags=["require_checksums"],
    )
    bad(
        "D1",
        "after-B10",
        "The limit on the head comes before its flags.",
        PLAIN.head(head_flags=2),
        "limit_head_bytes",
        24,
        limits={"head_bytes": 48},
    )
    good(
        "3",
        "ignorable-head-flags",
        "Bits 16 to 31 of head_flags are ignorable, and lost on re-encoding.",
        PLAIN,
        data=PLAIN.head(head_flags=0xFFFF0000) + REST,
    )
    bare = B((T("x"),), checksums=False)
    good(
        "3",
        "ignorable-head-flags-absent",
        "The same bits beside bit 0.",
        bare,
        data=bare.head(head_flags=0xFFFF0001) + b"".join(bare.fragments()) + bare.end(),
    )
    bad(
        "D2",
        "ignorable-flags",
        "Bit 0 counts beside ignorable bits.",
        bare.head(head_flags=0x80000001),
        "checksums_required",
        Q,
        flags=["require_checksums"],
    )
    bad(
        "D2",
        "insists",
        "The consumer insists on payload checksums.",
        bare.encode(),
        "checksums_required",
        Q,
        flags=["require_checksums"],
    )
    bad(
        "D2",
        "insists-without-payload",
        "Also when there is no payload.",
        B(checksums=False).encode(),
        "checksums_required",
        Q,
        flags=["require_checksums"],
    )
    bad(
        "D2",
        "before-D3",
        "Missing checksums come before reserved bytes.",
        head(head_flags=1, head_reserved=1),
        "checksums_required",
        Q,
        flags=["require_checksums"],
    )
    for bit in (0, 31, 32, 63):
        bad(
            "D3",
            f"bit-{bit}",
            f"Bit {bit} of the head's reserved bytes; the offset is that of the field.",
            PLAIN.head(head_reserved=1 << bit) + REST,
            "head_reserved",
            Q + 24,
        )
    bad(
        "D3",
        "before-D4",
        "Reserved bytes come before the number of tensors.",
        head(head_reserved=1, tensor_count=257),
        "head_reserved",
        Q + 24,
    )
    bad(
        "D4",
        "count-only",
        "257 tensors declared, none there: refused before any record is looked at.",
        head(tensor_count=257),
        "limit_tensors",
        Q + 4,
    )
    bad(
        "D4",
        "max",
        "2^32 - 1 tensors declared in a head of 96 bytes.",
        head(record(), record("y"), tensor_count=2**32 - 1),
        "limit_tensors",
        Q + 4,
    )
    bad(
        "D4",
        "before-D5",
        "Tensors come before attribute bytes.",
        head(tensor_count=257, attribute_bytes=2**32 - 8),
        "limit_tensors",
        Q + 4,
    )
    bad(
        "D5",
        "declared-only",
        "65,544 attribute bytes declared, none there.",
        head(attribute_bytes=65_544),
        "limit_attribute_bytes",
        Q + 12,
    )
    bad(
        "D5",
        "before-D6",
        "The limit comes before the multiple of 8.",
        head(attribute_bytes=65_537),
        "limit_attribute_bytes",
        Q + 12,
    )
    bad(
        "D5",
        "max",
        "2^32 - 1 attribute bytes declared.",
        head(attribute_bytes=2**32 - 1),
        "limit_attribute_bytes",
        Q + 12,
    )
    for size in (1, 4, 7, 9, 15):
        bad(
            "D6",
            f"size-{size}",
            f"{size} attribute bytes are no multiple of 8.",
            head(attributes=[NOTE], attribute_bytes=size) + B().end(),
            "attribute_block",
            Q + 12,
        )
    bad(
        "D6",
        "more-than-there-is",
        "8 bytes more than the body holds after its fixed part.",
        head(attributes=[NOTE], attribute_bytes=24) + B().end(),
        "attribute_block",
        Q + 12,
    )
    bad(
        "D6",
        "wraps",
        "32 bytes more would make T the head's own begin.",
        head(record(), attribute_bytes=56) + REST,
        "attribute_block",
        Q + 12,
    )
    bad(
        "D6",
        "before-D7",
        "The attribute block comes before the fragment size.",
        head(attribute_bytes=8, fragment_size=1),
        "attribute_block",
        Q + 12,
    )
    for size in (1, 2, 4, 8, 16, 32, 63, 65, 96, 2**64 - 1):
        bad(
            "D7",
            f"size-{size}",
            f"A fragment size of {size} is no multiple of 64; no dtype is asked.",
            B(fragment_size=size).encode(),
            "fragment_size",
            Q + 16,
        )
    bad(
        "D7",
        "divisible",
        "Also when every dtype's block divides it.",
        B((T("x", "u8", (65,)),), fragment_size=65).encode(),
        "fragment_size",
        Q + 16,
    )
    bad(
        "D7",
        "before-D10",
        "The fragment size comes before the records.",
        head(fragment_size=4, tensor_count=1),
        "fragment_size",
        Q + 16,
    )
    for size in (64, 128, 2**32, 2**63, 2**64 - 64):
        good(
            "3",
            f"fragment-size-{size}",
            f"A fragment size of {size} for 12 bytes: one fragment.",
            B((T("x"),), fragment_size=size),
        )
    good(
        "3",
        "both-tables",
        "Tensors and attributes.",
        B(
            (T("a", "u8", (1,)), T("b-2", "i16", (2, 2)), T("c", "f64", ())),
            (A(1, "bytes", b""), A(2, "text", b"llama"), A(0x8006, "u64", u64(3))),
        ),
    )
