// The engine on the patched libllama: a layer range, bundles in and out through the library's own functions.
//
// SPDX-License-Identifier: MIT
#ifndef BB_UNPATCHED

#include "worker_engine.h"

#include "llama-boundary.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace worker {

namespace {

template <typename T> T boundary_struct() {
    T t{};
    t.size = sizeof(T);
    t.abi = LLAMA_BOUNDARY_ABI;
    return t;
}

class range_engine final : public engine {
public:
    explicit range_engine(const engine_options &options) : engine(options) {
        check_options(options);
        const uint64_t file_bytes = check_file(options.path);
        llama_model_params params = model_params(options);
        auto range = boundary_struct<llama_layer_range>();
        range.start = options.start;
        range.end = options.end;
        auto error = boundary_struct<llama_boundary_error>();
        model_ = llama_model_load_layer_range(options.path.c_str(), params, &range, &error);
        if (!model_) {
            fail_load(options, error.status ? error.status : CODE_LOAD, file_bytes, error.message);
        }

        auto own = boundary_struct<llama_layer_ownership>();
        const int32_t status = llama_model_layer_ownership(model_, &own);
        if (status != LLAMA_BOUNDARY_OK) {
            fail(status, "the library does not say what it has loaded from %s", options.path.c_str());
        }
        facts_.architecture = own.architecture;
        facts_.n_layer = own.n_layer;
        facts_.layer_start = own.layer_start;
        facts_.layer_end = own.layer_end;
        facts_.n_embd = own.n_embd;
        facts_.n_vocab = own.n_vocab;
        facts_.has_tok_embd = own.has_tok_embd;
        facts_.has_out_norm = own.has_out_norm;
        facts_.has_output = own.has_output;
        facts_.tied = own.tied;
        facts_.n_tensors = (int64_t)own.n_tensors;
        facts_.weight_bytes = own.n_bytes;
        facts_.n_params = own.n_params;
        for (const uint8_t byte : own.fingerprint) {
            const char *digits = "0123456789abcdef";
            facts_.fingerprint += digits[byte >> 4];
            facts_.fingerprint += digits[byte & 15];
        }
        start();
        bb_config_init(&config_);
    }

    timings decode(byte_view bytes) override {
        auto error = boundary_struct<llama_boundary_error>();
        const int32_t status = llama_boundary_decode(ctx_, bytes.data, bytes.size, &error);
        if (status == LLAMA_BOUNDARY_ERROR_BUNDLE) {
            fail_bundle(config_, bytes); // the library gives a sentence; name and offset come from the codec
        }
        if (status == LLAMA_BOUNDARY_ERROR_COMPUTE) {
            forget_if_empty(); // what was computed has been cut off again
        }
        if (status != LLAMA_BOUNDARY_OK) {
            fail(status, "%s", error.message);
        }
        auto times = boundary_struct<llama_boundary_timings>();
        llama_boundary_get_timings(ctx_, &times);
        return {(uint64_t)times.t_decode_us, (uint64_t)times.t_compute_us};
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
            fail(status, "%s", error.message);
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
            t.token_axis = axis == "-" ? -1 : atoi(axis.c_str());
            list.push_back(std::move(t));
        }
        return list;
    }

    bool patched() const override { return true; }
    int abi() const override { return LLAMA_BOUNDARY_ABI; }

private:
    bb_config config_;
};

} // namespace

std::unique_ptr<engine> open_engine(const engine_options &options) {
    return std::make_unique<range_engine>(options);
}

} // namespace worker

#endif // BB_UNPATCHED
