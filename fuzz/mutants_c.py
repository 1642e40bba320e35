"""Mutants of the C decoder: each comparison and each check of boundary_bundle.c otherwise, one at a time.

All of them stand in one program, which the variable ``bb_mutant`` switches: a comparison becomes a choice between
itself and what it is mutated to. So the codec is compiled once, and a mutant costs a fork.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants_model import Fate, Mutant, numbered, squeeze

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "native_shim"
FILE = "native_shim/boundary_bundle.c"
#: Sections of the source that decode, or compare with a contract, which are all but these: a checksum, names, sentences
#: and the encoder. A new section is mutated, a new function of one too.
LEFT_OUT = ("CRC32C", "registries", "the text of an error", "encoding", "for bindings")
#: Functions of the other sections that only put a sentence together, or only the encoder calls.
PHRASING = (
    *("expected_text", "found_text", "put_quoted", "put_attr", "fail_demand", "fail_dtype", "fail_dim", "fail_axis"),
    *("fail_rule", "fail_config", "fail_tensor", "fail_attr", "fail_fragment", "no_contract", "bb_prepared_encode"),
    *("bb_prepared_encode_parts", "bb_prepare_encode"),
)
#: Seconds of processor time that a mutant may take for all vectors, which take less than one when nothing is wrong, and
#: three with sanitizers, and for the tests.
PATIENCE, PATIENCE_OF_TESTS = 10, 30

_TOKEN = re.compile(
    r"(?P<skip>\s+|/\*.*?\*/|\#(?:[^\n\\]|\\.|\\\n)*)"
    r"|(?P<word>\w+|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<sign><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)",
    re.DOTALL,
)
_SECTION = re.compile(r"/\* ---- (.+?) -+ \*/")
_OPEN = {"(": ")", "[": "]", "{": "}"}
_RELATIONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_EQUALITIES = {"==": "!=", "!=": "=="}
#: The other direction of the bound, where a flip is one off already.
_BEYOND = {"<": "- 1", "<=": "+ 1", ">": "+ 1", ">=": "- 1"}
_ENDS = {"(", "[", "{", "}", ")", "]", ";", ",", "?", ":", "return"} | {
    *("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
}
_COMPARE = {*_RELATIONS, *_EQUALITIES}
#: Before the source; it is set by the environment, or by a program that has many tried.
SWITCH = """\
#include <stdlib.h>
int bb_mutant;
__attribute__((constructor)) static void bb_choose(void) {
    const char *number = getenv("BB_MUTANT");
    bb_mutant = number != NULL ? atoi(number) : 0;
}
"""


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    end: int


@dataclass
class Node:
    """An expression that is mutated: tokens ``first`` to ``last``, its sign at ``at``; without a sign a condition."""

    function: str
    first: int
    at: int
    last: int
    sign: str
    #: Numbers of its mutants, by what is mutated.
    numbers: dict[str, int]


def tokens_of(source: str) -> list[Token]:
    found = []
    for match in _TOKEN.finditer(source):
        if match.lastgroup != "skip":
            found.append(Token(match.group(), match.start(), match.end()))
    return found


def partners_of(tokens: Sequence[Token]) -> dict[int, int]:
    """Index of each bracket's other one."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    for index, token in enumerate(tokens):
        if token.text in _OPEN:
            waiting.append(index)
        elif token.text in _OPEN.values():
            begin = waiting.pop()
            if _OPEN[tokens[begin].text] != token.text:
                raise ValueError(f"{FILE}: {tokens[begin].text} at byte {tokens[begin].start} ends as {token.text}")
            found[begin], found[index] = index, begin
    return found


def functions(tokens: Sequence[Token], partners: dict[int, int]) -> Iterator[tuple[str, int, int]]:
    """Name of each function, and the indices of its braces."""
    index = 0
    while index < len(tokens):
        if tokens[index].text == "{":
            if tokens[index - 1].text == ")":
                yield tokens[partners[index - 1] - 1].text, index, partners[index]
            index = partners[index]
        index += 1


class Source:
    """boundary_bundle.c, its mutants, and the program text that holds them all."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokens_of(source)
        self.partners = partners_of(self.tokens)
        self.nodes: list[Node] = []
        self.mutants: list[Mutant] = []
        self._seen: set[tuple[str, str, str]] = set()
        sections = [(match.start(), match.group(1)) for match in _SECTION.finditer(source)]
        gone = set(LEFT_OUT) - {name for _, name in sections}
        names = []
        for name, begin, end in functions(self.tokens, self.partners):
            names.append(name)
            place = self.tokens[begin].start
            section = [title for at, title in sections if at < place][-1:]
            if section and section[0] not in LEFT_OUT and name not in PHRASING:
                self._mutate(name, begin, end)
        gone |= set(PHRASING) - set(names)
        if gone:
            raise ValueError(f"{FILE} does not have what mutants_c.py leaves out: {', '.join(sorted(gone))}")

    def text(self, first: int, last: int) -> str:
        """The source of tokens ``first`` to ``last``, in one line."""
        return squeeze(self.source[self.tokens[first].start : self.tokens[last].end])

    def _reach(self, at: int, step: int, ends: set[str]) -> int:
        """The last token in a direction that belongs to the operand beside the sign at ``at``."""
        index = at + step
        while True:
            text = self.tokens[index].text
            if (text in _OPEN if step > 0 else text in _OPEN.values()) and index in self.partners:
                index = self.partners[index]
            elif text in ends:
                return index - step
            index += step

    def _add(self, node: Node, what: str, kind: str, old: str, new: str) -> None:
        node.numbers[what] = len(self.mutants) + 1
        old = numbered(self._seen, node.function, old, new)
        line = self.source.count("\n", 0, self.tokens[node.at].start) + 1
        self.mutants.append(Mutant(node.numbers[what], "c", FILE, node.function, line, kind, old, new))

    def _mutate(self, function: str, begin: int, end: int) -> None:
        for at in range(begin + 1, end):
            sign = self.tokens[at].text
            if sign in _COMPARE:
                ends = _ENDS | _COMPARE | {"&&", "||"}
                node = Node(function, self._reach(at, -1, ends), at, self._reach(at, 1, ends), sign, {})
                left, right = self.text(node.first, at - 1), self.text(at + 1, node.last)
                old = f"{left} {sign} {right}"
                flipped = {**_RELATIONS, **_EQUALITIES}[sign]
                self._add(node, "flip", "flip", old, f"{left} {flipped} {right}")
                if sign in _BEYOND:
                    self._add(node, "bound", "bound", old, f"{left} {sign} {right} {_BEYOND[sign]}")
            elif sign in ("&&", "||"):
                before = _ENDS if sign == "||" else _ENDS | {"||"}
                node = Node(function, self._reach(at, -1, before), at, self._reach(at, 1, before | {sign}), sign, {})
                # Of a chain only its neighbours, or a note would have to change with any of its conditions.
                beside = self._reach(at, -1, before | {"&&", "||"})
                left, right = self.text(beside, at - 1), self.text(at + 1, node.last)
                other = "||" if sign == "&&" else "&&"
                self._add(node, "swap", "and/or", f"{left} {sign} {right}", f"{left} {other} {right}")
                self._add(node, "right", "condition", f"{sign} {right}", "left out")
                # The left side of a longer chain is a chain again, whose conditions have their own turn.
                if beside == node.first:
                    self._add(node, "left", "condition", f"{left} {sign}", "left out")
            elif sign == "if":
                node = Node(function, at + 2, at, self.partners[at + 1] - 1, "", {})
                self._add(node, "check", "check", f"if ({self.text(node.first, node.last)})", "if (false)")
            else:
                continue
            self.nodes.append(node)

    def program(self) -> str:
        """The source with a choice in place of each expression that is mutated."""
        nodes = sorted(self.nodes, key=lambda node: (node.first, -node.last, node.sign))
        return f"{SWITCH}{self.source[: self.tokens[0].start]}{self._render(0, len(self.tokens) - 1, nodes)}\n"

    def _render(self, first: int, last: int, nodes: Sequence[Node]) -> str:
        out = []
        place = self.tokens[first].start
        inside = [node for node in nodes if first <= node.first and node.last <= last]
        while inside:
            # The widest of those that begin first; of && and || over the same tokens there is only one.
            node = max(
                (one for one in inside if one.first == inside[0].first), key=lambda one: (one.last, one.sign == "")
            )
            inner = [one for one in inside if one is not node and one.last <= node.last]
            inside = [one for one in inside if one.first > node.last]
            out.append(self.source[place : self.tokens[node.first].start])
            out.append(self._choice(node, inner))
            place = self.tokens[node.last].end
        out.append(self.source[place : self.tokens[last].end])
        return "".join(out)

    def _choice(self, node: Node, inner: Sequence[Node]) -> str:
        if not node.sign:
            return f"(bb_mutant != {node.numbers['check']} && ({self._render(node.first, node.last, inner)}))"
        left = f"({self._render(node.first, node.at - 1, inner)})"
        right = f"({self._render(node.at + 1, node.last, inner)})"
        number = node.numbers
        if node.sign in _COMPARE:
            flipped = {**_RELATIONS, **_EQUALITIES}[node.sign]
            chosen = f"bb_mutant == {number['flip']} ? {left} {flipped} {right} : "
            if "bound" in number:
                chosen += f"bb_mutant == {number['bound']} ? {left} {node.sign} {right} {_BEYOND[node.sign]} : "
            return f"({chosen}{left} {node.sign} {right})"
        # The left side stands once, so that a chain does not double at each of its signs.
        swap, alone, without = (
            f"bb_mutant == {number[what]}" if what in number else "0" for what in ("swap", "right", "left")
        )
        if node.sign == "&&":
            return f"(({without} || {left}) ? ({alone} || {swap} || {right}) : ({swap} && {right}))"
        return f"((!({without}) && {left}) ? (!({swap}) || {right}) : (!({alone}) && !({swap}) && {right}))"


@dataclass
class Programs:
    """The compiled mutants, before the vectors and before the C codec's own tests."""

    vectors: Path
    tests: Path
    transcript: Path


def build(program: str, folder: Path, compiler: str, flags: Sequence[str]) -> Programs:
    """Compile a codec whose mutants ``bb_mutant`` chooses. Raises ValueError with what the compiler says."""
    from boundary_bundle.conformance.transcript import export

    folder.mkdir(parents=True, exist_ok=True)
    made = Programs(folder / "mutants-vectors", folder / "mutants-tests", folder / "mutants-vectors.txt")
    with made.transcript.open("w", encoding="ascii") as out:
        export(out)
    text = folder / "mutants-codec.c"
    text.write_text(program, encoding="ascii")
    codec = folder / "mutants-codec.o"
    common = [compiler, "-std=c11", "-w", *flags, f"-I{SHIM}"]
    for command in (
        [*common, "-c", str(text), "-o", str(codec)],
        [*common, str(SHIM / "tests" / "run_mutants.c"), str(codec), "-o", str(made.vectors)],
        [*common, str(SHIM / "tests" / "test_boundary_bundle.c"), str(codec), "-o", str(made.tests)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return made


def _environment(number: int = 0) -> dict[str, str]:
    quiet = "symbolize=0:detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=512"
    return {**os.environ, "ASAN_OPTIONS": quiet, "UBSAN_OPTIONS": "symbolize=0", "BB_MUTANT": str(number)}


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE_OF_TESTS, PATIENCE_OF_TESTS))


def _tested(programs: Programs, number: int) -> bool:
    """Whether the C codec's own tests fail with a mutant."""
    done = subprocess.run(
        [str(programs.tests)],
        env=_environment(number),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_limit,
        check=False,
    )
    return done.returncode != 0


def run(programs: Programs, mutants: Sequence[Mutant], tell: Callable[[], None], tests: bool = True) -> dict[int, Fate]:
    """What became of each; number 0, the codec as it is, must live. ``tell`` is called at each."""
    fates: dict[int, Fate] = {}
    process = subprocess.Popen(
        [str(programs.vectors), str(programs.transcript), str(PATIENCE)],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for number in (0, *(mutant.number for mutant in mutants)):
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        answer = process.stdout.readline().split()
        if len(answer) != 4 or int(answer[0]) != number:
            raise ValueError(f"the program of the mutants says {answer} of number {number}")
        _, how, after, vector = answer
        if how != "lives":
            fates[number] = Fate("vectors", vector if how == "differs" else f"{vector} ({how})", int(after))
        elif tests and _tested(programs, number):
            fates[number] = Fate("tests", "test_boundary_bundle.c", int(after))
        else:
            fates[number] = Fate("lives", "", int(after))
        if number:
            tell()
    process.stdin.close()
    process.wait()
    if fates.pop(0).by != "lives":
        raise ValueError("the C codec without a mutation fails its vectors or its tests")
    return fates
