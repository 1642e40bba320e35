"""What each shard holds, as the loaded models report it, against the file as the gguf package reads it.

Catches: tensors lost or loaded twice, a head or a table on the wrong shard, sizes taken from the request
instead of from what was loaded, KV for layers of others, and memory that follows the file, not the range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Batch,
    Description,
    LocalWorker,
    Pipeline,
    Settings,
    close_workers,
    make_plan,
    start_workers,
    tiny_models,
)

pytestmark = pytest.mark.shards

SETTINGS = Settings(threads=1, ctx=512, batch=64, ubatch=64)
MODELS = [*tiny_models.VARIANTS, "smollm2"]
TABLE, NORM, HEAD, FACTORS = "token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"

Entry = tuple[str, tuple[int, ...], int]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: dict[str, Path]) -> Path:
    found: Path = request.getfixturevalue("smollm2") if request.param == "smollm2" else tiny[request.param]
    return found


def of_file(path: Path) -> dict[str, Entry]:
    """Type, shape (outermost first) and bytes of each tensor of a file."""
    return {
        tensor.name: (
            tensor.tensor_type.name.lower(),
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.n_bytes),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def entries(shard: Description) -> list[tuple[str, Entry]]:
    return [
        (entry["name"], (entry["type"].lower(), tuple(entry["shape"]), entry["bytes"]))
        for entry in shard.raw["tensors"]
    ]


def n_layer_of(path: Path) -> int:
    field = gguf.GGUFReader(path).get_field("llama.block_count")
    assert field is not None
    return int(field.contents())


def plans(n_layer: int) -> Iterator[list[int]]:
    yield []
    yield [1]
    yield [n_layer - 1]
    yield [n_layer // 3, n_layer * 2 // 3]
    yield [n_layer // 2, n_layer // 2 + 1]


def test_the_shards_hold_the_file_once(patched_build: NativeBuild, model: Path) -> None:
    file, n_layer = of_file(model), n_layer_of(model)
    tied = HEAD not in file
    for cuts in plans(n_layer):
        plan = make_plan(n_layer, cuts)
        workers = start_workers(patched_build.worker, model, plan, SETTINGS)
        try:
            shards = [worker.describe(tensors=True) for worker in workers]
        finally:
            close_workers(workers)
        holders: Counter[str] = Counter()
        for shard, (start, end) in zip(shards, plan, strict=True):
            held = entries(shard)
            names = {name for name, _ in held}
            holders.update(names)
            for name, entry in held:
                assert entry == file[name], name
            first, last = start == 0, end == n_layer
            assert shard.layer_range == (start, end)
            assert {int(name.split(".")[1]) for name in names if name.startswith("blk.")} == set(range(start, end))
            assert (TABLE in names) == (first or (last and tied))
            assert (NORM in names) == last
            assert (HEAD in names) == (last and not tied)
            assert (FACTORS in names) == (FACTORS in file)
            for entry in shard.raw["tensors"]:
                layer = entry["layer"]
                assert layer == (int(entry["name"].split(".")[1]) if entry["name"].startswith("blk.") else -1)
            facts = shard.raw
            assert (facts["has_tok_embd"], facts["has_out_norm"], facts["has_output"]) == (first, last, last)
            assert facts["n_tensors"] == len(held)
            assert shard.weight_bytes == sum(size for _, (_, _, size) in held)
            count = sum(_elements(shape) for _, (_, shape, _) in held)
            assert facts["n_params"] == count
        assert set(holders) == set(file)
        shared = {name for name, count in holders.items() if count > 1}
        allowed = {FACTORS} & set(file) | ({TABLE} if tied else set())
        assert shared == (allowed if len(plan) > 1 else set())
        assert len({shard.fingerprint for shard in shards}) == 1


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_files_differ_in_their_fingerprints(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    found = set()
    for path in tiny.values():
        with LocalWorker(patched_build.worker, path, (0, 1), SETTINGS) as worker:
            found.add(worker.describe().fingerprint)
    assert len(found) == len(tiny)


@pytest.mark.parametrize("types", ["f16", "q8_0"])
def test_kv_is_the_owned_layers_share(patched_build: NativeBuild, model: Path, types: str) -> None:
    n_layer = n_layer_of(model)
    chosen = replace(SETTINGS, type_k=types, type_v=types)
    plan = make_plan(n_layer, [1, n_layer // 2])
    workers = start_workers(patched_build.worker, model, [(0, n_layer), *plan], chosen)
    try:
        whole, *parts = [worker.describe() for worker in workers]
    finally:
        close_workers(workers)
    reader = gguf.GGUFReader(model)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        assert field is not None
        return field.contents()

    head = value("llama.embedding_length") // value("llama.attention.head_count")
    width = head * value("llama.attention.head_count_kv")
    block, size = {"f16": (1, 2), "q8_0": (32, 34)}[types]
    layer = 2 * width // block * size * whole.n_ctx
    assert whole.kv_bytes == n_layer * layer
    assert [part.kv_bytes for part in parts] == [(end - start) * layer for start, end in plan]


def test_resident_memory_follows_the_range(patched_build: NativeBuild, smollm2: Path) -> None:
    """With mmap, which is the default. The naive value is the whole file on each shard."""
    allowance, plan = 35_000_000, make_plan(30, [10, 20])
    workers = start_workers(patched_build.worker, smollm2, plan, Settings(threads=2))
    try:
        split = Pipeline(workers)
        fresh = [shard.resident_bytes for shard in split.shards]
        split.decode(Batch.of_sequence(list(range(1000, 1064)), 0))
        split.decode(Batch.of_sequence([17], 64))
        worked = [worker.statistics()["resident_bytes"] for worker in workers]
    finally:
        close_workers(workers)
    for shard, *measured in zip(split.shards, fresh, worked, strict=True):
        assert shard.kv_bytes is not None
        share = shard.weight_bytes + shard.kv_bytes
        assert max(measured) <= share + allowance, (shard.layer_range, measured, share)


@pytest.mark.parametrize(
    ("layers", "words"),
    [((3, 3), "3"), ((4, 2), "4"), ((0, 8), "8"), ((7, 9), "9"), ((-2, 3), "-2")],
)
def test_a_bad_range_is_refused_with_its_numbers(
    patched_build: NativeBuild, tiny: dict[str, Path], layers: tuple[int, int], words: str
) -> None:
    from boundary_bundle.shards import WorkerError

    worker = LocalWorker(patched_build.worker, tiny["tied"], layers, SETTINGS)
    try:
        with pytest.raises(WorkerError) as caught:
            worker.ready()
    finally:
        worker.close()
    assert (caught.value.code, caught.value.name) == (2, "range")
    assert words in caught.value.message
    assert "7" in caught.value.message
