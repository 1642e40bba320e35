// Messages, connections and the queue of a shard worker (spec/worker-protocol.md). Knows nothing of models.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_descriptor.h"
#include "worker_ring.h"

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
#include <utility>
#include <vector>

#include <sys/types.h>
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
    TYPE_LINK = 17, // this one and the following came with minor 2
    TYPE_SAMPLER = 18,
    TYPE_ERROR = 0x7FFF,
    TYPE_REPLY = 0x8000, // bit 15
};

// How long a peer may keep the worker waiting.
struct patience {
    std::chrono::seconds stall{30}; // for a message under way, whichever way; its bytes add to that
    std::chrono::seconds idle{0};   // between messages, while no answer is owed; 0: for ever

    std::chrono::seconds of(uint64_t bytes) const { return stall + std::chrono::seconds(bytes >> 24); } // 16 MiB: 1 s
};

// What one message may bring along (SCM_RIGHTS); more are closed as they come.
constexpr size_t MAX_DESCRIPTORS = 2;

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

    // The descriptors that came with what has been read since the last call.
    std::vector<descriptor> take_descriptors() { return std::exchange(descriptors_, {}); }

    // Writes a whole message. A peer that takes too long, or that is gone, loses its connection.
    bool send(uint16_t type, uint64_t request, const std::string &text, const uint8_t *bundle, size_t bundle_size);

    void drop(); // no more reading or writing, for either thread
    bool alive() const { return alive_; }
    bool connected() const; // and the peer has not closed its end, as far as the system knows

    // When a peer of which nothing comes counts as idle, as things are now; none: never.
    std::optional<moment> idle_at() const;
    void asked() { owed_++; } // a request has come, or more will come that this peer waits for elsewhere
    void answered();          // that is over

    const patience &limits() const { return patience_; }

    int minor = -1; // of the version agreed on, -1: no hello has been answered; only the computing thread looks at it

private:
    bool write(iovec *parts, int count, moment until);
    ssize_t receive(void *data, size_t size);

    int in_, out_;
    bool in_is_socket_, out_is_socket_;
    patience patience_;
    std::atomic<bool> alive_{true};
    std::atomic<int> owed_{0};
    std::atomic<moment> answered_;
    std::mutex write_mutex_;
    std::vector<descriptor> descriptors_; // of the thread that reads
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
    std::vector<descriptor> descriptors;
    shared_ring::part in_place; // the bundle, where it lies in the ring of a link; the message takes in_ring bytes there
    uint64_t in_ring = 0;
    moment came; // into the queue, or out of the ring

    size_t bytes() const { return text.size() + bundle.size(); }
    bool refused() const { return what == BAD_FRAME || what == IDLE || what == NO_MEMORY; }
};

// First in, first out, from all connections to the one thread that computes; what is in a ring comes after them.
class request_queue {
public:
    explicit request_queue(uint64_t max_bundle) : max_bundle_(max_bundle) {}

    void wait_for_room(); // until a reader may read its next message
    void push(request r);
    std::optional<request> pop(std::optional<moment> until); // none: that moment has come, or it was for nothing

    // Messages of `from` come in a ring from now on, which lives until another one, or none, is said here. For the thread
    // that computes.
    void listen(shared_ring *ring, std::shared_ptr<connection> from);
    // What pop() does when a message in the ring has been announced and has not come yet.
    void while_announced(std::function<void()> what) { while_announced_ = std::move(what); }

private:
    std::optional<request> take_from_ring();

    static constexpr size_t MAX_REQUESTS = 64;
    static constexpr size_t MAX_BYTES = 256u << 20;

    const uint64_t max_bundle_;
    std::mutex mutex_;
    std::condition_variable emptied_;
    std::deque<request> requests_;
    size_t bytes_ = 0;
    bell own_;
    bell *filled_ = &own_; // the ring's, so that one wait is for both
    shared_ring *ring_ = nullptr;
    std::shared_ptr<connection> ring_from_;
    std::function<void()> while_announced_;
};

void write_header(uint8_t *header, uint16_t type, uint64_t request, size_t text_size, size_t bundle_size);
// Where the bundle of a message lies in a ring, behind the beginning of the message.
uint64_t bundle_in_ring(uint64_t text_size);

// The reader thread of a connection: messages into the queue until the input ends or is given up.
void read_messages(const std::shared_ptr<connection> &from, request_queue &queue, uint64_t max_bundle);

} // namespace worker
