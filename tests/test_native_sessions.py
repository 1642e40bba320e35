"""Sessions of the shard worker, by its protocol (spec/worker-protocol.md, Sessions), with a client of a few lines.

Catches a refusal that changes the table or the state, an answer that is computed twice or given to another request, a
session that outlives its connections or dies with one of several, a saved state that is not the state, and a file or a
file name that gets further than it may. The workers are real processes with a tiny model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_native_shard_protocol import (
    CLEAR,
    DECODE,
    ERROR,
    EVICT,
    HELLO,
    OPEN,
    PIN,
    RELEASE,
    REPLY,
    RESTORE,
    SAVE,
    SESSIONS,
    STATISTICS,
    TRUNCATE,
    Answer,
    Peer,
    Process,
    until,
)

from boundary_bundle import Bundle, BundleError, Tensor, decode, encode
from boundary_bundle.families.models import Variant, make_model
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import tiny_models

pytestmark = pytest.mark.shards

SLOTS = 3
CELLS = 256  # of each sequence
OPTIONS = ("--ctx", str(SLOTS * CELLS), "--batch", "64", "--ubatch", "16", "--seqs", str(SLOTS))
FOREVER = ("--session-grace", "86400")

ARGUMENT, BUNDLE, CONTRACT, LIMIT, FULL, STATE, SESSION, PROTOCOL = 1, 5, 6, 8, 9, 11, 12, 20

PROMPT = [5, 17, 101, 3, 120, 9, 44]
NEXT = [8, 91]


def sid(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


A, B, C, D, E = map(sid, range(5))

#: One row of a batch's session table, and its tokens: id, epoch, first position, tokens.
Row = tuple[bytes, int, int, Sequence[int]]


def batch(process: Process, *rows: Row, order: Sequence[int] | None = None, **more: Any) -> bytes:
    """A token bundle under sessions. ``order`` names the row of each token; without it, one row after the other. All
    tokens are outputs. ``more`` replaces tensors and attributes; ``number`` is the bundle's."""
    order = [row for row, (*_, tokens) in enumerate(rows) for _ in tokens] if order is None else order
    done = [0] * len(rows)
    tokens, positions = [], []
    for row in order:
        tokens.append(rows[row][3][done[row]])
        positions.append(rows[row][2] + done[row])
        done[row] += 1
    n = len(tokens)
    ids = np.frombuffer(b"".join(row[0] for row in rows), np.uint8).reshape(len(rows), 16)
    tensors: dict[str, Tensor | None] = {
        "token_ids": Tensor("token_ids", np.array(tokens, np.int32), token_axis=0),
        "positions": Tensor("positions", np.array(positions, np.int32), token_axis=0),
        "seq_offsets": Tensor("seq_offsets", np.arange(n + 1, dtype=np.uint32)),
        "seq_ids": Tensor("seq_ids", np.array(order, np.uint32)),
        "session_ids": Tensor("session_ids", ids),
        "session_epochs": Tensor("session_epochs", np.array([row[1] for row in rows], np.uint64)),
        "session_positions": Tensor("session_positions", np.array([row[2] for row in rows], np.int64)),
        "outputs": Tensor("outputs", np.ones(n, bool), token_axis=0),
    }
    attributes: dict[str, Any] = {
        "architecture": process.facts["architecture"],
        "layer_start": 0,
        "layer_end": 0,
        "n_layer": process.facts["n_layer"],
        "n_tokens": n,
        "n_seqs": len(rows),
        "model_fingerprint": bytes.fromhex(process.facts["fingerprint"]),
    }
    number = more.pop("number", 0)
    for key, value in more.items():
        (tensors if key in tensors else attributes)[key] = value
    kept = [tensor for tensor in tensors.values() if tensor is not None]
    return encode(Bundle(kept, attributes, number=number))


class Table:
    """The sessions of one worker as one connection uses them."""

    def __init__(self, process: Process, peer: Peer | None = None) -> None:
        self.process = process
        self.peer = peer or process.peer
        self.recipe = process.facts["recipe"]["shared"]

    def ask(self, type: int, session: bytes | None, epoch: int | None = None, **more: Any) -> Answer:
        text: dict[str, Any] = {} if session is None else {"session": session.hex()}
        text |= {} if epoch is None else {"epoch": epoch}
        if type in (OPEN, RESTORE):
            text["recipe"] = self.recipe["fingerprint"]
        return self.peer.ask(type, text | more)

    def open(self, session: bytes, epoch: int = 1, position: int = 0) -> None:
        hit(self.ask(OPEN, session, epoch, position=position), position=position)

    def decode(self, *rows: Row, **more: Any) -> Answer:
        return self.peer.ask(DECODE, {"logits": True}, batch(self.process, *rows, **more))

    def logits(self, *rows: Row, **more: Any) -> bytes:
        answer = self.decode(*rows, **more)
        assert answer.code is None, answer.text
        return decode(answer.bundle)["logits"].tobytes()

    def list(self, forgotten: bool = True) -> dict[str, Any]:
        return self.peer.expect(SESSIONS, {"forgotten": forgotten}).text

    def live(self) -> dict[str, int]:
        """Positions of the live sessions, by id."""
        return {entry["session"]: entry["position"] for entry in self.list(False)["sessions"]}

    def answers_again(self) -> int:
        return int(self.peer.expect(STATISTICS).text["answers_again"])


def hit(answer: Answer, **expected: Any) -> dict[str, Any]:
    assert answer.type != ERROR | REPLY, answer.text
    assert answer.text["outcome"] == "hit"
    assert {key: answer.text[key] for key in expected} == expected
    return answer.text


def refused(answer: Answer, outcome: str, session: bytes | None, epoch: int, position: int | None) -> dict[str, Any]:
    assert (answer.code, answer.text["name"]) == (SESSION, "session"), answer.text
    found = {key: answer.text[key] for key in ("outcome", "session", "epoch", "position")}
    name = None if session is None else session.hex()
    assert found == {"outcome": outcome, "session": name, "epoch": epoch, "position": position}
    assert answer.text["message"]
    return answer.text


@contextlib.contextmanager
def running(program: Path, model: Path, *options: str, path: Path | None = None) -> Iterator[Process]:
    process = Process(program, model, *OPTIONS, *options, path=path)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def listening(
    patched_build: NativeBuild, tiny: dict[str, Path], states: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """All layers, on a socket; sessions of connections that are gone stay."""
    path = tmp_path_factory.mktemp("sessions") / "s"
    with running(patched_build.worker, tiny["tied"], *FOREVER, "--state-dir", str(states), path=path) as process:
        yield process


@pytest.fixture
def table(listening: Process, states: Path) -> Table:
    """No sessions and no files."""
    listening.peer.expect(CLEAR)
    for file in states.iterdir():
        file.unlink()
    return Table(listening)


@pytest.fixture(scope="module")
def plain(patched_build: NativeBuild, tiny: dict[str, Path]) -> Iterator[Process]:
    """The same without sessions: what the logits are compared with."""
    with running(patched_build.worker, tiny["tied"]) as process:
        yield process


#
# versions and builds
#


def test_sessions_need_the_minor_that_brought_them(listening: Process, table: Table) -> None:
    """Catches a worker that answers an older driver in terms that it does not know."""
    peer = listening.connect(minors=(0,))
    old = Table(listening, peer)
    for type in range(OPEN, RESTORE + 1):
        answer = old.ask(type, A, 1, position=0)
        assert answer.code == PROTOCOL
        assert "1.1" in answer.text["message"]
    table.open(A)
    assert old.decode((A, 1, 0, PROMPT)).code == PROTOCOL
    assert table.live() == {A.hex(): 0}
    peer.expect(HELLO, {"major": 1, "minors": [1]})
    old.logits((A, 1, 0, PROMPT))
    peer.close()


def test_the_unpatched_worker_has_no_sessions(unpatched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Catches an oracle that crashes or pretends."""
    with running(unpatched_build.worker, tiny["tied"]) as process:
        assert "recipe" not in process.facts
        for type in range(OPEN, RESTORE + 1):
            answer = process.peer.ask(type, {"session": A.hex(), "epoch": 1, "position": 0})
            assert answer.code == PROTOCOL
            assert "patched" in answer.text["message"]
        process.facts["fingerprint"] = bytes(32).hex()
        bundle = batch(process, (A, 1, 0, PROMPT))
        assert process.peer.ask(DECODE, None, bundle).code == CONTRACT
        process.logits(PROMPT, 0)


def test_the_recipe_is_shown(patched_build: NativeBuild, tiny: dict[str, Path], listening: Process) -> None:
    """Catches a fingerprint of anything else than the text, and a range that is part of what shards must share."""
    whole = listening.facts["recipe"]
    for part in whole.values():
        assert hashlib.sha256(part["text"].encode()).hexdigest() == part["fingerprint"]
        assert all(len(line.split(" ")) >= 2 for line in part["text"].splitlines())
    assert f"n_ctx {SLOTS * CELLS}" in whole["shared"]["text"].splitlines()
    with running(patched_build.worker, tiny["tied"], "--range", "2:4") as shard:
        assert shard.facts["recipe"]["shared"] == whole["shared"]
        assert shard.facts["recipe"]["range"] != whole["range"]
    with running(patched_build.worker, tiny["tied"], "--type-k", "f32") as other:
        assert other.facts["recipe"]["range"] == whole["range"]
        differing = set(other.facts["recipe"]["shared"]["text"].splitlines()) - set(
            whole["shared"]["text"].splitlines()
        )
        assert differing == {"type_k f32"}


#
# what is done
#


def test_a_session_from_its_opening_to_its_release(table: Table) -> None:
    """Catches a reply that leaves something out or adds what the driver must not know."""
    name = A.hex()
    here = {"outcome": "hit", "session": name, "epoch": 7}
    assert table.ask(OPEN, A, 7, position=0).text == here | {"position": 0, "created": True}
    assert table.ask(OPEN, A, 7, position=0).text == here | {"position": 0, "created": False}
    answer = table.decode((A, 7, 0, PROMPT))
    assert len(answer.text["sampled"]) == answer.text["n_tokens"] == len(PROMPT)
    assert table.ask(OPEN, A, 7, position=7).text == here | {"position": 7, "created": False}
    assert table.ask(TRUNCATE, A, 7, position=4).text == here | {"position": 4}
    assert table.ask(TRUNCATE, A, 7, position=4).text == here | {"position": 4}
    assert table.ask(PIN, A, 7, pinned=True).text == here | {"position": 4}
    assert table.ask(PIN, A, 7, pinned=False).text == here | {"position": 4}
    assert table.ask(RELEASE, A, 7).text == here
    assert table.ask(RELEASE, A, 7).text == here  # a release that comes once more
    table.open(A, 8)
    assert table.ask(EVICT, A).text == here | {"epoch": 8}
    table.open(A, 8)
    table.open(B)
    assert table.ask(EVICT, None).text == here | {"epoch": 8}
    assert table.live() == {B.hex(): 0}


def test_a_newer_epoch_takes_over(table: Table) -> None:
    """Catches an epoch that is not raised, and a session that begins anew although it goes on, or the other way."""
    table.open(A)
    table.logits((A, 1, 0, PROMPT))
    hit(table.ask(OPEN, A, 2, position=len(PROMPT)), created=False, epoch=2, position=len(PROMPT))
    refused(table.decode((A, 1, len(PROMPT), NEXT)), "stale_epoch", A, 2, len(PROMPT))
    after = table.logits((A, 2, len(PROMPT), NEXT))
    hit(table.ask(OPEN, A, 2**64 - 1, position=0), created=True, epoch=2**64 - 1, position=0)
    table.logits((A, 2**64 - 1, 0, PROMPT))
    assert table.logits((A, 2**64 - 1, len(PROMPT), NEXT)) == after


def test_logits_are_those_without_sessions(table: Table, plain: Process) -> None:
    """Catches a session that lies in another's sequence, and rows that go to the wrong session, by all bits."""
    plain.peer.expect(CLEAR)

    def expected(tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]) -> bytes:
        n = len(tokens)
        bundle = plain.batch(
            list(tokens),
            0,
            select="all",
            attributes={"n_seqs": len(set(sequences))},
            positions=Tensor("positions", np.array(positions, np.int32), token_axis=0),
            seq_ids=Tensor("seq_ids", np.array(sequences, np.uint32)),
        )
        assert n == len(sequences) == len(positions)
        return decode(plain.peer.expect(DECODE, {"logits": True}, encode(bundle)).bundle)["logits"].tobytes()

    table.open(A)
    table.open(B)
    assert table.logits((A, 1, 0, PROMPT)) == expected(PROMPT, [0] * 7, range(7))
    # two sessions, tokens interleaved, the rows of the table in another order than the sessions were opened
    order = [0, 1, 1, 0, 0]
    tokens = [30, 8, 91, 31, 32]
    found = table.logits((B, 1, 0, [30, 31, 32]), (A, 1, 7, NEXT), order=order)
    assert found == expected(tokens, [1, 0, 0, 1, 1], [0, 7, 8, 1, 2])
    hit(table.ask(TRUNCATE, A, 1, position=3), position=3)
    plain.peer.expect(CLEAR, {"sequence": 0, "from": 3})
    assert table.logits((A, 1, 3, NEXT)) == expected(NEXT, [0, 0], [3, 4])


def test_shards_hand_the_session_table_on(patched_build: NativeBuild, tiny: dict[str, Path], table: Table) -> None:
    """Catches a table that is dropped or changed between the ranges, and a limit that leaves it out."""
    table.open(A)
    table.open(B)
    rows: tuple[Row, ...] = ((A, 1, 0, PROMPT), (B, 1, 0, NEXT))
    expected = table.logits(*rows)
    names = ("session_ids", "session_epochs", "session_positions")
    with (
        running(patched_build.worker, tiny["tied"], "--range", "0:3") as first,
        running(patched_build.worker, tiny["tied"], "--range", "3:-1") as last,
    ):
        data = batch(first, *rows)
        sent = decode(data)
        for shard in (first, last):
            for session in (A, B):
                Table(shard).open(session)
            data = shard.peer.expect(DECODE, {"logits": True}, data).bundle
            if shard is first:
                passed = decode(data)
                assert passed.names[-5:] == ["seq_ids", *names, "outputs"]
                for name in names:
                    assert passed[name].tobytes() == sent[name].tobytes()
        assert decode(data)["logits"].tobytes() == expected
    limit = ("--range", "0:3", "--max-bundle", "9700")
    with running(patched_build.worker, tiny["tied"], *limit) as small:
        raw = small.batch([*PROMPT, *NEXT], 0)
        assert len(small.peer.expect(DECODE, None, encode(raw)).bundle) < 9700
        small.peer.expect(CLEAR)
        for session in (A, B):
            Table(small).open(session)
        assert small.peer.ask(DECODE, None, batch(small, *rows)).code == LIMIT
        assert Table(small).live() == {A.hex(): 0, B.hex(): 0}


def test_the_list_of_sessions(table: Table) -> None:
    """Catches an order that is not that of use, forgotten sessions among the live, and counters that stand still."""
    before = table.list()
    for session in (A, B, C):
        table.open(session)
    table.logits((B, 1, 0, PROMPT))
    hit(table.ask(PIN, A, 1, pinned=True))
    table.ask(EVICT, C)
    table.open(D, 3)
    hit(table.ask(RELEASE, D, 4))
    listed = table.list()
    keys = ("session", "epoch", "position", "pinned", "state")
    assert [tuple(entry[key] for key in keys) for entry in listed["sessions"]] == [
        (A.hex(), 1, 0, True, "live"),
        (B.hex(), 1, len(PROMPT), False, "live"),
        (D.hex(), 4, None, False, "released"),
        (C.hex(), 1, None, False, "evicted"),
    ]
    # keys and values of 7 layers, 4 heads of 32, f16
    assert [entry["kv_bytes"] for entry in listed["sessions"]] == [0, len(PROMPT) * 7 * 2 * 4 * 32 * 2, 0, 0]
    assert [entry["used"] for entry in listed["sessions"][:2]] == sorted(
        (entry["used"] for entry in listed["sessions"][:2]), reverse=True
    )
    facts = {key: listed[key] for key in ("live", "forgotten", "slots", "positions")}
    assert facts == {"live": 2, "forgotten": 2, "slots": SLOTS, "positions": CELLS}
    grown = {key: listed[key] - before[key] for key in ("tokens", "created", "evicted", "released", "calls")}
    assert grown == {"tokens": len(PROMPT), "created": 4, "evicted": 1, "released": 1, "calls": 8}
    assert listed["outcomes"]["hit"] - before["outcomes"]["hit"] == 8
    assert len(listed["outcomes"]) == 9
    shorter = table.list(False)
    assert [entry["session"] for entry in shorter["sessions"]] == [A.hex(), B.hex()]
    assert shorter["forgotten"] == 2


def test_a_list_has_room_for_all_that_is_remembered(table: Table) -> None:
    """Catches a text over its limit, and a table that remembers without end."""
    for number in range(4200):
        session = sid(1000 + number)
        table.peer.send(OPEN, {"session": session.hex(), "epoch": 2**64 - 2, "position": 0} | recipe_of(table))
        table.peer.send(RELEASE, {"session": session.hex(), "epoch": 2**64 - 1})
        if number % 20 == 19:
            for _ in range(40):
                assert table.peer.receive().code is None
    listed = table.list()
    assert len(listed["sessions"]) == 4000
    assert (listed["live"], listed["forgotten"]) == (0, 4096)
    assert listed["sessions"][0]["session"] == sid(1000 + 4199).hex()


def recipe_of(table: Table) -> dict[str, str]:
    return {"recipe": table.recipe["fingerprint"]}


#
# what is refused
#


def prepare(table: Table) -> None:
    """A is live with 7 positions under epoch 5, B was evicted under 5, C was released under 5."""
    table.open(A, 5)
    table.logits((A, 5, 0, PROMPT))
    for session in (B, C):
        table.open(session, 5)
        table.logits((session, 5, 0, NEXT))
    hit(table.ask(EVICT, B))
    hit(table.ask(RELEASE, C, 5))


HERE = len(PROMPT)

#: What is asked of the prepared table; the outcome, and what the worker says it holds.
REFUSED: dict[str, tuple[Callable[[Table], Answer], str, bytes | None, int, int | None]] = {
    "open: unknown": (lambda t: t.ask(OPEN, D, 1, position=3), "miss", D, 0, None),
    "open: released, with positions": (lambda t: t.ask(OPEN, C, 6, position=2), "miss", C, 5, None),
    "open: evicted": (lambda t: t.ask(OPEN, B, 5, position=2), "evicted", B, 5, None),
    "open: older epoch": (lambda t: t.ask(OPEN, A, 4, position=HERE), "stale_epoch", A, 5, HERE),
    "open: older epoch from the start": (lambda t: t.ask(OPEN, A, 4, position=0), "stale_epoch", A, 5, HERE),
    "open: older epoch of an evicted one": (lambda t: t.ask(OPEN, B, 4, position=0), "stale_epoch", B, 5, None),
    "open: released under this epoch": (lambda t: t.ask(OPEN, C, 5, position=0), "stale_epoch", C, 5, None),
    "open: more positions": (lambda t: t.ask(OPEN, A, 5, position=HERE + 1), "position_mismatch", A, 5, HERE),
    "open: fewer positions": (lambda t: t.ask(OPEN, A, 5, position=HERE - 1), "position_mismatch", A, 5, HERE),
    "open: none of its positions": (lambda t: t.ask(OPEN, A, 5, position=0), "position_mismatch", A, 5, HERE),
    "open: newer epoch, other positions": (lambda t: t.ask(OPEN, A, 6, position=3), "position_mismatch", A, 5, HERE),
    "open: most positions": (lambda t: t.ask(OPEN, A, 5, position=2**63 - 1), "position_mismatch", A, 5, HERE),
    "open: other recipe": (
        lambda t: t.ask(OPEN, A, 5, position=HERE, recipe="00" * 32),
        "incompatible_recipe",
        A,
        5,
        HERE,
    ),
    "open: other recipe, unknown": (
        lambda t: t.ask(OPEN, D, 1, position=0, recipe="00" * 32),
        "incompatible_recipe",
        D,
        0,
        None,
    ),
    "truncate: unknown": (lambda t: t.ask(TRUNCATE, D, 1, position=0), "miss", D, 0, None),
    "truncate: never opened": (lambda t: t.ask(TRUNCATE, A, 6, position=0), "miss", A, 5, HERE),
    "truncate: evicted": (lambda t: t.ask(TRUNCATE, B, 5, position=0), "evicted", B, 5, None),
    "truncate: older epoch": (lambda t: t.ask(TRUNCATE, A, 4, position=0), "stale_epoch", A, 5, HERE),
    "truncate: released": (lambda t: t.ask(TRUNCATE, C, 5, position=0), "stale_epoch", C, 5, None),
    "truncate: more positions": (lambda t: t.ask(TRUNCATE, A, 5, position=HERE + 1), "position_mismatch", A, 5, HERE),
    "release: unknown": (lambda t: t.ask(RELEASE, D, 1), "miss", D, 0, None),
    "release: older epoch": (lambda t: t.ask(RELEASE, A, 4), "stale_epoch", A, 5, HERE),
    "pin: unknown": (lambda t: t.ask(PIN, D, 1, pinned=True), "miss", D, 0, None),
    "pin: never opened": (lambda t: t.ask(PIN, A, 6, pinned=True), "miss", A, 5, HERE),
    "pin: evicted": (lambda t: t.ask(PIN, B, 5, pinned=True), "evicted", B, 5, None),
    "pin: older epoch": (lambda t: t.ask(PIN, A, 4, pinned=True), "stale_epoch", A, 5, HERE),
    "evict: unknown": (lambda t: t.ask(EVICT, D), "miss", D, 0, None),
    "evict: evicted": (lambda t: t.ask(EVICT, B), "evicted", B, 5, None),
    "evict: released": (lambda t: t.ask(EVICT, C), "miss", C, 5, None),
    "save: unknown": (lambda t: t.ask(SAVE, D, 1, file="x"), "miss", D, 0, None),
    "save: never opened": (lambda t: t.ask(SAVE, A, 6, file="x"), "miss", A, 5, HERE),
    "save: evicted": (lambda t: t.ask(SAVE, B, 5, file="x"), "evicted", B, 5, None),
    "save: older epoch": (lambda t: t.ask(SAVE, A, 4, file="x"), "stale_epoch", A, 5, HERE),
    "decode: unknown": (lambda t: t.decode((D, 1, 0, NEXT)), "miss", D, 0, None),
    "decode: never opened": (lambda t: t.decode((A, 6, HERE, NEXT)), "miss", A, 5, HERE),
    "decode: evicted": (lambda t: t.decode((B, 5, 2, NEXT)), "evicted", B, 5, None),
    "decode: released": (lambda t: t.decode((C, 5, 2, NEXT)), "stale_epoch", C, 5, None),
    "decode: older epoch": (lambda t: t.decode((A, 4, HERE, NEXT)), "stale_epoch", A, 5, HERE),
    "decode: from the start": (lambda t: t.decode((A, 5, 0, NEXT)), "position_mismatch", A, 5, HERE),
    "decode: further on": (lambda t: t.decode((A, 5, HERE + 1, NEXT)), "position_mismatch", A, 5, HERE),
    "decode: one of two": (lambda t: t.decode((A, 5, HERE, NEXT), (B, 5, 2, NEXT)), "evicted", B, 5, None),
    "decode: other recipe": (
        lambda t: t.decode((A, 5, HERE, NEXT), recipe_fingerprint=bytes(32)),
        "incompatible_recipe",
        None,
        0,
        None,
    ),
}


def state_of(table: Table) -> dict[str, Any]:
    """All that a refusal must not change."""
    listed = table.list()
    return {key: value for key, value in listed.items() if key not in ("calls", "outcomes")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_is_held_and_changes_nothing(table: Table, states: Path, name: str) -> None:
    """Catches a wrong outcome, one that is not counted, and a refusal that moves the table, the order of use or the
    state: what comes next gives the bits that it gives without the refusal."""
    prepare(table)
    expected = table.logits((A, 5, HERE, NEXT))
    hit(table.ask(TRUNCATE, A, 5, position=HERE))
    before, counted = state_of(table), table.list()["outcomes"]
    ask, outcome, session, epoch, position = REFUSED[name]
    refused(ask(table), outcome, session, epoch, position)
    assert state_of(table) == before
    counts = table.list()["outcomes"]
    assert {key: counts[key] - counted[key] for key in counts if counts[key] != counted[key]} == {outcome: 1}
    assert table.logits((A, 5, HERE, NEXT)) == expected
    assert not list(states.iterdir())


def test_a_full_table_and_pinned_sessions(table: Table) -> None:
    """Catches a session that is given up unasked, or although it is pinned."""
    refused(table.ask(EVICT, None), "miss", None, 0, None)
    for session in (A, B, C):
        table.open(session)
    refused(table.ask(OPEN, D, 1, position=0), "full", D, 0, None)
    hit(table.ask(PIN, A, 1, pinned=True))
    refused(table.ask(EVICT, A), "busy", A, 1, 0)
    hit(table.ask(EVICT, None), session=B.hex())
    hit(table.ask(EVICT, None), session=C.hex())
    refused(table.ask(EVICT, None), "busy", None, 0, None)
    table.open(B)
    table.open(D)
    hit(table.ask(PIN, A, 1, pinned=False))
    hit(table.ask(EVICT, A))


def test_a_batch_that_finds_no_room(table: Table) -> None:
    """Catches a session that loses or keeps a part of what did not fit."""
    table.open(A)
    table.open(B)
    table.logits((B, 1, 0, PROMPT))
    for start in range(0, 192, 64):
        table.logits((A, 1, start, [9] * 64))
    table.logits((A, 1, 192, [9] * 60))
    before = state_of(table)
    answer = table.decode((A, 1, 252, [9] * 5), (B, 1, len(PROMPT), NEXT))
    assert (answer.code, answer.text["name"], answer.text["outcome"]) == (FULL, "full", "full")
    assert state_of(table) == before
    table.logits((A, 1, 252, [9] * 4))
    table.logits((B, 1, len(PROMPT), NEXT))


def test_a_memory_that_does_not_go_back(patched_build: NativeBuild, tmp_path: Path) -> None:
    """Catches a cut that is taken for done: a recurrent state cannot forget a part of what it has seen."""
    model = make_model(Variant("mamba", "dense"), tmp_path / "model.gguf")
    with running(patched_build.worker, model.path) as process:
        table = Table(process)
        table.open(A)
        table.logits((A, 1, 0, PROMPT))
        refused(table.ask(TRUNCATE, A, 1, position=3), "cannot_truncate", A, 1, len(PROMPT))
        hit(table.ask(TRUNCATE, A, 1, position=len(PROMPT)))
        first = table.logits((A, 1, len(PROMPT), NEXT))
        hit(table.ask(TRUNCATE, A, 1, position=0), position=0)
        table.logits((A, 1, 0, PROMPT))
        assert table.logits((A, 1, len(PROMPT), NEXT)) == first


def test_a_refusal_names_the_ingredient(table: Table) -> None:
    """Catches a driver that is told that something differs and not what."""
    text = table.recipe["text"].replace(f"n_ctx {SLOTS * CELLS}\n", "n_ctx 512\n")
    other = {"recipe": hashlib.sha256(text.encode()).hexdigest()}
    bare = refused(table.ask(OPEN, A, 1, position=0, **other), "incompatible_recipe", A, 0, None)
    assert "ingredient" not in bare
    named = table.ask(OPEN, A, 1, position=0, ingredients=text, **other)
    assert refused(named, "incompatible_recipe", A, 0, None)["ingredient"] == "n_ctx"
    assert "n_ctx" in named.text["message"]
    table.open(A)
    hit(table.ask(OPEN, A, 1, position=0, recipe=table.recipe["fingerprint"].upper(), ingredients=table.recipe["text"]))


def test_without_a_table_nothing_goes_while_sessions_are_open(table: Table) -> None:
    """Catches raw sequence numbers that reach into a session's sequence."""
    process, peer = table.process, table.peer
    table.open(A)
    table.logits((A, 1, 0, PROMPT))
    after = table.logits((A, 1, len(PROMPT), NEXT))
    hit(table.ask(TRUNCATE, A, 1, position=len(PROMPT)))
    for sequence in range(SLOTS):
        assert peer.ask(DECODE, None, encode(process.batch(NEXT, 0, sequence=sequence))).code == STATE
        assert peer.ask(DECODE, None, encode(process.batch(NEXT, len(PROMPT), sequence=sequence))).code == STATE
        answer = peer.ask(CLEAR, {"sequence": sequence})
        assert answer.code == STATE
        assert "1 session" in answer.text["message"]
    assert table.logits((A, 1, len(PROMPT), NEXT)) == after
    # a session and a raw sequence never share one
    hit(table.ask(RELEASE, A, 1))
    process.logits(PROMPT, 0)
    table.open(B)
    table.logits((B, 1, 0, PROMPT))
    hit(table.ask(RELEASE, B, 1))
    process.logits(NEXT, len(PROMPT))


def test_clear_drops_all_sessions(table: Table) -> None:
    """Catches an id, an epoch or an answer that is still known after clear."""
    prepare(table)
    bundle = batch(table.process, (A, 5, HERE, NEXT))
    table.peer.expect(DECODE, None, bundle)
    table.peer.expect(CLEAR)
    listed = table.list()
    assert (listed["sessions"], listed["live"], listed["forgotten"]) == ([], 0, 0)
    refused(table.peer.ask(DECODE, None, bundle), "miss", A, 0, None)
    for session in (A, B, C):
        table.open(session)


GOOD: dict[int, dict[str, Any]] = {
    OPEN: {"session": A.hex(), "epoch": 1, "position": 0, "recipe": "00" * 32},
    TRUNCATE: {"session": A.hex(), "epoch": 1, "position": 0},
    RELEASE: {"session": A.hex(), "epoch": 1},
    PIN: {"session": A.hex(), "epoch": 1, "pinned": True},
    EVICT: {"session": A.hex()},
    SESSIONS: {"forgotten": True},
    SAVE: {"session": A.hex(), "epoch": 1, "file": "x"},
    RESTORE: {"session": A.hex(), "epoch": 1, "file": "x", "recipe": "00" * 32},
}

BAD_VALUES: dict[str, list[Any]] = {
    "session": ["", "00" * 15, "00" * 17, "0g" * 16, 5, None, [], "0" * 31 + "\0", "é" * 16],
    "epoch": [-1, 2**64, 1.0, "1", None, True, 1e30],
    "position": [-1, 2**63, 0.5, "0", None, False],
    "recipe": ["", "00" * 31, "zz" * 32, None, 0],
    "pinned": [0, 1, "true", None],
    "forgotten": [1, "yes", None],
    "file": [
        "",
        ".",
        "..",
        ".x",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\0b",
        "ü",
        "a b",
        "x" * 201,
        5,
        None,
        "x\n",
        "%2e%2e",
        "a\\b",
    ],
}

BAD_KEYS = [(type, key) for type, text in GOOD.items() for key in text]


@pytest.mark.parametrize(("type", "key"), BAD_KEYS)
def test_a_bad_key_is_named_with_what_was_expected_and_found(table: Table, states: Path, type: int, key: str) -> None:
    """Catches a value that is cut, wrapped or guessed, and a path that leaves the folder."""
    before = state_of(table)
    for value in BAD_VALUES[key]:
        answer = table.peer.ask(type, GOOD[type] | {key: value})
        assert answer.code == ARGUMENT, (value, answer.text)
        assert answer.text["message"].startswith(f"{key} is "), answer.text
        assert ", not " in answer.text["message"]
    if key not in ("forgotten",) and type != EVICT:
        answer = table.peer.ask(type, {k: v for k, v in GOOD[type].items() if k != key})
        assert answer.code == ARGUMENT
        assert answer.text["message"].startswith(f"{key} is missing, expected ")
    assert table.peer.ask(type, b"[1]").code == 21
    assert table.peer.ask(type, GOOD[type], b"no bundle belongs here").code == ARGUMENT
    if "recipe" in GOOD[type]:
        assert table.peer.ask(type, GOOD[type] | {"ingredients": 5}).code == ARGUMENT
    assert state_of(table) == before
    assert not list(states.iterdir())


BAD_TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "ids missing": (CONTRACT, {"session_ids": None}),
    "epochs missing": (CONTRACT, {"session_epochs": None}),
    "positions missing": (CONTRACT, {"session_positions": None}),
    "ids of 15 bytes": (CONTRACT, {"session_ids": Tensor("session_ids", np.zeros((1, 15), np.uint8))}),
    "ids without a second dimension": (CONTRACT, {"session_ids": Tensor("session_ids", np.zeros(16, np.uint8))}),
    "more epochs than ids": (CONTRACT, {"session_epochs": Tensor("session_epochs", np.ones(2, np.uint64))}),
    "signed epochs": (CONTRACT, {"session_epochs": Tensor("session_epochs", np.ones(1, np.int64))}),
    "row outside the table": (CONTRACT, {"seq_ids": Tensor("seq_ids", np.array([0, 1], np.uint32))}),
    "row far outside": (CONTRACT, {"seq_ids": Tensor("seq_ids", np.array([0, 2**32 - 1], np.uint32))}),
    "n_seqs wrong": (CONTRACT, {"n_seqs": 2}),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_session_table_that_is_none(table: Table, name: str) -> None:
    """Catches a read beyond the table and a table that is half believed."""
    table.open(A)
    before = state_of(table)
    code, more = BAD_TABLES[name]
    answer = table.decode((A, 1, 0, NEXT), **more)
    assert answer.code == code, answer.text
    assert state_of(table) == before
    table.logits((A, 1, 0, NEXT))


def test_rows_of_a_session_table(table: Table) -> None:
    """Catches a session that is named twice, one without a token, and more rows than there are sequences."""
    for session in (A, B):
        table.open(session)
    before = state_of(table)
    assert table.decode((A, 1, 0, NEXT), (A, 1, 0, NEXT)).code == CONTRACT
    assert table.decode((A, 1, 0, NEXT), (B, 1, 0, [])).code == CONTRACT
    many = [(sid(20 + i), 1, 0, [1]) for i in range(SLOTS + 1)]
    assert table.decode(*many).code == LIMIT
    assert state_of(table) == before
    assert table.decode((A, 1, 0, NEXT), positions=Tensor("positions", np.array([0, 2], np.int32), token_axis=0)).code
    assert state_of(table) == before


#
# a request that comes once more
#


def again(table: Table, first: Answer, bundle: bytes, wish: dict[str, Any]) -> None:
    """The request gets its answer once more, and nothing is computed."""
    counted = table.peer.expect(STATISTICS).text
    answer = table.peer.ask(DECODE, wish, bundle)
    assert (answer.type, answer.text, answer.bundle) == (first.type, first.text, first.bundle)
    after = table.peer.expect(STATISTICS).text
    assert after["answers_again"] == counted["answers_again"] + 1
    assert (after["tokens"], after["compute_us"]) == (counted["tokens"], counted["compute_us"])


@pytest.mark.parametrize("wish", [{}, {"logits": True}, {"logits": True, "sample": False, "byte_order": "big"}])
def test_the_same_request_gets_the_same_answer(table: Table, wish: dict[str, Any]) -> None:
    """Catches a retry that is computed again or refused, whichever connection it comes on."""
    table.open(A)
    bundle = batch(table.process, (A, 1, 0, PROMPT))
    first = table.peer.expect(DECODE, wish, bundle)
    listed = state_of(table)
    again(table, first, bundle, wish)
    again(table, first, bundle, wish)
    peer = table.process.connect()
    again(Table(table.process, peer), first, bundle, wish)
    peer.close()
    assert state_of(table) == listed
    # an opening at the position where it stands, a pin and a cut that cuts nothing leave it there
    table.open(A, 1, len(PROMPT))
    hit(table.ask(PIN, A, 1, pinned=True))
    hit(table.ask(TRUNCATE, A, 1, position=len(PROMPT)))
    refused(table.ask(TRUNCATE, A, 1, position=99), "position_mismatch", A, 1, len(PROMPT))
    again(table, first, bundle, wish)
    bundle = batch(table.process, (A, 1, len(PROMPT), NEXT))
    again(table, table.peer.expect(DECODE, wish, bundle), bundle, wish)


def test_another_request_is_another_request(table: Table) -> None:
    """Catches an answer that is given to a request of other bytes or other wishes."""
    table.open(A)
    bundle = batch(table.process, (A, 1, 0, PROMPT))
    table.peer.expect(DECODE, {}, bundle)
    counted = table.answers_again()
    others = [
        ({"logits": True}, bundle),
        ({"sample": False}, bundle),
        ({"byte_order": "big"}, bundle),
        ({"fragment_size": 64}, bundle),
        ({"checksums": False}, bundle),
        ({}, batch(table.process, (A, 1, 0, PROMPT), number=1)),
        ({}, batch(table.process, (A, 1, 0, PROMPT[:-1] + [1]))),
    ]
    for wish, other in others:
        refused(table.peer.ask(DECODE, wish, other), "position_mismatch", A, 1, len(PROMPT))
    assert table.answers_again() == counted
    # the defaults written out are the same wishes
    wish = {"byte_order": "little", "fragment_size": 0, "checksums": True, "logits": False, "sample": True}
    table.peer.expect(DECODE, wish, bundle)
    assert table.answers_again() == counted + 1


def moved_on(table: Table) -> None:
    table.logits((A, 1, len(PROMPT), NEXT))


def cut_and_replaced(table: Table) -> None:
    hit(table.ask(TRUNCATE, A, 1, position=5))
    table.logits((A, 1, 5, NEXT))  # as many positions as before, of other tokens


def taken_over(table: Table) -> None:
    hit(table.ask(OPEN, A, 2, position=len(PROMPT)))


def released(table: Table) -> None:
    hit(table.ask(RELEASE, A, 1))


def evicted(table: Table) -> None:
    hit(table.ask(EVICT, A))


def evicted_and_opened(table: Table) -> None:
    hit(table.ask(EVICT, A))
    table.open(A)
    table.logits((A, 1, 0, PROMPT[:6] + [1]))


def restored(table: Table) -> None:
    hit(table.ask(SAVE, A, 1, file="x"))
    hit(table.ask(EVICT, A))
    hit(table.ask(RESTORE, A, 1, file="x"))


MOVES: dict[str, tuple[Callable[[Table], None], str, int, int | None]] = {
    "moved on": (moved_on, "position_mismatch", 1, 9),
    "cut and replaced": (cut_and_replaced, "position_mismatch", 1, 7),
    "taken over": (taken_over, "stale_epoch", 2, 7),
    "released": (released, "stale_epoch", 1, None),
    "evicted": (evicted, "evicted", 1, None),
    "evicted and opened": (evicted_and_opened, "position_mismatch", 1, 7),
    "restored": (restored, "position_mismatch", 1, 7),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_session_that_has_moved_has_no_answer(table: Table, name: str) -> None:
    """Catches an answer of a state that is not there any more."""
    table.open(A)
    bundle = batch(table.process, (A, 1, 0, PROMPT))
    again(table, table.peer.expect(DECODE, {}, bundle), bundle, {})
    counted = table.answers_again()
    move, outcome, epoch, position = MOVES[name]
    move(table)
    refused(table.peer.ask(DECODE, {}, bundle), outcome, A, epoch, position)
    assert table.answers_again() == counted


def test_a_cut_to_the_start_runs_the_request_anew(table: Table) -> None:
    """Catches a replay that is answered from the past instead of being computed."""
    table.open(A)
    bundle = batch(table.process, (A, 1, 0, PROMPT))
    first = table.peer.expect(DECODE, {"logits": True}, bundle)
    hit(table.ask(TRUNCATE, A, 1, position=0))
    before = table.peer.expect(STATISTICS).text
    second = table.peer.expect(DECODE, {"logits": True}, bundle)
    after = table.peer.expect(STATISTICS).text
    assert after["tokens"] == before["tokens"] + len(PROMPT)
    assert after["answers_again"] == before["answers_again"]
    assert second.bundle == first.bundle


def test_an_answer_of_two_sessions_needs_both(table: Table) -> None:
    """Catches half of a batch's sessions taken for all."""
    table.open(A)
    table.open(B)
    bundle = batch(table.process, (A, 1, 0, PROMPT), (B, 1, 0, NEXT))
    again(table, table.peer.expect(DECODE, {}, bundle), bundle, {})
    mine = batch(table.process, (A, 1, len(PROMPT), NEXT))
    first = table.peer.expect(DECODE, {}, mine)
    refused(table.peer.ask(DECODE, {}, bundle), "position_mismatch", A, 1, len(PROMPT) + len(NEXT))
    # and that of the first stays when the second moves
    table.logits((B, 1, len(NEXT), PROMPT))
    again(table, first, mine, {})


def test_an_answer_of_tokens_that_two_sessions_share(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Catches a session whose end is counted in tokens of the batch instead of its own."""
    with running(patched_build.worker, tiny["tied"], "--kv-unified") as process:
        table = Table(process)
        table.open(A)
        table.open(B)
        shared: dict[str, Any] = {
            "seq_offsets": Tensor("seq_offsets", np.array([0, 2, 4, 5], np.uint32)),
            "seq_ids": Tensor("seq_ids", np.array([0, 1, 1, 0, 0], np.uint32)),
        }
        bundle = batch(process, (A, 1, 0, [5, 6, 7]), (B, 1, 0, []), **shared)
        first = table.peer.expect(DECODE, {}, bundle)
        table.open(A, 1, 3)
        table.open(B, 1, 2)
        again(table, first, bundle, {})
        hit(table.ask(TRUNCATE, B, 1, position=2))
        again(table, first, bundle, {})
        hit(table.ask(TRUNCATE, B, 1, position=1))
        refused(table.peer.ask(DECODE, {}, bundle), "position_mismatch", A, 1, 3)


def test_kept_answers_have_a_limit(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Catches answers without a bound, the newest dropped instead of the oldest, and an answer too large that drops the
    others."""
    with running(patched_build.worker, tiny["tied"], "--keep-answers", "0") as process:
        table = Table(process)
        table.open(A)
        bundle = batch(process, (A, 1, 0, PROMPT))
        table.peer.expect(DECODE, {}, bundle)
        refused(table.peer.ask(DECODE, {}, bundle), "position_mismatch", A, 1, len(PROMPT))
    # logits of one token are 1280 bytes: two answers, not three
    with running(patched_build.worker, tiny["tied"], "--keep-answers", "9000") as process:
        table = Table(process)
        bundles = {}
        answers = {}
        wish = {"logits": True}
        for session in (A, B, C):
            table.open(session)
            bundles[session] = batch(process, (session, 1, 0, [7]))
            answers[session] = table.peer.expect(DECODE, wish, bundles[session])
        refused(table.peer.ask(DECODE, wish, bundles[A]), "position_mismatch", A, 1, 1)
        for session in (B, C):
            again(table, answers[session], bundles[session], wish)
        large = batch(process, (A, 1, 1, PROMPT))
        table.peer.expect(DECODE, wish, large)
        refused(table.peer.ask(DECODE, wish, large), "position_mismatch", A, 1, 1 + len(PROMPT))
        for session in (B, C):
            again(table, answers[session], bundles[session], wish)


#
# connections
#


@pytest.fixture(scope="module")
def soon(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A worker without grace."""
    folder = tmp_path_factory.mktemp("soon")
    options = ("--session-grace", "0", "--state-dir", str(folder))
    with running(patched_build.worker, tiny["tied"], *options, path=folder / "s") as process:
        yield process


def test_what_a_connection_alone_held_is_released_with_it(soon: Process) -> None:
    """Catches a session that nobody can reach and that keeps its sequence, and one that goes although it is held."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    watcher.open(C)
    first, second = soon.connect(), soon.connect()
    Table(soon, first).open(A)
    Table(soon, first).open(B)
    Table(soon, second).open(B)
    Table(soon, first).logits((A, 1, 0, PROMPT), (B, 1, 0, NEXT))
    hit(Table(soon, first).ask(PIN, A, 1, pinned=True))
    first.close()
    until(lambda: A.hex() not in watcher.live(), "the release of what was held alone")
    assert watcher.live() == {B.hex(): len(NEXT), C.hex(): 0}
    refused(watcher.ask(OPEN, A, 1, position=0), "stale_epoch", A, 1, None)
    watcher.open(A, 2)
    second.close()
    until(lambda: B.hex() not in watcher.live(), "the release by the last that held it")
    assert watcher.live() == {C.hex(): 0, A.hex(): 0}
    assert watcher.list()["released"] >= 2


def test_a_connection_that_used_and_did_not_open_holds_nothing(soon: Process) -> None:
    """Catches a session that dies with whoever touched it last, or lives with it."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    watcher.open(A)
    user = soon.connect()
    Table(soon, user).logits((A, 1, 0, PROMPT))
    opener = soon.connect()
    Table(soon, opener).open(B)
    Table(soon, user).logits((B, 1, 0, PROMPT))
    opener.close()
    until(lambda: B.hex() not in watcher.live(), "the release of what the opener held")
    user.close()
    ghost = soon.connect()  # its end comes after the user's
    Table(soon, ghost).open(C)
    ghost.close()
    until(lambda: C.hex() not in watcher.live(), "the release of the last connection's")
    assert watcher.live() == {A.hex(): len(PROMPT)}


def test_a_connection_holds_what_it_restored(soon: Process) -> None:
    """Catches a restored session that belongs to nobody."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    watcher.open(A)
    watcher.logits((A, 1, 0, PROMPT))
    hit(watcher.ask(SAVE, A, 1, file="a"))
    hit(watcher.ask(RELEASE, A, 1))
    peer = soon.connect()
    hit(Table(soon, peer).ask(RESTORE, A, 2, file="a"), position=len(PROMPT))
    assert watcher.live() == {A.hex(): len(PROMPT)}
    peer.close()
    until(lambda: not watcher.live(), "the release of what was restored")


def test_a_fenced_connection_holds_nothing(soon: Process) -> None:
    """Catches a session that a zombie keeps alive, or that goes with the zombie, after a newer epoch has taken over."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    zombie, owner = soon.connect(), soon.connect()
    for session in (A, B):
        Table(soon, zombie).open(session)
        Table(soon, owner).open(session, 2)
    owner.close()
    until(lambda: not watcher.live(), "the release of what the owner held")
    refused(Table(soon, zombie).ask(RELEASE, A, 1), "stale_epoch", A, 2, None)
    owner = soon.connect()
    for session in (A, B):
        Table(soon, owner).open(session, 3)
    zombie.close()
    ghost = soon.connect()
    Table(soon, ghost).open(C)
    ghost.close()
    until(lambda: C.hex() not in watcher.live(), "the release of the last connection's")
    assert watcher.live() == {A.hex(): 0, B.hex(): 0}
    owner.close()
    until(lambda: not watcher.live(), "the release of the rest")


def test_a_connection_that_breaks_is_one_that_goes_away(soon: Process) -> None:
    """Catches sessions that stay when a connection ends with half a message or an unsound header."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    for ending in (b"BBWP\x09", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        peer = soon.connect()
        Table(soon, peer).open(A, watcher.list()["created"] + 1)
        peer.write(ending)
        if ending.startswith(b"GET"):
            assert peer.receive().code == 22
        peer.close()
        until(lambda: not watcher.live(), "the release")


def test_what_is_gone_is_not_released_once_more(soon: Process) -> None:
    """Catches a release at the end of a connection that meets another's session of the same id."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    peer = soon.connect()
    theirs = Table(soon, peer)
    for session in (A, B, C):
        theirs.open(session)
    hit(theirs.ask(RELEASE, A, 1))
    hit(theirs.ask(EVICT, B))
    watcher.open(A, 2)
    watcher.open(B, 1)
    peer.close()
    until(lambda: C.hex() not in watcher.live(), "the release of what it still held")
    assert watcher.live() == {A.hex(): 0, B.hex(): 0}


def test_clear_ends_all_holding(soon: Process) -> None:
    """Catches a connection whose end releases what was opened by another after a clear."""
    soon.peer.expect(CLEAR)
    watcher = Table(soon)
    peer = soon.connect()
    Table(soon, peer).open(A)
    soon.peer.expect(CLEAR)
    watcher.open(A)
    Table(soon, peer).open(B)
    peer.close()
    until(lambda: B.hex() not in watcher.live(), "the release of what it opened afterwards")
    assert watcher.live() == {A.hex(): 0}


def test_reopening_within_the_grace_keeps_a_session(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Catches a release that comes although somebody came back, and a grace that is not waited for."""
    with running(patched_build.worker, tiny["tied"], "--session-grace", "5", path=tmp_path / "s") as process:
        watcher = Table(process)
        lost = process.connect()
        for session in (A, B):
            Table(process, lost).open(session)
        bundle = batch(process, (A, 1, 0, PROMPT))
        first = lost.expect(DECODE, {"logits": True}, bundle)
        lost.close()
        back = process.connect()
        theirs = Table(process, back)
        again(theirs, first, bundle, {"logits": True})  # its answer was lost with the connection, say
        theirs.open(A, 1, len(PROMPT))
        until(lambda: B.hex() not in watcher.live(), "the release of what nobody came back for")
        assert watcher.live() == {A.hex(): len(PROMPT)}
        theirs.logits((A, 1, len(PROMPT), NEXT))


def test_sessions_outlast_a_connection_for_the_grace(listening: Process, table: Table) -> None:
    """Catches a release at once. (This worker waits a day.)"""
    peer = listening.connect()
    Table(listening, peer).open(A)
    Table(listening, peer).logits((A, 1, 0, PROMPT))
    peer.close()
    for _ in range(3):
        other = listening.connect()
        Table(listening, other).open(B, table.list()["created"] + 1)
        other.close()
    assert A.hex() in table.live()
    table.open(A, 1, len(PROMPT))


#
# files
#


def test_a_saved_session_goes_on_in_another_process(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Catches a state that is not the state, by all bits, and a file that others can read."""
    options = ("--state-dir", str(tmp_path))
    with running(patched_build.worker, tiny["tied"], *options) as process:
        table = Table(process)
        table.open(A, 3)
        table.open(B, 1)
        table.logits((B, 1, 0, NEXT))
        table.logits((A, 3, 0, PROMPT))
        reply = hit(table.ask(SAVE, A, 3, file="A-1.state"), session=A.hex(), epoch=3, position=len(PROMPT))
        expected = table.logits((A, 3, len(PROMPT), NEXT))
        hit(table.ask(SAVE, B, 1, file="B"))
    file = tmp_path / "A-1.state"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A-1.state", "B"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == reply["bytes"]
    assert len(decode(file.read_bytes()).tensors) >= 2 * process.facts["n_layer"]
    with running(patched_build.worker, tiny["tied"], *options) as process:
        table = Table(process)
        answer = table.ask(RESTORE, A, 4, file="A-1.state", ingredients=table.recipe["text"])
        assert answer.text == {"outcome": "hit", "session": A.hex(), "epoch": 4, "position": len(PROMPT)}
        assert table.live() == {A.hex(): len(PROMPT)}
        assert table.logits((A, 4, len(PROMPT), NEXT)) == expected
        hit(table.ask(RESTORE, B, 1, file="B"), position=len(NEXT))
        hit(table.ask(EVICT, B))
        hit(table.ask(RESTORE, B, 1, file="B"), position=len(NEXT))  # an evicted one, under the same epoch
        table.logits((B, 1, len(NEXT), PROMPT))


@pytest.mark.parametrize("architecture", ["gemma3", "jamba", "mamba"])
def test_every_kind_of_memory_is_saved(patched_build: NativeBuild, tmp_path: Path, architecture: str) -> None:
    """Catches a window, a recurrent state or one of two memories that a saved state leaves out, by all bits."""
    model = make_model(Variant(architecture, "dense"), tmp_path / "model.gguf")
    options = ("--range", "1:-1") if architecture == "mamba" else ()
    prompt, more = [(7 * i) % 120 for i in range(60)], [5, 6, 7]

    def rows(table: Table, start: int, tokens: list[int]) -> bytes:
        if not options:
            return table.logits((A, 1, start, tokens))
        width = table.process.facts["n_embd"]
        residual = np.random.default_rng(start).standard_normal((len(tokens), width), np.float32)
        sent = decode(batch(table.process, (A, 1, start, tokens)))
        sent.attributes["layer_end"] = 1
        sent = Bundle([Tensor("residual", residual, token_axis=0), *sent.tensors[1:]], sent.attributes)
        answer = table.peer.expect(DECODE, {"logits": True}, encode(sent))
        return decode(answer.bundle)["logits"].tobytes()

    with running(patched_build.worker, model.path, "--state-dir", str(tmp_path), *options) as process:
        table = Table(process)
        table.open(A)
        rows(table, 0, prompt)
        hit(table.ask(SAVE, A, 1, file="a"), position=len(prompt))
        expected = rows(table, len(prompt), more)
    with running(patched_build.worker, model.path, "--state-dir", str(tmp_path), *options) as process:
        table = Table(process)
        hit(table.ask(RESTORE, A, 1, file="a"), position=len(prompt))
        assert rows(table, len(prompt), more) == expected


def test_a_restore_that_is_refused_changes_nothing(table: Table, states: Path) -> None:
    """Catches a state that comes over one that is there, under another's id or epoch, or where no sequence is free."""
    prepare(table)
    hit(table.ask(SAVE, A, 5, file="a"))
    table.open(D, 5)
    table.logits((D, 5, 0, NEXT))
    hit(table.ask(SAVE, D, 5, file="d"))
    hit(table.ask(RELEASE, D, 5))
    expected = table.logits((A, 5, HERE, NEXT))
    hit(table.ask(TRUNCATE, A, 5, position=HERE))
    before = state_of(table)
    refused(table.ask(RESTORE, A, 5, file="a"), "position_mismatch", A, 5, HERE)
    refused(table.ask(RESTORE, A, 6, file="a"), "position_mismatch", A, 5, HERE)
    refused(table.ask(RESTORE, A, 4, file="a"), "stale_epoch", A, 5, HERE)
    refused(table.ask(RESTORE, A, 5, file="a", recipe="00" * 32), "incompatible_recipe", A, 5, HERE)
    refused(table.ask(RESTORE, D, 5, file="d"), "stale_epoch", D, 5, None)
    refused(table.ask(RESTORE, D, 4, file="d"), "stale_epoch", D, 5, None)
    for session in (B, E):
        answer = table.ask(RESTORE, session, 6, file="a")
        assert answer.code == CONTRACT
        assert A.hex() in answer.text["message"]
        assert session.hex() in answer.text["message"]
    assert state_of(table) == before
    for session in (B, C):
        table.open(session, 6)
    refused(table.ask(RESTORE, D, 6, file="d"), "full", D, 5, None)
    assert table.live() == {A.hex(): HERE, B.hex(): 0, C.hex(): 0}
    assert table.logits((A, 5, HERE, NEXT)) == expected


def test_a_file_is_replaced_as_a_whole(table: Table, states: Path) -> None:
    """Catches a file that is written in place, and one that follows a link out of the folder."""
    table.open(A)
    table.logits((A, 1, 0, PROMPT))
    hit(table.ask(SAVE, A, 1, file="x"))
    inode = (states / "x").stat().st_ino
    with open(states / "x", "rb") as old:
        before = old.read()
        old.seek(0)
        table.logits((A, 1, len(PROMPT), NEXT))
        hit(table.ask(SAVE, A, 1, file="x"))
        assert old.read() == before
    assert (states / "x").stat().st_ino != inode
    outside = states.parent / "precious"
    outside.write_text("precious")
    (states / "link").symlink_to(outside)
    hit(table.ask(SAVE, A, 1, file="link"))
    assert outside.read_text() == "precious"
    assert not (states / "link").is_symlink()
    for name in ("x" * 200, "A", "0", "a..b", "-", "_"):
        hit(table.ask(SAVE, A, 1, file=name))
        assert (states / name).is_file()


def test_a_file_that_cannot_be_written_leaves_nothing(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Catches half a file, one under a name that nobody asked for, and a full disk that ends the worker."""
    with running(patched_build.worker, tiny["tied"], "--state-dir", str(tmp_path)) as process:
        table = Table(process)
        table.open(A)
        table.logits((A, 1, 0, PROMPT))
        (tmp_path / "folder").mkdir()
        answer = table.ask(SAVE, A, 1, file="folder")
        assert answer.code == ARGUMENT
        assert "folder" in answer.text["message"]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        answer = table.ask(SAVE, A, 1, file="x")
        assert answer.code == ARGUMENT
        assert "File too large" in answer.text["message"]
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        hit(table.ask(SAVE, A, 1, file="x"))
        table.logits((A, 1, len(PROMPT), NEXT))
    limit = ("--state-dir", str(tmp_path), "--max-bundle", "20000")
    with running(patched_build.worker, tiny["tied"], *limit) as process:
        table = Table(process)
        refused_for_size = table.ask(RESTORE, A, 1, file="x")
        assert refused_for_size.code == LIMIT
        assert "20000" in refused_for_size.text["message"]
        table.open(A)
        table.peer.expect(DECODE, None, batch(process, (A, 1, 0, PROMPT)))
        assert table.ask(SAVE, A, 1, file="y").code == LIMIT
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x"]


def test_without_a_folder_nothing_is_saved(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Catches a worker that writes where it was started."""
    with running(patched_build.worker, tiny["tied"]) as process:
        table = Table(process)
        table.open(A)
        for type in (SAVE, RESTORE):
            answer = table.ask(type, A, 1, file="x")
            assert answer.code == ARGUMENT
            assert "--state-dir" in answer.text["message"]


def test_what_is_no_regular_file_is_not_read(table: Table, states: Path) -> None:
    """Catches a worker that waits for the other end of a FIFO, follows a link, or takes memory for a size alone."""
    table.open(A)
    table.logits((A, 1, 0, PROMPT))
    hit(table.ask(SAVE, A, 1, file="good"))
    os.mkfifo(states / "fifo")
    (states / "folder").mkdir()
    (states / "link").symlink_to("good")
    (states / "out").symlink_to("/dev/zero")
    with open(states / "huge", "wb") as sparse:
        sparse.truncate((1 << 30) + 1)
    try:
        before = state_of(table)
        resident = table.process.resident()
        expected = {"fifo": ARGUMENT, "folder": ARGUMENT, "link": ARGUMENT, "out": ARGUMENT, "huge": LIMIT, "none": 1}
        for name, code in expected.items():
            answer = table.ask(RESTORE, B, 1, file=name)
            assert answer.code == code, answer.text
            assert name in answer.text["message"]
        assert state_of(table) == before
        assert table.process.resident() - resident < 16 << 20
        hit(table.ask(EVICT, A))
        hit(table.ask(RESTORE, A, 1, file="good"))
    finally:
        (states / "folder").rmdir()


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The file with one fault each."""
    for cut in (0, 1, 40, 64, 100, len(data) // 3, len(data) // 2, len(data) - 1):
        yield f"cut at {cut}", data[:cut]
    yield "a byte more", data + b"\0"
    for at in (0, 30, 80, len(data) // 3, len(data) // 2, len(data) - 20):
        yield f"byte {at}", data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    yield "text", b"This is not a state.\n"
    yield "zeros", bytes(4096)


def test_a_damaged_file_leaves_a_clean_session(table: Table, states: Path) -> None:
    """Catches a half-restored state, a crash, and a name or offset that is not the Python codec's."""
    table.open(A)
    table.logits((A, 1, 0, PROMPT))
    hit(table.ask(SAVE, A, 1, file="x"))
    expected = table.logits((A, 1, len(PROMPT), NEXT))
    hit(table.ask(TRUNCATE, A, 1, position=len(PROMPT)))
    table.open(B)
    data = (states / "x").read_bytes()
    before = state_of(table)
    for name, content in damaged(data):
        (states / "x").write_bytes(content)
        with pytest.raises(BundleError) as caught:
            decode(content)
        for session, epoch in ((C, 1), (A, 2)):
            answer = table.ask(RESTORE, session, epoch, file="x")
            assert answer.code == BUNDLE, (name, answer.text)
            assert (answer.text["bundle_error"], answer.text["offset"]) == (caught.value.name, caught.value.offset)
        assert state_of(table) == before, name
    table.open(C)
    table.logits((C, 1, 0, PROMPT))
    assert table.logits((C, 1, len(PROMPT), NEXT)) == expected
    assert table.logits((A, 1, len(PROMPT), NEXT)) == expected


def test_a_foreign_file_is_refused(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, table: Table, states: Path
) -> None:
    """Catches a state of another model, range or recipe, and a bundle that is no state, taken for one."""
    other = tiny_models.write(tmp_path / "other.gguf", "tied", seed=1, shape=tiny_models.Shape(n_layer=7, n_ff=224))
    sources = {
        "model": (other, ()),
        "range": (tiny["tied"], ("--range", "2:5")),
        "types": (tiny["tied"], ("--type-k", "f32")),
        "recipe": (tiny["tied"], ("--batch", "32")),
        "good": (tiny["tied"], ()),
    }
    for name, (model, options) in sources.items():
        with running(patched_build.worker, model, "--state-dir", str(states), *options) as process:
            theirs = Table(process)
            theirs.open(A)
            if name != "range":
                theirs.logits((A, 1, 0, PROMPT))
            hit(theirs.ask(SAVE, A, 1, file=name))
    (states / "request").write_bytes(batch(table.process, (A, 1, 0, PROMPT)))
    before = state_of(table)
    for name in ("model", "range", "types", "request"):
        answer = table.ask(RESTORE, A, 1, file=name)
        assert answer.code == CONTRACT, (name, answer.text)
    refused(table.ask(RESTORE, A, 1, file="recipe"), "incompatible_recipe", A, 0, None)
    refused(table.ask(RESTORE, A, 1, file="good", recipe="00" * 32), "incompatible_recipe", A, 0, None)
    assert state_of(table) == before
    hit(table.ask(RESTORE, A, 1, file="good"), position=len(PROMPT))


@pytest.mark.parametrize("part", ["", "window."])
def test_a_state_that_lacks_positions_is_refused(patched_build: NativeBuild, tmp_path: Path, part: str) -> None:
    """Catches a state whose cells are the last ones, but not all that the next token attends to in that part: layers
    without a window need every position, whatever the window of the others is."""
    model = make_model(Variant("gemma3", "dense"), tmp_path / "model.gguf")
    with running(patched_build.worker, model.path, "--state-dir", str(tmp_path), "--swa-full", "off") as process:
        table = Table(process)
        table.open(A)
        for start in range(0, 240, 60):
            table.logits((A, 1, start, [(7 * i) % 120 for i in range(60)]))
        hit(table.ask(SAVE, A, 1, file="a"))
        expected = table.logits((A, 1, 240, NEXT))
        hit(table.ask(RELEASE, A, 1))

        state = decode((tmp_path / "a").read_bytes())
        rows = len(state[f"{part}cells"])
        answers = []
        for lost in range(1, rows):
            tensors = [
                Tensor(tensor.name, tensor.array[lost:], dtype=tensor.dtype)
                if tensor.name.startswith((f"{part}cells", f"{part}k.", f"{part}v."))
                else tensor
                for tensor in state.tensors
            ]
            (tmp_path / "cut").write_bytes(encode(Bundle(tensors, state.attributes)))
            answers.append(table.ask(RESTORE, A, 2, file="cut"))
            if answers[-1].code is None:
                assert table.logits((A, 2, 240, NEXT)) == expected
                table.peer.expect(CLEAR)
        codes = [answer.code for answer in answers]
        # What can be left out are positions that no token sees any more.
        kept = codes.index(CONTRACT)
        assert codes == [None] * kept + [CONTRACT] * (len(codes) - kept)
        assert (kept > 0) == bool(part)
