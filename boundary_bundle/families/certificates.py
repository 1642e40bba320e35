"""The certificates in spec/families: one JSON file an architecture, and a table of all.

They hold nothing that differs from run to run: no times, no names of machines or folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..native.apply import series
from ..native.pin import UPSTREAM_COMMIT
from ..places import spec_folder
from ..writing import write_whole
from .certify import Certificate
from .contracts import CrossingTensor

SCHEMA = 1
#: What the JSON of all architectures says of each; what ended or differs is "failed".
Verdict = Literal["certified", "failed", "refused", "not built"]

#: The tensors that cross every boundary; others are named in the table.
COMMON = ("residual", "positions", "seq_offsets", "seq_ids", "outputs")


def series_hash(patches: Path) -> str:
    """SHA-256 over the names and contents of the patches in a folder, in their order."""
    digest = hashlib.sha256()
    for path in series(patches):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def verdict(variants: Sequence[Certificate]) -> Verdict:
    """Of an architecture: certified only if every variant that can be made is."""
    found = {variant.verdict for variant in variants}
    if found & {"failed", "crashed"}:
        return "failed"
    if "refused" in found:
        return "refused"
    return "certified" if "certified" in found else "not built"


def reason(variants: Sequence[Certificate]) -> str:
    """Why it is not certified, or which variant is not."""
    return "; ".join(
        f"{one.variant}: {one.reason}" if len(variants) > 1 else one.reason for one in variants if one.reason
    )


def summary(architecture: str, variants: Sequence[Certificate]) -> dict[str, Any]:
    """One entry of ``architectures`` in the command's JSON."""
    return {
        "name": architecture,
        "verdict": verdict(variants),
        "cuts": sum(len(one.cuts) for one in variants),
        "logits_compared": sum(one.logits.compared for one in variants),
        "logits_differing": sum(one.logits.differing for one in variants),
        "boundary_values_compared": sum(one.boundary.compared for one in variants),
        "boundary_values_differing": sum(one.boundary.differing for one in variants),
        "reason": reason(variants),
        "variants": [_variant(one) for one in variants],
    }


def certificate(architecture: str, variants: Sequence[Certificate], patches: Path) -> dict[str, Any]:
    """What stands in spec/families/ARCHITECTURE.json."""
    return {
        "schema": SCHEMA,
        "architecture": architecture,
        "verdict": verdict(variants),
        "reason": reason(variants),
        "llama_cpp": UPSTREAM_COMMIT,
        "series_sha256": series_hash(patches),
        "conditions": {"backend": "CPU", "threads": 1, "equal": "batches, micro-batches, threads, types of the cache"},
        "variants": [_variant(one) for one in variants],
    }


def _variant(one: Certificate) -> dict[str, Any]:
    found: dict[str, Any] = {"variant": one.variant, "verdict": one.verdict, "reason": one.reason}
    if not one.sha256:
        return found
    return {
        **found,
        "model_sha256": one.sha256,
        "layers": one.n_layer,
        "memory": one.memory,
        "gives": one.gives,
        "cuts": one.cuts,
        "illegal_cuts": [{"cut": cut, "reason": why} for cut, why in one.illegal_cuts.items()],
        "pairs_of_cuts": one.pairs,
        "sizes": one.sizes,
        "boundaries": [
            {"cuts": list(entry.cuts), "tensors": [_tensor(tensor) for tensor in entry.tensors]}
            for entry in one.contracts
        ],
        "ends": [
            {"layer": entry.cuts[0], "tensors": [_tensor(tensor) for tensor in entry.tensors]} for entry in one.ends
        ],
        "settings": one.settings,
        "pairs_of_values_met": one.pairs_met,
        "illegal_settings": [{"values": dict(entry.combination), "reason": entry.reason} for entry in one.illegal],
        "refused_settings": [
            {"setting": entry.setting, "unpatched": entry.unpatched, "patched": entry.patched} for entry in one.refusals
        ],
        "tokens": one.tokens,
        "logits_compared": one.logits.compared,
        "logits_differing": one.logits.differing,
        "boundary_values_compared": one.boundary.compared,
        "boundary_values_differing": one.boundary.differing,
    }


def _tensor(tensor: CrossingTensor) -> dict[str, Any]:
    shape = [int(size) if size.isdigit() else size for size in tensor.shape]
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": shape, "token_axis": tensor.token_axis}


# -- files


def write(folder: Path, found: Mapping[str, Sequence[Certificate]], patches: Path) -> None:
    """Write a certificate for each architecture, and the table over all that are in the folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for architecture, variants in found.items():
        content = json.dumps(certificate(architecture, variants, patches), indent=1)
        write_whole(folder / f"{architecture}.json", [content.encode("ascii") + b"\n"])
    write_whole(folder / "README.md", [table(read(folder)).encode()])


def read(folder: Path) -> list[dict[str, Any]]:
    """The certificates of a folder, by name."""
    return [json.loads(path.read_text(encoding="ascii")) for path in sorted(folder.glob("*.json"))]


def find(architecture: str) -> dict[str, Any] | None:
    """The certificate of an architecture by its name, as it stands in spec/families; None if there is none."""
    # Not by a path made of the name, which may come out of a file.
    found = {path.stem: path for path in (spec_folder() / "families").glob("*.json")}.get(architecture)
    certificate: dict[str, Any] | None = None if found is None else json.loads(found.read_text(encoding="ascii"))
    return certificate


_HEAD = """\
# Architectures

Written by `boundary-bundle certify --family all`. Certified means: split at every legal cut and at every legal pair of
cuts, under every setting of a covering array, each value of the output equals by its bits that of the separately built
unpatched library with the same batches, micro-batches and threads. What was run stands in the architecture's JSON file;
`boundary_bundle/families/settings.py` says how the settings are chosen. Layers, cuts and counts are those of tiny
models.
"""


def table(certificates: Iterable[Mapping[str, Any]]) -> str:
    """The text of the folder's README."""
    entries = list(certificates)
    certified = [entry for entry in entries if entry["verdict"] == "certified"]
    lines = [
        _HEAD,
        f"{len(certified)} of {len(entries)} architectures are certified.",
        "",
        "| architecture | variant | memory | layers | legal cuts | pairs | crosses too | settings | values compared | "
        "differing | boundary values | differing |",
        "|---|---|---|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for entry in certified:
        for one in entry["variants"]:
            if one["verdict"] != "certified":
                continue
            cells = [
                entry["architecture"],
                one["variant"],
                one["memory"],
                one["layers"],
                _ranges(one["cuts"]),
                one["pairs_of_cuts"],
                ", ".join(crosses_too(one)),
                len(one["settings"]),
                f"{one['logits_compared']:,}",
                one["logits_differing"],
                f"{one['boundary_values_compared']:,}",
                one["boundary_values_differing"],
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    others = [entry for entry in entries if entry["verdict"] != "certified"]
    if others:
        lines += ["", "| architecture | verdict | reason |", "|---|---|---|"]
        lines += [f"| {entry['architecture']} | {entry['verdict']} | {entry['reason']} |" for entry in others]
    return "\n".join(lines) + "\n"


def crosses_too(variant: Mapping[str, Any]) -> list[str]:
    """The tensors of a variant's boundaries beyond those that cross every one."""
    names = [tensor["name"] for boundary in variant["boundaries"] for tensor in boundary["tensors"]]
    return [name for name in dict.fromkeys(names) if name not in COMMON]


def _ranges(numbers: Sequence[int]) -> str:
    """``1-5`` for 1, 2, 3, 4, 5."""
    if not numbers:
        return ""
    whole = list(range(numbers[0], numbers[-1] + 1)) == list(numbers)
    return f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))
