"""Shards on other hosts, through Ray (the extra ``boundary-bundle[ray]``).

Each worker lives in a Ray actor, which holds a :class:`LocalWorker` on its host. Ray places the actors by what they
need and carries the bundles: the output of one shard's call is passed to the next shard's as an object reference, so
that its bytes go from node to node. The driver sends the tokens to the first shard and hears the last one.

What the driver learns of a failure is a value in the answer where the worker told it, and Ray's exception where the
actor or its node is gone. Either becomes a WorkerError that names shard, node and operation.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..encoder import encode
from ..native import NativeError, build
from .batch import Batch
from .pipeline import HopTime, Pipeline, PipelineError, Relay, ShardTime, Step
from .plan import Plan
from .protocol import Type
from .sizes import ModelSizes
from .worker import (
    CLOSE_GRACE,
    LOAD_TIMEOUT,
    REQUEST_TIMEOUT,
    Bytes,
    Description,
    LocalWorker,
    Pending,
    Reply,
    Settings,
    Worker,
    WorkerError,
    refusal,
)

#: Seconds in which a cluster must answer, and in which Ray must find room for all shards.
CONNECT_TIMEOUT: Final = 30.0
PLACE_TIMEOUT: Final = 30.0
#: Seconds that the driver waits for a host beyond what the host itself waits for its worker.
HOST_GRACE: Final = 15.0
#: Bytes of a worker beside weights and KV, for the reservation of memory.
OVERHEAD_BYTES: Final = 64 << 20

#: As much of a custom resource as a shard asks for: it says where the shard may be, not how much there is.
_A_LITTLE: Final = 0.001
#: The environment of an actor: Ray is not to lower its priority and so the worker's, which computes for all.
_ACTOR: Final = {"RAY_worker_niceness": "0"}
#: An actor on a node keeps its bundles there, small ones too; otherwise Ray would send those to the driver.
_KEEP_BUNDLES: Final = {"RAY_max_direct_call_object_size": "0"}
#: Read when Ray is imported and when it starts: nothing on standard output, no statistics sent to anybody.
_SILENT: Final = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_USAGE_STATS_ENABLED": "0"}
#: Ray is to use 127.0.0.1 as such, on Linux too, and not the address that others would reach it by.
_PRIVATE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
#: Other users of this host reach 127.0.0.1 too. Ray reads the token once in a process.
_TOKEN: Final = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_QUIET: Final = {"log_to_driver": False, "logging_level": "critical"}
_LOOPBACK: Final = "127.0.0.1"
_ADDRESS = re.compile(r"\[?([^\[\]/\s]+)\]?:([0-9]{1,5})")
_NOTHING: Final[npt.NDArray[np.uint8]] = np.zeros(0, np.uint8)


def import_ray() -> Any:
    """The package. Raises PipelineError when it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise PipelineError("the Python package 'ray' is missing: pip install 'boundary-bundle[ray]'") from None


@contextlib.contextmanager
def ray_cluster(address: str | None, cpus: int) -> Iterator[None]:
    """A connection to the cluster at ``address`` (HOST:PORT), or to one of this process's own.

    The latter listens on 127.0.0.1 alone, wants a token that only this process and its children have, offers ``cpus``
    processors, and ends with the context, its files too. A connection that this process has already is used, and left
    as it is. Raises PipelineError: nobody answers in CONNECT_TIMEOUT seconds, another version of Ray, this host is none
    of the cluster's nodes.
    """
    host = _LOOPBACK if address is None else _check_address(address)[0]
    more = _SILENT | (_PRIVATE if host in (_LOOPBACK, "localhost") else {}) | (_TOKEN if address is None else {})
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        ray = import_ray()
        if ray.is_initialized():
            yield
            return
        # What Ray writes about a run of its own goes with it.
        with tempfile.TemporaryDirectory(prefix="bb-ray-", ignore_cleanup_errors=True) as folder:
            try:
                if address is None:
                    _start(ray, cpus, folder)
                else:
                    _connect(ray, address)
                yield
            finally:
                ray.shutdown()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _start(ray: Any, cpus: int, folder: str) -> None:
    try:
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, num_gpus=0, _temp_dir=folder, **_QUIET)
    except Exception as error:  # Ray raises whatever its start runs into
        raise PipelineError(f"Ray cannot be started on this host: {_one_line(error)}") from None
    found = ray.util.get_node_ip_address()
    if found != _LOOPBACK:  # such as when it was imported before, under other settings
        raise PipelineError(f"Ray would listen on {found}, not on {_LOOPBACK}: it was imported before the engine began")


def _check_address(address: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise PipelineError(f"the address of the Ray cluster is {address!r}, not HOST:PORT")
    return match[1], int(match[2])


def _connect(ray: Any, address: str) -> None:
    try:
        socket.create_connection(_check_address(address), CONNECT_TIMEOUT).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise PipelineError(f"no Ray cluster answers at {address}: {reason}") from None
    # Ray waits for minutes for a port that says nothing, and ends the process after that. So another one tries first.
    attempt = f"import ray; ray.init(address={address!r}, log_to_driver=False, logging_level='critical')"
    with subprocess.Popen(
        [sys.executable, "-c", attempt],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            errors = process.communicate(timeout=CONNECT_TIMEOUT)[1].decode("utf-8", "replace")
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                message = f"no Ray cluster answers at {address} in {CONNECT_TIMEOUT:g} seconds"
                raise PipelineError(message) from None
            raise
    if process.returncode:
        raise PipelineError(f"the Ray cluster at {address} cannot be used: {_refused(errors)}")
    try:
        ray.init(address=address, **_QUIET)
    except Exception as error:
        raise PipelineError(f"the Ray cluster at {address} cannot be used: {_refused(str(error))}") from None


def _refused(text: str) -> str:
    """What Ray says when it does not connect, in one line."""
    versions = re.findall(r"(Ray|Python): ([\w.+-]+)", text)
    if "ersion mismatch" in text and len(versions) == 4:
        there, here = (" with ".join(" ".join(pair) for pair in versions[k : k + 2]) for k in (0, 2))
        return f"it runs {there}, this process {here}"
    if "AuthenticationError" in text or "InvalidAuthToken" in text:
        return "it wants a token that this process does not have (RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or a file)"
    if "node info" in text:
        return "no node of it runs on this host (ray start --address joins it)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def _one_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):  # what an actor raised
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def memory_needs(sizes: ModelSizes, plan: Plan) -> list[int]:
    """Bytes that each shard is to be given: weights, KV as far as it is known, and what else a worker takes."""
    parts = [sizes.shard(start, end) for start, end in plan]
    return [part.weights + part.kv + OVERHEAD_BYTES for part in parts]


# -- on the host -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handover:
    """What one shard's call gives to the next: its bundle (u8 [bytes]), and what the driver is to hear of all before.

    ``replies`` are the workers' texts, ``walls`` the microseconds that each took, ``hops`` bytes and the microseconds
    of decoding and encoding in Python. Once there is an ``error`` no shard computes any more.
    """

    bundle: npt.NDArray[np.uint8]
    replies: tuple[dict[str, Any], ...] = ()
    walls: tuple[float, ...] = ()
    hops: tuple[tuple[int, float, float], ...] = ()
    error: dict[str, Any] | None = None


class ShardHost:
    """The actor: one worker process on its host. Whatever the worker refuses is a value, never an exception."""

    def __init__(self) -> None:
        self._worker: LocalWorker | None = None

    def where(self) -> dict[str, Any]:
        """Where the actor runs, and its process and the worker's."""
        ray = import_ray()
        return {
            "address": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "worker": None if self._worker is None else self._worker.pid,
        }

    def start(
        self, program: str | None, model: str, layers: tuple[int, int], settings: Settings, timeout: float | None
    ) -> dict[str, Any]:
        """Start the worker; answers when it stands. ``program`` None: the build in this host's cache."""
        try:
            found = program if program is not None else build("patched").worker
            self._worker = LocalWorker(found, model, layers, settings, timeout=timeout)
            self._worker.ready()
        except WorkerError as error:
            return {"error": _told(error)}
        except NativeError as error:
            return {"error": {"code": 0, "name": "start", "message": str(error)}}
        return {}

    def request(self, type: int, text: dict[str, Any], bundle: bytes) -> dict[str, Any]:
        """One request to the worker."""
        try:
            reply = self._running().request(type, text, bundle).result()
        except WorkerError as error:
            return {"error": _told(error)}
        return {"text": reply.text, "bundle": bytes(reply.bundle)}

    def decode(
        self, wish: dict[str, Any], relay: Relay | None, hop: int, step: int, rows: int, handed: Handover
    ) -> Handover:
        """The shard's part of one step. ``relay`` treats what came over ``hop``; None passes it on unread."""
        if handed.error is not None:
            return replace(handed, bundle=_NOTHING)
        data: Bytes = handed.bundle.data
        hops = handed.hops
        try:
            if hop >= 0:
                size, times = len(data), (0.0, 0.0)
                if relay is not None:
                    data, *times = relay.forward(hop, step, rows, data)  # type: ignore[assignment]
                hops = (*hops, (size, *times))
            sent = time.perf_counter()
            reply = self._running().request(Type.DECODE, wish, data).result()
            wall = (time.perf_counter() - sent) * 1e6
        except WorkerError as error:
            return replace(handed, bundle=_NOTHING, error=_told(error))
        except PipelineError as error:  # a check of the relay
            return replace(handed, bundle=_NOTHING, error={"name": "relay", "message": str(error)})
        bundle = np.frombuffer(reply.bundle, np.uint8) if len(reply.bundle) else _NOTHING
        return Handover(bundle, (*handed.replies, reply.text), (*handed.walls, wall), hops)

    def stop(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()

    def _running(self) -> LocalWorker:
        if self._worker is None:
            raise WorkerError(0, "lost", "the worker has not been started")
        return self._worker


def _told(error: WorkerError) -> dict[str, Any]:
    return {**error.details, "code": error.code, "name": error.name, "message": error.message}


# -- on the driver's side --------------------------------------------------------------------------


class RayWorker(Worker):
    """One shard in an actor of a Ray cluster. Made by :class:`RayPipeline`.

    ``node`` names its node (address and the first digits of Ray's id), ``place`` is all that :meth:`ShardHost.where`
    says.
    """

    def __init__(self, actor: Any, layer_range: tuple[int, int], timeout: float | None) -> None:
        self.actor = actor
        self.layer_range = layer_range
        self.node = "a node that is not known yet"
        self.place: dict[str, Any] = {}
        self._timeout = timeout

    def request(self, type: int, text: Mapping[str, Any] | None = None, bundle: Bytes = b"") -> Pending:
        answer = self.actor.request.remote(int(type), dict(text or {}), bytes(bundle))
        return _Pending(self, answer, Type(type).name.lower())

    def close(self) -> None:
        """End the worker and its actor."""
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.actor.stop.remote(), timeout=2 * CLOSE_GRACE)
        ray.kill(self.actor, no_restart=True)

    def ask_to_end(self) -> None:
        self.actor.stop.remote()

    def locate(self, place: dict[str, Any]) -> None:
        """Take note of where the actor is."""
        self.place = place
        self.node = f"node {place['address']} ({place['node'][:8]})"

    def take(self, answer: Any, operation: str, limit: float | None) -> Any:
        """What the actor answered. Raises WorkerError when it says nothing for ``limit`` seconds, or is gone."""
        ray = import_ray()
        try:
            return ray.get(answer, timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise self.silent(operation, limit) from None
        except ray.exceptions.RayError as error:
            raise self.lost(operation, error) from None

    def patience(self, limit: float | None = None) -> float | None:
        """Seconds that the actor may say nothing while its worker may be silent for ``limit`` or its time-out."""
        return None if self._timeout is None else max(self._timeout, limit or 0.0) + HOST_GRACE

    def silent(self, operation: str, limit: float | None) -> WorkerError:
        """The error for an actor that says nothing."""
        return self.error({"name": "timeout", "message": f"no answer in {limit or 0:g} seconds"}, operation)

    def lost(self, operation: str, error: BaseException) -> WorkerError:
        """The error for an actor that is gone, or for a bundle that went with its node."""
        ray = import_ray()
        gone = [node for node in ray.nodes() if node["NodeID"] == self.place.get("node") and not node["Alive"]]
        if gone:
            why = "the node is gone"
        elif isinstance(error, ray.exceptions.ActorUnavailableError):
            why = "the node does not answer"
        elif isinstance(error, ray.exceptions.RayActorError) and self.place:
            why = f"the actor (process {self.place['pid']}) is gone"
        else:
            why = _one_line(error)
        return self.error({"name": "lost", "message": why}, operation)

    def error(self, text: Mapping[str, Any], operation: str) -> WorkerError:
        """The exception for what the worker said, or what is said of it, with its node."""
        told = {**text, "message": f"on {self.node}: {text.get('message', 'no reason given')}"}
        return refusal(told, self.layer_range, operation)


class _Pending:
    def __init__(self, worker: RayWorker, answer: Any, operation: str) -> None:
        self._worker = worker
        self._answer = answer
        self._operation = operation

    def done(self) -> bool:
        return bool(import_ray().wait([self._answer], timeout=0)[0])

    def result(self, timeout: float | None = None) -> Reply:
        limit = self._worker.patience() if timeout is None else timeout
        told = self._worker.take(self._answer, self._operation, limit)
        if "error" in told:
            raise self._worker.error(told["error"], self._operation)
        return Reply(told["text"], memoryview(told["bundle"]))


@dataclass(eq=False)
class Flight:
    """One batch that is on its way through the shards, see :meth:`RayPipeline.submit`."""

    pipeline: RayPipeline = field(repr=False)
    batch: Batch
    logits: bool
    sample: bool
    number: int = 0
    began: float = 0.0
    #: Whether a shard may have been asked.
    asked: bool = False
    answers: list[Any] = field(default_factory=list, repr=False)
    step: Step | None = None
    error: BaseException | None = None

    def done(self) -> bool:
        """Whether :meth:`result` need not wait for a shard."""
        return self._settled() or bool(import_ray().wait([self.answers[-1]], timeout=0)[0])

    def result(self) -> Step:
        """Wait for it, and for all that were submitted before. Raises what :meth:`Pipeline.decode` does."""
        while not self._settled():
            self.pipeline._settle_oldest()
        if self.error is not None:
            raise self.error
        assert self.step is not None
        return self.step

    def _settled(self) -> bool:
        return self.step is not None or self.error is not None


class RayPipeline(Pipeline):
    """Shards in actors of the cluster that this process is connected to (:func:`ray_cluster`).

    ``model`` is the file's path on every host, ``program`` the worker's (None: each host's own build). A shard asks for
    ``settings.threads`` processors, for its entry of ``memory`` in bytes and for a little of its entry of
    ``resources``, the name of a custom resource (empty: none). Shards are spread over the nodes. ``fingerprint`` is the
    model's that every host must have.

    Up to ``max_in_flight`` batches are on their way at once (:meth:`submit`). When a worker, an actor or a node is
    lost, all shards are placed anew on what is left and compute again the batches since the last :meth:`clear`, so
    that the bits stay the same; ``on_loss`` hears of it. This is tried ``max_rebuilds`` times in a row, without a step
    that succeeds in between, each time for at most ``place_timeout`` seconds and what loading the model takes
    (LOAD_TIMEOUT or ``timeout``, whichever is longer). A worker that is silent for ``timeout`` seconds is an error at
    once.

    Raises PipelineError for what does not fit together or finds no room, and WorkerError.
    """

    def __init__(
        self,
        model: Path | str,
        plan: Plan,
        settings: Settings,
        *,
        program: Path | str | None = None,
        memory: Sequence[int] = (),
        resources: Sequence[str] = (),
        fingerprint: bytes | None = None,
        relay: Relay | None = None,
        timeout: float | None = REQUEST_TIMEOUT,
        place_timeout: float = PLACE_TIMEOUT,
        max_rebuilds: int = 3,
        max_in_flight: int = 4,
        on_loss: Callable[[WorkerError], None] | None = None,
    ) -> None:
        for name, entries in (("memory", memory), ("resources", resources)):
            if entries and len(entries) != len(plan):
                raise PipelineError(f"{name} has {len(entries)} entries for {len(plan)} shards")
        if max_in_flight < 1:
            raise ValueError(f"{max_in_flight} batches cannot be in flight")
        self._ray = import_ray()
        self._model_path, self._plan, self._settings = str(model), plan, settings
        self._program = None if program is None else str(program)
        self._needs = [
            {
                "CPU": settings.threads,
                **({"memory": memory[k]} if memory else {}),
                **({resources[k]: _A_LITTLE} if resources and resources[k] else {}),
            }
            for k in range(len(plan))
        ]
        self._fingerprint = fingerprint
        self._timeout, self._place_timeout = timeout, place_timeout
        self.max_rebuilds, self.max_in_flight = max_rebuilds, max_in_flight
        self.on_loss = on_loss
        #: How often the shards were placed anew.
        self.rebuilds = 0
        self._in_row = 0
        self._group: Any = None
        self._hosts: list[RayWorker] = []
        self._flights: collections.deque[Flight] = collections.deque()
        self._history: list[Batch] = []
        self._sent_relay: tuple[Relay | None, Any] = (None, None)
        try:
            self._place()
            super().__init__(self._hosts, relay)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers, their actors and the reservation. May be called twice."""
        # Ray is shut down before this where the driver is interrupted while it starts.
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._release()

    def submit(self, batch: Batch, *, logits: bool = False, sample: bool = True) -> Flight:
        """Send one batch on its way and return; waits only while ``max_in_flight`` are under way already.

        Batches pass each shard in the order of their submission. One that fails is as if it had not been submitted;
        of those behind it, a shard refuses the ones that needed it.
        """
        while len(self._flights) >= self.max_in_flight:
            self._settle_oldest()
        flight = Flight(self, batch, logits, sample)
        try:
            self._flights.append(flight)
            self._send(flight)
        except BaseException:
            self._give_up(flight)
            raise
        return flight

    def decode(self, batch: Batch, *, logits: bool = False, sample: bool = True) -> Step:
        flight = self.submit(batch, logits=logits, sample=sample)
        try:
            return flight.result()
        except Exception:
            raise
        except BaseException:
            self._give_up(flight)
            raise

    def _give_up(self, flight: Flight) -> None:
        """Nobody will ask for it, such as after a Ctrl-C. What is asked next comes after this on every shard, also on
        those that have not been asked yet."""
        if flight in self._flights:
            self._flights.remove(flight)
            if flight.asked:
                self._roll_back(self.workers, flight.batch, wait=False)

    def clear(self) -> None:
        while self._flights:
            self._settle_oldest()
        self._history.clear()
        try:
            super().clear()
        except WorkerError as error:
            self._rebuild(error)

    # -- one step

    def _send(self, flight: Flight) -> None:
        batch, relay, last = flight.batch, self.relay, len(self._hosts) - 1
        flight.number, flight.began = self._steps, time.perf_counter()
        self._steps += 1
        data = encode(batch.bundle(self.model, relay.request_layout(-1, flight.number, len(batch))))
        handed: Any = Handover(np.frombuffer(data, np.uint8))
        flight.answers, flight.asked = [], True
        for index, host in enumerate(self._hosts):
            layout = relay.request_layout(index, flight.number, sum(batch.outputs) if index == last else len(batch))
            wish = layout.wish()
            if index == last:
                wish |= {"logits": flight.logits, "sample": flight.sample}
            handed = host.actor.decode.remote(wish, self._shared_relay(), index - 1, flight.number, len(batch), handed)
            flight.answers.append(handed)

    def _shared_relay(self) -> Any:
        """The relay as the actors get it: nothing for one that passes bytes on, else a reference."""
        if type(self.relay) is Relay:
            return None
        if self._sent_relay[0] is not self.relay:
            self._sent_relay = (self.relay, self._ray.put(self.relay))
        return self._sent_relay[1]

    def _finish(self, flight: Flight) -> Step:
        """Wait for a flight. Raises WorkerError, PipelineError, and what the relay raises."""
        handed = self._land(flight)
        shards: list[ShardTime] = []
        for host, reply, wall in zip(self._hosts, handed.replies, handed.walls, strict=False):
            try:
                shards.append(ShardTime.of(reply, wall))
            except (KeyError, TypeError, ValueError) as error:
                raise host.error({"name": "reply", "message": f"unusable answer ({error!r})"}, "decode") from None
        if handed.error is not None:
            failed = self._hosts[len(handed.replies)]
            if handed.error["name"] == "relay":
                raise PipelineError(handed.error["message"])
            raise failed.error(handed.error, "decode")
        sampled = [int(token) for token in handed.replies[-1].get("sampled", ())]
        rows = sum(flight.batch.outputs)
        table = self.relay.receive(flight.number, rows, handed.bundle.data) if flight.logits else None
        hops = [
            HopTime(size, shards[k].encode_us, shards[k + 1].decode_us, decode_us, encode_us)
            for k, (size, decode_us, encode_us) in enumerate(handed.hops)
        ]
        return Step(sampled, table, shards, hops, time.perf_counter() - flight.began)

    def _land(self, flight: Flight) -> Handover:
        """What the last shard handed on, or the first that failed to."""
        ray = self._ray
        for host, answer in zip(self._hosts, flight.answers, strict=True):
            limit = host.patience()
            if not ray.wait([answer], timeout=limit, fetch_local=False)[0]:
                raise host.silent("decode", limit)
        try:
            handed: Handover = ray.get(flight.answers[-1], timeout=self._hosts[-1].patience())
            return handed
        except ray.exceptions.RayError:
            # Those behind one that is gone fail with it: the first is the one.
            for host, answer in zip(self._hosts, flight.answers, strict=True):
                host.take(answer, "decode", host.patience())
            raise PipelineError("a bundle got lost between two nodes") from None

    def _settle_oldest(self) -> None:
        flight = self._flights[0]
        try:
            step = self._finish(flight)
        except WorkerError as error:
            if error.name == "lost":
                try:
                    self._rebuild(error)
                except Exception as final:
                    self._fail_all(final)
                return
            # A refusal says that the shard has not computed; of one that is silent nothing is known.
            ahead = [host for host in self._hosts if error.layer_range and host.layer_range < error.layer_range]
            self._settle(flight, error, ahead)
        except Exception as error:
            self._settle(flight, error, self._hosts)
        else:
            self._flights.popleft()
            self._history.append(flight.batch)
            self._in_row = 0
            flight.step = step

    def _settle(self, flight: Flight, error: Exception, ahead: Sequence[Worker]) -> None:
        self._flights.popleft()
        flight.error = error
        self._roll_back(ahead, flight.batch)

    def _fail_all(self, error: Exception) -> None:
        for flight in self._flights:
            flight.error = error
        self._flights.clear()

    # -- placing

    def _rebuild(self, error: WorkerError) -> None:
        """After a loss: place all shards anew, and bring them to where they were. Raises when it cannot be done."""
        while error.name == "lost" and self._in_row < self.max_rebuilds:
            self._in_row += 1
            if self.on_loss is not None:
                self.on_loss(error)
            try:
                self._release()
                self._place()
                self.workers[:] = self._hosts
                self.rebuilds += 1
                self._replay()
                for flight in self._flights:
                    self._send(flight)
                return
            except WorkerError as again:
                error = again
            except PipelineError as again:
                raise PipelineError(f"{error}; and the shards cannot be placed anew: {again}") from None
        if error.name == "lost" and self._in_row:
            times = "once" if self._in_row == 1 else f"{self._in_row} times"
            message = f"{error.message} (the shards were placed anew {times})"
            error = WorkerError(error.code, error.name, message, error.layer_range, error.operation)
        raise error

    def _replay(self) -> None:
        flights: collections.deque[Flight] = collections.deque()
        for batch in self._history:
            if len(flights) >= self.max_in_flight:
                self._finish(flights.popleft())
            flights.append(Flight(self, batch, False, False))
            self._send(flights[-1])
        while flights:
            self._finish(flights.popleft())

    def _release(self) -> None:
        ray = self._ray
        hosts, self._hosts = self._hosts, []
        stopping = [host.actor.stop.remote() for host in hosts]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=2 * CLOSE_GRACE)
        for host in hosts:
            ray.kill(host.actor, no_restart=True)
        if self._group is not None:
            group, self._group = self._group, None
            ray.util.remove_placement_group(group)

    def _place(self) -> None:
        ray = self._ray
        self._group = group = ray.util.placement_group(self._needs, strategy="SPREAD")
        if not group.wait(self._place_timeout):
            raise PipelineError(
                f"Ray has found no room in {self._place_timeout:g} seconds: {_asked(self._needs)}; {_there(ray)}"
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index, (layers, needs) in enumerate(zip(self._plan, self._needs, strict=True)):
            last = index == len(self._plan) - 1
            options: dict[str, Any] = {
                "num_cpus": needs["CPU"],
                "resources": {name: amount for name, amount in needs.items() if name not in ("CPU", "memory")},
                "scheduling_strategy": strategy(group, placement_group_bundle_index=index),
                # The last one's answer goes to the driver in any case.
                "runtime_env": {"env_vars": _ACTOR if last else _ACTOR | _KEEP_BUNDLES},
            }
            if "memory" in needs:
                options["memory"] = needs["memory"]
            actor = ray.remote(ShardHost).options(**options).remote()
            self._hosts.append(RayWorker(actor, layers, self._timeout))
        places = [host.actor.where.remote() for host in self._hosts]
        started = [
            host.actor.start.remote(self._program, self._model_path, host.layer_range, self._settings, self._timeout)
            for host in self._hosts
        ]
        for host, place in zip(self._hosts, places, strict=True):
            host.locate(host.take(place, "start", host.patience(self._place_timeout)))
        for host, answer in zip(self._hosts, started, strict=True):
            told = host.take(answer, "start", host.patience(LOAD_TIMEOUT))
            if "error" in told:
                raise host.error(told["error"], "start")
        for host in self._hosts:
            self._check_model(host, host.describe())
            host.locate(host.take(host.actor.where.remote(), "start", host.patience()))

    def _check_model(self, host: RayWorker, shard: Description) -> None:
        start, end = host.layer_range
        if self._fingerprint is not None and shard.fingerprint != self._fingerprint:
            found = "none" if shard.fingerprint is None else shard.fingerprint.hex()[:16]
            raise PipelineError(
                f"shard [{start},{end}): on {host.node} {self._model_path} is another model: its fingerprint is "
                f"{found}, and {self._fingerprint.hex()[:16]} is expected"
            )


def _asked(needs: Sequence[Mapping[str, float]]) -> str:
    return "the shards ask for " + ", ".join(_amounts(need) for need in needs)


def _there(ray: Any) -> str:
    """What the nodes that are alive have, and how much of it is free."""
    free = ray.available_resources()
    nodes = [
        f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]}) has {_amounts(node['Resources'])}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return f"{', '.join(nodes) or 'there is no node'}; free in all: {_amounts(free) or 'nothing'}"


def _amounts(resources: Mapping[str, float]) -> str:
    own = [
        name for name in resources if not name.startswith(("node:", "object_store_memory")) and "_group_" not in name
    ]
    return " ".join(_amount(name, resources[name]) for name in sorted(own))


def _amount(name: str, amount: float) -> str:
    return f"memory {amount / 1e9:.2f} GB" if name == "memory" else f"{name} {amount:g}"
