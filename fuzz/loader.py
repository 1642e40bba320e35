"""Fuzzes the loading of model files: damages the head of a tiny GGUF file and starts a worker on what comes of it.

    loader.py --count 5000              so many files, two workers at a time
    loader.py --count 5000 --report     the same, with a dated report in fuzz/reports
    loader.py --replay FILE             one file again, for every range

What may become of a file: it is refused in one sentence with status 2; or it loads, and gives the bits of the sound
one; or it loads and says by its fingerprint that it is another model. Everything else is a finding: a signal, a hang,
more than a sentence, more memory than the file explains, or other bits under the sound file's fingerprint. Findings
lie in fuzz/build/findings/loader. Exit status: 0 nothing was found, 1 something was, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import random
import re
import resource
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gguf_faults as parts  # noqa: E402
import loader_drive as drive  # noqa: E402

from boundary_bundle import Bundle  # noqa: E402
from boundary_bundle.shards import tiny_models  # noqa: E402

Range = tuple[int, int]
#: What a worker may take beyond what this process has, or a sound file takes, in bytes.
MEMORY = 64 << 20

REFUSED, EQUAL, RENAMED, OTHER = "refused", "loaded equal", "loaded equal, other fingerprint", "another model"
FINDING = "finding"


@dataclass
class Sound:
    """A file that is as it should be, and what its ranges make of a batch."""

    name: str
    parts: parts.Gguf
    ranges: Sequence[Range]
    given: dict[Range, Bundle | None] = field(default_factory=dict)
    bits: dict[Range, dict[str, bytes]] = field(default_factory=dict)
    fingerprint: str = ""


def sounds(worker: Path, folder: Path) -> list[Sound]:
    """A head of its own and one that is the table, experts, and a file of one range."""
    shapes = {
        "untied": parts.SHAPE,
        "tied": tiny_models.Shape(n_layer=6, n_head=2, n_head_kv=1, head_size=32, n_ff=64, quantised=True),
        "moe": tiny_models.Shape(n_layer=6, n_head=2, n_head_kv=2, head_size=32, n_ff=32, n_expert=4, n_expert_used=2),
    }
    found = []
    for name, shape in shapes.items():
        path = tiny_models.write(folder / f"{name}.gguf", name, shape=shape)
        sound = Sound(name, parts.Gguf.parse(path.read_bytes()), parts.RANGES)
        given: Bundle | None = None
        for layers in sound.ranges:
            start = drive.start(worker, path, layers, given=given)
            assert start.payloads is not None, start
            assert start.fingerprint is not None
            sound.given[layers], sound.bits[layers], sound.fingerprint = given, start.payloads, start.fingerprint
            given = start.output
        found.append(sound)
    whole = found[0]
    middle = parts.stripped(whole.parts, parts.MIDDLE)
    return [*found, Sound("stripped", middle, [parts.MIDDLE], whole.given, whole.bits, whole.fingerprint)]


# ---- damage ---------------------------------------------------------------------------

_NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 64, 127, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_LARGE = (*_NUMBERS, 1 << 33, 1 << 40, (1 << 63) - 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1)


def _number(drawn: random.Random, old: int, bits: int) -> int:
    """One near the old one, one that is a limit somewhere, or any."""
    how = drawn.randrange(4)
    if how == 0:
        new = old + drawn.choice((-32, -2, -1, 1, 2, 32))
    elif how == 1:
        new = old ^ (1 << drawn.randrange(bits))
    elif how == 2:
        new = drawn.choice(_LARGE)
    else:
        new = drawn.getrandbits(drawn.randrange(1, bits + 1))
    return new % (1 << bits)


def _value(drawn: random.Random, g: parts.Gguf) -> None:
    key = drawn.choice(g.keys)
    if key.type in (parts.STRING, parts.ARRAY):
        if isinstance(key.value, bytes):
            key.value = bytes(drawn.choices(b"a0. \n\x1b\xff\0", k=drawn.randrange(9)))
        elif key.value:
            del key.value[drawn.randrange(len(key.value)) :: drawn.choice((1, 2, 400))]
    elif key.type in (parts.F32, parts.F64):
        key.value = drawn.choice((0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")))
    else:
        key.value = _number(drawn, int(key.value), 32)
        key.type = parts.U32


def _type(drawn: random.Random, g: parts.Gguf) -> None:
    """The same bits under another type of the same size, or any type."""
    key = drawn.choice(g.keys)
    alike = {parts.U32: (parts.I32, parts.F32), parts.F32: (parts.U32, parts.I32), parts.STRING: (parts.STRING,)}
    if key.type == parts.ARRAY and key.element != parts.STRING and drawn.randrange(2):
        key.element = parts.U32 if key.element == parts.I32 else parts.I32
        key.value = [0 if isinstance(item, float) else item for item in key.value]
    elif key.type in alike and drawn.randrange(2):
        kind = drawn.choice(alike[key.type])
        key.value = float(key.value) if kind == parts.F32 else key.value if kind == parts.STRING else int(key.value)
        key.type = kind
    else:
        kind = drawn.choice((*range(14), 1 << 31))
        g.keys[g.keys.index(key)] = parts.Key(key.name, kind, b"\1\0\0\0\0\0\0\0", parts.U8)


def _table(drawn: random.Random, g: parts.Gguf) -> None:
    tensor = drawn.choice(g.tensors)
    what = drawn.randrange(6)
    if what == 0 and tensor.shape:
        place = drawn.randrange(len(tensor.shape))
        tensor.shape[place] = _number(drawn, tensor.shape[place], 64)
    elif what == 1:
        tensor.type = _number(drawn, tensor.type, 32) if drawn.randrange(3) else drawn.randrange(42)
    elif what == 2:
        tensor.offset = _number(drawn, drawn.randrange(0, 1 << 20, 32), 64)
    elif what == 3:
        tensor.rank = drawn.choice((0, 1, 2, 3, 4, 5, 1 << 31))
    elif what == 4:
        other = drawn.choice(g.tensors)
        tensor.shape, other.shape = other.shape, tensor.shape
    else:
        names = (b"", b"x" * 64, drawn.choice(g.tensors).name, tensor.name[:-1], b"\n" + tensor.name)
        tensor.name = drawn.choice(names)


def _sound_table(drawn: random.Random, g: parts.Gguf) -> None:
    """What the table says is what follows, but the model is damaged."""
    tensor = drawn.choice(g.tensors)
    what = drawn.randrange(5)
    if what == 0:
        g.tensors.remove(tensor)
    elif what == 1:
        name = drawn.choice((b"x", b"blk.3.x", b"blk.6.x", b"blk.0.attn_q.bias"))
        g.tensors.append(parts.Tensor(name, [32], parts.T_F32, bytes(128)))
    elif what == 2:
        tensor.shape = drawn.choice(([len(tensor.data) // 4], [1, len(tensor.data) // 4], [2, len(tensor.data) // 8]))
        tensor.type = parts.T_F32
    elif what == 3:
        drawn.shuffle(g.tensors)  # legal
    else:
        tensor.type, size = drawn.choice(((24, 1), (25, 2), (1, 2), (30, 2), (26, 4), (28, 8)))
        count = 1
        for dim in tensor.shape:
            count *= dim
        tensor.data = bytes(count * size)


def _lists(drawn: random.Random, g: parts.Gguf) -> None:
    entries = drawn.choice((g.keys, g.tensors))
    what = drawn.randrange(4)
    place = drawn.randrange(len(entries))
    if what == 0:
        entries.append(entries[place])  # type: ignore[arg-type]
    elif what == 1:
        del entries[place]
    elif what == 2:
        drawn.shuffle(entries)  # type: ignore[arg-type]
    else:
        name = drawn.choice(("n_tensors", "n_keys"))
        setattr(g, name, _number(drawn, len(g.tensors if name == "n_tensors" else g.keys), 64))


def _framing(drawn: random.Random, g: parts.Gguf) -> None:
    what = drawn.randrange(5)
    if what == 0:
        g.version = _number(drawn, 3, 32)
    elif what == 1:
        g.set("general.alignment", _number(drawn, 32, 8))
    elif what == 2:
        g.alignment = drawn.choice((1, 2, 8, 16, 64, 128, 4096))
        if drawn.randrange(2):
            g.set("general.alignment", g.alignment)
    elif what == 3:
        g.tail = bytes(drawn.randrange(1, 200))
    else:
        key = drawn.choice([key for key in g.keys if key.type == parts.ARRAY])
        key.count = _number(drawn, len(key.value), 64)


CHANGES: Sequence[Callable[[random.Random, parts.Gguf], None]] = (_value, _type, _table, _sound_table, _lists, _framing)


def damaged(sound: parts.Gguf, seed: int) -> bytes:
    """The file with one to three faults; the weights stay what they are, wherever they come to lie."""
    draw = random.Random(seed)  # nosec B311: the same damage for the same seed
    g = sound.copy()
    how = draw.randrange(8)
    if how < 5:
        try:
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                draw.choice(CHANGES)(draw, g)
            return g.pack()
        except (ValueError, TypeError, AttributeError, struct.error):
            g = sound.copy()  # a second change could not be made of what the first left: bytes are changed instead
    data = bytearray(g.pack())
    head = g.places[-2 * len(g.tensors) - 1]
    if how == 5:
        ends = (draw.choice(g.places), draw.randrange(len(data)), len(data) - draw.randrange(64))
        return bytes(data[: draw.choice(ends)])
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(4, head)
        data[at] = draw.choice((data[at] ^ 1 << draw.randrange(8), draw.randrange(256), 0, 255))
    return bytes(data)


# ---- verdicts -------------------------------------------------------------------------


@dataclass
class Verdict:
    outcome: str
    #: The sentence without names and numbers, or what is wrong.
    why: str = ""
    seconds: float = 0.0
    peak: int = 0


def judge(start: drive.Start, sound: Sound, layers: Range) -> Verdict:
    """What has become of a file that may be damaged."""

    def verdict(outcome: str, why: str = "") -> Verdict:
        return Verdict(outcome, why, start.seconds, start.peak)

    if start.status is None:
        return verdict(FINDING, f"no end in {drive.PATIENCE:g} s")
    if start.peak > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + MEMORY:
        return verdict(FINDING, f"{start.peak >> 20} MiB of memory")
    if start.sentence is not None:
        return verdict(REFUSED, kind_of(start.sentence))
    if start.status != 0 or not start.stands:
        return verdict(FINDING, f"status {start.status}: {kind_of(start.errors)}")
    same, known = start.payloads == sound.bits[layers], start.fingerprint == sound.fingerprint
    if known and not same:
        return verdict(FINDING, "other bits under the sound file's fingerprint")
    return verdict(EQUAL if known else RENAMED if same else OTHER)


def kind_of(sentence: str) -> str:
    """What sentences of a kind have in common."""
    text = re.sub(r"^.*?(\(\d+ bytes\): |made llama.cpp stop: )", "", sentence.strip())
    text = re.sub(r"\S*/(\S+\.(?:cpp|h|c)):\d+", r"\1", text)
    text = re.sub(r"/\S+", "FILE", text)
    text = re.sub(r"'[^']*'", "'..'", text)
    return re.sub(r"-?\d[\d, ]*", "N ", text).strip()[:120]


@dataclass
class Tally:
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    #: By outcome.
    whys: dict[str, collections.Counter[str]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0


def run(worker: Path, count: int, seed: int, keep: Path | None, say: Callable[[str], object] = print) -> Tally:
    """Damage and judge ``count`` files; findings go to ``keep``."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-loader-") as name:
        folder = Path(name)
        bases = sounds(worker, folder)

        def one(number: int) -> None:
            sound = bases[number % len(bases)]
            layers = sound.ranges[number // len(bases) % len(sound.ranges)]
            data = damaged(sound.parts, seed + number)
            path = folder / f"{number}.gguf"
            path.write_bytes(data)
            try:
                start = drive.start(worker, path, layers, mmap=number % 2 == 0, given=sound.given[layers])
            finally:
                path.unlink()
            verdict = judge(start, sound, layers)
            tally.outcomes[verdict.outcome] += 1
            tally.whys.setdefault(verdict.outcome, collections.Counter())[verdict.why] += 1
            tally.slowest, tally.largest = max(tally.slowest, verdict.seconds), max(tally.largest, verdict.peak)
            if verdict.outcome == FINDING:
                told = f"{sound.name} seed {seed + number} range {layers[0]}:{layers[1]}: {verdict.why}"
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{sound.name}-{seed + number}-{layers[0]}-{layers[1]}.gguf").write_bytes(data)
                tally.findings.append(told)
                say(f"FOUND {told}")

        with ThreadPoolExecutor(2) as pool:
            for done, _ in enumerate(pool.map(one, range(count)), 1):
                if done % 1000 == 0:
                    say(f"{done:,} files, {len(tally.findings)} findings")
    return tally


# ---- the command ----------------------------------------------------------------------


def table(tally: Tally) -> str:
    total = sum(tally.outcomes.values())
    lines = ["| outcome | files | share |", "|---|---|---|"]
    for outcome in (REFUSED, EQUAL, RENAMED, OTHER, FINDING):
        found = tally.outcomes[outcome]
        lines.append(f"| {outcome} | {found:,} | {found / max(1, total):.1%} |")
    return "\n".join(lines)


def report(tally: Tally, count: int, seed: int) -> str:
    lines = [
        f"# Damaged model files, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "",
        f"`make fuzz-loader COUNT={count}`, seed {seed}: tiny GGUF files (untied; tied and quantised; experts; of one",
        "range) with one to three faults each, for a first, a middle or a last range, mapped and read in turn. Weights",
        "are not changed, except that what is damaged may make them lie elsewhere: nothing covers their values.",
        "",
        table(tally),
        "",
        f"The slowest took {tally.slowest:.2f} s; the largest had {tally.largest >> 20} MiB at its peak.",
        "",
        "## Why files were refused",
        "",
        "| times | sentence |",
        "|---|---|",
    ]
    for why, times in tally.whys.get(REFUSED, collections.Counter()).most_common(60):
        lines.append(f"| {times} | {why.replace('|', '/')} |")
    lines += ["", "## Findings", "", *(f"- {told}" for told in tally.findings or ["none"])]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="damage model files and start workers on them")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="files (1000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first file (1)")
    parser.add_argument("--report", action="store_true", help="write a dated report to fuzz/reports")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="start workers on this file alone")
    options = parser.parse_args(arguments)
    worker = options.worker
    if worker is None:
        from boundary_bundle.native import NativeError, build

        try:
            worker = build("patched").worker
        except NativeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.replay is not None:
        return replay(worker, options.replay)
    tally = run(worker, options.count, options.seed, FUZZ / "build" / "findings" / "loader")
    print(table(tally))
    if options.report:
        file = FUZZ / "reports" / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d-%H%M}-loader.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(report(tally, options.count, options.seed), encoding="utf-8")
        print(f"report: {file.relative_to(ROOT)}")
    return 1 if tally.findings else 0


def replay(worker: Path, path: Path) -> int:
    """Show what each range makes of a file, beside the sound one that its name begins with."""
    found = False
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-loader-") as folder:
        bases = sounds(worker, Path(folder))
        sound = next((base for base in bases if path.name.startswith(base.name)), bases[0])
        for layers in sound.ranges:
            for mmap in (True, False):
                start = drive.start(worker, path, layers, mmap=mmap, given=sound.given[layers])
                verdict = judge(start, sound, layers)
                found = found or verdict.outcome == FINDING
                how = "mapped" if mmap else "read"
                print(f"{layers[0]}:{layers[1]} {how}: {verdict.outcome}: {start.errors.strip() or verdict.why}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
