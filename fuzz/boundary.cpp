/*
 * The patched libllama on a tiny model: llama_boundary_decode of the first range (tokens) and of the last one
 * (residual), and llama_session_restore. Only declared codes; after a refusal positions and sessions are as they were,
 * and a sound bundle gives the bytes that it gave before.
 *
 * Of the control, bytes 0 to 9 are not looked at, since the library has its own limits:
 *   byte 10  what is done, enum what
 *   byte 11  positions that the context holds before, 0 to 16
 *   byte 12  layout of the output
 *
 * SPDX-License-Identifier: MIT
 */
#include "model.h"

#include <algorithm>

namespace {

enum what { LAST = 1, SESSION = 2, RESTORE = 4 };

template <typename T> T sized() {
    T t{};
    t.size = sizeof(T);
    t.abi = LLAMA_BOUNDARY_ABI;
    return t;
}

const uint8_t session_id[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr uint64_t EPOCH = 5;

struct shard {
    llama_model *model = nullptr;
    llama_context *ctx = nullptr;
    llama_layer_ownership own = sized<llama_layer_ownership>();
    uint8_t recipe[32];
    /* Sound inputs, by number of positions held before, without and with a session; what the first gives. */
    std::vector<uint8_t> prompt[2], next[2], prompt_output, state;

    void open(int32_t start, int32_t end) {
        auto error = sized<llama_boundary_error>();
        auto range = sized<llama_layer_range>();
        range.start = start;
        range.end = end;
        llama_model_params mp = llama_model_default_params();
        mp.n_gpu_layers = 0;
        model = llama_model_load_layer_range(fuzz_model(), mp, &range, &error);
        if (model == nullptr) {
            fprintf(stderr, "error: %s: %s\n", fuzz_model(), error.message);
            exit(2);
        }
        llama_context_params cp = llama_context_default_params();
        cp.n_ctx = FUZZ_CTX * FUZZ_SEQS;
        cp.n_batch = cp.n_ubatch = FUZZ_BATCH;
        cp.n_seq_max = FUZZ_SEQS;
        cp.n_threads = cp.n_threads_batch = 1;
        cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        ctx = llama_init_from_model(model, cp);
        HOLDS(ctx != nullptr && llama_model_layer_ownership(model, &own) == LLAMA_BOUNDARY_OK, "the model is not open");
        HOLDS(llama_context_recipe(ctx, LLAMA_RECIPE_SHARED, nullptr, 0, recipe) >= 0, "there is no recipe");
    }

    void clear() {
        llama_session_clear(ctx);
        llama_memory_clear(llama_get_memory(ctx), true);
    }

    int32_t decode(const std::vector<uint8_t> &bytes) {
        auto error = sized<llama_boundary_error>();
        return llama_boundary_decode(ctx, bytes.data(), bytes.size(), &error);
    }

    std::vector<uint8_t> output(unsigned layout) {
        auto wanted = sized<llama_boundary_layout>();
        auto error = sized<llama_boundary_error>();
        wanted.big_endian = layout & 1;
        wanted.no_checksums = layout >> 1 & 1;
        wanted.fragment_size = 64 * (layout >> 2 & 3);
        const void *data = nullptr;
        size_t size = 0;
        const int32_t status = llama_boundary_output(ctx, &wanted, &data, &size, &error);
        HOLDS(status == LLAMA_BOUNDARY_OK, "there is no output: %s", error.message);
        return std::vector<uint8_t>((const uint8_t *)data, (const uint8_t *)data + size);
    }

    llama_session_request request(int64_t n_pos) const {
        auto r = sized<llama_session_request>();
        memcpy(r.id, session_id, sizeof r.id);
        memcpy(r.recipe, recipe, sizeof r.recipe);
        r.epoch = EPOCH;
        r.n_pos = n_pos;
        return r;
    }

    void open_session() {
        auto result = sized<llama_session_result>();
        auto error = sized<llama_boundary_error>();
        const llama_session_request r = request(0);
        HOLDS(llama_session_open(ctx, &r, &result, &error) == LLAMA_BOUNDARY_OK, "a session is not opened: %s",
              error.message);
    }

    std::vector<uint8_t> save() {
        auto result = sized<llama_session_result>();
        auto error = sized<llama_boundary_error>();
        const llama_session_request r = request(0);
        const void *data = nullptr;
        size_t size = 0;
        HOLDS(llama_session_save(ctx, &r, &data, &size, &result, &error) == LLAMA_BOUNDARY_OK, "no saved state: %s",
              error.message);
        return std::vector<uint8_t>((const uint8_t *)data, (const uint8_t *)data + size);
    }

    /* Everything that a refusal must leave alone, as far as the interface shows it. */
    std::vector<int64_t> standing() const {
        std::vector<int64_t> all;
        for (llama_seq_id s = 0; s < FUZZ_SEQS; s++) {
            all.push_back(llama_memory_seq_pos_min(llama_get_memory(ctx), s));
            all.push_back(llama_memory_seq_pos_max(llama_get_memory(ctx), s));
        }
        auto counts = sized<llama_session_statistics>();
        HOLDS(llama_session_get_statistics(ctx, &counts) == LLAMA_BOUNDARY_OK, "sessions are not counted");
        all.push_back((int64_t)counts.n_live);
        auto info = sized<llama_session_info>();
        for (uint64_t i = 0; i < counts.n_live; i++) {
            HOLDS(llama_session_get(ctx, i, &info) == LLAMA_BOUNDARY_OK, "a session is not there");
            all.push_back(info.n_pos);
            all.push_back((int64_t)info.epoch);
        }
        return all;
    }
};

constexpr uint32_t N_PROMPT = 4, N_NEXT = 2;
shard shards[2]; /* first and last range */

void quiet(ggml_log_level, const char *, void *) {}

void make_inputs() {
    shard &first = shards[0], &last = shards[1];
    first.open(0, FUZZ_CUT);
    last.open(FUZZ_CUT, -1);
    for (int under = 0; under < 2; under++) {
        const uint8_t *id = under != 0 ? session_id : nullptr;
        first.clear();
        last.clear();
        if (under != 0) {
            first.open_session();
            last.open_session();
        }
        first.prompt[under] = fuzz_tokens(first.own, N_PROMPT, 0, id, EPOCH);
        HOLDS(first.decode(first.prompt[under]) == LLAMA_BOUNDARY_OK, "a sound prompt is refused");
        last.prompt[under] = first.output(0);
        HOLDS(last.decode(last.prompt[under]) == LLAMA_BOUNDARY_OK, "a sound residual is refused");
        if (under == 0) {
            first.prompt_output = last.prompt[0];
            last.prompt_output = last.output(0);
        } else {
            first.state = first.save();
            last.state = last.save();
        }
        first.next[under] = fuzz_tokens(first.own, N_NEXT, N_PROMPT, id, EPOCH);
        HOLDS(first.decode(first.next[under]) == LLAMA_BOUNDARY_OK, "sound tokens are refused");
        last.next[under] = first.output(0);
    }
}

bool ready() {
    static bool made = false;
    if (!made) {
        made = true;
        llama_log_set(quiet, nullptr);
        llama_backend_init();
        make_inputs();
    }
    return true;
}

bool declared(int32_t status, const llama_boundary_error &error) {
    HOLDS(status >= LLAMA_BOUNDARY_OK && status <= LLAMA_BOUNDARY_ERROR_SESSION, "status %d", status);
    HOLDS(status == LLAMA_BOUNDARY_OK || (error.status == status && strnlen(error.message, sizeof error.message) > 0),
          "status %d comes with %d and the sentence '%.500s'", status, error.status, error.message);
    HOLDS(status != LLAMA_BOUNDARY_ERROR_COMPUTE && status != LLAMA_BOUNDARY_ERROR_LOAD, "the computation failed: %s",
          error.message);
    return status == LLAMA_BOUNDARY_OK;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < FUZZ_CONTROL || !ready()) {
        return 0;
    }
    fuzz_count();
    const unsigned what = data[10], layout = data[12];
    const bool held = data[11] % 2 != 0, under = (what & (SESSION | RESTORE)) != 0;
    shard &s = shards[(what & LAST) != 0];
    s.clear();
    if (under && ((what & RESTORE) == 0 || held)) {
        s.open_session();
    }
    if (held) {
        HOLDS(s.decode(s.prompt[under]) == LLAMA_BOUNDARY_OK, "a sound bundle is refused");
    }
    const std::vector<int64_t> before = s.standing();
    auto error = sized<llama_boundary_error>();
    bool good;
    if ((what & RESTORE) != 0) {
        auto result = sized<llama_session_result>();
        const llama_session_request r = s.request(0);
        const int32_t status =
            llama_session_restore(s.ctx, &r, data + FUZZ_CONTROL, size - FUZZ_CONTROL, &result, &error);
        fuzz_reached += status != LLAMA_BOUNDARY_ERROR_BUNDLE;
        good = declared(status, error);
    } else {
        const int32_t status = llama_boundary_decode(s.ctx, data + FUZZ_CONTROL, size - FUZZ_CONTROL, &error);
        fuzz_reached += status != LLAMA_BOUNDARY_ERROR_BUNDLE;
        good = declared(status, error);
        if (good) {
            s.output(layout);
        }
    }
    fuzz_accepted += good;
    if (!good) {
        HOLDS(s.standing() == before, "refused with '%s', and something changed", error.message);
        if (fuzz_executions % 16 == 0 && !held && !under) {
            HOLDS(s.decode(s.prompt[0]) == LLAMA_BOUNDARY_OK && s.output(0) == s.prompt_output,
                  "refused with '%s', and a sound bundle gives other bytes", error.message);
        }
    }
    return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint32_t drawn = seed;
    const auto draw = [&drawn](uint32_t below) {
        drawn = drawn * 1664525u + 1013904223u;
        return (drawn >> 16) % below;
    };
    ready();
    if (size < FUZZ_CONTROL || draw(2) == 0) { /* from a sound one anew */
        uint8_t control[FUZZ_CONTROL] = {};
        const bool last = draw(2) != 0, under = draw(2) != 0, restore = under && draw(3) == 0, held = draw(2) != 0;
        control[10] = (uint8_t)(last * LAST | under * SESSION | restore * RESTORE);
        control[11] = held;
        control[12] = (uint8_t)draw(16);
        const shard &s = shards[last];
        std::vector<uint8_t> from = restore ? s.state : held ? s.next[under] : s.prompt[under];
        if (!last && !restore && draw(4) == 0) { /* of another length, also one that is too long */
            from = fuzz_tokens(s.own, 1 + draw(FUZZ_TOO_MANY), held ? N_PROMPT : 0, under ? session_id : nullptr, EPOCH);
        }
        if (FUZZ_CONTROL + from.size() > max_size) {
            return size;
        }
        memcpy(data, control, FUZZ_CONTROL);
        memcpy(data + FUZZ_CONTROL, from.data(), from.size());
        size = FUZZ_CONTROL + from.size();
    }
    if (draw(2) != 0) { /* what is behind the codec's checks */
        fuzz_change_payload(data + FUZZ_CONTROL, size - FUZZ_CONTROL, draw(1u << 16) << 16 | draw(1u << 16));
        return size;
    }
    uint8_t control[FUZZ_CONTROL];
    memcpy(control, data, FUZZ_CONTROL);
    size = fuzz_mutate(data, size, max_size, draw(1u << 16) << 16 | draw(1u << 16), LLVMFuzzerMutate);
    memcpy(data, control, std::min<size_t>(size, FUZZ_CONTROL)); /* what it does with limits is not for here */
    return size;
}
