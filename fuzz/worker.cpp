/*
 * The shard worker's protocol, on a tiny model: an input is what one peer sends. Reader, queue and service are the
 * worker's own, only the socket is a file. No exception gets out, what is answered is whole messages, nothing is
 * written but plain files in the state folder, and afterwards a sound request gives the bytes that it gave before.
 *
 * SPDX-License-Identifier: MIT
 */
#include "model.h"

#include "worker_engine.h"
#include "worker_protocol.h"
#include "worker_service.h"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include <dirent.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace worker;

namespace {

constexpr uint64_t FUZZ_MAX_BUNDLE = 1 << 20;
constexpr size_t MAX_MESSAGES = 60; // fewer than the queue holds

const uint8_t magic[4] = {'B', 'B', 'W', 'P'};
const char session[] = "0102030405060708090a0b0c0d0e0f10";
const uint8_t session_id_bytes[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

struct message {
    uint8_t header[HEADER_BYTES] = {};
    std::string text;
    std::string bundle;
};

uint64_t load(const uint8_t *p, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)p[i] << (8 * i);
    }
    return value;
}

void store(uint8_t *p, int bytes, uint64_t value) {
    for (int i = 0; i < bytes; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

std::vector<message> take_apart(const uint8_t *data, size_t size) {
    std::vector<message> all;
    size_t at = 0;
    while (size - at >= HEADER_BYTES && all.size() < MAX_MESSAGES) {
        message m;
        memcpy(m.header, data + at, HEADER_BYTES);
        at += HEADER_BYTES;
        const size_t text = (size_t)std::min<uint64_t>(load(m.header + 16, 4), size - at);
        m.text.assign((const char *)data + at, text);
        at += text;
        const size_t bundle = (size_t)std::min<uint64_t>(load(m.header + 24, 8), size - at);
        m.bundle.assign((const char *)data + at, bundle);
        at += bundle;
        all.push_back(std::move(m));
    }
    return all;
}

size_t put_together(const std::vector<message> &all, uint8_t *data, size_t max_size) {
    size_t at = 0;
    for (const message &m : all) {
        const size_t n = HEADER_BYTES + m.text.size() + m.bundle.size();
        if (n > max_size - at) {
            break;
        }
        memcpy(data + at, m.header, HEADER_BYTES);
        store(data + at + 16, 4, m.text.size());
        store(data + at + 24, 8, m.bundle.size());
        memcpy(data + at + HEADER_BYTES, m.text.data(), m.text.size());
        memcpy(data + at + HEADER_BYTES + m.text.size(), m.bundle.data(), m.bundle.size());
        at += n;
    }
    return at;
}

message of(uint16_t type, const std::string &text, const std::vector<uint8_t> &bundle = {}) {
    message m;
    memcpy(m.header, magic, sizeof magic);
    store(m.header + 4, 2, type);
    store(m.header + 8, 8, 40u + type);
    m.text = text;
    m.bundle.assign(bundle.begin(), bundle.end());
    return m;
}

struct peer { // what a worker has, without its socket
    std::unique_ptr<engine> made;
    llama_layer_ownership own{};
    std::string folder, recipe;
    std::string said_first; // to the sound requests
    int input = -1;
};
peer p;

std::vector<message> sound(unsigned which) {
    const std::string open = std::string("{\"session\":\"") + session + "\",\"epoch\":5,\"position\":0,\"recipe\":\"" +
                             p.recipe + "\"}";
    const std::string at = std::string("{\"session\":\"") + session + "\",\"epoch\":5";
    const auto tokens = [&](uint32_t n, int64_t pos, bool under) {
        return fuzz_tokens(p.own, n, pos, under ? session_id_bytes : nullptr, 5);
    };
    std::vector<message> all = {of(TYPE_HELLO, "{\"major\":1,\"minors\":[0,1]}")};
    const auto add = [&](uint16_t type, const std::string &text, const std::vector<uint8_t> &bundle = {}) {
        all.push_back(of(type, text, bundle));
    };
    switch (which % 6) {
    case 0:
        add(TYPE_DECODE, "{\"logits\":true,\"fragment_size\":64}", tokens(4, 0, false));
        add(TYPE_DECODE, "{\"byte_order\":\"big\",\"checksums\":false}", tokens(2, 4, false));
        add(TYPE_CLEAR, "{\"sequence\":0,\"from\":3}");
        break;
    case 1:
        add(TYPE_OPEN, open);
        add(TYPE_DECODE, "{}", tokens(4, 0, true));
        add(TYPE_DECODE, "{}", tokens(4, 0, true)); // again
        add(TYPE_TRUNCATE, at + ",\"position\":2}");
        add(TYPE_SESSIONS, "{\"forgotten\":true}");
        break;
    case 2:
        add(TYPE_OPEN, open);
        add(TYPE_DECODE, "{}", tokens(4, 0, true));
        add(TYPE_SAVE, at + ",\"file\":\"a.state\"}");
        add(TYPE_RELEASE, at + "}");
        add(TYPE_RESTORE, std::string("{\"session\":\"") + session + "\",\"epoch\":6,\"recipe\":\"" + p.recipe +
                              "\",\"file\":\"a.state\"}");
        break;
    case 3:
        add(TYPE_OPEN, open);
        add(TYPE_PIN, at + ",\"pinned\":true}");
        add(TYPE_EVICT, "{}");
        add(TYPE_EVICT, std::string("{\"session\":\"") + session + "\"}");
        break;
    case 4:
        add(TYPE_DESCRIBE, "{\"tensors\":true}");
        add(TYPE_STATISTICS, "");
        add(TYPE_TOKENIZE, "{\"text\":\"abc\",\"add_special\":true,\"parse_special\":false}");
        add(TYPE_DETOKENIZE, "{\"tokens\":[1,2,300]}");
        break;
    default: add(TYPE_SHUTDOWN, "{}"); add(TYPE_DECODE, "{\"sample\":false}", tokens(1, 0, false));
    }
    return all;
}

// What the state folder holds is taken away; anything but plain files is a finding.
void empty_folder() {
    DIR *folder = opendir(p.folder.c_str());
    HOLDS(folder != nullptr, "the state folder is gone");
    while (const dirent *entry = readdir(folder)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            HOLDS(entry->d_type == DT_REG && entry->d_name[0] != '.', "the state folder holds %s", entry->d_name);
            unlink((p.folder + "/" + entry->d_name).c_str());
        }
    }
    closedir(folder);
}

// One connection from its first byte to its last; returns what was answered.
std::string converse(const uint8_t *data, size_t size, bool whole) {
    HOLDS(ftruncate(p.input, 0) == 0 && pwrite(p.input, data, size, 0) == (ssize_t)size && lseek(p.input, 0, SEEK_SET) == 0,
          "no file for the input");
    const int answers = memfd_create("answers", MFD_CLOEXEC);
    HOLDS(answers >= 0, "no file for the answers");
    p.made->clear();
    session_options options;
    options.state_dir = p.folder;
    options.keep_answers = 1 << 16;
    request_queue queue(FUZZ_MAX_BUNDLE);
    service service(*p.made, options, FUZZ_MAX_BUNDLE, queue, [](const std::shared_ptr<connection> &) {});
    auto from = std::make_shared<connection>(dup(p.input), dup(answers), patience{});
    read_messages(from, queue, FUZZ_MAX_BUNDLE); // the queue has room for all of them
    for (bool over = false; !over;) {
        std::optional<request> r = queue.pop(std::nullopt);
        if (r->what == request::MESSAGE) {
            service.answer(*r); // a shutdown is answered like any other
            continue;
        }
        over = true;
        service.connection_gone(*r->from, r->came);
        if (r->refused()) {
            service.refuse(*r);
        }
    }
    from.reset();
    service.release_abandoned(std::chrono::steady_clock::now() + std::chrono::hours(1));
    std::string said((size_t)lseek(answers, 0, SEEK_END), '\0');
    HOLDS(pread(answers, &said[0], said.size(), 0) == (ssize_t)said.size(), "the answers cannot be read");
    close(answers);
    size_t at = 0;
    std::string bundles;
    for (; said.size() - at >= HEADER_BYTES;) {
        const uint8_t *h = (const uint8_t *)said.data() + at;
        const uint64_t text = load(h + 16, 4), bundle = load(h + 24, 8);
        HOLDS(memcmp(h, magic, sizeof magic) == 0 && (load(h + 4, 2) & TYPE_REPLY) != 0 &&
                  text + bundle <= said.size() - at - HEADER_BYTES,
              "no answer at byte %zu of %zu", at, said.size());
        const json object = json::parse(said.substr(at + HEADER_BYTES, text), nullptr, false);
        HOLDS(object.is_object(), "an answer is no JSON object");
        fuzz_accepted += whole && load(h + 4, 2) != (TYPE_ERROR | TYPE_REPLY);
        at += HEADER_BYTES + text;
        bundles.append(said, at, bundle);
        at += bundle;
    }
    HOLDS(at == said.size(), "%zu bytes behind the last answer", said.size() - at);
    return bundles;
}

void quiet(ggml_log_level, const char *, void *) {}

bool ready() {
    if (p.made) {
        return true;
    }
    llama_log_set(quiet, nullptr);
    char folder[] = "/tmp/fuzz-worker-XXXXXX";
    HOLDS(mkdtemp(folder) != nullptr, "no folder");
    p.folder = folder;
    atexit([] {
        empty_folder();
        rmdir(p.folder.c_str());
    });
    engine_options o;
    o.path = fuzz_model();
    o.end = FUZZ_CUT;
    o.ctx = FUZZ_CTX * FUZZ_SEQS;
    o.batch = o.ubatch = FUZZ_BATCH;
    o.seqs = FUZZ_SEQS;
    p.made = open_engine(o);
    p.input = memfd_create("input", MFD_CLOEXEC);
    p.recipe = p.made->sessions()->recipe(true).fingerprint;
    const model_facts &f = p.made->facts();
    snprintf(p.own.architecture, sizeof p.own.architecture, "%s", f.architecture.c_str());
    p.own.n_layer = f.n_layer;
    for (size_t i = 0; i < sizeof p.own.fingerprint; i++) {
        p.own.fingerprint[i] = (uint8_t)std::stoi(f.fingerprint.substr(2 * i, 2), nullptr, 16);
    }
    uint8_t input[8192];
    p.said_first = converse(input, put_together(sound(0), input, sizeof input), false);
    HOLDS(p.said_first.size() > 1000, "sound requests have no answers");
    return true;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!ready()) {
        return 0;
    }
    if (take_apart(data, size).size() == MAX_MESSAGES) {
        return 0; // it may be more than the queue holds
    }
    fuzz_count();
    const uint64_t before = fuzz_accepted;
    converse(data, size, true);
    fuzz_reached += fuzz_accepted > before;
    empty_folder();
    if (fuzz_executions % 64 == 0) {
        uint8_t input[8192];
        HOLDS(converse(input, put_together(sound(0), input, sizeof input), false) == p.said_first,
              "sound requests have other answers than before");
    }
    return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint32_t drawn = seed;
    const auto draw = [&drawn](size_t below) {
        drawn = drawn * 1664525u + 1013904223u;
        return (drawn >> 8) % (below != 0 ? below : 1);
    };
    ready();
    std::vector<message> all = draw(4) == 0 ? sound(draw(6)) : take_apart(data, size);
    if (all.empty()) {
        all = sound(draw(6));
    }
    if (draw(16) == 0) {
        all.push_back(of(TYPE_DECODE, "{}", fuzz_tokens(p.own, 1 + (uint32_t)draw(FUZZ_TOO_MANY), 0, nullptr, 0)));
    }
    if (draw(8) == 0) { // with those of another
        const std::vector<message> more = sound(draw(6));
        all.insert(all.end(), more.begin() + 1, more.end());
    }
    for (size_t changes = 1 + draw(3); changes > 0; changes--) {
        message &m = all[draw(all.size())];
        switch (draw(10)) {
        case 0: all.push_back(m); break;
        case 1:
            if (all.size() > 1) {
                all.erase(all.begin() + (long)draw(all.size()));
            }
            break;
        case 2: std::swap(m, all[draw(all.size())]); break;
        case 3: store(m.header + 4, 2, draw(2) != 0 ? draw(18) : draw(65536)); break;
        case 4: m.header[draw(HEADER_BYTES)] = (uint8_t)draw(256); break;
        case 5: { // a number, or a word
            static const char *const words[] = {"0", "1", "-1", "18446744073709551616", "1e400", "null", "true", "\"\"",
                                                "[]", "{}", "2147483648", "\"..\"", "\"a/b\"", "\"\\u0000\"", "5"};
            const size_t at = m.text.find_first_of("0123456789\"tf", draw(m.text.size()));
            const size_t end = at == std::string::npos ? at : m.text.find_first_of(",}]", at);
            if (end != std::string::npos) {
                m.text.replace(at, end - at, words[draw(sizeof words / sizeof *words)]);
            }
            break;
        }
        case 6: {
            uint8_t text[512];
            size_t n = std::min<size_t>(m.text.size(), 400);
            memcpy(text, m.text.data(), n);
            n = LLVMFuzzerMutate(text, n, sizeof text);
            m.text.assign((const char *)text, n);
            break;
        }
        case 7:
            if (!m.bundle.empty()) {
                fuzz_change_payload((uint8_t *)&m.bundle[0], m.bundle.size(), (unsigned)draw(1u << 24));
            }
            break;
        default:
            if (!m.bundle.empty() && m.bundle.size() < 4096) {
                uint8_t bundle[8192] = {};
                memcpy(bundle + FUZZ_CONTROL, m.bundle.data(), m.bundle.size());
                const size_t n = fuzz_mutate(bundle, FUZZ_CONTROL + m.bundle.size(), sizeof bundle,
                                             (unsigned)(draw(1u << 16) << 16 | draw(1u << 16)), LLVMFuzzerMutate);
                m.bundle.assign((const char *)bundle + FUZZ_CONTROL, n > FUZZ_CONTROL ? n - FUZZ_CONTROL : 0);
            }
        }
        if (all.empty()) {
            break;
        }
    }
    size = put_together(all, data, max_size);
    if (size > 0 && draw(16) == 0) { // a length that is not true
        store(data + (draw(2) != 0 ? 16 : 24), 4, draw(1u << (1 + draw(20))));
    }
    if (size > 0 && draw(16) == 0) {
        size -= draw(size);
    }
    return size;
}
