"""Runs Python targets once over every input of some folders, without atheris: for coverage, and to look at a finding.

replay.py LIBRARY TARGET[,TARGET...] FOLDER_OR_FILE...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import targets


def inputs(places: Iterable[Path]) -> Iterator[bytes]:
    """Each different input of the folders and files."""
    seen = set()
    for place in places:
        for path in sorted(place.iterdir()) if place.is_dir() else [place]:
            data = path.read_bytes()
            if len(data) >= targets.CONTROL and data not in seen:
                seen.add(data)
                yield data


def main(arguments: Sequence[str]) -> int:
    targets.library = targets.Library(Path(arguments[0]))
    chosen = [targets.TARGETS[name] for name in arguments[1].split(",")]
    count = reached = 0
    for data in inputs(map(Path, arguments[2:])):
        for target in chosen:
            begin = time.process_time()  # the machine may be elsewhere
            verdict = target(data)
            if time.process_time() - begin > 1:
                print(f"SLOW: {target.__name__} took over a second", file=sys.stderr)
                return 1
            count += 1
            reached += targets.reaches_records(verdict, data[targets.CONTROL :])
    print(f"{count} executions, {reached} reached the tensor records")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
