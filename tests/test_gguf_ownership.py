"""What each shard holds, as the loaded models report it, against the file as the gguf package reads it.

Catches: tensors lost or loaded twice, a head or a table on the wrong shard, sizes taken from the request
instead of from what was loaded, KV for layers of others, and memory that follows the file, not the range.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Batch,
    Description,
    LocalWorker,
    Pipeline,
    Settings,
    WorkerPool,
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


@functools.cache  # a vocabulary is read for seconds
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


@functools.cache
def n_layer_of(path: Path) -> int:
    field = gguf.GGUFReader(path).get_field("llama.block_count")
    assert field is not None
    return int(field.contents())


#: A plan of any model: where it is cut, as shares of its length. Equal cuts are one.
shares = st.lists(st.floats(0, 1, exclude_max=True), max_size=4)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@example([])
@example([0, 0.999])
@example([0.5, 0.75])
@given(shares)
def test_the_shards_hold_the_file_once(
    patched_build: NativeBuild, pool: WorkerPool, model: Path, places: list[float]
) -> None:
    """Any legal plan: all shards together hold every tensor of the file, and no tensor twice but the shared ones."""
    file, n_layer = of_file(model), n_layer_of(model)
    tied = HEAD not in file
    plan = make_plan(n_layer, sorted({1 + int(place * (n_layer - 1)) for place in places}))
    shards = [worker.describe(tensors=True) for worker in pool.workers(patched_build.worker, model, plan, SETTINGS)]
    holders: Counter[str] = Counter()
    for shard, (start, end) in zip(shards, plan, strict=True):
        held = entries(shard)
        names = {name for name, _ in held}
        assert len(names) == len(held)
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
        assert facts["tied"] == (last and tied)
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


def test_describe_says_what_is_in_the_file(
    patched_build: NativeBuild, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's JSON, for the three shards of a plan."""
    file, n_layer = of_file(model), n_layer_of(model)
    tied = HEAD not in file
    plan = make_plan(n_layer, [n_layer // 3, n_layer * 2 // 3])
    found = []
    for start, end in plan:
        command = ["describe", "--worker", str(patched_build.worker), "--model", str(model), "--threads", "1"]
        assert main([*command, "--range", f"{start}:{end}", "--ctx", "512", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for facts, (start, end) in zip(found, plan, strict=True):
        first, last = start == 0, end == n_layer
        wanted = {
            name: entry
            for name, entry in file.items()
            if (name.startswith("blk.") and start <= int(name.split(".")[1]) < end)
            or name == FACTORS
            or (name == TABLE and (first or (last and tied)))
            or (name in (NORM, HEAD) and last)
        }
        held = {entry["name"]: (entry["type"], tuple(entry["shape"]), entry["bytes"]) for entry in facts["tensors"]}
        assert {name: (kind.lower(), shape, size) for name, (kind, shape, size) in held.items()} == wanted
        assert facts["weight_bytes"] == sum(size for _, _, size in wanted.values())
        assert facts["layers"] == list(range(start, end))
        assert facts["kv_bytes"] * n_layer == sum(other["kv_bytes"] for other in found) * (end - start)
        assert facts["kv_bytes"] < facts["resident_bytes"]
        assert [facts[f"has_{what}"] for what in ("tok_embd", "out_norm", "output")] == [first, last, last]
        assert facts["tied"] == (tied and last)
    for before, after in zip(found, found[1:], strict=False):
        assert before["contract"]["out"] == after["contract"]["in"]
        assert before["contract"]["out_fingerprint"] == after["contract"]["in_fingerprint"]
    assert [entry["name"] for entry in found[0]["contract"]["in"]][0] == "token_ids"
    assert [entry["name"] for entry in found[-1]["contract"]["out"]] == ["logits"]
    assert len({facts["contract"]["in_fingerprint"] for facts in found}) == 2


@pytest.mark.parametrize("layers", [None, "0:3", "2:5", "4:5"])
@pytest.mark.parametrize("declared", [1, 5, 6, 8, 9, 400])
def test_a_declared_layer_count_that_is_not_the_tensors(
    patched_build: NativeBuild,
    tiny: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    declared: int,
    layers: str | None,
) -> None:
    """Refused for every range: what is asked for may be there, but it is not known of which model it is a part."""
    path = tmp_path / "claims.gguf"
    content = bytearray(tiny["tied"].read_bytes())
    field = gguf.GGUFReader(tiny["tied"]).get_field("llama.block_count")
    assert field is not None
    place = field.offset + sum(int(part.nbytes) for part in field.parts[:-1])
    assert content[place : place + 4] == (7).to_bytes(4, "little")
    content[place : place + 4] = declared.to_bytes(4, "little")
    path.write_bytes(content)
    command = ["describe", "--worker", str(patched_build.worker), "--model", str(path)]
    assert main([*command, *(["--range", layers] if layers else [])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert f" {declared} layers" in err
    if layers is None or int(layers[2:]) <= declared:
        assert "the tensors are those of 7" in err


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
