"""The conformance kit: over the built-in testees, over wrong ones and over ones that misbehave.

Catches a kit that passes what is wrong, fails what is right, stops at the first crash, or
leaves something running.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import faulty_testee
import jsonschema
import pytest

from boundary_bundle import cli
from boundary_bundle.conformance import asks, matrix, random_cases, report, report_page, runner
from boundary_bundle.conformance.runner import Known, Report, Unusable
from boundary_bundle.conformance.testee import TROUBLES, Trouble
from boundary_bundle.conformance.vectors import FOLDER, load

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = [sys.executable, "-m", "boundary_bundle.conformance.testee_python"]
FAULTY = [sys.executable, str(HERE / "faulty_testee.py")]
MISBEHAVING = [sys.executable, str(HERE / "misbehaving_testee.py")]
CC = shutil.which("cc")


@pytest.fixture(autouse=True)
def _package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@cache
def kit() -> list[asks.Case]:
    return runner.kit()


@pytest.fixture(scope="session")
def c_testee(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The C codec's testee, with the sanitizers."""
    if CC is None:
        pytest.skip("no C compiler (cc) on this machine")
    out = tmp_path_factory.mktemp("testee")
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    subprocess.run(
        ["make", "-s", "-C", str(ROOT / "native_shim"), "testee", f"OUT={out}", f"CFLAGS={flags}"], check=True
    )
    return [str(out / "testee")]


def failures(found: Report) -> list[str]:
    return [f"{outcome.case.id}: {outcome.result}: {outcome.details}" for outcome in found.failures]


# ---- right testees ----


def test_the_python_codec_passes() -> None:
    found = runner.run(PYTHON, kit())
    assert failures(found) == []
    assert found.counts() == {**dict.fromkeys(runner.RESULTS, 0), "passed": len(kit())}
    assert found.restarts == 0
    assert found.status == 0


def test_the_c_codec_passes(c_testee: list[str]) -> None:
    found = runner.run(c_testee, kit())
    assert failures(found) == []
    reasons = {outcome.details[0] for outcome in found.outcomes if outcome.result == "skipped"}
    assert reasons == {
        "bb_tensor holds names of 63 bytes",
        "bb_tensor holds 8 dimensions",
    }


def test_every_vector_is_a_case() -> None:
    """A vector that no testee is ever asked."""
    asked = {case.vector.id for case in kit()}
    assert {vector.id for vector in load()} <= asked
    assert len({case.id for case in kit()}) == len(kit())


def test_what_is_not_claimed_is_not_asked() -> None:
    hello = {"classes": ["core"], "dtypes": ["f32"], "address_bits": 32}
    for case in kit():
        reason = asks.lacking(case, hello)
        dtypes = {tensor.dtype for bundle in case.vector.bundles for tensor in bundle.tensors}
        may = case.mode in ("core", "encode") and dtypes <= {"f32"} and "address_64" not in case.vector.flags
        assert (reason is None) == may


def test_a_decoder_judged_by_content() -> None:
    """Verdict and content count, which error it is does not."""
    wanted = asks.Expected((), {"name": "bad_magic", "number": 200, "offset": 0})
    other = {"bundles": [], "error": {"name": "header_crc", "number": 201, "offset": 60}}
    assert asks.judge(wanted, other) != []
    assert asks.judge(wanted, other, by_content=True) == []
    assert asks.judge(wanted, {"bundles": []}, by_content=True) != []


# ---- planted faults ----


@pytest.mark.parametrize("name", faulty_testee.FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    """Only the vectors that are meant to catch it are run; ``python faulty_testee.py`` runs the whole kit."""
    planted = faulty_testee.FAULTS[name]
    found = runner.run([*FAULTY, name], kit(), only=planted.only)
    assert found.failures, planted.what
    assert {outcome.result for outcome in found.failures} <= {"wrong", "error"}
    assert found.status == 1


def test_there_are_enough_faults() -> None:
    assert len(faulty_testee.FAULTS) >= 25


# ---- testees that misbehave ----

KINDS = {
    "garbage": "garbage",
    "not-an-object": "garbage",
    "aside": "wrong_stream",
    "hang": "hang",
    "order": "order",
    "half": "half_line",
    "half-exit": "half_line_end",
    "signal": "signal",
    "exit": "exit",
    "closed": "closed",
    "flood": "flood",
    "flood-aside": "flood",
    "malformed": "malformed",
    "no-sequence": "malformed",
    "failed": "failed",
}


@pytest.mark.parametrize("kind", KINDS)
def test_misbehaviour_is_told_apart_and_the_run_goes_on(kind: str) -> None:
    # A flood takes a while to be one; it must not be taken for a hang on a busy machine.
    limit = 20.0 if kind.startswith("flood") else 0.5
    found = runner.run([*MISBEHAVING, kind, "30"], kit(), only=("6:A1",), time_limit=limit, restarts=100)
    bad = found.failures
    assert {outcome.kind for outcome in bad} == {KINDS[kind]}
    assert {outcome.result for outcome in bad} == {TROUBLES[KINDS[kind]][0]}
    assert sum(outcome.result == "skipped" for outcome in found.outcomes) > len(bad) / 2
    assert found.counts()["not run"] == 0
    assert found.restarts > 1 or kind in ("failed", "malformed")
    text = "\n".join(line for outcome in bad for line in report.describe(outcome))
    assert "\x1b" not in text
    assert found.status == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "flood-aside"])
def test_misbehaviour_at_the_start(kind: str) -> None:
    """There is no run; the reason is told."""
    with pytest.raises(Unusable) as caught:
        runner.run([*MISBEHAVING, kind, "hello"], kit(), time_limit=8.0 if kind == "flood" else 0.5)
    assert caught.value.kind == KINDS[kind]


def test_a_testee_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert cli.main(["conformance", "--json", str(out), "--html", str(tmp_path / "x.html"), "--", "/nowhere/it"]) == 2
    assert "does not start: /nowhere/it: No such file" in capsys.readouterr().err
    told = json.loads(out.read_text())
    assert (told["status"], told["kind"]) == (2, "start")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("mine.py", "on the path; ./mine.py is here"),
        ("./mine.py", "Permission denied (it is not executable)"),
        ("./other.py", "No such file or directory"),
    ],
)
def test_a_hint_for_what_cannot_be_started(
    command: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["conformance", "--", command]) == 2
    assert capsys.readouterr().err.rstrip().endswith(told)


def test_without_a_testee_it_is_told_how_to_write_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance"]) == 2
    places = [Path(word.strip(",;")) for word in capsys.readouterr().err.split() if "/spec/" in word]
    assert [place.name for place in places] == ["testee-protocol.md", "testees"]
    assert all(place.exists() for place in places)


def _alive(pid: int) -> bool:
    """Whether a process runs (one that ended and was not yet waited for does not)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by way of /proc")
def test_nothing_is_left_running() -> None:
    """The testee's own children end with it."""
    found = runner.run([*MISBEHAVING, "hang-with-child", "30"], kit(), only=("6:A1",), time_limit=1.0)
    children = [int(outcome.stderr.split()[1]) for outcome in found.failures if outcome.stderr.startswith("child")]
    assert children
    deadline = time.monotonic() + 5
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_alive, children))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by way of /proc")
def test_a_terminated_run_ends_its_testee(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = tmp_path / "testee.py"
    script.write_text(f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()) + '.')\ntime.sleep(3600)\n")
    command = [sys.executable, "-m", "boundary_bundle.cli", "conformance", "--", sys.executable, str(script)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (mark.exists() and mark.read_text().endswith(".")) and time.monotonic() < deadline:
        time.sleep(0.01)
    testee = int(mark.read_text()[:-1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    while _alive(testee) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(testee)


def test_restarts_are_bounded() -> None:
    found = runner.run([*MISBEHAVING, "exit", "3"], kit(), only=("6:A1",), restarts=2)
    assert found.restarts == 2
    assert found.counts()["not run"] > 0
    assert found.status == 1


def test_the_guilty_request_is_found() -> None:
    """Answers that a crash swallowed are no faults of theirs."""
    # It writes what it has when it has read everything, as a careless testee does.
    script = f"""
import json, os
rest = b""
while chunk := os.read(0, 65536):
    *lines, rest = (rest + chunk).split(b"\\n")
    out = ""
    for line in lines:
        r = json.loads(line)
        if r.get("data", "89")[:2] != "89":
            os.kill(os.getpid(), 11)
        told = {_hello()!r} if r["cmd"] == "hello" else {{}} if r["cmd"] == "stop" else {{"skipped": "x"}}
        out += json.dumps({{"seq": r["seq"], **told}}) + "\\n"
    os.write(1, out.encode())
    if r["cmd"] == "stop":
        break
"""
    found = runner.run([sys.executable, "-c", script], kit(), only=("6:A1",), time_limit=5.0)
    guilty = {case.id for case in kit() if case.vector.section == "6:A1" and case.vector.data[:1] != b"\x89"}
    assert guilty
    crashed = {outcome.case.id for outcome in found.outcomes if outcome.kind == "signal"}
    assert crashed == guilty


def _hello() -> dict[str, object]:
    return {
        "protocol": 1,
        "name": "x",
        "language": "Python",
        "version": "0",
        "classes": ["one", "core", "stream"],
        "dtypes": ["f32"],
    }


# ---- known failures ----


def _known(*names: str) -> list[Known]:
    return [Known(line, name, "") for line, name in enumerate(names, 1)]


@pytest.fixture(scope="session")
def wrong() -> list[str]:
    """Cases of D29 that a testee without that check fails."""
    found = runner.run([*FAULTY, "duplicate-name"], kit(), only=("6:D29",))
    return [outcome.case.id for outcome in found.failures]


def _with_known(*names: str) -> Report:
    return runner.run([*FAULTY, "duplicate-name"], kit(), only=("6:D29",), known=_known(*names))


def test_known_failures_do_not_count(wrong: list[str]) -> None:
    found = _with_known(*wrong)
    assert (found.status, found.failures) == (0, [])
    assert sum(outcome.known for outcome in found.outcomes) == len(wrong)


def test_a_vector_stands_for_its_cases(wrong: list[str]) -> None:
    assert _with_known(*{name.rpartition("/")[0] for name in wrong}).status == 0


def test_a_failure_that_is_not_listed_fails(wrong: list[str]) -> None:
    found = _with_known(*wrong[1:])
    assert [outcome.case.id for outcome in found.failures] == wrong[:1]
    assert found.status == 1


def test_an_unexpected_pass_fails(wrong: list[str]) -> None:
    right = next(c.id for c in kit() if c.vector.section == "6:D29" and c.id not in wrong)
    found = _with_known(*wrong, right)
    assert [entry.name for entry in found.unexpected] == [right]
    assert found.status == 1


def test_a_line_that_matches_nothing_fails(wrong: list[str]) -> None:
    found = _with_known(*wrong, "D29-gone/one")
    assert [entry.name for entry in found.unmatched] == ["D29-gone/one"]
    assert found.status == 1


def test_a_line_for_a_case_that_was_not_asked_is_left_alone(wrong: list[str]) -> None:
    other = next(case.id for case in kit() if case.vector.section == "6:D30")
    assert _with_known(*wrong, other).status == 0


# ---- the command and its reports ----


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    listed = tmp_path / "known.txt"
    listed.write_text(f"# known\n{wrong[0]}  # to be mended\n\n")
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    command = ["conformance", *options, "--only", "D29", "--known-failures", str(listed), "--"]
    assert cli.main([*command, *FAULTY, "duplicate-name"]) == 1
    shown = capsys.readouterr().out
    # One of the three modes of the first vector is known; the other two are told together.
    assert f"WRONG {wrong[1].rpartition('/')[0]} (core, stream; section 6:D29" in shown
    assert re.search(r"^failed +\d+  accepted instead of tensor_duplicate, such as ", shown, re.M)
    assert "expected: tensor_duplicate (306) at " in shown
    assert "got:      1 bundle" in shown
    assert "name" in shown
    assert shown.splitlines()[-1].startswith("FAILED: ")
    told = json.loads(files["json"].read_text())
    assert told["status"] == 1
    assert told["counts"]["wrong"] == len(wrong)
    assert [case["known"] for case in told["cases"] if case["id"] == wrong[0]] == [True]
    suite = ElementTree.parse(files["junit"]).getroot()
    assert int(suite.get("failures", "")) == len(wrong) - 1
    assert len(suite.findall(".//testcase")) == len(told["cases"])
    page = files["html"].read_text()
    assert wrong[1].rpartition("/")[0] in page
    assert "accepted instead of tensor_duplicate" in page
    assert sum(entry["cases"] for entry in told["faults"]) == len(wrong) - 1
    # Nothing is loaded and nothing is run.
    assert "<script" not in page
    assert "src=" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_failures_are_told_in_the_order_of_the_specification() -> None:
    """Grouped by vector, the fundamental sections first, and nothing said twice."""
    found = runner.run([*FAULTY, "zero-dimension"], kit(), only=("3.1", "6:D23", "4"))
    groups = report.grouped(found.failures)
    assert sum(len(group.modes) for group in groups) == len(found.failures) > len(groups)
    sections = [group.outcome.case.vector.section for group in groups]
    assert sections == sorted(sections)
    for group in groups:
        lines = list(report.describe(group.outcome, group.modes))
        got = [line for line in lines if line.startswith("    got: ")]
        assert len(got) == 1
        error = got[0].split(": ", 1)[1].strip()
        assert not [line for line in lines if line.strip() in (f"refused with {error}", error)]


OFFSET = {"name": "bad_magic", "number": 200, "offset": 0}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"bundles": [], "error": {**OFFSET, "number": 0}}, "the right error with another number"),
        ({"bundles": [], "error": {**OFFSET, "offset": 64}}, "the right error with another offset"),
        ({"bundles": [], "error": {**OFFSET, "name": "truncated"}}, "truncated instead of bad_magic"),
        ({"bundles": [], "error": {**OFFSET, "name": "\x1b[31m"}}, "\\x1b[31m instead of bad_magic"),
        ({"bundles": []}, "accepted instead of bad_magic"),
        ({"bundles": [{}], "error": OFFSET}, "the right error after other bundles"),
        ({"failed": "no"}, "says that it failed"),
    ],
)
def test_kinds_of_faults(answer: dict[str, object], told: str) -> None:
    """A mistake of the implementer shows as one line, however many vectors it fails."""
    case = next(case for case in kit() if case.id == "A1-first-byte/one")
    outcome = runner.Outcome(case)
    runner.settle(outcome, case.asks[0], answer, _hello())
    assert outcome.failing
    assert report.fault_of(outcome) == told


def test_kinds_of_faults_in_content() -> None:
    found = runner.run([*FAULTY, "f32-order"], kit(), only=("4",))
    ((what, count, example),) = report.faults(found)
    assert (what, count) == ("other content: tensors.elements", len(found.failures))
    assert example in {outcome.case.id for outcome in found.failures}
    found = runner.run([*FAULTY, "encoder-order"], kit(), only=("4",))
    assert [what for what, _, _ in report.faults(found)] == ["other bytes from the encoder"]


def test_why_cases_were_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """Who claims one class sees that the others were not asked."""
    template = str(ROOT / "spec" / "testees" / "template.py")
    assert cli.main(["conformance", "--only", "4", "--", sys.executable, template]) == 2
    shown = capsys.readouterr().out
    assert re.search(r"^skipped +\d+  no decoder yet$", shown, re.M)
    assert re.search(r"^skipped +\d+  dtype q8_0 is not claimed$", shown, re.M)


def test_what_a_testee_says_is_escaped(tmp_path: Path) -> None:
    hello = {**_hello(), "name": "<script>alert(1)</script>\x1b[31m"}
    found = Report(["<b>"], hello, [], 0.0, 0)
    page = report_page.to_html(found)
    assert "<script" not in page
    assert "<b>" not in page


def test_selecting() -> None:
    cases = kit()
    assert {case.mode for case in asks.select(cases, (), "core")} == {"one", "core", "encode"}
    assert {case.mode for case in asks.select(cases, (), "stream")} == {"stream", "encode"}
    assert {case.vector.section for case in asks.select(cases, ("D29",), None)} == {"6:D29"}
    assert {"3.1", "3.2"} <= {case.vector.section for case in asks.select(cases, ("3",), None)}
    assert len(asks.select(cases, ("D29-*/one",), None)) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["conformance"],
        ["conformance", "--only", "nothing-is-called-so", "--", *PYTHON],
        ["conformance", "--known-failures", "/nowhere", "--", *PYTHON],
        ["conformance", "--vectors", "/nowhere.json", "--", *PYTHON],
        ["conformance", "--time-limit", "0", "--", *PYTHON],
        ["conformance", "--json", "/nowhere/r.json", "--only", "A1", "--", *PYTHON],
    ],
)
def test_what_cannot_be_done(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_nothing_checked_is_not_a_pass() -> None:
    assert cli.main(["conformance", "--only", "A1", "--", *MISBEHAVING, "none"]) == 2


# ---- random inputs ----


def test_random_inputs_pass(c_testee: list[str]) -> None:
    found = random_cases.run_random(c_testee, 200, 1)
    assert found["failures"] == []
    assert found["cases"] >= 200


def test_a_random_failure_is_shrunk_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest input of a testee that refuses zero dimensions: one tensor, nothing else."""
    testee = [*FAULTY, "zero-dimension"]
    # On a busy machine too the number of tries ends the search.
    monkeypatch.setattr(random_cases, "_SECONDS", 300.0)
    found = random_cases.run_random(testee, 240, 1, folder=tmp_path)
    assert found["failures"]
    saved = [Path(entry["file"]) for entry in found["failures"]]
    schema = json.loads((FOLDER / "schema.json").read_text())
    for path in saved:
        jsonschema.Draft202012Validator(schema).validate(json.loads(path.read_text()))
    assert min(entry["bytes"] for entry in found["failures"]) == 192
    again = ["conformance", "--quiet", "--vectors", str(saved[0]), "--"]
    assert cli.main([*again, *testee]) == 1
    assert cli.main([*again, *PYTHON]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["signal", "garbage", "half-exit", "order", "malformed"])
def test_trouble_among_requests_that_are_put_together(kind: str) -> None:
    """Each request has its own answer or trouble, whichever of them it was that broke the testee."""

    def asking(seq: int) -> bytes:
        return json.dumps({"seq": seq, "cmd": "decode", "class": "one", "data": ""}).encode() + b"\n"

    met: list[str] = []
    called: list[int] = []
    with runner.Runner([*MISBEHAVING, kind, "5"]) as driver:
        driver.start()
        for count in range(1, 5):
            answers = driver.ask_together([asking] * 3, lambda: called.append(1))
            assert len(called) == count
            assert len(answers) == 3
            met += [answer.kind for answer in answers if isinstance(answer, Trouble)]
    if kind == "malformed":
        # An answer here; it is judged later.
        assert met == []
        assert driver.restarts == 0
    else:
        # Of a request that is put again after a crash it may be told twice; none is lost.
        assert set(met) == {KINDS[kind]}
        assert len(met) >= 2
        # It is started again when there is something to ask.
        assert driver.restarts >= len(met) - 1


def test_a_crash_that_does_not_come_again_is_told(tmp_path: Path) -> None:
    """The testee dies once, at the second of three requests, and passes each alone."""
    script = f"""
import json, os, sys
for line in sys.stdin:
    r = json.loads(line)
    if r.get("data") == "01" and not os.path.exists({str(tmp_path / "died")!r}):
        open({str(tmp_path / "died")!r}, "w").close()
        os.kill(os.getpid(), 11)
    told = {_hello()!r} if r["cmd"] == "hello" else {{"skipped": "x"}}
    print(json.dumps({{"seq": r["seq"], **told}}), flush=True)
"""

    def asking(data: str) -> Callable[[int], bytes]:
        return lambda seq: json.dumps({"seq": seq, "cmd": "decode", "class": "one", "data": data}).encode() + b"\n"

    with runner.Runner([sys.executable, "-c", script]) as driver:
        driver.start()
        answers = driver.ask_together([asking(data) for data in ("00", "01", "02")], lambda: None)
    assert [isinstance(answer, Trouble) for answer in answers] == [False, True, False]
    assert "once, and not again" in str(answers[1])


# ---- templates ----

TEMPLATES = ROOT / "spec" / "testees"


def _template(language: str, out: Path) -> list[str]:
    """The command of a template, compiled if need be."""
    tools = {"python": sys.executable, "javascript": "node", "c": "cc", "go": "go", "rust": "cargo"}
    tool = shutil.which(tools[language])
    if tool is None:
        pytest.skip(f"{tools[language]} is not on this machine")
    # A launcher such as rustup's may be there with no toolchain behind it, in an empty home folder for one.
    if language == "rust" and subprocess.run([tool, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("cargo has no toolchain here")
    if language == "python":
        return [tool, str(TEMPLATES / "template.py")]
    if language == "javascript":
        return [tool, str(TEMPLATES / "template.js")]
    if language == "c":
        source = str(TEMPLATES / "template.c")
        subprocess.run(
            [tool, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", source, "-o", str(out / "c")], check=True
        )
        return [str(out / "c")]
    if language == "go":
        source = str(TEMPLATES / "go" / "template.go")
        subprocess.run([tool, "build", "-o", str(out / "testee"), source], cwd=out, check=True)
        return [str(out / "testee")]
    shutil.copytree(TEMPLATES / "rust", out / "rust")
    built = subprocess.run([tool, "build", "--quiet"], cwd=out / "rust", capture_output=True, text=True)
    if built.returncode and "serde_json" in built.stderr and ("download" in built.stderr or "network" in built.stderr):
        pytest.skip("cargo cannot fetch serde_json")
    assert built.returncode == 0, built.stderr
    return [str(out / "rust" / "target" / "debug" / "testee")]


@pytest.mark.parametrize("language", ["python", "javascript", "c", "go", "rust"])
def test_a_template_runs(language: str, tmp_path: Path) -> None:
    """It compiles, answers hello, and skips everything that it has not; the matrix names it."""
    command = _template(language, tmp_path)
    found = runner.run(command, kit(), only=("2.1", "7", "8-*", "D59-*"))
    assert found.hello["name"] == "template"
    assert {outcome.result for outcome in found.outcomes} == {"skipped"}
    assert any(outcome.details == ["no decoder yet"] for outcome in found.outcomes)
    assert any(outcome.details == ["no encoder yet"] for outcome in found.outcomes)
    assert "stop" not in found.hello
    assert found.restarts == 0
    table = matrix.make({"python": PYTHON, "template": command}, asks.select(kit(), ("14",), None))
    assert table.left_out == [
        ("template", "writes nothing: no encoder yet"),
        ("template", "reads nothing: no decoder yet"),
    ]
    assert table.full


def test_templates_are_short() -> None:
    for path in (
        *TEMPLATES.glob("template.*"),
        TEMPLATES / "go" / "template.go",
        TEMPLATES / "rust" / "src" / "main.rs",
    ):
        assert len(path.read_text().splitlines()) <= 80, path


def test_the_page_names_what_the_kit_uses() -> None:
    """A command, key or result that the page does not explain."""
    page = (ROOT / "spec" / "testee-protocol.md").read_text()
    for word in (
        "hello",
        "decode",
        "stream",
        "encode",
        "stop",
        "skipped",
        "failed",
        "judged",
        "address_bits",
        "pieces",
    ):
        assert f"`{word}`" in page or f'"{word}"' in page or f"**{word}" in page, word
    for result in runner.RESULTS[:-1]:
        assert f"| {result} |" in page
