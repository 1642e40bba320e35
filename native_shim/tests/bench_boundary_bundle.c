/*
 * How long the codec takes on this machine: the best of many runs, in
 * nanoseconds a call, and GB/s of the checksum. Asserts nothing about time.
 *
 * SPDX-License-Identifier: MIT
 */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include "../boundary_bundle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static volatile uint32_t keep; /* what was computed must not be left out */

/* Best mean of `runs` runs of `calls` calls. */
#define BEST(result, runs, calls, call) \
    do { \
        int run_, i_; \
        result = 1e30; \
        for (run_ = 0; run_ < (runs); run_++) { \
            double begun_ = now(), mean_; \
            for (i_ = 0; i_ < (calls); i_++) { \
                if ((call) != 0) { \
                    printf("a call failed\n"); \
                    exit(1); \
                } \
            } \
            mean_ = (now() - begun_) / (calls); \
            if (mean_ < result) { \
                result = mean_; \
            } \
        } \
    } while (0)

static int checksum(uint32_t (*crc32c)(uint32_t, const void *, size_t), const void *p, size_t n) {
    keep ^= crc32c(0, p, n);
    return 0;
}

/* A decode step: the residual of one token and its position. */
static void describe(bb_desc *d, bb_tensor t[2], bb_attr *a, const float *values, const int32_t *position) {
    memset(d, 0, sizeof *d);
    memset(t, 0, 2 * sizeof *t);
    memset(a, 0, sizeof *a);
    strcpy(t[0].name, "residual");
    t[0].dtype = BB_F32;
    t[0].byte_order = BB_NATIVE_ORDER;
    t[0].rank = 2;
    t[0].dims[0] = 1;
    t[0].dims[1] = 4096;
    t[0].data = values;
    strcpy(t[1].name, "positions");
    t[1].dtype = BB_I32;
    t[1].byte_order = BB_NATIVE_ORDER;
    t[1].rank = 1;
    t[1].dims[0] = 1;
    t[1].data = position;
    a->key = BB_KEY_N_TOKENS;
    a->type = BB_ATTR_U64;
    a->u64 = 1;
    d->tensors = t;
    d->tensor_count = 2;
    d->attrs = a;
    d->attr_count = 1;
}

int main(void) {
    static float values[4096];
    static uint8_t bundle[65536], out[65536], scratch[4096], memory[1024];
    static uint8_t large[1 << 24];
    static const size_t sizes[] = {60, 256, 4096, 16384, 1 << 20, 1 << 24};
    int32_t position = 7;
    bb_config c;
    bb_desc d;
    bb_tensor t[2];
    bb_attr a;
    bb_bundle b;
    bb_prepared ready;
    bb_part parts[8];
    bb_contract_tensor rules[2];
    bb_contract contract;
    bb_error e;
    size_t n, count, head, i;
    double ns, prepared_ns;

    bb_config_init(&c);
    describe(&d, t, &a, values, &position);
    for (i = 0; i < sizeof large; i++) {
        large[i] = (uint8_t)(i * 2654435761u >> 24);
    }
    memcpy(values, large, sizeof values);
    if (bb_encode(&c, &d, bundle, sizeof bundle, &n, &e) != BB_OK ||
        bb_prepare_decode(&ready, &c, bundle, n, memory, sizeof memory, &e) != BB_OK) {
        printf("cannot begin\n");
        return 1;
    }
    memset(rules, 0, sizeof rules);
    memset(&contract, 0, sizeof contract);
    for (i = 0; i < 2; i++) {
        rules[i].name = t[i].name;
        rules[i].dtype = t[i].dtype;
        rules[i].rank = t[i].rank;
        rules[i].dims[0].symbols = BB_SYMBOL_TOKENS;
    }
    rules[0].dims[1].number = 4096;
    contract.tensors = rules;
    contract.tensor_count = 2;

    printf("two tensors, 16 KB and 4 bytes, %d bytes in all      ordinary  prepared\n", (int)n);
    BEST(ns, 400, 1000, bb_decode_head(&c, bundle, n, &b, &head, &e));
    BEST(prepared_ns, 400, 1000, bb_prepared_decode_head(&ready, bundle, n, &b, &head, &e));
    printf("  head parsed and validated                        %8.1f  %8.1f ns\n", ns, prepared_ns);
    BEST(ns, 400, 1000, bb_contract_compare(&contract, &b, &e));
    printf("  contract compared                                %8.1f         - ns\n", ns);
    BEST(ns, 200, 200, bb_decode(&c, bundle, n, &b, &e));
    BEST(prepared_ns, 200, 200, bb_prepared_decode(&ready, bundle, n, &b, &e));
    printf("  bundle decoded                                   %8.1f  %8.1f ns\n", ns, prepared_ns);
    BEST(ns, 200, 200, bb_encode(&c, &d, out, sizeof out, &count, &e));
    BEST(prepared_ns, 200, 200, bb_prepared_encode(&ready, &d, out, sizeof out, &count, &e));
    printf("  bundle encoded                                   %8.1f  %8.1f ns\n", ns, prepared_ns);
    BEST(ns, 200, 200, bb_encode_parts(&c, &d, parts, 8, &count, scratch, sizeof scratch, &e));
    BEST(prepared_ns, 200, 200,
         bb_prepared_encode_parts(&ready, &d, parts, 8, &count, scratch, sizeof scratch, &e));
    printf("  bundle encoded in parts                          %8.1f  %8.1f ns\n", ns, prepared_ns);
    d.no_checksums = true;
    if (bb_encode(&c, &d, bundle, sizeof bundle, &n, &e) != BB_OK ||
        bb_prepare_decode(&ready, &c, bundle, n, memory, sizeof memory, &e) != BB_OK) {
        return 1;
    }
    BEST(ns, 200, 1000, bb_decode(&c, bundle, n, &b, &e));
    BEST(prepared_ns, 200, 1000, bb_prepared_decode(&ready, bundle, n, &b, &e));
    printf("  decoded, no payload checksums                    %8.1f  %8.1f ns\n", ns, prepared_ns);
    BEST(ns, 200, 1000, bb_encode_parts(&c, &d, parts, 8, &count, scratch, sizeof scratch, &e));
    BEST(prepared_ns, 200, 1000,
         bb_prepared_encode_parts(&ready, &d, parts, 8, &count, scratch, sizeof scratch, &e));
    printf("  encoded in parts, no payload checksums           %8.1f  %8.1f ns\n", ns, prepared_ns);

    printf("CRC32C %s\n                                        processor  portable\n",
           c.crc32c == bb_crc32c_portable ? "(no instruction here)" : "");
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        int calls = sizes[i] < 65536 ? 1000 : 1;
        BEST(ns, 50, calls, checksum(c.crc32c, large, sizes[i]));
        BEST(prepared_ns, 20, calls, checksum(bb_crc32c_portable, large, sizes[i]));
        printf("  %8d bytes                             %8.2f  %8.2f GB/s\n", (int)sizes[i],
               (double)sizes[i] / ns, (double)sizes[i] / prepared_ns);
    }
    return 0;
}
