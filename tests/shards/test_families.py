"""Families whose boundary is out of the ordinary, over real processes, both codecs on every hop.

Catches: a side tensor lost or mangled by a codec, by the worker or by the driver, and a family that the certification
program runs in one process but that does not go through processes, sockets and the Python codec.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drive import Conversation, assert_same_bits, logits_of

from boundary_bundle.families.models import Variant, make_model
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    CheckedRelay,
    LocalWorker,
    Settings,
    WorkerError,
    WorkerPool,
    make_plan,
    read_model_file,
)

pytestmark = pytest.mark.shards

SMALL = Settings(threads=1, ctx=512, batch=64, ubatch=16, seqs=3)
N_VOCAB = 128

#: Architecture -> cuts, and what crosses each of them before the positions.
FAMILIES: dict[str, tuple[list[int], list[str]]] = {
    "talkie": ([2, 4], ["residual", "input_embedding"]),
    "rwkv7": ([1, 4], ["residual", "v_first"]),
    "gemma3n": ([7, 18], ["residual", "per_layer_inputs"]),
    "gemma4": ([2, 4], ["residual", "per_layer_inputs"]),
    "qwen3vl": ([1, 2], ["residual", "deepstack"]),
    "qwen2vl": ([2, 5], ["residual"]),
    "jamba": ([1, 2], ["residual"]),
    "mamba": ([3], ["residual"]),
    "dream": ([3], ["residual"]),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_family_over_processes(
    patched_build: NativeBuild, unpatched_build: NativeBuild, tmp_path: Path, pool: WorkerPool, architecture: str
) -> None:
    cuts, crossing = FAMILIES[architecture]
    model = make_model(Variant(architecture, "dense"), tmp_path / "model.gguf")
    n_layer = model.n_layer
    talk = Conversation(3, N_VOCAB)
    if model.memory == "none":
        # Each batch is whole sequences that fit one micro-batch.
        batches = [talk.batch([0, 1, 0, 0, 2, 1, 0, 0, 1])]
    else:
        batches = [
            talk.batch([0, 0, 1, 2, 0, 1, 0, 0, 2, 2, 0] * 4),
            talk.batch([2, 0, 1]),
            talk.batch([1] * 20 + [0] * 3 + [1, 0]),
            talk.batch([0]),
        ]
    oracle = pool.pipeline(unpatched_build.worker, model.path, [(0, n_layer)], SMALL)
    split = pool.pipeline(patched_build.worker, model.path, make_plan(n_layer, cuts), SMALL, CheckedRelay())
    names = [rule.name for rule in split.shards[0].contract_out.tensors]
    assert names == [*crossing, "positions", "seq_offsets", "seq_ids", "outputs"]
    assert_same_bits(logits_of(split, batches), logits_of(oracle, batches))


@pytest.mark.parametrize(
    ("architecture", "variant"), [("cohere2moe", "moe"), ("hy_v3", "moe"), ("qwen35", "dense"), ("step35", "moe")]
)
def test_a_model_with_a_draft_head(
    patched_build: NativeBuild,
    unpatched_build: NativeBuild,
    tmp_path: Path,
    pool: WorkerPool,
    architecture: str,
    variant: str,
) -> None:
    """Its layers are counted in the file with the model's own, are loaded with the last shard, and take no part."""
    model = make_model((architecture, variant), tmp_path / "model.gguf", draft_layers=1)
    n_layer = read_model_file(model.path).n_layer
    assert n_layer == model.n_layer
    talk = Conversation(3, N_VOCAB)
    batches = [talk.batch([0, 0, 1, 2, 0, 1, 0, 0, 2, 2, 0] * 4), talk.batch([2, 0, 1])]
    oracle = pool.pipeline(unpatched_build.worker, model.path, [(0, n_layer)], SMALL)
    split = pool.pipeline(patched_build.worker, model.path, make_plan(n_layer, [2, 4]), SMALL, CheckedRelay())
    assert_same_bits(logits_of(split, batches), logits_of(oracle, batches))


@pytest.mark.parametrize(("architecture", "end"), [("gemma3n", 19), ("gemma4", 5), ("gemma4", 9)])
def test_a_range_that_cuts_shared_keys_and_values(
    patched_build: NativeBuild, tmp_path: Path, architecture: str, end: int
) -> None:
    """Refused before anything is loaded, with the layers in the sentence."""
    model = make_model(Variant(architecture, "dense"), tmp_path / "model.gguf")
    for layers in ((0, end), (end, model.n_layer)):
        with pytest.raises(WorkerError, match=f"no cut before layer {end}") as caught:
            LocalWorker(patched_build.worker, model.path, layers, SMALL).describe()
        assert caught.value.code == 2


def test_an_architecture_that_is_not_certified(patched_build: NativeBuild, tmp_path: Path) -> None:
    """By name, with a range; whole it is as it was."""
    model = make_model(Variant("t5", "dense"), tmp_path / "model.gguf")
    with pytest.raises(WorkerError, match="'t5' is not certified") as caught:
        LocalWorker(patched_build.worker, model.path, (0, 3), SMALL).describe()
    assert caught.value.code == 3
