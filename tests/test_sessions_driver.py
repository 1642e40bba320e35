"""The driver's side of sessions, against shards that compute hashes (fake_shards): no processes, no models.

Whatever happens to the shards, the logits of a session are those of its token history. The fake's logits depend on
every token, position and layer before them, so that anything else shows.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_shards import N_VOCAB, Answer, Cluster, FakeModel, FakeShard, FakeWorker, states
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from boundary_bundle import Bundle, decode
from boundary_bundle.cli import describe as describe_command
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Batch,
    CapacityError,
    CheckedRelay,
    LocalWorker,
    Outcome,
    PipelineError,
    Relay,
    Reply,
    Session,
    SessionPipeline,
    SessionRefused,
    SessionRow,
    Settings,
    Step,
    Worker,
    WorkerError,
    local_workers,
    make_plan,
    read_model_file,
)
from boundary_bundle.shards import sessions as sessions_module
from boundary_bundle.shards.protocol import Type
from boundary_bundle.shards.sessions import LOG_EVENTS
from boundary_bundle.shards.worker import Bytes, Pending, refusal

IDS = [bytes([number]) * 16 for number in range(1, 12)]


def same_bits(ours: Any, theirs: Any) -> bool:
    return ours.shape == theirs.shape and bool((ours.view(np.uint32) == theirs.view(np.uint32)).all())


def driver(cluster: Cluster, **options: Any) -> SessionPipeline:
    return SessionPipeline(cluster.start, cluster.plan, **options)


def extend(cluster: Cluster, session: Session, tokens: Sequence[int]) -> Step:
    """Go on, and compare every logit with those of the history as it should be."""
    history = [*session.tokens, *tokens]
    step = session.extend(tokens, outputs="all", logits=True)
    assert session.tokens == history
    expected = cluster.expected(history)[-len(tokens) :]
    assert step.logits is not None
    assert same_bits(step.logits, expected)
    assert step.sampled == expected.argmax(axis=1).tolist()
    return step


def events(pipeline: SessionPipeline, name: str) -> list[dict[str, Any]]:
    return [entry for entry in pipeline.log if entry["event"] == name]


def held(cluster: Cluster, session: Session) -> list[bool]:
    """For each shard, whether it holds the session as the driver has it."""
    rows = states(session.tokens, cluster.model.n_layer)
    found = []
    for shard in cluster:
        entry = shard.live.get(session.id)
        start, end = shard.layers
        wanted = [layers[start:end] for layers in rows]
        found.append(entry is not None and entry.epoch == session.epoch and entry.rows == wanted)
    return found


class On:
    """A fault of one shard at the n-th request that changes or uses its table (1 is the next), once."""

    def __init__(self, fault: str, number: int = 1, kind: Type | None = None) -> None:
        self.fault = fault
        self.left = number
        self.kind = kind

    def __call__(self, shard: FakeShard, kind: Type) -> str | None:
        if kind not in CHANGES or (self.kind is not None and kind is not self.kind):
            return None
        self.left -= 1
        return self.fault if self.left == 0 else None


CHANGES = (Type.OPEN, Type.TRUNCATE, Type.RELEASE, Type.EVICT, Type.DECODE, Type.CLEAR, Type.SAVE, Type.RESTORE)


@pytest.fixture
def cluster() -> Cluster:
    """Three shards of two layers, four slots of 64 positions, batches of 8."""
    return Cluster()


# -- the plain way


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("relay", [Relay, CheckedRelay])
def test_logits_are_those_of_the_history(cuts: tuple[int, ...], relay: type[Relay]) -> None:
    """More sessions than slots, interleaved, truncated and released: evictions and replays must not show."""
    cluster = Cluster(cuts=cuts)
    with driver(cluster, relay=relay()) as pipeline:
        sessions = [pipeline.open() for _ in range(7)]
        for turn in range(4):
            for number, session in enumerate(sessions):
                extend(cluster, session, [(turn + number + k) % N_VOCAB for k in range(3 + number)])
            sessions[turn].truncate(turn)
        sessions[2].release()
        items = [(sessions[k], k + 1, k != 1) for k in (0, 1, 0, 3, 1, 0)]
        step = pipeline.decode(items, logits=True)
        wanted = [sessions[0].tokens[:-2], sessions[0].tokens[:-1], sessions[3].tokens, sessions[0].tokens]
        assert same_bits(step.logits, np.array([cluster.expected(tokens)[-1] for tokens in wanted]))
        assert pipeline.status()["replays"] > 0


def test_all_shards_get_the_same_operations_in_the_same_order(cluster: Cluster) -> None:
    """Otherwise the same session lies in different local sequences, or one shard keeps what another has given up."""
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(6)]
        for session in sessions:
            extend(cluster, session, range(10))
        sessions[5].truncate(4)
        pipeline.evict(sessions[5])
        pipeline.evict()
        sessions[4].release()
        pipeline.clear()
        extend(cluster, sessions[0], [1])
        first, *others = cluster
        assert all(shard.seen == first.seen for shard in others)
        assert all(shard.slots() == first.slots() for shard in others)
        kinds = {entry[0] for entry in first.seen}
        assert kinds == {"open", "decode", "evict", "truncate", "release", "clear"}


def test_replays_go_by_the_rules_that_a_reference_follows(cluster: Cluster) -> None:
    """In order of first mention, from 0, in batches of n_batch, without outputs; then the batch."""
    with driver(cluster) as pipeline:
        one, two = pipeline.open(), pipeline.open()
        extend(cluster, one, range(19))
        extend(cluster, two, range(3))
        pipeline.clear()
        cluster[0].seen.clear()
        pipeline.decode([(two, 1, False), (one, 2, True), (two, 3, True)])
        a, b = one.id.hex(), two.id.hex()
        assert cluster[0].seen == [
            ("open", b, two.epoch, 0),
            ("decode", (b,), (0,), 3, 0),
            ("open", a, one.epoch, 0),
            ("decode", (a,), (0,), 8, 0),
            ("decode", (a,), (8,), 8, 0),
            ("decode", (a,), (16,), 3, 0),
            ("decode", (b, a), (3, 19), 3, 2),
        ]


def test_opening_and_releasing_what_was_never_used_asks_nothing(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        assert (session.position, session.hot) == (0, False)
        session.truncate(0)
        session.release()
        assert cluster[0].seen == []


def test_extend_gives_the_outputs_that_were_asked_for(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        tokens = [*range(20)]
        for outputs, count in (("none", 0), ("last", 1), ("all", 20)):
            session = pipeline.open()
            step = session.extend(tokens, outputs=outputs, logits=True)
            expected = cluster.expected(tokens)[20 - count :]
            assert step.sampled == expected.argmax(axis=1).tolist()
            if count:
                assert same_bits(step.logits, expected)
            else:
                assert step.logits is None
            assert len(step.shards) == 3
            assert len(step.hops) == 2
            assert step.hops[0].bytes > 0
        assert pipeline.open().extend([1, 2], sample=False).sampled == []


# -- refusals that are put right


@pytest.mark.parametrize("index", range(3))
def test_state_that_one_shard_has_lost_is_rebuilt_on_all(cluster: Cluster, index: int) -> None:
    """A miss anywhere is a miss everywhere: the others must not go on with what they still hold."""
    with driver(cluster) as pipeline:
        session, other = pipeline.open(), pipeline.open()
        extend(cluster, session, range(11))
        extend(cluster, other, range(5))
        epoch, other_epoch = session.epoch, other.epoch
        cluster[index].lose(session.id)
        extend(cluster, session, [3])
        assert session.epoch > epoch
        assert held(cluster, session) == [True] * 3
        assert (other.hot, other.epoch) == (True, other_epoch)
        slots = [shard.slots() for shard in cluster]
        assert slots[0] == slots[1] == slots[2]
        (refused,) = [entry for entry in events(pipeline, "refused") if entry["operation"] == "decode"]
        assert (refused["outcome"], refused["range"]) == ("evicted", cluster[index].layers)
        assert [entry["position"] for entry in events(pipeline, "replay")] == [11]


def test_an_eviction_that_finds_something_else_raises_the_epoch(cluster: Cluster) -> None:
    """What a shard remembers of the id may be another's, and the session must not come back under the same epoch."""
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(5))
        epoch = session.epoch
        cluster[1].lose(session.id)
        assert pipeline.evict(session) is session
        assert session.epoch > epoch
        extend(cluster, session, [1])
        assert [entry["operation"] for entry in events(pipeline, "refused")] == ["evict"]


def test_several_sessions_of_a_batch_may_be_missing(cluster: Cluster) -> None:
    """Each refusal names one; each of them gets its one more try."""
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(4)]
        for session in sessions:
            extend(cluster, session, range(6))
        for number, shard in enumerate(cluster):
            shard.lose(sessions[number].id)
        step = pipeline.decode([(session, 5, True) for session in sessions], logits=True)
        assert same_bits(step.logits, np.array([cluster.expected(session.tokens)[-1] for session in sessions]))


@pytest.mark.parametrize("newer", [False, True])
def test_two_drivers_under_one_id_fence_each_other(cluster: Cluster, newer: bool) -> None:
    """Both go on with their own history, each from a replay: never with the other's state."""
    with driver(cluster) as pipeline, driver(cluster) as rival:
        ours = pipeline.open(IDS[0])
        extend(cluster, ours, [1, 2, 3, 4])
        theirs = rival.open(IDS[0], epoch=ours.epoch + 5 if newer else ours.epoch)
        for turn in range(4):
            extend(cluster, theirs, [9, 8, 7, turn])
            extend(cluster, ours, [5, turn])
        assert ours.epoch > theirs.epoch
        assert {entry["outcome"] for entry in events(pipeline, "refused")} <= {
            "stale_epoch",
            "miss",
            "evicted",
            "position_mismatch",
        }


def test_an_id_that_was_given_up_cannot_be_taken_over_unnoticed(cluster: Cluster) -> None:
    """Evicted by others, and opened by another driver that computes as many positions: the same epoch would do."""
    with driver(cluster) as pipeline, driver(cluster) as rival:
        ours = pipeline.open(IDS[0])
        extend(cluster, ours, [1, 2, 3])
        for shard in cluster:
            shard.lose(IDS[0])
        extend(cluster, rival.open(IDS[0]), [9, 9, 9])
        extend(cluster, ours, [4])


def test_an_empty_session_of_another_driver_under_the_same_epoch_is_not_shared(cluster: Cluster) -> None:
    """Opening it is a hit; then both would go on with it, and only one of them has its tokens in it."""
    with driver(cluster) as pipeline:
        for shard in cluster:
            FakeWorker(shard).open_session(IDS[0], 7, 0, bytes.fromhex(shard.recipe()["shared"]["fingerprint"]))
        session = pipeline.open(IDS[0], epoch=7)
        extend(cluster, session, [1])
        assert session.epoch > 7


def test_a_session_that_is_refused_twice_is_given_up_on(cluster: Cluster) -> None:
    """One more try, not one after another for ever."""

    def always(shard: FakeShard, kind: Type) -> str | None:
        return "lose" if kind is Type.DECODE else None

    with driver(cluster) as pipeline:
        session = pipeline.open()
        cluster[1].fault = always
        with pytest.raises(SessionRefused) as caught:
            session.extend([1])
        assert (caught.value.outcome, caught.value.session) == (Outcome.EVICTED, session.id)
        assert (session.position, session.hot) == (0, False)
        cluster[1].fault = None
        extend(cluster, session, [1])


def test_each_shard_may_lose_a_session_once(cluster: Cluster) -> None:
    """What the second shard loses while what the first one lost is put right is no reason to give up."""
    lost: set[tuple[int, int]] = set()

    def once(shard: FakeShard, kind: Type) -> str | None:
        if kind is not Type.DECODE or shard.layers in lost:
            return None
        lost.add(shard.layers)
        return "lose"

    with driver(cluster) as pipeline:
        session = pipeline.open()
        for shard in cluster:
            shard.fault = once
        extend(cluster, session, [1, 2])
        assert len(lost) == len(pipeline.workers)


def test_released_ids_come_back_under_a_newer_epoch(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open(IDS[0])
        extend(cluster, session, [1])
        session.release()
        again = pipeline.open(IDS[0])
        extend(cluster, again, [2])
        assert again.epoch > session.epoch
        assert events(pipeline, "refused") == []
        pipeline.evict(again)
        extend(cluster, again, [3])
        assert events(pipeline, "refused") == []


def test_truncation_that_one_shard_cannot_do_is_replayed_on_all() -> None:
    """Layers 2 and 3 are recurrent: the first shard has gone back already when the second says that it cannot."""
    cluster = Cluster(FakeModel(recurrent=(2, 3)))
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(10))
        session.truncate(4)
        assert (session.position, session.hot) == (4, False)
        assert not any(shard.live for shard in cluster)
        extend(cluster, session, [1])
        assert [entry["outcome"] for entry in events(pipeline, "refused")] == ["cannot_truncate"]
        session.truncate(0)
        assert session.hot
        extend(cluster, session, [2])
        assert pipeline.status()["replays"] == 1


def test_truncation_keeps_what_is_hot(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(10))
        session.truncate(4)
        assert held(cluster, session) == [True] * 3
        extend(cluster, session, [1])
        assert pipeline.status()["replays"] == 0


# -- what fails half-way


@pytest.mark.parametrize("index", range(3))
def test_a_refused_batch_leaves_no_shard_ahead(cluster: Cluster, index: int) -> None:
    with driver(cluster) as pipeline:
        one, two, other = (pipeline.open() for _ in range(3))
        for session in (one, two, other):
            extend(cluster, session, range(5))
        cluster[index].fault = On("refuse", kind=Type.DECODE)
        with pytest.raises(WorkerError) as caught:
            pipeline.decode([(one, 1, True), (two, 2, True)])
        assert caught.value.code == 8
        assert (one.position, two.position) == (5, 5)
        # What the first shard refuses nobody has computed.
        assert one.hot is two.hot is (index == 0)
        assert other.hot
        for session in (one, two, other):
            assert all(held(cluster, session)) == session.hot
            extend(cluster, session, [7])


def test_a_replay_that_fails_leaves_nothing_behind(cluster: Cluster) -> None:
    """It would take a sequence from others until somebody uses the session again."""
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(20))
        for shard in cluster:
            pipeline.clear()
            shard.fault = On("refuse", 2, Type.DECODE)
            with pytest.raises(WorkerError):
                session.extend([1])
            assert not any(shard.live for shard in cluster)
            assert pipeline.status()["present"] == 0
        extend(cluster, session, [1])


def test_a_computation_that_fails_costs_its_sessions_everywhere(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(5))
        for shard in cluster:
            shard.fault = On("compute", kind=Type.DECODE)
            with pytest.raises(WorkerError) as caught:
                session.extend([1])
            assert caught.value.code == 10
            assert not any(session.id in shard.live for shard in cluster)
            extend(cluster, session, [2])


class BadRelay(Relay):
    def __init__(self, hop: int) -> None:
        self.hop = hop
        self.bad = False

    def forward(self, hop: int, step: int, rows: int, data: Bytes) -> tuple[Bytes, float, float]:
        if self.bad and hop == self.hop:
            raise PipelineError("the relay refuses")
        return super().forward(hop, step, rows, data)

    def receive(self, step: int, rows: int, data: Bytes) -> Any:
        if self.bad and self.hop == 2:
            raise ZeroDivisionError
        return super().receive(step, rows, data)


@pytest.mark.parametrize("hop", range(3))
def test_a_relay_that_refuses_leaves_no_shard_ahead(cluster: Cluster, hop: int) -> None:
    relay = BadRelay(hop)
    with driver(cluster, relay=relay) as pipeline:
        session, other = pipeline.open(), pipeline.open()
        extend(cluster, session, range(5))
        extend(cluster, other, range(5))
        relay.bad = True
        with pytest.raises((PipelineError, ZeroDivisionError)):
            session.extend([1], logits=True)
        assert (session.position, session.hot, other.hot) == (5, False, True)
        relay.bad = False
        extend(cluster, session, [2])
        extend(cluster, other, [2])


def test_a_batch_that_cannot_be_written_changes_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(5))
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "bundle", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.extend([1])
        assert session.hot
        extend(cluster, session, [2])
        assert pipeline.status()["resets"] == 0


# -- deaths and interrupts at every request


def scenario(cluster: Cluster, pipeline: SessionPipeline, folder: Path) -> Iterator[None]:
    """Something of everything, one operation at a time, in such a way that each may be tried again."""
    sessions = [pipeline.open(IDS[number]) for number in range(5)]
    for session in sessions:
        yield from attempt(lambda session=session: extend(cluster, session, range(12)))  # type: ignore[misc]
    yield from attempt(lambda: sessions[4].truncate(5))
    yield from attempt(lambda: pipeline.evict())
    yield from attempt(lambda: pipeline.evict(sessions[4]))
    yield from attempt(lambda: pipeline.decode([(sessions[k], 3, True) for k in (4, 0, 1)]))
    yield from attempt(lambda: sessions[0].save("kept"))
    yield from attempt(lambda: extend(cluster, sessions[0], [1, 2]))
    yield from attempt(lambda: sessions[0].restore("kept"))
    yield from attempt(lambda: pipeline.clear())
    yield from attempt(lambda: sessions[1].release())
    for session in (sessions[4], sessions[0], sessions[2]):
        yield from attempt(lambda session=session: extend(cluster, session, [5]))  # type: ignore[misc]


def attempt(operation: Callable[[], object]) -> Iterator[None]:
    while True:
        try:
            operation()
            break
        except KeyboardInterrupt:
            yield
    yield


@pytest.mark.parametrize(
    ("fault", "index"),
    [("die", 0), ("die", 2), ("die_after", 1), ("die_after", 2), ("interrupt", 0), ("interrupt", 2), ("lose", 1)],
)
def test_one_fault_at_every_request(fault: str, index: int, tmp_path: Path) -> None:
    """A worker that ends, or a Ctrl-C, at each point of a scenario, also within a replay or a recovery."""
    for number in itertools.count(1):
        cluster = Cluster(FakeModel(state_dir=tmp_path))
        with driver(cluster, state_dir=tmp_path) as pipeline:
            on = On(fault, number)
            cluster[index].fault = on
            for _ in scenario(cluster, pipeline, tmp_path):
                for session in pipeline._sessions.values():
                    # What is said to be hot is hot, unless a shard has lost it and nobody has asked since.
                    if session.hot and fault == "interrupt":
                        assert all(held(cluster, session)), (number, session)
            restarts = pipeline.status()["restarts"]
            assert restarts == (1 if fault.startswith("die") and on.left <= 0 else 0)
            if on.left > 0:
                break
    assert number > 20


@pytest.mark.parametrize("fault", ["die", "die_after"])
def test_two_deaths_at_every_two_requests(fault: str) -> None:
    """The second one during the recovery from the first, wherever that is, in the same shard or another."""
    for first, second, index in itertools.product(range(1, 6), range(1, 8), range(2)):
        cluster = Cluster(cuts=(3,))
        with driver(cluster) as pipeline:
            one, two = pipeline.open(), pipeline.open()
            extend(cluster, one, range(12))
            extend(cluster, two, range(3))
            deaths = [On(fault, first), On(fault, second)]

            def fault_of(shard: FakeShard, deaths: list[On] = deaths, index: int = index) -> None:
                if shard.layers[0] == 0 and deaths:
                    shard.fault = deaths.pop(0)
                elif index and deaths:
                    shard.fault = deaths[-1]

            fault_of(cluster[0])
            cluster.prepare = fault_of
            if index:
                cluster[1].fault = deaths[-1]
            for turn in range(4):
                extend(cluster, one, [turn])
                extend(cluster, two, [turn])


def test_every_worker_may_be_gone_at_once(cluster: Cluster) -> None:
    with driver(cluster, max_restarts=1) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(20))
        for shard in list(cluster):
            shard.die()
        extend(cluster, session, [1])
        assert pipeline.status()["restarts"] == 3
        assert len(events(pipeline, "lost")) == 3


INTERRUPTED: dict[str, Callable[[SessionPipeline, Session], object]] = {
    "extend": lambda pipeline, session: session.extend([1]),
    "truncate": lambda pipeline, session: session.truncate(3),
    "release": lambda pipeline, session: session.release(),
    "evict": lambda pipeline, session: pipeline.evict(session),
    "clear": lambda pipeline, session: pipeline.clear(),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_after_an_interrupt_all_sessions_are_cold_and_whole(cluster: Cluster, name: str) -> None:
    """Who knows what the shards have done of it."""
    with driver(cluster) as pipeline:
        session, other = pipeline.open(), pipeline.open()
        extend(cluster, session, range(5))
        extend(cluster, other, range(5))
        epoch = other.epoch
        cluster[1].fault = On("interrupt")
        with pytest.raises(KeyboardInterrupt):
            INTERRUPTED[name](pipeline, session)
        assert (session.position, session.hot, other.hot) == (3 if name == "truncate" else 5, False, False)
        extend(cluster, other, [2])
        assert other.epoch > epoch
        if name == "release":
            session = pipeline.open(session.id)
        extend(cluster, session, [2])
        assert len(pipeline.status()["sessions"]) == pipeline.status()["present"] == 2


def test_an_interrupt_after_the_last_shard_leaves_the_history_as_it_was(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the driver has noted what all of them have computed."""
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(5))
        run = SessionPipeline._run

        def interrupted(*arguments: Any, **options: Any) -> Step:
            run(*arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(SessionPipeline, "_run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.extend([1])
        assert (session.position, session.hot) == (5, False)
        extend(cluster, session, [2])
        assert events(pipeline, "refused") == []


# -- restarts


def test_a_worker_that_always_dies_is_given_up_on(cluster: Cluster) -> None:
    """As often in a row as was said; then each call tries once. A decode that succeeds forgives."""
    with driver(cluster, max_restarts=3) as pipeline:
        session, other = pipeline.open(), pipeline.open()
        extend(cluster, session, range(3))

        def die(shard: FakeShard, kind: Type) -> str | None:
            return "die_after" if kind is Type.DECODE else None

        def prepare(shard: FakeShard) -> None:
            if shard.layers == cluster[2].layers:
                shard.fault = die

        cluster.prepare = prepare
        prepare(cluster[2])
        for more in (3, 1, 1):
            started = cluster.started
            with pytest.raises(WorkerError) as caught:
                session.extend([1])
            assert caught.value.name == "lost"
            assert cluster.started - started == more
            assert session.tokens == [0, 1, 2]
        cluster.prepare = lambda shard: None
        extend(cluster, other, [1])
        extend(cluster, session, [2])
        cluster.prepare = prepare
        prepare(cluster[2])
        started = cluster.started
        with pytest.raises(WorkerError):
            session.extend([1])
        assert cluster.started - started == 3


def test_no_restarts_if_none_are_wanted(cluster: Cluster) -> None:
    with driver(cluster, max_restarts=0) as pipeline:
        session = pipeline.open()
        extend(cluster, session, [1])
        cluster[0].die()
        for _ in range(2):
            with pytest.raises(WorkerError, match="dead"):
                session.extend([1])
        assert cluster.started == 3
        # The history can still be worked with.
        session.truncate(0)
        session.release()


def test_a_worker_that_cannot_be_started_is_said_and_tried_again(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(3))
        start = pipeline._start
        cluster[1].die()

        def fail(layers: tuple[int, int]) -> Worker:
            raise WorkerError(4, "load", "the file is gone", layers, "start")

        pipeline._start = fail
        for _ in range(2):
            with pytest.raises(WorkerError, match="the file is gone"):
                session.extend([1])
        pipeline._start = start
        extend(cluster, session, [1])


def test_a_worker_that_comes_back_as_another_is_refused(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(3))
        cluster[1].die()
        cluster.model.threads = 2
        with pytest.raises(PipelineError, match=r"shard \[2,4\) was started again and has another recipe"):
            session.extend([1])
        assert cluster.connections[-1].closed
        cluster.model.threads = 1
        cluster[1].die()
        extend(cluster, session, [1])


def test_closing_while_a_worker_is_started_leaves_none(cluster: Cluster) -> None:
    pipeline = driver(cluster)
    session = pipeline.open()
    extend(cluster, session, [1])
    cluster[1].die()

    def start(layers: tuple[int, int]) -> Worker:
        pipeline.close()
        return cluster.start(layers)

    pipeline._start = start
    with pytest.raises(PipelineError, match="closed"):
        session.extend([2])
    assert all(worker.closed for worker in cluster.connections)


# -- room


def test_the_least_recently_used_goes_and_pinned_ones_stay(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(6)]
        for session in sessions[:4]:
            extend(cluster, session, [1])
        extend(cluster, sessions[0], [2])
        sessions[1].pinned = True
        extend(cluster, sessions[4], [1])
        assert [session.hot for session in sessions] == [True, True, False, True, True, False]
        # Those of the batch itself are spared, whatever their age.
        pipeline.decode([(sessions[3], 1, True), (sessions[5], 1, True)])
        assert [session.hot for session in sessions] == [False, True, False, True, True, True]
        assert pipeline.evict() is sessions[4]
        assert [entry["why"] for entry in events(pipeline, "evict")] == ["room", "room", "asked"]
        for session in sessions:
            session.pinned = True
        late = pipeline.open()
        extend(cluster, late, [1])  # into the slot that was freed
        late.pinned = True
        with pytest.raises(CapacityError) as caught:
            pipeline.open().extend([1])
        assert not caught.value.never


def test_what_does_not_fit_now_is_refused_by_choice(cluster: Cluster) -> None:
    with driver(cluster, when_full="refuse") as pipeline:
        sessions = [pipeline.open() for _ in range(5)]
        for session in sessions[:4]:
            extend(cluster, session, [1])
        asked = len(cluster[0].seen)
        with pytest.raises(CapacityError, match="no room now") as caught:
            sessions[4].extend([1])
        assert not caught.value.never
        assert len(cluster[0].seen) == asked
        assert all(session.hot for session in sessions[:4])
        sessions[2].release()
        extend(cluster, sessions[4], [1])


@pytest.mark.parametrize("frees", ["release", "evict", "clear", "lost"])
def test_who_waits_goes_on_when_there_is_room(cluster: Cluster, frees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Woken by whoever makes it, not because it looks again from time to time."""
    monkeypatch.setattr(sessions_module, "LOOK_AGAIN", 3600)
    waits = threading.Event()
    with driver(cluster, when_full="wait", wait=3600) as pipeline:
        pipeline.on_event = lambda entry: waits.set() if entry["event"] == "wait" else None
        sessions = [pipeline.open() for _ in range(5)]
        for session in sessions[:4]:
            extend(cluster, session, [1])
        steps: list[Step] = []
        thread = threading.Thread(target=lambda: steps.append(extend(cluster, sessions[4], [1, 2])))
        thread.start()
        assert waits.wait(60)
        assert steps == []
        # The lock is free meanwhile.
        extend(cluster, sessions[0], [2])
        if frees == "release":
            sessions[1].release()
        elif frees == "evict":
            pipeline.evict()
        elif frees == "clear":
            pipeline.clear()
        else:
            cluster[1].die()
            extend(cluster, sessions[0], [2])
        thread.join(60)
        assert len(steps) == 1
        assert pipeline.status()["waits"] == 1


def test_waiting_has_an_end(cluster: Cluster) -> None:
    with driver(cluster, when_full="wait", wait=0.05) as pipeline:
        sessions = [pipeline.open() for _ in range(5)]
        for session in sessions[:4]:
            extend(cluster, session, [1])
        with pytest.raises(CapacityError, match=r"after 0\.05 seconds") as caught:
            sessions[4].extend([1])
        assert not caught.value.never
        assert all(session.hot for session in sessions[:4])


def extending(session: Session) -> tuple[threading.Thread, list[PipelineError]]:
    """By a token, in a thread that has been started; the list is for what it fails with."""
    failed: list[PipelineError] = []

    def extend_it() -> None:
        try:
            session.extend([1])
        except PipelineError as error:
            failed.append(error)

    thread = threading.Thread(target=extend_it)
    thread.start()
    return thread, failed


def test_closing_wakes_who_waits(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "LOOK_AGAIN", 3600)
    waits = threading.Event()
    pipeline = driver(cluster, when_full="wait", wait=60)
    pipeline.on_event = lambda entry: waits.set() if entry["event"] == "wait" else None
    sessions = [pipeline.open() for _ in range(5)]
    for session in sessions[:4]:
        extend(cluster, session, [1])
    thread, failed = extending(sessions[4])
    assert waits.wait(60)
    pipeline.close()
    thread.join(60)
    assert "closed" in str(failed[0])
    pipeline.close()
    with pytest.raises(PipelineError, match="closed"):
        pipeline.open()
    assert all(worker.closed for worker in cluster.connections)


def test_a_session_that_is_released_by_another_thread_does_not_wait(cluster: Cluster) -> None:
    waits = threading.Event()
    with driver(cluster, when_full="wait", wait=60) as pipeline:
        pipeline.on_event = lambda entry: waits.set() if entry["event"] == "wait" else None
        sessions = [pipeline.open() for _ in range(5)]
        for session in sessions[:4]:
            extend(cluster, session, [1])
        thread, failed = extending(sessions[4])
        assert waits.wait(60)
        sessions[4].release()
        thread.join(60)
        assert "released" in str(failed[0])


@pytest.mark.parametrize("policy", ["evict", "wait", "refuse"])
def test_what_can_never_fit_is_refused_before_anything_is_sent(policy: str) -> None:
    cluster = Cluster(FakeModel(slots=2, positions=20, n_batch=4))
    with driver(cluster, when_full=policy, wait=60) as pipeline:
        sessions = [pipeline.open() for _ in range(3)]
        extend(cluster, sessions[0], range(10))
        other = pipeline.open()
        extend(cluster, other, [1])
        asked = len(cluster[0].seen)
        impossible: list[Callable[[], object]] = [
            lambda: pipeline.decode([(session, 1, True) for session in sessions]),
            lambda: pipeline.decode([(sessions[0], 1, True)] * 5),
            lambda: sessions[0].extend(range(11)),
            lambda: sessions[1].extend(range(21)),
        ]
        for operation in impossible:
            with pytest.raises(CapacityError) as caught:
                operation()
            assert caught.value.never
        assert len(cluster[0].seen) == asked
        assert sessions[0].position == 10
        assert sessions[0].hot
        assert other.hot
        extend(cluster, sessions[0], range(10))
        with pytest.raises(CapacityError):
            pipeline.decode([(sessions[0], 1, True)])


def test_cells_that_all_sessions_share() -> None:
    """Unified: others make way one by one; what does not fit by itself is refused before they do."""
    cluster = Cluster(FakeModel(slots=4, positions=32, kv_unified=True))
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(4)]
        for session in sessions[:3]:
            extend(cluster, session, range(10))
        extend(cluster, sessions[3], range(5))
        assert [session.hot for session in sessions] == [False, True, True, True]
        extend(cluster, sessions[3], range(15))
        assert [session.hot for session in sessions] == [False, False, True, True]
        with pytest.raises(CapacityError, match="30 positions|33 positions|cells") as caught:
            pipeline.decode([(sessions[3], 1, True)] + [(sessions[0], 1, True)] * 3)
        assert caught.value.never
        assert sessions[2].hot
        extend(cluster, sessions[0], range(10))
    cluster = Cluster(FakeModel(slots=4, positions=32, kv_unified=True))
    with driver(cluster, when_full="refuse") as pipeline:
        one, two = pipeline.open(), pipeline.open()
        extend(cluster, one, range(30))
        with pytest.raises(CapacityError) as caught:
            two.extend(range(5))
        assert not caught.value.never
        assert one.hot
        one.truncate(10)
        extend(cluster, two, range(5))


@pytest.mark.parametrize("policy", ["evict", "wait", "refuse"])
def test_slots_that_another_driver_has_taken(cluster: Cluster, policy: str) -> None:
    """The driver's own count says that there is room; the shards say that there is none."""
    with driver(cluster) as rival, driver(cluster, when_full=policy, wait=0.05) as pipeline:
        theirs = [rival.open() for _ in range(4)]
        for session in theirs:
            extend(cluster, session, [1])
        ours = pipeline.open()
        if policy == "evict":
            extend(cluster, ours, [1])
            assert events(pipeline, "evict")[0]["foreign"] == theirs[0].id.hex()
            assert all(len(shard.live) == 4 for shard in cluster)
        else:
            with pytest.raises(CapacityError) as caught:
                ours.extend([1])
            assert not caught.value.never
            theirs[0].release()
            extend(cluster, ours, [1])
        for session in theirs[1:]:
            extend(cluster, session, [2])


@pytest.mark.parametrize("number", [1, 2])
def test_a_worker_that_is_lost_while_room_is_made(number: int) -> None:
    """For a batch that a shard has refused as it has no cells left: one thing goes wrong while another is put right."""
    cluster = Cluster(FakeModel(slots=4, positions=32, kv_unified=True))
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(3)]
        for session in sessions[:2]:
            extend(cluster, session, range(14))
        extend(cluster, sessions[2], range(3))
        cluster[1].fault = On("die", number)
        extend(cluster, sessions[2], range(5))
        assert pipeline.status()["restarts"] == 1


def test_slots_that_another_driver_has_pinned(cluster: Cluster) -> None:
    """They are not taken, and yet may be free one day."""
    with driver(cluster) as rival, driver(cluster) as pipeline:
        theirs = [rival.open() for _ in range(4)]
        for session in theirs:
            extend(cluster, session, [1])
            for shard in cluster:
                FakeWorker(shard).pin_session(session.id, session.epoch)
        ours = pipeline.open()
        with pytest.raises(CapacityError) as caught:
            ours.extend([1])
        assert not caught.value.never
        for shard in cluster:
            FakeWorker(shard).pin_session(theirs[2].id, theirs[2].epoch, False)
        extend(cluster, ours, [1])
        assert theirs[2].id not in cluster[0].live


def test_evictions_that_free_nothing_come_to_an_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that does as if, and stays full."""
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(5)]
        for session in sessions[:4]:
            extend(cluster, session, [1])
        monkeypatch.setattr(FakeShard, "_evict", lambda *_: Reply({}, memoryview(b"")))
        with pytest.raises(CapacityError) as caught:
            sessions[4].extend([1])
        assert not caught.value.never


# -- threads


@pytest.mark.parametrize("policy", ["evict", "wait"])
def test_threads_do_not_disturb_each_other(cluster: Cluster, policy: str) -> None:
    """Eight of them over four slots, with deaths: each session's logits are its own, and nobody waits for ever."""
    with driver(cluster, when_full=policy, wait=60, max_restarts=50) as pipeline:
        failed: list[BaseException] = []

        def work(number: int) -> None:
            random = np.random.default_rng(number)
            try:
                for turn in range(6):
                    session = pipeline.open()
                    for _ in range(5):
                        extend(cluster, session, random.integers(0, N_VOCAB, random.integers(1, 12)).tolist())
                        if random.random() < 0.3:
                            session.truncate(int(random.integers(0, session.position + 1)))
                    if number == 0 and turn % 2:
                        cluster[turn % 3].die()
                    session.release()
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failed == []
        assert not any(thread.is_alive() for thread in threads)
        # The last death may have been in the last request of all.
        session = pipeline.open()
        extend(cluster, session, [1])
        session.release()
        assert pipeline.status()["present"] == 0
        assert pipeline.status()["restarts"] == 3
        assert not any(shard.live for shard in cluster)


# -- files


@pytest.fixture
def saving(tmp_path: Path) -> Cluster:
    return Cluster(FakeModel(state_dir=tmp_path))


def test_a_saved_session_comes_back_to_other_workers(saving: Cluster, tmp_path: Path) -> None:
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, range(20))
        session.save("kept")
        names = ["kept.0-2.bundle", "kept.2-4.bundle", "kept.4-6.bundle", "kept.json"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        extend(saving, session, [1, 2])
        # In place: the state of a session that goes on is replaced.
        session.restore("kept")
        assert (session.tokens, session.hot) == ([*range(20)], True)
        assert held(saving, session) == [True] * 3
        extend(saving, session, [3])
    for shard in list(saving):
        shard.die()
    with driver(saving, state_dir=tmp_path) as pipeline:
        # Other sessions make way as for any other.
        for _ in range(4):
            extend(saving, pipeline.open(), [1])
        session = pipeline.open(IDS[0])
        session.restore("kept")
        extend(saving, session, [7, 8])
        assert pipeline.status()["replays"] == 0


def test_a_cold_session_is_replayed_to_be_saved(saving: Cluster, tmp_path: Path) -> None:
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, range(9))
        pipeline.clear()
        session.save("kept")
        session.truncate(0)
        session.restore("kept")
        assert held(saving, session) == [True] * 3
        extend(saving, session, [7])


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "older"])
def test_a_damaged_file_leaves_a_clean_session(saving: Cluster, tmp_path: Path, damage: str) -> None:
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, range(9))
        session.save("older")
        extend(saving, session, [1, 2])
        session.save("kept")
        path = tmp_path / "kept.2-4.bundle"
        text = path.read_text()
        if damage == "cut":
            path.write_text(text[:-20])
        elif damage == "flipped":
            path.write_text(text[:100] + ("0" if text[100] != "0" else "1") + text[101:])
        elif damage == "gone":
            path.unlink()
        else:
            path.write_text((tmp_path / "older.2-4.bundle").read_text())
        session.truncate(5)
        with pytest.raises((WorkerError, PipelineError)) as caught:
            session.restore("kept")
        if damage in ("cut", "flipped"):
            assert isinstance(caught.value, WorkerError)
            assert caught.value.code == 5
        assert (session.position, session.hot) == (5, False)
        assert not any(session.id in shard.live for shard in saving)
        extend(saving, session, [3])


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"tokens": 1}', "[" * 100_000, "\xff"])
def test_a_damaged_driver_file_is_refused(saving: Cluster, tmp_path: Path, content: str) -> None:
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, range(9))
        (tmp_path / "kept.json").write_text(content, "latin-1")
        with pytest.raises(PipelineError, match="is no saved session"):
            session.restore("kept")
        assert session.hot


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("tokens", [1, 2, 3], "checksum"),
        ("tokens", [2**40], "no saved session"),
        ("recipe", "00" * 32, "another recipe"),
        ("ranges", [[0, 6]], "was saved by shards of"),
        ("session", IDS[1].hex(), "open it under that id"),
    ],
)
def test_a_foreign_driver_file_is_refused(saving: Cluster, tmp_path: Path, key: str, value: object, told: str) -> None:
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, range(9))
        session.save("kept")
        path = tmp_path / "kept.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        with pytest.raises(PipelineError, match=told):
            session.restore("kept")
        assert session.hot


def test_files_of_the_killed_are_removed(saving: Cluster, tmp_path: Path) -> None:
    """A state folder that every kill in the middle of a save fills a little more, or a save that another driver is in
    the middle of and that is taken from it."""
    with subprocess.Popen(["true"]) as process:
        pass
    ended, here = process.pid, os.getpid()
    others = {
        *(f".kept.0-2.bundle.{here}.0", f".partial-{here}-x", ".partial-x", f".partial-{1 << 80}-x"),
        *("kept.json", "kept.0-2.bundle", f"kept.0-2.bundle.{ended}.0", ".hidden"),
    }

    def litter() -> None:
        for name in (*others, f".kept.0-2.bundle.{ended}.0", f".kept.2-4.bundle.{ended}.17", f".partial-{ended}-a_b8"):
            (tmp_path / name).write_bytes(b"x")

    litter()
    with driver(saving, state_dir=tmp_path) as pipeline:
        assert {path.name for path in tmp_path.iterdir()} == others
        session = pipeline.open()
        extend(saving, session, [1, 2])
        litter()
        saving[1].dead = True
        extend(saving, session, [3])
        assert {path.name for path in tmp_path.iterdir()} == others


def test_half_a_save_is_none(saving: Cluster, tmp_path: Path) -> None:
    """The driver's file goes first and comes last: a mix of two saves must not be taken for one."""
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, range(9))
        session.save("kept")
        session.truncate(0)
        extend(saving, session, range(1, 10))
        saving[1].fault = On("refuse", kind=Type.SAVE)
        with pytest.raises(WorkerError):
            session.save("kept")
        assert session.hot
        with pytest.raises(PipelineError, match="nothing is saved as 'kept'"):
            session.restore("kept")


def test_a_save_that_cannot_be_written(saving: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk without the file's name, or a half that is taken for a whole."""
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        extend(saving, session, [1, 2])
        session.save("kept")

        def full(path: Path, parts: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(sessions_module, "write_whole", full)
            with pytest.raises(PipelineError, match=rf"^cannot write {tmp_path}/kept\.json: No space left on device$"):
                session.save("kept")
        with pytest.raises(PipelineError, match="nothing is saved as 'kept'"):
            session.restore("kept")
        extend(saving, session, [3])
        session.save("kept")
        (tmp_path / "kept.json").unlink()
        (tmp_path / "kept.json").mkdir()
        with pytest.raises(PipelineError, match=rf"^cannot replace {tmp_path}/kept\.json: Is a directory$"):
            session.save("kept")
        extend(saving, session, [4])


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden", "a" * 101, "a\0b", "ä"])
def test_names_are_plain(saving: Cluster, tmp_path: Path, name: str) -> None:
    with driver(saving, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        with pytest.raises(ValueError, match="no name for a saved session"):
            session.save(name)
        with pytest.raises(ValueError, match="no name for a saved session"):
            session.restore(name)


def test_saving_needs_folders(cluster: Cluster, tmp_path: Path) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, [1])
        with pytest.raises(PipelineError, match="the driver has no state folder"):
            session.save("kept")
    with driver(cluster, state_dir=tmp_path) as pipeline:
        session = pipeline.open()
        extend(cluster, session, [1])
        with pytest.raises(WorkerError, match="there is no state folder"):
            session.save("kept")
        assert session.hot


# -- bad input


def test_bad_input_is_refused_with_its_place(cluster: Cluster) -> None:
    with driver(cluster) as pipeline, driver(cluster) as other:
        session = pipeline.open(IDS[0])
        asked = len(cluster[0].seen)
        with pytest.raises(ValueError, match="16 bytes, not 3"):
            pipeline.open(b"abc")
        with pytest.raises(PipelineError, match=f"session {IDS[0].hex()} is open already"):
            pipeline.open(IDS[0])
        with pytest.raises(ValueError, match="needs a token"):
            pipeline.decode([])
        with pytest.raises(ValueError, match="no tokens"):
            session.extend([])
        for token in (-1, N_VOCAB, 2**40):
            with pytest.raises(ValueError, match=f"token 1 of the batch is {token}"):
                session.extend([0, token])
        with pytest.raises(ValueError, match="none, last or all"):
            session.extend([1], outputs="some")
        for position in (-1, 1):
            with pytest.raises(ValueError, match=f"has 0 positions, not {position}"):
                session.truncate(position)
        for operation in (
            lambda: other.decode([(session, 1, True)]),
            lambda: other.evict(session),
        ):
            with pytest.raises(ValueError, match="another pipeline's"):
                operation()
        session.release()
        session.release()
        for operation in (
            lambda: session.extend([1]),
            lambda: session.truncate(0),
            lambda: pipeline.evict(session),
            lambda: pipeline.decode([(session, 1, True)]),
        ):
            with pytest.raises(PipelineError, match="has been released"):
                operation()
        with pytest.raises(ValueError, match="when_full 'drop'"):
            driver(cluster, when_full="drop")
        assert len(cluster[0].seen) == asked


def test_recipes_must_agree_and_the_error_names_the_ingredient() -> None:
    """What the pipeline itself does not compare, such as the rope's settings."""
    cluster = Cluster()
    for layers in cluster.plan:
        cluster.start(layers)
    cluster[1].model = FakeModel(threads=2)
    cluster.connections.clear()
    with pytest.raises(PipelineError, match=r"shard \[2,4\) has another recipe than the first: n_threads is 2, not 1"):
        driver(cluster)
    assert all(worker.closed for worker in cluster.connections)


def test_workers_without_sessions_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FakeShard._describe

    def without(self: FakeShard, text: Any, bundle: Any) -> Any:
        reply = found(self, text, bundle)
        del reply.text["recipe"]
        return reply

    monkeypatch.setattr(FakeShard, "_describe", without)
    with pytest.raises(PipelineError, match=r"shard \[0,2\) knows no sessions"):
        driver(cluster)
    assert all(worker.closed for worker in cluster.connections)


def test_an_incompatible_recipe_is_raised_and_not_healed(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        cluster[1].model = FakeModel(threads=2)
        with pytest.raises(SessionRefused) as caught:
            session.extend([1])
        assert caught.value.outcome is Outcome.INCOMPATIBLE_RECIPE
        assert caught.value.ingredient == "n_threads"
        assert not any(shard.live for shard in cluster)
        assert [entry[0] for entry in cluster[1].seen] == ["open", "evict"]


# -- what it tells


def test_status_and_log_explain_what_happened(cluster: Cluster) -> None:
    told: list[Any] = []
    with driver(cluster, on_event=told.append) as pipeline:
        sessions = [pipeline.open() for _ in range(6)]
        for session in sessions:
            extend(cluster, session, range(9))
        cluster[2].lose(sessions[5].id)
        extend(cluster, sessions[5], [1])
        cluster[0].die()
        extend(cluster, sessions[5], [1])
        status = pipeline.status()
        assert json.loads(json.dumps(status)) == status
        assert told == list(pipeline.log)
        json.dumps(told)
        count = {name: len(events(pipeline, name)) for name in ("replay", "reset", "evict", "restart", "refused")}
        assert [count[name] for name in count] == [
            status[name] for name in ("replays", "resets", "evictions", "restarts")
        ] + [sum(status["outcomes"].values()) - status["outcomes"]["hit"]]
        assert status["outcomes"]["evicted"] > 0
        assert (status["opened"], status["decodes"], status["tokens"]) == (6, 14, 56)
        assert status["tokens_per_second"] > 0
        assert [shard["range"] for shard in status["shards"]] == [[0, 2], [2, 4], [4, 6]]
        assert [shard["restarts"] for shard in status["shards"]] == [1, 0, 0]
        assert all(shard["alive"] and shard["kv_bytes"] == 500 for shard in status["shards"])
        entry = next(entry for entry in status["sessions"] if entry["id"] == sessions[5].id.hex())
        assert (entry["position"], entry["hot"], entry["epoch"]) == (11, True, sessions[5].epoch)
        cluster[0].die()
        assert [shard["alive"] for shard in pipeline.status()["shards"]] == [False, True, True]
        sessions[0].release()
        assert len(pipeline.status()["sessions"]) == 5


def test_outcomes_are_what_the_shards_counted(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        sessions = [pipeline.open() for _ in range(6)]
        for turn in range(3):
            for session in sessions:
                extend(cluster, session, range(9))
            sessions[turn].truncate(3)
            cluster[turn].lose(sessions[5].id)
        ours = pipeline.status()["outcomes"]
        for name, count in ours.items():
            if name != "hit":  # the fake counts every request
                assert count == sum(shard.outcomes[name] for shard in cluster)


def test_the_log_is_bounded(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        for _ in range(LOG_EVENTS):
            pipeline.open().release()
        assert len(pipeline.log) == LOG_EVENTS
        assert len(pipeline._epochs) == 4096
        assert pipeline.status()["sessions"] == []


class Silent(Answer):
    """An answer that does not come."""

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        raise WorkerError(0, "timeout", f"no answer in {timeout:g} seconds")


def test_status_does_not_wait_for_a_worker_that_computes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not ask it again while it owes an answer: a queue of questions would stop it from reading."""
    with driver(cluster) as pipeline:
        extend(cluster, pipeline.open(), [1])
        pipeline.status()
        asked: list[FakeWorker] = []
        request = FakeWorker.request

        def silent(self: FakeWorker, type: int, text: Any = None, bundle: Any = b"") -> Answer:
            if type == Type.STATISTICS:
                asked.append(self)
                return Silent(None)
            return request(self, type, text, bundle)

        monkeypatch.setattr(FakeWorker, "request", silent)
        for _ in range(3):
            assert [shard["kv_bytes"] for shard in pipeline.status()["shards"]] == [500] * 3
        assert len(asked) == 3
        # It comes at last.
        monkeypatch.setattr(Silent, "done", lambda self: True)
        monkeypatch.setattr(Silent, "result", lambda self, timeout=None: Reply({"kv_bytes": 7}, memoryview(b"")))
        assert [shard["kv_bytes"] for shard in pipeline.status()["shards"]] == [7] * 3
        # Nor for the lock.
        with pipeline._lock:
            thread = threading.Thread(target=pipeline.status)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()


def test_a_listener_that_fails_does_not_leave_shards_apart(cluster: Cluster) -> None:
    """It is called in the middle of things."""
    with driver(cluster) as pipeline:
        session, other = pipeline.open(), pipeline.open()
        extend(cluster, session, range(9))
        extend(cluster, other, range(9))

        def fail(entry: Any) -> None:
            raise OSError("nobody listens")

        for prepare in (
            lambda: cluster[1].lose(session.id),
            lambda: cluster[1].die(),
            lambda: pipeline.evict(session),
        ):
            prepare()
            pipeline.on_event = fail
            with pytest.raises(OSError, match="nobody listens"):
                session.extend([1])
            pipeline.on_event = None
            extend(cluster, session, [2])
            extend(cluster, other, [2])


def test_a_listener_that_fails_costs_one_more_replay_and_no_refusal(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        session = pipeline.open()
        extend(cluster, session, range(9))
        pipeline.clear()

        def fail(entry: Any) -> None:
            if entry["event"] == "replay":
                raise OSError("nobody listens")

        pipeline.on_event = fail
        with pytest.raises(OSError, match="nobody listens"):
            session.extend([1])
        pipeline.on_event = None
        extend(cluster, session, [2])
        assert events(pipeline, "refused") == []


def test_text_services(cluster: Cluster) -> None:
    with driver(cluster) as pipeline:
        assert pipeline.tokenize("ab") == [1, 2]
        cluster[0].die()
        assert pipeline.tokenize("ab") == [1, 2]
        assert pipeline.status()["restarts"] == 1


# -- messages


def test_refusals_carry_what_was_said() -> None:
    told = {"code": 12, "name": "session", "message": "m", "outcome": "stale_epoch", "session": "00" * 16}
    error = refusal({**told, "epoch": 5, "position": None}, (0, 2), "open")
    assert isinstance(error, SessionRefused)
    assert (error.outcome, error.session, error.epoch, error.position) == (Outcome.STALE_EPOCH, bytes(16), 5, None)
    assert error.details["outcome"] == "stale_epoch"
    # Not of this version, or no refusal of a session: still an error that can be read.
    for unusable in ({**told, "outcome": "later"}, {**told, "session": "zz"}, {"code": 9, "name": "full"}):
        plain = refusal(unusable, (0, 2), "open")
        assert type(plain) is WorkerError
        assert plain.code in (9, 12)
    full = refusal({"code": 9, "name": "full", "message": "m", "outcome": "full"}, (0, 2), "decode")
    assert isinstance(full, SessionRefused)
    assert full.outcome is Outcome.FULL


def test_worker_methods_say_what_the_protocol_has(cluster: Cluster, tmp_path: Path) -> None:
    cluster.model.state_dir = tmp_path
    worker = cluster.start((0, 2))
    recipe = worker.describe().recipe
    assert recipe is not None
    assert recipe.ingredients()["n_batch"] == "8"
    assert worker.open_session(IDS[0], 3, 0, recipe.fingerprint, recipe.shared)["created"] is True
    worker.pin_session(IDS[0], 3)
    with pytest.raises(SessionRefused, match="pinned"):
        worker.evict_session(IDS[0])
    worker.pin_session(IDS[0], 3, False)
    assert worker.save_session(IDS[0], 3, "x")["position"] == 0
    assert worker.truncate_session(IDS[0], 3, 0)["position"] == 0
    assert worker.evict_session() == (IDS[0], 3)
    with pytest.raises(SessionRefused) as caught:
        worker.truncate_session(IDS[0], 3, 0)
    assert (caught.value.outcome, caught.value.operation) == (Outcome.EVICTED, "truncate")
    assert worker.restore_session(IDS[0], 4, recipe.fingerprint, None, "x")["position"] == 0
    assert worker.release_session(IDS[0], 4)["epoch"] == 4
    table = worker.sessions(forgotten=True)
    assert [(info.id, info.epoch, info.state) for info in table.sessions] == [(IDS[0], 4, "released")]
    assert (table.slots, table.positions, table.live) == (4, 64, 0)


def test_the_request_has_a_session_table(cluster: Cluster) -> None:
    """In its place, and only there; seq_ids are its rows."""
    model = cluster.start((0, 2)).describe()
    rows = [SessionRow(IDS[1], 5, 40), SessionRow(IDS[0], 2**63 + 1, 3)]
    batch = Batch([1, 2, 3], [3, 40, 4], [(1,), (0,), (1,)], [True, False, True], rows)
    bundle: Bundle = batch.bundle(model)
    assert [tensor.name for tensor in bundle.tensors] == [
        "token_ids",
        "positions",
        "seq_offsets",
        "seq_ids",
        "session_ids",
        "session_epochs",
        "session_positions",
        "outputs",
    ]
    assert np.asarray(bundle["session_ids"]).tolist() == [list(IDS[1]), list(IDS[0])]
    assert np.asarray(bundle["session_epochs"]).tolist() == [5, 2**63 + 1]
    assert np.asarray(bundle["session_positions"]).tolist() == [40, 3]
    assert np.asarray(bundle["seq_ids"]).tolist() == [1, 0, 1]
    assert bundle.attributes["recipe_fingerprint"] == model.recipe.fingerprint  # type: ignore[union-attr]
    plain = Batch([1], [0], [(0,)], [True]).bundle(model)
    assert [tensor.name for tensor in plain.tensors][3:] == ["seq_ids", "outputs"]
    assert "recipe_fingerprint" not in plain.attributes


def test_describe_shows_the_recipe(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Floats are bits for programs and numbers for people."""
    found = cluster.start((2, 4)).describe()
    raw = {"path": "m", "has_output": False, "has_tok_embd": True, "has_out_norm": False, "type_k": "f16"}
    found.raw.update({**raw, "type_v": "f16", "tensors": []})
    describe_command._print(found, tensors=False)
    lines = capsys.readouterr().out.splitlines()
    assert found.recipe is not None
    place = lines.index(f"recipe: {found.recipe.fingerprint.hex()}")
    assert lines[place + 1 : place + 4] == ["  n_batch 8", "  n_threads 1", "  rope_freq_base 10000.0"]
    assert lines[place + 4] == f"recipe of the range: {found.recipe.range_fingerprint.hex()}"
    assert lines[place + 5 : place + 7] == ["  layer_start 2", "  layer_end 4"]
    told = describe_command._as_json(found)["recipe"]
    assert "rope_freq_base 461c4000\n" in told["shared"]["text"]


# -- anything, in any order


class Anything(RuleBasedStateMachine):
    """Sessions of one driver, a rival that uses the same ids, and faults of every kind at any request."""

    model = FakeModel(slots=3, positions=40, n_batch=6)
    cuts: tuple[int, ...] = (1, 4)
    #: Whether somebody else changes the shards' tables: then local sequences may differ until all are cleared.
    meddled = False

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(self.model, self.cuts)
        #: For each shard the faults that are still to come, each after so many requests.
        self.faults: list[list[On]] = [[] for _ in self.cluster.plan]
        self.fired = False
        self.cluster.prepare = self.prepare
        self.pipeline = driver(self.cluster, max_restarts=1000, relay=CheckedRelay())
        self.rival: SessionPipeline | None = None
        self.sessions: dict[bytes, Session] = {}
        self.truth: dict[bytes, list[int]] = {}
        self.theirs: dict[bytes, Session] = {}

    def prepare(self, shard: FakeShard) -> None:
        index = self.cluster.plan.ranges.index(shard.layers)

        def fault(shard: FakeShard, kind: Type) -> str | None:
            if not self.faults[index]:
                return None
            found = self.faults[index][0](shard, kind)
            if found is not None:
                self.faults[index].pop(0)
                self.fired = True
                self.meddled |= found == "lose"
            return found

        shard.fault = fault

    def teardown(self) -> None:
        for faults in self.faults:
            faults.clear()
        # Whatever has been: all of them can go on.
        for id in self.sessions:
            self.extend(id, [1])
        self.check()
        self.pipeline.close()

    def attempt(self, operation: Callable[[], object]) -> bool:
        """Whether it was done; it may fail only if a fault came up."""
        self.fired = False
        try:
            operation()
        except (KeyboardInterrupt, WorkerError):
            if self.fired:
                return False
            raise
        return True

    def extend(self, id: bytes, tokens: list[int]) -> None:
        session, before = self.sessions[id], self.truth[id]
        if len(before) + len(tokens) > self.model.positions:
            with pytest.raises(CapacityError):
                session.extend(tokens)
            return
        if self.attempt(lambda: extend(self.cluster, session, tokens)):
            before.extend(tokens)
        else:
            # As many batches as were computed before it.
            done = session.position - len(before)
            assert done % self.model.n_batch == 0
            assert done < len(tokens)
            before.extend(tokens[:done])

    @rule(number=st.integers(0, 6))
    def open(self, number: int) -> None:
        id = IDS[number]
        if id in self.sessions:
            with pytest.raises(PipelineError):
                self.pipeline.open(id)
            return
        self.sessions[id] = self.pipeline.open(id)
        self.truth[id] = []

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=15))
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        self.extend(data.draw(st.sampled_from(sorted(self.sessions))), tokens)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def batch(self, data: st.DataObject) -> None:
        """Several sessions, interleaved."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.sessions)), min_size=1, max_size=6))
        tokens = data.draw(st.lists(st.integers(0, N_VOCAB - 1), min_size=len(chosen), max_size=len(chosen)))
        outputs = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
        after = {id: list(self.truth[id]) for id in chosen}
        wanted = []
        for id, token, output in zip(chosen, tokens, outputs, strict=True):
            after[id].append(token)
            if output:
                wanted.append(self.cluster.expected(after[id])[-1])
        items = [(self.sessions[id], token, out) for id, token, out in zip(chosen, tokens, outputs, strict=True)]
        lengths = [len(tokens) for tokens in after.values()]
        unified = self.model.kv_unified and sum(lengths) > self.model.positions
        if len(after) > self.model.slots or max(lengths) > self.model.positions or unified:
            with pytest.raises(CapacityError) as caught:
                self.pipeline.decode(items)
            assert caught.value.never
            return
        steps: list[Step] = []
        if self.attempt(lambda: steps.append(self.pipeline.decode(items, logits=True))):
            self.truth.update(after)
            assert same_bits(steps[0].logits, np.array(wanted, np.float32).reshape(-1, N_VOCAB))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.sessions)))
        position = data.draw(st.integers(0, len(self.truth[id])))
        self.attempt(lambda: self.sessions[id].truncate(position))
        del self.truth[id][position:]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.sessions)))
        session = self.sessions[id]
        self.attempt(session.release)
        assert session.released
        del self.sessions[id], self.truth[id]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([None, *sorted(self.sessions)]))
        self.attempt(lambda: self.pipeline.evict(None if id is None else self.sessions[id]))

    @rule()
    def clear(self) -> None:
        self.attempt(self.pipeline.clear)

    @rule(
        index=st.integers(0, 2),
        fault=st.sampled_from(["die", "die_after", "lose", "interrupt"]),
        number=st.integers(1, 12),
    )
    def plan_fault(self, index: int, fault: str, number: int) -> None:
        faults = self.faults[index % len(self.faults)]
        if len(faults) < 3:
            faults.append(On(fault, number))

    @rule(index=st.integers(0, 2), fault=st.sampled_from(["compute", "refuse"]), number=st.integers(1, 4))
    def plan_failure(self, index: int, fault: str, number: int) -> None:
        faults = self.faults[index % len(self.faults)]
        if len(faults) < 3:
            faults.append(On(fault, number, Type.DECODE))

    @rule(index=st.integers(0, 2))
    def die(self, index: int) -> None:
        self.cluster[index % len(self.faults)].die()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), index=st.integers(0, 2))
    def lose(self, data: st.DataObject, index: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.sessions)))
        shard = self.cluster[index % len(self.faults)]
        if id in shard.live:
            shard.lose(id)
            self.meddled = True

    @rule(number=st.integers(0, 6), tokens=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=8))
    def meddle(self, number: int, tokens: list[int]) -> None:
        """Another driver goes on with a history of its own under the same id."""
        self.meddled = True
        if self.rival is None:
            if any(shard.dead for shard in self.cluster):
                return
            self.rival = driver(self.cluster, max_restarts=1000)
        id = IDS[number]
        session = self.theirs.get(id)
        if session is None:
            session = self.theirs[id] = self.rival.open(id)
        room = self.model.positions - session.position
        if room >= len(tokens):
            self.attempt(lambda: extend(self.cluster, session, tokens))

    @invariant()
    def check(self) -> None:
        for id, session in self.sessions.items():
            assert session.tokens == self.truth[id]
        if self.meddled or any(shard.dead for shard in self.cluster):
            return
        # Nobody else has touched them: what is hot is hot, on all shards in the same place.
        hot = {id: session for id, session in self.sessions.items() if session.hot}
        for session in hot.values():
            assert all(held(self.cluster, session))
        if not self.pipeline._unsettled:
            tables = [shard.slots() for shard in self.cluster]
            assert all(table == tables[0] for table in tables)
            assert sorted(tables[0].values()) == sorted(hot)


class AnythingUnified(Anything):
    """Cells that all sessions share, so that a batch that has its sequences may still find no room."""

    model = FakeModel(slots=4, positions=40, n_batch=6, kv_unified=True)
    cuts = (3,)


class AnythingRecurrent(Anything):
    """The middle shard cannot truncate."""

    model = FakeModel(slots=3, positions=40, n_batch=6, recurrent=(2,))
    cuts = (2, 3)


EXAMPLES = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestAnything = Anything.TestCase
TestAnything.settings = EXAMPLES
TestAnythingUnified = AnythingUnified.TestCase
TestAnythingUnified.settings = EXAMPLES
TestAnythingRecurrent = AnythingRecurrent.TestCase
TestAnythingRecurrent.settings = EXAMPLES


# -- the same with real workers


class Watched(LocalWorker):
    """A child process; what changes or uses the first shard's table goes on to an unsplit worker as well."""

    def __init__(self, requests: list[tuple[int, Any, bytes]], *arguments: Any) -> None:
        self.requests = requests
        super().__init__(*arguments)

    def request(self, type: int, text: Any = None, bundle: Any = b"") -> Pending:
        if self.layer_range[0] == 0 and type in CHANGES:
            self.requests.append((type, text, bytes(bundle)))
        return super().request(type, text, bundle)


class Unsplit:
    """All layers in one worker, to which the same is said in the same order, so that its cells lie the same way."""

    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker
        self.requests: list[tuple[int, Any, bytes]] = []

    def follow(self) -> Any:
        """Catch up; the logits of the last batch."""
        logits = None
        for type, text, bundle in self.requests:
            if type == Type.DECODE:
                text = {"logits": True, "sample": False}
            try:
                reply = self.worker.request(type, text, bundle).result()
            except SessionRefused:
                continue
            if type == Type.DECODE:
                logits = np.array(decode(reply.bundle)["logits"], np.float32)
        self.requests.clear()
        return logits


SMALL = Settings(threads=1, ctx=1024, batch=16, ubatch=8, seqs=4)


@pytest.mark.shards
@pytest.mark.parametrize(
    ("variant", "cuts", "unified"), [("tied", [2, 5], False), ("gqa", [1, 2, 6], False), ("untied", [3], True)]
)
def test_real_workers_give_the_bits_of_an_unsplit_one(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, variant: str, cuts: list[int], unified: bool
) -> None:
    """Interleaved sessions with truncations, evictions, files and kills; every logit of every batch, by its bits."""
    path, random = tiny[variant], np.random.default_rng(len(cuts))
    program = patched_build.worker
    n_layer = read_model_file(path).n_layer
    chosen = replace(SMALL, kv_unified=unified, ctx=256 if unified else 1024)
    with LocalWorker(program, path, (0, n_layer), chosen) as worker:
        unsplit = Unsplit(worker)

        def start(layers: tuple[int, int]) -> Worker:
            return Watched(unsplit.requests, program, path, layers, chosen, (), 120.0, tmp_path)

        with SessionPipeline(start, make_plan(n_layer, cuts), relay=CheckedRelay(), state_dir=tmp_path) as pipeline:
            n_vocab = pipeline.model.n_vocab
            sessions = [pipeline.open(id) for id in IDS[:7]]
            truth: dict[bytes, list[int]] = {session.id: [] for session in sessions}
            for _ in range(150):
                session = sessions[random.integers(7)]
                history = truth[session.id]
                what = random.choice(
                    ["go", "truncate", "release", "evict", "kill", "clear"], p=[0.7, 0.1, 0.05, 0.07, 0.05, 0.03]
                )
                if what == "go" and len(history) < 100:
                    several = [session, *(sessions[k] for k in random.integers(7, size=random.integers(3)))]
                    items = [
                        (several[k], int(random.integers(3, n_vocab)), bool(random.random() < 0.7))
                        for k in random.integers(len(several), size=random.integers(1, 16))
                    ]
                    items[-1] = (*items[-1][:2], True)
                    step = pipeline.decode(items, logits=True)
                    for one, token, _ in items:
                        truth[one.id].append(token)
                    assert same_bits(step.logits, unsplit.follow())
                elif what == "release":
                    session.release()
                    sessions[sessions.index(session)] = pipeline.open(session.id)
                    truth[session.id] = []
                elif what == "evict":
                    pipeline.evict()
                elif what == "kill":
                    victim = pipeline.workers[random.integers(len(cuts) + 1)]
                    assert isinstance(victim, LocalWorker)
                    victim.kill()
                elif what == "clear":
                    pipeline.clear()
                else:
                    session.truncate(len(history) // 3)
                    del history[len(history) // 3 :]
                assert {one.id: one.tokens for one in sessions} == truth
            status = pipeline.status()
            assert status["replays"] > 10
            assert status["restarts"] > 2
            assert status["evictions"] > 10


@pytest.mark.shards
def test_a_real_session_is_saved_and_restored(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """By other processes, without a replay, and with the bits of the session that went on."""
    start = local_workers(patched_build.worker, tiny["tied"], SMALL, state_dir=tmp_path)
    plan, tokens = make_plan(7, [2, 5]), np.random.default_rng(1).integers(3, 320, 50).tolist()
    with SessionPipeline(start, plan, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        session.extend(tokens[:40])
        session.save("kept")
        expected = session.extend(tokens[40:], outputs="all", logits=True).logits
    with SessionPipeline(start, plan, state_dir=tmp_path) as pipeline:
        session = pipeline.open(IDS[0])
        session.restore("kept")
        assert same_bits(session.extend(tokens[40:], outputs="all", logits=True).logits, expected)
        assert pipeline.status()["replays"] == 0
        file = tmp_path / "kept.2-5.bundle"
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(WorkerError) as caught:
            session.restore("kept")
        assert caught.value.name == "bundle"
        assert (session.tokens, session.hot) == (tokens, False)
        session.extend([5])


@pytest.mark.shards
def test_real_workers_under_a_ctrl_c(
    patched_build: NativeBuild, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a shard owes its answer: the answer comes later, and belongs to nobody."""
    start = local_workers(patched_build.worker, tiny["tied"], SMALL)
    with SessionPipeline(start, make_plan(7, [2, 5])) as pipeline:
        session = pipeline.open()
        tokens = np.random.default_rng(1).integers(3, 320, 40).tolist()
        session.extend(tokens)
        pipeline.clear()
        expected = session.extend([7], logits=True).logits
        session.truncate(40)
        wait = LocalWorker._await
        left = 0

        def interrupt(self: LocalWorker, pending: Any, timeout: float | None) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            wait(self, pending, timeout)

        def go_on() -> None:
            while True:
                session.extend([7])
                session.truncate(40)

        monkeypatch.setattr(LocalWorker, "_await", interrupt)
        for left in range(1, 8):  # noqa: B007 - interrupt() counts it down
            with pytest.raises(KeyboardInterrupt):
                go_on()
            assert not session.hot
            session.truncate(40)
            assert session.tokens == tokens
            assert same_bits(session.extend([7], logits=True).logits, expected)
            session.truncate(40)
        assert pipeline.status()["restarts"] == 0
