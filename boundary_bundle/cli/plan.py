"""``boundary-bundle plan``: where to cut a model for some workers, by what its file says of sizes."""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..shards import (
    Capacity,
    ModelFile,
    ModelSizes,
    Pipeline,
    Settings,
    Stage,
    close_workers,
    generate,
    make_plan,
    model_sizes,
    model_tensors,
    partition,
    read_model_file,
    start_workers,
    tensors_sha256,
)
from ..shards.planner import SCHEMA
from ..shards.worker import REQUEST_TIMEOUT
from . import common
from .common import CommandError, print_styled, print_table, shown

_MB = 1e6
_MOST_WORKERS = 256
_ALLOWANCE = "64Mi"
#: Decode steps that are measured; their median counts.
_STEPS = 16
_BAR = 50
_SPEED = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="choose the cuts of a model for some workers",
        description="Choose the cuts by which a pipeline of workers is fastest, each within its memory, from what the "
        "model's file says of sizes. Nothing is loaded, except to measure. Weights and KV are exact, times are "
        "estimates: the bytes of weights that a decode step reads, over the worker's speed. Exit status 0: done. "
        "2: it could not be.",
    )
    parser.add_argument(
        "--model",
        type=common.file_name,
        required=True,
        metavar="FILE",
        help="a GGUF file, the first of them if there are several",
    )
    parser.add_argument(
        "--workers", type=common.number(1, _MOST_WORKERS), required=True, metavar="N", help="as many shards"
    )
    parser.add_argument(
        "--memory",
        type=_memories,
        metavar="A,B",
        help="what each worker has, such as 4G,800M,3.5Gi; one for all; absent: enough",
    )
    parser.add_argument(
        "--speeds",
        type=_speeds,
        metavar="A,B",
        help="of each worker, relative (2,1,1) or in bytes of weights a second (20G,8G,8G); absent: equal",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run a few tokens on this machine, whose speed is what a relative speed of 1 means then",
    )
    parser.add_argument(
        "--allowance",
        type=common.size,
        default=_ALLOWANCE,
        metavar="SIZE",
        help=f"what a worker needs beside weights and KV: program, buffers ({_ALLOWANCE}, a guess)",
    )
    parser.add_argument("--json", type=common.file_name, metavar="FILE", help="write the plan to FILE (-: to stdout)")
    parser.add_argument("--picture", type=common.file_name, metavar="FILE", help="draw the stages (SVG)")
    common.add_settings(parser)
    parser.add_argument(
        "--seqs", type=common.number(1, 64), default=1, metavar="N", help="sequences, or sessions of serve, at once (1)"
    )
    parser.set_defaults(function=plan)


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        raise argparse.ArgumentTypeError(f"item {items.index('') + 1} of {text!r} is empty")
    return items


def _memories(text: str) -> list[int]:
    """An argparse type."""
    return [common.size(item) for item in _items(text)]


def _speeds(text: str) -> tuple[list[Fraction], bool]:
    """An argparse type: the speeds, and whether they are in bytes a second."""
    items = _items(text)
    absolute = [not item[-1].isdigit() for item in items]
    if any(absolute) and not all(absolute):
        raise argparse.ArgumentTypeError(f"{text!r} has relative speeds and speeds in bytes a second")
    speeds = []
    for item in items:
        if any(absolute):
            speeds.append(Fraction(common.size(item)))
            continue
        whole, _, part = item.partition(".")
        digits = whole + part
        if (
            not (digits.isascii() and digits.isdecimal() and len(digits) <= 9)
            or item.startswith(".")
            or not int(digits)
        ):
            raise argparse.ArgumentTypeError(f"{item!r} is not a speed above 0 such as 2, 0.75 or 8G")
        speeds.append(Fraction(item.rstrip(".")))
    return speeds, any(absolute)


def plan(options: argparse.Namespace) -> int:
    """The command."""
    to_stdout = options.json is not None and str(options.json) == "-"
    settings = replace(common.settings_of(options), seqs=options.seqs)
    _check_settings(settings)
    memories = _each("--memory", options.memory or [None], options.workers)
    relative, absolute = options.speeds or ([Fraction(1)], False)
    speeds = _each("--speeds", relative, options.workers)
    if absolute and options.measure:
        raise CommandError("--measure is for relative speeds, and these are in bytes a second")
    for target in (None if to_stdout else options.json, options.picture):
        common.check_target(target, options.model)
    model = read_model_file(options.model)
    tensors = model_tensors(model)
    family = common.family_of(model)
    sizes = model_sizes(model, tensors, family, settings)
    measured = None
    if options.measure:
        if family.memory == "none" or family.gives != "logits":
            raise CommandError(f"--measure: a model of {model.architecture} has no decode steps")
        measured, sizes = measured_sizes(common.worker_program(options), model, sizes, settings, options.timeout)
        speeds, absolute = [speed * measured for speed in speeds], True
    workers = [Capacity(memory, speed) for memory, speed in zip(memories, speeds, strict=True)]
    stages = partition(sizes, workers, options.allowance)
    slowest = max(one.time for one in stages)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "model": str(model.path),
        "architecture": model.architecture,
        "n_layer": model.n_layer,
        "tensors_sha256": tensors_sha256(tensors),
        "cuts": [one.layers[0] for one in stages[1:]],
        "settings": asdict(settings),
        "allowance_bytes": options.allowance,
        "kv_unknown": sizes.kv_unknown or None,
        "measured_bytes_per_second": measured,
        "slowest_ms": _milliseconds(slowest) if absolute else None,
        "stages": [
            _stage(one, worker, known=not sizes.kv_unknown, absolute=absolute, slowest=slowest)
            for one, worker in zip(stages, workers, strict=True)
        ],
    }
    if options.picture is not None:
        common.write_parts(options.picture, [_svg(found).encode("utf-8", "replace")])
    if to_stdout:
        print(json.dumps(found, indent=2))
        return 0
    if options.json is not None:
        common.write_json(options.json, found)
    _print(found)
    return 0


def _check_settings(settings: Settings) -> None:
    """What a worker would refuse."""
    if settings.type_v == "q8_0" and not settings.flash_attn:
        raise CommandError("--type-v q8_0 needs --flash-attn on")
    tokens = min(settings.ctx, settings.batch)
    if settings.seqs > tokens:
        raise CommandError(f"--seqs {settings.seqs} is more than the {tokens} tokens of a batch (--batch, --ctx)")


def _each(option: str, given: Sequence[Any], count: int) -> list[Any]:
    """One for each worker, where one for all may be given."""
    if len(given) not in (1, count):
        raise CommandError(f"{option} has {len(given)} items: give one for each of the {count} workers, or one for all")
    return list(given) * (count if len(given) == 1 else 1)


def measured_sizes(
    program: Path, model: ModelFile, sizes: ModelSizes, settings: Settings, timeout: float | None = REQUEST_TIMEOUT
) -> tuple[int, ModelSizes]:
    """Bytes of weights a second of this machine, and the sizes with the head's reading at that rate.

    Types and shapes differ in what a byte of them takes, most of all between layers and head. So two workers run a few
    decode steps, the second with as few layers as there may be.
    """
    plan = make_plan(model.n_layer, sizes.cuts[-1:])
    started = start_workers(program, model.path, plan, settings, timeout)
    try:
        # Whatever the tokens are, a step reads the same bytes.
        steps = min(_STEPS, settings.ctx - 1)
        generation = generate(Pipeline(started), [0], steps + 1, batch_size=settings.batch)
    finally:
        close_workers(started)
    times = [generation.shard_ms(shard) * 1e-3 for shard in range(len(plan))]
    rate = max(1, round(sizes.shard(*plan.ranges[0]).read / times[0]))
    if len(plan) == 1:
        return rate, sizes
    before_head = sum(part.read for part in sizes.layers[plan.cuts[0] :])
    head = max(0, round(times[1] * rate) - before_head)
    return rate, replace(sizes, last=replace(sizes.last, read=head))


def _milliseconds(seconds: Fraction) -> float:
    return round(float(seconds) * 1e3, 4)


def _stage(one: Stage, worker: Capacity, *, known: bool, absolute: bool, slowest: Fraction) -> dict[str, Any]:
    return {
        "range": list(one.layers),
        "weight_bytes": one.part.weights,
        "kv_bytes": one.part.kv if known else None,
        "memory_bytes": one.memory,
        "memory_limit_bytes": worker.memory,
        "read_bytes": one.part.read,
        "speed": float(worker.speed),
        "time_ms": _milliseconds(one.time) if absolute else None,
        "time_share": round(float(one.time / slowest), 6) if slowest else 1.0,
    }


def _megabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / _MB:,.1f}"


def _time(one: dict[str, Any]) -> str:
    return f"{one['time_share']:.3f}" if one["time_ms"] is None else f"{one['time_ms']:,.2f}"


def _print(found: dict[str, Any]) -> None:
    timed = found["slowest_ms"] is not None
    limited = any(one["memory_limit_bytes"] is not None for one in found["stages"])
    cuts = ",".join(map(str, found["cuts"]))
    print(f"{shown(found['model'])}: {shown(found['architecture'])}, {found['n_layer']} layers")
    print_styled(f"--cuts {cuts}" if cuts else "no cuts: one worker", "bold green")
    print()
    rows = []
    for place, one in enumerate(found["stages"], start=1):
        start, end = one["range"]
        limit = "-" if one["memory_limit_bytes"] is None else _megabytes(one["memory_limit_bytes"])
        sizes = [_megabytes(one[key]) for key in ("weight_bytes", "kv_bytes", "memory_bytes")]
        reads = _megabytes(one["read_bytes"])
        rows.append([f"{place}", f"{start} to {end - 1}", *sizes, *([limit] if limited else []), reads, _time(one)])
    unit = "ms a token" if timed else "time"
    columns = ["shard", "layers", "weights", "KV", "memory", *(["of"] if limited else []), "read a token", unit]
    told = "ms of the estimate" if timed else "time: of the slowest stage's"
    print_table(f"stages (MB; {told})", columns, rows)
    print()
    _print_bars(found)
    print()
    print(f"memory: weights, KV of {found['settings']['ctx']:,} positions, and {found['allowance_bytes']:,} bytes for")
    print("program and buffers (--allowance, a guess)")
    if found["kv_unknown"]:
        print(f"KV: not known and in no sum, since {shown(found['kv_unknown'])}")
    if found["measured_bytes_per_second"] is None:
        print("times: estimated from the weights that a token reads; hops, KV and computing are left out")
    else:
        print("times: estimated from a few tokens of this machine; hops are left out, and KV but for these tokens'")


def _print_bars(found: dict[str, Any]) -> None:
    """A bar for each stage's time; the slowest sets the rate."""
    block = "\u2588" if sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    ranges = [f"[{start},{end})" for start, end in (one["range"] for one in found["stages"])]
    width = max(map(len, ranges))
    for name, one in zip(ranges, found["stages"], strict=True):
        bar = block * max(1, round(_BAR * one["time_share"]))
        print_styled(f"  {name:<{width}} {bar} {_time(one)}", "bold yellow" if one["time_share"] == 1 else "cyan")


# -- the picture

_LINE, _LEFT, _WIDTH = 24, 110, 420
_COLOURS = (("weight_bytes", "#4477aa", "weights"), ("kv_bytes", "#66ccee", "KV"), ("rest", "#bbbbbb", "allowance"))


def _svg(found: dict[str, Any]) -> str:
    """Two bars a stage: its time, and its memory against what its worker has."""
    stages = found["stages"]
    most = max(max(one["memory_bytes"], one["memory_limit_bytes"] or 0) for one in stages)
    right = _LEFT + _WIDTH + 100
    width, height = right + _WIDTH + 120, (len(stages) + 3) * _LINE
    name = shown(Path(found["model"]).name)
    title = html.escape(f"{name}: {found['architecture']}, {found['n_layer']} layers")
    limited = any(one["memory_limit_bytes"] is not None for one in stages)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>{title}</title>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 0, title),
        _text(_LEFT, 1, "estimated time" + ("" if found["slowest_ms"] is None else ", ms a token")),
        _text(right, 1, "memory, MB" + ("; the line is what the worker has" if limited else "")),
    ]
    for place, one in enumerate(stages, start=2):
        start, end = one["range"]
        slowest = one["time_share"] == 1
        length = _WIDTH * one["time_share"]
        parts += [
            _text(10, place, f"{start} to {end - 1}"),
            _rect(_LEFT, place, length, "#ee6677" if slowest else "#228833"),
            _text(_LEFT + length + 6, place, _time(one)),
        ]
        sizes = {**one, "rest": found["allowance_bytes"]}
        at = float(right)
        for key, colour, _ in _COLOURS:
            length = _WIDTH * (sizes[key] or 0) / most
            parts.append(_rect(at, place, length, colour))
            at += length
        if one["memory_limit_bytes"] is not None:
            limit = right + _WIDTH * one["memory_limit_bytes"] / most
            parts.append(_rect(limit, place, 2, "black"))
            at = max(at, limit)
        parts.append(_text(at + 6, place, _megabytes(one["memory_bytes"])))
    at = float(right)
    for _, colour, name in _COLOURS:
        parts += [_rect(at, len(stages) + 2, 12, colour), _text(at + 18, len(stages) + 2, name)]
        at += 110
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rect(x: float, line: int, width: float, colour: str) -> str:
    y, height = line * _LINE + 4, _LINE - 8
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, line: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{line * _LINE + 17}">{text}</text>'
