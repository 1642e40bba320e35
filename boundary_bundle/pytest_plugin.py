"""pytest fixtures for projects that write a codec of their own.

Installed with the package (entry point ``pytest11``); costs nothing until a fixture is used:

``bundle_vectors``
    every test vector of the specification, a list of :class:`conformance.vectors.Vector`.
``bundle_vector``
    the same, one test for each.
``bundle_case``
    one test for each case of the conformance kit, a vector in one mode (decode one bundle,
    core decoder, stream decoder, encode): for :meth:`TesteeUnderTest.check`.
``bundle_testee``
    the testee that ``--bundle-testee COMMAND`` or the ini option ``bundle_testee`` names
    (spec/testee-protocol.md), started once, started again after a crash.

``@pytest.mark.bundle_cases(only=["3.1", "6:D*"], classes="core")`` leaves fewer vectors and
cases: ``only`` are patterns for ids, files and sections, ``classes`` is core or stream.
For drawn input see the strategies of :mod:`boundary_bundle.testing`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conformance.asks import Case
    from .conformance.runner import Runner
    from .conformance.vectors import Vector

# Imports of the package's other modules stand in the functions: every run of pytest in an
# environment that holds this package loads this module.


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("boundary-bundle")
    group.addoption(
        "--bundle-testee",
        metavar="COMMAND",
        help="the testee of the fixture bundle_testee: a program that speaks boundary-bundle's testee protocol",
    )
    group.addoption(
        "--bundle-time-limit",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for one answer of the testee (10)",
    )
    parser.addini("bundle_testee", "command of the fixture bundle_testee, where --bundle-testee does not give one")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "bundle_cases(only=[...], classes=None): the vectors and cases of bundle_vector and bundle_case",
    )


def _selected(metafunc: pytest.Metafunc) -> list[Case]:
    from .conformance.asks import select
    from .conformance.runner import kit

    only: Sequence[str] = ()
    classes = None
    for mark in metafunc.definition.iter_markers("bundle_cases"):
        only = mark.kwargs.get("only", only)
        classes = mark.kwargs.get("classes", classes)
    return select(kit(), [only] if isinstance(only, str) else only, classes)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bundle_case" in metafunc.fixturenames:
        cases = _selected(metafunc)
        metafunc.parametrize("bundle_case", cases, ids=[case.id for case in cases])
    if "bundle_vector" in metafunc.fixturenames:
        # Vectors for encoders alone are no input of a decoder.
        vectors = {case.vector.id: case.vector for case in _selected(metafunc) if "encode" not in case.vector.raw}
        metafunc.parametrize("bundle_vector", list(vectors.values()), ids=list(vectors))


@pytest.fixture(scope="session")
def bundle_vectors() -> list[Vector]:
    """Every test vector of the specification."""
    from .conformance.vectors import load

    return list(load())


class TesteeUnderTest:
    """A running testee. ``hello`` is what it says of itself."""

    __test__ = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.hello: dict[str, Any] = runner.start()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer to any request; fails the test when it does not answer."""
        from .conformance.testee import Trouble

        body = json.dumps(request)[1:]
        try:
            return self._runner.ask(lambda seq: f'{{"seq": {seq}, {body}\n'.encode("ascii"))
        except Trouble as trouble:
            pytest.fail(f"the testee {trouble}")

    def decode(
        self, data: bytes, mode: str = "stream", pieces: Sequence[int] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Its answer to ``data``: ``bundles``, and ``error`` if there was one.

        ``mode`` is 'one', 'core' or 'stream'; ``options`` are limits, require_checksums
        and contract as the protocol has them.
        """
        how: dict[str, Any] = {"cmd": "decode"} if pieces is None else {"cmd": "stream", "pieces": list(pieces)}
        return self.ask(**how, **{"class": mode}, **options, data=bytes(data).hex())

    def encode(self, bundle: Any, **options: Any) -> dict[str, Any]:
        """Its answer to a :class:`boundary_bundle.Bundle` that it is to write: ``data`` or ``error``."""
        from .conformance.testee_python import tell_bundle
        from .decoder import decode
        from .encoder import encode

        # Of a decoded bundle, whose arrays are native.
        return self.ask(cmd="encode", **options, bundle=tell_bundle(decode(encode(bundle))))

    def differences(
        self, data: bytes, mode: str = "stream", pieces: Sequence[int] | None = None, **options: Any
    ) -> list[str]:
        """What of its answer to ``data`` is not as this package's codec has it; empty when all is."""
        from .conformance.asks import Expected, judge
        from .conformance.testee_python import PythonTestee

        told = PythonTestee().decode({"class": mode, **options, "data": bytes(data).hex()})
        answer = self.decode(data, mode, pieces, **options)
        expected = Expected(tuple(told["bundles"]), told.get("error"))
        return judge(expected, self._usable(answer), self._by_content)

    def check(self, case: Case) -> None:
        """Fail the test, with what is wrong, unless the testee passes; skip it when it says so."""
        from .conformance.asks import lacking
        from .conformance.runner import Outcome, settle
        from .conformance.testee import Trouble

        reason = lacking(case, self.hello)
        if reason is not None:
            pytest.skip(reason)
        outcome = Outcome(case)
        for ask in case.asks:
            try:
                answer = self._runner.ask(ask.line)
            except Trouble as trouble:
                # One is enough: a hang takes its time with each.
                settle(outcome, ask, trouble, self.hello)
                break
            settle(outcome, ask, answer, self.hello)
        if outcome.result == "skipped":
            pytest.skip("; ".join(outcome.details))
        if outcome.result != "passed":
            variant = f", {outcome.ask.variant}" if outcome.ask is not None and outcome.ask.variant else ""
            said = f"\nit wrote to standard error:\n{outcome.stderr}" if outcome.stderr else ""
            vector = case.vector
            pytest.fail(
                f"{case.id} (section {vector.section}{variant}): {vector.raw['comment']}\n"
                f"{outcome.result}: {'; '.join(outcome.details)}{said}",
                pytrace=False,
            )

    @property
    def _by_content(self) -> bool:
        return self.hello.get("judged") == "content"

    @staticmethod
    def _usable(answer: Mapping[str, Any]) -> Mapping[str, Any]:
        if "skipped" in answer:
            pytest.skip(str(answer["skipped"]))
        if "failed" in answer:
            pytest.fail(f"the testee says that it failed: {answer['failed']}")
        return answer


@pytest.fixture(scope="session")
def bundle_testee(request: pytest.FixtureRequest) -> Iterator[TesteeUnderTest]:
    """The testee that was named, running; skips the tests when none was."""
    from .conformance.runner import Runner, Unusable

    config = request.config
    command = config.getoption("--bundle-testee") or config.getini("bundle_testee")
    if not command:
        pytest.skip("no testee: give --bundle-testee COMMAND, or bundle_testee in the ini file")
    with Runner(shlex.split(command), time_limit=config.getoption("--bundle-time-limit")) as runner:
        try:
            testee = TesteeUnderTest(runner)
        except Unusable as error:
            pytest.fail(str(error))
        yield testee
        trouble = runner.stop()
        if trouble is not None:
            pytest.fail(f"when asked to stop, the testee {trouble}")
