"""Logical bundles that no encoder may write (section 8: with the names that a decoder gives).

The files of vectors hold inputs of decoders; these are the inputs of encoders that are
to be refused. Only name and number of the error count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import ERRORS
from .vectors import Vector


def _tensor(name: str = "x", dtype: str = "f32", shape: tuple[int, ...] = (2,), **other: Any) -> dict[str, Any]:
    sizes = {"f32": 8, "u8": 2, "bool": 2, "q8_0": 68}
    count = 1
    for dim in shape:
        count *= dim
    tensor = {
        "name": name,
        "dtype": dtype,
        "byte_order": "little",
        "shape": [str(dim) for dim in shape],
        "token_axis": None,  # nosec B105: tokens of text
        "elements": "00" * (count // 32 * 34) if dtype == "q8_0" else "0" * (sizes[dtype] * count),
    }
    return {**tensor, **other}


def _number(key: int, value: int, kind: str = "u64") -> dict[str, Any]:
    return {"key": key, "type": kind, "value": str(value)}


def _rows() -> Iterator[tuple[str, str, str, str, dict[str, Any], dict[str, int]]]:
    """(id, section, error, comment, what the bundle has, limits)."""

    def row(
        slug: str, step: str, error: str, comment: str, *tensors: Any, limits: dict[str, int] | None = None, **has: Any
    ) -> tuple[str, str, str, str, dict[str, Any], dict[str, int]]:
        return f"8-encode-{slug}", f"6:{step}", error, comment, {"tensors": list(tensors), **has}, limits or {}

    axis: dict[str, Any] = {"token_axis": 0}  # nosec B105: tokens of text
    yield row("duplicate", "D29", "tensor_duplicate", "two tensors of one name", _tensor(), _tensor())
    yield row("no-name", "D13", "tensor_name", "an empty name", _tensor(""))
    yield row("name", "D27", "tensor_name", "a space in a name", _tensor("a b"))
    yield row("long-name", "D12", "limit_name", "a name of 64 bytes", _tensor("n" * 64))
    yield row("rank", "D11", "limit_rank", "rank 9", _tensor(shape=(1,) * 9))
    yield row("low-rank", "D11", "limit_rank", "rank over a limit", _tensor(shape=(1,) * 5), limits={"rank": 4})
    yield row("order", "D16", "tensor_byte_order", "big-endian bytes", _tensor(dtype="u8", byte_order="big"))
    yield row("axis", "D17", "tensor_token_axis", "a token axis beyond the rank", _tensor(token_axis=1))
    quantised = _tensor("q", "q8_0", (2, 32), token_axis=1)
    yield row("inner-axis", "D22", "tensor_token_axis", "the innermost axis of blocks as token axis", quantised)
    yield row("grid", "D7", "fragment_size", "no multiple of 64", _tensor(), fragment_size="63")
    blocks = _tensor("q", "q8_0", (1, 32))
    yield row("blocks", "D25", "fragment_size", "fragments that cut blocks", blocks, fragment_size="64")
    yield row("dimension", "D19", "limit_dimension", "dimension over a limit", _tensor(), limits={"dimension": 1})
    yield row("payload", "D23", "limit_payload_bytes", "payload over a limit", _tensor(), limits={"payload_bytes": 7})
    both = (_tensor("a"), _tensor("b"))
    yield row("sum", "D24", "limit_payload_bytes", "payloads over a limit", *both, limits={"payload_bytes": 15})
    yield row("fragments", "D26", "limit_fragments", "fragments over a limit", *both, limits={"fragments": 1})
    yield row("tensors", "D4", "limit_tensors", "tensors over a limit", *both, limits={"tensors": 1})
    yield row("head", "B10", "limit_head_bytes", "head over a limit", *both, limits={"head_bytes": 72})
    yield row("bool", "C4", "bool_value", "a bool of 2", _tensor("b", "bool", elements="0102"))
    uneven = (_tensor("a", **axis), _tensor("b", shape=(3,), **axis))
    yield row("tokens", "D30", "token_count", "token axes that differ", *uneven)
    few = [_number(0x8006, 3)]
    yield row("n-tokens", "D61", "token_count", "n_tokens against the axes", _tensor(**axis), attributes=few)
    yield row("key", "D52", "attribute_key", "key 0x4000", attributes=[_number(0x4000, 1)])
    yield row("critical", "D56", "unsupported_attribute", "unknown and critical", attributes=[_number(0x8100, 1)])
    signed = [_number(0x8005, 1, "i64")]
    yield row("type", "D57", "attribute_type", "n_layer as i64", attributes=signed)
    short = [{"key": 0x8001, "type": "bytes", "value": "00" * 31}]
    yield row("length", "D58", "attribute_length", "a fingerprint of 31 bytes", attributes=short)
    text = [{"key": 0x0002, "type": "text", "value": "a\tb"}]
    yield row("text", "D59", "attribute_value", "a tab in a text", attributes=text)
    over = {"attribute_bytes": 8}
    one = [_number(0x8005, 1)]
    yield row("attributes", "D5", "limit_attribute_bytes", "over a limit", attributes=one, limits=over)


def refusals() -> Iterator[Vector]:
    """As vectors of a file of their own; their ``encode`` is the bundle of the request."""
    for slug, section, error, comment, has, limits in _rows():
        raw: dict[str, Any] = {
            "id": slug,
            "comment": f"an encoder is given {comment}",
            "section": section,
            "class": "both",
            "flags": [],
            "input": "",
            "result": "invalid",
            "error": {"name": error, "number": ERRORS[error][0], "offset": None},
            "encode": {
                "number": "1",
                "minor": 0,
                "fragment_size": "0",
                "checksums": True,
                "tensors": [],
                "attributes": [],
                **has,
            },
        }
        if limits:
            raw["limits"] = {name: str(value) for name, value in limits.items()}
        yield Vector("encoder", raw)
