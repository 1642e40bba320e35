// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace worker {

// Numbers of so many bytes, little-endian as in messages, heads of flows and model files.

inline uint64_t load_le(const uint8_t *p, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)p[i] << (8 * i);
    }
    return value;
}

inline void store_le(uint8_t *p, int bytes, uint64_t value) {
    for (int i = 0; i < bytes; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

} // namespace worker
