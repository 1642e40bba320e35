/* bb_stream_push in pieces whose sizes the input says; the verdict may not depend on them. */
#include "target.h"

typedef struct blocks {
    void *at[256];
    size_t given; /* bytes of input so far */
    bool starved;
    unsigned calls;
} blocks;

/* Always another place, and no byte more than was asked for. */
static void *grow(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    blocks *b = (blocks *)user;
    void *block;
    HOLDS(slot < 256, "slot %" PRIu32 " is asked for", slot);
    HOLDS(used <= need, "%zu bytes are used of %zu", used, need);
    /* What came, the frame header before it and the padding up to 64 behind it. */
    HOLDS(need <= 2 * b->given + 256, "%zu bytes are asked for after %zu came", need, b->given);
    if (b->starved && b->calls++ % 3 != 2) {
        static uint8_t too_small[1];
        *capacity = need - 1;
        return b->calls % 3 == 1 ? NULL : too_small;
    }
    block = fuzz_memory(need);
    if (old != NULL) {
        memcpy(block, old, used);
    }
    free(b->at[slot]);
    b->at[slot] = block;
    *capacity = need;
    return block;
}

typedef struct verdict {
    int code;
    uint64_t offset, bundles;
    uint32_t events; /* checksum of what the events said */
} verdict;

static void note(verdict *v, const void *p, size_t n) {
    v->events = v->events * 31 + fuzz_crc32c((const uint8_t *)p, n);
}

static void complete(verdict *v, const bb_bundle *b, size_t given) {
    uint32_t i;
    HOLDS(b->complete, "a bundle that is not complete");
    for (i = 0; i < b->tensor_count; i++) {
        bb_tensor t;
        uint8_t *values;
        HOLDS(bb_tensor_at(b, i, &t) == BB_OK, "tensor %" PRIu32 " cannot be had", i);
        HOLDS(t.bytes <= given, "tensor %s has %" PRIu64 " bytes of %zu", t.name, t.bytes, given);
        values = (uint8_t *)fuzz_memory((size_t)t.bytes);
        HOLDS(bb_tensor_read(b, i, values, (size_t)t.bytes) == BB_OK, "tensor %s cannot be read", t.name);
        note(v, values, (size_t)t.bytes);
        free(values);
    }
    v->bundles++;
}

static verdict run(const bb_config *c, const uint8_t *control, const uint8_t *data, size_t size, unsigned mode) {
    static bb_stream_slot slots[256];
    static blocks memory; /* all NULL between runs */
    bool core = (control[10] & FUZZ_CORE) != 0;
    unsigned flags = (core ? (unsigned)BB_STREAM_CORE : (unsigned)BB_STREAM_CLASS) |
                     ((control[10] & FUZZ_SINGLE) != 0 ? (unsigned)BB_STREAM_SINGLE : 0);
    uint32_t seed, i, slot_count = core || c->limits.open_bundles == 0 ? 1 : (uint32_t)c->limits.open_bundles;
    bb_prepared prepared;
    uint8_t *head = NULL;
    bb_stream s;
    bb_error e, *asked = (control[10] & FUZZ_NO_ERROR) != 0 ? NULL : &e;
    verdict v = {BB_OK, 0, 0, 0};
    size_t at = 0;
    memset(&e, 0, sizeof e);
    memcpy(&seed, control + 12, 4);
    memory.given = 0;
    memory.starved = (control[10] & FUZZ_STARVED) != 0;
    memory.calls = 0;
    HOLDS(bb_stream_init(&s, c, flags, slots, slot_count, grow, &memory) == BB_OK,
          "the stream does not begin");
    if ((control[10] & FUZZ_PREPARED) != 0) {
        head = (uint8_t *)fuzz_memory(size + 128);
        if (bb_prepare_decode(&prepared, c, data, size, head, size + 128, NULL) == BB_OK) {
            HOLDS(bb_stream_prepare(&s, &prepared) == BB_OK, "the stream takes no preparation");
        }
    }
    while (v.code == BB_OK && at < size) {
        size_t n = fuzz_piece(&seed, mode), begin = 0;
        uint8_t *piece;
        n = n < size - at ? n : size - at;
        piece = (uint8_t *)fuzz_memory(n); /* of its own: what is read past it, or after it, shows */
        memcpy(piece, data + at, n);
        memory.given += n;
        for (;;) {
            bb_event event;
            size_t taken = 0;
            v.code = bb_stream_push(&s, piece + begin, n - begin, &taken, &event, asked);
            HOLDS(taken <= n - begin, "%zu bytes taken of %zu", taken, n - begin);
            begin += taken;
            if (v.code == BB_E_MEMORY && memory.starved) {
                continue; /* with the bytes not taken */
            }
            if (v.code != BB_OK) {
                break;
            }
            note(&v, &event.kind, sizeof event.kind);
            note(&v, &event.frame, sizeof event.frame);
            if (event.kind == BB_EVENT_FRAGMENT || event.kind == BB_EVENT_EXTENSION) {
                note(&v, event.data, (size_t)event.size);
            } else if (event.kind == BB_EVENT_BUNDLE) {
                complete(&v, event.bundle, memory.given);
            } else {
                HOLDS(event.kind == BB_EVENT_HEAD, "event %d", (int)event.kind);
            }
        }
        free(piece);
        at += n;
        if (v.code == BB_NEED_MORE) {
            HOLDS(begin == n, "more is needed while %zu bytes are left", n - begin);
            v.code = BB_OK;
        }
    }
    if (v.code == BB_OK) {
        v.code = bb_stream_finish(&s, asked);
    } else {
        bb_error again;
        bb_event event;
        size_t taken = 1;
        HOLDS(bb_stream_push(&s, data, size, &taken, &event, asked) == v.code && taken == 0,
              "more is taken after the error %d", v.code);
        HOLDS(bb_stream_finish(&s, NULL) == v.code, "the error %d is not final", v.code);
        HOLDS(bb_stream_finish(&s, &again) == v.code, "the error %d is not final", v.code);
    }
    v.offset = v.code == BB_OK ? 0 : e.offset;
    if (v.code != BB_OK && asked != NULL) {
        fuzz_declared(v.code, &e, size);
    }
    for (i = 0; i < slot_count; i++) {
        free(memory.at[i]);
        memory.at[i] = NULL;
    }
    free(head);
    return v;
}

static void *nothing(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    (void)user, (void)slot, (void)old, (void)used, (void)need, (void)capacity;
    return NULL;
}

/* Faults of the call are told, and change nothing. */
static void caller(const bb_config *c, const uint8_t *data, size_t size) {
    static bb_stream_slot slot[1];
    blocks none;
    bb_stream s;
    bb_event event;
    size_t taken = 0;
    memset(&none, 0, sizeof none);
    HOLDS(bb_stream_finish(NULL, NULL) == BB_E_ARGUMENT, "no stream finishes");
    HOLDS(bb_stream_init(&s, c, BB_STREAM_CORE, slot, 1, grow, &none) == BB_OK, "the stream does not begin");
    HOLDS(bb_stream_push(NULL, "", 0, &taken, &event, NULL) == BB_E_ARGUMENT, "no stream");
    HOLDS(bb_stream_push(&s, "", 0, NULL, &event, NULL) == BB_E_ARGUMENT, "no taken");
    HOLDS(bb_stream_push(&s, "", 0, &taken, NULL, NULL) == BB_E_ARGUMENT, "no event");
    HOLDS(bb_stream_push(&s, NULL, 1, &taken, &event, NULL) == BB_E_ARGUMENT, "no data");
    HOLDS(bb_stream_push(&s, NULL, 0, &taken, &event, NULL) == BB_NEED_MORE, "no data of no bytes");
    HOLDS(bb_stream_finish(&s, NULL) == BB_OK, "nothing came and the stream fails");
    HOLDS(bb_stream_init(&s, c, BB_STREAM_CORE, slot, 1, nothing, NULL) == BB_OK, "the stream does not begin");
    if (bb_stream_push(&s, data, size, &taken, &event, NULL) == BB_E_MEMORY) {
        HOLDS(bb_stream_finish(&s, NULL) == BB_TRUNCATED, "a head without memory is whole");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bb_config c;
    verdict v, whole;
    unsigned mode;
    if (size < FUZZ_CONTROL) {
        return 0;
    }
    fuzz_count();
    c = fuzz_config(data);
    mode = data[11] % FUZZ_PIECES;
    if ((data[10] & FUZZ_CALLER) != 0) {
        caller(&c, data + FUZZ_CONTROL, size - FUZZ_CONTROL);
    }
    v = run(&c, data, data + FUZZ_CONTROL, size - FUZZ_CONTROL, mode);
    fuzz_verdict(size == FUZZ_CONTROL ? BB_TRUNCATED : v.code, v.offset, data + FUZZ_CONTROL, size - FUZZ_CONTROL);
    if (mode != FUZZ_WHOLE) {
        whole = run(&c, data, data + FUZZ_CONTROL, size - FUZZ_CONTROL, FUZZ_WHOLE);
        HOLDS(v.code == whole.code && v.offset == whole.offset && v.bundles == whole.bundles && v.events == whole.events,
              "in pieces %d at %" PRIu64 ", %" PRIu64 " bundles; whole %d at %" PRIu64 ", %" PRIu64 " bundles", v.code,
              v.offset, v.bundles, whole.code, whole.offset, whole.bundles);
    }
    return 0;
}
