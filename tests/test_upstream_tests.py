"""The tests that the patches add to upstream's tests folder, compiled as a C++ user would and run.

Catches: a patch whose own test fails, does not compile without the rest of upstream's test library, or needs a file
that is not there.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from boundary_bundle.native import NativeBuild

#: By the patch that brings them.
TESTS = {"test-layer-range": 1, "test-boundary": 2, "test-layer-range-kv": 3, "test-session": 3}

SERIES = Path(__file__).parent.parent / "patches"


@pytest.mark.parametrize("name", TESTS)
def test_upstream_test(patched_build: NativeBuild, tmp_path: Path, name: str) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    tree = patched_build.source_dir
    program = tmp_path / name
    includes = [f"-I{tree / folder}" for folder in ("include", "ggml/include", "src")]
    libraries = [
        f"-L{patched_build.lib_dir}",
        "-lllama",
        "-lggml",
        "-lggml-base",
        f"-Wl,-rpath,{patched_build.lib_dir}",
    ]
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *includes]
    made = subprocess.run(
        [*command, str(tree / "tests" / f"{name}.cpp"), "-o", str(program), *libraries],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(program), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(("name", "number"), TESTS.items())
def test_each_patch_brings_its_test(name: str, number: int) -> None:
    """And upstream's list of tests names it, in the same patch."""
    (patch,) = SERIES.glob(f"{number:04}-*.patch")
    lines = patch.read_text(encoding="utf-8").splitlines()
    assert f"+++ b/tests/{name}.cpp" in lines
    assert f"+    llama_build_and_test({name}.cpp)" in lines
