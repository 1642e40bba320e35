// Messages from one process to another in memory that both map (spec/worker-protocol.md, Links).
//
// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace worker {

using moment = std::chrono::steady_clock::time_point;

// What a thread waits for that others, also of other processes, ring: a count, and whether anybody waits.
struct bell {
    std::atomic<uint32_t> count{0};
    std::atomic<uint32_t> waiting{0};

    void ring();
    // Returns when it has been rung since `heard` was its count, at `until`, or now and then for nothing.
    void wait(uint32_t heard, std::optional<moment> until);
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "shared between processes");

// A ring of messages. One end writes, the other reads in place and gives back, both in order. Places count the bytes since
// the beginning; messages begin at whole units of 64 and do not go around the end of the ring.
class shared_ring {
public:
    static constexpr uint64_t HEAD_BYTES = 4096;
    static constexpr uint64_t MIN_BYTES = 65536; // of the ring itself
    static constexpr uint64_t MAX_BYTES = 1ull << 32;

    // Maps a file of memory, which stays the caller's. Throws failure for one that is none, or that could get shorter.
    explicit shared_ring(int file);
    ~shared_ring();
    shared_ring(const shared_ring &) = delete;
    shared_ring &operator=(const shared_ring &) = delete;

    uint64_t capacity() const { return capacity_; }

    // The writing end. Room for so many bytes, waited for while `going` is true and until the moment comes; nullptr: it
    // has come, or the other end has written nonsense. For no more than capacity() bytes. written() passes it on.
    uint8_t *reserve(uint64_t bytes, moment until, const std::function<bool()> &going);
    void written();
    // Written is what follows soon: who sleeps for it gets up meanwhile.
    void announce();

    // The reading end: where the next message begins, and how many bytes there are at most. Empty: there is none. Given
    // back are that message, of so many bytes, and all before it.
    struct part {
        const uint8_t *data = nullptr;
        uint64_t size = 0;
    };
    part next();
    void give_back(uint64_t bytes);
    bool broken() const; // the writing end has written nonsense
    // The reading end, by the thread that reads: says which processor it has, if it has one.
    void stay();
    // Whether a message follows soon, so that it is worth to keep the processor for it.
    bool announced() const;
    // Keeps it for a while: whether the message came, or something else that `heard`, the count of filled(), does not
    // hold yet.
    bool await(uint32_t heard);

    bell &filled() { return head_->filled; }

private:
    struct head {
        alignas(64) std::atomic<uint64_t> written; // places below hold messages
        alignas(64) std::atomic<uint64_t> freed;   // places below have been given back
        alignas(64) bell filled;                   // rung when something was written; processes ring it themselves too
        alignas(64) bell emptied;                  // rung when something was given back
        alignas(64) std::atomic<uint32_t> coming;  // while the writer is about to write: its processor and 1, else 0
        std::atomic<uint32_t> reads_on;            // the processor that the reader cannot leave, and 1; 0: it can
    };
    static_assert(sizeof(head) <= HEAD_BYTES && offsetof(head, coming) == 256, "as in the specification");

    head *head_ = nullptr;
    uint8_t *data_ = nullptr;
    uint64_t capacity_ = 0;
    uint64_t place_ = 0;    // of this end
    uint64_t reserved_ = 0; // the end of what reserve() gave
};

} // namespace worker
