"""What is downloaded is what was meant, what is listed is what is downloaded, and builds ask nobody."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from boundary_bundle.native import ensure_source, paths
from boundary_bundle.native.bootstrap import pip_install
from boundary_bundle.native.progress import Reporter

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".requirements"
KAITAI = ROOT / "spec" / "testees" / "kaitai"
LOCKS = [*sorted(FOLDER.glob("*.txt")), KAITAI / "requirements.txt"]
QUIET = Reporter(quiet=True)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


audit = load("run_audit")
run_lock = load("run_lock")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# -- Python packages ---------------------------------------------------------------------------


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_pins_each_package_by_hashes_and_names_no_index(lock: Path) -> None:
    """A row for which pip would take whatever bytes, an option that sends it elsewhere, an address of a mirror."""
    text = lock.read_text("utf-8")
    rows = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    found = list(audit.pinned(lock))
    assert len(found) == len(rows) > 0
    for (name, version, hashes), row in zip(found, rows, strict=True):
        assert row.startswith(f"{name}=={version}"), row
        assert hashes, row
    assert "://" not in text
    assert not [line for line in text.splitlines() if line.lstrip().startswith("-") and "--hash=sha256:" not in line]


def test_locks_agree() -> None:
    """Two versions of a package for the same Python: the second environment would change the first one's."""
    seen: dict[tuple[str, str], str] = {}
    for lock in LOCKS:
        for line in lock.read_text("utf-8").splitlines():
            if match := re.match(r"([\w.-]+)==([^\s;\\]+)(?: ; ([^\\]+))?", line):
                where = (match[1], (match[3] or "").strip())
                assert seen.setdefault(where, match[2]) == match[2], f"{lock.name}: {line}"


def test_locks_hold_what_pyproject_asks_for() -> None:
    """A package that was added to pyproject.toml alone: environments would be made without it."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    for name, what in {**run_lock.LOCKS, "kaitai": ("--group", "kaitai")}.items():
        wanted = list(project["project"]["dependencies"]) if run_lock.PROJECT in what else []
        for option, value in zip(what, what[1:], strict=False):
            if option == "--group":
                wanted += groups[value]
            if option == "--extra":
                wanted += extras[value]
        path = KAITAI / "requirements.txt" if name == "kaitai" else FOLDER / f"{name}.txt"
        pinned = {plain(package) for package, _, _ in audit.pinned(path)}
        assert {plain(re.split(r"[<>=!~\[; ]", row)[0]) for row in wanted} <= pinned, name
    assert set(run_lock.LOCKS) == {path.stem for path in FOLDER.glob("*.txt")} == set(audit.USES)


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    """An index that gives other bytes under the same name and version; here it is a folder."""
    index = tmp_path / "index"
    index.mkdir()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    project = tmp_path / "iniconfig"
    project.mkdir()
    version = next(version for name, version, _ in audit.pinned(FOLDER / "test.txt") if name == "iniconfig")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "iniconfig"\nversion = "{version}"\n'
    )
    (project / "iniconfig.py").write_text("raise SystemExit('the wrong one')\n")
    subprocess.run([*build, "-w", str(index), str(project)], check=True)
    rows = (FOLDER / "test.txt").read_text("utf-8")
    row = re.search(r"^iniconfig==(?:.*\\\n)*.*$", rows, re.MULTILINE)
    assert row is not None
    (tmp_path / "lock.txt").write_text(f"{row[0]}\n")
    command = pip_install(Path(sys.executable), tmp_path / "lock.txt")
    into = ["--target", str(tmp_path / "into"), "--no-index", "--find-links", str(index), "--no-cache-dir"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run([*command, *into], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "HASH" in done.stderr.upper()
    assert not (tmp_path / "into" / "iniconfig.py").exists()


@pytest.mark.parametrize("path", ["Makefile", ".ci/run", "fuzz/run.py", "boundary_bundle", "tests"])
def test_every_pip_install_checks_hashes_or_asks_no_index(path: str) -> None:
    """The next `pip install something` that nobody pins."""
    place = ROOT / path
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        if file == Path(__file__):
            continue
        text = file.read_text("utf-8")
        for match in re.finditer(r'"pip", "(?:install|download|wheel)"|-m pip (?:install|download|wheel) ', text):
            line = text.count("\n", 0, match.start()) + 1
            told = re.search(r"--require-hashes|--no-index|OFFLINE", text[match.start() : match.start() + 500])
            assert told, f"{file.relative_to(ROOT)}:{line}"


# -- npm packages ------------------------------------------------------------------------------


def test_npm_lock_has_a_hash_for_each_package_and_no_address() -> None:
    text = (KAITAI / "package-lock.json").read_text("utf-8")
    assert "://" not in text
    lock = json.loads(text)
    wanted = json.loads((KAITAI / "package.json").read_text("utf-8"))["dependencies"]
    assert lock["packages"][""]["dependencies"] == wanted
    for place, row in lock["packages"].items():
        if place:
            assert row["integrity"].startswith("sha512-"), place
    assert {f"node_modules/{name}" for name in wanted} <= set(lock["packages"])


# -- what is used that others made -------------------------------------------------------------


def test_third_party_is_what_is_pinned() -> None:
    """A package that nobody listed, a licence other than the installed package states."""
    licences = audit.licences_of_all(download=False)
    assert not {"not known", "not said"} & set(licences.values())
    assert audit.TARGET.read_text("utf-8") == audit.document(licences), "make lock writes it anew"
    stated = {package.name for package in audit.packages() if audit.installed(package) is not None}
    assert {"construct", "crc32c", "ml-dtypes", "numpy", "pytest"} <= stated


def test_no_installed_package_is_missing_from_the_list() -> None:
    """This environment is one that .requirements/ made: what is in it is in the list, in the same version."""
    listed = {(plain(package.name), package.version) for package in audit.packages()}
    names = {name for name, _ in listed}
    for distribution in importlib.metadata.distributions():
        name = plain(distribution.metadata["Name"])
        if name in names:
            assert (name, distribution.version) in listed
    assert "boundary-bundle" not in names


def test_vendored_parts_of_llama_cpp_are_listed() -> None:
    """A library that a move of the pin brings into the tree, or another version of one."""
    tree = ensure_source(paths.cache_dir(), reporter=QUIET).tree
    listed = {place for place, *_ in audit.VENDORED}
    assert {f"vendor/{path.name}" for path in (tree / "vendor").iterdir()} == {
        place for place in listed if place.startswith("vendor/")
    }
    for place, version, _, _ in audit.VENDORED:
        assert (tree / place).exists()
        if version != "-":
            text = "".join(path.read_text("utf-8", "replace") for path in (tree / place).glob("*.h*"))
            assert version in text, place
    assert (tree / "LICENSE").read_text("utf-8").startswith("MIT License")


def test_the_model_states_the_licence_that_is_listed(smollm2: Path) -> None:
    from gguf import GGUFReader

    found = GGUFReader(smollm2).fields["general.license"].contents()
    assert found == "apache-2.0"
    assert f"| SmolLM2-135M-Instruct, {smollm2.name} | - | Apache-2.0 |" in audit.TARGET.read_text("utf-8")


SKIPPED = '{"dependencies": [{"name": "construct", "skip_reason": "not found, could not be audited"}]}'
FOUND = (
    '{"dependencies": [{"name": "construct", "version": "2.10.70", "vulns": '
    '[{"id": "X-1", "fix_versions": ["2.11"]}]}, {"name": "numpy", "skip_reason": "not found"}]}'
)


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        ((1, "", "connection refused\n"), 3, "the advisory database could not be reached (connection refused)"),
        # Status 0 and "No known vulnerabilities found" of a pip-audit that has looked nothing up.
        ((0, SKIPPED, "No known vulnerabilities found\n"), 3, "0 could be looked up"),
        ((1, FOUND, ""), 1, "construct 2.10.70: X-1, mended in 2.11"),
    ],
    ids=["no answer", "all skipped", "found"],
)
def test_advisories_that_were_not_looked_up_are_not_called_none(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], status: int, told: str
) -> None:
    """A machine without the database that says that all is well."""
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], *answer))
    found = audit.advisories()
    assert found[0] == status
    assert told in found[1]


# -- builds without a network ------------------------------------------------------------------

#: Configures the tree with the series and builds the library that all others stand on, as a build does.
BUILD = """
import socket, sys
from pathlib import Path
from boundary_bundle.native.apply import series
from boundary_bundle.native.build import CMAKE_FLAGS, Program, Recipe, build_recipe, series_dir
from boundary_bundle.native.paths import cache_dir
from boundary_bundle.native.progress import Reporter
from boundary_bundle.native.source import ensure_source

try:
    socket.create_connection(("192.0.2.1", 9), timeout=2)
except OSError as error:
    print(f"network: {error.strerror}")
source = ensure_source(cache_dir(), reporter=Reporter(quiet=True))
recipe = Recipe("patched", source, series(series_dir()), Path(sys.argv[2]), (), CMAKE_FLAGS, target="ggml-base")
print(build_recipe(recipe, cache=Path(sys.argv[1]), reporter=Reporter(quiet=True)).library)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_build_uses_no_network(tmp_path: Path) -> None:
    """A CMake file that fetches something: all of the build's configuring, and one library, without any interface.

    For that the sources are in the cache, as they are after the downloads.
    """
    ensure_source(paths.prepare_cache(paths.cache_dir()), reporter=QUIET)
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine lets its user make no network namespace (unshare --net)")
    command = [*alone, sys.executable, "-c", BUILD, str(tmp_path / "cache"), str(ROOT / "native_shim")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, library = done.stdout.splitlines()
    assert first == "network: Network is unreachable"
    assert Path(library).is_file()
