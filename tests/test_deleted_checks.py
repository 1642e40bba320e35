"""Whichever check of the decoder is deleted, a vector that names its section fails.

Catches a vector that would also be refused by another check, and so a decoder that
could lose a check without anyone noticing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from boundary_bundle import decoder
from boundary_bundle.conformance import deleted_checks

TEXT = (Path(__file__).parent.parent / "spec" / "boundary-bundle.md").read_text("utf-8")
ROWS = deleted_checks.table()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.step}:{row.line}")
def test_a_vector_notices(row: deleted_checks.Row) -> None:
    assert row.caught, f"nothing named {row.step} fails without {row.condition!r}"


def test_every_step_was_deleted() -> None:
    """A check that has no place in the decoder, or that the deletion passed by."""
    steps = set(re.findall(r"^\| ([A-D]\d+) \|", TEXT, re.MULTILINE))
    unnumbered = {"truncated", "trailing_bytes"} | set(re.findall(r"`(contract_\w+)`", TEXT)) - {"contract_fingerprint"}
    assert {row.step for row in ROWS} == steps | unnumbered


def test_the_decoder_itself_is_untouched() -> None:
    """A deletion that leaks into the module that the other tests use."""
    assert all(mutant.module is not decoder for mutant in deleted_checks.mutants(decoder))


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that hides a hole, or prints none of the table."""
    assert deleted_checks.main([]) == 0
    out = capsys.readouterr().out
    assert f"{len(ROWS)} deletions, 0 not noticed" in out
