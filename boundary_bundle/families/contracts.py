"""What crosses a boundary: as the library declares it, and as bundles that crossed have it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bundle import Bundle
from ..decoder import decode

_TENSOR = re.compile(r"tensor (\S+) (\S+) \[([^]]*)\] (-|[0-9]+)")
_FILE = re.compile(r"cut-([0-9]+)-([0-9]+)\.bundle")


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor with its symbolic shape, in the words of the specification's section 5.3."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    token_axis: int | None


@dataclass(frozen=True)
class BoundaryContract:
    """The tensors of one or more cuts, in their order."""

    cuts: tuple[int, ...]
    tensors: tuple[CrossingTensor, ...]


def declared(texts: Iterable[tuple[int, str]]) -> list[BoundaryContract]:
    """From the canonical texts of contracts (section 5.3), each with its cut; equal ones are put together."""
    found: dict[tuple[CrossingTensor, ...], list[int]] = {}
    for cut, text in texts:
        rows = []
        for line in text.split("\n"):
            if (match := _TENSOR.fullmatch(line)) is not None:
                axis = None if match[4] == "-" else int(match[4])
                rows.append(CrossingTensor(match[1], match[2], tuple(match[3].split(",")), axis))
        found.setdefault(tuple(rows), []).append(cut)
    return [BoundaryContract(tuple(cuts), tensors) for tensors, cuts in found.items()]


def observed(folder: Path) -> list[BoundaryContract]:
    """From files ``cut-CUT-NUMBER.bundle``, batches of different sizes at each cut; equal ones are put together."""
    by_cut: dict[int, list[Bundle]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            by_cut.setdefault(int(match[1]), []).append(decode(path.read_bytes()))
    found: dict[tuple[CrossingTensor, ...], list[int]] = {}
    for cut, bundles in sorted(by_cut.items()):
        found.setdefault(_tensors(bundles), []).append(cut)
    return [BoundaryContract(tuple(cuts), tensors) for tensors, cuts in found.items()]


def _tensors(bundles: Sequence[Bundle]) -> tuple[CrossingTensor, ...]:
    counts = [_number(bundle, "n_tokens") for bundle in bundles]
    first = bundles[0]
    rows = []
    for place, tensor in enumerate(first.tensors):
        shapes = [bundle.tensors[place].shape for bundle in bundles]
        sizes = list(zip(*shapes, strict=True))
        shape = tuple(_symbol(tensor.name, size, counts) for size in sizes)
        rows.append(CrossingTensor(tensor.name, tensor.dtype, shape, tensor.token_axis))
    return tuple(rows)


def _number(bundle: Bundle, name: str) -> int:
    value = bundle.attributes[name]
    assert isinstance(value, int)
    return value


def _symbol(name: str, sizes: Sequence[int], counts: Sequence[int]) -> str:
    if name == "seq_ids":
        return "members"  # as many as tokens here, where each token has one sequence
    if list(sizes) == list(counts):
        return "tokens"
    if list(sizes) == [count + 1 for count in counts]:
        return "tokens+1"
    return str(sizes[0]) if len(set(sizes)) == 1 else "rows"
