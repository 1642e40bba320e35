"""From bytes to bundles (specification, section 6). No I/O: bytes in, events out.

Every check carries the name of its step (A1, B1, ... D70). They run on complete
units only and in the specification's order, so that the first error does not depend
on the pieces in which the bytes came. :func:`decode` and :class:`Decoder` run the
same code; the encoder runs :func:`check_head` on what it is about to write.
"""

from __future__ import annotations

import copy
from math import prod
from typing import Any, Final

import numpy as np
from crc32c import crc32c

from . import layout
from .bundle import (
    ATTRIBUTES,
    DEFAULT_LIMITS,
    REGISTERED_KEYS,
    Attribute,
    Attributes,
    Bundle,
    Limits,
    Tensor,
    TensorInfo,
)
from .contract import Contract
from .dtypes import DTYPE_BY_CODE, from_payload
from .errors import BundleError, failure

Buffer = bytes | bytearray | memoryview

_NAME_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/"
_TEXT_BYTES: Final = bytes(range(0x20, 0x7F))
_ORDERS: Final = {layout.LITTLE: "little", layout.BIG: "big"}
_ZERO_3: Final = bytes(3)
_N_TOKENS: Final = ATTRIBUTES["n_tokens"][0]
_BOOL: Final = DTYPE_BY_CODE[32]
#: Units and payloads up to this size are put together in the simplest way. Beyond it
#: memory follows the bytes that came in steps of at most this size.
_STEP: Final = 1 << 20

_frame_header = layout.frame_header.unpack_from
_head_fixed = layout.head_fixed.unpack_from
_tensor_fixed = layout.tensor_fixed.unpack_from
_attribute_fixed = layout.attribute_fixed.unpack_from
_dims = tuple(packer.unpack_from for packer in layout.dims)

# Offsets that error reports need, from the one declaration of the layout.
_TYPE = layout.frame_offset("type")
_FLAGS = layout.frame_offset("flags")
_RESERVED = layout.frame_offset("reserved")
_MAJOR = layout.frame_offset("major")
_MINOR = layout.frame_offset("minor")
_NUMBER = layout.frame_offset("bundle_number")
_LENGTH = layout.frame_offset("body_length")
_FIELD_A = layout.frame_offset("field_a")
_FIELD_B = layout.frame_offset("field_b")
_BODY_CRC = layout.frame_offset("body_crc")
_RESERVED_2 = layout.frame_offset("reserved_2")
_HEADER_CRC = layout.frame_offset("header_crc")
_H_TENSOR_COUNT = layout.head_offset("tensor_count")
_H_ATTRIBUTE_BYTES = layout.head_offset("attribute_bytes")
_H_FRAGMENT_SIZE = layout.head_offset("fragment_size")
_H_RESERVED = layout.head_offset("reserved")
_T_BYTE_ORDER = layout.tensor_offset("byte_order")
_T_RANK = layout.tensor_offset("rank")
_T_TOKEN_AXIS = layout.tensor_offset("token_axis")
_T_NAME_LENGTH = layout.tensor_offset("name_length")
_T_RESERVED = layout.tensor_offset("reserved")
_A_TYPE = layout.attribute_offset("type")
_A_RESERVED = layout.attribute_offset("reserved")
_A_VALUE_LENGTH = layout.attribute_offset("value_length")
_HEADER: Final = layout.frame_header.size
_HEAD: Final = layout.head_fixed.size
_TENSOR: Final = layout.tensor_fixed.size
_ATTRIBUTE: Final = layout.attribute_fixed.size


class Head:
    """Event: a head has passed all its checks (and the decoder's contract, if any).

    ``tensors`` are TensorInfo; no payload has been looked at. ``offset`` is that of
    the head frame.
    """

    __slots__ = (
        "attributes",
        "checksums",
        "fragment_size",
        "fragments",
        "minor",
        "number",
        "offset",
        "payload_bytes",
        "tensors",
    )

    number: int
    minor: int
    offset: int

    def __init__(
        self,
        tensors: tuple[TensorInfo, ...],
        attributes: Attributes,
        fragment_size: int,
        checksums: bool,
        payload_bytes: int,
        fragments: int,
    ) -> None:
        self.tensors = tensors
        self.attributes = attributes
        self.fragment_size = fragment_size
        self.checksums = checksums
        self.payload_bytes = payload_bytes
        self.fragments = fragments

    def __repr__(self) -> str:
        return f"Head(number={self.number}, tensors={list(self.tensors)!r})"


class Fragment:
    """Event: a fragment has passed its checks.

    Provisional: its bundle may still fail. ``data`` is a read-only view of the
    payload bytes from ``payload_offset`` on, in wire order.
    """

    __slots__ = ("data", "index", "name", "number", "payload_offset")
    provisional: Final = True

    def __init__(self, number: int, index: int, name: str, payload_offset: int, data: memoryview) -> None:
        self.number = number
        self.index = index
        self.name = name
        self.payload_offset = payload_offset
        self.data = data

    def __repr__(self) -> str:
        return (
            f"Fragment(number={self.number}, name={self.name!r}, "
            f"payload_offset={self.payload_offset}, bytes={len(self.data)})"
        )


class Extension:
    """Event: an unknown ancillary frame was skipped (2.5)."""

    __slots__ = ("body", "field_a", "field_b", "number", "type")

    def __init__(self, number: int, type: int, field_a: int, field_b: int, body: bytes) -> None:
        self.number = number
        self.type = type
        self.field_a = field_a
        self.field_b = field_b
        self.body = body

    def __repr__(self) -> str:
        return f"Extension(number={self.number}, type={self.type:#04x}, {self.body!r})"


class BundleReady:
    """Event: an end frame has been checked; the bundle's tensors are final."""

    __slots__ = ("bundle",)

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    def __repr__(self) -> str:
        return f"BundleReady({self.bundle!r})"


Event = Head | Fragment | Extension | BundleReady


def _first_outside(data: bytes, allowed: bytes) -> int:
    """Index of the first byte of ``data`` that is not in ``allowed``."""
    return next(index for index, byte in enumerate(data) if byte not in allowed)


def _first_nonzero(data: bytes) -> int:
    return len(data) - len(data.lstrip(b"\0"))


def check_head(
    view: bytes | memoryview,
    q: int,
    length: int,
    base: int,
    limits: Limits,
    require_checksums: bool = False,
    frame: int = 0,
) -> Head:
    """Steps D1 to D70 over the head body ``view[q:q + length]``.

    ``base + q`` is the offset reported for the body's first byte. ``length`` has
    passed B10 and B11. Raises the errors of section 6; allocates nothing larger
    than the body.
    """
    (
        head_flags,
        tensor_count,
        attribute_count,
        attribute_bytes,
        fragment_size,
        reserved,
    ) = _head_fixed(view, q)

    def bad(
        name: str,
        at: int,
        field: str,
        expected: Any = None,
        found: Any = None,
        tensor: str | None = None,
    ) -> BundleError:
        return failure(name, base + at, frame, tensor, field, expected, found)

    if head_flags & layout.UNKNOWN_HEAD_FLAGS:  # D1
        raise bad("unsupported_head_flag", q, "head_flags", found=head_flags)
    checksums = not head_flags & layout.CHECKSUMS_ABSENT
    if require_checksums and not checksums:  # D2
        raise bad("checksums_required", q, "head_flags", found=head_flags)
    if reserved:  # D3
        raise bad("head_reserved", q + _H_RESERVED, "reserved", 0, reserved)
    if tensor_count > limits.tensors:  # D4
        raise bad("limit_tensors", q + _H_TENSOR_COUNT, "tensor_count", f"<= {limits.tensors}", tensor_count)
    if attribute_bytes > limits.attribute_bytes:  # D5
        raise bad(
            "limit_attribute_bytes",
            q + _H_ATTRIBUTE_BYTES,
            "attribute_bytes",
            f"<= {limits.attribute_bytes}",
            attribute_bytes,
        )
    if attribute_bytes & 7 or attribute_bytes > length - _HEAD:  # D6
        raise bad(
            "attribute_block",
            q + _H_ATTRIBUTE_BYTES,
            "attribute_bytes",
            f"a multiple of 8, <= {length - _HEAD}",
            attribute_bytes,
        )
    if fragment_size & 63:  # D7
        raise bad("fragment_size", q + _H_FRAGMENT_SIZE, "fragment_size", "a multiple of 64", fragment_size)

    end = q + length  # E
    table_end = end - attribute_bytes  # T
    tensors: list[TensorInfo] = []
    names: set[bytes] = set()
    payload_total = 0
    fragment_total = 0
    tokens: int | None = None
    little, big, none = layout.LITTLE, layout.BIG, layout.NO_TOKEN_AXIS
    r = q + _HEAD
    # Each turn consumes at least 16 bytes or raises, so the count cannot outrun them.
    for index in range(tensor_count):
        if r + _TENSOR > table_end:  # D10
            raise bad("tensor_table", r, "tensor_count", found=tensor_count)
        code, order, rank, axis, name_length, zeros = _tensor_fixed(view, r)
        if rank > limits.rank:  # D11
            raise bad("limit_rank", r + _T_RANK, "rank", f"<= {limits.rank}", rank, f"#{index}")
        if name_length > limits.name_bytes:  # D12
            raise bad(
                "limit_name",
                r + _T_NAME_LENGTH,
                "name_length",
                f"<= {limits.name_bytes}",
                name_length,
                f"#{index}",
            )
        if not name_length:  # D13
            raise bad("tensor_name", r + _T_NAME_LENGTH, "name_length", ">= 1", 0, f"#{index}")
        name_at = r + _TENSOR + 8 * rank
        name_end = name_at + name_length
        record_end = r + ((name_end - r + 7) & ~7)
        if record_end > table_end:  # D14
            raise bad(
                "tensor_table",
                r,
                "record",
                f"<= {table_end - r} bytes",
                record_end - r,
                f"#{index}",
            )
        raw_name = bytes(view[name_at:name_end])
        label = raw_name.decode("latin-1")
        row = DTYPE_BY_CODE.get(code)
        if row is None:  # D15
            raise bad("unsupported_dtype", r, "dtype", found=code, tensor=label)
        if order != little and (order != big or not row.both_orders):  # D16
            raise bad(
                "tensor_byte_order",
                r + _T_BYTE_ORDER,
                "byte_order",
                "1 or 2" if row.both_orders else 1,
                order,
                label,
            )
        if axis >= rank and axis != none:  # D17
            raise bad(
                "tensor_token_axis",
                r + _T_TOKEN_AXIS,
                "token_axis",
                f"255 or < {rank}",
                axis,
                label,
            )
        if zeros != _ZERO_3:  # D18
            raise bad("tensor_reserved", r + _T_RESERVED, "reserved", _ZERO_3, zeros, label)
        shape: tuple[int, ...] = _dims[rank](view, r + _TENSOR)
        if shape and max(shape) > limits.dimension:  # D19
            wrong = next(i for i, dim in enumerate(shape) if dim > limits.dimension)
            raise bad(
                "limit_dimension",
                r + _TENSOR + 8 * wrong,
                f"dims[{wrong}]",
                f"<= {limits.dimension}",
                shape[wrong],
                label,
            )
        # Python's integers do not wrap, in whatever order they are multiplied.
        elements = prod(shape)
        bound = elements or prod(dim or 1 for dim in shape)
        block = row.block_elements
        if block != 1:
            if not rank:  # D20
                raise bad("tensor_block", r + _T_RANK, "rank", ">= 1", 0, label)
            if shape[-1] % block:  # D21
                raise bad(
                    "tensor_block",
                    r + _TENSOR + 8 * (rank - 1),
                    f"dims[{rank - 1}]",
                    f"a multiple of {block}",
                    shape[-1],
                    label,
                )
            if axis == rank - 1:  # D22
                raise bad(
                    "tensor_token_axis",
                    r + _T_TOKEN_AXIS,
                    "token_axis",
                    f"255 or < {rank - 1}",
                    axis,
                    label,
                )
            elements //= block
            bound = -(-bound // block)
        payload = elements * row.block_bytes
        if bound * row.block_bytes > limits.payload_bytes:  # D23
            raise bad(
                "limit_payload_bytes",
                r + _TENSOR,
                "dims",
                f"<= {limits.payload_bytes} bytes",
                bound * row.block_bytes,
                label,
            )
        payload_total += payload
        if payload_total > limits.payload_bytes:  # D24
            raise bad(
                "limit_payload_bytes",
                r + _TENSOR,
                "dims",
                f"<= {limits.payload_bytes} bytes in all",
                payload_total,
                label,
            )
        if fragment_size:
            if fragment_size % row.block_bytes:  # D25
                raise bad(
                    "fragment_size",
                    q + _H_FRAGMENT_SIZE,
                    "fragment_size",
                    f"a multiple of {row.block_bytes}",
                    fragment_size,
                    label,
                )
            fragments = -(-payload // fragment_size)
        else:
            fragments = 1 if payload else 0
        fragment_total += fragments
        if fragment_total > limits.fragments:  # D26
            raise bad(
                "limit_fragments",
                q + _H_FRAGMENT_SIZE,
                "fragment_size",
                f"<= {limits.fragments} fragments",
                fragment_total,
                label,
            )
        if raw_name.translate(None, _NAME_BYTES):  # D27
            wrong = _first_outside(raw_name, _NAME_BYTES)
            raise bad(
                "tensor_name",
                name_at + wrong,
                "name",
                "A-Z a-z 0-9 . _ - /",
                raw_name[wrong],
                label,
            )
        if name_end != record_end:
            pad = bytes(view[name_end:record_end])
            if pad.count(0) != len(pad):  # D28
                wrong = _first_nonzero(pad)
                raise bad("record_padding", name_end + wrong, "padding", 0, pad[wrong], label)
        if raw_name in names:  # D29
            raise bad("tensor_duplicate", name_at, "name", tensor=label)
        names.add(raw_name)
        if axis != none:
            if tokens is None:
                tokens = shape[axis]
            elif shape[axis] != tokens:  # D30
                raise bad(
                    "token_count",
                    r + _TENSOR + 8 * axis,
                    f"dims[{axis}]",
                    tokens,
                    shape[axis],
                    label,
                )
        tensors.append(
            TensorInfo(
                label,
                row,
                shape,
                None if axis == none else axis,
                _ORDERS[order],
                payload,
                fragments,
            )
        )
        r = record_end
    if r != table_end:  # D40
        raise bad("tensor_table", r, "tensor table", table_end - q, r - q)

    records: dict[int, Attribute] = {}
    key_number = layout.KEY_NUMBER
    before = -1
    s = table_end
    for _ in range(attribute_count):
        if s + _ATTRIBUTE > end:  # D50
            raise bad("attribute_block", s, "attribute_count", found=attribute_count)
        key, kind, zero, value_length = _attribute_fixed(view, s)
        value_at = s + _ATTRIBUTE
        value_end = value_at + value_length
        record_end = value_at + ((value_length + 7) & ~7)
        if record_end > end:  # D51
            raise bad(
                "attribute_block",
                s + _A_VALUE_LENGTH,
                "value_length",
                f"<= {end - value_at}",
                value_length,
            )
        if not key & key_number:  # D52
            raise bad("attribute_key", s, "key", found=key)
        if key <= before:  # D53
            raise bad("attribute_order", s, "key", f"> {before}", key)
        before = key
        if not 1 <= kind <= 5:  # D54
            raise bad("attribute_type", s + _A_TYPE, "type", "1 to 5", kind)
        if zero:  # D55
            raise bad("attribute_reserved", s + _A_RESERVED, "reserved", 0, zero)
        registered = REGISTERED_KEYS.get(key)
        if registered is None:
            if key & layout.CRITICAL_KEY:  # D56
                raise bad("unsupported_attribute", s, "key", found=key)
            wanted = 8 if kind <= 3 else None
        else:
            registered_type, wanted = registered
            if kind != registered_type:  # D57
                raise bad("attribute_type", s + _A_TYPE, "type", registered_type, kind)
        if wanted is not None and value_length != wanted:  # D58
            raise bad("attribute_length", s + _A_VALUE_LENGTH, "value_length", wanted, value_length)
        raw = bytes(view[value_at:value_end])
        if kind == 5 and raw.translate(None, _TEXT_BYTES):  # D59
            wrong = _first_outside(raw, _TEXT_BYTES)
            raise bad("attribute_value", value_at + wrong, "value", found=raw[wrong])
        if value_end != record_end:
            pad = bytes(view[value_end:record_end])
            if pad.count(0) != len(pad):  # D60
                wrong = _first_nonzero(pad)
                raise bad("record_padding", value_end + wrong, "padding", 0, pad[wrong])
        record = Attribute(key, kind, raw)
        if key == _N_TOKENS and tokens is not None and record.value != tokens:  # D61
            raise bad("token_count", value_at, "n_tokens", tokens, record.value)
        records[key] = record
        s = record_end
    if s != end:  # D70
        raise bad("attribute_block", s, "attribute block", end - q, s - q)

    return Head(
        tuple(tensors),
        Attributes._of_records(records),
        fragment_size,
        checksums,
        payload_total,
        fragment_total,
    )


class _Open:
    """State of an open bundle: its head and the fragments that have come."""

    __slots__ = ("came", "head", "next_index", "next_offset", "parts")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.came = 0
        # tensor index -> payload offset -> bytes
        self.parts: dict[int, dict[int, memoryview | bytes]] = {}
        self.next_index = -1
        self.next_offset = 0
        self._next_tensor()

    def _next_tensor(self) -> None:
        tensors = self.head.tensors
        self.next_index += 1
        self.next_offset = 0
        while self.next_index < len(tensors) and not tensors[self.next_index].payload_bytes:
            self.next_index += 1

    def take(self, index: int, offset: int, data: memoryview | bytes) -> None:
        """Keep a fragment that is new."""
        self.came += 1
        parts = self.parts.get(index)
        if parts is None:
            self.parts[index] = {offset: data}
        else:
            parts[offset] = data
        # The canonical successor; of use to a core decoder only.
        after = offset + len(data)
        if after >= self.head.tensors[index].payload_bytes:
            self._next_tensor()
        else:
            self.next_offset = after

    def first_missing(self) -> str:
        for index, info in enumerate(self.head.tensors):
            if len(self.parts.get(index, ())) != info.fragments:
                return info.name
        return ""  # pragma: no cover - called only when one is missing

    def bundle(self, release: bool) -> Bundle:
        """The bundle; with ``release`` fragments hold memory that is to be given back soon."""
        head = self.head
        tensors = []
        for index, info in enumerate(head.tensors):
            data: memoryview | bytes
            if not info.payload_bytes:
                data = b""
            else:
                parts = self.parts[index]
                if info.fragments == 1:
                    data = parts[0]
                else:
                    if release and info.payload_bytes > _STEP:
                        data = _assemble(parts, info.payload_bytes)
                    else:
                        data = b"".join([parts[offset] for offset in sorted(parts)])
                        parts.clear()
            array = from_payload(data, info.row, info.shape, info.byte_order)
            tensors.append(Tensor._of_info(info, array))
        return Bundle(
            tensors,
            head.attributes,
            number=head.number,
            minor=head.minor,
            fragment_size=head.fragment_size,
            checksums=head.checksums,
        )


class _Engine:
    """The checks and the state behind both decoders."""

    __slots__ = (
        "contract",
        "core",
        "events",
        "frames",
        "limits",
        "need",
        "open",
        "open_limit",
        "ready",
        "require_checksums",
        "single",
    )

    def __init__(
        self,
        core: bool,
        limits: Limits,
        require_checksums: bool,
        contract: Contract | None,
        events: list[Event] | None,
    ) -> None:
        self.core = core
        self.limits = limits
        self.open_limit = 1 if core else limits.open_bundles
        self.require_checksums = require_checksums
        self.contract = contract
        self.events = events
        self.single = events is None
        self.open: dict[int, _Open] = {}
        self.frames = 0
        self.need: int = 8
        self.ready: Bundle | None = None

    def bad(
        self,
        name: str,
        at: int,
        field: str,
        expected: Any = None,
        found: Any = None,
        tensor: str | None = None,
    ) -> BundleError:
        return failure(name, at, self.frames, tensor, field, expected, found)

    def run(self, view: memoryview, pos: int, base: int, keep: int) -> int:
        """Take complete frames from ``view[pos:]``; return where it stopped.

        ``base`` plus an index of ``view`` is the offset to report. A unit that is
        complete is checked even when its frame is not; ``need`` then says how many
        bytes from the returned position on complete the next unit. A fragment's
        body is kept as a view when it has at least ``keep`` bytes, else copied, so
        that a small fragment does not hold on to a large piece of input.
        """
        end = len(view)
        limits = self.limits
        while True:
            left = end - pos
            p = base + pos  # P
            if left < _HEADER:
                if left < 8:
                    self.need = 8
                else:
                    magic = bytes(view[pos : pos + 8])
                    if magic != layout.MAGIC:  # A1
                        raise self.bad("bad_magic", p, "magic", layout.MAGIC, magic)
                    self.need = _HEADER
                return pos
            (
                magic,
                kind,
                flags,
                reserved,
                major,
                minor,
                number,
                length,
                a,
                b,
                body_crc,
                reserved_2,
                header_crc,
            ) = _frame_header(view, pos)
            if magic != layout.MAGIC:  # A1
                raise self.bad("bad_magic", p, "magic", layout.MAGIC, magic)
            crc = crc32c(view[pos : pos + 60])
            if crc != header_crc:  # B1
                raise self.bad("header_crc", p + _HEADER_CRC, "header_crc", crc, header_crc)
            if major != layout.MAJOR:  # B2
                raise self.bad("unsupported_major", p + _MAJOR, "major", 1, major)
            if reserved:  # B3
                raise self.bad("header_reserved", p + _RESERVED, "reserved", 0, reserved)
            if reserved_2:  # B4
                raise self.bad("header_reserved", p + _RESERVED_2, "reserved", 0, reserved_2)
            if flags & layout.REJECTED_FLAGS:  # B5
                raise self.bad("header_flags", p + _FLAGS, "flags", 0, flags & 0x0F)
            state = self.open.get(number)
            info: TensorInfo | None = None
            if kind == layout.HEAD:
                self._check_head_header(p, number, length, a, b, state)
            else:
                if kind & layout.CRITICAL_TYPE and not (kind == layout.FRAGMENT or kind == layout.END):  # B6
                    raise self.bad("unsupported_frame", p + _TYPE, "type", found=kind)
                if state is None:  # B20
                    raise self.bad("bundle_not_open", p + _NUMBER, "bundle_number", found=number)
                head = state.head
                if minor != head.minor:  # B21
                    raise self.bad("frame_version", p + _MINOR, "minor", head.minor, minor)
                if kind == layout.FRAGMENT:
                    info = self._check_fragment_header(p, length, a, b, body_crc, state)
                elif kind == layout.END:
                    self._check_end_header(p, length, a, b, state)
                elif length > limits.extension_bytes:  # B50
                    raise self.bad(
                        "limit_extension_bytes",
                        p + _LENGTH,
                        "body_length",
                        f"<= {limits.extension_bytes}",
                        length,
                    )
            total = _HEADER + ((length + 63) & ~63)
            if left < total:
                self.need = total
                return pos
            q = pos + _HEADER
            body_end = q + length
            frame_end: int = pos + total
            body = view[q:body_end]
            tensor = info.name if info is not None else None
            # A fragment without checksums was held to 0 by B34.
            if info is None or (state is not None and state.head.checksums):
                crc = crc32c(body)
                if crc != body_crc:  # C1
                    raise self.bad("body_crc", p + _BODY_CRC, "body_crc", crc, body_crc, tensor)
            if body_end != frame_end:
                pad = bytes(view[body_end:frame_end])
                if pad.count(0) != len(pad):  # C2
                    wrong = _first_nonzero(pad)
                    raise self.bad(
                        "frame_padding",
                        base + body_end + wrong,
                        "padding",
                        0,
                        pad[wrong],
                        tensor,
                    )
            if kind == layout.HEAD:
                new = check_head(view, q, length, base, limits, self.require_checksums, self.frames)
                new.number = number
                new.minor = minor
                new.offset = p
                if self.contract is not None:
                    self.contract.compare(new)
                self.open[number] = _Open(new)
                if self.events is not None:
                    self.events.append(new)
            elif info is not None and state is not None:
                self._take_fragment(p, number, a, b, body, info, state, keep)
            elif kind == layout.END and state is not None:
                del self.open[number]
                ready = state.bundle(not self.single)
                if self.single:
                    self.ready = ready
                    return frame_end
                assert self.events is not None
                self.events.append(BundleReady(ready))
            elif self.events is not None:
                self.events.append(Extension(number, kind, a, b, bytes(body)))
            self.frames += 1
            pos = frame_end

    def _check_head_header(self, p: int, number: int, length: int, a: int, b: int, state: _Open | None) -> None:
        limit = self.limits.head_bytes
        if length > limit:  # B10
            raise self.bad("limit_head_bytes", p + _LENGTH, "body_length", f"<= {limit}", length)
        if length < _HEAD or length & 7:  # B11
            raise self.bad("body_length", p + _LENGTH, "body_length", "a multiple of 8, >= 32", length)
        if a:  # B12
            raise self.bad("head_fields", p + _FIELD_A, "field_a", 0, a)
        if b:  # B13
            raise self.bad("head_fields", p + _FIELD_B, "field_b", 0, b)
        if state is not None:  # B14
            raise self.bad("bundle_already_open", p + _NUMBER, "bundle_number", found=number)
        if len(self.open) >= self.open_limit:  # B15
            raise self.bad(
                "limit_open_bundles",
                p + _NUMBER,
                "bundle_number",
                f"<= {self.open_limit} open",
                number,
            )

    def _check_fragment_header(self, p: int, length: int, a: int, b: int, body_crc: int, state: _Open) -> TensorInfo:
        head = state.head
        if a >= len(head.tensors):  # B30
            raise self.bad("fragment_tensor", p + _FIELD_A, "field_a", f"< {len(head.tensors)}", a)
        info = head.tensors[a]
        size = info.payload_bytes
        grid = head.fragment_size
        if b >= size or (b % grid if grid else b):  # B31
            raise self.bad(
                "fragment_offset",
                p + _FIELD_B,
                "field_b",
                f"a multiple of {grid} below {size}" if grid else "0, of a tensor with bytes",
                b,
                info.name,
            )
        expected = min(grid, size - b) if grid else size
        if length != expected:  # B32
            raise self.bad("fragment_length", p + _LENGTH, "body_length", expected, length, info.name)
        if self.core and (a != state.next_index or b != state.next_offset):  # B33
            raise self.bad(
                "fragment_order",
                p + _FIELD_A,
                "field_a",
                (state.next_index, state.next_offset),
                (a, b),
                info.name,
            )
        if body_crc and not head.checksums:  # B34
            raise self.bad("payload_crc_present", p + _BODY_CRC, "body_crc", 0, body_crc, info.name)
        return info

    def _check_end_header(self, p: int, length: int, a: int, b: int, state: _Open) -> None:
        head = state.head
        if length:  # B40
            raise self.bad("body_length", p + _LENGTH, "body_length", 0, length)
        if state.came != head.fragments:  # B41
            raise self.bad(
                "fragment_missing",
                p,
                "fragments",
                head.fragments,
                state.came,
                state.first_missing(),
            )
        if a != head.fragments:  # B42
            raise self.bad("end_fragments", p + _FIELD_A, "field_a", head.fragments, a)
        if b != head.payload_bytes:  # B43
            raise self.bad("end_payload_bytes", p + _FIELD_B, "field_b", head.payload_bytes, b)

    def _take_fragment(
        self,
        p: int,
        number: int,
        index: int,
        offset: int,
        body: memoryview,
        info: TensorInfo,
        state: _Open,
        keep: int,
    ) -> None:
        if not self.core:
            before = state.parts.get(index)
            if before is not None and offset in before:
                if before[offset] != body:  # C3
                    raise self.bad("fragment_conflict", p + _HEADER, "body", tensor=info.name)
                return
        if info.row is _BOOL:
            values = np.frombuffer(body, np.uint8)
            if values.max() > 1:  # C4
                wrong = int((values > 1).argmax())
                raise self.bad(
                    "bool_value",
                    p + _HEADER + wrong,
                    "payload",
                    "0 or 1",
                    int(values[wrong]),
                    info.name,
                )
        if len(body) < keep:
            # Not as a view: of small fragments there may be many, and a view is larger than they.
            copied = bytes(body)
            state.take(index, offset, copied)
            body = memoryview(copied)
        else:
            state.take(index, offset, body)
        if self.events is not None:
            self.events.append(Fragment(number, index, info.name, offset, body))


def _bytes_view(buffer: Any) -> memoryview:
    """A read-only, one-dimensional view of a buffer's bytes."""
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
        view = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
    return view if view.readonly else view.toreadonly()


#: The fields of a frame header from its magic to its major version, as they mostly are.
_PLAIN_HEAD: Final = (layout.MAGIC, layout.HEAD, 0, 0, layout.MAJOR)
_ZEROS: Final = tuple(bytes(-size % 64) for size in range(64))


def _decode_plain(
    view: memoryview, limits: Limits, require_checksums: bool, contract: Contract | None
) -> Bundle | None:
    """A bundle in canonical order, one fragment a tensor, with no ignorable bit set: most of them.

    None when it is another, or when a check of units A to C fails: then the engine
    says which. Checks of the head (D) and of the contract, which come after those of
    its frame, fail here as they fail there.
    """
    size = len(view)
    if size < 3 * _HEADER:
        return None
    fields = _frame_header(view, 0)
    minor, number, length = fields[5:8]
    pos = _HEADER + ((length + 63) & ~63)
    if (
        fields[:5] != _PLAIN_HEAD
        or length < _HEAD
        or length > limits.head_bytes
        or length & 7
        or pos + _HEADER > size
        or fields[8] != 0
        or fields[9] != 0
        or fields[11] != 0
        or crc32c(view[:_HEADER_CRC]) != fields[12]
        or crc32c(view[_HEADER : _HEADER + length]) != fields[10]
        or (length & 63 and bytes(view[_HEADER + length : pos]) != _ZEROS[length & 63])
    ):
        return None
    head = check_head(view, _HEADER, length, 0, limits, require_checksums)
    if contract is not None:
        contract.compare(head)
    if head.fragment_size:
        return None
    checksums = head.checksums
    tensors = []
    for index, info in enumerate(head.tensors):
        row = info.row
        length = info.payload_bytes
        if not length:
            tensors.append(Tensor._of_info(info, from_payload(b"", row, info.shape, info.byte_order)))
            continue
        q = pos + _HEADER
        body_end = q + length
        frame_end = q + ((length + 63) & ~63)
        if frame_end + _HEADER > size:
            return None
        fields = _frame_header(view, pos)
        body = view[q:body_end]
        if (
            fields[:10] != (layout.MAGIC, layout.FRAGMENT, 0, 0, layout.MAJOR, minor, number, length, index, 0)
            or fields[11] != 0
            or crc32c(view[pos : pos + _HEADER_CRC]) != fields[12]
            or (crc32c(body) if checksums else 0) != fields[10]
            or (body_end != frame_end and bytes(view[body_end:frame_end]) != _ZEROS[length & 63])
            or (row is _BOOL and np.frombuffer(body, np.uint8).max() > 1)
        ):
            return None
        tensors.append(Tensor._of_info(info, from_payload(body, row, info.shape, info.byte_order)))
        pos = frame_end
    fields = _frame_header(view, pos)
    wanted = (head.fragments, head.payload_bytes, 0, 0)
    if (
        fields[:8] != (layout.MAGIC, layout.END, 0, 0, layout.MAJOR, minor, number, 0)
        or fields[8:12] != wanted
        or crc32c(view[pos : pos + _HEADER_CRC]) != fields[12]
        or pos + _HEADER != size
    ):
        return None
    return Bundle(tensors, head.attributes, number=number, minor=minor, checksums=checksums)


def decode(
    buffer: Any,
    *,
    limits: Limits = DEFAULT_LIMITS,
    require_checksums: bool = False,
    contract: Contract | None = None,
) -> Bundle:
    """Decode exactly one bundle in canonical order (a core decoder, section 11).

    ``buffer`` is anything with the buffer protocol. Arrays of the bundle are native
    and read-only: views of ``buffer`` when byte order, alignment and fragmentation
    allow, copies when not. Whoever changes a writable buffer later changes the
    views. ``contract`` is compared when the head has passed. Raises BundleError.
    """
    view = _bytes_view(buffer)
    bundle = _decode_plain(view, limits, require_checksums, contract)
    if bundle is not None:
        return bundle
    engine = _Engine(True, limits, require_checksums, contract, None)
    pos = engine.run(view, 0, 0, 0)
    ready = engine.ready
    if ready is None:
        raise failure("truncated", len(view), engine.frames, field="input")
    if pos != len(view):
        raise failure("trailing_bytes", pos, field="input", found=len(view) - pos)
    return ready


class _Growing:
    """Bytes that come in pieces, up to a known number.

    Memory follows what has come, by at most _STEP ahead and never beyond ``limit``:
    a bytearray would run up to an eighth ahead, 128 MB of a gigabyte.
    """

    __slots__ = ("array", "limit", "size")

    def __init__(self, limit: int, start: Buffer = b"") -> None:
        self.array = np.empty(len(start), np.uint8)
        self.limit = limit
        self.size = 0
        self.add(start)

    def add(self, part: Buffer) -> None:
        end = self.size + len(part)
        if end > self.array.size:
            ahead = min(max(end, 4096), _STEP)
            self._enlarge(min(self.limit, end + ahead))
        self.array[self.size : end] = np.frombuffer(part, np.uint8)
        self.size = end

    def _enlarge(self, size: int) -> None:
        # Nothing else looks at this memory yet: views are made when all has come.
        self.array.resize(size, refcheck=False)

    def view(self) -> memoryview:
        return self.array.data.toreadonly()


def _assemble(parts: dict[int, memoryview | bytes], size: int) -> memoryview:
    """The fragments of a payload of ``size`` bytes in order; each is let go as it is copied."""
    whole = _Growing(size)
    batch: list[memoryview | bytes] = []
    held = 0
    for offset in sorted(parts):
        part = parts.pop(offset)
        batch.append(part)
        held += len(part)
        if held >= _STEP:
            whole.add(b"".join(batch) if len(batch) > 1 else part)
            batch.clear()
            held = 0
    whole.add(b"".join(batch))
    return whole.view()


class Decoder:
    """Incremental decoder: bytes in, events out, in whatever pieces they come.

    ``conformance`` is 'core' (canonical order, one open bundle, one bundle after
    another) or 'stream' (fragments in any order and repeated, several bundles
    open). After an error nothing more is taken: every call raises it again.
    Memory is bounded by ``limits``: what is open, plus one frame.
    """

    def __init__(
        self,
        conformance: str = "core",
        *,
        limits: Limits = DEFAULT_LIMITS,
        require_checksums: bool = False,
        contract: Contract | None = None,
    ) -> None:
        if conformance not in ("core", "stream"):
            raise ValueError(f"conformance is {conformance!r}, not 'core' or 'stream'")
        self._events: list[Event] = []
        self._engine = _Engine(conformance == "core", limits, require_checksums, contract, self._events)
        self._pending: bytearray | _Growing = bytearray()
        self._taken = 0
        self._error: BundleError | None = None
        self._finished = False

    @property
    def need(self) -> int:
        """How many more bytes complete the next unit (at least 1)."""
        return self._engine.need - self._held()

    def _held(self) -> int:
        pending = self._pending
        return pending.size if isinstance(pending, _Growing) else len(pending)

    @property
    def open_bundles(self) -> list[int]:
        """Numbers of the bundles that are open."""
        return list(self._engine.open)

    def feed(self, data: Buffer) -> list[Event]:
        """Take a piece of input, possibly empty; return what it completed.

        Raises BundleError; the error's ``events`` are those that the same piece had
        completed before. A bytes object may be kept and viewed instead of copied.
        """
        if self._error is not None:
            raise copy.copy(self._error)
        if self._finished:
            raise ValueError("the decoder has been told that its input ended")
        # What is not immutable may be used again by the caller: keep a copy.
        piece = data if type(data) is bytes else bytes(data)
        events: list[Event] = []
        self._events = self._engine.events = events
        try:
            self._feed(memoryview(piece))
        except BundleError as error:
            error.events = tuple(events)
            self._fail(error)
            raise
        return events

    def _feed(self, piece: memoryview) -> None:
        engine = self._engine
        base = self._taken
        self._taken += len(piece)
        pos = 0
        while held := self._held():
            # Only up to the end of the next unit: each byte is copied once.
            part = piece[pos : pos + engine.need - held]
            pos += len(part)
            if isinstance(self._pending, _Growing):
                self._pending.add(part)
            elif engine.need > _STEP:
                self._pending = _Growing(engine.need, self._pending)
                self._pending.add(part)
            else:
                self._pending += part
            size = held + len(part)
            if size < engine.need:
                return
            if isinstance(self._pending, _Growing):
                unit = self._pending.view()
            else:
                # An exported bytearray cannot grow, so the small units are copied out.
                unit = memoryview(self._pending if size > _HEADER else bytes(self._pending)).toreadonly()
            if engine.run(unit, 0, base + pos - size, 0):
                # Fragments may be views of the old buffer: it is left to them.
                self._pending = bytearray()
        # What the piece holds whole is not copied at all.
        pos = engine.run(piece, pos, base, (len(piece) + 1) // 2)
        self._pending = bytearray(piece[pos:])

    def finish(self) -> None:
        """Say that the input has ended. Raises ``truncated``, or an earlier error."""
        if self._error is not None:
            raise copy.copy(self._error)
        self._finished = True
        if self._held() or self._engine.open:
            error = failure("truncated", self._taken, self._engine.frames, field="input")
            self._fail(error)
            raise error

    def _fail(self, error: BundleError) -> None:
        # A failed bundle leaves nothing behind.
        self._error = copy.copy(error)
        self._engine.open.clear()
        self._pending = bytearray()
