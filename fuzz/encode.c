/*
 * The encoder, from a description that the input draws: every field may be legal or not.
 * What bb_encoded_size says, bb_encode, bb_encode_parts and the prepared encoder say too;
 * what is written decodes to the description; what is refused has a declared number.
 */
#define FUZZ_ENCODER /* its inputs are no datastreams, it decodes nothing foreign */
#include "target.h"

enum { MAX_TENSORS = 6, MAX_ATTRS = 6, MAX_PAYLOAD = 1 << 14 };

typedef struct source {
    const uint8_t *at;
    size_t left;
} source;

static uint8_t byte(source *s) {
    if (s->left == 0) {
        return 0;
    }
    s->left--;
    return *s->at++;
}

static uint64_t number(source *s) {
    uint64_t v = 0;
    unsigned width = byte(s), i;
    if (width < 200) {
        return width % 12; /* mostly small */
    }
    if (width < 215) {
        return (uint64_t)1 << byte(s) % 64;
    }
    if (width < 230) {
        return 64u * (byte(s) % 20u);
    }
    for (i = 0; i < 8; i++) {
        v = v << 8 | byte(s);
    }
    return v;
}

static const uint8_t dtypes[] = {1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 24, 25, 26, 27, 32, 64};

static void draw_tensor(source *s, bb_tensor *t) {
    static const char *const names[] = {"residual", "positions", "seq_ids", "a", "b/c.d-e_f", "token_ids", "outputs", ""};
    unsigned i, choice = byte(s), length;
    memset(t, 0, sizeof *t);
    if (choice < 200) {
        strcpy(t->name, names[choice % 8]);
    } else { /* without an end, now and then */
        length = byte(s) % 66;
        for (i = 0; i < length && i < 64; i++) {
            t->name[i] = choice < 228 ? (char)byte(s) : 'n';
        }
    }
    choice = byte(s);
    t->dtype = choice < 240 ? dtypes[choice % 16] : byte(s);
    choice = byte(s);
    t->byte_order = (uint8_t)(choice < 240 ? 1 + (choice & 1) : choice);
    choice = byte(s);
    t->rank = (uint8_t)(choice < 240 ? choice % 4 : choice % 12);
    choice = byte(s);
    t->token_axis = (uint8_t)(choice < 128 ? 255 : choice % 5);
    for (i = 0; i < t->rank && i < 8; i++) {
        t->dims[i] = number(s) * (t->dtype == BB_Q8_0 && byte(s) < 220 ? 32 : 1);
    }
    t->bytes = byte(s) < 240 ? 0 : number(s);
}

static const uint16_t keys[] = {2, 9, 0x8001, 0x8003, 0x8004, 0x8005, 0x8006, 0x8007, 0x8008, 0x4001, 1, 0x3FFF};

static void draw_attr(source *s, bb_attr *a, uint8_t **value, uint16_t *before) {
    unsigned choice = byte(s), i;
    memset(a, 0, sizeof *a);
    a->key = choice < 200 ? keys[choice % 12] : (uint16_t)(*before + byte(s) % 4);
    *before = a->key;
    choice = byte(s);
    a->type = (uint8_t)(choice < 128 && bb_attr_key_type(a->key) != 0 ? bb_attr_key_type(a->key) : choice % 7);
    choice = byte(s);
    a->length = choice < 128 && bb_attr_key_length(a->key) != 0 ? bb_attr_key_length(a->key) : choice % 50;
    a->u64 = number(s);
    *value = (uint8_t *)fuzz_memory(a->length);
    for (i = 0; i < a->length; i++) {
        (*value)[i] = a->type == BB_ATTR_TEXT && byte(s) < 240 ? 'm' : byte(s);
    }
    a->value = *value;
}

static void refused(int code) {
    HOLDS(code == BB_E_ARGUMENT || (code >= BB_TRUNCATED && strcmp(bb_error_name(code), "unknown") != 0),
          "an encoder says %d", code);
}

static void compare(const bb_config *c, const bb_desc *d, const uint8_t *out, size_t size) {
    bb_bundle b;
    bb_error e;
    uint32_t i;
    int code = bb_decode(c, out, size, &b, &e);
    HOLDS(code == BB_OK, "what was written is refused: %d at %" PRIu64, code, e.offset);
    HOLDS(b.number == d->number && b.minor == d->minor && b.fragment_size == d->fragment_size &&
              b.tensor_count == d->tensor_count && b.attribute_count == d->attr_count,
          "another head comes back");
    for (i = 0; i < d->tensor_count; i++) {
        const bb_tensor *t = &d->tensors[i];
        bb_tensor u;
        uint8_t *values;
        HOLDS(bb_tensor_at(&b, i, &u) == BB_OK, "tensor %" PRIu32 " is gone", i);
        HOLDS(strcmp(t->name, u.name) == 0 && t->dtype == u.dtype && t->byte_order == u.byte_order &&
                  t->rank == u.rank && t->token_axis == u.token_axis && memcmp(t->dims, u.dims, 8u * t->rank) == 0,
              "tensor %s comes back as another", t->name);
        values = (uint8_t *)fuzz_memory((size_t)u.bytes);
        HOLDS(bb_tensor_read(&b, i, values, (size_t)u.bytes) == BB_OK, "tensor %s cannot be read", u.name);
        HOLDS(u.bytes == 0 || memcmp(values, t->data, (size_t)u.bytes) == 0, "tensor %s has other elements", u.name);
        free(values);
    }
}

static void write_all(const bb_config *c, const bb_desc *d, uint64_t size) {
    uint8_t *out = (uint8_t *)fuzz_memory((size_t)size), *again = (uint8_t *)fuzz_memory((size_t)size);
    uint8_t *memory = (uint8_t *)fuzz_memory((size_t)size + 128), *scratch;
    uint64_t part_count = 0, scratch_size = 0;
    size_t written = 0, count = 0, at = 0, i;
    bb_part *parts;
    bb_prepared prepared;
    bb_error e, of_parts;
    int code = bb_encode(c, d, out, (size_t)size, &written, &e), second;
    memset(&of_parts, 0, sizeof of_parts);
    HOLDS(code == BB_OK || code == BB_BOOL_VALUE, "a size of %" PRIu64 ", then %d", size, code);
    second = bb_encode_parts_size(c, d, &part_count, &scratch_size, &of_parts);
    HOLDS(second == BB_OK, "the size of parts is %d", second);
    parts = (bb_part *)fuzz_memory((size_t)part_count * sizeof *parts);
    scratch = (uint8_t *)fuzz_memory((size_t)scratch_size);
    second = bb_encode_parts(c, d, parts, (size_t)part_count, &count, scratch, (size_t)scratch_size, &of_parts);
    HOLDS(second == code && (code == BB_OK || of_parts.offset == e.offset), "%d, in parts %d", code, second);
    second = bb_prepare_encode(&prepared, c, d, memory, (size_t)size + 128, &of_parts);
    HOLDS(second == BB_OK, "no preparation: %d", second);
    second = bb_prepared_encode(&prepared, d, again, (size_t)size, &written, &of_parts);
    HOLDS(second == code && (code == BB_OK || of_parts.offset == e.offset), "%d, prepared %d", code, second);
    if (code == BB_OK) {
        HOLDS(written == size && memcmp(out, again, (size_t)size) == 0, "prepared, other bytes are written");
        for (i = 0; i < count; i++) {
            HOLDS(parts[i].size <= size - at && memcmp(out + at, parts[i].data, parts[i].size) == 0, "part %zu differs", i);
            at += parts[i].size;
        }
        HOLDS(at == size, "the parts have %zu bytes of %" PRIu64, at, size);
        compare(c, d, out, (size_t)size);
        second = bb_encode(c, d, again, (size_t)size - 1, &written, &e);
        HOLDS(second == BB_E_SPACE, "a byte less room, and %d", second);
        second = bb_encode_parts(c, d, parts, (size_t)part_count - 1, &count, scratch, (size_t)scratch_size, &e);
        HOLDS(second == BB_E_SPACE, "a part less, and %d", second);
        second = bb_encode_parts(c, d, parts, (size_t)part_count, &count, scratch, (size_t)scratch_size - 1, &e);
        HOLDS(second == BB_E_SPACE, "a byte less for what lies between the payloads, and %d", second);
        fuzz_accepted++;
    }
    free(out);
    free(again);
    free(memory);
    free(parts);
    free(scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bb_tensor tensors[MAX_TENSORS];
    bb_attr attrs[MAX_ATTRS];
    uint8_t *values[MAX_TENSORS] = {NULL}, *texts[MAX_ATTRS] = {NULL};
    source s = {data, size};
    bb_config c;
    bb_desc d;
    bb_error e;
    uint64_t wanted = 0, total = 0;
    uint16_t before = 0;
    uint32_t i, k;
    int code;
    if (size < FUZZ_CONTROL) {
        return 0;
    }
    fuzz_count();
    c = fuzz_config(data);
    s.at += FUZZ_CONTROL;
    s.left -= FUZZ_CONTROL;
    memset(&d, 0, sizeof d);
    memset(&e, 0, sizeof e);
    d.number = number(&s);
    d.minor = (uint16_t)number(&s);
    d.no_checksums = (byte(&s) & 1) != 0;
    d.fragment_size = byte(&s) < 128 ? 0 : 64u * (byte(&s) % 40u) + (byte(&s) == 255);
    d.tensor_count = byte(&s) % (MAX_TENSORS + 1);
    d.attr_count = byte(&s) % (MAX_ATTRS + 1);
    d.tensors = tensors;
    d.attrs = attrs;
    for (i = 0; i < d.attr_count; i++) {
        draw_attr(&s, &attrs[i], &texts[i], &before);
    }
    for (i = 0; i < d.tensor_count; i++) {
        draw_tensor(&s, &tensors[i]);
    }
    code = bb_encoded_size(&c, &d, &wanted, &e);
    fuzz_reached += d.tensor_count > 0;
    if (code != BB_OK) {
        uint64_t parts, scratch;
        bb_error again;
        refused(code);
        HOLDS(bb_encode_parts_size(&c, &d, &parts, &scratch, &again) == code, "%d, in parts another", code);
    } else {
        for (i = 0; i < d.tensor_count && total <= MAX_PAYLOAD; i++) {
            uint64_t n = 1;
            for (k = 0; k < tensors[i].rank; k++) { /* the product is in bounds, its parts need not be */
                n = n == 0 || tensors[i].dims[k] == 0 ? 0 : n > MAX_PAYLOAD || tensors[i].dims[k] > MAX_PAYLOAD ? MAX_PAYLOAD + 1 : n * tensors[i].dims[k];
            }
            for (k = 0; k < tensors[i].rank; k++) {
                n = tensors[i].dims[k] == 0 ? 0 : n;
            }
            n = n / bb_dtype_block_elements(tensors[i].dtype) * bb_dtype_block_bytes(tensors[i].dtype);
            total += n;
            if (total <= MAX_PAYLOAD) {
                values[i] = (uint8_t *)fuzz_memory((size_t)n);
                for (k = 0; k < n; k++) {
                    values[i][k] = tensors[i].dtype == BB_BOOL ? byte(&s) & (byte(&s) < 250 ? 1 : 255) : byte(&s);
                }
                tensors[i].data = values[i];
            }
        }
        if (total <= MAX_PAYLOAD) {
            write_all(&c, &d, wanted);
        }
    }
    for (i = 0; i < MAX_TENSORS; i++) {
        free(values[i]);
    }
    for (i = 0; i < MAX_ATTRS; i++) {
        free(texts[i]);
    }
    return 0;
}
