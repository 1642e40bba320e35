"""The vectors of ``spec/vectors``, loaded (spec/vectors/README.md says what each field means).

``python -m boundary_bundle.conformance.vectors`` prints every vector as one line of
JSON with its input written out in hexadecimal, for programs that do not want to read
the recipes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..places import spec_folder

#: Where the vectors lie.
FOLDER: Final = spec_folder() / "vectors"


def expand(recipe: Any) -> bytes:
    """The bytes of a recipe: hexadecimal, a list of recipes, or a recipe repeated."""
    if isinstance(recipe, str):
        return bytes.fromhex(recipe)
    if isinstance(recipe, list):
        return b"".join(map(expand, recipe))
    return expand(recipe["repeat"]) * int(recipe["count"])


def shrink(data: bytes) -> list[Any]:
    """A recipe for ``data``: lines of 64 bytes, equal neighbours said once."""
    recipe: list[Any] = []
    for at in range(0, len(data), 64):
        line = data[at : at + 64].hex()
        last = recipe[-1] if recipe else None
        if last == line:
            recipe[-1] = {"repeat": line, "count": 2}
        elif isinstance(last, dict) and last["repeat"] == line:
            last["count"] += 1
        else:
            recipe.append(line)
    return recipe


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that the decoded bundle must hold; ``payload`` is in wire order."""

    name: str
    dtype: str
    byte_order: str
    shape: tuple[int, ...]
    token_axis: int | None
    payload: bytes
    #: Bits of the elements as numbers, where the vector states them.
    elements: tuple[int, ...] | None


@dataclass(frozen=True)
class ExpectedAttribute:
    """An attribute that the decoded bundle must hold; ``raw`` are the value's bytes."""

    key: int
    type: str
    raw: bytes


@dataclass(frozen=True)
class ExpectedBundle:
    """A bundle that the decoder must deliver."""

    number: int
    minor: int
    fragment_size: int
    checksums: bool
    tensors: tuple[ExpectedTensor, ...]
    attributes: tuple[ExpectedAttribute, ...]


@dataclass(frozen=True)
class ExpectedError:
    """The error that must come; ``offset`` is None for contract errors."""

    name: str
    number: int
    offset: int | None
    #: What a contract error names.
    tensor: str | None
    attribute: int | None


@dataclass(frozen=True)
class Vector:
    """One vector. ``raw`` is its JSON object."""

    file: str
    raw: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.raw["id"])

    @property
    def section(self) -> str:
        """A section of the specification, or ``6:`` and a step of its order of checks."""
        return str(self.raw["section"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Who is asked: 'one' (a function for exactly one bundle), 'core', 'stream'."""
        if "one" in self.flags:
            return ("one",)
        kept = ("core", "stream") if self.raw["class"] == "both" else (str(self.raw["class"]),)
        return kept if "many" in self.flags or "core" not in kept else ("one", *kept)

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(self.raw["flags"])

    @property
    def limits(self) -> dict[str, int]:
        """Limits that differ from the defaults."""
        return {name: int(value) for name, value in self.raw.get("limits", {}).items()}

    @property
    def contract(self) -> dict[str, Any] | None:
        contract: dict[str, Any] | None = self.raw.get("contract")
        return contract

    @cached_property
    def data(self) -> bytes:
        """The input."""
        return expand(self.raw["input"])

    @property
    def pieces(self) -> tuple[int, ...] | None:
        """Sizes of the pieces in which an incremental decoder is to get the input."""
        return tuple(self.raw["pieces"]) if "pieces" in self.raw else None

    @property
    def result(self) -> str:
        """'valid', 'invalid', or 'acceptable': the bundles or the error, as the consumer can."""
        return str(self.raw["result"])

    @property
    def error(self) -> ExpectedError | None:
        raw = self.raw.get("error")
        if raw is None:
            return None
        return ExpectedError(raw["name"], raw["number"], raw["offset"], raw.get("tensor"), raw.get("attribute"))

    @cached_property
    def bundles(self) -> tuple[ExpectedBundle, ...]:
        """Bundles that are delivered, in the order of their ends (before the error, if one comes)."""
        return tuple(map(_bundle, self.raw.get("bundles", ())))

    @cached_property
    def reencoded(self) -> bytes | None:
        """What encoding the delivered bundles one after another gives; None for an invalid input."""
        if "reencoded" not in self.raw:
            return None
        return self.data if self.raw["reencoded"] == "same" else expand(self.raw["reencoded"])


def _bundle(raw: dict[str, Any]) -> ExpectedBundle:
    return ExpectedBundle(
        number=int(raw["number"]),
        minor=raw["minor"],
        fragment_size=int(raw["fragment_size"]),
        checksums=raw["checksums"],
        tensors=tuple(
            ExpectedTensor(
                name=tensor["name"],
                dtype=tensor["dtype"],
                byte_order=tensor["byte_order"],
                shape=tuple(map(int, tensor["shape"])),
                token_axis=tensor["token_axis"],
                payload=expand(tensor["payload"]),
                elements=tuple(int(bits, 16) for bits in tensor["elements"]) if "elements" in tensor else None,
            )
            for tensor in raw["tensors"]
        ),
        attributes=tuple(
            ExpectedAttribute(item["key"], item["type"], expand(item["raw"])) for item in raw["attributes"]
        ),
    )


def load(folder: Path = FOLDER) -> Iterator[Vector]:
    """Every vector, by file name and then in the file's order."""
    for path in sorted(folder.glob("*.json")):
        if path.name != "schema.json":
            yield from load_file(path)


def load_file(path: Path) -> Iterator[Vector]:
    """The vectors of one file."""
    for raw in json.loads(path.read_text("utf-8"))["vectors"]:
        yield Vector(path.stem, raw)


def main() -> int:
    """Print one line of JSON a vector: its object, with ``input`` and ``reencoded`` as plain hexadecimal."""
    for vector in load():
        flat: dict[str, Any] = {"file": vector.file, **vector.raw, "input": vector.data.hex()}
        if vector.reencoded is not None:
            flat["reencoded"] = vector.reencoded.hex()
        for bundle, expected in zip(flat.get("bundles", ()), vector.bundles, strict=True):
            for tensor, wanted in zip(bundle["tensors"], expected.tensors, strict=True):
                tensor["payload"] = wanted.payload.hex()
            for item, known in zip(bundle["attributes"], expected.attributes, strict=True):
                item["raw"] = known.raw.hex()
        json.dump(flat, sys.stdout, separators=(",", ":"))
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
