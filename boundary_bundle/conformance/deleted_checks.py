"""Deletes each check of the decoder in turn: ``python -m boundary_bundle.conformance.deleted_checks [--json]``.

For each check a copy of the module is made in which its condition is never true; a
check of several conditions joined by *or* is also run without each one of them. Then
the vectors that name the check's section are run against the copy. A check whose
deletion none of them notices is a hole in the vectors: the command prints the table
and exits with 1 when there is one.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .. import contract as contract_module
from .. import decoder as decoder_module
from . import check
from .vectors import Vector, load

_STEP: Final = re.compile(r"# ([A-D]\d+)$")
#: Checks of section 6 that have no step stand where these errors are made.
_UNNUMBERED: Final = re.compile(r"truncated|trailing_bytes|contract_\w+")


@dataclass(frozen=True)
class Mutant:
    """A module with one check, or one of its conditions, deleted."""

    step: str
    #: The condition that was deleted, as source.
    condition: str
    line: int
    module: ModuleType

    @property
    def section(self) -> str:
        return f"6:{self.step}"


@dataclass(frozen=True)
class Row:
    """A line of the table: what was deleted, and the ids of the vectors that noticed."""

    step: str
    condition: str
    line: int
    asked: int
    caught: tuple[str, ...]


def _made(body: list[ast.stmt]) -> str | None:
    """The unnumbered error that a block makes directly, if it makes one."""
    for statement in body:
        if isinstance(statement, (ast.Raise, ast.Assign)):
            for node in ast.walk(statement):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == "failure"
                    and isinstance(node.args[0], ast.Constant)
                    and _UNNUMBERED.fullmatch(str(node.args[0].value))
                ):
                    return str(node.args[0].value)
    return None


def _checks(tree: ast.Module, source: str) -> Iterator[tuple[str, ast.If]]:
    steps = {number: match[1] for number, line in enumerate(source.splitlines(), 1) if (match := _STEP.search(line))}
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        # The comment stands on the last line of the condition.
        step = steps.get(node.test.end_lineno or 0)
        if step is not None:
            found.add(node.test.end_lineno)
            yield step, node
        elif (name := _made(node.body)) is not None:
            yield name, node
    if found != set(steps):
        raise ValueError(f"no condition on the lines {sorted(set(steps) - found)}, which name a step")


def _compile(original: ModuleType, tree: ast.Module) -> ModuleType:
    module = ModuleType(original.__name__)
    module.__package__ = original.__package__
    code = compile(ast.fix_missing_locations(tree), str(original.__file__), "exec")
    exec(code, module.__dict__)  # nosec B102: a module of this package, with a check taken out
    return module


def mutants(original: ModuleType) -> Iterator[Mutant]:
    """Every check of a module deleted, one at a time."""
    source = Path(str(original.__file__)).read_text("utf-8")
    tree = ast.parse(source)
    for step, node in _checks(tree, source):
        whole = node.test
        shown = ast.unparse(whole)
        node.test = ast.Constant(False)
        yield Mutant(step, shown, node.lineno, _compile(original, tree))
        if isinstance(whole, ast.BoolOp) and isinstance(whole.op, ast.Or):
            for index, condition in enumerate(whole.values):
                rest = whole.values[:index] + whole.values[index + 1 :]
                node.test = rest[0] if len(rest) == 1 else ast.BoolOp(ast.Or(), rest)
                yield Mutant(step, ast.unparse(condition), node.lineno, _compile(original, tree))
        node.test = whole
    # A check at the end of a loop's body has no condition of its own.
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and isinstance(loop.body[-1], ast.Raise):
            name = _made(loop.body[-1:])
            if name is not None:
                last = loop.body[-1]
                loop.body[-1] = ast.Pass()
                yield Mutant(name, "the end of the loop", last.lineno, _compile(original, tree))
                loop.body[-1] = last


def notices(vector: Vector, module: ModuleType) -> bool:
    """Whether a vector fails with ``module`` in place of the decoder's or the contract's."""
    contracts = not hasattr(module, "Decoder")
    decoder: Any = decoder_module if contracts else module

    def run(vector: Vector, way: str, sizes: Any, decoder: Any) -> check.Outcome:
        return check.run(vector, way, sizes, decoder, module if contracts else contract_module)

    try:
        return bool(check.faults_of(vector, decoder, quick=True, run=run))
    # Without its check the code behind it meets what it was never to meet.
    except Exception:
        return True


def compiled(original: ModuleType, source: str) -> ModuleType:
    """A module in place of ``original``, from this source."""
    return _compile(original, ast.parse(source))


def untouched(original: ModuleType) -> ModuleType:
    """A copy with every check in place, which no vector may notice."""
    return compiled(original, Path(str(original.__file__)).read_text("utf-8"))


def by_section() -> dict[str, list[Vector]]:
    """The vectors by the section that they name."""
    found: dict[str, list[Vector]] = {}
    for vector in load():
        found.setdefault(vector.section, []).append(vector)
    return found


def table() -> list[Row]:
    """One row a mutant, in the order of the source."""
    vectors = by_section()
    rows = []
    for original in (decoder_module, contract_module):
        for mutant in mutants(original):
            asked = vectors.get(mutant.section, [])
            caught = tuple(vector.id for vector in asked if notices(vector, mutant.module))
            rows.append(Row(mutant.step, mutant.condition, mutant.line, len(asked), caught))
    rows.sort(key=lambda row: (not _STEP.match(f"# {row.step}"), row.step[0], int(re.sub(r"\D", "", row.step) or 0)))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boundary_bundle.conformance.deleted_checks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args(arguments)
    rows = table()
    for row in rows:
        if options.json:
            print(json.dumps(vars(row)))
        else:
            seen = ", ".join(row.caught[:3]) + (", ..." if len(row.caught) > 3 else "")
            counts = f"{len(row.caught):>3} of {row.asked}"
            print(f"{row.step:<20} {counts:<10} {row.condition[:56]:<56}  {seen or 'NOT NOTICED'}")
    missed = [row for row in rows if not row.caught]
    if not options.json:
        print(f"{len(rows)} deletions, {len(missed)} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
