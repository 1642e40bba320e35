"""Sessions over a pipeline: the driver holds each one's tokens, the shards hold what they computed of them.

What the shards hold is hot state, and may be gone at any time: evicted, lost with a worker, taken over by another
driver. The token history is the truth. A session that is not hot on every shard is reset on all of them and replayed
from its history before it goes on, so that no shard ever computes on another history than the others.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .pipeline import PipelineError, Relay, Step
from .plan import Plan
from .protocol import Outcome
from .worker import SessionRefused, Settings, Worker

__all__ = ["CapacityError", "Outcome", "Session", "SessionPipeline", "SessionRefused", "local_workers"]


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
    timeout: float | None = None,
) -> Callable[[tuple[int, int]], Worker]:
    """A ``start`` for :class:`SessionPipeline`: child processes on this machine."""
    raise NotImplementedError


class Session:
    """One sequence of tokens. Made by :meth:`SessionPipeline.open`."""

    id: bytes
    #: Raised whenever the shards begin anew with it.
    epoch: int
    #: The history. What the shards hold is made from it.
    tokens: list[int]
    #: Never chosen when room is made for others. May be set.
    pinned: bool

    @property
    def position(self) -> int:
        """How many tokens it has."""
        raise NotImplementedError

    @property
    def hot(self) -> bool:
        """Whether every shard holds it as it is."""
        raise NotImplementedError

    def extend(
        self, tokens: Sequence[int], *, outputs: str = "last", logits: bool = False, sample: bool = True
    ) -> Step:
        """Go on with ``tokens``, in batches of n_batch; ``outputs`` is none, last or all."""
        raise NotImplementedError

    def truncate(self, position: int) -> None:
        """Keep the first ``position`` tokens."""
        raise NotImplementedError

    def release(self) -> None:
        """End the session. It cannot be used any more."""
        raise NotImplementedError

    def save(self, name: str) -> None:
        """Write the state of every shard, and the driver's part of it."""
        raise NotImplementedError

    def restore(self, name: str) -> None:
        """Become what was saved under ``name``."""
        raise NotImplementedError


class SessionPipeline:
    """Workers of a plan, and sessions over them. May be used by several threads."""

    #: What happened, the oldest first: {"event": .., "time": seconds since 1970, ..}, ids in hexadecimal.
    log: collections.deque[dict[str, Any]]
    on_event: Callable[[Mapping[str, Any]], None] | None

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
        raise NotImplementedError

    def open(self, id: bytes | None = None, *, epoch: int = 1) -> Session:
        """A session without tokens. The shards hear of it when it is used."""
        raise NotImplementedError

    def decode(self, items: Sequence[tuple[Session, int, bool]], *, logits: bool = False, sample: bool = True) -> Step:
        """One batch of (session, token, output), in batch order."""
        raise NotImplementedError

    def evict(self, session: Session | None = None) -> Session | None:
        """Give up the hot state of one session (absent: of the least recently used) on every shard."""
        raise NotImplementedError

    def clear(self) -> None:
        """Give up all hot state. The sessions stay, with their tokens."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Shards, sessions, counts and rates, as JSON has them; never waits for a computation for long."""
        raise NotImplementedError
