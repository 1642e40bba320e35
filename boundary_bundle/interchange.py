"""Bundles as .npz and .safetensors files, and such files as bundles.

Both ways keep everything: names, order, dtypes, byte orders, token axes, attributes
and framing. What the other format cannot say stands in a JSON text beside the
tensors; a file without one becomes a bundle with no attributes and no token axes.
safetensors is imported when it is needed (extra ``convert``).
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any, Final

import numpy as np

from .bundle import ATTRIBUTE_TYPES, Attribute, Attributes, Bundle, Tensor
from .dtypes import DTYPES, NATIVE_ORDER, Array, to_order
from .errors import BundleError

#: Not a tensor name: the alphabet has no '@'.
_NPZ_METADATA: Final = "@boundary_bundle"
_SAFETENSORS_METADATA: Final = "boundary_bundle"
#: The one name that safetensors keeps for itself.
_SAFETENSORS_RESERVED: Final = "__metadata__"
#: safetensors' names of the dtypes; block-quantised ones travel as bytes.
_SAFETENSORS: Final = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8_e4m3fn",
    "F8_E5M2": "f8_e5m2",
    "I8": "i8",
    "I16": "i16",
    "I32": "i32",
    "I64": "i64",
    "U8": "u8",
    "U16": "u16",
    "U32": "u32",
    "U64": "u64",
    "BOOL": "bool",
}
_TYPE_NAMES: Final = {code: name for name, code in ATTRIBUTE_TYPES.items()}


class ConversionError(ValueError):
    """A file is not what its name says, or holds what the other format cannot; one sentence."""


def _describe(bundle: Bundle) -> str:
    return json.dumps(
        {
            "version": 1,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "token_axis": tensor.token_axis,
                    "byte_order": tensor.byte_order,
                }
                for tensor in bundle
            ],
            "attributes": [
                {"key": record.key, "type": _TYPE_NAMES[record.type], "value": record.raw.hex()}
                for record in bundle.attributes.records()
            ],
            # As text: readers in other languages keep 53 bits.
            "number": str(bundle.number),
            "minor": bundle.minor,
            "fragment_size": str(bundle.fragment_size),
            "checksums": bundle.checksums,
        }
    )


def _restore(arrays: dict[str, Array], text: str | None) -> Bundle:
    """The bundle of native arrays, in the order and with the properties that ``text`` gives."""
    if text is None:
        return Bundle([Tensor(name, array) for name, array in arrays.items()])
    try:
        told = json.loads(text)
        if told["version"] != 1:
            raise ConversionError(f"the bundle's description has the unknown version {told['version']!r}")
        tensors = []
        for entry in told["tensors"]:
            axis, order = entry["token_axis"], entry["byte_order"]
            if not (axis is None or type(axis) is int) or order not in ("little", "big"):
                raise ConversionError(f"tensor {entry['name']!r} has token axis {axis!r} and byte order {order!r}")
            array = arrays.pop(entry["name"])
            row = DTYPES[entry["dtype"]]
            if array.dtype != row.numpy:
                # npz knows neither bfloat16 nor the 8-bit floats: they travel as unsigned integers.
                if array.dtype != row.unsigned:
                    raise ConversionError(
                        f"tensor {entry['name']!r} is described as {row.name} but holds {array.dtype}"
                    )
                array = array.view(row.numpy)
            tensors.append(
                Tensor(
                    entry["name"],
                    array,
                    dtype=row.name,
                    token_axis=axis,
                    byte_order=order,
                )
            )
        if arrays:
            raise ConversionError(f"tensor {next(iter(arrays))!r} is not in the bundle's description")
        attributes = Attributes(
            Attribute(int(entry["key"]), ATTRIBUTE_TYPES[entry["type"]], bytes.fromhex(entry["value"]))
            for entry in told["attributes"]
        )
        return Bundle(
            tensors,
            attributes,
            number=int(told["number"]),
            minor=int(told["minor"]),
            fragment_size=int(told["fragment_size"]),
            checksums=bool(told["checksums"]),
        )
    except (BundleError, ConversionError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConversionError(f"the bundle's description is damaged ({type(error).__name__}: {error})") from None


def _little(tensor: Tensor) -> Array:
    """The stored array in little-endian order, contiguous."""
    swapped = to_order(tensor.array, tensor.row, "little")
    array: Array = swapped.reshape(-1).view(np.uint8)
    return array


def to_npz(bundle: Bundle) -> bytes:
    """A .npz file (uncompressed); bf16 and 8-bit floats as unsigned integers of their width."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for tensor in bundle:
            row = tensor.row
            kept = row.numpy if row.numpy.type.__module__ == "numpy" else row.unsigned
            array = _little(tensor).view(kept.newbyteorder("<")).reshape(tensor.array.shape)
            _write_npy(archive, tensor.name, array)
        _write_npy(archive, _NPZ_METADATA, np.frombuffer(_describe(bundle).encode("ascii"), np.uint8))
    return stream.getvalue()


def _write_npy(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    # A fixed date: the same bundle gives the same file.
    info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
    with archive.open(info, "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def from_npz(data: bytes, limit: int) -> Bundle:
    """The bundle of a .npz file whose members have at most ``limit`` bytes together.

    Raises ConversionError, and BundleError for an element type that the format lacks.
    """
    arrays: dict[str, Array] = {}
    text: str | None = None
    left = limit
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name == info.filename:
                    raise ConversionError(f"member {info.filename!r} is no .npy file")
                if name in arrays:
                    raise ConversionError(f"tensor {name!r} is there twice")
                # What a member declares is not believed: no more is unpacked than may be.
                with archive.open(info) as member:
                    raw = member.read(left + 1)
                if len(raw) > left:
                    raise ConversionError(f"its members have more than {limit:,} bytes")
                left -= len(raw)
                array = _read_npy(raw, name)
                if name == _NPZ_METADATA:
                    text = array.tobytes().decode("ascii")
                else:
                    arrays[name] = array
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"it is no readable .npz file ({error})") from None
    except ConversionError:
        raise
    except ValueError as error:
        raise ConversionError(f"it is no readable .npz file ({error})") from None
    return _restore(arrays, text)


def _read_npy(raw: bytes, name: str) -> Array:
    """A native array over the bytes of a .npy file; its header is held against its length."""
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ConversionError(f"tensor {name!r} is in .npy format {version[0]}.{version[1]}, not 1.0 or 2.0")
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or not dtype.itemsize:
        raise ConversionError(f"tensor {name!r} holds {dtype}, not numbers")
    count = 1
    for dim in shape:
        count *= dim
    start = stream.tell()
    if count < 0 or count * dtype.itemsize != len(raw) - start:
        raise ConversionError(f"tensor {name!r} has {len(raw) - start:,} bytes, not those of {list(shape)}")
    flat: Array = np.frombuffer(raw, dtype, count, start) if count else np.empty(0, dtype)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    if array.dtype.byteorder == ">":
        array = array.byteswap().view(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(shape)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ConversionError(
            "the package safetensors is not installed: pip install 'boundary-bundle[convert]'"
        ) from None
    return safetensors


def to_safetensors(bundle: Bundle) -> bytes:
    """A .safetensors file. Block-quantised tensors are the bytes of their blocks, as U8."""
    library = _safetensors()
    arrays: dict[str, Array] = {}
    for tensor in bundle:
        if tensor.name == _SAFETENSORS_RESERVED:
            raise ConversionError(f"a safetensors file cannot hold a tensor called {_SAFETENSORS_RESERVED!r}")
        # Native arrays of the dtype; the library writes little-endian by itself.
        stored = to_order(tensor.array, tensor.row, NATIVE_ORDER)
        arrays[tensor.name] = stored.reshape(-1).view(tensor.row.numpy).reshape(tensor.array.shape)
    return bytes(library.numpy.save(arrays, {_SAFETENSORS_METADATA: _describe(bundle)}))


def from_safetensors(data: bytes) -> Bundle:
    """The bundle of a .safetensors file; tensors stand in the file's order if nothing says another.

    Raises ConversionError.
    """
    library = _safetensors()
    try:
        found = library.deserialize(data)
        # deserialize has checked the header; of its metadata it says nothing.
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    except (library.SafetensorError, ValueError, AttributeError, RecursionError) as error:
        raise ConversionError(f"it is no readable safetensors file ({error})") from None
    arrays: dict[str, Array] = {}
    for name, entry in found:
        row = DTYPES.get(_SAFETENSORS.get(entry["dtype"], ""))
        if row is None:
            raise ConversionError(f"tensor {name!r} is {entry['dtype']}, for which the format has no dtype")
        raw = np.frombuffer(bytes(entry["data"]), np.uint8)
        little = raw.view(row.unsigned.newbyteorder("<"))
        native = little.astype(row.unsigned).view(row.numpy)
        arrays[name] = native.reshape(entry["shape"])
    return _restore(arrays, metadata.get(_SAFETENSORS_METADATA))


__all__ = ["ConversionError", "from_npz", "from_safetensors", "to_npz", "to_safetensors"]
