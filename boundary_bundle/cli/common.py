"""What the commands share: options, the workers of a run, output for terminals and for pipes."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..native import build
from ..shards import (
    CheckedRelay,
    Fault,
    Generation,
    LocalWorker,
    Pipeline,
    Plan,
    Settings,
    close_workers,
    start_workers,
)

# What a terminal would take for a command. A model may say anything.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class CommandError(Exception):
    """A command cannot be carried out; one sentence for the user."""


def number(minimum: int, maximum: int) -> Any:
    """An argparse type: a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        legal = f"a number from {minimum} to {maximum}"
        if not (text.isascii() and text.isdecimal() and len(text) < 12) or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return int(text)

    return parse


def default_threads() -> int:
    """The processors this process may use, at most four."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not every system has it
        usable = os.cpu_count() or 1
    return max(1, min(4, usable))


def add_settings(parser: argparse.ArgumentParser, defaults: Settings | None = None) -> None:
    """Options that every shard and the reference are started with alike; ``defaults`` for other ones than usual."""
    usual = defaults or Settings(threads=default_threads())
    threads = "all that may be used, 4 at most" if defaults is None else str(usual.threads)
    group = parser.add_argument_group("settings of every worker")

    def count(name: str, maximum: int, value: int, told: str) -> None:
        group.add_argument(name, type=number(1, maximum), default=value, metavar="N", help=told)

    count("--threads", 512, usual.threads, f"processors for each ({threads})")
    count("--ctx", 1 << 24, usual.ctx, f"context in tokens ({usual.ctx})")
    count("--batch", 1 << 20, usual.batch, f"tokens a batch ({usual.batch})")
    count("--ubatch", 1 << 20, usual.ubatch, f"tokens a micro-batch ({usual.ubatch})")
    group.add_argument("--flash-attn", choices=("on", "off"), default="on", help="flash attention (on)")
    group.add_argument("--no-mmap", action="store_true", help="read the weights instead of mapping the file")
    # For tests: a worker that was built elsewhere.
    group.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the options ask for."""
    return Settings(
        threads=options.threads,
        ctx=options.ctx,
        batch=options.batch,
        ubatch=min(options.ubatch, options.batch),
        flash_attn=options.flash_attn == "on",
        mmap=not options.no_mmap,
    )


def worker_program(options: argparse.Namespace) -> Path:
    """The shard worker of the patched build, built first if need be."""
    given: Path | None = options.worker
    return given if given is not None else build("patched").worker


@dataclass
class Run:
    """The workers of one run: the split pipeline, checked or not, and the unsplit one beside it."""

    plan: Plan
    split: Pipeline
    reference: Pipeline | None

    @property
    def last(self) -> LocalWorker:
        worker = self.split.workers[-1]
        assert isinstance(worker, LocalWorker)
        return worker

    def shards(self) -> list[dict[str, Any]]:
        """Memory of each shard as it is now."""
        return [_memory(shard.layer_range, shard.raw, worker.statistics()) for shard, worker in self._pairs(self.split)]

    def unsplit(self) -> dict[str, Any] | None:
        """Memory of the unsplit worker as it is now."""
        if self.reference is None:
            return None
        shard, worker = next(self._pairs(self.reference))
        return _memory(shard.layer_range, shard.raw, worker.statistics())

    @staticmethod
    def _pairs(pipeline: Pipeline) -> Iterator[tuple[Any, Any]]:
        return zip(pipeline.shards, pipeline.workers, strict=True)


def _memory(layers: tuple[int, int], described: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "range": list(layers),
        "resident_bytes": counters["resident_bytes"],
        "weight_bytes": described["weight_bytes"],
        "kv_bytes": described.get("kv_bytes", 0),
    }


@contextlib.contextmanager
def workers(
    program: Path,
    model: Path,
    plan: Plan,
    settings: Settings,
    *,
    check: bool,
    unsplit: bool,
    fault: Fault | None = None,
) -> Iterator[Run]:
    """Start the shards (and the unsplit worker), and close every one of them at the end, whatever happens."""
    started: list[LocalWorker] = []
    try:
        ranges = list(plan)
        started = start_workers(program, model, [*ranges, *([(0, plan.n_layer)] if unsplit else [])], settings)
        split = Pipeline(started[: len(ranges)], CheckedRelay(fault) if check else None)
        yield Run(plan, split, Pipeline(started[len(ranges) :]) if unsplit else None)
    finally:
        close_workers(started)


class Printer:
    """Writes text as it is generated: whole characters only, and nothing that a terminal would obey."""

    def __init__(self, worker: LocalWorker, eos: Sequence[int], *, echo: bool = True) -> None:
        self._worker = worker
        self._eos = frozenset(eos)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._terminal = sys.stdout.isatty()
        self._echo = echo
        self.text = ""

    def __call__(self, token: int) -> None:
        if token not in self._eos:
            self._put(self._decoder.decode(b"".join(self._worker.detokenize([token]))))

    def finish(self) -> str:
        """Write what is left of a character, end the line, and return the whole text."""
        self._put(self._decoder.decode(b"", True))
        if self._echo:
            print(flush=True)
        return self.text

    def _put(self, text: str) -> None:
        self.text += text
        if self._echo and text:
            print(text.translate(_CONTROL) if self._terminal else text, end="", flush=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the whole file or none of it: a temporary file beside it takes its name at the end."""
    try:
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2)
            stream.write("\n")
        # mkstemp makes it private; a result is as readable as any other new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)
        os.replace(partial, path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def check_json_target(path: Path | None) -> None:
    """Refuse, before any work is done, a place where the JSON could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise CommandError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"cannot write {path}: the folder {path.parent} is not writable")


def hops_of(run: Run, generation: Generation) -> list[dict[str, Any]]:
    """One entry a hop: means over its bundles, in bytes and microseconds."""
    found = []
    for hop, layer in enumerate(run.plan.cuts):
        mean = generation.hop(hop)
        found.append(
            {
                "layer": layer,
                "bundles": len(generation.all_steps),
                "bytes": mean.bytes,
                "encode_us": round(mean.encode_us, 2),
                "decode_us": round(mean.decode_us, 2),
                "python_decode_us": round(mean.python_decode_us, 2),
                "python_encode_us": round(mean.python_encode_us, 2),
            }
        )
    return found


def require_room(settings: Settings, n_prompt: int, n_tokens: int) -> None:
    """Refuse a prompt that does not fit, before anything is computed."""
    if n_prompt == 0:
        raise CommandError("the prompt has no tokens")
    if n_prompt + n_tokens - 1 > settings.ctx:
        raise CommandError(
            f"a prompt of {n_prompt} tokens and {n_tokens} more need a context of {n_prompt + n_tokens - 1}, "
            f"but --ctx is {settings.ctx}"
        )


def rate(value: float | None) -> float | None:
    """Tokens per second, rounded for output."""
    return None if value is None else round(value, 3)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: with lines and colour on a terminal that has rich, aligned columns elsewhere.

    The first column is aligned left, the others right.
    """
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            # Not the table's own title, which would wrap at the table's width.
            print_styled(title, "bold")
            table = Table(box=SIMPLE_HEAD, header_style="cyan")
            for place, column in enumerate(columns):
                table.add_column(column, justify="right" if place else "left", no_wrap=place == 0)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def print_styled(text: str, style: str) -> None:
    """One line, in ``style`` on a terminal that has rich."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
            return
    print(text)
