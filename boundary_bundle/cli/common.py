"""What the commands share: options, the workers of a run, output for terminals and for pipes."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..families import certificates
from ..native import build
from ..shards import (
    CheckedRelay,
    Family,
    Fault,
    FlowPipeline,
    Generation,
    LocalWorker,
    ModelFile,
    Pipeline,
    Plan,
    PlanError,
    Sampling,
    Settings,
    Worker,
    WorkerError,
    close_workers,
    make_plan,
    model_sizes,
    model_tensors,
    parse_cuts,
    planned_cuts,
    start_workers,
    tensors_sha256,
)
from ..shards.ray_engine import RayPipeline, RayWorker, memory_needs, ray_cluster
from ..shards.worker import CACHE_TYPES, LOAD_TIMEOUT, REQUEST_TIMEOUT
from ..writing import is_regular, obstacle, write_whole

# What a terminal would take for a command. A model may say anything.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
#: The same in a name, and what no encoding has.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")


#: Bytes of a plan's file. One of 256 stages has a fifth of it.
_MOST_OF_A_PLAN = 1 << 20


class CommandError(Exception):
    """A command cannot be carried out; one sentence for the user."""


def number(minimum: int, maximum: int) -> Any:
    """An argparse type: a whole number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        legal = f"a number from {minimum} to {maximum}"
        if not (text.isascii() and text.isdecimal() and len(text) < 12) or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """An argparse type: a time that is neither nothing nor longer than a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.01 to 86400")
    return value


def add_cuts(parser: argparse.ArgumentParser) -> None:
    """The options that say where a model is cut; :func:`plan_of` reads them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cuts", metavar="A,B", help="the first layers of the second and later shards; absent: unsplit")
    where.add_argument("--plan", type=file_name, metavar="FILE", help="cut where a plan of the plan command says")


def plan_of(options: argparse.Namespace, model: ModelFile) -> Plan:
    """The shards of the model that ``--cuts`` or ``--plan`` ask for. Raises CommandError or PlanError."""
    if options.plan is not None:
        return make_plan(model.n_layer, _read_plan(options.plan, model))
    return make_plan(model.n_layer, [] if options.cuts is None else parse_cuts(options.cuts))


def _read_plan(path: Path, model: ModelFile) -> list[int]:
    require_regular(path)
    try:
        with open(path, "rb") as stream:
            text = stream.read(_MOST_OF_A_PLAN + 1)
    except OSError as error:
        raise CommandError(f"cannot read {shown(path)}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise CommandError(f"cannot read {shown(path)}: {error}") from None
    if len(text) > _MOST_OF_A_PLAN:
        raise CommandError(f"{shown(path)} is no plan: it holds more than {_MOST_OF_A_PLAN} bytes")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise CommandError(f"{shown(path)} is no plan: it is not JSON") from None
    try:
        return planned_cuts(content, model.architecture, model.n_layer, tensors_sha256(model_tensors(model)))
    except PlanError as error:
        raise CommandError(f"{shown(path)}: {error}") from None


def family_of(model: ModelFile) -> Family:
    """What its certificate says of the architecture. Raises PlanError for one that has none."""
    certificate = certificates.find(model.architecture)
    if certificate is None or certificate["verdict"] != "certified":
        reason = "" if certificate is None else f": {certificate['reason']}"
        raise PlanError(f"architecture {model.architecture!r} is not certified for layer ranges{reason}")
    # The variants of an architecture differ in neither.
    variant = next(one for one in certificate["variants"] if one["verdict"] == "certified")
    return Family(variant["memory"], variant["gives"])


def default_threads() -> int:
    """The processors this process may use, at most four."""
    return max(1, min(4, len(usable_processors())))


def usable_processors() -> list[int]:
    """Those that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not every system has it
        return list(range(os.cpu_count() or 1))


def add_settings(parser: argparse.ArgumentParser, defaults: Settings | None = None, *, cache: bool = True) -> None:
    """Options that every shard and the reference are started with alike; ``defaults`` for other ones than usual.

    Without ``cache`` those of the KV cache stay as they are.
    """
    usual = defaults or Settings(threads=default_threads())
    threads = "all that may be used, 4 at most" if defaults is None else str(usual.threads)
    group = parser.add_argument_group("settings of every worker")

    def count(name: str, maximum: int, value: int, told: str) -> None:
        group.add_argument(name, type=number(1, maximum), default=value, metavar="N", help=told)

    count("--threads", 512, usual.threads, f"processors for each ({threads})")
    count("--ctx", 1 << 24, usual.ctx, f"context in tokens ({usual.ctx})")
    count("--batch", 1 << 20, usual.batch, f"tokens a batch ({usual.batch})")
    count("--ubatch", 1 << 20, usual.ubatch, f"tokens a micro-batch ({usual.ubatch})")
    group.add_argument("--flash-attn", choices=("on", "off"), default="on", help="flash attention (on)")
    parser.set_defaults(type_k=usual.type_k, type_v=usual.type_v, swa_full="on" if usual.swa_full else "off")
    if cache:
        for option, value, told in (("--type-k", usual.type_k, "keys"), ("--type-v", usual.type_v, "values")):
            group.add_argument(option, choices=CACHE_TYPES, help=f"type of the cache of {told} ({value})")
        group.add_argument(
            "--swa-full",
            choices=("on", "off"),
            help="whether layers with a sliding window keep all positions, or those that a next token can see (on)",
        )
    group.add_argument("--no-mmap", action="store_true", help="read the weights instead of mapping the file")
    group.add_argument(
        "--timeout",
        type=seconds,
        default=REQUEST_TIMEOUT,
        metavar="SECONDS",
        help=f"give up on a worker that is silent for so long ({REQUEST_TIMEOUT:g}; while it loads, at least "
        f"{LOAD_TIMEOUT:g})",
    )
    # For tests: a worker that was built elsewhere.
    group.add_argument("--worker", type=file_name, help=argparse.SUPPRESS)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the options ask for."""
    return Settings(
        threads=options.threads,
        ctx=options.ctx,
        batch=options.batch,
        ubatch=min(options.ubatch, options.batch),
        swa_full=options.swa_full == "on",
        flash_attn=options.flash_attn == "on",
        type_k=options.type_k,
        type_v=options.type_v,
        mmap=not options.no_mmap,
    )


def real(minimum: float, maximum: float) -> Any:
    """An argparse type: a number from ``minimum`` to ``maximum``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {minimum:g} to {maximum:g}")
        return value

    return parse


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options for how tokens are drawn."""
    group = parser.add_argument_group("sampling (llama.cpp's samplers; without --temperature the most likely token)")

    def option(name: str, kind: Any, value: float, told: str) -> None:
        group.add_argument(name, type=kind, default=value, metavar="X", help=f"{told} ({value:g})")

    usual = Sampling()
    option("--temperature", real(0, 1000), usual.temperature, "what logits are divided by")
    option("--top-k", number(0, 1 << 30), usual.top_k, "the K most likely tokens alone; 0: all")
    option("--top-p", real(0, 1), usual.top_p, "the most likely tokens up to this share alone")
    option("--min-p", real(0, 1), usual.min_p, "tokens of at least this share of the most likely one's alone")
    option("--repeat-penalty", real(0.001, 1000), usual.repeat_penalty, "what repeated tokens' logits are divided by")
    option("--repeat-last-n", number(0, 1 << 20), usual.repeat_last_n, "how far back a token counts as repeated")
    option("--seed", number(0, (1 << 32) - 1), usual.seed, "of the draws")


def sampling_of(options: argparse.Namespace) -> Sampling:
    """How tokens are to be drawn."""
    return Sampling(**{field.name: getattr(options, field.name) for field in fields(Sampling)})


def worker_program(options: argparse.Namespace) -> Path:
    """The shard worker of the patched build, built first if need be."""
    given: Path | None = options.worker
    return given if given is not None else build("patched").worker


@dataclass
class Run:
    """The workers of one run: the split pipeline, checked or not, and the unsplit one beside it.

    ``texts`` is the worker that turns text into tokens and back.
    """

    plan: Plan
    split: Pipeline
    reference: Pipeline | None
    texts: Worker

    def shards(self) -> list[dict[str, Any]]:
        """Memory of each shard as it is now, and its node if Ray has placed it."""
        found = []
        for shard, worker in self._pairs(self.split):
            found.append(_memory(shard.layer_range, shard.raw, worker.statistics()))
            if isinstance(worker, RayWorker):
                found[-1]["node"] = worker.node
        return found

    def unsplit(self) -> dict[str, Any] | None:
        """Memory of the unsplit worker as it is now."""
        if self.reference is None:
            return None
        shard, worker = next(self._pairs(self.reference))
        return _memory(shard.layer_range, shard.raw, worker.statistics())

    @staticmethod
    def _pairs(pipeline: Pipeline) -> Iterator[tuple[Any, Any]]:
        return zip(pipeline.shards, pipeline.workers, strict=True)


def local(pipeline: Pipeline) -> list[LocalWorker]:
    """The workers of a pipeline that was made of local ones."""
    return [worker for worker in pipeline.workers if isinstance(worker, LocalWorker)]


def _memory(layers: tuple[int, int], described: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "range": list(layers),
        "resident_bytes": counters["resident_bytes"],
        "weight_bytes": described["weight_bytes"],
        "kv_bytes": described.get("kv_bytes", 0),
    }


@dataclass(frozen=True)
class Hosts:
    """Where the shards of a run are when Ray places them: the cluster (None: one of our own), the path of the model
    there, and for each shard the name of a custom resource (none: anywhere)."""

    address: str | None
    model: Path
    resources: Sequence[str] = ()


@contextlib.contextmanager
def workers(
    program: Path,
    model: Path,
    plan: Plan,
    settings: Settings,
    *,
    check: bool,
    unsplit: bool,
    fault: Fault | None = None,
    timeout: float | None = REQUEST_TIMEOUT,
    direct: Mapping[str, Any] | None = None,
    processors: Sequence[Sequence[int]] = (),
) -> Iterator[Run]:
    """Start the shards (and the unsplit worker), and close every one of them at the end, whatever happens.

    Bundles pass through this process; or, with ``direct``, the options of a :class:`FlowPipeline`, from worker to
    worker. ``processors`` are those of each shard, empty: all for all.
    """
    started: list[LocalWorker] = []
    try:
        ranges = list(plan)
        asked = [*ranges, *([(0, plan.n_layer)] if unsplit else [])]
        started = start_workers(program, model, asked, settings, timeout, processors=processors)
        ours = started[: len(ranges)]
        split = (
            Pipeline(ours, CheckedRelay(fault) if check else None) if direct is None else FlowPipeline(ours, **direct)
        )
        reference = Pipeline(started[len(ranges) :]) if unsplit else None
        yield Run(plan, split, reference, ours[-1])
    finally:
        close_workers(started)


@contextlib.contextmanager
def ray_workers(
    program: Path,
    model: ModelFile,
    plan: Plan,
    settings: Settings,
    hosts: Hosts,
    *,
    check: bool,
    unsplit: bool,
    fault: Fault | None = None,
    timeout: float | None = REQUEST_TIMEOUT,
    hosts_program: Path | None = None,
) -> Iterator[Run]:
    """The same with the shards in actors that Ray places. One worker stays here: the unsplit one, or else one of the
    first layer. It has the vocabulary, and tells what the model's fingerprint is to be."""
    started: list[LocalWorker] = []
    with ray_cluster(hosts.address, settings.threads * len(plan)):
        try:
            started = start_workers(program, model.path, [(0, plan.n_layer if unsplit else 1)], settings, timeout)
            here = started[0].describe()
            sizes = model_sizes(model, model_tensors(model), family_of(model), settings)
            split = RayPipeline(
                hosts.model,
                plan,
                settings,
                program=hosts_program,
                # On this host alone there is nothing to choose from.
                memory=memory_needs(sizes, plan) if hosts.address is not None else (),
                resources=hosts.resources,
                fingerprint=here.fingerprint,
                relay=CheckedRelay(fault) if check else None,
                timeout=timeout,
                on_loss=_tell_loss,
            )
            try:
                yield Run(plan, split, Pipeline(started) if unsplit else None, started[0])
            finally:
                split.close()
        finally:
            close_workers(started)


def _tell_loss(error: WorkerError) -> None:
    print(f"{shown(str(error))}; the shards are placed anew", file=sys.stderr, flush=True)


class Printer:
    """Writes text as it is generated: whole characters only, and nothing that a terminal would obey."""

    def __init__(self, worker: Worker, eos: Sequence[int], *, echo: bool = True) -> None:
        self._worker = worker
        self._eos = frozenset(eos)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._terminal = sys.stdout.isatty()
        self._echo = echo
        self.text = ""

    def __call__(self, token: int) -> None:
        if token not in self._eos:
            self._put(self._decoder.decode(b"".join(self._worker.detokenize([token]))))

    def finish(self) -> str:
        """Write what is left of a character, end the line, and return the whole text."""
        self._put(self._decoder.decode(b"", True))
        if self._echo:
            print(flush=True)
        return self.text

    def _put(self, text: str) -> None:
        self.text += text
        if self._echo and text:
            print(text.translate(_CONTROL) if self._terminal else text, end="", flush=True)


def shown(path: Path | str) -> str:
    """A file's name, with nothing in it that a terminal would obey."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], str(path))


def write_parts(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write the whole file or none of it (:mod:`boundary_bundle.writing`). Raises CommandError."""
    # What is still buffered comes first if both go to the same place.
    sys.stdout.flush()
    try:
        write_whole(path, parts)
    except OSError as error:
        raise CommandError(f"cannot write {shown(path)}: {error.strerror or error}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the JSON, whole or not at all. Raises CommandError."""
    write_parts(path, [json.dumps(content, indent=2).encode("ascii") + b"\n"])


def check_target(path: Path | None, *inputs: Path | None) -> None:
    """Refuse, before any work is done, a place that cannot be written, or that is one of the ``inputs``."""
    if path is None:
        return
    reason = obstacle(path)
    if reason is not None:
        raise CommandError(f"cannot write {shown(path)}: {reason}")
    for other in inputs:
        with contextlib.suppress(OSError, ValueError):
            if other is not None and os.path.samefile(path, other):
                raise CommandError(f"cannot write {shown(path)}: it is the file {shown(other)} that is read")


def require_regular(path: Path, do: str = "read") -> None:
    """Refuse what is there but no regular file: reading a pipe may wait for ever, a device may have no end."""
    with contextlib.suppress(OSError, ValueError):
        if not is_regular(os.stat(path)):
            raise CommandError(f"cannot {do} {shown(path)}: it is not a regular file")


_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)(?:([KMGT])(i?))?B?")


def size(text: str) -> int:
    """An argparse type: a number of bytes above 0, such as 800M, 4G (powers of 1000) or 3.5Gi (powers of 1024)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size such as 800M, 4G or 3.5Gi (K, M, G, T: powers of 1000; Ki, Mi, Gi, Ti: of 1024)"
        )
    power = 0 if match[2] is None else "KMGT".index(match[2]) + 1
    found = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power)
    if not 0 < found < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0 and below 8 EiB")
    return found


def file_name(text: str) -> Path:
    """An argparse type: the name of a file or folder. The empty one would mean the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def check_prompt(text: str) -> None:
    """Refuse, before a worker is started, a prompt that is not text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CommandError(f"the prompt is not UTF-8: its character {error.start + 1} is a byte on its own") from None


def counted(count: int, what: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def hops_of(run: Run, generation: Generation) -> list[dict[str, Any]]:
    """One entry a hop: means over its bundles, in bytes and microseconds."""
    found = []
    for hop, layer in enumerate(run.plan.cuts):
        mean = generation.hop(hop)
        found.append(
            {
                "layer": layer,
                "bundles": len(generation.all_steps),
                "bytes": mean.bytes,
                "encode_us": round(mean.encode_us, 2),
                "decode_us": round(mean.decode_us, 2),
                "python_decode_us": round(mean.python_decode_us, 2),
                "python_encode_us": round(mean.python_encode_us, 2),
                "transfer_us": round(mean.transfer_us, 2),
                "wait_us": round(mean.wait_us, 2),
            }
        )
    return found


def require_room(settings: Settings, n_prompt: int, n_tokens: int) -> None:
    """Refuse a prompt that does not fit, before anything is computed."""
    if n_prompt == 0:
        raise CommandError("the prompt has no tokens")
    if n_prompt + n_tokens - 1 > settings.ctx:
        raise CommandError(
            f"a prompt of {counted(n_prompt, 'token')} and {n_tokens:,} more need a context of "
            f"{n_prompt + n_tokens - 1:,}, "
            f"but --ctx is {settings.ctx}"
        )


def rate(value: float | None) -> float | None:
    """Tokens per second, rounded for output."""
    return None if value is None else round(value, 3)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: with lines and colour on a terminal that has rich, aligned columns elsewhere.

    The first column is aligned left, the others right.
    """
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            # Not the table's own title, which would wrap at the table's width.
            print_styled(title, "bold")
            table = Table(box=SIMPLE_HEAD, header_style="cyan")
            for place, column in enumerate(columns):
                table.add_column(column, justify="right" if place else "left", no_wrap=place == 0)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def print_styled(text: str, style: str) -> None:
    """One line, in ``style`` on a terminal that has rich."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
            return
    print(text)
