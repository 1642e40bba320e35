"""``boundary-bundle certify``: measure that split runs equal unsplit ones by bits, architecture by architecture."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ..families import certificates, certify, models
from ..families.certify import Certificate, Limits, Programs
from ..families.settings import ALL_SETTINGS, REDUCED
from ..native import build
from ..native.build import series_dir
from ..native.paths import checkout_dir
from ..native.source import chosen_release
from . import common
from .common import CommandError, counted

#: Their boundaries hold more than the residual stream, or some of their cuts are illegal: never reduced.
ODD = frozenset({"arwkv7", "deepseek4", "gemma3n", "gemma4", "qwen2vl", "qwen3vl", "rwkv7", "t5", "talkie"})
#: Those that take longest come first, so that none is left alone at the end.
SLOWEST = ("gemma3n", "gemma4")


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "certify",
        help="measure that split runs equal the unpatched library's by bits",
        description="Run a model at every legal cut and every legal pair of cuts, under settings that meet every legal "
        "pair of their values, and compare every value of the output by its bits with what the separately built "
        "unpatched library gives. Exit status 0: every architecture that can be made is certified, or (with all) "
        "refused by name. 1: something differs, ends the process, or is refused. 2: it could not be measured.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=common.file_name, metavar="FILE", help="a GGUF file")
    which.add_argument("--family", metavar="NAME,..", help="tiny models of these architectures, or all")
    how = parser.add_argument_group("how much")
    how.add_argument(
        "--reduced",
        action="store_true",
        help=f"one variant of each and {REDUCED} settings; in full where a boundary is out of the ordinary",
    )
    how.add_argument("--settings", metavar="NAME,..", help="these settings alone, named as in the certificates")
    how.add_argument(
        "--jobs", type=common.number(1, 512), default=0, metavar="N", help="models at a time (one a processor)"
    )
    how.add_argument(
        "--time-limit",
        type=common.seconds,
        default=certify.TIME_LIMIT,
        metavar="SECONDS",
        help=f"for each of the two programs with one model ({certify.TIME_LIMIT:g})",
    )
    out = parser.add_argument_group("reports")
    out.add_argument("--json", type=common.file_name, metavar="FILE", help="everything, for programs")
    out.add_argument(
        "-o",
        "--output",
        type=common.file_name,
        metavar="DIR",
        help="where certificates are written (spec/families if all are measured in full, on the pin)",
    )
    parser.set_defaults(function=command)


def command(options: argparse.Namespace) -> int:
    """The command."""
    settings = _settings(options.settings)
    common.check_target(options.json, options.model)
    if options.output is not None and (options.reduced or settings or options.model is not None):
        raise CommandError("certificates are written of whole families measured in full, so -o needs --family alone")
    if options.model is not None:
        common.require_regular(options.model)
    unpatched, patched = build("unpatched"), build("patched")
    programs = Programs.of(unpatched, patched)
    jobs = options.jobs or _processors()
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-models-") as folder:
        work = _work(options, programs, settings, Path(folder))
        found = _measure(work, jobs)
    return _report(options, found, bool(settings))


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system has it
        return os.cpu_count() or 1


def _settings(text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(text.split(","))
    known = {setting.name for setting in ALL_SETTINGS}
    for name in names:
        if name not in known:
            raise CommandError(f"there is no setting {common.shown(name)!r}; one is {ALL_SETTINGS[0].name}")
    return names


#: What measures one variant.
Work = Callable[[], Certificate]


def _work(
    options: argparse.Namespace, programs: Programs, settings: tuple[str, ...], folder: Path
) -> tuple[list[Work], list[Certificate]]:
    """What is to be measured, in its order, and what cannot be."""
    whole = Limits(only=settings, seconds=options.time_limit)
    reduced = Limits(reduced=True, seconds=options.time_limit)
    if options.model is not None:
        try:
            model = certify.describe(options.model, programs.unpatched_build)
        except models.ModelError as error:
            raise CommandError(str(error)) from None
        limits = reduced if options.reduced else whole
        return [lambda: certify.certify(model, programs, limits)], []

    variants = models.variants(programs.unpatched_build)
    refused = models.refused(programs.unpatched_build)
    known = sorted({variant.architecture for variant in variants} | set(refused))
    asked = known if options.family == "all" else options.family.split(",")
    for name in asked:
        if name not in known:
            raise CommandError(f"there is no architecture {common.shown(name)!r}; there are {', '.join(known)}")
    chosen = [variant for variant in variants if variant.architecture in asked]
    if options.reduced:
        first = {variant.architecture: variant for variant in reversed(chosen)}
        chosen = [
            variant for variant in chosen if first[variant.architecture] == variant or variant.architecture in ODD
        ]
    chosen.sort(key=lambda variant: SLOWEST.index(variant.architecture) if variant.architecture in SLOWEST else 99)

    def work(variant: models.Variant) -> Work:
        limits = reduced if options.reduced and variant.architecture not in ODD else whole
        return lambda: _certify_tiny(variant, programs, limits, folder)

    missing = [Certificate(name, "", "not built", reason) for name, reason in refused.items() if name in asked]
    return [work(variant) for variant in chosen], missing


def _certify_tiny(variant: models.Variant, programs: Programs, limits: Limits, folder: Path) -> Certificate:
    path = folder / f"{variant}.gguf"
    try:
        model = models.make_model(variant, path, build=programs.unpatched_build)
    except models.ModelError as error:
        return Certificate(variant.architecture, variant.experts, "not built", str(error))
    try:
        return certify.certify(model, programs, limits)
    finally:
        path.unlink(missing_ok=True)


# -- several at a time


def _measure(work: tuple[list[Work], list[Certificate]], jobs: int) -> dict[str, list[Certificate]]:
    """By architecture, in the order of their names."""
    todo, found = work[0], list(work[1])
    before = signal.signal(signal.SIGTERM, _terminated)
    pool = ThreadPoolExecutor(max_workers=min(jobs, max(1, len(todo))))
    try:
        with _progress(len(todo)) as tell:
            pending: set[Future[Certificate]] = {pool.submit(one) for one in todo}
            while pending:
                # Now and then awake, so that an interrupt is answered.
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    found.append(result)
                    tell(result)
    except BaseException:
        certify.stop_all()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)
    by_name: dict[str, list[Certificate]] = {}
    for one in sorted(found, key=lambda one: (one.architecture, one.variant)):
        by_name.setdefault(one.architecture, []).append(one)
    return by_name


def _terminated(signum: int, frame: object) -> None:
    # As an exception, so that what was started is ended on the way out.
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Certificate], None]]:
    """A bar on a terminal, a line for each model elsewhere; both on standard error."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("", total=total)

                def on_bar(one: Certificate) -> None:
                    bar.update(task, advance=1, description=f"{one.architecture} {one.variant}: {one.verdict}")
                    if one.verdict in ("failed", "crashed"):
                        bar.console.print(
                            f"{one.architecture} {one.variant}: {one.verdict}: {one.reason}", markup=False
                        )

                yield on_bar
            return
    lock, count = threading.Lock(), [0]

    def as_line(one: Certificate) -> None:
        with lock:
            count[0] += 1
            said = f": {one.reason}" if one.verdict in ("failed", "crashed") else ""
            print(
                f"[{count[0]}/{total}] {one.architecture} {one.variant}: {one.verdict}{said}",
                file=sys.stderr,
                flush=True,
            )

    yield as_line


# -- what is said of it

COLUMNS = (
    "architecture",
    "variant",
    "layers",
    "cuts",
    "pairs",
    "settings",
    "illegal",
    "values compared",
    "differ",
    "boundary values",
    "differ",
    "verdict",
    "seconds",
)


def _report(options: argparse.Namespace, found: dict[str, list[Certificate]], chosen: bool) -> int:
    release = chosen_release()
    everything = options.family == "all" and not options.reduced and not chosen and release is None
    patches = series_dir(release)
    output: Path | None = options.output
    if output is None and everything:
        output = checkout_dir() / "spec" / "families"
    summaries = [certificates.summary(name, variants) for name, variants in found.items()]
    rows = [_row(one) for variants in found.values() for one in variants]
    common.print_table("architectures", COLUMNS, rows)
    for entry in summaries:
        if entry["verdict"] != "certified":
            print(f"{entry['name']}: {entry['verdict']}: {entry['reason']}")
    verdicts = [entry["verdict"] for entry in summaries]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    print(
        f"{counted(len(summaries), 'architecture')}: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    )
    if output is not None:
        certificates.write(output, found, patches)
        print(f"certificates: {common.shown(output)}")
    if options.json is not None:
        common.write_json(
            options.json, {"series_sha256": certificates.series_hash(patches), "architectures": summaries}
        )
    bad = {"failed"} if options.family == "all" else {"failed", "refused", "not built"}
    return 1 if bad & set(verdicts) else 0


def _row(one: Certificate) -> Sequence[str]:
    return [
        one.architecture,
        one.variant,
        str(one.n_layer or ""),
        str(len(one.cuts)),
        str(one.pairs),
        str(len(one.settings)),
        str(len(one.illegal)),
        f"{one.logits.compared:,}",
        f"{one.logits.differing:,}",
        f"{one.boundary.compared:,}",
        f"{one.boundary.differing:,}",
        one.verdict,
        f"{one.seconds:.1f}",
    ]


__all__ = ["add_command", "command"]
