"""The format's registry of dtypes (specification, section 4).

bfloat16 and the two 8-bit floats come from ml_dtypes. Bytes are swapped through
an unsigned view only: swapping a bfloat16 array in place swaps nothing
(ml_dtypes #308), and a swap through the element type could quiet a NaN.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import failure

Array = npt.NDArray[Any]

#: This machine's byte order, 'little' or 'big'.
NATIVE_ORDER: Final = sys.byteorder


class DType:
    """One row of the registry.

    ``numpy`` is the native numpy dtype of an element; a block-quantised dtype has
    uint8 there, its arrays hold the bytes of its blocks. ``unsigned`` is the
    unsigned integer of the same width.
    """

    __slots__ = (
        "block_bytes",
        "block_elements",
        "both_orders",
        "code",
        "name",
        "numpy",
        "unsigned",
    )

    def __init__(
        self,
        code: int,
        name: str,
        scalar: type[Any],
        *,
        both_orders: bool,
        block_elements: int = 1,
        block_bytes: int = 0,
    ) -> None:
        self.code = code
        self.name = name
        self.numpy: np.dtype[Any] = np.dtype(scalar)
        self.block_elements = block_elements
        self.block_bytes = block_bytes or self.numpy.itemsize
        self.both_orders = both_orders
        self.unsigned: np.dtype[Any] = np.dtype(f"u{self.numpy.itemsize}")

    def __repr__(self) -> str:
        return f"DType({self.name})"

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array that carries a tensor of ``shape`` elements.

        They differ for block-quantised dtypes only: q8_0 [4, 64] is carried as
        uint8 [4, 68], two blocks of 34 bytes a row.
        """
        if self.block_elements == 1:
            return shape
        inner = shape[-1] // self.block_elements * self.block_bytes
        return (*shape[:-1], inner)

    def logical_shape(self, storage: tuple[int, ...]) -> tuple[int, ...]:
        """Inverse of :meth:`storage_shape`. Raises ``tensor_block``."""
        if self.block_elements == 1:
            return storage
        if not storage or storage[-1] % self.block_bytes:
            raise failure(
                "tensor_block",
                field="rank" if not storage else "dims",
                expected=f"whole blocks of {self.block_bytes} bytes in the last axis",
                found=storage,
            )
        inner = storage[-1] // self.block_bytes * self.block_elements
        return (*storage[:-1], inner)


_ROWS: Final = (
    DType(1, "f64", np.float64, both_orders=True),
    DType(2, "f32", np.float32, both_orders=True),
    DType(3, "f16", np.float16, both_orders=True),
    DType(4, "bf16", ml_dtypes.bfloat16, both_orders=True),
    DType(5, "f8_e4m3fn", ml_dtypes.float8_e4m3fn, both_orders=False),
    DType(6, "f8_e5m2", ml_dtypes.float8_e5m2, both_orders=False),
    DType(16, "i8", np.int8, both_orders=False),
    DType(17, "i16", np.int16, both_orders=True),
    DType(18, "i32", np.int32, both_orders=True),
    DType(19, "i64", np.int64, both_orders=True),
    DType(24, "u8", np.uint8, both_orders=False),
    DType(25, "u16", np.uint16, both_orders=True),
    DType(26, "u32", np.uint32, both_orders=True),
    DType(27, "u64", np.uint64, both_orders=True),
    DType(32, "bool", np.bool_, both_orders=False),
    DType(64, "q8_0", np.uint8, both_orders=False, block_elements=32, block_bytes=34),
)

DTYPES: Final[dict[str, DType]] = {row.name: row for row in _ROWS}
DTYPE_BY_CODE: Final[dict[int, DType]] = {row.code: row for row in _ROWS}

_BY_TYPE: Final[dict[type[Any], DType]] = {row.numpy.type: row for row in _ROWS if row.block_elements == 1}
# C's several names for one width (long, long long) are distinct numpy types.
_BY_WIDTH: Final[dict[tuple[str, int], DType]] = {
    (row.numpy.kind, row.numpy.itemsize): row for row in _ROWS if row.numpy.kind in "iu" and row.block_elements == 1
}


def dtype_of(array: Array) -> DType:
    """The registry row of a numpy array, whatever its byte order.

    Raises ``unsupported_dtype`` for an element type that the format has no code for.
    """
    row = _BY_TYPE.get(array.dtype.type)
    if row is None:
        row = _BY_WIDTH.get((array.dtype.kind, array.dtype.itemsize))
        if row is None:
            raise failure("unsupported_dtype", found=str(array.dtype))
    return row


def order_of(array: Array) -> str:
    """'little' or 'big': how the elements of ``array`` lie in memory."""
    mark = array.dtype.byteorder
    if mark == ">":
        return "big"
    if mark == "<":
        return "little"
    return NATIVE_ORDER


def to_order(array: Array, row: DType, order: str) -> Array:
    """A C-contiguous array whose memory is the payload in byte order ``order``.

    ``array`` itself when it already is that. A swapped result is an unsigned array.
    """
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if row.numpy.itemsize == 1 or order_of(array) == order:
        return array
    flat = array.reshape(-1).view(row.unsigned)
    # The values of the view are beside the point; its bytes change places.
    swapped: Array = flat.byteswap()
    return swapped


def payload_view(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, without copying; bfloat16 too."""
    # ml_dtypes arrays export no buffer (ml_dtypes #80): go through uint8.
    return array.reshape(-1).view(np.uint8).data


def from_payload(data: memoryview | bytes, row: DType, shape: tuple[int, ...], order: str) -> Array:
    """A native, read-only array of ``shape`` elements over the payload ``data``.

    A view when byte order and alignment allow, a copy when not. ``data`` must be
    read-only and exactly as long as the payload.
    """
    if row.block_elements != 1:
        shape = row.storage_shape(shape)
    size = row.numpy.itemsize
    if size == 1 or order == NATIVE_ORDER:
        array: Array = np.ndarray(shape, row.numpy, data)
        if size == 1 or array.flags.aligned:
            return array
        # Aligned copy of bits: ndarray.copy() keeps them.
        array = np.ndarray(shape, row.unsigned, data).copy().view(row.numpy)
    else:
        swapped = np.ndarray(shape, row.unsigned, data).byteswap()
        array = swapped.view(row.numpy)
    array.flags.writeable = False
    return array
