/*
 * What a decoder made of some bytes, as text: one line an event, an attribute, a
 * tensor or an error. run_vectors.c compares it with the text that
 * export_vectors.py wrote, cross_codec.c hands it to the Python tests, which make
 * the same text from the Python codec. Elements are written as numbers, so the
 * text is the same on every machine.
 *
 *   bundle NUMBER MINOR FRAGMENT_SIZE CHECKSUMS
 *   attribute KEY TYPE BYTES
 *   tensor NAME DTYPE ORDER TOKEN_AXIS DIMS ELEMENTS
 *   head NUMBER PAYLOAD_BYTES FRAGMENTS
 *   fragment NUMBER TENSOR OFFSET BYTES
 *   extension NUMBER TYPE BYTES
 *   error NUMBER OFFSET          contract errors: error NUMBER - NAME
 *
 * SPDX-License-Identifier: MIT
 */
#include "../boundary_bundle.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Values longer than this stand as the checksum of their hexadecimal text. */
#define LONG_VALUE 4096

typedef struct text {
    char *at;
    size_t length, cap;
} text;

__attribute__((noreturn)) static void fatal(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(2);
}

static void *get_memory(void *old, size_t n) {
    const size_t size = n > 0 ? n : 1;
    void *p = old == NULL ? malloc(size) : realloc(old, size); /* gcc's analyzer takes NULL for freed by the second */
    if (p == NULL) {
        fatal("out of memory");
    }
    return p;
}

static void room(text *t, size_t n) {
    if (t->cap - t->length < n + 1) {
        t->cap = t->length + n + 1 + t->cap;
        t->at = (char *)get_memory(t->at, t->cap);
    }
}

static void put(text *t, const char *s) {
    size_t n = strlen(s);
    room(t, n);
    memcpy(t->at + t->length, s, n + 1);
    t->length += n;
}

static void put_u64(text *t, const char *before, uint64_t v) {
    char s[24];
    snprintf(s, sizeof s, "%" PRIu64, v);
    put(t, before);
    put(t, s);
}

/* Elements in this machine's byte order as hexadecimal numbers. */
static void put_elements(text *t, const uint8_t *p, uint64_t bytes, uint32_t size) {
    static const char digits[] = "0123456789abcdef";
    size_t start, k;
    uint64_t i;
    put(t, bytes == 0 ? " -" : " ");
    room(t, 2 * (size_t)bytes);
    start = t->length;
    for (i = 0; i < bytes; i += size) {
        for (k = 0; k < size; k++) {
            uint8_t byte = p[i + (BB_NATIVE_ORDER == BB_LITTLE && size <= 8 ? size - 1 - k : k)];
            t->at[t->length++] = digits[byte >> 4];
            t->at[t->length++] = digits[byte & 15];
        }
    }
    t->at[t->length] = '\0';
    if (bytes > LONG_VALUE) {
        char s[32];
        snprintf(s, sizeof s, "crc32c:%08" PRIx32, bb_crc32c_portable(0, t->at + start, t->length - start));
        t->length = start;
        t->at[start] = '\0';
        put(t, s);
    }
}

/* All of a complete bundle; its encoding, if asked for, is appended to *encoded. */
static void put_bundle(text *t, const bb_config *config, const bb_bundle *b, text *encoded) {
    bb_tensor *tensors = (bb_tensor *)get_memory(NULL, b->tensor_count * sizeof *tensors);
    bb_attr *attrs = (bb_attr *)get_memory(NULL, b->attribute_count * sizeof *attrs);
    uint32_t i;
    unsigned k;
    put_u64(t, "bundle ", b->number);
    put_u64(t, " ", b->minor);
    put_u64(t, " ", b->fragment_size);
    put(t, (b->head_flags & BB_HEAD_NO_CHECKSUMS) != 0 ? " 0\n" : " 1\n");
    for (i = 0; i < b->attribute_count; i++) {
        if (bb_attr_at(b, i, &attrs[i]) != BB_OK) {
            fatal("an attribute cannot be read");
        }
        put_u64(t, "attribute ", attrs[i].key);
        put_u64(t, " ", attrs[i].type);
        put_elements(t, (const uint8_t *)attrs[i].value, attrs[i].length, 1);
        put(t, "\n");
    }
    for (i = 0; i < b->tensor_count; i++) {
        bb_tensor *u = &tensors[i];
        uint8_t *values;
        if (bb_tensor_at(b, i, u) != BB_OK || bb_tensor_find(b, u->name, NULL) != (int)i) {
            fatal("a tensor cannot be found");
        }
        values = (uint8_t *)get_memory(NULL, (size_t)u->bytes);
        if (bb_tensor_read(b, i, values, (size_t)u->bytes) != BB_OK) {
            fatal("a tensor cannot be read");
        }
        put(t, "tensor ");
        put(t, u->name);
        put(t, " ");
        put(t, bb_dtype_name(u->dtype));
        put(t, u->byte_order == BB_BIG ? " big" : " little");
        if (u->token_axis == BB_NO_TOKEN_AXIS) {
            put(t, " -");
        } else {
            put_u64(t, " ", u->token_axis);
        }
        put(t, u->rank == 0 ? " -" : "");
        for (k = 0; k < u->rank; k++) {
            put_u64(t, k == 0 ? " " : ",", u->dims[k]);
        }
        put_elements(t, values, u->bytes, bb_dtype_block_bytes(u->dtype));
        put(t, "\n");
        u->data = values;
    }
    if (encoded != NULL) {
        bb_desc d;
        uint64_t size = 0;
        size_t n = 0;
        bb_error e;
        memset(&d, 0, sizeof d);
        d.number = b->number;
        d.minor = b->minor;
        d.no_checksums = (b->head_flags & BB_HEAD_NO_CHECKSUMS) != 0;
        d.fragment_size = b->fragment_size;
        d.tensors = tensors;
        d.tensor_count = b->tensor_count;
        d.attrs = attrs;
        d.attr_count = b->attribute_count;
        if (bb_encoded_size(config, &d, &size, &e) != BB_OK) {
            fatal("a bundle that was decoded cannot be encoded");
        }
        room(encoded, (size_t)size);
        if (bb_encode(config, &d, encoded->at + encoded->length, (size_t)size, &n, &e) != BB_OK || n != size) {
            fatal("a bundle that was decoded cannot be encoded");
        }
        encoded->length += n;
    }
    for (i = 0; i < b->tensor_count; i++) {
        free((void *)(uintptr_t)tensors[i].data);
    }
    free(tensors);
    free(attrs);
}

static void put_error(text *t, int code, const bb_error *e) {
    put_u64(t, "error ", (uint64_t)code);
    if (code >= BB_CONTRACT_ATTRIBUTE) {
        put(t, " - ");
        if (e->name[0] != '\0') {
            put(t, e->name);
        } else {
            put_u64(t, "", e->expected); /* an attribute without a registered name: its key */
        }
    } else {
        put_u64(t, " ", e->offset);
    }
    put(t, "\n");
}

/* Blocks of a stream; a new place at every growth, so that a pointer kept too
 * long shows under a sanitizer. */
typedef struct blocks {
    void **at;
} blocks;

static void *grow(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    blocks *b = (blocks *)user;
    size_t size = need + need / 2;
    void *block = get_memory(NULL, size);
    if (old != NULL) {
        memcpy(block, old, used);
    }
    free(b->at[slot]);
    b->at[slot] = block;
    *capacity = size;
    return block;
}

/* "one", "core" or "stream"; pieces: their sizes, then the rest; events: heads,
 * fragments and extensions too. contract, encoded, prepared may be NULL. */
static void transcribe(text *t, const char *kind, const bb_config *config, const bb_prepared *prepared,
                       const bb_contract *contract, const uint8_t *data, size_t size, const uint32_t *pieces,
                       size_t piece_count, bool events, text *encoded) {
    bb_error e;
    int r = BB_OK;
    memset(&e, 0, sizeof e);
    if (strcmp(kind, "one") == 0) {
        bb_bundle b;
        if (contract != NULL) { /* compared as soon as the head has passed */
            size_t head;
            r = bb_decode_head(config, data, size, &b, &head, &e);
            r = r == BB_OK ? bb_contract_compare(contract, &b, &e) : BB_OK;
        }
        if (r == BB_OK) {
            r = prepared != NULL ? bb_prepared_decode(prepared, data, size, &b, &e)
                                 : bb_decode(config, data, size, &b, &e);
        }
        if (r == BB_OK) {
            put_bundle(t, config, &b, encoded);
        } else {
            put_error(t, r, &e);
        }
        return;
    }
    {
        uint32_t slot_count = (uint32_t)config->limits.open_bundles, i;
        bool core = strcmp(kind, "core") == 0;
        bb_stream_slot *slots;
        bb_stream s;
        blocks memory;
        size_t at = 0, piece = 0;
        if (slot_count == 0) {
            slot_count = 1;
        }
        slots = (bb_stream_slot *)get_memory(NULL, slot_count * sizeof *slots);
        memory.at = (void **)get_memory(NULL, slot_count * sizeof *memory.at);
        memset(memory.at, 0, slot_count * sizeof *memory.at);
        if (bb_stream_init(&s, config, core ? BB_STREAM_CORE : BB_STREAM_CLASS, slots, slot_count, grow, &memory) !=
                BB_OK ||
            bb_stream_prepare(&s, prepared) != BB_OK) {
            fatal("the stream cannot begin");
        }
        while (r == BB_OK && at < size) {
            size_t n = piece < piece_count ? pieces[piece++] : size - at, end;
            uint8_t *copy; /* of its own size: the sanitizer sees what is read past it */
            n = n < size - at ? n : size - at;
            copy = (uint8_t *)get_memory(NULL, n);
            memcpy(copy, data + at, n);
            end = n;
            for (n = 0; r == BB_OK;) {
                bb_event event;
                size_t taken;
                r = bb_stream_push(&s, copy + n, end - n, &taken, &event, &e);
                n += taken;
                if (r != BB_OK) {
                    break;
                }
                if (event.kind == BB_EVENT_BUNDLE) {
                    put_bundle(t, config, event.bundle, encoded);
                } else if (event.kind == BB_EVENT_HEAD) {
                    if (contract != NULL) {
                        r = bb_contract_compare(contract, event.bundle, &e);
                    }
                    if (events && r == BB_OK) {
                        put_u64(t, "head ", event.bundle->number);
                        put_u64(t, " ", event.bundle->payload_bytes);
                        put_u64(t, " ", event.bundle->fragments);
                        put(t, "\n");
                    }
                } else if (events && event.kind == BB_EVENT_FRAGMENT && !event.repeated) {
                    put_u64(t, "fragment ", event.bundle->number);
                    put_u64(t, " ", event.tensor);
                    put_u64(t, " ", event.payload_offset);
                    put_elements(t, (const uint8_t *)event.data, event.size, 1);
                    put(t, "\n");
                } else if (events && event.kind == BB_EVENT_EXTENSION) {
                    put_u64(t, "extension ", event.bundle->number);
                    put_u64(t, " ", event.frame_type);
                    put_elements(t, (const uint8_t *)event.data, event.size, 1);
                    put(t, "\n");
                }
            }
            free(copy);
            at += end;
            if (r == BB_NEED_MORE) {
                if (n != end) {
                    fatal("more is needed while bytes are left");
                }
                r = BB_OK;
            }
        }
        if (r == BB_OK) {
            r = bb_stream_finish(&s, &e);
        }
        if (r != BB_OK) {
            put_error(t, r, &e);
        }
        for (i = 0; i < slot_count; i++) {
            free(memory.at[i]);
        }
        free(memory.at);
        free(slots);
    }
}
