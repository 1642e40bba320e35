"""Plants 24 faults in the C codec, a bound check removed each, and tells what finds them.

    planted.py                          every fault: the vectors, then for at most a minute the fuzz target concerned
    planted.py --report                 the same, with a dated report in fuzz/reports

All of them are compiled into one program, whose variable ``bb_mutant`` chooses. A fault is named by its function and
its check, and planted by the text of that check: one whose text is gone, or stands there twice, ends the run. Exit
status: 0 all are found, 1 some are not, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent
sys.path[:0] = [str(ROOT), str(FUZZ)]

import mutants_c  # noqa: E402
import run  # noqa: E402
from mutants import SANITIZE, as_markdown, as_text  # noqa: E402
from mutants_model import Fate, Mutant  # noqa: E402


@dataclass(frozen=True)
class Plant:
    function: str
    check: str
    #: The bound, as the function has it.
    bound: str
    #: The fuzz target that is to find the fault when no vector does.
    target: str
    #: What stands in its place; HERE is true where the fault is not planted.
    without: str = "HERE && BOUND"


#: Where the bound keeps a loop, or a value, from going on.
_TRUE = "!HERE || BOUND"
PLANTS = (
    Plant("check_fragment_header", "B30", "f->a >= b->tensor_count", "stream"),
    Plant("check_fragment_header", "B31", "f->b >= bytes", "core"),
    Plant("check_fragment_header", "B32", "f->length != length", "core"),
    Plant("check_header", "B11", "f->length < HEAD_FIXED", "core"),
    Plant("check_header", "B15", "rd->open >= rd->slot_count", "stream"),
    Plant("check_head_fixed", "D6", "attribute_bytes > length - HEAD_FIXED", "core"),
    Plant("check_tensor", "D10", "end - at < RECORD_FIXED", "core"),
    Plant("check_tensor", "D11", "rank > l->rank", "core"),
    Plant("check_tensor", "D14", "*size > end - at", "core"),
    Plant("check_tensor", "D17", "axis >= rank", "core"),
    Plant("check_head", "D50", "end - at < RECORD_FIXED", "core"),
    Plant("check_head", "D51", "size > end - at", "core"),
    Plant("next_frame", "the frame is there", "here < whole", "core"),
    Plant("first_nonzero", "the end of the padding", "i < n", "core", _TRUE),
    Plant("bb_tensor_at", "the last tensor", "index >= b->tensor_count", "core"),
    Plant("bb_attr_at", "the last attribute", "index >= b->attribute_count", "core"),
    Plant("bb_tensor_read", "room for the payload", "bytes > dst_size", "core"),
    Plant("reserve", "the block is as large as asked", "need <= slot->capacity", "stream", _TRUE),
    Plant("take", "the end of the piece", "smaller(room, size - *taken)", "stream", "HERE ? BOUND : room"),
    Plant("bb_prepare_decode", "room for the head", "total > memory_size", "core"),
    Plant("encode", "room for the bundle", "own > cap", "encode"),
    Plant("encode", "room for the parts", "count > part_cap", "encode"),
    Plant("name_length_of", "the end of the name", "n < sizeof t->name", "encode", _TRUE),
    Plant("put_record", "the rank", "t->rank <= BB_MAX_RANK", "encode", _TRUE),
)


def planted(source: str, plants: Sequence[Plant] = PLANTS) -> str:
    """The codec with every fault, each of which its number chooses. Raises ValueError if a place is not found."""
    tokens = mutants_c.tokens_of(source)
    bodies = {
        name: (tokens[begin].start, tokens[end].end)
        for name, begin, end in mutants_c.functions(tokens, mutants_c.partners_of(tokens))
    }
    edits = []
    for number, plant in enumerate(plants, 1):
        begin, end = bodies.get(plant.function, (0, 0))
        found = source.count(plant.bound, begin, end)
        if found != 1:
            raise ValueError(f"{plant.function}, {plant.check}: it holds {found} times, not once: {plant.bound}")
        at = source.index(plant.bound, begin)
        text = plant.without.replace("HERE", f"(bb_mutant != {number})").replace("BOUND", plant.bound)
        edits.append((at, at + len(plant.bound), f"({text})"))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return mutants_c.SWITCH + source


@dataclass
class Found:
    function: str
    check: str
    by: str = "nothing"
    #: The vector, or the kind of the finding.
    what: str = ""
    #: Vectors or executions.
    after: int = 0
    seconds: float = 0.0


def with_vectors(text: str, folder: Path, clang: str) -> dict[int, Fate]:
    """What the vectors say of each. The sanitizers are those of the fuzz targets."""
    mutants = [
        Mutant(number, "c", mutants_c.FILE, plant.function, 0, "planted", plant.bound, plant.without)
        for number, plant in enumerate(PLANTS, 1)
    ]
    programs = mutants_c.build(text, folder, clang, SANITIZE)
    return mutants_c.run(programs, mutants, lambda: None, tests=False)


def with_fuzzing(tools: run.Tools, target: str, number: int, seconds: int) -> tuple[bool, str, int, float]:
    """Whether a target finds it, of what kind, after how many executions and seconds."""
    name = f"c-{target}"
    findings = tools.findings(f"planted-{number}")
    shutil.rmtree(findings, ignore_errors=True)
    findings.mkdir(parents=True)
    arguments = [
        *run.command(tools, name),
        *(f"-max_total_time={seconds}", f"-max_len={run.MAX_INPUT}", "-timeout=1", "-rss_limit_mb=1024"),
        *("-malloc_limit_mb=256", "-print_final_stats=1", "-seed=1", f"-dict={tools.seeds / 'dictionary'}"),
        *(f"-artifact_prefix={findings}/", str(tools.seeds / run.seed_folder(name))),
    ]
    environment = {**run.environment(tools, name, fast=True), "BB_MUTANT": str(number)}
    begin = time.monotonic()
    done = subprocess.run(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tools.build, check=False
    )
    took = time.monotonic() - begin
    said = done.stdout.decode("utf-8", "replace")
    counted = re.findall(r"stat::number_of_executed_units:\s*(\d+)", said)
    return done.returncode != 0, run.kind_of(said), int(counted[-1]) if counted else 0, took


def find(build: Path, seconds: int, fuzz_all: bool) -> list[Found]:
    clang = run.need_clang(build)
    text = planted((ROOT / mutants_c.FILE).read_text("ascii"))
    run.say("building, and the vectors ...")
    fates = with_vectors(text, build, clang)
    tools = run.Tools(build, clang)
    ready = False
    found = []
    for number, plant in enumerate(PLANTS, 1):
        row = Found(plant.function, plant.check)
        fate = fates[number]
        if fate.by == "vectors":
            row.by, row.what, row.after = "vectors", fate.what, fate.after
        if row.by == "nothing" or fuzz_all:
            if not ready:
                codec = build / "planted-codec.c"
                if not codec.exists() or codec.read_text("ascii") != text:
                    codec.write_text(text, encoding="ascii")
                run.build_c(tools, sorted({one.target for one in PLANTS}), codec=codec)
                run.make_seeds(tools)
                ready = True
            run.say(f"{plant.function}, {plant.check}: c-{plant.target} for at most {seconds} s")
            hit, kind, after, took = with_fuzzing(tools, plant.target, number, seconds)
            if hit:
                row.by, row.after, row.seconds = f"c-{plant.target}", after, took
                row.what = re.sub(r"/\S*/", "", kind)
        found.append(row)
    return found


def table(found: Sequence[Found]) -> list[tuple[str, ...]]:
    rows = [("function", "check", "found by", "after", "what")]
    for row in found:
        counted = (
            f"{row.after:,} executions, {row.seconds:.1f} s" if row.by.startswith("c-") else f"{row.after} vectors"
        )
        rows.append((row.function, row.check, row.by, counted if row.by != "nothing" else "-", row.what[:70]))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="fuzz/planted.py", description="Plant faults and tell what finds them.")
    parser.add_argument("--seconds", type=int, default=60, help="of the fuzz target, for a fault (60)")
    parser.add_argument("--fuzz-all", action="store_true", help="fuzz for those that the vectors find too")
    parser.add_argument("--report", action="store_true", help="write a dated report to fuzz/reports")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there too")
    parser.add_argument("--build", type=Path, default=FUZZ / "build" / "planted", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        found = find(options.build.resolve(), options.seconds, options.fuzz_all)
    except (run.Refusal, ValueError) as error:
        run.say(f"error: {error}")
        return 2
    missed = [row for row in found if row.by == "nothing"]
    rows = table(found)
    print(as_text(rows))
    print(f"{len(found)} faults, {len(missed)} not found")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n", encoding="utf-8")
    if options.report:
        now = datetime.datetime.now(datetime.timezone.utc)
        text = [f"# Planted faults, {now:%Y-%m-%d %H:%M} UTC", ""]
        text += [
            "`fuzz/planted.py` makes such a report: a bound check of the C codec removed each. The vectors come first;"
        ]
        text += [f"what they do not notice, the fuzz target concerned has at most {options.seconds} s for.", ""]
        text += [as_markdown(rows), "", f"{len(found)} faults, {len(missed)} not found."]
        file = FUZZ / "reports" / f"{now:%Y-%m-%d-%H%M}-planted.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(text) + "\n", encoding="utf-8")
        print(f"report: {file.relative_to(ROOT)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
