// The engine on the library as upstream ships it: all layers, bundles taken apart and built here. It is what the tests
// compare with, so it uses upstream's public functions alone, and it refuses in advance whatever those would answer
// with an assertion.
//
// SPDX-License-Identifier: MIT
#ifdef BB_UNPATCHED

#include "worker_engine.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace worker {

namespace {

enum input { TOKEN_IDS, POSITIONS, SEQ_OFFSETS, SEQ_IDS, OUTPUTS, INPUTS };

const bb_contract_dim TOKENS = {BB_SYMBOL_TOKENS, 0};
const bb_contract_dim TOKENS_AND_ONE = {BB_SYMBOL_TOKENS, 1};
const bb_contract_dim MEMBERS = {BB_SYMBOL_TOKENS << 1, 0};

const bb_contract_tensor rules[INPUTS] = {
    // name, dtype, rank, token axis, dims
    {"token_ids", BB_I32, 1, 0, {TOKENS}},
    {"positions", BB_I32, 1, 0, {TOKENS}},
    {"seq_offsets", BB_U32, 1, BB_NO_TOKEN_AXIS, {TOKENS_AND_ONE}},
    {"seq_ids", BB_U32, 1, BB_NO_TOKEN_AXIS, {MEMBERS}},
    {"outputs", BB_BOOL, 1, 0, {TOKENS}},
};

struct kept_attribute {
    bb_attr record = {};
    std::vector<uint8_t> value;
};

class whole_engine final : public engine {
public:
    explicit whole_engine(const engine_options &options) : engine(options) {
        llama_model_params params = model_params(options);
        files_.check_contents(options.mmap);
        take_log_error();
        model_ = llama_model_load_from_file(options.path.c_str(), params);
        if (!model_) {
            fail_load(options.path, CODE_LOAD, files_.bytes(), "");
        }
        char text[64];
        const int32_t n = llama_model_meta_val_str(model_, "general.architecture", text, sizeof(text));
        facts_.architecture = n > 0 ? text : "";
        facts_.n_layer = llama_model_n_layer(model_);
        facts_.layer_end = facts_.n_layer;
        facts_.n_embd = llama_model_n_embd(model_);
        facts_.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
        facts_.has_tok_embd = facts_.has_out_norm = facts_.has_output = true;
        facts_.weight_bytes = llama_model_size(model_);
        facts_.n_params = llama_model_n_params(model_);
        if (options.start != 0 || (options.end != -1 && options.end != facts_.n_layer)) {
            fail(CODE_RANGE, "layers %d to %d: the unpatched library holds all %d layers of a model or none",
                 options.start, options.end, facts_.n_layer);
        }
        start();
        bb_config_init(&config_);
        set_contract();
    }

    timings decode(byte_view bytes, bool) override {
        // first the head, then the contract, then the payloads
        const uint64_t began_us = now_us();
        bb_bundle view;
        bb_error error = {};
        if (bb_decode_head(&config_, bytes.data, bytes.size, &view, nullptr, nullptr) != BB_OK) {
            fail_bundle(config_, bytes);
        }
        if (bb_contract_compare(&contract_, &view, &error) != BB_OK) {
            char sentence[500];
            bb_error_format(&error, sentence, sizeof(sentence));
            fail(CODE_CONTRACT, "%s", sentence);
        }
        const uint32_t n = check_counts(view);
        if (bb_decode(&config_, bytes.data, bytes.size, &view, nullptr) != BB_OK) {
            fail_bundle(config_, bytes);
        }

        std::vector<int32_t> tokens(n), positions(n);
        bb_tensor seq_ids;
        bb_tensor_at(&view, SEQ_IDS, &seq_ids);
        std::vector<uint32_t> offsets(n + 1), members(seq_ids.dims[0]);
        std::vector<int8_t> selected(n);
        read(view, TOKEN_IDS, tokens);
        read(view, POSITIONS, positions);
        read(view, SEQ_OFFSETS, offsets);
        read(view, SEQ_IDS, members);
        read(view, OUTPUTS, selected);

        check_tokens(tokens);
        check_membership(offsets, members);
        const std::map<int32_t, int32_t> starts = check_positions(positions, offsets, members);
        bb_attr n_seqs;
        bb_attr_find(&view, BB_KEY_N_SEQS, &n_seqs);
        if (n_seqs.u64 != starts.size()) {
            fail(CODE_CONTRACT, "n_seqs is %llu, but seq_ids name %zu sequences", (unsigned long long)n_seqs.u64,
                 starts.size());
        }

        std::vector<int32_t> sequences(members.begin(), members.end());
        std::vector<int32_t> counts(n);
        std::vector<llama_seq_id *> lists(n);
        for (uint32_t t = 0; t < n; t++) {
            counts[t] = (int32_t)(offsets[t + 1] - offsets[t]);
            lists[t] = sequences.data() + offsets[t];
        }
        llama_batch batch = {};
        batch.n_tokens = (int32_t)n;
        batch.token = tokens.data();
        batch.pos = positions.data();
        batch.n_seq_id = counts.data();
        batch.seq_id = lists.data();
        batch.logits = selected.data();

        take_log_error();
        const uint64_t ready_us = now_us();
        const int status = llama_decode(ctx_, batch);
        llama_synchronize(ctx_);
        const uint64_t done_us = now_us();
        if (status != 0) {
            const std::string why = take_log_error();
            if (status == 1) {
                fail(CODE_FULL, "no room for %u more tokens in a KV cache of %u positions", n, n_ctx());
            }
            // micro-batches before the one that failed stay in the cache
            for (const auto &[sequence, first] : starts) {
                llama_memory_seq_rm(llama_get_memory(ctx_), sequence, first, -1);
            }
            forget_if_empty();
            fail(status == -1 ? CODE_CONTRACT : CODE_COMPUTE, "a batch of %u tokens failed with status %d%s%s", n,
                 status, why.empty() ? "" : ": ", why.c_str());
        }

        selected_.clear();
        for (uint32_t t = 0; t < n; t++) {
            if (selected[t]) {
                selected_.push_back((int32_t)t);
            }
        }
        decoded_ = true;
        keep_attributes(view);
        return {ready_us - began_us, done_us - ready_us};
    }

    byte_view output(const layout &layout) override {
        if (!decoded_) {
            fail(CODE_STATE, "nothing has been decoded yet");
        }
        const size_t n_vocab = (size_t)facts_.n_vocab;
        std::vector<float> rows(selected_.size() * n_vocab);
        for (size_t i = 0; i < selected_.size(); i++) {
            const float *row = llama_get_logits_ith(ctx_, selected_[i]);
            if (!row) {
                fail(CODE_COMPUTE, "the library has no logits for token %d", selected_[i]);
            }
            memcpy(rows.data() + i * n_vocab, row, n_vocab * sizeof(float));
        }

        bb_tensor logits = {};
        strcpy(logits.name, "logits");
        logits.dtype = BB_F32;
        logits.byte_order = layout.big_endian ? BB_BIG : BB_LITTLE;
        logits.rank = 2;
        logits.token_axis = BB_NO_TOKEN_AXIS;
        logits.dims[0] = selected_.size();
        logits.dims[1] = n_vocab;
        logits.data = rows.data();

        std::vector<bb_attr> attributes;
        for (const kept_attribute &kept : kept_) {
            attributes.push_back(kept.record);
            attributes.back().value = kept.value.data();
        }
        bb_desc desc = {};
        desc.minor = minor_;
        desc.no_checksums = !layout.checksums;
        desc.fragment_size = layout.fragment_size;
        desc.tensors = &logits;
        desc.tensor_count = 1;
        desc.attrs = attributes.data();
        desc.attr_count = (uint32_t)attributes.size();

        uint64_t size = 0;
        size_t written = 0;
        bb_error error = {};
        int status = bb_encoded_size(&config_, &desc, &size, &error);
        if (status == BB_OK) {
            encoded_.resize((size_t)size);
            status = bb_encode(&config_, &desc, encoded_.data(), encoded_.size(), &written, &error);
        }
        if (status != BB_OK) {
            char text[400];
            bb_error_format(&error, text, sizeof(text));
            fail(CODE_LIMIT, "the logits cannot be written as a bundle: %s", text);
        }
        return {encoded_.data(), written};
    }

    std::vector<int32_t> outputs() const override { return selected_; }
    int64_t kv_bytes() const override { return -1; }
    std::vector<tensor_facts> tensors() const override { return {}; }

    std::vector<crossing_tensor> contract(bool behind) const override {
        if (behind) {
            return {{"logits", "f32", {"outputs", std::to_string(facts_.n_vocab)}, -1}};
        }
        std::vector<crossing_tensor> list;
        for (const bb_contract_tensor &rule : rules) {
            const bb_contract_dim &dim = rule.dims[0];
            const char *symbol = dim.symbols == BB_SYMBOL_TOKENS ? "tokens" : "members";
            list.push_back({rule.name,
                            bb_dtype_name(rule.dtype),
                            {symbol + (dim.number ? "+" + std::to_string(dim.number) : "")},
                            rule.token_axis == BB_NO_TOKEN_AXIS ? -1 : rule.token_axis});
        }
        return list;
    }

    bool patched() const override { return false; }
    int abi() const override { return 0; }

private:
    // Not model_fingerprint: only the patched library knows it.
    void set_contract() {
        bb_contract_attr architecture = {};
        architecture.attr.key = BB_KEY_ARCHITECTURE;
        architecture.attr.type = BB_ATTR_TEXT;
        architecture.attr.length = (uint32_t)facts_.architecture.size();
        architecture.attr.value = facts_.architecture.data();
        demands_.push_back(architecture);
        const auto number = [&](uint16_t key, int64_t value) { // -1: any
            bb_contract_attr demand = {};
            demand.attr.key = key;
            demand.attr.type = BB_ATTR_U64;
            demand.attr.u64 = (uint64_t)value;
            demand.any = value < 0;
            demands_.push_back(demand);
        };
        number(BB_KEY_LAYER_START, 0);
        number(BB_KEY_LAYER_END, 0);
        number(BB_KEY_N_LAYER, facts_.n_layer);
        number(BB_KEY_N_TOKENS, -1);
        number(BB_KEY_N_SEQS, -1);
        contract_ = {demands_.data(), (uint32_t)demands_.size(), rules, INPUTS};
    }

    // returns the number of tokens
    uint32_t check_counts(const bb_bundle &view) const {
        bb_tensor token_ids, seq_ids;
        bb_tensor_at(&view, TOKEN_IDS, &token_ids);
        bb_tensor_at(&view, SEQ_IDS, &seq_ids);
        const uint64_t n = token_ids.dims[0];
        if (n == 0 || n > n_batch()) {
            fail(CODE_LIMIT, "the batch has %llu tokens, expected 1 to %u", (unsigned long long)n, n_batch());
        }
        if (seq_ids.dims[0] > n * n_seq_max()) {
            fail(CODE_LIMIT, "%llu sequence memberships for %llu tokens, and this worker has %u sequences",
                 (unsigned long long)seq_ids.dims[0], (unsigned long long)n, n_seq_max());
        }
        return (uint32_t)n;
    }

    template <typename T> static void read(const bb_bundle &view, uint32_t index, std::vector<T> &out) {
        const int status = bb_tensor_read(&view, index, out.data(), out.size() * sizeof(T));
        if (status != BB_OK) {
            fail(CODE_BUNDLE, "tensor %u of the bundle cannot be read (%d)", index, status);
        }
    }

    void check_tokens(const std::vector<int32_t> &tokens) const {
        for (size_t t = 0; t < tokens.size(); t++) {
            if (tokens[t] < 0 || tokens[t] >= facts_.n_vocab) {
                fail(CODE_CONTRACT, "token %zu has the id %d, outside the vocabulary of %d", t, tokens[t],
                     facts_.n_vocab);
            }
        }
    }

    void check_membership(const std::vector<uint32_t> &offsets, const std::vector<uint32_t> &members) const {
        if (offsets.front() != 0 || offsets.back() != members.size()) {
            fail(CODE_CONTRACT, "seq_offsets run from %u to %u, not from 0 to %zu", offsets.front(), offsets.back(),
                 members.size());
        }
        for (size_t t = 0; t + 1 < offsets.size(); t++) {
            if (offsets[t + 1] <= offsets[t] || offsets[t + 1] > members.size()) {
                fail(CODE_CONTRACT, "token %zu belongs to no sequence: seq_offsets go from %u to %u", t, offsets[t],
                     offsets[t + 1]);
            }
        }
        for (size_t t = 0; t + 1 < offsets.size(); t++) {
            for (uint32_t i = offsets[t]; i < offsets[t + 1]; i++) {
                if (members[i] >= n_seq_max()) {
                    fail(CODE_LIMIT, "token %zu is in sequence %u, and this worker has sequences 0 to %u", t,
                         members[i], n_seq_max() - 1);
                }
            }
        }
        for (size_t t = 0; t + 1 < offsets.size(); t++) {
            if (offsets[t + 1] - offsets[t] > 1 && !options_.kv_unified) {
                fail(CODE_LIMIT, "token %zu is in %u sequences, which needs --kv-unified", t,
                     offsets[t + 1] - offsets[t]);
            }
        }
    }

    // Every sequence goes on where it ends. Returns the first position of each sequence in the batch.
    std::map<int32_t, int32_t> check_positions(const std::vector<int32_t> &positions,
                                               const std::vector<uint32_t> &offsets,
                                               const std::vector<uint32_t> &members) const {
        llama_memory_t memory = llama_get_memory(ctx_);
        std::map<int32_t, int32_t> starts, next;
        for (size_t t = 0; t < positions.size(); t++) {
            const auto first = (int32_t)members[offsets[t]];
            for (uint32_t i = offsets[t]; i < offsets[t + 1]; i++) {
                const auto sequence = (int32_t)members[i];
                const auto [place, is_new] = next.try_emplace(sequence);
                if (is_new) {
                    place->second = starts[sequence] = llama_memory_seq_pos_max(memory, sequence) + 1;
                }
                if (positions[t] != next[sequence]) {
                    fail(CODE_POSITION, "token %zu is at position %d of sequence %d, where %d comes next", t,
                         positions[t], sequence, next[sequence]);
                }
                if (llama_memory_seq_pos_min(memory, sequence) != llama_memory_seq_pos_min(memory, first)) {
                    fail(CODE_POSITION, "token %zu joins sequences %d and %d, which begin at different positions", t,
                         first, sequence);
                }
            }
            for (uint32_t i = offsets[t]; i < offsets[t + 1]; i++) {
                int32_t &coming = next[(int32_t)members[i]];
                if (coming != positions[t]) {
                    fail(CODE_CONTRACT, "token %zu names sequence %u twice", t, members[i]);
                }
                coming = positions[t] + 1;
            }
        }
        return starts;
    }

    // what a shard hands on (specification, 5.2), with its own layers
    void keep_attributes(const bb_bundle &view) {
        minor_ = 0; // unknowns that are kept keep their version
        kept_.clear();
        const auto own = [&](uint16_t key, uint64_t value) {
            kept_attribute kept = {};
            kept.record.key = key;
            kept.record.type = BB_ATTR_U64;
            kept.record.length = 8;
            kept.record.u64 = value;
            kept_.push_back(std::move(kept));
        };
        own(BB_KEY_LAYER_START, 0);
        own(BB_KEY_LAYER_END, (uint64_t)facts_.n_layer);
        for (uint32_t i = 0; i < view.attribute_count; i++) {
            bb_attr found;
            bb_attr_at(&view, i, &found);
            const bool known = bb_attr_key_name(found.key) != nullptr;
            if (!known) {
                minor_ = view.minor;
            }
            if (!known || bb_attr_key_forwarded(found.key)) {
                kept_attribute kept;
                kept.record = found;
                const auto *bytes = (const uint8_t *)found.value;
                kept.value.assign(bytes, bytes + found.length);
                kept_.push_back(std::move(kept));
            }
        }
        std::sort(kept_.begin(), kept_.end(),
                  [](const kept_attribute &a, const kept_attribute &b) { return a.record.key < b.record.key; });
    }

    bb_config config_;
    bb_contract contract_; // what crosses into layer 0
    std::vector<bb_contract_attr> demands_;
    std::vector<int32_t> selected_;
    std::vector<kept_attribute> kept_;
    std::vector<uint8_t> encoded_;
    uint16_t minor_ = 0;
    bool decoded_ = false;
};

} // namespace

std::unique_ptr<engine> open_engine(const engine_options &options) {
    return std::make_unique<whole_engine>(options);
}

} // namespace worker

#endif // BB_UNPATCHED
