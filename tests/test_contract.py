"""Contracts: what is compared, in which order, and the canonical text (specification, 5.3 and 6)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boundary_bundle import (
    ANY,
    ERRORS,
    AnyValue,
    Attribute,
    Attributes,
    Bundle,
    BundleError,
    BundleReady,
    Contract,
    ContractMismatch,
    Decoder,
    Tensor,
    TensorRule,
    decode,
    encode,
)

TEXT = (Path(__file__).parent.parent / "spec" / "boundary-bundle.md").read_text("utf-8")


CONTRACT = Contract(
    [
        TensorRule("residual", "f32", ("tokens", 8), 0),
        TensorRule("seq_offsets", "u32", ("tokens+1",)),
        TensorRule("outputs", "bool", ("tokens",), 0),
    ],
    {"n_layer": 30, "architecture": "llama"},
)


def good(tokens: int = 3) -> Bundle:
    return Bundle(
        [
            Tensor("residual", np.zeros((tokens, 8), np.float32), token_axis=0),
            Tensor("seq_offsets", np.zeros(tokens + 1, np.uint32)),
            Tensor("outputs", np.zeros(tokens, np.bool_), token_axis=0),
        ],
        {"n_layer": 30, "architecture": "llama", "n_tokens": tokens},
        fragment_size=64,
    )


def changed(index: int | None = None, tensor: Tensor | None = None, **attributes: Any) -> Bundle:
    bundle = good()
    if index is not None:
        bundle.tensors[index : index + 1] = [tensor] if tensor is not None else []
    for name, value in attributes.items():
        if value is None:
            del bundle.attributes[name]
        else:
            bundle.attributes[name] = value
    return bundle


def swapped() -> Bundle:
    bundle = good()
    bundle.tensors[:2] = bundle.tensors[1::-1]
    return bundle


MISMATCHES = [
    ("contract_attribute", None, "architecture", lambda: changed(0, architecture="gemma", n_layer=None)),
    ("contract_attribute", None, "n_layer", lambda: changed(n_layer=None)),
    ("contract_attribute", None, "n_layer", lambda: changed(n_layer=31)),
    ("contract_missing", "residual", None, lambda: changed(0, Tensor("extra", np.zeros(3)))),
    ("contract_missing", "outputs", None, lambda: changed(2)),
    ("contract_extra", "extra", None, lambda: extra()),
    ("contract_order", "seq_offsets", None, swapped),
    ("contract_dtype", "residual", "dtype", lambda: changed(0, Tensor("residual", np.zeros((3, 9), np.float16)))),
    ("contract_shape", "residual", "dims", lambda: changed(0, Tensor("residual", np.zeros((3, 9), np.float32)))),
    ("contract_shape", "residual", "dims", lambda: changed(0, Tensor("residual", np.zeros((3, 8, 1), np.float32)))),
    ("contract_shape", "seq_offsets", "dims", lambda: changed(1, Tensor("seq_offsets", np.zeros(3, np.uint32)))),
    ("contract_shape", "seq_offsets", "dims", lambda: changed(1, Tensor("seq_offsets", np.zeros(0, np.uint32)))),
    ("contract_shape", "outputs", "dims", lambda: changed(2, Tensor("outputs", np.zeros(4, np.bool_)))),
    ("contract_token_axis", "residual", "token_axis", lambda: changed(0, Tensor("residual", np.zeros((3, 8), "f4")))),
]


def extra() -> Bundle:
    bundle = good()
    bundle.tensors.insert(1, Tensor("extra", np.zeros(3)))
    return bundle


@pytest.mark.parametrize(("name", "tensor", "field", "make"), MISMATCHES)
def test_contract_mismatch(name: str, tensor: str | None, field: str | None, make: Callable[[], Bundle]) -> None:
    """Two builds that disagree and do not learn in what, or learn it as a decoding error,
    or only after payloads have been taken."""
    bundle = make()
    data = encode(bundle)
    cut = data[: 64 + -(-struct.unpack_from("<Q", data, 24)[0] // 64) * 64]
    for run in (
        lambda: CONTRACT.compare(bundle),
        lambda: CONTRACT.compare(Decoder().feed(cut)[0]),
        lambda: decode(data, contract=CONTRACT),
        lambda: Decoder(contract=CONTRACT).feed(cut),
    ):
        with pytest.raises(BundleError) as caught:
            run()
        error = caught.value
        assert (error.name, error.number, error.offset) == (name, ERRORS[name][0], None)
        assert (error.tensor, error.field) == (tensor, field)


def test_contract_accepts() -> None:
    """A contract tied to a number of tokens, a byte order or a fragment size."""
    for tokens in (0, 1, 7):
        bundle = good(tokens)
        assert CONTRACT.compare(bundle) == {"tokens": tokens}
        bundle.tensors[0].byte_order = "big"
        bundle.fragment_size = 0
        assert decode(encode(bundle), contract=CONTRACT).attributes["n_tokens"] == tokens


def test_a_mismatch_ends_the_decoder() -> None:
    """A decoder that compares the first head only, or goes on with bundles that were open."""

    def numbered(number: int, **attributes: Any) -> bytes:
        bundle = changed(**attributes)
        bundle.number = number
        return encode(bundle)

    ended, opened, wrong = numbered(1), numbered(2), numbered(3, n_layer=31)
    cut = 64 + -(-struct.unpack_from("<Q", opened, 24)[0] // 64) * 64
    decoder = Decoder("stream", contract=CONTRACT)
    with pytest.raises(ContractMismatch) as caught:
        decoder.feed(ended + opened[:cut] + wrong)
    assert caught.value.field == "n_layer"
    assert [event.bundle.number for event in caught.value.events if isinstance(event, BundleReady)] == [1]
    assert decoder.open_bundles == []
    with pytest.raises(ContractMismatch):
        decoder.feed(opened[cut:])


def test_contract_sums() -> None:
    """Sums read from left to right only, or bound to less than nothing."""
    contract = Contract(
        [
            TensorRule("a", "u8", ("2 + n + 1",)),
            TensorRule("b", "u8", ("m",)),
            TensorRule("c", "u8", ("m+n",)),
            TensorRule("d", "u8", ("n",)),
        ]
    )

    def shapes(*sizes: int) -> Bundle:
        return Bundle(Tensor(name, np.zeros(size, np.uint8)) for name, size in zip("abcd", sizes, strict=True))

    assert contract.compare(shapes(5, 4, 6, 2)) == {"n": 2, "m": 4}
    for tensor, sizes in (("c", (5, 4, 7, 2)), ("a", (2, 4, 3, 2)), ("a", (5, 4, 6, 3)), ("a", (5, 4, 4, 0))):
        with pytest.raises(ContractMismatch, match="contract_shape") as caught:
            contract.compare(shapes(*sizes))
        assert caught.value.tensor == tensor
    many = "1" * 5000
    for wrong in (*("n-1", "2n", "n+n", "", "n+", "-1", "n*2", "\u0664", "\u00e9", "01", "n+00", "0x4"), many):
        with pytest.raises(ValueError, match="dimension"):
            TensorRule("a", "u8", (wrong,))
    for large in (2**63, str(2**63), f"n+{2**63}", f"{2**62}+n+{2**62}"):
        with pytest.raises(ValueError, match="dimension"):
            TensorRule("a", "u8", (large,))
    assert TensorRule("a", "u8", (2**63 - 1, 0)).text() == "tensor a u8 [9223372036854775807,0] -"
    assert TensorRule("c", "u8", ("n+m",)).text() == contract.tensors[2].text() == "tensor c u8 [m+n] -"
    with pytest.raises(ValueError, match="same name"):
        Contract([TensorRule("a", "u8", ()), TensorRule("a", "u8", ())])
    with pytest.raises(ValueError, match="no axis"):
        TensorRule("a", "u8", ("n",), 1)
    for name in ("", "a b", "a\n", "\u00e9", "n" * 64):
        with pytest.raises(ValueError, match="name of a tensor"):
            TensorRule(name, "u8", ("n",))
    assert TensorRule("a", "u8", range(8)).text() == "tensor a u8 [0,1,2,3,4,5,6,7] -"
    with pytest.raises(ValueError, match="9 dimensions"):
        TensorRule("a", "u8", range(9))
    with pytest.raises(ValueError, match="unknown dtype"):
        TensorRule("a", "q9", ("n",))


def test_symbols_stand_alone_somewhere() -> None:
    """A symbol that takes its value out of a sum, which another implementation leaves open."""
    for shape in (("n+m",), ("n+1",), ("tokens+1",)):
        with pytest.raises(ValueError, match="open"):
            Contract([TensorRule("a", "u8", shape)])
    # Here the bundle itself says it.
    contract = Contract([TensorRule("a", "u8", ("tokens+1",))], {"n_tokens": ANY})
    assert contract.compare(Bundle([Tensor("a", np.zeros(4, np.uint8))], {"n_tokens": 3})) == {"tokens": 3}
    with pytest.raises(ContractMismatch, match="contract_shape"):
        contract.compare(Bundle([Tensor("a", np.zeros(4, np.uint8))], {"n_tokens": 4}))
    # n_tokens is the value of tokens, and of no other symbol.
    with pytest.raises(ValueError, match="'n' open"):
        Contract([TensorRule("a", "u8", ("n+1",))], {"n_tokens": ANY})


def test_tokens_are_what_the_bundle_says() -> None:
    """A token count taken from a shape although the bundle states one; a demand for it that nobody made."""
    contract = Contract([TensorRule("a", "u8", ("tokens",)), TensorRule("b", "u8", ("tokens+1",))])

    def bundle(a: int, b: int, **attributes: int) -> Bundle:
        tensors = [Tensor("a", np.zeros(a, np.uint8)), Tensor("b", np.zeros(b, np.uint8))]
        return Bundle(tensors, attributes)

    assert contract.compare(bundle(3, 4)) == {"tokens": 3}
    assert contract.compare(bundle(3, 4, n_tokens=3)) == {"tokens": 3}
    for tensor, other in (("b", bundle(3, 3)), ("a", bundle(3, 4, n_tokens=2)), ("a", bundle(2, 4, n_tokens=3))):
        with pytest.raises(ContractMismatch, match="contract_shape") as caught:
            contract.compare(other)
        assert caught.value.tensor == tensor


def test_a_symbol_without_its_dimension() -> None:
    """A sum whose symbol has no value passed over, or a value given up with the rank."""
    contract = Contract([TensorRule("a", "u8", ("n+1",)), TensorRule("b", "u8", ("n",)), TensorRule("c", "u8", ("n",))])

    def named(*shapes: tuple[int, ...]) -> str | None:
        tensors = [Tensor(name, np.zeros(shape, np.uint8)) for name, shape in zip("abc", shapes, strict=True)]
        with pytest.raises(ContractMismatch, match="contract_shape") as caught:
            contract.compare(Bundle(tensors))
        return caught.value.tensor

    assert named((4,), (9, 9), (9,)) == "a"
    assert named((10,), (9, 9), (9,)) == "b"
    assert named((4,), (), (3,)) == "b"
    assert named((4,), (), ()) == "a"


def test_any_value() -> None:
    """An attribute that may have any value, and may be absent or of another type after all."""
    assert AnyValue().type is None
    contract = Contract((), {"n_tokens": ANY, 0x0100: AnyValue("bytes"), "n_layer": 30, "n_seqs": AnyValue("u64")})
    good = Attributes({"n_tokens": 5, "n_seqs": 0, "n_layer": 30, 0x0100: b""})
    assert contract.compare(Bundle((), good)) == {}
    for key, value, field, expected, found in (
        ("n_tokens", None, "n_tokens", "any u64", "absent"),
        (0x0100, None, "0x0100", "any bytes", "absent"),
        (0x0100, 1.5, "0x0100", "any bytes", 1.5),
        ("n_layer", 31, "n_layer", 30, 31),
        ("n_seqs", None, "n_seqs", "any u64", "absent"),
    ):
        attributes = Attributes(good)
        if value is None:
            del attributes[key]
        else:
            attributes[key] = value
        with pytest.raises(ContractMismatch, match="contract_attribute") as caught:
            contract.compare(Bundle((), attributes))
        error = caught.value
        assert (error.field, error.expected, error.found) == (field, expected, found)
    # By ascending key, fixed and free ones alike.
    with pytest.raises(ContractMismatch) as caught:
        contract.compare(Bundle((), {"n_layer": 1}))
    assert caught.value.field == "0x0100"
    with pytest.raises(ContractMismatch) as caught:
        contract.compare(Bundle((), {0x0100: b"", "n_seqs": 1}))
    assert caught.value.field == "n_layer"
    with pytest.raises(ValueError, match="type"):
        Contract((), {0x0100: ANY})
    with pytest.raises(ValueError, match="u64"):
        Contract((), {"n_tokens": AnyValue("text")})
    with pytest.raises(ValueError, match="no attribute type"):
        AnyValue("u32")
    for demand in ({"contract_fingerprint": ANY}, {"contract_fingerprint": bytes(32)}):
        with pytest.raises(ValueError, match="contract_fingerprint"):
            Contract((), demand)
    with pytest.raises(ValueError, match="contract_fingerprint"):
        Contract((), [Attribute(0x8008, 4, bytes(32))])
    for twice in ({"n_tokens": ANY, 0x8006: 3}, {"n_tokens": 3, 0x8006: 3}, {"n_tokens": ANY, 0x8006: ANY}):
        with pytest.raises(ValueError, match="twice"):
            Contract((), twice)
    with pytest.raises(KeyError):
        Contract((), {"no such name": ANY})


def test_records_are_taken_as_they_are() -> None:
    """An attribute whose type is guessed again from its value."""
    record = Attribute(0x0100, 2, bytes(8))
    contract = Contract((), [record])
    assert contract.text().splitlines()[1:] == ["attribute 0x0100 i64 0000000000000000"]
    assert contract.compare(Bundle((), [record])) == {}
    with pytest.raises(ContractMismatch):
        contract.compare(Bundle((), {0x0100: 0}))
    # Their types too, which values alone would not give; and from whatever gives them once.
    for kind in (1, 2):
        typed = Attribute(0x0100, kind, bytes(8))
        for given in (Attributes([typed]), [typed], iter([typed])):
            assert Contract((), given).attributes.record(0x0100) == typed


def test_the_text_of_the_specification() -> None:
    """A canonical text that is another than the specification's own example."""
    example = re.search(r"```\n(boundary-bundle contract 1\n.*?)```", TEXT, re.DOTALL)
    assert example is not None
    contract = Contract(
        [TensorRule("residual", "f32", ("tokens", 576), 0), TensorRule("seq_offsets", "u32", ("tokens+1",))],
        {"n_tokens": ANY, "n_layer": 30, "layer_start": 0, "layer_end": ANY},
    )
    assert contract.text() == example[1]
    # What is left out of the text is compared all the same.
    with pytest.raises(ContractMismatch) as caught:
        contract.compare(Bundle((), {"layer_start": 1, "layer_end": 2}))
    assert caught.value.field == "layer_start"


def test_contract_fingerprint() -> None:
    """A canonical text that changes with spelling, or not with meaning."""
    assert CONTRACT.text() == (
        "boundary-bundle contract 1\n"
        "attribute 0x0002 text 6c6c616d61\n"
        "attribute 0x8005 u64 1e00000000000000\n"
        "tensor residual f32 [tokens,8] 0\n"
        "tensor seq_offsets u32 [tokens+1] -\n"
        "tensor outputs bool [tokens] 0\n"
    )
    assert CONTRACT.fingerprint() == hashlib.sha256(CONTRACT.text().encode()).digest()
    spelt = TensorRule("seq_offsets", "u32", (" 1 +tokens",))
    same = Contract([CONTRACT.tensors[0], spelt, CONTRACT.tensors[2]], {"architecture": "llama", "n_layer": 30})
    assert same.fingerprint() == CONTRACT.fingerprint()
    assert Contract(CONTRACT.tensors).fingerprint() != CONTRACT.fingerprint()
    assert Contract(CONTRACT.tensors[::-1]).fingerprint() != Contract(CONTRACT.tensors).fingerprint()
