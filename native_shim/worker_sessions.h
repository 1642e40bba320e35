// Sessions of a shard worker, beyond the library's table: the requests about them, who holds which, the answers that
// are kept for a request that comes again, and the files of saved states (spec/worker-protocol.md, Sessions).
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_engine.h"
#include "worker_json.h"
#include "worker_protocol.h"

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace worker {

// Which connections have opened which session, and which sessions wait to be released because those are gone.
class session_holders {
public:
    explicit session_holders(std::chrono::seconds grace) : grace_(grace) {}

    void hold(const session_id &id, uint64_t epoch, const connection *by);
    void forget(const session_id &id) { held_.erase(id); }
    void forget_all() { held_.clear(); }
    void forget_others(const std::set<session_id> &live);

    void connection_gone(const connection *who, moment when);
    std::optional<moment> next() const; // when the first is to be released
    std::vector<std::pair<session_id, uint64_t>> take_abandoned(moment now); // with their epochs

private:
    struct holding {
        uint64_t epoch = 0;
        std::set<const connection *> by;
        std::optional<moment> until; // set when nobody holds it
    };

    std::chrono::seconds grace_;
    std::map<session_id, holding> held_;
};

// What a decode asks for besides its bundle.
struct decode_wishes {
    struct layout layout;
    bool logits = false;
    bool sample = true;
};

bool operator==(const decode_wishes &a, const decode_wishes &b);

// A decode and its answer, good as long as its sessions stand where it left them.
struct kept_answer {
    struct session {
        session_id id;
        uint64_t epoch;
        int64_t n_pos; // afterwards
    };

    decode_wishes wishes;
    std::vector<uint8_t> request; // the bundle
    json text;
    std::vector<uint8_t> bundle;
    std::vector<session> sessions;
    uint64_t bytes = 0;
};

class kept_answers {
public:
    explicit kept_answers(uint64_t max_bytes) : max_bytes_(max_bytes) {}

    const kept_answer *find(const decode_wishes &wishes, const std::vector<uint8_t> &request) const;
    bool fits(uint64_t bytes) const { return bytes <= max_bytes_; }
    void keep(kept_answer answer); // that fits; older ones of its sessions are forgotten already, the oldest make room
    void moved(const session_id &id, uint64_t epoch, int64_t n_pos); // or not: that is where it stands now
    void forget(const session_id &id);
    void forget_all();
    void forget_others(const std::set<session_id> &live);

private:
    using place = std::list<kept_answer>::iterator;
    void drop(place answer);

    uint64_t max_bytes_;
    uint64_t bytes_ = 0;
    std::list<kept_answer> answers_; // the oldest first
    std::map<session_id, place> by_session_;
};

// The folder of saved states.
class state_folder {
public:
    explicit state_folder(const std::string &path); // "": there is none
    ~state_folder();
    state_folder(const state_folder &) = delete;
    state_folder &operator=(const state_folder &) = delete;

    // The names must be plain ones (plain_name). A file is there as a whole or not at all.
    std::string plain_name(const json &object, const char *key) const;
    void write(const std::string &name, byte_view bytes) const;
    std::vector<uint8_t> read(const std::string &name, uint64_t max_bytes) const;

private:
    int folder_ = -1;
};

struct session_options {
    std::string state_dir; // "": none
    std::chrono::seconds grace{5};
    uint64_t keep_answers = 64u << 20; // bytes
};

class session_service {
public:
    session_service(engine &engine, const session_options &options, uint64_t max_bundle);

    json answer(const request &r); // of the types from open on

    // the decode's part: an answer that was given before, one that is to be kept, a batch that failed
    const kept_answer *answer_again(const decode_wishes &wishes, const std::vector<uint8_t> &bundle) const;
    void keep_answer(const decode_wishes &wishes, std::vector<uint8_t> bundle, const json &text, byte_view output);
    void batch_failed();
    void forget_answers() { answers_.forget_all(); }

    void forget_all();

    void connection_gone(const connection &who, moment when);
    std::optional<moment> next_release() const;
    void release_abandoned(moment now);

private:
    json open(const request &r, const json &object);
    json truncate(const json &object);
    json release(const json &object);
    json pin(const json &object);
    json evict(const json &object);
    json list(const json &object) const;
    json save(const json &object);
    json restore(const request &r, const json &object);

    session_table &table() const;
    void forget(const session_id &id);

    engine &engine_;
    uint64_t max_bundle_;
    bb_config config_;
    session_holders holders_;
    kept_answers answers_;
    state_folder folder_;
};

} // namespace worker
