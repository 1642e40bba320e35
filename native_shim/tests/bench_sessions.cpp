// What the session table costs: open and release at 1,000 known ids, most of them evicted, and truncate at a context of
// 4,096. Prints one JSON object, microseconds of single calls.
//
//     bench_sessions MODEL.gguf
//
// SPDX-License-Identifier: MIT
#include "boundary_bundle.h"
#include "llama-boundary.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr uint32_t N_CTX = 4096, N_SEQ = 64, N_BATCH = 512, N_KNOWN = 1000, N_ROUNDS = 4;

using id = std::array<uint8_t, 16>;

llama_boundary_error err = {sizeof(err), LLAMA_BOUNDARY_ABI, 0, ""};
llama_session_result res = {};

[[noreturn]] void stop(const char *what, const char *why) {
    fprintf(stderr, "bench_sessions: %s: %s\n", what, why);
    exit(2);
}

void check(int32_t status, const char *what) {
    if (status != LLAMA_BOUNDARY_OK) {
        stop(what, err.message);
    }
}

id id_of(uint32_t number) {
    id out = {};
    memcpy(out.data(), &number, sizeof(number));
    return out;
}

// microseconds that a call takes
template <typename F> double timed(F &&call) {
    const auto began = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count();
}

struct bench {
    llama_model *model;
    llama_context *ctx;
    llama_layer_ownership own = {};
    llama_session_request req = {};
    std::vector<uint64_t> epochs = std::vector<uint64_t>(N_KNOWN, 1);

    bench(const char *path, uint32_t n_seq) {
        const llama_layer_range range = {sizeof(range), LLAMA_BOUNDARY_ABI, 0, -1};
        llama_model_params mp = llama_model_default_params();
        mp.n_gpu_layers = 0;
        model = llama_model_load_layer_range(path, mp, &range, &err);
        if (!model) {
            stop(path, err.message);
        }
        own.size = sizeof(own);
        own.abi = LLAMA_BOUNDARY_ABI;
        llama_model_layer_ownership(model, &own);

        llama_context_params cp = llama_context_default_params();
        cp.n_ctx = N_CTX;
        cp.n_batch = cp.n_ubatch = N_BATCH;
        cp.n_seq_max = n_seq;
        cp.n_threads = cp.n_threads_batch = 1;
        cp.kv_unified = true; // every sequence's cells are looked through
        cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        ctx = llama_init_from_model(model, cp);
        if (!ctx) {
            stop("context", "llama_init_from_model failed");
        }
        req.size = sizeof(req);
        req.abi = LLAMA_BOUNDARY_ABI;
        llama_context_recipe(ctx, LLAMA_RECIPE_SHARED, nullptr, 0, req.recipe);
    }
    ~bench() {
        llama_free(ctx);
        llama_model_free(model);
    }
    bench(const bench &) = delete;
    bench &operator=(const bench &) = delete;

    // the request for a known id, under its epoch
    llama_session_request *ask(uint32_t number, int64_t n_pos) {
        const id name = id_of(number);
        memcpy(req.id, name.data(), name.size());
        req.epoch = epochs[number];
        req.n_pos = n_pos;
        return &req;
    }

    void decode(uint32_t number, int64_t pos, uint32_t n) {
        std::vector<int32_t> tokens(n), positions(n);
        std::vector<uint32_t> offsets(n + 1), rows(n);
        std::vector<uint8_t> outputs(n);
        for (uint32_t i = 0; i < n; ++i) {
            tokens[i] = (int32_t)(3 + (pos + i) % 100);
            positions[i] = (int32_t)(pos + i);
            offsets[i + 1] = i + 1;
        }
        const id name = id_of(number);
        const bb_tensor tensors[] = {
            {"token_ids", BB_I32, BB_LITTLE, 1, 0, {n}, 0, tokens.data()},
            {"positions", BB_I32, BB_LITTLE, 1, 0, {n}, 0, positions.data()},
            {"seq_offsets", BB_U32, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {n + 1}, 0, offsets.data()},
            {"seq_ids", BB_U32, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {n}, 0, rows.data()},
            {"session_ids", BB_U8, BB_LITTLE, 2, BB_NO_TOKEN_AXIS, {1, 16}, 0, name.data()},
            {"session_epochs", BB_U64, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {1}, 0, &epochs[number]},
            {"session_positions", BB_I64, BB_LITTLE, 1, BB_NO_TOKEN_AXIS, {1}, 0, &pos},
            {"outputs", BB_BOOL, BB_LITTLE, 1, 0, {n}, 0, outputs.data()},
        };
        const bb_attr attrs[] = {
            {BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, (uint32_t)strlen(own.architecture), own.architecture, 0},
            {BB_KEY_MODEL_FINGERPRINT, BB_ATTR_BYTES, 32, own.fingerprint, 0},
            {BB_KEY_LAYER_START, BB_ATTR_U64, 8, nullptr, 0},
            {BB_KEY_LAYER_END, BB_ATTR_U64, 8, nullptr, 0},
            {BB_KEY_N_LAYER, BB_ATTR_U64, 8, nullptr, (uint64_t)own.n_layer},
            {BB_KEY_N_TOKENS, BB_ATTR_U64, 8, nullptr, n},
            {BB_KEY_N_SEQS, BB_ATTR_U64, 8, nullptr, 1},
        };
        bb_desc desc = {};
        desc.tensors = tensors;
        desc.tensor_count = sizeof(tensors) / sizeof(tensors[0]);
        desc.attrs = attrs;
        desc.attr_count = sizeof(attrs) / sizeof(attrs[0]);
        bb_config config;
        bb_config_init(&config);
        std::vector<uint8_t> bytes(1 << 20);
        size_t n_written = 0;
        bb_error e = {};
        if (bb_encode(&config, &desc, bytes.data(), bytes.size(), &n_written, &e) != BB_OK) {
            char text[300];
            bb_error_format(&e, text, sizeof(text));
            stop("token bundle", text);
        }
        check(llama_boundary_decode(ctx, bytes.data(), n_written, &err), "decode");
    }
};

void print(const char *name, std::vector<double> &times, const char *end) {
    std::sort(times.begin(), times.end());
    const size_t n = times.size();
    printf("\"%s\": {\"calls\": %zu, \"median_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f}%s", name, n, times[n / 2],
           times[n * 99 / 100], times[n - 1], end);
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: bench_sessions MODEL.gguf\n");
        return 2;
    }
    res.size = sizeof(res);
    res.abi = LLAMA_BOUNDARY_ABI;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    std::vector<double> begin, go_on, release, evict, truncate, back;
    {
        bench b(argv[1], N_SEQ);
        // every id is known: N_SEQ of them are live, with N_CTX / N_SEQ positions each, the others are evicted or released
        for (uint32_t round = 0; round < N_ROUNDS; ++round) {
            for (uint32_t number = 0; number < N_KNOWN; ++number) {
                llama_session_statistics now = {};
                now.size = sizeof(now);
                now.abi = LLAMA_BOUNDARY_ABI;
                llama_session_get_statistics(b.ctx, &now);
                const bool known = now.n_live + now.n_forgotten == N_KNOWN;
                if (now.n_live == N_SEQ) {
                    // the oldest of them, in turn by eviction and by release
                    const uint32_t oldest = (number + N_KNOWN - N_SEQ) % N_KNOWN;
                    if (number % 2) {
                        const double us = timed([&] { check(llama_session_evict(b.ctx, nullptr, &res, &err), "evict"); });
                        if (known) {
                            evict.push_back(us);
                        }
                    } else {
                        auto *r = b.ask(oldest, 0);
                        const double us = timed([&] { check(llama_session_release(b.ctx, r, &res, &err), "release"); });
                        if (known) {
                            release.push_back(us);
                        }
                    }
                    b.epochs[oldest] += 1;
                }
                auto *r = b.ask(number, 0);
                const double us = timed([&] { check(llama_session_open(b.ctx, r, &res, &err), "open"); });
                if (known) {
                    begin.push_back(us);
                }
                b.decode(number, 0, N_CTX / N_SEQ);
                r = b.ask(number, N_CTX / N_SEQ);
                const double again = timed([&] { check(llama_session_open(b.ctx, r, &res, &err), "open"); });
                if (known) {
                    go_on.push_back(again);
                }
            }
        }
    }
    {
        bench b(argv[1], 1);
        check(llama_session_open(b.ctx, b.ask(0, 0), &res, &err), "open");
        for (uint32_t pos = 0; pos < N_CTX; pos += N_BATCH) {
            b.decode(0, pos, N_BATCH);
        }
        for (uint32_t round = 0; round < 500; ++round) {
            auto *r = b.ask(0, N_CTX - 1);
            truncate.push_back(timed([&] { check(llama_session_truncate(b.ctx, r, &res, &err), "truncate"); }));
            b.decode(0, N_CTX - 1, 1);
        }
        for (uint32_t round = 0; round < 10; ++round) {
            auto *r = b.ask(0, N_CTX / 2);
            back.push_back(timed([&] { check(llama_session_truncate(b.ctx, r, &res, &err), "truncate"); }));
            for (uint32_t pos = N_CTX / 2; pos < N_CTX; pos += N_BATCH) {
                b.decode(0, pos, N_BATCH);
            }
        }
    }
    printf("{");
    print("open", begin, ", ");
    print("open again", go_on, ", ");
    print("release", release, ", ");
    print("evict", evict, ", ");
    print("truncate one", truncate, ", ");
    print("truncate half", back, "}\n");
    return 0;
}
