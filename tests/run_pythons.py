"""The codec's tests under every Python that the package supports.

    python tests/run_pythons.py [--all] [--list]

Looks for python3.10 to python3.13 on the path, among pyenv's and among uv's, makes a
virtual environment for each in the cache folder, with what .requirements/codec.txt pins, and runs
there what needs no llama.cpp.
The Python that runs this file is left out: `make test` has run everything in it. Versions
that are not on the machine are named; with --all, or CI in the environment, that is a
failure. --list prints the versions that are missing and does nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
LOCK = ROOT / ".requirements" / "codec.txt"
TESTS = (
    *("test_codec.py", "test_contract.py", "test_prepared.py", "test_registry.py"),
    *("test_roundtrip.py", "test_vectors.py"),
)


def cache_dir() -> Path:
    """Where the package keeps what it makes; imported late, since --list runs in any Python."""
    sys.path.insert(0, str(ROOT))
    from boundary_bundle.native.paths import cache_dir as of_the_package

    return of_the_package()


def pip_install(python: Path, lock: Path) -> list[str]:
    sys.path.insert(0, str(ROOT))
    from boundary_bundle.native.bootstrap import pip_install as of_the_package

    return of_the_package(python, lock)


def candidates(version: str) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local" / "share" / "uv" / "python")
    for place in (*pyenv.glob(f"versions/{version}.*/bin/python"), *uv.glob(f"cpython-{version}.*/bin/python3")):
        yield str(place)


def find(version: str) -> str | None:
    """An interpreter of that version that can make environments. A shim of pyenv may stand for none."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates(version):
        found = subprocess.run([candidate, "-I", "-c", code], capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip() == version:
            return candidate
    return None


def environment(version: str, python: str) -> str:
    """The interpreter of a complete environment; raises CalledProcessError with what went wrong."""
    key = "\0".join((os.path.realpath(python), LOCK.read_text("utf-8")))
    place = cache_dir() / "venvs" / f"tests-{version}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    inside, complete = place / "bin" / "python", place / "complete"
    if not complete.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        for command in ([python, "-m", "venv", str(place)], pip_install(inside, LOCK)):
            subprocess.run(command, check=True, capture_output=True, text=True)
        complete.touch()
    return str(inside)


def run(version: str, python: str) -> tuple[int, str]:
    try:
        inside = environment(version, python)
    except subprocess.CalledProcessError as error:
        return error.returncode, f"{error.stdout}{error.stderr}"
    tests = [str(Path("tests") / name) for name in TESTS]
    # The session's fixtures are of llama.cpp and need packages that these tests do not.
    command = [inside, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main(arguments: list[str]) -> int:
    own = "{}.{}".format(*sys.version_info[:2])
    found = {version: find(version) for version in VERSIONS}
    missing = [version for version in VERSIONS if found[version] is None and version != own]
    if "--list" in arguments:
        print("\n".join(missing))
        return 0
    todo = [(version, python) for version, python in found.items() if python is not None and version != own]
    failed = False
    with ThreadPoolExecutor(2) as workers:
        for (version, _), (status, text) in zip(todo, workers.map(lambda item: run(*item), todo), strict=True):
            failed = failed or status != 0
            print(f"Python {version}: {text.strip().splitlines()[-1]}" if status == 0 else f"Python {version}:\n{text}")
    if own in VERSIONS:
        print(f"Python {own}: is the one that ran the other tests")
    demanded = "--all" in arguments or os.environ.get("CI", "") not in ("", "0", "false")
    for version in missing:
        print(f"{'error' if demanded else 'skipped'}: Python {version} is not here (pyenv or uv can install it)")
    return 1 if failed or (missing and demanded) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
