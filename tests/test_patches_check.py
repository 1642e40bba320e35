"""What `make patches-check` tells, without its builds: where the series applies, and where the one for a later release
differs from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from boundary_bundle.native import NativeBuild, NativeError, paths, pin
from boundary_bundle.native.apply import blob_hash, changes, series
from boundary_bundle.native.patches_check import (
    Application,
    Built,
    Fit,
    Report,
    compare_preimages,
    first_changes,
    hunks,
    try_series,
)
from boundary_bundle.native.process import Runner
from boundary_bundle.native.progress import Reporter
from boundary_bundle.native.source import RELEASES, ensure_archive

PATCHES = Path(__file__).resolve().parents[1] / "patches"
OWN = sorted(folder for folder in PATCHES.iterdir() if folder.name in RELEASES and series(folder))
QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def around() -> dict[str, Path]:
    """The trees on both sides of the pin."""
    cache = paths.prepare_cache(paths.cache_dir())
    return {version: ensure_archive(cache, version, reporter=QUIET).tree for version in pin.ARCHIVES}


# -- the real series --------------------------------------------------------------------------


def test_files_of_the_series_are_the_same_around_the_pin(around: dict[str, Path]) -> None:
    """A preimage that is not the pin's; a pin that has wandered from between its neighbours."""
    found = compare_preimages(series(PATCHES), around)
    assert found.unequal == ()
    assert found.files > 100
    assert found.differing == ("src/models/deepseek4.cpp",)
    assert "src/models/deepseek4.cpp" not in {change.old_path for change in first_changes(series(PATCHES))}


@pytest.mark.parametrize("version", pin.ARCHIVES)
def test_series_applies_without_an_offset(around: dict[str, Path], version: str) -> None:
    fits = try_series(series(PATCHES), around[version], Runner())
    assert [(fit.outcome, fit.moved) for fit in fits] == [("applies", 0)] * 3
    assert sum(fit.hunks for fit in fits) > 300


def new_files(folder: Path) -> dict[str, str | None]:
    """The files that a series adds, each with the blob hash of its last state."""
    added = {change.new_path for change in first_changes(series(folder)) if change.old_blob is None}
    return {
        change.new_path: change.new_blob
        for patch in series(folder)
        for change in changes(patch)
        if change.new_path in added
    }


def message(patch: Path) -> str:
    """What a patch says, without its date, its statistics and its changes."""
    head = patch.read_text(encoding="utf-8").split("\n---\n", 1)[0]
    return "\n".join(line for line in head.split("\n") if not line.startswith("Date: "))


@pytest.mark.parametrize("folder", OWN, ids=lambda folder: folder.name)
def test_series_of_another_release_differs_only_where_upstream_does(folder: Path) -> None:
    """A fix that was made in one series and not in the other."""
    assert new_files(folder) == new_files(PATCHES)
    assert [patch.name for patch in series(folder)] == [patch.name for patch in series(PATCHES)]
    assert [message(patch) for patch in series(folder)] == [message(patch) for patch in series(PATCHES)]
    for patch in series(folder):
        for change in changes(patch):
            assert all(blob is None or len(blob) == 40 for blob in (change.old_blob, change.new_blob))


def test_there_is_a_series_for_a_later_release() -> None:
    assert [folder.name for folder in OWN] == ["11434"]


def test_script_has_made_every_edit_that_it_knows(patched_build: NativeBuild, unpatched_build: NativeBuild) -> None:
    """A model file whose loop over the layers was forgotten; a script that no longer knows upstream's files."""
    script = [sys.executable, str(PATCHES / "edit_models.py"), "--check"]
    done = subprocess.run([*script, str(patched_build.source_dir)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    before = subprocess.run([*script, str(unpatched_build.source_dir)], capture_output=True, text=True, check=False)
    assert before.returncode == 1
    edited = set(before.stdout.split())
    changed = {change.old_path for patch in series(PATCHES) for change in changes(patch)}
    assert len(edited) > 90
    assert edited <= changed


# -- the checks themselves, on a small tree ---------------------------------------------------

LINES = [f"line {number}\n" for number in range(1, 41)]


def make_patch(folder: Path, name: str, before: dict[str, list[str] | None], after: dict[str, list[str]]) -> Path:
    """A patch in git format, written by git."""
    for side, files in (("a", before), ("b", after)):
        for file, lines in files.items():
            if lines is not None:
                (folder / name / side / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / name / side / file).write_text("".join(lines))
    text = ""
    for file, lines in before.items():
        left = f"a/{file}" if lines is not None else "/dev/null"
        done = subprocess.run(
            ["git", "diff", "--no-index", "--full-index", "--no-prefix", left, f"b/{file}"],
            cwd=folder / name,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        text += done.stdout.replace(f"diff --git b/{file} ", f"diff --git a/{file} ")
    patch = folder / f"{name}.patch"
    patch.write_text(text)
    return patch


def with_line(lines: list[str], number: int, line: str) -> list[str]:
    return [*lines[: number - 1], line, *lines[number:]]


@pytest.fixture
def small(tmp_path: Path) -> tuple[list[Path], Path]:
    """Two patches, the second on top of the first, and the tree that they were made for."""
    once = with_line(with_line(LINES, 5, "five\n"), 30, "thirty\n")
    twice = with_line(once, 31, "thirty-one\n")
    first = make_patch(tmp_path, "0001-one", {"src/a": LINES, "src/new": None}, {"src/a": once, "src/new": ["new\n"]})
    second = make_patch(tmp_path, "0002-two", {"src/a": once}, {"src/a": twice})
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "a").write_text("".join(LINES))
    return [first, second], tree


def test_series_that_applies(small: tuple[list[Path], Path]) -> None:
    patches, tree = small
    fits = try_series(patches, tree, Runner())
    assert fits == [Fit("0001-one.patch", 2, 3), Fit("0002-two.patch", 1, 1)]
    assert (tree / "src" / "a").read_text() == "".join(LINES), "the tree itself was changed"
    assert [hunk.header for hunk in hunks(patches[0])] == ["@@ -2,7 +2,7 @@", "@@ -27,7 +27,7 @@", "@@ -0,0 +1 @@"]


def test_offset_is_counted(small: tuple[list[Path], Path]) -> None:
    """A hunk that lands elsewhere may land in another function: it is not the same as one that applies."""
    patches, tree = small
    (tree / "src" / "a").write_text("".join([*LINES[:15], *["more\n"] * 4, *LINES[15:]]))
    first, second = try_series(patches, tree, Runner())
    assert (first.outcome, first.moved, first.largest_offset) == ("offsets", 1, 4)
    assert (second.outcome, second.moved, second.largest_offset) == ("offsets", 1, 4)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({30: "another\n"}, "a line that it changes is gone: line 30"),
        ({28: "another\n"}, "a line beside it is gone: line 28"),
        ({28: "another\n", 30: "another\n"}, "a line that it changes is gone: line 30, and 1 more"),
        ({32: "line 32\nupper\nlower\n"}, "between its lines there is now: upper"),
        ({28: "line 28\nupper\nlower\n"}, "between its lines there is now: lower"),
    ],
)
def test_hunk_that_fails_is_named_with_the_reason(
    small: tuple[list[Path], Path], changed: dict[int, str], reason: str
) -> None:
    patches, tree = small
    lines = [changed.get(number, line) for number, line in enumerate(LINES, start=1)]
    (tree / "src" / "a").write_text("".join(lines))
    first, second = try_series(patches, tree, Runner())
    assert first.outcome == second.outcome == "fails"
    (failure,) = first.failures
    assert (failure.file, failure.number, failure.header) == ("src/a", 2, "@@ -27,7 +27,7 @@")
    assert failure.reason == reason
    assert [failure.number for failure in second.failures] == [1]


def test_hunk_on_a_hunk_that_fails(small: tuple[list[Path], Path]) -> None:
    """A reader who looks for what upstream changed, where upstream changed nothing."""
    patches, tree = small
    (tree / "src" / "a").write_text("".join(with_line(LINES, 27, "another\n")))
    second = try_series(patches, tree, Runner())[1]
    assert [failure.reason for failure in second.failures] == ["it stands on a hunk of an earlier patch that fails"]


def test_file_that_is_gone_or_there_already(small: tuple[list[Path], Path]) -> None:
    patches, tree = small
    (tree / "src" / "a").unlink()
    (tree / "src" / "new").write_text("upstream's\n")
    first = try_series(patches, tree, Runner())[0]
    assert {(failure.file, failure.number, failure.reason) for failure in first.failures} == {
        ("src/a", 0, "there is no such file"),
        ("src/new", 0, "there is a file of this name"),
    }


@pytest.mark.parametrize("text", ["@@ -1 +1 @@\n", "@@ -1,9 +1,9 @@\n-line 1\n+one\n"])
def test_patch_that_is_cut_short_is_no_result(small: tuple[list[Path], Path], text: str) -> None:
    patches, tree = small
    patches[0].write_text(patches[0].read_text() + text)
    with pytest.raises(NativeError, match=r"0001-one\.patch: hunk 2 of src/new is cut short"):
        try_series(patches, tree, Runner())


def test_git_that_fails_for_another_reason_is_no_result(small: tuple[list[Path], Path]) -> None:
    """A patch of which git takes nothing, while every hunk seems to fit."""
    patches, tree = small
    patches[0].write_text(patches[0].read_text().replace("+++ b/src/new", "+++ b/../new"))
    with pytest.raises(NativeError, match=r"git apply --reject 0001-one\.patch ended with status"):
        try_series(patches, tree, Runner())


def test_unequal_preimages_are_named(small: tuple[list[Path], Path], tmp_path: Path) -> None:
    patches, tree = small
    other = tmp_path / "other"
    (other / "src").mkdir(parents=True)
    (other / "src" / "a").write_text("another\n")
    (other / "src" / "b").write_text("only here\n")
    found = compare_preimages(patches, {"this": tree, "that": other})
    assert found.differing == ("src/a", "src/b")
    made_for = blob_hash("".join(LINES).encode())
    assert found.unequal == (f"src/a in that: {blob_hash(b'another' + bytes([10]))}, made for {made_for}",)


def test_what_is_a_problem_and_what_is_told(small: tuple[list[Path], Path]) -> None:
    """That upstream goes on is no error; that the pin or a release's own series does not apply is one."""
    patches, tree = small
    good = Fit("0001-one.patch", 1, 1)
    moved = Fit("0001-one.patch", 1, 1, moved=1, largest_offset=3)
    preimages = compare_preimages(patches, {"10019": tree, "10034": tree})
    later = Application("11434", "patches", (moved,))
    report = Report(preimages, [Application("10019", "patches", (good,)), later], [])
    assert report.problems() == []
    for bad in (Application("10034", "patches", (good, moved)), Application("11434", "patches/11434", (moved,))):
        report = Report(preimages, [bad, later], [])
        assert report.problems() == [f"{bad.series} does not apply cleanly to {bad.release}"]
    report = Report(preimages, [], [Built("patches", 1, 1.0), Built("patches", 2, 1.0, reason="an error")])
    assert report.problems() == ["patches: the first 2: an error"]
    json.dumps(report.as_json())
