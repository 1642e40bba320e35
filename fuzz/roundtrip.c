/* decode, encode, decode, encode: the second encoding equals the first, and the first equals the input but for what
 * is no part of the logical bundle: extension frames and ignorable bits. */
#include "target.h"

static uint8_t *encode(const bb_config *c, const bb_bundle *b, size_t *size) {
    bb_tensor *tensors = (bb_tensor *)fuzz_memory(b->tensor_count * sizeof *tensors);
    bb_attr *attrs = (bb_attr *)fuzz_memory(b->attribute_count * sizeof *attrs);
    bb_desc d;
    bb_error e;
    uint64_t wanted = 0;
    uint8_t *out;
    uint32_t i;
    int code;
    for (i = 0; i < b->tensor_count; i++) {
        uint8_t *values;
        HOLDS(bb_tensor_at(b, i, &tensors[i]) == BB_OK, "tensor %" PRIu32 " cannot be had", i);
        values = (uint8_t *)fuzz_memory((size_t)tensors[i].bytes);
        HOLDS(bb_tensor_read(b, i, values, (size_t)tensors[i].bytes) == BB_OK, "tensor %" PRIu32 " cannot be read", i);
        tensors[i].data = values;
    }
    for (i = 0; i < b->attribute_count; i++) {
        HOLDS(bb_attr_at(b, i, &attrs[i]) == BB_OK, "attribute %" PRIu32 " cannot be had", i);
    }
    memset(&d, 0, sizeof d);
    d.number = b->number;
    d.minor = b->minor;
    d.no_checksums = (b->head_flags & BB_HEAD_NO_CHECKSUMS) != 0;
    d.fragment_size = b->fragment_size;
    d.tensors = tensors;
    d.tensor_count = b->tensor_count;
    d.attrs = attrs;
    d.attr_count = b->attribute_count;
    code = bb_encoded_size(c, &d, &wanted, &e);
    HOLDS(code == BB_OK, "what was decoded is refused: %d at %" PRIu64, code, e.offset);
    out = (uint8_t *)fuzz_memory((size_t)wanted);
    code = bb_encode(c, &d, out, (size_t)wanted, size, &e);
    HOLDS(code == BB_OK && *size == wanted, "what was decoded is not written: %d, %zu bytes of %" PRIu64, code, *size,
          wanted);
    for (i = 0; i < b->tensor_count; i++) {
        free((void *)(uintptr_t)tensors[i].data);
    }
    free(tensors);
    free(attrs);
    return out;
}

/* The input as a canonical encoding has it. */
static uint8_t *canonical(const uint8_t *data, size_t size, size_t *out_size) {
    uint8_t *out = (uint8_t *)fuzz_memory(size);
    size_t at = 0, to = 0;
    while (at < size) {
        uint64_t length;
        size_t n;
        memcpy(&length, data + at + 24, 8);
        n = 64 + (size_t)((length + 63) / 64 * 64);
        if (data[at + 8] >= BB_FRAME_HEAD && data[at + 8] <= BB_FRAME_END) {
            memcpy(out + to, data + at, n);
            out[to + 9] = 0;
            if (data[at + 8] == BB_FRAME_HEAD) {
                out[to + 66] = out[to + 67] = 0;
            }
            to += n;
        }
        at += n;
    }
    fuzz_repair(out, to);
    *out_size = to;
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bb_config c;
    bb_bundle b, again;
    bb_error e;
    uint8_t *first, *second, *wanted;
    size_t first_size = 0, second_size = 0, wanted_size = 0;
    int code;
    if (size < FUZZ_CONTROL) {
        return 0;
    }
    fuzz_count();
    c = fuzz_config(data);
    data += FUZZ_CONTROL;
    size -= FUZZ_CONTROL;
    memset(&e, 0, sizeof e);
    code = bb_decode(&c, data, size, &b, &e);
    fuzz_verdict(code, e.offset, data, size);
    if (code != BB_OK) {
        fuzz_declared(code, &e, size);
        return 0;
    }
    first = encode(&c, &b, &first_size);
    code = bb_decode(&c, first, first_size, &again, &e);
    HOLDS(code == BB_OK, "what was written is refused: %d at %" PRIu64, code, e.offset);
    second = encode(&c, &again, &second_size);
    HOLDS(first_size == second_size && memcmp(first, second, first_size) == 0, "the second encoding differs");
    wanted = canonical(data, size, &wanted_size);
    HOLDS(first_size == wanted_size && memcmp(first, wanted, first_size) == 0, "the encoding differs from the input");
    free(first);
    free(second);
    free(wanted);
    return 0;
}
