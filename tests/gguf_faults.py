"""GGUF files that are wrong in one way each, out of a sound tiny one.

The bytes are written here, since the gguf package refuses to write most of what is needed. tests/test_loader_faults.py
says what becomes of each kind; fuzz/loader.py draws damage from the same parts.
"""

from __future__ import annotations

import copy
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boundary_bundle.shards import tiny_models

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_SCALARS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}

#: ggml's numbers of some types of tensors; 4 and 5 are retired, and 31 to 33 and 36 to 38.
T_F32, T_F16, T_Q4_0, T_Q8_0, T_I8, T_I16, T_I32, T_I64, T_F64, T_BF16 = 0, 1, 2, 8, 24, 25, 26, 27, 28, 30

#: The model that is damaged: three ranges of two layers, a head of its own, rope factors that all layers share.
SHAPE = tiny_models.Shape(n_layer=6, n_head=2, n_head_kv=1, head_size=32, n_ff=64, tied=False, rope_freqs=True)
RANGES = ((0, 2), (2, 4), (4, 6))


@dataclass
class Key:
    """One entry of the metadata. ``element`` is an array's type of elements, ``count`` what it claims to hold."""

    name: bytes
    type: int
    value: Any
    element: int | None = None
    count: int | None = None


@dataclass
class Tensor:
    """``shape`` is innermost first, as in the file; ``rank``, ``size`` and ``offset`` replace what follows from it."""

    name: bytes
    shape: list[int]
    type: int
    data: bytes
    rank: int | None = None
    offset: int | None = None


@dataclass
class Gguf:
    """A file in parts. What is None is what the parts say."""

    keys: list[Key]
    tensors: list[Tensor]
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    order: str = "<"
    tail: bytes = b""
    #: Where parts begin, as of the last :meth:`pack`.
    places: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> Gguf:
        """Of a sound little-endian file."""
        at = 24

        def take(code: str) -> Any:
            nonlocal at
            found = struct.unpack_from("<" + code, data, at)
            at += struct.calcsize("<" + code)
            return found[0] if len(found) == 1 else found

        def text() -> bytes:
            nonlocal at
            size = take("Q")
            at += size
            return data[at - size : at]

        def value(kind: int) -> Any:
            return text() if kind == STRING else take(_SCALARS[kind])

        assert data[:4] == b"GGUF"
        n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
        keys = []
        for _ in range(n_keys):
            name, kind = text(), take("I")
            if kind == ARRAY:
                element, count = take("I"), take("Q")
                keys.append(Key(name, kind, [value(element) for _ in range(count)], element))
            else:
                keys.append(Key(name, kind, value(kind)))
        alignment = next((key.value for key in keys if key.name == b"general.alignment"), 32)
        heads = []
        for _ in range(n_tensors):
            name = text()
            shape = [take("Q") for _ in range(take("I"))]
            heads.append((name, shape, *take("IQ")))
        start = at + -at % alignment
        ends = [*(offset for *_, offset in heads[1:]), len(data) - start]
        tensors = [
            Tensor(name, shape, kind, data[start + offset : start + end])
            for (name, shape, kind, offset), end in zip(heads, ends, strict=True)
        ]
        return cls(keys, tensors, alignment=alignment)

    def pack(self) -> bytes:
        out = bytearray()
        self.places = []

        def put(code: str, *values: Any) -> None:
            self.places.append(len(out))
            out.extend(struct.pack(self.order + code, *values))

        def text(value: bytes) -> None:
            put("Q", len(value))
            self.places.append(len(out))
            out.extend(value)

        def value(kind: int, content: Any) -> None:
            if isinstance(content, bytes) and kind != STRING:
                out.extend(content)  # bytes as they are, for what is no value
            elif kind == STRING:
                text(content)
            else:
                put(_SCALARS[kind], content)

        out.extend(self.magic)
        put("I", self.version)
        put("Q", len(self.tensors) if self.n_tensors is None else self.n_tensors)
        put("Q", len(self.keys) if self.n_keys is None else self.n_keys)
        for key in self.keys:
            text(key.name)
            put("I", key.type)
            if key.type != ARRAY:
                value(key.type, key.value)
                continue
            assert key.element is not None
            put("I", key.element)
            put("Q", len(key.value) if key.count is None else key.count)
            inner = len(self.places)
            for item in key.value:
                value(key.element, item)
            del self.places[inner + 1 :]  # a vocabulary's strings are all alike
        offset = 0
        for tensor in self.tensors:
            text(tensor.name)
            put("I", len(tensor.shape) if tensor.rank is None else tensor.rank)
            for size in tensor.shape:
                put("Q", size)
            put("I", tensor.type)
            put("Q", offset if tensor.offset is None else tensor.offset)
            offset += len(tensor.data) + -len(tensor.data) % self.alignment
        for tensor in self.tensors:
            self.places.append(len(out))
            out.extend(bytes(-len(out) % self.alignment))
            self.places.append(len(out))
            out.extend(tensor.data)
        if self.tensors:
            out.extend(bytes(-len(out) % self.alignment))
        self.places.append(len(out))
        out.extend(self.tail)
        return bytes(out)

    def copy(self) -> Gguf:
        return copy.deepcopy(self)

    def key(self, name: str) -> Key:
        """By the end of its name."""
        return next(key for key in self.keys if key.name.endswith(name.encode()))

    def set(self, name: str, value: Any, type: int | None = None) -> Key:
        """Change an entry, or add one."""
        if not any(key.name.endswith(name.encode()) for key in self.keys):
            self.keys.append(Key(name.encode(), U32 if type is None else type, value))
        key = self.key(name)
        key.value = value
        if type is not None:
            key.type, key.element = type, None
        return key

    def drop(self, name: str) -> None:
        self.keys.remove(self.key(name))

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name.encode())


# -- kinds of damage


@dataclass(frozen=True)
class Kind:
    """``make`` writes into a folder and gives the name to ask for. ``says`` is a pattern that every refusal matches,
    whoever makes it. ``spares`` are the ranges that load and give the bits of the sound file. ``late``: found when a
    token is computed, so that ``describe`` and ``strip`` do not find it.
    """

    make: Callable[[Gguf, Path], Path]
    says: str
    spares: tuple[tuple[int, int], ...] = ()
    late: bool = False


KINDS: dict[str, Kind] = {}


def _kind(name: str, change: Callable[[Gguf], Any], says: str, **more: Any) -> None:
    """Of one file: of the parts that ``change`` leaves, or of the bytes that it gives."""

    def make(sound: Gguf, folder: Path) -> Path:
        parts, path = sound.copy(), folder / "bad.gguf"
        given = change(parts)
        path.write_bytes(given if isinstance(given, bytes) else parts.pack())
        return path

    assert name not in KINDS
    KINDS[name] = Kind(make, says, **more)


def _place(name: str, make: Callable[[Path], Any], says: str) -> None:
    """Of what lies at the name."""

    def made(_: Gguf, folder: Path) -> Path:
        make(folder / "bad.gguf")
        return folder / "bad.gguf"

    KINDS[name] = Kind(made, says)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _pipe_behind_a_link(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


_place("no file", lambda path: None, "no such file")
_place("a folder", Path.mkdir, "folder|not a regular file")
_place("a FIFO", os.mkfifo, "not a regular file")
_place("a FIFO behind a link", _pipe_behind_a_link, "not a regular file")
_place("a socket", _socket, "not a regular file|no such device")
_place("links in a circle", lambda path: path.symlink_to(path), "too many levels of symbolic links")
_place("a link to nothing", lambda path: path.symlink_to("none"), "no such file")
_place("an empty file", Path.touch, "not a GGUF file.* 0 bytes")
_place("one byte", lambda path: path.write_bytes(b"G"), "not a GGUF file.* 1 bytes")
_place("the magic alone", lambda path: path.write_bytes(b"GGUF"), "4 bytes")
KINDS["a device"] = Kind(lambda *_: Path("/dev/zero"), "not a regular file")


# -- the header


def _parts(**changes: Any) -> Callable[[Gguf], None]:
    def change(g: Gguf) -> None:
        for name, value in changes.items():
            setattr(g, name, value)

    return change


_kind("another magic", _parts(magic=b"FUGG"), "not a GGUF file.* 46 55 47 47")
for number in (0, 1, 4, (1 << 32) - 1):
    _kind(f"version {number}", _parts(version=number), f"version:? {number}|GGUFv1")
_kind("a big-endian file", _parts(order=">"), "endian")
for number in (10_001, 1 << 40, 1 << 63, (1 << 64) - 1):
    _kind(f"{number} tensors", _parts(n_tensors=number), f"declares {number} tensors, and 10000 are possible")
    _kind(f"{number} entries", _parts(n_keys=number), f"declares {number} entries of metadata, and 10000 are possible")
_kind("a tensor more than there is", lambda g: _parts(n_tensors=len(g.tensors) + 1)(g), "offset|cut short|dimensions")
_kind("a tensor less than there is", lambda g: _parts(n_tensors=len(g.tensors) - 1)(g), "ends at byte")
_kind("an entry more than there is", lambda g: _parts(n_keys=len(g.keys) + 1)(g), "string length|cut short")
_kind("an entry less than there is", lambda g: _parts(n_keys=len(g.keys) - 1)(g), "number of elements|cut short")
_kind("no tensors", _parts(tensors=[]), "no tensors|missing tensor")
_kind("no metadata", _parts(keys=[]), "architecture")
_kind("bytes behind the last tensor", _parts(tail=bytes(32)), "'output.weight' ends at byte")

# -- metadata


def _length_of(text: bytes, length: int) -> Callable[[Gguf], bytes]:
    def change(g: Gguf) -> bytes:
        data = g.pack()
        at = data.index(struct.pack("<Q", len(text)) + text)
        return data[:at] + struct.pack("<Q", length) + data[at + 8 :]

    return change


def _set(name: str, value: Any, type: int | None = None, element: int | None = None) -> Callable[[Gguf], None]:
    def change(g: Gguf) -> None:
        key = g.set(name, value, ARRAY if element is not None else type)
        key.element = element

    return change


def _add(*key: Any) -> Callable[[Gguf], None]:
    return lambda g: g.keys.append(Key(*key))


def _count(name: str, count: int) -> Callable[[Gguf], None]:
    return lambda g: setattr(g.key(name), "count", count)


TERABYTE = 1 << 40
for what, text in (("a key", b"llama.context_length"), ("a value", b"tiny untied"), ("a token", b"<unk>")):
    for number in (1 << 30, TERABYTE, (1 << 64) - 1):
        _kind(f"{what} of {number} bytes", _length_of(text, number), "string length|cut short")
for what in ("ggml.tokens", "ggml.scores"):
    for number in (TERABYTE, (1 << 64) - 1):
        _kind(f"{what} with {number} elements", _count(what, number), "failed to read key-value pairs|cut short")
_kind("a key without a name", _add(b"", U32, 1), "is empty")
_kind("a key twice", _add(b"llama.block_count", U32, 5), "duplicate.*llama.block_count")
_kind("a value of type 13", _add(b"x", 13, b"1234"), "type 13|13 is not a valid GGUFValueType")
_kind("an array of type 77", _add(b"x", ARRAY, [b"1234"], 77), "type 77|77 is not a valid GGUFValueType")
_kind("an array in an array", _add(b"x", ARRAY, [struct.pack("<IQI", U32, 1, 7)], ARRAY), "type 9")
_kind(
    "arrays in each other",
    _add(b"x", ARRAY, [struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", U32, 0)], ARRAY),
    "type 9|recursion",
)
_kind("a key to obey", _add(b"a\n\x1b[31mb", 99, b""), "99")
for number in (0, 3, 48):
    _kind(f"alignment {number}", _set("general.alignment", number), "alignment.* power of (2|two)")
_kind("alignment 2^31", _set("general.alignment", 1 << 31), "seek|cut short")
_kind("alignment of another type", _set("general.alignment", 32, U64), "alignment|type_to_gguf_type")
# 16 for a file that was written with 32: its weights would be taken from 16 bytes before their place.
_kind("another alignment than the writer's", _set("general.alignment", 16), "ends at byte|aligns its tensors to 16")
_kind("no architecture", lambda g: g.drop("general.architecture"), "architecture")
_kind("an architecture that is a number", _set("general.architecture", 5, U32), "architecture")
_kind("an unknown architecture", _set("general.architecture", b"lama"), "lama")
_kind("another architecture", _set("general.architecture", b"gpt2"), "gpt2.(context_length|block_count)")
_kind("an architecture to obey", _set("general.architecture", b"a\nb\x1b[31m"), r"a\\x0ab\\x1b|a\\nb\\x1b")
for number in (0, 5, 7, 512, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
    _kind(f"{number} layers", _set("block_count", number), f"{number}|fatal error")
_kind("layers of another type", _set("block_count", -6, I32), "block_count|declares -6 layers")
_kind("no number of layers", lambda g: g.drop("block_count"), "block_count")
for number in (0, 63, 1 << 31):
    _kind(f"width {number}", _set("embedding_length", number), f"invalid n_rot: 32, expected {number // 2}")
_kind("a width of another type", _set("embedding_length", -64, I32), "embedding_length has wrong type i32")
for number in (0, 3, 1 << 31):
    _kind(f"{number} heads", _set("llama.attention.head_count", number), "invalid n_rot|wrong shape")
for number in (0, 3, 1 << 31):
    _kind(f"{number} heads of keys", _set("llama.attention.head_count_kv", number), "wrong shape|GGML_ASSERT")
_kind("too few numbers of heads", _set("llama.attention.head_count", [2] * 5, element=U32), "expected 6, got 5")
_kind("a feed-forward of no width", _set("llama.feed_forward_length", 0), "wrong shape.* 64, *0")
_kind("a head of odd size", _set("rope.dimension_count", 31), "invalid n_rot: 31, expected 32")
_kind("experts without tensors", _set("llama.expert_count", 4), "n_expert_used")
_kind("too many experts", _set("llama.expert_count", (1 << 32) - 1), "LLAMA_MAX_EXPERTS")
_kind("a negative epsilon", _set("epsilon", -1.0), "eps >= 0", late=True)
_kind("an epsilon that is no number", _set("epsilon", float("nan")), "eps >= 0", late=True)
_kind("too few scores", _set("ggml.scores", [0.0] * 5, element=F32), "scores .5 < 320")
_kind("scores of bytes", _set("ggml.scores", [0] * 320, element=U8), "scores is an array of u8, not an array of f32")
_kind("one score for all", _set("ggml.scores", 1.0, F32), "scores is a single f32, not an array of f32")
_kind("kinds of tokens in bytes", _set("token_type", [1] * 320, element=I8), "token_type is an array of i8")
_kind(
    "suppressed tokens in bytes",
    _set("tokenizer.ggml.suppress_tokens", [1] * 9, element=U8),
    "suppress_tokens is an array of u8",
)
_kind("tokens that are numbers", _set("ggml.tokens", [1] * 320, element=U32), "is an array of u32, not an array of str")
_kind("no tokens", _set("ggml.tokens", [], element=STRING), "signal 11|GGML_ASSERT|tokens")
_kind("a token twice", lambda g: g.key("ggml.tokens").value.__setitem__(300, b"<s>"), "id_to_token.size")
_kind("a token too many", lambda g: g.key("ggml.tokens").value.append(b"more"), "320 < 321")
_kind("an unknown tokenizer", _set("ggml.model", b"x\n"), r"unknown tokenizer: 'x\\x0a'")

# -- tensors

Q, K, NORM = "blk.3.attn_q.weight", "blk.3.attn_k.weight", "blk.3.attn_norm.weight"
#: What does not hold layer 3.
OTHERS = (RANGES[0], RANGES[2])


def _tensor(of: str, **changes: Any) -> Callable[[Gguf], None]:
    return lambda g: _parts(**changes)(g.tensor(of))  # type: ignore[arg-type]


def _more(*tensor: Any) -> Callable[[Gguf], None]:
    return lambda g: g.tensors.append(Tensor(*tensor))


def _sized(of: str, type: int, bytes_of_all: int) -> Callable[[Gguf], None]:
    """Of another type, with as many bytes as that needs: a sound table."""
    return lambda g: _parts(type=type, data=g.tensor(of).data[:1] * bytes_of_all)(g.tensor(of))  # type: ignore[arg-type]


_kind("a layer's tensor renamed", _tensor(Q, name=b"blk.3.attn_x.weight"), f"missing tensor '{Q}'", spares=OTHERS)
_kind("a tensor twice", lambda g: g.tensors.append(copy.deepcopy(g.tensor(Q))), f"duplicate.*{Q}")
_kind("a tensor of a layer beyond the last", _tensor(Q, name=b"blk.9.attn_q.weight"), "declares 6 layers.* 10")
_kind("a tensor too many", _more(b"x", [8], T_F32, bytes(32)), "wrong number of tensors")
_kind("one too many in a layer", _more(b"blk.3.x", [8], T_F32, bytes(32)), "wrong number of tensors", spares=OTHERS)
_kind("a name of 64 bytes", _tensor(Q, name=b"x" * 64), "name.* too long: 64")
_kind("a name of a terabyte", _length_of(Q.encode(), TERABYTE), "string length|cut short")
_kind("a shape turned", _tensor(K, shape=[32, 64]), f"'{K}' .*; expected +64, +32, got +32, +64", spares=OTHERS)
_kind("a norm with a dimension too many", _tensor(NORM, shape=[32, 2]), f"'{NORM}' has wrong shape", spares=OTHERS)
_kind("a dimension of 0", _tensor(Q, shape=[64, 0]), f"signal 8|'{Q}' has a dimension of 0")
_kind("a dimension of 0 and no bytes", _tensor(Q, shape=[0, 64], data=b""), f"'{Q}' has a dimension of 0")
_kind("no dimensions", _tensor(Q, shape=[]), "offset")
_kind("five dimensions", _tensor(Q, shape=[64, 64, 1, 1, 1]), f"'{Q}' has invalid number of dimensions: 5")
_kind("2^31 dimensions", _tensor(Q, rank=1 << 31), f"'{Q}' has invalid number of dimensions: 2147483648|cut short")
for number in (TERABYTE, (1 << 63) - 32, 1 << 63):
    _kind(f"a dimension of {number}", _tensor(Q, shape=[number, 64]), f"'({Q}|{K})'|cut short|dimension")
_kind("dimensions whose product wraps", _tensor(Q, shape=[1 << 33, 1 << 33]), f"elements in tensor '{Q}'|reshape")
for number in (4, 99, (1 << 32) - 1):
    _kind(f"a weight of type {number}", _tensor(Q, type=number), f"'{Q}'.*type|{number} is not a valid")
_kind("rows that are no whole blocks", _tensor("rope_freqs.weight", type=T_Q8_0), "multiple of (Q8_0 )?block size .32")
_kind("a weight of a smaller type than its bytes", _tensor(Q, type=T_F16), f"'{K}' has offset")
_kind("a weight of integers", _tensor(Q, type=T_I32), "computing a token .*signal 11", spares=OTHERS, late=True)
_kind("a weight of doubles", _sized(Q, T_F64, 64 * 64 * 8), "computing a token .*signal 11", spares=OTHERS, late=True)
_kind("a norm of halves", _sized(NORM, T_F16, 64 * 2), "computing a token .*f16", spares=OTHERS, late=True)
_kind("a norm in blocks", _sized(NORM, T_Q8_0, 68), "computing a token .*q8_0", spares=OTHERS, late=True)
_kind("a head of integers", _tensor("output.weight", type=T_I32), "computing a token", spares=RANGES[:2], late=True)
DOUBLES = _sized("token_embd.weight", T_F64, 320 * 64 * 8)
_kind("a table of doubles", DOUBLES, "computing a token", spares=RANGES[1:], late=True)
for number in (0, 1, TERABYTE, (1 << 64) - 32):
    _kind(f"a tensor at byte {number}", _tensor(Q, offset=number), f"'{Q}' has offset {number}|cut short|overflow")
_kind("the first tensor not at the start", _tensor("token_embd.weight", offset=32), "'token_embd.weight' has offset 32")
_kind("the last tensor beyond the end", lambda g: g.pack()[:-4096], "output.weight|cut short")


def _lacks(name: str) -> Callable[[Gguf], None]:
    return lambda g: g.tensors.remove(g.tensor(name))


_kind("a layer's tensor missing", _lacks(Q), f"missing tensor '{Q}'", spares=OTHERS)
_kind("no table", _lacks("token_embd.weight"), "missing tensor 'token_embd.weight'", spares=RANGES[1:])
_kind("no final norm", _lacks("output_norm.weight"), "missing tensor 'output_norm.weight'", spares=RANGES[:2])

# -- several files, and files of one range


def split(sound: Gguf, count: int = 3) -> list[Gguf]:
    """As upstream makes them: all metadata in the first, each with its number."""
    edges = [len(sound.tensors) * place // count for place in range(count + 1)]
    files = []
    for number in range(count):
        part = Gguf(copy.deepcopy(sound.keys) if number == 0 else [], sound.tensors[edges[number] : edges[number + 1]])
        part.keys += [
            Key(b"split.no", U16, number),
            Key(b"split.count", U16, count),
            Key(b"split.tensors.count", I32, len(sound.tensors)),
        ]
        files.append(part)
    return files


def split_name(number: int, count: int = 3) -> str:
    return f"model-{number:05}-of-{count:05}.gguf"


def _files(
    name: str, change: Callable[[list[Gguf]], Any], says: str, *, give: str = split_name(1), named: int = 3, **more: Any
) -> None:
    """Of a model in three files; what ``change`` gives in place of one are its bytes or what makes something else."""

    def make(sound: Gguf, folder: Path) -> Path:
        parts: list[Any] = split(sound.copy())
        change(parts)
        for number, part in enumerate(parts, 1):
            path = folder / split_name(number, named)
            if callable(part):
                part(path)
            else:
                path.write_bytes(part.pack() if isinstance(part, Gguf) else part)
        return folder / give

    KINDS[name] = Kind(make, says, **more)


def _instead(what: Any) -> Callable[[list[Any]], None]:
    return lambda parts: parts.__setitem__(1, what)


SECOND = split_name(2)
_files("a file absent", _instead(lambda path: None), f"{SECOND}.*no such file")
_files("a folder among the files", _instead(Path.mkdir), f"{SECOND} is not a regular file")
_files("a FIFO among the files", _instead(os.mkfifo), f"{SECOND} is not a regular file")
_files("an empty file among them", _instead(b""), f"{SECOND} is not a GGUF file")
_files("a link in a circle among them", _instead(lambda path: path.symlink_to(path)), f"{SECOND}.*symbolic links")
_files("a second file cut short", lambda parts: _instead(parts[1].pack()[:-4096])(parts), "not within the file bounds")
_files("bytes behind the second file", lambda parts: _parts(tail=bytes(64))(parts[1]), f"{SECOND} has .* ends at byte")
_files("10001 tensors in the second", lambda parts: _parts(n_tensors=10_001)(parts[1]), f"{SECOND} .*10001 tensors")
_files("files in another order", lambda parts: parts.append(parts.pop(1)), f"split file idx: 2.*{SECOND}")
_files("one file for all", lambda parts: _instead(parts[0])(parts), "duplicated|split file idx")
_files(
    "a tensor in two files", lambda parts: parts[2].tensors.append(parts[0].tensors[0]), "embd.weight' is duplicated"
)
_files("a file of another model", lambda parts: _other_width(parts[2]), "wrong shape", spares=RANGES[:2])
for number, count in ((2, "2 files by its metadata"), (4, "4 files by its metadata"), (65535, "65535 files")):
    _files(f"three files of {number}", lambda parts, number=number: parts[0].set("split.count", number), count)
_files("files whose number is of another type", lambda parts: parts[0].set("split.count", 3, U32), "split.count")
_files("a file without its place", lambda parts: parts[1].drop("split.no"), f"split.no in GGUF split .*{SECOND}")
_files("a place of another type", lambda parts: parts[1].set("split.no", 1, U32), "type_to_gguf_type")
_files("another number of tensors", lambda parts: parts[0].set("split.tensors.count", 5), "5 tensors expected")
_files("the second file alone", lambda parts: None, "file 2 of 3", give=SECOND)
_files(
    "two files of three by their names",
    lambda parts: parts.pop(),
    "3 files by its metadata.* of 2 by its name",
    give=split_name(1, 2),
    named=2,
)


def _other_width(part: Gguf) -> None:
    for tensor in part.tensors:
        if tensor.name.endswith(b"ffn_up.weight"):
            tensor.shape, tensor.data = [64, 32], tensor.data[: 64 * 32 * 4]


def stripped(sound: Gguf, layers: tuple[int, int]) -> Gguf:
    """The file of one range, as ``boundary-bundle strip`` makes it."""
    part = sound.copy()
    shapes = [[*tensor.shape, 1, 1, 1][:4] for tensor in sound.tensors]
    part.keys += [
        Key(b"boundary_bundle.tensors.name", ARRAY, [tensor.name for tensor in sound.tensors], STRING),
        Key(b"boundary_bundle.tensors.type", ARRAY, [tensor.type for tensor in sound.tensors], U32),
        Key(b"boundary_bundle.tensors.shape", ARRAY, [size for shape in shapes for size in shape], U64),
    ]
    held = {b"rope_freqs.weight"}
    if layers[0] == 0:
        held.add(b"token_embd.weight")
    if layers[1] == SHAPE.n_layer:
        held |= {b"output_norm.weight", b"output.weight"}
    for tensor in list(part.tensors):
        layer = int(tensor.name.split(b".")[1]) if tensor.name.startswith(b"blk.") else -1
        if tensor.name not in held and not layers[0] <= layer < layers[1]:
            part.tensors.remove(tensor)
    return part


MIDDLE = RANGES[1]


def _of_range(name: str, change: Callable[[Gguf], Any], says: str, **more: Any) -> None:
    def make(sound: Gguf, folder: Path) -> Path:
        part, path = stripped(sound, MIDDLE), folder / "bad.gguf"
        change(part)
        path.write_bytes(part.pack())
        return path

    KINDS[name] = Kind(make, says, **more)


def _table(of: str, change: Callable[[list[Any]], Any]) -> Callable[[Gguf], None]:
    def apply(g: Gguf) -> None:
        key = g.key(f"boundary_bundle.tensors.{of}")
        key.value = change(key.value)

    return apply


ZEROS = (b"blk.5.attn_q.weight", [64, 64], T_F32, bytes(64 * 64 * 4))
_of_range("a file of another range", lambda g: None, "missing tensor '", spares=(MIDDLE,))
_of_range("it holds another's tensor too", _more(*ZEROS), "missing tensor '", spares=(MIDDLE,))
_of_range("it holds a tensor of no model", _more(b"blk.3.x", [8], T_F32, bytes(32)), "'blk.3.x' is not as .* table")
_of_range("it lacks a tensor of its range", _lacks(Q), "missing tensor '")
_of_range("it holds a tensor that is turned", _tensor(K, shape=[32, 64]), f"'{K}' is not as .* table")
_of_range(
    "its table has a name twice", _table("name", lambda names: [*names[:-1], names[0]]), "'token_embd.weight' twice"
)
_of_range("its table has 10001 names", _table("name", lambda _: [b"%d" % i for i in range(10_001)]), "has 10001 names")
_of_range("its table has too few types", _table("type", lambda types: types[:-1]), "not an array of 58 elements")
_of_range("its table has unknown types", _table("type", lambda types: [99] * len(types)), "is 99, which is no type")
_of_range("its table has too many sizes", _table("shape", lambda sizes: [*sizes, 1]), "not an array of 232 elements")
