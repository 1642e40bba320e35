// Messages, connections and the queue of a shard worker (spec/worker-protocol.md). Knows nothing of models.
//
// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <sys/uio.h>

namespace worker {

constexpr size_t HEADER_BYTES = 32;
constexpr uint32_t MAX_TEXT = 1u << 20;
constexpr uint64_t MAX_BUNDLE = 1ull << 30;

enum message_type : uint16_t {
    TYPE_HELLO = 1,
    TYPE_DESCRIBE = 2,
    TYPE_DECODE = 3,
    TYPE_STATISTICS = 4,
    TYPE_CLEAR = 5,
    TYPE_SHUTDOWN = 6,
    TYPE_TOKENIZE = 7,
    TYPE_DETOKENIZE = 8,
    TYPE_OPEN = 9, // this one and the following came with minor 1
    TYPE_TRUNCATE = 10,
    TYPE_RELEASE = 11,
    TYPE_PIN = 12,
    TYPE_EVICT = 13,
    TYPE_SESSIONS = 14,
    TYPE_SAVE = 15,
    TYPE_RESTORE = 16,
    TYPE_ERROR = 0x7FFF,
    TYPE_REPLY = 0x8000, // bit 15
};

using moment = std::chrono::steady_clock::time_point;

// How long a peer may keep the worker waiting.
struct patience {
    std::chrono::seconds stall{30}; // for a message under way, whichever way; its bytes add to that
    std::chrono::seconds idle{0};   // between messages, while no answer is owed; 0: for ever

    std::chrono::seconds of(uint64_t bytes) const { return stall + std::chrono::seconds(bytes >> 24); } // 16 MiB: 1 s
};

// One peer. Its reader thread and the computing thread share it; the descriptors close with the last of them.
class connection {
public:
    // Takes over the descriptors (they may be the same, a socket).
    connection(int in, int out, const patience &patience);
    ~connection();
    connection(const connection &) = delete;
    connection &operator=(const connection &) = delete;

    // Reads what is there, up to `size` bytes, and waits for the first of them. 0: the input has ended, an error, or
    // `until` has come.
    size_t read_some(void *data, size_t size, std::optional<moment> until);
    // Reads `size` bytes, fewer only for the same reasons.
    size_t read(void *data, size_t size, moment until);

    // Writes a whole message, the answer to one request. A peer that takes too long, or that is gone, loses its
    // connection.
    bool send(uint16_t type, uint64_t request, const std::string &text, const uint8_t *bundle, size_t bundle_size);

    void drop(); // no more reading or writing, for either thread
    bool alive() const { return alive_; }

    // When a peer of which nothing comes counts as idle, as things are now; none: never.
    std::optional<moment> idle_at() const;
    void asked() { owed_++; } // a request has come, which send() answers

    const patience &limits() const { return patience_; }

    int minor = -1; // of the version agreed on, -1: no hello has been answered; only the computing thread looks at it

private:
    bool write(iovec *parts, int count, moment until);

    int in_, out_;
    bool in_is_socket_, out_is_socket_;
    patience patience_;
    std::atomic<bool> alive_{true};
    std::atomic<int> owed_{0};
    std::atomic<moment> answered_;
    std::mutex write_mutex_;
};

struct request {
    // CUT: the input ended within a message. The connection of what is refused (BAD_FRAME, IDLE, NO_MEMORY) is closed.
    enum kind { MESSAGE, BAD_FRAME, IDLE, NO_MEMORY, END, CUT };

    std::shared_ptr<connection> from;
    kind what = MESSAGE;
    uint16_t type = 0;
    uint64_t id = 0;
    std::string text;            // of what is no MESSAGE: the sentence
    std::vector<uint8_t> bundle;
    moment came; // into the queue

    size_t bytes() const { return text.size() + bundle.size(); }
    bool refused() const { return what == BAD_FRAME || what == IDLE || what == NO_MEMORY; }
};

// First in, first out, from all connections to the one thread that computes.
class request_queue {
public:
    void wait_for_room(); // until a reader may read its next message
    void push(request r);
    std::optional<request> pop(std::optional<moment> until); // none: that moment has come and nothing else

private:
    static constexpr size_t MAX_REQUESTS = 64;
    static constexpr size_t MAX_BYTES = 256u << 20;

    std::mutex mutex_;
    std::condition_variable filled_, emptied_;
    std::deque<request> requests_;
    size_t bytes_ = 0;
};

// The reader thread of a connection: messages into the queue until the input ends or is given up.
void read_messages(const std::shared_ptr<connection> &from, request_queue &queue, uint64_t max_bundle);

} // namespace worker
