"""The bytes of a datastream, field by field, for people to look at.

The field tables are the construct declarations of :mod:`boundary_bundle.layout`; what
each field is called, where it lies and how wide it is comes from there. Whether the
bytes are right is for the ordinary decoder to say: the view ends at the place that
it names.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from crc32c import crc32c

from . import layout
from .bundle import ATTRIBUTE_TYPES, ATTRIBUTES, DEFAULT_LIMITS, Limits
from .decoder import Decoder, Head, check_head
from .dtypes import DTYPE_BY_CODE, from_payload
from .errors import BundleError, failure

_FRAME_TYPES: Final = {layout.HEAD: "head", layout.FRAGMENT: "fragment", layout.END: "end"}
_TYPE_NAMES: Final = {code: name for name, code in ATTRIBUTE_TYPES.items()}
_KEY_NAMES: Final = {row[0]: name for name, row in ATTRIBUTES.items()}
_ORDERS: Final = {layout.LITTLE: "little-endian", layout.BIG: "big-endian"}
#: Elements of a payload whose values are shown.
_VALUES: Final = 4


@dataclass
class Row:
    """One field: where it lies, its bytes (the first of them, for a payload), what they say."""

    offset: int
    size: int
    data: bytes
    section: str
    field: str
    value: str
    meaning: str
    damaged: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass
class FrameView:
    """One frame; ``title`` in words. ``skipped`` frames before it are not shown."""

    index: int
    offset: int
    size: int
    kind: str
    title: str
    rows: list[Row] = field(default_factory=list)
    skipped: int = 0


@dataclass
class Anatomy:
    """Frames up to the end or the damage. ``error`` is the decoder's, or None for a sound file."""

    size: int
    frames: list[FrameView]
    heads: list[Head]
    error: BundleError | None
    #: Frames after the last one shown (of a sound file).
    skipped: int = 0

    @property
    def rows(self) -> list[Row]:
        return [row for frame in self.frames for row in frame.rows]


def first_error(data: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> BundleError | None:
    """What a stream decoder finds wrong with a datastream, if anything."""
    decoder = Decoder("stream", limits=limits)
    try:
        decoder.feed(data)
        decoder.finish()
    except BundleError as error:
        return error
    if not len(data):
        return failure("truncated", 0, 0, field="input")
    return None


def dissect(
    data: bytes | memoryview, *, limits: Limits = DEFAULT_LIMITS, payload_bytes: int = 64, max_frames: int = 64
) -> Anatomy:
    """Cut a datastream into fields, as far as it is sound.

    Of a payload the first ``payload_bytes`` are kept; of more than ``max_frames``
    frames the first, the last and a damaged one.
    """
    view = memoryview(data)
    error = first_error(data, limits)
    stop = len(view) if error is None or error.offset is None else error.offset
    walker = _Walker(view, stop, limits, payload_bytes)
    frames: list[FrameView] = []
    skipped = 0
    at = index = 0
    while at < len(view) and at <= stop:
        frame, following = walker.frame(at, index)
        last = following >= len(view)
        hit = error is not None and following > stop
        if len(frames) < max_frames - 1 or last or hit or frame.kind == "head":
            frame.skipped, skipped = skipped, 0
            frame.rows = walker.rows(frame, error)
            frames.append(frame)
        else:
            skipped += 1
            walker.pass_over(frame)
        if hit and frame.rows and frame.rows[-1].damaged:
            break
        at = following
        index += 1
    return Anatomy(len(view), frames, walker.heads, error, skipped)


class _Walker:
    def __init__(self, view: memoryview, stop: int, limits: Limits, payload_bytes: int) -> None:
        self.view = view
        self.stop = stop
        self.limits = limits
        self.payload_bytes = payload_bytes
        self.open: dict[int, Head] = {}
        self.heads: list[Head] = []

    def frame(self, at: int, index: int) -> tuple[FrameView, int]:
        """The frame at ``at`` without its rows, and where the next one begins."""
        left = len(self.view) - at
        if left < layout.frame_header.size:
            return FrameView(index, at, left, "cut", "a frame header that is cut off"), len(self.view)
        fields = layout.FRAME_HEADER.parse(bytes(self.view[at : at + layout.frame_header.size]))
        kind = _FRAME_TYPES.get(fields.type, "extension")
        size = layout.frame_header.size + layout.pad64(fields.body_length)
        title = kind
        if kind == "fragment":
            head = self.open.get(fields.bundle_number)
            if head is not None and fields.field_a < len(head.tensors):
                title = f"fragment of {head.tensors[fields.field_a].name}"
        elif kind == "extension":
            title = f"extension {fields.type:#04x}"
        return FrameView(index, at, min(size, left), kind, title), at + size

    def rows(self, frame: FrameView, error: BundleError | None) -> list[Row]:
        """The frame's rows up to the damage, the damaged one included."""
        found: list[Row] = []
        for row in self._all_rows(frame):
            if error is None or row.end <= self.stop:
                if row.size:
                    found.append(row)
                continue
            self._mark(row, error, found)
            break
        return found

    def _mark(self, row: Row, error: BundleError, found: list[Row]) -> None:
        """Append the row in which the error lies, cut down to the damage when it is a long one."""
        if error.name == "truncated":
            row.data = bytes(self.view[row.offset : len(self.view)][: max(self.payload_bytes, 16)])
            row.size = len(self.view) - row.offset
            row.value = "cut off"
            row.meaning = "the input ends here"
        elif row.field in ("payload", "padding", "value", "name") and row.offset < self.stop:
            before = self.stop - row.offset
            found.append(
                Row(
                    row.offset,
                    before,
                    row.data[:before],
                    row.section,
                    row.field,
                    "",
                    f"{before:,} bytes before the damage",
                )
            )
            row = Row(self.stop, 1, bytes(self.view[self.stop : self.stop + 1]), row.section, row.field, "", "")
            row.value = str(row.data[0])
        row.damaged = True
        found.append(row)

    def pass_over(self, frame: FrameView) -> None:
        """Keep track of what is open without making rows."""
        fields = layout.FRAME_HEADER.parse(bytes(self.view[frame.offset : frame.offset + layout.frame_header.size]))
        if frame.kind == "end":
            self.open.pop(fields.bundle_number, None)

    def _all_rows(self, frame: FrameView) -> Iterator[Row]:
        at = frame.offset
        if frame.kind == "cut":
            yield from self._record(layout.FRAME_HEADER, at, "frame header", lambda name, value: "")
            return
        header = layout.FRAME_HEADER.parse(bytes(self.view[at : at + layout.frame_header.size]))
        yield from self._record(
            layout.FRAME_HEADER, at, "frame header", lambda name, value: self._header_meaning(name, value, header, at)
        )
        body = at + layout.frame_header.size
        end = body + header.body_length
        if frame.kind == "head":
            yield from self._head_rows(body, header.body_length)
            if end <= self.stop:
                # Refused when the input ends in the padding: then nothing has been checked yet.
                with contextlib.suppress(BundleError):
                    head = check_head(self.view, body, header.body_length, 0, self.limits)
                    head.number, head.minor, head.offset = header.bundle_number, header.minor, at
                    self.open[head.number] = head
                    self.heads.append(head)
        elif header.body_length:
            yield self._payload_row(frame, header, body)
        if frame.kind == "end":
            self.open.pop(header.bundle_number, None)
        pad = layout.pad64(header.body_length) - header.body_length
        if pad:
            yield self._row(end, pad, "padding", "padding", _bytes(pad), "zeros up to a multiple of 64")

    def _row(self, at: int, size: int, section: str, name: str, value: str, meaning: str) -> Row:
        shown = size if name != "payload" else min(size, self.payload_bytes)
        return Row(at, size, bytes(self.view[at : at + shown]), section, name, value, meaning)

    def _record(self, record: Any, at: int, section: str, meaning: Callable[[str, Any], str]) -> Iterator[Row]:
        """A row for each field of a construct declaration."""
        for subcon in record.subcons:
            size: int = subcon.sizeof()
            raw = bytes(self.view[at : at + size])
            if len(raw) < size:
                yield Row(at, size, raw, section, subcon.name, "cut off", "")
                return
            value = subcon.parse(raw)
            name = subcon.name.removesuffix("_2")
            text = value.hex(" ") if isinstance(value, bytes) else _number(name, value)
            yield Row(at, size, raw, section, name, text, meaning(subcon.name, value))
            at += size

    def _header_meaning(self, name: str, value: Any, header: Any, at: int) -> str:
        if name == "magic":
            return "\\x89 B D B, then CR LF, SUB, LF" if value == layout.MAGIC else "not the magic"
        if name == "type":
            kind = _FRAME_TYPES.get(value)
            if kind is None:
                kind = "critical extension" if value & layout.CRITICAL_TYPE else "ancillary extension"
            return kind
        if name == "flags":
            return "none" if not value else "bits 4-7 are ignorable"
        if name.startswith("reserved"):
            return "zero"
        if name == "major":
            return "major version"
        if name == "minor":
            return f"version {header.major}.{value}"
        if name == "bundle_number":
            return "names the bundle while it is open"
        if name == "body_length":
            return f"{value:,} bytes of body" if value else "no body"
        if name in ("field_a", "field_b"):
            return self._field_meaning(name, value, header)
        if name == "body_crc":
            if header.type == layout.FRAGMENT:
                head = self.open.get(header.bundle_number)
                if head is not None and not head.checksums:
                    return "payload checksums are absent"
            body = self.view[at + layout.frame_header.size :][: header.body_length]
            return _checked(value, crc32c(body)) if len(body) == header.body_length else "CRC32C of the body"
        crc = crc32c(bytes(self.view[at : at + layout.frame_offset("header_crc")]))
        return _checked(value, crc)

    def _field_meaning(self, name: str, value: int, header: Any) -> str:
        if header.type == layout.FRAGMENT:
            if name == "field_b":
                return f"payload offset {value:,}"
            head = self.open.get(header.bundle_number)
            if head is not None and value < len(head.tensors):
                return f"tensor {head.tensors[value].name}"
            return "tensor index"
        if header.type == layout.END:
            return "fragments" if name == "field_a" else "payload bytes of all tensors"
        return "0 in a head" if header.type == layout.HEAD else "free in an extension"

    def _head_rows(self, q: int, length: int) -> Iterator[Row]:
        yield from self._record(layout.HEAD_FIXED, q, "head", _head_meaning)
        if length < layout.head_fixed.size or q + layout.head_fixed.size > len(self.view):
            return
        fixed = layout.HEAD_FIXED.parse(bytes(self.view[q : q + layout.head_fixed.size]))
        at = q + layout.head_fixed.size
        table_end = q + length - fixed.attribute_bytes
        for index in range(fixed.tensor_count):
            if at + layout.tensor_fixed.size > table_end:
                break
            if at + layout.tensor_fixed.size > len(self.view):
                yield from self._record(layout.TENSOR_FIXED, at, f"tensor {index}", _tensor_meaning)
                return
            record = layout.TENSOR_FIXED.parse(bytes(self.view[at : at + layout.tensor_fixed.size]))
            name_at = at + layout.tensor_fixed.size + 8 * record.rank
            raw = bytes(self.view[name_at : name_at + record.name_length])
            section = f"tensor {index} {_text(raw)}"
            yield from self._record(layout.TENSOR_FIXED, at, section, _tensor_meaning)
            for axis in range(record.rank):
                where = at + layout.tensor_fixed.size + 8 * axis
                dim = int.from_bytes(self.view[where : where + 8], "little")
                token = "tokens" if axis == record.token_axis else "elements"
                yield self._row(where, 8, section, f"dims[{axis}]", f"{dim:,}", token)
            yield self._row(name_at, record.name_length, section, "name", _text(raw), "tensor name")
            size = layout.tensor_fixed.size + 8 * record.rank + record.name_length
            yield from self._record_padding(at + size, layout.pad8(size) - size, section)
            at += layout.pad8(size)
        if at < table_end:
            yield self._row(at, table_end - at, "tensor table", "tensor table", "", "not filled by its records")
        at = max(at, table_end)
        for _ in range(fixed.attribute_count):
            if at + layout.attribute_fixed.size > q + length:
                break
            if at + layout.attribute_fixed.size > len(self.view):
                yield from self._record(layout.ATTRIBUTE_FIXED, at, "attribute", _attribute_meaning)
                return
            attribute = layout.ATTRIBUTE_FIXED.parse(bytes(self.view[at : at + layout.attribute_fixed.size]))
            section = f"attribute {_KEY_NAMES.get(attribute.key, f'{attribute.key:#06x}')}"
            yield from self._record(layout.ATTRIBUTE_FIXED, at, section, _attribute_meaning)
            value_at = at + layout.attribute_fixed.size
            # A longer one is refused at its length, unless the input ends before that is checked.
            size = min(attribute.value_length, q + length - value_at)
            raw = bytes(self.view[value_at : min(value_at + size, q + length)])
            yield Row(value_at, size, raw, section, "value", *_attribute_value(attribute.type, raw))
            yield from self._record_padding(value_at + size, layout.pad8(size) - size, section)
            at = value_at + layout.pad8(size)
        if at < q + length:
            yield self._row(at, q + length - at, "attribute block", "attribute block", "", "not filled by its records")

    def _record_padding(self, at: int, size: int, section: str) -> Iterator[Row]:
        if size:
            yield self._row(at, size, section, "padding", _bytes(size), "zeros up to a multiple of 8")

    def _payload_row(self, frame: FrameView, header: Any, body: int) -> Row:
        size = header.body_length
        head = self.open.get(header.bundle_number)
        if frame.kind != "fragment" or head is None or header.field_a >= len(head.tensors):
            return self._row(body, size, "body", "payload", f"{size:,} bytes", "free")
        info = head.tensors[header.field_a]
        shape = ", ".join(map(str, info.shape))
        meaning = f"{info.dtype} [{shape}]"
        if info.row.both_orders and info.byte_order == "big":
            meaning += ", big-endian"
        values = ""
        if info.row.block_elements == 1:
            width = info.row.numpy.itemsize
            count = min(_VALUES, size // width, max(0, len(self.view) - body) // width)
            if count:
                first = from_payload(bytes(self.view[body : body + count * width]), info.row, (count,), info.byte_order)
                values = ", ".join(_element(value) for value in first)
                if size > count * width:
                    values += ", ..."
        else:
            values = f"{size // info.row.block_bytes:,} blocks of {info.row.block_bytes} bytes"
        if info.fragments > 1:
            meaning += f", bytes {header.field_b:,} to {header.field_b + size - 1:,} of {info.payload_bytes:,}"
        return self._row(body, size, "payload", "payload", values, meaning)


def _number(name: str, value: int) -> str:
    if name in ("type", "key", "flags", "head_flags"):
        return f"{value:#x}"
    return f"{value:#010x}" if name.endswith("_crc") else f"{value:,}"


def _bytes(count: int) -> str:
    return f"{count:,} {'byte' if count == 1 else 'bytes'}"


def _checked(stated: int, computed: int) -> str:
    return "CRC32C, right" if stated == computed else f"CRC32C, but the bytes give {computed:#010x}"


def _head_meaning(name: str, value: Any) -> str:
    if name == "head_flags":
        return "payload checksums absent" if value & layout.CHECKSUMS_ABSENT else "payload checksums present"
    if name == "fragment_size":
        return "bytes a fragment" if value else "one fragment a tensor"
    return {
        "tensor_count": "records in the tensor table",
        "attribute_count": "records in the attribute block",
        "attribute_bytes": "bytes of attribute block",
    }.get(name, "zero")


def _tensor_meaning(name: str, value: Any) -> str:
    if name == "dtype":
        row = DTYPE_BY_CODE.get(value)
        return row.name if row is not None else "unknown dtype"
    if name == "byte_order":
        return _ORDERS.get(value, "no byte order")
    if name == "token_axis":
        return "no token axis" if value == layout.NO_TOKEN_AXIS else f"dims[{value}] counts tokens"
    return {"rank": "dimensions", "name_length": "bytes of name"}.get(name, "zero")


def _attribute_meaning(name: str, value: Any) -> str:
    if name == "key":
        known = _KEY_NAMES.get(value, "unknown")
        return f"{known}, {'critical' if value & layout.CRITICAL_KEY else 'ancillary'}"
    if name == "type":
        return _TYPE_NAMES.get(value, "no type")
    return "bytes of value" if name == "value_length" else "zero"


def _attribute_value(kind: int, raw: bytes) -> tuple[str, str]:
    formats = {1: "<Q", 2: "<q", 3: "<d"}
    if kind in formats and len(raw) == 8:
        value = struct.unpack(formats[kind], raw)[0]
        return (f"{value:,}" if kind != 3 else repr(value)), _TYPE_NAMES[kind]
    if kind == ATTRIBUTE_TYPES["text"]:
        return _text(raw), "text"
    return (raw.hex() if len(raw) <= 32 else f"{raw[:32].hex()}..."), "bytes"


def _text(raw: bytes) -> str:
    """ASCII, whatever is in the bytes."""
    return ascii(raw.decode("latin-1"))[1:-1]


def _element(value: Any) -> str:
    if isinstance(value, (np.bool_, np.integer)):
        return str(int(value))
    return f"{float(value):.6g}"


__all__ = ["Anatomy", "FrameView", "Row", "dissect", "first_error"]
