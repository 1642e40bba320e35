"""How the benchmarks draw: colours of what is ours and what is not, and the same files for the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS = "#4fae8c"
PEER = "#a7adb8"
YARDSTICK = "#d5d0c4"
INK = "#22252b"


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files alone."""
    import matplotlib

    matplotlib.use("Agg")
    # The same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "boundary-bundle"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure as what the name ends in, .svg or .png. Raises OSError."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
