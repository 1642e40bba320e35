"""The plugin with testees that are wrong: what a user sees. tests/example_project has one that is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Says that every magic is good; ends at the first header_crc; leaves encoding out.
TESTEE = """
import json, sys
from boundary_bundle.conformance.testee_python import PythonTestee
codec = PythonTestee()
for line in sys.stdin:
    request = json.loads(line)
    answer = codec.answer(request)
    error = (answer.get("error") or {}).get("name")
    if request["cmd"] == "encode":
        answer = {"seq": request["seq"], "skipped": "only reads"}
    if error == "bad_magic":
        answer = {"seq": request["seq"], "bundles": []}
    if error == "header_crc":
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(3)
    print(json.dumps(answer), flush=True)
    if request["cmd"] == "stop":
        break
"""

TESTS = """
import pytest

@pytest.mark.bundle_cases(only=["A1-*", "B1-*", "B2-*"])
def test_case(bundle_testee, bundle_case):
    bundle_testee.check(bundle_case)

def test_differences(bundle_testee):
    assert bundle_testee.differences(b"garbage and more of it") == []

def test_skips(bundle_testee):
    from boundary_bundle import Bundle
    assert bundle_testee.encode(Bundle())["skipped"] == "only reads"

@pytest.mark.bundle_cases(only=["A1-*"], classes="stream")
def test_vector(bundle_vector):
    assert bundle_vector.section == "6:A1"
"""


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "pytest", "-p", "boundary_bundle.pytest_plugin", "-p", "no:cacheprovider", "-rA"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, env=environment)


def project(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (folder / "testee.py").write_text(TESTEE)
    (folder / "test_it.py").write_text(TESTS)


def test_what_a_wrong_testee_gives(tmp_path: Path) -> None:
    """Wrong, crashed and right cases are told apart, and a crash takes no other test with it."""
    project(tmp_path)
    done = pytest_in(tmp_path, "--bundle-testee", f"{sys.executable} testee.py")
    lines = re.findall(r"^(PASSED|FAILED) \S+?::(\S+)", done.stdout, re.M)
    results = {name: result for result, name in lines}
    cases = {name: result for name, result in results.items() if name.startswith("test_case")}
    assert {result for name, result in cases.items() if "[A1-" in name} == {"FAILED"}
    assert {result for name, result in cases.items() if "[B1-" in name} == {"FAILED"}
    assert {result for name, result in cases.items() if "[B2-" in name and "encode" not in name} == {"PASSED"}
    assert "accepted instead of bad_magic (200) at 0" in done.stdout
    assert "crash: ended without an answer: with status 3" in done.stdout
    assert "it wrote to standard error:\nout of luck" in done.stdout
    assert results["test_differences"] == "FAILED"
    assert results["test_skips"] == "PASSED"
    assert all(result == "PASSED" for name, result in results.items() if name.startswith("test_vector["))
    assert done.returncode == 1


def test_without_a_testee(tmp_path: Path) -> None:
    project(tmp_path)
    done = pytest_in(tmp_path)
    assert "no testee: give --bundle-testee COMMAND, or bundle_testee in the ini file" in done.stdout
    assert done.returncode == 0


def test_a_testee_that_does_not_start(tmp_path: Path) -> None:
    project(tmp_path)
    done = pytest_in(tmp_path, "--bundle-testee", "./not-there", "-k", "differences")
    assert "the testee cannot be used: at hello it does not start: ./not-there: No such file" in done.stdout
    assert done.returncode == 1


def test_the_plugin_alone_loads_nothing_of_the_package(tmp_path: Path) -> None:
    """It is loaded wherever the package is installed, by runs that have nothing to do with it."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\ndef test_it():\n"
        "    loaded = {name for name in sys.modules if name.startswith('boundary_bundle.')}\n"
        "    assert not {name.split('.')[1] for name in loaded} & {'conformance', 'testing', 'cli', 'shards'}\n"
        "    assert 'hypothesis' not in sys.modules\n"
    )
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout
