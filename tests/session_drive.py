"""Help for the tests of sessions: models of each kind of memory, batches under sessions, the reference that mirrors."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from session_model import HIT, Answer, Row, Table, Truncation

from boundary_bundle import Bundle, decode, encode
from boundary_bundle.families.models import Variant, make_model
from boundary_bundle.shards import (
    Batch,
    Description,
    LocalWorker,
    Reply,
    SessionRefused,
    SessionRow,
    Settings,
    Worker,
    WorkerError,
    protocol,
    tiny_models,
)
from boundary_bundle.shards.protocol import Type
from boundary_bundle.shards.worker import Pending, refusal

Logits = npt.NDArray[np.float32]

#: Examples of all state machines together; a long run sets the variable to 2000.
EXAMPLES = int(os.environ.get("BOUNDARY_BUNDLE_SESSION_EXAMPLES", "100"))
#: State machines among which they are shared: five of one worker, six of several.
MACHINES = 11


def profile(steps: int, examples: int | None = None) -> settings:
    """Settings of one state machine."""
    return settings(
        max_examples=examples or max(1, EXAMPLES // MACHINES),
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@dataclass(frozen=True)
class Kind:
    """A kind of memory: how to make a tiny model that has it, and what of it a table must know.

    ``endless`` memories have no cells that could run out.
    """

    write: Callable[[Path], object]
    n_layer: int
    n_vocab: int
    settings: Settings
    truncation: Truncation = "always"
    endless: bool = False

    def table(self) -> Table:
        chosen = self.settings
        cells = chosen.ctx if chosen.kv_unified else chosen.ctx // chosen.seqs
        return Table(
            chosen.seqs,
            1 << 30 if self.endless else cells,
            unified=chosen.kv_unified,
            truncation=self.truncation,
        )


def _family(architecture: str) -> Callable[[Path], object]:
    return lambda path: make_model(Variant(architecture, "dense"), path)


# The library gives each sequence a multiple of 256 cells; windows, of 16 positions, have 256.
KINDS: dict[str, Kind] = {
    "plain": Kind(
        lambda path: tiny_models.write(path, "tied"), 7, 320, Settings(threads=1, ctx=768, batch=64, ubatch=16, seqs=3)
    ),
    # 256 cells for all sequences together: they run out, and are used again in another order.
    "unified": Kind(
        lambda path: tiny_models.write(path, "gqa"),
        8,
        320,
        Settings(threads=1, ctx=256, batch=64, ubatch=16, seqs=3, kv_unified=True),
    ),
    "window": Kind(
        _family("gemma3"),
        6,
        128,
        Settings(threads=1, ctx=1536, batch=128, ubatch=32, seqs=3, swa_full=False),
        truncation="window",
    ),
    "hybrid": Kind(
        _family("jamba"), 6, 128, Settings(threads=1, ctx=768, batch=64, ubatch=16, seqs=3), truncation="never"
    ),
    "recurrent": Kind(
        _family("mamba"),
        6,
        128,
        Settings(threads=1, ctx=768, batch=64, ubatch=16, seqs=3),
        truncation="never",
        endless=True,
    ),
}


def write_models(folder: Path) -> dict[str, Path]:
    """A tiny model of each kind, by name."""
    found = {}
    for name, kind in KINDS.items():
        found[name] = folder / f"{name}.gguf"
        kind.write(found[name])
    return found


@dataclass(frozen=True)
class Talk:
    """A batch under sessions: the rows of its session table, and of each token in batch order the row whose next token
    it is, and whether it is an output."""

    rows: Sequence[Row]
    order: Sequence[int]
    outputs: Sequence[bool]

    def _columns(self) -> tuple[list[int], list[int]]:
        """Token ids and positions in batch order."""
        done = [0] * len(self.rows)
        tokens, positions = [], []
        for number in self.order:
            row = self.rows[number]
            tokens.append(row.tokens[done[number]])
            positions.append(row.position + done[number])
            done[number] += 1
        return tokens, positions

    def bundle(self, model: Description, recipe: bytes | None = None) -> bytes:
        """The token request (specification, 5.1), perhaps with a recipe's fingerprint."""
        tokens, positions = self._columns()
        table = [SessionRow(row.session, row.epoch, row.position) for row in self.rows]
        batch = Batch(tokens, positions, [(number,) for number in self.order], self.outputs, table)
        bundle = batch.bundle(model)
        if recipe is not None:
            bundle = Bundle(bundle.tensors, {**dict(bundle.attributes), "recipe_fingerprint": recipe})
        return encode(bundle)

    def batch(self, slots: Sequence[int]) -> Batch:
        """The same without sessions; row r lies in local sequence ``slots[r]``."""
        tokens, positions = self._columns()
        return Batch(tokens, positions, [(slots[number],) for number in self.order], self.outputs)

    @classmethod
    def of_bundle(cls, data: bytes | memoryview) -> Talk:
        """Read a token request back."""
        bundle = decode(data)
        names = ("token_ids", "seq_ids", "session_ids", "session_epochs", "session_positions", "outputs")
        tokens, order, ids, epochs, positions, outputs = (np.asarray(bundle[name]).tolist() for name in names)
        rows = [
            Row(bytes(id_), epoch, position, [token for token, row in zip(tokens, order, strict=True) if row == number])
            for number, (id_, epoch, position) in enumerate(zip(ids, epochs, positions, strict=True))
        ]
        return cls(rows, order, outputs)


class Reference:
    """One unsplit worker on the unpatched library, whose local sequences are those of a :class:`Table`."""

    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker
        self.model = worker.describe()

    def clear(self) -> None:
        self.worker.clear()

    def follow(self, answer: Answer) -> None:
        """Do to the memory what the answer says has been done."""
        for slot, start in answer.cuts:
            self.worker.clear(slot, start)

    def decode(self, table: Table, talk: Talk) -> Logits:
        """The logits of the batch; ``table`` is as before it."""
        batch = talk.batch([table.live[row.session].slot for row in talk.rows])
        reply = self.worker.request(Type.DECODE, {"logits": True, "sample": False}, encode(batch.bundle(self.model)))
        return logits_of(reply.result().bundle)


T = TypeVar("T")


def attempt(call: Callable[[], T]) -> T | SessionRefused:
    """The refusal, if it is one, as a value."""
    try:
        return call()
    except SessionRefused as error:
        return error


def logits_of(data: bytes | memoryview) -> Logits:
    return np.array(decode(data)["logits"], np.float32)


def differing(ours: Logits, theirs: Logits) -> int:
    """Logits that differ in a bit."""
    assert ours.shape == theirs.shape
    return int(np.count_nonzero(ours.view(np.uint32) != theirs.view(np.uint32)))


# -- several workers, watched


@dataclass
class Entry:
    """One request to a worker as it went over the wire; ``type`` None: a new process, with an empty table."""

    layers: tuple[int, int]
    type: int | None
    text: dict[str, Any] = field(default_factory=dict)
    bundle: bytes = b""
    pending: Pending | None = None
    error: WorkerError | None = None

    def answer(self) -> Reply | WorkerError:
        if self.error is not None:
            return self.error
        assert self.pending is not None
        try:
            return self.pending.result()
        except WorkerError as error:
            return error


@dataclass
class Trap:
    """What happens when a worker is sent the next decode but ``countdown``: before it is sent, or after."""

    layers: tuple[int, int]
    countdown: int
    before: bool
    act: Callable[[], None]
    sprung: bool = False


class Tap:
    """Everything that goes to the workers of one pipeline, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.trap: Trap | None = None

    def came_up(self, layers: tuple[int, int]) -> None:
        self.entries.append(Entry(layers, None))

    def take(self) -> list[Entry]:
        """What has come since the last time."""
        taken, self.entries = self.entries, []
        return taken

    def request(
        self, send: Callable[..., Pending], layers: tuple[int, int], type: int, text: Any, bundle: Any
    ) -> Pending:
        entry = Entry(layers, type, dict(text or {}), bytes(bundle) if layers[0] == 0 else b"")
        self.entries.append(entry)
        trap = self.trap
        here = trap is not None and type == Type.DECODE and trap.layers == layers and not trap.sprung
        if trap is not None and here:
            trap.sprung, trap.countdown = trap.countdown == 0, trap.countdown - 1
            here = trap.sprung
        try:
            if trap is not None and here and trap.before:
                trap.act()
            entry.pending = send(type, text, bundle)
        except WorkerError as error:
            entry.error = error
            raise
        if trap is not None and here and not trap.before:
            trap.act()
        return entry.pending


class TappedWorker(LocalWorker):
    """A child process as everybody has them, watched."""

    def __init__(self, tap: Tap, *arguments: Any, **options: Any) -> None:
        self._tap = tap
        super().__init__(*arguments, **options)

    def request(self, type: int, text: Any = None, bundle: Any = b"") -> Pending:
        return self._tap.request(super().request, self.layer_range, type, text, bundle)


class _Answered:
    def __init__(self, reply: Reply | WorkerError) -> None:
        self._reply = reply

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Reply:
        if isinstance(self._reply, WorkerError):
            raise self._reply
        return self._reply


class SocketWorker(Worker):
    """A connection to a worker that listens; closing it leaves the process alone. One request at a time."""

    def __init__(self, path: Path, layers: tuple[int, int], tap: Tap | None = None) -> None:
        self.layer_range = layers
        self._tap = tap
        self._number = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        try:
            self._socket.connect(str(path))
            self._send(Type.HELLO, {"major": protocol.MAJOR, "minors": protocol.MINORS}).result()
        except (OSError, WorkerError):
            self._socket.close()
            raise

    def request(self, type: int, text: Any = None, bundle: Any = b"") -> Pending:
        if self._tap is None:
            return self._send(type, text, bundle)
        return self._tap.request(self._send, self.layer_range, type, text, bundle)

    def hang_up(self) -> None:
        """Without a word to whoever uses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _send(self, type: int, text: Any = None, bundle: Any = b"") -> Pending:
        self._number += 1
        try:
            self._socket.sendall(protocol.pack(type, self._number, text, len(bundle)) + bytes(bundle))
            header = protocol.unpack_header(self._receive(protocol.HEADER_BYTES))
            said = protocol.parse_text(self._receive(header.text_length))
            body = self._receive(header.bundle_length)
        except OSError as error:
            raise WorkerError(0, "lost", f"the connection is gone ({error})", self.layer_range, str(type)) from None
        assert header.request == self._number
        if header.type == Type.ERROR:
            return _Answered(refusal(said, self.layer_range, str(type)))
        return _Answered(Reply(said, memoryview(body).toreadonly()))

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("closed by the worker")
            data += piece
        return bytes(data)


class Listening:
    """A worker process on a socket."""

    def __init__(self, program: Path, model: Path, layers: tuple[int, int], chosen: Settings, *options: str) -> None:
        self.layers = layers
        # A socket's path must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="bb-")
        self.path = Path(self._folder.name, "socket")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [str(program), "--model", str(model), "--range", f"{layers[0]}:{layers[1]}", *chosen.arguments()]
        self.process = subprocess.Popen([*command, *options, "--socket", str(self.path)], stderr=self._errors)

    def connect(self, tap: Tap | None = None) -> SocketWorker:
        """Waits until the model stands."""
        end = time.monotonic() + 60
        while True:
            try:
                return SocketWorker(self.path, self.layers, tap)
            except (FileNotFoundError, ConnectionRefusedError):
                assert self.process.poll() is None, f"the worker ended with status {self.process.returncode}"
                assert time.monotonic() < end, "the worker does not listen"
                time.sleep(0.002)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._errors.close()
        self._folder.cleanup()


#: Requests that a reference has nothing to do with.
_IDLE = (Type.HELLO, Type.DESCRIBE, Type.STATISTICS, Type.SESSIONS, Type.TOKENIZE, Type.DETOKENIZE, Type.SHUTDOWN)


class Mirror:
    """What the first shard was told, done to a table and to a reference: how each answer should have been."""

    def __init__(self, kind: Kind, reference: Reference) -> None:
        self.table = kind.table()
        self.reference = reference
        #: Of the last batch that was computed.
        self.logits: Logits | None = None
        self.clear()

    def clear(self) -> None:
        self.table.clear()
        self.reference.clear()
        self.logits = None

    def absorb(self, entries: Sequence[Entry]) -> None:
        """In order, those of the first shard. Raises AssertionError for an answer that should have been another."""
        for entry in entries:
            if entry.layers[0] == 0 and entry.type not in _IDLE:
                self._absorb(entry)

    def _absorb(self, entry: Entry) -> None:
        if entry.type is None:
            self.clear()
            return
        answer = entry.answer()
        if isinstance(answer, WorkerError) and not isinstance(answer, SessionRefused):
            assert answer.name == "lost", answer
            return
        outcome = answer.outcome.value if isinstance(answer, SessionRefused) else HIT
        if entry.type == Type.CLEAR:
            assert not entry.text
            self.clear()
        elif entry.type == Type.DECODE:
            self._decode(entry, outcome)
        else:
            expected = self._request(entry, outcome)
            assert outcome == expected.outcome, (entry, expected, answer)
            self.reference.follow(expected)

    def _decode(self, entry: Entry, outcome: str) -> None:
        talk = Talk.of_bundle(entry.bundle)
        held = [self.table.live.get(row.session) for row in talk.rows]
        if outcome == HIT and all(
            live is not None and live.tokens[row.position :] == row.tokens and live.epoch == row.epoch
            for live, row in zip(held, talk.rows, strict=True)
        ):
            return  # sent once more, and answered once more
        expected = self.table.decode(talk.rows)
        assert outcome == expected.outcome, (talk, expected)
        if outcome == HIT:
            self.logits = self.reference.decode(self.table, talk)

    def _request(self, entry: Entry, outcome: str) -> Answer:
        text, table = entry.text, self.table
        session = bytes.fromhex(text["session"]) if "session" in text else None
        if entry.type == Type.EVICT:
            return table.evict(session)
        assert session is not None
        epoch = text["epoch"]
        if entry.type == Type.OPEN:
            return table.open(session, epoch, text["position"])
        if entry.type == Type.TRUNCATE:
            return table.truncate(session, epoch, text["position"], observed=outcome)
        if entry.type == Type.RELEASE:
            return table.release(session, epoch)
        assert entry.type == Type.PIN, entry
        return table.pin(session, epoch, text["pinned"])


def listing_of(worker: Worker) -> list[dict[str, Any]]:
    """A worker's own list, as :meth:`Table.listing` gives it."""
    names = ("session", "epoch", "position", "pinned", "state")
    rows = worker.request(Type.SESSIONS, {"forgotten": True}).result().text["sessions"]
    return [{**{name: row[name] for name in names}, "position": row["position"] or 0} for row in rows]
