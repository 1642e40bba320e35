"""The Python targets: decoder, stream decoder, inspector, and the two codecs side by side.

Each is a function of one input (its layout: mutate.h). It returns what was said of the datastream,
None for a bundle or the error, and lets nothing through but declared errors: any other exception is a
finding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from seeds import CONTRACT, CONTROL, CORE, LIMIT_NAMES, PREPARED, REQUIRE_CHECKSUMS, limits_of, pieces_of

from boundary_bundle.anatomy import dissect
from boundary_bundle.bundle import Limits, bits_equal
from boundary_bundle.cli import inspect, page
from boundary_bundle.conformance.transcript import of_bundle, of_error, of_events
from boundary_bundle.contract import Contract, TensorRule
from boundary_bundle.decoder import Decoder, decode
from boundary_bundle.encoder import encode
from boundary_bundle.errors import ERRORS, BundleError

_PAST_THE_RECORDS = frozenset(
    ERRORS[name][0]
    for name in (
        *("limit_name", "limit_rank", "limit_dimension", "limit_payload_bytes", "limit_fragments"),
        *("unsupported_dtype", "unsupported_attribute"),
    )
)


#: Some vectors keep it, most do not.
_CONTRACT = Contract([TensorRule("residual", "f32", ("tokens", "n"), 0)])


class Finding(Exception):
    """Something that must not happen."""


def reaches_records(error: tuple[int, int] | None, data: bytes) -> bool:
    """Whether a decoder came to the tensor records of the first head, by what it said of the datastream.

    ``error`` is number and offset. fragment_size is left out: it may come before the records.
    """
    if error is None:
        return True
    number, offset = error
    if number >= 600:
        return True
    if len(data) < 96 or data[8] != 0x81 or offset < 64:
        return False
    length = int.from_bytes(data[24:32], "little")
    if length <= len(data) - 64 and offset >= 64 + (length + 63) // 64 * 64:
        return True
    if number == ERRORS["attribute_block"][0]:
        return offset != 76
    return number in _PAST_THE_RECORDS or ERRORS["tensor_table"][0] <= number <= ERRORS["attribute_reserved"][0]


def _declared(error: BundleError, size: int) -> tuple[int, int]:
    if ERRORS.get(error.name, (None,))[0] != error.number or not 100 <= error.number < 700:
        raise Finding(f"{error.name} ({error.number}) is no error of a decoder")
    if error.number >= 600:  # has no offset; the head has passed
        if error.offset is not None:
            raise Finding(f"{error.name} has the offset {error.offset}")
        return error.number, size
    if error.offset is None or not 0 <= error.offset <= size:
        raise Finding(f"{error.name} lies at {error.offset} of {size}")
    if not str(error).startswith(f"{error.name}: "):
        raise Finding(f"{error.name} has no sentence")
    return error.number, error.offset


def _contract_of(data: bytes) -> Contract | None:
    return _CONTRACT if data[10] & CONTRACT else None


def decoder(data: bytes) -> tuple[int, int] | None:
    """decode; a bundle is encoded and decoded again to the same bits and bytes."""
    stream = data[CONTROL:]
    limits = limits_of(data)
    try:
        bundle = decode(
            stream, limits=limits, require_checksums=bool(data[10] & REQUIRE_CHECKSUMS), contract=_contract_of(data)
        )
    except BundleError as error:
        return _declared(error, len(stream))
    if (
        len(stream) % 8 == 0
        and data[15] % 2
        and not bits_equal(bundle, decode(memoryview(stream).cast("Q"), limits=limits))
    ):
        raise Finding("in a buffer of wider elements it is another bundle")
    written = encode(bundle, limits=limits)
    again = decode(written, limits=limits)
    if not bits_equal(bundle, again) or encode(again, limits=limits) != written:
        raise Finding("decoded, encoded and decoded it is another bundle")
    return None


def stream(data: bytes) -> tuple[int, int] | None:
    """Decoder in pieces; events and verdict may not depend on them."""
    datastream = data[CONTROL:]
    kind = "core" if data[10] & CORE else "stream"
    limits, require = limits_of(data), bool(data[10] & REQUIRE_CHECKSUMS)
    contract = _contract_of(data)
    in_pieces, verdict = _transcript(kind, datastream, limits, require, pieces_of(data, len(datastream)), contract)
    if data[11] % 5:
        whole, _ = _transcript(kind, datastream, limits, require, (), contract)
        if whole != in_pieces:
            raise Finding(f"in pieces:\n{in_pieces}\nwhole:\n{whole}")
    return verdict


def inspector(data: bytes) -> tuple[int, int] | None:
    """What `boundary-bundle inspect` makes of a file, as text, JSON and HTML."""
    datastream = data[CONTROL:]
    payload, frames = data[12], 2 + data[13] % 16
    found = dissect(datastream, limits=limits_of(data), payload_bytes=payload, max_frames=frames)
    inspect._json(found, "file")
    for line in inspect._lines(found, "file"):
        "".join(text for text, _ in line)
    if data[14] % 8 == 0:  # slow
        page.render(found, "file", inspect.damage(found))
    for row in found.rows:
        if row.offset > len(datastream):
            raise Finding(f"a row at {row.offset} of {len(datastream)}")
    return None if found.error is None else _declared(found.error, len(datastream))


# ---- both codecs ----------------------------------------------------------------------


def _transcript(
    kind: str, datastream: bytes, limits: Limits, require: bool, pieces: Sequence[int], contract: Contract | None = None
) -> tuple[str, tuple[int, int] | None]:
    lines: list[str] = []
    verdict = None
    try:
        if kind == "one":
            lines += of_bundle(decode(datastream, limits=limits, require_checksums=require, contract=contract))
        else:
            incremental = Decoder(kind, limits=limits, require_checksums=require, contract=contract)
            at = 0
            for size in [*pieces, len(datastream)]:
                lines += of_events(incremental.feed(datastream[at : at + size]))
                at += size
            incremental.finish()
            _is_over(incremental)
    except BundleError as error:
        lines += of_events(error.events)
        lines.append(of_error(error))
        verdict = _declared(error, len(datastream))
        if kind != "one":
            _is_final(incremental, error)
    return "".join(f"{line}\n" for line in lines), verdict


def _is_over(incremental: Decoder) -> None:
    try:
        incremental.feed(b"x")
    except ValueError as error:
        if not isinstance(error, BundleError):
            return
    raise Finding("a decoder takes bytes after the end of its input")


def _is_final(incremental: Decoder, error: BundleError) -> None:
    for again in (incremental.finish, lambda: incremental.feed(b"x")):
        try:
            again()
        except BundleError as second:
            if str(second) == str(error):
                continue
        raise Finding(f"{error.name} is not final")


class Library:
    """The C codec with native_shim/tests/cross_codec.c, as run.py builds it."""

    def __init__(self, path: Path) -> None:
        lib = self.lib = ctypes.CDLL(str(path))
        lib.cross_transcribe.restype = ctypes.c_void_p
        p, n = ctypes.c_char_p, ctypes.c_size_t
        any_pointer = ctypes.c_void_p
        lib.cross_transcribe.argtypes = [p, any_pointer, ctypes.c_int, any_pointer, p, n, p, n, any_pointer, n]
        lib.cross_free.argtypes = [any_pointer]

    def transcript(
        self, kind: str, datastream: bytes, limits: Limits, require: bool, pieces: Sequence[int], prepare: bytes | None
    ) -> str:
        pointer = self.lib.cross_transcribe(
            *(kind.encode("ascii"), (ctypes.c_uint64 * 10)(*(getattr(limits, name) for name in LIMIT_NAMES)), require),
            *(None, prepare, len(prepare or b""), datastream, len(datastream)),
            *((ctypes.c_uint32 * len(pieces))(*pieces), len(pieces)),
        )
        try:
            return ctypes.string_at(pointer).decode("ascii")
        finally:
            self.lib.cross_free(pointer)


library: Library | None = None


def differential(data: bytes) -> tuple[int, int] | None:
    """The same bytes to both codecs: verdict, number, offset, events and content are the same text."""
    if library is None:
        raise RuntimeError("differential needs the C codec: --library")
    datastream = data[CONTROL:]
    limits, require = limits_of(data), bool(data[10] & REQUIRE_CHECKSUMS)
    prepare = datastream if data[10] & PREPARED else None
    # One way of reading it at a time: all three would take three times as long.
    kind = ("one", "core", "stream")[data[13] % 3]
    pieces = () if kind == "one" else pieces_of(data, len(datastream))
    of_python, verdict = _transcript(kind, datastream, limits, require, pieces)
    of_c = library.transcript(kind, datastream, limits, require, pieces, prepare)
    if of_python != of_c:
        raise Finding(f"{kind}: the codecs disagree\nPython:\n{of_python}\nC:\n{of_c}")
    return verdict


TARGETS: dict[str, Callable[[bytes], tuple[int, int] | None]] = {
    "decoder": decoder,
    "stream": stream,
    "inspector": inspector,
    "differential": differential,
}
