"""Checks of the decoder that are there and too narrow: for each that is listed, a vector notices.

Catches vectors that a decoder passes which looks at the first record only, at half of
a number, or at a grid of 64 in place of the fragment size.
"""

from __future__ import annotations

import pytest

from boundary_bundle import contract, decoder
from boundary_bundle.conformance import weakened_checks
from boundary_bundle.conformance.vectors import load

ROWS = weakened_checks.table()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}-{row.wrong}")
def test_a_vector_notices(row: weakened_checks.Row) -> None:
    assert row.caught, f"nothing of {row.section} fails with {row.wrong!r}"


def test_a_place_that_moved_is_told() -> None:
    """A weakening that changes nothing any more, since the source was rewritten."""
    gone = weakened_checks.Weakening("3", "no such line of the decoder", "")
    with pytest.raises(ValueError, match="0 times"):
        weakened_checks.weakened(decoder, gone)


def test_the_right_contract_text_is_not_noticed() -> None:
    """A comparison of texts that fails for a contract as it should be."""
    assert [vector.id for vector in load() if vector.contract and weakened_checks.notices(vector, contract)] == []


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that hides a hole, or prints none of the table."""
    assert weakened_checks.main([]) == 0
    assert f"{len(ROWS)} weakenings, 0 not noticed" in capsys.readouterr().out
