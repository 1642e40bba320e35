"""``boundary-bundle diff``: how two bundles differ, bit by bit and by how much."""

from __future__ import annotations

import argparse
from typing import Any

from ..bundle import Tensor
from ..difference import Difference, TensorDifference, compare
from .common import file_name, print_styled, print_table
from .files import add_file_options, attribute_json, plain, print_json, read_bundle, shown, tensor_json


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="compare two bundles",
        description="Compare two bundles: names, shapes, dtypes, bits, largest and mean difference. Either file may be "
        ".npz or .safetensors. Exit status 0: tensors and attributes are the same in every bit. 1: they differ. 2: it "
        "could not be told.",
    )
    parser.add_argument("a", type=file_name, metavar="A", help="a bundle, .npz or .safetensors")
    parser.add_argument("b", type=file_name, metavar="B", help="what it is compared with")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="let bundle number, minor version, fragment size, checksums and byte orders on the wire decide too",
    )
    add_file_options(parser)
    parser.set_defaults(function=diff)


def diff(options: argparse.Namespace) -> int:
    """The command."""
    a = read_bundle(options.a, options.max_size)
    b = read_bundle(options.b, options.max_size)
    found = compare(a, b)
    equal = found.bits_equal if options.strict else found.content_equal
    if options.json:
        print_json(
            {
                "a": shown(options.a),
                "b": shown(options.b),
                "equal": equal,
                "content_equal": found.content_equal,
                "bits_equal": found.bits_equal,
                "order_differs": found.order_differs,
                "tensors": [_row_json(row) for row in found.tensors],
                "attributes": {
                    name: [None if record is None else attribute_json(record) for record in pair]
                    for name, pair in found.attributes.items()
                },
                "framing": {name: [plain(value) for value in pair] for name, pair in found.framing.items()},
            }
        )
    else:
        _print(found, shown(options.a), shown(options.b), equal)
    return 0 if equal else 1


def _row_json(row: TensorDifference) -> dict[str, Any]:
    return {
        "name": row.name,
        "a": None if row.a is None else tensor_json(row.a),
        "b": None if row.b is None else tensor_json(row.b),
        "bits_equal": row.bits_equal,
        "differing": row.differing,
        "largest": plain(row.largest),
        "mean": plain(row.mean),
        "first": None if row.first is None else list(row.first),
        "not_numbers": row.not_numbers,
    }


def _both(row: TensorDifference, tell: Any) -> str:
    """A property of both, once if it is the same."""
    a, b = ("absent" if tensor is None else tell(tensor) for tensor in (row.a, row.b))
    return str(a) if a == b else f"{a} | {b}"


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _verdict(row: TensorDifference) -> str:
    if row.a is None or row.b is None:
        return "missing"
    if row.bits_equal:
        return "equal"
    if row.a.shape != row.b.shape:
        return "shape"
    if row.a.row is not row.b.row:
        return "dtype"
    return "bits" if row.differing else "token axis"


def _print(found: Difference, a: str, b: str, equal: bool) -> None:
    rows = []
    for row in found.tensors:
        number = "-" if row.largest is None else f"{row.largest:.6g}"
        mean = "-" if row.mean is None else f"{row.mean:.6g}"
        if row.not_numbers:
            number += f" and {row.not_numbers:,} NaN"
        rows.append(
            [
                row.name,
                _both(row, lambda tensor: tensor.dtype),
                _both(row, _shape),
                _verdict(row),
                "-" if row.differing is None else f"{row.differing:,}",
                number,
                mean,
                "-" if row.first is None else f"[{', '.join(map(str, row.first))}]",
            ]
        )
    if rows:
        print_table(
            f"{a} | {b}",
            ["tensor", "dtype", "shape", "bits", "differing", "largest", "mean", "first"],
            rows,
        )
    if found.order_differs:
        print("the tensors stand in another order")
    for name, (ours, theirs) in found.attributes.items():
        left, right = ("absent" if record is None else _value(record.value) for record in (ours, theirs))
        print(f"attribute {name}: {left} | {right}")
    for name, pair in found.framing.items():
        print(f"{name}: {pair[0]} | {pair[1]}")
    if found.bits_equal:
        print_styled("equal in every bit", "green")
    elif found.content_equal:
        print_styled("tensors and attributes are equal in every bit; the framing differs", "green" if equal else "red")
    else:
        count = sum(not row.bits_equal for row in found.tensors)
        parts = [f"{count} of {len(found.tensors)} tensors" if count else "", "attributes" if found.attributes else ""]
        what = " and ".join(filter(None, parts)) or "the order of the tensors"
        print_styled(f"different: {what}", "red")


def _value(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else ascii(value)
