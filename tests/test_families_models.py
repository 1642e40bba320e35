"""Tiny models of every architecture: made anew, read by the gguf package, run by the unpatched library.

Catches: an architecture that is forgotten or no longer builds, a refusal whose reason no longer holds, weights that
depend on the machine, the run or the order, a degenerate model (a layer or a state that does not matter, values that
are not finite), a pattern of layers that no cut has on both sides.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import gguf
import pytest

from boundary_bundle.families import models
from boundary_bundle.families.models import Check, Model, Variant
from boundary_bundle.native import NativeBuild

pytestmark = pytest.mark.shards

Made = dict[Variant, Model]

HEAD_SIZES = {32, 64, 128}
# The cache of compressed attention holds a head's compressed part (64) and the rotated part (32) in one row.
COMPRESSED = {"deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "mistral4"}


@pytest.fixture(scope="module")
def made(unpatched_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("families")
    return {
        variant: models.make_model(variant, folder / f"{variant}.gguf", build=unpatched_build)
        for variant in models.variants(unpatched_build)
    }


def test_every_architecture_of_the_library_has_a_model_or_a_reason(unpatched_build: NativeBuild) -> None:
    """The library's own list is its source: names that it gives to files."""
    text = (unpatched_build.source_dir / "src" / "llama-arch.cpp").read_text(encoding="utf-8")
    table = text[text.index("LLM_ARCH_NAMES = {") : text.index("LLM_KV_NAMES = {")]
    names = set(re.findall(r'"([^"]+)"', table)) - {"(unknown)"}
    variants = models.variants(unpatched_build)
    with_models = {variant.architecture for variant in variants}
    refused = set(models.refused(unpatched_build))
    assert with_models | refused == names
    assert not with_models & refused
    assert len(with_models) >= 120
    assert len(set(variants)) == len(variants)


def test_the_library_really_refuses_what_is_refused(unpatched_build: NativeBuild, tmp_path: Path) -> None:
    built = []
    for architecture, reason in models.refused(unpatched_build).items():
        with pytest.raises(models.ModelError, match=re.escape(reason)):
            models.make_model((architecture, "dense"), tmp_path / "refused.gguf", build=unpatched_build)
        assert not list(tmp_path.iterdir())
        command = [str(models.program(unpatched_build)), "--make", architecture, "dense", str(tmp_path / "x"), "0", "0"]
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        if subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False).returncode == 0:
            built.append(architecture)
        (tmp_path / "x").unlink(missing_ok=True)
    # Built and run, but without layers to cut between.
    assert built == ["wavtokenizer-dec"]


def test_a_variant_that_the_library_does_not_build_is_one_sentence(
    unpatched_build: NativeBuild, tmp_path: Path
) -> None:
    for variant, sentence in {
        ("qwen3moe", "dense"): "--make qwen3moe dense: qwen3moe has no variant dense",
        ("nonsense", "dense"): "--make nonsense dense: there is no architecture nonsense",
    }.items():
        with pytest.raises(models.ModelError, match=sentence):
            models.make_model(variant, tmp_path / "x.gguf", build=unpatched_build)
    with pytest.raises(models.ModelError, match="there is no tensor blk.9.ffn_down.weight to leave out"):
        models.make_model(
            ("llama", "dense"), tmp_path / "x.gguf", without=["blk.9.ffn_down.weight"], build=unpatched_build
        )
    with pytest.raises(models.ModelError, match="missing tensor 'blk.3.ffn_down.weight'"):
        models.make_model(
            ("llama", "dense"), tmp_path / "x.gguf", without=["blk.3.ffn_down.weight"], build=unpatched_build
        )
    with pytest.raises(models.ModelError, match="there are no draft layers in llama"):
        models.make_model(("llama", "dense"), tmp_path / "x.gguf", draft_layers=1, build=unpatched_build)
    assert not list(tmp_path.iterdir())


def test_the_same_seed_gives_the_same_file_everywhere(made: Made, unpatched_build: NativeBuild, tmp_path: Path) -> None:
    variant = Variant("llama", "dense")
    first = made[variant]
    again = models.make_model(variant, tmp_path / "again.gguf", build=unpatched_build)
    other = models.make_model(variant, tmp_path / "other.gguf", seed=1, build=unpatched_build)
    assert first.sha256 == again.sha256 == hashlib.sha256(first.path.read_bytes()).hexdigest()
    assert other.sha256 != first.sha256
    # Written down on one machine, held on all: the weights come from integers and one multiplication.
    assert first.sha256 == "3e512540028bda044f27757002db74564db937c221b0d43a998dda7de666c56d"


def test_a_head_can_be_tied(unpatched_build: NativeBuild, tmp_path: Path) -> None:
    path = tmp_path / "tied.gguf"
    models.make_model(("llama", "dense"), path, without=["output.weight"], build=unpatched_build)
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert models.check_model(path, build=unpatched_build).sound


@pytest.mark.parametrize("variant", [("qwen35", "dense"), ("step35", "moe")])
def test_draft_layers_take_no_part(variant: tuple[str, str], unpatched_build: NativeBuild, tmp_path: Path) -> None:
    path = tmp_path / "drafting.gguf"
    model = models.make_model(variant, path, draft_layers=1, build=unpatched_build)
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    assert model.n_layer == 6
    assert "blk.6.nextn.eh_proj.weight" in names
    assert models.check_model(path, build=unpatched_build).sound
    idle = models.idle_tensors(path, build=unpatched_build)
    assert {name for name in names if name.startswith("blk.6.")} <= set(idle)


def test_files_are_what_they_are_said_to_be(made: Made) -> None:
    """As the gguf package reads them, which knows nothing of the library."""
    for variant, model in made.items():
        reader = gguf.GGUFReader(model.path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        assert fields["general.architecture"] == variant.architecture
        assert fields[f"{variant.architecture}.block_count"] == model.n_layer >= 6
        assert fields[f"{variant.architecture}.embedding_length"] == model.n_embd
        assert fields[f"{variant.architecture}.context_length"] >= 1024
        assert len(model.layers) == model.n_layer
        names = [tensor.name for tensor in reader.tensors]
        assert len(set(names)) == len(names)
        assert {tensor.tensor_type.name for tensor in reader.tensors} <= {"F32", "I32"}
        assert (model.n_expert > 0) == (variant.experts == "moe"), variant
        # Two are dense in the library whatever their number of experts.
        experts = variant.experts == "moe" and variant.architecture not in {"ernie4_5", "paddleocr"}
        assert experts == any("exps." in name for name in names), variant
        assert model.size == model.path.stat().st_size < 16e6
        expected = {96} if variant.architecture in COMPRESSED else HEAD_SIZES
        assert model.head_size_k in expected, variant
        assert model.head_size_v in HEAD_SIZES, variant


def test_every_kind_of_layer_is_on_both_sides_of_some_cut(made: Made) -> None:
    """What some layers have and others have not, twice each: tensors, a window, a state, a feed-forward."""
    for variant, model in made.items():
        found: dict[str, set[int]] = defaultdict(set)
        for tensor in gguf.GGUFReader(model.path).tensors:
            if match := re.fullmatch(r"((?:dec\.|enc\.)?blk)\.(\d+)\.(.+)", tensor.name):
                found[f"{match[1]}.{match[3]}"].add(int(match[2]))
        for number, layer in enumerate(model.layers):
            for name, is_so in (("recurrent", layer.recurrent), ("window", layer.window), ("kv", layer.kv)):
                if is_so:
                    found[name].add(number)
        for name, layers in found.items():
            others = set(range(model.n_layer)) - layers
            assert len(layers) >= 2, (variant, name, layers)
            assert len(others) != 1, (variant, name, others)


def test_memories_and_outputs_of_all_kinds_are_there(made: Made) -> None:
    assert {model.memory for model in made.values()} == {
        *("none", "kv", "iswa", "recurrent", "hybrid", "hybrid_iswa", "dsa", "dsv4")
    }
    for model in made.values():
        assert not model.remembers or (model.memory != "none" and model.attention == "causal" and model.decoder)
        assert any(layer.recurrent for layer in model.layers) == (
            model.memory in {"recurrent"} or "hybrid" in model.memory
        )
    kinds = {str(variant): (model.gives, model.remembers, model.encoder) for variant, model in made.items()}
    assert kinds["llama-dense"] == ("logits", True, False)
    assert kinds["bert-dense"] == ("embeddings", False, False)
    assert kinds["llada-dense"] == ("logits", False, False)
    assert kinds["t5-dense"] == ("logits", True, True)
    assert kinds["llama-embed-dense"] == ("embeddings", False, False)
    shared = {str(variant): model.n_layer_kv_from_start for variant, model in made.items()}
    assert {name: first for name, first in shared.items() if first >= 0} == {"gemma3n-dense": 20, "gemma4-dense": 6}


def test_no_model_is_degenerate(made: Made, unpatched_build: NativeBuild) -> None:
    checks: dict[Variant, Check] = {}
    for variant, model in made.items():
        checks[variant] = models.check_model(model.path, build=unpatched_build)
        assert checks[variant].columns == (model.n_vocab if model.gives == "logits" else model.n_embd)
        assert checks[variant].rows == (72 if model.remembers else 64)
    assert {variant: check for variant, check in checks.items() if not check.sound} == {}


@pytest.mark.parametrize("layer", [0, 5])
def test_a_degenerate_model_is_found(made: Made, unpatched_build: NativeBuild, tmp_path: Path, layer: int) -> None:
    """One layer's output projections are zero in the file: replacing it by identity changes nothing."""
    source = made[Variant("llama", "dense")].path
    path = tmp_path / "degenerate.gguf"
    content = bytearray(source.read_bytes())
    for tensor in gguf.GGUFReader(source).tensors:
        if re.fullmatch(rf"blk\.{layer}\.(attn_output|ffn_down)\.(weight|bias)", tensor.name):
            content[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = bytes(tensor.n_bytes)
    path.write_bytes(content)
    check = models.check_model(path, build=unpatched_build)
    assert check.identity_fraction == 0
    assert not check.sound


def test_weights_that_nothing_depends_on_are_known(made: Made, unpatched_build: NativeBuild) -> None:
    """Where a fault in a weight could not show. The library makes these and does not use them in such a run."""
    for name, idle in {
        "qwen3moe-moe": [],
        "gemma2-dense": [],
        "mamba2-dense": [],
        "rwkv6-dense": [],
        "phi3-dense": ["rope_factors_long.weight"],
    }.items():
        (model,) = (model for variant, model in made.items() if str(variant) == name)
        assert models.idle_tensors(model.path, build=unpatched_build) == idle
