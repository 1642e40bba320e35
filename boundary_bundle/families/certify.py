"""Certify one model: split at every legal cut and every legal pair of cuts, equal by bits to the unpatched library.

The work is done by one C++ program, built twice (native_shim/certify.cpp). On the unpatched library it is the oracle
and finds out which settings upstream itself runs, and runs alike twice; on the patched one it compares. Each runs in a
process of its own, so that a crash is a verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..native.build import CERTIFY, NativeBuild
from ..native.download import sha256_file
from . import models
from .contracts import BoundaryContract, declared, observed, with_symbols
from .settings import ALL_SETTINGS, REDUCED, Covering, Illegal, Run, Setting, Traits, make_run, plan_text, rules

#: certified: all equal. failed: a bit differs, or something that must be refused is not. crashed: the process ended
#: or was too slow. refused: the library refuses ranges of it, by name. not built: upstream gives no model to try.
Verdict = Literal["certified", "failed", "crashed", "refused", "not built"]


TIME_LIMIT = 1800.0
#: Upstream may abort in so many settings before the model is given up.
_MOST_ABORTS = 40


@dataclass(frozen=True)
class Programs:
    """The certifying program on both libraries, and the one that describes models."""

    oracle: Path
    patched: Path
    unpatched_build: NativeBuild

    @classmethod
    def of(cls, unpatched: NativeBuild, patched: NativeBuild) -> Programs:
        return cls(unpatched.programs[CERTIFY], patched.programs[CERTIFY], unpatched)


@dataclass
class Count:
    """Values compared by their bits, and how many of them differ."""

    compared: int = 0
    differing: int = 0

    def add(self, event: dict[str, Any], name: str) -> None:
        self.compared += event[f"{name}_compared"]
        self.differing += event[f"{name}_differing"]


@dataclass
class Refusal:
    """A setting that must be refused, and what each library said."""

    setting: str
    unpatched: str
    patched: str


@dataclass
class Certificate:
    """What was measured of one variant. ``seconds`` are of the wall clock and not part of what is written."""

    architecture: str
    variant: str
    verdict: Verdict = "not built"
    reason: str = ""
    sha256: str = ""
    n_layer: int = 0
    memory: str = ""
    gives: str = "logits"
    sizes: dict[str, int] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    illegal_cuts: dict[int, str] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)
    pairs_met: int = 0
    pairs_unmet: list[str] = field(default_factory=list)
    illegal: list[Illegal] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    tokens: int = 0
    logits: Count = field(default_factory=Count)
    boundary: Count = field(default_factory=Count)
    first: dict[str, Any] | None = None
    contracts: list[BoundaryContract] = field(default_factory=list)
    ends: list[BoundaryContract] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def pairs(self) -> int:
        """Legal pairs of cuts."""
        return len(self.cuts) * (len(self.cuts) - 1) // 2


@dataclass(frozen=True)
class Limits:
    """How much is run: all, or ``only`` these settings, or the first ``reduced`` of the array."""

    reduced: bool = False
    only: tuple[str, ...] = ()
    seconds: float = TIME_LIMIT


def certify(model: models.Model, programs: Programs, limits: Limits = Limits()) -> Certificate:
    """Everything about one model file. Raises Stopped after :func:`stop_all`."""
    started = time.monotonic()
    found = Certificate(model.variant.architecture, model.variant.experts, sha256=model.sha256)
    found.n_layer, found.memory, found.gives = model.n_layer, model.memory, model.gives
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-certify-") as folder:
        try:
            _Certification(model, programs, limits, found, Path(folder)).run()
        except _Crash as crash:
            found.verdict, found.reason = "crashed", str(crash)
    found.seconds = time.monotonic() - started
    return found


def describe(path: Path, build: NativeBuild) -> models.Model:
    """A file that was not made here, as the unpatched library has it. Raises models.ModelError."""
    found = models._run(build, "--describe", str(path))
    layers = tuple(models.Layer(**layer) for layer in found.pop("layers"))
    variant = models.Variant(found.pop("architecture"), "moe" if found["n_expert"] else "dense")
    return models.Model(variant, 0, path, sha256_file(path), path.stat().st_size, layers=layers, **found)


_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


def stop_all() -> None:
    """End every program that :func:`certify` runs in any thread, and let none begin. For the end of a process."""
    _stopped.set()
    for child in list(_running):
        child.kill()


class Stopped(Exception):
    """:func:`stop_all` was called while this model was being measured."""


class _Crash(Exception):
    """A program ended before its time."""


@dataclass
class _Ended:
    """How a program ended: its events, and the last thing it said if it did not end well."""

    events: list[dict[str, Any]]
    fault: str


def _run(command: Sequence[str | Path], seconds: float, on_event: Callable[[dict[str, Any]], None]) -> _Ended:
    """Run to the end, or to the time limit; every line of standard output is an event."""
    if _stopped.is_set():
        raise Stopped
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        _running.add(child)
        if _stopped.is_set():  # between the last look and now
            child.kill()
        slow = threading.Event()

        def end() -> None:
            slow.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                with contextlib.suppress(ValueError):  # the last line of a process that was killed
                    event = json.loads(line)
                    events.append(event)
                    on_event(event)
            status = child.wait()
        finally:
            timer.cancel()
            _running.discard(child)
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if _stopped.is_set():
            raise Stopped
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().split("\n")[-1]
    if slow.is_set():
        return _Ended(events, f"no end within {seconds:.0f} s")
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return _Ended(events, f"{how}: {_without_paths(said)}" if said else how)
    return _Ended(events, "")


_FOLDERS = re.compile(r"(?<!\S)\.{0,2}/\S*/")


def _without_paths(text: str) -> str:
    """A library's sentence, with the names of files without their folders: they differ from build to build."""
    return " ".join(_FOLDERS.sub("", text).split())


class _Certification:
    """One model on its way through both programs."""

    def __init__(
        self, model: models.Model, programs: Programs, limits: Limits, found: Certificate, folder: Path
    ) -> None:
        self.model, self.programs, self.limits, self.found, self.folder = model, programs, limits, found, folder
        self.rows = folder / "oracle"
        self.traits = self._traits()
        self.crossed = self._cuts()
        ruled = rules(self.traits)
        self.covering = Covering(ruled, self._only(ruled))
        self.no_context: dict[Setting, str] = {}

    def run(self) -> None:
        self._ask_oracle()
        found = self.found
        if not self.covering.good:
            found.verdict = "not built"
            found.reason = "; ".join(sorted(set(self.covering.bad.values()))) or "no setting is legal"
            return
        found.settings = [setting.name for setting in self.covering.enough()]
        found.pairs_met = self.covering.met()
        found.illegal = self.covering.illegal()
        if not (self.limits.reduced or self.limits.only or self.crossed["refused"]):
            found.pairs_unmet = [Illegal(pair, "").text for pair in self.covering.unmet()]
        self._compare()

    def _traits(self) -> Traits:
        model = self.model
        encode = "none" if not model.encoder else "first" if model.decoder else "all"
        return Traits(
            memory=model.memory != "none" and encode != "all",
            n_vocab=model.n_vocab,
            n_ctx_train=self._n_ctx_train(),
            embeddings=model.gives == "embeddings",
            whole=not model.remembers or model.attention == "full",
            encode=encode,
            latent=model.head_size_k != model.head_size_v,
            window=model.memory in ("iswa", "hybrid_iswa"),
        )

    def _n_ctx_train(self) -> int:
        """From an empty plan: it also tells whether the library loads the file at all."""
        plan = self._plan("facts", [])
        ended = _run([self.programs.oracle, plan, self.model.path, self.rows], self.limits.seconds, lambda event: None)
        facts = [event for event in ended.events if event["event"] == "facts"]
        if ended.fault or not facts:
            raise _Crash(f"the unpatched library: {ended.fault}")
        return int(facts[0]["n_ctx_train"])

    def _cuts(self) -> dict[str, Any]:
        """Which cuts the patched library allows, from an empty plan."""
        self.rows.touch()
        ended = _run(
            [self.programs.patched, self._plan("cuts", []), self.model.path, self.rows],
            self.limits.seconds,
            lambda event: None,
        )
        if ended.fault or not ended.events:
            raise _Crash(ended.fault or "the patched library says nothing of cuts")
        return ended.events[0]

    def _only(self, ruled: Sequence[Illegal]) -> list[Setting] | None:
        # Of a model that is refused by name only the whole is run, to see that it is what it was.
        reduced = self.limits.reduced or bool(self.crossed["refused"])
        if not (self.limits.only or reduced):
            return None
        if not self.limits.only:
            return Covering(ruled).next_round()[:REDUCED]
        return [setting for setting in ALL_SETTINGS if setting.name in self.limits.only]

    def _plan(self, name: str, runs: Sequence[Run], **options: Any) -> Path:
        path = self.folder / f"{name}.plan"
        path.write_text(plan_text(runs, **options), encoding="ascii")
        return path

    # -- the unpatched library

    def _ask_oracle(self) -> None:
        aborts = 0
        while settings := self.covering.next_round():
            left = list(settings)
            while left:
                fault = self._oracle_round(left)
                if not fault:
                    break
                # The setting that had begun is the one that ended the process.
                setting = left.pop(0)
                self.covering.refused(setting, f"aborts: {fault.replace(f'unsplit in setting {setting.name}: ', '')}")
                aborts += 1
                if aborts > _MOST_ABORTS:
                    raise _Crash(f"the unpatched library aborts in {aborts} settings: {fault}")

    def _oracle_round(self, left: list[Setting]) -> str:
        """Runs settings, removing them from ``left`` as they are done; the fault that ended it early, or nothing."""

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] != "setting":
                return
            setting = left.pop(0)
            assert setting.name == event["setting"]
            if not event["ok"]:
                reason = _without_paths(event["reason"])
                self.covering.refused(setting, reason)
                if event["no_context"]:
                    self.no_context[setting] = reason
            elif event["unlike"]:
                self.covering.refused(setting, "upstream, run twice, gives other bits")
            elif event["not_finite"] or event["distinct"] < 2:
                # A comparison of such rows says nothing.
                self.covering.refused(setting, "the model's output is not finite, or all alike")
            else:
                self.covering.ran(setting)

        plan = self._plan("oracle", [make_run(setting, self.traits) for setting in left])
        command = [self.programs.oracle, plan, self.model.path, self.rows]
        ended = _run(command, self.limits.seconds, on_event)
        if ended.fault and not left:
            return ""  # at the end, with everything done
        return ended.fault

    # -- the patched library

    def _compare(self) -> None:
        found = self.found
        runs = [make_run(setting, self.traits) for setting in self.covering.enough()]
        refuse = self._refused_runs()
        dumped = next((run.setting.name for run in runs if len(run.sizes) > 1), None)
        bundles = self.folder / "bundles"
        bundles.mkdir()
        names = {run.setting.name: True for run in refuse}
        plan = self._plan("patched", [*runs, *refuse], refuse=names, dump=dumped)
        crossed = self.crossed
        found.cuts = crossed["legal"]
        found.illegal_cuts = {row["cut"]: row["message"] for row in crossed["illegal"]}
        reasons: list[str] = []
        done: list[str] = []

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "setting":
                done.append(event["setting"])
                if "refused" in event:
                    found.refusals.append(
                        Refusal(event["setting"], self._said(event["setting"]), _without_paths(event["reason"]))
                    )
                    if not event["refused"] and found.cuts:
                        reasons.append(f"setting {event['setting']} is not refused by a shard")
                    return
                found.tokens += event["tokens"]
                found.logits.add(event, "logits")
                found.boundary.add(event, "boundary")
                if event["failed"]:
                    reasons.append(f"setting {event['setting']}: {event['failed']}")
                if event["first"] is not None and found.first is None:
                    found.first = {"setting": event["setting"], **event["first"]}

        command = [self.programs.patched, plan, self.model.path, self.rows, bundles]
        ended = _run(command, self.limits.seconds, on_event)
        if ended.fault:
            place = f"after {done[-1]}" if done else "at the beginning"
            raise _Crash(f"{ended.fault} ({place})")
        self._read_contracts(crossed["contracts"], bundles, reasons)
        if found.first is not None:
            reasons.insert(0, "differs first at " + json.dumps(found.first, sort_keys=True))
        if crossed["refused"]:
            found.verdict = "failed" if reasons else "refused"
            found.reason = "; ".join(reasons) or crossed["refused"]
            return
        expected = expected_cuts(self.model)
        if found.cuts != expected:
            reasons.append(f"legal cuts are {found.cuts}, expected {expected}")
        if crossed["accepted"]:
            reasons.append(f"ranges that begin or end at an illegal cut are accepted: {crossed['accepted']}")
        if not found.cuts:
            reasons.append("there is no legal cut")
        if found.pairs_unmet:
            reasons.append(f"pairs of values are neither met nor illegal: {', '.join(found.pairs_unmet)}")
        found.verdict = "failed" if reasons or found.logits.differing or found.boundary.differing else "certified"
        found.reason = "; ".join(reasons)

    def _read_contracts(self, texts: Sequence[dict[str, Any]], bundles: Path, reasons: list[str]) -> None:
        """What the library declares, held against what crossed."""
        found, n_layer = self.found, self.model.n_layer
        boundaries = declared((row["cut"], row["text"]) for row in texts if 0 < row["cut"] < n_layer)
        ends = declared((row["cut"], row["text"]) for row in texts if row["cut"] in (0, n_layer))
        crossed = observed(bundles)
        if crossed and crossed != boundaries:
            reasons.append(f"what crosses is {crossed}, but the library declares {boundaries}")
        known = {"n_embd": self.model.n_embd, "n_vocab": self.model.n_vocab}
        try:
            found.contracts, sizes = with_symbols(boundaries, n_layer, known)
            found.ends, more = with_symbols(ends, n_layer, known)
        except ValueError as error:
            reasons.append(f"the declared contracts: {error}")
        else:
            found.sizes = dict(sorted({**sizes, **more}.items()))

    def _refused_runs(self) -> list[Run]:
        """One setting for each combination that the library refuses when a context is made."""
        runs: dict[str, Run] = {}
        for entry in self.found.illegal:
            if entry.refused:
                asked = next(one for one in _plain_settings(entry) if one.meets(entry.combination))
                self._ask_refusal(asked)
            else:
                known = [setting for setting in self.no_context if setting.meets(entry.combination)]
                if not known:
                    continue
                asked = known[0]
            if asked in self.no_context:
                runs[asked.name] = make_run(asked, self.traits)
        return list(runs.values())

    def _ask_refusal(self, setting: Setting) -> None:
        plan = self._plan("refusal", [make_run(setting, self.traits)])
        # Its rows, if it gives any, are not those of a setting that is compared.
        command = [self.programs.oracle, plan, self.model.path, self.folder / "unused"]
        ended = _run(command, self.limits.seconds, lambda event: None)
        told = [event for event in ended.events if event["event"] == "setting"]
        if told and not told[0]["ok"] and told[0]["no_context"]:
            self.no_context[setting] = _without_paths(told[0]["reason"])

    def _said(self, name: str) -> str:
        return next((reason for setting, reason in self.no_context.items() if setting.name == name), "")


def _plain_settings(entry: Illegal) -> list[Setting]:
    values = dict(entry.combination)
    base = {
        "batch": "u",
        "sequences": "1",
        "kv": "unified",
        "flash": "on",
        "types": "f16-f16",
        "outputs": "all",
        "context": "short",
        "window": "whole",
    }
    return [Setting(**{**base, **values})]


def expected_cuts(model: models.Model) -> list[int]:
    """What the file itself says of legal cuts, for comparison with what the library says.

    Layers from n_layer_kv_from_start on take the keys and values of the two layers before it, so that no cut may come
    after the first of those.
    """
    shared = 0 <= model.n_layer_kv_from_start < model.n_layer
    last = model.n_layer_kv_from_start - 2 if shared else model.n_layer - 1
    return list(range(1, last + 1))


__all__ = [
    "TIME_LIMIT",
    "Certificate",
    "Count",
    "Limits",
    "Programs",
    "Refusal",
    "Stopped",
    "Verdict",
    "certify",
    "describe",
    "stop_all",
]
