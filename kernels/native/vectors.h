// Vectors of 16 floats or integers, one lane for each row of a tile. The compiler splits them to the width of the CPU.
// Only the integer dot product and the conversion of float16 need instructions by name.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

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
INLINE uint16_t to_brain(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);  // NaN stays NaN
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
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
