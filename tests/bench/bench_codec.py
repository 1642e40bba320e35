"""Every codec on the same tensors, side by side in one run.

``make bench``, or ``python tests/bench/bench_codec.py [--plot FILE] [--json FILE] [--cpu-time]``.

Equal work: whoever encodes turns a numpy array into bytes that carry its name, dtype,
shape and values, and computes a CRC32C over the payload; whoever decodes checks that
CRC32C and gives a numpy array with its name. The checksum comes from the same wheel for
all. The bundles' own further checks (headers, padding, limits) come on top of that.

Rounds alternate between the peers, so that what else the machine does falls on all
alike. The table gives the median over the rounds, the best round, and the ratio to the
fastest peer, of medians and of best rounds; on a shared machine the best rounds tell
more. With ``--cpu-time`` the time counts during which this thread ran: what a caller
waits for on a machine that is otherwise idle, and nearly that on a busy one. Nothing here
asserts a time.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import pickle
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from boundary_bundle import (
    ANY,
    AnyValue,
    Bundle,
    Contract,
    Decoder,
    PreparedDecoder,
    PreparedEncoder,
    Tensor,
    TensorRule,
    decode,
    encode,
    encode_parts,
)

Call = Callable[[int], Any]
Clock = Callable[[], float]


@dataclass
class Entry:
    """One codec in one direction. Neither ``ours`` nor a yardstick is a peer."""

    name: str
    call: Call
    ours: bool = False
    yardstick: bool = False
    calls: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def best(self) -> float:
        return min(self.times)


@dataclass
class Group:
    """Entries that do the same work on the same tensors."""

    title: str
    payload: int
    entries: list[Entry]
    #: Ratios are to this entry, or to the fastest peer.
    base: str | None = None
    #: What the issue asks for: entry -> greatest ratio.
    targets: dict[str, float] = field(default_factory=dict)

    def baseline(self) -> Entry:
        if self.base is not None:
            return next(entry for entry in self.entries if entry.name == self.base)
        return min(
            (entry for entry in self.entries if not entry.ours and not entry.yardstick), key=lambda entry: entry.best
        )


def clocked(call: Call, calls: int, clock: Clock) -> float:
    """Seconds a call, over ``calls`` of them."""
    numbers = range(calls)
    begin = clock()
    for number in numbers:
        call(number)
    return (clock() - begin) / calls


def measure(groups: list[Group], rounds: int, round_seconds: float, clock: Clock) -> None:
    entries = [entry for group in groups for entry in group.entries]
    for entry in entries:
        entry.call(0)
        once = max(clocked(entry.call, 3, clock), 1e-7)
        entry.calls = max(1, min(1000, int(round_seconds / once)))
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            # Each round starts with another entry: nobody always follows the same one.
            for place in range(len(entries)):
                entry = entries[(place + turn) % len(entries)]
                # The first call finds another's data in the cache; it is not counted.
                entry.call(0)
                entry.times.append(clocked(entry.call, entry.calls, clock))
    finally:
        gc.enable()


# Peers: name -> (encode(array) -> bytes, decode(bytes) -> array), checksum included.


def _protobuf() -> Any:
    """A message of name, dtype, shape and data, without a compiler."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Tensor")
    kinds = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind, label) in enumerate(
        (
            ("name", kinds.TYPE_STRING, kinds.LABEL_OPTIONAL),
            ("dtype", kinds.TYPE_STRING, kinds.LABEL_OPTIONAL),
            ("shape", kinds.TYPE_INT64, kinds.LABEL_REPEATED),
            ("data", kinds.TYPE_BYTES, kinds.LABEL_OPTIONAL),
            ("crc", kinds.TYPE_FIXED32, kinds.LABEL_OPTIONAL),
        ),
        1,
    ):
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Tensor"))


def peers(array: Any) -> dict[str, tuple[Call, Call]]:
    """Encoders and decoders of one array, called 'residual'."""
    import msgpack
    import msgpack_numpy
    import pyarrow as pa
    from safetensors.numpy import load, save

    name = "residual"
    # The array as it comes back is checked against the checksum that went along.
    stated = crc32c(array)

    def check(decoded: Any) -> Any:
        if crc32c(decoded) != stated:
            raise ValueError("the checksum differs")
        return decoded

    found: dict[str, tuple[Call, Call]] = {}

    def safetensors_encode(_: int) -> bytes:
        crc32c(array)
        return save({name: array})

    made = safetensors_encode(0)
    found["safetensors"] = safetensors_encode, lambda _: check(load(made)[name])

    def arrow_encode(_: int) -> Any:
        crc32c(array)
        sink = pa.BufferOutputStream()
        pa.ipc.write_tensor(pa.Tensor.from_numpy(array, dim_names=[name, ""]), sink)
        return sink.getvalue()

    arrow = arrow_encode(0)
    found["pyarrow IPC tensor"] = (
        arrow_encode,
        lambda _: check(pa.ipc.read_tensor(pa.BufferReader(arrow)).to_numpy()),
    )

    def msgpack_encode(_: int) -> bytes:
        return msgpack.packb({name: array, "crc": crc32c(array)}, default=msgpack_numpy.encode)

    packed = msgpack_encode(0)
    found["msgpack-numpy"] = (
        msgpack_encode,
        lambda _: check(msgpack.unpackb(packed, object_hook=msgpack_numpy.decode)[name]),
    )

    def pickle_encode(_: int) -> bytes:
        return pickle.dumps({name: array, "crc": crc32c(array)}, 5)

    pickled = pickle_encode(0)
    found["pickle 5"] = pickle_encode, lambda _: check(pickle.loads(pickled)[name])

    message = _protobuf()

    def protobuf_encode(_: int) -> bytes:
        return message(
            name=name, dtype=array.dtype.str, shape=array.shape, data=array.tobytes(), crc=crc32c(array)
        ).SerializeToString()

    def protobuf_decode(_: int) -> Any:
        read = message.FromString(serialized)
        return check(np.ndarray(tuple(read.shape), read.dtype, read.data))

    serialized = protobuf_encode(0)
    found["protobuf"] = protobuf_encode, protobuf_decode

    def save_encode(_: int) -> bytes:
        crc32c(array)
        stream = io.BytesIO()
        np.save(stream, array)
        return stream.getvalue()

    saved = save_encode(0)
    found["np.save"] = save_encode, lambda _: check(np.load(io.BytesIO(saved)))
    return found


def small_groups(kilobytes: int) -> list[Group]:
    """One f32 tensor, as every codec takes it; then a decode step, as only bundles carry it."""
    width = kilobytes * 256
    array = np.random.default_rng(1).standard_normal((1, width), np.float32)
    contract = Contract([TensorRule("residual", "f32", ("tokens", width), 0)])
    encoder, decoder = PreparedEncoder(contract), PreparedDecoder(contract)

    def bundle(number: int) -> Bundle:
        return Bundle([Tensor("residual", array, token_axis=0)], number=number)

    # The number changes from call to call, as it does from step to step.
    ready = [encode(bundle(number)) for number in range(64)]
    encoding = [
        Entry("bundle, prepared", lambda n: encoder.encode((array,), number=n), ours=True),
        Entry("bundle, prepared parts", lambda n: encoder.encode_parts((array,), number=n), ours=True),
        Entry("bundle", lambda n: encode(bundle(n)), ours=True),
        Entry("bundle, parts", lambda n: encode_parts(bundle(n)), ours=True),
    ]
    decoding = [
        Entry("bundle, prepared", lambda n: decoder.decode(ready[n & 63]), ours=True),
        Entry("bundle", lambda n: decode(ready[n & 63]), ours=True),
        Entry("bundle, Decoder", lambda n: Decoder().feed(ready[n & 63]), ours=True),
    ]
    for name, (encode_peer, decode_peer) in peers(array).items():
        encoding.append(Entry(name, encode_peer))
        decoding.append(Entry(name, decode_peer))
    targets = {"bundle, prepared": 1.5, "bundle": 3.0}
    title = f"one f32 tensor of {kilobytes} KB"
    return [
        Group(f"encode {title}", array.nbytes, encoding, targets=targets),
        Group(f"decode {title}", array.nbytes, decoding, targets=targets),
    ]


def step_groups() -> list[Group]:
    """A decode step of one token: residual, positions, membership, session table, six attributes."""
    arrays = [
        np.zeros((1, 4096), np.float32),
        np.zeros(1, np.int32),
        np.array([0, 1], np.uint32),
        np.zeros(1, np.uint32),
        np.zeros((1, 16), np.uint8),
        np.zeros(1, np.uint64),
        np.zeros(1, np.int64),
    ]
    rules = [
        TensorRule("residual", "f32", ("tokens", 4096), 0),
        TensorRule("positions", "i32", ("tokens",), 0),
        TensorRule("seq_offsets", "u32", ("tokens+1",)),
        TensorRule("seq_ids", "u32", ("members",)),
        TensorRule("session_ids", "u8", ("sequences", 16)),
        TensorRule("session_epochs", "u64", ("sequences",)),
        TensorRule("session_positions", "i64", ("sequences",)),
    ]
    contract = Contract(
        rules,
        {"n_layer": 30, "architecture": "llama", "n_tokens": ANY, "n_seqs": ANY, 0x4001: AnyValue("u64")},
    )
    encoder, decoder = PreparedEncoder(contract), PreparedDecoder(contract)

    def attributes(number: int) -> dict[Any, Any]:
        return {"n_tokens": 1, "n_seqs": 1, 0x4001: number}

    def change(number: int) -> None:
        arrays[1][0] = arrays[6][0] = number
        arrays[5][0] = number >> 4

    def prepared(number: int) -> bytes:
        change(number)
        return encoder.encode(arrays, attributes(number), number=number)

    def plain(number: int) -> bytes:
        change(number)
        return encode(
            Bundle(
                [
                    Tensor(rule.name, array, token_axis=rule.token_axis)
                    for rule, array in zip(rules, arrays, strict=True)
                ],
                {"n_layer": 30, "architecture": "llama", **attributes(number)},
                number=number,
            )
        )

    ready = [plain(number) for number in range(64)]
    if ready != [prepared(number) for number in range(64)]:
        raise SystemExit("error: the prepared encoder writes something else")
    size = sum(array.nbytes for array in arrays)
    title = "a decode step, 7 tensors and 5 attributes"
    return [
        Group(
            f"encode {title}",
            size,
            [Entry("bundle, prepared", prepared, ours=True), Entry("bundle", plain, ours=True)],
            base="bundle",
        ),
        Group(
            f"decode {title}",
            size,
            [
                Entry("bundle, prepared", lambda n: decoder.decode(ready[n & 63]), ours=True),
                Entry("bundle", lambda n: decode(ready[n & 63], contract=contract), ours=True),
            ],
            base="bundle",
        ),
    ]


def large_groups(megabytes: int) -> list[Group]:
    """One large tensor: copies and the checksum are what counts. Throughput in GB/s is in the table."""
    count = megabytes << 18
    array = np.random.default_rng(2).standard_normal(count, np.float32).reshape(-1, 4096)
    bundle = Bundle([Tensor("residual", array, token_axis=0)])
    data = encode(bundle)
    contract = Contract([TensorRule("residual", "f32", ("tokens", 4096), 0)])
    encoder, decoder = PreparedEncoder(contract), PreparedDecoder(contract)
    encoding = [
        Entry("plain copy (bytes)", lambda _: array.tobytes(), yardstick=True),
        Entry("CRC32C alone", lambda _: crc32c(array), yardstick=True),
        Entry("bundle, parts", lambda _: encode_parts(bundle), ours=True),
        Entry("bundle, prepared parts", lambda _: encoder.encode_parts((array,)), ours=True),
        Entry("bundle", lambda _: encode(bundle), ours=True),
        Entry("bundle, prepared", lambda _: encoder.encode((array,)), ours=True),
    ]
    decoding = [
        Entry("CRC32C alone", lambda _: crc32c(array), yardstick=True),
        Entry("bundle", lambda _: decode(data), ours=True),
        Entry("bundle, prepared", lambda _: decoder.decode(data), ours=True),
    ]
    for name, (encode_peer, decode_peer) in peers(array).items():
        encoding.append(Entry(name, encode_peer))
        decoding.append(Entry(name, decode_peer))
    return [
        Group(
            f"encode one f32 tensor of {megabytes} MB",
            array.nbytes,
            encoding,
            base="plain copy (bytes)",
            targets={"bundle": 2.0},
        ),
        Group(f"decode one f32 tensor of {megabytes} MB", array.nbytes, decoding, base="CRC32C alone"),
    ]


def fragment_groups() -> list[Group]:
    """Whether ten times the fragments cost more than ten times as much.

    Small ones, so that this is the cost of fragments and not of memory that one size
    fits into a cache and the other not.
    """
    made = {}
    for count in (1_000, 10_000):
        array = np.zeros(count * 64, np.uint8)
        made[count] = Bundle([Tensor("x", array)], fragment_size=64)
    encoded = {count: encode(bundle) for count, bundle in made.items()}

    def stream(count: int) -> None:
        decoder = Decoder("stream")
        data = encoded[count]
        for at in range(0, len(data), 65_536):
            decoder.feed(data[at : at + 65_536])
        decoder.finish()

    def entries(call: Callable[[int], Any]) -> list[Entry]:
        return [
            Entry("1,000 fragments", lambda _: call(1_000), ours=True),
            Entry("10,000 fragments", lambda _: call(10_000), ours=True),
        ]

    targets = {"10,000 fragments": 12.0}
    base = "1,000 fragments"
    return [
        Group("encode fragments of 64 bytes", 0, entries(lambda count: encode(made[count])), base, targets),
        Group("decode fragments of 64 bytes", 0, entries(lambda count: decode(encoded[count])), base, targets),
        Group("stream fragments of 64 bytes in pieces of 64 KB", 0, entries(stream), base, targets),
    ]


# Results


def rows_of(group: Group) -> list[dict[str, Any]]:
    base = group.baseline()
    rows = []
    for entry in group.entries:
        rows.append(
            {
                "name": entry.name,
                "ours": entry.ours,
                "median_us": entry.median * 1e6,
                "best_us": entry.best * 1e6,
                "ratio_of_medians": entry.median / base.median,
                "ratio_of_bests": entry.best / base.best,
                "gb_per_s": group.payload / entry.best / 1e9 if group.payload >= 1 << 20 else None,
                "target_ratio": group.targets.get(entry.name),
            }
        )
    return rows


def seconds(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.2f} us"
    return f"{microseconds / 1000:.2f} ms"


def show(groups: list[Group]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 110)
    for group in groups:
        table = Table(title=group.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.add_column("codec")
        for column in ("median", "best", "ratio of medians", "ratio of bests", "asked for", "GB/s"):
            table.add_column(column, justify="right")
        for row in rows_of(group):
            target = row["target_ratio"]
            style = ""
            if row["ours"]:
                style = "green" if target is None or row["ratio_of_bests"] <= target else "red"
            table.add_row(
                row["name"],
                seconds(row["median_us"]),
                seconds(row["best_us"]),
                f"{row['ratio_of_medians']:.2f}",
                f"{row['ratio_of_bests']:.2f}",
                "" if target is None else f"<= {target:g}",
                "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}",
                style=style,
            )
        console.print(table)
        console.print(f"  ratios to {group.baseline().name}\n", style="dim", highlight=False)


def plot(groups: list[Group], path: Path) -> None:
    """One panel a group, bars of the medians with a tick at the best round."""
    # Beside this file, where only a run of it looks.
    from picture import INK, OURS, PEER, YARDSTICK, pyplot, save

    columns = 2
    lines = math.ceil(len(groups) / columns)
    heights = [
        max(len(group.entries) for group in groups[line * columns : (line + 1) * columns]) + 2 for line in range(lines)
    ]
    figure, axes = pyplot().subplots(
        lines,
        columns,
        figsize=(13, 0.34 * sum(heights) + 0.6),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for group, axis in zip(groups, axes.flat, strict=False):
        entries = group.entries[::-1]
        unit, name = (1e6, "us") if max(entry.median for entry in entries) < 2e-3 else (1e3, "ms")
        values = [entry.median * unit for entry in entries]
        colours = [OURS if entry.ours else YARDSTICK if entry.yardstick else PEER for entry in entries]
        axis.barh([entry.name for entry in entries], values, color=colours, height=0.7)
        # One slow peer would flatten all the others.
        edge = min(max(values), 4 * statistics.median(values)) * 1.2
        base = group.baseline()
        for place, (entry, value) in enumerate(zip(entries, values, strict=True)):
            axis.plot([entry.best * unit] * 2, [place - 0.35, place + 0.35], color=INK, linewidth=1.2)
            label = f" {value:.3g} {name}, x{entry.median / base.median:.2f}"
            inside = value > 0.72 * edge
            axis.text(
                min(value, edge) * 0.985 if inside else value,
                place,
                label,
                va="center",
                ha="right" if inside else "left",
                fontsize=8,
                color=INK,
            )
        axis.set_xlim(0, edge)
        axis.set_title(f"{group.title}", fontsize=10, loc="left", fontweight="bold")
        axis.set_xlabel(f"median in {name} (line: best round; x: ratio to {base.name})", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    save(figure, path)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("numpy", "crc32c", "safetensors", "pyarrow", "msgpack", "msgpack-numpy", "protobuf", "ml_dtypes")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare codecs on the same tensors, side by side in one run.")
    parser.add_argument("--rounds", type=int, default=60, help="rounds over all codecs (60)")
    parser.add_argument("--round-ms", type=float, default=3.0, help="time a codec takes in one round (3)")
    parser.add_argument("--cpu-time", action="store_true", help="count only the time during which this thread runs")
    parser.add_argument("--only", metavar="TEXT", help="groups whose title has this text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .svg or .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything measured")
    options = parser.parse_args()
    if options.rounds < 1 or options.round_ms <= 0:
        parser.error("--rounds and --round-ms must be positive")
    if options.plot is not None and options.plot.suffix not in (".svg", ".png"):
        parser.error("--plot must end in .svg or .png")
    groups = [*small_groups(16), *step_groups(), *large_groups(16), *fragment_groups()]
    if options.only is not None:
        groups = [group for group in groups if options.only in group.title]
        if not groups:
            parser.error(f"no group's title has {options.only!r}")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    measure(groups, options.rounds, options.round_ms / 1000, clock)
    show(groups)
    if options.json is not None:
        content = {
            "versions": versions(),
            "rounds": options.rounds,
            "clock": "cpu" if options.cpu_time else "elapsed",
            "groups": [
                {"title": group.title, "base": group.baseline().name, "entries": rows_of(group)} for group in groups
            ],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    if options.plot is not None:
        plot(groups, options.plot)


if __name__ == "__main__":
    main()
