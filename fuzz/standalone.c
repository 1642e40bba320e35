/*
 * For machines without libFuzzer, and for tests: runs a target over files and then over mutations of them, without
 * feedback from coverage.
 *
 *   TARGET [-runs=N] [-seed=S] FILE...
 */
#include "mutate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SIZE = 8192 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static uint64_t state;

static uint32_t next(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

/* A few bytes changed; the structure-aware mutator does the rest. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    unsigned n = 1 + next() % 4;
    if (size == 0) {
        return 0;
    }
    while (n-- > 0) {
        data[next() % size] = (uint8_t)next();
    }
    return size < max_size ? size : max_size;
}

static void run(const uint8_t *data, size_t size) {
    uint8_t *copy = (uint8_t *)malloc(size > 0 ? size : 1);
    if (copy == NULL) {
        exit(2);
    }
    memcpy(copy, data, size);
    (void)LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

int main(int argc, char **argv) {
    static uint8_t buffer[MAX_SIZE];
    uint8_t **seeds = (uint8_t **)calloc((size_t)argc, sizeof *seeds);
    size_t *sizes = (size_t *)calloc((size_t)argc, sizeof *sizes), count = 0;
    long runs = 0, i;
    for (i = 1; i < argc; i++) {
        FILE *f;
        if (strncmp(argv[i], "-runs=", 6) == 0) {
            runs = atol(argv[i] + 6);
        } else if (strncmp(argv[i], "-seed=", 6) == 0) {
            state = (uint64_t)atol(argv[i] + 6);
        } else if ((f = fopen(argv[i], "rb")) == NULL) {
            fprintf(stderr, "error: %s cannot be opened\n", argv[i]);
            return 2;
        } else {
            size_t n = fread(buffer, 1, sizeof buffer, f);
            fclose(f);
            seeds[count] = (uint8_t *)malloc(n > 0 ? n : 1);
            memcpy(seeds[count], buffer, n);
            sizes[count++] = n;
            run(buffer, n);
        }
    }
    for (i = 0; i < runs && count > 0; i++) {
        size_t k = next() % count, n = sizes[k], times = 1 + next() % 3;
        memcpy(buffer, seeds[k], n);
        while (times-- > 0) {
            n = fuzz_mutate(buffer, n, sizeof buffer, next(), LLVMFuzzerMutate);
        }
        run(buffer, n);
    }
    for (i = 0; i < (long)count; i++) {
        free(seeds[i]);
    }
    free(seeds);
    free(sizes);
    return 0;
}
