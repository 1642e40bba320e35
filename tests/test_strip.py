"""Files of one layer range: what they hold, and that shards of them are shards of the whole model.

Catches: a tensor that is lost, extra or changed in a bit, metadata that is not the model's, a fingerprint that
follows the file, and a range that loads without what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from drive import Conversation, assert_same_bits, logits_of

from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    LocalWorker,
    Pipeline,
    Settings,
    WorkerError,
    WorkerPool,
    make_plan,
    tiny_models,
)
from boundary_bundle.shards.strip import TABLE

pytestmark = pytest.mark.shards

SETTINGS = Settings(threads=1, ctx=512, batch=32, ubatch=8, seqs=2)
VARIANTS = list(tiny_models.VARIANTS)


def strip(build: NativeBuild, model: Path, layers: tuple[int, int], target: Path) -> Path:
    command = ["strip", "--worker", str(build.worker), "--model", str(model), "-o", str(target)]
    assert main([*command, "--range", f"{layers[0]}:{layers[1]}"]) == 0
    return target


def strip_all(build: NativeBuild, model: Path, plan: Sequence[tuple[int, int]], folder: Path) -> list[Path]:
    return [strip(build, model, layers, folder / f"{layers[0]}-{layers[1]}.gguf") for layers in plan]


def thirds(n_layer: int) -> list[tuple[int, int]]:
    return list(make_plan(n_layer, [n_layer // 3, n_layer * 2 // 3]))


def tensors_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """Type, shape and payload of each tensor, in the file's order."""
    return {
        tensor.name: (tensor.tensor_type, tuple(map(int, tensor.shape)), tensor.data.tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


def metadata_of(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {
        key: (field.types, [part.tobytes() for part in field.parts[3:]])
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }


def belongs(name: str, layers: tuple[int, int], n_layer: int, tied: bool) -> bool:
    """What a range of a llama file needs, said once more and from nothing but the name."""
    if name.startswith("blk."):
        return layers[0] <= int(name.split(".")[1]) < layers[1]
    first, last = layers[0] == 0, layers[1] == n_layer
    return {
        "token_embd.weight": first or (last and tied),
        "output_norm.weight": last,
        "output.weight": last,
        "rope_freqs.weight": True,
    }[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stripped_file_holds_its_range_and_all_metadata(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    whole, metadata = tensors_of(tiny[variant]), metadata_of(tiny[variant])
    n_layer = tiny_models.VARIANTS[variant].n_layer
    for layers in thirds(n_layer):
        path = strip(patched_build, tiny[variant], layers, tmp_path / "part.gguf")
        tied = "output.weight" not in whole
        assert list(tensors_of(path).items()) == [
            (name, entry) for name, entry in whole.items() if belongs(name, layers, n_layer, tied)
        ]
        found = metadata_of(path)
        table = {key: found.pop(TABLE + key) for key in ("name", "type", "shape")}
        assert found == metadata
        assert [text.decode() for text in table["name"][1][3::2]] == list(whole)
        numbers = np.frombuffer(b"".join(table["type"][1][2:]), np.uint32).tolist()
        assert numbers == [int(kind) for kind, _, _ in whole.values()]
        shapes = np.frombuffer(b"".join(table["shape"][1][2:]), np.uint64).reshape(-1, 4).tolist()
        assert shapes == [[*shape, 1, 1, 1][:4] for _, shape, _ in whole.values()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_of_stripped_files_equal_the_unsplit_run(
    patched_build: NativeBuild,
    unpatched_build: NativeBuild,
    tiny: dict[str, Path],
    pool: WorkerPool,
    tmp_path: Path,
    variant: str,
) -> None:
    """Three stripped files, and stripped ones beside the whole one, by bits against the unpatched library."""
    model, n_layer = tiny[variant], tiny_models.VARIANTS[variant].n_layer
    plan = thirds(n_layer)
    files = strip_all(patched_build, model, plan, tmp_path)
    talk = Conversation(5)
    batches = [talk.batch([0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1]), talk.batch([1]), talk.batch([0, 1])]
    expected = logits_of(pool.pipeline(unpatched_build.worker, model, [(0, n_layer)], SETTINGS), batches)
    for sources in (files, [files[0], model, files[2]], [model, files[1], model]):
        workers = [
            LocalWorker(patched_build.worker, source, layers, SETTINGS)
            for source, layers in zip(sources, plan, strict=True)
        ]
        try:
            assert_same_bits(logits_of(Pipeline([worker.ready() for worker in workers]), batches), expected)
        finally:
            for worker in workers:
                worker.close()


def test_the_real_model_in_three_files(
    patched_build: NativeBuild, unpatched_build: NativeBuild, smollm2: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    plan = thirds(30)
    files = strip_all(patched_build, smollm2, plan, tmp_path)
    parts = [tensors_of(path) for path in files]
    whole = tensors_of(smollm2)
    assert {name: entry for part in parts for name, entry in part.items()} == whole
    assert sum(map(len, parts)) == len(whole) + 1  # the tied table
    assert sum(path.stat().st_size for path in files) < smollm2.stat().st_size * 1.5
    talk = Conversation(6, n_vocab=49152)
    batches = [talk.batch([0, 1, 0, 0, 1, 0, 1, 1]), talk.batch([1]), talk.batch([0, 1])]
    expected = logits_of(pool.pipeline(unpatched_build.worker, smollm2, [(0, 30)], SETTINGS), batches)
    workers = [LocalWorker(patched_build.worker, *shard, SETTINGS) for shard in zip(files, plan, strict=True)]
    try:
        assert_same_bits(logits_of(Pipeline([worker.ready() for worker in workers]), batches), expected)
    finally:
        for worker in workers:
            worker.close()
        for path in files:
            path.unlink()  # pytest keeps its folders for some runs, and these are 130 MB


def described(build: NativeBuild, path: Path, layers: tuple[int, int]) -> dict[str, Any]:
    """The whole report, apart from what differs from process to process and from file to file."""
    with LocalWorker(build.worker, path, layers, SETTINGS) as worker:
        raw = worker.describe(tensors=True).raw
    return {key: value for key, value in raw.items() if key not in ("path", "resident_bytes")}


@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_a_stripped_file_loads_for_its_range_alone(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    """And for every part of it; for any other range the tensor is named that is not there."""
    model, n_layer = tiny[variant], tiny_models.VARIANTS[variant].n_layer
    for start, end in [(0, 2), (1, 4), (3, n_layer)]:
        path = strip(patched_build, model, (start, end), tmp_path / "part.gguf")
        for layers in [(start, end), (start, start + 1), (end - 1, end)]:
            assert described(patched_build, path, layers) == described(patched_build, model, layers)
        for layers in [(0, n_layer), (max(0, start - 1), end), (start, min(n_layer, end + 1))]:
            if layers == (start, end):
                continue
            with (
                pytest.raises(WorkerError, match="error 4 load: .*tensor '") as caught,
                LocalWorker(patched_build.worker, path, layers, SETTINGS) as worker,
            ):
                worker.ready()
            name = caught.value.message.split("'")[1]
            assert belongs(name, layers, n_layer, variant == "tied")
            assert name not in tensors_of(path)
            assert name in tensors_of(model)


def test_a_part_of_a_stripped_file_is_a_part_of_the_whole(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Byte for byte the same file, whichever way."""
    part = strip(patched_build, tiny["tied"], (1, 6), tmp_path / "part.gguf")
    ours = strip(patched_build, part, (2, 4), tmp_path / "ours.gguf")
    theirs = strip(patched_build, tiny["tied"], (2, 4), tmp_path / "theirs.gguf")
    assert ours.read_bytes() == theirs.read_bytes()


def rewritten(source: Path, target: Path, change: Any = None, keep: Any = None, alignment: int | None = None) -> Path:
    """The file again, with metadata changed by ``change(key, value)`` and the tensors that ``keep`` lets pass."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if change is not None:
            value = change(key, value)
        kind = field.types[0]
        writer.add_key_value(key, value, kind, field.types[1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if keep is None or keep(tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def split_in_three(source: Path, folder: Path) -> Path:
    """The model in three files as upstream names and marks them; returns the first."""
    reader = gguf.GGUFReader(source)
    names = [tensor.name for tensor in reader.tensors]
    edges = [0, len(names) // 3, len(names) * 2 // 3, len(names)]
    paths = [folder / f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for key, field in reader.fields.items():
            if number == 0 and not key.startswith("GGUF.") and key != "general.architecture":
                kind = field.types[0]
                element = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), kind, element)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors[edges[number] : edges[number + 1]]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def test_a_model_in_several_files(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    """The first is given, and the stripped file is that of the model in one."""
    first = split_in_three(tiny["q8_0"], tmp_path)
    for layers in thirds(tiny_models.VARIANTS["q8_0"].n_layer):
        ours = strip(patched_build, first, layers, tmp_path / "ours.gguf")
        theirs = strip(patched_build, tiny["q8_0"], layers, tmp_path / "theirs.gguf")
        assert ours.read_bytes() == theirs.read_bytes()


def test_an_alignment_of_its_own(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    model = rewritten(tiny["q8_0"], tmp_path / "aligned.gguf", alignment=4096)
    path = strip(patched_build, model, (2, 4), tmp_path / "part.gguf")
    reader = gguf.GGUFReader(path)
    assert reader.alignment == 4096
    assert all(tensor.data_offset % 4096 == 0 for tensor in reader.tensors)
    whole = tensors_of(model)
    assert all(whole[name] == entry for name, entry in tensors_of(path).items())
    assert described(patched_build, path, (2, 4)) == described(patched_build, model, (2, 4))


# -- what is refused


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No part of a file remains after a refusal."""
    before = sorted(os.listdir(tmp_path))
    yield
    assert [name for name in sorted(os.listdir(tmp_path)) if name not in before and ".gguf" not in name] == []


def refusal(build: NativeBuild, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["strip", "--worker", str(build.worker), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "unforeseen" not in err
    return str(err)


@pytest.mark.usefixtures("nothing_is_left")
def test_what_cannot_be_stripped(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, target = str(tiny["tied"]), tmp_path / "part.gguf"
    said = lambda *more: refusal(patched_build, capsys, *more)  # noqa: E731
    for layers in ("3:3", "4:2", "0:8", "7:9", "x", "1:"):
        assert layers in said("--model", model, "--range", layers, "-o", str(target))
    assert "is the file" in said("--model", model, "--range", "0:2", "-o", model)
    assert "no folder" in said("--model", model, "--range", "0:2", "-o", str(tmp_path / "none" / "x.gguf"))
    assert "is a folder" in said("--model", model, "--range", "0:2", "-o", str(tmp_path))
    first = split_in_three(tiny["tied"], tmp_path)
    second = tmp_path / "model-00002-of-00003.gguf"
    assert "is the file" in said("--model", str(first), "--range", "0:2", "-o", str(second))
    assert "file 2 of 3 of a model" in said("--model", str(second), "--range", "0:2", "-o", str(target))
    second.unlink()
    assert "model-00002-of-00003.gguf" in said("--model", str(first), "--range", "0:2", "-o", str(target))
    part = strip(patched_build, tiny["tied"], (2, 4), tmp_path / "some.gguf")
    capsys.readouterr()
    assert "blk.1.attn_norm.weight" in said("--model", str(part), "--range", "1:3", "-o", str(target))
    assert not target.exists()


def test_what_was_there_stays_when_it_is_refused(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "part.gguf"
    target.write_bytes(b"old")
    part = strip(patched_build, tiny["tied"], (2, 4), tmp_path / "some.gguf")
    capsys.readouterr()
    refusal(patched_build, capsys, "--model", str(part), "--range", "0:3", "-o", str(target))
    assert target.read_bytes() == b"old"
    strip(patched_build, tiny["tied"], (0, 3), target)
    assert target.read_bytes() != b"old"


DAMAGE = {
    "a tensor that the table does not have": (
        "name",
        lambda names: ["x" if n == "blk.2.attn_q.weight" else n for n in names],
    ),
    "a tensor of another type": ("type", lambda types: [1 - kind if kind in (0, 1) else kind for kind in types]),
    "no type at all": ("type", lambda types: [4_000_000_000] * len(types)),
    "a tensor of another shape": ("shape", lambda sizes: [size + 1 for size in sizes]),
    "too few types": ("type", lambda types: types[:-1]),
    "too many shapes": ("shape", lambda sizes: [*sizes, 1]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_table_that_is_not_the_file_is_refused(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    """The fingerprint is made from the table, so a table of another model would be a false one."""
    part = strip(patched_build, tiny["tied"], (2, 4), tmp_path / "part.gguf")
    changed, how = DAMAGE[damage]
    path = rewritten(
        part, tmp_path / "damaged.gguf", lambda key, value: how(value) if key == TABLE + changed else value
    )
    with (
        pytest.raises(WorkerError, match=r"error 4 load: .*boundary_bundle\.tensors\."),
        LocalWorker(patched_build.worker, path, (2, 4), SETTINGS) as worker,
    ):
        worker.ready()


def test_the_fingerprint_follows_the_whole_table(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Another tensor somewhere else in the model is another model, though this range is the same."""
    part = strip(patched_build, tiny["tied"], (2, 4), tmp_path / "part.gguf")

    def other(key: str, value: Any) -> Any:
        if key == TABLE + "name":
            return ["blk.6.attn_q.other" if name == "blk.6.attn_q.weight" else name for name in value]
        return value

    changed = rewritten(part, tmp_path / "changed.gguf", other)
    ours, theirs = (described(patched_build, path, (2, 4))["fingerprint"] for path in (part, changed))
    assert ours == described(patched_build, tiny["tied"], (0, 7))["fingerprint"] != theirs


@pytest.mark.parametrize(
    ("layers", "lost"),
    [
        ((2, 4), "rope_freqs.weight"),  # optional for the architecture: without it rope would be another
        ((4, 6), "output.weight"),  # the head would be the token table
        ((2, 4), "blk.3.ffn_up.weight"),
    ],
)
def test_a_tensor_that_the_whole_model_has_is_never_missing_silently(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, layers: tuple[int, int], lost: str
) -> None:
    n_layer = tiny_models.VARIANTS["untied"].n_layer
    layers = (layers[0], n_layer) if lost == "output.weight" else layers
    part = strip(patched_build, tiny["untied"], layers, tmp_path / "part.gguf")
    assert lost in tensors_of(part)
    path = rewritten(part, tmp_path / "lost.gguf", keep=lambda name: name != lost)
    with (
        pytest.raises(WorkerError, match=f"error 4 load: .*missing tensor '{lost}'"),
        LocalWorker(patched_build.worker, path, layers, SETTINGS) as worker,
    ):
        worker.ready()


def test_a_stripped_file_is_not_the_whole_model(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Every layer is asked for, and what the file lacks is optional: it is named all the same."""
    n_layer = tiny_models.VARIANTS["untied"].n_layer
    part = strip(patched_build, tiny["untied"], (0, n_layer), tmp_path / "part.gguf")
    path = rewritten(part, tmp_path / "lost.gguf", keep=lambda name: name != "rope_freqs.weight")
    with (
        pytest.raises(WorkerError, match=r"error 4 load: .*missing tensor 'rope_freqs\.weight'"),
        LocalWorker(patched_build.worker, path, (0, n_layer), SETTINGS) as worker,
    ):
        worker.ready()
