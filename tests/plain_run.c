/*
 * One run of a whole model through llama.h alone, which an unpatched libllama and a patched one serve alike:
 *
 *     plain_run MODEL.gguf [BYTES]
 *
 * Two interleaved sequences in micro-batches of 16, then single tokens. Writes every logit to standard output.
 * BYTES are allocated between model and context: the hash tables of ggml are over addresses, so that the number of
 * collisions, and of instructions, depends on how far apart things happen to lie.
 */
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>

enum { N_PROMPT = 40, N_STEPS = 6, N_SEQS = 2 };

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

static int run(struct llama_context *ctx, int n_vocab) {
    struct llama_batch batch = llama_batch_init(N_PROMPT, 0, 1);
    int next[N_SEQS] = {0}, status = 0;
    for (int step = 0; step <= N_STEPS && status == 0; step++) {
        batch.n_tokens = step == 0 ? N_PROMPT : 1;
        for (int i = 0; i < batch.n_tokens; i++) {
            const int seq = step == 0 ? i % 3 % N_SEQS : step % N_SEQS;
            batch.token[i] = (7 * i + 11 * step + 3) % n_vocab;
            batch.pos[i] = next[seq]++;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i] = 1;
        }
        status = llama_decode(ctx, batch);
        for (int i = 0; i < batch.n_tokens && status == 0; i++) {
            status = fwrite(llama_get_logits_ith(ctx, i), sizeof(float), (size_t)n_vocab, stdout) != (size_t)n_vocab;
        }
    }
    llama_batch_free(batch);
    return status;
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: plain_run MODEL.gguf [BYTES]\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();

    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(argv[1], mp);
    if (!model) {
        fprintf(stderr, "plain_run: cannot load %s\n", argv[1]);
        return 2;
    }
    void *volatile between = malloc(argc > 2 ? strtoul(argv[2], NULL, 10) : 1);
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 256;
    cp.n_batch = N_PROMPT;
    cp.n_ubatch = 16;
    cp.n_seq_max = N_SEQS;
    cp.n_threads = cp.n_threads_batch = 1;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    cp.offload_kqv = false;
    cp.op_offload = false;
    cp.no_perf = true;
    struct llama_context *ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        fprintf(stderr, "plain_run: no context\n");
        return 2;
    }
    const int status = run(ctx, llama_vocab_n_tokens(llama_model_get_vocab(model)));
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    free(between);
    return status;
}
