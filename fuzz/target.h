/*
 * What the C targets share: the configuration that an input asks for, which results
 * are declared, and the count of inputs that get as far as the tensor records.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef FUZZ_TARGET_H
#define FUZZ_TARGET_H

#include "../native_shim/boundary_bundle.h"
#include "mutate.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
#ifdef __cplusplus
}
#endif

/* A finding: the sentence, then the abort that every fuzzer takes for one. */
#define FINDING(...)                                                                                                   \
    do {                                                                                                               \
        fprintf(stderr, "FINDING: " __VA_ARGS__);                                                                      \
        fputc('\n', stderr);                                                                                           \
        abort();                                                                                                       \
    } while (0)

#define HOLDS(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            FINDING(__VA_ARGS__);                                                                                      \
        }                                                                                                              \
    } while (0)

static uint64_t fuzz_executions, fuzz_reached, fuzz_accepted;

static void fuzz_report(void) {
    fprintf(stderr, "fuzz: executions %" PRIu64 " reached %" PRIu64 " accepted %" PRIu64 "\n", fuzz_executions,
            fuzz_reached, fuzz_accepted);
}

static void fuzz_count(void) {
    if (fuzz_executions++ == 0) {
        atexit(fuzz_report);
    }
}

static void *fuzz_memory(size_t n) {
    void *p = malloc(n > 0 ? n : 1);
    if (p == NULL) {
        FINDING("no memory for %zu bytes", n);
    }
    return p;
}

#ifndef FUZZ_WITH_MODEL

/* fields: the first ten bytes of an input. */
static bb_config fuzz_config(const uint8_t *control) {
    static bb_config initial; /* looked up once: nothing here is about the look-up */
    bb_config c;
    bb_limits maximum;
    uint64_t *limit, *most;
    unsigned i;
    if (initial.crc32c == NULL) {
        bb_config_init(&initial);
    }
    c = initial;
    bb_limits_maximum(&maximum);
    limit = &c.limits.head_bytes;
    most = &maximum.head_bytes;
    for (i = 0; i < 10; i++) {
        if (control[i] == 1) {
            limit[i] = most[i];
        } else if (control[i] > 1) {
            limit[i] = control[i] - 2u < most[i] ? control[i] - 2u : most[i];
        }
    }
    if (c.limits.open_bundles > 255) {
        c.limits.open_bundles = 255; /* the array of slots is made anew for every input */
    }
    c.require_checksums = (control[10] & FUZZ_REQUIRE_CHECKSUMS) != 0;
    return c;
}
#endif

#ifndef FUZZ_ENCODER

/* An error that the format declares for decoders. */
static void fuzz_declared(int code, const bb_error *e, size_t size) {
    char sentence[256];
    HOLDS(code >= BB_TRUNCATED && code < BB_CONTRACT_ATTRIBUTE && strcmp(bb_error_name(code), "unknown") != 0,
          "result %d is no error of a decoder", code);
    HOLDS(e->code == code, "result %d comes with the error %d", code, e->code);
    HOLDS(e->offset <= size, "%s lies at byte %" PRIu64 " of %zu", bb_error_name(code), e->offset, size);
    HOLDS(bb_error_format(e, sentence, sizeof sentence) > 0, "%s has no sentence", bb_error_name(code));
}

/* Whether a decoder came to the tensor records of the first head, by what it said of the input.
 * fragment_size is left out: it may come before them. */
static bool fuzz_reaches_records(int code, uint64_t offset, const uint8_t *data, size_t size) {
    uint64_t length;
    if (code == BB_OK) {
        return true;
    }
    if (size < 96 || data[8] != BB_FRAME_HEAD || offset < 64) {
        return false;
    }
    memcpy(&length, data + 24, 8); /* little-endian machines are the ones that are fuzzed on */
    if (length <= size - 64 && offset >= 64 + (length + 63) / 64 * 64) {
        return true;
    }
    switch (code) {
    case BB_LIMIT_NAME:
    case BB_LIMIT_RANK:
    case BB_LIMIT_DIMENSION:
    case BB_LIMIT_PAYLOAD_BYTES:
    case BB_LIMIT_FRAGMENTS:
    case BB_UNSUPPORTED_DTYPE:
    case BB_UNSUPPORTED_ATTRIBUTE: return true;
    case BB_ATTRIBUTE_BLOCK: return offset != 76;
    default: return code >= BB_TENSOR_TABLE && code <= BB_ATTRIBUTE_RESERVED;
    }
}

static void fuzz_verdict(int code, uint64_t offset, const uint8_t *data, size_t size) {
    fuzz_reached += fuzz_reaches_records(code, offset, data, size);
    fuzz_accepted += code == BB_OK;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate(data, size, max_size, seed, LLVMFuzzerMutate);
}
#endif

#endif
