"""Contracts: their canonical text, and each way in which a bundle differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ..book import Book
from ..builder import A, B, T, fragment, u64

TITLE = "contracts (specification, 5.3 and the end of 6)"

Rule = tuple[str, str, tuple[str, ...], "int | None"]


def contract(rules: Sequence[Rule], attributes: Sequence[tuple[int, str, bytes | None]], text: str) -> dict[str, Any]:
    """A contract in parts, its canonical text and the text's SHA-256."""
    return {
        "attributes": [{"key": k, "type": t, "raw": None if raw is None else raw.hex()} for k, t, raw in attributes],
        "tensors": [{"name": n, "dtype": d, "shape": list(s), "token_axis": a} for n, d, s, a in rules],
        "text": text,
        "fingerprint": hashlib.sha256(text.encode("ascii")).hexdigest(),
    }


RULES: tuple[Rule, ...] = (
    ("residual", "f32", ("tokens", "4"), 0),
    ("positions", "i32", ("tokens",), 0),
    ("seq_offsets", "u32", ("tokens+1",), None),
)
FULL = contract(
    RULES,
    [(0x8005, "u64", u64(30)), (0x8006, "u64", None)],
    "boundary-bundle contract 1\n"
    "attribute 0x8005 u64 1e00000000000000\n"
    "attribute 0x8006 u64 *\n"
    "tensor residual f32 [tokens,4] 0\n"
    "tensor positions i32 [tokens] 0\n"
    "tensor seq_offsets u32 [tokens+1] -\n",
)
BARE = contract(
    RULES,
    [],
    "boundary-bundle contract 1\n"
    "tensor residual f32 [tokens,4] 0\n"
    "tensor positions i32 [tokens] 0\n"
    "tensor seq_offsets u32 [tokens+1] -\n",
)
N_LAYER, N_TOKENS = 0x8005, 0x8006


def batch(tokens: int, layers: int = 30) -> tuple[tuple[T, T, T], tuple[A, A]]:
    return (
        (
            T("residual", "f32", (tokens, 4), axis=0),
            T("positions", "i32", (tokens,), axis=0),
            T("seq_offsets", "u32", (tokens + 1,)),
        ),
        (A(N_LAYER, "u64", u64(layers)), A(N_TOKENS, "u64", u64(tokens))),
    )


def make(book: Book) -> None:
    good, bad = book.good, book.bad
    tensors, attributes = batch(3)
    residual, positions, offsets = tensors
    layer, tokens = attributes

    for count in (0, 1, 3):
        good(
            "5.3",
            f"match-{count}",
            f"A bundle of {count} tokens that is as the contract says.",
            B(*batch(count)),
            contract=FULL,
        )
    good(
        "5.3",
        "more-attributes",
        "Attributes that the contract does not name are no matter.",
        B(tensors, (A(2, "text", b"llama"), layer, A(N_TOKENS, "u64", u64(3)), A(0x8007, "u64", u64(9)))),
        contract=FULL,
    )
    good(
        "5.3",
        "no-n_tokens",
        "Without n_tokens the symbol's value is the first dimension in which it stands alone.",
        B(tensors),
        contract=BARE,
    )
    good(
        "5.3",
        "n_tokens-alone",
        "The one attribute says what tokens is; it stands alone in no dimension.",
        B((T("seq_offsets", "u32", (4,)),), (A(0x8006, "u64", u64(3)),)),
        contract=contract(
            [("seq_offsets", "u32", ("tokens+1",), None)],
            [(0x8006, "u64", None)],
            "boundary-bundle contract 1\nattribute 0x8006 u64 *\ntensor seq_offsets u32 [tokens+1] -\n",
        ),
    )
    good(
        "5.3",
        "no-part-of-it",
        "Byte order, fragment size and checksums are no part of a contract.",
        B(
            (T("residual", "f32", (3, 4), axis=0, order="big"), positions, offsets),
            attributes,
            fragment_size=64,
            checksums=False,
        ),
        contract=FULL,
    )
    empty = contract([], [], "boundary-bundle contract 1\n")
    good("5.3", "empty", "An empty contract and a bundle without tensors.", B(attributes=attributes), contract=empty)
    sums = contract(
        [("a", "u8", ("tokens+seqs+2", "3"), None), ("b", "u8", ("seqs", "tokens"), 1), ("c", "u8", (), None)],
        [(0x0002, "text", b""), (0x0101, "i64", None), (0x8003, "u64", None)],
        "boundary-bundle contract 1\n"
        "attribute 0x0002 text\n"
        "attribute 0x0101 i64 *\n"
        "tensor a u8 [seqs+tokens+2,3] -\n"
        "tensor b u8 [seqs,tokens] 1\n"
        "tensor c u8 [] -\n",
    )
    good(
        "5.3",
        "sums",
        "A sum of symbols whose values come from later dimensions; layer_start is demanded, but no part of the text.",
        B(
            (T("a", "u8", (9, 3)), T("b", "u8", (2, 5), axis=1), T("c", "u8", ())),
            (A(2, "text", b""), A(0x0101, "i64", u64(4)), A(0x8003, "u64", u64(1))),
        ),
        contract=sums,
    )
    bad(
        "contract_shape",
        "sum",
        "The sum differs by one.",
        B(
            (T("a", "u8", (8, 3)), T("b", "u8", (2, 5), axis=1), T("c", "u8", ())),
            (A(2, "text", b""), A(0x0101, "i64", u64(4)), A(0x8003, "u64", u64(1))),
        ).encode(),
        "contract_shape",
        None,
        contract=sums,
        names={"tensor": "a"},
    )

    bad(
        "contract_attribute",
        "absent",
        "An attribute with a fixed value is absent.",
        B(tensors, (tokens,)).encode(),
        "contract_attribute",
        None,
        contract=FULL,
        names={"attribute": N_LAYER},
    )
    bad(
        "contract_attribute",
        "any-absent",
        "An attribute with any value is absent.",
        B(tensors, (layer,)).encode(),
        "contract_attribute",
        None,
        contract=FULL,
        names={"attribute": N_TOKENS},
    )
    bad(
        "contract_attribute",
        "value",
        "Another value.",
        B(*batch(3, 31)).encode(),
        "contract_attribute",
        None,
        contract=FULL,
        names={"attribute": N_LAYER},
    )
    bad(
        "contract_attribute",
        "lowest-key",
        "Two are absent: the lower key is named.",
        B(tensors).encode(),
        "contract_attribute",
        None,
        contract=FULL,
        names={"attribute": N_LAYER},
    )
    bad(
        "contract_attribute",
        "any-type",
        "Any value, but of the contract's type.",
        B(
            (T("a", "u8", (9, 3)), T("b", "u8", (2, 5), axis=1), T("c", "u8", ())),
            (A(2, "text", b""), A(0x0101, "u64", u64(4)), A(0x8003, "u64", u64(1))),
        ).encode(),
        "contract_attribute",
        None,
        contract=sums,
        names={"attribute": 0x0101},
    )
    bad(
        "contract_attribute",
        "before-missing",
        "Attributes come before tensors.",
        B((), (tokens,)).encode(),
        "contract_attribute",
        None,
        contract=FULL,
        names={"attribute": N_LAYER},
    )
    bad(
        "contract_missing",
        "last",
        "A tensor of the contract is missing.",
        B((residual, positions), attributes).encode(),
        "contract_missing",
        None,
        contract=FULL,
        names={"tensor": "seq_offsets"},
    )
    bad(
        "contract_missing",
        "first-of-two",
        "Two are missing: the first in contract order is named.",
        B((offsets,), attributes).encode(),
        "contract_missing",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    bad(
        "contract_missing",
        "renamed",
        "A missing name comes before an extra one.",
        B((residual, T("pos", "i32", (3,), axis=0), offsets), attributes).encode(),
        "contract_missing",
        None,
        contract=FULL,
        names={"tensor": "positions"},
    )
    bad(
        "contract_extra",
        "last",
        "A tensor too many.",
        B((*tensors, T("extra")), attributes).encode(),
        "contract_extra",
        None,
        contract=FULL,
        names={"tensor": "extra"},
    )
    bad(
        "contract_extra",
        "first-of-two",
        "Two too many: the first in bundle order is named.",
        B((T("b"), residual, T("a"), positions, offsets), attributes).encode(),
        "contract_extra",
        None,
        contract=FULL,
        names={"tensor": "b"},
    )
    bad(
        "contract_extra",
        "before-order",
        "An extra name comes before the order.",
        B((positions, residual, offsets, T("a")), attributes).encode(),
        "contract_extra",
        None,
        contract=FULL,
        names={"tensor": "a"},
    )
    bad(
        "contract_extra",
        "empty",
        "An empty contract.",
        B((T("a"),)).encode(),
        "contract_extra",
        None,
        contract=empty,
        names={"tensor": "a"},
    )
    bad(
        "contract_order",
        "swapped",
        "The bundle's tensor at the first place that differs is named.",
        B((residual, offsets, positions), attributes).encode(),
        "contract_order",
        None,
        contract=FULL,
        names={"tensor": "seq_offsets"},
    )
    bad(
        "contract_order",
        "before-dtype",
        "The order comes before the dtypes.",
        B((positions, T("residual", "f16", (3, 4), axis=0), offsets), attributes).encode(),
        "contract_order",
        None,
        contract=FULL,
        names={"tensor": "positions"},
    )
    bad(
        "contract_dtype",
        "f16",
        "A lossy residual that the contract does not ask for.",
        B((T("residual", "f16", (3, 4), axis=0), positions, offsets), attributes).encode(),
        "contract_dtype",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    bad(
        "contract_dtype",
        "as-wide",
        "u32 for i32.",
        B((residual, T("positions", "u32", (3,), axis=0), offsets), attributes).encode(),
        "contract_dtype",
        None,
        contract=FULL,
        names={"tensor": "positions"},
    )
    bad(
        "contract_dtype",
        "before-shape",
        "The dtype comes before the shape.",
        B((T("residual", "f16", (3, 5), axis=0), positions, offsets), attributes).encode(),
        "contract_dtype",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    bad(
        "contract_shape",
        "rank",
        "Another rank.",
        B((residual, T("positions", "i32", (1, 3), axis=1), offsets), attributes).encode(),
        "contract_shape",
        None,
        contract=FULL,
        names={"tensor": "positions"},
    )
    bad(
        "contract_shape",
        "rank-above",
        "A dimension more, after those that the contract names.",
        B((residual, T("positions", "i32", (3, 1), axis=0), offsets), attributes).encode(),
        "contract_shape",
        None,
        contract=FULL,
        names={"tensor": "positions"},
    )
    bad(
        "contract_shape",
        "number",
        "Another number.",
        B((T("residual", "f32", (3, 5), axis=0), positions, offsets), attributes).encode(),
        "contract_shape",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    bad(
        "contract_shape",
        "plus-one",
        "tokens where tokens+1 is asked for.",
        B((residual, positions, T("seq_offsets", "u32", (3,))), attributes).encode(),
        "contract_shape",
        None,
        contract=FULL,
        names={"tensor": "seq_offsets"},
    )
    bad(
        "contract_shape",
        "n_tokens",
        "n_tokens says what tokens is: the first tensor without a token axis differs from it.",
        B((T("residual", "f32", (4, 4)), positions, offsets), attributes).encode(),
        "contract_shape",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    later = contract(
        [("a", "u8", ("n+1",), None), ("b", "u8", ("n",), None)],
        [],
        "boundary-bundle contract 1\ntensor a u8 [n+1] -\ntensor b u8 [n] -\n",
    )
    good(
        "5.3",
        "sum-first",
        "A symbol does not get its value from n+1, although it stands there first and with no other symbol.",
        B((T("a", "u8", (4,)), T("b", "u8", (3,)))),
        contract=later,
    )
    for slug, comment, a, b, named in (
        ("giver-has-another-rank", "b has another rank; its first dimension fits n+1 of a.", (4,), (3, 1), "b"),
        ("giver-of-another-rank-binds", "b has another rank, and still says what n is.", (5,), (3, 1), "a"),
        ("never-resolved", "b has no dimension to say what n is, so n+1 of a has no value.", (4,), (), "a"),
        ("zero-binds", "n is 0.", (2,), (0,), "a"),
    ):
        bad(
            "contract_shape",
            slug,
            comment,
            B((T("a", "u8", a), T("b", "u8", b))).encode(),
            "contract_shape",
            None,
            contract=later,
            names={"tensor": named},
        )
    good("5.3", "zero", "A symbol may be 0.", B((T("a", "u8", (1,)), T("b", "u8", (0,)))), contract=later)
    thrice = contract(
        [("a", "u8", ("n+1",), None), ("b", "u8", ("n",), None), ("c", "u8", ("n",), None)],
        [],
        "boundary-bundle contract 1\ntensor a u8 [n+1] -\ntensor b u8 [n] -\ntensor c u8 [n] -\n",
    )
    for slug, comment, shapes, named in (
        ("first-binds-zero", "The first value is 0, and is a value: c differs.", ((1,), (0,), (3,)), "c"),
        ("next-binds", "b has no dimension: c says what n is, and a fits.", ((4,), (), (3,)), "b"),
        ("next-binds-differs", "b has no dimension: c says what n is, and a does not fit.", ((5,), (), (3,)), "a"),
    ):
        bad(
            "contract_shape",
            slug,
            comment,
            B(tuple(T(name, "u8", shape) for name, shape in zip("abc", shapes, strict=True))).encode(),
            "contract_shape",
            None,
            contract=thrice,
            names={"tensor": named},
        )
    zero = contract(
        [("a", "u8", ("0",), None), ("b", "u8", ("n", "0"), None)],
        [],
        "boundary-bundle contract 1\ntensor a u8 [0] -\ntensor b u8 [n,0] -\n",
    )
    good(
        "5.3",
        "dimension-0",
        "A plain 0 is written.",
        B((T("a", "u8", (0,)), T("b", "u8", (2, 0)))),
        contract=zero,
    )
    bad(
        "contract_shape",
        "dimension-0",
        "1 where 0 is asked for.",
        B((T("a", "u8", (0,)), T("b", "u8", (2, 1)))).encode(),
        "contract_shape",
        None,
        contract=zero,
        names={"tensor": "b"},
    )
    wide = contract(
        [("a", "u8", ("tokens+4",), None)],
        [(N_TOKENS, "u64", None)],
        "boundary-bundle contract 1\nattribute 0x8006 u64 *\ntensor a u8 [tokens+4] -\n",
    )
    bad(
        "contract_shape",
        "sum-of-2^64+3",
        "The sum is 2^64 + 3 and does not wrap to 3.",
        B((T("a", "u8", (3,)),), (A(N_TOKENS, "u64", u64(2**64 - 1)),)).encode(),
        "contract_shape",
        None,
        contract=wide,
        names={"tensor": "a"},
    )
    unsorted = contract(
        [],
        [
            (N_TOKENS, "u64", None),
            (N_LAYER, "u64", u64(30)),
            (0x400A, "bytes", b"\n\xff"),
            (0x3FEB, "f64", None),
            (0x0002, "text", None),
        ],
        "boundary-bundle contract 1\n"
        "attribute 0x0002 text *\n"
        "attribute 0x3feb f64 *\n"
        "attribute 0x400a bytes 0aff\n"
        "attribute 0x8005 u64 1e00000000000000\n"
        "attribute 0x8006 u64 *\n",
    )
    text, half, private = A(2, "text", b""), A(0x3FEB, "f64", u64(0)), A(0x400A, "bytes", b"\n\xff")
    good(
        "5.3",
        "attributes-unsorted",
        "However attributes are given, they stand in the text by ascending key, with letters in lower case.",
        B((), (text, half, private, layer, tokens)),
        contract=unsorted,
    )
    for slug, comment, there, key in (
        ("unsorted", "Four are absent, given in descending order: the lowest key is named.", (private,), 2),
        ("unsorted-letters", "Those above the lowest.", (text, layer), 0x3FEB),
        ("unsorted-fixed", "One with any value and a lower one with a fixed value.", (text, half), 0x400A),
    ):
        bad(
            "contract_attribute",
            slug,
            comment,
            B((), there).encode(),
            "contract_attribute",
            None,
            contract=unsorted,
            names={"attribute": key},
        )
    negative, nan = u64(1 << 63), u64(0x7FF8_0000_0000_0001)
    fixed = contract(
        [],
        [(0x0101, "f64", u64(0)), (0x0102, "f64", nan)],
        "boundary-bundle contract 1\nattribute 0x0101 f64 0000000000000000\nattribute 0x0102 f64 010000000000f87f\n",
    )
    good(
        "5.3",
        "f64",
        "Values are compared by their bytes: a NaN is equal to itself.",
        B((), (A(0x0101, "f64", u64(0)), A(0x0102, "f64", nan))),
        contract=fixed,
    )
    for slug, comment, zero_value, nan_value, key in (
        ("f64-negative-zero", "-0.0 is not 0.0.", negative, nan, 0x0101),
        ("f64-other-nan", "A NaN with another payload.", u64(0), u64(0x7FF8_0000_0000_0002), 0x0102),
    ):
        bad(
            "contract_attribute",
            slug,
            comment,
            B((), (A(0x0101, "f64", zero_value), A(0x0102, "f64", nan_value))).encode(),
            "contract_attribute",
            None,
            contract=fixed,
            names={"attribute": key},
        )
    spelled = contract(
        [("a", "u8", ("b1+_+b+B_+B+0",), None), ("b", "u8", ("b1+0", "b", "_", "B_", "B"), None)],
        [],
        "boundary-bundle contract 1\ntensor a u8 [B+B_+_+b+b1] -\ntensor b u8 [b1,b,_,B_,B] -\n",
    )
    good(
        "5.3",
        "symbols-by-bytes",
        "Symbols stand in ascending order of their bytes; a number of 0 beside one is none, and leaves it alone.",
        B((T("a", "u8", (15,)), T("b", "u8", (1, 2, 3, 4, 5)))),
        contract=spelled,
    )
    layers = contract(
        [],
        [(0x8003, "u64", u64(0)), (0x8004, "u64", u64(15)), (N_LAYER, "u64", None)],
        "boundary-bundle contract 1\nattribute 0x8005 u64 *\n",
    )
    first, last, other = A(0x8003, "u64", u64(0)), A(0x8004, "u64", u64(15)), A(0x8004, "u64", u64(14))
    good(
        "5.3",
        "layers",
        "layer_start and layer_end are demanded, and left out of the text.",
        B((), (first, last, layer)),
        contract=layers,
    )
    bad(
        "contract_attribute",
        "layer_end",
        "What is left out of the text is compared.",
        B((), (first, other, layer)).encode(),
        "contract_attribute",
        None,
        contract=layers,
        names={"attribute": 0x8004},
    )
    one, two = B(*batch(3), number=1), B(*batch(1), number=2)
    wrong = B(*batch(3, 31), number=3)
    good("5.3", "two-bundles", "Every bundle is compared, with token counts of its own.", one, two, contract=FULL)
    bad(
        "contract_attribute",
        "second-bundle",
        "The second bundle differs; the first stands.",
        one.encode() + wrong.encode(),
        "contract_attribute",
        None,
        contract=FULL,
        before=[one],
        names={"attribute": N_LAYER},
    )
    one_parts, two_parts = one.fragments(), two.fragments()
    good(
        "5.3",
        "interleaved",
        "Stream: the heads of both are compared.",
        two,
        one,
        data=one.head() + two.head() + b"".join(two_parts) + two.end() + b"".join(one_parts) + one.end(),
        cls="stream",
        contract=FULL,
    )
    bad(
        "contract_attribute",
        "interleaved",
        "Stream: a head that differs ends the decoder, and with it the bundle that was open; the ended one stands.",
        two.encode() + one.head() + wrong.head() + b"".join(one_parts) + one.end(),
        "contract_attribute",
        None,
        cls="stream",
        contract=FULL,
        before=[two],
        names={"attribute": N_LAYER},
    )
    bad(
        "C2",
        "before-contract",
        "The head frame is whole before it is compared: its padding is not zero.",
        wrong.head()[:-1] + b"\1",
        "frame_padding",
        len(wrong.head()) - 1,
        contract=FULL,
    )
    free = contract(
        [("a", "u8", ("n", "4"), None), ("b", "u8", ("n",), None)],
        [],
        "boundary-bundle contract 1\ntensor a u8 [n,4] -\ntensor b u8 [n] -\n",
    )
    bad(
        "contract_shape",
        "first-binds",
        "The first dimension in which a symbol stands alone says its value; the second tensor differs.",
        B((T("a", "u8", (4, 4)), T("b", "u8", (3,))), attributes).encode(),
        "contract_shape",
        None,
        contract=free,
        names={"tensor": "b"},
    )
    bad(
        "contract_shape",
        "before-token-axis",
        "The shape comes before the token axis.",
        B((T("residual", "f32", (3, 5)), positions, offsets), attributes).encode(),
        "contract_shape",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    bad(
        "contract_token_axis",
        "none",
        "No token axis where one is asked for.",
        B((T("residual", "f32", (3, 4)), positions, offsets), attributes).encode(),
        "contract_token_axis",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    square, (layer_4, _) = batch(4)
    bad(
        "contract_token_axis",
        "other",
        "The other axis of a square.",
        B((T("residual", "f32", (4, 4), axis=1), square[1], square[2]), (layer_4, A(N_TOKENS, "u64", u64(4)))).encode(),
        "contract_token_axis",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    bad(
        "contract_token_axis",
        "before-next-dtype",
        "A tensor is compared to its end before the next one.",
        B((T("residual", "f32", (3, 4)), T("positions", "u32", (3,), axis=0), offsets), attributes).encode(),
        "contract_token_axis",
        None,
        contract=FULL,
        names={"tensor": "residual"},
    )
    late = B((residual, positions), attributes)
    bad(
        "contract_missing",
        "before-payloads",
        "The contract is compared when the head has passed: the fragment after it is not looked at.",
        late.head() + fragment(bytes(3)),
        "contract_missing",
        None,
        contract=FULL,
        names={"tensor": "seq_offsets"},
    )
    bad(
        "D70",
        "before-contract",
        "A head that is malformed is not compared.",
        B((), attributes).head(attribute_count=1),
        "attribute_block",
        64 + 32 + 16,
        contract=FULL,
    )
