"""Workers that stay up: one for each program, model, range and settings, the least recently used closed first."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from .pipeline import Pipeline, Relay
from .worker import LocalWorker, Settings, WorkerError, close_workers

Key = tuple[Path, Path, tuple[int, int], Settings]


class WorkerPool:
    """Keeps at most ``limit`` workers, plus those of the pipeline being made. For tests and sweeps."""

    def __init__(self, limit: int = 24) -> None:
        self.limit = limit
        self._workers: OrderedDict[Key, LocalWorker] = OrderedDict()

    def workers(
        self, program: Path, model: Path, ranges: Iterable[tuple[int, int]], settings: Settings
    ) -> list[LocalWorker]:
        """One worker a range, each with empty sequences; what is not up is started side by side."""
        keys: list[Key] = [(program, model, layers, settings) for layers in ranges]
        fresh: list[LocalWorker] = []
        for key in keys:
            worker = self._workers.get(key)
            if worker is not None and not worker.alive:
                del self._workers[key]
                worker.close()
                worker = None
            if worker is None:
                worker = self._workers[key] = LocalWorker(program, model, key[2], settings)
                fresh.append(worker)
            self._workers.move_to_end(key)
        try:
            for worker in fresh:
                worker.ready()
        except BaseException:
            close_workers([self._workers.pop(key) for key in keys if self._workers.get(key) in fresh])
            raise
        while len(self._workers) > max(self.limit, len(keys)):
            _, oldest = self._workers.popitem(last=False)
            oldest.close()
        found = [self._workers[key] for key in keys]
        for worker in found:
            worker.clear()
        return found

    def pipeline(
        self,
        program: Path,
        model: Path,
        ranges: Iterable[tuple[int, int]],
        settings: Settings,
        relay: Relay | None = None,
    ) -> Pipeline:
        """A pipeline of :meth:`workers`."""
        return Pipeline(self.workers(program, model, ranges, settings), relay)

    def close(self) -> None:
        """Close all of them."""
        close_workers(self._workers.values())
        self._workers.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(WorkerError):
            self.close()
