"""``make patches-check``: where the series applies, what a later release of llama.cpp changed under it, what builds.

    python -m boundary_bundle.native.patches_check [--quick] [--json]

Around the pin: every file that the series changes is the same in both archives, and the series applies to both without
an offset. To later releases the series is applied hunk by hunk; each hunk that fails is named with what it does not
find there. A release that has a series of its own (patches/RELEASE/) must take that one without an offset. Then
libllama is built with the first patch, the first two and all three, for the pin and for each release with a series of
its own, and the tests that these patches add are run on it; --quick leaves the builds out.

Exit status: 0 if all of that holds (that the pin's series fails on a later release is told, not a failure), 1 if not,
2 if it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import pin
from .apply import Change, blob_hash, changes, series
from .bootstrap import CXX_NAMES, find_tool
from .build import NativeBuild, Recipe, build_recipe, series_dir
from .paths import cache_dir, checkout_dir, prepare_cache
from .process import NativeError, Runner, build_environment, git_environment
from .progress import Reporter
from .source import RELEASES, ensure_archive

#: Where the archives around the pin must agree beyond the files of the series.
COMPARED = ("include", "src")

Outcome = Literal["applies", "offsets", "fails"]


@dataclass(frozen=True)
class Hunk:
    """One hunk of a patch. ``before`` are the lines that it looks for, ``removed`` those of them that go."""

    patch: str
    file: str
    number: int
    header: str
    before: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A hunk that a tree does not take. ``number`` 0: the whole file. ``reason`` is a sentence."""

    patch: str
    file: str
    number: int
    header: str
    reason: str


@dataclass
class Fit:
    """How one patch fits one tree. ``largest_offset`` in lines, of the hunks that were found elsewhere."""

    patch: str
    files: int
    hunks: int = 0
    moved: int = 0
    largest_offset: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        return "fails" if self.failures else "offsets" if self.moved else "applies"


@dataclass(frozen=True)
class Preimages:
    """The archives around the pin: which files of the series are not as it has them, which others differ at all."""

    archives: tuple[str, ...]
    files: int
    unequal: tuple[str, ...]
    differing: tuple[str, ...]


@dataclass(frozen=True)
class Application:
    """A series, by the folder it lies in, on one release."""

    release: str
    series: str
    fits: tuple[Fit, ...]

    @property
    def outcome(self) -> Outcome:
        outcomes = {fit.outcome for fit in self.fits}
        return "fails" if "fails" in outcomes else "offsets" if "offsets" in outcomes else "applies"


@dataclass(frozen=True)
class Built:
    """libllama with the first ``patches`` patches of a series, and the ``tests`` that they add, by name.

    ``reason`` if it does not build or a test fails, else empty.
    """

    series: str
    patches: int
    seconds: float
    tests: tuple[str, ...] = ()
    reason: str = ""


# -- reading patches --------------------------------------------------------------------------


def hunks(patch: Path) -> list[Hunk]:
    """The hunks of a patch in git format, numbered from 1 in each file. Raises NativeError if one is cut short."""
    found: list[Hunk] = []
    file, number = "", 0
    lines = patch.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("diff --git "):
            file, number = line.rpartition(" b/")[2], 0
        elif file and (match := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)):
            number += 1
            left, right = (1 if size is None else int(size) for size in match.groups())
            before, removed, added = [], [], []
            while left > 0 or right > 0:
                if position == len(lines):
                    raise NativeError(f"{patch.name}: hunk {number} of {file} is cut short")
                kind, text = lines[position][:1], lines[position][1:]
                position += 1
                if kind in (" ", "-"):
                    before.append(text)
                    left -= 1
                if kind in (" ", "+"):
                    right -= 1
                if kind == "-":
                    removed.append(text)
                elif kind == "+":
                    added.append(text)
            header = match[0]
            found.append(Hunk(patch.name, file, number, header, tuple(before), tuple(removed), tuple(added)))
    return found


def first_changes(patches: Sequence[Path]) -> list[Change]:
    """What the series takes from the tree itself, not from an earlier patch."""
    found, made = [], set()
    for patch in patches:
        for change in changes(patch):
            if change.old_path not in made:
                found.append(change)
            made.add(change.new_path)
    return found


# -- around the pin ---------------------------------------------------------------------------


def compare_preimages(patches: Sequence[Path], trees: Mapping[str, Path]) -> Preimages:
    """Hold the series against trees that must be alike where it touches them; ``trees`` by a name for reports."""
    touched = first_changes(patches)
    unequal = tuple(
        f"{change.old_path} in {name}: {found or 'absent'}, made for {change.old_blob or 'absent'}"
        for change in touched
        for name, tree in trees.items()
        if (found := _blob(tree / change.old_path)) != change.old_blob
    )
    first, *others = trees.values()
    names = {
        path.relative_to(tree).as_posix()
        for tree in trees.values()
        for folder in COMPARED
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    differing = tuple(
        sorted(name for name in names if any(_blob(tree / name) != _blob(first / name) for tree in others))
    )
    return Preimages(tuple(trees), len(touched), unequal, differing)


def _blob(path: Path) -> str | None:
    return blob_hash(path.read_bytes()) if path.is_file() else None


# -- applying ---------------------------------------------------------------------------------

_SUBJECT = re.compile(r"^(?:Checking|Applying) patch (?P<file>.+?)(?:\.\.\.| with \d+ rejects?\.\.\.)$")
_MOVED = re.compile(r"^Hunk #\d+ succeeded at \d+ \(offset (?P<offset>-?\d+) lines?\)\.$")
_REJECTED = re.compile(r"^Rejected hunk #(?P<number>\d+)\.$")


def try_series(patches: Sequence[Path], tree: Path, runner: Runner) -> list[Fit]:
    """Apply the series to a copy of the files that it touches, leaving out each hunk that does not fit.

    :raises NativeError: if git fails in a way that no hunk explains.
    """
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-patches-") as folder:
        copy = Path(folder, "tree")
        copy.mkdir()
        for change in first_changes(patches):
            if (tree / change.old_path).is_file():
                (copy / change.old_path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / change.old_path, copy / change.old_path)
        added: dict[str, set[str]] = {}
        fits = []
        for patch in patches:
            fits.append(_try_patch(patch, copy, added, runner))
            for hunk in hunks(patch):
                added.setdefault(hunk.file, set()).update(hunk.added)
        return fits


def _try_patch(patch: Path, copy: Path, added: Mapping[str, set[str]], runner: Runner) -> Fit:
    """``added`` are the lines that earlier patches add to each file, whether they did or not."""
    mine = hunks(patch)
    touched = changes(patch)
    fit = Fit(patch.name, len(touched), len(mine))
    texts = {
        change.old_path: (copy / change.old_path).read_text(encoding="utf-8", errors="surrogateescape")
        for change in touched
        if (copy / change.old_path).is_file()
    }
    for change in touched:
        if (change.old_blob is not None) != (change.old_path in texts):
            reason = "there is no such file" if change.old_blob else "there is a file of this name"
            fit.failures.append(Failure(patch.name, change.old_path, 0, "", reason))
    status, said = runner.capture(
        ["git", "-c", "apply.whitespace=nowarn", "apply", "--reject", "--verbose", str(patch)],
        cwd=copy,
        env=git_environment(copy, user_configuration=False),
    )
    file = ""
    for line in said.split("\n"):
        if match := _SUBJECT.match(line):
            file = match["file"]
        elif match := _MOVED.match(line):
            fit.moved += 1
            fit.largest_offset = max(fit.largest_offset, abs(int(match["offset"])))
        elif match := _REJECTED.match(line):
            hunk = next(hunk for hunk in mine if hunk.file == file and hunk.number == int(match["number"]))
            reason = explain(hunk, texts.get(file, ""), added.get(file, set()))
            fit.failures.append(Failure(patch.name, file, hunk.number, hunk.header, reason))
    if (status != 0) != bool(fit.failures):
        raise NativeError(f"git apply --reject {patch.name} ended with status {status}; it said:\n{said}")
    return fit


def explain(hunk: Hunk, text: str, added: set[str]) -> str:
    """Why a hunk finds no place in ``text``; ``added`` are lines that earlier patches should have put there."""
    lines = text.split("\n")
    gone = [line for line in hunk.before if line.strip() and line not in lines]
    if not gone:
        return f"between its lines there is now: {_short(_intruder(hunk.before, lines))}"
    upstream = [line for line in gone if line not in added]
    if not upstream:
        return "it stands on a hunk of an earlier patch that fails"
    changed = [line for line in upstream if line in hunk.removed]
    what = "a line that it changes" if changed else "a line beside it"
    more = f", and {len(upstream) - 1} more" if len(upstream) > 1 else ""
    return f"{what} is gone: {_short((changed or upstream)[0])}{more}"


def _intruder(before: Sequence[str], lines: Sequence[str]) -> str:
    """The line where the best place for the beginning or the end of ``before`` ceases to be like it."""
    downward, below = _longest(before, lines)
    upward, above = _longest(before[::-1], lines[::-1])
    return below if downward >= upward else above


def _longest(wanted: Sequence[str], lines: Sequence[str]) -> tuple[int, str]:
    """The most characters that the first lines of ``wanted`` have in one place, and the next line there."""
    best, found = 0, ""
    for place in range(len(lines)):
        length = 0
        while length < len(wanted) and place + length < len(lines) and lines[place + length] == wanted[length]:
            length += 1
        characters = sum(len(line.strip()) for line in wanted[:length])
        if characters > best:
            rest = lines[place + length :]
            best, found = characters, next((line for line in rest if line.strip()), "the end of the file")
    return best, found


def _short(line: str, width: int = 70) -> str:
    line = " ".join(line.split())
    return line if len(line) <= width else line[: width - 3] + "..."


# -- builds -----------------------------------------------------------------------------------


def build_prefixes(
    release: str | None, version: str, cache: Path, reporter: Reporter, runner: Runner
) -> Iterable[Built]:
    """libllama with one patch, with two, and so on, each with the tests that it must pass without the next patch."""
    folder = series_dir(release)
    source = ensure_archive(cache, version, reporter=reporter, runner=runner)
    patches = series(folder)
    for count in range(1, len(patches) + 1):
        recipe = Recipe("patched", source, patches[:count], checkout_dir() / "native_shim", programs=())
        name = _folder_name(folder)
        reporter.note(f"{name} on {_number(version)}, the first {count} of {len(patches)} patches:")
        begin = time.monotonic()
        try:
            done = build_recipe(recipe, cache=cache, reporter=reporter, runner=runner)
            seconds = round(time.monotonic() - begin, 1)
            added = [change.new_path for patch in patches[:count] for change in changes(patch) if not change.old_blob]
            tests = tuple(path for path in added if re.fullmatch(r"tests/test-[^/]*\.cpp", path))
            for path in tests:
                run_test(done, path, runner)
        except NativeError as error:
            yield Built(name, count, round(time.monotonic() - begin, 1), reason=str(error))
            return
        yield Built(name, count, seconds, tuple(Path(path).stem for path in tests))


def run_test(build: NativeBuild, path: str, runner: Runner) -> None:
    """Compile one of the series' own tests against a build and run it. Raises NativeError with what it says."""
    compiler = find_tool("CXX", CXX_NAMES)
    if compiler is None:
        raise NativeError("no C++ compiler was found")
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-patches-") as folder:
        program = str(Path(folder, "test"))
        libraries = [build.library, *sorted(build.lib_dir.glob(f"libggml*{build.library.suffix}"))]
        command = [compiler, "-std=c++17", "-O1", "-pthread", *(f"-I{include}" for include in build.include_dirs)]
        command += [str(build.source_dir / path), "-o", program, *map(str, libraries)]
        for run in ([*command, f"-Wl,-rpath,{build.lib_dir}"], [program, folder]):
            status, said = runner.capture(run, env=build_environment(), timeout=600)
            if status != 0:
                raise NativeError(f"{path}: {Path(run[0]).name} ended with status {status}; it said:\n{said.strip()}")


def _folder_name(folder: Path) -> str:
    return folder.relative_to(checkout_dir()).as_posix()


def _number(version: str) -> str:
    return version.split(".")[0]


# -- everything -------------------------------------------------------------------------------


@dataclass
class Report:
    """All that was measured."""

    preimages: Preimages
    applications: list[Application]
    builds: list[Built]

    def problems(self) -> list[str]:
        """What must hold and does not, one sentence each."""
        found = [f"preimage: {text}" for text in self.preimages.unequal]
        for one in self.applications:
            if one.outcome != "applies" and (one.release in self.preimages.archives or one.series != "patches"):
                found.append(f"{one.series} does not apply cleanly to {one.release}")
        found += [f"{one.series}: the first {one.patches}: {one.reason}" for one in self.builds if one.reason]
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "pin": pin.UPSTREAM_COMMIT,
            "preimages": asdict(self.preimages),
            "applications": [
                {
                    "release": one.release,
                    "series": one.series,
                    "outcome": one.outcome,
                    "patches": [{**asdict(fit), "outcome": fit.outcome} for fit in one.fits],
                }
                for one in self.applications
            ],
            "builds": [asdict(one) for one in self.builds],
            "problems": self.problems(),
        }


def check(*, builds: bool, cache: Path, reporter: Reporter, runner: Runner) -> Report:
    """Measure everything; archives that are not in the cache are downloaded."""

    def tree(version: str) -> Path:
        return ensure_archive(cache, version, reporter=reporter, runner=runner).tree

    ours = series(series_dir())
    if not ours:
        raise NativeError(f"{series_dir()} holds no patches")
    around = {_number(version): tree(version) for version in pin.ARCHIVES}
    applications = [
        Application(_number(version), "patches", tuple(try_series(ours, tree(version), runner)))
        for version in [*pin.ARCHIVES, *pin.LATER_ARCHIVES]
    ]
    own = [release for release in RELEASES if series(series_dir(release))]
    for release in own:
        fits = try_series(series(series_dir(release)), tree(RELEASES[release]), runner)
        applications.append(Application(release, _folder_name(series_dir(release)), tuple(fits)))
    report = Report(compare_preimages(ours, around), applications, [])
    if builds:
        where: list[tuple[str | None, str]] = [(None, pin.DEFAULT_ARCHIVE.version)]
        where += [(release, RELEASES[release]) for release in own]
        for series_of, version in where:
            report.builds += build_prefixes(series_of, version, cache, reporter, runner)
    return report


# -- the command ------------------------------------------------------------------------------


def _print(report: Report) -> None:
    # Not at the top: the commands stand on this package.
    from ..cli.common import print_table

    preimages = report.preimages
    print(
        f"{preimages.files} files of the series, {' and '.join(preimages.archives)}: "
        + ("all as the patches have them" if not preimages.unequal else f"{len(preimages.unequal)} differ")
    )
    print(f"files under {' and '.join(COMPARED)} that differ: {', '.join(preimages.differing) or 'none'}\n")
    rows = []
    for one in report.applications:
        for fit in one.fits:
            failing = len(fit.failures)
            rows.append(
                [
                    f"{one.release}  {one.series}/{fit.patch.removesuffix('.patch')}",
                    str(fit.files),
                    str(fit.hunks),
                    str(fit.moved),
                    str(fit.largest_offset),
                    str(failing),
                    str(len({failure.file for failure in fit.failures})),
                    {"applies": "applies", "offsets": "applies with offsets", "fails": "fails"}[fit.outcome],
                ]
            )
    columns = ("release and patch", "files", "hunks", "moved", "by up to", "fail", "in files", "outcome")
    print_table("where the patches apply", columns, rows)
    for one in report.applications:
        failures = [failure for fit in one.fits for failure in fit.failures]
        if failures:
            print(f"\n{one.series} on {one.release}: what fails, and why")
        for failure in failures:
            place = f"hunk {failure.number} {failure.header}" if failure.number else "the file"
            print(f"  {failure.patch[:4]} {failure.file}, {place}: {failure.reason}")
    if report.builds:
        print()
        built = [
            [
                one.series,
                str(one.patches),
                "fails" if one.reason else "builds",
                f"{one.seconds:.1f}",
                ", ".join(one.tests),
            ]
            for one in report.builds
        ]
        heads = ("series", "patches", "outcome", "seconds", "tests that pass")
        print_table("libllama with the first patches", heads, built)
    for problem in report.problems():
        print(f"error: {problem}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m boundary_bundle.native.patches_check",
        description="Where the patches apply, what later releases changed under them, and what builds.",
    )
    parser.add_argument("--quick", action="store_true", help="no builds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    try:
        cache = prepare_cache(cache_dir())
        report = check(builds=not options.quick, cache=cache, reporter=Reporter(), runner=Runner())
        if options.json:
            print(json.dumps(report.as_json(), indent=1))
        else:
            _print(report)
    except NativeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the next run continues", file=sys.stderr)
        return 130
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
