/*
 * The mutants of the C codec before the vectors: reads numbers of mutants from its
 * standard input, runs the vectors of a file with each in a process of its own, and
 * says what became of it:
 *
 *     NUMBER lives|differs|crashes|hangs VECTORS LAST_VECTOR
 *
 * fuzz/mutants_c.py writes and links the codec, whose variable bb_mutant chooses.
 *
 * SPDX-License-Identifier: MIT
 */
#define _GNU_SOURCE /* mmap and its anonymous memory */
#define main run_vectors_main
#include "run_vectors.c"
#undef main

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

extern int bb_mutant;

/* Where a child is, for its parent. */
typedef struct place {
    unsigned vectors;
    char name[128];
} place;

static void run_all(char *file, place *at) {
    char *line, *next;
    vector v;
    bool open = false;
    for (line = file; *line != '\0'; line = next) {
        next = strchr(line, '\n');
        if (next == NULL) {
            fatal("the file ends inside a line");
        }
        *next++ = '\0';
        if (strncmp(line, "vector ", 7) == 0) {
            begin(&v, line + 7);
            open = true;
            at->vectors++;
            snprintf(at->name, sizeof at->name, "%s", line + 7);
        } else if (strcmp(line, "end") == 0 && open) {
            run_vector(&v);
            if (failed != 0) {
                _exit(1);
            }
            finish(&v);
            open = false;
        } else if (open) {
            read_line(&v, line, NULL);
        } else {
            fatal("a line outside a vector");
        }
    }
}

int main(int argc, char **argv) {
    char line[32];
    char *file;
    place *at;
    rlim_t patience;
    if (argc != 3) {
        fatal("run_mutants FILE SECONDS");
    }
    file = read_file(argv[1]);
    patience = (rlim_t)atoi(argv[2]);
    at = (place *)mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        fatal("no memory to share");
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        int number = atoi(line), status = 0;
        const char *how = "lives";
        pid_t child;
        memset(at, 0, sizeof *at);
        fflush(stdout);
        child = fork();
        if (child < 0) {
            fatal("no more processes");
        }
        if (child == 0) {
            const struct rlimit limit = {patience, patience};
            setrlimit(RLIMIT_CPU, &limit);
            if (freopen("/dev/null", "w", stdout) == NULL || freopen("/dev/null", "w", stderr) == NULL) {
                _exit(2);
            }
            bb_mutant = number;
            run_all(file, at);
            _exit(0);
        }
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) {
            how = WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL ? "hangs" : "crashes";
        } else if (WEXITSTATUS(status) != 0) {
            how = "differs";
        }
        printf("%d %s %u %s\n", number, how, at->vectors, at->name[0] != '\0' ? at->name : "-");
        fflush(stdout);
    }
    return 0;
}
