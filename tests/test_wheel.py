"""The wheel: what is in it, and that it does in an empty environment what a checkout does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from boundary_bundle.native import bootstrap

ROOT = Path(__file__).resolve().parents[1]
#: For pip, where everything that it needs is there already.
OFFLINE = ("--quiet", "--disable-pip-version-check", "--no-index")
#: What importing the package may load besides the standard library.
DEPENDENCIES = {"construct", "crc32c", "ml_dtypes", "numpy"}
#: Folder in the repository -> folder in the wheel.
PLACES = {
    "boundary_bundle": "boundary_bundle",
    "spec": "boundary_bundle/spec",
    "native_shim": "boundary_bundle/native_shim",
}
TESTEE = ("-m", "boundary_bundle.conformance.testee_python")


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """Standard output of a command that succeeds, without this environment's Python settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, env={**kept, **environment}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes into the folder it builds from."""
    source = tmp_path_factory.mktemp("source")
    leavings = shutil.ignore_patterns("__pycache__", "build", "*.o", ".*")
    for name in PLACES:
        shutil.copytree(ROOT / name, source / name, ignore=leavings)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    # By the setuptools that is here: another one would be downloaded, and none is pinned for that.
    run(
        [sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-deps", "--no-build-isolation", "-w", target, source],
        target,
    )
    (found,) = target.glob("*.whl")
    return found


def environment(folder: Path, lock: str, wheel: Path) -> Path:
    """The folder of programs of a new environment that holds what a file of .requirements/ pins, and the wheel.

    The wheel comes last and finds everything that it asks for, or it cannot be installed.
    """
    run([sys.executable, "-m", "venv", folder], folder.parent)
    python = folder / "bin" / "python"
    run(bootstrap.pip_install(python, ROOT / ".requirements" / f"{lock}.txt"), folder.parent)
    run([python, "-m", "pip", "install", *OFFLINE, wheel], folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it asks for, and nothing else."""
    return environment(tmp_path_factory.mktemp("empty") / "venv", "runtime", wheel)


def test_contents(wheel: Path) -> None:
    """A file that is forgotten in pyproject.toml, one that is in it and should not, a second copy."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    wanted: dict[str, bytes] = {}
    for folder, inside in PLACES.items():
        for path in (ROOT / folder).rglob("*"):
            part = path.relative_to(ROOT / folder)
            if not path.is_file() or any(name.startswith((".", "__pycache__")) for name in part.parts):
                continue
            if folder == "native_shim" and path.name not in ("boundary_bundle.c", "boundary_bundle.h", "bundle.py"):
                continue
            wanted[f"{inside}/{part.as_posix()}"] = path.read_bytes()
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []


def test_packages_are_those_that_are_there() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    there = {path.parent.relative_to(ROOT) for path in (ROOT / "boundary_bundle").rglob("__init__.py")}
    beside = {"boundary_bundle.spec", "boundary_bundle.native_shim"}
    assert set(listed) == {".".join(path.parts) for path in there} | beside


def test_the_environment_holds_four_packages_more(programs: Path, tmp_path: Path) -> None:
    listed = run([programs / "python", "-m", "pip", "list", "--format=freeze"], tmp_path)
    names = {line.partition("=")[0].lower().replace("-", "_") for line in listed.splitlines()}
    assert names - {"pip", "setuptools", "wheel"} == DEPENDENCIES | {"boundary_bundle"}


@pytest.mark.parametrize("module", ["boundary_bundle", "boundary_bundle.cli", "boundary_bundle.conformance.runner"])
def test_importing_loads_four_packages_and_no_more(programs: Path, tmp_path: Path, module: str) -> None:
    """A fresh interpreter's sys.modules: an import of an extra at the top of a module would break users."""
    code = (
        f"import sys; before = set(sys.modules); import {module}; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = set(run([programs / "python", "-c", code], tmp_path).split())
    # numpy and ml_dtypes load parts of themselves under names of their own.
    ours = {name for name in loaded - set(sys.stdlib_module_names) if not name.startswith("_")}
    assert ours <= DEPENDENCIES | {"boundary_bundle"}


def test_importing_the_codec_loads_no_command_and_no_driver(programs: Path, tmp_path: Path) -> None:
    code = "import sys, boundary_bundle; print(*(name for name in sys.modules if name.startswith('boundary_bundle.')))"
    loaded = {name.split(".")[1] for name in run([programs / "python", "-c", code], tmp_path).split()}
    assert not loaded & {"cli", "conformance", "native", "pytest_plugin", "shards", "testing"}


def test_every_vector_and_case(programs: Path, tmp_path: Path) -> None:
    """The kit as a user without a checkout has it."""
    shown = run([programs / "boundary-bundle", "conformance", "--", programs / "python", *TESTEE], tmp_path)
    assert "passed" in shown


def test_the_files_are_found_in_the_package(programs: Path, tmp_path: Path) -> None:
    code = (
        "from boundary_bundle.places import spec_folder, shim_folder;"
        "from boundary_bundle.conformance.vectors import load;"
        "print(spec_folder(), shim_folder(), sum(1 for _ in load()))"
    )
    spec, shim, count = run([programs / "python", "-c", code], tmp_path).split()
    assert Path(spec).parent == Path(shim).parent
    assert (Path(spec).name, Path(shim).name) == ("spec", "native_shim")
    assert int(count) > 800


CALLER = """
#include <stdio.h>
#include "boundary_bundle.h"
int main(void) {
    bb_config config;
    bb_config_init(&config);
    bb_bundle bundle;
    bb_error error;
    printf("%d\\n", (int)bb_decode(&config, (const unsigned char *)"not a bundle", 12, &bundle, &error));
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: cc is missing")
def test_shim(programs: Path, tmp_path: Path) -> None:
    """Two files that compile, every symbol prefixed, and the line for a Makefile that includes it."""
    folder = tmp_path / "vendor"
    shown = run([programs / "boundary-bundle", "shim", "--prefix", "myproj_", "-o", folder], tmp_path)
    names = ["boundary_bundle.h", "boundary_bundle.c", "boundary_bundle.mk"]
    assert shown.splitlines() == [str(folder / name) for name in names]
    (tmp_path / "caller.c").write_text(CALLER)
    (tmp_path / "Makefile").write_text(
        "caller: caller.c\n\t$(CC) -Ivendor -o $@ caller.c $(MYPROJ_BOUNDARY_BUNDLE)\n"
        "include vendor/boundary_bundle.mk\ncaller: $(MYPROJ_BOUNDARY_BUNDLE)\n"
    )
    run(["make", "CFLAGS=-O1 -Wall -Wextra -Werror"], tmp_path)
    assert run([tmp_path / "caller"], tmp_path) == "200\n"
    if shutil.which("nm") is not None:
        symbols = run(["nm", "-g", "--defined-only", folder / "boundary_bundle.o"], tmp_path).splitlines()
        assert len(symbols) > 20
        assert all(line.split()[-1].lstrip("_").startswith("myproj_") for line in symbols)


def test_shim_refuses(programs: Path, tmp_path: Path) -> None:
    """Nothing is written over, and no prefix that C does not have."""
    (tmp_path / "boundary_bundle.c").write_text("mine")

    def refusal(*arguments: str) -> str:
        command = [programs / "boundary-bundle", "shim", *arguments, "-o", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr

    assert "it is there already" in refusal()
    assert "not a C identifier" in refusal("--prefix", "my-proj_")
    assert "not a file name" in refusal("--name", "../up")
    assert [path.name for path in tmp_path.iterdir()] == ["boundary_bundle.c"]
    assert (tmp_path / "boundary_bundle.c").read_text() == "mine"


def test_example_project(wheel: Path, tmp_path: Path) -> None:
    """tests/example_project in an environment of its own: fixtures and strategies as an outsider has them."""
    programs = environment(tmp_path / "venv", "codec", wheel)
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tests" / "example_project", project, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    shown = run([programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"], project, PATH=path)
    assert " passed" in shown
    assert "skipped" not in shown
    # And without a testee each test that wants one says how to give it.
    shown = run(
        [programs / "python", "-m", "pytest", "-q", "-rs", "-o", "bundle_testee=", "-k", "damage", "tests"],
        project,
        PATH=path,
    )
    assert "no testee: give --bundle-testee COMMAND" in shown
