// Vectors of 16 floats or integers, one lane for each row of a tile. The compiler splits them to the width of the CPU.
// Only the integer dot product and the conversion of float16 need instructions by name.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <initializer_list>

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

constexpr int LANES = 16;

INLINE Floats splat(float v) { return Floats{} + v; }
INLINE Ints splat_int(int32_t v) { return Ints{} + v; }
INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

template <typename V> INLINE V load(const void *from) {
    V v;
    memcpy(&v, from, sizeof(V));
    return v;
}
template <typename V> INLINE void store(void *to, V v) { memcpy(to, &v, sizeof(V)); }

INLINE float from_bits(uint32_t bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

INLINE Floats load_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    Floats v;
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)));
    memcpy(&v, &low, 32);
    memcpy((char *)&v + 32, &high, 32);
    return v;
#endif
}

// bfloat16: the upper half of a float, rounded to nearest even.
INLINE float brain_value(uint16_t b) { return from_bits((uint32_t)b << 16); }
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));

INLINE Floats load_brain(const uint16_t *from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}
INLINE void store_brain(uint16_t *to, Floats v) {
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 64;
    store(to, __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves));
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    return load<Floats>(z);
#endif
}

// Adds the lanes, in the same order on every CPU.
INLINE float total(Floats v) {
    __m256 half[2];
    memcpy(half, &v, 64);
    const __m256 eight = _mm256_add_ps(half[0], half[1]);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE float largest(Floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// e^x to about 2 units in the last place; NaN stays NaN.
INLINE Floats exponential(Floats x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    x = x > splat(88.0f) ? splat(88.0f) : x;
    const Floats magic = splat(0x1.8p23f), shifted = multiply_add(x, splat(1.44269504f), magic), n = shifted - magic;
    Floats r = multiply_add(n, splat(-0x1.62e4p-1f), x);
    r = multiply_add(n, splat(-0x1.7f7d1cp-20f), r);
    Floats p = splat(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = multiply_add(p, r, splat(c));
    const Words power = ((Words)shifted + 127) << 23;
    return p * (Floats)power;
}
INLINE Floats hyperbolic_tangent(Floats x) {
    return splat(1) - splat(2) / (exponential(x * 2) + 1);
}

// How 4 columns of 16 rows are multiplied: `Operand` is made once of the codes, `dot` adds code times x for each row.
// The sum is exact. CENTRE is what the operand subtracted from the codes, MOST the tokens that fit the registers.
#if defined(__AVX512VNNI__)

struct Operand {
    __m512i codes;
};
constexpr int CENTRE_4 = 0, CENTRE_8 = 0, MOST = 8;
INLINE Operand operand_4(Bytes codes) { return {(__m512i)codes}; }
INLINE Operand operand_8(Bytes codes) { return {(__m512i)codes}; }
INLINE void dot_4(Ints &sum, const Operand &w, const int8_t *x) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, w.codes, _mm512_set1_epi32(*(const int32_t *)x));
}
INLINE void dot_8(Ints &sum, const Operand &w, const int8_t *x) { dot_4(sum, w, x); }

#else  // AVX2

// maddubs multiplies unsigned by signed bytes and saturates at 16 bits: 4-bit codes fit, 8-bit codes fit as a sign and a
// magnitude of up to 128, because x is at least -127.
struct Operand {
    __m256i low, high;
};
constexpr int CENTRE_4 = 0, CENTRE_8 = 128, MOST = 4;
INLINE Operand operand_4(Bytes codes) {
    Operand w;
    memcpy(&w, &codes, 64);
    return w;
}
INLINE Operand operand_8(Bytes codes) { return operand_4(codes ^ (uint8_t)128); }
INLINE void add(Ints &sum, __m256i low, __m256i high) {
    const __m256i ones = _mm256_set1_epi16(1);
    low = _mm256_madd_epi16(low, ones);
    high = _mm256_madd_epi16(high, ones);
    Ints both;
    memcpy(&both, &low, 32);
    memcpy((char *)&both + 32, &high, 32);
    sum += both;
}
INLINE void dot_4(Ints &sum, const Operand &w, const int8_t *x) {
    const __m256i v = _mm256_set1_epi32(*(const int32_t *)x);
    add(sum, _mm256_maddubs_epi16(w.low, v), _mm256_maddubs_epi16(w.high, v));
}
INLINE void dot_8(Ints &sum, const Operand &w, const int8_t *x) {
    const __m256i v = _mm256_set1_epi32(*(const int32_t *)x);
    const __m256i low = _mm256_maddubs_epi16(_mm256_abs_epi8(w.low), _mm256_sign_epi8(v, w.low));
    const __m256i high = _mm256_maddubs_epi16(_mm256_abs_epi8(w.high), _mm256_sign_epi8(v, w.high));
    add(sum, low, high);
}

#endif
