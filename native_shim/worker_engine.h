// What a shard worker computes with: one model range in one context.
//
// Two implementations of one interface, chosen when compiling: worker_range.cpp on the patched libllama, which takes
// and gives bundles itself, and worker_whole.cpp (-DBB_UNPATCHED) on the library as upstream ships it, which holds all
// layers and is the oracle of the tests. Everything that decides about arithmetic (context parameters, threads) is in
// worker_engine.cpp and the same for both.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "boundary_bundle.h"
#include "llama.h"
#include "worker_file.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace worker {

// spec/worker-protocol.md, Errors
enum code {
    CODE_ARGUMENT = 1,
    CODE_RANGE = 2,
    CODE_ARCHITECTURE = 3,
    CODE_LOAD = 4,
    CODE_BUNDLE = 5,
    CODE_CONTRACT = 6,
    CODE_POSITION = 7,
    CODE_LIMIT = 8,
    CODE_FULL = 9,
    CODE_COMPUTE = 10,
    CODE_STATE = 11,
    CODE_SESSION = 12,
    CODE_PROTOCOL = 20,
    CODE_JSON = 21,
    CODE_FRAME = 22,
    CODE_NO_MEMORY = 23,
    CODE_LINK = 24,
};

const char *code_name(int code);

//
// sessions (spec/worker-protocol.md, Sessions; src/llama-boundary.h): the library's terms, for both builds
//

using session_id = std::array<uint8_t, 16>;

enum outcome {
    OUTCOME_HIT = 0,
    OUTCOME_MISS = 1,
    OUTCOME_EVICTED = 2,
    OUTCOME_STALE_EPOCH = 3,
    OUTCOME_INCOMPATIBLE_RECIPE = 4,
    OUTCOME_POSITION_MISMATCH = 5,
    OUTCOME_FULL = 6,
    OUTCOME_CANNOT_TRUNCATE = 7,
    OUTCOME_BUSY = 8,
    OUTCOMES = 9,
};

const char *outcome_name(int outcome);

struct session_request {
    session_id id{};
    uint64_t epoch = 0;
    int64_t n_pos = 0;                // open: that it must have; truncate: to keep
    std::array<uint8_t, 32> recipe{}; // open, restore
    std::string recipe_text;          // open, restore; "" = not known
};

struct session_result {
    int outcome = OUTCOME_HIT;
    std::optional<session_id> id; // none: a refusal that is about no session
    uint64_t epoch = 0;
    int64_t n_pos = -1; // -1 = none
    bool created = false;
    std::string ingredient; // OUTCOME_INCOMPATIBLE_RECIPE: what differs, "" = not known
};

// Thrown by everything here; becomes an error reply or, while loading, the sentence on standard error.
struct failure final : std::exception {
    failure(int code, std::string message) : code(code), message(std::move(message)) {}

    const char *what() const noexcept override { return message.c_str(); }

    int code;
    std::string message;
    std::string bundle_error;              // CODE_BUNDLE: the format's name of the error ...
    uint64_t offset = 0;                   // ... and where it is
    std::optional<session_result> session; // what the session table says of it
    bool of_link = false;                  // about what comes over the link to the previous worker, not one request
};

// A function and no template of C++, so that the compiler holds the arguments to the format.
[[noreturn, gnu::format(printf, 2, 3)]] void fail(int code, const char *format, ...);

uint64_t now_us();             // monotonic
std::string reason(int error); // what an errno means
std::string hex(const uint8_t *bytes, size_t size);

struct engine_options {
    std::string path;
    int32_t start = 0;
    int32_t end = -1; // -1: all
    int32_t threads = 1;
    uint32_t poll = 0; // how long a pool thread spins for work before it sleeps, as in ggml_threadpool_params
    bool pin = true;   // one processor a thread, where there is a thread for every processor
    uint32_t ctx = 1024;
    uint32_t batch = 512;
    uint32_t ubatch = 512;
    uint32_t seqs = 1;
    bool kv_unified = false;
    bool swa_full = true; // a sliding window's cache holds every position, not the last ones alone
    bool flash_attn = true;
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    bool mmap = true;
    bool mlock = false;
    bool verbose = false;
};

// How an output bundle is laid out.
struct layout {
    bool big_endian = false;
    bool checksums = true;
    uint64_t fragment_size = 0;
};

// How tokens are drawn, by the library's chain of samplers; as it is here it takes the most likely one.
struct sampling {
    float temperature = 0.0f; // 0: the most likely token
    int32_t top_k = 0;        // 0: all
    float top_p = 1.0f;
    float min_p = 0.0f;
    float repeat_penalty = 1.0f;
    int32_t repeat_last_n = 64;
    uint32_t seed = 0;
};

// What the library reports about the loaded model. Fields that the unpatched library cannot know are empty or negative.
struct model_facts {
    std::string architecture;
    int32_t n_layer = 0;
    int32_t layer_start = 0;
    int32_t layer_end = 0;
    int32_t n_embd = 0;
    int32_t n_vocab = 0;
    bool has_tok_embd = false;
    bool has_out_norm = false;
    bool has_output = false;
    int tied = -1; // -1: unknown
    int64_t n_tensors = -1;
    uint64_t weight_bytes = 0;
    uint64_t n_params = 0;
    std::string fingerprint; // hex

    bool first() const { return layer_start == 0; }
    bool last() const { return layer_end == n_layer; }
};

struct tensor_facts {
    std::string name;
    std::string type;
    int32_t layer = -1;
    std::vector<int64_t> shape; // outermost first
    uint64_t bytes = 0;
};

struct byte_view {
    const uint8_t *data = nullptr;
    size_t size = 0;
};

// Where the time of a decode went.
struct timings {
    uint64_t decode_us = 0; // the codec's share
    uint64_t compute_us = 0;
};

// A tensor of a contract (section 5.3 of the specification).
struct crossing_tensor {
    std::string name;
    std::string dtype;
    std::vector<std::string> shape; // numbers, and sums of names and numbers
    int token_axis = -1;            // -1: none
};

struct session_info {
    session_id id;
    uint64_t epoch;
    int64_t n_pos; // -1 = none
    uint64_t n_bytes;
    uint64_t used;
    int state; // 0 live, 1 evicted, 2 released
    bool pinned;
};

struct session_counts {
    uint64_t live, forgotten, slots, positions, calls, tokens, created, evicted, released;
    std::array<uint64_t, OUTCOMES> outcomes;
};

struct recipe_part {
    std::string text;
    std::string fingerprint; // hex
};

// The session table of the patched library. A refusal is thrown with CODE_SESSION; then everything is as before.
class session_table {
public:
    virtual ~session_table() = default;
    virtual session_result open(const session_request &wanted) = 0;
    virtual session_result truncate(const session_request &wanted) = 0;
    virtual session_result release(const session_request &wanted) = 0;
    virtual session_result pin(const session_request &wanted, bool pinned) = 0;
    virtual session_result evict(const std::optional<session_id> &id) = 0; // none: the least recently used
    virtual session_result save(const session_request &wanted, byte_view &state) = 0; // valid until the next call
    virtual session_result restore(const session_request &wanted, byte_view state) = 0;
    virtual bool get(uint64_t i, session_info &info) const = 0; // live ones first, the most recently used first of all
    virtual session_counts counts() const = 0;
    virtual recipe_part recipe(bool shared) const = 0; // else that of the range
};

class engine {
public:
    virtual ~engine();
    engine(const engine &) = delete;
    engine &operator=(const engine &) = delete;

    // Runs one batch, under sessions if the bundle has a session table. After a failure the state is what it was before.
    virtual timings decode(byte_view bytes, bool under_sessions) = 0;
    // Said while a decode computes, when about so long of it is left, going by the one before; it must not throw.
    static constexpr std::chrono::microseconds NEARLY_OVER{80};
    void when_nearly_over(std::function<void()> what);
    // What the last batch left at the end of the range; valid until the next call.
    virtual byte_view output(const layout &layout) = 0;
    // Goes the way of a decode with a bundle that is refused for its positions, and forgets the last output.
    virtual void rehearse(byte_view impossible) { (void)impossible; }
    // Batch indices of the tokens that the last batch selected, ascending.
    virtual std::vector<int32_t> outputs() const = 0;
    virtual int64_t kv_bytes() const = 0; // -1: unknown
    virtual std::vector<tensor_facts> tensors() const = 0;
    // What crosses before the first layer of the range, or behind its last.
    virtual std::vector<crossing_tensor> contract(bool behind) const = 0;
    virtual bool patched() const = 0;
    virtual int abi() const = 0; // of the library's boundary functions, 0 without
    virtual session_table *sessions() { return nullptr; } // none in the unpatched library

    llama_token sample(int32_t index, int32_t sequence); // index within the last batch; greedy without a sampler
    void set_sampler(int32_t sequence, const sampling &how, const std::vector<llama_token> &history);
    bool has_samplers() const { return !samplers_.empty(); }
    virtual void clear();
    virtual void clear(int32_t sequence, int32_t from);

    // While it lives the threads of the pool do not sleep. Made as soon as there is a batch, it saves their waking.
    class awake {
    public:
        explicit awake(engine &engine);
        ~awake();
        awake(const awake &) = delete;
        awake &operator=(const awake &) = delete;

    private:
        ggml_threadpool_t pool_;
    };

    void warm_up();           // leaves no trace in the state
    void check_files() const; // throws failure if what is mapped is not what was loaded

    bool has_vocabulary() const;
    // Of at most MAX_TOKENIZED bytes: the library takes the square of a long text's time, and a stack that grows with it.
    static constexpr size_t MAX_TOKENIZED = 256u << 10;
    std::vector<llama_token> tokenize(const std::string &text, bool add_special, bool parse_special) const;
    std::string piece(llama_token token) const; // the bytes of a token
    std::vector<llama_token> end_tokens() const;

    const engine_options &options() const { return options_; }
    const model_facts &facts() const { return facts_; }
    uint32_t n_ctx() const { return llama_n_ctx(ctx_); }
    uint32_t n_batch() const { return llama_n_batch(ctx_); }
    uint32_t n_ubatch() const { return llama_n_ubatch(ctx_); }
    uint32_t n_seq_max() const { return llama_n_seq_max(ctx_); }
    int32_t graphs_reused() const { return llama_perf_context(ctx_).n_reused; }

protected:
    explicit engine(const engine_options &options); // of files that the library can be given
    void start();                                   // makes the context of model_ and its threads
    void forget_if_empty();                         // when no sequence holds a position: the bytes of the cells too
    void has_computed(uint64_t us);                 // what a decode took, once it is over

    engine_options options_;
    model_files files_;
    model_facts facts_;
    llama_model *model_ = nullptr;
    llama_context *ctx_ = nullptr;

private:
    void check_head_size(const char *option, ggml_type type, const char *key) const;
    static bool on_node(void *engine); // one more is computed

    std::function<void()> nearly_over_;
    uint64_t nodes_ = 0, nearly_at_ = 0; // computed in this decode; after how many it is nearly over
    ggml_threadpool_t pool_ = nullptr;
    void (*pool_free_)(ggml_threadpool_t) = nullptr;
    struct free_sampler {
        void operator()(llama_sampler *s) const { llama_sampler_free(s); }
    };
    using sampler_chain = std::unique_ptr<llama_sampler, free_sampler>;

    sampler_chain greedy_;
    std::map<int32_t, sampler_chain> samplers_; // by sequence
};

// Loads the range; throws failure. The log of the library goes nowhere unless verbose.
std::unique_ptr<engine> open_engine(const engine_options &options);

// Says what is wrong with bytes that are no bundle.
[[noreturn]] void fail_bundle(const bb_config &config, byte_view bytes);

// helpers of the two implementations
llama_model_params model_params(const engine_options &options);
[[noreturn]] void fail_load(const std::string &path, int code, uint64_t file_bytes, std::string why);
std::string take_log_error(); // the first error line that the library logged since the last call, "" if none

} // namespace worker
