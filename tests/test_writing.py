"""Where results are written: links, pipes, devices, modes, and files that must not be lost.

Catches: a device node or a link that becomes a regular file, a mode that changes, half a file, an input that is
overwritten.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boundary_bundle import Bundle, Tensor, encode, writing
from boundary_bundle.cli import common, main
from boundary_bundle.cli.common import CommandError, check_target
from boundary_bundle.conformance import runner

Capture = pytest.CaptureFixture[str]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.bundle"
    path.write_bytes(encode(Bundle([Tensor("x", np.arange(6.0))])))
    return path


def read_pipe(path: Path) -> tuple[threading.Thread, list[bytes]]:
    """Somebody who reads a pipe to its end; the pipe has its reader when this returns."""
    found: list[bytes] = []
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(handle, True)

    def read() -> None:
        with open(handle, "rb") as stream:
            while not found:
                if data := stream.read():
                    found.append(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, found


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, second = tmp_path / "far" / "file", tmp_path / "link", tmp_path / "second"
    link.symlink_to(target)
    second.symlink_to("link")
    # One that leads to nothing yet makes what it leads to.
    writing.write_whole(second, [b"a", b"b"])
    assert link.is_symlink()
    assert second.is_symlink()
    assert target.read_bytes() == b"ab"
    target.chmod(0o640)
    writing.write_whole(link, [b"c"])
    assert link.is_symlink()
    assert (target.read_bytes(), mode(target)) == (b"c", 0o640)
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        writing.write_whole(tmp_path / "x", [b""])
    finally:
        os.umask(before)
    assert mode(tmp_path / "x") == 0o640


def test_a_tiny_model_has_the_usual_mode(tmp_path: Path) -> None:
    from boundary_bundle.shards import tiny_models

    before = os.umask(0o022)
    try:
        assert mode(tiny_models.write(tmp_path / "m.gguf", "tied")) == 0o644
    finally:
        os.umask(before)


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="nobody reads"):
        writing.write_whole(pipe, [b"x"])
    thread, found = read_pipe(pipe)
    writing.write_whole(pipe, [b"ab" * 100_000, b"c"])
    thread.join(10)
    assert b"".join(found) == b"ab" * 100_000 + b"c"
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device is: here a file that is said to be none."""
    path = tmp_path / "device"
    path.write_bytes(b"old ")
    inode = path.stat().st_ino
    monkeypatch.setattr(writing, "is_regular", lambda found: False)
    monkeypatch.setattr(writing.os, "replace", lambda *_: pytest.fail("it was replaced"))
    writing.write_whole(path, [b"new"])
    assert path.stat().st_ino == inode
    assert path.read_bytes() == b"old new"


def test_what_cannot_be_written_is_told_beforehand(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        (tmp_path / "loop").symlink_to("loop")
        for name, reason in (
            ("s", "socket"),
            ("", "folder"),
            ("loop", "symbolic links"),
            ("no/x", "there is no folder"),
            ("a\0b", "null"),
            ("x" * 300, "too long"),
        ):
            with pytest.raises(CommandError, match=reason):
                check_target(tmp_path / name)
            with pytest.raises(OSError, match=reason):
                writing.write_whole(tmp_path / name, [b"x"])
        assert stat.S_ISSOCK((tmp_path / "s").lstat().st_mode)
    os.mkfifo(tmp_path / "pipe")
    check_target(tmp_path / "pipe")
    check_target(tmp_path / "new")
    check_target(None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "pipe", "s"]


def test_half_a_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def parts() -> Any:
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writing.write_whole(path, parts())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_input_is_no_target(tmp_path: Path, good: Path, capsys: Capture) -> None:
    link = tmp_path / "link"
    link.symlink_to(good)
    before = good.read_bytes()
    for target in (good, link):
        with pytest.raises(CommandError, match="that is read"):
            check_target(target, None, good)
        assert main(["inspect", str(good), "--html", "--force", "-o", str(target)]) == 2
        assert "that is read" in capsys.readouterr().err
        for option in ("--json", "--junit", "--html"):
            command = ["conformance", "--known-failures", str(good), option, str(target), "--", "testee"]
            assert main(command) == 2
            assert "that is read" in capsys.readouterr().err
    os.link(good, tmp_path / "hard")
    with pytest.raises(CommandError, match="that is read"):
        check_target(tmp_path / "hard", good)
    assert good.read_bytes() == before


def test_every_command_writes_through_links_and_pipes(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A command that has a writer of its own."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    name = str(pipe)
    cases: list[tuple[Any, bytes]] = [
        (lambda: main(["inspect", str(good), "--html", "-o", name]), b"<!"),
        (lambda: main(["convert", str(good), name]), b"\x89"),
        (lambda: common.write_json(pipe, {"a": 1}), b"{"),
        (lambda: runner.write_text(pipe, "<xml/>"), b"<xml"),
    ]
    for command, begin in cases:
        thread, found = read_pipe(pipe)
        assert command() in (0, None)
        thread.join(10)
        assert found[0][: len(begin)] == begin or begin == b"\x89"
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
    capsys.readouterr()
    target, link = tmp_path / "target.npz", tmp_path / "link.npz"
    target.write_bytes(b"")
    target.chmod(0o600)
    link.symlink_to(target)
    assert main(["convert", str(good), str(link)]) == 2
    assert main(["convert", str(good), str(link), "--force"]) == 0
    assert link.is_symlink()
    assert mode(target) == 0o600
    assert target.stat().st_size > 0


def test_the_null_device_stays_one(good: Path, capsys: Capture) -> None:
    """Only with every other test of this file passed: its regular stand-in is above."""
    assert writing._is_direct(os.devnull, os.stat(os.devnull))
    assert main(["convert", str(good), os.devnull]) == 0
    common.write_json(Path(os.devnull), {})
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    capsys.readouterr()


@pytest.mark.parametrize("option", ["--vectors", "--known-failures"])
def test_pipes_are_no_inputs(option: str, tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["conformance", option, str(tmp_path / "pipe"), "--", "testee"]) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_the_empty_name(capsys: Capture) -> None:
    """It would be the working folder."""
    for command in (
        ["run", "--prompt", "x", "--model", ""],
        ["run", "--prompt", "x", "--model", "m", "--json", ""],
        ["validate", ""],
        ["inspect", "x", "--html", "-o", ""],
        ["convert", "x", ""],
        ["shim", "-o", ""],
        ["fixtures", "--family", "all", "-o", ""],
        ["conformance", "--json", "", "--", "x"],
    ):
        assert main(command) == 2
        assert "the name is empty" in capsys.readouterr().err
