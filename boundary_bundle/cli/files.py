"""What the commands on files share: reading with a size check, writing whole files, JSON of what was found."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..bundle import Attribute, Bundle, Tensor
from ..decoder import BundleReady, Decoder
from ..errors import ERRORS, BundleError
from ..interchange import ConversionError, from_npz, from_safetensors
from ..layout import MAGIC
from ..writing import is_regular
from .common import CommandError, shown, write_parts

DEFAULT_MAX_BYTES = 1 << 32
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_count(text: str) -> int:
    """An argparse type: bytes, with K, M, G or T for powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(i?B)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 65536, 512M or 4G")
    return int(match[1]) * _UNITS[match[2]]


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that reads files."""
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    parser.add_argument(
        "--max-size",
        type=byte_count,
        default=DEFAULT_MAX_BYTES,
        metavar="BYTES",
        help="refuse larger files (4G)",
    )


def read_file(path: Path, limit: int) -> bytes:
    """The whole of a regular file of at most ``limit`` bytes. Raises CommandError."""
    try:
        # Opening must not wait for the other end of a pipe.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as stream:
            found = os.fstat(stream.fileno())
            if not is_regular(found):
                raise CommandError(f"cannot read {shown(path)}: it is not a regular file")
            if found.st_size > limit:
                raise CommandError(
                    f"cannot read {shown(path)}: it has {found.st_size:,} bytes, more than the {limit:,} of --max-size"
                )
            data = stream.read(found.st_size + 1)
    except OSError as error:
        raise CommandError(f"cannot read {shown(path)}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise CommandError(f"cannot read {shown(path)}: {error}") from None
    except MemoryError:
        raise CommandError(f"cannot read {shown(path)}: it does not fit into memory") from None
    if len(data) != found.st_size:
        raise CommandError(f"cannot read {shown(path)}: its size changed while it was read")
    return data


def read_bundle(path: Path, limit: int) -> Bundle:
    """The one bundle of a file: of the format itself, else .npz or .safetensors by its name.

    Raises CommandError.
    """
    data = read_file(path, limit)
    if not data.startswith(MAGIC[:4]):
        reader = {".npz": lambda: from_npz(data, limit), ".safetensors": lambda: from_safetensors(data)}.get(
            path.suffix.lower()
        )
        if reader is not None:
            try:
                return reader()
            except (BundleError, ConversionError) as error:
                raise CommandError(f"cannot use {shown(path)}: {error}") from None
    decoder = Decoder("stream")
    try:
        events = decoder.feed(data)
        decoder.finish()
    except BundleError as error:
        raise CommandError(f"cannot use {shown(path)}: {error}") from None
    found = [event.bundle for event in events if isinstance(event, BundleReady)]
    if len(found) != 1:
        raise CommandError(f"cannot use {shown(path)}: it holds {len(found)} bundles, not one")
    return found[0]


def write_file(path: Path, parts: Iterable[Any], *, replace: bool) -> None:
    """Write the whole file or none of it; without ``replace`` no file that is there. Raises CommandError."""
    # What cannot be replaced needs no leave for it: devices and pipes.
    if not replace and (path.is_symlink() or path.is_file()):
        raise CommandError(f"cannot write {shown(path)}: it is there already (--force replaces it)")
    write_parts(path, parts)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """A value as JSON can hold it: bytes in hexadecimal, 64-bit integers and non-finite floats as text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, int):
        return value if -(2**53) < value < 2**53 else str(value)
    if isinstance(value, float):
        return value if value - value == 0 else repr(value)
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    return str(value)


def error_json(error: BundleError) -> dict[str, Any]:
    """Everything a BundleError says."""
    return {
        "name": error.name,
        "number": error.number,
        "meaning": ERRORS[error.name][1],
        "offset": error.offset,
        "frame": error.frame,
        "tensor": error.tensor,
        "field": error.field,
        "expected": plain(error.expected),
        "found": plain(error.found),
    }


def attribute_json(record: Attribute) -> dict[str, Any]:
    return {"key": f"{record.key:#06x}", "name": record.name, "type": record.type_name, "value": plain(record.value)}


def tensor_json(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "token_axis": tensor.token_axis,
        "byte_order": tensor.byte_order,
    }


def bundle_json(bundle: Bundle) -> dict[str, Any]:
    """The bundle without its payloads."""
    return {
        "number": str(bundle.number),
        "version": f"1.{bundle.minor}",
        "fragment_size": bundle.fragment_size,
        "checksums": bundle.checksums,
        "tensors": [tensor_json(tensor) for tensor in bundle],
        "attributes": [attribute_json(record) for record in bundle.attributes.records()],
    }


__all__ = [
    "DEFAULT_MAX_BYTES",
    "add_file_options",
    "attribute_json",
    "bundle_json",
    "byte_count",
    "error_json",
    "plain",
    "print_json",
    "read_bundle",
    "read_file",
    "shown",
    "tensor_json",
    "write_file",
]
