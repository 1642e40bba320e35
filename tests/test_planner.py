"""The cuts that the planner chooses, against all others, and what it refuses.

Catches: cuts that are not the best or not legal, a worker that is given more than its memory, a sum that counts a part
twice or not at all, a refusal without the memory that would do, a plan that is taken for another model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boundary_bundle.shards import (
    Capacity,
    ModelSizes,
    Part,
    PlanError,
    Stage,
    partition,
    planned_cuts,
)

parts = st.builds(Part, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
speeds = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3, 7)])


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    """Up to eight layers, of which any cuts may be legal, with everything that a shard can have besides."""
    layers = tuple(draw(st.lists(parts, min_size=1, max_size=8)))
    n_layer = len(layers)
    cuts = tuple(cut for cut in range(1, n_layer) if draw(st.integers(0, 4)))
    users = tuple(draw(st.lists(st.booleans(), min_size=n_layer, max_size=n_layer))) if draw(st.booleans()) else ()
    first, last = draw(parts), draw(parts)
    tied = draw(st.integers(0, min(first.weights, last.weights)))
    return ModelSizes(layers, first, last, draw(st.integers(0, 5)), users, tied, cuts)


def workers(most: int, limited: bool = True) -> st.SearchStrategy[list[Capacity]]:
    memory = st.none() | st.integers(1, 80) if limited else st.none()
    return st.lists(st.builds(Capacity, memory, speeds), min_size=1, max_size=most)


def every_plan(sizes: ModelSizes, having: Sequence[Capacity], allowance: int) -> list[list[tuple[int, Fraction, bool]]]:
    """For all legal cuts, memory and time of each stage and whether the memory is there, added up layer by layer."""
    found = []
    n_layer = len(sizes.layers)
    for cuts in itertools.combinations(sizes.cuts, len(having) - 1):
        edges, stages = [0, *cuts, n_layer], []
        for (start, end), worker in zip(itertools.pairwise(edges), having, strict=True):
            own = [*sizes.layers[start:end], *([sizes.first] if start == 0 else [])]
            own += [sizes.last] if end == n_layer else []
            memory = allowance + sum(part.weights + part.kv for part in own)
            memory -= sizes.tied if (start, end) == (0, n_layer) else 0
            memory += sizes.shared if any((sizes.shared_by or [True] * n_layer)[start:end]) else 0
            fits = worker.memory is None or memory <= worker.memory
            stages.append((memory, sum(part.read for part in own) / worker.speed, fits))
        found.append(stages)
    return found


def rank(times: Sequence[Fraction]) -> tuple[Fraction, Fraction, Fraction]:
    return max(times), sum(times, Fraction(0)), sum((time * time for time in times), Fraction(0))


def plan_or_none(sizes: ModelSizes, having: Sequence[Capacity], allowance: int = 0) -> list[Stage] | None:
    try:
        return partition(sizes, having, allowance)
    except PlanError:
        return None


@settings(max_examples=500, deadline=None)
@given(models(), workers(4), st.integers(0, 5))
def test_no_other_cuts_are_better(sizes: ModelSizes, having: list[Capacity], allowance: int) -> None:
    """The search against all cuts: the slowest stage, then all time, then the squares; none where none fit."""
    fitting = [plan for plan in every_plan(sizes, having, allowance) if all(fits for _, _, fits in plan)]
    found = plan_or_none(sizes, having, allowance)
    assert (found is None) == (not fitting)
    if found is None:
        return
    assert rank([one.time for one in found]) == min(rank([time for _, time, _ in plan]) for plan in fitting)
    assert [(one.memory, one.time, True) for one in found] in fitting
    edges = [one.layers[0] for one in found] + [found[-1].layers[1]]
    assert (edges[0], edges[-1]) == (0, len(sizes.layers))
    assert set(edges[1:-1]) <= set(sizes.cuts)


@settings(max_examples=200, deadline=None)
@given(models(), workers(3), st.data())
def test_more_memory_makes_nothing_worse(sizes: ModelSizes, having: list[Capacity], data: st.DataObject) -> None:
    more = [
        replace(one, memory=None if one.memory is None else one.memory + data.draw(st.integers(0, 30)))
        for one in having
    ]
    before, after = plan_or_none(sizes, having), plan_or_none(sizes, more)
    if before is not None:
        assert after is not None
        assert max(one.time for one in after) <= max(one.time for one in before)


@settings(max_examples=200, deadline=None)
@given(models(), st.lists(st.integers(1, 60), min_size=1, max_size=4), st.booleans(), st.integers(0, 5))
def test_what_would_do_does(sizes: ModelSizes, memory: list[int], alike: bool, allowance: int) -> None:
    """The memory that a refusal names is enough, and one byte less is not."""
    memory = [memory[0]] * len(memory) if alike else memory
    try:
        partition(sizes, [Capacity(one) for one in memory], allowance)
    except PlanError as error:
        text = str(error)
        if "too many" in text or "more than the model has layers" in text:
            return
        each = re.search(r"([\d,]+) bytes for each worker are the least", text)
        more = re.search(r"with ([\d,]+) bytes more for each", text)
        assert (each is not None) == (len(set(memory)) == 1)
        if each is not None:
            missing = int(each[1].replace(",", "")) - memory[0]
        else:
            assert more is not None
            missing = int(more[1].replace(",", ""))
        assert plan_or_none(sizes, [Capacity(one + missing) for one in memory], allowance) is not None
        assert plan_or_none(sizes, [Capacity(one + missing - 1) for one in memory], allowance) is None


@pytest.mark.parametrize(
    ("count", "memory", "words"),
    [
        (0, None, "one worker at least"),
        (5, None, "5 workers are more than the model has layers, 4"),
        (4, None, "can be cut at 1 to 2 alone.*; 3 is the most"),
        (2, 54, "^layer 0 with what belongs to it needs 56 bytes, and no worker .* more than 54: 2 too few; 136 bytes"),
        (2, 99, "^the layers 2 to 3, uncut, with what belongs to it needs 126 bytes.* 99: 27 too few; 136 bytes"),
        (2, 130, "^the model needs 262 bytes in 2 shards, and there are 260: 2 too few; 136 bytes for each worker are"),
        (2, 135, "^wherever the model is cut, some shard is over its worker's memory by 1 bytes or more; 136 bytes"),
        (1, 200, "^the model needs 261 bytes in one shard, and there are 200: 61 too few; 261 bytes"),
    ],
)
def test_refusals(count: int, memory: int | None, words: str) -> None:
    """Each says what is too much, by how much, and what would do."""
    layers = (Part(40, 1, 10), Part(70, 1, 10), Part(50, 1, 10), Part(50, 1, 10))
    sizes = ModelSizes(layers, Part(5), Part(5), cuts=(1, 2))
    with pytest.raises(PlanError, match=words) as caught:
        partition(sizes, [Capacity(memory)] * count, 1)
    assert "\n" not in str(caught.value)


def test_a_worker_for_the_whole_model() -> None:
    """Its memory is enough to the byte, with a tied table counted once."""
    sizes = ModelSizes((Part(10, 1, 100), Part(20, 2, 200)), Part(7, 1), Part(9, 9), 5, (), 7, (1,))
    (found,) = partition(sizes, [Capacity(10 + 20 + 300 + 9 + 5 + 3)], 3)
    assert found.memory == 347
    with pytest.raises(PlanError, match="needs 347 bytes in one shard, and there are 346: 1 too few; 347 bytes"):
        partition(sizes, [Capacity(346)], 3)


def test_hundreds_of_layers() -> None:
    """The search does not try all cuts: of these there are more than 10 to the 60th."""
    layers = tuple(Part(1000 + place % 7, 1000 + place % 11, 10) for place in range(300))
    sizes = ModelSizes(layers, Part(9000, 3), Part(9000, 9000), cuts=tuple(range(1, 300)))
    having = [Capacity(9000 + 100 * (place % 5) + 9000, Fraction(1 + place % 3)) for place in range(64)]
    found = partition(sizes, having)
    assert all(one.memory <= (worker.memory or 0) for one, worker in zip(found, having, strict=True))


# -- plans as files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "schema is None, not 1"),
        ({"schema": 2}, "schema is 2, not 1"),
        ({"architecture": "gemma"}, "another model: its architecture is 'gemma', and the file's 'llama'"),
        ({"n_layer": 30}, "its number of layers is 30, and the file's 8"),
        ({"tensors_sha256": None}, "its table of tensors .* is None"),
        ({"cuts": "2"}, "cuts are '2', not a list"),
        ({"cuts": [True]}, r"cuts are \[True\], not a list"),
        ({"cuts": [2, 9]}, "cut 9 is out of range"),
        ({"cuts": ["x" * 999]}, r"\.\.\., not a list"),
    ],
)
def test_what_is_no_plan(content: Any, words: str) -> None:
    good = {"schema": 1, "architecture": "llama", "n_layer": 8, "tensors_sha256": "ab", "cuts": [2, 5]}
    assert planned_cuts(good, "llama", 8, "ab") == [2, 5]
    with pytest.raises(PlanError, match=words):
        planned_cuts({**good, **content} if isinstance(content, dict) else content, "llama", 8, "ab")
