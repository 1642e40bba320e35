"""Where the files lie that are no Python: the specification's data and the C codec.

A checkout has them in ``spec/`` and ``native_shim/`` beside this package. A wheel has
the same files inside the package (pyproject.toml, ``package-dir``), so that there is
one copy of each in the repository.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _place(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def spec_folder() -> Path:
    """The folder of registry.json, vectors/, testees/ and the specification's text."""
    return _place("spec")


def shim_folder() -> Path:
    """The folder of boundary_bundle.h, boundary_bundle.c and bundle.py, which writes the two with a prefix."""
    return _place("native_shim")
