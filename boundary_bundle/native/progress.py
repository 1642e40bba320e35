"""Visible progress on standard error: a bar on a terminal, a line every tenth in a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    _HAVE_RICH = True
except ImportError:  # a bare interpreter; plain text will do
    _HAVE_RICH = False


class Step(Protocol):
    def update(self, done: int, total: int) -> None: ...


class _Lines:
    """One line at each full tenth."""

    def __init__(self, stream: TextIO, title: str):
        self._stream = stream
        self._title = title
        self._next = 10

    def update(self, done: int, total: int) -> None:
        percent = 100 * done // total if total > 0 else 0
        if percent >= self._next:
            print(f"  {self._title}: {percent}% ({done}/{total})", file=self._stream, flush=True)
            self._next = percent // 10 * 10 + 10


class _Carriage:
    """A terminal without rich: one line, rewritten."""

    def __init__(self, stream: TextIO, title: str):
        self._stream = stream
        self._title = title

    def update(self, done: int, total: int) -> None:
        share = min(done / total, 1.0) if total > 0 else 0.0
        bar = ("#" * int(30 * share)).ljust(30, ".")
        print(f"\r  {self._title} [{bar}] {100 * share:3.0f}%", end="", file=self._stream, flush=True)


class Reporter:
    """Says what is going on. ``quiet`` says nothing (tests)."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False):
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet

    def note(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """One piece of work with a beginning, a measure and an end."""
        started = time.monotonic()
        if self._quiet:
            yield _Nothing()
            return
        if not self._stream.isatty():
            self.note(f"{title} ...")
            yield _Lines(self._stream, title)
        elif _HAVE_RICH:
            with Progress(
                TextColumn("  {task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                transient=True,
            ) as bar:
                yield _RichStep(bar, title)
        else:
            yield _Carriage(self._stream, title)
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        self.note(f"{title}: done in {time.monotonic() - started:.1f} s")


class _Nothing:
    def update(self, done: int, total: int) -> None:
        pass


class _RichStep:
    def __init__(self, bar: Progress, title: str):
        self._bar = bar
        self._task = bar.add_task(title, total=None)

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total if total > 0 else None)
