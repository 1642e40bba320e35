"""Starts workers on files that may be anything, and has those that stand compute a batch."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from boundary_bundle import Bundle, decode, encode
from boundary_bundle.shards import Batch, Settings
from boundary_bundle.shards.protocol import HEADER_BYTES, Type, pack, parse_text, unpack_header
from boundary_bundle.shards.worker import Description

#: Small, so that what a file costs is seen.
SETTINGS = Settings(threads=1, ctx=64, batch=16, ubatch=8)
#: Seconds that a worker may take for anything; more is a hang.
PATIENCE = 10.0
#: A batch of two micro-batches, every row an output.
BATCH = Batch.of_sequence([5, 77, 301, 12, 250, 9, 9, 131, 40, 3], 0, outputs="all")

#: What makes a vocabulary look things up: bytes, special tokens, nothing that it has.
TEXT = "split this \u00e9\U0001f600<s>\n\x00 word7"

_REFUSAL = re.compile(r"shard_worker: error (\d+) ([a-z]+): (.*)\n")


@dataclass
class Start:
    """What became of one worker. ``status`` is negative for a signal and None for a hang; ``peak`` is in bytes."""

    status: int | None = None
    errors: str = ""
    seconds: float = 0.0
    peak: int = 0
    #: Bytes on standard output.
    answered: int = 0
    #: Replies by request, those that are errors included.
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: What left the range.
    output: Bundle | None = field(default=None, repr=False)

    @property
    def stands(self) -> bool:
        return "hello" in self.told

    @property
    def sentence(self) -> str | None:
        """Of a start that was refused as it must be: status 2 and one line, without what a terminal would obey."""
        match = _REFUSAL.fullmatch(self.errors)
        good = self.status == 2 and match is not None and not self.answered
        return match[3] if good and match is not None and match[3].isprintable() else None

    @property
    def fingerprint(self) -> str | None:
        found: str | None = self.told.get("describe", {}).get("fingerprint")
        return found

    @property
    def payloads(self) -> dict[str, bytes] | None:
        """The bits of what left the range."""
        if self.output is None:
            return None
        return {tensor.name: tensor.array.tobytes() for tensor in self.output.tensors}


class _Hang(Exception):
    pass


class _Conversation:
    """Requests one by one, with an end to patience."""

    def __init__(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.deadline = deadline
        self.received = 0
        self.input, self.output = process.stdin.fileno(), process.stdout.fileno()

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def ask(self, type: Type, text: dict[str, Any] | None = None, bundle: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Text and bundle of the reply. Raises EOFError when the worker is gone."""
        data = memoryview(pack(type, int(type), text, len(bundle)) + bundle)
        try:
            while data:
                data = data[os.write(self.input, data) :]
        except BrokenPipeError:
            raise EOFError from None
        header = unpack_header(self._read(HEADER_BYTES))
        return parse_text(memoryview(self._read(header.text_length))), self._read(header.bundle_length)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not select.select([self.output], [], [], self.left())[0]:
                raise _Hang
            piece = os.read(self.output, size - len(data))
            if not piece:
                raise EOFError
            data += piece
            self.received += len(piece)
        return bytes(data)

    def end(self) -> tuple[int, int] | None:
        """Exit status (negative: signal) and peak memory in bytes; None for a hang, which is ended here."""
        descriptor = os.pidfd_open(self.process.pid)
        try:
            ended = bool(select.select([descriptor], [], [], self.left())[0])
        finally:
            os.close(descriptor)
        if not ended:
            self.process.kill()
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return (self.process.returncode, usage.ru_maxrss * 1024) if ended else None


def start(
    program: Path,
    path: Path | str,
    layers: tuple[int, int] | None = None,
    *,
    mmap: bool = True,
    given: Bundle | None = None,
    more: tuple[str, ...] = (),
    meanwhile: Callable[[], object] | None = None,
    patience: float = PATIENCE,
) -> Start:
    """Start a worker and, if it stands, ask what it holds, for some text, and to compute a batch.

    ``given`` is the batch for a range that does not begin at layer 0. ``meanwhile`` is called when the worker stands.
    """
    command = [str(program), "--model", str(path), *replace(SETTINGS, mmap=mmap).arguments(), *more]
    if layers is not None:
        command += ["--range", f"{layers[0]}:{layers[1]}"]
    found = Start()
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        talk = _Conversation(process, began + patience)
        try:
            with contextlib.suppress(EOFError):
                _talk(talk, found, given, meanwhile)
        except _Hang:
            talk.deadline = 0.0
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        ended = talk.end()
        if ended is not None:
            found.status, found.peak = ended
        found.seconds = time.monotonic() - began
        found.answered = talk.received
        errors.seek(0)
        found.errors = errors.read().decode("utf-8", "backslashreplace").replace("shard_worker: ready\n", "", 1)
    return found


def _talk(talk: _Conversation, found: Start, given: Bundle | None, meanwhile: Callable[[], object] | None) -> None:
    def ask(type: Type, text: dict[str, Any] | None = None, bundle: bytes = b"") -> bytes:
        reply, output = talk.ask(type, text, bundle)
        found.told[type.name.lower()] = reply
        return output

    ask(Type.HELLO, {"major": 1, "minors": [0, 1]})
    ask(Type.DESCRIBE, {"tensors": True})
    about = found.told["describe"]
    if meanwhile is not None:
        meanwhile()
    if "fingerprint" in about:
        ask(Type.TOKENIZE, {"text": TEXT})
        ask(Type.DETOKENIZE, {"tokens": list(range(min(about["n_vocab"], 400)))})
        if about["layer_start"] == 0:
            request = BATCH.bundle(Description.of(about))
        else:
            assert given is not None
            request = Bundle(
                given.tensors, {**dict(given.attributes), "model_fingerprint": bytes.fromhex(about["fingerprint"])}
            )
        output = ask(Type.DECODE, {"logits": True}, encode(request))
        if output:
            found.output = decode(output)
    ask(Type.SHUTDOWN)
