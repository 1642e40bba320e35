"""``serve`` and ``top`` as a user has them, over real workers.

Catches: a text that a killed worker changes, a process or a socket that is left, a saved session that is not what it
was, and output that a pipe, a program or a terminal cannot use.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from drive import together

from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import service_protocol as protocol
from boundary_bundle.shards.client import Client, ServiceError

pytestmark = pytest.mark.shards

COMMAND = [sys.executable, "-m", "boundary_bundle.cli"]
SMALL = ["--threads", "1", "--ctx", "512", "--batch", "16", "--ubatch", "8", "--seqs", "4", "--grace", "60"]
PATIENCE = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@dataclass
class Served:
    process: subprocess.Popen[str]
    path: Path

    def client(self, wait: float = 0) -> Client:
        return Client(self.path, timeout=PATIENCE, wait=wait)

    def workers(self) -> list[int]:
        with self.client() as client:
            return [shard["pid"] for shard in client.status()["shards"]]


@contextlib.contextmanager
def served(command: list[str], path: Path) -> Iterator[Served]:
    """The service in a process of its own. Whatever a test does, none is left, nor a socket."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        found = Served(process, path)
        found.client(wait=PATIENCE).close()
        workers = found.workers()
        yield found
        if process.poll() is None:
            with contextlib.suppress(ServiceError):
                workers = found.workers()
        process.terminate()
        assert process.wait(PATIENCE) == 0
        until(lambda: all(gone(pid) for pid in workers))
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """SIGHUP as it is without nohup, which a service heeds: it inherits what the tests were started with."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def command(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> list[str]:
    """Three shards of a small model on ``tmp_path / "socket"``."""
    model = ["--worker", str(patched_build.worker), "--model", str(tiny["gqa"]), "--cuts", "2,5"]
    return [*COMMAND, "serve", *model, "--socket", str(tmp_path / "socket"), *SMALL]


@pytest.fixture
def service(command: list[str], tmp_path: Path) -> Iterator[Served]:
    with served(command, tmp_path / "socket") as found:
        yield found


def test_kills_are_a_delay(service: Served) -> None:
    """Clients generate, more of them than places, while one worker after another is killed in the middle of it."""
    count = 24
    undisturbed: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    kills = threading.Semaphore(0)

    def work(seed: int, into: dict[int, list[int]], *, disturbed: bool) -> None:
        with service.client() as client, client.open() as session:
            prompt = client.tokenize(f"{seed} times a prompt that is longer than one batch, and than two of them")
            into[seed] = []
            for token in session.generate(prompt, count, stop=()):
                into[seed].append(token)
                if disturbed and seed == 0 and len(into[seed]) % 4 == 0:
                    kills.release()

    def kill() -> None:
        with service.client() as client:
            for round in range(5):
                assert kills.acquire(timeout=PATIENCE)
                os.kill(client.status()["shards"][round % 3]["pid"], signal.SIGKILL)

    for seed in range(6):
        work(seed, undisturbed, disturbed=False)
    together(*(functools.partial(work, seed, found, disturbed=True) for seed in range(6)), kill)
    assert found == undisturbed
    assert len({tuple(tokens) for tokens in found.values()}) == 6
    with service.client() as client:
        status = client.status()
    assert status["restarts"] >= 5
    assert status["replays"] > 0
    assert status["service"]["errors"] == 0
    assert status["sessions"] == []


def test_a_stopped_worker_is_a_delay(command: list[str], tmp_path: Path) -> None:
    """A worker that is waited for beyond the limit, whose end is taken for its cause, or that stays."""
    with served([*command, "--timeout", "1"], tmp_path / "socket") as service, service.client() as client:
        with client.open() as session:
            expected = list(session.generate([5, 6, 7], 8, stop=()))
        for place, (start, end) in enumerate([(0, 2), (2, 5), (5, 8)]):
            with client.open() as session:
                found = []
                for token in session.generate([5, 6, 7], 8, stop=()):
                    found.append(token)
                    if len(found) == 3:
                        stopped = service.workers()[place]
                        os.kill(stopped, signal.SIGSTOP)
                assert found == expected
            assert gone(stopped)
            lost = [event["message"] for event in client.status()["events"] if event["event"] == "lost"]
            told = rf"shard \[{start},{end}\): decode: no answer in 1 seconds: worker process {stopped} is stopped"
            assert any(re.fullmatch(told, message) for message in lost), lost
        assert client.status()["service"]["errors"] == 0


def test_a_text_that_fits_no_message_to_a_worker(service: Served) -> None:
    """A legal request that grows over a message's limit on its way to a worker, which hangs up, and with it everybody's
    states are gone."""
    with service.client() as client, client.open() as session:
        session.extend([5, 6, 7])
        workers = service.workers()
        text = b'{"text":"' + b"x" * (protocol.MAX_TEXT - 11) + b'"}'
        connection = client._socket
        assert connection is not None
        connection.sendall(protocol.HEADER.pack(protocol.MAGIC, protocol.Type.TOKENIZE, 0, 99, len(text), 0, 0) + text)
        header = protocol.unpack_header(client._receive(protocol.HEADER_BYTES))
        told = protocol.parse_text(client._receive(header.text_length))
        assert (header.request, told["name"], told["operation"]) == (99, "limit", "tokenize")
        assert (told["shard"], told["worker_operation"]) == ([0, 2], "tokenize")
        assert re.fullmatch(r"shard \[0,2\): a message text of \d+ bytes is over 1048576", told["message"])
        # More than a worker takes to tokenize.
        with pytest.raises(ServiceError, match=r"a text to tokenize has 300000 bytes, over the limit of \d+") as caught:
            client.tokenize("x" * 300_000)
        assert caught.value.name == "limit"
        session.extend([8])
        assert client.status()["replays"] == 0
        assert service.workers() == workers


def test_a_worker_without_memory(service: Served) -> None:
    """An error without shard, operation or cause, or a shard that is lost to it."""
    with service.client() as client, client.open() as session:
        session.extend([5, 6, 7])
        worker = service.workers()[0]
        size = int(Path(f"/proc/{worker}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(worker, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        with pytest.raises(ServiceError) as caught:
            client.tokenize("x" * 200_000)
        error = caught.value
        assert (error.name, error.operation, error.shard) == ("worker", "tokenize", (0, 2))
        assert (error.details["worker_operation"], error.details["worker_name"]) == ("tokenize", "no_memory")
        assert error.cause == "there is no memory for the request or its answer"
        resource.prlimit(worker, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert len(client.tokenize("x" * 200_000)) > 1
        session.extend([8])
        status = client.status()
        assert (status["restarts"], status["replays"]) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_end_in_the_middle(number: signal.Signals, command: list[str], tmp_path: Path) -> None:
    """A service that waits for a generation to end, or that leaves something when it does not."""
    path = tmp_path / "socket"
    with served(command, path) as service:
        workers = service.workers()
        with service.client() as client:
            stream = client.open().generate([5], 200, stop=())
            next(stream)
            service.process.send_signal(number)
            with pytest.raises(ServiceError) as caught:
                for _ in stream:
                    pass
            assert caught.value.name in ("lost", "closing")
        assert service.process.wait(PATIENCE) == 0
        assert service.process.stderr is not None
        told = service.process.stderr.read().splitlines()
        assert told[0].startswith("serving ")
        assert told[1:] == ["ended"]
        until(lambda: all(gone(pid) for pid in workers))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2])
def test_an_end_while_it_is_started(command: list[str], tmp_path: Path, delay: float) -> None:
    """A signal between any two steps: a socket that is bound and not yet known, an answer that is half taken."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "socket").exists())
    time.sleep(delay)
    process.terminate()
    _, told = process.communicate(timeout=PATIENCE)
    assert (process.returncode, told.splitlines()[-1]) in ((130, "interrupted"), (0, "ended"))
    assert list(tmp_path.iterdir()) == []


def sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
            found |= {match[1]} if match is not None else set()
    return found


def test_no_network_socket(service: Served) -> None:
    """A service or a worker of it that can be reached from elsewhere."""
    with service.client() as client:
        client.open().extend([1, 2, 3])
        pids = [service.process.pid, *service.workers()]
        assert all(map(sockets_of, pids))  # the look-up works
        for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
            file = Path(f"/proc/{service.process.pid}/net/{table}")
            if file.exists():
                inodes = {line.split()[9] for line in file.read_text().splitlines()[1:]}
                for pid in pids:
                    assert not sockets_of(pid) & inodes, table


def test_a_service_that_is_killed(command: list[str], tmp_path: Path) -> None:
    """Workers that outlive it, or a successor that does not take its place."""
    path = tmp_path / "socket"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)
    service = Served(process, path)
    service.client(wait=PATIENCE).close()
    workers = service.workers()
    process.kill()
    process.wait()
    until(lambda: all(gone(pid) for pid in workers))
    assert path.exists()
    with served(command, path) as service, service.client() as client:
        assert client.open().extend([1, 2, 3])


def test_a_session_that_is_saved(command: list[str], tmp_path: Path) -> None:
    """A session that is another one after the service, and all workers, were started anew."""
    id = bytes(range(16))
    folder = tmp_path / "states"
    folder.mkdir()
    more = [*command, "--state-dir", str(folder)]
    with served(more, tmp_path / "socket") as service, service.client() as client:
        session = client.open(id)
        prompt = client.tokenize("a session that is to be kept for a long time")
        begun = list(session.generate(prompt, 8, stop=()))
        session.save("kept")
        position = session.position
        rest = list(session.generate(begun[-1:], 8, stop=()))
    assert {path.name for path in folder.iterdir()} >= {"kept.json", "kept.0-2.bundle", "kept.2-5.bundle"}
    with served(more, tmp_path / "socket") as service, service.client() as client:
        session = client.open(id)
        session.restore("kept")
        assert session.position == position
        assert list(session.generate(begun[-1:], 8, stop=())) == rest
        assert client.status()["replays"] == 0
        for bad, reason in (("absent", "nothing is saved as 'absent'"), ("kept", "position_mismatch")):
            with pytest.raises(ServiceError, match=reason):
                (session if bad == "kept" else client.open()).restore(bad)
        with pytest.raises(ServiceError, match=f"is session {id.hex()}"):
            client.open().restore("kept")


def test_a_session_that_cannot_be_saved(command: list[str], tmp_path: Path) -> None:
    """A full disk that is told without shard, operation or file, that loses the session, or that leaves half a file."""
    folder = tmp_path / "states"
    folder.mkdir()

    def room(pid: int, count: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (count, resource.RLIM_INFINITY))

    with served([*command, "--state-dir", str(folder)], tmp_path / "socket") as service, service.client() as client:
        session = client.open()
        session.extend(list(range(5, 25)))
        worker = service.workers()[1]
        room(worker, 64)
        with pytest.raises(ServiceError) as caught:
            session.save("kept")
        error = caught.value
        assert (error.name, error.operation, error.shard) == ("worker", "save", (2, 5))
        assert error.details["worker_operation"] == "save"
        assert re.fullmatch(r"file 'kept\.2-5\.bundle' of \d+ bytes cannot be written: File too large", error.cause)
        room(worker, resource.RLIM_INFINITY)
        room(service.process.pid, 64)
        with pytest.raises(ServiceError) as caught:
            session.save("kept")
        error = caught.value
        assert (error.name, error.operation, error.shard) == ("worker", "save", None)
        assert error.cause == f"cannot write {folder / 'kept.json'}: File too large"
        room(service.process.pid, resource.RLIM_INFINITY)
        assert not (folder / "kept.json").exists()
        session.save("kept")
        assert len(list(folder.iterdir())) == 4
        assert service.workers()[1] == worker
        assert client.status()["replays"] == 0


def test_refusals_of_serve(
    service: Served, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*more: str) -> str:
        assert main([*command[len(COMMAND) :], *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        return err

    assert "a server listens there already" in refusal()
    with service.client() as client:
        assert client.open().extend([1])
    refusal = functools.partial(refusal, "--socket", str(tmp_path / "other"))
    assert "there is no folder" in refusal("--state-dir", str(tmp_path / "absent"))
    assert "cut 9 is out of range" in refusal("--cuts", "9")
    assert "too small for 4 sessions" in refusal("--ctx", "3")
    assert "not a number of seconds" in refusal("--grace", "0")
    assert "cannot start" in refusal("--worker", str(tmp_path / "absent"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["socket"]


# top


def test_top_for_programs(service: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with service.client() as client:
        session = client.open()
        session.extend(list(range(3, 40)))
        cold = [client.open() for _ in range(2)]
        assert main(["top", "--socket", str(service.path), "--once", "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        found = json.loads(out)
        assert [shard["range"] for shard in found["shards"]] == [[0, 2], [2, 5], [5, 8]]
        for shard in found["shards"]:
            assert shard["resident_bytes"] > 0
            assert shard["weight_bytes"] > 0
            assert shard["kv_bytes"] > 0
            assert shard["tokens_per_second"] > 0
            assert 0 < shard["compute_share"] < 1
            assert 0 < shard["busy"] <= 1
            assert not gone(shard["pid"])
        assert sum(shard["compute_share"] for shard in found["shards"]) == pytest.approx(1, abs=0.001)
        sessions = {entry["id"]: entry for entry in found["sessions"]}
        assert set(sessions) == {session.id.hex(), *(one.id.hex() for one in cold)}
        mine = sessions[session.id.hex()]
        assert (mine["hot"], mine["position"], mine["epochs"], mine["clients"]) == (True, 37, 0, 1)
        # Its part of the cells of every layer, whichever shard has it.
        total = sum(shard["kv_bytes"] for shard in found["shards"])
        assert mine["kv_bytes"] == total // (found["positions"] * found["slots"]) * 37
        assert sessions[cold[0].id.hex()]["kv_bytes"] == 0
        assert found["outcomes"]["hit"] > 0
        assert found["service"]["connections"] == 2


def test_top_as_text(service: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with service.client() as client:
        session = client.open()
        session.extend([3, 4, 5])
        assert main(["top", "--socket", str(service.path), "--once"]) == 0
        out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert re.search(r"^  2 +2 to 4 +\d+ ", out, re.MULTILINE), out
    assert re.search(rf"^  {session.id.hex()[:8]} +\+0 +3 +[\d,]+ +hot +1 +\d+s +\d+s$", out, re.MULTILINE), out
    assert re.search(r"^outcomes on the shards: hit \d+$", out, re.MULTILINE), out


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_top_in_a_pipe(more: list[str], service: Served) -> None:
    """Colour, a last look that is cut off, or a complaint at its end."""
    command = [*COMMAND, "top", "--socket", str(service.path), "--interval", "0.05", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        while sum("outcome" in line for line in lines) < 3:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in "".join(lines) + out
    if more:
        assert len([json.loads(line) for line in lines]) == 3


def test_top_on_a_terminal(service: Served) -> None:
    """A terminal that is left on another screen, or without its cursor."""
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"}
    command = [*COMMAND, "top", "--socket", str(service.path), "--interval", "0.05"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        shown = b""
        interrupted = False
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65_536):
                shown += piece
                if not interrupted and shown.count(b"outcomes on the shards") > 2:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        os.close(ours)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"2 to 4" in shown


def test_top_without_a_service(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "socket"
    assert main(["top", "--socket", str(path)]) == 2
    assert f"no service at {path}" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
        assert main(["top", "--socket", str(path), "--once", "--json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    # And one that ends while it is watched.
    with served(command, path) as service:
        watch = [*COMMAND, "top", "--socket", str(path), "--interval", "0.05"]
        with subprocess.Popen(watch, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            with service.client() as client:
                until(lambda: client.status()["service"]["connections"] == 2)
            service.process.terminate()
            _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2
        assert re.fullmatch(r"error: [^\n]+\n", err), err
