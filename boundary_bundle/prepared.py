"""Encoder and decoder for bundles that differ in little: a decode step's, by the thousand.

Between two steps of one pipeline names, dtypes, orders and most attributes stay; the
bundle number, some attribute values, the payload and, now and then, the token count
change. Both classes here keep a *template* for each form they have met, made by the
ordinary codec, and touch only what may differ from it.

Whatever does not fit a template goes through the ordinary codec. A prepared encoder
therefore writes what :func:`~boundary_bundle.encode` writes, and a prepared decoder
gives the bundles and the errors that :func:`~boundary_bundle.decode` gives:
tests/test_prepared.py draws both.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import numpy as np
from crc32c import crc32c

from . import layout
from .bundle import (
    ATTRIBUTE_TYPES,
    ATTRIBUTES,
    DEFAULT_LIMITS,
    REGISTERED_KEYS,
    Attribute,
    AttributeKey,
    Attributes,
    AttributeValue,
    Bundle,
    Limits,
    Tensor,
)
from .contract import Contract
from .decoder import _bytes_view, decode
from .dtypes import DTYPES, NATIVE_ORDER, Array, DType, dtype_of, from_payload, payload_view, to_order
from .encoder import Part, encode_parts

_HEADER: Final = layout.frame_header.size
_NUMBER_AT: Final = layout.frame_offset("bundle_number")
_AFTER_NUMBER: Final = layout.frame_offset("body_length")
_BODY_CRC_AT: Final = layout.frame_offset("body_crc")
_AFTER_BODY_CRC: Final = layout.frame_offset("reserved_2")
_HEADER_CRC_AT: Final = layout.frame_offset("header_crc")
#: The covered part of a header around the number alone, and around number and body_crc.
_around_number: Final = struct.Struct(f"<{_NUMBER_AT}sQ{_HEADER_CRC_AT - _AFTER_NUMBER}s").pack
_around_both: Final = struct.Struct(
    f"<{_NUMBER_AT}sQ{_BODY_CRC_AT - _AFTER_NUMBER}sI{_HEADER_CRC_AT - _AFTER_BODY_CRC}s"
).pack
_u32: Final = layout.u32.pack
_PACKERS: Final = {1: struct.Struct("<Q").pack, 2: struct.Struct("<q").pack, 3: struct.Struct("<d").pack}
_BYTES: Final = ATTRIBUTE_TYPES["bytes"]
_TEXT: Final = ATTRIBUTE_TYPES["text"]
_I64: Final = ATTRIBUTE_TYPES["i64"]
_N_TOKENS: Final = ATTRIBUTES["n_tokens"][0]
_BOOL_BYTES: Final = b"\0\1"
#: Forms kept at a time, frames and bytes of head a form may have: templates must not eat memory.
_MOST_FORMS: Final = 64
_MOST_FRAMES: Final = 256
_MOST_HEAD_BYTES: Final = 16_384
#: Bundles in a row that a template must fail to fit before another takes its place.
_PATIENCE: Final = 4
_NO_ATTRIBUTES: Final[dict[AttributeKey, AttributeValue]] = {}
_ndarray: Final = np.ndarray
_new: Final = object.__new__


class _Frame:
    """Where one frame of a form lies."""

    __slots__ = ("a", "b", "at", "length", "type")

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        fields = layout.frame_header.unpack_from(data, at)
        self.at = at
        self.type: int = fields[1]
        self.length: int = fields[7]
        self.a: int = fields[8]
        self.b: int = fields[9]

    @property
    def body(self) -> int:
        return self.at + _HEADER

    @property
    def end(self) -> int:
        return self.body + layout.pad64(self.length)


def _frames(data: bytes | memoryview) -> list[_Frame] | None:
    """The frames of an encoding that has passed every check; None for more than a form may have."""
    if _Frame(data, 0).length > _MOST_HEAD_BYTES:
        return None
    found: list[_Frame] = []
    at = 0
    while at < len(data):
        if len(found) == _MOST_FRAMES:
            return None
        frame = _Frame(data, at)
        found.append(frame)
        at = frame.end
    return found


def _value_slots(data: bytes | memoryview, head: _Frame) -> list[tuple[int, int, int, int]]:
    """(key, type, offset, size) of the attribute values that may differ within a form.

    Any value of a u64, i64, f64 or bytes of the same length passes the checks that
    its predecessor passed. A text could hold an illegal byte, and n_tokens depends
    on the shapes: they stay.
    """
    found = []
    _, _, count, size, _, _ = layout.head_fixed.unpack_from(data, head.body)
    at = head.body + head.length - size
    for _ in range(count):
        key, kind, _, length = layout.attribute_fixed.unpack_from(data, at)
        at += layout.attribute_fixed.size
        if length and kind != _TEXT and key != _N_TOKENS:
            found.append((key, kind, at, length))
        at += layout.pad8(length)
    return found


class _Pieces:
    """A struct that cuts a buffer into fixed pieces and slots, alternating, a fixed one first."""

    def __init__(self, at: int = 0) -> None:
        self.format = ["<"]
        self.fixed: list[bytes] = []
        self.slots = 0
        self.at = at

    def slot(self, data: bytes | memoryview, at: int, code: str, size: int) -> int:
        """Fixed bytes up to ``at``, then a slot; returns the slot's place among the slots."""
        self._fix(data, at)
        self.format.append(code)
        self.at = at + size
        self.slots += 1
        return self.slots - 1

    def skip(self, data: bytes | memoryview, at: int, size: int) -> None:
        """Fixed bytes up to ``at``, then bytes that are looked at otherwise."""
        self._fix(data, at)
        # A slot of nothing keeps fixed pieces and slots alternating.
        self.format.append(f"{size}x0s")
        self.at = at + size
        self.slots += 1

    def finish(self, data: bytes | memoryview, end: int) -> struct.Struct:
        self._fix(data, end)
        return struct.Struct("".join(self.format))

    def _fix(self, data: bytes | memoryview, at: int) -> None:
        self.format.append(f"{at - self.at}s")
        self.fixed.append(bytes(data[self.at : at]))


# Encoder


class _TensorForm:
    """What the fast path knows of one tensor: its dtype in wire order, and the other order's."""

    __slots__ = ("boolean", "exported", "order", "row", "wire")

    def __init__(self, row: DType, order: str) -> None:
        self.row = row
        self.order = order
        self.wire = row.numpy if order == NATIVE_ORDER else row.numpy.newbyteorder()
        self.boolean = row.name == "bool"
        # ml_dtypes' arrays export no buffer.
        self.exported = row.numpy.kind != "V" and row.numpy.type.__module__ == "numpy"


class _EncoderForm:
    """Template of the bundles whose arrays have one list of shapes."""

    __slots__ = (
        "body",
        "body_crc",
        "body_pieces",
        "end",
        "fragments",
        "head",
        "keys",
        "pack_body",
        "padding",
        "values",
    )

    def __init__(
        self, headers: list[bytes], given: dict[AttributeKey, tuple[int, Attribute]], varying: Container[int]
    ) -> None:
        """``headers``: what lies between the payloads, the whole head frame first."""
        data = headers[0]
        head = _Frame(data, 0)
        slots = [slot for slot in _value_slots(data, head) if slot[0] in varying]
        pieces = _Pieces(head.body)
        places = {key: 2 * pieces.slot(data, at, f"{size}s", size) + 1 for key, _, at, size in slots}
        packer = pieces.finish(data, head.body + head.length)
        self.body = data[head.body : head.body + head.length]
        self.body_crc = crc32c(self.body)
        #: The fixed pieces with room for the slots between them.
        self.body_pieces = [b""] * (2 * len(pieces.fixed) - 1)
        self.body_pieces[::2] = pieces.fixed
        self.pack_body = packer.pack if slots else None
        self.padding = data[head.body + head.length : head.end]
        self.head = _around(data)
        #: tensor, offset, length, the header around its variable fields, padding
        self.fragments = []
        for part, following in zip(headers, headers[1:], strict=False):
            header = part[-_HEADER:]
            frame = _Frame(header, 0)
            self.fragments.append((frame.a, frame.b, frame.length, *_around(header), following[:-_HEADER]))
        end = headers[-1][-_HEADER:]
        self.end = end[:_NUMBER_AT], end[_AFTER_NUMBER:_HEADER_CRC_AT]
        self.keys = len(given)
        #: key as given, number, type, bytes, and place in body_pieces, or 0 for a value that must stay
        self.values = [
            (key, number, record.type, len(record.raw), record.raw, places.get(number, 0))
            for key, (number, record) in given.items()
        ]


def _around(header: bytes) -> tuple[bytes, bytes, bytes]:
    """A covered header without its bundle_number and body_crc."""
    return (
        header[:_NUMBER_AT],
        header[_AFTER_NUMBER:_BODY_CRC_AT],
        header[_AFTER_BODY_CRC:_HEADER_CRC_AT],
    )


class PreparedEncoder:
    """Encodes bundles of one contract; the output is that of :func:`~boundary_bundle.encode`.

    The contract gives names, dtypes, shapes but for its symbols, token axes and the
    attributes with a fixed value. ``byte_orders`` is 'little' or 'big' for every
    tensor that has a choice, or a mapping of names to them. Fast while the
    attributes keep their keys and lengths; a new list of shapes is prepared when it
    comes first (64 are kept).

    One object serves one thread at a time.
    """

    def __init__(
        self,
        contract: Contract,
        *,
        byte_orders: str | Mapping[str, str] = "little",
        fragment_size: int = 0,
        checksums: bool = True,
        minor: int = 0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._contract = contract
        self._fragment_size = fragment_size
        self._checksums = checksums
        self._minor = minor
        self._limits = limits
        self._rules = [(rule, DTYPES[rule.dtype]) for rule in contract.tensors]
        self._orders = [
            "little"
            if not row.both_orders
            else byte_orders
            if isinstance(byte_orders, str)
            else byte_orders.get(rule.name, "little")
            for rule, row in self._rules
        ]
        self._fixed = frozenset(record.key for record in contract.attributes.records())
        self._tensors = [
            _TensorForm(row, order if order in ("little", "big") else "little")
            for (_, row), order in zip(self._rules, self._orders, strict=True)
        ]
        self._forms: dict[tuple[tuple[int, ...], ...], _EncoderForm] = {}

    def bundle(
        self,
        arrays: Sequence[Array],
        attributes: Mapping[AttributeKey, AttributeValue] | Mapping[str, AttributeValue] = _NO_ATTRIBUTES,
        *,
        number: int = 0,
    ) -> Bundle:
        """The logical bundle that the same call of :meth:`encode` writes.

        Raises ValueError for another number of arrays than the contract has tensors,
        and what Tensor and Attributes raise.
        """
        if len(arrays) != len(self._rules):
            raise ValueError(f"{len(arrays)} arrays for the {len(self._rules)} tensors of the contract")
        tensors = [
            Tensor(
                rule.name,
                array,
                # Named only where an array cannot say it; else a mismatch is the contract's to report.
                dtype=rule.dtype if row.block_elements != 1 else None,
                token_axis=rule.token_axis,
                byte_order=order,
            )
            for (rule, row), order, array in zip(self._rules, self._orders, arrays, strict=True)
        ]
        merged = Attributes(self._contract.attributes)
        for _, record in self._given(attributes).values():
            merged.put(record)
        return Bundle(
            tensors,
            merged,
            number=number,
            minor=self._minor,
            fragment_size=self._fragment_size,
            checksums=self._checksums,
        )

    def encode(
        self,
        arrays: Sequence[Array],
        attributes: Mapping[AttributeKey, AttributeValue] | Mapping[str, AttributeValue] = _NO_ATTRIBUTES,
        *,
        number: int = 0,
    ) -> bytes:
        """The canonical form of the contract's tensors over ``arrays``, in its order.

        ``attributes`` are those to which the contract gives no value. Raises
        ContractMismatch, and whatever :func:`~boundary_bundle.encode` raises.
        """
        parts = self._fast(arrays, attributes, number, False)
        return b"".join(self._slow(arrays, attributes, number) if parts is None else parts)

    def encode_parts(
        self,
        arrays: Sequence[Array],
        attributes: Mapping[AttributeKey, AttributeValue] | Mapping[str, AttributeValue] = _NO_ATTRIBUTES,
        *,
        number: int = 0,
    ) -> list[Part]:
        """As :func:`~boundary_bundle.encode_parts`: headers, and views of the arrays."""
        parts = self._fast(arrays, attributes, number, True)
        return self._slow(arrays, attributes, number) if parts is None else parts

    def _given(self, attributes: Mapping[Any, AttributeValue]) -> dict[AttributeKey, tuple[int, Attribute]]:
        """key as given -> (number, record)."""
        found: dict[AttributeKey, tuple[int, Attribute]] = {}
        if isinstance(attributes, Attributes):
            for record in attributes.records():
                found[record.key] = record.key, record
            return found
        types = {code: name for name, code in ATTRIBUTE_TYPES.items()}
        for key, value in attributes.items():
            number = ATTRIBUTES[key][0] if isinstance(key, str) else key
            kind = self._contract.any_value.get(number)
            found[key] = number, Attribute.of(number, value, None if kind is None else types[kind])
        return found

    def _slow(self, arrays: Sequence[Array], attributes: Mapping[Any, AttributeValue], number: int) -> list[Part]:
        bundle = self.bundle(arrays, attributes, number=number)
        self._contract.compare(bundle)
        parts = encode_parts(bundle, limits=self._limits)
        # Parts alternate between headers and payloads.
        headers = [part for part in parts[::2] if isinstance(part, bytes)]
        given = self._given(attributes)
        numbers = {number for number, _ in given.values()}
        if (
            len(headers) == (len(parts) + 1) // 2 <= _MOST_FRAMES
            and len(headers[0]) <= _MOST_HEAD_BYTES
            # The same key by its name and by its number: the last one counts.
            and len(numbers) == len(given)
        ):
            shapes = tuple(tensor.array.shape for tensor in bundle.tensors)
            if len(self._forms) >= _MOST_FORMS and shapes not in self._forms:
                del self._forms[next(iter(self._forms))]
            # A type that was guessed from the value could be another for the next value.
            varying = {
                number
                for number, record in given.values()
                if number not in self._fixed
                and (number in self._contract.any_value or number in REGISTERED_KEYS or record.type != _I64)
            }
            self._forms[shapes] = _EncoderForm(headers, given, varying)
        return parts

    def _fast(
        self, arrays: Sequence[Array], attributes: Mapping[Any, AttributeValue], number: int, views: bool
    ) -> list[Part] | None:
        """The parts, or None when something is not as the template has it."""
        try:
            form = self._forms.get(tuple([array.shape for array in arrays]))
            if form is None or len(attributes) != form.keys:
                return None
            body = form.body
            crc = form.body_crc
            if form.keys:
                if type(attributes) is Attributes:
                    pieces = self._raw_values(form, attributes)
                else:
                    pieces = self._values(form, attributes)
                if pieces is None:
                    return None
                if form.pack_body is not None:
                    body = form.pack_body(*pieces)
                    crc = crc32c(body)
            before, middle, after = form.head
            covered = _around_both(before, number, middle, crc, after)
            pending = covered + _u32(crc32c(covered)) + body + form.padding
            payloads: list[Any] = []
            for array, tensor in zip(arrays, self._tensors, strict=True):
                if type(array) is not _ndarray:
                    return None
                dtype = array.dtype
                if (
                    (dtype is not tensor.wire and dtype != tensor.wire)
                    or not array.flags.c_contiguous
                    or not tensor.exported
                ):
                    if dtype_of(array).numpy is not tensor.row.numpy:
                        return None
                    payload: Any = payload_view(to_order(array, tensor.row, tensor.order))
                elif views or self._fragment_size:
                    payload = payload_view(array)
                else:
                    payload = array
                if tensor.boolean and bytes(payload).translate(None, _BOOL_BYTES):
                    return None
                payloads.append(payload)
            parts: list[Any] = []
            checksums = self._checksums
            whole = not self._fragment_size
            for index, offset, length, before, middle, after, padding in form.fragments:
                part = payloads[index]
                if not whole:
                    part = part[offset : offset + length]
                covered = _around_both(before, number, middle, crc32c(part) if checksums else 0, after)
                parts.append(pending + covered + _u32(crc32c(covered)))
                parts.append(part)
                pending = padding
            before, after = form.end
            covered = _around_number(before, number, after)
            parts.append(pending + covered + _u32(crc32c(covered)))
        except (AttributeError, KeyError, TypeError, ValueError, struct.error):
            # The ordinary encoder says what is wrong, if it is.
            return None
        return parts

    @staticmethod
    def _values(form: _EncoderForm, attributes: Mapping[Any, AttributeValue]) -> list[bytes] | None:
        pieces = form.body_pieces.copy()
        for key, _, kind, size, raw, place in form.values:
            value = attributes[key]
            if kind <= 2:
                new = _PACKERS[kind](value)
            elif kind == 3:
                if type(value) is not float:
                    return None
                new = _PACKERS[3](value)
            elif kind == _BYTES and type(value) is bytes and len(value) == size:
                new = value
            elif kind == _TEXT and type(value) is str:
                new = value.encode("ascii")
            else:
                return None
            if place:
                pieces[place] = new
            elif new != raw:
                return None
        return pieces

    @staticmethod
    def _raw_values(form: _EncoderForm, attributes: Attributes) -> list[bytes] | None:
        pieces = form.body_pieces.copy()
        for _, number, kind, size, raw, place in form.values:
            record = attributes.record(number)
            if record is None or record.type != kind or len(record.raw) != size:
                return None
            if place:
                pieces[place] = record.raw
            elif record.raw != raw:
                return None
        return pieces


# Decoder


class _DecoderForm:
    """Template of the bundles that differ from one another in slots alone."""

    __slots__ = (
        "bundle",
        "end_at",
        "end_crc",
        "fixed",
        "fragments",
        "head_body",
        "head_crc",
        "misses",
        "number",
        "numbers",
        "records",
        "tensors",
        "unpack",
        "values",
    )

    def __init__(self, data: bytes | memoryview, frames: list[_Frame], bundle: Bundle, fixed: Container[int]) -> None:
        self.misses = 0
        pieces = _Pieces()
        head, end = frames[0], frames[-1]
        slots = [slot for slot in _value_slots(data, head) if slot[0] not in fixed]
        numbers = [pieces.slot(data, head.at + _NUMBER_AT, "Q", 8)]
        # With no slot in it the body is the template's, and so is its checksum.
        self.head_body: tuple[int, int, int] | None = None
        if slots:
            place = pieces.slot(data, head.at + _BODY_CRC_AT, "I", 4)
            self.head_body = (2 * place + 1, head.body, head.body + head.length)
        self.head_crc = 2 * pieces.slot(data, head.at + _HEADER_CRC_AT, "I", 4) + 1
        #: (place, key, type) of each attribute that varies.
        self.values = [(2 * pieces.slot(data, at, f"{size}s", size) + 1, key, kind) for key, kind, at, size in slots]
        #: (offset of the frame, place of header_crc, place of body_crc or 0, body from, body to)
        self.fragments: list[tuple[int, int, int, int, int]] = []
        of_tensor: dict[int, list[tuple[int, int]]] = {}
        for frame in frames[1:-1]:
            numbers.append(pieces.slot(data, frame.at + _NUMBER_AT, "Q", 8))
            body_crc = 0
            if bundle.checksums:
                body_crc = 2 * pieces.slot(data, frame.at + _BODY_CRC_AT, "I", 4) + 1
            header_crc = 2 * pieces.slot(data, frame.at + _HEADER_CRC_AT, "I", 4) + 1
            stop = frame.body + frame.length
            pieces.skip(data, frame.body, frame.length)
            self.fragments.append((frame.at, header_crc, body_crc, frame.body, stop))
            of_tensor.setdefault(frame.a, []).append((frame.body, stop))
        numbers.append(pieces.slot(data, end.at + _NUMBER_AT, "Q", 8))
        self.end_at = end.at
        self.end_crc = 2 * pieces.slot(data, end.at + _HEADER_CRC_AT, "I", 4) + 1
        self.unpack = pieces.finish(data, end.end).unpack_from
        self.number = 2 * numbers[0] + 1
        self.numbers = [2 * place + 1 for place in numbers[1:]]
        self.fixed = tuple(pieces.fixed)
        self.records = {record.key: record for record in bundle.attributes.records()}
        #: name, row, shape, shape in memory, token axis, byte order, a view is possible, bodies, from, to
        self.tensors = [
            (
                tensor.name,
                tensor.row,
                tensor.shape,
                tensor.row.storage_shape(tensor.shape),
                tensor.token_axis,
                tensor.byte_order,
                len(of_tensor.get(index, ())) == 1
                and (tensor.row.numpy.itemsize == 1 or tensor.byte_order == NATIVE_ORDER),
                tensor.row.name == "bool",
                of_tensor.get(index, []),
            )
            for index, tensor in enumerate(bundle.tensors)
        ]
        self.bundle = (bundle.minor, bundle.fragment_size, bundle.checksums)


class PreparedDecoder:
    """Decodes one bundle a call, fast when it is like one that came before.

    Checks what :func:`~boundary_bundle.decode` checks, with the same results and the
    same errors: what is not byte for byte as in a bundle that passed, save for the
    bundle number, attribute values of u64, i64, f64 and bytes, payloads and their
    checksums (all of which are computed), is decoded by it. Forms are told apart by
    their length in bytes, so that every token count has one; 64 are kept.

    One object serves one thread at a time.
    """

    def __init__(
        self,
        contract: Contract | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        require_checksums: bool = False,
    ) -> None:
        self._contract = contract
        self._limits = limits
        self._require_checksums = require_checksums
        self._fixed = frozenset(() if contract is None else (record.key for record in contract.attributes.records()))
        self._forms: dict[int, _DecoderForm] = {}

    def decode(self, buffer: Any) -> Bundle:
        """Decode exactly one bundle; arrays are read-only views of ``buffer`` where possible.

        Raises BundleError, as :func:`~boundary_bundle.decode` does.
        """
        view = buffer if type(buffer) is bytes else _bytes_view(buffer)
        form = self._forms.get(len(view))
        if form is not None:
            bundle = self._fast(view, form)
            if bundle is not None:
                form.misses = 0
                return bundle
            form.misses += 1
        bundle = decode(view, limits=self._limits, require_checksums=self._require_checksums, contract=self._contract)
        if form is None or form.misses >= _PATIENCE:
            self._learn(view, bundle)
        return bundle

    def _learn(self, view: bytes | memoryview, bundle: Bundle) -> None:
        frames = _frames(view)
        # Extension frames are skipped anew each time; they are no part of a form.
        if frames is None or any(frame.type != layout.FRAGMENT for frame in frames[1:-1]):
            return
        if len(self._forms) >= _MOST_FORMS and len(view) not in self._forms:
            del self._forms[next(iter(self._forms))]
        self._forms[len(view)] = _DecoderForm(view, frames, bundle, self._fixed)

    @staticmethod
    def _fast(view: bytes | memoryview, form: _DecoderForm) -> Bundle | None:
        """The bundle, or None when anything at all is not as it must be."""
        cut = form.unpack(view)
        if cut[::2] != form.fixed:
            return None
        number = cut[form.number]
        for place in form.numbers:
            if cut[place] != number:
                return None
        if crc32c(view[:_HEADER_CRC_AT]) != cut[form.head_crc]:
            return None
        if form.head_body is not None:
            place, start, stop = form.head_body
            if crc32c(view[start:stop]) != cut[place]:
                return None
        # Slices of a memoryview do not copy; a payload may be large.
        whole = memoryview(view) if type(view) is bytes else view
        for at, header_crc, body_crc, start, stop in form.fragments:
            if crc32c(view[at : at + _HEADER_CRC_AT]) != cut[header_crc]:
                return None
            if body_crc and crc32c(whole[start:stop]) != cut[body_crc]:
                return None
        at = form.end_at
        if crc32c(view[at : at + _HEADER_CRC_AT]) != cut[form.end_crc]:
            return None
        tensors = []
        for name, row, shape, stored, axis, order, direct, boolean, bodies in form.tensors:
            array: Array
            if direct:
                start, stop = bodies[0]
                array = _ndarray(stored, row.numpy, view, start)
                if boolean:
                    if array.view(np.uint8).max() > 1:
                        return None
                elif not array.flags.aligned:
                    array = from_payload(whole[start:stop], row, shape, order)
            else:
                if boolean and any(bytes(whole[a:b]).translate(None, _BOOL_BYTES) for a, b in bodies):
                    return None
                if len(bodies) == 1:
                    data: Any = whole[bodies[0][0] : bodies[0][1]]
                else:
                    data = b"".join([whole[start:stop] for start, stop in bodies])
                array = from_payload(data, row, shape, order)
            tensor = _new(Tensor)
            tensor.name = name
            tensor.array = array
            tensor.row = row
            tensor.shape = shape
            tensor.token_axis = axis
            tensor.byte_order = order
            tensors.append(tensor)
        records = form.records.copy()
        for place, key, kind in form.values:
            records[key] = Attribute(key, kind, cut[place])
        attributes = _new(Attributes)
        attributes._records = records
        bundle = _new(Bundle)
        bundle.tensors = tensors
        bundle.attributes = attributes
        bundle.number = number
        bundle.minor, bundle.fragment_size, bundle.checksums = form.bundle
        return bundle
