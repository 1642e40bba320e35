meta:
  id: boundary_bundle
  title: Boundary bundle, version 1
  file-extension: bbdb
  license: MIT
  ks-version: "0.11"
  endian: le
doc: |
  The tensors that one layer shard of a language model hands to the next. This file describes
  where the fields of a datastream lie, for hex viewers, parsers in other languages and
  whoever learns better from a table than from prose. The specification decides.

  Stated here: every offset, width and size, reserved fields, padding, and the range of a
  field. Left to the reader's own code: CRC32C of headers and bodies, limits, body_length,
  field_a and field_b by frame type, critical types and keys that are unknown, which fragments
  tile which tensor, order of frames and of keys, uniqueness of names, the alphabets of names
  and texts, what a dtype asks of byte order, dimensions, token axis and fragment size, products
  of dimensions, type and length of attributes, the token count, values of bools, contracts,
  and the order in which errors are found. A body is parsed as soon as it is there, so check
  header_crc and the limits on a frame_header of your own first.
doc-ref: boundary-bundle.md
seq:
  - id: frames
    type: frame
    repeat: eos
types:
  frame:
    doc: Section 2. Begins on a multiple of 64 bytes.
    seq:
      - id: header
        type: frame_header
      - id: body
        size: header.body_length
        type:
          switch-on: header.type
          cases:
            'frame_type::head': head_body
        doc: A head's records; else payload, nothing, or the bytes of an extension.
      - id: padding
        type: u1
        valid: 0
        repeat: expr
        repeat-expr: (64 - header.body_length % 64) % 64
  frame_header:
    doc: Section 2.1, 64 bytes, the same in every major version.
    seq:
      - id: magic
        contents: [0x89, BDB, 0x0d, 0x0a, 0x1a, 0x0a]
      - id: type
        type: u1
        enum: frame_type
      - id: flags
        type: u1
        valid:
          expr: _ & 0x0f == 0
        doc: Bits 4 to 7 are ignorable.
      - id: reserved
        type: u2
        valid: 0
      - id: major
        type: u2
        valid: 1
      - id: minor
        type: u2
      - id: bundle_number
        type: u8
      - id: body_length
        type: u8
      - id: field_a
        type: u8
        doc: "Head: 0. Fragment: tensor index. End: number of fragments."
      - id: field_b
        type: u8
        doc: "Head: 0. Fragment: payload offset. End: payload bytes of all tensors."
      - id: body_crc
        type: u4
        doc: CRC32C of the body without its padding.
      - id: reserved_2
        size: 8
        contents: [0, 0, 0, 0, 0, 0, 0, 0]
      - id: header_crc
        type: u4
        doc: CRC32C of the 60 bytes before it.
  head_body:
    doc: Section 3.
    seq:
      - id: head_flags
        type: u4
        valid:
          expr: _ & 0xfffe == 0
        doc: Bit 0, payloads carry no checksums. Bits 16 to 31 are ignorable.
      - id: tensor_count
        type: u4
      - id: attribute_count
        type: u4
      - id: attribute_bytes
        type: u4
        valid:
          expr: _ % 8 == 0 and _ <= _io.size - 32
      - id: fragment_size
        type: u8
        valid:
          expr: _ % 64 == 0
        doc: 0, one fragment a tensor.
      - id: reserved
        size: 8
        contents: [0, 0, 0, 0, 0, 0, 0, 0]
      - id: tensors
        type: tensor_table
        size: _io.size - 32 - attribute_bytes
      - id: attributes
        type: attribute_block
        size: attribute_bytes
    instances:
      payload_checksums_absent:
        value: head_flags & 1 == 1
  tensor_table:
    seq:
      - id: records
        type: tensor_record
        repeat: expr
        repeat-expr: _parent.tensor_count
      - id: rest
        size-eos: true
        valid:
          expr: _.length == 0
  tensor_record:
    doc: Section 3.1.
    seq:
      - id: dtype
        type: u1
        enum: dtype
        valid:
          in-enum: true
      - id: byte_order
        type: u1
        enum: byte_order
        valid:
          in-enum: true
      - id: rank
        type: u1
        valid:
          max: 8
      - id: token_axis
        type: u1
        valid:
          expr: _ == 255 or _ < rank
        doc: 255, none.
      - id: name_length
        type: u1
        valid:
          min: 1
          max: 63
      - id: reserved
        contents: [0, 0, 0]
      - id: dims
        type: u8
        repeat: expr
        repeat-expr: rank
        doc: Elements, outermost first.
      - id: name
        size: name_length
        doc: ASCII letters, digits, and any of . _ - /
      - id: padding
        type: u1
        valid: 0
        repeat: expr
        repeat-expr: (8 - name_length % 8) % 8
  attribute_block:
    seq:
      - id: records
        type: attribute_record
        repeat: expr
        repeat-expr: _parent.attribute_count
      - id: rest
        size-eos: true
        valid:
          expr: _.length == 0
  attribute_record:
    doc: Section 3.2. Records stand by ascending key.
    seq:
      - id: key
        type: u2
        valid:
          expr: _ & 0x3fff != 0
        doc: Bit 15, critical. Bit 14, private use.
      - id: type
        type: u1
        enum: attribute_type
        valid:
          in-enum: true
      - id: reserved
        type: u1
        valid: 0
      - id: value_length
        type: u4
        valid:
          expr: _ <= _io.size - _io.pos
        doc: Looked at here because a runtime with 32-bit lengths would take 2^31 for less than 0.
      - id: value
        size: value_length
        doc: Numbers are little-endian and 8 bytes long; a text holds bytes 0x20 to 0x7e.
      - id: padding
        type: u1
        valid: 0
        repeat: expr
        repeat-expr: (8 - value_length % 8) % 8
    instances:
      is_critical:
        value: key & 0x8000 != 0
      is_private:
        value: key & 0x4000 != 0
enums:
  frame_type:
    0x81: head
    0x82: fragment
    0x83: end
  byte_order:
    1: little
    2: big
  dtype:
    1: f64
    2: f32
    3: f16
    4: bf16
    5: f8_e4m3fn
    6: f8_e5m2
    16: i8
    17: i16
    18: i32
    19: i64
    24: u8
    25: u16
    26: u32
    27: u64
    32: bool
    64: q8_0
  attribute_type:
    1: u64
    2: i64
    3: f64
    4: bytes
    5: text
  attribute_key:
    0x0002: architecture
    0x0009: recipe_fingerprint
    0x8001: model_fingerprint
    0x8003: layer_start
    0x8004: layer_end
    0x8005: n_layer
    0x8006: n_tokens
    0x8007: n_seqs
    0x8008: contract_fingerprint
