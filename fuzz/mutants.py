"""Mutates the checks of both decoders and tells which mutants nothing notices.

    mutants.py                          every mutant of both
    mutants.py --only c --draw 50       so many of one language, drawn by --seed
    mutants.py --report                 every mutant, with a dated report in fuzz/reports

Each comparison is flipped (< to <=, == to !=) and its bound moved by one the other way, each `and` made `or`, each of
several conditions left out, and each check never made. A mutant is run before the vectors of spec/vectors, in every
way and piece size; one that they do not notice before the codec's own tests, which also ask for what no input can:
arguments of a call, and what a caller sees. What neither notices must stand in equivalents.py with the reason why
nothing can, and what stands there must not be noticed. Exit status: 0 it is so, 1 it is not, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent
sys.path[:0] = [str(ROOT), str(FUZZ), str(ROOT / "tests")]

import mutants_c  # noqa: E402
import mutants_python  # noqa: E402
from equivalents import NOTES, Note  # noqa: E402
from mutants_model import Fate, Mutant  # noqa: E402
from run import Refusal, find_clang, say  # noqa: E402

LANGUAGES = ("python", "c")
#: With them a mutant that only reads where it may not is noticed too.
SANITIZE = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def note_of(mutant: Mutant) -> Note | None:
    return NOTES.get(mutant.key)


def gone(mutants: Sequence[Mutant]) -> list[Note]:
    """Notes on what the source does not have any more. ``mutants``: all of the languages asked for."""
    keys = {mutant.key for mutant in mutants}
    languages = {mutant.language for mutant in mutants}
    return [note for key, note in NOTES.items() if note.language in languages and key not in keys]


def draw(mutants: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    if count is None or count >= len(mutants):
        return list(mutants)
    # The same mutants for the same seed.
    chosen = random.Random(seed).sample(range(len(mutants)), count)  # nosec B311: the same mutants for the same seed
    return [mutants[index] for index in sorted(chosen)]


def known(path: Path) -> dict[tuple[str, str, str, str], Fate]:
    """The fates of those that an earlier run noticed, by key."""
    found = {}
    for row in json.loads(path.read_text("utf-8")):
        if row["by"] != "lives":
            found[row["file"], row["function"], row["old"], row["new"]] = Fate(row["by"], row["what"], row["after"])
    return found


class Progress:
    """A line now and then."""

    def __init__(self, language: str, whole: int) -> None:
        self.language, self.whole, self.done, self.shown = language, whole, 0, time.monotonic()

    def __call__(self) -> None:
        self.done += 1
        if time.monotonic() - self.shown > 5:
            self.shown = time.monotonic()
            say(f"{self.language}: {self.done} of {self.whole}")


def all_c() -> mutants_c.Source:
    return mutants_c.Source((ROOT / mutants_c.FILE).read_text("ascii"))


def run_c(source: mutants_c.Source, mutants: Sequence[Mutant], folder: Path) -> dict[int, Fate]:
    """Without sanitizers, which take twice the time, and what lives with them."""
    clang = find_clang(folder)
    if clang is None:
        raise Refusal("clang 14 or newer with the sanitizers is missing: apt-get install clang libclang-rt-dev")
    say("c: building ...")
    programs = mutants_c.build(source.program(), folder / "plain", clang, ["-O1"])
    fates = mutants_c.run(programs, mutants, Progress("c", len(mutants)))
    left = [mutant for mutant in mutants if fates[mutant.number].by == "lives"]
    if left:
        programs = mutants_c.build(source.program(), folder / "sanitized", clang, SANITIZE)
        fates |= mutants_c.run(programs, left, Progress("c, sanitized", len(left)))
    return fates


def table(mutants: Sequence[Mutant], fates: dict[tuple[str, int], Fate]) -> list[tuple[str, ...]]:
    """A row a file, and their sum: mutants, noticed by the vectors, by the tests, noted, neither."""
    rows: dict[str, list[int]] = {}
    for mutant in mutants:
        by = fates[mutant.language, mutant.number].by
        column = 1 if by == "vectors" else 2 if by == "tests" else 3 if note_of(mutant) is not None else 4
        for name in (mutant.file, "all"):
            row = rows.setdefault(name, [0] * 5)
            row[0] += 1
            row[column] += 1
    ordered = [*(name for name in rows if name != "all"), "all"] if rows else []
    return [
        ("source", "mutants", "by vectors", "by tests", "equivalent", "not noticed"),
        *((name, *map(str, rows[name])) for name in ordered),
    ]


def as_text(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def told(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.function}: `{mutant.old}` as `{mutant.new}`"


def report(
    mutants: Sequence[Mutant], fates: dict[tuple[str, int], Fate], faults: Sequence[str], about: dict[str, str]
) -> str:
    out = [f"# Mutants, {about['date']} UTC", ""]
    out += [f"Commit {about['commit']}. `make mutants` makes such a report; fuzz/mutants.py says what is mutated.", ""]
    out += [as_markdown(table(mutants, fates)), ""]
    kinds = collections.Counter((mutant.language, mutant.kind) for mutant in mutants)
    out += [as_markdown([("language", "kind", "mutants"), *((*key, str(n)) for key, n in sorted(kinds.items()))]), ""]
    after = sorted(fate.after for fate in fates.values() if fate.by == "vectors")
    if after:
        out += [f"The median mutant is noticed by vector {after[len(after) // 2]}, in the order of the files.", ""]
    out += ["## Equivalent", ""]
    reasons: dict[str, list[str]] = {}
    for mutant in mutants:
        note = note_of(mutant)
        if note is not None and fates[mutant.language, mutant.number].by == "lives":
            reasons.setdefault(note.reason, []).append(f"  - {mutant.function}: `{mutant.old}` as `{mutant.new}`")
    for reason, lines in reasons.items():
        out += [f"- {reason}", *lines]
    out += ["", "## Faults", "", *(f"- {fault}" for fault in faults or ["none"])]
    return "\n".join(out) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="fuzz/mutants.py", description="Mutate the checks of both decoders.")
    parser.add_argument("--only", choices=LANGUAGES, help="one of both decoders")
    parser.add_argument("--draw", type=int, metavar="N", help="only so many mutants of each language")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of --draw (1)")
    parser.add_argument("--function", metavar="NAME", help="only the mutants of one function")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only what a run with --json FILE did not notice")
    parser.add_argument("--report", action="store_true", help="write a dated report to fuzz/reports")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every mutant and its fate there")
    parser.add_argument("--build", type=Path, default=FUZZ / "build" / "mutants", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        return _main(options)
    except (Refusal, ValueError) as error:
        say(f"error: {error}")
        return 2


def _main(options: argparse.Namespace) -> int:
    build: Path = options.build
    build.mkdir(parents=True, exist_ok=True)
    every: list[Mutant] = []
    chosen: list[Mutant] = []
    fates: dict[tuple[str, int], Fate] = {}
    for language in LANGUAGES if options.only is None else (options.only,):
        made: Any = all_c() if language == "c" else mutants_python.Mutations()
        every += made.mutants
        named = [mutant for mutant in made.mutants if options.function in (None, mutant.function)]
        mine = draw(named, options.draw, options.seed)
        chosen += mine
        before = known(options.again) if options.again is not None else {}
        fates |= {(language, mutant.number): before[mutant.key] for mutant in mine if mutant.key in before}
        mine = [mutant for mutant in mine if mutant.key not in before]
        if language == "c":
            found = run_c(made, mine, build)
        else:
            found = mutants_python.run(made, mine, Progress(language, len(mine)))
        fates |= {(language, number): fate for number, fate in found.items()}

    faults = [f"equivalents.py has a note on what is gone: {note.told()}" for note in gone(every)]
    for mutant in chosen:
        fate, note = fates[mutant.language, mutant.number], note_of(mutant)
        if fate.by == "lives" and note is None:
            faults.append(f"not noticed: {told(mutant)}")
        elif fate.by != "lives" and note is not None:
            faults.append(f"noted as equivalent and noticed by {fate.what}: {told(mutant)}")
    print(as_text(table(chosen, fates)))
    for fault in faults:
        print(fault)
    if options.json is not None:
        rows = [
            {**asdict(m), **asdict(fates[m.language, m.number]), "note": note.reason if (note := note_of(m)) else None}
            for m in chosen
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.report:
        now = datetime.datetime.now(datetime.timezone.utc)
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        about = {"date": f"{now:%Y-%m-%d %H:%M}", "commit": commit or "unknown"}
        file = FUZZ / "reports" / f"{now:%Y-%m-%d-%H%M}-mutants.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(report(chosen, fates, faults, about), encoding="utf-8")
        print(f"report: {file.relative_to(ROOT)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
