"""The benchmark does what it says, without looking at any time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    command = [sys.executable, str(SCRIPT), *options]
    # Not installed, the package is found in the checkout.
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
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
