/*
 * What tests/test_cross_codec.py asks of the C codec, in one shared library with
 * it: transcripts, and many damaged variants of one input at a time.
 *
 * SPDX-License-Identifier: MIT
 */
#include "transcript.h"

#ifdef __cplusplus
extern "C" {
#endif

/* limits: in the order of bb_limits. */
static bb_config configure(const uint64_t *limits, int require_checksums) {
    bb_config c;
    bb_config_init(&c);
    memcpy(&c.limits, limits, sizeof c.limits);
    c.require_checksums = require_checksums != 0;
    return c;
}

/* The transcript of `data`; free it with cross_free. prepare_from: a decoder
 * prepared with the head that these bytes begin with, if they do; or NULL. */
char *cross_transcribe(const char *kind, const uint64_t *limits, int require_checksums, const bb_contract *contract,
                       const uint8_t *prepare_from, size_t prepare_size, const uint8_t *data, size_t size,
                       const uint32_t *pieces, size_t piece_count) {
    bb_config c = configure(limits, require_checksums);
    bb_prepared prepared, *ready = NULL;
    uint8_t *copy = (uint8_t *)get_memory(NULL, size), *memory = NULL;
    text t = {NULL, 0, 0};
    put(&t, "");
    memcpy(copy, data, size);
    if (prepare_from != NULL) {
        memory = (uint8_t *)get_memory(NULL, prepare_size);
        if (bb_prepare_decode(&prepared, &c, prepare_from, prepare_size, memory, prepare_size, NULL) == BB_OK) {
            ready = &prepared;
        }
    }
    transcribe(&t, kind, &c, ready, contract, copy, size, pieces, piece_count, true, NULL);
    free(memory);
    free(copy);
    return t.at;
}

void cross_free(char *p) { free(p); }

static void seal(uint8_t *p, uint32_t crc) {
    p[0] = (uint8_t)(crc & 0xFF);
    p[1] = (uint8_t)(crc >> 8 & 0xFF);
    p[2] = (uint8_t)(crc >> 16 & 0xFF);
    p[3] = (uint8_t)(crc >> 24);
}

/*
 * For each of the `count` values the variant of `data` that has it at byte `at`,
 * one after another in `variants`; what bb_decode says of it in codes (0: a
 * bundle) and offsets. repair: the checksums of the frame that begins at `frame`
 * with a body of `length` bytes are made true again; body: that of its body too.
 */
void cross_variants(const uint64_t *limits, const uint8_t *data, size_t size, size_t at, const uint8_t *values,
                    size_t count, int repair, int body, size_t frame, size_t length, uint8_t *variants,
                    int32_t *codes, uint64_t *offsets) {
    bb_config c = configure(limits, 0);
    size_t i;
    for (i = 0; i < count; i++) {
        uint8_t *v = variants + i * size;
        bb_bundle b;
        bb_error e;
        memcpy(v, data, size);
        v[at] = values[i];
        if (repair && body) {
            seal(v + frame + 48, bb_crc32c_portable(0, v + frame + 64, length));
        }
        if (repair) {
            seal(v + frame + 60, bb_crc32c_portable(0, v + frame, 60));
        }
        e.offset = 0;
        codes[i] = bb_decode(&c, v, size, &b, &e);
        offsets[i] = e.offset;
    }
}

/* The same for every beginning of `data`, `size` of them. */
void cross_beginnings(const uint64_t *limits, const uint8_t *data, size_t size, int32_t *codes, uint64_t *offsets) {
    bb_config c = configure(limits, 0);
    size_t i;
    for (i = 0; i < size; i++) {
        bb_bundle b;
        bb_error e;
        e.offset = 0;
        codes[i] = bb_decode(&c, data, i, &b, &e);
        offsets[i] = e.offset;
    }
}

#ifdef __cplusplus
}
#endif
