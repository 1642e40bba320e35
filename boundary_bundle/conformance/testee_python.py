"""The testee of this package's codec: ``python -m boundary_bundle.conformance.testee_python``.

Speaks spec/testee-protocol.md on standard input and output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

import numpy as np

from .. import __version__, contract, decoder, encoder
from ..bundle import ATTRIBUTE_TYPES, ATTRIBUTES, REGISTERED_KEYS, Attribute, Attributes, Bundle, Limits, Tensor
from ..contract import ANY, AnyValue, TensorRule
from ..dtypes import DTYPES
from ..errors import BundleError, failure
from .asks import attribute_raw, attribute_value

_KEYS: Final = {name: row[0] for name, row in ATTRIBUTES.items()}


def elements_of(tensor: Tensor) -> str:
    """The bits of a decoded array, most significant digit first."""
    array = tensor.array.reshape(-1).view(tensor.row.unsigned)
    bits: np.ndarray[Any, Any] = array.astype(tensor.row.unsigned.newbyteorder(">"))
    return bits.tobytes().hex()


def tell_bundle(bundle: Bundle) -> dict[str, Any]:
    """A bundle as the protocol tells it."""
    return {
        "number": str(bundle.number),
        "minor": bundle.minor,
        "fragment_size": str(bundle.fragment_size),
        "checksums": bundle.checksums,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "byte_order": tensor.byte_order,
                "shape": [str(dim) for dim in tensor.shape],
                "token_axis": tensor.token_axis,
                "elements": elements_of(tensor),
            }
            for tensor in bundle.tensors
        ],
        "attributes": [tell_attribute(record) for record in bundle.attributes.records()],
    }


def tell_attribute(record: Attribute) -> dict[str, Any]:
    kind = record.type_name
    return {"key": record.key, "type": kind, "value": attribute_value(kind, record.raw)}


def tell_error(error: BundleError) -> dict[str, Any]:
    """An error as the protocol tells it."""
    told: dict[str, Any] = {"name": error.name, "number": error.number, "offset": error.offset}
    if error.offset is None:
        field = error.field or ""
        if error.name == "contract_attribute":
            told["attribute"] = _KEYS[field] if field in _KEYS else int(field, 16)
        elif error.tensor is not None:
            told["tensor"] = error.tensor
    return told


def read_tensor(told: dict[str, Any]) -> Tensor:
    """A tensor of a request. Raises BundleError."""
    row = DTYPES.get(told["dtype"])
    if row is None:
        raise failure("unsupported_dtype", tensor=told["name"], found=told["dtype"])
    raw = np.frombuffer(bytes.fromhex(told["elements"]), row.unsigned.newbyteorder(">"))
    array = raw.astype(row.unsigned).view(row.numpy)
    shape = row.storage_shape(tuple(map(int, told["shape"])))
    return Tensor(
        told["name"],
        array.reshape(shape),
        dtype=row.name,
        token_axis=told["token_axis"],
        byte_order=told["byte_order"],
    )


def read_attribute(told: dict[str, Any]) -> Attribute:
    kind = told["type"]
    return Attribute(told["key"], ATTRIBUTE_TYPES[kind], attribute_raw(kind, told["value"]))


def read_bundle(told: dict[str, Any]) -> Bundle:
    """A bundle of a request. Raises BundleError."""
    return Bundle(
        map(read_tensor, told["tensors"]),
        Attributes(map(read_attribute, told["attributes"])),
        number=int(told["number"]),
        minor=told["minor"],
        fragment_size=int(told["fragment_size"]),
        checksums=told["checksums"],
    )


def read_contract(told: dict[str, Any] | None) -> contract.Contract | None:
    """A contract of a request."""
    if told is None:
        return None
    attributes: dict[Any, Any] = {}
    for row in told["attributes"]:
        if row["value"] is None:
            attributes[row["key"]] = ANY if row["key"] in REGISTERED_KEYS else AnyValue(row["type"])
        else:
            attributes[row["key"]] = read_attribute(row).value
    rules = [TensorRule(row["name"], row["dtype"], row["shape"], row["token_axis"]) for row in told["tensors"]]
    return contract.Contract(rules, attributes)


def read_limits(request: dict[str, Any]) -> Limits:
    return Limits(**{name: int(value) for name, value in request.get("limits", {}).items()})


def cut(data: bytes, sizes: Sequence[int] | None) -> Iterator[bytes]:
    """``data`` in pieces of ``sizes``, over and over; whole without them."""
    if sizes is None or not data:
        yield data
        return
    if not any(sizes):
        raise ValueError("pieces of no bytes at all")
    at = 0
    while True:
        for size in sizes:
            yield data[at : at + size]
            at += size
            if at >= len(data):
                return


class PythonTestee:
    """Answers requests; a method each."""

    name = "boundary_bundle"

    def hello(self, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "protocol": 1,
            "name": self.name,
            "language": "Python",
            "version": __version__,
            "classes": ["one", "core", "stream"],
            "dtypes": list(DTYPES),
        }

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        data = bytes.fromhex(request["data"])
        options = {
            "limits": read_limits(request),
            "require_checksums": request.get("require_checksums", False),
            "contract": read_contract(request.get("contract")),
        }
        found: list[dict[str, Any]] = []
        try:
            if request["class"] == "one":
                return {"bundles": [tell_bundle(decoder.decode(data, **options))]}
            taking = decoder.Decoder(request["class"], **options)
            for piece in cut(data, request.get("pieces")):
                found += self._ready(taking.feed(piece))
            taking.finish()
        except BundleError as error:
            found += self._ready(error.events)
            return {"bundles": found, "error": tell_error(error)}
        return {"bundles": found}

    stream = decode

    @staticmethod
    def _ready(events: Sequence[Any]) -> list[dict[str, Any]]:
        return [tell_bundle(event.bundle) for event in events if isinstance(event, decoder.BundleReady)]

    def encode(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"data": encoder.encode(read_bundle(request["bundle"]), limits=read_limits(request)).hex()}
        except BundleError as error:
            return {"error": tell_error(error)}

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; a fault of the testee itself is told, not raised."""
        try:
            command = {
                "hello": self.hello,
                "decode": self.decode,
                "stream": self.stream,
                "encode": self.encode,
                "stop": self.stop,
            }.get(request["cmd"])
            told = {"skipped": f"no command {request['cmd']!r}"} if command is None else command(request)
        except Exception as error:
            told = {"failed": f"{type(error).__name__}: {error}"}
        return {"seq": request.get("seq"), **told}


def serve(testee: PythonTestee, source: TextIO = sys.stdin, target: TextIO = sys.stdout) -> None:
    """Answer every line of ``source`` on ``target``."""
    for line in source:
        request = json.loads(line)
        target.write(json.dumps(testee.answer(request), separators=(",", ":")) + "\n")
        target.flush()
        if request.get("cmd") == "stop":
            return


if __name__ == "__main__":
    serve(PythonTestee())
