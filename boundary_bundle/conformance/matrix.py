"""Who reads whose bundles: every testee writes each bundle of the vectors, every testee reads what each wrote."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .asks import Ask, Case, Expected, lacking
from .runner import Outcome, Runner, Unusable, settle
from .testee import Trouble, shown


@dataclass
class Cell:
    """What one testee made of another's bundles."""

    encoder: str
    decoder: str
    #: Bundles that it delivered as they had been given to the encoder.
    read: int = 0
    skipped: int = 0
    #: Why it skipped the first of those.
    reason: str = ""
    #: Bundle (the vector's id) and what is wrong.
    wrong: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Matrix:
    """The whole table. ``cells`` go by encoder, then by decoder."""

    #: How many bundles each encoder was given.
    bundles: int
    cells: list[Cell] = field(default_factory=list)
    #: Name -> its answer to hello.
    testees: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Name and reason: testees that are not there at all, or have no row or no column.
    left_out: list[tuple[str, str]] = field(default_factory=list)
    #: Name and reason: testees whose row or column is not full.
    partly: list[tuple[str, str]] = field(default_factory=list)
    #: Encoder, bundle, reason: what was to be written and was not.
    unwritten: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def encoders(self) -> list[str]:
        return list(dict.fromkeys(cell.encoder for cell in self.cells))

    @property
    def decoders(self) -> list[str]:
        return list(dict.fromkeys(cell.decoder for cell in self.cells))

    def cell(self, encoder: str, decoder: str) -> Cell:
        return next(cell for cell in self.cells if (cell.encoder, cell.decoder) == (encoder, decoder))

    @property
    def full(self) -> bool:
        """Every decoder has read every bundle from every encoder."""
        return bool(self.cells) and all(cell.read == self.bundles for cell in self.cells)

    @property
    def status(self) -> int:
        """0: nothing is wrong. 1: something is. 2: nobody read anything."""
        if self.unwritten or any(cell.wrong for cell in self.cells):
            return 1
        return 0 if any(cell.read for cell in self.cells) else 2


def make(
    commands: Mapping[str, Sequence[str]],
    cases: Sequence[Case],
    *,
    left_out: Mapping[str, str] | None = None,
    time_limit: float = 10.0,
    restarts: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> Matrix:
    """The matrix of the testees that ``commands`` start, by name, over the bundles of the cases for encoders.

    A testee that writes nothing gets no row, one that reads nothing no column; ``left_out``
    says so, with the reason, beside the names and reasons that are given there. Raises
    Unusable when no case has a bundle to write.
    """
    started = time.monotonic()
    # Bundles that are to be refused are the kit's business.
    asks = [ask for case in cases if case.mode == "encode" for ask in case.asks if ask.expected.data is not None]
    if not asks:
        raise Unusable("no case with a bundle to write is selected")
    matrix = Matrix(len(asks), left_out=list((left_out or {}).items()))
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name, command in commands.items():
            runner = stack.enter_context(Runner(command, time_limit=time_limit, restarts=restarts))
            try:
                matrix.testees[name] = runner.start()
                runners[name] = runner
            except Unusable as error:
                matrix.left_out.append((name, str(error)))
        written: dict[str, list[tuple[Ask, str]]] = {}
        for number, (name, runner) in enumerate(runners.items(), 1):
            bundles, reason = _write(runner, asks, matrix, name)
            if bundles:
                written[name] = bundles
                if reason:
                    matrix.partly.append((name, f"writes {len(bundles)} of {len(asks)}: {reason}"))
            elif reason:
                matrix.left_out.append((name, f"writes nothing: {reason}"))
            if progress is not None:
                progress(number, 2 * len(runners))
        columns: dict[str, list[Cell]] = {}
        for number, (name, runner) in enumerate(runners.items(), 1):
            if not runner.hello["classes"]:
                matrix.left_out.append((name, "reads nothing: it claims no class of decoder"))
                continue
            column = [_read(runner, bundles, Cell(encoder, name)) for encoder, bundles in written.items()]
            if any(cell.read or cell.wrong for cell in column):
                columns[name] = column
                most = max(column, key=lambda cell: cell.skipped)
                if most.skipped:
                    matrix.partly.append((name, f"skips {most.skipped} from {most.encoder}: {most.reason}"))
            elif column:
                matrix.left_out.append((name, f"reads nothing: {column[0].reason}"))
            if progress is not None:
                progress(len(runners) + number, 2 * len(runners))
        for runner in runners.values():
            runner.stop()
    matrix.cells = [column[row] for row in range(len(written)) for column in columns.values()]
    matrix.seconds = time.monotonic() - started
    return matrix


def _outcomes(runner: Runner, asks: Sequence[Ask]) -> Iterator[tuple[Ask, str, Outcome]]:
    """Each ask, the data of its answer (or nothing), and what is to be made of it. What is not claimed is not asked."""
    outcomes = {id(ask): Outcome(ask.case) for ask in asks}
    data: dict[int, str] = {}

    def take(ask: Ask, answer: dict[str, Any] | Trouble) -> None:
        # More than once for the one under suspicion after a crash; the worst counts.
        settle(outcomes[id(ask)], ask, answer, runner.hello)
        if isinstance(answer, dict):
            data[id(ask)] = str(answer.get("data", ""))

    reasons = [lacking(ask.case, runner.hello) for ask in asks]
    asked = [ask for ask, reason in zip(asks, reasons, strict=True) if reason is None]
    for ask in runner.ask_all(asked, take):
        take(ask, {"failed": runner.gave_up})
    for ask in asked:
        yield ask, data.get(id(ask), ""), outcomes[id(ask)]
    # Last: what the testee itself says is the better reason.
    for ask, reason in zip(asks, reasons, strict=True):
        if reason is not None:
            yield ask, "", Outcome(ask.case, "skipped", [reason])


def _reason(outcome: Outcome) -> str:
    details = outcome.details
    return details[0] + (f", and {len(details) - 1} more" if len(details) > 1 else "") if details else ""


def _write(runner: Runner, asks: Sequence[Ask], matrix: Matrix, name: str) -> tuple[list[tuple[Ask, str]], str]:
    """What a testee has written for each ask, whatever it is, and why it skipped one, if it did."""
    bundles = []
    skipped = ""
    for ask, data, outcome in _outcomes(runner, asks):
        if outcome.result == "skipped":
            skipped = skipped or outcome.details[0]
        elif outcome.result in ("passed", "wrong") and re.fullmatch("([0-9a-f]{2})+", data):
            # Whether it is canonical is the kit's business; here others are to read it.
            bundles.append((ask, data))
        else:
            reason = _reason(outcome) or "its data is no lower-case hexadecimal"
            matrix.unwritten.append((name, ask.case.vector.id, reason))
    return bundles, skipped


def _read(runner: Runner, bundles: Sequence[tuple[Ask, str]], cell: Cell) -> Cell:
    """Fill the cell: have a testee read what another has written."""
    mode = next(mode for mode in ("one", "core", "stream") if mode in runner.hello["classes"])
    asks = []
    for ask, data in bundles:
        told = json.loads("{" + ask.body)
        request = {"cmd": "decode", "class": mode, "data": data}
        if "limits" in told:
            request["limits"] = told["limits"]
        body = json.dumps(request, separators=(",", ":"))[1:]
        asks.append(Ask(ask.case, mode, body, Expected((told["bundle"],))))
    for ask, _, outcome in _outcomes(runner, asks):
        if outcome.result == "passed":
            cell.read += 1
        elif outcome.result == "skipped":
            cell.skipped += 1
            cell.reason = cell.reason or outcome.details[0]
        else:
            cell.wrong.append((ask.case.vector.id, _reason(outcome)))
    return cell


def cell_text(cell: Cell, bundles: int) -> str:
    """A cell in a few characters."""
    if cell.wrong:
        return f"{len(cell.wrong)} WRONG"
    return f"{cell.read}" if cell.read == bundles else f"{cell.read} of {bundles}"


def verdict(matrix: Matrix) -> str:
    """The matrix in one sentence."""
    counts = ((len(matrix.encoders), "writer"), (len(matrix.decoders), "reader"), (matrix.bundles, "bundle"))
    table = ", ".join(f"{count:,} {what}{'' if count == 1 else 's'}" for count, what in counts)
    wrong = sum(len(cell.wrong) for cell in matrix.cells) + len(matrix.unwritten)
    partly = sum(cell.read < matrix.bundles for cell in matrix.cells)
    told = "every cell is full" if matrix.full else f"{partly} of {len(matrix.cells)} cells are not full"
    if wrong:
        told = f"{wrong:,} wrong, {told}"
    return f"{table}; {told}; {matrix.seconds:.1f} s"


def _such_as(wrong: Sequence[tuple[str, str]]) -> str:
    bundle, reason = wrong[0]
    return f"{bundle}: {reason}" if len(wrong) == 1 else f"{len(wrong)} bundles, such as {bundle}: {reason}"


def describe(matrix: Matrix) -> Iterator[str]:
    """What stands below the table: what is wrong, and who is not in it."""
    unwritten: dict[str, list[tuple[str, str]]] = {}
    for encoder, bundle, reason in matrix.unwritten:
        unwritten.setdefault(encoder, []).append((bundle, reason))
    for encoder, wrong in unwritten.items():
        yield f"wrong: {encoder} does not write {_such_as(wrong)}"
    # A reader with a fault has it with every writer, the fault of a writer shows with every reader.
    by_reader: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for cell in matrix.cells:
        if cell.wrong:
            by_reader.setdefault((cell.decoder, tuple(cell.wrong)), []).append(cell.encoder)
    by_both: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for (decoder, cases), encoders in by_reader.items():
        by_both.setdefault((", ".join(encoders), cases), []).append(decoder)
    for (written_by, cases), decoders in by_both.items():
        yield f"wrong: from {written_by} to {', '.join(decoders)}: {_such_as(cases)}"
    for kind, entries in (("not full", matrix.partly), ("left out", matrix.left_out)):
        for name, reason in entries:
            yield f"{kind}: {name}: {shown(reason.encode('utf-8', 'replace'), 400)}"


def to_json(matrix: Matrix) -> dict[str, Any]:
    """The matrix for programs."""
    return {
        "bundles": matrix.bundles,
        "seconds": round(matrix.seconds, 3),
        "testees": {
            name: {key: hello[key] for key in ("name", "language", "version")} for name, hello in matrix.testees.items()
        },
        "not_full": [{"name": name, "reason": reason} for name, reason in matrix.partly],
        "left_out": [{"name": name, "reason": reason} for name, reason in matrix.left_out],
        "unwritten": [
            {"encoder": encoder, "vector": bundle, "detail": reason} for encoder, bundle, reason in matrix.unwritten
        ],
        "cells": [
            {
                "encoder": cell.encoder,
                "decoder": cell.decoder,
                "read": cell.read,
                "skipped": cell.skipped,
                "wrong": [{"vector": bundle, "detail": reason} for bundle, reason in cell.wrong],
            }
            for cell in matrix.cells
        ],
    }
