/*
 * testee.c - the C codec before the conformance kit (spec/testee-protocol.md).
 *
 *     make testee
 *     boundary-bundle conformance -- native_shim/build/testee
 *
 * With -DBB_IN_LIBLLAMA the codec is the one inside the patched libllama, by that
 * library's own header (boundary_bundle/native/build.py builds it so).
 *
 * Lines of JSON in, lines of JSON out. The reader below is enough for the
 * requests of the kit: a whole line is parsed in place into nodes.
 *
 * SPDX-License-Identifier: MIT
 */
#ifdef BB_IN_LIBLLAMA
#include "boundary-bundle.h"
#define TESTEE_NAME "boundary_bundle.c in libllama"
#else
#include "boundary_bundle.h"
#define TESTEE_NAME "boundary_bundle.c"
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must(void *memory) {
    if (memory == NULL) {
        fputs("testee: out of memory\n", stderr);
        exit(3);
    }
    return memory;
}

/* ---- text that grows ------------------------------------------------------ */

typedef struct text {
    char *at;
    size_t size, capacity;
} text;

static char *text_room(text *t, size_t more) {
    if (t->capacity - t->size < more) {
        size_t capacity = (t->size + more) * 2 + 1024;
        t->at = must(realloc(t->at, capacity));
        t->capacity = capacity;
    }
    return t->at + t->size;
}

static void put(text *t, const char *s) {
    size_t n = strlen(s);
    memcpy(text_room(t, n), s, n);
    t->size += n;
}

static void put_u64(text *t, uint64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
    put(t, digits);
}

static void put_quoted(text *t, const char *s, size_t n) {
    put(t, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        char escaped[8];
        if (c == '"' || c == '\\') {
            escaped[0] = '\\', escaped[1] = (char)c, escaped[2] = 0;
        } else if (c < 0x20 || c > 0x7e) {
            snprintf(escaped, sizeof escaped, "\\u%04x", c);
        } else {
            escaped[0] = (char)c, escaped[1] = 0;
        }
        put(t, escaped);
    }
    put(t, "\"");
}

static void put_byte(char *dst, uint8_t byte) {
    static const char digits[] = "0123456789abcdef";
    dst[0] = digits[byte >> 4];
    dst[1] = digits[byte & 15];
}

/* Elements of `size` native bytes each, most significant digit first; size 1: bytes as they lie. */
static void put_elements(text *t, const uint8_t *data, uint64_t bytes, size_t size) {
    char *dst = text_room(t, (size_t)bytes * 2);
    for (uint64_t at = 0; at < bytes; at += size) {
        for (size_t i = 0; i < size; i++, dst += 2) {
            /* NOLINTNEXTLINE(misc-redundant-expression): true on some machines, false on the others */
            put_byte(dst, data[at + (BB_NATIVE_ORDER == BB_LITTLE ? size - 1 - i : i)]);
        }
    }
    t->size += (size_t)bytes * 2;
}

/* ---- JSON ----------------------------------------------------------------- */

enum kind { ABSENT, OTHER, TRUTH, NUMBER, STRING, LIST, OBJECT };

/* Members of a list or object are chained; 0 is no node, node 0 is absent. */
typedef struct node {
    enum kind kind;
    uint32_t child, next;
    const char *key;
    char *s; /* string, unescaped; number: its digits */
    size_t n;
} node;

typedef struct json {
    node *nodes;
    uint32_t count, capacity;
    char *at;
    int depth;
    bool bad;
} json;

static uint32_t json_new(json *j) {
    if (j->count == j->capacity) {
        j->capacity = j->capacity * 2 + 64;
        j->nodes = must(realloc(j->nodes, j->capacity * sizeof(node)));
    }
    memset(&j->nodes[j->count], 0, sizeof(node));
    return j->count++;
}

static void json_space(json *j) {
    while (*j->at == ' ' || *j->at == '\t' || *j->at == '\r' || *j->at == '\n') j->at++;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The string after its opening quote, unescaped in place. Characters beyond
 * ASCII become '?': the format knows none. */
static char *json_string(json *j, size_t *n) {
    char *start = j->at, *dst = j->at;
    while (*j->at != '"') {
        char c = *j->at++;
        if (c == 0) {
            j->bad = true;
            j->at--;
            break;
        }
        if (c == '\\') {
            c = *j->at++;
            if (c == 'u') {
                int value = 0;
                for (int i = 0; i < 4; i++) {
                    int digit = hex_digit(*j->at);
                    if (digit < 0) {
                        j->bad = true;
                        return start;
                    }
                    value = value * 16 + digit;
                    j->at++;
                }
                c = value < 0x80 ? (char)value : '?';
            } else {
                const char *from = "bfnrt", *to = "\b\f\n\r\t", *found = c ? strchr(from, c) : NULL;
                if (c == 0) {
                    j->bad = true;
                    return start;
                }
                if (found != NULL) c = to[found - from];
            }
        }
        *dst++ = c;
    }
    *n = (size_t)(dst - start);
    if (!j->bad) j->at++;
    return start;
}

/* NOLINTNEXTLINE(misc-no-recursion): depth stops it at 64 */
static uint32_t json_value(json *j) {
    uint32_t self = json_new(j);
    json_space(j);
    char c = *j->at;
    if (c == '"') {
        size_t n = 0;
        j->at++;
        char *s = json_string(j, &n);
        j->nodes[self].kind = STRING;
        j->nodes[self].s = s;
        j->nodes[self].n = n;
    } else if (c == '{' || c == '[') {
        char close = c == '{' ? '}' : ']';
        uint32_t last = 0;
        j->nodes[self].kind = c == '{' ? OBJECT : LIST;
        j->at++;
        json_space(j);
        if (++j->depth > 64) j->bad = true;
        while (!j->bad && *j->at != close) {
            char *key = NULL;
            size_t n = 0;
            json_space(j);
            if (c == '{') {
                if (*j->at != '"') {
                    j->bad = true;
                    break;
                }
                j->at++;
                key = json_string(j, &n);
                json_space(j);
                if (j->bad || *j->at != ':') {
                    j->bad = true;
                    break;
                }
                *j->at++ = 0;
                key[n] = 0;
            }
            uint32_t inner = json_value(j);
            j->nodes[inner].key = key;
            if (last) j->nodes[last].next = inner;
            else j->nodes[self].child = inner;
            last = inner;
            json_space(j);
            if (*j->at == ',') j->at++;
            else if (*j->at != close) j->bad = true;
        }
        j->depth--;
        if (!j->bad) j->at++;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        j->nodes[self].kind = NUMBER;
        j->nodes[self].s = j->at;
        while (*j->at != 0 && strchr("+-.eE0123456789", *j->at)) j->at++;
        j->nodes[self].n = (size_t)(j->at - j->nodes[self].s);
    } else {
        j->nodes[self].kind = c == 't' ? TRUTH : OTHER;
        while (*j->at >= 'a' && *j->at <= 'z') j->at++;
        if (c < 'a' || c > 'z') j->bad = true;
    }
    return self;
}

static const node *member(const json *j, const node *of, const char *key) {
    for (uint32_t i = of->child; i; i = j->nodes[i].next) {
        if (j->nodes[i].key != NULL && strcmp(j->nodes[i].key, key) == 0) return &j->nodes[i];
    }
    return &j->nodes[0];
}

static const node *following(const json *j, const node *of) { return of->next ? &j->nodes[of->next] : NULL; }
static const node *first(const json *j, const node *of) { return of->child ? &j->nodes[of->child] : NULL; }

static bool is(const node *n, const char *s) {
    return n->kind == STRING && n->n == strlen(s) && memcmp(n->s, s, n->n) == 0;
}

/* Digits of a number, or of a string that holds one. */
static uint64_t number(const node *n) {
    char digits[32] = "";
    if (n->n < sizeof digits) memcpy(digits, n->s ? n->s : "", n->n);
    return digits[0] == '-' ? (uint64_t)strtoll(digits, NULL, 10) : strtoull(digits, NULL, 10);
}

/* Bytes of a string of digits, elements of `size` bytes turned from most significant first to native. */
static uint8_t *unhex(const node *n, size_t size, size_t *bytes) {
    *bytes = n->n / 2;
    uint8_t *dst = must(aligned_alloc(64, (*bytes + 64) / 64 * 64));
    for (size_t i = 0; i < *bytes; i++) {
        /* NOLINTNEXTLINE(misc-redundant-expression): as above */
        size_t at = i / size * size + (BB_NATIVE_ORDER == BB_LITTLE ? size - 1 - i % size : i % size);
        if (at < *bytes) dst[at] = (uint8_t)(hex_digit(n->s[2 * i]) << 4 | hex_digit(n->s[2 * i + 1]));
    }
    return dst;
}

/* ---- answers -------------------------------------------------------------- */

static const char *const TYPES[] = {"", "u64", "i64", "f64", "bytes", "text"};

static size_t element_bytes(unsigned dtype) {
    return bb_dtype_block_elements(dtype) == 1 ? bb_dtype_block_bytes(dtype) : 1;
}

static void put_attribute(text *t, const bb_attr *a) {
    put(t, "{\"key\":");
    put_u64(t, a->key);
    put(t, ",\"type\":\"");
    put(t, TYPES[a->type]);
    put(t, "\",\"value\":");
    char digits[32];
    switch (a->type) {
    case BB_ATTR_U64:
        snprintf(digits, sizeof digits, "\"%llu\"", (unsigned long long)a->u64);
        put(t, digits);
        break;
    case BB_ATTR_I64:
        snprintf(digits, sizeof digits, "\"%lld\"", (long long)a->u64);
        put(t, digits);
        break;
    case BB_ATTR_F64:
        snprintf(digits, sizeof digits, "\"%016llx\"", (unsigned long long)a->u64);
        put(t, digits);
        break;
    case BB_ATTR_TEXT:
        put_quoted(t, a->value, a->length);
        break;
    default:
        put(t, "\"");
        put_elements(t, a->value, a->length, 1);
        put(t, "\"");
    }
    put(t, "}");
}

static void put_bundle(text *t, const bb_bundle *b) {
    put(t, "{\"number\":\"");
    put_u64(t, b->number);
    put(t, "\",\"minor\":");
    put_u64(t, b->minor);
    put(t, ",\"fragment_size\":\"");
    put_u64(t, b->fragment_size);
    put(t, b->head_flags & BB_HEAD_NO_CHECKSUMS ? "\",\"checksums\":false" : "\",\"checksums\":true");
    put(t, ",\"tensors\":[");
    for (uint32_t i = 0; i < b->tensor_count; i++) {
        bb_tensor tensor;
        if (bb_tensor_at(b, i, &tensor) != BB_OK) break;
        put(t, i ? ",{\"name\":" : "{\"name\":");
        put_quoted(t, tensor.name, strlen(tensor.name));
        put(t, ",\"dtype\":\"");
        put(t, bb_dtype_name(tensor.dtype));
        put(t, tensor.byte_order == BB_BIG ? "\",\"byte_order\":\"big\"" : "\",\"byte_order\":\"little\"");
        put(t, ",\"shape\":[");
        for (unsigned d = 0; d < tensor.rank; d++) {
            put(t, d ? ",\"" : "\"");
            put_u64(t, tensor.dims[d]);
            put(t, "\"");
        }
        put(t, "],\"token_axis\":");
        if (tensor.token_axis == BB_NO_TOKEN_AXIS) put(t, "null");
        else put_u64(t, tensor.token_axis);
        put(t, ",\"elements\":\"");
        uint8_t *data = must(malloc((size_t)tensor.bytes + 1));
        if (bb_tensor_read(b, i, data, (size_t)tensor.bytes) == BB_OK) {
            put_elements(t, data, tensor.bytes, element_bytes(tensor.dtype));
        }
        free(data);
        put(t, "\"}");
    }
    put(t, "],\"attributes\":[");
    for (uint32_t i = 0; i < b->attribute_count; i++) {
        bb_attr a;
        if (bb_attr_at(b, i, &a) != BB_OK) break;
        if (i) put(t, ",");
        put_attribute(t, &a);
    }
    put(t, "]}");
}

static void put_error(text *t, int code, const bb_error *error) {
    if (code < 0) {
        put(t, ",\"failed\":\"the call was answered with ");
        put(t, code == BB_E_MEMORY ? "no memory\"" : code == BB_E_SPACE ? "no space\"" : "bad argument\"");
        return;
    }
    put(t, ",\"error\":{\"name\":\"");
    put(t, bb_error_name(code));
    put(t, "\",\"number\":");
    put_u64(t, (uint64_t)code);
    if (code == BB_CONTRACT_ATTRIBUTE) {
        put(t, ",\"offset\":null,\"attribute\":");
        put_u64(t, error->expected);
    } else if (code > BB_CONTRACT_ATTRIBUTE) {
        put(t, ",\"offset\":null,\"tensor\":");
        put_quoted(t, error->name, strlen(error->name));
    } else {
        put(t, ",\"offset\":");
        put_u64(t, error->offset);
    }
    put(t, "}");
}

/* ---- commands ------------------------------------------------------------- */

static bool configure(const json *j, const node *request, const bb_config *defaults, bb_config *config) {
    static const char *const names[] = {"head_bytes",    "tensors",         "name_bytes", "rank",         "dimension",
                                        "payload_bytes", "attribute_bytes", "fragments",  "open_bundles", "extension_bytes"};
    *config = *defaults;
    /* cppcheck-suppress constVariablePointer ; what the places point to is written */
    bb_limits *l = &config->limits;
    uint64_t *const places[] = {&l->head_bytes,    &l->tensors,         &l->name_bytes, &l->rank,         &l->dimension,
                                &l->payload_bytes, &l->attribute_bytes, &l->fragments,  &l->open_bundles, &l->extension_bytes};
    config->require_checksums = member(j, request, "require_checksums")->kind == TRUTH;
    for (const node *n = first(j, member(j, request, "limits")); n != NULL; n = following(j, n)) {
        size_t i = 0;
        while (i < 10 && strcmp(names[i], n->key) != 0) i++;
        if (i == 10) return false;
        *places[i] = number(n);
    }
    return true;
}

static uint32_t count(const json *j, const node *list) {
    uint32_t n = 0;
    for (const node *i = first(j, list); i != NULL; i = following(j, i)) n++;
    return n;
}

static uint8_t dtype_of(const node *n) {
    char name[32] = "";
    if (n->n < sizeof name) memcpy(name, n->s, n->n);
    return (uint8_t)bb_dtype_from_name(name);
}

static uint8_t axis_of(const node *n) { return n->kind == NUMBER ? (uint8_t)number(n) : BB_NO_TOKEN_AXIS; }

/* The value of one of type bytes is the caller's to free. */
static void read_attribute(const json *j, const node *n, bb_attr *a) {
    const node *value = member(j, n, "value"), *type = member(j, n, "type");
    a->key = (uint16_t)number(member(j, n, "key"));
    a->type = 1;
    while (a->type < 5 && !is(type, TYPES[a->type])) a->type++;
    if (value->kind != STRING) return;
    if (a->type == BB_ATTR_U64 || a->type == BB_ATTR_I64) {
        a->u64 = number(value);
    } else if (a->type == BB_ATTR_F64) {
        for (size_t i = 0; i < value->n; i++) a->u64 = a->u64 << 4 | (uint64_t)hex_digit(value->s[i]);
    } else if (a->type == BB_ATTR_TEXT) {
        a->value = value->s;
        a->length = (uint32_t)value->n;
    } else {
        size_t bytes;
        a->value = unhex(value, 1, &bytes);
        a->length = (uint32_t)bytes;
    }
}

static void free_attribute(const bb_attr *a) {
    /* NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): one of as many as the list had, as in encode() */
    if (a->type == BB_ATTR_BYTES) free((void *)a->value);
}

/* ---- contracts ------------------------------------------------------------ */

/* The symbols of a contract; a symbol's place is its bit. */
typedef struct symbols {
    const char *name[64];
    size_t n[64];
    uint32_t count;
} symbols;

static bool read_dimension(const node *text, symbols *known, bb_contract_dim *dim) {
    const char *at = text->s, *end = at + text->n;
    while (at < end) {
        const char *stop = at;
        while (stop < end && *stop != '+' && *stop != ' ') stop++;
        size_t n = (size_t)(stop - at);
        if (n > 0 && *at >= '0' && *at <= '9') {
            dim->number += strtoull(at, NULL, 10);
        } else if (n > 0) {
            uint32_t i = 0;
            /* cppcheck-suppress arrayIndexOutOfBoundsCond ; count is at most 64, and i below it where it is an index */
            while (i < known->count && (known->n[i] != n || memcmp(known->name[i], at, n) != 0)) i++;
            if (i == 64) return false;
            if (i == known->count) {
                known->name[i] = at;
                known->n[i] = n;
                known->count++;
            }
            dim->symbols |= (uint64_t)1 << i;
        }
        at = stop + 1;
    }
    return true;
}

static int by_key(const void *a, const void *b) {
    return (int)((const bb_contract_attr *)a)->attr.key - (int)((const bb_contract_attr *)b)->attr.key;
}

/* NULL, or why the header's structs cannot hold it. To be freed in either case. */
static const char *read_contract(const json *j, const node *told, bb_contract *contract) {
    const node *attributes = member(j, told, "attributes"), *tensors = member(j, told, "tensors");
    symbols known = {.name = {"tokens"}, .n = {6}, .count = 1};
    bb_contract_attr *as = must(calloc(count(j, attributes) + 1, sizeof *as));
    bb_contract_tensor *ts = must(calloc(count(j, tensors) + 1, sizeof *ts));
    *contract = (bb_contract){.attrs = as, .tensors = ts};
    for (const node *n = first(j, attributes); n != NULL; n = following(j, n)) {
        bb_contract_attr *a = &as[contract->attr_count++];
        a->any = member(j, n, "value")->kind != STRING;
        read_attribute(j, n, &a->attr);
    }
    qsort(as, contract->attr_count, sizeof *as, by_key);
    for (const node *n = first(j, tensors); n != NULL; n = following(j, n)) {
        bb_contract_tensor *t = &ts[contract->tensor_count++];
        const node *name = member(j, n, "name"), *shape = member(j, n, "shape");
        if (count(j, shape) > BB_MAX_RANK) return "bb_contract_tensor holds 8 dimensions";
        if (name->n > 0) name->s[name->n] = 0; /* the quote behind it has been read */
        t->name = name->n > 0 ? name->s : "";
        t->dtype = dtype_of(member(j, n, "dtype"));
        t->token_axis = axis_of(member(j, n, "token_axis"));
        for (const node *d = first(j, shape); d != NULL; d = following(j, d)) {
            if (!read_dimension(d, &known, &t->dims[t->rank++])) return "bb_contract_dim holds 64 symbols";
        }
    }
    return NULL;
}

static void free_contract(bb_contract *contract) {
    for (uint32_t i = 0; i < contract->attr_count; i++) free_attribute(&contract->attrs[i].attr);
    free((void *)contract->attrs);
    free((void *)contract->tensors);
}

/* ---- decoding ------------------------------------------------------------- */

/* Blocks for the slots of a stream. */
typedef struct blocks {
    void **at;
    size_t *capacity;
} blocks;

static void *reserve(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    blocks *b = user;
    if (b->capacity[slot] < need) {
        size_t size = (need + need / 2 + 4095) / 4096 * 4096;
        void *block = must(aligned_alloc(64, size));
        if (used) memcpy(block, old, used);
        free(b->at[slot]);
        b->at[slot] = block;
        b->capacity[slot] = size;
    }
    *capacity = b->capacity[slot];
    return b->at[slot];
}

static int push(bb_stream *stream, const uint8_t *data, size_t size, const bb_contract *contract, text *out, bool *any,
                bb_error *error) {
    for (;;) {
        size_t taken = 0;
        bb_event event;
        int r = bb_stream_push(stream, data, size, &taken, &event, error);
        if (r == BB_NEED_MORE) return BB_OK;
        if (r != BB_OK) return r;
        data += taken;
        size -= taken;
        if (event.kind == BB_EVENT_HEAD && contract != NULL) {
            r = bb_contract_compare(contract, event.bundle, error);
            if (r != BB_OK) return r;
        }
        if (event.kind == BB_EVENT_BUNDLE) {
            if (*any) put(out, ",");
            *any = true;
            put_bundle(out, event.bundle);
        }
    }
}

static void decode(const json *j, const node *request, const bb_config *config, text *out) {
    const node *class = member(j, request, "class"), *pieces = member(j, request, "pieces");
    const node *told = member(j, request, "contract");
    bb_contract read = {0};
    const bb_contract *contract = told->kind == OBJECT ? &read : NULL;
    if (contract != NULL) {
        const char *reason = read_contract(j, told, &read);
        if (reason != NULL) {
            put(out, ",\"skipped\":");
            put_quoted(out, reason, strlen(reason));
            free_contract(&read);
            return;
        }
    }
    size_t size;
    /* A copy of just the right size: a sanitizer sees every byte read too many. */
    uint8_t *padded = unhex(member(j, request, "data"), 1, &size), *data = must(malloc(size ? size : 1));
    memcpy(data, padded, size);
    free(padded);
    bb_error error = {0};
    int r = BB_OK;
    put(out, ",\"bundles\":[");
    if (is(class, "one")) {
        bb_bundle bundle;
        /* compared as soon as the head has passed; what is wrong with a head comes from the decoder */
        if (contract != NULL && bb_decode_head(config, data, size, &bundle, NULL, NULL) == BB_OK) {
            r = bb_contract_compare(contract, &bundle, &error);
        }
        if (r == BB_OK) r = bb_decode(config, data, size, &bundle, &error);
        if (r == BB_OK) put_bundle(out, &bundle);
    } else {
        bool core = is(class, "core"), any = false;
        uint32_t slots = core ? 1 : (uint32_t)config->limits.open_bundles;
        uint32_t room = slots ? slots : 1;
        blocks b = {(void **)must(calloc(room, sizeof(void *))), must(calloc(room, sizeof(size_t)))};
        bb_stream_slot *places = must(calloc(room, sizeof *places));
        bb_stream stream;
        r = bb_stream_init(&stream, config, core ? BB_STREAM_CORE : BB_STREAM_CLASS, places, slots, reserve, &b);
        size_t at = 0;
        const node *piece = first(j, pieces);
        while (r == BB_OK) {
            size_t n = size - at;
            if (piece != NULL && number(piece) < n) n = (size_t)number(piece);
            r = push(&stream, data + at, n, contract, out, &any, &error);
            at += n;
            if (at == size) break;
            if (piece != NULL) piece = following(j, piece) ? following(j, piece) : first(j, pieces);
        }
        if (r == BB_OK) r = bb_stream_finish(&stream, &error);
        for (uint32_t i = 0; i < room; i++) free(b.at[i]);
        free((void *)b.at);
        free(b.capacity);
        free(places);
    }
    put(out, "]");
    if (r != BB_OK) put_error(out, r, &error);
    free(data);
    if (contract != NULL) free_contract(&read);
}

/* ---- encoding ------------------------------------------------------------- */

/* Why the header's structs cannot hold the bundle, or NULL. */
static const char *too_large(const json *j, const node *tensors) {
    for (const node *n = first(j, tensors); n != NULL; n = following(j, n)) {
        if (member(j, n, "name")->n > BB_MAX_NAME) return "bb_tensor holds names of 63 bytes";
        if (count(j, member(j, n, "shape")) > BB_MAX_RANK) return "bb_tensor holds 8 dimensions";
    }
    return NULL;
}

static void encode(const json *j, const node *request, const bb_config *config, text *out) {
    const node *bundle = member(j, request, "bundle");
    const node *tensors = member(j, bundle, "tensors"), *attributes = member(j, bundle, "attributes");
    const char *reason = too_large(j, tensors);
    if (reason != NULL) {
        put(out, ",\"skipped\":");
        put_quoted(out, reason, strlen(reason));
        return;
    }
    bb_desc desc = {0};
    desc.number = number(member(j, bundle, "number"));
    desc.minor = (uint16_t)number(member(j, bundle, "minor"));
    desc.no_checksums = member(j, bundle, "checksums")->kind != TRUTH;
    desc.fragment_size = number(member(j, bundle, "fragment_size"));
    bb_tensor *ts = must(calloc(count(j, tensors) + 1, sizeof *ts));
    bb_attr *as = must(calloc(count(j, attributes) + 1, sizeof *as));
    desc.tensors = ts;
    desc.attrs = as;
    for (const node *n = first(j, tensors); n != NULL; n = following(j, n)) {
        bb_tensor *t = &ts[desc.tensor_count++];
        const node *name = member(j, n, "name");
        memcpy(t->name, name->s, name->n);
        t->dtype = dtype_of(member(j, n, "dtype"));
        t->byte_order = is(member(j, n, "byte_order"), "big") ? BB_BIG : BB_LITTLE;
        t->token_axis = axis_of(member(j, n, "token_axis"));
        for (const node *d = first(j, member(j, n, "shape")); d != NULL; d = following(j, d)) t->dims[t->rank++] = number(d);
        size_t bytes, size = element_bytes(t->dtype);
        t->data = unhex(member(j, n, "elements"), size, &bytes);
    }
    for (const node *n = first(j, attributes); n != NULL; n = following(j, n)) {
        read_attribute(j, n, &as[desc.attr_count++]);
    }
    uint64_t need = 0;
    size_t written = 0;
    bb_error error = {0};
    uint8_t *data = NULL;
    int r = bb_encoded_size(config, &desc, &need, &error);
    if (r == BB_OK) {
        data = must(malloc((size_t)need));
        r = bb_encode(config, &desc, data, (size_t)need, &written, &error);
    }
    if (r == BB_OK) {
        put(out, ",\"data\":\"");
        put_elements(out, data, written, 1);
        put(out, "\"");
    } else {
        put_error(out, r, &error);
    }
    free(data);
    /* NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): the encoder takes desc as const, so its counts are these */
    for (uint32_t i = 0; i < desc.tensor_count; i++) free((void *)ts[i].data);
    for (uint32_t i = 0; i < desc.attr_count; i++) free_attribute(&as[i]);
    free(ts);
    free(as);
}

static void hello(text *out) {
    put(out, ",\"protocol\":1,\"name\":\"" TESTEE_NAME "\",\"language\":\"C\",\"version\":\"ABI ");
    put_u64(out, bb_abi_version());
    put(out, "\",\"classes\":[\"one\",\"core\",\"stream\"],\"address_bits\":");
    put_u64(out, 8 * sizeof(void *));
    put(out, ",\"dtypes\":[");
    bool any = false;
    for (unsigned code = 0; code < 256; code++) {
        const char *name = bb_dtype_name(code);
        if (name == NULL) continue;
        if (any) put(out, ",");
        any = true;
        put_quoted(out, name, strlen(name));
    }
    put(out, "]");
}

int main(void) {
    bb_config defaults;
    bb_config_init(&defaults);
    json j = {0};
    text out = {0};
    char *line = NULL;
    size_t capacity = 0;
    bool stopped = false;
    while (!stopped) {
        /* One line, of whatever length. */
        size_t size = 0;
        for (;;) {
            if (capacity - size < 65536) line = must(realloc(line, capacity = capacity * 2 + 131072));
            if (fgets(line + size, (int)(capacity - size > 1 << 30 ? 1 << 30 : capacity - size), stdin) == NULL) break;
            size += strlen(line + size);
            if (size && line[size - 1] == '\n') break;
        }
        if (size == 0) break;
        j.count = 0;
        j.depth = 0;
        j.bad = false;
        j.at = line;
        json_new(&j);
        uint32_t root = json_value(&j);
        out.size = 0;
        if (j.bad || j.nodes[root].kind != OBJECT) {
            fputs("testee: a request that is no JSON object\n", stderr);
            return 2;
        }
        const node *request = &j.nodes[root], *cmd = member(&j, request, "cmd");
        bb_config config;
        put(&out, "{\"seq\":");
        put_u64(&out, number(member(&j, request, "seq")));
        if (is(cmd, "stop")) stopped = true;
        else if (is(cmd, "hello")) hello(&out);
        else if (!configure(&j, request, &defaults, &config)) put(&out, ",\"skipped\":\"an unknown limit\"");
        else if (is(cmd, "decode") || is(cmd, "stream")) decode(&j, request, &config, &out);
        else if (is(cmd, "encode")) encode(&j, request, &config, &out);
        else put(&out, ",\"skipped\":\"an unknown command\"");
        put(&out, "}\n");
        if (fwrite(out.at, 1, out.size, stdout) != out.size || fflush(stdout) != 0) return 2; /* nobody reads */
    }
    free(line);
    free(out.at);
    free(j.nodes);
    return 0;
}
