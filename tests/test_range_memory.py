"""Memory that follows the range: resident, locked and KV bytes of three shards of models of 256 MB.

One model for each kind of memory, with mmap and without, locked, in several files, and with types that are repacked
when they are loaded. Catches: a shard that keeps the file, or a copy of what it has copied, and KV for others' layers.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from drive import Conversation

from boundary_bundle.families.models import make_model
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import Description, LocalWorker, Pipeline, Settings, close_workers, make_plan, tiny_models

pytestmark = [
    pytest.mark.shards,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what of a process is resident (/proc)"),
]

LEAST_BYTES = 256 << 20
#: How far resident weights and KV may be from the owned share.
ALLOWED = 0.05
#: What a worker needs beside them, whatever its range: program and libraries, a vocabulary, graphs and their buffers
#: for micro-batches of 8.
FIXED_BYTES = 24 << 20
SETTINGS = Settings(threads=1, ctx=4096, batch=8, ubatch=8)

#: Kinds of memory, and of each an architecture whose tiny file has it. "plain" is made by shards.tiny_models.
KINDS = {
    "plain": ("llama", "dense"),
    "sliding window": ("gemma3", "dense"),
    "hybrid": ("jamba", "dense"),
    "recurrent": ("rwkv6", "dense"),
    "latent attention": ("deepseek2", "moe"),
}


@dataclass(frozen=True)
class Large:
    path: Path
    n_layer: int
    n_vocab: int

    @property
    def plan(self) -> list[tuple[int, int]]:
        return list(make_plan(self.n_layer, [self.n_layer // 3, self.n_layer * 2 // 3]))


#: Tensors with the feed-forward's width: as rows, as columns (outermost first), or alone.
_FEED_FORWARD = re.compile(
    r"blk\.\d+\.(?:(?:ffn_gate|ffn_up|ffn_gate_up|channel_mix_key)(?:_exps|_shexp)?\.(?P<rows>weight|bias)"
    r"|(?:ffn_down|channel_mix_value)(?:_exps|_shexp)?\.weight)"
)


def widened(source: Path, target: Path, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    """The model with the feed-forward of each layer repeated until the weights have LEAST_BYTES.

    ``kind`` is the type of the repeated tensors; theirs if not given. What the layers compute is of no matter here.
    """
    reader = gguf.GGUFReader(source)
    wide = [tensor for tensor in reader.tensors if _FEED_FORWARD.fullmatch(tensor.name)]
    stored = sum(_size(tensor, kind) for tensor in wide)
    factor = -(-LEAST_BYTES // stored)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, value, *kinds in _metadata(reader):
        if key.endswith("feed_forward_length"):
            value = [size * factor for size in value] if isinstance(value, list) else value * factor
        writer.add_key_value(key, value, *kinds)
    for tensor in reader.tensors:
        match = _FEED_FORWARD.fullmatch(tensor.name)
        if match is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        data = tensor.data / np.float32(1 if match["rows"] else factor)
        stored_as = tensor.tensor_type if kind is None or match["rows"] == "bias" else kind
        if stored_as != tensor.tensor_type:
            data = gguf.quantize(data, stored_as)
        if match["rows"]:
            data = np.repeat(data, factor, axis=-2 if match["rows"] == "weight" else -1)
        else:
            data = np.tile(data, factor)  # along the rows; of quantised types in whole blocks
        writer.add_tensor(tensor.name, data, raw_dtype=stored_as)
    _finish(writer)
    return target


def _size(tensor: gguf.ReaderTensor, kind: gguf.GGMLQuantizationType | None) -> int:
    assert tensor.data.dtype == np.float32
    block, size = gguf.GGML_QUANT_SIZES[kind or tensor.tensor_type]
    return int(tensor.n_elements) * size // block


def _metadata(reader: gguf.GGUFReader) -> Iterator[tuple[str, object, object, object]]:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            yield key, field.contents(), kind, field.types[1] if kind == gguf.GGUFValueType.ARRAY else None


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split_in_three(source: Path, folder: Path) -> Path:
    """The model in three files of about the same size, named and marked as upstream does; returns the first.

    Their edges are not those of the shards.
    """
    reader = gguf.GGUFReader(source)
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    groups: list[list[gguf.ReaderTensor]] = [[], [], []]
    seen = 0
    for tensor in reader.tensors:
        groups[min(2, 3 * seen // total)].append(tensor)
        seen += int(tensor.n_bytes)
    paths = [folder / f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, (path, tensors) in enumerate(zip(paths, groups, strict=True)):
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        if number == 0:
            for entry in _metadata(reader):
                writer.add_key_value(*entry)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(paths))
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _finish(writer)
    return paths[0]


@pytest.fixture(scope="module", params=KINDS)
def large(
    request: pytest.FixtureRequest, unpatched_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Large]:
    """A model of each kind; the file is removed when its tests are done."""
    folder = tmp_path_factory.mktemp("large")
    architecture, experts = KINDS[request.param]
    small = make_model((architecture, experts), folder / "small.gguf", build=unpatched_build)
    found = Large(widened(small.path, folder / "model.gguf"), small.n_layer, small.n_vocab)
    yield found
    found.path.unlink()


@dataclass(frozen=True)
class Memory:
    """Bytes of one process: all that is resident, of it pages of the model's files, and what is locked."""

    resident: int
    of_files: int
    locked: int


def memory_of(pid: int, folder: Path) -> Memory:
    resident = of_files = locked = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)", line):
            ours = match[1].startswith(f"{folder}/")
        elif match := re.match(r"(Rss|Locked): +(\d+) kB", line):
            size = int(match[2]) * 1024
            if match[1] == "Rss":
                resident += size
                of_files += size if ours else 0
            else:
                locked += size
    return Memory(resident, of_files, locked)


def measure(build: NativeBuild, model: Large, settings: Settings, *extra: str) -> list[tuple[Description, Memory]]:
    """Load three shards, run batches through them so that every weight is used, and look at each process."""
    workers = []
    try:
        for layers in model.plan:
            workers.append(LocalWorker(build.worker, model.path, layers, settings, extra))
        pipeline = Pipeline([worker.ready() for worker in workers])
        talk = Conversation(3, model.n_vocab)
        for _ in range(4):
            pipeline.decode(talk.batch([0] * settings.batch))
        folder = model.path.resolve().parent
        return [(shard, memory_of(worker.pid, folder)) for shard, worker in zip(pipeline.shards, workers, strict=True)]
    finally:
        close_workers(workers)


def check_shares(found: list[tuple[Description, Memory]], total: int) -> None:
    """The shards share the model, and what is resident of each is its share and what any worker needs."""
    assert LEAST_BYTES <= total <= sum(shard.weight_bytes for shard, _ in found) <= 1.02 * total
    for shard, memory in found:
        assert shard.kv_bytes is not None
        assert shard.weight_bytes > 0.1 * total
        share = shard.weight_bytes + shard.kv_bytes
        told = (shard.layer_range, memory, shard.weight_bytes, shard.kv_bytes)
        print(*told, f"beside: {(memory.resident - share) / (1 << 20):.1f} MiB")
        assert (1 - ALLOWED) * share <= memory.resident <= (1 + ALLOWED) * share + FIXED_BYTES, told


def total_bytes(model: Large) -> int:
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(model.path).tensors)


def test_mapped(patched_build: NativeBuild, large: Large) -> None:
    """The default. The pages of the file that are resident are the range's."""
    found = measure(patched_build, large, SETTINGS)
    check_shares(found, total_bytes(large))
    for shard, memory in found:
        assert abs(memory.of_files - shard.weight_bytes) <= ALLOWED * shard.weight_bytes, (shard.layer_range, memory)
        assert memory.locked == 0


def test_read(patched_build: NativeBuild, large: Large) -> None:
    """Without mmap: nothing of the file is mapped."""
    found = measure(patched_build, large, replace(SETTINGS, mmap=False))
    check_shares(found, total_bytes(large))
    assert [memory.of_files for _, memory in found] == [0, 0, 0]


def may_lock(size: int) -> bool:
    """Whether this process, and so one that it starts, may lock so much memory."""
    library = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, size) as area:
        handle = ctypes.c_char.from_buffer(area)
        status = library.mlock(ctypes.c_void_p(ctypes.addressof(handle)), ctypes.c_size_t(size))
        del handle
    return bool(status == 0)


def test_locked(patched_build: NativeBuild, large: Large) -> None:
    """What is locked is the range's weights, not the file from its start."""
    total = total_bytes(large)
    if not may_lock(total // 2):
        pytest.skip("this process may not lock so much memory (ulimit -l)")
    found = measure(patched_build, large, SETTINGS, "--mlock")
    check_shares(found, total)
    for shard, memory in found:
        assert abs(memory.locked - shard.weight_bytes) <= ALLOWED * shard.weight_bytes, (shard.layer_range, memory)


def test_several_files(patched_build: NativeBuild, large: Large, tmp_path: Path) -> None:
    first = split_in_three(large.path, tmp_path)
    try:
        model = Large(first, large.n_layer, large.n_vocab)
        found = measure(patched_build, model, SETTINGS)
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
    check_shares(found, total_bytes(large))
    for shard, memory in found:
        assert abs(memory.of_files - shard.weight_bytes) <= ALLOWED * shard.weight_bytes, (shard.layer_range, memory)


def test_kv_is_shared_out(patched_build: NativeBuild, large: Large) -> None:
    """The shards' KV (or states) together are the unsplit model's; and a single layer's are its own."""

    def kv_bytes(ranges: list[tuple[int, int]]) -> list[int]:
        found = []
        for layers in ranges:
            with LocalWorker(patched_build.worker, large.path, layers, SETTINGS) as worker:
                size = worker.describe().kv_bytes
                assert size is not None
                found.append(size)
        return found

    single = kv_bytes([(layer, layer + 1) for layer in range(large.n_layer)])
    assert kv_bytes(large.plan) == [sum(single[start:end]) for start, end in large.plan]
    assert kv_bytes([(0, large.n_layer)]) == [sum(single)]


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_repacked(patched_build: NativeBuild, tmp_path: Path, mapped: bool) -> None:
    """q4_0 is copied into another layout where the processor has one: the pages it came from must not stay."""
    shape = tiny_models.Shape(n_layer=6, n_head=8)  # 256 wide: rows of whole blocks
    small = tiny_models.write(tmp_path / "small.gguf", shape=shape)
    path = widened(small, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    try:
        model = Large(path, shape.n_layer, tiny_models.N_VOCAB)
        total = total_bytes(model)
        found = measure(patched_build, model, replace(SETTINGS, mmap=mapped))
    finally:
        path.unlink()
    check_shares(found, total)
