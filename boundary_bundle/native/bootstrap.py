"""What must be on the machine, and the virtual environment in the cache.

The Makefile runs this file with whatever Python it found, before anything is installed; it therefore
uses the standard library alone and imports nothing of the package. The rest of the package uses
:func:`missing_tools`.

    python bootstrap.py python [--no-build] [--with LOCK]...    make the environment if need be, print its interpreter
    python bootstrap.py clean                                   empty the cache folder

What pip installs is what .requirements/ pins: ``test.txt`` in each environment, and what ``--with`` names beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MINIMUM_PYTHON = (3, 10)
CXX_NAMES = ("c++", "g++", "clang++")
C_NAMES = ("cc", "gcc", "clang")
# What this project makes in its cache; nothing else is removed by "clean".
CACHE_FOLDERS = ("builds", "locks", "models", "sources", "venvs")

_HOW = {
    "cmake": "apt-get install cmake, dnf install cmake, or brew install cmake",
    "C++ compiler": "apt-get install g++, dnf install gcc-c++, or xcode-select --install",
    "C compiler": "apt-get install gcc, dnf install gcc, or xcode-select --install",
    "git": "apt-get install git, dnf install git, or brew install git",
    "ninja or make": "apt-get install ninja-build, dnf install ninja-build, or brew install ninja",
}


class _Refusal(Exception):
    """It cannot be done; one sentence for the user."""


def find_tool(variable: str, names: Sequence[str]) -> str | None:
    """The program that ``$variable`` names, else the first of ``names`` that is on the path."""
    chosen = os.environ.get(variable, "").strip()
    return shutil.which(chosen) if chosen else next((found for name in names if (found := shutil.which(name))), None)


def missing_tools() -> list[str]:
    """One sentence for each thing that a build needs and this machine does not have."""
    sentences = []
    if sys.version_info < MINIMUM_PYTHON:
        sentences.append(
            "Python {}.{} is too old: boundary-bundle needs Python 3.10 or newer "
            "(apt-get install python3, dnf install python3, or brew install python).".format(*sys.version_info[:2])
        )
    there = {
        "cmake": shutil.which("cmake"),
        "C++ compiler": find_tool("CXX", CXX_NAMES),
        "C compiler": find_tool("CC", C_NAMES),
        "git": shutil.which("git"),
        "ninja or make": shutil.which("ninja") or shutil.which("make"),
    }
    for name, found in there.items():
        if found is None:
            sentences.append(f"{name} is missing: {_HOW[name]}.")
    return sentences


def _cache_dir() -> Path:
    # The same rule as paths.cache_dir, which this file cannot import; a test holds them together.
    explicit = os.environ.get("BOUNDARY_BUNDLE_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path("~/.cache")
    return (base / "boundary-bundle").expanduser().absolute()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def pip_install(python: Path, lock: Path) -> list[str]:
    """The command that installs exactly what a file of .requirements/ lists: each file's hash is checked before it is
    unpacked, and none is built here, with tools that nobody has pinned."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [*command, "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]


def environment(checkout: Path, beside: Sequence[str] = ()) -> Path:
    """The interpreter of the virtual environment for this checkout, made anew when pyproject.toml or the lock changes.

    ``beside`` names files of .requirements/ that are installed in it as well.
    """
    locks = {name: checkout / ".requirements" / f"{name}.txt" for name in ("test", *beside)}
    digest = hashlib.sha256()
    for part in (str(checkout).encode(), sys.version.encode(), os.path.realpath(sys.executable).encode()):
        digest.update(part + b"\0")
    digest.update((checkout / "pyproject.toml").read_bytes())
    digest.update(locks["test"].read_bytes())
    place = _cache_dir() / "venvs" / digest.hexdigest()[:16]
    python, complete = place / "bin" / "python", place / "complete"
    added = {}
    for name in beside:
        added[place / f"complete-{name}-{hashlib.sha256(locks[name].read_bytes()).hexdigest()[:16]}"] = locks[name]

    def is_there() -> bool:
        return python.exists() and complete.exists() and all(marker.exists() for marker in added)

    if is_there():
        return python
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        raise _Refusal(f"{sys.executable} cannot make virtual environments: apt-get install python3-venv") from None
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process to finish the Python environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_there():
            return python
        start = time.monotonic()
        if not (complete.exists() and python.exists()):
            _say(f"making the Python environment {place} (Python {sys.version.split()[0]}) ...")
            shutil.rmtree(place, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(place)])
            _say("installing boundary-bundle and its dependencies ...")
            _run(pip_install(python, locks["test"]))
            # Its dependencies and what builds it are there: nothing more is looked for.
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            _run([*command, "--no-build-isolation", "-e", str(checkout)])
            complete.touch()
        for marker, listed in added.items():
            if not marker.exists():
                _say(f"installing what .requirements/{listed.name} lists ...")
                _run(pip_install(python, listed))
                marker.touch()
        _say(f"Python environment: done in {time.monotonic() - start:.1f} s")
    return python


def _run(command: list[str]) -> None:
    # What pip says is of interest when it fails, and standard output is the answer of this program.
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    status = done.returncode
    if status != 0:
        sys.stderr.write(done.stdout.decode("utf-8", "replace"))
        raise _Refusal(f"{' '.join(command)} ended with status {status}")


def clean() -> None:
    """Remove what this project has put into its cache folder, and the folder if nothing else is in it."""
    cache = _cache_dir()
    for name in CACHE_FOLDERS:
        if (cache / name).is_dir():
            _say(f"removing {cache / name}")
            shutil.rmtree(cache / name)
    tag = cache / "CACHEDIR.TAG"
    if tag.exists():
        tag.unlink()
    if cache.is_dir() and not any(cache.iterdir()):
        cache.rmdir()


def main(arguments: list[str]) -> int:
    try:
        return _main(arguments)
    except _Refusal as error:
        _say(f"error: {error}")
    except OSError as error:
        # Only the cache folder is written.
        where = "" if error.filename is None else f" ({error.filename})"
        reason = f"{error.strerror or error}{where}"
        _say(
            f"error: the cache folder {_cache_dir()} cannot be used: {reason}; "
            "set BOUNDARY_BUNDLE_CACHE to a folder that can be written"
        )
    except RuntimeError as error:  # ~ of somebody who has no home
        _say(f"error: the cache folder cannot be found: {error}; set BOUNDARY_BUNDLE_CACHE to a folder")
    except KeyboardInterrupt:
        _say("interrupted; the next run continues")
        return 130
    return 2


def _main(arguments: list[str]) -> int:
    if arguments == ["clean"]:
        clean()
        return 0
    words = arguments[1:]
    no_build = words[:1] == ["--no-build"]
    words = words[1:] if no_build else words
    beside = words[1::2]
    if arguments[:1] == ["python"] and words == [word for name in beside for word in ("--with", name)]:
        sentences = [] if no_build else missing_tools()
        if sentences:
            for sentence in sentences:
                _say(f"error: {sentence}")
            return 2
        found = environment(Path(__file__).resolve().parents[2], beside)
        try:
            print(found, flush=True)
        except OSError as error:
            # Nothing more is to be written at the interpreter's end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise _Refusal(f"cannot write standard output: {error.strerror}") from None
        return 0
    _say(f"usage: {os.path.basename(__file__)} python [--no-build] [--with LOCK]... | clean")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
