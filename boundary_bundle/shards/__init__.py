"""Drive a model that is split over worker processes: plan ranges, start workers, run the pipeline.

plan      which layers each shard owns, and what a GGUF file says of itself
sizes     what each layer of a file costs a worker
planner   the cuts by which a pipeline of workers is fastest, each within its memory
protocol  the messages between driver and worker (spec/worker-protocol.md)
worker    one worker behind a small interface; the local one is a child process
batch     tokens of interleaved sequences as a bundle
pipeline  a batch through all shards, and generation
flow      bundles from worker to worker, several batches under way
sessions  sessions over a pipeline: hot state that is rebuilt from the driver's token history
check     both codecs on every hop, and logits compared by their bits
ray_engine  shards on other hosts: actors that Ray places, and bundles that it carries
"""

from __future__ import annotations

from .batch import Batch, Layout, SessionRow
from .check import CheckedRelay, Fault
from .flow import Flow, FlowPipeline
from .pipeline import (
    Generation,
    Pipeline,
    PipelineError,
    Relay,
    Step,
    Streams,
    count_differing,
    generate,
    generate_streams,
)
from .plan import (
    ModelFile,
    Plan,
    PlanError,
    Tensor,
    make_plan,
    model_tensors,
    parse_cuts,
    read_model_file,
    tensors_sha256,
)
from .planner import Capacity, Stage, partition, planned_cuts
from .pool import WorkerPool
from .protocol import Outcome
from .ray_engine import RayPipeline, ray_cluster
from .sessions import CapacityError, Session, SessionPipeline, local_workers
from .sizes import Family, ModelSizes, Part, model_sizes
from .worker import (
    Description,
    LocalWorker,
    Recipe,
    Reply,
    Sampling,
    SessionRefused,
    SessionTable,
    Settings,
    Worker,
    WorkerError,
    close_workers,
    shares,
    start_workers,
)

__all__ = [
    "Batch",
    "Capacity",
    "CapacityError",
    "CheckedRelay",
    "Description",
    "Family",
    "Fault",
    "Flow",
    "FlowPipeline",
    "Generation",
    "Layout",
    "LocalWorker",
    "ModelFile",
    "ModelSizes",
    "Outcome",
    "Part",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlanError",
    "RayPipeline",
    "Recipe",
    "Relay",
    "Reply",
    "Sampling",
    "Session",
    "SessionPipeline",
    "SessionRefused",
    "SessionRow",
    "SessionTable",
    "Settings",
    "Stage",
    "Step",
    "Streams",
    "Tensor",
    "Worker",
    "WorkerError",
    "WorkerPool",
    "close_workers",
    "count_differing",
    "generate",
    "generate_streams",
    "local_workers",
    "make_plan",
    "model_sizes",
    "model_tensors",
    "parse_cuts",
    "partition",
    "planned_cuts",
    "ray_cluster",
    "read_model_file",
    "shares",
    "start_workers",
    "tensors_sha256",
]
