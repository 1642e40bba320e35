/*
 * What the targets with a model share: $FUZZ_MODEL, a tiny file that run.py makes, and bundles of tokens that are
 * sound for it.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef FUZZ_MODEL_H
#define FUZZ_MODEL_H

#define FUZZ_ENCODER /* the mutators are the targets' own */
#define FUZZ_WITH_MODEL
#include "target.h"

#include "llama-boundary.h"

#include <cstdlib>
#include <cstring>
#include <vector>

enum { FUZZ_LAYERS = 3, FUZZ_CUT = 1, FUZZ_CTX = 48, FUZZ_BATCH = 16, FUZZ_SEQS = 3, FUZZ_VOCAB = 320, FUZZ_TOO_MANY = 24 };

static inline const char *fuzz_model() {
    const char *path = getenv("FUZZ_MODEL");
    if (path == nullptr) {
        fprintf(stderr, "error: FUZZ_MODEL does not say where the model is\n");
        exit(2);
    }
    return path;
}

/* n tokens (1 to FUZZ_TOO_MANY; sound up to FUZZ_BATCH) from position pos on, of one sequence or one session; logits of the last one. */
static inline std::vector<uint8_t> fuzz_tokens(const llama_layer_ownership &own, uint32_t n, int64_t pos,
                                               const uint8_t *session, uint64_t epoch) {
    int32_t tokens[FUZZ_TOO_MANY], positions[FUZZ_TOO_MANY];
    uint32_t offsets[FUZZ_TOO_MANY + 1], ids[FUZZ_TOO_MANY];
    uint8_t outputs[FUZZ_TOO_MANY];
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)((7 * (pos + i) + 3) % FUZZ_VOCAB);
        positions[i] = (int32_t)pos + (int32_t)i;
        offsets[i] = i;
        ids[i] = 0;
        outputs[i] = i + 1 == n;
    }
    offsets[n] = n;
    const bb_tensor tensors[] = {
        {"token_ids", BB_I32, BB_LITTLE, 1, 0, {n}, 0, tokens},
        {"positions", BB_I32, BB_LITTLE, 1, 0, {n}, 0, positions},
        {"seq_offsets", BB_U32, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {n + 1}, 0, offsets},
        {"seq_ids", BB_U32, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {n}, 0, ids},
        {"session_ids", BB_U8, BB_LITTLE, 2, BB_NO_TOKEN_AXIS, {1, 16}, 0, session},
        {"session_epochs", BB_U64, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {1}, 0, &epoch},
        {"session_positions", BB_I64, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {1}, 0, &pos},
        {"outputs", BB_BOOL, BB_LITTLE, 1, 0, {n}, 0, outputs},
    };
    std::vector<bb_tensor> chosen(tensors, tensors + 4);
    chosen.insert(chosen.end(), tensors + (session != nullptr ? 4 : 7), tensors + 8);
    const bb_attr attrs[] = {
        {BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, (uint32_t)strlen(own.architecture), own.architecture, 0},
        {BB_KEY_MODEL_FINGERPRINT, BB_ATTR_BYTES, 32, own.fingerprint, 0},
        {BB_KEY_LAYER_START, BB_ATTR_U64, 8, nullptr, 0},
        {BB_KEY_LAYER_END, BB_ATTR_U64, 8, nullptr, 0},
        {BB_KEY_N_LAYER, BB_ATTR_U64, 8, nullptr, (uint64_t)own.n_layer},
        {BB_KEY_N_TOKENS, BB_ATTR_U64, 8, nullptr, n},
        {BB_KEY_N_SEQS, BB_ATTR_U64, 8, nullptr, 1},
    };
    bb_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.tensors = chosen.data();
    desc.tensor_count = (uint32_t)chosen.size();
    desc.attrs = attrs;
    desc.attr_count = sizeof attrs / sizeof *attrs;
    bb_config config;
    bb_config_init(&config);
    std::vector<uint8_t> bytes(4096);
    size_t written = 0;
    HOLDS(bb_encode(&config, &desc, bytes.data(), bytes.size(), &written, nullptr) == BB_OK, "a sound bundle is not one");
    bytes.resize(written);
    return bytes;
}

#endif
