"""From bundles to bytes: the canonical form (specification, section 9).

The head body that is about to be written goes through the decoder's own
:func:`~boundary_bundle.decoder.check_head`, so an encoder refuses what a decoder
would refuse, with the same names.
"""

from __future__ import annotations

from crc32c import crc32c

from . import layout
from .bundle import DEFAULT_LIMITS, Bundle, Limits, Tensor
from .decoder import Head, check_head
from .dtypes import DTYPE_BY_CODE
from .errors import BundleError, failure

Part = bytes | memoryview

_PADDING = tuple(bytes(-size % 64) for size in range(64))
_PADDING_8 = tuple(bytes(-size % 8) for size in range(8))
_ORDERS = {"little": layout.LITTLE, "big": layout.BIG}
_BOOL = DTYPE_BY_CODE[32]

_covered = layout.frame_header_covered.pack
_u32 = layout.u32.pack
_tensor_fixed = layout.tensor_fixed.pack
_attribute_fixed = layout.attribute_fixed.pack
_dims = tuple(packer.pack for packer in layout.dims)
_ZERO_3 = bytes(3)
# A header and a view a fragment, a million of them, lie in no cache and make the allocator take
# and give back memory in every call. So encode joins small fragments in runs; larger ones are
# few for their bytes, and to copy them twice would cost more.
_RUN = 256
_SMALL_FRAGMENT = 512


def _frame_header(kind: int, minor: int, number: int, length: int, a: int, b: int, body_crc: int) -> bytes:
    covered = _covered(layout.MAGIC, kind, 0, 0, layout.MAJOR, minor, number, length, a, b, body_crc, 0)
    return covered + _u32(crc32c(covered))


def _tensor_record(tensor: Tensor, limits: Limits, parts: list[bytes]) -> None:
    # Here only what a record cannot even state; check_head judges the rest.
    name = tensor.name.encode("utf-8", "surrogatepass")
    size = len(name)
    if size > limits.name_bytes:
        raise failure("limit_name", tensor=tensor.name, field="name_length", found=size)
    order = _ORDERS.get(tensor.byte_order)
    if order is None:
        raise failure(
            "tensor_byte_order",
            tensor=tensor.name,
            field="byte_order",
            expected="'little' or 'big'",
            found=tensor.byte_order,
        )
    shape = tensor.shape
    rank = len(shape)
    if rank > limits.rank:
        raise failure("limit_rank", tensor=tensor.name, field="rank", found=rank)
    axis = tensor.token_axis
    if axis is None:
        axis = layout.NO_TOKEN_AXIS
    elif not 0 <= axis < rank:
        raise failure(
            "tensor_token_axis",
            tensor=tensor.name,
            field="token_axis",
            expected=f"None or < {rank}",
            found=axis,
        )
    parts.append(_tensor_fixed(tensor.row.code, order, rank, axis, size, _ZERO_3))
    parts.append(_dims[rank](*shape))
    parts.append(name)
    parts.append(_PADDING_8[size & 7])


def _head_body(bundle: Bundle, limits: Limits) -> bytes:
    tensors = bundle.tensors
    if len(tensors) > limits.tensors:
        raise failure("limit_tensors", field="tensor_count", found=len(tensors))
    table: list[bytes] = []
    for tensor in tensors:
        _tensor_record(tensor, limits, table)
    block: list[bytes] = []
    attribute_bytes = 0
    records = bundle.attributes.records()
    for record in records:
        size = len(record.raw)
        if not 0 <= record.key <= 0xFFFF:
            raise failure("attribute_key", field="key", found=record.key)
        if not 0 <= record.type <= 0xFF:
            raise failure("attribute_type", field="type", found=record.type)
        attribute_bytes += layout.attribute_fixed.size + layout.pad8(size)
        if attribute_bytes > limits.attribute_bytes:
            raise failure(
                "limit_attribute_bytes",
                field="attribute_bytes",
                expected=f"<= {limits.attribute_bytes}",
                found=attribute_bytes,
            )
        block.append(_attribute_fixed(record.key, record.type, 0, size))
        block.append(record.raw)
        block.append(_PADDING_8[size & 7])
    fragment_size = bundle.fragment_size
    if not 0 <= fragment_size < 2**64:
        raise failure("fragment_size", field="fragment_size", found=fragment_size)
    fixed = layout.head_fixed.pack(
        0 if bundle.checksums else layout.CHECKSUMS_ABSENT,
        len(tensors),
        len(records),
        attribute_bytes,
        fragment_size,
        0,
    )
    return b"".join((fixed, *table, *block))


def _earlier(bundle: Bundle, limits: Limits) -> BundleError | None:
    """What a decoder would say of a refused head before it looks at its records (B10, D4, D5)."""
    attribute_bytes = sum(
        layout.attribute_fixed.size + layout.pad8(len(record.raw)) for record in bundle.attributes.records()
    )
    length = layout.head_fixed.size + attribute_bytes
    for tensor in bundle.tensors:
        name = tensor.name.encode("utf-8", "surrogatepass")
        length += layout.tensor_fixed.size + 8 * len(tensor.shape) + layout.pad8(len(name))
    for error, field, most, found in (
        ("limit_head_bytes", "body_length", limits.head_bytes, length),
        ("limit_tensors", "tensor_count", limits.tensors, len(bundle.tensors)),
        ("limit_attribute_bytes", "attribute_bytes", limits.attribute_bytes, attribute_bytes),
    ):
        if found > most:
            return failure(error, field=field, expected=f"<= {most}", found=found)
    return None


def encode_parts(bundle: Bundle, *, limits: Limits = DEFAULT_LIMITS) -> list[Part]:
    """The canonical form as a list of buffers, for a gathering write.

    Headers are bytes; payloads are views of the tensors' own arrays when these are
    contiguous and in wire order already, swapped or gathered copies when not. The
    checksums hold for the arrays as they are now: do not change an array before its
    parts are written.

    Raises BundleError, with the names of section 6, for what a decoder with these
    limits would refuse, and ValueError for a number or minor that no header holds.
    """
    return _parts(bundle, limits, gather=False)


def _parts(bundle: Bundle, limits: Limits, gather: bool) -> list[Part]:
    """:func:`encode_parts`; with ``gather`` small fragments may lie joined in one part."""
    number = bundle.number
    minor = bundle.minor
    if not 0 <= number < 2**64:
        raise ValueError(f"bundle number {number} is not 0 to 2**64 - 1")
    if not 0 <= minor < 2**16:
        raise ValueError(f"minor version {minor} is not 0 to 65535")
    try:
        body = _head_body(bundle, limits)
    except BundleError as error:
        raise _earlier(bundle, limits) or error from None
    length = len(body)
    if length > limits.head_bytes:
        raise failure(
            "limit_head_bytes",
            layout.frame_offset("body_length"),
            0,
            field="body_length",
            expected=f"<= {limits.head_bytes}",
            found=length,
        )
    head = check_head(body, 0, length, layout.frame_header.size, limits)
    parts: list[Part] = []
    pending = _frame_header(layout.HEAD, minor, number, length, 0, 0, crc32c(body)) + body + _PADDING[length & 63]
    for index, tensor in enumerate(bundle.tensors):
        if head.tensors[index].payload_bytes:
            pending = _fragments(bundle, head, index, tensor, pending, parts, gather)
    parts.append(pending + _frame_header(layout.END, minor, number, 0, head.fragments, head.payload_bytes, 0))
    return parts


def _fragments(
    bundle: Bundle,
    head: Head,
    index: int,
    tensor: Tensor,
    pending: bytes,
    parts: list[Part],
    gather: bool,
) -> bytes:
    """Append the frames of one tensor; ``pending`` goes before, the rest is returned."""
    payload = tensor.payload()
    size = head.tensors[index].payload_bytes
    if len(payload) != size:
        raise ValueError(f"tensor {tensor.name!r} holds {len(payload)} bytes, its shape says {size}")
    if tensor.row is _BOOL:
        text = bytes(payload)
        if text.translate(None, b"\0\1"):
            raise failure("bool_value", tensor=tensor.name, field="payload", expected="0 or 1")
    step = bundle.fragment_size or size
    minor, number, checksums = bundle.minor, bundle.number, bundle.checksums
    if step >= size:
        crc = crc32c(payload) if checksums else 0
        parts.append(pending + _frame_header(layout.FRAGMENT, minor, number, size, index, 0, crc))
        parts.append(payload)
        return _PADDING[size & 63]
    gather = gather and step <= _SMALL_FRAGMENT
    run = step * _RUN if gather else size
    for first in range(0, size, run):
        frames: list[Part] = [] if gather else parts
        for offset in range(first, min(first + run, size), step):
            part = payload[offset : offset + step]
            length = len(part)
            crc = crc32c(part) if checksums else 0
            frames.append(pending + _frame_header(layout.FRAGMENT, minor, number, length, index, offset, crc))
            frames.append(part)
            pending = _PADDING[length & 63]
        if gather:
            parts.append(b"".join(frames))
    return pending


def encode(bundle: Bundle, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The canonical form of a bundle as one bytes object (see :func:`encode_parts`)."""
    return b"".join(_parts(bundle, limits, gather=True))
