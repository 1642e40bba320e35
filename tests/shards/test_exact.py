"""Split runs against an unsplit run of the unpatched library, by bits, over real processes.

Catches: rows permuted by micro-batches, a cut at which a layer is lost or done twice, a norm or a head
in the wrong place, a codec or a layout that changes a bit, and a comparison that would not notice.
Exactness is claimed for equal batches, micro-batches and threads, so that is what both sides get.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from drive import Conversation, LayoutRelay, Logits, assert_same_bits, logits_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Batch,
    CheckedRelay,
    Fault,
    Layout,
    LocalWorker,
    Pipeline,
    Settings,
    WorkerError,
    WorkerPool,
    count_differing,
    generate,
    make_plan,
    tiny_models,
)
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards

SMALL = Settings(threads=1, ctx=768, batch=64, ubatch=16, seqs=3)
#: Micro-batches smaller than a batch and as large, split and unified KV, flash attention on and off.
VARIED = (
    SMALL,
    replace(SMALL, ubatch=64, kv_unified=True),
    replace(SMALL, ubatch=7, flash_attn=False),
)
PLANS = {name: shape.n_layer for name, shape in tiny_models.VARIANTS.items()}

layouts = st.builds(
    Layout, st.sampled_from(["little", "big"]), st.sampled_from([0, 64, 128, 1088, 4096]), st.booleans()
)


def small_batches() -> list[Batch]:
    """Three sequences, unevenly interleaved, over several micro-batches; then one token of each, then of one."""
    talk = Conversation(1)
    return [
        talk.batch([0, 0, 1, 2, 0, 1, 0, 0, 2, 2, 0] * 4),
        talk.batch([2, 0, 1]),
        talk.batch([1] * 20 + [0] * 3 + [1, 0]),
        talk.batch([0]),
    ]


@pytest.mark.parametrize("variant", PLANS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drawn_splits_equal_the_oracle(
    patched_build: NativeBuild,
    unpatched_build: NativeBuild,
    tiny: dict[str, Path],
    pool: WorkerPool,
    variant: str,
    data: st.DataObject,
) -> None:
    n_layer = PLANS[variant]
    chosen = data.draw(st.sampled_from(VARIED), "settings")
    cuts = sorted(data.draw(st.sets(st.integers(1, n_layer - 1), max_size=3), "cuts"))
    n_seqs = data.draw(st.integers(1, 3), "sequences")
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, n_seqs - 1), min_size=1, max_size=chosen.batch), min_size=1, max_size=3),
        "batches",
    )
    talk = Conversation(data.draw(st.integers(0, 99), "seed"))
    batches = []
    for sequences in shapes:
        count = len(sequences)
        scattered = st.lists(st.booleans(), min_size=count, max_size=count)
        outputs = data.draw(st.one_of(st.just([True] * count), scattered), "outputs")
        batches.append(talk.batch(sequences, outputs))
    asks = data.draw(st.lists(layouts, min_size=1, max_size=4), "asked for")
    sends = data.draw(st.lists(st.one_of(st.none(), layouts), min_size=1, max_size=4), "sent")

    model = tiny[variant]
    oracle = pool.pipeline(unpatched_build.worker, model, [(0, n_layer)], chosen)
    split = pool.pipeline(patched_build.worker, model, make_plan(n_layer, cuts), chosen, LayoutRelay(asks, sends))
    assert_same_bits(logits_of(split, batches), logits_of(oracle, batches))


@pytest.mark.parametrize("variant", PLANS)
def test_every_single_cut(
    patched_build: NativeBuild, unpatched_build: NativeBuild, tiny: dict[str, Path], pool: WorkerPool, variant: str
) -> None:
    n_layer, batches = PLANS[variant], small_batches()
    expected = logits_of(pool.pipeline(unpatched_build.worker, tiny[variant], [(0, n_layer)], SMALL), batches)
    for cut in range(1, n_layer):
        split = pool.pipeline(patched_build.worker, tiny[variant], make_plan(n_layer, [cut]), SMALL, CheckedRelay())
        assert_same_bits(logits_of(split, batches), expected)


@pytest.mark.parametrize("types", ["f16", "q8_0"])
def test_past_512_positions(
    patched_build: NativeBuild, unpatched_build: NativeBuild, tiny: dict[str, Path], pool: WorkerPool, types: str
) -> None:
    """From 512 cached positions on flash attention splits its work by threads: other code, other rounding."""
    chosen = Settings(threads=2, ctx=1024, batch=256, ubatch=128, type_k=types, type_v=types)
    talk, model = Conversation(2), tiny["gqa"]
    batches = [talk.batch([0] * size, [True] * size) for size in (256, 256, 90, 1, 1, 1, 30, 1)]
    assert sum(map(len, batches)) > 512
    expected = logits_of(pool.pipeline(unpatched_build.worker, model, [(0, 8)], chosen), batches)
    split = pool.pipeline(patched_build.worker, model, make_plan(8, [3, 6]), chosen)
    assert_same_bits(logits_of(split, batches), expected)


# -- the comparison would notice


@pytest.mark.parametrize("variant", PLANS)
def test_every_layer_of_a_tiny_model_matters(
    unpatched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, pool: WorkerPool, variant: str
) -> None:
    """A model in which a layer does nothing would not show that the layer was lost."""
    n_layer, batches = PLANS[variant], small_batches()
    whole = logits_of(pool.pipeline(unpatched_build.worker, tiny[variant], [(0, n_layer)], SMALL), batches)
    assert all(np.isfinite(rows).all() for rows in whole)
    for layer in range(n_layer):
        model = tiny_models.write(tmp_path / f"{layer}.gguf", variant, identity=layer)
        with LocalWorker(unpatched_build.worker, model, (0, n_layer), SMALL) as worker:
            without = logits_of(Pipeline([worker]), batches)
        for mine, other in zip(whole, without, strict=True):
            assert count_differing(mine, other) > 0.99 * mine.size, (layer, variant)


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 3])
def test_a_planted_flip_is_seen(
    patched_build: NativeBuild, tiny: dict[str, Path], pool: WorkerPool, hop: int, step: int
) -> None:
    """One bit of one row at any hop: ``--check`` compares exactly this way."""
    model, plan = tiny["tied"], make_plan(7, [1, 3, 6])
    for fault, expected in ((None, False), (Fault(hop, step, bit=12), True)):
        split = pool.pipeline(patched_build.worker, model, plan, SMALL, CheckedRelay(fault))
        reference = pool.pipeline(patched_build.worker, model, [(0, 7)], SMALL)
        found = generate(split, list(range(40, 60)), 6, batch_size=SMALL.batch, reference=reference)
        assert found.logits_compared == 6 * tiny_models.N_VOCAB
        assert (found.logits_differing > 0) is expected


# -- a trained model


@dataclass(frozen=True)
class Recorded:
    """An unsplit run: its batches and the logits of all their tokens."""

    batches: list[Batch]
    logits: list[Logits]


TRAINED = Settings(threads=1, ctx=256, batch=64, ubatch=64)
_TEXT = (
    "A model of many layers can be cut between any two of them. What one part hands to the next is a row of numbers "
    "for each token, and nothing of it may be lost on the way. Whoever wants to know whether that holds compares all "
    "results, and not only the words that come out at the end, because words hide"
)


def record(program: Path, model: Path, chosen: Settings, steps: int) -> Recorded:
    """The oracle: a prompt of 64 tokens and ``steps`` greedy steps of the unpatched library."""
    with LocalWorker(program, model, (0, 30), chosen) as worker:
        pipeline = Pipeline([worker])
        prompt = worker.tokenize(_TEXT)[:64]
        assert len(prompt) == 64
        batches = [Batch.of_sequence(prompt, 0, outputs="all")]
        found: list[Logits] = []
        for position in range(64, 65 + steps):
            step = pipeline.decode(batches[-1], logits=True)
            assert step.logits is not None
            found.append(np.array(step.logits))
            batches.append(Batch.of_sequence([step.sampled[-1]], position))
    return Recorded(batches[:-1], found)


@pytest.fixture(scope="module")
def recorded(unpatched_build: NativeBuild, smollm2: Path) -> Recorded:
    return record(unpatched_build.worker, smollm2, TRAINED, 32)


@pytest.mark.parametrize("cuts", [*([cut] for cut in range(1, 30)), [5, 10, 15, 20, 25]], ids=str)
def test_smollm2(patched_build: NativeBuild, smollm2: Path, recorded: Recorded, cuts: list[int]) -> None:
    with WorkerPool() as workers:
        split = workers.pipeline(patched_build.worker, smollm2, make_plan(30, cuts), TRAINED)
        assert len(recorded.batches) == 33
        assert_same_bits(logits_of(split, recorded.batches), recorded.logits)


def test_smollm2_with_two_threads(patched_build: NativeBuild, unpatched_build: NativeBuild, smollm2: Path) -> None:
    chosen = replace(TRAINED, threads=2)
    expected = record(unpatched_build.worker, smollm2, chosen, 4)
    with WorkerPool() as workers:
        plan = make_plan(30, [10, 20])
        split = workers.pipeline(patched_build.worker, smollm2, plan, chosen, CheckedRelay())
        assert_same_bits(logits_of(split, expected.batches), expected.logits)


# -- a worker that dies


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_worker(
    patched_build: NativeBuild, unpatched_build: NativeBuild, tiny: dict[str, Path], victim: int
) -> None:
    """One clear error; the other workers answer the next request, from where they were before."""
    model, plan, batches = tiny["untied"], make_plan(6, [2, 4]), small_batches()
    with WorkerPool() as pool:
        expected = logits_of(pool.pipeline(unpatched_build.worker, model, [(0, 6)], SMALL), batches)
        split = pool.pipeline(patched_build.worker, model, plan, SMALL)
        workers = [worker for worker in split.workers if isinstance(worker, LocalWorker)]
        pids = [worker.pid for worker in workers]
        first = split.decode(batches[0], logits=True).logits
        assert first is not None
        workers[victim].kill()
        with pytest.raises(WorkerError) as caught:
            split.decode(batches[1])
        error, (start, end) = caught.value, plan.ranges[victim]
        assert (error.name, error.layer_range, error.operation) == ("lost", (start, end), "decode")
        text = str(error)
        assert f"shard [{start},{end})" in text
        assert f"signal {int(signal.SIGKILL)} (SIGKILL)" in text
        assert str(pids[victim]) in text
        assert "\n" not in text
        for place, worker in enumerate(workers):
            if place != victim:
                # Shards before the victim have decoded the batch, and are taken back.
                assert worker.statistics()["requests"] > 0
            else:
                with pytest.raises(WorkerError, match="SIGKILL"):
                    worker.statistics()
        # A new worker in the victim's place, and the whole conversation again: nothing of the old one is left over.
        again = pool.pipeline(patched_build.worker, model, plan, SMALL)
        assert [worker.pid for worker in again.workers if isinstance(worker, LocalWorker)] != pids
        assert_same_bits(logits_of(again, batches), expected)
        pids += [worker.pid for worker in again.workers if isinstance(worker, LocalWorker)]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_refusal_takes_the_shards_before_it_back(
    patched_build: NativeBuild, unpatched_build: NativeBuild, tiny: dict[str, Path]
) -> None:
    """A batch that only the last shard refuses: its bundle is damaged on the way there."""
    model, batches = tiny["untied"], small_batches()

    class Damaging(CheckedRelay):
        armed = False

        def forward(self, hop: int, step: int, rows: int, data: object) -> tuple[bytes, float, float]:
            sent = bytearray(super().forward(hop, step, rows, data)[0])  # type: ignore[arg-type]
            if self.armed and hop == 1:
                sent[len(sent) // 2] ^= 1
            return bytes(sent), 0.0, 0.0

    with WorkerPool() as pool:
        expected = logits_of(pool.pipeline(unpatched_build.worker, model, [(0, 6)], SMALL), batches)
        relay = Damaging()
        split = pool.pipeline(patched_build.worker, model, make_plan(6, [2, 4]), SMALL, relay)
        found = []
        for batch in batches:
            relay.armed = True
            with pytest.raises(WorkerError) as caught:
                split.decode(batch)
            assert (caught.value.code, caught.value.layer_range) == (5, (4, 6))
            relay.armed = False
            rows = split.decode(batch, logits=True).logits
            assert rows is not None
            found.append(np.array(rows))
        assert_same_bits(found, expected)


def test_several_requests_under_way(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """More requests than a worker's queue holds, none waited for: answered in order, neither side blocked."""
    with LocalWorker(patched_build.worker, tiny["tied"], (0, 7), SMALL) as worker:
        model = worker.describe()
        talk = Conversation(3)
        batches = [talk.batch([0, 1, 2]) for _ in range(200)]
        pending = [
            worker.request(Type.DECODE, {"logits": True}, encode(batch.bundle(model, number=place)))
            for place, batch in enumerate(batches)
        ]
        replies = [request.result(timeout=60) for request in pending]
        assert all(request.done() for request in pending)
        assert [len(reply.text["sampled"]) for reply in replies] == [3] * 200
        assert worker.statistics()["tokens"] == 600
