"""Properties over drawn bundles and drawn damage."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import Bundle, BundleError, BundleReady, Decoder, Limits, bits_equal, decode, encode, encode_parts
from boundary_bundle.testing import bundles, damaged, frames

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
THOROUGH = settings(QUICK, max_examples=400)

Outcome = tuple[str, int, int | None]


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The same bytes in pieces: even ones, or at drawn places, empty ones included."""
    if draw(st.booleans()):
        size = draw(st.sampled_from((1, 3, 8, 63, 64, 65, 1000)))
        return [data[at : at + size] for at in range(0, len(data), size)]
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def by_decode(data: bytes, limits: Limits) -> Outcome | Bundle:
    try:
        return decode(data, limits=limits)
    except BundleError as error:
        return error.name, error.number, error.offset


def by_decoder(kind: str, parts: list[bytes], limits: Limits) -> tuple[list[Any], Outcome | None]:
    """Events, and the error if there was one."""
    decoder = Decoder(kind, limits=limits)
    events: list[Any] = []
    try:
        for part in parts:
            events += decoder.feed(part)
        decoder.finish()
    except BundleError as error:
        events += error.events
        return events, (error.name, error.number, error.offset)
    return events, None


def shape_of(events: list[Any]) -> list[tuple[Any, ...]]:
    """Events in a form that compares."""
    return [(type(event), encode(event.bundle) if isinstance(event, BundleReady) else repr(event)) for event in events]


@QUICK
@given(bundles(), st.data())
def test_round_trip(bundle: Bundle, data: st.DataObject) -> None:
    """A bit, name, order or attribute that changes on the way; a second canonical form;
    a result that depends on the pieces in which the bytes came."""
    encoded = encode(bundle)
    assert b"".join(encode_parts(bundle)) == encoded
    assert len(encoded) % 64 == 0
    decoded = decode(encoded)
    assert bits_equal(decoded, bundle)
    assert encode(decoded) == encoded
    for tensor in decoded:
        assert not tensor.array.flags.writeable
        assert tensor.array.dtype == tensor.row.numpy
    parts = data.draw(cuts(encoded))
    for kind in ("core", "stream"):
        events, error = by_decoder(kind, parts, Limits())
        assert error is None
        assert isinstance(events[-1], BundleReady)
        assert bits_equal(events[-1].bundle, bundle)
        assert encode(events[-1].bundle) == encoded


@QUICK
@given(st.lists(bundles(max_tensors=2), min_size=1, max_size=3), st.randoms(use_true_random=False), st.data())
def test_stream_takes_any_order(drawn: list[Bundle], random: Any, data: st.DataObject) -> None:
    """Fragments of several bundles, shuffled and repeated, put together wrongly."""
    streams = []
    for number, bundle in enumerate(drawn):
        bundle.number = number
        head, *fragments, end = [frame.bytes() for frame in frames(encode(bundle))]
        fragments += [fragment for fragment in fragments if random.random() < 0.3]
        random.shuffle(fragments)
        streams.append([head, *fragments, end])
    mixed = b""
    while any(streams):
        mixed += random.choice([stream for stream in streams if stream]).pop(0)
    events, error = by_decoder("stream", data.draw(cuts(mixed)), Limits())
    assert error is None
    found = [event.bundle for event in events if isinstance(event, BundleReady)]
    assert len(found) == len(drawn)
    for bundle in found:
        assert bits_equal(bundle, drawn[bundle.number])


LIMITS = st.one_of(
    st.just(Limits()),
    st.builds(
        Limits,
        head_bytes=st.sampled_from((200, 2**20)),
        tensors=st.integers(1, 4),
        name_bytes=st.integers(1, 63),
        rank=st.integers(2, 8),
        dimension=st.sampled_from((4, 100, 2**31 - 1, 2**63 - 1)),
        payload_bytes=st.sampled_from((100, 2**34, 2**63 - 1)),
        attribute_bytes=st.sampled_from((64, 65_536)),
        fragments=st.sampled_from((4, 2**20)),
        extension_bytes=st.sampled_from((4, 2**20)),
    ),
)


@THOROUGH
@given(damaged(), LIMITS, st.data())
def test_damage_is_named_alike(data: bytes, limits: Limits, draw: st.DataObject) -> None:
    """Damage that raises anything but a BundleError, passes one decoder and not another, or
    has another name, number or offset with the pieces in which it came."""
    whole = by_decode(data, limits)
    parts = draw.draw(cuts(data))
    events, error = by_decoder("core", parts, limits)
    again, error_again = by_decoder("core", [data], limits)
    assert error == error_again
    assert shape_of(events) == shape_of(again)
    first = next((event.bundle for event in events if isinstance(event, BundleReady)), None)
    if isinstance(whole, Bundle):
        assert error is None
        assert first is not None
        assert bits_equal(first, whole)
        assert bits_equal(decode(encode(whole, limits=limits), limits=limits), whole)
    elif first is None:
        # Nothing at all is truncated for one bundle, and fine for any number of them.
        assert whole == error or not data
    else:
        assert whole[0] == "trailing_bytes"
        assert whole[2] is not None
        assert isinstance(decode(data[: whole[2]], limits=limits), Bundle)
    stream, stream_error = by_decoder("stream", parts, limits)
    stream_again, stream_error_again = by_decoder("stream", [data], limits)
    assert stream_error == stream_error_again
    assert shape_of(stream) == shape_of(stream_again)
    if error is None:
        assert stream_error is None
        assert shape_of(stream) == shape_of(events)
    elif error[0] not in ("fragment_order", "limit_open_bundles"):
        # The classes differ in these two checks alone, as long as no bundle is repeated.
        assert stream_error == error


def test_damage_reaches_the_deep_checks() -> None:
    """A strategy whose damage stops at the checksums would prove nothing about the rest."""
    names: Counter[str] = Counter()

    @settings(THOROUGH, database=None, derandomize=True)
    @given(damaged())
    def collect(data: bytes) -> None:
        found = by_decode(data, Limits())
        names["accepted" if isinstance(found, Bundle) else found[0]] += 1

    collect()
    assert names["body_crc"] + names["header_crc"] < sum(names.values()) / 5, names
    assert len(names) >= 20, names
    assert sum(name.startswith(("tensor_", "attribute_", "limit_")) for name in names) >= 8, names


@QUICK
@given(st.binary(max_size=400))
def test_noise(data: bytes) -> None:
    """Bytes that are no bundle at all and raise something else."""
    assert not isinstance(by_decode(data, Limits()), Bundle)


@QUICK
@given(bundles())
def test_decoded_arrays_outlive_their_input(bundle: Bundle) -> None:
    """Arrays over memory that the decoder has given back."""
    encoded = bytearray(encode(bundle))
    events = Decoder().feed(encoded)
    encoded[:] = bytes(len(encoded))
    del encoded
    np.zeros(4096, np.uint8)
    assert bits_equal(events[-1].bundle, bundle)
