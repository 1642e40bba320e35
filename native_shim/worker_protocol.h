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

// One peer. Its reader thread and the computing thread share it; the descriptors close with the last of them.
class connection {
public:
    // Takes over the descriptors (they may be the same, a socket).
    connection(int in, int out, bool is_socket, int write_timeout_ms);
    ~connection();
    connection(const connection &) = delete;
    connection &operator=(const connection &) = delete;

    // Reads `size` bytes, fewer only at the end of the input or on an error. Returns how many.
    size_t read(void *data, size_t size);

    // Writes a whole message. A peer that takes no byte for the time allowed, or that is gone, loses its connection.
    bool send(uint16_t type, uint64_t request, const std::string &text, const uint8_t *bundle, size_t bundle_size);

    void drop(); // no more reading or writing, for either thread
    bool alive() const { return alive_; }

    int minor = -1; // of the version agreed on, -1: no hello has been answered; only the computing thread looks at it

private:
    bool write(iovec *parts, int count);

    int in_, out_;
    bool is_socket_;
    int write_timeout_ms_;
    std::atomic<bool> alive_{true};
    std::mutex write_mutex_;
};

using moment = std::chrono::steady_clock::time_point;

struct request {
    enum kind { MESSAGE, BAD_FRAME, END, CUT }; // CUT: the input ended within a message

    std::shared_ptr<connection> from;
    kind what = MESSAGE;
    uint16_t type = 0;
    uint64_t id = 0;
    std::string text;            // BAD_FRAME, CUT: the sentence
    std::vector<uint8_t> bundle;
    moment came; // into the queue

    size_t bytes() const { return text.size() + bundle.size(); }
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

// The reader thread of a connection: messages into the queue until the input ends or a header is unsound.
void read_messages(const std::shared_ptr<connection> &from, request_queue &queue, uint64_t max_bundle);

} // namespace worker
