"""Weakens checks of the decoder by hand: ``python -m boundary_bundle.conformance.weakened_checks [--json]``.

:mod:`~boundary_bundle.conformance.deleted_checks` finds a check that nothing holds. A
check can also be there and too narrow: of the first record only, of the low half of a
number, with a grid of 64 in place of the fragment size. Each such mistake of the list
below is made in a copy of the module, and a vector must notice it. The list is no
enumeration: whoever finds a mistake that no vector notices adds it, and the vector.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .. import contract as contract_module
from .. import decoder as decoder_module
from . import check, deleted_checks
from .vectors import Vector


@dataclass(frozen=True)
class Weakening:
    """A place of the source, and what a codec might have there instead."""

    #: Section of the vectors that are to notice.
    section: str
    right: str
    wrong: str


DECODER: Final = tuple(
    Weakening(*row)
    for row in (
        ("6:A1", "magic = bytes(view[pos : pos + 8])", "magic = bytes(view[pos : pos + 4]) + layout.MAGIC[4:]"),
        ("6:B4", "if reserved_2:", "if reserved_2 & 0xFFFFFFFF:"),
        ("6:B4", "if reserved_2:", "if reserved_2 >> 32:"),
        ("6:B5", "flags & layout.REJECTED_FLAGS:", "flags & 0x07:"),
        ("6:B6", "not (kind == layout.FRAGMENT or kind == layout.END)", "not 0x80 <= kind <= layout.END"),
        ("6:B10", "if length > limit:", "if length >= limit:"),
        ("6:B11", "length < _HEAD or length & 7", "length < _HEAD - 8 or length & 7"),
        ("6:B11", "length < _HEAD or length & 7", "length < _HEAD or length & 3"),
        ("6:B12", "if a:", "if a & 0xFFFFFFFF:"),
        ("6:B13", "if b:", "if b & 0xFFFFFFFF:"),
        ("6:B15", "1 if core else limits.open_bundles", "min(1, limits.open_bundles) if core else limits.open_bundles"),
        ("6:B15", "1 if core else limits.open_bundles", "limits.open_bundles"),
        ("6:B15", "len(self.open) >= self.open_limit", "len(self.open) > self.open_limit"),
        ("6:B30", "if a >= len(head.tensors):", "if a > len(head.tensors):"),
        ("6:B31", "b % grid if grid else b", "b % 64 if grid else b"),
        ("6:B31", "if b >= size or", "if b > size or"),
        ("6:B32", "if length != expected:", "if length > expected:"),
        ("6:B32", "if length != expected:", "if length < expected:"),
        (
            "6:B33",
            "(a != state.next_index or b != state.next_offset)",
            "(a, b) < (state.next_index, state.next_offset)",
        ),
        ("6:B42", "if a != head.fragments:", "if a > head.fragments:"),
        ("6:B42", "if a != head.fragments:", "if a < head.fragments:"),
        ("6:B43", "if b != head.payload_bytes:", "if b > head.payload_bytes:"),
        ("6:B43", "if b != head.payload_bytes:", "if b < head.payload_bytes:"),
        ("6:B50", "elif length > limits.extension_bytes:", "elif length >= limits.extension_bytes:"),
        ("6:C2", "if pad.count(0) != len(pad):  # C2", "if pad[0]:  # C2"),
        ("6:C2", "if pad.count(0) != len(pad):  # C2", "if pad[-1]:  # C2"),
        ("6:C3", "if before[offset] != body:", "if before[offset][:4] != body[:4]:"),
        ("6:C4", "if values.max() > 1:", "if values[0] > 1:"),
        ("6:D1", "if head_flags & layout.UNKNOWN_HEAD_FLAGS:", "if head_flags & 0xFE:"),
        ("6:D1", "if head_flags & layout.UNKNOWN_HEAD_FLAGS:", "if head_flags & 0xFFFE == head_flags:"),
        (
            "3",
            "checksums = not head_flags & layout.CHECKSUMS_ABSENT",
            "checksums = head_flags != layout.CHECKSUMS_ABSENT",
        ),
        (
            "6:D2",
            "checksums = not head_flags & layout.CHECKSUMS_ABSENT",
            "checksums = head_flags != layout.CHECKSUMS_ABSENT",
        ),
        ("6:D3", "if reserved:  # D3", "if reserved & 0xFFFFFFFF:  # D3"),
        ("6:D4", "if tensor_count > limits.tensors:", "if tensor_count >= limits.tensors:"),
        ("6:D6", "attribute_bytes & 7 or", "attribute_bytes & 3 or"),
        ("6:D6", "attribute_bytes > length - _HEAD:", "attribute_bytes > length:"),
        ("6:D7", "if fragment_size & 63:", "if fragment_size & 31:"),
        ("6:D17", "if axis >= rank and", "if axis > rank and"),
        ("6:D18", "if zeros != _ZERO_3:", "if zeros[:2] != _ZERO_3[:2]:"),
        ("6:D19", "if shape and max(shape) > limits.dimension:", "if shape and shape[0] > limits.dimension:"),
        ("6:D19", "if shape and max(shape) > limits.dimension:", "if shape and shape[-1] > limits.dimension:"),
        (
            "6:D19",
            "if shape and max(shape) > limits.dimension:",
            "if 0 not in shape and shape and max(shape) > limits.dimension:",
        ),
        ("6:D21", "if shape[-1] % block:", "if shape[0] % block:"),
        ("6:D23", "bound = elements or prod(dim or 1 for dim in shape)", "bound = elements"),
        ("6:D23", "bound = elements or prod(dim or 1 for dim in shape)", "bound = elements % 2**64"),
        ("6:D23", "bound = -(-bound // block)", "bound //= block"),
        ("6:D24", "payload_total += payload", "payload_total += bound * row.block_bytes"),
        ("6:D24", "payload_total += payload", "payload_total = (payload_total + payload + 2**63) % 2**64 - 2**63"),
        ("6:D26", "fragments = -(-payload // fragment_size)", "fragments = payload // fragment_size"),
        ("6:D26", "fragments = 1 if payload else 0", "fragments = 1"),
        ("6:D28", "if pad.count(0) != len(pad):  # D28", "if pad[0]:  # D28"),
        ("6:D29", "names.add(raw_name)", "names = names or {raw_name}"),
        ("6:D29", "names.add(raw_name)", "names = {raw_name}"),
        ("6:D30", "if tokens is None:", "if not tokens:"),
        ("6:D30", "elif shape[axis] != tokens:", "elif shape[axis] and shape[axis] != tokens:"),
        ("6:D40", "if r != table_end:", "if r + 16 <= table_end:"),
        ("6:D52", "if not key & key_number:", "if not key:"),
        ("6:D52", "if not key & key_number:", "if not key & 0x7FFF:"),
        ("6:D53", "if key <= before:", "if key < before:"),
        ("6:D53", "if key <= before:", "if key == before:"),
        ("6:D54", "if not 1 <= kind <= 5:", "if not 1 <= kind <= 6:"),
        ("6:D54", "if not 1 <= kind <= 5:", "if not 0 <= kind <= 5:"),
        ("6:D58", "wanted = 8 if kind <= 3 else None", "wanted = 8 if kind < 3 else None"),
        ("6:D59", "bytes(range(0x20, 0x7F))", "bytes(range(0x20, 0x80))"),
        ("6:D60", "if pad.count(0) != len(pad):  # D60", "if pad[-1]:  # D60"),
        ("6:D61", "if key == _N_TOKENS and tokens is not None and", "if key == _N_TOKENS and tokens and"),
        ("6:D70", "if s != end:", "if s + 16 <= end:"),
        ("6:trailing_bytes", "if pos != len(view):", "if pos + 8 <= len(view):"),
        (
            "6:contract_attribute",
            "if self.contract is not None:\n",
            "if self.contract is not None and not self.frames:\n",
        ),
    )
)
CONTRACT: Final = tuple(
    Weakening(*row)
    for row in (
        (
            "5.3",
            'frozenset(ATTRIBUTES[name][0] for name in ("layer_start", "layer_end"))',
            'frozenset({ATTRIBUTES["layer_start"][0]})',
        ),
        (
            "5.3",
            'frozenset(ATTRIBUTES[name][0] for name in ("layer_start", "layer_end"))',
            'frozenset({ATTRIBUTES["layer_end"][0]})',
        ),
        ("5.3", "if self.constant or not parts:", "if self.constant:"),
        ("5.3", "self.symbols = sorted(term for", "self.symbols = list(term for"),
        ("5.3", "self._demanded = sorted(", "self._demanded = list("),
        ("6:contract_attribute", "self._demanded = sorted(", "self._demanded = list("),
        ("5.3", 'f"attribute {key:#06x} {record.type_name}', 'f"attribute {key:#x} {record.type_name}'),
        ("5.3", 'f"attribute {key:#06x} {record.type_name}', 'f"attribute 0x{key:04X} {record.type_name}'),
        ("5.3", 'f"attribute {key:#06x} {_TYPE_NAMES', 'f"attribute {key:#x} {_TYPE_NAMES'),
        ("5.3", 'f"attribute {key:#06x} {_TYPE_NAMES', 'f"attribute 0x{key:04X} {_TYPE_NAMES'),
        ("5.3", '{record.raw.hex()}".rstrip()', '{record.raw.hex()}"'),
        ("5.3", "{record.raw.hex()}", "{record.raw.hex().upper()}"),
        ("5.3", "if value is None:\n                return None", "if not value:\n                return None"),
        ("6:contract_attribute", "if record == wanted:", "if record is not None and record.type == wanted.type:"),
        ("6:contract_attribute", "if record is not None and record.type == kind:", "if record is not None:"),
        ("6:contract_shape", "return total\n", "return total & 0xFFFFFFFFFFFFFFFF\n"),
        ("6:contract_shape", "dimension.size(values) != size for", "dimension.size(values) not in (None, size) for"),
        (
            "6:contract_shape",
            "if symbol not in values and place < len(shape):",
            "if symbol not in values and len(shape) == len(self.tensors[index].sums):",
        ),
        (
            "6:contract_shape",
            "if symbol not in values and place < len(shape):",
            "if not values.get(symbol) and place < len(shape):",
        ),
        (
            "6:contract_shape",
            "if symbol not in values and place < len(shape):",
            "if symbol != _TOKENS and place < len(shape):",
        ),
        ("5.3", "if symbol not in values and place < len(shape):", "if symbol != _TOKENS and place < len(shape):"),
        ("6:contract_shape", "if record is not None and isinstance(record.value, int):", "if False:"),
        (
            "6:contract_token_axis",
            "if tensor.token_axis != rule.token_axis:",
            "if (tensor.token_axis is None) != (rule.token_axis is None):",
        ),
    )
)


@dataclass(frozen=True)
class Row:
    """A line of the table: a weakening, and the ids of the vectors that noticed."""

    section: str
    right: str
    wrong: str
    asked: int
    caught: tuple[str, ...]


def weakened(original: ModuleType, weakening: Weakening) -> ModuleType:
    """A copy of a module with the mistake in it."""
    source = Path(str(original.__file__)).read_text("utf-8")
    if source.count(weakening.right) != 1:
        raise ValueError(f"{weakening.right!r} stands {source.count(weakening.right)} times in {original.__name__}")
    return deleted_checks.compiled(original, source.replace(weakening.right, weakening.wrong))


def notices(vector: Vector, module: ModuleType) -> bool:
    """Whether a vector fails with ``module``; of section 5.3 the text of its contract counts too."""
    raw = vector.contract
    if raw is not None and vector.section == "5.3" and not hasattr(module, "Decoder"):
        try:
            contract: Any = check.contract_of(vector, module)
            if contract.text() != raw["text"]:
                return True
        except ValueError:
            return True
    return deleted_checks.notices(vector, module)


def table() -> list[Row]:
    """One row a weakening, in the order of the lists."""
    vectors = deleted_checks.by_section()
    rows = []
    for original, weakenings in ((decoder_module, DECODER), (contract_module, CONTRACT)):
        for one in weakenings:
            module = weakened(original, one)
            asked = vectors.get(one.section, [])
            caught = tuple(vector.id for vector in asked if notices(vector, module))
            rows.append(Row(one.section, one.right, one.wrong, len(asked), caught))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boundary_bundle.conformance.weakened_checks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args(arguments)
    rows = table()
    for row in rows:
        if options.json:
            print(json.dumps(vars(row)))
        else:
            seen = ", ".join(row.caught[:3]) + (", ..." if len(row.caught) > 3 else "")
            counts = f"{len(row.caught):>3} of {row.asked}"
            wrong = " ".join(row.wrong.split())
            print(f"{row.section:<22} {counts:<10} {wrong[:64]:<64}  {seen or 'NOT NOTICED'}")
    missed = [row for row in rows if not row.caught]
    if not options.json:
        print(f"{len(rows)} weakenings, {len(missed)} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
