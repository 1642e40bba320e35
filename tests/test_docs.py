"""Runs what the documents show: every command block and every Python block, in order, as a reader would.

Catches: an option, name or result that a document promises and the code no longer has.

How blocks are told apart: ``sh`` and ``python`` fences are run, also four spaces and ``boundary-bundle``. A fence
without a language only shows something and must hold no command; any other language must be known here. The line
``<!-- not run: REASON -->`` before a block takes it out; they are counted below.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from boundary_bundle.shards import tiny_models

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "spec/cookbook.md", "spec/extending.md", "spec/testee-protocol.md")
#: Targets of the Makefile that the text names; none is a block. `make test` would run this test again, `make demo` is
#: run by tests/shards/test_cli.py as the command behind it, `make clean-cache` would remove what other tests stand on,
#: and `make bench` with its sisters measures for minutes.
NOT_RUN_BY_NAME = (
    "make demo",
    "make test",
    "make clean-cache",
    "make bench",
    "make bench-sessions",
    "make bench-shards",
    "make soak",
)
#: Blocks taken out by the marker, for each document. Raise it with a reason that a reader would accept.
MARKED = dict.fromkeys(DOCUMENTS, 0)
#: What a line of a block that is not run must not begin with.
COMMAND = re.compile(r"(\$ )?(boundary-bundle|python3?|pip|make|cc|cmake|git|sh|bash|\./[\w-]+)\s")

_FENCE = re.compile(r"^```(\S*)\s*$")
_MARKER = re.compile(r"<!-- not run: .+ -->")


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    text: str
    marked: bool

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str, text: str) -> list[Block]:
    """Fenced blocks, and indented ones outside of lists that begin with our command."""
    found: list[Block] = []
    lines = text.split("\n")
    place = 0
    while place < len(lines):
        before = next((line for line in reversed(lines[:place]) if line.strip()), "")
        marked = _MARKER.fullmatch(before.strip()) is not None
        start = place + 1
        if match := _FENCE.match(lines[place]):
            end = lines.index("```", start)
            found.append(Block(document, start, match[1], "\n".join(lines[start:end]) + "\n", marked))
            place = end
        elif lines[place].startswith("    boundary-bundle "):
            found.append(Block(document, start, "sh", lines[place].strip() + "\n", marked))
        place += 1
    return found


ALL = {name: blocks(name, (ROOT / name).read_text("utf-8")) for name in DOCUMENTS}


def test_blocks_are_found() -> None:
    text = "x\n\n    boundary-bundle a\n\n<!-- not run: needs two machines -->\n```sh\nb\nc\n```\n\n```\nd\n```\n"
    assert blocks("x", text) == [
        Block("x", 3, "sh", "boundary-bundle a\n", False),
        Block("x", 6, "sh", "b\nc\n", True),
        Block("x", 11, "", "d\n", False),
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_run_or_shows_something(document: str) -> None:
    for block in ALL[document]:
        assert block.language in ("sh", "python", ""), f"{block}: who runs {block.language!r}?"
        if not block.language:
            told = [line for line in block.text.splitlines() if COMMAND.match(line.strip())]
            assert not told, f"{block}: a command in a block without a language: {told[0]}"
    assert sum(block.marked for block in ALL[document]) == MARKED[document]


def test_the_makefile_has_the_targets_that_are_named() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in set(re.findall(r"`(make [a-z-]+)`", readme)):
        assert command in NOT_RUN_BY_NAME
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_the_document(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


# -- running


def write_program(path: Path, python_path: Path, words: str) -> None:
    # By its full name: `python` of the reader may be another one.
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{python_path}" exec "{sys.executable}" {words} "$@"\n', "utf-8")
    path.chmod(0o755)


def furnish(folder: Path, package: Path) -> dict[str, str]:
    """What a reader has at hand: the commands, a testee of their own, and a model of 30 layers."""
    programs = folder / "bin"
    programs.mkdir()
    write_program(programs / "boundary-bundle", package, "-m boundary_bundle.cli")
    write_program(programs / "python", package, "")
    write_program(folder / "my-testee", package, "-m boundary_bundle.conformance.testee_python")
    shape = replace(tiny_models.VARIANTS["tied"], n_layer=30)
    tiny_models.write(folder / "M.gguf", "tied", shape=shape)
    # The plugin as it is here, whether the package is installed or not.
    plugin = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "boundary_bundle.pytest_plugin"}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **plugin, "PATH": path, "COLUMNS": "120"}


def run_all(found: list[Block], folder: Path, environment: dict[str, str]) -> int:
    """Run blocks in order, those of Python in one namespace; how many there were."""
    names: dict[str, Any] = {"__name__": "__docs__"}
    count = 0
    for block in found:
        if block.marked or not block.language:
            continue
        count += 1
        if block.language == "python":
            try:
                exec(compile("\n" * block.line + block.text, block.document, "exec"), names)
            except Exception as error:
                pytest.fail(f"{block} fails: {error!r}")
        else:
            done = subprocess.run(
                ["sh", "-eu", "-c", block.text],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{block} ends with status {done.returncode}:\n{done.stdout[-3000:]}"
    return count


def copy_of_the_checkout(folder: Path) -> Path:
    """For commands that write into the checkout, and for planted entries."""
    target = folder / "checkout"
    target.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "build", "target", "node_modules", ".*")
    for name in ("boundary_bundle", "native_shim", "patches", "spec", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.mark.shards
@pytest.mark.usefixtures("patched_build", "smollm2")
def test_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = furnish(tmp_path, ROOT)
    assert run_all(ALL["README.md"], tmp_path, environment) == 11
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    readme = (ROOT / "README.md").read_text("utf-8")
    told = re.search(r"`--json` writes, whole or not at all: (.+)", readme)
    assert told is not None
    top = re.sub(r"\([^)]*\)", "", told[1])
    assert set(re.findall(r"`(\w+)`", top)) <= set(result)
    assert result["logits_differing"] == 0
    plan = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    told = re.search(r"The JSON has (`schema` .+) From Python:", readme)
    assert told is not None
    assert set(re.findall(r"`(\w+)`", told[1])) == {*plan, *plan["stages"][0]}


def test_the_cookbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_all(ALL["spec/cookbook.md"], tmp_path, furnish(tmp_path, ROOT)) > 17


def test_the_testee_protocol(tmp_path: Path) -> None:
    assert run_all(ALL["spec/testee-protocol.md"], tmp_path, furnish(tmp_path, ROOT)) == 2
    # The dialogue is JSON, and its requests are ones that a testee understands.
    shown = [line for block in ALL["spec/testee-protocol.md"] for line in block.text.splitlines()]
    requests = [line[2:] for line in shown if line.startswith("> ")]
    answers = [json.loads(line[2:]) for line in shown if line.startswith("< ")]
    done = subprocess.run(
        [str(tmp_path / "my-testee")], input="\n".join(requests) + "\n", capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["seq"] for answer in found] == [answer["seq"] for answer in answers]
    assert found[1] == answers[1]
    assert found[2]["data"].startswith(answers[2]["data"].removesuffix("..."))


def test_how_the_format_grows(tmp_path: Path) -> None:
    checkout = copy_of_the_checkout(tmp_path)
    environment = furnish(checkout, checkout)
    before = {path.name: path.read_bytes() for path in (checkout / "spec" / "vectors").iterdir()}
    assert run_all(ALL["spec/extending.md"], checkout, environment) == 3
    assert {path.name: path.read_bytes() for path in (checkout / "spec" / "vectors").iterdir()} == before


def _minor(registry: dict[str, Any]) -> None:
    registry["version"]["minor"] += 1


def _dtype(registry: dict[str, Any]) -> None:
    row = {"name": "f8_e4m3fnuz", "code": 7, "block_elements": 1, "block_bytes": 1, "both_orders": False}
    registry["dtypes"].append(row)


def _attribute(registry: dict[str, Any]) -> None:
    row = {"name": "producer", "key": 0x0123, "type": "text", "length": None, "forwarded": True}
    assert set(row) == set(registry["attributes"][0])
    registry["attributes"].append(row)


def _tensor_name(registry: dict[str, Any]) -> None:
    registry["tensor_names"].append("expert_ids")


PLANTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "minor": _minor,
    "dtype": _dtype,
    "attribute": _attribute,
    "tensor name": _tensor_name,
}
_LISTS = re.compile(r"<!-- fails: (.+?) -->\n((?:- `[^`]+`\n)+)")


def test_each_list_of_failing_tests_has_a_plant() -> None:
    text = (ROOT / "spec/extending.md").read_text("utf-8")
    assert [kind for kind, _ in _LISTS.findall(text)] == list(PLANTS)


@pytest.mark.parametrize("kind", PLANTS)
def test_what_fails_first(kind: str, tmp_path: Path) -> None:
    """With the entry planted, every test that the document names fails."""
    checkout = copy_of_the_checkout(tmp_path)
    lists = dict(_LISTS.findall((checkout / "spec/extending.md").read_text("utf-8")))
    named = re.findall(r"`([^`]+)`", lists[kind])
    place = checkout / "spec" / "registry.json"
    registry = json.loads(place.read_text("utf-8"))
    PLANTS[kind](registry)
    place.write_text(json.dumps(registry), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *named],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    failed = set(re.findall(r"^FAILED ([\w/.]+::\w+)", done.stdout, re.MULTILINE))
    assert set(named) == failed, done.stdout[-3000:]
