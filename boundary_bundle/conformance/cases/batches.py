"""What shards exchange: the registered names together, several sequences, M-RoPE positions."""

from __future__ import annotations

import struct

from ..book import Book
from ..builder import A, B, T, u64

TITLE = "batches as shards exchange them (specification, 5.1 and 5.2)"


def ints(code: str, *values: int) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def counts(tokens: int, sequences: int) -> tuple[A, ...]:
    return (
        A(0x0002, "text", b"llama"),
        A(0x8003, "u64", u64(0)),
        A(0x8004, "u64", u64(10)),
        A(0x8005, "u64", u64(30)),
        A(0x8006, "u64", u64(tokens)),
        A(0x8007, "u64", u64(sequences)),
    )


def residual(tokens: int, width: int = 4) -> T:
    values = struct.pack(f"<{tokens * width}f", *(index / 4 - 1 for index in range(tokens * width)))
    return T("residual", "f32", (tokens, width), values, axis=0)


def make(book: Book) -> None:
    good = book.good
    good(
        "14",
        "example",
        "The bundle that section 14 explains byte by byte.",
        B(
            (T("residual", "f32", (2, 1), struct.pack("<2f", 1.5, -2.0), axis=0),),
            (A(0x0002, "text", b"llama"), A(0x8006, "u64", u64(2))),
            number=5,
        ),
    )
    good(
        "5.1",
        "decode-step",
        "One token of one sequence: the bundle of a decode step.",
        B(
            (
                residual(1),
                T("positions", "i32", (1,), ints("i", 41), axis=0),
                T("seq_offsets", "u32", (2,), ints("I", 0, 1)),
                T("seq_ids", "u32", (1,), ints("I", 0)),
                T("outputs", "bool", (1,), b"\1", axis=0),
            ),
            counts(1, 1),
        ),
    )
    good(
        "5.1",
        "several-sequences",
        "Five tokens of three sequences, interleaved, with a session table; the fourth token belongs to two.",
        B(
            (
                residual(5),
                T("positions", "i32", (5,), ints("i", 7, 0, 8, 1, 3), axis=0),
                T("seq_offsets", "u32", (6,), ints("I", 0, 1, 2, 3, 5, 6)),
                T("seq_ids", "u32", (6,), ints("I", 0, 1, 0, 1, 2, 2)),
                T("session_ids", "u8", (3, 16), bytes(range(48))),
                T("session_epochs", "u64", (3,), ints("Q", 1, 0, 2**64 - 1)),
                T("session_positions", "i64", (3,), ints("q", 7, 0, 3)),
                T("outputs", "bool", (5,), b"\0\0\1\1\1", axis=0),
            ),
            counts(5, 3),
        ),
    )
    rows = ((5, 6, 6, 7), (0, 1, 1, 2), (0, 0, 1, 0), (0, 0, 0, 0))
    positions = T("positions", "i32", (4, 4), b"".join(ints("i", *row) for row in rows), axis=1)
    good(
        "5.1",
        "m-rope",
        "Multi-section rope: positions are [4, tokens], the token axis is the second.",
        B((residual(4), positions), counts(4, 1)),
    )
    good(
        "5.1",
        "m-rope-one-token",
        "One token: [4, 1]; only the declared axis tells it from one row.",
        B((residual(1), T("positions", "i32", (4, 1), ints("i", 9, 9, 9, 9), axis=1)), counts(1, 1)),
    )
    good(
        "5.1",
        "m-rope-big",
        "The same positions, big-endian.",
        B(
            (
                residual(4),
                T(
                    "positions",
                    "i32",
                    (4, 4),
                    struct.pack(">16i", *(value for row in rows for value in row)),
                    axis=1,
                    order="big",
                ),
            ),
            counts(4, 1),
        ),
    )
    good(
        "5.1",
        "four-tokens-one-row",
        "Four tokens with one position each beside none of the above.",
        B((residual(4), T("positions", "i32", (4,), ints("i", 0, 1, 2, 3), axis=0)), counts(4, 1)),
    )
    good(
        "5.1",
        "token-request",
        "A driver's request to the first shard: token ids, and 0 in both layers.",
        B(
            (
                T("token_ids", "i32", (3,), ints("i", 1, 2, 3), axis=0),
                T("positions", "i32", (3,), ints("i", 0, 1, 2), axis=0),
            ),
            (A(0x8003, "u64", u64(0)), A(0x8004, "u64", u64(0)), A(0x8006, "u64", u64(3)), A(0x8007, "u64", u64(1))),
        ),
    )
    good(
        "5.1",
        "logits",
        "What the last shard gives back: a row for each selected token; rows are no token axis.",
        B(
            (
                T("outputs", "bool", (3,), b"\1\0\1", axis=0),
                T("logits", "f32", (2, 3), struct.pack("<6f", 0.5, -1, 2, 3, float("-inf"), 0)),
                T("sampled", "i32", (2,), ints("i", 2, 0)),
            ),
            counts(3, 2),
        ),
    )
    good(
        "5.1",
        "no-outputs",
        "No token selected: logits of no rows, which is not the same as no logits.",
        B(
            (T("outputs", "bool", (2,), b"\0\0", axis=0), T("logits", "f32", (0, 3)), T("sampled", "i32", (0,))),
            counts(2, 1),
        ),
    )
    good(
        "5.1",
        "no-tokens",
        "A batch of no tokens.",
        B(
            (
                residual(0),
                T("positions", "i32", (0,), axis=0),
                T("seq_offsets", "u32", (1,), ints("I", 0)),
                T("seq_ids", "u32", (0,)),
            ),
            counts(0, 0),
        ),
    )
    good(
        "5.1",
        "forwarded",
        "Unknown ancillary attributes beside the registered ones, which a shard forwards.",
        B(
            (residual(2),),
            (
                A(0x0002, "text", b"llama"),
                A(0x0009, "bytes", bytes(32)),
                A(0x0101, "text", b"trace 4711"),
                A(0x4001, "u64", u64(99)),
                A(0x8006, "u64", u64(2)),
            ),
        ),
    )
    good(
        "5.1",
        "bf16-residual",
        "A lossy residual that a contract asks for.",
        B((T("residual", "bf16", (2, 4), axis=0),), counts(2, 1)),
    )
    good("5.1", "q8_0-residual", "A block-quantised one.", B((T("residual", "q8_0", (2, 64), axis=0),), counts(2, 1)))
    good(
        "5.1",
        "datagram",
        "Fragments that fit a datagram: 1,024 bytes of payload, 64 of header.",
        B((residual(2, 576), T("positions", "i32", (2,), ints("i", 3, 4), axis=0)), counts(2, 1), fragment_size=1024),
    )
    good(
        "5.1",
        "shared-memory",
        "Without payload checksums, as over shared memory.",
        B((residual(2),), counts(2, 1), checksums=False),
    )
