"""The command line: one module a command.

``run``, ``demo``, ``describe``, ``fixtures`` drive models; ``inspect``, ``validate``, ``diff``, ``convert`` take files;
``conformance`` checks codecs.

Exit status 0: done, or yes. 1: no, such as a logit that differs from the unsplit run's, or an invalid file.
2: it could not be done, for the reason on standard error. 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..native import NativeError
from ..shards import PipelineError, PlanError, WorkerError
from . import completion, conformance, convert, demo, describe, diff, fixtures, inspect, manual, run, shim, validate
from .common import CommandError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One sentence, like every other refusal; --help has the usage.
        raise CommandError(f"{message[:1].lower()}{message[1:]} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="boundary-bundle",
        description="Run one model split by layers over several processes; look at what passes between them.",
    )
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (run, demo, describe, fixtures, inspect, validate, diff, convert, shim, conformance, completion):
        module.add_command(commands)
    manual.complete(parser, commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every refusal is one sentence on standard error."""
    try:
        options = _parser().parse_args(arguments)
        status = options.function(options)
        sys.stdout.flush()
        return int(status)
    except (CommandError, NativeError, PipelineError, PlanError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has left; keep the interpreter from complaining about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
