"""Holds the package's tables and layout against the specification.

Catches: a code, limit or error number that differs between the specification and
this codec, and a field that the layout puts somewhere else than the text says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spec_text import REGISTRY, TEXT, section

from boundary_bundle import DTYPES, ERRORS, Limits, bundle, decoder, errors, layout


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_constants() -> None:
    """A constant that drifted from the registry would make every bundle foreign."""
    assert REGISTRY["version"] == {"major": layout.MAJOR, "minor": layout.MINOR}
    assert bytes.fromhex(REGISTRY["magic"]) == layout.MAGIC
    assert REGISTRY["alignment"] == layout.ALIGNMENT
    assert REGISTRY["header_bytes"] == layout.frame_header.size
    assert REGISTRY["head_fixed_bytes"] == layout.head_fixed.size
    assert REGISTRY["frame_types"] == {"head": layout.HEAD, "fragment": layout.FRAGMENT, "end": layout.END}
    assert 1 << REGISTRY["head_flags"]["payload_checksums_absent"] == layout.CHECKSUMS_ABSENT
    assert len(REGISTRY["head_flags"]) == 1, "a new flag must leave UNKNOWN_HEAD_FLAGS"
    assert REGISTRY["byte_orders"] == {"little": layout.LITTLE, "big": layout.BIG}
    assert REGISTRY["no_token_axis"] == layout.NO_TOKEN_AXIS


def test_dtypes() -> None:
    """A wrong code or width reads another tensor's bits."""
    assert {row["name"]: row for row in REGISTRY["dtypes"]} == {
        row.name: {
            "name": row.name,
            "code": row.code,
            "block_elements": row.block_elements,
            "block_bytes": row.block_bytes,
            "both_orders": row.both_orders,
        }
        for row in DTYPES.values()
    }
    for row in DTYPES.values():
        if row.block_elements == 1:
            assert row.numpy.itemsize == row.block_bytes
        else:
            assert row.numpy == np.uint8
        assert row.unsigned.itemsize == row.numpy.itemsize


def test_attributes() -> None:
    """A wrong key, type or length refuses (or lets pass) what the specification does not."""
    assert REGISTRY["attribute_types"] == bundle.ATTRIBUTE_TYPES
    assert {row["name"]: (row["key"], row["type"], row["length"]) for row in REGISTRY["attributes"]} == (
        bundle.ATTRIBUTES
    )
    assert {row["name"] for row in REGISTRY["attributes"] if row["forwarded"]} == bundle.FORWARDED


def test_tensor_names() -> None:
    """A registered tensor name that is spelt otherwise here."""
    assert tuple(REGISTRY["tensor_names"]) == bundle.TENSOR_NAMES


def test_limits() -> None:
    """A default or maximum that differs makes one codec accept what the other refuses."""
    defaults = Limits()
    assert {row["name"] for row in REGISTRY["limits"]} == set(bundle.LIMIT_MAXIMA)
    for row in REGISTRY["limits"]:
        assert getattr(defaults, row["name"]) == row["default"], row["name"]
        assert bundle.LIMIT_MAXIMA[row["name"]] == row["maximum"], row["name"]
        assert row["error"] in ERRORS
        Limits(**{row["name"]: row["maximum"]})
        with pytest.raises(ValueError, match=row["name"]):
            Limits(**{row["name"]: row["maximum"] + 1})
        with pytest.raises(ValueError, match=row["name"]):
            Limits(**{row["name"]: -1})


def test_errors() -> None:
    """An error that has another number here than in the list all codecs share."""
    assert {row["name"]: (row["number"], row["meaning"]) for row in REGISTRY["errors"]} == ERRORS


def test_each_error_has_the_class_of_its_range() -> None:
    """Whoever catches a class would miss an error of its range."""
    classes = {
        1: errors.Truncated,
        2: errors.MalformedFrame,
        3: errors.MalformedHead,
        4: errors.Unsupported,
        5: errors.OverLimit,
        6: errors.ContractMismatch,
    }
    for name, (number, _) in ERRORS.items():
        if number > 1:
            made = errors.failure(name, 7, tensor="x", field="dims", expected=1, found=2)
            assert type(made) is classes[number // 100]
            assert (made.name, made.number, made.offset) == (name, number, 7)
            assert name in str(made)
            assert "byte 7" in str(made)


@pytest.mark.parametrize(
    ("title", "record", "packer"),
    [
        ("### 2.1 ", layout.FRAME_HEADER, layout.frame_header),
        ("## 3. ", layout.HEAD_FIXED, layout.head_fixed),
        ("### 3.1 ", layout.TENSOR_FIXED, layout.tensor_fixed),
        ("### 3.2 ", layout.ATTRIBUTE_FIXED, layout.attribute_fixed),
    ],
)
def test_layout_is_that_of_the_text(title: str, record: Any, packer: Any) -> None:
    """A field of the declaration that lies elsewhere than the specification's table says."""
    told = [
        (int(offset), int(size), name)
        for offset, size, name, *_ in rows(section(title))
        if offset.isdigit() and size.isdigit()
    ]
    declared = [
        (offset, size, re.sub(r"_\d$", "", name)) for name, (offset, size) in layout.field_table(record).items()
    ]
    assert declared == told
    assert packer.size == record.sizeof() == sum(size for _, size, _ in told)


@pytest.mark.parametrize(
    ("record", "packer"),
    [
        (layout.FRAME_HEADER, layout.frame_header),
        (layout.HEAD_FIXED, layout.head_fixed),
        (layout.TENSOR_FIXED, layout.tensor_fixed),
        (layout.ATTRIBUTE_FIXED, layout.attribute_fixed),
    ],
)
def test_packers_read_what_construct_reads(record: Any, packer: Any) -> None:
    """A packer made with another order or width than its declaration."""
    data = bytes(range(1, packer.size + 1))
    parsed = record.parse(data)
    assert packer.unpack(data) == tuple(parsed[field.name] for field in record.subcons)
    assert packer.pack(*packer.unpack(data)) == data == record.build(parsed)


def test_every_step_of_the_text_is_in_the_decoder() -> None:
    """A check of section 6 that has no place in the decoder, or one that it invented."""
    steps = re.findall(r"^\| ([A-D]\d+) \|", TEXT, re.MULTILINE)
    source = Path(decoder.__file__).read_text("utf-8")
    assert set(re.findall(r"# ([A-D]\d+)$", source, re.MULTILINE)) == set(steps)
    assert len(steps) == len(set(steps))
