"use strict";
// A testee over the JavaScript parser that Kaitai Struct makes of boundary_bundle.ksy.
//
//     node kaitai_testee.js DIR
//
// DIR holds the compiled BoundaryBundle.js; the npm package kaitai-struct is needed and
// nothing else (NODE_PATH says where it lies). Where fields lie, and what one field or one
// record alone must satisfy, is known from the description only; codes, sizes and limits from
// ../../registry.json. What Kaitai cannot say stands here: CRCs, limits, order and tiling,
// names, payload sizes. So it finds every fault, but not always the first one first (in its
// hello: "judged").
const fs = require("fs");
const path = require("path");
const readline = require("readline");
const KaitaiStream = require("kaitai-struct/KaitaiStream");

// The runtime reads 64-bit integers as doubles. Here they know their exact value besides.
class Wide extends Number {
  constructor(exact) {
    super(exact);
    this.exact = exact;
  }
}
KaitaiStream.prototype.readU8le = function () {
  const low = this.readU4le();
  return new Wide((BigInt(this.readU4le()) << 32n) | BigInt(low));
};
const { BoundaryBundle } = require(path.resolve(process.argv[2], "BoundaryBundle.js"));
const { FrameType } = BoundaryBundle;

const REGISTRY = JSON.parse(fs.readFileSync(path.join(__dirname, "..", "..", "registry.json"), "utf8"));
const byKey = (rows, key, value = (row) => row) => new Map(rows.map((row) => [row[key], value(row)]));
const DTYPES = byKey(REGISTRY.dtypes, "code");
const TYPES = new Map(Object.entries(REGISTRY.attribute_types).map(([name, code]) => [code, name]));
const KNOWN = byKey(REGISTRY.attributes, "key");
// The largest defaults fit a double; limits that a request gives are text.
const LIMITS = byKey(REGISTRY.limits, "name", (row) => BigInt(row.default));
const ERRORS = byKey(REGISTRY.errors, "name", (row) => row.number);

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, crc) => {
  for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  return crc >>> 0;
});

function crc32c(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 255];
  return (crc ^ 0xffffffff) >>> 0;
}

// An error of the format: its name, and its offset where that is known here.
class Refused extends Error {
  constructor(name, offset = null) {
    super(name);
    this.refusal = name;
    this.offset = offset;
  }
}

function refuseIf(condition, name, offset) {
  if (condition) throw new Refused(name, offset);
}

const over = (value, unit) => (value + unit - 1n) / unit;

// What a record says of a tensor, and the fragments that came.
function tensorOf(record, fragmentSize) {
  const row = DTYPES.get(record.dtype);
  const [blockElements, blockBytes] = [BigInt(row.block_elements), BigInt(row.block_bytes)];
  const shape = record.dims.map((dim) => dim.exact);
  const axis = record.tokenAxis === 255 ? null : record.tokenAxis;
  const big = record.byteOrder === BoundaryBundle.ByteOrder.BIG;
  refuseIf(big && !row.both_orders, "tensor_byte_order");
  if (blockElements > 1n) {
    refuseIf(shape.length === 0 || shape[shape.length - 1] % blockElements !== 0n, "tensor_block");
    refuseIf(axis === shape.length - 1, "tensor_token_axis");
  }
  const size = (shape.reduce((product, dim) => product * dim, 1n) / blockElements) * blockBytes;
  const counted = shape.reduce((product, dim) => product * (dim || 1n), 1n);
  const step = fragmentSize || size;
  return {
    name: Buffer.from(record.name).toString("latin1"),
    dtype: row.name,
    quantised: blockElements > 1n,
    order: big ? "big" : "little",
    shape,
    axis,
    blockBytes,
    size,
    countedSize: over(counted, blockElements) * blockBytes,
    step,
    fragments: size ? over(size, step) : 0n,
    got: new Map(),
  };
}

// The bits of the elements, most significant digit first.
function elements({ got, blockBytes, quantised, order }) {
  const parts = [...got].sort(([a], [b]) => (a < b ? -1 : 1));
  const payload = Buffer.concat(parts.map(([, bytes]) => bytes));
  if (!quantised && order === "little" && blockBytes > 1n) payload[`swap${blockBytes * 8n}`]();
  return payload.toString("hex");
}

// An attribute's value as the protocol has it.
function shown(kind, raw) {
  if (kind === "u64") return String(raw.readBigUInt64LE());
  if (kind === "i64") return String(raw.readBigInt64LE());
  if (kind === "f64") return raw.swap64().toString("hex");
  return raw.toString(kind === "text" ? "latin1" : "hex");
}

// A bundle between its head and its end.
class OpenBundle {
  constructor(header, body, reader, at) {
    const { limits } = reader;
    this.number = header.bundleNumber.exact;
    this.minor = header.minor;
    this.checksums = !body.payloadChecksumsAbsent;
    this.fragmentSize = body.fragmentSize.exact;
    refuseIf(reader.requireChecksums && !this.checksums, "checksums_required", at);
    refuseIf(BigInt(body.tensorCount) > limits.get("tensors"), "limit_tensors", at + 4);
    refuseIf(BigInt(body.attributeBytes) > limits.get("attribute_bytes"), "limit_attribute_bytes", at + 12);
    // The description's own check looked at a double.
    refuseIf(this.fragmentSize % 64n, "fragment_size", at + 16);
    this.tensors = [];
    this.payloadBytes = 0n;
    this.fragments = 0n;
    let tokens = null;
    const names = new Set();
    for (const record of body.tensors.records) {
      refuseIf(BigInt(record.rank) > limits.get("rank"), "limit_rank");
      refuseIf(BigInt(record.nameLength) > limits.get("name_bytes"), "limit_name");
      refuseIf(record.dims.some((dim) => dim.exact > limits.get("dimension")), "limit_dimension");
      const tensor = tensorOf(record, this.fragmentSize);
      this.payloadBytes += tensor.size;
      this.fragments += tensor.fragments;
      const most = limits.get("payload_bytes");
      refuseIf(this.payloadBytes > most || tensor.countedSize > most, "limit_payload_bytes");
      refuseIf(this.fragmentSize % tensor.blockBytes, "fragment_size", at + 16);
      refuseIf(this.fragments > limits.get("fragments"), "limit_fragments", at + 16);
      refuseIf(!/^[A-Za-z0-9._\/-]+$/.test(tensor.name), "tensor_name");
      refuseIf(names.has(tensor.name), "tensor_duplicate");
      names.add(tensor.name);
      if (tensor.axis !== null) {
        const extent = tensor.shape[tensor.axis];
        refuseIf(tokens !== null && tokens !== extent, "token_count");
        tokens = extent;
      }
      this.tensors.push(tensor);
    }
    this.attributes = [];
    let last = -1;
    for (const { key, type, isCritical, value } of body.attributes.records) {
      refuseIf(key <= last, "attribute_order");
      last = key;
      refuseIf(isCritical && !KNOWN.has(key), "unsupported_attribute");
      const known = KNOWN.get(key) || { type: TYPES.get(type), length: null };
      refuseIf(TYPES.get(type) !== known.type, "attribute_type");
      const length = type <= 3 ? 8 : known.length;
      refuseIf(length !== null && value.length !== length, "attribute_length");
      refuseIf(type === 5 && value.some((byte) => byte < 0x20 || byte > 0x7e), "attribute_value");
      if (key === 0x8006 && tokens !== null) {
        refuseIf(Buffer.from(value).readBigUInt64LE() !== tokens, "token_count");
      }
      this.attributes.push({ key, type: TYPES.get(type), value: shown(TYPES.get(type), Buffer.from(value)) });
    }
  }

  // Tensor and offset of the fragment that canonical order demands, or null.
  nextPlace() {
    const index = this.tensors.findIndex((tensor) => BigInt(tensor.got.size) < tensor.fragments);
    if (index < 0) return null;
    const { got, step } = this.tensors[index];
    return [index, BigInt(got.size) * step];
  }

  content() {
    return {
      number: String(this.number),
      minor: this.minor,
      fragment_size: String(this.fragmentSize),
      checksums: this.checksums,
      tensors: this.tensors.map((tensor) => ({
        name: tensor.name,
        dtype: tensor.dtype,
        byte_order: tensor.order,
        shape: tensor.shape.map(String),
        token_axis: tensor.axis,
        elements: elements(tensor),
      })),
      attributes: this.attributes,
    };
  }
}

// Reads an input. `way`: "one" bundle, "core" or "stream" (section 11).
class Reader {
  constructor(way, limits, requireChecksums) {
    this.way = way;
    this.limits = new Map(LIMITS);
    for (const [name, value] of Object.entries(limits)) this.limits.set(name, BigInt(value));
    this.requireChecksums = requireChecksums;
    this.open = new Map();
    // Content of those that have ended.
    this.bundles = [];
    this.pieces = [];
    this.buffered = 0;
    this.at = 0;
    this.header = null;
    this.wanted = 64;
  }

  // Kaitai's own refusals: a field that is not as described, or an end too early.
  parse(Kind, bytes) {
    try {
      return new Kind(new KaitaiStream(bytes));
    } catch (error) {
      if (!/^(Validation\w*|EOF)Error$/.test(error.name)) throw error;
      throw new Refused("described_otherwise");
    }
  }

  // Takes every frame that is complete. Throws Refused.
  feed(piece) {
    this.pieces.push(piece);
    this.buffered += piece.length;
    while (this.buffered) {
      const { at } = this;
      if (this.way === "one" && this.bundles.length) {
        this.bundles = [];
        throw new Refused("trailing_bytes", at);
      }
      if (BigInt(this.buffered) < BigInt(this.wanted)) return;
      const data = Buffer.concat(this.pieces);
      this.pieces = [data];
      if (this.header === null) {
        const header = this.parse(BoundaryBundle.FrameHeader, data.subarray(0, 64));
        refuseIf(crc32c(data.subarray(0, 60)) !== header.headerCrc, "header_crc", at + 60);
        this.header = { header, take: this.check(header, at) };
        this.wanted = 64n + over(header.bodyLength.exact, 64n) * 64n;
        continue;
      }
      const { header, take } = this.header;
      const size = Number(this.wanted);
      const body = data.subarray(64, 64 + Number(header.bodyLength.exact));
      if (header.type !== FrameType.FRAGMENT || this.open.get(header.bundleNumber.exact).checksums) {
        refuseIf(crc32c(body) !== header.bodyCrc, "body_crc", at + 48);
      }
      take(this.parse(BoundaryBundle.Frame, data.subarray(0, size)).body);
      this.pieces = [data.subarray(size)];
      this.buffered -= size;
      this.at += size;
      this.header = null;
      this.wanted = 64;
    }
  }

  // The input has ended. Throws Refused.
  finish() {
    const missing = this.buffered || this.open.size || (this.way === "one" && !this.bundles.length);
    refuseIf(missing, "truncated", this.at + this.buffered);
  }

  // Everything that the header alone decides; returns what is to be done with the body.
  check(header, at) {
    const { type, minor, bodyCrc } = header;
    const [number, length, a, b] = ["bundleNumber", "bodyLength", "fieldA", "fieldB"].map((name) => header[name].exact);
    const opened = this.open.get(number);
    if (type === FrameType.HEAD) {
      refuseIf(length > this.limits.get("head_bytes"), "limit_head_bytes", at + 24);
      refuseIf(length < 32n || length % 8n, "body_length", at + 24);
      refuseIf(a, "head_fields", at + 32);
      refuseIf(b, "head_fields", at + 40);
      refuseIf(opened, "bundle_already_open", at + 16);
      const most = this.way === "stream" ? this.limits.get("open_bundles") : 1n;
      refuseIf(BigInt(this.open.size) >= most, "limit_open_bundles", at + 16);
      return (body) => this.open.set(number, new OpenBundle(header, body, this, at + 64));
    }
    const extension = type !== FrameType.FRAGMENT && type !== FrameType.END;
    refuseIf(extension && type & 0x80, "unsupported_frame", at + 8);
    refuseIf(!opened, "bundle_not_open", at + 16);
    refuseIf(minor !== opened.minor, "frame_version", at + 14);
    if (extension) {
      refuseIf(length > this.limits.get("extension_bytes"), "limit_extension_bytes", at + 24);
      return () => {};
    }
    if (type === FrameType.END) {
      refuseIf(length, "body_length", at + 24);
      refuseIf(opened.nextPlace(), "fragment_missing", at);
      refuseIf(a !== opened.fragments, "end_fragments", at + 32);
      refuseIf(b !== opened.payloadBytes, "end_payload_bytes", at + 40);
      return () => {
        this.open.delete(number);
        this.bundles.push(opened.content());
      };
    }
    refuseIf(a >= BigInt(opened.tensors.length), "fragment_tensor", at + 32);
    const tensor = opened.tensors[Number(a)];
    refuseIf(b >= tensor.size || b % tensor.step, "fragment_offset", at + 40);
    const left = tensor.size - b;
    refuseIf(length !== (left < tensor.step ? left : tensor.step), "fragment_length", at + 24);
    if (this.way !== "stream") {
      const next = opened.nextPlace();
      refuseIf(!next || BigInt(next[0]) !== a || next[1] !== b, "fragment_order", at + 32);
    }
    refuseIf(!opened.checksums && bodyCrc, "payload_crc_present", at + 48);
    return (body) => {
      const before = tensor.got.get(b);
      refuseIf(before && Buffer.compare(before, body), "fragment_conflict", at + 64);
      refuseIf(tensor.dtype === "bool" && body.some((byte) => byte > 1), "bool_value");
      tensor.got.set(b, body);
    };
  }
}

function* piecesOf(data, sizes) {
  for (let at = 0, turn = 0; at < data.length; turn++) {
    const size = sizes[turn % sizes.length];
    yield data.subarray(at, at + size);
    at += size;
  }
}

function answer(request) {
  if (request.cmd === "hello") {
    return {
      protocol: 1,
      name: "Kaitai Struct",
      language: "JavaScript",
      version: "1.0",
      classes: ["one", "core", "stream"],
      dtypes: REGISTRY.dtypes.map((row) => row.name),
      judged: "content",
    };
  }
  if (request.cmd === "stop") return {};
  if (request.cmd !== "decode" && request.cmd !== "stream") return { skipped: "it only reads" };
  if (request.contract) return { skipped: "it compares no contracts" };
  const reader = new Reader(request.class, request.limits || {}, request.require_checksums === true);
  const data = Buffer.from(request.data, "hex");
  const sizes = request.pieces && request.pieces.length ? request.pieces : [data.length];
  try {
    for (const piece of piecesOf(data, sizes)) reader.feed(piece);
    reader.finish();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    const number = ERRORS.get(error.refusal) || 0;
    return { bundles: reader.bundles, error: { name: error.refusal, number, offset: error.offset } };
  }
  return { bundles: reader.bundles };
}

readline.createInterface({ input: process.stdin, crlfDelay: Infinity }).on("line", (line) => {
  const request = JSON.parse(line);
  let told;
  try {
    told = answer(request);
  } catch (error) {
    told = { failed: String(error.stack) };
  }
  const text = JSON.stringify({ seq: request.seq, ...told }) + "\n";
  process.stdout.write(text, () => {
    if (request.cmd === "stop") process.exit(0);
  });
});
