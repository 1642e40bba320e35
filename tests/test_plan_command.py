"""The command that plans, and those that take its plans; tests/shards/test_cli.py has both with workers.

Catches: bad input that comes through or ends in anything but one sentence, a number that table, JSON and picture have
in different ways.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from boundary_bundle.cli import main
from boundary_bundle.shards import planned_cuts, read_model_file, tensors_sha256


def plan(model: Path, *more: str) -> list[str]:
    return ["plan", "--model", str(model), *more]


def test_the_command(tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, JSON and picture have the same stages; what is a guess is called one."""
    target, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    more = ["--workers", "3", "--speeds", "20G,10G,10G", "--memory", "70M", "--allowance", "1Mi"]
    assert main(plan(tiny["gqa"], *more, "--json", str(target), "--picture", str(picture))) == 0
    told = capsys.readouterr().out
    found = json.loads(target.read_text("utf-8"))
    assert main(plan(tiny["gqa"], *more, "--json", "-")) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert f"--cuts {','.join(map(str, found['cuts']))}\n" in told
    for words in ("guess", "estimated", "1,048,576 bytes"):
        assert words in told
    model = read_model_file(tiny["gqa"])
    assert planned_cuts(found, "llama", model.n_layer, tensors_sha256(model.tensors)) == found["cuts"]
    drawn = picture.read_text("utf-8")
    for one in found["stages"]:
        start, end = one["range"]
        assert f"[{start},{end})" in told
        assert f">{start} to {end - 1}<" in drawn
        assert one["memory_bytes"] == one["weight_bytes"] + one["kv_bytes"] + (1 << 20)
        assert one["time_ms"] == pytest.approx(one["read_bytes"] / one["speed"] * 1e3, abs=1e-4)
        assert one["memory_limit_bytes"] == 70_000_000
    assert max(one["time_share"] for one in found["stages"]) == 1
    assert found["slowest_ms"] == max(one["time_ms"] for one in found["stages"])


def test_kv_that_is_not_known_is_null(
    tmp_path: Path, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """With its reason, in the table and in the JSON."""
    whole = tiny["gqa"].read_bytes()
    path = tmp_path / "other.gguf"
    path.write_bytes(whole.replace(b"llama.embedding_length", b"llama.embedding_lengti"))
    assert main(plan(path, "--workers", "2", "--json", "-")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_unknown"] == "the metadata has no usable llama.embedding_length"
    assert {one["kv_bytes"] for one in found["stages"]} == {None}
    assert main(plan(path, "--workers", "2")) == 0
    assert "KV: not known and in no sum, since the metadata has no usable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--workers", "9"], "9 workers are more than the model has layers, 8"),
        (["--workers", "0"], "'0' is not a number from 1 to 256"),
        (["--workers", "3", "--memory", "1G,2G"], "--memory has 2 items: give one for each of the 3 workers"),
        (["--workers", "3", "--speeds", "1,2"], "--speeds has 2 items"),
        (["--workers", "2", "--memory", "4X"], "'4X' is not a size such as 800M"),
        (["--workers", "2", "--memory", "0"], "'0' is not a size above 0"),
        (["--workers", "2", "--memory", "9999999T"], "'9999999T' is not a size above 0 and below"),
        (["--workers", "2", "--memory=-4G"], "'-4G' is not a size"),
        (["--workers", "2", "--memory", "4G,,1G"], "item 2 of '4G,,1G' is empty"),
        (["--workers", "2", "--memory", ""], "item 1 of '' is empty"),
        (["--workers", "2", "--speeds", "0,1"], "'0' is not a speed above 0"),
        (["--workers", "2", "--speeds=-1,1"], "'-1' is not a speed"),
        (["--workers", "2", "--speeds", "1,nan"], "relative speeds and speeds in bytes a second"),
        (["--workers", "2", "--speeds", "nan,inf"], "'nan' is not a size"),
        (["--workers", "2", "--speeds", "1,2G"], "relative speeds and speeds in bytes a second"),
        (["--workers", "2", "--speeds", "2G", "--measure"], "--measure is for relative speeds"),
        (["--workers", "2", "--memory", "60M"], "bytes for each worker are the least that would do"),
        (["--workers", "2", "--type-v", "q8_0", "--flash-attn", "off"], "--type-v q8_0 needs --flash-attn on"),
        (["--workers", "2", "--seqs", "9", "--batch", "4"], "--seqs 9 is more than the 4 tokens of a batch"),
        (["--workers", "2", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["--workers", "2", "--picture", "/nowhere/x.svg"], "cannot write /nowhere/x.svg"),
    ],
)
def test_bad_input(more: list[str], words: str, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and status 2, and nothing on standard output."""
    assert main(plan(tiny["gqa"], *more)) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_an_architecture_without_a_certificate(
    tmp_path: Path, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (b"llamb", b"eagle", b"t5"):
        path = tmp_path / "other.gguf"
        content = tiny["gqa"].read_bytes()
        if len(name) == 5:
            path.write_bytes(content.replace(b"llama", name))
        else:
            # Lengths stand before names.
            content = content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x02\0\0\0\0\0\0\0t5")
            keys = re.compile(rb"(.)\0{7}llama\.")
            path.write_bytes(keys.sub(lambda match: bytes([match[1][0] - 3]) + bytes(7) + b"t5.", content) + bytes(99))
        assert main(plan(path, "--workers", "2")) == 2
        assert f"architecture '{name.decode()}' is not certified for layer ranges" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no plan: it is not JSON"),
        (b"\xff", "is no plan: it is not JSON"),
        (b"[" * 100_000, "is no plan: it is not JSON"),
        (b" " * (1 << 20) + b"1", "is no plan: it holds more than 1048576 bytes"),
        (b"{}", "the plan's schema is None, not 1"),
    ],
)
@pytest.mark.parametrize("command", [["run", "--prompt", "x"], ["serve"]])
def test_files_that_are_no_plan(
    command: list[str],
    content: bytes,
    words: str,
    tmp_path: Path,
    tiny: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused in one sentence that names the file, before a worker is started."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    arguments = [*command, "--model", str(tiny["gqa"]), "--plan", str(path), "--worker", "/bin/false"]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert f"{path}" in told
    assert words in told
    assert told.count("\n") == 1


def test_a_plan_of_another_model(tmp_path: Path, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """And a plan beside cuts, and one that is not there."""
    path = tmp_path / "plan.json"
    assert main(plan(tiny["q8_0"], "--workers", "2", "--json", str(path))) == 0
    capsys.readouterr()
    begin = ["run", "--model", str(tiny["moe"]), "--prompt", "x", "--worker", "/bin/false", "--plan"]
    for more, words in [
        ([str(path)], "of another model: its table of tensors"),
        ([str(path), "--cuts", "2"], "not allowed with argument"),
        ([str(tmp_path / "none")], "No such file"),
        ([str(tmp_path)], "not a regular file"),
    ]:
        assert main([*begin, *more]) == 2
        assert words in capsys.readouterr().err
