"""Holds the text of the specification against its registry and its example.

Catches a number, name or limit that was changed in one of the two, an error that the
text does not know, and an example that is no longer what an encoder writes.
"""

from __future__ import annotations

import re

import pytest
from spec_text import REGISTRY, SPEC, TEXT, section

from boundary_bundle import encode
from boundary_bundle.conformance import example
from boundary_bundle.conformance.vectors import load


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows in a text, without their heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row, after in zip(cells, [*cells[1:], []], strict=True) if "---" not in {row[0], *after[:1]}]


def number(text: str) -> int:
    """A number as the text writes it: 65,536 or 2^32 - 8."""
    base = text.replace(",", "").split(" ")
    power, _, exponent = base[0].partition("^")
    value = int(power) ** int(exponent or 1)
    return value - int(base[2]) if base[1:2] == ["-"] else value


def test_dtypes() -> None:
    told = [
        {
            "name": name,
            "code": int(code),
            "block_elements": int(elements),
            "block_bytes": int(size),
            "both_orders": both == "yes",
        }
        for code, name, _, elements, size, both in rows(section("## 4. "))
    ]
    assert told == REGISTRY["dtypes"]


def test_attributes() -> None:
    lengths = {"u64": 8, "text": None}
    told = {}
    for key, name, kind, _ in rows(section("### 5.2 ")):
        kind, _, length = kind.partition(", ")
        told[name] = (int(key, 16), kind, int(length) if length else lengths[kind])
    assert told == {row["name"]: (row["key"], row["type"], row["length"]) for row in REGISTRY["attributes"]}


def test_forwarded_attributes() -> None:
    sentence = re.search(r"A shard forwards ([^;]+) and every unknown", section("### 5.2 "))
    assert sentence is not None
    told = set(re.split(r", | and ", sentence[1]))
    assert told == {row["name"] for row in REGISTRY["attributes"] if row["forwarded"]}


def test_tensor_names() -> None:
    assert [name.strip("`") for name, *_ in rows(section("### 5.1 "))] == REGISTRY["tensor_names"]


def test_limits() -> None:
    told = [
        {
            "name": name.split(" ")[0],
            "default": number(default),
            "maximum": number(maximum),
            "error": error.strip("`"),
        }
        for name, default, maximum, error in rows(section("## 7. "))
    ]
    assert told == REGISTRY["limits"]


def test_frame_types_magic_and_flags() -> None:
    fields = {row[2]: row[3] for row in rows(section("### 2.1 "))}
    assert bytes.fromhex(fields["magic"].strip("`")).hex() == REGISTRY["magic"]
    told = {name: int(code, 16) for code, name in re.findall(r"(0x8\d) (\w+)", fields["type"])}
    assert told == REGISTRY["frame_types"]
    assert str(REGISTRY["version"]["major"]) == fields["major"]
    assert TEXT.startswith("# The boundary bundle format, version {major}.{minor}\n".format(**REGISTRY["version"]))
    for kind, code in REGISTRY["frame_types"].items():
        assert f"{kind.capitalize()} frame (type {code:#04X}".replace("X", "x", 1) in TEXT
    bits = re.findall(r"bit (\d+): (\w[\w ]+)\.", section("## 3. "))
    assert {meaning.replace(" ", "_"): int(bit) for bit, meaning in bits} == REGISTRY["head_flags"]


def test_attribute_types_and_byte_orders() -> None:
    kind = next(row[3] for row in rows(section("### 3.2 ")) if row[2] == "type")
    assert {name: int(code) for code, name in re.findall(r"(\d) (\w+)", kind)} == REGISTRY["attribute_types"]
    order = next(row[3] for row in rows(section("### 3.1 ")) if row[2] == "byte_order")
    assert {name: int(code) for code, name in re.findall(r"(\d) (little|big)", order)} == REGISTRY["byte_orders"]


def test_errors() -> None:
    """A misspelt error name, one that no check gives, or one outside the ranges of section 8."""
    names = {row["name"] for row in REGISTRY["errors"]}
    given = set(re.findall(r"^\| [A-D]\d+ \|[^|]*\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert given <= names
    rest = names - given - {"need_more"}
    for name in rest:
        assert f"`{name}`" in section("## 6. "), name
    ranges = [tuple(map(int, row[0].split("-"))) for row in rows(section("## 8. "))]
    for row in REGISTRY["errors"]:
        assert row["number"] == 1 or any(low <= row["number"] <= high for low, high in ranges)
    numbers = [row["number"] for row in REGISTRY["errors"]]
    assert numbers == sorted(set(numbers))


def test_errors_of_the_field_tables_are_errors_of_a_check() -> None:
    """A field table that names an error which no step gives."""
    given = set(re.findall(r"^\| [A-D]\d+ \|[^|]*\| `(\w+)` \|", TEXT, re.MULTILINE))
    for title in ("### 2.1 ", "## 3. ", "### 3.1 ", "### 3.2 "):
        for row in rows(section(title)):
            for name in re.findall(r"`([a-z]\w+)`", row[4]):
                assert name in given, (title, name)


def test_example() -> None:
    """An example that drifted from the encoder; a byte of it that is explained twice or not at all."""
    assert example.main(["--check"]) == 0
    explained = example.rows()
    data = encode(example.bundle())
    assert b"".join(row.data for row in explained) == data
    assert [row.offset for row in explained] == [
        sum(len(row.data) for row in explained[:index]) for index in range(len(explained))
    ]
    (vector,) = [vector for vector in load() if vector.section == "14"]
    assert vector.data == data


def test_sections_referred_to_exist() -> None:
    """A reference to a section that was renumbered."""
    there = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", TEXT, re.MULTILINE))
    for name in ("boundary-bundle.md", "notes.md", "errata.md"):
        text = (SPEC / name).read_text("utf-8")
        for found in re.findall(r"\bsections? (\d+(?:\.\d+)?)", text) + re.findall(r"\((\d\.\d)\)", text):
            assert found in there, (name, found)


@pytest.mark.parametrize("name", ["boundary-bundle.md", "notes.md", "errata.md", "vectors/README.md"])
def test_links(name: str) -> None:
    """A link to a file that is not there."""
    path = SPEC / name
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_worked_cases_have_vectors() -> None:
    """A versioning rule that no vector shows."""
    ids = {vector.id for vector in load() if vector.file == "versions"}
    for shown in ("10-1.1-ancillary-attribute", "10-1.1-ancillary-frame", "D56-1.1-critical-attribute", "B2-2.0"):
        assert shown in ids
