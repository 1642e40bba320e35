"""Workers under faults: bytes that are no message, peers that stop, memory and disks that end, sockets that are not
theirs (spec/worker-protocol.md).

Catches a worker that dies without a word, a peer that waits for ever, and a state or file that a fault leaves changed.
The workers are real processes with a tiny model; a peer is a few lines on their protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_native_sessions import NEXT, PROMPT, A, Table, batch, hit
from test_native_shard_protocol import (
    CLEAR,
    DECODE,
    DESCRIBE,
    DETOKENIZE,
    EVICT,
    HEADER,
    HELLO,
    OPEN,
    PATIENCE,
    PIN,
    RELEASE,
    REPLY,
    RESTORE,
    SAVE,
    SESSIONS,
    SHUTDOWN,
    STATISTICS,
    TOKENIZE,
    TRUNCATE,
    Answer,
    Closed,
    Peer,
    Process,
    message,
    start_failing,
    until,
)

from boundary_bundle import encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import (
    Settings,
    WorkerError,
    protocol,
    service_protocol,
    start_workers,
    tiny_models,
)
from boundary_bundle.shards.service import Address, AddressError

pytestmark = pytest.mark.shards

ARGUMENT, BUNDLE, POSITION, LIMIT, FULL, COMPUTE, JSON, FRAME, NO_MEMORY = 1, 5, 7, 8, 9, 10, 21, 22, 23
SMALL = ("--ctx", "256", "--batch", "16", "--ubatch", "8", "--seqs", "2")


@contextlib.contextmanager
def running(build: NativeBuild, model: Path, *options: str, path: Path | None = None) -> Iterator[Process]:
    process = Process(build.worker, model, *SMALL, *options, path=path)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def listening(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """All layers, on a socket."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "states").mkdir()
    with running(patched_build, tiny["tied"], "--state-dir", str(folder / "states"), path=folder / "s") as process:
        yield process


@pytest.fixture(scope="module")
def split(patched_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One with a vocabulary of bytes, whose texts the library splits by regular expressions."""

    def vocabulary(writer: Any) -> None:
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(256 - len(plain))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("deepseek-llm")
        writer.add_token_list(letters + [f"w{i}" for i in range(tiny_models.N_VOCAB - len(letters))])
        writer.add_token_types([1] * tiny_models.N_VOCAB)
        writer.add_token_merges(["a a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(tiny_models.EOS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_write_vocabulary", vocabulary)
        model = tiny_models.write(tmp_path_factory.mktemp("split") / "split.gguf", "untied")
    with running(patched_build, model) as process:
        yield process


def sound(process: Process, peer: Peer | None = None) -> bytes:
    """What a sound request gives: the same before and after every fault."""
    peer = peer or process.peer
    peer.expect(CLEAR)
    return peer.expect(DECODE, {"logits": True}, encode(process.batch([5, 17, 101], 0))).bundle


#
# texts
#


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    """A text whose own object is the first of ``depth`` levels."""
    levels = depth - 1
    if opening == b"[":
        return b'{"x":' + b"[" * levels + b"]" * levels + b"}"
    return b'{"x":' * levels + b"{}" + b"}" * levels


#: What must not count: brackets in strings, however their quotes are escaped, and levels side by side.
SHALLOW = [
    json.dumps({"x": "[" * 200 + '"' + "{" * 200 + "\\"}).encode(),
    rb'{"x\\":"[[\"[[\\\"[[\\\\","y":[]}'.replace(b"[[", b"[" * 100),
    b'{"x":[' + b",".join([b'{"y":[1]}'] * 500) + b"]}",
    nested(64),
    nested(64, b"{"),
]

DEEP = {
    "lists": nested(65),
    "objects": nested(65, b"{"),
    "a million lists": nested(500_000),
    "half a million objects": b'{"x":' * 150_000,
    "lists that do not close": b'{"x":' + b"[" * 1_000_000,
    "behind a string": b'{"x":"\\\\","y":' + b"[" * 100 + b"]" * 100 + b"}",
}


@pytest.mark.parametrize("name", DEEP)
def test_a_text_that_is_nested_too_deep(listening: Process, name: str) -> None:
    """Catches a parser, or a sentence that shows a value, that calls itself once a level until the stack is full: in
    the worker a fault, in Python a RecursionError. Both sides have the same limit."""
    before = sound(listening)
    for type in (HELLO, DESCRIBE, DECODE, STATISTICS, TOKENIZE, DETOKENIZE, RESTORE):
        answer = listening.peer.ask(type, DEEP[name])
        assert answer.code == JSON, answer.text
        assert "more than 64 deep at byte" in answer.text["message"]
    assert sound(listening) == before
    for parse in (protocol.parse_text, service_protocol.parse_text):
        with pytest.raises(protocol.ProtocolError, match="more than 64 deep"):
            parse(DEEP[name])


def test_a_value_that_is_nested_in_the_wrong_place(listening: Process) -> None:
    """Catches a refusal that shows a value by calling itself for each level: here the deepest that may come."""
    for type, key in ((DECODE, b"logits"), (TOKENIZE, b"add_special"), (DETOKENIZE, b"tokens"), (HELLO, b"minors")):
        text = nested(64).replace(b'"x"', b'"' + key + b'"').replace(b"{", b'{"major":1,"text":"",')
        assert listening.peer.ask(type, text).code is not None


@pytest.mark.parametrize("text", SHALLOW)
def test_a_text_that_is_not_nested_too_deep(listening: Process, text: bytes) -> None:
    """Catches a count that takes brackets within strings for levels, or one level less than is allowed."""
    listening.peer.expect(STATISTICS, text)
    assert protocol.parse_text(text) == json.loads(text)


def test_a_text_is_utf_8() -> None:
    """Catches a driver that reads what the worker refuses, and in which brackets are not counted."""
    with pytest.raises(protocol.ProtocolError, match="not JSON"):
        protocol.parse_text(json.dumps({"x": 1}).encode("utf-16"))


MAX_TOKENIZED = 256 << 10
RUNS = {"letters": "a", "digits": "7", "spaces": " ", "signs": "!", "accents": "\u00e9"}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_one_kind_of_characters(split: Process, name: str) -> None:
    """Catches a stack that ends within a text: std::regex calls itself for each character of a run, and that of a main
    thread is full after 26,000. A text one byte longer than is allowed is refused, whatever it holds."""
    before = sound(split)
    text = RUNS[name] * (MAX_TOKENIZED // len(RUNS[name].encode()))
    answer = split.peer.ask(TOKENIZE, {"text": text, "add_special": False})
    if answer.code is None:
        assert len(answer.text["tokens"]) == len(text.encode())
    else:
        assert "the answer would have a text of" in answer.text["message"]
    answer = split.peer.ask(TOKENIZE, {"text": text + "x"})
    assert (answer.code, answer.text["message"]) == (
        LIMIT,
        "a text to tokenize has 262145 bytes, over the limit of 262144",
    )
    assert sound(split) == before


def test_a_long_text_takes_nothing_with_it(split: Process) -> None:
    """Catches a stack that stays with the worker when the text has been split."""
    split.peer.expect(TOKENIZE, {"text": "7" * 100_000})
    before = split.resident()
    for _ in range(3):
        split.peer.expect(TOKENIZE, {"text": "7" * 100_000})
    assert split.resident() - before < 30 << 20


#
# peers that stop
#


def closed(peer: Peer) -> Answer:
    """The last word that a worker says on a connection, which it then closes."""
    answer = peer.receive()
    assert answer.request == 0, answer
    with pytest.raises(Closed):
        peer.receive()
    peer.close()
    return answer


@pytest.fixture(scope="module")
def strict(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """One with little patience, on a socket."""
    path = tmp_path_factory.mktemp("strict") / "s"
    with running(patched_build, tiny["tied"], "--stall", "1", path=path) as process:
        yield process


def test_half_a_message_and_then_nothing(strict: Process) -> None:
    """Catches a reader that waits for the rest of a message for ever: with all connections taken so, nobody else would
    be served."""
    before = sound(strict)
    whole = message(DECODE, {"logits": True}, encode(strict.batch([1], 0)), 7)
    begun = []
    for cut in (1, 31, 32, 33, 60, len(whole) - 1):
        begun.append((cut, strict.connect()))
        begun[-1][1].write(whole[:cut])
    for cut, peer in begun:
        answer = closed(peer)
        assert answer.code == FRAME
        part = f"only {cut} of the {len(whole)} bytes of a message" if cut >= 32 else f"only {cut} of the 32 bytes"
        assert answer.text["message"].startswith(part)
        assert answer.text["message"].endswith("came in 1 seconds")
    assert sound(strict) == before


def test_a_message_that_never_gets_to_its_end(strict: Process) -> None:
    """Catches a limit on the time between two bytes: a byte now and then would hold a connection for days."""
    peer = strict.connect()
    for byte in message(STATISTICS, {"x": "y" * 2000}, b"", 7):
        peer.write(bytes([byte]))
        if select.select([peer.reader], [], [], 0.05)[0]:
            break
    assert closed(peer).code == FRAME
    sound(strict)


def test_half_a_message_on_the_streams(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Catches a worker that stays with a driver that has stopped within a message; it ends and says why."""
    with running(patched_build, tiny["tied"], "--stall", "1") as process:
        process.peer.write(message(STATISTICS, None, b"", 7)[:9])
        assert process.peer.receive().code == FRAME
        assert process.wait() == 3
        said = b"shard_worker: error 22 frame: only 9 of the 32 bytes of a header came in 1 seconds\n"
        assert process.stderr.read() == said


def test_a_reader_that_takes_its_time(strict: Process) -> None:
    """Catches an answer that a few bytes now and then keep under way: everybody waits for it. Slow is allowed, within
    the limit."""
    before = sound(strict)
    slow, quick = strict.connect(), strict.connect()
    slow.send(DETOKENIZE, {"tokens": [100] * 150_000})
    assert select.select([slow.reader], [], [], PATIENCE)[0]  # its turn has come
    for request in range(50, 60):
        quick.send(STATISTICS, request=request)
    taken = bytearray()
    while not select.select([quick.reader], [], [], 0.05)[0]:
        taken += os.read(slow.reader, 512)
        assert len(taken) < 200_000, "nobody else is answered"
    assert [quick.receive().request for _ in range(50, 60)] == list(range(50, 60))
    with pytest.raises(Closed):
        slow._read(1 << 20)
    piece = strict.connect()
    piece.send(DESCRIBE, {"tensors": True})
    head = b"".join(piece._read(1) for _ in range(HEADER.size))
    text = b"".join(piece._read(1) for _ in range(HEADER.unpack(head)[4]))
    assert len(json.loads(text)["tensors"]) > 60
    for peer in (slow, quick, piece):
        peer.close()
    assert sound(strict) == before


def test_a_peer_that_says_nothing(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Catches a connection that is kept for ever for nobody, and one that is closed while its peer waits for an
    answer (this one takes seconds: the square of the text's length)."""
    with running(patched_build, tiny["tied"], "--idle", "1", path=tmp_path / "s") as process:
        answer = closed(process.connect())
        assert (answer.code, answer.text["message"]) == (LIMIT, "nothing came for 1 seconds")
        peer = process.connect(greet=False)
        peer.expect(HELLO, {"major": 1, "minors": [1]})
        assert len(peer.expect(TOKENIZE, {"text": "7" * 131_072}).text["tokens"]) > 131_072
        peer.expect(STATISTICS)
        assert closed(peer).code == LIMIT
        assert process.connect().expect(STATISTICS)
    with running(patched_build, tiny["tied"], "--idle", "1") as process:
        assert process.peer.receive().code == LIMIT
        assert process.wait() == 3
        assert process.stderr.read() == b"shard_worker: error 8 limit: nothing came for 1 seconds\n"


def test_a_hundred_connections_at_once(listening: Process) -> None:
    """Catches threads and descriptors without a limit, and one too many that is closed without a word. Those that are
    served are all answered, and make room when they go."""
    until_alone(listening)
    before = sound(listening)
    peers = [listening.connect(greet=False) for _ in range(100)]
    served, refused = [], []
    for request, peer in enumerate(peers):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.send(HELLO, {"major": 1, "minors": [1]}, request=1000 + request)
    for request, peer in enumerate(peers):
        answer = peer.receive()
        if answer.code is None:
            assert answer.request == 1000 + request
            served.append(peer)
        else:
            told = (answer.request, answer.code, answer.text["message"])
            assert told == (0, LIMIT, "this worker has 64 connections, as many as it takes")
            refused.append(peer)
    assert (len(served), len(refused)) == (63, 37)  # and the one that is there already
    for peer in served:
        peer.expect(STATISTICS)
    for peer in peers:
        peer.close()
    until_alone(listening)
    assert sound(listening, listening.connect()) == before


def until_alone(process: Process) -> None:
    """Until the worker has closed what others have left: a socket that listens and a connection are its only two."""

    def alone() -> bool:
        links = (Path(f"/proc/{process.pid}/fd") / name for name in os.listdir(f"/proc/{process.pid}/fd"))
        with contextlib.suppress(FileNotFoundError):
            return sum(os.readlink(link).startswith("socket:") for link in links) == 2
        return False

    until(alone, "the end of other connections")


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_descriptors_run_out(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Catches an accept that fails again and again as fast as it can, a peer that waits for a connection that nobody
    takes, and a worker that stays deaf when there are descriptors again."""
    with running(patched_build, tiny["tied"], path=tmp_path / "s") as process:
        before = sound(process)
        used = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 2, 4096))
        peers = [process.connect(greet=False) for _ in range(6)]
        answers = []
        for peer in peers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.send(HELLO, {"major": 1, "minors": [1]})
            answers.append(peer.receive())
        assert [answer.code for answer in answers] == [None, None, *[LIMIT] * 4]
        assert answers[-1].text["message"] == "this worker has no descriptor left for a connection"
        began = cpu_seconds(process.pid)
        time.sleep(1)
        assert cpu_seconds(process.pid) - began < 0.5
        peers[0].expect(STATISTICS)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (4096, 4096))
        assert sound(process, process.connect()) == before


#
# memory
#


def address_space(pid: int) -> int:
    return int(re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10  # type: ignore[index]


def ended_with_a_reason(process: Process) -> bool:
    """Whether the worker is gone; then it has said why, and by one of the statuses that are promised."""
    if process.popen.poll() is None:
        return False
    said = process.stderr.read().decode()
    if process.popen.returncode == 3:
        assert "shard_worker: error 23 no_memory: " in said
    else:
        assert process.popen.returncode == -signal.SIGABRT, (process.popen.returncode, said)
        assert "shard_worker: stopped by a fault: " in said
    return True


@pytest.mark.parametrize("spare", [0, 3, 9, 40])
def test_memory_runs_out_for_requests(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, spare: int
) -> None:
    """Catches an allocation that fails and ends the worker without a word, a peer that waits for an answer then, and a
    worker that ends although there are megabytes for what is small: a destructor that finds no memory does that.
    When there is memory again, what the worker still holds is as it was."""
    with running(patched_build, tiny["tied"], "--state-dir", str(tmp_path), path=tmp_path / "s") as process:
        before = sound(process)
        answers = []
        resource.prlimit(
            process.pid, resource.RLIMIT_AS, (address_space(process.pid) + (spare << 20), resource.RLIM_INFINITY)
        )
        large = bytes(32 << 20)
        asked: list[tuple[int, object, bytes]] = [
            (TOKENIZE, {"text": "7" * 20_000}, b""),
            (DETOKENIZE, {"tokens": [100] * 150_000}, b""),
            (STATISTICS, b'{"x":[' + b"[]," * 300_000 + b"[]]}", b""),
            (DECODE, {"logits": True}, encode(process.batch([5] * 16, 0, select="all"))),
            (SESSIONS, {}, b""),
            (DECODE, {}, large),
        ]
        for type, text, bundle in asked:
            # the first few on what is there already, the last on connections of their own
            for peer in (process.peer, None):
                with contextlib.suppress(Closed, OSError):
                    own = peer or process.connect(greet=False)
                    if peer is None:
                        own.send(HELLO, {"major": 1, "minors": [1]})
                        answers.append(own.receive().code)
                        if answers[-1] is not None:
                            own.close()
                            continue
                    own.send(type, text, bundle)
                    answers.append(own.receive().code)
                    if peer is None:
                        own.close()
        if ended_with_a_reason(process):
            assert spare < 20, answers
            return
        assert set(answers) <= {None, BUNDLE, LIMIT, COMPUTE, FULL, POSITION, NO_MEMORY}
        if spare < 9:
            assert NO_MEMORY in answers
        resource.prlimit(process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert sound(process, process.connect()) == before


def test_memory_runs_out_while_loading(patched_build: NativeBuild, tiny: dict[str, Path]) -> None:
    """Catches a start without memory that hangs, dies by a signal or says nothing. Below what the system's loader
    takes the program does not run at all."""
    command = [str(patched_build.worker), "--model", str(tiny["tied"]), *SMALL]
    results = set()
    for megabytes in range(8, 160, 8):
        limit = megabytes << 20
        done = subprocess.run(
            ["sh", "-c", f'ulimit -v {limit >> 10} && exec "$@"', "sh", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        said = done.stderr.decode()
        if done.returncode == 127 or "error while loading shared libraries" in said:
            continue
        results.add(done.returncode)
        if done.returncode == 0:
            assert said == "shard_worker: ready\n"
        else:
            assert (done.returncode, said.count("\n")) == (2, 1), said
            assert said.startswith("shard_worker: error "), said
    assert results == {0, 2}


def test_a_length_is_looked_at_before_memory_is_taken(listening: Process) -> None:
    """Catches an allocation of what a header declares: over a limit it is refused, else memory follows the bytes."""
    before = sound(listening)
    space = address_space(listening.pid)
    for lengths in ({"text_length": (1 << 20) + 1}, {"bundle_length": (1 << 30) + 1}, {"bundle_length": 1 << 63}):
        peer = listening.connect()
        peer.write(message(DECODE, None, b"", 1, **lengths))
        answer = closed(peer)
        assert (answer.code, "over the limit of" in answer.text["message"]) == (FRAME, True)
    peers = [listening.connect() for _ in range(20)]
    for peer in peers:
        peer.write(message(DECODE, None, b"x" * 1000, 1, bundle_length=1 << 30))
    assert sound(listening) == before
    assert address_space(listening.pid) - space < 20 * (80 << 20) + (64 << 20)  # threads, and an arena for each
    assert listening.resident() < 200 << 20
    for peer in peers:
        peer.close()
    # what a bundle declares of itself
    for lengths in (b"\xff" * 64, b"\xff" * 8):
        bundle = bytearray(encode(listening.batch([5, 17, 101], 0)))
        bundle[-len(lengths) - 100 : -100] = lengths
        assert listening.peer.ask(DECODE, None, bytes(bundle)).code == BUNDLE
    assert sound(listening) == before


#
# files and sockets
#


@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_disk_that_is_full(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, how: str) -> None:
    """Catches a state that is written over the older one, half a file that stays, and a worker that ends."""
    if how == "disk":
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip("a small file system cannot be mounted here")
    try:
        with running(patched_build, tiny["tied"], "--state-dir", str(tmp_path)) as process:
            table = Table(process)
            table.open(A)
            table.logits((A, 1, 0, PROMPT))
            hit(table.ask(SAVE, A, 1, file="x"))
            old = (tmp_path / "x").read_bytes()
            table.logits((A, 1, len(PROMPT), NEXT))
            if how == "disk":
                with contextlib.suppress(OSError), open(tmp_path / "filler", "wb", buffering=0) as filler:
                    while filler.write(bytes(4096)):
                        pass
            else:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (len(old) // 2, resource.RLIM_INFINITY))
            for name in ("x", "y"):
                answer = table.ask(SAVE, A, 1, file=name)
                assert answer.code == ARGUMENT
                assert ("No space left" if how == "disk" else "File too large") in answer.text["message"]
            assert sorted(path.name for path in tmp_path.iterdir() if path.name != "filler") == ["x"]
            assert (tmp_path / "x").read_bytes() == old
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            (tmp_path / "filler").unlink(missing_ok=True)
            hit(table.ask(SAVE, A, 1, file="x"))
            assert (tmp_path / "x").read_bytes() != old
    finally:
        if how == "disk":
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_nothing_is_written_outside_the_state_folder(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Catches a name that leads out of the folder, by itself or by a link that lies there."""
    states, outside = tmp_path / "states", tmp_path / "outside"
    states.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("precious")
    (states / "file").symlink_to(outside / "precious")
    (states / "folder").symlink_to(outside)
    with running(patched_build, tiny["tied"], "--state-dir", str(states)) as process:
        table = Table(process)
        table.open(A)
        table.logits((A, 1, 0, PROMPT))
        names = ["../x", "/tmp/x", "folder/x", ".", "..", ".x", "", "x\0y", "x\n", "x" * 201, "\u00e9", "~", "a b"]
        for type in (SAVE, RESTORE):
            for name in names:
                assert table.ask(type, A, 1, file=name).code == ARGUMENT
        assert "symbolic link" in table.ask(RESTORE, A, 1, file="file").text["message"]
        hit(table.ask(SAVE, A, 1, file="file"))
        hit(table.ask(SAVE, A, 1, file="folder"))
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "precious"
    assert sorted(path.name for path in states.iterdir()) == ["file", "folder"]
    assert not any(path.is_symlink() for path in states.iterdir())


@pytest.mark.parametrize("how", ["group", "others", "sticky", "link", "owner"])
def test_a_folder_in_which_others_can_write(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, how: str
) -> None:
    """Catches a socket in a place where another user can put his own instead, or move this one away."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod({"group": 0o770, "others": 0o702, "sticky": 0o1777}.get(how, 0o700))
    path = folder / "s"
    if how == "link":
        folder.chmod(0o777)
        (tmp_path / "link").symlink_to(folder)
        path = tmp_path / "link" / "s"
    if how == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    refused = start_failing(patched_build.worker, "--model", str(tiny["tied"]), "--socket", str(path))
    assert "error 1 argument: the folder of the socket" in refused
    assert "nobody else may write there" in refused
    with pytest.raises(AddressError, match="nobody else may write there"):
        Address(path)  # that of the service
    assert not list(folder.iterdir())


def test_workers_that_want_the_same_socket(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Catches two workers that both replace a dead one's socket, and one that is stolen from a worker because that is
    stopped and does not answer."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    command = [str(patched_build.worker), "--model", str(tiny["tied"]), *SMALL, "--socket", str(path)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(5)]
    try:
        said = {process.pid: process.stderr.readline() for process in started if process.stderr}
        ready = [process for process in started if said[process.pid] == b"shard_worker: ready\n"]
        assert len(ready) == 1, said
        assert all(b"another process listens on" in said[process.pid] for process in started if process not in ready)
        ready[0].send_signal(signal.SIGSTOP)
        assert "another process listens on" in start_failing(command[0], *command[1:])
        ready[0].send_signal(signal.SIGCONT)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(path))
            peer.sendall(message(HELLO, {"major": 1, "minors": [1]}))
            assert peer.recv(4) == b"BBWP"
    finally:
        for process in started:
            process.kill()
            process.communicate()


#
# every message, cut and in pieces
#


def flow(process: Process) -> list[tuple[int, bytes]]:
    """A message of every type, in an order in which all of them are answered; the last one ends the worker."""
    name = {"session": A.hex(), "epoch": 1}
    recipe = {"recipe": process.facts["recipe"]["shared"]["fingerprint"]}
    rows = batch(process, (A, 1, 0, PROMPT))
    texts: list[tuple[int, object, bytes]] = [
        (HELLO, {"major": 1, "minors": [0, 1]}, b""),
        (DESCRIBE, {"tensors": True}, b""),
        (STATISTICS, {}, b""),
        (TOKENIZE, {"text": "split this"}, b""),
        (DETOKENIZE, {"tokens": [5, 6]}, b""),
        (OPEN, {**name, **recipe, "position": 0}, b""),
        (DECODE, {"logits": True}, rows),
        (SAVE, {**name, "file": "x"}, b""),
        (PIN, {**name, "pinned": True}, b""),
        (PIN, {**name, "pinned": False}, b""),
        (TRUNCATE, {**name, "position": 3}, b""),
        (SESSIONS, {}, b""),
        (EVICT, {"session": A.hex()}, b""),
        (RESTORE, {**name, **recipe, "epoch": 2, "file": "x"}, b""),
        (RELEASE, {**name, "epoch": 2}, b""),
        (CLEAR, {}, b""),
        (SHUTDOWN, {}, b""),
    ]
    return [(type, message(type, text, bundle, number)) for number, (type, text, bundle) in enumerate(texts)]


def test_every_message_in_pieces_of_one_byte(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Catches a reader that takes what one read gives for a whole header, text or bundle, of any type."""
    with running(patched_build, tiny["tied"], "--state-dir", str(tmp_path), path=tmp_path / "s") as process:
        peer = process.connect(greet=False)
        for number, (type, data) in enumerate(flow(process)):
            for byte in data:
                os.write(peer.writer, bytes([byte]))
            answer = peer.receive()
            assert (answer.type, answer.request) == (type | REPLY, number), answer.text
        assert process.wait() == 0


def test_a_socket_that_is_cut_within_every_message(listening: Process) -> None:
    """Catches a message that is taken for whole, or waited for, when the connection ends at any of its bytes; and an
    answer that is sent to nobody."""
    before = sound(listening)

    def cut_off(sent: Sequence[bytes], taken: Sequence[int]) -> None:
        """One connection each, some at a time: what is sent on it, and how many bytes of the answer are taken."""
        for first in range(0, len(sent), 20):
            peers = [listening.connect(greet=False) for _ in sent[first : first + 20]]
            for peer, data in zip(peers, sent[first:], strict=False):
                peer.write(message(HELLO, {"major": 1, "minors": [0, 1]}) + data)
            for peer, count in zip(peers, taken[first:], strict=False):
                assert peer.receive().code is None
                peer._read(count)
                peer.close()

    for type, data in flow(listening):
        cut_off([data[:cut] for cut in range(len(data))], [0] * len(data))
        assert sound(listening) == before, type
        # the other way: the answer of those that leave nothing behind
        if type in (HELLO, DESCRIBE, STATISTICS, TOKENIZE, DETOKENIZE, SESSIONS):
            size = HEADER.size + len(json.dumps(listening.peer.expect(type, data[HEADER.size :]).text)) // 2
            cuts = range(0, size, 5 if size < 300 else 100)
            cut_off([data] * len(cuts), cuts)
            assert sound(listening) == before, type
    assert listening.popen.poll() is None


def drawn_frame(random: Random) -> tuple[bytes, bool]:
    """A message that cannot be done, and whether its header is sound."""
    kinds = [HELLO, DESCRIBE, DECODE, STATISTICS, CLEAR, SHUTDOWN, TOKENIZE, DETOKENIZE, *range(OPEN, RESTORE + 1)]
    type = random.choice(kinds)
    noise = random.randbytes(random.randrange(1, 60))
    draw = random.randrange(24)  # most of them with a sound header: the others cost a connection each
    if draw == 0:
        return noise.ljust(HEADER.size, b"\x01")[: HEADER.size], False
    if draw == 1:
        field = random.choice(["reserved", "reserved2"])
        return message(type, {}, b"", 5, **{field: 1 << random.randrange(16)}), False
    if draw == 2:
        over = {"text_length": random.randrange((1 << 20) + 1, 1 << 32)}
        if random.random() < 0.5:
            over = {"bundle_length": random.randrange((1 << 30) + 1, 1 << 64)}
        return message(type, {}, b"", 5, **over), False
    draw %= 4
    if draw == 0:
        return message(random.choice([0, *range(17, 0x10000)]), {}, b"", 5), True
    if draw == 1:
        return message(type, b"\xff" + noise, b"", 5), True
    if draw == 2:
        return message(type, random.choice([b"[]", b"3", b'"x"', b"null", b"{", b'{"x":}', b"[" * 200]), b"", 5), True
    if random.random() < 0.5:
        return message(DECODE, {}, noise, 5), True
    wrong = random.choice([None, [], {}, "x", -1, 1.5, 1 << 70, True])
    keys = {"session": wrong, "epoch": wrong, "recipe": wrong, "tokens": "x", "text": 3, "minors": 3, "logits": "x"}
    return message(random.choice([HELLO, DECODE, TOKENIZE, DETOKENIZE, OPEN, TRUNCATE, SAVE]), keys, b"", 5), True


def test_ten_thousand_malformed_frames(listening: Process) -> None:
    """Catches a frame that is not answered, one that ends the worker or changes what it computes, and memory that
    stays with it."""
    before, random = sound(listening), Random(20240607)
    peer, waiting = listening.connect(), 0
    for number in range(10_000):
        frame, whole = drawn_frame(random)
        peer.write(frame)
        waiting += 1
        if whole and waiting < 30:
            continue
        for left in reversed(range(waiting)):
            answer = peer.receive()
            assert answer.code is not None, frame
            assert answer.text["message"], frame
            assert answer.request == (5 if whole or left else 0), frame
        waiting = 0
        if not whole:
            assert answer.code == FRAME, frame
            peer.close()
            peer = listening.connect()
        if number < 1000:
            held = listening.resident()
    peer.close()
    assert listening.resident() - held < 50 << 20
    assert sound(listening) == before


#
# what the driver sees
#


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_worker_that_is_killed_or_stopped(
    patched_build: NativeBuild, tiny: dict[str, Path], number: signal.Signals
) -> None:
    """Catches an error that lacks the shard, the operation or the cause, and a wait without an end."""
    settings = Settings(threads=1, ctx=256, batch=16, ubatch=8)
    (worker,) = start_workers(patched_build.worker, tiny["tied"], [(2, 5)], settings, timeout=1.0)
    try:
        os.kill(worker.pid, number)
        if number == signal.SIGSTOP:
            until(lambda: " T " in Path(f"/proc/{worker.pid}/stat").read_text(), "the stop")
        with pytest.raises(WorkerError) as caught:
            worker.statistics()
        cause = f"worker process {worker.pid} was ended by signal {number.value} ({number.name})"
        if number == signal.SIGSTOP:
            cause = f"no answer in 1 seconds: worker process {worker.pid} is stopped"
        assert str(caught.value) == f"shard [2,5): statistics: {cause}"
    finally:
        worker.close()
