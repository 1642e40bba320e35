"""spec/boundary_bundle.ksy, compiled to two languages: decoders that share no code with the codecs.

A fault that the specification's vectors and the codecs have in common, because the same people read
the same text, would show here; so would a description that leads others astray.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import DTYPES, encode
from boundary_bundle.conformance import kaitai
from boundary_bundle.conformance.asks import Expected, judge
from boundary_bundle.conformance.runner import Runner, kit, run
from boundary_bundle.conformance.testee_python import PythonTestee
from boundary_bundle.places import spec_folder
from boundary_bundle.testing import bundles, damaged

LANGUAGES = ("javascript", "python")
DESCRIPTION = (spec_folder() / "boundary_bundle.ksy").read_text("utf-8")


@pytest.fixture(scope="module")
def commands() -> dict[str, list[str]]:
    reason = kaitai.missing()
    if reason is not None:
        pytest.skip(f"{reason}: the Kaitai Struct compiler comes from npm and runs in node")
    return kaitai.commands()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_vector(commands: dict[str, list[str]], language: str) -> None:
    report = run(commands[language], kit())
    assert [(outcome.case.id, outcome.result, outcome.details) for outcome in report.failures] == []
    assert report.restarts == 0
    assert "stop" not in report.hello
    # Encoders' cases and contracts are all that it leaves out.
    left_out = [outcome.case for outcome in report.outcomes if outcome.result == "skipped"]
    assert all(case.mode == "encode" or case.vector.contract is not None for case in left_out)
    assert report.counts()["passed"] > 2000


@pytest.fixture(scope="module")
def both(commands: dict[str, list[str]]) -> Iterator[list[Runner]]:
    runners = [Runner(commands[language]) for language in LANGUAGES]
    for runner in runners:
        runner.start()
    yield runners
    assert [runner.stop() for runner in runners] == [None, None]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged() | bundles().map(encode), st.sampled_from(("one", "core", "stream")), st.booleans())
def test_both_agree_with_the_codec_on_drawn_input(
    both: list[Runner], data: bytes, mode: str, require_checksums: bool
) -> None:
    request = {"cmd": "decode", "class": mode, "data": data.hex(), "require_checksums": require_checksums}
    told = PythonTestee().decode(request)
    expected = Expected(tuple(told["bundles"]), told.get("error"))
    body = json.dumps(request)[1:]
    for runner in both:
        answer = runner.ask(lambda seq: f'{{"seq": {seq}, {body}\n'.encode("ascii"))
        assert "failed" not in answer
        assert judge(expected, answer, by_content=True) == []


def test_the_description_names_what_the_registry_names() -> None:
    """A dtype or an attribute that is added to one of them and not to the other."""
    registry = json.loads((spec_folder() / "registry.json").read_text("utf-8"))

    def enum(name: str) -> dict[str, int]:
        block = re.search(rf"^  {name}:\n((?:    .*\n)+)", DESCRIPTION[DESCRIPTION.index("\nenums:") :], re.M)
        assert block is not None
        rows = re.findall(r"^ +(\w+): (\w+)$", block[1], re.M)
        return {meaning: int(code, 0) for code, meaning in rows}

    assert enum("frame_type") == registry["frame_types"]
    assert enum("byte_order") == registry["byte_orders"]
    assert enum("attribute_type") == registry["attribute_types"]
    assert enum("dtype") == {row.name: row.code for row in DTYPES.values()}
    assert enum("attribute_key") == {row["name"]: row["key"] for row in registry["attributes"]}
