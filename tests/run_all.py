"""Everything that `make test` runs once the builds stand, and a table of what it took.

    python tests/run_all.py [ARGUMENTS FOR PYTEST]

Real shards run by themselves, one test at a time, since their workers want the cores. All other tests share them.
With arguments only pytest runs, once, with those.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q"]


@dataclass
class Step:
    name: str
    command: list[str]
    status: int = -1
    seconds: float = 0.0


def run(step: Step) -> None:
    print(f"\n== {step.name}", flush=True)
    begin = time.monotonic()
    step.status = subprocess.run(step.command, cwd=ROOT, check=False).returncode
    step.seconds = time.monotonic() - begin


def main() -> int:
    if sys.argv[1:]:
        return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=ROOT, check=False).returncode

    make = os.environ.get("MAKE", "make")
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-test-") as folder:
        vectors = Path(folder, "vectors")
        with vectors.open("wb") as file:
            transcript = [sys.executable, "-m", "boundary_bundle.conformance.transcript"]
            subprocess.run(transcript, cwd=ROOT, stdout=file, check=True)

        native = Step(
            "C codec, this machine and others",
            [make, "--no-print-directory", "-C", "native_shim", "test", "test-machines", f"VECTORS={vectors}"],
        )
        shards = Step("real shards", [*PYTEST, "-m", "shards"])
        run(shards)
        run(native)

    cores = str(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    others = Step("everything else", [*PYTEST, "-m", "not shards", "-n", cores, "--dist", "loadfile"])
    run(others)
    pythons = Step("the codec on other Pythons", [sys.executable, "tests/run_pythons.py"])
    run(pythons)

    steps = [shards, native, others, pythons]
    width = max(len(step.name) for step in steps)
    print("\n== summary")
    for step in steps:
        verdict = "passed" if step.status == 0 else f"FAILED (status {step.status})"
        print(f"{step.name:<{width}}  {step.seconds:7.1f} s  {verdict}")
    return 0 if all(step.status == 0 for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
