"""What the planner takes out of a file: bytes of every layer, with nothing loaded.

Catches: a tensor without an owner or with two, a cache that is computed for other settings than the worker's, metadata
that is damaged and guessed at. tests/shards/test_planned_sizes.py holds the same against workers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boundary_bundle.families import certificates
from boundary_bundle.shards import (
    Family,
    ModelFile,
    ModelSizes,
    Part,
    PlanError,
    Settings,
    Tensor,
    model_sizes,
    model_tensors,
    read_model_file,
    tensors_sha256,
    tiny_models,
)

LLAMA = Family("kv", "logits")


def test_a_shard_is_the_sum_of_its_layers() -> None:
    """A tied table is held once by a shard that is first and last, and by two shards otherwise."""
    layers = (Part(10, 1, 100), Part(20, 2, 200), Part(30, 3, 300))
    sizes = ModelSizes(layers, Part(7, 1), Part(9, 9), 5, (False, True, True), 7, (1, 2))
    assert sizes.shard(0, 1) == Part(17, 2, 100)
    assert sizes.shard(1, 2) == Part(25, 2, 200)
    assert sizes.shard(2, 3) == Part(44, 12, 300)
    assert sizes.shard(0, 3) == Part(74, 16, 600)


def tensor_bytes(model: ModelFile, pattern: str) -> int:
    return sum(one.n_bytes for one in model.tensors if re.match(pattern, one.name))


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_every_tensor_has_an_owner(tiny: dict[str, Path], variant: str) -> None:
    """Shards of one layer hold every tensor once, a tied table twice and shared factors in each."""
    model = read_model_file(tiny[variant])
    sizes = model_sizes(model, model.tensors, LLAMA, Settings())
    n_layer = model.n_layer
    table, factors = tensor_bytes(model, "token_embd"), tensor_bytes(model, "rope_freqs")
    total = sum(one.n_bytes for one in model.tensors)
    shards = [sizes.shard(layer, layer + 1) for layer in range(n_layer)]
    assert sizes.cuts == tuple(range(1, n_layer))
    assert sizes.shard(0, n_layer).weights == total
    twice = table if tiny_models.VARIANTS[variant].tied else 0
    assert sum(part.weights for part in shards) == total + twice + (n_layer - 1) * factors
    # A step reads one row of the table as input, the whole head, and of experts those that a token uses.
    shape = tiny_models.VARIANTS[variant]
    unused = tensor_bytes(model, r".*_exps\.") // 2 if shape.n_expert else 0
    head = table if shape.tied else 0
    rows = table // tiny_models.N_VOCAB
    assert sizes.shard(0, n_layer).read == total - factors - table + rows + head - unused


@pytest.mark.parametrize(
    ("changed", "each"),
    [
        ({}, 4 * 1024),
        ({"ctx": 1000}, 4 * 1024),
        ({"ctx": 1000, "seqs": 3}, 4 * 3 * 512),
        ({"ctx": 1000, "seqs": 3, "kv_unified": True}, 4 * 1024),
        ({"type_k": "f32"}, 6 * 1024),
    ],
)
def test_kv_of_a_layer(tiny: dict[str, Path], changed: dict[str, Any], each: int) -> None:
    """Two heads of 32 keys and values: cells by bytes."""
    model = read_model_file(tiny["gqa"])
    sizes = model_sizes(model, model.tensors, LLAMA, Settings(**changed))
    assert {part.kv for part in sizes.layers} == {2 * 32 * each}


def test_states_are_padded(tiny: dict[str, Path]) -> None:
    """Two buffers a layer, each rounded up to 32 bytes, for each sequence; the tiny families have none that are not."""
    model = replace(read_model_file(tiny["gqa"]), architecture="mamba")
    model = altered(model, ssm__conv_kernel=4, ssm__inner_size=2, ssm__state_size=3)
    for seqs, expected in [(1, 32 + 32), (3, 96 + 96)]:
        sizes = model_sizes(model, model.tensors, Family("recurrent", "logits"), Settings(seqs=seqs))
        assert {part.kv for part in sizes.layers} == {expected}


def altered(model: ModelFile, **keys: Any) -> ModelFile:
    found = {**model.metadata, **{key.replace("__", "."): value for key, value in keys.items()}}
    return replace(model, metadata={key: value for key, value in found.items() if value is not None})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention__head_count_kv": [2, 2, 2]}, "no usable llama.attention.head_count_kv"),
        ({"attention__head_count_kv": -1}, "no usable llama.attention.head_count_kv"),
        ({"attention__head_count": "four"}, "no usable llama.attention.head_count"),
        ({"embedding_length": None}, "no usable llama.embedding_length"),
        ({"embedding_length": -128}, "no usable llama.embedding_length"),
        ({"attention__key_length": 48}, "refuses q8_0, whose blocks of 32 values do not divide the head size 48"),
    ],
)
def test_kv_that_is_not_known(tiny: dict[str, Path], keys: dict[str, Any], words: str) -> None:
    """Metadata that does not say it is a reason in the plan, and neither a guess nor an exception."""
    model = altered(read_model_file(tiny["gqa"]), **keys)
    sizes = model_sizes(model, model.tensors, LLAMA, Settings(type_k="q8_0"))
    assert re.search(words, sizes.kv_unknown)
    assert {part.kv for part in sizes.layers} == {0}


def test_windows_that_are_not_known(tiny: dict[str, Path]) -> None:
    """A family whose file does not list its windows: no matter as long as all layers keep all positions."""
    model = replace(read_model_file(tiny["gqa"]), architecture="mimo2")
    family = Family("iswa", "logits")
    assert model_sizes(model, model.tensors, family, Settings()).kv_unknown == ""
    assert "sliding window" in model_sizes(model, model.tensors, family, Settings(swa_full=False)).kv_unknown


def test_layers_of_another_number(tiny: dict[str, Path]) -> None:
    model = read_model_file(tiny["gqa"])
    for n_layer, words in [(9, "no tensors of layer 8, and its metadata declares 9"), (7, "has tensors of layer 7")]:
        other = replace(altered(model, block_count=n_layer), n_layer=n_layer)
        with pytest.raises(PlanError, match=words):
            model_sizes(other, model.tensors, LLAMA, Settings())


def test_tensors_outside_of_layers(tiny: dict[str, Path]) -> None:
    """What is in no layer belongs to the first if it is an input, else to the last; a table costs a row to read."""
    model = read_model_file(tiny["gqa"])
    before = model_sizes(model, model.tensors, LLAMA, Settings())
    for name, first in [("position_embd.weight", True), ("cls.weight", False), ("token_embd_norm.bias", True)]:
        more = Tensor(name, "F32", (4, 8), 128)
        after = model_sizes(model, [*model.tensors, more], LLAMA, Settings())
        assert after.first.weights - before.first.weights == (128 if first else 0)
        assert after.last.weights - before.last.weights == (0 if first else 128)
    lookup = model_sizes(model, [*model.tensors, Tensor("position_embd.weight", "F32", (4, 8), 128)], LLAMA, Settings())
    assert lookup.first.read - before.first.read == 16


def test_one_table_for_one_file_and_several(tiny: dict[str, Path]) -> None:
    """The hash that a plan holds is of names, types and shapes, in whatever order."""
    model = read_model_file(tiny["untied"])
    told = tensors_sha256(model_tensors(model))
    assert tensors_sha256(reversed(model.tensors)) == told
    assert tensors_sha256(read_model_file(tiny["tied"]).tensors) != told
    first = model.tensors[0]
    for other in (replace(first, name="x"), replace(first, type="F16"), replace(first, shape=(1, 2))):
        assert tensors_sha256([other, *model.tensors[1:]]) != told


def test_a_model_in_several_files(tmp_path: Path, tiny: dict[str, Path]) -> None:
    """The others are read too; one that is missing is named."""
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(tiny["gqa"].read_bytes())
    model = read_model_file(first)
    with pytest.raises(PlanError, match=r"m-00002-of-00002\.gguf: No such file"):
        model_tensors(model)
    second.write_bytes(tiny["tied"].read_bytes())
    assert model_tensors(model) == [*model.tensors, *read_model_file(tiny["tied"]).tensors]


def test_certificates_are_found_by_name() -> None:
    """And by nothing else: a name comes out of a file. Variants do not differ in what a plan takes of them."""
    assert certificates.find("llama") is not None
    for name in ("", ".", "../families/llama", "README", "no such", "llama.json"):
        assert certificates.find(name) is None
    folder = Path(certificates.__file__).parent.parent.parent / "spec" / "families"
    for certificate in certificates.read(folder):
        found = {(one["memory"], one["gives"]) for one in certificate["variants"] if one["verdict"] == "certified"}
        assert len(found) == (certificate["verdict"] == "certified"), certificate["architecture"]
