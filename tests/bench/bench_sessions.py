"""What sessions cost: the table's own calls in the library, and how long a pipeline takes after a worker was killed.

``make bench-sessions``, or ``python tests/bench/bench_sessions.py [--json FILE] [--model FILE --cuts 10,20]``.

The first table is native_shim/tests/bench_sessions.cpp against the patched libllama: 1,000 ids that the table knows,
64 of them live with 64 positions each in a shared cache of 4,096 cells, and one session that fills such a cache. What
is removed is only noted by these calls; the cells go when the memory is next used, as a part of that decode. The second
table kills a worker of a pipeline at a history of some length and measures the next token: what is above the replay's
own cost, which is measured by evicting the session, is the recovery. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from boundary_bundle.native import NativeBuild, build, ensure_model
from boundary_bundle.shards import LocalWorker, SessionPipeline, Settings, local_workers, make_plan, tiny_models

SHIM = Path(__file__).resolve().parents[2] / "native_shim"
WARNINGS = ["-Wall", "-Wextra"]


def compile_bench(built: NativeBuild, folder: Path) -> Path:
    program, codec = folder / "bench_sessions", folder / "boundary_bundle.o"
    include = [f"-I{path}" for path in (SHIM, *built.include_dirs)]
    subprocess.run(["cc", "-std=c11", "-O2", *include, "-c", str(SHIM / "boundary_bundle.c"), "-o", codec], check=True)
    source = SHIM / "tests" / "bench_sessions.cpp"
    link = [f"-L{built.lib_dir}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{built.lib_dir}"]
    command = ["c++", "-std=c++17", "-O2", *WARNINGS, *include, str(source), str(codec), *link, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def table_costs(built: NativeBuild, folder: Path) -> dict[str, dict[str, float]]:
    """Microseconds by call."""
    model = tiny_models.write(folder / "tiny.gguf", "gqa")
    done = subprocess.run([compile_bench(built, folder), model], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def recovery(built: NativeBuild, model: Path, cuts: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of one token: when the session is hot, when it is replayed, and when a worker was killed before."""
    settings = Settings(threads=1, ctx=1024, batch=128, ubatch=128)
    start = local_workers(built.worker, model, settings)
    with LocalWorker(built.worker, model, (0, 1), settings) as worker:
        n_layer = worker.describe().n_layer
    times: dict[str, list[float]] = {"hot": [], "replayed": [], "killed": []}
    with SessionPipeline(start, make_plan(n_layer, cuts)) as driver:
        session = driver.open()
        session.extend([5 + place % 100 for place in range(tokens)])
        for number in range(rounds):
            for name in times:
                if name == "replayed":
                    driver.evict(session)
                elif name == "killed":
                    worker = driver.workers[number % len(driver.workers)]
                    assert isinstance(worker, LocalWorker)
                    worker.kill()
                began = time.perf_counter()
                session.extend([7])
                times[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "model": model.name,
        "shards": len(cuts) + 1,
        "tokens": tokens,
        "rounds": rounds,
        **{f"{name}_s": round(value, 4) for name, value in middle.items()},
        "above_replay_s": round(middle["killed"] - middle["replayed"], 4),
        "above_replay_worst_s": round(max(times["killed"]) - middle["replayed"], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; absent: SmolLM2-135M and a tiny one")
    parser.add_argument("--cuts", default="10,20", help="where --model is cut")
    parser.add_argument("--tokens", type=int, default=300, help="length of the history")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args()
    built = build("patched")
    with tempfile.TemporaryDirectory(prefix="bb-bench-") as name:
        folder = Path(name)
        costs = table_costs(built, folder)
        cuts = [int(cut) for cut in options.cuts.split(",")]
        if options.model is not None:
            runs = [(options.model, cuts)]
        else:
            runs = [(tiny_models.write(folder / "tiny-gqa.gguf", "gqa"), [3, 6]), (ensure_model(), [10, 20])]
        recoveries = [recovery(built, model, where, options.tokens, options.rounds) for model, where in runs]

    print(f"{'call':<14} {'calls':>7} {'median':>9} {'p99':>9} {'max':>9}  us")
    for call, found in costs.items():
        columns = (found["median_us"], found["p99_us"], found["max_us"])
        print(f"{call:<14} {found['calls']:>7} " + " ".join(f"{value:>9.2f}" for value in columns))
    names = f"{'hot':>8} {'replayed':>9} {'killed':>8} {'above it':>9} {'worst':>7}"
    print(f"\n{'model':<34} {'shards':>6} {'tokens':>6} {names}  s")
    for row in recoveries:
        print(
            f"{row['model']:<34} {row['shards']:>6} {row['tokens']:>6} {row['hot_s']:>8.4f} {row['replayed_s']:>9.4f} "
            f"{row['killed_s']:>8.4f} {row['above_replay_s']:>9.4f} {row['above_replay_worst_s']:>7.4f}"
        )
    if options.json is not None:
        told = {"machine": platform.machine(), "calls": costs, "recovery": recoveries}
        options.json.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
