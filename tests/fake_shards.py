"""Shard workers without processes and without a model: the rules of spec/worker-protocol.md in plain Python.

What a fake shard "computes" is a chain of hashes: each layer's value at a position is made of its value at the position
before and of what comes into the layer. A wrong token, position, order or history anywhere changes every logit from
there on. The chain is by layer, so that it does not depend on where the model is cut: :func:`chain` gives the logits of
a token history without shards, without sessions, without state.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boundary_bundle import Bundle, Tensor, decode, encode
from boundary_bundle.shards import Layout, Plan, Reply, Worker, WorkerError
from boundary_bundle.shards.check import relaid
from boundary_bundle.shards.protocol import ERRORS, Outcome, Type
from boundary_bundle.shards.worker import Bytes, refusal

N_EMBD = 8
N_VOCAB = 32
FORGOTTEN = 4096

#: What a fault does to a request: die before it, or after it was done but before it is answered; lose all state and
#: then take it; answer, but interrupt whoever waits for the answer; fail while computing; refuse it.
FAULTS = ("die", "die_after", "lose", "interrupt", "compute", "refuse")
Fault = Callable[["FakeShard", Type], "str | None"]


def row_of(*parts: bytes) -> bytes:
    """One row of the residual stream: eight whole numbers as f32, little-endian."""
    digest = hashlib.sha256(b"|".join(parts)).digest()
    return (np.frombuffer(digest, "<u4") & 0x7FFFFF).astype("<f4").tobytes()


def step(layer: int, before: bytes, entering: bytes) -> bytes:
    return row_of(b"layer %d" % layer, before, entering)


def logits_row(row: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(b"".join(row_of(b"head %d" % part, row) for part in range(N_VOCAB // N_EMBD)), "<f4")


def states(tokens: Sequence[int], n_layer: int) -> list[list[bytes]]:
    """For each position of a history each layer's value, computed in one piece."""
    before = [b""] * n_layer
    found = []
    for token in tokens:
        row = row_of(b"token %d" % token)
        for layer in range(n_layer):
            row = before[layer] = step(layer, before[layer], row)
        found.append(list(before))
    return found


def chain(tokens: Sequence[int], n_layer: int) -> npt.NDArray[np.float32]:
    """Logits f32 [tokens, N_VOCAB] of a history."""
    return np.array([logits_row(rows[-1]) for rows in states(tokens, n_layer)], np.float32).reshape(-1, N_VOCAB)


@dataclass
class FakeModel:
    """What all shards share. ``recurrent`` lists layers whose state does not go back."""

    n_layer: int = 6
    slots: int = 4
    positions: int = 64
    n_batch: int = 8
    kv_unified: bool = False
    recurrent: tuple[int, ...] = ()
    threads: int = 1
    state_dir: Path | None = None


@dataclass
class Entry:
    """A live session on one shard: for each position one hash a layer."""

    id: bytes
    epoch: int
    slot: int
    rows: list[list[bytes]] = field(default_factory=list)
    pinned: bool = False
    used: int = 0
    answer: tuple[bytes, Reply] | None = None


class Refused(Exception):
    def __init__(self, code: int, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class FakeShard:
    """One worker process: its range, its table, its faults."""

    def __init__(self, model: FakeModel, layers: tuple[int, int], pid: int) -> None:
        self.model = replace(model)  # as it was when the process began
        self.layers = layers
        self.pid = pid
        self.dead = False
        self.live: dict[bytes, Entry] = {}
        #: id -> (epoch, whether it was released).
        self.gone: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()
        self.fault: Fault | None = None
        #: Session operations in the order in which they came, for comparing shards.
        self.seen: list[tuple[Any, ...]] = []
        self.outcomes = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        self.calls = self.tokens = 0
        self.lock = threading.Lock()

    # -- what tests do to it

    def die(self) -> None:
        self.dead = True

    def lose(self, id: bytes | None = None) -> None:
        """Lose the state of one session, or of all, as a computation that fails does."""
        for name in list(self.live) if id is None else [id]:
            if name in self.live:
                self._forget(self.live.pop(name), released=False)

    def slots(self) -> dict[int, bytes]:
        return {entry.slot: entry.id for entry in self.live.values()}

    # -- requests

    def answer(self, type: Type, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        handler = getattr(self, f"_{type.name.lower()}")
        return handler(text, bundle)

    def _describe(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        model, (start, end) = self.model, self.layers
        common = [
            {"name": "positions", "dtype": "i32", "shape": ["tokens"], "token_axis": 0},
            {"name": "seq_offsets", "dtype": "u32", "shape": ["tokens+1"], "token_axis": None},
            {"name": "seq_ids", "dtype": "u32", "shape": ["members"], "token_axis": None},
            {"name": "outputs", "dtype": "bool", "shape": ["tokens"], "token_axis": 0},
        ]
        residual = {"name": "residual", "dtype": "f32", "shape": ["tokens", N_EMBD], "token_axis": 0}
        tokens = {"name": "token_ids", "dtype": "i32", "shape": ["tokens"], "token_axis": 0}
        logits = {"name": "logits", "dtype": "f32", "shape": ["outputs", N_VOCAB], "token_axis": None}
        return Reply(
            {
                "architecture": "fake",
                "n_layer": model.n_layer,
                "layer_start": start,
                "layer_end": end,
                "n_embd": N_EMBD,
                "n_vocab": N_VOCAB,
                "fingerprint": hashlib.sha256(b"fake").hexdigest(),
                "weight_bytes": 0,
                "kv_bytes": 0,
                "resident_bytes": 0,
                "n_ctx": model.positions * (1 if model.kv_unified else model.slots),
                "n_batch": model.n_batch,
                "n_ubatch": model.n_batch,
                "n_seq_max": model.slots,
                "kv_unified": model.kv_unified,
                "eos": [2],
                "patched": True,
                "contract": {
                    "in": [residual if start else tokens, *common],
                    "out": [logits] if end == model.n_layer else [residual, *common],
                },
                "recipe": self.recipe(),
            },
            memoryview(b""),
        )

    def recipe(self) -> dict[str, Any]:
        shared = f"boundary-bundle recipe 1\nn_batch {self.model.n_batch}\nn_threads {self.model.threads}\n"
        shared += "rope_freq_base 461c4000\n"
        own = f"layer_start {self.layers[0]}\nlayer_end {self.layers[1]}\n"
        return {
            name: {"text": part, "fingerprint": hashlib.sha256(part.encode()).hexdigest()}
            for name, part in (("shared", shared), ("range", own))
        }

    def _hello(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        return Reply({"major": 1, "minor": 1}, memoryview(b""))

    def _statistics(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        counters = {"requests": self.calls, "tokens": self.tokens, "resident_bytes": 1000, "kv_bytes": 500}
        return Reply(counters, memoryview(b""))

    def _clear(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        if text and self.live:
            raise Refused(11, "sessions are open")
        self.live.clear()
        self.gone.clear()
        return Reply({}, memoryview(b""))

    def _tokenize(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        return Reply({"tokens": [ord(letter) % N_VOCAB for letter in text["text"]]}, memoryview(b""))

    def _check_epoch(self, id: bytes, epoch: int, what: str) -> Entry:
        """The live session under exactly this epoch."""
        entry = self.live.get(id)
        if entry is not None:
            if epoch < entry.epoch:
                raise self._outcome(Outcome.STALE_EPOCH, id, f"{what} under epoch {epoch}, held {entry.epoch}")
            if epoch > entry.epoch:
                raise self._outcome(Outcome.MISS, id, f"{what} under epoch {epoch}, never opened")
            return entry
        held, released = self.gone.get(id, (-1, False))
        if epoch < held or (epoch == held and released):
            raise self._outcome(Outcome.STALE_EPOCH, id, f"{what} under epoch {epoch}, seen {held}")
        if epoch == held:
            raise self._outcome(Outcome.EVICTED, id, f"{what}: it was given up")
        raise self._outcome(Outcome.MISS, id, f"{what}: no such session")

    def _outcome(self, outcome: Outcome, id: bytes | None, message: str, code: int = 12, **more: Any) -> Refused:
        details: dict[str, Any] = {"outcome": outcome.value, "epoch": None, "position": None, **more}
        if id is not None:
            details["session"] = id.hex()
            if id in self.live:
                details |= {"epoch": self.live[id].epoch, "position": len(self.live[id].rows)}
            elif id in self.gone:
                details["epoch"] = self.gone[id][0]
        return Refused(code, message, **details)

    def _forget(self, entry: Entry, *, released: bool, epoch: int | None = None) -> None:
        self.gone.pop(entry.id, None)
        self.gone[entry.id] = (entry.epoch if epoch is None else epoch, released)
        while len(self.gone) > FORGOTTEN:
            self.gone.popitem(last=False)

    def _touch(self, entry: Entry) -> None:
        self.calls += 1
        entry.used = self.calls

    def _check_recipe(self, text: Mapping[str, Any], id: bytes) -> None:
        mine = self.recipe()["shared"]
        if text["recipe"] == mine["fingerprint"]:
            return
        pairs = zip(str(text.get("ingredients", "")).splitlines(), mine["text"].splitlines(), strict=False)
        name = next((line.split()[0] for line, own in pairs if line != own), None)
        raise self._outcome(Outcome.INCOMPATIBLE_RECIPE, id, "another recipe", ingredient=name)

    def _create(self, id: bytes, epoch: int) -> Entry:
        taken = self.slots()
        free = [slot for slot in range(self.model.slots) if slot not in taken]
        if not free:
            raise self._outcome(Outcome.FULL, id, f"all {self.model.slots} sequences are taken")
        self.gone.pop(id, None)
        entry = self.live[id] = Entry(id, epoch, free[0])
        return entry

    def _told(self, entry: Entry, **more: Any) -> Reply:
        self._touch(entry)
        told = {"session": entry.id.hex(), "epoch": entry.epoch, "position": len(entry.rows), "outcome": "hit"}
        return Reply({**told, **more}, memoryview(b""))

    def _open(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        id, epoch, position = bytes.fromhex(text["session"]), text["epoch"], text["position"]
        self._check_recipe(text, id)
        entry = self.live.get(id)
        if entry is not None:
            if epoch < entry.epoch:
                raise self._outcome(Outcome.STALE_EPOCH, id, f"epoch {epoch}, held {entry.epoch}")
            if position == len(entry.rows):
                entry.epoch = epoch
                return self._told(entry, created=False)
            if position or epoch == entry.epoch:
                raise self._outcome(Outcome.POSITION_MISMATCH, id, f"position {position}, held {len(entry.rows)}")
            entry.epoch = epoch
            entry.rows.clear()
            return self._told(entry, created=True)
        held, released = self.gone.get(id, (-1, False))
        if epoch < held or (epoch == held and released):
            raise self._outcome(Outcome.STALE_EPOCH, id, f"epoch {epoch}, seen {held}")
        if position:
            raise self._outcome(Outcome.EVICTED if epoch == held else Outcome.MISS, id, "it is not there")
        return self._told(self._create(id, epoch), created=True)

    def _truncate(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        id, position = bytes.fromhex(text["session"]), text["position"]
        entry = self._check_epoch(id, text["epoch"], "truncate")
        if position > len(entry.rows):
            raise self._outcome(Outcome.POSITION_MISMATCH, id, f"truncate to {position} of {len(entry.rows)}")
        own = set(range(*self.layers))
        if 0 < position < len(entry.rows) and own & set(self.model.recurrent):
            raise self._outcome(Outcome.CANNOT_TRUNCATE, id, "recurrent states do not go back")
        del entry.rows[position:]
        return self._told(entry)

    def _release(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        id, epoch = bytes.fromhex(text["session"]), text["epoch"]
        entry = self.live.get(id)
        held, _ = self.gone.get(id, (None, False))
        known = entry.epoch if entry is not None else held
        if known is None:
            raise self._outcome(Outcome.MISS, id, "no such session")
        if epoch < known:
            raise self._outcome(Outcome.STALE_EPOCH, id, f"release under epoch {epoch}, held {known}")
        self.live.pop(id, None)
        self._forget(Entry(id, epoch, -1), released=True)
        return Reply({"session": id.hex(), "epoch": epoch, "outcome": "hit"}, memoryview(b""))

    def _pin(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        entry = self._check_epoch(bytes.fromhex(text["session"]), text["epoch"], "pin")
        entry.pinned = text["pinned"]
        return self._told(entry)

    def _evict(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        if "session" in text:
            id = bytes.fromhex(text["session"])
            if id not in self.live:
                evicted = id in self.gone and not self.gone[id][1]
                raise self._outcome(Outcome.EVICTED if evicted else Outcome.MISS, id, "it is not there")
            entry = self.live[id]
            if entry.pinned:
                raise self._outcome(Outcome.BUSY, id, "it is pinned")
        else:
            free = [entry for entry in self.live.values() if not entry.pinned]
            if not free:
                raise self._outcome(Outcome.BUSY if self.live else Outcome.MISS, None, "nothing to evict")
            entry = min(free, key=lambda entry: entry.used)
        self._forget(self.live.pop(entry.id), released=False)
        return Reply({"session": entry.id.hex(), "epoch": entry.epoch, "outcome": "hit"}, memoryview(b""))

    def _sessions(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        entries = [
            {
                "session": entry.id.hex(),
                "epoch": entry.epoch,
                "position": len(entry.rows),
                "kv_bytes": 0,
                "used": entry.used,
                "pinned": entry.pinned,
                "state": "live",
            }
            for entry in sorted(self.live.values(), key=lambda entry: -entry.used)
        ]
        if text.get("forgotten"):
            for id, (epoch, released) in self.gone.items():
                entries.append(
                    {
                        "session": id.hex(),
                        "epoch": epoch,
                        "position": 0,
                        "kv_bytes": 0,
                        "used": 0,
                        "pinned": False,
                        "state": "released" if released else "evicted",
                    }
                )
        counts = {"live": len(self.live), "forgotten": len(self.gone), "slots": self.model.slots}
        more = {"positions": self.model.positions, "calls": self.calls, "tokens": self.tokens}
        rest = {"created": 0, "evicted": 0, "released": 0, "outcomes": self.outcomes}
        return Reply({"sessions": entries, **counts, **more, **rest}, memoryview(b""))

    def _path(self, text: Mapping[str, Any]) -> Path:
        if self.model.state_dir is None:
            raise Refused(1, "there is no state folder")
        return self.model.state_dir / text["file"]

    def _save(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        entry = self._check_epoch(bytes.fromhex(text["session"]), text["epoch"], "save")
        rows = [[row.hex() for row in layers] for layers in entry.rows]
        body = json.dumps({"session": entry.id.hex(), "range": self.layers, "recipe": self.recipe(), "rows": rows})
        digest = hashlib.sha256(body.encode()).hexdigest()
        self._path(text).write_text(digest + body)
        return self._told(entry, bytes=len(body))

    def _restore(self, text: Mapping[str, Any], bundle: Bytes) -> Reply:
        id, epoch = bytes.fromhex(text["session"]), text["epoch"]
        self._check_recipe(text, id)
        try:
            content = self._path(text).read_text()
        except OSError as error:
            raise Refused(1, f"cannot read {text['file']}: {error.strerror}") from None
        digest, body = content[:64], content[64:]
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            raise Refused(5, "the file is damaged", bundle_error="payload_checksum", offset=0)
        saved = json.loads(body)
        if (saved["session"], tuple(saved["range"])) != (id.hex(), self.layers):
            raise Refused(6, "the file is another session's or another range's")
        entry = self.live.get(id)
        held, released = self.gone.get(id, (-1, False))
        if (entry is not None and epoch <= entry.epoch) or epoch < held or (epoch == held and released):
            raise self._outcome(Outcome.STALE_EPOCH, id, "restore under an epoch that is not new")
        if entry is not None and entry.rows:
            raise self._outcome(Outcome.POSITION_MISMATCH, id, "restore over positions")
        if entry is None:
            entry = self._create(id, epoch)
        entry.epoch = epoch
        entry.rows = [[bytes.fromhex(row) for row in layers] for layers in saved["rows"]]
        return self._told(entry)

    # -- decode

    def _decode(self, text: Mapping[str, Any], data: Bytes) -> Reply:
        bundle = decode(data)
        if "session_ids" not in bundle:
            raise Refused(11 if self.live else 6, "the fake decodes under sessions only")
        ids = [bytes(row) for row in np.asarray(bundle["session_ids"], np.uint8)]
        epochs = [int(epoch) for epoch in bundle["session_epochs"]]
        starts = [int(start) for start in bundle["session_positions"]]
        positions = [int(position) for position in bundle["positions"]]
        rows = [int(row) for row in bundle["seq_ids"]]
        if len(positions) > self.model.n_batch:
            raise Refused(8, f"{len(positions)} tokens, but {self.model.n_batch} a batch")
        if set(rows) != set(range(len(ids))) or len(set(ids)) != len(ids):
            raise Refused(6, "a row of the session table is named by no token, or twice there")
        if bundle.attributes.get("recipe_fingerprint") != bytes.fromhex(self.recipe()["shared"]["fingerprint"]):
            raise self._outcome(Outcome.INCOMPATIBLE_RECIPE, None, "another recipe")
        key = hashlib.sha256(bytes(data) + json.dumps(text, sort_keys=True).encode()).digest()
        entries = []
        again: Reply | None = None
        for id, epoch, start in zip(ids, epochs, starts, strict=True):
            entry = self._check_epoch(id, epoch, "decode")
            if start != len(entry.rows):
                if entry.answer is not None and entry.answer[0] == key:
                    again = entry.answer[1]
                    continue
                raise self._outcome(Outcome.POSITION_MISMATCH, id, f"decode at {start}, held {len(entry.rows)}")
            entries.append(entry)
        if again is not None:
            return again
        upto = [len(entry.rows) for entry in entries]
        for row, position in zip(rows, positions, strict=True):
            if position != upto[row]:
                raise Refused(7, f"position {position} does not follow {upto[row]}")
            upto[row] += 1
        for entry, count in zip(entries, upto, strict=True):
            if count > self.model.positions:
                raise self._outcome(Outcome.FULL, entry.id, f"{count} positions, a session can have fewer", 9)
        held = sum(len(entry.rows) for entry in self.live.values())
        if self.model.kv_unified and held + len(positions) > self.model.positions:
            raise self._outcome(Outcome.FULL, ids[0], f"{held} cells are taken of {self.model.positions}", 9)
        reply = self._compute(text, bundle, entries, rows)
        for entry in entries:
            self._touch(entry)
            entry.answer = (key, reply)
        self.tokens += len(rows)
        return reply

    def _compute(self, text: Mapping[str, Any], bundle: Bundle, entries: Sequence[Entry], rows: Sequence[int]) -> Reply:
        start, end = self.layers
        if start == 0:
            entering = [row_of(b"token %d" % token) for token in bundle["token_ids"]]
        else:
            entering = [row.tobytes() for row in np.asarray(bundle["residual"], "<f4")]
        out = []
        for token, row in enumerate(rows):
            values, state = entering[token], entries[row].rows
            layers = []
            for layer in range(start, end):
                before = state[-1][layer - start] if state else b""
                values = step(layer, before, values)
                layers.append(values)
            state.append(layers)
            out.append(values)
        told = {"n_tokens": len(rows), "decode_us": 1, "compute_us": 2, "encode_us": 3}
        layout = Layout(text["byte_order"], text["fragment_size"], text["checksums"])
        attributes = dict(bundle.attributes)
        attributes |= {"layer_start": start, "layer_end": end}
        if end < self.model.n_layer:
            table = np.frombuffer(b"".join(out), "<f4").reshape(-1, N_EMBD)
            tensors = [Tensor("residual", table, token_axis=0), *bundle.tensors[1:]]
            result = Bundle(tensors, attributes, number=bundle.number)
            return Reply(told, memoryview(encode(relaid(result, layout))))
        wanted = np.asarray(bundle["outputs"], np.bool_)
        logits = np.array([logits_row(out[t]) for t in range(len(rows)) if wanted[t]], np.float32).reshape(-1, N_VOCAB)
        if text.get("sample", True):
            told["sampled"] = [int(token) for token in logits.argmax(axis=1)] if len(logits) else []
        if not text.get("logits", False):
            return Reply(told, memoryview(b""))
        result = Bundle([Tensor("logits", logits)], attributes, number=bundle.number)
        return Reply(told, memoryview(encode(relaid(result, layout))))


class Answer:
    def __init__(self, reply: Reply | None, error: BaseException | None = None) -> None:
        self.reply = reply
        self.error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Reply:
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


def seen(operation: str, text: Mapping[str, Any], data: Bytes) -> tuple[Any, ...]:
    """(operation, id, epoch, position), or ("decode", ids, start positions, tokens of the batch, outputs)."""
    if operation != "decode":
        return operation, text.get("session"), text.get("epoch"), text.get("position")
    bundle = decode(data)
    ids = tuple(bytes(row).hex() for row in np.asarray(bundle["session_ids"]))
    starts = tuple(np.asarray(bundle["session_positions"]).tolist())
    outputs = np.asarray(bundle["outputs"])
    return operation, ids, starts, len(outputs), int(outputs.sum())


#: The requests that change or use a table.
OPERATIONS = (Type.OPEN, Type.TRUNCATE, Type.RELEASE, Type.EVICT, Type.DECODE, Type.RESTORE, Type.CLEAR)


class FakeWorker(Worker):
    """A connection to a fake shard."""

    def __init__(self, shard: FakeShard) -> None:
        self.shard = shard
        self.layer_range = shard.layers
        self.pid = shard.pid
        self.closed = False

    @property
    def alive(self) -> bool:
        return not self.closed and not self.shard.dead

    def close(self) -> None:
        self.closed = True

    def request(self, type: int, text: Mapping[str, Any] | None = None, bundle: Bytes = b"") -> Answer:
        kind, shard = Type(type), self.shard
        operation = kind.name.lower()
        with shard.lock:
            fault = shard.fault(shard, kind) if shard.fault is not None else None
            if fault == "die":
                shard.dead = True
            if not self.alive:
                raise WorkerError(0, "lost", "the fake is dead", self.layer_range, operation)
            if fault == "lose":
                shard.lose()
            if kind in OPERATIONS:
                shard.seen.append(seen(operation, text or {}, bundle))
            try:
                if fault == "refuse":
                    raise Refused(8, "the fake was told to refuse")
                if fault == "compute":
                    for row in np.asarray(decode(bundle)["session_ids"], np.uint8):
                        shard.lose(bytes(row))
                    raise Refused(10, "the fake was told to fail")
                reply = shard.answer(kind, text or {}, bundle)
            except Refused as error:
                told = {"code": error.code, "name": ERRORS[error.code], "message": str(error), **error.details}
                if "outcome" in error.details:
                    shard.outcomes[error.details["outcome"]] += 1
                return Answer(None, refusal(told, self.layer_range, operation))
            shard.outcomes["hit"] += 1
            if fault == "die_after":
                shard.dead = True
                return Answer(None, WorkerError(0, "lost", "the fake died", self.layer_range, operation))
            if fault == "interrupt":
                return Answer(None, KeyboardInterrupt())
            return Answer(reply)


class Cluster:
    """The shards of a plan; ``start`` connects to the one of a range, or begins it anew if it is dead."""

    def __init__(self, model: FakeModel | None = None, cuts: Sequence[int] = (2, 4)) -> None:
        self.model = model or FakeModel()
        edges = [0, *cuts, self.model.n_layer]
        self.plan = Plan(self.model.n_layer, tuple(zip(edges, edges[1:], strict=False)))
        self.shards: dict[tuple[int, int], FakeShard] = {}
        self.started = 0
        #: Called with each new shard, so that a fault outlives the process that it kills.
        self.prepare: Callable[[FakeShard], None] = lambda shard: None
        self.connections: list[FakeWorker] = []

    def start(self, layers: tuple[int, int]) -> Worker:
        shard = self.shards.get(layers)
        if shard is None or shard.dead:
            self.started += 1
            shard = self.shards[layers] = FakeShard(self.model, layers, 1000 + self.started)
            self.prepare(shard)
        worker = FakeWorker(shard)
        self.connections.append(worker)
        return worker

    def __iter__(self) -> Any:
        return iter(self.shards[layers] for layers in self.plan)

    def __getitem__(self, index: int) -> FakeShard:
        return self.shards[self.plan.ranges[index]]

    def expected(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        return chain(tokens, self.model.n_layer)
