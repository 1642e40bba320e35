"""Frame headers, bodies and padding: units A, B and C."""

from __future__ import annotations

from ..book import Book
from ..builder import END, HEAD, MAGIC, A, B, T, end, fragment, frame, head, record

TITLE = "frame headers, bodies and padding (specification, 2 and units A to C of 6)"

PLAIN = B((T("x"),))  # head at 0, its body at 64, fragment at 128, end at 256; 320 bytes
BODY = PLAIN.tensors[0].data
H, F, E = PLAIN.head(), PLAIN.fragments()[0], PLAIN.end()
HALVES = B((T("x", shape=(32,)),), fragment_size=64)  # fragments at 128 and 256, end at 384
SH, (S0, S1), SE = HALVES.head(), HALVES.fragments(), HALVES.end()
BARE = B((T("x"),), checksums=False)
BH, BF, BE = BARE.head(), BARE.fragments()[0], BARE.end()


def make(book: Book) -> None:
    good, bad = book.good, book.bad

    good("2", "plain", "One tensor, one fragment, an end.", PLAIN)
    good("2", "nothing", "A bundle without tensors and attributes.", B())
    good("2.1", "number-0", "Bundle number 0.", B(number=0))
    good("2.1", "number-max", "Bundle number 2^64 - 1.", B((T("x"),), number=2**64 - 1))
    good("2.1", "minor-max", "Minor version 65535 with nothing unknown.", B((T("x"),), minor=65535))
    good(
        "2.1",
        "ignorable-flags",
        "Bits 4 to 7 of a frame's flags are ignorable, and lost on re-encoding.",
        PLAIN,
        data=PLAIN.head(flags=0x10) + PLAIN.fragments(flags=0xF0)[0] + PLAIN.end(flags=0x80),
    )
    for size in (1, 55, 56, 57, 63, 64, 65, 127, 128, 129):
        good("2", f"body-{size}", f"A fragment of {size} bytes and its padding.", B((T("x", "u8", (size,)),)))

    own = B((T("x", "u8", (56,)),)).head()[64 : 64 + 56]
    good(
        "2",
        "payload-is-the-head",
        "A payload of the bytes of its own head's body, with the same length and checksum: the type tells them apart.",
        B((T("x", "u8", (56,), own),)),
    )

    # Unit A
    for slug, comment, magic in (
        ("first-byte", "The first byte without its top bit.", b"\x09BDB\r\n\x1a\n"),
        (
            "cr-lost",
            "Carriage return and line feed turned into a line feed, the next byte moved up.",
            b"\x89BDB\n\x1a\n\x81",
        ),
        ("lf-doubled", "The last line feed turned into carriage return and line feed.", b"\x89BDB\r\n\x1a\r"),
        ("other-letters", "Another format's name.", b"\x89BDC\r\n\x1a\n"),
        ("last-byte", "Only the last byte of the magic differs.", MAGIC[:7] + b"\x0b"),
    ):
        bad("A1", slug, comment, PLAIN.head(magic=magic) + F + E, "bad_magic", 0)
    bad(
        "A1",
        "eight-bytes",
        "Eight bytes are a unit: the magic is judged before the header is here.",
        b"GGUF\3\0\0\0",
        "bad_magic",
        0,
        pieces=[7, 1],
    )
    bad("A1", "last-of-eight", "Of eight bytes that are all, the last differs.", MAGIC[:7] + b"\x0b", "bad_magic", 0)
    bad("A1", "second-frame", "After a frame that was good.", H + bytes(8), "bad_magic", 128)
    bad("A1", "at-the-end", "An end frame without the magic.", H + F + PLAIN.end(magic=bytes(8)), "bad_magic", 256)
    bad(
        "A1",
        "before-B1",
        "The magic comes before the header's checksum.",
        PLAIN.head(magic=bytes(8), header_crc=1),
        "bad_magic",
        0,
    )
    bad(
        "A1",
        "after-a-bundle",
        "Eight bytes of something else after a bundle.",
        PLAIN.encode() + bytes(8),
        "bad_magic",
        320,
        before=[PLAIN],
    )

    # Unit B, any frame
    bad("B1", "head", "A head's header_crc.", PLAIN.head(header_crc=0) + F + E, "header_crc", 60)
    bad("B1", "fragment", "A fragment's header_crc.", H + PLAIN.fragments(header_crc=1)[0] + E, "header_crc", 188)
    bad("B1", "end", "An end's header_crc.", H + F + PLAIN.end(header_crc=0xFFFFFFFF), "header_crc", 316)
    bad("B1", "extension", "An extension's header_crc.", H + frame(1, header_crc=2) + F + E, "header_crc", 188)
    bad(
        "B1",
        "before-B2",
        "The checksum comes before the major version.",
        PLAIN.head(major=2, header_crc=1),
        "header_crc",
        60,
    )
    bad(
        "B1",
        "one-bit",
        "One bit of the bundle number flipped after the checksum was made.",
        PLAIN.head()[:16] + b"\6" + PLAIN.head()[17:] + F + E,
        "header_crc",
        60,
    )
    for major in (0, 2, 0x0101, 0xFFFF):
        bad("B2", f"major-{major}", f"Major version {major}.", PLAIN.head(major=major) + F + E, "unsupported_major", 12)
    bad(
        "B2",
        "second-frame",
        "Another major in a fragment.",
        H + PLAIN.fragments(major=2)[0] + E,
        "unsupported_major",
        140,
    )
    bad(
        "B2",
        "before-B3",
        "The major comes before the reserved bytes: another major may use them.",
        PLAIN.head(major=2, reserved=1, reserved_2=1, flags=1),
        "unsupported_major",
        12,
    )
    bad("B3", "low", "Byte 10.", PLAIN.head(reserved=1) + F + E, "header_reserved", 10)
    bad("B3", "high", "Byte 11.", PLAIN.head(reserved=0x8000) + F + E, "header_reserved", 10)
    bad(
        "B3",
        "before-B4",
        "Bytes 10-11 come before bytes 52-59.",
        PLAIN.head(reserved=1, reserved_2=1),
        "header_reserved",
        10,
    )
    for bit in (0, 31, 32, 63):
        bad(
            "B4",
            f"bit-{bit}",
            f"Bit {bit} of bytes 52-59; the offset is that of the field.",
            PLAIN.head(reserved_2=1 << bit) + F + E,
            "header_reserved",
            52,
        )
    for slug, at, data in (
        ("fragment", 128, H + PLAIN.fragments(reserved_2=1)[0] + E),
        ("end", 256, H + F + PLAIN.end(reserved_2=1 << 63)),
    ):
        bad("B4", slug, f"The same field of another frame: {slug}.", data, "header_reserved", at + 52)
    bad(
        "B4",
        "before-B5",
        "Reserved bytes come before the flags.",
        PLAIN.head(reserved_2=1, flags=1),
        "header_reserved",
        52,
    )
    for bit in range(4):
        bad(
            "B5",
            f"bit-{bit}",
            f"Bit {bit} of a frame's flags is reserved and rejected.",
            PLAIN.head(flags=1 << bit) + F + E,
            "header_flags",
            9,
        )
    bad("B5", "end", "A reserved flag in an end.", H + F + PLAIN.end(flags=8), "header_flags", 265)
    bad("B5", "before-B6", "Flags come before the type.", H + frame(0x84, flags=1) + F + E, "header_flags", 137)
    for kind in (0x80, 0x84, 0xBF, 0xC0, 0xFF):
        bad(
            "B6",
            f"{kind:02x}",
            f"Frame type {kind:#04x} has the critical bit and is unknown.",
            H + frame(kind) + F + E,
            "unsupported_frame",
            136,
        )
    bad(
        "B6",
        "before-B20",
        "The type comes before the bundle's number.",
        frame(0x84) + PLAIN.encode(),
        "unsupported_frame",
        8,
    )

    # Unit B, heads
    bad(
        "B10",
        "default",
        "A body of 2^20 + 8 bytes is over the default.",
        frame(HEAD, length=2**20 + 8),
        "limit_head_bytes",
        24,
    )
    bad("B10", "max", "A body of 2^64 - 1 bytes.", frame(HEAD, length=2**64 - 1), "limit_head_bytes", 24)
    bad(
        "B10",
        "before-B11",
        "The limit comes before the multiple of 8.",
        frame(HEAD, length=2**20 + 1, a=1),
        "limit_head_bytes",
        24,
    )
    for size in (0, 8, 24, 31):
        bad(
            "B11",
            f"size-{size}",
            f"A head body of {size} bytes is shorter than the fixed part.",
            frame(HEAD, bytes(size)),
            "body_length",
            24,
        )
    for size in (33, 36, 39):
        bad(
            "B11",
            f"size-{size}",
            f"A head body of {size} bytes is no multiple of 8.",
            frame(HEAD, bytes(size)) + end(),
            "body_length",
            24,
        )
    bad(
        "B11",
        "size-24-whole",
        "A head body of 24 bytes in a bundle that has its end: padding would pass for the rest of the fixed part.",
        frame(HEAD, bytes(24)) + end(),
        "body_length",
        24,
    )
    bad("B11", "before-B12", "The length comes before field_a.", frame(HEAD, bytes(24), 1, 1), "body_length", 24)
    bad("B12", "field-a", "A head's field_a.", frame(HEAD, bytes(32), 1) + end(), "head_fields", 32)
    bad(
        "B12",
        "high-bit",
        "The top bit of a head's field_a.",
        frame(HEAD, bytes(32), 1 << 63) + end(),
        "head_fields",
        32,
    )
    bad("B12", "before-B13", "field_a comes before field_b.", frame(HEAD, bytes(32), 1, 1), "head_fields", 32)
    bad("B13", "field-b", "A head's field_b.", frame(HEAD, bytes(32), 0, 1) + end(), "head_fields", 40)
    bad(
        "B13",
        "before-B14",
        "The fields come before the bundle's number.",
        H + frame(HEAD, bytes(32), 0, 1 << 63),
        "head_fields",
        168,
    )
    bad("B14", "same-number", "A second head of an open bundle.", H + H + F + E, "bundle_already_open", 144)
    bad(
        "B14",
        "before-B15",
        "The number comes before the count of open bundles.",
        H + H,
        "bundle_already_open",
        144,
        limits={"open_bundles": 1},
    )
    bad(
        "B15",
        "core",
        "A core decoder has one bundle open at most.",
        H + B(number=8).encode() + F + E,
        "limit_open_bundles",
        144,
        cls="core",
    )
    bad(
        "B15",
        "core-whatever-the-limit",
        "In core the limit is 1, whatever open_bundles says.",
        H + B(number=8).encode() + F + E,
        "limit_open_bundles",
        144,
        cls="core",
        limits={"open_bundles": 16},
    )
    good("B15", "core-zero", "Nor does a limit of 0 matter there.", PLAIN, cls="core", limits={"open_bundles": 0})

    # Unit B, other frames
    bad("B20", "fragment-first", "A fragment before any head.", F + PLAIN.encode(), "bundle_not_open", 16)
    bad("B20", "end-first", "An end before any head.", E, "bundle_not_open", 16)
    bad(
        "B20",
        "extension-first",
        "An ancillary extension belongs to an open bundle too.",
        frame(1) + PLAIN.encode(),
        "bundle_not_open",
        16,
    )
    bad(
        "B20",
        "other-number",
        "A fragment of a number that was never opened.",
        H + fragment(BODY, number=8) + F + E,
        "bundle_not_open",
        144,
    )
    bad(
        "B20",
        "only-high-half",
        "Numbers differ in all 64 bits.",
        H + fragment(BODY, number=7 + 2**32) + F + E,
        "bundle_not_open",
        144,
    )
    bad(
        "B20",
        "closed",
        "A fragment of a bundle that is closed.",
        PLAIN.encode() + F,
        "bundle_not_open",
        336,
        before=[PLAIN],
    )
    bad("B20", "closed-end", "A second end.", PLAIN.encode() + E, "bundle_not_open", 336, before=[PLAIN])
    bad(
        "B20",
        "before-B21",
        "The number comes before the minor version.",
        H + fragment(BODY, number=8, minor=1),
        "bundle_not_open",
        144,
    )
    for what, spoilt in (
        ("fragment", H + PLAIN.fragments(minor=1)[0] + E),
        ("extension", H + frame(1, minor=1) + F + E),
    ):
        bad("B21", what, f"Its head has another minor than this {what}.", spoilt, "frame_version", 142)
    bad(
        "B21",
        "end",
        "Minor 0 in the end of a 1.1 bundle.",
        PLAIN.head(minor=1) + PLAIN.fragments(minor=1)[0] + E,
        "frame_version",
        270,
    )
    bad(
        "B21",
        "before-B30",
        "The minor comes before the fragment's fields.",
        H + fragment(BODY, 9, minor=1),
        "frame_version",
        142,
    )

    # Unit B, fragments
    bad("B30", "one-past", "Tensor 1 of one.", H + fragment(BODY, 1) + E, "fragment_tensor", 160)
    bad(
        "B30",
        "no-tensors",
        "A fragment in a bundle without tensors.",
        head() + fragment(b"", 0),
        "fragment_tensor",
        160,
    )
    bad(
        "B30",
        "2^32",
        "A tensor index that is 0 in its low half.",
        H + fragment(BODY, 2**32) + E,
        "fragment_tensor",
        160,
    )
    bad("B30", "2^63", "A tensor index with the top bit.", H + fragment(BODY, 2**63) + E, "fragment_tensor", 160)
    bad("B30", "before-B31", "The tensor comes before the offset.", H + fragment(BODY, 1, 1), "fragment_tensor", 160)
    bad(
        "B31",
        "at-the-end",
        "An empty fragment at the payload's end.",
        H + F + fragment(b"", 0, 12) + E,
        "fragment_offset",
        296,
    )
    bad(
        "B31",
        "unfragmented",
        "An unfragmented tensor has offset 0 only.",
        H + fragment(BODY[4:], 0, 4) + E,
        "fragment_offset",
        168,
    )
    bad(
        "B31",
        "off-grid",
        "An offset that is no multiple of fragment_size.",
        SH + fragment(bytes(64), 0, 32) + SE,
        "fragment_offset",
        168,
    )
    for slug, size, tensor in (
        ("off-grid-128", 128, T("x", "u8", (256,))),
        ("off-grid-1088", 1088, T("x", "q8_0", (2048,))),
    ):
        bad(
            "B31",
            slug,
            f"A multiple of 64, but not of a fragment_size of {size}.",
            B((tensor,), fragment_size=size).head() + fragment(tensor.data[64 : 64 + size], 0, 64),
            "fragment_offset",
            168,
        )
    bad(
        "B31",
        "past-the-end",
        "On the grid, past the payload.",
        SH + S0 + S1 + fragment(bytes(64), 0, 128) + SE,
        "fragment_offset",
        424,
    )
    bad(
        "B31",
        "2^64-64",
        "An offset that wraps when a length is added.",
        SH + fragment(bytes(64), 0, 2**64 - 64) + SE,
        "fragment_offset",
        168,
    )
    bad(
        "B31",
        "2^32",
        "An offset that is 0 in its low half.",
        SH + fragment(bytes(64), 0, 2**32) + SE,
        "fragment_offset",
        168,
    )
    bad(
        "B31",
        "zero-bytes",
        "A tensor of zero bytes has no fragment, not even an empty one.",
        head(record(dims=(0,))) + fragment(b"") + end(),
        "fragment_offset",
        168,
    )
    bad(
        "B31",
        "zero-bytes-grid",
        "The same with a fragment size.",
        head(record(dims=(0,)), fragment_size=64) + fragment(b"") + end(),
        "fragment_offset",
        168,
    )
    bad(
        "B31",
        "before-B32",
        "The offset comes before the length.",
        SH + fragment(bytes(8), 0, 8),
        "fragment_offset",
        168,
    )
    for size in (0, 11, 13):
        bad(
            "B32",
            f"size-{size}",
            f"{size} bytes for a payload of 12.",
            H + fragment(bytes(size)) + E,
            "fragment_length",
            152,
        )
    bad(
        "B32",
        "whole-tensor",
        "The whole tensor at once, although it is to come in fragments.",
        SH + fragment(bytes(128)) + SE,
        "fragment_length",
        152,
    )
    bad(
        "B32",
        "short-in-the-middle",
        "A first fragment shorter than fragment_size.",
        SH + fragment(bytes(63)) + S1 + SE,
        "fragment_length",
        152,
    )
    bad(
        "B32",
        "long-last",
        "A last fragment that goes on to the grid.",
        head(record(dims=(17,)), fragment_size=64) + fragment(bytes(64)) + fragment(bytes(64), 0, 64) + end(2, 68),
        "fragment_length",
        280,
    )
    bad(
        "B32",
        "short-last",
        "A last fragment one byte short.",
        SH + S0 + fragment(bytes(63), 0, 64) + SE,
        "fragment_length",
        280,
    )
    bad(
        "B32",
        "2^64-1",
        "A length that wraps when padding is added.",
        SH + fragment(b"", length=2**64 - 1),
        "fragment_length",
        152,
    )
    bad("B33", "second-first", "Core: the second fragment first.", SH + S1 + S0 + SE, "fragment_order", 160, cls="core")
    bad(
        "B33",
        "repeat",
        "Core: a repeated fragment, even with the same bytes.",
        SH + S0 + S0 + S1 + SE,
        "fragment_order",
        288,
        cls="core",
    )
    bad(
        "B33",
        "repeat-last",
        "Core: the last fragment of all once more.",
        H + F + F + E,
        "fragment_order",
        288,
        cls="core",
    )
    two = B((T("x"), T("y", "u8", (5,))))
    first, second = two.fragments()
    bad(
        "B33",
        "tensors-swapped",
        "Core: the second tensor before the first.",
        two.head() + second + first + two.end(),
        "fragment_order",
        224,
        cls="core",
    )
    bad(
        "B33",
        "before-B34",
        "Core: the order comes before a checksum that should be absent.",
        BARE.head(fragment_size=64) + BF + fragment(BODY, 0, 0),
        "fragment_order",
        288,
        cls="core",
    )
    bad(
        "B33",
        "before-C1",
        "Core: the order comes before the body.",
        SH + fragment(bytes(64), 0, 64, body_crc=1),
        "fragment_order",
        160,
        cls="core",
    )
    good("2.3", "without-checksums", "Payload checksums absent: body_crc of a fragment is 0.", BARE)
    good(
        "2.3",
        "without-checksums-insisting",
        "A consumer that insists on checksums takes a bundle that has them.",
        PLAIN,
        flags=["require_checksums"],
    )
    bad("B34", "right-checksum", "A right checksum where none is to be.", BH + F + BE, "payload_crc_present", 176)
    bad("B34", "wrong-checksum", "A wrong one.", BH + fragment(BODY, body_crc=1) + BE, "payload_crc_present", 176)
    bad(
        "B34",
        "before-C2",
        "It comes before the padding.",
        BH + fragment(BODY, body_crc=1, padding=b"\1" * 52),
        "payload_crc_present",
        176,
    )

    # Unit B, ends
    bad("B40", "body", "An end with a body.", H + F + frame(END, bytes(8), 1, 12), "body_length", 280)
    bad(
        "B40",
        "before-B41",
        "The length comes before missing fragments.",
        H + frame(END, bytes(1), 1, 12),
        "body_length",
        152,
    )
    bad(
        "B40",
        "2^64-1",
        "A length that wraps when padding is added.",
        H + F + frame(END, b"", 1, 12, length=2**64 - 1),
        "body_length",
        280,
    )
    bad("B41", "none-came", "An end without the fragment.", H + E, "fragment_missing", 128)
    bad("B41", "one-of-two", "An end after the first of two fragments.", SH + S0 + SE, "fragment_missing", 256)
    bad(
        "B41",
        "counts-what-came",
        "An end that counts the fragments that came.",
        SH + S0 + end(1, 64),
        "fragment_missing",
        256,
    )
    bad(
        "B41",
        "second-tensor",
        "A tensor without any fragment.",
        two.head() + first + two.end(),
        "fragment_missing",
        320,
    )
    bad("B41", "before-B42", "Missing fragments come before the counts.", SH + S0 + end(9, 9), "fragment_missing", 256)
    for count in (0, 2, 2**32 + 1, 2**64 - 1):
        bad(
            "B42",
            f"count-{count}",
            f"{count} fragments counted where there is one.",
            H + F + end(count, 12),
            "end_fragments",
            288,
        )
    bad("B42", "none", "One fragment counted where there is none.", head() + end(1, 0), "end_fragments", 160)
    bad("B42", "before-B43", "The count comes before the bytes.", H + F + end(2, 13), "end_fragments", 288)
    for size in (11, 13, 0, 64, 2**32 + 12):
        bad(
            "B43",
            f"bytes-{size}",
            f"{size} payload bytes counted where there are 12.",
            H + F + end(1, size),
            "end_payload_bytes",
            296,
        )
    bad(
        "B43",
        "before-C1",
        "The fields come before the body's checksum.",
        H + F + end(1, 13, body_crc=1),
        "end_payload_bytes",
        296,
    )

    # Extensions
    for kind in (0x00, 0x01, 0x02, 0x3F, 0x40, 0x7F):
        good(
            "2.5",
            f"{kind:02x}",
            f"An unknown ancillary frame of type {kind:#04x} is skipped by both classes, and lost on re-encoding.",
            PLAIN,
            data=H + frame(kind, b"note", 5, 2**64 - 1) + F + E,
        )
    good(
        "2.5",
        "places",
        "Extension frames in every place between head and end.",
        HALVES,
        data=SH + frame(1) + S0 + frame(2, b"a" * 64) + S1 + frame(3, b"b" * 65) + SE,
    )
    good(
        "2.5",
        "only-extensions",
        "Extension frames in a bundle without fragments.",
        B(),
        data=head() + frame(9, bytes(200)) + frame(9) + end(),
    )
    bad(
        "B50",
        "default",
        "A body one byte over the default.",
        H + frame(1, length=2**20 + 1),
        "limit_extension_bytes",
        152,
    )
    bad(
        "B50",
        "2^64-1",
        "A length that wraps when padding is added.",
        H + frame(1, length=2**64 - 1),
        "limit_extension_bytes",
        152,
    )
    bad(
        "B50",
        "after-B21",
        "The minor comes before the length.",
        H + frame(1, minor=1, length=2**64 - 1),
        "frame_version",
        142,
    )

    # Unit C
    bad("C1", "head", "A head's body_crc.", PLAIN.head(body_crc=1) + F + E, "body_crc", 48)
    bad(
        "C1",
        "head-without-checksums",
        "A head's checksum counts when payload checksums are absent.",
        BARE.head(body_crc=0) + BF + BE,
        "body_crc",
        48,
    )
    bad("C1", "fragment", "A fragment's body_crc.", H + PLAIN.fragments(body_crc=1)[0] + E, "body_crc", 176)
    bad(
        "C1",
        "fragment-zero",
        "0 is no way to leave a checksum out.",
        H + PLAIN.fragments(body_crc=0)[0] + E,
        "body_crc",
        176,
    )
    bad(
        "C1",
        "one-bit",
        "One bit of the payload flipped.",
        H + F[:64] + bytes([BODY[0] ^ 1]) + F[65:] + E,
        "body_crc",
        176,
    )
    bad(
        "C1",
        "last-bit",
        "The last bit of the payload flipped.",
        H + F[:75] + bytes([BODY[11] ^ 128]) + F[76:] + E,
        "body_crc",
        176,
    )
    bad(
        "B20",
        "fragment-of-a-whole",
        "A bundle that is sound but for the number of its fragment.",
        H + fragment(BODY, number=8) + E,
        "bundle_not_open",
        144,
    )
    valued = B(attributes=(A(0x4001, "u64", bytes(8)),))
    whole = valued.encode()
    good("2.1", "attribute-value", "The bundle whose attribute the next one's head has another value of.", valued)
    bad(
        "C1",
        "attribute-value",
        "One bit of an attribute's value flipped, and the checksum left: no value may be taken from a body by itself.",
        whole[:104] + b"\1" + whole[105:],
        "body_crc",
        48,
    )
    bad("C1", "extension", "An extension's checksum counts.", H + frame(1, b"abc", body_crc=0) + F + E, "body_crc", 176)
    bad(
        "C1",
        "extension-without-checksums",
        "Also when payload checksums are absent.",
        BH + frame(1, b"abc", body_crc=0) + BF + BE,
        "body_crc",
        176,
    )
    bad(
        "C1",
        "empty-extension",
        "The checksum of an empty body is 0.",
        H + frame(1, body_crc=1) + F + E,
        "body_crc",
        176,
    )
    bad("C1", "end", "An end's body is empty and its body_crc 0.", H + F + PLAIN.end(body_crc=1), "body_crc", 304)
    bad(
        "C1",
        "end-without-checksums",
        "Also when payload checksums are absent.",
        BH + BF + BARE.end(body_crc=1),
        "body_crc",
        304,
    )
    bad(
        "C1",
        "before-C2",
        "The checksum comes before the padding.",
        H + PLAIN.fragments(body_crc=1, padding=b"\1" * 52)[0],
        "body_crc",
        176,
    )
    bad(
        "C1",
        "before-D1",
        "The checksum comes before the head's fields.",
        PLAIN.head(body_crc=1, head_flags=2),
        "body_crc",
        48,
    )
    for place in (0, 20, 51):
        pad = bytes(place) + b"\x80" + bytes(51 - place)
        bad(
            "C2",
            f"byte-{place}",
            f"Byte {place} of a fragment's padding.",
            H + PLAIN.fragments(padding=pad)[0] + E,
            "frame_padding",
            204 + place,
        )
    bad(
        "C2",
        "first-of-two",
        "The first of two bytes is reported.",
        H + PLAIN.fragments(padding=bytes(9) + b"\1\2" + bytes(41))[0] + E,
        "frame_padding",
        213,
    )
    bad("C2", "head", "A head's padding.", PLAIN.head(padding=bytes(7) + b"\1") + F + E, "frame_padding", 127)
    bad(
        "C2",
        "extension",
        "An extension's padding.",
        H + frame(1, b"a", padding=b"\0\7" + bytes(61)) + F + E,
        "frame_padding",
        194,
    )
    bad(
        "C2",
        "without-checksums",
        "Padding counts when payload checksums are absent.",
        BH + fragment(BODY, body_crc=0, padding=b"\1" * 52) + BE,
        "frame_padding",
        204,
    )
    bad(
        "C2",
        "before-D1",
        "The padding comes before the head's fields.",
        PLAIN.head(padding=b"\1" * 8, head_flags=2),
        "frame_padding",
        120,
    )
    bool_head, bool_end = head(record(dtype="bool")), end(1, 3)
    bad(
        "C2",
        "before-C4",
        "The padding comes before the values of a bool.",
        bool_head + fragment(b"\2\2\2", padding=b"\1" * 61),
        "frame_padding",
        195,
    )
    bad(
        "C3",
        "other-bytes",
        "Stream: a repeated fragment with other bytes.",
        SH + S0 + fragment(bytes(64)) + S1 + SE,
        "fragment_conflict",
        320,
        cls="stream",
    )
    bad(
        "C3",
        "last-bit",
        "Stream: a repeat that differs in its last bit.",
        SH + S1 + fragment(S1[64:127] + bytes([S1[127] ^ 128]), 0, 64) + S0 + SE,
        "fragment_conflict",
        320,
        cls="stream",
    )
    bad(
        "C3",
        "after-all-came",
        "Stream: the repeat comes after the last missing fragment.",
        SH + S0 + S1 + fragment(bytes(64)) + SE,
        "fragment_conflict",
        448,
        cls="stream",
    )
    bad(
        "C3",
        "without-checksums",
        "Stream: without checksums the bytes themselves are compared.",
        BH + BF + fragment(bytes(12), body_crc=0) + BE,
        "fragment_conflict",
        320,
        cls="stream",
    )
    bad(
        "C3",
        "before-C4",
        "Stream: the conflict comes before the values of a bool.",
        bool_head + fragment(b"\0\1\0") + fragment(b"\0\2\0") + bool_end,
        "fragment_conflict",
        320,
        cls="stream",
    )
    good("2.3", "bool-values", "A bool is 0 or 1.", B((T("x", "bool", (3,), b"\0\1\0"),)))
    for value in (2, 127, 128, 255):
        bad(
            "C4",
            f"value-{value}",
            f"A bool of {value}.",
            bool_head + fragment(bytes([0, value, 1])) + bool_end,
            "bool_value",
            193,
        )
    bad(
        "C4",
        "first-of-two",
        "The first of two bytes is reported.",
        bool_head + fragment(b"\1\3\2") + bool_end,
        "bool_value",
        193,
    )
    bad("C4", "last", "The last byte.", bool_head + fragment(b"\1\0\2") + bool_end, "bool_value", 194)
    twenty = B((T("x", "bool", (20,)),))
    for place in (0, 7, 8, 15, 16):
        values = bytearray(20)
        values[place] = 2
        bad(
            "C4",
            f"of-twenty-{place}",
            f"Byte {place} of twenty, the others zero: whoever looks at eight at a time looks at each.",
            twenty.head() + fragment(bytes(values)) + twenty.end(),
            "bool_value",
            192 + place,
        )
    many = B((T("x", "bool", (130,)),), fragment_size=64)
    good("2.3", "bool-fragments", "A bool in three fragments.", many)
    parts = many.fragments()
    bad(
        "C4",
        "third-fragment",
        "In the last of three fragments.",
        many.head() + parts[0] + parts[1] + fragment(b"\1\2", 0, 128) + many.end(),
        "bool_value",
        449,
    )
