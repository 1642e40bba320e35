"""``boundary-bundle describe``: load one range of a model and say what was loaded."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from ..shards import PlanError, read_model_file, start_workers
from ..shards.worker import close_workers
from . import common
from .common import CommandError


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "describe",
        help="load one range of a model and say what it holds",
        description="Load the layers START to END - 1 of a model in a worker, and print what it reports of itself.",
    )
    parser.add_argument("--model", type=common.file_name, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--range", metavar="START:END", help="absent: all layers")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    common.add_settings(parser)
    parser.set_defaults(function=describe)


def parse_range(text: str | None, n_layer: int) -> tuple[int, int]:
    """Raises PlanError for a range that is not within the model."""
    if text is None:
        return 0, n_layer
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise PlanError(f"range {text!r} is not START:END with two layer numbers")
    start, end = int(match[1]), int(match[2])
    if not start < end <= n_layer:
        raise PlanError(f"range {start}:{end} is empty, reversed or out of range: the model has {n_layer} layers")
    return start, end


def describe(options: argparse.Namespace) -> int:
    """The command."""
    model = read_model_file(options.model)
    layers = parse_range(options.range, model.n_layer)
    program = common.worker_program(options)
    workers = start_workers(program, model.path, [layers], common.settings_of(options), options.timeout)
    try:
        found = workers[0].describe(tensors=options.tensors or options.json).raw
    finally:
        close_workers(workers)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    if not isinstance(found.get("contract"), dict):
        raise CommandError("the worker described no contract")
    tensors = found.pop("tensors", [])
    contract = found.pop("contract")
    for key, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) and key.endswith("bytes") else value
        print(f"{key}: {shown}")
    for way in ("in", "out"):
        for entry in contract[way]:
            print(f"{way}: {entry['name']} {entry['dtype']} [{', '.join(map(str, entry['shape']))}]")
    if options.tensors:
        rows = [
            [entry["name"], entry["type"], "x".join(map(str, entry["shape"])), f"{entry['bytes']:,}"]
            for entry in tensors
        ]
        common.print_table("tensors", ["name", "type", "shape", "bytes"], rows)
    return 0
