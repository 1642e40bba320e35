"""What a plan says of its shards, against workers that were started for them, byte by byte.

Catches: a tensor that is counted for the wrong shard, twice or not at all, a cache that the library makes larger or
smaller, a legal cut that is not planned or an illegal one that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from boundary_bundle.families import certificates
from boundary_bundle.families.models import make_model
from boundary_bundle.native import NativeBuild
from boundary_bundle.places import spec_folder
from boundary_bundle.shards import (
    Capacity,
    Family,
    ModelSizes,
    Settings,
    close_workers,
    model_sizes,
    partition,
    read_model_file,
    start_workers,
    tiny_models,
)

pytestmark = pytest.mark.shards

CERTIFIED = {
    (entry["architecture"], one["variant"]): one
    for entry in certificates.read(spec_folder() / "families")
    for one in entry["variants"]
    if one["verdict"] == "certified"
}
#: Between them: contexts that are rounded up, caches for each sequence and for all, windows, all types, values that lie
#: across.
SETTINGS = (
    Settings(threads=1, ctx=600, batch=64, ubatch=32, seqs=3),
    Settings(threads=1, ctx=2000, batch=64, ubatch=32, seqs=2, swa_full=False, type_k="q8_0", flash_attn=False),
    Settings(threads=1, ctx=1024, batch=64, ubatch=32, kv_unified=True, swa_full=False, type_k="f32", type_v="q8_0"),
)


def sizes_of(path: Path, family: Family, settings: Settings) -> ModelSizes:
    model = read_model_file(path)
    return model_sizes(model, model.tensors, family, settings)


def family_of(architecture: str, variant: str) -> Family:
    return Family(CERTIFIED[architecture, variant]["memory"], CERTIFIED[architecture, variant]["gives"])


def assert_true(build: NativeBuild, path: Path, sizes: ModelSizes, settings: Settings, counts: Sequence[int]) -> None:
    """Plans of so many shards are what their workers report."""
    assert sizes.kv_unknown == ""
    for count in counts:
        stages = partition(sizes, [Capacity()] * count)
        workers = start_workers(build.worker, path, [one.layers for one in stages], settings, extra=["--no-warmup"])
        try:
            found = [worker.describe() for worker in workers]
        finally:
            close_workers(workers)
        told = [(one.layer_range, one.weight_bytes, one.kv_bytes) for one in found]
        assert [(one.layers, one.part.weights, one.part.kv) for one in stages] == told


@pytest.mark.parametrize(("architecture", "variant"), CERTIFIED)
def test_every_architecture(patched_build: NativeBuild, tmp_path: Path, architecture: str, variant: str) -> None:
    """Each certified one, in settings that alternate, with the cuts of its certificate."""
    place = list(CERTIFIED).index((architecture, variant))
    # Where there are windows, with caches that keep no more. A worker refuses grok's values of q8_0.
    with_windows = "iswa" in CERTIFIED[architecture, variant]["memory"]
    settings = SETTINGS[1 + place % 2 if with_windows else place % 3 if architecture != "grok" else 0]
    path = make_model((architecture, variant), tmp_path / "model.gguf").path
    sizes = sizes_of(path, family_of(architecture, variant), settings)
    assert list(sizes.cuts) == CERTIFIED[architecture, variant]["cuts"]
    assert_true(patched_build, path, sizes, settings, [3])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("llama", "moe"), ("gemma3n", "dense"), ("gemma4", "dense"), ("falcon-h1", "dense"), ("lfm2", "dense")],
)
def test_every_setting(
    patched_build: NativeBuild, tmp_path: Path, architecture: str, variant: str, settings: Settings
) -> None:
    """Plain, with shared keys and values, with windows, with states; whole, in two, and in as many as there may be."""
    path = make_model((architecture, variant), tmp_path / "model.gguf").path
    sizes = sizes_of(path, family_of(architecture, variant), settings)
    assert_true(patched_build, path, sizes, settings, [1, 2, len(sizes.cuts) + 1])


@pytest.mark.parametrize("architecture", ["llama4", "smallthinker"])
def test_windows_that_the_library_sets(patched_build: NativeBuild, tmp_path: Path, architecture: str) -> None:
    """Whatever the file says; a context in which they show."""
    path = make_model((architecture, "moe"), tmp_path / "model.gguf").path
    settings = Settings(threads=1, ctx=12000, batch=64, ubatch=32, swa_full=False)
    sizes = sizes_of(path, family_of(architecture, "moe"), settings)
    assert_true(patched_build, path, sizes, settings, [3])


@pytest.mark.parametrize(
    ("architecture", "lacks"),
    [
        ("llama", "output.weight"),
        ("gemma4", "output.weight"),
        ("lfm2", "output.weight"),
        ("llama-embed", "output.weight"),
        ("codeshell", "token_embd.weight"),
    ],
)
def test_one_table_for_input_and_head(
    patched_build: NativeBuild, tmp_path: Path, architecture: str, lacks: str
) -> None:
    """Two shards have it each; a whole model once, or where the library asks for it in another order, twice."""
    path = make_model((architecture, "dense"), tmp_path / "model.gguf", without=[lacks]).path
    sizes = sizes_of(path, family_of(architecture, "dense"), SETTINGS[0])
    assert_true(patched_build, path, sizes, SETTINGS[0], [1, 3])


@pytest.mark.parametrize(
    ("architecture", "variant"), [("cohere2moe", "moe"), ("hy_v3", "moe"), ("qwen35", "dense"), ("step35", "moe")]
)
def test_draft_heads(patched_build: NativeBuild, tmp_path: Path, architecture: str, variant: str) -> None:
    """Their layers are no layers to cut, and are held by the last shard, with a cache or without."""
    model = make_model((architecture, variant), tmp_path / "model.gguf", draft_layers=1)
    assert read_model_file(model.path).n_layer == model.n_layer
    sizes = sizes_of(model.path, family_of(architecture, variant), SETTINGS[0])
    assert_true(patched_build, model.path, sizes, SETTINGS[0], [1, 2])


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_tiny_models(patched_build: NativeBuild, tiny: dict[str, Path], variant: str) -> None:
    sizes = sizes_of(tiny[variant], Family("kv", "logits"), SETTINGS[0])
    assert_true(patched_build, tiny[variant], sizes, SETTINGS[0], [1, 3])


def test_a_real_model(patched_build: NativeBuild, smollm2: Path) -> None:
    settings = Settings(threads=1, ctx=512)
    assert_true(patched_build, smollm2, sizes_of(smollm2, Family("kv", "logits"), settings), settings, [1, 3])


def test_grok_without_flash_attention(patched_build: NativeBuild, tmp_path: Path) -> None:
    """What a worker refuses is not planned as if it ran."""
    path = make_model(("grok", "moe"), tmp_path / "model.gguf").path
    assert "a worker refuses values of q8_0" in sizes_of(path, family_of("grok", "moe"), SETTINGS[2]).kv_unknown
