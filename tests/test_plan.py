"""The planner and what it reads of a GGUF file.

Catches: layers lost or doubled by a cut, a bad cut or a bad file that comes through, or that fails with
anything but one sentence.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boundary_bundle.shards import Plan, PlanError, make_plan, parse_cuts, read_model_file, tiny_models


@given(st.data())
def test_every_layer_is_in_one_range(data: st.DataObject) -> None:
    n_layer = data.draw(st.integers(1, 200))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, n_layer - 1)), max_size=n_layer - 1)))
    plan = make_plan(n_layer, cuts)
    assert [layer for start, end in plan for layer in range(start, end)] == list(range(n_layer))
    assert plan.cuts == cuts
    assert len(plan) == len(cuts) + 1


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ([10, 10], "cut 10 is given twice"),
        ([20, 10], "10 follows 20"),
        ([0], "cut 0 is out of range: a model of 30 layers can be cut at 1 to 29"),
        ([30], "cut 30 is out of range: a model of 30 layers can be cut at 1 to 29"),
        ([10, 31], "cut 31 is out of range"),
    ],
)
def test_bad_cuts(cuts: list[int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_plan(30, cuts)


def test_a_model_of_one_layer_has_no_cut() -> None:
    assert make_plan(1, []).ranges == ((0, 1),)
    with pytest.raises(PlanError, match="nowhere"):
        make_plan(1, [1])


@pytest.mark.parametrize("ranges", [((0, 4), (5, 8)), ((0, 4), (3, 8)), ((0, 4),), ((0, 4), (4, 4), (4, 8)), ()])
def test_a_plan_with_a_hole_or_an_overlap_is_none(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError):
        Plan(8, ranges)


@pytest.mark.parametrize(("text", "cuts"), [("10,20", [10, 20]), (" 7 ", [7]), ("1, 2,3", [1, 2, 3])])
def test_cuts_are_read(text: str, cuts: list[int]) -> None:
    assert parse_cuts(text) == cuts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("10,,20", "cut number 2"),
        ("10,", "cut number 2"),
        ("ten", "'ten' is not a layer number"),
        ("-3", "'-3' is not"),
        ("1.5", "'1.5' is not"),
        ("1e3", "'1e3' is not"),
        ("\u0661", "is not a layer number"),
        ("9" * 5000, r"\(5000 characters\)"),
    ],
)
def test_what_is_no_cut(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_cuts(text)


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_a_file_is_read(tiny: dict[str, Path], variant: str) -> None:
    found = read_model_file(tiny[variant])
    assert found.architecture == "llama"
    assert found.n_layer == tiny_models.VARIANTS[variant].n_layer
    assert found.size == tiny[variant].stat().st_size


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_model_file(tmp_path / "missing.gguf")
    with pytest.raises(PlanError, match="is a folder"):
        read_model_file(tmp_path)
    for content, words in [(b"", "holds 0 bytes"), (b"GG", "holds 2 bytes"), (b"GGML1234", "begins with 47 47 4d 4c")]:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(PlanError, match=words):
            read_model_file(path)


def test_a_file_cut_anywhere_is_refused_with_its_size(tiny: dict[str, Path], tmp_path: Path) -> None:
    whole = tiny["q8_0"].read_bytes()
    path = tmp_path / "short.gguf"
    sizes = {4, 5, 8, 12, 23, 24, 25, *range(30, 20000, 577), len(whole) // 2, len(whole) - 64, len(whole) - 33}
    for size in sorted(sizes):
        path.write_bytes(whole[:size])
        with pytest.raises(PlanError) as caught:
            read_model_file(path)
        assert f"{size} bytes" in str(caught.value), size
        assert "\n" not in str(caught.value)


def test_a_damaged_file_is_one_sentence(tiny: dict[str, Path], tmp_path: Path) -> None:
    whole = bytearray(tiny["q8_0"].read_bytes())
    path = tmp_path / "bad.gguf"
    for place, value in [(4, b"\x63\0\0\0"), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8)]:
        damaged = whole.copy()
        damaged[place : place + len(value)] = value
        path.write_bytes(damaged)
        with pytest.raises(PlanError) as caught:
            read_model_file(path)
        assert "\n" not in str(caught.value)


def test_the_keys_are_those_of_the_architecture(tmp_path: Path) -> None:
    """Whether there are ranges of it is for the library to say."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    path = tmp_path / "other.gguf"
    for name in ("gemma3n", "llama"):
        path.write_bytes(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.architecture") + b"\x08\0\0\0" + text(name)
        )
        with pytest.raises(PlanError, match=f"no usable {name}.block_count"):
            read_model_file(path)


@pytest.mark.parametrize(
    ("n_layer", "n_draft", "expected"),
    [
        (7, 1, 6),
        (7, 0, 7),
        (7, 7, "declares 7 of its 7 layers"),
        (7, -1, "declares -1 of"),
        (0, 0, "declares 0 layers"),
    ],
)
def test_layers_of_a_draft_head_are_none(tmp_path: Path, n_layer: int, n_draft: int, expected: int | str) -> None:
    """They are counted with the model's own in the file, and no range has them."""

    def entry(key: str, value: int) -> bytes:
        return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<Ii", 5, value)

    name = b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama"
    path = tmp_path / "draft.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    path.write_bytes(
        head + name + entry("llama.block_count", n_layer) + entry("llama.nextn_predict_layers", n_draft) + bytes(32)
    )
    if isinstance(expected, int):
        assert read_model_file(path).n_layer == expected
    else:
        with pytest.raises(PlanError, match=expected):
            read_model_file(path)


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    first = tiny_models.write(tmp_path / "a.gguf", "moe").read_bytes()
    assert tiny_models.write(tmp_path / "b.gguf", "moe").read_bytes() == first
    assert tiny_models.write(tmp_path / "c.gguf", "moe", seed=1).read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.gguf"]
