"""Workers that hand their bundles to each other and work side by side (spec/worker-protocol.md, Flows)."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .batch import Batch, BatchEncoder, Layout
from .pipeline import HopTime, Pipeline, PipelineError, ShardTime, Step
from .protocol import FLOWS, MINOR_FLOWS, Type
from .worker import CLOSE_GRACE, LocalWorker, Reply, WorkerError, _Pending

#: Whether this system has memory that two processes can share by a descriptor.
CAN_SHARE: Final = hasattr(os, "memfd_create")
#: The least and the most bytes of memory that two neighbours share by default.
_SHARED: Final = (16 << 20, 1 << 32)
#: What stands before the ring of bundles in it (spec/worker-protocol.md, Links).
_HEAD: Final = 4096
#: Batches under way for each worker: one that it computes and one that waits, so that none runs dry.
_EACH: Final = 2
#: A worker queues 64 requests. With more under way than that nobody would read what the others wait to have read.
_MOST: Final = 48
#: The code of what cannot be passed on.
_LINK: Final = 24
#: Seconds in which a worker says how it is, when nothing has come out for too long.
_SIGN_OF_LIFE: Final = 1.0
#: None twice, so that a late answer is not taken for one to a batch of a later pipeline on the same worker.
_numbers = itertools.count(FLOWS)


class Flow:
    """A batch under way through the shards of a :class:`FlowPipeline`."""

    def __init__(self, pipeline: FlowPipeline, number: int, batch: Batch, logits: bool) -> None:
        self.batch = batch
        self._pipeline = pipeline
        self._number = number
        self._logits = logits
        self._began = time.perf_counter()
        #: One a worker, in their order: only the last one has something to answer, and whoever fails.
        self._answers: list[_Pending] = []
        self._reply: Reply | None = None
        self._error: WorkerError | None = None
        self._seconds = 0.0

    @property
    def _over(self) -> bool:
        return self._reply is not None or self._error is not None

    def done(self) -> bool:
        """Whether it has come out, or failed; never waits."""
        return self._over or (self._pipeline._look(0) and self._over)

    def result(self) -> Step:
        """Wait for it. Raises WorkerError when it has failed; then its sequences are where they were before it on every
        shard that is left, and no batch is under way."""
        while not self._over:
            self._pipeline._wait()
        if self._error is not None:
            self._pipeline._take_back()
            raise self._error
        return self._step()

    def _step(self) -> Step:
        assert self._reply is not None
        text, last = self._reply.text, self._pipeline.local[-1]
        try:
            sampled = [int(token) for token in text.get("sampled", ())]
            shards, hops = _times(text["stages"])
            if len(shards) != len(self._pipeline.local):
                raise ValueError(f"{len(shards)} stages")
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(0, "reply", f"unusable answer ({error!r})", last.layer_range, "decode") from None
        relay = self._pipeline.relay
        table = relay.receive(0, sum(self.batch.outputs), self._reply.bundle) if self._logits else None
        return Step(sampled, table, shards, hops, self._seconds)


class FlowPipeline(Pipeline):
    """A pipeline in which bundles go from worker to worker: the driver asks the first and hears the last.

    Several batches may be under way (:meth:`submit`): a shard computes one while the shard before it computes the
    next. At most ``in_flight`` are, two a worker by default; one more waits until one has come out, so that a slow
    shard slows those before it and nothing grows. Results are the bits that :class:`Pipeline` gives for the same
    batches in the same order. ``shared_memory`` is how many bytes two neighbours share, 0 for none: then bundles go
    through sockets. By default there is room for two of the largest bundles and more; what is not used takes none. With
    ``checksums`` false bundles carry none.

    For one thread. Raises PipelineError for workers that do not make a pipeline or know no flows. When a worker is lost
    the pipeline is at its end: every request from then on raises the WorkerError of that one.
    """

    def __init__(
        self,
        workers: Sequence[LocalWorker],
        *,
        shared_memory: int | None = None,
        checksums: bool = True,
        in_flight: int | None = None,
    ) -> None:
        super().__init__(workers)
        if in_flight is not None and not 1 <= in_flight <= _MOST:
            raise PipelineError(f"{in_flight} batches cannot be under way, 1 to {_MOST} can")
        self.local = list(workers)
        self.layout = Layout(checksums=checksums)
        self._encoder = BatchEncoder(self.model, self.layout)
        self.in_flight = in_flight or min(_MOST, _EACH * len(self.local))
        self._flows: list[Flow] = []
        #: What is to be taken back before the next one.
        self._failed: list[Flow] = []
        for worker in self.local:
            minor = worker.ready().hello["minor"]
            if minor < MINOR_FLOWS:
                start, end = worker.layer_range
                raise PipelineError(
                    f"shard [{start},{end}) speaks version 1.{minor}, and flows came with 1.{MINOR_FLOWS}"
                )
        memory = self._room() if shared_memory is None and CAN_SHARE else shared_memory or 0
        for one, other in itertools.pairwise(self.local):
            _connect(one, other, memory)
        self._by_descriptor = {worker.fileno(): worker for worker in self.local}
        self._answers = select.poll()
        for descriptor in self._by_descriptor:
            self._answers.register(descriptor, select.POLLIN)

    def submit(self, batch: Batch, *, logits: bool = False, sample: bool = True) -> Flow:
        """Send one batch on its way, once fewer than ``in_flight`` are. Raises WorkerError, and PipelineError for a
        batch under sessions, which goes by :class:`SessionPipeline`."""
        flow = self._next(batch, logits)
        try:
            self._send(flow, sample)
        except BaseException:
            self._give_up(flow)
            raise
        return flow

    def decode(self, batch: Batch, *, logits: bool = False, sample: bool = True) -> Step:
        flow = self._next(batch, logits)
        try:
            self._send(flow, sample)
            return flow.result()
        except BaseException:
            self._give_up(flow)
            raise

    def _next(self, batch: Batch, logits: bool) -> Flow:
        if batch.sessions:
            raise PipelineError("a batch under sessions does not flow")
        self._raise_loss()
        if self._failed:
            self._take_back()
        while len(self._flows) >= self.in_flight:
            self._wait()
        return Flow(self, next(_numbers), batch, logits)

    def _send(self, flow: Flow, sample: bool) -> None:
        flow._answers = [worker.expect(flow._number, "decode") for worker in self.local]
        data = self._encoder.encode(flow.batch, self._steps)
        self._steps += 1
        checksums = self.layout.checksums
        wish: dict[str, Any] = {"flow": True, "checksums": checksums, "logits": flow._logits, "sample": sample}
        self.local[0].send_flow(flow._number, wish, data)
        self._flows.append(flow)

    def _give_up(self, flow: Flow) -> None:
        """Nobody will ask for it, such as after a Ctrl-C: what has been sent is taken back before the next one."""
        if flow._error is not None:
            return  # that is seen to already
        if not (flow._answers and flow._answers[0].sent):
            self._forget(flow)
            return
        if not flow._over and flow not in self._flows:
            self._flows.append(flow)
        if flow not in self._failed:
            self._failed.append(flow)

    def clear(self) -> None:
        # What is under way would come after it.
        self._drain()
        super().clear()
        self._failed.clear()

    def _room(self) -> int:
        """Bytes for two of the largest bundles: the residual, and side tensors as large again thrice."""
        largest = 4 * 4 * int(self.model.raw["n_batch"]) * self.model.n_embd
        return min(max(_SHARED[0], 2 * largest), _SHARED[1] - _HEAD) // 64 * 64

    # -- what comes back

    def _look(self, timeout: float | None) -> bool:
        """Take what has come, waiting ``timeout`` seconds for it; whether a flow is over that was not."""
        for descriptor, _ in self._answers.poll(None if timeout is None else timeout * 1000):
            worker = self._by_descriptor[descriptor]
            worker.take()
            if worker.loss is not None:
                self._answers.unregister(descriptor)
                del self._by_descriptor[descriptor]
        return self._settle_all()

    def _settle_all(self) -> bool:
        """Whether a flow is over that was not."""
        under_way = len(self._flows)
        for flow in self._flows:
            self._settle(flow)
        self._flows = [flow for flow in self._flows if not flow._over]
        return len(self._flows) < under_way

    def _settle(self, flow: Flow) -> None:
        for place, pending in enumerate(flow._answers):
            if pending.error is not None:
                error = self._cause(place, pending.error)
                if flow not in self._failed:
                    self._failed.append(flow)
                flow._error = error
                break
            if pending.reply is not None:
                flow._reply = pending.reply
                break
        else:
            return
        flow._seconds = time.perf_counter() - flow._began
        self._forget(flow)

    def _forget(self, flow: Flow) -> None:
        for worker in self.local:
            worker.forget(flow._number)

    def _cause(self, place: int, error: WorkerError) -> WorkerError:
        """A worker that cannot pass a batch on knows no more than that; the one behind it is the cause."""
        if error.code != _LINK or place + 1 == len(self.local):
            return error
        behind = self.local[place + 1]
        deadline = time.monotonic() + CLOSE_GRACE
        ready = select.poll()
        ready.register(behind.fileno(), select.POLLIN)
        while behind.loss is None and (left := deadline - time.monotonic()) > 0:
            ready.poll(left * 1000)
            behind.take()
        return behind.overdue(f"takes no bundle from the shard before it ({error.message})", "decode")

    def _wait(self) -> None:
        """Until a flow is over. Raises nothing: what has gone wrong is in the flows."""
        if self._settle_all():  # by what had come before a Ctrl-C
            return
        limit = self.local[0].timeout
        since = time.monotonic()
        while not self._look(self._patience(limit, since)):
            if limit is not None and self._patience(limit, since) == 0.0 and not self._look(0):
                self._blame(limit)

    def _patience(self, limit: float | None, since: float) -> float | None:
        """Seconds that all workers may still be silent, who may be since the last byte from any, or since the wait
        began: before that it may have been this process that was stopped."""
        if limit is None:
            return None
        heard = max(worker.heard for worker in self.local)
        return max(0.0, max(heard, since) + limit - time.monotonic())

    def _blame(self, limit: float) -> None:
        """Nothing has come out for ``limit`` seconds: end the worker that is the cause."""
        stopped = [worker for worker in self.local if worker.loss is None and worker.is_stopped()]
        silent = stopped or self._silent()
        # All of them answer: the batch is lost, wherever that is.
        cause = silent[0] if silent else self.local[-1]
        cause.overdue(f"no answer in {limit:g} seconds", "decode")

    def _silent(self) -> list[LocalWorker]:
        asked: list[tuple[LocalWorker, Any]] = []
        for worker in self.local:
            with contextlib.suppress(WorkerError):
                asked.append((worker, worker.request(Type.STATISTICS)))
        deadline = time.monotonic() + _SIGN_OF_LIFE
        found = []
        for worker, pending in asked:
            try:
                pending.result(max(0.0, deadline - time.monotonic()))
            except WorkerError:
                found.append(worker)
        return found

    # -- after a failure

    def _drain(self) -> None:
        while self._flows:
            self._wait()

    def _take_back(self) -> None:
        """Bring every shard back to before what has failed, or was given up, once nothing is under way."""
        self._drain()
        for flow in self._failed:
            self._roll_back(self.workers, flow.batch)
        self._failed.clear()

    def _raise_loss(self) -> None:
        for worker in self.local:
            if worker.loss is not None:
                raise worker.loss_for("decode")


def _connect(one: LocalWorker, other: LocalWorker, shared_memory: int) -> None:
    """Make a link of two neighbours. Raises WorkerError and OSError."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        shared: list[int] = []
        if shared_memory:
            memory = os.memfd_create("boundary-bundle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, memory)
            os.ftruncate(memory, _HEAD + shared_memory)
            # Neither end can make the other one fault by cutting it short.
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            shared = [memory]
        asked = [other.link("previous", [ends[1].fileno(), *shared]), one.link("next", [ends[0].fileno(), *shared])]
        for pending in asked:
            pending.result()


def _times(stages: Iterable[Any]) -> tuple[list[ShardTime], list[HopTime]]:
    """Raises KeyError, TypeError or ValueError for what are no stages."""
    shards: list[ShardTime] = []
    hops: list[HopTime] = []
    before: Any = None
    for stage in stages:
        decode_us, compute_us, encode_us, transfer_us, wait_us = (
            float(stage[key]) for key in ("decode_us", "compute_us", "encode_us", "transfer_us", "wait_us")
        )
        shards.append(ShardTime(decode_us, compute_us, encode_us, decode_us + compute_us + encode_us))
        if before is not None:
            hops.append(HopTime(int(before["bytes"]), shards[-2].encode_us, decode_us, 0.0, 0.0, transfer_us, wait_us))
        before = stage
    return shards, hops
