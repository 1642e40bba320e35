"""Help for the tests that drive shards: batches of interleaved sequences, layouts, references, several at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from boundary_bundle import decode, encode
from boundary_bundle.shards import Batch, Layout, Pipeline, Relay
from boundary_bundle.shards.check import relaid
from boundary_bundle.shards.worker import Bytes

Logits = npt.NDArray[np.float32]


class Conversation:
    """Makes batches whose positions follow each other in every sequence."""

    def __init__(self, seed: int, n_vocab: int = 320) -> None:
        self._random = np.random.default_rng(seed)
        self._n_vocab = n_vocab
        self._next: dict[int, int] = {}

    def batch(self, sequences: Sequence[int], outputs: Sequence[bool] | None = None) -> Batch:
        """One token for each entry of ``sequences``; all are outputs unless said otherwise."""
        positions = []
        for sequence in sequences:
            positions.append(self._next.get(sequence, 0))
            self._next[sequence] = positions[-1] + 1
        # The first three ids of the vocabulary are special tokens.
        tokens = self._random.integers(3, self._n_vocab, len(sequences)).tolist()
        wanted = [True] * len(sequences) if outputs is None else list(outputs)
        return Batch(tokens, positions, [(sequence,) for sequence in sequences], wanted)


class LayoutRelay(Relay):
    """Asks for the given layouts in turn, and sends on what Python made of it, in the given layouts in turn.

    None in ``sends`` passes the bytes on unread. Every bundle that is read is proved by re-encoding it.
    """

    def __init__(self, asks: Sequence[Layout], sends: Sequence[Layout | None]) -> None:
        self._asks = asks
        self._sends = sends

    def request_layout(self, hop: int, step: int, rows: int) -> Layout:
        return self._asks[(hop + 1 + step) % len(self._asks)]

    def forward(self, hop: int, step: int, rows: int, data: Bytes) -> tuple[Bytes, float, float]:
        layout = self._sends[(hop + step) % len(self._sends)]
        if layout is None:
            return data, 0.0, 0.0
        bundle = decode(data)
        assert encode(bundle) == data
        return encode(relaid(bundle, layout)), 0.0, 0.0


def logits_of(pipeline: Pipeline, batches: Sequence[Batch]) -> list[Logits]:
    """The logits of every batch, from empty sequences on."""
    pipeline.clear()
    found = []
    for batch in batches:
        rows = pipeline.decode(batch, logits=True).logits
        assert rows is not None
        found.append(np.array(rows))
    return found


def assert_same_bits(ours: Sequence[Logits], theirs: Sequence[Logits]) -> None:
    """Every logit of every batch, as integers: no tolerance."""
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.shape == other.shape, number
        differing = int(np.count_nonzero(mine.view(np.uint32) != other.view(np.uint32)))
        assert differing == 0, f"batch {number}: {differing} of {mine.size} logits differ"


def together(*works: Callable[[], None]) -> None:
    """Run them side by side; the first failure of one is that of all."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
