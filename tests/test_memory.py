"""What decoding and encoding may cost in memory. Counted by tracemalloc, never timed.

numpy reports its arrays to tracemalloc, so payloads count too.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from crc32c import crc32c

from boundary_bundle import (
    Bundle,
    BundleError,
    BundleReady,
    Contract,
    Decoder,
    Fragment,
    Head,
    PreparedDecoder,
    PreparedEncoder,
    Tensor,
    TensorRule,
    decode,
    encode,
    encode_parts,
)
from boundary_bundle.decoder import _Growing

MB = 1 << 20
PIECE = 64 * 1024


class Peak:
    """Bytes by which memory has grown at most since the start, and at the end."""

    most = 0
    left = 0


def resize_counts_twice() -> bool:
    """numpy 2.5 reports the memory of an array that it enlarges before it takes back what it reported of the same
    memory so far: for a moment tracemalloc counts both, though realloc has moved pages, or nothing at all."""
    array = np.empty(MB, np.uint8)
    tracemalloc.start()
    try:
        array.resize(2 * MB, refcheck=False)
        array.resize(3 * MB, refcheck=False)
        return tracemalloc.get_traced_memory()[1] > 4 * MB
    finally:
        tracemalloc.stop()


@contextmanager
def measured() -> Iterator[Peak]:
    peak = Peak()
    enlarge = _Growing._enlarge
    twice = resize_counts_twice()
    before = 0

    def look() -> None:
        peak.most = max(peak.most, tracemalloc.get_traced_memory()[1] - before)

    def enlarge_unseen(self: _Growing, size: int) -> None:
        # What was most until then counts, and so does the larger array from then on.
        look()
        enlarge(self, size)
        tracemalloc.reset_peak()

    with pytest.MonkeyPatch.context() as patch:
        if twice:
            patch.setattr(_Growing, "_enlarge", enlarge_unseen)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            yield peak
            look()
            peak.left = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()


def header(kind: int, length: int, a: int = 0, b: int = 0, body_crc: int = 0) -> bytes:
    covered = struct.pack("<8sBBHHHQQQQIQ", b"\x89BDB\r\n\x1a\n", kind, 0, 0, 1, 0, 0, length, a, b, body_crc, 0)
    return covered + struct.pack("<I", crc32c(covered))


def stream(size: int, fragment_size: int) -> Iterator[bytes]:
    """A bundle of one u8 tensor of ``size`` bytes in pieces of 64 KB, without holding it."""
    # The head of a small bundle, with another extent and its checksums made true again.
    small = encode(Bundle([Tensor("x", np.zeros(64, np.uint8))], fragment_size=fragment_size))
    body = bytearray(small[64 : 64 + 48 + 8])
    length = struct.unpack_from("<Q", small, 24)[0]
    body = bytearray(small[64 : 64 + length])
    struct.pack_into("<Q", body, 40, size)
    yield header(0x81, length, body_crc=crc32c(bytes(body))) + bytes(body) + bytes(-length % 64)
    step = fragment_size or size
    block = bytes(range(256)) * (PIECE // 256)
    for at in range(0, size, step):
        length = min(step, size - at)
        crc = 0
        for start in range(0, length, PIECE):
            crc = crc32c(block[: min(PIECE, length - start)], crc)
        # Cut elsewhere than the frames are.
        yield header(0x82, length, 0, at, crc)[:10]
        yield header(0x82, length, 0, at, crc)[10:] + block[: min(PIECE, length)]
        for start in range(PIECE, length, PIECE):
            yield block[: min(PIECE, length - start)]
        if length % 64:
            yield bytes(-length % 64)
    yield header(0x83, 0, -(-size // step), size)


@pytest.mark.parametrize("kind", ["core", "stream"])
@pytest.mark.parametrize(
    ("size", "fragment_size"),
    [
        pytest.param(1024 * MB, 0, id="1 GB in one fragment"),
        pytest.param(1024 * MB, MB, id="1 GB in fragments of 1 MB"),
        pytest.param(256 * MB + 1000, 80 * MB, id="fragments of 80 MB"),
        pytest.param(64 * MB, 16 * 1024, id="fragments smaller than the pieces"),
    ],
)
def test_streaming_needs_little_beyond_the_payload(kind: str, size: int, fragment_size: int) -> None:
    """A buffer that runs ahead of its bytes, or a payload that is there twice while it is put together."""
    with measured() as peak:
        decoder = Decoder(kind)
        ready = None
        for piece in stream(size, fragment_size):
            for event in decoder.feed(piece):
                if isinstance(event, BundleReady):
                    ready = event.bundle
        decoder.finish()
    assert ready is not None
    array = ready["x"]
    assert array.shape == (size,)
    assert not array.flags.writeable
    for at in (0, 255, 256, size // 2, size - 1):
        assert array[at] == (at % (fragment_size or size)) % PIECE % 256
    # Several large fragments: the one that is just being copied is there twice.
    twice = fragment_size if fragment_size > 4 * MB else 0
    assert peak.most - size < 8 * MB + twice
    assert peak.left - size < 2 * MB


def test_memory_follows_what_came() -> None:
    """A buffer of the declared size."""
    pieces = stream(1024 * MB, 0)
    decoder = Decoder()
    with measured() as peak:
        for _ in range(100):
            decoder.feed(next(pieces))
    assert peak.most < 100 * PIECE + 2 * MB
    assert decoder.open_bundles == [0]


HOSTILE_FIELDS = [0, 1, 31, 63, 64, 255, 256, 2**16, 2**20, 2**31 - 1, 2**32 - 1, 2**34, 2**63 - 1, 2**63, 2**64 - 1]


def test_a_hostile_head_allocates_nothing() -> None:
    """An allocation by a size that 200 bytes merely declare."""
    good = encode(Bundle([Tensor("x", np.zeros((3, 8), np.float32), token_axis=0)], {"n_tokens": 3, 0x0100: b"abc"}))
    length = struct.unpack_from("<Q", good, 24)[0]
    assert 64 + length <= 200
    rest = header(0x82, 2**40, 0, 0)
    prepared = PreparedDecoder()
    prepared.decode(good)
    for at in range(0, length, 4):
        for width in (4, 8):
            if at + width > length:
                continue
            for value in HOSTILE_FIELDS:
                body = bytearray(good[64 : 64 + length])
                body[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
                head = header(0x81, length, body_crc=crc32c(bytes(body))) + bytes(body) + bytes(-length % 64)
                decoders = Decoder(), Decoder("stream")
                with measured() as peak:
                    for run in (decode, prepared.decode, *(decoder.feed for decoder in decoders)):
                        for data in (head, head + rest):
                            try:
                                run(data)
                            except BundleError as error:
                                del error
                assert peak.most < MB, (at, width, value)


def test_a_hostile_header_allocates_nothing() -> None:
    """The same for the lengths of frames, with more of them to come."""
    head = next(stream(2**31 - 1, 0))
    for kind in (0x81, 0x82, 0x83, 0x01):
        for length in HOSTILE_FIELDS:
            frame = header(kind, length)
            with measured() as peak:
                for data in (frame, head + frame):
                    for decoder in (Decoder(), Decoder("stream")):
                        try:
                            decoder.feed(data)
                            decoder.feed(bytes(1000))
                        except BundleError as error:
                            del error
            assert peak.most < MB


def test_views_cost_nothing() -> None:
    """A payload that is copied where a view would do."""
    array = np.zeros((1024, 4096), np.float32)
    bundle = Bundle([Tensor("residual", array, token_axis=0)])
    contract = Contract([TensorRule("residual", "f32", ("tokens", 4096), 0)])
    encoder, decoder = PreparedEncoder(contract), PreparedDecoder(contract)
    data = encode(bundle)
    for function in (
        lambda: encode_parts(bundle),
        lambda: encoder.encode_parts([array]),
        lambda: decode(data),
        lambda: decoder.decode(data),
        lambda: Decoder().feed(data),
    ):
        for _ in range(2):
            with measured() as peak:
                kept = function()
            assert peak.most < 64 * 1024
            del kept
    with measured() as peak:
        encode(bundle)
    assert peak.most < array.nbytes + 64 * 1024


def test_fragments_are_views_of_whole_pieces() -> None:
    """A large fragment in one piece that is copied into an event."""
    data = encode(Bundle([Tensor("x", np.zeros(4 * MB, np.uint8))], fragment_size=4 * MB))
    with measured() as peak:
        events = Decoder("stream").feed(data)
    assert [type(event) for event in events] == [Head, Fragment, BundleReady]
    assert peak.most < 64 * 1024


def test_small_fragments_cost_no_objects_of_their_own() -> None:
    """A header, a view and two places in a list for each fragment, all alive at once: then a bundle of many
    fragments lies in no cache, and each fragment costs more the more there are."""
    count = 20_000
    bundle = Bundle(
        [
            Tensor("x", np.arange(count * 64 - 5, dtype=np.uint8)),
            Tensor("y", np.arange(64 * 300, dtype=np.uint8)),
        ],
        fragment_size=64,
    )
    expected = b"".join(encode_parts(bundle))
    with measured() as peak:
        encoded = encode(bundle)
    assert encoded == expected
    # The runs and what they are joined to; what one run is made of comes to less than 0.2 MB.
    assert peak.most < 2 * len(encoded) + MB // 4
