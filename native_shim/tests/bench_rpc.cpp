// The loop that bench_shards.py compares with, on upstream's library and nothing of ours: one process that prefills and
// decodes greedily, with its layers on servers of the RPC backend, or without servers all in this process.
//
//     bench_rpc MODEL.gguf THREADS CTX BATCH SEQS [HOST:PORT,... LAYERS,...]
//
// CTX counts the positions of all sequences, BATCH the tokens of a batch and of a micro-batch. Of each server LAYERS says
// how many layers it is given, in order; the last one is given the head too. Where they went is looked up before anything
// is answered, and is the first line of standard output. Then each line of standard input is a request and each line of
// standard output its answer, JSON both:
//
//     {"prefill": [ids], "batch": N}                         prefill, in batches of N tokens
//     {"decode": [[ids of sequence 0], ..], "steps": N, "group": N}   N tokens of each, after prefills that do not count;
//                                                            a batch has one token of each sequence of a group
//     -> {"seconds": S, "tokens": [[ids that were drawn for sequence 0], ..]}
//
// Any request may have "logits": FILE, to which the rows that tokens were drawn from are written, f32 as they are here.
// Ends with status 2 and a sentence on standard error.
//
// SPDX-License-Identifier: MIT
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"
#include "llama.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace {

using json = nlohmann::ordered_json;
using tokens = std::vector<llama_token>;

std::runtime_error error(const std::string &text) {
    return std::runtime_error(text);
}

int number(const std::string &text, const char *what, int least, int most) {
    const bool digits = !text.empty() && text.size() < 9 && text.find_first_not_of("0123456789") == std::string::npos;
    const int value = digits ? atoi(text.c_str()) : -1;
    if (value < least || value > most) {
        throw error(std::string(what) + " is '" + text + "', not a number from " + std::to_string(least) + " to " +
                    std::to_string(most));
    }
    return value;
}

std::vector<std::string> words(const std::string &text) {
    std::vector<std::string> found;
    std::istringstream stream(text);
    for (std::string word; std::getline(stream, word, ',');) {
        found.push_back(word);
    }
    return found;
}

// Which buffers the layers and the head are computed in, by the nodes of a graph: what matters is not what was asked for.
struct places {
    std::map<int, std::string> layers;
    std::string head;

    static bool look(ggml_tensor *t, bool ask, void *data) {
        auto *self = (places *)data;
        const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
        int layer = 0;
        if (ask && buffer && sscanf(t->name, "l_out-%d", &layer) == 1) {
            self->layers[layer] = ggml_backend_buffer_name(buffer);
        } else if (ask && buffer && std::string(t->name) == "result_output") {
            self->head = ggml_backend_buffer_name(buffer);
        }
        return !ask; // nothing is to be observed, and the computation goes on
    }
};

class loop {
public:
    explicit loop(const std::vector<std::string> &args) {
        threads_ = number(args[1], "THREADS", 1, 512);
        ctx_size_ = number(args[2], "CTX", 1, 1 << 24);
        batch_size_ = number(args[3], "BATCH", 1, 1 << 20);
        n_seq_ = number(args[4], "SEQS", 1, (int)std::min<size_t>(llama_max_parallel_sequences(), (size_t)batch_size_));
        if (args.size() == 7) {
            add_servers(words(args[5]), words(args[6]));
        }
        devices_.push_back(nullptr);
        llama_model_params params = llama_model_default_params();
        params.devices = devices_.data();
        params.n_gpu_layers = servers() ? 1 << 20 : 0;
        params.split_mode = LLAMA_SPLIT_MODE_LAYER;
        params.tensor_split = servers() ? split_.data() : nullptr;
        model_ = llama_model_load_from_file(args[0].c_str(), params);
        if (!model_) {
            throw error(args[0] + " cannot be loaded");
        }
        n_layer_ = llama_model_n_layer(model_);
        n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
        look();
        ctx_ = context(nullptr);
        make_pool();
        batch_ = llama_batch_init(batch_size_, 0, 1);
    }
    ~loop() {
        llama_batch_free(batch_);
        llama_sampler_free(greedy_);
        llama_free(ctx_);
        ggml_threadpool_free(pool_);
        llama_model_free(model_);
    }
    loop(const loop &) = delete;
    loop &operator=(const loop &) = delete;

    // the first line
    json found() const {
        json layers = json::array();
        for (const auto &[layer, place] : places_.layers) {
            layers.push_back(place);
        }
        return {{"layers", layers}, {"head", places_.head}, {"threads", threads_}};
    }

    json answer(const json &request) {
        logits_.close();
        if (request.contains("logits")) {
            logits_.open(request.at("logits").get<std::string>(), std::ios::binary | std::ios::trunc);
            if (!logits_) {
                throw error("the file for the logits cannot be written");
            }
        }
        llama_memory_clear(llama_get_memory(ctx_), true);
        drawn_.assign((size_t)n_seq_, {});
        position_.assign((size_t)n_seq_, 0);
        double seconds = 0;
        size_t n = 1;
        if (request.contains("prefill")) {
            seconds = prefill(0, request.at("prefill").get<tokens>(), request.at("batch").get<int>());
        } else {
            const auto prompts = request.at("decode").get<std::vector<tokens>>();
            n = prompts.size();
            seconds = decode(prompts, request.at("steps").get<int>(), request.at("group").get<int>());
        }
        logits_.flush();
        drawn_.resize(n);
        return {{"seconds", seconds}, {"tokens", drawn_}};
    }

private:
    bool servers() const { return devices_.size() > 1; }

    void add_servers(const std::vector<std::string> &endpoints, const std::vector<std::string> &layers) {
        if (endpoints.size() != layers.size()) {
            throw error(std::to_string(endpoints.size()) + " servers and " + std::to_string(layers.size()) +
                        " numbers of layers");
        }
        split_.assign(llama_max_devices(), 0.0f);
        for (size_t i = 0; i < endpoints.size(); i++) {
            ggml_backend_reg_t reg = ggml_backend_rpc_add_server(endpoints[i].c_str());
            if (!reg || ggml_backend_reg_dev_count(reg) != 1) {
                throw error("the server at " + endpoints[i] + " has not one device");
            }
            devices_.push_back(ggml_backend_reg_dev_get(reg, 0));
            layers_.push_back(number(layers[i], "LAYERS", 1, 100000));
            split_[i] = (float)layers_.back();
        }
        split_[endpoints.size() - 1] += 1; // the head counts as a layer
    }

    llama_context *context(places *seen) const {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = seen ? 256 : (uint32_t)ctx_size_;
        params.n_batch = params.n_ubatch = (uint32_t)batch_size_;
        params.n_seq_max = seen ? 1 : (uint32_t)n_seq_;
        params.n_threads = params.n_threads_batch = threads_;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.kv_unified = false;
        params.no_perf = true;
        // as in a shard worker; on servers the cells lie where the layers do
        params.offload_kqv = servers();
        params.op_offload = false;
        if (seen) {
            params.cb_eval = places::look;
            params.cb_eval_user_data = seen;
        }
        llama_context *made = llama_init_from_model(model_, params);
        if (!made) {
            throw error("no context of " + std::to_string(ctx_size_) + " positions could be made");
        }
        return made;
    }

    void look() {
        llama_context *once = context(&places_);
        llama_token token = 0;
        const int status = llama_decode(once, llama_batch_get_one(&token, 1));
        llama_free(once);
        if (status != 0 || (int)places_.layers.size() != n_layer_ || places_.head.empty()) {
            throw error("the graph does not tell where its " + std::to_string(n_layer_) + " layers are computed");
        }
        if (!servers()) {
            return;
        }
        int layer = 0;
        for (size_t i = 0; i < layers_.size(); i++) {
            const std::string wanted = ggml_backend_buft_name(ggml_backend_dev_buffer_type(devices_[i]));
            const bool last = i + 1 == layers_.size();
            for (int end = layer + layers_[i]; layer < end; layer++) {
                const auto place = places_.layers.find(layer);
                if (place == places_.layers.end() || place->second != wanted) {
                    throw error("layer " + std::to_string(layer) + " is to be on " + wanted + " and is on " +
                                (place == places_.layers.end() ? "none" : place->second));
                }
            }
            if (last && (places_.head != wanted || layer != n_layer_)) {
                throw error("the head is to be on " + wanted + " behind layer " + std::to_string(n_layer_) +
                            " and is on " + places_.head + " behind layer " + std::to_string(layer));
            }
        }
    }

    // As a shard worker has it (worker_engine.cpp): threads that sleep between graphs, one a processor where there is one
    // for each.
    void make_pool() {
        ggml_threadpool_params params = ggml_threadpool_params_default(threads_);
        params.poll = 0;
#ifdef __linux__
        cpu_set_t allowed;
        if (threads_ > 1 && sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) == threads_) {
            for (int i = 0; i < CPU_SETSIZE && i < GGML_MAX_N_THREADS; i++) {
                params.cpumask[i] = CPU_ISSET(i, &allowed);
            }
            params.strict_cpu = true;
        }
#endif
        pool_ = ggml_threadpool_new(&params);
        if (!pool_) {
            throw error("no pool of " + std::to_string(threads_) + " threads could be made");
        }
        llama_attach_threadpool(ctx_, pool_, pool_);
    }

    void add(llama_token token, int sequence, bool output) {
        if (token < 0 || token >= n_vocab_ || batch_.n_tokens >= batch_size_) {
            throw error("token " + std::to_string(token) + " is outside the vocabulary, or the batch is full");
        }
        const int i = batch_.n_tokens++;
        batch_.token[i] = token;
        batch_.pos[i] = position_[(size_t)sequence]++;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = sequence;
        batch_.logits[i] = output;
    }

    // runs the batch, and draws for each output; returns nothing before all of it is there
    void run(bool timed) {
        if (llama_decode(ctx_, batch_) != 0) {
            throw error("a batch of " + std::to_string(batch_.n_tokens) + " tokens was not computed");
        }
        for (int i = 0; i < batch_.n_tokens; i++) {
            if (!batch_.logits[i]) {
                continue;
            }
            if (timed && logits_.is_open()) {
                logits_.write((const char *)llama_get_logits_ith(ctx_, i), (std::streamsize)n_vocab_ * 4);
            }
            drawn_[(size_t)batch_.seq_id[i][0]].push_back(llama_sampler_sample(greedy_, ctx_, i));
        }
    }

    static double since(std::chrono::steady_clock::time_point began) {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    }

    double prefill(int sequence, const tokens &prompt, int size, bool timed = true) {
        if (size < 1 || prompt.empty()) {
            throw error("a prompt without tokens, or batches without any");
        }
        const auto began = std::chrono::steady_clock::now();
        for (size_t start = 0; start < prompt.size(); start += (size_t)size) {
            const size_t end = std::min(prompt.size(), start + (size_t)size);
            batch_.n_tokens = 0;
            for (size_t i = start; i < end; i++) {
                add(prompt[i], sequence, i + 1 == prompt.size());
            }
            run(timed);
        }
        return since(began);
    }

    double decode(const std::vector<tokens> &prompts, int steps, int group) {
        const int n = (int)prompts.size();
        if (n < 1 || n > n_seq_ || steps < 1 || group < 1) {
            throw error(std::to_string(n) + " sequences in groups of " + std::to_string(group) + ", " +
                        std::to_string(steps) + " steps");
        }
        tokens next;
        for (int s = 0; s < n; s++) {
            prefill(s, prompts[(size_t)s], batch_size_, false);
            next.push_back(drawn_[(size_t)s].back());
            drawn_[(size_t)s].clear();
        }
        const auto began = std::chrono::steady_clock::now();
        for (int step = 0; step < steps; step++) {
            for (int first = 0; first < n; first += group) {
                batch_.n_tokens = 0;
                const int end = std::min(n, first + group);
                for (int s = first; s < end; s++) {
                    add(next[(size_t)s], s, true);
                }
                run(true);
                for (int s = first; s < end; s++) {
                    next[(size_t)s] = drawn_[(size_t)s].back();
                }
            }
        }
        return since(began);
    }

    int threads_, ctx_size_, batch_size_, n_seq_, n_layer_ = 0, n_vocab_ = 0;
    std::vector<ggml_backend_dev_t> devices_; // ends with nullptr
    std::vector<int> layers_;
    std::vector<float> split_;
    places places_;
    llama_model *model_ = nullptr;
    llama_context *ctx_ = nullptr;
    ggml_threadpool_t pool_ = nullptr;
    llama_sampler *greedy_ = llama_sampler_init_greedy();
    llama_batch batch_ = {};
    std::vector<tokens> drawn_;
    std::vector<int> position_;
    std::ofstream logits_;
};

} // namespace

int main(int argc, char **argv) {
    try {
        const std::vector<std::string> args(argv + 1, argv + argc);
        if (args.size() != 5 && args.size() != 7) {
            throw error("usage: bench_rpc MODEL.gguf THREADS CTX BATCH SEQS [HOST:PORT,... LAYERS,...]");
        }
        llama_log_set(
            [](ggml_log_level level, const char *text, void *) {
                if (level == GGML_LOG_LEVEL_ERROR) {
                    fputs(text, stderr);
                }
            },
            nullptr);
        llama_backend_init();
        loop bench(args);
        std::cout << bench.found().dump() << std::endl;
        for (std::string line; std::getline(std::cin, line);) {
            std::cout << bench.answer(json::parse(line)).dump() << std::endl;
        }
    } catch (const std::exception &why) {
        fprintf(stderr, "bench_rpc: %s\n", why.what());
        return 2;
    }
    return 0;
}
