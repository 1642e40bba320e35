"""The soak, for some seconds: that a service passes it, and that it notices what it is there to notice."""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soak

from boundary_bundle.native import NativeBuild
from boundary_bundle.shards.client import ServiceError

#: A service with a fault of each kind that the soak looks for.
PLANTED = """
import os, sys, tempfile
from boundary_bundle.cli import main
from boundary_bundle.shards import service
from boundary_bundle.shards.service import Service, Type

forget, extend, release = Service._forget, Service._extend, Service._release
calls = []

def leaky_forget(self, connection):
    os.dup(connection.socket.fileno())
    forget(self, connection)

def wrong_extend(self, connection, request):
    calls.append(1)
    answer = extend(self, connection, request)
    if len(calls) % 50 == 0:
        answer["sampled"] = [token ^ 1 for token in answer["sampled"]]
    return answer

def failing_detokenize(self, connection, request):
    raise RuntimeError("planted")

def littering_release(self, entry, **how):
    os.close(tempfile.mkstemp(prefix="planted-")[0])
    return release(self, entry, **how)

Service._forget, Service._release = leaky_forget, littering_release
service._HANDLERS.update({Type.EXTEND: wrong_extend, Type.DETOKENIZE: failing_detokenize})
sys.exit(main(sys.argv[1:]))
"""


def run(tmp_path: Path, build: NativeBuild, *more: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "soak.json"
    status = soak.main(["--worker", str(build.worker), "--json", str(file), *more])
    return status, json.loads(file.read_text("utf-8"))


@pytest.mark.shards
def test_a_service_passes(patched_build: NativeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = run(tmp_path, patched_build, "--minutes", "0.25", "--rate", "5", "--seed", "5")
    assert (status, told["findings"]) == (0, {})
    assert set(told["faults"]) == set(soak.FAULTS)
    assert told["compared"] > 0
    assert told["counts"]["restarts"] > 0
    assert len({rest["generation"] for rest in told["rests"]}) > 1
    out, _ = capsys.readouterr()
    assert re.search(r"^\| service killed \| \d+ \| status -9 ", out, re.MULTILINE), out
    assert re.search(r"^\| findings \| 0 \|$", out, re.MULTILINE), out


@pytest.mark.shards
def test_planted_faults_are_found(
    patched_build: NativeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A soak that passes whatever the service does."""
    program = tmp_path / "planted.py"
    program.write_text(PLANTED, "utf-8")
    more = ["--program", f"{sys.executable} {program}", "--minutes", "0.07", "--rate", "0.2", "--seed", "9"]
    status, told = run(tmp_path, patched_build, *more)
    assert status == 1
    for kind, example in {
        "a wrong token": r"\d+, not \d+, after position \d+",
        "more descriptors than at first": r"\d+, not \d+: .*socket.*",
        "an error that nothing explains": "service: detokenize: error 9 internal: RuntimeError: planted",
        "files are left": r"tmp/planted-\w+.*",
        "the service logged what it did not expect": "detokenize failed: RuntimeError: planted",
    }.items():
        assert re.fullmatch(rf"after \d+ s: {example}", told["examples"].get(kind, "nothing")), (kind, told["examples"])
    out, _ = capsys.readouterr()
    assert "to see it again: make soak MINUTES=0.07 SOAK_ARGS='--seed 9 --rate 0.2'" in out


@pytest.mark.shards
def test_an_interrupt_leaves_nothing(patched_build: NativeBuild, tmp_path: Path) -> None:
    """A service that outlives the soak, or a report of a run that was not made."""
    command = [sys.executable, soak.__file__, "--worker", str(patched_build.worker), "--minutes", "60", "--report"]
    reports = list((soak.ROOT / "fuzz" / "reports").iterdir())
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        # A client has saved something.
        assert soak.until(lambda: bool(list(tmp_path.glob("bb-soak-*/states/client*"))))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=soak.PATIENCE)
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted")
    assert "| findings | 0 |" in out
    assert list(tmp_path.iterdir()) == []
    assert soak.processes_that_name(tmp_path) == []
    assert list((soak.ROOT / "fuzz" / "reports").iterdir()) == reports


def test_the_report() -> None:
    """A report that hides a finding, or a fault."""
    tally = soak.Tally(7, seconds=90.0, visits=1234, rests=[rest(0, 1, 10, p1=5), rest(60, 1, 11, p1=6)])
    tally.faults["worker killed"] = 12
    tally.led_to["worker killed"] = collections.Counter({"killed": 11, "no worker stood": 1})
    tally.errors["worker of save: planted | here"] = 3
    tally.findings["a wrong token"] = 2
    tally.examples["a wrong token"] = "after 5 s: 1, not 2"
    text = soak.report(tally, "make soak MINUTES=1.5")
    for part in (
        "| worker killed | 12 | killed 11, no worker stood 1 |",
        "| minutes | 1.5 |",
        "| sessions | 1,234 |",
        "| descriptors of the service | 12 | 12 | 12 | 12 |",
        "| KiB of the service | 10,240 | 11,264 | 11,264 | 11,264 |",
        "| 3 | worker of save: planted / here |",
        "- a wrong token, 2 times; after 5 s: 1, not 2",
        "`make soak MINUTES=1.5`",
    ):
        assert part in text, part
    assert json.loads(json.dumps(soak.numbers(tally)))["faults"] == {"worker killed": 12}


def rest(seconds: float, generation: int, service: int, **workers: int) -> soak.Rest:
    sizes = {int(pid[1:]): size << 20 for pid, size in workers.items()}
    return soak.Rest(seconds, generation, 4, 0, 12, 3, service << 20, sizes, 1, [])


def test_growth_is_that_of_one_process() -> None:
    """A leak that a restart hides, or the first minutes of a process that are taken for one."""
    early = [rest(0, 1, 10, p1=5), rest(60, 1, 60, p1=50), rest(120, 1, 60, p1=50)]
    assert soak.growths([*early, rest(180, 1, 61, p1=51), rest(240, 2, 30, p2=30), rest(300, 2, 70, p2=60)]) == []
    assert soak.growths([*early, rest(180, 1, 61, p1=51), rest(240, 1, 62), rest(300, 1, 72, p1=68)]) == [
        "a worker grew from 52,224 to 69,632 KiB"
    ]
    assert soak.growths([*early, rest(180, 1, 55, p1=51), rest(240, 1, 62), rest(300, 1, 72, p1=60)]) == [
        "the service grew from 56,320 to 73,728 KiB"
    ]
    assert soak.growths([*early, rest(180, 2, 75, p1=51)]) == ["the service has 76,800 KiB, 10,240 at the first rest"]


def told(code: int, name: str, operation: str = "extend", **details: Any) -> ServiceError:
    return ServiceError(code, name, "a cause", operation, {"message": "a cause", **details})


@pytest.mark.parametrize(
    ("error", "periods", "wrong"),
    [
        (told(0, "timeout"), ["end"], "an error that nothing explains"),
        (told(0, "reply"), ["end"], "an error that nothing explains"),
        (told(9, "internal"), ["end"], "an error that nothing explains"),
        (told(3, "full"), ["flood"], "an error that nothing explains"),
        (told(77, "worker"), [], "an undeclared error"),
        (told(6, "worker", shard=[0, 2], worker_name="lost"), [], "a worker's error without shard or operation"),
        (told(6, "worker", worker_operation="decode", worker_name="lost"), [], "a worker's error without shard"),
        (told(6, "worker", shard=[0, 2], worker_operation="decode", worker_name="lost"), [], None),
        (told(6, "worker"), ["files"], "a pipeline that failed"),
        (told(6, "worker", "save"), ["files"], None),
        (told(6, "worker", "restore"), ["end"], "a pipeline that failed"),
        (told(0, "lost"), ["flood", "files"], "a lost connection"),
        (told(0, "lost"), ["end"], None),
        (told(7, "connections"), ["end"], "no place for a connection"),
        (told(7, "connections"), ["flood"], None),
        (told(2, "session", outcome="miss"), ["end"], None),
        (told(2, "session", outcome="miss"), [], "a session is not as it was"),
        (told(2, "session", outcome="position_mismatch"), ["end"], "a session is not as it was"),
        (told(8, "closing", message="two\nlines"), ["end"], "an error that is no sentence"),
    ],
)
def test_what_a_client_may_be_told(error: ServiceError, periods: list[str], wrong: str | None) -> None:
    run = object.__new__(soak.Soak)
    run._lock = soak.threading.Lock()
    run._periods = [[name, 0.0, 10.0] for name in periods]
    found = run.wrong_with(error, 5.0, 5.0)
    assert (found is None) == (wrong is None)
    assert (found or "").startswith(wrong or "")
    if wrong is None and periods:  # long after what would have explained it
        assert run.wrong_with(error, 11.5, 11.5) is not None
