"""``boundary-bundle convert``: to and from .npz and .safetensors, without loss."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..bundle import Bundle
from ..encoder import encode_parts
from ..errors import BundleError
from ..interchange import ConversionError, to_npz, to_safetensors
from .common import CommandError, file_name
from .files import add_file_options, bundle_json, print_json, read_bundle, shown, write_file


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="to and from .npz and .safetensors",
        description="Write the bundle of SOURCE to TARGET. The target's name decides: .npz, .safetensors (needs the "
        "extra 'convert'), anything else is a bundle. Nothing is lost on the way there and back. Exit status 0: "
        "written. 2: it could not be.",
    )
    parser.add_argument("source", type=file_name, metavar="SOURCE", help="a bundle, .npz or .safetensors")
    parser.add_argument(
        "target", type=file_name, metavar="TARGET", help="what to write; its ending says what it becomes"
    )
    parser.add_argument("--force", action="store_true", help="replace TARGET if it is there")
    add_file_options(parser)
    parser.set_defaults(function=convert)


def convert(options: argparse.Namespace) -> int:
    """The command."""
    bundle = read_bundle(options.source, options.max_size)
    kind, parts = _written(bundle, options.source, options.target)
    write_file(options.target, parts, replace=options.force)
    size = sum(len(part) for part in parts)
    if options.json:
        print_json(
            {
                "source": shown(options.source),
                "target": shown(options.target),
                "format": kind,
                "bytes": size,
                "bundle": bundle_json(bundle),
            }
        )
    else:
        count = len(bundle)
        print(f"{shown(options.target)}: {kind}, {count} {'tensor' if count == 1 else 'tensors'}, {size:,} bytes")
    return 0


def _written(bundle: Bundle, source: Path, target: Path) -> tuple[str, list[Any]]:
    """The target's format, and the bytes to write."""
    suffix = target.suffix.lower()
    try:
        if suffix == ".npz":
            return "npz", [to_npz(bundle)]
        if suffix == ".safetensors":
            return "safetensors", [to_safetensors(bundle)]
        return "bundle", list(encode_parts(bundle))
    except (BundleError, ConversionError, ValueError) as error:
        raise CommandError(f"cannot convert {shown(source)}: {error}") from None
