// The engine on the patched libllama: a layer range, bundles in and out through the library's own functions.
//
// SPDX-License-Identifier: MIT
#ifndef BB_UNPATCHED

#include "worker_engine.h"

#include "llama-boundary.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <sstream>

namespace worker {

namespace {

template <typename T> T boundary_struct() {
    T t{};
    t.size = sizeof(T);
    t.abi = LLAMA_BOUNDARY_ABI;
    return t;
}

// Out of memory is no status of the library's: it says so in its sentence.
int code_of(int32_t status, const llama_boundary_error &error) {
    return strstr(error.message, "bad_alloc") ? (int)CODE_NO_MEMORY : status;
}

std::string recipe_text_of(const llama_context *ctx, int32_t part, uint8_t *fingerprint) {
    std::string text(4096, '\0');
    int32_t n = llama_context_recipe(ctx, part, &text[0], text.size(), fingerprint);
    if (n >= 0 && (size_t)n >= text.size()) {
        text.resize((size_t)n + 1);
        n = llama_context_recipe(ctx, part, &text[0], text.size(), fingerprint);
    }
    if (n < 0) {
        fail(CODE_STATE, "the library does not say the recipe of this context");
    }
    text.resize((size_t)n);
    return text;
}

session_result result_of(const llama_session_result &found) {
    session_result result;
    result.outcome = found.outcome;
    result.id.emplace();
    std::copy(std::begin(found.id), std::end(found.id), result.id->begin());
    result.epoch = found.epoch;
    result.n_pos = found.n_pos;
    result.created = found.created != 0;
    result.ingredient = found.recipe;
    return result;
}

class library_sessions final : public session_table {
public:
    explicit library_sessions(llama_context *ctx) : ctx_(ctx) {
        bb_config_init(&config_);
        // the library's own for a saved state, whose tensors are as many as the layers need
        config_.limits.tensors = config_.limits.fragments = 1 << 14;
        config_.limits.head_bytes = 1 << 22;
        config_.limits.payload_bytes = INT64_MAX;
    }

    session_result open(const session_request &wanted) override { return call(wanted, llama_session_open); }
    session_result truncate(const session_request &wanted) override { return call(wanted, llama_session_truncate); }
    session_result release(const session_request &wanted) override { return call(wanted, llama_session_release); }

    session_result pin(const session_request &wanted, bool pinned) override {
        return call(wanted, [&](llama_context *ctx, const auto *request, auto *result, auto *error) {
            return llama_session_pin(ctx, request, pinned, result, error);
        });
    }

    session_result evict(const std::optional<session_id> &id) override {
        auto result = boundary_struct<llama_session_result>();
        auto error = boundary_struct<llama_boundary_error>();
        const int32_t status = llama_session_evict(ctx_, id ? id->data() : nullptr, &result, &error);
        return checked(status, result, error, id);
    }

    session_result save(const session_request &wanted, byte_view &state) override {
        const void *data = nullptr;
        const auto save = [&](llama_context *ctx, const auto *request, auto *result, auto *error) {
            return llama_session_save(ctx, request, &data, &state.size, result, error);
        };
        const session_result saved = call(wanted, save);
        state.data = (const uint8_t *)data;
        return saved;
    }

    session_result restore(const session_request &wanted, byte_view state) override {
        return call(wanted, [&](llama_context *ctx, const auto *request, auto *result, auto *error) {
            const int32_t status = llama_session_restore(ctx, request, state.data, state.size, result, error);
            if (status == LLAMA_BOUNDARY_ERROR_BUNDLE) {
                fail_bundle(config_, state);
            }
            return status;
        });
    }

    bool get(uint64_t i, session_info &info) const override {
        auto found = boundary_struct<llama_session_info>();
        if (llama_session_get(ctx_, i, &found) != LLAMA_BOUNDARY_OK) {
            return false;
        }
        std::copy(std::begin(found.id), std::end(found.id), info.id.begin());
        info.epoch = found.epoch;
        info.n_pos = found.state == LLAMA_SESSION_LIVE ? found.n_pos : -1;
        info.n_bytes = found.n_bytes;
        info.used = found.used;
        info.state = found.state;
        info.pinned = found.pinned != 0;
        return true;
    }

    session_counts counts() const override {
        auto found = boundary_struct<llama_session_statistics>();
        const int32_t status = llama_session_get_statistics(ctx_, &found);
        if (status != LLAMA_BOUNDARY_OK) {
            fail(status, "the library does not count its sessions");
        }
        session_counts counts = {found.n_live,   found.n_forgotten, found.n_max,     found.n_cells,    found.n_calls,
                                 found.n_tokens, found.n_created,   found.n_evicted, found.n_released, {}};
        std::copy(std::begin(found.outcomes), std::end(found.outcomes), counts.outcomes.begin());
        return counts;
    }

    recipe_part recipe(bool shared) const override {
        uint8_t fingerprint[32];
        recipe_part part;
        part.text = recipe_text_of(ctx_, shared ? LLAMA_RECIPE_SHARED : LLAMA_RECIPE_RANGE, fingerprint);
        part.fingerprint = hex(fingerprint, sizeof(fingerprint));
        return part;
    }

private:
    template <typename Function> session_result call(const session_request &wanted, Function function) {
        auto request = boundary_struct<llama_session_request>();
        std::copy(wanted.id.begin(), wanted.id.end(), request.id);
        request.epoch = wanted.epoch;
        request.n_pos = wanted.n_pos;
        std::copy(wanted.recipe.begin(), wanted.recipe.end(), request.recipe);
        request.recipe_text = wanted.recipe_text.empty() ? nullptr : wanted.recipe_text.c_str();
        auto result = boundary_struct<llama_session_result>();
        auto error = boundary_struct<llama_boundary_error>();
        const int32_t status = function(ctx_, &request, &result, &error);
        return checked(status, result, error, wanted.id);
    }

    // id: that was asked for, where one was
    static session_result checked(int32_t status, const llama_session_result &found, const llama_boundary_error &error,
                                  const std::optional<session_id> &id) {
        if (status != LLAMA_BOUNDARY_OK && status != LLAMA_BOUNDARY_ERROR_SESSION) {
            fail(code_of(status, error), "%s", error.message);
        }
        session_result result = result_of(found);
        if (status == LLAMA_BOUNDARY_ERROR_SESSION) {
            result.id = id; // of one that it does not know the library says nothing
            failure f(status, error.message);
            f.session = std::move(result);
            throw failure(std::move(f));
        }
        return result;
    }

    llama_context *ctx_;
    bb_config config_;
};

class range_engine final : public engine {
public:
    explicit range_engine(const engine_options &options) : engine(options) {
        const llama_model_params params = model_params(options);
        files_.check_contents(options.mmap);
        auto range = boundary_struct<llama_layer_range>();
        range.start = options.start;
        range.end = options.end;
        auto error = boundary_struct<llama_boundary_error>();
        model_ = llama_model_load_layer_range(options.path.c_str(), params, &range, &error);
        if (!model_) {
            fail_load(options.path, error.status ? error.status : CODE_LOAD, files_.bytes(), error.message);
        }

        auto own = boundary_struct<llama_layer_ownership>();
        const int32_t status = llama_model_layer_ownership(model_, &own);
        if (status != LLAMA_BOUNDARY_OK) {
            fail(status, "the library does not say what it has loaded from %s", options.path.c_str());
        }
        facts_.architecture = own.architecture;
        facts_.n_layer = own.n_layer;
        facts_.layer_start = own.layer_start;
        // The last range may hold layers of a draft head, which stand behind the model's own.
        facts_.layer_end = std::min(own.layer_end, own.n_layer);
        facts_.n_embd = own.n_embd;
        facts_.n_vocab = own.n_vocab;
        facts_.has_tok_embd = own.has_tok_embd;
        facts_.has_out_norm = own.has_out_norm;
        facts_.has_output = own.has_output;
        facts_.tied = own.tied;
        facts_.n_tensors = (int64_t)own.n_tensors;
        facts_.weight_bytes = own.n_bytes;
        facts_.n_params = own.n_params;
        facts_.fingerprint = hex(own.fingerprint, sizeof(own.fingerprint));
        start();
        bb_config_init(&config_);
        sessions_ = std::make_unique<library_sessions>(ctx_);
    }

    timings decode(byte_view bytes, bool under_sessions) override {
        auto error = boundary_struct<llama_boundary_error>();
        const int32_t status = llama_boundary_decode(ctx_, bytes.data, bytes.size, &error);
        if (status == LLAMA_BOUNDARY_ERROR_BUNDLE) {
            fail_bundle(config_, bytes); // the library gives a sentence; name and offset come from the codec
        }
        if (status != LLAMA_BOUNDARY_OK && under_sessions) {
            fail_decode(status, error);
        }
        if (status == LLAMA_BOUNDARY_ERROR_COMPUTE) {
            forget_if_empty(); // what was computed has been cut off again
        }
        if (status != LLAMA_BOUNDARY_OK) {
            fail(code_of(status, error), "%s", error.message);
        }
        auto times = boundary_struct<llama_boundary_timings>();
        llama_boundary_get_timings(ctx_, &times);
        has_computed((uint64_t)times.t_compute_us);
        return {(uint64_t)times.t_decode_us, (uint64_t)times.t_compute_us};
    }

    void rehearse(byte_view impossible) override {
        auto error = boundary_struct<llama_boundary_error>();
        if (impossible.size > 0) {
            llama_boundary_decode(ctx_, impossible.data, impossible.size, &error);
        }
    }

    byte_view output(const layout &layout) override {
        auto wanted = boundary_struct<llama_boundary_layout>();
        wanted.big_endian = layout.big_endian;
        wanted.no_checksums = !layout.checksums;
        wanted.fragment_size = layout.fragment_size;
        auto error = boundary_struct<llama_boundary_error>();
        const void *data = nullptr;
        size_t size = 0;
        const int32_t status = llama_boundary_output(ctx_, &wanted, &data, &size, &error);
        if (status != LLAMA_BOUNDARY_OK) {
            fail(code_of(status, error), "%s", error.message);
        }
        return {(const uint8_t *)data, size};
    }

    std::vector<int32_t> outputs() const override {
        const int32_t *ids = nullptr;
        const int32_t n = llama_boundary_outputs(ctx_, &ids);
        return n > 0 ? std::vector<int32_t>(ids, ids + n) : std::vector<int32_t>();
    }

    int64_t kv_bytes() const override { return (int64_t)llama_boundary_kv_bytes(ctx_); }

    std::vector<tensor_facts> tensors() const override {
        std::vector<tensor_facts> list;
        for (int64_t i = 0; i < facts_.n_tensors; i++) {
            auto own = boundary_struct<llama_owned_tensor>();
            const int32_t status = llama_model_owned_tensor(model_, (uint64_t)i, &own);
            if (status != LLAMA_BOUNDARY_OK) {
                fail(status, "the library does not describe tensor %lld of %lld", (long long)i,
                     (long long)facts_.n_tensors);
            }
            int rank = 4;
            while (rank > 1 && own.ne[rank - 1] == 1) {
                rank--;
            }
            tensor_facts t;
            t.name = own.name;
            t.type = own.type;
            t.layer = own.layer;
            t.shape.assign(own.ne, own.ne + rank);
            std::reverse(t.shape.begin(), t.shape.end());
            t.bytes = own.n_bytes;
            list.push_back(std::move(t));
        }
        return list;
    }

    std::vector<crossing_tensor> contract(bool behind) const override {
        char text[2000];
        const int32_t il = behind ? facts_.layer_end : facts_.layer_start;
        const int32_t n = llama_model_boundary_contract(model_, il, text, sizeof(text));
        if (n < 0 || (size_t)n >= sizeof(text)) {
            return {}; // no architecture that a range is made of
        }
        std::vector<crossing_tensor> list;
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) {
            crossing_tensor t;
            std::string kind, dims, axis;
            std::istringstream words(line);
            if (!(words >> kind >> t.name >> t.dtype >> dims >> axis) || kind != "tensor" || dims.size() < 2) {
                continue; // the head line, an attribute
            }
            std::istringstream parts(dims.substr(1, dims.size() - 2)); // [a,b]
            for (std::string part; std::getline(parts, part, ',');) {
                t.shape.push_back(part);
            }
            t.token_axis = axis == "-" ? -1 : (int)strtol(axis.c_str(), nullptr, 10);
            list.push_back(std::move(t));
        }
        return list;
    }

    bool patched() const override { return true; }
    int abi() const override { return LLAMA_BOUNDARY_ABI; }
    session_table *sessions() override { return sessions_.get(); }

    void clear() override {
        llama_session_clear(ctx_);
        engine::clear();
    }

    void clear(int32_t sequence, int32_t from) override {
        const uint64_t live = sessions_->counts().live;
        if (live > 0) {
            fail(CODE_STATE, "sequence %d cannot be cut while %llu session%s open: they lie where the library put them",
                 sequence, (unsigned long long)live, live == 1 ? " is" : "s are");
        }
        engine::clear(sequence, from);
    }

private:
    // Memory that the sessions leave empty is zeroed by the library itself.
    [[noreturn]] void fail_decode(int32_t status, const llama_boundary_error &error) const {
        failure f(code_of(status, error), error.message);
        auto found = boundary_struct<llama_session_result>();
        if (status == LLAMA_BOUNDARY_ERROR_SESSION && llama_session_decoded(ctx_, &found) == LLAMA_BOUNDARY_OK) {
            session_result result = result_of(found);
            if (found.outcome == LLAMA_SESSION_INCOMPATIBLE_RECIPE) {
                result.id.reset(); // it is the whole bundle's
            }
            f.session = std::move(result);
        }
        throw failure(std::move(f));
    }

    bb_config config_;
    std::unique_ptr<library_sessions> sessions_; // of the context, which stands later than this
};

} // namespace

std::unique_ptr<engine> open_engine(const engine_options &options) {
    return std::make_unique<range_engine>(options);
}

} // namespace worker

#endif // BB_UNPATCHED
