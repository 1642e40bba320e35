// certify: runs one model split at every legal cut and at every legal pair of cuts, and compares by bits.
//
//     certify PLAN MODEL ORACLE [DUMP]
//
// Compiled twice. With -DBB_UNPATCHED, on the library as upstream ships it, it is the oracle: it runs the settings of
// PLAN unsplit, each twice in a fresh context, and writes every output row to the file ORACLE. On the patched library it
// reads that file and compares. DUMP is a folder that gets, for every cut, the bundles of the first batches.
//
// Per setting, with B(a) the bundles that the shard [0, a) writes:
//   - the patched library without a range, and with the range [0, n), against the oracle;
//   - for every legal cut a: [a, n) fed with B(a) against the oracle;
//   - for every legal pair a < b: [a, b) fed with B(a) against B(b), all attributes but layer_start and all tensors.
// The last makes every three-way split exact too, without running it: [b, n) is given, by the shard [a, b), the very
// bytes from which it has made the oracle's logits (layer_start, which differs, is looked at by no shard).
//
// One JSON object a line on standard output; an abort of the library ends the process, and the lines before it tell how
// far it came. One thread, and so no pool that could spin.
//
// SPDX-License-Identifier: MIT
#include "boundary_bundle.h"

#include "ggml-backend.h"
#include "llama.h"
#include "llama-memory.h"

#ifndef BB_UNPATCHED
#include "llama-boundary.h"
#endif

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

#include <cxxabi.h>
#include <unistd.h>

namespace {

//
// text
//

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string
text(const char *format, ...) { // NOLINT(cert-dcl50-cpp): the compiler checks the arguments against the format
    char buffer[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    return buffer;
}

std::string quoted(const std::string &s) {
    std::string out = "\"";
    for (const char c : s) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if ((unsigned char)c < 32) {
            out += c == '\n' ? "\\n" : " ";
        } else {
            out += c;
        }
    }
    return out + '"';
}

void say(const std::string &line) {
    printf("%s\n", line.c_str());
    (void)fflush(stdout); // nobody is left to tell
}

[[noreturn]] void stop(const std::string &why) {
    fprintf(stderr, "certify: %s\n", why.c_str());
    exit(2);
}

// The library's first complaint since it was last taken: what it returns says only that there was one.
std::string complaint;

void on_log(ggml_log_level level, const char *line, void *) {
    static ggml_log_level current = GGML_LOG_LEVEL_NONE;
    static std::string pending;
    if (level != GGML_LOG_LEVEL_CONT) {
        current = level;
        pending.clear();
    }
    if (current != GGML_LOG_LEVEL_ERROR) {
        return;
    }
    for (const char *c = line; *c; c++) {
        if (*c != '\n') {
            pending += *c;
        } else {
            if (complaint.empty()) {
                complaint = pending;
            }
            pending.clear();
        }
    }
}

std::string take_complaint(const char *otherwise) {
    std::string taken = complaint.empty() ? otherwise : complaint;
    complaint.clear();
    return taken;
}

// Where the program is, for whoever reads why the library ended it. Only async-signal-safe calls.
char where[256] = "";

void say_end(const char *why) {
    const char *parts[] = {where, *where ? ": " : "", why, "\n"};
    for (const char *part : parts) {
        if (write(STDERR_FILENO, part, strlen(part)) < 0) {
            return; // there is nobody to tell
        }
    }
}

extern "C" void on_signal(int number) {
    say_end(number == SIGFPE ? "a division by zero" : "a fault in memory");
    signal(number, SIG_DFL);
    raise(number);
}

//
// the plan
//

struct batch {
    bool encode = false; // for the encoder of a model that has a decoder too
    std::vector<llama_token> token;
    std::vector<llama_pos> pos;
    std::vector<int8_t> output;
    std::vector<std::vector<llama_seq_id>> seqs; // of each token
};

struct setting {
    std::string name;
    bool refuse = false; // the library must refuse it
    bool dump = false;   // what crosses is written for Python to read the contract from
    bool embeddings = false;
    llama_context_params params;
    std::vector<batch> batches;
};

// A reader of words that says what is wrong where.
class words {
public:
    explicit words(const char *path) : path_(path), in_(path) {
        if (!in_) {
            stop(text("cannot read the plan %s", path));
        }
    }
    bool more() {
        in_ >> std::ws;
        return in_.peek() != EOF;
    }
    std::string word() {
        std::string w;
        if (!(in_ >> w)) {
            stop(text("%s ends too early, after %ld words", path_, count_));
        }
        count_++;
        return w;
    }
    void expect(const char *wanted) {
        const std::string w = word();
        if (w != wanted) {
            stop(text("%s: word %ld is '%s', expected '%s'", path_, count_, w.c_str(), wanted));
        }
    }
    int32_t number(int32_t least, int32_t most) {
        const std::string w = word();
        char *end = nullptr;
        const long value = strtol(w.c_str(), &end, 10);
        if (w.empty() || *end || value < least || value > most) {
            stop(text("%s: word %ld is '%s', not a number from %d to %d", path_, count_, w.c_str(), least, most));
        }
        return (int32_t)value;
    }
    int32_t field(const char *name, int32_t least, int32_t most) {
        expect(name);
        return number(least, most);
    }

private:
    const char *path_;
    std::ifstream in_;
    long count_ = 0;
};

ggml_type type_of(const std::string &name) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_F32}) {
        if (name == ggml_type_name(type)) {
            return type;
        }
    }
    stop(text("the plan has a type '%s', not f16, q8_0 or f32", name.c_str()));
}

std::vector<setting> read_plan(const char *path) {
    constexpr int32_t MOST = 1 << 20;
    words in(path);
    in.expect("boundary-bundle-plan");
    in.expect("1");
    std::vector<setting> plan;
    while (in.more()) {
        setting s;
        in.expect("setting");
        s.name = in.word();
        llama_context_params p = llama_context_default_params();
        p.n_ctx = (uint32_t)in.field("ctx", 1, MOST);
        p.n_batch = (uint32_t)in.field("batch", 1, MOST);
        p.n_ubatch = (uint32_t)in.field("ubatch", 1, MOST);
        p.n_seq_max = (uint32_t)in.field("seqs", 1, 64);
        p.kv_unified = in.field("unified", 0, 1);
        p.flash_attn_type = in.field("flash", 0, 1) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        in.expect("type_k");
        p.type_k = type_of(in.word());
        in.expect("type_v");
        p.type_v = type_of(in.word());
        p.swa_full = in.field("swa_full", 0, 1);
        p.embeddings = s.embeddings = in.field("embeddings", 0, 1);
        p.pooling_type = s.embeddings ? LLAMA_POOLING_TYPE_NONE : LLAMA_POOLING_TYPE_UNSPECIFIED;
        p.n_threads = p.n_threads_batch = 1;
        p.offload_kqv = false;
        p.op_offload = false;
        p.no_perf = true;
        s.params = p;
        s.refuse = in.field("refuse", 0, 1);
        s.dump = in.field("dump", 0, 1);
        const int32_t n_batches = in.field("batches", 0, MOST);
        for (int32_t i = 0; i < n_batches; i++) {
            batch b;
            const std::string kind = in.word();
            if (kind != "decode" && kind != "encode") {
                stop(text("%s: a batch is '%s', not decode or encode", path, kind.c_str()));
            }
            b.encode = kind == "encode";
            const int32_t n_tokens = in.number(1, MOST);
            for (int32_t k = 0; k < n_tokens; k++) {
                b.token.push_back(in.number(0, INT32_MAX));
                b.pos.push_back(in.number(0, MOST));
                b.output.push_back((int8_t)in.number(0, 1));
                std::vector<llama_seq_id> seqs((size_t)in.number(1, 64));
                for (llama_seq_id &seq : seqs) {
                    seq = in.number(0, 63);
                }
                b.seqs.push_back(std::move(seqs));
            }
            s.batches.push_back(std::move(b));
        }
        plan.push_back(std::move(s));
    }
    return plan;
}

//
// the library
//

struct free_model {
    void operator()(llama_model *m) const { llama_model_free(m); }
};
struct free_context {
    void operator()(llama_context *c) const { llama_free(c); }
};
using model_ptr = std::unique_ptr<llama_model, free_model>;
using context_ptr = std::unique_ptr<llama_context, free_context>;

// What cannot be done; the setting it happens in has failed.
using failure = std::runtime_error;

// A context that the library does not make.
struct no_context : failure {
    using failure::failure;
};

llama_model_params model_params() {
    static ggml_backend_dev_t no_devices[] = {nullptr};
    llama_model_params params = llama_model_default_params();
    params.devices = no_devices;
    params.n_gpu_layers = 0;
    return params;
}

model_ptr load(const char *path) {
    llama_model *model = llama_model_load_from_file(path, model_params());
    if (!model) {
        stop(text("cannot load %s: %s", path, take_complaint("no reason given").c_str()));
    }
    return model_ptr(model);
}

context_ptr context(llama_model *model, const setting &s) {
    complaint.clear();
    llama_context *ctx = llama_init_from_model(model, s.params);
    if (!ctx) {
        throw no_context(take_complaint("llama_init_from_model() gave no context and no reason"));
    }
    return context_ptr(ctx);
}

std::string memory_kind(llama_context *ctx) {
    const llama_memory_i *memory = llama_get_memory(ctx);
    if (!memory) {
        return "none";
    }
    int status = 0;
    char *name = abi::__cxa_demangle(typeid(*memory).name(), nullptr, nullptr, &status);
    const std::string kind = status == 0 ? name : typeid(*memory).name();
    free(name);
    return kind;
}

// The rows that one batch gave: logits of the selected tokens in the order of the batch, or embeddings of all.
struct rows {
    uint64_t n = 0, width = 0;
    std::vector<float> data;
};

uint64_t row_width(const llama_model *model, bool embeddings) {
    return (uint64_t)(embeddings ? llama_model_n_embd_out(model) : llama_vocab_n_tokens(llama_model_get_vocab(model)));
}

rows run_unsplit(const llama_model *model, llama_context *ctx, const setting &s, batch &b) {
    std::vector<int32_t> n_seq_id;
    std::vector<llama_seq_id *> seq_id;
    for (auto &seqs : b.seqs) {
        n_seq_id.push_back((int32_t)seqs.size());
        seq_id.push_back(seqs.data());
    }
    llama_batch lb = {};
    lb.n_tokens = (int32_t)b.token.size();
    lb.token = b.token.data();
    lb.pos = b.pos.data();
    lb.n_seq_id = n_seq_id.data();
    lb.seq_id = seq_id.data();
    lb.logits = b.output.data();
    complaint.clear();
    const int32_t status = b.encode ? llama_encode(ctx, lb) : llama_decode(ctx, lb);
    if (status != 0) {
        throw failure(text("%s() returned %d for a batch of %d tokens: %s", b.encode ? "llama_encode" : "llama_decode",
                           status, lb.n_tokens, take_complaint("no reason given").c_str()));
    }
    rows r;
    if (b.encode && llama_model_has_decoder(model)) {
        return r; // what the encoder gives stays in the context
    }
    r.n = (uint64_t)std::count(b.output.begin(), b.output.end(), 1);
    r.width = row_width(model, s.embeddings);
    if (r.n) {
        const float *data = s.embeddings ? llama_get_embeddings(ctx) : llama_get_logits(ctx);
        if (!data) {
            throw failure(text("the batch of %d tokens gave no %s", lb.n_tokens, s.embeddings ? "embeddings" : "logits"));
        }
        r.data.assign(data, data + r.n * r.width);
    }
    return r;
}

std::vector<rows> run_unsplit(llama_model *model, setting &s, std::string *memory) {
    snprintf(where, sizeof(where), "unsplit in setting %s", s.name.c_str());
    const context_ptr ctx = context(model, s);
    if (memory) {
        *memory = memory_kind(ctx.get());
    }
    std::vector<rows> all;
    all.reserve(s.batches.size());
    for (batch &b : s.batches) {
        all.push_back(run_unsplit(model, ctx.get(), s, b));
    }
    return all;
}

//
// the oracle's file: for each setting that ran the length of its name, the number of batches, the name, and for each
// batch the number of rows, their width, and the floats. The oracle appends, so that several of its runs make one file.
//

constexpr uint64_t MAX_ROWS_BYTES = 1ull << 32;

[[maybe_unused]] void write_rows(FILE *file, const std::string &name, const std::vector<rows> &all) {
    bool good = true;
    const auto put = [&](const void *data, size_t size) { good = good && (size == 0 || fwrite(data, size, 1, file) == 1); };
    const uint64_t head[2] = {name.size(), all.size()};
    put(head, sizeof(head));
    put(name.data(), name.size());
    for (const rows &r : all) {
        const uint64_t shape[2] = {r.n, r.width};
        put(shape, sizeof(shape));
        put(r.data.data(), r.data.size() * sizeof(float));
    }
    if (!good || fflush(file) != 0) {
        stop("cannot write the oracle's file");
    }
}

// The next record and its name; an empty name at the end.
[[maybe_unused]] std::string read_record(FILE *file, std::vector<rows> &all) {
    uint64_t head[2];
    all.clear();
    // NOLINTNEXTLINE(clang-analyzer-unix.Stream): the empty name ends the reading
    if (fread(head, sizeof(head), 1, file) != 1) {
        return "";
    }
    std::string name(head[0] < 1024 ? head[0] : 0, ' ');
    bool good = !name.empty() && fread(&name[0], name.size(), 1, file) == 1;
    for (uint64_t i = 0; good && i < head[1]; i++) {
        rows r;
        uint64_t shape[2];
        good = fread(shape, sizeof(shape), 1, file) == 1 && (!shape[1] || shape[0] <= MAX_ROWS_BYTES / 4 / shape[1]);
        if (good) {
            r.n = shape[0];
            r.width = shape[1];
            r.data.resize(r.n * r.width);
            good = r.data.empty() || fread(r.data.data(), r.data.size() * sizeof(float), 1, file) == 1;
        }
        all.push_back(std::move(r));
    }
    if (!good) {
        stop("the oracle's file is damaged");
    }
    return name;
}

// The record of that name; those before it are passed over.
[[maybe_unused]] void read_rows(FILE *file, const std::string &wanted, std::vector<rows> &all) {
    for (std::string name; name != wanted;) {
        name = read_record(file, all);
        if (name.empty()) {
            stop(text("the oracle's file has no rows of setting %s", wanted.c_str()));
        }
    }
}

FILE *open_file(const char *path, const char *mode) {
    FILE *file = fopen(path, mode);
    if (!file) {
        stop(text("cannot open %s", path));
    }
    return file;
}

#ifdef BB_UNPATCHED

//
// the oracle
//

uint64_t values_of(const std::vector<rows> &all) {
    uint64_t n = 0;
    for (const rows &r : all) {
        n += r.data.size();
    }
    return n;
}

void say_facts(llama_model *model) {
    char architecture[128] = "";
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof(architecture));
    setting least;
    least.params = llama_context_default_params();
    least.params.n_ctx = 256;
    least.params.n_batch = least.params.n_ubatch = 8;
    least.params.n_seq_max = 1;
    least.params.n_threads = least.params.n_threads_batch = 1;
    least.params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    std::string memory, why;
    try {
        memory = memory_kind(context(model, least).get());
    } catch (const failure &e) {
        why = e.what();
    }
    say(text("{\"event\": \"facts\", \"architecture\": %s, \"n_layer\": %d, \"n_vocab\": %d, \"n_ctx_train\": %d, ",
             quoted(architecture).c_str(), llama_model_n_layer(model),
             llama_vocab_n_tokens(llama_model_get_vocab(model)), llama_model_n_ctx_train(model)) +
        text("\"memory\": %s, \"no_context\": %s, ", quoted(memory).c_str(), quoted(why).c_str()) +
        text("\"encoder\": %d, \"decoder\": %d, \"recurrent\": %d, \"hybrid\": %d, \"diffusion\": %d, \"rope\": %d}",
             llama_model_has_encoder(model), llama_model_has_decoder(model), llama_model_is_recurrent(model),
             llama_model_is_hybrid(model), llama_model_is_diffusion(model), (int)llama_model_rope_type(model)));
}

int oracle(std::vector<setting> &plan, const char *path, const char *file_name) {
    model_ptr model = load(path);
    say_facts(model.get());
    FILE *file = open_file(file_name, "ab");
    for (setting &s : plan) {
        say(text("{\"event\": \"begin\", \"setting\": %s}", quoted(s.name).c_str()));
        const std::string head = text("{\"event\": \"setting\", \"setting\": %s, ", quoted(s.name).c_str());
        try {
            std::string memory;
            const std::vector<rows> all = run_unsplit(model.get(), s, &memory);
            const std::vector<rows> again = run_unsplit(model.get(), s, nullptr);
            uint64_t not_finite = 0, unlike = 0;
            std::set<float> seen;
            for (size_t k = 0; k < all.size(); k++) {
                for (size_t v = 0; v < all[k].data.size(); v++) {
                    not_finite += !std::isfinite(all[k].data[v]);
                    unlike += memcmp(&all[k].data[v], &again[k].data[v], sizeof(float)) != 0;
                    if (seen.size() < 1000) {
                        seen.insert(all[k].data[v]);
                    }
                }
            }
            write_rows(file, s.name, all);
            say(head + text("\"ok\": true, \"memory\": %s, \"values\": %" PRIu64 ", \"not_finite\": %" PRIu64
                            ", \"unlike\": %" PRIu64 ", \"distinct\": %zu}",
                            quoted(memory).c_str(), values_of(all), not_finite, unlike, seen.size()));
        } catch (const failure &e) {
            const bool stage = dynamic_cast<const no_context *>(&e) != nullptr;
            say(head + text("\"ok\": false, \"no_context\": %s, \"reason\": %s}", stage ? "true" : "false",
                            quoted(e.what()).c_str()));
        }
    }
    if (fclose(file) != 0) {
        stop("cannot write the oracle's file");
    }
    return 0;
}

#else

//
// shards
//

template <typename T> T ours() {
    T t{};
    t.size = sizeof(T);
    t.abi = LLAMA_BOUNDARY_ABI;
    return t;
}

using bytes = std::vector<uint8_t>;

bb_config codec;

bb_bundle decoded(const bytes &data, const std::string &what) {
    bb_bundle bundle;
    bb_error error;
    if (bb_decode(&codec, data.data(), data.size(), &bundle, &error) != BB_OK) {
        char sentence[400];
        bb_error_format(&error, sentence, sizeof(sentence));
        throw failure(what + " is no bundle: " + sentence);
    }
    return bundle;
}

// The models of all ranges that have been asked for; a refusal is kept as its reason.
class ranges {
public:
    explicit ranges(const char *path) : path_(path) {}

    struct entry {
        model_ptr model;
        int32_t status = 0;
        std::string message;
    };

    const entry &at(int32_t start, int32_t end) {
        const auto key = std::make_pair(start, end);
        auto found = entries_.find(key);
        if (found == entries_.end()) {
            auto range = ours<llama_layer_range>();
            range.start = start;
            range.end = end;
            auto error = ours<llama_boundary_error>();
            entry e;
            snprintf(where, sizeof(where), "loading [%d, %d)", start, end);
            e.model.reset(llama_model_load_layer_range(path_, model_params(), &range, &error));
            e.status = error.status;
            e.message = error.message;
            found = entries_.emplace(key, std::move(e)).first;
        }
        return found->second;
    }

    llama_model *model(int32_t start, int32_t end) {
        const entry &e = at(start, end);
        if (!e.model) {
            throw failure(text("layers [%d, %d) are not loaded: %s", start, end, e.message.c_str()));
        }
        return e.model.get();
    }

private:
    const char *path_;
    std::map<std::pair<int32_t, int32_t>, entry> entries_;
};

// What goes into the first shard.
bytes token_bundle(const llama_layer_ownership &own, const batch &b, uint64_t number) {
    const uint64_t n = b.token.size();
    std::vector<uint32_t> offsets{0}, ids;
    std::vector<uint8_t> outputs;
    std::set<uint32_t> distinct;
    for (uint64_t i = 0; i < n; i++) {
        for (const llama_seq_id seq : b.seqs[i]) {
            ids.push_back((uint32_t)seq);
            distinct.insert((uint32_t)seq);
        }
        offsets.push_back((uint32_t)ids.size());
        outputs.push_back(b.output[i] != 0);
    }
    const auto tensor = [](const char *name, uint8_t dtype, uint8_t axis, uint64_t dim, const void *data) {
        bb_tensor t = {};
        snprintf(t.name, sizeof(t.name), "%s", name);
        t.dtype = dtype;
        t.byte_order = BB_LITTLE;
        t.rank = 1;
        t.token_axis = axis;
        t.dims[0] = dim;
        t.data = data;
        return t;
    };
    const bb_tensor tensors[] = {
        tensor("token_ids", BB_I32, 0, n, b.token.data()),
        tensor("positions", BB_I32, 0, n, b.pos.data()),
        tensor("seq_offsets", BB_U32, BB_NO_TOKEN_AXIS, n + 1, offsets.data()),
        tensor("seq_ids", BB_U32, BB_NO_TOKEN_AXIS, ids.size(), ids.data()),
        tensor("outputs", BB_BOOL, 0, n, outputs.data()),
    };
    const bb_attr attributes[] = {
        {BB_KEY_ARCHITECTURE, BB_ATTR_TEXT, (uint32_t)strlen(own.architecture), own.architecture, 0},
        {BB_KEY_MODEL_FINGERPRINT, BB_ATTR_BYTES, sizeof(own.fingerprint), own.fingerprint, 0},
        {BB_KEY_LAYER_START, BB_ATTR_U64, 8, nullptr, 0},
        {BB_KEY_LAYER_END, BB_ATTR_U64, 8, nullptr, 0},
        {BB_KEY_N_LAYER, BB_ATTR_U64, 8, nullptr, (uint64_t)own.n_layer},
        {BB_KEY_N_TOKENS, BB_ATTR_U64, 8, nullptr, n},
        {BB_KEY_N_SEQS, BB_ATTR_U64, 8, nullptr, distinct.size()},
    };
    bb_desc desc = {};
    desc.number = number;
    desc.tensors = tensors;
    desc.tensor_count = sizeof(tensors) / sizeof(tensors[0]);
    desc.attrs = attributes;
    desc.attr_count = sizeof(attributes) / sizeof(attributes[0]);
    bb_error error;
    uint64_t size = 0;
    size_t written = 0;
    bytes data;
    bool good = bb_encoded_size(&codec, &desc, &size, &error) == BB_OK;
    if (good) {
        data.resize(size);
        good = bb_encode(&codec, &desc, data.data(), data.size(), &written, &error) == BB_OK;
    }
    if (!good) {
        char sentence[400];
        bb_error_format(&error, sentence, sizeof(sentence));
        throw failure(std::string("the first shard's bundle: ") + sentence);
    }
    return data;
}

// Runs one shard over all batches. sink(batch, bundle) gets what it writes, valid until it returns.
template <typename Sink>
void run_shard(ranges &all, int32_t start, int32_t end, const setting &s, const std::vector<bytes> &input, Sink sink) {
    const std::string who = text("shard [%d, %d)", start, end);
    snprintf(where, sizeof(where), "%s in setting %s", who.c_str(), s.name.c_str());
    llama_model *model = all.model(start, end);
    context_ptr ctx;
    try {
        ctx = context(model, s);
    } catch (const failure &e) {
        throw failure(who + " gets no context: " + e.what());
    }
    for (size_t i = 0; i < input.size(); i++) {
        auto error = ours<llama_boundary_error>();
        int32_t status = llama_boundary_decode(ctx.get(), input[i].data(), input[i].size(), &error);
        const void *data = nullptr;
        size_t size = 0;
        if (status == LLAMA_BOUNDARY_OK) {
            status = llama_boundary_output(ctx.get(), nullptr, &data, &size, &error);
        }
        if (status != LLAMA_BOUNDARY_OK) {
            throw failure(who + text(", batch %zu: error %d: %s", i, status, error.message));
        }
        sink(i, (const uint8_t *)data, size);
    }
}

//
// comparing
//

struct tally {
    uint64_t compared = 0, differing = 0;
    std::string first; // JSON of the first difference

    void differ(uint64_t n, const std::string &spot) {
        differing += n;
        if (first.empty()) {
            first = "{" + spot + "}";
        }
    }
    std::string json(const char *name) const {
        return text("\"%s_compared\": %" PRIu64 ", \"%s_differing\": %" PRIu64, name, compared, name, differing);
    }
};

std::string place(const char *what, int32_t start, int32_t end, size_t i) {
    return text("\"what\": \"%s\", \"range\": [%d, %d], \"batch\": %zu", what, start, end, i);
}

void compare_rows(tally &t, const std::string &spot, const rows &want, const float *found, uint64_t n, uint64_t width) {
    t.compared += want.data.size();
    if (n != want.n || (n && width != want.width)) {
        t.differ(std::max<uint64_t>(1, want.data.size()),
                 spot + text(", \"expected_shape\": [%" PRIu64 ", %" PRIu64 "], \"found_shape\": [%" PRIu64 ", %" PRIu64 "]",
                              want.n, want.width, n, width));
        return;
    }
    if (n == 0 || memcmp(want.data.data(), found, want.data.size() * sizeof(float)) == 0) {
        return;
    }
    uint64_t differing = 0, first = 0;
    for (uint64_t v = want.data.size(); v-- > 0;) {
        if (memcmp(&want.data[v], &found[v], sizeof(float)) != 0) {
            differing++;
            first = v;
        }
    }
    uint32_t bits[2];
    memcpy(&bits[0], &want.data[first], 4);
    memcpy(&bits[1], &found[first], 4);
    t.differ(differing, spot + text(", \"row\": %" PRIu64 ", \"index\": %" PRIu64
                                     ", \"expected_bits\": \"%08x\", \"found_bits\": \"%08x\"",
                                     first / width, first % width, bits[0], bits[1]));
}

// What the last shard gives: one f32 tensor [rows, width], logits or embeddings.
void compare_output(tally &t, const std::string &spot, const rows &want, const uint8_t *data, size_t size) {
    const bytes copy(data, data + size);
    const bb_bundle bundle = decoded(copy, "the last shard's output");
    bb_tensor out;
    if (bundle.tensor_count != 1 || bb_tensor_at(&bundle, 0, &out) != BB_OK || out.dtype != BB_F32 || out.rank != 2) {
        t.compared += want.data.size();
        t.differ(std::max<uint64_t>(1, want.data.size()), spot + ", \"tensor\": \"not one f32 tensor of rank 2\"");
        return;
    }
    std::vector<float> found(out.bytes / sizeof(float));
    bb_tensor_read(&bundle, 0, found.data(), out.bytes);
    compare_rows(t, spot, want, found.data(), out.dims[0], out.dims[1]);
}

uint64_t elements(const bb_tensor &t) {
    uint64_t n = 1;
    for (int d = 0; d < t.rank; d++) {
        n *= t.dims[d];
    }
    return n;
}

// Two bundles at the same cut, written by different shards.
void compare_bundles(tally &t, const std::string &spot, const bytes &want_bytes, const uint8_t *data, size_t size) {
    const bytes found_bytes(data, data + size);
    const bb_bundle want = decoded(want_bytes, "a first shard's output"), found = decoded(found_bytes, "a middle shard's output");
    const auto skipped = [](const bb_attr &a) {
        return a.key == BB_KEY_LAYER_START || a.key == BB_KEY_CONTRACT_FINGERPRINT;
    };
    std::vector<bb_attr> attributes[2];
    for (const bb_bundle *b : {&want, &found}) {
        for (uint32_t i = 0; i < b->attribute_count; i++) {
            bb_attr a;
            bb_attr_at(b, i, &a);
            if (!skipped(a)) {
                attributes[b == &found].push_back(a);
            }
        }
    }
    bool alike = attributes[0].size() == attributes[1].size() && want.number == found.number &&
                 want.tensor_count == found.tensor_count;
    for (size_t i = 0; alike && i < attributes[0].size(); i++) {
        const bb_attr &x = attributes[0][i], &y = attributes[1][i];
        alike = x.key == y.key && x.type == y.type && x.length == y.length && memcmp(x.value, y.value, x.length) == 0;
    }
    if (!alike) {
        t.differ(1, spot + ", \"tensor\": \"attributes or the number of tensors\"");
        return;
    }
    for (uint32_t i = 0; i < want.tensor_count; i++) {
        bb_tensor x, y;
        bb_tensor_at(&want, i, &x);
        bb_tensor_at(&found, i, &y);
        const uint64_t n = elements(x);
        t.compared += n;
        if (strcmp(x.name, y.name) != 0 || x.dtype != y.dtype || x.rank != y.rank || x.token_axis != y.token_axis ||
            memcmp(x.dims, y.dims, x.rank * sizeof(x.dims[0])) != 0) {
            t.differ(std::max<uint64_t>(1, n), where + text(", \"tensor\": \"%s\", \"found_tensor\": \"%s\"", x.name, y.name));
            continue;
        }
        bytes a(x.bytes), b(y.bytes);
        bb_tensor_read(&want, i, a.data(), a.size());
        bb_tensor_read(&found, i, b.data(), b.size());
        if (a == b) {
            continue;
        }
        const uint64_t each = n ? x.bytes / n : 1;
        uint64_t differing = 0, first = 0;
        for (uint64_t v = n; v-- > 0;) {
            if (memcmp(&a[v * each], &b[v * each], each) != 0) {
                differing++;
                first = v;
            }
        }
        t.differ(differing, where + text(", \"tensor\": \"%s\", \"index\": %" PRIu64, x.name, first));
    }
}

//
// one setting
//

// Bundles of the first batches of at most this many different sizes, for Python to read a contract from.
constexpr size_t DUMPED = 3;

void dump(const char *folder, int32_t cut, const setting &s, const std::vector<bytes> &bundles) {
    std::set<size_t> sizes;
    for (size_t i = 0; i < bundles.size() && sizes.size() < DUMPED; i++) {
        if (sizes.insert(s.batches[i].token.size()).second) {
            FILE *file = open_file(text("%s/cut-%d-%zu.bundle", folder, cut, sizes.size()).c_str(), "wb");
            const bool good = fwrite(bundles[i].data(), bundles[i].size(), 1, file) == 1;
            if (fclose(file) != 0 || !good) {
                stop(text("cannot write a bundle to %s", folder));
            }
        }
    }
}

struct result {
    tally logits, boundary;
    std::string failed;
    uint64_t tokens = 0;
    std::set<int32_t> bad_cuts; // whose logits differ
};

void certify_setting(ranges &shards, llama_model *whole, const std::vector<int32_t> &cuts, int32_t n_layer, setting &s,
                     const std::vector<rows> &want, const char *dump_folder, result &r) {
    if (want.size() != s.batches.size()) {
        throw failure(text("the oracle has %zu batches, the plan %zu", want.size(), s.batches.size()));
    }
    // without a range
    const std::vector<rows> unsplit = run_unsplit(whole, s, nullptr);
    for (size_t i = 0; i < unsplit.size(); i++) {
        r.tokens += s.batches[i].token.size();
        compare_rows(r.logits, place("no range", 0, n_layer, i), want[i], unsplit[i].data.data(), unsplit[i].n,
                     unsplit[i].width);
    }

    // what every first shard takes
    auto own = ours<llama_layer_ownership>();
    if (llama_model_layer_ownership(shards.model(0, n_layer), &own) != LLAMA_BOUNDARY_OK) {
        throw failure("the library does not say what it has loaded");
    }
    std::vector<bytes> input;
    input.reserve(s.batches.size());
    for (size_t i = 0; i < s.batches.size(); i++) {
        input.push_back(token_bundle(own, s.batches[i], i));
    }
    run_shard(shards, 0, n_layer, s, input, [&](size_t i, const uint8_t *data, size_t size) {
        compare_output(r.logits, place("whole range", 0, n_layer, i), want[i], data, size);
    });

    std::map<int32_t, std::vector<bytes>> crossing; // B(a)
    for (const int32_t a : cuts) {
        std::vector<bytes> &bundles = crossing[a];
        run_shard(shards, 0, a, s, input, [&](size_t, const uint8_t *data, size_t size) {
            bundles.emplace_back(data, data + size);
        });
        if (dump_folder) {
            dump(dump_folder, a, s, bundles);
        }
    }
    for (const int32_t a : cuts) {
        const uint64_t before = r.logits.differing;
        run_shard(shards, a, n_layer, s, crossing[a], [&](size_t i, const uint8_t *data, size_t size) {
            compare_output(r.logits, place("cut", a, n_layer, i), want[i], data, size);
        });
        if (r.logits.differing != before) {
            r.bad_cuts.insert(a);
        }
        for (const int32_t b : cuts) {
            if (a < b) {
                run_shard(shards, a, b, s, crossing[a], [&](size_t i, const uint8_t *data, size_t size) {
                    compare_bundles(r.boundary, place("pair", a, b, i), crossing[b][i], data, size);
                });
            }
        }
        crossing[a].clear(); // nothing after it needs it: b > a
        crossing[a].shrink_to_fit();
    }
}

// A setting that the unpatched library refuses must be refused by a shard, as a value.
std::string refusal(ranges &shards, int32_t start, int32_t end, const setting &s) {
    try {
        context(shards.model(start, end), s);
    } catch (const failure &e) {
        return e.what();
    }
    return "";
}

std::string list(const std::set<int32_t> &numbers) {
    std::string out = "[";
    for (const int32_t n : numbers) {
        out += (out.size() > 1 ? ", " : "") + std::to_string(n);
    }
    return out + "]";
}

int certify(std::vector<setting> &plan, const char *path, const char *file_name, const char *dump_folder) {
    bb_config_init(&codec);
    codec.limits.rank = 4;
    const model_ptr whole = load(path);
    const int32_t n_layer = llama_model_n_layer(whole.get());
    ranges shards(path);

    // which cuts there are is the library's to say
    const ranges::entry &full = shards.at(0, n_layer);
    std::string refused; // by name
    if (!full.model && full.status == LLAMA_BOUNDARY_ERROR_ARCHITECTURE) {
        refused = full.message;
    } else if (!full.model) {
        stop(text("layers [0, %d) are not loaded: %s", n_layer, full.message.c_str()));
    }
    std::vector<int32_t> cuts;
    std::string illegal, legal;
    for (int32_t a = 1; a < n_layer && full.model; a++) {
        const ranges::entry &head = shards.at(0, a), &tail = shards.at(a, n_layer);
        if (head.model && tail.model) {
            cuts.push_back(a);
            legal += (legal.empty() ? "" : ", ") + std::to_string(a);
        } else {
            const ranges::entry &e = head.model ? tail : head;
            if (!head.model && !tail.model && e.status == LLAMA_BOUNDARY_ERROR_ARCHITECTURE) {
                refused = e.message; // of all ranges: what is left is that the whole model runs as before
                break;
            }
            illegal += (illegal.empty() ? "" : ", ") +
                       text("{\"cut\": %d, \"status\": %d, \"head\": %s, \"tail\": %s, \"message\": ", a, e.status,
                            head.model ? "true" : "false", tail.model ? "true" : "false") +
                       quoted(e.message) + "}";
        }
    }
    std::string contracts; // of what the first range takes, of every cut, of what the last range gives
    std::vector<int32_t> places{0};
    places.insert(places.end(), cuts.begin(), cuts.end());
    places.push_back(n_layer);
    for (const int32_t a : places) {
        char contract[4096];
        const int32_t n = full.model ? llama_model_boundary_contract(full.model.get(), a, contract, sizeof(contract)) : -1;
        if (n >= 0 && (size_t)n < sizeof(contract)) {
            contracts += (contracts.empty() ? "" : ", ") + text("{\"cut\": %d, \"text\": ", a) + quoted(contract) + "}";
        }
    }

    // a range that begins or ends at an illegal cut is refused whatever its other end
    std::string accepted;
    for (int32_t a = 1; a < n_layer && full.model && refused.empty(); a++) {
        if (std::find(cuts.begin(), cuts.end(), a) != cuts.end()) {
            continue;
        }
        for (int32_t other = 0; other <= n_layer; other++) {
            const int32_t start = std::min(a, other), end = std::max(a, other);
            if (start < end && shards.at(start, end).model) {
                accepted += (accepted.empty() ? "" : ", ") + text("[%d, %d]", start, end);
            }
        }
    }
    say("{\"event\": \"cuts\", \"n_layer\": " + std::to_string(n_layer) + ", \"refused\": " + quoted(refused) +
        ", \"legal\": [" + legal + "], \"illegal\": [" + illegal + "], \"accepted\": [" + accepted +
        "], \"contracts\": [" + contracts + "]}");
    FILE *file = open_file(file_name, "rb");
    std::vector<rows> want;
    for (setting &s : plan) {
        say(text("{\"event\": \"begin\", \"setting\": %s}", quoted(s.name).c_str()));
        const std::string head = text("{\"event\": \"setting\", \"setting\": %s, ", quoted(s.name).c_str());
        if (s.refuse) {
            std::string first, last;
            if (!cuts.empty()) {
                first = refusal(shards, 0, cuts[0], s);
                last = refusal(shards, cuts[0], n_layer, s);
            }
            say(head + "\"refused\": " + (first.empty() || last.empty() ? "false" : "true") + ", \"reason\": " +
                quoted(first) + "}");
            continue;
        }
        read_rows(file, s.name, want);
        result r;
        try {
            if (refused.empty()) {
                certify_setting(shards, whole.get(), cuts, n_layer, s, want, s.dump ? dump_folder : nullptr, r);
            } else { // it must run as before without a range
                const std::vector<rows> unsplit = run_unsplit(whole.get(), s, nullptr);
                for (size_t k = 0; k < unsplit.size(); k++) {
                    compare_rows(r.logits, place("no range", 0, n_layer, k), want.at(k), unsplit[k].data.data(),
                                 unsplit[k].n, unsplit[k].width);
                }
            }
        } catch (const failure &e) {
            r.failed = e.what();
        }
        const std::string &first = !r.logits.first.empty() ? r.logits.first : r.boundary.first;
        say(head + r.logits.json("logits") + ", " + r.boundary.json("boundary") +
            text(", \"tokens\": %" PRIu64 ", \"bad_cuts\": %s, \"failed\": ", r.tokens, list(r.bad_cuts).c_str()) +
            quoted(r.failed) + ", \"first\": " + (first.empty() ? "null" : first) + "}");
    }
    (void)fclose(file); // it was only read
    return 0;
}

#endif

} // namespace

int main(int argc, char **argv) {
    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: certify PLAN MODEL ORACLE [DUMP]\n");
        return 2;
    }
    // An abort must not start a debugger. NOLINTNEXTLINE(concurrency-mt-unsafe): there is one thread yet
    setenv("GGML_NO_BACKTRACE", "1", 0);
    std::vector<setting> plan = read_plan(argv[1]);
    ggml_set_abort_callback(say_end);
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE}) {
        signal(number, on_signal);
    }
    llama_log_set(on_log, nullptr);
    llama_backend_init();
    int status = 2;
    try {
#ifdef BB_UNPATCHED
        status = oracle(plan, argv[2], argv[3]);
#else
        status = certify(plan, argv[2], argv[3], argc > 4 ? argv[4] : nullptr);
#endif
    } catch (const std::exception &e) {
        fprintf(stderr, "certify: %s\n", e.what());
    }
    llama_backend_free();
    return status;
}
