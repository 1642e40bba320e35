// SPDX-License-Identifier: MIT
#include "worker_ring.h"

#include "boundary_bundle.h"
#include "worker_engine.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <climits>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace worker {

void bell::ring() {
    count++;
    if (waiting.exchange(0) != 0) {
#ifdef __linux__
        syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
    }
}

void bell::wait(uint32_t heard, std::optional<moment> until) {
    waiting = 1; // before the look: who rings looks at it after the change
    if (count != heard) {
        return;
    }
    std::chrono::nanoseconds left = std::chrono::hours(1);
    if (until) {
        left = std::min<std::chrono::nanoseconds>(left, *until - std::chrono::steady_clock::now());
        if (left.count() <= 0) {
            return;
        }
    }
#ifdef __linux__
    const timespec time = {(time_t)(left.count() / 1000000000), (long)(left.count() % 1000000000)};
    syscall(SYS_futex, &count, FUTEX_WAIT, heard, &time, nullptr, 0);
#else
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, std::chrono::microseconds(100)));
#endif
}

// What a processor does that only waits.
static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t whole_units(uint64_t bytes) {
    return (bytes + BB_ALIGNMENT - 1) / BB_ALIGNMENT * BB_ALIGNMENT;
}

shared_ring::shared_ring(int file) {
#ifdef __linux__
    struct stat info;
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
        fail(CODE_ARGUMENT, "the second descriptor of a link is no file of memory");
    }
    const int seals = fcntl(file, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) { // a file that gets shorter ends who has it mapped
        fail(CODE_ARGUMENT, "the memory of a link is not sealed against getting shorter");
    }
    const auto bytes = (uint64_t)info.st_size;
    if (bytes < HEAD_BYTES + MIN_BYTES || bytes > HEAD_BYTES + MAX_BYTES || bytes % BB_ALIGNMENT != 0) {
        fail(CODE_ARGUMENT,
             "the memory of a link has %" PRIu64 " bytes, not %" PRIu64 " to %" PRIu64 " in units of %d", bytes,
             HEAD_BYTES + MIN_BYTES, HEAD_BYTES + MAX_BYTES, BB_ALIGNMENT);
    }
    void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) {
        fail(CODE_NO_MEMORY, "the memory of a link cannot be mapped: %s", reason(errno).c_str());
    }
    head_ = (head *)base;
    data_ = (uint8_t *)base + HEAD_BYTES; // cppcheck-suppress[nullPointerArithmeticOutOfMemory] it is not: see above
    capacity_ = bytes - HEAD_BYTES;
#else
    (void)file;
    fail(CODE_ARGUMENT, "this system has no shared memory that can be sealed");
#endif
}

shared_ring::~shared_ring() {
    if (head_) {
        munmap(head_, HEAD_BYTES + capacity_);
    }
}

uint8_t *shared_ring::reserve(uint64_t bytes, moment until, const std::function<bool()> &going) {
    const uint64_t left = capacity_ - place_ % capacity_; // to the end of the ring
    const uint64_t need = whole_units(bytes);
    // Begun anew where all has been given back, the ring's first pages stay in the processor's caches and tables.
    const bool anew = head_->freed == place_ && need <= place_ % capacity_;
    const uint64_t skipped = need > left || anew ? left : 0;
    for (;;) {
        const uint32_t heard = head_->emptied.count;
        const uint64_t freed = head_->freed;
        if (freed > place_) {
            return nullptr; // more than was ever written
        }
        if (place_ + skipped + need - freed <= capacity_) {
            break;
        }
        const moment now = std::chrono::steady_clock::now();
        if (now >= until || !going()) {
            return nullptr;
        }
        head_->emptied.wait(heard, std::min(until, now + std::chrono::milliseconds(100)));
    }
    if (skipped) {
        memset(data_ + place_ % capacity_, 0, BB_ALIGNMENT); // no message begins so
        place_ += skipped;
    }
    reserved_ = place_ + need;
    return data_ + place_ % capacity_;
}

void shared_ring::written() {
    place_ = reserved_;
    head_->written = place_;
    head_->coming = 0;
    head_->filled.ring();
}

// The processor that this thread runs on, and 1; 0: not known.
static uint32_t this_processor() {
#ifdef __linux__
    return (uint32_t)(sched_getcpu() + 1);
#else
    return 0;
#endif
}

void shared_ring::stay() {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) == 1) {
        head_->reads_on = this_processor();
    }
#endif
}

// Waking takes longer than writing a small message. It is worth nothing on the processor that the writer needs.
void shared_ring::announce() {
    const uint32_t here = this_processor();
    // cppcheck-suppress[knownConditionTrueFalse] it is another one on Linux
    if (here != 0 && head_->filled.waiting != 0 && head_->reads_on != here) {
        head_->coming = here;
        head_->filled.ring();
    }
}

bool shared_ring::announced() const {
    const uint32_t writer = head_->coming;
    // cppcheck-suppress[knownConditionTrueFalse] it may be on Linux
    return writer != 0 && writer != this_processor();
}

bool shared_ring::await(uint32_t heard) {
    const moment until = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    do {
        if (head_->written != place_ || head_->filled.count != heard) {
            return true;
        }
        for (int i = 0; i < 8; i++) {
            relax();
        }
    } while (std::chrono::steady_clock::now() < until);
    head_->coming = 0; // once is enough
    return false;
}

bool shared_ring::broken() const {
    const uint64_t end = head_->written;
    return end < place_ || end - place_ > capacity_ || end % BB_ALIGNMENT != 0;
}

shared_ring::part shared_ring::next() {
    const uint64_t end = head_->written;
    if (end == place_ || broken()) {
        return {};
    }
    uint64_t left = capacity_ - place_ % capacity_;
    static const uint8_t nothing[4] = {};
    if (end - place_ > left && memcmp(data_ + place_ % capacity_, nothing, sizeof(nothing)) == 0) {
        place_ += left; // the message was too long for the rest
        left = capacity_;
    }
    return {data_ + place_ % capacity_, std::min(end - place_, left)};
}

void shared_ring::give_back(uint64_t bytes) {
    place_ += whole_units(bytes);
    head_->freed = place_;
    head_->emptied.ring();
}

} // namespace worker
