"""A GGUF file of one layer range: that range's tensors, and all of the metadata.

The file brings the tensor table of the whole model in three metadata arrays, from which the library computes the
whole model's fingerprint, so that shards of stripped and of whole files work together:

    boundary_bundle.tensors.name    names
    boundary_bundle.tensors.type    numbers of their ggml types (u32)
    boundary_bundle.tensors.shape   four dimensions each, innermost first, 1 where there is none (u64)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .plan import LAYER, TABLE, PlanError, model_files

if TYPE_CHECKING:
    import gguf


@dataclass(frozen=True)
class Stripped:
    """What a file will hold: ``parts`` are its bytes in order, to be taken once; ``n_tensors`` and ``n_bytes`` are
    those of its weights."""

    parts: Iterator[bytes | memoryview]
    n_tensors: int
    n_bytes: int


def strip(path: Path, layers: tuple[int, int], n_layer: int, owned: Iterable[tuple[str, int]]) -> Stripped:
    """The file of the range ``layers`` of the model ``path``.

    ``owned`` are the names and bytes of the tensors that a worker of that range has loaded: what belongs to which
    range is the library's to say. Tensors of these layers that it passed over, such as those of draft heads, are kept
    too. Payloads are the bytes of the source. Raises PlanError when a file cannot be read, does not hold what is owned
    or has metadata that the gguf package cannot write.
    """
    import gguf

    readers = [_read(file) for file in model_files(path)]
    first = readers[0]
    tensors = {tensor.name: (reader, tensor) for reader in readers for tensor in reader.tensors}
    kept = dict(owned)
    for name, size in kept.items():
        if name not in tensors or int(tensors[name][1].n_bytes) != size:
            raise PlanError(f"{path} has changed: its tensor {name} is no longer the one that was loaded")
    for name in tensors:
        layer = LAYER.match(name)
        if layer and layers[0] <= int(layer[1]) and (int(layer[1]) < layers[1] or layers[1] == n_layer):
            kept.setdefault(name, int(tensors[name][1].n_bytes))

    architecture = first.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(None, architecture, endianess=first.endianess)
    writer.data_alignment = int(first.alignment)
    for key, field in first.fields.items():
        if not key.startswith(("GGUF.", "split.")) and key != "general.architecture":
            writer.add_key_value(key, *_value(path, field))
    if TABLE + "name" not in first.fields:  # else the source is a stripped file itself
        kinds = gguf.GGUFValueType
        found = [tensor for _, tensor in tensors.values()]
        shapes = [[*map(int, tensor.shape), 1, 1, 1][:4] for tensor in found]
        for key, values, kind in (
            ("name", list(tensors), kinds.STRING),
            ("type", [int(tensor.tensor_type) for tensor in found], kinds.UINT32),
            ("shape", [size for shape in shapes for size in shape], kinds.UINT64),
        ):
            writer.add_key_value(TABLE + key, values, kinds.ARRAY, kind)
    chosen = [entry for name, entry in tensors.items() if name in kept]
    for _, tensor in chosen:
        shape = [int(size) for size in reversed(tensor.shape)]
        # Of a numpy type other than u8 the shape is taken as it is, whatever the ggml type.
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), int(tensor.n_bytes), tensor.tensor_type)
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head"
        writer.write_header_to_file(head)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        start = head.read_bytes()

    alignment = writer.data_alignment

    def parts() -> Iterator[bytes | memoryview]:
        yield start + bytes(-len(start) % alignment)
        for reader, tensor in chosen:
            size = int(tensor.n_bytes)
            yield reader.data[tensor.data_offset : tensor.data_offset + size].data
            yield bytes(-size % alignment)

    return Stripped(parts(), len(chosen), sum(int(tensor.n_bytes) for _, tensor in chosen))


def _read(path: Path) -> gguf.GGUFReader:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # the package raises whatever its parsing runs into
        detail = " ".join(str(error).split()) or type(error).__name__
        raise PlanError(f"{path} is a damaged GGUF file: {detail[:200]}") from None


def _value(path: Path, field: gguf.ReaderField) -> tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """Value, type and element type of a field as GGUFWriter takes them; text as the bytes that it is."""
    import gguf

    kinds = gguf.GGUFValueType
    kind = field.types[0]
    if kind != kinds.ARRAY:
        part = field.parts[-1]
        return (bytes(part) if kind == kinds.STRING else part[0].item()), kind, None
    if len(field.types) != 2 or not field.data:
        what = "is empty" if len(field.types) < 2 else "has arrays in it"
        raise PlanError(
            f"{path} cannot be stripped: its array {field.name} {what}, which the gguf package cannot write"
        )
    parts = [field.parts[index] for index in field.data]
    values = [bytes(part) if field.types[1] == kinds.STRING else part[0].item() for part in parts]
    return values, kind, field.types[1]
