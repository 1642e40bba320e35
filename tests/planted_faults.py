"""Faults that the patches are there to avoid, put back into a copy of the patched tree.

All of them are compiled into one library; the environment variable BB_FAULT names the one that acts. Without it the
library is what it was. Each edit names the text that it replaces, however it is spaced, and fails where that is not
found exactly once.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import session_faults

from boundary_bundle.native import NativeBuild, ensure_source
from boundary_bundle.native.apply import blob_hash, series
from boundary_bundle.native.build import CERTIFY, PROGRAMS, WORKER, Recipe, build_recipe
from boundary_bundle.native.paths import cache_dir, checkout_dir, prepare_cache

VARIABLE = "BB_FAULT"

_SWITCH = f"""\
#include <cstdlib>
#include <cstring>
[[maybe_unused]] static bool bb_fault(const char * name) {{
    const char * v = getenv("{VARIABLE}");
    return v && strcmp(v, name) == 0;
}}
[[maybe_unused]] static int64_t bb_rows = 0;
"""


@dataclass(frozen=True)
class Edit:
    path: str
    old: str
    new: str


#: Those that certification shows, by name. ``model``: what shows it: a variant of tiny llama files, or an architecture.
FAULTS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "normalised residual": (
        "tied",
        (
            Edit(
                "src/llama-boundary.cpp",
                '        cb(t[i], "boundary_out", -1);\n',
                '        if (i == 0 && bb_fault("normalised residual")) { t[i] = ggml_rms_norm(ctx0, t[i], 1e-5f); }\n'
                '        cb(t[i], "boundary_out", -1);\n',
            ),
        ),
    ),
    "rows in micro-batch order": (
        "tied",
        (
            Edit(
                "src/llama-boundary.cpp",
                "        boundary->n_tokens = 0;\n",
                "        boundary->n_tokens = 0;\n        bb_rows = 0;\n",
            ),
            Edit(
                "src/llama-boundary.cpp",
                "(ids[j]*n_streams + s)*n_embd",
                '((bb_fault("rows in micro-batch order") ? bb_rows + j : ids[j])*n_streams + s)*n_embd',
            ),
            Edit(
                "src/llama-boundary.cpp",
                "(k - j)*n_embd*sizeof(float));\n            }\n        }\n    }\n",
                "(k - j)*n_embd*sizeof(float));\n            }\n        }\n    }\n"
                "    bb_rows += tensors.empty() ? 0 : tensors[0]->ne[1];\n",
            ),
        ),
    ),
    "embedding scale twice": (
        "gemma",
        (
            Edit(
                "src/models/gemma.cpp",
                "hparams.is_first_range() ? sqrtf(n_embd) : 1.0f",
                'hparams.is_first_range() || bb_fault("embedding scale twice") ? sqrtf(n_embd) : 1.0f',
            ),
        ),
    ),
    "output selection on a middle shard": (
        "tied",
        (
            Edit(
                "src/llama-graph.cpp",
                "    if (!hparams.is_last_range()) {\n        return nullptr;",
                '    if (!hparams.is_last_range() && !bb_fault("output selection on a middle shard")) {\n'
                "        return nullptr;",
            ),
            Edit(
                "src/models/llama.cpp",
                "if (il == n_layer - 1 && inp_out_ids) {",
                'if ((il == n_layer - 1 || (il == il_end - 1 && bb_fault("output selection on a middle shard"))) && '
                "inp_out_ids) {",
            ),
        ),
    ),
    "rope factors of layer 0 missing": (
        "untied",
        (
            Edit(
                "src/llama-layer-range.cpp",
                "    if (tn.bid >= 0) {\n        owned = hparams.owns_layer(tn.bid);\n",
                "    if (tn.tensor == LLM_TENSOR_ROPE_FREQS && !hparams.is_first_range() &&\n"
                '            bb_fault("rope factors of layer 0 missing")) {\n'
                "        owned = false;\n"
                "    } else if (tn.bid >= 0) {\n        owned = hparams.owns_layer(tn.bid);\n",
            ),
        ),
    ),
    "tied head absent": (
        "tied",
        (
            Edit(
                "src/llama-layer-range.cpp",
                "tn.tensor == LLM_TENSOR_TOKEN_EMBD) {\n        owned = hparams.is_last_range();",
                "tn.tensor == LLM_TENSOR_TOKEN_EMBD) {\n"
                '        owned = hparams.is_last_range() && !bb_fault("tied head absent");',
            ),
        ),
    ),
}


def every_edit() -> list[tuple[str, Edit]]:
    """With the names of the faults, those of sessions too."""
    found = [(name, edit) for name, (_, edits) in FAULTS.items() for edit in edits]
    for name, (_, places) in session_faults.FAULTS.items():
        for path, old, new in places:
            found.append((name, Edit(path, old, re.sub(r"\bC\b", f'bb_fault("{name}")', new))))
    return found


def _words(text: str) -> re.Pattern[str]:
    """The same words and signs, however they are spaced."""
    return re.compile(r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text))))


def fault_patch(tree: Path) -> str:
    """A patch in git format that puts every fault into ``tree``. Raises ValueError if a place is not found."""
    edited: dict[str, str] = {}
    for name, edit in every_edit():
        text = edited.setdefault(edit.path, (tree / edit.path).read_text(encoding="utf-8"))
        places = list(_words(edit.old).finditer(text))
        if len(places) != 1:
            raise ValueError(f"{name}: {edit.path} holds {len(places)} times, not once: {edit.old!r}")
        edited[edit.path] = text[: places[0].start()] + edit.new + text[places[0].end() :]
    parts = []
    for path, text in edited.items():
        before = (tree / path).read_text(encoding="utf-8")
        after = _SWITCH + text
        old, new = (blob_hash(content.encode()) for content in (before, after))
        parts.append(f"diff --git a/{path} b/{path}\nindex {old}..{new} 100644\n")
        parts += difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
        )
    return "".join(parts)


def build_faulty(patched: NativeBuild, folder: Path) -> NativeBuild:
    """The series and the faults on top of it, with the certifying program and the worker; from the cache if they are
    there."""
    patch = folder / "9999-planted-faults.patch"
    patch.write_text(fault_patch(patched.source_dir), encoding="utf-8")
    root = prepare_cache(cache_dir())
    checkout = checkout_dir()
    recipe = Recipe(
        kind="patched",
        source=ensure_source(root),
        patches=(*series(checkout / "patches"), patch),
        shim_dir=checkout / "native_shim",
        programs=tuple(
            program for program in PROGRAMS if program.kind == "patched" and program.name in (CERTIFY, WORKER)
        ),
    )
    return build_recipe(recipe, cache=root)
