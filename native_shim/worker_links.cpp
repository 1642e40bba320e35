// SPDX-License-Identifier: MIT
#include "worker_links.h"

#include "worker_engine.h"

#include <new>

#include <sys/socket.h>
#include <unistd.h>

namespace worker {

static bool is_unix_stream(int fd) {
    int type = 0;
    socklen_t size = sizeof(type);
    sockaddr_storage address = {};
    socklen_t address_size = sizeof(address);
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM &&
           getsockname(fd, (sockaddr *)&address, &address_size) == 0 && address.ss_family == AF_UNIX;
}

void links::open(bool to_next, const std::shared_ptr<connection> &driver, std::vector<descriptor> descriptors) {
    if (descriptors.empty() || !is_unix_stream(descriptors[0].get())) {
        fail(CODE_ARGUMENT, "a link needs a Unix stream socket, sent along as the first descriptor");
    }
    auto end = std::make_unique<link_end>();
    end->driver = driver;
    if (descriptors.size() > 1) {
        end->ring = std::make_unique<shared_ring>(descriptors[1].get());
    }
    patience patience = driver->limits();
    patience.idle = std::chrono::seconds(0); // nothing goes over a link while the driver asks nothing
    end->peer = std::make_shared<connection>(descriptors[0].get(), descriptors[0].get(), patience);
    descriptors[0].release();
    if (!to_next) {
        read_(end->peer); // with a ring, for the end of the peer
    }
    close(to_next);
    driver->asked(); // it may wait for what comes of flows without asking here
    if (!to_next) {
        if (end->ring) {
            end->ring->stay();
        }
        queue_.listen(end->ring.get(), end->peer);
    }
    (to_next ? next_ : previous_) = std::move(end);
}

void links::close(bool to_next) {
    std::unique_ptr<link_end> &end = to_next ? next_ : previous_;
    if (end) {
        if (!to_next) {
            queue_.listen(nullptr, nullptr);
        }
        end->peer->drop();
        end->driver->answered();
        end.reset();
    }
}

void links::announce() {
    const link_end *end = next();
    if (end && end->ring) {
        end->ring->announce();
    }
}

void links::connection_gone(const connection &who) {
    for (const bool to_next : {true, false}) {
        const link_end *end = (to_next ? next_ : previous_).get();
        if (end && (end->peer.get() == &who || end->driver.get() == &who)) {
            close(to_next);
        }
    }
}

} // namespace worker
