"""Who reads whose bundles: the built-in testees among themselves, and with wrong ones beside them.

Catches a codec that only understands its own bundles, and a table that hides one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from boundary_bundle import DTYPES, cli
from boundary_bundle.conformance import asks, builtin, kaitai, matrix, report, runner
from boundary_bundle.native import NativeBuild, cache_dir
from boundary_bundle.native.bootstrap import CACHE_FOLDERS

HERE = Path(__file__).parent
PYTHON = [sys.executable, "-m", "boundary_bundle.conformance.testee_python"]
FAULTY = [sys.executable, str(HERE / "faulty_testee.py")]
MISBEHAVING = [sys.executable, str(HERE / "misbehaving_testee.py")]


@pytest.fixture(autouse=True)
def _package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))


@cache
def kit(*only: str) -> list[asks.Case]:
    return asks.select(runner.kit(), only, None)


@pytest.fixture(scope="module")
def commands(patched_build: NativeBuild) -> dict[str, list[str]]:
    """The built-in testees that this machine can have; without node the Kaitai ones are missing, with the reason."""
    assert patched_build.programs
    there = [name for name in builtin.NAMES if kaitai.missing() is None or not name.startswith("kaitai")]
    return {name: builtin.command(name) for name in there}


def test_everybody_reads_everybody(commands: dict[str, list[str]]) -> None:
    found = matrix.make(commands, kit())
    assert found.unwritten == []
    assert found.partly == []
    assert found.encoders == ["python", "c", "libllama"]
    assert found.decoders == list(commands)
    assert [(cell.encoder, cell.decoder, cell.wrong) for cell in found.cells if cell.read != found.bundles] == []
    assert len(found.cells) == 3 * len(commands)
    assert found.full
    assert found.status == 0
    assert {reason for _, reason in found.left_out} <= {"writes nothing: it only reads"}
    # What they have read is worth reading.
    told = [tensor for case in kit() if case.mode == "encode" for b in case.vector.bundles for tensor in b.tensors]
    assert {tensor.dtype for tensor in told} == set(DTYPES)
    assert {tensor.byte_order for tensor in told} == {"little", "big"}
    assert found.bundles > 300


def test_the_codec_inside_libllama_passes(commands: dict[str, list[str]]) -> None:
    found = runner.run(commands["libllama"], kit())
    assert [(outcome.case.id, outcome.details) for outcome in found.failures] == []
    assert found.hello["name"] == "boundary_bundle.c in libllama"
    counts = found.counts()
    assert counts["passed"] + counts["skipped"] == len(kit())
    assert counts["skipped"] == 2
    # It is the library's: the program itself has none of the codec.
    symbols = subprocess.run(["nm", commands["libllama"][0]], capture_output=True, text=True, check=True).stdout
    codec = [line.split() for line in symbols.splitlines() if "bb_decode" in line]
    assert codec
    assert {(words[-2], words[-1].startswith("llama_")) for words in codec} == {("U", True)}


def test_a_wrong_writer_is_seen_in_its_row() -> None:
    found = matrix.make({"right": PYTHON, "wrong": [*FAULTY, "encoder-order"]}, kit("4"))
    assert found.status == 1
    assert not found.full
    assert {cell.encoder for cell in found.cells if cell.wrong} == {"wrong"}
    assert all(found.cell("wrong", reader).wrong for reader in ("right", "wrong"))
    assert found.cell("right", "right").read == found.bundles
    assert [line for line in _lines(found) if line.startswith("wrong: from wrong to right, wrong: ")]


def test_a_wrong_reader_is_seen_in_its_column() -> None:
    found = matrix.make({"right": PYTHON, "wrong": [*FAULTY, "zero-dimension"]}, kit("3.1"))
    assert {cell.decoder for cell in found.cells if cell.wrong} == {"wrong"}
    assert found.status == 1
    assert [line for line in _lines(found) if line.startswith("wrong: from right, wrong to wrong: ")]


def test_what_a_testee_refuses_to_write_counts_against_it() -> None:
    found = matrix.make({"right": PYTHON, "wrong": [*FAULTY, "four-dimensions"]}, kit("3.1", "4"))
    wrong = {name for name, _, _ in found.unwritten} | {cell.decoder for cell in found.cells if cell.wrong}
    assert wrong == {"wrong"}
    assert found.status == 1


def test_who_writes_or_reads_nothing_is_named() -> None:
    template = [sys.executable, str(HERE.parents[1] / "spec" / "testees" / "template.py")]
    found = matrix.make({"right": PYTHON, "template": template}, kit("4"), left_out={"other": "it is not here"})
    assert found.left_out == [
        ("other", "it is not here"),
        ("template", "writes nothing: no encoder yet"),
        ("template", "reads nothing: no decoder yet"),
    ]
    assert (found.encoders, found.decoders) == (["right"], ["right"])
    assert found.status == 0


def test_what_is_not_claimed_leaves_cells_that_are_not_full(tmp_path: Path) -> None:
    testee = tmp_path / "f32.py"
    testee.write_text(
        "from boundary_bundle.conformance.testee_python import PythonTestee, serve\n"
        "class Testee(PythonTestee):\n"
        "    def hello(self, request):\n"
        "        return {**super().hello(request), 'dtypes': ['f32']}\n"
        "serve(Testee())\n"
    )
    found = matrix.make({"right": PYTHON, "f32": [sys.executable, str(testee)]}, kit("4"))
    assert found.status == 0
    assert not found.full
    cells = [found.cell(*pair) for pair in (("right", "f32"), ("f32", "right"), ("f32", "f32"))]
    assert len({cell.read for cell in cells}) == 1
    assert 0 < cells[0].read < found.bundles
    told = [name for name, _ in found.partly]
    assert told == ["f32", "f32"]
    assert all("is not claimed" in reason for _, reason in found.partly)


@pytest.mark.parametrize("kind", ["signal", "garbage", "exit", "failed"])
def test_a_testee_that_breaks_does_not_end_the_run(kind: str) -> None:
    found = matrix.make({"broken": [*MISBEHAVING, kind, "5"], "right": PYTHON}, kit("4"))
    assert found.status == 1
    assert {name for name, _, _ in found.unwritten} == {"broken"}
    assert found.cell("right", "right").read == found.bundles


def test_a_testee_that_does_not_start_is_named() -> None:
    found = matrix.make({"gone": ["/nowhere/it"], "right": PYTHON}, kit("14"))
    assert found.status == 0
    ((name, reason),) = found.left_out
    assert name == "gone"
    assert "does not start" in reason


def test_what_is_made_for_them_is_removed_with_the_cache(commands: dict[str, list[str]]) -> None:
    """``make clean-cache`` empties the folders that it knows."""
    made = [Path(commands["c"][0])]
    if "kaitai-python" in commands:
        made.append(Path(commands["kaitai-python"][-1]))
    for path in made:
        assert path.relative_to(cache_dir().resolve()).parts[0] in CACHE_FOLDERS


def _lines(found: matrix.Matrix) -> list[str]:
    return list(matrix.describe(found))


# ---- the command ----


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with no compiler and no node."""
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


@pytest.mark.usefixtures("bare")
def test_what_a_machine_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert cli.main(["conformance", "--matrix", "--only", "4", *options]) == 0
    shown = capsys.readouterr().out
    assert "left out: c: no C compiler was found (cc)" in shown
    assert "left out: libllama: " in shown
    assert "left out: kaitai-python: node is missing" in shown
    assert shown.splitlines()[-1].startswith("passed: 1 writer, 1 reader, ")
    told = json.loads(files["json"].read_text())
    assert told["status"] == 0
    assert [entry["name"] for entry in told["matrix"]["left_out"]] == list(builtin.NAMES[1:])
    assert [cell["read"] for cell in told["matrix"]["cells"]] == [told["matrix"]["bundles"]]
    suite = ElementTree.parse(files["junit"]).getroot()
    assert [node.get("name") for node in suite.iter("testcase")] == ["python reads python"]
    assert "no C compiler was found" in files["html"].read_text()


@pytest.mark.usefixtures("bare")
def test_a_testee_has_its_row_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    command = ["conformance", "--matrix", "--only", "4", "--class", "stream", *options, "--"]
    assert cli.main([*command, *FAULTY, "encoder-order"]) == 1
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.startswith("  yours"))
    assert row[2] == row[4] == "WRONG"
    told = json.loads(files["json"].read_text())
    cells = {(cell["encoder"], cell["decoder"]): len(cell["wrong"]) for cell in told["matrix"]["cells"]}
    assert {pair for pair, wrong in cells.items() if wrong} == {("yours", "yours"), ("yours", "python")}
    suite = ElementTree.parse(files["junit"]).getroot()
    ran = [node for node in suite.iter("testsuite") if node.get("name") == "matrix"]
    assert [(node.get("tests"), node.get("failures")) for node in ran] == [("4", "2")]
    assert int(suite.get("failures", "")) == sum(int(node.get("failures", "")) for node in suite.iter("testsuite"))
    page = files["html"].read_text()
    assert "Who reads whose bundles" in page
    assert "WRONG" in page


def test_a_fault_of_the_matrix_alone_fails_the_run() -> None:
    """The kit has found nothing, a cell has."""
    found = runner.Report([], {}, [], 0.0, 0)
    assert found.status == 2
    found.matrix = matrix.Matrix(1, [matrix.Cell("a", "b", wrong=[("x", "y")])])
    assert found.status == 1
    assert matrix.Matrix(1).status == 2
    assert json.loads(report.matrix_json(found.matrix))["status"] == 1


def test_a_builtin_testee_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", "--builtin", "c", "--only", "14"]) == 0
    assert capsys.readouterr().out.startswith("boundary_bundle.c ABI ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--builtin", "python", "--", *PYTHON], "both --builtin and a COMMAND"),
        (["--matrix", "--random", "3"], "--random and --known-failures need a testee"),
        (["--matrix", "--only", "A1"], "no case with a bundle to write is selected"),
        (["--builtin", "c", "--only", "14"], "no C compiler was found"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_what_cannot_be_done(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", *arguments]) == 2
    assert told in capsys.readouterr().err
