// The head of the last bundle: what is known of the next one before it comes.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "boundary_bundle.h"
#include "worker_engine.h"

#include <cstdint>
#include <vector>

namespace worker {

// While a sequence is decoded the same head comes again and again.
class known_head {
public:
    // The head of a bundle. One that is the last one's is not looked through anew. Throws failure for what is none.
    bb_bundle of(const bb_config &config, byte_view bundle);

    // Makes of a bundle with the last head one that every engine refuses for its positions, after all that it does before
    // it changes anything. Nothing is made of a large one, of another byte order than the machine's, or without memory.
    void learn(const bb_config &config, byte_view bundle) noexcept;
    bool learnt() const { return tried_; }
    byte_view impossible() const { return {impossible_.data(), impossible_.size()}; } // no bytes: there is none

private:
    std::vector<uint8_t> memory_; // of prepared_; empty: there is none
    bb_prepared prepared_ = {};
    bool tried_ = false;
    std::vector<uint8_t> impossible_;
};

} // namespace worker
