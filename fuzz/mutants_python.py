"""Mutants of the Python decoder: each comparison and each check of its modules otherwise, one at a time.

A mutant is made in a process of its own, by giving the function its mutated code: whoever imported the function, or
holds an object with the method, then runs it. So nothing is imported anew, and a mutant costs a fork.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import os
import resource
import select
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mutants_model import Fate, Mutant, numbered

ROOT = Path(__file__).resolve().parent.parent
#: Modules that decode, and of those that also do other things the functions and classes that do not, or that have run
#: when a mutant is made.
MODULES = {
    "decoder": (),
    "contract": (),
    "layout": ("struct_format",),
    "dtypes": ("dtype_of", "order_of", "to_order", "payload_view", "DType.logical_shape", "DType.__init__"),
    "prepared": ("_EncoderForm", "_TensorForm", "PreparedEncoder"),
}
#: What is run where no vector notices: arguments of a call, and what a caller sees of a decoder.
TESTS = {"contract": "test_contract.py", "prepared": "test_prepared.py"}
OTHER_TESTS = "test_codec.py"
#: Seconds of processor time for all vectors, which sound take three, and for the tests.
PATIENCE, PATIENCE_OF_TESTS = 30, 120
#: Bytes that a mutant may take beyond what it began with.
MEMORY = 2 << 30

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: A mutation: what it is called, what stood there and what stands there now, and how it is done and undone.
Change = tuple[str, str, str, ast.AST, Callable[[], None], Callable[[], None]]

_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
#: The other direction of the bound, where a flip is one off already.
_BEYOND: dict[type[ast.cmpop], type[ast.operator]] = {
    **{ast.Lt: ast.Sub, ast.LtE: ast.Add, ast.Gt: ast.Add, ast.GtE: ast.Sub},
}


def _put(place: Any, name: str | int, new: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """How an attribute, or an item of a list, is replaced, and how it is put back."""
    if isinstance(name, int):
        old = place[name]
        return (lambda: place.__setitem__(name, new)), (lambda: place.__setitem__(name, old))
    old = getattr(place, name)
    return (lambda: setattr(place, name, new)), (lambda: setattr(place, name, old))


def _changes(function: Function) -> Iterator[Change]:
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            for index, sign in enumerate(node.ops):
                text = ast.unparse(node)
                yield "flip", text, "", node, *_put(node.ops, index, _FLIPS[type(sign)]())
                beyond = _BEYOND.get(type(sign))
                if beyond is not None:
                    moved = ast.BinOp(node.comparators[index], beyond(), ast.Constant(1))
                    yield "bound", text, "", node, *_put(node.comparators, index, moved)
        elif isinstance(node, ast.BoolOp):
            # Of a chain its ends, or a note would have to change with any of its conditions.
            first, last = ast.unparse(node.values[0]), ast.unparse(node.values[-1])
            word, other = ("or", "and") if isinstance(node.op, ast.Or) else ("and", "or")
            swapped = _put(node, "op", ast.And() if word == "or" else ast.Or())
            yield "and/or", f"{first} {word} .. {last}", f"{first} {other} .. {last}", node, *swapped
            for index, value in enumerate(node.values):
                # Python has no `and` of one condition: a constant that changes nothing takes its place.
                neutral = ast.Constant(word == "and")
                rest = _put(node, "values", [*node.values[:index], neutral, *node.values[index + 1 :]])
                yield "condition", f"{word}: {ast.unparse(value)}", "left out", node, *rest
        elif isinstance(node, (ast.If, ast.IfExp)):
            kind = "if" if isinstance(node, ast.If) else "choice"
            text = ast.unparse(node.test)
            yield "check", f"{kind} {text}", f"{kind} False", node, *_put(node, "test", ast.Constant(False))
            if not isinstance(node.test, (ast.Compare, ast.BoolOp)):
                opposite = (
                    node.test.operand if isinstance(node.test, ast.UnaryOp) else ast.UnaryOp(ast.Not(), node.test)
                )
                yield "flip", f"{kind} {text}", f"{kind} {ast.unparse(opposite)}", node, *_put(node, "test", opposite)
        elif isinstance(node, ast.While) and not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.Constant)):
            text = f"while {ast.unparse(node.test)}"
            yield "check", text, "while False", node, *_put(node, "test", ast.Constant(False))
        elif isinstance(node, ast.comprehension):
            for index, test in enumerate(node.ifs):
                text = f"for if {ast.unparse(test)}"
                yield "condition", text, "for if True", node, *_put(node.ifs, index, ast.Constant(True))


class Module:
    """A module's source, and where its functions live."""

    def __init__(self, name: str, left_out: Sequence[str]) -> None:
        self.live = importlib.import_module(f"boundary_bundle.{name}")
        self.file = f"boundary_bundle/{name}.py"
        self.tree = ast.parse((ROOT / self.file).read_text("utf-8"))
        self.functions: list[tuple[str, Function]] = []
        gone = set(left_out)
        for node in self.tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for one in inner:
                if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                path = f"{prefix}{one.name}"
                if path in left_out or prefix[:-1] in left_out:
                    gone -= {path, prefix[:-1]}
                elif one.name != "__repr__" and not self._is_declared(one):
                    self.functions.append((path, one))
        if gone:
            raise ValueError(f"{self.file} does not have what mutants_python.py leaves out: {', '.join(sorted(gone))}")

    @staticmethod
    def _is_declared(function: Function) -> bool:
        """A protocol's, whose body is three dots."""
        return ast.unparse(function.body[-1]) == "..."

    def put(self, path: str) -> None:
        """Give the live function the code that its tree has now."""
        # Alone, in its class: the whole module takes twenty times as long to compile.
        body: ast.stmt = dict(self.functions)[path]
        for name in reversed(path.split(".")[:-1]):
            body = ast.ClassDef(name, [], [], [body], [])
        code = compile(
            ast.fix_missing_locations(ast.Module([body], [])),
            str(ROOT / self.file),
            "exec",
            __future__.annotations.compiler_flag,
        )
        found: Any = self.live
        for name in path.split("."):
            code = next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)
            found = vars(found)[name]
        if isinstance(found, property):
            found = found.fget
        getattr(found, "__func__", found).__code__ = code


class Mutations:
    """All mutants, and how each is made."""

    def __init__(self) -> None:
        self.mutants: list[Mutant] = []
        self._made: list[tuple[Module, str, Callable[[], None]]] = []
        for name, left_out in MODULES.items():
            module = Module(name, left_out)
            for path, function in module.functions:
                seen: set[tuple[str, str, str]] = set()
                for kind, old, new, node, do, undo in _changes(function):
                    if not new:
                        do()
                        new = ast.unparse(node)
                        undo()
                    told = numbered(seen, path, old, new)
                    number = len(self.mutants) + 1
                    line = getattr(node, "lineno", function.lineno)
                    self.mutants.append(Mutant(number, "python", module.file, path, line, kind, told, new))
                    self._made.append((module, path, do))

    def make(self, number: int) -> None:
        """In a process that ends soon: there is no way back."""
        module, path, do = self._made[number - 1]
        do()
        module.put(path)


# ---- the vectors ------------------------------------------------------------------------


class Vectors:
    """The vectors, as every way of decoding is asked about them."""

    def __init__(self) -> None:
        from boundary_bundle.conformance import check
        from boundary_bundle.conformance.vectors import load

        self.check = check
        self.all = list(load())
        for vector in self.all:
            _ = (vector.data, vector.bundles, vector.reencoded)
        # What a prepared decoder has learnt, and what it meets then: of the same length, or it would not compare.
        alone = [vector for vector in self.all if "one" in vector.classes]
        known: dict[tuple[int, str], list[Any]] = {}
        for vector in alone:
            if vector.result == "valid":
                known.setdefault(self._alike(vector), []).append(vector)
        self.pairs = [
            (first, second) for second in alone for first in self._nearest(second, known.get(self._alike(second), []))
        ]

    @staticmethod
    def _nearest(vector: Any, others: Sequence[Any]) -> list[Any]:
        """The two that differ from it in the fewest bytes: a form fits none that differs in more than values."""
        data = np.frombuffer(vector.data, np.uint8)
        away = {other.id: int((np.frombuffer(other.data, np.uint8) != data).sum()) for other in others}
        return sorted((other for other in others if other is not vector), key=lambda other: away[other.id])[:2]

    @staticmethod
    def _alike(vector: Any) -> tuple[int, str]:
        told = f"{vector.limits} {vector.contract} {'require_checksums' in vector.flags}"
        return len(vector.data), told

    def noticing(self) -> tuple[int, str]:
        """How many were run, and the one that differs from its verdict, or none."""
        count = 0
        for quick in (True, False):
            for vector in self.all:
                count += quick
                if self._differs(lambda vector=vector, quick=quick: self.check.faults_of(vector, quick=quick)):
                    return count, vector.id
        for vector in self.all:
            if vector.contract is not None and self._differs(lambda vector=vector: self._other_text(vector)):
                return count, f"{vector.id} (text of its contract)"
        for first, second in self.pairs:
            if self._differs(lambda first=first, second=second: self._prepared(first, second)):
                return count, f"{second.id} after {first.id}"
        return count, ""

    @staticmethod
    def _differs(ask: Callable[[], Any]) -> bool:
        try:
            return bool(ask())
        # A decoder without its check meets what it was never to meet.
        except Exception:
            return True

    def _other_text(self, vector: Any) -> bool:
        contract = self.check.contract_of(vector)
        told = (contract.text(), contract.fingerprint().hex())
        return told != (vector.contract["text"], vector.contract["fingerprint"])

    def _prepared(self, first: Any, second: Any) -> list[str]:
        """A decoder that has learnt ``first``, and so knows what most of ``second`` must be."""
        from boundary_bundle import BundleError, Limits, PreparedDecoder

        decoder = PreparedDecoder(
            self.check.contract_of(second),
            limits=Limits(**second.limits),
            require_checksums="require_checksums" in second.flags,
        )
        faults: list[str] = []
        # The second turn meets what the first has learnt.
        for vector in (first, first, second):
            try:
                outcome: Any = ([decoder.decode(vector.data)], None)
            except BundleError as error:
                outcome = ([], error)
            faults += self.check.verdict(vector, outcome)
        return faults


def tests_of(file: str) -> str:
    """The tests of a module."""
    return TESTS.get(Path(file).stem, OTHER_TESTS)


def _fail(tests: str) -> bool:
    import pytest

    # Drawn damage takes longer than all others together, and the vectors have come before.
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", "not test_damage_is_named_alike"]
    return pytest.main([*quiet, str(ROOT / "tests" / tests)]) != 0


def _child(make: Callable[[], None], work: Callable[[], tuple[int, str]], seconds: int) -> tuple[int, str, str]:
    """Do it in a process of its own: count, what was found, and how it ended. Raises ValueError if ``make`` does."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            with open("/proc/self/statm", encoding="ascii") as file:
                size = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            try:
                make()
            except Exception as error:
                os.write(write, f"-1 {type(error).__name__}: {error}".encode())
                os._exit(1)
            count, found = work()
            os.write(write, f"{count} {found}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    said = b""
    # Beyond processor time, a mutant that waits.
    while select.select([read], [], [], 20 * seconds)[0]:
        part = os.read(read, 4096)
        if not part:
            break
        said += part
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, 9)
    os.waitpid(child, 0)
    count, _, found = said.decode().partition(" ")
    if count == "-1":
        raise ValueError(f"a mutant cannot be made: {found}")
    return (int(count), found, "") if said else (0, "", "ends without a word")


def run(
    mutations: Mutations, mutants: Sequence[Mutant], tell: Callable[[], None], tests: bool = True
) -> dict[int, Fate]:
    """What became of each; the decoder as it is must live. ``tell`` is called at each."""
    vectors = Vectors()

    def fate_of(number: int, file: str) -> Fate:
        def make() -> None:
            if number:
                mutations.make(number)

        count, found, ended = _child(make, vectors.noticing, PATIENCE)
        if found or ended:
            return Fate("vectors", found or ended, count)
        if tests:
            mine = tests_of(file)
            _, found, ended = _child(make, lambda: (0, mine if _fail(mine) else ""), PATIENCE_OF_TESTS)
            if found or ended:
                return Fate("tests", found or ended, count)
        return Fate("lives", "", count)

    for file in sorted({tests_of(mutant.file): mutant.file for mutant in mutants}.values()):
        fate = fate_of(0, file)
        if fate.by != "lives":
            raise ValueError(f"the Python decoder without a mutation fails {fate.what}")
    fates = {}
    for mutant in mutants:
        fates[mutant.number] = fate_of(mutant.number, mutant.file)
        tell()
    return fates
