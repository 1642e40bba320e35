"""A testee as a process: lines of JSON to it and from it (spec/testee-protocol.md).

Whatever it does instead of answering is told apart: :class:`Trouble` says which kind
it was. The process leads a session of its own, so that whatever it started ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

#: An answer may be so much longer than its request before it counts as a flood.
_ANSWER_BYTES: Final = 16 << 20
#: What a testee may write to standard error between two answers.
_STDERR_BYTES: Final = 64 << 20
_STDERR_KEPT: Final = 8192
_CHUNK: Final = 1 << 20

#: kind -> (result of the case, what happened)
TROUBLES: Final = {
    "start": ("error", "does not start"),
    "failed": ("error", "says that it failed"),
    "garbage": ("error", "wrote a line that is not a JSON object"),
    "order": ("error", "answered out of order"),
    "wrong_stream": ("error", "answered on standard error instead of standard output"),
    "malformed": ("error", "gave an answer that the protocol does not know"),
    "flood": ("error", "flooded its output"),
    "half_line": ("hang", "wrote half a line and no more"),
    "half_line_end": ("crash", "ended in the middle of a line"),
    "exit": ("crash", "ended without an answer"),
    "signal": ("crash", "was killed by a signal"),
    "closed": ("crash", "closed its output and went on running"),
    "hang": ("hang", "gave no answer within the time limit"),
}


class Trouble(Exception):
    """A testee did something else than answer; ``kind`` is a key of :data:`TROUBLES`."""

    def __init__(self, kind: str, detail: str = "", stderr: str = "") -> None:
        super().__init__(TROUBLES[kind][1] + (f": {detail}" if detail else ""))
        self.kind = kind
        self.result = TROUBLES[kind][0]
        #: The end of what it wrote to standard error.
        self.stderr = stderr


def shown(raw: bytes, limit: int = 200) -> str:
    """Bytes from a testee, fit for any terminal."""
    text = raw[:limit].decode("utf-8", "replace")
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return printable + ("..." if len(raw) > limit else "")


def _hint(program: str) -> str:
    """What may be meant by a program that cannot be started."""
    if not os.path.isfile(program):
        return ""
    if os.path.basename(program) == program:
        return f" on the path; ./{program} is here"
    return "" if os.access(program, os.X_OK) else " (it is not executable)"


class Testee:
    """A running testee. ``time_limit`` is in seconds, for one answer."""

    __test__ = False  # not a class of tests

    def __init__(self, command: Sequence[str], time_limit: float) -> None:
        self.command = list(command)
        self.time_limit = time_limit
        self._out = bytearray()
        self._in = bytearray()
        self._searched = 0
        self._stderr = b""
        self._stderr_since = 0
        self._sizes: list[int] = []
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Trouble("start", f"{self.command[0]}: {reason}{_hint(self.command[0])}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._selector = selectors.DefaultSelector()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            os.set_blocking(stream.fileno(), False)
            with contextlib.suppress(AttributeError, OSError):  # larger pipes where there are some
                fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _CHUNK)
        self._stdin = self.process.stdin.fileno()
        self._stdout = self.process.stdout.fileno()
        self._stderr_fd = self.process.stderr.fileno()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._selector.register(self._stderr_fd, selectors.EVENT_READ)
        self._writing = False

    def __enter__(self) -> Testee:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def send(self, lines: bytes, count: int = 1) -> None:
        """Hand over ``count`` requests; they leave while answers are waited for."""
        self._in += lines
        # What an answer may have depends on its request; of several in one go any may be the long one.
        self._sizes += [len(lines)] * count
        self._flush()

    def _flush(self) -> None:
        while self._in:
            try:
                sent = os.write(self._stdin, memoryview(self._in)[:_CHUNK])
            except BlockingIOError:
                break
            except OSError:  # it reads no more; what it still has to say is read first
                self._in.clear()
                break
            del self._in[:sent]
        if bool(self._in) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._selector.register(self._stdin, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(self._stdin)

    @property
    def backlog(self) -> int:
        """Bytes of requests that it has not taken."""
        return len(self._in)

    def receive(self, seq: int) -> dict[str, Any]:
        """The next answer, which must be that to ``seq``. Raises Trouble."""
        line = self._line(seq)
        self._stderr_since = 0
        size = self._sizes.pop(0) if self._sizes else 0
        if len(line) > _ANSWER_BYTES + 4 * size:
            raise self._trouble("flood", f"an answer of {len(line):,} bytes")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise self._trouble("garbage", shown(line)) from None
        if not isinstance(answer, dict):
            raise self._trouble("garbage", shown(line))
        found = answer.get("seq")
        if type(found) is not int:
            raise self._trouble("malformed", f"no sequence number in {shown(line)}")
        if found != seq:
            self._read_stderr()
            if self._answered_aside(seq):
                raise self._trouble("wrong_stream")
            raise self._trouble("order", f"{found} when {seq} was next")
        return answer

    def _line(self, seq: int) -> bytes:
        deadline = time.monotonic() + self.time_limit
        while True:
            end = self._out.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._out[:end])
                del self._out[: end + 1]
                self._searched = 0
                return line
            self._searched = len(self._out)
            if self._searched > _ANSWER_BYTES + 4 * (self._sizes[0] if self._sizes else 0):
                raise self._trouble("flood", f"{self._searched:,} bytes without the end of a line")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._silent(seq)
            for key, _ in self._selector.select(left):
                if key.fd == self._stdout:
                    self._read_answer(seq)
                elif key.fd == self._stderr_fd:
                    self._read_stderr()
                else:
                    self._flush()

    def _read_answer(self, seq: int) -> None:
        try:
            chunk = os.read(self._stdout, _CHUNK)
        except BlockingIOError:
            return
        if chunk:
            self._out += chunk
            return
        # End of file. Why it ended is known when it has.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(min(1.0, self.time_limit))
        self._read_stderr()
        code = self.process.poll()
        if code is None:
            raise self._trouble("closed")
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
            raise self._trouble("signal", name)
        if self._out:
            raise self._trouble("half_line_end", shown(bytes(self._out[:300])))
        if self._answered_aside(seq):
            raise self._trouble("wrong_stream")
        raise self._trouble("exit", f"with status {code}")

    def _read_stderr(self) -> None:
        while True:
            try:
                chunk = os.read(self._stderr_fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._stderr_fd)
                return
            self._stderr = (self._stderr + chunk)[-_STDERR_KEPT:]
            self._stderr_since += len(chunk)
            if self._stderr_since > _STDERR_BYTES:
                raise self._trouble("flood", f"more than {_STDERR_BYTES >> 20} MB on standard error")
            if len(chunk) < _CHUNK:
                return

    def _answered_aside(self, seq: int) -> bool:
        for line in self._stderr.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
                if isinstance(answer, dict) and answer.get("seq") == seq:
                    return True
        return False

    def _silent(self, seq: int) -> Trouble:
        if self._out:
            return self._trouble("half_line", shown(bytes(self._out[:300])))
        if self._answered_aside(seq):
            return self._trouble("wrong_stream")
        return self._trouble("hang", f"{self.time_limit:g} s")

    def _trouble(self, kind: str, detail: str = "") -> Trouble:
        lines = self._stderr[-2000:].splitlines()
        return Trouble(kind, detail, "\n".join(shown(line, 2000) for line in lines))

    def stop(self, seq: int) -> None:
        """Ask it to end, and see to it that it has. Raises Trouble when it had to be killed."""
        try:
            self.send(json.dumps({"seq": seq, "cmd": "stop"}).encode("ascii") + b"\n")
            self.receive(seq)
            try:
                self.process.wait(self.time_limit)
            except subprocess.TimeoutExpired:
                raise self._trouble("hang", "it goes on running after stop") from None
        finally:
            self.close()

    def close(self) -> None:
        """End it and everything it started, at once."""
        # What the testee started is in its process group, whether the testee itself still lives or not.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(ValueError, KeyError, OSError):
            self._selector.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
