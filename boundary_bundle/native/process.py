"""Running other programs: one place that knows about logs, environments and locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TAIL_LINES = 30

# Variables that would let something outside the pinned sources into a build, or let git look at a
# repository that happens to enclose the cache.
_SCRUBBED = frozenset(
    [
        "CFLAGS",
        "CXXFLAGS",
        "CPPFLAGS",
        "LDFLAGS",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "LD_RUN_PATH",
        "DESTDIR",
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "GNUMAKEFLAGS",
        "VERBOSE",
    ]
)
_SCRUBBED_PREFIXES = ("CMAKE_", "GGML_", "LLAMA_")
# Those of git's variables that say which repository is meant (git rev-parse --local-env-vars lists them).
_GIT_REPOSITORY = frozenset(
    [
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_CEILING_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_CONFIG",
        "GIT_CONFIG_COUNT",
        "GIT_CONFIG_PARAMETERS",
        "GIT_DIR",
        "GIT_DISCOVERY_ACROSS_FILESYSTEM",
        "GIT_GRAFT_FILE",
        "GIT_IMPLICIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_INTERNAL_SUPER_PREFIX",
        "GIT_NAMESPACE",
        "GIT_NO_REPLACE_OBJECTS",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_REPLACE_REF_BASE",
        "GIT_SHALLOW_FILE",
        "GIT_WORK_TREE",
    ]
)


class NativeError(Exception):
    """Something about getting, patching or building the native side; the text is for the user."""


class CommandFailed(NativeError):
    """A program ended with a status other than 0."""

    def __init__(self, what: str, command: Sequence[str], status: int, tail: Sequence[str], log: Path | None):
        self.command = list(command)
        self.status = status
        self.tail = list(tail)
        self.log = log
        lines = [f"{what} failed: {os.path.basename(command[0])} ended with status {status}"]
        if tail:
            lines.append(f"last {len(tail)} lines:")
            lines.extend(f"    {line}" for line in tail)
        if log is not None:
            lines.append(f"whole log: {log}")
        super().__init__("\n".join(lines))


def build_environment(**extra: str) -> dict[str, str]:
    """The caller's environment without what changes a build silently, plus ``extra``."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _SCRUBBED and name not in _GIT_REPOSITORY and not name.startswith(_SCRUBBED_PREFIXES)
    }
    env["LC_ALL"] = "C"
    env.update(extra)
    return env


def git_environment(below: Path, *, user_configuration: bool) -> dict[str, str]:
    """An environment in which git, run in ``below`` or under it, sees no repository above ``below``."""
    env = build_environment(GIT_CEILING_DIRECTORIES=str(below.resolve().parent), GIT_TERMINAL_PROMPT="0")
    if not user_configuration:
        # A user's apply.whitespace or core.autocrlf must not change what a patch makes.
        env["GIT_CONFIG_GLOBAL"] = os.devnull
        env["GIT_CONFIG_NOSYSTEM"] = "1"
    return env


class Runner:
    """Runs programs and remembers which. ``commands`` is what tests look at."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def capture(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, str]:
        """Run to the end; return the status and everything it wrote."""
        self.commands.append(list(command))
        try:
            done = subprocess.run(
                list(command),
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            return 124, f"{command[0]} took longer than {timeout} s"
        except OSError as error:
            return 127, str(error)
        return done.returncode, done.stdout

    def stream(
        self,
        what: str,
        command: Sequence[str],
        *,
        log: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        lock: Lock | None = None,
    ) -> None:
        """Run with every line appended to ``log`` and given to ``on_line``.

        The child inherits the lock: if this process is killed, the next one waits until what it had
        started has ended too, and two compilers never write the same files.

        :raises CommandFailed: with the last lines and the path of the log.
        """
        self.commands.append(list(command))
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as sink:
            sink.write("$ " + " ".join(command) + "\n")
            sink.flush()
            try:
                child = subprocess.Popen(
                    list(command),
                    cwd=cwd,
                    env=None if env is None else dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=() if lock is None else (lock.fileno(),),
                    # cmake starts ninja and make starts the compiler; stop() must reach them all.
                    start_new_session=True,
                    text=True,
                    errors="replace",
                )
            except OSError as error:
                raise NativeError(f"{what} failed: {command[0]}: {error.strerror}") from error
            assert child.stdout is not None
            try:
                for raw in child.stdout:
                    line = raw.rstrip("\n")
                    sink.write(line + "\n")
                    sink.flush()
                    tail.append(line)
                    if on_line is not None:
                        on_line(line)
                status = child.wait()
            finally:
                stop(child)
                child.stdout.close()
        if status != 0:
            raise CommandFailed(what, command, status, list(tail), log)


def stop(child: subprocess.Popen[str]) -> None:
    """End a child that is still running, and what it started in its session: ask, then insist."""
    if child.poll() is not None:
        return
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
            return


class Lock:
    """An advisory lock on a file (flock). The kernel lets go of it when its last holder ends, however that ends."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = -1

    def fileno(self) -> int:
        return self._fd

    @contextlib.contextmanager
    def held(self, what: str, note: Callable[[str], None]) -> Iterator[Lock]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise NativeError(
                f"the lock {self.path} cannot be used: {error.strerror}; set BOUNDARY_BUNDLE_CACHE to a folder that "
                "can be written"
            ) from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(fd, 64).decode("ascii", "replace").strip() or "unknown"
                note(f"waiting for another process (started by pid {holder}) to finish: {what}")
                start = time.monotonic()
                fcntl.flock(fd, fcntl.LOCK_EX)
                note(f"waited {time.monotonic() - start:.0f} s for the other process")
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            self._fd = fd
            # Not unlocked by hand: a child that outlived us may still hold it, and then rightly so.
            yield self
        finally:
            self._fd = -1
            os.close(fd)


def python_command(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
