// SPDX-License-Identifier: MIT
#include "worker_protocol.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 // the signal is ignored in any case
#endif

namespace worker {

namespace {

const uint8_t magic[4] = {'B', 'B', 'W', 'P'};

uint64_t load_le(const uint8_t *p, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)p[i] << (8 * i);
    }
    return value;
}

void store_le(uint8_t *p, int bytes, uint64_t value) {
    for (int i = 0; i < bytes; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

} // namespace

//
// connection
//

static bool is_socket(int fd) {
    int type = 0;
    socklen_t size = sizeof(type);
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0;
}

connection::connection(int in, int out, const patience &patience)
    : in_(in), out_(out), in_is_socket_(is_socket(in)), out_is_socket_(is_socket(out)), patience_(patience),
      answered_(std::chrono::steady_clock::now()) {
    if (out_is_socket_) {
        return;
    }
    // A write to a full pipe must be able to time out, but O_NONBLOCK on an inherited description would show in every
    // process that has it. Opening the pipe again gives a description of our own.
    struct stat info;
    if (fstat(out_, &info) == 0 && S_ISFIFO(info.st_mode)) {
        char path[64];
        snprintf(path, sizeof(path), "/proc/self/fd/%d", out_);
        const int own = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
        if (own >= 0) {
            close(out_);
            out_ = own;
        } else {
            fcntl(out_, F_SETFL, fcntl(out_, F_GETFL) | O_NONBLOCK);
        }
    }
}

connection::~connection() {
    close(in_);
    if (out_ != in_) {
        close(out_);
    }
}

void connection::drop() {
    alive_ = false;
    if (in_is_socket_) {
        shutdown(in_, SHUT_RDWR); // wakes a reader that waits
    }
}

// Waits until the descriptor is ready, or `until` has come: false.
static bool wait_for(int fd, short what, std::optional<moment> until) {
    for (;;) {
        int64_t left = -1;
        if (until) {
            left = std::chrono::ceil<std::chrono::milliseconds>(*until - std::chrono::steady_clock::now()).count();
            left = std::clamp<int64_t>(left, 0, INT_MAX);
        }
        pollfd wait = {fd, what, 0};
        const int n = poll(&wait, 1, (int)left);
        if (n > 0 || (n < 0 && errno != EINTR)) {
            return true;
        }
        if (n == 0 && left < INT_MAX) {
            return false;
        }
    }
}

size_t connection::read_some(void *data, size_t size, std::optional<moment> until) {
    for (;;) {
        // what is there already is taken without asking whether there is something; a pipe has no such read
        const ssize_t n = in_is_socket_ ? recv(in_, data, size, MSG_DONTWAIT)
                          : wait_for(in_, POLLIN, until) ? ::read(in_, data, size) : 0;
        if (n >= 0) {
            return (size_t)n;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) { // of a pipe: the peer has made the description so
            if (!wait_for(in_, POLLIN, until)) {
                return 0;
            }
        } else if (errno != EINTR) {
            return 0;
        }
    }
}

size_t connection::read(void *data, size_t size, moment until) {
    size_t got = 0;
    while (got < size) {
        const size_t n = read_some((uint8_t *)data + got, size - got, until);
        if (n == 0) {
            break;
        }
        got += n;
    }
    return got;
}

std::optional<moment> connection::idle_at() const {
    if (patience_.idle.count() == 0) {
        return std::nullopt;
    }
    return (owed_ > 0 ? std::chrono::steady_clock::now() : answered_.load()) + patience_.idle;
}

bool connection::write(iovec *parts, int count, moment until) {
    while (count > 0) {
        if (parts->iov_len == 0) {
            parts++;
            count--;
            continue;
        }
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = (decltype(message.msg_iovlen))count;
        ssize_t n = out_is_socket_ ? sendmsg(out_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) : writev(out_, parts, count);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!wait_for(out_, POLLOUT, until)) {
                return false;
            }
        } else if (n < 0 && errno != EINTR) {
            return false;
        }
        while (n > 0) {
            const size_t taken = std::min((size_t)n, parts->iov_len);
            parts->iov_base = (uint8_t *)parts->iov_base + taken;
            parts->iov_len -= taken;
            n -= (ssize_t)taken;
            if (parts->iov_len == 0) {
                parts++;
                count--;
            }
        }
    }
    return true;
}

bool connection::send(uint16_t type, uint64_t request, const std::string &text, const uint8_t *bundle,
                      size_t bundle_size) {
    uint8_t header[HEADER_BYTES] = {};
    memcpy(header, magic, sizeof(magic));
    store_le(header + 4, 2, type);
    store_le(header + 8, 8, request);
    store_le(header + 16, 4, text.size());
    store_le(header + 24, 8, bundle_size);

    // in one call, so that the peer wakes once
    iovec parts[] = {{header, sizeof(header)}, {(void *)text.data(), text.size()}, {(void *)bundle, bundle_size}};
    std::lock_guard<std::mutex> lock(write_mutex_);
    const auto now = std::chrono::steady_clock::now;
    const bool sent = alive_ && write(parts, 3, now() + patience_.of(text.size() + bundle_size));
    if (!sent) {
        drop();
    }
    answered_ = now();
    owed_--;
    return sent;
}

//
// queue
//

void request_queue::wait_for_room() {
    std::unique_lock<std::mutex> lock(mutex_);
    emptied_.wait(lock, [&] { return requests_.size() < MAX_REQUESTS && bytes_ < MAX_BYTES; });
}

void request_queue::push(request r) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        r.came = std::chrono::steady_clock::now(); // under the lock: later ones have later moments
        bytes_ += r.bytes();
        requests_.push_back(std::move(r));
    }
    filled_.notify_one();
}

std::optional<request> request_queue::pop(std::optional<moment> until) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto filled = [&] { return !requests_.empty(); };
    if (!until) {
        filled_.wait(lock, filled);
    } else if (!filled_.wait_until(lock, *until, filled)) {
        return std::nullopt;
    }
    request r = std::move(requests_.front());
    requests_.pop_front();
    bytes_ -= r.bytes();
    lock.unlock();
    emptied_.notify_all();
    return r;
}

//
// reader
//

namespace {

// "" when the header is sound
std::string check_header(const uint8_t *h, uint64_t max_bundle) {
    char text[200];
    if (memcmp(h, magic, sizeof(magic)) != 0) {
        snprintf(text, sizeof(text), "the header begins with %02x %02x %02x %02x, not with 42 42 57 50", h[0], h[1], h[2],
                 h[3]);
    } else if (load_le(h + 6, 2) != 0) {
        snprintf(text, sizeof(text), "bytes 6 to 7 of the header are reserved and hold 0x%04" PRIx64, load_le(h + 6, 2));
    } else if (load_le(h + 20, 4) != 0) {
        snprintf(text, sizeof(text), "bytes 20 to 23 of the header are reserved and hold 0x%08" PRIx64,
                 load_le(h + 20, 4));
    } else if (load_le(h + 16, 4) > MAX_TEXT) {
        snprintf(text, sizeof(text), "a text of %" PRIu64 " bytes is over the limit of %u", load_le(h + 16, 4), MAX_TEXT);
    } else if (load_le(h + 24, 8) > max_bundle) {
        snprintf(text, sizeof(text), "a bundle of %" PRIu64 " bytes is over the limit of %" PRIu64, load_le(h + 24, 8),
                 max_bundle);
    } else {
        return "";
    }
    return text;
}

// Grows with the bytes that come, whatever length was declared.
template <typename Buffer> bool read_body(connection &from, Buffer &buffer, uint64_t size, moment until) {
    constexpr uint64_t piece = 1u << 20;
    while (buffer.size() < size) {
        const size_t have = buffer.size();
        const auto next = (size_t)std::min<uint64_t>(piece, size - have);
        buffer.resize(have + next);
        const size_t got = from.read(&buffer[have], next, until);
        if (got < next) {
            buffer.resize(have + got);
            return false;
        }
    }
    return true;
}

} // namespace

void read_messages(const std::shared_ptr<connection> &from, request_queue &queue, uint64_t max_bundle) {
    const auto now = std::chrono::steady_clock::now;
    const auto give = [&](request::kind what, std::string text) {
        request r;
        r.from = from;
        r.what = what;
        r.text = std::move(text);
        queue.push(std::move(r));
    };
    // A message of which no more comes: its sender is gone, or has stopped.
    const auto give_part = [&](size_t got, size_t size, moment began, moment until) {
        char text[160];
        if (now() < until) {
            snprintf(text, sizeof(text), "the input ended after %zu of the %zu bytes of a %s", got, size,
                     size == HEADER_BYTES ? "header" : "message");
            give(request::CUT, text);
        } else {
            const auto waited = std::chrono::duration_cast<std::chrono::seconds>(until - began).count();
            snprintf(text, sizeof(text), "only %zu of the %zu bytes of a %s came in %lld seconds", got, size,
                     size == HEADER_BYTES ? "header" : "message", (long long)waited);
            give(request::BAD_FRAME, text);
        }
    };
    try {
        for (;;) {
            queue.wait_for_room();
            uint8_t header[HEADER_BYTES];
            size_t got = 0;
            std::optional<moment> idle = from->idle_at();
            while (from->alive() && (got = from->read_some(header, sizeof(header), idle)) == 0 && idle &&
                   now() >= *idle) {
                idle = from->idle_at(); // an answer may have gone out since
                if (idle && now() >= *idle) {
                    give(request::IDLE, "nothing came for " + std::to_string(from->limits().idle.count()) + " seconds");
                    return;
                }
            }
            if (got == 0) {
                break;
            }
            const moment began = now();
            moment until = began + from->limits().stall;
            got += from->read(header + got, sizeof(header) - got, until);
            if (got < sizeof(header)) {
                give_part(got, sizeof(header), began, until);
                return;
            }
            std::string unsound = check_header(header, max_bundle);
            if (!unsound.empty()) {
                give(request::BAD_FRAME, std::move(unsound));
                return;
            }
            request r;
            r.from = from;
            r.type = (uint16_t)load_le(header + 4, 2);
            r.id = load_le(header + 8, 8);
            const uint64_t text_bytes = load_le(header + 16, 4), bundle_bytes = load_le(header + 24, 8);
            until = began + from->limits().of(text_bytes + bundle_bytes);
            if (!read_body(*from, r.text, text_bytes, until) || !read_body(*from, r.bundle, bundle_bytes, until)) {
                give_part(HEADER_BYTES + r.bytes(), HEADER_BYTES + text_bytes + bundle_bytes, began, until);
                return;
            }
            from->asked();
            queue.push(std::move(r));
        }
    } catch (const std::bad_alloc &) {
        give(request::NO_MEMORY, "there is no memory for the message");
        return;
    }
    give(request::END, "");
}

} // namespace worker
