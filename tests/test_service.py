"""The service, its client and its protocol, over a pipeline that is plain Python (tests/shards has real workers).

Catches: a request that is run twice or by the wrong session, a client that holds up others, a session that outlives its
clients or does not live as long as promised, a message that breaks the service, a socket that is stolen or left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drive import together
from fake_shards import Cluster, FakeModel, FakeShard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle.cli import top
from boundary_bundle.shards import (
    CapacityError,
    Outcome,
    PipelineError,
    SessionPipeline,
    SessionRefused,
    Step,
    WorkerError,
)
from boundary_bundle.shards import service_protocol as protocol
from boundary_bundle.shards.client import Client, ServiceError
from boundary_bundle.shards.protocol import Type as WorkerType
from boundary_bundle.shards.service import Address, AddressError, Limits, Service, _Turns
from boundary_bundle.shards.service_protocol import Type

N_VOCAB = 256
N_BATCH = 4
ROOM = 200
#: How long a test waits for what must happen; nothing is measured by it.
PATIENCE = 30.0


def next_token(history: Sequence[int]) -> int:
    """What the stub's model says after a history. Never 0, the end of text."""
    return 1 + hashlib.sha256(bytes(history)).digest()[0] % (N_VOCAB - 1)


def generated(prompt: Sequence[int], count: int) -> list[int]:
    """An undisturbed generation."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class StubSession:
    def __init__(self, pipeline: Stub, id: bytes) -> None:
        self.pipeline, self.id = pipeline, id
        self.epoch = 1
        self.tokens: list[int] = []
        self.released = False

    @property
    def position(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], *, outputs: str = "last") -> Step:
        assert not self.released
        assert 0 < len(tokens) <= N_BATCH
        self.pipeline.enter(self, tokens)
        sampled = []
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            if outputs == "all" or (outputs == "last" and place == len(tokens) - 1):
                sampled.append(next_token(self.tokens))
        return Step(sampled, None, [], [], 0.0)

    def truncate(self, position: int) -> None:
        self.pipeline.calls.append(("truncate", self.id, position))
        del self.tokens[position:]

    def release(self) -> None:
        assert not self.released
        self.released = True
        self.pipeline.calls.append(("release", self.id))

    def save(self, name: str) -> None:
        self.pipeline.saved[name] = list(self.tokens)

    def restore(self, name: str) -> None:
        if name not in self.pipeline.saved:
            raise PipelineError(f"there is no saved session {name}")
        self.tokens = list(self.pipeline.saved[name])


class Stub:
    """A session pipeline of one process. ``hook`` is called before each batch and may wait or raise."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(architecture="stub", n_layer=7, n_vocab=N_VOCAB, eos=(0,))
        self.n_batch, self.positions, self.slots = N_BATCH, ROOM, 2
        self.workers = self.shards = self.log = ()
        self.hook: Callable[[StubSession, Sequence[int]], None] = lambda session, tokens: None
        self.calls: list[Any] = []
        self.saved: dict[str, list[int]] = {}
        self._inside = threading.Lock()

    def enter(self, session: StubSession, tokens: Sequence[int]) -> None:
        assert self._inside.acquire(blocking=False), "two batches at once"
        try:
            self.calls.append(("batch", session.id, tuple(tokens)))
            self.hook(session, tokens)
        finally:
            self._inside.release()

    def open(self, id: bytes) -> StubSession:
        self.calls.append(("open", id))
        return StubSession(self, id)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [1] * add_special + list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes([token]) for token in tokens]

    def status(self) -> dict[str, Any]:
        return {"shards": [], "sessions": [], "outcomes": {}}

    def count(self, *event: Any) -> int:
        return sum(entry[: len(event)] == event for entry in self.calls)


@contextlib.contextmanager
def serving(tmp_path: Path, stub: Any = None, *, when_full: str = "evict", **limits: Any) -> Iterator[Path]:
    pipeline: Any = stub or Stub()
    lines: list[str] = []
    path = tmp_path / "socket"
    with Address(path) as address:
        service = Service(pipeline, when_full=when_full, limits=Limits(**limits), log=lines.append)
        thread = threading.Thread(target=service.run, args=(address.socket,))
        thread.start()
        try:
            yield path
        finally:
            service.stop()
            thread.join()
    # Nothing that nobody foresaw, and no thread is left.
    assert lines == []
    assert [one.name for one in threading.enumerate() if one.name in ("client", "reaper")] == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


class Raw:
    """A client that says what it likes."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self.number = 0
        if hello:
            self.ask(Type.HELLO, major=1, minors=[0])

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, kind: int, **wish: Any) -> dict[str, Any]:
        self.number += 1
        self.send(protocol.pack(kind, self.number, wish))
        return self.answer()

    def answer(self) -> dict[str, Any]:
        header = protocol.unpack_header(self.read(32))
        assert header.reply
        text = protocol.parse_text(self.read(header.text_length))
        return {**text, "type": header.type, "request": header.request}

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            assert piece, "the connection is closed"
            data += piece
        return data

    def closed(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


ID = bytes(range(16))


# Sessions


def test_a_generation_and_everything_else(tmp_path: Path) -> None:
    """A client method that asks for something else than it says."""
    stub = Stub()
    with serving(tmp_path, stub) as path, Client(path) as client:
        assert client.model["n_vocab"] == N_VOCAB
        prompt = client.tokenize("a prompt of several batches")
        assert prompt == [1, *b"a prompt of several batches"]
        assert client.tokenize("x", add_special=False) == [ord("x")]
        assert client.detokenize([65, 66]) == [b"A", b"B"]
        with client.open(ID) as session:
            assert client.open(ID) is session
            found = list(session.generate(prompt, 9))
            assert found == generated(prompt, 9)
            assert session.position == len(prompt) + 8
            session.truncate(3)
            assert session.position == 3
            assert session.extend([5, 6, 7, 8, 9], outputs="all") == [
                next_token([*prompt[:3], 5, 6, 7, 8, 9][:end]) for end in range(4, 9)
            ]
            assert session.extend([5], outputs="none") == []
            session.save("kept")
            tokens = [*prompt[:3], 5, 6, 7, 8, 9, 5]
        with client.open(ID) as other:
            assert other is not session
            other.restore("kept")
            assert other.position == 9
            assert other.extend([1]) == [next_token([*tokens, 1])]
            with pytest.raises(ServiceError, match="restored into a session without any") as caught:
                other.restore("kept")
            assert (caught.value.outcome, other.position) == ("position_mismatch", 10)
        assert client.status()["service"]["connections"] == 1
        with pytest.raises(ServiceError, match="has been released") as caught:
            session.extend([1])
        assert (caught.value.outcome, caught.value.operation) == ("miss", "extend")
    assert stub.count("release") == 2


def test_an_end_of_text_ends_a_generation(tmp_path: Path) -> None:
    with serving(tmp_path) as path, Client(path) as client, client.open() as session:
        whole = generated([7], 6)
        assert list(session.generate([7], 6, stop=whole[2:3])) == whole[:3]


def test_text_has_whole_characters(tmp_path: Path) -> None:
    """Half a character, or the text of an end of text."""
    with serving(tmp_path) as path, Client(path) as client:
        assert list(client.text(["ä"[0].encode()[0], "ä".encode()[1], 66, 0])) == ["ä", "B"]
        assert list(client.text([0xC3])) == ["\ufffd"]


def test_many_clients_at_once(tmp_path: Path) -> None:
    """Tokens of one session that reach another, or a batch of two at once."""
    failures: list[BaseException] = []

    def work(path: Path, seed: int) -> None:
        try:
            with Client(path) as client:
                prompts = [[seed, 3, *range(1, 2 + seed % 7)], [seed, 9]]
                sessions = [client.open() for _ in prompts]
                streams = [session.generate(prompt, 15) for session, prompt in zip(sessions, prompts, strict=True)]
                found = list(zip(*streams, strict=True))
                assert [list(row) for row in zip(*found, strict=True)] == [generated(prompt, 15) for prompt in prompts]
        except BaseException as error:
            failures.append(error)

    stub = Stub()
    with serving(tmp_path, stub) as path:
        threads = [threading.Thread(target=work, args=(path, seed)) for seed in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert stub.count("open") == 80


def test_a_long_prompt_lets_others_through(tmp_path: Path) -> None:
    """A client that waits for more than one batch of another's request."""
    stub, arrived, gate = Stub(), threading.Event(), threading.Event()
    long = b"L" * 16

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        if session.id == long and session.position == 0:
            arrived.set()
            assert gate.wait(PATIENCE)

    stub.hook = hook
    with serving(tmp_path, stub) as path, Client(path) as one, Client(path) as two:
        slow, quick = one.open(long), two.open(ID)
        thread = threading.Thread(target=slow.extend, args=([1] * (5 * N_BATCH),))
        thread.start()
        assert arrived.wait(PATIENCE)
        second = threading.Thread(target=quick.extend, args=([2],))
        second.start()
        with Client(path) as third:
            # Whoever computes does not keep others from looking.
            until(lambda: third.status()["service"]["waiting"] == 1)
        gate.set()
        thread.join()
        second.join()
        order = [entry[1] for entry in stub.calls if entry[0] == "batch"]
        assert order == [long, ID, long, long, long, long]


def test_turns_go_by_arrival() -> None:
    """One that came later and is served before."""
    turns = _Turns()
    order: list[int] = []

    def work(number: int) -> None:
        with turns:
            order.append(number)

    threads = []
    with turns:
        for number in range(6):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            until(lambda number=number: turns.waiting == number + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(6))


# Requests that come again


def test_a_request_that_comes_again_is_answered_again(tmp_path: Path) -> None:
    stub = Stub()
    wish = {"session": ID.hex(), "number": 4, "position": 0, "tokens": [1, 2, 3, 4, 5, 6]}
    with serving(tmp_path, stub) as path, Raw(path) as raw:
        assert raw.ask(Type.OPEN, session=ID.hex())["number"] == 0
        first = raw.ask(Type.EXTEND, **wish)
        assert first["sampled"] == [next_token([1, 2, 3, 4, 5, 6])]
        again = raw.ask(Type.EXTEND, **wish)
        assert {**again, "request": 0} == {**first, "request": 0}
        assert stub.count("batch") == 2
        # From another connection too, which is told where things stand.
        with Raw(path) as other:
            assert other.ask(Type.OPEN, session=ID.hex())["number"] == 4
            assert other.ask(Type.EXTEND, **wish)["sampled"] == first["sampled"]
        assert stub.count("batch") == 2
        for changes in ({"number": 3}, {"tokens": [1]}, {"outputs": "all"}, {"position": 6}):
            refused = raw.ask(Type.EXTEND, **{**wish, **changes})
            assert (refused["name"], refused["position"]) == ("number", 6)
        for changes in ({"number": 5}, {"number": 5, "position": 7}):
            refused = raw.ask(Type.EXTEND, **{**wish, **changes})
            assert (refused["name"], refused["outcome"]) == ("session", "position_mismatch")
        assert stub.count("batch") == 2
        cut = {"session": ID.hex(), "number": 5, "position": 2}
        for _ in range(2):
            assert raw.ask(Type.TRUNCATE, **cut)["position"] == 2
        assert stub.count("truncate") == 1
        assert raw.ask(Type.EXTEND, **{**wish, "number": 6, "position": 2})["position"] == 8
        assert raw.ask(Type.TRUNCATE, **{**cut, "number": 7, "position": 9})["outcome"] == "position_mismatch"
        for released in (True, False):
            assert raw.ask(Type.RELEASE, session=ID.hex())["released"] is released
        assert raw.ask(Type.EXTEND, **{**wish, "number": 8})["outcome"] == "miss"


def test_a_request_that_failed_half_way_goes_on(tmp_path: Path) -> None:
    """Tokens that are computed twice or left out when a failed request is repeated."""
    stub, failing = Stub(), [True]
    prompt = list(range(1, 14))

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        if session.position == 8 and failing:
            failing.pop()
            raise WorkerError(0, "lost", "worker process 5 was ended by signal 9", (2, 5), "decode")

    stub.hook = hook
    with serving(tmp_path, stub) as path, Client(path) as client, client.open(ID) as session:
        with pytest.raises(ServiceError) as caught:
            session.extend(prompt)
        error = caught.value
        assert (error.name, error.shard, error.operation, error.position) == ("worker", (2, 5), "extend", 8)
        assert error.cause == "worker process 5 was ended by signal 9"
        assert str(error) == "service: extend: error 6 worker: shard [2,5): worker process 5 was ended by signal 9"
        assert session.position == 0
        assert session.extend(prompt) == [next_token(prompt)]
        assert stub.count("batch") == 5
        # Or it is taken back.
        failing.append(True)
        session.truncate(0)
        with pytest.raises(ServiceError):
            session.extend(prompt)
        session.truncate(session.position)
        assert session.extend([9]) == [next_token([9])]


def test_a_lost_connection_is_made_again(tmp_path: Path) -> None:
    """A token that is computed twice, or a generation that ends, because a connection did."""
    stub = Stub()
    with serving(tmp_path, stub) as path, Client(path) as client:
        session = client.open()
        found = []
        for place, token in enumerate(session.generate([1, 2, 3], 12)):
            found.append(token)
            assert client._socket is not None
            if place % 3 == 0:
                client._socket.shutdown(socket.SHUT_RDWR)
        assert found == generated([1, 2, 3], 12)
        assert stub.count("batch") == 12
        session.release()


def test_an_answer_that_is_lost_is_given_again(tmp_path: Path) -> None:
    """The connection breaks while the request is computed: the repeated one waits for it, and is not run."""
    stub, inside, gate = Stub(), threading.Event(), threading.Event()

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        inside.set()
        assert gate.wait(PATIENCE)

    stub.hook = hook
    with serving(tmp_path, stub) as path, Client(path) as client:
        session = client.open()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(session.extend([1, 2])))
        thread.start()
        assert inside.wait(PATIENCE)
        assert client._socket is not None
        client._socket.shutdown(socket.SHUT_RDWR)
        with Client(path) as other:
            until(lambda: other.status()["service"]["requests"] >= 7)
        gate.set()
        thread.join()
        assert found == [next_token([1, 2])]
        assert stub.count("batch") == 1


def test_a_client_without_reconnection(tmp_path: Path) -> None:
    with serving(tmp_path) as path, Client(path, reconnect=False) as client:
        session = client.open()
        assert client._socket is not None
        client._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ServiceError, match="lost|closed|broke") as caught:
            session.extend([1])
        assert (caught.value.code, caught.value.name) == (0, "lost")


def test_another_service_does_not_go_on_with_the_session(tmp_path: Path) -> None:
    """A generation that goes on from an empty session, because its service was started anew."""
    with serving(tmp_path) as path:
        client = Client(path)
        session = client.open(ID)
        session.extend([1, 2, 3])
    with pytest.raises(ServiceError, match="no service at"):
        session.extend([4])
    with serving(tmp_path) as path:
        with pytest.raises(ServiceError, match="released the session since") as caught:
            session.extend([4])
        assert caught.value.outcome == "miss"
        fresh = client.open(ID)
        assert fresh is not session
        assert fresh.extend([4]) == [next_token([4])]
        client.close()
        with pytest.raises(ServiceError, match="the client has been closed"):
            fresh.extend([5])


# Clients that go away


def test_grace(tmp_path: Path) -> None:
    """A session that ends with its client, or one that is left when the grace is over."""
    stub = Stub()
    with serving(tmp_path, stub, grace=0.05) as path, Client(path) as witness:
        with Client(path) as client:
            client.open(ID).extend([1, 2])
            client.open(b"b" * 16)
            shared = client.open(b"s" * 16)
            shared.extend([5])
            kept = witness.open(b"s" * 16)
        until(lambda: stub.count("release") == 2)
        assert {entry[1] for entry in stub.calls if entry[0] == "release"} == {ID, b"b" * 16}
        # What another client holds stays.
        assert kept.extend([6]) == [next_token([5, 6])]
        with Client(path) as client:
            assert client.open(ID).position == 0


def test_within_the_grace_a_session_goes_on(tmp_path: Path) -> None:
    stub = Stub()
    with serving(tmp_path, stub, grace=3600) as path:
        with Client(path) as client:
            client.open(ID).extend([1, 2, 3])
        with Client(path) as client:
            session = client.open(ID)
            assert session.position == 3
            assert session.extend([4]) == [next_token([1, 2, 3, 4])]
            # Its release is another client's loss too, and opening it again begins it anew.
            with Client(path) as other:
                other.open(ID).release()
                again = other.open(ID)
                assert again.position == 0
                again.extend([7, 7, 7, 7])
                with pytest.raises(ServiceError) as caught:
                    session.extend([5])
                assert caught.value.outcome == "miss"
                assert again.extend([8]) == [next_token([7, 7, 7, 7, 8])]


def test_a_session_that_is_opened_again_stays(tmp_path: Path) -> None:
    """A session that is released under the client that came back for it."""
    stub = Stub()
    later = b"l" * 16
    with serving(tmp_path, stub, grace=2) as path, Client(path) as witness:

        def alone() -> bool:
            return bool(witness.status()["service"]["connections"] == 1)

        with Client(path) as client:
            client.open(ID).extend([1, 2, 3])
        until(alone)
        again = witness.open(ID)
        assert again.position == 3
        with Client(path) as client:
            client.open(later)
        # Its grace ends after the one that has been called off.
        until(lambda: stub.count("release", later) == 1)
        assert stub.count("release", ID) == 0
        assert again.extend([4]) == [next_token([1, 2, 3, 4])]


def test_a_client_that_leaves_ends_its_long_request(tmp_path: Path) -> None:
    """Batches for somebody who is not there any more."""
    stub, inside, gate = Stub(), threading.Event(), threading.Event()

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        inside.set()
        assert gate.wait(PATIENCE)

    stub.hook = hook
    with serving(tmp_path, stub) as path, Client(path) as witness:
        with Raw(path) as raw:
            raw.ask(Type.OPEN, session=ID.hex())
            wish = {"session": ID.hex(), "number": 1, "position": 0, "tokens": [1] * 100}
            raw.send(protocol.pack(Type.EXTEND, 9, wish))
            assert inside.wait(PATIENCE)
        gate.set()
        until(lambda: witness.status()["service"]["connections"] == 1)
        assert stub.count("batch") == 1
        # And the rest of it is done if it comes again.
        assert witness.open(ID).position == N_BATCH
        with Raw(path) as raw:
            raw.ask(Type.OPEN, session=ID.hex())
            assert raw.ask(Type.EXTEND, **wish)["position"] == 100
        assert stub.count("batch") == 25


# Room


def full(never: bool) -> CapacityError:
    return CapacityError("no sequence is free", never=never)


def test_what_does_not_fit(tmp_path: Path) -> None:
    stub = Stub()

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        raise full(tokens[0] == 99)

    stub.hook = hook
    with serving(tmp_path, stub, when_full="refuse") as path, Client(path) as client:
        session = client.open()
        with pytest.raises(ServiceError, match="no sequence is free") as caught:
            session.extend([1])
        assert (caught.value.name, caught.value.outcome, caught.value.position) == ("full", "full", 0)
        with pytest.raises(ServiceError) as caught:
            session.extend([99])
        assert caught.value.name == "limit"
        batches = stub.count("batch")
        with pytest.raises(ServiceError, match=f"201 positions do not fit a session of {ROOM}") as caught:
            session.extend([1] * 201)
        assert caught.value.name == "limit"
        assert stub.count("batch") == batches


def test_waiting_for_room(tmp_path: Path) -> None:
    """A wait that holds up the release that it waits for, or one without an end."""
    stub = Stub()
    holder = b"h" * 16

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        if session.id != holder and not stub.count("release", holder):
            raise full(False)

    stub.hook = hook
    with serving(tmp_path, stub, when_full="wait", wait=3600) as path, Client(path) as one, Client(path) as two:
        held, found = one.open(holder), []
        held.extend([1])
        waiting = two.open(ID)
        thread = threading.Thread(target=lambda: found.extend(waiting.extend([2])))
        thread.start()
        until(lambda: stub.count("batch", ID) >= 1)
        assert held.extend([3]) == [next_token([1, 3])]
        held.release()
        thread.join()
        assert found == [next_token([2])]
    stub.calls.clear()
    with serving(tmp_path, stub, when_full="wait", wait=0.05) as path, Client(path) as client:
        with pytest.raises(ServiceError, match=r"no room in 0\.05 seconds: no sequence is free") as caught:
            client.open(ID).extend([1])
        assert (caught.value.name, caught.value.outcome) == ("full", "full")


def test_a_wait_ends_with_its_client_and_with_the_service(tmp_path: Path) -> None:
    stub = Stub()

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        raise full(False)

    stub.hook = hook
    failures: list[str] = []

    def work(client: Client) -> None:
        with pytest.raises(ServiceError) as caught:
            client.open(ID).extend([1])
        failures.append(caught.value.name)

    with serving(tmp_path, stub, when_full="wait", wait=3600) as path, Client(path) as witness:
        waiting = Client(path)
        for leaves in (True, False):
            before = stub.count("batch")
            thread = threading.Thread(target=work, args=(waiting if leaves else Client(path),))
            thread.start()
            until(lambda before=before: stub.count("batch") > before)
            if leaves:
                waiting.close()
                thread.join()
                until(lambda: witness.status()["service"]["connections"] == 1)
    thread.join()
    assert failures[0] == "lost"
    assert failures[1] in ("lost", "closing")


# Over the session pipeline


@contextlib.contextmanager
def clustered(tmp_path: Path, cluster: Cluster, *, when_full: str = "evict", **limits: Any) -> Iterator[Path]:
    """The service over the real session pipeline, on shards that are plain Python."""
    room = "evict" if when_full == "evict" else "refuse"
    with (
        SessionPipeline(cluster.start, cluster.plan, when_full=room) as pipeline,
        serving(tmp_path, pipeline, when_full=when_full, **limits) as path,
    ):
        yield path


def greedy(cluster: Cluster, prompt: Sequence[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(int(cluster.expected(history)[-1].argmax()))
    return history[len(prompt) :]


@pytest.mark.parametrize("fault", ["die", "die_after", "lose"])
def test_workers_that_die_are_a_delay(fault: str, tmp_path: Path) -> None:
    """A client that sees another text, or an error, because a worker was lost while it or another one generated."""
    cluster = Cluster(FakeModel(slots=3))

    def prepare(shard: FakeShard) -> None:
        left = itertools.count(20 + 7 * (shard.pid % 5), -1)
        shard.fault = lambda shard, kind: fault if kind == WorkerType.DECODE and next(left) == 0 else None

    cluster.prepare = prepare

    def work(path: Path, seed: int) -> None:
        prompt = [seed, 3, 5, *range(seed)]
        with Client(path) as client, client.open() as session:
            wanted = greedy(cluster, prompt, 12)
            assert list(session.generate(prompt, 12, stop=())) == wanted
            session.truncate(5)
            whole = [*prompt, *wanted][:5]
            assert list(session.generate([7], 6, stop=())) == greedy(cluster, [*whole, 7], 6)

    with clustered(tmp_path, cluster) as path, Client(path) as witness:
        together(*(functools.partial(work, path, seed) for seed in range(6)))
        status = witness.status()
    assert status["evictions"] > 0
    assert status["replays"] > 0
    assert (status["restarts"] if fault != "lose" else status["resets"]) >= 3
    assert status["sessions"] == []


def test_a_worker_that_cannot_be_started_again(tmp_path: Path) -> None:
    """A client that waits for ever, or a service that does not come back when the worker can be started after all."""
    cluster = Cluster()
    with clustered(tmp_path, cluster) as path, Client(path) as client:
        session = client.open()
        session.extend([1, 2, 3])

        def prepare(shard: FakeShard) -> None:
            shard.fault = lambda shard, kind: "die"

        cluster.prepare = prepare
        cluster[1].die()
        with pytest.raises(ServiceError, match="the fake is dead") as caught:
            session.extend([4])
        assert (caught.value.name, caught.value.shard, caught.value.position) == ("worker", (2, 4), 3)
        assert [shard["alive"] for shard in client.status()["shards"]] == [True, False, True]
        cluster.prepare = lambda shard: None
        assert session.extend([4]) == [int(cluster.expected([1, 2, 3, 4])[-1].argmax())]


def test_sessions_of_more_clients_than_places(tmp_path: Path) -> None:
    cluster = Cluster(FakeModel(slots=2))
    with clustered(tmp_path, cluster, when_full="refuse") as path, Client(path) as client:
        one, two, three = client.open(), client.open(), client.open()
        one.extend([1])
        two.extend([2])
        with pytest.raises(ServiceError, match="there is no room now: all 2 sequences are taken") as caught:
            three.extend([3, 4])
        assert (caught.value.name, caught.value.outcome) == ("full", "full")
        told = {session["id"]: session for session in client.status()["sessions"]}
        assert [told[each.id.hex()]["hot"] for each in (one, two, three)] == [True, True, False]
        assert [told[each.id.hex()]["clients"] for each in (one, two, three)] == [1, 1, 1]
        one.release()
        assert three.extend([3, 4]) == [int(cluster.expected([3, 4])[-1].argmax())]
        with pytest.raises(ServiceError, match="65 positions do not fit a session of 64") as caught:
            three.extend([1] * 63)
        assert caught.value.name == "limit"
        assert three.extend([1] * 62) != []
    cluster = Cluster(FakeModel(slots=2))
    with clustered(tmp_path, cluster, when_full="wait", wait=3600) as path, Client(path) as client:
        one, two, three = client.open(), client.open(), client.open()
        one.extend([1])
        two.extend([2])
        found: list[int] = []
        with Client(path) as other:
            waiting = other.open(three.id)

            def release() -> None:
                until(lambda: client.status()["service"]["requests"] > 10)
                two.release()

            together(lambda: found.extend(waiting.extend([3, 4])), release)
        assert found == [int(cluster.expected([3, 4])[-1].argmax())]


# Errors


def test_errors_of_workers(tmp_path: Path) -> None:
    """A reason that does not reach the client."""
    stub = Stub()
    refused = SessionRefused(12, "session", "recipe differs in n_ctx", (0, 2), "open", {})
    refused.outcome = Outcome.INCOMPATIBLE_RECIPE
    errors: list[Exception] = [refused, PipelineError("no worker stands")]

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        if errors:
            raise errors.pop(0)

    stub.hook = hook
    with serving(tmp_path, stub) as path, Client(path) as client, client.open() as session:
        with pytest.raises(ServiceError) as caught:
            session.extend([1])
        error = caught.value
        assert (error.name, error.outcome, error.shard) == ("session", "incompatible_recipe", (0, 2))
        assert (error.operation, error.cause) == ("extend", "recipe differs in n_ctx")
        assert error.details["worker_operation"] == "open"
        assert error.session == session.id
        with pytest.raises(ServiceError, match="no worker stands"):
            session.extend([1])
        assert session.extend([1]) == [next_token([1])]
        session.truncate(0)
        with pytest.raises(ServiceError, match="there is no saved session absent"):
            session.restore("absent")


def test_what_nobody_foresaw(tmp_path: Path) -> None:
    """A fault of ours that ends the service, or that nobody hears of."""
    stub: Any = Stub()

    def hook(session: StubSession, tokens: Sequence[int]) -> None:
        raise ZeroDivisionError("a fault")

    stub.hook = hook
    lines: list[str] = []
    with Address(tmp_path / "socket") as address:
        service = Service(stub, log=lines.append)
        thread = threading.Thread(target=service.run, args=(address.socket,))
        thread.start()
        with Client(address.path) as client:
            with pytest.raises(ServiceError, match="error 9 internal: ZeroDivisionError: a fault"):
                client.open().extend([1])
            assert client.tokenize("") == [1]
        service.stop()
        thread.join()
    assert lines == ["extend failed: ZeroDivisionError: a fault"]


# Messages


def header(**changes: Any) -> bytes:
    fields = {"magic": b"BBSV", "type": 10, "r1": 0, "request": 7, "text": 0, "r2": 0, "r3": 0, **changes}
    return struct.pack("<4sHHQIIQ", *fields.values())


@pytest.mark.parametrize(
    "changes", [{"magic": b"BBWP"}, {"r1": 1}, {"r2": 1}, {"r3": 1}, {"text": (1 << 20) + 1}, {"text": 0xFFFFFFFF}]
)
def test_unsound_headers(changes: dict[str, Any], tmp_path: Path) -> None:
    with serving(tmp_path) as path, Client(path) as client:
        with Raw(path) as raw:
            raw.send(header(**changes))
            found = raw.answer()
            assert (found["name"], found["code"], found["request"]) == ("frame", 22, 0)
            assert raw.closed()
        assert client.tokenize("") == [1]


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b"7", b"\xff\xff", b'{"a": nope}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000]
)
def test_texts_that_are_no_objects(text: bytes, tmp_path: Path) -> None:
    """A connection, or more, that a wrong text ends."""
    with serving(tmp_path) as path, Raw(path) as raw:
        raw.send(header(text=len(text)) + text)
        found = raw.answer()
        assert (found["name"], found["request"]) == ("json", 7)
        assert raw.ask(Type.TOKENIZE, text="a")["tokens"] == [1, 97]


OPENED = {"session": ID.hex()}
WORK = {**OPENED, "number": 1, "position": 0, "tokens": [1]}


@pytest.mark.parametrize(
    ("kind", "wish"),
    [
        *((Type.OPEN, {"session": value}) for value in (None, 5, "", "ab", "G" * 32, "A" * 32, "0" * 31, "0" * 33)),
        (Type.OPEN, {}),
        *((Type.EXTEND, {**WORK, "tokens": value}) for value in (None, [], "x", [N_VOCAB], [-1], [1.0], [True], [[]])),
        *((Type.EXTEND, {**WORK, "position": value}) for value in (-1, "0", None, 1.5, True, 1 << 31)),
        *((Type.EXTEND, {**WORK, "number": value}) for value in (0, -1, "1", None, 1 << 53)),
        *((Type.EXTEND, {**WORK, "outputs": value}) for value in ("some", None, 1, ["last"])),
        *((Type.TRUNCATE, {**OPENED, "number": 1, "position": value}) for value in (-1, None, "0")),
        *((Type.SAVE, {**OPENED, "name": value}) for value in (None, "", "..", "../x", "a/b", ".x", "a" * 101, "a\0")),
        (Type.RESTORE, {**OPENED, "number": 1, "name": "/etc/passwd"}),
        *((Type.TOKENIZE, {"text": value}) for value in (None, 5, ["a"], "a\ud800", "\udfff\ud800")),
        (Type.TOKENIZE, {"text": "", "add_special": 1}),
        *((Type.DETOKENIZE, {"tokens": value}) for value in (None, [N_VOCAB], [None])),
    ],
)
def test_illegal_values(kind: Type, wish: dict[str, Any], tmp_path: Path) -> None:
    """A value that is taken for what it is not, or that ends the connection."""
    stub = Stub()
    with serving(tmp_path, stub) as path, Raw(path) as raw:
        raw.ask(Type.OPEN, **OPENED)
        found = raw.ask(kind, **wish)
        assert (found["type"], found["name"]) == (Type.ERROR, "argument"), found
        assert found["operation"] == kind.name.lower()
        assert raw.ask(Type.EXTEND, **WORK)["sampled"] == [next_token([1])]


def test_hello_comes_first(tmp_path: Path) -> None:
    with serving(tmp_path) as path, Raw(path, hello=False) as raw:
        for kind in Type:
            if kind not in (Type.HELLO, Type.ERROR):
                assert raw.ask(kind)["name"] == "protocol"
        for wish in ({}, {"major": 2, "minors": [0]}, {"major": 1}, {"major": 1, "minors": [7]}, {"minors": [[]]}):
            assert raw.ask(Type.HELLO, **wish)["name"] == "protocol"
        assert raw.ask(Type.HELLO, major=1, minors=[0, 9])["minor"] == 0
        for kind in (0, 11, 500, 0x7FFF, 0x800A):
            assert raw.ask(kind)["name"] == "protocol"
        assert raw.ask(Type.EXTEND, **WORK)["outcome"] == "miss"
        assert raw.ask(Type.RELEASE, **OPENED)["released"] is False
        assert raw.ask(Type.STATUS)["service"]["errors"] > 10


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_messages(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes after which the service says nothing more to anybody."""
    stream = bytearray(
        protocol.pack(Type.HELLO, 1, {"major": 1, "minors": [0]})
        + protocol.pack(Type.OPEN, 2, OPENED)
        + protocol.pack(Type.EXTEND, 3, WORK)
        + protocol.pack(Type.STATUS, 4)
    )
    for _ in range(data.draw(st.integers(0, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(stream)))
    with serving(tmp_path_factory.mktemp("damaged")) as path, Client(path) as client:
        with Raw(path, hello=False) as raw, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            raw.send(bytes(stream[:end]))
            raw.socket.shutdown(socket.SHUT_WR)
            while raw.socket.recv(1 << 16):
                pass
        assert client.open(b"w" * 16).extend([3]) == [next_token([3])]


# Limits


def test_connections_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, connections=3) as path:
        clients = [Client(path) for _ in range(3)]
        with pytest.raises(ServiceError, match="there are 3 connections already") as caught:
            Client(path)
        assert caught.value.name == "connections"
        clients.pop().close()
        until(lambda: clients[0].status()["service"]["connections"] == 2)
        Client(path).close()
        for client in clients:
            client.close()


def test_sessions_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, sessions=2) as path, Client(path) as client:
        first = client.open()
        client.open()
        with pytest.raises(ServiceError, match="there are 2 sessions already") as caught:
            client.open()
        assert caught.value.name == "limit"
        first.release()
        client.open()


@pytest.mark.parametrize("begun", [b"", header()[:10], header(text=10) + b"{"])
def test_a_silent_client_is_let_go(begun: bytes, tmp_path: Path) -> None:
    """A connection that waits for the rest of a message, or for the next one, for ever."""
    stub = Stub()
    limits = {"idle": 0.05} if not begun else {"stall": 0.05}
    with serving(tmp_path, stub, grace=0.01, **limits) as path, Raw(path) as raw:
        raw.ask(Type.OPEN, **OPENED)
        raw.send(begun)
        assert raw.closed()
        until(lambda: stub.count("release") == 1)


def test_a_client_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    """A thread, and a session, that a full socket holds for ever."""
    stub = Stub()
    with serving(tmp_path, stub, grace=0.01, stall=0.05) as path, Raw(path) as raw, Client(path) as client:
        raw.ask(Type.OPEN, **OPENED)
        message = protocol.pack(Type.DETOKENIZE, 5, {"tokens": [200] * 50_000})
        raw.socket.settimeout(0.2)
        with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
            while True:
                raw.send(message)
        until(lambda: stub.count("release") == 1)
        assert client.tokenize("") == [1]


# The socket


def test_the_socket_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with serving(tmp_path) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_the_default_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others may enter, or one that is left."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Address() as address:
        assert address.path == tmp_path / "boundary-bundle" / "serve.sock"
        assert stat.S_IMODE(address.path.parent.stat().st_mode) == 0o700
        with pytest.raises(AddressError, match="a server listens there already"):
            Address()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Address() as address:
        assert address.path == tmp_path / f"boundary-bundle-{os.getuid()}" / "serve.sock"
    folder = tmp_path / f"boundary-bundle-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(AddressError, match="alone"):
        Address()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AddressError, match="alone"):
        Address()


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with serving(tmp_path), Client(path) as client:
        with pytest.raises(AddressError, match="a server listens there already"):
            Address(path)
        assert client.tokenize("") == [1]
    # One that listens and takes nobody, however many wait.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(path))
        with pytest.raises(AddressError, match="a server listens there already"):
            Address(path)
        for one in waiting:
            one.close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(AddressError, match="not a socket"):
        Address(path)
    assert path.read_text() == "precious"
    for bad in (tmp_path / "no" / "socket", tmp_path / ("x" * 120), Path("a\0b"), path / "socket"):
        with pytest.raises(AddressError, match="cannot listen on"):
            Address(bad)


_CONTENDER = """
import sys
from boundary_bundle.shards.service import Address, AddressError
from pathlib import Path

for line in sys.stdin:
    try:
        address = Address(Path(line.strip()))
        print("had", flush=True)
    except AddressError as error:
        address = None
        print(error, flush=True)
    sys.stdin.readline()
    if address is not None:
        address.close()
    print("left", flush=True)
"""


def test_one_of_several_replaces_a_dead_socket(tmp_path: Path) -> None:
    """Two servers that find the same dead socket at the same time, of which one removes what the other has bound."""
    contenders = [
        subprocess.Popen([sys.executable, "-c", _CONTENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]

    def ask(line: str) -> list[str]:
        for one in contenders:
            assert one.stdin is not None
            one.stdin.write(line)
            one.stdin.flush()
        return sorted(one.stdout.readline().strip() for one in contenders if one.stdout is not None)

    try:
        for number in range(40):
            path = tmp_path / f"socket{number}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
                dead.bind(str(path))
            refused = f"cannot listen on {path}: a server listens there already"
            assert ask(f"{path}\n") == [refused] * 3 + ["had"]
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(str(path))
            assert ask("\n") == ["left"] * 4
            assert not path.exists()
    finally:
        for one in contenders:
            one.kill()
            one.communicate()


def test_the_socket_of_another_server_is_left(tmp_path: Path) -> None:
    """A server that ends and takes the socket of its successor with it."""
    path = tmp_path / "socket"
    first = Address(path)
    path.rename(tmp_path / "old")
    with Address(path):
        first.close()
        assert path.exists()
    assert not path.exists()


def test_a_service_that_is_only_just_started(tmp_path: Path) -> None:
    """A client that gives up before its time."""
    found: list[int] = []

    def work() -> None:
        with Client(tmp_path / "socket", wait=PATIENCE) as client:
            found.extend(client.tokenize(""))

    thread = threading.Thread(target=work)
    thread.start()
    with serving(tmp_path):
        thread.join()
    assert found == [1]


def test_there_is_no_service(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=f"no service at {tmp_path}/socket: No such file"):
        Client(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(ServiceError, match="Connection refused"):
        Client(tmp_path / "dead")


@pytest.mark.parametrize("answer", [b"x" * 32, header(type=0x8001, request=9), header(type=0x8001, text=2) + b"[]"])
def test_answers_that_make_no_sense(answer: bytes, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def play() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(ServiceError) as caught:
            Client(path)
        assert (caught.value.code, caught.value.name) == (0, "reply")
        thread.join()


def test_a_service_that_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(ServiceError, match=r"no answer in 0\.05 seconds") as caught:
            Client(path, timeout=0.05)
        assert caught.value.name == "timeout"


def test_the_protocol_is_as_it_is_written() -> None:
    """A type or an error that the specification does not have, or has under another number."""
    text = (Path(__file__).parent.parent / "spec" / "service-protocol.md").read_text("utf-8")
    for kind in Type:
        number = "0x7FFF (reply 0xFFFF)" if kind is Type.ERROR else str(int(kind))
        assert f"| {number} | {kind.name.lower()} |" in text
    for code, name in protocol.ERRORS.items():
        assert f"| {code} | {name} |" in text
    assert f"version {protocol.MAJOR}.{max(protocol.MINORS)}" in text
    assert json.dumps({"major": protocol.MAJOR, "minors": protocol.MINORS}) in text


# top


def look(pid: int, tokens: int, compute: int, uptime: int) -> dict[str, Any]:
    counters = {"tokens": tokens, "compute_us": compute, "uptime_ms": uptime} if uptime else {}
    return {"pid": pid, "counters": counters}


def test_rates_of_shards() -> None:
    """A rate below nothing after a restart, or a division by it."""
    first = top.with_rates(
        {"shards": [look(1, 100, 500_000, 2000), look(2, 100, 1_500_000, 2000), look(3, 0, 0, 0)]}, None
    )
    assert [shard["tokens_per_second"] for shard in first["shards"]] == [50, 50, 0]
    assert [shard["busy"] for shard in first["shards"]] == [0.25, 0.75, 0]
    assert [shard["compute_share"] for shard in first["shards"]] == [0.25, 0.75, 0]
    then = top.with_rates({"shards": [look(1, 130, 600_000, 3000), look(9, 10, 100_000, 500), look(3, 0, 0, 0)]}, first)
    assert [shard["tokens_per_second"] for shard in then["shards"]] == [30, 20, 0]
    assert [shard["busy"] for shard in then["shards"]] == [0.1, 0.2, 0]
    assert [shard["compute_share"] for shard in then["shards"]] == [0.5, 0.5, 0]
    # A service that took another's place, with more shards.
    more = top.with_rates({"shards": [look(7, 10, 0, 1000), look(8, 10, 0, 1000)]}, {"shards": then["shards"][:1]})
    assert [shard["tokens_per_second"] for shard in more["shards"]] == [10, 10]
    same = top.with_rates({"shards": [look(1, 130, 600_000, 3000)]}, {"shards": then["shards"][:1]})
    assert [same["shards"][0][key] for key in ("tokens_per_second", "busy", "compute_share")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (3725, "1h02m"), (4 * 86400 + 3 * 3600, "4d03h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert top.duration(seconds) == text


def test_top_without_rich(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback on a terminal where an optional package is missing."""
    for name in ("rich.live", "rich.box"):
        monkeypatch.setitem(sys.modules, name, None)
    with clustered(tmp_path, Cluster()) as path, Client(path) as client:
        client.open(ID).extend([1, 2, 3])
        status = client.status() | {"socket": "a\x1b[31mb"}
    top._show_live(iter([top.with_rates(status, None)]))
    out, _ = capsys.readouterr()
    assert out.startswith("\x1b[H\x1b[2J")
    assert "\x1b[31m" not in out
    assert "a\\x1b[31mb" in out
    assert re.search(rf"^  {ID.hex()[:8]} +\+0 +3 +0 +hot +1 ", out, re.MULTILINE), out
