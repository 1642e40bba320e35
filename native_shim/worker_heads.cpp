// SPDX-License-Identifier: MIT
#include "worker_heads.h"

#include <cstring>
#include <new>

namespace worker {

bb_bundle known_head::of(const bb_config &config, byte_view bundle) {
    bb_bundle found;
    size_t bytes = 0;
    const int code = memory_.empty()
                         ? bb_decode_head(&config, bundle.data, bundle.size, &found, &bytes, nullptr)
                         : bb_prepared_decode_head(&prepared_, bundle.data, bundle.size, &found, &bytes, nullptr);
    if (code != BB_OK) {
        fail_bundle(config, bundle);
    }
    if (!found.known) {
        tried_ = false;
        impossible_.clear();
        memory_.resize(bytes);
        if (bb_prepare_decode(&prepared_, &config, bundle.data, bundle.size, memory_.data(), memory_.size(), nullptr) !=
            BB_OK) {
            memory_.clear();
        }
    }
    return found;
}

void known_head::learn(const bb_config &config, byte_view bundle) noexcept {
    constexpr size_t most = 64u << 10;                // a larger batch takes so long that nothing is to be saved
    constexpr int32_t no_position = INT32_MAX - 1;    // one that no memory comes to
    tried_ = true;
    bb_bundle head;
    if (bundle.size > most || bb_decode(&config, bundle.data, bundle.size, &head, nullptr) != BB_OK) {
        return;
    }
    try {
        std::vector<bb_tensor> tensors(head.tensor_count);
        std::vector<bb_attr> attributes(head.attribute_count);
        std::vector<int32_t> positions;
        for (uint32_t i = 0; i < head.tensor_count; i++) {
            bb_tensor &t = tensors[i];
            bb_tensor_at(&head, i, &t);
            if (t.bytes > 0 && (!t.data || (t.byte_order != BB_NATIVE_ORDER && bb_dtype_both_orders(t.dtype)))) {
                return;
            }
            if (strcmp(t.name, "positions") == 0 && t.dtype == BB_I32) {
                positions.assign(t.bytes / sizeof(no_position), no_position);
                t.data = positions.data();
            }
        }
        for (uint32_t i = 0; i < head.attribute_count; i++) {
            bb_attr_at(&head, i, &attributes[i]);
        }
        if (positions.empty()) {
            return;
        }
        bb_desc desc = {};
        desc.number = head.number;
        desc.minor = head.minor;
        desc.tensors = tensors.data();
        desc.tensor_count = head.tensor_count;
        desc.attrs = attributes.data();
        desc.attr_count = head.attribute_count;
        std::vector<uint8_t> made(bundle.size);
        size_t written = 0;
        // Fragments or no checksums: then it has another head, and the next bundle's is not the one that it stands for.
        if (bb_encode(&config, &desc, made.data(), made.size(), &written, nullptr) == BB_OK && written == made.size()) {
            impossible_.swap(made);
        }
    } catch (const std::bad_alloc &) { // NOLINT(bugprone-empty-catch): there is none then
    }
}

} // namespace worker
