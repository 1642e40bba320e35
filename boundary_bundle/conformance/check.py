"""Runs a vector against this package's codec and says what differs from its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import (
    Attribute,
    Bundle,
    BundleError,
    Limits,
    bits_equal,
    decode,
    encode,
)
from .. import contract as contract_module
from .. import decoder as decoder_module
from ..bundle import ATTRIBUTE_TYPES, ATTRIBUTES, REGISTERED_KEYS
from .vectors import ExpectedBundle, Vector

#: What a way of decoding gives: the bundles that it delivered, and the error that ended it.
Outcome = tuple[list[Bundle], BundleError | None]


def contract_of(vector: Vector, module: Any = contract_module) -> Any:
    """The vector's contract as a Contract of ``module``, or None."""
    raw = vector.contract
    if raw is None:
        return None
    rules = [module.TensorRule(row["name"], row["dtype"], row["shape"], row["token_axis"]) for row in raw["tensors"]]
    attributes: dict[Any, Any] = {}
    for row in raw["attributes"]:
        key = row["key"]
        if row["raw"] is None:
            attributes[key] = module.ANY if key in REGISTERED_KEYS else module.AnyValue(row["type"])
        else:
            attributes[key] = Attribute(key, ATTRIBUTE_TYPES[row["type"]], bytes.fromhex(row["raw"])).value
    return module.Contract(rules, attributes)


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """``data`` in pieces."""
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size


def run(
    vector: Vector,
    way: str,
    sizes: Sequence[int] | None = None,
    module: Any = decoder_module,
    contracts: Any = contract_module,
) -> Outcome:
    """Decode a vector's input as 'one', 'core' or 'stream'.

    ``sizes`` are those of the pieces, whole when absent. ``module`` holds ``decode``
    and ``Decoder``; ``contracts`` is the module of the contract. An exception that is no BundleError is
    the caller's.
    """
    options = {
        "limits": Limits(**vector.limits),
        "require_checksums": "require_checksums" in vector.flags,
        "contract": contract_of(vector, contracts),
    }
    data = vector.data
    bundles: list[Bundle] = []
    if way == "one":
        try:
            return [module.decode(data, **options)], None
        except BundleError as error:
            return [], error
    decoder = module.Decoder(way, **options)

    def keep(events: Sequence[Any]) -> None:
        bundles.extend(event.bundle for event in events if isinstance(event, module.BundleReady))

    try:
        for piece in cut(data, (len(data),) if sizes is None else sizes):
            keep(decoder.feed(piece))
        decoder.finish()
    except BundleError as error:
        keep(error.events)
        if decoder.open_bundles:
            raise AssertionError("a failed decoder keeps open bundles") from error
        return bundles, error
    return bundles, None


def _differences(found: Bundle, expected: ExpectedBundle) -> Iterator[str]:
    for field in ("number", "minor", "fragment_size", "checksums"):
        if getattr(found, field) != getattr(expected, field):
            yield f"{field} is {getattr(found, field)!r}, not {getattr(expected, field)!r}"
    if found.names != [tensor.name for tensor in expected.tensors]:
        yield f"tensors are {found.names}, not {[tensor.name for tensor in expected.tensors]}"
        return
    for tensor, wanted in zip(found.tensors, expected.tensors, strict=True):
        for field in ("dtype", "byte_order", "shape", "token_axis"):
            if getattr(tensor, field) != getattr(wanted, field):
                yield f"{wanted.name}: {field} is {getattr(tensor, field)!r}, not {getattr(wanted, field)!r}"
        if tensor.payload() != wanted.payload:
            yield f"{wanted.name}: other payload"
        array = tensor.array
        if not array.dtype.isnative or array.flags.writeable:
            yield f"{wanted.name}: the array is not native and read-only"
        if wanted.elements is not None:
            bits = array.reshape(-1).view(tensor.row.unsigned).tolist()
            if tuple(bits) != wanted.elements:
                yield f"{wanted.name}: elements have the bits {bits}, not {list(wanted.elements)}"
    told = [(record.key, record.type_name, record.raw) for record in found.attributes.records()]
    if told != [(item.key, item.type, item.raw) for item in expected.attributes]:
        yield f"attributes are {told}"


def verdict(vector: Vector, outcome: Outcome) -> list[str]:
    """What of an outcome is not as the vector says; empty when all is."""
    bundles, error = outcome
    faults: list[str] = []
    expected = vector.error
    if error is None:
        if vector.result == "invalid":
            assert expected is not None
            return [f"accepted, although it should fail with {expected.name}"]
    else:
        if expected is None:
            return [f"refused: {error}"]
        found = (error.name, error.number, error.offset)
        if found != (expected.name, expected.number, expected.offset):
            faults.append(f"{found} instead of {(expected.name, expected.number, expected.offset)}")
        if expected.tensor is not None and error.tensor != expected.tensor:
            faults.append(f"names tensor {error.tensor!r}, not {expected.tensor!r}")
        if expected.attribute is not None:
            names = [f"{expected.attribute:#06x}"]
            names += [name for name, row in ATTRIBUTES.items() if row[0] == expected.attribute]
            if error.field not in names:
                faults.append(f"names attribute {error.field}, not {names[-1]}")
        if vector.result == "acceptable":
            return faults
    if len(bundles) != len(vector.bundles):
        faults.append(f"{len(bundles)} bundles, not {len(vector.bundles)}")
    for index, (one, wanted) in enumerate(zip(bundles, vector.bundles, strict=False)):
        faults += [f"bundle {index}: {fault}" for fault in _differences(one, wanted)]
    return faults


def reencoding(vector: Vector, bundles: Sequence[Bundle]) -> list[str]:
    """What is wrong with the encoding of the delivered bundles, one after another."""
    limits = Limits(**vector.limits)
    encoded = b"".join(encode(bundle, limits=limits) for bundle in bundles)
    if encoded != vector.reencoded:
        return ["re-encoding gives other bytes"]
    for bundle in bundles:
        again = decode(encode(bundle, limits=limits), limits=limits)
        if not bits_equal(again, bundle):
            return ["re-encoding gives another bundle"]
    return []


def faults_of(
    vector: Vector, module: Any = decoder_module, quick: bool = False, run: Callable[..., Outcome] = run
) -> list[str]:
    """Every fault of this codec at a vector, in each way and piece size; empty when there is none.

    ``quick`` leaves the piece sizes out that the vector does not ask for.
    """
    faults: list[str] = []
    size = len(vector.data)
    for way in vector.classes:
        cuts: list[Sequence[int] | None] = [None]
        if way != "one":
            if vector.pieces is not None:
                cuts.append(vector.pieces)
            if not quick and size <= 4096:
                cuts += [[1] * size, [*([61] * (size // 61)), size % 61]]
        for sizes in cuts:
            outcome = run(vector, way, sizes, module)
            told = verdict(vector, outcome)
            if not told and sizes is None and outcome[1] is None and not quick:
                told = reencoding(vector, outcome[0])
            faults += [f"{vector.id}: {way}{'' if sizes is None else ' in pieces'}: {fault}" for fault in told]
    return faults
