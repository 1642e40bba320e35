/*
 * boundary_bundle.c - codec of the boundary bundle format, version 1.0
 * (spec/boundary-bundle.md).
 *
 * Every check of the specification's section 6 stands once, in that order, with
 * its step number in a comment. The decoder of a buffer, the decoder of a stream
 * and the encoder all come through the same check functions.
 *
 * SPDX-License-Identifier: MIT
 */
#include "boundary_bundle.h"

#include <string.h>

#if !defined(BB_NO_HARDWARE_CRC)
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#define BB_CRC_X86 1
#elif defined(_M_X64) && defined(_MSC_VER)
#include <intrin.h>
#define BB_CRC_X86 1
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__) && \
    (defined(__ARM_FEATURE_CRC32) || defined(__linux__))
#if !defined(__ARM_FEATURE_CRC32)
#include <sys/auxv.h> /* the one other call into the system, from bb_config_init */
#endif
#define BB_CRC_ARM 1
#endif
#endif

/* ---- bytes and sizes ----------------------------------------------------- */

/* Errors are put together apart from the code that finds them, which stays short. */
#if defined(__GNUC__) || defined(__clang__)
#define BB_COLD __attribute__((noinline, cold))
#else
#define BB_COLD
#endif

/* Framing integers are little-endian whatever the machine. */
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* Seen by the compiler as one load, so that even the rarely used calls are inlined. */
static inline uint16_t load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint64_t load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
#else
static uint16_t load16(const uint8_t *p) { return (uint16_t)(p[0] | (unsigned)p[1] << 8); }

static uint32_t load32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t load64(const uint8_t *p) { return (uint64_t)load32(p) | (uint64_t)load32(p + 4) << 32; }
#endif

static void store16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)(v & 0xFF);
    p[1] = (uint8_t)(v >> 8);
}

static void store32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)(v & 0xFF);
    p[1] = (uint8_t)(v >> 8 & 0xFF);
    p[2] = (uint8_t)(v >> 16 & 0xFF);
    p[3] = (uint8_t)(v >> 24);
}

static void store64(uint8_t *p, uint64_t v) {
    store32(p, (uint32_t)(v & 0xFFFFFFFFu));
    store32(p + 4, (uint32_t)(v >> 32));
}

/* Callers have bounded n far below 2^64 - 63. */
static uint64_t pad8(uint64_t n) { return (n + 7) & ~(uint64_t)7; }
static uint64_t pad64(uint64_t n) { return (n + 63) & ~(uint64_t)63; }

/* False on overflow. The first test spares the division in every real case. */
static bool multiply(uint64_t a, uint64_t b, uint64_t *product) {
    if ((a | b) >> 32 != 0 && a != 0 && b > UINT64_MAX / a) {
        return false;
    }
    *product = a * b;
    return true;
}

/* Index of the first byte that is not zero, or n. */
static uint64_t first_nonzero(const uint8_t *p, uint64_t n) {
    uint64_t i = 0;
    while (i < n && p[i] == 0) {
        i++;
    }
    return i;
}

/* Index of the first byte that is neither 0 nor 1, or n. Eight bytes a step:
 * every token of a batch has such a byte. */
static uint64_t first_not_bool(const uint8_t *p, uint64_t n) {
    uint64_t i = 0;
    for (; n - i >= 8; i += 8) {
        uint64_t word;
        memcpy(&word, p + i, 8);
        if ((word & 0xFEFEFEFEFEFEFEFEu) != 0) {
            break;
        }
    }
    while (i < n && p[i] < 2) {
        i++;
    }
    return i;
}

/* The alphabet of tensor names: a-z A-Z 0-9 . _ - / as a set of 256 bits. */
static bool name_byte(uint8_t c) {
    static const uint32_t set[8] = {0, 0x03FFE000u, 0x87FFFFFEu, 0x07FFFFFEu, 0, 0, 0, 0};
    return (set[c >> 5] >> (c & 31) & 1) != 0;
}

/* Are all n bytes of a name in the alphabet, and the zeros after it up to a
 * multiple of eight zero? Eight bytes at once: `- . /` and the digits are
 * neighbours in ASCII, letters differ from each other by case in one bit. A sum
 * of two numbers below 0x80 carries into no other byte. */
static bool name_is_plain(const uint8_t *name, uint32_t n) {
    const uint64_t each = 0x0101010101010101u;
    uint64_t bad = 0;
    for (;;) {
        uint64_t w = load64(name);
        uint64_t low = w & each * 0x7F;
        uint64_t folded = low | each * 0x20;
        uint64_t digit = (low + each * (0x80 - '-')) & ~(low + each * (0x7F - '9'));
        uint64_t letter = (folded + each * (0x80 - 'a')) & ~(folded + each * (0x7F - 'z'));
        uint64_t underscore = ~((low ^ each * '_') + each * 0x7F);
        uint64_t good = (digit | letter | underscore) & ~w & each * 0x80;
        if (n <= 8) {
            uint64_t all = UINT64_MAX >> (64 - 8 * n);
            return bad == 0 && (~good & each * 0x80 & all) == 0 && (w & ~all) == 0;
        }
        bad |= ~good & each * 0x80;
        name += 8;
        n -= 8;
    }
}

static void reverse(void *dst, const void *src, uint64_t bytes, uint32_t element) {
    uint8_t *d = (uint8_t *)dst;
    const uint8_t *s = (const uint8_t *)src;
    uint64_t i;
    if (element == 2) {
        for (i = 0; i + 2 <= bytes; i += 2) {
            uint8_t low = s[i];
            d[i] = s[i + 1];
            d[i + 1] = low;
        }
    } else if (element == 4) {
        for (i = 0; i + 4 <= bytes; i += 4) {
            uint32_t v;
            memcpy(&v, s + i, 4);
            v = v >> 24 | (v >> 8 & 0xFF00u) | (v << 8 & 0xFF0000u) | v << 24;
            memcpy(d + i, &v, 4);
        }
    } else {
        for (i = 0; i + 8 <= bytes; i += 8) {
            uint64_t v;
            memcpy(&v, s + i, 8);
            v = (v >> 8 & 0x00FF00FF00FF00FFu) | (v & 0x00FF00FF00FF00FFu) << 8;
            v = (v >> 16 & 0x0000FFFF0000FFFFu) | (v & 0x0000FFFF0000FFFFu) << 16;
            v = v >> 32 | v << 32;
            memcpy(d + i, &v, 8);
        }
    }
}

/* ---- CRC32C -------------------------------------------------------------- */

/* A CRC without its initial and final xor is linear over GF(2), so a table is
 * known by its entries at the powers of two: the macros below expand 8 numbers
 * to 256 entries, 4 numbers to 16. */
#define LIN4(n, a, b, c, d) \
    ((((n)&1u) ? (a) : 0u) ^ (((n)&2u) ? (b) : 0u) ^ (((n)&4u) ? (c) : 0u) ^ (((n)&8u) ? (d) : 0u))
#define LIN8(n, a, b, c, d, e, f, g, h) (LIN4(n, a, b, c, d) ^ LIN4((n) >> 4, e, f, g, h))
#define ROW4(n, a, b, c, d, e, f, g, h) \
    LIN8(n, a, b, c, d, e, f, g, h), LIN8((n) + 1u, a, b, c, d, e, f, g, h), \
        LIN8((n) + 2u, a, b, c, d, e, f, g, h), LIN8((n) + 3u, a, b, c, d, e, f, g, h)
#define ROW16(n, a, b, c, d, e, f, g, h) \
    ROW4(n, a, b, c, d, e, f, g, h), ROW4((n) + 4u, a, b, c, d, e, f, g, h), \
        ROW4((n) + 8u, a, b, c, d, e, f, g, h), ROW4((n) + 12u, a, b, c, d, e, f, g, h)
#define ROW64(n, a, b, c, d, e, f, g, h) \
    ROW16(n, a, b, c, d, e, f, g, h), ROW16((n) + 16u, a, b, c, d, e, f, g, h), \
        ROW16((n) + 32u, a, b, c, d, e, f, g, h), ROW16((n) + 48u, a, b, c, d, e, f, g, h)
#define ROW256(a, b, c, d, e, f, g, h) \
    { ROW64(0u, a, b, c, d, e, f, g, h), ROW64(64u, a, b, c, d, e, f, g, h), \
      ROW64(128u, a, b, c, d, e, f, g, h), ROW64(192u, a, b, c, d, e, f, g, h) }

/* byte_table[k][x]: the register that holds x alone, after k + 1 more bytes. */
static const uint32_t byte_table[8][256] = {
    ROW256(0xF26B8303u, 0xE13B70F7u, 0xC79A971Fu, 0x8AD958CFu, 0x105EC76Fu, 0x20BD8EDEu, 0x417B1DBCu, 0x82F63B78u),
    ROW256(0x13A29877u, 0x274530EEu, 0x4E8A61DCu, 0x9D14C3B8u, 0x3FC5F181u, 0x7F8BE302u, 0xFF17C604u, 0xFBC3FAF9u),
    ROW256(0xA541927Eu, 0x4F6F520Du, 0x9EDEA41Au, 0x38513EC5u, 0x70A27D8Au, 0xE144FB14u, 0xC76580D9u, 0x8B277743u),
    ROW256(0xDD45AAB8u, 0xBF672381u, 0x7B2231F3u, 0xF64463E6u, 0xE964B13Du, 0xD725148Bu, 0xABA65FE7u, 0x52A0C93Fu),
    ROW256(0x38116FACu, 0x7022DF58u, 0xE045BEB0u, 0xC5670B91u, 0x8F2261D3u, 0x1BA8B557u, 0x37516AAEu, 0x6EA2D55Cu),
    ROW256(0xEF306B19u, 0xDB8CA0C3u, 0xB2F53777u, 0x6006181Fu, 0xC00C303Eu, 0x85F4168Du, 0x0E045BEBu, 0x1C08B7D6u),
    ROW256(0x68032CC8u, 0xD0065990u, 0xA5E0C5D1u, 0x4E2DFD53u, 0x9C5BFAA6u, 0x3D5B83BDu, 0x7AB7077Au, 0xF56E0EF4u),
    ROW256(0x493C7D27u, 0x9278FA4Eu, 0x211D826Du, 0x423B04DAu, 0x847609B4u, 0x0D006599u, 0x1A00CB32u, 0x34019664u)};

/* Slicing by eight: eight table look-ups move the register eight bytes on. */
uint32_t bb_crc32c_portable(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low = crc ^ load32(p);
        uint32_t high = load32(p + 4);
        crc = byte_table[7][low & 0xFF] ^ byte_table[6][low >> 8 & 0xFF] ^ byte_table[5][low >> 16 & 0xFF] ^
              byte_table[4][low >> 24] ^ byte_table[3][high & 0xFF] ^ byte_table[2][high >> 8 & 0xFF] ^
              byte_table[1][high >> 16 & 0xFF] ^ byte_table[0][high >> 24];
    }
    for (; n > 0; n--, p++) {
        crc = byte_table[0][(crc ^ *p) & 0xFF] ^ crc >> 8;
    }
    return ~crc;
}

#if defined(BB_CRC_X86) || defined(BB_CRC_ARM)

/* As assembly, since compilers differ in the name of the feature that lets a
 * function use the builtins. */
#if defined(BB_CRC_X86) && defined(_MSC_VER) && !defined(__clang__)
#define BB_CRC_TARGET
static uint64_t crc_8(uint64_t c, uint64_t v) { return _mm_crc32_u64(c, v); }
static uint64_t crc_4(uint64_t c, uint32_t v) { return _mm_crc32_u32((uint32_t)c, v); }
static uint64_t crc_1(uint64_t c, uint8_t v) { return _mm_crc32_u8((uint32_t)c, v); }
#elif defined(BB_CRC_X86)
#define BB_CRC_TARGET
static inline uint64_t crc_8(uint64_t c, uint64_t v) {
    __asm__("crc32q %1, %0" : "+r"(c) : "rm"(v));
    return c;
}
static inline uint64_t crc_4(uint64_t c, uint32_t v) {
    uint32_t low = (uint32_t)c;
    __asm__("crc32l %1, %0" : "+r"(low) : "rm"(v));
    return low;
}
static inline uint64_t crc_1(uint64_t c, uint8_t v) {
    uint32_t low = (uint32_t)c;
    __asm__("crc32b %1, %0" : "+r"(low) : "rm"(v));
    return low;
}
#else
#define BB_CRC_TARGET __attribute__((target("+crc")))
BB_CRC_TARGET static inline uint64_t crc_8(uint64_t c, uint64_t v) {
    __asm__("crc32cx %w0, %w0, %x1" : "+r"(c) : "r"(v));
    return c;
}
BB_CRC_TARGET static inline uint64_t crc_4(uint64_t c, uint32_t v) {
    __asm__("crc32cw %w0, %w0, %w1" : "+r"(c) : "r"(v));
    return c;
}
BB_CRC_TARGET static inline uint64_t crc_1(uint64_t c, uint8_t v) {
    __asm__("crc32cb %w0, %w0, %w1" : "+r"(c) : "r"((uint32_t)v));
    return c;
}
#endif

#define ROW_NIBBLE(a, b, c, d) \
    { LIN4(0u, a, b, c, d), LIN4(1u, a, b, c, d), LIN4(2u, a, b, c, d), LIN4(3u, a, b, c, d), \
      LIN4(4u, a, b, c, d), LIN4(5u, a, b, c, d), LIN4(6u, a, b, c, d), LIN4(7u, a, b, c, d), \
      LIN4(8u, a, b, c, d), LIN4(9u, a, b, c, d), LIN4(10u, a, b, c, d), LIN4(11u, a, b, c, d), \
      LIN4(12u, a, b, c, d), LIN4(13u, a, b, c, d), LIN4(14u, a, b, c, d), LIN4(15u, a, b, c, d) }

/* The register after 512 and after 4096 zero bytes, by its eight nibbles. */
static const uint32_t after_512[8][16] = {ROW_NIBBLE(0xBD6F81F8u, 0x7F337501u, 0xFE66EA02u, 0xF921A2F5u),
                                          ROW_NIBBLE(0xF7AF331Bu, 0xEAB210C7u, 0xD088577Fu, 0xA4FCD80Fu),
                                          ROW_NIBBLE(0x4C15C6EFu, 0x982B8DDEu, 0x35BB6D4Du, 0x6B76DA9Au),
                                          ROW_NIBBLE(0xD6EDB534u, 0xA8371C99u, 0x55824FC3u, 0xAB049F86u),
                                          ROW_NIBBLE(0x53E549FDu, 0xA7CA93FAu, 0x4A795105u, 0x94F2A20Au),
                                          ROW_NIBBLE(0x2C0932E5u, 0x581265CAu, 0xB024CB94u, 0x65A5E1D9u),
                                          ROW_NIBBLE(0xCB4BC3B2u, 0x937BF195u, 0x231B95DBu, 0x46372BB6u),
                                          ROW_NIBBLE(0x8C6E576Cu, 0x1D30D829u, 0x3A61B052u, 0x74C360A4u)};
static const uint32_t after_4096[8][16] = {ROW_NIBBLE(0xC2A5B65Eu, 0x80A71A4Du, 0x04A2426Bu, 0x094484D6u),
                                           ROW_NIBBLE(0x128909ACu, 0x25121358u, 0x4A2426B0u, 0x94484D60u),
                                           ROW_NIBBLE(0x2D7CEC31u, 0x5AF9D862u, 0xB5F3B0C4u, 0x6E0B1779u),
                                           ROW_NIBBLE(0xDC162EF2u, 0xBDC02B15u, 0x7E6C20DBu, 0xFCD841B6u),
                                           ROW_NIBBLE(0xFC5CF59Du, 0xFD559DCBu, 0xFF474D67u, 0xFB62EC3Fu),
                                           ROW_NIBBLE(0xF329AE8Fu, 0xE3BF2BEFu, 0xC292212Fu, 0x80C834AFu),
                                           ROW_NIBBLE(0x047C1FAFu, 0x08F83F5Eu, 0x11F07EBCu, 0x23E0FD78u),
                                           ROW_NIBBLE(0x47C1FAF0u, 0x8F83F5E0u, 0x1AEB9D31u, 0x35D73A62u)};

static uint32_t advance(const uint32_t table[8][16], uint32_t crc) {
    return table[0][crc & 15] ^ table[1][crc >> 4 & 15] ^ table[2][crc >> 8 & 15] ^ table[3][crc >> 12 & 15] ^
           table[4][crc >> 16 & 15] ^ table[5][crc >> 20 & 15] ^ table[6][crc >> 24 & 15] ^ table[7][crc >> 28];
}

/* The instruction has a latency of three and a throughput of one, so three
 * neighbouring blocks run side by side and are joined by linearity. */
BB_CRC_TARGET static uint32_t three_blocks(uint32_t crc, const uint8_t *p, size_t block,
                                           const uint32_t table[8][16]) {
    uint64_t first = crc, second = 0, third = 0;
    size_t i;
    for (i = 0; i < block; i += 8) {
        uint64_t a, b, c;
        memcpy(&a, p + i, 8);
        memcpy(&b, p + i + block, 8);
        memcpy(&c, p + i + 2 * block, 8);
        first = crc_8(first, a);
        second = crc_8(second, b);
        third = crc_8(third, c);
    }
    return advance(table, advance(table, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

BB_CRC_TARGET static uint32_t crc32c_hardware(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t tail;
    crc = ~crc;
    for (; n >= 3 * 4096; n -= 3 * 4096, p += 3 * 4096) {
        crc = three_blocks(crc, p, 4096, after_4096);
    }
    for (; n >= 3 * 512; n -= 3 * 512, p += 3 * 512) {
        crc = three_blocks(crc, p, 512, after_512);
    }
    tail = crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        tail = crc_8(tail, v);
    }
    if (n >= 4) { /* a frame header's checksum covers 60 bytes */
        uint32_t v;
        memcpy(&v, p, 4);
        tail = crc_4(tail, v);
        n -= 4;
        p += 4;
    }
    for (; n > 0; n--, p++) {
        tail = crc_1(tail, *p);
    }
    return ~(uint32_t)tail;
}

static bool has_crc_instructions(void) {
#if defined(BB_CRC_X86) && defined(_MSC_VER) && !defined(__clang__)
    int r[4];
    __cpuid(r, 1);
    return (r[2] >> 20 & 1) != 0;
#elif defined(BB_CRC_X86)
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 20 & 1) != 0;
#elif defined(__ARM_FEATURE_CRC32)
    return true;
#else
    return (getauxval(AT_HWCAP) & 1ul << 7) != 0; /* HWCAP_CRC32 */
#endif
}
#endif

/* ---- registries ---------------------------------------------------------- */

typedef struct dtype_row {
    const char *name;
    uint8_t code, block_elements, block_bytes;
    bool both_orders;
} dtype_row;

static const dtype_row dtypes[] = {
    {"f64", BB_F64, 1, 8, true},
    {"f32", BB_F32, 1, 4, true},
    {"f16", BB_F16, 1, 2, true},
    {"bf16", BB_BF16, 1, 2, true},
    {"f8_e4m3fn", BB_F8_E4M3FN, 1, 1, false},
    {"f8_e5m2", BB_F8_E5M2, 1, 1, false},
    {"i8", BB_I8, 1, 1, false},
    {"i16", BB_I16, 1, 2, true},
    {"i32", BB_I32, 1, 4, true},
    {"i64", BB_I64, 1, 8, true},
    {"u8", BB_U8, 1, 1, false},
    {"u16", BB_U16, 1, 2, true},
    {"u32", BB_U32, 1, 4, true},
    {"u64", BB_U64, 1, 8, true},
    {"bool", BB_BOOL, 1, 1, false},
    {"q8_0", BB_Q8_0, 32, 34, false},
};

/* A switch, not a table indexed by a code that came from outside. */
static const dtype_row *dtype_of(unsigned code) {
    switch (code) {
    case BB_F64: return &dtypes[0];
    case BB_F32: return &dtypes[1];
    case BB_F16: return &dtypes[2];
    case BB_BF16: return &dtypes[3];
    case BB_F8_E4M3FN: return &dtypes[4];
    case BB_F8_E5M2: return &dtypes[5];
    case BB_I8: return &dtypes[6];
    case BB_I16: return &dtypes[7];
    case BB_I32: return &dtypes[8];
    case BB_I64: return &dtypes[9];
    case BB_U8: return &dtypes[10];
    case BB_U16: return &dtypes[11];
    case BB_U32: return &dtypes[12];
    case BB_U64: return &dtypes[13];
    case BB_BOOL: return &dtypes[14];
    case BB_Q8_0: return &dtypes[15];
    default: return NULL;
    }
}

/* Does the text s hold exactly these n bytes, none of which is NUL? */
static bool text_is(const char *s, const void *bytes, size_t n) {
    const char *other = (const char *)bytes;
    size_t i;
    for (i = 0; i < n; i++) {
        if (s[i] != other[i]) {
            return false;
        }
    }
    return s[n] == '\0';
}

const char *bb_dtype_name(unsigned code) {
    const dtype_row *d = dtype_of(code);
    return d != NULL ? d->name : NULL;
}

unsigned bb_dtype_from_name(const char *name) {
    size_t i, n;
    for (i = 0; name != NULL && i < sizeof dtypes / sizeof dtypes[0]; i++) {
        for (n = 0; dtypes[i].name[n] != '\0' && dtypes[i].name[n] == name[n]; n++) {
        }
        if (dtypes[i].name[n] == name[n]) {
            return dtypes[i].code;
        }
    }
    return 0;
}

uint32_t bb_dtype_block_elements(unsigned code) {
    const dtype_row *d = dtype_of(code);
    return d != NULL ? d->block_elements : 0;
}

uint32_t bb_dtype_block_bytes(unsigned code) {
    const dtype_row *d = dtype_of(code);
    return d != NULL ? d->block_bytes : 0;
}

bool bb_dtype_both_orders(unsigned code) {
    const dtype_row *d = dtype_of(code);
    return d != NULL && d->both_orders;
}

typedef struct key_row {
    const char *name;
    uint8_t type, length; /* length 0: any */
    bool forwarded;
} key_row;

static const key_row keys[] = {
    {"architecture", BB_ATTR_TEXT, 0, true},
    {"recipe_fingerprint", BB_ATTR_BYTES, 32, true},
    {"model_fingerprint", BB_ATTR_BYTES, 32, true},
    {"layer_start", BB_ATTR_U64, 8, false},
    {"layer_end", BB_ATTR_U64, 8, false},
    {"n_layer", BB_ATTR_U64, 8, true},
    {"n_tokens", BB_ATTR_U64, 8, true},
    {"n_seqs", BB_ATTR_U64, 8, true},
    {"contract_fingerprint", BB_ATTR_BYTES, 32, false},
};

static const key_row *key_of(unsigned key) {
    switch (key) {
    case BB_KEY_ARCHITECTURE: return &keys[0];
    case BB_KEY_RECIPE_FINGERPRINT: return &keys[1];
    case BB_KEY_MODEL_FINGERPRINT: return &keys[2];
    case BB_KEY_LAYER_START: return &keys[3];
    case BB_KEY_LAYER_END: return &keys[4];
    case BB_KEY_N_LAYER: return &keys[5];
    case BB_KEY_N_TOKENS: return &keys[6];
    case BB_KEY_N_SEQS: return &keys[7];
    case BB_KEY_CONTRACT_FINGERPRINT: return &keys[8];
    default: return NULL;
    }
}

const char *bb_attr_key_name(unsigned key) {
    const key_row *k = key_of(key);
    return k != NULL ? k->name : NULL;
}

unsigned bb_attr_key_type(unsigned key) {
    const key_row *k = key_of(key);
    return k != NULL ? k->type : 0;
}

uint32_t bb_attr_key_length(unsigned key) {
    const key_row *k = key_of(key);
    return k != NULL ? k->length : 0;
}

bool bb_attr_key_forwarded(unsigned key) {
    const key_row *k = key_of(key);
    return k != NULL && k->forwarded;
}

typedef struct error_row {
    int code;
    const char *name, *meaning;
} error_row;

static const error_row errors[] = {
    {BB_E_ARGUMENT, "argument", "the call has an illegal argument"},
    {BB_E_SPACE, "space", "the caller's buffer is too small"},
    {BB_E_MEMORY, "memory", "no memory was given for the bundle"},
    {BB_OK, "ok", "success"},
    {BB_NEED_MORE, "need_more", "more bytes are needed; not an error"},
    {BB_TRUNCATED, "truncated", "the input ended inside a unit or with a bundle open"},
    {BB_TRAILING_BYTES, "trailing_bytes", "bytes follow the end of the one bundle that was expected"},
    {BB_BAD_MAGIC, "bad_magic", "the frame does not begin with the magic"},
    {BB_HEADER_CRC, "header_crc", "the frame header's checksum differs"},
    {BB_HEADER_RESERVED, "header_reserved", "reserved bytes of the frame header are not zero"},
    {BB_HEADER_FLAGS, "header_flags", "a reserved flag of the frame header is set"},
    {BB_HEAD_FIELDS, "head_fields", "field_a or field_b of a head is not zero"},
    {BB_BODY_LENGTH, "body_length", "the body length is illegal for the frame type"},
    {BB_BODY_CRC, "body_crc", "the body's checksum differs"},
    {BB_FRAME_PADDING, "frame_padding", "a padding byte after the body is not zero"},
    {BB_FRAME_VERSION, "frame_version", "the frame's minor version differs from its head's"},
    {BB_BUNDLE_NOT_OPEN, "bundle_not_open", "no bundle of that number is open"},
    {BB_BUNDLE_ALREADY_OPEN, "bundle_already_open", "a bundle of that number is open already"},
    {BB_FRAGMENT_TENSOR, "fragment_tensor", "the fragment names a tensor that the head does not declare"},
    {BB_FRAGMENT_OFFSET, "fragment_offset", "the fragment's offset is not on the grid of fragments"},
    {BB_FRAGMENT_LENGTH, "fragment_length", "the fragment's length is not what its place demands"},
    {BB_FRAGMENT_ORDER, "fragment_order", "the fragment is not the next in canonical order"},
    {BB_FRAGMENT_CONFLICT, "fragment_conflict", "a repeated fragment carries other bytes"},
    {BB_FRAGMENT_MISSING, "fragment_missing", "the end came before all fragments"},
    {BB_END_FRAGMENTS, "end_fragments", "the end's fragment count differs"},
    {BB_END_PAYLOAD_BYTES, "end_payload_bytes", "the end's payload byte count differs"},
    {BB_PAYLOAD_CRC_PRESENT, "payload_crc_present", "a payload checksum is present although the head says none is"},
    {BB_BOOL_VALUE, "bool_value", "a bool is neither 0 nor 1"},
    {BB_HEAD_RESERVED, "head_reserved", "reserved bytes of the head are not zero"},
    {BB_FRAGMENT_SIZE, "fragment_size", "the fragment size is not a legal multiple"},
    {BB_TENSOR_TABLE, "tensor_table", "the tensor records do not fill the tensor table exactly"},
    {BB_TENSOR_BYTE_ORDER, "tensor_byte_order", "the byte order is illegal for the dtype"},
    {BB_TENSOR_TOKEN_AXIS, "tensor_token_axis", "the token axis is illegal"},
    {BB_TENSOR_NAME, "tensor_name", "the tensor name is empty or has a byte outside the alphabet"},
    {BB_TENSOR_DUPLICATE, "tensor_duplicate", "the tensor name has come already"},
    {BB_TENSOR_BLOCK, "tensor_block", "the shape does not hold whole blocks"},
    {BB_TENSOR_RESERVED, "tensor_reserved", "reserved bytes of a tensor record are not zero"},
    {BB_RECORD_PADDING, "record_padding", "a padding byte of a record is not zero"},
    {BB_TOKEN_COUNT, "token_count", "token counts differ"},
    {BB_ATTRIBUTE_BLOCK, "attribute_block", "the attribute records do not fill the attribute block exactly"},
    {BB_ATTRIBUTE_KEY, "attribute_key", "the attribute key is reserved"},
    {BB_ATTRIBUTE_ORDER, "attribute_order", "attribute keys are not strictly ascending"},
    {BB_ATTRIBUTE_TYPE, "attribute_type", "the attribute type is unknown or not the registered one"},
    {BB_ATTRIBUTE_LENGTH, "attribute_length", "the attribute's length is illegal for its type"},
    {BB_ATTRIBUTE_VALUE, "attribute_value", "the attribute's value is illegal"},
    {BB_ATTRIBUTE_RESERVED, "attribute_reserved", "the reserved byte of an attribute record is not zero"},
    {BB_UNSUPPORTED_MAJOR, "unsupported_major", "another major version"},
    {BB_UNSUPPORTED_FRAME, "unsupported_frame", "an unknown critical frame type"},
    {BB_UNSUPPORTED_HEAD_FLAG, "unsupported_head_flag", "an unknown critical head flag"},
    {BB_UNSUPPORTED_DTYPE, "unsupported_dtype", "an unknown dtype"},
    {BB_UNSUPPORTED_ATTRIBUTE, "unsupported_attribute", "an unknown critical attribute"},
    {BB_CHECKSUMS_REQUIRED, "checksums_required",
     "payload checksums are absent and the consumer insists on them"},
    {BB_LIMIT_HEAD_BYTES, "limit_head_bytes", "the head is larger than the limit"},
    {BB_LIMIT_TENSORS, "limit_tensors", "more tensors than the limit"},
    {BB_LIMIT_NAME, "limit_name", "a tensor name is longer than the limit"},
    {BB_LIMIT_RANK, "limit_rank", "a rank is above the limit"},
    {BB_LIMIT_DIMENSION, "limit_dimension", "a dimension is above the limit"},
    {BB_LIMIT_PAYLOAD_BYTES, "limit_payload_bytes", "the payload is larger than the limit"},
    {BB_LIMIT_ATTRIBUTE_BYTES, "limit_attribute_bytes", "the attribute block is larger than the limit"},
    {BB_LIMIT_FRAGMENTS, "limit_fragments", "more fragments than the limit"},
    {BB_LIMIT_OPEN_BUNDLES, "limit_open_bundles", "too many open bundles"},
    {BB_LIMIT_EXTENSION_BYTES, "limit_extension_bytes", "an extension frame is larger than the limit"},
    {BB_CONTRACT_ATTRIBUTE, "contract_attribute",
     "an attribute that the contract fixes is absent or different"},
    {BB_CONTRACT_MISSING, "contract_missing", "a tensor of the contract is missing"},
    {BB_CONTRACT_EXTRA, "contract_extra", "a tensor that the contract lacks is present"},
    {BB_CONTRACT_ORDER, "contract_order", "the tensors stand in another order than the contract's"},
    {BB_CONTRACT_DTYPE, "contract_dtype", "a tensor has another dtype than the contract's"},
    {BB_CONTRACT_SHAPE, "contract_shape", "a tensor has another shape than the contract's"},
    {BB_CONTRACT_TOKEN_AXIS, "contract_token_axis", "a tensor has another token axis than the contract's"},
};

static const error_row *error_of(int code) {
    size_t i;
    for (i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].code == code) {
            return &errors[i];
        }
    }
    return NULL;
}

const char *bb_error_name(int code) {
    const error_row *e = error_of(code);
    return e != NULL ? e->name : "unknown";
}

const char *bb_error_meaning(int code) {
    const error_row *e = error_of(code);
    return e != NULL ? e->meaning : "not an error of this format";
}

/* ---- the text of an error ------------------------------------------------ */

typedef struct writer {
    char *dst;
    size_t cap, length;
} writer;

static void put_byte(writer *w, char c) {
    if (w->length + 1 < w->cap) {
        w->dst[w->length] = c;
    }
    w->length++;
}

static void put_text(writer *w, const char *s) {
    while (*s != '\0') {
        put_byte(w, *s++);
    }
}

static void put_number(writer *w, uint64_t v, unsigned base) {
    char digits[20];
    unsigned n = 0;
    do {
        digits[n++] = "0123456789abcdef"[v % base];
        v /= base;
    } while (v != 0);
    while (n > 0) {
        put_byte(w, digits[--n]);
    }
}

static void put_value(writer *w, uint64_t v, bool hex) {
    if (hex) {
        put_text(w, "0x");
    }
    put_number(w, v, hex ? 16 : 10);
}

size_t bb_error_format(const bb_error *e, char *dst, size_t cap) {
    writer w;
    w.dst = dst;
    w.cap = dst != NULL ? cap : 0;
    w.length = 0;
    if (e != NULL) {
        put_text(&w, bb_error_name(e->code));
        put_text(&w, " (");
        if (e->code < 0) {
            put_byte(&w, '-');
        }
        put_number(&w, e->code < 0 ? (uint64_t)(-(int64_t)e->code) : (uint64_t)e->code, 10);
        put_text(&w, "): ");
        put_text(&w, bb_error_meaning(e->code));
        if (e->code >= BB_TRUNCATED && e->code < BB_CONTRACT_ATTRIBUTE) {
            put_text(&w, ", at byte ");
            put_number(&w, e->offset, 10);
            put_text(&w, " in the frame at ");
            put_number(&w, e->frame, 10);
        }
        if (e->tensor >= 0) {
            put_text(&w, ", tensor ");
            put_number(&w, (uint64_t)e->tensor, 10);
        } else if (e->code == BB_CONTRACT_MISSING) { /* the bundle has none of that name */
            put_text(&w, ", tensor");
        } else if (e->name[0] != '\0') {
            put_text(&w, ", attribute");
        } else if (e->code == BB_CONTRACT_ATTRIBUTE) { /* not registered */
            put_text(&w, ", attribute ");
            put_value(&w, e->expected, true);
        }
        if (e->name[0] != '\0') {
            put_text(&w, " \"");
            put_text(&w, e->name);
            put_byte(&w, '"');
        }
        if (e->expected_text[0] != '\0') {
            if (e->field != NULL) {
                put_text(&w, ", field ");
                put_text(&w, e->field);
            }
            put_text(&w, ": expected ");
            put_text(&w, e->expected_text);
            put_text(&w, ", found ");
            put_text(&w, e->found_text);
        } else if (e->field != NULL) {
            bool hex = e->code == BB_HEADER_CRC || e->code == BB_BODY_CRC || e->code == BB_PAYLOAD_CRC_PRESENT;
            put_text(&w, ", field ");
            put_text(&w, e->field);
            put_text(&w, e->code >= BB_LIMIT_HEAD_BYTES && e->code < BB_CONTRACT_ATTRIBUTE ? ": at most "
                                                                                           : ": expected ");
            put_value(&w, e->expected, hex);
            put_text(&w, ", found ");
            put_value(&w, e->found, hex);
        }
    }
    if (w.cap > 0) {
        dst[w.length < w.cap ? w.length : w.cap - 1] = '\0';
    }
    return w.length;
}

BB_COLD static int fail(bb_error *e, int code, uint64_t offset, const char *field, uint64_t expected,
                        uint64_t found) {
    if (e != NULL) {
        memset(e, 0, sizeof *e);
        e->code = code;
        e->offset = offset;
        e->tensor = -1;
        e->field = field;
        e->expected = expected;
        e->found = found;
    }
    return code;
}

BB_COLD static void fail_name(bb_error *e, const uint8_t *name, uint32_t length) {
    uint32_t i;
    for (i = 0; e != NULL && i < length && i < sizeof e->name - 1; i++) {
        e->name[i] = name_byte(name[i]) ? (char)name[i] : '?'; /* it may be what is wrong */
    }
}

BB_COLD static int fail_in(bb_error *e, uint64_t frame, int code) {
    if (e != NULL) {
        e->frame = frame;
    }
    return code;
}

/* ---- configuration ------------------------------------------------------- */

/* Nothing that must be held in one piece may pass what a pointer can span; the
 * margin is for headers and padding. */
#define BB_SPAN ((uint64_t)PTRDIFF_MAX - 4096)

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

void bb_limits_default(bb_limits *l) {
    if (l == NULL) {
        return;
    }
    l->head_bytes = 1048576;
    l->tensors = 256;
    l->name_bytes = 63;
    l->rank = 8;
    l->dimension = 2147483647;
    l->payload_bytes = smaller((uint64_t)1 << 34, BB_SPAN);
    l->attribute_bytes = 65536;
    l->fragments = 1048576;
    l->open_bundles = 16;
    l->extension_bytes = 1048576;
}

/* Compared with in every call, so constants and not loaded from anywhere. */
#define MOST_BYTES (BB_SPAN < 4294967288u ? BB_SPAN : 4294967288u)
#define MOST_TENSORS 65536u
#define MOST_DIMENSION ((uint64_t)INT64_MAX)
#define MOST_PAYLOAD (sizeof(void *) < 8 ? BB_SPAN : (uint64_t)INT64_MAX)
#define MOST_FRAGMENTS 4294967295u
#define MOST_OPEN 65536u

void bb_limits_maximum(bb_limits *l) {
    if (l == NULL) {
        return;
    }
    l->head_bytes = MOST_BYTES;
    l->tensors = MOST_TENSORS;
    l->name_bytes = BB_MAX_NAME;
    l->rank = BB_MAX_RANK;
    l->dimension = MOST_DIMENSION;
    l->payload_bytes = MOST_PAYLOAD;
    l->attribute_bytes = MOST_BYTES;
    l->fragments = MOST_FRAGMENTS;
    l->open_bundles = MOST_OPEN;
    l->extension_bytes = MOST_BYTES;
}

void bb_config_init(bb_config *config) {
    if (config == NULL) {
        return;
    }
    memset(config, 0, sizeof *config);
    bb_limits_default(&config->limits);
    config->crc32c = bb_crc32c_portable;
#if defined(BB_CRC_X86) || defined(BB_CRC_ARM)
    if (has_crc_instructions()) {
        config->crc32c = crc32c_hardware;
    }
#endif
}

BB_COLD static int fail_config(const bb_config *c, bb_error *e) {
    bb_limits m;
    if (c == NULL || c->crc32c == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "config", 0, 0);
    }
    bb_limits_maximum(&m);
#define BB_WITHIN(x) \
    if (c->limits.x > m.x) { \
        return fail(e, BB_E_ARGUMENT, 0, "limits." #x, m.x, c->limits.x); \
    }
    BB_WITHIN(head_bytes)
    BB_WITHIN(tensors)
    BB_WITHIN(name_bytes)
    BB_WITHIN(rank)
    BB_WITHIN(dimension)
    BB_WITHIN(payload_bytes)
    BB_WITHIN(attribute_bytes)
    BB_WITHIN(fragments)
    BB_WITHIN(open_bundles)
    BB_WITHIN(extension_bytes)
#undef BB_WITHIN
    return fail(e, BB_E_ARGUMENT, 0, "config", 0, 0);
}

/* The arithmetic below relies on the maxima, so a larger limit is a fault of
 * the call and not taken as "no limit". */
static int check_config(const bb_config *c, bb_error *e) {
    const bb_limits *l;
    if (c == NULL || c->crc32c == NULL) {
        return fail_config(c, e);
    }
    l = &c->limits;
    if (l->head_bytes > MOST_BYTES || l->tensors > MOST_TENSORS || l->name_bytes > BB_MAX_NAME ||
        l->rank > BB_MAX_RANK || l->dimension > MOST_DIMENSION || l->payload_bytes > MOST_PAYLOAD ||
        l->attribute_bytes > MOST_BYTES || l->fragments > MOST_FRAGMENTS || l->open_bundles > MOST_OPEN ||
        l->extension_bytes > MOST_BYTES) {
        return fail_config(c, e);
    }
    return BB_OK;
}

/* ---- tensor records that have passed ------------------------------------- */

#define HEAD_FIXED 32u   /* bytes of the head body before the tensor table */
#define RECORD_FIXED 8u  /* bytes of a record before dims or value */
#define NO_SLOT UINT32_MAX

static uint64_t record_size(const uint8_t *r) { return RECORD_FIXED + 8u * (uint64_t)r[2] + pad8(r[4]); }

/* Only for a record that passed D10 to D24: nothing here can overflow. */
static uint64_t record_bytes(const uint8_t *r) {
    const dtype_row *d = dtype_of(r[0]);
    uint64_t n = 1;
    unsigned i;
    for (i = 0; i < r[2]; i++) {
        uint64_t dim = load64(r + RECORD_FIXED + 8 * i);
        if (dim == 0) {
            return 0;
        }
        n *= dim;
    }
    return d->block_elements == 1 ? n * d->block_bytes : n / d->block_elements * d->block_bytes;
}

/* Spec 2.3. */
static uint64_t fragments_of(uint64_t bytes, uint64_t fragment_size) {
    if (bytes == 0) {
        return 0;
    }
    return fragment_size == 0 ? 1 : bytes / fragment_size + (bytes % fragment_size != 0);
}

/* Bytes of all the fragment frames of one tensor. */
static uint64_t frames_size(uint64_t bytes, uint64_t fragment_size) {
    uint64_t whole = fragment_size == 0 ? 0 : bytes / fragment_size;
    uint64_t rest = bytes - whole * fragment_size;
    return whole * (BB_HEADER_BYTES + fragment_size) + (rest != 0 ? BB_HEADER_BYTES + pad64(rest) : 0);
}

/* Records differ in size, so a tensor is found by walking. The decoders keep
 * the cursor: in canonical order the walk costs nothing. */
static void seek(const bb_bundle *b, bb_cursor *c, uint32_t index) {
    if (c->record == 0 || index < c->index) {
        c->index = 0;
        c->record = BB_HEADER_BYTES + HEAD_FIXED;
        c->first = 0;
        c->place = b->priv.first;
    }
    for (; c->index < index; c->index++) {
        const uint8_t *r = b->priv.base + c->record;
        uint64_t bytes = record_bytes(r);
        c->first += fragments_of(bytes, b->fragment_size);
        c->place += frames_size(bytes, b->fragment_size);
        c->record += record_size(r);
    }
}

/* ---- stored fragments ---------------------------------------------------- */

/*
 * Fragments that came in canonical order lie where arithmetic finds them. For
 * the others a stream keeps a digital search tree: the frame header, no longer
 * needed once it has passed, holds the node, so the tree takes no memory of its
 * own. Each level looks at one bit of the fragment's ordinal, the lowest first,
 * so no order of arrival makes it deeper than the 32 bits of an ordinal.
 */
#define NODE_CHILD 0u /* two offsets, 0 for none: no fragment lies at 0 */
#define NODE_ORDINAL 16u

static uint64_t tree_find(const bb_bundle *b, uint64_t ordinal) {
    uint64_t at = b->priv.root;
    uint64_t bits = ordinal;
    while (at != 0 && load64(b->priv.base + at + NODE_ORDINAL) != ordinal) {
        at = load64(b->priv.base + at + NODE_CHILD + 8 * (bits & 1));
        bits >>= 1;
    }
    return at;
}

static void tree_insert(bb_bundle *b, uint8_t *memory, uint64_t place, uint64_t ordinal) {
    uint64_t at = b->priv.root;
    uint64_t bits = ordinal;
    store64(memory + place + NODE_CHILD, 0);
    store64(memory + place + NODE_CHILD + 8, 0);
    store64(memory + place + NODE_ORDINAL, ordinal);
    if (at == 0) {
        b->priv.root = place;
        return;
    }
    for (;;) {
        uint8_t *link = memory + at + NODE_CHILD + 8 * (bits & 1);
        at = load64(link);
        bits >>= 1;
        if (at == 0) {
            store64(link, place);
            return;
        }
    }
}

/* Offset of the frame that holds fragment k of the cursor's tensor; 0 if it has
 * not come. `before`: that of fragment k - 1, or 0. */
static uint64_t find_fragment(const bb_bundle *b, const bb_cursor *c, uint64_t k, uint64_t before) {
    uint64_t ordinal = c->first + k;
    if (b->priv.extensions) {
        /* Frames that are no fragments lie between: walk. Only bb_decode makes
         * such views, and only of bundles that are complete. */
        uint64_t skip = before != 0 ? 1 : ordinal;
        uint64_t at = before != 0 ? before : b->priv.first;
        for (;;) {
            if (b->priv.base[at + 8] == BB_FRAME_FRAGMENT) {
                if (skip == 0) {
                    return at;
                }
                skip--;
            }
            at += BB_HEADER_BYTES + pad64(load64(b->priv.base + at + 24));
        }
    }
    if (ordinal < b->priv.prefix) {
        return c->place + k * (BB_HEADER_BYTES + b->fragment_size);
    }
    return tree_find(b, ordinal);
}

/* ---- checks: units A and B ----------------------------------------------- */

static const uint8_t magic[8] = {0x89, 0x42, 0x44, 0x42, 0x0D, 0x0A, 0x1A, 0x0A};

/* Unit A. */
static int check_magic(const uint8_t *p, uint64_t at, bb_error *e) {
    /* A1 */
    if (memcmp(p, magic, sizeof magic) != 0) {
        return fail(e, BB_BAD_MAGIC, at, "magic", load64(magic), load64(p));
    }
    return BB_OK;
}

enum slot_state { SLOT_FREE = 0, SLOT_FILLING = 1, SLOT_OPEN = 2 };

/* What the checks must know of the decoder. */
typedef struct reader {
    const bb_config *config;
    const bb_prepared *known; /* a head that has passed under this configuration, or NULL */
    bb_bundle *one;           /* the buffer decoder's only bundle; NULL: slots */
    bb_stream_slot *slots;
    uint32_t slot_count; /* also the number of bundles that may be open */
    uint32_t open;
    bool core;
} reader;

static bb_bundle *bundle_of(const reader *rd, uint32_t slot) {
    return rd->one != NULL ? rd->one : &rd->slots[slot].bundle;
}

/* The slot of the open bundle of that number, or NO_SLOT. */
static uint32_t find_open(const reader *rd, uint64_t number) {
    uint32_t i;
    if (rd->one != NULL) {
        return rd->open != 0 && rd->one->number == number ? 0 : NO_SLOT;
    }
    for (i = 0; i < rd->slot_count; i++) {
        if (rd->slots[i].state == SLOT_OPEN && rd->slots[i].bundle.number == number) {
            return i;
        }
    }
    return NO_SLOT;
}

static uint32_t find_free(const reader *rd) {
    uint32_t i = 0;
    while (rd->one == NULL && rd->slots[i].state != SLOT_FREE) {
        i++;
    }
    return i;
}

static int check_fragment_header(const reader *rd, bb_frame *f, bb_error *e) {
    bb_bundle *b = bundle_of(rd, f->slot);
    bb_cursor *c = &b->priv.cursor;
    uint64_t bytes, grid, length;
    int r = BB_OK;
    /* B30 */
    if (f->a >= b->tensor_count) {
        return fail(e, BB_FRAGMENT_TENSOR, f->at + 32, "field_a", b->tensor_count, f->a);
    }
    seek(b, c, (uint32_t)f->a);
    bytes = record_bytes(b->priv.base + c->record);
    grid = b->fragment_size;
    length = grid == 0 ? bytes : smaller(grid, bytes - smaller(f->b, bytes));
    f->ordinal = c->first + (grid == 0 ? 0 : f->b / grid);
    /* B31 */
    if (f->b >= bytes || (grid == 0 ? f->b != 0 : f->b % grid != 0)) {
        r = fail(e, BB_FRAGMENT_OFFSET, f->at + 40, "field_b", bytes, f->b);
    }
    /* B32 */
    else if (f->length != length) {
        r = fail(e, BB_FRAGMENT_LENGTH, f->at + 24, "body_length", length, f->length);
    }
    /* B33 */
    else if (rd->core && f->ordinal != b->priv.received) {
        r = fail(e, BB_FRAGMENT_ORDER, f->at + 32, "fragment", b->priv.received, f->ordinal);
    }
    /* B34 */
    else if ((b->head_flags & BB_HEAD_NO_CHECKSUMS) != 0 && f->body_crc != 0) {
        r = fail(e, BB_PAYLOAD_CRC_PRESENT, f->at + 48, "body_crc", 0, f->body_crc);
    }
    if (r != BB_OK && e != NULL) {
        const uint8_t *record = b->priv.base + c->record;
        e->tensor = (int32_t)f->a;
        fail_name(e, record + RECORD_FIXED + 8 * (size_t)record[2], record[4]);
    }
    return r;
}

/* Unit B: the 64 bytes at p, which begin at offset `at`. */
static int check_header(const reader *rd, const uint8_t *p, uint64_t at, bb_frame *f, bb_error *e) {
    const bb_limits *l = &rd->config->limits;
    uint32_t crc = rd->config->crc32c(0, p, 60);
    const bb_bundle *b;
    uint64_t reserved;

    /* B1 */
    if (crc != load32(p + 60)) {
        return fail(e, BB_HEADER_CRC, at + 60, "header_crc", crc, load32(p + 60));
    }
    /* B2 */
    if (load16(p + 12) != BB_MAJOR) {
        return fail(e, BB_UNSUPPORTED_MAJOR, at + 12, "major", BB_MAJOR, load16(p + 12));
    }
    /* B3 */
    if (load16(p + 10) != 0) {
        return fail(e, BB_HEADER_RESERVED, at + 10, "reserved", 0, load16(p + 10));
    }
    /* B4 */
    reserved = load64(p + 52);
    if (reserved != 0) {
        return fail(e, BB_HEADER_RESERVED, at + 52, "reserved", 0, reserved);
    }
    /* B5: bits 4-7 are ignorable */
    if ((p[9] & 0x0F) != 0) {
        return fail(e, BB_HEADER_FLAGS, at + 9, "flags", 0, p[9] & 0x0F);
    }
    f->at = at;
    f->type = p[8];
    f->minor = load16(p + 14);
    f->number = load64(p + 16);
    f->length = load64(p + 24);
    f->a = load64(p + 32);
    f->b = load64(p + 40);
    f->body_crc = load32(p + 48);
    f->ordinal = 0;
    /* B6 */
    if ((f->type & 0x80) != 0 && f->type != BB_FRAME_HEAD && f->type != BB_FRAME_FRAGMENT &&
        f->type != BB_FRAME_END) {
        return fail(e, BB_UNSUPPORTED_FRAME, at + 8, "type", 0, f->type);
    }

    f->slot = find_open(rd, f->number);
    if (f->type == BB_FRAME_HEAD) {
        /* B10 */
        if (f->length > l->head_bytes) {
            return fail(e, BB_LIMIT_HEAD_BYTES, at + 24, "body_length", l->head_bytes, f->length);
        }
        /* B11 */
        if (f->length < HEAD_FIXED || f->length % 8 != 0) {
            return fail(e, BB_BODY_LENGTH, at + 24, "body_length", HEAD_FIXED, f->length);
        }
        /* B12 */
        if (f->a != 0) {
            return fail(e, BB_HEAD_FIELDS, at + 32, "field_a", 0, f->a);
        }
        /* B13 */
        if (f->b != 0) {
            return fail(e, BB_HEAD_FIELDS, at + 40, "field_b", 0, f->b);
        }
        /* B14 */
        if (f->slot != NO_SLOT) {
            return fail(e, BB_BUNDLE_ALREADY_OPEN, at + 16, "bundle_number", 0, f->number);
        }
        /* B15 */
        if (rd->open >= rd->slot_count) {
            return fail(e, BB_LIMIT_OPEN_BUNDLES, at + 16, "open bundles", rd->slot_count,
                        (uint64_t)rd->open + 1);
        }
        f->slot = find_free(rd);
        return BB_OK;
    }

    /* B20 */
    if (f->slot == NO_SLOT) {
        return fail(e, BB_BUNDLE_NOT_OPEN, at + 16, "bundle_number", 0, f->number);
    }
    b = bundle_of(rd, f->slot);
    /* B21 */
    if (f->minor != b->minor) {
        return fail(e, BB_FRAME_VERSION, at + 14, "minor", b->minor, f->minor);
    }

    if (f->type == BB_FRAME_FRAGMENT) {
        return check_fragment_header(rd, f, e); /* B30 to B34 */
    }

    if (f->type == BB_FRAME_END) {
        /* B40 */
        if (f->length != 0) {
            return fail(e, BB_BODY_LENGTH, at + 24, "body_length", 0, f->length);
        }
        /* B41 */
        if (b->priv.received != b->fragments) {
            return fail(e, BB_FRAGMENT_MISSING, at, "fragments", b->fragments, b->priv.received);
        }
        /* B42 */
        if (f->a != b->fragments) {
            return fail(e, BB_END_FRAGMENTS, at + 32, "field_a", b->fragments, f->a);
        }
        /* B43 */
        if (f->b != b->payload_bytes) {
            return fail(e, BB_END_PAYLOAD_BYTES, at + 40, "field_b", b->payload_bytes, f->b);
        }
        return BB_OK;
    }

    /* B50 */
    if (f->length > l->extension_bytes) {
        return fail(e, BB_LIMIT_EXTENSION_BYTES, at + 24, "body_length", l->extension_bytes, f->length);
    }
    return BB_OK;
}

/* ---- checks: the head body ----------------------------------------------- */

/* What has gathered while the records of one head are checked. The encoder uses
 * the same functions, record by record, before anything is written. */
typedef struct head_check {
    const bb_config *config;
    bb_error *error;
    const uint8_t *table; /* decoding: the first record. Encoding: NULL */
    const bb_desc *desc;  /* encoding: where earlier names stand */
    uint64_t q;           /* Q, the offset of the body */
    uint64_t fragment_size;
    uint64_t payload, fragments; /* of the tensors so far */
    uint64_t tokens;
    bool has_tokens;
    uint32_t index;    /* of the record */
    uint32_t last_key; /* attribute keys are never 0 */
    bool wide;         /* all of the filter is in use */
    uint64_t seen[16]; /* filter of names, one bit a hash; of few names the first word */
} head_check;

/* Not memset as a whole: a handful of tensors needs a handful of words. */
static void begin_head(head_check *h, const bb_config *config, const uint8_t *table, const bb_desc *desc, uint64_t q,
                       uint64_t fragment_size, uint64_t tensor_count, bb_error *e) {
    h->config = config;
    h->error = e;
    h->table = table;
    h->desc = desc;
    h->q = q;
    h->fragment_size = fragment_size;
    h->payload = 0;
    h->fragments = 0;
    h->tokens = 0;
    h->has_tokens = false;
    h->index = 0;
    h->last_key = 0;
    h->wide = tensor_count > 16;
    h->seen[0] = 0;
    if (h->wide) {
        memset(h->seen, 0, sizeof h->seen);
    }
}

/* D1 to D7. attribute_bytes is wider than its field for the encoder's sake. */
static int check_head_fixed(head_check *h, uint32_t flags, uint64_t tensor_count, uint64_t attribute_bytes,
                            uint64_t reserved, uint64_t length) {
    const bb_limits *l = &h->config->limits;
    bb_error *e = h->error;
    /* D1: bits 16-31 are ignorable */
    if ((flags & 0xFFFEu) != 0) {
        return fail(e, BB_UNSUPPORTED_HEAD_FLAG, h->q, "head_flags", flags & BB_HEAD_NO_CHECKSUMS,
                    flags & 0xFFFFu);
    }
    /* D2 */
    if ((flags & BB_HEAD_NO_CHECKSUMS) != 0 && h->config->require_checksums) {
        return fail(e, BB_CHECKSUMS_REQUIRED, h->q, "head_flags", 0, BB_HEAD_NO_CHECKSUMS);
    }
    /* D3 */
    if (reserved != 0) {
        return fail(e, BB_HEAD_RESERVED, h->q + 24, "reserved", 0, reserved);
    }
    /* D4 */
    if (tensor_count > l->tensors) {
        return fail(e, BB_LIMIT_TENSORS, h->q + 4, "tensor_count", l->tensors, tensor_count);
    }
    /* D5 */
    if (attribute_bytes > l->attribute_bytes) {
        return fail(e, BB_LIMIT_ATTRIBUTE_BYTES, h->q + 12, "attribute_bytes", l->attribute_bytes,
                    attribute_bytes);
    }
    /* D6 */
    if (attribute_bytes % 8 != 0 || attribute_bytes > length - HEAD_FIXED) {
        return fail(e, BB_ATTRIBUTE_BLOCK, h->q + 12, "attribute_bytes", length - HEAD_FIXED, attribute_bytes);
    }
    /* D7 */
    if (h->fragment_size % BB_ALIGNMENT != 0) {
        return fail(e, BB_FRAGMENT_SIZE, h->q + 16, "fragment_size", 0, h->fragment_size);
    }
    return BB_OK;
}

BB_COLD static int fail_tensor(const head_check *h, const uint8_t *name, uint32_t name_length, int code,
                               uint64_t offset, const char *field, uint64_t expected, uint64_t found) {
    fail(h->error, code, offset, field, expected, found);
    if (h->error != NULL) {
        h->error->tensor = (int32_t)h->index;
        fail_name(h->error, name, name_length);
    }
    return code;
}

/* Has an earlier record this name? A filter of one bit a hash answers most cases
 * at once; only a hit is looked up by walking the earlier records. The zeros
 * after the name have been checked, so it can be taken eight bytes at a time. */
static bool seen_before(head_check *h, const uint8_t *name, uint32_t length) {
    uint64_t hash = length, bit;
    const uint8_t *r = h->table;
    uint32_t i, word;
    bool hit;
    for (i = 0; i < length; i += 8) {
        hash = (hash ^ load64(name + i)) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    bit = (uint64_t)1 << (hash & 63);
    word = h->wide ? (uint32_t)(hash >> 6 & 15) : 0;
    hit = (h->seen[word] & bit) != 0;
    h->seen[word] |= bit;
    for (i = 0; hit && i < h->index; i++) {
        if (h->table == NULL) {
            const char *other = h->desc->tensors[i].name;
            if (other[length] == '\0' && memcmp(other, name, length) == 0) {
                return true;
            }
        } else {
            if (r[4] == length && memcmp(r + RECORD_FIXED + 8 * (size_t)r[2], name, length) == 0) {
                return true;
            }
            r += record_size(r);
        }
    }
    return false;
}

/*
 * D10 to D30: the record at r, offset `at`, in a table that ends at `end`. All
 * bytes up to `end` can be read. *size: the size of the record.
 */
static int check_tensor(head_check *h, const uint8_t *r, uint64_t at, uint64_t end, uint64_t *size) {
    const bb_limits *l = &h->config->limits;
    const dtype_row *d;
    const uint8_t *name;
    uint64_t names_at, elements = 1, bytes, blocks, total, count, i;
    uint32_t rank, name_length, axis;
    bool empty = false, fits = true;

#define BB_FAIL(code, offset, field, expected, found) \
    return fail_tensor(h, name, name_length, code, offset, field, expected, found)

    name = NULL;
    name_length = 0;
    /* D10 */
    if (end - at < RECORD_FIXED) {
        BB_FAIL(BB_TENSOR_TABLE, at, "tensor table", RECORD_FIXED, end - at);
    }
    rank = r[2];
    /* D11: limit.rank is at most 8 */
    if (rank > l->rank) {
        BB_FAIL(BB_LIMIT_RANK, at + 2, "rank", l->rank, rank);
    }
    /* D12: limit.name_bytes is at most 63 */
    if (r[4] > l->name_bytes) {
        BB_FAIL(BB_LIMIT_NAME, at + 4, "name_length", l->name_bytes, r[4]);
    }
    /* D13 */
    if (r[4] == 0) {
        BB_FAIL(BB_TENSOR_NAME, at + 4, "name_length", 1, 0);
    }
    *size = record_size(r);
    /* D14 */
    if (*size > end - at) {
        BB_FAIL(BB_TENSOR_TABLE, at, "tensor table", *size, end - at);
    }
    name_length = r[4];
    name = r + RECORD_FIXED + 8 * rank;
    names_at = at + RECORD_FIXED + 8 * (uint64_t)rank;
    d = dtype_of(r[0]);
    /* D15 */
    if (d == NULL) {
        BB_FAIL(BB_UNSUPPORTED_DTYPE, at, "dtype", 0, r[0]);
    }
    /* D16 */
    if (r[1] != BB_LITTLE && (r[1] != BB_BIG || !d->both_orders)) {
        BB_FAIL(BB_TENSOR_BYTE_ORDER, at + 1, "byte_order", BB_LITTLE, r[1]);
    }
    axis = r[3];
    /* D17 */
    if (axis != BB_NO_TOKEN_AXIS && axis >= rank) {
        BB_FAIL(BB_TENSOR_TOKEN_AXIS, at + 3, "token_axis", BB_NO_TOKEN_AXIS, axis);
    }
    /* D18 */
    if ((r[5] | r[6] | r[7]) != 0) {
        BB_FAIL(BB_TENSOR_RESERVED, at + 5, "reserved", 0, load32(r + 4) >> 8);
    }
    for (i = 0; i < rank; i++) {
        uint64_t dim = load64(r + RECORD_FIXED + 8 * i);
        /* D19 */
        if (dim > l->dimension) {
            BB_FAIL(BB_LIMIT_DIMENSION, at + RECORD_FIXED + 8 * i, "dims", l->dimension, dim);
        }
    }
    if (d->block_elements > 1) {
        /* D20 */
        if (rank == 0) {
            BB_FAIL(BB_TENSOR_BLOCK, at + 2, "rank", 1, 0);
        }
        /* D21 */
        if (load64(r + 8 * rank) % d->block_elements != 0) {
            BB_FAIL(BB_TENSOR_BLOCK, at + 8 * (uint64_t)rank, "dims", d->block_elements, load64(r + 8 * rank));
        }
        /* D22 */
        if (axis == rank - 1) {
            BB_FAIL(BB_TENSOR_TOKEN_AXIS, at + 3, "token_axis", BB_NO_TOKEN_AXIS, axis);
        }
    }
    for (i = 0; i < rank; i++) {
        uint64_t dim = load64(r + RECORD_FIXED + 8 * i);
        empty = empty || dim == 0;
        fits = multiply(elements, dim != 0 ? dim : 1, &elements) && fits;
    }
    blocks = d->block_elements == 1 ? elements
                                    : elements / d->block_elements + (elements % d->block_elements != 0);
    bytes = UINT64_MAX;
    fits = multiply(blocks, d->block_bytes, &bytes) && fits;
    /* D23: what does not fit 64 bits is over every limit, since a block has more
     * bytes than elements */
    if (!fits || bytes > l->payload_bytes) {
        BB_FAIL(BB_LIMIT_PAYLOAD_BYTES, at + RECORD_FIXED, "dims", l->payload_bytes, fits ? bytes : UINT64_MAX);
    }
    if (empty) {
        bytes = 0;
    }
    /* D24: both are at most 2^63 - 1 */
    total = h->payload + bytes;
    if (total > l->payload_bytes) {
        BB_FAIL(BB_LIMIT_PAYLOAD_BYTES, at + RECORD_FIXED, "dims", l->payload_bytes, total);
    }
    h->payload = total;
    /* D25 */
    if (h->fragment_size != 0 && h->fragment_size % d->block_bytes != 0) {
        BB_FAIL(BB_FRAGMENT_SIZE, h->q + 16, "fragment_size", 0, h->fragment_size);
    }
    /* D26 */
    count = h->fragments + fragments_of(bytes, h->fragment_size);
    if (count > l->fragments) {
        BB_FAIL(BB_LIMIT_FRAGMENTS, h->q + 16, "fragment_size", l->fragments, count);
    }
    h->fragments = count;
    if (!name_is_plain(name, name_length)) {
        uint64_t zeros = pad8(name_length) - name_length;
        for (i = 0; i < name_length; i++) {
            /* D27 */
            if (!name_byte(name[i])) {
                BB_FAIL(BB_TENSOR_NAME, names_at + i, "name", 0, name[i]);
            }
        }
        i = first_nonzero(name + name_length, zeros);
        /* D28 */
        if (i < zeros) {
            BB_FAIL(BB_RECORD_PADDING, names_at + name_length + i, "padding", 0, name[name_length + i]);
        }
    }
    /* D29 */
    if (seen_before(h, name, name_length)) {
        BB_FAIL(BB_TENSOR_DUPLICATE, names_at, "name", 0, 0);
    }
    /* D30 */
    if (axis != BB_NO_TOKEN_AXIS) {
        uint64_t dim = load64(r + RECORD_FIXED + 8 * axis);
        if (h->has_tokens && dim != h->tokens) {
            BB_FAIL(BB_TOKEN_COUNT, at + RECORD_FIXED + 8 * (uint64_t)axis, "dims", h->tokens, dim);
        }
        h->has_tokens = true;
        h->tokens = dim;
    }
    h->index++;
    return BB_OK;
#undef BB_FAIL
}

BB_COLD static int fail_attr(const head_check *h, unsigned key, int code, uint64_t offset, const char *field,
                             uint64_t expected, uint64_t found) {
    const key_row *k = key_of(key);
    fail(h->error, code, offset, field, expected, found);
    if (h->error != NULL && k != NULL) {
        size_t n;
        for (n = 0; k->name[n] != '\0' && n < sizeof h->error->name - 1; n++) {
            h->error->name[n] = k->name[n];
        }
    }
    return code;
}

/* D52 to D61: the record at offset `at`; `padding` follows the value, NULL when
 * there is none yet because the record is still to be written. */
static int check_attr(head_check *h, unsigned key, unsigned type, unsigned reserved, uint32_t length,
                      const uint8_t *value, const uint8_t *padding, uint64_t at) {
    const key_row *k;
    uint64_t i, n;
    uint32_t wanted = length;
    /* D52 */
    if ((key & 0x3FFFu) == 0) {
        return fail_attr(h, key, BB_ATTRIBUTE_KEY, at, "key", 0, key);
    }
    /* D53 */
    if (key <= h->last_key) {
        return fail_attr(h, key, BB_ATTRIBUTE_ORDER, at, "key", (uint64_t)h->last_key + 1, key);
    }
    h->last_key = key;
    /* D54 */
    if (type < BB_ATTR_U64 || type > BB_ATTR_TEXT) {
        return fail_attr(h, key, BB_ATTRIBUTE_TYPE, at + 2, "type", 0, type);
    }
    /* D55 */
    if (reserved != 0) {
        return fail_attr(h, key, BB_ATTRIBUTE_RESERVED, at + 3, "reserved", 0, reserved);
    }
    k = key_of(key);
    /* D56 */
    if (k == NULL && (key & BB_KEY_CRITICAL) != 0) {
        return fail_attr(h, key, BB_UNSUPPORTED_ATTRIBUTE, at, "key", 0, key);
    }
    /* D57 */
    if (k != NULL && type != k->type) {
        return fail_attr(h, key, BB_ATTRIBUTE_TYPE, at + 2, "type", k->type, type);
    }
    /* D58 */
    if (type <= BB_ATTR_F64) {
        wanted = 8;
    } else if (k != NULL && k->length != 0) {
        wanted = k->length;
    }
    if (length != wanted) {
        return fail_attr(h, key, BB_ATTRIBUTE_LENGTH, at + 4, "value_length", wanted, length);
    }
    for (i = 0; type == BB_ATTR_TEXT && i < length; i++) {
        /* D59 */
        if (value[i] < 0x20 || value[i] > 0x7E) {
            return fail_attr(h, key, BB_ATTRIBUTE_VALUE, at + RECORD_FIXED + i, "value", 0x20, value[i]);
        }
    }
    n = pad8(length) - length;
    i = padding != NULL ? first_nonzero(padding, n) : n;
    /* D60 */
    if (i < n) {
        return fail_attr(h, key, BB_RECORD_PADDING, at + RECORD_FIXED + length + i, "padding", 0, padding[i]);
    }
    /* D61 */
    if (key == BB_KEY_N_TOKENS && h->has_tokens && load64(value) != h->tokens) {
        return fail_attr(h, key, BB_TOKEN_COUNT, at + RECORD_FIXED, "value", h->tokens, load64(value));
    }
    return BB_OK;
}

/* D1 to D70: the head frame at `base`, which has passed C2. Fills *out. */
static int check_head(const bb_config *config, const bb_frame *f, const uint8_t *base, bb_bundle *out, bb_error *e) {
    const uint8_t *body = base + BB_HEADER_BYTES;
    uint64_t q = f->at + BB_HEADER_BYTES;
    uint64_t attribute_bytes = load32(body + 12);
    uint64_t at, end;
    uint32_t tensor_count = load32(body + 4), attribute_count = load32(body + 8), i;
    head_check h;
    int r;

    begin_head(&h, config, body + HEAD_FIXED, NULL, q, load64(body + 16), tensor_count, e);
    r = check_head_fixed(&h, load32(body), tensor_count, attribute_bytes, load64(body + 24), f->length);
    if (r != BB_OK) {
        return r;
    }

    at = HEAD_FIXED; /* from here on relative to the body */
    end = f->length - attribute_bytes;
    for (i = 0; i < tensor_count; i++) {
        uint64_t size = 0;
        r = check_tensor(&h, body + at, q + at, q + end, &size);
        if (r != BB_OK) {
            return r;
        }
        at += size;
    }
    /* D40 */
    if (at != end) {
        return fail(e, BB_TENSOR_TABLE, q + at, "tensor table", end - HEAD_FIXED, at - HEAD_FIXED);
    }

    end = f->length;
    for (i = 0; i < attribute_count; i++) {
        uint64_t size;
        uint32_t length;
        /* D50 */
        if (end - at < RECORD_FIXED) {
            return fail(e, BB_ATTRIBUTE_BLOCK, q + at, "attribute_count", attribute_count, i);
        }
        length = load32(body + at + 4);
        size = RECORD_FIXED + pad8(length);
        /* D51 */
        if (size > end - at) {
            return fail(e, BB_ATTRIBUTE_BLOCK, q + at + 4, "value_length", end - at - RECORD_FIXED, length);
        }
        r = check_attr(&h, load16(body + at), body[at + 2], body[at + 3], length, body + at + RECORD_FIXED,
                       body + at + RECORD_FIXED + length, q + at);
        if (r != BB_OK) {
            return r;
        }
        at += size;
    }
    /* D70 */
    if (at != end) {
        return fail(e, BB_ATTRIBUTE_BLOCK, q + at, "attribute_bytes", end, at);
    }

    out->minor = f->minor;
    out->number = f->number;
    out->head_flags = load32(body) & 0xFFFFu;
    out->tensor_count = tensor_count;
    out->attribute_count = attribute_count;
    out->fragment_size = h.fragment_size;
    out->payload_bytes = h.payload;
    out->fragments = h.fragments;
    out->complete = false;
    out->known = false;
    out->priv.base = base;
    out->priv.first = BB_HEADER_BYTES + pad64(f->length);
    out->priv.attrs = BB_HEADER_BYTES + f->length - attribute_bytes;
    out->priv.received = 0;
    out->priv.prefix = 0;
    out->priv.root = 0;
    out->priv.extensions = false;
    out->priv.cursor.record = 0;
    return BB_OK;
}

/* Has the head frame at p, whole and with its header checked, the body and the
 * padding of the prepared one? Then the same checks would pass again. */
static bool is_known(const reader *rd, const bb_frame *f, const uint8_t *p) {
    const bb_prepared *known = rd->known;
    return known != NULL && f->type == BB_FRAME_HEAD && f->length == known->body_bytes &&
           f->body_crc == known->body_crc &&
           memcmp(p + BB_HEADER_BYTES, known->head.priv.base + BB_HEADER_BYTES, (size_t)pad64(f->length)) == 0;
}

static void take_known(const reader *rd, const bb_frame *f, const uint8_t *p, bb_bundle *out) {
    *out = rd->known->head;
    out->minor = f->minor;
    out->number = f->number;
    out->known = true;
    out->priv.base = p;
}

/* ---- checks: unit C ------------------------------------------------------ */

/* Does the body's checksum count? */
static bool checksum_counts(const bb_frame *f, const bb_bundle *b) {
    return f->type != BB_FRAME_FRAGMENT || (b->head_flags & BB_HEAD_NO_CHECKSUMS) == 0;
}

BB_COLD static int fail_fragment(const bb_bundle *b, const bb_frame *f, int code, uint64_t offset,
                                 const char *field, uint64_t expected, uint64_t found, bb_error *e) {
    fail(e, code, offset, field, expected, found);
    if (e != NULL && f->type == BB_FRAME_FRAGMENT) {
        const uint8_t *record = b->priv.base + b->priv.cursor.record;
        e->tensor = (int32_t)f->a;
        fail_name(e, record + RECORD_FIXED + 8 * (size_t)record[2], record[4]);
    }
    return code;
}

/*
 * Unit C: the whole frame at p; `crc` is that of its body, where it counts. A
 * head fills *b; a fragment of *b that had come already sets *repeated.
 */
static int check_frame(const reader *rd, const bb_frame *f, const uint8_t *p, uint32_t crc, bb_bundle *b,
                       bool *repeated, bb_error *e) {
    const uint8_t *body = p + BB_HEADER_BYTES;
    uint64_t padding = pad64(f->length) - f->length;
    uint64_t i;
    /* C1 */
    if (checksum_counts(f, b) && crc != f->body_crc) {
        return fail_fragment(b, f, BB_BODY_CRC, f->at + 48, "body_crc", crc, f->body_crc, e);
    }
    i = first_nonzero(body + f->length, padding);
    /* C2 */
    if (i < padding) {
        return fail_fragment(b, f, BB_FRAME_PADDING, f->at + BB_HEADER_BYTES + f->length + i, "padding", 0,
                             body[f->length + i], e);
    }
    if (f->type == BB_FRAME_HEAD) {
        return check_head(rd->config, f, p, b, e);
    }
    if (f->type == BB_FRAME_FRAGMENT) {
        const bb_cursor *c = &b->priv.cursor; /* unit B left it at this tensor */
        if (!rd->core) {
            uint64_t there = find_fragment(b, c, f->ordinal - c->first, 0);
            *repeated = there != 0;
            /* C3 */
            if (there != 0 &&
                memcmp(b->priv.base + there + BB_HEADER_BYTES, body, (size_t)f->length) != 0) {
                return fail_fragment(b, f, BB_FRAGMENT_CONFLICT, f->at + BB_HEADER_BYTES, NULL, 0, 0, e);
            }
        }
        if (b->priv.base[c->record] == BB_BOOL) {
            i = first_not_bool(body, f->length);
            /* C4 */
            if (i < f->length) {
                return fail_fragment(b, f, BB_BOOL_VALUE, f->at + BB_HEADER_BYTES + i, "payload", 1, body[i], e);
            }
        }
    }
    return BB_OK;
}

/* ---- decoding a buffer --------------------------------------------------- */

/*
 * The frame at data + at. BB_OK: *f and *total are set and the frame has passed.
 * BB_NEED_MORE: the unit is incomplete; *total is how far from the frame's
 * beginning the data must reach for the next check.
 */
static int next_frame(const reader *rd, const uint8_t *data, size_t size, size_t at, bb_frame *f, size_t *total,
                      bb_error *e) {
    const uint8_t *p;
    size_t here = size - at;
    uint64_t whole;
    bool repeated = false;
    uint32_t crc = 0;
    bb_bundle *b;
    int r;

    *total = sizeof magic;
    if (here < sizeof magic) {
        return BB_NEED_MORE;
    }
    p = data + at; /* not before: data may be NULL when there is nothing */
    r = check_magic(p, at, e);
    if (r != BB_OK) {
        return r;
    }
    *total = BB_HEADER_BYTES;
    if (here < BB_HEADER_BYTES) {
        return BB_NEED_MORE;
    }
    r = check_header(rd, p, at, f, e);
    if (r != BB_OK) {
        return r;
    }
    /* The limits and B32 keep the length below what a pointer can span. */
    whole = BB_HEADER_BYTES + pad64(f->length);
    *total = (size_t)whole;
    if (here < whole) {
        return BB_NEED_MORE;
    }
    b = bundle_of(rd, f->slot);
    if (is_known(rd, f, p)) {
        take_known(rd, f, p, b);
        return BB_OK;
    }
    if (checksum_counts(f, b)) {
        crc = rd->config->crc32c(0, p + BB_HEADER_BYTES, (size_t)f->length);
    }
    return check_frame(rd, f, p, crc, b, &repeated, e);
}

static void reader_of_one(reader *rd, const bb_config *config, const bb_prepared *known, bb_bundle *bundle) {
    rd->config = config;
    rd->known = known;
    rd->one = bundle;
    rd->slots = NULL;
    rd->slot_count = 1;
    rd->open = 0;
    rd->core = true;
}

/* A failed bundle leaves nothing behind. */
BB_COLD static int leave(bb_bundle *b, int code) {
    memset(b, 0, sizeof *b);
    return code;
}

static int decode_frames(const bb_config *config, const bb_prepared *known, const uint8_t *data, size_t size,
                         bb_bundle *b, bb_error *e) {
    reader rd;
    bb_frame f;
    size_t at = 0, total;
    int r;

    reader_of_one(&rd, config, known, b);
    for (;;) {
        r = next_frame(&rd, data, size, at, &f, &total, e);
        if (r == BB_NEED_MORE) {
            r = fail(e, BB_TRUNCATED, size, "input", (uint64_t)at + total, size);
        }
        if (r != BB_OK) {
            return leave(b, fail_in(e, at, r));
        }
        if (f.type == BB_FRAME_FRAGMENT) {
            b->priv.received++;
            b->priv.prefix++;
        } else if (f.type == BB_FRAME_HEAD) {
            rd.open = 1;
        } else if (f.type == BB_FRAME_END) {
            break;
        } else {
            b->priv.extensions = true;
        }
        at += total;
    }
    /* trailing_bytes */
    if (size - at > total) {
        return leave(b, fail_in(e, at, fail(e, BB_TRAILING_BYTES, at + total, "input", at + total, size)));
    }
    b->complete = true;
    return BB_OK;
}

static int decode_one(const bb_config *config, const bb_prepared *known, const void *data, size_t size,
                      bb_bundle *out, bb_error *e) {
    int r;
    if (out == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "out", 0, 0);
    }
    if (data == NULL && size != 0) {
        return leave(out, fail(e, BB_E_ARGUMENT, 0, "data", 0, 0));
    }
    r = check_config(config, e);
    return r != BB_OK ? leave(out, r) : decode_frames(config, known, (const uint8_t *)data, size, out, e);
}

static int decode_head(const bb_config *config, const bb_prepared *known, const void *data, size_t size,
                       bb_bundle *out, size_t *frame_bytes, bb_error *e) {
    reader rd;
    bb_frame f;
    size_t total = 0;
    int r;
    if (out == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "out", 0, 0);
    }
    if (data == NULL && size != 0) {
        return leave(out, fail(e, BB_E_ARGUMENT, 0, "data", 0, 0));
    }
    r = check_config(config, e);
    if (r != BB_OK) {
        return leave(out, r);
    }
    reader_of_one(&rd, config, known, out);
    /* Any frame but a head fails B20: nothing is open. */
    r = next_frame(&rd, (const uint8_t *)data, size, 0, &f, &total, e);
    if (frame_bytes != NULL) {
        *frame_bytes = r == BB_OK || r == BB_NEED_MORE ? total : 0;
    }
    if (r == BB_NEED_MORE) {
        fail(e, BB_NEED_MORE, size, "input", total, size);
    }
    return r == BB_OK ? r : leave(out, r);
}

int bb_decode(const bb_config *config, const void *data, size_t size, bb_bundle *out, bb_error *e) {
    return decode_one(config, NULL, data, size, out, e);
}

int bb_decode_head(const bb_config *config, const void *data, size_t size, bb_bundle *out, size_t *frame_bytes,
                   bb_error *e) {
    return decode_head(config, NULL, data, size, out, frame_bytes, e);
}

int bb_prepared_decode(const bb_prepared *prepared, const void *data, size_t size, bb_bundle *out, bb_error *e) {
    return decode_one(prepared != NULL ? &prepared->config : NULL, prepared, data, size, out, e);
}

int bb_prepared_decode_head(const bb_prepared *prepared, const void *data, size_t size, bb_bundle *out,
                            size_t *frame_bytes, bb_error *e) {
    return decode_head(prepared != NULL ? &prepared->config : NULL, prepared, data, size, out, frame_bytes, e);
}

/* ---- reading a view ------------------------------------------------------ */

static void tensor_view(const bb_bundle *b, const bb_cursor *c, bb_tensor *out) {
    const uint8_t *r = b->priv.base + c->record;
    unsigned i;
    memset(out, 0, sizeof *out);
    out->dtype = r[0];
    out->byte_order = r[1];
    out->rank = r[2];
    out->token_axis = r[3];
    for (i = 0; i < r[2]; i++) {
        out->dims[i] = load64(r + RECORD_FIXED + 8 * i);
    }
    memcpy(out->name, r + RECORD_FIXED + 8 * (size_t)r[2], r[4]);
    out->bytes = record_bytes(r);
    if (b->complete && fragments_of(out->bytes, b->fragment_size) == 1) {
        out->data = b->priv.base + find_fragment(b, c, 0, 0) + BB_HEADER_BYTES;
    }
}

int bb_tensor_at(const bb_bundle *b, uint32_t index, bb_tensor *out) {
    bb_cursor c;
    if (b == NULL || out == NULL || index >= b->tensor_count) {
        return BB_E_ARGUMENT;
    }
    memset(&c, 0, sizeof c);
    seek(b, &c, index);
    tensor_view(b, &c, out);
    return BB_OK;
}

int bb_tensor_find(const bb_bundle *b, const char *name, bb_tensor *out) {
    bb_cursor c;
    uint32_t i;
    if (b == NULL || name == NULL) {
        return -1;
    }
    memset(&c, 0, sizeof c);
    for (i = 0; i < b->tensor_count; i++) {
        const uint8_t *r;
        seek(b, &c, i);
        r = b->priv.base + c.record;
        if (text_is(name, r + RECORD_FIXED + 8 * (size_t)r[2], r[4])) {
            if (out != NULL) {
                tensor_view(b, &c, out);
            }
            return (int)i;
        }
    }
    return -1;
}

int bb_tensor_read(const bb_bundle *b, uint32_t index, void *dst, size_t dst_size) {
    uint8_t *to = (uint8_t *)dst;
    const dtype_row *d;
    const uint8_t *r;
    uint64_t bytes, done = 0, k = 0, place = 0;
    bb_cursor c;
    bool swap;
    if (b == NULL || index >= b->tensor_count || !b->complete) {
        return BB_E_ARGUMENT;
    }
    memset(&c, 0, sizeof c);
    seek(b, &c, index);
    r = b->priv.base + c.record;
    bytes = record_bytes(r);
    if (bytes > dst_size) {
        return BB_E_SPACE;
    }
    if (bytes != 0 && dst == NULL) {
        return BB_E_ARGUMENT;
    }
    d = dtype_of(r[0]);
    swap = d->both_orders && r[1] != (unsigned)BB_NATIVE_ORDER;
    while (done < bytes) {
        uint64_t n = b->fragment_size == 0 ? bytes : smaller(b->fragment_size, bytes - done);
        const uint8_t *from;
        place = find_fragment(b, &c, k++, place);
        from = b->priv.base + place + BB_HEADER_BYTES;
        if (swap) {
            reverse(to + done, from, n, d->block_bytes);
        } else {
            memcpy(to + done, from, (size_t)n);
        }
        done += n;
    }
    return BB_OK;
}

static void attr_view(const uint8_t *r, bb_attr *out) {
    memset(out, 0, sizeof *out);
    out->key = load16(r);
    out->type = r[2];
    out->length = load32(r + 4);
    out->value = r + RECORD_FIXED;
    if (out->type <= BB_ATTR_F64) {
        out->u64 = load64(r + RECORD_FIXED);
    }
}

int bb_attr_at(const bb_bundle *b, uint32_t index, bb_attr *out) {
    const uint8_t *r;
    uint32_t i;
    if (b == NULL || out == NULL || index >= b->attribute_count) {
        return BB_E_ARGUMENT;
    }
    r = b->priv.base + b->priv.attrs;
    for (i = 0; i < index; i++) {
        r += RECORD_FIXED + pad8(load32(r + 4));
    }
    attr_view(r, out);
    return BB_OK;
}

int bb_attr_find(const bb_bundle *b, uint16_t key, bb_attr *out) {
    const uint8_t *r;
    uint32_t i;
    if (b == NULL) {
        return -1;
    }
    r = b->priv.base + b->priv.attrs;
    for (i = 0; i < b->attribute_count; i++) {
        if (load16(r) == key) {
            if (out != NULL) {
                attr_view(r, out);
            }
            return (int)i;
        }
        r += RECORD_FIXED + pad8(load32(r + 4));
    }
    return -1;
}

/* ---- contracts ----------------------------------------------------------- */

/* Whether the bundle has the attribute that the rule demands. */
static bool attr_holds(const bb_contract_attr *rule, const bb_bundle *b) {
    const bb_attr *want = &rule->attr;
    bb_attr found;
    if (bb_attr_find(b, want->key, &found) < 0 || found.type != want->type) {
        return false;
    }
    if (rule->any) {
        return true;
    }
    if (want->type <= BB_ATTR_F64) {
        return found.u64 == want->u64;
    }
    return found.length == want->length &&
           (want->length == 0 || (want->value != NULL && memcmp(found.value, want->value, want->length) == 0));
}

BB_COLD static int fail_rule(int code, int32_t tensor, const char *name, const char *field, uint64_t expected,
                             uint64_t found, bb_error *e) {
    fail(e, code, 0, field, expected, found);
    if (e != NULL) {
        size_t n;
        e->tensor = tensor;
        for (n = 0; name != NULL && name[n] != '\0' && n < sizeof e->name - 1; n++) {
            e->name[n] = name[n];
        }
    }
    return code;
}

/* The two sides of a contract error as text. They are zeros before, so what fits
 * is NUL-terminated. */
static writer expected_text(bb_error *e) {
    writer w = {e->expected_text, sizeof e->expected_text, 0};
    return w;
}

static writer found_text(bb_error *e) {
    writer w = {e->found_text, sizeof e->found_text, 0};
    return w;
}

static void put_quoted(writer *w, const char *s) {
    put_byte(w, '"');
    put_text(w, s);
    put_byte(w, '"');
}

#define TEXT_SHOWN 48 /* bytes of a text, and of other bytes, that a sentence has */
#define BYTES_SHOWN 8

static void put_attr(writer *w, const bb_attr *a) {
    const uint8_t *p = (const uint8_t *)a->value;
    uint32_t shown = a->type == BB_ATTR_TEXT ? TEXT_SHOWN : BYTES_SHOWN, i;
    if (a->type == BB_ATTR_U64) {
        put_number(w, a->u64, 10);
    } else if (a->type == BB_ATTR_I64) {
        bool negative = a->u64 >> 63 != 0;
        put_text(w, negative ? "-" : "");
        put_number(w, negative ? 0 - a->u64 : a->u64, 10);
    } else if (a->type == BB_ATTR_F64) {
        put_text(w, "the bits ");
        put_value(w, a->u64, true);
    } else {
        put_text(w, a->type == BB_ATTR_TEXT ? "\"" : a->length == 0 ? "no bytes" : "");
        for (i = 0; i < a->length && i < shown; i++) {
            if (a->type == BB_ATTR_TEXT) {
                put_byte(w, p[i] >= 0x20 && p[i] <= 0x7E ? (char)p[i] : '?');
            } else {
                put_byte(w, "0123456789abcdef"[p[i] >> 4]);
                put_byte(w, "0123456789abcdef"[p[i] & 15]);
            }
        }
        put_text(w, a->length > shown ? ".." : "");
        put_text(w, a->type == BB_ATTR_TEXT ? "\"" : "");
    }
}

BB_COLD static int fail_demand(const bb_contract_attr *rule, const bb_bundle *b, bb_error *e) {
    static const char *const types[] = {"u64 ", "i64 ", "f64 ", "bytes ", "text "};
    const bb_attr *want = &rule->attr;
    bb_attr found;
    bool present = bb_attr_find(b, want->key, &found) >= 0, typed = rule->any || (present && found.type != want->type);
    fail_rule(BB_CONTRACT_ATTRIBUTE, -1, bb_attr_key_name(want->key), NULL, want->key, present ? want->key : 0, e);
    if (e != NULL && want->type >= BB_ATTR_U64 && want->type <= BB_ATTR_TEXT) {
        writer x = expected_text(e), y = found_text(e);
        put_text(&x, rule->any ? "any " : "");
        put_text(&x, typed ? types[want->type - 1] : "");
        if (rule->any) {
            put_text(&x, "value");
        } else if (want->value != NULL || want->length == 0 || want->type <= BB_ATTR_F64) {
            put_attr(&x, want);
        }
        if (present) {
            put_text(&y, typed ? types[found.type - 1] : "");
            put_attr(&y, &found);
        } else {
            put_text(&y, "absent");
        }
    }
    return BB_CONTRACT_ATTRIBUTE;
}

BB_COLD static int fail_dtype(uint32_t tensor, const bb_contract_tensor *rule, unsigned dtype, bb_error *e) {
    fail_rule(BB_CONTRACT_DTYPE, (int32_t)tensor, rule->name, "dtype", rule->dtype, dtype, e);
    if (e != NULL && bb_dtype_name(rule->dtype) != NULL) {
        writer x = expected_text(e), y = found_text(e);
        put_text(&x, bb_dtype_name(rule->dtype));
        put_text(&y, bb_dtype_name(dtype)); /* the decoder knows it */
    }
    return BB_CONTRACT_DTYPE;
}

/* `sum` as sum_of has it; `valued`: every symbol of it has a value. */
BB_COLD static int fail_dim(uint32_t tensor, const bb_contract_tensor *rule, unsigned k, uint64_t sum, bool valued,
                            uint64_t dim, bb_error *e) {
    static const char *const fields[BB_MAX_RANK] = {"dims[0]", "dims[1]", "dims[2]", "dims[3]",
                                                    "dims[4]", "dims[5]", "dims[6]", "dims[7]"};
    fail_rule(BB_CONTRACT_SHAPE, (int32_t)tensor, rule->name, fields[k], sum, dim, e);
    if (e != NULL && sum == UINT64_MAX) {
        writer x = expected_text(e), y = found_text(e);
        put_text(&x, valued ? "a sum that no dimension can be" : "a sum with a symbol that got no value");
        put_number(&y, dim, 10);
    }
    return BB_CONTRACT_SHAPE;
}

BB_COLD static int fail_axis(uint32_t tensor, const bb_contract_tensor *rule, unsigned axis, bb_error *e) {
    fail_rule(BB_CONTRACT_TOKEN_AXIS, (int32_t)tensor, rule->name, "token_axis", rule->token_axis, axis, e);
    if (e != NULL) {
        unsigned sides[2], i;
        sides[0] = rule->token_axis;
        sides[1] = axis;
        for (i = 0; i < 2; i++) {
            writer w = i == 0 ? expected_text(e) : found_text(e);
            if (sides[i] == BB_NO_TOKEN_AXIS) {
                put_text(&w, "none");
            } else {
                put_number(&w, sides[i], 10);
            }
        }
    }
    return BB_CONTRACT_TOKEN_AXIS;
}

static bool same_text(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* The names have been found to differ: how? */
BB_COLD static int fail_names(const bb_contract *c, const bb_bundle *b, bb_error *e) {
    uint32_t i, k;
    bb_tensor t;
    for (i = 0; i < c->tensor_count; i++) {
        /* contract_missing */
        if (bb_tensor_find(b, c->tensors[i].name, NULL) < 0) {
            return fail_rule(BB_CONTRACT_MISSING, -1, c->tensors[i].name, NULL, 0, 0, e);
        }
    }
    for (i = 0; i < b->tensor_count; i++) {
        bb_tensor_at(b, i, &t);
        for (k = 0; k < c->tensor_count && !same_text(c->tensors[k].name, t.name); k++) {
        }
        /* contract_extra */
        if (k == c->tensor_count) {
            return fail_rule(BB_CONTRACT_EXTRA, (int32_t)i, t.name, NULL, 0, 0, e);
        }
    }
    for (i = 0; i < b->tensor_count && i < c->tensor_count; i++) {
        bb_tensor_at(b, i, &t);
        /* contract_order */
        if (!same_text(c->tensors[i].name, t.name)) {
            fail_rule(BB_CONTRACT_ORDER, (int32_t)i, t.name, NULL, 0, 0, e);
            if (e != NULL) {
                writer x = expected_text(e), y = found_text(e);
                put_quoted(&x, c->tensors[i].name);
                put_quoted(&y, t.name);
            }
            return BB_CONTRACT_ORDER;
        }
    }
    return fail(e, BB_E_ARGUMENT, 0, "bundle", 0, 0); /* it has a name twice: no decoder made it */
}

/* A contract that is none (5.3): what is wrong with it, and in which tensor. */
BB_COLD static int no_contract(bb_error *e, int32_t tensor, const char *name, const char *field, const char *expected,
                               const char *found) {
    fail_rule(BB_E_ARGUMENT, tensor, name, field, 0, 0, e);
    if (e != NULL) {
        writer x = expected_text(e), y = found_text(e);
        put_text(&x, expected);
        put_text(&y, found);
    }
    return BB_E_ARGUMENT;
}

/* What a bundle cannot show by keeping the contract: the order of attributes, and
 * that every symbol stands alone somewhere, or is `tokens` where n_tokens is
 * demanded. */
static int check_demands(const bb_contract *c, bb_error *e) {
    uint64_t alone = 0, used = 0;
    uint32_t i;
    unsigned k;
    for (i = 0; i < c->attr_count; i++) {
        uint16_t key = c->attrs[i].attr.key;
        if (i > 0 && key <= c->attrs[i - 1].attr.key) {
            return no_contract(e, -1, bb_attr_key_name(key), "attrs", "ascending keys",
                               "one that is not above the one before");
        }
        if (key == BB_KEY_CONTRACT_FINGERPRINT) {
            return no_contract(e, -1, bb_attr_key_name(key), "attrs", "no value that is made from the contract", "one");
        }
        alone |= key == BB_KEY_N_TOKENS ? BB_SYMBOL_TOKENS : 0;
    }
    for (i = 0; i < c->tensor_count; i++) {
        const bb_contract_tensor *rule = &c->tensors[i];
        for (k = 0; k < rule->rank && k < BB_MAX_RANK; k++) {
            uint64_t mask = rule->dims[k].symbols;
            used |= mask;
            alone |= (mask & (mask - 1)) == 0 && rule->dims[k].number == 0 ? mask : 0;
        }
    }
    if ((used & ~alone) != 0) {
        return no_contract(e, -1, NULL, "dims", "symbols that each stand alone in a dimension", "one that does not");
    }
    return BB_OK;
}

/* The rest, which is true of a contract that a bundle keeps: names that are some
 * and of which none stands twice, dtypes, ranks, axes and numbers. */
BB_COLD static int check_rules(const bb_contract *c, bb_error *e) {
    uint32_t i, k;
    for (i = 0; i < c->attr_count; i++) {
        const bb_attr *a = &c->attrs[i].attr;
        if (a->type < BB_ATTR_U64 || a->type > BB_ATTR_TEXT ||
            (!c->attrs[i].any && a->type > BB_ATTR_F64 && a->value == NULL && a->length != 0)) {
            return no_contract(e, -1, bb_attr_key_name(a->key), "attrs", "a type and a value", "one without");
        }
    }
    for (i = 0; i < c->tensor_count; i++) {
        const bb_contract_tensor *rule = &c->tensors[i];
        const char *name = rule->name;
        for (k = 0; name != NULL && k <= BB_MAX_NAME && name_byte((uint8_t)name[k]); k++) {
        }
        if (name == NULL || k == 0 || k > BB_MAX_NAME || name[k] != '\0') {
            return no_contract(e, (int32_t)i, NULL, "name", "1 to 63 letters, digits, \". _ - /\"", "something else");
        }
        for (k = 0; k < i && !same_text(c->tensors[k].name, name); k++) {
        }
        if (k < i) {
            return no_contract(e, (int32_t)i, name, "name", "no name twice", "that of an earlier tensor");
        }
        if (bb_dtype_name(rule->dtype) == NULL) {
            return no_contract(e, (int32_t)i, name, "dtype", "a registered code", "another");
        }
        if (rule->rank > BB_MAX_RANK) {
            return no_contract(e, (int32_t)i, name, "rank", "0 to 8", "more");
        }
        if (rule->token_axis != BB_NO_TOKEN_AXIS && rule->token_axis >= rule->rank) {
            return no_contract(e, (int32_t)i, name, "token_axis", "255, or less than the rank", "another");
        }
        for (k = 0; k < rule->rank; k++) {
            if (rule->dims[k].number > MOST_DIMENSION) {
                return no_contract(e, (int32_t)i, name, "dims", "a number of at most 2^63 - 1", "more");
            }
        }
    }
    return BB_OK;
}

/* What the symbols stand for; those without a value are not in `known`. */
typedef struct symbols {
    uint64_t known;
    uint64_t value[64];
} symbols;

/* The first dimension in which a symbol stands alone, and which the bundle's
 * tensor has, gives its value. */
static void bind_symbols(const bb_contract *c, const bb_bundle *b, symbols *s) {
    bb_attr tokens;
    bb_cursor at;
    uint32_t i;
    unsigned k, n;
    s->known = 0;
    if (bb_attr_find(b, BB_KEY_N_TOKENS, &tokens) >= 0) {
        s->known = BB_SYMBOL_TOKENS;
        s->value[0] = tokens.u64;
    }
    memset(&at, 0, sizeof at);
    for (i = 0; i < c->tensor_count; i++) {
        const bb_contract_tensor *rule = &c->tensors[i];
        const uint8_t *r;
        seek(b, &at, i);
        r = b->priv.base + at.record;
        for (k = 0; k < rule->rank && k < BB_MAX_RANK; k++) {
            uint64_t mask = rule->dims[k].symbols;
            if (mask == 0 || (mask & (mask - 1)) != 0 || rule->dims[k].number != 0) {
                continue;
            }
            if (k < r[2] && (mask & s->known) == 0) {
                for (n = 0; mask >> n != 1; n++) {
                }
                s->known |= mask;
                s->value[n] = load64(r + RECORD_FIXED + 8 * (size_t)k);
            }
        }
    }
}

/* UINT64_MAX, which no dimension is, for a sum that does not fit or has a symbol
 * without a value. */
static uint64_t sum_of(const bb_contract_dim *d, const symbols *s) {
    uint64_t left = d->symbols, sum = d->number;
    unsigned n;
    if ((d->symbols & ~s->known) != 0) {
        return UINT64_MAX;
    }
    for (n = 0; left != 0; n++, left >>= 1) {
        if ((left & 1) != 0) {
            sum = s->value[n] > UINT64_MAX - sum ? UINT64_MAX : sum + s->value[n];
        }
    }
    return sum;
}

static int compare(const bb_contract *c, const bb_bundle *b, bb_error *e) {
    symbols s;
    bb_cursor at;
    uint32_t i, k;
    bool same;
    for (i = 0; i < c->attr_count; i++) {
        /* contract_attribute */
        if (!attr_holds(&c->attrs[i], b)) {
            return fail_demand(&c->attrs[i], b, e);
        }
    }
    same = c->tensor_count == b->tensor_count;
    memset(&at, 0, sizeof at);
    for (i = 0; same && i < b->tensor_count; i++) {
        const uint8_t *r;
        seek(b, &at, i);
        r = b->priv.base + at.record;
        same = c->tensors[i].name != NULL &&
               text_is(c->tensors[i].name, r + RECORD_FIXED + 8 * (size_t)r[2], r[4]);
    }
    if (!same) {
        int r = check_rules(c, e); /* first: names that are some */
        return r != BB_OK ? r : fail_names(c, b, e);
    }
    bind_symbols(c, b, &s);
    for (i = 0; i < b->tensor_count; i++) {
        const bb_contract_tensor *rule = &c->tensors[i];
        const uint8_t *r;
        seek(b, &at, i);
        r = b->priv.base + at.record;
        /* contract_dtype */
        if (r[0] != rule->dtype) {
            return fail_dtype(i, rule, r[0], e);
        }
        /* contract_shape */
        if (r[2] != rule->rank) {
            return fail_rule(BB_CONTRACT_SHAPE, (int32_t)i, rule->name, "rank", rule->rank, r[2], e);
        }
        for (k = 0; k < rule->rank; k++) {
            uint64_t dim = load64(r + RECORD_FIXED + 8 * (size_t)k), sum = sum_of(&rule->dims[k], &s);
            /* contract_shape */
            if (sum != dim) {
                return fail_dim(i, rule, k, sum, (rule->dims[k].symbols & ~s.known) == 0, dim, e);
            }
        }
        /* contract_token_axis */
        if (r[3] != rule->token_axis) {
            return fail_axis(i, rule, r[3], e);
        }
    }
    return BB_OK;
}

int bb_contract_compare(const bb_contract *c, const bb_bundle *b, bb_error *e) {
    int r;
    if (c == NULL || b == NULL || b->priv.base == NULL || (c->attrs == NULL && c->attr_count != 0) ||
        (c->tensors == NULL && c->tensor_count != 0)) {
        return fail(e, BB_E_ARGUMENT, 0, "contract", 0, 0);
    }
    r = check_demands(c, e);
    if (r == BB_OK) {
        r = compare(c, b, e);
        /* Is it the bundle, or the contract? */
        if (r > BB_OK && check_rules(c, e) != BB_OK) {
            r = BB_E_ARGUMENT;
        }
    }
    return r;
}

/* ---- encoding ------------------------------------------------------------ */

/* Up to 64: a name without its NUL is longer than any limit. */
static uint32_t name_length_of(const bb_tensor *t) {
    uint32_t n = 0;
    while (n < sizeof t->name && t->name[n] != '\0') {
        n++;
    }
    return n;
}

static uint32_t value_length_of(const bb_attr *a) {
    return a->type >= BB_ATTR_U64 && a->type <= BB_ATTR_F64 ? 8 : a->length;
}

/* Writes a tensor record of at most 8 + 64 + 64 bytes. A rank above 8 is written
 * as such and without the dims that it has not: the check refuses it. */
static void put_record(uint8_t *r, const bb_tensor *t, uint32_t name_length) {
    unsigned i, rank = t->rank <= BB_MAX_RANK ? t->rank : 0;
    memset(r, 0, RECORD_FIXED + 8 * rank + (size_t)pad8(name_length));
    r[0] = t->dtype;
    r[1] = t->byte_order;
    r[2] = t->rank;
    r[3] = t->token_axis;
    r[4] = (uint8_t)name_length;
    for (i = 0; i < rank; i++) {
        store64(r + RECORD_FIXED + 8 * i, t->dims[i]);
    }
    memcpy(r + RECORD_FIXED + 8 * rank, t->name, name_length);
}

typedef struct layout {
    uint64_t table, attributes, body; /* bytes */
    uint64_t payload, fragments, total;
} layout;

static int lay_out(const bb_config *config, const bb_desc *d, layout *o, bb_error *e) {
    head_check h;
    uint64_t at;
    uint32_t i;
    int r = check_config(config, e);
    if (r != BB_OK) {
        return r;
    }
    if (d == NULL || (d->tensors == NULL && d->tensor_count != 0) || (d->attrs == NULL && d->attr_count != 0)) {
        return fail(e, BB_E_ARGUMENT, 0, "desc", 0, 0);
    }
    memset(o, 0, sizeof *o);
    for (i = 0; i < d->tensor_count; i++) {
        o->table += RECORD_FIXED + 8 * (uint64_t)d->tensors[i].rank + pad8(name_length_of(&d->tensors[i]));
    }
    for (i = 0; i < d->attr_count; i++) {
        o->attributes += RECORD_FIXED + pad8(value_length_of(&d->attrs[i]));
    }
    o->body = HEAD_FIXED + o->table + o->attributes;
    /* B10; B11 to B13 hold by construction */
    if (o->body > config->limits.head_bytes) {
        return fail(e, BB_LIMIT_HEAD_BYTES, 24, "body_length", config->limits.head_bytes, o->body);
    }
    begin_head(&h, config, NULL, d, BB_HEADER_BYTES, d->fragment_size, d->tensor_count, e);
    r = check_head_fixed(&h, d->no_checksums ? BB_HEAD_NO_CHECKSUMS : 0, d->tensor_count, o->attributes, 0, o->body);
    if (r != BB_OK) {
        return r;
    }
    at = BB_HEADER_BYTES + HEAD_FIXED;
    o->total = BB_HEADER_BYTES + pad64(o->body);
    for (i = 0; i < d->tensor_count; i++) {
        const bb_tensor *t = &d->tensors[i];
        uint8_t record[RECORD_FIXED + 8 * BB_MAX_RANK + BB_MAX_NAME + 1];
        uint64_t size = 0, bytes;
        put_record(record, t, name_length_of(t));
        r = check_tensor(&h, record, at, at + sizeof record, &size);
        if (r != BB_OK) {
            return r;
        }
        at += size;
        bytes = record_bytes(record);
        o->total += frames_size(bytes, d->fragment_size);
        if (t->bytes != 0 && t->bytes != bytes) {
            fail(e, BB_E_ARGUMENT, 0, "bytes", bytes, t->bytes);
            if (e != NULL) {
                e->tensor = (int32_t)i;
                fail_name(e, (const uint8_t *)t->name, name_length_of(t));
            }
            return BB_E_ARGUMENT;
        }
    }
    for (i = 0; i < d->attr_count; i++) {
        const bb_attr *a = &d->attrs[i];
        uint8_t number[8];
        const uint8_t *value = (const uint8_t *)a->value;
        uint32_t length = value_length_of(a);
        if (a->type >= BB_ATTR_U64 && a->type <= BB_ATTR_F64) {
            store64(number, a->u64);
            value = number;
        } else if (value == NULL && length != 0) {
            return fail(e, BB_E_ARGUMENT, 0, "value", length, 0);
        }
        r = check_attr(&h, a->key, a->type, 0, length, value, NULL, at);
        if (r != BB_OK) {
            return r;
        }
        at += RECORD_FIXED + pad8(length);
    }
    o->payload = h.payload;
    o->fragments = h.fragments;
    o->total += BB_HEADER_BYTES;
    return BB_OK;
}

int bb_encoded_size(const bb_config *config, const bb_desc *d, uint64_t *size, bb_error *e) {
    layout o;
    int r;
    if (size == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "size", 0, 0);
    }
    *size = 0;
    r = lay_out(config, d, &o, e);
    if (r == BB_OK) {
        *size = o.total;
    }
    return r;
}

static void put_header(const bb_config *config, const bb_desc *d, uint8_t *p, uint8_t type, uint64_t length,
                       uint64_t a, uint64_t b, uint32_t body_crc) {
    memset(p, 0, BB_HEADER_BYTES);
    memcpy(p, magic, sizeof magic);
    p[8] = type;
    store16(p + 12, BB_MAJOR);
    store16(p + 14, d->minor);
    store64(p + 16, d->number);
    store64(p + 24, length);
    store64(p + 32, a);
    store64(p + 40, b);
    store32(p + 48, body_crc);
    store32(p + 60, config->crc32c(0, p, 60));
}

static void put_head(const bb_config *config, const bb_desc *d, const layout *o, uint8_t *p) {
    uint8_t *body = p + BB_HEADER_BYTES;
    uint8_t *r = body + HEAD_FIXED;
    uint32_t i;
    memset(body, 0, (size_t)pad64(o->body));
    store32(body, d->no_checksums ? BB_HEAD_NO_CHECKSUMS : 0);
    store32(body + 4, d->tensor_count);
    store32(body + 8, d->attr_count);
    store32(body + 12, (uint32_t)o->attributes);
    store64(body + 16, d->fragment_size);
    for (i = 0; i < d->tensor_count; i++) {
        put_record(r, &d->tensors[i], name_length_of(&d->tensors[i]));
        r += record_size(r);
    }
    for (i = 0; i < d->attr_count; i++) {
        const bb_attr *a = &d->attrs[i];
        uint32_t length = value_length_of(a);
        store16(r, a->key);
        r[2] = a->type;
        store32(r + 4, length);
        if (a->type <= BB_ATTR_F64) {
            store64(r + RECORD_FIXED, a->u64);
        } else if (length != 0) {
            memcpy(r + RECORD_FIXED, a->value, length);
        }
        r += RECORD_FIXED + pad8(length);
    }
    put_header(config, d, p, BB_FRAME_HEAD, o->body, 0, 0, config->crc32c(0, body, (size_t)o->body));
}

/* Small enough that what was copied is still in the cache for its checksum; a
 * multiple of every element, and of three blocks of the checksum. */
#define COPY_BYTES (2u * 3u * 4096u)

static uint32_t put_payload(const bb_config *config, uint8_t *dst, const uint8_t *src, uint64_t n, uint32_t swap,
                            bool checksum) {
    uint32_t crc = 0;
    while (n > 0) {
        size_t piece = (size_t)smaller(n, COPY_BYTES);
        if (swap != 0) {
            reverse(dst, src, piece, swap);
        } else {
            memcpy(dst, src, piece);
        }
        if (checksum) {
            crc = config->crc32c(crc, dst, piece);
        }
        dst += piece;
        src += piece;
        n -= piece;
    }
    return crc;
}

/* Where an encoding goes: all of it to one place, or everything but the caller's
 * own payloads, with parts that say in which order to send both. */
typedef struct sink {
    uint8_t *at;    /* the next byte to write */
    uint8_t *begin; /* the first byte that no part names yet */
    bb_part *parts; /* NULL: payloads are copied */
    size_t count;
} sink;

static void end_part(sink *s) {
    s->parts[s->count].data = s->begin;
    s->parts[s->count].size = (size_t)(s->at - s->begin);
    s->count++;
    s->begin = s->at;
}

/* Bytes of an element to be reversed, 0 if the caller's order is the bundle's. */
static uint32_t swap_of(const bb_tensor *t, const dtype_row *type) {
    return type->both_orders && t->byte_order != (unsigned)BB_NATIVE_ORDER ? type->block_bytes : 0;
}

/* Only for a tensor that lay_out has passed. */
static uint64_t tensor_bytes(const bb_tensor *t, const dtype_row *type) {
    uint64_t n = 1;
    unsigned i;
    for (i = 0; i < t->rank; i++) {
        if (t->dims[i] == 0) {
            return 0;
        }
        n *= t->dims[i];
    }
    return type->block_elements == 1 ? n * type->block_bytes : n / type->block_elements * type->block_bytes;
}

/* Bytes that bb_encode_parts writes itself, and how many parts there are. */
static void count_parts(const bb_desc *d, const layout *o, uint64_t *own, uint64_t *count) {
    uint32_t i;
    *own = o->total;
    *count = 1;
    for (i = 0; i < d->tensor_count; i++) {
        const bb_tensor *t = &d->tensors[i];
        const dtype_row *type = dtype_of(t->dtype);
        if (swap_of(t, type) == 0) {
            uint64_t bytes = tensor_bytes(t, type);
            *own -= bytes;
            *count += 2 * fragments_of(bytes, d->fragment_size);
        }
    }
}

/* The fragment frames and the end. `at`: offset of the first in the encoding. */
static int put_frames(const bb_config *config, const bb_desc *d, const layout *o, uint64_t at, sink *s, bb_error *e) {
    uint32_t i;
    for (i = 0; i < d->tensor_count; i++) {
        const bb_tensor *t = &d->tensors[i];
        const dtype_row *type = dtype_of(t->dtype);
        const uint8_t *src = (const uint8_t *)t->data;
        uint64_t bytes = tensor_bytes(t, type), done, n;
        uint32_t swap = swap_of(t, type);
        int r = BB_OK;
        if (bytes != 0 && src == NULL) {
            r = fail(e, BB_E_ARGUMENT, at, "data", bytes, 0);
        }
        for (done = 0; r == BB_OK && done < bytes; done += n) {
            uint8_t *header = s->at;
            uint32_t crc = 0;
            uint64_t bad;
            n = d->fragment_size == 0 ? bytes : smaller(d->fragment_size, bytes - done);
            bad = t->dtype == BB_BOOL ? first_not_bool(src + done, n) : n;
            /* C4 */
            if (bad < n) {
                r = fail(e, BB_BOOL_VALUE, at + BB_HEADER_BYTES + bad, "payload", 1, src[done + bad]);
                break;
            }
            s->at += BB_HEADER_BYTES;
            if (s->parts != NULL && swap == 0) {
                end_part(s);
                s->parts[s->count].data = src + done;
                s->parts[s->count].size = (size_t)n;
                s->count++;
                if (!d->no_checksums) {
                    crc = config->crc32c(0, src + done, (size_t)n);
                }
            } else {
                crc = put_payload(config, s->at, src + done, n, swap, !d->no_checksums);
                s->at += n;
            }
            memset(s->at, 0, (size_t)(pad64(n) - n));
            s->at += pad64(n) - n;
            put_header(config, d, header, BB_FRAME_FRAGMENT, n, i, done, crc);
            at += BB_HEADER_BYTES + pad64(n);
        }
        if (r != BB_OK) {
            if (e != NULL) {
                e->tensor = (int32_t)i;
                e->frame = at;
                fail_name(e, (const uint8_t *)t->name, name_length_of(t));
            }
            return r;
        }
    }
    put_header(config, d, s->at, BB_FRAME_END, 0, o->fragments, o->payload, 0);
    s->at += BB_HEADER_BYTES;
    if (s->parts != NULL) {
        end_part(s);
    }
    return BB_OK;
}

/* Is the head frame of this description the prepared one, number and minor aside? */
static bool is_prepared(const bb_prepared *known, const bb_desc *d) {
    const uint8_t *r;
    uint32_t i, k;
    if (known == NULL || known->head.priv.base == NULL || d == NULL || d->tensor_count != known->head.tensor_count ||
        d->attr_count != known->head.attribute_count || d->fragment_size != known->head.fragment_size ||
        d->no_checksums != ((known->head.head_flags & BB_HEAD_NO_CHECKSUMS) != 0) ||
        (d->tensors == NULL && d->tensor_count != 0) || (d->attrs == NULL && d->attr_count != 0)) {
        return false;
    }
    r = known->head.priv.base + BB_HEADER_BYTES + HEAD_FIXED;
    for (i = 0; i < d->tensor_count; i++) {
        const bb_tensor *t = &d->tensors[i];
        const uint8_t *dims = r + RECORD_FIXED;
        if (t->dtype != r[0] || t->byte_order != r[1] || t->rank != r[2] || t->token_axis != r[3] ||
            memcmp(t->name, dims + 8 * (size_t)r[2], r[4]) != 0 || t->name[r[4]] != '\0') {
            return false;
        }
        for (k = 0; k < t->rank; k++) {
            if (t->dims[k] != load64(dims + 8 * k)) {
                return false;
            }
        }
        if (t->bytes != 0 && t->bytes != tensor_bytes(t, dtype_of(t->dtype))) {
            return false;
        }
        r += record_size(r);
    }
    for (i = 0; i < d->attr_count; i++) {
        const bb_attr *a = &d->attrs[i];
        uint32_t length = load32(r + 4);
        if (a->key != load16(r) || a->type != r[2]) {
            return false;
        }
        if (a->type <= BB_ATTR_F64) {
            if (a->u64 != load64(r + RECORD_FIXED)) {
                return false;
            }
        } else if (a->length != length ||
                   (length != 0 && (a->value == NULL || memcmp(a->value, r + RECORD_FIXED, length) != 0))) {
            return false;
        }
        r += RECORD_FIXED + pad8(length);
    }
    return true;
}

static void layout_of(const bb_prepared *known, layout *o) {
    o->body = known->body_bytes;
    o->payload = known->head.payload_bytes;
    o->fragments = known->head.fragments;
    o->total = known->total;
}

/* One encoder behind four functions. parts: NULL for one piece. */
static int encode(const bb_config *config, const bb_prepared *known, const bb_desc *d, void *dst, size_t cap,
                  bb_part *parts, size_t part_cap, size_t *written, bb_error *e) {
    layout o;
    sink s;
    uint64_t own, count = 0, head;
    int r;
    if (written == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, parts != NULL ? "part_count" : "written", 0, 0);
    }
    *written = 0;
    if (is_prepared(known, d)) {
        layout_of(known, &o);
    } else {
        known = NULL;
        r = lay_out(config, d, &o, e);
        if (r != BB_OK) {
            return r;
        }
    }
    own = o.total;
    if (parts != NULL) {
        count_parts(d, &o, &own, &count);
    }
    if (dst == NULL || own > cap) {
        return fail(e, BB_E_SPACE, 0, parts != NULL ? "scratch_size" : "cap", own, cap);
    }
    if (count > part_cap) {
        return fail(e, BB_E_SPACE, 0, "part_cap", count, part_cap);
    }
    head = BB_HEADER_BYTES + pad64(o.body);
    s.at = (uint8_t *)dst;
    s.begin = s.at;
    s.parts = parts;
    s.count = 0;
    if (known != NULL) {
        memcpy(s.at + BB_HEADER_BYTES, known->head.priv.base + BB_HEADER_BYTES, (size_t)pad64(o.body));
        put_header(config, d, s.at, BB_FRAME_HEAD, o.body, 0, 0, known->body_crc);
    } else {
        put_head(config, d, &o, s.at);
    }
    s.at += head;
    r = put_frames(config, d, &o, head, &s, e);
    if (r == BB_OK) {
        *written = parts != NULL ? s.count : (size_t)o.total;
    }
    return r;
}

int bb_encode(const bb_config *config, const bb_desc *d, void *dst, size_t cap, size_t *written, bb_error *e) {
    return encode(config, NULL, d, dst, cap, NULL, 0, written, e);
}

int bb_encode_parts(const bb_config *config, const bb_desc *d, bb_part *parts, size_t part_cap, size_t *part_count,
                    void *scratch, size_t scratch_size, bb_error *e) {
    if (parts == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "parts", 0, 0);
    }
    return encode(config, NULL, d, scratch, scratch_size, parts, part_cap, part_count, e);
}

int bb_encode_parts_size(const bb_config *config, const bb_desc *d, uint64_t *part_count, uint64_t *scratch_size,
                         bb_error *e) {
    layout o;
    int r;
    if (part_count == NULL || scratch_size == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, part_count == NULL ? "part_count" : "scratch_size", 0, 0);
    }
    *part_count = *scratch_size = 0;
    r = lay_out(config, d, &o, e);
    if (r == BB_OK) {
        count_parts(d, &o, scratch_size, part_count);
    }
    return r;
}

/* ---- prepared heads ------------------------------------------------------ */

/* The head frame in `memory` has passed every check. */
static int prepare(bb_prepared *p, const bb_config *config, const uint8_t *memory) {
    bb_frame f;
    int r;
    memset(&f, 0, sizeof f);
    f.type = BB_FRAME_HEAD;
    f.minor = load16(memory + 14);
    f.number = load64(memory + 16);
    f.length = load64(memory + 24);
    r = check_head(config, &f, memory, &p->head, NULL);
    if (r == BB_OK) {
        const uint8_t *record = memory + BB_HEADER_BYTES + HEAD_FIXED;
        uint32_t i;
        p->config = *config;
        p->body_bytes = f.length;
        p->body_crc = load32(memory + 48);
        p->total = p->head.priv.first + BB_HEADER_BYTES;
        for (i = 0; i < p->head.tensor_count; i++) {
            p->total += frames_size(record_bytes(record), p->head.fragment_size);
            record += record_size(record);
        }
    }
    return r;
}

int bb_prepare_encode(bb_prepared *prepared, const bb_config *config, const bb_desc *d, void *memory,
                      size_t memory_size, bb_error *e) {
    layout o;
    int r;
    if (prepared == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "prepared", 0, 0);
    }
    memset(prepared, 0, sizeof *prepared);
    r = lay_out(config, d, &o, e);
    if (r != BB_OK) {
        return r;
    }
    if (memory == NULL || BB_HEADER_BYTES + pad64(o.body) > memory_size) {
        return fail(e, BB_E_SPACE, 0, "memory_size", BB_HEADER_BYTES + pad64(o.body), memory_size);
    }
    put_head(config, d, &o, (uint8_t *)memory);
    return prepare(prepared, config, (const uint8_t *)memory);
}

int bb_prepare_decode(bb_prepared *prepared, const bb_config *config, const void *data, size_t size, void *memory,
                      size_t memory_size, bb_error *e) {
    bb_bundle head;
    size_t total;
    int r;
    if (prepared == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "prepared", 0, 0);
    }
    memset(prepared, 0, sizeof *prepared);
    r = decode_head(config, NULL, data, size, &head, &total, e);
    if (r != BB_OK) {
        return r;
    }
    if (memory == NULL || total > memory_size) {
        return fail(e, BB_E_SPACE, 0, "memory_size", total, memory_size);
    }
    memmove(memory, data, total);
    return prepare(prepared, config, (const uint8_t *)memory);
}

int bb_prepared_encode(const bb_prepared *prepared, const bb_desc *d, void *dst, size_t cap, size_t *written,
                       bb_error *e) {
    if (prepared == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, "prepared", 0, 0);
    }
    return encode(&prepared->config, prepared, d, dst, cap, NULL, 0, written, e);
}

int bb_prepared_encode_parts(const bb_prepared *prepared, const bb_desc *d, bb_part *parts, size_t part_cap,
                             size_t *part_count, void *scratch, size_t scratch_size, bb_error *e) {
    if (prepared == NULL || parts == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, prepared == NULL ? "prepared" : "parts", 0, 0);
    }
    return encode(&prepared->config, prepared, d, scratch, scratch_size, parts, part_cap, part_count, e);
}

/* ---- decoding a stream --------------------------------------------------- */

void *bb_reserve_fixed(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {
    const bb_fixed *fixed = (const bb_fixed *)user;
    (void)old; /* a slot's block never moves, so its bytes are there */
    (void)used;
    if (slot >= fixed->slots || need > fixed->slot_bytes) {
        return NULL;
    }
    *capacity = fixed->slot_bytes;
    return (uint8_t *)fixed->memory + (size_t)slot * fixed->slot_bytes;
}

int bb_stream_init(bb_stream *s, const bb_config *config, unsigned flags, bb_stream_slot *slots, uint32_t slot_count,
                   bb_reserve_fn reserve, void *user) {
    uint64_t wanted = 1;
    if (s == NULL || slots == NULL || reserve == NULL || check_config(config, NULL) != BB_OK ||
        (flags & ~(unsigned)(BB_STREAM_CLASS | BB_STREAM_SINGLE)) != 0) {
        return BB_E_ARGUMENT;
    }
    if ((flags & BB_STREAM_CLASS) != 0) {
        wanted = config->limits.open_bundles;
    }
    /* Fewer slots than the limit would give an error that the specification
     * does not know. */
    if (slot_count < wanted) {
        return BB_E_ARGUMENT;
    }
    memset(s, 0, sizeof *s);
    memset(slots, 0, sizeof *slots * (size_t)wanted);
    s->config = *config;
    s->slots = slots;
    s->slot_count = (uint32_t)wanted;
    s->reserve = reserve;
    s->user = user;
    s->flags = flags;
    s->closing = NO_SLOT;
    return BB_OK;
}

int bb_stream_prepare(bb_stream *s, const bb_prepared *prepared) {
    const bb_limits *a, *b;
    if (s == NULL) {
        return BB_E_ARGUMENT;
    }
    s->known = NULL;
    if (prepared == NULL) {
        return BB_OK;
    }
    a = &s->config.limits;
    b = &prepared->config.limits;
    if (a->head_bytes != b->head_bytes || a->tensors != b->tensors || a->name_bytes != b->name_bytes ||
        a->rank != b->rank || a->dimension != b->dimension || a->payload_bytes != b->payload_bytes ||
        a->attribute_bytes != b->attribute_bytes || a->fragments != b->fragments ||
        s->config.require_checksums != prepared->config.require_checksums) {
        return BB_E_ARGUMENT; /* the head has passed other checks than the stream's */
    }
    s->known = prepared;
    return BB_OK;
}

/* After an error the stream takes no more bytes, and nothing of an open bundle
 * stays reachable. */
static int stop(bb_stream *s, int code, bb_error *e) {
    s->error.code = code;
    s->error.frame = s->frame.at;
    memset(s->slots, 0, sizeof *s->slots * (size_t)s->slot_count);
    s->open = 0;
    if (e != NULL) {
        *e = s->error;
    }
    return code;
}

static uint64_t take(bb_stream *s, uint8_t *to, const uint8_t *from, uint64_t room, size_t size, size_t *taken) {
    uint64_t n = smaller(room, size - *taken);
    if (n > 0) {
        memcpy(to, from + *taken, (size_t)n);
        *taken += (size_t)n;
        s->taken += n;
        s->have += n;
    }
    return n;
}

/* Makes the slot's block reach `need` bytes. */
static bool reserve(bb_stream *s, bb_stream_slot *slot, uint64_t used, uint64_t need) {
    size_t capacity;
    void *memory;
    if (need <= slot->capacity) {
        return true;
    }
    if (need > BB_SPAN) {
        return false;
    }
    capacity = (size_t)need;
    memory = s->reserve(s->user, (uint32_t)(slot - s->slots), slot->memory, (size_t)used, (size_t)need, &capacity);
    if (memory == NULL || capacity < need) {
        return false;
    }
    slot->memory = (uint8_t *)memory;
    slot->capacity = capacity;
    slot->bundle.priv.base = slot->memory;
    return true;
}

/* The frame is whole. Unit C, then what it means for its bundle. */
static int finish_frame(bb_stream *s, const reader *rd, bb_event *event) {
    const bb_frame *f = &s->frame;
    bb_stream_slot *slot = &s->slots[f->slot];
    bb_bundle *b = &slot->bundle;
    uint8_t *p = slot->memory + slot->used;
    bool repeated = false;
    int r;
    if (is_known(rd, f, p)) {
        take_known(rd, f, p, b);
    } else {
        r = check_frame(rd, f, p, s->crc, b, &repeated, &s->error);
        if (r != BB_OK) {
            return r;
        }
    }
    event->slot = f->slot;
    event->bundle = b;
    event->frame = f->at;
    event->frame_type = f->type;
    if (f->type == BB_FRAME_HEAD) {
        event->kind = BB_EVENT_HEAD;
        slot->state = SLOT_OPEN;
        slot->used = s->need;
        s->open++;
    } else if (f->type == BB_FRAME_FRAGMENT) {
        event->kind = BB_EVENT_FRAGMENT;
        event->repeated = repeated;
        event->tensor = (uint32_t)f->a;
        event->payload_offset = f->b;
        event->data = p + BB_HEADER_BYTES;
        event->size = f->length;
        if (!repeated) {
            if (b->priv.root == 0 && f->ordinal == b->priv.prefix) {
                b->priv.prefix++;
            } else {
                tree_insert(b, slot->memory, slot->used, f->ordinal);
            }
            b->priv.received++;
            slot->used += s->need;
        }
    } else if (f->type == BB_FRAME_END) {
        event->kind = BB_EVENT_BUNDLE;
        b->complete = true;
        slot->state = SLOT_FILLING; /* no longer open, not yet free: the caller holds the view */
        s->closing = f->slot;
        s->open--;
        s->bundles++;
    } else {
        event->kind = BB_EVENT_EXTENSION;
        event->data = p + BB_HEADER_BYTES;
        event->size = f->length;
    }
    s->have = 0;
    s->need = 0;
    s->crc = 0;
    return BB_OK;
}

int bb_stream_push(bb_stream *s, const void *data, size_t size, size_t *taken, bb_event *event, bb_error *e) {
    const uint8_t *from = (const uint8_t *)data;
    bb_stream_slot *slot;
    reader rd;
    int r;
    if (s == NULL || taken == NULL || event == NULL || (data == NULL && size != 0)) {
        return fail(e, BB_E_ARGUMENT, 0, NULL, 0, 0);
    }
    *taken = 0;
    memset(event, 0, sizeof *event);
    if (s->error.code != BB_OK) {
        if (e != NULL) {
            *e = s->error;
        }
        return s->error.code;
    }
    if (s->closing != NO_SLOT) {
        memset(&s->slots[s->closing], 0, sizeof *s->slots);
        s->closing = NO_SLOT;
    }
    rd.config = &s->config;
    rd.known = s->known;
    rd.one = NULL;
    rd.slots = s->slots;
    rd.slot_count = s->slot_count;
    rd.open = s->open;
    rd.core = (s->flags & BB_STREAM_CLASS) == 0;

    if (s->need == 0) {
        if (s->have == 0) {
            if (size == 0) {
                return BB_NEED_MORE;
            }
            if ((s->flags & BB_STREAM_SINGLE) != 0 && s->bundles != 0 && s->open == 0) {
                return stop(s, fail(&s->error, BB_TRAILING_BYTES, s->taken, NULL, 0, 0), e);
            }
            s->frame.at = s->taken;
        }
        if (s->have < sizeof magic) {
            take(s, s->header + s->have, from, sizeof magic - s->have, size, taken);
            if (s->have < sizeof magic) {
                return BB_NEED_MORE;
            }
            r = check_magic(s->header, s->frame.at, &s->error);
            if (r != BB_OK) {
                return stop(s, r, e);
            }
        }
        take(s, s->header + s->have, from, BB_HEADER_BYTES - s->have, size, taken);
        if (s->have < BB_HEADER_BYTES) {
            return BB_NEED_MORE;
        }
        r = check_header(&rd, s->header, s->frame.at, &s->frame, &s->error);
        if (r != BB_OK) {
            return stop(s, r, e);
        }
        s->need = BB_HEADER_BYTES + pad64(s->frame.length);
        s->have = 0; /* now of what lies in the slot */
        s->crc = 0;
        if (s->frame.type == BB_FRAME_HEAD) {
            s->slots[s->frame.slot].state = SLOT_FILLING;
        }
    }

    slot = &s->slots[s->frame.slot];
    if (s->have == 0) {
        if (!reserve(s, slot, slot->used, slot->used + BB_HEADER_BYTES)) {
            return fail_in(e, s->frame.at, fail(e, BB_E_MEMORY, s->taken, NULL, 0, 0));
        }
        memcpy(slot->memory + slot->used, s->header, BB_HEADER_BYTES);
        s->have = BB_HEADER_BYTES;
    }
    while (s->have < s->need && *taken < size) {
        uint64_t room = smaller(smaller(s->need - s->have, size - *taken), COPY_BYTES);
        uint64_t body_end = BB_HEADER_BYTES + s->frame.length;
        uint64_t begin = s->have;
        if (!reserve(s, slot, slot->used + s->have, slot->used + s->have + room)) {
            return fail_in(e, s->frame.at, fail(e, BB_E_MEMORY, s->taken, NULL, 0, 0));
        }
        take(s, slot->memory + slot->used + begin, from, room, size, taken);
        if (begin < body_end && checksum_counts(&s->frame, &slot->bundle)) {
            s->crc = s->config.crc32c(s->crc, slot->memory + slot->used + begin,
                                      (size_t)(smaller(s->have, body_end) - begin));
        }
    }
    if (s->have < s->need) {
        return BB_NEED_MORE;
    }
    r = finish_frame(s, &rd, event);
    if (r != BB_OK) {
        memset(event, 0, sizeof *event);
        return stop(s, r, e);
    }
    return BB_OK;
}

int bb_stream_finish(bb_stream *s, bb_error *e) {
    if (s == NULL) {
        return fail(e, BB_E_ARGUMENT, 0, NULL, 0, 0);
    }
    if (s->error.code != BB_OK) {
        if (e != NULL) {
            *e = s->error;
        }
        return s->error.code;
    }
    /* truncated */
    if (s->have != 0 || s->need != 0 || s->open != 0 ||
        ((s->flags & BB_STREAM_SINGLE) != 0 && s->bundles == 0)) {
        if (s->have == 0 && s->need == 0) {
            s->frame.at = s->taken;
        }
        return stop(s, fail(&s->error, BB_TRUNCATED, s->taken, NULL, 0, 0), e);
    }
    return BB_OK;
}

/* ---- for bindings -------------------------------------------------------- */

uint32_t bb_abi_version(void) { return BB_ABI_VERSION; }

size_t bb_sizeof(int struct_id) {
    switch (struct_id) {
    case BB_STRUCT_LIMITS: return sizeof(bb_limits);
    case BB_STRUCT_CONFIG: return sizeof(bb_config);
    case BB_STRUCT_ERROR: return sizeof(bb_error);
    case BB_STRUCT_TENSOR: return sizeof(bb_tensor);
    case BB_STRUCT_ATTR: return sizeof(bb_attr);
    case BB_STRUCT_BUNDLE: return sizeof(bb_bundle);
    case BB_STRUCT_DESC: return sizeof(bb_desc);
    case BB_STRUCT_EVENT: return sizeof(bb_event);
    case BB_STRUCT_STREAM_SLOT: return sizeof(bb_stream_slot);
    case BB_STRUCT_STREAM: return sizeof(bb_stream);
    case BB_STRUCT_PART: return sizeof(bb_part);
    case BB_STRUCT_PREPARED: return sizeof(bb_prepared);
    case BB_STRUCT_CONTRACT: return sizeof(bb_contract);
    case BB_STRUCT_CONTRACT_TENSOR: return sizeof(bb_contract_tensor);
    case BB_STRUCT_CONTRACT_ATTR: return sizeof(bb_contract_attr);
    default: return 0;
    }
}
