"""The vectors of spec/vectors: that they are what the generator writes, and that this codec obeys them.

Catches a codec that accepts, refuses, decodes or encodes otherwise than the vectors'
author read in the specification; and vectors that no longer cover it.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from boundary_bundle.conformance import builder, check, make_vectors
from boundary_bundle.conformance.vectors import FOLDER, Vector, expand, load, shrink

SPEC = Path(__file__).parent.parent / "spec"
TEXT = (SPEC / "boundary-bundle.md").read_text("utf-8")
REGISTRY: dict[str, Any] = json.loads((SPEC / "registry.json").read_text("utf-8"))
VECTORS = list(load())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.file}/{vector.id}")
def test_the_codec_obeys(vector: Vector) -> None:
    """As one bundle, as a core and a stream decoder, whole and in pieces; and encoded again."""
    assert check.faults_of(vector) == []


def test_files_are_what_the_generator_writes() -> None:
    """A vector edited by hand, or a generator that was changed and not run."""
    assert make_vectors.main(["--check"]) == 0


def test_files_obey_their_schema() -> None:
    """A field that a reader of the schema would not expect."""
    schema = json.loads((FOLDER / "schema.json").read_text("utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for path in FOLDER.glob("*.json"):
        if path.name != "schema.json":
            validator.validate(json.loads(path.read_text("utf-8")))


def test_ids_are_unique() -> None:
    assert len({vector.id for vector in VECTORS}) == len(VECTORS)


def test_every_step_is_named() -> None:
    """A check of the specification without a vector, and a vector for a check that is none."""
    steps = set(re.findall(r"^\| ([A-D]\d+) \|", TEXT, re.MULTILINE))
    sections = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", TEXT, re.MULTILINE))
    named = {vector.section for vector in VECTORS}
    assert {f"6:{step}" for step in steps} <= named
    for section in named:
        place, _, rest = section.partition(":")
        assert place in sections, section
        assert not rest or rest in steps or rest in TEXT, section


def test_every_step_has_an_invalid_vector_that_gives_its_error() -> None:
    """A step of the table whose error none of its vectors expects."""
    for step, name in re.findall(r"^\| ([A-D]\d+) \|[^|]*\| `(\w+)` \|", TEXT, re.MULTILINE):
        expected = {v.error.name for v in VECTORS if v.section == f"6:{step}" and v.error is not None}
        assert name in expected, step


def test_every_error_is_named() -> None:
    """An error that no input gives."""
    numbers = {row["name"]: row["number"] for row in REGISTRY["errors"] if row["name"] != "need_more"}
    assert {vector.error.name: vector.error.number for vector in VECTORS if vector.error is not None} == numbers


def test_every_limit_is_met_on_both_sides() -> None:
    """A limit that is off by one: at its value accepted, one above refused."""
    for row in REGISTRY["limits"]:
        exact = [v for v in VECTORS if v.result == "valid" and row["name"] in v.limits and "exact" in v.id]
        above = [v for v in VECTORS if v.error is not None and v.error.name == row["error"] and row["name"] in v.limits]
        assert exact, row["name"]
        assert above, row["name"]


def test_every_dtype_in_each_legal_order() -> None:
    """A dtype or byte order that only the table knows."""
    found = {(t.dtype, t.byte_order) for v in VECTORS if v.file == "dtypes" for b in v.bundles for t in b.tensors}
    orders = {True: ("little", "big"), False: ("little",)}
    assert found == {(row["name"], order) for row in REGISTRY["dtypes"] for order in orders[row["both_orders"]]}


def test_the_builder_has_the_registry() -> None:
    """A builder that would write bundles of another format."""
    assert {
        row["name"]: (row["code"], row["block_elements"], row["block_bytes"], row["both_orders"])
        for row in REGISTRY["dtypes"]
    } == builder.DTYPES
    assert REGISTRY["attribute_types"] == builder.TYPES
    assert REGISTRY["byte_orders"] == builder.ORDERS
    assert builder.MAGIC.hex() == REGISTRY["magic"]
    assert builder.crc32c(b"123456789") == 0xE3069283


def test_the_schema_has_the_registry() -> None:
    """A dtype, type or limit that the schema would refuse."""
    definitions = json.loads((FOLDER / "schema.json").read_text("utf-8"))["$defs"]
    assert definitions["dtype"]["enum"] == [row["name"] for row in REGISTRY["dtypes"]]
    assert definitions["attribute_type"]["enum"] == list(REGISTRY["attribute_types"])
    limits = definitions["vector"]["properties"]["limits"]["propertyNames"]["enum"]
    assert limits == [row["name"] for row in REGISTRY["limits"]]


@pytest.mark.parametrize("vector", [v for v in VECTORS if v.contract is not None], ids=lambda v: v.id)
def test_contract_text(vector: Vector) -> None:
    """A canonical text, and so a fingerprint, that another implementation would not get."""
    raw = vector.contract
    assert raw is not None
    contract = check.contract_of(vector)
    assert contract is not None
    assert contract.text() == raw["text"]
    assert contract.fingerprint().hex() == raw["fingerprint"] == hashlib.sha256(raw["text"].encode()).hexdigest()


def test_recipes() -> None:
    """A recipe that does not give back its bytes; and one that is not shorter."""
    data = bytes(range(64)) + bytes(64 * 1000) + b"\1" * 64 + b"\2" * 33
    recipe = shrink(data)
    assert expand(recipe) == data
    assert len(json.dumps(recipe)) < 700
    assert expand([]) == b"" == expand("")


def test_readme_names_each_flag_and_field() -> None:
    """A field or flag that a stranger finds in the files and not in their description."""
    told = (FOLDER / "README.md").read_text("utf-8")
    vector = json.loads((FOLDER / "schema.json").read_text("utf-8"))["$defs"]["vector"]["properties"]
    for name in (*vector, *vector["flags"]["items"]["enum"]):
        assert f"`{name}`" in told, name
