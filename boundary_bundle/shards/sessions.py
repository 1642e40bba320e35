"""Sessions over a pipeline: the driver holds each one's tokens, the shards hold what they computed of them.

What the shards hold is hot state, and may be gone at any time: evicted, lost with a worker, taken over by another
driver. The token history is the truth. A session that is not hot on every shard is reset on all of them and replayed
from its history before it goes on, so that no shard ever computes on another history than the others
(spec/worker-protocol.md, Sessions).
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ..writing import PARTIAL, write_whole
from .batch import Batch, SessionRow
from .pipeline import HopTime, Pipeline, PipelineError, Relay, ShardTime, Step
from .plan import Plan
from .protocol import Outcome, Type
from .worker import (
    REQUEST_TIMEOUT,
    Description,
    Inquiry,
    LocalWorker,
    Pending,
    Recipe,
    Reply,
    SessionInfo,
    SessionRefused,
    Settings,
    Worker,
    WorkerError,
    close_workers,
)

__all__ = ["CapacityError", "Outcome", "Session", "SessionPipeline", "SessionRefused", "local_workers"]

#: How many events the log keeps, and of how many released ids the epochs are remembered (as many as a worker does).
LOG_EVENTS: Final = 10_000
REMEMBERED: Final = 4096
#: Seconds over which rates are taken, and that a status waits for workers that compute.
RATE_WINDOW: Final = 10.0
STATUS_WAIT: Final = 0.2
#: Seconds after which a request that waits for room looks again: another driver's sessions may have gone.
LOOK_AGAIN: Final = 0.25

_COMPUTE = 10
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
#: A file of a saved session that is being written, by a driver or by a worker, with its process.
_PARTIAL = re.compile(rf"{re.escape(PARTIAL)}(\d+)-\w+|\.[A-Za-z0-9._-]+\.bundle\.(\d+)\.\d+")
#: Outcomes that a reset and a replay put right.
_REPLAYED = (Outcome.MISS, Outcome.EVICTED, Outcome.STALE_EPOCH, Outcome.POSITION_MISMATCH)

T = TypeVar("T")


class CapacityError(PipelineError):
    """There is no room for a request. ``never``: there never will be; else there is none now."""

    def __init__(self, message: str, *, never: bool) -> None:
        super().__init__(message)
        self.never = never


def local_workers(
    program: Path | str,
    model: Path | str,
    settings: Settings,
    *,
    state_dir: Path | str | None = None,
    extra: Sequence[str] = (),
    timeout: float | None = REQUEST_TIMEOUT,
) -> Callable[[tuple[int, int]], Worker]:
    """A ``start`` for :class:`SessionPipeline`: child processes on this machine, see :class:`LocalWorker`."""

    def start(layers: tuple[int, int]) -> Worker:
        return LocalWorker(program, model, layers, settings, extra, timeout, state_dir)

    return start


class Session:
    """One sequence of tokens. Made by :meth:`SessionPipeline.open`; all that it does is the pipeline's.

    ``tokens`` is the history, to be read only. ``epoch`` rises whenever the shards begin anew with the session after
    something went wrong. A ``pinned`` session is never chosen when room is made for others; it may be set.
    """

    def __init__(self, pipeline: SessionPipeline, id: bytes, epoch: int) -> None:
        self.id = id
        self.epoch = epoch
        self.tokens: list[int] = []
        self.pinned = False
        self.released = False
        self._pipeline = pipeline
        self._hot = False
        self._used = time.monotonic()

    def __repr__(self) -> str:
        return f"<Session {self.id.hex()} epoch {self.epoch} position {self.position} {'hot' if self.hot else 'cold'}>"

    @property
    def position(self) -> int:
        """How many tokens it has."""
        return len(self.tokens)

    @property
    def hot(self) -> bool:
        """Whether, as far as is known, every shard holds it as it is."""
        return self._hot and not self._pipeline._unsettled

    def extend(
        self, tokens: Sequence[int], *, outputs: str = "last", logits: bool = False, sample: bool = True
    ) -> Step:
        """Go on with ``tokens``, in batches of n_batch; ``outputs`` is none, last or all.

        What comes back is that of all batches together. Raises what :meth:`SessionPipeline.decode` does. A batch that
        fails leaves those before it in the history; what can never fit is refused before anything is sent.
        """
        if outputs not in ("none", "last", "all"):
            raise ValueError(f"outputs {outputs!r} is not none, last or all")
        if not len(tokens):
            raise ValueError("there are no tokens to go on with")
        pipeline, count = self._pipeline, len(tokens)
        pipeline._require_positions({self: count})
        steps = []
        for start in range(0, count, pipeline.n_batch):
            end = min(start + pipeline.n_batch, count)
            wanted = [outputs == "all" or (outputs == "last" and place == count - 1) for place in range(start, end)]
            items = [(self, token, output) for token, output in zip(tokens[start:end], wanted, strict=True)]
            steps.append(pipeline.decode(items, logits=logits and any(wanted), sample=sample))
        return _joined(steps)

    def truncate(self, position: int) -> None:
        """Keep the first ``position`` tokens. Raises ValueError when there are not so many.

        Where a shard cannot, all of them give the session up, and what is left is replayed when it is used next.
        """
        self._pipeline._truncate(self, position)

    def release(self) -> None:
        """End the session on every shard. It cannot be used any more; releasing it again does nothing."""
        self._pipeline._release(self)

    def save(self, name: str) -> None:
        """Write it to files: every shard NAME.START-END.bundle in its state folder, the driver NAME.json in its own.

        Raises PipelineError, also for the driver's file, and WorkerError. Until all of them are written there is
        nothing saved under the name.
        """
        self._pipeline._save(self, name)

    def restore(self, name: str) -> None:
        """Become what was saved under ``name`` from a session of the same id; the epoch is new.

        Raises PipelineError (nothing saved, damaged, another session, range or recipe), and WorkerError for what a
        worker says of its file. Then the session has the tokens that it had, and the shards hold nothing of it.
        """
        self._pipeline._restore(self, name)


@dataclass
class _Call:
    """What one call of the driver has tried already. ``deadline`` is until when it waits for room."""

    deadline: float
    reset: set[tuple[bytes, tuple[int, int] | None]] = field(default_factory=set)
    evicted: set[bytes] = field(default_factory=set)
    restarted: bool = False
    exhausted: bool = False
    waiting: bool = False


class SessionPipeline:
    """Workers of a plan, and sessions over them. May be used by several threads; one batch is under way at a time.

    ``start`` begins the worker of a layer range; it need not wait until the worker is ready. It is called again when a
    worker is lost: then every shard's table is cleared, and each session is replayed when it is used next.
    ``max_restarts`` limits how often in a row, without a decode that succeeds in between; after that every call tries
    it once (0: never). ``when_full`` says what to do when there is room, but not now: ``evict`` the least recently
    used session that is not pinned, ``wait`` up to ``wait`` seconds until somebody releases one, or ``refuse``.
    ``state_dir`` is the folder of the driver's part of saved sessions. ``on_event`` is called with every event of
    ``log``, under the lock: it must be quick.

    Raises PipelineError when the workers make no pipeline or know no sessions, and WorkerError.

    The rules by which it replays, for a reference that is to do the same: a history goes in batches of ``n_batch``
    tokens without outputs, one session after another in the order in which the batch names them first, then comes the
    batch. Each takes the lowest local sequence that is free.
    """

    def __init__(
        self,
        start: Callable[[tuple[int, int]], Worker],
        plan: Plan,
        *,
        relay: Relay | None = None,
        when_full: str = "evict",
        wait: float = 30.0,
        max_restarts: int = 3,
        state_dir: Path | str | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        if when_full not in ("evict", "wait", "refuse"):
            raise ValueError(f"when_full {when_full!r} is not evict, wait or refuse")
        self.plan = plan
        self.when_full = when_full
        self.wait = wait
        self.max_restarts = max_restarts
        self.state_dir = None if state_dir is None else Path(state_dir)
        #: What happened, the oldest first: {"event": .., "time": seconds since 1970, ..}, ids in hexadecimal. Events:
        #: new, open, replay, truncate, release, evict, reset, save, restore of a session; refused, by a shard, with the
        #: outcome, and error for what it refused otherwise; clear, lost, restart, wait.
        self.log: collections.deque[dict[str, Any]] = collections.deque(maxlen=LOG_EVENTS)
        self.on_event = on_event
        self._start = start
        self._lock = threading.Condition(threading.RLock())
        self._closed = False
        #: Every session that is open, and those of them that take a sequence on the shards, least recently used first.
        self._sessions: dict[bytes, Session] = {}
        self._present: collections.OrderedDict[bytes, Session] = collections.OrderedDict()
        self._epochs: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        #: Up while a request that changes shards is not answered: whatever breaks off leaves it up.
        self._under_way = False
        #: The shards may differ: they are cleared before anything else.
        self._unsettled = False
        self._lost: dict[int, WorkerError] = {}
        self._restarts_in_row = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=10_000)
        self._restarts = [0] * len(plan)
        self._statistics = Inquiry(Type.STATISTICS)
        self._status_lock = threading.Lock()
        self._began = time.monotonic()
        self._first_epoch = time.time_ns() // 1000
        self._sweep()
        workers: list[Worker] = []
        try:
            workers.extend(start(layers) for layers in plan)
            for worker in workers:
                worker.ready()
            self._pipeline = Pipeline(workers, relay)
            self._recipe = self._common_recipe()
            tables = [worker.sessions() for worker in workers]
            self.slots = min(table.slots for table in tables)
            self.positions = min(table.positions for table in tables)
            self.n_batch = int(self.model.raw["n_batch"])
        except BaseException:
            close_workers(workers)
            raise

    @property
    def model(self) -> Description:
        """The first shard's description; what it says of the model holds for all."""
        return self._pipeline.model

    @property
    def shards(self) -> list[Description]:
        """Every shard's description, as of the start."""
        return self._pipeline.shards

    @property
    def workers(self) -> list[Worker]:
        """The workers as they are now."""
        return list(self._pipeline.workers)

    def __enter__(self) -> SessionPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what others call

    def open(self, id: bytes | None = None, *, epoch: int | None = None) -> Session:
        """A session without tokens; None: 16 random bytes. The shards hear of it when it is used.

        An id that others may have used is fenced off by an ``epoch`` above theirs. Absent, it is one more than when
        this driver released the id, at least the microseconds since 1970 when the driver began: who comes later wins,
        and no two drivers share an epoch. A random id begins with 1. Raises ValueError for an id of another length,
        PipelineError when it is open.
        """
        if id is not None and len(id) != 16:
            raise ValueError(f"a session's id has 16 bytes, not {len(id)}")
        with self._operation():
            name = os.urandom(16) if id is None else bytes(id)
            if name in self._sessions:
                raise PipelineError(f"session {name.hex()} is open already")
            known = self._epochs.pop(name, 0)
            first = 1 if id is None else max(known + 1, self._first_epoch)
            session = self._sessions[name] = Session(self, name, first if epoch is None else epoch)
            self._counts["opened"] += 1
            self._event("new", session, epoch=session.epoch)
            return session

    def decode(self, items: Sequence[tuple[Session, int, bool]], *, logits: bool = False, sample: bool = True) -> Step:
        """One batch of (session, token, output), in batch order; positions follow each session's history.

        Sessions that are not hot are replayed first. The tokens become history when all shards have computed them; if
        anything is raised they have not. Raises ValueError for items that make no batch, CapacityError, WorkerError for
        what is not put right by a replay, and what the relay raises.
        """
        if not items:
            raise ValueError("a batch needs a token")
        n_vocab = self.model.n_vocab
        added: dict[Session, list[int]] = {}
        for place, (session, token, _) in enumerate(items):
            if not 0 <= token < n_vocab:
                raise ValueError(f"token {place} of the batch is {token}, not one of the {n_vocab} of the vocabulary")
            added.setdefault(session, []).append(int(token))
        sessions = list(added)
        if len(items) > self.n_batch:
            message = f"a batch of {len(items)} tokens does not fit: the workers take {self.n_batch}"
            raise CapacityError(message, never=True)
        if len(sessions) > self.slots:
            message = f"a batch of {len(sessions)} sessions does not fit: the workers hold {self.slots}"
            raise CapacityError(message, never=True)
        counts = {session: len(tokens) for session, tokens in added.items()}

        def run() -> Step:
            self._require_positions(counts)  # again: it may have waited
            return self._run(sessions, self._batch(sessions, items), logits, sample)

        with self._operation():
            self._require_positions(counts)
            step = self._with_hot(sessions, run)
            # In one go: an interrupt comes between two instructions of Python, not within this one.
            collections.deque(map(list.extend, [s.tokens for s in sessions], added.values()), maxlen=0)
            self._under_way = False
            now = time.monotonic()
            for session in sessions:
                session._used = now
                self._present.move_to_end(session.id)
            self._restarts_in_row = 0
            self._counts["decodes"] += 1
            self._counts["tokens"] += len(items)
            self._recent.append((now, len(items)))
            return step

    def evict(self, session: Session | None = None) -> Session | None:
        """Give up the hot state of one session, the same one on every shard, and return it; None if there is none.

        Absent: the least recently used that is not pinned.
        """
        with self._operation():
            if session is not None:
                self._require_open(session)
            if self._unsettled:
                return None  # they are all cleared before the next use
            chosen = self._oldest(()) if session is None else session
            if chosen is None or chosen.id not in self._present:
                return None
            with contextlib.suppress(WorkerError):  # a lost worker: then all of them give everything up
                self._evict(chosen, "asked")
            return chosen

    def clear(self) -> None:
        """Give up all hot state on every shard. The sessions stay, with their tokens."""
        with self._operation():
            self._unsettled = True
            self._settle(self._call(), "asked")

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``."""
        return self._first(lambda worker: worker.tokenize(text, add_special=add_special, parse_special=parse_special))

    def detokenize(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        return self._first(lambda worker: worker.detokenize(tokens))

    def _first(self, ask: Callable[[Worker], T]) -> T:
        def action() -> T:
            try:
                return ask(self._pipeline.workers[0])
            except WorkerError as error:
                if error.code == 0:
                    self._lose(0, error)
                raise

        with self._operation():
            return self._with_hot([], action)

    def close(self) -> None:
        """End the workers. Who waits is refused. May be called twice."""
        self._closed = True
        # Without the lock: this is also how a computation that takes too long is ended.
        close_workers(self._pipeline.workers)
        with self._lock:
            # What was being started meanwhile.
            close_workers(self._pipeline.workers)
            self._lock.notify_all()

    def status(self) -> dict[str, Any]:
        """Shards, sessions, counts and rates, as JSON has them. It waits for nothing but :data:`STATUS_WAIT` seconds
        for a worker that computes, of which the last known numbers are given.

        ``outcomes`` counts the shards' answers to requests for sessions. ``idle`` is seconds since the last use,
        ``tokens_per_second`` is over the last :data:`RATE_WINDOW`.
        """
        with self._status_lock:
            shards = self._shard_status()
        now = time.monotonic()
        window = min(RATE_WINDOW, max(now - self._began, 1e-3))
        recent = [count for at, count in list(self._recent) if now - at <= window]
        sessions = [
            {
                "id": session.id.hex(),
                "epoch": session.epoch,
                "position": session.position,
                "hot": session.hot,
                "pinned": session.pinned,
                "idle": round(now - session._used, 3),
            }
            for session in list(self._sessions.values())
        ]
        return {
            "shards": shards,
            "sessions": sessions,
            "slots": self.slots,
            "positions": self.positions,
            "present": len(self._present),
            "when_full": self.when_full,
            "outcomes": {outcome.value: self._outcomes[outcome.value] for outcome in Outcome},
            "tokens_per_second": round(sum(recent) / window, 3),
            "decodes_per_second": round(len(recent) / window, 3),
            "uptime": round(now - self._began, 3),
            **{name: self._counts[name] for name in _COUNTS},
        }

    # -- the lock, and what is known of the shards

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        with self._lock:
            self._look()
            if self._closed:
                raise PipelineError("the pipeline has been closed")
            try:
                yield
            finally:
                self._look()

    def _look(self) -> None:
        """Whatever broke off, such as at a Ctrl-C, has left shards that may differ."""
        if self._under_way:
            self._unsettled = True
            self._under_way = False

    def _call(self) -> _Call:
        return _Call(time.monotonic() + self.wait)

    def _event(self, event: str, session: Session | None = None, **more: Any) -> None:
        entry: dict[str, Any] = {"event": event, "time": time.time()}
        if session is not None:
            entry["session"] = session.id.hex()
        entry.update(more)
        self.log.append(entry)
        if self.on_event is not None:
            self.on_event(entry)

    def _require_open(self, session: Session) -> None:
        if session._pipeline is not self:
            raise ValueError(f"session {session.id.hex()} is another pipeline's")
        if session.released:
            raise PipelineError(f"session {session.id.hex()} has been released")

    def _require_positions(self, counts: Mapping[Session, int]) -> None:
        """Refuse what can never fit. Whoever waited looks again: another thread may have added tokens."""
        for session, count in counts.items():
            self._require_open(session)
            if session.position + count > self.positions:
                raise CapacityError(
                    f"session {session.id.hex()} with {session.position} positions and {count} more does not fit: "
                    f"a session can have {self.positions}",
                    never=True,
                )
        if self.model.raw.get("kv_unified"):
            total = sum(session.position + count for session, count in counts.items())
            if total > self.model.n_ctx:
                raise CapacityError(
                    f"the sessions of the batch have {total} positions together: there are {self.model.n_ctx} cells",
                    never=True,
                )

    # -- requests

    def _lose(self, index: int, error: WorkerError) -> None:
        self._unsettled = True
        if index not in self._lost:
            self._lost[index] = error
            self._event("lost", shard=index, message=str(error))

    def _note(self, operation: str, error: WorkerError, session: Session | None) -> None:
        """A refusal, with what explains it."""
        more: dict[str, Any] = {"operation": operation, "message": str(error), "range": error.layer_range}
        if isinstance(error, SessionRefused):
            self._outcomes[error.outcome.value] += 1
            more |= {"outcome": error.outcome.value, "held_epoch": error.epoch, "held_position": error.position}
        self._event("refused" if isinstance(error, SessionRefused) else "error", session, **more)

    def _each(
        self, type: Type, text: Mapping[str, Any] | None, session: Session | None = None, file: str | None = None
    ) -> list[Reply | WorkerError]:
        """The same request to every shard, and what each answered: a reply, or a refusal after which it is as before.

        ``file`` is the stem of a name of its own for each shard. Raises WorkerError when a worker is lost; then the
        others have been asked all the same.
        """
        self._under_way = True
        asked: list[tuple[int, Pending]] = []
        for index, worker in enumerate(self._pipeline.workers):
            start, end = self.plan.ranges[index]
            own = text if file is None else {**(text or {}), "file": f"{file}.{start}-{end}.bundle"}
            try:
                asked.append((index, worker.request(type, own)))
            except WorkerError as error:
                self._lose(index, error)
        found: list[Reply | WorkerError] = []
        for index, pending in asked:
            try:
                found.append(pending.result())
                if session is not None:
                    self._outcomes[Outcome.HIT.value] += 1
            except WorkerError as error:
                if error.code == 0:
                    self._lose(index, error)
                else:
                    found.append(error)
                    self._note(type.name.lower(), error, session)
        self._under_way = False
        for lost in self._lost.values():
            raise lost
        return found

    def _run(self, sessions: Sequence[Session], batch: Batch, logits: bool, sample: bool) -> Step:
        """One batch through all shards. If it fails, its sessions are hot as before or reset, on every shard alike.

        Leaves ``_under_way`` up: the caller has to note what the shards hold now.
        """
        entered = 0

        def enter(count: int) -> None:
            nonlocal entered
            entered = count

        self._under_way = True
        try:
            step = self._pipeline._decode(batch, logits, sample, enter)
        except Exception as error:
            self._outcomes[Outcome.HIT.value] += max(0, entered - 1)
            self._under_way = False
            if isinstance(error, WorkerError) and error.code == 0:
                self._lose(entered - 1, error)
                raise
            refused = isinstance(error, WorkerError) and error.code != _COMPUTE
            if isinstance(error, WorkerError):
                self._note("decode", error, self._named(error, sessions))
            if entered and not (refused and entered == 1):
                # Some shards have computed it, or one has lost what it had.
                self._reset(sessions, "a batch failed half-way")
            raise
        self._outcomes[Outcome.HIT.value] += len(self.plan)
        return step

    def _named(self, error: WorkerError, sessions: Sequence[Session]) -> Session | None:
        """The session of the batch that a refusal is about."""
        name = error.session if isinstance(error, SessionRefused) else None
        return next((session for session in sessions if session.id == name), None)

    def _batch(self, sessions: Sequence[Session], items: Sequence[tuple[Session, int, bool]]) -> Batch:
        places = {session: row for row, session in enumerate(sessions)}
        upto = {session: session.position for session in sessions}
        positions = []
        for session, _, _ in items:
            positions.append(upto[session])
            upto[session] += 1
        return Batch(
            [token for _, token, _ in items],
            positions,
            [(places[session],) for session, _, _ in items],
            [output for _, _, output in items],
            [SessionRow(session.id, session.epoch, session.position) for session in sessions],
        )

    # -- from cold to hot

    def _with_hot(self, sessions: Sequence[Session], action: Callable[[], T]) -> T:
        """Do something with sessions that all shards hold, and what it takes to get there."""
        call = self._call()
        while True:
            try:
                self._settle(call)
                self._make_room(sessions, call)
                for session in sessions:
                    if not session._hot:
                        self._heat(session)
                return action()
            except WorkerError as error:
                self._retry(error, sessions, call)

    def _retry(self, error: WorkerError, sessions: Sequence[Session], call: _Call) -> None:
        """Raises ``error`` if it is of no use to try again."""
        if isinstance(error, SessionRefused):
            try:
                self._heal(error, sessions, call)
                return
            except SessionRefused:
                raise
            except WorkerError as meanwhile:
                error = meanwhile
        if error.code != 0 or call.exhausted:
            raise error

    def _heal(self, error: SessionRefused, sessions: Sequence[Session], call: _Call) -> None:
        """Put right what a refusal says, or raise it."""
        if error.outcome is Outcome.FULL:
            self._more_room(sessions, call, error)
            return
        if error.outcome not in _REPLAYED:
            raise error
        named = self._named(error, sessions)
        chosen = list(sessions) if named is None else [named]
        for session in chosen:
            if session.id in self._present:
                session.epoch = max(session.epoch, error.epoch or 0)
                self._reset([session], error.outcome.value)
            else:
                session.epoch = max(session.epoch, 1 + (error.epoch or 0))
        # Each shard may have lost it once.
        again = {(session.id, error.layer_range) for session in chosen}
        if again & call.reset:
            raise error
        call.reset |= again

    def _heat(self, session: Session) -> None:
        """Open a session on every shard and replay its history."""
        self._open(session)
        try:
            for start in range(0, session.position, self.n_batch):
                part = session.tokens[start : start + self.n_batch]
                row = SessionRow(session.id, session.epoch, start)
                plain = Batch.of_sequence(part, start, outputs="none")
                batch = Batch(plain.tokens, plain.positions, plain.sequences, plain.outputs, [row])
                self._run([session], batch, logits=False, sample=False)
                self._under_way = False
        except Exception:
            if not self._unsettled:
                self._reset([session], "a replay failed")
            raise
        if session.tokens:
            self._counts["replays"] += 1
            self._counts["replayed_tokens"] += session.position
            self._event("replay", session, epoch=session.epoch, position=session.position)
        session._hot = True

    def _open(self, session: Session) -> None:
        for attempt in (1, 2):
            self._present[session.id] = session
            text = {
                "session": session.id.hex(),
                "epoch": session.epoch,
                "position": 0,
                "recipe": self._recipe.fingerprint.hex(),
                "ingredients": self._recipe.shared,
            }
            found = self._each(Type.OPEN, text, session)
            refused = [answer for answer in found if isinstance(answer, WorkerError)]
            if refused:
                session.epoch = _newest(session.epoch, refused)
                self._reset([session], "not opened")
                raise refused[0]
            created = all(isinstance(answer, Reply) and answer.text.get("created") for answer in found)
            if created or attempt == 2:
                self._event("open", session, epoch=session.epoch, position=0)
                return
            # It was there under this epoch: then somebody else uses the id, and could go on with it unnoticed.
            self._reset([session], "in use under the same epoch")

    def _reset(self, sessions: Sequence[Session], why: str) -> None:
        """All shards give the sessions up, so that they take the same local sequence again; a new epoch fences off."""
        for session in sessions:
            session._hot = False
            if session.id in self._present and not self._unsettled:
                with contextlib.suppress(WorkerError):  # a lost worker: then all of them are cleared
                    found = self._each(Type.EVICT, {"session": session.id.hex()}, session)
                    session.epoch = _newest(session.epoch, found)
            session.epoch += 1
            self._present.pop(session.id, None)
            self._counts["resets"] += 1
            self._event("reset", session, epoch=session.epoch, why=why)
        self._lock.notify_all()

    # -- room

    def _oldest(self, keep: Sequence[Session]) -> Session | None:
        return next((s for s in self._present.values() if not s.pinned and s not in keep), None)

    def _make_room(self, sessions: Sequence[Session], call: _Call) -> None:
        """A sequence for each of the sessions. May wait, and then begins anew with what it finds."""
        while True:
            for session in sessions:
                self._require_open(session)
            self._reset([s for s in sessions if s.id in self._present and not s._hot], "left half-way")
            missing = sum(session.id not in self._present for session in sessions)
            if len(self._present) + missing <= self.slots:
                return
            self._more_room(sessions, call, None)
            self._settle(call)

    def _more_room(self, keep: Sequence[Session], call: _Call, refused: SessionRefused | None) -> None:
        """Free something, or wait for it. ``refused`` is the shard's own word that it is full."""
        others = any(session not in keep for session in self._present.values())
        if self.when_full == "evict":
            oldest = self._oldest(keep)
            if oldest is not None:
                self._evict(oldest, "room")
                return
        foreign = [] if refused is None else self._foreign(refused)
        if self.when_full == "evict":
            for entry in foreign:
                if not entry.pinned and entry.id not in call.evicted:
                    call.evicted.add(entry.id)
                    self._each(Type.EVICT, {"session": entry.id.hex()})
                    self._counts["evictions"] += 1
                    self._event("evict", why="room", foreign=entry.id.hex())
                    return
        message = f"all {self.slots} sequences are taken" if refused is None else refused.message
        if not others and not foreign:
            raise CapacityError(f"what was asked for does not fit by itself: {message}", never=True)
        left = call.deadline - time.monotonic()
        if self.when_full != "wait" or left <= 0:
            waited = f", after {self.wait:g} seconds" if self.when_full == "wait" else ""
            raise CapacityError(f"there is no room now{waited}: {message}", never=False)
        if not call.waiting:
            call.waiting = True
            self._counts["waits"] += 1
            self._event("wait", keep[0] if keep else None, why=message)
        self._lock.wait(min(left, LOOK_AGAIN))
        self._look()
        if self._closed:
            raise PipelineError("the pipeline has been closed")

    def _foreign(self, refused: SessionRefused) -> list[SessionInfo]:
        """The sessions of others on the shard that is full, the least recently used first."""
        index = next((k for k, layers in enumerate(self.plan) if layers == refused.layer_range), 0)
        try:
            table = self._pipeline.workers[index].sessions()
        except WorkerError as error:
            if error.code == 0:
                self._lose(index, error)
            raise
        return [entry for entry in reversed(table.sessions) if entry.state == "live" and entry.id not in self._present]

    def _evict(self, session: Session, why: str) -> None:
        session._hot = False
        found = self._each(Type.EVICT, {"session": session.id.hex()}, session)
        if any(isinstance(answer, WorkerError) for answer in found):
            # A shard did not have it as the driver thought: what it remembers may be another's.
            session.epoch = 1 + _newest(session.epoch, found)
        self._present.pop(session.id, None)
        self._counts["evictions"] += 1
        self._event("evict", session, epoch=session.epoch, position=session.position, why=why)
        self._lock.notify_all()

    # -- recovery

    def _settle(self, call: _Call, why: str = "shards may differ") -> None:
        """Bring the shards back to where they are known to be equal: all empty, the lost ones started again."""
        while self._unsettled:
            found: list[Reply | WorkerError] = []
            with contextlib.suppress(WorkerError):  # which is in _lost now
                found = self._each(Type.CLEAR, None)
            if self._lost:
                self._restart(call)
                continue
            for answer in found:
                if isinstance(answer, WorkerError):
                    raise answer
            for session in self._sessions.values():
                session._hot = False
                session.epoch += 1
            self._present.clear()
            self._unsettled = False
            self._counts["clears"] += 1
            self._event("clear", why=why)
            self._lock.notify_all()

    def _restart(self, call: _Call) -> None:
        """Start every lost worker again. They stay lost when one of them is lost while it begins."""
        for error in self._lost.values():
            if self._restarts_in_row >= self.max_restarts and (call.restarted or not self.max_restarts):
                call.exhausted = True
                raise error
        call.restarted = True
        self._restarts_in_row += 1
        fresh: dict[int, Worker] = {}
        index = 0
        try:
            for index in self._lost:
                self._pipeline.workers[index].close()
                self._sweep()
                fresh[index] = self._start(self.plan.ranges[index])
            for index, worker in fresh.items():
                worker.ready()
                self._require_same(index, worker)
            if self._closed:
                raise PipelineError("the pipeline has been closed")
        except BaseException as error:
            close_workers(fresh.values())
            if isinstance(error, WorkerError):
                if error.code == 0:
                    self._lost[index] = error
                    self._event("lost", shard=index, message=str(error))
                    return
                call.exhausted = True
            raise
        for index, worker in fresh.items():
            self._pipeline.workers[index] = worker
            self._restarts[index] += 1
            self._counts["restarts"] += 1
            del self._lost[index]
            self._event("restart", shard=index, pid=getattr(worker, "pid", None))

    def _common_recipe(self) -> Recipe:
        first = self.model.recipe
        for shard in self.shards:
            start, end = shard.layer_range
            if shard.recipe is None or first is None:
                raise PipelineError(f"shard [{start},{end}) knows no sessions: its worker has no recipe")
            if shard.recipe.fingerprint != first.fingerprint:
                name = first.difference(shard.recipe) or "its fingerprint"
                mine, theirs = shard.recipe.ingredients().get(name), first.ingredients().get(name)
                raise PipelineError(
                    f"shard [{start},{end}) has another recipe than the first: {name} is {mine}, not {theirs}"
                )
        assert isinstance(first, Recipe)
        return first

    def _require_same(self, index: int, worker: Worker) -> None:
        """A worker that is to take another's place holds the same. Raises PipelineError."""
        before, now = self.shards[index], worker.describe()
        for what in ("layer_range", "fingerprint", "recipe"):
            if getattr(before, what) != getattr(now, what):
                start, end = before.layer_range
                raise PipelineError(f"shard [{start},{end}) was started again and has another {what} than before")

    # -- the rest of what sessions do

    def _truncate(self, session: Session, position: int) -> None:
        with self._operation():
            self._require_open(session)
            if not 0 <= position <= session.position:
                raise ValueError(f"session {session.id.hex()} has {session.position} positions, not {position}")
            if position == session.position:
                return
            hot, session._hot = session.hot, False
            del session.tokens[position:]
            if not hot:
                return
            text = {"session": session.id.hex(), "epoch": session.epoch, "position": position}
            try:
                found = self._each(Type.TRUNCATE, text, session)
            except WorkerError:
                return  # lost: all of them are cleared before the next use, and the history is what it should be
            refused = next((answer for answer in found if isinstance(answer, WorkerError)), None)
            if refused is not None:
                self._reset([session], getattr(refused, "outcome", "truncate was refused"))
                return
            session._hot = True
            self._event("truncate", session, epoch=session.epoch, position=position)

    def _release(self, session: Session) -> None:
        with self._operation():
            if session.released:
                return
            self._require_open(session)
            present = session.id in self._present and not self._unsettled
            self._under_way = present  # whatever breaks off from here on, nobody knows this session any more
            session.released = True
            session._hot = False
            self._present.pop(session.id, None)
            self._sessions.pop(session.id, None)
            self._epochs[session.id] = session.epoch
            while len(self._epochs) > REMEMBERED:
                self._epochs.popitem(last=False)
            if present:
                with contextlib.suppress(WorkerError):
                    self._each(Type.RELEASE, {"session": session.id.hex(), "epoch": session.epoch}, session)
            self._counts["released"] += 1
            self._event("release", session, epoch=session.epoch)
            self._lock.notify_all()

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a saved session: letters, digits, '.', '_' and '-', at most 100")
        if self.state_dir is None:
            raise PipelineError("sessions cannot be saved: the driver has no state folder")
        return self.state_dir / f"{name}.json"

    def _sweep(self) -> None:
        """Remove files of the state folder that processes were writing when they were killed."""
        if self.state_dir is None:
            return
        with contextlib.suppress(OSError):
            for path in list(self.state_dir.iterdir()):
                match = _PARTIAL.fullmatch(path.name)
                if match is not None and _ended(int(match[1] or match[2])):
                    path.unlink(missing_ok=True)

    def _save(self, session: Session, name: str) -> None:
        path = self._file(name)

        def save() -> None:
            text = {"session": session.id.hex(), "epoch": session.epoch}
            for answer in self._each(Type.SAVE, text, session, name):
                if isinstance(answer, WorkerError):
                    raise answer

        with self._operation():
            self._require_open(session)
            # Without it there is nothing saved: half of the shards' files may be older than the others.
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise PipelineError(f"cannot replace {path}: {error.strerror}") from None
            self._with_hot([session], save)
            tokens = np.asarray(session.tokens, np.int32)
            content = {
                "version": 1,
                "session": session.id.hex(),
                "epoch": session.epoch,
                "recipe": self._recipe.fingerprint.hex(),
                "ranges": [list(layers) for layers in self.plan],
                "tokens": session.tokens,
                "sha256": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
            }
            try:
                write_whole(path, [json.dumps(content).encode("ascii")])
            except OSError as error:  # such as a full disk
                raise PipelineError(f"cannot write {path}: {error.strerror or error}") from None
            self._event("save", session, epoch=session.epoch, position=session.position, name=name)

    def _read(self, session: Session, name: str) -> tuple[list[int], int]:
        """Tokens and epoch of what was saved. Raises PipelineError."""
        path = self._file(name)
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except FileNotFoundError:
            raise PipelineError(f"nothing is saved as {name!r}") from None
        except OSError as error:
            raise PipelineError(f"cannot read {path}: {error.strerror}") from None
        try:
            content = json.loads(data)
            tokens = [int(token) for token in content["tokens"]]
            epoch = int(content["epoch"])
            digest = hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()
            told, recipe, ranges = content["sha256"], content["recipe"], [tuple(pair) for pair in content["ranges"]]
            owner = bytes.fromhex(content["session"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PipelineError(f"{path} is no saved session: {error!r}") from None
        if digest != told:
            raise PipelineError(f"{path} is damaged: its tokens have another checksum")
        if owner != session.id:
            raise PipelineError(f"{path} is session {owner.hex()}, not {session.id.hex()}: open it under that id")
        if recipe != self._recipe.fingerprint.hex():
            raise PipelineError(f"{path} was saved under another recipe")
        if ranges != list(self.plan.ranges):
            raise PipelineError(f"{path} was saved by shards of {ranges}, these are {list(self.plan.ranges)}")
        return tokens, epoch

    def _restore(self, session: Session, name: str) -> None:
        tokens, epoch = self._read(session, name)
        if len(tokens) > self.positions:
            message = f"{name!r} has {len(tokens)} positions: a session can have {self.positions}"
            raise CapacityError(message, never=True)
        with self._operation():
            call = self._call()
            self._require_open(session)
            session.epoch = 1 + max(session.epoch, epoch)
            while True:
                try:
                    self._settle(call)
                    if session.id in self._present:
                        self._reset([session], "restore")
                    self._make_room([session], call)
                    self._restore_now(session, name, len(tokens))
                    break
                except WorkerError as error:
                    self._retry(error, [session], call)
            session.tokens[:] = tokens
            session._hot = True
            session._used = time.monotonic()
            self._event("restore", session, epoch=session.epoch, position=session.position, name=name)

    def _restore_now(self, session: Session, name: str, position: int) -> None:
        self._present[session.id] = session
        text = {
            "session": session.id.hex(),
            "epoch": session.epoch,
            "recipe": self._recipe.fingerprint.hex(),
            "ingredients": self._recipe.shared,
        }
        found = self._each(Type.RESTORE, text, session, name)
        refused = next((answer for answer in found if isinstance(answer, WorkerError)), None)
        positions = [answer.text.get("position") for answer in found if isinstance(answer, Reply)]
        if refused is not None or any(found != position for found in positions):
            session.epoch = _newest(session.epoch, found)
            self._reset([session], "not restored")
            if refused is not None:
                raise refused
            raise PipelineError(f"{name!r} has {position} tokens, but the shards' files hold {positions} positions")

    # -- status

    def _shard_status(self) -> list[dict[str, Any]]:
        workers = self.workers
        statistics = self._statistics.answers(workers, STATUS_WAIT)
        return [
            {
                "range": list(self.plan.ranges[index]),
                "pid": getattr(worker, "pid", None),
                "alive": bool(getattr(worker, "alive", True)) and index not in self._lost,
                "restarts": self._restarts[index],
                "resident_bytes": statistics[index].get("resident_bytes"),
                "kv_bytes": statistics[index].get("kv_bytes"),
                "counters": statistics[index],
            }
            for index, worker in enumerate(workers)
        ]


#: What status() counts, since the start.
_COUNTS: Final = (
    "opened",
    "released",
    "decodes",
    "tokens",
    "replays",
    "replayed_tokens",
    "resets",
    "evictions",
    "waits",
    "clears",
    "restarts",
)


def _ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no number of a process
        return False
    return False


def _newest(epoch: int, answers: Sequence[Reply | WorkerError]) -> int:
    """The largest epoch that is known: the driver's, or one that a shard gave as its reason to refuse."""
    held = (answer.epoch for answer in answers if isinstance(answer, SessionRefused))
    return max([epoch, *(other for other in held if other is not None)])


def _joined(steps: Sequence[Step]) -> Step:
    """Several batches as one: times added up, outputs one after another."""
    if len(steps) == 1:
        return steps[0]
    tables = [step.logits for step in steps if step.logits is not None]
    return Step(
        [token for step in steps for token in step.sampled],
        np.concatenate(tables) if tables else None,
        [
            ShardTime(
                sum(time.decode_us for time in times),
                sum(time.compute_us for time in times),
                sum(time.encode_us for time in times),
                sum(time.wall_us for time in times),
            )
            for times in zip(*(step.shards for step in steps), strict=True)
        ],
        [
            HopTime(
                sum(time.bytes for time in times),
                sum(time.encode_us for time in times),
                sum(time.decode_us for time in times),
                sum(time.python_decode_us for time in times),
                sum(time.python_encode_us for time in times),
            )
            for times in zip(*(step.hops for step in steps), strict=True)
        ],
        sum(step.seconds for step in steps),
    )
