// SPDX-License-Identifier: MIT
#include "worker_engine.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "load_mode.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif
#include <sys/stat.h>
#include <unistd.h>

namespace worker {

const char *code_name(int code) {
    switch (code) {
    case CODE_ARGUMENT: return "argument";
    case CODE_RANGE: return "range";
    case CODE_ARCHITECTURE: return "architecture";
    case CODE_LOAD: return "load";
    case CODE_BUNDLE: return "bundle";
    case CODE_CONTRACT: return "contract";
    case CODE_POSITION: return "position";
    case CODE_LIMIT: return "limit";
    case CODE_FULL: return "full";
    case CODE_COMPUTE: return "compute";
    case CODE_STATE: return "state";
    case CODE_SESSION: return "session";
    case CODE_PROTOCOL: return "protocol";
    case CODE_JSON: return "json";
    case CODE_FRAME: return "frame";
    case CODE_NO_MEMORY: return "no_memory";
    case CODE_LINK: return "link";
    default: return "unknown";
    }
}

const char *outcome_name(int outcome) {
    switch (outcome) {
    case OUTCOME_HIT: return "hit";
    case OUTCOME_MISS: return "miss";
    case OUTCOME_EVICTED: return "evicted";
    case OUTCOME_STALE_EPOCH: return "stale_epoch";
    case OUTCOME_INCOMPATIBLE_RECIPE: return "incompatible_recipe";
    case OUTCOME_POSITION_MISMATCH: return "position_mismatch";
    case OUTCOME_FULL: return "full";
    case OUTCOME_CANNOT_TRUNCATE: return "cannot_truncate";
    case OUTCOME_BUSY: return "busy";
    default: return "unknown";
    }
}

void fail(int code, const char *format, ...) { // NOLINT(cert-dcl50-cpp): see the header
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    throw failure(code, text);
}

void fail_bundle(const bb_config &config, byte_view bytes) {
    bb_bundle view;
    bb_error error = {};
    const int status = bb_decode(&config, bytes.data, bytes.size, &view, &error);
    if (status < BB_TRUNCATED) {
        fail(CODE_BUNDLE, "the bundle of %zu bytes was refused", bytes.size);
    }
    char sentence[500];
    bb_error_format(&error, sentence, sizeof(sentence));
    failure f(CODE_BUNDLE, sentence);
    f.bundle_error = bb_error_name(status);
    f.offset = error.offset;
    throw failure(std::move(f));
}

std::string reason(int error) {
    return std::generic_category().message(error);
}

uint64_t now_us() {
    const auto t = std::chrono::steady_clock::now().time_since_epoch();
    return (uint64_t)std::chrono::duration_cast<std::chrono::microseconds>(t).count();
}

std::string hex(const uint8_t *bytes, size_t size) {
    const char *digits = "0123456789abcdef";
    std::string text;
    for (size_t i = 0; i < size; i++) {
        text += digits[bytes[i] >> 4];
        text += digits[bytes[i] & 15];
    }
    return text;
}

//
// the library's log: the first error is kept for messages (later ones say that something failed), the rest is dropped
//

namespace {

struct library_log {
    std::mutex mutex;
    std::string line;
    std::string error;
    ggml_log_level level = GGML_LOG_LEVEL_NONE;
    bool verbose = false;
};

library_log &the_log() {
    static auto *log = new library_log; // never destroyed: threads may still log while the process ends
    return *log;
}

void on_log(ggml_log_level level, const char *text, void *) {
    library_log &log = the_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    if (log.verbose) {
        fputs(text, stderr);
    }
    if (level != GGML_LOG_LEVEL_CONT) {
        log.line.clear();
        log.level = level;
    }
    if (log.level != GGML_LOG_LEVEL_ERROR) {
        return;
    }
    // a line ends where its text does: one within comes from a name in the file
    log.line += text;
    if (!log.line.empty() && log.line.back() == '\n') {
        log.line.pop_back();
        if (log.error.empty()) {
            log.error = log.line;
        }
        log.line.clear();
    }
}

} // namespace

std::string take_log_error() {
    library_log &log = the_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    std::string error;
    error.swap(log.error);
    return error;
}

//
// loading
//

llama_model_params model_params(const engine_options &options) {
    {
        library_log &log = the_log();
        std::lock_guard<std::mutex> lock(log.mutex);
        log.verbose = options.verbose;
    }
    // an abort must not start a debugger
    setenv("GGML_NO_BACKTRACE", "1", 0); // NOLINT(concurrency-mt-unsafe): no thread of ours reads the environment
    llama_log_set(on_log, nullptr);
    llama_backend_init();

    static ggml_backend_dev_t no_devices[] = {nullptr};
    llama_model_params params = llama_model_default_params();
    params.devices = no_devices;
    params.n_gpu_layers = 0;
    set_load_mode(params, options.mmap, options.mlock);
    return params;
}

// The library's sentence, with what it leaves out: which file, and of how many bytes.
void fail_load(const std::string &path, int code, uint64_t file_bytes, std::string why) {
    const std::string logged = take_log_error();
    if (why.empty() || (why.find("failed to load model from") != std::string::npos && !logged.empty())) {
        why = logged; // the reason, where the exception only says that there is one
    }
    for (size_t colon = why.find(": "); colon != std::string::npos; colon = why.find(": ")) {
        const std::string start = why.substr(0, colon); // the function that complained
        if (start != "error loading model" && start.find_first_of(" .'") != std::string::npos) {
            break;
        }
        why.erase(0, colon + 2);
    }
    why.erase(why.find_last_not_of(" \n") + 1);
    if (why.find(path) == std::string::npos) {
        why = path + " (" + std::to_string(file_bytes) + " bytes): " + (why.empty() ? "cannot be loaded" : why);
    }
    throw failure(code, std::move(why));
}

// Threads of a graph wait for each other by spinning. When two of them are woken on the same processor, each has to wait
// until the scheduler takes it from the other, at every node of the graph: a token then takes a hundred times as long, and
// a thread that has just slept, as in a worker whose turn has come, is woken there often. With a thread for every
// processor that we may use, each gets its own. With fewer, the scheduler has room and a fixed place would only be in the
// way of other workers.
static void pin_threads(ggml_threadpool_params &pool) {
#ifdef __linux__
    cpu_set_t allowed;
    if (pool.n_threads < 2 || sched_getaffinity(0, sizeof(allowed), &allowed) != 0 ||
        CPU_COUNT(&allowed) != pool.n_threads) {
        return;
    }
    for (int i = 0; i < CPU_SETSIZE && i < GGML_MAX_N_THREADS; i++) {
        pool.cpumask[i] = CPU_ISSET(i, &allowed);
    }
    pool.strict_cpu = true;
#else
    (void)pool;
#endif
}

static int usable_processors() {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
        return CPU_COUNT(&allowed);
    }
#endif
    return (int)std::thread::hardware_concurrency(); // 0: unknown
}

// Heads begin anywhere in a row of the cache, so each must be whole blocks.
void engine::check_head_size(const char *option, ggml_type type, const char *key) const {
    const std::string name = facts_.architecture + ".attention." + key;
    char text[32];
    int64_t size = 0;
    if (llama_model_meta_val_str(model_, name.c_str(), text, sizeof(text)) > 0) {
        size = strtoll(text, nullptr, 10);
    } else if (llama_model_n_head(model_) > 0) {
        size = llama_model_n_embd(model_) / llama_model_n_head(model_);
    }
    if (size % ggml_blck_size(type) != 0) {
        fail(CODE_ARGUMENT, "%s %s has blocks of %lld values, which do not divide the head size %lld of this model",
             option, ggml_type_name(type), (long long)ggml_blck_size(type), (long long)size);
    }
}

// What the library would answer with an assertion.
static engine_options checked(engine_options options) {
    const uint32_t tokens = std::min(options.ctx, options.batch); // of the largest batch
    if (options.seqs > tokens) {
        fail(CODE_ARGUMENT,
             "--seqs %u is more than the %u tokens of a batch (--batch %u, --ctx %u): one of each sequence must find "
             "room in it",
             options.seqs, tokens, options.batch, options.ctx);
    }
    if (ggml_is_quantized(options.type_v) && !options.flash_attn) {
        fail(CODE_ARGUMENT, "--type-v %s needs --flash-attn on", ggml_type_name(options.type_v));
    }
    return options;
}

engine::engine(const engine_options &options) : options_(checked(options)), files_(options.path) {}

void engine::start() {
    const engine_options &o = options_;
    check_head_size("--type-k", o.type_k, "key_length");
    check_head_size("--type-v", o.type_v, "value_length");

    llama_context_params params = llama_context_default_params();
    params.n_ctx = o.ctx;
    params.n_batch = o.batch;
    params.n_ubatch = o.ubatch;
    params.n_seq_max = o.seqs;
    params.n_threads = o.threads;
    params.n_threads_batch = o.threads;
    params.flash_attn_type = o.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = o.type_k;
    params.type_v = o.type_v;
    params.kv_unified = o.kv_unified;
    params.swa_full = o.swa_full;
    params.offload_kqv = false;
    params.op_offload = false;
    params.no_perf = true;
    take_log_error();
    ctx_ = llama_init_from_model(model_, params);
    if (!ctx_) {
        const std::string why = take_log_error();
        fail(CODE_LOAD, "no context of %u positions, batch %u, micro-batch %u, %u sequences could be made%s%s", o.ctx,
             o.batch, o.ubatch, o.seqs, why.empty() ? "" : ": ", why.c_str());
    }

    // A pool of our own: without one the library makes and ends threads for every graph, and its default polling keeps
    // them spinning, which takes the cores from the worker whose turn it is.
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : nullptr;
    if (!reg) {
        fail(CODE_LOAD, "the library has no CPU backend");
    }
    auto pool_new =
        (decltype(&ggml_threadpool_new))ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new");
    pool_free_ = (decltype(&ggml_threadpool_free))ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free");
    if (!pool_new || !pool_free_) {
        fail(CODE_LOAD, "the CPU backend gives no thread pool");
    }
    const int processors = usable_processors();
    if (processors > 0 && o.threads > processors) {
        fprintf(stderr,
                "shard_worker: warning: %d threads on %d processors: they wait for each other, and a token can take a "
                "hundred times as long\n",
                o.threads, processors);
    }
    ggml_threadpool_params pool = ggml_threadpool_params_default(o.threads);
    pool.poll = std::max(o.poll, 1u); // awake() says when they spin
    if (o.pin) {
        pin_threads(pool);
    }
    pool_ = pool_new(&pool);
    if (!pool_) {
        fail(CODE_LOAD, "no pool of %d threads could be made", o.threads);
    }
    if (o.poll == 0) { // and not from the beginning, since then this thread would not get its processor
        ggml_threadpool_pause(pool_);
    }
    llama_attach_threadpool(ctx_, pool_, pool_);
    llama_set_abort_callback(ctx_, on_node, this); // called after each node of a graph

    greedy_.reset(llama_sampler_init_greedy());
}

// A sleeping thread takes tens of microseconds to come, so the pool's are called before a batch is read and not when its
// graph begins; they spin until then, and while the graphs of the batch follow each other.
engine::awake::awake(engine &engine)
    : pool_(engine.options_.poll == 0 && engine.options_.threads > 1 ? engine.pool_ : nullptr) {
    if (pool_) {
        ggml_threadpool_resume(pool_);
    }
}

engine::awake::~awake() {
    if (pool_) {
        ggml_threadpool_pause(pool_);
    }
}

void engine::when_nearly_over(std::function<void()> what) {
    nearly_over_ = std::move(what);
    nodes_ = 0;
}

bool engine::on_node(void *engine) {
    auto &self = *(worker::engine *)engine;
    if (++self.nodes_ == self.nearly_at_ && self.nearly_over_) {
        self.nearly_over_();
    }
    return false; // go on
}

void engine::has_computed(uint64_t us) {
    const auto left = (uint64_t)NEARLY_OVER.count();
    nearly_at_ = nodes_ - (us > left ? nodes_ * left / us : nodes_);
}

engine::~engine() {
    if (ctx_) {
        llama_free(ctx_);
    }
    if (pool_) {
        pool_free_(pool_);
    }
    if (model_) {
        llama_model_free(model_);
    }
}

//
// the first token
//

namespace {

// Finite numbers, not all alike.
float any_number(size_t i) {
    return (float)(i * 37 % 64) / 32.0f - 1.0f;
}

// How many elements a dimension of a contract has for one token in one sequence: a number, or a name, which counts one,
// and perhaps a number more.
uint64_t elements(const std::string &dim) {
    if (dim[0] >= '0' && dim[0] <= '9') {
        return strtoull(dim.c_str(), nullptr, 10);
    }
    const size_t plus = dim.find('+');
    return 1 + (plus == std::string::npos ? 0 : strtoull(dim.c_str() + plus + 1, nullptr, 10));
}

} // namespace

// Weights of a type that the library cannot compute with, or a hyper-parameter that it asserts on when it does, are found
// here and not by the first who asks. That there is an answer is what matters, not which.
void engine::warm_up() {
    const std::vector<crossing_tensor> rules = contract(false);
    std::vector<bb_tensor> records;
    std::vector<std::vector<uint8_t>> payloads;
    for (const crossing_tensor &rule : rules) {
        bb_tensor t = {};
        snprintf(t.name, sizeof(t.name), "%s", rule.name.c_str());
        t.dtype = (uint8_t)bb_dtype_from_name(rule.dtype.c_str());
        t.byte_order = BB_LITTLE;
        t.rank = (uint8_t)rule.shape.size();
        t.token_axis = rule.token_axis < 0 ? BB_NO_TOKEN_AXIS : (uint8_t)rule.token_axis;
        uint64_t n = 1;
        for (size_t i = 0; i < rule.shape.size(); i++) {
            n *= t.dims[i] = elements(rule.shape[i]);
        }
        std::vector<uint8_t> bytes(n * bb_dtype_block_bytes(t.dtype));
        if (t.dtype == BB_F32) {
            for (size_t i = 0; i < n; i++) {
                const float value = any_number(i);
                memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value));
            }
        } else if (rule.name == "outputs") {
            bytes[0] = 1;
        } else if (rule.name == "seq_offsets") {
            const uint32_t end = 1; // of the sequences of the one token
            memcpy(bytes.data() + sizeof(end), &end, sizeof(end));
        }
        payloads.push_back(std::move(bytes));
        t.data = payloads.back().data();
        records.push_back(t);
    }
    if (records.empty()) {
        return; // of an architecture that is no boundary's
    }

    std::vector<bb_attr> attributes;
    const auto text = [&](uint16_t key, uint8_t type, const void *value, size_t length) {
        attributes.push_back({key, type, (uint32_t)length, value, 0});
    };
    const auto number = [&](uint16_t key, uint64_t value) { attributes.push_back({key, BB_ATTR_U64, 8, nullptr, value}); };
    std::vector<uint8_t> fingerprint;
    for (size_t i = 0; i + 1 < facts_.fingerprint.size(); i += 2) {
        fingerprint.push_back((uint8_t)strtoul(facts_.fingerprint.substr(i, 2).c_str(), nullptr, 16));
    }
    text(BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, facts_.architecture.data(), facts_.architecture.size());
    if (!fingerprint.empty()) {
        text(BB_KEY_MODEL_FINGERPRINT, BB_ATTR_BYTES, fingerprint.data(), fingerprint.size());
    }
    number(BB_KEY_LAYER_START, 0);
    number(BB_KEY_LAYER_END, (uint64_t)facts_.layer_start);
    number(BB_KEY_N_LAYER, (uint64_t)facts_.n_layer);
    number(BB_KEY_N_TOKENS, 1);
    number(BB_KEY_N_SEQS, 1);

    bb_desc desc = {};
    desc.tensors = records.data();
    desc.tensor_count = (uint32_t)records.size();
    desc.attrs = attributes.data();
    desc.attr_count = (uint32_t)attributes.size();
    bb_config config;
    bb_config_init(&config);
    uint64_t size = 0;
    size_t written = 0;
    if (bb_encoded_size(&config, &desc, &size, nullptr) != BB_OK) {
        return;
    }
    std::vector<uint8_t> bytes(size);
    bb_encode(&config, &desc, bytes.data(), bytes.size(), &written, nullptr);
    try {
        decode({bytes.data(), written}, false);
    } catch (const failure &) { // NOLINT(bugprone-empty-catch): so will the first request, and be told why
    }
    clear();
    llama_perf_context_reset(ctx_);
}

//
// services
//

void engine::check_files() const {
    if (options_.mmap) {
        files_.check_unchanged();
    }
}

llama_token engine::sample(int32_t index, int32_t sequence) {
    const auto found = samplers_.find(sequence);
    return llama_sampler_sample(found == samplers_.end() ? greedy_.get() : found->second.get(), ctx_, index);
}

// In the order of llama.cpp's own programs.
void engine::set_sampler(int32_t sequence, const sampling &how, const std::vector<llama_token> &history) {
    if (sequence < 0 || (uint32_t)sequence >= n_seq_max()) {
        fail(CODE_LIMIT, "sequence %d: this worker has sequences 0 to %u", sequence, n_seq_max() - 1);
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    for (const llama_token token : history) {
        if (token < 0 || token >= n_vocab) {
            fail(CODE_ARGUMENT, "token %d is outside the vocabulary of %d tokens", token, n_vocab);
        }
    }
    sampler_chain chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    const auto add = [&](llama_sampler *s) {
        if (!s) {
            throw std::bad_alloc();
        }
        llama_sampler_chain_add(chain.get(), s);
    };
    if (how.repeat_penalty != 1.0f && how.repeat_last_n > 0) {
        add(llama_sampler_init_penalties(how.repeat_last_n, how.repeat_penalty, 0.0f, 0.0f));
    }
    if (how.temperature > 0.0f) {
        if (how.top_k > 0) {
            add(llama_sampler_init_top_k(how.top_k));
        }
        if (how.top_p < 1.0f) {
            add(llama_sampler_init_top_p(how.top_p, 1));
        }
        if (how.min_p > 0.0f) {
            add(llama_sampler_init_min_p(how.min_p, 1));
        }
        add(llama_sampler_init_temp(how.temperature));
        add(llama_sampler_init_dist(how.seed));
    } else {
        add(llama_sampler_init_greedy());
    }
    for (const llama_token token : history) {
        llama_sampler_accept(chain.get(), token);
    }
    samplers_[sequence] = std::move(chain);
}

void engine::clear() {
    samplers_.clear();
    // with the data: what masked cells hold must not matter, and a NaN there would
    llama_memory_clear(llama_get_memory(ctx_), true);
}

void engine::clear(int32_t sequence, int32_t from) {
    if (sequence < 0 || (uint32_t)sequence >= n_seq_max()) {
        fail(CODE_LIMIT, "sequence %d: this worker has sequences 0 to %u", sequence, n_seq_max() - 1);
    }
    if (!llama_memory_seq_rm(llama_get_memory(ctx_), sequence, from, -1)) {
        fail(CODE_POSITION, "sequence %d cannot be cut at position %d with this model's memory", sequence, from);
    }
    if (from == 0) {
        samplers_.erase(sequence);
    }
    forget_if_empty();
}

// A cut leaves the bytes of the cells, and a NaN in a cell that is masked still reaches the sum over all cells.
void engine::forget_if_empty() {
    llama_memory_t memory = llama_get_memory(ctx_);
    for (uint32_t s = 0; s < n_seq_max(); s++) {
        if (llama_memory_seq_pos_max(memory, (llama_seq_id)s) >= 0) {
            return;
        }
    }
    llama_memory_clear(memory, true);
}

bool engine::has_vocabulary() const {
    return llama_vocab_type(llama_model_get_vocab(model_)) != LLAMA_VOCAB_TYPE_NONE;
}

namespace {

// Calls `work` on a stack of so many bytes, which take memory as they are touched.
void with_stack(size_t bytes, const std::function<void()> &work) {
    struct call {
        const std::function<void()> &work; // cppcheck-suppress[uninitMemberVarNoCtor] a reference has none
        std::exception_ptr thrown;
    } made = {work, nullptr};
    const auto begin = [](void *argument) -> void * {
        call &c = *(call *)argument;
        try {
            c.work();
        } catch (...) {
            c.thrown = std::current_exception();
        }
        return nullptr;
    };
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) {
        throw std::bad_alloc();
    }
    const bool started = pthread_attr_setstacksize(&attributes, bytes) == 0 &&
                         pthread_create(&thread, &attributes, begin, &made) == 0;
    pthread_attr_destroy(&attributes);
    if (!started) {
        throw std::bad_alloc();
    }
    pthread_join(thread, nullptr);
    if (made.thrown) {
        std::rethrow_exception(made.thrown);
    }
}

// The library splits a text by std::regex, which calls itself for every character of a run: 320 bytes each, whatever the
// vocabulary's expressions are. A main thread's stack is full after 26,000.
constexpr size_t STACK_PER_BYTE = 512;
constexpr size_t STACK_BESIDE = 1u << 20; // and a whole number of pages

} // namespace

std::vector<llama_token> engine::tokenize(const std::string &text, bool add_special, bool parse_special) const {
    if (text.size() > MAX_TOKENIZED) {
        fail(CODE_LIMIT, "a text to tokenize has %zu bytes, over the limit of %zu", text.size(), MAX_TOKENIZED);
    }
    const llama_vocab *vocab = llama_model_get_vocab(model_);
    std::vector<llama_token> tokens(text.size() + 8);
    int32_t n = 0;
    const auto run = [&] {
        n = llama_tokenize(vocab, text.data(), (int32_t)text.size(), tokens.data(), (int32_t)tokens.size(), add_special,
                           parse_special);
        if (n < 0 && n != INT32_MIN) {
            tokens.resize((size_t)-n);
            n = llama_tokenize(vocab, text.data(), (int32_t)text.size(), tokens.data(), (int32_t)tokens.size(),
                               add_special, parse_special);
        }
    };
    with_stack(STACK_BESIDE + (text.size() * STACK_PER_BYTE & ~(size_t)0xFFFF), run);
    if (n < 0) {
        fail(CODE_LIMIT, "a text of %zu bytes gives too many tokens", text.size());
    }
    tokens.resize((size_t)n);
    return tokens;
}

std::string engine::piece(llama_token token) const {
    const llama_vocab *vocab = llama_model_get_vocab(model_);
    if (token < 0 || token >= llama_vocab_n_tokens(vocab)) {
        fail(CODE_ARGUMENT, "token %d is outside the vocabulary of %d tokens", token, llama_vocab_n_tokens(vocab));
    }
    std::string text(64, '\0');
    int32_t n = llama_token_to_piece(vocab, token, &text[0], (int32_t)text.size(), 0, true);
    if (n < 0) {
        text.resize((size_t)-n);
        n = llama_token_to_piece(vocab, token, &text[0], (int32_t)text.size(), 0, true);
    }
    text.resize(n < 0 ? 0 : (size_t)n);
    return text;
}

std::vector<llama_token> engine::end_tokens() const {
    std::vector<llama_token> tokens;
    if (has_vocabulary()) {
        const llama_vocab *vocab = llama_model_get_vocab(model_);
        for (llama_token t = 0; t < llama_vocab_n_tokens(vocab); t++) {
            if (llama_vocab_is_eog(vocab, t)) {
                tokens.push_back(t);
            }
        }
    }
    return tokens;
}

} // namespace worker
