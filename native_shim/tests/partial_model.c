/*
 * What a model of some layers must refuse without ending the process, in plain C:
 *
 *     partial_model MODEL.gguf
 *
 * Exit status 0: every refusal as expected; 1: one is missing; 2: could not.
 */
#include "llama-boundary.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

static void check(int ok, const char *what) {
    printf("%s: %s\n", ok ? "ok" : "FAILED", what);
    failures += !ok;
}

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

static struct llama_boundary_error err = {.size = sizeof(err), .abi = LLAMA_BOUNDARY_ABI};

static struct llama_model *load(const char *path, int start, int end, bool vocab_only) {
    const struct llama_layer_range range = {sizeof(range), LLAMA_BOUNDARY_ABI, start, end};
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    mp.vocab_only = vocab_only;
    return llama_model_load_layer_range(path, mp, &range, &err);
}

static struct llama_context *context(struct llama_model *model, bool embeddings) {
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 256;
    cp.n_batch = cp.n_ubatch = 16;
    cp.n_threads = cp.n_threads_batch = 1;
    cp.embeddings = embeddings;
    return llama_init_from_model(model, cp);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: partial_model MODEL.gguf\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();

    /* loading */
    check(!load(argv[1], 2, 2, false) && err.status == LLAMA_BOUNDARY_ERROR_RANGE && strstr(err.message, "[2, 2)"),
          "an empty range is refused with its numbers");
    check(!load(argv[1], 1, 999, false) && err.status == LLAMA_BOUNDARY_ERROR_RANGE && strstr(err.message, "999"),
          "a range beyond the model is refused with its numbers");
    check(!load(argv[1], 0, 1, true) && err.status == LLAMA_BOUNDARY_ERROR_ARGUMENT, "vocab_only has no layer ranges");
    check(!load("/nonexistent.gguf", 0, 1, false) && err.status == LLAMA_BOUNDARY_ERROR_LOAD && err.message[0],
          "a missing file is an error with a sentence");
    {
        struct llama_layer_range other = {sizeof(other), LLAMA_BOUNDARY_ABI + 1, 0, 1};
        check(!llama_model_load_layer_range(argv[1], llama_model_default_params(), &other, &err) &&
                  err.status == LLAMA_BOUNDARY_ERROR_ARGUMENT,
              "a struct of another ABI version is refused");
    }

    struct llama_model *model = load(argv[1], 0, 2, false);
    if (!model) {
        fprintf(stderr, "partial_model: %s\n", err.message);
        return 2;
    }

    /* the context */
    check(!context(model, true), "a context with embeddings is refused");
    struct llama_context *ctx = context(model, false);
    if (!ctx) {
        fprintf(stderr, "partial_model: no context\n");
        return 2;
    }

    llama_token tokens[4] = {1, 2, 3, 4};
    check(llama_decode(ctx, llama_batch_get_one(tokens, 4)) != 0, "llama_decode is refused");
    check(llama_encode(ctx, llama_batch_get_one(tokens, 4)) != 0, "llama_encode is refused");
    check(llama_state_get_size(ctx) == 0, "the state has no size");
    {
        static uint8_t bytes[1 << 16];
        check(llama_state_get_data(ctx, bytes, sizeof(bytes)) == 0, "the state is not saved");
        check(llama_state_set_data(ctx, bytes, sizeof(bytes)) == 0, "the state is not restored");
        check(llama_state_seq_get_data(ctx, bytes, sizeof(bytes), 0) == 0, "a sequence is not saved");
        check(llama_state_seq_set_data(ctx, bytes, sizeof(bytes), 0) == 0, "a sequence is not restored");
    }

    const void *data = NULL;
    size_t size = 0;
    check(llama_boundary_output(ctx, NULL, &data, &size, &err) == LLAMA_BOUNDARY_ERROR_STATE, "no output before a batch");
    check(llama_boundary_decode(ctx, "no bundle", 9, &err) == LLAMA_BOUNDARY_ERROR_BUNDLE && strstr(err.message, "bad_magic"),
          "bytes that are no bundle are refused by name");
    check(llama_boundary_decode(NULL, "x", 1, &err) == LLAMA_BOUNDARY_ERROR_ARGUMENT, "a null context is refused");
    check(llama_boundary_outputs(NULL, NULL) == 0 && llama_boundary_kv_bytes(NULL) == 0, "questions to no context are answered");
    llama_set_embeddings(ctx, true);
    check(llama_boundary_decode(ctx, "no bundle", 9, &err) == LLAMA_BOUNDARY_ERROR_ARGUMENT, "embeddings set later are refused");
    llama_free(ctx);
    llama_model_free(model);

    /* a model that was loaded the ordinary way is not touched by any of this, and takes no bundle */
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    model = llama_model_load_from_file(argv[1], mp);
    ctx = model ? context(model, false) : NULL;
    if (!ctx) {
        fprintf(stderr, "partial_model: the whole model does not load\n");
        return 2;
    }
    check(llama_decode(ctx, llama_batch_get_one(tokens, 4)) == 0, "the whole model decodes");
    check(llama_boundary_decode(ctx, "no bundle", 9, &err) == LLAMA_BOUNDARY_ERROR_ARGUMENT, "and takes no bundle, since it has no fingerprint");
    check(llama_state_get_size(ctx) > 0, "its state has a size");
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return failures != 0;
}
