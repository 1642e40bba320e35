"""The session table of one context, in plain Python: what each request finds, and what it does to the memory.

Written from spec/worker-protocol.md alone. Every request is one method; it gives the :class:`Answer` that a worker owes
and, after a hit, leaves the table as the worker's is then. ``cuts`` of an answer are what a reference without sessions
must do to come to the same memory: (local sequence, first position that goes).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HIT = "hit"
MISS = "miss"
EVICTED = "evicted"
STALE_EPOCH = "stale_epoch"
INCOMPATIBLE_RECIPE = "incompatible_recipe"
POSITION_MISMATCH = "position_mismatch"
FULL = "full"
CANNOT_TRUNCATE = "cannot_truncate"
BUSY = "busy"

#: Ids of sessions that are gone, of which the epochs are remembered.
MAX_FORGOTTEN = 4096

#: Whether positions can be cut off in the middle. "window": as long as the window behind the cut is still there.
Truncation = Literal["always", "window", "never"]


@dataclass
class Live:
    """A session that has a local sequence. ``tokens`` are those whose keys and values it holds."""

    epoch: int
    slot: int
    tokens: list[int] = field(default_factory=list)
    pinned: bool = False
    used: int = 0

    @property
    def position(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Gone:
    epoch: int
    state: Literal["evicted", "released"]


@dataclass(frozen=True)
class Answer:
    """An outcome, and epoch and position that the table holds (0 and None: none; None and None: not said)."""

    outcome: str
    session: bytes | None = None
    epoch: int | None = None
    position: int | None = None
    created: bool = False
    cuts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Row:
    """One row of a batch's session table, and the tokens of the batch that are its own."""

    session: bytes
    epoch: int
    position: int
    tokens: Sequence[int]


class Table:
    """``slots`` sequences of ``cells`` positions each or, with ``unified``, of as many together."""

    def __init__(self, slots: int, cells: int, *, unified: bool = False, truncation: Truncation = "always") -> None:
        self.slots = slots
        self.cells = cells
        self.unified = unified
        self.truncation = truncation
        self.clear()

    def clear(self) -> None:
        """Forget everything, the ids too."""
        self.live: dict[bytes, Live] = {}
        self.gone: OrderedDict[bytes, Gone] = OrderedDict()
        self._uses = 0

    # -- requests

    def open(self, session: bytes, epoch: int, position: int, *, same_recipe: bool = True) -> Answer:
        held, gone = self.live.get(session), self.gone.get(session)
        if held is not None and epoch < held.epoch:
            return self._refuse(STALE_EPOCH, session)
        if gone is not None and (epoch < gone.epoch or (epoch == gone.epoch and gone.state == "released")):
            return self._refuse(STALE_EPOCH, session)
        if not same_recipe:
            return self._refuse(INCOMPATIBLE_RECIPE, session)
        if held is not None:
            if position == held.position:
                # Whoever takes it over has pinned nothing.
                held.pinned &= epoch == held.epoch
                held.epoch = epoch
                return self._hit(session)
            if position == 0 and epoch > held.epoch:
                return self._begin(session, epoch, held.slot, cut=True)
            return self._refuse(POSITION_MISMATCH, session)
        if position:
            return self._refuse(EVICTED if gone is not None and gone.state == "evicted" else MISS, session)
        free = self.free_slots()
        if not free:
            return self._refuse(FULL, session)
        return self._begin(session, epoch, free[0])

    def save(self, session: bytes, epoch: int) -> Answer:
        outcome = self._check(session, epoch)
        if outcome is not None:
            return self._refuse(outcome, session)
        return Answer(HIT, session, epoch, self.live[session].position)

    def restore(self, session: bytes, epoch: int, tokens: Sequence[int]) -> Answer:
        """From a sound file of this session, which had these tokens."""
        held, gone = self.live.get(session), self.gone.get(session)
        if held is not None and epoch < held.epoch:
            return self._refuse(STALE_EPOCH, session)
        if gone is not None and (epoch < gone.epoch or (epoch == gone.epoch and gone.state == "released")):
            return self._refuse(STALE_EPOCH, session)
        if held is not None and held.position:
            return self._refuse(POSITION_MISMATCH, session)
        free = self.free_slots()
        used = sum(live.position for live in self.live.values()) if self.unified else 0
        if (held is None and not free) or used + len(tokens) > self.cells:
            return self._refuse(FULL, session)
        if held is None:
            self._begin(session, epoch, free[0])
        held = self.live[session]
        held.epoch = epoch
        held.tokens[:] = tokens
        return self._hit(session)

    def decode(self, rows: Sequence[Row], *, same_recipe: bool = True) -> Answer:
        """The first row that does not fit refuses the batch."""
        if not same_recipe:
            return Answer(INCOMPATIBLE_RECIPE)
        for row in rows:
            outcome = self._check(row.session, row.epoch)
            if outcome is None and row.position != self.live[row.session].position:
                outcome = POSITION_MISMATCH
            if outcome is not None:
                return self._refuse(outcome, row.session)
        if not self.fits([(row.session, len(row.tokens)) for row in rows]):
            return Answer(FULL)
        for row in rows:
            self.live[row.session].tokens += row.tokens
            self._hit(row.session)
        return Answer(HIT)

    def truncate(self, session: bytes, epoch: int, position: int, *, observed: str = HIT) -> Answer:
        """``observed`` decides where the protocol leaves it to the window."""
        outcome = self._check(session, epoch)
        if outcome is not None:
            return self._refuse(outcome, session)
        held = self.live[session]
        if position > held.position:
            return self._refuse(POSITION_MISMATCH, session)
        impossible = {"always": False, "window": observed == CANNOT_TRUNCATE, "never": True}[self.truncation]
        if 0 < position < held.position and impossible:
            return self._refuse(CANNOT_TRUNCATE, session)
        cuts = ((held.slot, position),) if position < held.position else ()
        del held.tokens[position:]
        return self._hit(session, cuts=cuts)

    def release(self, session: bytes, epoch: int) -> Answer:
        held, gone = self.live.get(session), self.gone.get(session)
        known = held or gone
        if known is None:
            return self._refuse(MISS, session)
        if epoch < known.epoch:
            return self._refuse(STALE_EPOCH, session)
        released = Gone(epoch, "released")
        if held is None:
            self.gone[session] = released
            return Answer(HIT, session, epoch)
        self._forget(session, released)
        return Answer(HIT, session, epoch, cuts=((held.slot, 0),))

    def pin(self, session: bytes, epoch: int, pinned: bool) -> Answer:
        outcome = self._check(session, epoch)
        if outcome is not None:
            return self._refuse(outcome, session)
        self.live[session].pinned = pinned
        return self._hit(session)

    def evict(self, session: bytes | None = None) -> Answer:
        if session is None:
            session = self.oldest()
            if session is None:
                return Answer(BUSY if self.live else MISS)
        elif session not in self.live:
            gone = self.gone.get(session)
            return self._refuse(EVICTED if gone is not None and gone.state == "evicted" else MISS, session)
        elif self.live[session].pinned:
            return self._refuse(BUSY, session)
        held = self.live[session]
        self._forget(session, Gone(held.epoch, "evicted"))
        return Answer(HIT, session, held.epoch, cuts=((held.slot, 0),))

    # -- what is there

    def free_slots(self) -> list[int]:
        """Lowest first: that is the one that the next session takes."""
        taken = {held.slot for held in self.live.values()}
        return [slot for slot in range(self.slots) if slot not in taken]

    def oldest(self, spared: Sequence[bytes] = ()) -> bytes | None:
        """The least recently used session that is not pinned and not spared."""
        candidates = [
            (held.used, session) for session, held in self.live.items() if not held.pinned and session not in spared
        ]
        return min(candidates)[1] if candidates else None

    def fits(self, more: Sequence[tuple[bytes, int]]) -> bool:
        """Whether the cells suffice for so many more tokens of each session."""
        if self.unified:
            return sum(held.position for held in self.live.values()) + sum(n for _, n in more) <= self.cells
        return all(self.live[session].position + n <= self.cells for session, n in more)

    def listing(self) -> list[dict[str, Any]]:
        """What the request "sessions" says of the live ones, the most recently used first, and then of those that are
        gone, the last to go first; without bytes and the numbers of calls."""
        live = sorted(self.live.items(), key=lambda item: -item[1].used)
        rows = [_listed(session, held.epoch, held.position, held.pinned, "live") for session, held in live]
        for session, gone in reversed(self.gone.items()):
            rows.append(_listed(session, gone.epoch, 0, False, gone.state))
        return rows

    # -- how

    def _check(self, session: bytes, epoch: int) -> str | None:
        """None if the session is live under this epoch."""
        held = self.live.get(session)
        if held is None:
            return self._absent(session, epoch)
        if epoch == held.epoch:
            return None
        return STALE_EPOCH if epoch < held.epoch else MISS

    def _absent(self, session: bytes, epoch: int) -> str:
        gone = self.gone.get(session)
        if gone is None or epoch > gone.epoch:
            return MISS
        if epoch < gone.epoch or gone.state == "released":
            return STALE_EPOCH
        return EVICTED

    def _refuse(self, outcome: str, session: bytes) -> Answer:
        held, gone = self.live.get(session), self.gone.get(session)
        if held is not None:
            return Answer(outcome, session, held.epoch, held.position)
        return Answer(outcome, session, 0 if gone is None else gone.epoch)

    def _hit(self, session: bytes, *, created: bool = False, cuts: tuple[tuple[int, int], ...] = ()) -> Answer:
        held = self.live[session]
        self._uses += 1
        held.used = self._uses
        return Answer(HIT, session, held.epoch, held.position, created, cuts)

    def _begin(self, session: bytes, epoch: int, slot: int, *, cut: bool = False) -> Answer:
        self.gone.pop(session, None)
        self.live[session] = Live(epoch, slot)
        return self._hit(session, created=True, cuts=((slot, 0),) if cut else ())

    def _forget(self, session: bytes, gone: Gone) -> None:
        self.live.pop(session, None)
        self.gone.pop(session, None)
        self.gone[session] = gone
        while len(self.gone) > MAX_FORGOTTEN:
            self.gone.popitem(last=False)


def _listed(session: bytes, epoch: int, position: int, pinned: bool, state: str) -> dict[str, Any]:
    return {"session": session.hex(), "epoch": epoch, "position": position, "pinned": pinned, "state": state}
