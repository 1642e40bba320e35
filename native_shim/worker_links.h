// The ways from one worker to the next (spec/worker-protocol.md, Links). Knows nothing of models.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_protocol.h"
#include "worker_ring.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace worker {

// One end of a link.
struct link_end {
    std::shared_ptr<connection> peer;
    std::shared_ptr<connection> driver; // who made the link, and hears what comes of the flows over it
    std::unique_ptr<shared_ring> ring;  // none: messages go through the socket
};

// Both ends that a worker may have.
class links {
public:
    // `read`: starts a reader thread.
    links(request_queue &queue, std::function<void(const std::shared_ptr<connection> &)> read)
        : queue_(queue), read_(std::move(read)) {}

    // Takes the place of one that is there. Throws failure; then everything is as before.
    void open(bool to_next, const std::shared_ptr<connection> &driver, std::vector<descriptor> descriptors);
    void close(bool to_next);

    link_end *next() { return next_ && next_->peer->alive() ? next_.get() : nullptr; }
    link_end *previous() { return previous_.get(); }
    void announce(); // a message to the next one follows soon
    bool is_previous(const connection &who) const { return previous_ && previous_->peer.get() == &who; }

    void connection_gone(const connection &who);

private:
    request_queue &queue_;
    std::function<void(const std::shared_ptr<connection> &)> read_;
    std::unique_ptr<link_end> next_, previous_;
};

} // namespace worker
