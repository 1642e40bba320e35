/*
 * The input of every decoder target, and a mutator that knows it.
 *
 *   bytes 0-9    limits, in the order of bb_limits: 0 the default, 1 the maximum, c the value c - 2
 *   byte 10      flags, enum fuzz_flags
 *   byte 11      how the stream targets cut the datastream into pieces, enum fuzz_pieces
 *   bytes 12-15  seed of the sizes of those pieces
 *   from 16      the datastream
 *
 * Its CRC32C is its own: what is fuzzed does not make its own inputs.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef FUZZ_MUTATE_H
#define FUZZ_MUTATE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FUZZ_CONTROL 16

enum fuzz_flags {
    FUZZ_REQUIRE_CHECKSUMS = 1,
    FUZZ_PREPARED = 2,
    FUZZ_CORE = 4,
    /* of the C targets alone */
    FUZZ_SINGLE = 8,    /* a stream of exactly one bundle */
    FUZZ_STARVED = 16,  /* a stream whose caller has no memory at every other time */
    FUZZ_NO_ERROR = 32, /* nobody asks for the details of an error */
    FUZZ_CALLER = 64,   /* faults of the call too: NULL, indices and names that are not there */
    FUZZ_CONTRACT = 128 /* of py-decoder and py-stream: the head is compared with a contract */
};
enum fuzz_pieces { FUZZ_WHOLE = 0, FUZZ_BYTES = 1, FUZZ_SMALL = 2, FUZZ_FRAMES = 3, FUZZ_MIXED = 4, FUZZ_PIECES = 5 };

/* Size of the next piece; *state begins as the seed. May be 0. */
uint32_t fuzz_piece(uint32_t *state, unsigned mode);

uint32_t fuzz_crc32c(const uint8_t *p, size_t n);

/* Makes the checksums of every frame of a datastream true, as far as its frames can be followed. */
void fuzz_repair(uint8_t *data, size_t size);

/* Changes one to three elements of the fragments of a datastream, and makes its checksums true. */
void fuzz_change_payload(uint8_t *data, size_t size, unsigned seed);

/* As libFuzzer's LLVMFuzzerCustomMutator. generic: LLVMFuzzerMutate, or NULL. */
size_t fuzz_mutate(uint8_t *data, size_t size, size_t max_size, unsigned seed,
                   size_t (*generic)(uint8_t *, size_t, size_t));

#ifdef __cplusplus
}
#endif

#endif
