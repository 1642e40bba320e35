"""Writes ``spec/vectors/*.json``: ``python -m boundary_bundle.conformance.make_vectors [--check]``.

The same source gives the same bytes on every machine. Verdicts stand in ``cases``, as
their author reads them in the specification; no decoder is asked. ``--check`` writes
nothing and exits with 1 when a file is not what would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .book import Book
from .cases import attributes, batches, contracts, dtypes, frames, head, limits, streams, tensors, versions
from .vectors import FOLDER

MODULES: Final[tuple[ModuleType, ...]] = (
    *(frames, head, tensors, attributes, dtypes, limits, streams, versions, batches, contracts),
)


def make(registry: Path) -> dict[str, str]:
    """File name -> text, for every file. Error numbers come from ``registry``."""
    numbers = {row["name"]: row["number"] for row in json.loads(registry.read_text("utf-8"))["errors"]}
    files: dict[str, str] = {}
    seen: set[str] = set()
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        book = Book(module.TITLE, numbers)
        module.make(book)
        for vector in book.vectors:
            if vector["id"] in seen:
                raise ValueError(f"two vectors are called {vector['id']}")
            seen.add(vector["id"])
        content: dict[str, Any] = {"format": "1.0", "title": book.title, "vectors": book.vectors}
        files[f"{name}.json"] = json.dumps(content, indent=1, ensure_ascii=True) + "\n"
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boundary_bundle.conformance.make_vectors", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file differs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the vectors lie")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    files = make(FOLDER.parent / "registry.json")
    there = {path.name for path in folder.glob("*.json")} - {"schema.json"}
    differ = sorted(there - set(files))
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != text.encode("ascii"):
            differ.append(name)
            if not options.check:
                path.write_bytes(text.encode("ascii"))
    if options.check:
        for name in differ:
            print(f"{name} is not what make_vectors writes", file=sys.stderr)
        return 1 if differ else 0
    for name in sorted(there - set(files)):
        print(f"{name} is written by nothing: remove it", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
