// SPDX-License-Identifier: MIT
#include "worker_service.h"

#include "worker_json.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <new>
#include <utility>

#include <unistd.h>

namespace worker {

namespace {

constexpr int MAJOR = 1;
constexpr int MINORS[] = {0, 1, 2};
constexpr int MINOR_SESSIONS = 1; // brought them
constexpr int MINOR_FLOWS = 2;    // and samplers

// resident set of this process; 0 where there is no /proc
uint64_t resident_bytes() {
    uint64_t total = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

const char *const known_types[] = {nullptr, "hello",    "describe",   "decode", "statistics", "clear",
                                   "shutdown", "tokenize", "detokenize", "open", "truncate",   "release",
                                   "pin",      "evict",    "sessions",   "save", "restore",    "link",
                                   "sampler"};

} // namespace

// An element of a list of tokens.
static llama_token token_of(const json &token, const char *list) {
    if (!token.is_number_unsigned() || token.get<uint64_t>() > INT32_MAX) {
        fail(CODE_ARGUMENT, "%s holds %s, not a token id", list, shown(token).c_str());
    }
    return (llama_token)token.get<uint64_t>();
}

struct service::reply {
    json text = json::object();
    byte_view bundle;
    std::optional<flow_head> flow; // that it belongs to: before the last worker no reply, but a request of the next one
};

service::service(engine &engine, const session_options &sessions, uint64_t max_bundle, request_queue &queue,
                 std::function<void(const std::shared_ptr<connection> &)> read)
    : engine_(engine), max_bundle_(max_bundle), sessions_(engine, sessions, max_bundle), links_(queue, std::move(read)),
      started_us_(now_us()) {
    bb_config_init(&config_);
    queue.while_announced([this] { get_ready(); });
}

void service::connection_gone(const connection &who, moment when) {
    sessions_.connection_gone(who, when);
    links_.connection_gone(who);
}

// Who is told what has come of a request: over a link nothing goes back.
const std::shared_ptr<connection> &service::hearer(const request &r) {
    return links_.is_previous(*r.from) ? links_.previous()->driver : r.from;
}

std::string error_text(const failure &f) {
    json text = {{"code", f.code}, {"name", code_name(f.code)}, {"message", f.message}};
    if (!f.bundle_error.empty()) {
        text["bundle_error"] = f.bundle_error;
        text["offset"] = f.offset;
    }
    if (f.session) {
        const session_result &s = *f.session;
        text["outcome"] = outcome_name(s.outcome);
        text["session"] = s.id ? json(hex(s.id->data(), s.id->size())) : json(nullptr);
        text["epoch"] = s.epoch;
        text["position"] = s.n_pos < 0 ? json(nullptr) : json(s.n_pos);
        if (!s.ingredient.empty()) {
            text["ingredient"] = s.ingredient;
        }
    } else if (f.code == CODE_FULL) {
        text["outcome"] = outcome_name(OUTCOME_FULL);
    }
    if (f.of_link) {
        text["link"] = "previous";
    }
    if (f.code == CODE_PROTOCOL) {
        text["major"] = MAJOR;
        text["minors"] = MINORS;
    }
    return text.dump(-1, ' ', true, json::error_handler_t::replace);
}

void service::send_error(connection &to, uint64_t id, const failure &f) {
    counters_.errors++;
    to.send(TYPE_ERROR | TYPE_REPLY, id, error_text(f), nullptr, 0);
}

int service::code_of(const request &refused) {
    switch (refused.what) {
    case request::IDLE: return CODE_LIMIT;
    case request::NO_MEMORY: return CODE_NO_MEMORY;
    default: return CODE_FRAME;
    }
}

void service::refuse(const request &r) {
    counters_.requests++;
    failure why(code_of(r), r.text);
    why.of_link = links_.is_previous(*r.from);
    send_error(*hearer(r), 0, why);
}

bool service::answer(request &r) {
    counters_.requests++;
    const std::shared_ptr<connection> to = hearer(r); // a copy: the request may be the one that ends the link
    bool done = false;
    try {
        reply reply = handle(r);
        if (reply.flow && !engine_.facts().last()) {
            pass_on(r.id, *reply.flow, reply.bundle);
        } else {
            std::string text = text_of(reply.text);
            if (reply.flow) {
                text.insert(text.size() - 1, ",\"stages\":" + reply.flow->stages_json());
            }
            to->send(r.type | TYPE_REPLY, r.id, text, reply.bundle.data, reply.bundle.size);
        }
        done = r.type == TYPE_SHUTDOWN;
    } catch (const failure &f) {
        send_error(*to, r.id, f);
    } catch (const std::bad_alloc &) {
        send_error(*to, r.id, failure(CODE_NO_MEMORY, "there is no memory for the request or its answer"));
    } catch (const std::exception &e) {
        send_error(*to, r.id, failure(CODE_COMPUTE, std::string("the request failed: ") + e.what()));
    }
    if (r.in_ring && links_.is_previous(*r.from)) {
        if (!head_.learnt()) {
            head_.learn(config_, {r.in_place.data, r.in_place.size});
        }
        links_.previous()->ring->give_back(r.in_ring);
    }
    r.from->answered();
    busy_until_us_ = now_us();
    return done;
}

std::string service::text_of(const json &object) {
    std::string text = object.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > MAX_TEXT) {
        fail(CODE_LIMIT, "the answer would have a text of %zu bytes, over the limit of %u", text.size(), MAX_TEXT);
    }
    return text;
}

service::reply service::handle(request &r) {
    if (r.from->minor < 0 && r.type != TYPE_HELLO) {
        fail(CODE_PROTOCOL, "a message of type %u came before hello", r.type);
    }
    if (r.type == 0 || r.type > TYPE_SAMPLER) {
        fail(CODE_PROTOCOL, "there is no request of type %u", r.type);
    }
    const int since = r.type >= TYPE_LINK ? MINOR_FLOWS : r.type >= TYPE_OPEN ? MINOR_SESSIONS : 0;
    if (since > 0 && r.from->minor < since) {
        fail(CODE_PROTOCOL, "%s needs version %d.%d, and hello settled on %d.%d", known_types[r.type], MAJOR, since, MAJOR,
             r.from->minor);
    }
    if (r.type != TYPE_DECODE && links_.is_previous(*r.from)) {
        fail(CODE_PROTOCOL, "%s came over a link, which is for decode alone", known_types[r.type]);
    }
    if (r.type != TYPE_LINK && !r.descriptors.empty()) {
        fail(CODE_ARGUMENT, "%s takes no descriptors and came with %zu", known_types[r.type], r.descriptors.size());
    }
    if (r.type != TYPE_DECODE && !r.bundle.empty()) { // nor one in place: over a link comes decode alone
        fail(CODE_ARGUMENT, "%s takes no bundle and came with one of %zu bytes", known_types[r.type], r.bundle.size());
    }
    switch (r.type) {
    case TYPE_HELLO: return hello(r);
    case TYPE_DESCRIBE: return describe(r);
    case TYPE_DECODE: return decode(r);
    case TYPE_STATISTICS: parse(r.text); return statistics();
    case TYPE_CLEAR: return clear(r);
    case TYPE_LINK: return link(r);
    case TYPE_SAMPLER: return sampler(r);
    case TYPE_SHUTDOWN: parse(r.text); return {};
    case TYPE_TOKENIZE:
    case TYPE_DETOKENIZE:
        if (!has_text_services()) {
            fail(CODE_PROTOCOL, "there is no %s at a worker of layers %d to %d of %d: the first and the last have it",
                 known_types[r.type], engine_.facts().layer_start, engine_.facts().layer_end, engine_.facts().n_layer);
        }
        return r.type == TYPE_TOKENIZE ? tokenize(r) : detokenize(r);
    default: return {sessions_.answer(r), {}, std::nullopt};
    }
}

//
// hello, describe, statistics, clear
//

service::reply service::hello(const request &r) {
    const json object = parse(r.text);
    const uint64_t major = number(object, "major", UINT64_MAX, UINT32_MAX);
    const auto minors = object.find("minors");
    if (major == UINT64_MAX || minors == object.end() || !minors->is_array()) {
        fail(CODE_ARGUMENT, "hello needs major, a number, and minors, a list of numbers");
    }
    if (major != MAJOR) {
        fail(CODE_PROTOCOL, "no common version: this worker speaks major %d, the other side %" PRIu64, MAJOR, major);
    }
    int best = -1;
    for (const json &theirs : *minors) {
        if (!theirs.is_number_unsigned()) {
            fail(CODE_ARGUMENT, "minors holds %s, not a number", shown(theirs).c_str());
        }
        for (const int mine : MINORS) {
            if (theirs.get<uint64_t>() == (uint64_t)mine) {
                best = std::max(best, mine);
            }
        }
    }
    if (best < 0) {
        fail(CODE_PROTOCOL, "no common version: this worker speaks %d.%d, the other side %d.x with x in %s", MAJOR,
             MINORS[0], MAJOR, shown(*minors).c_str());
    }
    r.from->minor = best;
    reply reply;
    reply.text = {{"major", MAJOR},         {"minor", best},
                  {"software", "boundary-bundle shard_worker"},
                  {"abi", engine_.abi()},   {"patched", engine_.patched()},
                  {"pid", (int64_t)getpid()}};
    return reply;
}

service::reply service::describe(const request &r) {
    const bool with_tensors = flag(parse(r.text), "tensors", false);
    const model_facts &f = engine_.facts();
    const engine_options &o = engine_.options();

    const auto contract = [&](bool behind) {
        json list = json::array();
        for (const crossing_tensor &t : engine_.contract(behind)) {
            json shape = json::array();
            for (const std::string &dim : t.shape) {
                const bool number = dim.find_first_not_of("0123456789") == std::string::npos;
                shape.push_back(number ? json(std::stoll(dim)) : json(dim));
            }
            list.push_back({{"name", t.name},
                            {"dtype", t.dtype},
                            {"shape", shape},
                            {"token_axis", t.token_axis < 0 ? json(nullptr) : json(t.token_axis)}});
        }
        return list;
    };

    reply reply;
    json &text = reply.text;
    text = {
        {"path", o.path},
        {"architecture", f.architecture},
        {"n_layer", f.n_layer},
        {"layer_start", f.layer_start},
        {"layer_end", f.layer_end},
        {"n_embd", f.n_embd},
        {"n_vocab", f.n_vocab},
        {"has_tok_embd", f.has_tok_embd},
        {"has_out_norm", f.has_out_norm},
        {"has_output", f.has_output},
        {"weight_bytes", f.weight_bytes},
        {"n_params", f.n_params},
        {"resident_bytes", resident_bytes()},
        {"n_ctx", engine_.n_ctx()},
        {"n_batch", engine_.n_batch()},
        {"n_ubatch", engine_.n_ubatch()},
        {"n_seq_max", engine_.n_seq_max()},
        {"n_threads", o.threads},
        {"flash_attn", o.flash_attn},
        {"kv_unified", o.kv_unified},
        {"swa_full", o.swa_full},
        {"type_k", ggml_type_name(o.type_k)},
        {"type_v", ggml_type_name(o.type_v)},
        {"patched", engine_.patched()},
        {"eos", engine_.end_tokens()},
        {"contract", {{"in", contract(false)}, {"out", contract(true)}}},
    };
    if (f.tied >= 0) {
        text["tied"] = f.tied != 0;
    }
    if (f.n_tensors >= 0) {
        text["n_tensors"] = f.n_tensors;
    }
    if (!f.fingerprint.empty()) {
        text["fingerprint"] = f.fingerprint;
    }
    if (engine_.kv_bytes() >= 0) {
        text["kv_bytes"] = engine_.kv_bytes();
    }
    if (const session_table *table = engine_.sessions()) {
        for (const bool shared : {true, false}) {
            const recipe_part part = table->recipe(shared);
            text["recipe"][shared ? "shared" : "range"] = {{"text", part.text}, {"fingerprint", part.fingerprint}};
        }
    }
    if (with_tensors && f.n_tensors >= 0) {
        json list = json::array();
        for (const tensor_facts &t : engine_.tensors()) {
            list.push_back(
                {{"name", t.name}, {"type", t.type}, {"layer", t.layer}, {"shape", t.shape}, {"bytes", t.bytes}});
        }
        text["tensors"] = std::move(list);
    }
    return reply;
}

service::reply service::statistics() {
    reply reply;
    reply.text = {
        {"requests", counters_.requests},
        {"errors", counters_.errors},
        {"tokens", counters_.tokens},
        {"compute_us", counters_.compute_us},
        {"decode_us", counters_.decode_us},
        {"encode_us", counters_.encode_us},
        {"bundle_bytes_in", counters_.bundle_bytes_in},
        {"bundle_bytes_out", counters_.bundle_bytes_out},
        {"answers_again", counters_.answers_again},
        {"flows", counters_.flows},
        {"resident_bytes", resident_bytes()},
        {"graphs_reused", engine_.graphs_reused()},
        {"uptime_ms", (now_us() - started_us_) / 1000},
    };
    if (engine_.kv_bytes() >= 0) {
        reply.text["kv_bytes"] = engine_.kv_bytes();
    }
    return reply;
}

service::reply service::clear(const request &r) {
    const json object = parse(r.text);
    if (!object.contains("sequence")) {
        if (object.contains("from")) {
            fail(CODE_ARGUMENT, "clear has from and no sequence");
        }
        engine_.clear();
        sessions_.forget_all();
        return {};
    }
    const uint64_t sequence = number(object, "sequence", 0, INT32_MAX);
    const uint64_t from = number(object, "from", 0, INT32_MAX);
    engine_.clear((int32_t)sequence, (int32_t)from);
    return {};
}

//
// links and flows
//

service::reply service::link(request &r) {
    const std::string to = need_text(parse(r.text), "to");
    const bool next = to == "next";
    if (!next && to != "previous") {
        fail(CODE_ARGUMENT, "to is %s, not \"next\" or \"previous\"", shown(to).c_str());
    }
    const model_facts &f = engine_.facts();
    if (next ? f.last() : f.first()) {
        fail(CODE_RANGE, "a worker of layers %d to %d of %d has no %s one", f.layer_start, f.layer_end, f.n_layer,
             next ? "next" : "previous");
    }
    if (r.descriptors.empty()) {
        links_.close(next);
        return {};
    }
    links_.open(next, r.from, std::move(r.descriptors));
    if (!next) {
        links_.previous()->peer->minor = MINORS[std::size(MINORS) - 1]; // which the driver has found out
    }
    return {};
}

// How long the message was under way: until this worker had it in hand, but for the time in which it had others in hand.
flow_head::stage service::arrived(const flow_head &flow, const request &r) const {
    flow_head::stage stage;
    stage.layer_start = (uint32_t)engine_.facts().layer_start;
    stage.layer_end = (uint32_t)engine_.facts().layer_end;
    const uint64_t start = now_us();
    const uint64_t sent = flow.sent_us ? flow.sent_us : start;
    const auto came_us = (uint64_t)std::chrono::duration_cast<std::chrono::microseconds>(r.came.time_since_epoch()).count();
    const uint64_t came = r.in_ring ? sent : came_us; // into a ring at once
    stage.wait_us = busy_until_us_ > came ? busy_until_us_ - came : 0;
    const uint64_t under_way = start > sent ? start - sent : 0;
    stage.transfer_us = under_way > stage.wait_us ? under_way - stage.wait_us : 0;
    return stage;
}

// The bundle of the last batch, to the next worker.
void service::pass_on(uint64_t id, flow_head &flow, byte_view bundle) {
    const link_end &next = *links_.next();
    flow.sent_us = now_us();
    const std::string text = flow.bytes();
    bool taken = false;
    if (next.ring) {
        const uint64_t at = bundle_in_ring(text.size()), bytes = at + bundle.size;
        if (bytes > next.ring->capacity()) {
            fail(CODE_LIMIT, "a message of %" PRIu64 " bytes does not fit in the %" PRIu64 " of the link's memory", bytes,
                 next.ring->capacity());
        }
        const auto until = std::chrono::steady_clock::now() + next.peer->limits().of(bytes);
        if (uint8_t *room = next.ring->reserve(bytes, until, [&] { return next.peer->connected(); })) {
            write_header(room, TYPE_DECODE, id, text.size(), bundle.size);
            std::copy(text.begin(), text.end(), room + HEADER_BYTES);
            memcpy(room + at, bundle.data, bundle.size);
            next.ring->written();
            taken = true;
        }
    } else {
        taken = next.peer->send(TYPE_DECODE, id, text, bundle.data, bundle.size);
    }
    if (!taken) {
        links_.close(true);
        fail(CODE_LINK, "the next worker does not take the batch: it is not passed on, and its positions are held");
    }
}

//
// samplers
//

service::reply service::sampler(const request &r) {
    const json object = parse(r.text);
    const auto sequence = (int32_t)need_number(object, "sequence", INT32_MAX);
    if (!engine_.facts().last()) {
        fail(CODE_RANGE, "a worker of layers %d to %d of %d samples nothing: the last one does",
             engine_.facts().layer_start, engine_.facts().layer_end, engine_.facts().n_layer);
    }
    sampling s;
    s.temperature = real(object, "temperature", s.temperature, 0, 1000);
    s.top_k = (int32_t)number(object, "top_k", (uint64_t)s.top_k, INT32_MAX);
    s.top_p = real(object, "top_p", s.top_p, 0, 1);
    s.min_p = real(object, "min_p", s.min_p, 0, 1);
    s.repeat_penalty = real(object, "repeat_penalty", s.repeat_penalty, 0.001f, 1000);
    s.repeat_last_n = (int32_t)number(object, "repeat_last_n", (uint64_t)s.repeat_last_n, 1 << 20);
    s.seed = (uint32_t)number(object, "seed", s.seed, UINT32_MAX);
    std::vector<llama_token> history;
    const auto found = object.find("history");
    if (found != object.end()) {
        if (!found->is_array()) {
            fail(CODE_ARGUMENT, "history is %s, not a list of tokens", shown(*found).c_str());
        }
        for (const json &token : *found) {
            history.push_back(token_of(token, "history"));
        }
    }
    engine_.set_sampler(sequence, s, history);
    return {};
}

//
// decode
//

namespace {

// Tokens that the batch selects. Needs the payload, so the whole bundle is decoded; 0 when it is not sound.
uint64_t selected_tokens(const bb_config &config, byte_view bytes) {
    bb_bundle view;
    bb_tensor t;
    if (bb_decode(&config, bytes.data, bytes.size, &view, nullptr) != BB_OK) {
        return 0;
    }
    const int index = bb_tensor_find(&view, "outputs", &t);
    std::vector<uint8_t> selected(index >= 0 && t.dtype == BB_BOOL ? t.bytes : 0);
    if (!selected.empty()) {
        bb_tensor_read(&view, (uint32_t)index, selected.data(), selected.size());
    }
    return (uint64_t)std::count(selected.begin(), selected.end(), 1);
}

// The first sequence of each token of a sound bundle.
std::vector<int32_t> first_sequences(const bb_config &config, byte_view bytes) {
    bb_bundle view;
    bb_tensor offsets_tensor, ids_tensor;
    if (bb_decode(&config, bytes.data, bytes.size, &view, nullptr) != BB_OK) {
        return {};
    }
    const int offsets_at = bb_tensor_find(&view, "seq_offsets", &offsets_tensor);
    const int ids_at = bb_tensor_find(&view, "seq_ids", &ids_tensor);
    if (offsets_at < 0 || ids_at < 0) {
        return {};
    }
    std::vector<uint32_t> offsets(offsets_tensor.bytes / sizeof(uint32_t)), ids(ids_tensor.bytes / sizeof(uint32_t));
    bb_tensor_read(&view, (uint32_t)offsets_at, offsets.data(), offsets.size() * sizeof(uint32_t));
    bb_tensor_read(&view, (uint32_t)ids_at, ids.data(), ids.size() * sizeof(uint32_t));
    std::vector<int32_t> first;
    for (size_t t = 0; t + 1 < offsets.size(); t++) {
        first.push_back(offsets[t] < ids.size() ? (int32_t)ids[offsets[t]] : 0);
    }
    return first;
}

} // namespace

// An output that cannot be sent is refused before anything is computed, since afterwards the state would have changed.
void service::check_output_size(byte_view bytes, const bb_bundle &head, const layout &layout, uint64_t n_tokens) const {
    const model_facts &f = engine_.facts();
    uint64_t fragments = 0, size = 0;
    const auto add = [&](uint64_t tensor_bytes) {
        const uint64_t unit = layout.fragment_size ? layout.fragment_size : std::max<uint64_t>(tensor_bytes, 1);
        const uint64_t n = tensor_bytes / unit + (tensor_bytes % unit != 0);
        fragments += n;
        size += tensor_bytes + n * (BB_HEADER_BYTES + BB_ALIGNMENT);
    };
    const auto fits = [&] { return fragments <= config_.limits.fragments && size <= max_bundle_; };
    const uint64_t beside = 4096; // head, end and what else is small

    if (f.last()) {
        // the number of tokens is a bound and is known from the head
        for (const bool exact : {false, true}) {
            const uint64_t rows = exact ? selected_tokens(config_, bytes) : n_tokens;
            fragments = 0;
            size = beside;
            add(rows * (uint64_t)f.n_vocab * sizeof(float));
            if (fits()) {
                return;
            }
        }
    } else {
        const uint64_t stream = n_tokens * (uint64_t)f.n_embd * sizeof(float);
        if (layout.fragment_size == 0 && stream + bytes.size + beside <= max_bundle_) {
            return; // what is counted beside it came in with this bundle
        }
        size = beside;
        add(stream);
        for (const char *name : {"positions", "seq_offsets", "seq_ids", "outputs",
                                 "session_ids", "session_epochs", "session_positions"}) {
            bb_tensor t;
            add(bb_tensor_find(&head, name, &t) >= 0 ? t.bytes : 0);
        }
        if (fits()) {
            return;
        }
    }
    fail(CODE_LIMIT,
         "the output bundle would have about %" PRIu64 " bytes in %" PRIu64 " fragments, over the limit of %" PRIu64
         " bytes or %" PRIu64 " fragments",
         size, fragments, max_bundle_, config_.limits.fragments);
}

static decode_wishes wishes_of(const json &object) {
    decode_wishes wishes;
    wishes.layout.fragment_size = number(object, "fragment_size", 0, INT64_MAX);
    wishes.layout.checksums = flag(object, "checksums", true);
    wishes.logits = flag(object, "logits", false);
    wishes.sample = flag(object, "sample", true);
    const auto order = object.find("byte_order");
    if (order != object.end()) {
        if (*order != "little" && *order != "big") {
            fail(CODE_ARGUMENT, "byte_order is %s, not \"little\" or \"big\"", shown(*order).c_str());
        }
        wishes.layout.big_endian = *order == "big";
    }
    return wishes;
}

// While a batch that has been announced is waited for: what can be done for it before it comes.
void service::get_ready() {
    try {
        engine_.check_files();
        checked_us_ = now_us();
    } catch (const std::exception &) { // NOLINT(bugprone-empty-catch): the batch will be told
    }
    // The computing of others has driven out of the processor's caches what a batch is decoded with. A rehearsal brings it
    // back.
    engine_.rehearse(head_.impossible());
}

service::reply service::decode(request &r) {
    const bool linked = links_.is_previous(*r.from);
    const bool last = engine_.facts().last();
    std::optional<flow_head> flow;
    decode_wishes wishes;
    if (linked) {
        flow = flow_of(r.text);
        if (flow->stages.size() > (size_t)engine_.facts().layer_start) {
            fail(CODE_ARGUMENT, "a batch comes from %zu workers before layer %d", flow->stages.size(),
                 engine_.facts().layer_start);
        }
        wishes = flow->wishes;
    } else {
        const json object = parse(r.text);
        wishes = wishes_of(object);
        if (flag(object, "flow", false)) {
            flow.emplace();
            flow->wishes = wishes;
        }
    }
    const layout &layout = wishes.layout;
    if (layout.fragment_size % BB_ALIGNMENT != 0 || layout.fragment_size > INT64_MAX) {
        fail(CODE_ARGUMENT, "fragment_size is %" PRIu64 ", not a multiple of %d", layout.fragment_size, BB_ALIGNMENT);
    }
    if (flow && r.from->minor < MINOR_FLOWS) {
        fail(CODE_PROTOCOL, "a flow needs version %d.%d, and hello settled on %d.%d", MAJOR, MINOR_FLOWS, MAJOR,
             r.from->minor);
    }
    if (flow && !last && !links_.next()) {
        fail(CODE_LINK, "a flow cannot go on: there is no link to a next worker");
    }
    flow_head::stage stage;
    if (flow) {
        stage = arrived(*flow, r);
        counters_.flows++;
    }
    std::optional<engine::awake> awake(std::in_place, engine_);
    const uint8_t nothing = 0; // a bundle of no bytes is cut short like any other, not a bad call
    const byte_view bytes = r.in_ring             ? byte_view{r.in_place.data, r.in_place.size}
                            : r.bundle.empty() ? byte_view{&nothing, 0}
                                               : byte_view{r.bundle.data(), r.bundle.size()};
    const bb_bundle head = head_.of(config_, bytes);
    const bool under_sessions = bb_tensor_find(&head, "session_ids", nullptr) >= 0;
    if (under_sessions && r.from->minor < MINOR_SESSIONS) {
        fail(CODE_PROTOCOL, "a session table needs version %d.%d, and hello settled on %d.%d", MAJOR, MINOR_SESSIONS,
             MAJOR, r.from->minor);
    }
    if (under_sessions && flow) {
        fail(CODE_ARGUMENT, "a flow takes no session table");
    }
    if (const kept_answer *again = under_sessions ? sessions_.answer_again(wishes, r.bundle) : nullptr) {
        counters_.answers_again++;
        counters_.bundle_bytes_in += r.bundle.size();
        counters_.bundle_bytes_out += again->bundle.size();
        return {again->text, {again->bundle.data(), again->bundle.size()}, std::nullopt};
    }
    bb_attr count = {};
    bb_attr_find(&head, BB_KEY_N_TOKENS, &count);
    const uint64_t n_tokens = std::min<uint64_t>(count.u64, UINT32_MAX); // the engine knows the real limit
    const bool with_bundle = !last || wishes.logits;
    if (with_bundle && n_tokens <= engine_.n_batch()) {
        check_output_size(bytes, head, layout, n_tokens);
    }

    timings times;
    try {
        if (checked_us_ + 1000 < now_us()) { // not a moment ago, before the batch came
            engine_.check_files();
        }
        engine_.when_nearly_over(flow && !last ? [this] { links_.announce(); } : std::function<void()>());
        times = engine_.decode(bytes, under_sessions);
        awake.reset();
        if (flow && !last) {
            links_.announce();
        }
        engine_.check_files(); // what was computed is not sent if they have changed meanwhile, nor anything after it
    } catch (const failure &f) {
        if (under_sessions && engine_.sessions() && f.code != CODE_SESSION) {
            sessions_.batch_failed();
        }
        throw;
    }
    uint64_t compute_us = times.compute_us;

    reply reply;
    if (last && wishes.sample) {
        const uint64_t point = now_us();
        const std::vector<int32_t> sequences =
            engine_.has_samplers() ? first_sequences(config_, bytes) : std::vector<int32_t>();
        std::vector<llama_token> sampled;
        for (const int32_t index : engine_.outputs()) {
            sampled.push_back(engine_.sample(index, (size_t)index < sequences.size() ? sequences[(size_t)index] : -1));
        }
        reply.text["sampled"] = sampled;
        compute_us += now_us() - point;
    }
    uint64_t encode_us = 0;
    if (with_bundle) {
        const uint64_t point = now_us();
        reply.bundle = engine_.output(layout);
        encode_us = now_us() - point;
    }
    if (flow) {
        stage.decode_us = times.decode_us;
        stage.compute_us = compute_us;
        stage.encode_us = encode_us;
        stage.bytes = reply.bundle.size;
        flow->stages.push_back(stage);
        reply.flow = std::move(flow);
    }
    if (!reply.flow || last) {
        reply.text["n_tokens"] = n_tokens;
        reply.text["decode_us"] = times.decode_us;
        reply.text["compute_us"] = compute_us;
        reply.text["encode_us"] = encode_us;
    }

    counters_.tokens += n_tokens;
    counters_.decode_us += times.decode_us;
    counters_.compute_us += compute_us;
    counters_.encode_us += encode_us;
    counters_.bundle_bytes_in += bytes.size;
    counters_.bundle_bytes_out += reply.bundle.size;
    if (under_sessions) {
        try {
            sessions_.keep_answer(wishes, std::move(r.bundle), reply.text, reply.bundle);
        } catch (const std::bad_alloc &) {
            sessions_.forget_answers(); // which take memory themselves; this one is sent all the same
        }
    }
    return reply;
}

//
// text
//

bool service::has_text_services() const {
    return engine_.facts().first() || engine_.facts().last();
}

service::reply service::tokenize(const request &r) {
    const json object = parse(r.text);
    const bool add_special = flag(object, "add_special", true);
    const bool parse_special = flag(object, "parse_special", true);
    const auto found = object.find("text");
    if (found == object.end() || !found->is_string()) {
        fail(CODE_ARGUMENT, "tokenize needs text, a string");
    }
    if (!engine_.has_vocabulary()) {
        fail(CODE_STATE, "the model has no vocabulary");
    }
    reply reply;
    reply.text["tokens"] = engine_.tokenize(found->get<std::string>(), add_special, parse_special);
    return reply;
}

service::reply service::detokenize(const request &r) {
    const json object = parse(r.text);
    const auto found = object.find("tokens");
    if (found == object.end() || !found->is_array()) {
        fail(CODE_ARGUMENT, "detokenize needs tokens, a list of numbers");
    }
    if (!engine_.has_vocabulary()) {
        fail(CODE_STATE, "the model has no vocabulary");
    }
    json pieces = json::array();
    for (const json &token : *found) {
        const std::string piece = engine_.piece(token_of(token, "tokens"));
        pieces.push_back(hex((const uint8_t *)piece.data(), piece.size()));
    }
    reply reply;
    reply.text["pieces"] = std::move(pieces);
    return reply;
}

} // namespace worker
