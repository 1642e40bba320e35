"""The specification's text and registry, for the tests that hold code to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SPEC = Path(__file__).parent.parent / "spec"
TEXT = (SPEC / "boundary-bundle.md").read_text("utf-8")
REGISTRY: dict[str, Any] = json.loads((SPEC / "registry.json").read_text("utf-8"))


def section(title: str) -> str:
    """The text from the heading that starts with ``title`` to the next heading."""
    start = TEXT.index(f"\n{title}") + 1
    body = TEXT.index("\n", start)
    following = re.search(r"\n#+ ", TEXT[body:])
    return TEXT[body : body + following.start()] if following else TEXT[body:]
