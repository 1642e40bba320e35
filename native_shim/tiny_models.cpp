// tiny_models: small GGUF files of every architecture that libllama knows, with random weights, and what each gives
// (boundary_bundle/families/models.py).
//
// The hyper-parameters that an architecture needs come from upstream's own fixture (tests/test-llama-archs.cpp), which
// is included from the source tree at build time; here they get more layers, and patterns that put every kind of
// layer on both sides of some cut. The weights depend on the seed and the tensor's name alone.
//
// Libraries: llama, ggml, ggml-base, as upstream ships them. Every command prints one JSON object.
//
// SPDX-License-Identifier: MIT
[[maybe_unused]] static int fixture_main(int argc, char **argv);
#define main fixture_main
#include "tests/test-llama-archs.cpp" // NOLINT(bugprone-suspicious-include): upstream has no header for it
#undef main

#include "../src/llama-kv-cache-dsa.h"
#include "../src/llama-kv-cache-dsv4.h"
#include "../src/llama-kv-cache-iswa.h"
#include "../src/llama-kv-cache.h"
#include "../src/llama-memory-hybrid-iswa.h"
#include "../src/llama-memory-hybrid.h"
#include "../src/llama-memory-recurrent.h"
#include "../src/llama-model.h"

#include "load_mode.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>

namespace {

using json = nlohmann::ordered_json;

constexpr uint32_t N_CTX_TRAIN = 1024;
constexpr uint32_t N_SWA = 16;
constexpr uint32_t N_LAYER_DENSE = 2; // of those that have experts in the others
constexpr int N_PROMPT = 64;
constexpr int N_STEPS = 8;

struct problem : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What the library said last that was an error: the reason in reports.
std::string last_error;

void on_log(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::string line = text;
        while (!line.empty() && line.back() == '\n') {
            line.pop_back();
        }
        // "failed to load model" follows the reason and says less.
        if (!line.empty() && line.find("failed to load model") == std::string::npos) {
            last_error = line;
        }
    }
}

std::string because(const std::string &what) {
    return last_error.empty() ? what : what + ": " + last_error;
}

//
// hyper-parameters
//

class keys {
  public:
    keys(llm_arch arch, gguf_context *ctx) : names(arch), ctx(ctx) {}

    void set(llm_kv key, uint32_t value) { gguf_set_val_u32(ctx, name(key), value); }
    void set(llm_kv key, float value) { gguf_set_val_f32(ctx, name(key), value); }
    void set(llm_kv key, const std::vector<uint32_t> &values) {
        gguf_set_arr_data(ctx, name(key), GGUF_TYPE_UINT32, values.data(), values.size());
    }
    void set(llm_kv key, const std::vector<float> &values) {
        gguf_set_arr_data(ctx, name(key), GGUF_TYPE_FLOAT32, values.data(), values.size());
    }
    uint32_t get(llm_kv key) { return gguf_get_val_u32(ctx, gguf_find_key(ctx, name(key))); }
    // The fixture gives some keys to some architectures as one value for each layer.
    bool is_array(llm_kv key) {
        const int64_t id = gguf_find_key(ctx, name(key));
        return id >= 0 && gguf_get_kv_type(ctx, id) == GGUF_TYPE_ARRAY;
    }

  private:
    const char *name(llm_kv key) {
        text = names(key);
        return text.c_str();
    }

    LLM_KV names;
    gguf_context *ctx;
    std::string text;
};

// Upstream's fixture knows one variant of these; they have experts too, or cannot be without.
bool also_with_experts(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_DEEPSEEK2OCR:
        case LLM_ARCH_DEEPSEEK4:
        case LLM_ARCH_GRANITE_HYBRID:
        case LLM_ARCH_JAMBA:
        case LLM_ARCH_NEMOTRON_H_MOE:
        case LLM_ARCH_NOMIC_BERT_MOE: return true;
        default: return false;
    }
}

bool has_variant(llm_arch arch, bool moe) {
    if (moe) {
        return moe_implemented(arch) || also_with_experts(arch);
    }
    return !moe_mandatory(arch) && arch != LLM_ARCH_DEEPSEEK2OCR && arch != LLM_ARCH_DEEPSEEK4;
}

bool norm_after_sum(llm_arch arch) {
    return arch == LLM_ARCH_BERT || arch == LLM_ARCH_NOMIC_BERT || arch == LLM_ARCH_NOMIC_BERT_MOE ||
           arch == LLM_ARCH_JINA_BERT_V2 || arch == LLM_ARCH_JINA_BERT_V3;
}

// One value a layer: `period` repeated.
template <typename T> std::vector<T> repeated(const std::vector<T> &period, uint32_t n_layer) {
    std::vector<T> values;
    values.reserve(n_layer);
    for (uint32_t il = 0; il < n_layer; il++) {
        values.push_back(period[il % period.size()]);
    }
    return values;
}

// The fixture's two layers become at least six and at least two periods of the pattern of layers.
void enlarge(llm_arch arch, bool moe, uint32_t n_draft, gguf_context *ctx) {
    keys kv(arch, ctx);
    uint32_t n_layer = 6;
    uint32_t n_embd = 128;
    uint32_t n_head = 2;
    uint32_t n_ff = 192;
    const bool mla = arch == LLM_ARCH_DEEPSEEK2 || arch == LLM_ARCH_DEEPSEEK32 || arch == LLM_ARCH_GLM_DSA ||
                     arch == LLM_ARCH_KIMI_LINEAR || arch == LLM_ARCH_MISTRAL4;

    switch (arch) {
        case LLM_ARCH_LLAMA4:
        case LLM_ARCH_SMALLTHINKER:
        case LLM_ARCH_SMOLLM3: n_layer = 8; break; // every fourth layer is without rope
        case LLM_ARCH_GEMMA3N: // the first 20 layers have a KV cache of their own
            n_layer = 22;
            n_embd = 64;
            n_head = 1;
            n_ff = 96;
            break;
        case LLM_ARCH_GEMMA4: n_layer = 10; break;
        case LLM_ARCH_DEEPSEEK4: n_layer = 8; break;
        default: break;
    }
    const uint32_t n_all = n_layer + n_draft; // draft layers come last
    const uint32_t head_size = n_embd / n_head;
    // Compressed attention has one head of keys and values for all.
    const uint32_t n_head_kv = mla || arch == LLM_ARCH_DEEPSEEK4 ? 1 : n_head;

    kv.set(LLM_KV_CONTEXT_LENGTH, N_CTX_TRAIN);
    kv.set(LLM_KV_BLOCK_COUNT, n_all);
    if (n_draft > 0) {
        kv.set(LLM_KV_NEXTN_PREDICT_LAYERS, n_draft);
    }
    kv.set(LLM_KV_LEADING_DENSE_BLOCK_COUNT, N_LAYER_DENSE);
    kv.set(LLM_KV_EMBEDDING_LENGTH, n_embd);
    kv.set(LLM_KV_FEATURES_LENGTH, n_embd);
    kv.set(LLM_KV_POSNET_EMBEDDING_LENGTH, n_embd);
    kv.set(LLM_KV_CONVNEXT_EMBEDDING_LENGTH, n_embd);
    if (kv.is_array(LLM_KV_FEED_FORWARD_LENGTH)) { // attention, recurrent, feed-forward in turn
        kv.set(LLM_KV_FEED_FORWARD_LENGTH, repeated<uint32_t>({0, 0, n_ff}, n_all));
        kv.set(LLM_KV_ATTENTION_HEAD_COUNT, repeated<uint32_t>({n_head, 0, n_head}, n_all));
        kv.set(LLM_KV_ATTENTION_HEAD_COUNT_KV, repeated<uint32_t>({n_head, 0, n_head}, n_all));
    } else {
        kv.set(LLM_KV_FEED_FORWARD_LENGTH, n_ff);
        if (kv.is_array(LLM_KV_ATTENTION_HEAD_COUNT)) { // attention and recurrent in turn
            kv.set(LLM_KV_ATTENTION_HEAD_COUNT, repeated<uint32_t>({n_head, 0}, n_all));
            kv.set(LLM_KV_ATTENTION_HEAD_COUNT_KV, repeated<uint32_t>({n_head_kv, 0}, n_all));
        } else {
            kv.set(LLM_KV_ATTENTION_HEAD_COUNT, n_head);
            kv.set(LLM_KV_ATTENTION_HEAD_COUNT_KV, n_head_kv);
        }
    }
    kv.set(LLM_KV_ATTENTION_SLIDING_WINDOW, N_SWA);
    if (kv.is_array(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN)) {
        const bool for_draft_layers = arch != LLM_ARCH_COHERE2MOE;
        kv.set(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN,
               repeated<uint32_t>({0, 1}, for_draft_layers ? n_all : n_layer));
    }
    kv.set(LLM_KV_ROPE_DIMENSION_SECTIONS, std::vector<uint32_t>(4, head_size / 4));
    kv.set(LLM_KV_TIME_MIX_EXTRA_DIM, uint32_t(32));
    kv.set(LLM_KV_TIME_DECAY_EXTRA_DIM, uint32_t(32));
    kv.set(LLM_KV_WKV_HEAD_SIZE, head_size);
    kv.set(LLM_KV_SSM_INNER_SIZE, 2 * n_embd);
    kv.set(LLM_KV_SSM_TIME_STEP_RANK, n_head);
    if (arch != LLM_ARCH_QWEN3NEXT && arch != LLM_ARCH_QWEN35 && arch != LLM_ARCH_QWEN35MOE) {
        kv.set(LLM_KV_SSM_STATE_SIZE, uint32_t(32)); // there it is the head size too
    }
    kv.set(LLM_KV_ATTENTION_Q_LORA_RANK, uint32_t(64));
    kv.set(LLM_KV_ATTENTION_KV_LORA_RANK, uint32_t(64));
    if (gguf_find_key(ctx, LLM_KV(arch)(LLM_KV_EXPERT_COUNT).c_str()) >= 0) {
        kv.set(LLM_KV_EXPERT_FEED_FORWARD_LENGTH, uint32_t(96));
        kv.set(LLM_KV_EXPERT_COUNT, uint32_t(4));
        kv.set(LLM_KV_EXPERT_USED_COUNT, uint32_t(2));
    }
    if (mla) {
        // The cache holds the compressed part and the rotated one: 64 + 32.
        kv.set(LLM_KV_ATTENTION_KEY_LENGTH, uint32_t(96));
        kv.set(LLM_KV_ATTENTION_VALUE_LENGTH, uint32_t(64));
        kv.set(LLM_KV_ROPE_DIMENSION_COUNT, uint32_t(32));
        kv.set(LLM_KV_ATTENTION_KEY_LENGTH_MLA, uint32_t(64));
        kv.set(LLM_KV_ATTENTION_VALUE_LENGTH_MLA, uint32_t(64));
    }

    // What the fixture leaves out.
    switch (arch) {
        case LLM_ARCH_LLAMA4: // window and rope end together, as in the real ones
        case LLM_ARCH_SMALLTHINKER: kv.set(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, uint32_t(4)); break;
        case LLM_ARCH_GEMMA4: // layers 6 to 9 reuse the caches of layers 4 (window) and 5 (full)
            kv.set(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, repeated<uint32_t>({1, 0}, n_all));
            kv.set(LLM_KV_ATTENTION_SHARED_KV_LAYERS, uint32_t(4));
            kv.set(LLM_KV_EMBEDDING_LENGTH_PER_LAYER, uint32_t(32));
            kv.set(LLM_KV_ATTENTION_KEY_LENGTH_SWA, head_size);
            kv.set(LLM_KV_ATTENTION_VALUE_LENGTH_SWA, head_size);
            break;
        case LLM_ARCH_RWKV6:
        case LLM_ARCH_RWKV6QWEN2: kv.set(LLM_KV_RESCALE_EVERY_N_LAYERS, uint32_t(3)); break;
        case LLM_ARCH_RWKV7:
        case LLM_ARCH_ARWKV7:
            kv.set(LLM_KV_ATTENTION_DECAY_LORA_RANK, uint32_t(32));
            kv.set(LLM_KV_ATTENTION_ICLR_LORA_RANK, uint32_t(32));
            kv.set(LLM_KV_ATTENTION_VALUE_RESIDUAL_MIX_LORA_RANK, uint32_t(32));
            kv.set(LLM_KV_ATTENTION_GATE_LORA_RANK, uint32_t(32));
            break;
        case LLM_ARCH_GRANITE:
        case LLM_ARCH_GRANITE_MOE:
        case LLM_ARCH_GRANITE_HYBRID:
            kv.set(LLM_KV_EMBEDDING_SCALE, 3.0f);
            kv.set(LLM_KV_RESIDUAL_SCALE, 0.75f);
            kv.set(LLM_KV_ATTENTION_SCALE, 0.125f);
            kv.set(LLM_KV_LOGIT_SCALE, 2.0f);
            break;
        case LLM_ARCH_DEEPSEEK4:
            // no compression, a learned selection of compressed entries (4), all compressed entries (128)
            kv.set(LLM_KV_ATTENTION_COMPRESS_RATIOS, repeated<uint32_t>({0, 4, 128, 4}, n_all));
            kv.set(LLM_KV_ATTENTION_COMPRESS_ROPE_FREQ_BASE, 40000.0f);
            kv.set(LLM_KV_ATTENTION_OUTPUT_GROUP_COUNT, uint32_t(2));
            kv.set(LLM_KV_ATTENTION_OUTPUT_LORA_RANK, uint32_t(32));
            kv.set(LLM_KV_HYPER_CONNECTION_COUNT, uint32_t(4));
            kv.set(LLM_KV_HYPER_CONNECTION_SINKHORN_ITERATIONS, uint32_t(4));
            kv.set(LLM_KV_HYPER_CONNECTION_EPSILON, 1e-6f);
            kv.set(LLM_KV_HASH_LAYER_COUNT, uint32_t(3));
            kv.set(LLM_KV_SWIGLU_CLAMP_EXP, std::vector<float>(n_all, 7.0f));
            kv.set(LLM_KV_ROPE_DIMENSION_COUNT, uint32_t(32));
            kv.set(LLM_KV_EXPERT_GATING_FUNC, uint32_t(LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS));
            kv.set(LLM_KV_EXPERT_WEIGHTS_SCALE, 1.5f);
            gguf_set_val_bool(ctx, LLM_KV(arch)(LLM_KV_EXPERT_WEIGHTS_NORM).c_str(), true);
            for (uint32_t il = 0; il < n_all; il++) { // tells the library that the table holds integers
                ggml_tensor t = {};
                t.type = GGML_TYPE_I32;
                ggml_format_name(&t, "blk.%u.ffn_gate_tid2eid.weight", il);
                gguf_add_tensor(ctx, &t);
            }
            break;
        case LLM_ARCH_MISTRAL3: // scores grow from position 32 on
            kv.set(LLM_KV_ATTENTION_TEMPERATURE_SCALE, 0.1f);
            kv.set(LLM_KV_ROPE_SCALING_ORIG_CTX_LEN, uint32_t(32));
            break;
        case LLM_ARCH_MISTRAL4:
            kv.set(LLM_KV_ATTENTION_TEMPERATURE_SCALE, 0.1f);
            kv.set(LLM_KV_ATTENTION_TEMPERATURE_LENGTH, uint32_t(32));
            break;
        case LLM_ARCH_QWEN3VL: // a row of vectors holds what three layers add for images
        case LLM_ARCH_QWEN3VLMOE: kv.set(LLM_KV_NUM_DEEPSTACK_LAYERS, uint32_t(3)); break;
        case LLM_ARCH_NEMOTRON_H_MOE:
            if (moe) {
                kv.set(LLM_KV_EXPERT_SHARED_FEED_FORWARD_LENGTH, uint32_t(64));
                kv.set(LLM_KV_MOE_LATENT_SIZE, uint32_t(64));
            }
            break;
        case LLM_ARCH_NOMIC_BERT_MOE: kv.set(LLM_KV_MOE_EVERY_N_LAYERS, uint32_t(moe ? 2 : 0)); break;
        default: break;
    }
    if (arch == LLM_ARCH_RWKV6QWEN2 || arch == LLM_ARCH_ARWKV7) {
        kv.set(LLM_KV_TOKEN_SHIFT_COUNT, uint32_t(1));
    }
    if (norm_after_sum(arch)) { // in the same family tokens have types
        kv.set(LLM_KV_TOKENIZER_TOKEN_TYPE_COUNT, uint32_t(2));
    }
}

//
// weights
//

uint64_t mix(uint64_t &state) { // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

enum class sign { any, positive, negative };

// Near-normal values from integers and one multiplication: the same bits on every machine.
class generator {
  public:
    generator(uint64_t seed, const char *name) {
        state = 0xcbf29ce484222325u; // FNV-1a
        for (const char *c = name; *c; c++) {
            state = (state ^ (unsigned char)*c) * 0x100000001b3u;
        }
        state ^= mix(seed);
        mix(state);
    }

    float next(double mean, double deviation, sign wanted) {
        // The sum of eight uniform 16-bit numbers has this deviation and is close to normal.
        constexpr double unit = 53509.9;
        int64_t sum = INT64_C(-8) * 32768;
        for (int word = 0; word < 2; word++) {
            for (uint64_t bits = mix(state), part = 0; part < 4; part++, bits >>= 16) {
                sum += (int64_t)(bits & 0xffff);
            }
        }
        const double value = (double)(sum + std::llround(mean / deviation * unit)) * (deviation / unit);
        switch (wanted) {
            case sign::positive: return (float)std::fabs(value);
            case sign::negative: return (float)-std::fabs(value);
            default: return (float)value;
        }
    }

    uint32_t below(uint32_t n) { return (uint32_t)(mix(state) >> 33) % n; }

  private:
    uint64_t state;
};

bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

bool ends(const std::string &text, const std::string &tail) {
    return text.size() >= tail.size() && text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

// The layer of a tensor, as the files name it: "blk.3.", or "dec.blk.3." and "enc.blk.3.".
std::string layer_of(const std::string &name) {
    const size_t at = name.find("blk.");
    return at == std::string::npos ? "" : name.substr(0, name.find('.', at + 4) + 1);
}

uint32_t number_of(const std::string &layer) { return (uint32_t)std::stoul(layer.substr(layer.find("blk.") + 4)); }

// What a layer adds to the residual stream goes through one of these.
bool is_output_projection(const std::string &name) {
    static const char *const parts[] = {".attn_output.", ".attn_output_b.", ".attn_o.",          ".cross_attn_o.",
                                        ".ffn_down.",    ".ffn_down_exps.", ".ffn_down_shexp.",  ".ffn_down_chexps.",
                                        ".ssm_out.",     ".time_mix_output.", ".channel_mix_value.",
                                        ".shortconv.out_proj.", ".laurel_r.", ".proj.",          ".ffn_latent_up."};
    return std::any_of(std::begin(parts), std::end(parts), [&](const char *part) { return has(name, part); });
}

struct distribution {
    double mean = 0.0;
    double deviation = 1.0;
    sign wanted = sign::any;
};

// So that activations stay of order one and every layer and every weight matters.
distribution distribution_of(const ggml_tensor *t, bool weak_outputs) {
    const std::string name = t->name;
    const double strength = weak_outputs && is_output_projection(name) ? 0.5 : 1.0;
    const double matrix = strength / std::sqrt((double)t->ne[0]);
    const distribution gain = {1.0, 0.1, sign::positive};
    if (ends(name, ".bias")) {
        if (has(name, "ssm_dt")) { // a step of 0.05 after softplus: the state outlives the prompt
            return {-3.0, 0.3};
        }
        return {0.0, weak_outputs ? 0.03 : 0.1};
    }
    if (has(name, "ssm_a")) { // the logarithm's negative: decay
        return {1.0, 0.3, sign::negative};
    }
    if (has(name, "rope_f")) { // rope_freqs, rope_factors_long, rope_factors_short
        return {1.0, 0.2, sign::positive};
    }
    if (has(name, "norm") || has(name, "time_mix_ln") || has(name, "scale") || has(name, "ffn.act") ||
        (has(name, "ssm_d") && !has(name, "ssm_dt")) || has(name, "time_mix_k_k") || has(name, "time_mix_k_a")) {
        return gain;
    }
    if (has(name, "lerp")) { // between this token and the one before
        return {0.5, 0.2};
    }
    if (has(name, "time_mix_decay.") || has(name, "time_mix_w0")) { // slow, for the same reason
        return {-3.0, 0.3};
    }
    if (has(name, "time_mix_first") || has(name, "time_mix_a0") ||
        has(name, "time_mix_v0") || has(name, "time_mix_r_k")) {
        return {0.0, 0.3};
    }
    if (has(name, "token_embd.") || has(name, "per_layer_token_embd") || has(name, "sinks")) {
        return {0.0, 1.0};
    }
    if (has(name, "position_embd") || has(name, "token_types") || has(name, "rel_b") || has(name, "_ape") ||
        (has(name, "hc_") && !has(name, "_fn"))) {
        return {0.0, 0.5};
    }
    return {0.0, matrix};
}

struct weights {
    uint64_t seed;
    // Where a norm follows the sum, a layer halves what came before, and rows of different tokens become alike.
    bool weak_outputs;
};

void set_weights(ggml_tensor *tensor, void *userdata) {
    const weights &wanted = *(const weights *)userdata;
    generator random(wanted.seed, tensor->name);
    const int64_t n = ggml_nelements(tensor);
    if (tensor->type == GGML_TYPE_I32) { // experts chosen by token: different ones for one token
        std::vector<int32_t> values;
        const uint32_t n_expert = 4;
        for (int64_t i = 0; i < n; i += tensor->ne[0]) {
            const uint32_t first = random.below(n_expert);
            for (int64_t j = 0; j < tensor->ne[0]; j++) {
                values.push_back((int32_t)((first + j) % n_expert));
            }
        }
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
        return;
    }
    const distribution d = distribution_of(tensor, wanted.weak_outputs);
    std::vector<float> values(n);
    for (float &value : values) {
        value = random.next(d.mean, d.deviation, d.wanted);
    }
    if (tensor->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    } else if (tensor->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> halves(n);
        ggml_fp32_to_fp16_row(values.data(), halves.data(), n);
        ggml_backend_tensor_set(tensor, halves.data(), 0, ggml_nbytes(tensor));
    } else {
        throw problem(std::string("no weights for ") + tensor->name + " of type " + ggml_type_name(tensor->type));
    }
}

//
// writing
//

llama_model_params model_params() {
    llama_model_params params = llama_model_default_params();
    params.progress_callback = [](float, void *) { return true; };
    set_load_mode(params, false, false); // the check changes weights
    params.use_extra_bufts = false;
    return params;
}

// Without a file the library makes every optional tensor that it knows. These contradict others, or no real file of
// the architecture has them.
bool superfluous(llm_arch arch, const std::string &name, uint32_t n_layer_dense) {
    if (ends(name, ".input_scale") || (ends(name, ".scale") && arch != LLM_ARCH_BITNET)) {
        return true; // of one quantised type
    }
    switch (arch) {
        case LLM_ARCH_RWKV6QWEN2: return has(name, "time_mix_first"); // with it the graph is rwkv6's
        case LLM_ARCH_RWKV6: // one tensor holds what these five held
            return has(name, "time_mix_lerp") && !has(name, "lerp_x") && !has(name, "lerp_fused");
        case LLM_ARCH_HY_V3:
        case LLM_ARCH_MIMO2:
        case LLM_ARCH_STEP35: { // the first layers have no experts, the others nothing else
            const bool dense = has(name, ".ffn_gate.") || has(name, ".ffn_down.") || has(name, ".ffn_up.");
            const bool experts = has(name, "exps.") || has(name, "shexp.") || has(name, "ffn_gate_inp") ||
                                 has(name, "exp_probs_b");
            const bool first = !layer_of(name).empty() && number_of(name) < n_layer_dense;
            return first ? experts : dense;
        }
        default: return false;
    }
}

void make(llm_arch arch, bool moe, uint64_t seed, uint32_t n_draft, const char *path,
          const std::set<std::string> &without) {
    const gguf_context_ptr ctx = get_gguf_ctx(arch, moe);
    enlarge(arch, moe, n_draft, ctx.get());
    weights wanted = {seed, norm_after_sum(arch)};
    llama_model_ptr model(llama_model_init_from_user(ctx.get(), set_weights, &wanted, model_params()));
    if (!model) {
        throw problem(because("the library does not build it"));
    }
    if (model->hparams.n_layer_nextn != n_draft) {
        throw problem(std::string("there are no draft layers in ") + llm_arch_name(arch));
    }
    const gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), ctx.get());
    std::set<std::string> seen; // tied tables and rope factors stand several times in the model
    for (const std::string &name : without) {
        if (!model->get_tensor(name.c_str())) {
            throw problem("there is no tensor " + name + " to leave out");
        }
    }
    for (const auto &[name, tensor] : llama_internal_get_tensor_map(model.get())) {
        if (seen.insert(name).second && !without.count(name) && !superfluous(arch, name, N_LAYER_DENSE)) {
            gguf_add_tensor(out.get(), tensor);
        }
    }
    if (!gguf_write_to_file(out.get(), path, false)) {
        throw problem(std::string("cannot write ") + path);
    }
}

//
// describing and checking
//

const char *memory_kind(const llama_memory_i *memory) {
    if (!memory) {
        return "none";
    }
    if (dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return "hybrid_iswa";
    }
    if (dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return "hybrid";
    }
    if (dynamic_cast<const llama_memory_recurrent *>(memory)) {
        return "recurrent";
    }
    if (dynamic_cast<const llama_kv_cache_dsv4 *>(memory)) {
        return "dsv4";
    }
    if (dynamic_cast<const llama_kv_cache_dsa *>(memory)) {
        return "dsa";
    }
    if (dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return "iswa";
    }
    if (dynamic_cast<const llama_kv_cache *>(memory)) {
        return "kv";
    }
    return "unknown";
}

struct run_result {
    std::vector<float> values; // rows of logits or embeddings: the prompt's, then those of the steps
    int n_columns = 0;
};

class runner {
  public:
    explicit runner(llama_model *model) : model(model) {
        encoder = llama_model_has_encoder(model);
        decoder = llama_model_has_decoder(model);
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        ctx = context();
        memory = llama_get_memory(ctx.get());
        logits = gives_logits();
        ctx = context();
        memory = llama_get_memory(ctx.get());
        remembers = memory && decoder && differs_after_prompt();
    }

    // The prompt and, if the model remembers, some steps; the same tokens every time, or with another one at `changed`.
    run_result run(bool steps, int changed = -1) {
        run_result result;
        result.n_columns = columns();
        if (memory) {
            llama_memory_clear(memory, true);
        }
        std::vector<llama_token> tokens;
        tokens.reserve(N_PROMPT + N_STEPS);
        uint64_t state = 1;
        for (int i = 0; i < N_PROMPT + N_STEPS; i++) {
            tokens.push_back((llama_token)(mix(state) % (uint64_t)n_vocab));
        }
        if (changed >= 0) {
            tokens[changed] = (tokens[changed] + 1) % n_vocab;
        }
        if (encoder && decoder) {
            compute(tokens.data() + N_STEPS, N_PROMPT, 0, true);
        }
        compute(tokens.data(), N_PROMPT, 0, encoder && !decoder);
        take(result, N_PROMPT);
        for (int i = 0; steps && remembers && i < N_STEPS; i++) {
            compute(tokens.data() + N_PROMPT + i, 1, N_PROMPT + i, false);
            take(result, 1);
        }
        return result;
    }

    llama_model *model;
    llama_context_ptr ctx;
    llama_memory_t memory = nullptr;
    bool encoder = false;
    bool decoder = false;
    bool logits = true;
    bool remembers = false;
    int n_vocab = 0;

  private:
    llama_context_ptr context() const {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 256;
        params.n_batch = N_PROMPT;
        params.n_ubatch = N_PROMPT; // without causal attention a batch is one micro-batch
        params.n_threads = 1;
        params.n_threads_batch = 1;
        params.pooling_type = LLAMA_POOLING_TYPE_NONE;
        params.embeddings = !logits;
        params.no_perf = true;
        llama_context_ptr made(llama_init_from_model(model, params));
        if (!made) {
            throw problem(because("the library makes no context"));
        }
        return made;
    }

    // A graph without a head leaves the buffer of logits as it was.
    bool gives_logits() {
        compute_prompt();
        float *buffer = llama_get_logits(ctx.get());
        if (!buffer) {
            return false;
        }
        std::fill(buffer, buffer + n_vocab, NAN);
        compute_prompt();
        buffer = llama_get_logits(ctx.get());
        return !std::all_of(buffer, buffer + n_vocab, [](float value) { return std::isnan(value); });
    }

    // Some graphs use no memory though the library makes one.
    bool differs_after_prompt() {
        std::vector<float> rows[2];
        for (llama_token last = 0; last < 2; last++) {
            compute_prompt(last);
            const llama_token next = 1;
            compute(&next, 1, 4, false);
            run_result result;
            result.n_columns = columns();
            take(result, 1);
            rows[last] = result.values;
        }
        return memcmp(rows[0].data(), rows[1].data(), rows[0].size() * sizeof(float)) != 0;
    }

    void compute_prompt(llama_token last = 1) {
        if (memory) {
            llama_memory_clear(memory, true);
        }
        const llama_token tokens[4] = {1, 1, 1, last};
        if (encoder) {
            compute(tokens, 4, 0, true);
        }
        if (decoder) {
            compute(tokens, 4, 0, false);
        }
    }

    int columns() const { return logits ? n_vocab : (int)llama_model_n_embd_out(model); }

    void compute(const llama_token *tokens, int n, int start, bool encode) {
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int i = 0; i < n; i++) {
            batch.token[i] = tokens[i];
            batch.pos[i] = start + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = true;
        }
        const int status = encode ? llama_encode(ctx.get(), batch) : llama_decode(ctx.get(), batch);
        llama_batch_free(batch);
        if (status != 0) {
            throw problem(because(std::string(encode ? "llama_encode" : "llama_decode") + " gives " +
                                  std::to_string(status)));
        }
    }

    void take(run_result &result, int rows) {
        for (int i = 0; i < rows; i++) {
            const float *row = logits ? llama_get_logits_ith(ctx.get(), i) : llama_get_embeddings_ith(ctx.get(), i);
            if (!row) {
                throw problem(because("the library gives no row " + std::to_string(i)));
            }
            result.values.insert(result.values.end(), row, row + result.n_columns);
        }
    }
};

json describe(const runner &r) {
    const llama_hparams &hparams = r.model->hparams;
    json layers = json::array();
    for (uint32_t il = 0; il < hparams.n_layer(); il++) {
        layers.push_back({{"recurrent", hparams.is_recr(il)},
                          {"window", hparams.is_swa(il)},
                          {"kv", hparams.has_kv(il)},
                          {"n_head", hparams.n_head(il)},
                          {"n_head_kv", hparams.n_head_kv(il)},
                          {"n_ff", hparams.n_ff(il)}});
    }
    const char *attention = r.model->hparams.causal_attn ? "causal" : "full";
    return {
        {"architecture", llm_arch_name(r.model->arch)},
        {"gives", r.logits ? "logits" : "embeddings"},
        {"memory", memory_kind(r.memory)},
        {"remembers", r.remembers},
        {"encoder", r.encoder},
        {"decoder", r.decoder},
        {"attention", attention},
        {"n_layer", hparams.n_layer()},
        {"n_embd", hparams.n_embd},
        {"n_embd_inp", hparams.n_embd_inp()},
        {"n_vocab", r.n_vocab},
        {"head_size_k", hparams.n_embd_head_k()},
        {"head_size_v", hparams.n_embd_head_v()},
        {"n_expert", hparams.n_expert},
        {"n_layer_kv_from_start", hparams.n_layer_kv_from_start},
        {"n_pos_per_token", hparams.n_pos_per_embd()},
        {"layers", layers},
    };
}

class zeroed { // tensors that are zero for a while
  public:
    explicit zeroed(const std::vector<ggml_tensor *> &tensors) : tensors(tensors) {
        for (ggml_tensor *tensor : tensors) {
            std::vector<uint8_t> bytes(ggml_nbytes(tensor));
            ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
            kept.push_back(bytes);
            std::fill(bytes.begin(), bytes.end(), 0);
            ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
        }
    }
    ~zeroed() {
        for (size_t i = 0; i < tensors.size(); i++) {
            ggml_backend_tensor_set(tensors[i], kept[i].data(), 0, kept[i].size());
        }
    }

  private:
    std::vector<ggml_tensor *> tensors;
    std::vector<std::vector<uint8_t>> kept;
};

struct change {
    double fraction = 0.0; // of the values whose bits differ
    double size = 0.0;     // of the difference, relative to the values (root mean squares)
};

// The largest negative number stands for tokens that a model never gives.
bool masked(float value) { return value <= -std::numeric_limits<float>::max(); }

change compare(const std::vector<float> &a, const std::vector<float> &b) {
    double squares = 0.0, differences = 0.0;
    size_t differing = 0, n = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (masked(a[i]) && masked(b[i])) {
            continue;
        }
        n++;
        differing += memcmp(&a[i], &b[i], sizeof(float)) != 0;
        squares += (double)a[i] * a[i];
        differences += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    }
    return {(double)differing / (double)n, std::sqrt(differences / squares)};
}

json check(runner &r) {
    const run_result whole = r.run(true);
    const bool finite =
        std::all_of(whole.values.begin(), whole.values.end(), [](float value) { return std::isfinite(value); });
    std::set<size_t> best;
    double squares = 0.0;
    size_t n = 0;
    for (size_t row = 0; row < whole.values.size(); row += whole.n_columns) {
        const auto first = whole.values.begin() + (long)row;
        best.insert((size_t)(std::max_element(first, first + whole.n_columns) - first));
    }
    for (const float value : whole.values) {
        if (!masked(value)) {
            squares += (double)value * value;
            n++;
        }
    }
    const run_result prompt = r.run(false);
    if (!std::equal(prompt.values.begin(), prompt.values.end(), whole.values.begin(),
                    [](float a, float b) { return memcmp(&a, &b, sizeof(a)) == 0; })) {
        throw problem("two runs give different values");
    }

    // How much the last row depends on a token that lies further back than a window: on what caches and states hold.
    const run_result other = r.run(true, N_PROMPT - (int)N_SWA - 1);
    const change earlier = compare({whole.values.end() - whole.n_columns, whole.values.end()},
                                   {other.values.end() - other.n_columns, other.values.end()});

    std::map<std::string, std::vector<ggml_tensor *>> outputs;
    std::set<std::string> layers;
    std::set<ggml_tensor *> seen;
    for (const auto &[name, tensor] : llama_internal_get_tensor_map(r.model)) {
        const std::string layer = layer_of(name);
        if (layer.empty() || number_of(layer) >= r.model->hparams.n_layer()) { // draft layers take no part
            continue;
        }
        layers.insert(layer);
        if (is_output_projection(name) && seen.insert(tensor).second) {
            outputs[layer].push_back(tensor);
        }
    }
    json changes = json::object();
    change least = {1.0, INFINITY};
    for (const std::string &layer : layers) {
        const auto found = outputs.find(layer);
        if (found == outputs.end()) {
            throw problem("no output projection is known in layer " + layer);
        }
        const zeroed without(found->second);
        const change c = compare(prompt.values, r.run(false).values);
        least.fraction = std::min(least.fraction, c.fraction);
        least.size = std::min(least.size, c.size);
        changes[layer.substr(0, layer.size() - 1)] = {c.fraction, c.size};
    }
    return {
        {"finite", finite},
        {"root_mean_square", std::sqrt(squares / (double)n)},
        {"distinct_maxima", best.size()},
        {"rows", whole.values.size() / whole.n_columns},
        {"columns", whole.n_columns},
        {"context_fraction", earlier.fraction},
        {"context_size", earlier.size},
        {"identity_fraction", least.fraction},
        {"identity_size", least.size},
        {"identity", changes},
    };
}

// Which tensors the values do not depend on: those with biases and factors for cases that a run does not meet.
json idle_tensors(runner &r) {
    const std::vector<float> values = r.run(true).values;
    json idle = json::array();
    std::set<ggml_tensor *> seen;
    for (const auto &[name, tensor] : llama_internal_get_tensor_map(r.model)) {
        if (!seen.insert(tensor).second) {
            continue;
        }
        const zeroed without({tensor});
        const std::vector<float> changed = r.run(true).values;
        if (memcmp(changed.data(), values.data(), values.size() * sizeof(float)) == 0) {
            idle.push_back(name);
        }
    }
    return idle;
}

// What has no variant, and why: the library does not build it, or not by itself.
const std::map<std::string, const char *> &refused() {
    static const std::map<std::string, const char *> reasons = {
        {"clip", "the library has no language model of this architecture: it is an image encoder of another library"},
        {"dflash", "a draft model: it takes what chosen layers of another model give"},
        {"eagle3", "a draft model: it takes what chosen layers of another model give"},
        {"gemma4-assistant", "a draft model: it reads the cache of another model"},
        {"gptj", "the library names it and has no implementation"},
        {"plm", "the library ends the process: its graph gives values to the cache in a shape that the cache refuses"},
        {"wavtokenizer-dec", "a decoder of sound from convolutions over all positions: it has no layers to cut between"},
    };
    return reasons;
}

json list() {
    json without = json::array();
    for (const auto &[name, reason] : refused()) {
        without.push_back({{"architecture", name}, {"reason", reason}});
    }
    json variants = json::array();
    for (const llm_arch &arch : llm_arch_all()) {
        if (arch == LLM_ARCH_UNKNOWN || refused().count(llm_arch_name(arch))) {
            continue;
        }
        for (const bool moe : {false, true}) {
            if (has_variant(arch, moe)) {
                variants.push_back({{"architecture", llm_arch_name(arch)}, {"experts", moe ? "moe" : "dense"}});
            }
        }
    }
    return {{"variants", variants}, {"refused", without}};
}

json with_file(const std::string &path, const std::function<json(runner &)> &what) {
    const llama_model_ptr model(llama_model_load_from_file(path.c_str(), model_params()));
    if (!model) {
        throw problem(because("the library does not load " + path));
    }
    runner r(model.get());
    return what(r);
}

int usage() {
    fputs("usage: tiny_models --list\n"
          "       tiny_models --make ARCHITECTURE dense|moe FILE SEED DRAFT_LAYERS [TENSOR TO LEAVE OUT ...]\n"
          "       tiny_models --describe FILE\n"
          "       tiny_models --check FILE\n"
          "       tiny_models --idle FILE\n",
          stderr);
    return 2;
}

} // namespace

// NOLINTNEXTLINE(bugprone-exception-escape): the object of one string that tells of an exception throws none
int main(int argc, char **argv) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    llama_log_set(on_log, nullptr);
    try {
        json result;
        if (args.size() == 1 && args[0] == "--list") {
            result = list();
        } else if (args.size() >= 6 && args[0] == "--make") {
            const llm_arch arch = llm_arch_from_string(args[1]);
            if (arch == LLM_ARCH_UNKNOWN) {
                throw problem("there is no architecture " + args[1]);
            }
            if (args[2] != "dense" && args[2] != "moe") {
                return usage();
            }
            if (!has_variant(arch, args[2] == "moe")) {
                throw problem(args[1] + " has no variant " + args[2]);
            }
            make(arch, args[2] == "moe", std::stoull(args[4]), (uint32_t)std::stoul(args[5]),
                 args[3].c_str(), {args.begin() + 6, args.end()});
            result = with_file(args[3], describe);
        } else if (args.size() == 2 && (args[0] == "--describe" || args[0] == "--check" || args[0] == "--idle")) {
            result = with_file(args[1], [&](runner &r) {
                json described = describe(r);
                if (args[0] == "--check") {
                    described["check"] = check(r);
                } else if (args[0] == "--idle") {
                    described["idle"] = idle_tensors(r);
                }
                return described;
            });
        } else {
            return usage();
        }
        puts(result.dump().c_str());
        return 0;
    } catch (const std::exception &error) {
        // A file's name need not be UTF-8.
        puts(json({{"error", error.what()}}).dump(-1, ' ', false, json::error_handler_t::replace).c_str());
        return 1;
    }
}
