"""A split model against an unsplit one and against upstream's RPC backend, side by side in one run.

``make bench-shards``, or ``python tests/bench/bench_shards.py [--quick] [--plots FOLDER] [--json FILE]``.

Four sections, each with one model, one number of threads and one set of processes:

shards   SmolLM2 in 1 to 4 shards with all threads, bundles in shared memory; decoding one sequence also in up to 8
         shards, and with bundles in sockets
flight   SmolLM2 in 2 shards of one thread each, with several micro-batches of a prefill under way at once, against one
         unsplit worker of one thread; and two of those at once, which is what these processors bear of two workers
streams  the same with several sequences under way, at the cuts of boundary-bundle plan --measure, since each step of
         decoding has the head to compute; also one sequence in 3 such shards
wide     a model of 1 GB with random weights, 4096 wide (wide_model.py), where hops carry 16 KB a token; also in 2
         shards in actors of Ray

Beside them stand upstream's loop in one process, and the same loop with its layers on servers of the RPC backend at
the same cuts (native_shim/tests/bench_rpc.cpp), both of the unpatched sources. Before anything is timed, every logit of
every split result is compared with the unsplit one's by its bits, and every token of the timed runs is compared with
those. Speeds are medians of rounds in which all take turns, ratios medians of those within a turn: a machine's pace
changes meanwhile. Nothing here asserts a time.

Exit status: 0 done, 1 a logit or a token differs, 2 it could not be done, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import wide_model
from picture import INK, OURS, PEER, YARDSTICK, pyplot, save
from shard_subjects import Loop, Outcome, Shards, Subject, SubjectError, Work, apart, loop, ray_shards, shards

from boundary_bundle.cli import common
from boundary_bundle.cli.plan import measured_sizes
from boundary_bundle.native import NativeBuild, NativeError, build, ensure_model
from boundary_bundle.shards import (
    Capacity,
    ModelFile,
    ModelSizes,
    PipelineError,
    Plan,
    PlanError,
    Settings,
    WorkerError,
    count_differing,
    make_plan,
    model_sizes,
    model_tensors,
    partition,
    read_model_file,
)
from boundary_bundle.shards.pipeline import HopTime

#: Rounds that a section makes even when its share of the time is over: of fewer there is no median to speak of.
LEAST_ROUNDS: Final = 3
#: Cells of a cache are counted in so many.
_CELLS: Final = 256
_HOP_PARTS: Final = ("encode_us", "transfer_us", "decode_us", "wait_us")
#: The load average of a machine that does nothing else, at most.
_IDLE: Final = 0.3
#: Measured once, so that all of a section have the same cuts.
_MEASURED: dict[tuple[Path, Settings], ModelSizes] = {}
#: What is drawn into the folder of plots.
PICTURES: Final = ("speed.svg", "hops.svg")


@dataclass(frozen=True)
class Form:
    """How much is measured: the whole of it, or a quick look that says whether it can be. ``steps`` are those of a turn
    with one sequence, of which a round has so many ``turns``; several at once make fewer, which take about as long."""

    rounds: int
    least_rounds: int
    steps: int
    prompt: int
    prefills: tuple[int, ...]
    sequences: tuple[int, ...]
    most_shards: int
    grown: int
    micro_batches: tuple[int, ...]
    wide_prefills: tuple[int, ...]
    wide_steps: int
    turns: int


FULL: Final = Form(5, LEAST_ROUNDS, 64, 32, (32, 128, 512), (1, 2, 4, 8), 4, 8, (16, 32, 64), (32, 128), 16, 4)
QUICK: Final = Form(1, 1, 4, 8, (32, 64), (1, 2), 3, 4, (16, 32), (32,), 2, 1)


@dataclass
class Entry:
    """One subject and one piece of work. Logits and tokens are compared with the unsplit worker's."""

    work: Work
    name: str
    subject: Subject
    tokens: list[list[int]]
    logits_compared: int = 0
    logits_differing: int = 0
    tokens_differing: int = 0
    seconds: list[float] = field(default_factory=list)
    compute: list[list[float]] = field(default_factory=list)
    hops: list[list[HopTime]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second, the median."""
        return self.work.counted / statistics.median(self.seconds)

    def take(self, done: Outcome) -> None:
        self.seconds.append(done.seconds)
        self.compute += [[shard.compute_us for shard in step.shards] for step in done.steps]
        self.hops += [step.hops for step in done.steps]
        self.tokens_differing += tokens_differing(done.tokens, self.tokens)

    def compute_us(self) -> list[float]:
        """Of each shard, the median of its computing for one batch; empty for what does not tell."""
        return [statistics.median(times) for times in zip(*self.compute, strict=True)]

    def hop_times(self) -> list[dict[str, float]]:
        """Of each hop, medians; hop_us is that of encode, transfer and decode together."""
        found = []
        for times in zip(*self.hops, strict=True):
            parts = {part: statistics.median(getattr(hop, part) for hop in times) for part in _HOP_PARTS}
            whole = statistics.median(hop.encode_us + hop.transfer_us + hop.decode_us for hop in times)
            found.append({"bytes": statistics.median(hop.bytes for hop in times), **parts, "hop_us": whole})
        return found


def tokens_differing(found: list[list[int]], expected: list[list[int]]) -> int:
    pairs = zip(found, expected, strict=True)
    return sum(one != other for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True))


@dataclass
class Section:
    """Who is measured at what: ``subjects`` has for each name kind, shards, and whether bundles go through shared
    memory, and ``only`` the works of those that do not do all of them."""

    name: str
    title: str
    model: ModelFile
    settings: Settings
    works: list[Work]
    subjects: dict[str, tuple[str, int, bool]]
    only: dict[str, set[str]]
    plan: Callable[[ModelFile, int, Settings], Plan]  # whose cuts are where
    entries: list[Entry] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def entry(self, name: str, work: str) -> Entry | None:
        return next((entry for entry in self.entries if (entry.name, entry.work.name) == (name, work)), None)

    def speed(self, name: str, work: str) -> float | None:
        found = self.entry(name, work)
        return None if found is None else found.speed

    def ratio(self, name: str, work: str, other: str, at: str | None = None) -> float | None:
        """Speed of ``name`` at ``work`` over that of ``other`` (at another work: ``at``): the median of the turns'."""
        mine, theirs = self.entry(name, work), self.entry(other, at or work)
        if mine is None or theirs is None:
            return None
        counted = mine.work.counted / theirs.work.counted
        pairs = zip(mine.seconds, theirs.seconds, strict=True)
        return counted * statistics.median(their / my for my, their in pairs)


UNSPLIT, LOOP, APART = "unsplit", "loop in C++", "2 unsplit at once"


def shards_name(count: int) -> str:
    return UNSPLIT if count == 1 else f"{count} shards"


def ray_name(count: int) -> str:
    return f"{shards_name(count)}, Ray"


def rpc_name(count: int) -> str:
    return f"RPC, {common.counted(count, 'server')}"


def plan_of(model: ModelFile, count: int, settings: Settings) -> Plan:
    """``count`` ranges as long as each other, or nearly."""
    return make_plan(model.n_layer, [round(model.n_layer * part / count) for part in range(1, count)])


def planned(model: ModelFile, count: int, settings: Settings) -> Plan:
    """``count`` ranges that take as long as each other, as boundary-bundle plan --measure finds them here."""
    family = common.family_of(model)
    if (model.path, settings) not in _MEASURED:
        sizes = model_sizes(model, model_tensors(model), family, settings)
        _MEASURED[model.path, settings] = measured_sizes(build("patched").worker, model, sizes, settings)[1]
    stages = partition(_MEASURED[model.path, settings], [Capacity()] * count)
    return make_plan(model.n_layer, [one.layers[0] for one in stages[1:]])


def settings_for(works: Sequence[Work], threads: int) -> Settings:
    sequences = max(work.sequences for work in works)
    positions = max(work.positions for work in works)
    batch = max(work.tokens if work.steps else work.size for work in works)
    each = -(-positions // _CELLS) * _CELLS
    return Settings(threads=threads, ctx=sequences * each, batch=batch, ubatch=batch, seqs=sequences)


def decoding(form: Form, sequences: int, size: int, steps: int, turns: int = 1) -> Work:
    groups = "" if size == sequences else f" by {size}"
    each = max(2, steps // min(sequences, 4))
    return Work(f"decode {sequences}{groups}", form.prompt, size, sequences, each, turns)


def turns_of(form: Form, sequences: int) -> int:
    """Where a few percent are of interest, all take turns more often."""
    return form.turns if sequences == 1 else 1


def section_shards(model: ModelFile, form: Form, threads: int) -> Section:
    works = [Work(f"prefill {tokens}", tokens, tokens) for tokens in form.prefills]
    works += [decoding(form, count, count, form.steps, turns_of(form, count)) for count in form.sequences]
    subjects: dict[str, tuple[str, int, bool]] = {}
    only: dict[str, set[str]] = {}
    alone = {"decode 1"}
    for count in range(1, min(form.grown, model.n_layer) + 1):
        subjects[shards_name(count)] = ("split", count, True)
        if count > form.most_shards:
            only[shards_name(count)] = alone
    subjects["3 shards, sockets"] = ("split", 3, False)
    only["3 shards, sockets"] = alone | {f"prefill {form.prefills[-1]}"}
    subjects[LOOP] = ("loop", 1, True)
    subjects |= {rpc_name(count): ("rpc", count, True) for count in range(1, form.most_shards + 1)}
    title = f"{model.path.name} with {common.counted(threads, 'thread')}, one batch at a time"
    return Section("shards", title, model, settings_for(works, threads), works, subjects, only, plan_of)


def section_flight(model: ModelFile, form: Form) -> Section:
    tokens = form.prefills[-1]
    sizes = sorted({*form.micro_batches, tokens, *(size for size in (128,) if size < tokens)})
    works = [Work(f"prefill {tokens} by {size}", tokens, size) for size in sizes]
    subjects = {UNSPLIT: ("split", 1, True), "2 shards": ("split", 2, True), APART: ("apart", 1, True)}
    subjects[rpc_name(2)] = ("rpc", 2, True)
    overlapping = {f"prefill {tokens} by {size}" for size in form.micro_batches}
    largest = f"prefill {tokens} by {form.micro_batches[-1]}"
    only = {"2 shards": overlapping, APART: overlapping, rpc_name(2): {largest, works[-1].name}}
    title = f"{model.path.name} with one thread a worker, micro-batches in flight"
    return Section("flight", title, model, settings_for(works, 1), works, subjects, only, plan_of)


def section_streams(model: ModelFile, form: Form) -> Section:
    works = [decoding(form, 4, size, form.steps) for size in (1, 2, 4)] + [
        decoding(form, 1, 1, form.steps, turns_of(form, 1))
    ]
    subjects = {UNSPLIT: ("split", 1, True), "2 shards": ("split", 2, True), "3 shards": ("split", 3, True)}
    subjects |= {APART: ("apart", 1, True), rpc_name(2): ("rpc", 2, True)}
    overlapping = {"decode 4 by 1", "decode 4 by 2"}
    only = {
        "2 shards": overlapping,
        APART: overlapping,
        "3 shards": {"decode 1"},
        rpc_name(2): {"decode 4 by 2", "decode 4"},
    }
    title = f"{model.path.name} with one thread a worker, sequences in flight"
    return Section("streams", title, model, settings_for(works, 1), works, subjects, only, planned)


def section_wide(model: ModelFile, form: Form, threads: int) -> Section:
    works = [Work(f"prefill {tokens}", tokens, tokens) for tokens in form.wide_prefills]
    works += [decoding(form, count, count, form.wide_steps) for count in (1, 4)]
    subjects = {shards_name(count): ("split", count, True) for count in (1, 2, 3)}
    subjects |= {ray_name(2): ("ray", 2, False), LOOP: ("loop", 1, True), rpc_name(2): ("rpc", 2, True)}
    title = f"{model.path.name} with {common.counted(threads, 'thread')}, one batch at a time"
    return Section("wide", title, model, settings_for(works, threads), works, subjects, {}, plan_of)


# -- measuring


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def started(section: Section, patched: NativeBuild, rpc: NativeBuild) -> Iterator[dict[str, Subject]]:
    """Everybody of a section, loaded."""
    path, settings = section.model.path, section.settings
    with contextlib.ExitStack() as stack:
        running: dict[str, Subject] = {}
        for name, (kind, count, shared) in section.subjects.items():
            plan = section.plan(section.model, count, settings)
            if kind == "split":
                running[name] = stack.enter_context(shards(patched.worker, path, plan, settings, shared=shared))
            elif kind == "apart":
                running[name] = stack.enter_context(apart(patched.worker, path, plan, settings))
            elif kind == "ray":
                running[name] = stack.enter_context(ray_shards(patched.worker, path, plan, settings))
            else:
                running[name] = stack.enter_context(loop(rpc, path, settings, list(plan) if kind == "rpc" else ()))
        yield running


def compare(section: Section, running: dict[str, Subject], prompts: list[list[int]]) -> None:
    """Make the entries, with every logit compared once with the unsplit worker's."""
    for work in section.works:
        given = [prompt[: work.tokens] for prompt in prompts[: work.sequences]]
        expected = running[UNSPLIT].run(work, given, logits=True)
        for name, subject in running.items():
            if work.name not in section.only.get(name, {work.name}):
                continue
            entry = Entry(work, name, subject, expected.tokens)
            section.entries.append(entry)
            if name == UNSPLIT:
                continue
            found = subject.run(work, given, logits=True)
            assert found.logits is not None
            assert expected.logits is not None
            entry.logits_compared = found.logits.size
            entry.logits_differing = count_differing(found.logits, expected.logits)
            if entry.logits_differing and not subject.ours:
                # Upstream's own results may be other ones: then they are to stay the same.
                entry.tokens = found.tokens


def measure(section: Section, prompts: list[list[int]], form: Form, until: float) -> int:
    """Rounds in which all take turns, each beginning with another one; how many there were."""
    gc.collect()
    gc.disable()
    try:
        for turn in range(form.rounds):
            if turn >= form.least_rounds and time.monotonic() > until:
                return turn
            say(f"{section.name}: round {turn + 1} of {form.rounds}")
            for work in section.works:
                given = [prompt[: work.tokens] for prompt in prompts[: work.sequences]]
                entries = [entry for entry in section.entries if entry.work is work]
                for place in range(work.turns * len(entries)):
                    entry = entries[(place + turn) % len(entries)]
                    entry.take(entry.subject.run(work, given))
        return form.rounds
    finally:
        gc.enable()


def run(section: Section, form: Form, patched: NativeBuild, rpc: NativeBuild, until: float) -> None:
    say(f"{section.name}: {section.title}")
    before = os.getloadavg()[0]
    with started(section, patched, rpc) as running:
        unsplit = running[UNSPLIT]
        assert isinstance(unsplit, Shards)
        # Any tokens, the same for all, and another sequence of them for each.
        n_vocab, longest = unsplit.pipeline.model.n_vocab, max(work.tokens for work in section.works)
        drawn = np.random.default_rng(1).integers(3, n_vocab, (section.settings.seqs, longest))
        prompts: list[list[int]] = drawn.tolist()
        say(f"{section.name}: comparing")
        compare(section, running, prompts)
        rounds = measure(section, prompts, form, until)
        section.facts = {
            "rounds": rounds,
            "n_embd": unsplit.pipeline.model.n_embd,
            "load_average_before": round(before, 2),
            "rpc": {
                name: {"servers": subject.shards, **subject.places}
                for name, subject in running.items()
                if isinstance(subject, Loop) and subject.kind == "rpc"
            },
        }


# -- results


@dataclass(frozen=True)
class Wanted:
    """A number that is wanted: ``least`` or ``most``, in ``unit`` ("" for a ratio)."""

    what: str
    measured: float
    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def met(self) -> bool:
        return (self.least is None or self.measured >= self.least) and (self.most is None or self.measured <= self.most)

    @property
    def bound(self) -> str:
        if self.least is not None:
            return f">= {self.least:g}"
        return "told" if self.most is None else f"<= {self.most:g}{self.unit and ' ' + self.unit}"


def wanted(sections: Sequence[Section]) -> list[Wanted]:
    """What is wanted of the sections that were run."""
    found: list[Wanted] = []
    told = {"shards": _wanted_shards, "flight": _wanted_flight, "streams": _wanted_streams, "wide": _wanted_wide}
    for section in sections:
        told[section.name](section, found)
    return found


def _ratio(found: list[Wanted], what: str, measured: float | None, least: float | None) -> None:
    if measured is not None:
        found.append(Wanted(what, measured, least))


def _hop(found: list[Wanted], section: Section, name: str, how: str, most: float) -> None:
    entry = section.entry(name, "decode 1")
    if entry is not None:
        worst = max(hop["hop_us"] for hop in entry.hop_times())
        what = f"a hop of one token of {section.facts['n_embd']} floats over {how}"
        found.append(Wanted(what, worst, most=most, unit="us"))


def _wanted_shards(section: Section, found: list[Wanted]) -> None:
    for other, least in ((UNSPLIT, 0.97), (LOOP, 0.97), (rpc_name(3), 2.0)):
        measured = section.ratio("3 shards", "decode 1", other)
        _ratio(found, f"decode of one sequence, 3 shards / {other}", measured, least)
    _hop(found, section, "3 shards", "shared memory", 30.0)
    _hop(found, section, "3 shards, sockets", "the socket", 150.0)
    added = growth(section)
    if len(added) > 1:
        each = [row["added_each_us"] for row in added[1:]]
        found.append(Wanted(f"a hop more adds to a token, 2 to {len(added)} shards, at most", max(each), unit="us"))


def _wanted_flight(section: Section, found: list[Wanted]) -> None:
    alone = [entry for entry in section.entries if entry.name == UNSPLIT]
    best = max(alone, key=lambda entry: entry.speed)
    for work in section.works:
        what = f"{work.name}, 2 shards of one thread / unsplit"
        at_best = section.ratio("2 shards", work.name, UNSPLIT, best.work.name)
        _ratio(found, f"{what} likewise", section.ratio("2 shards", work.name, UNSPLIT), 1.8)
        _ratio(found, f"{what} at its best ({best.work.size} at once)", at_best, 1.8)
        _apart(found, section, work)


def _wanted_streams(section: Section, found: list[Wanted]) -> None:
    for work in section.works:
        what = f"{work.name}, 2 shards of one thread / unsplit"
        in_one = section.ratio("2 shards", work.name, UNSPLIT, "decode 4")
        _ratio(found, f"{what} likewise", section.ratio("2 shards", work.name, UNSPLIT), 1.7)
        _ratio(found, f"{what}, all 4 in one batch", in_one, 1.7)
        _apart(found, section, work)
    measured = section.ratio("3 shards", "decode 1", UNSPLIT)
    _ratio(found, "decode of one sequence, 3 shards of one thread / unsplit", measured, 0.97)
    _hop(found, section, "3 shards", "shared memory, shards of one thread", 30.0)


def _apart(found: list[Wanted], section: Section, work: Work) -> None:
    """What two workers reach that have nothing to hand over, beside what is wanted of two shards."""
    _ratio(found, f"{work.name}, {APART} / one", section.ratio(APART, work.name, UNSPLIT), None)


def _wanted_wide(section: Section, found: list[Wanted]) -> None:
    entry = section.entry("3 shards", "decode 1")
    if entry is not None:
        worst = max(hop["hop_us"] for hop in entry.hop_times()) / min(entry.compute_us())
        what = f"a hop of one token of {section.facts['n_embd']} floats, of the least shard's computing"
        found.append(Wanted(what, 100 * worst, most=1.0, unit="%"))
    measured = section.ratio(ray_name(2), "decode 1", "2 shards")
    _ratio(found, "decode of one sequence, 2 shards through Ray / directly", measured, 0.8)


def growth(section: Section) -> list[dict[str, float]]:
    """Time of a token by the number of shards; what each hop has added to the unsplit one's, and what the last one."""
    rows: list[dict[str, float]] = []
    for name, (kind, count, shared) in section.subjects.items():
        entry = section.entry(name, "decode 1")
        if kind == "split" and shared and entry is not None:
            token_us = 1e6 / entry.speed
            each = (token_us - rows[0]["token_us"]) / (count - 1) if rows else 0.0
            last = token_us - rows[-1]["token_us"] if rows else 0.0
            times = {"token_us": token_us, "added_each_us": each, "added_last_us": last}
            rows.append({"shards": count, **{key: round(value, 1) for key, value in times.items()}})
    return rows


def row(section: Section, entry: Entry) -> dict[str, Any]:
    """An entry for the JSON."""

    def ratio(name: str) -> float | None:
        measured = section.ratio(entry.name, entry.work.name, name)
        return None if measured is None else round(measured, 4)

    return {
        "work": entry.work.name,
        "subject": entry.name,
        "kind": entry.subject.kind,
        "shards": entry.subject.shards,
        "tokens_per_second": round(entry.speed, 3),
        "runs": [round(entry.work.counted / seconds, 3) for seconds in entry.seconds],
        "ratio_to_unsplit": ratio(UNSPLIT),
        "ratio_to_loop": ratio(LOOP),
        "ratio_to_rpc": ratio(rpc_name(entry.subject.shards)),
        "logits_compared": entry.logits_compared,
        "logits_differing": entry.logits_differing,
        "tokens_differing": entry.tokens_differing,
        "compute_us": [round(value, 1) for value in entry.compute_us()],
        "hops": [{key: round(value, 2) for key, value in hop.items()} for hop in entry.hop_times()],
    }


def rpc_told(sections: Sequence[Section]) -> str:
    """What RPC was asked to do."""
    asked = sorted({place["servers"] for section in sections for place in section.facts["rpc"].values()})
    return (
        "RPC was asked for the same: upstream's server and llama_decode of the same sources, unpatched. Each of "
        f"{', '.join(map(str, asked))} servers on 127.0.0.1 has one shard's layers with their cells, the last one the "
        "head too, as many threads as a shard, and no cache of files. The client has the table of tokens, draws, and "
        "computes one batch at a time. Where each layer was computed is looked up in the graph (in the JSON). The loop "
        "in C++ is that client without servers."
    )


def result(sections: Sequence[Section], quick: bool, patched: NativeBuild, rpc: NativeBuild) -> dict[str, Any]:
    """All of it, as bench_shards_schema.json describes it."""
    return {
        "schema": 1,
        "form": "quick" if quick else "full",
        "machine": {"processor": processor(), "usable_processors": usable(), "system": platform.platform()},
        "builds": {
            kind: {"source": made.provenance["source"]["hash"], "flags": made.provenance["ingredients"]["flags"]}
            for kind, made in (("patched", patched), ("rpc", rpc))
        },
        "rpc_was_asked": rpc_told(sections),
        "sections": [
            {
                "name": section.name,
                "title": section.title,
                "model": {
                    "file": section.model.path.name,
                    "bytes": section.model.size,
                    "n_layer": section.model.n_layer,
                },
                "threads": section.settings.threads,
                "cuts": {
                    name: [start for start, _ in list(section.plan(section.model, count, section.settings))[1:]]
                    for name, (_, count, _) in section.subjects.items()
                },
                **section.facts,
                "entries": [row(section, entry) for entry in section.entries],
                "growth": growth(section),
            }
            for section in sections
        ],
        "wanted": [
            {
                "what": item.what,
                "least": item.least,
                "most": item.most,
                "unit": item.unit,
                "measured": round(item.measured, 4),
                "met": item.met,
            }
            for item in wanted(sections)
        ],
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def show(sections: Sequence[Section]) -> None:
    for section in sections:
        names = [work.name for work in section.works]
        rows = []
        for name in section.subjects:
            cells = []
            for work in names:
                speed, ratio = section.speed(name, work), section.ratio(name, work, UNSPLIT)
                cells.append("" if speed is None or ratio is None else f"{speed:.1f} ({ratio:.2f})")
            rows.append([name, *cells])
        title = (
            f"{section.name}: {section.title}; tokens/s, medians of {section.facts['rounds']} rounds (ratio to unsplit)"
        )
        common.print_table(title, ["", *names], rows)
        print()
    show_hops(sections)
    for section in sections:
        if section.name == "shards":
            rows = []
            for told in growth(section):
                added = [f"{told[key]:.0f}" for key in ("added_each_us", "added_last_us")]
                rows.append([str(told["shards"]), f"{told['token_us'] / 1000:.3f}", *added])
            columns = ["shards", "ms", "us added by each hop", "by the last one"]
            common.print_table("adding shards: time of a token", columns, rows)
            print()
    for section in sections:
        compared = sum(entry.logits_compared for entry in section.entries if entry.subject.ours)
        text = f"{section.name}: of split runs {differing(section):,} of {compared:,} logits, and of tokens, differ"
        upstreams = [entry for entry in section.entries if not entry.subject.ours]
        if upstreams:
            count = sum(entry.logits_differing for entry in upstreams)
            text += f"; of upstream's {count:,} of {sum(entry.logits_compared for entry in upstreams):,}"
        print(text)
    print(textwrap.fill(rpc_told(sections), 110) + "\n")
    rows = []
    for item in wanted(sections):
        verdict = "" if item.bound == "told" else "yes" if item.met else "no"
        value = f"{item.measured:.2f}{item.unit and ' ' + item.unit}"
        rows.append([item.what, item.bound, value, verdict])
    common.print_table("wanted", ["", "wanted", "measured", "met"], rows)
    # That of the first: what the later ones find is the load of those before them.
    load = sections[0].facts["load_average_before"]
    if load > _IDLE:
        print(f"the machine was not idle before this began (load average {load:.1f}): do not rely on these numbers")


def hop_rows(sections: Sequence[Section]) -> Iterator[tuple[Section, Entry, dict[str, float]]]:
    """Every entry that tells of its hops, and of those the one that took longest. Through Ray the transfer, which is
    most of one, is not told."""
    for section in sections:
        for entry in section.entries:
            hops = entry.hop_times() if entry.subject.kind == "split" else []
            if hops:
                yield section, entry, max(hops, key=lambda hop: hop["hop_us"])


def show_hops(sections: Sequence[Section]) -> None:
    parts = ["encode", "transfer", "decode", "hop", "wait"]
    columns = ["slowest hop", "bytes", *parts, "compute", "hop/compute"]
    rows = []
    for section, entry, hop in hop_rows(sections):
        compute = statistics.mean(entry.compute_us())
        name = f"{section.name}, {entry.name}, {entry.work.name}"
        share = f"{100 * hop['hop_us'] / compute:.2f}%" if compute else ""
        times = [f"{hop[f'{part}_us']:.1f}" for part in parts]
        rows.append([name, f"{hop['bytes']:,.0f}", *times, f"{compute:.0f}", share])
    common.print_table("hops: microseconds a batch, medians; compute is a shard's", columns, rows)
    print()


def differing(section: Section) -> int:
    """Logits of split runs that differ from the unsplit worker's, and tokens of timed runs that differ from those."""
    ours = [entry for entry in section.entries if entry.subject.ours]
    return sum(entry.logits_differing + entry.tokens_differing for entry in ours)


# -- plots


def draw(sections: Sequence[Section], folder: Path) -> None:
    """Each of :data:`PICTURES` in ``folder``. Raises OSError."""
    for name, picture in zip(PICTURES, (draw_speed, draw_hops), strict=True):
        picture(sections, folder / name)


def draw_speed(sections: Sequence[Section], path: Path) -> None:
    """Of each section prefill and decode, and the time of a token by the number of shards."""
    panels: list[Callable[[Any], None]] = []
    for section in sections:
        for prefix in ("prefill", "decode"):
            works = [work for work in section.works if work.name.startswith(prefix)]
            how = _lines
            if section.name in ("flight", "streams"):
                how, works = _bars, [work for work in works if work.sequences == works[0].sequences]
            if works:
                panels.append(partial(how, section=section, works=works))
        if section.name == "shards":
            panels.append(partial(_growth, section=section))
    lines = -(-len(panels) // 2)
    figure, axes = pyplot().subplots(lines, 2, figsize=(12, 3.8 * lines), squeeze=False, layout="constrained")
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel(axis)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    save(figure, path)


def _style(section: Section, name: str) -> dict[str, Any]:
    kind, count, shared = section.subjects[name]
    colour = {"split": OURS, "apart": INK, "ray": OURS, "loop": INK, "rpc": PEER}[kind]
    dashes = {1: "-", 2: "--", 3: "-.", 4: ":"}
    return {"color": INK if name == UNSPLIT else colour, "linestyle": dashes.get(count, "-"), "marker": "o"}


def _lines(axis: Any, section: Section, works: Sequence[Work]) -> None:
    """Speed over tokens, or over sequences, a line a subject."""
    decode = works[0].steps > 0
    for name in section.subjects:
        found = [entry for work in works if (entry := section.entry(name, work.name)) is not None]
        if len(found) == len(works):
            places = [entry.work.sequences if decode else entry.work.tokens for entry in found]
            style = {**_style(section, name), "markersize": 3, "linewidth": 1.2}
            style["marker"] = {"loop": "x", "ray": "s"}.get(section.subjects[name][0], "o")
            axis.plot(places, [entry.speed for entry in found], label=name, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks([work.sequences if decode else work.tokens for work in works])
    axis.set_xticklabels([str(work.sequences if decode else work.tokens) for work in works])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequences" if decode else "tokens of the prefill", fontsize=8)
    _titled(axis, section, "decode" if decode else "prefill")


def _bars(axis: Any, section: Section, works: Sequence[Work]) -> None:
    """Speed by the size of a batch, a bar a subject."""
    names = [name for name in section.subjects if any(section.entry(name, work.name) for work in works)]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [(at, entry) for at, work in enumerate(works) if (entry := section.entry(name, work.name)) is not None]
        colour = YARDSTICK if name == UNSPLIT else _style(section, name)["color"]
        left = [at + (place - (len(names) - 1) / 2) * width for at, _ in found]
        axis.bar(left, [entry.speed for _, entry in found], width, label=name, color=colour)
    axis.set_xticks(range(len(works)))
    axis.set_xticklabels([str(work.size) for work in works])
    decode = works[0].steps > 0
    axis.set_xlabel("sequences of a batch" if decode else "tokens of a micro-batch", fontsize=8)
    _titled(axis, section, f"decode of {works[0].sequences}" if decode else f"prefill of {works[0].tokens}")


def _titled(axis: Any, section: Section, what: str) -> None:
    title = "\n".join(textwrap.wrap(f"{what}: {section.title}", 70))
    axis.set_title(title, fontsize=8, loc="left", fontweight="bold")
    axis.set_ylabel("tokens per second", fontsize=8)
    axis.legend(fontsize=7, frameon=False)


def _growth(axis: Any, section: Section) -> None:
    rows = growth(section)
    axis.plot([r["shards"] for r in rows], [r["token_us"] / 1000 for r in rows], color=OURS, marker="o", label="shards")
    theirs = [(entry.subject.shards, entry.speed) for entry in section.entries if _is_rpc(entry, "decode 1")]
    axis.plot([count for count, _ in theirs], [1e3 / speed for _, speed in theirs], color=PEER, marker="o", label="RPC")
    axis.set_ylim(bottom=0)
    axis.set_xticks([r["shards"] for r in rows])
    axis.set_xlabel("shards", fontsize=8)
    axis.set_ylabel("milliseconds a token", fontsize=8)
    axis.set_title("decode of one sequence by the number of shards", fontsize=8, loc="left", fontweight="bold")
    axis.legend(fontsize=7, frameon=False)


def _is_rpc(entry: Entry, work: str) -> bool:
    return entry.subject.kind == "rpc" and entry.work.name == work


def draw_hops(sections: Sequence[Section], path: Path) -> None:
    """The slowest hop of each: what it takes by itself, and beside the computing of a shard."""
    parts = {"compute": PEER, "encode": "#2f7d63", "transfer": OURS, "decode": "#a8dcc6", "wait": YARDSTICK}
    names, times, wholes = [], [], []
    for section, entry, hop in reversed(list(hop_rows(sections))):
        names.append(f"{section.name}, {entry.name}, {entry.work.name}")
        hop["compute_us"] = statistics.mean(entry.compute_us())
        times.append({part: hop[f"{part}_us"] for part in parts})
        wholes.append(hop["hop_us"])
    figure, axes = pyplot().subplots(1, 2, figsize=(13, 0.28 * len(names) + 1.6), sharey=True, layout="constrained")
    for axis, drawn, share in ((axes[0], ("encode", "transfer", "decode"), False), (axes[1], tuple(parts), True)):
        left = [0.0] * len(names)
        for part in drawn:
            values = [one[part] * (100 / (sum(one.values()) or 1) if share else 1) for one in times]
            axis.barh(names, values, left=left, label=part, color=parts[part], height=0.7)
            left = [before + value for before, value in zip(left, values, strict=True)]
        if not share and names:
            # One hop of a large batch would flatten all the others.
            edge = min(max(left), 5 * statistics.median(left)) * 1.15
            for place, (end, whole) in enumerate(zip(left, wholes, strict=True)):
                axis.text(min(end, 0.92 * edge), place, f" {whole:.0f}", va="center", fontsize=7, color=INK)
            axis.set_xlim(0, edge)
        axis.set_xlabel("percent of a shard's time for a batch" if share else "microseconds a batch", fontsize=8)
        title = "beside computing and waiting" if share else "the hop"
        axis.set_title(title, fontsize=9, loc="left", fontweight="bold")
        axis.tick_params(labelsize=7)
        axis.margins(y=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(fontsize=7, frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.05))
    save(figure, path)


# -- the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one short round, without the model of 1 GB")
    parser.add_argument("--only", choices=("shards", "flight", "streams", "wide"), help="one section")
    parser.add_argument("--rounds", type=common.number(1, 1000), metavar="N", help="rounds at most (5, 1 with --quick)")
    parser.add_argument(
        "--minutes",
        type=common.number(1, 1000),
        default=12,
        metavar="N",
        help=f"begin no further round after so long, once each section has {LEAST_ROUNDS} (12)",
    )
    parser.add_argument(
        "--threads", type=common.number(1, 512), metavar="N", help="threads of a worker (all, 4 at most)"
    )
    parser.add_argument("--model", type=common.file_name, metavar="FILE", help="another model than SmolLM2-135M")
    parser.add_argument("--wide-model", type=common.file_name, metavar="FILE", help="another one than that of 1 GB")
    parser.add_argument("--plots", type=common.file_name, metavar="FOLDER", help="write speed.svg and hops.svg there")
    parser.add_argument("--json", type=common.file_name, metavar="FILE", help="everything measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return bench(options)
    except (NativeError, WorkerError, PipelineError, PlanError, SubjectError, common.CommandError) as error:
        say(f"error: {error}")
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        say(f"error: {where}{error.strerror or error}")
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 2


def bench(options: argparse.Namespace) -> int:
    common.check_target(options.json, options.model, options.wide_model)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name in PICTURES:
            common.check_target(options.plots / name)
    form = QUICK if options.quick else FULL
    if options.rounds is not None:
        form = replace(form, rounds=options.rounds, least_rounds=min(form.least_rounds, options.rounds))
    threads = options.threads or common.default_threads()
    sections = []
    if options.only != "wide":
        model = read_model_file(options.model or ensure_model())
        sections += [section_shards(model, form, threads), section_flight(model, form), section_streams(model, form)]
    if options.wide_model is not None or options.only == "wide" or not options.quick:
        sections.append(
            section_wide(read_model_file(options.wide_model or wide_model.ensure_wide_model()), form, threads)
        )
    sections = [section for section in sections if options.only in (None, section.name)]
    patched, rpc = build("patched"), build("rpc")
    end = time.monotonic() + 60 * options.minutes
    for place, section in enumerate(sections):
        now = time.monotonic()
        run(section, form, patched, rpc, now + max(0.0, end - now) / (len(sections) - place))
    show(sections)
    if options.json is not None:
        common.write_json(options.json, result(sections, options.quick, patched, rpc))
    if options.plots is not None:
        draw(sections, options.plots)
    return 1 if any(map(differing, sections)) else 0


if __name__ == "__main__":
    sys.exit(main())
