/*
 * The C codec against the conformance vectors, for machines without Python.
 *
 *     python -m boundary_bundle.conformance.transcript > vectors.txt
 *     run_vectors [-s SECTION] vectors.txt
 *
 * Each vector is decoded by the function for one bundle, by the core and by the
 * stream class, as the vector asks, whole and in pieces, ordinary and prepared
 * with its own head; what comes out must be the transcript in the file, and
 * encode to the bytes there. -s: only the vectors of one section. Exit status 1
 * if a vector fails, 2 if the file cannot be read or what was decoded cannot be
 * encoded, 3 if there was no vector to run.
 *
 * SPDX-License-Identifier: MIT
 */
#include "transcript.h"

#define MANY 512 /* rules of one contract */

typedef struct vector {
    const char *name;
    char kinds[3][8];
    size_t kind_count;
    bool chosen, require_checksums, address_64, has_contract, has_or;
    bb_limits limits;
    bb_contract contract;
    text input, expected, other, encoded;
    bool has_encoded;
    uint32_t *pieces;
    size_t piece_count;
} vector;

static bb_contract_tensor rules[MANY];
static bb_contract_attr wanted[MANY];
static uint8_t *wanted_values[MANY];
static unsigned ran, left_out, failed;

/* ---- reading ------------------------------------------------------------- */

static int digit_of(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Appends the bytes of hexadecimal digits. */
static void put_hex(text *t, const char *hex) {
    room(t, strlen(hex) / 2);
    for (; digit_of(hex[0]) >= 0 && digit_of(hex[1]) >= 0; hex += 2) {
        t->at[t->length++] = (char)(digit_of(hex[0]) * 16 + digit_of(hex[1]));
    }
    if (*hex != '\0' && strcmp(hex, "-") != 0) {
        fatal("bad hexadecimal digits");
    }
}

/* "COUNT HEX" */
static void put_data(text *t, const char *s) {
    char *hex;
    unsigned long long count = strtoull(s, &hex, 10), i;
    size_t start = t->length, n;
    put_hex(t, hex + 1);
    n = t->length - start;
    room(t, (size_t)count * n);
    for (i = 1; i < count; i++) {
        memcpy(t->at + t->length, t->at + start, n);
        t->length += n;
    }
}

static char *next_word(char **s) {
    char *word = *s;
    char *end = strchr(word, ' ');
    if (end != NULL) {
        *end = '\0';
        *s = end + 1;
    } else {
        *s = word + strlen(word);
    }
    return word;
}

static void read_limit(vector *v, char *s) {
    static const char *const names[] = {"head_bytes",      "tensors",   "name_bytes",   "rank",
                                        "dimension",       "payload_bytes", "attribute_bytes", "fragments",
                                        "open_bundles",    "extension_bytes"};
    bb_limits most;
    uint64_t *limit = &v->limits.head_bytes, *maximum = &most.head_bytes, value;
    const char *name = next_word(&s);
    size_t i;
    bb_limits_maximum(&most);
    value = strtoull(s, NULL, 10);
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i], name) == 0) {
            /* A smaller address space uses the largest value it can hold (section 7). */
            limit[i] = value < maximum[i] ? value : maximum[i];
            return;
        }
    }
    fatal("an unknown limit");
}

static void read_attribute(vector *v, char *s) {
    bb_contract_attr *a = &wanted[v->contract.attr_count];
    text value = {NULL, 0, 0};
    if (v->contract.attr_count == MANY) {
        fatal("too many attributes in a contract");
    }
    memset(a, 0, sizeof *a);
    a->attr.key = (uint16_t)strtoul(next_word(&s), NULL, 10);
    a->attr.type = (uint8_t)strtoul(next_word(&s), NULL, 10);
    a->any = strcmp(s, "*") == 0;
    if (!a->any) {
        unsigned i;
        put(&value, "");
        put_hex(&value, s);
        a->attr.length = (uint32_t)value.length;
        a->attr.value = value.at;
        for (i = 0; i < 8 && i < value.length; i++) {
            a->attr.u64 |= (uint64_t)(uint8_t)value.at[i] << 8 * i;
        }
    }
    wanted_values[v->contract.attr_count++] = (uint8_t *)value.at;
}

static void read_rule(vector *v, char *s) {
    bb_contract_tensor *t = &rules[v->contract.tensor_count];
    char *axis;
    if (v->contract.tensor_count == MANY) {
        fatal("too many tensors in a contract");
    }
    v->contract.tensor_count++;
    memset(t, 0, sizeof *t);
    t->name = next_word(&s);
    t->dtype = (uint8_t)strtoul(next_word(&s), NULL, 10);
    axis = next_word(&s);
    t->token_axis = strcmp(axis, "-") == 0 ? BB_NO_TOKEN_AXIS : (uint8_t)strtoul(axis, NULL, 10);
    while (*s != '\0' && *s != '-') {
        t->dims[t->rank].symbols = strtoull(s, &s, 10);
        t->dims[t->rank].number = strtoull(s + 1, &s, 10); /* after the '+' */
        t->rank++;
        s += *s == ',';
    }
}

/* ---- running ------------------------------------------------------------- */

static void run_one(const vector *v, const char *kind, const bb_prepared *prepared, const uint32_t *pieces,
                    size_t piece_count, const char *how) {
    text t = {NULL, 0, 0}, encoded = {NULL, 0, 0};
    bb_config c;
    bool other;
    bb_config_init(&c);
    c.limits = v->limits;
    c.require_checksums = v->require_checksums;
    put(&t, "");
    put(&encoded, "");
    transcribe(&t, kind, &c, prepared, v->has_contract ? &v->contract : NULL, (const uint8_t *)v->input.at,
               v->input.length, pieces, piece_count, false, &encoded);
    other = v->has_or && strcmp(t.at, v->other.at) == 0;
    if (!other && strcmp(t.at, v->expected.at) != 0) {
        failed++;
        printf("%s, %s, %s:\n-- expected\n%.2000s-- found\n%.2000s", v->name, kind, how, v->expected.at, t.at);
    } else if (!other && v->has_encoded &&
               (encoded.length != v->encoded.length || memcmp(encoded.at, v->encoded.at, encoded.length) != 0)) {
        failed++;
        printf("%s, %s, %s: encodes to other bytes\n", v->name, kind, how);
    }
    free(t.at);
    free(encoded.at);
}

static void run_vector(const vector *v) {
    uint8_t *memory = (uint8_t *)get_memory(NULL, v->input.length);
    bb_prepared ready;
    bb_config c;
    bool prepared;
    size_t i;
    if (v->address_64 && sizeof(void *) < 8) {
        left_out++;
        free(memory);
        return;
    }
    ran++;
    bb_config_init(&c);
    c.limits = v->limits;
    c.require_checksums = v->require_checksums;
    prepared = bb_prepare_decode(&ready, &c, v->input.at, v->input.length, memory, v->input.length, NULL) == BB_OK;
    for (i = 0; i < v->kind_count; i++) {
        static const uint32_t small[4] = {1, 7, 63, 100};
        const char *kind = v->kinds[i];
        run_one(v, kind, NULL, NULL, 0, "whole");
        if (prepared) {
            run_one(v, kind, &ready, NULL, 0, "prepared");
        }
        if (strcmp(kind, "one") != 0) {
            size_t count = v->input.length < 4096 ? v->input.length : 4096, k;
            uint32_t *each = (uint32_t *)get_memory(NULL, count * sizeof *each);
            for (k = 0; k < count; k++) {
                each[k] = 1;
            }
            run_one(v, kind, NULL, each, count, "byte by byte");
            for (k = 0; k < count; k++) {
                each[k] = small[k % 4];
            }
            run_one(v, kind, NULL, each, count, "in pieces");
            if (v->piece_count > 0) {
                run_one(v, kind, NULL, v->pieces, v->piece_count, "in its pieces");
            }
            free(each);
        }
    }
    free(memory);
}

static void begin(vector *v, const char *name) {
    memset(v, 0, sizeof *v);
    v->name = name;
    bb_limits_default(&v->limits);
    v->contract.attrs = wanted;
    v->contract.tensors = rules;
    put(&v->input, "");
    put(&v->expected, "");
    put(&v->other, "");
    put(&v->encoded, "");
}

static void finish(vector *v) {
    uint32_t i;
    for (i = 0; i < v->contract.attr_count; i++) {
        free(wanted_values[i]);
    }
    free(v->input.at);
    free(v->expected.at);
    free(v->other.at);
    free(v->encoded.at);
    free(v->pieces);
}

static void read_line(vector *v, char *line, const char *section) {
    char *s = line;
    const char *word = next_word(&s);
    if (strcmp(word, "section") == 0) {
        v->chosen = section == NULL || strcmp(section, s) == 0;
    } else if (strcmp(word, "class") == 0) {
        while (*s != '\0' && v->kind_count < 3) {
            strncpy(v->kinds[v->kind_count++], next_word(&s), sizeof v->kinds[0] - 1);
        }
    } else if (strcmp(word, "require_checksums") == 0) {
        v->require_checksums = true;
    } else if (strcmp(word, "address_64") == 0) {
        v->address_64 = true;
    } else if (strcmp(word, "limit") == 0) {
        read_limit(v, s);
    } else if (strcmp(word, "contract") == 0) {
        v->has_contract = true;
    } else if (strcmp(word, "contract-attribute") == 0) {
        read_attribute(v, s);
    } else if (strcmp(word, "contract-tensor") == 0) {
        read_rule(v, s);
    } else if (strcmp(word, "input") == 0) {
        put_data(&v->input, s);
    } else if (strcmp(word, "pieces") == 0) {
        v->pieces = (uint32_t *)get_memory(NULL, (strlen(s) + 1) * sizeof *v->pieces);
        while (*s != '\0') {
            v->pieces[v->piece_count++] = (uint32_t)strtoul(next_word(&s), NULL, 10);
        }
    } else if (strcmp(word, "expect") == 0) {
        put(&v->expected, s);
        put(&v->expected, "\n");
    } else if (strcmp(word, "or") == 0) {
        v->has_or = true;
        put(&v->other, s);
        put(&v->other, "\n");
    } else if (strcmp(word, "encoded") == 0) {
        v->has_encoded = true;
        put_data(&v->encoded, s);
    } else {
        fatal("an unknown line");
    }
}

static char *read_file(const char *path) {
    FILE *f = fopen(path, "rb");
    text t = {NULL, 0, 0};
    size_t n;
    if (f == NULL) {
        fatal("the file cannot be opened");
    }
    do {
        room(&t, 65536);
        n = fread(t.at + t.length, 1, 65536, f);
        t.length += n;
    } while (n > 0);
    t.at[t.length] = '\0';
    fclose(f);
    return t.at;
}

int main(int argc, char **argv) {
    const char *section = NULL;
    char *file, *line, *next;
    vector v;
    bool open = false;
    if (argc == 4 && strcmp(argv[1], "-s") == 0) {
        section = argv[2];
    } else if (argc != 2) {
        fatal("run_vectors [-s SECTION] FILE");
    }
    file = read_file(argv[argc - 1]);
    for (line = file; *line != '\0'; line = next) {
        next = strchr(line, '\n');
        if (next == NULL) {
            fatal("the file ends inside a line");
        }
        *next++ = '\0';
        if (strncmp(line, "vector ", 7) == 0 && !open) {
            begin(&v, line + 7);
            open = true;
        } else if (strcmp(line, "end") == 0 && open) {
            if (v.chosen) {
                run_vector(&v);
            }
            finish(&v);
            open = false;
        } else if (open) {
            read_line(&v, line, section);
        } else {
            fatal("a line outside a vector");
        }
    }
    free(file);
    printf("%u vectors, %u failures", ran, failed);
    if (left_out > 0) {
        printf("; %u not run: they need 64-bit addresses", left_out);
    }
    printf("\n");
    if (open) {
        fatal("the file ends inside a vector");
    }
    return ran == 0 ? 3 : failed != 0;
}
