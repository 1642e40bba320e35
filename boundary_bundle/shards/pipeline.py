"""A batch through all shards, one after another, and generation on top of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..decoder import decode
from ..encoder import encode
from .batch import PLAIN, Batch, Layout
from .protocol import Type
from .worker import Bytes, Description, Pending, Reply, Sampling, Worker, WorkerError

Logits = npt.NDArray[np.float32]

#: What all shards must have in common, by the names of describe.
SHARED = (
    *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads"),
    *("flash_attn", "kv_unified", "swa_full", "type_k", "type_v"),
)


class PipelineError(Exception):
    """The workers do not make a pipeline, or a request does not fit it; one sentence."""


@dataclass(frozen=True)
class ShardTime:
    """One worker's share of one step, in microseconds: its C codec's two directions, computing, the whole."""

    decode_us: float
    compute_us: float
    encode_us: float
    wall_us: float

    @classmethod
    def of(cls, reply: Mapping[str, Any], wall_us: float) -> ShardTime:
        """From the text of a worker's reply. Raises KeyError, TypeError or ValueError for one that does not say."""
        decode_us, compute_us, encode_us = (float(reply[key]) for key in ("decode_us", "compute_us", "encode_us"))
        return cls(decode_us, compute_us, encode_us, wall_us)


@dataclass(frozen=True)
class HopTime:
    """One bundle from one shard to the next: bytes as the producer wrote them, and codec microseconds.

    encode_us is the producer's C codec, decode_us the consumer's; the python ones are 0 when the bytes were
    passed on unread. Of a bundle that went from worker to worker, transfer_us is the time from the one having it whole
    to the other having it in hand, and wait_us that in which the other had another one in hand; else they are 0.
    """

    bytes: int
    encode_us: float
    decode_us: float
    python_decode_us: float
    python_encode_us: float
    transfer_us: float = 0.0
    wait_us: float = 0.0


@dataclass(frozen=True)
class Step:
    """What came of one batch. ``logits`` is f32 [outputs, n_vocab] when they were asked for."""

    sampled: list[int]
    logits: Logits | None
    shards: list[ShardTime]
    hops: list[HopTime]
    seconds: float


class UnderWay(Protocol):
    """A batch that has been submitted."""

    def result(self) -> Step:
        """Wait for what comes of it. Raises WorkerError, and what the relay raises."""
        ...


@dataclass(frozen=True)
class _Done:
    step: Step

    def result(self) -> Step:
        return self.step


class Relay:
    """What happens to a bundle between two shards. This one passes the bytes on as they are.

    Hop k lies between shard k and shard k + 1; hop -1 is the way into the first shard, hop n - 1 the
    way out of the last of n.
    """

    def request_layout(self, hop: int, step: int, rows: int) -> Layout:
        """The layout that the producer at this hop is asked for (hop -1: that of the token bundle).

        ``rows`` counts the rows of the bundle's largest tensor: tokens, or at the last hop outputs.
        """
        return PLAIN

    def forward(self, hop: int, step: int, rows: int, data: Bytes) -> tuple[Bytes, float, float]:
        """The bytes to send on, and the microseconds of decoding and encoding them."""
        return data, 0.0, 0.0

    def receive(self, step: int, rows: int, data: Bytes) -> Logits:
        """Logits f32 [outputs, n_vocab] out of the last shard's bundle."""
        return np.asarray(decode(data)["logits"], np.float32)

    def attach(self, shards: Sequence[Description]) -> None:
        """Called once with what the workers reported."""


class Pipeline:
    """Workers whose ranges follow each other from layer 0 to the last. Raises PipelineError if they do not.

    The workers stay the caller's to close. One computes at a time.
    """

    def __init__(self, workers: Sequence[Worker], relay: Relay | None = None) -> None:
        self.workers = list(workers)
        self.relay = relay or Relay()
        self.shards = [worker.describe() for worker in self.workers]
        self._steps = 0
        self._check()
        self.relay.attach(self.shards)

    @property
    def model(self) -> Description:
        """The first shard's description; what it says of the model holds for all."""
        return self.shards[0]

    def _check(self) -> None:
        if not self.shards:
            raise PipelineError("a pipeline needs a worker")
        place, model = 0, self.shards[0]
        for shard in self.shards:
            start, end = shard.layer_range
            if start != place:
                raise PipelineError(f"shard [{start},{end}) does not continue at layer {place}")
            place = end
            if shard.fingerprint != model.fingerprint:
                raise PipelineError(f"shard [{start},{end}) holds another model than shard 0")
            for key in SHARED:
                mine, first = shard.raw.get(key), model.raw.get(key)
                if mine != first:
                    raise PipelineError(f"shard [{start},{end}) has {key} {mine}, the first shard {first}")
        if place != model.n_layer:
            raise PipelineError(f"the shards end at layer {place}, but the model has {model.n_layer} layers")

    def decode(self, batch: Batch, *, logits: bool = False, sample: bool = True) -> Step:
        """Send one batch through all shards.

        Raises WorkerError, and what the relay raises. A shard that refuses keeps its state; the shards that have
        computed are taken back to where they were, whatever went wrong, so that the next request finds all of
        them at the same position. Not so under sessions: those are taken care of by SessionPipeline.
        """
        # How many shards may have computed the batch. A refusal says that a shard has not.
        ahead = 0

        def entered(count: int) -> None:
            nonlocal ahead
            ahead = count

        try:
            return self._decode(batch, logits, sample, entered)
        except WorkerError as error:
            self._roll_back(self.workers[: ahead - (1 if error.code else 0)], batch)
            raise
        except Exception:
            self._roll_back(self.workers[:ahead], batch)
            raise
        except BaseException:
            # Such as a Ctrl-C. Requests are answered in order: what is asked next comes after this in any case.
            self._roll_back(self.workers[:ahead], batch, wait=False)
            raise

    def submit(self, batch: Batch, *, logits: bool = False, sample: bool = True) -> UnderWay:
        """Begin with one batch; its result is for later. Here it has come when this returns, in
        :class:`~boundary_bundle.shards.FlowPipeline` several are under way. Raises as :meth:`decode` does."""
        return _Done(self.decode(batch, logits=logits, sample=sample))

    def set_sampler(self, sequence: int, sampling: Sampling, history: Sequence[int] = ()) -> None:
        """How the tokens of ``sequence`` are drawn from now on, until it is cleared; ``history`` are those before."""
        self.workers[-1].set_sampler(sequence, sampling, history)

    def _decode(self, batch: Batch, logits: bool, sample: bool, entered: Callable[[int], None]) -> Step:
        started = time.perf_counter()
        step, relay, last = self._steps, self.relay, len(self.workers) - 1
        self._steps += 1
        data: Bytes = encode(batch.bundle(self.model, relay.request_layout(-1, step, len(batch))))
        shards: list[ShardTime] = []
        passed: list[tuple[int, float, float]] = []
        reply: Reply | None = None
        for index, worker in enumerate(self.workers):
            rows = sum(batch.outputs) if index == last else len(batch)
            layout = relay.request_layout(index, step, rows)
            wish = layout.wish()
            if index == last:
                wish |= {"logits": logits, "sample": sample}
            sent = time.perf_counter()
            entered(index + 1)
            reply = worker.request(Type.DECODE, wish, data).result()
            wall = (time.perf_counter() - sent) * 1e6
            try:
                shards.append(ShardTime.of(reply.text, wall))
            except (KeyError, TypeError, ValueError) as error:
                raise WorkerError(0, "reply", f"unusable answer ({error!r})", worker.layer_range, "decode") from None
            if index != last:
                size = len(reply.bundle)
                data, decode_us, encode_us = relay.forward(index, step, rows, reply.bundle)
                passed.append((size, decode_us, encode_us))
        assert reply is not None
        sampled = [int(token) for token in reply.text.get("sampled", ())]
        table = relay.receive(step, sum(batch.outputs), reply.bundle) if logits else None
        hops = [
            HopTime(size, shards[k].encode_us, shards[k + 1].decode_us, decode_us, encode_us)
            for k, (size, decode_us, encode_us) in enumerate(passed)
        ]
        return Step(sampled, table, shards, hops, time.perf_counter() - started)

    def _roll_back(self, workers: Sequence[Worker], batch: Batch, *, wait: bool = True) -> None:
        asked: list[Pending] = []
        if batch.sessions:
            return
        for worker in workers:
            for sequence, position in batch.first_positions().items():
                # What led here is what the caller hears of.
                with contextlib.suppress(WorkerError):
                    asked.append(worker.request(Type.CLEAR, {"sequence": sequence, "from": position}))
        for pending in asked if wait else ():
            with contextlib.suppress(WorkerError):
                pending.result()

    def clear(self) -> None:
        """Forget all sequences on every shard."""
        for worker in self.workers:
            worker.clear()


@dataclass
class Generation:
    """What came of one prompt.

    ``steps`` counts the tokens generated, each from one row of logits. Speeds count the steps of one
    token only, not the prompt. ``logits_compared`` and ``logits_differing`` are 0 without a reference.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits_compared: int = 0
    logits_differing: int = 0
    prompt_steps: list[Step] = field(default_factory=list)
    decode_steps: list[Step] = field(default_factory=list)
    reference_steps: list[Step] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """None when no step of one token was made."""
        return _rate(self.decode_steps)

    @property
    def reference_tokens_per_second(self) -> float | None:
        """The reference's speed over the same steps."""
        return _rate(self.reference_steps)

    @property
    def all_steps(self) -> list[Step]:
        return [*self.prompt_steps, *self.decode_steps]

    def shard_ms(self, shard: int) -> float:
        """Median computing time of one shard over the steps of one token, in milliseconds."""
        return _compute_ms(self.decode_steps or self.prompt_steps, shard)

    @property
    def reference_ms(self) -> float | None:
        """Median computing time of the reference over the same steps; None when there are none."""
        return _compute_ms(self.reference_steps, 0) if self.reference_steps else None

    def hop(self, hop: int) -> HopTime:
        """Means over every bundle that crossed one hop."""
        times = [step.hops[hop] for step in self.all_steps]
        return HopTime(
            round(statistics.fmean(time.bytes for time in times)),
            statistics.fmean(time.encode_us for time in times),
            statistics.fmean(time.decode_us for time in times),
            statistics.fmean(time.python_decode_us for time in times),
            statistics.fmean(time.python_encode_us for time in times),
            statistics.fmean(time.transfer_us for time in times),
            statistics.fmean(time.wait_us for time in times),
        )


def _rate(steps: Sequence[Step]) -> float | None:
    return len(steps) / sum(step.seconds for step in steps) if steps else None


def _compute_ms(steps: Sequence[Step], shard: int) -> float:
    return statistics.median(step.shards[shard].compute_us for step in steps) / 1000


def count_differing(ours: Logits, theirs: Logits) -> int:
    """How many logits differ in at least one bit. Raises PipelineError when the shapes differ."""
    if ours.shape != theirs.shape:
        raise PipelineError(f"the shards gave logits of shape {ours.shape}, the reference {theirs.shape}")
    # As integers: NaN would differ from itself, and -0.0 would equal 0.0.
    return int(np.count_nonzero(ours.view(np.uint32) != theirs.view(np.uint32)))


def _compare(result: Generation | Streams, ours: Step, theirs: Step) -> None:
    """Count the logits of one step, and those that differ."""
    assert ours.logits is not None
    assert theirs.logits is not None
    result.logits_compared += ours.logits.size
    result.logits_differing += count_differing(ours.logits, theirs.logits)


def generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    batch_size: int,
    eos: Sequence[int] = (),
    reference: Pipeline | None = None,
    all_logits: bool = False,
    on_token: Callable[[int], None] | None = None,
    sampling: Sampling | None = None,
) -> Generation:
    """Generate up to ``n_tokens`` tokens after ``prompt``, from empty sequences: the most likely ones, or as
    ``sampling`` draws them.

    The prompt goes in batches of ``batch_size``, side by side where the pipeline has several under way. ``eos`` tokens
    end it. With ``reference``, every batch
    goes through it too and each logit of each step is compared by its bits; ``all_logits`` asks for the
    logits of every prompt token, not of the last alone. Raises PipelineError when there is nothing to
    begin with or no room, ValueError for a ``batch_size`` under 1, and WorkerError.
    """
    if batch_size < 1:
        raise ValueError(f"a prompt cannot go in batches of {batch_size} tokens")
    if not prompt:
        raise PipelineError("the prompt has no tokens")
    if n_tokens < 1:
        raise PipelineError(f"{n_tokens} tokens cannot be generated")
    room = pipeline.model.n_ctx
    if len(prompt) + n_tokens - 1 > room:
        count = "1 token" if len(prompt) == 1 else f"{len(prompt)} tokens"
        raise PipelineError(f"a prompt of {count} and {n_tokens} more do not fit a context of {room}")
    result = Generation(list(prompt))

    def finish(under_way: UnderWay, batch: Batch, steps: list[Step], reference_steps: list[Step]) -> list[int]:
        step = under_way.result()
        # Rows of logits are large; what is kept of a step is its times.
        steps.append(replace(step, logits=None))
        if reference is not None:
            theirs = reference.decode(batch, logits=True)
            reference_steps.append(replace(theirs, logits=None))
            _compare(result, step, theirs)
        return step.sampled

    def submit(batch: Batch) -> UnderWay:
        return pipeline.submit(batch, logits=reference is not None)

    pipeline.clear()
    if sampling is not None:
        pipeline.set_sampler(0, sampling, prompt)
    if reference is not None:
        reference.clear()
    parts = []
    for start in range(0, len(prompt), batch_size):
        part = prompt[start : start + batch_size]
        outputs = "all" if all_logits else "last" if start + len(part) == len(prompt) else "none"
        batch = Batch.of_sequence(part, start, outputs=outputs)
        parts.append((submit(batch), batch))
    for under_way, batch in parts:
        sampled = finish(under_way, batch, result.prompt_steps, [])
    token = sampled[-1]
    while True:
        result.tokens.append(token)
        if on_token is not None:
            on_token(token)
        if len(result.tokens) >= n_tokens or token in eos:
            return result
        position = len(prompt) + len(result.tokens) - 1
        batch = Batch.of_sequence([token], position)
        token = finish(submit(batch), batch, result.decode_steps, result.reference_steps)[-1]


@dataclass
class Streams:
    """What came of several prompts: the tokens of each, and how long the steps behind the prompts took for all of them
    together. ``logits_compared`` and ``logits_differing`` are 0 without a reference.
    """

    tokens: list[list[int]]
    decode_seconds: float = 0.0
    decoded: int = 0
    logits_compared: int = 0
    logits_differing: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Of all sequences together; None when nothing was decoded after the prompts."""
        return self.decoded / self.decode_seconds if self.decoded and self.decode_seconds else None


def generate_streams(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    batch_size: int,
    group: int = 1,
    eos: Sequence[int] = (),
    samplings: Sequence[Sampling] = (),
    reference: Pipeline | None = None,
) -> Streams:
    """Generate up to ``n_tokens`` tokens after each prompt, prompt i as sequence i, from empty sequences.

    ``group`` sequences share a batch; the groups are under way side by side, each token sent on its way as soon as the
    one before it is there. Prompts go in batches of ``batch_size``. ``samplings``, one a prompt, say how tokens are
    drawn. ``reference`` runs the same batches one after the other, and each logit is compared by its bits. Raises as
    :func:`generate` does.
    """
    if batch_size < 1 or group < 1:
        raise ValueError(f"{group} sequences cannot share a batch, nor a prompt go in batches of {batch_size} tokens")
    if not prompts or not all(prompts):
        raise PipelineError("a prompt has no tokens")
    if n_tokens < 1:
        raise PipelineError(f"{n_tokens} tokens cannot be generated")
    pipeline.clear()
    for sequence, sampling in enumerate(samplings):
        pipeline.set_sampler(sequence, sampling, prompts[sequence])
    if reference is not None:
        reference.clear()
    result = Streams([[] for _ in prompts])
    logits = reference is not None

    def finish(under_way: UnderWay, batch: Batch) -> list[int]:
        step = under_way.result()
        if reference is not None:
            _compare(result, step, reference.decode(batch, logits=True))
        return step.sampled

    parts = []
    for sequence, prompt in enumerate(prompts):
        for start in range(0, len(prompt), batch_size):
            part = prompt[start : start + batch_size]
            outputs = "last" if start + len(part) == len(prompt) else "none"
            batch = Batch.of_sequence(part, start, outputs=outputs, sequence=sequence)
            parts.append((pipeline.submit(batch, logits=logits), batch, sequence))
    for under_way, batch, sequence in parts:
        result.tokens[sequence] += finish(under_way, batch)

    def ongoing(sequences: Sequence[int]) -> list[int]:
        return [s for s in sequences if len(result.tokens[s]) < n_tokens and result.tokens[s][-1] not in eos]

    def next_batch(sequences: Sequence[int]) -> Batch:
        tokens = [result.tokens[s][-1] for s in sequences]
        positions = [len(prompts[s]) + len(result.tokens[s]) - 1 for s in sequences]
        return Batch(tokens, positions, [(s,) for s in sequences], [True] * len(sequences))

    began = time.perf_counter()
    groups = [ongoing(range(at, min(at + group, len(prompts)))) for at in range(0, len(prompts), group)]
    # In the order of their beginning: each group's next batch goes in when its last one has come out.
    turn: deque[tuple[UnderWay, Batch, list[int]]] = deque()
    for sequences in filter(None, groups):
        batch = next_batch(sequences)
        turn.append((pipeline.submit(batch, logits=logits), batch, sequences))
    while turn:
        under_way, batch, sequences = turn.popleft()
        for sequence, token in zip(sequences, finish(under_way, batch), strict=True):
            result.tokens[sequence].append(token)
            result.decoded += 1
        sequences = ongoing(sequences)
        if sequences:
            batch = next_batch(sequences)
            turn.append((pipeline.submit(batch, logits=logits), batch, sequences))
    result.decode_seconds = time.perf_counter() - began
    return result
