// Answers the requests of a shard worker, one after the other.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_engine.h"
#include "worker_flow.h"
#include "worker_heads.h"
#include "worker_links.h"
#include "worker_protocol.h"
#include "worker_sessions.h"

namespace worker {

// The text of an error message.
std::string error_text(const failure &f);

class service {
public:
    // `queue`: where requests come from; `read`: starts a reader thread for a link.
    service(engine &engine, const session_options &sessions, uint64_t max_bundle, request_queue &queue,
            std::function<void(const std::shared_ptr<connection> &)> read);

    // Answers one message. True when it was a shutdown and the worker is to end.
    bool answer(request &r);
    // Answers what is no message, before its connection is closed.
    void refuse(const request &r);
    static int code_of(const request &refused);

    // What nobody holds any more is released after a while; the clock is the caller's.
    void connection_gone(const connection &who, moment when);
    std::optional<moment> next_release() const { return sessions_.next_release(); }
    void release_abandoned(moment now) { sessions_.release_abandoned(now); }

private:
    struct reply; // text and bundle

    const std::shared_ptr<connection> &hearer(const request &r);
    static std::string text_of(const json &object);
    void pass_on(uint64_t id, flow_head &flow, byte_view bundle);

    reply handle(request &r);
    reply hello(const request &r);
    reply describe(const request &r);
    reply decode(request &r);
    flow_head::stage arrived(const flow_head &flow, const request &r) const;
    reply statistics();
    reply clear(const request &r);
    reply link(request &r);
    reply sampler(const request &r);
    reply tokenize(const request &r);
    reply detokenize(const request &r);

    bool has_text_services() const;
    void check_output_size(byte_view bytes, const bb_bundle &head, const layout &layout, uint64_t n_tokens) const;
    void send_error(connection &to, uint64_t id, const failure &f);
    void get_ready();

    engine &engine_;
    uint64_t max_bundle_;
    bb_config config_;
    session_service sessions_;
    links links_;
    uint64_t started_us_;
    uint64_t busy_until_us_ = 0; // the end of the last answer
    known_head head_;
    uint64_t checked_us_ = 0; // when the files were looked at while a batch was awaited

    struct {
        uint64_t requests = 0, errors = 0, tokens = 0, compute_us = 0, decode_us = 0, encode_us = 0;
        uint64_t bundle_bytes_in = 0, bundle_bytes_out = 0, answers_again = 0, flows = 0;
    } counters_;
};

} // namespace worker
