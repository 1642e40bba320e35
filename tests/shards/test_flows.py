"""Bundles from worker to worker, several batches under way (spec/worker-protocol.md, Flows and Samplers).

Catches: bits that differ from the unsplit worker's, batches that overtake each other, more under way than is allowed,
a shard that waits for another one that could work, shards left ahead after a refusal, a lost, stopped or deaf worker
that is not named, descriptors and memory that stay, nonsense in shared memory that gets through, tokens drawn otherwise
than by llama.cpp's samplers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from drive import Conversation, Logits, assert_same_bits, logits_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import decode, encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Batch,
    FlowPipeline,
    LocalWorker,
    Pipeline,
    PipelineError,
    Sampling,
    Settings,
    WorkerError,
    WorkerPool,
    close_workers,
    generate,
    generate_streams,
    make_plan,
    protocol,
    shares,
    start_workers,
    tiny_models,
)
from boundary_bundle.shards.protocol import FLOWS, Type

pytestmark = pytest.mark.shards

SMALL = Settings(threads=1, ctx=256, batch=16, ubatch=8, seqs=4)
N_LAYER = 6
#: Bytes that neighbours share: none, the least (which bundles go around many times), and what is usual.
SHARED = (0, 65536, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of six layers, so that there may be six shards."""
    path = tmp_path_factory.mktemp("flows") / "six.gguf"
    tiny_models.write(path, shape=tiny_models.Shape(n_layer=N_LAYER))
    return path


@contextmanager
def flowing(
    program: Path, model: Path, cuts: Sequence[int], *, timeout: float = 60.0, how: Settings = SMALL, **options: object
) -> Iterator[FlowPipeline]:
    extra = options.pop("extra", ())
    workers = start_workers(program, model, make_plan(N_LAYER, cuts), how, timeout, extra)  # type: ignore[arg-type]
    try:
        yield FlowPipeline(workers, **options)  # type: ignore[arg-type]
    finally:
        close_workers(workers)


@pytest.fixture
def oracle(pool: WorkerPool, unpatched_build: NativeBuild, model: Path) -> Pipeline:
    """The unsplit worker on the unpatched library."""
    return pool.pipeline(unpatched_build.worker, model, [(0, N_LAYER)], SMALL)


def flowed(pipeline: FlowPipeline, batches: Sequence[Batch]) -> list[Logits]:
    """The logits of every batch, as many under way as the pipeline has."""
    under_way = [pipeline.submit(batch, logits=True) for batch in batches]
    found = []
    for flow in under_way:
        rows = flow.result().logits
        assert rows is not None
        found.append(np.array(rows))
    return found


def conversation(seed: int, n_batches: int = 24) -> list[Batch]:
    """Batches of one to sixteen tokens of up to four sequences, with few outputs and with many."""
    random = np.random.default_rng(seed)
    talk = Conversation(seed)
    batches = []
    for _ in range(n_batches):
        sequences = random.integers(0, 4, random.integers(1, 17)).tolist()
        batches.append(talk.batch(sequences, (random.random(len(sequences)) < random.random()).tolist()))
    return batches


# ---- the same bits ----------------------------------------------------------------------


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("cuts", [[], [3], [1, 5], [1, 2, 3, 4, 5]], ids=lambda cuts: f"{len(cuts) + 1} shards")
def test_every_logit_is_that_of_the_unsplit_worker(
    patched_build: NativeBuild, oracle: Pipeline, model: Path, cuts: list[int], shared: int | None
) -> None:
    """Over sockets, and through memory that is just large enough and larger. Sums of bytes of the bundles go around the
    smallest ring many times."""
    batches = conversation(len(cuts))
    expected = logits_of(oracle, batches)
    with flowing(patched_build.worker, model, cuts, shared_memory=shared) as pipeline:
        assert_same_bits(flowed(pipeline, batches), expected)
        pipeline.clear()
        assert_same_bits(logits_of(pipeline, batches), expected)  # one after the other
        assert [worker.statistics()["flows"] for worker in pipeline.local] == [2 * len(batches)] * (len(cuts) + 1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    cuts=st.sets(st.integers(1, N_LAYER - 1)).map(sorted),
    in_flight=st.integers(1, 12),
    shared=st.sampled_from(SHARED),
    checksums=st.booleans(),
)
def test_any_cuts_and_any_number_under_way(
    patched_build: NativeBuild,
    unpatched_build: NativeBuild,
    pool: WorkerPool,
    model: Path,
    seed: int,
    cuts: list[int],
    in_flight: int,
    shared: int | None,
    checksums: bool,
) -> None:
    """New links between workers that are up: what an earlier link left must not matter."""
    batches = conversation(seed, 8)
    expected = logits_of(pool.pipeline(unpatched_build.worker, model, [(0, N_LAYER)], SMALL), batches)
    workers = pool.workers(patched_build.worker, model, make_plan(N_LAYER, cuts), SMALL)
    pipeline = FlowPipeline(workers, shared_memory=shared, checksums=checksums, in_flight=in_flight)
    assert_same_bits(flowed(pipeline, batches), expected)


def test_a_prompt_in_micro_batches_and_text(
    patched_build: NativeBuild, unpatched_build: NativeBuild, pool: WorkerPool, smollm2: Path
) -> None:
    """The prompt flows in batches of the micro-batch, the reference takes it whole: 96 tokens and 12 more."""
    how = Settings(threads=1, ctx=256, batch=96, ubatch=16, seqs=1)
    workers = pool.workers(patched_build.worker, smollm2, make_plan(30, [10, 20]), how)
    reference = pool.pipeline(unpatched_build.worker, smollm2, [(0, 30)], how)
    prompt = (workers[-1].tokenize("Once upon a time there was a worker that waited for another one. ") * 9)[:96]
    pipeline = FlowPipeline(workers)
    parts = [Batch.of_sequence(prompt[i : i + 16], i, outputs="all") for i in range(0, 96, 16)]
    flows = [pipeline.submit(part, logits=True) for part in parts]
    ours = [flow.result().logits for flow in flows]
    whole = reference.decode(Batch.of_sequence(prompt, 0, outputs="all"), logits=True).logits
    assert whole is not None
    assert_same_bits([np.concatenate([rows for rows in ours if rows is not None])], [whole])
    generation = generate(pipeline, prompt, 12, batch_size=16, reference=reference, all_logits=True)
    assert generation.logits_compared == (96 + 11) * pipeline.model.n_vocab
    assert generation.logits_differing == 0


@pytest.mark.parametrize("group", [1, 2, 3])
def test_streams(
    patched_build: NativeBuild, unpatched_build: NativeBuild, pool: WorkerPool, model: Path, group: int
) -> None:
    """Several prompts at once: each one's tokens are those that it gets alone, each logit the reference's."""
    prompts = [[5, 9, 17], [200, 3], [7] * 20, [44]]
    workers = pool.workers(patched_build.worker, model, make_plan(N_LAYER, [2, 4]), SMALL)
    reference = pool.pipeline(unpatched_build.worker, model, [(0, N_LAYER)], SMALL)
    streams = generate_streams(FlowPipeline(workers), prompts, 9, batch_size=8, group=group, reference=reference)
    assert streams.logits_differing == 0
    assert streams.logits_compared >= 4 * 9 * 320
    assert streams.decoded == 4 * 8
    if group == 1:
        alone = [generate(reference, prompt, 9, batch_size=8).tokens for prompt in prompts]
        assert streams.tokens == alone


def test_graphs_are_reused_on_every_shard(
    patched_build: NativeBuild, unpatched_build: NativeBuild, pool: WorkerPool, model: Path
) -> None:
    """As often as by the unsplit worker of the unpatched library, for the same batches."""
    workers = pool.workers(patched_build.worker, model, make_plan(N_LAYER, [2, 4]), SMALL)
    reference = pool.pipeline(unpatched_build.worker, model, [(0, N_LAYER)], SMALL)
    pipeline = FlowPipeline(workers)
    every = [*workers, *reference.workers]
    before = [worker.statistics()["graphs_reused"] for worker in every]
    generate(pipeline, [1, 2, 3], 40, batch_size=8)
    generate(reference, [1, 2, 3], 40, batch_size=8)
    reused = [worker.statistics()["graphs_reused"] - old for worker, old in zip(every, before, strict=True)]
    assert len(set(reused)) == 1, reused
    assert reused[0] >= 36


# ---- side by side -----------------------------------------------------------------------


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not in {seconds:g} seconds"
        time.sleep(0.01)


@contextmanager
def stopped(worker: LocalWorker) -> Iterator[None]:
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        until(worker.is_stopped, "stopped")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been ended meanwhile
            os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.parametrize("shared", [0, None])
def test_a_shard_goes_on_while_the_next_one_is_busy_and_no_further_than_allowed(
    patched_build: NativeBuild, oracle: Pipeline, model: Path, shared: int | None
) -> None:
    """With the last worker stopped the others compute what is under way, and no more may be; then all comes out."""
    talk = Conversation(3)
    batches = [talk.batch([0, 1]) for _ in range(5)]
    expected = logits_of(oracle, batches)
    with flowing(patched_build.worker, model, [2, 4], shared_memory=shared, in_flight=4) as pipeline:
        with stopped(pipeline.local[2]):
            flows = [pipeline.submit(batch, logits=True) for batch in batches[:4]]
            for worker in pipeline.local[:2]:
                until(lambda worker=worker: worker.statistics()["flows"] == 4, "computed by those before")  # type: ignore[misc]
            assert not any(flow.done() for flow in flows)
            late: list[float] = []
            signal.signal(signal.SIGALRM, lambda *_: (late.append(1.0), os.kill(pipeline.local[2].pid, signal.SIGCONT)))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            flows.append(pipeline.submit(batches[4], logits=True))  # waits until one has come out
            assert late
            assert flows[0].done()
        found = [flow.result().logits for flow in flows]
        assert_same_bits([np.array(rows) for rows in found], expected)


def ticks(pid: int) -> int:
    """Of a process's time, 10 ms each."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_an_idle_pipeline_takes_no_processor(patched_build: NativeBuild, model: Path) -> None:
    """Neither with sockets nor with shared memory: nobody waits by looking."""
    for shared in (0, None):
        with flowing(patched_build.worker, model, [2, 4], shared_memory=shared) as pipeline:
            flowed(pipeline, conversation(1, 4))
            before = [ticks(worker.pid) for worker in pipeline.local]
            time.sleep(0.6)
            assert [ticks(worker.pid) for worker in pipeline.local] == before or max(
                ticks(worker.pid) - old for worker, old in zip(pipeline.local, before, strict=True)
            ) <= 3


def test_idle_limits_are_not_for_who_waits_for_flows(patched_build: NativeBuild, oracle: Pipeline, model: Path) -> None:
    """With --idle a worker lets go of a peer that asks nothing; the driver of a flow asks the first one alone."""
    batches = conversation(8, 3)
    expected = logits_of(oracle, batches)
    with flowing(patched_build.worker, model, [2, 4], extra=("--idle", "1")) as pipeline:
        time.sleep(1.5)
        assert_same_bits(flowed(pipeline, batches), expected)


def test_processors_are_dealt_out(patched_build: NativeBuild, model: Path) -> None:
    """Each worker computes on its own; one that may not be used is refused by name."""
    usable = sorted(os.sched_getaffinity(0))
    assert shares([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3, 4]]
    assert shares([3, 7], 3) == [[3, 7]] * 3
    dealt = shares(usable, 2)
    workers = start_workers(patched_build.worker, model, make_plan(N_LAYER, [3]), SMALL, processors=dealt)
    try:
        assert [sorted(os.sched_getaffinity(worker.pid)) for worker in workers] == dealt
    finally:
        close_workers(workers)
    for text, message in (
        ("1023", "processor 1023 is none that this process may use"),
        ("2-1", "--processors is '1', not an integer from 2"),
        ("", "--processors is '', not an integer"),
        ("0,", "--processors is '', not an integer"),
        ("a", "--processors is 'a', not an integer from 0 to 1023"),
    ):
        with pytest.raises(WorkerError, match=message):
            start_workers(patched_build.worker, model, [(0, N_LAYER)], SMALL, extra=["--processors", text])


# ---- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, None])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_refusal_names_the_shard_and_leaves_all_where_they_were(
    patched_build: NativeBuild, oracle: Pipeline, model: Path, place: int, shared: int | None
) -> None:
    """One shard has lost positions: it refuses what comes, also what is under way behind that, and nothing is kept of
    it anywhere; other sequences are not disturbed."""
    talk = Conversation(4)
    first, second, third = talk.batch([0, 0, 1]), talk.batch([0]), talk.batch([0])
    other = talk.batch([1, 1])
    expected = logits_of(oracle, [first, other])
    with flowing(patched_build.worker, model, [2, 4], shared_memory=shared) as pipeline:
        assert_same_bits(flowed(pipeline, [first]), expected[:1])
        pipeline.local[place].clear(0, 1)
        flows = [pipeline.submit(batch, logits=True) for batch in (second, third, other)]
        for flow in flows[:2]:
            with pytest.raises(WorkerError) as caught:
                flow.result()
            assert caught.value.name == "position"
            assert caught.value.layer_range == pipeline.local[place].layer_range
            assert caught.value.operation == "decode"
        rows = flows[2].result().logits
        assert rows is not None
        assert_same_bits([np.array(rows)], expected[1:])
        # Where sequence 0 stands now: at 1 on the shard that lost it, at 2 on the others, whatever was under way.
        pipeline.clear()
        assert_same_bits(flowed(pipeline, [first]), expected[:1])


def test_after_a_refusal_the_same_position_can_be_asked_for(
    patched_build: NativeBuild, oracle: Pipeline, model: Path
) -> None:
    """A batch with a wrong position is refused by the first; one that the last refuses is taken back on the others."""
    talk = Conversation(5)
    first, second = talk.batch([0, 0]), talk.batch([0])
    expected = logits_of(oracle, [first, second])
    with flowing(patched_build.worker, model, [2, 4]) as pipeline:
        flowed(pipeline, [first])
        with pytest.raises(WorkerError, match=r"shard \[0,2\).*position"):
            pipeline.decode(Batch([1], [7], [(0,)], [True]))
        saved = pipeline.local[2]
        saved.clear(0, 1)  # and is given the position again behind the others' back
        with pytest.raises(WorkerError, match=r"shard \[4,6\).*position"):
            pipeline.decode(second)
        for worker in pipeline.local:
            worker.clear(0)
        assert_same_bits(flowed(pipeline, [first, second]), expected)


@pytest.mark.parametrize("shared", [0, None])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_worker_is_named(patched_build: NativeBuild, model: Path, victim: int, shared: int | None) -> None:
    """Killed while batches are under way: each is answered by that worker's loss, within seconds."""
    with flowing(patched_build.worker, model, [2, 4], shared_memory=shared) as pipeline:
        talk = Conversation(6)
        flowed(pipeline, [talk.batch([0])])
        with stopped(pipeline.local[victim]):
            flows = [pipeline.submit(talk.batch([0])) for _ in range(3)]
            pipeline.local[victim].kill()
        began = time.monotonic()
        for flow in flows:
            with pytest.raises(WorkerError, match="SIGKILL") as caught:
                flow.result()
            assert caught.value.layer_range == pipeline.local[victim].layer_range
        with pytest.raises(WorkerError, match="SIGKILL"):
            pipeline.decode(talk.batch([0]))
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stopped_worker_is_named_and_ended(patched_build: NativeBuild, model: Path, victim: int) -> None:
    with flowing(patched_build.worker, model, [2, 4], timeout=1.0) as pipeline:
        talk = Conversation(7)
        flowed(pipeline, [talk.batch([0])])
        os.kill(pipeline.local[victim].pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"no answer in 1 seconds: worker process \d+ is stopped") as caught:
            pipeline.decode(talk.batch([0]))
        assert caught.value.layer_range == pipeline.local[victim].layer_range
        assert not pipeline.local[victim].alive


def test_a_driver_that_was_stopped_itself(
    patched_build: NativeBuild, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than its patience, between any two steps: what it does afterwards gets its time."""
    with flowing(patched_build.worker, model, [2, 4], timeout=0.5) as pipeline:
        talk = Conversation(17)
        pipeline.decode(talk.batch([0]))
        send = pipeline.local[0].send_flow

        def late(*arguments: object) -> object:
            time.sleep(0.8)
            return send(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(pipeline.local[0], "send_flow", late)
        with stopped(pipeline.local[2]):  # the answer takes a moment, too
            signal.signal(signal.SIGALRM, lambda *_: os.kill(pipeline.local[2].pid, signal.SIGCONT))
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            pipeline.decode(talk.batch([0]))


def test_a_worker_that_takes_nothing_is_named(patched_build: NativeBuild, model: Path) -> None:
    """The memory between two shards is full, and stays so: the one before says that it cannot pass on; the driver
    that the one behind is the cause. --stall 1 is how long it tries."""
    how = Settings(threads=1, ctx=4096, batch=64, ubatch=64, seqs=1)
    with flowing(
        patched_build.worker, model, [3], how=how, shared_memory=65536, in_flight=40, extra=("--stall", "1")
    ) as pipeline:
        talk = Conversation(9)
        with stopped(pipeline.local[1]):
            flows = [pipeline.submit(talk.batch([0] * 64)) for _ in range(40)]
            with pytest.raises(WorkerError, match="takes no bundle from the shard before it") as caught:
                flows[-1].result()
        assert caught.value.layer_range == (3, 6)


def test_a_bundle_that_the_memory_cannot_hold(patched_build: NativeBuild, model: Path) -> None:
    how = Settings(threads=1, ctx=1024, batch=512, ubatch=512, seqs=1)
    with flowing(patched_build.worker, model, [3], how=how, shared_memory=65536) as pipeline:
        talk = Conversation(10)
        with pytest.raises(WorkerError, match=r"shard \[0,3\).*limit.*does not fit in the 65536 of the link's memory"):
            pipeline.decode(talk.batch([0] * 512))
        pipeline.decode(Conversation(10).batch([0] * 64))


def test_an_interrupt_leaves_nothing_ahead(patched_build: NativeBuild, oracle: Pipeline, model: Path) -> None:
    """A Ctrl-C while a batch is under way: it is taken back before the next one."""
    talk = Conversation(11)
    first, second = talk.batch([0, 0]), talk.batch([0])
    expected = logits_of(oracle, [first, second])
    with flowing(patched_build.worker, model, [2, 4]) as pipeline:
        flowed(pipeline, [first])
        with stopped(pipeline.local[1]):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                pipeline.decode(second)
        assert_same_bits(flowed(pipeline, [second]), expected[1:])


def test_what_was_interrupted_is_taken_back_though_it_came_out(
    patched_build: NativeBuild, oracle: Pipeline, model: Path
) -> None:
    """Another batch is waited for after the Ctrl-C, with which the one that nobody asks for any more comes out too."""
    talk = Conversation(19)
    first, second, other = talk.batch([0, 0]), talk.batch([0]), talk.batch([1])
    expected = logits_of(oracle, [first, second])
    with flowing(patched_build.worker, model, [2, 4]) as pipeline:
        flowed(pipeline, [first])
        with stopped(pipeline.local[1]):
            beside = pipeline.submit(other)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                pipeline.decode(second)
        beside.result()
        until(lambda: pipeline._look(0.1) or not pipeline._flows, "came out")
        assert_same_bits(flowed(pipeline, [second]), expected[1:])


@contextmanager
def interrupted_at(point: int) -> Iterator[list[str]]:
    """A Ctrl-C at the ``point``-th place of the driver where the interpreter looks for one: where a function begins,
    and after what another language's has done. Where that was, unless there are fewer."""
    where: list[str] = []
    left = point

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return") or "boundary_bundle" not in frame.f_code.co_filename:
            return
        left -= 1
        if left == 0:
            after = f" after {argument.__qualname__}" if event == "c_return" else ""
            where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}{after}")
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield where
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("how", ["decode", "submit", "relay"])
def test_an_interrupt_anywhere_in_the_driver(
    patched_build: NativeBuild, oracle: Pipeline, model: Path, how: str
) -> None:
    """Afterwards the same batch gives the right bits, or an error says which worker was given up; nothing waits long
    for what has come already."""
    given_up: list[tuple[list[str], str]] = []
    with contextlib.ExitStack() as stack:
        pipeline: Pipeline | None = None
        for point in itertools.count(1):
            if pipeline is None:
                pipeline = stack.enter_context(flowing(patched_build.worker, model, [2, 4]))
                if how == "relay":
                    pipeline = Pipeline(pipeline.local)
            talk = Conversation(point)
            first, second = talk.batch([0, 0]), talk.batch([0])
            pipeline.clear()
            expected = logits_of(oracle, [first, second])
            pipeline.decode(first)
            flow = None
            with interrupted_at(point) as where:
                if isinstance(pipeline, FlowPipeline) and how == "submit":
                    flow = pipeline.submit(second, logits=True)
                    flow.result()
                else:
                    pipeline.decode(second, logits=True)
            if not where:
                break
            began = time.monotonic()
            try:
                step = flow.result() if flow is not None else pipeline.decode(second, logits=True)
                assert step.logits is not None
                assert_same_bits([step.logits], expected[1:])
            except WorkerError as error:
                given_up.append((where, str(error)))
                pipeline = None
            assert time.monotonic() - began < 30, where
    assert point > 100
    assert all("only partly" in error for _, error in given_up), given_up
    assert len(given_up) < point / 4


def test_clear_comes_after_what_is_under_way(patched_build: NativeBuild, oracle: Pipeline, model: Path) -> None:
    """A batch that nobody has waited for, before a worker that was stopped meanwhile: clear forgets it too."""
    batch = Conversation(16).batch([0, 0])
    expected = logits_of(oracle, [batch])
    with flowing(patched_build.worker, model, [2, 4]) as pipeline:
        with stopped(pipeline.local[1]):
            pipeline.submit(batch)
            until(lambda: pipeline.local[0].statistics()["flows"] == 1, "passed on")
            signal.signal(signal.SIGALRM, lambda *_: os.kill(pipeline.local[1].pid, signal.SIGCONT))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            pipeline.clear()
        assert_same_bits(flowed(pipeline, [batch]), expected)


def test_what_makes_no_pipeline(patched_build: NativeBuild, model: Path) -> None:
    with flowing(patched_build.worker, model, [3]) as pipeline:
        for count in (0, 49):
            with pytest.raises(PipelineError, match=f"{count} batches cannot be under way, 1 to 48 can"):
                FlowPipeline(pipeline.local, in_flight=count)
        with pytest.raises(WorkerError, match="65600 bytes, not 69632"):
            FlowPipeline(pipeline.local, shared_memory=65600 - 4096)
        batch = Batch([1], [0], [(0,)], [True], sessions=[None])  # type: ignore[list-item]
        with pytest.raises(PipelineError, match="under sessions does not flow"):
            pipeline.submit(batch)


# ---- links ----------------------------------------------------------------------------------


def memory(size: int = 4096 + 65536, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def descriptors_of(worker: LocalWorker) -> int:
    return len(os.listdir(f"/proc/{worker.pid}/fd"))


@pytest.fixture
def pair(patched_build: NativeBuild, model: Path) -> Iterator[list[LocalWorker]]:
    workers = start_workers(patched_build.worker, model, make_plan(N_LAYER, [3]), SMALL, 20.0)
    yield workers
    close_workers(workers)


def test_links_that_cannot_be(pair: list[LocalWorker]) -> None:
    """What is sent along is checked before the link that is there is given up, and closed whatever comes of it."""
    first, last = pair
    before = [descriptors_of(worker) for worker in pair]
    sockets = [*socket.socketpair(), socket.socket(socket.AF_INET), *socket.socketpair(type=socket.SOCK_DGRAM)]
    unix, inet, datagram = sockets[0].fileno(), sockets[2].fileno(), sockets[3].fileno()
    files = [memory(), memory(seals=0), memory(4096 + 65536 - 64), memory(4096 + 65536 + 8)]
    read, write = os.pipe()
    for to, descriptors, message in (
        ("next", [inet], "a link needs a Unix stream socket"),
        ("next", [datagram], "a link needs a Unix stream socket"),
        ("next", [files[0]], "a link needs a Unix stream socket"),
        ("next", [unix, read], "no file of memory"),
        ("next", [unix, files[1]], "not sealed against getting shorter"),
        ("next", [unix, files[2]], "has 69568 bytes, not 69632"),
        ("next", [unix, files[3]], "in units of 64"),
        ("previous", [unix], "a worker of layers 0 to 3 of 6 has no previous one"),
        ("behind", [unix], 'to is "behind"'),
    ):
        with pytest.raises(WorkerError, match=message):
            first.link(to, descriptors).result()
    with pytest.raises(WorkerError, match="has no next one"):
        last.link("next", [unix]).result()
    with pytest.raises(WorkerError, match="statistics takes no descriptors and came with 1"):
        first._begin(Type.STATISTICS, None, b"", "statistics", descriptors=[unix]).result()
    first.link("next", [unix, files[0], read, write]).result()  # what is too much is closed
    first.link("next", []).result()
    with pytest.raises(WorkerError, match="no link to a next worker"):
        first.request(Type.DECODE, {"flow": True}, b"").result()
    # The last answer may be there before its request is gone.
    until(lambda: [descriptors_of(worker) for worker in pair] == before, "closed")
    for end in sockets:
        end.close()
    for file in (*files, read, write):
        os.close(file)


def test_descriptors_do_not_pile_up(pair: list[LocalWorker]) -> None:
    """A message in pieces of one byte, a descriptor with each: two are held, the others closed as they come."""
    worker = pair[1]
    before = descriptors_of(worker)
    message = protocol.pack(Type.STATISTICS, FLOWS + 1, None, 0)
    answer = worker.expect(FLOWS + 1, "statistics")
    read, write = os.pipe()
    for at in range(len(message) - 1):
        socket.send_fds(worker._socket, [message[at : at + 1]], [read])
        until(lambda: not _unread(worker), "taken")
    assert descriptors_of(worker) <= before + 2
    worker._socket.send(message[-1:])
    with pytest.raises(WorkerError, match="statistics takes no descriptors and came with 2"):
        answer.result(20.0)
    until(lambda: descriptors_of(worker) == before, "closed")
    os.close(read)
    os.close(write)


def _unread(worker: LocalWorker) -> int:
    """Bytes that the worker has not taken yet (SIOCOUTQ)."""
    return int(struct.unpack("i", fcntl.ioctl(worker.fileno(), 0x5411, b"\0" * 4))[0])


def test_nothing_stays_of_links(patched_build: NativeBuild, model: Path) -> None:
    """A hundred links with their memory, one after the other: no descriptor and no mapping more, anywhere."""
    workers = start_workers(patched_build.worker, model, make_plan(N_LAYER, [3]), SMALL, 20.0)
    try:

        def held() -> tuple[int, ...]:
            maps = [Path(f"/proc/{w.pid}/maps").read_text("utf-8").count("memfd:boundary-bundle") for w in workers]
            return len(os.listdir("/proc/self/fd")), *(descriptors_of(worker) for worker in workers), *maps

        FlowPipeline(workers)
        for worker in workers:  # whatever a thread of the last link still holds
            worker.statistics()
        before = held()
        for _ in range(100):
            flowed(FlowPipeline(workers), [])
        until(lambda: held() == before, f"as before: {held()} and {before}")
        assert before[-2:] == (1, 1)
    finally:
        close_workers(workers)


@pytest.mark.parametrize("shared", [False, True])
def test_a_link_ends_with_its_neighbour(pair: list[LocalWorker], shared: bool) -> None:
    """Nobody asks for anything: its socket is closed, its memory given back."""

    def held() -> tuple[int, int]:
        maps = Path(f"/proc/{pair[1].pid}/maps").read_text("utf-8")
        return descriptors_of(pair[1]), maps.count("memfd:test")

    before = held()
    neighbour = Neighbour(pair[1], shared)
    assert held() == (before[0] + 1, int(shared))
    neighbour.close()
    until(lambda: held() == before, "as before")


class Neighbour:
    """Plays the worker before one that owns the last layers, on a link that may have memory."""

    def __init__(self, worker: LocalWorker, shared: bool) -> None:
        self.worker = worker
        self.end, theirs = socket.socketpair()
        file = memory() if shared else None
        worker.link("previous", [theirs.fileno(), *([] if file is None else [file])]).result()
        theirs.close()
        self.ring = None
        if file is not None:
            self.ring = mmap.mmap(file, 4096 + 65536)
            os.close(file)

    def write(self, at: int, data: bytes) -> None:
        assert self.ring is not None
        self.ring[at : at + len(data)] = data

    def ring_bell(self) -> None:
        """``filled``: count it up, and wake whoever waits."""
        assert self.ring is not None
        word = ctypes.c_uint32.from_buffer(self.ring, 128)
        word.value += 1
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(202, ctypes.byref(word), 1, 1 << 30, None, None, 0)
        del word

    def close(self) -> None:
        self.end.close()


BIG_ENDIAN, NO_CHECKSUMS, LOGITS, NO_SAMPLE = 1, 2, 4, 8


def flow_head(flags: int = 0, fragment_size: int = 0, sent_us: int = 0, stages: bytes = b"") -> bytes:
    """What a batch has over a link in place of a text."""
    return struct.pack("<IIQQQ", flags, 0, fragment_size, sent_us, 0) + stages


def answer_of(worker: LocalWorker, number: int, seconds: float = 20.0) -> WorkerError | None:
    """What the worker says of a flow that did not come from this driver."""
    pending = worker.expect(number, "decode")
    until(lambda: (worker.take(), pending.reply or pending.error)[1] is not None, "an answer", seconds)
    worker.forget(number)
    return pending.error


def output_of(worker: LocalWorker, batch: Batch) -> bytes:
    """The first shard's bundle for the next one."""
    data = encode(batch.bundle(worker.describe()))
    return bytes(worker.request(Type.DECODE, None, data).result().bundle)


@pytest.mark.parametrize("shared", [False, True])
def test_a_stranger_can_be_the_neighbour(pair: list[LocalWorker], oracle: Pipeline, shared: bool) -> None:
    """From the text of the specification: a message in the socket, or in the ring with its places and the bell."""
    batch = Conversation(12).batch([0, 1, 0])
    expected = logits_of(oracle, [batch])[0]
    bundle = output_of(pair[0], batch)
    neighbour = Neighbour(pair[1], shared)
    text = flow_head(BIG_ENDIAN | NO_CHECKSUMS | LOGITS | NO_SAMPLE, 64)
    header = protocol.HEADER.pack(b"BBWP", Type.DECODE, 0, FLOWS + 7, len(text), 0, len(bundle))
    pending = pair[1].expect(FLOWS + 7, "decode")
    if shared:
        at = (len(header) + len(text) + 63) // 64 * 64
        neighbour.write(4096, (header + text).ljust(at, b"\0") + bundle)
        neighbour.write(0, struct.pack("<Q", (at + len(bundle) + 63) // 64 * 64))
        neighbour.ring_bell()
    else:
        neighbour.end.sendall(header + text + bundle)
    reply = pending.result(20.0)
    answer = decode(reply.bundle)
    assert_same_bits([np.array(answer["logits"], np.float32)], [expected])
    assert (answer.checksums, answer.fragment_size, answer.tensor("logits").byte_order) == (False, 64, "big")
    assert "sampled" not in reply.text
    assert [stage["layer_start"] for stage in reply.text["stages"]] == [3]
    if shared:
        assert neighbour.ring is not None
        written, freed = (struct.unpack_from("<Q", neighbour.ring, at)[0] for at in (0, 64))
        until(lambda: struct.unpack_from("<Q", neighbour.ring or b"", 64)[0] == written, f"given back {freed}")
    neighbour.close()


def test_wishes_go_along(pair: list[LocalWorker]) -> None:
    """From the side of the next worker: what was asked for, in the head and in the bundle."""
    end, theirs = socket.socketpair()
    pair[0].link("next", [theirs.fileno()]).result()
    theirs.close()
    wish = {"byte_order": "big", "fragment_size": 64, "checksums": False, "logits": True, "sample": False}
    batch = Conversation(18).batch([0, 1])
    pair[0].send_flow(FLOWS + 3, {"flow": True, **wish}, encode(batch.bundle(pair[0].describe())))
    stream = end.makefile("rb")
    header = protocol.unpack_header(stream.read(protocol.HEADER_BYTES))
    head = stream.read(header.text_length)
    bundle = decode(stream.read(header.bundle_length))
    assert (header.type, header.request) == (Type.DECODE, FLOWS + 3)
    sent_us = struct.unpack_from("<Q", head, 16)[0]
    assert head[:32] == flow_head(BIG_ENDIAN | NO_CHECKSUMS | LOGITS | NO_SAMPLE, 64, sent_us)
    assert 0 <= time.monotonic_ns() // 1000 - sent_us < 10**7
    layer_start, layer_end, _transfer, _wait, _decode, compute_us, _encode, size, zero = struct.unpack(
        "<II7Q", head[32:]
    )
    assert (layer_start, layer_end, size, zero) == (0, 3, header.bundle_length, 0)
    assert compute_us > 0
    assert (bundle.checksums, bundle.fragment_size, bundle.tensor("residual").byte_order) == (False, 64, "big")
    stream.close()
    end.close()


STAGE = struct.pack("<II7Q", 0, 3, 1, 2, 3, 4, 5, 6, 0)
HEADS = {
    "none": b"",
    "cut short": flow_head()[:-1],
    "a text": json.dumps({"flow": True, "logits": True, "sample": False}).encode(),
    "half a stage": flow_head(stages=STAGE + STAGE[:-1]),
    "more workers than layers": flow_head(stages=4 * STAGE),
    "another flag": flow_head(16),
    "the last flag": flow_head(1 << 31),
    "reserved behind the flags": struct.pack("<IIQQQ", 0, 1, 0, 0, 0),
    "reserved at the end": struct.pack("<IIQQQ", 0, 0, 0, 0, 1 << 63),
    "reserved in a stage": flow_head(stages=STAGE + STAGE[:-8] + b"\0" * 7 + b"\1"),
    "fragments of 65 bytes": flow_head(0, 65),
    "fragments of 16 exabytes": flow_head(0, (1 << 64) - 64),
}


@pytest.mark.parametrize("what", HEADS)
def test_an_unsound_head_is_refused(pair: list[LocalWorker], oracle: Pipeline, what: str) -> None:
    """That batch alone: the next one over the same link has the oracle's bits, and the stages that came with it."""
    batch = Conversation(19).batch([0, 1])
    expected = logits_of(oracle, [batch])[0]
    bundle = output_of(pair[0], batch)
    neighbour = Neighbour(pair[1], False)
    for number, text in ((FLOWS + 1, HEADS[what]), (FLOWS + 2, flow_head(LOGITS, 0, (1 << 64) - 1, STAGE))):
        pending = pair[1].expect(number, "decode")
        neighbour.end.sendall(
            protocol.HEADER.pack(b"BBWP", Type.DECODE, 0, number, len(text), 0, len(bundle)) + text + bundle
        )
        if number == FLOWS + 1:
            with pytest.raises(WorkerError) as caught:
                pending.result(20.0)
            assert caught.value.name == "argument"
            continue
        reply = pending.result(20.0)
        assert_same_bits([np.array(decode(reply.bundle)["logits"])], [expected])
        keys = ("transfer_us", "wait_us", "decode_us", "compute_us", "encode_us", "bytes")
        told = {"layer_start": 0, "layer_end": 3} | dict(zip(keys, range(1, 7), strict=True))
        assert reply.text["stages"][0] == told
        assert reply.text["stages"][1]["transfer_us"] == 0  # it was sent in the future
    neighbour.close()


class Listener:
    """Plays the worker behind one that owns the first layers, with memory."""

    def __init__(self, worker: LocalWorker, processor: int | None) -> None:
        """``processor``: the one that this listener says it cannot leave."""
        self.worker = worker
        self.end, theirs = socket.socketpair()
        file = memory()
        worker.link("next", [theirs.fileno(), file]).result()
        theirs.close()
        self.ring = mmap.mmap(file, 4096 + 65536)
        os.close(file)
        struct.pack_into("<I", self.ring, 260, 0 if processor is None else processor + 1)

    def take(self, batch: Batch, again: bool = False) -> tuple[int, int, int]:
        """Waits, but does not listen, while a batch comes: how often the bell rang, what ``coming`` is then, and the
        place of the message in the ring. It is given back. With ``again`` it waits anew as soon as the bell rings."""
        place, rung = struct.unpack_from("<Q", self.ring, 64)[0], struct.unpack_from("<I", self.ring, 128)[0]
        data = encode(batch.bundle(self.worker.describe()))
        struct.pack_into("<I", self.ring, 132, 1)
        self.worker.send_flow(FLOWS + 3, {"flow": True}, data)
        if again:
            end = time.monotonic() + 20
            while struct.unpack_from("<I", self.ring, 128)[0] == rung and time.monotonic() < end:
                pass  # there is no time to sleep
            struct.pack_into("<I", self.ring, 132, 1)
        until(lambda: struct.unpack_from("<Q", self.ring, 0)[0] > place, "a message")
        written = struct.unpack_from("<Q", self.ring, 0)[0]
        if self.ring[4096 + place % 65536 :][:4] == bytes(4):
            place = (place + 65535) // 65536 * 65536
        assert self.ring[4096 + place % 65536 :][:4] == b"BBWP"
        self.worker.statistics()  # the bell is rung behind the message
        struct.pack_into("<Q", self.ring, 64, written)
        return struct.unpack_from("<I", self.ring, 128)[0] - rung, struct.unpack_from("<I", self.ring, 256)[0], place

    def close(self) -> None:
        self.ring.close()
        self.end.close()


def test_who_writes_says_so_before(patched_build: NativeBuild, model: Path) -> None:
    """The bell rings twice for who sleeps, but not for one that could only wait on the writer's own processor. What has
    been given back is written over: a ring of which little is used stays in the processor's caches."""
    processor = sorted(os.sched_getaffinity(0))[0]
    ranges = make_plan(N_LAYER, [3])
    workers = start_workers(patched_build.worker, model, ranges, SMALL, processors=[[processor], [processor]])
    try:
        for own, rings in ((None, 2), (processor + 1, 2), (processor, 1)):
            listener = Listener(workers[0], own)
            conversation = Conversation(20)
            took = [listener.take(conversation.batch([0])) for _ in range(40)]
            assert {(rung, coming) for rung, coming, _place in took} == {(rings, 0)}
            assert {place % 65536 for _rung, _coming, place in took} == {0}
            listener.close()
            workers[0].clear()
    finally:
        close_workers(workers)


def test_who_writes_says_so_while_it_computes(patched_build: NativeBuild, model: Path) -> None:
    """Waking takes longer than writing: said when the batch is computed, it would still be waited for. Who sleeps again
    at once is told again when it is, so that the bell rings thrice."""
    processor = sorted(os.sched_getaffinity(0))[0]
    workers = start_workers(patched_build.worker, model, make_plan(N_LAYER, [3]), SMALL, processors=[[processor]] * 2)
    try:
        listener = Listener(workers[0], None)
        rung = []
        while len(rung) < 40 or (3 not in rung and len(rung) < 1000):
            rung.append(listener.take(Batch.of_sequence(range(5, 13), 0), again=True)[0])
            workers[0].clear()
        assert set(rung) <= {2, 3}
        assert 3 in rung  # each time, if nothing else keeps this process from looking
        listener.close()
    finally:
        close_workers(workers)


class Announcer(Neighbour):
    """A neighbour that says so before it writes."""

    place = 0

    def announce(self) -> None:
        """Says that a message is coming, and lets the worker wait for it in vain."""
        assert self.ring is not None
        self.write(256, struct.pack("<I", 1 << 20))  # a processor that nobody has
        self.ring_bell()
        until(lambda: struct.unpack_from("<I", self.ring or b"", 256)[0] == 0, "the end of waiting")

    def send(self, number: int, bundle: bytes) -> Any:
        """A batch, without a word before."""
        text = flow_head(LOGITS)
        pending = self.worker.expect(number, "decode")
        self.write(
            4096 + self.place,
            protocol.HEADER.pack(b"BBWP", Type.DECODE, 0, number, len(text), 0, len(bundle)) + text + bundle,
        )
        self.place += (64 + len(bundle) + 63) // 64 * 64
        self.write(0, struct.pack("<Q", self.place))
        self.ring_bell()
        return pending


def test_an_announced_message_that_does_not_come(pair: list[LocalWorker], oracle: Pipeline) -> None:
    """Costs who waits no more than the time of the specification, once; a later message is taken."""
    batch = Conversation(21).batch([0, 1])
    expected = logits_of(oracle, [batch])[0]
    bundle = output_of(pair[0], batch)
    neighbour = Announcer(pair[1], True)
    pair[1].statistics()
    before = ticks(pair[1].pid)
    for _ in range(20):
        neighbour.announce()
    time.sleep(0.3)
    assert ticks(pair[1].pid) - before < 20  # a hundred times what it may be
    pending = neighbour.send(FLOWS + 7, bundle)
    assert_same_bits([np.array(decode(pending.result(20.0).bundle)["logits"])], [expected])
    neighbour.close()


def test_a_rehearsal_leaves_no_trace(pair: list[LocalWorker], oracle: Pipeline) -> None:
    """Who waits for a batch goes the way of the one before: nothing is computed by that, although the positions are
    free again that it had."""
    batches = [Conversation(22).batch([0, 1]), Conversation(23).batch([0])]
    neighbour = Announcer(pair[1], True)
    for number in range(6):
        batch = batches[number // 2 % 2]  # the same head, and another one
        oracle.clear()
        expected = logits_of(oracle, [batch])[0]
        for worker in pair:
            worker.clear()
        bundle = output_of(pair[0], batch)
        told = pair[1].statistics()
        for _ in range(3):
            neighbour.announce()
        assert pair[1].statistics()["tokens"] == told["tokens"]
        reply = neighbour.send(FLOWS + number, bundle).result(20.0)
        assert_same_bits([np.array(decode(reply.bundle)["logits"])], [expected])
    neighbour.close()


def test_files_looked_at_before_a_batch(patched_build: NativeBuild, model: Path, tmp_path: Path) -> None:
    """A look at the model file while a batch is awaited does not stand for one when it comes later."""
    copy = tmp_path / model.name
    copy.write_bytes(model.read_bytes())
    first, last = workers = start_workers(patched_build.worker, copy, make_plan(N_LAYER, [3]), SMALL, 20.0)
    try:
        bundle = output_of(first, Conversation(24).batch([0]))
        neighbour = Announcer(last, True)
        neighbour.send(FLOWS, bundle).result(20.0)
        last.clear()
        neighbour.announce()
        time.sleep(0.01)
        found = copy.stat()
        os.utime(copy)
        pending = neighbour.send(FLOWS + 1, bundle)
        with pytest.raises(WorkerError, match="was written to after its weights were mapped"):
            pending.result(20.0)
        os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))
        neighbour.send(FLOWS + 2, bundle).result(20.0)  # its positions are free: nothing had been computed
        neighbour.close()
    finally:
        close_workers(workers)


NONSENSE: dict[str, Callable[[Neighbour], None]] = {
    "more written than there is": lambda n: n.write(0, struct.pack("<Q", 65536 + 64)),
    "a place between two": lambda n: n.write(0, struct.pack("<Q", 100)),
    "a message that ends between two": lambda n: (
        n.write(4096, protocol.HEADER.pack(b"BBWP", 3, 0, FLOWS, 0, 0, 0)),
        n.write(0, struct.pack("<Q", 96)),
    )[1],
    "no magic": lambda n: (n.write(4096, b"x" * 64), n.write(0, struct.pack("<Q", 64)))[1],
    "another magic": lambda n: (
        n.write(4096, protocol.HEADER.pack(b"BBWQ", 3, 0, 1, 0, 0, 0)),
        n.write(0, struct.pack("<Q", 64)),
    )[1],
    "reserved bytes": lambda n: (
        n.write(4096, protocol.HEADER.pack(b"BBWP", 3, 1, 1, 0, 0, 0)),
        n.write(0, struct.pack("<Q", 64)),
    )[1],
    "a text over the end": lambda n: (
        n.write(4096, protocol.HEADER.pack(b"BBWP", 3, 0, 1, 1000, 0, 0)),
        n.write(0, struct.pack("<Q", 64)),
    )[1],
    "a bundle over the end": lambda n: (
        n.write(4096, protocol.HEADER.pack(b"BBWP", 3, 0, 1, 0, 0, 1 << 20)),
        n.write(0, struct.pack("<Q", 64)),
    )[1],
    "a bundle of an exabyte": lambda n: (
        n.write(4096, protocol.HEADER.pack(b"BBWP", 3, 0, 1, 0, 0, 1 << 60)),
        n.write(0, struct.pack("<Q", 64)),
    )[1],
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_in_shared_memory(pair: list[LocalWorker], oracle: Pipeline, what: str) -> None:
    """Is told to the driver, and ends the link alone."""
    neighbour = Neighbour(pair[1], True)
    NONSENSE[what](neighbour)
    error_pending = pair[1].expect(FLOWS, "decode")  # an error without a number is everybody's
    neighbour.ring_bell()
    until(lambda: (pair[1].take(), error_pending.error)[1] is not None, "an error")
    assert error_pending.error is not None
    assert error_pending.error.name == "frame"
    assert neighbour.end.recv(1) == b""
    neighbour.close()
    batch = Conversation(13).batch([0])
    assert_same_bits(flowed(FlowPipeline(pair), [batch]), logits_of(oracle, [batch]))


#: Descriptors of a worker without a link, by process.
BARE: dict[int, int] = {}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shared=st.booleans())
def test_drawn_damage_over_a_link(pair: list[LocalWorker], oracle: Pipeline, data: st.DataObject, shared: bool) -> None:
    """A sound message with some bytes changed, or cut short, or places that are wrong: whatever comes of it, the worker
    lives, says nothing but errors that are declared, and gives the same bits afterwards."""
    batch = Conversation(15).batch([0, 1, 0])
    expected = logits_of(oracle, [batch])
    for worker in pair:
        worker.clear()
    bundle = output_of(pair[0], batch)
    text = flow_head(LOGITS)
    header = protocol.HEADER.pack(b"BBWP", Type.DECODE, 0, FLOWS, len(text), 0, len(bundle))
    at = (len(header) + len(text) + 63) // 64 * 64
    message = bytearray((header + text).ljust(at, b"\0") + bundle if shared else header + text + bundle)
    # Most of it in what leads to the rest.
    place = st.one_of(st.integers(0, 31), st.integers(32, at + 95), st.integers(0, len(message) - 1))
    for _ in range(data.draw(st.integers(0, 3))):
        message[data.draw(place)] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    # The driver would take an answer to another number for one to a request of its own.
    message[8:16] = FLOWS.to_bytes(8, "little")
    sound = (len(message) + 63) // 64 * 64
    bare = BARE.setdefault(pair[1].pid, descriptors_of(pair[1]))  # before the first link
    neighbour = Neighbour(pair[1], shared)
    answer = pair[1].expect(FLOWS, "decode")
    if shared:
        neighbour.write(4096, bytes(message))
        odd = st.sampled_from([sound - 64, sound + 64, 65536, 65536 + 64, 1, 1 << 63, (1 << 64) - 64])
        neighbour.write(0, struct.pack("<Q", data.draw(st.just(sound) | odd)))
        neighbour.ring_bell()
    else:
        neighbour.end.sendall(message[: data.draw(st.just(len(message)) | st.integers(0, len(message)))])
    neighbour.close()
    # With the end of the link nothing more comes out of it: neither what was sent, nor what lies in the ring.
    until(lambda: descriptors_of(pair[1]) == bare, "the end of the link")
    if answer.done() and answer.error is not None:
        assert answer.error.name in protocol.ERRORS.values()
    for worker in pair:
        worker.clear()
    assert_same_bits(flowed(FlowPipeline(pair), [batch]), expected)


def test_other_requests_over_a_link(pair: list[LocalWorker]) -> None:
    """Decode alone; the driver is told, since over a link nothing goes back."""
    neighbour = Neighbour(pair[1], False)
    for number, type in enumerate((Type.STATISTICS, Type.CLEAR, Type.SHUTDOWN, Type.LINK), FLOWS + 1):
        neighbour.end.sendall(protocol.pack(type, number, None, 0))
        error = answer_of(pair[1], number)
        assert error is not None
        assert error.name == "protocol"
        assert "over a link" in error.message
    half = protocol.pack(Type.DECODE, FLOWS + 9, {"flow": True}, 100)
    neighbour.end.sendall(half + b"\0" * 50)
    neighbour.close()
    batch = Conversation(14).batch([0])
    flowed(FlowPipeline(pair), [batch])  # the worker lives


# ---- samplers -------------------------------------------------------------------------------

CHAINS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.3, seed=7),
    "top-k": Sampling(temperature=2.0, top_k=5, seed=11),
    "top-p": Sampling(temperature=0.9, top_p=0.7, seed=13),
    "min-p": Sampling(temperature=1.5, min_p=0.2, seed=17),
    "penalty": Sampling(repeat_penalty=1.8, repeat_last_n=32),
    "all": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1, repeat_last_n=64, seed=23),
}


class Datum(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class Candidates(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.POINTER(Datum)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


class Library:
    """llama.cpp's samplers on given logits: the unpatched library, called from here."""

    def __init__(self, path: Path) -> None:
        lib = self.lib = ctypes.CDLL(str(path))
        pointer, i32, u32, f32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
        for name, arguments in (
            ("top_k", [i32]),
            ("top_p", [f32, ctypes.c_size_t]),
            ("min_p", [f32, ctypes.c_size_t]),
            ("temp", [f32]),
            ("dist", [u32]),
            ("greedy", []),
            ("penalties", [i32, f32, f32, f32]),
        ):
            function = getattr(lib, f"llama_sampler_init_{name}")
            function.restype, function.argtypes = pointer, arguments
        lib.llama_sampler_apply.argtypes = [pointer, ctypes.POINTER(Candidates)]
        lib.llama_sampler_accept.argtypes = [pointer, i32]

    def chain(self, how: Sampling) -> list[int]:
        lib, parts = self.lib, []
        if how.repeat_penalty != 1:
            parts.append(lib.llama_sampler_init_penalties(how.repeat_last_n, how.repeat_penalty, 0.0, 0.0))
        if how.temperature == 0:
            return [*parts, lib.llama_sampler_init_greedy()]
        if how.top_k:
            parts.append(lib.llama_sampler_init_top_k(how.top_k))
        if how.top_p < 1:
            parts.append(lib.llama_sampler_init_top_p(how.top_p, 1))
        if how.min_p:
            parts.append(lib.llama_sampler_init_min_p(how.min_p, 1))
        return [*parts, lib.llama_sampler_init_temp(how.temperature), lib.llama_sampler_init_dist(how.seed)]

    def draw(self, chain: Sequence[int], logits: Sequence[float]) -> int:
        data = (Datum * len(logits))(*((token, logit, 0.0) for token, logit in enumerate(logits)))
        candidates = Candidates(data, len(logits), -1, False)
        for part in chain:
            self.lib.llama_sampler_apply(part, ctypes.byref(candidates))
        token = int(candidates.data[candidates.selected].id)
        self.accept(chain, token)
        return token

    def accept(self, chain: Sequence[int], token: int) -> None:
        for part in chain:
            self.lib.llama_sampler_accept(part, token)


@pytest.fixture(scope="module")
def library(unpatched_build: NativeBuild) -> Library:
    return Library(unpatched_build.lib_dir / "libllama.so")


@pytest.mark.parametrize("name", CHAINS)
def test_tokens_are_drawn_as_llama_cpp_draws_them(
    patched_build: NativeBuild, pool: WorkerPool, model: Path, library: Library, name: str
) -> None:
    """Each token of a generation is what the library's own chain draws from the logits that came with it."""
    how, prompt = CHAINS[name], [5, 9, 17, 9]
    workers = pool.workers(patched_build.worker, model, make_plan(N_LAYER, [2, 4]), SMALL)
    pipeline = FlowPipeline(workers)
    # As if drawn before: the very tokens that come next unless repetition is punished.
    history = prompt + generate(pipeline, prompt, 20, batch_size=8).tokens
    pipeline.clear()
    pipeline.set_sampler(0, how, history)
    chain = library.chain(how)
    for token in history:
        library.accept(chain, token)
    step = pipeline.decode(Batch.of_sequence(prompt, 0), logits=True)
    for position in range(len(prompt), len(prompt) + 40):
        assert step.logits is not None
        assert step.sampled == [library.draw(chain, step.logits[0].tolist())]
        step = pipeline.decode(Batch.of_sequence(step.sampled, position), logits=True)


def test_each_row_of_a_batch_is_drawn_by_its_own_sampler(
    patched_build: NativeBuild, pool: WorkerPool, model: Path, library: Library
) -> None:
    """Three sequences in one batch, not in the order of their numbers, one of them without a sampler."""
    workers = pool.workers(patched_build.worker, model, make_plan(N_LAYER, [3]), SMALL)
    pipeline = FlowPipeline(workers)
    chains = {
        2: library.chain(CHAINS["temperature"]),
        0: library.chain(CHAINS["greedy"]),
        1: library.chain(CHAINS["all"]),
    }
    pipeline.set_sampler(2, CHAINS["temperature"])
    pipeline.set_sampler(1, CHAINS["all"])
    tokens = [5, 6, 7]
    for position in range(30):
        batch = Batch(tokens, [position] * 3, [(sequence,) for sequence in chains], [True] * 3)
        step = pipeline.decode(batch, logits=True)
        assert step.logits is not None
        rows = zip(chains.values(), step.logits.tolist(), strict=True)
        tokens = step.sampled
        assert tokens == [library.draw(chain, row) for chain, row in rows]


def test_each_sequence_has_its_own_sampler(patched_build: NativeBuild, pool: WorkerPool, model: Path) -> None:
    """Three sequences in shared batches get the tokens that each gets alone; clear ends a sampler."""
    prompts = [[5, 9, 17], [200, 3], [44, 7]]
    chains = [CHAINS["all"], CHAINS["greedy"], CHAINS["temperature"]]
    workers = pool.workers(patched_build.worker, model, make_plan(N_LAYER, [3]), SMALL)
    pipeline = FlowPipeline(workers)
    together = generate_streams(pipeline, prompts, 20, batch_size=8, group=1, samplings=chains).tokens
    each = list(zip(prompts, chains, strict=True))
    alone = [generate(pipeline, prompt, 20, batch_size=8, sampling=how).tokens for prompt, how in each]
    assert together == alone
    greedy = generate(pipeline, prompts[0], 20, batch_size=8).tokens
    assert greedy != alone[0]
    assert generate(pipeline, prompts[0], 20, batch_size=8, sampling=chains[0]).tokens == alone[0]
    pipeline.clear()
    pipeline.set_sampler(0, chains[0], prompts[0])
    pipeline.set_sampler(1, chains[2], prompts[2])
    pipeline.local[-1].clear(0)
    drawn: list[list[int]] = [[], []]
    for sequence, prompt in enumerate((prompts[0], prompts[2])):
        tokens = prompt
        for position in range(20):
            batch = Batch.of_sequence(tokens, len(prompt) + position - len(tokens), sequence=sequence)
            tokens = pipeline.decode(batch).sampled
            drawn[sequence] += tokens
    # The one that was cleared has lost its sampler, and it alone.
    assert drawn == [greedy, alone[2]]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"sequence": 4}, "this worker has sequences 0 to 3"),
        ({}, "sequence is missing"),
        ({"sequence": 0, "temperature": -1}, "temperature is -1, not a number from 0 to 1000"),
        ({"sequence": 0, "temperature": "hot"}, 'temperature is "hot"'),
        ({"sequence": 0, "top_p": 1.5}, "top_p is 1.5, not a number from 0 to 1"),
        ({"sequence": 0, "min_p": None}, "min_p is null"),
        ({"sequence": 0, "top_k": -3}, "top_k is -3"),
        ({"sequence": 0, "repeat_penalty": 0}, "repeat_penalty is 0, not a number from 0.001"),
        ({"sequence": 0, "seed": 1 << 32}, "seed is 4294967296"),
        ({"sequence": 0, "history": 5}, "history is 5, not a list"),
        ({"sequence": 0, "history": [1, -1]}, "history holds -1"),
        ({"sequence": 0, "history": [1 << 30]}, "outside the vocabulary"),
    ],
)
def test_samplers_that_cannot_be(
    patched_build: NativeBuild, pool: WorkerPool, model: Path, wish: dict[str, object], message: str
) -> None:
    """And the sampler that is there stays."""
    worker = pool.workers(patched_build.worker, model, [(0, N_LAYER)], SMALL)[0]
    with pytest.raises(WorkerError, match=message):
        worker.request(Type.SAMPLER, wish).result()


def test_only_the_last_worker_samples(pair: list[LocalWorker]) -> None:
    with pytest.raises(WorkerError, match=r"samples nothing: the last one does"):
        pair[0].set_sampler(0, Sampling())
