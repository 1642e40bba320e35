"""Messages between a driver and a shard worker (spec/worker-protocol.md, version 1.2).

Bytes only; nothing here waits or sends.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any, NamedTuple

MAJOR = 1
MINORS = [0, 1, 2]
#: The one that brought links, flows and samplers.
MINOR_FLOWS = 2
MAGIC = b"BBWP"
HEADER = struct.Struct("<4sHHQIIQ")
HEADER_BYTES = HEADER.size
REPLY = 0x8000
MAX_TEXT = 1 << 20
MAX_BUNDLE = 1 << 30
#: Numbers of flows begin here: any worker of the pipeline may answer one, so they are none of its own requests'.
FLOWS = 1 << 63
#: Arrays and objects of a text within each other.
MAX_DEPTH = 64


class Type(IntEnum):
    """Message types. A reply carries the type of its request with bit 15 set."""

    HELLO = 1
    DESCRIBE = 2
    DECODE = 3
    STATISTICS = 4
    CLEAR = 5
    SHUTDOWN = 6
    TOKENIZE = 7
    DETOKENIZE = 8
    OPEN = 9
    TRUNCATE = 10
    RELEASE = 11
    PIN = 12
    EVICT = 13
    SESSIONS = 14
    SAVE = 15
    RESTORE = 16
    LINK = 17
    SAMPLER = 18
    ERROR = 0x7FFF


#: Error codes of a worker and their names.
ERRORS = {
    1: "argument",
    2: "range",
    3: "architecture",
    4: "load",
    5: "bundle",
    6: "contract",
    7: "position",
    8: "limit",
    9: "full",
    10: "compute",
    11: "state",
    12: "session",
    20: "protocol",
    21: "json",
    22: "frame",
    23: "no_memory",
    24: "link",
}


class Outcome(str, Enum):
    """What came of a request for a session; all but HIT are refusals."""

    HIT = "hit"
    MISS = "miss"
    EVICTED = "evicted"
    STALE_EPOCH = "stale_epoch"
    INCOMPATIBLE_RECIPE = "incompatible_recipe"
    POSITION_MISMATCH = "position_mismatch"
    FULL = "full"
    CANNOT_TRUNCATE = "cannot_truncate"
    BUSY = "busy"

    def __str__(self) -> str:
        return self.value


class Header(NamedTuple):
    """A header that has passed its checks. ``type`` has bit 15 taken off; ``reply`` says whether it was set."""

    type: int
    reply: bool
    request: int
    text_length: int
    bundle_length: int


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol; there is no way to find the next one."""


def pack(type: int, request: int, text: Mapping[str, Any] | None, bundle_length: int) -> bytes:
    """Header and text of a message; its bundle, if any, follows as it is. Raises ProtocolError for a text that is too
    long to be one: whoever read it would hang up."""
    body = json.dumps(text, separators=(",", ":")).encode() if text else b""
    if len(body) > MAX_TEXT:
        raise ProtocolError(f"a message text of {len(body)} bytes is over {MAX_TEXT}")
    return HEADER.pack(MAGIC, type, 0, request, len(body), 0, bundle_length) + body


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Check 32 bytes. Raises ProtocolError."""
    magic, kind, reserved, request, text_length, reserved2, bundle_length = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"a message begins with {magic.hex(' ')}, not with {MAGIC.hex(' ')}")
    if reserved or reserved2:
        raise ProtocolError("reserved bytes of a message header are not zero")
    if text_length > MAX_TEXT:
        raise ProtocolError(f"a message text of {text_length} bytes is over {MAX_TEXT}")
    if bundle_length > MAX_BUNDLE:
        raise ProtocolError(f"a bundle of {bundle_length} bytes is over {MAX_BUNDLE}")
    return Header(kind & ~REPLY, bool(kind & REPLY), request, text_length, bundle_length)


def parse_text(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object of a message; no bytes are the empty object. Raises ProtocolError."""
    if not data:
        return {}
    raw = bytes(data)
    _check_depth(raw)
    try:
        value = json.loads(str(raw, "utf-8"))
    except ValueError as error:
        raise ProtocolError(f"a message text is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("a message text is not a JSON object")
    return value


def _check_depth(raw: bytes) -> None:
    """Deeper texts are not given to the parser, which calls itself once a level. Raises ProtocolError."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    # What lies outside of strings: a quote is within one if a backslash that is not itself escaped stands before it.
    outside = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    depth = 0
    for byte in re.findall(rb"[\[\]{}]", outside):
        depth += 1 if byte in b"[{" else -1 if depth else 0
        if depth > MAX_DEPTH:
            raise ProtocolError(f"a message text is nested more than {MAX_DEPTH} deep")
