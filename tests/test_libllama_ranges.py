"""The series by itself, driven in C: no worker and no Python between the calls.

Catches: a call on a partial model that ends the process or is silently wrong (embeddings, encode, plain decode,
saved state), an interface that a C compiler does not take, a token that jams its sequence.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from boundary_bundle import decode, encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import Batch, Settings, WorkerError, WorkerPool
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards


def run(build: NativeBuild, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(build.programs[program]), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_partial_model_refuses_what_it_cannot_do(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    result = run(patched_build, "partial_model", str(tiny["tied"]))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout
    assert result.stdout.count("ok: ") == 21


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_two_shards_in_one_c_program(patched_build: NativeBuild, tiny: dict[str, Path], cut: int) -> None:
    result = run(patched_build, "two_shards", str(tiny["untied"]), str(cut))
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 differ" in result.stdout


@pytest.mark.parametrize("cut", ["0", "7", "-1", "8"])
def test_a_cut_that_leaves_nothing(patched_build: NativeBuild, tiny: dict[str, Path], cut: str) -> None:
    result = run(patched_build, "two_shards", str(tiny["tied"]), cut)
    assert result.returncode == 2
    assert "layer range [" in result.stderr


def test_a_token_that_names_a_sequence_twice(
    pool: WorkerPool, tiny: dict[str, Path], patched_build: NativeBuild
) -> None:
    """The cells of the KV cache count it twice and never let it go: refused before anything changes."""
    settings = Settings(threads=1, ctx=256, batch=8, ubatch=8, seqs=2, kv_unified=True)
    (worker,) = pool.workers(patched_build.worker, tiny["tied"], [(0, 6)], settings)
    model = worker.describe()
    twice = Batch((1, 2), (0, 1), ((0, 0), (0,)), (False, True)).bundle(model)
    with pytest.raises(WorkerError, match="twice") as caught:
        worker.request(Type.DECODE, {}, encode(twice)).result(timeout=60)
    assert caught.value.code == 6
    once = Batch((1, 2), (0, 1), ((0,), (0,)), (False, True)).bundle(model)
    worker.request(Type.DECODE, {}, encode(once)).result(timeout=60)


def test_an_ancillary_attribute_is_forwarded(
    pool: WorkerPool, tiny: dict[str, Path], patched_build: NativeBuild
) -> None:
    """Catches a shard that drops what it does not know, or that renumbers the bundle."""
    settings = Settings(threads=1, ctx=256, batch=8, ubatch=8)
    (worker,) = pool.workers(patched_build.worker, tiny["tied"], [(0, 3)], settings)
    bundle = Batch((1, 2), (0, 1), ((0,), (0,)), (False, True)).bundle(worker.describe(), number=77)
    bundle.attributes[0x4007] = "kept"
    out = decode(bytes(worker.request(Type.DECODE, {}, encode(bundle)).result(timeout=60).bundle))
    assert out.number == 77
    assert out.attributes[0x4007] == "kept"
    assert np.isfinite(out["residual"]).all()
