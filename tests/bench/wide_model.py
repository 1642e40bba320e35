"""A llama file of about 1 GB whose weights nobody trained, for what a hop costs beside the computing of a large model.

Its layers have the shapes of an 8B model's (4096 wide, 32 heads, 8 of them with keys and values, 14336 in the
feed-forward), so that a token's residual stream is 16 KB. The matrices are Q4_1, as in the demo model: the bits of the
blocks are drawn, and their scales are such that what a layer adds is about as large as what it is given.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from boundary_bundle.native import cache_dir
from boundary_bundle.native.paths import prepare_cache
from boundary_bundle.native.process import Lock
from boundary_bundle.native.progress import Reporter
from boundary_bundle.shards.tiny_models import N_VOCAB, Shape, write_metadata

SHAPE: Final = Shape(n_layer=8, n_head=32, n_head_kv=8, head_size=128, n_ff=14336)
#: Values and bytes of a block of Q4_1: scale and minimum in f16, then four bits a value.
_VALUES, _BYTES = 32, 20
#: Raise it when the same shape is written otherwise.
_VERSION = 1


def ensure_wide_model(cache: Path | None = None, reporter: Reporter | None = None) -> Path:
    """The path of the file in the cache folder, written if it is not there. Raises NativeError and OSError."""
    root = prepare_cache(cache_dir() if cache is None else cache)
    path = root / "models" / f"wide-{_VERSION}" / "wide-8-layers.Q4_1.gguf"
    reporter = reporter or Reporter()
    if path.is_file():
        return path
    with Lock(root / "locks" / "wide-model.lock").held("writing the wide model", reporter.note):
        if path.is_file():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(".partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        # Aside and renamed, so that it is there whole or not at all.
        aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=path.parent))
        try:
            with reporter.step("writing a model of 1 GB with random weights"):
                os.replace(write(aside / path.name), path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return path


def write(path: Path, shape: Shape = SHAPE, *, seed: int = 0) -> Path:
    """Write a file of dense layers to ``path``, one tensor at a time, and return the path."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(path, "llama")
    try:
        write_metadata(writer, shape, "wide")
        for name, dims in _shapes(shape):
            if len(dims) == 1:
                writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * dims[0])
            else:
                row = dims[1] // _VALUES * _BYTES
                writer.add_tensor_info(name, (dims[0], row), np.dtype(np.uint8), dims[0] * row, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        random = np.random.default_rng(seed)
        for _, dims in _shapes(shape):
            writer.write_tensor_data(np.ones(dims, np.float32) if len(dims) == 1 else _blocks(random, *dims))
    finally:
        writer.close()
    return path


def _shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, kv = shape.n_embd, shape.n_head_kv * shape.head_size
    yield "token_embd.weight", (N_VOCAB, width)
    for layer in range(shape.n_layer):
        for name, dims in (
            ("attn_norm", (width,)),
            ("attn_q", (width, width)),
            ("attn_k", (kv, width)),
            ("attn_v", (kv, width)),
            ("attn_output", (width, width)),
            ("ffn_norm", (width,)),
            ("ffn_gate", (shape.n_ff, width)),
            ("ffn_up", (shape.n_ff, width)),
            ("ffn_down", (width, shape.n_ff)),
        ):
            yield f"blk.{layer}.{name}.weight", dims
    yield "output_norm.weight", (width,)


def _blocks(random: np.random.Generator, rows: int, columns: int) -> Any:
    """u8 [rows, bytes]: values of mean 0 and variance 1 / ``columns``, about."""
    count = rows * columns // _VALUES
    blocks = np.frombuffer(bytearray(random.bytes(count * _BYTES)), np.uint8).reshape(count, _BYTES)
    # Whole numbers 0 to 15 alike have a variance of 255 / 12; no two rows are scaled alike.
    scale = (random.uniform(0.7, 1.3, count) * (12 / 255 / columns) ** 0.5).astype(np.float16)
    blocks[:, 0:2] = scale.view(np.uint8).reshape(count, 2)
    blocks[:, 2:4] = (np.float16(-7.5) * scale).view(np.uint8).reshape(count, 2)
    return blocks.reshape(rows, columns // _VALUES * _BYTES)
