// SPDX-License-Identifier: MIT
#include "worker_file.h"

#include "worker_bytes.h"
#include "worker_engine.h"

#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include <fcntl.h>
#include <unistd.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

namespace worker {

namespace {

// Where the library maps weights, each must begin at such a multiple of bytes.
constexpr uint64_t MAPPED_ALIGNMENT = 32;

// Arrays that the library takes elements of one size from, whatever their type is said to be.
struct array_rule {
    const char *key = nullptr;
    gguf_type types[2] = {};
};
const array_rule arrays[] = {
    {"tokenizer.ggml.tokens", {GGUF_TYPE_STRING, GGUF_TYPE_STRING}},
    {"tokenizer.ggml.scores", {GGUF_TYPE_FLOAT32, GGUF_TYPE_FLOAT32}},
    {"tokenizer.ggml.token_type", {GGUF_TYPE_INT32, GGUF_TYPE_UINT32}},
    {"tokenizer.ggml.suppress_tokens", {GGUF_TYPE_INT32, GGUF_TYPE_UINT32}},
    {"tokenizer.ggml.merges", {GGUF_TYPE_STRING, GGUF_TYPE_STRING}},
};

// The table of the whole model in a file of one range: boundary_bundle/shards/strip.py.
const char table_names[] = "boundary_bundle.tensors.name";

struct gguf_deleter {
    void operator()(gguf_context *gguf) const { gguf_free(gguf); }
};

descriptor check_start(const std::string &path, struct stat &info) {
    // a FIFO would wait for its other end, a device might act
    descriptor held(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (held.get() < 0) {
        fail(CODE_LOAD, "cannot open %s: %s", path.c_str(), reason(errno).c_str());
    }
    uint8_t head[24] = {};
    const bool regular = fstat(held.get(), &info) == 0 && S_ISREG(info.st_mode);
    const ssize_t got = regular ? pread(held.get(), head, sizeof(head), 0) : 0;
    if (!regular) {
        fail(CODE_LOAD, "%s is not a regular file", path.c_str());
    }
    if (got < 4 || memcmp(head, "GGUF", 4) != 0) {
        fail(CODE_LOAD, "%s is not a GGUF file: it has %lld bytes and begins with %02x %02x %02x %02x, not with GGUF",
             path.c_str(), (long long)info.st_size, head[0], head[1], head[2], head[3]);
    }
    const uint64_t version = load_le(head + 4, 4);
    if (version < 2 || version > 3) {
        return held; // the library's to say
    }
    const struct {
        const char *what;
        uint64_t count;
    } counts[] = {{"tensors", load_le(head + 8, 8)}, {"entries of metadata", load_le(head + 16, 8)}};
    for (const auto &declared : counts) {
        if (declared.count > MAX_ENTRIES) {
            fail(CODE_LOAD, "%s (%lld bytes) declares %" PRIu64 " %s, and %" PRIu64 " are possible", path.c_str(),
                 (long long)info.st_size, declared.count, declared.what, MAX_ENTRIES);
        }
    }
    return held;
}

// The number of files of a model in several, by the name of the first, and what all names begin with; 1 for one file.
int count_of_files(const std::string &path, std::vector<char> &prefix) {
    prefix.assign(path.size() + 1, '\0');
    const size_t of = path.rfind("-of-");
    const long count = of == std::string::npos ? 0 : strtol(path.c_str() + of + 4, nullptr, 10);
    const bool several = count > 1 && count <= UINT16_MAX &&
                         llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, (int)count) > 0;
    return several ? (int)count : 1;
}

void check_array(const std::string &path, const gguf_context *gguf, const array_rule &rule) {
    const int64_t i = gguf_find_key(gguf, rule.key);
    if (i < 0) {
        return;
    }
    const bool array = gguf_get_kv_type(gguf, i) == GGUF_TYPE_ARRAY;
    const gguf_type type = array ? gguf_get_arr_type(gguf, i) : gguf_get_kv_type(gguf, i);
    if (!array || (type != rule.types[0] && type != rule.types[1])) {
        fail(CODE_LOAD, "%s: %s is %s %s, not an array of %s", path.c_str(), rule.key,
             array ? "an array of" : "a single", gguf_type_name(type), gguf_type_name(rule.types[0]));
    }
}

void check_table(const std::string &path, const gguf_context *gguf) {
    const int64_t i = gguf_find_key(gguf, table_names);
    if (i < 0 || gguf_get_kv_type(gguf, i) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf, i) != GGUF_TYPE_STRING) {
        return; // the library's to say
    }
    const size_t count = gguf_get_arr_n(gguf, i);
    if (count > MAX_ENTRIES) {
        fail(CODE_LOAD, "%s: %s has %zu names, and %" PRIu64 " are possible", path.c_str(), table_names, count,
             MAX_ENTRIES);
    }
    std::set<std::string> names;
    for (size_t j = 0; j < count; j++) {
        const char *name = gguf_get_arr_str(gguf, i, j);
        if (!names.insert(name).second) {
            fail(CODE_LOAD, "%s: %s has '%s' twice", path.c_str(), table_names, name);
        }
    }
}

void check_elements(const std::string &path, const gguf_context *gguf) {
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        if (gguf_get_tensor_size(gguf, i) == 0) {
            fail(CODE_LOAD, "%s: the tensor '%s' has a dimension of 0", path.c_str(), gguf_get_tensor_name(gguf, i));
        }
    }
}

// Bytes that belong to no tensor: of one that the table has lost, or all are in another place than the file was written
// for, as with an alignment that is not the writer's. The library would read weights from there.
void check_end(const std::string &path, const gguf_context *gguf, uint64_t size) {
    const int64_t n = gguf_get_n_tensors(gguf);
    if (n == 0) {
        return;
    }
    const uint64_t alignment = gguf_get_alignment(gguf);
    const uint64_t end = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, n - 1) +
                         gguf_get_tensor_size(gguf, n - 1);
    const uint64_t padded = end + (alignment - end % alignment) % alignment;
    if (size > padded) {
        fail(CODE_LOAD, "%s has %" PRIu64 " bytes, but its last tensor '%s' ends at byte %" PRIu64, path.c_str(), size,
             gguf_get_tensor_name(gguf, n - 1), end);
    }
}

void check_alignment(const std::string &path, const gguf_context *gguf) {
    const uint64_t alignment = gguf_get_alignment(gguf);
    if (alignment % MAPPED_ALIGNMENT != 0) {
        fail(CODE_LOAD,
             "%s aligns its tensors to %" PRIu64 " bytes, and they can be mapped from multiples of %" PRIu64
             " alone: it can be read with --no-mmap",
             path.c_str(), alignment, MAPPED_ALIGNMENT);
    }
}

// A number of 16 bits in the metadata, which is where the library takes it from.
uint16_t small_number(const gguf_context *gguf, const char *key, uint16_t absent) {
    const int64_t i = gguf_find_key(gguf, key);
    return i >= 0 && gguf_get_kv_type(gguf, i) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(gguf, i) : absent;
}

// Several files are found by the name of the first, but the library takes their number from its metadata.
void check_count(const std::string &path, const gguf_context *gguf, size_t files) {
    const size_t declared = std::max<size_t>(small_number(gguf, "split.count", 1), 1);
    const size_t number = small_number(gguf, "split.no", 0) + 1u;
    if (number > 1) {
        fail(CODE_LOAD, "%s is file %zu of %zu of a model: give the first", path.c_str(), number, declared);
    }
    if (declared != files) {
        fail(CODE_LOAD, "%s is the first of %zu files by its metadata (split.count), and of %zu by its name",
             path.c_str(), declared, files);
    }
}

} // namespace

model_files::model_files(const std::string &path) {
    const auto add = [&](const std::string &name) {
        struct stat found = {};
        descriptor held = check_start(name, found);
        files_.push_back({name, found, std::move(held)});
    };
    add(path);
    // the library opens the others by itself
    std::vector<char> prefix;
    const int count = count_of_files(path, prefix);
    std::vector<char> name(path.size() + 64);
    for (int i = 1; i < count; i++) {
        llama_split_path(name.data(), name.size(), prefix.data(), i, count);
        add(name.data());
    }
}

void model_files::check_contents(bool mmap) const {
    for (const file &f : files_) {
        take_log_error();
        const std::unique_ptr<gguf_context, gguf_deleter> gguf(gguf_init_from_file(f.path.c_str(), {true, nullptr}));
        if (!gguf) {
            fail_load(f.path, CODE_LOAD, (uint64_t)f.found.st_size, take_log_error());
        }
        if (&f == &files_[0]) {
            check_count(f.path, gguf.get(), files_.size());
            for (const array_rule &rule : arrays) {
                check_array(f.path, gguf.get(), rule);
            }
            check_table(f.path, gguf.get());
        }
        check_elements(f.path, gguf.get());
        if (mmap) {
            check_alignment(f.path, gguf.get());
        }
        check_end(f.path, gguf.get(), (uint64_t)f.found.st_size);
    }
}

void model_files::check_unchanged() const {
    for (const file &f : files_) {
        struct stat now;
        if (fstat(f.held.get(), &now) != 0 || now.st_size != f.found.st_size ||
            now.st_mtim.tv_sec != f.found.st_mtim.tv_sec || now.st_mtim.tv_nsec != f.found.st_mtim.tv_nsec) {
            fail(CODE_COMPUTE,
                 "%s was written to after its weights were mapped (it had %lld bytes and has %lld): this worker holds "
                 "the model no longer",
                 f.path.c_str(), (long long)f.found.st_size, (long long)now.st_size);
        }
    }
}

} // namespace worker
