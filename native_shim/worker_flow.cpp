// SPDX-License-Identifier: MIT
#include "worker_flow.h"

#include "worker_bytes.h"

#include <charconv>
#include <cinttypes>
#include <iterator>

namespace worker {

namespace {

constexpr size_t HEAD = 32, STAGE = 64;

enum flags : uint32_t {
    BIG_ENDIAN_OUTPUT = 1,
    NO_CHECKSUMS = 2,
    LOGITS = 4,
    NO_SAMPLE = 8,
    ALL_FLAGS = 15,
};

} // namespace

std::string flow_head::bytes() const {
    std::string bytes(HEAD + STAGE * stages.size(), '\0');
    auto *at = (uint8_t *)&bytes[0];
    store_le(at, 4,
             (wishes.layout.big_endian ? BIG_ENDIAN_OUTPUT : 0u) | (wishes.layout.checksums ? 0u : NO_CHECKSUMS) |
                 (wishes.logits ? LOGITS : 0u) | (wishes.sample ? 0u : NO_SAMPLE));
    store_le(at + 8, 8, wishes.layout.fragment_size);
    store_le(at + 16, 8, sent_us);
    at += HEAD;
    for (const stage &s : stages) {
        store_le(at, 4, s.layer_start);
        store_le(at + 4, 4, s.layer_end);
        const uint64_t values[] = {s.transfer_us, s.wait_us, s.decode_us, s.compute_us, s.encode_us, s.bytes};
        for (size_t i = 0; i < std::size(values); i++) {
            store_le(at + 8 + 8 * i, 8, values[i]);
        }
        at += STAGE;
    }
    return bytes;
}

flow_head flow_of(const std::string &bytes) {
    if (bytes.size() < HEAD || (bytes.size() - HEAD) % STAGE != 0) {
        fail(CODE_ARGUMENT, "the head of a batch over a link has %zu bytes, not %zu and %zu for each worker before",
             bytes.size(), HEAD, STAGE);
    }
    const auto *at = (const uint8_t *)bytes.data();
    const auto flags = (uint32_t)load_le(at, 4);
    if ((flags & ~ALL_FLAGS) != 0 || load_le(at + 4, 4) != 0 || load_le(at + 24, 8) != 0) {
        fail(CODE_ARGUMENT,
             "the head of a batch over a link has flags 0x%08" PRIx32 ", and 0x%08" PRIx64 " and 0x%016" PRIx64
             " where zeros are reserved; flags are at most 0x%08x",
             flags, load_le(at + 4, 4), load_le(at + 24, 8), (unsigned)ALL_FLAGS);
    }
    flow_head found;
    found.wishes.layout.big_endian = (flags & BIG_ENDIAN_OUTPUT) != 0;
    found.wishes.layout.checksums = (flags & NO_CHECKSUMS) == 0;
    found.wishes.layout.fragment_size = load_le(at + 8, 8);
    found.wishes.logits = (flags & LOGITS) != 0;
    found.wishes.sample = (flags & NO_SAMPLE) == 0;
    found.sent_us = load_le(at + 16, 8);
    found.stages.reserve((bytes.size() - HEAD) / STAGE + 1);
    for (at += HEAD; at < (const uint8_t *)bytes.data() + bytes.size(); at += STAGE) {
        flow_head::stage s;
        s.layer_start = (uint32_t)load_le(at, 4);
        s.layer_end = (uint32_t)load_le(at + 4, 4);
        uint64_t *const values[] = {&s.transfer_us, &s.wait_us, &s.decode_us, &s.compute_us, &s.encode_us, &s.bytes};
        for (size_t i = 0; i < std::size(values); i++) {
            *values[i] = load_le(at + 8 + 8 * i, 8);
        }
        if (load_le(at + 56, 8) != 0) {
            fail(CODE_ARGUMENT,
                 "the head of a batch over a link holds 0x%016" PRIx64 " for layers %" PRIu32 " to %" PRIu32
                 " where zeros are reserved",
                 load_le(at + 56, 8), s.layer_start, s.layer_end);
        }
        found.stages.push_back(s);
    }
    return found;
}

// By hand, since each token waits for it: building a value and writing that out takes ten times as long.
std::string flow_head::stages_json() const {
    std::string text;
    text.reserve(2 + 224 * stages.size());
    const auto add = [&](const char *key, uint64_t value) {
        char digits[20];
        text += key;
        text.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
    };
    text += '[';
    for (const stage &s : stages) {
        add(text.size() > 1 ? ",{\"layer_start\":" : "{\"layer_start\":", s.layer_start);
        add(",\"layer_end\":", s.layer_end);
        add(",\"transfer_us\":", s.transfer_us);
        add(",\"wait_us\":", s.wait_us);
        add(",\"decode_us\":", s.decode_us);
        add(",\"compute_us\":", s.compute_us);
        add(",\"encode_us\":", s.encode_us);
        add(",\"bytes\":", s.bytes);
        text += '}';
    }
    text += ']';
    return text;
}

} // namespace worker
