"""Who does the work in bench_shards.py: our shards, also through Ray, two unsplit workers at once, upstream's loop in
one process, and that over its RPC backend.

Each does a :class:`Work` as the others do it, with the same batches of the same tokens, and draws greedily.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from boundary_bundle.native import NativeBuild
from boundary_bundle.native.build import BENCH_RPC, RPC_SERVER
from boundary_bundle.shards import Batch, FlowPipeline, Plan, Settings, Step, close_workers, start_workers
from boundary_bundle.shards.pipeline import Logits
from boundary_bundle.shards.ray_engine import RayPipeline, ray_cluster

#: Seconds in which upstream's programs give an answer, or load, and a server begins to listen.
_ANSWER: Final = 600.0
_LISTEN: Final = 30.0
#: Ports that are tried: one that is free may be taken by the time that a server asks for it.
_TRIES: Final = 5
_HOST: Final = "127.0.0.1"


class SubjectError(Exception):
    """Somebody cannot do the work; one sentence."""


@dataclass(frozen=True)
class Work:
    """A prefill of ``tokens`` tokens in batches of ``size`` (``steps`` 0), or decoding ``steps`` tokens of each of
    ``sequences`` sequences, one of each of ``size`` sequences in a batch, after prefills that do not count. A
    round has ``turns`` of it.
    """

    name: str
    tokens: int
    size: int
    sequences: int = 1
    steps: int = 0
    turns: int = 1

    @property
    def counted(self) -> int:
        """Tokens that the speed counts."""
        return self.steps * self.sequences or self.tokens

    @property
    def positions(self) -> int:
        """What each sequence needs room for."""
        return self.tokens + self.steps

    @property
    def groups(self) -> list[range]:
        """The sequences of each batch of one decode step."""
        every = range(self.sequences)
        return [every[first : first + self.size] for first in range(0, self.sequences, self.size)]


@dataclass
class Outcome:
    """What came of one run: seconds, the tokens drawn for each sequence, logits f32 [draws, n_vocab] where they were
    asked for, and what the pipeline tells of each batch that counts."""

    seconds: float
    tokens: list[list[int]]
    logits: Logits | None = None
    steps: list[Step] = field(default_factory=list)


class Subject(ABC):
    """``kind`` is split (our shards, one of them: unsplit), apart (two unsplit ones at once), ray (those in Ray's
    actors), loop or rpc; ``shards`` how many parts the model is in."""

    kind: str
    shards: int

    @property
    def ours(self) -> bool:
        return self.kind in ("split", "apart", "ray")

    @abstractmethod
    def run(self, work: Work, prompts: Sequence[list[int]], *, logits: bool = False) -> Outcome:
        """Do it once from empty sequences; ``prompts`` has the tokens of each. Raises WorkerError and SubjectError."""


class Shards(Subject):
    """Our workers behind the driver, bundles going from worker to worker, or through Ray."""

    def __init__(self, pipeline: FlowPipeline | RayPipeline) -> None:
        self.kind = "split" if isinstance(pipeline, FlowPipeline) else "ray"
        self.shards = len(pipeline.workers)
        self.pipeline = pipeline

    def run(self, work: Work, prompts: Sequence[list[int]], *, logits: bool = False) -> Outcome:
        self.pipeline.clear()
        done = self._decode(work, prompts, logits) if work.steps else self._prefill(work, prompts[0], logits)
        if logits:
            done.logits = np.concatenate([step.logits for step in done.steps if step.logits is not None])
        return done

    def _prefill(self, work: Work, prompt: Sequence[int], logits: bool) -> Outcome:
        began = time.perf_counter()
        flows = []
        for start in range(0, len(prompt), work.size):
            last = start + work.size >= len(prompt)
            batch = Batch.of_sequence(prompt[start : start + work.size], start, outputs="last" if last else "none")
            flows.append(self.pipeline.submit(batch, logits=logits and last))
        steps = [flow.result() for flow in flows]
        return Outcome(time.perf_counter() - began, [steps[-1].sampled], steps=steps)

    def _decode(self, work: Work, prompts: Sequence[list[int]], logits: bool) -> Outcome:
        following = []
        for sequence, prompt in enumerate(prompts):
            batch = Batch.of_sequence(prompt, 0, sequence=sequence)
            following.append(self.pipeline.decode(batch).sampled[-1])
        drawn: list[list[int]] = [[] for _ in prompts]

        def submit(group: range, step: int) -> Any:
            tokens, positions = [following[s] for s in group], [work.tokens + step] * len(group)
            batch = Batch(tokens, positions, [(s,) for s in group], [True] * len(group))
            return self.pipeline.submit(batch, logits=logits)

        began = time.perf_counter()
        # Each group goes on as soon as its own tokens are drawn, whatever the others do.
        flows = [submit(group, 0) for group in work.groups]
        steps: list[Step] = []
        for number in range(1, work.steps + 1):
            for place, group in enumerate(work.groups):
                step = flows[place].result()
                steps.append(step)
                for sequence, token in zip(group, step.sampled, strict=True):
                    following[sequence] = token
                    drawn[sequence].append(token)
                if number < work.steps:
                    flows[place] = submit(group, number)
        return Outcome(time.perf_counter() - began, drawn, steps=steps)


@contextlib.contextmanager
def shards(program: Path, model: Path, plan: Plan, settings: Settings, *, shared: bool = True) -> Iterator[Shards]:
    """Our workers, one a range of ``plan``; not ``shared``: bundles go through sockets. Raises WorkerError."""
    workers = start_workers(program, model, plan, settings)
    try:
        yield Shards(FlowPipeline(workers, shared_memory=None if shared else 0))
    finally:
        close_workers(workers)


class Apart(Subject):
    """Two unsplit workers that do the same work at the same time: how much of two workers these processors bear, of
    which no hand-over takes anything. Seconds are those of one work at the speed of both together."""

    def __init__(self, pair: Sequence[Shards]) -> None:
        self.kind, self.shards = "apart", 1
        self._pair = pair
        self._other = ThreadPoolExecutor(1)

    def run(self, work: Work, prompts: Sequence[list[int]], *, logits: bool = False) -> Outcome:
        one, other = self._pair
        beside = self._other.submit(other.run, work, prompts, logits=logits)
        done, also = one.run(work, prompts, logits=logits), beside.result()
        if done.tokens != also.tokens:
            raise SubjectError(f"two unsplit workers draw other tokens than each other in {work.name}")
        return replace(done, seconds=1 / (1 / done.seconds + 1 / also.seconds))


@contextlib.contextmanager
def apart(program: Path, model: Path, plan: Plan, settings: Settings) -> Iterator[Apart]:
    """Two workers of the one range of ``plan``. Raises WorkerError."""
    with shards(program, model, plan, settings) as one, shards(program, model, plan, settings) as other:
        yield Apart((one, other))


@contextlib.contextmanager
def ray_shards(program: Path, model: Path, plan: Plan, settings: Settings) -> Iterator[Shards]:
    """The same in actors of a cluster of this process's own. Raises WorkerError and PipelineError."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_cluster(None, settings.threads * len(plan)))
        pipeline = RayPipeline(model, plan, settings, program=program)
        stack.callback(pipeline.close)
        yield Shards(pipeline)


class Loop(Subject):
    """native_shim/tests/bench_rpc.cpp. ``places`` is what it found out about its layers."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Any, folder: Path, n_shards: int) -> None:
        self.kind = "rpc" if n_shards else "loop"
        self.shards = n_shards or 1
        self._process, self._errors, self._folder = process, errors, folder
        found = self._answer()
        #: How many layers are computed in each buffer, in order, and where the head is.
        self.places: dict[str, Any] = {"layers": dict(Counter(found["layers"])), "head": found["head"]}

    def run(self, work: Work, prompts: Sequence[list[int]], *, logits: bool = False) -> Outcome:
        request: dict[str, Any] = {"prefill": prompts[0], "batch": work.size}
        if work.steps:
            request = {"decode": list(prompts), "steps": work.steps, "group": work.size}
        rows = self._folder / "logits"
        if logits:
            request["logits"] = str(rows)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; the missing answer tells why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        told = self._answer()
        table = None
        if logits:
            table = np.fromfile(rows, np.float32).reshape(work.steps * work.sequences or 1, -1)
        return Outcome(told["seconds"], told["tokens"], table)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _ANSWER)[0]:
            raise SubjectError(f"{BENCH_RPC} gave no answer in {_ANSWER:g} seconds")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            status = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            raise SubjectError(said[-1] if said else f"{BENCH_RPC} ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def loop(built: NativeBuild, model: Path, settings: Settings, ranges: Sequence[tuple[int, int]] = ()) -> Iterator[Loop]:
    """Upstream's loop in one process, or with each of ``ranges`` on a server of its own. Raises SubjectError."""
    numbers = [settings.threads, settings.ctx, settings.batch, settings.seqs]
    command = [str(built.programs[BENCH_RPC]), str(model), *map(str, numbers)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bb-bench-")))
        if ranges:
            ports = [stack.enter_context(_server(built.programs[RPC_SERVER], settings.threads)) for _ in ranges]
            command.append(",".join(f"{_HOST}:{port}" for port in ports))
            command.append(",".join(str(end - start) for start, end in ranges))
        errors = stack.enter_context(tempfile.TemporaryFile())
        pipe = subprocess.PIPE
        process = _start(command, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0)
        stack.enter_context(_ended(process))
        yield Loop(process, errors, folder, len(ranges))


@contextlib.contextmanager
def _server(program: Path, threads: int) -> Iterator[int]:
    """One server on a free port of this machine; the port."""
    for _ in range(_TRIES):
        with socket.socket() as free:
            free.bind((_HOST, 0))
            port = free.getsockname()[1]
        # Standard output says what it serves, once for each client.
        command = [str(program), "-H", _HOST, "-p", str(port), "-t", str(threads)]
        process = _start(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with _ended(process):
            if _listens(process, port):
                yield port
                return
    raise SubjectError(f"no RPC server began to listen on {_HOST} at any of {_TRIES} ports")


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + _LISTEN
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
            return process.poll() is None
        select.select([], [], [], 0.02)
    return False


def _start(command: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    try:
        # A Ctrl-C is the benchmark's to answer.
        return subprocess.Popen(command, start_new_session=True, **more)
    except OSError as error:
        raise SubjectError(f"cannot start {command[0]}: {error.strerror}") from None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
