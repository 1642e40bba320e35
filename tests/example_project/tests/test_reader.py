import contextlib
import struct

import pytest
from hypothesis import given
from tiny_reader import table

from boundary_bundle import Bundle, encode
from boundary_bundle.testing import bundles, damaged, tensors


@given(bundles())
def test_the_table_is_that_of_the_bundle(bundle: Bundle) -> None:
    wanted = [(tensor.name, tensor.shape, len(tensor.payload())) for tensor in bundle]
    assert table(encode(bundle)) == wanted


@given(tensors(name="residual"))
def test_one_tensor(tensor) -> None:
    assert table(encode(Bundle([tensor])))[0][0] == "residual"


@given(damaged())
def test_damage_is_refused_or_read_but_never_worse(data: bytes) -> None:
    with contextlib.suppress(ValueError, KeyError, IndexError, struct.error):
        table(data)


@given(damaged("bad_magic"))
def test_no_magic_no_bundle(data: bytes) -> None:
    # The fault may be in any frame, and this reader looks at the first.
    if data[:8] != b"\x89BDB\r\n\x1a\n":
        with pytest.raises(ValueError, match="not a bundle"):
            table(data)


def test_every_vector_that_is_valid(bundle_vectors) -> None:
    for vector in bundle_vectors:
        if vector.result == "valid" and len(vector.bundles) == 1 and vector.reencoded == vector.data:
            assert [name for name, _, _ in table(vector.data)] == [tensor.name for tensor in vector.bundles[0].tensors]


@pytest.mark.bundle_cases(only=["2.1", "A*", "B1*"])
def test_one_vector_at_a_time(bundle_vector) -> None:
    if bundle_vector.error is not None and bundle_vector.error.name == "bad_magic" and bundle_vector.error.offset == 0:
        with pytest.raises(ValueError, match="not a bundle"):
            table(bundle_vector.data)
