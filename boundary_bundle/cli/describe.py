"""``boundary-bundle describe``: load one range of a model and say what was loaded."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import numpy as np

from ..shards import Description, PlanError, read_model_file, start_workers
from ..shards.worker import close_workers, ingredients
from . import common
from .common import shown


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "describe",
        help="load one range of a model and say what it holds",
        description="Load the layers START to END - 1 of a model in a worker, and print what the loaded model reports "
        "of itself: layers, embeddings, final norm, head, tensors with their bytes, KV cache, resident memory, the "
        "recipe of what it computes, and what crosses the boundary on both sides. Nothing is computed. Exit status 0: "
        "done. 2: it could not be.",
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
    settings = common.settings_of(options)
    workers = start_workers(program, model.path, [layers], settings, options.timeout, extra=["--no-warmup"])
    try:
        found = workers[0].describe(tensors=True)
    finally:
        close_workers(workers)
    if options.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _print(found, tensors=options.tensors)
    return 0


def _layers(found: Description) -> list[int]:
    """The layers of which there are tensors; of a library that does not tell, those that it was loaded for."""
    if "tensors" not in found.raw:
        return list(range(*found.layer_range))
    return sorted({entry["layer"] for entry in found.raw["tensors"]} - {-1})


def _as_json(found: Description) -> dict[str, Any]:
    contract = {
        **found.raw["contract"],
        "in_fingerprint": found.contract_in.fingerprint().hex(),
        "out_fingerprint": found.contract_out.fingerprint().hex(),
    }
    return {**found.raw, "layers": _layers(found), "contract": contract}


def _print(found: Description, *, tensors: bool) -> None:
    raw = found.raw

    def told(key: str, unit: str = "") -> str:
        return f"{raw[key]:,}{unit}" if key in raw else "not known"

    head = "no"
    if raw["has_output"]:
        head = "yes, tied to the embeddings" if raw.get("tied") else "yes"
    layers = _layers(found)
    whole = layers == list(range(layers[0], layers[-1] + 1)) if layers else False
    rows = [
        ("model", shown(raw["path"])),
        ("architecture", f"{found.architecture}, {found.n_layer} layers, {found.n_embd} wide, {found.n_vocab} tokens"),
        ("fingerprint", "not known" if found.fingerprint is None else found.fingerprint.hex()),
        ("layers", f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers)) or "none"),
        ("embeddings", "yes" if raw["has_tok_embd"] else "no"),
        ("final norm", "yes" if raw["has_out_norm"] else "no"),
        ("head", head),
        ("tensors", f"{told('n_tensors')}, {told('weight_bytes', ' bytes')}, {told('n_params')} parameters"),
        ("KV cache", f"{told('kv_bytes', ' bytes')}, {found.n_ctx} positions, {raw['type_k']} and {raw['type_v']}"),
        ("resident memory", told("resident_bytes", " bytes")),
    ]
    for key, value in rows:
        print(f"{key}: {value}")
    _print_recipe(found)
    for way, contract in (("in", found.contract_in), ("out", found.contract_out)):
        print(f"{way}: contract {contract.fingerprint().hex()}")
        for rule in contract.tensors:
            print(f"  {rule.name} {rule.dtype} [{', '.join(rule.shape)}]")
    if tensors:
        table = [
            [entry["name"], entry["type"], "x".join(map(str, entry["shape"])), f"{entry['bytes']:,}"]
            for entry in raw.get("tensors", [])
        ]
        common.print_table("tensors", ["name", "type", "shape", "bytes"], table)


def _print_recipe(found: Description) -> None:
    recipe = found.recipe
    if recipe is None:
        print("recipe: not known")
        return
    for told, fingerprint, text in (
        ("recipe", recipe.fingerprint, recipe.shared),
        ("recipe of the range", recipe.range_fingerprint, recipe.range),
    ):
        print(f"{told}: {fingerprint.hex()}")
        for name, value in ingredients(text).items():
            print(f"  {shown(name)} {_readable(name, shown(value))}")


def _readable(name: str, value: str) -> str:
    """A float's decimal digits, as many as tell it from all others of its size, for the digits of its bits."""
    if not (name.startswith(("rope_freq_", "yarn_")) and re.fullmatch("[0-9a-f]{8}", value)):
        return value
    return str(np.uint32(int(value, 16)).view(np.float32))
