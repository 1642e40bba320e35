from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle.testing import bundles, damaged

drawn = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def test_every_case_of_the_kit(bundle_testee, bundle_case) -> None:
    bundle_testee.check(bundle_case)


@drawn
@given(damaged(), st.sampled_from(("one", "core", "stream")))
def test_same_answer_to_damage(bundle_testee, data: bytes, mode: str) -> None:
    assert bundle_testee.differences(data, mode) == []


@drawn
@given(damaged())
def test_pieces_make_no_difference(bundle_testee, data: bytes) -> None:
    assert bundle_testee.differences(data, pieces=[1, 63, 0, 7]) == []


@drawn
@given(bundles())
def test_written_bundles_are_canonical(bundle_testee, bundle) -> None:
    from boundary_bundle import encode

    assert bytes.fromhex(bundle_testee.encode(bundle)["data"]) == encode(bundle)
