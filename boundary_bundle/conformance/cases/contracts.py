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
    bad(
        "contract_shape",
        "giver-has-another-rank",
        "n+1 of a is not compared, since b, which should say what n is, has another rank: b is named.",
        B((T("a", "u8", (4,)), T("b", "u8", (3, 1)))).encode(),
        "contract_shape",
        None,
        contract=later,
        names={"tensor": "b"},
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
