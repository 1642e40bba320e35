"""A service under traffic and faults for a long time: wrong answers, undeclared errors, and what is left behind.

    soak.py --minutes 60 --seed 1 --report --json FILE

A real ``boundary-bundle serve`` over three shards of a tiny model, with more clients than its shards have places. Every
answer is compared with an undisturbed run, and about every second one fault is drawn: workers that are killed or
stopped, clients that misbehave, a state folder that cannot be written, a service that is ended and started again. Each
minute the traffic rests, and what there is then (processes, descriptors, threads, memory, files) is compared with what
there was at the start. Linux, whose /proc tells it. A seed draws the same faults with the same parameters in the same
order; what they meet depends on the clock.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import functools
import itertools
import json
import os
import random
import re
import resource
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from boundary_bundle.cli import top  # noqa: E402
from boundary_bundle.shards import SessionPipeline, Settings, local_workers, make_plan, tiny_models  # noqa: E402
from boundary_bundle.shards import service_protocol as protocol  # noqa: E402
from boundary_bundle.shards.client import Client, ClientSession, ServiceError  # noqa: E402
from boundary_bundle.shards.service_protocol import ERRORS, Type  # noqa: E402

#: Of the processes that are started: the package is this checkout's.
PACKAGE = {"PYTHONPATH": str(ROOT)}
SHAPE = tiny_models.Shape(n_layer=6, n_head=2, n_head_kv=1, head_size=32, n_ff=64)
CUTS = (2, 4)
SHARDS = len(CUTS) + 1
SETTINGS = Settings(threads=1, ctx=768, batch=16, ubatch=8, seqs=3)
CLIENTS = 8
#: Seconds: after which the driver gives up on a silent worker, and for which a session without a client is kept.
WORKER_LIMIT, GRACE = 2.0, 2.0
#: Seconds within which anything that must happen happens, on a busy machine.
PATIENCE = 90.0
#: Seconds between two rests.
MINUTE = 60.0
#: What the service, and each worker, may grow by over the second half, in bytes, from its second rest on: in its first
#: minutes the event log and the remembered epochs fill up, and allocators keep what a flood of clients took. ABOVE is
#: what it may have at any time beyond the service, or the largest worker, of the first rest.
ABOVE = 64 << 20
GROWTH = 16 << 20
#: A sampled token is compared where its logit leads by so much: a replay computes other batches than the generation
#: did, and their last bits differ.
LEAD = 0.1
#: A file may get no longer than this when there is "no room".
TINY_FILE = 64


# ---- what is right --------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """A prompt and its greedy tokens; ``following[i]`` is what comes after the first i + 1 of them, None where the
    lead is too small to be compared."""

    tokens: list[int]
    following: list[int | None]
    prompt: int


@dataclass(frozen=True)
class Truth:
    """Undisturbed answers, of one unsplit worker."""

    stories: list[Story]
    text: str
    text_tokens: list[int]
    pieces: list[bytes]


def undisturbed(worker: Path, model: Path, seed: int, count: int = 12) -> Truth:
    """``count`` stories whose generation is decided everywhere. Drawn from ``seed``."""
    draw = random.Random(seed)  # nosec B311: the same prompts for the same seed
    stories: list[Story] = []
    with SessionPipeline(local_workers(worker, model, SETTINGS), make_plan(SHAPE.n_layer, [])) as pipeline:
        text = "split this, " * 3 + "then go on \u00e9\U0001f600"
        text_tokens = pipeline.tokenize(text)
        pieces = pipeline.detokenize(text_tokens)
        while len(stories) < count:
            tokens = [draw.randrange(3, tiny_models.N_VOCAB) for _ in range(draw.randrange(2, 40))]
            prompt, following = len(tokens), []
            session = pipeline.open()
            given = list(tokens)
            while len(tokens) < prompt + 32:
                step = session.extend(given, outputs="all", logits=True)
                assert step.logits is not None
                for token, row in zip(step.sampled, step.logits, strict=True):
                    second, first = sorted(row)[-2:]
                    following.append(token if first - second >= LEAD else None)
                given = [step.sampled[-1]]
                tokens += given
            session.release()
            if None not in following[prompt - 1 :]:
                stories.append(Story(tokens[:-1], following, prompt))
    return Truth(stories, text, text_tokens, pieces)


# ---- what is counted ------------------------------------------------------------------


@dataclass
class Rest:
    """What there is while nobody asks for anything."""

    seconds: float
    generation: int
    processes: int
    zombies: int
    descriptors: int
    threads: int
    service_bytes: int
    worker_bytes: dict[int, int]
    sockets: int
    #: Names of files that nobody will use any more.
    leftovers: list[str]


@dataclass
class Tally:
    seed: int
    seconds: float = 0.0
    visits: int = 0
    requests: int = 0
    tokens: int = 0
    compared: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    #: Of each kind of fault, what its own connections or processes met.
    led_to: dict[str, collections.Counter[str]] = field(default_factory=dict)
    #: Of clients, by name and operation.
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    #: What the services counted, added up over all of them.
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    rests: list[Rest] = field(default_factory=list)
    #: By kind: how often.
    findings: collections.Counter[str] = field(default_factory=collections.Counter)
    #: By kind: what it was the first time.
    examples: dict[str, str] = field(default_factory=dict)


class Finding(Exception):
    """Something that must not be: its kind, and what it was."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


# ---- the machine ----------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty for a process that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rsplit(")", 1)[1].split()
    except OSError:
        return []


def gone(pid: int) -> bool:
    return _stat(pid)[:1] in ([], ["Z"], ["X"])


def children(pid: int) -> list[int]:
    """Those that ended and were not waited for among them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _stat(int(entry.name))[1:2] == [str(pid)]:
            found.append(int(entry.name))
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def count_of(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def processes_that_name(path: Path) -> list[int]:
    """All that have ``path`` in their command line: services and workers of this run, whoever is their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.fsencode(path) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def until(condition: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Whether it came to be."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


class Served:
    """One process of the service."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, generation: int) -> None:
        self.path = folder / "socket"
        self.generation = generation
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **PACKAGE}
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
        self.pid = self.process.pid
        try:
            self.client(wait=PATIENCE).close()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def client(self, wait: float = 0.0, *, reconnect: bool = True) -> Client:
        return Client(self.path, timeout=PATIENCE, wait=wait, reconnect=reconnect)

    def workers(self) -> list[int]:
        """Those that stand or are about to."""
        return [pid for pid in children(self.pid) if not gone(pid)]

    def send(self, pid: int, number: signal.Signals) -> bool:
        """A signal to one of its workers, and to no process that has taken the number since."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if _stat(pid)[1:2] != [str(self.pid)]:
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


class Raw:
    """A client that says what it likes."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.number = 0
        try:
            self.socket.settimeout(PATIENCE)
            self.socket.connect(str(path))
            if hello:
                self.ask(Type.HELLO, {"major": protocol.MAJOR, "minors": protocol.MINORS})
        except BaseException:
            self.socket.close()
            raise

    def ask(self, kind: int, wish: dict[str, Any] | None = None) -> dict[str, Any]:
        self.number += 1
        with contextlib.suppress(BrokenPipeError):  # it may have said why before it closed
            self.socket.sendall(protocol.pack(kind, self.number, wish))
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Raises EOFError at the end."""
        header = protocol.unpack_header(self._read(protocol.HEADER_BYTES))
        text = protocol.parse_text(self._read(header.text_length))
        return {**text, "type": header.type}

    def _read(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.socket.recv(count - len(data))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError
            data += piece
        return data

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def frame(kind: int = Type.STATUS, text: bytes = b"", **changes: Any) -> bytes:
    """A message, perhaps with another magic, other reserved bytes or another length than it has."""
    return (
        protocol.HEADER.pack(
            changes.get("magic", protocol.MAGIC),
            kind,
            changes.get("reserved", 0),
            7,
            changes.get("length", len(text)),
            changes.get("reserved2", 0),
            changes.get("bundle", 0),
        )
        + text
    )


# ---- the run --------------------------------------------------------------------------


class Soak:
    """One run over a folder of its own."""

    def __init__(
        self,
        folder: Path,
        worker: Path,
        *,
        seed: int,
        seconds: float,
        rate: float = 1.0,
        program: Sequence[str] = (sys.executable, "-m", "boundary_bundle.cli"),
        say: Callable[[str], object] = print,
    ) -> None:
        self.folder = folder
        self.states = folder / "states"
        self.model = tiny_models.write(folder / "model.gguf", "soak", shape=SHAPE)
        for name in ("states", "tmp"):
            (folder / name).mkdir()
        self.truth = undisturbed(worker, self.model, seed)
        self.command = [
            *(*program, "serve", "--worker", str(worker), "--model", str(self.model)),
            *("--cuts", ",".join(map(str, CUTS)), "--socket", str(folder / "socket"), "--state-dir", str(self.states)),
            *("--threads", str(SETTINGS.threads), "--ctx", str(SETTINGS.ctx), "--seqs", str(SETTINGS.seqs)),
            *("--batch", str(SETTINGS.batch), "--ubatch", str(SETTINGS.ubatch)),
            *("--timeout", str(WORKER_LIMIT), "--grace", str(GRACE)),
        ]
        self.tally = Tally(seed)
        self.rate = rate
        self._seconds = seconds
        self._program = program
        self._say = say
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._flow = threading.Event()
        self._over = False
        self._resting = 0
        self._running: list[threading.Thread] = []
        #: When something was disturbed that clients may hear of: name, begin, and end or infinity.
        self._periods: list[list[Any]] = []
        self._service_lock = threading.Lock()
        self._generations = itertools.count(1)
        self._counted: dict[int, dict[str, Any]] = {}
        self._first: Rest | None = None
        self._doing: dict[str, str] = {}
        self.service = self._start()

    # -- notes

    def found(self, kind: str, detail: str = "") -> None:
        with self._lock:
            self.tally.findings[kind] += 1
            fresh = kind not in self.tally.examples
            if fresh:
                self.tally.examples[kind] = f"after {time.monotonic() - self._began:.0f} s: {detail}"
        if fresh:
            self._say(f"FOUND {kind}: {detail}")

    def count(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.tally, name, getattr(self.tally, name) + value)

    def met(self, fault: str, what: str) -> None:
        with self._lock:
            self.tally.led_to.setdefault(fault, collections.Counter())[what] += 1

    @contextlib.contextmanager
    def period(self, name: str) -> Iterator[None]:
        entry = [name, time.monotonic(), float("inf")]
        with self._lock:
            self._periods.append(entry)
        try:
            yield
        finally:
            entry[2] = time.monotonic()

    def disturbed(self, name: str, since: float) -> bool:
        """Whether there has been such a period since then, or until a second before."""
        with self._lock:
            return any(one == name and end + 1 >= since for one, _, end in self._periods)

    def flowing(self) -> bool:
        return self._flow.is_set() and not self._over

    def wait(self, seconds: float) -> None:
        """That long, or until the traffic is to rest."""
        deadline = time.monotonic() + seconds
        while self.flowing() and time.monotonic() < deadline:
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))

    # -- the service

    def _start(self) -> Served:
        return Served(self.command, self.folder, self.folder / "service.log", next(self._generations))

    def end_service(self, number: signal.Signals) -> str:
        """End the service, check what it leaves, and start it again; how it went."""
        with self._service_lock, self.period("end"):
            old = self.service
            workers = old.workers()
            old.process.send_signal(number)
            try:
                status = old.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.found("the service did not end", f"in {PATIENCE:g} s after {number.name}")
                old.process.kill()
                status = old.process.wait()
            if number == signal.SIGTERM:
                if status != 0:
                    self.found("the service ended with another status than 0", f"{status} after SIGTERM")
                if old.path.exists():
                    self.found("the socket is left", "after SIGTERM")
            else:
                # Nothing can end by itself that somebody has stopped.
                for pid in workers:
                    with contextlib.suppress(OSError):
                        if os.fsencode(self.model) in Path(f"/proc/{pid}/cmdline").read_bytes():
                            os.kill(pid, signal.SIGCONT)
            if not until(lambda: all(map(gone, workers))):
                self.found("workers outlive their service", f"which was ended by {number.name}")
            if not self._over:
                self.service = self._start()
        return f"status {status}"

    # -- clients

    def wrong_with(self, error: ServiceError, since: float, asked: float) -> str | None:
        """Why a client must not be told this; ``since`` is when it connected, ``asked`` when it asked."""
        name, details = error.name, error.details
        if error.code and ERRORS.get(error.code) != name:
            return "an undeclared error"
        if not error.cause or not error.operation or not str(error).isprintable():
            return "an error that is no sentence"
        if name in ("lost", "closing"):
            return None if self.disturbed("end", since) else "a lost connection"
        if name == "connections":
            return None if self.disturbed("flood", since) else "no place for a connection"
        if name == "session":
            return None if error.outcome == "miss" and self.disturbed("end", since) else "a session is not as it was"
        if name == "worker":
            if "worker_name" in details:
                if error.shard is None or not details.get("worker_operation"):
                    return "a worker's error without shard or operation"
                return None
            # The driver's own part of a saved session.
            saving = error.operation in ("save", "restore")
            return None if saving and self.disturbed("files", asked) else "a pipeline that failed"
        return "an error that nothing explains"

    def judge(self, error: ServiceError, since: float, asked: float | None = None) -> None:
        cause = error.cause
        for pattern, kind in ((r"/[^ :']+", "FILE"), (r"process \d+", "process N"), (r"\d+ bytes", "N bytes")):
            cause = re.sub(pattern, kind, cause)
        cause = re.sub(r"client\d+", "CLIENT", cause)[:100]
        with self._lock:
            self.tally.errors[f"{error.name} of {error.operation}: {cause}"] += 1
        wrong = self.wrong_with(error, since, since if asked is None else asked)
        if wrong is not None:
            self.found(wrong, str(error))

    def visit(self, draw: random.Random, name: str, saved: dict[str, Any]) -> None:
        """One client's time with one session."""
        since = time.monotonic()
        try:
            with Client(self.folder / "socket", timeout=PATIENCE, wait=PATIENCE) as client:
                _Visit(self, client, draw, name, saved, since).run()
        except ServiceError as error:
            self.judge(error, since)
            self.wait(0.05)
        self.count(visits=1)

    def _client(self, number: int) -> None:
        draw = random.Random(self.tally.seed * 1000 + number)  # nosec B311: the same requests for the same seed
        saved: dict[str, Any] = {}
        name = f"client{number}"
        while not self._over:
            if not self._flow.is_set():
                with self._lock:
                    self._resting += 1
                while not self._flow.is_set() and not self._over:
                    time.sleep(0.02)
                with self._lock:
                    self._resting -= 1
                continue
            try:
                self.visit(draw, name, saved)
            except Finding as finding:
                self.found(finding.kind, finding.detail)
            except Exception as error:
                self.found("a client failed", f"{type(error).__name__}: {error}")
            self._doing.pop(name, None)

    # -- faults

    def _inject(self) -> None:
        draw = random.Random(self.tally.seed)  # nosec B311: the same faults for the same seed
        deal = list(FAULTS)
        draw.shuffle(deal)  # each of them once before they are drawn by weight
        number = 0
        while not self._over:
            time.sleep(min(5.0, draw.expovariate(self.rate)))
            if not self.flowing():
                continue
            name = deal.pop() if deal else draw.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
            number += 1
            own = random.Random(self.tally.seed * 1_000_000 + number)  # nosec B311: the same parameters too
            thread = threading.Thread(target=self._fault, args=(name, own), name=f"fault {name}", daemon=True)
            with self._lock:
                self.tally.faults[name] += 1
                self._running = [*(one for one in self._running if one.is_alive()), thread]
            thread.start()

    def _fault(self, name: str, draw: random.Random) -> None:
        since = time.monotonic()
        try:
            self.met(name, FAULTS[name][1](self, draw))
        except Finding as finding:
            self.found(finding.kind, f"{name}: {finding.detail}")
        except (EOFError, OSError) as error:
            # Of a service that is being ended, or that has no place for one more.
            if self.disturbed("end", since) or self.disturbed("flood", since):
                self.met(name, "the connection ended")
            else:
                self.found("a connection ended", f"{name}: {type(error).__name__}: {error}")
        except Exception as error:
            self.found("a fault failed", f"{name}: {type(error).__name__}: {error}")

    # -- rests

    def _status(self) -> dict[str, Any]:
        with self.service.client() as client:
            found = client.status()
        self._counted[self.service.generation] = {
            **{key: found[key] for key in _COUNTED},
            "requests": found["service"]["requests"],
        }
        return found

    def rest(self) -> Rest:
        """Let everything end, and look at what is left."""
        self._flow.clear()
        if self._first is not None and not until(lambda: self._resting == CLIENTS or self._over):
            self.found("clients got no answer", f"in {PATIENCE:g} s: {sorted(self._doing.values())}")
        # A worker that was stopped last is given up, and a shard that was lost is started again, by whoever comes next.
        deadline = time.monotonic() + PATIENCE
        over = False
        while not over and time.monotonic() < deadline:
            over = not any(thread.is_alive() for thread in self._running)
            self.visit(random.Random(0), "rest", {})  # nosec B311: the same visit at each rest
        for thread in self._running:
            if thread.is_alive():
                self.found("a fault did not come to an end", f"in {PATIENCE:g} s: {thread.name}")
        service = self.service
        states: dict[str, Any] = {}

        def quiet() -> bool:
            states.update(self._status())
            return not states["sessions"] and states["service"]["connections"] == 1 and states["present"] == 0

        if not until(quiet):
            left = f"{len(states['sessions'])} sessions, {states['service']['connections']} connections"
            self.found("taken although nobody is there", f"{left}, {states['present']} places")
        # The thread of the connection that asked may take a moment to end.
        expected = self._first
        if expected is None:
            time.sleep(1)
        else:
            until(lambda: self._look().threads <= expected.threads, 5.0)
        rest = self._look()
        self.tally.rests.append(rest)
        if expected is None:
            self._first = rest
        else:
            for what in ("descriptors", "threads", "processes", "sockets"):
                here, there = getattr(rest, what), getattr(expected, what)
                if here > there:
                    self.found(f"more {what} than at first", f"{here}, not {there}: {self._details(what)}")
        if rest.zombies:
            self.found("ended processes are not waited for", str(rest.zombies))
        if rest.leftovers:
            self.found("files are left", ", ".join(rest.leftovers[:5]))
        with contextlib.suppress(subprocess.TimeoutExpired):
            shown = [*self._program, "top", "--socket", str(service.path), "--once", "--json"]
            environment = {**os.environ, **PACKAGE}
            done = subprocess.run(shown, capture_output=True, timeout=PATIENCE, check=False, env=environment)
            if done.returncode != 0 or len(json.loads(done.stdout)["shards"]) != SHARDS:
                self.found("top failed", f"with status {done.returncode}: {done.stderr.decode()[:200]}")
        if not self._over:
            self._flow.set()
        return rest

    def _look(self) -> Rest:
        pid = self.service.pid
        own = children(pid)
        return Rest(
            round(time.monotonic() - self._began, 1),
            self.service.generation,
            len(processes_that_name(self.model)),
            sum(gone(one) for one in own),
            count_of(f"/proc/{pid}/fd"),
            count_of(f"/proc/{pid}/task"),
            resident(pid),
            {one: resident(one) for one in own},
            sum(stat.S_ISSOCK(path.lstat().st_mode) for path in self.folder.iterdir()),
            self._leftovers(),
        )

    def _leftovers(self) -> list[str]:
        known = {"model.gguf", "socket", "states", "tmp", "service.log"}
        found = [path.name for path in self.folder.iterdir() if path.name not in known]
        found += [f"tmp/{path.name}" for path in (self.folder / "tmp").iterdir()]
        ranges = "|".join(f"{start}-{end}" for start, end in make_plan(SHAPE.n_layer, CUTS))
        good = re.compile(rf"(client\d+|rest)\.(json|({ranges})\.bundle)")
        return found + [f"states/{path.name}" for path in self.states.iterdir() if not good.fullmatch(path.name)]

    def _details(self, what: str) -> str:
        if what == "descriptors":
            folder = f"/proc/{self.service.pid}/fd"
            links = collections.Counter(
                re.sub(r"\d+", "N", os.readlink(f"{folder}/{name}"))
                for name in os.listdir(folder)
                if os.path.lexists(f"{folder}/{name}")
            )
            return ", ".join(f"{count} {link}" for link, count in links.most_common(6))
        if what == "processes":
            return ", ".join(f"{pid} {''.join(_stat(pid)[:1])}" for pid in processes_that_name(self.model))
        return ""

    # -- all of it

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(number,), daemon=True) for number in range(CLIENTS)]
        threads.append(threading.Thread(target=self._inject, daemon=True))
        terminal = sys.stderr.isatty()
        try:
            self.rest()
            self._began = began = last = time.monotonic()
            for thread in threads:
                thread.start()
            while (now := time.monotonic()) - began < self._seconds:
                time.sleep(min(0.5, max(0.01, began + self._seconds - now)))
                if terminal:
                    print(f"\r\x1b[K{self._line()}", end="", file=sys.stderr, flush=True)
                with contextlib.suppress(ServiceError, KeyError, OSError):
                    self._status()
                if now - last >= MINUTE:
                    self.rest()
                    last = time.monotonic()
                    if not terminal:
                        self._say(self._line())
            self.rest()
        finally:
            self.tally.seconds = round(time.monotonic() - self._began, 1)
            self._over = True
            if terminal:
                print(file=sys.stderr)
            self._finish([thread for thread in threads if thread.ident is not None])

    def _finish(self, threads: Sequence[threading.Thread]) -> None:
        for thread in [*threads, *self._running]:
            thread.join(PATIENCE)
        self.end_service(signal.SIGTERM)
        for counted in self._counted.values():
            self.tally.counts.update(counted)
        left = processes_that_name(self.model)
        if left:
            self.found("processes are left", self._details("processes"))
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        leftovers = self._leftovers()
        if leftovers:
            self.found("files are left", ", ".join(leftovers[:5]))
        for what in growths(self.tally.rests):
            self.found("memory grew", what)
        for line in (self.folder / "service.log").read_text("utf-8", "replace").splitlines():
            if not line.startswith(("serving ", "ended", *_LOGGED)):
                self.found("the service logged what it did not expect", line[:200])

    def _line(self) -> str:
        tally = self.tally
        spent = time.monotonic() - self._began
        return (
            f"{spent / 60:5.1f} min: {tally.visits:,} sessions, {tally.tokens:,} tokens, "
            f"{sum(tally.faults.values()):,} faults, {sum(tally.errors.values()):,} refusals, "
            f"{len(tally.findings)} findings"
        )


#: What the service may say of a fault that it has met.
_LOGGED = ("cannot take a connection: Too many open files", "interrupted")
_COUNTED = ("restarts", "replays", "replayed_tokens", "resets", "evictions", "clears", "opened", "released", "decodes")


def growths(rests: Sequence[Rest]) -> list[str]:
    """What grew too much: the service, or a worker, while it was the same process."""
    found = []
    # By process: the rests' numbers and its sizes.
    sizes: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for place, rest in enumerate(rests):
        sizes.setdefault(("the service", rest.generation), []).append((place, rest.service_bytes))
        for pid, size in rest.worker_bytes.items():
            sizes.setdefault(("a worker", pid), []).append((place, size))
    first = {"the service": rests[0].service_bytes, "a worker": max(rests[0].worker_bytes.values(), default=0)}
    for (who, _), process in sizes.items():
        late = [size for place, size in process[1:] if place >= len(rests) // 2]
        if late and late[-1] - late[0] > GROWTH:
            found.append(f"{who} grew from {late[0] >> 10:,} to {late[-1] >> 10:,} KiB")
        most = max(size for _, size in process)
        if most - first[who] > ABOVE:
            found.append(f"{who} has {most >> 10:,} KiB, {first[who] >> 10:,} at the first rest")
    return found


# ---- a client -------------------------------------------------------------------------


class _Visit:
    """One session, with what it must hold and say."""

    def __init__(
        self, soak: Soak, client: Client, draw: random.Random, name: str, saved: dict[str, Any], since: float
    ) -> None:
        self.soak, self.client, self.draw, self.name, self.saved, self.since = soak, client, draw, name, saved, since
        # One a client, so that what was saved can be restored in a later visit.
        self.id = random.Random(name).randbytes(16)  # nosec B311: a name, no secret
        self.story = draw.choice(soak.truth.stories)

    def run(self) -> None:
        session = self.ask("open", lambda: self.client.open(self.id))
        if session.position:  # from a visit whose release was lost
            self.ask("truncate", lambda: session.truncate(0))
        if self.saved and self.draw.randrange(2):
            self._restore(session)
        kinds = (
            self._extend,
            self._extend,
            self._generate,
            self._generate,
            self._truncate,
            self._save,
            self._restore,
            self._ask_around,
        )
        for _ in range(self.draw.randrange(2, 12)):
            if self.name != "rest" and not self.soak.flowing():
                break
            self.draw.choice(kinds)(session)
        if session.position >= len(self.story.tokens):
            self.ask("truncate", lambda: session.truncate(1))
        self._extend(session)
        self.ask("release", session.release)

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        """Do it, again where a worker failed; raises ServiceError for what ends the visit."""
        for attempt in range(20):
            self.soak._doing[self.name] = f"{self.name} {what}"
            self.soak.count(requests=1)
            began = time.monotonic()
            try:
                return call()
            except ServiceError as error:
                if error.name != "worker" or attempt == 19:
                    raise
                self.soak.judge(error, self.since, began)
                time.sleep(0.05)
        raise AssertionError

    def _compare(self, start: int, sampled: Sequence[int], expected: Sequence[int | None]) -> None:
        if len(sampled) != len(expected):
            raise Finding("another number of tokens was sampled", f"{len(sampled)}, not {len(expected)}")
        for place, (token, right) in enumerate(zip(sampled, expected, strict=True)):
            if right is not None:
                self.soak.count(compared=1)
                if token != right:
                    raise Finding("a wrong token", f"{token}, not {right}, after position {start + place}")

    def _at(self, session: ClientSession, position: int) -> None:
        if session.position != position:
            raise Finding("a session is at another position", f"{session.position}, not {position}")

    def _extend(self, session: ClientSession) -> None:
        start, tokens = session.position, self.story.tokens
        if start >= len(tokens):
            return
        end = min(len(tokens), start + self.draw.choice((1, 3, 8, 17, 40)))
        outputs = self.draw.choice(("last", "all", "none"))
        sampled = self.ask("extend", lambda: session.extend(tokens[start:end], outputs=outputs))
        self._at(session, end)
        self.soak.count(tokens=end - start)
        following = self.story.following[start:end]
        self._compare(start, sampled, {"all": following, "last": following[-1:], "none": []}[outputs])

    def _generate(self, session: ClientSession) -> None:
        story, start = self.story, session.position
        known = max(start + 1, story.prompt)
        count = min(self.draw.randrange(1, 10), len(story.tokens) - known + 1)
        if start >= len(story.tokens) or count < 1:
            return
        # As ClientSession.generate does it, but a step that failed is asked for again.
        given = story.tokens[start:known]
        for place in range(known - 1, known - 1 + count):
            sampled = self.ask("extend", functools.partial(session.extend, given))
            self._compare(place, sampled, story.following[place : place + 1])
            given = sampled
        self._at(session, known + count - 1)
        self.soak.count(tokens=session.position - start)

    def _truncate(self, session: ClientSession) -> None:
        position = self.draw.randrange(session.position + 1)
        self.ask("truncate", lambda: session.truncate(position))
        self._at(session, position)

    def _save(self, session: ClientSession) -> None:
        self.saved.clear()
        since = time.monotonic()
        try:
            session.save(self.name)
        except ServiceError as error:
            if error.name != "worker":
                raise
            self.soak.judge(error, self.since, since)
            return
        self.saved.update(position=session.position, story=self.story)

    def _restore(self, session: ClientSession) -> None:
        if not self.saved:
            return
        self.ask("truncate", lambda: session.truncate(0))
        since = time.monotonic()
        try:
            session.restore(self.name)
        except ServiceError as error:
            if error.name != "worker":
                raise
            self.soak.judge(error, self.since, since)
            # It may have been restored before what broke off was answered; what it is now is what counts.
            self.ask("truncate", lambda: session.truncate(0))
            return
        self.story = self.saved["story"]
        self._at(session, self.saved["position"])

    def _ask_around(self, session: ClientSession) -> None:
        truth = self.soak.truth
        tokens = self.ask("tokenize", lambda: self.client.tokenize(truth.text))
        pieces = self.ask("detokenize", lambda: self.client.detokenize(truth.text_tokens))
        if (tokens, pieces) != (truth.text_tokens, truth.pieces):
            raise Finding("a text has other tokens, or tokens have another text")
        status = self.ask("status", self.client.status)
        top.with_rates(status, None)
        if self.id.hex() not in [one["id"] for one in status["sessions"]] or len(status["shards"]) != SHARDS:
            raise Finding("a status without a session or a shard that is there")


# ---- faults: each returns what it met -------------------------------------------------


def kill(soak: Soak, draw: random.Random) -> str:
    service = soak.service
    workers = service.workers()
    if workers and service.send(draw.choice(sorted(workers)), signal.SIGKILL):
        return "killed"
    return "no worker stood"


def kill_all(soak: Soak, draw: random.Random) -> str:
    service = soak.service
    found = sum(service.send(pid, signal.SIGKILL) for pid in service.workers())
    return f"{found} killed"


def _standing(soak: Soak) -> list[int]:
    """Workers that have answered hello: while one loads, the driver waits ten minutes for it."""
    try:
        return sorted(shard["pid"] for shard in soak._status()["shards"] if shard["alive"])
    except ServiceError:
        return []


def pause(soak: Soak, draw: random.Random) -> str:
    service, workers = soak.service, _standing(soak)
    if not workers:
        return "no worker stood"
    pid = draw.choice(workers)
    if not service.send(pid, signal.SIGSTOP):
        return "no worker stood"
    time.sleep(draw.uniform(0.05, WORKER_LIMIT * 0.8))
    return "went on" if service.send(pid, signal.SIGCONT) else "was ended meanwhile"


def stop(soak: Soak, draw: random.Random) -> str:
    service, workers = soak.service, _standing(soak)
    if not workers:
        return "no worker stood"
    pid = draw.choice(workers)
    if not service.send(pid, signal.SIGSTOP):
        return "no worker stood"
    began = time.monotonic()
    if until(lambda: gone(pid), PATIENCE):
        took = time.monotonic() - began
        return f"given up in {'about the limit' if took < WORKER_LIMIT * 2 else 'more than twice the limit'}"
    service.send(pid, signal.SIGKILL)
    raise Finding("a stopped worker was not given up", f"in {PATIENCE:g} s; the limit is {WORKER_LIMIT:g}")


def stop_loading(soak: Soak, draw: random.Random) -> str:
    """The one that takes the place of a worker that was killed."""
    service = soak.service
    before = service.workers()
    if not before or not service.send(draw.choice(sorted(before)), signal.SIGKILL):
        return "no worker stood"
    if not until(lambda: bool(set(service.workers()) - set(before)), 5.0):
        return "nobody asked for one"
    (pid, *_) = set(service.workers()) - set(before) or {0}
    if not pid or not service.send(pid, signal.SIGSTOP):
        return "no worker stood"
    time.sleep(draw.uniform(0.1, WORKER_LIMIT * 2))
    return "went on" if service.send(pid, signal.SIGCONT) else "was ended meanwhile"


def stop_service(soak: Soak, draw: random.Random) -> str:
    """For longer than the driver waits for a worker, or not as long."""
    process = soak.service.process
    process.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0.1, WORKER_LIMIT * 1.5))
    process.send_signal(signal.SIGCONT)
    return "went on"


def _message(draw: random.Random) -> bytes:
    wishes: list[tuple[Type, dict[str, Any]]] = [
        (Type.STATUS, {}),
        (Type.TOKENIZE, {"text": "x" * draw.randrange(5000)}),
        (Type.OPEN, {"session": draw.randbytes(16).hex()}),
        (Type.EXTEND, {"session": "0" * 32, "number": 1, "position": 0, "tokens": [5] * draw.randrange(1, 999)}),
    ]
    kind, wish = draw.choice(wishes)
    return protocol.pack(kind, 9, wish)


def cut(soak: Soak, draw: random.Random) -> str:
    """A connection that ends in the middle of a message, or of an answer."""
    with Raw(soak.folder / "socket") as raw:
        raw.ask(Type.OPEN, {"session": draw.randbytes(16).hex()})
        message = _message(draw)
        how = draw.randrange(3)
        if how == 0:
            raw.socket.sendall(message[: draw.randrange(1, len(message))])
        elif how == 1:
            raw.socket.sendall(protocol.pack(Type.STATUS, 1))
            raw.socket.recv(draw.randrange(1, 200))
        else:
            raw.socket.sendall(message)
            raw.socket.shutdown(draw.choice((socket.SHUT_RD, socket.SHUT_WR)))
    return ("in a request", "in an answer", "one side")[how]


def cut_at_work(soak: Soak, draw: random.Random) -> str:
    """A client that leaves while its tokens are computed."""
    with Raw(soak.folder / "socket") as raw:
        name = draw.randbytes(16).hex()
        raw.ask(Type.OPEN, {"session": name})
        tokens = [draw.randrange(3, tiny_models.N_VOCAB) for _ in range(200)]
        wish = {"session": name, "number": 1, "position": 0, "tokens": tokens}
        raw.socket.sendall(protocol.pack(Type.EXTEND, 5, wish))
        time.sleep(draw.uniform(0, 0.05))
    return "left"


def silence(soak: Soak, draw: random.Random) -> str:
    with Raw(soak.folder / "socket", hello=draw.random() < 0.5) as raw:
        message = _message(draw)
        raw.socket.sendall(message[: draw.randrange(1, len(message))])
        seconds = draw.choice((0.5, 2.0, 5.0, 40.0))
        soak.wait(seconds)
        raw.socket.setblocking(False)
        try:
            return "closed by the service" if raw.socket.recv(1) == b"" else "answered"
        except BlockingIOError:
            if seconds > 35 and soak.flowing():
                raise Finding("half a message was waited for longer than 30 s") from None
            return "waited for"
        except ConnectionResetError:
            return "closed by the service"


def deaf(soak: Soak, draw: random.Random) -> str:
    """A client that asks and never reads."""
    with Raw(soak.folder / "socket") as raw:
        raw.socket.setblocking(False)
        message = protocol.pack(Type.DETOKENIZE, 5, {"tokens": [200] * 50_000})
        deadline = time.monotonic() + draw.uniform(0.5, 3)
        sent = 0
        while time.monotonic() < deadline and soak.flowing():
            try:
                sent += raw.socket.send(message[sent % len(message) :])
            except BlockingIOError:
                time.sleep(0.02)
    return "not read"


def _declared(found: dict[str, Any], *names: str) -> str:
    """The name of an error that is one of ``names``, with a sentence."""
    name = str(found.get("name"))
    if found["type"] != Type.ERROR:
        raise Finding("an answer where an error is due", str(found)[:200])
    if ERRORS.get(found.get("code", 0)) != name or name not in names:
        raise Finding("another error than is due", f"{name!r}, not one of {names}: {found.get('message')!r:.200}")
    if not found.get("message") or not found.get("operation") or not str(found["message"]).isprintable():
        raise Finding("an error that is no sentence", f"{found!r:.300}")
    return name


#: What a service that is being ended, or that has no place, says to anybody.
_ALWAYS = ("closing", "connections")


def malformed(soak: Soak, draw: random.Random) -> str:
    junk = draw.randbytes(draw.randrange(1, 64))
    unsound = [
        frame(magic=draw.randbytes(4).replace(b"B", b"x")),
        frame(reserved=draw.randrange(1, 1 << 16)),
        frame(reserved2=draw.randrange(1, 1 << 16)),
        frame(bundle=draw.randrange(1, 1 << 40)),
    ]
    texts = [b"{", b"[]", b"\xff" + junk, b"[" * 50_000, b'{"a":' * 50_000, b"9" * 5000]
    bad_types = [0, 11, 500, 0x7FFF, 0x8001]
    bad_values = [
        (Type.OPEN, {"session": draw.choice((None, 5, "", "G" * 32, "0" * 31))}),
        (Type.TOKENIZE, {"text": draw.choice((None, 5, ["a"], "a\ud800"))}),
        (Type.DETOKENIZE, {"tokens": draw.choice(([-1], [None], "x", [1 << 40]))}),
    ]
    with Raw(soak.folder / "socket") as raw:
        how = draw.randrange(4)
        if how == 0:
            raw.socket.sendall(draw.choice(unsound))
            name = _declared(raw.answer(), "frame", *_ALWAYS)
            with contextlib.suppress(EOFError):
                raw.answer()
                raise Finding("a connection goes on after an unsound header")
        elif how == 1:
            raw.socket.sendall(frame(Type.STATUS, draw.choice(texts)))
            name = _declared(raw.answer(), "json", *_ALWAYS)
        elif how == 2:
            raw.socket.sendall(frame(draw.choice(bad_types)))
            name = _declared(raw.answer(), "protocol", *_ALWAYS)
        else:
            name = _declared(raw.ask(*draw.choice(bad_values)), "argument", *_ALWAYS)
    return name


def oversized(soak: Soak, draw: random.Random) -> str:
    with Raw(soak.folder / "socket") as raw:
        how = draw.randrange(3)
        if how == 0:
            raw.socket.sendall(frame(length=draw.choice((protocol.MAX_TEXT + 1, 1 << 31, (1 << 32) - 1))))
            return _declared(raw.answer(), "frame", *_ALWAYS)
        if how == 1:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.socket.sendall(frame(Type.TOKENIZE, b'{"text":"' + b"x" * (protocol.MAX_TEXT - 11) + b'"}'))
            found = raw.answer()
            return _declared(found, "limit", "worker", *_ALWAYS)
        name = draw.randbytes(16).hex()
        raw.ask(Type.OPEN, {"session": name})
        tokens = [5] * draw.choice((SETTINGS.ctx + 1, 100_000))
        wish = {"session": name, "number": 1, "position": 0, "tokens": tokens}
        return _declared(raw.ask(Type.EXTEND, wish), "limit", *_ALWAYS)


def flood(soak: Soak, draw: random.Random) -> str:
    """A hundred connections at once, beside those that there are."""
    met: collections.Counter[str] = collections.Counter()
    with soak.period("flood"), contextlib.ExitStack() as stack:
        for _ in range(100):
            try:
                raw = stack.enter_context(Raw(soak.folder / "socket", hello=False))
                found = raw.ask(Type.HELLO, {"major": protocol.MAJOR, "minors": protocol.MINORS})
            except (EOFError, OSError):
                met["ended"] += 1
                continue
            met["taken" if found["type"] == Type.HELLO else _declared(found, *_ALWAYS)] += 1
        soak.wait(draw.uniform(0.05, 0.5))
    return "some refused" if met["connections"] else "all taken" if met["taken"] == 100 else "some ended"


def no_room(soak: Soak, draw: random.Random) -> str:
    """No file of the service, of its workers, or of both, may get longer than a few bytes."""
    service = soak.service
    whose = draw.choice(("the service", "the workers", "both"))

    def limit(most: int, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    with soak.period("files"):
        try:
            limit(TINY_FILE, [service.pid] if whose != "the workers" else [])
            limit(TINY_FILE, service.workers() if whose != "the service" else [])
            soak.wait(draw.uniform(0.5, 2))
        finally:
            # The service first: who is started from now on has its limit from there.
            limit(resource.RLIM_INFINITY, [service.pid])
            limit(resource.RLIM_INFINITY, service.workers())
    return f"for {whose}"


def no_descriptors(soak: Soak, draw: random.Random) -> str:
    """The service gets no further descriptor: for a connection, a worker or a file."""
    service = soak.service
    _, most = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)

    def limit(count: int, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, most))

    with soak.period("files"):
        try:
            limit(count_of(f"/proc/{service.pid}/fd") + draw.randrange(3), [service.pid])
            soak.wait(draw.uniform(0.5, 2))
        finally:
            # Workers that were started meanwhile have the limit too.
            limit(most, [service.pid])
            limit(most, service.workers())
    return "over"


def abandoned(soak: Soak, draw: random.Random) -> str:
    """Many sessions, some with tokens, that nobody releases."""
    with Raw(soak.folder / "socket") as raw:
        for place in range(draw.randrange(20, 200)):
            name = draw.randbytes(16).hex()
            found = raw.ask(Type.OPEN, {"session": name})
            if found["type"] == Type.ERROR:
                return _declared(found, *_ALWAYS)
            if place % 20 == 0:
                wish = {"session": name, "number": 1, "position": 0, "tokens": [5, 6, 7], "outputs": "none"}
                found = raw.ask(Type.EXTEND, wish)
                if found["type"] == Type.ERROR:
                    return _declared(found, "worker", *_ALWAYS)
    return "left"


def no_memory(soak: Soak, draw: random.Random) -> str:
    """A worker gets no further memory, or hardly any."""
    service = soak.service
    workers = service.workers()
    if not workers:
        return "no worker stood"
    pid = draw.choice(sorted(workers))
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + draw.choice((0, 1 << 16, 1 << 20))
        resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        soak.wait(draw.uniform(0.5, 2))
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, IndexError):
        return "ended meanwhile"
    return "went on"


_FOLDER = threading.Lock()


def no_folder(soak: Soak, draw: random.Random) -> str:
    """The state folder is read-only; for a privileged user, who may write anywhere, it is away."""
    away = soak.folder / "states.away"
    with _FOLDER, soak.period("files"):
        if os.geteuid():
            soak.states.chmod(0o500)
        else:
            soak.states.rename(away)
        try:
            soak.wait(draw.uniform(0.5, 2))
        finally:
            if os.geteuid():
                soak.states.chmod(0o700)
            else:
                away.rename(soak.states)
    return "over"


def _end(soak: Soak, number: signal.Signals) -> str:
    # A service is not started on a state folder that is away.
    with _FOLDER:
        return soak.end_service(number)


def service_killed(soak: Soak, draw: random.Random) -> str:
    return _end(soak, signal.SIGKILL)


def service_ended(soak: Soak, draw: random.Random) -> str:
    return _end(soak, signal.SIGTERM)


#: By name: how often, in comparison, and what it does.
FAULTS: dict[str, tuple[float, Callable[[Soak, random.Random], str]]] = {
    "worker killed": (20, kill),
    "all workers killed": (2, kill_all),
    "worker stopped for a while": (8, pause),
    "worker stopped": (4, stop),
    "worker stopped while it loads": (4, stop_loading),
    "service stopped for a while": (4, stop_service),
    "client cut in a message": (12, cut),
    "client cut at work": (8, cut_at_work),
    "half a message, silence": (6, silence),
    "client that does not read": (4, deaf),
    "malformed frame": (14, malformed),
    "oversized length": (6, oversized),
    "100 connections": (3, flood),
    "no room for files": (5, no_room),
    "state folder not writable": (5, no_folder),
    "no descriptors left": (4, no_descriptors),
    "no memory for a worker": (4, no_memory),
    "sessions abandoned": (4, abandoned),
    "service killed": (0.4, service_killed),
    "service ended": (0.4, service_ended),
}


# ---- the command ----------------------------------------------------------------------


def table(tally: Tally) -> str:
    """In Markdown, which a terminal shows too."""
    lines = ["| fault | times | led to |", "|---|---|---|"]
    for name in FAULTS:
        met = ", ".join(
            f"{what} {times:,}" for what, times in tally.led_to.get(name, collections.Counter()).most_common()
        )
        lines.append(f"| {name} | {tally.faults[name]:,} | {met or '-'} |")
    lines.append(f"| all | {sum(tally.faults.values()):,} | |")
    lines += ["", "| what | number |", "|---|---|"]
    pairs = {
        "minutes": f"{tally.seconds / 60:.1f}",
        "sessions": f"{tally.visits:,}",
        "requests of their clients": f"{tally.requests:,}",
        "tokens": f"{tally.tokens:,}",
        "sampled tokens compared": f"{tally.compared:,}",
        **{name.replace("_", " "): f"{tally.counts[name]:,}" for name in _COUNTED},
        "refusals that clients saw": f"{sum(tally.errors.values()):,}",
        "findings": f"{sum(tally.findings.values()):,}",
    }
    lines += [f"| {name} | {value} |" for name, value in pairs.items()]
    lines += ["", "| at rest | first | half-way | most | last |", "|---|---|---|---|---|"]
    rests = tally.rests
    if rests:
        columns: dict[str, Callable[[Rest], int]] = {
            "processes": lambda rest: rest.processes,
            "not waited for": lambda rest: rest.zombies,
            "descriptors of the service": lambda rest: rest.descriptors,
            "threads of the service": lambda rest: rest.threads,
            "KiB of the service": lambda rest: rest.service_bytes >> 10,
            "KiB of the largest worker": lambda rest: max(rest.worker_bytes.values(), default=0) >> 10,
            "sockets": lambda rest: rest.sockets,
            "files left": lambda rest: len(rest.leftovers),
        }
        for name, value in columns.items():
            values = [value(rest) for rest in rests]
            shown = (values[0], values[len(values) // 2], max(values), values[-1])
            lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in shown)} |")
    return "\n".join(lines)


def numbers(tally: Tally) -> dict[str, Any]:
    """All of it, as JSON has it."""
    # Not asdict() of the whole: older Pythons do not know what to make of a Counter.
    return {**vars(tally), "rests": [asdict(rest) for rest in tally.rests]}


def findings(tally: Tally) -> list[str]:
    return [f"{kind}, {times} times; {tally.examples[kind]}" for kind, times in tally.findings.most_common()]


def commit() -> str:
    """Of use only if the tree is that commit."""
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return found or "unknown"


def report(tally: Tally, again: str) -> str:
    lines = [
        f"# Soak, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "",
        f"Commit {commit()}, `{again}`, tests/soak.py: {CLIENTS} clients at a service of {SHARDS} shards with",
        f"{SETTINGS.seqs} places; {len(tally.rests)} rests. Over the second half a process may grow by "
        f"{GROWTH >> 20} MiB.",
        "",
        table(tally),
        "",
        "## Refusals that clients saw",
        "",
        "| times | error |",
        "|---|---|",
        *(f"| {times:,} | {told.replace('|', '/')} |" for told, times in tally.errors.most_common(40)),
        "",
        "## Findings",
        "",
        *([f"- {line}" for line in findings(tally)] or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/soak.py", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="how long (60)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults and the requests (1)")
    parser.add_argument("--rate", type=float, default=1.0, metavar="N", help="faults a second, on average (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    parser.add_argument("--report", action="store_true", help="write a dated report to fuzz/reports")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    # For tests: a service that is not as it should be.
    parser.add_argument("--program", type=shlex.split, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.minutes > 0 and options.rate > 0):
        parser.error("--minutes and --rate are above 0")
    if not Path("/proc/self/fd").is_dir():
        print("error: there is no /proc: what is left behind cannot be seen here", file=sys.stderr)
        return 2
    worker = options.worker
    if worker is None:
        from boundary_bundle.native import NativeError, build

        try:
            worker = build("patched").worker
        except NativeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    interrupted = False
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="bb-soak-") as name:
        more = {} if options.program is None else {"program": options.program}
        tally = Tally(options.seed)
        try:
            soak = Soak(
                Path(name), worker, seed=options.seed, seconds=options.minutes * 60, rate=options.rate, **more, say=_say
            )
            tally = soak.tally
            soak.run()
        except KeyboardInterrupt:
            interrupted = True
    again = f"make soak MINUTES={options.minutes:g} SOAK_ARGS='--seed {options.seed} --rate {options.rate:g}'"
    print(table(tally))
    for line in findings(tally):
        print(f"FOUND {line}")
    if options.json is not None:
        options.json.write_text(json.dumps(numbers(tally), indent=1) + "\n", "utf-8")
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    if options.report:
        file = ROOT / "fuzz" / "reports" / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d-%H%M}-soak.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(report(tally, again), encoding="utf-8")
        print(f"report: {file.relative_to(ROOT)}")
    if tally.findings:
        print(f"to see it again: {again}")
    return 1 if tally.findings else 0


def _say(line: str) -> None:
    terminal = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{terminal}{line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # A shell that starts this in the background ignores the one, and the other would leave the service.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
