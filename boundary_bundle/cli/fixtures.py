"""``boundary-bundle fixtures``: record runs for a reviewer of the patches, with a C program that checks them."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..native import NativeBuild, build
from ..shards import make_plan, parse_cuts, read_model_file
from ..shards.fixtures import PROMPT, SETTINGS, FixtureError, Source, capture, families
from . import common
from .common import CommandError
from .files import shown


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "fixtures",
        help="record runs, with a C program that checks a patched libllama against them",
        description="Run a model split at the given layers and write every bundle that crosses a cut, the digests of "
        "the logits, a manifest, and a C program with a Makefile that feeds them to a patched libllama without "
        "Python. The same command gives the same bytes again. Exit status 0: written. 2: it could not be.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=common.file_name, metavar="FILE", help="a GGUF file; it stays where it is")
    which.add_argument("--family", metavar="NAME,..", help="tiny models, made in the folder: names, or all")
    parser.add_argument("--cuts", metavar="A,B", help="the first layers of the second and later shards")
    parser.add_argument(
        "-o", "--output", type=common.file_name, required=True, metavar="DIR", help="the folder to make"
    )
    parser.add_argument("--force", action="store_true", help="replace fixtures that are there")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"what is run ({PROMPT})")
    parser.add_argument("--tokens", type=common.number(0, 997), default=4, metavar="N", help="steps of one token (4)")
    parser.add_argument(
        "--sequences", type=common.number(1, 64), metavar="N", help="taking turns (1; of tiny models 2)"
    )
    parser.add_argument("--logits", action="store_true", help="write the logits too, not their digests alone")
    # The C program that reads them knows one kind of cache.
    common.add_settings(parser, SETTINGS, cache=False)
    parser.set_defaults(function=fixtures)


def fixtures(options: argparse.Namespace) -> int:
    """The command."""
    cuts = None if options.cuts is None else parse_cuts(options.cuts)
    common.check_prompt(options.prompt)
    if options.family is not None:
        try:
            sources = families(options.family, cuts)
        except FixtureError as error:
            raise CommandError(str(error)) from None
    else:
        if cuts is None:
            raise CommandError("a model needs --cuts: without a cut no bundle crosses a boundary")
        make_plan(read_model_file(options.model).n_layer, cuts)
        sources = [Source("model", tuple(cuts), options.model)]
    sequences = options.sequences or (1 if options.family is None else 2)
    given: Path | None = options.worker
    built = build("patched") if given is None else None
    try:
        manifest = capture(
            options.output,
            sources,
            built.worker if built is not None else options.worker,
            settings=replace(common.settings_of(options), seqs=sequences),
            prompt=options.prompt,
            n_tokens=options.tokens,
            logits=options.logits,
            library=None if built is None else library(built),
            force=options.force,
            timeout=options.timeout,
        )
    except FixtureError as error:
        raise CommandError(str(error)) from None
    steps = sum(len(entry["steps"]) for entry in manifest["fixtures"])
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    fixtures = common.counted(len(manifest["fixtures"]), "fixture")
    print(f"{shown(options.output)}: {fixtures}, {common.counted(steps, 'step')}, {size:,} bytes")
    if built is not None:
        words = ["make", "-C", str(options.output), "check", f"LLAMA={built.source_dir}", f"LIB={built.lib_dir}"]
        if options.model is not None:
            words.append(f"MODEL={options.model.resolve()}")
        print(shown(shlex.join(words)))
    return 0


def library(built: NativeBuild) -> dict[str, Any]:
    """What the recorded bytes depend on beside the model, without what differs from folder to folder and day to day."""
    told = built.provenance
    source, ingredients = told.get("source", {}), told.get("ingredients", {})
    return {
        "source": {key: source[key] for key in ("pin", "origin", "project", "version", "hash") if key in source},
        **{key: ingredients[key] for key in ("patches", "flags", "compilers", "processor") if key in ingredients},
    }


__all__ = ["add_command", "fixtures", "library"]
