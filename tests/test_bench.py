"""The benchmarks do what they say, without looking at any time."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from boundary_bundle.native import NativeBuild
from boundary_bundle.native.build import RPC_SERVER
from boundary_bundle.shards import Settings
from boundary_bundle.shards.tiny_models import Shape

SCRIPT = Path(__file__).parent / "bench" / "bench_codec.py"
for needed in ("google.protobuf", "matplotlib", "msgpack_numpy", "pyarrow", "safetensors"):
    pytest.importorskip(needed, reason=f"the benchmark's peer {needed} is not installed (extra 'bench')")


def load() -> Any:
    spec = importlib.util.spec_from_file_location("bench_codec", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_codec"] = module
    spec.loader.exec_module(module)
    return module


def run(script: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    # Not installed, the package is found in the checkout.
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_peers_do_the_work() -> None:
    """A peer that is measured at giving back something else, or without a checksum."""
    bench = load()
    array = np.arange(4096, dtype=np.float32).reshape(1, -1)
    for name, (encode, decode) in bench.peers(array).items():
        assert array.tobytes() in bytes(encode(0)), name
        found = decode(0)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array), name
        source = bench.crc32c
        bench.crc32c = lambda data: 0
        try:
            with pytest.raises(ValueError, match="checksum"):
                decode(0)
        finally:
            bench.crc32c = source


def test_one_short_run(tmp_path: Path) -> None:
    """A table, picture or JSON that cannot be made."""
    picture, numbers = tmp_path / "bench.svg", tmp_path / "bench.json"
    options = ["--rounds", "1", "--round-ms", "0.1", "--only", "16 KB", "--plot", str(picture), "--json", str(numbers)]
    done = run(SCRIPT, *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(numbers.read_text("utf-8"))
    assert [group["title"].split()[0] for group in told["groups"]] == ["encode", "decode"]
    for group in told["groups"]:
        names = [entry["name"] for entry in group["entries"]]
        peers = {"safetensors", "pyarrow IPC tensor", "msgpack-numpy", "pickle 5", "protobuf", "np.save"}
        assert peers < set(names)
        assert group["base"] in peers
        assert all(entry["best_us"] <= entry["median_us"] for entry in group["entries"])
        assert all(name in done.stdout for name in names)
    assert "<svg" in picture.read_text("utf-8")


# -- make bench-shards

SHARDS = SCRIPT.with_name("bench_shards.py")
#: As small as wide_model.SHAPE is large.
NARROW = Shape(n_layer=4, n_head=4, n_head_kv=2, head_size=32, n_ff=192)


@pytest.fixture
def bench_shards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with those beside it."""
    monkeypatch.syspath_prepend(str(SHARDS.parent))
    return importlib.import_module("bench_shards")


@pytest.mark.shards
@pytest.mark.usefixtures("patched_build", "rpc_build")
def test_a_quick_run_of_shards(tiny: dict[str, Path], bench_shards: Any, tmp_path: Path) -> None:
    """A table, picture or JSON that cannot be made; a split result that was not compared; layers of RPC elsewhere than
    they are said to be."""
    wide = bench_shards.wide_model.write(tmp_path / "wide.gguf", NARROW)
    numbers, plots = tmp_path / "bench.json", tmp_path / "plots"
    options = ["--quick", "--threads", "1", "--model", tiny["gqa"], "--wide-model", wide]
    done = run(SHARDS, *options, "--json", numbers, "--plots", plots)
    assert done.returncode == 0, done.stderr
    told = json.loads(numbers.read_text("utf-8"))
    jsonschema.validate(told, json.loads(SHARDS.with_name("bench_shards_schema.json").read_text("utf-8")))
    assert [section["name"] for section in told["sections"]] == ["shards", "flight", "streams", "wide"]
    for section in told["sections"]:
        for entry in section["entries"]:
            assert entry["subject"] in done.stdout
            assert entry["logits_compared"] > 0 or entry["subject"] == "unsplit"
            assert entry["tokens_differing"] == 0
            if entry["kind"] in ("split", "ray"):
                assert entry["logits_differing"] == 0
                assert (len(entry["compute_us"]), len(entry["hops"])) == (entry["shards"], entry["shards"] - 1)
        for name, place in section["rpc"].items():
            ends = [0, *section["cuts"][name], section["model"]["n_layer"]]
            assert len(ends) == place["servers"] + 1
            assert list(place["layers"].values()) == [end - start for start, end in zip(ends, ends[1:], strict=False)]
            assert place["head"] == list(place["layers"])[-1]
            assert all("127.0.0.1" in name for name in place["layers"])
    for item in told["wanted"]:
        assert item["what"] in done.stdout
    for name in bench_shards.PICTURES:
        assert "<svg" in (plots / name).read_text("utf-8")


def test_shards_that_cannot_be_measured(tmp_path: Path) -> None:
    """A traceback in place of a sentence; work that is begun before the files are looked at."""
    for options, sentence in (
        (["--model", tmp_path / "none.gguf"], "none.gguf: No such file"),
        (["--json", tmp_path], "it is a folder"),
        (["--plots", tmp_path / "a" / "b", "--json", tmp_path / "none" / "x.json"], "there is no folder"),
    ):
        done = run(SHARDS, "--quick", *options)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_a_bit_that_differs_is_told(bench_shards: Any) -> None:
    """A comparison that lets a flipped bit or another token pass."""
    work = bench_shards.Work("decode 1", 2, 1, 1, 2)

    class Fake(bench_shards.Subject):  # type: ignore[misc]
        kind, shards = "split", 1

        def __init__(self, flipped: int, tokens: list[int]) -> None:
            self.flipped, self.tokens = flipped, tokens

        def run(self, work: Any, prompts: Any, *, logits: bool = False) -> Any:
            table = np.arange(8, dtype=np.float32).reshape(2, 4)
            table.view(np.uint32)[1, 3] ^= np.uint32(self.flipped)
            return bench_shards.Outcome(1.0, [self.tokens], table if logits else None)

    def section(other: Any) -> Any:
        found = bench_shards.Section("shards", "", None, Settings(), [work], {}, {}, bench_shards.plan_of)
        bench_shards.compare(found, {"unsplit": Fake(0, [1, 2]), "2 shards": other}, [[5, 6]])
        bench_shards.measure(found, [[5, 6]], bench_shards.QUICK, 0.0)
        return found

    same = section(Fake(0, [1, 2]))
    assert [entry.logits_compared for entry in same.entries] == [0, 8]
    assert bench_shards.differing(same) == 0
    assert bench_shards.differing(section(Fake(1, [1, 2]))) == 1
    assert bench_shards.differing(section(Fake(0, [1, 3]))) == 1


@pytest.mark.shards
def test_layers_on_another_server_are_refused(rpc_build: NativeBuild, tiny: dict[str, Path], bench_shards: Any) -> None:
    """A comparison with RPC at other cuts than ours: here the layers of the servers are not all of the model's."""
    ranges = [(0, 3), (3, 7)]
    settings = Settings(threads=1, ctx=256, batch=64, ubatch=64)
    with (
        pytest.raises(bench_shards.SubjectError, match=r"layer 3 is to be on RPC\S+ and is on RPC"),
        bench_shards.loop(rpc_build, tiny["gqa"], settings, ranges),
    ):
        pass


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.shards
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is ended with the one that has started it")
def test_a_server_ends_with_a_benchmark_that_is_killed(rpc_build: NativeBuild) -> None:
    """A server that listens for ever, to anybody on this machine."""
    script = (
        "import sys, pathlib, shard_subjects\n"
        "with shard_subjects._server(pathlib.Path(sys.argv[1]), 1) as port:\n"
        "    print(port, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(rpc_build.programs[RPC_SERVER])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SHARDS.parents[2], SHARDS.parent)))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert listens(port)
        child.kill()
    end = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < end, "the server goes on listening"
        time.sleep(0.05)


def test_the_wide_model_is_the_same_each_time(bench_shards: Any, tmp_path: Path) -> None:
    """Weights that depend on the run, so that numbers of two runs are not of the same work."""
    one, other = (bench_shards.wide_model.write(tmp_path / name, NARROW) for name in ("a.gguf", "b.gguf"))
    assert one.read_bytes() == other.read_bytes()
