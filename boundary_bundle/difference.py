"""How two bundles differ: by bits first, and by how much where numbers can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .bundle import Attribute, Bundle, Tensor
from .dtypes import Array

#: Elements looked at in one go, so that large tensors need no large copies.
_CHUNK = 1 << 18


@dataclass
class TensorDifference:
    """One tensor of either bundle.

    ``bits_equal``: same dtype, shape and token axis, and every bit. The numbers are None where
    the two cannot be compared element by element: one is absent, or shapes differ.
    ``largest`` and ``mean`` are of the absolute differences, over all elements but
    those with a NaN on one side or both with other bits, which ``not_numbers`` counts.
    """

    name: str
    a: Tensor | None
    b: Tensor | None
    bits_equal: bool = False
    differing: int | None = None
    largest: float | None = None
    mean: float | None = None
    first: tuple[int, ...] | None = None
    not_numbers: int = 0


@dataclass
class Difference:
    """All there is to say about two bundles; ``framing`` is what is not content."""

    tensors: list[TensorDifference]
    order_differs: bool
    attributes: dict[str, tuple[Attribute | None, Attribute | None]] = field(default_factory=dict)
    framing: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def content_equal(self) -> bool:
        """Same tensors in the same order, by bits, and the same attributes."""
        return not self.order_differs and not self.attributes and all(row.bits_equal for row in self.tensors)

    @property
    def bits_equal(self) -> bool:
        """Content and framing: the two have the same canonical form."""
        return self.content_equal and not self.framing


def compare(a: Bundle, b: Bundle) -> Difference:
    """Compare two bundles; neither has to be like the other in anything."""
    names = [*a.names, *(name for name in b.names if name not in a)]
    rows = [
        _tensor(name, a.tensor(name) if name in a else None, b.tensor(name) if name in b else None) for name in names
    ]
    common_a = [name for name in a.names if name in b]
    common_b = [name for name in b.names if name in a]
    found = Difference(rows, common_a != common_b)
    keys = {record.key for bundle in (a, b) for record in bundle.attributes.records()}
    for key in sorted(keys):
        ours, theirs = a.attributes.record(key), b.attributes.record(key)
        if ours != theirs:
            named = ours or theirs
            found.attributes[(named.name if named is not None else None) or f"{key:#06x}"] = ours, theirs
    for name in ("number", "minor", "fragment_size", "checksums"):
        if getattr(a, name) != getattr(b, name):
            found.framing[name] = getattr(a, name), getattr(b, name)
    for row in rows:
        if row.a is not None and row.b is not None and row.a.byte_order != row.b.byte_order:
            found.framing[f"byte order of {row.name}"] = row.a.byte_order, row.b.byte_order
    return found


def _tensor(name: str, a: Tensor | None, b: Tensor | None) -> TensorDifference:
    row = TensorDifference(name, a, b)
    if a is None or b is None or a.shape != b.shape:
        return row
    same_type = a.row is b.row
    differing = 0
    total = largest = 0.0
    counted = 0
    at = 0
    for x, y, other in _chunks(a, b):
        differing += int(np.count_nonzero(other))
        if row.first is None and other.any():
            place = at + int(other.argmax())
            row.first = tuple(map(int, np.unravel_index(place, a.shape))) if a.shape else ()
        distance = _distance(x, y, other)
        missing = np.isnan(distance)
        row.not_numbers += int(np.count_nonzero(missing))
        numbers = distance[~missing]
        if numbers.size:
            largest = max(largest, float(numbers.max()))
            with np.errstate(over="ignore"):
                total += float(numbers.sum())
            counted += numbers.size
        at += len(other)
    row.differing = differing
    row.bits_equal = same_type and not differing and a.token_axis == b.token_axis
    if counted or not at:
        row.largest = largest
        row.mean = total / counted if counted else 0.0
    return row


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Array, Array, Array]]:
    """Values of both, and which elements differ (in bits, if the dtypes are the same)."""
    flat_a, flat_b = _flat(a), _flat(b)
    size = int(np.prod(a.shape, dtype=object)) if a.shape else 1
    for start in range(0, size, _CHUNK):
        x, bits_x = _values(a, flat_a, start, min(start + _CHUNK, size))
        y, bits_y = _values(b, flat_b, start, min(start + _CHUNK, size))
        if a.row is b.row:
            other = bits_x != bits_y
            # A block's elements differ by its scale, too.
            yield x, y, other if other.ndim == 1 else other.any(axis=1)
        else:
            with np.errstate(invalid="ignore"):
                yield x, y, x != y


def _flat(tensor: Tensor) -> Array:
    return np.ascontiguousarray(tensor.array).reshape(-1)


def _values(tensor: Tensor, flat: Array, start: int, stop: int) -> tuple[Array, Array]:
    """Elements as numbers (integers stay integers), and their bits."""
    row = tensor.row
    if row.block_elements != 1:
        # _CHUNK is a multiple of the block.
        blocks = flat.reshape(-1, row.block_bytes)[start // row.block_elements : -(-stop // row.block_elements)]
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float64)
        quants = blocks[:, 2:].view(np.int8)
        bits = np.empty((quants.size, 2), np.uint16)
        bits[:, 0] = np.repeat(np.ascontiguousarray(blocks[:, :2]).view("<u2").reshape(-1), row.block_elements)
        bits[:, 1] = quants.view(np.uint8).reshape(-1)
        return (scales * quants).reshape(-1), bits
    part = flat[start:stop]
    native = part.astype(part.dtype.newbyteorder("=")) if part.dtype.byteorder == ">" else part
    bits = native.view(row.unsigned)
    if row.name == "bool":
        return bits, bits
    return (native if native.dtype.kind in "iu" else native.astype(np.float64)), bits


def _distance(x: Array, y: Array, other: Array) -> Array:
    """Absolute differences as f64; equal infinities are no distance apart, nor are NaNs of the same bits."""
    if x.dtype.kind in "iu" and x.dtype == y.dtype:
        wide = np.uint64
        # Exact for every width: the difference of two's complements, the greater one first.
        greater, lesser = np.maximum(x, y).astype(wide), np.minimum(x, y).astype(wide)
        exact: Array = (greater - lesser).astype(np.float64)
        return exact
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Array = np.abs(x.astype(np.float64) - y.astype(np.float64))
        distance[~other | (x == y)] = 0.0
    return distance


__all__ = ["Difference", "TensorDifference", "compare"]
