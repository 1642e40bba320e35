"""The command line: one module a command.

``plan`` says where to cut a model; ``run``, ``demo``, ``describe``, ``strip``, ``fixtures``, ``certify`` drive models;
``serve`` keeps one up and ``top`` watches it; ``inspect``, ``validate``, ``diff``, ``convert`` take files;
``conformance`` checks codecs.

Exit status 0: done, or yes. 1: no, such as a logit that differs from the unsplit run's, or an invalid file.
2: it could not be done, for the reason on standard error. 130: interrupted. With BOUNDARY_BUNDLE_TRACEBACK=1 the
sentence of a failure that nobody foresaw follows its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

__all__ = ["main"]


class _Usage(Exception):
    """The command line cannot be understood; one sentence for the user."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One sentence, like every other refusal; --help has the usage.
        raise _Usage(f"{message[:1].lower()}{message[1:]} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    # Here and not above: they load for a while, and a Ctrl-C in that time is to be answered like any other.
    from . import (
        certify,
        completion,
        conformance,
        convert,
        demo,
        describe,
        diff,
        fixtures,
        inspect,
        manual,
        plan,
        run,
        serve,
        shim,
        strip,
        top,
        validate,
    )

    parser = _Parser(
        prog="boundary-bundle",
        description="Run one model split by layers over several processes; look at what passes between them.",
    )
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        plan,
        run,
        demo,
        describe,
        strip,
        fixtures,
        certify,
        serve,
        top,
        inspect,
        validate,
        diff,
        convert,
        shim,
        conformance,
        completion,
    ):
        module.add_command(commands)
    manual.complete(parser, commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every refusal is one sentence on standard error."""
    output = _Output(sys.stdout)
    try:
        _open_streams()
        sys.stdout = output = _Output(sys.stdout)
        try:
            options = _parser().parse_args(arguments)
            status = int(options.function(options))
        except SystemExit:  # --help, which does not tell whether it could be written
            output.complete()
            raise
        output.complete()
        return status
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read our output has left, and knows it.
        return 2
    except Exception as error:
        _say(f"error: {_sentence(error, output.failure)}")
        return 2
    finally:
        if sys.stdout is output:
            sys.stdout = output.stream
        _settle_output()


class _Output(io.TextIOBase):
    """Standard output, and the first failure to write it, even if whoever wrote passed over it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self.failure = self.failure or error
            raise

    def complete(self) -> None:
        """Raises OSError if anything was not written."""
        self.flush()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """The stream is not ours to close."""

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors


def _open_streams() -> None:
    """Make sure that all three standard streams are there, and that any text can be written."""
    closed = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Otherwise the next file that is opened would be the standard stream of every child.
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    if closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
        raise _Usage("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may say what the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")


def _sentence(error: Exception, output_failure: OSError | None) -> str:
    """What the user is told: the reason, without a traceback unless BOUNDARY_BUNDLE_TRACEBACK is set."""
    from ..native import NativeError
    from ..shards import PipelineError, PlanError, WorkerError
    from .common import CommandError, shown

    if isinstance(error, NativeError):
        return str(error)
    if isinstance(error, (_Usage, CommandError, PipelineError, PlanError, WorkerError)):
        return shown(str(error))  # names out of files may hold anything
    traced = os.environ.get("BOUNDARY_BUNDLE_TRACEBACK", "") not in ("", "0")
    if traced:
        import traceback

        with contextlib.suppress(OSError):
            traceback.print_exc(file=sys.stderr)
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error is output_failure:
            return f"cannot write standard output: {reason}"
        return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    told = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")
    hint = "" if traced else " (with BOUNDARY_BUNDLE_TRACEBACK=1 it says where)"
    return f"something unforeseen: {told}{hint}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _settle_output() -> None:
    """Keep the interpreter from complaining at its end about what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                place = os.open(os.devnull, os.O_WRONLY)
                os.dup2(place, stream.fileno())
                os.close(place)
