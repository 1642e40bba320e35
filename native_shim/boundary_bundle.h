/*
 * boundary_bundle.h - codec of the boundary bundle format, version 1.0
 * (spec/boundary-bundle.md).
 *
 * C11, also valid as C++17. No allocation, no mutable globals; memory is the
 * caller's. A view (bb_bundle, bb_tensor, bb_attr) points into the buffer it
 * was made from and is valid as long as that buffer is.
 *
 * Every function that can fail returns an int: BB_OK (0), BB_NEED_MORE (1, not
 * an error), one of the format's error numbers (100 and up, spec section 8), or
 * a negative number for a fault of the call itself (argument, space, memory).
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef BOUNDARY_BUNDLE_H
#define BOUNDARY_BUNDLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Changes when a struct, an enum or a signature of this header changes.
 * Not the format's version. */
#define BB_ABI_VERSION 3

/* The format's version that the codec knows. */
#define BB_MAJOR 1
#define BB_MINOR 0

/* With -DBB_PREFIX=myproj_ every public function bb_x becomes myproj_bb_x, so
 * that two copies of the codec can live in one program. */
#ifdef BB_PREFIX
#define BB_PASTE_(a, b) a##b
#define BB_PASTE(a, b) BB_PASTE_(a, b)
#define bb_abi_version BB_PASTE(BB_PREFIX, bb_abi_version)
#define bb_sizeof BB_PASTE(BB_PREFIX, bb_sizeof)
#define bb_limits_default BB_PASTE(BB_PREFIX, bb_limits_default)
#define bb_limits_maximum BB_PASTE(BB_PREFIX, bb_limits_maximum)
#define bb_config_init BB_PASTE(BB_PREFIX, bb_config_init)
#define bb_crc32c_portable BB_PASTE(BB_PREFIX, bb_crc32c_portable)
#define bb_error_name BB_PASTE(BB_PREFIX, bb_error_name)
#define bb_error_meaning BB_PASTE(BB_PREFIX, bb_error_meaning)
#define bb_error_format BB_PASTE(BB_PREFIX, bb_error_format)
#define bb_dtype_name BB_PASTE(BB_PREFIX, bb_dtype_name)
#define bb_dtype_from_name BB_PASTE(BB_PREFIX, bb_dtype_from_name)
#define bb_dtype_block_elements BB_PASTE(BB_PREFIX, bb_dtype_block_elements)
#define bb_dtype_block_bytes BB_PASTE(BB_PREFIX, bb_dtype_block_bytes)
#define bb_dtype_both_orders BB_PASTE(BB_PREFIX, bb_dtype_both_orders)
#define bb_attr_key_name BB_PASTE(BB_PREFIX, bb_attr_key_name)
#define bb_attr_key_type BB_PASTE(BB_PREFIX, bb_attr_key_type)
#define bb_attr_key_length BB_PASTE(BB_PREFIX, bb_attr_key_length)
#define bb_attr_key_forwarded BB_PASTE(BB_PREFIX, bb_attr_key_forwarded)
#define bb_decode BB_PASTE(BB_PREFIX, bb_decode)
#define bb_decode_head BB_PASTE(BB_PREFIX, bb_decode_head)
#define bb_tensor_at BB_PASTE(BB_PREFIX, bb_tensor_at)
#define bb_tensor_find BB_PASTE(BB_PREFIX, bb_tensor_find)
#define bb_tensor_read BB_PASTE(BB_PREFIX, bb_tensor_read)
#define bb_attr_at BB_PASTE(BB_PREFIX, bb_attr_at)
#define bb_attr_find BB_PASTE(BB_PREFIX, bb_attr_find)
#define bb_encoded_size BB_PASTE(BB_PREFIX, bb_encoded_size)
#define bb_encode BB_PASTE(BB_PREFIX, bb_encode)
#define bb_encode_parts_size BB_PASTE(BB_PREFIX, bb_encode_parts_size)
#define bb_encode_parts BB_PASTE(BB_PREFIX, bb_encode_parts)
#define bb_contract_compare BB_PASTE(BB_PREFIX, bb_contract_compare)
#define bb_prepare_encode BB_PASTE(BB_PREFIX, bb_prepare_encode)
#define bb_prepare_decode BB_PASTE(BB_PREFIX, bb_prepare_decode)
#define bb_prepared_encode BB_PASTE(BB_PREFIX, bb_prepared_encode)
#define bb_prepared_encode_parts BB_PASTE(BB_PREFIX, bb_prepared_encode_parts)
#define bb_prepared_decode BB_PASTE(BB_PREFIX, bb_prepared_decode)
#define bb_prepared_decode_head BB_PASTE(BB_PREFIX, bb_prepared_decode_head)
#define bb_stream_prepare BB_PASTE(BB_PREFIX, bb_stream_prepare)
#define bb_stream_init BB_PASTE(BB_PREFIX, bb_stream_init)
#define bb_stream_push BB_PASTE(BB_PREFIX, bb_stream_push)
#define bb_stream_finish BB_PASTE(BB_PREFIX, bb_stream_finish)
#define bb_reserve_fixed BB_PASTE(BB_PREFIX, bb_reserve_fixed)
#endif

/* A build may set this to an export or import attribute. */
#ifndef BB_API
#define BB_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- results ------------------------------------------------------------ */

enum bb_status {
    /* faults of a call, never of the input; not part of the format */
    BB_E_ARGUMENT = -1, /* a NULL, an index out of range, a limit above its maximum */
    BB_E_SPACE = -2,    /* the caller's buffer is too small */
    BB_E_MEMORY = -3,   /* the stream's reserve function gave none; the call may be repeated */

    BB_OK = 0,
    BB_NEED_MORE = 1,

    BB_TRUNCATED = 100,
    BB_TRAILING_BYTES = 101,

    BB_BAD_MAGIC = 200,
    BB_HEADER_CRC = 201,
    BB_HEADER_RESERVED = 202,
    BB_HEADER_FLAGS = 203,
    BB_HEAD_FIELDS = 204,
    BB_BODY_LENGTH = 205,
    BB_BODY_CRC = 206,
    BB_FRAME_PADDING = 207,
    BB_FRAME_VERSION = 208,
    BB_BUNDLE_NOT_OPEN = 209,
    BB_BUNDLE_ALREADY_OPEN = 210,
    BB_FRAGMENT_TENSOR = 211,
    BB_FRAGMENT_OFFSET = 212,
    BB_FRAGMENT_LENGTH = 213,
    BB_FRAGMENT_ORDER = 214,
    BB_FRAGMENT_CONFLICT = 215,
    BB_FRAGMENT_MISSING = 216,
    BB_END_FRAGMENTS = 217,
    BB_END_PAYLOAD_BYTES = 218,
    BB_PAYLOAD_CRC_PRESENT = 219,
    BB_BOOL_VALUE = 220,

    BB_HEAD_RESERVED = 300,
    BB_FRAGMENT_SIZE = 301,
    BB_TENSOR_TABLE = 302,
    BB_TENSOR_BYTE_ORDER = 303,
    BB_TENSOR_TOKEN_AXIS = 304,
    BB_TENSOR_NAME = 305,
    BB_TENSOR_DUPLICATE = 306,
    BB_TENSOR_BLOCK = 307,
    BB_TENSOR_RESERVED = 308,
    BB_RECORD_PADDING = 309,
    BB_TOKEN_COUNT = 310,
    BB_ATTRIBUTE_BLOCK = 320,
    BB_ATTRIBUTE_KEY = 321,
    BB_ATTRIBUTE_ORDER = 322,
    BB_ATTRIBUTE_TYPE = 323,
    BB_ATTRIBUTE_LENGTH = 324,
    BB_ATTRIBUTE_VALUE = 325,
    BB_ATTRIBUTE_RESERVED = 326,

    BB_UNSUPPORTED_MAJOR = 400,
    BB_UNSUPPORTED_FRAME = 401,
    BB_UNSUPPORTED_HEAD_FLAG = 402,
    BB_UNSUPPORTED_DTYPE = 403,
    BB_UNSUPPORTED_ATTRIBUTE = 404,
    BB_CHECKSUMS_REQUIRED = 405,

    BB_LIMIT_HEAD_BYTES = 500,
    BB_LIMIT_TENSORS = 501,
    BB_LIMIT_NAME = 502,
    BB_LIMIT_RANK = 503,
    BB_LIMIT_DIMENSION = 504,
    BB_LIMIT_PAYLOAD_BYTES = 505,
    BB_LIMIT_ATTRIBUTE_BYTES = 506,
    BB_LIMIT_FRAGMENTS = 507,
    BB_LIMIT_OPEN_BUNDLES = 508,
    BB_LIMIT_EXTENSION_BYTES = 509,

    /* from bb_contract_compare alone */
    BB_CONTRACT_ATTRIBUTE = 600,
    BB_CONTRACT_MISSING = 601,
    BB_CONTRACT_EXTRA = 602,
    BB_CONTRACT_ORDER = 603,
    BB_CONTRACT_DTYPE = 604,
    BB_CONTRACT_SHAPE = 605,
    BB_CONTRACT_TOKEN_AXIS = 606
};

/* Filled when a call does not return BB_OK. Every bb_error pointer of this
 * header may be NULL. */
typedef struct bb_error {
    int32_t code;      /* what the function returned */
    uint64_t offset;   /* byte offset in the input, as the specification fixes it */
    int32_t tensor;    /* index of the tensor concerned, or -1 */
    char name[64];     /* its name, or the name of a registered attribute, or "" */
    const char *field; /* static string: the field concerned, or NULL */
    uint64_t expected; /* what the field should hold; with a limit error the limit */
    uint64_t found;    /* what it holds */
    uint64_t frame;    /* offset of the frame concerned */
    char expected_text[72]; /* what the sentence says where two numbers would not do: */
    char found_text[72];    /* a contract's f32 and f16, 2 and absent; else "" */
} bb_error;

BB_API const char *bb_error_name(int code);    /* stable name, e.g. "body_crc"; "unknown" otherwise */
BB_API const char *bb_error_meaning(int code); /* the registry's half sentence */

/* Writes one sentence, always NUL-terminated when cap > 0. Returns the length
 * of the whole sentence without the NUL, as snprintf does. */
BB_API size_t bb_error_format(const bb_error *error, char *dst, size_t cap);

/* ---- registries ---------------------------------------------------------- */

enum bb_dtype {
    BB_F64 = 1,
    BB_F32 = 2,
    BB_F16 = 3,
    BB_BF16 = 4,
    BB_F8_E4M3FN = 5,
    BB_F8_E5M2 = 6,
    BB_I8 = 16,
    BB_I16 = 17,
    BB_I32 = 18,
    BB_I64 = 19,
    BB_U8 = 24,
    BB_U16 = 25,
    BB_U32 = 26,
    BB_U64 = 27,
    BB_BOOL = 32,
    BB_Q8_0 = 64
};

enum bb_order { BB_LITTLE = 1, BB_BIG = 2 };

#if defined(__BYTE_ORDER__) && defined(__ORDER_BIG_ENDIAN__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define BB_NATIVE_ORDER BB_BIG
#else
#define BB_NATIVE_ORDER BB_LITTLE
#endif

enum bb_attr_type { BB_ATTR_U64 = 1, BB_ATTR_I64 = 2, BB_ATTR_F64 = 3, BB_ATTR_BYTES = 4, BB_ATTR_TEXT = 5 };

enum bb_attr_key {
    BB_KEY_ARCHITECTURE = 0x0002,
    BB_KEY_RECIPE_FINGERPRINT = 0x0009,
    BB_KEY_MODEL_FINGERPRINT = 0x8001,
    BB_KEY_LAYER_START = 0x8003,
    BB_KEY_LAYER_END = 0x8004,
    BB_KEY_N_LAYER = 0x8005,
    BB_KEY_N_TOKENS = 0x8006,
    BB_KEY_N_SEQS = 0x8007,
    BB_KEY_CONTRACT_FINGERPRINT = 0x8008
};

#define BB_KEY_CRITICAL 0x8000u
#define BB_KEY_PRIVATE 0x4000u

enum bb_frame_type { BB_FRAME_HEAD = 0x81, BB_FRAME_FRAGMENT = 0x82, BB_FRAME_END = 0x83 };

#define BB_NO_TOKEN_AXIS 255
#define BB_HEAD_NO_CHECKSUMS 1u /* bit 0 of head_flags */
#define BB_ALIGNMENT 64
#define BB_HEADER_BYTES 64
#define BB_MAX_RANK 8
#define BB_MAX_NAME 63

/* Unknown codes give NULL, 0 or false; none of these is ever an index. */
BB_API const char *bb_dtype_name(unsigned code);
BB_API unsigned bb_dtype_from_name(const char *name);
BB_API uint32_t bb_dtype_block_elements(unsigned code); /* 1, or the elements of a quantised block */
BB_API uint32_t bb_dtype_block_bytes(unsigned code);    /* bytes of an element, or of a block */
BB_API bool bb_dtype_both_orders(unsigned code);

BB_API const char *bb_attr_key_name(unsigned key);
BB_API unsigned bb_attr_key_type(unsigned key);
BB_API uint32_t bb_attr_key_length(unsigned key); /* 0: any length */
BB_API bool bb_attr_key_forwarded(unsigned key);  /* spec section 5.2 */

/* ---- configuration ------------------------------------------------------- */

typedef struct bb_limits {
    uint64_t head_bytes, tensors, name_bytes, rank, dimension, payload_bytes, attribute_bytes, fragments,
        open_bundles, extension_bytes;
} bb_limits;

BB_API void bb_limits_default(bb_limits *limits);
/* The largest values allowed. Sizes are capped to what a pointer of this
 * machine can span. A call whose configuration is above returns BB_E_ARGUMENT. */
BB_API void bb_limits_maximum(bb_limits *limits);

typedef struct bb_config {
    bb_limits limits;
    bool require_checksums; /* refuse bundles without payload checksums */
    /* CRC32C of more bytes, given that of the bytes before (0 at the start). */
    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t n);
} bb_config;

/* Default limits; looks up the processor's CRC instructions. Call it once and
 * keep the result: the look-up can cost microseconds. */
BB_API void bb_config_init(bb_config *config);
BB_API uint32_t bb_crc32c_portable(uint32_t crc, const void *data, size_t n);

/* ---- views --------------------------------------------------------------- */

/* A tensor of a decoded bundle, or one to encode. */
typedef struct bb_tensor {
    char name[64]; /* NUL-terminated */
    uint8_t dtype;
    uint8_t byte_order;
    uint8_t rank;
    uint8_t token_axis;       /* BB_NO_TOKEN_AXIS: none */
    uint64_t dims[8];         /* outermost first; in elements */
    uint64_t bytes;           /* payload bytes. Encoding: 0, or the right number */
    /* Encoding: the elements in native byte order; may be NULL if there are no
     * bytes. Decoding: the payload in the bundle's byte order if it lies in one
     * fragment of a complete bundle, else NULL. */
    const void *data;
} bb_tensor;

typedef struct bb_attr {
    uint16_t key;
    uint8_t type;
    uint32_t length;   /* bytes of the value; encoding ignores it for u64, i64, f64 */
    const void *value; /* the raw little-endian bytes; encoding ignores it for u64, i64, f64 */
    uint64_t u64;      /* u64, i64, f64: the value's 64 bits */
} bb_attr;

/* Where a tensor's record, fragments and payload begin; private. */
typedef struct bb_cursor {
    uint32_t index;
    uint64_t record, first, place;
} bb_cursor;

/* View of one bundle; owns nothing. */
typedef struct bb_bundle {
    uint16_t minor;
    uint64_t number;
    uint32_t head_flags; /* the bits that a consumer must look at */
    uint32_t tensor_count, attribute_count;
    uint64_t fragment_size;
    uint64_t payload_bytes; /* of all tensors */
    uint64_t fragments;     /* that tile the payload */
    bool complete;          /* the end frame has been checked: tensors are final */
    bool known;             /* the head is the prepared one: so is what a contract says of it */
    struct {
        const uint8_t *base; /* the head frame */
        uint64_t first;      /* offset of the frame after the head */
        uint64_t attrs;      /* offset of the attribute block */
        uint64_t received;   /* fragments that came, repeats not counted */
        uint64_t prefix;     /* the first so many lie in canonical order */
        uint64_t root;       /* stream: search tree of the others, 0 if none */
        bool extensions;     /* extension frames lie between the fragments */
        bb_cursor cursor;    /* the tensor that the last fragment belonged to */
    } priv;
} bb_bundle;

/* ---- decoding a buffer --------------------------------------------------- */

/* Exactly one bundle in one buffer, core class, all checks of section 6.
 * Gives BB_TRUNCATED, never BB_NEED_MORE. */
BB_API int bb_decode(const bb_config *config, const void *data, size_t size, bb_bundle *out, bb_error *error);

/* The head frame alone: enough to compare the contract before payloads are
 * touched. BB_OK, BB_NEED_MORE or an error. *frame_bytes (may be NULL): the size
 * of the frame; with BB_NEED_MORE the size that the data must reach for the
 * next check. Tensors of such a bundle have no data. */
BB_API int bb_decode_head(const bb_config *config, const void *data, size_t size, bb_bundle *out,
                          size_t *frame_bytes, bb_error *error);

BB_API int bb_tensor_at(const bb_bundle *bundle, uint32_t index, bb_tensor *out);     /* BB_OK or BB_E_ARGUMENT */
BB_API int bb_tensor_find(const bb_bundle *bundle, const char *name, bb_tensor *out); /* index or -1; out may be NULL */
BB_API int bb_attr_at(const bb_bundle *bundle, uint32_t index, bb_attr *out);         /* BB_OK or BB_E_ARGUMENT */
BB_API int bb_attr_find(const bb_bundle *bundle, uint16_t key, bb_attr *out);         /* index or -1; out may be NULL */

/* Gathers a tensor's fragments into dst, in native byte order. The bundle must
 * be complete. BB_OK, BB_E_ARGUMENT or BB_E_SPACE. */
BB_API int bb_tensor_read(const bb_bundle *bundle, uint32_t index, void *dst, size_t dst_size);

/* ---- encoding ------------------------------------------------------------ */

typedef struct bb_desc {
    uint64_t number;
    uint16_t minor;
    bool no_checksums;
    uint64_t fragment_size; /* 0: one fragment a tensor */
    const bb_tensor *tensors;
    uint32_t tensor_count;
    const bb_attr *attrs; /* in ascending order of key, else BB_ATTRIBUTE_ORDER */
    uint32_t attr_count;
} bb_desc;

/* Both refuse what a decoder with this configuration would refuse, with the same
 * number and the offset it would report. bb_encoded_size looks at no payload
 * (tensor data may be NULL) and so does not check the values of bools. */
BB_API int bb_encoded_size(const bb_config *config, const bb_desc *desc, uint64_t *size, bb_error *error);
BB_API int bb_encode(const bb_config *config, const bb_desc *desc, void *dst, size_t cap, size_t *written,
                     bb_error *error);

/* A part of an encoding; members and order as in POSIX's struct iovec. */
typedef struct bb_part {
    const void *data;
    size_t size;
} bb_part;

/*
 * The same bytes as bb_encode, in parts for writev or sendmsg: headers, padding
 * and reversed payloads lie in `scratch`, every payload whose byte order is this
 * machine's stays where the caller has it. The checksums hold for the payloads
 * as they are now: let them be until the parts are sent. One part more than two
 * a fragment at most; the system takes no more than IOV_MAX at a time.
 *
 * bb_encode_parts_size: how many parts and how much scratch it takes.
 */
BB_API int bb_encode_parts_size(const bb_config *config, const bb_desc *desc, uint64_t *part_count,
                                uint64_t *scratch_size, bb_error *error);
BB_API int bb_encode_parts(const bb_config *config, const bb_desc *desc, bb_part *parts, size_t part_cap,
                           size_t *part_count, void *scratch, size_t scratch_size, bb_error *error);

/* ---- prepared heads ------------------------------------------------------ */

/*
 * A head that has passed its checks once, for a boundary over which the same
 * head travels again and again while number, minor and payloads change, as in a
 * decode step. Everything else goes the ordinary way: results, errors and
 * offsets are those of the functions without "prepared".
 *
 * `memory` holds the head frame as long as the preparation is used.
 * BB_E_SPACE: it needs error->expected bytes (never more than limits.head_bytes
 * + 128). `config` is copied. May be used by several threads at a time.
 */
typedef struct bb_prepared {
    bb_config config;
    bb_bundle head;
    uint64_t body_bytes, total; /* of the head's body; of the whole encoding */
    uint32_t body_crc;
} bb_prepared; /* private */

/* From a description as for bb_encode (payloads are not looked at), or from
 * bytes that begin with a head frame as for bb_decode_head. Either serves both
 * encoding and decoding. */
BB_API int bb_prepare_encode(bb_prepared *prepared, const bb_config *config, const bb_desc *desc, void *memory,
                             size_t memory_size, bb_error *error);
BB_API int bb_prepare_decode(bb_prepared *prepared, const bb_config *config, const void *data, size_t size,
                             void *memory, size_t memory_size, bb_error *error);

BB_API int bb_prepared_encode(const bb_prepared *prepared, const bb_desc *desc, void *dst, size_t cap,
                              size_t *written, bb_error *error);
BB_API int bb_prepared_encode_parts(const bb_prepared *prepared, const bb_desc *desc, bb_part *parts,
                                    size_t part_cap, size_t *part_count, void *scratch, size_t scratch_size,
                                    bb_error *error);

/* The bundle's `known` tells whether its head was the prepared one. */
BB_API int bb_prepared_decode(const bb_prepared *prepared, const void *data, size_t size, bb_bundle *out,
                              bb_error *error);
BB_API int bb_prepared_decode_head(const bb_prepared *prepared, const void *data, size_t size, bb_bundle *out,
                                   size_t *frame_bytes, bb_error *error);

/* ---- contracts ----------------------------------------------------------- */

/* A dimension: the sum of a number and of the symbols whose bits are set. Bit 0
 * is `tokens`, the others are the contract's own. */
#define BB_SYMBOL_TOKENS ((uint64_t)1)
typedef struct bb_contract_dim {
    uint64_t symbols;
    uint64_t number;
} bb_contract_dim;

typedef struct bb_contract_tensor {
    const char *name;
    uint8_t dtype, rank;
    uint8_t token_axis; /* BB_NO_TOKEN_AXIS: none */
    bb_contract_dim dims[8];
} bb_contract_tensor;

typedef struct bb_contract_attr {
    bb_attr attr; /* key, type and, unless `any`, the value, as for encoding */
    bool any;
} bb_contract_attr;

typedef struct bb_contract {
    const bb_contract_attr *attrs; /* in ascending order of key */
    uint32_t attr_count;
    const bb_contract_tensor *tensors; /* in order; no name twice */
    uint32_t tensor_count;
} bb_contract;

/* Compares a bundle, or its head alone, with a contract, as sections 5.3 and 6
 * say. BB_OK, BB_CONTRACT_*, or BB_E_ARGUMENT for a contract that is none,
 * whatever the bundle: a name twice, a symbol that stands alone nowhere. The
 * error has no offset. It names the tensor, or the attribute if its key is
 * registered (its key is in error->expected). What was expected and found is in
 * expected_text and found_text for attributes (values; of bytes the first 8, of
 * text the first 48), dtypes, token axes and the names at a place, in the two
 * numbers for ranks and dimensions. */
BB_API int bb_contract_compare(const bb_contract *contract, const bb_bundle *bundle, bb_error *error);

/* ---- decoding a stream --------------------------------------------------- */

/*
 * Bytes in, in any pieces; events out. The stream keeps every open bundle in
 * one block of the caller's memory, its slot: the head frame, then its fragment
 * frames in the order they came. The block is asked for as bytes come, never
 * for a size that was only declared.
 *
 * reserve: gives a block of at least `need` bytes for the slot, whose first
 * `used` bytes are those of `old` (NULL for a bundle's first block), and stores
 * the size of the block in *capacity; or returns NULL. Blocks should begin on a
 * multiple of 64 so that payloads do. A block belongs to the caller again when
 * the bundle's BB_EVENT_BUNDLE has been returned and the next call is made, and
 * after an error. The stream frees nothing.
 */
typedef void *(*bb_reserve_fn)(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity);

/* Fixed memory: `user` points at a bb_fixed, slot i is bytes [i * slot_bytes, ..). */
typedef struct bb_fixed {
    void *memory;
    size_t slot_bytes;
    uint32_t slots;
} bb_fixed;
BB_API void *bb_reserve_fixed(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity);

enum bb_stream_flags {
    BB_STREAM_CORE = 0,  /* canonical order, one open bundle */
    BB_STREAM_CLASS = 1, /* fragments in any order, several open bundles */
    BB_STREAM_SINGLE = 2 /* exactly one bundle: bytes after it are BB_TRAILING_BYTES */
};

enum bb_event_kind {
    BB_EVENT_NONE = 0,
    BB_EVENT_HEAD = 1,      /* a head passed: compare the contract now */
    BB_EVENT_FRAGMENT = 2,  /* provisional until BB_EVENT_BUNDLE */
    BB_EVENT_EXTENSION = 3, /* an unknown ancillary frame, about to be dropped */
    BB_EVENT_BUNDLE = 4     /* the end frame passed: the bundle is complete */
};

/* Pointers are valid until the next call on the stream. */
typedef struct bb_event {
    int32_t kind;
    uint32_t slot;
    const bb_bundle *bundle;
    uint64_t frame;          /* offset of the frame in the stream */
    uint8_t frame_type;
    bool repeated;           /* fragment: it had come already, with the same bytes */
    uint32_t tensor;         /* fragment: index of its tensor */
    uint64_t payload_offset; /* fragment: its place in that tensor's payload */
    const void *data;        /* fragment, extension: the body */
    uint64_t size;
} bb_event;

/* One open bundle; private. */
typedef struct bb_stream_slot {
    bb_bundle bundle;
    uint8_t *memory;
    size_t capacity;
    uint64_t used; /* bytes of whole, checked frames */
    uint8_t state;
} bb_stream_slot;

/* A frame header after unit B; private. */
typedef struct bb_frame {
    uint64_t at, number, length, a, b, ordinal;
    uint32_t body_crc;
    uint32_t slot;
    uint16_t minor;
    uint8_t type;
} bb_frame;

/* Private. */
typedef struct bb_stream {
    bb_config config;
    const bb_prepared *known;
    bb_stream_slot *slots;
    uint32_t slot_count, open;
    bb_reserve_fn reserve;
    void *user;
    uint32_t flags;
    uint64_t taken;      /* bytes of the input so far */
    uint64_t have, need; /* bytes of the current frame: here, in all (0: header not checked) */
    uint32_t crc;
    uint32_t closing; /* slot whose bundle the last event gave away, or UINT32_MAX */
    uint64_t bundles;
    bb_frame frame;
    uint8_t header[64];
    bb_error error;
} bb_stream;

/* slots: an array of at least limits.open_bundles (core class: 1). */
BB_API int bb_stream_init(bb_stream *stream, const bb_config *config, unsigned flags, bb_stream_slot *slots,
                          uint32_t slot_count, bb_reserve_fn reserve, void *user);

/* From now on heads equal to the prepared one are known; NULL: none. It must
 * outlive the stream and have its limits, else BB_E_ARGUMENT. */
BB_API int bb_stream_prepare(bb_stream *stream, const bb_prepared *prepared);

/* Takes bytes up to the next event. BB_OK: *event holds one, *taken says how
 * many bytes went; call again with the rest. BB_NEED_MORE: all bytes were taken.
 * BB_E_MEMORY: repeat the call with the bytes not taken. Anything else is final
 * and is returned for every later call. */
BB_API int bb_stream_push(bb_stream *stream, const void *data, size_t size, size_t *taken, bb_event *event,
                          bb_error *error);

/* The input has ended: BB_OK, BB_TRUNCATED, or the error that there was. */
BB_API int bb_stream_finish(bb_stream *stream, bb_error *error);

/* ---- for bindings -------------------------------------------------------- */

enum bb_struct_id {
    BB_STRUCT_LIMITS = 0,
    BB_STRUCT_CONFIG = 1,
    BB_STRUCT_ERROR = 2,
    BB_STRUCT_TENSOR = 3,
    BB_STRUCT_ATTR = 4,
    BB_STRUCT_BUNDLE = 5,
    BB_STRUCT_DESC = 6,
    BB_STRUCT_EVENT = 7,
    BB_STRUCT_STREAM_SLOT = 8,
    BB_STRUCT_STREAM = 9,
    BB_STRUCT_PART = 10,
    BB_STRUCT_PREPARED = 11,
    BB_STRUCT_CONTRACT = 12,
    BB_STRUCT_CONTRACT_TENSOR = 13,
    BB_STRUCT_CONTRACT_ATTR = 14
};

/* A binding that mirrors structs compares these when it loads the library. */
BB_API uint32_t bb_abi_version(void);
BB_API size_t bb_sizeof(int struct_id);

#ifdef __cplusplus
}
#endif

#endif
