"""Sessions over two to four real shard processes, against the same model and reference as those of one worker.

What the first shard is told is mirrored in a table in plain Python and in an unsplit, unpatched worker; the others must
have the same table after every step, and the logits of the last one the reference's bits. The token histories are the
tests' own. Catches: a shard that goes on from another history than its neighbours, whoever died, evicted or hung up; a
replay of other tokens; a session of another owner under the same id; a refusal that nothing explains; what leaks.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from session_drive import (
    KINDS,
    Kind,
    Listening,
    Mirror,
    Reference,
    SocketWorker,
    Tap,
    TappedWorker,
    Trap,
    differing,
    listing_of,
    profile,
    write_models,
)

from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    CapacityError,
    LocalWorker,
    Session,
    SessionPipeline,
    Step,
    Worker,
    make_plan,
)
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards

Layers = tuple[int, int]

IDS = [bytes([0xA0 + number]) * 16 for number in range(8)]
#: Mixed operations of the long test; a long run sets the variable to 10000.
OPERATIONS = int(os.environ.get("BOUNDARY_BUNDLE_SESSION_OPERATIONS", "600"))

#: Kind of memory -> cuts. Two to four shards; some of them hold layers of one sort only.
CUTS: dict[str, list[int]] = {
    "plain": [2, 5],
    "unified": [4],
    "window": [3],
    "hybrid": [1, 2, 4],
    "recurrent": [3],
}


# -- workers


class Cluster:
    """The workers of one plan, watched, and the mirror of what they are told."""

    def __init__(self, kind: Kind, model: Path, program: Path, oracle: Path, cuts: Sequence[int]) -> None:
        self.kind = kind
        self.model = model
        self.program = program
        self.plan = make_plan(kind.n_layer, cuts)
        self.tap = Tap()
        self.reference = Reference(LocalWorker(oracle, model, (0, kind.n_layer), kind.settings).ready())
        self.mirror = Mirror(kind, self.reference)

    @property
    def layers(self) -> list[Layers]:
        return list(self.plan)

    def start(self, layers: Layers) -> Worker:
        """As SessionPipeline asks for it."""
        raise NotImplementedError

    def kill(self, layers: Layers) -> None:
        raise NotImplementedError

    def listings(self) -> dict[Layers, list[dict[str, Any]]]:
        """The table of every shard that is up."""
        raise NotImplementedError

    def close(self) -> None:
        self.reference.worker.close()

    def settle(self) -> None:
        """The mirror follows; then all shards have its table."""
        self.mirror.absorb(self.tap.take())
        expected = self.mirror.table.listing()
        for layers, found in self.listings().items():
            assert found == expected, f"shard {layers}"

    def compare(self, step: Step) -> None:
        """The logits of the last batch."""
        assert step.logits is not None
        assert self.mirror.logits is not None
        assert differing(step.logits, self.mirror.logits) == 0
        assert step.sampled == step.logits.argmax(axis=1).tolist()

    def extend(self, session: Session, tokens: Sequence[int]) -> int:
        """Go on, and compare; the token that comes next."""
        step = session.extend(tokens, logits=True)
        self.settle()
        self.compare(step)
        return step.sampled[-1]


class Children(Cluster):
    """Child processes on their standard streams, as everybody has them."""

    def __init__(self, *arguments: Any, state_dir: Path | None = None) -> None:
        super().__init__(*arguments)
        self.state_dir = state_dir
        self.workers: dict[Layers, TappedWorker] = {}

    def start(self, layers: Layers) -> Worker:
        self.tap.came_up(layers)
        self.workers[layers] = TappedWorker(
            self.tap, self.program, self.model, layers, self.kind.settings, state_dir=self.state_dir
        )
        return self.workers[layers]

    def kill(self, layers: Layers) -> None:
        worker = self.workers[layers]
        worker.kill()
        while worker.alive:
            time.sleep(0.001)

    def listings(self) -> dict[Layers, list[dict[str, Any]]]:
        found = {layers: listing_of(worker) for layers, worker in self.workers.items() if worker.alive}
        self.tap.take()
        return found

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        super().close()


class Listeners(Cluster):
    """Processes on sockets, which stay up between examples; a pipeline has connections to them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.processes = {layers: self.spawn(layers) for layers in self.plan}
        self.connections: dict[Layers, SocketWorker] = {}
        #: Of somebody else who uses the same worker, and who is watched too.
        self.others = {layers: process.connect(self.tap) for layers, process in self.processes.items()}

    def spawn(self, layers: Layers) -> Listening:
        # What a connection held when it went away stays: no example disturbs the next one seconds later.
        return Listening(self.program, self.model, layers, self.kind.settings, "--session-grace", "3600")

    def start(self, layers: Layers) -> Worker:
        """A new process if the old one is gone, else a new connection."""
        if not self.processes[layers].alive:
            self.processes[layers].close()
            self.others[layers].close()
            self.tap.came_up(layers)
            self.processes[layers] = self.spawn(layers)
            self.others[layers] = self.processes[layers].connect(self.tap)
        self.connections[layers] = self.processes[layers].connect(self.tap)
        return self.connections[layers]

    def kill(self, layers: Layers) -> None:
        self.processes[layers].kill()

    def hang_up(self, layers: Layers) -> None:
        self.connections[layers].hang_up()

    def listings(self) -> dict[Layers, list[dict[str, Any]]]:
        alive = [layers for layers, process in self.processes.items() if process.alive]
        return {layers: listing_of(self.others[layers]) for layers in alive}

    def clear(self) -> None:
        self.tap.trap = None
        for layers, process in self.processes.items():
            if process.alive:
                self.others[layers].clear()
        self.tap.take()
        self.mirror.clear()

    def close(self) -> None:
        for worker in [*self.others.values(), *self.connections.values()]:
            worker.close()
        for process in self.processes.values():
            process.close()
        super().close()


@pytest.fixture(scope="module")
def session_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def listeners(
    patched_build: NativeBuild,
    unpatched_build: NativeBuild,
    session_models: dict[str, Path],
) -> Iterator[Callable[[str], Listeners]]:
    """Workers of a kind of memory; those of the kind before end."""
    up: dict[str, Listeners] = {}

    def get(name: str) -> Listeners:
        if name not in up:
            close()
            arguments = (KINDS[name], session_models[name], patched_build.worker, unpatched_build.worker, CUTS[name])
            up[name] = Listeners(*arguments)
        return up[name]

    def close() -> None:
        while up:
            up.popitem()[1].close()

    yield get
    close()


@pytest.fixture
def children(
    patched_build: NativeBuild, unpatched_build: NativeBuild, session_models: dict[str, Path], tmp_path: Path
) -> Iterator[Callable[..., Children]]:
    made: list[Children] = []

    def make(name: str, kind: Kind | None = None) -> Children:
        arguments = (kind or KINDS[name], session_models[name], patched_build.worker, unpatched_build.worker)
        made.append(Children(*arguments, CUTS[name], state_dir=tmp_path))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


# -- the state machine


class Distributed(RuleBasedStateMachine):
    """One driver, eight sessions, three local sequences on each shard."""

    def __init__(
        self, cluster: Listeners, when_full: str = "evict", driver: type[SessionPipeline] = SessionPipeline
    ) -> None:
        super().__init__()
        self.cluster = cluster
        self.when_full = when_full
        cluster.clear()
        self.driver = driver(cluster.start, cluster.plan, when_full=when_full, wait=0.0, max_restarts=20)
        self.sessions: dict[bytes, Session] = {}
        #: The tokens of each session: what was asked for.
        self.truth: dict[bytes, list[int]] = {}
        #: A worker or a connection has gone, and no batch has shown yet that the driver knows.
        self.unnoticed = False
        cluster.settle()

    def teardown(self) -> None:
        self.driver.close()

    # -- what must hold

    def settle(self) -> None:
        if self.unnoticed:
            # What the driver does not use it need not miss: only the next batch brings the shards together.
            self.cluster.mirror.absorb(self.cluster.tap.take())
        else:
            self.cluster.settle()
        live = self.cluster.mirror.table.live
        for id, session in self.sessions.items():
            assert session.tokens == self.truth[id]
            assert session.position == len(self.truth[id])
            if session.hot:
                held = live[id]
                assert (held.epoch, held.tokens) == (session.epoch, self.truth[id])
        if not self.unnoticed:
            assert [id for id in live if id not in self.sessions] == []

    def refused(self, ids: Sequence[bytes], counts: Sequence[int]) -> bool | None:
        """Whether a batch of so many tokens of each session must be refused: for ever (True), now (False), not."""
        chosen = self.cluster.kind.settings
        lengths = [len(self.truth[id]) + count for id, count in zip(ids, counts, strict=True)]
        if (
            len(ids) > chosen.seqs
            or sum(counts) > chosen.batch
            or max(lengths) > self.room
            or (chosen.kv_unified and sum(lengths) > chosen.ctx)
        ):
            return True
        hot = [id for id, session in self.sessions.items() if session.hot]
        cold = [id for id in ids if id not in hot]
        return False if self.when_full == "refuse" and len(cold) > chosen.seqs - len(hot) else None

    @property
    def room(self) -> int:
        """Positions that a session can have."""
        chosen = self.cluster.kind.settings
        return chosen.ctx if chosen.kv_unified else chosen.ctx // chosen.seqs

    def run(self, ids: Sequence[bytes], counts: Sequence[int], seed: int, shuffled: bool) -> None:
        """A batch of these sessions, and what must come of it."""
        random = np.random.default_rng(seed)
        order = [id for id, count in zip(ids, counts, strict=True) for _ in range(count)]
        if shuffled:
            random.shuffle(order)
        tokens = random.integers(3, self.cluster.kind.n_vocab, len(order)).tolist()
        outputs = [bool(flag) for flag in random.random(len(order)) < 0.6]
        items = [(self.sessions[id], token, flag) for id, token, flag in zip(order, tokens, outputs, strict=True)]
        expected = self.refused(ids, counts)
        if expected is not None:
            with pytest.raises(CapacityError) as caught:
                self.driver.decode(items, logits=True)
            assert caught.value.never is expected
            self.nothing_was_done()
            return
        step = self.driver.decode(items, logits=True)
        for id, token in zip(order, tokens, strict=True):
            self.truth[id].append(token)
        self.computed(step)
        for id in ids:
            assert self.sessions[id].hot
            assert self.cluster.mirror.table.live[id].tokens == self.truth[id]

    def computed(self, step: Step) -> None:
        # A worker that died after its answer is not missed yet.
        trap = self.cluster.tap.trap
        self.unnoticed = trap is not None and trap.sprung
        if self.unnoticed:
            self.cluster.tap.trap = None
        self.settle()
        self.cluster.compare(step)

    def nothing_was_done(self) -> None:
        asked = {entry.type for entry in self.cluster.tap.entries}
        assert not asked & {Type.OPEN, Type.DECODE, Type.EVICT, Type.RELEASE, Type.TRUNCATE}
        self.settle()

    # -- rules

    def some(self, data: st.DataObject) -> bytes:
        return data.draw(st.sampled_from(sorted(self.sessions)), "session")

    @rule(id=st.sampled_from(IDS))
    def open(self, id: bytes) -> None:
        if id not in self.sessions:
            self.sessions[id] = self.driver.open(id)
            self.truth[id] = []
            self.settle()

    @rule(data=st.data(), ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True))
    def talk(self, data: st.DataObject, ids: list[bytes]) -> None:
        for id in ids:
            self.open(id)
        large = self.cluster.kind.settings.batch // len(ids)
        sizes = st.one_of(st.integers(1, 6), st.integers(1, large + 1))
        if self.cluster.kind.truncation == "window":
            sizes = st.integers(1, large)
        counts = [data.draw(sizes, "tokens") for _ in ids]
        self.run(ids, counts, data.draw(st.integers(0, 2**16), "seed"), data.draw(st.booleans(), "shuffled"))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), count=st.integers(1, 150), seed=st.integers(0, 2**16))
    def extend(self, data: st.DataObject, count: int, seed: int) -> None:
        """More tokens than a batch holds go in several."""
        id = self.some(data)
        tokens = np.random.default_rng(seed).integers(3, self.cluster.kind.n_vocab, count).tolist()
        if len(self.truth[id]) + count > self.room:
            expected: bool | None = True
        else:
            expected = self.refused([id], [min(count, self.cluster.kind.settings.batch)])
        if expected is not None:
            with pytest.raises(CapacityError) as caught:
                self.sessions[id].extend(tokens, logits=True)
            assert caught.value.never is expected
            self.nothing_was_done()
            return
        step = self.sessions[id].extend(tokens, logits=True)
        self.truth[id] += tokens
        self.computed(step)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        id = self.some(data)
        position = data.draw(st.integers(0, len(self.truth[id])), "position")
        self.sessions[id].truncate(position)
        del self.truth[id][position:]
        self.settle()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = self.some(data)
        self.sessions.pop(id).release()
        del self.truth[id]
        self.settle()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), named=st.booleans())
    def evict(self, data: st.DataObject, named: bool) -> None:
        hot = [session for session in self.sessions.values() if session.hot]
        session = self.sessions[self.some(data)] if named else None
        gone = self.driver.evict(session)
        if session is not None:
            assert not session.hot
        elif hot:
            assert gone in hot
            assert gone is not None
            assert not gone.hot
        else:
            assert gone is None
        self.settle()

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 5), "one in six") == 0:
            self.driver.clear()
            assert not any(session.hot for session in self.sessions.values())
            self.settle()

    # -- what goes wrong

    def shard(self, data: st.DataObject) -> Layers:
        return data.draw(st.sampled_from(self.cluster.layers), "shard")

    @rule(data=st.data(), hang_up=st.booleans())
    def lose(self, data: st.DataObject, hang_up: bool) -> None:
        """Between two requests: a worker is killed, or the connection to it ends."""
        layers = self.shard(data)
        self.unnoticed = True
        if hang_up:
            self.cluster.hang_up(layers)
        else:
            self.cluster.kill(layers)

    @rule(data=st.data(), hang_up=st.booleans(), before=st.booleans(), countdown=st.integers(0, 3))
    def lose_soon(self, data: st.DataObject, hang_up: bool, before: bool, countdown: int) -> None:
        """In the middle of a batch, perhaps one of a replay."""
        layers = self.shard(data)
        act = partial(self.cluster.hang_up if hang_up else self.cluster.kill, layers)
        self.cluster.tap.trap = Trap(layers, countdown, before, act)

    @precondition(lambda self: self.cluster.mirror.table.live and not self.unnoticed)
    @rule(data=st.data(), how=st.sampled_from(["evict", "release", "take over", "truncate"]))
    def meddle(self, data: st.DataObject, how: str) -> None:
        """Somebody else does something to a session on one shard alone; at its next use all agree again."""
        layers = self.shard(data)
        table = self.cluster.mirror.table
        id = data.draw(st.sampled_from(sorted(table.live)), "session")
        held = table.live[id]
        other = self.cluster.others[layers]
        if how == "take over":
            newer = held.epoch + data.draw(st.integers(1, 3), "newer")
            shared = other.describe().recipe
            assert shared is not None
            other.open_session(id, newer, 0, shared.fingerprint)
        elif how == "release":
            other.release_session(id, held.epoch)
        elif how == "truncate" and self.cluster.kind.truncation == "always" and held.position > 1:
            other.truncate_session(id, held.epoch, data.draw(st.integers(0, held.position - 1), "position"))
        else:
            other.evict_session(id)
        seed = data.draw(st.integers(0, 2**16), "seed")
        if len(self.truth[id]) == self.room:
            self.sessions[id].truncate(1)
            del self.truth[id][1:]
        self.run([id], [1], seed, False)


@pytest.mark.parametrize("name", CUTS)
def test_sessions_over_shards(name: str, listeners: Callable[[str], Listeners]) -> None:
    run_state_machine_as_test(partial(Distributed, listeners(name)), settings=profile(20))


def test_sessions_over_shards_that_are_refused_when_it_is_full(listeners: Callable[[str], Listeners]) -> None:
    run_state_machine_as_test(partial(Distributed, listeners("plain"), "refuse"), settings=profile(20))


# -- workers that are killed


@pytest.mark.parametrize("victim", range(3))
def test_a_worker_killed_at_each_of_20_points(victim: int, children: Callable[..., Children]) -> None:
    """Between two requests, just before one, or while it computes: the generation ends as if nothing had been."""
    cluster = children("plain")
    layers = cluster.layers[victim]
    with SessionPipeline(cluster.start, cluster.plan) as driver:
        bystander = driver.open()
        for point in range(20):
            killed = cluster.workers[layers].pid
            cluster.extend(bystander, [3 + point])
            session = driver.open()
            prompt = np.random.default_rng(point).integers(3, cluster.kind.n_vocab, 20 + point).tolist()
            token = cluster.extend(session, prompt)
            for number in range(20):
                if number == point:
                    if point % 3 == 0:
                        cluster.kill(layers)
                    else:
                        cluster.tap.trap = Trap(layers, 0, point % 3 == 1, partial(cluster.kill, layers))
                token = cluster.extend(session, [token])
            # What died after its answer is missed at the next batch.
            cluster.extend(bystander, [3 + point])
            assert session.position == len(prompt) + 20
            assert cluster.workers[layers].pid != killed
            session.release()
        assert driver.status()["restarts"] == 20


# -- many sessions for a long time


def open_files(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_many_sessions_over_few_slots(children: Callable[..., Children]) -> None:
    """64 sessions over 4 local sequences: nothing leaks, nothing waits for ever, and the log explains each outcome."""
    kind = replace(KINDS["plain"], settings=replace(KINDS["plain"].settings, ctx=1024, seqs=4))
    cluster = children("plain", kind)
    random = np.random.default_rng(6)
    truth: dict[bytes, list[int]] = {}
    files: list[int] = []
    memory: list[dict[int, int]] = []
    log: list[Mapping[str, Any]] = []
    with SessionPipeline(cluster.start, cluster.plan, on_event=log.append) as driver:
        sessions = [driver.open(bytes([number]) * 16) for number in range(64)]
        truth = {session.id: [] for session in sessions}
        for number in range(OPERATIONS):
            session = sessions[random.integers(64)]
            history = truth[session.id]
            what = random.choice(
                ["talk", "extend", "truncate", "release", "evict", "clear", "kill"],
                p=[0.6, 0.15, 0.1, 0.06, 0.07, 0.01, 0.01],
            )
            if len(history) > 80:
                what = "truncate"
            if what == "talk":
                chosen = [session, *(sessions[other] for other in random.choice(64, random.integers(4)))]
                chosen = list(dict.fromkeys(chosen))
                order = random.integers(len(chosen), size=random.integers(1, 12)).tolist()
                items = [(chosen[place], int(random.integers(3, kind.n_vocab)), True) for place in order]
                step = driver.decode(items, logits=True)
                for other, token, _ in items:
                    truth[other.id].append(token)
                cluster.settle()
                cluster.compare(step)
            elif what == "extend":
                tokens = random.integers(3, kind.n_vocab, random.integers(1, 20)).tolist()
                cluster.extend(session, tokens)
                history += tokens
            elif what == "truncate":
                keep = int(random.integers(len(history) + 1))
                session.truncate(keep)
                del history[keep:]
            elif what == "release":
                session.release()
                place = sessions.index(session)
                sessions[place] = driver.open(session.id)
                history.clear()
            elif what == "evict":
                driver.evict(session if random.random() < 0.5 else None)
            elif what == "clear":
                driver.clear()
            else:
                # Not in the second half, whose memory is measured.
                if number < OPERATIONS // 2:
                    cluster.kill(cluster.layers[random.integers(3)])
                    cluster.extend(session, [5])
                    history.append(5)
            cluster.settle()
            assert {one.id: one.tokens for one in sessions} == truth
            assert sum(one.hot for one in sessions) <= 4
            if number in (OPERATIONS // 2, OPERATIONS - 1):
                pids = [worker.pid for worker in cluster.workers.values()]
                memory.append({pid: resident(pid) for pid in pids})
                files.append(open_files("self") + sum(map(open_files, pids)))
        assert files[0] == files[1]
        for pid, before in memory[0].items():
            # What the allocator rounds up; a leak of one answer in each operation is more.
            assert memory[1][pid] - before < 2 << 20
        explained(driver, log)
        for session in sessions:
            session.release()
        cluster.settle()
        assert cluster.mirror.table.live == {}
        # Every cell is free again: four sessions that take them all.
        for _ in range(4):
            session = driver.open()
            for _ in range(4):
                cluster.extend(session, random.integers(3, kind.n_vocab, 64).tolist())
            assert session.position == 256
            with pytest.raises(CapacityError):
                session.extend([5])
        assert len(cluster.mirror.table.live) == 4


def explained(driver: SessionPipeline, log: Sequence[Mapping[str, Any]]) -> None:
    """Whatever the shards answered, the log has it with its cause, and nothing else."""
    events = collections.Counter(entry["event"] for entry in log)
    status = driver.status()
    assert sum(status["outcomes"].values()) - status["outcomes"]["hit"] == events["refused"]
    assert events["replay"] == status["replays"] > 0
    assert events["restart"] == status["restarts"] > 0
    assert events["evict"] == status["evictions"] > 0
    assert events["lost"] >= events["restart"]
    assert {entry["why"] for entry in log if entry["event"] == "evict"} == {"room", "asked"}


# -- numbers


@pytest.mark.parametrize("name", CUTS)
def test_kv_bytes_are_those_of_the_layers(
    name: str, patched_build: NativeBuild, session_models: dict[str, Path]
) -> None:
    """Exactly: those of a range are those of its layers."""
    kind = KINDS[name]

    def held(layers: Layers) -> int:
        with LocalWorker(patched_build.worker, session_models[name], layers, kind.settings) as worker:
            found = worker.describe().kv_bytes
        assert found is not None
        return found

    single = [held((layer, layer + 1)) for layer in range(kind.n_layer)]
    plan = make_plan(kind.n_layer, CUTS[name])
    for start, end in [(0, kind.n_layer), *plan]:
        assert held((start, end)) == sum(single[start:end])
    if name in ("plain", "unified"):
        # Keys and values of f16 in every cell; the models have 4 and 2 heads of 32 for them.
        heads = {"plain": 4, "unified": 2}[name]
        assert single == [kind.settings.ctx * 2 * heads * 32 * 2] * kind.n_layer


@pytest.mark.parametrize("name", CUTS)
def test_bytes_of_a_session_are_its_share(
    name: str, listeners: Callable[[str], Listeners], patched_build: NativeBuild, session_models: dict[str, Path]
) -> None:
    """Together the shards hold as much of a session as one worker of all layers does."""
    kind, cluster = KINDS[name], listeners(name)
    tokens = np.random.default_rng(4).integers(3, kind.n_vocab, 40).tolist()

    def held(workers: Sequence[Worker]) -> int:
        return sum(worker.sessions().sessions[0].kv_bytes for worker in workers)

    cluster.clear()
    found = []
    with SessionPipeline(cluster.start, cluster.plan) as driver:
        session = driver.open()
        session.extend(tokens)
        found.append(held(driver.workers))
        session.release()

    def whole(layers: Layers) -> Worker:
        return LocalWorker(patched_build.worker, session_models[name], layers, kind.settings)

    with SessionPipeline(whole, make_plan(kind.n_layer, [])) as driver:
        driver.open().extend(tokens)
        found.append(held(driver.workers))
    assert found[0] == found[1] > 0
    cluster.clear()


def test_the_benchmark_of_the_table_compiles(patched_build: NativeBuild, tmp_path: Path) -> None:
    """It is not run here: it takes minutes, and says nothing that is true or false."""
    path = Path(__file__).parent / "bench" / "bench_sessions.py"
    spec = importlib.util.spec_from_file_location("bench_sessions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compile_bench(patched_build, tmp_path).exists()


# -- saved, and brought back by other processes


@pytest.mark.parametrize("name", CUTS)
def test_a_saved_session_goes_on_after_every_worker_was_killed(
    name: str, children: Callable[..., Children], tmp_path: Path
) -> None:
    cluster = children(name)
    tokens = np.random.default_rng(2).integers(3, cluster.kind.n_vocab, 60).tolist()
    with SessionPipeline(cluster.start, cluster.plan, state_dir=tmp_path) as driver:
        session = driver.open()
        session.extend(tokens[:40])
        session.save("kept")
        expected = session.extend(tokens[40:], outputs="all", logits=True).logits
        session.release()
        for layers in cluster.layers:
            cluster.kill(layers)
        again = driver.open(session.id)
        again.restore("kept")
        assert again.tokens == tokens[:40]
        replays = driver.status()["replays"]
        found = again.extend(tokens[40:], outputs="all", logits=True).logits
        assert driver.status()["replays"] == replays
        assert expected is not None
        assert found is not None
        assert differing(found, expected) == 0


# -- room


def test_who_waits_goes_on_when_somebody_releases(listeners: Callable[[str], Listeners]) -> None:
    cluster = listeners("plain")
    cluster.clear()
    with SessionPipeline(cluster.start, cluster.plan, when_full="wait", wait=60) as driver:
        held = [driver.open(id) for id in IDS[:3]]
        for session in held:
            cluster.extend(session, [5, 6, 7])
        late = driver.open(IDS[3])
        steps: list[Step] = []
        waiting = threading.Thread(target=lambda: steps.append(late.extend([8, 9], logits=True)))
        waiting.start()
        while driver.status()["waits"] == 0:
            time.sleep(0.001)
        assert steps == []
        held[1].release()
        waiting.join(60)
        cluster.settle()
        cluster.compare(steps[0])
        driver.wait = 0.05
        with pytest.raises(CapacityError) as caught:
            driver.open(IDS[4]).extend([5])
        assert not caught.value.never
        cluster.settle()
