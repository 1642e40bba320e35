"""Tiny GGUF files of every architecture that llama.cpp knows, with random weights, the same for the same seed.

The program tiny_models (native_shim/tiny_models.cpp) writes them through the unpatched library: at least six
layers and two periods of every pattern of layers, head sizes of 32 and 64, weights scaled so that every layer
matters. The files have no vocabulary: token ids are all that goes in.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..native.build import TINY_MODELS, NativeBuild
from ..native.build import build as native_build
from ..native.download import sha256_file
from ..writing import default_mode

Experts = Literal["dense", "moe"]
Gives = Literal["logits", "embeddings"]

#: A model is made in well under a second; a program that hangs is a fault.
_TIMEOUT = 120.0


class ModelError(Exception):
    """The library does not build or run a variant; one sentence with what it said."""


class Variant(NamedTuple):
    """One architecture, without experts ("dense") or with them ("moe")."""

    architecture: str
    experts: Experts

    def __str__(self) -> str:
        return f"{self.architecture}-{self.experts}"


@dataclass(frozen=True)
class Layer:
    """One layer as the loaded model has it: with a recurrent state, with a sliding window, with a KV cache of its own
    (False: it reuses an earlier layer's), and its own numbers of heads and width of the feed-forward (0: none).
    """

    recurrent: bool
    window: bool
    kv: bool
    n_head: int
    n_head_kv: int
    n_ff: int


@dataclass(frozen=True)
class Model:
    """A written file and what the unpatched library, having loaded it, says of it.

    ``gives`` is what an output row holds. ``memory`` is the library's kind: none, kv, iswa, recurrent, hybrid,
    hybrid_iswa, dsa or dsv4; ``remembers`` says whether a decode step really depends on it (the library makes a cache
    for some that do not use it). What does not remember takes a prompt as one micro-batch and has no decode steps.
    ``attention`` says whether a token sees the ones after it. With ``encoder`` the prompt goes through llama_encode,
    and through llama_decode after it if there is a ``decoder`` too. ``n_embd_inp`` is the width of a row of vectors
    that goes in. ``n_layer_kv_from_start`` is -1 or the number of first layers that have KV caches of their own.
    ``n_pos_per_token`` is the number of positions that a token has.
    """

    variant: Variant
    seed: int
    path: Path
    sha256: str
    size: int
    gives: Gives
    memory: str
    remembers: bool
    encoder: bool
    decoder: bool
    attention: Literal["causal", "full"]
    n_layer: int
    n_embd: int
    n_embd_inp: int
    n_vocab: int
    head_size_k: int
    head_size_v: int
    n_expert: int
    n_layer_kv_from_start: int
    n_pos_per_token: int
    layers: tuple[Layer, ...]


def program(build: NativeBuild | None = None) -> Path:
    """The program that writes the models; of the unpatched build in the cache, which is made if it is not there."""
    return (build or native_build("unpatched")).programs[TINY_MODELS]


def variants(build: NativeBuild | None = None) -> list[Variant]:
    """What can be made, in the library's order of architectures."""
    return [Variant(row["architecture"], row["experts"]) for row in _run(build, "--list")["variants"]]


def refused(build: NativeBuild | None = None) -> dict[str, str]:
    """The architectures that the library names and of which no model can be made, each with the reason."""
    return {row["architecture"]: row["reason"] for row in _run(build, "--list")["refused"]}


def make_model(
    variant: tuple[str, str],
    path: Path | str,
    *,
    seed: int = 0,
    without: Sequence[str] = (),
    draft_layers: int = 0,
    build: NativeBuild | None = None,
) -> Model:
    """Write ``variant`` to ``path`` (through a temporary file beside it), load it, and describe it.

    The bytes depend on these arguments alone: the variant, the seed (0 to 2**64 - 1), ``without``, which are names of
    tensors to leave out, such as output.weight for a head that is tied to the token table, and the number of draft
    layers after the model's own, which few architectures have (cohere2moe, hy_v3, qwen35, qwen35moe, step35).
    Raises ModelError if the library does not build, load or run it.
    """
    architecture, experts = variant
    reason = refused(build).get(architecture)
    if reason is not None:
        raise ModelError(f"there is no model of {architecture}: {reason}")
    path = Path(path)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        found = _run(build, "--make", architecture, experts, partial, str(seed), str(draft_layers), *without)
        digest, size = sha256_file(Path(partial)), os.stat(partial).st_size
        os.chmod(partial, default_mode())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    found.pop("architecture")
    layers = tuple(Layer(**layer) for layer in found.pop("layers"))
    made = Variant(architecture, "moe" if experts == "moe" else "dense")
    return Model(made, seed, path, digest, size, layers=layers, **found)


@dataclass(frozen=True)
class Check:
    """What a file gives in the unsplit, unpatched library: a prompt of 64 tokens and, if it remembers, 8 single ones.

    ``distinct_maxima`` counts the columns that are the largest of some row. A fraction is the share of values with
    other bits, a size the root mean square of the change over that of the values: for ``identity``, the least over
    all layers of what a layer without its output projections changes in the prompt's values; for ``context``, what
    another token further back than a window changes in the last row. Values that the model itself masks are left out.
    """

    finite: bool
    root_mean_square: float
    distinct_maxima: int
    rows: int
    columns: int
    context_fraction: float
    context_size: float
    identity_fraction: float
    identity_size: float

    @property
    def sound(self) -> bool:
        """Whether an error in any layer, cache or state shows: the file is good for a test."""
        return (
            self.finite
            and self.distinct_maxima >= 8
            and min(self.context_fraction, self.identity_fraction) > 0.99
            and min(self.context_size, self.identity_size) > 1e-3
        )


def check_model(path: Path | str, *, build: NativeBuild | None = None) -> Check:
    """Run the file, and again without each layer. Raises ModelError if it does not load or run."""
    found = _run(build, "--check", str(path))["check"]
    return Check(**{name: found[name] for name in Check.__dataclass_fields__})


def idle_tensors(path: Path | str, *, build: NativeBuild | None = None) -> list[str]:
    """The tensors on which nothing of a run depends. Raises ModelError if the file does not load or run."""
    names: list[str] = _run(build, "--idle", str(path))["idle"]
    return names


def _run(build: NativeBuild | None, *arguments: str) -> dict[str, Any]:
    """One command in a process of its own: the library ends the process where its assertions fail."""
    # The library would call a debugger for a stack trace.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    command = [str(program(build)), *arguments]
    what = " ".join(arguments[:3]) if arguments[0] == "--make" else " ".join(arguments)
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{what}: no answer within {_TIMEOUT:.0f} s") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise ModelError(f"{what}: the program ended with status {done.returncode}: {said}") from None
    if "error" in found:
        raise ModelError(f"{what}: {found['error']}")
    return found
