"""What is damaged is refused, or read alike, by every decoder there is.

test_cross_codec.py holds both codecs against each other for all values of each byte. Here the others (the codec inside
the patched libllama, and the decoders that Kaitai Struct makes of the description) get every beginning of every small
vector and one drawn value for each of its bytes, as it is or with the checksums repaired; what the Python codec says of
it is expected. `make test` asks a part of them, BOUNDARY_BUNDLE_EVERY_BYTE=1 (`make test-long`) all.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from damaged_vectors import VECTORS, changed, places, small_vectors

from boundary_bundle.bundle import Limits
from boundary_bundle.conformance import builtin, kaitai
from boundary_bundle.conformance.asks import Expected, judge
from boundary_bundle.conformance.runner import Runner
from boundary_bundle.conformance.testee import Trouble
from boundary_bundle.conformance.testee_python import PythonTestee
from boundary_bundle.native import NativeBuild

EVERY_BYTE = os.environ.get("BOUNDARY_BUNDLE_EVERY_BYTE", "") not in ("", "0")
#: Without it one input of so many.
STEP = 60
TOGETHER = 64
OTHERS = tuple(name for name in builtin.NAMES if name != "python")


def inputs() -> Iterator[tuple[str, bytes, Limits]]:
    """Where it comes from, the damaged input, and the limits."""
    for file in sorted(VECTORS):
        for name, data, limits in small_vectors(file):
            drawn = random.Random(name)
            for size in range(len(data)):
                yield f"{name}, its first {size} bytes", data[:size], limits
            for at, frame in enumerate(places(data)):
                value = drawn.choice([value for value in range(256) if value != data[at]])
                repaired = frame if drawn.randrange(2) else None
                how = "as it is" if repaired is None else "repaired"
                yield f"{name}, byte {at} is {value}, {how}", changed(data, at, value, repaired), limits


@pytest.fixture(scope="module", params=OTHERS)
def testee(request: pytest.FixtureRequest, patched_build: NativeBuild) -> Iterator[Runner]:
    assert patched_build.programs
    if request.param.startswith("kaitai") and kaitai.missing() is not None:
        pytest.skip(f"{kaitai.missing()}: the Kaitai Struct compiler comes from npm and runs in node")
    with Runner(builtin.command(request.param)) as runner:
        runner.start()
        yield runner
        assert runner.stop() is None


def test_damage_is_seen_alike(testee: Runner) -> None:
    """A decoder that takes what others refuse, reads other content, ends, or does not end."""
    by_content = testee.hello.get("judged") == "content"
    wrong: list[str] = []
    compared = refused = 0
    python = PythonTestee()

    def ask(batch: list[tuple[str, bytes, Limits]]) -> None:
        nonlocal compared, refused
        bodies, expected = [], []
        for _, data, limits in batch:
            request = {"cmd": "decode", "class": "one", "data": data.hex()}
            default = asdict(Limits())
            if changed_limits := {key: str(n) for key, n in asdict(limits).items() if n != default[key]}:
                request["limits"] = changed_limits
            told = python.decode(request)
            expected.append(Expected(tuple(told["bundles"]), told.get("error")))
            bodies.append(json.dumps(request)[1:])
        lines = [lambda seq, body=body: f'{{"seq":{seq},{body}\n'.encode("ascii") for body in bodies]
        for (name, _, _), right, answer in zip(batch, expected, testee.ask_together(lines, lambda: None), strict=True):
            compared += 1
            refused += right.error is not None
            faults = [str(answer)] if isinstance(answer, Trouble) else judge(right, answer, by_content)
            wrong.extend(f"{name}: {fault}" for fault in faults[:1])

    batch = []
    for number, item in enumerate(inputs()):
        if EVERY_BYTE or number % STEP == 0:
            batch.append(item)
        if len(batch) == TOGETHER:
            ask(batch)
            batch = []
        if len(wrong) > 20:
            break
    ask(batch)
    assert wrong == []
    assert compared > (100_000 if EVERY_BYTE else 2_000)
    assert compared * 0.8 < refused < compared
    assert testee.restarts == 0
