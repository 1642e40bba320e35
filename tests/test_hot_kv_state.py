"""Sessions of one worker against a model in plain Python and an unpatched, unsplit reference, by bits.

A state machine draws what drivers may ask, right and wrong. After every step outcome, epoch, positions and the list of
sessions agree with the model, and every logit with the reference, which mirrors each cut in the same local sequence.
Catches: a state that is not there any more and is taken for one that is, one of another owner, a refusal that changes
something, a request that is run twice, and a table that forgets its order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from session_drive import (
    KINDS,
    Kind,
    Listening,
    Logits,
    Reference,
    Talk,
    attempt,
    differing,
    listing_of,
    logits_of,
    profile,
    write_models,
)
from session_model import CANNOT_TRUNCATE, FULL, HIT, MAX_FORGOTTEN, POSITION_MISMATCH, STALE_EPOCH, Answer, Row

from boundary_bundle import encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import LocalWorker, SessionRefused, WorkerError
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards

SESSIONS = [bytes([number]) * 16 for number in range(1, 7)]
FILES = ["a", "b"]


@dataclass
class Env:
    """Two processes that stay up between examples."""

    kind: Kind
    worker: LocalWorker
    reference: Reference
    states: Path
    recipe: bytes = field(init=False)
    ingredients: str = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.worker.describe()
        shared = self.model.raw["recipe"]["shared"]
        self.recipe, self.ingredients = bytes.fromhex(shared["fingerprint"]), shared["text"]

    def clear(self) -> None:
        self.worker.clear()
        self.reference.clear()
        for path in self.states.iterdir():
            path.unlink()


def start(kind: Kind, model: Path, program: Path, oracle: Path, states: Path) -> Env:
    states.mkdir(exist_ok=True)
    layers = (0, kind.n_layer)
    worker = LocalWorker(program, model, layers, kind.settings, state_dir=states)
    try:
        return Env(kind, worker.ready(), Reference(LocalWorker(oracle, model, layers, kind.settings).ready()), states)
    except BaseException:
        worker.close()
        raise


@pytest.fixture(scope="module")
def session_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module", params=KINDS)
def env(
    request: pytest.FixtureRequest,
    patched_build: NativeBuild,
    unpatched_build: NativeBuild,
    session_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Env]:
    name = request.param
    states = tmp_path_factory.mktemp("states")
    found = start(KINDS[name], session_models[name], patched_build.worker, unpatched_build.worker, states)
    yield found
    found.worker.close()
    found.reference.worker.close()


@dataclass(frozen=True)
class Sent:
    """A batch that was decoded, and its answer."""

    talk: Talk
    data: bytes = field(repr=False)
    answer: bytes = field(repr=False)


#: How a session came to be where it is: tokens that were added, or the position at which it was cut.
Script = list[list[int] | int]


@dataclass(frozen=True)
class Saved:
    """A session in a file. ``script`` is None if a reference cannot come to the same bits alone."""

    session: bytes
    tokens: list[int]
    script: Script | None


class HotState(RuleBasedStateMachine):
    """One worker, six sessions, three local sequences."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.env = env
        env.clear()
        self.table = env.kind.table()
        self.sent: list[Sent] = []
        # Which of them was the last of each session.
        self.last: dict[bytes, Sent] = {}
        # Of those that never shared a batch.
        self.scripts: dict[bytes, Script] = {}
        self.saved: dict[str, Saved] = {}

    # -- what is drawn

    def pick(self, data: st.DataObject) -> bytes:
        """More often than not one that is there."""
        live = sorted(self.table.live)
        return data.draw(st.sampled_from([*live * 6, *SESSIONS]), "session")

    def epoch_near(self, data: st.DataObject, session: bytes) -> int:
        return max(0, self.known(session) + data.draw(st.sampled_from([0] * 7 + [1, -1, 2]), "epoch, from known"))

    def known(self, session: bytes) -> int:
        held = self.table.live.get(session) or self.table.gone.get(session)
        return 1 if held is None else held.epoch

    def position_near(self, data: st.DataObject, session: bytes) -> int:
        held = self.table.live.get(session)
        here = 0 if held is None else held.position
        return data.draw(st.one_of(st.sampled_from([0, here, here + 1]), st.integers(0, here)), "position")

    def draw_talk(self, data: st.DataObject, sessions: list[bytes], *, long: bool = False) -> Talk:
        kind = self.env.kind
        most = kind.settings.batch // len(sessions)
        sizes = st.integers(most // 2 + 1, most) if long else st.one_of(st.integers(1, 6), st.integers(1, most))
        counts = [data.draw(sizes, "tokens") for _ in sessions]
        order = [number for number, count in enumerate(counts) for _ in range(count)]
        random = np.random.default_rng(data.draw(st.integers(0, 2**16), "seed"))
        if data.draw(st.booleans(), "interleaved"):
            random.shuffle(order)
        rows = [
            Row(session, held.epoch, held.position, random.integers(3, kind.n_vocab, count).tolist())
            for session, count in zip(sessions, counts, strict=True)
            for held in [self.table.live[session]]
        ]
        return Talk(rows, order, [bool(flag) for flag in random.random(len(order)) < 0.7])

    # -- what is compared

    def expect(self, answer: Answer, call: Callable[[], dict[str, Any] | SessionRefused]) -> None:
        """The worker says what the model said; then the reference follows."""
        reply = attempt(call)
        if isinstance(reply, SessionRefused):
            assert answer.outcome == reply.outcome, (answer, reply)
            if answer.session is not None:
                assert (answer.epoch, answer.position) == (reply.epoch, reply.position), (answer, reply)
        else:
            assert answer.outcome == HIT, (answer, reply)
            assert answer.session is not None
            assert (reply["session"], reply["epoch"]) == (answer.session.hex(), answer.epoch)
            if answer.position is not None:
                assert reply["position"] == answer.position
            assert reply.get("created", answer.created) == answer.created
            self.env.reference.follow(answer)
        self.compare_tables()

    def compare_tables(self) -> None:
        reply = self.env.worker.sessions(forgotten=True)
        assert listing_of(self.env.worker) == self.table.listing()
        assert (reply.live, reply.forgotten) == (len(self.table.live), len(self.table.gone))
        assert [info.kv_bytes > 0 for info in reply.sessions] == [info.position > 0 for info in reply.sessions]

    def ask_decode(self, data: bytes) -> bytes:
        return bytes(self.env.worker.request(Type.DECODE, {"logits": True, "sample": False}, data).result().bundle)

    def run(self, talk: Talk, data: bytes, *, same_recipe: bool = True) -> None:
        """A batch that may be right or wrong."""
        sent = self.last.get(talk.rows[0].session)
        if sent is not None and sent.data == data and self.stands(sent):
            self.again(sent)
            return
        answer = self.table.decode(talk.rows, same_recipe=same_recipe)
        reply = attempt(lambda: self.ask_decode(data))
        if isinstance(reply, SessionRefused):
            assert reply.outcome == answer.outcome, (answer, reply)
            assert reply.code == (9 if answer.outcome == FULL else 12)
            if answer.session is not None:
                found = (reply.session, reply.epoch, reply.position)
                assert found == (answer.session, answer.epoch, answer.position)
        else:
            assert answer.outcome == HIT, answer
            theirs = self.env.reference.decode(self.table, talk)
            assert differing(logits_of(reply), theirs) == 0
            sent = Sent(talk, data, reply)
            self.sent = [*self.sent[-4:], sent]
            for row in talk.rows:
                self.last[row.session] = sent
                if len(talk.rows) > 1 or row.session not in self.scripts:
                    self.scripts.pop(row.session, None)
                else:
                    self.scripts[row.session].append(list(row.tokens))
        self.compare_tables()

    def stands(self, sent: Sent) -> bool:
        """Whether its sessions are where the batch left them."""
        return all(
            held is not None
            and held.epoch == row.epoch
            and held.position == row.position + len(row.tokens)
            and held.tokens[row.position :] == row.tokens
            for row in sent.talk.rows
            for held in [self.table.live.get(row.session)]
        )

    def again(self, sent: Sent) -> None:
        """The same bytes once more: the same answer, and nothing is run twice."""
        answer = attempt(lambda: self.ask_decode(sent.data))
        if isinstance(answer, SessionRefused):
            # What has come since may have taken its place.
            assert answer.outcome == POSITION_MISMATCH
            assert any(self.last.get(row.session) is not sent for row in sent.talk.rows)
        else:
            assert answer == sent.answer
        self.compare_tables()

    def open(self, session: bytes, epoch: int, position: int, recipe: bytes, ingredients: str | None) -> None:
        answer = self.table.open(session, epoch, position, same_recipe=recipe == self.env.recipe)
        if answer.created:
            self.scripts[session] = []
        self.expect(answer, lambda: self.env.worker.open_session(session, epoch, position, recipe, ingredients))

    # -- rules

    @initialize(data=st.data(), sessions=st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=3, unique=True))
    def begin(self, data: st.DataObject, sessions: list[bytes]) -> None:
        self.talk(data, sessions)

    @rule(data=st.data())
    def open_rightly(self, data: st.DataObject) -> None:
        """As a driver does that knows what it did."""
        session = self.pick(data)
        held, gone = self.table.live.get(session), self.table.gone.get(session)
        epoch = self.known(session)
        newer = data.draw(st.booleans(), "newer")
        if newer or (gone is not None and gone.state == "released"):
            epoch += 1
        begin = held is None or (newer and data.draw(st.booleans(), "begin"))
        assert begin or held is not None
        position = 0 if begin or held is None else held.position
        self.open(session, epoch, position, self.env.recipe, self.env.ingredients)

    @rule(data=st.data())
    def open_somehow(self, data: st.DataObject) -> None:
        session = self.pick(data)
        epoch, position = self.epoch_near(data, session), self.position_near(data, session)
        self.open(session, epoch, position, self.env.recipe, None)

    @precondition(lambda self: self.table.live)
    @rule(data=st.data(), told=st.booleans())
    def open_with_another_recipe(self, data: st.DataObject, told: bool) -> None:
        session = self.pick(data)
        epoch, position = self.epoch_near(data, session), self.position_near(data, session)
        lines = self.env.ingredients.splitlines(keepends=True)
        place = data.draw(st.integers(1, len(lines) - 1), "ingredient")
        name = lines[place].split(" ", 1)[0]
        lines[place] = f"{name} another\n"
        recipe = data.draw(st.binary(min_size=32, max_size=32), "recipe")
        answer = self.table.open(session, epoch, position, same_recipe=False)
        worker = self.env.worker
        error = attempt(lambda: worker.open_session(session, epoch, position, recipe, "".join(lines) if told else None))
        assert isinstance(error, SessionRefused)
        assert (str(error.outcome.value), error.epoch, error.position) == (
            answer.outcome,
            answer.epoch,
            answer.position,
        )
        if answer.outcome != STALE_EPOCH:
            assert (error.ingredient or None) == (name if told else None)
        self.compare_tables()

    @rule(data=st.data(), sessions=st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=3, unique=True))
    def talk(self, data: st.DataObject, sessions: list[bytes]) -> None:
        """Tokens of some sessions; those that are not there are opened, as long as there is room."""
        for session in sessions:
            if session not in self.table.live and self.table.free_slots():
                gone = self.table.gone.get(session)
                epoch = self.known(session) + (gone is not None and gone.state == "released")
                self.open(session, epoch, 0, self.env.recipe, None)
        live = [session for session in sessions if session in self.table.live]
        if live:
            talk = self.draw_talk(data, live)
            self.run(talk, talk.bundle(self.env.model))

    @precondition(lambda self: self.table.live)
    @rule(data=st.data(), batches=st.integers(2, 4))
    def talk_long(self, data: st.DataObject, batches: int) -> None:
        """Windows move on, and cells run out, behind some hundred positions."""
        session = data.draw(st.sampled_from(sorted(self.table.live)), "session")
        for _ in range(batches):
            talk = self.draw_talk(data, [session], long=True)
            self.run(talk, talk.bundle(self.env.model))

    @precondition(lambda self: self.table.live)
    @rule(data=st.data())
    def say_it_otherwise(self, data: st.DataObject) -> None:
        """Some positions go, and others take their place."""
        session = data.draw(st.sampled_from(sorted(self.table.live)), "session")
        held = self.table.live[session]
        if self.cut(session, held.epoch, data.draw(st.integers(0, held.position), "position")):
            talk = self.draw_talk(data, [session])
            self.run(talk, talk.bundle(self.env.model))

    @precondition(lambda self: self.table.live)
    @rule(data=st.data())
    def talk_wrongly(self, data: st.DataObject) -> None:
        """A batch of live sessions, and one row that need not fit."""
        session = self.pick(data)
        others = [other for other in self.table.live if other != session]
        chosen = data.draw(st.lists(st.sampled_from(others), max_size=2, unique=True), "others") if others else []
        good = self.draw_talk(data, chosen) if chosen else Talk([], [], [])
        row = Row(session, self.epoch_near(data, session), self.position_near(data, session), [5, 6])
        talk = Talk([*good.rows, row], [*good.order, *[len(good.rows)] * 2], [*good.outputs, False, True])
        if len(talk.order) <= self.env.kind.settings.batch:
            self.run(talk, talk.bundle(self.env.model))

    @precondition(lambda self: self.table.live)
    @rule(data=st.data(), same=st.booleans())
    def talk_with_a_recipe(self, data: st.DataObject, same: bool) -> None:
        talk = self.draw_talk(data, [data.draw(st.sampled_from(sorted(self.table.live)), "session")])
        recipe = self.env.recipe if same else bytes(32)
        self.run(talk, talk.bundle(self.env.model, recipe), same_recipe=same)

    @precondition(lambda self: self.table.live)
    @rule(data=st.data(), file=st.sampled_from(FILES))
    def save(self, data: st.DataObject, file: str) -> None:
        session = self.pick(data)
        epoch = self.epoch_near(data, session)
        answer = self.table.save(session, epoch)
        if answer.outcome == HIT:
            script = self.scripts.get(session)
            copy = None if script is None else list(script)
            self.saved[file] = Saved(session, list(self.table.live[session].tokens), copy)
        self.expect(answer, lambda: self.env.worker.save_session(session, epoch, file))

    @precondition(lambda self: self.saved and not self.env.kind.settings.kv_unified)
    @rule(data=st.data(), make_way=st.booleans())
    def restore(self, data: st.DataObject, make_way: bool) -> None:
        """What was saved, under whatever epoch; often the session is released before."""
        file = data.draw(st.sampled_from(sorted(self.saved)), "file")
        saved = self.saved[file]
        session, env = saved.session, self.env
        lengths = [0]
        for part in saved.script or []:
            lengths.append(part if isinstance(part, int) else lengths[-1] + len(part))
        if saved.script is None or (env.kind.truncation == "window" and max(lengths) > 256):
            return
        if make_way and session in self.table.live:
            released = self.table.release(session, self.known(session))
            self.expect(released, lambda: env.worker.release_session(session, self.known(session)))
        epoch = self.known(session) + 1 if make_way else self.epoch_near(data, session)
        answer = self.table.restore(session, epoch, saved.tokens)
        self.expect(answer, lambda: env.worker.restore_session(session, epoch, env.recipe, None, file))
        if answer.outcome == HIT:
            self.scripts[session] = list(saved.script)
            self.last.pop(session, None)
            self.rebuild(session, saved.script)

    def rebuild(self, session: bytes, script: Script) -> None:
        """The same state in the reference, step by step."""
        position = 0
        for part in script:
            if isinstance(part, int):
                self.env.reference.follow(Answer(HIT, cuts=((self.table.live[session].slot, part),)))
                position = part
            else:
                talk = Talk([Row(session, 0, position, part)], [0] * len(part), [False] * len(part))
                self.env.reference.decode(self.table, talk)
                position += len(part)

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), cut=st.booleans())
    def restore_what_is_damaged(self, data: st.DataObject, cut: bool) -> None:
        file = data.draw(st.sampled_from(sorted(self.saved)), "file")
        whole = (self.env.states / file).read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1), "place")
        damaged = whole[:place] if cut else whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        (self.env.states / "damaged").write_bytes(damaged)
        session = self.saved[file].session
        with pytest.raises(WorkerError) as caught:
            self.env.worker.restore_session(session, self.known(session) + 1, self.env.recipe, None, "damaged")
        assert (caught.value.code, caught.value.name) == (5, "bundle")
        self.compare_tables()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """The same bytes once more: answered from memory if the sessions stand where the batch left them."""
        sent = self.sent[data.draw(st.integers(0, len(self.sent) - 1), "sent")]
        if self.stands(sent):
            self.again(sent)
        else:
            self.run(sent.talk, sent.data)

    @precondition(lambda self: self.table.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.cut(session, self.epoch_near(data, session), self.position_near(data, session))

    def cut(self, session: bytes, epoch: int, position: int) -> bool:
        reply = attempt(lambda: self.env.worker.truncate_session(session, epoch, position))
        outcome = reply.outcome.value if isinstance(reply, SessionRefused) else HIT
        answer = self.table.truncate(session, epoch, position, observed=outcome)
        if answer.outcome == HIT and session in self.scripts:
            self.scripts[session].append(position)
        self.expect(answer, lambda: reply)
        return answer.outcome == HIT

    @precondition(lambda self: self.table.live or self.table.gone)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session = self.pick(data)
        epoch = self.epoch_near(data, session)
        answer = self.table.release(session, epoch)
        self.expect(answer, lambda: self.env.worker.release_session(session, epoch))

    @precondition(lambda self: self.table.live)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        session = self.pick(data)
        epoch = self.epoch_near(data, session)
        answer = self.table.pin(session, epoch, pinned)
        self.expect(answer, lambda: self.env.worker.pin_session(session, epoch, pinned))

    @precondition(lambda self: self.table.live)
    @rule(data=st.data(), named=st.booleans())
    def evict(self, data: st.DataObject, named: bool) -> None:
        session = self.pick(data) if named else None
        answer = self.table.evict(session)

        def call() -> dict[str, Any]:
            gone, epoch = self.env.worker.evict_session(session)
            return {"session": gone.hex(), "epoch": epoch}

        self.expect(answer, call)

    @precondition(lambda self: self.table.live)
    @rule()
    def ask_without_a_session(self) -> None:
        """Local sequences are nobody's to name once there are sessions."""
        model = self.env.model
        talk = Talk([Row(SESSIONS[0], 1, 0, [5])], [0], [True])
        plain = talk.batch([0]).bundle(model)
        for type, text, data in ((Type.DECODE, {}, encode(plain)), (Type.CLEAR, {"sequence": 0, "from": 0}, b"")):
            with pytest.raises(WorkerError) as caught:
                self.env.worker.request(type, text, data).result()
            assert (caught.value.code, caught.value.name) == (11, "state")
        self.compare_tables()

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 5), "one in six") == 0:
            self.env.worker.clear()
            self.env.reference.clear()
            self.table.clear()
            self.last.clear()
            self.scripts.clear()
            self.compare_tables()


def test_hot_state(env: Env) -> None:
    run_state_machine_as_test(partial(HotState, env), settings=profile(30))


# -- what a machine would seldom draw


def opened(env: Env, session: bytes, epoch: int = 1) -> None:
    env.worker.open_session(session, epoch, 0, env.recipe)


def decoded(env: Env, session: bytes, position: int, tokens: list[int]) -> Logits:
    """The logits of all tokens."""
    talk = Talk([Row(session, 1, position, tokens)], [0] * len(tokens), [True] * len(tokens))
    reply = env.worker.request(Type.DECODE, {"logits": True, "sample": False}, talk.bundle(env.model)).result()
    return logits_of(reply.bundle)


@pytest.mark.parametrize("env", ["window"], indirect=True)
def test_a_window_is_cut_back_only_as_far_as_it_is_there(env: Env) -> None:
    """Upstream's seq_rm cuts at any position, and then the window behind it lacks tokens. No bits are promised here,
    since the cells lie elsewhere, but what was computed from another window differs in the first digits."""
    env.clear()
    tokens = np.random.default_rng(1).integers(3, env.kind.n_vocab, 420).tolist()
    outcomes = []
    for position in (419, 400, 300, 220, 200, 190, 180, 170, 165, 160, 150, 100, 20, 1):
        env.worker.clear()
        for session in SESSIONS[:2]:
            opened(env, session)
        for start in range(0, 420, 60):
            decoded(env, SESSIONS[0], start, tokens[start : start + 60])
        answer = attempt(partial(env.worker.truncate_session, SESSIONS[0], 1, position))
        outcomes.append(not isinstance(answer, SessionRefused))
        if isinstance(answer, SessionRefused):
            assert answer.outcome == CANNOT_TRUNCATE
            continue
        for start in range(0, position, 60):
            decoded(env, SESSIONS[1], start, tokens[start : min(start + 60, position)])
        more = tokens[position : position + 20]
        found, expected = (decoded(env, session, position, more) for session in SESSIONS[:2])
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    # From one position down none is possible.
    assert outcomes == sorted(outcomes, reverse=True)
    assert any(outcomes)
    assert not all(outcomes)


@pytest.mark.parametrize("env", ["plain", "window", "hybrid"], indirect=True)
def test_a_batch_without_room_leaves_no_trace(env: Env) -> None:
    """Upstream's search for room ends with the head of another stream's cells: what comes next lay elsewhere then."""
    machine = HotState(env)
    cells = machine.table.cells
    random = np.random.default_rng(3)

    def say(session: bytes, upto: int) -> None:
        """In batches, up to a position."""
        while (held := machine.table.live[session]).position < upto:
            count = min(upto - held.position, env.kind.settings.batch)
            tokens = random.integers(3, env.kind.n_vocab, count).tolist()
            talk = Talk([Row(session, held.epoch, held.position, tokens)], [0] * count, [True] * count)
            machine.run(talk, talk.bundle(env.model))
            if upto > cells:
                return

    for session in SESSIONS[:2]:
        machine.open(session, 1, 0, env.recipe, None)
    say(SESSIONS[0], cells - 30)
    say(SESSIONS[1], cells - 56)
    say(SESSIONS[1], cells + 1)
    assert machine.table.live[SESSIONS[1]].position == cells - 56
    say(SESSIONS[1], cells)


@pytest.mark.parametrize("env", ["plain"], indirect=True)
def test_what_is_forgotten_is_bounded(env: Env) -> None:
    """More ids than are remembered: the first ones may come again under an old epoch, the last ones may not."""
    env.clear()
    ids = [number.to_bytes(16, "little") for number in range(MAX_FORGOTTEN + 100)]
    for session in ids:
        opened(env, session)
        env.worker.release_session(session, 1)
    table = env.worker.sessions()
    assert (table.live, table.forgotten) == (0, MAX_FORGOTTEN)
    opened(env, ids[99])
    with pytest.raises(SessionRefused) as caught:
        opened(env, ids[100])
    assert caught.value.outcome == STALE_EPOCH
    env.clear()


def test_a_connection_that_goes_away_frees_what_it_alone_held(
    patched_build: NativeBuild, session_models: dict[str, Path]
) -> None:
    kind = KINDS["plain"]
    kind = replace(kind, settings=replace(kind.settings, ctx=2048, seqs=8))
    layers = (0, kind.n_layer)
    options = ("--session-grace", "1")
    listening = Listening(patched_build.worker, session_models["plain"], layers, kind.settings, *options)
    alone, shared, own, kept, last = SESSIONS[:5]
    try:
        watcher, first, second, third = (listening.connect() for _ in range(4))
        description = watcher.describe()
        assert description.recipe is not None
        recipe = description.recipe.fingerprint

        def states() -> dict[bytes, str]:
            return {info.id: info.state for info in watcher.sessions(forgotten=True).sessions}

        for connection, sessions in ((first, [alone, shared, kept]), (watcher, [shared, own]), (second, [last])):
            for session in sessions:
                connection.open_session(session, 1, 0, recipe)
        talk = Talk([Row(alone, 1, 0, [5, 6])], [0, 0], [True, True])
        first.request(Type.DECODE, {}, talk.bundle(description)).result()
        first.close()
        # In time: another connection goes on with it.
        third.open_session(kept, 1, 0, recipe)
        second.close()
        end = time.monotonic() + 30
        while states()[last] == "live":
            assert time.monotonic() < end
            time.sleep(0.01)
        # What the first connection left has had its time too.
        assert states() == {alone: "released", shared: "live", own: "live", kept: "live", last: "released"}
        with pytest.raises(SessionRefused) as caught:
            watcher.open_session(alone, 1, 0, recipe)
        assert caught.value.outcome == STALE_EPOCH
        watcher.open_session(alone, 2, 0, recipe)
        for connection in (watcher, third):
            connection.close()
    finally:
        listening.close()
