"""A client of ``boundary-bundle serve`` (spec/service-protocol.md)."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import service_protocol as protocol
from .service_protocol import ProtocolError, Type, default_socket

__all__ = ["Client", "ClientSession", "ServiceError"]

#: Seconds to wait for an answer: others may be served before, and what was lost may have to be computed again.
TIMEOUT: Final = 600.0
#: Seconds between two looks for a service that is not there yet.
_LOOK_AGAIN: Final = 0.05


class ServiceError(Exception):
    """The service refused a request, or is not there.

    ``code`` and ``name`` are the protocol's (spec/service-protocol.md, Errors), or 0 with ``lost`` (no connection),
    ``timeout`` or ``reply`` (an answer that makes no sense). ``operation`` is what was asked for and ``cause`` the
    reason in words. Where the service knows them: ``outcome`` (why a session is not as expected), ``shard`` (the
    layers [start, end) of the worker that refused), ``session``, and its ``epoch`` and ``position`` now. ``details``
    is all that was said.
    """

    def __init__(
        self, code: int, name: str, cause: str, operation: str, details: Mapping[str, Any] | None = None
    ) -> None:
        told = dict(details or {})
        self.code = code
        self.name = name
        self.cause = cause
        self.operation = operation
        self.details = told
        self.outcome: str | None = told.get("outcome")
        self.epoch: int | None = told.get("epoch")
        self.position: int | None = told.get("position")
        shard = told.get("shard")
        self.shard = (int(shard[0]), int(shard[1])) if isinstance(shard, list) and len(shard) == 2 else None
        session = told.get("session")
        self.session = bytes.fromhex(session) if isinstance(session, str) else None
        number = f"error {code} {name}: " if code else ""
        outcome = f"{self.outcome}: " if self.outcome else ""
        super().__init__(f"service: {operation}: {number}{outcome}{told.get('message', cause)}")


class _Lost(Exception):
    """The connection is gone; why, in words."""


class ClientSession:
    """A session that this client holds; made by :meth:`Client.open`. At the end of a ``with`` it is released.

    ``position`` is the number of tokens that it has; ``epoch`` rises when the shards have to begin anew with it.
    """

    def __init__(self, client: Client, id: bytes, opened: Mapping[str, Any]) -> None:
        self._client = client
        self.id = id
        self.epoch = int(opened["epoch"])
        self.position = int(opened["position"])
        self._number = int(opened["number"])
        self._incarnation = opened["incarnation"]
        self._unanswered: tuple[Type, dict[str, Any]] | None = None
        self._over: str | None = None

    def extend(self, tokens: Sequence[int], *, outputs: str = "last") -> list[int]:
        """Put ``tokens`` behind what the session holds; what was sampled: after the last of them, after ``all`` or
        after ``none``. Raises ServiceError; then the same call goes on where this one stopped, and
        ``truncate(session.position)`` takes back what was done of it.
        """
        reply = self._change(Type.EXTEND, {"position": self.position, "tokens": list(tokens), "outputs": outputs})
        return [int(token) for token in reply["sampled"]]

    def generate(self, tokens: Sequence[int], count: int, *, stop: Iterable[int] | None = None) -> Iterator[int]:
        """Up to ``count`` tokens that follow ``tokens``, each as soon as it is there, the last one of ``stop`` (the
        model's ends of text) included. The token that came last is not part of the session yet: it is the first
        of what is given next.
        """
        ends = frozenset(self._client.model["eos"] if stop is None else stop)
        following = list(tokens)
        for _ in range(count):
            token = self.extend(following)[-1]
            yield token
            if token in ends:
                return
            following = [token]

    def truncate(self, position: int) -> None:
        """Forget the tokens from ``position`` on. Raises ServiceError."""
        self._change(Type.TRUNCATE, {"position": position})

    def release(self) -> None:
        """End the session, for whoever holds it. May be called twice. Raises ServiceError."""
        if self._over is None:
            self._client._request(Type.RELEASE, {"session": self.id.hex()}, self)
            self._end("the session has been released")

    def save(self, name: str) -> None:
        """Write tokens and states into the service's ``--state-dir``. Raises ServiceError."""
        self._client._request(Type.SAVE, {"session": self.id.hex(), "name": name}, self)

    def restore(self, name: str) -> None:
        """Take over what was saved from a session of this id; this one must be without tokens. Raises ServiceError."""
        self._change(Type.RESTORE, {"name": name})

    def __enter__(self) -> ClientSession:
        return self

    def __exit__(self, *_: object) -> None:
        # What led here is what the caller hears of; what is not released now is when the connection ends.
        with contextlib.suppress(ServiceError):
            self.release()

    def _change(self, kind: Type, wish: dict[str, Any]) -> dict[str, Any]:
        with self._client._lock:
            # The same number for the same wish: the service goes on with what it has of it.
            if self._unanswered != (kind, wish):
                self._number += 1
                self._unanswered = (kind, wish)
            numbered = {**wish, "session": self.id.hex(), "number": self._number}
            reply = self._client._request(kind, numbered, self)
            self._unanswered = None
            self.epoch, self.position = int(reply["epoch"]), int(reply["position"])
        return reply

    def _end(self, reason: str) -> None:
        self._over = reason
        self._client._sessions.pop(self.id, None)


class Client:
    """A connection to a service on this machine. Raises ServiceError when there is none.

    ``path`` is its socket, by default the one that ``boundary-bundle serve`` takes by default. ``timeout`` limits the
    wait for each answer, in seconds; None waits for ever. For ``wait`` seconds a service is looked for that may only
    just have been started. A connection that is lost is made once more, with the
    sessions that are open, and the request is repeated, unless ``reconnect`` is False: the service does not run it
    twice. May be used by several threads; one request is under way at a time.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        timeout: float | None = TIMEOUT,
        reconnect: bool = True,
        wait: float = 0.0,
    ) -> None:
        self.path = default_socket() if path is None else Path(path)
        #: What hello said of the model: architecture, n_layer, n_vocab, n_batch, positions (of one session),
        #: slots (sessions that the shards hold at once), eos.
        self.model: dict[str, Any] = {}
        self.hello: dict[str, Any] = {}
        self._timeout = timeout
        self._reconnect = reconnect
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._sessions: dict[bytes, ClientSession] = {}
        self._pieces: dict[int, bytes] = {}
        self._socket: socket.socket | None = None
        self._closed = False
        deadline = time.monotonic() + wait
        with self._lock:
            while self._socket is None:
                try:
                    self._connect()
                except _Lost as error:
                    if time.monotonic() >= deadline:
                        raise ServiceError(0, "lost", str(error), "connect") from None
                    time.sleep(_LOOK_AGAIN)

    def open(self, id: bytes | None = None) -> ClientSession:
        """The session of this id (16 bytes; absent: new ones), as it is or begun. Raises ServiceError."""
        name = secrets.token_bytes(16) if id is None else bytes(id)
        with self._lock:
            found = self._sessions.get(name)
            if found is None:
                reply = self._request(Type.OPEN, {"session": name.hex()})
                found = self._sessions[name] = ClientSession(self, name, reply)
            return found

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``. Raises ServiceError."""
        wish = {"text": text, "add_special": add_special, "parse_special": parse_special}
        return [int(token) for token in self._request(Type.TOKENIZE, wish)["tokens"]]

    def detokenize(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token. Raises ServiceError."""
        return [bytes.fromhex(piece) for piece in self._request(Type.DETOKENIZE, {"tokens": list(tokens)})["pieces"]]

    def text(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of ``tokens``, piece by piece as they come, whole characters only; ends of text have none."""
        ends = frozenset(self.model["eos"])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            if token in ends:
                continue
            if token not in self._pieces:
                self._pieces[token] = b"".join(self.detokenize([token]))
            if piece := decoder.decode(self._pieces[token]):
                yield piece
        if piece := decoder.decode(b"", True):
            yield piece

    def status(self) -> dict[str, Any]:
        """What the service, its shards and its sessions are doing (spec/service-protocol.md, Status)."""
        return self._request(Type.STATUS)

    def close(self) -> None:
        """End the connection, and a request that another thread waits for; sessions that nobody else holds are
        released after the service's grace.
        """
        self._closed = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- messages

    def _request(
        self, kind: Type, wish: Mapping[str, Any] | None = None, session: ClientSession | None = None
    ) -> dict[str, Any]:
        operation = kind.name.lower()
        with self._lock:
            if self._closed:
                raise ServiceError(0, "lost", "the client has been closed", operation)
            fresh = self._socket is None
            try:
                if fresh:
                    self._connect()
                return self._exchange(kind, wish, session)
            except _Lost as error:
                self._drop()
                if fresh or self._closed or not self._reconnect:
                    raise ServiceError(0, "lost", str(error), operation) from None
            try:
                self._connect()
                return self._exchange(kind, wish, session)
            except _Lost as error:
                self._drop()
                raise ServiceError(0, "lost", str(error), operation) from None

    def _connect(self) -> None:
        """Connect, say hello, and open again what is open. Raises _Lost and ServiceError."""
        self._socket = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._timeout)
            try:
                connection.connect(os.fspath(self.path))
            except OSError as error:
                raise _Lost(f"no service at {self.path}: {error.strerror or error}") from None
            self.hello = self._exchange(Type.HELLO, {"major": protocol.MAJOR, "minors": protocol.MINORS})
            self.model = self.hello.get("model", {})
            for session in list(self._sessions.values()):
                reply = self._exchange(Type.OPEN, {"session": session.id.hex()})
                if reply["incarnation"] != session._incarnation:
                    if reply["created"]:
                        self._exchange(Type.RELEASE, {"session": session.id.hex()})
                    session._end("the connection was lost, and the service has released the session since")
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(
        self, kind: Type, wish: Mapping[str, Any] | None = None, session: ClientSession | None = None
    ) -> dict[str, Any]:
        operation = kind.name.lower()
        if session is not None and session._over is not None:
            known = {"outcome": "miss", "session": session.id.hex()}
            raise ServiceError(2, "session", session._over, operation, known)
        number = next(self._ids)
        try:
            message = protocol.pack(kind, number, wish)
        except ProtocolError as error:
            raise ServiceError(1, "argument", str(error), operation) from None
        assert self._socket is not None
        try:
            # What was said before the connection was closed is worth more than that it is closed.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(message)
            header = protocol.unpack_header(self._receive(protocol.HEADER_BYTES))
            text = protocol.parse_text(self._receive(header.text_length))
        except TimeoutError:
            self._drop()
            raise ServiceError(0, "timeout", f"no answer in {self._timeout:g} seconds", operation) from None
        except ProtocolError as error:
            self._drop()
            raise ServiceError(0, "reply", str(error), operation) from None
        except OSError as error:
            raise _Lost(f"the connection to {self.path} broke: {error.strerror or error}") from None
        except BaseException:
            # Such as a Ctrl-C: the answer to this would be taken for that to the next.
            self._drop()
            raise
        if header.type == Type.ERROR and header.request in (number, 0):
            if header.request == 0:
                self._drop()
            cause = str(text.get("cause", text.get("message", "no reason given")))
            raise ServiceError(int(text.get("code", 0)), str(text.get("name", "")), cause, operation, text)
        if (header.type, header.reply, header.request) != (kind, True, number):
            self._drop()
            raise ServiceError(0, "reply", f"an answer of type {header.type} to request {header.request}", operation)
        return text

    def _receive(self, count: int) -> bytearray:
        assert self._socket is not None
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise _Lost("the service has closed the connection")
            view = view[got:]
        return data
