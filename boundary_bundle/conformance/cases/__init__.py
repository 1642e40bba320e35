"""The vectors, one module a file of ``spec/vectors``; the verdicts are read from the specification."""

from __future__ import annotations
