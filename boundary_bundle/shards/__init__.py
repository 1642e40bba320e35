"""Drive a model that is split over worker processes: plan ranges, start workers, run the pipeline.

plan      which layers each shard owns, and what a GGUF file says of itself
protocol  the messages between driver and worker (spec/worker-protocol.md)
worker    one worker behind a small interface; the local one is a child process
batch     tokens of interleaved sequences as a bundle
pipeline  a batch through all shards, and greedy generation
check     both codecs on every hop, and logits compared by their bits
"""

from __future__ import annotations

from .batch import Batch, Layout
from .check import CheckedRelay, Fault
from .pipeline import Generation, Pipeline, PipelineError, Relay, Step, count_differing, generate
from .plan import ModelFile, Plan, PlanError, make_plan, parse_cuts, read_model_file
from .pool import WorkerPool
from .worker import Description, LocalWorker, Reply, Settings, Worker, WorkerError, close_workers, start_workers

__all__ = [
    "Batch",
    "CheckedRelay",
    "Description",
    "Fault",
    "Generation",
    "Layout",
    "LocalWorker",
    "ModelFile",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlanError",
    "Relay",
    "Reply",
    "Settings",
    "Step",
    "Worker",
    "WorkerError",
    "WorkerPool",
    "close_workers",
    "count_differing",
    "generate",
    "make_plan",
    "parse_cuts",
    "read_model_file",
    "start_workers",
]
