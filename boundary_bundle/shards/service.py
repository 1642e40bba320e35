"""A session pipeline for many clients on a Unix socket (spec/service-protocol.md).

A thread a client; one request computes at a time, in the order in which they came. Nothing is decoded together: which
tokens share a batch would depend on the clock, and results of a batch depend on its shape.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from . import service_protocol as protocol
from .pipeline import PipelineError, Step
from .protocol import Type as WorkerType
from .service_protocol import ERRORS, Frame, ProtocolError, Type, default_socket
from .sessions import STATUS_WAIT, CapacityError, Session, SessionPipeline
from .worker import Inquiry, WorkerError

__all__ = ["Address", "AddressError", "Limits", "Service"]

_SOFTWARE: Final = "boundary-bundle"
#: Seconds that requests under way have to end when the service does.
_CLOSE_GRACE: Final = 5.0
#: Seconds after which a request that waits for room looks again: its client may have left, a worker's loss may have
#: made room.
_LOOK_AGAIN: Final = 0.5
#: How many of the pipeline's events a status has.
_EVENTS: Final = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class AddressError(Exception):
    """The socket cannot be had; one sentence."""


class Address:
    """A listening Unix socket of mode 0600, removed at the end. Raises AddressError.

    A socket that nobody listens on is replaced. In a folder that is not the user's own, or in which others can write,
    there is none. ``path`` is :func:`default_socket` when it is not given; its folder is
    then made, private, and removed with the socket.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_socket() if path is None else path
        self._own_folder = path is None
        if path is None:
            _private_folder(self.path.parent)
        try:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError) as error:
            raise AddressError(f"cannot listen on {self.path}: {_reason(error)}") from None
        try:
            _require_own(folder, self.path)
            # Two that find the same dead socket at the same time: only one is to replace it.
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.socket = self._bind()
        finally:
            os.close(folder)
        self._identity = _identity(self.path)

    def _bind(self) -> socket.socket:
        _make_room(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # From its first moment on; nothing else of this process makes files yet.
            mask = os.umask(0o177)
            try:
                listener.bind(os.fspath(self.path))
            finally:
                os.umask(mask)
            # At once: a socket that is bound and does not listen looks like that of a dead server.
            listener.listen(128)
            listener.setblocking(False)
        except (OSError, ValueError) as error:
            listener.close()
            raise AddressError(f"cannot listen on {self.path}: {_reason(error)}") from None
        return listener

    def close(self) -> None:
        """Stop listening and remove the socket, unless another server's lies there by now."""
        if self._identity is not None and _identity(self.path) == self._identity:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._identity = None
        self.socket.close()
        if self._own_folder:
            with contextlib.suppress(OSError):  # others may have put something there
                os.rmdir(self.path.parent)

    def __enter__(self) -> Address:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise AddressError(f"cannot make the folder {folder}: {_reason(error)}") from None
    # The folder for temporary files is everybody's: somebody else may have made it first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise AddressError(f"{folder} is not a folder that is this user's alone (mode 0700); give --socket")


def _require_own(folder: int, path: Path) -> None:
    """Who may write to the folder can put a socket of his own in this one's place. Raises AddressError."""
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise AddressError(
            f"cannot listen on {path}: its folder has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}: "
            f"it must be that of user {os.geteuid()}, and nobody else may write there"
        )


def _make_room(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises AddressError for anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise AddressError(f"cannot listen on {path}: {_reason(error)}") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise AddressError(f"cannot listen on {path}: there is something that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:  # so many wait for it that there is no room: it lives
                raise AddressError(f"cannot listen on {path}: {_reason(error)}") from None
    raise AddressError(f"cannot listen on {path}: a server listens there already")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


@dataclass(frozen=True)
class Limits:
    """Of one service. Times in seconds: ``grace`` is how long a session that nobody holds is kept, ``wait`` how long
    a request waits for room, ``idle`` how long a connection may say nothing, ``stall`` how long it may stop within a
    message or take no byte of an answer.
    """

    connections: int = 100
    sessions: int = 1000
    grace: float = 30.0
    wait: float = 30.0
    idle: float = 3600.0
    stall: float = 30.0


class _Refusal(Exception):
    """A request is refused; ``details`` are further keys of the reply."""

    def __init__(self, code: int, cause: str, **details: Any) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause
        self.details = details


class _Gone(Exception):
    """The client is not there any more."""


class _Turns:
    """One at a time, in the order of arrival; a lock of the library may let the same thread in again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


@dataclass
class _Work:
    """The last request of a session that changes it, and how far it has come."""

    number: int
    wish: tuple[Any, ...]
    position: int
    done: int = 0
    sampled: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(eq=False)
class _Entry:
    """A session as the service keeps it, with its first epoch. ``lock`` is held while one of its requests runs."""

    session: Session
    incarnation: str
    epoch: int
    work: _Work | None = None
    holders: set[_Connection] = field(default_factory=set)
    expires: float | None = None
    over: bool = False
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def position(self) -> int:
        return len(self.session.tokens)

    def told(self) -> dict[str, Any]:
        return {"session": self.session.id.hex(), "epoch": self.session.epoch, "position": self.position}


class _Connection:
    """One client's socket."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self.socket = connection
        self.held: dict[bytes, _Entry] = {}
        self.greeted = False
        self._limits = limits

    def receive(self) -> tuple[Frame, bytearray] | None:
        """The next message, or None at the end of them. Raises ProtocolError for an unsound header."""
        header = self._read(protocol.HEADER_BYTES, self._limits.idle)
        if header is None:
            return None
        frame = protocol.unpack_header(header)
        text = self._read(frame.text_length, self._limits.stall)
        return None if text is None else (frame, text)

    def _read(self, count: int, patience: float) -> bytearray | None:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                self.socket.settimeout(patience)
                got = self.socket.recv_into(view)
            except OSError:  # the time is up, too
                return None
            if got == 0:
                return None
            view = view[got:]
            patience = self._limits.stall
        return data

    def send(self, message: bytes) -> None:
        """Raises _Gone when the client takes no byte for too long."""
        rest = memoryview(message)
        try:
            self.socket.settimeout(self._limits.stall)
            while rest:
                rest = rest[self.socket.send(rest) :]
        except OSError:
            raise _Gone from None

    def require(self) -> None:
        """Raises _Gone when the client has hung up. It may have sent further requests; they are left."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else 0)
        try:
            if poll.poll(0):
                raise _Gone
        except (OSError, ValueError):
            raise _Gone from None

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Service:
    """Serves ``pipeline`` to the clients of a listening socket, until :meth:`stop`.

    ``when_full`` is what becomes of a session for which the shards have no room now: ``evict`` (the pipeline has been
    made for it), ``wait`` or ``refuse`` (the pipeline refuses). ``log`` gets a line for what nobody foresaw. The
    pipeline stays the caller's to close.
    """

    def __init__(
        self,
        pipeline: SessionPipeline,
        *,
        when_full: str = "evict",
        limits: Limits | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._pipeline = pipeline
        self._when_full = when_full
        self._log = log or (lambda line: None)
        self._model = _model_of(pipeline)
        self._turns = _Turns()
        # Order of the locks: that of an entry, that of opening and releasing, a turn, the pipeline's. The table's is
        # held for a moment only, and nothing else within it.
        self._opening = threading.Lock()
        self._table = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._expiry = threading.Condition(self._table)
        self._room = threading.Condition()
        self._freed = 0
        self._connections: dict[_Connection, threading.Thread] = {}
        self._pieces: dict[int, bytes] = {}
        self._status_lock = threading.Lock()
        self._tables = Inquiry(WorkerType.SESSIONS)
        self._began = time.monotonic()
        self._counts = {"requests": 0, "errors": 0, "tokens": 0}
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)

    # -- connections

    def run(self, listener: socket.socket) -> None:
        """Take clients until :meth:`stop` is called; then end their connections and wait for what is under way, for
        a few seconds. The listener stays the caller's."""
        reaper = threading.Thread(target=self._reap, name="reaper", daemon=True)
        reaper.start()
        try:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            while not self._stopping:
                poll.poll()
                if not self._stopping:
                    self._accept(listener)
        finally:
            self._stopping = True
            self._end(reaper)

    def stop(self) -> None:
        """Make :meth:`run` return. May be called from a signal handler and from any thread, more than once."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Such as no descriptors left: whoever knocks stays in the queue.
            self._log(f"cannot take a connection: {_reason(error)}")
            select.poll().poll(100)
            return
        connection = _Connection(accepted, self.limits)
        with self._table:
            full = len(self._connections) >= self.limits.connections
            if not full:
                thread = threading.Thread(target=self._serve, args=(connection,), name="client", daemon=True)
                self._connections[connection] = thread
        if full:
            cause = f"there are {self.limits.connections} connections already"
            with contextlib.suppress(OSError):
                accepted.setblocking(False)
                accepted.send(_packed_error(0, _described(7, cause, "connect")))
            accepted.close()
            return
        try:
            thread.start()
        except RuntimeError as error:  # no more threads are to be had
            self._log(f"cannot serve a connection: {error}")
            self._forget(connection)

    def _end(self, reaper: threading.Thread) -> None:
        with self._table:
            threads = [reaper, *self._connections.values()]
            for connection in self._connections:
                connection.hang_up()
            self._expiry.notify_all()
        with self._room:
            self._room.notify_all()
        deadline = time.monotonic() + _CLOSE_GRACE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wake.close()
        self._woken.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            while not self._stopping and self._answer(connection):
                pass
        except _Gone:
            pass
        except Exception as error:
            self._log(f"a connection ended: {type(error).__name__}: {error}")
        finally:
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        connection.socket.close()
        with self._table:
            self._connections.pop(connection, None)
            for entry in connection.held.values():
                entry.holders.discard(connection)
                if not entry.holders:
                    entry.expires = time.monotonic() + self.limits.grace
            self._expiry.notify_all()

    def _reap(self) -> None:
        """Release sessions that nobody has held for the time of grace."""
        while True:
            with self._table:
                if self._stopping:
                    return
                now = time.monotonic()
                ends = [entry.expires for entry in self._entries.values() if entry.expires is not None]
                due = [entry for entry in self._entries.values() if entry.expires is not None and entry.expires <= now]
                if not due:
                    self._expiry.wait(min(ends) - now if ends else None)
                    continue
            for entry in due:
                with entry.lock:
                    try:
                        self._release(entry, only_expired=True)
                    except Exception as error:
                        if not self._stopping:
                            self._log(f"a session was not released: {error}")

    # -- requests

    def _answer(self, connection: _Connection) -> bool:
        """Take one request and answer it; whether there may be another."""
        try:
            received = connection.receive()
        except ProtocolError as error:
            connection.send(_packed_error(0, _described(22, str(error), "request")))
            return False
        if received is None:
            return False
        frame, data = received
        operation = Type(frame.type).name.lower() if frame.type in _TYPES else f"request type {frame.type}"
        self._count("requests")
        try:
            try:
                request = protocol.parse_text(data)
            except (ProtocolError, RecursionError) as error:
                raise _Refusal(21, str(error)) from None
            text = self._do(connection, frame, request)
            try:
                reply = protocol.pack(frame.type, frame.request, text, reply=True)
            except ProtocolError as error:
                raise _Refusal(1, f"the answer does not fit: {error}") from None
        except _Gone:
            raise
        except Exception as error:
            self._count("errors")
            reply = _packed_error(frame.request, self._explain(error, operation))
        connection.send(reply)
        return True

    def _do(self, connection: _Connection, frame: Frame, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._stopping:
            raise _Refusal(8, "the service is about to end")
        if frame.reply or frame.type not in _TYPES:
            raise _Refusal(20, f"there is no request of type {frame.type}")
        if not connection.greeted and frame.type != Type.HELLO:
            raise _Refusal(20, "hello comes first")
        return _HANDLERS[Type(frame.type)](self, connection, request)

    def _explain(self, error: Exception, operation: str) -> dict[str, Any]:
        if isinstance(error, _Refusal):
            return _described(error.code, error.cause, operation, error.details)
        if isinstance(error, CapacityError):
            return _described(4, str(error), operation) if error.never else _full(str(error), operation)
        if self._stopping:
            return _described(8, "the service is about to end", operation)
        if isinstance(error, WorkerError):
            details: dict[str, Any] = {
                "worker_operation": error.operation,
                "worker_code": error.code,
                "worker_name": error.name,
            }
            if error.layer_range is not None:
                details["shard"] = list(error.layer_range)
            outcome = getattr(error, "outcome", None)
            if outcome is not None:
                details["outcome"] = str(getattr(outcome, "value", outcome))
            code = 2 if outcome is not None else 4 if error.name == "limit" else 6
            return _described(code, error.message, operation, details)
        if isinstance(error, PipelineError):
            return _described(6, str(error), operation)
        self._log(f"{operation} failed: {type(error).__name__}: {error}")
        return _described(9, f"{type(error).__name__}: {error}", operation)

    def _hello(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        major, minors = request.get("major"), request.get("minors")
        common = set(protocol.MINORS) & {one for one in minors if type(one) is int} if type(minors) is list else set()
        if major != protocol.MAJOR or not common:
            raise _Refusal(20, f"no common version: {protocol.MAJOR} with minors {protocol.MINORS} is spoken here")
        connection.greeted = True
        return {
            "major": protocol.MAJOR,
            "minor": max(common),
            "software": _SOFTWARE,
            "pid": os.getpid(),
            "model": self._model,
            "grace": self.limits.grace,
            "idle": self.limits.idle,
        }

    def _open(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        name = _id(request)
        with self._opening:
            entry = self._entries.get(name)
            created = entry is None
            if entry is None:
                if len(self._entries) >= self.limits.sessions:
                    raise _Refusal(4, f"there are {self.limits.sessions:,} sessions already")
                with self._turns:
                    session = self._pipeline.open(name)
                entry = _Entry(session, secrets.token_hex(8), session.epoch)
            with self._table:
                self._entries[name] = entry
                entry.holders.add(connection)
                entry.expires = None
                connection.held[name] = entry
        number = entry.work.number if entry.work is not None else 0
        return {**entry.told(), "created": created, "number": number, "incarnation": entry.incarnation}

    def _held(self, connection: _Connection, request: Mapping[str, Any]) -> _Entry:
        name = _id(request)
        entry = connection.held.get(name)
        if entry is None:
            raise _Refusal(2, "this connection has not opened the session", outcome="miss", session=name.hex())
        return entry

    def _require(self, entry: _Entry) -> None:
        if entry.over:
            raise _Refusal(2, "the session has been released", outcome="miss", session=entry.session.id.hex())

    def _begin(
        self, entry: _Entry, request: Mapping[str, Any], wish: tuple[Any, ...], position: int | None = None
    ) -> _Work:
        """The work of this request: new, or what there is of it. The entry's lock is held."""
        self._require(entry)
        number = _integer(request, "number", 1, (1 << 53) - 1)
        work = entry.work
        if work is not None and number <= work.number:
            if number < work.number or wish != work.wish:
                what = "an older request" if number < work.number else "another request of the same number"
                raise _Refusal(5, f"{what}: the last one was {work.number}", **entry.told())
            expected = work.position + work.done
        else:
            expected = entry.position if position is None else position
            work = _Work(number, wish, expected)
        if not work.finished and expected != entry.position:
            cause = f"the session is at position {entry.position}, not at {expected}"
            raise _Refusal(2, cause, outcome="position_mismatch", **entry.told())
        return work

    def _extend(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        entry = self._held(connection, request)
        tokens = _token_list(request, int(self._model["n_vocab"]))
        if not tokens:
            raise _Refusal(1, "tokens is empty")
        outputs = request.get("outputs", "last")
        if outputs not in ("last", "all", "none"):
            raise _Refusal(1, f"outputs is {outputs!r:.40}, not last, all or none")
        position = _integer(request, "position", 0, (1 << 31) - 1)
        with entry.lock:
            work = self._begin(entry, request, ("extend", tuple(tokens), outputs, position), position)
            room = self._pipeline.positions
            if work.position + len(tokens) > room:
                cause = f"{work.position + len(tokens)} positions do not fit a session of {room}"
                raise _Refusal(4, cause, **entry.told())
            entry.work = work
            while work.done < len(tokens):
                part = tokens[work.done : work.done + self._pipeline.n_batch]
                last = work.done + len(part) == len(tokens)
                wanted = outputs if last or outputs != "last" else "none"
                try:
                    step = self._step(connection, entry.session, part, wanted)
                except Exception as error:
                    raise self._placed(error, entry) from error
                work.sampled += step.sampled
                work.done += len(part)
                self._count("tokens", len(part))
            work.finished = True
            return {**entry.told(), "position": work.position + work.done, "sampled": work.sampled}

    def _step(self, connection: _Connection, session: Session, tokens: Sequence[int], outputs: str) -> Step:
        """One batch, in turn, once there is room. Raises CapacityError, WorkerError, _Gone."""
        deadline = time.monotonic() + self.limits.wait
        while True:
            connection.require()
            with self._turns:
                if self._stopping:
                    raise _Refusal(8, "the service is about to end")
                try:
                    return session.extend(tokens, outputs=outputs)
                except CapacityError as error:
                    if error.never or self._when_full != "wait":
                        raise
                    refused, freed = error, self._freed
            left = deadline - time.monotonic()
            if left <= 0:
                raise _Refusal(3, f"no room in {self.limits.wait:g} seconds: {refused}", outcome="full")
            with self._room:
                if self._freed == freed and not self._stopping:
                    self._room.wait(min(left, _LOOK_AGAIN))

    def _placed(self, error: Exception, entry: _Entry) -> Exception:
        """The same error, with where the session is now."""
        if isinstance(error, _Gone):
            return error
        told = self._explain(error, "extend")
        code = int(told.pop("code"))
        cause = str(told.pop("cause"))
        known = {key: value for key, value in told.items() if key not in ("name", "message", "operation")}
        return _Refusal(code, cause, **{**entry.told(), **known})

    def _truncate(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        entry = self._held(connection, request)
        position = _integer(request, "position", 0, (1 << 31) - 1)
        with entry.lock:
            work = self._begin(entry, request, ("truncate", position))
            if not work.finished:
                if position > entry.position:
                    cause = f"the session is at position {entry.position}, before {position}"
                    raise _Refusal(2, cause, outcome="position_mismatch", **entry.told())
                with self._turns:
                    entry.session.truncate(position)
                work.finished = True
                entry.work = work
                self._freed_some()
            return {**entry.told(), "position": position}

    def _release_request(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        name = _id(request)
        entry = connection.held.get(name)
        released = False
        if entry is not None:
            with entry.lock:
                released = self._release(entry)
        return {"session": name.hex(), "released": released}

    def _release(self, entry: _Entry, *, only_expired: bool = False) -> bool:
        """End a session; whether it was there. The entry's lock is held."""
        with self._opening:
            with self._table:
                if entry.over:
                    return False
                if only_expired and (entry.expires is None or entry.expires > time.monotonic()):
                    return False
                entry.over = True
            try:
                with self._turns:
                    entry.session.release()
            finally:
                with self._table:
                    del self._entries[entry.session.id]
                    for holder in entry.holders:
                        holder.held.pop(entry.session.id, None)
                    entry.holders.clear()
                self._freed_some()
        return True

    def _count(self, what: str, count: int = 1) -> None:
        with self._table:
            self._counts[what] += count

    def _freed_some(self) -> None:
        with self._room:
            self._freed += 1
            self._room.notify_all()

    def _save(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        entry, name = self._held(connection, request), _plain_name(request)
        with entry.lock:
            self._require(entry)
            with self._turns:
                entry.session.save(name)
            return entry.told()

    def _restore(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        entry, name = self._held(connection, request), _plain_name(request)
        with entry.lock:
            work = self._begin(entry, request, ("restore", name))
            if not work.finished:
                if entry.position:
                    cause = f"the session has {entry.position} tokens; one is restored into a session without any"
                    raise _Refusal(2, cause, outcome="position_mismatch", **entry.told())
                with self._turns:
                    entry.session.restore(name)
                work.finished = True
                entry.work = work
            return entry.told()

    def _tokenize(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        text = request.get("text")
        if not isinstance(text, str):
            raise _Refusal(1, "text is not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape it, and no worker reads it
            raise _Refusal(1, f"text is not Unicode: its character {error.start} is half of a surrogate pair") from None
        flags = {key: request.get(key, True) for key in ("add_special", "parse_special")}
        for key, value in flags.items():
            if not isinstance(value, bool):
                raise _Refusal(1, f"{key} is not true or false")
        with self._turns:
            tokens = self._pipeline.tokenize(text, **flags)
        return {"tokens": tokens}

    def _detokenize(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        tokens = _token_list(request, int(self._model["n_vocab"]))
        unknown = sorted({token for token in tokens if token not in self._pieces})
        if unknown:
            with self._turns:
                self._pieces.update(zip(unknown, self._pipeline.detokenize(unknown), strict=True))
        return {"pieces": [self._pieces[token].hex() for token in tokens]}

    def _status(self, connection: _Connection, request: Mapping[str, Any]) -> dict[str, Any]:
        found = self._pipeline.status()
        with self._status_lock:
            tables = self._session_bytes()
        now = time.monotonic()
        with self._table:
            connections = len(self._connections)
            entries = {name.hex(): (entry, len(entry.holders)) for name, entry in self._entries.items()}
        for shard, described in zip(found["shards"], self._pipeline.shards, strict=True):
            shard["weight_bytes"] = described.weight_bytes
        for session in found["sessions"]:
            known = [table[session["id"]] for table in tables if session["id"] in table]
            # Keys, values and states on all shards together; None until each of them has said it.
            complete = len(known) == len(found["shards"])
            session["kv_bytes"] = sum(known) if complete else None if session["hot"] else 0
            entry, holders = entries.get(session["id"], (None, 0))
            session["clients"] = holders
            session["age"] = 0.0 if entry is None else round(now - entry.began, 3)
            session["epochs"] = 0 if entry is None else session["epoch"] - entry.epoch
        return {
            "service": {
                "pid": os.getpid(),
                "uptime_s": round(time.monotonic() - self._began, 3),
                "connections": connections,
                "connections_max": self.limits.connections,
                **self._counts,
                "waiting": self._turns.waiting,
            },
            "model": self._model,
            **found,
            "when_full": self._when_full,
            "events": list(self._pipeline.log)[-_EVENTS:],
        }

    def _session_bytes(self) -> list[dict[str, int]]:
        """Of each shard, the bytes of its sessions by their ids, as it said last. Waits for a short time only."""
        return [
            {
                str(entry["session"]): int(entry["kv_bytes"])
                for entry in told.get("sessions", ())
                if entry.get("state") == "live"
            }
            for told in self._tables.answers(self._pipeline.workers, STATUS_WAIT)
        ]


_TYPES: Final = frozenset(int(kind) for kind in Type) - {int(Type.ERROR)}
_HANDLERS: Final[dict[Type, Callable[[Service, _Connection, Mapping[str, Any]], dict[str, Any]]]] = {
    Type.HELLO: Service._hello,
    Type.OPEN: Service._open,
    Type.EXTEND: Service._extend,
    Type.TRUNCATE: Service._truncate,
    Type.RELEASE: Service._release_request,
    Type.SAVE: Service._save,
    Type.RESTORE: Service._restore,
    Type.TOKENIZE: Service._tokenize,
    Type.DETOKENIZE: Service._detokenize,
    Type.STATUS: Service._status,
}


def _described(code: int, cause: str, operation: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    known = dict(details or {})
    shard = known.get("shard")
    where = f"shard [{shard[0]},{shard[1]}): " if shard else ""
    message = f"{where}{cause}"
    return {"code": code, "name": ERRORS[code], "message": message, "operation": operation, "cause": cause, **known}


def _full(cause: str, operation: str) -> dict[str, Any]:
    return _described(3, cause, operation, {"outcome": "full"})


def _packed_error(request: int, text: Mapping[str, Any]) -> bytes:
    return protocol.pack(Type.ERROR, request, text, reply=True)


def _id(request: Mapping[str, Any]) -> bytes:
    value = request.get("session")
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise _Refusal(1, f"session is {value!r:.60}, not 32 hexadecimal digits")
    return bytes.fromhex(value)


def _integer(request: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = request.get(key)
    if type(value) is not int or not least <= value <= most:
        raise _Refusal(1, f"{key} is {value!r:.60}, not a whole number from {least} to {most}")
    return value


def _token_list(request: Mapping[str, Any], n_vocab: int) -> list[int]:
    value = request.get("tokens")
    if not isinstance(value, list):
        raise _Refusal(1, "tokens is not a list")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < n_vocab:
            raise _Refusal(1, f"token {place} is {token!r:.60}, not a whole number from 0 to {n_vocab - 1}")
    return value


def _plain_name(request: Mapping[str, Any]) -> str:
    value = request.get("name")
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _Refusal(1, f"name is {value!r:.60}, not 1 to 100 letters, digits, dots, dashes and underscores")
    return value


def _model_of(pipeline: SessionPipeline) -> dict[str, Any]:
    """What clients are told of the model."""
    model = pipeline.model
    return {
        "architecture": model.architecture,
        "n_layer": model.n_layer,
        "n_vocab": model.n_vocab,
        "n_batch": pipeline.n_batch,
        "positions": pipeline.positions,
        "slots": pipeline.slots,
        "eos": list(model.eos),
    }
