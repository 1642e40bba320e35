"""Two decoders that share no code with the codecs: compiled from spec/boundary_bundle.ksy.

``python -m boundary_bundle.conformance.kaitai`` fetches what they need into the cache
folder (the Kaitai Struct compiler from npm, its runtimes from npm and PyPI, each file with the
hash that spec/testees/kaitai pins), compiles the description to JavaScript and to Python, and
prints the two commands for ``boundary-bundle conformance``. The next time it only prints.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..native.paths import cache_dir, prepare_cache
from ..places import spec_folder

#: In spec/testees/kaitai: what npm and pip install, with the hashes that they check, and what compiles.
NPM: Final = ("package.json", "package-lock.json")
PYPI: Final = "requirements.txt"
COMPILER: Final = "compile.js"


class KaitaiError(Exception):
    """The testees cannot be made; one sentence."""


def missing() -> str | None:
    """Which program is not there that making the testees takes, or None."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"{program} is missing"
    return None


def _run(command: Sequence[str], what: str, **environment: str) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KaitaiError(f"{what}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        raise KaitaiError(f"{what}: {last}")


def _make(folder: Path) -> None:
    pinned = spec_folder() / "testees" / "kaitai"
    modules = folder / "node_modules"
    for name in NPM:
        shutil.copy(pinned / name, folder)
    npm = ["npm", "ci", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
    _run(npm, "npm cannot install the Kaitai Struct compiler")
    python = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "python")]
    python += ["--require-hashes", "--only-binary", ":all:", "-r", str(pinned / PYPI)]
    _run(python, "pip cannot install Kaitai's runtime")
    compiler = str(pinned / COMPILER)
    for language in ("javascript", "python"):
        _run(["node", compiler, language, str(folder)], f"no {language} from the description", NODE_PATH=str(modules))


def prepare() -> Path:
    """The folder with the compiled description and what it needs, made if it is not there. Raises KaitaiError."""
    reason = missing()
    if reason is not None:
        raise KaitaiError(reason)
    state = hashlib.sha256(repr(sys.version_info[:2]).encode("ascii"))
    for name in ("boundary_bundle.ksy", *(f"testees/kaitai/{file}" for file in (*NPM, PYPI, COMPILER))):
        state.update((spec_folder() / name).read_bytes())
    parent = prepare_cache(cache_dir()) / "builds"
    place = parent / f"kaitai-{state.hexdigest()[:16]}"
    if not place.is_dir():
        parent.mkdir(exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".kaitai-", dir=parent))
        try:
            _make(partial)
            # Whoever made it at the same time has made the same.
            with contextlib.suppress(OSError):
                partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return place


def commands() -> dict[str, list[str]]:
    """Language -> the command of the testee, for :func:`conformance.runner.run`. Raises KaitaiError."""
    place = prepare()
    testees = spec_folder() / "testees" / "kaitai"
    # env sets the paths, so that the command works wherever it is given.
    return {
        "javascript": [
            *("env", f"NODE_PATH={place / 'node_modules'}"),
            *("node", str(testees / "kaitai_testee.js"), str(place)),
        ],
        "python": [
            *("env", f"PYTHONPATH={place / 'python'}"),
            *(sys.executable, str(testees / "kaitai_testee.py"), str(place)),
        ],
    }


def main() -> int:
    try:
        # At once: whoever wants the first line only may have left before a second write.
        print("\n".join(map(shlex.join, commands().values())))
    except KaitaiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
