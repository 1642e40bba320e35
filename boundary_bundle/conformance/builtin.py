"""Testees that come with the project, by name: their commands, made when they are asked for.

``python`` and ``c`` are the codecs, ``libllama`` is the C codec inside the patched library,
and the Kaitai ones are decoders that share no code with the codecs (:mod:`.kaitai`).
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..native import NativeError, build, cache_dir
from ..native.bootstrap import C_NAMES, find_tool
from ..native.build import TESTEE
from ..native.paths import prepare_cache
from ..places import shim_folder
from . import kaitai


class Unavailable(Exception):
    """A built-in testee cannot be had on this machine; one sentence."""


def command(name: str) -> list[str]:
    """The command of the built-in testee ``name``, one of :data:`NAMES`. Raises Unavailable."""
    try:
        return _COMMANDS[name]()
    except (NativeError, kaitai.KaitaiError) as error:
        raise Unavailable("; ".join(str(error).splitlines())) from None
    except OSError as error:  # such as a full disk
        raise Unavailable(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


def _python() -> list[str]:
    return [sys.executable, "-m", "boundary_bundle.conformance.testee_python"]


def _c() -> list[str]:
    shim = shim_folder()
    sources = [shim / "testee.c", shim / "boundary_bundle.c"]
    if not sources[0].is_file():
        raise Unavailable("its program is compiled from a clone of the repository, which this is not")
    compiler = find_tool("CC", C_NAMES)
    if compiler is None:
        raise Unavailable("no C compiler was found (cc)")
    state = hashlib.sha256(compiler.encode())
    for path in (*sources, shim / "boundary_bundle.h"):
        state.update(path.read_bytes())
    place = prepare_cache(cache_dir()) / "builds" / f"testee-{state.hexdigest()[:16]}"
    if not place.is_dir():
        place.parent.mkdir(exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".testee-", dir=place.parent))
        try:
            _compile(compiler, sources, partial / "testee")
            # Whoever made it at the same time has made the same.
            with contextlib.suppress(OSError):
                partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return [str(place / "testee")]


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    words = [compiler, "-std=c11", "-O2", *map(str, sources), "-o", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise Unavailable(f"{compiler} cannot compile it: {last}")


def _libllama() -> list[str]:
    return [str(build("patched").programs[TESTEE])]


_COMMANDS: Final[dict[str, Callable[[], list[str]]]] = {
    "python": _python,
    "c": _c,
    "libllama": _libllama,
    "kaitai-javascript": lambda: kaitai.commands()["javascript"],
    "kaitai-python": lambda: kaitai.commands()["python"],
}
#: Names for :func:`command`.
NAMES: Final = tuple(_COMMANDS)
