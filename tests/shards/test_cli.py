"""The command line, as a user has it: real processes, exit statuses, one sentence for each refusal.

Catches: a traceback, a worker or a half-written file that is left behind, and a check that passes when a
logit differs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from boundary_bundle.cli import main
from boundary_bundle.families.models import make_model
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import Family, Settings, model_sizes, read_model_file, tiny_models

pytestmark = pytest.mark.shards

SMALL = ["--threads", "1", "--ctx", "512", "--batch", "16", "--ubatch", "8"]


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid`` and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    """Whatever a command does, its workers are gone when it returns."""
    before = children(os.getpid())
    yield
    assert [pid for pid in children(os.getpid()) if pid not in before] == []


def run(worker: Path, model: Path, *more: str) -> list[str]:
    return ["run", "--worker", str(worker), "--model", str(model), "--prompt", "split this", *SMALL, *more]


def test_a_checked_run(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    more = ["--cuts", "2,5", "--tokens", "9", "--ignore-eos", "--check", "--json", str(target)]
    assert main(run(patched_build.worker, tiny["tied"], *more)) == 0
    out, err = capsys.readouterr()
    found = json.loads(target.read_text())
    assert out == found["text"] + "\n"
    assert f"0 of {9 * tiny_models.N_VOCAB:,} logits differ" in err
    assert "unsplit worker of the same patched build" in err
    assert found["model"] == str(tiny["tied"])
    assert (found["cuts"], found["steps"], len(found["tokens"])) == ([2, 5], 9, 9)
    assert (found["logits_compared"], found["logits_differing"]) == (9 * tiny_models.N_VOCAB, 0)
    assert found["tokens_per_second"] > 0
    assert found["unsplit_tokens_per_second"] > 0
    assert [shard["range"] for shard in found["shards"]] == [[0, 2], [2, 5], [5, 7]]
    for shard in found["shards"]:
        assert shard["resident_bytes"] > 0
        assert shard["weight_bytes"] > 0
        assert shard["kv_bytes"] == (shard["range"][1] - shard["range"][0]) * 2 * 128 * 2 * 512
    assert [hop["layer"] for hop in found["hops"]] == [2, 5]
    for hop in found["hops"]:
        assert hop["bytes"] > 128 * 4
        assert {"encode_us", "decode_us"} <= set(hop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


def test_an_unchecked_run_gives_the_same_tokens(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name, cuts in [("a", ["--cuts", "1"]), ("b", ["--cuts", "2,4,6"]), ("c", [])]:
        target = tmp_path / name
        assert main(run(patched_build.worker, tiny["gqa"], *cuts, "--tokens", "12", "--json", str(target))) == 0
        found.append(json.loads(target.read_text()))
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]
    for result in found:
        assert (result["logits_compared"], result["logits_differing"]) == (0, 0)
        assert result["unsplit_tokens_per_second"] is None
    capsys.readouterr()


def test_all_logits_of_the_prompt(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    prompt = "a prompt that is longer than one batch of sixteen tokens, so that it goes in several"
    command = run(patched_build.worker, tiny["moe"], "--cuts", "3", "--tokens", "3", "--ignore-eos", "--check")
    assert main([*command, "--all-logits", "--prompt", prompt, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["prompt_tokens"] > 32
    assert found["logits_compared"] == (found["prompt_tokens"] + 2) * tiny_models.N_VOCAB
    capsys.readouterr()


@pytest.mark.parametrize("fault", ["0:0", "0:2", "1:1", "2:3"])
def test_a_planted_flip_is_exit_status_1(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    target = tmp_path / "out.json"
    more = ["--cuts", "1,3,5", "--tokens", "6", "--ignore-eos", "--check", "--plant-fault", fault]
    assert main(run(patched_build.worker, tiny["q8_0"], *more, "--json", str(target))) == 1
    found = json.loads(target.read_text())
    assert found["logits_differing"] > 0
    assert f"{found['logits_differing']:,} of {found['logits_compared']:,} logits differ" in capsys.readouterr().err


def test_speed_runs(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    more = ["--cuts", "3", "--tokens", "4", "--ignore-eos", "--speed-runs", "3", "--json", str(target)]
    assert main(run(patched_build.worker, tiny["tied"], *more)) == 0
    found = json.loads(target.read_text())
    assert len(found["speed"]["split"]) == len(found["speed"]["unsplit"]) == 3
    assert "medians of 3 runs in turn" in capsys.readouterr().err


def refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that a command leaves on standard error, with exit status 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ("", "empty"),
        ("3,3", "cut 3 is given twice"),
        ("4,2", "2 follows 4"),
        ("0", "cut 0 is out of range: a model of 7 layers can be cut at 1 to 6"),
        ("7", "cut 7 is out of range: a model of 7 layers can be cut at 1 to 6"),
        ("2,x", "'x' is not a layer number"),
    ],
)
def test_bad_cuts(
    patched_build: NativeBuild,
    tiny: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cuts: str,
    words: str,
) -> None:
    target = tmp_path / "out.json"
    more = [f"--cuts={cuts}", "--json", str(target)]
    assert words in refusal(run(patched_build.worker, tiny["tied"], *more), capsys)
    assert list(tmp_path.iterdir()) == []


def test_bad_files(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tiny["tied"].read_bytes()
    bad = tmp_path / "bad.gguf"
    assert "No such file" in refusal(run(patched_build.worker, bad, "--cuts", "2"), capsys)
    bad.write_bytes(whole[: len(whole) // 2])
    assert f"holds {len(whole) // 2} bytes" in refusal(run(patched_build.worker, bad, "--cuts", "2"), capsys)
    bad.write_bytes(b"no model at all")
    assert "not a GGUF file" in refusal(run(patched_build.worker, bad, "--cuts", "2"), capsys)
    bad.write_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0falco", 1))
    assert "no usable falco.block_count" in refusal(run(patched_build.worker, bad, "--cuts", "2"), capsys)


def test_a_file_that_only_the_worker_refuses(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner reads the file, the worker cannot load it: its sentence comes through, with the shard's range."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(tiny["tied"].read_bytes().replace(b"blk.4.attn_k.weight", b"blk.4.attn_x.weight"))
    text = refusal(run(patched_build.worker, bad, "--cuts", "2"), capsys)
    assert "shard [" in text
    assert "error 4 load" in text
    assert "bad.gguf" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tokens", "0"], "'0' is not a number from 1"),
        (["--tokens", "many"], "'many' is not a number from 1"),
        (["--threads", "-1"], "-1"),
        (["--tokens", "600"], "--ctx is 512"),
        (["--json", "/nonexistent/folder/out.json"], "no folder /nonexistent/folder"),
        (["--json", "/"], "folder"),
        (["--frobnicate"], "--frobnicate"),
        (["--plant-fault", "0:0"], "--check"),
        (["--check", "--cuts", "3", "--plant-fault", "4:0"], "hop 4 is out of range"),
    ],
)
def test_bad_options(
    patched_build: NativeBuild,
    tiny: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: str,
) -> None:
    assert words in refusal(run(patched_build.worker, tiny["tied"], *more), capsys)


def test_a_worker_that_cannot_be_started(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(run(tmp_path / "none", tiny["tied"], "--cuts", "3"), capsys)
    assert "cannot start" in text
    text = refusal(run(Path("/bin/false"), tiny["tied"], "--cuts", "3"), capsys)
    assert "ended with status 1" in text


def _long_run(worker: Path, model: Path, *more: str) -> subprocess.Popen[bytes]:
    command = run(worker, model, "--cuts", "2,4", "--tokens", "20000", "--ctx", "32768", "--ignore-eos", *more)
    # Standard output is read a little and no more: the run is in the middle as long as nobody reads.
    return subprocess.Popen(
        [sys.executable, "-m", "boundary_bundle.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _until_it_generates(process: subprocess.Popen[bytes]) -> list[int]:
    assert process.stdout is not None
    assert process.stdout.read(8)
    found = children(process.pid)
    assert len(found) == 3
    return found


def _gone(pids: Sequence[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_killed_in_the_middle(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, victim: int
) -> None:
    target = tmp_path / "out.json"
    with _long_run(patched_build.worker, tiny["tied"], "--json", str(target)) as process:
        workers = _until_it_generates(process)
        os.kill(workers[victim], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    text = err.decode()
    assert process.returncode == 2, text
    assert text.count("\n") == 1, text
    assert "signal 9 (SIGKILL)" in text
    # The last shard also turns tokens into text; the signal may find it at that.
    assert re.search(r"shard \[\d,\d\): (decode|detokenize): ", text), text
    assert _gone(workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_takes_its_workers_along(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "out.json"
    with _long_run(patched_build.worker, tiny["tied"], "--json", str(target)) as process:
        workers = _until_it_generates(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in err
    assert _gone(workers)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    with _long_run(patched_build.worker, tiny["tied"]) as process:
        workers = _until_it_generates(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert _gone(workers)


def test_describe(patched_build: NativeBuild, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["describe", "--worker", str(patched_build.worker), "--model", str(tiny["untied"]), *SMALL]
    assert main([*command, "--range", "2:4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layer_start"], found["layer_end"], found["n_layer"]) == (2, 4, 6)
    assert found["n_tensors"] == len(found["tensors"]) == 2 * 9 + 1
    assert main([*command, "--range", "4:6", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "\nlayers: 4 to 5\nembeddings: no\nfinal norm: yes\nhead: yes\ntensors: 21, " in out
    assert "output_norm.weight" in out
    assert main([*command, "--range", "0:6"]) == 0
    assert "\nlayers: 0 to 5\nembeddings: yes\n" in capsys.readouterr().out
    for bad in ("4:2", "3:3", "0:7", "x", "1:", "-1:3"):
        text = refusal([*command, f"--range={bad}"], capsys)
        assert bad in text


def test_settings_reach_the_worker(
    patched_build: NativeBuild, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of the cache that are taken and not passed on."""
    command = ["describe", "--worker", str(patched_build.worker), "--model", str(tiny["tied"]), "--json", *SMALL]
    names = ("type_k", "type_v", "swa_full", "flash_attn")
    for more, expected in [
        ([], ("f16", "f16", True, True)),
        (["--type-k", "q8_0", "--type-v", "f32", "--swa-full", "off"], ("q8_0", "f32", False, True)),
        (["--type-k", "f32", "--type-v", "f16", "--flash-attn", "off"], ("f32", "f16", True, False)),
    ]:
        assert main([*command, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert tuple(found[name] for name in names) == expected


def test_the_demo_on_a_tiny_model(
    patched_build: NativeBuild, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe: plain text. The real one is ``make demo``."""
    command = ["demo", "--worker", str(patched_build.worker), "--model", str(tiny["tied"]), "--tokens", "5", *SMALL]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[0,2) [2,4) [4,7): 3 processes" in out
    assert "unsplit worker of the patched build" in out
    assert "logits differ in any bit" in out
    assert out.splitlines()[-1].startswith("0 of ")


def test_a_measured_plan_is_run(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What plan writes, run follows: the cuts are the plan's, and so are the bytes."""
    target, result = tmp_path / "plan.json", tmp_path / "result.json"
    common = ["--model", str(tiny["gqa"]), "--worker", str(patched_build.worker), "--threads", "1", "--type-k", "q8_0"]
    assert main(["plan", *common, "--workers", "3", "--speeds", "1,2,1", "--measure", "--json", str(target)]) == 0
    told = json.loads(target.read_text("utf-8"))
    assert told["measured_bytes_per_second"] > 0
    assert [one["speed"] for one in told["stages"]] == [
        told["measured_bytes_per_second"] * times for times in (1, 2, 1)
    ]
    assert told["slowest_ms"] > 0
    # What was measured changes what the head counts, and nothing else.
    model = read_model_file(tiny["gqa"])
    sizes = model_sizes(model, model.tensors, Family("kv", "logits"), Settings())
    for planned in told["stages"][:-1]:
        assert planned["read_bytes"] == sizes.shard(*planned["range"]).read
        assert planned["time_ms"] == pytest.approx(planned["read_bytes"] / planned["speed"] * 1e3, abs=1e-4)
    more = ["--prompt", "a b c", "--tokens", "4", "--ignore-eos", "--plan", str(target), "--json", str(result)]
    assert main(["run", *common, *more, "--check"]) == 0
    capsys.readouterr()
    found = json.loads(result.read_text("utf-8"))
    assert found["cuts"] == told["cuts"]
    for shard, planned in zip(found["shards"], told["stages"], strict=True):
        assert {key: shard[key] for key in ("range", "weight_bytes", "kv_bytes")} == {
            key: planned[key] for key in ("range", "weight_bytes", "kv_bytes")
        }


def test_what_has_no_decode_steps_is_not_measured(
    patched_build: NativeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(("bert", "dense"), tmp_path / "model.gguf").path
    arguments = ["plan", "--model", str(path), "--workers", "2", "--worker", str(patched_build.worker)]
    assert main([*arguments, "--measure"]) == 2
    assert "--measure: a model of bert has no decode steps" in capsys.readouterr().err
    assert main(arguments) == 0
