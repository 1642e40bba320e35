"""What crosses a boundary: as the library declares it, and as bundles that crossed have it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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


#: What the sizes of a tensor mean, by its name and rank; ``layers_behind`` is n_layer less the cut.
_MEANINGS: dict[tuple[str, int], tuple[str, ...]] = {
    ("residual", 2): ("tokens", "n_embd"),
    ("residual", 3): ("tokens", "n_streams", "n_embd"),
    ("per_layer_inputs", 3): ("tokens", "layers_behind", "n_embd_per_layer"),
    ("v_first", 2): ("tokens", "n_embd"),
    ("input_embedding", 2): ("tokens", "n_embd"),
    ("deepstack", 3): ("tokens", "n_deepstack", "n_embd"),
    ("positions", 2): ("n_sections", "tokens"),
    ("logits", 2): ("outputs", "n_vocab"),
    ("embeddings", 2): ("outputs", "n_embd_out"),
}


def with_symbols(
    contracts: Iterable[BoundaryContract], n_layer: int, known: Mapping[str, int]
) -> tuple[list[BoundaryContract], dict[str, int]]:
    """The same with names for sizes, where they are known, and what the names come to; contracts that are now equal are
    put together. Raises ValueError if a name would have two values, or another one than the ``known``.
    """
    values: dict[str, int] = {}
    found = []
    for contract in contracts:
        for cut in contract.cuts:
            expected = {**values, **known, "layers_behind": n_layer - cut}
            rows = []
            for tensor in contract.tensors:
                meanings = _MEANINGS.get((tensor.name, len(tensor.shape)), tensor.shape)
                for size, meaning in zip(tensor.shape, meanings, strict=True):
                    if size.isdigit() and not meaning.isdigit():
                        if expected.setdefault(meaning, int(size)) != int(size):
                            raise ValueError(f"{meaning} of {tensor.name} is {size}, not {expected[meaning]}, at {cut}")
                        if meaning != "layers_behind":
                            values[meaning] = int(size)
                rows.append(CrossingTensor(tensor.name, tensor.dtype, meanings, tensor.token_axis))
            found.append((cut, tuple(rows)))
    return _together(found), values


def _together(found: Iterable[tuple[int, tuple[CrossingTensor, ...]]]) -> list[BoundaryContract]:
    """Cuts that the same tensors cross in one contract, in the order in which they are first met."""
    cuts: dict[tuple[CrossingTensor, ...], list[int]] = {}
    for cut, tensors in found:
        cuts.setdefault(tensors, []).append(cut)
    return [BoundaryContract(tuple(where), tensors) for tensors, where in cuts.items()]


def declared(texts: Iterable[tuple[int, str]]) -> list[BoundaryContract]:
    """From the canonical texts of contracts (section 5.3), each with its cut; equal ones are put together."""
    found = []
    for cut, text in texts:
        rows = []
        for line in text.split("\n"):
            if (match := _TENSOR.fullmatch(line)) is not None:
                axis = None if match[4] == "-" else int(match[4])
                rows.append(CrossingTensor(match[1], match[2], tuple(match[3].split(",")), axis))
        found.append((cut, tuple(rows)))
    return _together(found)


def observed(folder: Path) -> list[BoundaryContract]:
    """From files ``cut-CUT-NUMBER.bundle``, batches of different sizes at each cut; equal ones are put together."""
    by_cut: dict[int, list[Bundle]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            by_cut.setdefault(int(match[1]), []).append(decode(path.read_bytes()))
    return _together((cut, _tensors(bundles)) for cut, bundles in sorted(by_cut.items()))


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
