"""Recorded runs: every bundle that crossed a cut, as the patched library wrote it, and what to hold it to.

A folder of fixtures is checked by the C program in it, ``check_fixtures.c``, against any libllama with the
series, without Python. The same model, prompt, cuts and settings give the same bytes again on the same
processor and build; on another processor floating-point results may differ (the program's ``--here``).

    manifest.json       everything below, for people and programs (schema 1)
    manifest.lines      what the C program needs of it, one item a line
    check_fixtures.c    the program, and a Makefile for it
    NAME/step-000-tokens.bundle      the token request of a step
    NAME/step-000-layer-10.bundle    what crossed the cut before layer 10
    NAME/step-000-logits.f32         with logits: rows of f32, little-endian
    NAME/model.gguf     a tiny model's file
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import layout as wire
from ..decoder import decode
from ..encoder import encode
from ..writing import default_mode
from . import tiny_models
from .batch import PLAIN, Batch, Layout
from .pipeline import Logits, Pipeline, Relay
from .plan import Plan, make_plan, read_model_file
from .worker import REQUEST_TIMEOUT, Bytes, Settings, close_workers, start_workers

SCHEMA: Final = 1
MANIFEST: Final = "manifest.json"
LINES: Final = "manifest.lines"
PROGRAM: Final = "check_fixtures.c"

#: Small batches and micro-batches, so that a prompt crosses in several steps and several graphs.
SETTINGS: Final = Settings(threads=1, ctx=256, batch=32, ubatch=8)
PROMPT: Final = "The quick brown fox jumps over the lazy dog."

# In turn, by hop and step: both orders, one fragment and many, without checksums.
_LAYOUTS: Final = (PLAIN, Layout("big", 1024), Layout("little", 1088), Layout("big", 0, False))


class FixtureError(Exception):
    """Fixtures cannot be made; one sentence for the user."""


@dataclass(frozen=True)
class Source:
    """One model to record. ``tiny`` names a variant of :mod:`.tiny_models`, whose file is made in the folder."""

    name: str
    cuts: tuple[int, ...]
    model: Path | None = None
    tiny: str | None = None


def families(names: str, cuts: Sequence[int] | None = None) -> list[Source]:
    """Sources for ``all`` or for names separated by commas; without ``cuts`` each model is cut in three.

    Raises FixtureError for an unknown name.
    """
    known = list(tiny_models.VARIANTS)
    wanted = known if names == "all" else [name.strip() for name in names.split(",")]
    found: list[Source] = []
    for name in wanted:
        if name not in known:
            raise FixtureError(f"there is no family {name!r}: there are {', '.join(known)}, and all")
        if any(source.name == name for source in found):
            raise FixtureError(f"the family {name} is given twice")
        layers = tiny_models.VARIANTS[name].n_layer
        places = tuple(cuts) if cuts is not None else (layers // 3, 2 * layers // 3)
        make_plan(layers, places)
        found.append(Source(name, places, tiny=name))
    return found


def small_shape(variant: str) -> tiny_models.Shape:
    """A variant with every layer but half its width: the fixtures of all families stay small."""
    shape = tiny_models.VARIANTS[variant]
    return replace(shape, head_size=shape.head_size // 2, n_ff=shape.n_ff // 2)


class _Recorder(Relay):
    """Passes bundles on as they are and keeps those of the last step."""

    def __init__(self) -> None:
        self.hops: list[bytes] = []
        self.logits: Logits | None = None

    def request_layout(self, hop: int, step: int, rows: int) -> Layout:
        return PLAIN if hop < 0 else _LAYOUTS[(hop + step) % len(_LAYOUTS)]

    def forward(self, hop: int, step: int, rows: int, data: Bytes) -> tuple[Bytes, float, float]:
        self.hops.append(bytes(data))
        return data, 0.0, 0.0


def capture(
    folder: Path,
    sources: Sequence[Source],
    worker: Path,
    *,
    settings: Settings = SETTINGS,
    prompt: str = PROMPT,
    n_tokens: int = 4,
    logits: bool = False,
    library: Mapping[str, Any] | None = None,
    force: bool = False,
    timeout: float | None = REQUEST_TIMEOUT,
) -> dict[str, Any]:
    """Record every source into ``folder`` and return the manifest.

    Each run is the prompt in batches of ``settings.batch`` and ``n_tokens`` greedy steps of one token a sequence.
    ``settings.seqs`` sequences take turns token by token; each begins with the prompt, from its own token of it on.
    ``timeout`` is that of :func:`start_workers`.
    ``library`` goes into the manifest as it is. The folder appears whole or not at all; one that is not empty is
    replaced only with ``force``, and only if it holds fixtures. Raises FixtureError, PlanError, PipelineError
    and WorkerError.
    """
    batch = min(settings.batch, settings.ctx)
    if batch < settings.seqs:
        raise FixtureError(
            f"{settings.seqs} sequences need batches of {settings.seqs} tokens or more, but they have {batch}"
        )
    target = _check_target(folder, force)
    for source in sources:
        if source.model is not None and target in source.model.resolve().parents:
            raise FixtureError(f"cannot replace {folder}: the model {source.model} lies in it")
    try:
        aside = Path(tempfile.mkdtemp(prefix=".fixtures-", dir=target.parent))
    except OSError as error:
        raise FixtureError(f"cannot write {folder}: {error.strerror}") from None
    try:
        fresh = aside / "new"
        fresh.mkdir()
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "format": f"{wire.MAJOR}.0",
            "recorded_on": platform.machine(),
            "library": dict(library or {}),
            "fixtures": [
                _record(fresh, source, worker, settings, prompt, n_tokens, logits, timeout) for source in sources
            ],
        }
        _write(fresh / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
        _write(fresh / LINES, lines(manifest).encode("ascii"))
        data = resources.files(__package__).joinpath("data")
        _write(fresh / PROGRAM, data.joinpath(PROGRAM).read_bytes())
        _write(fresh / "Makefile", data.joinpath("fixtures.mk").read_bytes())
        _publish(fresh, target, aside)
    except OSError as error:
        raise FixtureError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return manifest


def lines(manifest: Mapping[str, Any]) -> str:
    """``manifest.lines`` of a manifest: one item a line, words separated by one space.

    ::

        fixture NAME MODEL-FILE-OR-DASH
        model SHA256 FINGERPRINT
        settings THREADS CTX BATCH UBATCH FLASH-ATTENTION SEQUENCES
        range START END
        step NUMBER
        request FILE SHA256
        boundary LAYER FILE SHA256 BIG-ENDIAN FRAGMENT-SIZE WITHOUT-CHECKSUMS
        logits ROWS SHA256
        end NAME
    """
    rows: list[Sequence[object]] = [("boundary-bundle fixtures", manifest["schema"])]
    for fixture in manifest["fixtures"]:
        model, settings = fixture["model"], fixture["settings"]
        rows.append(("fixture", fixture["name"], model["file"] or "-"))
        rows.append(("model", model["sha256"], model["fingerprint"]))
        numbers = [int(settings[key]) for key in ("threads", "ctx", "batch", "ubatch", "flash_attn", "seqs")]
        rows.append(("settings", *numbers))
        rows.extend(("range", *layers) for layers in fixture["ranges"])
        for step in fixture["steps"]:
            rows.append(("step", step["step"]))
            rows.append(("request", step["request"]["file"], step["request"]["sha256"]))
            for entry in step["boundaries"]:
                how = int(entry["byte_order"] == "big"), entry["fragment_size"], int(not entry["checksums"])
                rows.append(("boundary", entry["layer"], entry["file"], entry["sha256"], *how))
            rows.append(("logits", step["logits"]["rows"], step["logits"]["sha256"]))
        rows.append(("end", fixture["name"]))
    return "".join(" ".join(map(str, row)) + "\n" for row in rows)


# -- one fixture


def _record(
    folder: Path,
    source: Source,
    worker: Path,
    settings: Settings,
    prompt: str,
    n_tokens: int,
    logits: bool,
    timeout: float | None,
) -> dict[str, Any]:
    place = folder / source.name
    place.mkdir()
    if source.tiny is not None:
        try:
            path = tiny_models.write(place / "model.gguf", source.tiny, shape=small_shape(source.tiny))
        except ImportError as error:
            raise FixtureError(
                f"the Python package {error.name!r} is missing: pip install 'boundary-bundle[run]'"
            ) from None
        file = f"{source.name}/model.gguf"
    else:
        assert source.model is not None
        path, file = source.model, None
    model = read_model_file(path)
    plan = make_plan(model.n_layer, source.cuts)
    workers = start_workers(worker, path, plan, settings, timeout)
    try:
        recorder = _Recorder()
        pipeline = Pipeline(workers, recorder)
        tokens = workers[-1].tokenize(prompt)
        if not tokens:
            raise FixtureError("the prompt has no tokens")
        needed, room = len(tokens) + n_tokens, settings.ctx // settings.seqs
        if needed > room:
            raise FixtureError(
                f"a prompt of {len(tokens)} token{'' if len(tokens) == 1 else 's'} and {n_tokens} "
                f"step{'' if n_tokens == 1 else 's'} need {needed} positions a sequence, "
                f"but a context of {settings.ctx} has {room}"
            )
        # By turning it the sequences differ.
        prompts = [[*tokens[turn:], *tokens[:turn]] for turn in (k % len(tokens) for k in range(settings.seqs))]
        steps = [
            _step(folder, source.name, plan, pipeline, recorder, batch, logits)
            for batch in _batches(recorder, prompts, n_tokens, settings.batch)
        ]
        about = pipeline.model
    finally:
        close_workers(workers)
    fingerprint = about.fingerprint
    if fingerprint is None:
        raise FixtureError("the worker is of an unpatched library")
    return {
        "name": source.name,
        "model": {
            "file": file,
            "name": path.name if file is None else f"tiny {source.tiny}",
            "bytes": model.size,
            "sha256": _hash_file(path),
            "fingerprint": fingerprint.hex(),
            "architecture": about.architecture,
            "n_layer": about.n_layer,
            "n_embd": about.n_embd,
            "n_vocab": about.n_vocab,
        },
        "cuts": plan.cuts,
        "ranges": [list(layers) for layers in plan],
        "settings": asdict(settings),
        "prompt": prompt,
        "prompts": prompts,
        "steps": [{"step": number, **step} for number, step in enumerate(steps)],
    }


def _batches(recorder: _Recorder, prompts: Sequence[Sequence[int]], n_tokens: int, size: int) -> Iterator[Batch]:
    """The prompts, taking turns; then, again in turn, the token with the largest logit (the first of equal ones)."""
    length = len(prompts[0])
    following = [list(prompt) for prompt in prompts]
    for positions in (range(length), *(range(place, place + 1) for place in range(length, length + n_tokens))):
        entries = [(position, sequence) for position in positions for sequence in range(len(prompts))]
        for start in range(0, len(entries), size):
            part = entries[start : start + size]
            outputs = [position + 1 >= length for position, _ in part]
            tokens = [following[sequence][position] for position, sequence in part]
            yield Batch(tokens, [position for position, _ in part], [(sequence,) for _, sequence in part], outputs)
            assert recorder.logits is not None
            chosen = iter(recorder.logits)
            for (_, sequence), output in zip(part, outputs, strict=True):
                if output:
                    following[sequence].append(int(np.argmax(next(chosen))))


def _step(
    folder: Path, name: str, plan: Plan, pipeline: Pipeline, recorder: _Recorder, batch: Batch, logits: bool
) -> dict[str, Any]:
    number = len(list((folder / name).glob("step-*-tokens.bundle")))
    stem = f"{name}/step-{number:03}"
    recorder.hops = []
    rows = pipeline.decode(batch, logits=True, sample=False).logits
    assert rows is not None
    recorder.logits = rows
    # What the pipeline has sent: the encoding of a bundle is one.
    request = encode(batch.bundle(pipeline.model, PLAIN))
    boundaries = []
    for hop, (layer, data) in enumerate(zip(plan.cuts, recorder.hops, strict=True)):
        asked = recorder.request_layout(hop, number, len(batch))
        bundle = decode(data)
        if (bundle.fragment_size, bundle.checksums) != (asked.fragment_size, asked.checksums):
            raise FixtureError(f"the bundle before layer {layer} in step {number} is not laid out as asked for")
        entry = _file(folder, f"{stem}-layer-{layer}.bundle", data)
        boundaries.append({"layer": layer, **entry, **asdict(asked)})
    raw = np.ascontiguousarray(rows, np.dtype("<f4")).tobytes()
    digest = _file(folder, f"{stem}-logits.f32", raw) if logits else {"file": None, **_digest(raw)}
    return {
        "tokens": list(batch.tokens),
        "positions": list(batch.positions),
        "sequences": [row[0] for row in batch.sequences],
        "outputs": [int(wanted) for wanted in batch.outputs],
        "request": {**_file(folder, f"{stem}-tokens.bundle", request), **asdict(PLAIN)},
        "boundaries": boundaries,
        "logits": {"rows": len(rows), **digest},
    }


# -- files


def _digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _file(folder: Path, name: str, data: bytes) -> dict[str, Any]:
    _write(folder / name, data)
    return {"file": name, **_digest(data)}


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(data)


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _check_target(folder: Path, force: bool) -> Path:
    """The real path of the folder to make. Raises FixtureError for one that may not be replaced."""
    try:
        target = folder.resolve()
        if not target.parent.is_dir():
            raise FixtureError(f"cannot write {folder}: there is no folder {target.parent}")
        if not os.path.lexists(target):
            return target
        if not target.is_dir():
            raise FixtureError(f"cannot write {folder}: it is there and not a folder")
        if not any(target.iterdir()):
            return target
        if not force:
            raise FixtureError(f"cannot write {folder}: it is not empty (--force replaces fixtures)")
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((target / MANIFEST).read_text("utf-8"))
            if isinstance(found, dict) and "schema" in found and "fixtures" in found:
                return target
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise FixtureError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
    raise FixtureError(f"cannot replace {folder}: it holds no fixtures, so it is not removed even with --force")


def _publish(fresh: Path, target: Path, aside: Path) -> None:
    """Give the finished folder its name; an old one is moved away first and put back if that fails."""
    os.chmod(fresh, default_mode(0o777))
    old = aside / "old"
    if os.path.lexists(target):
        os.rename(target, old)
    try:
        os.rename(fresh, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
