"""The report of a run as one HTML page that loads nothing and says who failed where at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from . import matrix as matrices
from .matrix import Matrix
from .report import (
    Group,
    Section,
    annotated,
    differences,
    expected_text,
    faults,
    got_text,
    grouped,
    known_lines,
    row_text,
    sections,
    skipped,
    verdict,
)
from .runner import RESULTS, Report, Unusable

_STYLE = """
:root { --paper: #fafafa; --ink: #1f2430; --soft: #68707f; --line: #e2e4e9; --card: #fff; --mark: #fff3d6;
  --passed: #2e9e6b; --wrong: #d24a43; --skipped: #b9bfca; --error: #c9762b; --crash: #8f3fb0; --hang: #3f6fc0;
  --not-run: #7d8593; --known: #cfa63a; --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e2e6ec; --soft: #98a1af; --line: #2b3039;
  --card: #1b1f26; --mark: #3d3420; --skipped: #4d5561; --wrong: #ef6f68; --crash: #bd7be0; --hang: #7da4ea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.sub { color: var(--soft); margin: .25rem 0 1.5rem; overflow-wrap: anywhere; }
code, .mono { font-family: var(--mono); font-size: .86em; }
.verdict { display: flex; flex-wrap: wrap; gap: 1rem; align-items: center; padding: 1.1rem 1.3rem; margin: 1rem 0;
  background: var(--card);
  border: 1px solid var(--line); border-left: 6px solid var(--tone); border-radius: 10px; }
.verdict strong { font-size: 1.35rem; color: var(--tone); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 0; }
.tile { padding: .55rem .9rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  min-width: 6.5rem; }
.tile b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.tile span::before { content: ""; display: inline-block; width: .65em; height: .65em; border-radius: 50%;
  background: var(--tone); margin-right: .4em; }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line); }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: .85rem; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: .8rem; min-width: 12rem; border-radius: 4px; overflow: hidden;
  background: var(--line); margin-top: .3rem; }
.bar i { background: var(--tone); }
details { background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--tone);
  border-radius: 8px;
  margin: .5rem 0; }
summary { cursor: pointer; padding: .6rem .9rem; display: flex; gap: .8rem; flex-wrap: wrap; align-items: baseline; }
summary b { font-family: var(--mono); font-weight: 600; font-size: .9rem; }
summary span { color: var(--soft); } summary .tag { color: var(--tone); font-weight: 600; min-width: 4rem; }
.body { padding: 0 .9rem .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .2rem 0 .8rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; font-family: var(--mono); font-size: .86em; }
.bytes td { border: 0; padding: .12rem .6rem; font-size: .85rem; }
.bytes td:nth-child(-n + 4) { white-space: nowrap; } .bytes { border-radius: 6px; }
li { overflow-wrap: anywhere; }
.matrix td { border-left: 1px solid var(--line); color: var(--tone); font-weight: 600; }
.matrix th:first-child { color: var(--ink); }
.bytes tr.hit { background: var(--mark); } .scroll { overflow-x: auto; }
.t-passed { --tone: var(--passed); } .t-wrong { --tone: var(--wrong); } .t-skipped { --tone: var(--skipped); }
.t-error { --tone: var(--error); } .t-crash { --tone: var(--crash); } .t-hang { --tone: var(--hang); }
.t-not-run { --tone: var(--not-run); } .t-known { --tone: var(--known); }
footer { color: var(--soft); font-size: .85rem; margin-top: 3rem; }
@media print { details:not([open]) > .body { display: block; } }
"""
#: Failures shown with their bytes; more only make the page heavy.
_SHOWN = 500


def _tone(result: str) -> str:
    return f"t-{result.replace(' ', '-')}"


def _page(title: str, body: Iterator[str]) -> str:
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n",
            *body,
            "</main>\n</body>\n</html>\n",
        )
    )


def to_html(report: Report) -> str:
    """The whole page. Everything that the testee said is escaped."""
    return _page(f"{report.hello['name']}: conformance", _report(report))


def unusable_html(command: list[str], error: Unusable) -> str:
    """The page of a run that could not take place."""

    def body() -> Iterator[str]:
        yield f'<h1>No run</h1>\n<p class="sub"><code>{escape(" ".join(command))}</code></p>\n'
        yield f'<div class="verdict t-crash"><strong>could not</strong> {escape(str(error))}</div>\n'
        if error.stderr:
            yield f"<h2>Standard error</h2>\n<pre>{escape(error.stderr)}</pre>\n"

    return _page("no conformance run", body())


def matrix_html(matrix: Matrix) -> str:
    """The page of a run of the matrix alone."""

    def body() -> Iterator[str]:
        yield "<h1>Who reads whose bundles</h1>\n"
        word, tone = _WORDS[matrix.status]
        yield f'<div class="verdict {_tone(tone)}"><strong>{word}</strong> {escape(matrices.verdict(matrix))}</div>\n'
        yield from _matrix(matrix)

    return _page("who reads whose bundles", body())


_WORDS = {0: ("passed", "passed"), 1: ("failed", "wrong"), 2: ("nothing was checked", "skipped")}


def _report(report: Report) -> Iterator[str]:
    hello = report.hello
    yield f"<h1>{escape(hello['name'])}</h1>\n"
    yield f'<p class="sub">{escape(hello["language"])}, version {escape(hello["version"])} · classes '
    yield f"{escape(', '.join(hello['classes']))} · {len(hello['dtypes'])} dtypes · "
    yield f"<code>{escape(' '.join(report.command))}</code></p>\n"
    word, tone = _WORDS[report.status]
    told = [verdict(report)]
    if report.random is not None and report.random["failures"]:
        told.append("random inputs failed")
    if report.matrix is not None:
        told.append(f"matrix: {matrices.verdict(report.matrix)}")
    yield f'<div class="verdict {_tone(tone)}"><strong>{word}</strong> {escape(" · ".join(told))}</div>\n'
    yield '<div class="tiles">'
    for name, count in report.counts().items():
        if count:
            yield f'<div class="tile {_tone(name)}"><b>{count:,}</b><span>{name}</span></div>'
    yield "</div>\n"
    lines = list(known_lines(report))
    if lines:
        yield "<h2>Known failures</h2>\n<ul>"
        yield "".join(f"<li><code>{escape(line)}</code></li>" for line in lines)
        yield "</ul>\n"
    yield "<h2>By section of the specification</h2>\n"
    yield from _sections(sections(report))
    kinds = faults(report)
    if kinds:
        yield '<h2>What is wrong</h2>\n<table><tr><th>kind of fault</th><th class="n">cases</th><th>such as</th></tr>'
        for what, count, case in kinds:
            yield f'<tr><td>{escape(what)}</td><td class="n">{count:,}</td><td class="mono">{escape(case)}</td></tr>'
        yield "</table>\n"
    yield from _random(report)
    if report.matrix is not None:
        yield "<h2>Who reads whose bundles</h2>\n"
        yield from _matrix(report.matrix)
    failures = [outcome for outcome in report.outcomes if outcome.failing]
    if failures:
        groups = grouped(failures)
        yield f"<h2>{len(failures):,} {'failure' if len(failures) == 1 else 'failures'}</h2>\n"
        yield from _failures_by_vector(groups)
    reasons = skipped(report)
    if reasons:
        yield '<h2>Skipped</h2>\n<table><tr><th>reason</th><th class="n">cases</th></tr>'
        for reason, count in reasons:
            yield f'<tr><td>{escape(reason)}</td><td class="n">{count:,}</td></tr>'
        yield "</table>\n"
    yield (
        "<footer>A case is one vector in one mode: one bundle from a buffer, a core or a stream decoder (whole and in "
        "pieces), an encoder. Sections are those of the boundary bundle format, version 1.0.</footer>\n"
    )


def _sections(found: list[Section]) -> Iterator[str]:
    yield '<div class="scroll"><table><tr><th>section</th><th></th><th class="n">cases</th><th class="n">failed</th>'
    yield '<th class="n">skipped</th><th>results</th></tr>\n'
    for entry in found:
        yield f"<tr><td>{escape(entry.name)}</td><td>{escape(entry.title)}</td>"
        yield f'<td class="n">{entry.total:,}</td><td class="n">{entry.failed or ""}</td>'
        yield f'<td class="n">{entry.counts["skipped"] or ""}</td><td><div class="bar">'
        for result in RESULTS:
            if entry.counts[result]:
                title = f"{entry.counts[result]} {result}"
                yield f'<i class="{_tone(result)}" style="flex:{entry.counts[result]}" title="{title}"></i>'
        yield "</div></td></tr>\n"
    yield "</table></div>\n"


def _random(report: Report) -> Iterator[str]:
    drawn = report.random
    if drawn is None:
        return
    yield f'<h2>Random inputs</h2>\n<p class="sub">{drawn["cases"]:,} cases, seed {drawn["seed"]}, '
    count = len(drawn["failures"])
    yield f"{drawn['seconds']:.1f} s, {count} different {'failure' if count == 1 else 'failures'}</p>\n"
    for entry in drawn["failures"]:
        yield f'<details class="{_tone(entry["result"])}"><summary><span class="tag">{escape(entry["result"])}</span>'
        yield f"<b>{escape(entry['id'])}</b><span>{escape(entry['detail'])}</span></summary>"
        yield f'<div class="body"><dl><dt>input</dt><dd>{escape(entry["input"][:4096])}</dd>'
        yield f"<dt>saved as</dt><dd>{escape(entry['file'] or 'not saved')}</dd></dl></div></details>\n"


def _matrix(matrix: Matrix) -> Iterator[str]:
    yield f'<p class="sub">Each writer wrote {matrix.bundles:,} bundles; a cell says how many of them the reader '
    yield "delivered as they had been given to the writer.</p>\n"
    if matrix.cells:
        yield '<div class="scroll"><table class="matrix"><tr><th>writer</th>'
        yield "".join(f'<th class="n">{escape(name)}</th>' for name in matrix.decoders)
        yield "</tr>\n"
        for encoder in matrix.encoders:
            yield f"<tr><th>{escape(encoder)}</th>"
            for decoder in matrix.decoders:
                cell = matrix.cell(encoder, decoder)
                tone = "wrong" if cell.wrong else "passed" if cell.read == matrix.bundles else "known"
                yield f'<td class="n {_tone(tone)}">{escape(matrices.cell_text(cell, matrix.bundles))}</td>'
            yield "</tr>\n"
        yield "</table></div>\n"
    lines = list(matrices.describe(matrix))
    if lines:
        yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines[:_SHOWN]) + "</ul>\n"


def _failures_by_vector(groups: list[Group]) -> Iterator[str]:
    for index, group in enumerate(groups[:_SHOWN]):
        yield from _failure(group, index < 3)
    if len(groups) > _SHOWN:
        yield f'<p class="sub">{len(groups) - _SHOWN:,} more vectors are in the JSON report.</p>\n'


def _failure(group: Group, is_open: bool) -> Iterator[str]:
    outcome = group.outcome
    vector = outcome.case.vector
    tone = "known" if outcome.known else outcome.result
    yield f'<details class="{_tone(tone)}"{" open" if is_open else ""}><summary><span class="tag">'
    yield f"{'known' if outcome.known else outcome.result}</span><b>{escape(group.id)}</b>"
    yield f"<span>{escape(vector.raw['comment'])}</span></summary>\n"
    yield f'<div class="body"><dl><dt>section</dt><dd>{escape(vector.section)}</dd>'
    if len(group.modes) > 1:
        yield f"<dt>modes</dt><dd>{escape(', '.join(group.modes))}</dd>"
    if outcome.ask is not None and outcome.ask.variant:
        yield f"<dt>asked</dt><dd>{escape(outcome.ask.variant)}</dd>"
    if outcome.result != "not run":
        yield f"<dt>expected</dt><dd>{escape(expected_text(outcome))}</dd>"
        yield f"<dt>got</dt><dd>{escape(got_text(outcome))}</dd>"
    for place, detail in enumerate(differences(outcome)[:12]):
        yield f"<dt>{'' if place else 'difference'}</dt><dd>{escape(detail)}</dd>"
    if outcome.stderr:
        yield f"<dt>standard error</dt><dd>{escape(outcome.stderr[-500:])}</dd>"
    yield "</dl>"
    rows = annotated(outcome)
    if rows:
        yield '<div class="scroll"><table class="bytes">'
        for row, hit in rows:
            yield f'<tr{" class=hit" if hit else ""}><td class="n mono">{row.offset}</td>'
            yield f'<td class="mono">{row_text(row)}</td><td>{escape(row.section)}</td><td>{escape(row.field)}</td>'
            yield f'<td class="mono">{escape(row.value)}</td><td>{escape(row.meaning)}</td></tr>'
        yield "</table></div>"
    yield "</div></details>\n"
