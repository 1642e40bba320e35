"""Get the pinned llama.cpp into the cache, verified, and record where it came from.

Two ways lead to the same files: the exact commit from upstream by git, or the source archive of a
package that holds a whole llama.cpp tree next to the pin. ``$BOUNDARY_BUNDLE_SOURCE`` chooses:
``git``, ``archive``, or the path of a tree of one's own; a release of which patches/ holds a series of
its own (``11434``) is another pin, with that series. Without it a tree that is in the cache already is
used; else upstream if it answers at once; else the archive.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from . import pin
from .download import pip_download, stamp_now, verify_sha256
from .process import Lock, NativeError, Runner, git_environment
from .progress import Reporter

SOURCE_VARIABLE = "BOUNDARY_BUNDLE_SOURCE"
#: Later releases, by the number that names a series of their own: patches/<number>/.
RELEASES = {version.split(".")[0]: version for version in pin.LATER_ARCHIVES}
_PROBE_SECONDS = 3
_TREE = "llama.cpp"
_RECORD = "provenance.json"


def chosen_release() -> str | None:
    """The later release that ``$BOUNDARY_BUNDLE_SOURCE`` chooses, None for the pin or a tree of one's own."""
    choice = os.environ.get(SOURCE_VARIABLE)
    return choice if choice in RELEASES else None


@dataclass(frozen=True)
class Source:
    """A clean llama.cpp tree. ``hash`` names its content; ``origin`` is git, archive or directory."""

    origin: str
    tree: Path
    hash: str
    provenance: dict[str, Any]


def ensure_source(
    cache: Path,
    *,
    choice: str | None = None,
    reporter: Reporter | None = None,
    runner: Runner | None = None,
) -> Source:
    """The clean tree, from the cache if it is there. ``choice`` overrides ``$BOUNDARY_BUNDLE_SOURCE``.

    :raises NativeError: with the reason, if no way leads to a verified tree.
    """
    reporter = reporter or Reporter()
    runner = runner or Runner()
    if choice is None:
        choice = os.environ.get(SOURCE_VARIABLE) or "auto"
    if choice in RELEASES:
        return ensure_archive(cache, RELEASES[choice], reporter=reporter, runner=runner)
    if choice not in ("auto", "git", "archive"):
        return directory_source(Path(choice))
    wanted = {"git": ("git",), "archive": ("archive",), "auto": ("git", "archive")}[choice]
    if found := _cached(cache, wanted):
        return found
    with Lock(cache / "locks" / "source.lock").held("getting llama.cpp", reporter.note):
        if found := _cached(cache, wanted):
            return found
        if choice == "git" or (choice == "auto" and _upstream_answers(cache, reporter, runner)):
            try:
                return _from_git(cache, reporter, runner)
            except NativeError as error:
                if choice == "git":
                    raise
                reporter.note(f"{error}\nusing the source archive instead")
        return _from_archive(cache, pin.DEFAULT_ARCHIVE, reporter, runner)


def ensure_archive(
    cache: Path, version: str, *, reporter: Reporter | None = None, runner: Runner | None = None
) -> Source:
    """The tree of an archive in :data:`pin.ARCHIVES` or :data:`pin.LATER_ARCHIVES`, downloaded if need be."""
    item = {**pin.ARCHIVES, **pin.LATER_ARCHIVES}[version]
    reporter = reporter or Reporter()
    with Lock(cache / "locks" / "source.lock").held(f"getting {item.label}", reporter.note):
        if found := _read(_archive_place(cache, item)):
            return found
        return _from_archive(cache, item, reporter, runner or Runner())


# -- what is in the cache ---------------------------------------------------------------------


def _git_place(cache: Path) -> Path:
    return cache / "sources" / f"git-{pin.UPSTREAM_COMMIT[:16]}"


def _archive_place(cache: Path, item: pin.Download) -> Path:
    return cache / "sources" / f"archive-{item.version}-{item.sha256[:16]}"


def _cached(cache: Path, wanted: tuple[str, ...]) -> Source | None:
    places = {"git": _git_place(cache), "archive": _archive_place(cache, pin.DEFAULT_ARCHIVE)}
    for origin in wanted:
        if found := _read(places[origin]):
            return found
    return None


def _read(place: Path) -> Source | None:
    # The folder appears by one rename, tree and record together.
    try:
        record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        return Source(record["origin"], place / _TREE, record["hash"], record)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _fresh_place(place: Path) -> Iterator[Path]:
    """A temporary folder beside ``place`` that becomes ``place`` if the block ends well."""
    place.parent.mkdir(parents=True, exist_ok=True)
    # The caller holds the lock, so that whatever lies here was left by a run that was cut short.
    for stale in place.parent.glob(".partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=place.parent))
    try:
        yield temporary
        if place.exists():
            shutil.rmtree(place)
        os.rename(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _record(temporary: Path, provenance: dict[str, Any]) -> None:
    text = json.dumps(provenance, indent=2, sort_keys=True) + "\n"
    (temporary / _RECORD).write_text(text, encoding="utf-8")


# -- by git -----------------------------------------------------------------------------------


def _upstream_answers(cache: Path, reporter: Reporter, runner: Runner) -> bool:
    if shutil.which("git") is None:
        return False
    status, _ = runner.capture(
        ["git", "ls-remote", "--quiet", pin.UPSTREAM_URL, "HEAD"],
        cwd=cache,
        env=git_environment(cache, user_configuration=True),
        timeout=_PROBE_SECONDS,
    )
    if status != 0:
        reporter.note("upstream's git host does not answer; using the source archive next to the pin")
    return status == 0


def _from_git(cache: Path, reporter: Reporter, runner: Runner) -> Source:
    place = _git_place(cache)
    with _fresh_place(place) as temporary, reporter.step(f"fetching llama.cpp {pin.UPSTREAM_COMMIT[:12]}"):
        tree = temporary / _TREE
        tree.mkdir()
        env = git_environment(tree, user_configuration=True)
        log = temporary / "git.log"
        # The files must be upstream's bytes, whatever line ends or filters the user prefers.
        git = ["git", "-c", "core.autocrlf=false", "-c", "core.eol=lf", "-c", "advice.detachedHead=false"]
        for arguments in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", "--no-tags", pin.UPSTREAM_URL, pin.UPSTREAM_COMMIT],
            ["checkout", "--quiet", "--detach", "FETCH_HEAD"],
        ):
            runner.stream(f"git {arguments[0]} of llama.cpp", [*git, *arguments], log=log, cwd=tree, env=env)
        status, text = runner.capture([*git, "rev-parse", "HEAD"], cwd=tree, env=env)
        head = text.strip()
        if status != 0 or head != pin.UPSTREAM_COMMIT:
            raise NativeError(f"upstream gave another commit: expected {pin.UPSTREAM_COMMIT}, found {head}")
        shutil.rmtree(tree / ".git")
        _record(
            temporary,
            {
                "origin": "git",
                "hash": f"git:{pin.UPSTREAM_COMMIT}",
                "pin": pin.UPSTREAM_COMMIT,
                "is_the_pin": True,
                "note": "the pinned commit itself",
                "fetched": stamp_now(),
            },
        )
    return _must_read(place)


# -- by archive -------------------------------------------------------------------------------


def _from_archive(cache: Path, item: pin.Download, reporter: Reporter, runner: Runner) -> Source:
    place = _archive_place(cache, item)
    note = pin.LATER_NOTE if item.version in pin.LATER_ARCHIVES else pin.NEIGHBOUR_NOTE
    with _fresh_place(place) as temporary:
        downloads = temporary / "download"
        downloads.mkdir()
        archive = pip_download(item, downloads, reporter, runner)
        with reporter.step(f"unpacking {item.label}"):
            unpack_archive(archive, item.sha256, temporary / _TREE)
        shutil.rmtree(downloads)
        _record(
            temporary,
            {
                "origin": "archive",
                "hash": f"archive:{item.sha256}",
                "project": item.project,
                "version": item.version,
                "sha256": item.sha256,
                "pin": pin.UPSTREAM_COMMIT,
                "is_the_pin": False,
                "note": note,
                "fetched": stamp_now(),
            },
        )
    reporter.note(f"note: {item.label} is {note}")
    return _must_read(place)


def _must_read(place: Path) -> Source:
    found = _read(place)
    if found is None:
        raise NativeError(f"{place} vanished while it was being made")
    return found


# What a release needs is 160 MB in 3,600 members; the largest has 16 MB.
MAX_UNPACKED = 1 << 29
MAX_MEMBERS = 50_000


class _Unpacked:
    """The decompressed bytes of an archive, read forwards and never past ``MAX_UNPACKED``.

    All that tarfile asks for passes here, headers and what it skips as well: a decompression bomb ends after so many
    bytes, wherever in the archive it lies.
    """

    def __init__(self, stream: BinaryIO, name: str):
        self._stream = stream
        self._name = name
        self._left = MAX_UNPACKED

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise NativeError(f"{self._name} is refused: it unpacks to more than {MAX_UNPACKED} bytes")
        return data


def unpack_archive(archive: Path, expected_sha256: str, tree: Path) -> None:
    """Verify ``archive``, a .tar.gz, and unpack its ``llama.cpp/`` folder as the new folder ``tree``.

    Every member's name is checked, also of members that are not unpacked: absolute names, ``..``, control characters,
    devices, hard links, repeated names, names that differ in case alone, members below a link, links that lead out of
    the folder, by themselves or through each other, and sizes past :data:`MAX_UNPACKED` are refused. A member's size
    is looked at before a byte of it is written.

    :raises NativeError: with expected and found hash, or with the member's name.
    """
    verify_sha256(archive, expected_sha256, archive.name)
    tree.mkdir()
    unpacking = _Unpacking(tree)
    try:
        with gzip.open(archive) as stream:
            # "r|": forwards only, so that no length in a header leads back to where the reader has been.
            plain = cast(BinaryIO, _Unpacked(cast(BinaryIO, stream), archive.name))
            with tarfile.open(fileobj=plain, mode="r|") as tar:
                for member in tar:
                    unpacking.add(tar, member)
        unpacking.check_links()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise NativeError(f"{archive.name} cannot be unpacked: {error}") from error
    if not (tree / "CMakeLists.txt").is_file():
        raise NativeError(f"{archive.name} holds no {_TREE}/CMakeLists.txt")


def _refused(member: str, reason: str) -> NativeError:
    return NativeError(f"archive member {member!r} is refused: {reason}")


class _Unpacking:
    """The members of one archive on their way into a tree."""

    def __init__(self, tree: Path):
        self.tree = tree
        self.count = 0
        self.declared = 0
        # Member's name by its place below the tree.
        self.links: dict[PurePosixPath, str] = {}
        # A name or a part of one as a file system without case sees it -> as it was spelled first.
        self.spelled: dict[str, str] = {}

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.count += 1
        self.declared += member.size
        if self.count > MAX_MEMBERS:
            raise _refused(member.name, f"the archive has more than {MAX_MEMBERS} members")
        if member.size < 0:
            raise _refused(member.name, f"it has {member.size} bytes")
        if self.declared > MAX_UNPACKED:
            raise _refused(member.name, f"with its {member.size} bytes the archive unpacks to more than {MAX_UNPACKED}")
        inside = _path_inside(member)
        if inside is not None:
            self._unpack(tar, member, inside)

    def _unpack(self, tar: tarfile.TarFile, member: tarfile.TarInfo, inside: PurePosixPath) -> None:
        self._check_spelling(member.name, inside)
        for above in inside.parents:
            if above in self.links:
                raise _refused(member.name, f"{self.links[above]!r}, which it lies below, is a link")
        target = self.tree / inside
        if member.isdir() and inside not in self.links:
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            raise _refused(member.name, "it is there twice")
        if member.issym():
            end = member.linkname
            if not end or not end.isprintable() or "\\" in end or os.path.isabs(end):
                raise _refused(member.name, f"link to {end!r} leads out of {_TREE}/ or nowhere")
            target.symlink_to(end)
            self.links[inside] = member.name
            return
        if not member.isreg():
            raise _refused(member.name, "neither file, folder nor symbolic link")
        content = tar.extractfile(member)
        if content is None:
            raise NativeError(f"archive member {member.name!r} has no content")
        with content, open(target, "xb") as sink:
            shutil.copyfileobj(content, sink, 1 << 20)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)

    def _check_spelling(self, name: str, inside: PurePosixPath) -> None:
        # macOS knows neither case nor how an accent was written.
        for part in (inside, *inside.parents):
            plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", str(part)).casefold())
            before = self.spelled.setdefault(plain, str(part))
            if before != str(part):
                raise _refused(name, f"{before!r} differs from it in case alone")

    def check_links(self) -> None:
        """Each link ends in the tree; once all are there, since one may lead through another that came later."""
        top = self.tree.resolve()
        for inside, name in self.links.items():
            link = self.tree / inside
            end = Path(os.path.realpath(link))
            if top not in end.parents:
                raise _refused(name, f"link to {os.readlink(link)!r} leads out of {_TREE}/")


def _path_inside(member: tarfile.TarInfo) -> PurePosixPath | None:
    """The member's path below ``<top>/llama.cpp``, or None for one that is not of it."""
    name = member.name
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name:
        raise _refused(name, "its path leads out of the archive's folder")
    if not name.isprintable():
        raise _refused(name, "its name holds a character that is not printable")
    parts = [part for part in parts if part not in ("", ".")]
    if len(parts) < 2 or parts[1] != _TREE:
        return None
    return PurePosixPath(*parts[2:])


# -- a tree of one's own ----------------------------------------------------------------------


def directory_source(tree: Path) -> Source:
    """A tree that the user names. Its hash is over every file in it, so that an edit makes a new build."""
    tree = tree.expanduser().absolute()
    if not (tree / "CMakeLists.txt").is_file():
        raise NativeError(f"{SOURCE_VARIABLE}: {tree} is neither 'git', 'archive' nor a llama.cpp tree")
    found = f"tree:{hash_tree(tree)}"
    return Source(
        "directory",
        tree,
        found,
        {
            "origin": "directory",
            "hash": found,
            "path": str(tree),
            "pin": pin.UPSTREAM_COMMIT,
            "is_the_pin": False,
            "note": "a tree named by the user; what it holds is not checked against the pin",
        },
    )


def hash_tree(tree: Path) -> str:
    """SHA-256 over names, kinds and bytes of everything below ``tree`` except a .git folder at its top."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(tree):
        if Path(folder) == tree:
            names[:] = [name for name in names if name != ".git"]
            files = [name for name in files if name != ".git"]
        names.sort()
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*files, *links]):
            path = Path(folder, name)
            relative = path.relative_to(tree).as_posix().encode()
            if path.is_symlink():
                kind, content = b"l", os.readlink(path).encode()
            else:
                kind, content = b"f", path.read_bytes()
            digest.update(b"%s %d %s %d\0" % (kind, len(relative), relative, len(content)))
            digest.update(content)
    return digest.hexdigest()


def copy_tree(source: Source, target: Path) -> None:
    """A copy of the clean tree to patch and build in; the clean one is never written to."""
    top = str(source.tree)

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {".git"} & set(names) if folder == top else set()

    shutil.copytree(source.tree, target, symlinks=True, ignore=ignore)
