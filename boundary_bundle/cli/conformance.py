"""``boundary-bundle conformance``: run the conformance kit against any codec."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..conformance import builtin, matrix, report_page, runner
from ..conformance import report as reports
from ..conformance.asks import Case, select
from ..conformance.matrix import Matrix
from ..conformance.runner import Report, Unusable
from ..places import spec_folder
from .common import (
    CommandError,
    check_target,
    counted,
    file_name,
    number,
    print_table,
    require_regular,
    seconds,
    shown,
    write_parts,
)


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "conformance",
        help="check any codec against the format's vectors",
        description="Run a testee, a program that speaks spec/testee-protocol.md, through the conformance kit. Exit "
        "status 0: all passed. 1: something failed. 2: it could not be done, or nothing was checked.",
    )
    parser.add_argument("testee", nargs="*", metavar="COMMAND", help="the testee and its arguments, after --")
    names = ", ".join(builtin.NAMES)
    parser.add_argument(
        "--builtin", choices=builtin.NAMES, metavar="NAME", help=f"a testee of this project instead: {names}"
    )
    chosen = parser.add_argument_group("what is asked")
    chosen.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cases whose section, vector, id, file or mode (one, core, stream, encode) matches; may be repeated",
    )
    chosen.add_argument("--class", dest="conformance", choices=("core", "stream"), help="one class of decoder")
    chosen.add_argument(
        "--vectors", action="append", type=file_name, default=[], metavar="FILE", help="these vectors, not the kit's"
    )
    chosen.add_argument(
        "--known-failures", type=file_name, metavar="FILE", help="a case or vector a line, # and the reason"
    )
    chosen.add_argument("--random", type=number(1, 10**9), metavar="N", help="also N cases of drawn bundles and damage")
    chosen.add_argument("--seed", type=number(0, 2**31), default=0, metavar="S", help="seed of the draws (0)")
    chosen.add_argument(
        "--save", type=file_name, default=Path(), metavar="DIR", help="where failures of --random become vectors (here)"
    )
    chosen.add_argument(
        "--matrix",
        action="store_true",
        help="also who reads whose bundles, among the built-in testees and this one; without a testee that alone",
    )
    limits = parser.add_argument_group("how")
    limits.add_argument("--time-limit", type=seconds, default=10.0, metavar="SECONDS", help="for each answer (10)")
    limits.add_argument("--restarts", type=number(0, 10**6), default=50, metavar="N", help="give up after N (50)")
    limits.add_argument("--no-pipelining", action="store_true", help="one request at a time")
    out = parser.add_argument_group("reports")
    out.add_argument("--json", type=file_name, metavar="FILE", help="everything, for programs")
    out.add_argument("--junit", type=file_name, metavar="FILE", help="JUnit XML")
    out.add_argument("--html", type=file_name, metavar="FILE", help="one page to look at")
    out.add_argument("--details", type=number(0, 10**6), default=20, metavar="N", help="failures shown in full (20)")
    out.add_argument("--quiet", action="store_true", help="the last line only")
    parser.set_defaults(function=conformance)


_WORDS = {0: "passed", 1: "FAILED", 2: "nothing was checked"}


class _Progress:
    """A line on a terminal that is written over; nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._on = sys.stderr.isatty() and not quiet
        self._last = 0.0

    def __call__(self, done: int, total: int, counts: Mapping[str, int] | None = None) -> None:
        now = time.monotonic()
        if not self._on or (now - self._last < 0.1 and done != total):
            return
        self._last = now
        width = 24
        filled = width * done // max(1, total)
        told = ", ".join(f"{count} {name}" for name, count in (counts or {}).items() if count)
        line = f"[{'#' * filled}{'.' * (width - filled)}] {done:,} of {total:,}  {told}"
        sys.stderr.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """Something that takes a while and has no steps."""
        if self._on:
            sys.stderr.write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _terminated(signum: int, frame: object) -> None:
    # As an exception, so that the testee is ended on the way out.
    raise SystemExit(128 + signum)


def conformance(options: argparse.Namespace) -> int:
    """The command."""
    if options.testee and options.builtin:
        raise CommandError("both --builtin and a COMMAND are given")
    alone = options.matrix and not options.testee and not options.builtin
    if not options.testee and not options.builtin and not alone:
        raise CommandError(
            "no testee is given (boundary-bundle conformance [options] -- COMMAND...); how to write one is told in "
            f"{shown(spec_folder() / 'testee-protocol.md')}, with templates in {shown(spec_folder() / 'testees')}"
        )
    if alone and (options.random is not None or options.known_failures is not None):
        raise CommandError("--random and --known-failures need a testee")
    inputs = [path for path in (*options.vectors, options.known_failures) if path is not None]
    for path in inputs:
        require_regular(path)
    for path in (options.json, options.junit, options.html):
        check_target(path, *inputs)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        if options.builtin:
            try:
                options.testee = builtin.command(options.builtin)
            except builtin.Unavailable as error:
                raise CommandError(f"the testee {options.builtin} is not to be had: {error}") from None
        return _run_matrix(options) if alone else _run(options)
    except Unusable as error:
        _write(options.json, reports.unusable_json(options.testee, error))
        _write(options.junit, reports.unusable_junit(error))
        _write(options.html, report_page.unusable_html(options.testee, error))
        said = f"\nits standard error ends: {error.stderr[-500:].strip()}" if error.stderr.strip() else ""
        raise CommandError(f"{error}{said}") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    known = []
    if options.known_failures is not None:
        try:
            known = runner.read_known(options.known_failures)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CommandError(f"cannot read {shown(options.known_failures)}: {reason}") from None
    cases = _kit(options)
    draw: Any = None
    if options.random is not None:
        try:
            from ..conformance.random_cases import run_random as draw
        except ImportError:
            raise CommandError("--random needs hypothesis: pip install 'boundary-bundle[test]'") from None
    progress = _Progress(options.quiet)
    try:
        report = runner.run(
            options.testee,
            cases,
            time_limit=options.time_limit,
            restarts=options.restarts,
            window=1 if options.no_pipelining else 32,
            only=options.only,
            classes=options.conformance,
            known=known,
            progress=progress,
        )
        report.known_file = None if options.known_failures is None else shown(options.known_failures)
        if draw is not None:
            try:
                report.random = draw(
                    options.testee,
                    options.random,
                    options.seed,
                    time_limit=options.time_limit,
                    folder=options.save,
                    progress=progress,
                )
            except OSError as error:
                raise CommandError(f"cannot write to {shown(options.save)}: {error.strerror}") from None
        if options.matrix:
            report.matrix = _matrix(options, cases, progress)
    finally:
        progress.clear()
    _write(options.json, reports.to_json(report))
    _write(options.junit, reports.to_junit(report))
    _write(options.html, report_page.to_html(report))
    _print(report, options)
    return report.status


def _kit(options: argparse.Namespace) -> list[Case]:
    try:
        return runner.kit(options.vectors)
    except OSError as error:
        raise CommandError(f"cannot read {shown(error.filename or 'the vectors')}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"cannot use the vectors: {type(error).__name__}: {error}") from None


def _matrix(options: argparse.Namespace, cases: list[Case], progress: _Progress) -> Matrix:
    commands: dict[str, list[str]] = {} if options.builtin or not options.testee else {"yours": options.testee}
    left_out: dict[str, str] = {}
    for name in builtin.NAMES:
        progress.say(f"making the testee {name}")
        try:
            commands[name] = builtin.command(name)
        except builtin.Unavailable as error:
            left_out[name] = str(error)
    return matrix.make(
        commands,
        select(cases, options.only, None),
        left_out=left_out,
        time_limit=options.time_limit,
        restarts=options.restarts,
        progress=progress,
    )


def _run_matrix(options: argparse.Namespace) -> int:
    progress = _Progress(options.quiet)
    try:
        found = _matrix(options, _kit(options), progress)
    finally:
        progress.clear()
    _write(options.json, reports.matrix_json(found))
    _write(options.junit, reports.matrix_junit(found))
    _write(options.html, report_page.matrix_html(found))
    _print_matrix(found, options.quiet)
    print(f"{_WORDS[found.status]}: {matrix.verdict(found)}")
    return found.status


def _print_matrix(found: Matrix, quiet: bool) -> None:
    if quiet:
        return
    rows = [
        [encoder, *(matrix.cell_text(found.cell(encoder, decoder), found.bundles) for decoder in found.decoders)]
        for encoder in found.encoders
    ]
    title = f"Who reads whose bundles, of {found.bundles:,} from each writer"
    print_table(title, ["writer \\ reader", *found.decoders], rows)
    for line in matrix.describe(found):
        print(line)
    print()


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        write_parts(path, [text.encode("utf-8")])


#: Lines of a list of reasons; what is left is in the other reports.
_REASONS = 12


def _print_reasons(report: Report) -> None:
    """What was skipped and what is wrong, by kind."""
    kinds = [(what, count, f", such as {case}") for what, count, case in reports.faults(report)]
    for word, rows in (("skipped", [(*row, "") for row in reports.skipped(report)]), ("failed", kinds)):
        for what, count, example in rows[:_REASONS]:
            print(f"{word} {count:6,}  {what}{example}")
        if len(rows) > _REASONS:
            print(f"{word}         and {len(rows) - _REASONS} more kinds")


def _print(report: Report, options: argparse.Namespace) -> None:
    hello = report.hello
    if not options.quiet:
        name = shown(f"{hello['name']} {hello['version']} ({hello['language']})")
        rows = [
            [
                f"{entry.name:<5}{entry.title}",
                f"{entry.total:,}",
                f"{entry.counts['passed']:,}",
                f"{entry.counts['skipped']:,}" if entry.counts["skipped"] else "",
                str(entry.failed or ""),
                str(entry.known or ""),
            ]
            for entry in reports.sections(report)
        ]
        print_table(name, ["section", "cases", "passed", "skipped", "failed", "known"], rows)
        groups = reports.grouped(report.failures)
        for group in groups[: options.details]:
            print("\n" + "\n".join(reports.describe(group.outcome, group.modes)))
        if len(groups) > options.details:
            print(f"\nand {counted(len(groups) - options.details, 'more vector')} (--details, --json, --html)")
        print()
        _print_reasons(report)
    for line in reports.known_lines(report):
        print(line)
    if "stop" in hello:
        print(f"note: asked to stop, the testee {hello['stop']}")
    if report.matrix is not None:
        _print_matrix(report.matrix, options.quiet)
        print(f"matrix: {matrix.verdict(report.matrix)}")
    if report.random is not None:
        drawn = report.random
        print(
            f"random: {drawn['cases']:,} cases with seed {drawn['seed']}, "
            f"{counted(len(drawn['failures']), 'different failure')}; "
            f"{drawn['seconds']:.1f} s"
        )
        for entry in drawn["failures"]:
            print(f"  {entry['result']} ({entry['mode']}, {entry['bytes']} bytes): {entry['detail']}")
            print(f"  saved as {shown(entry['file'])}")
    print(f"{_WORDS[report.status]}: {reports.verdict(report)}")
