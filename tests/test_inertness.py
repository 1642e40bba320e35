"""Without a range the series changes nothing: the same program on a patched and on an unpatched libllama.

Catches: a hook that computes something else without a range, and one that costs time there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from boundary_bundle.native import NativeBuild
from boundary_bundle.native.bootstrap import C_NAMES, find_tool
from boundary_bundle.native.build import CMAKE_FLAGS, Recipe, build_recipe
from boundary_bundle.native.paths import cache_dir, checkout_dir
from boundary_bundle.native.source import ensure_source
from boundary_bundle.shards import tiny_models

pytestmark = pytest.mark.shards

DARWIN = sys.platform == "darwin"
#: Instructions that the patched library may execute beyond those of the unpatched one.
ALLOWED = 0.001
#: Bytes between model and context (plain_run.c). The hash tables of ggml are over addresses, and a larger library moves
#: what it allocates: of one and the same code collisions alone make 0.2% of the instructions for a batch, and whole
#: runs differ by as much. So what differs between layouts of one build is left out of a whole run (the hash tables, the
#: allocator, what copies and compares; some 15%), and for batches the fewest are compared.
LAYOUTS = (1, 50_000, 200_000, 1_000_000, 3_000_000)


@pytest.fixture(scope="session")
def portable_ggml() -> NativeBuild:
    """ggml without the instructions that only this machine has: valgrind does not know all of them.

    libllama is compiled without such instructions in any build, so that it needs no build of its own.
    """
    cache = cache_dir()
    flags = ["GGML_NATIVE=OFF" if flag.startswith("GGML_NATIVE=") else flag for flag in CMAKE_FLAGS]
    assert "GGML_NATIVE=OFF" in flags
    shim = checkout_dir() / "native_shim"
    recipe = Recipe("unpatched", ensure_source(cache), (), shim, (), tuple(flags), target="ggml")
    return build_recipe(recipe, cache=cache)


def make_runs(folder: Path, builds: dict[str, NativeBuild], ggml: NativeBuild) -> dict[str, Path]:
    """The program beside each libllama with the same ggml, each in a folder of its own."""
    compiler = find_tool("CC", C_NAMES)
    assert compiler is not None
    source = builds["unpatched"].source_dir
    command = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", str(Path(__file__).with_name("plain_run.c"))]
    command += [f"-I{source / name}" for name in ("include", "ggml/include")]
    found = {}
    for kind, build in builds.items():
        place = folder / kind
        place.mkdir()
        # A library looks for the others in its own folder.
        for library in [*build.lib_dir.glob("libllama.*"), *ggml.lib_dir.glob("libggml*")]:
            shutil.copy(library, place, follow_symlinks=False)
        found[kind] = place / "plain_run"
        if kind == "patched":
            rpath = ["-Wl,-rpath,@loader_path"] if DARWIN else ["-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"]
            libraries = [f"-L{place}", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu", *rpath]
            subprocess.run([*command, *libraries, "-o", str(found[kind])], check=True)
        else:  # the very same program
            shutil.copy(found["patched"], place)
    return found


@pytest.fixture(scope="session")
def builds(patched_build: NativeBuild, unpatched_build: NativeBuild) -> dict[str, NativeBuild]:
    return {"patched": patched_build, "unpatched": unpatched_build}


@pytest.mark.parametrize("model", [*tiny_models.VARIANTS, "smollm2"])
def test_logits_are_those_of_the_unpatched_library(
    builds: dict[str, NativeBuild], model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every bit of every logit, through llama.h alone."""
    path = request.getfixturevalue("smollm2") if model == "smollm2" else request.getfixturevalue("tiny")[model]
    programs = make_runs(tmp_path, builds, builds["unpatched"])
    ours, theirs = (
        np.frombuffer(subprocess.run([programs[kind], path], check=True, stdout=subprocess.PIPE).stdout, np.uint32)
        for kind in ("patched", "unpatched")
    )
    assert len(ours) == len(theirs) >= 46 * tiny_models.N_VOCAB
    assert len(set(ours.tolist())) > len(ours) // 2  # not one value everywhere
    assert np.count_nonzero(ours != theirs) == 0


class Count:
    """Instructions of one run, as callgrind wrote them: of each function by itself, and those within llama_decode."""

    def __init__(self, record: str) -> None:
        totals = re.search(r"^totals: (\d+)$", record, re.MULTILINE)
        assert totals is not None
        self.functions = functions(record)
        assert sum(self.functions.values()) == int(totals[1])
        # A name stands with its number once; a call's cost is on the line after "calls=".
        number = re.search(r"^c?fn=(\(\d+\)) llama_decode$", record, re.MULTILINE)
        assert number is not None
        calls = re.findall(
            rf"^cfn={re.escape(number[1])}(?: llama_decode)?\ncalls=.*\n\S+ (\d+)$", record, re.MULTILINE
        )
        self.batches = sum(map(int, calls))
        assert 0 < self.batches < int(totals[1])


def functions(record: str) -> dict[str, int]:
    """Instructions of each function without those that it calls: a line of costs belongs to the function named before
    it, unless it follows a line of calls."""
    names: dict[str, str] = {}
    found: dict[str, int] = {}
    current, of_a_call = "", False
    for line in record.splitlines():
        if match := re.match(r"(c?fn)=(\(\d+\))(?: (.*))?", line):
            kind, number, name = match.groups()
            if name:
                names[number] = name
            if kind == "fn":
                current = names[number]
        elif line.startswith("calls="):
            of_a_call = True
        elif line[:1].isdigit():
            if not of_a_call:
                found[current] = found.get(current, 0) + int(line.split()[1])
            of_a_call = False
    return found


def settled(counts: dict[str, list[Count]]) -> dict[str, int]:
    """Instructions of the functions that have as many in every layout, in either build."""
    every = [count.functions for some in counts.values() for count in some]
    names = set().union(*every)

    def is_settled(name: str) -> bool:
        return all(len({count.functions.get(name, 0) for count in some}) == 1 for some in counts.values())

    kept = [name for name in names if is_settled(name)]
    return {kind: sum(some[0].functions.get(name, 0) for name in kept) for kind, some in counts.items()}


def test_instructions_are_those_of_the_unpatched_library(
    builds: dict[str, NativeBuild], portable_ggml: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """One thread, a tiny model, so that arithmetic does not hide what a hook costs."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not installed (apt-get install valgrind)")
    programs = make_runs(tmp_path, builds, portable_ggml)
    counts: dict[str, list[Count]] = {kind: [] for kind in programs}
    written = set()
    for layout in LAYOUTS:
        running = {}
        for kind, program in programs.items():
            record = tmp_path / f"{kind}-{layout}"
            command = [valgrind, "--quiet", "--tool=callgrind", "--compress-pos=no", f"--callgrind-out-file={record}"]
            command += [str(program), str(tiny["tied"]), str(layout)]
            running[kind] = record, subprocess.Popen(command, stdout=subprocess.PIPE)
        for kind, (record, process) in running.items():
            written.add(process.communicate()[0])
            assert process.returncode == 0
            counts[kind].append(Count(record.read_text()))
    assert len(written) == 1
    both = ("patched", "unpatched")
    parts = {
        "whole": [settled(counts)[kind] for kind in both],
        "batches": [min(count.batches for count in counts[kind]) for kind in both],
    }
    for part, (ours, theirs) in parts.items():
        print(f"{part}: {ours:,} instructions patched, {theirs:,} unpatched, {100 * (ours / theirs - 1):+.4f}%")
        assert ours <= theirs * (1 + ALLOWED), part
