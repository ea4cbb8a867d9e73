// Products of packed weights and int8 activations. `products.py` describes the format and repeats the arithmetic in
// torch, to the bit: additions in the order of columns, each multiplication and addition rounded (no fused ones).
#pragma once
#include <cstdlib>

#include "threads.h"
#include "vectors.h"

constexpr int BLOCK = 32;          // columns with one activation scale
constexpr int HALF = BLOCK / 2;    // columns with one sum of activations
constexpr int64_t TOKENS = 256;    // tokens that are quantized at once
constexpr float SMALLEST = 1e-30f; // a block of smaller activations counts as zero

struct Packed {
    const uint8_t *codes; // [row tiles, blocks, 64 * bits]
    const void *scale;    // [row tiles, groups, 16]
    const void *low;      // the same shape, or null
    int64_t rows, columns;
    int32_t bits, group, centre, wide; // wide: scale and low are float32, else float16
};

struct Activations { // quantized tokens
    int8_t *values;  // [T, blocks * 32]
    float *scale;    // [T, blocks]
    int32_t *sums;   // [T, blocks, 2]
    int64_t blocks;
};

// A buffer of the calling thread, kept for its next call.
struct Buffer {
    void *data = nullptr;
    size_t size = 0;
    ~Buffer() { free(data); }
    void *get(size_t needed) {
        if (needed > size) {
            free(data);
            size = needed + needed / 4;
            data = aligned_alloc(64, (size + 63) / 64 * 64);
            if (!data) size = 0;
        }
        return data;
    }
};
static thread_local Buffer quantized_buffer;

INLINE bool make_activations(Activations &a, int64_t tokens, int64_t columns) {
    a.blocks = (columns + BLOCK - 1) / BLOCK;
    const size_t each = (size_t)tokens * a.blocks;
    char *data = (char *)quantized_buffer.get(each * (BLOCK + 4 + 8));
    a.values = (int8_t *)data;
    a.scale = (float *)(data + each * BLOCK);
    a.sums = (int32_t *)(data + each * (BLOCK + 4));
    return data != nullptr;
}

// Quantizes a token's `columns` values v (a buffer of `blocks * 32` floats): the largest of a block becomes 127.
static void quantize_token(float *v, float factor, const Activations &a, int64_t token, int64_t columns) {
    for (int64_t i = columns; i < a.blocks * BLOCK; i++) v[i] = 0;
    for (int64_t block = 0; block < a.blocks; block++, v += BLOCK) {
        int8_t *q = a.values + (token * a.blocks + block) * BLOCK;
        int32_t *sums = a.sums + (token * a.blocks + block) * 2;
        int32_t most_bits = 0; // as integers, magnitudes order like floats, and NaN is above infinity
        for (int i = 0; i < BLOCK; i++) {
            int32_t bits;
            memcpy(&bits, v + i, 4);
            bits &= 0x7fffffff;
            most_bits = bits > most_bits ? bits : most_bits;
        }
        const float most = from_bits((uint32_t)most_bits);
        const bool finite = most_bits < 0x7f800000, zero = most < SMALLEST;
        const float inverse = finite && !zero ? 127.0f / most : 0.0f;
        int32_t part[2] = {0, 0};
        for (int i = 0; i < BLOCK; i++) {
            const float scaled = finite ? v[i] * inverse : 0.0f;
            const float rounded = (scaled + 0x1.8p23f) - 0x1.8p23f; // to nearest even
            q[i] = (int8_t)(int32_t)rounded;
        }
        for (int i = 0; i < HALF; i++) part[0] += q[i], part[1] += q[HALF + i];
        sums[0] = part[0];
        sums[1] = part[1];
        a.scale[token * a.blocks + block] =
            (!finite ? __builtin_nanf("") : zero ? 0.0f : most / 127.0f) * factor;
    }
}

template <int BITS> struct Codes;
template <> struct Codes<4> {
    static constexpr int BYTES = 256, CENTRE = CENTRE_4;
    // Byte b of row r in load i holds column 4 i + b, and column 16 + 4 i + b in its upper half.
    INLINE void read(const uint8_t *from, Operand *w) {
        for (int i = 0; i < 4; i++) {
            const Bytes both = load<Bytes>(from + 64 * i);
            w[i] = operand_4(both & (uint8_t)15);
            w[4 + i] = operand_4(both >> 4);
        }
    }
    INLINE void dot(Ints &sum, const Operand &w, const int8_t *x) { dot_4(sum, w, x); }
};
template <> struct Codes<8> {
    static constexpr int BYTES = 512, CENTRE = CENTRE_8;
    INLINE void read(const uint8_t *from, Operand *w) {
        for (int i = 0; i < 8; i++) w[i] = operand_8(load<Bytes>(from + 64 * i));
    }
    INLINE void dot(Ints &sum, const Operand &w, const int8_t *x) { dot_8(sum, w, x); }
};

INLINE Floats load_scale(const Packed &w, const void *from, int64_t at) {
    return w.wide ? load<Floats>((const float *)from + at) : load_half((const uint16_t *)from + at);
}

// One row tile times N tokens. Each token has its own sums in the same order for every N, so its result does not
// depend on the other tokens.
template <int BITS, int N, bool LOW, bool SMALL_GROUP>
static void tile(const Packed &w, const Activations &a, int64_t row_tile, int64_t token, Floats *result) {
    const int64_t blocks = a.blocks;
    const int64_t per_group = SMALL_GROUP ? 1 : w.group / BLOCK;
    const int64_t groups = SMALL_GROUP ? blocks * 2 : (blocks + per_group - 1) / per_group;
    const uint8_t *codes = w.codes + row_tile * blocks * Codes<BITS>::BYTES;
    const int32_t off = w.centre - Codes<BITS>::CENTRE;
    const int8_t *x[N];
    for (int n = 0; n < N; n++) x[n] = a.values + (token + n) * blocks * BLOCK;
    Floats sum[N];
    for (int n = 0; n < N; n++) sum[n] = splat(0);
    Floats scale = splat(0), low = splat(0);
    int64_t left = 0, at = row_tile * groups * LANES;
    for (int64_t block = 0; block < blocks; block++) {
        Operand operands[8];
        Codes<BITS>::read(codes + block * Codes<BITS>::BYTES, operands);
        constexpr int PARTS = SMALL_GROUP ? 2 : 1, EACH = 8 / PARTS;
        for (int part = 0; part < PARTS; part++) {
            if (left == 0) {
                scale = load_scale(w, w.scale, at);
                if (LOW) low = load_scale(w, w.low, at);
                at += LANES;
                left = per_group;
            }
            left -= 1;
            Ints dots[N];
            for (int n = 0; n < N; n++) dots[n] = Ints{};
#pragma GCC unroll 8
            for (int i = part * EACH; i < (part + 1) * EACH; i++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) Codes<BITS>::dot(dots[n], operands[i], x[n] + block * BLOCK + 4 * i);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const int64_t place = (token + n) * blocks + block;
                const int32_t *sums = a.sums + place * 2;
                const int32_t own = SMALL_GROUP ? sums[part] : sums[0] + sums[1];
                if (off) dots[n] -= splat_int(off * own);
                sum[n] += to_floats(dots[n]) * (scale * a.scale[place]);
                if (LOW) sum[n] += low * (a.scale[place] * (float)own);
            }
        }
    }
    for (int n = 0; n < N; n++) result[n] = sum[n];
}

using Tile = void (*)(const Packed &, const Activations &, int64_t, int64_t, Floats *);

template <int N, int BITS> static Tile by_form(const Packed &w) {
    if (w.group < BLOCK) return w.low ? tile<BITS, N, true, true> : tile<BITS, N, false, true>;
    return w.low ? tile<BITS, N, true, false> : tile<BITS, N, false, false>;
}
template <int N> static Tile choose(const Packed &w) { return w.bits == 4 ? by_form<N, 4>(w) : by_form<N, 8>(w); }

// Calls write(token, row tile, Floats) for tokens 0..T and all row tiles.
template <typename Write>
static void product(const Packed &w, const Activations &a, int64_t tokens, int threads, const Write &write) {
    const int64_t tiles = (w.rows + LANES - 1) / LANES;
    const Tile most = choose<MOST>(w), two = choose<2>(w), one = choose<1>(w);
    const auto body = [&](int64_t begin, int64_t end) {
        for (int64_t row_tile = begin; row_tile < end; row_tile++) {
            Floats result[MOST];
            for (int64_t token = 0; token < tokens;) {
                const int64_t left = tokens - token;
                const int n = left >= MOST ? MOST : left >= 2 ? 2 : 1;
                (n == MOST ? most : n == 2 ? two : one)(w, a, row_tile, token, result);
                for (int i = 0; i < n; i++) write(token + i, row_tile, result[i]);
                token += n;
            }
        }
    };
    const bool few = w.rows * w.columns * tokens < (1 << 17);
    const int64_t step = tiles / (4 * (threads > 1 ? threads : 1)) + 1;
    parallel(tiles, step, few ? 1 : threads, body);
}

struct Input { // rows [T, columns] of float32 or bfloat16
    const void *data;
    int64_t stride;
    int32_t brain;
};

INLINE void read_row(const Input &x, int64_t row, int64_t columns, const float *norm, float *v) {
    if (x.brain) {
        const uint16_t *from = (const uint16_t *)x.data + row * x.stride;
        for (int64_t i = 0; i < columns; i++) v[i] = brain_value(from[i]);
    } else {
        memcpy(v, (const float *)x.data + row * x.stride, columns * 4);
    }
    if (norm)
        for (int64_t i = 0; i < columns; i++) v[i] *= norm[i];
}

// Quantizes x times norm; factor [T] scales each token. Returns false if memory is short.
static bool quantize(
    const Input &x, int64_t first, int64_t tokens, int64_t columns, const float *norm, const float *factor,
    Activations &a, int threads) {
    if (!make_activations(a, tokens, columns)) return false;
    std::atomic<bool> enough{true};
    const auto body = [&](int64_t begin, int64_t end) {
        static thread_local Buffer row;
        float *v = (float *)row.get(a.blocks * BLOCK * 4);
        if (!v) {
            enough = false;
            return;
        }
        for (int64_t t = begin; t < end; t++) {
            read_row(x, first + t, columns, norm, v);
            quantize_token(v, factor ? factor[first + t] : 1.0f, a, t, columns);
        }
    };
    parallel(tokens, 8, threads, body);
    return enough;
}
