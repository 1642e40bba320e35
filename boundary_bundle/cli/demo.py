"""``boundary-bundle demo``: a real model over three processes, with everything shown and every logit checked."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..native import ensure_model
from ..shards import Generation, generate, make_plan, parse_cuts, read_model_file
from . import common
from .common import Run, print_styled, print_table
from .run import speed, verdict

_PROMPT = "Why is the sky blue? Answer in three sentences."
_MB = 1e6


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="build everything, then run a trained model over three processes",
        description="Build llama.cpp with the series, get SmolLM2-135M-Instruct, split it over three processes, stream "
        "its text, and compare every logit with those of the unsplit worker of the same patched build.",
    )
    parser.add_argument("--model", type=common.file_name, metavar="FILE", help="another GGUF file")
    parser.add_argument("--cuts", metavar="A,B", help="other cuts (two, at thirds)")
    parser.add_argument("--prompt", default=_PROMPT, metavar="TEXT", help="another question")
    parser.add_argument("--tokens", type=common.number(2, 1 << 20), default=64, metavar="N", help="at most (64)")
    common.add_settings(parser)
    parser.set_defaults(function=demo)


def demo(options: argparse.Namespace) -> int:
    """The command. Returns 1 if a logit differs, else 0."""
    common.check_prompt(options.prompt)
    cuts = None if options.cuts is None else parse_cuts(options.cuts)
    if options.model is not None:
        read_model_file(options.model)
    program = common.worker_program(options)
    path = options.model if options.model is not None else ensure_model()
    model = read_model_file(path)
    thirds = [cut for cut in (model.n_layer // 3, model.n_layer * 2 // 3) if cut]
    plan = make_plan(model.n_layer, thirds if cuts is None else cuts)
    settings = common.settings_of(options)
    ranges = " ".join(f"[{start},{end})" for start, end in plan)
    print(f"model    {path.name}: {model.architecture}, {model.n_layer} layers, {model.size / _MB:.1f} MB")
    print(f"shards   {ranges}: {len(plan)} processes of {settings.threads} threads, one computing at a time")
    print("check    against an unsplit worker of the patched build (make test compares with the unpatched build)")
    with common.workers(
        program, model.path, plan, settings, check=True, unsplit=True, timeout=options.timeout
    ) as running:
        prompt = running.texts.tokenize(_chat(options.prompt))
        common.require_room(settings, len(prompt), options.tokens)
        print_styled(f"\n> {options.prompt}", "bold")
        eos = running.split.model.eos
        printer = common.Printer(running.texts, eos)
        generation = generate(
            running.split,
            prompt,
            options.tokens,
            batch_size=settings.batch,
            eos=eos,
            reference=running.reference,
            on_token=printer,
        )
        printer.finish()
        print()
        _tables(running, generation, model.size)
        rates: dict[str, Any] = {}
        if generation.steps > 1:
            rates = speed(running, prompt, min(generation.steps, 32), settings.batch, 3)
    if rates:
        print(
            f"decode speed without the checks, medians of 3 runs in turn: split "
            f"{rates['tokens_per_second']:.1f} tokens/s, unsplit {rates['unsplit_tokens_per_second']:.1f} tokens/s"
        )
    good = generation.logits_differing == 0
    sentence = verdict(generation.logits_compared, generation.logits_differing, generation.steps)
    print_styled(sentence, "bold green" if good else "bold red")
    return 0 if good else 1


def _chat(question: str) -> str:
    """The model's own template for one question."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _tables(running: Run, generation: Generation, file_bytes: int) -> None:
    whole = running.unsplit()
    assert whole is not None
    shards = running.shards()
    rows = []
    for place, shard in enumerate(shards):
        start, end = shard["range"]
        rows.append([f"{place + 1}", f"{start} to {end - 1}", *_megabytes(shard), f"{generation.shard_ms(place):.2f}"])
    start, end = whole["range"]
    compute = generation.reference_ms
    rows.append(["unsplit", f"{start} to {end - 1}", *_megabytes(whole), "-" if compute is None else f"{compute:.2f}"])
    print_table(
        f"shards (MB; the file has {file_bytes / _MB:.1f}; ms: median computing time of a token)",
        ["shard", "layers", "resident", "weights", "KV", "ms"],
        rows,
    )
    print()
    hops = []
    for place, hop in enumerate(common.hops_of(running, generation)):
        last = generation.all_steps[-1].hops[place]
        hops.append(
            [
                f"{place + 1} to {place + 2}",
                f"{hop['layer']}",
                f"{last.bytes:,}",
                f"{hop['bytes']:,}",
                f"{hop['encode_us']:.1f}",
                f"{hop['decode_us']:.1f}",
                f"{hop['python_decode_us'] + hop['python_encode_us']:.0f}",
            ]
        )
    if hops:
        print_table(
            "hops (bundle bytes; microseconds a bundle, means with the prompt's)",
            ["hop", "at layer", "one token", "mean", "C encode", "C decode", "Python both"],
            hops,
        )
        print()
    sys.stdout.flush()


def _megabytes(memory: dict[str, Any]) -> list[str]:
    return [f"{memory[key] / _MB:.1f}" for key in ("resident_bytes", "weight_bytes", "kv_bytes")]
