"""Workers that stop, fall silent or are closed at a bad moment, and shards that would be left ahead of the others.

Catches: a wait without an end, a message after half of another, a worker that outlives its driver's patience, and a
shard that keeps a batch which the pipeline has given up.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import Conversation

from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    CheckedRelay,
    LocalWorker,
    Pipeline,
    PipelineError,
    Settings,
    WorkerError,
    close_workers,
    generate,
    make_plan,
    start_workers,
)
from boundary_bundle.shards import worker as worker_module
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards

SMALL = Settings(threads=1, ctx=256, batch=16, ubatch=8, seqs=4)
LARGE = bytes(16 << 20)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that is over in time, and is broken off if it is not."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"not done in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def stop(worker: LocalWorker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    while " T " not in Path(f"/proc/{worker.pid}/stat").read_text():
        time.sleep(0.01)


def test_a_stopped_worker_is_given_up(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """The error names shard, operation and cause; later requests fail at once."""
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL, timeout=0.5)
    pid = worker.pid
    stop(worker)
    with within(10), pytest.raises(WorkerError) as caught:
        worker.statistics()
    told = f"shard [0,7): statistics: no answer in 0.5 seconds: worker process {pid} is stopped"
    assert (str(caught.value), caught.value.name) == (told, "timeout")
    assert gone(pid)
    with within(1), pytest.raises(WorkerError, match="describe: no answer"):
        worker.describe()
    worker.close()


def test_a_request_that_a_stopped_worker_does_not_take(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """More than the socket holds: sending waits for the worker too, and closing does not."""
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL, timeout=0.5)
    pid = worker.pid
    stop(worker)
    with within(10), pytest.raises(WorkerError, match=r"shard \[0,7\): decode: no answer in 0.5 seconds"):
        worker.request(Type.DECODE, {}, LARGE)
    with within(5):
        worker.close()
    assert gone(pid)


def test_an_interrupt_in_the_middle_of_a_message(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """What follows half a message would be read as its rest: the worker is ended, and closing is quick."""
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL)
    pid = worker.pid
    stop(worker)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.request(Type.DECODE, {}, LARGE)
    finally:
        signal.signal(signal.SIGALRM, before)
    with within(8):
        with pytest.raises(WorkerError, match="only partly sent"):
            worker.statistics()
        worker.close()
    assert gone(pid)


def test_an_interrupt_while_an_answer_is_taken(
    patched_build: NativeBuild, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that have been read and are not noted: the next answer would begin in the middle of this one."""
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL)
    pid = worker.pid

    def interrupt() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_advance", interrupt)
    with within(8):
        with pytest.raises(KeyboardInterrupt):
            worker.statistics()
        with pytest.raises(WorkerError, match="only partly taken"):
            worker.statistics()
        worker.close()
    assert gone(pid)


def test_a_worker_that_another_thread_loses(
    patched_build: NativeBuild, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is begun at the moment at which the loss is told to those under way waits for its time-out, with a
    processor of its own."""
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL)
    pack = worker_module.protocol.pack

    def lose(*arguments: Any) -> bytes:
        worker.kill()
        while worker._lost is None:
            worker._poll()
        return pack(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(worker_module.protocol, "pack", lose)
        pending = worker.request(Type.STATISTICS)
    with within(5), pytest.raises(WorkerError, match=r"shard \[0,7\): statistics: .*signal 9 \(SIGKILL\)"):
        pending.result()
    assert pending.done()
    worker.close()


def program(path: Path, text: str) -> Path:
    """Something that is started in a worker's place."""
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        # A header that promises a text.
        (
            r"printf 'BBWP\001\200\0\0\001\0\0\0\0\0\0\0\144\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0{'; exit 3",
            "ended with status 3 in the middle of a message",
        ),
        ("printf BBWP; exit 0", "ended with status 0 in the middle of a message"),
        ("printf BBWP; exec >&- <&- sleep 60", "closed its connection and did not end in the middle of a message"),
        ("exec >&- <&- sleep 60", "closed its connection and did not end"),
        ("kill -9 $$", r"was ended by signal 9 \(SIGKILL\)"),
        ('ulimit -v 3000; exec WORKER "$@"', "ended with status 127: .*error while loading shared libraries: .*"),
    ],
    ids=["in a text", "in a header", "in a header, alive", "alive", "killed", "without memory"],
)
def test_how_a_worker_leaves(
    text: str, cause: str, patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """An error that takes the end that the driver made of a worker for its cause, or that lacks shard or operation."""
    monkeypatch.setattr(worker_module, "CLOSE_GRACE", 0.5)
    leaving = program(tmp_path / "leaving", text.replace("WORKER", str(patched_build.worker)))
    with within(10), pytest.raises(WorkerError) as caught:
        start_workers(leaving, tiny["tied"], [(2, 4)], SMALL)
    assert re.fullmatch(rf"shard \[2,4\): start: worker process \d+ {cause}", str(caught.value)), caught.value


@pytest.mark.parametrize("what", ["tempfile.TemporaryFile", "socket.socketpair", "subprocess.Popen"])
def test_what_a_worker_needs_cannot_be_had(
    what: str, patched_build: NativeBuild, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or no descriptors left, told without the shard; or descriptors that a start that failed keeps."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(what, refuse)
    with pytest.raises(WorkerError, match=r"shard \[2,4\): start: cannot start .*: Too many open files") as caught:
        LocalWorker(patched_build.worker, tiny["tied"], (2, 4), SMALL)
    assert (caught.value.code, caught.value.name) == (0, "lost")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_that_never_loads(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading has a longer time-out of its own."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(worker_module, "LOAD_TIMEOUT", 1.0)
    began = time.monotonic()
    with within(10), pytest.raises(WorkerError, match=r"shard \[0,7\): start: no answer in 1 seconds: .* does nothing"):
        start_workers(silent, tiny["tied"], [(0, 7)], SMALL, timeout=0.1)
    assert time.monotonic() - began >= 1


def test_stopped_workers_are_closed_together(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    workers = start_workers(patched_build.worker, tiny["tied"], make_plan(7, [1, 2, 3, 4, 5]), SMALL)
    pids = [worker.pid for worker in workers]
    for worker in workers:
        stop(worker)
    with within(worker_module.CLOSE_GRACE + 3):
        close_workers(workers)
    assert all(map(gone, pids))


def test_a_closed_worker(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL)
    stop(worker)  # before it is asked, or it may have answered
    pending = worker.request(Type.STATISTICS)
    worker.close()
    for ask in (worker.statistics, worker.describe, lambda: worker.request(Type.CLEAR)):
        with pytest.raises(WorkerError, match=r"shard \[0,7\): \w+: the worker has been closed"):
            ask()
    with within(1), pytest.raises(WorkerError):
        pending.result()
    assert pending.done()
    worker.close()


def test_a_worker_ends_by_itself_when_it_is_closed(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Closing is no killing: the worker is asked, and ends with status 0."""
    workers = start_workers(patched_build.worker, tiny["tied"], make_plan(7, [3]), SMALL)
    close_workers(workers)
    assert [worker._process.returncode for worker in workers] == [0, 0]


@pytest.mark.parametrize("number", [None, signal.SIGINT])
def test_a_run_whose_workers_stop(
    patched_build: NativeBuild, tiny: dict[str, Path], number: signal.Signals | None
) -> None:
    """One stopped worker meets --timeout; with all of them stopped, Ctrl-C is answered in a few seconds."""
    command = ["run", "--worker", str(patched_build.worker), "--model", str(tiny["tied"]), "--prompt", "split this"]
    command += ["--threads", "1", "--ctx", "32768", "--cuts", "2,4", "--tokens", "20000", "--ignore-eos"]
    command += ["--timeout", "1" if number is None else "60"]
    with subprocess.Popen(
        [sys.executable, "-m", "boundary_bundle.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(8)
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        workers = [int(word) for word in text.split()]
        assert len(workers) == 3
        for pid in workers[1:2] if number is None else workers:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        if number is not None:
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
        took = time.monotonic() - began
    told = err.decode()
    assert took < 9, told
    assert told.count("\n") == 1, told
    if number is None:
        assert process.returncode == 2
        assert "shard [2,4): decode: no answer in 1 seconds: worker process" in told
        assert "is stopped" in told
    else:
        assert (process.returncode, told) == (130, "interrupted\n")
    assert all(map(gone, workers))


def test_a_run_that_is_stopped_itself(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """A driver that was stopped for longer than its patience takes the answers that have come meanwhile for silence."""
    command = ["run", "--worker", str(patched_build.worker), "--model", str(tiny["tied"]), "--prompt", "split this"]
    command += ["--threads", "1", "--ctx", "8192", "--batch", "512", "--cuts", "2,4", "--tokens", "7000"]
    with subprocess.Popen(
        [sys.executable, "-m", "boundary_bundle.cli", *command, "--ignore-eos", "--timeout", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.read(8)
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.2)
            process.send_signal(signal.SIGCONT)
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.decode()) == (130, "interrupted\n")


def test_answers_that_are_looked_at_late(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """The same for certain: the answer is there before the wait, and the patience is over."""
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL, timeout=0.2)
    for _ in range(3):
        pending = worker.request(Type.STATISTICS)
        while not worker._readable.poll(0):
            pass
        since = time.monotonic()
        while time.monotonic() - since < 0.3:
            pass
        left = worker._patience(0.0, "statistics")
        assert left is not None
        assert left > 0
        assert pending.done()
    worker.close()


def test_timeout_is_a_time(patched_build: NativeBuild) -> None:
    from boundary_bundle.cli import main

    for text in ("0", "-1", "nan", "inf", "soon", "1e9"):
        assert main(["run", "--model", "m", "--prompt", "x", f"--timeout={text}"]) == 2


# -- shards that would be left ahead


class Failing(CheckedRelay):
    """Fails once at hop ``hop``, or in ``receive``, with ``error``."""

    def __init__(self, hop: int | None, error: BaseException) -> None:
        super().__init__()
        self._hop = hop
        self._error = error
        self.armed = False

    def forward(self, hop: int, step: int, rows: int, data: Any) -> Any:
        if self.armed and hop == self._hop:
            raise self._error
        return super().forward(hop, step, rows, data)

    def receive(self, step: int, rows: int, data: Any) -> Any:
        if self.armed and self._hop is None:
            raise self._error
        return super().receive(step, rows, data)


@pytest.mark.parametrize("error", [PipelineError("planted"), KeyboardInterrupt(), ValueError("planted")])
@pytest.mark.parametrize("hop", [0, 1, None])
def test_shards_before_a_failing_relay_are_taken_back(
    patched_build: NativeBuild, tiny: dict[str, Path], hop: int | None, error: BaseException
) -> None:
    talk = Conversation(3)
    batches = [talk.batch([0, 0, 1]), talk.batch([1, 0, 2]), talk.batch([0])]
    relay = Failing(hop, error)
    workers = start_workers(patched_build.worker, tiny["tied"], [*make_plan(7, [2, 4]), (0, 7)], SMALL)
    try:
        split, whole = Pipeline(workers[:3], relay), Pipeline(workers[3:])
        for batch in batches:
            relay.armed = True
            with pytest.raises(type(error)):
                split.decode(batch, logits=True)
            relay.armed = False
            ours, theirs = split.decode(batch, logits=True).logits, whole.decode(batch, logits=True).logits
            assert ours is not None
            assert theirs is not None
            assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    finally:
        close_workers(workers)


def test_batches_of_nothing(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    workers = start_workers(patched_build.worker, tiny["tied"], [(0, 7)], SMALL)
    try:
        for size in (0, -1):
            with pytest.raises(ValueError, match=f"in batches of {size} tokens"):
                generate(Pipeline(workers), [5, 6], 2, batch_size=size)
        with pytest.raises(PipelineError, match="a prompt of 1 token and 1048576 more"):
            generate(Pipeline(workers), [5], 1 << 20, batch_size=8)
    finally:
        close_workers(workers)
