"""Bundles at the boundary of a real shard: what does not belong there is an error code, and changes nothing.

Catches: an assertion that ends the process, a refusal that leaves half a batch in the cache, a code that
blames the wrong thing, rows in another order than the batch's, a layout that changes a bit, and a shard that
sees something else in a head which it has seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from drive import Conversation

from boundary_bundle import Bundle, BundleError, Tensor, decode, encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import Batch, Description, Layout, LocalWorker, Settings, WorkerError, WorkerPool
from boundary_bundle.shards.check import relaid
from boundary_bundle.shards.protocol import Type

pytestmark = pytest.mark.shards

SETTINGS = Settings(threads=1, ctx=768, batch=64, ubatch=8, seqs=3)
BUNDLE, CONTRACT, POSITION, LIMIT = 5, 6, 7, 8


def send(worker: LocalWorker, bundle: Bundle | bytes, **wish: object) -> bytes:
    """The bundle that comes back, or WorkerError."""
    data = encode(bundle) if isinstance(bundle, Bundle) else bundle
    return bytes(worker.request(Type.DECODE, wish, data).result(timeout=60).bundle)


class Boundary:
    """Shards [0,2), [2,4), [4,6) of the untied model, and the three bundles of one batch of three sequences.

    ``after`` is what the middle shard gives for the second batch when nothing came in between.
    """

    def __init__(self, workers: list[LocalWorker]) -> None:
        self.first, self.middle, self.last = workers
        self.model: Description = self.first.describe()
        self.talk = Conversation(7)
        self.batches = [self.talk.batch([0, 1, 0, 2, 1, 0, 0, 2, 1, 1, 0, 2]), self.talk.batch([2, 0, 1])]
        self.tokens = [batch.bundle(self.model) for batch in self.batches]
        self.residuals = [decode(send(self.first, tokens)) for tokens in self.tokens]
        self.outputs = [send(self.middle, residual) for residual in self.residuals]
        self.logits = [send(self.last, output, logits=True) for output in self.outputs]
        for worker in workers:
            worker.clear()

    def restart(self, known: bool = False) -> None:
        """Every shard after the first batch; with ``known`` the last head that each has seen is the second one's."""
        taken = ((self.first, self.tokens), (self.middle, self.residuals), (self.last, self.outputs))
        for worker, bundles in taken:
            worker.clear()
            send(worker, bundles[0])
            if known:
                send(worker, bundles[1])
                self.back(worker)

    def back(self, worker: LocalWorker) -> None:
        """From after the second batch to after the first one; the last head that it has seen stays."""
        for sequence, position in self.batches[1].first_positions().items():
            worker.clear(sequence, position)

    def check(self, worker: LocalWorker) -> None:
        """The second batch gives the same bits as when no refusal came before it."""
        if worker is self.first:
            assert send(worker, self.tokens[1]) == encode(self.residuals[1])
        elif worker is self.middle:
            assert send(worker, self.residuals[1]) == self.outputs[1]
        else:
            assert send(worker, self.outputs[1], logits=True) == self.logits[1]


@pytest.fixture(scope="module")
def shards(patched_build: NativeBuild, tiny: dict[str, Path]) -> Iterator[Boundary]:
    with WorkerPool() as pool:
        yield Boundary(pool.workers(patched_build.worker, tiny["untied"], [(0, 2), (2, 4), (4, 6)], SETTINGS))


@pytest.fixture(params=[False, True], ids=["new", "known"])
def at(shards: Boundary, request: pytest.FixtureRequest) -> Boundary:
    shards.restart(known=request.param)
    return shards


def refused(worker: LocalWorker, bundle: Bundle | bytes, code: int) -> WorkerError:
    """The refusal of a bundle, which is one sentence with the expected code."""
    with pytest.raises(WorkerError) as caught:
        send(worker, bundle)
    assert caught.value.code == code, caught.value
    assert "\n" not in caught.value.message
    return caught.value


def changed(bundle: Bundle, **replaced: Tensor) -> Bundle:
    """A copy with some tensors replaced in their places."""
    tensors = [replaced.get(tensor.name, tensor) for tensor in bundle.tensors]
    return Bundle(tensors, dict(bundle.attributes), number=bundle.number)


def with_attribute(bundle: Bundle, **values: object) -> Bundle:
    """A copy with some attributes replaced, or taken out when None."""
    attributes = {key: value for key, value in {**bundle.attributes, **values}.items() if value is not None}
    return Bundle(bundle.tensors, attributes, number=bundle.number)  # type: ignore[arg-type]


def retyped(bundle: Bundle, name: str, array: object, axis: int | None) -> Bundle:
    return changed(bundle, **{name: Tensor(name, np.asarray(array), token_axis=axis)})


Change = Callable[[Bundle], Bundle]

# The boundary is [2,4) of 64-wide heads, two of them: rows of 128. The bundle holds three tokens.
FOREIGN: dict[str, tuple[Change, str]] = {
    "no residual": (lambda b: Bundle(b.tensors[1:], dict(b.attributes)), "residual"),
    "no outputs": (lambda b: Bundle(b.tensors[:-1], dict(b.attributes)), "outputs"),
    "one more": (
        lambda b: Bundle([*b.tensors, Tensor("extra", np.zeros(3, np.float32))], dict(b.attributes)),
        "extra",
    ),
    "another order": (lambda b: Bundle([b.tensors[1], b.tensors[0], *b.tensors[2:]], dict(b.attributes)), "positions"),
    "another name": (
        lambda b: changed(b, residual=Tensor("residuals", b["residual"], token_axis=0)),
        "residual",
    ),
    "f16 rows": (lambda b: retyped(b, "residual", b["residual"].astype(np.float16), 0), "f16"),
    "f64 rows": (lambda b: retyped(b, "residual", b["residual"].astype(np.float64), 0), "f64"),
    "i64 positions": (lambda b: retyped(b, "positions", b["positions"].astype(np.int64), 0), "i64"),
    "u8 outputs": (lambda b: retyped(b, "outputs", b["outputs"].astype(np.uint8), 0), "u8"),
    "narrow rows": (lambda b: retyped(b, "residual", b["residual"][:, :127], 0), "127"),
    "wide rows": (lambda b: retyped(b, "residual", np.zeros((3, 129), np.float32), 0), "129"),
    "flat rows": (lambda b: retyped(b, "residual", np.zeros(3, np.float32), 0), "residual"),
    "no token axis": (lambda b: retyped(b, "residual", b["residual"], None), "residual"),
    "too few offsets": (lambda b: retyped(b, "seq_offsets", b["seq_offsets"][:-1], None), "seq_offsets"),
    "offsets that fall": (lambda b: retyped(b, "seq_offsets", np.array([0, 2, 1, 3], np.uint32), None), "seq_offsets"),
    "offsets past the end": (
        lambda b: retyped(b, "seq_offsets", np.array([0, 1, 2, 4], np.uint32), None),
        "seq_offsets",
    ),
    "another model": (lambda b: with_attribute(b, model_fingerprint=bytes(32)), "fingerprint"),
    "another architecture": (lambda b: with_attribute(b, architecture="gemma3"), "architecture"),
    "another depth": (lambda b: with_attribute(b, n_layer=7), "7"),
    "from a lower boundary": (lambda b: with_attribute(b, layer_end=1), "layer"),
    "from a higher boundary": (lambda b: with_attribute(b, layer_end=3), "layer"),
    "from nowhere": (lambda b: with_attribute(b, layer_end=None), "layer_end"),
    "no model said": (lambda b: with_attribute(b, model_fingerprint=None), "fingerprint"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_does_not_belong_here(at: Boundary, name: str) -> None:
    change, word = FOREIGN[name]
    error = refused(at.middle, change(at.residuals[1]), CONTRACT)
    assert word in error.message
    at.check(at.middle)


PLACES: dict[str, tuple[Change, int]] = {
    "a gap": (lambda b: retyped(b, "positions", b["positions"] + 1, 0), POSITION),
    "again": (lambda b: retyped(b, "positions", b["positions"] - 1, 0), POSITION),
    "negative": (lambda b: retyped(b, "positions", np.full(3, -1, np.int32), 0), POSITION),
    "far away": (lambda b: retyped(b, "positions", np.full(3, 2**31 - 1, np.int32), 0), POSITION),
    "of another sequence": (lambda b: retyped(b, "seq_ids", b["seq_ids"][::-1].copy(), None), POSITION),
    "of no such sequence": (lambda b: retyped(b, "seq_ids", np.full(3, 3, np.uint32), None), LIMIT),
    "of sequence 2^32 - 1": (lambda b: retyped(b, "seq_ids", np.full(3, 2**32 - 1, np.uint32), None), LIMIT),
}


def test_a_token_of_two_sequences_needs_a_unified_cache(at: Boundary) -> None:
    """Catches a code that blames a full cache, which is empty."""
    both = retyped(at.residuals[1], "seq_offsets", np.array([0, 1, 2, 4], np.uint32), None)
    error = refused(at.middle, retyped(both, "seq_ids", np.array([0, 1, 0, 1], np.uint32), None), LIMIT)
    assert "unified" in error.message
    at.check(at.middle)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_positions_that_do_not_follow(at: Boundary, where: str, name: str) -> None:
    change, code = PLACES[name]
    worker = getattr(at, where)
    bundle = {"first": at.tokens[1], "middle": at.residuals[1], "last": decode(at.outputs[1])}[where]
    if name == "of another sequence" and len(set(bundle["positions"].tolist())) == 1:
        pytest.fail("the case needs sequences of different lengths")
    refused(worker, change(bundle), code)
    at.check(worker)


def test_tokens_belong_to_the_first_shard_alone(at: Boundary) -> None:
    refused(at.middle, at.tokens[1], CONTRACT)
    refused(at.last, at.tokens[1], CONTRACT)
    refused(at.first, at.residuals[1], CONTRACT)
    refused(at.last, at.residuals[1], CONTRACT)
    refused(at.middle, decode(at.outputs[1]), CONTRACT)
    for worker in (at.first, at.middle, at.last):
        at.check(worker)


@pytest.mark.parametrize("token", [-1, 320, 2**31 - 1])
def test_tokens_outside_the_vocabulary(at: Boundary, token: int) -> None:
    ids = at.tokens[1]["token_ids"].copy()
    ids[1] = token
    refused(at.first, retyped(at.tokens[1], "token_ids", ids, 0), CONTRACT)
    at.check(at.first)


def test_more_tokens_than_a_batch(at: Boundary) -> None:
    batch = Batch([5] * 65, range(5, 70), [(0,)] * 65, [True] * 65)
    error = refused(at.first, batch.bundle(at.model), LIMIT)
    assert "65" in error.message
    assert "64" in error.message
    at.check(at.first)


def test_no_tokens(at: Boundary) -> None:
    with pytest.raises(WorkerError):
        send(at.first, Batch([], [], [], []).bundle(at.model))
    at.check(at.first)


def test_a_model_of_the_same_shape_is_another_model(
    patched_build: NativeBuild, tiny: dict[str, Path], pool: WorkerPool, at: Boundary
) -> None:
    """The contract fits by shapes; the fingerprint does not."""
    first = pool.workers(patched_build.worker, tiny["moe"], [(0, 2)], SETTINGS)[0]
    residual = decode(send(first, Conversation(7).batch([0, 1, 0]).bundle(first.describe())))
    assert residual["residual"].shape == (3, 128)
    error = refused(at.middle, residual, CONTRACT)
    assert "fingerprint" in error.message
    at.check(at.middle)


def test_a_bundle_cut_at_any_byte(at: Boundary) -> None:
    whole = encode(at.residuals[1])
    for size in range(len(whole)):
        error = refused(at.middle, whole[:size], BUNDLE)
        with pytest.raises(BundleError) as ours:
            decode(whole[:size])
        assert (error.details["bundle_error"], error.details["offset"]) == (ours.value.name, ours.value.offset), size
    refused(at.middle, whole + b"\0", BUNDLE)
    at.check(at.middle)


def test_any_byte_changed(at: Boundary) -> None:
    """Both codecs give the same name and the same offset for each of them."""
    whole = encode(at.residuals[1])
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        error = refused(at.middle, bytes(damaged), BUNDLE)
        with pytest.raises(BundleError) as ours:
            decode(bytes(damaged))
        assert (error.details["bundle_error"], error.details["offset"]) == (ours.value.name, ours.value.offset), place
    at.check(at.middle)


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("size", [0, 64, 192, 1088])
@pytest.mark.parametrize("checksums", [True, False])
def test_no_layout_changes_a_bit(at: Boundary, order: str, size: int, checksums: bool) -> None:
    layout = Layout(order, size, checksums)
    assert send(at.middle, relaid(at.residuals[1], layout)) == at.outputs[1]
    at.restart()
    wish = {"byte_order": order, "fragment_size": size, "checksums": checksums}
    assert send(at.middle, at.residuals[1], **wish) == encode(relaid(decode(at.outputs[1]), layout))
    assert send(at.last, relaid(decode(at.outputs[1]), layout), logits=True) == at.logits[1]


def test_rows_stand_in_batch_order(patched_build: NativeBuild, tiny: dict[str, Path], pool: WorkerPool) -> None:
    """Micro-batches of eight take uneven sequences apart; the rows that come out stand as the batch did.

    The same tokens in a batch of one sequence each give the same rows only if nothing was permuted: each row
    is compared with that of its own sequence alone, and it differs from every other row.
    """
    worker = pool.workers(patched_build.worker, tiny["untied"], [(0, 2)], SETTINGS)[0]
    model = worker.describe()
    talk = Conversation(9)
    mixed = talk.batch([0, 0, 1, 2, 0, 1, 0, 0, 2, 2, 0, 1, 1, 1, 0, 0, 0, 2, 0, 1])
    rows = decode(send(worker, mixed.bundle(model)))
    for name in ("positions", "seq_offsets", "seq_ids", "outputs"):
        assert np.array_equal(rows[name], mixed.bundle(model)[name]), name
    worker.clear()
    for sequence in range(3):
        places = [place for place, members in enumerate(mixed.sequences) if members == (sequence,)]
        alone = Batch(
            [mixed.tokens[place] for place in places],
            [mixed.positions[place] for place in places],
            [(sequence,)] * len(places),
            [True] * len(places),
        )
        expected = decode(send(worker, alone.bundle(model)))["residual"]
        # Other batch shapes round otherwise; a permutation is off by the rows' own size.
        error = np.abs(rows["residual"][places] - expected).max()
        assert error < 1e-3 * np.abs(expected).max()
    distances = np.abs(rows["residual"][:, None] - rows["residual"][None]).max(axis=2)
    assert distances[~np.eye(len(mixed), dtype=bool)].min() > 0.1


def test_attributes_on_the_way(at: Boundary) -> None:
    """A shard hands on what is not its own, an unknown ancillary attribute too, and says its own layers."""
    bundle = with_attribute(at.residuals[1], recipe_fingerprint=bytes(range(32)))
    bundle.attributes[0x4321] = b"kept"
    found = decode(send(at.middle, bundle))
    assert found.attributes[0x4321] == b"kept"
    assert found.attributes["recipe_fingerprint"] == bytes(range(32))
    assert (found.attributes["layer_start"], found.attributes["layer_end"]) == (2, 4)
    for name in ("architecture", "model_fingerprint", "n_layer", "n_tokens", "n_seqs"):
        assert found.attributes[name] == bundle.attributes[name], name


def test_a_head_comes_again(at: Boundary) -> None:
    """What goes on is the bundle's own, whether its head is that of the bundle before or nearly so."""
    kept = {0x4321: b"kept"}
    others = [{}, kept, kept, {0x4321: b"tape"}, {"recipe_fingerprint": bytes(range(32))}, kept, kept, {}, {}]
    plain = decode(at.outputs[1])
    for layout in (Layout(), Layout("big", 192)):
        for number, (extra, minor) in enumerate(zip(others, [0, 0, 7, 7, 1, 2, 2, 3, 0], strict=True)):
            came = Bundle(at.residuals[1].tensors, {**at.residuals[1].attributes, **extra}, number=number, minor=minor)
            wish = {"byte_order": layout.byte_order, "fragment_size": layout.fragment_size}
            expected = Bundle(plain.tensors, {**plain.attributes, **extra}, number=number)
            expected.minor = minor if 0x4321 in extra else 0
            assert send(at.middle, relaid(came, layout), **wish) == encode(relaid(expected, layout))
            at.back(at.middle)


def test_a_head_comes_again_with_other_payloads(at: Boundary) -> None:
    """A known head says nothing of the payloads behind it: each of their checks is made anew."""
    good, again = at.residuals[1], at.residuals[1]
    foreign = retyped(again, "seq_offsets", np.array([0, 2, 1, 3], np.uint32), None)
    positions = retyped(again, "positions", again["positions"] + 1, 0)
    damaged = bytearray(encode(good))
    damaged[damaged.index(good["residual"].tobytes()) + 5] ^= 1
    for _ in range(2):
        assert refused(at.middle, foreign, CONTRACT).message
        assert refused(at.middle, positions, POSITION).message
        assert refused(at.middle, bytes(damaged), BUNDLE).details["bundle_error"] == "body_crc"
        at.check(at.middle)
        at.back(at.middle)
