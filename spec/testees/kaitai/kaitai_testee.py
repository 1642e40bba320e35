"""A testee over the Python parser that Kaitai Struct makes of boundary_bundle.ksy.

    python kaitai_testee.py DIR

DIR holds the compiled boundary_bundle.py; the package kaitaistruct is needed and nothing
else. Where fields lie, and what one field or one record alone must satisfy, is known from
the description only; codes, sizes and limits from ../../registry.json. What Kaitai cannot
say stands here: CRCs, limits, order and tiling, names, payload sizes. So it finds every
fault, but not always the first one first (in its hello: "judged").
"""

import importlib.util
import json
import sys
from io import BytesIO
from pathlib import Path

REGISTRY = json.loads((Path(__file__).resolve().parents[2] / "registry.json").read_text("utf-8"))
DTYPES = {row["code"]: row for row in REGISTRY["dtypes"]}
TYPES = {code: name for name, code in REGISTRY["attribute_types"].items()}
KNOWN = {row["key"]: row for row in REGISTRY["attributes"]}
LIMITS = {row["name"]: row["default"] for row in REGISTRY["limits"]}
ERRORS = {row["name"]: row["number"] for row in REGISTRY["errors"]}
NAME = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/")

CRC_TABLE = []
for crc in range(256):
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    CRC_TABLE.append(crc)


def crc32c(data):
    crc = 0xFFFFFFFF
    table = CRC_TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


class Refused(Exception):
    """An error of the format: its name, and its offset where that is known here."""

    def __init__(self, name, offset=None):
        super().__init__(name)
        self.name = name
        self.offset = offset


def refuse_if(condition, name, offset=None):
    if condition:
        raise Refused(name, offset)


class Tensor:
    """What a record says of a tensor, and the fragments that came."""

    def __init__(self, record, fragment_size):
        row = DTYPES[record.dtype.value]
        self.dtype = row["name"]
        block_elements = row["block_elements"]
        self.block_elements = block_elements
        self.byte_order = record.byte_order.name
        self.shape = record.dims
        self.token_axis = None if record.token_axis == 255 else record.token_axis
        self.name = record.name.decode("latin-1")
        refuse_if(self.byte_order == "big" and not row["both_orders"], "tensor_byte_order")
        self.block_bytes = block_bytes = row["block_bytes"]
        if block_elements > 1:
            refuse_if(not self.shape or self.shape[-1] % block_elements, "tensor_block")
            refuse_if(self.token_axis == len(self.shape) - 1, "tensor_token_axis")
        elements = counted = 1
        for dim in self.shape:
            elements *= dim
            counted *= dim or 1
        self.size = elements // block_elements * block_bytes
        self.counted_size = -(-counted // block_elements) * block_bytes
        self.step = fragment_size or self.size
        self.fragments = -(-self.size // self.step) if self.size else 0
        self.got = {}

    def elements(self):
        """The bits of the elements, most significant digit first."""
        payload = b"".join(self.got[offset] for offset in sorted(self.got))
        size = self.block_bytes
        if self.block_elements == 1 and self.byte_order == "little":
            payload = b"".join(payload[at : at + size][::-1] for at in range(0, len(payload), size))
        return payload.hex()


def shown(kind, raw):
    """An attribute's value as the protocol has it."""
    if kind in ("u64", "i64"):
        return str(int.from_bytes(raw, "little", signed=kind == "i64"))
    if kind == "f64":
        return raw[::-1].hex()
    return raw.decode("ascii") if kind == "text" else raw.hex()


class OpenBundle:
    """A bundle between its head and its end."""

    def __init__(self, header, body, reader, at):
        limits = reader.limits
        self.number = header.bundle_number
        self.minor = header.minor
        self.checksums = not body.payload_checksums_absent
        self.fragment_size = body.fragment_size
        refuse_if(reader.require_checksums and not self.checksums, "checksums_required", at)
        refuse_if(body.tensor_count > limits["tensors"], "limit_tensors", at + 4)
        refuse_if(body.attribute_bytes > limits["attribute_bytes"], "limit_attribute_bytes", at + 12)
        self.tensors = []
        self.attributes = []
        self.tokens = None
        total = fragments = 0
        names = set()
        for record in body.tensors.records:
            refuse_if(record.rank > limits["rank"], "limit_rank")
            refuse_if(record.name_length > limits["name_bytes"], "limit_name")
            refuse_if(any(dim > limits["dimension"] for dim in record.dims), "limit_dimension")
            tensor = Tensor(record, self.fragment_size)
            total += tensor.size
            fragments += tensor.fragments
            refuse_if(max(total, tensor.counted_size) > limits["payload_bytes"], "limit_payload_bytes")
            refuse_if(self.fragment_size % tensor.block_bytes, "fragment_size", at + 16)
            refuse_if(fragments > limits["fragments"], "limit_fragments", at + 16)
            refuse_if(not NAME.issuperset(record.name), "tensor_name")
            refuse_if(record.name in names, "tensor_duplicate")
            names.add(record.name)
            if tensor.token_axis is not None:
                extent = tensor.shape[tensor.token_axis]
                refuse_if(self.tokens not in (None, extent), "token_count")
                self.tokens = extent
            self.tensors.append(tensor)
        self.payload_bytes = total
        self.fragments = fragments
        last = -1
        for record in body.attributes.records:
            kind = record.type.value
            refuse_if(record.key <= last, "attribute_order")
            last = record.key
            refuse_if(record.is_critical and record.key not in KNOWN, "unsupported_attribute")
            known = KNOWN.get(record.key, {"type": TYPES[kind], "length": None})
            refuse_if(TYPES[kind] != known["type"], "attribute_type")
            length = 8 if kind <= 3 else known["length"]
            refuse_if(length not in (None, record.value_length), "attribute_length")
            refuse_if(kind == 5 and any(not 0x20 <= byte <= 0x7E for byte in record.value), "attribute_value")
            if record.key == 0x8006 and self.tokens is not None:
                refuse_if(int.from_bytes(record.value, "little") != self.tokens, "token_count")
            self.attributes.append({"key": record.key, "type": TYPES[kind], "value": shown(TYPES[kind], record.value)})

    def next_place(self):
        """Tensor and offset of the fragment that canonical order demands, or None."""
        for index, tensor in enumerate(self.tensors):
            if len(tensor.got) < tensor.fragments:
                return index, len(tensor.got) * tensor.step
        return None

    def content(self):
        return {
            "number": str(self.number),
            "minor": self.minor,
            "fragment_size": str(self.fragment_size),
            "checksums": self.checksums,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "byte_order": tensor.byte_order,
                    "shape": [str(dim) for dim in tensor.shape],
                    "token_axis": tensor.token_axis,
                    "elements": tensor.elements(),
                }
                for tensor in self.tensors
            ],
            "attributes": self.attributes,
        }


class Reader:
    """Reads an input. ``way``: 'one' bundle, 'core' or 'stream' (section 11)."""

    def __init__(self, parser, stream, way, limits, require_checksums):
        self.parser = parser
        self.stream = stream
        self.way = way
        self.limits = {**LIMITS, **{name: int(value) for name, value in limits.items()}}
        self.require_checksums = require_checksums
        self.open = {}
        #: Content of those that have ended.
        self.bundles = []
        self._buffer = bytearray()
        self._at = 0
        self._header = None

    def _parse(self, kind, data):
        # Kaitai's own refusals: a field that is not as described, or an end too early.
        try:
            return kind(self.stream(BytesIO(data)))
        except (EOFError, ValueError) as error:
            raise Refused("described_otherwise") from error
        except Exception as error:
            if type(error).__module__ == "kaitaistruct":
                raise Refused("described_otherwise") from error
            raise

    def feed(self, piece):
        """Take every frame that is complete. Raises Refused."""
        self._buffer += piece
        while self._buffer:
            at = self._at
            if self.way == "one" and self.bundles:
                self.bundles = []
                raise Refused("trailing_bytes", at)
            if self._header is None:
                if len(self._buffer) < 64:
                    return
                data = bytes(self._buffer[:64])
                header = self._parse(self.parser.FrameHeader, data)
                refuse_if(crc32c(data[:60]) != header.header_crc, "header_crc", at + 60)
                self._header = header, self._check(header, at)
            header, take = self._header
            size = 64 + -(-header.body_length // 64) * 64
            if len(self._buffer) < size:
                return
            frame = bytes(self._buffer[:size])
            del self._buffer[:size]
            opened = self.open.get(header.bundle_number)
            if header.type != self.parser.FrameType.fragment or opened.checksums:
                refuse_if(crc32c(frame[64 : 64 + header.body_length]) != header.body_crc, "body_crc", at + 48)
            take(header, self._parse(self.parser.Frame, frame).body, at)
            self._at += size
            self._header = None

    def finish(self):
        """The input has ended. Raises Refused."""
        missing = self._buffer or self.open or (self.way == "one" and not self.bundles)
        refuse_if(missing, "truncated", self._at + len(self._buffer))

    def _check(self, header, at):
        """Everything that the header alone decides; what is to be done with the frame."""
        types = self.parser.FrameType
        length = header.body_length
        opened = self.open.get(header.bundle_number)
        if header.type == types.head:
            refuse_if(length > self.limits["head_bytes"], "limit_head_bytes", at + 24)
            refuse_if(length < 32 or length % 8, "body_length", at + 24)
            refuse_if(header.field_a, "head_fields", at + 32)
            refuse_if(header.field_b, "head_fields", at + 40)
            refuse_if(opened is not None, "bundle_already_open", at + 16)
            most = self.limits["open_bundles"] if self.way == "stream" else 1
            refuse_if(len(self.open) >= most, "limit_open_bundles", at + 16)
            return self._head
        if header.type not in (types.fragment, types.end):
            refuse_if(header.type & 0x80, "unsupported_frame", at + 8)
        refuse_if(opened is None, "bundle_not_open", at + 16)
        refuse_if(header.minor != opened.minor, "frame_version", at + 14)
        if header.type == types.fragment:
            refuse_if(header.field_a >= len(opened.tensors), "fragment_tensor", at + 32)
            tensor = opened.tensors[header.field_a]
            offset = header.field_b
            refuse_if(offset >= tensor.size or offset % tensor.step, "fragment_offset", at + 40)
            refuse_if(length != min(tensor.step, tensor.size - offset), "fragment_length", at + 24)
            if self.way != "stream":
                refuse_if((header.field_a, offset) != opened.next_place(), "fragment_order", at + 32)
            refuse_if(not opened.checksums and header.body_crc, "payload_crc_present", at + 48)
            return self._fragment
        if header.type == types.end:
            refuse_if(length, "body_length", at + 24)
            refuse_if(opened.next_place() is not None, "fragment_missing", at)
            refuse_if(header.field_a != opened.fragments, "end_fragments", at + 32)
            refuse_if(header.field_b != opened.payload_bytes, "end_payload_bytes", at + 40)
            return self._end
        refuse_if(length > self.limits["extension_bytes"], "limit_extension_bytes", at + 24)
        return lambda header, body, at: None

    def _head(self, header, body, at):
        self.open[header.bundle_number] = OpenBundle(header, body, self, at + 64)

    def _fragment(self, header, body, at):
        tensor = self.open[header.bundle_number].tensors[header.field_a]
        refuse_if(tensor.got.get(header.field_b, body) != body, "fragment_conflict", at + 64)
        refuse_if(tensor.dtype == "bool" and max(body) > 1, "bool_value")
        tensor.got[header.field_b] = body

    def _end(self, header, body, at):
        self.bundles.append(self.open.pop(header.bundle_number).content())


def pieces_of(data, sizes):
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at += size
        turn += 1


def answer(request, parser, stream):
    if request["cmd"] == "hello":
        return {
            "protocol": 1,
            "name": "Kaitai Struct",
            "language": "Python",
            "version": "1.0",
            "classes": ["one", "core", "stream"],
            "dtypes": [row["name"] for row in DTYPES.values()],
            "judged": "content",
        }
    if request["cmd"] == "stop":
        return {}
    if request["cmd"] not in ("decode", "stream"):
        return {"skipped": "it only reads"}
    if request.get("contract") is not None:
        return {"skipped": "it compares no contracts"}
    reader = Reader(
        parser, stream, request["class"], request.get("limits", {}), request.get("require_checksums", False)
    )
    data = bytes.fromhex(request["data"])
    try:
        for piece in pieces_of(data, request.get("pieces") or [len(data)]):
            reader.feed(piece)
        reader.finish()
    except Refused as refused:
        error = {"name": refused.name, "number": ERRORS.get(refused.name, 0), "offset": refused.offset}
        return {"bundles": reader.bundles, "error": error}
    return {"bundles": reader.bundles}


def main():
    from kaitaistruct import KaitaiStream

    # By its place: there is another package of that name.
    place = importlib.util.spec_from_file_location("described", Path(sys.argv[1]) / "boundary_bundle.py")
    described = importlib.util.module_from_spec(place)
    place.loader.exec_module(described)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            told = answer(request, described.BoundaryBundle, KaitaiStream)
        except Exception as error:
            told = {"failed": repr(error)}
        print(json.dumps({"seq": request["seq"], **told}), flush=True)
        if request["cmd"] == "stop":
            return


if __name__ == "__main__":
    main()
