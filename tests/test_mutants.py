"""fuzz/mutants.py and fuzz/planted.py: what they mutate, and a few of the mutants.

Catches a mutator that finds nothing to mutate, a program of mutants in which none is chosen, a note on what the source
does not have any more, and a planted fault whose place has moved. All mutants are for `make mutants`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "fuzz"))

import mutants  # noqa: E402
import mutants_c  # noqa: E402
import mutants_python  # noqa: E402
import planted  # noqa: E402
from equivalents import NOTES  # noqa: E402
from mutants_model import Mutant  # noqa: E402

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
KINDS = {"flip", "bound", "and/or", "condition", "check"}
SOURCE = (ROOT / mutants_c.FILE).read_text("ascii")


@pytest.fixture(scope="module")
def in_c() -> mutants_c.Source:
    return mutants_c.Source(SOURCE)


@pytest.fixture(scope="module")
def in_python() -> mutants_python.Mutations:
    return mutants_python.Mutations()


def drawn(found: list[Mutant], count: int) -> list[Mutant]:
    """Without those that nothing notices."""
    return mutants.draw([mutant for mutant in found if mutant.key not in NOTES], count, 5)


def test_what_is_mutated(in_c: mutants_c.Source, in_python: mutants_python.Mutations) -> None:
    """A function, or a kind of mutation, that is passed by."""
    for found, least in ((in_c.mutants, 1000), (in_python.mutants, 700)):
        assert len(found) >= least
        assert {mutant.kind for mutant in found} == KINDS
        assert len({mutant.key for mutant in found}) == len(found)
        assert [mutant.number for mutant in found] == list(range(1, len(found) + 1))
    functions = {mutant.function for mutant in in_c.mutants}
    assert {"check_header", "check_tensor", "check_attr", "check_frame", "bb_stream_push", "compare"} <= functions
    assert {mutant.file for mutant in in_python.mutants} == {
        f"boundary_bundle/{name}.py" for name in mutants_python.MODULES if name != "layout"
    }


def test_every_note_is_on_something(in_c: mutants_c.Source, in_python: mutants_python.Mutations) -> None:
    """A reason that outlives the line it was given for."""
    assert [note.told() for note in mutants.gone([*in_c.mutants, *in_python.mutants])] == []
    assert all(len(note.reason) > 20 for note in NOTES.values())


def test_a_choice_in_c() -> None:
    """Chains, ternaries and conditions of loops that are put together otherwise than they stood."""
    text = (
        "/* ---- one --- */\n"
        "static int f(int a, int b) {\n"
        "    if (a < b && a != 0 && (b > 1 || a == 7)) { return 1; } return a >= b ? 2 : 3; }\n"
    )
    source = mutants_c.Source.__new__(mutants_c.Source)
    with pytest.raises(ValueError, match="does not have what mutants_c.py leaves out"):
        source.__init__(text)  # type: ignore[misc]
    told = {(mutant.old, mutant.new) for mutant in source.mutants}
    assert ("a < b", "a <= b") in told
    assert ("a < b", "a < b - 1") in told
    assert ("a < b && a != 0", "a < b || a != 0") in told
    assert ("a < b &&", "left out") in told
    assert ("&& (b > 1 || a == 7)", "left out") in told
    assert ("|| a == 7", "left out") in told
    assert ("a >= b", "a > b") in told
    assert ("if (a < b && a != 0 && (b > 1 || a == 7))", "if (false)") in told


@pytest.mark.skipif(CC is None, reason="no C compiler: neither cc, gcc nor clang is on the PATH")
def test_drawn_mutants_of_c_are_noticed(in_c: mutants_c.Source, tmp_path: Path) -> None:
    """A program whose variable chooses nothing, and vectors that run before no mutant."""
    programs = mutants_c.build(in_c.program(), tmp_path, CC or "cc", ["-O0"])
    chosen = drawn(in_c.mutants, 20)
    fates = mutants_c.run(programs, chosen, lambda: None)
    assert [(mutant.key, fates[mutant.number]) for mutant in chosen if fates[mutant.number].by == "lives"] == []
    assert sum(fate.by == "vectors" for fate in fates.values()) >= 10


@pytest.mark.skipif(CC is None, reason="no C compiler: neither cc, gcc nor clang is on the PATH")
def test_a_codec_that_fails_without_a_mutation_is_told(in_c: mutants_c.Source, tmp_path: Path) -> None:
    """Mutants that count as noticed because the codec, or its build, is broken."""
    broken = in_c.program().replace("#define HEAD_FIXED 32u", "#define HEAD_FIXED 40u")
    programs = mutants_c.build(broken, tmp_path, CC or "cc", ["-O0"])
    with pytest.raises(ValueError, match="without a mutation"):
        mutants_c.run(programs, in_c.mutants[:1], lambda: None)


def test_drawn_mutants_of_python_are_noticed(in_python: mutants_python.Mutations) -> None:
    """Mutated code that is given to no function that runs."""
    chosen = drawn([mutant for mutant in in_python.mutants if mutant.file.endswith("decoder.py")], 12)
    # The tests of the codec, which notice others, would take most of a minute.
    fates = mutants_python.run(in_python, chosen, lambda: None, tests=False)
    assert sum(fate.by == "vectors" for fate in fates.values()) >= 9


def test_planted_faults_have_their_places() -> None:
    """A fault that is planted nowhere, and so found by nothing."""
    assert len(planted.PLANTS) == 24
    text = planted.planted(SOURCE)
    for number in range(1, 25):
        assert text.count(f"(bb_mutant != {number})") == 1
    gone = planted.Plant("check_header", "B99", "no such check", "core")
    with pytest.raises(ValueError, match="check_header, B99: it holds 0 times"):
        planted.planted(SOURCE, [gone])
