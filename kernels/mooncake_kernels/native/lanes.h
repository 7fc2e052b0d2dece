// Vectors of what the CPU has, under one set of names: AVX-512 with bfloat16, or AVX2 with FMA and
// F16C. `Pairs` are two neighbouring ins of each of LANES outs, as one `dot` multiplies them.

#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

using bf16 = uint16_t;

inline int32_t both_of(const bf16* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return both;
}

#ifdef __AVX512BF16__

constexpr int LANES = 16, PARTS = 4, ROWS = 6, HEADS_AT_ONCE = 8;
using Floats = __m512;
using Pairs = __m512bh;

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(bf16* to, Floats x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }
inline Floats wide(const bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}
inline Pairs pairs(const bf16* x) { return (Pairs)_mm512_loadu_si512(x); }
inline void store(bf16* to, Pairs x) { _mm512_storeu_si512(to, (__m512i)x); }
inline Pairs pair_of(const bf16* x) { return (Pairs)_mm512_set1_epi32(both_of(x)); }
inline Floats dot(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
inline Floats even(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)x, 16)); }
inline Floats odd(Pairs x) { return _mm512_castsi512_ps(_mm512_and_si512((__m512i)x, _mm512_set1_epi32(0xFFFF0000))); }
inline Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats most(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats whole(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }
inline Floats plus(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }

// Pairs of a[i] and b[i], 2 * LANES of them, as unpacking leaves them: the i-th is the `place_of(i)`-th.
inline void beside(const bf16* a, const bf16* b, Pairs& low, Pairs& high) {
    const __m512i first = _mm512_loadu_si512(a), second = _mm512_loadu_si512(b);
    low = (Pairs)_mm512_unpacklo_epi16(first, second);
    high = (Pairs)_mm512_unpackhi_epi16(first, second);
}
inline int place_of(int i) { return i % 8 / 4 * LANES + i / 8 * 4 + i % 4; }

// The sums of LANES vectors, in their order; all are added alike.
inline Floats sums_of(const Floats* a) {
    Floats b[8], c[4], d[2];
    for (int i = 0; i < 8; ++i)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; ++i)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x44), _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xDD));
}

#else

constexpr int LANES = 8, PARTS = 2, ROWS = 4, HEADS_AT_ONCE = 4;
using Floats = __m256;
struct Pairs {
    Floats first, second;
};

inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline void store(bf16* to, Floats x) {
    const __m256i bits = _mm256_castps_si256(x), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i made = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FC00000), nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(made, made), 0x88);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(packed));
}
inline Floats wide(const bf16* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16));
}
inline Pairs split(__m256i x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xFFFF0000)))};
}
inline Pairs pairs(const bf16* x) { return split(_mm256_loadu_si256((const __m256i*)x)); }
inline void store(bf16* to, Pairs x) {  // of numbers that bfloat16 has
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(x.first), 16);
    _mm256_storeu_si256((__m256i*)to, _mm256_or_si256(low, _mm256_castps_si256(x.second)));
}
inline Pairs pair_of(const bf16* x) { return split(_mm256_set1_epi32(both_of(x))); }
inline Floats dot(Floats sum, Pairs a, Pairs b) {
    return _mm256_fmadd_ps(a.second, b.second, _mm256_fmadd_ps(a.first, b.first, sum));
}
inline Floats even(Pairs x) { return x.first; }
inline Floats odd(Pairs x) { return x.second; }
inline Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats most(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats whole(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats x, Floats exponent) {
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
    return x * _mm256_castsi256_ps(power);
}
inline Floats plus(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }

inline void beside(const bf16* a, const bf16* b, Pairs& low, Pairs& high) {
    low = {wide(a), wide(b)};
    high = {wide(a + LANES), wide(b + LANES)};
}
inline int place_of(int i) { return i; }

inline Floats sums_of(const Floats* a) {
    Floats b[2];
    for (int i = 0; i < 2; ++i)
        b[i] = _mm256_hadd_ps(_mm256_hadd_ps(a[4 * i], a[4 * i + 1]), _mm256_hadd_ps(a[4 * i + 2], a[4 * i + 3]));
    return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

#endif

inline Floats exponential(Floats x) {
    x = least(most(x, all(-87.0f)), all(88.0f));
    const Floats power = whole(x * all(1.44269504f));
    const Floats rest = x - power * all(0.693359375f) + power * all(2.12194440e-4f);
    Floats sum = all(1.0f / 720);
    for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + all(factor);
    return times_power(sum, power);
}

}  // namespace
