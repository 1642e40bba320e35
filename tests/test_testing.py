"""The strategies of boundary_bundle.testing: they reach what they promise, and shrink to little."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from boundary_bundle import DTYPES, ERRORS, Bundle, BundleError, Contract, Decoder, Tensor, bits_equal, decode, encode
from boundary_bundle.testing import AIMS, CONTRACT_AIMS, bundles, damaged, frames, mismatched, tensors

#: Error numbers that bytes alone can bring about; 600 and above need a contract.
DECODE_ERRORS = {name for name, (number, _) in ERRORS.items() if 100 <= number < 600}
QUIET = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


def errors_of(data: bytes) -> set[str]:
    """What the three classes of decoder find, insisting on checksums or not."""
    found = set()
    for way in ("one", "core", "stream"):
        for insisting in (False, True):
            try:
                if way == "one":
                    decode(data, require_checksums=insisting)
                else:
                    decoder = Decoder(way, require_checksums=insisting)
                    decoder.feed(data)
                    decoder.finish()
            except BundleError as error:
                found.add(error.name)
    return found


def run_through(strategy: st.SearchStrategy[Any], examples: int, look: Callable[[Any], None], number: int = 0) -> None:
    """Generate ``examples`` and shrink nothing; the same ones every time."""

    @seed(number)
    @settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    @given(strategy)
    def each(example: Any) -> None:
        look(example)

    each()


class Reached(Exception):
    """Nothing is left to be seen; ends a run early."""


def reach(strategy: st.SearchStrategy[Any], examples: int, wanted: set[Any], seen: Callable[[Any], set[Any]]) -> None:
    """Everything ``wanted`` is seen within ``examples`` examples."""
    left = set(wanted)

    def look(example: Any) -> None:
        left.difference_update(seen(example))
        if not left:
            raise Reached

    for number in range(examples // 250):
        try:
            run_through(strategy, 250, look, number)
        except Reached:
            return
    raise AssertionError(f"not reached: {left}")


def test_there_is_an_aim_for_every_decode_error() -> None:
    assert set(AIMS) == DECODE_ERRORS


@pytest.mark.parametrize("aim", AIMS)
def test_an_aim_is_never_missed(aim: str) -> None:
    """A fault put in wrongly, or hidden behind another error, would go unnoticed in a test of that error."""
    seen: list[bytes] = []

    def look(data: bytes) -> None:
        seen.append(data)
        assert aim in errors_of(data)

    run_through(damaged(aim), 12, look)
    assert len(set(seen)) > 3


def test_damage_reaches_every_decode_error() -> None:
    """Within 4000 examples, of seeds that are fixed; there are 57 errors."""
    reach(damaged(), 4000, DECODE_ERRORS, errors_of)


@pytest.mark.parametrize("aim", CONTRACT_AIMS)
def test_a_contract_is_missed_for_the_reason_that_was_asked_for(aim: str) -> None:
    def look(drawn: tuple[Bundle, Contract]) -> None:
        bundle, contract = drawn
        with pytest.raises(BundleError) as caught:
            decode(encode(bundle), contract=contract)
        assert caught.value.name == aim

    run_through(mismatched(aim), 20, look)


def test_there_is_an_aim_for_every_contract_error() -> None:
    assert set(CONTRACT_AIMS) == {name for name, (number, _) in ERRORS.items() if number >= 600}


def test_tensors_reach_every_dtype_order_and_rank() -> None:
    wanted: set[Any] = set(range(9))
    wanted |= {(row.name, order) for row in DTYPES.values() for order in ("little", "big")[: 1 + row.both_orders]}
    wanted |= {(name, value) for name in ("empty", "contiguous", "axis") for value in (False, True)}

    def seen(tensor: Tensor) -> set[Any]:
        return {
            len(tensor.shape),
            (tensor.dtype, tensor.byte_order),
            ("empty", tensor.array.size == 0),
            ("contiguous", tensor.array.flags.c_contiguous),
            ("axis", tensor.token_axis is not None),
        }

    reach(tensors(tokens=3), 2000, wanted, seen)


def test_bundles_reach_every_fragment_layout() -> None:
    """No fragment, one, many; the last one whole and in part; with and without checksums, attributes, tensors."""
    wanted: set[Any] = {(name, value) for name in ("checksums", "attributes") for value in (False, True)}
    wanted |= {("tensors", count) for count in range(3)}
    wanted |= {("fragments", "unlimited", False), ("fragments", 0, False)}
    wanted |= {("fragments", count, partial) for count in (1, 2) for partial in (False, True)}

    def seen(bundle: Bundle) -> set[Any]:
        found: set[Any] = {
            ("checksums", bundle.checksums),
            ("attributes", bool(bundle.attributes)),
            ("tensors", min(len(bundle), 2)),
        }
        for tensor in bundle:
            size, step = len(tensor.payload()), bundle.fragment_size
            count = min(2, -(-size // step)) if step else "unlimited"
            found.add(("fragments", count, bool(step and size % step)))
        return found

    reach(bundles(), 2000, wanted, seen)


@settings(max_examples=100, **QUIET)
@given(bundles())
def test_bundles_are_what_every_encoder_must_take(bundle: Bundle) -> None:
    assert bits_equal(decode(encode(bundle)), bundle)


def least(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool], seed: int = 0) -> Any:
    return find(strategy, condition, settings=settings(max_examples=2000, **QUIET), random=Random(seed))


def test_bundles_shrink_to_the_tensor_that_matters() -> None:
    bundle = least(bundles(), lambda bundle: any(tensor.dtype == "bf16" for tensor in bundle))
    (tensor,) = bundle
    assert (tensor.dtype, tensor.shape, tensor.byte_order, tensor.token_axis) == ("bf16", (), "little", None)
    assert len(tensor.name) == 1
    assert bytes(tensor.payload()) == b"\0\0"
    assert not bundle.attributes
    assert (bundle.number, bundle.minor, bundle.fragment_size) == (0, 0, 0)


def test_bundles_shrink_to_few_fragments() -> None:
    # Where a search begins depends on the modules that are imported (hypothesis takes constants from them), and from
    # one start in many it keeps a tensor that two steps at once would remove. Users see the other starts.
    for start in range(4):
        bundle = least(
            bundles(),
            lambda bundle: any(
                bundle.fragment_size and len(tensor.payload()) > bundle.fragment_size for tensor in bundle
            ),
            start,
        )
        if len(bundle) == 1:
            break
    (tensor,) = bundle
    assert len(frames(encode(bundle))) == 4
    assert not any(bytes(tensor.payload()))


@pytest.mark.parametrize(("aim", "blocks"), [("fragment_conflict", 14), ("token_count", 6), ("bool_value", 6)])
def test_damage_shrinks_to_a_small_bundle(aim: str, blocks: int) -> None:
    """``blocks`` of 64 bytes: header and body of the head, header and body of each fragment, the end."""
    data = least(damaged(aim), lambda data: aim in errors_of(data))
    assert len(data) <= 64 * blocks
