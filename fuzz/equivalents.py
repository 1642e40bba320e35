"""Mutants that nothing can notice, each with its reason.

A note stands for a mutation by file, function, what stood there and what stands there now, as ``fuzz/mutants.py
--json`` writes them. A note on what the source does not have any more, and on what is noticed, fails ``make mutants``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Note:
    file: str
    function: str
    old: str
    new: str
    reason: str

    @property
    def language(self) -> str:
        return "python" if self.file.endswith(".py") else "c"

    def told(self) -> str:
        return f"{self.file} {self.function}: `{self.old}` as `{self.new}`"


#: (file, function, reason, mutations)
_TABLE: Final[tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...]] = (
    (
        "boundary_bundle/decoder.py",
        "check_head",
        "every size here is a multiple of 8, and so is what it is compared with: a bound of one more asks the same",
        (
            ("attribute_bytes > length - _HEAD", "attribute_bytes > length - _HEAD + 1"),
            ("r + _TENSOR > table_end", "r + _TENSOR > table_end + 1"),
            ("record_end > table_end", "record_end > table_end + 1"),
            ("s + _ATTRIBUTE > end", "s + _ATTRIBUTE > end + 1"),
            ("record_end > end", "record_end > end + 1"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "check_head",
        "changes the words of an error's sentence, and not its number, place or names",
        (
            ("choice row.both_orders", "choice False"),
            ("choice row.both_orders", "choice not row.both_orders"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Open._next_tensor",
        "a last tensor without bytes takes no fragment: B31 refuses it before the order is asked",
        (("self.next_index < len(tensors)", "self.next_index < len(tensors) - 1"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Open.bundle",
        (
            "changes how many bytes are copied or held at a time, which tests/test_memory.py measures, and not what "
            "they are"
        ),
        (
            ("if release and info.payload_bytes > _STEP", "if False"),
            ("release and .. info.payload_bytes > _STEP", "release or .. info.payload_bytes > _STEP"),
            ("info.payload_bytes > _STEP", "info.payload_bytes >= _STEP"),
            ("info.payload_bytes > _STEP", "info.payload_bytes > _STEP + 1"),
            ("and: release", "left out"),
            ("and: info.payload_bytes > _STEP", "left out"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Engine._check_head_header",
        "every size here is a multiple of 8, and so is what it is compared with: a bound of one more asks the same",
        (("length < _HEAD", "length < _HEAD - 1"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Engine._check_fragment_header",
        "changes the words of an error's sentence, and not its number, place or names",
        (
            ("choice grid [3]", "choice False"),
            ("choice grid [3]", "choice not grid"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Engine._take_fragment",
        (
            "changes how many bytes are copied or held at a time, which tests/test_memory.py measures, and not what "
            "they are"
        ),
        (
            ("len(body) < keep", "len(body) <= keep"),
            ("len(body) < keep", "len(body) < keep - 1"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "_bytes_view",
        "a read-only view of a read-only view is one",
        (("choice view.readonly", "choice False"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "_decode_plain",
        "the fast path gives the bundle up, and the engine decodes it with the same result",
        (
            ("size < 3 * _HEADER", "size <= 3 * _HEADER"),
            ("size < 3 * _HEADER", "size < 3 * _HEADER - 1"),
            ("length < _HEAD", "length <= _HEAD"),
            ("length < _HEAD", "length < _HEAD - 1"),
            ("length > limits.head_bytes", "length >= limits.head_bytes"),
            ("pos + _HEADER > size", "pos + _HEADER >= size"),
            (
                "length & 63 and .. bytes(view[_HEADER + length:pos]) != _ZEROS[length & 63]",
                "length & 63 or .. bytes(view[_HEADER + length:pos]) != _ZEROS[length & 63]",
            ),
            ("frame_end + _HEADER > size", "frame_end + _HEADER >= size"),
            (
                "body_end != frame_end and .. bytes(view[body_end:frame_end]) != _ZEROS[length & 63]",
                "body_end != frame_end or .. bytes(view[body_end:frame_end]) != _ZEROS[length & 63]",
            ),
            (
                "row is _BOOL and .. np.frombuffer(body, np.uint8).max() > 1",
                "row is _BOOL or .. np.frombuffer(body, np.uint8).max() > 1",
            ),
            ("np.frombuffer(body, np.uint8).max() > 1", "np.frombuffer(body, np.uint8).max() >= 1"),
            ("and: length & 63", "left out"),
            ("and: bytes(view[_HEADER + length:pos]) != _ZEROS[length & 63]", "left out"),
            ("and: body_end != frame_end", "left out"),
            ("and: bytes(view[body_end:frame_end]) != _ZEROS[length & 63]", "left out"),
            ("and: row is _BOOL", "left out"),
            ("and: np.frombuffer(body, np.uint8).max() > 1", "left out"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "decode",
        "the fast path gives the bundle up, and the engine decodes it with the same result",
        (("if bundle is not None", "if False"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Growing.add",
        (
            "changes how many bytes are copied or held at a time, which tests/test_memory.py measures, and not what "
            "they are"
        ),
        (
            ("end > self.array.size", "end >= self.array.size"),
            ("end > self.array.size", "end > self.array.size + 1"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "_assemble",
        (
            "changes how many bytes are copied or held at a time, which tests/test_memory.py measures, and not what "
            "they are"
        ),
        (
            ("if held >= _STEP", "if False"),
            ("held >= _STEP", "held > _STEP"),
            ("held >= _STEP", "held >= _STEP - 1"),
            ("choice len(batch) > 1", "choice False"),
            ("len(batch) > 1", "len(batch) >= 1"),
            ("len(batch) > 1", "len(batch) > 1 + 1"),
        ),
    ),
    (
        "boundary_bundle/decoder.py",
        "Decoder.feed",
        (
            "changes how many bytes are copied or held at a time, which tests/test_memory.py measures, and not what "
            "they are"
        ),
        (("choice type(data) is bytes", "choice False"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "Decoder._feed",
        (
            "changes how many bytes are copied or held at a time, which tests/test_memory.py measures, and not what "
            "they are"
        ),
        (
            ("if engine.need > _STEP", "if False"),
            ("engine.need > _STEP", "engine.need >= _STEP"),
            ("engine.need > _STEP", "engine.need > _STEP + 1"),
            ("choice size > _HEADER", "choice False"),
            ("size > _HEADER", "size > _HEADER + 1"),
        ),
    ),
    (
        "boundary_bundle/contract.py",
        "_Sum.__init__",
        "a number of twenty digits is not below 2^63, and is refused by its value",
        (("len(term) < 20", "len(term) <= 20"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "check_head",
        "without a dimension of 0 both products are the same",
        (("or: elements", "left out"),),
    ),
    (
        "boundary_bundle/decoder.py",
        "_Engine.run",
        "the condition tells mypy what the ones before it ensure",
        (
            ("and: state is not None", "left out"),
            ("and: state is not None [2]", "left out"),
            ("and: state is not None [3]", "left out"),
        ),
    ),
    (
        "boundary_bundle/contract.py",
        "Contract._values",
        "n_tokens is registered as u64, so its value is a number",
        (("and: isinstance(record.value, int)", "left out"),),
    ),
    (
        "boundary_bundle/contract.py",
        "Contract.compare",
        "changes the words of an error's sentence, and not its number, place or names",
        (
            ("if values", "if False"),
            ("if values", "if not values"),
            ("choice rule.token_axis is None", "choice False"),
            ("choice tensor.token_axis is None", "choice False"),
            ("rule.token_axis is None", "rule.token_axis is not None"),
            ("tensor.token_axis is None", "tensor.token_axis is not None"),
        ),
    ),
    (
        "boundary_bundle/dtypes.py",
        "from_payload",
        "an element of one byte has no order but little, which is this machine's",
        (("or: size == 1", "left out"),),
    ),
    (
        "boundary_bundle/dtypes.py",
        "from_payload",
        "an array of bytes is aligned wherever it lies",
        (("or: size == 1 [2]", "left out"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "_frames",
        "decides which forms are kept, to bound memory: what has none goes through the ordinary decoder",
        (
            ("_Frame(data, 0).length > _MOST_HEAD_BYTES", "_Frame(data, 0).length >= _MOST_HEAD_BYTES"),
            ("_Frame(data, 0).length > _MOST_HEAD_BYTES", "_Frame(data, 0).length > _MOST_HEAD_BYTES + 1"),
        ),
    ),
    (
        "boundary_bundle/prepared.py",
        "_frames",
        "frames are whole, so the end is never a byte away",
        (("at < len(data)", "at < len(data) - 1"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "_value_slots",
        "a value of no bytes is a slot of none",
        (("and: length", "left out"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "_DecoderForm.__init__",
        "whether the array is a view at once or by from_payload, which makes the same one",
        (
            (
                "tensor.row.numpy.itemsize == 1 or .. tensor.byte_order == NATIVE_ORDER",
                "tensor.row.numpy.itemsize == 1 and .. tensor.byte_order == NATIVE_ORDER",
            ),
            ("or: tensor.row.numpy.itemsize == 1", "left out"),
            ("or: tensor.byte_order == NATIVE_ORDER", "left out"),
        ),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder.decode",
        "a view of the same bytes",
        (("choice type(buffer) is bytes", "choice False"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder.decode",
        "when a form gives way to another changes only how often the fast path is taken",
        (
            ("or: form.misses >= _PATIENCE", "left out"),
            ("form.misses >= _PATIENCE", "form.misses > _PATIENCE"),
            ("form.misses >= _PATIENCE", "form.misses >= _PATIENCE - 1"),
        ),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder._learn",
        "decides which forms are kept, to bound memory: what has none goes through the ordinary decoder",
        (
            ("and: len(view) not in self._forms", "left out"),
            ("len(self._forms) >= _MOST_FORMS", "len(self._forms) >= _MOST_FORMS - 1"),
        ),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder._fast",
        "slices of the buffer itself are copies of the same bytes",
        (
            ("choice type(view) is bytes", "choice False"),
            ("type(view) is bytes", "type(view) is not bytes"),
        ),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder._fast",
        "from_payload makes the same view",
        (("if direct", "if False"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder._fast",
        "without checksums the place is that of a fixed piece, which is no number: the bundle is given up",
        (("and: body_crc", "left out"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder._fast",
        "one body joined is itself, and is copied anyway",
        (("if len(bodies) == 1", "if False"),),
    ),
    (
        "boundary_bundle/prepared.py",
        "PreparedDecoder._fast",
        "gives the bundle up, and the ordinary decoder decodes it with the same result",
        (
            (
                "boolean and .. any((bytes(whole[a:b]).translate(None, _BOOL_BYTES) for a, b in bodies))",
                "boolean or .. any((bytes(whole[a:b]).translate(None, _BOOL_BYTES) for a, b in bodies))",
            ),
            ("and: boolean", "left out"),
            ("and: any((bytes(whole[a:b]).translate(None, _BOOL_BYTES) for a, b in bodies))", "left out"),
            ("array.view(np.uint8).max() > 1", "array.view(np.uint8).max() >= 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "multiply",
        (
            "a is never 0, since elements begin at 1 and a dimension of 0 counts as 1; the first condition only "
            "spares the division"
        ),
        (
            ("(a | b) >> 32 != 0 && a != 0", "(a | b) >> 32 != 0 || a != 0"),
            ("&& a != 0", "left out"),
            ("(a | b) >> 32 != 0 &&", "left out"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "multiply",
        "a product so near 2^64 that only >= refuses it is over every limit of payload_bytes, with the same error",
        (("b > UINT64_MAX / a", "b >= UINT64_MAX / a"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "first_not_bool",
        "eight bytes at a time only save time: the loop after it looks at each",
        (
            ("n - i >= 8", "n - i > 8"),
            ("n - i >= 8", "n - i >= 8 - 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "reverse",
        (
            "payloads, fragments and copied pieces are whole elements, so i + size never passes the end by less than "
            "an element"
        ),
        (
            ("i + 2 <= bytes", "i + 2 <= bytes + 1"),
            ("i + 4 <= bytes", "i + 4 <= bytes + 1"),
            ("i + 8 <= bytes", "i + 8 <= bytes + 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "smaller",
        "of two equal numbers either is the smaller",
        (("a < b", "a <= b"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_config_init",
        "both checksums give the same bits, to which the codec's tests hold them",
        (("if (has_crc_instructions())", "if (false)"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "record_bytes",
        "a product with a 0 in it is 0 without the short cut",
        (("if (dim == 0)", "if (false)"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "seek",
        "a cursor at its place that begins again comes to that place",
        (("index < c->index", "index <= c->index"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_fragment_header",
        "names the tensor in an error that is not returned",
        (("r != BB_OK &&", "left out"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_header",
        "a length is a multiple of 8, which the other condition says, so at least 31 is at least 32",
        (("f->length < HEAD_FIXED", "f->length < HEAD_FIXED - 1"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "begin_head",
        (
            "how wide the filter of names is, and which bits are set before the first, changes how often names are "
            "compared and not what comes of it"
        ),
        (
            ("tensor_count > 16", "tensor_count >= 16"),
            ("tensor_count > 16", "tensor_count > 16 + 1"),
            ("if (h->wide)", "if (false)"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_head_fixed",
        "every size here is a multiple of 8, and so is what it is compared with: a bound of one more asks the same",
        (("attribute_bytes > length - HEAD_FIXED", "attribute_bytes > length - HEAD_FIXED + 1"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "seen_before",
        "a hash over fewer bytes makes names be compared more often, with the same result",
        (("i < length", "i < length - 1"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "seen_before",
        "without the filter each name is compared with all before it, with the same result",
        (("hit &&", "left out"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_tensor",
        "every size here is a multiple of 8, and so is what it is compared with: a bound of one more asks the same",
        (
            ("end - at < RECORD_FIXED", "end - at < RECORD_FIXED - 1"),
            ("*size > end - at", "*size > end - at + 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_tensor",
        "a block has 1 element or 32",
        (("d->block_elements > 1", "d->block_elements > 1 + 1"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_tensor",
        "0 leaves no rest whatever it is divided by",
        (("h->fragment_size != 0 &&", "left out"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_tensor",
        "name_is_plain said that something is wrong and the name is right, so a byte of the padding is not zero",
        (("i < zeros", "i <= zeros"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_head",
        "every size here is a multiple of 8, and so is what it is compared with: a bound of one more asks the same",
        (
            ("end - at < RECORD_FIXED", "end - at < RECORD_FIXED - 1"),
            ("size > end - at", "size > end - at + 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_frame",
        "where the checksum does not count, B34 holds the field to 0, and the sum that was not made is 0",
        (("checksum_counts(f, b) &&", "left out"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_tensor_read",
        (
            "dtypes with one byte order are little-endian, as the machines that this runs on; make test-s390x in "
            "native_shim runs the tests on one that is not"
        ),
        (("d->both_orders &&", "left out"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "fail_names",
        "bb_tensor_at refuses an index behind the last and leaves the name before it, which the contract has",
        (("i < b->tensor_count", "i <= b->tensor_count"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "fail_names",
        (
            "no name is missing, none is extra and none stands twice, so both have as many, and two orders differ in "
            "a place before the last"
        ),
        (
            ("i < b->tensor_count [2]", "i <= b->tensor_count"),
            ("i < b->tensor_count [2]", "i < b->tensor_count - 1"),
            ("i < b->tensor_count && i < c->tensor_count", "i < b->tensor_count || i < c->tensor_count"),
            ("&& i < c->tensor_count", "left out"),
            ("i < b->tensor_count &&", "left out"),
            ("i < c->tensor_count [2]", "i <= c->tensor_count"),
            ("i < c->tensor_count [2]", "i < c->tensor_count - 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_rules",
        "a name of more than 63 is refused by its length or by what stands at 63, wherever the loop ends",
        (
            ("&& k <= BB_MAX_NAME", "left out"),
            ("k <= BB_MAX_NAME", "k < BB_MAX_NAME"),
            ("k <= BB_MAX_NAME", "k <= BB_MAX_NAME + 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_rules",
        "k is 0 where there is no name, which the next condition refuses",
        (("name == NULL ||", "left out"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "check_rules",
        "a name is its own, so the loop ends at i at the latest",
        (
            ("k < i", "k <= i"),
            ("k < i &&", "left out"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "sum_of",
        "a sum of exactly 2^64 - 1 is what stands for one that does not fit, and no dimension is either",
        (("s->value[n] > UINT64_MAX - sum", "s->value[n] >= UINT64_MAX - sum"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_contract_compare",
        (
            "every error of a comparison is above 300, a contract that a bundle keeps passes check_rules, and one "
            "that compare refused is refused again"
        ),
        (
            ("r > BB_OK", "r >= BB_OK"),
            ("r > BB_OK", "r > BB_OK + 1"),
            ("r > BB_OK &&", "left out"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "reserve",
        "asks the caller for what the slot has already, and gets it",
        (
            ("if (need <= slot->capacity)", "if (false)"),
            ("need <= slot->capacity", "need < slot->capacity"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "reserve",
        (
            "no block has more than half of the address space; on 32 bits the limits, which bb_limits_maximum caps "
            "to it, keep a frame below"
        ),
        (
            ("if (need > BB_SPAN)", "if (false)"),
            ("need > BB_SPAN", "need >= BB_SPAN"),
            ("need > BB_SPAN", "need > BB_SPAN + 1"),
        ),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_stream_push",
        "after exactly eight bytes nothing is taken, and the magic is right once more",
        (("s->have < sizeof magic", "s->have <= sizeof magic"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_stream_push",
        "no other frame begins before this one is whole, so nobody looks for a free slot meanwhile",
        (("if (s->frame.type == BB_FRAME_HEAD)", "if (false)"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_stream_push",
        "a checksum over no more bytes is what it was",
        (("begin < body_end", "begin <= body_end"),),
    ),
    (
        "native_shim/boundary_bundle.c",
        "bb_stream_push",
        "a checksum that does not count is made and not looked at",
        (("&& checksum_counts(&s->frame, &slot->bundle)", "left out"),),
    ),
)

NOTES: Final = {
    (file, function, old, new): Note(file, function, old, new, reason)
    for file, function, reason, mutations in _TABLE
    for old, new in mutations
}
