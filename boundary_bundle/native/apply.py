"""Apply the series to a copy of the clean tree, after checking that each file is the one it was made for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .process import NativeError, Runner, git_environment

_DIFF = re.compile(r"^diff --git a/(?P<old>.+) b/(?P<new>.+)$")
_INDEX = re.compile(r"^index (?P<old>[0-9a-f]{7,64})\.\.(?P<new>[0-9a-f]{7,64})(?: [0-7]{6})?$")
_FAILED = re.compile(r"^error: patch failed: (?P<file>.+):(?P<line>\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """One file of one patch: paths relative to the tree, and the git blob hashes before and after.

    A hash of None says that there is no such file (one that the patch adds or removes).
    """

    old_path: str
    new_path: str
    old_blob: str | None
    new_blob: str | None


def series(folder: Path) -> tuple[Path, ...]:
    """The patches in ``folder``, in the order of their numbers."""
    return tuple(sorted(path for path in folder.glob("[0-9][0-9][0-9][0-9]-*.patch") if path.is_file()))


def blob_hash(data: bytes) -> str:
    """The name that git gives to these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def changes(patch: Path) -> list[Change]:
    """What a patch in git format says it changes.

    :raises NativeError: for a file without an ``index`` line, whose preimage could not be checked.
    """
    found: list[Change] = []
    paths: tuple[str, str] | None = None
    for line in patch.read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
        if line.startswith("diff --git "):
            if paths is not None:
                raise NativeError(f"{patch.name}: {paths[1]} has no index line, so its preimage cannot be checked")
            match = _DIFF.match(line)
            if match is None:
                raise NativeError(f"{patch.name}: unreadable line {line!r}")
            paths = (match["old"], match["new"])
        elif paths is not None and (match := _INDEX.match(line)):
            found.append(Change(*paths, _or_none(match["old"]), _or_none(match["new"])))
            paths = None
    if paths is not None:
        raise NativeError(f"{patch.name}: {paths[1]} has no index line, so its preimage cannot be checked")
    if not found:
        raise NativeError(f"{patch.name} is not a patch in git format: it changes no file")
    return found


def _or_none(blob: str) -> str | None:
    return None if set(blob) == {"0"} else blob


def check_preimages(patch: Path, tree: Path) -> None:
    """:raises NativeError: naming patch and file if a file is not the one that the patch was made for."""
    for change in changes(patch):
        _check(patch, tree, change.old_path, change.old_blob, "made for")


def _check(patch: Path, tree: Path, name: str, expected: str | None, relation: str) -> None:
    path = tree / name
    if tree.resolve() not in path.resolve().parents:
        raise NativeError(f"{patch.name}: {name} lies outside the tree")
    found = blob_hash(path.read_bytes()) if path.is_file() else None
    matches = found is None if expected is None else found is not None and found.startswith(expected)
    if not matches:
        raise NativeError(
            f"{patch.name} does not fit: {name} should be {expected or 'absent'} ({relation}), "
            f"it is {found or 'absent'}"
        )


def apply_series(patches: Sequence[Path], tree: Path, runner: Runner) -> None:
    """Apply ``patches`` in order to ``tree``, which is changed in place.

    :raises NativeError: naming patch, file and hunk. The tree is then half patched and to be thrown away.
    """
    for patch in patches:
        check_preimages(patch, tree)
        status, text = runner.capture(
            ["git", "-c", "apply.whitespace=nowarn", "apply", "--verbose", "--whitespace=nowarn", str(patch)],
            cwd=tree,
            env=git_environment(tree, user_configuration=False),
        )
        if status != 0:
            raise NativeError(f"{patch.name} cannot be applied{_hunk(patch, text)}; git said:\n{_indented(text)}")
        # git apply inside somebody's repository skips files and still ends with 0.
        for change in changes(patch):
            _check(patch, tree, change.new_path, change.new_blob, "its result")


def _hunk(patch: Path, text: str) -> str:
    match = _FAILED.search(text)
    if match is None:
        return ""
    name, line = match["file"], match["line"]
    current = ""
    for row in patch.read_text(encoding="utf-8", errors="replace").split("\n"):
        if row.startswith("diff --git "):
            current = row
        elif current.endswith(f" b/{name}") and re.match(rf"@@ -{line}[, ]", row):
            return f": {name}, hunk {row}"
    return f": {name}, hunk at line {line}"


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.strip().split("\n")[-30:])
