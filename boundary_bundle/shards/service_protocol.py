"""Messages between a client and the service (spec/service-protocol.md, version 1.0).

Bytes only; nothing here waits or sends.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from .protocol import HEADER, HEADER_BYTES, MAX_TEXT, REPLY, ProtocolError, parse_text

__all__ = [
    "ERRORS",
    "HEADER_BYTES",
    "MAGIC",
    "MAJOR",
    "MAX_TEXT",
    "MINORS",
    "Frame",
    "ProtocolError",
    "Type",
    "default_socket",
    "pack",
    "parse_text",
    "unpack_header",
]

MAJOR = 1
MINORS = [0]
MAGIC = b"BBSV"


class Type(IntEnum):
    """Message types. A reply carries the type of its request with bit 15 set."""

    HELLO = 1
    OPEN = 2
    EXTEND = 3
    TRUNCATE = 4
    RELEASE = 5
    SAVE = 6
    RESTORE = 7
    TOKENIZE = 8
    DETOKENIZE = 9
    STATUS = 10
    ERROR = 0x7FFF


#: Error codes of the service and their names.
ERRORS = {
    1: "argument",
    2: "session",
    3: "full",
    4: "limit",
    5: "number",
    6: "worker",
    7: "connections",
    8: "closing",
    9: "internal",
    20: "protocol",
    21: "json",
    22: "frame",
}


class Frame(NamedTuple):
    """A header that has passed its checks. ``type`` has bit 15 taken off; ``reply`` says whether it was set."""

    type: int
    reply: bool
    request: int
    text_length: int


def pack(type: int, request: int, text: Mapping[str, Any] | None = None, *, reply: bool = False) -> bytes:
    """A whole message. Raises ProtocolError when the text is too long to be one."""
    body = json.dumps(text, separators=(",", ":")).encode() if text else b""
    if len(body) > MAX_TEXT:
        raise ProtocolError(f"a message text of {len(body)} bytes is over {MAX_TEXT}")
    return HEADER.pack(MAGIC, type | (REPLY if reply else 0), 0, request, len(body), 0, 0) + body


def unpack_header(data: bytes | bytearray | memoryview) -> Frame:
    """Check 32 bytes. Raises ProtocolError."""
    magic, kind, reserved, request, text_length, reserved2, bundle_length = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"a message begins with {magic.hex(' ')}, not with {MAGIC.hex(' ')}")
    if reserved or reserved2 or bundle_length:
        raise ProtocolError("reserved bytes of a message header are not zero")
    if text_length > MAX_TEXT:
        raise ProtocolError(f"a message text of {text_length} bytes is over {MAX_TEXT}")
    return Frame(kind & ~REPLY, bool(kind & REPLY), request, text_length)


def default_socket() -> Path:
    """Where the service of this user listens unless it is told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        return Path(runtime, "boundary-bundle", "serve.sock")
    return Path(tempfile.gettempdir(), f"boundary-bundle-{os.getuid()}", "serve.sock")
