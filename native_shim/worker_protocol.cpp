// SPDX-License-Identifier: MIT
#include "worker_protocol.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
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

connection::connection(int in, int out, bool is_socket, int write_timeout_ms)
    : in_(in), out_(out), is_socket_(is_socket), write_timeout_ms_(write_timeout_ms) {
    if (is_socket_) {
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
    if (is_socket_) {
        shutdown(in_, SHUT_RDWR); // wakes a reader that waits
    }
}

size_t connection::read(void *data, size_t size) {
    size_t got = 0;
    while (got < size) {
        const ssize_t n = ::read(in_, (uint8_t *)data + got, size - got);
        if (n > 0) {
            got += (size_t)n;
        } else if (n == 0) {
            break;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) { // the peer may have made the description so
            pollfd wait = {in_, POLLIN, 0};
            poll(&wait, 1, -1);
        } else if (errno != EINTR) {
            break;
        }
    }
    return got;
}

bool connection::write(iovec *parts, int count) {
    while (count > 0) {
        if (parts->iov_len == 0) {
            parts++;
            count--;
            continue;
        }
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = (decltype(message.msg_iovlen))count;
        ssize_t n = is_socket_ ? sendmsg(out_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) : writev(out_, parts, count);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            pollfd wait = {out_, POLLOUT, 0};
            if (poll(&wait, 1, write_timeout_ms_) == 0) {
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
    if (!alive_) {
        return false;
    }
    if (!write(parts, 3)) {
        drop();
        return false;
    }
    return true;
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
template <typename Buffer> bool read_body(connection &from, Buffer &buffer, uint64_t size) {
    constexpr uint64_t piece = 1u << 20;
    while (buffer.size() < size) {
        const size_t have = buffer.size();
        const auto next = (size_t)std::min<uint64_t>(piece, size - have);
        buffer.resize(have + next);
        const size_t got = from.read(&buffer[have], next);
        if (got < next) {
            buffer.resize(have + got);
            return false;
        }
    }
    return true;
}

} // namespace

void read_messages(const std::shared_ptr<connection> &from, request_queue &queue, uint64_t max_bundle) {
    const auto give = [&](request::kind what, std::string text) {
        request r;
        r.from = from;
        r.what = what;
        r.text = std::move(text);
        queue.push(std::move(r));
    };
    try {
        for (;;) {
            queue.wait_for_room();
            uint8_t header[HEADER_BYTES];
            const size_t got = from->alive() ? from->read(header, sizeof(header)) : 0;
            if (got == 0) {
                break;
            }
            if (got < sizeof(header)) {
                give(request::CUT, "the input ended after " + std::to_string(got) + " of the 32 bytes of a header");
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
            if (!read_body(*from, r.text, text_bytes) || !read_body(*from, r.bundle, bundle_bytes)) {
                give(request::CUT, "the input ended after " + std::to_string(HEADER_BYTES + r.bytes()) + " of the " +
                                       std::to_string(HEADER_BYTES + text_bytes + bundle_bytes) + " bytes of a message");
                return;
            }
            queue.push(std::move(r));
        }
    } catch (const std::bad_alloc &) {
        give(request::BAD_FRAME, "there is no memory for the message");
        return;
    }
    give(request::END, "");
}

} // namespace worker
