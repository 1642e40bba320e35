"""Every dtype in both byte orders, with the bit patterns that get lost."""

from __future__ import annotations

from ..book import Book
from ..builder import DTYPES, B, T

TITLE = "dtypes and their bits (specification, 4)"

#: name -> (bytes, exponent bits, mantissa bits, whether it has infinities)
FLOATS = {
    "f64": (8, 11, 52, True),
    "f32": (4, 8, 23, True),
    "f16": (2, 5, 10, True),
    "bf16": (2, 8, 7, True),
    "f8_e5m2": (1, 5, 2, True),
    "f8_e4m3fn": (1, 4, 3, False),
}
INTEGERS = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8}


def _floats(name: str) -> dict[str, list[int]]:
    size, exponent, mantissa, infinite = FLOATS[name]
    sign = 1 << (8 * size - 1)
    top = (1 << exponent) - 1
    ones = (1 << mantissa) - 1
    bias = top >> 1
    if infinite:
        infinity = top << mantissa
        quiet = infinity | 1 << (mantissa - 1)
        special = {
            "infinities": [infinity, infinity | sign],
            "nan": [
                quiet,
                quiet | sign,
                quiet | 1,
                infinity | 1,
                infinity | 1 | sign,
                infinity | ones,
                infinity | ones >> 1,
            ],
        }
        largest = infinity - 1
    else:
        special = {"nan": [sign - 1, 2 * sign - 1]}
        largest = sign - 2
    return {
        "zeros": [0, sign],
        "subnormals": [1, ones, 1 | sign, ones | sign],
        "normals": [1 << mantissa, bias << mantissa, bias << mantissa | sign, largest, largest | sign],
        **special,
    }


def _tensor(label: str, dtype: str, size: int, bits: list[int], order: str) -> T:
    payload = b"".join(value.to_bytes(size, "little" if order == "little" else "big") for value in bits)
    return T(
        label, dtype, (len(bits),), payload, order=order, elements=tuple(f"{value:0{2 * size}x}" for value in bits)
    )


def make(book: Book) -> None:
    good = book.good
    for name in FLOATS:
        size = FLOATS[name][0]
        for order in ("little", "big") if size > 1 else ("little",):
            tensors = tuple(_tensor(label, name, size, bits, order) for label, bits in _floats(name).items())
            good(
                "4",
                f"{name}-{order}",
                f"{name}, {order}-endian: zeros, subnormals, normals, infinities and NaNs keep their bits.",
                B(tensors),
            )
    for name, size in INTEGERS.items():
        top = 1 << (8 * size - 1)
        bits = [0, 1, top - 1, top, 2 * top - 1, int.from_bytes(bytes(range(1, size + 1)), "big")]
        for order in ("little", "big") if size > 1 else ("little",):
            good(
                "4",
                f"{name}-{order}",
                f"{name}, {order}-endian: least, largest and every byte in its place.",
                B((_tensor("x", name, size, bits, order),)),
            )
    good("4", "bool", "bool: 0 and 1.", B((_tensor("x", "bool", 1, [0, 1, 1, 0], "little"),)))
    blocks = b"".join(
        scale.to_bytes(2, "little") + bytes((start + i) & 255 for i in range(32))
        for start, scale in enumerate((0x3C00, 0x8000, 0x0001, 0x7C00, 0x7C01, 0xFE55))
    )
    good(
        "4",
        "q8_0",
        "q8_0: shape in elements, blocks as they are, whatever their scales: one, -0, subnormal, infinity, NaNs.",
        B((T("x", "q8_0", (3, 64), blocks),)),
    )
    good(
        "4",
        "q8_0-ranks",
        "q8_0 of rank 1 and 8, and with token axes before the innermost.",
        B((T("a", "q8_0", (32,)), T("b", "q8_0", (1, 2, 1, 1, 3, 1, 1, 32), axis=1), T("c", "q8_0", (2, 96), axis=0))),
    )
    good(
        "4",
        "q8_0-empty",
        "q8_0 with a dimension of 0: outside, inside.",
        B((T("a", "q8_0", (0, 32)), T("b", "q8_0", (2, 0)), T("c", "q8_0", (0,)))),
    )
    good(
        "4",
        "mixed-orders",
        "Byte order is a tensor's own.",
        B((T("a", "f32", (2,), order="big"), T("b", "f32", (2,)), T("c", "u16", (2,), order="big"))),
    )
    for dtype, row in DTYPES.items():
        order = "big" if row[3] else "little"
        shape = (2, 544) if row[1] == 32 else (1, 1100)
        good(
            "4",
            f"{dtype}-fragments",
            f"{dtype} in fragments, {order}-endian: elements do not straddle fragments, rows do.",
            B((T("x", dtype, shape, order=order),), fragment_size=1088),
        )
        good(
            "4",
            f"{dtype}-scalar" if row[1] == 1 else f"{dtype}-one-block",
            f"One {'element' if row[1] == 1 else 'block'} of {dtype}.",
            B((T("x", dtype, () if row[1] == 1 else (32,), order=order),)),
        )
    good(
        "4",
        "unaligned-views",
        "Elements of 8 bytes after a payload of 1: every payload begins on 64 bytes.",
        B((T("a", "u8", (1,)), T("b", "f64", (2,)), T("c", "u8", (3,)), T("d", "i64", (1,)))),
    )
