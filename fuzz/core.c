/* bb_decode, bb_decode_head and the accessors, with and without a preparation. */
#include "target.h"

static void look(const bb_bundle *b, size_t size) {
    uint64_t total = 0;
    uint32_t i;
    for (i = 0; i < b->tensor_count; i++) {
        bb_tensor t;
        uint8_t *values;
        HOLDS(bb_tensor_at(b, i, &t) == BB_OK, "tensor %" PRIu32 " cannot be had", i);
        HOLDS(t.bytes <= size, "tensor %s has %" PRIu64 " bytes of %zu", t.name, t.bytes, size);
        total += t.bytes;
        values = (uint8_t *)fuzz_memory((size_t)t.bytes);
        HOLDS(bb_tensor_read(b, i, values, (size_t)t.bytes) == BB_OK, "tensor %s cannot be read", t.name);
        if (t.data != NULL && (t.byte_order == BB_NATIVE_ORDER || bb_dtype_block_bytes(t.dtype) == 1)) {
            HOLDS(memcmp(values, t.data, (size_t)t.bytes) == 0, "tensor %s is read as other bytes", t.name);
        }
        free(values);
        if (t.bytes > 0) {
            uint8_t little[1];
            HOLDS(bb_tensor_read(b, i, little, (size_t)t.bytes - 1) == BB_E_SPACE, "tensor %s needs less room", t.name);
        }
        if (i < 64) { /* quadratic */
            HOLDS(bb_tensor_find(b, t.name, NULL) == (int)i, "tensor %s is not found", t.name);
        }
    }
    HOLDS(total == b->payload_bytes, "the payloads have %" PRIu64 " bytes, not %" PRIu64, total, b->payload_bytes);
    for (i = 0; i < b->attribute_count; i++) {
        bb_attr a;
        HOLDS(bb_attr_at(b, i, &a) == BB_OK, "attribute %" PRIu32 " cannot be had", i);
        if (a.length > 0) {
            volatile uint8_t touched = ((const uint8_t *)a.value)[a.length - 1];
            (void)touched;
        }
        if (i < 64) {
            HOLDS(bb_attr_find(b, a.key, NULL) == (int)i, "attribute %u is not found", (unsigned)a.key);
        }
    }
    HOLDS(bb_tensor_at(b, b->tensor_count, &(bb_tensor){{0}, 0, 0, 0, 0, {0}, 0, NULL}) == BB_E_ARGUMENT,
          "a tensor behind the last");
}

/* Faults of the call are told, and details of an error need not be asked for. */
static void caller(const bb_config *c, const uint8_t *data, size_t size, int code, int head_code) {
    bb_config wrong = *c;
    bb_bundle b;
    bb_tensor t;
    bb_attr a;
    uint8_t some[1];
    HOLDS(bb_decode(c, data, size, &b, NULL) == code, "without details another verdict");
    if (code == BB_OK) {
        HOLDS(bb_tensor_find(&b, "no such tensor", &t) == -1 && bb_attr_find(&b, 0, &a) == -1, "what is not there is found");
        if (b.tensor_count > 0) {
            bb_tensor again;
            HOLDS(bb_tensor_at(&b, 0, &t) == BB_OK && bb_tensor_find(&b, t.name, &again) == 0 && again.bytes == t.bytes,
                  "tensor 0 is another by its name");
            HOLDS(t.bytes == 0 || bb_tensor_read(&b, 0, NULL, (size_t)t.bytes) == BB_E_ARGUMENT, "read to nowhere");
        }
        if (b.attribute_count > 0) {
            HOLDS(bb_attr_at(&b, 0, &a) == BB_OK && bb_attr_find(&b, a.key, &a) == 0, "attribute 0 is another by its key");
        }
        HOLDS(bb_tensor_read(&b, b.tensor_count, some, 1) == BB_E_ARGUMENT, "a tensor behind the last is read");
        HOLDS(bb_attr_at(&b, b.attribute_count, &a) == BB_E_ARGUMENT, "an attribute behind the last");
        HOLDS(bb_tensor_at(&b, 0, NULL) == BB_E_ARGUMENT && bb_attr_at(&b, 0, NULL) == BB_E_ARGUMENT, "no place");
        HOLDS(bb_tensor_find(&b, NULL, NULL) == -1, "no name");
    }
    HOLDS(bb_decode_head(c, data, size, &b, NULL, NULL) == head_code, "without details another head");
    if (head_code == BB_OK && b.tensor_count > 0) {
        HOLDS(bb_tensor_at(&b, 0, &t) == BB_OK && t.data == NULL, "a head has payload");
        HOLDS(bb_tensor_read(&b, 0, some, 1) == BB_E_ARGUMENT, "a head is read");
    }
    wrong.limits.rank = BB_MAX_RANK + 1;
    HOLDS(bb_decode(&wrong, data, size, &b, NULL) == BB_E_ARGUMENT, "a rank of 9");
    HOLDS(bb_decode_head(&wrong, data, size, &b, NULL, NULL) == BB_E_ARGUMENT, "a rank of 9 in a head");
    HOLDS(bb_decode(c, data, size, NULL, NULL) == BB_E_ARGUMENT, "no place for a bundle");
    HOLDS(bb_decode_head(c, data, size, NULL, NULL, NULL) == BB_E_ARGUMENT, "no place for a head");
    HOLDS(bb_decode(c, NULL, 1, &b, NULL) == BB_E_ARGUMENT, "no data");
    HOLDS(bb_decode_head(c, NULL, 1, &b, NULL, NULL) == BB_E_ARGUMENT, "no data of a head");
    HOLDS(bb_decode(c, NULL, 0, &b, NULL) == BB_TRUNCATED, "no bytes are a bundle");
    HOLDS(bb_decode_head(c, NULL, 0, &b, NULL, NULL) == BB_NEED_MORE, "no bytes are a head");
    HOLDS(bb_prepared_decode(NULL, data, size, &b, NULL) == BB_E_ARGUMENT, "no preparation");
    HOLDS(bb_prepared_decode_head(NULL, data, size, &b, NULL, NULL) == BB_E_ARGUMENT, "no preparation of a head");
    HOLDS(bb_tensor_at(NULL, 0, &t) == BB_E_ARGUMENT && bb_attr_at(NULL, 0, &a) == BB_E_ARGUMENT, "no bundle");
    HOLDS(bb_tensor_find(NULL, "a", NULL) == -1 && bb_attr_find(NULL, 2, NULL) == -1, "nothing is found in no bundle");
    HOLDS(bb_tensor_read(NULL, 0, some, 1) == BB_E_ARGUMENT, "no bundle is read");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bb_config c;
    bb_bundle b, head;
    bb_error e, head_error;
    size_t frame_bytes = 0;
    int code, head_code;
    uint8_t control;
    if (size < FUZZ_CONTROL) {
        return 0;
    }
    fuzz_count();
    c = fuzz_config(data);
    control = data[10];
    data += FUZZ_CONTROL;
    size -= FUZZ_CONTROL;
    memset(&e, 0, sizeof e);
    memset(&head_error, 0, sizeof head_error);
    code = bb_decode(&c, data, size, &b, &e);
    fuzz_verdict(code, e.offset, data, size);
    if (code == BB_OK) {
        look(&b, size);
    } else {
        fuzz_declared(code, &e, size);
    }
    head_code = bb_decode_head(&c, data, size, &head, &frame_bytes, &head_error);
    if (head_code == BB_OK) {
        HOLDS(frame_bytes <= size, "a head frame of %zu bytes in %zu", frame_bytes, size);
        HOLDS(code == BB_OK || e.offset >= frame_bytes || code == BB_FRAGMENT_ORDER || code == BB_TRUNCATED,
              "%s at byte %" PRIu64 " of a head that passed", bb_error_name(code), e.offset);
    } else if (head_code == BB_NEED_MORE) {
        HOLDS(code == BB_TRUNCATED && frame_bytes > size, "a head needs more and the bundle is %d", code);
    } else {
        HOLDS(head_code == code && head_error.offset == e.offset, "head %d at %" PRIu64 ", bundle %d at %" PRIu64,
              head_code, head_error.offset, code, e.offset);
    }
    if ((control & FUZZ_CALLER) != 0) {
        caller(&c, data, size, code, head_code);
    }
    if ((control & FUZZ_PREPARED) != 0) {
        bb_prepared prepared;
        bb_error again;
        bb_bundle second;
        uint8_t *memory = (uint8_t *)fuzz_memory(size + 128);
        int ready = bb_prepare_decode(&prepared, &c, data, size, memory, size + 128, &again);
        HOLDS((ready == BB_OK) == (head_code == BB_OK), "the head is %d and its preparation %d", head_code, ready);
        if (ready == BB_OK) {
            size_t prepared_bytes = 0;
            HOLDS(bb_prepare_decode(&prepared, &c, data, size, memory, frame_bytes - 1, NULL) == BB_E_SPACE,
                  "a preparation needs less room");
            bb_prepare_decode(&prepared, &c, data, size, memory, size + 128, NULL);
            HOLDS(bb_prepared_decode_head(&prepared, data, size, &second, &prepared_bytes, NULL) == BB_OK &&
                      prepared_bytes == frame_bytes,
                  "the prepared head is another");
            memset(&again, 0, sizeof again);
            ready = bb_prepared_decode(&prepared, data, size, &second, &again);
            HOLDS(ready == code && (code == BB_OK || again.offset == e.offset), "%d at %" PRIu64 ", prepared %d at %" PRIu64,
                  code, e.offset, ready, again.offset);
            if (code == BB_OK) {
                look(&second, size);
            }
        }
        free(memory);
    }
    return 0;
}
