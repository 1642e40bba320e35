"""Hypothesis strategies for whoever tests against the format.

:func:`tensors` and :func:`bundles` draw what an encoder must take; :func:`damaged`
draws encodings with something wrong in them, their checksums repaired, so that the
checks behind the checksums are reached; :func:`mismatched` draws bundles with
contracts that they do not meet. This is the only module that imports
hypothesis.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c
from hypothesis import strategies as st

from . import layout
from .bundle import Attribute, Attributes, Bundle, Tensor
from .contract import ANY, Contract, TensorRule
from .dtypes import DTYPES, Array, DType
from .encoder import encode

_T = TypeVar("_T")

# A strategy is made once and not for each draw: making one costs more than drawing from it. Choices from lists that
# differ from draw to draw are draws of a place in them.
_NAME = st.text("abcXYZ019._-/", min_size=1, max_size=63)
_WORDS = ("residual", "positions", "a", "x" * 63, "blk.0/k-v_1")
_NAMES = _NAME | st.sampled_from(_WORDS)
_BYTES = st.binary(max_size=70)
_SOME_BYTES = st.binary(min_size=1, max_size=70)
_SEED = st.binary(max_size=40)
_TEXT_OF_3 = st.text("abc ~", min_size=3, max_size=3)
_EIGHT = st.binary(min_size=8, max_size=8)
#: Type -> bytes of a value.
_VALUES = {1: _EIGHT, 2: _EIGHT, 3: _EIGHT, 4: st.binary(max_size=17), 5: st.text(" ~az", max_size=9).map(str.encode)}
#: Unknown keys without the critical bit, some for private use.
_KEYS = st.sets(st.sampled_from((0x0001, 0x0003, 0x3FFF, 0x4001, 0x7FFF)), max_size=3)
#: Some registered attributes; n_tokens has to fit.
_KNOWN: dict[str, st.SearchStrategy[Any] | None] = {
    "architecture": st.text("abcdefgh 0-9~", max_size=20),
    "model_fingerprint": st.binary(min_size=32, max_size=32),
    "layer_start": st.integers(0, 2**64 - 1),
    "n_tokens": None,
}
#: Values at which a check turns, for any field.
TURNING_POINTS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 31, 32, 33, 34, 40, 48, 63, 64, 65, 68, 128, 255, 256, 257),
    *(2**15 - 1, 2**15, 2**16 - 1, 2**16, 65_537, 2**20, 2**20 + 8, 2**31 - 1, 2**31),
    *(2**32 - 8, 2**32 - 1, 2**32, 2**34, 2**34 + 64, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1),
)


@lru_cache(1024)
def _integers(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


@lru_cache
def _name_lists(most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(_NAMES, unique=True, max_size=most)


@lru_cache
def _bit_sets(bits: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.sampled_from([bit for bit in range(8) if bits >> bit & 1]), min_size=1)


def _pick(draw: st.DrawFn, choices: Sequence[_T]) -> _T:
    """One of ``choices``; shrinks to the first."""
    return choices[draw(_integers(0, len(choices) - 1))]


def _new_name(draw: st.DrawFn, taken: Container[str]) -> str:
    """A name that is not taken and needs padding."""
    name = draw(_NAME)
    while name in taken or len(name) % 8 == 0:
        name = f"{name[1:] if len(name) == 63 else name}x"
    return name


@st.composite
def _arrays(draw: st.DrawFn, row: DType, shape: tuple[int, ...]) -> Array:
    """An array over drawn bits, in one of the layouts that callers have."""
    stored = row.storage_shape(shape)
    count = int(np.prod(stored, dtype=np.int64))
    size = count * row.numpy.itemsize
    seed = draw(_SEED)
    # Every bit pattern counts: NaN payloads, subnormals, negative zero.
    raw = (seed * (size // len(seed) + 1))[:size] if seed else bytes(size)
    if row.name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    array: Array = np.frombuffer(raw, row.numpy).reshape(stored)
    form = _pick(draw, ("plain", "fortran", "strided", "other order"))
    if form == "fortran":
        return np.asfortranarray(array)
    if form == "strided" and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if form == "other order" and row.numpy.kind in "iuf" and row.both_orders:
        swapped: Array = array.view(row.unsigned).byteswap().view(row.numpy.newbyteorder())
        return swapped
    return array


@st.composite
def tensors(draw: st.DrawFn, *, name: str | None = None, tokens: int | None = None, max_elements: int = 256) -> Tensor:
    """A tensor of any dtype, order, rank and layout; its token axis has ``tokens``."""
    row = _pick(draw, _ROWS)
    quantised = row.block_elements != 1
    rank = draw(_integers(1 if quantised else 0, 8))
    shape: list[int] = []
    left = max_elements
    for _ in range(rank):
        # The larger ones give payloads of whole fragments.
        large = left >= 64 and draw(st.booleans())
        dim = _pick(draw, (8, 16, 32, 64)) if large else draw(_integers(0, max(1, min(left, 6))))
        shape.append(dim)
        left //= max(dim, 1)
    if quantised:
        shape[-1] = row.block_elements * min(shape[-1], 3)
    axis = None
    axes = rank - 1 if quantised else rank
    if tokens is not None and axes and draw(st.booleans()):
        axis = draw(_integers(0, axes - 1))
        shape[axis] = tokens
    array = draw(_arrays(row, tuple(shape)))
    return Tensor(
        draw(_NAMES) if name is None else name,
        array,
        dtype=row.name,
        token_axis=axis,
        byte_order=_pick(draw, ("little", "big") if row.both_orders else ("little",)),
    )


@st.composite
def _attributes(draw: st.DrawFn, tokens: int) -> Attributes:
    result = Attributes()
    for name, values in _KNOWN.items():
        if draw(st.booleans()):
            result[name] = tokens if values is None else draw(values)
    for key in draw(_KEYS):
        kind = _pick(draw, tuple(_VALUES))
        result.put(Attribute(key, kind, draw(_VALUES[kind])))
    return result


@st.composite
def bundles(draw: st.DrawFn, *, max_tensors: int = 4) -> Bundle:
    """A logical bundle that every encoder must take."""
    tokens = draw(_integers(0, 5))
    names = draw(_name_lists(max_tensors))
    drawn = [draw(tensors(name=name, tokens=tokens)) for name in names]
    # 1088 is the least multiple of 64 that holds whole q8_0 blocks.
    sizes = (0, 1088, 2176) if any(tensor.dtype == "q8_0" for tensor in drawn) else (0, 64, 128, 192, 1088)
    return Bundle(
        drawn,
        draw(_attributes(tokens)),
        number=_pick(draw, (0, 1, 2**63, 2**64 - 1)),
        minor=_pick(draw, (0, 1, 65535)),
        fragment_size=_pick(draw, sizes),
        checksums=draw(st.booleans()),
    )


_FRAME_FIELDS = layout.field_table(layout.FRAME_HEADER)


class Frame:
    """A frame in parts that can be spoilt one by one."""

    def __init__(self, header: bytes | bytearray, body: bytes | bytearray, padding: bytes | bytearray) -> None:
        self.header = bytearray(header)
        self.body = bytearray(body)
        self.padding = bytearray(padding)

    @property
    def kind(self) -> int:
        """The frame's type."""
        return self.get("type")

    def get(self, field: str) -> int:
        """A field of the header."""
        at, size = _FRAME_FIELDS[field]
        return int.from_bytes(self.header[at : at + size], "little")

    def put(self, field: str, value: int) -> None:
        """Set a field of the header, and no more."""
        at, size = _FRAME_FIELDS[field]
        self.header[at : at + size] = value.to_bytes(size, "little")

    def copy(self) -> Frame:
        """The same once more."""
        return Frame(self.header, self.body, self.padding)

    def repair(self, checksums: bool) -> None:
        """Make both CRCs true again, whatever else the frame says."""
        fragment = self.kind == layout.FRAGMENT
        self.put("body_crc", crc32c(bytes(self.body)) if checksums or not fragment else 0)
        self.repair_header()

    def repair_header(self) -> None:
        """Make the header's CRC true again."""
        at = layout.frame_offset("header_crc")
        struct.pack_into("<I", self.header, at, crc32c(bytes(self.header[:at])))

    def bytes(self) -> bytes:
        """The frame as it stands."""
        return bytes(self.header + self.body + self.padding)


def frames(data: bytes) -> list[Frame]:
    """Cut a well-formed encoding into its frames."""
    found = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at + layout.frame_offset("body_length"))
        body = at + layout.frame_header.size
        end = body + layout.pad64(length)
        found.append(Frame(data[at:body], data[body : body + length], data[body + length : end]))
        at = end
    return found


class _Patient:
    """An encoding that gets one fault: its frames, and where the records of its head lie.

    ``victims`` are the tensors that were put in for the fault, by their place in the head.
    """

    def __init__(self, bundle: Bundle, victims: list[int]) -> None:
        self.bundle = bundle
        self.victims = victims
        self.parts = frames(encode(bundle))
        self.head = self.parts[0]
        self.tensors, self.attributes = _records(self.head.body)

    @property
    def record(self) -> int:
        """Offset in the head's body of the first victim's record."""
        return self.tensors[self.victims[0]]

    def dim(self, axis: int) -> int:
        """Offset of a dimension of the first victim."""
        return self.record + layout.tensor_fixed.size + 8 * axis

    def name(self, victim: int = 0) -> tuple[int, int]:
        """Offset and length of a victim's name."""
        at = self.tensors[self.victims[victim]]
        rank = self.head.body[at + layout.tensor_offset("rank")]
        return at + layout.tensor_fixed.size + 8 * rank, self.head.body[at + layout.tensor_offset("name_length")]

    def fragments(self, victim: bool = True) -> list[int]:
        """Places of the fragment frames: those of the first victim, or all."""
        found = [index for index, part in enumerate(self.parts) if part.kind == layout.FRAGMENT]
        return [index for index in found if self.parts[index].get("field_a") == self.victims[0]] if victim else found

    def place(self, name: str) -> int:
        """The place of a registered attribute among the attributes."""
        return [record.name for record in self.bundle.attributes.records()].index(name)

    def bytes(self) -> bytes:
        """The frames as they stand, with checksums that are true."""
        for part in self.parts:
            part.repair(self.bundle.checksums)
        return b"".join(part.bytes() for part in self.parts)


def _records(body: bytes | bytearray) -> tuple[list[int], list[int]]:
    """Offsets of the tensor records and of the attribute records of a head body as the encoder wrote it."""
    tensors, attributes = struct.unpack_from("<II", body, layout.head_offset("tensor_count"))
    found: tuple[list[int], list[int]] = ([], [])
    at = layout.head_fixed.size
    for _ in range(tensors):
        found[0].append(at)
        rank = body[at + layout.tensor_offset("rank")]
        at += layout.tensor_fixed.size + 8 * rank + layout.pad8(body[at + layout.tensor_offset("name_length")])
    for _ in range(attributes):
        found[1].append(at)
        (length,) = struct.unpack_from("<I", body, at + layout.attribute_offset("value_length"))
        at += layout.attribute_fixed.size + layout.pad8(length)
    return found


@st.composite
def _patients(
    draw: st.DrawFn,
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    axis: int | None = None,
    names: tuple[str, ...] = (),
    others: int = 2,
    pieces: bool = False,
    attributes: Mapping[str, Any] | None = None,
    checksums: bool | None = None,
) -> _Patient:
    """A bundle with up to ``others`` tensors beside one victim for each of ``names``, or one.

    A victim has few elements, in a frame with padding; with ``pieces`` it has several
    fragments. Every bundle has at least one attribute, of type text, 3 bytes long.
    """
    bundle = draw(bundles(max_tensors=others))
    if checksums is not None:
        bundle.checksums = checksums
    row = DTYPES[dtype] if dtype is not None else _pick(draw, _PLAIN)
    quantised = row.block_elements > 1 or any(tensor.row.block_elements > 1 for tensor in bundle)
    if quantised and bundle.fragment_size % 1088:
        bundle.fragment_size = 1088
    if pieces:
        step = bundle.fragment_size = 1088 if quantised else 64
        size = step * draw(_integers(1, 3)) + 8 * draw(_integers(1, 7))
        shape = (size // row.block_bytes,)
    elif shape is None:
        shape = (draw(_integers(1, 5)) * row.block_elements,)
    taken = bundle.names
    victims: list[int] = []
    for name in names or (_new_name(draw, taken),):
        array = draw(_arrays(row, shape))
        order = _pick(draw, ("little", "big") if row.both_orders else ("little",))
        place = draw(_integers(victims[-1] + 1 if victims else 0, len(bundle.tensors)))
        bundle.tensors.insert(place, Tensor(name, array, dtype=row.name, token_axis=axis, byte_order=order))
        victims.append(place)
    if axis is not None:
        bundle.attributes["n_tokens"] = shape[axis]
    bundle.attributes["architecture"] = draw(_TEXT_OF_3)
    for key, value in (attributes or {}).items():
        bundle.attributes[key] = value
    return _Patient(bundle, victims)


#: Puts a fault into the patient and returns the bytes, or None for the patient's own with true checksums.
_Fault = Callable[[st.DrawFn, _Patient], "bytes | None"]
#: Name of the error -> ways to come to it, each with what it needs for a patient.
_FAULTS: dict[str, list[tuple[_Fault, dict[str, Any]]]] = {}
_ROWS = tuple(DTYPES.values())
_PLAIN = [row for row in DTYPES.values() if row.block_elements == 1]
_TOP = 2**32 - 1


def _fault(error: str, **needs: Any) -> Callable[[_Fault], _Fault]:
    def register(fault: _Fault) -> _Fault:
        _FAULTS.setdefault(error, []).append((fault, needs))
        return fault

    return register


def _flip(draw: st.DrawFn, target: bytearray, *places: int, bits: int = 255) -> None:
    """Change at least one of ``bits`` of the byte at one of ``places``."""
    changed = draw(_bit_sets(bits))
    target[_pick(draw, places)] ^= sum(1 << bit for bit in changed)


def _behind(draw: st.DrawFn, p: _Patient) -> Frame:
    """Any frame but the head."""
    return _pick(draw, p.parts[1:])


def _between(draw: st.DrawFn, p: _Patient) -> int:
    """A place after the head and before the end."""
    return draw(_integers(1, len(p.parts) - 1))


@_fault("truncated")
def _cut(draw: st.DrawFn, p: _Patient) -> bytes:
    data = p.bytes()
    return data[: draw(_integers(0, len(data) - 1))]


@_fault("trailing_bytes")
def _more(draw: st.DrawFn, p: _Patient) -> bytes:
    return p.bytes() + draw(_SOME_BYTES)


@_fault("bad_magic")
def _magic(draw: st.DrawFn, p: _Patient) -> None:
    _flip(draw, _pick(draw, p.parts).header, *range(8))


@_fault("header_crc")
def _header_crc(draw: st.DrawFn, p: _Patient) -> bytes:
    p.bytes()
    _flip(draw, _pick(draw, p.parts).header, *range(8, 64))
    return b"".join(part.bytes() for part in p.parts)


@_fault("unsupported_major")
def _major(draw: st.DrawFn, p: _Patient) -> None:
    _pick(draw, p.parts).put("major", _pick(draw, (0, 2, 256, 257, 65535)))


@_fault("header_reserved")
def _header_reserved(draw: st.DrawFn, p: _Patient) -> None:
    _flip(draw, _pick(draw, p.parts).header, 10, 11, *range(52, 60))


@_fault("header_flags")
def _header_flags(draw: st.DrawFn, p: _Patient) -> None:
    _flip(draw, _pick(draw, p.parts).header, layout.frame_offset("flags"), bits=layout.REJECTED_FLAGS)


@_fault("unsupported_frame")
def _frame_type(draw: st.DrawFn, p: _Patient) -> None:
    _pick(draw, p.parts).put("type", _pick(draw, (0x80, 0x84, 0x8F, 0xC0, 0xFF)))


@_fault("limit_head_bytes")
def _long_head(draw: st.DrawFn, p: _Patient) -> None:
    p.head.put("body_length", _pick(draw, (2**20 + 8, 2**20 + 1, 2**32, 2**63, 2**64 - 1)))


@_fault("body_length")
def _body_length(draw: st.DrawFn, p: _Patient) -> None:
    if draw(st.booleans()):
        n = draw(_integers(5, 99))
        p.head.put("body_length", 8 * n + n % 7 + 1)
    else:
        p.head.put("body_length", draw(_integers(0, 31)))


@_fault("body_length")
def _end_body(draw: st.DrawFn, p: _Patient) -> None:
    p.parts[-1].put("body_length", 2**64 - 1 if draw(st.booleans()) else draw(_integers(1, 64)))


@_fault("head_fields")
def _head_fields_set(draw: st.DrawFn, p: _Patient) -> None:
    p.head.put(_pick(draw, ("field_a", "field_b")), draw(_integers(1, 2**64 - 1)))


@_fault("bundle_already_open")
def _second_head(draw: st.DrawFn, p: _Patient) -> None:
    p.parts.insert(_between(draw, p), p.head.copy())


@_fault("limit_open_bundles")
def _other_head(draw: st.DrawFn, p: _Patient) -> None:
    # One too many for a core decoder; with sixteen more for one of streams too.
    count = _pick(draw, (1, 16))
    for number in range(1, count + 1):
        other = p.head.copy()
        other.put("bundle_number", (p.bundle.number + number) % 2**64)
        p.parts.insert(1, other)


@_fault("bundle_not_open")
def _other_number(draw: st.DrawFn, p: _Patient) -> None:
    _behind(draw, p).put("bundle_number", (p.bundle.number + _pick(draw, (1, 2**32, 2**63))) % 2**64)


@_fault("bundle_not_open")
def _no_head(draw: st.DrawFn, p: _Patient) -> None:
    del p.parts[0]


@_fault("bundle_not_open")
def _after_the_end(draw: st.DrawFn, p: _Patient) -> None:
    p.parts.append(_behind(draw, p).copy())


@_fault("frame_version")
def _other_minor(draw: st.DrawFn, p: _Patient) -> None:
    _behind(draw, p).put("minor", (p.bundle.minor + _pick(draw, (1, 65535))) % 65536)


@_fault("fragment_tensor")
def _no_such_tensor(draw: st.DrawFn, p: _Patient) -> None:
    more = _pick(draw, (0, 1, 2**32, 2**63))
    p.parts[_pick(draw, p.fragments(False))].put("field_a", len(p.bundle) + more)


@_fault("fragment_offset", pieces=True)
def _off_the_grid(draw: st.DrawFn, p: _Patient) -> None:
    frame = p.parts[_pick(draw, p.fragments())]
    frame.put("field_b", frame.get("field_b") + _pick(draw, (1, 8, 63, 2**20, 2**32, 2**63)))


@_fault("fragment_length", pieces=True)
def _other_length(draw: st.DrawFn, p: _Patient) -> None:
    frame = p.parts[_pick(draw, p.fragments())]
    frame.put("body_length", _pick(draw, (0, len(frame.body) - 1, len(frame.body) + 1, 2**32, 2**64 - 1)))


@_fault("fragment_order", pieces=True)
def _swapped(draw: st.DrawFn, p: _Patient) -> None:
    places = p.fragments()
    one = places.pop(draw(_integers(0, len(places) - 1)))
    other = _pick(draw, places)
    p.parts[one], p.parts[other] = p.parts[other], p.parts[one]


@_fault("fragment_order")
def _repeated(draw: st.DrawFn, p: _Patient) -> None:
    place = _pick(draw, p.fragments())
    p.parts.insert(draw(_integers(place + 1, len(p.parts) - 1)), p.parts[place].copy())


@_fault("fragment_conflict", pieces=True)
def _conflicting(draw: st.DrawFn, p: _Patient) -> None:
    place = _pick(draw, p.fragments())
    other = p.parts[place].copy()
    _flip(draw, other.body, *range(len(other.body)))
    p.parts.insert(draw(_integers(place + 1, len(p.parts) - 1)), other)


@_fault("payload_crc_present", checksums=False)
def _crc_all_the_same(draw: st.DrawFn, p: _Patient) -> bytes:
    p.bytes()
    frame = p.parts[_pick(draw, p.fragments(False))]
    frame.put("body_crc", draw(_integers(1, _TOP)))
    frame.repair_header()
    return b"".join(part.bytes() for part in p.parts)


@_fault("fragment_missing", pieces=True)
def _missing(draw: st.DrawFn, p: _Patient) -> None:
    del p.parts[_pick(draw, p.fragments())]


@_fault("end_fragments")
def _other_count(draw: st.DrawFn, p: _Patient) -> None:
    end = p.parts[-1]
    end.put("field_a", (end.get("field_a") + _pick(draw, (1, 2**32, 2**64 - 1))) % 2**64)


@_fault("end_payload_bytes")
def _other_sum(draw: st.DrawFn, p: _Patient) -> None:
    end = p.parts[-1]
    end.put("field_b", (end.get("field_b") + _pick(draw, (1, 64, 2**32, 2**64 - 1))) % 2**64)


@_fault("limit_extension_bytes")
def _long_extension(draw: st.DrawFn, p: _Patient) -> None:
    frame = p.parts[-1].copy()
    frame.put("type", _pick(draw, (0x01, 0x40, 0x7F)))
    frame.put("body_length", _pick(draw, (2**20 + 1, 2**32, 2**64 - 1)))
    p.parts.insert(_between(draw, p), frame)


@_fault("body_crc")
def _body_crc(draw: st.DrawFn, p: _Patient) -> bytes:
    p.bytes()
    summed = [part for part in p.parts if p.bundle.checksums or part.kind != layout.FRAGMENT]
    frame = _pick(draw, summed)
    if frame.body and draw(st.booleans()):
        _flip(draw, frame.body, *range(len(frame.body)))
    else:
        at = layout.frame_offset("body_crc")
        _flip(draw, frame.header, *range(at, at + 4))
        frame.repair_header()
    return b"".join(part.bytes() for part in p.parts)


@_fault("frame_padding")
def _frame_padding(draw: st.DrawFn, p: _Patient) -> None:
    padded = [part for part in p.parts if part.padding]
    frame = _pick(draw, padded)
    _flip(draw, frame.padding, *range(len(frame.padding)))


@_fault("bool_value", dtype="bool")
def _no_bool(draw: st.DrawFn, p: _Patient) -> None:
    body = p.parts[p.fragments()[0]].body
    body[draw(_integers(0, len(body) - 1))] = draw(_integers(2, 255))


@_fault("unsupported_head_flag")
def _head_flag(draw: st.DrawFn, p: _Patient) -> None:
    if draw(st.booleans()):
        _flip(draw, p.head.body, 0, bits=0xFE)
    else:
        _flip(draw, p.head.body, 1)


@_fault("checksums_required", checksums=False)
def _unsummed(draw: st.DrawFn, p: _Patient) -> None:
    """Nothing is wrong, but for a consumer that insists on checksums."""


@_fault("head_reserved")
def _head_reserved(draw: st.DrawFn, p: _Patient) -> None:
    _flip(draw, p.head.body, *range(24, 32))


@_fault("limit_tensors")
def _many_tensors(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, layout.head_offset("tensor_count"), 4, _pick(draw, (257, 65_536, 2**31, _TOP)))


@_fault("limit_attribute_bytes")
def _many_attributes(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, layout.head_offset("attribute_bytes"), 4, _pick(draw, (65_537, 65_544, 2**31, _TOP)))


@_fault("attribute_block")
def _odd_block(draw: st.DrawFn, p: _Patient) -> None:
    at = layout.head_offset("attribute_bytes")
    size = len(p.head.body) - p.attributes[0]
    more = (*range(1, 8), len(p.head.body) - 24 - size)
    _put(p, at, 4, min(size + _pick(draw, more), 65_535))


@_fault("attribute_block")
def _attribute_count(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, layout.head_offset("attribute_count"), 4, _near(draw, len(p.attributes)))


@_fault("attribute_block")
def _long_value(draw: st.DrawFn, p: _Patient) -> None:
    at = p.attributes[-1] + layout.attribute_offset("value_length")
    _put(p, at, 4, _pick(draw, (2**16, 2**31, _TOP - 7, _TOP)))


@_fault("fragment_size")
def _odd_fragments(draw: st.DrawFn, p: _Patient) -> None:
    at = layout.head_offset("fragment_size")
    _put(p, at, 8, _pick(draw, (1, 8, 32, 63, 65, 2**63 + 32, 2**64 - 1)))


@_fault("fragment_size", dtype="q8_0")
def _torn_blocks(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, layout.head_offset("fragment_size"), 8, _pick(draw, (64, 1024, 1152, 2**32)))


@_fault("tensor_table")
def _tensor_count(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, layout.head_offset("tensor_count"), 4, _near(draw, len(p.tensors)))


@_fault("limit_rank")
def _rank(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.record + layout.tensor_offset("rank"), 1, draw(_integers(9, 255)))


@_fault("limit_name")
def _long_name(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.record + layout.tensor_offset("name_length"), 1, draw(_integers(64, 255)))


@_fault("tensor_name")
def _no_name(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.record + layout.tensor_offset("name_length"), 1, 0)


@_fault("tensor_name")
def _odd_name(draw: st.DrawFn, p: _Patient) -> None:
    at, length = p.name()
    p.head.body[at + draw(_integers(0, length - 1))] = _pick(draw, b"\0 \x1f!,:@[`{\x7f\x80\xff")


@_fault("unsupported_dtype")
def _dtype(draw: st.DrawFn, p: _Patient) -> None:
    unknown = sorted(set(range(256)) - {row.code for row in DTYPES.values()})
    _put(p, p.record, 1, _pick(draw, unknown))


@_fault("tensor_byte_order")
def _byte_order(draw: st.DrawFn, p: _Patient) -> None:
    one_only = not p.bundle.tensors[p.victims[0]].row.both_orders
    _put(p, p.record + 1, 1, 2 if one_only and draw(st.booleans()) else _pick(draw, (0, 3, 128, 255)))


@_fault("tensor_token_axis")
def _axis(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.record + layout.tensor_offset("token_axis"), 1, draw(_integers(1, 254)))


@_fault("tensor_token_axis", dtype="q8_0")
def _block_axis(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.record + layout.tensor_offset("token_axis"), 1, 0)


@_fault("tensor_reserved")
def _tensor_reserved(draw: st.DrawFn, p: _Patient) -> None:
    _flip(draw, p.head.body, *range(p.record + 5, p.record + 8))


@_fault("limit_dimension")
def _dimension(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.dim(0), 8, _pick(draw, (2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)))


@_fault("tensor_block", dtype="q8_0")
def _half_block(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.dim(0), 8, 32 * draw(_integers(0, 4)) + draw(_integers(1, 31)))


@_fault("tensor_block", dtype="u8", shape=(), others=0)
def _no_block(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.record, 1, DTYPES["q8_0"].code)


@_fault("limit_payload_bytes", shape=(1, 1, 2))
def _large(draw: st.DrawFn, p: _Patient) -> None:
    sizes = ((2**17, 2**18, 1), (2**31 - 1, 2**31 - 1, 1), (2**31 - 1, 0, 2**31 - 1), (2**31 - 1,) * 3)
    for axis, size in enumerate(_pick(draw, sizes)):
        _put(p, p.dim(axis), 8, size)


@_fault("limit_fragments", others=0)
def _many_fragments(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, layout.head_offset("fragment_size"), 8, 64)
    _put(p, p.dim(0), 8, _pick(draw, (2**27, 2**26 + 1, 2**30)))


@_fault("record_padding")
def _name_padding(draw: st.DrawFn, p: _Patient) -> None:
    at, length = p.name()
    _flip(draw, p.head.body, *range(at + length, at + layout.pad8(length)))


@_fault("record_padding")
def _value_padding(draw: st.DrawFn, p: _Patient) -> None:
    at = p.attributes[p.place("architecture")] + 8
    _flip(draw, p.head.body, *range(at + 3, at + 8))


@_fault("tensor_duplicate", names=("v0", "v1"), others=1)
def _same_name(draw: st.DrawFn, p: _Patient) -> None:
    at, length = p.name(1)
    one, _ = p.name(0)
    p.head.body[at : at + length] = p.head.body[one : one + length]


@_fault("token_count", names=("v0", "v1"), shape=(2, 3), others=0)
def _two_counts(draw: st.DrawFn, p: _Patient) -> None:
    for victim, axis in zip(p.victims, _pick(draw, ((0, 1), (1, 0))), strict=True):
        _put(p, p.tensors[victim] + layout.tensor_offset("token_axis"), 1, axis)


@_fault("token_count", axis=0, shape=(2,), others=0)
def _other_tokens(draw: st.DrawFn, p: _Patient) -> None:
    at = p.attributes[p.place("n_tokens")] + 8
    _put(p, at, 8, _pick(draw, (0, 1, 3, 2**32 + 2, 2**64 - 1)))


@_fault("attribute_key")
def _key(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, _pick(draw, p.attributes), 2, _pick(draw, (0, 0x4000, 0x8000, 0xC000)))


@_fault("attribute_order", attributes={"n_layer": 1})
def _attribute_order(draw: st.DrawFn, p: _Patient) -> None:
    place = draw(_integers(1, len(p.attributes) - 1))
    before = p.bundle.attributes.records()[place - 1].key
    keys = [before] + ([before - 1] if (before - 1) & layout.KEY_NUMBER else [])
    _put(p, p.attributes[place], 2, _pick(draw, keys))


@_fault("attribute_type")
def _attribute_type(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, _pick(draw, p.attributes) + 2, 1, _pick(draw, (0, 6, 128, 255)))


@_fault("attribute_type")
def _registered_type(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.attributes[p.place("architecture")] + 2, 1, draw(_integers(1, 4)))


@_fault("attribute_reserved")
def _attribute_reserved(draw: st.DrawFn, p: _Patient) -> None:
    _flip(draw, p.head.body, _pick(draw, p.attributes) + 3)


@_fault("unsupported_attribute")
def _critical_key(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.attributes[-1], 2, _pick(draw, (0x8009, 0x9000, 0xBFFF, 0xC001, 0xFFFF)))


@_fault("attribute_length", attributes={"n_layer": 1})
def _short_number(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.attributes[p.place("n_layer")] + 4, 4, draw(_integers(1, 7)))


@_fault("attribute_length", attributes={"recipe_fingerprint": bytes(32)})
def _short_fingerprint(draw: st.DrawFn, p: _Patient) -> None:
    _put(p, p.attributes[p.place("recipe_fingerprint")] + 4, 4, draw(_integers(25, 31)))


@_fault("attribute_value")
def _odd_text(draw: st.DrawFn, p: _Patient) -> None:
    at = p.attributes[p.place("architecture")] + 8
    p.head.body[at + draw(_integers(0, 2))] = _pick(draw, b"\0\n\x1f\x7f\x80\xff")


def _near(draw: st.DrawFn, count: int) -> int:
    return count + _pick(draw, (1, -1))


def _put(p: _Patient, at: int, width: int, value: int) -> None:
    p.head.body[at : at + width] = value.to_bytes(width, "little")


#: Errors that :func:`damaged` can be told to aim at: those of decoders, without contracts.
AIMS = tuple(sorted(_FAULTS))


@st.composite
def _aimed(draw: st.DrawFn, aim: str) -> bytes:
    """One fault, for which the error ``aim`` is due in some class of decoder."""
    fault, needs = _pick(draw, _FAULTS[aim])
    patient = draw(_patients(**needs))
    data = fault(draw, patient)
    return patient.bytes() if data is None else data


#: Errors that :func:`mismatched` can be told to aim at.
CONTRACT_AIMS = (
    *("contract_attribute", "contract_missing", "contract_extra", "contract_order"),
    *("contract_dtype", "contract_shape", "contract_token_axis"),
)


def _rule(tensor: Tensor) -> dict[str, Any]:
    """What a contract says of a tensor like this one; the token axis is a symbol."""
    shape: list[Any] = list(tensor.shape)
    if tensor.token_axis is not None:
        shape[tensor.token_axis] = "tokens"
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": tuple(shape), "token_axis": tensor.token_axis}


@st.composite
def mismatched(draw: st.DrawFn, aim: str | None = None) -> tuple[Bundle, Contract]:
    """A bundle, and a contract that it does not meet for one reason.

    The error, ``aim``, is one of :data:`CONTRACT_AIMS`; without it any.
    """
    if aim is None:
        aim = _pick(draw, CONTRACT_AIMS)
    p = draw(_patients(names=("v0", "v1"), shape=(2, 3), axis=0, others=0, attributes={"n_layer": 30}))
    rules = [_rule(tensor) for tensor in p.bundle]
    demanded: dict[Any, Any] = {"n_layer": _pick(draw, (ANY, 30)), "n_tokens": ANY}
    place = draw(_integers(0, len(rules) - 1))
    rule = rules[place]
    if aim == "contract_attribute":
        # Absent, or with another value; the patient's own architecture is three characters long.
        demanded |= _pick(draw, ({"recipe_fingerprint": ANY}, {"n_layer": 31}, {"architecture": "four"}))
    elif aim == "contract_missing":
        other = _new_name(draw, p.bundle)
        rules.insert(draw(_integers(0, len(rules))), {**rule, "name": other})
    elif aim == "contract_extra":
        del rules[place]
    elif aim == "contract_order":
        rules.append(rules.pop(0))
    elif aim == "contract_dtype":
        rule["dtype"] = _pick(draw, [row.name for row in _PLAIN if row.name != rule["dtype"]])
    elif aim == "contract_shape":
        rule["shape"] = _pick(draw, (("tokens", 4), ("tokens+1", 3), ("tokens", 3, 1), ("tokens",)))
    else:
        rule["token_axis"] = _pick(draw, (None, 1))
    return p.bundle, Contract([TensorRule(**told) for told in rules], demanded)


def _head_fields(body: bytes | bytearray) -> list[tuple[int, int]]:
    """(offset, width) of every field of a head body as the encoder wrote it."""
    tensors, attributes = struct.unpack_from("<II", body, layout.head_offset("tensor_count"))
    found = list(layout.field_table(layout.HEAD_FIXED).values())
    at = layout.head_fixed.size
    for _ in range(tensors):
        rank = body[at + layout.tensor_offset("rank")]
        length = body[at + layout.tensor_offset("name_length")]
        found += [(at + offset, size) for offset, size in layout.field_table(layout.TENSOR_FIXED).values()]
        at += layout.tensor_fixed.size
        found += [(at + 8 * axis, 8) for axis in range(rank)]
        at += 8 * rank
        end = at + layout.pad8(length)
        # The name's first byte and the last of its padding, if there is any.
        found += [(at, 1), (end - 1, 1)]
        at = end
    for _ in range(attributes):
        (length,) = struct.unpack_from("<I", body, at + layout.attribute_offset("value_length"))
        found += [(at + offset, size) for offset, size in layout.field_table(layout.ATTRIBUTE_FIXED).values()]
        at += layout.attribute_fixed.size
        end = at + layout.pad8(length)
        if length:
            found += [(at, 8), (at, 1), (end - 1, 1)]
        at = end
    return found


def _set(draw: st.DrawFn, target: bytearray, at: int, width: int) -> None:
    old = int.from_bytes(target[at : at + width], "little")
    near = (old + 1, old - 1, old ^ 128, old + 32, old * 2, old + (1 << (8 * width - 1)))
    value = _pick(draw, TURNING_POINTS if draw(st.booleans()) else near)
    target[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _poke(draw: st.DrawFn, target: bytearray) -> None:
    """Change a field of any width anywhere."""
    width = _pick(draw, (1, 2, 4, 8))
    # Fields lie on multiples of their width; any other place is as good as noise.
    if len(target) >= width:
        _set(draw, target, draw(_integers(0, len(target) // width - 1)) * width, width)


_MOVES = ("drop", "repeat", "swap", "extension", "resize")


def damaged(aim: str | None = None) -> st.SearchStrategy[bytes]:
    """Encodings with something wrong in them.

    One fault with a known error, of any decode error there is, in most of them; one to
    three changes anywhere in the others (now and then none that shows). With ``aim``, one
    of :data:`AIMS`, that error is due: always in at least one of the classes of decoder,
    of a consumer that insists on checksums or of one that does not.
    """
    return _ANY if aim is None else _aimed(aim)


@st.composite
def _any_damage(draw: st.DrawFn) -> bytes:
    aim = _pick(draw, (*AIMS, *(None,) * (len(AIMS) // 3)))
    return draw(_changed() if aim is None else _aimed(aim))


@st.composite
def _changed(draw: st.DrawFn) -> bytes:
    """An encoding with one to three things wrong (now and then none that shows)."""
    bundle = draw(bundles(max_tensors=3))
    parts = frames(encode(bundle))
    length_at = layout.frame_offset("body_length")
    fields = _head_fields(parts[0].body)
    opening = parts[0]
    for _ in range(_pick(draw, (1, 1, 1, 2, 3))):
        index = draw(_integers(0, len(parts) - 1)) if parts else 0
        kind = _pick(draw, ("field",) * 8 + ("body", "header", "header", "padding") + _MOVES)
        if not parts:
            break
        frame = parts[index]
        if kind == "body":
            _poke(draw, frame.body)
        elif kind == "field":
            at, width = _pick(draw, fields)
            if at + width <= len(opening.body):
                _set(draw, opening.body, at, width)
        elif kind == "header":
            _poke(draw, frame.header)
        elif kind == "padding":
            _poke(draw, frame.padding)
        elif kind == "drop":
            del parts[index]
        elif kind == "repeat":
            parts.insert(index, Frame(frame.header, frame.body, frame.padding))
        elif kind == "swap":
            other = draw(_integers(0, len(parts) - 1))
            parts[index], parts[other] = parts[other], parts[index]
        elif kind == "extension":
            body = draw(_BYTES)
            header = bytearray(parts[0].header)
            header[layout.frame_offset("type")] = _pick(draw, (0x01, 0x40, 0x7F, 0x80, 0xC0))
            struct.pack_into("<Q", header, length_at, len(body))
            parts.insert(index, Frame(header, body, bytes(-len(body) % 64)))
        else:
            step = _pick(draw, (-64, -8, -4, -1, 1, 4, 8, 64))
            new = max(0, len(frame.body) + step)
            frame.body = (frame.body + bytes(64))[:new]
            frame.padding = bytearray(-new % 64)
            struct.pack_into("<Q", frame.header, length_at, new)
    unrepaired = _pick(draw, (-1,) * 16 + (0, 1))
    for index, frame in enumerate(parts):
        if index != unrepaired:
            frame.repair(bundle.checksums)
    data = b"".join(frame.bytes() for frame in parts)
    ending = _pick(draw, ("as is",) * 8 + ("cut", "more"))
    if ending == "cut" and data:
        return data[: draw(_integers(0, len(data) - 1))]
    if ending == "more":
        return data + draw(_SOME_BYTES)
    return data


_ANY = _any_damage()

__all__ = ["AIMS", "CONTRACT_AIMS", "TURNING_POINTS", "Frame", "bundles", "damaged", "frames", "mismatched", "tensors"]
