"""One shard worker, behind one small interface.

A worker is whatever can take a request and give the reply later: :class:`Worker` asks for three
methods. :class:`LocalWorker` is a child process that speaks spec/worker-protocol.md on its standard
streams. An engine that places workers on other hosts brings its own class and its own transport.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import re
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ..contract import Contract, TensorRule
from . import protocol
from .protocol import Outcome, ProtocolError, Type

Bytes = bytes | bytearray | memoryview

#: Seconds that a worker may be silent while it owes an answer, and while it still loads its model.
REQUEST_TIMEOUT: Final = 120.0
LOAD_TIMEOUT: Final = 600.0
#: The types that keys and values may have in a worker's cache.
CACHE_TYPES: Final = ("f16", "q8_0", "f32")
#: Seconds that workers that are closed together have to end by themselves.
CLOSE_GRACE: Final = 3.0

#: Seconds that a thread whose patience is at its end leaves another one to take what has come.
_LATE: Final = 0.1
#: The code of what is more than a worker takes.
_LIMIT: Final = 8

_NO_BYTES = memoryview(b"")
_REFUSAL = re.compile(r"^shard_worker: error (\d+) (\w+): (.*)$", re.MULTILINE)


class WorkerError(Exception):
    """A worker refused a request, or is gone.

    ``code`` and ``name`` are the protocol's (spec/worker-protocol.md, Errors), or 0 with ``lost`` (the
    process ended, or has been closed), ``timeout`` or ``reply`` (an answer that makes no sense).
    ``message`` is the cause in one sentence, ``layer_range`` the shard's and ``operation`` what had been
    asked. ``details`` holds what else the worker said, such as ``bundle_error`` and ``offset``.
    """

    def __init__(
        self,
        code: int,
        name: str,
        message: str,
        layer_range: tuple[int, int] | None = None,
        operation: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.code = code
        self.name = name
        self.message = message
        self.layer_range = layer_range
        self.operation = operation
        self.details = dict(details or {})
        who = "worker" if layer_range is None else f"shard [{layer_range[0]},{layer_range[1]})"
        doing = f"{operation}: " if operation else ""
        number = f"error {code} {name}: " if code else ""
        super().__init__(f"{who}: {doing}{number}{message}")


class SessionRefused(WorkerError):
    """A worker refused a request for a session; its table and states are as before.

    ``outcome`` says why. What else is None where the worker did not say it: ``session`` the id (16 bytes), ``epoch``
    and ``position`` as the worker holds them (position None: it has none), ``ingredient`` the name of what differs in
    the recipe.
    """

    outcome: Outcome
    session: bytes | None = None
    epoch: int | None = None
    position: int | None = None
    ingredient: str | None = None


def refusal(text: Mapping[str, Any], layer_range: tuple[int, int] | None, operation: str) -> WorkerError:
    """The exception for an error message: SessionRefused for one with a session outcome. For transports."""
    code = int(text.get("code", 0))
    name, message = str(text.get("name", "")), str(text.get("message", "no reason given"))
    details = {key: value for key, value in text.items() if key not in ("code", "name", "message")}
    try:
        outcome = Outcome(details["outcome"])
        error = SessionRefused(code, name, message, layer_range, operation, details)
        error.outcome = outcome
        for key, kind in (("epoch", int), ("position", int), ("ingredient", str), ("session", bytes.fromhex)):
            if details.get(key) is not None:
                setattr(error, key, kind(details[key]))
    except (KeyError, TypeError, ValueError):
        return WorkerError(code, name, message, layer_range, operation, details)
    return error


@dataclass(frozen=True)
class Settings:
    """What every shard of a pipeline is started with; results are equal by bits only if all of it is.

    ``batch`` is the largest batch and ``ubatch`` the micro-batch, in tokens; ``ctx`` the KV cells of all
    sequences together.
    """

    threads: int = 2
    ctx: int = 1024
    batch: int = 512
    ubatch: int = 512
    seqs: int = 1
    kv_unified: bool = False
    swa_full: bool = True
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    mmap: bool = True

    def arguments(self) -> list[str]:
        """The worker's command line, apart from model and range."""
        words = [
            *("--threads", str(self.threads)),
            *("--ctx", str(self.ctx)),
            *("--batch", str(self.batch)),
            *("--ubatch", str(self.ubatch)),
            *("--seqs", str(self.seqs)),
            *("--flash-attn", "on" if self.flash_attn else "off"),
            *("--type-k", self.type_k),
            *("--type-v", self.type_v),
        ]
        if self.kv_unified:
            words.append("--kv-unified")
        if not self.swa_full:
            words += ["--swa-full", "off"]
        if not self.mmap:
            words.append("--no-mmap")
        return words


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits, by llama.cpp's chain of samplers in its usual order: penalties, top-k, top-p,
    min-p, temperature, and a draw by ``seed``. ``temperature`` 0 takes the most likely one; ``top_k`` 0, ``top_p`` 1,
    ``min_p`` 0 and ``repeat_penalty`` 1 leave everything as it is.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer: its JSON object and, where there is one, its bundle's bytes (read-only, else empty)."""

    text: dict[str, Any]
    bundle: memoryview


class Pending(Protocol):
    """A request under way."""

    def result(self, timeout: float | None = None) -> Reply:
        """Wait for the answer (``timeout`` in seconds). Raises WorkerError."""
        ...

    def done(self) -> bool:
        """Whether the answer is here already; never waits."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What must be equal for two shards to compute the same bits (``shared``), and the shard's own part.

    Both texts have one ingredient a line, NAME VALUE; floats are the hexadecimal digits of their bits. A fingerprint
    is the SHA-256 of its text.
    """

    shared: str
    fingerprint: bytes
    range: str
    range_fingerprint: bytes

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Recipe:
        """Raises KeyError, TypeError or ValueError for a text that lacks something."""
        shared, own = text["shared"], text["range"]
        return cls(
            str(shared["text"]),
            bytes.fromhex(shared["fingerprint"]),
            str(own["text"]),
            bytes.fromhex(own["fingerprint"]),
        )

    def ingredients(self) -> dict[str, str]:
        """The shared part by name, in its order."""
        return ingredients(self.shared)

    def difference(self, other: Recipe) -> str | None:
        """The first ingredient of the shared part that is not the same in both; None when all are."""
        mine, theirs = self.ingredients(), other.ingredients()
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                return name
        return None


def ingredients(text: str) -> dict[str, str]:
    """The lines of a recipe's text by their names, without the first, which says what it is."""
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: value for name, _, value in pairs if name and name != "boundary-bundle"}


@dataclass(frozen=True)
class SessionInfo:
    """One session in a worker's table. ``used`` is the number of the call that used it last.

    ``state`` is live, evicted or released; ``kv_bytes`` counts keys, values and states.
    """

    id: bytes
    epoch: int
    position: int
    kv_bytes: int
    used: int
    pinned: bool
    state: str


@dataclass(frozen=True)
class SessionTable:
    """A worker's table, the most recently used first. ``positions`` is what one session can have.

    ``calls``, ``tokens``, ``created``, ``evicted``, ``released`` and ``outcomes`` count since the worker's start.
    """

    sessions: list[SessionInfo]
    live: int
    forgotten: int
    slots: int
    positions: int
    calls: int
    tokens: int
    created: int
    evicted: int
    released: int
    outcomes: dict[str, int]

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> SessionTable:
        """Raises KeyError, TypeError or ValueError for a text that lacks something."""
        counts = ("live", "forgotten", "slots", "positions", "calls", "tokens", "created", "evicted", "released")
        return cls(
            [
                SessionInfo(
                    bytes.fromhex(entry["session"]),
                    int(entry["epoch"]),
                    -1 if entry["position"] is None else int(entry["position"]),
                    int(entry["kv_bytes"]),
                    int(entry["used"]),
                    bool(entry["pinned"]),
                    str(entry["state"]),
                )
                for entry in text["sessions"]
            ],
            outcomes={str(name): int(count) for name, count in text["outcomes"].items()},
            **{name: int(text[name]) for name in counts},
        )


@dataclass(frozen=True)
class Description:
    """What a worker holds, as it reported; ``raw`` is everything it said.

    ``fingerprint``, ``kv_bytes`` and ``recipe`` are None for a worker on an unpatched library, which knows none of
    them.
    """

    architecture: str
    n_layer: int
    layer_range: tuple[int, int]
    n_embd: int
    n_vocab: int
    fingerprint: bytes | None
    weight_bytes: int
    kv_bytes: int | None
    resident_bytes: int
    n_ctx: int
    n_seq_max: int
    eos: tuple[int, ...]
    patched: bool
    contract_in: Contract
    contract_out: Contract
    raw: dict[str, Any] = field(repr=False)
    recipe: Recipe | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """Whether the worker owns layer 0 and takes tokens."""
        return self.layer_range[0] == 0

    @property
    def last(self) -> bool:
        """Whether the worker owns the last layer and gives logits."""
        return self.layer_range[1] == self.n_layer

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Description:
        """Raises KeyError, TypeError or ValueError for a text that lacks something."""
        contract = text["contract"]
        return cls(
            architecture=str(text["architecture"]),
            n_layer=int(text["n_layer"]),
            layer_range=(int(text["layer_start"]), int(text["layer_end"])),
            n_embd=int(text["n_embd"]),
            n_vocab=int(text["n_vocab"]),
            fingerprint=bytes.fromhex(text["fingerprint"]) if "fingerprint" in text else None,
            weight_bytes=int(text["weight_bytes"]),
            kv_bytes=int(text["kv_bytes"]) if "kv_bytes" in text else None,
            resident_bytes=int(text["resident_bytes"]),
            n_ctx=int(text["n_ctx"]),
            n_seq_max=int(text["n_seq_max"]),
            eos=tuple(text.get("eos", ())),
            patched=bool(text.get("patched")),
            contract_in=_contract(contract["in"]),
            contract_out=_contract(contract["out"]),
            raw=dict(text),
            recipe=Recipe.of(text["recipe"]) if text.get("recipe") is not None else None,
        )


def _contract(entries: Iterable[Mapping[str, Any]]) -> Contract:
    rules = []
    for entry in entries:
        axis = entry.get("token_axis")
        rules.append(TensorRule(entry["name"], entry["dtype"], entry["shape"], axis if axis not in (255, -1) else None))
    return Contract(rules)


def _open_text(id: bytes, epoch: int, recipe: bytes, ingredients: str | None, **more: Any) -> dict[str, Any]:
    text = {"session": id.hex(), "epoch": epoch, "recipe": recipe.hex(), **more}
    return text if ingredients is None else {**text, "ingredients": ingredients}


class Worker(ABC):
    """What the driver needs of a worker: a layer range, requests, an end. The rest is built on these."""

    #: The shard's layers, [start, end).
    layer_range: tuple[int, int]

    @abstractmethod
    def request(self, type: int, text: Mapping[str, Any] | None = None, bundle: Bytes = b"") -> Pending:
        """Send a request and return at once; several may be under way. Raises WorkerError."""

    @abstractmethod
    def close(self) -> None:
        """End the worker and whatever carries its messages. May be called twice."""

    def ask_to_end(self) -> None:  # noqa: B027 - an engine need not have it
        """Begin to close without waiting, so that several workers end side by side; :meth:`close` follows."""

    def ready(self) -> Worker:
        """Wait until requests are answered. Raises WorkerError."""
        return self

    def describe(self, tensors: bool = False) -> Description:
        """Ask what the worker holds; with ``tensors``, ``raw["tensors"]`` lists them."""
        text = self.request(Type.DESCRIBE, {"tensors": True} if tensors else None).result().text
        try:
            return Description.of(text)
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(0, "reply", f"unusable description ({error!r})", self.layer_range, "describe") from None

    def statistics(self) -> dict[str, Any]:
        """Counters since the worker's start."""
        return self.request(Type.STATISTICS).result().text

    def clear(self, sequence: int | None = None, start: int = 0) -> None:
        """Forget every sequence, or the positions from ``start`` on of one."""
        self.request(Type.CLEAR, None if sequence is None else {"sequence": sequence, "from": start}).result()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``; asked of the first or the last shard."""
        wish = {"text": text, "add_special": add_special, "parse_special": parse_special}
        return [int(token) for token in self.request(Type.TOKENIZE, wish).result().text["tokens"]]

    def detokenize(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token; asked of the first or the last shard."""
        reply = self.request(Type.DETOKENIZE, {"tokens": list(tokens)}).result()
        return [bytes.fromhex(piece) for piece in reply.text["pieces"]]

    def set_sampler(self, sequence: int, sampling: Sampling, history: Sequence[int] = ()) -> None:
        """How the last shard draws the tokens of ``sequence`` from now on, until it is cleared; ``history`` are tokens
        that it has drawn, or been given, already."""
        wish = {"sequence": sequence, **asdict(sampling), "history": list(history)}
        self.request(Type.SAMPLER, wish).result()

    # -- sessions (minor 1). Each raises SessionRefused for every outcome but hit.

    def open_session(
        self, id: bytes, epoch: int, position: int, recipe: bytes, ingredients: str | None = None
    ) -> dict[str, Any]:
        """Begin a session at position 0, or go on at ``position``; the reply has ``created``.

        ``recipe`` is the fingerprint of the shared part that the worker must have, ``ingredients`` its text.
        """
        return self.request(Type.OPEN, _open_text(id, epoch, recipe, ingredients, position=position)).result().text

    def truncate_session(self, id: bytes, epoch: int, position: int) -> dict[str, Any]:
        """Forget the positions from ``position`` on."""
        return self._session(Type.TRUNCATE, id, epoch, position=position)

    def release_session(self, id: bytes, epoch: int) -> dict[str, Any]:
        """End a session and free its state."""
        return self._session(Type.RELEASE, id, epoch)

    def pin_session(self, id: bytes, epoch: int, pinned: bool = True) -> dict[str, Any]:
        """Keep a session from being evicted, or no longer."""
        return self._session(Type.PIN, id, epoch, pinned=pinned)

    def evict_session(self, id: bytes | None = None) -> tuple[bytes, int]:
        """Give up the state of one session, or of the least recently used that is not pinned; its id and epoch."""
        text = self.request(Type.EVICT, None if id is None else {"session": id.hex()}).result().text
        try:
            return bytes.fromhex(text["session"]), int(text["epoch"])
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(0, "reply", f"unusable answer ({error!r})", self.layer_range, "evict") from None

    def sessions(self, forgotten: bool = False) -> SessionTable:
        """The session table; with ``forgotten``, those too that are not there any more."""
        text = self.request(Type.SESSIONS, {"forgotten": True} if forgotten else None).result().text
        try:
            return SessionTable.of(text)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WorkerError(0, "reply", f"unusable table ({error!r})", self.layer_range, "sessions") from None

    def save_session(self, id: bytes, epoch: int, file: str) -> dict[str, Any]:
        """Write a session's state to ``file``, a plain name in the worker's state folder."""
        return self._session(Type.SAVE, id, epoch, file=file)

    def restore_session(
        self, id: bytes, epoch: int, recipe: bytes, ingredients: str | None, file: str
    ) -> dict[str, Any]:
        """Open a session with a saved state; the reply has its position."""
        return self.request(Type.RESTORE, _open_text(id, epoch, recipe, ingredients, file=file)).result().text

    def _session(self, type: Type, id: bytes, epoch: int, **more: Any) -> dict[str, Any]:
        return self.request(type, {"session": id.hex(), "epoch": epoch, **more}).result().text

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pending:
    __slots__ = ("_worker", "error", "operation", "reply", "sent")

    def __init__(self, worker: LocalWorker, operation: str) -> None:
        self._worker = worker
        self.operation = operation
        #: Whether the worker has been asked; false: nothing of the request has gone, or the worker is given up.
        self.sent = False
        self.reply: Reply | None = None
        self.error: WorkerError | None = None

    def done(self) -> bool:
        if self.reply is None and self.error is None:
            self._worker._poll()
        return self.reply is not None or self.error is not None

    def result(self, timeout: float | None = None) -> Reply:
        if self.reply is None and self.error is None:
            self._worker._await(self, timeout)
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


class LocalWorker(Worker):
    """A worker process on this machine, on one socket pair that is its standard input and output.

    The constructor starts the process and sends hello; :meth:`ready` waits until the model stands. So
    several workers load side by side. No thread of ours reads: whoever waits for an answer takes what
    comes, for every request under way. That keeps a hop free of thread switches, and a request that finds
    the socket full takes answers while it waits, so that the two sides never block each other.

    ``timeout`` limits, in seconds, how long the worker may be silent while somebody waits for it; until the
    model stands, :data:`LOAD_TIMEOUT` or ``timeout`` does, whichever is longer. None waits for ever. A worker that
    stays silent is ended: what it would say later could not be told from an answer to something else.
    ``extra`` are more words for its command line, such as ``--no-warmup``. ``state_dir`` is the folder for saved
    sessions.
    """

    def __init__(
        self,
        program: Path | str,
        model: Path | str,
        layer_range: tuple[int, int],
        settings: Settings | None = None,
        extra: Sequence[str] = (),
        timeout: float | None = REQUEST_TIMEOUT,
        state_dir: Path | str | None = None,
    ) -> None:
        self.layer_range = layer_range
        self.settings = settings or Settings()
        self.hello: dict[str, Any] = {}
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        # A Ctrl-C right after one is taken leaves it so: then the thread that has it can go on.
        self._send_lock = threading.RLock()
        self._receive_lock = threading.RLock()
        self._lost: WorkerError | None = None
        self._closed = False
        self._timeout = timeout
        self._heard = time.monotonic()
        self._partly_sent = False
        self._goodbye: _Pending | None = None
        self._end_by: float | None = None
        self._header = memoryview(bytearray(protocol.HEADER_BYTES))
        self._current: protocol.Header | None = None
        self._text = self._body = _NO_BYTES
        self._parts: list[memoryview] = [self._header]
        self._filled = 0
        command = [str(program), "--model", str(model), "--range", f"{layer_range[0]}:{layer_range[1]}"]
        command += [*self.settings.arguments(), *extra, "--stdio"]
        if state_dir is not None:
            command += ["--state-dir", str(state_dir)]
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        except OSError as error:  # such as a full disk
            raise self._unstarted(program, error) from None
        try:
            self._socket, theirs = socket.socketpair()
        except OSError as error:  # such as no descriptors left
            self._errors.close()
            raise self._unstarted(program, error) from None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                # A Ctrl-C is the driver's to answer: it closes its workers.
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            self._errors.close()
            raise self._unstarted(program, error) from None
        finally:
            theirs.close()
        self._socket.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._both = select.poll()
        self._both.register(self._socket, select.POLLIN | select.POLLOUT)
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)
        self._greeting = self._begin(Type.HELLO, {"major": protocol.MAJOR, "minors": protocol.MINORS}, b"", "start")

    def _unstarted(self, program: Path | str, error: OSError) -> WorkerError:
        return WorkerError(0, "lost", f"cannot start {program}: {error.strerror}", self.layer_range, "start")

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether requests can be sent: not closed, and the process has not ended."""
        return not self._closed and self._lost is None and self._process.poll() is None

    def ready(self, timeout: float | None = None) -> LocalWorker:
        """Wait until the model is loaded and hello is answered. Raises WorkerError."""
        self.hello = self._greeting.result(timeout).text
        if self.hello.get("major") != protocol.MAJOR or self.hello.get("minor") not in protocol.MINORS:
            raise WorkerError(0, "reply", f"no common protocol version in {self.hello}", self.layer_range, "hello")
        return self

    def request(self, type: int, text: Mapping[str, Any] | None = None, bundle: Bytes = b"") -> Pending:
        try:
            operation = Type(type).name.lower()
        except ValueError:
            operation = f"request type {type}"
        return self._begin(type, text, bundle, operation)

    def ask_to_end(self) -> None:
        if self._end_by is not None or self._closed:
            return
        self._end_by = time.monotonic() + CLOSE_GRACE
        # Whoever is sending at this moment may be in the middle of a message, and after one that was only partly
        # sent nothing more can be said.
        if self._lost is None and self._send_lock.acquire(blocking=False):
            try:
                if not self._partly_sent:
                    number = next(self._ids)
                    message = protocol.pack(Type.SHUTDOWN, number, None, 0)
                    with contextlib.suppress(OSError):
                        if self._socket.send(message) == len(message):
                            self._goodbye = self._pending[number] = _Pending(self, "shutdown")
                        else:
                            self._partly_sent = True
            finally:
                self._send_lock.release()

    def close(self) -> None:
        """Ask the worker to end, then make it; no process is left afterwards, and nothing waits for long."""
        if self._closed:
            return
        self.ask_to_end()
        self._closed = True
        if self._goodbye is not None and self._lost is None:
            with contextlib.suppress(WorkerError):
                self._goodbye.result(timeout=self._left_to_end())
        self._end(self._left_to_end())
        # A thread that was waiting for an answer has been woken by the end, and looks at the files once more.
        locked = self._receive_lock.acquire(timeout=1)
        try:
            if self._lost is None:
                self._lost = WorkerError(0, "lost", "the worker has been closed", self.layer_range)
            for pending in list(self._pending.values()):
                pending.error = self._again(pending.operation)
            self._pending.clear()
            self._socket.close()
            self._errors.close()
        finally:
            if locked:
                self._receive_lock.release()

    def _left_to_end(self) -> float:
        return CLOSE_GRACE if self._end_by is None else max(0.0, self._end_by - time.monotonic())

    def kill(self) -> None:
        """End the process at once, without a word to it."""
        self._process.kill()

    # -- links and flows (minor 2); for pipelines

    def link(self, to: str, descriptors: Sequence[int]) -> Pending:
        """Connect the worker with the one before it (``to`` is previous) or behind it (next): a Unix stream socket and,
        where both ends are to have it, a sealed file of memory. The descriptors stay the caller's to close."""
        return self._begin(Type.LINK, {"to": to}, b"", "link", descriptors=descriptors)

    def expect(self, number: int, operation: str) -> _Pending:
        """An answer that may come without a request: of flow ``number`` (protocol.FLOWS and more)."""
        if self._lost is not None:
            raise self._again(operation)
        pending = self._pending[number] = _Pending(self, operation)
        return pending

    def forget(self, number: int) -> None:
        """No answer of flow ``number`` is waited for any more; one that comes is dropped."""
        self._pending.pop(number, None)

    def send_flow(self, number: int, text: Mapping[str, Any], bundle: Bytes) -> None:
        """Decode as flow ``number``, which is expected. Raises WorkerError."""
        self._begin(Type.DECODE, text, bundle, "decode", number=number)

    def fileno(self) -> int:
        """The descriptor on which answers come; :meth:`take` takes them."""
        return self._socket.fileno()

    def take(self) -> None:
        """Take what has come, without waiting."""
        self._poll()

    @property
    def loss(self) -> WorkerError | None:
        """Why nothing can be asked any more; None while something can."""
        return self._lost

    def loss_for(self, operation: str) -> WorkerError:
        """:attr:`loss`, said of another operation."""
        return self._again(operation)

    def overdue(self, what: str, operation: str) -> WorkerError:
        """End a worker that does not do its part, unless it has ended; what there is to say of it."""
        if self._lost is None:
            self._give_up("timeout", f"{what}: {self._state()}", operation)
        return self._again(operation)

    @property
    def heard(self) -> float:
        """When the last byte came from it (time.monotonic)."""
        return self._heard

    @property
    def timeout(self) -> float | None:
        """Seconds that it may be silent while an answer is waited for; None for ever."""
        return self._timeout

    def is_stopped(self) -> bool:
        """Whether its process is stopped, by a signal or a debugger."""
        return self._letter() in ("T", "t")

    # -- sending

    def _begin(
        self,
        type: int,
        text: Mapping[str, Any] | None,
        bundle: Bytes,
        operation: str,
        number: int | None = None,
        descriptors: Sequence[int] = (),
    ) -> _Pending:
        if self._lost is not None:
            raise self._again(operation)
        if self._closed or self._end_by is not None:
            raise WorkerError(0, "lost", "the worker has been closed", self.layer_range, operation)
        if number is None:
            number = next(self._ids)
        try:
            parts: list[Bytes] = [protocol.pack(type, number, text, len(bundle))]
        except ProtocolError as error:
            raise WorkerError(_LIMIT, protocol.ERRORS[_LIMIT], str(error), self.layer_range, operation) from None
        if bundle:
            parts.append(bundle)
        pending = self._pending.get(number) or self._pending.setdefault(number, _Pending(self, operation))
        try:
            with self._send_lock:
                self._send(pending, parts, descriptors)
        except BaseException:
            if not pending.sent:  # otherwise there is an answer to come
                self._pending.pop(number, None)
            if self._partly_sent and self._lost is None:
                # Such as a Ctrl-C: the worker would take the next message for the rest of this one.
                self._give_up("lost", "a message was only partly sent", operation)
            raise
        if self._lost is not None and pending.reply is None and pending.error is None:
            # Lost by another thread after the first look here and before this request was among those that it told.
            pending.error = self._again(operation)
        return pending

    def _send(self, pending: _Pending, parts: list[Bytes], descriptors: Sequence[int]) -> None:
        rest = [memoryview(part).cast("B") for part in parts]
        # They go with the first byte.
        along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        moved = time.monotonic()
        begun = False
        while rest:
            # Until it is known: a Ctrl-C may come right after the bytes have gone.
            self._partly_sent = True
            try:
                sent = self._socket.sendmsg(rest, along)
            except BlockingIOError:
                self._partly_sent = begun
                self._relieve(moved, pending.operation)
                continue
            except OSError:
                # The worker is gone; what it said last and how it ended come out of the receiving side.
                self._await_end()
                return
            moved = time.monotonic()
            along = []
            begun = True
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]
        pending.sent = True
        self._partly_sent = False

    def _relieve(self, moved: float, operation: str) -> None:
        """The socket is full: take answers until there is room, unless another thread does that already.

        ``moved`` is when the last bytes went. Raises WorkerError when nothing goes either way for too long.
        """
        left = self._patience(moved, operation)
        if self._receive_lock.acquire(blocking=False):
            try:
                self._both.poll(None if left is None else left * 1000)
                self._take()
            finally:
                self._receive_lock.release()
        else:
            self._writable.poll(50)

    # -- patience

    def _patience(self, since: float, operation: str) -> float | None:
        """Seconds that the worker may still be silent; None for ever. Raises WorkerError when none are left.

        What counts is the last byte from it, or ``since`` if that is later.
        """
        if self._timeout is None:
            return None
        limit = self._timeout if self._greeting_done() else max(self._timeout, LOAD_TIMEOUT)
        left = max(since, self._heard) + limit - time.monotonic()
        # What has come counts, however late it is looked at: it may be this process that was stopped.
        if left <= 0 and self._receive_lock.acquire(timeout=_LATE):
            try:
                self._take()
            finally:
                self._receive_lock.release()
            left = max(since, self._heard) + limit - time.monotonic()
            if self._lost is not None:
                return 0.0  # everybody has been told
        if left <= 0:
            self._give_up("timeout", f"no answer in {limit:g} seconds: {self._state()}", operation)
            assert self._lost is not None
            raise self._again(operation)
        return left

    def _greeting_done(self) -> bool:
        greeting: _Pending | None = getattr(self, "_greeting", None)
        return greeting is not None and (greeting.reply is not None or greeting.error is not None)

    def _state(self) -> str:
        """What the process does, as the system tells it."""
        letter = self._letter()
        does = {"T": "is stopped", "t": "is stopped by a debugger", "R": "is still computing", "D": "waits for a disk"}
        return f"worker process {self.pid} {does.get(letter, 'does nothing')}"

    def _letter(self) -> str:
        """The system's letter for its state, "" where there is none."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text("ascii", "replace").rsplit(")", 1)[1].split()[0]
        return ""

    def _give_up(self, name: str, message: str, operation: str) -> None:
        """End a worker that nothing can be said to any more."""
        self._process.kill()
        self._lost = WorkerError(0, name, message, self.layer_range, operation)
        self._end(CLOSE_GRACE)
        for pending in list(self._pending.values()):
            pending.error = self._again(pending.operation)
        self._pending.clear()

    # -- receiving

    def _poll(self) -> None:
        if self._receive_lock.acquire(blocking=False):
            try:
                self._take()
            finally:
                self._receive_lock.release()

    def _await(self, pending: _Pending, timeout: float | None) -> None:
        began = time.monotonic()
        while pending.reply is None and pending.error is None:
            left = None if timeout is None else began + timeout - time.monotonic()
            if left is not None and left <= 0:
                message = f"no answer in {timeout:g} seconds: {self._state()}"
                raise WorkerError(0, "timeout", message, self.layer_range, pending.operation)
            if self._end_by is None:
                patience = self._patience(began, pending.operation)
                if left is None or (patience is not None and patience < left):
                    left = patience
            if not self._receive_lock.acquire(timeout=-1 if left is None else left):
                continue
            try:
                if pending.reply is None and pending.error is None and not self._take():
                    self._readable.poll(None if left is None else left * 1000)
            finally:
                self._receive_lock.release()

    def _await_end(self) -> None:
        deadline = time.monotonic() + CLOSE_GRACE
        with self._receive_lock:
            while self._lost is None:
                if not self._take():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._process.kill()
                        self._lose(f"worker process {self.pid} takes no more requests and yet did not end")
                        return
                    self._readable.poll(left * 1000)

    def _take(self) -> bool:
        """Read until one message is whole or nothing is left to read; whether there was anything."""
        any_bytes = False
        try:
            while self._lost is None:
                part = self._parts[0]
                try:
                    count = self._socket.recv_into(part[self._filled :])
                except BlockingIOError:
                    return any_bytes
                except OSError:
                    count = 0
                if count == 0:
                    self._lose(None)
                    return True
                any_bytes = True
                self._heard = time.monotonic()
                self._filled += count
                if self._filled < len(part):
                    continue
                self._filled = 0
                self._parts.pop(0)
                try:
                    whole = self._advance()
                except ProtocolError as error:
                    self._process.kill()
                    self._lose(str(error))
                    return True
                if whole:
                    return True
        except BaseException:
            # Such as a Ctrl-C: bytes may have been taken that nothing here knows of.
            if self._lost is None:
                self._give_up("lost", "an answer was only partly taken", "request")
            raise
        return True

    def _advance(self) -> bool:
        """A part is full. Whether that completed a message."""
        if self._current is None:
            self._current = header = protocol.unpack_header(self._header)
            self._text = memoryview(bytearray(header.text_length))
            self._body = memoryview(bytearray(header.bundle_length))
            self._parts = [part for part in (self._text, self._body) if len(part)]
        if self._parts:
            return False
        header = self._current
        text, body = protocol.parse_text(self._text), self._body
        self._current, self._parts = None, [self._header]
        # It is known until it has been told, so that it hears of a Ctrl-C in between.
        pending = self._pending.get(header.request)
        if header.type == Type.ERROR and (pending is not None or header.request == 0):
            error = refusal(text, self.layer_range, pending.operation if pending else "request")
            if pending is None:  # an unsound frame: the worker hangs up next, or gives up a link
                self._fail_all(error, protocol.FLOWS if "link" in text else 0)
            else:
                pending.error = error
        elif pending is None and header.reply and header.request >= protocol.FLOWS:
            pass  # of a flow that another worker has answered already
        elif pending is None or not header.reply:
            raise ProtocolError(f"the worker sent type {header.type} for request {header.request}, which is not open")
        else:
            pending.reply = Reply(text, body.toreadonly())
        self._pending.pop(header.request, None)
        return True

    # -- the end

    def _lose(self, reason: str | None) -> None:
        """The stream has ended: find out why, and tell everybody who waits."""
        if self._lost is not None:
            return
        ended = self._end(CLOSE_GRACE if self._end_by is None else self._left_to_end())
        message = reason or self._cause(ended)
        self._lost = WorkerError(0, "lost", message, self.layer_range)
        refusal = _REFUSAL.search(self._error_text()) if reason is None else None
        if refusal is not None and self._process.returncode == 2:
            code, name, sentence = refusal.groups()
            self._lost = WorkerError(int(code), name, sentence, self.layer_range)
        for pending in list(self._pending.values()):
            pending.error = self._again(pending.operation)
        self._pending.clear()

    def _fail_all(self, error: WorkerError, least: int) -> None:
        """Every request of this number and above."""
        for number in [number for number in self._pending if number >= least]:
            self._pending.pop(number).error = error

    def _again(self, operation: str) -> WorkerError:
        assert self._lost is not None
        return WorkerError(self._lost.code, self._lost.name, self._lost.message, self.layer_range, operation)

    def _cause(self, ended: bool) -> str:
        """Why the stream has ended; ``ended``: the process did so by itself."""
        status = self._process.returncode
        if not ended:
            how = f"worker process {self.pid} closed its connection and did not end"
        elif status is not None and status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = "unknown"
            how = f"worker process {self.pid} was ended by signal {-status} ({name})"
        else:
            how = f"worker process {self.pid} ended with status {status}"
        if self._filled or self._current is not None:
            how += " in the middle of a message"
        lines = [line for line in self._error_text().splitlines() if line.strip()]
        # A fault of its own is the last thing a dying worker says.
        told = next((line for line in reversed(lines) if "stopped by a fault" in line or "error" in line), None)
        return f"{how}: {told.strip()[:300]}" if told else how

    def _error_text(self) -> str:
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - 65536))
        return self._errors.read().decode("utf-8", "replace")

    def _end(self, grace: float) -> bool:
        """Whether the process ended by itself."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True


class Inquiry:
    """One question that workers are asked again and again; none is asked once more while it still owes the answer."""

    def __init__(self, type: Type) -> None:
        self._type = type
        self._owed: dict[int, tuple[Worker, Pending]] = {}
        self._told: dict[int, dict[str, Any]] = {}

    def answers(self, workers: Sequence[Worker], wait: float) -> list[dict[str, Any]]:
        """What each said last, empty if it has said nothing yet. Waits ``wait`` seconds at most for all of them."""
        for index, worker in enumerate(workers):
            if not self._owes(index, worker):
                with contextlib.suppress(WorkerError):
                    self._owed[index] = (worker, worker.request(self._type))
        deadline = time.monotonic() + wait
        for index, worker in enumerate(workers):
            if not self._owes(index, worker):
                continue
            pending = self._owed[index][1]
            with contextlib.suppress(WorkerError):
                self._told[index] = pending.result(max(0.0, deadline - time.monotonic())).text
            if pending.done():
                del self._owed[index]
        return [self._told.get(index, {}) for index in range(len(workers))]

    def _owes(self, index: int, worker: Worker) -> bool:
        """Not one that has taken the place of the worker that was asked."""
        return index in self._owed and self._owed[index][0] is worker


def start_workers(
    program: Path | str,
    model: Path | str,
    ranges: Iterable[tuple[int, int]],
    settings: Settings,
    timeout: float | None = REQUEST_TIMEOUT,
    extra: Sequence[str] = (),
    processors: Sequence[Sequence[int]] = (),
) -> list[LocalWorker]:
    """Start one worker a range, all loading side by side; none is left if one fails. Raises WorkerError.

    ``timeout`` and ``extra`` are those of :class:`LocalWorker`. ``processors`` are those of each worker, for as many of
    the first ones as it lists.
    """
    workers: list[LocalWorker] = []
    try:
        for place, layers in enumerate(ranges):
            own = processors[place] if place < len(processors) else ()
            kept = ["--processors", ",".join(map(str, own))] if own else []
            workers.append(LocalWorker(program, model, layers, settings, [*extra, *kept], timeout))
        for worker in workers:
            worker.ready()
    except BaseException:
        close_workers(workers)
        raise
    return workers


def shares(processors: Sequence[int], count: int) -> list[list[int]]:
    """The processors dealt out to ``count`` workers, neighbours together, none to two of them; more workers than
    processors share all."""
    if count > len(processors):
        return [list(processors)] * count
    edges = [len(processors) * place // count for place in range(count + 1)]
    return [list(processors[start:end]) for start, end in itertools.pairwise(edges)]


def close_workers(workers: Iterable[Worker]) -> None:
    """Close all of them side by side, whatever one of them says."""
    every = list(workers)
    for worker in every:
        with contextlib.suppress(WorkerError, OSError):
            worker.ask_to_end()
    for worker in every:
        with contextlib.suppress(WorkerError, OSError):
            worker.close()
