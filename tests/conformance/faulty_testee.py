"""Deliberately wrong testees: the Python testee with one fault each.

    python tests/conformance/faulty_testee.py NAME      one of them, for the kit
    python tests/conformance/faulty_testee.py           the table: which vectors of the whole kit catch which fault

A fault is either a check of the decoder taken out (by its step in section 6) or something
of the testee replaced by what an implementer might have written instead.
"""

from __future__ import annotations

import ast
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from boundary_bundle import decoder, dtypes, encoder, layout  # noqa: E402
from boundary_bundle.bundle import Bundle, Limits, Tensor  # noqa: E402
from boundary_bundle.conformance import deleted_checks, testee_python  # noqa: E402
from boundary_bundle.errors import failure  # noqa: E402

Module: Any = testee_python


@dataclass(frozen=True)
class Fault:
    """``only``: patterns of the vectors that are to catch it (all do when the table is made)."""

    what: str
    plant: Callable[[], None]
    only: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(what: str, *only: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(plant: Callable[[], None]) -> Callable[[], None]:
        FAULTS[plant.__name__.replace("_", "-")] = Fault(what, plant, only)
        return plant

    return keep


def without(name: str, what: str, step: str) -> None:
    """A fault that is a check left out."""

    def plant() -> None:
        source = Path(str(decoder.__file__)).read_text("utf-8")
        tree = ast.parse(source)
        found = [node for place, node in deleted_checks._checks(tree, source) if place == step]
        assert found, step
        for node in found:
            node.test = ast.Constant(False)
        Module.decoder = deleted_checks._compile(decoder, tree)

    FAULTS[name] = Fault(what, plant, (f"6:{step}",))


without("duplicate-name", "a duplicate tensor name is accepted", "D29")
without("frame-padding", "padding of frames is not looked at", "C2")
without("record-padding", "padding of tensor records is not looked at", "D28")
without("attribute-padding", "padding of attribute records is not looked at", "D60")
without("header-crc", "the header's CRC is not compared", "B1")
without("body-crc", "the body's CRC is not compared", "C1")
without("overlap", "fragments may overlap", "B31")
without("short-fragment", "fragments may be short", "B32")
without("conflict", "a repeated fragment may differ", "C3")
without("any-order", "a core decoder takes fragments in any order", "B33")
without("missing-fragment", "an end is taken before all fragments", "B41")
without("trailing-bytes", "bytes after the bundle are accepted", "trailing_bytes")
without("mixed-minor", "frames of another minor are accepted", "B21")
without("critical-attribute", "a critical unknown attribute is accepted", "D56")
without("critical-frame", "a critical unknown frame is accepted", "B6")
without("critical-flag", "a critical unknown head flag is accepted", "D1")
without("stray-crc", "a payload CRC is accepted where none may be", "B34")
without("bool", "a bool may be 2", "C4")
without("token-axes", "token axes may differ", "D30")
without("n-tokens", "n_tokens may differ from the token axes", "D61")
without("attribute-order", "attributes may stand in any order", "D53")
without("reserved", "reserved bytes of the head are ignored", "D3")
without("blocks", "a dimension may cut blocks", "D21")
without("control-text", "a text may have control characters", "D59")
without("open-twice", "a bundle may be opened twice", "B14")


def _wrap_head(change: Callable[[Any], Any]) -> None:
    right = decoder.check_head

    def check_head(*given: Any, **named: Any) -> Any:
        return change(right(*given, **named))

    Module.decoder.check_head = check_head


def _wrap(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the testee tells of a bundle ('tell_bundle') or of an error ('tell_error')."""
    right = getattr(Module, name)

    def tell(given: Any) -> Any:
        told = right(given)
        change(told)
        return told

    setattr(Module, name, tell)


def _each_tensor(change: Callable[[dict[str, Any]], None]) -> None:
    def all_of(told: dict[str, Any]) -> None:
        for tensor in told["tensors"]:
            change(tensor)

    _wrap("tell_bundle", all_of)


@fault("an i64 is read without its sign", "3.2")
def sign() -> None:
    right = testee_python.attribute_value
    Module.attribute_value = lambda kind, raw: right("u64" if kind == "i64" else kind, raw)


def _keep_order(names: tuple[str, ...]) -> None:
    right = dtypes.from_payload

    def from_payload(data: Any, row: Any, shape: Any, order: str) -> Any:
        return right(data, row, shape, dtypes.NATIVE_ORDER if row.name in names else order)

    Module.decoder.from_payload = from_payload


@fault("bf16 in big-endian order is not swapped", "4")
def bf16_order() -> None:
    _keep_order(("bf16",))


@fault("f32 in big-endian order is not swapped", "4")
def f32_order() -> None:
    _keep_order(("f32",))


@fault("a zero dimension is refused", "3.1", "4")
def zero_dimension() -> None:
    def refuse(head: Any) -> Any:
        if any(0 in info.shape for info in head.tensors):
            raise failure("limit_dimension", 0)
        return head

    _wrap_head(refuse)


@fault("the body's CRC covers the padding too", "6:C1", "4")
def crc_range() -> None:
    right: Any = decoder.crc32c
    Module.decoder.crc32c = lambda data: right(data if len(data) == 60 else bytes(data) + bytes(-len(data) % 64))


@fault("CRC-32 of zlib instead of CRC32C", "2.1", "2")
def crc_polynomial() -> None:
    Module.decoder.crc32c = lambda data: zlib.crc32(data)


@fault("the header's CRC is compared before the magic", "6:A1")
def crc_before_magic() -> None:
    class Testee(testee_python.PythonTestee):
        def decode(self, request: dict[str, Any]) -> dict[str, Any]:
            data = bytes.fromhex(request["data"])
            if data[:8] != layout.MAGIC and len(data) >= 64:
                return {"bundles": [], "error": {"name": "header_crc", "number": 201, "offset": 60}}
            return super().decode(request)

        stream = decode

    Module.PythonTestee = Testee


@fault("an input that is cut off is accepted", "6:truncated")
def truncated() -> None:
    Module.decoder.Decoder.finish = lambda self: None


@fault("version 1.1 is refused", "10")
def minor() -> None:
    class Testee(testee_python.PythonTestee):
        def decode(self, request: dict[str, Any]) -> dict[str, Any]:
            data = bytes.fromhex(request["data"])
            if data[:8] == layout.MAGIC and data[14:16] == b"\1\0":
                return {"bundles": [], "error": {"name": "unsupported_major", "number": 400, "offset": 12}}
            return super().decode(request)

        stream = decode

    Module.PythonTestee = Testee


@fault("an ancillary extension frame is refused", "2.5")
def ancillary_frame() -> None:
    Module.decoder.layout.CRITICAL_TYPE = 0xFF


@fault("unknown ancillary attributes are dropped", "3.2", "10")
def dropped_attribute() -> None:
    def drop(told: dict[str, Any]) -> None:
        told["attributes"] = [item for item in told["attributes"] if item["key"] in decoder.REGISTERED_KEYS]

    _wrap("tell_bundle", drop)


@fault("an empty value counts as absent", "3.2")
def empty_value() -> None:
    def drop(told: dict[str, Any]) -> None:
        told["attributes"] = [item for item in told["attributes"] if item["value"]]

    _wrap("tell_bundle", drop)


@fault("2^63 times 0 is 0 bytes, so within the limit", "6:D23")
def zero_product() -> None:
    Module.decoder.prod = lambda dims: prod(dims) if isinstance(dims, tuple) else 0


@fault("sizes are multiplied in 64 bits and wrap", "6:D23")
def wrapping_product() -> None:
    Module.decoder.prod = lambda dims: prod(dims) % 2**64


@fault("payloads are added in 32 bits", "6:D24")
def narrow_sum() -> None:
    source = Path(str(decoder.__file__)).read_text("utf-8")
    narrow = source.replace("payload_total += payload\n", "payload_total = (payload_total + payload) % 2**32\n")
    assert narrow != source
    Module.decoder = deleted_checks._compile(decoder, ast.parse(narrow))


@fault("a signalling NaN is made quiet", "4")
def quiet_nan() -> None:
    def quiet(tensor: dict[str, Any]) -> None:
        if tensor["dtype"] == "f32":
            words = [int(tensor["elements"][at : at + 8], 16) for at in range(0, len(tensor["elements"]), 8)]
            words = [w | 0x400000 if w >> 23 & 255 == 255 and w & 0x7FFFFF else w for w in words]
            tensor["elements"] = "".join(f"{word:08x}" for word in words)

    _each_tensor(quiet)


@fault("negative zero loses its sign", "4")
def negative_zero() -> None:
    def positive(tensor: dict[str, Any]) -> None:
        if tensor["dtype"] == "f64":
            words = [tensor["elements"][at : at + 16] for at in range(0, len(tensor["elements"]), 16)]
            tensor["elements"] = "".join("0" * 16 if word == "8" + "0" * 15 else word for word in words)

    _each_tensor(positive)


@fault("subnormal f16 numbers become zero", "4")
def flushed_subnormals() -> None:
    def flush(tensor: dict[str, Any]) -> None:
        if tensor["dtype"] == "f16":
            words = [int(tensor["elements"][at : at + 4], 16) for at in range(0, len(tensor["elements"]), 4)]
            tensor["elements"] = "".join(f"{w if w & 0x7C00 else w & 0x8000:04x}" for w in words)

    _each_tensor(flush)


@fault("dimensions are told innermost first", "3.1")
def reversed_shape() -> None:
    _each_tensor(lambda tensor: tensor["shape"].reverse())


@fault("token axis 0 is taken for none", "3.1", "5.1")
def token_axis_zero() -> None:
    _each_tensor(lambda tensor: tensor.update(token_axis=tensor["token_axis"] or None))


@fault("the two 8-bit floats are exchanged", "4")
def exchanged_floats() -> None:
    names = {"f8_e4m3fn": "f8_e5m2", "f8_e5m2": "f8_e4m3fn"}
    _each_tensor(lambda tensor: tensor.update(dtype=names.get(tensor["dtype"], tensor["dtype"])))


@fault("more than 4 dimensions are refused, as ggml has it", "3.1", "4")
def four_dimensions() -> None:
    right = testee_python.read_limits

    def read_limits(request: dict[str, Any]) -> Limits:
        limits = right(request)
        values = {name: getattr(limits, name) for name in limits.__slots__}
        return Limits(**{**values, "rank": min(4, limits.rank)})

    Module.read_limits = read_limits


@fault("64-bit numbers go through a double", "2.1", "3.2")
def doubles() -> None:
    _wrap("tell_bundle", lambda told: told.update(number=str(int(float(told["number"])))))


@fault("bundles without payload checksums are refused", "3", "2.3")
def checksums_demanded() -> None:
    def refuse(head: Any) -> Any:
        if not head.checksums:
            raise failure("checksums_required", 64)
        return head

    _wrap_head(refuse)


@fault("the consumer's limits are not looked at", "6:D4", "6:D19")
def ignored_limits() -> None:
    Module.read_limits = lambda request: Limits()


@fault("limits are off by one", "6:D4", "6:D5")
def limits_off_by_one() -> None:
    right = testee_python.read_limits

    def read_limits(request: dict[str, Any]) -> Limits:
        limits = right(request)
        return Limits(**{name: max(0, getattr(limits, name) - 1) for name in limits.__slots__})

    Module.read_limits = read_limits


@fault("a stream decoder that takes one bundle at a time", "11")
def stream_is_core() -> None:
    right = testee_python.decoder.Decoder
    Module.decoder.Decoder = lambda conformance, **named: right("core", **named)


@fault("offsets count from the frame", "6:C1", "6:B41")
def offset_in_frame() -> None:
    def change(told: dict[str, Any]) -> None:
        if told["offset"] is not None:
            told["offset"] %= 64

    _wrap("tell_error", change)


@fault("pieces: the last byte of the input is not waited for", "11", "2")
def lost_byte() -> None:
    right = testee_python.cut

    def cut(data: bytes, sizes: Any) -> Any:
        return right(data if sizes is None else data[:-1], sizes)

    Module.cut = cut


def _encode(change: Callable[[Bundle], None]) -> None:
    right = encoder.encode

    def encode(bundle: Bundle, **named: Any) -> bytes:
        change(bundle)
        return right(bundle, **named)

    Module.encoder.encode = encode


@fault("the encoder writes minor 0 always", "10")
def encoder_minor() -> None:
    _encode(lambda bundle: setattr(bundle, "minor", 0))


@fault("the encoder writes payload checksums always", "2.3", "3")
def encoder_checksums() -> None:
    _encode(lambda bundle: setattr(bundle, "checksums", True))


@fault("the encoder does not cut into fragments", "2.3")
def encoder_fragments() -> None:
    _encode(lambda bundle: setattr(bundle, "fragment_size", 0))


@fault("the encoder writes little-endian under a big-endian header", "4")
def encoder_order() -> None:
    right = Tensor.payload

    def payload(self: Tensor) -> memoryview:
        order, self.byte_order = self.byte_order, "little"
        try:
            return right(self)
        finally:
            self.byte_order = order

    Tensor.payload = payload  # type: ignore[method-assign]


@fault("the encoder writes bools as they are", "6:C4")
def encoder_bool() -> None:
    Module.encoder._BOOL = None


def main() -> None:
    if len(sys.argv) == 2:
        FAULTS[sys.argv[1]].plant()
        testee_python.serve(Module.PythonTestee())
        return
    from boundary_bundle.conformance import runner

    cases = runner.kit()
    missed = 0
    for name, planted in FAULTS.items():
        report = runner.run([sys.executable, __file__, name], cases)
        caught = [outcome.case.id for outcome in report.failures]
        missed += not caught
        shown = ", ".join(caught[:3]) or "NOT CAUGHT"
        print(f"{name:<20} {len(caught):>5}  {planted.what:<56}  {shown}", flush=True)
    print(f"{len(FAULTS)} faults, {missed} not caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
