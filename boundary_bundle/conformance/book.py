"""Where a file's vectors are written down, with the verdicts their author states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .builder import B, T
from .vectors import shrink

_STEP = re.compile(r"[A-D]\d+")
_ERROR = re.compile(r"[a-z_]+")


def _section(where: str) -> str:
    """'D23' and 'truncated' are places in section 6; anything else is a section."""
    return f"6:{where}" if _STEP.fullmatch(where) or _ERROR.fullmatch(where) else where


def _tensor(tensor: T) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "byte_order": tensor.order,
        "shape": [str(dim) for dim in tensor.shape],
        "token_axis": tensor.axis,
        "payload": shrink(tensor.data),
    }
    if tensor.elements is not None:
        told["elements"] = list(tensor.elements)
    return told


def content(bundle: B) -> dict[str, Any]:
    """The decoded content of a logical bundle, as JSON holds it."""
    attributes = []
    for item in bundle.attributes:
        told: dict[str, Any] = {"key": item.key, "type": item.type, "raw": shrink(item.raw)}
        if item.type in ("u64", "i64"):
            told["value"] = str(int.from_bytes(item.raw, "little", signed=item.type == "i64"))
        elif item.type == "text" and len(item.raw) < 100:
            told["value"] = item.raw.decode("ascii")
        attributes.append(told)
    return {
        "number": str(bundle.number),
        "minor": bundle.minor,
        "fragment_size": str(bundle.fragment_size),
        "checksums": bundle.checksums,
        "tensors": [_tensor(tensor) for tensor in bundle.tensors],
        "attributes": attributes,
    }


class Book:
    """The vectors of one file."""

    def __init__(self, title: str, numbers: Mapping[str, int]) -> None:
        self.title = title
        self.vectors: list[dict[str, Any]] = []
        self._numbers = numbers

    def _add(
        self,
        where: str,
        slug: str,
        comment: str,
        data: bytes,
        result: str,
        bundles: Sequence[B],
        error: tuple[str, int | None] | None,
        cls: str,
        flags: Sequence[str],
        limits: Mapping[str, int] | None,
        pieces: Sequence[int] | None,
        contract: Mapping[str, Any] | None,
        names: Mapping[str, Any],
    ) -> None:
        vector: dict[str, Any] = {
            "id": f"{where}-{slug}",
            "comment": comment,
            "section": _section(where),
            "class": cls,
            "flags": sorted(flags),
        }
        if limits:
            vector["limits"] = {name: str(value) for name, value in limits.items()}
        if contract is not None:
            vector["contract"] = dict(contract)
        vector["input"] = shrink(data)
        if pieces is not None:
            if sum(pieces) != len(data):
                raise ValueError(f"{vector['id']}: pieces hold {sum(pieces)} of {len(data)} bytes")
            vector["pieces"] = list(pieces)
        vector["result"] = result
        if error is not None:
            name, offset = error
            vector["error"] = {"name": name, "number": self._numbers[name], "offset": offset, **names}
        if bundles or result != "invalid":
            vector["bundles"] = [content(bundle) for bundle in bundles]
        if result != "invalid":
            canonical = b"".join(bundle.encode() for bundle in bundles)
            vector["reencoded"] = "same" if canonical == data else shrink(canonical)
        self.vectors.append(vector)

    def good(
        self,
        where: str,
        slug: str,
        comment: str,
        *bundles: B,
        data: bytes | None = None,
        cls: str = "both",
        flags: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        pieces: Sequence[int] | None = None,
        contract: Mapping[str, Any] | None = None,
        else_error: tuple[str, int] | None = None,
    ) -> None:
        """An input that must be accepted, and is the bundles' canonical form unless ``data`` says.

        With ``else_error`` a consumer may also answer that error.
        """
        if data is None:
            data = b"".join(bundle.encode() for bundle in bundles)
        if len(bundles) != 1:
            flags = (*flags, "many")
        result = "valid" if else_error is None else "acceptable"
        self._add(where, slug, comment, data, result, bundles, else_error, cls, flags, limits, pieces, contract, {})

    def bad(
        self,
        where: str,
        slug: str,
        comment: str,
        data: bytes,
        error: str,
        offset: int | None,
        *,
        cls: str = "both",
        flags: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        pieces: Sequence[int] | None = None,
        contract: Mapping[str, Any] | None = None,
        before: Sequence[B] = (),
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """An input that must be refused; ``before`` are bundles delivered before the error.

        ``names`` says what a contract error names.
        """
        if before:
            flags = (*flags, "many")
        if "one" in flags:
            cls = "core"
        self._add(
            where,
            slug,
            comment,
            data,
            "invalid",
            before,
            (error, offset),
            cls,
            flags,
            limits,
            pieces,
            contract,
            names or {},
        )
