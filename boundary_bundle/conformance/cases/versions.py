"""What a 1.0 decoder does with 1.1 and 2.0."""

from __future__ import annotations

from ..book import Book
from ..builder import A, B, T, attribute, end, frame, head, record, u64

TITLE = "versions and unknowns (specification, 10)"


def make(book: Book) -> None:
    good, bad = book.good, book.bad
    newer = B((T("x"),), (A(0x0123, "text", b"kept"), A(0x8006, "u64", u64(3))), minor=1)
    h, f, e = newer.head(), newer.fragments()[0], newer.end()  # head of 192 bytes
    good(
        "10",
        "1.1-nothing-unknown",
        "A 1.1 bundle with nothing that 1.0 lacks; its minor is kept.",
        B((T("x"),), minor=1),
    )
    good(
        "10",
        "1.1-ancillary-attribute",
        "A 1.1 bundle with an attribute that 1.0 does not know: read, kept, written again.",
        newer,
    )
    good(
        "10",
        "1.1-ancillary-frame",
        "A 1.1 bundle with an extension frame that 1.0 does not know: skipped, and lost on re-encoding.",
        newer,
        data=h + frame(0x04, b"statistics", 1, 2, minor=1) + f + e,
    )
    good(
        "10",
        "1.1-ignorable-bits",
        "A 1.1 bundle that uses ignorable bits of head_flags and frame flags.",
        newer,
        data=newer.head(head_flags=0x80010000, flags=0x20) + newer.fragments(flags=0x40)[0] + newer.end(flags=0x80),
    )
    good(
        "10",
        "1.1-all-of-it",
        "All of that at once.",
        newer,
        data=newer.head(head_flags=0x10000)
        + frame(0x05, minor=1)
        + newer.fragments(flags=0x10)[0]
        + frame(0x7F, bytes(70), minor=1)
        + e,
    )
    good(
        "10",
        "1.0-unknown-attribute",
        "An unknown ancillary attribute in a 1.0 bundle is kept too.",
        B(attributes=(A(0x0100, "bytes", b"\0\xff"),)),
    )
    good(
        "10",
        "1.0-private-attribute",
        "A private ancillary attribute is kept.",
        B(attributes=(A(0x4123, "i64", u64(2**64 - 5)),)),
    )
    good(
        "10",
        "1.1-then-1.0",
        "Bundles of several minors one after another.",
        B((T("x"),), minor=1),
        B((T("x"),)),
        B((T("x"),), minor=2),
    )
    bad(
        "D56",
        "1.1-critical-attribute",
        "A 1.1 bundle with an attribute that must be understood.",
        head(record(), attributes=[attribute(0x8009, "u64", u64(1))], minor=1) + f + e,
        "unsupported_attribute",
        64 + 32 + 24,
    )
    bad(
        "B6",
        "1.1-critical-frame",
        "A 1.1 bundle with a frame that must be understood.",
        h + frame(0x84, minor=1) + f + e,
        "unsupported_frame",
        192 + 8,
    )
    bad(
        "D1",
        "1.1-critical-flag",
        "A 1.1 bundle with a head flag that must be understood.",
        newer.head(head_flags=2) + f + e,
        "unsupported_head_flag",
        64,
    )
    bad(
        "D15",
        "1.1-dtype",
        "A dtype that 1.0 does not know is refused in every minor.",
        head(record(dtype=65), minor=1) + end(minor=1),
        "unsupported_dtype",
        96,
    )
    bad(
        "D54",
        "1.1-type",
        "Attribute types are closed within major 1.",
        head(attributes=[attribute(1, 6, b"")], minor=1) + end(minor=1),
        "attribute_type",
        98,
    )
    bad(
        "D18",
        "1.1-reserved",
        "A tensor record has no room for later minors.",
        head(record(reserved=b"\1\0\0"), minor=1) + f + e,
        "tensor_reserved",
        101,
    )
    bad(
        "B2",
        "2.0",
        "A 2.0 bundle whose head 1.0 could not read.",
        frame(0x81, b"another layout", 1, 2, major=2, flags=0xFF),
        "unsupported_major",
        12,
    )
    bad(
        "B2",
        "2.0-frame",
        "A frame type of 2.0, of a bundle of 2.0.",
        frame(0x01, b"", major=2),
        "unsupported_major",
        12,
    )
    bad(
        "B2",
        "2.0-after-1.0",
        "A 2.0 bundle after a 1.0 bundle.",
        B().encode() + B().head(major=2),
        "unsupported_major",
        192 + 12,
        before=[B()],
    )
    bad(
        "B21",
        "1.1-head-1.0-rest",
        "Every frame carries its head's minor: a forwarder may not lower it.",
        h + B((T("x"),)).fragments()[0] + e,
        "frame_version",
        192 + 14,
    )
