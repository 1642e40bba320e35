/*
 * Tests of the C codec: every error number at its exact offset, round trips,
 * fragment layouts, streams in pieces. Prints each failing check; exit status 1
 * if there was one. Checksums come from a bitwise CRC of the test's own, and
 * malformed bundles are made byte by byte, so a fault common to the codec's
 * encoder and decoder does not hide.
 *
 * SPDX-License-Identifier: MIT
 */
#include "../boundary_bundle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures, checks;
static const char *context = "";
static const bb_prepared *prepared; /* what streams are prepared with */

#define CHECK(x) check_(x, #x, __LINE__)
#define EQUAL(a, b) equal_((long long)(a), (long long)(b), #a " == " #b, __LINE__)

static void check_(int ok, const char *text, int line) {
    checks++;
    if (!ok) {
        failures++;
        printf("line %d: [%s] %s\n", line, context, text);
    }
}

static void equal_(long long a, long long b, const char *text, int line) {
    checks++;
    if (a != b) {
        failures++;
        printf("line %d: [%s] %s: %lld, %lld\n", line, context, text, a, b);
    }
}

/* ---- bytes --------------------------------------------------------------- */

static uint32_t crc_bits(const uint8_t *p, size_t n) {
    uint32_t c = 0xFFFFFFFFu;
    while (n-- > 0) {
        int k;
        c ^= *p++;
        for (k = 0; k < 8; k++) {
            c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
        }
    }
    return ~c;
}

static void put(uint8_t *p, unsigned n, uint64_t v) {
    while (n-- > 0) {
        *p++ = (uint8_t)(v & 0xFF);
        v >>= 8;
    }
}

static uint64_t get(const uint8_t *p, unsigned n) {
    uint64_t v = 0;
    while (n-- > 0) {
        v = v << 8 | p[n];
    }
    return v;
}

static void seal_header(uint8_t *p) { put(p + 60, 4, crc_bits(p, 60)); }

static void seal_body(uint8_t *p) { put(p + 48, 4, crc_bits(p + 64, (size_t)get(p + 24, 8))); }

/* Appends a frame; body_crc as it should be. */
static size_t frame(uint8_t *p, unsigned type, uint64_t number, uint64_t a, uint64_t b, const void *body, size_t n) {
    static const uint8_t magic[8] = {0x89, 'B', 'D', 'B', '\r', '\n', 0x1A, '\n'};
    size_t whole = 64 + ((n + 63) & ~(size_t)63);
    memset(p, 0, whole);
    memcpy(p, magic, 8);
    p[8] = (uint8_t)type;
    p[12] = 1;
    put(p + 16, 8, number);
    put(p + 24, 8, n);
    put(p + 32, 8, a);
    put(p + 40, 8, b);
    if (n > 0) {
        memcpy(p + 64, body, n);
    }
    seal_body(p);
    seal_header(p);
    return whole;
}

static uint64_t random_state = 88172645463325252u;
static uint64_t random_next(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* ---- a stream with memory ------------------------------------------------ */

#define SLOTS 16

typedef struct pool {
    void *block[SLOTS];
    size_t size[SLOTS];
    uint64_t asked; /* the largest `need` */
    int refuse;     /* so many calls are refused */
} pool;

/* Exact sizes and a new place each time, so that the sanitizer sees every byte
 * too many and every pointer kept too long. */
static void *pool_reserve(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    pool *p = (pool *)user;
    uint8_t *block;
    if (p->refuse > 0) {
        p->refuse--;
        return NULL;
    }
    block = (uint8_t *)malloc(need);
    if (block == NULL) {
        return NULL;
    }
    if (old != NULL) {
        memcpy(block, old, used);
    }
    free(p->block[slot]);
    p->block[slot] = block;
    p->size[slot] = need;
    if (need > p->asked) {
        p->asked = need;
    }
    *capacity = need;
    return block;
}

static void pool_free(pool *p) {
    int i;
    for (i = 0; i < SLOTS; i++) {
        free(p->block[i]);
    }
    memset(p, 0, sizeof *p);
}

/* Feeds bytes in pieces, finishes; returns the result. A copy of each piece in a
 * block of its own lets the sanitizer see reads past it. */
static int stream_all(const bb_config *c, unsigned flags, const uint8_t *data, size_t size, size_t piece,
                      bb_error *e, int *bundles) {
    bb_stream s;
    bb_stream_slot slots[SLOTS];
    pool memory;
    size_t at = 0;
    int r = bb_stream_init(&s, c, flags, slots, SLOTS, pool_reserve, (memset(&memory, 0, sizeof memory), &memory));
    EQUAL(bb_stream_prepare(&s, prepared), BB_OK);
    memset(e, 0, sizeof *e);
    *bundles = 0;
    while (r == BB_OK && at < size) {
        size_t n = size - at < piece ? size - at : piece, done = 0;
        uint8_t *copy = (uint8_t *)malloc(n);
        if (copy == NULL) {
            exit(2);
        }
        memcpy(copy, data + at, n);
        for (;;) {
            bb_event event;
            size_t taken;
            r = bb_stream_push(&s, copy + done, n - done, &taken, &event, e);
            done += taken;
            if (r != BB_OK) {
                break;
            }
            if (event.kind == BB_EVENT_BUNDLE) {
                ++*bundles;
            }
        }
        free(copy);
        if (r == BB_NEED_MORE) {
            if (done != n) {
                CHECK(0 && "need more with bytes left");
            }
            r = BB_OK;
        }
        at += n;
    }
    if (r == BB_OK) {
        r = bb_stream_finish(&s, e);
    } else if (r > BB_NEED_MORE) {
        bb_event event;
        size_t taken;
        bb_error again;
        EQUAL(bb_stream_push(&s, data, size, &taken, &event, &again), r); /* takes no more bytes */
        EQUAL(taken, 0);
        EQUAL(bb_stream_finish(&s, NULL), r);
    }
    pool_free(&memory);
    return r;
}

/* A decoder prepared with the head at `from` gives what any other gives. */
static void expect_prepared(const bb_config *c, const uint8_t *from, const uint8_t *data, size_t size, int code,
                            const bb_error *first) {
    static uint8_t memory[1 << 20];
    bb_prepared p;
    bb_bundle b, plain;
    bb_error e, e2;
    size_t whole, whole2;
    int n, r;
    if (bb_prepare_decode(&p, c, from, size, memory, sizeof memory, &e) != BB_OK) {
        return;
    }
    memset(&e, 0, sizeof e);
    EQUAL(bb_prepared_decode(&p, data, size, &b, &e), code);
    CHECK(code == BB_OK || memcmp(&e, first, sizeof e) == 0);
    if (code == BB_OK) {
        EQUAL(bb_decode(c, data, size, &plain, NULL), BB_OK);
        EQUAL(b.known, memcmp(from + 64, data + 64, (size_t)p.body_bytes) == 0);
        CHECK(!plain.known);
        b.known = false;
        CHECK(b.minor == plain.minor && b.number == plain.number && b.head_flags == plain.head_flags);
        CHECK(b.tensor_count == plain.tensor_count && b.attribute_count == plain.attribute_count);
        CHECK(b.fragment_size == plain.fragment_size && b.payload_bytes == plain.payload_bytes);
        CHECK(b.fragments == plain.fragments && b.complete);
        CHECK(b.priv.base == plain.priv.base && b.priv.first == plain.priv.first);
        CHECK(b.priv.attrs == plain.priv.attrs && b.priv.received == plain.priv.received);
        CHECK(b.priv.prefix == plain.priv.prefix && b.priv.extensions == plain.priv.extensions);
    } else {
        CHECK(!b.complete && b.tensor_count == 0);
    }
    memset(&e, 0, sizeof e);
    memset(&e2, 0, sizeof e2);
    r = bb_decode_head(c, data, size, &plain, &whole, &e);
    EQUAL(bb_prepared_decode_head(&p, data, size, &b, &whole2, &e2), r);
    CHECK(whole == whole2 && memcmp(&e, &e2, sizeof e) == 0);
    prepared = &p;
    EQUAL(stream_all(c, BB_STREAM_CORE | BB_STREAM_SINGLE, data, size, 50, &e, &n), code);
    CHECK(code == BB_OK || e.offset == first->offset);
    prepared = NULL;
}

static uint8_t sound[1024]; /* the bundle that the malformed ones are made from */

/* The buffer decoder and the stream decoder in pieces agree on code and offset.
 * only_core: a stream decoder of the stream class need not. */
static void expect(const bb_config *c, const uint8_t *data, size_t size, int code, uint64_t offset, int only_core) {
    static const size_t pieces[] = {1, 7, 64, 100000};
    bb_bundle b;
    bb_error e, first;
    size_t i;
    int n;
    uint8_t *copy = (uint8_t *)malloc(size > 0 ? size : 1);
    if (copy == NULL) {
        exit(2);
    }
    if (size > 0) {
        memcpy(copy, data, size);
    }
    memset(&first, 0, sizeof first);
    EQUAL(bb_decode(c, copy, size, &b, &first), code);
    EQUAL(bb_decode(c, copy, size, &b, NULL), code); /* details need not be asked for */
    if (code != BB_OK) {
        char text[400];
        EQUAL(first.code, code);
        EQUAL(first.offset, offset);
        CHECK(first.frame <= offset);
        CHECK(!b.complete && b.tensor_count == 0);
        CHECK(bb_error_format(&first, text, sizeof text) < sizeof text);
        CHECK(strstr(text, bb_error_name(code)) == text);
    }
    for (i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        EQUAL(stream_all(c, BB_STREAM_CORE | BB_STREAM_SINGLE, copy, size, pieces[i], &e, &n), code);
        if (code != BB_OK) {
            EQUAL(e.offset, offset);
            EQUAL(e.frame, first.frame);
            EQUAL(e.tensor, first.tensor);
            CHECK(strcmp(e.name, first.name) == 0);
        }
        if (!only_core) {
            EQUAL(stream_all(c, BB_STREAM_CLASS | BB_STREAM_SINGLE, copy, size, pieces[i], &e, &n), code);
            if (code != BB_OK) {
                EQUAL(e.offset, offset);
            }
        }
    }
    expect_prepared(c, copy, copy, size, code, &first);
    if (size <= sizeof sound) {
        expect_prepared(c, sound, copy, size, code, &first);
    }
    free(copy);
}

/* ---- the bundle that the malformed ones are made from -------------------- */

/*
 *   0 head   64 body: fixed part    96 residual f32 [2,3]  128 outputs bool [2]
 *            152 architecture "llama"  168 0x4001 bytes "abc"  184 n_tokens 2
 *            200 end of body, 256 end of frame
 * 256 fragment 0, 24 bytes at 320    384 fragment 1, 2 bytes at 448
 * 512 end    576
 */
#define R0 96
#define R1 128
#define A0 152
#define A1 168
#define A2 184
#define HEAD_END 200
#define F0 256
#define F1 384
#define END 512
#define SIZE 576

static const float values[6] = {1.5f, -2.0f, 0.25f, 1e30f, -0.0f, 3.0f};
static const uint8_t flags01[2] = {0, 1};

static void tensor(bb_tensor *t, const char *name, int dtype, int order, int axis, int rank, uint64_t d0, uint64_t d1,
                   uint64_t d2, const void *data) {
    memset(t, 0, sizeof *t);
    memcpy(t->name, name, strlen(name) + 1); /* at most 63 bytes and the NUL */
    t->dtype = (uint8_t)dtype;
    t->byte_order = (uint8_t)order;
    t->token_axis = (uint8_t)axis;
    t->rank = (uint8_t)rank;
    t->dims[0] = d0;
    t->dims[1] = d1;
    t->dims[2] = d2;
    t->data = data;
}

static void attr(bb_attr *a, unsigned key, int type, const char *value, uint32_t length, uint64_t number) {
    memset(a, 0, sizeof *a);
    a->key = (uint16_t)key;
    a->type = (uint8_t)type;
    a->value = value;
    a->length = length;
    a->u64 = number;
}

static void describe(bb_desc *d, bb_tensor t[2], bb_attr a[3]) {
    memset(d, 0, sizeof *d);
    tensor(&t[0], "residual", BB_F32, BB_LITTLE, 0, 2, 2, 3, 0, values);
    tensor(&t[1], "outputs", BB_BOOL, BB_LITTLE, 0, 1, 2, 0, 0, flags01);
    attr(&a[0], BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, "llama", 5, 0);
    attr(&a[1], 0x4001, BB_ATTR_BYTES, "abc", 3, 0);
    attr(&a[2], BB_KEY_N_TOKENS, BB_ATTR_U64, NULL, 0, 2);
    d->number = 7;
    d->tensors = t;
    d->tensor_count = 2;
    d->attrs = a;
    d->attr_count = 3;
}

static void make_base(const bb_config *c, uint8_t *p) {
    bb_desc d;
    bb_tensor t[2];
    bb_attr a[3];
    size_t n;
    bb_error e;
    describe(&d, t, a);
    EQUAL(bb_encode(c, &d, p, SIZE, &n, &e), BB_OK);
    EQUAL(n, SIZE);
}

/* ---- single changes ------------------------------------------------------ */

enum { BODY = 1, HEADER = 2, CORE = 4 }; /* what to seal again; core class only */

typedef struct change {
    unsigned at, n;
    uint64_t value;
} change;

typedef struct malformed {
    const char *why;
    unsigned frame; /* the frame changed */
    int seal;
    int code;
    unsigned offset;
    change changes[4];
} malformed;

static const malformed table[] = {
    {"A1 the last byte of the magic", 0, 0, BB_BAD_MAGIC, 0, {{7, 1, 0x0D}}},
    {"A1 before B1, in a later frame", F0, 0, BB_BAD_MAGIC, F0, {{F0, 1, 0x09}, {F0 + 63, 1, 1}}},
    {"B1", 0, 0, BB_HEADER_CRC, 60, {{16, 1, 8}}},
    {"B1 a bit of the checksum itself", F1, 0, BB_HEADER_CRC, F1 + 60, {{F1 + 63, 1, 0xFF}}},
    {"B2", 0, HEADER, BB_UNSUPPORTED_MAJOR, 12, {{12, 2, 2}, {10, 2, 1}}},
    {"B2 major 257", F0, HEADER, BB_UNSUPPORTED_MAJOR, F0 + 12, {{F0 + 12, 2, 257}}},
    {"B3", 0, HEADER, BB_HEADER_RESERVED, 10, {{11, 1, 1}, {52, 1, 1}}},
    {"B4", 0, HEADER, BB_HEADER_RESERVED, 52, {{59, 1, 1}, {9, 1, 1}}},
    {"B5", 0, HEADER, BB_HEADER_FLAGS, 9, {{9, 1, 8}, {8, 1, 0x90}}},
    {"B5 ignorable bits pass", 0, HEADER, BB_OK, 0, {{9, 1, 0xF0}}},
    {"B6 unknown critical", 0, HEADER, BB_UNSUPPORTED_FRAME, 8, {{8, 1, 0x80}}},
    {"B6 before B20, private critical", END, HEADER, BB_UNSUPPORTED_FRAME, END + 8, {{END + 8, 1, 0xC1}, {END + 16, 1, 9}}},
    {"B10", 0, HEADER, BB_LIMIT_HEAD_BYTES, 24, {{24, 8, 1048577}}},
    {"B10 2^64 - 1", 0, HEADER, BB_LIMIT_HEAD_BYTES, 24, {{24, 8, UINT64_MAX}}},
    {"B11 short", 0, HEADER, BB_BODY_LENGTH, 24, {{24, 8, 24}, {32, 1, 1}}},
    {"B11 zero", 0, HEADER, BB_BODY_LENGTH, 24, {{24, 8, 0}}},
    {"B11 no multiple of 8", 0, HEADER, BB_BODY_LENGTH, 24, {{24, 8, 132}}},
    {"B12", 0, HEADER, BB_HEAD_FIELDS, 32, {{39, 1, 1}, {40, 1, 1}}},
    {"B13", 0, HEADER, BB_HEAD_FIELDS, 40, {{47, 1, 1}}},
    {"B20 another number", F0, HEADER, BB_BUNDLE_NOT_OPEN, F0 + 16, {{F0 + 16, 1, 8}, {F0 + 14, 1, 1}}},
    {"B20 a fragment first", 0, HEADER, BB_BUNDLE_NOT_OPEN, 16, {{8, 1, 0x82}}},
    {"B20 an extension first", 0, HEADER, BB_BUNDLE_NOT_OPEN, 16, {{8, 1, 0x01}}},
    {"B21", F0, HEADER, BB_FRAME_VERSION, F0 + 14, {{F0 + 14, 2, 1}, {F0 + 32, 1, 9}}},
    {"B21 at the end", END, HEADER, BB_FRAME_VERSION, END + 14, {{END + 15, 1, 1}}},
    {"B30", F0, HEADER, BB_FRAGMENT_TENSOR, F0 + 32, {{F0 + 32, 8, 2}}},
    {"B30 2^32", F0, HEADER, BB_FRAGMENT_TENSOR, F0 + 32, {{F0 + 32, 8, (uint64_t)1 << 32}}},
    {"B31 not 0 with one fragment a tensor", F0, HEADER, BB_FRAGMENT_OFFSET, F0 + 40, {{F0 + 40, 8, 8}, {F0 + 24, 8, 16}}},
    {"B31 at the end of the payload", F0, HEADER, BB_FRAGMENT_OFFSET, F0 + 40, {{F0 + 40, 8, 24}}},
    {"B32 short", F0, HEADER, BB_FRAGMENT_LENGTH, F0 + 24, {{F0 + 24, 8, 23}}},
    {"B32 long", F0, HEADER, BB_FRAGMENT_LENGTH, F0 + 24, {{F0 + 24, 8, 25}}},
    {"B32 empty", F0, HEADER, BB_FRAGMENT_LENGTH, F0 + 24, {{F0 + 24, 8, 0}}},
    {"B32 2^64 - 1", F0, HEADER, BB_FRAGMENT_LENGTH, F0 + 24, {{F0 + 24, 8, UINT64_MAX}}},
    {"B33", F0, HEADER | CORE, BB_FRAGMENT_ORDER, F0 + 32, {{F0 + 32, 8, 1}, {F0 + 24, 8, 2}}},
    {"B33 repeated", F1, HEADER | CORE, BB_FRAGMENT_ORDER, F1 + 32, {{F1 + 32, 8, 0}, {F1 + 24, 8, 24}}},
    {"B40", END, HEADER, BB_BODY_LENGTH, END + 24, {{END + 24, 8, 1}, {END + 32, 1, 9}}},
    {"B42", END, HEADER, BB_END_FRAGMENTS, END + 32, {{END + 32, 8, 3}, {END + 40, 8, 3}}},
    {"B43", END, HEADER, BB_END_PAYLOAD_BYTES, END + 40, {{END + 40, 8, 27}}},
    {"B41 an end for a fragment", F1, HEADER, BB_FRAGMENT_MISSING, F1, {{F1 + 8, 1, 0x83}, {F1 + 24, 8, 0}}},
    {"B50", F1, HEADER, BB_LIMIT_EXTENSION_BYTES, F1 + 24, {{F1 + 8, 1, 0x7F}, {F1 + 24, 8, 1048577}}},
    {"C1 head", 0, 0, BB_BODY_CRC, 48, {{HEAD_END - 1, 1, 1}}},
    {"C1 fragment, before C2", F0, 0, BB_BODY_CRC, F0 + 48, {{F0 + 64, 1, 1}, {F0 + 64 + 24, 1, 1}}},
    {"C1 end", END, HEADER, BB_BODY_CRC, END + 48, {{END + 48, 1, 1}}},
    {"C2 head, first byte", 0, 0, BB_FRAME_PADDING, HEAD_END, {{HEAD_END, 1, 1}, {255, 1, 1}}},
    {"C2 head, last byte, before D", 0, BODY, BB_FRAME_PADDING, 255, {{255, 1, 1}, {64, 1, 2}}},
    {"C2 fragment", F1, 0, BB_FRAME_PADDING, F1 + 64 + 2, {{F1 + 64 + 2, 1, 1}}},
    {"C4", F1, BODY, BB_BOOL_VALUE, F1 + 65, {{F1 + 65, 1, 2}}},
    {"C4 255", F1, BODY, BB_BOOL_VALUE, F1 + 64, {{F1 + 64, 1, 255}}},
    {"D1", 0, BODY, BB_UNSUPPORTED_HEAD_FLAG, 64, {{65, 1, 0x80}, {88, 1, 1}}},
    {"D1 bit 1", 0, BODY, BB_UNSUPPORTED_HEAD_FLAG, 64, {{64, 1, 2}}},
    {"D1 ignorable bits pass", 0, BODY, BB_OK, 0, {{66, 2, 0xFFFF}}},
    {"D3", 0, BODY, BB_HEAD_RESERVED, 88, {{95, 1, 1}, {68, 4, 257}}},
    {"D4", 0, BODY, BB_LIMIT_TENSORS, 68, {{68, 4, 257}, {76, 4, 65544}}},
    {"D5", 0, BODY, BB_LIMIT_ATTRIBUTE_BYTES, 76, {{76, 4, 65537}}},
    {"D6 no multiple of 8", 0, BODY, BB_ATTRIBUTE_BLOCK, 76, {{76, 4, 49}, {80, 8, 1}}},
    {"D6 beyond the body", 0, BODY, BB_ATTRIBUTE_BLOCK, 76, {{76, 4, 112}}},
    {"D6 all of the body, then D10", 0, BODY, BB_TENSOR_TABLE, R0, {{76, 4, 104}}},
    {"D7", 0, BODY, BB_FRAGMENT_SIZE, 80, {{80, 8, 32}, {R0 + 2, 1, 9}}},
    {"D10 one record too many", 0, BODY, BB_TENSOR_TABLE, A0, {{68, 4, 3}}},
    {"D10 before D13 reads what is no record", 0, BODY, BB_TENSOR_TABLE, A0, {{68, 4, 3}, {A0 + 4, 1, 0}}},
    {"D11", 0, BODY, BB_LIMIT_RANK, R0 + 2, {{R0 + 2, 1, 9}, {R0 + 4, 1, 64}}},
    {"D11 255", 0, BODY, BB_LIMIT_RANK, R1 + 2, {{R1 + 2, 1, 255}}},
    {"D12", 0, BODY, BB_LIMIT_NAME, R0 + 4, {{R0 + 4, 1, 64}, {R0, 1, 0}}},
    {"D13", 0, BODY, BB_TENSOR_NAME, R0 + 4, {{R0 + 4, 1, 0}, {R0, 1, 0}}},
    {"D14 rank", 0, BODY, BB_TENSOR_TABLE, R1, {{R1 + 2, 1, 2}, {R1, 1, 0}}},
    {"D14 name", 0, BODY, BB_TENSOR_TABLE, R1, {{R1 + 4, 1, 9}}},
    {"D15 0", 0, BODY, BB_UNSUPPORTED_DTYPE, R0, {{R0, 1, 0}, {R0 + 1, 1, 0}}},
    {"D15 a ggml number that was retired", 0, BODY, BB_UNSUPPORTED_DTYPE, R0, {{R0, 1, 36}}},
    {"D15 255", 0, BODY, BB_UNSUPPORTED_DTYPE, R1, {{R1, 1, 255}}},
    {"D16 0", 0, BODY, BB_TENSOR_BYTE_ORDER, R0 + 1, {{R0 + 1, 1, 0}, {R0 + 3, 1, 2}}},
    {"D16 3", 0, BODY, BB_TENSOR_BYTE_ORDER, R0 + 1, {{R0 + 1, 1, 3}}},
    {"D16 big bool", 0, BODY, BB_TENSOR_BYTE_ORDER, R1 + 1, {{R1 + 1, 1, 2}}},
    {"D17", 0, BODY, BB_TENSOR_TOKEN_AXIS, R0 + 3, {{R0 + 3, 1, 2}, {R0 + 5, 1, 1}}},
    {"D17 254", 0, BODY, BB_TENSOR_TOKEN_AXIS, R0 + 3, {{R0 + 3, 1, 254}}},
    {"D18", 0, BODY, BB_TENSOR_RESERVED, R0 + 5, {{R0 + 7, 1, 1}, {R0 + 15, 1, 1}}},
    {"D19 first", 0, BODY, BB_LIMIT_DIMENSION, R0 + 8, {{R0 + 8, 8, 2147483648u}, {R0 + 16, 8, UINT64_MAX}}},
    {"D19 second", 0, BODY, BB_LIMIT_DIMENSION, R0 + 16, {{R0 + 16, 8, (uint64_t)1 << 63}}},
    {"D20", 0, BODY, BB_TENSOR_BLOCK, R0 + 2, {{R0, 1, BB_Q8_0}, {R0 + 2, 2, 0xFF00}}},
    {"D21", 0, BODY, BB_TENSOR_BLOCK, R0 + 16, {{R0, 1, BB_Q8_0}, {R0 + 3, 1, 1}}},
    {"D22", 0, BODY, BB_TENSOR_TOKEN_AXIS, R0 + 3, {{R0, 1, BB_Q8_0}, {R0 + 3, 1, 1}, {R0 + 16, 8, 32}}},
    {"D23", 0, BODY, BB_LIMIT_PAYLOAD_BYTES, R0 + 8, {{R0 + 8, 8, 2147483647}, {R0 + 16, 8, 3}}},
    {"D25, before D27", 0, BODY, BB_FRAGMENT_SIZE, 80,
     {{80, 8, 64}, {R0, 1, BB_Q8_0}, {R0 + 16, 8, 32}, {R0 + 24, 1, '!'}}},
    {"D26, before D27", 0, BODY, BB_LIMIT_FRAGMENTS, 80, {{80, 8, 64}, {R0 + 8, 8, 5592406}, {R0 + 24, 1, '!'}}},
    {"D27 first byte", 0, BODY, BB_TENSOR_NAME, R0 + 24, {{R0 + 24, 1, '!'}, {R0 + 31, 1, 0}}},
    {"D27 NUL inside", 0, BODY, BB_TENSOR_NAME, R0 + 31, {{R0 + 31, 1, 0}}},
    {"D27 top bit", 0, BODY, BB_TENSOR_NAME, R1 + 18, {{R1 + 18, 1, 0xC3}, {R1 + 23, 1, 1}}},
    {"D28", 0, BODY, BB_RECORD_PADDING, R1 + 23, {{R1 + 23, 1, 'x'}}},
    {"D30", 0, BODY, BB_TOKEN_COUNT, R1 + 8, {{R1 + 8, 8, 3}}},
    {"D40 a record too few", 0, BODY, BB_TENSOR_TABLE, R1, {{68, 4, 1}, {A0, 2, 0}}},
    {"D50 a record too many", 0, BODY, BB_ATTRIBUTE_BLOCK, HEAD_END, {{72, 4, 4}}},
    {"D50 2^32 - 1 records", 0, BODY, BB_ATTRIBUTE_BLOCK, HEAD_END, {{72, 4, 0xFFFFFFFFu}}},
    {"D51", 0, BODY, BB_ATTRIBUTE_BLOCK, A2 + 4, {{A2 + 4, 4, 9}, {A2, 2, 0}}},
    {"D51 2^32 - 1", 0, BODY, BB_ATTRIBUTE_BLOCK, A0 + 4, {{A0 + 4, 4, 0xFFFFFFFFu}}},
    {"D52", 0, BODY, BB_ATTRIBUTE_KEY, A0, {{A0, 2, 0}, {A0 + 2, 1, 9}}},
    {"D52 private", 0, BODY, BB_ATTRIBUTE_KEY, A1, {{A1, 2, 0x4000}}},
    {"D53 equal", 0, BODY, BB_ATTRIBUTE_ORDER, A1, {{A1, 2, 2}, {A1 + 2, 1, 9}}},
    {"D53 descending", 0, BODY, BB_ATTRIBUTE_ORDER, A2, {{A2, 2, 0x4000 - 1}}},
    {"D54 0", 0, BODY, BB_ATTRIBUTE_TYPE, A1 + 2, {{A1 + 2, 2, 0x0100}}},
    {"D54 6", 0, BODY, BB_ATTRIBUTE_TYPE, A1 + 2, {{A1 + 2, 1, 6}}},
    {"D55", 0, BODY, BB_ATTRIBUTE_RESERVED, A2 + 3, {{A2 + 3, 1, 1}, {A2, 2, 0x8777}}},
    {"D56", 0, BODY, BB_UNSUPPORTED_ATTRIBUTE, A2, {{A2, 2, 0x8002}, {A2 + 4, 4, 7}}},
    {"D56 private", 0, BODY, BB_UNSUPPORTED_ATTRIBUTE, A2, {{A2, 2, 0xC001}}},
    {"D57", 0, BODY, BB_ATTRIBUTE_TYPE, A2 + 2, {{A2 + 2, 1, BB_ATTR_I64}, {A2 + 4, 4, 7}}},
    {"D58 a short u64", 0, BODY, BB_ATTRIBUTE_LENGTH, A2 + 4, {{A2 + 4, 4, 7}}},
    {"D58 unknown f64", 0, BODY, BB_ATTRIBUTE_LENGTH, A1 + 4, {{A1 + 2, 1, BB_ATTR_F64}}},
    {"D58 a short fingerprint", 0, BODY, BB_ATTRIBUTE_LENGTH, A2 + 4, {{A2, 3, 0x048001}}},
    {"D59 control", 0, BODY, BB_ATTRIBUTE_VALUE, A0 + 8, {{A0 + 8, 1, 0x1F}, {A0 + 13, 1, 1}}},
    {"D59 0x7F", 0, BODY, BB_ATTRIBUTE_VALUE, A0 + 12, {{A0 + 12, 1, 0x7F}}},
    {"D60", 0, BODY, BB_RECORD_PADDING, A0 + 15, {{A0 + 15, 1, 1}}},
    {"D60 after bytes", 0, BODY, BB_RECORD_PADDING, A1 + 11, {{A1 + 11, 1, 1}}},
    {"D61", 0, BODY, BB_TOKEN_COUNT, A2 + 8, {{A2 + 8, 8, 3}}},
    {"D70 a record too few", 0, BODY, BB_ATTRIBUTE_BLOCK, A2, {{72, 4, 2}}},
};

static void test_malformed(const bb_config *c) {
    uint8_t base[SIZE], p[SIZE];
    size_t i, k;
    make_base(c, base);
    memcpy(sound, base, SIZE);
    for (i = 0; i < sizeof table / sizeof table[0]; i++) {
        const malformed *m = &table[i];
        context = m->why;
        memcpy(p, base, SIZE);
        for (k = 0; k < 4; k++) {
            put(p + m->changes[k].at, m->changes[k].n, m->changes[k].value);
        }
        if (m->seal & BODY) {
            seal_body(p + m->frame);
        }
        if (m->seal & (BODY | HEADER)) {
            seal_header(p + m->frame);
        }
        expect(c, p, SIZE, m->code, m->offset, (m->seal & CORE) != 0);
    }
    context = "";
}

/* ---- errors that need more than a change --------------------------------- */

static void test_more_errors(const bb_config *c) {
    uint8_t base[SIZE], p[4 * SIZE];
    bb_config low;
    bb_bundle b;
    bb_error e;
    size_t n, i, want;
    make_base(c, base);

    context = "B14, B15";
    memcpy(p, base, F0);
    memcpy(p + F0, base, F0);
    expect(c, p, 2 * F0, BB_BUNDLE_ALREADY_OPEN, F0 + 16, 0);
    p[F0 + 16] = 8;
    seal_header(p + F0);
    expect(c, p, 2 * F0, BB_LIMIT_OPEN_BUNDLES, F0 + 16, 1);

    context = "trailing_bytes";
    memcpy(p, base, SIZE);
    p[SIZE] = 0;
    expect(c, p, SIZE + 1, BB_TRAILING_BYTES, SIZE, 0);
    memcpy(p + SIZE, base, SIZE);
    expect(c, p, 2 * SIZE, BB_TRAILING_BYTES, SIZE, 0);

    context = "truncated";
    for (n = 0; n < SIZE; n++) {
        expect(c, base, n, BB_TRUNCATED, n, 0);
        want = n < 8 ? 8 : n < 64 ? 64 : F0;
        memset(&e, 0, sizeof e);
        EQUAL(bb_decode_head(c, base, n, &b, &i, &e), n < F0 ? BB_NEED_MORE : BB_OK);
        EQUAL(i, want);
        EQUAL(e.code, n < F0 ? BB_NEED_MORE : BB_OK);
    }
    EQUAL(bb_decode_head(c, NULL, 0, &b, NULL, NULL), BB_NEED_MORE);

    context = "one bit anywhere";
    for (n = 0; n < SIZE * 8; n++) {
        int r;
        memcpy(p, base, SIZE);
        p[n / 8] = (uint8_t)(p[n / 8] ^ 1u << n % 8);
        r = bb_decode(c, p, SIZE, &b, &e);
        CHECK(r >= 100);
    }

    context = "no checksums";
    memcpy(p, base, SIZE);
    p[64] = 1;
    seal_body(p);
    seal_header(p);
    expect(c, p, SIZE, BB_PAYLOAD_CRC_PRESENT, F0 + 48, 0); /* B34 */
    put(p + F0 + 48, 4, 0);
    seal_header(p + F0);
    put(p + F1 + 48, 4, 0);
    seal_header(p + F1);
    p[F0 + 70] = 99; /* nobody sees it */
    expect(c, p, SIZE, BB_OK, 0, 0);
    p[F1 + 64] = 3;
    expect(c, p, SIZE, BB_BOOL_VALUE, F1 + 64, 0);
    p[F1 + 66] = 3;
    expect(c, p, SIZE, BB_FRAME_PADDING, F1 + 66, 0);
    low = *c;
    low.require_checksums = true;
    p[88] = 1; /* D2 before D3 */
    seal_body(p);
    seal_header(p);
    expect(&low, p, SIZE, BB_CHECKSUMS_REQUIRED, 64, 0);
    expect(&low, base, SIZE, BB_OK, 0, 0);

    context = "D29";
    {
        bb_desc d;
        bb_tensor t[2];
        bb_attr a[3];
        describe(&d, t, a);
        strcpy(t[1].name, "outputx1");
        d.attr_count = 0;
        EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
        memcpy(p + R1 + 16, "residual", 8);
        seal_body(p);
        seal_header(p);
        expect(c, p, n, BB_TENSOR_DUPLICATE, R1 + 16, 0);
    }

    context = "limits lowered";
#define LOWER(field, value, code, offset) \
    low = *c; \
    low.limits.field = (value); \
    expect(&low, base, SIZE, code, offset, 0)
    LOWER(head_bytes, 135, BB_LIMIT_HEAD_BYTES, 24);
    LOWER(head_bytes, 136, BB_OK, 0);
    LOWER(tensors, 1, BB_LIMIT_TENSORS, 68);
    LOWER(tensors, 2, BB_OK, 0);
    LOWER(name_bytes, 7, BB_LIMIT_NAME, R0 + 4);
    LOWER(name_bytes, 8, BB_OK, 0);
    LOWER(rank, 1, BB_LIMIT_RANK, R0 + 2);
    LOWER(rank, 2, BB_OK, 0);
    LOWER(dimension, 2, BB_LIMIT_DIMENSION, R0 + 16);
    LOWER(dimension, 3, BB_OK, 0);
    LOWER(payload_bytes, 23, BB_LIMIT_PAYLOAD_BYTES, R0 + 8); /* D23 */
    LOWER(payload_bytes, 25, BB_LIMIT_PAYLOAD_BYTES, R1 + 8); /* D24 */
    LOWER(payload_bytes, 26, BB_OK, 0);
    LOWER(attribute_bytes, 47, BB_LIMIT_ATTRIBUTE_BYTES, 76);
    LOWER(attribute_bytes, 48, BB_OK, 0);
    LOWER(fragments, 1, BB_LIMIT_FRAGMENTS, 80);
    LOWER(fragments, 2, BB_OK, 0);
#undef LOWER

    context = "zero dimensions count as one in either order";
    bb_limits_maximum(&low.limits);
    low.limits.open_bundles = SLOTS;
    for (i = 0; i < 2; i++) {
        memcpy(p, base, SIZE);
        put(p + R0 + 8, 8, i == 0 ? (uint64_t)1 << 62 : 0);
        put(p + R0 + 16, 8, i == 0 ? 0 : (uint64_t)1 << 62);
        p[R0 + 3] = 255;
        seal_body(p);
        seal_header(p);
        expect(&low, p, SIZE, BB_LIMIT_PAYLOAD_BYTES, R0 + 8, 0);
        put(p + R0 + (i == 0 ? 8 : 16), 8, (uint64_t)1 << 63);
        seal_body(p);
        seal_header(p);
        expect(&low, p, SIZE, BB_LIMIT_DIMENSION, R0 + (i == 0 ? 8 : 16), 0);
        put(p + R0 + (i == 0 ? 8 : 16), 8, 1000);
        seal_body(p);
        seal_header(p);
        expect(&low, p, SIZE, BB_FRAGMENT_OFFSET, F0 + 40, 0); /* no bytes, so no fragment */
    }
    context = "products that wrap";
    {
        static const uint64_t wrap[][2] = {{(uint64_t)1 << 62, 4},
                                           {(uint64_t)1 << 32, (uint64_t)1 << 32},
                                           {INT64_MAX, INT64_MAX},
                                           {(uint64_t)1 << 62, 1},
                                           {3, (uint64_t)1 << 62}};
        for (i = 0; i < sizeof wrap / sizeof wrap[0]; i++) {
            memcpy(p, base, SIZE);
            put(p + R0 + 8, 8, wrap[i][0]);
            put(p + R0 + 16, 8, wrap[i][1]);
            seal_body(p);
            seal_header(p);
            expect(&low, p, SIZE, BB_LIMIT_PAYLOAD_BYTES, R0 + 8, 0);
        }
    }

    context = "extension frames";
    memcpy(p, base, F1);
    n = F1 + frame(p + F1, 0x41, 7, 11, 22, "hello", 5);
    n += frame(p + n, 0x00, 7, UINT64_MAX, 0, NULL, 0);
    memcpy(p + n, base + F1, SIZE - F1);
    expect(c, p, n + SIZE - F1, BB_OK, 0, 0);
    EQUAL(bb_decode(c, p, n + SIZE - F1, &b, &e), BB_OK);
    {
        bb_tensor t;
        float back[6];
        EQUAL(bb_tensor_at(&b, 1, &t), BB_OK);
        CHECK(t.data == p + n + 64);
        EQUAL(bb_tensor_read(&b, 0, back, sizeof back), BB_OK);
        CHECK(memcmp(back, values, sizeof back) == 0);
    }
    p[F1 + 64] = 'j';
    expect(c, p, n + SIZE - F1, BB_BODY_CRC, F1 + 48, 0);
    p[F1 + 64] = 'h';
    p[F1 + 127] = 1;
    expect(c, p, n + SIZE - F1, BB_FRAME_PADDING, F1 + 127, 0);
    p[F1 + 127] = 0;
    p[F1 + 14] = 1;
    seal_header(p + F1);
    expect(c, p, n + SIZE - F1, BB_FRAME_VERSION, F1 + 14, 0);
    low = *c;
    low.limits.extension_bytes = 4;
    p[F1 + 14] = 0;
    seal_header(p + F1);
    expect(&low, p, n + SIZE - F1, BB_LIMIT_EXTENSION_BYTES, F1 + 24, 0);

    context = "a higher minor";
    memcpy(p, base, SIZE);
    for (i = 0; i < 4; i++) {
        static const size_t at[4] = {0, F0, F1, END};
        p[at[i] + 14] = 1;
        seal_header(p + at[i]);
    }
    expect(c, p, SIZE, BB_OK, 0, 0);
    EQUAL(bb_decode(c, p, SIZE, &b, &e), BB_OK);
    EQUAL(b.minor, 1);

    context = "attributes only";
    {
        uint8_t body[32 + 16];
        memset(body, 0, sizeof body);
        body[8] = 1;
        body[12] = 16;
        put(body + 32, 2, 0x8006);
        body[34] = 1;
        body[36] = 8;
        body[40] = 77; /* no token axis, so no D61 */
        n = frame(p, 0x81, 1, 0, 0, body, sizeof body);
        n += frame(p + n, 0x83, 1, 0, 0, NULL, 0);
        expect(c, p, n, BB_OK, 0, 0);
        memset(body, 0, sizeof body);
        n = frame(p, 0x81, 0, 0, 0, body, 32);
        n += frame(p + n, 0x83, 0, 0, 0, NULL, 0);
        expect(c, p, n, BB_OK, 0, 0);
        n = frame(p, 0x81, 0, 0, 0, body, 40); /* D40 with no records */
        expect(c, p, n, BB_TENSOR_TABLE, 96, 0);
    }
    context = "";
}

/* ---- the encoder refuses what the decoder would -------------------------- */

/* bb_encode_parts and the prepared encoders do as bb_encode did: `code`, and the n
 * bytes at p. `other`: a description to prepare with, besides d itself. */
static void check_parts(const bb_config *c, const bb_desc *d, const bb_desc *other, const uint8_t *p, size_t n,
                        int code, const bb_error *first) {
    static uint8_t scratch[65536], memory[65536], again[65536];
    static bb_part parts[512];
    int way;
    for (way = 0; way < 3; way++) {
        bb_prepared ready;
        bb_error e;
        uint64_t parts_wanted = 0, scratch_wanted = 0;
        size_t count = 1, at = 0, i, own = 0, wrote = 1;
        int r;
        if (way > 0 && bb_prepare_encode(&ready, c, way == 1 ? d : other, memory, sizeof memory, &e) != BB_OK) {
            continue;
        }
        memset(&e, 0, sizeof e);
        r = way == 0 ? bb_encode_parts(c, d, parts, 512, &count, scratch, sizeof scratch, &e)
                     : bb_prepared_encode_parts(&ready, d, parts, 512, &count, scratch, sizeof scratch, &e);
        EQUAL(r, code);
        if (code != BB_OK) {
            EQUAL(count, 0);
            CHECK(memcmp(&e, first, sizeof e) == 0);
        } else {
            for (i = 0; i < count; i++) {
                const uint8_t *data = (const uint8_t *)parts[i].data;
                CHECK(at + parts[i].size <= n && memcmp(p + at, data, parts[i].size) == 0);
                at += parts[i].size;
                own += data >= scratch && data < scratch + sizeof scratch ? parts[i].size : 0;
                CHECK(parts[i].size > 0);
            }
            EQUAL(at, n);
            EQUAL(bb_encode_parts_size(c, d, &parts_wanted, &scratch_wanted, &e), BB_OK);
            EQUAL(count, parts_wanted);
            EQUAL(own, scratch_wanted);
            EQUAL(bb_encode_parts(c, d, parts, count, &wrote, scratch, own - 1, &e), BB_E_SPACE);
            EQUAL(e.expected, own);
            EQUAL(bb_encode_parts(c, d, parts, count - 1, &wrote, scratch, own, &e), BB_E_SPACE);
            EQUAL(e.expected, count);
            EQUAL(bb_encode_parts(c, d, parts, count, &wrote, scratch, own, &e), BB_OK);
        }
        if (way > 0) {
            memset(&e, 0, sizeof e);
            EQUAL(bb_prepared_encode(&ready, d, again, sizeof again, &wrote, &e), code);
            EQUAL(wrote, code == BB_OK ? n : 0);
            CHECK(code == BB_OK ? memcmp(again, p, n) == 0 : memcmp(&e, first, sizeof e) == 0);
        }
    }
}

static void refuse(const bb_config *c, const bb_desc *d, int code, uint64_t offset) {
    static uint8_t p[8192];
    bb_error e;
    uint64_t size = 1;
    size_t n = 1;
    memset(&e, 0, sizeof e);
    EQUAL(bb_encode(c, d, p, sizeof p, &n, &e), code);
    EQUAL(n, 0);
    EQUAL(e.code, code);
    EQUAL(e.offset, offset);
    {
        bb_desc good;
        bb_tensor t[2];
        bb_attr a[3];
        describe(&good, t, a);
        check_parts(c, d, &good, p, n, code, &e);
    }
    if (code != BB_BOOL_VALUE) {
        EQUAL(bb_encoded_size(c, d, &size, NULL), code);
        EQUAL(size, 0);
    }
}

static void test_encoder(const bb_config *c) {
    bb_desc d;
    bb_tensor t[2];
    bb_attr a[3];
    bb_config low;
    static const uint8_t bad_bool[2] = {1, 2};
    uint8_t p[SIZE];
    size_t n;
    uint64_t size;
    bb_error e;
    context = "encoder";
#define REFUSE(change, code, offset) \
    describe(&d, t, a); \
    change; \
    refuse(c, &d, code, offset)
    REFUSE(t[0].name[0] = '\0', BB_TENSOR_NAME, R0 + 4);
    REFUSE(t[0].name[3] = ' ', BB_TENSOR_NAME, R0 + 24 + 3);
    REFUSE(memset(t[0].name, 'a', 64), BB_LIMIT_NAME, R0 + 4);
    REFUSE(strcpy(t[1].name, "residual"), BB_TENSOR_DUPLICATE, R1 + 16);
    REFUSE(t[0].dtype = 0, BB_UNSUPPORTED_DTYPE, R0);
    REFUSE(t[0].byte_order = 0, BB_TENSOR_BYTE_ORDER, R0 + 1);
    REFUSE(t[1].byte_order = BB_BIG, BB_TENSOR_BYTE_ORDER, R1 + 1);
    REFUSE(t[0].rank = 9, BB_LIMIT_RANK, R0 + 2);
    REFUSE(t[0].rank = 255, BB_LIMIT_RANK, R0 + 2);
    REFUSE(t[0].token_axis = 2, BB_TENSOR_TOKEN_AXIS, R0 + 3);
    REFUSE(t[0].dims[1] = (uint64_t)1 << 31, BB_LIMIT_DIMENSION, R0 + 16);
    REFUSE(t[0].dims[1] = INT32_MAX; t[0].dims[0] = 3; t[1].dims[0] = 3, BB_LIMIT_PAYLOAD_BYTES, R0 + 8);
    REFUSE(t[1].dims[0] = 1, BB_TOKEN_COUNT, R1 + 8);
    REFUSE(t[0].dtype = BB_Q8_0, BB_TENSOR_BLOCK, R0 + 16);
    REFUSE(t[0].dtype = BB_Q8_0; t[0].rank = 0; t[0].token_axis = 255, BB_TENSOR_BLOCK, R0 + 2);
    REFUSE(t[0].dtype = BB_Q8_0; t[0].dims[1] = 32; t[0].token_axis = 1, BB_TENSOR_TOKEN_AXIS, R0 + 3);
    REFUSE(d.fragment_size = 32, BB_FRAGMENT_SIZE, 80);
    REFUSE(d.fragment_size = 64; t[0].dtype = BB_Q8_0; t[0].dims[1] = 32, BB_FRAGMENT_SIZE, 80);
    REFUSE(t[1].data = bad_bool, BB_BOOL_VALUE, F1 + 65);
    REFUSE(a[1].key = 2, BB_ATTRIBUTE_ORDER, A1);
    REFUSE(a[1].key = 0x4000, BB_ATTRIBUTE_KEY, A1);
    REFUSE(a[1].key = 0x8002, BB_UNSUPPORTED_ATTRIBUTE, A1);
    REFUSE(a[1].type = 6, BB_ATTRIBUTE_TYPE, A1 + 2);
    REFUSE(a[0].type = BB_ATTR_BYTES, BB_ATTRIBUTE_TYPE, A0 + 2);
    REFUSE(a[1].key = BB_KEY_RECIPE_FINGERPRINT, BB_ATTRIBUTE_LENGTH, A1 + 4);
    REFUSE(a[0].value = "lla\na", BB_ATTRIBUTE_VALUE, A0 + 8 + 3);
    REFUSE(a[2].u64 = 3, BB_TOKEN_COUNT, A2 + 8);
#undef REFUSE
    describe(&d, t, a);
    low = *c;
    low.limits.head_bytes = 128;
    refuse(&low, &d, BB_LIMIT_HEAD_BYTES, 24);
    low = *c;
    low.limits.tensors = 1;
    refuse(&low, &d, BB_LIMIT_TENSORS, 68);
    low = *c;
    low.limits.attribute_bytes = 40;
    refuse(&low, &d, BB_LIMIT_ATTRIBUTE_BYTES, 76);
    low = *c;
    low.limits.fragments = 1;
    refuse(&low, &d, BB_LIMIT_FRAGMENTS, 80);
    low = *c;
    low.require_checksums = true;
    d.no_checksums = true;
    refuse(&low, &d, BB_CHECKSUMS_REQUIRED, 64);

    context = "faults of the call";
    describe(&d, t, a);
    EQUAL(bb_encoded_size(c, &d, &size, NULL), BB_OK);
    EQUAL(size, SIZE);
    EQUAL(bb_encode(c, &d, p, SIZE - 1, &n, &e), BB_E_SPACE);
    EQUAL(e.expected, SIZE);
    t[0].bytes = 24;
    EQUAL(bb_encode(c, &d, p, SIZE, &n, &e), BB_OK);
    t[0].bytes = 20; /* the declared and the real size differ */
    EQUAL(bb_encode(c, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    EQUAL(e.tensor, 0);
    t[0].bytes = 0;
    t[0].data = NULL;
    EQUAL(bb_encode(c, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    EQUAL(bb_encoded_size(c, &d, &size, NULL), BB_OK);
    EQUAL(bb_encode(NULL, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    EQUAL(bb_encode(c, NULL, p, SIZE, &n, &e), BB_E_ARGUMENT);
    a[0].value = NULL;
    EQUAL(bb_encode(c, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    low = *c;
    low.limits.rank = 9;
    EQUAL(bb_encode(&low, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    {
        bb_bundle b;
        EQUAL(bb_decode(&low, p, 0, &b, &e), BB_E_ARGUMENT);
        EQUAL(bb_decode(c, NULL, 1, &b, &e), BB_E_ARGUMENT);
        EQUAL(bb_decode(c, p, 0, NULL, &e), BB_E_ARGUMENT);
        EQUAL(bb_decode(c, NULL, 0, &b, NULL), BB_TRUNCATED);
    }
    context = "";
}

/* ---- round trips --------------------------------------------------------- */

static void swap_bytes(uint8_t *p, size_t bytes, size_t element) {
    size_t i, k;
    for (i = 0; i < bytes; i += element) {
        for (k = 0; k < element / 2; k++) {
            uint8_t x = p[i + k];
            p[i + k] = p[i + element - 1 - k];
            p[i + element - 1 - k] = x;
        }
    }
}

static void test_round_trips(const bb_config *c) {
    static const unsigned codes[] = {BB_F64, BB_F32, BB_F16, BB_BF16, BB_F8_E4M3FN, BB_F8_E5M2, BB_I8, BB_I16,
                                     BB_I32, BB_I64, BB_U8, BB_U16, BB_U32, BB_U64, BB_BOOL, BB_Q8_0};
    static const uint64_t sizes[] = {0, 1088, 2176, 64};
    static uint8_t source[3 * 160 * 8], p[65536], wire[3 * 160 * 8], back[3 * 160 * 8];
    size_t i, k, n;
    int order, sums;
    for (i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        for (order = 1; order <= 2; order++) {
            for (k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
                for (sums = 0; sums < 2; sums++) {
                    unsigned code = codes[i];
                    size_t bytes = 3 * 160 / bb_dtype_block_elements(code) * bb_dtype_block_bytes(code), j;
                    uint64_t size;
                    bb_tensor t, u;
                    bb_desc d;
                    bb_bundle b;
                    bb_error e;
                    if ((order == BB_BIG && !bb_dtype_both_orders(code)) || (code == BB_Q8_0 && sizes[k] == 64)) {
                        continue;
                    }
                    context = bb_dtype_name(code);
                    for (j = 0; j < bytes; j++) {
                        source[j] = (uint8_t)(random_next() >> 56);
                        if (code == BB_BOOL) {
                            source[j] &= 1;
                        }
                    }
                    memcpy(wire, source, bytes);
                    if (bb_dtype_both_orders(code) && order != BB_NATIVE_ORDER) {
                        swap_bytes(wire, bytes, bb_dtype_block_bytes(code));
                    }
                    tensor(&t, "x/y-z.0_A", (int)code, order, 0, 2, 3, 160, 0, source);
                    memset(&d, 0, sizeof d);
                    d.tensors = &t;
                    d.tensor_count = 1;
                    d.fragment_size = sizes[k];
                    d.no_checksums = sums == 1;
                    d.number = UINT64_MAX;
                    d.minor = 65535;
                    EQUAL(bb_encoded_size(c, &d, &size, &e), BB_OK);
                    memset(p, 0xAA, sizeof p);
                    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
                    EQUAL(n, size);
                    CHECK(p[n] == 0xAA);
                    {
                        bb_desc other = d;
                        other.number = 5;
                        other.minor = 0;
                        check_parts(c, &d, &other, p, n, BB_OK, NULL);
                    }
                    expect(c, p, n, BB_OK, 0, 0);
                    EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
                    EQUAL(b.fragments, sizes[k] == 0 ? 1 : (bytes + sizes[k] - 1) / sizes[k]);
                    EQUAL(b.payload_bytes, bytes);
                    CHECK(b.number == UINT64_MAX && b.minor == 65535);
                    EQUAL(bb_tensor_find(&b, "x/y-z.0_A", &u), 0);
                    EQUAL(bb_tensor_find(&b, "x/y-z.0_", NULL), -1);
                    EQUAL(bb_tensor_find(&b, "x/y-z.0_AB", NULL), -1);
                    EQUAL(u.bytes, bytes);
                    EQUAL(u.byte_order, order);
                    CHECK(u.rank == 2 && u.dims[0] == 3 && u.dims[1] == 160 && u.token_axis == 0 && u.dtype == code);
                    CHECK((u.data != NULL) == (b.fragments == 1));
                    CHECK(u.data == NULL || memcmp(u.data, wire, bytes) == 0);
                    memset(back, 0, sizeof back);
                    EQUAL(bb_tensor_read(&b, 0, back, bytes - 1), BB_E_SPACE);
                    EQUAL(bb_tensor_read(&b, 0, back, bytes), BB_OK);
                    CHECK(memcmp(back, source, bytes) == 0);
                    EQUAL(bb_tensor_read(&b, 1, back, bytes), BB_E_ARGUMENT);
                }
            }
        }
    }

    context = "shapes";
    {
        static const uint8_t one[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        bb_tensor t[5], u;
        bb_desc d;
        bb_bundle b;
        bb_error e;
        memset(&d, 0, sizeof d);
        tensor(&t[0], "scalar", BB_U64, BB_NATIVE_ORDER, 255, 0, 0, 0, 0, one);
        tensor(&t[1], "empty", BB_F32, BB_BIG, 0, 2, 0, 4096, 0, NULL);
        tensor(&t[2], "deep", BB_U8, BB_LITTLE, 255, 8, 1, 1, 1, one);
        t[2].dims[3] = t[2].dims[4] = t[2].dims[5] = t[2].dims[6] = 1;
        t[2].dims[7] = 8;
        tensor(&t[3], "void", BB_Q8_0, BB_LITTLE, 0, 2, 0, 64, 0, NULL);
        tensor(&t[4], "positions", BB_I32, BB_LITTLE, 1, 2, 4, 0, 0, NULL);
        d.tensors = t;
        d.tensor_count = 5;
        EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
        check_parts(c, &d, &d, p, n, BB_OK, NULL);
        expect(c, p, n, BB_OK, 0, 0);
        EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
        EQUAL(b.fragments, 2);
        EQUAL(b.payload_bytes, 16);
        EQUAL(bb_tensor_at(&b, 1, &u), BB_OK);
        CHECK(u.bytes == 0 && u.data == NULL && u.dims[1] == 4096);
        EQUAL(bb_tensor_read(&b, 1, NULL, 0), BB_OK);
        EQUAL(bb_tensor_at(&b, 2, &u), BB_OK);
        CHECK(u.rank == 8 && u.dims[7] == 8 && memcmp(u.data, one, 8) == 0);
        EQUAL(bb_tensor_read(&b, 0, back, 8), BB_OK);
        CHECK(memcmp(back, one, 8) == 0);
        EQUAL(bb_tensor_at(&b, 5, &u), BB_E_ARGUMENT);
    }

    context = "attributes";
    {
        bb_attr a[4], v;
        bb_desc d;
        bb_bundle b;
        bb_error e;
        memset(&d, 0, sizeof d);
        attr(&a[0], 0x0002, BB_ATTR_TEXT, NULL, 0, 0); /* empty is a value */
        attr(&a[1], 0x0100, BB_ATTR_I64, NULL, 0, (uint64_t)-5);
        attr(&a[2], 0x4001, BB_ATTR_F64, NULL, 99, 0x7FF8000000000001u); /* a NaN with a payload */
        attr(&a[3], 0x8008, BB_ATTR_BYTES, "0123456789abcdef0123456789abcdef", 32, 0);
        d.attrs = a;
        d.attr_count = 4;
        EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
        for (i = 0; i < 4; i++) { /* prepared with one value another */
            bb_attr others[4];
            bb_desc other = d;
            memcpy(others, a, sizeof others);
            other.attrs = others;
            if (i == 0) {
                others[0].value = "x";
                others[0].length = 1;
            } else if (i == 3) {
                others[3].value = "0123456789abcdef0123456789abcdeg";
            } else {
                others[i].u64++;
            }
            check_parts(c, &d, &other, p, n, BB_OK, NULL);
        }
        expect(c, p, n, BB_OK, 0, 0);
        EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
        EQUAL(b.attribute_count, 4);
        EQUAL(bb_attr_find(&b, 0x0002, &v), 0);
        CHECK(v.type == BB_ATTR_TEXT && v.length == 0 && v.value != NULL);
        EQUAL(bb_attr_find(&b, 0x0100, &v), 1);
        CHECK(v.u64 == (uint64_t)-5 && v.length == 8);
        EQUAL(bb_attr_at(&b, 2, &v), BB_OK);
        CHECK(v.key == 0x4001 && v.u64 == 0x7FF8000000000001u);
        EQUAL(bb_attr_find(&b, 0x8008, &v), 3);
        CHECK(memcmp(v.value, "0123456789abcdef0123456789abcdef", 32) == 0);
        EQUAL(bb_attr_find(&b, 0x8001, &v), -1);
        EQUAL(bb_attr_at(&b, 4, &v), BB_E_ARGUMENT);
        EQUAL(bb_decode_head(c, p, n, &b, NULL, &e), BB_OK);
        EQUAL(bb_attr_find(&b, 0x8008, NULL), 3);
    }

    context = "the alphabet of names";
    for (i = 1; i < 256; i++) {
        static const char alphabet[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";
        bb_tensor t;
        bb_desc d;
        uint64_t size;
        memset(&d, 0, sizeof d);
        tensor(&t, "x", BB_U8, 1, 255, 1, 0, 0, 0, NULL);
        t.name[0] = (char)i;
        d.tensors = &t;
        d.tensor_count = 1;
        EQUAL(bb_encoded_size(c, &d, &size, NULL), strchr(alphabet, (int)i) != NULL ? BB_OK : BB_TENSOR_NAME);
    }

    context = "one byte of a long name";
    for (i = 0; i < 63; i++) {
        bb_tensor t;
        bb_desc d;
        uint64_t size;
        bb_error e;
        memset(&d, 0, sizeof d);
        tensor(&t, "aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789._-/aBcDeFgHiJkLmNoPqRsTuVw", BB_U8, 1, 255, 1, 0, 0, 0, NULL);
        EQUAL(strlen(t.name), 63);
        d.tensors = &t;
        d.tensor_count = 1;
        EQUAL(bb_encoded_size(c, &d, &size, NULL), BB_OK);
        t.name[i] = i % 2 == 0 ? '`' : (char)0xE1;
        EQUAL(bb_encoded_size(c, &d, &size, &e), BB_TENSOR_NAME);
        EQUAL(e.offset, 64 + 32 + 16 + i);
    }

    context = "many names";
    {
        static bb_tensor many[256];
        bb_desc d;
        bb_bundle b;
        bb_error e;
        memset(&d, 0, sizeof d);
        for (i = 0; i < 256; i++) {
            char name[16];
            snprintf(name, sizeof name, "t%d", (int)i);
            tensor(&many[i], name, BB_U8, 1, 255, 1, 0, 0, 0, NULL);
        }
        d.tensors = many;
        d.tensor_count = 256;
        EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
        EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
        EQUAL(bb_tensor_find(&b, "t255", NULL), 255);
        strcpy(many[255].name, "t3");
        EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_TENSOR_DUPLICATE);
        EQUAL(e.tensor, 255);
    }
    context = "";
}

/* ---- streams ------------------------------------------------------------- */

static void start(bb_stream *s, const bb_config *c, unsigned flags, bb_stream_slot *slots, pool *memory) {
    memset(memory, 0, sizeof *memory);
    EQUAL(bb_stream_init(s, c, flags, slots, SLOTS, pool_reserve, memory), BB_OK);
}

/* One whole frame in, one event out. */
static int one(bb_stream *s, const uint8_t *p, size_t n, bb_event *event, bb_error *e) {
    size_t taken;
    int r = bb_stream_push(s, p, n, &taken, event, e);
    if (r == BB_OK) {
        EQUAL(taken, n);
    }
    return r;
}

static void test_streams(const bb_config *c) {
    enum { COUNT = 70, BYTES = COUNT * 64 - 12 };
    static uint8_t source[BYTES], back[BYTES], p[65536], q[65536];
    bb_stream s;
    bb_stream_slot slots[SLOTS];
    pool memory;
    bb_event event;
    bb_error e;
    bb_tensor t[2], u;
    bb_desc d;
    size_t n, taken, i, at, head;
    int order[COUNT], round;

    context = "any order";
    for (i = 0; i < BYTES; i++) {
        source[i] = (uint8_t)(random_next() >> 56);
    }
    memset(&d, 0, sizeof d);
    tensor(&t[0], "first", BB_U16, BB_BIG, 255, 1, BYTES / 2, 0, 0, source);
    tensor(&t[1], "last", BB_U8, BB_LITTLE, 255, 1, 5, 0, 0, source);
    d.tensors = t;
    d.tensor_count = 2;
    d.fragment_size = 64;
    d.number = 3;
    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
    head = 64 + (((size_t)get(p + 24, 8) + 63) & ~(size_t)63);
    EQUAL(n, head + (COUNT + 1) * 128 + 64);
    for (round = 0; round < 6; round++) {
        for (i = 0; i < COUNT; i++) {
            order[i] = (int)(round == 0 ? i : round == 1 ? COUNT - 1 - i : i);
        }
        for (i = COUNT - 1; round > 1 && i > 0; i--) {
            size_t k = (size_t)(random_next() % (i + 1));
            int x = order[i];
            order[i] = order[k];
            order[k] = x;
        }
        start(&s, c, BB_STREAM_CLASS, slots, &memory);
        EQUAL(one(&s, p, head, &event, &e), BB_OK);
        EQUAL(event.kind, BB_EVENT_HEAD);
        EQUAL(bb_tensor_find(event.bundle, "first", &u), 0);
        CHECK(u.data == NULL && !event.bundle->complete);
        CHECK(memory.asked <= head); /* nothing for a size that was only declared */
        EQUAL(one(&s, p + head + COUNT * 128, 128, &event, &e), BB_OK); /* the last tensor first */
        CHECK(event.tensor == 1 && event.payload_offset == 0 && event.size == 5);
        for (i = 0; i < COUNT; i++) {
            at = head + (size_t)order[i] * 128;
            EQUAL(one(&s, p + at, 128, &event, &e), BB_OK);
            CHECK(event.kind == BB_EVENT_FRAGMENT && !event.repeated && event.tensor == 0);
            EQUAL(event.payload_offset, order[i] * 64);
            if (i % 3 == 0) {
                at = head + (size_t)order[i / 2] * 128;
                EQUAL(one(&s, p + at, 128, &event, &e), BB_OK);
                CHECK(event.repeated);
            }
        }
        EQUAL(one(&s, p + n - 64, 64, &event, &e), BB_OK);
        EQUAL(event.kind, BB_EVENT_BUNDLE);
        CHECK(event.bundle->complete);
        EQUAL(bb_tensor_at(event.bundle, 1, &u), BB_OK);
        CHECK(u.data != NULL && memcmp(u.data, source, 5) == 0);
        memset(back, 0, sizeof back);
        EQUAL(bb_tensor_read(event.bundle, 0, back, sizeof back), BB_OK);
        CHECK(memcmp(back, source, sizeof back) == 0);
        /* closed: the end once more */
        EQUAL(one(&s, p + n - 64, 64, &event, &e), BB_BUNDLE_NOT_OPEN);
        CHECK(memory.asked <= n + 128);
        pool_free(&memory);
    }

    context = "conflict";
    start(&s, c, BB_STREAM_CLASS, slots, &memory);
    EQUAL(one(&s, p, head, &event, &e), BB_OK);
    EQUAL(one(&s, p + head, 128, &event, &e), BB_OK);
    EQUAL(one(&s, p + head + 256, 128, &event, &e), BB_OK);
    memcpy(q, p + head + 256, 128);
    q[64] ^= 1;
    seal_body(q);
    seal_header(q);
    EQUAL(one(&s, q, 128, &event, &e), BB_FRAGMENT_CONFLICT);
    EQUAL(e.offset, head + 256 + 64);
    EQUAL(e.tensor, 0);
    CHECK(event.kind == BB_EVENT_NONE);
    pool_free(&memory);

    context = "missing";
    start(&s, c, BB_STREAM_CLASS, slots, &memory);
    EQUAL(one(&s, p, head, &event, &e), BB_OK);
    EQUAL(one(&s, p + head + 128, 128, &event, &e), BB_OK);
    EQUAL(one(&s, p + head + 128, 128, &event, &e), BB_OK);
    EQUAL(one(&s, p + n - 64, 64, &event, &e), BB_FRAGMENT_MISSING);
    EQUAL(e.offset, head + 256);
    pool_free(&memory);

    context = "B31 off the grid";
    memcpy(q, p + head, 128);
    q[40] = 32;
    seal_header(q);
    start(&s, c, BB_STREAM_CLASS, slots, &memory);
    EQUAL(one(&s, p, head, &event, &e), BB_OK);
    EQUAL(one(&s, q, 128, &event, &e), BB_FRAGMENT_OFFSET);
    EQUAL(e.offset, head + 40);
    pool_free(&memory);

    context = "interleaved";
    start(&s, c, BB_STREAM_CLASS, slots, &memory);
    for (at = 0; at < n;) { /* frame by frame, two bundles by turns */
        size_t whole = at == 0 ? head : at == n - 64 ? 64 : 128;
        EQUAL(one(&s, p + at, whole, &event, &e), BB_OK);
        CHECK(event.bundle->number == 3);
        memcpy(q, p + at, whole);
        q[16] = 4;
        seal_header(q);
        EQUAL(one(&s, q, whole, &event, &e), BB_OK);
        CHECK(event.bundle->number == 4);
        at += whole;
        EQUAL(s.open, at == n ? 0 : 2);
    }
    EQUAL(event.kind, BB_EVENT_BUNDLE);
    EQUAL(bb_tensor_read(event.bundle, 0, back, sizeof back), BB_OK);
    CHECK(memcmp(back, source, sizeof back) == 0);
    EQUAL(one(&s, p, head, &event, &e), BB_OK); /* a closed number may be opened again */
    EQUAL(bb_stream_finish(&s, &e), BB_TRUNCATED);
    EQUAL(e.offset, 2 * n + head);
    pool_free(&memory);

    context = "open bundles";
    start(&s, c, BB_STREAM_CLASS, slots, &memory);
    for (i = 0; i <= 16; i++) {
        memcpy(q, p, head);
        q[16] = (uint8_t)i;
        seal_header(q);
        EQUAL(one(&s, q, head, &event, &e), i < 16 ? BB_OK : BB_LIMIT_OPEN_BUNDLES);
    }
    EQUAL(e.offset, 16 * head + 16);
    pool_free(&memory);

    context = "one bundle after another";
    memcpy(q, p, n);
    memcpy(q + n, p, n);
    q[2 * n] = 0x89;
    {
        int bundles;
        for (i = 1; i < 300; i += 13) {
            EQUAL(stream_all(c, BB_STREAM_CORE, q, 2 * n, i, &e, &bundles), BB_OK);
            EQUAL(bundles, 2);
            EQUAL(stream_all(c, BB_STREAM_CLASS, q, 2 * n, i, &e, &bundles), BB_OK);
            EQUAL(bundles, 2);
            EQUAL(stream_all(c, BB_STREAM_CORE, q, 2 * n + 1, i, &e, &bundles), BB_TRUNCATED);
            EQUAL(e.offset, 2 * n + 1);
        }
        EQUAL(stream_all(c, BB_STREAM_CORE, q, 0, 1, &e, &bundles), BB_OK); /* no bundle is fine */
    }

    context = "no memory, then memory";
    start(&s, c, BB_STREAM_CORE, slots, &memory);
    for (at = 0; at < n;) {
        int r;
        memory.refuse = 1;
        r = bb_stream_push(&s, p + at, n - at < 50 ? n - at : 50, &taken, &event, &e);
        at += taken;
        CHECK(r == BB_E_MEMORY || r == BB_NEED_MORE || r == BB_OK);
        while (r == BB_E_MEMORY) { /* it takes an event or bytes before the next refusal */
            r = bb_stream_push(&s, p + at, n - at < 50 ? n - at : 50, &taken, &event, &e);
            at += taken;
        }
        CHECK(r == BB_NEED_MORE || r == BB_OK);
    }
    EQUAL(event.kind, BB_EVENT_BUNDLE);
    EQUAL(bb_tensor_read(event.bundle, 0, back, sizeof back), BB_OK);
    CHECK(memcmp(back, source, sizeof back) == 0);
    EQUAL(bb_stream_finish(&s, &e), BB_OK);
    pool_free(&memory);

    context = "fixed memory";
    {
        static uint8_t block[2 * 16384];
        bb_fixed fixed;
        bb_config two = *c;
        fixed.memory = block;
        fixed.slot_bytes = 16384;
        fixed.slots = 2;
        two.limits.open_bundles = 2;
        EQUAL(bb_stream_init(&s, &two, BB_STREAM_CLASS, slots, 1, bb_reserve_fixed, &fixed), BB_E_ARGUMENT);
        EQUAL(bb_stream_init(&s, &two, BB_STREAM_CLASS, slots, 2, bb_reserve_fixed, &fixed), BB_OK);
        for (at = 0; at < n; at += taken) {
            EQUAL(bb_stream_push(&s, p + at, n - at, &taken, &event, &e), BB_OK);
        }
        EQUAL(event.kind, BB_EVENT_BUNDLE);
        /* what came in canonical order lies in the slot as it came */
        CHECK(memcmp(block, p, n) == 0);
        fixed.slot_bytes = 256;
        EQUAL(bb_stream_init(&s, &two, BB_STREAM_CLASS, slots, 2, bb_reserve_fixed, &fixed), BB_OK);
        EQUAL(one(&s, p, head, &event, &e), BB_OK);
        EQUAL(bb_stream_push(&s, p + head, 128, &taken, &event, &e), BB_E_MEMORY);
    }
    context = "";
}

/* ---- the rest ------------------------------------------------------------ */

static void test_small_things(const bb_config *c) {
    static uint8_t p[40000];
    bb_error e;
    char text[300];
    size_t i, n;
    context = "crc32c";
    EQUAL(bb_crc32c_portable(0, "123456789", 9), 0xE3069283u);
    EQUAL(c->crc32c(0, "123456789", 9), 0xE3069283u);
    EQUAL(c->crc32c(0, NULL, 0), 0);
    for (i = 0; i < sizeof p; i++) {
        p[i] = (uint8_t)(random_next() >> 56);
    }
    for (n = 0; n < sizeof p - 8; n = n * 9 / 8 + 1) {
        size_t off = n % 8, cut = n / 3;
        uint32_t want = crc_bits(p + off, n);
        EQUAL(bb_crc32c_portable(0, p + off, n), want);
        EQUAL(c->crc32c(0, p + off, n), want);
        EQUAL(c->crc32c(c->crc32c(0, p + off, cut), p + off + cut, n - cut), want);
    }
    context = "errors as text";
    memset(&e, 0, sizeof e);
    e.code = BB_BODY_CRC;
    e.offset = 304;
    e.frame = 256;
    e.tensor = 1;
    strcpy(e.name, "residual");
    e.field = "body_crc";
    e.expected = 0xE3069283u;
    e.found = 0;
    n = bb_error_format(&e, text, sizeof text);
    CHECK(strcmp(text, "body_crc (206): the body's checksum differs, at byte 304 in the frame at 256, tensor 1 "
                       "\"residual\", field body_crc: expected 0xe3069283, found 0x0") == 0);
    EQUAL(n, strlen(text));
    EQUAL(bb_error_format(&e, text, 9), n);
    CHECK(strcmp(text, "body_crc") == 0);
    EQUAL(bb_error_format(&e, NULL, 0), n);
    memset(&e, 0, sizeof e);
    e.code = BB_LIMIT_RANK;
    e.tensor = -1;
    e.field = "rank";
    e.expected = 4;
    e.found = UINT64_MAX;
    bb_error_format(&e, text, sizeof text);
    CHECK(strstr(text, "field rank: at most 4, found 18446744073709551615") != NULL);
    CHECK(strcmp(bb_error_name(12345), "unknown") == 0);
    context = "queries";
    CHECK(bb_dtype_name(0) == NULL && bb_dtype_block_bytes(7) == 0 && !bb_dtype_both_orders(200));
    EQUAL(bb_dtype_from_name("q8_0"), BB_Q8_0);
    EQUAL(bb_dtype_from_name("f"), 0);
    EQUAL(bb_dtype_from_name("f32x"), 0);
    EQUAL(bb_attr_key_type(0x8006), BB_ATTR_U64);
    CHECK(bb_attr_key_name(0x8002) == NULL);
    EQUAL(bb_abi_version(), BB_ABI_VERSION);
    EQUAL(bb_sizeof(BB_STRUCT_BUNDLE), sizeof(bb_bundle));
    context = "";
}

/* ---- prepared heads and contracts ---------------------------------------- */

static void test_prepared(const bb_config *c) {
    uint8_t p[SIZE], memory[F0];
    bb_prepared ready;
    bb_config low = *c;
    bb_bundle b;
    bb_error e;
    bb_stream s;
    bb_stream_slot slots[SLOTS];
    pool blocks;
    bb_desc d;
    bb_tensor t[2];
    bb_attr a[3];
    bb_part part;
    size_t n;
    context = "prepared: faults of the call";
    make_base(c, p);
    describe(&d, t, a);
    EQUAL(bb_prepare_decode(&ready, c, p, F0 - 1, memory, sizeof memory, &e), BB_NEED_MORE);
    EQUAL(bb_prepare_decode(&ready, c, p, F0, memory, F0 - 1, &e), BB_E_SPACE);
    EQUAL(e.expected, F0);
    EQUAL(bb_prepare_encode(&ready, c, &d, memory, F0 - 1, &e), BB_E_SPACE);
    EQUAL(e.expected, F0);
    EQUAL(bb_prepared_decode(&ready, p, SIZE, &b, &e), BB_E_ARGUMENT); /* a preparation that failed */
    EQUAL(bb_prepared_encode(&ready, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    d.tensor_count = d.attr_count = 0;
    EQUAL(bb_prepared_encode(&ready, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    describe(&d, t, a);
    EQUAL(bb_prepared_decode(NULL, p, SIZE, &b, &e), BB_E_ARGUMENT);
    EQUAL(bb_prepared_encode(NULL, &d, p, SIZE, &n, &e), BB_E_ARGUMENT);
    EQUAL(bb_encode_parts(c, &d, NULL, 0, &n, p, SIZE, &e), BB_E_ARGUMENT);
    EQUAL(bb_encode_parts(c, &d, &part, 1, NULL, p, SIZE, &e), BB_E_ARGUMENT);
    make_base(c, p);
    EQUAL(bb_prepare_decode(&ready, c, p, F0, memory, F0, &e), BB_OK);
    EQUAL(bb_prepared_encode(&ready, NULL, p, SIZE, &n, &e), BB_E_ARGUMENT);
    EQUAL(bb_prepared_encode(&ready, &d, p, SIZE - 1, &n, &e), BB_E_SPACE);
    EQUAL(bb_prepared_encode(&ready, &d, p, SIZE, &n, &e), BB_OK);

    context = "prepared: a description that differs in little";
    for (n = 0; n < 9; n++) {
        static uint8_t plain[SIZE * 2], other[SIZE * 2];
        bb_error e2;
        size_t wrote, wrote2;
        int r;
        describe(&d, t, a);
        switch (n) {
        case 0: a[0].length = 6; a[0].value = "llamas"; break;
        case 1: a[0].length = 4; break;
        case 2: d.attr_count = 2; break;
        case 3: d.tensor_count = 1; break;
        case 4: strcpy(t[0].name, "residuals"); break;
        case 5: strcpy(t[0].name, "residua"); break;
        case 6: t[0].bytes = 20; break;
        case 7: t[1].token_axis = 255; break;
        default: t[0].data = NULL; break;
        }
        r = bb_encode(c, &d, plain, sizeof plain, &wrote, &e);
        EQUAL(bb_prepared_encode(&ready, &d, other, sizeof other, &wrote2, &e2), r);
        EQUAL(wrote, wrote2);
        CHECK(r == BB_OK ? memcmp(plain, other, wrote) == 0 : memcmp(&e, &e2, sizeof e) == 0);
    }
    describe(&d, t, a);

    context = "prepared: another number and minor";
    d.number = 9;
    d.minor = 3;
    EQUAL(bb_encode(c, &d, p, SIZE, &n, &e), BB_OK);
    EQUAL(bb_prepared_decode(&ready, p, SIZE, &b, &e), BB_OK);
    CHECK(b.known && b.number == 9 && b.minor == 3);
    p[56] = 1; /* every header is checked all the same */
    seal_header(p);
    EQUAL(bb_prepared_decode(&ready, p, SIZE, &b, &e), BB_HEADER_RESERVED);
    p[56] = 0;
    p[48] ^= 1;
    seal_header(p);
    EQUAL(bb_prepared_decode(&ready, p, SIZE, &b, &e), BB_BODY_CRC);
    EQUAL(e.offset, 48);
    p[48] ^= 1;
    put(p + 24, 8, 128); /* a beginning of the known body, with the checksum of all of it */
    seal_header(p);
    EQUAL(bb_prepared_decode(&ready, p, SIZE, &b, &e), BB_BODY_CRC);

    context = "prepared: a stream with other limits";
    low.limits.tensors = 1;
    start(&s, &low, BB_STREAM_CORE, slots, &blocks);
    EQUAL(bb_stream_prepare(&s, &ready), BB_E_ARGUMENT);
    EQUAL(bb_stream_prepare(NULL, &ready), BB_E_ARGUMENT);
    EQUAL(bb_stream_prepare(&s, NULL), BB_OK);
    pool_free(&blocks);
    context = "";
}

/* A block of one byte less than was asked for. */
static void *less_reserve(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    void *block = pool_reserve(user, slot, old, used, need, capacity);
    *capacity = need - 1;
    return block;
}

/* ---- arguments of a call --------------------------------------------------- */

/* Limits that are too large, places that are none, indices behind the last. */
static void test_arguments(const bb_config *c) {
    static const char *const names[] = {"head_bytes",      "tensors",   "name_bytes", "rank",         "dimension",
                                        "payload_bytes",   "attribute_bytes", "fragments", "open_bundles",
                                        "extension_bytes"};
    uint8_t p[SIZE], memory[SIZE], back[24];
    bb_config other = *c, broken = *c;
    bb_limits most;
    uint64_t *limit = &other.limits.head_bytes, *maximum = &most.head_bytes;
    bb_bundle b, head;
    bb_tensor t;
    bb_attr a;
    bb_error e;
    bb_prepared ready;
    bb_stream s;
    bb_stream_slot slots[SLOTS];
    bb_event event;
    bb_contract none;
    pool blocks;
    size_t i, taken, whole;
    make_base(c, p);

    context = "arguments: limits";
    bb_limits_default(NULL);
    bb_limits_maximum(NULL);
    bb_config_init(NULL);
    bb_limits_maximum(&most);
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        other = *c;
        limit[i] = maximum[i];
        EQUAL(bb_decode(&other, p, SIZE, &b, &e), BB_OK);
        limit[i]++;
        EQUAL(bb_decode(&other, p, SIZE, &b, &e), BB_E_ARGUMENT);
        CHECK(strncmp(e.field, "limits.", 7) == 0 && strcmp(e.field + 7, names[i]) == 0);
        CHECK(e.expected == maximum[i] && e.found == limit[i]);
        EQUAL(bb_decode_head(&other, p, SIZE, &b, &whole, &e), BB_E_ARGUMENT);
        EQUAL(bb_stream_init(&s, &other, BB_STREAM_CORE, slots, SLOTS, pool_reserve, &blocks), BB_E_ARGUMENT);
    }
    broken.crc32c = NULL;
    EQUAL(bb_decode(&broken, p, SIZE, &b, &e), BB_E_ARGUMENT);
    EQUAL(bb_decode(NULL, p, SIZE, &b, &e), BB_E_ARGUMENT);

    context = "arguments: places";
    EQUAL(bb_decode(c, p, SIZE, NULL, &e), BB_E_ARGUMENT);
    EQUAL(bb_decode(c, NULL, SIZE, &b, &e), BB_E_ARGUMENT);
    EQUAL(bb_decode(c, NULL, 0, &b, &e), BB_TRUNCATED);
    EQUAL(bb_decode_head(c, p, SIZE, NULL, &whole, &e), BB_E_ARGUMENT);
    EQUAL(bb_decode_head(c, NULL, SIZE, &b, &whole, &e), BB_E_ARGUMENT);
    EQUAL(bb_decode_head(c, NULL, 0, &b, &whole, &e), BB_NEED_MORE);
    EQUAL(e.code, BB_NEED_MORE);
    EQUAL(whole, 8);
    EQUAL(bb_decode_head(c, p, SIZE, &head, NULL, NULL), BB_OK);
    EQUAL(bb_decode_head(c, p, SIZE, &head, &whole, &e), BB_OK);
    EQUAL(whole, F0);
    EQUAL(bb_decode(c, p, SIZE, &b, &e), BB_OK);
    EQUAL(bb_tensor_at(NULL, 0, &t), BB_E_ARGUMENT);
    EQUAL(bb_tensor_at(&b, 0, NULL), BB_E_ARGUMENT);
    EQUAL(bb_tensor_at(&b, 2, &t), BB_E_ARGUMENT);
    EQUAL(bb_tensor_at(&head, 0, &t), BB_OK);
    CHECK(t.data == NULL); /* nothing of its payload has come */
    EQUAL(bb_tensor_at(&b, 0, &t), BB_OK);
    CHECK(t.data == p + F0 + 64);
    EQUAL(bb_tensor_find(NULL, "residual", &t), -1);
    EQUAL(bb_tensor_find(&b, NULL, &t), -1);
    EQUAL(bb_tensor_find(&b, "residua", &t), -1);
    EQUAL(bb_tensor_find(&b, "residuals", NULL), -1);
    EQUAL(bb_tensor_find(&b, "outputs", &t), 1);
    CHECK(t.rank == 1 && t.dims[0] == 2 && t.dims[1] == 0);
    EQUAL(bb_tensor_read(NULL, 0, back, sizeof back), BB_E_ARGUMENT);
    EQUAL(bb_tensor_read(&b, 2, back, sizeof back), BB_E_ARGUMENT);
    EQUAL(bb_tensor_read(&head, 0, back, sizeof back), BB_E_ARGUMENT);
    EQUAL(bb_tensor_read(&b, 0, back, sizeof back - 1), BB_E_SPACE);
    EQUAL(bb_tensor_read(&b, 0, NULL, sizeof back), BB_E_ARGUMENT);
    EQUAL(bb_tensor_read(&b, 0, back, sizeof back), BB_OK);
    EQUAL(bb_attr_at(NULL, 0, &a), BB_E_ARGUMENT);
    EQUAL(bb_attr_at(&b, 0, NULL), BB_E_ARGUMENT);
    EQUAL(bb_attr_at(&b, 3, &a), BB_E_ARGUMENT);
    EQUAL(bb_attr_at(&b, 1, &a), BB_OK);
    CHECK(a.key == 0x4001 && a.length == 3 && a.u64 == 0);
    EQUAL(bb_attr_find(NULL, 0x4001, &a), -1);
    EQUAL(bb_attr_find(&b, 0x4002, &a), -1);
    EQUAL(bb_attr_find(&b, 0, &a), -1); /* the padding behind the last */
    EQUAL(bb_attr_find(&b, 0x4001, NULL), 1);

    context = "arguments: preparation";
    EQUAL(bb_prepare_decode(NULL, c, p, SIZE, memory, SIZE, &e), BB_E_ARGUMENT);
    EQUAL(bb_prepare_decode(&ready, c, p, SIZE, NULL, SIZE, &e), BB_E_SPACE);
    EQUAL(bb_prepare_decode(&ready, c, p, SIZE, memory, F0 - 1, &e), BB_E_SPACE);
    EQUAL(bb_prepared_decode(NULL, p, SIZE, &b, &e), BB_E_ARGUMENT);
    EQUAL(bb_prepared_decode_head(NULL, p, SIZE, &b, &whole, &e), BB_E_ARGUMENT);
    EQUAL(bb_prepare_decode(&ready, c, p, SIZE, memory, F0, &e), BB_OK);
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        other = *c;
        limit[i]--;
        memset(&blocks, 0, sizeof blocks);
        EQUAL(bb_stream_init(&s, &other, BB_STREAM_CORE, slots, SLOTS, pool_reserve, &blocks), BB_OK);
        /* How many bundles are open, and what an extension has, no head is asked. */
        EQUAL(bb_stream_prepare(&s, &ready), i < 8 ? BB_E_ARGUMENT : BB_OK);
    }
    other = *c;
    other.require_checksums = true;
    EQUAL(bb_stream_init(&s, &other, BB_STREAM_CORE, slots, SLOTS, pool_reserve, &blocks), BB_OK);
    EQUAL(bb_stream_prepare(&s, &ready), BB_E_ARGUMENT);

    context = "arguments: streams";
    EQUAL(bb_stream_init(NULL, c, BB_STREAM_CORE, slots, SLOTS, pool_reserve, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CORE, NULL, SLOTS, pool_reserve, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CORE, slots, SLOTS, NULL, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, NULL, BB_STREAM_CORE, slots, SLOTS, pool_reserve, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, c, 1u << 15, slots, SLOTS, pool_reserve, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CORE, slots, 0, pool_reserve, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CLASS, slots, SLOTS - 1, pool_reserve, &blocks), BB_E_ARGUMENT);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CLASS, slots, SLOTS, pool_reserve, &blocks), BB_OK);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CORE, slots, 1, pool_reserve, &blocks), BB_OK);
    EQUAL(bb_stream_prepare(NULL, NULL), BB_E_ARGUMENT);
    EQUAL(bb_stream_push(NULL, p, 1, &taken, &event, &e), BB_E_ARGUMENT);
    EQUAL(bb_stream_push(&s, p, 1, NULL, &event, &e), BB_E_ARGUMENT);
    EQUAL(bb_stream_push(&s, p, 1, &taken, NULL, &e), BB_E_ARGUMENT);
    EQUAL(bb_stream_push(&s, NULL, 1, &taken, &event, &e), BB_E_ARGUMENT);
    EQUAL(bb_stream_push(&s, NULL, 0, &taken, &event, &e), BB_NEED_MORE);
    EQUAL(bb_stream_finish(NULL, &e), BB_E_ARGUMENT);
    EQUAL(bb_stream_finish(&s, NULL), BB_OK);
    EQUAL(bb_stream_push(&s, p, 9, &taken, &event, &e), BB_NEED_MORE);
    EQUAL(bb_stream_push(&s, NULL, 0, &taken, &event, &e), BB_NEED_MORE);
    EQUAL(bb_stream_finish(&s, NULL), BB_TRUNCATED);
    EQUAL(bb_stream_finish(&s, NULL), BB_TRUNCATED);
    EQUAL(bb_stream_finish(&s, &e), BB_TRUNCATED);
    CHECK(e.code == BB_TRUNCATED && e.offset == 9 && e.frame == 0);
    EQUAL(bb_stream_push(&s, p, 1, &taken, &event, NULL), BB_TRUNCATED);
    memset(&e, 0, sizeof e);
    EQUAL(bb_stream_push(&s, p, 1, &taken, &event, &e), BB_TRUNCATED);
    CHECK(e.code == BB_TRUNCATED && taken == 0);

    context = "arguments: a block that is too small";
    memset(&blocks, 0, sizeof blocks);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CORE, slots, SLOTS, less_reserve, &blocks), BB_OK);
    EQUAL(bb_stream_push(&s, p, SIZE, &taken, &event, &e), BB_E_MEMORY);
    EQUAL(bb_stream_finish(&s, &e), BB_TRUNCATED); /* inside the frame that no memory was given for */
    CHECK(e.offset == 64 && e.frame == 0);
    pool_free(&blocks);

    context = "arguments: a prepared stream";
    memset(&blocks, 0, sizeof blocks);
    EQUAL(bb_stream_init(&s, c, BB_STREAM_CORE, slots, SLOTS, pool_reserve, &blocks), BB_OK);
    EQUAL(bb_stream_prepare(&s, &ready), BB_OK);
    EQUAL(bb_stream_push(&s, p, SIZE, &taken, &event, &e), BB_OK);
    CHECK(event.kind == BB_EVENT_HEAD && event.bundle->known);
    pool_free(&blocks);

    context = "arguments: a single stream with another bundle open";
    {
        uint8_t two[4 * 128], body[32];
        size_t n = 0;
        memset(body, 0, sizeof body);
        memset(&blocks, 0, sizeof blocks);
        n += frame(two + n, 0x81, 1, 0, 0, body, sizeof body);
        n += frame(two + n, 0x81, 2, 0, 0, body, sizeof body);
        n += frame(two + n, 0x83, 1, 0, 0, NULL, 0);
        n += frame(two + n, 0x83, 2, 0, 0, NULL, 0);
        EQUAL(bb_stream_init(&s, c, BB_STREAM_CLASS | BB_STREAM_SINGLE, slots, SLOTS, pool_reserve, &blocks), BB_OK);
        for (i = 0; i < n; i += taken) {
            EQUAL(bb_stream_push(&s, two + i, n - i, &taken, &event, &e), BB_OK);
        }
        EQUAL(bb_stream_push(&s, two, 0, &taken, &event, &e), BB_NEED_MORE);
        EQUAL(bb_stream_push(&s, two, 1, &taken, &event, &e), BB_TRAILING_BYTES);
        pool_free(&blocks);
    }

    context = "arguments: a block that never moves";
    {
        static uint8_t places[2 * SIZE];
        bb_fixed fixed;
        size_t capacity = 0;
        memset(&fixed, 0, sizeof fixed);
        fixed.memory = places;
        fixed.slot_bytes = SIZE;
        fixed.slots = 2;
        CHECK(bb_reserve_fixed(&fixed, 1, NULL, 0, SIZE, &capacity) == places + SIZE && capacity == SIZE);
        CHECK(bb_reserve_fixed(&fixed, 1, NULL, 0, SIZE + 1, &capacity) == NULL);
        CHECK(bb_reserve_fixed(&fixed, 2, NULL, 0, 1, &capacity) == NULL);
    }

    context = "arguments: contracts";
    memset(&none, 0, sizeof none);
    EQUAL(bb_decode(c, p, SIZE, &b, &e), BB_OK);
    EQUAL(bb_contract_compare(NULL, &b, &e), BB_E_ARGUMENT);
    EQUAL(bb_contract_compare(&none, NULL, &e), BB_E_ARGUMENT);
    memset(&head, 0, sizeof head);
    EQUAL(bb_contract_compare(&none, &head, &e), BB_E_ARGUMENT);
    EQUAL(bb_contract_compare(&none, &b, &e), BB_CONTRACT_EXTRA);
    EQUAL(bb_contract_compare(&none, &b, NULL), BB_CONTRACT_EXTRA);
    none.attr_count = 1;
    EQUAL(bb_contract_compare(&none, &b, &e), BB_E_ARGUMENT);
    none.attr_count = 0;
    none.tensor_count = 1;
    EQUAL(bb_contract_compare(&none, &b, &e), BB_E_ARGUMENT);

    context = "arguments: what an error names";
    put(p + F1 + 24, 8, 3);
    seal_header(p + F1);
    EQUAL(bb_decode(c, p, SIZE, &b, &e), BB_FRAGMENT_LENGTH);
    CHECK(e.tensor == 1 && strcmp(e.name, "outputs") == 0 && e.frame == F1);
    put(p + F1 + 24, 8, 2);
    p[F1 + 64] = 2;
    put(p + F1 + 48, 4, crc_bits(p + F1 + 64, 2));
    seal_header(p + F1);
    EQUAL(bb_decode(c, p, SIZE, &b, &e), BB_BOOL_VALUE);
    CHECK(e.tensor == 1 && strcmp(e.name, "outputs") == 0);
    context = "";
}

#define LONGEST "a23456789b123456789c123456789d123456789e123456789f1234567890123"
#define TOKENS BB_SYMBOL_TOKENS
#define MEMBERS ((uint64_t)1 << 40)
#define ROWS ((uint64_t)1 << 63)

static void contract_tensor(bb_contract_tensor *t, const char *name, int dtype, int axis, int rank, uint64_t s0,
                            uint64_t n0, uint64_t s1, uint64_t n1) {
    memset(t, 0, sizeof *t);
    t->name = name;
    t->dtype = (uint8_t)dtype;
    t->rank = (uint8_t)rank;
    t->token_axis = (uint8_t)axis;
    t->dims[0].symbols = s0;
    t->dims[0].number = n0;
    t->dims[1].symbols = s1;
    t->dims[1].number = n1;
}

static void test_contract(const bb_config *c) {
    bb_tensor t[4];
    bb_attr a[3];
    bb_desc d;
    bb_contract_tensor rules[4];
    bb_contract_attr wanted[3];
    bb_contract k;
    int round, other;
    enum { N = 5 };
#define COMPARE(change, result, which, what) \
    do { \
        static uint8_t p[4096]; \
        bb_bundle b; \
        bb_error e; \
        size_t n; \
        bb_desc now = d; \
        memset(&e, 0, sizeof e); \
        tensor(&t[0], "seq_offsets", BB_U32, 1, 255, 1, N + 1, 0, 0, p); \
        tensor(&t[1], "residual", BB_F32, 2, 0, 2, N, 3, 0, p); \
        tensor(&t[2], "seq_ids", BB_U32, 1, 255, 1, 7, 0, 0, p); \
        tensor(&t[3], "more", BB_U8, 1, 255, 2, N + 7 + 2, 1, 0, p); \
        attr(&a[0], BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, "llama", 5, 0); \
        attr(&a[1], 0x4001, BB_ATTR_F64, NULL, 0, 0); \
        attr(&a[2], BB_KEY_N_TOKENS, BB_ATTR_U64, NULL, 0, N); \
        contract_tensor(&rules[0], "seq_offsets", BB_U32, 255, 1, TOKENS, 1, 0, 0); \
        contract_tensor(&rules[1], "residual", BB_F32, 0, 2, TOKENS, 0, 0, 3); \
        contract_tensor(&rules[2], "seq_ids", BB_U32, 255, 1, MEMBERS, 0, 0, 0); \
        contract_tensor(&rules[3], "more", BB_U8, 255, 2, TOKENS | MEMBERS, 2, ROWS, 0); \
        memset(wanted, 0, sizeof wanted); \
        wanted[0].attr = a[0]; \
        wanted[1].attr = a[1]; \
        wanted[2].attr = a[2]; \
        wanted[2].any = true; \
        wanted[2].attr.u64 = 99; \
        k.attrs = wanted; \
        k.attr_count = 3; \
        k.tensors = rules; \
        k.tensor_count = 4; \
        now.attr_count = round == 0 ? 3 : 2; \
        k.attr_count = now.attr_count; \
        change; \
        EQUAL(bb_encode(c, &now, p, sizeof p, &n, &e), BB_OK); \
        EQUAL(bb_decode_head(c, p, n, &b, NULL, &e), BB_OK); \
        memset(&e, 0, sizeof e); \
        EQUAL(bb_contract_compare(&k, &b, &e), result); \
        EQUAL(e.code, result); \
        if (result != BB_OK) { \
            EQUAL(e.tensor, which); \
            CHECK(strcmp(e.name, what) == 0); \
        } \
        EQUAL(bb_contract_compare(&k, &b, NULL), result); \
    } while (0)
    memset(&d, 0, sizeof d);
    d.tensors = t;
    d.tensor_count = 4;
    d.attrs = a;
    for (round = 0; round < 2; round++) { /* `tokens` from n_tokens, or from a dimension */
        context = round == 0 ? "contract, n_tokens" : "contract, no n_tokens";
        COMPARE((void)0, BB_OK, 0, "");
        COMPARE(a[0].value = "mamba", BB_CONTRACT_ATTRIBUTE, -1, "architecture");
        COMPARE(wanted[0].any = true; a[0].value = "mamba", BB_OK, 0, "");
        COMPARE(wanted[0].attr.length = 4, BB_CONTRACT_ATTRIBUTE, -1, "architecture");
        COMPARE(a[1].u64 = (uint64_t)1 << 63, BB_CONTRACT_ATTRIBUTE, -1, ""); /* -0.0: bits count */
        COMPARE(a[1].type = BB_ATTR_U64, BB_CONTRACT_ATTRIBUTE, -1, "");
        COMPARE(a[1].type = BB_ATTR_U64; wanted[1].any = true, BB_CONTRACT_ATTRIBUTE, -1, "");
        COMPARE(a[1].key = 0x4002, BB_CONTRACT_ATTRIBUTE, -1, "");
        /* attributes before names, a lower key first */
        COMPARE(a[0].value = "mamba"; a[1].u64 = 1; strcpy(t[0].name, "x"), BB_CONTRACT_ATTRIBUTE, -1, "architecture");
        COMPARE(rules[3].name = "absent", BB_CONTRACT_MISSING, -1, "absent");
        COMPARE(rules[3].name = "absent"; rules[2].name = "absent_too", BB_CONTRACT_MISSING, -1, "absent_too");
        COMPARE(now.tensor_count = 3, BB_CONTRACT_MISSING, -1, "more");
        COMPARE(k.tensor_count = 2, BB_CONTRACT_EXTRA, 2, "seq_ids");
        COMPARE(k.tensors = rules + 1; k.tensor_count = 3, BB_CONTRACT_EXTRA, 0, "seq_offsets");
        COMPARE(rules[3] = rules[2]; rules[2] = rules[1]; rules[1] = rules[3]; k.tensor_count = 3;
                now.tensor_count = 3, BB_CONTRACT_ORDER, 1, "residual");
        COMPARE(t[1].dtype = BB_I32; t[1].rank = 1, BB_CONTRACT_DTYPE, 1, "residual");
        COMPARE(t[2].dtype = BB_I32; t[3].token_axis = 0; now.attr_count = k.attr_count = 2; t[1].token_axis = 255,
                BB_CONTRACT_TOKEN_AXIS, 1, "residual");
        COMPARE(t[0].dims[0] = N, BB_CONTRACT_SHAPE, 0, "seq_offsets");
        COMPARE(t[1].dims[1] = 4, BB_CONTRACT_SHAPE, 1, "residual");
        COMPARE(t[3].dims[0] = N + 7, BB_CONTRACT_SHAPE, 3, "more");
        COMPARE(t[2].dims[0] = 8, BB_CONTRACT_SHAPE, 3, "more");
        COMPARE(t[2].dims[0] = 8; t[3].dims[0]++, BB_OK, 0, "");
        COMPARE(t[3].dims[1] = 0; t[2].byte_order = 2; now.fragment_size = 64; now.no_checksums = true, BB_OK, 0, "");
        /* A dimension that is there binds whatever the rank; without one a sum has no value. */
        COMPARE(t[1].rank = 1; now.attr_count = k.attr_count = 2, BB_CONTRACT_SHAPE, 1, "residual");
        COMPARE(t[2].rank = 2, BB_CONTRACT_SHAPE, 2, "seq_ids");
        COMPARE(t[1].rank = 3; t[1].dims[0] = 9; t[1].dims[2] = 1; now.attr_count = k.attr_count = 2,
                BB_CONTRACT_SHAPE, 0, "seq_offsets");
        COMPARE(t[1].rank = 0; t[1].token_axis = 255; now.attr_count = k.attr_count = 2, BB_CONTRACT_SHAPE, 0,
                "seq_offsets");
        /* The next one binds where the first is not there. */
        COMPARE(t[1].rank = 0; t[1].token_axis = 255; now.attr_count = k.attr_count = 2;
                rules[2].dims[0].symbols = rules[3].dims[0].symbols = TOKENS; t[2].dims[0] = N, BB_CONTRACT_SHAPE,
                1, "residual");
        /* The first dimension binds, before it n_tokens. */
        COMPARE(rules[2].dims[0].symbols = TOKENS; now.tensor_count = k.tensor_count = 3, BB_CONTRACT_SHAPE, 2,
                "seq_ids");
        COMPARE(t[1].token_axis = rules[1].token_axis = 255; t[1].dims[0] = N + 1, BB_CONTRACT_SHAPE,
                round == 0 ? 1 : 0, round == 0 ? "residual" : "seq_offsets");
        /* A sum does not wrap. */
        COMPARE(now.tensor_count = k.tensor_count = 1; now.attr_count = k.attr_count = 3; a[2].u64 = UINT64_MAX;
                t[0].dims[0] = 0, BB_CONTRACT_SHAPE, 0, "seq_offsets");
        COMPARE(rules[3].dims[0].number = INT64_MAX, BB_CONTRACT_SHAPE, 3, "more");
        COMPARE(k.tensor_count = 0; now.tensor_count = 0; k.attr_count = 0, BB_OK, 0, "");
        /* No contracts, whatever the bundle: one that differs in its first attribute, too. */
        for (other = 0; other < 2; other++) {
#define NONE(change, which, what) COMPARE(a[0].value = other ? "mamba" : "llama"; change, BB_E_ARGUMENT, which, what)
            NONE(rules[2].dims[0].symbols = 2, -1, ""); /* MEMBERS stands alone nowhere */
            NONE(wanted[1].attr.key = 2, -1, "architecture");
            NONE(wanted[1].attr.key = BB_KEY_CONTRACT_FINGERPRINT, -1, "contract_fingerprint");
            NONE(wanted[1].attr.type = 0, -1, "");
            NONE(wanted[1].attr.type = 6, -1, "");
            NONE(wanted[0].attr.value = NULL, -1, "architecture");
            NONE(rules[1].name = NULL; now.tensor_count = 3, 1, "");
            NONE(rules[1].name = ""; now.tensor_count = 3, 1, "");
            NONE(rules[1].name = "resid ual"; now.tensor_count = 3, 1, "");
            NONE(rules[1].name = LONGEST "x"; now.tensor_count = 3, 1, "");
            NONE(rules[3] = rules[0], 3, "seq_offsets"); /* twice */
            NONE(rules[3] = rules[0]; now.tensor_count = 3, 3, "seq_offsets");
            NONE(rules[3] = rules[0]; strcpy(t[0].name, "x"), 3, "seq_offsets");
            NONE(rules[3].dtype = 0, 3, "more");
            NONE(rules[3].rank = 9, 3, "more");
            NONE(rules[3].token_axis = 2, 3, "more");
            NONE(rules[3].dims[0].number = (uint64_t)INT64_MAX + 1, 3, "more");
        }
    }
    /* `tokens` alone nowhere: only where the contract, not the bundle, has n_tokens. */
    round = 0;
    COMPARE(k.tensor_count = now.tensor_count = 1, BB_OK, 0, "");
    COMPARE(k.tensor_count = now.tensor_count = 1; k.attr_count = 2, BB_E_ARGUMENT, -1, "");
    EQUAL(bb_contract_compare(NULL, NULL, NULL), BB_E_ARGUMENT);
    context = "";
}

/* A mismatch that says where, but not what was expected and found. */
/* What is no contract, and what only looks so. */
static void test_contract_arguments(const bb_config *c) {
    static uint8_t p[4096];
    static const uint8_t bytes[16] = {1, 2};
    static char longest[64];
    bb_contract_tensor rules[3];
    bb_contract_attr wanted;
    bb_contract k;
    bb_tensor t[3];
    bb_attr a[2];
    bb_desc d;
    bb_bundle b;
    bb_error e;
    size_t n, i;
    memset(&k, 0, sizeof k);
    memset(&d, 0, sizeof d);
    memset(&wanted, 0, sizeof wanted);
    k.tensors = rules;
    k.attrs = &wanted;
    d.tensors = t;
    d.attrs = a;
    memset(longest, 'n', 63);

    context = "contracts: eight dimensions, a symbol in the last";
    tensor(&t[0], longest, BB_U8, BB_LITTLE, 255, 8, 1, 1, 1, bytes);
    for (i = 3; i < 8; i++) {
        t[0].dims[i] = i == 7 ? 5 : 1;
    }
    contract_tensor(&rules[0], longest, BB_U8, 255, 8, 0, 1, 0, 1);
    for (i = 2; i < 7; i++) {
        rules[0].dims[i].number = 1;
    }
    rules[0].dims[7].symbols = MEMBERS;
    d.tensor_count = k.tensor_count = 1;
    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
    EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
    EQUAL(bb_contract_compare(&k, &b, &e), BB_OK);
    rules[0].dims[7].number = 1; /* no longer alone */
    EQUAL(bb_contract_compare(&k, &b, &e), BB_E_ARGUMENT);
    rules[0].dims[7].number = 0;
    rules[0].dtype = BB_I8;
    EQUAL(bb_contract_compare(&k, &b, &e), BB_CONTRACT_DTYPE);
    rules[0].rank = 9;
    EQUAL(bb_contract_compare(&k, &b, &e), BB_E_ARGUMENT);
    rules[0].rank = 8;
    rules[0].dtype = BB_U8;
    rules[0].name = NULL;
    EQUAL(bb_contract_compare(&k, &b, &e), BB_E_ARGUMENT);

    context = "contracts: what lies behind the rank";
    tensor(&t[0], "sum", BB_U8, BB_LITTLE, 255, 1, 7, 0, 0, bytes);
    tensor(&t[1], "deeper", BB_U8, BB_LITTLE, 255, 2, 1, 5, 0, bytes);
    tensor(&t[2], "alone", BB_U8, BB_LITTLE, 255, 1, 6, 0, 0, bytes);
    contract_tensor(&rules[0], "sum", BB_U8, 255, 1, MEMBERS, 1, ROWS, UINT64_MAX);
    contract_tensor(&rules[1], "deeper", BB_U8, 255, 1, 0, 1, MEMBERS, 0);
    contract_tensor(&rules[2], "alone", BB_U8, 255, 1, MEMBERS, 0, 0, 0);
    d.tensor_count = k.tensor_count = 3;
    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
    EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
    EQUAL(bb_contract_compare(&k, &b, &e), BB_CONTRACT_SHAPE);
    CHECK(e.tensor == 1 && strcmp(e.field, "rank") == 0);
    rules[0].dims[1].number = 0;
    t[1].rank = 1;
    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
    EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
    EQUAL(bb_contract_compare(&k, &b, &e), BB_OK);
    context = "contracts: two symbols are not one that stands alone";
    rules[1].dims[0].symbols = TOKENS | ROWS;
    rules[1].dims[0].number = 0;
    EQUAL(bb_contract_compare(&k, &b, &e), BB_E_ARGUMENT);

    context = "contracts: attributes and their values";
    d.tensor_count = 1;
    d.attr_count = k.attr_count = 1;
    attr(&a[0], 0x4001, BB_ATTR_BYTES, "", 0, 0);
    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
    EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
    contract_tensor(&rules[0], "sum", BB_U8, 255, 1, 0, 7, 0, 0);
    k.tensor_count = 1;
    attr(&wanted.attr, 0x4001, BB_ATTR_BYTES, NULL, 0, 0);
    EQUAL(bb_contract_compare(&k, &b, &e), BB_OK);
    rules[0].name = "other";
    wanted.any = true;
    wanted.attr.length = 5; /* which a rule of any value does not look at */
    EQUAL(bb_contract_compare(&k, &b, &e), BB_CONTRACT_MISSING);
    wanted.any = false;
    EQUAL(bb_contract_compare(&k, &b, &e), BB_E_ARGUMENT);
    attr(&wanted.attr, 0x4100, BB_ATTR_F64, NULL, 8, 0);
    EQUAL(bb_contract_compare(&k, &b, &e), BB_CONTRACT_ATTRIBUTE);

    context = "a record that is an attribute";
    attr(&a[0], 0x4001, BB_ATTR_I64, NULL, 0, 0);
    attr(&a[1], 0x4002, BB_ATTR_BYTES, "abcdefgh", 8, 0);
    d.attr_count = 2;
    EQUAL(bb_encode(c, &d, p, sizeof p, &n, &e), BB_OK);
    EQUAL(bb_decode(c, p, n, &b, &e), BB_OK);
    EQUAL(bb_tensor_find(&b, "abcdefgh", NULL), -1);
    context = "";
}

static void test_contract_sentences(const bb_config *c) {
    static uint8_t p[4096];
    static char sha[32], other_sha[32];
    static const char long_text[] = "seventy bytes of text are more than a sentence shows, so the rest is cut.";
    bb_tensor t[2];
    bb_attr a[4];
    bb_desc d;
    bb_contract_tensor rules[2];
    bb_contract_attr wanted[4];
    bb_contract k;
    context = "contract, sentences";
    memset(&d, 0, sizeof d);
    d.tensors = t;
    d.tensor_count = 2;
    d.attrs = a;
    d.attr_count = 4;
#define SENTENCE(change, want) \
    do { \
        static uint8_t encoded[4096]; \
        bb_bundle b; \
        bb_error e; \
        char text[400]; \
        size_t n; \
        unsigned i; \
        for (i = 0; i < 32; i++) { \
            sha[i] = (char)(0xF0 + i); \
            other_sha[i] = (char)i; \
        } \
        tensor(&t[0], "residual", BB_F32, 1, 0, 2, 5, 3, 0, p); \
        tensor(&t[1], LONGEST, BB_U8, 1, 255, 1, 6, 0, 0, p); \
        attr(&a[0], BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, "llama", 5, 0); \
        attr(&a[1], 0x4001, BB_ATTR_I64, NULL, 0, 0 - (uint64_t)3); \
        attr(&a[2], BB_KEY_MODEL_FINGERPRINT, BB_ATTR_BYTES, sha, 32, 0); \
        attr(&a[3], BB_KEY_LAYER_END, BB_ATTR_U64, NULL, 0, 7); \
        contract_tensor(&rules[0], "residual", BB_F32, 0, 2, TOKENS, 0, 0, 3); \
        contract_tensor(&rules[1], LONGEST, BB_U8, 255, 1, TOKENS, 1, 0, 0); \
        memset(wanted, 0, sizeof wanted); \
        for (i = 0; i < 4; i++) { \
            wanted[i].attr = a[i]; \
        } \
        k.attrs = wanted; \
        k.attr_count = 4; \
        k.tensors = rules; \
        k.tensor_count = 2; \
        d.attr_count = 4; \
        d.tensor_count = 2; \
        change; \
        EQUAL(bb_encode(c, &d, encoded, sizeof encoded, &n, &e), BB_OK); \
        EQUAL(bb_decode_head(c, encoded, n, &b, NULL, &e), BB_OK); \
        memset(&e, 0xAA, sizeof e); \
        bb_contract_compare(&k, &b, &e); \
        n = bb_error_format(&e, text, sizeof text); \
        if (n != strlen(want) || strcmp(text, want) != 0) { \
            printf("%s\n", text); \
        } \
        CHECK(strcmp(text, want) == 0); \
    } while (0)
#define ATTRIBUTE "contract_attribute (600): an attribute that the contract fixes is absent or different, attribute "
    SENTENCE(wanted[3].attr.u64 = 2, ATTRIBUTE "\"layer_end\": expected 2, found 7");
    SENTENCE(wanted[3].any = true; d.attr_count = 3, ATTRIBUTE "\"layer_end\": expected any u64 value, found absent");
    SENTENCE(wanted[0].attr.value = "mamba", ATTRIBUTE "\"architecture\": expected \"mamba\", found \"llama\"");
    SENTENCE(wanted[0].attr.value = "ma\"\n\x80", ATTRIBUTE
             "\"architecture\": expected \"ma\"??\", found \"llama\"");
    SENTENCE(wanted[0].attr.length = 0; a[0].value = long_text; a[0].length = sizeof long_text - 1, ATTRIBUTE
             "\"architecture\": expected \"\", found \"seventy bytes of text are more than a sentence s..\"");
    SENTENCE(wanted[2].attr.value = other_sha, ATTRIBUTE
             "\"model_fingerprint\": expected 0001020304050607.., found f0f1f2f3f4f5f6f7..");
    SENTENCE(wanted[1].attr.u64 = (uint64_t)1 << 63, ATTRIBUTE "0x4001: expected -9223372036854775808, found -3");
    SENTENCE(wanted[1].attr.type = BB_ATTR_F64; wanted[1].attr.u64 = 0x3FF8000000000000u, ATTRIBUTE
             "0x4001: expected f64 the bits 0x3ff8000000000000, found i64 -3");
    SENTENCE(wanted[1].any = true; wanted[1].attr.type = BB_ATTR_U64, ATTRIBUTE
             "0x4001: expected any u64 value, found i64 -3");
    SENTENCE(attr(&wanted[1].attr, 0x4001, BB_ATTR_BYTES, NULL, 0, 0), ATTRIBUTE
             "0x4001: expected bytes no bytes, found i64 -3");
    SENTENCE(attr(&wanted[1].attr, 0x4001, BB_ATTR_BYTES, sha, 8, 0);
             attr(&a[1], 0x4001, BB_ATTR_BYTES, sha, 3, 0), ATTRIBUTE
             "0x4001: expected f0f1f2f3f4f5f6f7, found f0f1f2");
    SENTENCE(d.tensor_count = 1,
             "contract_missing (601): a tensor of the contract is missing, tensor \"" LONGEST "\"");
    SENTENCE(k.tensor_count = 1, "contract_extra (602): a tensor that the contract lacks is present, tensor 1 \""
             LONGEST "\"");
    SENTENCE(rules[1].name = "residual"; rules[0].name = LONGEST,
             "contract_order (603): the tensors stand in another order than the contract's, tensor 0 \"residual\": "
             "expected \"" LONGEST "\", found \"residual\"");
    SENTENCE(t[0].dtype = BB_F16,
             "contract_dtype (604): a tensor has another dtype than the contract's, tensor 0 \"residual\", "
             "field dtype: expected f32, found f16");
#define SHAPE "contract_shape (605): a tensor has another shape than the contract's, tensor "
    SENTENCE(t[0].rank = 3; t[0].dims[2] = 1, SHAPE "0 \"residual\", field rank: expected 2, found 3");
    SENTENCE(t[0].dims[1] = 4, SHAPE "0 \"residual\", field dims[1]: expected 3, found 4");
    SENTENCE(rules[1].dims[0].number = 2, SHAPE "1 \"" LONGEST "\", field dims[0]: expected 7, found 6");
    SENTENCE(t[0].rank = 0; t[0].token_axis = rules[0].token_axis = 255; rules[0].rank = 1,
             SHAPE "0 \"residual\", field rank: expected 1, found 0");
    SENTENCE(rules[1].dims[0].number = INT64_MAX, SHAPE "1 \"" LONGEST "\", field dims[0]: expected "
             "9223372036854775812, found 6");
#define AXIS "contract_token_axis (606): a tensor has another token axis than the contract's, tensor "
    SENTENCE(t[0].token_axis = 255, AXIS "0 \"residual\", field token_axis: expected 0, found none");
    SENTENCE(rules[0].token_axis = 255, AXIS "0 \"residual\", field token_axis: expected none, found 0");
    SENTENCE(rules[0].token_axis = 1, AXIS "0 \"residual\", field token_axis: expected 1, found 0");
    /* the sum is looked at first, and the residual, a scalar, gives `tokens` no value */
    SENTENCE(tensor(&t[1], "residual", BB_F32, 1, 255, 0, 0, 0, 0, p);
             tensor(&t[0], LONGEST, BB_U8, 1, 255, 1, 6, 0, 0, p); rules[0] = rules[1];
             contract_tensor(&rules[1], "residual", BB_F32, 0, 2, TOKENS, 0, 0, 3),
             SHAPE "0 \"" LONGEST "\", field dims[0]: expected a sum with a symbol that got no value, found 6");
    SENTENCE(attr(&a[3], BB_KEY_N_TOKENS, BB_ATTR_U64, NULL, 0, UINT64_MAX); wanted[3].attr = a[3];
             t[0].token_axis = 255; rules[0].token_axis = 255; rules[0].dims[0].symbols = 0;
             rules[0].dims[0].number = 5,
             SHAPE "1 \"" LONGEST "\", field dims[0]: expected a sum that no dimension can be, found 6");
    SENTENCE(rules[1] = rules[0],
             "argument (-1): the call has an illegal argument, tensor 1 \"residual\", field name: "
             "expected no name twice, found that of an earlier tensor");
    context = "";
}

int main(void) {
    bb_config c;
    int portable;
    bb_config_init(&c);
    for (portable = 0; portable < 2; portable++) {
        test_small_things(&c);
        test_malformed(&c);
        test_more_errors(&c);
        test_encoder(&c);
        test_round_trips(&c);
        test_streams(&c);
        test_prepared(&c);
        test_arguments(&c);
        test_contract(&c);
        test_contract_arguments(&c);
        test_contract_sentences(&c);
        if (c.crc32c == bb_crc32c_portable) {
            break;
        }
        c.crc32c = bb_crc32c_portable; /* once more without the processor's help */
    }
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
