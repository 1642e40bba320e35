"""Tiny llama files with random weights, for tests: made in milliseconds, the same for the same seed.

The weights are scaled so that every layer matters: attention and feed-forward each add to the residual
stream about as much as it holds, scores vary over positions, and no two layers are alike. What replaces
a layer by identity changes nearly every logit.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..writing import default_mode

Array = npt.NDArray[np.float32]

N_CTX = 2048
N_VOCAB = 320
EOS = 2


@dataclass(frozen=True)
class Shape:
    """Hyper-parameters of one variant. ``n_expert`` 0 means a dense feed-forward."""

    n_layer: int = 6
    n_head: int = 4
    n_head_kv: int = 4
    head_size: int = 32
    n_ff: int = 192
    tied: bool = True
    quantised: bool = False
    n_expert: int = 0
    n_expert_used: int = 0
    rope_freqs: bool = False

    @property
    def n_embd(self) -> int:
        return self.n_head * self.head_size


#: The variants by name. Between them: tied and untied embeddings, grouped-query attention, f32 and q8_0,
#: head sizes 32 and 64, a mixture of experts, and rope factors that all layers share.
VARIANTS: dict[str, Shape] = {
    "tied": Shape(n_layer=7),
    "untied": Shape(n_head=2, n_head_kv=2, head_size=64, tied=False, rope_freqs=True),
    "gqa": Shape(n_layer=8, n_head=4, n_head_kv=2),
    "q8_0": Shape(n_head=4, n_head_kv=1, n_ff=256, quantised=True),
    "moe": Shape(n_head_kv=2, n_ff=96, tied=False, n_expert=4, n_expert_used=2),
}


def write(
    path: Path | str,
    variant: str = "tied",
    *,
    seed: int = 0,
    identity: int | None = None,
    shape: Shape | None = None,
) -> Path:
    """Write one variant to ``path`` (through a temporary file beside it) and return the path.

    ``identity`` names a layer whose two output projections are zero, so that it adds nothing to the
    residual stream. ``shape`` replaces the variant's own. Raises KeyError for an unknown variant.
    """
    import gguf

    shape, path = shape or VARIANTS[variant], Path(path)
    # A name's own hash differs from run to run.
    random = np.random.default_rng([seed, *variant.encode()])
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        writer = gguf.GGUFWriter(partial, "llama")
        write_metadata(writer, shape, f"tiny {variant}")
        for name, array in _tensors(shape, random, identity):
            if shape.quantised and array.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        # mkstemp makes it private; a model is as readable as any other new file.
        os.chmod(partial, default_mode())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


def write_all(folder: Path) -> dict[str, Path]:
    """Write every variant into ``folder``; paths by name."""
    return {name: write(folder / f"tiny-{name}.gguf", name) for name in VARIANTS}


def _tensors(shape: Shape, random: np.random.Generator, identity: int | None) -> list[tuple[str, Array]]:
    def matrix(*dims: int, gain: float = 1.0) -> Array:
        """Rows of unit-variance input give outputs of variance gain squared."""
        scaled: Array = random.standard_normal(dims, np.float32) * np.float32(gain / dims[-1] ** 0.5)
        return scaled

    def norm() -> Array:
        scaled: Array = 1 + np.float32(0.2) * random.standard_normal(shape.n_embd, np.float32)
        return scaled

    width, ff, kv = shape.n_embd, shape.n_ff, shape.n_head_kv * shape.head_size
    experts = (shape.n_expert,) if shape.n_expert else ()
    suffix = "_exps" if experts else ""
    tensors = [("token_embd.weight", random.standard_normal((N_VOCAB, width), np.float32))]
    if shape.rope_freqs:
        factors = np.linspace(1, 4, shape.head_size // 2, dtype=np.float32)
        tensors.append(("rope_freqs.weight", factors))
    for layer in range(shape.n_layer):
        # Random all the same, so that the layers after it stay what they are.
        keep = np.float32(0 if layer == identity else 1)
        block = f"blk.{layer}."
        tensors += [
            (block + "attn_norm.weight", norm()),
            (block + "attn_q.weight", matrix(width, width, gain=1.5)),
            (block + "attn_k.weight", matrix(kv, width, gain=1.5)),
            (block + "attn_v.weight", matrix(kv, width, gain=1.5)),
            (block + "attn_output.weight", keep * matrix(width, width, gain=1.5)),
            (block + "ffn_norm.weight", norm()),
        ]
        if experts:
            tensors.append((block + "ffn_gate_inp.weight", matrix(shape.n_expert, width)))
        tensors += [
            (block + f"ffn_gate{suffix}.weight", matrix(*experts, ff, width, gain=1.5)),
            (block + f"ffn_up{suffix}.weight", matrix(*experts, ff, width, gain=1.5)),
            (block + f"ffn_down{suffix}.weight", keep * matrix(*experts, width, ff)),
        ]
    tensors.append(("output_norm.weight", norm()))
    if not shape.tied:
        tensors.append(("output.weight", matrix(N_VOCAB, width, gain=3)))
    return tensors


def write_metadata(writer: Any, shape: Shape, name: str) -> None:
    """What a llama file of this shape says of itself, to a ``gguf.GGUFWriter``: hyper-parameters and a vocabulary."""
    writer.add_name(name)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(N_VOCAB)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
    _write_vocabulary(writer)


def _write_vocabulary(writer: Any) -> None:
    """A sentencepiece vocabulary: three special tokens, every byte, and words of one letter and more."""
    normal, unknown, control, byte = 1, 2, 3, 6
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["\u2581", *letters, *("\u2581" + letter for letter in letters)]
    rows: list[tuple[str, int, float]] = [("<unk>", unknown, 0.0), ("<s>", control, 0.0), ("</s>", control, 0.0)]
    rows += [(f"<0x{value:02X}>", byte, 0.0) for value in range(256)]
    rows += [(word, normal, -float(rank)) for rank, word in enumerate(words)]
    rows += [(f"\u2581word{number}", normal, -1000.0 - number) for number in range(N_VOCAB - len(rows))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in rows])
    writer.add_token_scores([score for _, _, score in rows])
    writer.add_token_types([kind for _, kind, _ in rows])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
