/*
 * Feeds recorded bundles to a patched libllama, without Python.
 *
 *     check_fixtures [--here] [FOLDER [MODEL.gguf]]
 *
 * FOLDER (default: .) is what `boundary-bundle fixtures` wrote; it reads manifest.lines there. MODEL.gguf is for a
 * fixture whose model is not in the folder. For each fixture it loads every layer range of the model and, step by step,
 *
 *   - gives the first range the recorded token request and every other range the recorded bundle before it,
 *   - compares what each range writes, asked for in the recorded layout, with the recorded bundle, byte for byte,
 *   - compares the SHA-256 of the logits (rows of f32, little-endian) with the recorded one.
 *
 * Digests and not logits are recorded: the rows of one step of a real model are hundreds of kilobytes, and the model
 * file has to be hashed anyway. Steps are independent of each other but for the KV cache, so a step that fails ends its
 * fixture and the next one goes on.
 *
 * Floating-point results depend on processor, compiler and flags: recorded bytes hold where they were recorded and on
 * machines that compute alike. With --here nothing recorded is expected but the token requests: each range gets what
 * the one before it has just written, and the logits are compared, by their bits, with those of all layers in one piece.
 *
 * Exit status 0: all equal, 1: something differs, 2: could not.
 *
 * SPDX-License-Identifier: MIT
 */
#include "llama-boundary.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SHARDS = 256, MAX_PATH = 1024, MAX_LINE = 2048, MAX_NAME = 256 };

/* -- SHA-256 (FIPS 180-4) --------------------------------------------------------------------------------------- */

struct sha256 {
    uint32_t state[8];
    uint64_t n_bytes;
    uint8_t block[64];
};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(struct sha256 *h) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
        0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
        0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
        0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
        0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
        0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], v[8];
    for (size_t i = 0; i < 16; ++i) {
        const uint8_t *p = h->block + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (int i = 16; i < 64; ++i) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(v, h->state, sizeof(v));
    for (int i = 0; i < 64; ++i) {
        const uint32_t a = v[0], e = v[4];
        const uint32_t t1 = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
        const uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof(v[0]));
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) {
        h->state[i] += v[i];
    }
}

static void sha256_begin(struct sha256 *h) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof(start));
    h->n_bytes = 0;
}

static void sha256_add(struct sha256 *h, const void *data, size_t size) {
    const uint8_t *p = data;
    while (size > 0) {
        const size_t at = (size_t)(h->n_bytes % 64), n = size < 64 - at ? size : 64 - at;
        memcpy(h->block + at, p, n);
        h->n_bytes += n;
        p += n;
        size -= n;
        if (h->n_bytes % 64 == 0) {
            sha256_block(h);
        }
    }
}

static void sha256_end(struct sha256 *h, char hex[65]) {
    const uint64_t bits = h->n_bytes * 8;
    uint8_t tail[72] = {0x80};
    const size_t n = (size_t)(119 - h->n_bytes % 64) % 64 + 1;
    for (size_t i = 0; i < 8; ++i) {
        tail[n + i] = (uint8_t)(bits >> (56 - 8 * i));
    }
    sha256_add(h, tail, n + 8);
    for (size_t i = 0; i < 8; ++i) {
        snprintf(hex + 8 * i, 9, "%08" PRIx32, h->state[i]);
    }
}

/* -- what is being checked -------------------------------------------------------------------------------------- */

struct settings {
    int threads, ctx, batch, ubatch, flash_attn, sequences;
};

struct shard {
    int start, end;
    struct llama_model *model;
    struct llama_context *ctx;
};

struct file {
    char name[MAX_NAME];
    uint8_t *data;
    size_t size;
};

struct fixture {
    char name[MAX_NAME], model[MAX_PATH], sha[65], fingerprint[65];
    struct settings settings;
    struct shard shards[MAX_SHARDS], whole;
    int n_shards, loaded, n_steps, failed;
    /* the step being read: its request, then the bundle at the end of each range but the last */
    int step;
    struct file files[MAX_SHARDS];
    struct llama_boundary_layout layouts[MAX_SHARDS];
    int n_files;
};

static const char *folder = ".", *given_model;
static int here;
static unsigned long n_failures, n_fixtures, n_compared_bundles, n_compared_logits;
static struct llama_boundary_error err = {.size = sizeof(err), .abi = LLAMA_BOUNDARY_ABI};

/* NOLINTNEXTLINE(concurrency-mt-unsafe): this program has one thread of its own */
static const char *reason(void) { return strerror(errno); }

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

static _Noreturn void stop(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("check_fixtures: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(2);
}

static void failed(struct fixture *f, const char *file, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("FAILED %s: step %d: %s: ", f->name, f->step, file);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    f->failed = 1;
    n_failures++;
}

static void path_of(const char *name, char *path) {
    if (snprintf(path, MAX_PATH, "%s/%s", folder, name) >= MAX_PATH) {
        stop("the path of %s is too long", name);
    }
}

static void hash_file(const char *path, char hex[65]) {
    static uint8_t buffer[1 << 16];
    struct sha256 h;
    size_t n;
    FILE *stream = fopen(path, "rb");
    if (!stream) {
        stop("cannot read %s: %s", path, reason());
    }
    sha256_begin(&h);
    do {
        n = fread(buffer, 1, sizeof(buffer), stream);
        sha256_add(&h, buffer, n);
    } while (n == sizeof(buffer));
    if (ferror(stream)) {
        stop("cannot read %s: %s", path, reason());
    }
    (void)fclose(stream);
    sha256_end(&h, hex);
}

/* A recorded file. One that is not what the manifest says is reported, and used all the same. */
static void read_file(struct fixture *f, struct file *file, const char *sha) {
    char path[MAX_PATH], hex[65];
    struct sha256 h;
    path_of(file->name, path);
    FILE *stream = fopen(path, "rb");
    if (!stream || fseek(stream, 0, SEEK_END) != 0) {
        stop("step %d: cannot read %s: %s", f->step, path, reason());
    }
    const long size = ftell(stream);
    if (size < 0 || fseek(stream, 0, SEEK_SET) != 0) {
        stop("step %d: cannot read %s: %s", f->step, path, reason());
    }
    file->size = (size_t)size;
    file->data = malloc(file->size + 1);
    if (!file->data || fread(file->data, 1, file->size, stream) != file->size) {
        stop("step %d: cannot read the %ld bytes of %s", f->step, size, path);
    }
    (void)fclose(stream); /* it was only read, here and below */
    sha256_begin(&h);
    sha256_add(&h, file->data, file->size);
    sha256_end(&h, hex);
    if (strcmp(hex, sha) != 0) {
        failed(f, file->name, "its SHA-256 is %s, the manifest has %s", hex, sha);
    }
}

static void drop_files(struct fixture *f) {
    for (int i = 0; i < f->n_files; ++i) {
        free(f->files[i].data);
    }
    f->n_files = 0;
}

/* -- loading ---------------------------------------------------------------------------------------------------- */

static void open_shard(const struct fixture *f, struct shard *s) {
    const struct llama_layer_range range = {sizeof(range), LLAMA_BOUNDARY_ABI, s->start, s->end};
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    s->model = llama_model_load_layer_range(f->model, mp, &range, &err);
    if (!s->model) {
        stop("%s: layers [%d,%d) of %s: %s", f->name, s->start, s->end, f->model, err.message);
    }
    struct llama_layer_ownership own;
    memset(&own, 0, sizeof(own));
    own.size = sizeof(own);
    own.abi = LLAMA_BOUNDARY_ABI;
    char hex[65];
    llama_model_layer_ownership(s->model, &own);
    for (size_t i = 0; i < 32; ++i) {
        snprintf(hex + 2 * i, 3, "%02x", own.fingerprint[i]);
    }
    if (strcmp(hex, f->fingerprint) != 0) {
        stop("%s: the library gives %s the fingerprint %s, the manifest has %s", f->name, f->model, hex, f->fingerprint);
    }

    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t)f->settings.ctx;
    cp.n_batch = (uint32_t)f->settings.batch;
    cp.n_ubatch = (uint32_t)f->settings.ubatch;
    cp.n_seq_max = (uint32_t)f->settings.sequences;
    cp.n_threads = cp.n_threads_batch = f->settings.threads;
    cp.flash_attn_type = f->settings.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.offload_kqv = false;
    cp.op_offload = false;
    s->ctx = llama_init_from_model(s->model, cp);
    if (!s->ctx) {
        stop("%s: no context for layers [%d,%d)", f->name, s->start, s->end);
    }
}

static void close_shard(struct shard *s) {
    if (s->ctx) {
        llama_free(s->ctx);
    }
    if (s->model) {
        llama_model_free(s->model);
    }
    memset(s, 0, sizeof(*s));
}

static void load(struct fixture *f) {
    char hex[65];
    hash_file(f->model, hex);
    if (strcmp(hex, f->sha) != 0) {
        stop("%s: %s is another model: its SHA-256 is %s, the manifest has %s", f->name, f->model, hex, f->sha);
    }
    for (int i = 0; i < f->n_shards; ++i) {
        open_shard(f, &f->shards[i]);
    }
    if (here) {
        f->whole.start = 0;
        f->whole.end = -1;
        open_shard(f, &f->whole);
    }
    f->loaded = 1;
}

/* -- one step --------------------------------------------------------------------------------------------------- */

static int decode(struct fixture *f, struct shard *s, const char *name, const void *data, size_t size) {
    if (llama_boundary_decode(s->ctx, data, size, &err) == LLAMA_BOUNDARY_OK) {
        return 1;
    }
    failed(f, name, "layers [%d,%d) refuse it with error %d: %s", s->start, s->end, (int)err.status, err.message);
    return 0;
}

/* Compare what a range wrote with the recorded bundle; with --here only how long it is. */
static void compare(struct fixture *f, const struct shard *s, const struct file *file, const uint8_t *data, size_t size) {
    if (size != file->size) {
        failed(f, file->name, "layers [%d,%d) wrote %zu bytes, recorded are %zu", s->start, s->end, size, file->size);
        return;
    }
    size_t first = size, differing = 0;
    for (size_t i = 0; i < size && !here; ++i) {
        if (data[i] != file->data[i]) {
            first = differing++ ? first : i;
        }
    }
    if (differing > 0) {
        failed(f, file->name, "layers [%d,%d) wrote other bytes: %zu of %zu differ, the first at %zu (wrote %02x, recorded %02x)",
               s->start, s->end, differing, size, first, data[first], file->data[first]);
    }
    n_compared_bundles++;
}

static void hash_logits(const float *logits, size_t n, char hex[65]) {
    struct sha256 h;
    sha256_begin(&h);
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof(bits));
        const uint8_t bytes[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16), (uint8_t)(bits >> 24)};
        sha256_add(&h, bytes, sizeof(bytes));
    }
    sha256_end(&h, hex);
}

static void run_step(struct fixture *f, int n_rows, const char *sha) {
    if (f->n_files != f->n_shards) {
        stop("manifest.lines: step %d of %s has %d bundles for %d ranges", f->step, f->name, f->n_files, f->n_shards);
    }
    struct shard *last = &f->shards[f->n_shards - 1];
    const uint8_t *input = f->files[0].data;
    size_t size = f->files[0].size;
    for (int i = 0; i < f->n_shards; ++i) {
        struct shard *s = &f->shards[i];
        if (!decode(f, s, f->files[i].name, input, size)) {
            return;
        }
        if (s == last) {
            break;
        }
        const struct file *recorded = &f->files[i + 1];
        const void *data = NULL;
        if (llama_boundary_output(s->ctx, &f->layouts[i + 1], &data, &size, &err) != LLAMA_BOUNDARY_OK) {
            failed(f, recorded->name, "layers [%d,%d) write nothing: %s", s->start, s->end, err.message);
            return;
        }
        compare(f, s, recorded, data, size);
        input = here ? data : recorded->data;
        size = here ? size : recorded->size;
    }

    const int32_t rows = llama_boundary_outputs(last->ctx, NULL);
    if (rows != n_rows) {
        failed(f, "logits", "%d rows, recorded are %d", (int)rows, n_rows);
        return;
    }
    const size_t n = (size_t)rows * (size_t)llama_vocab_n_tokens(llama_model_get_vocab(last->model));
    const float *logits = n > 0 ? llama_get_logits(last->ctx) : NULL;
    if (here) {
        if (!decode(f, &f->whole, f->files[0].name, f->files[0].data, f->files[0].size)) {
            return;
        }
        const float *unsplit = n > 0 ? llama_get_logits(f->whole.ctx) : NULL;
        size_t differing = 0;
        for (size_t i = 0; i < n; ++i) {
            differing += memcmp(&logits[i], &unsplit[i], sizeof(logits[i])) != 0;
        }
        if (differing > 0) {
            failed(f, "logits", "%zu of %zu differ from those of all layers in one piece", differing, n);
        }
    } else {
        char hex[65];
        hash_logits(logits, n, hex);
        if (strcmp(hex, sha) != 0) {
            failed(f, "logits", "their SHA-256 is %s, the manifest has %s", hex, sha);
        }
    }
    n_compared_logits += n;
}

/* -- manifest.lines --------------------------------------------------------------------------------------------- */

static void begin_fixture(struct fixture *f, const char *name, const char *model) {
    memset(f, 0, sizeof(*f));
    snprintf(f->name, sizeof(f->name), "%s", name);
    if (strcmp(model, "-") != 0) {
        path_of(model, f->model);
    } else if (!given_model) {
        stop("%s: its model is not in the folder: give the file as the second argument", name);
    } else if (snprintf(f->model, sizeof(f->model), "%s", given_model) >= (int)sizeof(f->model)) {
        stop("the path of the model is too long");
    }
}

static void end_fixture(struct fixture *f) {
    for (int i = 0; i < f->n_shards; ++i) {
        close_shard(&f->shards[i]);
    }
    close_shard(&f->whole);
    f->loaded = 0;
    printf("%s %s: %d steps, %d ranges\n", f->failed ? "FAILED" : "passed", f->name, f->n_steps, f->n_shards);
    n_fixtures++;
}

/* One bundle of the step being read: the request, or the one that crosses a cut. */
static void take_file(struct fixture *f, const char *name, const char *sha) {
    if (f->n_files >= MAX_SHARDS || f->n_files >= f->n_shards) {
        stop("manifest.lines: step %d of %s has too many bundles", f->step, f->name);
    }
    struct file *file = &f->files[f->n_files++];
    snprintf(file->name, sizeof(file->name), "%s", name);
    read_file(f, file, sha);
}

/* NOLINTBEGIN(bugprone-unchecked-string-to-number-conversion,cert-err34-c): numbers of more digits than fit are not
 * read as numbers, and the next word then fits no line. */
static void take_line(struct fixture *f, const char *line, int number) {
    char word[16], a[MAX_NAME], b[MAX_NAME];
    int x = 0, y = 0, big = 0, bare = 0;
    uint64_t fragment = 0;
    struct settings *s = &f->settings;
    if (sscanf(line, "%15s", word) != 1) {
        stop("manifest.lines:%d: an empty line", number);
    }
    if (strcmp(word, "fixture") == 0 && sscanf(line, "%*s %255s %255s", a, b) == 2) {
        begin_fixture(f, a, b);
    } else if ((strcmp(word, "model") == 0 && sscanf(line, "%*s %64s %64s", f->sha, f->fingerprint) == 2) ||
               (strcmp(word, "settings") == 0 &&
                sscanf(line, "%*s %9d %9d %9d %9d %9d %9d", &s->threads, &s->ctx, &s->batch, &s->ubatch, &s->flash_attn,
                       &s->sequences) == 6)) {
        /* compared, or used, when it is loaded */
    } else if (strcmp(word, "range") == 0 && sscanf(line, "%*s %9d %9d", &x, &y) == 2 && f->n_shards < MAX_SHARDS) {
        f->shards[f->n_shards].start = x;
        f->shards[f->n_shards++].end = y;
    } else if (strcmp(word, "step") == 0 && sscanf(line, "%*s %9d", &x) == 1 && f->n_shards > 0) {
        if (!f->loaded) {
            load(f);
        }
        f->step = x;
    } else if (strcmp(word, "request") == 0 && sscanf(line, "%*s %255s %64s", a, b) == 2) {
        if (!f->failed) {
            take_file(f, a, b);
        }
    } else if (strcmp(word, "boundary") == 0 &&
               sscanf(line, "%*s %9d %255s %64s %9d %19" SCNu64 " %9d", &x, a, b, &big, &fragment, &bare) == 6) {
        if (f->n_files > 0) {
            const struct llama_boundary_layout layout = {sizeof(layout), LLAMA_BOUNDARY_ABI, big, bare, fragment};
            take_file(f, a, b);
            f->layouts[f->n_files - 1] = layout;
        }
    } else if (strcmp(word, "logits") == 0 && sscanf(line, "%*s %9d %64s", &x, b) == 2) {
        if (f->n_files > 0) {
            run_step(f, x, b);
            f->n_steps++;
            drop_files(f);
        }
    } else if (strcmp(word, "end") == 0 && f->loaded) {
        end_fixture(f);
    } else {
        stop("manifest.lines:%d: cannot be understood: %s", number, line);
    }
}
/* NOLINTEND(bugprone-unchecked-string-to-number-conversion,cert-err34-c) */

int main(int argc, char **argv) {
    for (int i = 1, place = 0; i < argc; ++i) {
        if (strcmp(argv[i], "--here") == 0) {
            here = 1;
        } else if (argv[i][0] == '-' || place > 1) {
            fprintf(stderr, "usage: check_fixtures [--here] [FOLDER [MODEL.gguf]]\n");
            return 2;
        } else {
            *(place++ ? &given_model : &folder) = argv[i];
        }
    }

    char path[MAX_PATH], line[MAX_LINE];
    path_of("manifest.lines", path);
    FILE *manifest = fopen(path, "r");
    if (!manifest) {
        stop("cannot read %s: %s", path, reason());
    }
    if (!fgets(line, sizeof(line), manifest) || strcmp(line, "boundary-bundle fixtures 1\n") != 0) {
        stop("%s does not begin with the line 'boundary-bundle fixtures 1'", path);
    }

    llama_log_set(quiet, NULL);
    llama_backend_init();
    static struct fixture fixture;
    for (int number = 2; fgets(line, sizeof(line), manifest); ++number) {
        take_line(&fixture, line, number);
    }
    if (ferror(manifest)) {
        stop("cannot read %s: %s", path, reason());
    }
    (void)fclose(manifest);
    llama_backend_free();
    if (n_fixtures == 0 || fixture.loaded) {
        stop("%s %s", path, fixture.loaded ? "ends inside a fixture" : "holds no fixture");
    }

    printf("%lu fixtures, %lu bundles and %lu logits compared with %s, %lu failures\n", n_fixtures, n_compared_bundles,
           n_compared_logits, here ? "an unsplit run" : "what was recorded", n_failures);
    if (n_failures > 0 && !here) {
        printf("Recorded bytes hold for processors and builds that compute alike; --here compares with an unsplit run instead.\n");
    }
    return n_failures != 0;
}
