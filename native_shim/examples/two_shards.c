/*
 * Two shards of one model in one process, driven in plain C through libllama's
 * boundary functions: no worker, no Python, no network.
 *
 *     two_shards MODEL.gguf CUT [TOKENS]
 *
 * Loads layers [0, CUT) and [CUT, n_layer) and, as a reference, all of them.
 * Feeds a prompt of 16 tokens, then decodes greedily; the bundle that the first
 * shard writes is the bundle that the second one reads. Every logit of every
 * step is compared with the reference by its bits. Exit status 0: all equal,
 * 1: a bit differs, 2: could not.
 */
#include "boundary_bundle.h"
#include "llama-boundary.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 16, N_CTX = 256 };

struct shard {
    struct llama_model *model;
    struct llama_context *ctx;
    struct llama_layer_ownership own;
};

static struct llama_boundary_error err = {.size = sizeof(err), .abi = LLAMA_BOUNDARY_ABI};

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

static _Noreturn void stop(const char *what, const char *why) {
    fprintf(stderr, "two_shards: %s: %s\n", what, why);
    exit(2);
}

static struct shard open_shard(const char *path, int start, int end) {
    struct shard s;
    memset(&s, 0, sizeof(s));
    s.own.size = sizeof(s.own);
    s.own.abi = LLAMA_BOUNDARY_ABI;

    const struct llama_layer_range range = {sizeof(range), LLAMA_BOUNDARY_ABI, start, end};
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    s.model = llama_model_load_layer_range(path, mp, &range, &err);
    if (!s.model) {
        stop("load", err.message);
    }
    llama_model_layer_ownership(s.model, &s.own);

    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = N_CTX;
    cp.n_batch = N_PROMPT;
    cp.n_ubatch = N_PROMPT;
    cp.n_threads = cp.n_threads_batch = 1;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    s.ctx = llama_init_from_model(s.model, cp);
    if (!s.ctx) {
        stop("context", "llama_init_from_model failed");
    }
    return s;
}

static void close_shard(struct shard *s) {
    llama_free(s->ctx);
    llama_model_free(s->model);
}

/* One sequence of n tokens from position pos on, logits of the last one. */
static size_t token_bundle(const struct shard *s, const int32_t *tokens, uint32_t n, int32_t pos, uint8_t *dst, size_t cap) {
    int32_t positions[N_PROMPT];
    uint32_t offsets[N_PROMPT + 1], ids[N_PROMPT];
    uint8_t outputs[N_PROMPT];
    for (uint32_t i = 0; i < n; ++i) {
        positions[i] = pos + (int32_t)i;
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
        {"outputs", BB_BOOL, BB_LITTLE, 1, 0, {n}, 0, outputs},
    };
    const bb_attr attrs[] = {
        {BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, (uint32_t)strlen(s->own.architecture), s->own.architecture, 0},
        {BB_KEY_MODEL_FINGERPRINT, BB_ATTR_BYTES, 32, s->own.fingerprint, 0},
        {BB_KEY_LAYER_START, BB_ATTR_U64, 8, NULL, 0},
        {BB_KEY_LAYER_END, BB_ATTR_U64, 8, NULL, 0},
        {BB_KEY_N_LAYER, BB_ATTR_U64, 8, NULL, (uint64_t)s->own.n_layer},
        {BB_KEY_N_TOKENS, BB_ATTR_U64, 8, NULL, n},
        {BB_KEY_N_SEQS, BB_ATTR_U64, 8, NULL, 1},
    };
    bb_desc desc;
    memset(&desc, 0, sizeof(desc));
    desc.tensors = tensors;
    desc.tensor_count = 5;
    desc.attrs = attrs;
    desc.attr_count = 7;

    bb_config config;
    bb_config_init(&config);
    bb_error e;
    size_t n_written = 0;
    if (bb_encode(&config, &desc, dst, cap, &n_written, &e) != BB_OK) {
        char text[300];
        bb_error_format(&e, text, sizeof(text));
        stop("token bundle", text);
    }
    return n_written;
}

static void decode(struct shard *s, const void *data, size_t size, const char *what) {
    if (llama_boundary_decode(s->ctx, data, size, &err) != LLAMA_BOUNDARY_OK) {
        stop(what, err.message);
    }
}

/* min to max; what is wrong about another text is said. */
static int32_t number(const char *text, long min, long max, const char *what, const char *expected) {
    char *end;
    const long value = strtol(text, &end, 10);
    if (end == text || *end != '\0' || value < min || value > max) {
        stop(what, expected);
    }
    return (int32_t)value;
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: two_shards MODEL.gguf CUT [TOKENS]\n");
        return 2;
    }
    const int32_t cut = number(argv[2], INT32_MIN, INT32_MAX, "CUT", "expected a layer"); /* which, the library says */
    const int32_t n_steps = argc > 3 ? number(argv[3], 1, N_CTX - N_PROMPT, "TOKENS", "expected 1 to 240") : 16;

    llama_log_set(quiet, NULL);
    llama_backend_init();

    struct shard head = open_shard(argv[1], 0, cut);
    struct shard tail = open_shard(argv[1], cut, -1);
    struct shard whole = open_shard(argv[1], 0, -1);

    const int32_t n_vocab = whole.own.n_vocab;
    int32_t tokens[N_PROMPT];
    for (int i = 0; i < N_PROMPT; ++i) {
        tokens[i] = (i * 7919 + 1) % n_vocab;
    }

    static uint8_t request[8192];
    uint32_t n = N_PROMPT;
    int32_t pos = 0;
    unsigned long compared = 0, differing = 0;
    for (int step = 0; step < n_steps; ++step) {
        const size_t size = token_bundle(&head, tokens, n, pos, request, sizeof(request));
        const void *bundle = NULL;
        size_t bundle_size = 0;

        decode(&head, request, size, "first shard");
        if (llama_boundary_output(head.ctx, NULL, &bundle, &bundle_size, &err) != LLAMA_BOUNDARY_OK) {
            stop("first shard's output", err.message);
        }
        decode(&tail, bundle, bundle_size, "second shard");
        decode(&whole, request, size, "reference");

        const float *a = llama_get_logits(tail.ctx);
        const float *b = llama_get_logits(whole.ctx);
        int32_t best = 0;
        for (int32_t i = 0; i < n_vocab; ++i) {
            compared++;
            differing += memcmp(&a[i], &b[i], sizeof(a[i])) != 0;
            best = a[i] > a[best] ? i : best;
        }
        pos += (int32_t)n;
        n = 1;
        tokens[0] = best;
    }

    printf("layers [0, %d) and [%d, %d): %d steps, %lu logits compared, %lu differ\n", head.own.layer_end, tail.own.layer_start,
           tail.own.layer_end, n_steps, compared, differing);
    printf("weights: %llu + %llu bytes, whole model %llu; KV: %llu + %llu bytes, whole model %llu\n",
           (unsigned long long)head.own.n_bytes, (unsigned long long)tail.own.n_bytes, (unsigned long long)whole.own.n_bytes,
           (unsigned long long)llama_boundary_kv_bytes(head.ctx), (unsigned long long)llama_boundary_kv_bytes(tail.ctx),
           (unsigned long long)llama_boundary_kv_bytes(whole.ctx));

    close_shard(&head);
    close_shard(&tail);
    close_shard(&whole);
    llama_backend_free();
    return differing != 0;
}
