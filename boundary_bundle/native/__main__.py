"""python -m boundary_bundle.native build patched|unpatched|rpc | model | where, each with --json.

Standard output is the answer, standard error the progress. Exit status 2 with a reason if it cannot be done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from .build import KINDS, build
from .model import ensure_model, model_path
from .paths import cache_dir
from .process import NativeError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boundary_bundle.native", description="The native side.")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build libllama and the programs on it")
    building.add_argument("kinds", metavar="|".join(KINDS), nargs="+", choices=KINDS)
    commands.add_parser("model", help="get the demo model")
    commands.add_parser("where", help="say where things lie, making nothing")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        answer = _answer(options)
        _print(answer, options.json)
    except NativeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # such as a full disk
        told = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print(f"error: {told}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the next run continues", file=sys.stderr)
        return 130
    return 0


def _print(answer: dict[str, Any], as_json: bool) -> None:
    lines = [f"{name}: {value}" for name, value in answer.items()]
    try:
        print(json.dumps(answer, indent=2, sort_keys=True) if as_json else "\n".join(lines), flush=True)
    except OSError as error:
        # Nothing more is to be written at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise NativeError(f"cannot write standard output: {error.strerror}") from None


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    if options.command == "model":
        return {"model": str(ensure_model())}
    if options.command == "where":
        root = cache_dir()
        builds = sorted(str(path.parent) for path in root.glob("builds/*/complete.json"))
        model = model_path(root)
        return {"cache": str(root), "builds": builds, "model": str(model) if model.is_file() else None}
    done = {kind: build(kind) for kind in options.kinds}
    if options.json:
        return {kind: result.as_json() for kind, result in done.items()}
    return {f"{kind} {name}": path for kind, result in done.items() for name, path in result.programs.items()}


if __name__ == "__main__":
    sys.exit(main())
