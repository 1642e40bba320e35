// SPDX-License-Identifier: MIT
#include "worker_sessions.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace worker {

//
// holders
//

void session_holders::hold(const session_id &id, uint64_t epoch, const connection *by) {
    holding &h = held_[id];
    if (h.epoch != epoch) {
        h.by.clear(); // a newer epoch has fenced them off
    }
    h.epoch = epoch;
    h.by.insert(by);
    h.until.reset();
}

void session_holders::forget_others(const std::set<session_id> &live) {
    for (auto it = held_.begin(); it != held_.end();) {
        it = live.count(it->first) ? std::next(it) : held_.erase(it);
    }
}

void session_holders::connection_gone(const connection *who, moment when) {
    for (auto &[_, h] : held_) {
        if (h.by.erase(who) > 0 && h.by.empty()) {
            h.until = when + grace_;
        }
    }
}

std::optional<moment> session_holders::next() const {
    std::optional<moment> first;
    for (const auto &[_, h] : held_) {
        if (h.until && (!first || *h.until < *first)) {
            first = h.until;
        }
    }
    return first;
}

std::vector<std::pair<session_id, uint64_t>> session_holders::take_abandoned(moment now) {
    std::vector<std::pair<session_id, uint64_t>> taken;
    for (auto it = held_.begin(); it != held_.end();) {
        if (it->second.until && *it->second.until <= now) {
            taken.emplace_back(it->first, it->second.epoch);
            it = held_.erase(it);
        } else {
            ++it;
        }
    }
    return taken;
}

//
// kept answers
//

bool operator==(const decode_wishes &a, const decode_wishes &b) {
    return a.layout.big_endian == b.layout.big_endian && a.layout.checksums == b.layout.checksums &&
           a.layout.fragment_size == b.layout.fragment_size && a.logits == b.logits && a.sample == b.sample;
}

const kept_answer *kept_answers::find(const decode_wishes &wishes, const std::vector<uint8_t> &request) const {
    for (const kept_answer &a : answers_) {
        if (a.wishes == wishes && a.request == request) {
            return &a;
        }
    }
    return nullptr;
}

void kept_answers::keep(kept_answer answer) {
    while (!answers_.empty() && bytes_ + answer.bytes > max_bytes_) {
        drop(answers_.begin());
    }
    bytes_ += answer.bytes;
    const place at = answers_.insert(answers_.end(), std::move(answer));
    for (const kept_answer::session &s : at->sessions) {
        by_session_[s.id] = at;
    }
}

void kept_answers::moved(const session_id &id, uint64_t epoch, int64_t n_pos) {
    const auto found = by_session_.find(id);
    if (found == by_session_.end()) {
        return;
    }
    for (const kept_answer::session &s : found->second->sessions) {
        if (s.id == id && (s.epoch != epoch || s.n_pos != n_pos)) {
            drop(found->second);
            return;
        }
    }
}

void kept_answers::forget(const session_id &id) {
    const auto found = by_session_.find(id);
    if (found != by_session_.end()) {
        drop(found->second);
    }
}

void kept_answers::forget_all() {
    answers_.clear();
    by_session_.clear();
    bytes_ = 0;
}

void kept_answers::forget_others(const std::set<session_id> &live) {
    for (place at = answers_.begin(); at != answers_.end();) {
        const place next = std::next(at);
        if (std::any_of(at->sessions.begin(), at->sessions.end(), [&](const auto &s) { return !live.count(s.id); })) {
            drop(at);
        }
        at = next;
    }
}

void kept_answers::drop(place answer) {
    for (const kept_answer::session &s : answer->sessions) {
        by_session_.erase(s.id);
    }
    bytes_ -= answer->bytes;
    answers_.erase(answer);
}

//
// files of saved states
//

namespace {

bool write_all(int fd, byte_view bytes) {
    for (size_t done = 0; done < bytes.size;) {
        const ssize_t n = write(fd, bytes.data + done, bytes.size - done);
        if (n < 0 && errno != EINTR) {
            return false;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

} // namespace

state_folder::state_folder(const std::string &path) {
    if (path.empty()) {
        return;
    }
    folder_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ < 0) {
        fail(CODE_ARGUMENT, "--state-dir is '%s', which cannot be opened as a folder: %s", path.c_str(),
             reason(errno).c_str());
    }
}

state_folder::~state_folder() {
    if (folder_ >= 0) {
        close(folder_);
    }
}

std::string state_folder::plain_name(const json &object, const char *key) const {
    const std::string name = need_text(object, key);
    const char *letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    if (name.empty() || name.size() > 200 || name[0] == '.' || name.find_first_not_of(letters) != std::string::npos) {
        fail(CODE_ARGUMENT,
             "%s is %s, not a name of 1 to 200 letters, digits, '.', '_' and '-' that begins with no '.'", key,
             shown(name).c_str());
    }
    if (folder_ < 0) {
        fail(CODE_ARGUMENT, "%s is %s, and this worker was started without --state-dir", key, shown(name).c_str());
    }
    return name;
}

void state_folder::write(const std::string &name, byte_view bytes) const {
    // no plain name, so that it is in nobody's way if the worker is killed while it writes
    std::string aside;
    int fd = -1;
    for (int i = 0; fd < 0 && i < 100; i++) {
        aside = "." + name + "." + std::to_string(getpid()) + "." + std::to_string(i);
        fd = openat(folder_, aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno != EEXIST) {
            break;
        }
    }
    const descriptor file(fd);
    if (fd < 0) {
        fail(CODE_ARGUMENT, "file '%s' cannot be made: %s", name.c_str(), reason(errno).c_str());
    }
    if (!write_all(fd, bytes) || fsync(fd) != 0 || renameat(folder_, aside.c_str(), folder_, name.c_str()) != 0) {
        const int why = errno;
        unlinkat(folder_, aside.c_str(), 0);
        fail(CODE_ARGUMENT, "file '%s' of %zu bytes cannot be written: %s", name.c_str(), bytes.size, reason(why).c_str());
    }
    fsync(folder_); // the new name too; where a folder cannot be synced, the file stands all the same
}

std::vector<uint8_t> state_folder::read(const std::string &name, uint64_t max_bytes) const {
    // a FIFO would wait for its other end, a link would lead out of the folder
    const descriptor file(openat(folder_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (file.get() < 0) {
        fail(CODE_ARGUMENT, "file '%s' cannot be opened: %s", name.c_str(),
             errno == ELOOP ? "it is a symbolic link" : reason(errno).c_str());
    }
    struct stat info;
    if (fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
        fail(CODE_ARGUMENT, "file '%s' is not a regular file", name.c_str());
    }
    if ((uint64_t)info.st_size > max_bytes) {
        fail(CODE_LIMIT, "file '%s' has %lld bytes, over the limit of %" PRIu64, name.c_str(), (long long)info.st_size,
             max_bytes);
    }
    std::vector<uint8_t> bytes((size_t)info.st_size);
    for (size_t done = 0; done < bytes.size();) {
        const ssize_t n = ::read(file.get(), bytes.data() + done, bytes.size() - done);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            fail(CODE_ARGUMENT, "file '%s' gave %zu of its %zu bytes: %s", name.c_str(), done, bytes.size(),
                 n == 0 ? "it was cut short" : reason(errno).c_str());
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return bytes;
}

//
// requests
//

namespace {

session_request named(const json &object) {
    session_request wanted;
    wanted.id = need_hex<16>(object, "session");
    wanted.epoch = need_number(object, "epoch", UINT64_MAX);
    return wanted;
}

void add_recipe(const json &object, session_request &wanted) {
    wanted.recipe = need_hex<32>(object, "recipe");
    if (object.contains("ingredients")) {
        wanted.recipe_text = need_text(object, "ingredients");
    }
}

// Of one that was not refused.
const session_id &id_of(const session_result &found) {
    if (!found.id) {
        fail(CODE_COMPUTE, "the library did not say which session it was");
    }
    return *found.id;
}

json done(const session_result &found) {
    return {{"outcome", outcome_name(found.outcome)}, {"session", hex(id_of(found).data(), 16)}, {"epoch", found.epoch}};
}

json done_at_position(const session_result &found) {
    json text = done(found);
    text["position"] = found.n_pos;
    return text;
}

} // namespace

session_service::session_service(engine &engine, const session_options &options, uint64_t max_bundle)
    : engine_(engine), max_bundle_(max_bundle), holders_(options.grace), answers_(options.keep_answers),
      folder_(options.state_dir) {
    bb_config_init(&config_);
}

session_table &session_service::table() const {
    session_table *table = engine_.sessions();
    if (!table) {
        fail(CODE_PROTOCOL, "sessions need the patched library");
    }
    return *table;
}

json session_service::answer(const request &r) {
    table();
    const json object = parse(r.text);
    switch (r.type) {
    case TYPE_OPEN: return open(r, object);
    case TYPE_TRUNCATE: return truncate(object);
    case TYPE_RELEASE: return release(object);
    case TYPE_PIN: return pin(object);
    case TYPE_EVICT: return evict(object);
    case TYPE_SESSIONS: return list(object);
    case TYPE_SAVE: return save(object);
    default: return restore(r, object);
    }
}

json session_service::open(const request &r, const json &object) {
    session_request wanted = named(object);
    wanted.n_pos = (int64_t)need_number(object, "position", INT64_MAX);
    add_recipe(object, wanted);
    const session_result found = table().open(wanted);
    holders_.hold(wanted.id, found.epoch, r.from.get());
    answers_.moved(wanted.id, found.epoch, found.n_pos);
    json text = done_at_position(found);
    text["created"] = found.created;
    return text;
}

json session_service::truncate(const json &object) {
    session_request wanted = named(object);
    wanted.n_pos = (int64_t)need_number(object, "position", INT64_MAX);
    const session_result found = table().truncate(wanted);
    answers_.moved(wanted.id, found.epoch, found.n_pos);
    return done_at_position(found);
}

json session_service::release(const json &object) {
    const session_request wanted = named(object);
    const session_result found = table().release(wanted);
    forget(wanted.id);
    return done(found);
}

json session_service::pin(const json &object) {
    const session_request wanted = named(object);
    return done_at_position(table().pin(wanted, need_flag(object, "pinned")));
}

json session_service::evict(const json &object) {
    std::optional<session_id> id;
    if (object.contains("session")) {
        id = need_hex<16>(object, "session");
    }
    const session_result found = table().evict(id);
    forget(id_of(found));
    return done(found);
}

json session_service::list(const json &object) const {
    constexpr uint64_t MOST = 4000; // of which the text still has room for the rest
    const bool forgotten = flag(object, "forgotten", false);
    const session_counts counts = table().counts();

    json sessions = json::array();
    session_info s;
    for (uint64_t i = 0; i < MOST && (forgotten || i < counts.live) && table().get(i, s); i++) {
        sessions.push_back({{"session", hex(s.id.data(), s.id.size())},
                            {"epoch", s.epoch},
                            {"position", s.n_pos < 0 ? json(nullptr) : json(s.n_pos)},
                            {"kv_bytes", s.n_bytes},
                            {"used", s.used},
                            {"pinned", s.pinned},
                            {"state", s.state == 0 ? "live" : s.state == 1 ? "evicted" : "released"}});
    }
    json outcomes = json::object();
    for (int i = 0; i < OUTCOMES; i++) {
        outcomes[outcome_name(i)] = counts.outcomes[(size_t)i];
    }
    return {{"sessions", std::move(sessions)}, {"live", counts.live},       {"forgotten", counts.forgotten},
            {"slots", counts.slots},           {"positions", counts.positions}, {"calls", counts.calls},
            {"tokens", counts.tokens},         {"created", counts.created}, {"evicted", counts.evicted},
            {"released", counts.released},     {"outcomes", std::move(outcomes)}};
}

json session_service::save(const json &object) {
    const session_request wanted = named(object);
    const std::string name = folder_.plain_name(object, "file");
    byte_view state;
    const session_result found = table().save(wanted, state);
    engine_.check_files();
    if (state.size > max_bundle_) {
        fail(CODE_LIMIT, "the state has %zu bytes, over the limit of %" PRIu64 ": it could not be restored", state.size,
             max_bundle_);
    }
    folder_.write(name, state);
    json text = done_at_position(found);
    text["bytes"] = state.size;
    return text;
}

json session_service::restore(const request &r, const json &object) {
    session_request wanted = named(object);
    add_recipe(object, wanted);
    const std::vector<uint8_t> bytes = folder_.read(folder_.plain_name(object, "file"), max_bundle_);
    const uint8_t nothing = 0; // an empty file is a bundle that was cut short, not a bad call
    const session_result found = table().restore(wanted, {bytes.empty() ? &nothing : bytes.data(), bytes.size()});
    holders_.hold(wanted.id, found.epoch, r.from.get());
    answers_.forget(wanted.id);
    return done_at_position(found);
}

//
// decode
//

const kept_answer *session_service::answer_again(const decode_wishes &wishes,
                                                 const std::vector<uint8_t> &bundle) const {
    return answers_.find(wishes, bundle);
}

namespace {

template <typename T> std::vector<T> read_tensor(const bb_bundle &view, const char *name) {
    bb_tensor t;
    const int index = bb_tensor_find(&view, name, &t);
    std::vector<T> values(index >= 0 ? (size_t)(t.bytes / sizeof(T)) : 0);
    if (!values.empty()) {
        bb_tensor_read(&view, (uint32_t)index, values.data(), values.size() * sizeof(T));
    }
    return values;
}

} // namespace

// The bundle has been decoded by the library: its session table is sound.
void session_service::keep_answer(const decode_wishes &wishes, std::vector<uint8_t> bundle, const json &text,
                                  byte_view output) {
    bb_bundle view;
    if (bb_decode(&config_, bundle.data(), bundle.size(), &view, nullptr) != BB_OK) {
        return;
    }
    const auto ids = read_tensor<session_id>(view, "session_ids");
    const auto epochs = read_tensor<uint64_t>(view, "session_epochs");
    const auto positions = read_tensor<int64_t>(view, "session_positions");
    kept_answer kept;
    for (size_t i = 0; i < ids.size(); i++) {
        kept.sessions.push_back({ids[i], epochs.at(i), positions.at(i)});
        answers_.forget(ids[i]);
    }
    for (const uint32_t row : read_tensor<uint32_t>(view, "seq_ids")) {
        kept.sessions.at(row).n_pos++; // one token more
    }
    kept.bytes = sizeof(kept) + kept.sessions.size() * sizeof(kept_answer::session) + bundle.capacity() +
                 text.dump().size() + output.size;
    if (!answers_.fits(kept.bytes)) {
        return;
    }
    kept.wishes = wishes;
    kept.request = std::move(bundle);
    kept.text = text;
    kept.bundle.assign(output.data, output.data + output.size);
    answers_.keep(std::move(kept));
}

// What fails while it computes can cost sessions their state.
void session_service::batch_failed() {
    std::set<session_id> live;
    session_info s;
    for (uint64_t i = 0; table().get(i, s) && s.state == 0; i++) {
        live.insert(s.id);
    }
    holders_.forget_others(live);
    answers_.forget_others(live);
}

//
// sessions that nobody holds
//

void session_service::forget(const session_id &id) {
    holders_.forget(id);
    answers_.forget(id);
}

void session_service::forget_all() {
    holders_.forget_all();
    answers_.forget_all();
}

void session_service::connection_gone(const connection &who, moment when) {
    holders_.connection_gone(&who, when);
}

std::optional<moment> session_service::next_release() const {
    return holders_.next();
}

void session_service::release_abandoned(moment now) {
    for (const auto &[id, epoch] : holders_.take_abandoned(now)) {
        session_request wanted;
        wanted.id = id;
        wanted.epoch = epoch;
        try {
            table().release(wanted);
        } catch (const failure &) { // NOLINT(bugprone-empty-catch): it is gone already
        }
        answers_.forget(id);
    }
}

} // namespace worker
