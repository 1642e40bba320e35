"""Whichever check of the decoder is deleted, a vector that names its section fails.

Catches a vector that would also be refused by another check, and so a decoder that
could lose a check without anyone noticing.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from boundary_bundle import contract, decoder
from boundary_bundle.conformance import deleted_checks
from boundary_bundle.conformance.vectors import load

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


@pytest.mark.parametrize("original", [decoder, contract], ids=["decoder", "contract"])
def test_without_a_deletion_none_notices(original: ModuleType) -> None:
    """Vectors that fail because a module was copied, not because a check is gone."""
    copied = deleted_checks.untouched(original)
    assert [vector.id for vector in load() if deleted_checks.notices(vector, copied)] == []


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that hides a hole, or prints none of the table."""
    assert deleted_checks.main([]) == 0
    out = capsys.readouterr().out
    assert f"{len(ROWS)} deletions, 0 not noticed" in out
