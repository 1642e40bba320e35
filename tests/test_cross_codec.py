"""The two codecs against each other: the same bytes from the same bundle, the same bundle, events and
error (number and offset) from the same bytes.

The C codec is built once into a folder of the session, together with
native_shim/tests/cross_codec.c, and called through ctypes. What a decoder makes of its
input is compared as a transcript (boundary_bundle/conformance/transcript.py), in which
elements stand as the hexadecimal digits of their bits.

Every byte of each vector up to 512 bytes is set to other values, as it is and with the
checksums of its frame made true again. `make test` gives each byte the few values at
which checks turn and some drawn ones; BOUNDARY_BUNDLE_EVERY_BYTE=1 (`make test-long`)
gives it all 255.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged_vectors import VECTORS, places, small_vectors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import (
    DTYPES,
    Bundle,
    BundleError,
    Contract,
    Decoder,
    Limits,
    TensorRule,
    decode,
    encode,
)
from boundary_bundle.conformance.transcript import of_bundle, of_error, of_events
from boundary_bundle.conformance.vectors import load
from boundary_bundle.contract import AnyValue
from boundary_bundle.testing import bundles, damaged, frames

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "native_shim"
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
EVERY_BYTE = os.environ.get("BOUNDARY_BUNDLE_EVERY_BYTE", "") not in ("", "0")

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler: neither cc, gcc nor clang is on the PATH")

QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
THOROUGH = settings(QUICK, max_examples=400)

LIMIT_NAMES = (
    *("head_bytes", "tensors", "name_bytes", "rank", "dimension", "payload_bytes"),
    *("attribute_bytes", "fragments", "open_bundles", "extension_bytes"),
)
ORDERS = {"little": 1, "big": 2}
ATTRIBUTE_TYPES = {1: "u64", 2: "i64", 3: "f64", 4: "bytes", 5: "text"}


class CTensor(Structure):
    _fields_ = [
        ("name", c_char * 64),
        ("dtype", c_uint8),
        ("byte_order", c_uint8),
        ("rank", c_uint8),
        ("token_axis", c_uint8),
        ("dims", c_uint64 * 8),
        ("bytes", c_uint64),
        ("data", c_void_p),
    ]


class CAttr(Structure):
    _fields_ = [
        ("key", c_uint16),
        ("type", c_uint8),
        ("length", c_uint32),
        ("value", c_char_p),
        ("u64", c_uint64),
    ]


class CDesc(Structure):
    _fields_ = [
        ("number", c_uint64),
        ("minor", c_uint16),
        ("no_checksums", c_bool),
        ("fragment_size", c_uint64),
        ("tensors", POINTER(CTensor)),
        ("tensor_count", c_uint32),
        ("attrs", POINTER(CAttr)),
        ("attr_count", c_uint32),
    ]


class CPart(Structure):
    _fields_ = [("data", c_void_p), ("size", c_size_t)]


class CDim(Structure):
    _fields_ = [("symbols", c_uint64), ("number", c_uint64)]


class CContractTensor(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("dtype", c_uint8),
        ("rank", c_uint8),
        ("token_axis", c_uint8),
        ("dims", CDim * 8),
    ]


class CContractAttr(Structure):
    _fields_ = [("attr", CAttr), ("any", c_bool)]


class CContract(Structure):
    _fields_ = [
        ("attrs", POINTER(CContractAttr)),
        ("attr_count", c_uint32),
        ("tensors", POINTER(CContractTensor)),
        ("tensor_count", c_uint32),
    ]


class CError(Structure):
    _fields_ = [
        ("code", c_int32),
        ("offset", c_uint64),
        ("tensor", c_int32),
        ("name", c_char * 64),
        ("field", c_char_p),
        ("expected", c_uint64),
        ("found", c_uint64),
        ("frame", c_uint64),
        ("expected_text", c_char * 72),
        ("found_text", c_char * 72),
    ]


#: enum bb_struct_id
STRUCTS = {2: CError, 3: CTensor, 4: CAttr, 6: CDesc, 10: CPart, 12: CContract, 13: CContractTensor, 14: CContractAttr}


def c_limits(limits: Limits) -> Any:
    return (c_uint64 * len(LIMIT_NAMES))(*(getattr(limits, name) for name in LIMIT_NAMES))


class CDescription:
    """A bundle as bb_encode takes it; keeps what the structs point at."""

    def __init__(self, bundle: Bundle) -> None:
        self.kept: list[Any] = []
        self.desc = CDesc(bundle.number, bundle.minor, not bundle.checksums, bundle.fragment_size)
        self.tensors = (CTensor * max(1, len(bundle.tensors)))()
        for c, tensor in zip(self.tensors, bundle.tensors, strict=False):
            native = np.frombuffer(bytes(tensor.payload()), np.uint8)
            if tensor.byte_order != sys.byteorder and tensor.row.both_orders:
                native = native.reshape(-1, tensor.row.block_bytes)[:, ::-1]
            native = np.ascontiguousarray(native)
            self.kept.append(native)
            c.name = tensor.name.encode("ascii")
            c.dtype = tensor.row.code
            c.byte_order = ORDERS[tensor.byte_order]
            c.rank = len(tensor.shape)
            c.token_axis = 255 if tensor.token_axis is None else tensor.token_axis
            for axis, dim in enumerate(tensor.shape):
                c.dims[axis] = dim
            c.data = native.ctypes.data if native.size else None
        records = bundle.attributes.records()
        self.attrs = (CAttr * max(1, len(records)))()
        for a, record in zip(self.attrs, records, strict=False):
            self.kept.append(fill_attr(a, record))
        self.desc.tensors = self.tensors
        self.desc.tensor_count = len(bundle.tensors)
        self.desc.attrs = self.attrs
        self.desc.attr_count = len(records)


def fill_attr(a: CAttr, record: Any) -> Any:
    a.key = record.key
    a.type = record.type
    a.length = len(record.raw)
    a.value = record.raw
    if record.type <= 3:
        a.u64 = int.from_bytes(record.raw, "little")
    return record.raw


class CContractOf:
    """A Python contract as bb_contract_compare takes it; symbol `tokens` is bit 0."""

    def __init__(self, contract: Contract) -> None:
        symbols = ["tokens"]
        self.kept: list[Any] = []
        keys = sorted({*contract.any_value, *(record.key for record in contract.attributes.records())})
        self.attrs = (CContractAttr * max(1, len(keys)))()
        for c, key in zip(self.attrs, keys, strict=False):
            record = contract.attributes.record(key)
            if record is None:
                c.any = True
                c.attr.key = key
                c.attr.type = contract.any_value[key]
            else:
                self.kept.append(fill_attr(c.attr, record))
        self.tensors = (CContractTensor * max(1, len(contract.tensors)))()
        for c, rule in zip(self.tensors, contract.tensors, strict=False):
            c.name = rule.name.encode("ascii")
            c.dtype = DTYPES[rule.dtype].code
            c.rank = len(rule.shape)
            c.token_axis = 255 if rule.token_axis is None else rule.token_axis
            for k, dimension in enumerate(rule.shape):
                for term in dimension.split("+"):
                    if term.isdecimal():
                        c.dims[k].number = int(term)
                        continue
                    if term not in symbols:
                        symbols.append(term)
                    c.dims[k].symbols |= 1 << symbols.index(term)
        self.c = CContract(self.attrs, len(keys), self.tensors, len(contract.tensors))


class Library:
    """The C codec as the tests call it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lib = self.lib = ctypes.CDLL(str(path))
        lib.bb_sizeof.restype = c_size_t
        for number, struct in STRUCTS.items():
            assert lib.bb_sizeof(number) == ctypes.sizeof(struct), struct
        config_bytes = lib.bb_sizeof(1)
        self.config = (c_uint64 * (config_bytes // 8 + 1))()
        lib.bb_config_init(self.config)
        lib.cross_transcribe.restype = c_void_p
        lib.cross_transcribe.argtypes = [
            *(c_char_p, c_void_p, ctypes.c_int, c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p, c_size_t),
        ]
        lib.cross_free.argtypes = [c_void_p]
        lib.cross_variants.argtypes = [
            *(c_void_p, c_char_p, c_size_t, c_size_t, c_char_p, c_size_t, ctypes.c_int, ctypes.c_int),
            *(c_size_t, c_size_t, c_void_p, c_void_p, c_void_p),
        ]
        lib.cross_beginnings.argtypes = [c_void_p, c_char_p, c_size_t, c_void_p, c_void_p]
        lib.cross_variants.restype = lib.cross_beginnings.restype = None

    def transcript(
        self,
        kind: str,
        data: bytes,
        limits: Limits,
        pieces: Sequence[int] = (),
        contract: Contract | None = None,
        prepare: bytes | None = None,
        require_checksums: bool = False,
    ) -> str:
        c_contract = None if contract is None else CContractOf(contract)
        pointer = self.lib.cross_transcribe(
            kind.encode(),
            c_limits(limits),
            require_checksums,
            None if c_contract is None else ctypes.addressof(c_contract.c),
            prepare,
            0 if prepare is None else len(prepare),
            data,
            len(data),
            (c_uint32 * len(pieces))(*pieces),
            len(pieces),
        )
        try:
            return ctypes.string_at(pointer).decode("ascii")
        finally:
            self.lib.cross_free(pointer)

    def encode(self, bundle: Bundle) -> bytes:
        described = CDescription(bundle)
        size, written, error = c_uint64(), c_size_t(), CError()
        assert self.lib.bb_encoded_size(self.config, byref(described.desc), byref(size), byref(error)) == 0, error.code
        out = ctypes.create_string_buffer(size.value)
        result = self.lib.bb_encode(self.config, byref(described.desc), out, size, byref(written), byref(error))
        assert result == 0
        assert written.value == size.value
        return out.raw

    def encode_parts(self, bundle: Bundle) -> bytes:
        """Gathered from the parts; payloads in native order must be the caller's own memory."""
        described = CDescription(bundle)
        count, scratch_size, got, error = c_uint64(), c_uint64(), c_size_t(), CError()
        result = self.lib.bb_encode_parts_size(
            self.config, byref(described.desc), byref(count), byref(scratch_size), byref(error)
        )
        assert result == 0
        parts = (CPart * count.value)()
        scratch = ctypes.create_string_buffer(scratch_size.value)
        result = self.lib.bb_encode_parts(
            self.config, byref(described.desc), parts, count, byref(got), scratch, scratch_size, byref(error)
        )
        assert result == 0
        assert got.value == count.value
        own = range(ctypes.addressof(scratch), ctypes.addressof(scratch) + scratch_size.value)
        theirs = 0
        for part in parts:
            theirs += 0 if part.data in own else part.size
        native = [t for t in bundle.tensors if t.byte_order == sys.byteorder or not t.row.both_orders]
        assert theirs == sum(len(tensor.payload()) for tensor in native)
        return b"".join(ctypes.string_at(part.data, part.size) for part in parts)

    def variants(
        self, limits: Any, data: bytes, at: int, values: bytes, repair: tuple[int, int, bool] | None
    ) -> tuple[bytes, Sequence[int], Sequence[int]]:
        """What cross_variants makes: the variants, and a code and an offset for each."""
        count = len(values)
        out = ctypes.create_string_buffer(count * len(data))
        codes, offsets = (c_int32 * count)(), (c_uint64 * count)()
        frame, length, body = repair or (0, 0, False)
        self.lib.cross_variants(
            *(limits, data, len(data), at, values, count, repair is not None, body, frame, length),
            *(out, codes, offsets),
        )
        return out.raw, codes, offsets


@pytest.fixture(scope="session")
def c_codec(tmp_path_factory: pytest.TempPathFactory) -> Library:
    assert CC is not None
    path = tmp_path_factory.mktemp("cross_codec") / "libcross_codec.so"
    sources = [str(SHIM / "boundary_bundle.c"), str(SHIM / "tests" / "cross_codec.c")]
    built = subprocess.run(
        [CC, "-std=c11", "-O2", "-fPIC", "-shared", *sources, "-o", str(path)],
        *(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return Library(path)


# ---- the Python codec's transcripts ---------------------------------------------------


def transcript(
    kind: str,
    data: bytes,
    limits: Limits,
    pieces: Sequence[int] = (),
    contract: Contract | None = None,
    require_checksums: bool = False,
) -> str:
    lines: list[str] = []
    try:
        if kind == "one":
            bundle = decode(data, limits=limits, contract=contract, require_checksums=require_checksums)
            lines += of_bundle(bundle)
        else:
            decoder = Decoder(kind, limits=limits, contract=contract, require_checksums=require_checksums)
            at = 0
            for size in [*pieces, len(data)]:
                lines += of_events(decoder.feed(data[at : at + size]))
                at += size
            decoder.finish()
    except BundleError as error:
        lines += of_events(error.events)
        lines.append(of_error(error))
    return "".join(f"{line}\n" for line in lines)


# ---- drawn bundles --------------------------------------------------------------------


@QUICK
@given(bundles())
def test_encoders_write_the_same_bytes(c_codec: Library, bundle: Bundle) -> None:
    """Python to C and C to Python: one canonical form, and the same bits out of it on both sides."""
    encoded = encode(bundle)
    assert c_codec.encode(bundle) == encoded
    assert c_codec.encode_parts(bundle) == encoded
    of_python = transcript("one", encoded, Limits())
    assert of_python == "".join(f"{line}\n" for line in of_bundle(bundle))
    assert c_codec.transcript("one", encoded, Limits()) == of_python
    assert c_codec.transcript("one", encoded, Limits(), prepare=encoded) == of_python


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[int]:
    """Sizes of pieces; empty ones included."""
    if draw(st.booleans()):
        piece = draw(st.sampled_from((1, 3, 8, 63, 64, 65, 1000)))
        return [piece] * (size // piece)
    places = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    return [b - a for a, b in zip([0, *places], places, strict=False)]


@QUICK
@given(st.lists(bundles(max_tensors=2), min_size=1, max_size=3), st.randoms(use_true_random=False), st.data())
def test_stream_events_are_the_same(c_codec: Library, drawn: list[Bundle], shuffle: Any, data: st.DataObject) -> None:
    """Several bundles at once, fragments in any order and repeated, in drawn pieces."""
    streams = []
    for number, bundle in enumerate(drawn):
        bundle.number = number if shuffle.random() < 0.9 else 0
        head, *fragments, end = [frame.bytes() for frame in frames(encode(bundle))]
        fragments += [fragment for fragment in fragments if shuffle.random() < 0.3]
        shuffle.shuffle(fragments)
        streams.append([head, *fragments, end])
    mixed = b""
    while any(streams):
        mixed += shuffle.choice([stream for stream in streams if stream]).pop(0)
    pieces = data.draw(cuts(len(mixed)))
    limits = Limits(open_bundles=data.draw(st.sampled_from((0, 1, 2, 3, 16))))
    of_python = transcript("stream", mixed, limits, pieces)
    assert c_codec.transcript("stream", mixed, limits, pieces) == of_python
    assert c_codec.transcript("stream", mixed, limits, pieces, prepare=mixed) == of_python


LIMITS = st.one_of(
    st.just(Limits()),
    st.builds(
        Limits,
        head_bytes=st.sampled_from((200, 2**20)),
        tensors=st.integers(0, 4),
        name_bytes=st.integers(0, 63),
        rank=st.integers(0, 8),
        dimension=st.sampled_from((4, 100, 2**31 - 1, 2**63 - 1)),
        payload_bytes=st.sampled_from((100, 2**34, 2**63 - 1)),
        attribute_bytes=st.sampled_from((64, 65_536)),
        fragments=st.sampled_from((4, 2**20)),
        extension_bytes=st.sampled_from((4, 2**20)),
    ),
)


@THOROUGH
@given(damaged(), LIMITS, st.booleans(), bundles(max_tensors=2), st.data())
def test_damage_is_named_alike(
    c_codec: Library, damage: bytes, limits: Limits, require: bool, other: Bundle, data: st.DataObject
) -> None:
    """Drawn damage, checksums repaired: one verdict, number and offset, whole and in pieces, prepared or not."""
    pieces = data.draw(cuts(len(damage)))
    for kind in ("one", "core", "stream"):
        of_python = transcript(kind, damage, limits, pieces, require_checksums=require)
        assert c_codec.transcript(kind, damage, limits, pieces, require_checksums=require) == of_python
        for prepare in (damage, encode(other)):
            again = c_codec.transcript(kind, damage, limits, pieces, prepare=prepare, require_checksums=require)
            assert again == of_python


@QUICK
@given(bundles(max_tensors=2), st.data())
def test_damage_to_a_prepared_bundle(c_codec: Library, bundle: Bundle, data: st.DataObject) -> None:
    """A decoder prepared with the sound head must not overlook what has changed since."""
    sound = encode(bundle)
    parts = frames(sound)
    frame = data.draw(st.sampled_from(parts))
    target = data.draw(st.sampled_from([part for part in (frame.header, frame.body, frame.padding) if part]))
    at = data.draw(st.integers(0, len(target) - 1))
    target[at] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        frame.repair(bundle.checksums)
    damage = b"".join(part.bytes() for part in parts)
    pieces = data.draw(cuts(len(damage)))
    for kind in ("one", "core", "stream"):
        of_python = transcript(kind, damage, Limits(), pieces)
        assert c_codec.transcript(kind, damage, Limits(), pieces, prepare=sound) == of_python


@QUICK
@given(st.binary(max_size=300))
def test_noise(c_codec: Library, noise: bytes) -> None:
    for kind in ("one", "core", "stream"):
        assert c_codec.transcript(kind, noise, Limits()) == transcript(kind, noise, Limits())


# ---- contracts ------------------------------------------------------------------------


@st.composite
def contracts(draw: st.DrawFn, bundle: Bundle) -> Contract:
    """A contract that the bundle may or may not keep."""
    sizes = {"tokens": bundle.attributes.get("n_tokens", 3), "a": draw(st.integers(0, 3)), "b": 1}
    rules = []
    for tensor in bundle.tensors:
        shape: list[str | int] = []
        for dim in tensor.shape:
            symbols = [name for name in sizes if draw(st.booleans())]
            rest = dim - sum(int(sizes[name]) for name in symbols)
            fits = rest >= 0 and draw(st.integers(0, 9)) > 0
            shape.append("+".join([*symbols, str(rest)]) if fits else draw(st.sampled_from((dim, *sizes))))
        axis = tensor.token_axis if draw(st.integers(0, 9)) else None
        dtype = tensor.dtype if draw(st.integers(0, 9)) else "f32"
        if not draw(st.integers(0, 9)):
            shape = shape[:-1]
            axis = None
        rules.append(TensorRule(tensor.name, dtype, shape, axis))
    if not draw(st.integers(0, 5)):
        rules = draw(st.permutations(rules))
    if rules and not draw(st.integers(0, 9)):
        rules.pop(draw(st.integers(0, len(rules) - 1)))
    used = {symbol for rule in rules for dimension in rule.shape for symbol in dimension.split("+")} & set(sizes)
    # Every symbol stands alone somewhere, most often in a tensor that the bundle lacks or in its last.
    alone = [symbol for symbol in used if not any(symbol in rule.shape for rule in rules)]
    if alone:
        index = draw(st.integers(0, len(rules)))
        name = draw(st.sampled_from([tensor.name for tensor in bundle.tensors] + ["extra"]))
        name = name if name not in [rule.name for rule in rules] else "extra"
        rules.insert(index, TensorRule(name, "u8", alone))
    attributes: dict[int, Any] = {}
    for record in bundle.attributes.records():
        choice = draw(st.sampled_from(("no", "no", "value", "any", "other")))
        if choice == "value":
            attributes[record.key] = record
        elif choice == "any":
            attributes[record.key] = AnyValue(ATTRIBUTE_TYPES[record.type])
        elif choice == "other" and record.key in (0x0001, 0x0003, 0x3FFF):
            attributes[record.key] = AnyValue(draw(st.sampled_from(("u64", "bytes", "f64"))))
    if not draw(st.integers(0, 9)):
        attributes[0x3FFE] = AnyValue("u64")
    fixed = {key: value.value for key, value in attributes.items() if not isinstance(value, AnyValue)}
    any_value = {key: value for key, value in attributes.items() if isinstance(value, AnyValue)}
    return Contract(rules, {**fixed, **any_value})


@THOROUGH
@given(bundles(), st.data())
def test_contracts_are_compared_alike(c_codec: Library, bundle: Bundle, data: st.DataObject) -> None:
    """Another order of comparison, another value of a symbol, another name in the error."""
    contract = data.draw(contracts(bundle))
    encoded = encode(bundle)
    for kind in ("one", "core", "stream"):
        of_python = transcript(kind, encoded, Limits(), contract=contract)
        assert c_codec.transcript(kind, encoded, Limits(), contract=contract) == of_python


# ---- vectors, byte by byte ------------------------------------------------------------


def values_for(old: int, drawn: random.Random) -> bytes:
    others = bytes(value for value in range(256) if value != old)
    if EVERY_BYTE:
        return others
    turning = (old + 1, old - 1, old ^ 0x80, old ^ 0x20, 0, 1, 8, 255)
    near = drawn.choice([value & 255 for value in turning if value & 255 != old])
    return bytes((near, *drawn.sample(others, 2)))


def verdict(data: Any, limits: Limits) -> tuple[int, int]:
    try:
        decode(data, limits=limits)
    except BundleError as error:
        return error.number, -1 if error.offset is None else error.offset
    return 0, 0


@pytest.mark.parametrize("file", sorted(VECTORS))
def test_vectors_give_the_same_transcripts(c_codec: Library, file: str) -> None:
    """All classes, small and large vectors, in their pieces."""
    for vector in load():
        if vector.file == file and vector.contract is None:
            limits = Limits(**vector.limits)
            require = "require_checksums" in vector.flags
            for kind in ("one", "core", "stream"):
                for pieces in ((), vector.pieces or (1, 7, 63, 100) * 10):
                    of_python = transcript(kind, vector.data, limits, pieces, require_checksums=require)
                    of_c = c_codec.transcript(kind, vector.data, limits, pieces, require_checksums=require)
                    assert of_c == of_python, vector.id


@pytest.mark.parametrize("file", sorted(VECTORS))
def test_every_beginning_of_each_vector(c_codec: Library, file: str) -> None:
    for name, data, limits in small_vectors(file):
        codes, offsets = (c_int32 * (len(data) + 1))(), (c_uint64 * (len(data) + 1))()
        c_codec.lib.cross_beginnings(c_limits(limits), data, len(data), codes, offsets)
        for size in range(len(data)):
            assert (codes[size], offsets[size]) == verdict(data[:size], limits), (name, size)


Named = tuple[str, bytes, Limits]


def check_bytes(c_codec: Library, vector: Named) -> int:
    """Each byte of the vector with other values, as it is and with the checksums repaired: both codecs must say the
    same of it. Returns how many inputs that were."""
    compared = 0
    name, data, limits = vector
    as_c = c_limits(limits)
    drawn = random.Random(name)
    size = len(data)
    for at, frame in enumerate(places(data)):
        for repair in (None,) if frame is None else (None, frame):
            values = values_for(data[at], drawn)
            variants, codes, offsets = c_codec.variants(as_c, data, at, values, repair)
            for index, value in enumerate(values):
                found = verdict(variants[index * size : (index + 1) * size], limits)
                expected = codes[index], offsets[index] if codes[index] else 0
                assert found == expected, (name, at, value, "repaired" if repair else "as it is")
            compared += len(values)
    return compared


def _load_own(path: Path) -> None:
    global _own
    _own = Library(path)


def _check_with_own(vector: Named) -> int:
    return check_bytes(_own, vector)


@pytest.fixture(scope="session")
def check_all(c_codec: Library) -> Iterator[Callable[[Iterator[Named]], int]]:
    """check_bytes for several vectors. Given all values, that is near 90 million inputs: one process for each
    processor that this one may use."""
    if not EVERY_BYTE:
        yield lambda vectors: sum(check_bytes(c_codec, vector) for vector in vectors)
        return
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processors, context, initializer=_load_own, initargs=(c_codec.path,)) as pool:
        # At the first failure map cancels what has not begun.
        yield lambda vectors: sum(pool.map(_check_with_own, vectors))


@pytest.mark.parametrize("file", sorted(VECTORS))
def test_every_byte_of_each_vector(
    check_all: Callable[[Iterator[Named]], int], file: str, record_property: Callable[[str, object], None]
) -> None:
    compared = check_all(small_vectors(file))
    assert compared > 0
    record_property("inputs compared", compared)
