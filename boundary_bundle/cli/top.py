"""``boundary-bundle top``: what a service, its shards and its sessions are doing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..shards.client import Client, ServiceError
from . import common
from .common import CommandError, print_table, shown

_MB = 1e6
#: How much of a session's id is shown, in hexadecimal digits.
_SHORT = 8
_COUNTS = ("decodes", "replays", "replayed_tokens", "evictions", "resets", "restarts", "waits")

Table = tuple[str, list[str], list[list[str]]]


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="watch a service: shards, sessions, outcomes, rates",
        description="Show the shards of a service with their memory and speed, its sessions, and what became of "
        "requests for them, again and again. Ctrl-C ends it. Exit status 0: shown. 2: there is no service, or it has "
        "ended.",
    )
    parser.add_argument(
        "--socket", type=common.file_name, metavar="PATH", help="where the service listens (as serve does by default)"
    )
    parser.add_argument("--once", action="store_true", help="show it once; rates are those since the start")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--interval", type=common.seconds, default=1.0, metavar="S", help="seconds between two looks (1)"
    )
    parser.set_defaults(function=top)


def top(options: argparse.Namespace) -> int:
    """The command."""
    try:
        with Client(options.socket) as client:
            looks = _looks(client, options.interval, once=options.once)
            if options.json:
                for look in looks:
                    print(json.dumps(look), flush=True)
            else:
                _show(looks, live=not options.once)
    except ServiceError as error:
        raise CommandError(error.cause if error.code == 0 else str(error)) from None
    except KeyboardInterrupt:
        pass
    return 0


def _looks(client: Client, interval: float, *, once: bool) -> Iterator[dict[str, Any]]:
    before: dict[str, Any] | None = None
    while True:
        found = client.status() | {"time": time.time(), "socket": str(client.path)}
        look = with_rates(found, before)
        yield look
        if once:
            return
        before = look
        time.sleep(interval)


def with_rates(now: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The status, each shard of it with ``tokens_per_second``, ``busy`` (the part of the time in which it computes) and
    ``compute_share`` (of what all shards compute together), since ``before`` or, without it, since the shard's start.
    """
    computed = []
    # By process: a service that was started anew in the meantime may have another number of shards.
    known = {} if before is None else {shard["pid"]: shard["counters"] for shard in before["shards"]}
    for shard in now["shards"]:
        earlier: Mapping[str, Any] = known.get(shard["pid"], {})
        spent, tokens, compute = (
            float(shard["counters"].get(key, 0)) - float(earlier.get(key, 0))
            for key in ("uptime_ms", "tokens", "compute_us")
        )
        shard["tokens_per_second"] = round(tokens / spent * 1000, 3) if spent > 0 else 0.0
        shard["busy"] = round(compute / spent / 1000, 4) if spent > 0 else 0.0
        computed.append(compute)
    for shard, compute in zip(now["shards"], computed, strict=True):
        shard["compute_share"] = round(compute / sum(computed), 4) if sum(computed) > 0 else 0.0
    return now


def _show(looks: Iterator[dict[str, Any]], *, live: bool) -> None:
    if live and sys.stdout.isatty():
        _show_live(looks)
        return
    for place, look in enumerate(looks):
        if place:
            print()
        _print(look)


def _show_live(looks: Iterator[dict[str, Any]]) -> None:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        for look in looks:
            # Home, and nothing left of what was there.
            print("\x1b[H\x1b[2J", end="")
            _print(look)
        return
    with Live(screen=True, auto_refresh=False) as display:
        for look in looks:
            parts: list[Any] = [
                Text(line, style="bold" if place == 0 else "") for place, line in enumerate(_head(look))
            ]
            for title, columns, rows in _tables(look):
                # Not the table's own title, which would wrap at the table's width.
                parts.append(Text(f"\n{title}", style="bold"))
                table = RichTable(box=SIMPLE_HEAD, header_style="cyan", collapse_padding=True, pad_edge=False)
                for place, column in enumerate(columns):
                    table.add_column(column, justify="right" if place else "left", no_wrap=True)
                for row in rows:
                    table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
                parts.append(table)
            display.update(Group(*parts), refresh=True)


_STYLES = {"hot": "green", "cold": "dim", "lost": "bold red"}


def _print(look: Mapping[str, Any]) -> None:
    print("\n".join(_head(look)))
    for title, columns, rows in _tables(look):
        print()
        print_table(title, columns, rows)
    sys.stdout.flush()


def _head(look: Mapping[str, Any]) -> list[str]:
    service, model = look["service"], look["model"]
    clients = common.counted(service["connections"], "client")
    counts = ", ".join(f"{key.replace('_', ' ')} {look[key]:,}" for key in _COUNTS)
    outcomes = ", ".join(f"{name} {count:,}" for name, count in look["outcomes"].items() if count)
    return [
        f"{shown(model['architecture'])}, {model['n_layer']} layers, on {shown(look['socket'])} "
        f"(process {service['pid']}, up {duration(service['uptime_s'])})",
        f"{clients}, {service['waiting']} waiting, {look['tokens_per_second']:.1f} tokens/s, "
        f"{look['decodes_per_second']:.1f} batches/s, {service['requests']:,} requests, {service['errors']:,} refused",
        counts,
        f"outcomes on the shards: {outcomes or 'none'}",
    ]


def _tables(look: Mapping[str, Any]) -> Iterator[Table]:
    # The sessions last: they may be more than a screen has lines.
    rows = []
    for place, shard in enumerate(look["shards"], start=1):
        start, end = shard["range"]
        rows.append(
            [
                f"{place}",
                f"{start} to {end - 1}",
                f"{shard['pid']}" if shard["alive"] else "lost",
                *(_megabytes(shard[key]) for key in ("weight_bytes", "kv_bytes", "resident_bytes")),
                f"{shard['tokens_per_second']:.1f}",
                f"{shard['compute_share']:.0%}",
                f"{shard['busy']:.0%}",
                f"{shard['restarts']}",
            ]
        )
    columns = ["shard", "layers", "process", "weights", "KV", "resident", "tokens/s", "compute", "busy", "restarts"]
    yield "shards (MB)", columns, rows
    rows = []
    for session in sorted(look["sessions"], key=lambda session: session["idle"]):
        size = session["kv_bytes"]
        rows.append(
            [
                session["id"][:_SHORT],
                f"+{session['epochs']}",
                f"{session['position']:,}",
                "-" if size is None else f"{size:,}",
                "hot" if session["hot"] else "cold",
                f"{session['clients']}",
                duration(session["age"]),
                duration(session["idle"]),
            ]
        )
    title = f"sessions ({look['present']} of {look['slots']} places taken, {look['positions']:,} positions each)"
    yield title, ["session", "epoch", "positions", "KV bytes", "state", "clients", "age", "idle"], rows


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / _MB:.1f}"


def duration(seconds: float) -> str:
    """``3s``, ``2m05s``, ``1h02m``, ``4d03h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
