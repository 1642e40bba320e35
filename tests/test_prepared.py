"""Prepared encoder and decoder: nothing may tell them from the ordinary ones but the time they take."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import (
    ANY,
    DTYPES,
    AnyValue,
    Attributes,
    Bundle,
    BundleError,
    Contract,
    Limits,
    PreparedDecoder,
    PreparedEncoder,
    Tensor,
    TensorRule,
    bits_equal,
    decode,
    encode,
    encode_parts,
)
from boundary_bundle.shards import Batch, Description, Layout
from boundary_bundle.shards.batch import BatchEncoder
from boundary_bundle.testing import bundles, damaged, frames

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
THOROUGH = settings(QUICK, max_examples=400)

STEP = Contract(
    [
        TensorRule("residual", "f32", ("tokens", 8), 0),
        TensorRule("positions", "i32", ("tokens",), 0),
        TensorRule("seq_offsets", "u32", ("tokens+1",)),
        TensorRule("session_epochs", "u64", ("sequences",)),
        TensorRule("outputs", "bool", ("tokens",), 0),
    ],
    {"n_layer": 30, "architecture": "llama", "n_tokens": ANY, "n_seqs": ANY, "model_fingerprint": ANY},
)


def arrays(tokens: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [
        random.standard_normal((tokens, 8), np.float32),
        random.integers(0, 1000, tokens, np.int32),
        random.integers(0, 9, tokens + 1, np.uint32),
        random.integers(0, 2**64, 2, np.uint64),
        random.integers(0, 2, tokens, np.uint8).view(np.bool_),
    ]


def values(tokens: int, seed: int = 0) -> dict[str, Any]:
    return {"n_tokens": tokens, "n_seqs": seed % 7, "model_fingerprint": struct.pack("<Q24x", seed)}


def outcome(function: Any, *arguments: Any, **options: Any) -> Any:
    """A result in a form that compares, or everything that an error says."""
    try:
        result = function(*arguments, **options)
    except BundleError as error:
        return (
            *(type(error), error.name, error.number, error.offset, error.frame, error.tensor, error.field),
            *(repr(error.expected), repr(error.found), str(error)),
        )
    except (ValueError, TypeError, KeyError, struct.error) as error:
        return type(error), str(error)
    return encode(result) if isinstance(result, Bundle) else bytes(result)


def same_bundle(a: Bundle, b: Bundle) -> bool:
    """Equal by bits, and alike in how the arrays lie in memory."""
    return bits_equal(a, b) and all(
        (x.array.dtype, x.array.shape, x.array.flags.writeable, x.array.flags.owndata)
        == (y.array.dtype, y.array.shape, y.array.flags.writeable, y.array.flags.owndata)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("fragment_size", [0, 64])
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("order", ["little", "big"])
def test_steps_of_one_contract(fragment_size: int, checksums: bool, order: str) -> None:
    """A template that keeps something of the step for which it was made."""
    encoder = PreparedEncoder(
        STEP, byte_orders={"positions": order}, fragment_size=fragment_size, checksums=checksums, minor=3
    )
    decoder = PreparedDecoder(STEP)
    for seed in range(40):
        tokens = (1, 1, 2, 1, 5)[seed % 5]
        data, given = arrays(tokens, seed), values(tokens, seed)
        bundle = encoder.bundle(data, given, number=seed)
        expected = encode(bundle)
        for attributes in (given, Attributes(given)):
            assert encoder.encode(data, attributes, number=seed) == expected
            assert b"".join(encoder.encode_parts(data, attributes, number=seed)) == expected
        found = decoder.decode(expected)
        assert same_bundle(found, decode(expected))
        assert bits_equal(found, bundle)
        assert same_bundle(decoder.decode(memoryview(bytearray(expected))), decode(bytearray(expected)))


def test_the_fast_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bundle going through the ordinary codec, which all the other tests here would not notice."""
    encoder, decoder = PreparedEncoder(STEP), PreparedDecoder(STEP)
    made = [encode(encoder.bundle(arrays(1, seed), values(1, seed), number=seed)) for seed in range(4)]
    encoder.encode(arrays(1), values(1))
    decoder.decode(made[0])

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the ordinary codec was called")

    monkeypatch.setattr("boundary_bundle.prepared.decode", refuse)
    monkeypatch.setattr("boundary_bundle.prepared.encode_parts", refuse)
    for seed in range(4):
        assert encoder.encode(arrays(1, seed), values(1, seed), number=seed) == made[seed]
        assert decoder.decode(made[seed]).number == seed
    with pytest.raises(AssertionError):
        decoder.decode(made[0] + b"\0")
    with pytest.raises(AssertionError):
        encoder.encode(arrays(2), values(2))


def test_parts_are_the_callers_arrays() -> None:
    """A payload that is copied on its way into the parts."""
    encoder = PreparedEncoder(STEP)
    data = arrays(3)
    for _ in range(2):
        parts = encoder.encode_parts(data, values(3))
        views = [part for part in parts if isinstance(part, memoryview)]
        assert len(views) == 5
        for array, view in zip(data, views, strict=True):
            assert np.shares_memory(array, np.frombuffer(view, np.uint8))


def test_views_of_the_buffer() -> None:
    """A prepared decoder that copies, or that hands out what can be written to."""
    encoder, decoder = PreparedEncoder(STEP), PreparedDecoder(STEP)
    for seed in range(3):
        data = bytearray(encoder.encode(arrays(3, seed), values(3, seed)))
        bundle = decoder.decode(data)
        for tensor in bundle:
            assert np.shares_memory(tensor.array, np.frombuffer(data, np.uint8))
            assert not tensor.array.flags.writeable
        # What one bundle's owner does to it stays his.
        bundle.attributes["n_seqs"] = 99
        bundle.tensors.clear()
    for shift in range(1, 9):
        # Not aligned: copies, as the ordinary decoder makes.
        moved = memoryview(bytes(shift) + bytes(data))[shift:]
        assert same_bundle(decoder.decode(moved), decode(moved))
        for tensor in decoder.decode(moved):
            assert tensor.array.flags.aligned


BAD_CALLS: list[tuple[str, Any]] = [
    ("dtype", lambda a, v: (a[:1] + [a[1].astype(np.int64)] + a[2:], v, 0)),
    ("same bytes, other dtype", lambda a, v: ([a[0].view(np.int32), *a[1:]], v, 0)),
    ("rank", lambda a, v: ([a[0].reshape(-1), *a[1:]], v, 0)),
    ("tokens", lambda a, v: ([a[0][:1], *a[1:]], v, 0)),
    ("one array too few", lambda a, v: (a[:-1], v, 0)),
    ("one array too many", lambda a, v: (a + a[-1:], v, 0)),
    ("no arrays", lambda a, v: ([array.tolist() for array in a], v, 0)),
    ("bool of 2", lambda a, v: (a[:-1] + [np.full(3, 2, np.uint8).view(np.bool_)], v, 0)),
    ("number", lambda a, v: (a, v, 2**64)),
    ("negative number", lambda a, v: (a, v, -1)),
    ("n_tokens", lambda a, v: (a, v | {"n_tokens": 4}, 0)),
    ("missing attribute", lambda a, v: (a, {"n_tokens": 3}, 0)),
    ("other attribute", lambda a, v: (a, {"n_tokens": 3, "n_seqs": 1, "recipe_fingerprint": bytes(32)}, 0)),
    ("fixed attribute", lambda a, v: (a, v | {"n_layer": 31}, 0)),
    ("fixed attribute, as it is", lambda a, v: (a, v | {"n_layer": 30}, 0)),
    ("name unknown", lambda a, v: (a, {"n_tokens": 3, "n_seqs": 1, "no such": 1}, 0)),
    ("float for u64", lambda a, v: (a, v | {"n_seqs": 1.5}, 0)),
    ("negative u64", lambda a, v: (a, v | {"n_seqs": -1}, 0)),
    ("2^64", lambda a, v: (a, v | {"n_seqs": 2**64}, 0)),
    ("numpy's integer", lambda a, v: (a, v | {"n_seqs": np.int16(3)}, 0)),
    ("true", lambda a, v: (a, v | {"n_seqs": True}, 0)),
    ("short fingerprint", lambda a, v: (a, v | {"model_fingerprint": bytes(31)}, 0)),
    ("long fingerprint", lambda a, v: (a, v | {"model_fingerprint": bytes(33)}, 0)),
    ("text for bytes", lambda a, v: (a, v | {"model_fingerprint": "a" * 32}, 0)),
    ("unknown attribute", lambda a, v: (a, v | {0x4001: 1}, 0)),
    ("negative unknown attribute", lambda a, v: (a, v | {0x4001: -1}, 0)),
    ("unknown text", lambda a, v: (a, v | {0x4001: "abc"}, 0)),
    ("bytes of the same length", lambda a, v: (a, v | {0x4001: b"abc"}, 0)),
    ("illegal text", lambda a, v: (a, v | {0x4001: "a\nc"}, 0)),
    ("not ASCII", lambda a, v: (a, v | {0x4001: "a\u00e9"}, 0)),
    ("f64", lambda a, v: (a, v | {0x4001: 1.0}, 0)),
    ("f64, an int", lambda a, v: (a, v | {0x4001: 1}, 0)),
    ("numpy's float", lambda a, v: (a, v | {0x4001: np.float32(1)}, 0)),
    ("critical attribute", lambda a, v: (a, v | {0xC001: 1}, 0)),
    ("key of a private name twice", lambda a, v: (a, v | {0x8007: 5}, 0)),
    ("the same, turned round", lambda a, v: (a, {0x8007: 5} | v, 0)),
    ("big-endian", lambda a, v: ([a[0].astype(">f4"), *a[1:]], v, 0)),
    ("Fortran order", lambda a, v: ([np.asfortranarray(a[0]), *a[1:]], v, 0)),
    ("strided", lambda a, v: ([np.repeat(a[0], 2, axis=1)[:, ::2], *a[1:]], v, 0)),
    ("no copy of a masked array", lambda a, v: ([np.ma.array(a[0]), *a[1:]], v, 0)),
]


@pytest.mark.parametrize("first", [None, *range(0, len(BAD_CALLS), 3)])
def test_calls_that_do_not_fit(first: int | None) -> None:
    """A call that the template takes and the ordinary encoder refuses, writes otherwise, or the other
    way round; whatever call the template was made by."""

    def plain(arrays: Any, attributes: Any, number: int) -> bytes:
        bundle = encoder.bundle(arrays, attributes, number=number)
        STEP.compare(bundle)
        return encode(bundle)

    encoder = PreparedEncoder(STEP)
    if first is None:
        encoder.encode(arrays(3), values(3))
    for _, make in BAD_CALLS:
        if first is not None:
            outcome(lambda call: encoder.encode(*call[:2], number=call[2]), BAD_CALLS[first][1](arrays(3), values(3)))
        data, attributes, number = make(arrays(3, 1), values(3, 1))
        expected = outcome(plain, data, attributes, number)
        for _ in range(2):
            assert outcome(encoder.encode, data, attributes, number=number) == expected
            found = outcome(
                lambda *call: b"".join(encoder.encode_parts(*call[:2], number=call[2])), *(data, attributes, number)
            )
            assert found == expected


def test_types_of_unregistered_attributes() -> None:
    """A type guessed once for all values, or guessed although the contract says it."""
    contract = Contract((), {0x4001: AnyValue("i64"), 0x4002: AnyValue("f64"), 0x4003: AnyValue("bytes")})
    encoder = PreparedEncoder(contract)
    for first, second, third in ((1, 1, b"ab"), (-1, 1.5, b"cd"), (2**63 - 1, float("nan"), b"abc"), (0, 0.0, b"")):
        made = encoder.encode([], {0x4001: first, 0x4002: second, 0x4003: third, 0x4004: first})
        attributes = decode(made).attributes
        assert [record.type_name for record in attributes.records()] == [
            *("i64", "f64", "bytes", "i64" if first < 0 else "u64")
        ]
        assert attributes[0x4001] == attributes[0x4004] == first
        assert attributes[0x4003] == third


def contract_of(bundle: Bundle) -> Contract:
    """A contract that the bundle meets, its attributes free."""
    return Contract(
        [TensorRule(tensor.name, tensor.dtype, tensor.shape, tensor.token_axis) for tensor in bundle],
        {record.key: AnyValue(record.type_name) for record in bundle.attributes.records()},
    )


@THOROUGH
@given(bundles(), st.integers(0, 2**64 - 1), st.data())
def test_any_bundle(bundle: Bundle, number: int, data: st.DataObject) -> None:
    """A dtype, layout, order, shape or fragment size that the fast path of either writes or reads otherwise."""
    encoder = PreparedEncoder(
        contract_of(bundle),
        byte_orders={tensor.name: tensor.byte_order for tensor in bundle},
        fragment_size=bundle.fragment_size,
        checksums=bundle.checksums,
        minor=bundle.minor,
    )
    decoder = PreparedDecoder()
    for step in range(3):
        bundle.number = number if step else 0
        expected = encode(bundle)
        data_of = [tensor.array for tensor in bundle]
        assert encoder.encode(data_of, bundle.attributes, number=bundle.number) == expected
        assert b"".join(encoder.encode_parts(data_of, bundle.attributes, number=bundle.number)) == expected
        assert same_bundle(decoder.decode(expected), decode(expected))
        for record in bundle.attributes.records():
            if record.key != 0x8006 and record.type != 5 and record.raw:
                size = len(record.raw)
                record.raw = data.draw(st.binary(min_size=size, max_size=size))
        for tensor in bundle:
            if tensor.dtype != "bool" and tensor.array.size and tensor.array.flags.c_contiguous:
                flat = tensor.array.reshape(-1).view(np.uint8)
                tensor.array = np.roll(flat, 1).view(tensor.array.dtype).reshape(tensor.array.shape)


LIMITS = st.one_of(
    st.just(Limits()),
    st.builds(
        Limits,
        tensors=st.integers(1, 4),
        dimension=st.sampled_from((4, 100, 2**31 - 1)),
        payload_bytes=st.sampled_from((100, 2**34)),
        fragments=st.sampled_from((4, 2**20)),
    ),
)


@THOROUGH
@given(damaged(), LIMITS, st.booleans(), st.data())
def test_damage_is_named_alike(damage: bytes, limits: Limits, insist: bool, data: st.DataObject) -> None:
    """A template that accepts what the ordinary decoder refuses, or an error that says something else."""
    decoder = PreparedDecoder(limits=limits, require_checksums=insist)

    def check(some: bytes) -> None:
        expected = outcome(decode, some, limits=limits, require_checksums=insist)
        assert outcome(decoder.decode, some) == expected

    check(damage)
    # And around a template: a good bundle, then the same with a byte changed and its checksums repaired.
    bundle = data.draw(bundles(max_tensors=2))
    good = encode(bundle)
    check(good)
    for _ in range(6):
        spoilt = bytearray(good)
        at = data.draw(st.integers(0, len(spoilt) - 1))
        spoilt[at] ^= data.draw(st.sampled_from((1, 2, 4, 8, 16, 32, 64, 128, 255)))
        check(bytes(spoilt))
        try:
            parts = frames(bytes(spoilt))
        except struct.error:
            continue
        for part in parts:
            if len(part.header) == 64:
                part.repair(bundle.checksums)
        check(b"".join(part.bytes() for part in parts))
        check(good)
    check(good[: data.draw(st.integers(0, len(good)))])
    check(good + b"\0")


def test_every_byte_of_a_step() -> None:
    """A byte that the fast path does not look at."""
    decoder = PreparedDecoder(STEP)
    good = encode(PreparedEncoder(STEP).bundle(arrays(2), values(2), number=5))
    for repair in (False, True):
        for at in range(len(good)):
            for change in (0x01, 0x80, 0xFF):
                spoilt = bytearray(good)
                spoilt[at] ^= change
                try:
                    parts = frames(bytes(spoilt))
                except struct.error:
                    parts = []
                if repair and parts and len(parts[-1].header) == 64:
                    for part in parts:
                        part.repair(True)
                    spoilt = bytearray(b"".join(part.bytes() for part in parts))
                decoder.decode(good)
                assert outcome(decoder.decode, bytes(spoilt)) == outcome(decode, bytes(spoilt), contract=STEP)


def test_templates_are_bounded() -> None:
    """A peer that makes a decoder remember without end."""
    decoder = PreparedDecoder()
    encoder = PreparedEncoder(Contract([TensorRule("x", "u8", ("n",))]))
    for size in range(1, 300):
        made = encoder.encode([np.zeros(64 * size, np.uint8)])
        decoder.decode(made)
    assert len(decoder._forms) <= 64
    assert len(encoder._forms) <= 64
    # Neither a head nor a number of frames beyond reason is kept.
    many = Bundle([Tensor("x", np.zeros(64 * 300, np.uint8))], fragment_size=64)
    big = Bundle((), {0x0100: bytes(60_000)})
    for bundle in (many, big):
        decoder = PreparedDecoder()
        for _ in range(2):
            assert bits_equal(decoder.decode(encode(bundle)), bundle)
        assert not decoder._forms


def test_extensions_and_ignorable_bits() -> None:
    """An extension frame or an ignorable bit that a template swallows or trips over."""
    decoder = PreparedDecoder()
    bundle = Bundle([Tensor("x", np.arange(20, dtype=np.float32))], {"n_layer": 3})
    good = encode(bundle)
    opening, fragment, end = frames(good)
    extension = frames(good)[2]
    extension.header[8] = 0x01
    extension.repair(True)
    with_extension = b"".join(part.bytes() for part in (opening, extension, fragment, end))
    opening.header[9] = 0xF0
    opening.repair(True)
    with_flags = b"".join(part.bytes() for part in (opening, fragment, end))
    for order in ((good, with_flags, with_extension), (with_extension, with_flags, good), (with_flags, good, good)):
        decoder = PreparedDecoder()
        for data in order * 6:
            assert bits_equal(decoder.decode(data), bundle)


def test_every_dtype_is_known_to_the_fast_path() -> None:
    """A dtype whose arrays export no buffer, or that is swapped the wrong way."""
    for row in DTYPES.values():
        for order in ("little", "big") if row.both_orders else ("little",):
            shape = (2, 64)
            contract = Contract([TensorRule("x", row.name, shape)])
            encoder, decoder = PreparedEncoder(contract, byte_orders=order), PreparedDecoder(contract)
            raw = (np.arange(512 * 8) % (2 if row.name == "bool" else 251)).astype(np.uint8)
            stored = row.storage_shape(shape)
            count = int(np.prod(stored)) * row.numpy.itemsize
            array = raw[:count].view(row.numpy).reshape(stored)
            expected = encode(Bundle([Tensor("x", array, dtype=row.name, byte_order=order)]))
            for _ in range(2):
                assert encoder.encode([array]) == expected
                assert b"".join(encoder.encode_parts([array])) == expected
                assert same_bundle(decoder.decode(expected), decode(expected))


def test_parts_alternate() -> None:
    """The prepared encoder reads headers and payloads off the ordinary encoder's parts by their places."""
    bundle = Bundle([Tensor("x", np.zeros(40, np.float32)), Tensor("y", np.zeros(0, np.int8))], fragment_size=64)
    parts = encode_parts(bundle)
    assert len(parts) == 2 * 3 + 1
    assert all(isinstance(part, bytes) for part in parts[::2])
    assert [len(part) for part in parts[1::2]] == [64, 64, 32]


LAYOUTS = st.builds(Layout, st.sampled_from(["little", "big"]), st.sampled_from([0, 64, 256]), st.booleans())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows = draw(st.lists(st.lists(st.integers(0, 3), max_size=3, unique=True), max_size=4))
    tokens, positions = ([draw(st.integers(0, 2**31 - 1)) for _ in rows] for _ in range(2))
    return Batch(tokens, positions, rows, [draw(st.booleans()) for _ in rows])


@QUICK
@given(LAYOUTS, st.lists(st.tuples(batches(), st.integers(0, 2**64 - 1)), min_size=1, max_size=8), st.booleans())
def test_token_requests(layout: Layout, drawn: list[tuple[Batch, int]], named: bool) -> None:
    """A request of a driver that is not what its batch says, or is that of the batch before."""
    told = SimpleNamespace(
        architecture="llama", n_layer=30, fingerprint=bytes(range(32)) if named else None, recipe=None
    )
    model = cast(Description, told)
    encoder = BatchEncoder(model, layout)
    for batch, number in drawn * 2:
        assert encoder.encode(batch, number) == encode(batch.bundle(model, layout, number))
