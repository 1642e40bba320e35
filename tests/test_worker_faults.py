"""Workers under faults: bytes that are no message, peers that stop, memory and disks that end, sockets that are not
theirs (spec/worker-protocol.md).

Catches a worker that dies without a word, a peer that waits for ever, and a state or file that a fault leaves changed.
The workers are real processes with a tiny model; a peer is a few lines on their protocol.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_native_shard_protocol import (
    CLEAR,
    DECODE,
    DESCRIBE,
    DETOKENIZE,
    HELLO,
    RESTORE,
    STATISTICS,
    TOKENIZE,
    Peer,
    Process,
)

from boundary_bundle import encode
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import protocol, service_protocol, tiny_models

pytestmark = pytest.mark.shards

LIMIT, JSON = 8, 21
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
