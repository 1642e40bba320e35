"""What several tests need and should be made once: the two builds and the model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from boundary_bundle.native import NativeBuild, build, ensure_model
from boundary_bundle.shards import WorkerPool, tiny_models

# A shell that starts this in the background ignores interrupts for it, and so for every command that a test starts and
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A project of its own, run by test_wheel.py where the wheel is installed.
collect_ignore = ["example_project"]


@pytest.fixture(scope="session")
def patched_build() -> NativeBuild:
    """libllama with the series, and the shard worker. From the cache; ``make test`` builds it before."""
    return build("patched")


@pytest.fixture(scope="session")
def unpatched_build() -> NativeBuild:
    """libllama as upstream has it, and the same worker on it: the oracle."""
    return build("unpatched")


@pytest.fixture(scope="session")
def rpc_build() -> NativeBuild:
    """libllama as upstream has it with its RPC backend, the server, and the loop that the benchmark compares with."""
    return build("rpc")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1, 30 layers, tied embeddings)."""
    return ensure_model()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny llama file of each variant, by name."""
    return tiny_models.write_all(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Workers that stay up between tests and examples."""
    with WorkerPool() as workers:
        yield workers
