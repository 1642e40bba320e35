/*
 * A mutator that takes a datastream apart into frames, head and records, changes one
 * to four things, and puts it together again with lengths, counts and checksums that are
 * true, so that an input gets past them; sometimes one of these is left as a lie.
 *
 * SPDX-License-Identifier: MIT
 */
#include "mutate.h"

#include <stdbool.h>
#include <string.h>

enum { HEADER = 64, MAX_FRAMES = 48, MAX_BODY = 4096, MAX_RECORDS = 48 };
enum { HEAD = 0x81, FRAGMENT = 0x82, END = 0x83 };

static const uint8_t MAGIC[8] = {0x89, 'B', 'D', 'B', '\r', '\n', 0x1A, '\n'};

typedef struct frame {
    uint8_t header[HEADER];
    uint8_t body[MAX_BODY];
    size_t length;
    uint8_t padding; /* each byte of it; 0 but for a lie */
    bool cut;        /* goes out as it came: it did not fit, or had no end */
} frame;

/* libFuzzer mutates in one thread. Frames are large: what moves is their order, a permutation of all of them, those
 * of the input first. */
static frame pool[MAX_FRAMES];
static frame *frames[MAX_FRAMES];
static size_t frame_count;
static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return below == 0 ? 0 : (uint32_t)((state >> 33) % below);
}

uint32_t fuzz_piece(uint32_t *s, unsigned mode) {
    static const uint32_t sizes[] = {0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000};
    uint32_t r;
    *s = *s * 1664525u + 1013904223u;
    r = *s >> 16;
    switch (mode % FUZZ_PIECES) {
    case FUZZ_BYTES: return 1;
    case FUZZ_SMALL: return r % 12;
    case FUZZ_FRAMES: return 64;
    case FUZZ_MIXED: return sizes[r % (sizeof sizes / sizeof *sizes)];
    default: return UINT32_MAX;
    }
}

/* Eight bytes at a time: it is a good part of what an execution costs. */
uint32_t fuzz_crc32c(const uint8_t *p, size_t n) {
    static uint32_t table[8][256];
    uint32_t crc = 0xFFFFFFFFu;
    if (table[0][1] == 0) {
        uint32_t k, v;
        int bit, t;
        for (k = 0; k < 256; k++) {
            for (v = k, bit = 0; bit < 8; bit++) {
                v = v >> 1 ^ ((v & 1) != 0 ? 0x82F63B78u : 0);
            }
            table[0][k] = v;
        }
        for (t = 1; t < 8; t++) {
            for (k = 0; k < 256; k++) {
                table[t][k] = table[t - 1][k] >> 8 ^ table[0][table[t - 1][k] & 255];
            }
        }
    }
    for (; n >= 8; p += 8, n -= 8) {
        crc ^= p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = table[7][crc & 255] ^ table[6][crc >> 8 & 255] ^ table[5][crc >> 16 & 255] ^ table[4][crc >> 24] ^
              table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    for (; n > 0; p++, n--) {
        crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
    }
    return ~crc;
}

static uint64_t load(const uint8_t *p, unsigned width) {
    uint64_t v = 0;
    while (width-- > 0) {
        v = v << 8 | p[width];
    }
    return v;
}

static void store(uint8_t *p, unsigned width, uint64_t v) {
    unsigned i;
    for (i = 0; i < width; i++) {
        p[i] = (uint8_t)(v >> 8 * i & 255);
    }
}

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* A number that checks turn at: near the old one, near a power of two, small, or anything. */
static uint64_t interesting(uint64_t old) {
    switch (draw(8)) {
    case 0: return old + 1;
    case 1: return old - 1;
    case 2: return old ^ (uint64_t)1 << draw(64);
    case 3: return ((uint64_t)1 << draw(64)) - draw(3);
    case 4: return draw(9);
    case 5: return draw(40) * (draw(2) != 0 ? 8u : 64u);
    case 6: return UINT64_MAX - draw(80);
    default: return (uint64_t)draw(UINT32_MAX) << 32 | draw(UINT32_MAX);
    }
}

static void poke(uint8_t *p, unsigned width) { store(p, width, interesting(load(p, width))); }

/* ---- frames --------------------------------------------------------------- */

static void seal_header(uint8_t *h) { store(h + 60, 4, fuzz_crc32c(h, 60)); }

void fuzz_repair(uint8_t *data, size_t size) {
    size_t at = 0;
    int checksums = 1;
    while (size - at >= HEADER) {
        uint8_t *h = data + at;
        uint64_t length = load(h + 24, 8);
        bool whole = length <= size - at - HEADER;
        if (h[8] == HEAD && whole && length >= 4) {
            checksums = (h[HEADER] & 1) == 0;
        }
        if (h[8] == FRAGMENT && !checksums) {
            store(h + 48, 4, 0);
        } else if (whole) {
            store(h + 48, 4, fuzz_crc32c(h + HEADER, (size_t)length));
        }
        seal_header(h);
        if (!whole || round_up((size_t)length, 64) > size - at - HEADER) {
            break;
        }
        at += HEADER + round_up((size_t)length, 64);
    }
}

static void take_apart(const uint8_t *p, size_t size) {
    size_t at = 0;
    for (frame_count = 0; frame_count < MAX_FRAMES; frame_count++) {
        frames[frame_count] = &pool[frame_count];
    }
    frame_count = 0;
    while (at < size && frame_count < MAX_FRAMES) {
        frame *f = frames[frame_count++];
        size_t left = size - at;
        uint64_t length = left >= HEADER ? load(p + at + 24, 8) : 0;
        memset(f->header, 0, HEADER);
        memcpy(f->header, p + at, left < HEADER ? left : HEADER);
        f->padding = 0;
        f->cut = left < HEADER || length > MAX_BODY || length > left - HEADER;
        f->length = f->cut ? (left > HEADER ? left - HEADER : 0) : (size_t)length;
        if (f->length > MAX_BODY) {
            f->length = MAX_BODY;
        }
        memcpy(f->body, p + at + (left < HEADER ? left : HEADER), f->length);
        if (f->cut) {
            return;
        }
        at += HEADER + round_up(f->length, 64);
    }
}

static size_t put_together(uint8_t *p, size_t max) {
    size_t at = 0, i;
    for (i = 0; i < frame_count; i++) {
        frame *f = frames[i];
        size_t padded = round_up(f->length, 64), n = HEADER + (f->cut ? f->length : padded);
        if (n > max - at) {
            break;
        }
        if (!f->cut) {
            store(f->header + 24, 8, f->length);
        }
        memcpy(p + at, f->header, HEADER);
        memcpy(p + at + HEADER, f->body, f->length);
        if (!f->cut) {
            memset(p + at + HEADER + f->length, f->padding, padded - f->length);
        }
        at += n;
    }
    return at;
}

static bool room_for_frame(size_t at) {
    frame *unused;
    if (frame_count == MAX_FRAMES) {
        return false;
    }
    unused = frames[frame_count];
    memmove(&frames[at + 1], &frames[at], (frame_count - at) * sizeof *frames);
    frames[at] = unused;
    frame_count++;
    return true;
}

static void copy_frame(frame *to, const frame *from) {
    memcpy(to->header, from->header, HEADER);
    memcpy(to->body, from->body, from->length);
    to->length = from->length;
    to->padding = from->padding;
    to->cut = from->cut;
}

static void new_header(frame *f, unsigned type, const frame *head) {
    memset(f->header, 0, HEADER);
    f->length = 0;
    f->padding = 0;
    f->cut = false;
    memcpy(f->header, MAGIC, 8);
    f->header[8] = (uint8_t)type;
    f->header[12] = 1;
    memcpy(f->header + 14, head->header + 14, 10); /* minor and number */
}

static void remove_frame(size_t at) {
    frame *unused = frames[at];
    memmove(&frames[at], &frames[at + 1], (frame_count - at - 1) * sizeof *frames);
    frames[--frame_count] = unused;
}

static void change_frames(void) {
    size_t a = draw((uint32_t)frame_count), b = draw((uint32_t)frame_count);
    switch (draw(7)) {
    case 0: remove_frame(a); break;
    case 5: frame_count = a + 1; break; /* what reads past this frame reads past the input */
    case 1: { /* repeated, somewhere behind */
        frame *f = frames[a];
        size_t to = a + 1 + draw((uint32_t)(frame_count - a));
        if (room_for_frame(to)) {
            copy_frame(frames[to], f);
        }
        break;
    }
    case 2: { /* swapped */
        frame *kept = frames[a];
        frames[a] = frames[b];
        frames[b] = kept;
        break;
    }
    case 3: /* an extension */
        if (room_for_frame(a)) {
            static const uint8_t types[] = {0, 1, 0x7F, 0x40, 0x80, 0xC0, 0x84, 0xFF};
            frame *f = frames[a];
            new_header(f, types[draw(8)], frames[a + 1 < frame_count ? a + 1 : a]);
            f->length = draw(80);
            memset(f->body, (int)draw(256), f->length);
        }
        break;
    case 4: { /* a second bundle, its frames among the first one's */
        size_t n = frame_count, i;
        if (n <= MAX_FRAMES / 2) {
            uint64_t number = load(frames[0]->header + 16, 8) + draw(4);
            for (i = n; i-- > 0;) {
                size_t to = i + 1 + (draw(2) != 0 ? draw((uint32_t)(frame_count - i)) : 0);
                if (!room_for_frame(to)) {
                    break;
                }
                copy_frame(frames[to], frames[i]);
                store(frames[to]->header + 16, 8, number);
            }
        }
        break;
    }
    default: frames[a]->padding = draw(4) == 0 ? 1 : 0;
    }
}

static void change_header(void) {
    static const struct {
        uint8_t at, width;
    } fields[] = {{0, 8}, {8, 1}, {9, 1}, {10, 2}, {12, 2}, {14, 2}, {16, 8}, {32, 8}, {40, 8}, {52, 8}};
    unsigned k = draw(sizeof fields / sizeof *fields);
    uint8_t *h = frames[draw((uint32_t)frame_count)]->header;
    if (fields[k].at == 8) {
        h[8] = (uint8_t)(draw(2) != 0 ? 0x80 + draw(5) : draw(256));
    } else {
        poke(h + fields[k].at, fields[k].width);
    }
}

/* ---- heads ---------------------------------------------------------------- */

typedef struct head {
    frame *f;
    size_t tensors[MAX_RECORDS + 1], attrs[MAX_RECORDS + 1]; /* where records begin, and the last one ends */
    size_t tensor_count, attr_count;
} head;

static bool read_head(head *h, size_t index) {
    frame *f = frames[index];
    size_t at = 32, end;
    uint64_t attribute_bytes;
    if (f->header[8] != HEAD || f->cut || f->length < 32) {
        return false;
    }
    h->f = f;
    attribute_bytes = load(f->body + 12, 4);
    end = attribute_bytes > f->length - 32 ? f->length : f->length - (size_t)attribute_bytes;
    for (h->tensor_count = 0; h->tensor_count < MAX_RECORDS && at + 8 <= end; h->tensor_count++) {
        size_t n = round_up(8 + 8 * (size_t)f->body[at + 2] + f->body[at + 4], 8);
        if (n > end - at) {
            break;
        }
        h->tensors[h->tensor_count] = at;
        at += n;
    }
    h->tensors[h->tensor_count] = at;
    at = end;
    for (h->attr_count = 0; h->attr_count < MAX_RECORDS && at + 8 <= f->length; h->attr_count++) {
        uint64_t n = load(f->body + at + 4, 4);
        if (n > f->length - at - 8) {
            break;
        }
        h->attrs[h->attr_count] = at;
        at += 8 + round_up((size_t)n, 8);
    }
    h->attrs[h->attr_count] = at;
    return true;
}

static bool splice(frame *f, size_t at, size_t removed, size_t added) {
    if (at > f->length || removed > f->length - at || f->length - removed + added > MAX_BODY) {
        return false;
    }
    memmove(f->body + at + added, f->body + at + removed, f->length - at - removed);
    f->length = f->length - removed + added;
    return true;
}

/* Counts and sizes of the head, after records changed. */
static void recount(frame *f, int tensors, int attrs, long attribute_bytes) {
    store(f->body + 4, 4, load(f->body + 4, 4) + (uint64_t)(int64_t)tensors);
    store(f->body + 8, 4, load(f->body + 8, 4) + (uint64_t)(int64_t)attrs);
    store(f->body + 12, 4, load(f->body + 12, 4) + (uint64_t)(int64_t)attribute_bytes);
}

static const uint8_t dtypes[] = {1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 24, 25, 26, 27, 32, 64};

static void change_tensor(const head *h) {
    frame *f = h->f;
    size_t k = draw((uint32_t)h->tensor_count), at = h->tensors[k], size = h->tensors[k + 1] - at;
    uint8_t *r = f->body + at;
    unsigned rank = r[2], name = r[4];
    switch (draw(12)) {
    case 0: r[0] = draw(8) == 0 ? (uint8_t)draw(256) : dtypes[draw(sizeof dtypes)]; break;
    case 1: r[1] = (uint8_t)(draw(4) == 0 ? draw(256) : 1 + draw(2)); break;
    case 2: r[3] = (uint8_t)(draw(2) != 0 ? 255 : draw(rank + 2)); break;
    case 3: r[5 + draw(3)] = (uint8_t)draw(3); break;
    case 4:
    case 5:
        if (rank > 0) {
            uint8_t *d = r + 8 + 8 * draw(rank);
            store(d, 8, draw(3) == 0 ? interesting(load(d, 8)) : draw(10) * (r[0] == 64 ? 16 : 1));
        }
        break;
    case 6: /* a dimension more or less */
        if (rank > 0 && draw(2) != 0) {
            if (splice(f, at + 8, 8, 0)) {
                r[2]--;
            }
        } else if (splice(f, at + 8, 0, 8)) {
            store(r + 8, 8, draw(4));
            r[2]++;
        }
        break;
    case 7: /* a name of another length */
        {
            unsigned n = draw(70);
            size_t new_size = round_up(8 + 8 * rank + n, 8);
            if (splice(f, at, 0, new_size)) {
                memmove(r, r + new_size, 8 + 8 * rank + (name < n ? name : n));
                r[4] = (uint8_t)n;
                while (name < n) {
                    r[8 + 8 * rank + name++] = (uint8_t)('a' + draw(26));
                }
                memset(r + 8 + 8 * rank + n, 0, new_size - 8 - 8 * rank - n);
                splice(f, at + new_size, size, 0);
            }
        }
        break;
    case 8:
        if (name > 0) {
            r[8 + 8 * rank + draw(name)] = (uint8_t)(draw(3) == 0 ? draw(256) : '-' + draw('z' - '-'));
        }
        break;
    case 9: /* once more */
        if (splice(f, at, 0, size)) {
            memmove(r, r + size, size);
            if (name > 0 && draw(4) != 0) {
                r[8 + 8 * rank] = (uint8_t)('A' + draw(26));
            }
            recount(f, 1, 0, 0);
        }
        break;
    case 10:
        if (splice(f, at, size, 0)) {
            recount(f, -1, 0, 0);
        }
        break;
    default: r[size - 1] = (uint8_t)(draw(2) != 0 ? draw(256) : 'x'); /* mostly padding */
    }
}

static void change_attr(const head *h) {
    frame *f = h->f;
    size_t k, at, size;
    uint8_t *r;
    if (h->attr_count == 0 || draw(6) == 0) { /* a new one, behind the others */
        static const uint16_t keys[] = {2, 9, 0x8001, 0x8003, 0x8004, 0x8005, 0x8006, 0x8007, 0x8008, 0x4001, 1, 0xC001};
        unsigned type = 1 + draw(5), length = type <= 3 ? 8 : draw(40), padded = (unsigned)round_up(length, 8);
        at = h->attrs[h->attr_count];
        if (at == f->length && splice(f, at, 0, 8 + padded)) {
            r = f->body + at;
            memset(r, 0, 8 + padded);
            store(r, 2, keys[draw(12)]);
            r[2] = (uint8_t)type;
            store(r + 4, 4, length);
            memset(r + 8, 'a' + (int)draw(26), length);
            recount(f, 0, 1, 8 + (long)padded);
        }
        return;
    }
    k = draw((uint32_t)h->attr_count);
    at = h->attrs[k];
    size = h->attrs[k + 1] - at;
    r = f->body + at;
    switch (draw(7)) {
    case 0: store(r, 2, draw(2) != 0 ? load(r, 2) + 1 : draw(65536)); break;
    case 1: r[2] = (uint8_t)draw(7); break;
    case 2: r[3] = (uint8_t)draw(3); break;
    case 3: poke(r + 4, 4); break;
    case 4:
        if (size > 8) {
            r[8 + draw((uint32_t)(size - 8))] = (uint8_t)(draw(2) != 0 ? draw(256) : 0);
        }
        break;
    case 5:
        if (splice(f, at, 0, size)) {
            memmove(r, r + size, size);
            recount(f, 0, 1, (long)size);
        }
        break;
    default:
        if (splice(f, at, size, 0)) {
            recount(f, 0, -1, -(long)size);
        }
    }
}

static void change_head_fields(frame *f) {
    static const struct {
        uint8_t at, width;
    } fields[] = {{0, 4}, {4, 4}, {8, 4}, {12, 4}, {16, 8}, {24, 8}};
    unsigned k = draw(8);
    if (k == 6) {
        f->body[0] ^= 1;
    } else if (k == 7) {
        static const uint16_t sizes[] = {0, 64, 128, 64 * 17, 192, 256};
        store(f->body + 16, 8, sizes[draw(6)]);
    } else {
        poke(f->body + fields[k].at, fields[k].width);
    }
}

/* The fragments and the end that the first head asks for, if they are few and small. */
static void rebuild(const head *h) {
    static const uint8_t bytes[] = {8, 4, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 34};
    uint64_t grid = load(h->f->body + 16, 8), total = 0, fragments = 0;
    const frame *first = frames[0];
    size_t k, i, out = 1;
    if (h->f != first) {
        return;
    }
    for (k = 0; k < h->tensor_count; k++) {
        const uint8_t *r = first->body + h->tensors[k];
        uint64_t n = 1, offset;
        for (i = 0; i < sizeof dtypes && dtypes[i] != r[0]; i++) {
        }
        if (i == sizeof dtypes) {
            return;
        }
        for (unsigned d = 0; d < r[2]; d++) {
            uint64_t dim = load(r + 8 + 8 * d, 8);
            if (dim > MAX_BODY) {
                return;
            }
            n *= dim;
            if (n > 65536) {
                return;
            }
        }
        n = r[0] == 64 ? n / 32 * 34 : n * bytes[i];
        for (offset = 0; offset < n; fragments++) {
            uint64_t size = grid == 0 || n - offset < grid ? n - offset : grid;
            frame *f;
            if (out + 1 >= MAX_FRAMES || size > MAX_BODY) {
                return;
            }
            f = frames[out++];
            new_header(f, FRAGMENT, first);
            store(f->header + 32, 8, k);
            store(f->header + 40, 8, offset);
            f->length = (size_t)size;
            for (i = 0; i < size; i++) {
                f->body[i] = (uint8_t)(r[0] == 32 ? draw(2) : draw(256));
            }
            offset += size;
        }
        total += n;
    }
    new_header(frames[out], END, first);
    store(frames[out]->header + 32, 8, fragments);
    store(frames[out]->header + 40, 8, total);
    frame_count = out + 1;
}

static void change_head(void) {
    static head h; /* large */
    size_t index = draw(4) != 0 ? 0 : draw((uint32_t)frame_count);
    if (!read_head(&h, index)) {
        return;
    }
    if (draw(6) == 0) {
        change_head_fields(h.f);
    } else if (h.tensor_count > 0 && draw(3) != 0) {
        change_tensor(&h);
    } else {
        change_attr(&h);
    }
    if (draw(4) != 0 && read_head(&h, 0)) {
        rebuild(&h);
    }
}

static void change_body(void) {
    frame *f = frames[draw((uint32_t)frame_count)];
    if (f->length > 0) {
        f->body[draw((uint32_t)f->length)] = (uint8_t)(draw(2) != 0 ? draw(256) : draw(3));
    }
}

/* Lengths that are not true, with a header whose checksum is. */
static void lie(uint8_t *p, size_t size) {
    size_t at = 0, skip = draw(4);
    while (size - at >= HEADER) {
        uint64_t length = load(p + at + 24, 8);
        if (skip-- == 0 || length > size - at - HEADER) {
            poke(p + at + 24, 8);
            seal_header(p + at);
            return;
        }
        at += HEADER + round_up((size_t)length, 64);
        if (at > size) {
            return;
        }
    }
}

void fuzz_change_payload(uint8_t *data, size_t size, unsigned seed) {
    static const uint8_t widths[] = {1, 4, 4, 8};
    size_t at = 0, found[MAX_FRAMES], count = 0;
    unsigned changes;
    state = ((uint64_t)seed << 20) + size;
    draw(1);
    while (size - at >= HEADER && count < MAX_FRAMES) {
        uint64_t length = load(data + at + 24, 8);
        if (length > size - at - HEADER) {
            break;
        }
        if (data[at + 8] == FRAGMENT && length > 0) {
            found[count++] = at;
        }
        at += HEADER + round_up((size_t)length, 64);
        if (at > size) {
            break;
        }
    }
    for (changes = 1 + draw(3); changes > 0 && count > 0; changes--) {
        uint8_t *f = data + found[draw((uint32_t)count)];
        size_t length = (size_t)load(f + 24, 8), width = widths[draw(4)];
        uint8_t *from = f + HEADER + (length >= width ? draw((uint32_t)(length / width)) * width : 0);
        uint8_t *to = f + HEADER + (length >= width ? draw((uint32_t)(length / width)) * width : 0);
        if (length < width) {
            continue;
        }
        if (draw(3) == 0) {
            memmove(to, from, width);
        } else {
            store(to, (unsigned)width, draw(2) != 0 ? draw(20) : interesting(load(to, (unsigned)width)));
        }
    }
    fuzz_repair(data, size);
}

/* ---- the whole input ------------------------------------------------------- */

static void change_control(uint8_t *p) {
    unsigned k = draw(FUZZ_CONTROL + 4);
    if (k < 10) {
        p[k] = (uint8_t)(draw(2) != 0 ? 1 + draw(12) : draw(256));
    } else if (k == 10) {
        p[10] = (uint8_t)draw(draw(4) != 0 ? 8 : 256);
    } else if (k == 11) {
        p[11] = (uint8_t)draw(FUZZ_PIECES);
    } else if (k < FUZZ_CONTROL) {
        p[k] = (uint8_t)draw(256);
    } else {
        memset(p, 0, 10);
    }
}

size_t fuzz_mutate(uint8_t *data, size_t size, size_t max_size, unsigned seed,
                   size_t (*generic)(uint8_t *, size_t, size_t)) {
    unsigned changes;
    state = ((uint64_t)seed << 20) + size;
    draw(1);
    if (max_size < FUZZ_CONTROL + HEADER || size < FUZZ_CONTROL + HEADER) {
        return generic != NULL ? generic(data, size, max_size) : size;
    }
    if (draw(2) == 0) { /* small limits hide all that lies behind them */
        memset(data, 0, 10);
    }
    if (draw(4) == 0) {
        change_control(data);
    }
    if (generic != NULL && draw(8) == 0) {
        size = FUZZ_CONTROL + generic(data + FUZZ_CONTROL, size - FUZZ_CONTROL, max_size - FUZZ_CONTROL);
    } else {
        take_apart(data + FUZZ_CONTROL, size - FUZZ_CONTROL);
        for (changes = 1 + draw(4); changes > 0 && frame_count > 0; changes--) {
            switch (draw(10)) {
            case 0:
            case 1: change_frames(); break;
            case 2: change_header(); break;
            case 3: change_body(); break;
            default: change_head();
            }
        }
        size = FUZZ_CONTROL + put_together(data + FUZZ_CONTROL, max_size - FUZZ_CONTROL);
        if (draw(24) == 0) { /* cut off */
            size -= draw((uint32_t)(size - FUZZ_CONTROL));
        }
    }
    if (draw(32) != 0) {
        fuzz_repair(data + FUZZ_CONTROL, size - FUZZ_CONTROL);
    }
    if (draw(16) == 0) {
        lie(data + FUZZ_CONTROL, size - FUZZ_CONTROL);
    }
    return size;
}
