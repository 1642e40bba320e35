// SPDX-License-Identifier: MIT
#include "worker_protocol.h"

#include "worker_bytes.h"

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
#ifndef MSG_CMSG_CLOEXEC
#define MSG_CMSG_CLOEXEC 0
#endif

namespace worker {

namespace {

const uint8_t magic[4] = {'B', 'B', 'W', 'P'};

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

bool connection::connected() const {
    pollfd look = {in_, 0, 0};
    return alive_ && (poll(&look, 1, 0) <= 0 || (look.revents & (POLLHUP | POLLERR)) == 0);
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

// What is there already, with the descriptors that came along.
ssize_t connection::receive(void *data, size_t size) {
    iovec part = {data, size};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * (MAX_DESCRIPTORS + 1))];
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t n = recvmsg(in_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    for (cmsghdr *c = n < 0 ? nullptr : CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        for (size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
            int fd = -1;
            memcpy(&fd, (const char *)c + at, sizeof(fd));
            descriptor own(fd);
            if (descriptors_.size() < MAX_DESCRIPTORS) {
                fcntl(fd, F_SETFD, FD_CLOEXEC);
                descriptors_.push_back(std::move(own));
            }
        }
    }
    return n;
}

size_t connection::read_some(void *data, size_t size, std::optional<moment> until) {
    for (;;) {
        // what is there already is taken without asking whether there is something; a pipe has no such read
        const ssize_t n = in_is_socket_ ? receive(data, size)
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

void write_header(uint8_t *header, uint16_t type, uint64_t request, size_t text_size, size_t bundle_size) {
    memset(header, 0, HEADER_BYTES);
    memcpy(header, magic, sizeof(magic));
    store_le(header + 4, 2, type);
    store_le(header + 8, 8, request);
    store_le(header + 16, 4, text_size);
    store_le(header + 24, 8, bundle_size);
}

uint64_t bundle_in_ring(uint64_t text_size) {
    constexpr uint64_t unit = 64; // a bundle begins at one, as the format has it for what is read in place
    return (HEADER_BYTES + text_size + unit - 1) / unit * unit;
}

bool connection::send(uint16_t type, uint64_t request, const std::string &text, const uint8_t *bundle,
                      size_t bundle_size) {
    uint8_t header[HEADER_BYTES];
    write_header(header, type, request, text.size(), bundle_size);

    // in one call, so that the peer wakes once
    iovec parts[] = {{header, sizeof(header)}, {(void *)text.data(), text.size()}, {(void *)bundle, bundle_size}};
    std::lock_guard<std::mutex> lock(write_mutex_);
    const auto now = std::chrono::steady_clock::now();
    const bool sent = alive_ && write(parts, 3, now + patience_.of(text.size() + bundle_size));
    if (!sent) {
        drop();
    }
    return sent;
}

void connection::answered() {
    answered_ = std::chrono::steady_clock::now();
    owed_--;
}

//
// queue
//

void request_queue::wait_for_room() {
    std::unique_lock<std::mutex> lock(mutex_);
    emptied_.wait(lock, [&] { return requests_.size() < MAX_REQUESTS && bytes_ < MAX_BYTES; });
}

void request_queue::push(request r) {
    std::lock_guard<std::mutex> lock(mutex_);
    r.came = std::chrono::steady_clock::now(); // under the lock: later ones have later moments
    bytes_ += r.bytes();
    requests_.push_back(std::move(r));
    filled_->ring();
}

std::optional<request> request_queue::pop(std::optional<moment> until) {
    for (;;) {
        const uint32_t heard = filled_->count; // before the look
        std::unique_lock<std::mutex> lock(mutex_);
        if (!requests_.empty()) {
            request r = std::move(requests_.front());
            requests_.pop_front();
            bytes_ -= r.bytes();
            lock.unlock();
            emptied_.notify_all();
            return r;
        }
        lock.unlock();
        if (ring_) {
            if (std::optional<request> r = take_from_ring()) {
                return r;
            }
        }
        if (until && std::chrono::steady_clock::now() >= *until) {
            return std::nullopt;
        }
        if (ring_ && ring_->announced()) {
            if (while_announced_) {
                while_announced_();
            }
            if (ring_->await(heard)) {
                continue;
            }
        }
        filled_->wait(heard, until);
    }
}

void request_queue::listen(shared_ring *ring, std::shared_ptr<connection> from) {
    std::lock_guard<std::mutex> lock(mutex_);
    ring_ = ring;
    filled_ = ring ? &ring->filled() : &own_;
    ring_from_ = std::move(from);
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

void read_header(const uint8_t *h, request &r) {
    r.type = (uint16_t)load_le(h + 4, 2);
    r.id = load_le(h + 8, 8);
}

uint64_t text_bytes_of(const uint8_t *h) {
    return load_le(h + 16, 4);
}

uint64_t bundle_bytes_of(const uint8_t *h) {
    return load_le(h + 24, 8);
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

// Header and text are copied before they are looked at; the bundle stays where it is.
std::optional<request> request_queue::take_from_ring() {
    const shared_ring::part part = ring_->next();
    request r;
    r.from = ring_from_;
    r.came = std::chrono::steady_clock::now();
    const auto refused = [&](std::string why) {
        r.what = request::BAD_FRAME;
        r.text = std::move(why);
        listen(nullptr, nullptr); // there is no way to find the next one
        return std::move(r);
    };
    if (!part.data) {
        return ring_->broken() ? std::optional<request>(refused("the memory of the link holds impossible places"))
                               : std::nullopt;
    }
    uint8_t header[HEADER_BYTES];
    memcpy(header, part.data, sizeof(header)); // a part is 64 bytes at least
    std::string unsound = check_header(header, max_bundle_);
    if (!unsound.empty()) {
        return refused(std::move(unsound));
    }
    read_header(header, r);
    const uint64_t text_bytes = text_bytes_of(header), bundle_bytes = bundle_bytes_of(header);
    const uint64_t bundle_at = bundle_in_ring(text_bytes);
    if (bundle_at > part.size || bundle_bytes > part.size - bundle_at) {
        return refused("a message reaches over the end of what is written in the memory of the link");
    }
    r.text.assign((const char *)part.data + HEADER_BYTES, text_bytes);
    r.in_place = {part.data + bundle_at, bundle_bytes};
    r.in_ring = bundle_at + bundle_bytes;
    ring_from_->asked();
    return r;
}

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
            read_header(header, r);
            const uint64_t text_bytes = text_bytes_of(header), bundle_bytes = bundle_bytes_of(header);
            until = began + from->limits().of(text_bytes + bundle_bytes);
            if (!read_body(*from, r.text, text_bytes, until) || !read_body(*from, r.bundle, bundle_bytes, until)) {
                give_part(HEADER_BYTES + r.bytes(), HEADER_BYTES + text_bytes + bundle_bytes, began, until);
                return;
            }
            r.descriptors = from->take_descriptors();
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
