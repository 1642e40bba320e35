// How a file is read: later releases of llama.cpp have one load_mode in place of use_mmap and use_mlock.
//
// SPDX-License-Identifier: MIT
#pragma once

template <typename Params> auto set_load_mode(Params &params, bool mmap, bool mlock) -> decltype(void(params.use_mmap)) {
    params.use_mmap = mmap;
    params.use_mlock = mlock;
}

template <typename Params> auto set_load_mode(Params &params, bool mmap, bool mlock) -> decltype(void(params.load_mode)) {
    params.load_mode = static_cast<decltype(params.load_mode)>((mmap ? 1 : 0) + (mlock ? 2 : 0)); // both: 3
}
