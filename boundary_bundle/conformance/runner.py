"""Drives a testee through the vectors and keeps what came of each case."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..writing import write_whole
from .asks import Ask, Case, Malformed, cases_of, check_hello, judge, lacking, select, unclaimed
from .refusals import refusals
from .testee import Testee, Trouble, shown
from .vectors import Vector, load, load_file

if TYPE_CHECKING:
    from .matrix import Matrix

RESULTS: Final = ("passed", "wrong", "skipped", "error", "crash", "hang", "not run")
_FAILING: Final = ("wrong", "error", "crash", "hang", "not run")
#: Requests and bytes of them that may be under way.
_WINDOW: Final = 32
_WINDOW_BYTES: Final = 4 << 20


class Unusable(Exception):
    """The run could not take place; one sentence. ``kind`` is that of the Trouble, if one was the cause."""

    def __init__(self, text: str, kind: str | None = None, stderr: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.stderr = stderr


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    result: str = "passed"
    #: What happened, when it is not "passed": sentences.
    details: list[str] = field(default_factory=list)
    #: The kind of trouble, of those in testee.TROUBLES.
    kind: str | None = None
    #: The ask in which it came to light, and the answer to it.
    ask: Ask | None = None
    answer: dict[str, Any] | None = None
    stderr: str = ""
    #: It is in the file of known failures.
    known: bool = False

    @property
    def failing(self) -> bool:
        return self.result in _FAILING

    @property
    def failed(self) -> bool:
        """It counts against the testee."""
        return self.failing and not self.known


@dataclass
class Known:
    """A line of the file of known failures."""

    line: int
    name: str
    reason: str


@dataclass
class Report:
    """A run."""

    command: list[str]
    hello: dict[str, Any]
    outcomes: list[Outcome]
    seconds: float
    restarts: int
    known_file: str | None = None
    #: Lines of known failures that name no case of the kit.
    unmatched: list[Known] = field(default_factory=list)
    #: Lines whose cases were run and all passed.
    unexpected: list[Known] = field(default_factory=list)
    #: The random part, if it was asked for.
    random: dict[str, Any] | None = None
    #: Who reads whose bundles, if it was asked for.
    matrix: Matrix | None = None

    def counts(self) -> dict[str, int]:
        counted = dict.fromkeys(RESULTS, 0)
        for outcome in self.outcomes:
            counted[outcome.result] += 1
        return counted

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    @property
    def status(self) -> int:
        """0: all passed. 1: something failed. 2: nothing was checked."""
        if self.failures or self.unmatched or self.unexpected or (self.random or {}).get("failures"):
            return 1
        if self.matrix is not None and self.matrix.status == 1:
            return 1
        if not any(outcome.result in ("passed", *_FAILING) for outcome in self.outcomes) and not self.random:
            return 2
        return 0


def read_known(path: Path) -> list[Known]:
    """The lines of a file of known failures. Raises OSError or UnicodeDecodeError.

    A line names a case, or a vector for all its cases; after ``#`` stands the reason.
    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        name, _, reason = line.partition("#")
        if name.strip():
            found.append(Known(number, name.strip(), reason.strip()))
    return found


def kit(extra: Iterable[Path] = ()) -> list[Case]:
    """Every case: of the specification's vectors and of encoders, or of the files ``extra`` instead."""
    files = list(extra)
    vectors: list[Vector] = []
    if files:
        for path in files:
            vectors += load_file(path)
    else:
        vectors = [*load(), *refusals()]
    return [case for vector in vectors for case in cases_of(vector)]


class Runner:
    """One testee, started again whenever it must be."""

    def __init__(
        self, command: Sequence[str], *, time_limit: float = 10.0, restarts: int = 50, window: int = _WINDOW
    ) -> None:
        self.command = list(command)
        self.time_limit = time_limit
        self.restarts = 0
        #: Why requests were left.
        self.gave_up = ""
        self._most_restarts = restarts
        self._window = window
        self._seq = 0
        self._testee: Testee | None = None
        self.hello: dict[str, Any] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._testee is not None:
            self._testee.close()
            self._testee = None

    def start(self) -> dict[str, Any]:
        """Start the testee and ask who it is. Raises Unusable."""
        try:
            self._begin()
        except Trouble as trouble:
            raise Unusable(f"the testee cannot be used: at hello it {trouble}", trouble.kind, trouble.stderr) from None
        except Malformed as error:
            raise Unusable(f"the testee cannot be used: {error}", "malformed") from None
        return self.hello

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _begin(self) -> Testee:
        self.close()
        testee = Testee(self.command, self.time_limit)
        try:
            seq = self._next()
            testee.send(f'{{"seq":{seq},"cmd":"hello","protocol":1}}\n'.encode("ascii"))
            answer = testee.receive(seq)
            if "failed" in answer:
                raise Trouble("failed", shown(str(answer["failed"]).encode("utf-8", "replace")))
            self.hello = check_hello(answer)
        except BaseException:
            testee.close()
            raise
        self._testee = testee
        return testee

    def stop(self) -> Trouble | None:
        """End the testee as the protocol has it; what it did instead of ending."""
        if self._testee is None:
            return None
        testee, self._testee = self._testee, None
        try:
            testee.stop(self._next())
        except Trouble as trouble:
            return trouble
        return None

    def ask(self, line: Callable[[int], bytes]) -> dict[str, Any]:
        """One request, its answer. Raises Trouble; the testee is then started again at the next one."""
        if self._testee is None:
            self.restarts += 1
            self._begin()
        testee = self._testee
        assert testee is not None
        seq = self._next()
        testee.send(line(seq))
        try:
            return testee.receive(seq)
        except Trouble:
            self.close()
            raise

    def ask_together(
        self, lines: Sequence[Callable[[int], bytes]], meanwhile: Callable[[], None]
    ) -> list[dict[str, Any] | Trouble]:
        """Several requests in one go, and what came of each; ``meanwhile`` runs while the testee works on them.

        After trouble the rest is asked one at a time, after a crash also the one whose answer did not come:
        the guilty one may have been another.
        """
        answers: list[dict[str, Any] | Trouble] = []
        suspect: tuple[int, Trouble] | None = None
        if self._testee is not None:
            testee = self._testee
            numbers = [self._next() for _ in lines]
            testee.send(b"".join(line(seq) for line, seq in zip(lines, numbers, strict=True)), len(lines))
            meanwhile()
            try:
                for seq in numbers:
                    answers.append(testee.receive(seq))
            except Trouble as trouble:
                self.close()
                if trouble.result != "crash" or len(answers) == len(lines) - 1:
                    answers.append(trouble)
                else:
                    suspect = len(answers), trouble
        else:
            meanwhile()
        for line in lines[len(answers) :]:
            try:
                answers.append(self.ask(line))
            except Trouble as trouble:
                answers.append(trouble)
            except Malformed as error:  # at hello
                answers.append(Trouble("malformed", str(error)))
        if suspect is not None and not any(isinstance(answer, Trouble) for answer in answers[suspect[0] :]):
            answers[suspect[0]] = _once(suspect[1])
        return answers

    def ask_all(self, asks: Iterable[Ask], take: Callable[[Ask, dict[str, Any] | Trouble], None]) -> list[Ask]:
        """Put every request, many at a time, and give each answer or trouble to ``take``.

        Returns the asks that were left when the testee had been restarted too often.
        """
        todo = deque(asks)
        pending: deque[tuple[int, Ask]] = deque()
        # After a crash: so many requests are asked one at a time, to find which one it was.
        alone = 0
        suspect: tuple[Ask, Trouble] | None = None

        def begin() -> Testee | None:
            for attempt in range(3):
                if self.restarts >= self._most_restarts:
                    self.gave_up = f"the testee has been started again {self.restarts} times"
                    return None
                self.restarts += 1
                try:
                    return self._begin()
                except (Trouble, Malformed) as error:
                    if attempt == 2:
                        self.gave_up = f"the testee could not be started again: at hello it {error}"
            return None

        testee = self._testee
        if testee is None:
            testee = begin()
        while testee is not None and (todo or pending):
            window = 1 if alone else self._window
            while todo and len(pending) < window and (not pending or testee.backlog < _WINDOW_BYTES):
                ask = todo.popleft()
                seq = self._next()
                testee.send(ask.line(seq))
                pending.append((seq, ask))
            seq, ask = pending[0]
            try:
                answer = testee.receive(seq)
            except Trouble as trouble:
                self.close()
                waiting = [ask for _, ask in pending]
                pending.clear()
                if trouble.result == "crash" and len(waiting) > 1:
                    todo.extendleft(reversed(waiting))
                    alone, suspect = len(waiting), (waiting[0], trouble)
                else:
                    take(ask, trouble)
                    todo.extendleft(reversed(waiting[1:]))
                    alone, suspect = max(0, alone - 1), None
                testee = begin()
                continue
            pending.popleft()
            if alone:
                alone -= 1
                if not alone and suspect is not None:
                    take(suspect[0], _once(suspect[1]))
                    suspect = None
            take(ask, answer)
        return [ask for _, ask in pending] + list(todo)


def _once(trouble: Trouble) -> Trouble:
    return Trouble(trouble.kind, "once, and not again when each request was put alone")


def _worse(result: str, other: str) -> bool:
    order = ("passed", "skipped", "not run", "wrong", "error", "hang", "crash")
    return order.index(result) > order.index(other)


def settle(outcome: Outcome, ask: Ask, answer: dict[str, Any] | Trouble, hello: Mapping[str, Any]) -> None:
    """Add an answer, or what came instead, to a case's outcome. The worst of a case's asks is what counts."""
    kind: str | None = None
    stderr = ""
    if isinstance(answer, Trouble):
        result, details, kind, stderr = answer.result, [str(answer)], answer.kind, answer.stderr
    elif "skipped" in answer:
        result, details = "skipped", [shown(str(answer["skipped"]).encode("utf-8", "replace"))]
    elif "failed" in answer:
        text = shown(str(answer["failed"]).encode("utf-8", "replace"), 500)
        result, details, kind = "error", [f"says that it failed: {text}"], "failed"
    else:
        try:
            details = judge(ask.expected, answer, hello.get("judged") == "content")
            result = "wrong" if details else "passed"
            if details and unclaimed(ask.expected, answer, hello):
                result, details = "skipped", ["has a dtype that is not claimed"]
        except Malformed as error:
            result, details, kind = "error", [f"gave an answer that the protocol does not know: {error}"], "malformed"
    if not _worse(result, outcome.result):
        return
    outcome.result = result
    outcome.details = details
    outcome.kind = kind
    outcome.ask = ask
    outcome.answer = answer if isinstance(answer, dict) else None
    outcome.stderr = stderr


def _numbers(section: str) -> list[int]:
    return [int(part) for part in section.split(".") if part.isdecimal()]


def run(
    command: Sequence[str],
    cases: Sequence[Case],
    *,
    time_limit: float = 10.0,
    restarts: int = 50,
    window: int = _WINDOW,
    only: Sequence[str] = (),
    classes: str | None = None,
    known: Sequence[Known] = (),
    progress: Callable[[int, int, Mapping[str, int]], None] | None = None,
) -> Report:
    """Run a testee over the cases that are selected. Raises Unusable."""
    started = time.monotonic()
    chosen = select(cases, only, classes)
    if not chosen:
        sections = sorted({case.vector.section.partition(":")[0] for case in cases}, key=_numbers)
        raise Unusable(f"no case of the kit is selected; there are the sections {', '.join(sections)}")
    with Runner(command, time_limit=time_limit, restarts=restarts, window=window) as runner:
        hello = runner.start()
        outcomes: dict[int, Outcome] = {}
        asks: list[Ask] = []
        for case in chosen:
            outcome = outcomes[id(case)] = Outcome(case)
            reason = lacking(case, hello)
            if reason is not None:
                outcome.result, outcome.details = "skipped", [reason]
            else:
                asks += case.asks
        done = 0
        troubles = dict.fromkeys(RESULTS, 0)

        def take(ask: Ask, answer: dict[str, Any] | Trouble) -> None:
            nonlocal done
            outcome = outcomes[id(ask.case)]
            before = outcome.result
            settle(outcome, ask, answer, hello)
            if outcome.result != before:
                troubles[outcome.result] += 1
            done += 1
            if progress is not None:
                progress(done, len(asks), troubles)

        for ask in runner.ask_all(asks, take):
            outcome = outcomes[id(ask.case)]
            if _worse("not run", outcome.result):
                outcome.result = "not run"
                outcome.details = [runner.gave_up]
        trouble = runner.stop()
        report = Report(list(command), hello, list(outcomes.values()), 0.0, runner.restarts)
        if trouble is not None:
            report.hello = {**hello, "stop": str(trouble)}
    mark_known(report, known, cases)
    report.seconds = time.monotonic() - started
    return report


def mark_known(report: Report, known: Sequence[Known], cases: Sequence[Case]) -> None:
    """Hold the outcomes against the known failures."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        by_name.setdefault(outcome.case.id, []).append(outcome)
        by_name.setdefault(outcome.case.vector.id, []).append(outcome)
    every = {name for case in cases for name in (case.id, case.vector.id)}
    for entry in known:
        if entry.name not in every:
            report.unmatched.append(entry)
            continue
        ran = [outcome for outcome in by_name.get(entry.name, ()) if outcome.result not in ("skipped", "not run")]
        failing = [outcome for outcome in ran if outcome.failing]
        for outcome in failing:
            outcome.known = True
        if ran and not failing:
            report.unexpected.append(entry)


def write_text(path: Path, text: str) -> None:
    """Write a report, or nothing. Raises OSError."""
    write_whole(path, [text.encode("utf-8")])
