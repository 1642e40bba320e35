"""Shards in actors of a Ray cluster: three nodes on 127.0.0.1, and three hosts that are network namespaces.

Catches: logits that differ by a bit, bundles that pass through the driver, a loss that is not made good or is blamed on
another shard, a wait without end, a port that others can reach, and a process that is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drive import Conversation, assert_same_bits, logits_of

from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Batch,
    CheckedRelay,
    Layout,
    LocalWorker,
    Pipeline,
    PipelineError,
    RayPipeline,
    Relay,
    Settings,
    WorkerError,
    generate,
    make_plan,
    ray_cluster,
    ray_engine,
    tiny_models,
)

with pytest.MonkeyPatch.context() as patch:
    # Read when Ray is imported: 127.0.0.1 is to be 127.0.0.1.
    patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster
    from ray.experimental import get_object_locations

pytestmark = pytest.mark.shards

SMALL = Settings(threads=1, ctx=512, batch=64, ubatch=16, seqs=2)
PLAN = make_plan(7, [2, 5])
LOOPBACK = "127.0.0.1"
#: The cluster's nodes, each with a custom resource of its name. The driver's node has no processor.
HOSTS = ("one", "two", "three")
#: A node that says nothing is gone after seconds, and not after more than a minute, which is Ray's default.
ALERT = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """A limit for what never comes; how long it takes is not looked at."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Nodes:
    """A cluster whose nodes are processes of this host that listen on 127.0.0.1."""

    def __init__(self) -> None:
        common = {"node_ip_address": LOOPBACK, "object_store_memory": 80 << 20, "include_dashboard": False}
        self._common = common
        self.cluster = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0})
        self.by_name: dict[str, Any] = {}
        for name in HOSTS:
            self.add(name)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str) -> None:
        self.by_name[name] = self.cluster.add_node(num_cpus=3, resources={name: 1}, **self._common)

    def kill(self, node: str) -> str:
        """SIGKILL for a node's raylet, as when its host has gone. Returns the name, for one that takes its place."""
        name = next(name for name, found in self.by_name.items() if found.node_id == node)
        raylet = self.by_name[name].all_processes["raylet"][0].process
        raylet.kill()
        # Its actors look for its process, and one that nobody has waited for is there still.
        raylet.wait()
        return name


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALERT.items():
            patch.setenv(name, value)
        found = Nodes()
        try:
            with ray_cluster(found.address, 0):
                yield found
        finally:
            found.cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("model") / "m.gguf", "tied")


@pytest.fixture(scope="module")
def reference(patched_build: NativeBuild, model: Path) -> Iterator[Pipeline]:
    """The unsplit worker, here."""
    with LocalWorker(patched_build.worker, model, (0, 7), SMALL) as worker:
        yield Pipeline([worker])


Make = Callable[..., RayPipeline]


@pytest.fixture(scope="module")
def make(nodes: Nodes, patched_build: NativeBuild, model: Path) -> Make:
    def make(**more: Any) -> RayPipeline:
        chosen = {"model": model, "settings": SMALL, "program": patched_build.worker, "timeout": 60.0, **more}
        return RayPipeline(chosen.pop("model"), PLAN, chosen.pop("settings"), **chosen)

    return make


@pytest.fixture(scope="module")
def standing(make: Make) -> Iterator[RayPipeline]:
    """One that several tests use: each loss leaves it as good as new."""
    pipeline = make()
    yield pipeline
    pids = {pid for place in places(pipeline) for pid in (place["pid"], place["worker"])}
    pipeline.close()
    wait_until(lambda: not any(map(alive, pids)), "an actor or its worker is left")


@pytest.fixture
def shards(standing: RayPipeline) -> Iterator[RayPipeline]:
    """The standing one with empty sequences, as it is made."""
    usual = dict(vars(standing))
    standing.clear()
    standing.rebuilds = 0
    yield standing
    for name in ("relay", "max_rebuilds", "max_in_flight", "on_loss"):
        setattr(standing, name, usual[name])


def places(pipeline: RayPipeline) -> list[dict[str, Any]]:
    return [worker.place for worker in pipeline.workers if isinstance(worker, ray_engine.RayWorker)]


# -- bits, and the way they take ---------------------------------------------------------------


@pytest.mark.parametrize("relay", [Relay, CheckedRelay], ids=["passed on", "checked"])
def test_logits_equal_the_unsplit_workers(shards: RayPipeline, reference: Pipeline, relay: type[Relay]) -> None:
    """A bundle that is changed on its way, also where the relay's layouts vary, and two shards on one node."""
    shards.relay = relay()
    shards.relay.attach(shards.shards)
    talk = Conversation(3)
    batches = [talk.batch([0, 1, 0, 0, 1] * 6), talk.batch([1, 0]), talk.batch([0])]
    assert_same_bits(logits_of(shards, batches), logits_of(reference, batches))
    assert len({place["node"] for place in places(shards)}) == 3
    hops = shards.decode(talk.batch([0])).hops
    assert [hop.python_decode_us > 0 for hop in hops] == [relay is CheckedRelay] * 2


def test_bundles_go_from_node_to_node(shards: RayPipeline) -> None:
    """Bundles that Ray carries to the driver: the small ones, which it would put into answers, and large ones."""
    driver = ray.get_runtime_context().get_node_id()
    hosts = [place["node"] for place in places(shards)]
    for start, count in ((0, 60), (60, 1)):
        flight = shards.submit(Batch.of_sequence([5] * count, start))
        between = flight.answers[:-1]
        sizes = [hop.bytes for hop in flight.result().hops]
        found = get_object_locations(between)
        for k, answer in enumerate(between):
            # Where it was made and where it was read.
            assert set(found[answer]["node_ids"]) == {hosts[k], hosts[k + 1]}
            assert driver not in found[answer]["node_ids"]
            assert found[answer]["object_size"] >= sizes[k] > count * 128 * 4


def test_batches_in_flight(shards: RayPipeline, reference: Pipeline) -> None:
    """Steps that come out in another order or of another batch, and more under way than were allowed."""
    talk = Conversation(4)
    batches = [talk.batch([k % 2]) for k in range(9)]
    shards.max_in_flight = 3
    flights = []
    for batch in batches:
        flights.append(shards.submit(batch, logits=True))
        assert sum(flight.step is None for flight in flights) <= 3
    found = [flight.result().logits for flight in flights]
    assert_same_bits([rows for rows in found if rows is not None], logits_of(reference, batches))


def test_a_refused_batch_changes_nothing(shards: RayPipeline, reference: Pipeline) -> None:
    """A refusal that is taken for a loss, or that leaves the shards before it at another position."""

    class Damage(Relay):
        """Behind the second shard, one byte of the second step."""

        def forward(self, hop: int, step: int, rows: int, data: Any) -> tuple[Any, float, float]:
            changed = bytearray(data)
            changed[-1] ^= hop == 1 and rows == 3
            return changed, 0.0, 0.0

        def request_layout(self, hop: int, step: int, rows: int) -> Layout:
            return Layout()

    talk = Conversation(5)
    first, second = talk.batch([0] * 5), talk.batch([0])
    shards.decode(first)
    with pytest.raises(WorkerError, match=r"shard \[0,2\): decode: error 7 position: on node 127\.0\.0\.1"):
        shards.decode(Batch.of_sequence([9], 30))
    shards.relay = Damage()
    with pytest.raises(WorkerError, match=r"shard \[5,7\): decode: error 5 bundle: on node 127\.0\.0\.1"):
        shards.decode(Batch.of_sequence([9, 9, 9], 5))
    rows = shards.decode(second, logits=True).logits
    assert rows is not None
    assert_same_bits([rows], logits_of(reference, [first, second])[1:])
    assert shards.rebuilds == 0


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_an_interrupt_while_shards_are_asked(
    shards: RayPipeline, reference: Pipeline, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """A Ctrl-C when so many of three shards have been asked: those are left ahead of the others."""

    class Interrupted:
        def __init__(self, actor: Any) -> None:
            self._actor = actor

        def __getattr__(self, name: str) -> Any:
            if name == "decode":
                raise KeyboardInterrupt
            return getattr(self._actor, name)

    talk = Conversation(6 + asked)
    first, second = talk.batch([0] * 5), talk.batch([0])
    shards.decode(first)
    host = shards.workers[asked]
    assert isinstance(host, ray_engine.RayWorker)
    with monkeypatch.context() as patch:
        patch.setattr(host, "actor", Interrupted(host.actor))
        with pytest.raises(KeyboardInterrupt):
            shards.decode(second)
    rows = shards.decode(second, logits=True).logits
    assert rows is not None
    assert_same_bits([rows], logits_of(reference, [first, second])[1:])
    assert shards.rebuilds == 0


# -- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["worker", "actor", "node"])
def test_a_loss_in_the_middle_of_a_generation(
    nodes: Nodes, shards: RayPipeline, reference: Pipeline, what: str
) -> None:
    """kill -9 after which generation ends, goes on with other tokens, or is blamed on another shard; a worker that
    computes on for nobody."""
    told: list[WorkerError] = []
    shards.on_loss = told.append
    lost = places(shards)[1]
    count = 0

    def on_token(_: int) -> None:
        nonlocal count
        count += 1
        if count == 6:
            if what == "node":
                nodes.add(nodes.kill(lost["node"]))
            else:
                os.kill(lost["worker" if what == "worker" else "pid"], signal.SIGKILL)

    found = generate(shards, range(5, 25), 12, batch_size=16, reference=reference, on_token=on_token)
    assert found.logits_compared == 12 * tiny_models.N_VOCAB
    assert found.logits_differing == 0
    assert shards.rebuilds >= 1
    assert str(told[0]).startswith(f"shard [2,5): decode: on node 127.0.0.1 ({lost['node'][:8]}): "), str(told[0])
    wait_until(lambda: not alive(lost["pid"]) and not alive(lost["worker"]), "the worker has outlived its actor")


def test_losses_end_the_run_after_so_many(shards: RayPipeline) -> None:
    """A worker that dies again and again: without a limit that would go on for ever."""
    shards.max_rebuilds = 1
    sound = shards._program
    # What is placed next ends at once.
    shards.on_loss = lambda _: setattr(shards, "_program", "/bin/false")
    os.kill(places(shards)[0]["worker"], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"shard \[0,2\): start: on node .* ended with status 1 .*placed anew once"):
        shards.decode(Batch.of_sequence([5], 0))
    shards._program = sound


def test_a_loss_that_leaves_no_room(nodes: Nodes, make: Make) -> None:
    """A node that is lost when nothing can take its place: the driver would wait for ever."""
    pipeline = make(place_timeout=2.0, resources=HOSTS)
    name = nodes.kill(places(pipeline)[1]["node"])
    try:
        sentence = (
            r"shard \[2,5\): decode: on node 127\.0\.0\.1 .*; and the shards cannot be placed anew: "
            r"Ray has found no room in 2 seconds: the shards ask for .*two 0\.001"
        )
        with pytest.raises(PipelineError, match=sentence):
            pipeline.decode(Batch.of_sequence([5], 0))
    finally:
        pipeline.close()
        nodes.add(name)


def test_a_silent_worker_is_named(make: Make) -> None:
    """A worker that is stopped: the driver would wait for ever."""
    pipeline = make(timeout=1.0, resources=HOSTS)
    try:
        os.kill(places(pipeline)[1]["worker"], signal.SIGSTOP)
        sentence = r"shard \[2,5\): decode: on node .* no answer in 1 seconds: worker process"
        with pytest.raises(WorkerError, match=sentence):
            pipeline.decode(Batch.of_sequence([5], 0))
    finally:
        pipeline.close()


# -- what cannot be ----------------------------------------------------------------------------


def test_a_missing_file_is_named_with_its_node(make: Make, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"shard \[0,2\): start: error 4 load: on node 127\.0\.0\.1 .*nowhere\.gguf"):
        make(model=tmp_path / "nowhere.gguf")


def test_another_file_of_that_name_is_named_with_its_node(make: Make, reference: Pipeline, tmp_path: Path) -> None:
    """A host with a model of another shape under the same name."""
    other = tiny_models.write(tmp_path / "m.gguf", "tied", shape=replace(tiny_models.VARIANTS["tied"], n_ff=160))
    with pytest.raises(PipelineError, match=r"shard \[0,2\): on node 127\.0\.0\.1 .*m\.gguf is another model"):
        make(model=other, fingerprint=reference.model.fingerprint)


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({"settings": replace(SMALL, threads=64)}, "CPU 64"),
        ({"memory": [1 << 60] * 3}, "memory 1152921504.61 GB"),
        ({"resources": ("one", "two", "nowhere")}, "nowhere 0.001"),
    ],
    ids=["processors", "memory", "custom"],
)
def test_too_few_resources_are_named(make: Make, more: dict[str, Any], asked: str) -> None:
    """Ray would wait for ever."""
    with pytest.raises(
        PipelineError, match=r"no room in 1 seconds: the shards ask for .*; node .* has CPU 3 "
    ) as found:
        make(place_timeout=1.0, **more)
    assert asked in str(found.value)
    assert "free in all: CPU " in str(found.value)


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    """One that takes connections and says nothing."""
    with socket.create_server((LOOPBACK, 0)) as server:
        yield f"{LOOPBACK}:{server.getsockname()[1]}"


def test_an_address_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for two minutes, and ends the process."""
    monkeypatch.setattr(ray_engine, "CONNECT_TIMEOUT", 3.0)
    with silent_port() as address:
        with pytest.raises(PipelineError, match=f"no Ray cluster answers at {address} in 3 seconds"):
            ray_engine._connect(ray, address)
        left = [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if address.encode() in entry.read_bytes()]
    assert left == []


# -- the command -------------------------------------------------------------------------------


def command(model: Path, *more: str) -> list[str]:
    settings = ["--threads", "1", "--ctx", "512", "--batch", "16", "--ubatch", "8", "--ignore-eos"]
    words = ["run", "--model", str(model), "--prompt", "split this", "--cuts", "2,5", "--tokens", "9", *settings]
    return [*words, *more]


@pytest.fixture(scope="module")
def local_text(model: Path, patched_build: NativeBuild) -> str:
    """What the engine without Ray writes."""
    words = command(model, "--worker", str(patched_build.worker))
    return subprocess.run([*CLI, *words], capture_output=True, text=True, check=True).stdout


CLI = [sys.executable, "-m", "boundary_bundle.cli"]


def family(pid: int) -> set[int]:
    """A process and all that it has started, directly or not."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def agents(pids: set[int]) -> set[int]:
    """Those of them that Ray leaves for a minute when it is killed itself: they compute nothing."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if re.match(rb"ray::\w+Agent", Path(f"/proc/{pid}/cmdline").read_bytes()):
                found.add(pid)
    return found


def environment_of(pid: int, program: str) -> bytes:
    """A process's environment; empty if it runs another program."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == program:
            return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def listening(pids: set[int]) -> set[str]:
    """The addresses, as /proc has them, on which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


#: 127.0.0.1, and the same as an IPv6 address.
LOOPBACKS = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("end", ["done", "interrupted", "killed"])
def test_a_run_with_a_cluster_of_its_own(
    model: Path, patched_build: NativeBuild, local_text: str, tmp_path: Path, end: str
) -> None:
    """Another text than without Ray, a difference that is not seen, ports that other hosts reach, or other users
    without a token, and processes or files of Ray that are left, also when the driver is interrupted or killed."""
    scratch = tmp_path / "s"
    scratch.mkdir()
    target = tmp_path / "out.json"
    more = ["--check", "--json", str(target), *(["--tokens", "400"] if end != "done" else [])]
    words = command(model, "--engine", "ray", "--worker", str(patched_build.worker), *more)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Sockets of Ray lie there, and have short names.
    folder = Path("/tmp") / f"bb-{secrets.token_hex(4)}"
    folder.mkdir()
    environment |= {"TMPDIR": str(folder), "HOME": str(scratch)}
    seen: set[int] = set()
    ports: set[str] = set()
    guarded = False
    with subprocess.Popen([*CLI, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        out = b""
        while process.poll() is None and not (out and end != "done"):
            out += process.stdout.read() or b""
            seen |= (now := family(process.pid))
            ports |= listening(now)
            guarded |= any(b"\0RAY_AUTH_MODE=token\0" in environment_of(pid, "gcs_server") for pid in now)
            time.sleep(0.05)
        if end != "done":
            process.send_signal(signal.SIGINT if end == "interrupted" else signal.SIGKILL)
        os.set_blocking(process.stdout.fileno(), True)
        rest, err = process.communicate()
    assert process.returncode == {"done": 0, "interrupted": 130, "killed": -signal.SIGKILL}[end], err
    assert len(seen) > 6
    assert ports
    assert ports <= LOOPBACKS
    # Other users reach them too.
    assert guarded
    wait_until(lambda: not any(map(alive, seen - agents(seen))), "a process is left")
    if end != "killed":
        assert not any(map(alive, seen))
    if end == "done":
        assert (out + rest).decode() == local_text
        result = json.loads(target.read_text())
        assert (result["logits_compared"], result["logits_differing"]) == (9 * tiny_models.N_VOCAB, 0)
        assert [shard["node"][:14] for shard in result["shards"]] == ["node 127.0.0.1"] * 3
        assert err.decode().count("\n") == 2, err
    if end != "killed":
        assert list(folder.iterdir()) == []
    shutil.rmtree(folder)
    assert list(scratch.iterdir()) == []


def actors() -> set[int]:
    """Processes with a shard, of whatever run over nodes of this process."""
    found = set()
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ShardHost"):
                found.add(pid)
    return found


def test_a_run_on_a_cluster(nodes: Nodes, model: Path, patched_build: NativeBuild, tmp_path: Path) -> None:
    """Shards that are not where their resources are, a model's path that is not the one on the hosts, and an actor
    that is killed: another text, or what Ray has to say of it among the text."""
    elsewhere = tmp_path / "elsewhere.gguf"
    elsewhere.symlink_to(model)
    target = tmp_path / "out.json"
    words = command(model, "--worker", str(patched_build.worker), "--tokens", "100")
    usual = subprocess.run([*CLI, *words], capture_output=True, text=True, check=True).stdout
    words += ["--engine", "ray", "--address", nodes.address, "--hosts-model", str(elsewhere)]
    words += ["--resources", "three,one,two", "--json", str(target)]
    others = actors()
    with subprocess.Popen([*CLI, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        out = process.stdout.read(1)
        os.kill(min(actors() - others), signal.SIGKILL)
        rest, err = process.communicate()
    assert (process.returncode, (out + rest).decode()) == (0, usual), err
    lost = rb"shard \[\d,\d\): decode: on node 127\.0\.0\.1 \(.*\): the actor \(process \d+\) is gone"
    assert re.fullmatch(lost + rb"; the shards are placed anew\n100 tokens, .*\n", err), err
    wanted = [f"node 127.0.0.1 ({nodes.by_name[name].node_id[:8]})" for name in ("three", "one", "two")]
    assert [shard["node"] for shard in json.loads(target.read_text())["shards"]] == wanted
    assert actors() == others


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "ray", "--address", "nobody"], "the address of the Ray cluster is 'nobody', not HOST:PORT"),
        (["--engine", "ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1: Connection refused"),
        (["--engine", "ray", "--resources", "a,b"], "--resources names 2, and there are 3 shards"),
        (["--address", "127.0.0.1:1"], "--address is for --engine ray"),
        (["--hosts-model", "m.gguf"], "--hosts-model is for --engine ray"),
    ],
)
def test_what_the_command_refuses(model: Path, patched_build: NativeBuild, words: list[str], sentence: str) -> None:
    """In a process of its own: this one has a connection, which would be used."""
    refused = [*CLI, *command(model, "--worker", str(patched_build.worker), *words)]
    done = subprocess.run(refused, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {sentence}\n")


def test_without_ray_the_extra_is_named(
    model: Path, patched_build: NativeBuild, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(command(model, "--worker", str(patched_build.worker), "--engine", "ray")) == 2
    assert "'ray' is missing: pip install 'boundary-bundle[ray]'" in capsys.readouterr().err


def test_another_version_of_ray_is_named(nodes: Nodes, model: Path) -> None:
    """What Ray says of it has five lines and a traceback."""
    other = (
        "import sys, ray; ray.__version__ = '2.1.0'; from boundary_bundle.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = command(model, "--engine", "ray", "--address", nodes.address)
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run([sys.executable, "-c", other, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    there = f"Ray {ray.__version__} with Python {sys.version.split()[0]}"
    here = there.replace(ray.__version__, "2.1.0")
    sentence = f"the Ray cluster at {nodes.address} cannot be used: it runs {there}, this process {here}"
    assert done.stderr == f"error: {sentence}\n"


# -- hosts -------------------------------------------------------------------------------------


class Hosts:
    """Hosts that are namespaces of this machine, on a bridge: own network, processes, /tmp/ray. Host k is 10.77.0.k."""

    def __init__(self, count: int) -> None:
        self._keepers: list[subprocess.Popen[bytes]] = []
        self.hosts: list[int] = []
        try:
            self._connect(count)
        except BaseException:
            self.close()
            raise

    def _connect(self, count: int) -> None:
        switch = self._keeper()
        self.run(switch, "ip link add br0 type bridge")
        self.run(switch, "ip link set br0 up")
        for k in range(1, count + 1):
            host = self._keeper()
            self.hosts.append(host)
            # Whoever names a host by its process sees all processes.
            link = f"ip link add port{k} type veth peer name eth0 netns {host}"
            subprocess.run(["nsenter", "--target", str(switch), "--net", *link.split()], check=True)
            self.run(switch, f"ip link set port{k} master br0 up")
            self.run(host, f"ip addr add 10.77.0.{k}/24 dev eth0")
            self.run(host, "ip link set eth0 up")
            self.run(host, "ip link set lo up")

    def _keeper(self) -> int:
        """The first process of a namespace; all others of it end with this one."""
        own = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && echo ready && exec sleep infinity"
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", own]
        keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"ready\n":
            told = keeper.communicate()[1].decode().strip()
            pytest.skip(f"no hosts can be made of namespaces here: {told}")
        return next(iter(family(keeper.pid) - {keeper.pid}))

    @staticmethod
    def inside(host: int, words: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(host), "--net", "--mount", "--pid", *words]

    def run(self, host: int, words: str) -> None:
        subprocess.run(self.inside(host, words.split()), check=True)

    def received(self, host: int) -> int:
        """Bytes that its network interface has taken."""
        words = ["cat", "/proc/net/dev"]
        text = subprocess.run(self.inside(host, words), check=True, capture_output=True, text=True).stdout
        match = re.search(r"eth0: *(\d+)", text)
        assert match is not None
        return int(match[1])

    def turn_off(self, host: int) -> None:
        os.kill(host, signal.SIGKILL)

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()


def test_three_hosts(model: Path, patched_build: NativeBuild, tmp_path: Path) -> None:
    """Bundles that pass through the driver's host, a text that differs, and a host that is turned off in the middle."""
    hosts = Hosts(3)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **token, **ALERT, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2"]
    logs = [tmp_path / f"host{k}.log" for k in range(3)]
    words = ["--prompt", "far away " * 160, "--ctx", "2048", "--batch", "512", "--ubatch", "512", "--tokens", "30"]
    words += ["--worker", str(patched_build.worker)]
    told = tmp_path / "usual.json"
    local = [*CLI, *command(model, *words, "--json", str(told))]
    usual = subprocess.run(local, capture_output=True, text=True, check=True).stdout
    # What of the prompt crosses a hop: its rows of the residual stream, 128 wide, f32.
    hop = json.loads(told.read_text())["prompt_tokens"] * 128 * 4
    assert hop > 500_000

    def node(k: int, *more: str) -> None:
        command = [*start, f"--node-ip-address=10.77.0.{k + 1}", *more]
        with logs[k].open("wb") as log:
            subprocess.Popen(Hosts.inside(hosts.hosts[k], command), stdout=log, stderr=log, env=environment)

    def up(k: int) -> None:
        wait_until(lambda: "Ray runtime started" in logs[k].read_text(), f"host {k + 1} is not up")

    try:
        node(0, "--head", "--port=6379", "--include-dashboard=false", '--resources={"first": 1}')
        up(0)
        node(1, "--address=10.77.0.1:6379")
        node(2, "--address=10.77.0.1:6379")
        up(1)
        up(2)
        words += ["--engine", "ray", "--address", "10.77.0.1:6379", "--resources", "first,,"]
        run = Hosts.inside(hosts.hosts[0], [*CLI, *command(model, *words)])
        before = [hosts.received(host) for host in hosts.hosts]
        with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            out = process.stdout.read(1)
            got = [hosts.received(host) - then for host, then in zip(hosts.hosts, before, strict=True)]
            hosts.turn_off(hosts.hosts[2])
            rest, err = process.communicate()
        assert (process.returncode, (out + rest).decode()) == (0, usual), err
        assert got[1] > hop, got
        assert got[2] > hop, got
        # Two of them, if they passed through the driver.
        assert got[0] < hop / 2, got
        assert re.search(rb"shard \[(2,5|5,7)\): decode: on node 10\.77\.0\.3 .*; the shards are placed anew", err)
    finally:
        hosts.close()
