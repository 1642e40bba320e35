"""Help and shell completion: nothing without its words, no example that would not run, scripts that shells take."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from boundary_bundle.cli import _parser, main
from boundary_bundle.cli.completion import SHELLS, commands_of
from boundary_bundle.cli.manual import PAGES

PARSER = _parser()
COMMANDS = {
    name: command
    for action in PARSER._actions
    if isinstance(action, argparse._SubParsersAction)
    for name, command in action.choices.items()
}


def script(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert main(["completion", shell]) == 0
    return written.getvalue()


def test_every_command_has_its_page() -> None:
    assert set(PAGES) == set(COMMANDS)
    for name, page in PAGES.items():
        assert page.examples
        assert set(page.see) <= set(COMMANDS) - {name}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name: str) -> None:
    assert COMMANDS[name].description
    assert [action.dest for action in COMMANDS[name]._actions if not action.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_commands_that_would_run(name: str) -> None:
    for _, line in PAGES[name].examples:
        words = shlex.split(line)
        assert words[:2] == ["boundary-bundle", name]
        assert PARSER.parse_args(words[1:]).command == name


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = COMMANDS[name] if name else PARSER
    text = parser.format_help()
    examples = {f"      {line}" for _, line in PAGES[name].examples} if name else set()
    assert [line for line in text.splitlines() if len(line) > 80 and line not in examples] == []
    assert "exit status" in text.lower()
    assert examples <= set(text.splitlines())


def test_completion_knows_every_command_and_option() -> None:
    found = {command.name: command for command in commands_of(PARSER)}
    assert set(found) == set(COMMANDS)
    for shell in SHELLS:
        text = script(shell)
        for name, command in found.items():
            assert name in text
            for option in command.options:
                assert all(word.lstrip("-") in text for word in option.names if word != "-h")


def complete_in_bash(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    program = (
        f"source {shlex.quote(str(folder / 'script'))}\n"
        f"COMP_WORDS=({shlex.join(('boundary-bundle', *words))})\n"
        f"COMP_CWORD={len(words)}\n_boundary_bundle\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    )
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
def test_bash(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script("bash"))
    (tmp_path / "a file.bbdb").touch()
    (tmp_path / "folder").mkdir()
    assert complete_in_bash(tmp_path, "val") == ["validate"]
    assert set(complete_in_bash(tmp_path, "")) >= set(COMMANDS)
    assert complete_in_bash(tmp_path, "validate", "--can") == ["--canonical"]
    assert complete_in_bash(tmp_path, "validate", "a") == ["a file.bbdb"]
    assert complete_in_bash(tmp_path, "conformance", "--class", "") == ["core", "stream"]
    assert complete_in_bash(tmp_path, "shim", "-o", "") == ["folder"]
    assert complete_in_bash(tmp_path, "completion", "") == list(SHELLS)
    assert complete_in_bash(tmp_path, "run", "--tokens", "") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is missing")
def test_zsh(tmp_path: Path) -> None:
    """The script is loaded by zsh's completion system, and its functions are there."""
    (tmp_path / "_boundary-bundle").write_text(script("zsh"))
    program = (
        f"fpath=({shlex.quote(str(tmp_path))} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path / 'dump'}; "
        "source $fpath[1]/_boundary-bundle; print $_comps[boundary-bundle]; whence -w _boundary_bundle"
    )
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.stdout.split()) == ("", ["_boundary_bundle", "_boundary_bundle:", "function"])


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is missing")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("boundary-bundle val", {"validate"}),
        ("boundary-bundle validate --can", {"--canonical"}),
        ("boundary-bundle conformance --class ", {"core", "stream"}),
        ("boundary-bundle completion ", set(SHELLS)),
    ],
)
def test_fish(tmp_path: Path, line: str, wanted: set[str]) -> None:
    (tmp_path / "script").write_text(script("fish"))
    program = f"source {tmp_path / 'script'}; complete -C {shlex.quote(line)}"
    done = subprocess.run(["fish", "--no-config", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert {row.partition("\t")[0] for row in done.stdout.splitlines()} == wanted
