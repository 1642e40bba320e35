"""The example of the specification (section 14): every byte of a small bundle explained.

``python -m boundary_bundle.conformance.example`` writes the table into the text;
``--check`` writes nothing and exits with 1 when the text has another one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from .. import Attributes, Bundle, Tensor, encode, layout
from .vectors import FOLDER

TEXT: Final = FOLDER.parent / "boundary-bundle.md"
_BEGIN: Final = "<!-- example -->\n"
_END: Final = "<!-- /example -->\n"


class Row(NamedTuple):
    """A field of the example: where it lies, its bytes, its name and what it says."""

    offset: int
    data: bytes
    field: str
    meaning: str


def bundle() -> Bundle:
    """residual f32 [2, 1], token axis 0, for two tokens of a model called llama; bundle 5."""
    values = np.array([[1.5], [-2.0]], "<f4")
    tensor = Tensor("residual", values, token_axis=0)
    attributes = Attributes()
    attributes["architecture"] = "llama"
    attributes["n_tokens"] = 2
    return Bundle([tensor], attributes, number=5)


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int, field: str, meaning: str) -> Iterator[Row]:
        if size:
            yield Row(self.at, self.data[self.at : self.at + size], field, meaning)
            self.at += size

    def record(self, record: Any, prefix: str, meanings: dict[str, str]) -> Iterator[Row]:
        """Every field of a fixed record; an integer without a meaning of its own shows its value."""
        for name, (_, size) in layout.field_table(record).items():
            value = int.from_bytes(self.data[self.at : self.at + size], "little")
            default = "reserved" if name.startswith("reserved") else f"{value}"
            meaning = meanings.get(name, default).format(value)
            yield from self.take(size, f"{prefix}{name.removesuffix('_2')}", meaning)

    def frame(self, kind: str, meanings: dict[str, str]) -> Iterator[Row]:
        common = {
            "magic": "a frame begins",
            "type": kind,
            "flags": "none",
            "major": "version {}.",
            "minor": ".{}",
            "header_crc": "CRC32C of the 60 bytes before",
        }
        yield from self.record(layout.FRAME_HEADER, "", common | meanings)

    def padding(self, to: str) -> Iterator[Row]:
        size = -self.at % (8 if to == "a multiple of 8" else 64)
        yield from self.take(size, "padding", f"to {to}")


def rows() -> list[Row]:
    """The example's fields in order; together they are the encoder's bytes."""
    data = encode(bundle())
    walk = _Walk(data)
    told: list[Row] = []
    told += walk.frame(
        "head",
        {
            "bundle_number": "bundle {}",
            "body_length": "{} bytes of body",
            "field_a": "0 in a head",
            "field_b": "0 in a head",
            "body_crc": "CRC32C of the body",
        },
    )
    told += walk.record(
        layout.HEAD_FIXED,
        "",
        {
            "head_flags": "payload checksums are there",
            "tensor_count": "{} tensor",
            "attribute_count": "{} attributes",
            "attribute_bytes": "{} bytes of attribute block",
            "fragment_size": "0: one fragment a tensor",
        },
    )
    told += walk.record(
        layout.TENSOR_FIXED,
        "",
        {
            "dtype": "{}: f32",
            "byte_order": "{}: little",
            "rank": "{}",
            "token_axis": "{}: the first dimension counts tokens",  # nosec B105: tokens of text
            "name_length": "{}",
        },
    )
    told += walk.take(8, "dims[0]", "2 tokens")
    told += walk.take(8, "dims[1]", "1 value a token")
    told += walk.take(8, "name", "`residual`, which needs no padding")
    attribute = {"type": "{}: text", "value_length": "{} bytes"}
    told += walk.record(layout.ATTRIBUTE_FIXED, "", attribute | {"key": "0x0002: architecture, ancillary"})
    told += walk.take(5, "value", "`llama`")
    told += walk.padding("a multiple of 8")
    attribute["type"] = "{}: u64"
    told += walk.record(layout.ATTRIBUTE_FIXED, "", attribute | {"key": "0x8006: n_tokens, critical"})
    told += walk.take(8, "value", "2, as the token axis says")
    told += walk.padding("a multiple of 64")
    told += walk.frame(
        "fragment",
        {
            "bundle_number": "bundle {}",
            "body_length": "{} bytes of payload",
            "field_a": "of tensor {}",
            "field_b": "from its byte {} on",
            "body_crc": "CRC32C of the payload",
        },
    )
    told += walk.take(4, "payload", "1.5")
    told += walk.take(4, "payload", "-2.0")
    told += walk.padding("a multiple of 64")
    told += walk.frame(
        "end",
        {
            "bundle_number": "bundle {} is closed",
            "body_length": "no body",
            "field_a": "{} fragment",
            "field_b": "{} payload bytes in all",
            "body_crc": "CRC32C of nothing",
        },
    )
    if walk.at != len(data):
        raise ValueError(f"{len(data) - walk.at} bytes of the example are not explained")
    return told


def _shown(data: bytes) -> str:
    if len(data) > 8 and not any(data):
        return f"`00` x {len(data)}"
    return f"`{data.hex(' ').upper()}`"


def table() -> str:
    """The table of section 14."""
    lines = ["| offset | bytes | field | meaning |", "|---|---|---|---|"]
    lines += [f"| {row.offset} | {_shown(row.data)} | {row.field} | {row.meaning} |" for row in rows()]
    return "".join(f"{line}\n" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boundary_bundle.conformance.example", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the text differs")
    options = parser.parse_args(arguments)
    text = TEXT.read_text("utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    new = f"{before}{_BEGIN}{table()}{_END}{after}"
    if options.check:
        return int(new != text)
    TEXT.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
