"""``boundary-bundle serve``: keep a split model up for many clients on a Unix socket."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import select
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

from ..shards import SessionPipeline, Settings, Worker, WorkerError, local_workers
from ..shards import read_model_file as read_model
from ..shards.service import Address, AddressError, Limits, Service
from ..shards.worker import LocalWorker, close_workers
from . import common
from .common import CommandError, shown

_DEFAULTS = Limits()
_SEQS = 4
#: Milliseconds after which what is to end is told so again.
_AGAIN = 50
#: glibc's number for the most heaps that threads share.
_M_ARENA_MAX = -8


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="keep a split model up for many clients",
        description="Split a model at the given layers over as many processes, and keep them up for clients on a Unix "
        "socket. Every client has sessions, of which the shards hold some; what they had to give up, or lost with a "
        "process, is computed again. Ctrl-C or SIGTERM end it.",
    )
    parser.add_argument("--model", type=common.file_name, required=True, metavar="FILE", help="a GGUF file")
    common.add_cuts(parser)
    parser.add_argument(
        "--socket", type=common.file_name, metavar="PATH", help="where to listen (serve.sock in a private folder)"
    )
    parser.add_argument(
        "--when-full",
        choices=("evict", "wait", "refuse"),
        default="evict",
        help="when the shards have no room for a session: give up the state of the least recently used (evict), wait "
        "for room, or refuse",
    )
    parser.add_argument(
        "--wait",
        type=common.seconds,
        default=_DEFAULTS.wait,
        metavar="S",
        help=f"with --when-full wait: for so many seconds at most ({_DEFAULTS.wait:g})",
    )
    parser.add_argument(
        "--grace",
        type=common.seconds,
        default=_DEFAULTS.grace,
        metavar="S",
        help=f"keep a session for so many seconds after its last client has gone ({_DEFAULTS.grace:g})",
    )
    parser.add_argument(
        "--idle",
        type=common.seconds,
        default=_DEFAULTS.idle,
        metavar="S",
        help=f"close a connection that says nothing for so many seconds ({_DEFAULTS.idle:g})",
    )
    parser.add_argument(
        "--state-dir", type=common.file_name, metavar="DIR", help="a folder for saved sessions; absent: none are saved"
    )
    defaults = Settings(threads=common.default_threads(), ctx=4096, seqs=_SEQS)
    common.add_settings(parser, defaults)
    parser.add_argument(
        "--seqs",
        type=common.number(1, 64),
        default=_SEQS,
        metavar="N",
        help=f"sessions that the shards hold at once; they share the context ({_SEQS})",
    )
    parser.set_defaults(function=serve)


class _Ending:
    """Ctrl-C, SIGTERM, a terminal that is closed, while the work is done in another thread.

    An exception out of a signal handler would come between any two steps: a socket that is bound and not yet known, a
    message that is half taken. So the handlers only note it, and this thread, which does nothing else, says it to the
    work by :meth:`wait`. The byte that wakes it is written where the signal comes in, not by the interpreter, which
    would not look before a call that blocks has ended.
    """

    def __init__(self) -> None:
        self.asked = False
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def wait(self, work: Future[None], end: Callable[[], None]) -> None:
        """Until ``work`` is done. ``end`` is called when it is to end, and again until it has. Raises what it did."""

        def wake(_: object) -> None:
            with contextlib.suppress(BlockingIOError):  # full: it is awake
                self._wake.send(b"x")

        work.add_done_callback(wake)
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while not work.done():
            poll.poll(_AGAIN if self.asked else None)
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            if self.asked:
                end()
        work.result()

    def __enter__(self) -> _Ending:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        self._wake_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wake_before)
        for number, handler in self._before.items():
            # Who asked once and asks again would otherwise break off what is left of the way out.
            signal.signal(number, signal.SIG_IGN if self.asked else handler)
        self._wake.close()
        self._woken.close()


def _one_heap() -> None:
    """glibc gives threads heaps of their own, up to eight a processor, and each keeps what the longest message of its
    threads took. Python's threads take turns: more heaps gain them nothing."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def serve(options: argparse.Namespace) -> int:
    """The command. Returns when it is told to end."""
    _one_heap()
    model = read_model(options.model)
    plan = common.plan_of(options, model)
    settings = replace(common.settings_of(options), seqs=options.seqs)
    if settings.ctx < settings.seqs:
        raise CommandError(f"a context of {settings.ctx} is too small for {settings.seqs} sessions")
    if options.state_dir is not None and not options.state_dir.is_dir():
        raise CommandError(f"--state-dir: there is no folder {shown(options.state_dir)}")
    limits = Limits(grace=options.grace, wait=options.wait, idle=options.idle)
    program = common.worker_program(options)
    begin = local_workers(program, model.path, settings, state_dir=options.state_dir, timeout=options.timeout)
    started: list[Worker] = []
    service: Service | None = None

    def start(layers: tuple[int, int]) -> Worker:
        if ending.asked:
            raise WorkerError(0, "lost", "the service is about to end", layers, "start")
        worker = begin(layers)
        # Those that have ended need no end.
        started[:] = [one for one in started if not isinstance(one, LocalWorker) or one.alive] + [worker]
        return worker

    def work(address: Address) -> None:
        nonlocal service
        with SessionPipeline(
            start,
            plan,
            when_full="evict" if options.when_full == "evict" else "refuse",
            state_dir=options.state_dir,
        ) as pipeline:
            try:
                service = Service(pipeline, when_full=options.when_full, limits=limits, log=_say)
                ranges = " ".join(f"[{start},{end})" for start, end in plan)
                _say(f"serving {shown(model.path)} {ranges} on {shown(address.path)}, {settings.seqs} sessions at once")
                if not ending.asked:
                    service.run(address.socket)
            finally:
                # A step that is under way holds the pipeline; without its workers it ends.
                close_workers(list(started))

    def end() -> None:
        if service is not None:
            service.stop()
        else:
            close_workers(list(started))

    with _Ending() as ending, contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(Address(options.socket))
        except AddressError as error:
            raise CommandError(str(error)) from None
        # Whatever state the pipeline is in when this ends, no process is left.
        stack.callback(lambda: close_workers(started))
        executor = stack.enter_context(ThreadPoolExecutor(1, "serve"))
        try:
            ending.wait(executor.submit(work, address), end)
        except WorkerError:
            # Of a worker that was ended before it was ready.
            if not ending.asked or service is not None:
                raise
        if service is None:
            raise KeyboardInterrupt
    _say("ended")
    return 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
