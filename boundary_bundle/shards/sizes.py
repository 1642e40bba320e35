"""What each layer of a model costs a worker, from the tensor table and metadata of its file: nothing is loaded.

Weights follow the library's rules of ownership (patches/0001), KV caches and recurrent states those by which it makes
them (llama-model.cpp, create_memory): as many bytes as a worker's ``describe`` says. Where the metadata does not hold
what the library goes by, there are no KV bytes, and the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .plan import LAYER, ModelFile, PlanError, Tensor
from .worker import Settings

#: Tensors outside of layers that feed the first one. All others outside of layers come after the last one, except
#: those that every layer uses.
_INPUT = re.compile(
    r"(token_embd|token_embd_norm|token_types|position_embd"
    r"|per_layer_token_embd|per_layer_model_proj|per_layer_proj_norm|altup_proj)\."
)
_SHARED = re.compile(r"rope_(freqs|factors_long|factors_short)\.")
#: Tables of which a token reads one row.
_LOOKUP = re.compile(r"(token_embd|token_types|position_embd|per_layer_token_embd)\.weight")
#: Tensors of all experts together, of which a token reads those that it uses.
_EXPERTS = re.compile(r"_(ch)?exps\.")

#: Architectures by what they remember. Those with a short convolution call their final norm token_embd_norm.
_SHORT_CONVOLUTION: Final = ("lfm2", "lfm2moe")
_LINEAR_ATTENTION: Final = ("qwen3next", "qwen35", "qwen35moe")
_RWKV: Final = ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
_NEMOTRON_H: Final = ("nemotron_h", "nemotron_h_moe")
#: Those whose state space has no groups, whatever the file says.
_UNGROUPED: Final = ("mamba", "jamba")
#: Those whose layers of draft heads have no cache.
_DRAFT_WITHOUT_CACHE: Final = ("qwen35", "qwen35moe", "step35", "hy_v3")

#: Bytes and elements of a block of each type that a cache may have.
_TYPES: Final = {"f16": (2, 1), "f32": (4, 1), "q8_0": (34, 32)}
#: The library rounds contexts up to this many cells, and buffers to this many bytes.
_CELLS: Final = 256
_ALIGNMENT: Final = 32

#: Architectures whose layers with a sliding window follow a period: its length, if the file gives none, and whether
#: the layer without a window is the first of a period and not the last.
_PERIODS: Final[dict[str, tuple[int, bool]]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "llama4": (4, False),
    "mellum": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
#: Those whose files list the layers that have a window.
_LISTED: Final = ("cohere2moe", "gemma4", "mellum", "mimo2", "step35")
#: Windows that the library does not take from the file, and one for files that give none.
_FIXED_WINDOWS: Final = {"llama4": 8192, "smallthinker": 4096}
_DEFAULT_WINDOWS: Final = {"gemma2": 4096, "exaone4": 4096}
#: Those of which the library takes a window of 0, or none, to say that there are none.
_OPTIONAL_WINDOWS: Final = ("afmoe", "gemma3", "mellum", "olmo2", "plamo3", "smallthinker")
#: Embedding models that have a head all the same, and the token table in its place if it is not there.
_EMBEDDING_WITH_HEAD: Final = ("gemma-embedding", "llama-embed")
#: Those that ask for the table as a head first, and for the table itself in a place of its own.
_TABLE_TWICE: Final = ("gemma3n", "gemma4")
#: Those whose layers of draft heads are passed over; others load them with the last layer.
_DRAFT_SKIPPED: Final = (
    "bailingmoe2",
    "deepseek32",
    "exaone-moe",
    "exaone4",
    "glm-dsa",
    "glm4",
    "glm4moe",
    "mimo2",
)
#: The last two layers that have keys and values of their own serve all behind them.
_GEMMA3N_KV_LAYERS: Final = 20


class _Unknown(Exception):
    """The metadata does not say it; why, for the user."""


@dataclass(frozen=True)
class Family:
    """What an architecture's certificate says (spec/families): the library's kind of memory, and whether it gives
    logits, so that without a head of its own the token table is the head."""

    memory: str
    gives: str


@dataclass(frozen=True)
class Part:
    """Bytes of some layers or of what stands before or after them: weights as they are held, the weights that a
    decode step of one token reads, and KV cache with recurrent states."""

    weights: int = 0
    read: int = 0
    kv: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(self.weights + other.weights, self.read + other.read, self.kv + other.kv)


@dataclass(frozen=True)
class ModelSizes:
    """The parts of a model, by which shards are planned.

    ``first`` and ``last`` are what the shards of the first and of the last layer have besides, ``shared`` the bytes of
    what every one has with a layer of which ``shared_by`` is true (empty: with any). ``tied`` are the bytes of a token
    table that is the head too: ``first`` and ``last`` both count it, and a shard that is both holds it once. ``cuts``
    are the legal ones. ``kv_unknown`` says why the parts have no KV bytes, and is empty where they have.
    """

    layers: tuple[Part, ...]
    first: Part = Part()
    last: Part = Part()
    shared: int = 0
    shared_by: tuple[bool, ...] = ()
    tied: int = 0
    cuts: tuple[int, ...] = ()
    kv_unknown: str = ""

    def shard(self, start: int, end: int) -> Part:
        """The layers [start, end) with all that a shard of them holds."""
        shared = not self.shared_by or any(self.shared_by[start:end])
        total = sum(self.layers[start:end], Part(self.shared if shared else 0))
        if start == 0:
            total += self.first
        if end == len(self.layers):
            total += self.last
            if start == 0:
                total += Part(-self.tied)
        return total


def model_sizes(model: ModelFile, tensors: Iterable[Tensor], family: Family, settings: Settings) -> ModelSizes:
    """The sizes of a model's parts under the settings of its workers; ``tensors`` are all of the model's.

    Raises PlanError for a file of one range, and for one that lacks a layer or has too many.
    """
    keys = _Keys(model, family)
    n_layer = keys.n_layer
    held = list(tensors)
    if model.is_stripped:
        raise PlanError(f"{model.path} holds a range of a model: a plan is made of the file that it was stripped from")
    _check_layers(model, held, keys)
    layers = [Part() for _ in range(n_layer)]
    first = last = Part()
    shared = 0
    experts = keys.experts()
    for tensor in held:
        match = LAYER.match(tensor.name)
        part = Part(tensor.n_bytes, _read(tensor, experts))
        if match and int(match[1]) < n_layer:
            layers[int(match[1])] += part
        elif match:
            # Of a draft head, which takes no part in a decode step.
            last += Part(0 if keys.architecture in _DRAFT_SKIPPED else tensor.n_bytes)
        elif _SHARED.match(tensor.name):
            shared += tensor.n_bytes
        elif _INPUT.match(tensor.name) and not keys.is_final_norm(tensor.name):
            first += part
        else:
            last += part
    by_name = {tensor.name: tensor for tensor in held}
    head, table, held_once = by_name.get("output.weight"), by_name.get("token_embd.weight"), 0
    if head is None and table is not None and keys.has_head():
        last += Part(table.n_bytes, table.n_bytes)
        held_once = 0 if keys.architecture in _TABLE_TWICE else table.n_bytes
    elif table is None and head is not None:
        first += Part(head.n_bytes, head.n_bytes // head.shape[-1])
    reason = ""
    try:
        for place, size in enumerate(keys.kv(settings)):
            layers[min(place, n_layer - 1)] += Part(kv=size)
    except _Unknown as unknown:
        reason = str(unknown)
    return ModelSizes(tuple(layers), first, last, shared, keys.shared_by(), held_once, keys.legal_cuts(), reason)


def _check_layers(model: ModelFile, tensors: Sequence[Tensor], keys: _Keys) -> None:
    found = {int(match[1]) for tensor in tensors if (match := LAYER.match(tensor.name))}
    missing = next((layer for layer in range(keys.n_layer) if layer not in found), None)
    if missing is not None:
        raise PlanError(f"{model.path} has no tensors of layer {missing}, and its metadata declares {keys.n_layer}")
    if max(found) >= keys.n_layer_all:
        raise PlanError(f"{model.path} has tensors of layer {max(found)}, and its metadata declares {keys.n_layer_all}")


def _read(tensor: Tensor, experts: tuple[int, int]) -> int:
    if _LOOKUP.fullmatch(tensor.name) and len(tensor.shape) > 1:
        return tensor.n_bytes // tensor.shape[1]
    if _EXPERTS.search(tensor.name):
        used, count = experts
        return tensor.n_bytes * used // count
    return tensor.n_bytes


class _Keys:
    """The metadata as the library takes it, under the names of its hparams."""

    def __init__(self, model: ModelFile, family: Family) -> None:
        self._found: Mapping[str, Any] = model.metadata
        self.architecture = model.architecture
        self.family = family
        self.n_layer = model.n_layer
        self.n_layer_all = int(model.metadata.get("block_count", model.n_layer))

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._found.get(key, default)
        if not isinstance(value, int) or value < 0:
            raise _Unknown(f"the metadata has no usable {self.architecture}.{key}")
        return int(value)

    def _numbers(self, key: str, default: Sequence[int] | int | None = None) -> list[int]:
        """One number a layer, given one by one or once for all."""
        value = self._found.get(key, default)
        found = list(value) if isinstance(value, (list, tuple)) else [value] * self.n_layer_all
        if len(found) != self.n_layer_all or not all(isinstance(one, int) and one >= 0 for one in found):
            raise _Unknown(f"the metadata has no usable {self.architecture}.{key}")
        return [int(one) for one in found]

    def experts(self) -> tuple[int, int]:
        """How many experts a token uses, of how many."""
        used, count = self._found.get("expert_used_count"), self._found.get("expert_count")
        if not isinstance(used, int) or not isinstance(count, int) or not 0 < used <= count:
            return 1, 1
        return used, count

    def has_head(self) -> bool:
        return self.family.gives == "logits" or self.architecture in _EMBEDDING_WITH_HEAD

    def is_final_norm(self, name: str) -> bool:
        return self.architecture in _SHORT_CONVOLUTION and name.startswith("token_embd_norm.")

    def shared_by(self) -> tuple[bool, ...]:
        """The layers that use the factors of positions; none: all of them."""
        try:
            windows = self._windows() if self.architecture == "gemma4" else None
        except _Unknown:
            windows = None
        return tuple(not swa for swa in windows[: self.n_layer]) if windows else ()

    # -- keys and values

    def kv_layers(self) -> int:
        """The first layers that have keys and values of their own; those behind them use theirs."""
        if self.architecture == "gemma3n":
            return min(_GEMMA3N_KV_LAYERS, self.n_layer_all)
        if self.architecture == "gemma4":
            return max(0, self.n_layer_all - self._number("attention.shared_kv_layers", 0))
        return self.n_layer_all

    def legal_cuts(self) -> tuple[int, ...]:
        try:
            last = self.kv_layers()
        except _Unknown:
            last = 0
        return tuple(range(1, self.n_layer if last >= self.n_layer else last - 1))

    def _windows(self) -> list[bool] | None:
        """Which layers have a sliding window; None where no layer has a cache of its own kind for it."""
        name = self.architecture
        pattern = self._found.get("attention.sliding_window_pattern")
        window = self._found.get("attention.sliding_window")
        if name in _OPTIONAL_WINDOWS and not window:
            return None
        if (name == "exaone4" and self.n_layer_all != 64) or (name == "llama4" and window == 0):
            return None
        if name == "lfm2":
            return [count > 0 for count in self._numbers("attention.head_count_kv")] if window else None
        if name in _LISTED and isinstance(pattern, list):
            return [bool(one) for one in self._numbers("attention.sliding_window_pattern")]
        if name in _PERIODS:
            period, dense_first = _PERIODS[name]
            period = self._number("attention.sliding_window_pattern", period) if isinstance(pattern, int) else period
            place = 0 if dense_first else period - 1
            return [
                layer < self.n_layer and (period == 0 or layer % period != place) for layer in range(self.n_layer_all)
            ]
        if self.family.memory in ("iswa", "hybrid_iswa"):
            raise _Unknown("which layers have a sliding window does not stand in the metadata")
        return None

    def _window(self) -> int:
        if self.architecture in _FIXED_WINDOWS:
            return _FIXED_WINDOWS[self.architecture]
        return self._number("attention.sliding_window", _DEFAULT_WINDOWS.get(self.architecture))

    def _recurrent(self) -> list[bool]:
        """Which layers have a recurrent state."""
        if self.family.memory == "recurrent" or self.architecture == "falcon-h1":
            return [True] * self.n_layer_all
        if not self.family.memory.startswith("hybrid"):
            return [False] * self.n_layer_all
        if self.architecture in _LINEAR_ATTENTION:
            if "attention.recurrent_layers" in self._found:
                return [bool(one) for one in self._numbers("attention.recurrent_layers")]
            interval = self._number("full_attention_interval", 4)
            if interval == 0:
                raise _Unknown(f"{self.architecture}.full_attention_interval is 0")
            return [layer < self.n_layer and (layer + 1) % interval != 0 for layer in range(self.n_layer_all)]
        heads = self._numbers("attention.head_count_kv")
        if self.architecture in _NEMOTRON_H:
            widths = self._numbers("feed_forward_length", 0)
            return [count == 0 and width == 0 for count, width in zip(heads, widths, strict=True)]
        return [count == 0 for count in heads]

    def _attention(self, recurrent: Sequence[bool]) -> list[bool]:
        """Which layers have a cache of keys and values."""
        if self.family.memory == "recurrent":
            return [False] * self.n_layer_all
        own = [layer < self.kv_layers() for layer in range(self.n_layer_all)]
        if self.architecture in _NEMOTRON_H:
            widths = self._numbers("feed_forward_length", 0)
            return [not state and width == 0 for state, width in zip(recurrent, widths, strict=True)]
        if self.architecture in _DRAFT_WITHOUT_CACHE:
            own = [one and layer < self.n_layer for layer, one in enumerate(own)]
        if self.architecture == "falcon-h1":
            return own
        return [one and not state for one, state in zip(own, recurrent, strict=True)]

    def kv(self, settings: Settings) -> list[int]:
        """Bytes of keys, values and states of each layer, draft heads' included. Raises _Unknown."""
        none = [0] * self.n_layer_all
        if self.family.memory == "none":
            return none
        recurrent = self._recurrent()
        attention = self._attention(recurrent)
        rows = self._rows(settings) if any(attention) else none
        states = [self._conv(), self._state()] if any(recurrent) else []
        state = sum(_padded(4 * count * settings.seqs, _ALIGNMENT) for count in states)
        return [
            (row if has_rows else 0) + (state if has_state else 0)
            for row, has_rows, has_state in zip(rows, attention, recurrent, strict=True)
        ]

    def _rows(self, settings: Settings) -> list[int]:
        """Bytes of keys and values of each layer, were it to have some."""
        heads = self._numbers("attention.head_count", 0)
        heads_kv = self._numbers("attention.head_count_kv", heads)
        default = self._number("embedding_length") // heads[0] if heads[0] else 0
        has_sizes = bool(heads[0]) or self.architecture == "plamo2"
        size_k = self._number("attention.key_length", default) if has_sizes else 0
        size_v = self._number("attention.value_length", default) if has_sizes else 0
        size_k_swa = self._number("attention.key_length_swa", size_k)
        size_v_swa = self._number("attention.value_length_swa", size_v)
        full, windowed = _cells(settings), _cells(settings)
        windows: list[bool] | None = None
        if not settings.swa_full or (size_k, size_v) != (size_k_swa, size_v_swa):
            windows = self._windows()
        if windows is not None and not settings.swa_full:
            windowed = _window_cells(settings, self._window())
        windows = windows or [False] * self.n_layer_all
        keys = [count * (size_k_swa if swa else size_k) for count, swa in zip(heads_kv, windows, strict=True)]
        values = [count * (size_v_swa if swa else size_v) for count, swa in zip(heads_kv, windows, strict=True)]
        if not settings.flash_attn or self.architecture == "grok":
            # Then values lie across, in rows of one width for all layers.
            if settings.type_v == "q8_0":
                raise _Unknown("a worker refuses values of q8_0 without flash attention, which this family may lack")
            values = [max(values)] * self.n_layer_all
        for kind, size in ((settings.type_k, size_k), (settings.type_v, size_v)):
            if size % _TYPES[kind][1]:
                raise _Unknown(f"a worker refuses {kind}, whose blocks of 32 values do not divide the head size {size}")
        # Compressed attention keeps no values. An index beside it (dsa) has keys alone.
        latent = bool(self._number("attention.key_length_mla", 0) and self._number("attention.value_length_mla", 0))
        found = []
        for key, value, swa in zip(keys, values, windows, strict=True):
            cells = windowed if swa else full
            size = _bytes(settings.type_k, key) + (0 if latent else _bytes(settings.type_v, value))
            if self.family.memory == "dsa":
                size += _bytes(settings.type_k, self._number("attention.indexer.key_length"))
            found.append(size * cells)
        return found

    # -- recurrent states, in values of 4 bytes for each sequence

    def _conv(self) -> int:
        """What the convolution, or the shift by a token, remembers."""
        if self.architecture in _RWKV:
            return self._number("token_shift_count", 2) * self._number("embedding_length")
        if self.architecture in _SHORT_CONVOLUTION:
            return self._number("embedding_length") * max(0, self._number("shortconv.l_cache") - 1)
        kernel = self._number("ssm.conv_kernel")
        if self.architecture == "kimi-linear":
            width = self._numbers("attention.head_count")[0] * self._number("kda.head_dim")
            return 3 * (kernel - 1 if kernel else 3) * width
        groups = 0 if self.architecture in _UNGROUPED else self._number("ssm.group_count")
        return max(0, kernel - 1) * (self._number("ssm.inner_size") + 2 * groups * self._number("ssm.state_size"))

    def _state(self) -> int:
        if self.architecture in _RWKV:
            return self._number("embedding_length") * self._number("wkv.head_size")
        if self.architecture in _SHORT_CONVOLUTION:
            return 0
        if self.architecture == "kimi-linear":
            return self._number("kda.head_dim") ** 2 * self._numbers("attention.head_count")[0]
        return self._number("ssm.state_size") * self._number("ssm.inner_size")


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _cells(settings: Settings) -> int:
    """Cells of a layer's cache: a context is rounded up, and so is each sequence's part of one that is not unified."""
    cells = _padded(settings.ctx, _CELLS)
    return cells if settings.kv_unified else _padded(cells // settings.seqs, _CELLS) * settings.seqs


def _window_cells(settings: Settings, window: int) -> int:
    """Cells of a layer with a sliding window that keeps no more than a next micro-batch can see."""
    streams = 1 if settings.kv_unified else settings.seqs
    each = _cells(settings) // streams
    micro = min(settings.ubatch, settings.batch, each * streams)
    return _padded(min(each, window * (settings.seqs if settings.kv_unified else 1) + micro), _CELLS) * streams


def _bytes(kind: str, count: int) -> int:
    size, block = _TYPES[kind]
    return -(-count // block) * size


__all__ = ["Family", "ModelSizes", "Part", "model_sizes"]
