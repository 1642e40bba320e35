"""Hypothesis strategies for whoever tests against the format.

:func:`tensors` and :func:`bundles` draw what an encoder must take; :func:`damaged`
draws encodings with something wrong in them, their checksums repaired, so that the
checks behind the checksums are reached. This is the only module that imports
hypothesis.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from crc32c import crc32c
from hypothesis import strategies as st

from . import layout
from .bundle import Attribute, Attributes, Bundle, Tensor
from .dtypes import DTYPES, Array, DType
from .encoder import encode

_NAME = st.text("abcXYZ019._-/", min_size=1, max_size=63)
_WORDS = ("residual", "positions", "a", "x" * 63, "blk.0/k-v_1")
#: Values at which a check turns, for any field.
TURNING_POINTS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 31, 32, 33, 34, 40, 48, 63, 64, 65, 68, 128, 255, 256, 257),
    *(2**15 - 1, 2**15, 2**16 - 1, 2**16, 65_537, 2**20, 2**20 + 8, 2**31 - 1, 2**31),
    *(2**32 - 8, 2**32 - 1, 2**32, 2**34, 2**34 + 64, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1),
)


@st.composite
def _arrays(draw: st.DrawFn, row: DType, shape: tuple[int, ...]) -> Array:
    """An array over drawn bits, in one of the layouts that callers have."""
    stored = row.storage_shape(shape)
    count = int(np.prod(stored, dtype=np.int64))
    size = count * row.numpy.itemsize
    seed = draw(st.binary(min_size=0, max_size=40))
    # Every bit pattern counts: NaN payloads, subnormals, negative zero.
    raw = (seed * (size // len(seed) + 1))[:size] if seed else bytes(size)
    if row.name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    array: Array = np.frombuffer(raw, row.numpy).reshape(stored)
    form = draw(st.sampled_from(("plain", "fortran", "strided", "other order")))
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
    row = draw(st.sampled_from(list(DTYPES.values())))
    quantised = row.block_elements != 1
    rank = draw(st.integers(1 if quantised else 0, 8))
    shape: list[int] = []
    left = max_elements
    for _ in range(rank):
        dim = draw(st.integers(0, max(1, min(left, 6))))
        shape.append(dim)
        left //= max(dim, 1)
    if quantised:
        shape[-1] = row.block_elements * min(shape[-1], 3)
    axis = None
    axes = rank - 1 if quantised else rank
    if tokens is not None and axes and draw(st.booleans()):
        axis = draw(st.integers(0, axes - 1))
        shape[axis] = tokens
    array = draw(_arrays(row, tuple(shape)))
    return Tensor(
        draw(_NAME | st.sampled_from(_WORDS)) if name is None else name,
        array,
        dtype=row.name,
        token_axis=axis,
        byte_order=draw(st.sampled_from(("little", "big") if row.both_orders else ("little",))),
    )


@st.composite
def _attributes(draw: st.DrawFn, tokens: int) -> Attributes:
    result = Attributes()
    known: tuple[tuple[str, st.SearchStrategy[Any]], ...] = (
        ("architecture", st.text("abcdefgh 0-9~", max_size=20)),
        ("model_fingerprint", st.binary(min_size=32, max_size=32)),
        ("layer_start", st.integers(0, 2**64 - 1)),
        ("n_tokens", st.just(tokens)),
    )
    for name, values in known:
        if draw(st.booleans()):
            result[name] = draw(values)
    # Unknown keys without the critical bit, some for private use.
    for key in draw(st.sets(st.sampled_from((0x0001, 0x0003, 0x3FFF, 0x4001, 0x7FFF)), max_size=3)):
        value: Any = draw(
            st.one_of(
                st.tuples(st.just(1), st.binary(min_size=8, max_size=8)),
                st.tuples(st.just(2), st.binary(min_size=8, max_size=8)),
                st.tuples(st.just(3), st.binary(min_size=8, max_size=8)),
                st.tuples(st.just(4), st.binary(max_size=17)),
                st.tuples(st.just(5), st.text(" ~az", max_size=9).map(str.encode)),
            )
        )
        result.put(Attribute(key, *value))
    return result


@st.composite
def bundles(draw: st.DrawFn, *, max_tensors: int = 4) -> Bundle:
    """A logical bundle that every encoder must take."""
    tokens = draw(st.integers(0, 5))
    names = draw(st.lists(_NAME | st.sampled_from(_WORDS), unique=True, max_size=max_tensors))
    drawn = [draw(tensors(name=name, tokens=tokens)) for name in names]
    # 1088 is the least multiple of 64 that holds whole q8_0 blocks.
    sizes = (0, 1088, 2176) if any(tensor.dtype == "q8_0" for tensor in drawn) else (0, 64, 128, 192, 1088)
    return Bundle(
        drawn,
        draw(_attributes(tokens)),
        number=draw(st.sampled_from((0, 1, 2**63, 2**64 - 1))),
        minor=draw(st.sampled_from((0, 1, 65535))),
        fragment_size=draw(st.sampled_from(sizes)),
        checksums=draw(st.booleans()),
    )


class Frame:
    """A frame in parts that can be spoilt one by one."""

    def __init__(self, header: bytes | bytearray, body: bytes | bytearray, padding: bytes | bytearray) -> None:
        self.header = bytearray(header)
        self.body = bytearray(body)
        self.padding = bytearray(padding)

    def repair(self, checksums: bool) -> None:
        """Make both CRCs true again, whatever else the frame says."""
        fragment = self.header[layout.frame_offset("type")] == layout.FRAGMENT
        crc = crc32c(bytes(self.body)) if checksums or not fragment else 0
        struct.pack_into("<I", self.header, layout.frame_offset("body_crc"), crc)
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
    near = st.sampled_from((old + 1, old - 1, old ^ 128, old + 32, old * 2, old + (1 << (8 * width - 1))))
    value = draw(near | st.sampled_from(TURNING_POINTS))
    target[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _poke(draw: st.DrawFn, target: bytearray) -> None:
    """Change a field of any width anywhere."""
    width = draw(st.sampled_from((1, 2, 4, 8)))
    # Fields lie on multiples of their width; any other place is as good as noise.
    if len(target) >= width:
        _set(draw, target, draw(st.integers(0, len(target) // width - 1)) * width, width)


_MOVES = ("drop", "repeat", "swap", "extension", "resize")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An encoding with one to three things wrong (now and then none that shows)."""
    bundle = draw(bundles(max_tensors=3))
    parts = frames(encode(bundle))
    length_at = layout.frame_offset("body_length")
    fields = _head_fields(parts[0].body)
    opening = parts[0]
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        index = draw(st.integers(0, len(parts) - 1)) if parts else 0
        kind = draw(st.sampled_from(("field",) * 8 + ("body", "header", "header", "padding") + _MOVES))
        if not parts:
            break
        frame = parts[index]
        if kind == "body":
            _poke(draw, frame.body)
        elif kind == "field":
            at, width = draw(st.sampled_from(fields))
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
            other = draw(st.integers(0, len(parts) - 1))
            parts[index], parts[other] = parts[other], parts[index]
        elif kind == "extension":
            body = draw(st.binary(max_size=70))
            header = bytearray(parts[0].header)
            header[layout.frame_offset("type")] = draw(st.sampled_from((0x01, 0x40, 0x7F, 0x80, 0xC0)))
            struct.pack_into("<Q", header, length_at, len(body))
            parts.insert(index, Frame(header, body, bytes(-len(body) % 64)))
        else:
            step = draw(st.sampled_from((-64, -8, -4, -1, 1, 4, 8, 64)))
            new = max(0, len(frame.body) + step)
            frame.body = (frame.body + bytes(64))[:new]
            frame.padding = bytearray(-new % 64)
            struct.pack_into("<Q", frame.header, length_at, new)
    unrepaired = draw(st.sampled_from((-1,) * 16 + (0, 1)))
    for index, frame in enumerate(parts):
        if index != unrepaired:
            frame.repair(bundle.checksums)
    data = b"".join(frame.bytes() for frame in parts)
    ending = draw(st.sampled_from(("as is",) * 8 + ("cut", "more")))
    if ending == "cut" and data:
        return data[: draw(st.integers(0, len(data) - 1))]
    if ending == "more":
        return data + draw(st.binary(min_size=1, max_size=70))
    return data


__all__ = ["TURNING_POINTS", "Frame", "bundles", "damaged", "frames", "tensors"]
