"""Planted faults of sessions: the state machines find each of them, and nothing where they are asleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import planted_faults
import pytest
import session_faults
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from session_drive import KINDS, profile, write_models
from test_hot_kv_state import HotState, start
from test_kv_cache_distributed import CUTS, Distributed, Listeners

from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import SessionPipeline
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards


@pytest.fixture(scope="module")
def faulty(patched_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> NativeBuild:
    return planted_faults.build_faulty(patched_build, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def session_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("kinds"))


def findings(machine: Callable[[], RuleBasedStateMachine], examples: int = 40) -> str:
    """What a state machine finds; empty: nothing. The same examples every time, and the first finding is enough."""
    chosen = settings(
        profile(30, examples),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Exception as error:
        return repr(error)
    return ""


def findings_of_one(name: str, build: NativeBuild, oracle: NativeBuild, model: Path, folder: Path) -> str:
    env = start(KINDS[name], model, build.worker, oracle.worker, folder)
    try:
        return findings(partial(HotState, env))
    finally:
        env.worker.close()
        env.reference.worker.close()


@pytest.mark.parametrize("name", sorted({kind for kind, _ in session_faults.FAULTS.values()}))
def test_faults_asleep(
    name: str,
    faulty: NativeBuild,
    unpatched_build: NativeBuild,
    session_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the faults would be found for another reason."""
    monkeypatch.delenv(planted_faults.VARIABLE, raising=False)
    assert findings_of_one(name, faulty, unpatched_build, session_models[name], tmp_path) == ""


@pytest.mark.parametrize("fault", session_faults.FAULTS)
def test_a_planted_fault_is_found(
    fault: str,
    faulty: NativeBuild,
    unpatched_build: NativeBuild,
    session_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, _ = session_faults.FAULTS[fault]
    monkeypatch.setenv(planted_faults.VARIABLE, fault)
    found = findings_of_one(name, faulty, unpatched_build, session_models[name], tmp_path)
    assert found


class TellsOneShardOnly(SessionPipeline):
    """Evicts on the first shard; the others keep what they have."""

    evictions = 0

    def _each(self, type: Type, *arguments: Any, **options: Any) -> Any:
        every = self._pipeline.workers
        if type == Type.EVICT:
            self._pipeline.workers = every[:1]
            self.evictions += 1
            # It waits for room on the others.
            assert self.evictions < 100
        try:
            return super()._each(type, *arguments, **options)
        finally:
            self._pipeline.workers = every


@pytest.fixture
def plain_listeners(
    patched_build: NativeBuild, unpatched_build: NativeBuild, session_models: dict[str, Path]
) -> Iterator[Listeners]:
    arguments = (KINDS["plain"], session_models["plain"], patched_build.worker, unpatched_build.worker, CUTS["plain"])
    cluster = Listeners(*arguments)
    yield cluster
    cluster.close()


def test_an_eviction_that_one_shard_alone_hears_of_is_found(plain_listeners: Listeners) -> None:
    found = findings(lambda: Distributed(plain_listeners, driver=TellsOneShardOnly), 10)
    assert found
