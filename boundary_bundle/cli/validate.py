"""``boundary-bundle validate``: is a file a conforming datastream, and if not, where and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..bundle import Bundle
from ..decoder import BundleReady, Decoder
from ..encoder import encode_parts
from ..errors import BundleError, failure
from .common import CommandError, file_name
from .files import add_file_options, bundle_json, error_json, print_json, read_file, shown


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "validate",
        help="check files against the format",
        description="Check files against the format, every byte of them. Exit status 0: all conform. 1: one does "
        "not. 2: one could not be read.",
    )
    parser.add_argument("files", type=file_name, nargs="+", metavar="FILE", help="datastreams of one or more bundles")
    parser.add_argument("--canonical", action="store_true", help="demand the canonical form too")
    parser.add_argument("--require-checksums", action="store_true", help="refuse bundles without payload checksums")
    add_file_options(parser)
    parser.set_defaults(function=validate)


def validate(options: argparse.Namespace) -> int:
    """The command."""
    status = 0
    results = []
    for path in options.files:
        result: dict[str, Any] = {"file": shown(path)}
        try:
            data = read_file(path, options.max_size)
        except CommandError as error:
            status = 2
            result |= {"valid": None, "reason": str(error)}
            if not options.json:
                sys.stdout.flush()
                print(f"error: {error}", file=sys.stderr)
        else:
            result |= _check(data, options.require_checksums)
            if not result["valid"] or (options.canonical and not result["canonical"]):
                status = max(status, 1)
            if not options.json:
                print(_sentence(result, options.canonical))
        results.append(result)
    if options.json:
        print_json({"files": results})
    return status


def _check(data: bytes, require_checksums: bool) -> dict[str, Any]:
    decoder = Decoder("stream", require_checksums=require_checksums)
    try:
        events = decoder.feed(data)
        decoder.finish()
        if not data:
            raise failure("truncated", 0, 0, field="input")
    except BundleError as error:
        return {"valid": False, "bytes": len(data), "error": error_json(error), "reason": str(error)}
    bundles = [event.bundle for event in events if isinstance(event, BundleReady)]
    return {
        "valid": True,
        "bytes": len(data),
        "canonical": _is_canonical(data, bundles),
        "bundles": [bundle_json(bundle) for bundle in bundles],
    }


def _is_canonical(data: bytes, bundles: list[Bundle]) -> bool:
    """Whether the file is what an encoder writes for its bundles, one after another."""
    view = memoryview(data)
    at = 0
    for bundle in bundles:
        for part in encode_parts(bundle):
            if view[at : at + len(part)] != part:
                return False
            at += len(part)
    return at == len(data)


def _sentence(result: dict[str, Any], canonical: bool) -> str:
    name = result["file"]
    if not result["valid"]:
        return f"{name}: invalid: {result['reason']}"
    bundles = result["bundles"]
    tensors = sum(len(bundle["tensors"]) for bundle in bundles)
    what = (
        f"{len(bundles)} {'bundle' if len(bundles) == 1 else 'bundles'}, "
        f"{tensors} {'tensor' if tensors == 1 else 'tensors'}, {result['bytes']:,} bytes"
    )
    if result["canonical"]:
        return f"{name}: valid, canonical: {what}"
    return f"{name}: {'not canonical' if canonical else 'valid, not canonical'}: {what}"
