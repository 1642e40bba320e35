/*
 * Runs a target without libFuzzer: over its inputs, then over mutations of them. There is no feedback from coverage,
 * which costs more than most executions do.
 *
 *   TARGET [-runs=N] [-seconds=S] [-seed=N] [-current=FILE] FILE_OR_FOLDER...
 *
 * -current: FILE holds the input that is run, its size (8 bytes) before it, also when the process is gone. An input
 * that takes a second of processor time is a finding.
 *
 * SPDX-License-Identifier: MIT
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SIZE = 8192 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
/* Those targets have one whose inputs have a structure. */
__attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

typedef struct input {
    uint8_t *data;
    size_t size;
} input;

static struct current {
    uint64_t size;
    uint8_t data[MAX_SIZE];
} nowhere, *current = &nowhere;

static input *inputs;
static size_t input_count;
static uint64_t state;
static volatile sig_atomic_t running; /* a number that changes with every input, 0: none */

static uint32_t next(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

/* A few bytes changed, inserted, removed or repeated. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    unsigned n = 1 + next() % 4;
    if (size == 0 || size > max_size) {
        return size < max_size ? size : max_size;
    }
    while (n-- > 0) {
        size_t at = next() % size, length = 1 + next() % 8;
        switch (next() % 8) {
        case 0:
            if (size + length <= max_size) {
                memmove(data + at + length, data + at, size - at);
                size += length;
            }
            break;
        case 1:
            if (length < size - at) {
                memmove(data + at, data + at + length, size - at - length);
                size -= length;
            }
            break;
        case 2: data[at] ^= (uint8_t)(1u << next() % 8); break;
        case 3: data[at] = (uint8_t)(data[at] + (next() % 2 != 0 ? 1 : 255)); break;
        default: data[at] = (uint8_t)next();
        }
    }
    return size;
}

static void run(void) {
    static int turn;
    uint8_t *copy = (uint8_t *)malloc(current->size > 0 ? current->size : 1);
    if (copy == NULL) {
        exit(2);
    }
    memcpy(copy, current->data, current->size);
    running = turn = turn % 1000000 + 1;
    (void)LLVMFuzzerTestOneInput(copy, current->size);
    running = 0;
    free(copy);
}

static void on_tick(int number) {
    static int seen;
    (void)number;
    if (running != 0 && running == seen) {
        static const char text[] = "FINDING: one input takes over a second\n";
        if (write(STDERR_FILENO, text, sizeof text - 1) > 0) {
            abort();
        }
    }
    seen = running;
}

static void fail(const char *what, const char *path) {
    fprintf(stderr, "error: %s: %s\n", path, what);
    exit(2);
}

static void take(const char *path) {
    struct stat info;
    FILE *f;
    if (stat(path, &info) != 0) {
        fail("is not there", path);
    }
    if (S_ISDIR(info.st_mode)) {
        DIR *folder = opendir(path);
        struct dirent *entry;
        if (folder == NULL) {
            fail("cannot be opened", path);
        }
        while ((entry = readdir(folder)) != NULL) {
            char name[4096];
            if (entry->d_name[0] != '.' && snprintf(name, sizeof name, "%s/%s", path, entry->d_name) < (int)sizeof name) {
                take(name);
            }
        }
        closedir(folder);
        return;
    }
    f = fopen(path, "rb");
    if (f == NULL) {
        fail("cannot be opened", path);
    }
    current->size = fread(current->data, 1, MAX_SIZE, f);
    fclose(f);
    if (input_count % 1024 == 0) {
        inputs = (input *)realloc(inputs, (input_count + 1024) * sizeof *inputs);
    }
    if (inputs == NULL || (inputs[input_count].data = (uint8_t *)malloc(current->size > 0 ? current->size : 1)) == NULL) {
        fail("no memory", path);
    }
    memcpy(inputs[input_count].data, current->data, current->size);
    inputs[input_count++].size = current->size;
    run();
}

static void keep_current_in(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    void *p = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof *current) == 0) {
        p = mmap(NULL, sizeof *current, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (p == MAP_FAILED) {
        fail("cannot be written", path);
    }
    close(fd);
    current = (struct current *)p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    const struct itimerval second = {{1, 0}, {1, 0}};
    double begin = now(), seconds = 0;
    long runs = 0, done;
    int i;
    state = (uint64_t)(begin * 1e9) ^ (uint64_t)getpid() << 32;
    signal(SIGPROF, on_tick);
    setitimer(ITIMER_PROF, &second, NULL);
    for (i = 1; i < argc && argv[i][0] == '-'; i++) {
        const char *value = strchr(argv[i], '=');
        if (value == NULL) {
            fail("is no option", argv[i]);
        } else if (strncmp(argv[i], "-runs=", 6) == 0) {
            runs = atol(value + 1);
        } else if (strncmp(argv[i], "-seconds=", 9) == 0) {
            seconds = atof(value + 1);
        } else if (strncmp(argv[i], "-seed=", 6) == 0) {
            state = (uint64_t)atol(value + 1);
        } else if (strncmp(argv[i], "-current=", 9) == 0) {
            keep_current_in(value + 1);
        } else {
            fail("is no option", argv[i]);
        }
    }
    for (; i < argc; i++) {
        take(argv[i]);
    }
    for (done = 0; input_count > 0 && (done < runs || (seconds > 0 && (done % 256 != 0 || now() - begin < seconds))); done++) {
        const input *from = &inputs[next() % input_count];
        unsigned times = 1 + next() % 3;
        memcpy(current->data, from->data, from->size);
        current->size = from->size;
        while (times-- > 0) {
            current->size = LLVMFuzzerCustomMutator != NULL
                                ? LLVMFuzzerCustomMutator(current->data, current->size, MAX_SIZE, next())
                                : LLVMFuzzerMutate(current->data, current->size, MAX_SIZE);
        }
        run();
    }
    while (input_count > 0) {
        free(inputs[--input_count].data);
    }
    free(inputs);
    return 0;
}
