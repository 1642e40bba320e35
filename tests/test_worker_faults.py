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
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_native_shard_protocol import (
    CLEAR,
    DECODE,
    DESCRIBE,
    DETOKENIZE,
    HEADER,
    HELLO,
    PATIENCE,
    RESTORE,
    SESSIONS,
    STATISTICS,
    TOKENIZE,
    Answer,
    Closed,
    Peer,
    Process,
    message,
    until,
)

from boundary_bundle import encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import protocol, service_protocol, tiny_models

pytestmark = pytest.mark.shards

BUNDLE, POSITION, LIMIT, FULL, COMPUTE, JSON, FRAME, NO_MEMORY = 5, 7, 8, 9, 10, 21, 22, 23
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
    """Catches an allocation of what a header declares: over a limit it is refused, below it memory follows the bytes."""
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
