/* A testee to start from (spec/testee-protocol.md):
 *
 *     cc -std=c11 -O2 template.c -o testee && boundary-bundle conformance -- ./testee
 *
 * Fill in decode() and encode() with your codec; what it cannot do stays skipped.
 * C has no JSON of its own. The three functions below find the members of an
 * object in one line of the kit; take a library if you have one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Just after the JSON value at p. */
static const char *skip(const char *p) {
    int depth = 0;
    do {
        if (*p == '"') for (p++; *p && *p != '"'; p++) p += *p == '\\' && p[1];
        else if (*p == '{' || *p == '[') depth++;
        else if (*p == '}' || *p == ']') depth--;
        if (*p) p++;
        if (!depth && strchr(":,}] \n", *p)) return p;
    } while (*p);
    return p;
}

/* The value of a member of the object at p, or NULL. For lists step with skip() yourself. */
static const char *member(const char *p, const char *key) {
    size_t n = strlen(key);
    for (p++; *p == '"';) {
        const char *name = p + 1, *value = skip(p) + strspn(skip(p), " :");
        while (*value == ':' || *value == ' ') value++;
        if (!strncmp(name, key, n) && name[n] == '"') return value;
        for (p = skip(value); *p == ',' || *p == ' '; p++) {}
    }
    return NULL;
}

static int is(const char *value, const char *text) {
    return value && *value == '"' && !strncmp(value + 1, text, strlen(text)) && value[1 + strlen(text)] == '"';
}

/* Print members of the answer: "bundles", and "error" with "name", "number" and "offset"
 * if there was one. Integers of 64 bits are strings. data: n bytes; pieces: a list of
 * their sizes in JSON, or NULL: whole. The class is member(request, "class"). */
static void decode(const char *request, const unsigned char *data, size_t n, const char *pieces) {
    (void)request;
    (void)data;
    (void)n;
    (void)pieces;
    printf(",\"skipped\":\"no decoder yet\"");
}

/* Print "data" in hexadecimal digits, or "error". */
static void encode(const char *request, const char *bundle) {
    (void)request;
    (void)bundle;
    printf(",\"skipped\":\"no encoder yet\"");
}

int main(void) {
    static char line[64 << 20]; /* the longest request of the kit has about 2 MB */
    while (fgets(line, sizeof line, stdin)) {
        const char *seq = member(line, "seq"), *cmd = member(line, "cmd"), *hex = member(line, "data");
        printf("{\"seq\":%ld", seq ? strtol(seq, NULL, 10) : -1);
        if (is(cmd, "hello"))
            printf(",\"protocol\":1,\"name\":\"template\",\"language\":\"C\",\"version\":\"0\","
                   "\"classes\":[\"one\",\"core\",\"stream\"],\"dtypes\":[\"f32\",\"i32\"]");
        else if (is(cmd, "decode") || is(cmd, "stream")) {
            size_t n = hex ? (size_t)(skip(hex) - hex - 2) / 2 : 0;
            unsigned char *data = malloc(n + 1);
            for (size_t i = 0; data && i < n; i++) data[i] = (unsigned char)strtol((char[]){hex[1 + 2 * i], hex[2 + 2 * i], 0}, NULL, 16);
            decode(line, data, n, member(line, "pieces"));
            free(data);
        } else if (is(cmd, "encode")) encode(line, member(line, "bundle"));
        else if (!is(cmd, "stop")) printf(",\"skipped\":\"unknown command\"");
        printf("}\n");
        if (fflush(stdout) != 0 || is(cmd, "stop")) break;
    }
    return 0;
}
