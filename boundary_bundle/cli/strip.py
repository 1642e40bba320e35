"""``boundary-bundle strip``: write a GGUF file that holds one layer range's tensors only."""

from __future__ import annotations

import argparse
from typing import Any

from ..shards import PlanError, Settings, read_model_file, start_workers
from ..shards.plan import model_files
from ..shards.strip import strip
from ..shards.worker import close_workers
from . import common
from .common import shown
from .describe import parse_range

# The worker says what belongs to the range; nothing is computed.
_SMALLEST = Settings(threads=1, ctx=64, batch=16, ubatch=16)


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "strip",
        help="write a GGUF file of one layer range",
        description="Write the tensors that a shard of the layers START to END - 1 holds into a GGUF file of their "
        "own, with all of the metadata, so that a host needs no more of the model than it runs. Shards of stripped "
        "files and of the whole one work together. Exit status 0: written. 2: it could not be.",
    )
    parser.add_argument(
        "--model",
        type=common.file_name,
        required=True,
        metavar="FILE",
        help="a GGUF file, the first of them if there are several",
    )
    parser.add_argument("--range", required=True, metavar="START:END", help="layers, counted from 0 over the model")
    parser.add_argument("-o", "--output", type=common.file_name, required=True, metavar="FILE", help="where to write")
    parser.add_argument("--worker", type=common.file_name, help=argparse.SUPPRESS)
    parser.set_defaults(function=write_stripped)


def write_stripped(options: argparse.Namespace) -> int:
    """The command."""
    files = model_files(options.model)
    model = read_model_file(options.model)
    layers = parse_range(options.range, model.n_layer)
    common.check_target(options.output, *files)
    workers = start_workers(common.worker_program(options), model.path, [layers], _SMALLEST, extra=["--no-warmup"])
    try:
        held = workers[0].describe(tensors=True)
    finally:
        close_workers(workers)
    if held.layer_range != layers:
        raise PlanError(f"layers {layers[0]} to {layers[1] - 1} were asked for, and the worker has {held.layer_range}")
    owned = [(entry["name"], entry["bytes"]) for entry in held.raw["tensors"]]
    stripped = strip(model.path, layers, model.n_layer, owned)
    common.write_parts(options.output, stripped.parts)
    tensors = common.counted(stripped.n_tensors, "tensor")
    print(f"{shown(options.output)}: layers {layers[0]} to {layers[1] - 1}, {tensors}, {stripped.n_bytes:,} bytes")
    return 0
