// What a batch carries from worker to worker in place of a text (spec/worker-protocol.md, Flows).
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_sessions.h"

#include <cstdint>
#include <string>
#include <vector>

namespace worker {

struct flow_head {
    // What a worker did with the batch.
    struct stage {
        uint32_t layer_start = 0, layer_end = 0;
        uint64_t transfer_us = 0, wait_us = 0, decode_us = 0, compute_us = 0, encode_us = 0;
        uint64_t bytes = 0; // of its output
    };

    decode_wishes wishes;
    uint64_t sent_us = 0; // now_us() of the worker before
    std::vector<stage> stages;

    std::string bytes() const;
    std::string stages_json() const; // a list, for the text of the last reply
};

// Throws failure.
flow_head flow_of(const std::string &bytes);

} // namespace worker
