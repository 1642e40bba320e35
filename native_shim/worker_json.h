// Reading the texts of requests (spec/worker-protocol.md): each look-up throws failure with the key, what was expected
// and what was found.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_engine.h"

#include <nlohmann/json.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace worker {

using nlohmann::json;

// Deeper ones are refused: copying, writing and ending a nested value calls itself once a level.
constexpr size_t MAX_DEPTH = 64;

json parse(const std::string &text); // an object; "" is the empty one
std::string shown(const json &value); // for a message, cut short

bool flag(const json &object, const char *key, bool otherwise);
uint64_t number(const json &object, const char *key, uint64_t otherwise, uint64_t most);
float real(const json &object, const char *key, float otherwise, float least, float most);

// keys that must be there
bool need_flag(const json &object, const char *key);
uint64_t need_number(const json &object, const char *key, uint64_t most);
std::string need_text(const json &object, const char *key);
void need_hex(const json &object, const char *key, uint8_t *bytes, size_t size);

template <size_t N> std::array<uint8_t, N> need_hex(const json &object, const char *key) {
    std::array<uint8_t, N> bytes;
    need_hex(object, key, bytes.data(), N);
    return bytes;
}

} // namespace worker
