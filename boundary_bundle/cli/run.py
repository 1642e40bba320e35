"""``boundary-bundle run``: generate text with a model that is split over several processes."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..shards import Fault, FlowPipeline, Generation, LocalWorker, Relay, generate, read_model_file, shares
from . import common
from .common import CommandError, Hosts, Run

_TOO_FEW = "one token is too few to measure a speed: give --tokens 2 or more"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="generate text with a split model",
        description="Split a model at the given layers over as many processes, and generate text. "
        "Standard output is the text, standard error the rest.",
    )
    parser.add_argument("--model", type=common.file_name, required=True, metavar="FILE", help="a GGUF file")
    common.add_cuts(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument("--tokens", type=common.number(1, 1 << 20), default=40, metavar="N", help="at most (40)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run an unsplit worker beside it and compare every logit by its bits; both codecs on every hop",
    )
    parser.add_argument("--all-logits", action="store_true", help="with --check: the prompt's logits too, not its last")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the end of the text")
    parser.add_argument(
        "--speed-runs",
        type=common.number(1, 1000),
        metavar="N",
        help="then measure N whole generations, split and unsplit in turn, and report the medians",
    )
    parser.add_argument(
        "--hand-over",
        choices=("direct", "driver"),
        help="bundles go from worker to worker, a prompt in micro-batches side by side (direct, the default), or "
        "through this process (driver, and always with --check)",
    )
    parser.add_argument(
        "--spread",
        action="store_true",
        help="deal the processors out to the shards, and start no more threads for each than it has: for prompts, and "
        "several sequences, that all shards work on side by side",
    )
    parser.add_argument("--no-shared-memory", action="store_true", help="direct: through sockets, not shared memory")
    parser.add_argument("--no-checksums", action="store_true", help="direct: bundles without checksums")
    parser.add_argument("--json", type=common.file_name, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--plant-fault", metavar="HOP:STEP", help=argparse.SUPPRESS)
    common.add_sampling(parser)
    common.add_settings(parser)
    group = parser.add_argument_group("where the shards run")
    group.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="processes of this host, or actors of Ray (local)"
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="with --engine ray: a running cluster that this host is a node of (one on this host alone, for this run)",
    )
    group.add_argument(
        "--hosts-model", type=common.file_name, metavar="PATH", help="with --engine ray: the model's path on the hosts"
    )
    group.add_argument(
        "--resources", metavar="A,B", help="with --engine ray: for each shard a custom resource that its node must have"
    )
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """The command. Returns 1 if a logit differs, else 0."""
    fault = _fault(options)
    if options.all_logits and not options.check:
        raise CommandError("--all-logits is for --check")
    if options.speed_runs is not None and options.tokens < 2:
        raise CommandError(_TOO_FEW)
    direct = _direct(options)
    common.check_prompt(options.prompt)
    model = read_model_file(options.model)
    plan = common.plan_of(options, model)
    hosts = _hosts(options, len(plan))
    common.check_target(options.json, options.model, options.worker)
    settings = common.settings_of(options)
    processors: list[list[int]] = []
    if options.spread:
        processors = shares(common.usable_processors(), len(plan))
        settings = replace(settings, threads=min(settings.threads, *map(len, processors)))
    sampling = common.sampling_of(options)
    program = common.worker_program(options)
    how: dict[str, Any] = {
        "check": options.check,
        "unsplit": options.check or options.speed_runs is not None,
        "fault": fault,
        "timeout": options.timeout,
    }
    if hosts is None:
        workers = common.workers(program, model.path, plan, settings, direct=direct, processors=processors, **how)
    else:
        workers = common.ray_workers(program, model, plan, settings, hosts, hosts_program=options.worker, **how)
    with workers as running:
        prompt = running.texts.tokenize(options.prompt)
        common.require_room(settings, len(prompt), options.tokens)
        eos = () if options.ignore_eos else running.split.model.eos
        printer = common.Printer(running.texts, eos)
        generation = generate(
            running.split,
            prompt,
            options.tokens,
            batch_size=settings.batch if direct is None else settings.ubatch,
            eos=eos,
            reference=running.reference if options.check else None,
            all_logits=options.all_logits and options.check,
            on_token=printer,
            sampling=sampling,
        )
        text = printer.finish()
        result: dict[str, Any] = {
            "model": str(model.path),
            "architecture": model.architecture,
            "n_layer": model.n_layer,
            "cuts": plan.cuts,
            "engine": options.engine,
            "settings": asdict(settings),
            "sampling": asdict(sampling),
            "hand_over": "ray" if hosts is not None else "driver" if direct is None else "direct",
            "prompt": options.prompt,
            "prompt_tokens": len(prompt),
            "steps": generation.steps,
            "text": text,
            "tokens": generation.tokens,
            "checked": options.check,
            "logits_compared": generation.logits_compared,
            "logits_differing": generation.logits_differing,
            "tokens_per_second": common.rate(generation.tokens_per_second),
            "unsplit_tokens_per_second": common.rate(generation.reference_tokens_per_second),
            "shards": running.shards(),
            "unsplit": running.unsplit(),
            "hops": common.hops_of(running, generation),
        }
        for place, shard in enumerate(result["shards"]):
            shard["compute_ms"] = round(generation.shard_ms(place), 3)
        if options.speed_runs is not None:
            result |= speed(running, prompt, options.tokens, settings.batch, options.speed_runs)
    if options.json is not None:
        common.write_json(options.json, result)
    _report(result, generation)
    return 1 if generation.logits_differing else 0


def speed(running: Run, prompt: list[int], n_tokens: int, batch_size: int, runs: int) -> dict[str, Any]:
    """Whole generations, split and unsplit in turn, unchecked; medians of the decode speeds."""
    assert running.reference is not None
    fast = running.split
    if not all(isinstance(worker, LocalWorker) for worker in fast.workers):
        fast.relay = Relay()  # what comes after the checks
    elif not isinstance(fast, FlowPipeline):
        fast = FlowPipeline(common.local(fast))
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(runs):
        for pipeline, rates in ((fast, ours), (running.reference, theirs)):
            value = generate(pipeline, prompt, n_tokens, batch_size=batch_size).tokens_per_second
            if value is None:
                raise CommandError(_TOO_FEW)
            rates.append(value)
    split, unsplit = statistics.median(ours), statistics.median(theirs)
    return {
        "tokens_per_second": common.rate(split),
        "unsplit_tokens_per_second": common.rate(unsplit),
        "speed": {
            "runs": runs,
            "split": [common.rate(value) for value in ours],
            "unsplit": [common.rate(value) for value in theirs],
            "ratio": round(split / unsplit, 4),
        },
    }


def verdict(compared: int, differing: int, steps: int) -> str:
    """What the comparison came to, in words."""
    if differing:
        return f"{differing:,} of {compared:,} logits differ from the unsplit worker's"
    return (
        f"0 of {compared:,} logits differ in any bit from those of an unsplit worker "
        f"of the same patched build ({steps} {'step' if steps == 1 else 'steps'})"
    )


def _report(result: dict[str, Any], generation: Generation) -> None:
    def say(text: str) -> None:
        print(text, file=sys.stderr)

    rate, unsplit = result["tokens_per_second"], result["unsplit_tokens_per_second"]
    if result["checked"]:
        say(verdict(result["logits_compared"], result["logits_differing"], generation.steps))
    if "speed" in result:
        speed = result["speed"]
        say(
            f"decode speed, medians of {speed['runs']} runs in turn: split {rate:.1f} tokens/s, "
            f"unsplit {unsplit:.1f} tokens/s, ratio {speed['ratio']:.3f}"
        )
    elif rate is not None:
        how = " with both codecs checked on every hop" if result["checked"] and result["hops"] else ""
        beside = f", unsplit {unsplit:.1f}" if unsplit is not None else ""
        say(f"{common.counted(generation.steps, 'token')}, {rate:.1f} tokens/s{how}{beside}")


def _direct(options: argparse.Namespace) -> dict[str, Any] | None:
    """Options of the FlowPipeline; None when bundles go through this process."""
    if options.engine != "local":
        if options.hand_over is not None or options.spread:
            raise CommandError("--hand-over and --spread are for --engine local")
    elif options.check and options.hand_over == "direct":
        raise CommandError("--check looks at every bundle, so they go through the driver: leave out --hand-over direct")
    if options.engine != "local" or options.check or options.hand_over == "driver":
        for name in ("no_shared_memory", "no_checksums"):
            if getattr(options, name):
                raise CommandError(f"--{name.replace('_', '-')} is for --hand-over direct")
        return None
    return {"shared_memory": 0 if options.no_shared_memory else None, "checksums": not options.no_checksums}


def _hosts(options: argparse.Namespace, shards: int) -> Hosts | None:
    if options.engine == "local":
        for name in ("address", "hosts_model", "resources"):
            if getattr(options, name) is not None:
                raise CommandError(f"--{name.replace('_', '-')} is for --engine ray")
        return None
    resources = [] if options.resources is None else options.resources.split(",")
    if resources and len(resources) != shards:
        raise CommandError(f"--resources names {len(resources)}, and there are {common.counted(shards, 'shard')}")
    return Hosts(options.address, Path(os.path.abspath(options.hosts_model or options.model)), resources)


def _fault(options: argparse.Namespace) -> Fault | None:
    if options.plant_fault is None:
        return None
    if not options.check:
        raise CommandError("--plant-fault is for --check")
    hop, _, step = options.plant_fault.partition(":")
    if not (hop.isdecimal() and step.isdecimal()):
        raise CommandError(f"--plant-fault is {options.plant_fault!r}, not HOP:STEP")
    return Fault(int(hop), int(step))
