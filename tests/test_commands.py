"""The commands on files: inspect, validate, diff, convert. What they say, and their exit status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boundary_bundle import (
    DTYPES,
    ERRORS,
    Attribute,
    Bundle,
    BundleError,
    Tensor,
    bits_equal,
    decode,
    encode,
    layout,
)
from boundary_bundle.anatomy import dissect, first_error
from boundary_bundle.cli import main
from boundary_bundle.difference import compare
from boundary_bundle.interchange import ConversionError, from_npz, from_safetensors, to_npz, to_safetensors
from boundary_bundle.testing import bundles, damaged, frames

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LIMIT = 1 << 24


def step(number: int = 7, **changes: Any) -> Bundle:
    random = np.random.default_rng(5)
    tensors = {
        "residual": Tensor("residual", random.standard_normal((3, 8), np.float32), token_axis=0),
        "positions": Tensor("positions", np.arange(7, 10, dtype=np.int32), token_axis=0, byte_order="big"),
        "outputs": Tensor("outputs", np.array([True, False, True]), token_axis=0),
    }
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            old = tensors.get(name)
            axis = old.token_axis if old is not None else None
            tensors[name] = value if isinstance(value, Tensor) else Tensor(name, value, token_axis=axis)
    attributes = {"n_tokens": 3, "architecture": "llama", "model_fingerprint": bytes(range(32)), 0x4001: "<b>&"}
    return Bundle(tensors.values(), attributes, number=number)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.bundle"
    path.write_bytes(encode(step()))
    return path


def write(path: Path, bundle: Bundle | bytes) -> Path:
    path.write_bytes(bundle if isinstance(bundle, bytes) else encode(bundle))
    return path


Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys: Capture, *arguments: Any) -> str:
    """The one sentence of a refusal."""
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return err


# Files


@pytest.mark.parametrize("command", ["inspect", "validate", "diff", "convert"])
def test_files_that_cannot_be_read(command: str, tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A traceback, a wait without end, or memory by a size that nobody asked for."""
    second = {"diff": [good], "convert": [tmp_path / "x.npz"]}.get(command, [])
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large"
    with large.open("wb") as stream:
        stream.truncate(1 << 33)
    for path, reason in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "not a regular file|Is a directory"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (large, "more than the 4,294,967,296 of --max-size"),
    ):
        status, _, err = run(capsys, command, path, *second)
        assert status == 2
        assert re.search(reason, err), err
        assert err.count("\n") == 1
    assert "more than the 100" in run(capsys, command, good, *second, "--max-size", "100")[2]
    assert "is not a number of bytes" in refused(capsys, command, good, *second, "--max-size", "1.5")


def test_names_that_a_terminal_would_obey(tmp_path: Path, capsys: Capture) -> None:
    """An escape sequence in a file's name, written to the terminal."""
    path = write(tmp_path / "a\x1b[31m\nb", encode(step()))
    for command in ("inspect", "validate"):
        out = run(capsys, command, path)[1]
        assert "\x1b" not in out
        assert "a\\x1b[31m\\nb" in out


def test_every_command_has_help(capsys: Capture) -> None:
    """A command that the dispatcher does not know."""
    for command in ("inspect", "validate", "diff", "convert"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert "Exit status 0" in " ".join(capsys.readouterr().out.split())


# validate


def test_validate(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A verdict, a status or an offset that is not the decoder's."""
    status, out, err = run(capsys, "validate", good)
    assert (status, err) == (0, "")
    assert out == f"{good}: valid, canonical: 1 bundle, 3 tensors, {good.stat().st_size:,} bytes\n"
    data = bytearray(good.read_bytes())
    data[0x30] ^= 1
    bad = write(tmp_path / "bad", bytes(data))
    status, out, _ = run(capsys, "validate", good, bad)
    assert status == 1
    assert "valid, canonical" in out
    assert "invalid: header_crc" in out
    status, out, err = run(capsys, "validate", good, tmp_path / "absent", bad)
    assert status == 2
    assert out.count("\n") == 2
    assert err.count("\n") == 1


def test_validate_json(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """JSON that lacks what the text says, or that a strict reader refuses."""
    cut = write(tmp_path / "cut", good.read_bytes()[:-1])
    empty = write(tmp_path / "empty", b"")
    status, out, err = run(capsys, "validate", good, cut, empty, tmp_path / "absent", "--json")
    assert (status, err) == (2, "")
    first, second, third, fourth = json.loads(out)["files"]
    assert (first["valid"], first["canonical"]) == (True, True)
    assert first["bundles"][0]["tensors"][1] == {
        "name": "positions",
        "dtype": "i32",
        "shape": [3],
        "token_axis": 0,
        "byte_order": "big",
    }
    assert first["bundles"][0]["attributes"][0] == {
        "key": "0x0002",
        "name": "architecture",
        "type": "text",
        "value": "llama",
    }
    assert second["error"]["name"] == "truncated"
    assert second["error"]["offset"] == cut.stat().st_size
    assert (third["error"]["name"], third["error"]["offset"]) == ("truncated", 0)
    assert fourth["valid"] is None
    assert "No such file" in fourth["reason"]


def test_validate_knows_the_canonical_form(tmp_path: Path, capsys: Capture) -> None:
    """Shuffled fragments, an extension or an ignorable bit taken for the canonical form, or two bundles not."""
    bundle = Bundle([Tensor("x", np.zeros(64, np.float32))], fragment_size=64)
    head, first, second, *rest = [part.bytes() for part in frames(encode(bundle))]
    shuffled = b"".join((head, second, first, *rest))
    flags = frames(encode(bundle))
    flags[0].header[layout.frame_offset("flags")] = 0x10
    flags[0].repair(True)
    for data, canonical in (
        (encode(bundle) + encode(step()), True),
        (shuffled, False),
        (encode(bundle) + shuffled, False),
        (b"".join(part.bytes() for part in flags), False),
    ):
        path = write(tmp_path / "x", data)
        assert run(capsys, "validate", path)[0] == 0
        status, out, _ = run(capsys, "validate", path, "--canonical")
        assert status == (0 if canonical else 1)
        assert ("not canonical" in out) != canonical
    bare = write(tmp_path / "bare", Bundle(checksums=False))
    assert run(capsys, "validate", bare)[0] == 0
    status, out, _ = run(capsys, "validate", bare, "--require-checksums")
    assert status == 1
    assert "checksums_required" in out


# diff


def different(capsys: Capture, tmp_path: Path, other: Bundle, *options: str) -> dict[str, Any]:
    a, b = write(tmp_path / "a", step()), write(tmp_path / "b", other)
    status, out, err = run(capsys, "diff", a, b, "--json", *options)
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    assert status == (0 if found["equal"] else 1)
    status_of_text, text, _ = run(capsys, "diff", a, b, *options)
    assert status_of_text == status
    assert text
    return found


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["tensors"]}


def test_diff_of_the_same(tmp_path: Path, capsys: Capture) -> None:
    """Two equal bundles that differ, or a difference in framing that passes for one in content."""
    found = different(capsys, tmp_path, step())
    assert found["equal"]
    assert found["bits_equal"]
    other = step(number=2**64 - 1)
    other.fragment_size = 64
    other.tensors[1].byte_order = "little"
    found = different(capsys, tmp_path, other)
    assert found["equal"]
    assert found["content_equal"]
    assert not found["bits_equal"]
    assert found["framing"] == {
        "number": [7, "18446744073709551615"],
        "fragment_size": [0, 64],
        "byte order of positions": ["big", "little"],
    }
    assert not different(capsys, tmp_path, other, "--strict")["equal"]


def test_diff_of_values(tmp_path: Path, capsys: Capture) -> None:
    """A largest, mean or first difference that is not the one."""
    array = step()["residual"].copy()
    array[1, 5] += 2
    array[2, 7] -= 0.5
    row = rows(different(capsys, tmp_path, step(residual=array)))["residual"]
    assert (row["bits_equal"], row["differing"], row["first"]) == (False, 2, [1, 5])
    assert row["largest"] == pytest.approx(2, rel=1e-6)
    assert row["mean"] == pytest.approx(2.5 / 24, rel=1e-6)
    row = rows(different(capsys, tmp_path, step(outputs=np.array([True, True, True]))))["outputs"]
    assert (row["differing"], row["largest"], row["first"]) == (1, 1.0, [1])
    # -0.0 and 0.0 are different bits, and no distance apart.
    zeros = np.zeros(3, np.float32)
    row = rows(different(capsys, tmp_path, step(outputs=None)))["outputs"]
    assert (row["a"]["dtype"], row["b"], row["bits_equal"]) == ("bool", None, False)
    found = compare(Bundle([Tensor("x", zeros)]), Bundle([Tensor("x", -zeros)]))
    assert (found.tensors[0].differing, found.tensors[0].largest) == (3, 0.0)
    assert not found.content_equal


def test_diff_of_structure(tmp_path: Path, capsys: Capture) -> None:
    """A shape, dtype, axis, order or attribute whose difference is not told."""
    row = rows(different(capsys, tmp_path, step(outputs=np.zeros((3, 1), np.bool_))))["outputs"]
    assert (row["b"]["shape"], row["differing"], row["bits_equal"]) == ([3, 1], None, False)
    row = rows(different(capsys, tmp_path, step(residual=step()["residual"].astype(np.float16))))["residual"]
    assert (row["a"]["dtype"], row["b"]["dtype"], row["bits_equal"]) == ("f32", "f16", False)
    assert 0 < row["largest"] < 0.01
    other = step()
    other.tensors[2].token_axis = None
    assert not rows(different(capsys, tmp_path, other))["outputs"]["bits_equal"]
    other = step()
    other.tensors.reverse()
    found = different(capsys, tmp_path, other)
    assert found["order_differs"]
    assert not found["equal"]
    other = step(extra=np.zeros(1))
    other.attributes["architecture"] = "gemma"
    del other.attributes[0x4001]
    found = different(capsys, tmp_path, other)
    assert not found["order_differs"]
    assert rows(found)["extra"]["a"] is None
    assert list(found["attributes"]) == ["architecture", "0x4001"]
    assert found["attributes"]["0x4001"][1] is None


@pytest.mark.parametrize(
    ("dtype", "a", "b", "differing", "largest", "not_numbers"),
    [
        (np.int64, [2**63 - 1, 0], [-(2**63), 0], 1, float(2**64 - 1), 0),
        (np.uint64, [2**63 + 1], [2**63], 1, 1.0, 0),
        (np.int8, [-128, 1], [127, 1], 1, 255.0, 0),
        (np.float32, [np.inf, 1], [np.inf, 1], 0, 0.0, 0),
        (np.float32, [np.inf, 1], [-np.inf, 1], 1, np.inf, 0),
        (np.float32, [np.nan, 1], [np.nan, 1], 0, 0.0, 0),
        (np.float32, [np.nan, 1], [3, 1.5], 2, 0.5, 1),
        (np.float16, [65504], [-65504], 1, 131008.0, 0),
        (">f8", [1.0, 2.0], [1.0, 4.0], 1, 2.0, 0),
    ],
)
def test_distances(dtype: Any, a: Any, b: Any, differing: int, largest: float, not_numbers: int) -> None:
    """A distance that wraps round, that is lost in a float, or that a NaN spoils."""
    (row,) = compare(Bundle([Tensor("x", np.array(a, dtype))]), Bundle([Tensor("x", np.array(b, dtype))])).tensors
    assert (row.differing, row.largest, row.not_numbers) == (differing, largest, not_numbers)
    assert row.bits_equal == (not differing)


def test_distances_of_blocks_and_of_many() -> None:
    """Blocks compared as bytes; a place that is counted from the start of a chunk."""
    blocks = np.zeros((3, 68), np.uint8)
    blocks[:, 0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    blocks[:, 34:36] = blocks[:, 0:2]
    other = blocks.copy()
    other[2, 34 + 2 + 9] = 4
    (row,) = compare(Bundle([Tensor("x", blocks, dtype="q8_0")]), Bundle([Tensor("x", other, dtype="q8_0")])).tensors
    assert (row.first, row.differing, row.largest, row.mean) == ((2, 41), 1, 2.0, 2.0 / 192)
    large = np.zeros((2, 1 << 19), np.float32)
    changed = large.copy()
    changed[1, 77] = 1
    (row,) = compare(Bundle([Tensor("x", large)]), Bundle([Tensor("x", changed)])).tensors
    assert (row.first, row.differing, row.mean) == ((1, 77), 1, 1 / large.size)


@QUICK
@given(bundles(), bundles())
def test_diff_agrees_with_the_codec(a: Bundle, b: Bundle) -> None:
    """A bundle that differs from itself, or two that do not although their encodings do."""
    assert compare(a, decode(encode(a))).bits_equal
    assert compare(a, b).bits_equal == bits_equal(a, b)
    assert compare(b, a).content_equal == compare(a, b).content_equal


def test_diff_that_cannot_be(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A damaged file that counts as a different one."""
    bad = write(tmp_path / "bad", good.read_bytes()[:-1])
    two = write(tmp_path / "two", good.read_bytes() * 2)
    assert "truncated" in refused(capsys, "diff", good, bad)
    assert "truncated" in refused(capsys, "diff", bad, good, "--json")
    assert "holds 2 bundles, not one" in refused(capsys, "diff", good, two)
    assert "required" in refused(capsys, "diff", good)


# convert


@QUICK
@given(bundles())
def test_conversions_lose_nothing(bundle: Bundle) -> None:
    """A name, dtype, bit, order, axis, attribute or framing that does not come back."""
    expected = encode(bundle)
    for back in (from_npz(to_npz(bundle), LIMIT), from_safetensors(to_safetensors(bundle))):
        assert encode(back) == expected
        assert bits_equal(back, bundle)
    assert to_npz(bundle) == to_npz(decode(expected))


def test_convert(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A way there and back that changes a byte."""
    for suffix in (".npz", ".safetensors", ".NPZ"):
        there, back = tmp_path / f"there{suffix}", tmp_path / "back.bundle"
        status, out, err = run(capsys, "convert", good, there)
        assert (status, err) == (0, "")
        assert str(there) in out
        assert run(capsys, "convert", there, back, "--force")[0] == 0
        assert back.read_bytes() == good.read_bytes()
        status, out, _ = run(capsys, "convert", there, back, "--force", "--json")
        assert status == 0
        told = json.loads(out)
        assert (told["format"], told["bytes"]) == ("bundle", good.stat().st_size)
        assert run(capsys, "diff", good, there, "--strict")[0] == 0
    assert not list(tmp_path.glob(".partial*"))


def test_converted_files_are_what_others_read(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A file that only this package can read."""
    from safetensors.numpy import load_file

    bundle = step()
    run(capsys, "convert", good, tmp_path / "x.npz")
    run(capsys, "convert", good, tmp_path / "x.safetensors")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert set(archive.files) == {*bundle.names, "@boundary_bundle"}
        loaded = [dict(archive), load_file(tmp_path / "x.safetensors")]
    for arrays in loaded:
        for tensor in bundle:
            assert arrays[tensor.name].dtype == tensor.row.numpy
            np.testing.assert_array_equal(arrays[tensor.name], tensor.array)


def test_files_of_others(tmp_path: Path, capsys: Capture) -> None:
    """A file without our description that is refused, or an array that is read wrongly."""
    from safetensors.numpy import save_file

    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b/c": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "big": np.arange(3, dtype=">f8"),
        "scalar": np.array(7, np.uint8),
        "none": np.zeros((0, 4), np.float16),
    }
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    save_file(plain, tmp_path / "x.safetensors")
    for name in ("x.npz", "x.safetensors"):
        assert run(capsys, "convert", tmp_path / name, tmp_path / "x.bundle", "--force")[0] == 0
        bundle = decode((tmp_path / "x.bundle").read_bytes())
        assert set(bundle.names) == set(arrays)
        for key, array in arrays.items():
            np.testing.assert_array_equal(bundle[key], array)
            assert bundle[key].dtype == array.dtype.newbyteorder("=")


def npz(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no readable .npz"),
        (b"PK\3\4" + bytes(100), "no readable .npz"),
        (npz(a=b"x"), "no .npy file"),
        (npz(**{"a.npy": b"x"}), "no readable .npz"),
        (npz(**{"a.npy": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}")}), "not those of"),
        (npz(**{"a.npy": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}")}), "not those of"),
        (npz(**{"a.npy": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", bytes(4))}), "."),
        (npz(**{"a.npy": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8))}), "not numbers"),
        (
            npz(**{"a.npy": npy("{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", bytes(8))}),
            "unsupported_dtype",
        ),
        (npz(**{"a.npy": npy("{'descr': '|V0', 'fortran_order': False, 'shape': (1,)}")}), "not numbers"),
        (npz(**{"a.npy": b"\x93NUMPY\7\0" + bytes(100)}), "format 7.0|no readable"),
        (npz(**{"a.npy": bytes(1 << 25)}), "more than 16,777,216 bytes"),
        (
            npz(**{"@boundary_bundle.npy": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}", b"{}")}),
            "damaged",
        ),
        (
            npz(
                **{"@boundary_bundle.npy": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}", b"\xff\xff")}
            ),
            ".",
        ),
        (npz(**{"bad name.npy": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}", b"{}")}), "tensor_name"),
    ],
)
def test_hostile_npz(data: bytes, reason: str, tmp_path: Path, capsys: Capture) -> None:
    """A pickle that runs, an allocation by a declared size, a bomb, or a traceback."""
    path = write(tmp_path / "x.npz", data)
    assert re.search(reason, refused(capsys, "convert", path, tmp_path / "y", "--max-size", "16M"))
    assert not (tmp_path / "y").exists()


def described(**changes: Any) -> bytes:
    """An .npz whose description says something else."""
    data = to_npz(step())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    raw = np.load(io.BytesIO(members["@boundary_bundle.npy"]))
    told = json.loads(raw.tobytes())
    for key, value in changes.items():
        if callable(value):
            value(told[key])
        else:
            told[key] = value
    stream = io.BytesIO()
    np.save(stream, np.frombuffer(json.dumps(told).encode(), np.uint8))
    members["@boundary_bundle.npy"] = stream.getvalue()
    return npz(**members)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"tensors": []},
        {"tensors": None},
        {"tensors": lambda rows: rows[0].update(name="absent")},
        {"tensors": lambda rows: rows.append(rows[0])},
        {"tensors": lambda rows: rows[0].update(dtype="f64")},
        {"tensors": lambda rows: rows[0].update(dtype="q9")},
        {"tensors": lambda rows: rows[0].update(dtype=["f32"])},
        {"tensors": lambda rows: rows[0].update(token_axis=5)},
        {"tensors": lambda rows: rows[0].update(token_axis="0")},
        {"tensors": lambda rows: rows[0].update(byte_order="middle")},
        {"tensors": lambda rows: rows[0].update(byte_order=1)},
        {"attributes": [{"key": 1 << 70, "type": "u64", "value": ""}]},
        {"attributes": [{"key": 1, "type": "u65", "value": ""}]},
        {"attributes": [{"key": 1, "type": "u64", "value": "zz"}]},
        {"attributes": 5},
        {"number": "x"},
        {"number": str(1 << 64)},
        {"minor": -1},
        {"fragment_size": "3"},
        {"fragment_size": "1e9"},
    ],
)
def test_damaged_descriptions(changes: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    """A description that is believed, and a traceback where it cannot be."""
    path = write(tmp_path / "x.npz", described(**changes))
    refused(capsys, "convert", path, tmp_path / "y")
    assert run(capsys, "convert", write(tmp_path / "z.npz", described()), tmp_path / "y")[0] == 0


@QUICK
@given(st.data())
def test_damaged_foreign_files(data: st.DataObject) -> None:
    """Damage to a file of another format that raises anything but a sentence."""
    for made, reader in (
        (to_npz(step()), lambda raw: from_npz(raw, LIMIT)),
        (to_safetensors(step()), from_safetensors),
    ):
        spoilt = bytearray(made)
        for _ in range(data.draw(st.integers(1, 3))):
            spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
        del spoilt[data.draw(st.integers(len(spoilt) // 2, len(spoilt))) :]
        try:
            reader(bytes(spoilt))
        except (ConversionError, BundleError):
            continue


def test_convert_targets(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A file that is lost because another was to be written, or a half-written one."""
    kept = write(tmp_path / "kept.npz", b"precious")
    assert "--force" in refused(capsys, "convert", good, kept)
    assert kept.read_bytes() == b"precious"
    refused(capsys, "convert", good, tmp_path / "no" / "x.npz")
    assert "folder" in refused(capsys, "convert", good, tmp_path, "--force")
    reserved = write(tmp_path / "reserved", Bundle([Tensor("__metadata__", np.zeros(1))]))
    assert "__metadata__" in refused(capsys, "convert", reserved, tmp_path / "x.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.bundle", "kept.npz", "reserved"]
    # In place: source and target may be one file.
    assert run(capsys, "convert", good, good, "--force")[0] == 0
    assert run(capsys, "validate", good, "--canonical")[0] == 0


def test_convert_without_safetensors(
    tmp_path: Path, good: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback where an optional package is missing."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    assert "boundary-bundle[convert]" in refused(capsys, "convert", good, tmp_path / "x.safetensors")
    assert run(capsys, "convert", good, tmp_path / "x.npz")[0] == 0


def test_every_dtype_converts() -> None:
    """A dtype that one of the formats names otherwise."""
    for row in DTYPES.values():
        stored = row.storage_shape((2, 32))
        raw = np.arange(int(np.prod(stored)) * row.numpy.itemsize, dtype=np.int64).astype(np.uint8) % 2
        bundle = Bundle([Tensor("x", raw.view(row.numpy).reshape(stored), dtype=row.name)])
        assert bits_equal(from_npz(to_npz(bundle), LIMIT), bundle)
        assert bits_equal(from_safetensors(to_safetensors(bundle)), bundle)


# inspect


def covered(found: Any) -> int:
    """The rows follow one another without a gap; where they end."""
    at = 0
    for row in found.rows:
        assert row.offset == at
        at = row.end
    return at


@QUICK
@given(bundles())
def test_inspect_accounts_for_every_byte(bundle: Bundle) -> None:
    """A byte that no row holds, or that two rows hold."""
    data = encode(bundle)
    found = dissect(data, payload_bytes=1 << 20, max_frames=1 << 20)
    assert found.error is None
    assert covered(found) == len(data)
    assert b"".join(row.data for row in found.rows) == data
    assert not any(row.damaged for row in found.rows)
    assert [[info.name for info in head.tensors] for head in found.heads] == [bundle.names]


@settings(QUICK, max_examples=400)
@given(damaged())
def test_inspect_stops_at_the_damage(data: bytes) -> None:
    """A walk past the damage, one that ends before it, or one that fails on it."""
    found = dissect(data, payload_bytes=1 << 20, max_frames=1 << 20)
    error = first_error(data)
    assert (found.error is None) == (error is None)
    if error is None:
        assert covered(found) == len(data)
        return
    assert found.error is not None
    assert (found.error.name, found.error.offset) == (error.name, error.offset)
    assert error.offset is not None
    end = covered(found)
    marked = [row for row in found.rows if row.damaged]
    if end == error.offset:
        # Cut off: in the middle of a field, or between two.
        assert error.name == "truncated"
        assert marked in ([], found.rows[-1:])
    else:
        assert marked == [found.rows[-1]]
        assert marked[0].offset <= error.offset <= marked[0].end
    assert b"".join(row.data for row in found.rows)[: error.offset] == data[: error.offset]


def test_inspect_text(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A field without its name from the declaration, colour in a pipe, or a value that is not there."""
    status, out, err = run(capsys, "inspect", good)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    for record in (layout.FRAME_HEADER, layout.HEAD_FIXED, layout.TENSOR_FIXED, layout.ATTRIBUTE_FIXED):
        for name in layout.field_table(record):
            assert re.search(rf"^ .* {name.removesuffix('_2')} ", out, re.MULTILINE), name
    for line in (
        r"00000000 +89 42 44 42 0d 0a 1a 0a +magic",
        r"00000008 +81 +type +0x81 +head$",
        r"dims\[0\] +3 +tokens$",
        r"03 00 00 00 00 00 00 00 +value +3 +u64$",
        r"payload +7, 8, 9 +i32 \[3\], big-endian$",
        r"payload +1, 0, 1 +bool \[3\]$",
        r"value +<b>& +text$",
        r"header_crc +0x[0-9a-f]{8} +CRC32C, right$",
        r"^sound: 1 bundle$",
    ):
        assert re.search(line, out, re.MULTILINE), line


def test_inspect_damage(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """Damage without its place, its field, or what was expected and found there."""
    data = bytearray(good.read_bytes())
    fragment = data.index(encode(Bundle())[:9][:8] + b"\x82")
    data[fragment + 64 + 5] ^= 0xFF
    bad = write(tmp_path / "bad", bytes(data))
    status, out, err = run(capsys, "inspect", bad)
    assert (status, err) == (1, "")
    at = fragment + 48
    tail = out[out.index("damaged: ") :]
    assert "body_crc (206)" in tail
    assert f"offset   {at} ({at:#x})" in tail
    assert "field    body_crc" in tail
    assert "tensor   residual" in tail
    assert re.search(r"expected 0x[0-9a-f]{8}\n +found +0x[0-9a-f]{8}\n", tail)
    assert re.search(rf"^ +{at:08x} .* body_crc .*<-- damage$", out, re.MULTILINE)
    assert f"{at + 4:08x}" not in out
    status, out, _ = run(capsys, "inspect", bad, "--json")
    told = json.loads(out)
    assert status == 1
    assert (told["sound"], told["error"]["name"], told["error"]["offset"]) == (False, "body_crc", at)
    assert [field["damaged"] for frame in told["frames"] for field in frame["fields"]].count(True) == 1
    for nothing in (b"", b"x", b"\x89BDB\r\n\x1a\n", b"GIF89a" + bytes(100)):
        status, out, _ = run(capsys, "inspect", write(tmp_path / "x", nothing))
        assert status == 1
        assert "damaged: " in out


def test_inspect_bounds_its_output(tmp_path: Path, capsys: Capture) -> None:
    """A view as long as the file, or one that leaves out the damage."""
    bundle = Bundle([Tensor("x", np.arange(64 * 1000, dtype=np.uint8))], fragment_size=64)
    data = bytearray(encode(bundle))
    status, out, _ = run(capsys, "inspect", write(tmp_path / "x", bytes(data)), "--frames", "4")
    assert status == 0
    assert len(out.splitlines()) < 120
    assert "... 998 frames not shown" in out
    assert "frame 1001: end" in out
    spoilt = encode(bundle)[:-1]
    where = 128 + 128 * 700 + 64 + 3
    data[where] ^= 1
    status, out, _ = run(capsys, "inspect", write(tmp_path / "x", bytes(data)), "--frames", "4")
    assert status == 1
    assert "frame 701: fragment of x" in out
    assert "<-- damage" in out
    assert run(capsys, "inspect", write(tmp_path / "x", spoilt))[0] == 1
    big = write(tmp_path / "big", Bundle([Tensor("x", np.zeros(1 << 20, np.uint8))]))
    assert len(run(capsys, "inspect", big)[1].splitlines()) < 120


class Page(HTMLParser):
    """Well-formed as far as tags go; collects what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.stack.append(tag)
        if tag in ("script", "link", "img", "iframe", "object"):
            self.loads.append(tag)
        self.loads += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href") and (value or "#")[:1] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_inspect_html(tmp_path: Path, good: Path, capsys: Capture) -> None:
    """A page that is not well-formed, that loads something, or in which a file's text becomes markup."""
    data = bytearray(good.read_bytes())
    data[-100] ^= 1
    bad = write(tmp_path / "<script>x.bundle", bytes(data))
    for path, status in ((good, 0), (bad, 1)):
        found, out, err = run(capsys, "inspect", path, "--html")
        assert (found, err) == (status, "")
        page = Page()
        page.feed(out)
        page.close()
        assert page.stack == []
        assert page.loads == []
        assert "url(" not in out
        assert "<b>&amp;" not in out
        assert "&lt;b&gt;&amp;" in out
        assert "<script" not in out
        assert path.name in page.text
        assert "residual" in page.text
        target = tmp_path / "page.html"
        assert run(capsys, "inspect", path, "--html", "-o", target, "--force")[:2] == (status, "")
        assert target.read_text("utf-8") == out
    assert "--force" in refused(capsys, "inspect", good, "--html", "-o", tmp_path / "page.html")
    assert "--html" in refused(capsys, "inspect", good, "-o", tmp_path / "page.html")
    assert "one of them" in refused(capsys, "inspect", good, "--html", "--json")


def test_inspect_of_several_bundles(tmp_path: Path, capsys: Capture) -> None:
    """Frames of one bundle explained by another's head."""
    a = Bundle([Tensor("a", np.arange(3, dtype=np.int16))], number=1)
    b = Bundle([Tensor("b", np.arange(3, 6, dtype=np.float32))], number=2)
    (a1, a2, a3), (b1, b2, b3) = ([part.bytes() for part in frames(encode(bundle))] for bundle in (a, b))
    path = write(tmp_path / "x", a1 + b1 + b2 + a2 + b3 + a3 + encode(a))
    status, out, _ = run(capsys, "inspect", path)
    assert status == 0
    assert "sound: 3 bundles" in out
    assert re.search(r"payload +3, 4, 5 +f32 \[3\]", out)
    assert len(re.findall(r"payload +0, 1, 2 +i16 \[3\]", out)) == 2


def test_attribute_values_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    """A value read by another type than the record's."""
    records = [
        Attribute(1, 2, (-5).to_bytes(8, "little", signed=True)),
        Attribute(3, 3, np.float64(1.5).tobytes()),
        Attribute(4, 4, b"\0\xff"),
        Attribute(5, 4, b""),
        Attribute(6, 5, b"a 'b'"),
    ]
    status, out, _ = run(capsys, "inspect", write(tmp_path / "x", Bundle((), records)))
    assert status == 0
    for line in (r"value +-5 +i64", r"value +1\.5 +f64", r"value +00ff +bytes", r"value +a 'b' +text"):
        assert re.search(line, out), line


def test_from_a_shell(good: Path, tmp_path: Path) -> None:
    """A command that works in this process only, colour in a pipe, or a complaint about a closed one."""
    command = [sys.executable, "-m", "boundary_bundle.cli"]
    done = subprocess.run([*command, "inspect", str(good)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    done = subprocess.run([*command, "validate", str(tmp_path / "absent")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read")
    large = write(tmp_path / "large", Bundle([Tensor("x", np.zeros(64 * 2000, np.uint8))], fragment_size=64))
    done = subprocess.run(
        f'"{sys.executable}" -m boundary_bundle.cli inspect "{large}" --frames 3000 | head -1',
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_every_error_has_its_sentence() -> None:
    """An error whose meaning the commands would have to make up."""
    assert all(meaning for _, meaning in ERRORS.values())


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals on Windows")
def test_colour_on_a_terminal(good: Path) -> None:
    """A terminal that gets the text of a pipe, or another text."""
    import pty

    command = [sys.executable, "-m", "boundary_bundle.cli", "inspect", str(good)]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "400"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        pieces = []
        # Linux reports the end of a pseudo-terminal as an error.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65_536):
                pieces.append(piece)
        os.close(ours)
        assert process.wait() == 0
    text = b"".join(pieces).decode()
    assert "\x1b[1m" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [line.rstrip() for line in bare.splitlines()] == [line.rstrip() for line in plain.splitlines()]
