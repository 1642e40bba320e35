"""The cuts of a model by which a pipeline of workers is fastest, each within its memory; and the plan as JSON.

A decode step reads every weight of its layers once, apart from tables of which it reads a row and experts that it does
not use, and waits for little else. So the time of a stage is estimated as the bytes that it reads over its worker's
speed. Under pipelining the slowest stage sets the rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, repeat
from operator import mul, sub
from typing import Any, Final

from .plan import PlanError, make_plan
from .sizes import ModelSizes, Part

#: Of the plan's JSON.
SCHEMA: Final = 1


@dataclass(frozen=True)
class Capacity:
    """What a worker has: ``memory`` in bytes (None: enough), and ``speed``, above 0, in bytes of weights a second or
    relative to the other workers."""

    memory: int | None = None
    speed: Fraction = Fraction(1)


@dataclass(frozen=True)
class Stage:
    """A worker's layers [start, end) and what is expected of it: ``memory`` in bytes with the allowance, ``time`` in
    seconds a token, or relative where the speeds are."""

    layers: tuple[int, int]
    part: Part
    memory: int
    time: Fraction


def partition(sizes: ModelSizes, workers: Sequence[Capacity], allowance: int = 0) -> list[Stage]:
    """One stage for each worker, in their order: of all legal cuts those by which the slowest stage is fastest; among
    these, those with the least time in all, then those with the least sum of squares of the stages' times.

    ``allowance`` are the bytes that every worker needs beside weights and KV. Raises PlanError if there are no workers,
    more than can be cut, or too little memory, and then says how much would do.
    """
    places = [0, *sizes.cuts, len(sizes.layers)]
    _check_count(sizes, len(workers), places)
    memory = _Memory(sizes, places, allowance)
    reach = [memory.reach(worker.memory) for worker in workers]
    if not _possible(reach):
        raise PlanError(_shortage(memory, workers))
    times = _Times(sizes, places, workers)
    chosen = _chosen(times, reach, _slowest(times, reach))
    return [
        stage(sizes, (places[start], places[end]), worker, allowance)
        for (start, end), worker in zip(pairwise(chosen), workers, strict=True)
    ]


def stage(sizes: ModelSizes, layers: tuple[int, int], worker: Capacity, allowance: int = 0) -> Stage:
    """What is expected of one worker with the layers [start, end)."""
    part = sizes.shard(*layers)
    return Stage(layers, part, part.weights + part.kv + allowance, part.read / worker.speed)


def _check_count(sizes: ModelSizes, count: int, places: Sequence[int]) -> None:
    n_layer = len(sizes.layers)
    if count < 1:
        raise PlanError("a plan needs one worker at least")
    if count > n_layer:
        raise PlanError(f"{count} workers are more than the model has layers, {n_layer}: each has one at least")
    if count >= len(places):
        legal = f"at 1 to {places[-2]} alone" if len(places) > 2 else "nowhere"
        raise PlanError(
            f"{count} workers are too many: this model of {n_layer} layers can be cut {legal}, since layers behind "
            f"use the keys and values of others; {len(places) - 1} is the most"
        )


# Below, a place is the number of a legal cut among all of them, with the model's start and end. A stage of a worker
# goes from one place to a later one. What it costs grows with every layer at either end.


class _Memory:
    """Bytes that a shard between two places needs."""

    def __init__(self, sizes: ModelSizes, places: Sequence[int], allowance: int) -> None:
        self.places = places
        self.allowance = allowance
        self._sizes = sizes
        self._held = list(accumulate((part.weights + part.kv for part in sizes.layers), initial=0))
        self._users = list(accumulate(sizes.shared_by or [True] * len(sizes.layers), initial=0))

    def __call__(self, start: int, end: int) -> int:
        first, last = self.places[start], self.places[end]
        sizes = self._sizes
        total = self._held[last] - self._held[first] + self.allowance
        if self._users[last] > self._users[first]:
            total += sizes.shared
        if first == 0:
            total += sizes.first.weights + sizes.first.kv
        if last == len(sizes.layers):
            total += sizes.last.weights + sizes.last.kv - (sizes.tied if first == 0 else 0)
        return total

    def reach(self, limit: int | None) -> list[int]:
        """For each place the first one from which a shard to it keeps the limit; the place itself if there is none."""
        if limit is None:
            return [0] * len(self.places)
        found, start = [0], 0
        for end in range(1, len(self.places)):
            while start < end and self(start, end) > limit:
                start += 1
            found.append(start)
        return found


class _Times:
    """What a stage costs in time, a whole number of units that are the same for all: with worker w from place i to
    place k it is ``ends[w][k] - starts[w][i]``."""

    def __init__(self, sizes: ModelSizes, places: Sequence[int], workers: Sequence[Capacity]) -> None:
        unit = math.lcm(*(worker.speed.numerator for worker in workers))
        read = list(accumulate((part.read for part in sizes.layers), initial=0))
        starts = [read[place] for place in places]
        ends = starts.copy()
        starts[0] -= sizes.first.read
        ends[-1] += sizes.last.read
        slowness = [unit // worker.speed.numerator * worker.speed.denominator for worker in workers]
        self.starts = [[slow * bytes_before for bytes_before in starts] for slow in slowness]
        self.ends = [[slow * bytes_before for bytes_before in ends] for slow in slowness]
        #: The slowest stage costs no less: each would cost the same, or the slowest worker has the least that one may.
        even = int((ends[-1] - starts[0]) / sum(Fraction(1, slow) for slow in slowness))
        self.least = max(even, max(slowness) * min(end - start for start, end in zip(starts, ends[1:], strict=False)))

    def low(self, stage: int, end: int, limit: int, reach: Sequence[Sequence[int]]) -> int:
        """The first start of a stage with this end that costs ``limit`` at most and is within ``reach``."""
        return max(reach[stage][end], bisect_left(self.starts[stage], self.ends[stage][end] - limit, 0, end))


def _ends(stage: int, n_places: int, n_stages: int) -> range:
    """Where a stage may end: each behind it has a layer, and the last one has the end."""
    left = n_stages - 1 - stage
    return range(stage + 1 if left else n_places - 1, n_places - left)


def _possible(reach: Sequence[Sequence[int]]) -> bool:
    """Whether some cuts keep every limit."""
    n_places = len(reach[0])
    before = [True] + [False] * (n_places - 1)
    for stage, first in enumerate(reach):
        after = [False] * n_places
        for end in _ends(stage, n_places, len(reach)):
            after[end] = any(before[first[end] : end])
        before = after
    return before[-1]


def _slowest(times: _Times, reach: Sequence[Sequence[int]]) -> int:
    """The least that the slowest stage can cost, where some cuts are possible."""
    # Stages that cost far more are rarely needed, and most of the work.
    limit = 2 * times.least + 1
    while (found := _slowest_within(times, reach, limit)) > limit:
        limit *= 2
    return found


def _slowest_within(times: _Times, reach: Sequence[Sequence[int]], limit: int) -> int:
    """The same, and more than ``limit`` if no cuts keep it."""
    n_places, none = len(reach[0]), limit + 1
    before = [0] + [none] * (n_places - 1)
    for stage in range(len(reach)):
        starts, ends = times.starts[stage], times.ends[stage]
        after = [none] * n_places
        for end in _ends(stage, n_places, len(reach)):
            low = times.low(stage, end, limit, reach)
            own = map(sub, repeat(ends[end]), starts[low:end])
            after[end] = min(map(max, before[low:end], own), default=none)
        before = after
    return before[-1]


def _chosen(times: _Times, reach: Sequence[Sequence[int]], slowest: int) -> list[int]:
    """The places of the stages with the least sum of costs, then of their squares, where none is above ``slowest``."""
    n_places = len(reach[0])
    # Both sums in one number: a cost c counts c * (large + c).
    large = len(reach) * slowest * slowest + 1
    none = large * large * len(reach)
    before = [0] + [none] * (n_places - 1)
    origins = []
    for stage in range(len(reach)):
        starts, ends = times.starts[stage], times.ends[stage]
        after, origin = [none] * n_places, [0] * n_places
        # With c = e - s it is e * (large + e) + s * s - s * (large + 2 * e).
        fixed = [sums + start * start for sums, start in zip(before, starts, strict=True)]
        for end in _ends(stage, n_places, len(reach)):
            low = times.low(stage, end, slowest, reach)
            factor = repeat(large + 2 * ends[end])
            found = list(map(sub, fixed[low:end], map(mul, starts[low:end], factor)))
            if found:
                best = min(found)
                origin[end] = low + found.index(best)
                after[end] = min(none, best + ends[end] * (large + ends[end]))
        before = after
        origins.append(origin)
    places = [n_places - 1]
    for origin in reversed(origins):
        places.append(origin[places[-1]])
    return places[::-1]


# -- why there is no plan


def _shortage(memory: _Memory, workers: Sequence[Capacity]) -> str:
    limits = [worker.memory for worker in workers]
    finite = [limit for limit in limits if limit is not None]
    count, n_places = len(workers), len(memory.places)
    missing = _missing(memory, limits)
    would_do = f"with {missing:,} bytes more for each worker there is a plan, and with less there is none"
    if len(finite) == count and len(set(finite)) == 1:
        would_do = f"{finite[0] + missing:,} bytes for each worker are the least that would do"
    for place in range(n_places - 1):
        # The workers that may have it: those with places enough for the others before and behind them.
        able = [limits[worker] for worker in range(count) if worker <= place and count - worker < n_places - place]
        most = max((math.inf if limit is None else limit for limit in able), default=math.inf)
        need = memory(place, place + 1)
        if need > most:
            first, end = memory.places[place], memory.places[place + 1]
            what = f"layer {first}" if end == first + 1 else f"the layers {first} to {end - 1}, uncut,"
            return (
                f"{what} with what belongs to it needs {need:,} bytes, and no worker that can have it has more than "
                f"{most:,}: {need - int(most):,} too few; {would_do}"
            )
    # Each shard has an allowance of its own.
    need = memory(0, n_places - 1) + (count - 1) * memory.allowance
    if len(finite) == count and need > sum(finite):
        return (
            f"the model needs {need:,} bytes in {'one shard' if count == 1 else f'{count} shards'}, and there are "
            f"{sum(finite):,}: {need - sum(finite):,} too few; {would_do}"
        )
    return f"wherever the model is cut, some shard is over its worker's memory by {missing:,} bytes or more; {would_do}"


def _missing(memory: _Memory, limits: Sequence[int | None]) -> int:
    """The least number of bytes with which, added to every limit, some cuts are possible."""
    low, high = 0, memory(0, len(memory.places) - 1) + memory.allowance
    while low + 1 < high:
        middle = (low + high) // 2
        more = [None if limit is None else limit + middle for limit in limits]
        if _possible([memory.reach(limit) for limit in more]):
            high = middle
        else:
            low = middle
    return high


# -- the plan's JSON


def planned_cuts(content: Any, architecture: str, n_layer: int, tensors_sha256: str) -> list[int]:
    """The cuts of a plan that was read from JSON, for a model with these properties.

    Raises PlanError for what is no plan, and for a plan of another model.
    """
    if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, Mapping) else None
        raise PlanError(f"the plan's schema is {_shown(found)}, not {SCHEMA}")
    for key, name, expected in (
        ("architecture", "architecture", architecture),
        ("n_layer", "number of layers", n_layer),
        ("tensors_sha256", "table of tensors (SHA-256)", tensors_sha256),
    ):
        if content.get(key) != expected:
            raise PlanError(
                f"the plan is of another model: its {name} is {_shown(content.get(key))}, and the file's {expected!r}"
            )
    cuts = content.get("cuts")
    if not isinstance(cuts, list) or not all(type(cut) is int for cut in cuts):
        raise PlanError(f"the plan's cuts are {_shown(cuts)}, not a list of layer numbers")
    return make_plan(n_layer, cuts).cuts


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
