"""``boundary-bundle inspect``: every byte of a file, field by field, up to the damage if there is any."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from ..anatomy import Anatomy, FrameView, Row, dissect
from ..errors import ERRORS
from . import page
from .common import CommandError, check_target, file_name, number, shown
from .files import add_file_options, error_json, plain, print_json, read_file, write_file

#: Bytes a line, and the columns that they take.
_LINE = 16
_WIDTHS = (10, 3 * _LINE - 1, 15, 24)
_STYLES = {"offset": "dim", "bytes": "cyan", "field": "bold", "value": "green", "meaning": ""}


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show every byte of a file with its meaning",
        description="Show a file field by field: offset, bytes, field, value, meaning. A damaged file is shown up to "
        "the damage. Exit status 0: sound. 1: damaged. 2: it could not be read.",
    )
    parser.add_argument("file", type=file_name, metavar="FILE", help="a datastream, whole or damaged")
    parser.add_argument("--html", action="store_true", help="one self-contained page instead of text")
    parser.add_argument("-o", "--output", type=file_name, metavar="FILE", help="write the page there (with --html)")
    parser.add_argument("--force", action="store_true", help="replace the output file if it is there")
    parser.add_argument(
        "--payload", type=number(0, 1 << 20), default=64, metavar="BYTES", help="bytes of each payload to show (64)"
    )
    parser.add_argument(
        "--frames", type=number(2, 1 << 20), default=64, metavar="N", help="frames to show, besides heads (64)"
    )
    add_file_options(parser)
    parser.set_defaults(function=inspect)


def inspect(options: argparse.Namespace) -> int:
    """The command."""
    if options.json and options.html:
        raise CommandError("--json and --html are two forms of the same: give one of them")
    if options.output is not None and not options.html:
        raise CommandError("--output is for --html")
    check_target(options.output, options.file)
    data = read_file(options.file, options.max_size)
    found = dissect(data, payload_bytes=options.payload, max_frames=options.frames)
    name = shown(options.file)
    if options.json:
        print_json(_json(found, name))
    elif options.html:
        text = page.render(found, shown(options.file.name), damage(found))
        if options.output is None:
            sys.stdout.write(text)
        else:
            write_file(options.output, [text.encode("utf-8")], replace=options.force)
    else:
        _print(found, name)
    return 0 if found.error is None else 1


def _json(found: Anatomy, name: str) -> dict[str, Any]:
    return {
        "file": name,
        "bytes": found.size,
        "sound": found.error is None,
        "error": None if found.error is None else error_json(found.error),
        "frames": [
            {
                "index": frame.index,
                "offset": frame.offset,
                "bytes": frame.size,
                "kind": frame.kind,
                "title": frame.title,
                "fields": [_row_json(row) for row in frame.rows],
            }
            for frame in found.frames
        ],
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "offset": row.offset,
        "size": row.size,
        "bytes": row.data.hex(),
        "section": row.section,
        "field": row.field,
        "value": row.value,
        "meaning": row.meaning,
        "damaged": row.damaged,
    }


Line = list[tuple[str, str]]


def _lines(found: Anatomy, name: str) -> Iterator[Line]:
    """Lines of text as (text, style) pairs; on a pipe the styles are left out."""
    yield [(f"{name}: {found.size:,} bytes", "bold")]
    yield _line("offset", "bytes", "field", "value", "meaning", "dim")
    for frame in found.frames:
        yield from _frame_lines(frame)
    if found.skipped:
        yield [(f"... {_frames(found.skipped)} more", "dim")]
    yield []
    error = found.error
    if error is None:
        count = len(found.heads)
        yield [(f"sound: {count} {'bundle' if count == 1 else 'bundles'}", "bold green")]
        return
    yield [(f"damaged: {error.name} ({error.number}): {ERRORS[error.name][1]}", "bold red")]
    for label, value in damage(found):
        yield [(f"  {label:<9}", "dim"), (value, "red")]


def damage(found: Anatomy) -> list[tuple[str, str]]:
    """What the error says, as labels and values."""
    error = found.error
    if error is None:
        return []
    rows = [
        ("offset", None if error.offset is None else f"{error.offset} ({error.offset:#x})"),
        ("frame", error.frame),
        ("tensor", error.tensor),
        ("field", error.field),
        ("expected", error.expected),
        ("found", error.found),
    ]
    crc = (error.field or "").endswith("_crc")
    return [
        (label, f"{value:#010x}" if crc and isinstance(value, int) and label in ("expected", "found") else _said(value))
        for label, value in rows
        if value is not None
    ]


def _said(value: Any) -> str:
    told = plain(value)
    return ascii(told)[1:-1] if isinstance(told, str) else str(told)


def _frames(count: int) -> str:
    return f"{count:,} {'frame' if count == 1 else 'frames'}"


def _frame_lines(frame: FrameView) -> Iterator[Line]:
    if frame.skipped:
        yield [(f"... {_frames(frame.skipped)} not shown", "dim")]
    yield []
    yield [(f"frame {frame.index}: {frame.title}, {frame.size:,} bytes", "bold yellow")]
    section = None
    for row in frame.rows:
        if row.section != section:
            section = row.section
            yield [(f"  {section}", "yellow")]
        style = "bold red" if row.damaged else None
        chunks = [row.data[at : at + _LINE] for at in range(0, len(row.data), _LINE)] or [b""]
        # Zeros say nothing twice.
        if row.field == "padding" and len(chunks) > 1 and not any(row.data):
            chunks = chunks[:1]
        for index, chunk in enumerate(chunks):
            offset = f"{row.offset + index * _LINE:08x}"
            if index:
                yield _line(offset, chunk.hex(" "), "", "", "", style)
            else:
                mark = " <-- damage" if row.damaged else ""
                yield _line(offset, chunk.hex(" "), row.field, row.value, row.meaning + mark, style)
        hidden = row.size - sum(map(len, chunks))
        if hidden > 0 and not row.damaged:
            yield _line("", f"... {hidden:,} more bytes", "", "", "", style)


def _line(offset: str, octets: str, field: str, value: str, meaning: str, style: str | None) -> Line:
    cells = zip((offset, octets, field, value), _STYLES, _WIDTHS, strict=False)
    line = [(f"{text:<{width}}  ", style or _STYLES[name]) for text, name, width in cells]
    return [("  ", ""), *line, (meaning, style or "")]


def _print(found: Anatomy, name: str) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console()
            for line in _lines(found, name):
                console.print(Text.assemble(*line), soft_wrap=True)
            return
    for line in _lines(found, name):
        print("".join(text for text, _ in line).rstrip())


__all__ = ["add_command", "damage", "inspect"]
