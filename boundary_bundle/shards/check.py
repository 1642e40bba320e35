"""Checked mode: both codecs carry real traffic in both directions on every hop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..bundle import Bundle, Tensor
from ..contract import Contract, TensorRule
from ..decoder import decode
from ..encoder import encode
from ..errors import BundleError
from .batch import Layout
from .pipeline import Logits, PipelineError, Relay
from .worker import Bytes, Description

_ORDERS = ("little", "big")
_SIZES = (0, 64, 1088, 128, 4096, 192, 65536)
# A small fragment size is for small bundles; a large prompt would be ten thousand frames.
_MOST_FRAGMENTS = 256


@dataclass(frozen=True)
class Fault:
    """A planted fault: one flipped bit of one residual row at hop ``hop`` in step ``step``. For tests.

    ``bit`` counts from the least significant of the f32; the default is the mantissa's highest.
    """

    hop: int
    step: int
    row: int = -1
    column: int = 0
    bit: int = 22


class CheckedRelay(Relay):
    """Decode in Python what C wrote, prove it by re-encoding to the same bytes, and send on another layout.

    The producer is asked for a byte order and a fragment size that vary from hop to hop and from step to
    step; what goes on has the other byte order and another fragment size, so that the consumer's C codec
    reads what Python laid out. Raises PipelineError when a hop fails its check.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.bundles = 0
        self._shards: Sequence[Description] = ()
        #: What each shard takes and gives, without sessions and (true) under sessions.
        self._contracts: list[dict[bool, tuple[Contract, Contract]]] = []

    def attach(self, shards: Sequence[Description]) -> None:
        self._shards = shards
        plain = [(shard.contract_in, shard.contract_out) for shard in shards]
        self._contracts = [
            {False: (taken, given), True: (session_contract(taken), session_contract(given))} for taken, given in plain
        ]
        hops = len(shards) - 1
        if self.fault is not None and not 0 <= self.fault.hop < hops:
            raise PipelineError(f"a fault at hop {self.fault.hop} is out of range: there are {hops} hops")

    def request_layout(self, hop: int, step: int, rows: int) -> Layout:
        turn = hop + 1 + step
        return Layout(_ORDERS[turn % 2], self._fitting(_SIZES[turn % len(_SIZES)], hop, rows))

    def _fitting(self, size: int, hop: int, rows: int) -> int:
        """``size``, made larger until the largest tensor at this hop is not too many fragments."""
        model = self._shards[0]
        width = model.n_vocab if hop == len(self._shards) - 1 else model.n_embd
        while size and rows * width * 4 > size * _MOST_FRAGMENTS:
            size *= 4
        return size

    def _check(self, hop: int, step: int, rows: int, data: Bytes) -> Bundle:
        producer = self._shards[hop]
        start, end = producer.layer_range
        where = f"the bundle of shard [{start},{end}) in step {step}"
        try:
            bundle = decode(data)
            under_sessions = "session_ids" in bundle
            self._contracts[hop][under_sessions][1].compare(bundle)
            if hop + 1 < len(self._shards):
                self._contracts[hop + 1][under_sessions][0].compare(bundle)
        except BundleError as error:
            raise PipelineError(f"{where} fails in Python's codec: {error}") from error
        for key, wanted in (("layer_start", start), ("layer_end", end), ("model_fingerprint", producer.fingerprint)):
            if bundle.attributes.get(key) != wanted:
                raise PipelineError(f"{where} has {key} {bundle.attributes.get(key)!r}, not {wanted!r}")
        asked = self.request_layout(hop, step, rows)
        multibyte = {tensor.byte_order for tensor in bundle.tensors if tensor.row.both_orders}
        if bundle.fragment_size != asked.fragment_size or multibyte - {asked.byte_order}:
            raise PipelineError(
                f"{where} came with fragments of {bundle.fragment_size} bytes, {'/'.join(sorted(multibyte))}-endian, "
                f"but {asked.fragment_size} and {asked.byte_order} were asked for"
            )
        if encode(bundle) != data:
            raise PipelineError(f"{where} is not what Python's codec writes for the same content")
        self.bundles += 1
        return bundle

    def forward(self, hop: int, step: int, rows: int, data: Bytes) -> tuple[Bytes, float, float]:
        started = time.perf_counter()
        bundle = self._check(hop, step, rows, data)
        between = time.perf_counter()
        asked = self.request_layout(hop, step, rows)
        turn, size = hop + 3 * step + 3, asked.fragment_size
        while size == asked.fragment_size:
            size = self._fitting(_SIZES[turn % len(_SIZES)], hop, rows)
            turn += 1
        layout = Layout(_ORDERS[1 - _ORDERS.index(asked.byte_order)], size)
        sent = encode(relaid(bundle, layout, self._fault_at(hop, step)))
        return sent, (between - started) * 1e6, (time.perf_counter() - between) * 1e6

    def receive(self, step: int, rows: int, data: Bytes) -> Logits:
        bundle = self._check(len(self._shards) - 1, step, rows, data)
        return np.asarray(bundle["logits"], np.float32)

    def _fault_at(self, hop: int, step: int) -> Fault | None:
        fault = self.fault
        return fault if fault is not None and (fault.hop, fault.step) == (hop, step) else None


def session_contract(contract: Contract) -> Contract:
    """What crosses the same boundary under sessions: the session table follows seq_ids (specification, 5.1)."""
    rules: list[TensorRule] = []
    for rule in contract.tensors:
        rules.append(rule)
        if rule.name == "seq_ids":
            rules += [
                TensorRule("session_ids", "u8", ("sequences", 16)),
                TensorRule("session_epochs", "u64", ("sequences",)),
                TensorRule("session_positions", "i64", ("sequences",)),
            ]
    return Contract(rules)


def relaid(bundle: Bundle, layout: Layout, fault: Fault | None = None) -> Bundle:
    """The same content in another layout; with ``fault``, all but one bit of it."""
    tensors = []
    for tensor in bundle.tensors:
        array = tensor.array
        if fault is not None and tensor.name == "residual":
            array = np.array(array, np.float32)
            array.view(np.uint32)[fault.row, fault.column] ^= np.uint32(1 << fault.bit)
        order = layout.byte_order if tensor.row.both_orders else tensor.byte_order
        tensors.append(Tensor(tensor.name, array, dtype=tensor.dtype, token_axis=tensor.token_axis, byte_order=order))
    return Bundle(
        tensors,
        bundle.attributes,
        number=bundle.number,
        minor=bundle.minor,
        fragment_size=layout.fragment_size,
        checksums=layout.checksums,
    )
