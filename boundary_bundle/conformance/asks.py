"""From vectors to requests of the testee protocol, and from answers to verdicts.

A *case* is one vector asked in one mode: ``one``, ``core``, ``stream`` or ``encode``.
It has one or more *asks*, single requests with the answer that is expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..dtypes import DTYPES
from .testee import shown
from .vectors import ExpectedBundle, ExpectedError, Vector

MODES: Final = ("one", "core", "stream", "encode")
#: Inputs up to this size are also given byte by byte and in pieces of 61 bytes.
_PIECES_UP_TO: Final = 4096


def elements(payload: bytes, dtype: str, byte_order: str) -> str:
    """A payload as the protocol tells it: each element's bits, most significant digit first."""
    size = DTYPES[dtype].block_bytes
    if DTYPES[dtype].block_elements == 1 and size > 1 and byte_order == "little":
        payload = b"".join(payload[at : at + size][::-1] for at in range(0, len(payload), size))
    return payload.hex()


def payload_of(text: str, dtype: str, byte_order: str) -> bytes:
    """Inverse of :func:`elements`. Raises ValueError."""
    raw = bytes.fromhex(text)
    return bytes.fromhex(elements(raw, dtype, byte_order))


def attribute_value(kind: str, raw: bytes) -> str:
    """An attribute's value as the protocol tells it."""
    if kind in ("u64", "i64"):
        return str(int.from_bytes(raw, "little", signed=kind == "i64"))
    if kind == "f64":
        return raw[::-1].hex()
    return raw.decode("ascii") if kind == "text" else raw.hex()


def attribute_raw(kind: str, value: str) -> bytes:
    """Inverse of :func:`attribute_value`. Raises ValueError or OverflowError."""
    if kind in ("u64", "i64"):
        return int(value).to_bytes(8, "little", signed=kind == "i64")
    if kind == "f64":
        return bytes.fromhex(value)[::-1]
    return value.encode("ascii") if kind == "text" else bytes.fromhex(value)


def bundle_json(bundle: ExpectedBundle) -> dict[str, Any]:
    """A bundle as the protocol tells it."""
    tensors = []
    for tensor in bundle.tensors:
        row = DTYPES[tensor.dtype]
        if tensor.elements is not None and row.block_elements == 1:
            # What the vector's author wrote down, not what our own swapping makes of the payload.
            bits = "".join(f"{bits:0{2 * row.block_bytes}x}" for bits in tensor.elements)
        else:
            bits = elements(tensor.payload, tensor.dtype, tensor.byte_order)
        tensors.append(
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "byte_order": tensor.byte_order,
                "shape": [str(dim) for dim in tensor.shape],
                "token_axis": tensor.token_axis,
                "elements": bits,
            }
        )
    return {
        "number": str(bundle.number),
        "minor": bundle.minor,
        "fragment_size": str(bundle.fragment_size),
        "checksums": bundle.checksums,
        "tensors": tensors,
        "attributes": [
            {"key": item.key, "type": item.type, "value": attribute_value(item.type, item.raw)}
            for item in bundle.attributes
        ],
    }


def error_json(error: ExpectedError) -> dict[str, Any]:
    """An error as the protocol tells it."""
    told: dict[str, Any] = {"name": error.name, "number": error.number, "offset": error.offset}
    if error.tensor is not None:
        told["tensor"] = error.tensor
    if error.attribute is not None:
        told["attribute"] = error.attribute
    return told


def _contract_json(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attributes": [
            {
                "key": row["key"],
                "type": row["type"],
                "value": None if row["raw"] is None else attribute_value(row["type"], bytes.fromhex(row["raw"])),
            }
            for row in raw["attributes"]
        ],
        "tensors": raw["tensors"],
    }


@dataclass(frozen=True)
class Expected:
    """The answer that is right: bundles and error, or encoded data. ``either``: the bundles or the error."""

    bundles: tuple[dict[str, Any], ...] = ()
    error: dict[str, Any] | None = None
    either: bool = False
    #: For an encode request: the bytes in hexadecimal.
    data: str | None = None
    encode: bool = False


@dataclass
class Ask:
    """One request: its JSON without the sequence number, and what is expected."""

    case: Case
    #: What sets it apart from the other asks of its case, in words; empty for the first.
    variant: str
    body: str
    expected: Expected

    def line(self, seq: int) -> bytes:
        return f'{{"seq":{seq},{self.body}\n'.encode("ascii")


@dataclass
class Case:
    """One vector in one mode."""

    vector: Vector
    mode: str
    asks: list[Ask] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.vector.id}/{self.mode}"


def _body(request: Mapping[str, Any]) -> str:
    return json.dumps(request, separators=(",", ":"))[1:]


def _pieces(vector: Vector) -> Iterator[tuple[str, list[int]]]:
    if vector.pieces is not None:
        yield "in the vector's pieces", list(vector.pieces)
    size = len(vector.data)
    if 0 < size <= _PIECES_UP_TO:
        yield "byte by byte", [1]
        if size > 61:
            yield "in pieces of 61 bytes", [61]
        # Each frame's header and body in pieces of their own, and nothing now and then.
        if size > 64:
            yield "in pieces of 64 and 0 bytes", [64, 0]


def cases_of(vector: Vector) -> Iterator[Case]:
    """A vector's cases, one a mode."""
    common: dict[str, Any] = {}
    if vector.limits:
        common["limits"] = {name: str(value) for name, value in vector.limits.items()}
    error = None if vector.error is None else error_json(vector.error)
    if "encode" in vector.raw:
        case = Case(vector, "encode")
        body = _body({"cmd": "encode", **common, "bundle": vector.raw["encode"]})
        case.asks.append(Ask(case, "", body, Expected(error=error, encode=True)))
        yield case
        return
    bundles = tuple(map(bundle_json, vector.bundles))
    expected = Expected(bundles, error, vector.result == "acceptable")
    options = dict(common)
    if "require_checksums" in vector.flags:
        options["require_checksums"] = True
    if vector.contract is not None:
        options["contract"] = _contract_json(vector.contract)
    data = vector.data.hex()
    for mode in vector.classes:
        case = Case(vector, mode)
        asked = {"class": mode, **options, "data": data}
        case.asks.append(Ask(case, "", _body({"cmd": "decode", **asked}), expected))
        if mode != "one":
            for variant, sizes in _pieces(vector):
                body = _body({"cmd": "stream", "pieces": sizes, **asked})
                case.asks.append(Ask(case, variant, body, expected))
        yield case
    if vector.result == "valid" and vector.contract is None and bundles and vector.reencoded is not None:
        case = Case(vector, "encode")
        whole = vector.reencoded.hex()
        at = 0
        for index, bundle in enumerate(bundles):
            size = 2 * _size(vector, index) if len(bundles) > 1 else len(whole)
            variant = "" if len(bundles) == 1 else f"bundle {index}"
            body = _body({"cmd": "encode", **common, "bundle": bundle})
            case.asks.append(Ask(case, variant, body, Expected(data=whole[at : at + size], encode=True)))
            at += size
        if at != len(whole):
            raise ValueError(f"{vector.id}: what is re-encoded is not its bundles one after another")
        yield case


def _size(vector: Vector, index: int) -> int:
    """Bytes of a bundle's canonical form, counted from the text (sections 2 and 3)."""
    bundle = vector.bundles[index]
    head = 32
    total = 64
    for tensor in bundle.tensors:
        head += (8 + 8 * len(tensor.shape) + len(tensor.name) + 7) // 8 * 8
        size = len(tensor.payload)
        step = bundle.fragment_size or size
        for at in range(0, size, step or 1):
            total += 64 + (min(step, size - at) + 63) // 64 * 64
    for item in bundle.attributes:
        head += 8 + (len(item.raw) + 7) // 8 * 8
    return total + 64 + (head + 63) // 64 * 64


class Malformed(ValueError):
    """An answer is not one of the protocol."""


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 96 else f"{text[:93]}..."


def _differences(where: str, found: Any, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            raise Malformed(f"{where or 'the answer'} is no object")
        for key, value in wanted.items():
            if key not in found and value is not None:
                raise Malformed(f"{where} has no {key!r}")
            yield from _differences(f"{where}.{key}".lstrip("."), found.get(key), value)
    elif isinstance(wanted, (list, tuple)):
        if not isinstance(found, list):
            raise Malformed(f"{where} is no list")
        if len(found) != len(wanted):
            yield f"{where}: {len(found)} instead of {len(wanted)}"
        for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
            yield from _differences(f"{where}[{index}]", one, other)
    elif found != wanted or type(found) is not type(wanted):
        if isinstance(found, str) and isinstance(wanted, str):
            at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
            if len(wanted) > 96 and at is not None:
                start = max(0, at - 16) // 2 * 2
                yield (
                    f"{where}: ...{shown(found[start : start + 48].encode())}... instead of "
                    f"...{wanted[start : start + 48]}... (from digit {start})"
                )
                return
        yield f"{where}: {shown(_brief(found).encode())} instead of {_brief(wanted)}"


def tell_error(error: Mapping[str, Any]) -> str:
    """An error in a line."""
    text = f"{error.get('name')} ({error.get('number')})"
    if error.get("offset") is not None:
        text += f" at {error['offset']}"
    for key in ("tensor", "attribute"):
        if error.get(key) is not None:
            text += f", {key} {error[key]}"
    return shown(text.encode("utf-8", "replace"))


def _error_of(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    error = answer.get("error")
    if error is None:
        return None
    if not isinstance(error, dict) or not isinstance(error.get("name"), str) or type(error.get("number")) is not int:
        raise Malformed("'error' has no name and number")
    if error.get("offset") is not None and type(error["offset"]) is not int:
        raise Malformed("the error's offset is no number")
    return error


def judge(expected: Expected, answer: Mapping[str, Any], by_content: bool = False) -> list[str]:
    """What of an answer is wrong; empty when nothing is. Raises Malformed.

    ``by_content``: which error it is, and what was delivered before it, is not compared.
    """
    error = _error_of(answer)
    if expected.encode:
        return _judge_encoded(expected, answer, error, by_content)
    bundles = answer.get("bundles")
    if not isinstance(bundles, list):
        raise Malformed("'bundles' is no list")
    if error is None:
        if expected.error is not None and not expected.either:
            return [f"accepted instead of {tell_error(expected.error)}"]
        return list(_differences("bundles", bundles, expected.bundles))
    if expected.error is None:
        return [f"refused with {tell_error(error)}"]
    if by_content:
        return []
    faults = []
    wanted = expected.error
    if any(error.get(key) != value for key, value in wanted.items()):
        faults.append(f"{tell_error(error)} instead of {tell_error(wanted)}")
    if not expected.either:
        faults += _differences("bundles", bundles, expected.bundles)
    return faults


def _judge_encoded(
    expected: Expected, answer: Mapping[str, Any], error: Mapping[str, Any] | None, by_content: bool
) -> list[str]:
    if error is not None:
        if expected.error is None:
            return [f"refused with {tell_error(error)}"]
        same = error["name"] == expected.error["name"] and error["number"] == expected.error["number"]
        return [] if by_content or same else [f"{tell_error(error)} instead of {tell_error(expected.error)}"]
    data = answer.get("data")
    if not isinstance(data, str):
        raise Malformed("'data' is no text")
    if expected.error is not None:
        return [f"encoded instead of {tell_error(expected.error)}"]
    wanted = expected.data or ""
    if data == wanted:
        return []
    found = data
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    byte = at // 2
    shown_found = shown(found[2 * byte : 2 * byte + 16].encode()) or "nothing"
    return [
        f"byte {byte}: {shown_found} instead of {wanted[2 * byte : 2 * byte + 16] or 'nothing'}"
        + ("" if len(found) == len(wanted) else f"; {len(found) // 2} bytes instead of {len(wanted) // 2}")
    ]


def lacking(case: Case, hello: Mapping[str, Any]) -> str | None:
    """Why a testee is not asked a case, by its own hello; None when it is."""
    vector = case.vector
    if case.mode != "encode" and case.mode not in hello["classes"]:
        return f"class {case.mode} is not claimed"
    dtypes = {tensor.dtype for bundle in vector.bundles for tensor in bundle.tensors}
    missing = sorted(dtypes - set(hello["dtypes"]))
    if missing:
        return f"dtype {missing[0]} is not claimed"
    if "address_64" in vector.flags and hello.get("address_bits", 64) < 64:
        return "needs an address space of 64 bits"
    return None


def unclaimed(expected: Expected, answer: Mapping[str, Any], hello: Mapping[str, Any]) -> bool:
    """Whether an answer is *unsupported_dtype* for a dtype that the testee does not claim."""
    error = answer.get("error")
    return (
        isinstance(error, dict)
        and error.get("name") == "unsupported_dtype"
        and (expected.error is None or expected.error["name"] != "unsupported_dtype")
        and len(hello["dtypes"]) < len(DTYPES)
    )


def check_hello(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A hello's answer, held against the protocol. Raises Malformed."""
    for key in ("name", "language", "version"):
        if not isinstance(answer.get(key), str):
            raise Malformed(f"hello: {key!r} is no text")
    if answer.get("protocol") != 1:
        raise Malformed(f"hello: protocol is {_brief(answer.get('protocol'))}, not 1")
    for key, known in (("classes", ("one", "core", "stream")), ("dtypes", tuple(DTYPES))):
        value = answer.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) and entry in known for entry in value):
            raise Malformed(f"hello: {key!r} is no list of {', '.join(known[:3])}, ...")
    if type(answer.get("address_bits", 64)) is not int:
        raise Malformed("hello: 'address_bits' is no number")
    if answer.get("judged") not in (None, "content"):
        raise Malformed("hello: 'judged' is not \"content\"")
    return dict(answer)


def select(cases: Sequence[Case], only: Sequence[str], classes: str | None) -> list[Case]:
    """The cases that ``--only`` and ``--class`` leave.

    ``only``: patterns with ``*`` and ``?`` for a vector, a case, a file or a section; a
    section stands for its subsections and steps too.
    """
    from fnmatch import fnmatchcase

    modes = {None: MODES, "core": ("one", "core", "encode"), "stream": ("stream", "encode")}[classes]
    kept = []
    for case in cases:
        if case.mode not in modes:
            continue
        section, _, step = case.vector.section.partition(":")
        parts = section.split(".")
        names = [case.id, case.vector.id, case.vector.file, case.mode, case.vector.section, step]
        names += [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if not only or any(fnmatchcase(name, pattern) for pattern in only for name in names):
            kept.append(case)
    return kept
