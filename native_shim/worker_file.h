// The files of a model, before the library reads them and while it has them mapped.
//
// llama.cpp reads GGUF; what is looked at here is what it leaves out, or would answer by waiting, by taking hours, or by
// reading what is not there.
//
// SPDX-License-Identifier: MIT
#pragma once

#include "worker_descriptor.h"

#include <cstdint>
#include <string>
#include <vector>

#include <sys/stat.h>

namespace worker {

// Entries of metadata, and tensors, of one file; the library compares each name with all before it.
constexpr uint64_t MAX_ENTRIES = 10000;

class model_files {
public:
    // Regular files that begin as GGUF files do: the one named and, for the first of several, the others. Throws failure.
    explicit model_files(const std::string &path);

    // What the files declare against what they hold. Of the library's own reader, so its log is to be set. Throws failure.
    void check_contents(bool mmap) const;

    // Throws failure if one of them has been written to since.
    void check_unchanged() const;

    uint64_t bytes() const { return (uint64_t)files_[0].found.st_size; } // of the one named

private:
    struct file {
        std::string path;
        struct stat found = {};
        descriptor held; // to ask after it without its name, which takes longer and may be another's by then
    };

    std::vector<file> files_;
};

} // namespace worker
