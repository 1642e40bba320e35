"""Which layers each shard owns, and what a GGUF file says of itself.

Layers are counted from 0 over the whole model, everywhere; a range is [start, end).
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..writing import is_regular

if TYPE_CHECKING:
    import gguf

#: What begins the name of a tensor of a layer.
LAYER = re.compile(r"blk\.(\d{1,9})\.")
_NUMBER = re.compile(r"[0-9]+")
#: Entries of metadata, and tensors, of one file: a worker takes no more either (spec/worker-protocol.md), and reading
#: them one by one takes time.
MAX_ENTRIES = 10_000
#: What begins the names of the keys that hold a whole model's tensor table, in a file of one range.
TABLE = "boundary_bundle.tensors."
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NUMPY_SCALAR = re.compile(r"np\.[a-z0-9]+\((-?[0-9]+)\)")


class PlanError(ValueError):
    """The cuts or the model file cannot be used; the text is one sentence for the user."""


@dataclass(frozen=True)
class Plan:
    """Ranges [start, end) that cover layers 0 to n_layer - 1 once each, in order.

    Raises PlanError for ranges that do not.
    """

    n_layer: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        place = 0
        for start, end in self.ranges:
            if start != place or end <= start:
                raise PlanError(f"range [{start},{end}) does not continue at layer {place}")
            place = end
        if place != self.n_layer:
            raise PlanError(f"the ranges end at layer {place}, but the model has {self.n_layer} layers")

    @property
    def cuts(self) -> list[int]:
        """The layers at which the model is cut: the first layer of every shard but the first."""
        return [start for start, _ in self.ranges[1:]]

    def __len__(self) -> int:
        return len(self.ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.ranges)


def make_plan(n_layer: int, cuts: Sequence[int]) -> Plan:
    """Cut a model of ``n_layer`` layers before each layer of ``cuts``; no cut gives one shard.

    Raises PlanError when a cut is repeated, smaller than the one before it, or not 1 to n_layer - 1.
    """
    if n_layer < 1:
        raise PlanError(f"a model of {n_layer} layers cannot be planned")
    for before, cut in zip(cuts, cuts[1:], strict=False):
        if cut == before:
            raise PlanError(f"cut {cut} is given twice")
        if cut < before:
            raise PlanError(f"cuts must ascend, but {cut} follows {before}")
    for cut in cuts:
        if not 0 < cut < n_layer:
            legal = f"1 to {n_layer - 1}" if n_layer > 1 else "nowhere"
            raise PlanError(f"cut {cut} is out of range: a model of {n_layer} layers can be cut at {legal}")
    edges = [0, *cuts, n_layer]
    return Plan(n_layer, tuple(zip(edges, edges[1:], strict=False)))


def parse_cuts(text: str) -> list[int]:
    """Read ``10,20``. What the numbers mean is checked by :func:`make_plan`.

    Raises PlanError when there is nothing, an empty item, or one that is not a number.
    """
    if not text.strip():
        raise PlanError("the cuts are empty: give layer numbers such as 10,20")
    cuts = []
    for place, item in enumerate(text.split(","), start=1):
        word = item.strip()
        if not word:
            raise PlanError(f"cut number {place} of {text!r} is empty")
        if not _NUMBER.fullmatch(word) or len(word) > 9:
            shown = word if len(word) <= 24 else f"{word[:20]}... ({len(word)} characters)"
            raise PlanError(f"cut {shown!r} is not a layer number: a model of n layers can be cut at 1 to n-1")
        cuts.append(int(word))
    return cuts


@dataclass(frozen=True)
class Tensor:
    """An entry of a file's tensor table. ``type`` is the ggml type's name, ``shape`` has the innermost first."""

    name: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class ModelFile:
    """What the planner needs of a GGUF file. ``size`` is the file's, in bytes.

    ``metadata`` has the architecture's entries without its name in their keys: numbers, truth values, texts and arrays
    of up to 10,000 numbers. ``tensors`` are those of this file; :func:`model_tensors` has those of a model in several.
    ``is_stripped``: it was written for one range (:mod:`boundary_bundle.shards.strip`).
    """

    path: Path
    architecture: str
    n_layer: int
    size: int
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    is_stripped: bool = False


class _CutShort(Exception):
    def __init__(self, end: int) -> None:
        self.end = end


def _reader(path: Path) -> gguf.GGUFReader:
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        """Says where a short file ends, and walks over arrays (vocabularies) instead of taking them apart; short ones
        of numbers, which say something of layers, are kept whole."""

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise _CutShort(end)
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            kinds = gguf.GGUFValueType
            if raw_type != kinds.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            item, count, place = kinds(head[0][0]), int(head[1][0]), orig_offs + 12
            scalar = self.gguf_scalar_to_np.get(item)
            if scalar is not None and count <= MAX_ENTRIES:
                values = self._get(place, scalar, count)
                return place + values.nbytes - orig_offs, [*head, values], [len(head)], [kinds.ARRAY, item]
            if scalar is not None:
                place += count * np.dtype(scalar).itemsize
            elif item == kinds.STRING:
                length = struct.Struct(">Q" if self.endianess == gguf.GGUFEndian.BIG else "<Q")
                for _ in range(count):
                    if place + 8 > len(self._raw):
                        raise _CutShort(place + 8)
                    place += 8 + length.unpack_from(self._raw, place)[0]
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            if place > len(self._raw):
                raise _CutShort(place)
            return place - orig_offs, head, [], [kinds.ARRAY, item]

        @functools.cached_property
        def _raw(self) -> memoryview:
            view: Any = self.data
            return memoryview(view)

    with np.errstate(over="raise"):  # else a place beyond the end becomes one within, with a warning
        return Reader(path)


def model_files(path: Path) -> list[Path]:
    """``path``, or every file of a model in several of them (``NAME-00001-of-00003.gguf``) given the first.

    Raises PlanError when ``path`` is another than the first.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if int(match["number"]) != 1:
        raise PlanError(f"{path} is file {int(match['number'])} of {count} of a model: give the first")
    return [path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf") for number in range(1, count + 1)]


def read_model_file(path: Path | str) -> ModelFile:
    """Read architecture, layer count, sizes and tensor table with the gguf package; every tensor is there.

    Raises PlanError for a file that is missing, no GGUF, cut short or damaged. Whether ranges can be made of its
    architecture, and at which cuts, is said by the library when it is asked for one.
    """
    path = Path(path)
    reader, size = _open(path)
    if reader.get_field("general.architecture") is None:
        model_files(path)
    architecture = _value(reader, path, "general.architecture", str)
    n_layer = _value(reader, path, f"{architecture}.block_count", int)
    if not 1 <= n_layer <= MAX_ENTRIES:
        raise PlanError(f"{path} declares {n_layer} layers, and 1 to {MAX_ENTRIES} are possible")
    # Layers of a draft head stand behind the model's own, are counted with them and belong to no range.
    if reader.get_field(key := f"{architecture}.nextn_predict_layers") is not None:
        n_draft = _value(reader, path, key, int)
        if not 0 <= n_draft < n_layer:
            raise PlanError(f"{path} declares {n_draft} of its {n_layer} layers as those of a draft head")
        n_layer -= n_draft
    stripped = any(key.startswith(TABLE) for key in reader.fields)
    return ModelFile(path, architecture, n_layer, size, _metadata(reader, architecture), _tensors(reader), stripped)


def model_tensors(model: ModelFile) -> list[Tensor]:
    """The tensors of a model in one file or several, of which ``model`` is the first. Raises PlanError."""
    others = [path for path in model_files(model.path) if path != model.path]
    return [*model.tensors, *(tensor for path in others for tensor in _tensors(_open(path)[0]))]


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over names, types and shapes in the order of names, as 64 hexadecimal digits: the same for a model in
    one file and in several."""
    rows = sorted(f"{one.name} {one.type} {','.join(map(str, one.shape))}\n" for one in tensors)
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def _open(path: Path) -> tuple[gguf.GGUFReader, int]:
    """The reader of a file, and the file's size in bytes. Raises PlanError."""
    try:
        found = path.stat()
        size = found.st_size
        if path.is_dir():
            raise PlanError(f"{path} is a folder, not a GGUF file")
        if not is_regular(found):  # reading a pipe may wait for ever, a device may have no end
            raise PlanError(f"{path} is not a regular file")
        with open(path, "rb") as stream:
            head = stream.read(24)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise PlanError(f"cannot read {path}: {error}") from None
    if head[:4] != b"GGUF":
        if size < 4:
            raise PlanError(f"{path} is not a GGUF file: it holds {size} bytes")
        raise PlanError(f"{path} is not a GGUF file: it begins with {head[:4].hex(' ')}, not 47 47 55 46")
    _check_counts(path, size, head)
    try:
        reader = _reader(path)
    except ImportError as error:
        raise PlanError(f"the Python package {error.name!r} is missing: pip install 'boundary-bundle[run]'") from None
    except _CutShort as error:
        raise PlanError(
            f"{path} is cut short: it holds {size} bytes, but what it declares reaches to byte {error.end}"
        ) from None
    except Exception as error:  # the package raises whatever its parsing runs into
        detail = _NUMPY_SCALAR.sub(r"\1", " ".join(str(error).split())) or type(error).__name__
        raise PlanError(f"{path} ({size} bytes) is a damaged GGUF file: {detail[:200]}") from None
    for tensor in reader.tensors:
        if 0 in tensor.shape:  # the library divides by it
            raise PlanError(f"{path} is a damaged GGUF file: its tensor {tensor.name!r} has a dimension of 0")
    return reader, size


def _tensors(reader: gguf.GGUFReader) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(one.name, one.tensor_type.name, tuple(map(int, one.shape)), int(one.n_bytes)) for one in reader.tensors
    )


def _metadata(reader: gguf.GGUFReader, architecture: str) -> dict[str, Any]:
    """The architecture's entries; what cannot be read is left out, as if it were not there."""
    found: dict[str, Any] = {}
    for key, entry in reader.fields.items():
        if key.startswith(f"{architecture}.") and entry.data:
            try:
                found[key.removeprefix(f"{architecture}.")] = entry.contents()
            except UnicodeDecodeError:
                continue
    return found


def _check_counts(path: Path, size: int, head: bytes) -> None:
    """What a file's first 24 bytes declare, if they are those of a version that there is."""
    versions = {struct.pack(f"{order}I", version): order for order in "<>" for version in (2, 3)}
    order = versions.get(head[4:8])
    if len(head) < 24 or order is None:
        return
    for count, what in zip(struct.unpack_from(f"{order}QQ", head, 8), ("tensors", "entries of metadata"), strict=True):
        if count > MAX_ENTRIES:
            raise PlanError(f"{path} ({size} bytes) declares {count} {what}, and {MAX_ENTRIES} are possible")


def _value(reader: gguf.GGUFReader, path: Path, key: str, kind: type[Any]) -> Any:
    field = reader.get_field(key)
    try:
        value = None if field is None else field.contents()
    except Exception as error:  # such as text that is not UTF-8
        raise PlanError(f"{path} is a damaged GGUF file: its {key} cannot be read ({error})") from None
    if not isinstance(value, kind):
        raise PlanError(f"{path} has no usable {key}")
    return value
