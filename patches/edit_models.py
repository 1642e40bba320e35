#!/usr/bin/env python3
"""Make the mechanical edits of patch 0002 in src/models of a llama.cpp tree.

    python edit_models.py TREE [--check]

Nearly every architecture's graph has one loop over the layers and then a final norm. There the loop's bounds become
the layer range's, and the graph returns behind the loop when the range ends before the last layer:

    for (int il = il_start; il < il_end; ++il) {
        ...
    }
    if (build_boundary_out(inpL)) {
        return;
    }

What belongs to the input (a scale of the embeddings) is applied by the first range alone. Where a file's mode depends
on whether it has a tensor, the table of the whole model is asked, since a file may hold some layers only. Everything
else that an architecture needs is written by hand. A tree that has the edits already is left as it is. Exit status 1:
with --check, a file would change; 2: a file does not look as expected, which is named.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

# No range is ever made of these: no plain decoder stack, a draft model, or not certified (patches/README.md).
LEFT_OUT = {
    "deepseek4.cpp",  # differs between the archives around the pin
    "dflash.cpp",
    "eagle3.cpp",
    "gemma4-assistant.cpp",
    "t5.cpp",
    "wavtokenizer-dec.cpp",
}

# Architectures that upstream added after the pin (in release 11434): not certified, so that no range is made of them.
# When the pin moves, this list is emptied or filled anew; a file that the script does not understand is named.
ADDED_LATER = {
    "bailingmoe3.cpp",
    "clef.cpp",
    "dots3note.cpp",
    "glm5-next.cpp",
    "granite-swa.cpp",
    "granite-switch.cpp",
    "hrm-text.cpp",
    "hy-v4.cpp",
    "kimi-k3.cpp",
    "laguna.cpp",
    "maple.cpp",
    "minimax-01.cpp",
    "minimax-m3.cpp",
    "muse-glimmer.cpp",
    "nanbeige.cpp",
    "pockettts.cpp",
    "qwen3tts.cpp",
    "qwen4exp.cpp",
    "spark2-5.cpp",
}

LOOP = "    for (int il = 0; il < n_layer; ++il) {\n"
RANGE_LOOP = "    for (int il = il_start; il < il_end; ++il) {\n"
END = "    }\n"
# inpL = ggml_scale(ctx0, inpL, FACTOR); before the loop
SCALE = re.compile(r"^    inpL = ggml_scale\(ctx0, inpL, (?P<factor>.*)\);\n$")
FIRST = "hparams.is_first_range()"
# whether a file is that of a draft model, or one without its draft layers
PROBE = re.compile(r"\(ml\.get_weight\((?P<name>\S+)\) == nullptr\)|ml\.get_weight\((?P<bare>\S+)\) == nullptr")
INCLUDE = '#include "llama-layer-range.h"\n'


class Unexpected(Exception):
    """A file whose shape is not the one that this script knows."""


def boundary_out(residual: str) -> list[str]:
    return [f"    if (build_boundary_out({residual})) {{\n", "        return;\n", "    }\n"]


def edit_scale(line: str) -> str:
    """The scale of the embeddings, 1 where the residual stream comes from another range."""
    match = SCALE.match(line)
    if match is None or FIRST in line:
        return line
    factor = match["factor"]
    if factor.startswith("ubatch.token ? "):  # the factor is 1.0f for vectors already
        return line.replace("ubatch.token ? ", f"ubatch.token && {FIRST} ? ")
    return f"    inpL = ggml_scale(ctx0, inpL, {FIRST} ? {factor} : 1.0f);\n"


def edit_probes(lines: list[str]) -> list[str]:
    """Tensors that are looked for by name are looked for in the whole model."""
    edited = [
        PROBE.sub(lambda match: f"!llama_layer_range_has(ml, {match['name'] or match['bare']})", line)
        if "_only" in line
        else line
        for line in lines
    ]
    if edited != lines and INCLUDE not in lines:
        last = max(i for i, line in enumerate(lines) if line.startswith("#include"))
        edited.insert(last + 1, INCLUDE)
    return edited


def edit(lines: list[str], name: str) -> list[str]:
    """One file's lines with the edits. ``name`` is for messages."""
    lines = edit_probes(lines)
    loops = [i for i, line in enumerate(lines) if line == LOOP]
    if not loops:
        return lines
    if len(loops) > 1:
        raise Unexpected(f"{name}: {len(loops)} loops over the layers, lines {[i + 1 for i in loops]}")
    start = loops[0]
    try:
        end = lines.index(END, start)
    except ValueError:
        raise Unexpected(f"{name}:{start + 1}: the loop over the layers has no end") from None
    residual = "inpL" if any(re.match(r" +inpL += ", line) for line in lines[start:end]) else "cur"
    before = [edit_scale(line) for line in lines[:start]]
    return [*before, RANGE_LOOP, *lines[start + 1 : end + 1], *boundary_out(residual), *lines[end + 1 :]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="a llama.cpp tree")
    parser.add_argument("--check", action="store_true", help="change nothing, name the files that would change")
    args = parser.parse_args()
    folder = args.tree / "src" / "models"
    files = [path for path in sorted(folder.glob("*.cpp")) if path.name not in LEFT_OUT | ADDED_LATER]
    if not files:
        print(f"{folder} holds no model files", file=sys.stderr)
        return 2
    edited: dict[Path, str] = {}
    try:
        for path in files:
            text = path.read_text(encoding="utf-8")
            new = "".join(edit(text.splitlines(keepends=True), path.name))
            if new != text:
                edited[path] = new
    except Unexpected as error:
        print(error, file=sys.stderr)
        return 2
    for path, new in edited.items():
        print(path.relative_to(args.tree))
        if not args.check:
            path.write_text(new, encoding="utf-8")
    return 1 if args.check and edited else 0


if __name__ == "__main__":
    sys.exit(main())
