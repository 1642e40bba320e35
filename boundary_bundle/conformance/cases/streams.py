"""Orders, interleaving, repeats, pieces and ends of input."""

from __future__ import annotations

from itertools import permutations

from ..book import Book
from ..builder import MAGIC, A, B, T, frame

TITLE = "streams: orders, interleaving, repeats, pieces, ends (specification, 2.3, 6 and 11)"


def make(book: Book) -> None:
    orders(book)
    interleaved(book)
    pieces(book)
    ends(book)


def orders(book: Book) -> None:
    good = book.good
    split = B((T("x", "u8", (130,)), T("y", "u8", (0,)), T("z", "f32", (20,), order="big")), fragment_size=64)
    h, parts, e = split.head(), split.fragments(), split.end()  # three of x, two of z
    good("11", "canonical-order", "Five fragments of two tensors in canonical order.", split)
    good(
        "11",
        "reversed",
        "Stream: the same fragments backwards.",
        split,
        data=h + b"".join(reversed(parts)) + e,
        cls="stream",
    )
    for order in ((1, 0, 2, 3, 4), (3, 0, 4, 1, 2), (4, 2, 0, 3, 1), (0, 1, 3, 2, 4)):
        good(
            "11",
            f"order-{''.join(map(str, order))}",
            "Stream: another order.",
            split,
            data=h + b"".join(parts[i] for i in order) + e,
            cls="stream",
        )
    small = B((T("x", "u8", (130,)),), fragment_size=64)
    three = small.fragments()
    for places in permutations(range(3)):
        cls = "both" if places == (0, 1, 2) else "stream"
        good(
            "2.3",
            f"three-{''.join(map(str, places))}",
            "Three fragments of one tensor.",
            small,
            data=small.head() + b"".join(three[i] for i in places) + small.end(),
            cls=cls,
        )
    good(
        "11",
        "repeat",
        "Stream: a fragment repeated at once.",
        split,
        data=h + parts[0] + parts[0] + b"".join(parts[1:]) + e,
        cls="stream",
    )
    good(
        "11",
        "repeat-late",
        "Stream: a fragment repeated when all have come. The end does not count it.",
        split,
        data=h + b"".join(parts) + parts[2] + e,
        cls="stream",
    )
    good(
        "11",
        "repeat-all",
        "Stream: every fragment twice.",
        split,
        data=h + b"".join(parts + parts[::-1]) + e,
        cls="stream",
    )
    good(
        "11",
        "repeat-many",
        "Stream: a fragment a hundred times.",
        split,
        data=h + parts[4] * 100 + b"".join(parts) + e,
        cls="stream",
    )
    good(
        "11",
        "repeat-early",
        "Stream: the last fragment first, then all.",
        split,
        data=h + parts[4] + b"".join(parts) + e,
        cls="stream",
    )
    bare = B((T("x", "u8", (130,)),), fragment_size=64, checksums=False)
    one, two, last = bare.fragments()
    good(
        "11",
        "repeat-without-checksums",
        "Stream: a repeat without checksums.",
        bare,
        data=bare.head() + last + one + last + two + bare.end(),
        cls="stream",
    )
    flags = B((T("x", "bool", (65,)),), fragment_size=64)
    first, second = flags.fragments()
    good(
        "11",
        "repeat-bool",
        "Stream: a repeated fragment of a bool.",
        flags,
        data=flags.head() + second + first + second + flags.end(),
        cls="stream",
    )
    good(
        "11",
        "repeat-and-extensions",
        "Stream: extension frames between repeats.",
        split,
        data=h
        + frame(1, b"a")
        + parts[1]
        + frame(2)
        + parts[1]
        + frame(3, bytes(64))
        + parts[0]
        + b"".join(parts[2:])
        + frame(4)
        + e,
        cls="stream",
    )
    good(
        "11",
        "extensions-between-all",
        "An extension frame before every fragment of two tensors, in canonical order.",
        split,
        data=h + b"".join(frame(1, bytes(place)) + part for place, part in enumerate(parts)) + e,
    )
    many = B((T("x", "u8", (64 * 40,)),), fragment_size=64)
    evens, odds = many.fragments()[0::2], many.fragments()[1::2]
    good(
        "11",
        "forty-fragments",
        "Stream: forty fragments, the odd ones first, the even ones backwards.",
        many,
        data=many.head() + b"".join(odds + evens[::-1]) + many.end(),
        cls="stream",
    )


def interleaved(book: Book) -> None:
    good, bad = book.good, book.bad
    a = B((T("x", "u8", (65,)),), number=1, fragment_size=64)
    b = B((T("x", "u8", (65,), bytes(65)),), number=2**63 + 1, fragment_size=64)
    c = B((T("y"),), number=0, minor=1)
    (a0, a1), (b0, b1), (c0,) = a.fragments(), b.fragments(), c.fragments()
    good("11", "sequence", "One bundle after another.", a, b, c)
    good("11", "same-number-again", "A number may be used again when its bundle is closed.", a, a, B(number=1))
    good("11", "no-bundles", "Zero bytes: a stream or core decoder ends without error.")
    good(
        "11",
        "interleaved-two",
        "Stream: two bundles, frame by frame; the second ends first.",
        b,
        a,
        data=a.head() + b.head() + a0 + b0 + b1 + a1 + b.end() + a.end(),
        cls="stream",
    )
    good(
        "11",
        "interleaved-three",
        "Stream: three bundles, of two minor versions, fragments in any order.",
        c,
        a,
        b,
        data=a.head() + b.head() + b1 + c.head(minor=1) + a1 + c0 + c.end() + b0 + a0 + a.end() + b.end(),
        cls="stream",
    )
    good(
        "11",
        "nested",
        "Stream: a bundle inside another one's.",
        c,
        a,
        data=a.head() + a0 + c.encode() + a1 + a.end(),
        cls="stream",
    )
    good(
        "11",
        "interleaved-extensions",
        "Stream: each extension belongs to its bundle.",
        a,
        c,
        data=a.head()
        + c.head()
        + frame(1, b"a", number=1)
        + frame(1, b"c", number=0, minor=1)
        + a0
        + a1
        + a.end()
        + frame(2, number=0, minor=1)
        + c0
        + c.end(),
        cls="stream",
    )
    good(
        "11",
        "reopened",
        "Stream: a number opened again while another bundle stays open.",
        a,
        a,
        b,
        data=b.head() + a.encode() + b0 + a.encode() + b1 + b.end(),
        cls="stream",
    )
    bad(
        "B15",
        "interleaved",
        "Core: what a stream decoder takes.",
        a.head() + b.head() + a0 + b0 + b1 + a1 + b.end() + a.end(),
        "limit_open_bundles",
        128 + 16,
        cls="core",
    )
    bad(
        "B14",
        "interleaved",
        "Stream: a second head of an open bundle, another one between.",
        a.head() + b.head() + a.head(),
        "bundle_already_open",
        256 + 16,
        cls="stream",
    )
    bad(
        "B20",
        "interleaved",
        "Stream: a fragment of the bundle that has ended, while another is open.",
        a.head() + b.head() + a0 + a1 + a.end() + a1,
        "bundle_not_open",
        576 + 16,
        cls="stream",
        before=[a],
    )
    bad(
        "B41",
        "interleaved",
        "Stream: another bundle's fragments do not count.",
        a.head() + b.head() + a0 + b0 + b1 + a.end(),
        "fragment_missing",
        640,
        cls="stream",
    )
    bad(
        "C3",
        "interleaved",
        "Stream: a conflict is one within a bundle; the same place in another bundle is none.",
        a.head()
        + b.head()
        + a0
        + b0
        + a.fragments()[0][:64]
        + a0[64:]
        + B((T("x", "u8", (65,), bytes(65)),), number=1, fragment_size=64).fragments()[0],
        "fragment_conflict",
        256 + 4 * 128 - 64,
        cls="stream",
        flags=["many"],
    )
    bad(
        "B21",
        "interleaved",
        "Stream: the minor is that of its own head.",
        a.head() + c.head() + B((T("x", "u8", (65,)),), number=1, minor=1, fragment_size=64).fragments()[0],
        "frame_version",
        256 + 14,
        cls="stream",
    )
    bad(
        "B1",
        "after-two",
        "Bundles that ended before the error stay delivered; the open one leaves nothing.",
        a.encode() + c.encode() + b.head() + b0[:60] + bytes(4),
        "header_crc",
        448 + 320 + 128 + 60,
        before=[a, c],
    )


def pieces(book: Book) -> None:
    good, bad = book.good, book.bad
    split = B((T("x", "u8", (100,)), T("y", "i64", (3,))), fragment_size=64)
    data = split.encode()  # head of 192 bytes, fragments at 192, 320 and 448, end at 576
    size = len(data)
    for step in (1, 7, 8, 63, 64, 65, 127, 200):
        cut = [step] * (size // step) + ([size % step] if size % step else [])
        good("6", f"pieces-of-{step}", f"The same bytes in pieces of {step}.", split, pieces=cut)
    good("6", "pieces-empty", "Empty pieces between.", split, pieces=[0, 8, 0, 0, size - 8, 0])
    good(
        "6",
        "pieces-unit-borders",
        "Pieces that end where units end.",
        split,
        pieces=[8, 56, 128, 8, 56, 64, 64, 64, 64, 64, 64],
    )
    good(
        "6",
        "pieces-around-borders",
        "Pieces that end one byte before and after.",
        split,
        pieces=[7, 2, 54, 2, 126, 2, 6, 2, size - 201],
    )
    good(
        "6",
        "pieces-two-bundles",
        "The first piece ends inside the second bundle.",
        split,
        split,
        pieces=[size + 30, size - 30],
    )
    bad(
        "B1",
        "pieces",
        "The header's checksum waits for the whole header.",
        split.head(header_crc=0) + data[192:],
        "header_crc",
        60,
        pieces=[59, 4, size - 63],
    )
    bad(
        "B10",
        "pieces",
        "A limit on the body is judged when the header is here; the body need not come.",
        frame(0x81, length=2**40),
        "limit_head_bytes",
        24,
        pieces=[64],
    )
    bad(
        "D1",
        "pieces",
        "A head's fields are judged when the whole frame is here.",
        split.head(head_flags=2),
        "unsupported_head_flag",
        64,
        pieces=[100, 91, 1],
    )
    bad(
        "truncated",
        "waits",
        "So before its last byte of padding the head is only incomplete.",
        split.head(head_flags=2)[:-1],
        "truncated",
        191,
        pieces=[100, 91],
    )
    bad(
        "C2",
        "pieces",
        "A padding byte waits for the last one.",
        data[:192] + data[192:320] + data[320:447] + b"\1" + data[448:],
        "frame_padding",
        447,
        pieces=[446, 1, 1, size - 448],
    )


def ends(book: Book) -> None:
    good, bad = book.good, book.bad
    plain = B((T("x"),))
    data = plain.encode()
    h, f = data[:128], data[128:256]
    bad(
        "truncated",
        "empty",
        "A function for exactly one bundle was given zero bytes.",
        b"",
        "truncated",
        0,
        flags=["one"],
    )
    for size, what in (
        (1, "after one byte"),
        (7, "inside the magic; what is there is not looked at"),
        (8, "after the magic"),
        (63, "inside the head's header"),
        (64, "after the head's header"),
        (120, "after the head's body, before its padding"),
        (127, "before the last byte of padding"),
        (128, "after the head"),
        (135, "inside the magic of a fragment"),
        (191, "inside a fragment's header"),
        (192, "after a fragment's header"),
        (204, "after a fragment's payload"),
        (255, "before the last byte of a fragment's padding"),
        (256, "after the fragment"),
        (319, "inside the end"),
    ):
        bad("truncated", f"at-{size}", f"The input ends {what}.", data[:size], "truncated", size)
    bad("truncated", "no-magic", "Seven bytes that begin no bundle are an incomplete unit.", b"GARBAGE", "truncated", 7)
    large = B(attributes=(A(0x4001, "bytes", bytes(100)),)).encode()  # a head of 256 bytes, and its end
    for size, what in ((256, "after a head that declares no payload"), (319, "one byte before the end does")):
        bad("truncated", f"large-{size}", f"The input ends {what}.", large[:size], "truncated", size)
    bad("truncated", "extension", "The input ends in an extension.", h + frame(1, bytes(100))[:150], "truncated", 278)
    bad("truncated", "second-bundle", "The input ends in a second bundle.", data + h, "truncated", 448, before=[plain])
    bad(
        "truncated",
        "short-rest",
        "A byte after a bundle is an incomplete unit to who expects more bundles.",
        data + b"\0",
        "truncated",
        321,
        before=[plain],
    )
    bad(
        "truncated",
        "one-of-two-open",
        "Stream: one of two bundles has ended.",
        h + B(number=8).encode() + f,
        "truncated",
        448,
        cls="stream",
        before=[B(number=8)],
    )
    for slug, rest, what in (
        ("byte", b"\0", "one byte: nothing of it is checked"),
        ("seven", MAGIC[:7], "seven bytes"),
        ("eight", b"garbage!", "eight bytes that are no magic"),
        ("header", bytes(64), "64 zero bytes"),
        ("bundle", data, "another bundle"),
        ("bad-header", plain.head(header_crc=0), "a head with a wrong checksum"),
    ):
        bad(
            "trailing_bytes",
            slug,
            f"A function for exactly one bundle found after it {what}.",
            data + rest,
            "trailing_bytes",
            320,
            flags=["one"],
        )
    good(
        "11",
        "eight-extra-tensors",
        "Many small tensors, one fragment each.",
        B(tuple(T(f"t{i}", "u8", (i,)) for i in range(9))),
    )
