"""What a decoder makes of its input, as text that two codecs can be compared by.

A transcript has one line an event, an attribute, a tensor or an error; elements stand
as the hexadecimal digits of their bits, the most significant first, so that the text
is the same on every machine:

    bundle NUMBER MINOR FRAGMENT_SIZE CHECKSUMS
    attribute KEY TYPE BYTES
    tensor NAME DTYPE ORDER TOKEN_AXIS DIMS ELEMENTS
    head NUMBER PAYLOAD_BYTES FRAGMENTS
    fragment NUMBER TENSOR OFFSET BYTES
    extension NUMBER TYPE BYTES
    error NUMBER OFFSET          contract errors: error NUMBER - NAME

``-`` is none or nothing. A value of more than 4096 bytes stands as the checksum of its
digits. native_shim/tests/transcript.h writes the same of the C codec.

``python -m boundary_bundle.conformance.transcript`` prints the vectors of spec/vectors
in lines for native_shim/tests/run_vectors.c, a program for machines without Python:
for each vector who is asked, under which limits and contract, the input, and the
transcript that is expected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TextIO

import numpy as np
from crc32c import crc32c

from ..bundle import ATTRIBUTE_TYPES, ATTRIBUTES, Bundle
from ..decoder import BundleReady, Extension, Fragment, Head
from ..dtypes import DTYPES
from ..errors import BundleError
from .vectors import ExpectedBundle, ExpectedError, Vector, expand, load

_LONG: Final = 4096
_ATTRIBUTE_NAMES: Final = {row[0]: name for name, row in ATTRIBUTES.items()}


def digits(data: bytes, size: int = 1, order: str = "little") -> str:
    """The digits of elements of ``size`` bytes; blocks of more than 8 bytes are bytes."""
    if order == "little" and 1 < size <= 8:
        data = np.frombuffer(data, np.uint8).reshape(-1, size)[:, ::-1].tobytes()
    return _shorten(data.hex())


def _shorten(text: str) -> str:
    if len(text) > 2 * _LONG:
        return f"crc32c:{crc32c(text.encode('ascii')):08x}"
    return text or "-"


def _tensor(name: str, dtype: str, order: str, axis: int | None, shape: Iterable[int], elements: str) -> str:
    dims = ",".join(map(str, shape)) or "-"
    return f"tensor {name} {dtype} {order} {'-' if axis is None else axis} {dims} {elements}"


def of_bundle(bundle: Bundle) -> Iterator[str]:
    """The lines of a decoded bundle."""
    yield f"bundle {bundle.number} {bundle.minor} {bundle.fragment_size} {int(bundle.checksums)}"
    for record in bundle.attributes.records():
        yield f"attribute {record.key} {record.type} {digits(record.raw)}"
    for t in bundle.tensors:
        elements = digits(bytes(t.payload()), t.row.block_bytes, t.byte_order)
        yield _tensor(t.name, t.dtype, t.byte_order, t.token_axis, t.shape, elements)


def of_expected(bundle: ExpectedBundle) -> Iterator[str]:
    """The lines of a bundle as a vector states it."""
    yield f"bundle {bundle.number} {bundle.minor} {bundle.fragment_size} {int(bundle.checksums)}"
    for a in bundle.attributes:
        yield f"attribute {a.key} {ATTRIBUTE_TYPES[a.type]} {digits(a.raw)}"
    for t in bundle.tensors:
        size = DTYPES[t.dtype].block_bytes
        if t.elements is None or size > 8:
            elements = digits(t.payload, size, t.byte_order)
        else:
            elements = _shorten("".join(f"{bits:0{2 * size}x}" for bits in t.elements))
        yield _tensor(t.name, t.dtype, t.byte_order, t.token_axis, t.shape, elements)


def of_events(events: Sequence[Any]) -> Iterator[str]:
    """The lines of a decoder's events."""
    for event in events:
        if isinstance(event, Head):
            yield f"head {event.number} {event.payload_bytes} {event.fragments}"
        elif isinstance(event, Fragment):
            place = f"{event.number} {event.index} {event.payload_offset}"
            yield f"fragment {place} {digits(bytes(event.data))}"
        elif isinstance(event, Extension):
            yield f"extension {event.number} {event.type} {digits(event.body)}"
        elif isinstance(event, BundleReady):
            yield from of_bundle(event.bundle)
        else:
            raise TypeError(f"{event!r} is no event")


def of_error(error: BundleError) -> str:
    """The line of an error."""
    if error.offset is not None:
        return f"error {error.number} {error.offset}"
    return _contract_error(error.number, error.tensor or error.field or "")


def _contract_error(number: int, name: str) -> str:
    # An attribute without a registered name is named by its key.
    return f"error {number} - {int(name, 16) if name.startswith('0x') else name}"


def _expected_error(error: ExpectedError) -> str:
    if error.offset is not None:
        return f"error {error.number} {error.offset}"
    if error.attribute is not None:
        return _contract_error(error.number, _ATTRIBUTE_NAMES.get(error.attribute, hex(error.attribute)))
    return _contract_error(error.number, error.tensor or "")


def _data(word: str, recipe: Any, times: int = 1) -> Iterator[str]:
    """Lines of a recipe: how often, and the bytes."""
    if isinstance(recipe, list):
        for _ in range(times):
            for part in recipe:
                yield from _data(word, part)
    elif isinstance(recipe, dict):
        yield from _data(word, recipe["repeat"], times * int(recipe["count"]))
    elif recipe:
        yield f"{word} {times} {recipe}"


def _contract(contract: dict[str, Any]) -> Iterator[str]:
    yield "contract"
    for a in sorted(contract["attributes"], key=lambda attribute: attribute["key"]):
        value = "*" if a["raw"] is None else expand(a["raw"]).hex() or "-"
        yield f"contract-attribute {a['key']} {ATTRIBUTE_TYPES[a['type']]} {value}"
    symbols = ["tokens"]
    for t in contract["tensors"]:
        sums = []
        for dimension in t["shape"]:
            number = bits = 0
            for term in dimension.split("+"):
                if term.isdecimal():
                    number += int(term)
                    continue
                if term not in symbols:
                    symbols.append(term)
                bits |= 1 << symbols.index(term)
            sums.append(f"{bits}+{number}")
        axis = "-" if t["token_axis"] is None else t["token_axis"]
        yield f"contract-tensor {t['name']} {DTYPES[t['dtype']].code} {axis} {','.join(sums) or '-'}"


def _vector(vector: Vector) -> Iterator[str]:
    yield f"vector {vector.file}/{vector.id}"
    yield f"section {vector.section}"
    yield f"class {' '.join(vector.classes)}"
    yield from sorted(vector.flags & {"address_64", "require_checksums"})
    for name, value in vector.limits.items():
        yield f"limit {name} {value}"
    if vector.contract is not None:
        yield from _contract(vector.contract)
    yield from _data("input", vector.raw["input"])
    if vector.pieces is not None:
        yield f"pieces {' '.join(map(str, vector.pieces))}"
    for bundle in vector.bundles:
        for line in of_expected(bundle):
            yield f"expect {line}"
    if vector.error is not None:
        yield f"{'or' if vector.result == 'acceptable' else 'expect'} {_expected_error(vector.error)}"
    if "reencoded" in vector.raw:
        same = vector.raw["reencoded"] == "same"
        yield from _data("encoded", vector.raw["input" if same else "reencoded"])
    yield "end"


def export(out: TextIO) -> None:
    """Write every vector for run_vectors.c."""
    for vector in load():
        for line in _vector(vector):
            print(line, file=out)


if __name__ == "__main__":
    export(sys.stdout)
