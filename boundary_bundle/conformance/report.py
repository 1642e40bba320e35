"""What came of a run, for people and for programs: text, JSON and JUnit XML (report_page: HTML)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree  # nosec B405: XML is written here and not read

from ..anatomy import Row, dissect
from ..bundle import Limits
from . import matrix as matrices
from .asks import tell_error
from .matrix import Matrix
from .runner import RESULTS, Outcome, Report, Unusable
from .testee import TROUBLES, shown

_TITLES = {
    "2": "frames",
    "2.1": "frame header",
    "2.2": "head frame",
    "2.3": "fragment frame",
    "2.4": "end frame",
    "2.5": "extension frames",
    "3": "head body",
    "3.1": "tensor record",
    "3.2": "attribute record",
    "4": "dtypes",
    "5.1": "tensor names",
    "5.2": "attributes",
    "5.3": "contracts",
    "6 A": "checks of the magic",
    "6 B": "checks of the frame header",
    "6 C": "checks of the whole frame",
    "6 D": "checks of the head body",
    "6": "the end of the input, contracts",
    "7": "limits",
    "9": "canonical form",
    "10": "versions",
    "11": "conformance",
    "14": "example",
}
#: Rows of annotated bytes before and after the place in question.
_ROWS_BEFORE = 5
_ROWS_AFTER = 2
_ROWS_WITHOUT_PLACE = 48
_DULL = ("padding", "reserved", "name_length", "value_length")


@dataclass
class Section:
    """Counts of a section of the specification."""

    name: str
    title: str
    counts: dict[str, int]
    failed: int = 0
    known: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def place_of(section: str) -> str:
    """Under which section a vector is counted: those of section 6 by unit."""
    place, _, step = section.partition(":")
    return f"{place} {step[0]}" if re.fullmatch(r"[A-D]\d+", step) else place


def sections(report: Report) -> list[Section]:
    """Counts by section, in the order of the specification."""
    found: dict[str, Section] = {}
    for outcome in report.outcomes:
        name = place_of(outcome.case.vector.section)
        section = found.setdefault(name, Section(name, _TITLES.get(name, ""), dict.fromkeys(RESULTS, 0)))
        section.counts[outcome.result] += 1
        section.failed += outcome.failed
        section.known += outcome.known
    return [found[name] for name in sorted(found, key=_order)]


def _order(name: str) -> tuple[Any, ...]:
    """Sorts sections as the specification has them."""
    number, _, unit = name.partition(" ")
    return [int(part) for part in number.split(".")], unit or "Z"


@dataclass
class Group:
    """Failures of one vector that differ in nothing but the mode."""

    outcome: Outcome
    modes: list[str]

    @property
    def id(self) -> str:
        """What a line of known failures may say: the case, or the vector with several."""
        return self.outcome.case.id if len(self.modes) == 1 else self.outcome.case.vector.id


def grouped(outcomes: Iterable[Outcome]) -> list[Group]:
    """Failures in the order of the specification, those of one vector together where they say the same."""
    groups: dict[tuple[Any, ...], Group] = {}
    for outcome in sorted(outcomes, key=lambda outcome: _order(place_of(outcome.case.vector.section))):
        said = (outcome.result, outcome.known, expected_text(outcome), got_text(outcome), *outcome.details)
        variant = outcome.ask.variant if outcome.ask is not None else ""
        key = (outcome.case.vector.file, outcome.case.vector.id, variant, outcome.stderr, *said)
        groups.setdefault(key, Group(outcome, [])).modes.append(outcome.case.mode)
    return list(groups.values())


def fault_of(outcome: Outcome) -> str:
    """What kind of fault a failure is, without values: the same for all that one mistake may have caused."""
    if outcome.result != "wrong":
        return TROUBLES[outcome.kind][1] if outcome.kind in TROUBLES else outcome.result
    wanted = outcome.ask.expected.error if outcome.ask is not None else None
    got = (outcome.answer or {}).get("error")
    if wanted is not None and isinstance(got, dict):
        if got.get("name") != wanted["name"]:
            return f"{_quoted(got.get('name'))} instead of {wanted['name']}"
        for key in ("number", "offset", "tensor", "attribute"):
            if key in wanted and got.get(key) != wanted[key]:
                return f"the right error with another {key}"
        return "the right error after other bundles"
    if isinstance(got, dict):
        return f"refused with {_quoted(got.get('name'))}"
    if wanted is not None:
        return f"accepted instead of {wanted['name']}"
    if outcome.case.mode == "encode":
        return "other bytes from the encoder"
    where = re.sub(r"\[\d+\]", "", outcome.details[0].split(":")[0]) if outcome.details else ""
    return f"other content: {shown(where.removeprefix('bundles.').encode('utf-8', 'replace'))}"


def _quoted(name: Any) -> str:
    return shown(str(name).encode("utf-8", "replace"), 60)


def faults(report: Report) -> list[tuple[str, int, str]]:
    """Kinds of faults with how many cases show each and one of these, the most frequent first."""
    found: dict[str, list[Outcome]] = {}
    for group in grouped(report.failures):
        found.setdefault(fault_of(group.outcome), []).extend([group.outcome] * len(group.modes))
    rows = [(what, len(outcomes), outcomes[0].case.id) for what, outcomes in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def skipped(report: Report) -> list[tuple[str, int]]:
    """Reasons for what was skipped, with how many cases, the most frequent first."""
    found: dict[str, int] = {}
    for outcome in report.outcomes:
        if outcome.result == "skipped":
            found[outcome.details[0]] = found.get(outcome.details[0], 0) + 1
    return sorted(found.items(), key=lambda row: -row[1])


def expected_text(outcome: Outcome) -> str:
    """What should have come, in a line."""
    ask = outcome.ask or (outcome.case.asks[0] if outcome.case.asks else None)
    if ask is None:
        return ""
    expected = ask.expected
    if expected.encode:
        return tell_error(expected.error) if expected.error else f"{len(expected.data or '') // 2} bytes"
    count = len(expected.bundles)
    bundles = f"{count} {'bundle' if count == 1 else 'bundles'}"
    if expected.error is None:
        return bundles
    error = tell_error(expected.error)
    if expected.either:
        return f"{bundles}, or {error}"
    return error if not count else f"{bundles}, then {error}"


def got_text(outcome: Outcome) -> str:
    """What came, in a line."""
    answer = outcome.answer
    if answer is None:
        return outcome.details[0] if outcome.details else ""
    error = answer.get("error")
    parts = []
    bundles = answer.get("bundles")
    if isinstance(bundles, list) and (bundles or not error):
        parts.append(f"{len(bundles)} {'bundle' if len(bundles) == 1 else 'bundles'}")
    if isinstance(answer.get("data"), str):
        parts.append(f"{len(answer['data']) // 2} bytes")
    if isinstance(error, dict):
        parts.append(tell_error(error))
    return ", then ".join(parts) or (outcome.details[0] if outcome.details else "")


def annotated(outcome: Outcome) -> list[tuple[Row, bool]]:
    """Fields of the input around the place in question, and which of them it is."""
    vector = outcome.case.vector
    data = vector.data
    if not data:
        return []
    at: int | None = vector.error.offset if vector.error is not None else None
    error = (outcome.answer or {}).get("error")
    if at is None and isinstance(error, dict) and type(error.get("offset")) is int:
        at = error["offset"]
    try:
        rows = dissect(data, limits=Limits(**vector.limits), payload_bytes=16).rows
    # A view for people: what it cannot show is left out.
    except (ValueError, IndexError, KeyError, OverflowError):
        return []
    if at is None:
        # A difference in content: what the head says of tensors and attributes, and the payloads.
        rows = [row for row in rows if row.section not in ("frame header", "head") and row.field not in _DULL]
        return [(row, False) for row in rows[:_ROWS_WITHOUT_PLACE]]
    hit = next((i for i, row in enumerate(rows) if row.offset <= at < row.end), len(rows) - 1)
    chosen = range(max(0, hit - _ROWS_BEFORE), min(len(rows), hit + 1 + _ROWS_AFTER))
    return [(rows[i], i == hit and rows[i].offset <= at < rows[i].end) for i in chosen]


def _what(row: Row) -> str:
    # A payload and a padding are all of their section.
    return " ".join(part for part in (row.field if row.field != row.section else "", row.value, row.meaning) if part)


def row_text(row: Row) -> str:
    """A field's bytes."""
    text = row.data[:16].hex(" ")
    return text + (" ..." if row.size > 16 else "")


def differences(outcome: Outcome) -> list[str]:
    """The details of a failure that say more than what was expected and what came."""
    wanted = outcome.ask.expected.error if outcome.ask is not None else None
    got = (outcome.answer or {}).get("error")
    told = tell_error(wanted) if wanted is not None else ""
    came = tell_error(got) if isinstance(got, dict) else ""
    repeated = (f"{came} instead of {told}", f"refused with {came}", f"accepted instead of {told}")
    return [detail for detail in outcome.details if detail not in repeated]


def describe(outcome: Outcome, modes: Sequence[str] = ()) -> Iterator[str]:
    """A failure in lines; ``modes`` are those of a group."""
    vector = outcome.case.vector
    variant = f", {outcome.ask.variant}" if outcome.ask is not None and outcome.ask.variant else ""
    if len(modes) > 1:
        yield f"{outcome.result.upper()} {vector.id} ({', '.join(modes)}; section {vector.section}{variant})"
    else:
        yield f"{outcome.result.upper()} {outcome.case.id} (section {vector.section}{variant})"
    yield f"    {vector.raw['comment']}"
    if outcome.result != "not run":
        yield f"    expected: {expected_text(outcome)}"
        if outcome.answer is not None and "failed" not in outcome.answer:
            yield f"    got:      {got_text(outcome)}"
    details = differences(outcome)
    for detail in details[:8]:
        yield f"    {detail}"
    if len(details) > 8:
        yield f"    and {len(details) - 8} more differences"
    if outcome.result != "not run":
        for row, hit in annotated(outcome):
            mark = ">" if hit else " "
            yield (f"  {mark} {row.offset:6}  {row_text(row):<48} {row.section}: {_what(row)}").rstrip()
    if outcome.stderr:
        yield f"    standard error: {outcome.stderr[-300:].strip()}"


def verdict(report: Report) -> str:
    """The run in one sentence."""
    counts = {name: count for name, count in report.counts().items() if count}
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    known = sum(outcome.known for outcome in report.outcomes)
    if known:
        told += f" ({known} known)"
    if report.restarts:
        told += f"; started again {report.restarts} {'time' if report.restarts == 1 else 'times'}"
    return f"{told}; {report.seconds:.1f} s"


def known_lines(report: Report) -> Iterator[str]:
    """What is wrong with the file of known failures."""
    for entry in report.unmatched:
        yield f"{report.known_file}:{entry.line}: {entry.name} is no case of the kit"
    for entry in report.unexpected:
        yield f"{report.known_file}:{entry.line}: {entry.name} passes: take the line out"


def _case_json(outcome: Outcome) -> dict[str, Any]:
    vector = outcome.case.vector
    told: dict[str, Any] = {
        "id": outcome.case.id,
        "vector": vector.id,
        "file": vector.file,
        "section": vector.section,
        "mode": outcome.case.mode,
        "result": outcome.result,
    }
    if outcome.result != "passed":
        told |= {"details": outcome.details, "kind": outcome.kind, "known": outcome.known}
        if outcome.ask is not None:
            told["variant"] = outcome.ask.variant
        if outcome.failing:
            told |= {"expected": expected_text(outcome), "got": got_text(outcome), "comment": vector.raw["comment"]}
        if outcome.stderr:
            told["stderr"] = outcome.stderr
    return told


def to_json(report: Report) -> str:
    """Everything, for programs."""
    return json.dumps(
        {
            "format": 1,
            "status": report.status,
            "command": report.command,
            "testee": {key: value for key, value in report.hello.items() if key != "seq"},
            "seconds": round(report.seconds, 3),
            "restarts": report.restarts,
            "counts": report.counts(),
            "sections": [
                {"section": entry.name, "title": entry.title, "failed": entry.failed, "counts": entry.counts}
                for entry in sections(report)
            ],
            "faults": [{"what": what, "cases": count, "example": case} for what, count, case in faults(report)],
            "known_failures": {
                "file": report.known_file,
                "unmatched": [entry.name for entry in report.unmatched],
                "unexpected_passes": [entry.name for entry in report.unexpected],
            },
            "random": report.random,
            "matrix": None if report.matrix is None else matrices.to_json(report.matrix),
            "cases": [_case_json(outcome) for outcome in report.outcomes],
        },
        indent=1,
    )


def unusable_json(command: list[str], error: Unusable) -> str:
    """The report of a run that could not take place."""
    told = {"format": 1, "status": 2, "command": command, "could_not": str(error), "kind": error.kind}
    return json.dumps({**told, "stderr": error.stderr}, indent=1)


def _xml_text(text: str) -> str:
    return "".join(char if char in "\n\t" or (char.isprintable() and char <= "\uffff") else "?" for char in text)


def to_junit(report: Report) -> str:
    """JUnit XML: a suite a section, a test case a case."""
    root = ElementTree.Element("testsuites", name="boundary-bundle conformance", time=f"{report.seconds:.3f}")
    suites: dict[str, ElementTree.Element] = {}
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for entry in sections(report):
        counts = entry.counts
        numbers = {
            "tests": entry.total,
            "failures": sum(o.failed and o.result == "wrong" for o in _of(report, entry.name)),
            "errors": sum(o.failed and o.result != "wrong" for o in _of(report, entry.name)),
            "skipped": counts["skipped"] + entry.known,
        }
        for key, value in numbers.items():
            totals[key] += value
        name = f"{entry.name} {entry.title}".strip()
        attributes = {key: str(value) for key, value in numbers.items()}
        suites[entry.name] = ElementTree.SubElement(root, "testsuite", {"name": name, **attributes})
    for key, value in totals.items():
        root.set(key, str(value))
    for outcome in report.outcomes:
        suite = suites[place_of(outcome.case.vector.section)]
        node = ElementTree.SubElement(suite, "testcase", classname=outcome.case.vector.file, name=outcome.case.id)
        message = _xml_text("; ".join(outcome.details)[:1000])
        if outcome.result == "skipped" or outcome.known:
            text = f"known failure: {message}" if outcome.known else message
            ElementTree.SubElement(node, "skipped", message=text)
        elif outcome.failed:
            tag = "failure" if outcome.result == "wrong" else "error"
            child = ElementTree.SubElement(node, tag, type=outcome.kind or outcome.result, message=message)
            child.text = _xml_text("\n".join(describe(outcome)))
    extra = [*known_lines(report), *((report.random or {}).get("failures") and ["random inputs failed"] or [])]
    if extra:
        suite = ElementTree.SubElement(root, "testsuite", name="run", tests=str(len(extra)), failures=str(len(extra)))
        root.set("tests", str(totals["tests"] + len(extra)))
        root.set("failures", str(totals["failures"] + len(extra)))
        for index, line in enumerate(extra):
            node = ElementTree.SubElement(suite, "testcase", classname="run", name=f"run-{index}")
            ElementTree.SubElement(node, "failure", message=_xml_text(line))
    if report.matrix is not None:
        suite = _matrix_suite(report.matrix)
        root.append(suite)
        for key in ("tests", "failures"):
            root.set(key, str(int(root.get(key, "0")) + int(suite.get(key, "0"))))
    return _document(root)


def _document(root: ElementTree.Element) -> str:
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _matrix_suite(matrix: Matrix) -> ElementTree.Element:
    """A suite with a test case a cell."""
    suite = ElementTree.Element("testsuite", name="matrix")
    cases = [
        (f"{cell.decoder} reads {cell.encoder}", [f"{bundle}: {reason}" for bundle, reason in cell.wrong])
        for cell in matrix.cells
    ]
    if matrix.unwritten:
        cases.append(("written", [f"{name}: {bundle}: {reason}" for name, bundle, reason in matrix.unwritten]))
    for name, wrong in cases:
        node = ElementTree.SubElement(suite, "testcase", classname="matrix", name=_xml_text(name))
        if wrong:
            child = ElementTree.SubElement(node, "failure", message=_xml_text(wrong[0]))
            child.text = _xml_text("\n".join(wrong))
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(bool(wrong) for _, wrong in cases)))
    return suite


def matrix_json(matrix: Matrix) -> str:
    """The report of a run of the matrix alone."""
    return json.dumps({"format": 1, "status": matrix.status, "matrix": matrices.to_json(matrix)}, indent=1)


def matrix_junit(matrix: Matrix) -> str:
    """JUnit XML of a run of the matrix alone."""
    root = ElementTree.Element("testsuites", name="boundary-bundle conformance", time=f"{matrix.seconds:.3f}")
    root.append(_matrix_suite(matrix))
    for key in ("tests", "failures"):
        root.set(key, root[0].get(key, "0"))
    return _document(root)


def _of(report: Report, name: str) -> Iterator[Outcome]:
    return (outcome for outcome in report.outcomes if place_of(outcome.case.vector.section) == name)


def unusable_junit(error: Unusable) -> str:
    """JUnit XML of a run that could not take place."""
    root = ElementTree.Element("testsuites", tests="1", errors="1", failures="0", skipped="0")
    suite = ElementTree.SubElement(root, "testsuite", name="run", tests="1", errors="1")
    node = ElementTree.SubElement(suite, "testcase", classname="run", name="start")
    child = ElementTree.SubElement(node, "error", type=error.kind or "unusable", message=_xml_text(str(error)))
    child.text = _xml_text(error.stderr)
    return _document(root)
