"""The command line where something around it is missing: streams, encodings, the cache folder, sound input.

Catches: a traceback, an exit status that means something else, a wait for what never comes, and work that is begun
although its options already say that it is in vain.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild, NativeError, bootstrap, paths
from boundary_bundle.native.process import Lock
from boundary_bundle.shards import PlanError, parse_cuts, read_model_file

CLI = [sys.executable, "-m", "boundary_bundle.cli"]
SMALL = ["--threads", "1", "--ctx", "512", "--batch", "16", "--ubatch", "8"]


def started(arguments: Sequence[str], redirection: str = "", **environment: str) -> tuple[int, str, str]:
    """What a shell sees of a command: exit status and both outputs."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *CLI, *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def one_sentence(found: tuple[int, str, str], words: str) -> None:
    status, _, err = found
    assert status == 2, err
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert words in err


def run(worker: Path, model: Path, *more: str) -> list[str]:
    return ["run", "--worker", str(worker), "--model", str(model), "--prompt", "split this", *SMALL, *more]


# -- standard streams


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("command", [["validate", "x"], ["--help"], ["run", "--help"], ["completion", "bash"]])
def test_a_full_disk(command: list[str], tmp_path: Path) -> None:
    if command[0] == "validate":
        command = ["validate", "--json", str(tmp_path)]
    one_sentence(started(command, ">/dev/full"), "cannot write standard output: No space left on device")
    # Nobody hears of it, but the status stands.
    assert started(command, ">/dev/full 2>/dev/full")[0] == 2
    assert started(["validate", "/nonexistent"], "2>/dev/full")[0] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_while_setting_up(unbuffered: str) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >/dev/full', "sh", sys.executable, "-m", "boundary_bundle.native", "where"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    one_sentence((done.returncode, "", done.stderr), "cannot write standard output: No space left on device")


@pytest.mark.shards
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_during_a_run(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    command = run(patched_build.worker, tiny["tied"], "--cuts", "3", "--tokens", "3")
    one_sentence(started(command, ">/dev/full"), "cannot write standard output: No space left on device")
    # As the place of the result.
    one_sentence(started([*command, "--json", "/dev/full"]), "cannot write /dev/full: No space left on device")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_closed_streams(tmp_path: Path) -> None:
    for command in (["validate", str(tmp_path)], ["completion", "bash"], ["run", "--help"]):
        one_sentence(started(command, ">&-"), "standard output is closed")
    assert started(["validate", str(tmp_path)], "2>&-")[:2] == (2, "")
    assert started(["validate", str(tmp_path)], ">&- 2>&-")[0] == 2


@pytest.mark.shards
def test_a_run_with_closed_streams(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """What is opened first must not become the standard input or error of every worker."""
    command = run(patched_build.worker, tiny["tied"], "--cuts", "3", "--tokens", "3", "--ignore-eos")
    expected = started(command)[1]
    assert expected
    assert started(command, "<&-")[:2] == (0, expected)
    assert started(command, "2>&-")[:2] == (0, expected)


@pytest.mark.shards
def test_a_terminal_that_lacks_characters(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    command = run(patched_build.worker, tiny["tied"], "--tokens", "60", "--ignore-eos")
    _, plain, _ = started(command, PYTHONIOENCODING="utf-8")
    assert not plain.isascii()
    status, out, err = started(command, PYTHONIOENCODING="ascii")
    assert status == 0, err
    assert out == plain.encode("ascii", "replace").decode()


# -- what nobody foresaw


@pytest.mark.parametrize("error", [RuntimeError("planted\n in two lines"), MemoryError(), OSError(5, "planted")])
def test_an_unforeseen_failure(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from boundary_bundle.cli import validate

    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr(validate, "validate", fail)
    for value, traced in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("BOUNDARY_BUNDLE_TRACEBACK", value)
        assert main(["validate", "x"]) == 2
        err = capsys.readouterr().err
        assert ("Traceback" in err) == traced
        assert err.splitlines()[-1].startswith("error: ")
        assert traced or err.count("\n") == 1
        assert isinstance(error, MemoryError) or "planted" in err


def test_an_interrupt_while_the_commands_load() -> None:
    program = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "boundary_bundle.shards":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from boundary_bundle.cli import main
sys.exit(main(["validate", "x"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# -- the cache folder


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/boundary-bundle", "loop", "~nobody-of-that-name/x"])
def test_a_cache_folder_that_cannot_be_used(place: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    cache = place if place[0] in "/~" else str(tmp_path / place)
    for command in (["run", "--model", str(tiny["tied"]), "--prompt", "x"], ["demo"], ["fixtures", "--family", "all"]):
        more = ["-o", str(tmp_path / "out")] if command[0] == "fixtures" else []
        one_sentence(started([*command, *more], BOUNDARY_BUNDLE_CACHE=cache), "set BOUNDARY_BUNDLE_CACHE")
    for program, words in (
        ([sys.executable, "-I", bootstrap.__file__], ["python", "--no-build"]),
        ([sys.executable, "-m", "boundary_bundle.native"], ["model"]),
    ):
        done = subprocess.run(
            [*program, *words],
            env={**os.environ, "BOUNDARY_BUNDLE_CACHE": cache},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        one_sentence((done.returncode, done.stdout, done.stderr), "set BOUNDARY_BUNDLE_CACHE")
    assert (tmp_path / "file").read_text() == ""


def test_a_cache_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for an ordinary user; a privileged one may write anywhere."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", "somewhere")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        with pytest.raises(NativeError, match="Read-only file system; set BOUNDARY_BUNDLE_CACHE"):
            paths.prepare_cache(tmp_path / "cache")
    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(NativeError, match="Read-only file system; set BOUNDARY_BUNDLE_CACHE"),
        Lock(tmp_path / "locks" / "x.lock").held("x", print),
    ):
        pass


# -- models, prompts, options


def test_a_model_that_is_no_file(tmp_path: Path) -> None:
    """Nobody writes into the pipe: whoever opens it waits for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link, Path("/dev/zero")):
        for command in (
            ["run", "--prompt", "x"],
            ["describe"],
            ["demo"],
            ["fixtures", "--cuts", "1", "-o", str(tmp_path / "out")],
        ):
            one_sentence(started([*command, "--model", str(path)]), "is not a regular file")


def test_a_model_with_damaged_text(tiny: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    whole = tiny["tied"].read_bytes()
    bad.write_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0\xff\xfe\xfd\xfc\xfb", 1))
    with pytest.raises(PlanError, match="damaged GGUF file: its general.architecture"):
        read_model_file(bad)
    with pytest.raises(PlanError, match="cannot read"):
        read_model_file(tmp_path / "a\0b")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompt", "caf\udce9"], "the prompt is not UTF-8: its character 4"),
        (["--tokens", "1", "--speed-runs", "1"], "give --tokens 2 or more"),
        (["--all-logits"], "--all-logits is for --check"),
        (["--cuts", "99999999999999999999"], "a model of n layers can be cut at 1 to n-1"),
        (["--cuts", "-1"], "a model of n layers can be cut at 1 to n-1"),
        (["--model", ""], "argument --model: the name is empty"),
        (["--json", "M"], "that is read"),
        (["--json", "/proc/version/x"], "Not a directory"),
    ],
)
def test_refused_before_a_worker_is_started(
    more: list[str], words: str, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's program is not even there."""
    model = tiny["tied"]
    before = model.read_bytes()
    assert main(run(Path("/nonexistent"), model, *[str(model) if word == "M" else word for word in more])) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert "cannot start" not in err
    assert model.read_bytes() == before


def test_a_prompt_of_bytes_from_the_shell(tiny: dict[str, Path]) -> None:
    for command in (
        ["run", "--model", str(tiny["tied"]), "--worker", "/nonexistent"],
        ["demo", "--model", str(tiny["tied"]), "--worker", "/nonexistent"],
        ["fixtures", "--family", "all", "-o", "/nonexistent/x", "--worker", "/nonexistent"],
    ):
        one_sentence(started([*command, "--prompt", os.fsdecode(b"\xff")]), "the prompt is not UTF-8")


def test_a_shim_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last of its files cannot be written: none is."""
    (tmp_path / "boundary_bundle.mk").mkdir()
    assert main(["shim", "-o", str(tmp_path), "--force"]) == 2
    assert "it is a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["boundary_bundle.mk"]


def test_cuts_name_their_limits() -> None:
    for text in ("-1", "9" * 20, "x"):
        with pytest.raises(PlanError, match="1 to n-1"):
            parse_cuts(text)


@pytest.mark.shards
def test_one_token_is_no_tokens(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = run(patched_build.worker, tiny["tied"], "--prompt", "", "--tokens", "600")
    assert main(command) == 2
    assert "a prompt of 1 token and 600 more need a context of 600, but --ctx is 512" in capsys.readouterr().err


@pytest.mark.shards
def test_fixtures_do_not_replace_their_model(
    patched_build: NativeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    worker = ["--worker", str(patched_build.worker), "-o", str(folder), "--tokens", "0"]
    assert main(["fixtures", "--family", "tied", *worker]) == 0
    model = folder / "tied" / "model.gguf"
    assert main(["fixtures", "--model", str(model), "--cuts", "2", "--force", *worker]) == 2
    assert "lies in it" in capsys.readouterr().err
    assert model.is_file()
