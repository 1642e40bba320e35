"""The page that ``inspect --html`` writes: one file, no script from elsewhere, nothing loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..anatomy import Anatomy, FrameView, Row
from ..errors import ERRORS

__all__ = ["render"]

_LINE = 16

_STYLE = """
:root {
  --paper: #fbfaf7; --ink: #22252b; --soft: #6b7078; --rule: #e4e1d9; --card: #ffffff; --shade: #f4f2ec;
  --head: #3b6fb6; --fragment: #2e8b6d; --end: #8a5fb0; --extension: #b5832b; --cut: #8d8d8d;
  --bad: #c0392b; --bad-paper: #fdeeec; --good: #2e8b57;
  --mono: ui-monospace, "SF Mono", "Cascadia Code", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181d; --ink: #e3e5e9; --soft: #969ca6; --rule: #2c3038; --card: #1d2027; --shade: #23272f;
    --head: #7fb0f0; --fragment: #6ccfae; --end: #c5a0ea; --extension: #e3b866; --cut: #9a9a9a;
    --bad: #ff8577; --bad-paper: #3a2220; --good: #7bd3a0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; font-weight: 650; margin: 0 0 .25rem; overflow-wrap: anywhere; }
.sub { color: var(--soft); margin: 0 0 1.5rem; }
.verdict { font-weight: 600; } .sound { color: var(--good); } .damaged { color: var(--bad); }
.strip { display: flex; gap: 3px; height: 2.2rem; margin: 0 0 .5rem; }
.strip a { flex: 1 1 0; min-width: 6px; border-radius: 5px; background: var(--kind); opacity: .85; }
.strip a:hover, .strip a:focus { opacity: 1; outline: 2px solid var(--ink); outline-offset: 1px; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; color: var(--soft); font-size: .85rem;
  margin: 0 0 2rem; }
.legend span::before { content: ""; display: inline-block; width: .75em; height: .75em; border-radius: 3px;
  background: var(--kind); margin-right: .45em; }
.k-head { --kind: var(--head); } .k-fragment { --kind: var(--fragment); } .k-end { --kind: var(--end); }
.k-extension { --kind: var(--extension); } .k-cut { --kind: var(--cut); } .k-bad { --kind: var(--bad); }
.panel { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; margin: 0 0 1.5rem;
  overflow: hidden; }
.panel h2 { font-size: 1rem; margin: 0; padding: .8rem 1.1rem; }
.damage { border-color: var(--bad); background: var(--bad-paper); padding: 1rem 1.1rem; }
.damage h2 { padding: 0 0 .5rem; color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; font-family: var(--mono); overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th { text-align: left; font-weight: 500; color: var(--soft); padding: .3rem 1.1rem;
  border-bottom: 1px solid var(--rule); }
td { padding: .22rem 1.1rem; vertical-align: top; }
.scroll { overflow-x: auto; padding-bottom: .5rem; }
.scroll + .scroll { margin-top: .75rem; }
details > summary { cursor: pointer; padding: .8rem 1.1rem; display: flex; gap: .9rem; align-items: baseline;
  border-left: 5px solid var(--kind); list-style: none; }
details > summary::-webkit-details-marker { display: none; }
details[open] > summary { border-bottom: 1px solid var(--rule); }
summary b { font-weight: 600; } summary .n { color: var(--soft); font-variant-numeric: tabular-nums; }
summary .r { margin-left: auto; color: var(--soft); font: .85rem var(--mono); }
.bytes tbody tr:hover { background: var(--shade); }
.section td { padding-top: .8rem; color: var(--kind); font-weight: 600; font-size: .82rem; letter-spacing: .02em; }
.o, .x, .v { font-family: var(--mono); white-space: pre; }
.o { color: var(--soft); user-select: none; } .x { letter-spacing: -.01em; }
.x i { font-style: normal; opacity: .32; } .v { white-space: normal; overflow-wrap: anywhere; max-width: 22rem; }
.m, .more { color: var(--soft); } .f { font-weight: 550; white-space: nowrap; }
tr.bad, tr.bad:hover { background: var(--bad-paper) !important; } tr.bad td { color: var(--bad); }
footer { color: var(--soft); font-size: .85rem; margin-top: 2rem; }
@media print { details:not([open]) > *:not(summary) { display: block; } tr { break-inside: avoid; } }
"""


def render(found: Anatomy, name: str, details: Sequence[tuple[str, str]]) -> str:
    """The whole page; ``details`` says what the error does. Everything from the file is escaped."""
    return "".join(_pieces(found, name, details))


def _pieces(found: Anatomy, name: str, details: Sequence[tuple[str, str]]) -> Iterator[str]:
    error = found.error
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(name)} - boundary bundle</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
    )
    count = len(found.heads)
    verdict = f"sound, {count} {'bundle' if count == 1 else 'bundles'}" if error is None else f"damaged: {error.name}"
    yield (
        f'<h1>{escape(name)}</h1>\n<p class="sub">{found.size:,} bytes, '
        f'<span class="verdict {"sound" if error is None else "damaged"}">{escape(verdict)}</span></p>\n'
    )
    yield from _strip(found)
    if error is not None:
        yield f'<section class="panel damage"><h2>{escape(ERRORS[error.name][1])}</h2>\n<dl>'
        yield f"<dt>error</dt><dd>{escape(error.name)} ({error.number})</dd>"
        for label, value in details:
            yield f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>"
        yield "</dl></section>\n"
    yield from _bundles(found)
    for frame in found.frames:
        yield from _frame(frame, len(found.frames))
    if found.skipped:
        yield f'<p class="more">{found.skipped:,} more frames are not shown.</p>\n'
    yield (
        "<footer>Offsets count from the first byte of the file, in hexadecimal. Integers are little-endian. "
        "Field names and error names are those of the boundary bundle format, version 1.0.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _strip(found: Anatomy) -> Iterator[str]:
    """One bar a frame; width by the logarithm of its size, so that headers stay visible."""
    yield '<nav class="strip" aria-label="frames">'
    for frame in found.frames:
        bad = any(row.damaged for row in frame.rows)
        weight = max(1, frame.size.bit_length() - 5)
        label = escape(f"frame {frame.index}: {frame.title}, {frame.size:,} bytes")
        kind = "bad" if bad else frame.kind
        yield (
            f'<a class="k-{kind}" style="flex-grow:{weight}" href="#frame-{frame.index}" '
            f'title="{label}" aria-label="{label}"></a>'
        )
    yield '</nav>\n<p class="legend">'
    kinds = dict.fromkeys(frame.kind for frame in found.frames)
    for kind in kinds:
        yield f'<span class="k-{kind}">{kind}</span>'
    if found.error is not None:
        yield '<span class="k-bad">damage</span>'
    yield "</p>\n"


def _bundles(found: Anatomy) -> Iterator[str]:
    for head in found.heads:
        yield (
            f'<section class="panel"><h2>Bundle {head.number}, version 1.{head.minor}</h2>\n<div class="scroll"><table>'
            "<thead><tr><th>tensor</th><th>dtype</th><th>shape</th><th>token axis</th><th>byte order</th>"
            "<th>payload</th><th>fragments</th></tr></thead>\n<tbody>"
        )
        for info in head.tensors:
            axis = "-" if info.token_axis is None else str(info.token_axis)
            order = info.byte_order if info.row.both_orders else "-"
            shape = ", ".join(f"{dim:,}" for dim in info.shape)
            cells = [info.name, info.dtype, f"[{shape}]", axis, order, f"{info.payload_bytes:,}", f"{info.fragments:,}"]
            yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
        yield "</tbody></table></div>\n"
        records = head.attributes.records()
        if records:
            yield (
                '<div class="scroll"><table><thead><tr><th>attribute</th><th>type</th><th>value</th></tr></thead>'
                "<tbody>\n"
            )
            for record in records:
                value = record.value
                text = value.hex() if isinstance(value, bytes) else str(value)
                text = text if len(text) <= 160 else f"{text[:160]}..."
                yield (
                    f"<tr><td>{escape(record.name or f'{record.key:#06x}')}</td><td>{record.type_name}</td>"
                    f'<td class="v">{escape(text)}</td></tr>\n'
                )
            yield "</tbody></table></div>\n"
        yield "</section>\n"


def _frame(frame: FrameView, shown: int) -> Iterator[str]:
    if frame.skipped:
        yield f'<p class="more">{frame.skipped:,} frames are not shown.</p>\n'
    bad = any(row.damaged for row in frame.rows)
    is_open = " open" if shown <= 12 or bad or frame.kind == "head" else ""
    yield (
        f'<details class="panel k-{frame.kind}" id="frame-{frame.index}"{is_open}>'
        f'<summary><span class="n">{frame.index}</span><b>{escape(frame.title)}</b>'
        f'<span class="n">{frame.size:,} bytes</span>'
        f'<span class="r">{frame.offset:08x} - {frame.offset + frame.size:08x}</span></summary>\n'
        '<div class="scroll"><table class="bytes"><thead><tr><th>offset</th><th>bytes</th><th>field</th><th>value</th>'
        "<th>meaning</th></tr></thead>\n<tbody>\n"
    )
    section = None
    for row in frame.rows:
        if row.section != section:
            section = row.section
            yield f'<tr class="section"><td colspan="5">{escape(section)}</td></tr>\n'
        yield _row(row)
    yield "</tbody></table></div></details>\n"


def _row(row: Row) -> str:
    data = row.data
    if row.field == "padding" and len(data) > _LINE and not any(data):
        data = data[:_LINE]
    starts = range(0, max(len(data), 1), _LINE)
    offsets = "\n".join(f"{row.offset + at:08x}" for at in starts)
    octets = "\n".join(_hex(data[at : at + _LINE]) for at in starts)
    hidden = row.size - len(data)
    more = f'\n<span class="more">... {hidden:,} more</span>' if hidden > 0 and not row.damaged else ""
    bad = ' class="bad"' if row.damaged else ""
    mark = " <strong>damage</strong>" if row.damaged else ""
    return (
        f'<tr{bad}><td class="o">{offsets}</td><td class="x">{octets}{more}</td><td class="f">{escape(row.field)}</td>'
        f'<td class="v">{escape(row.value)}</td><td class="m">{escape(row.meaning)}{mark}</td></tr>\n'
    )


def _hex(data: bytes) -> str:
    """Bytes in hexadecimal, zeros faint."""
    return " ".join("<i>00</i>" if byte == 0 else f"{byte:02x}" for byte in data)
