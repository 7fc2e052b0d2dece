// Products of few rows with a packed weight: reads it once, at the speed of memory.
//
// A weight [out, in] lies in blocks of 64 outs x 32 ins, each as [16 pairs of ins][64 outs][2]: what
// one instruction multiplies (AVX512_BF16). In bfloat16 that is oneDNN's own order for packed linear
// layers, so both work on one copy. INT4: a pair is one byte, the even in in the low half, codes are
// value + 8, and each block has 64 scales.

#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int AHEAD = 4096;  // bytes of a weight that are asked for before they are multiplied
constexpr int OUTS = 64, INS = 32, PAIRS = 16, ROWS = 6;
constexpr int LANES = 16, PARTS = OUTS / LANES;
using bf16 = uint16_t;

inline __m512bh pair_of(const bf16* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

inline __m512 wide(const bf16* x) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(low, 16));
}

struct Bf16Weight {
    const bf16* values;

    // Adds the products of R rows with block `block` of outs to sums[R][PARTS].
    template <int R>
    void multiply(int block, int ins, const bf16* const* x, __m512 sums[][PARTS]) const {
        const bf16* w = values + (int64_t)block * OUTS * ins;
        __m512 inner[R][PARTS];  // not `sums` itself: these stay in registers
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < PARTS; ++p) inner[r][p] = sums[r][p];
        for (int pair = 0; pair < ins / 2; ++pair, w += 2 * OUTS) {
            __m512bh part[PARTS];
            for (int p = 0; p < PARTS; ++p) {
                _mm_prefetch((const char*)(w + p * 2 * LANES) + AHEAD, _MM_HINT_T0);
                part[p] = (__m512bh)_mm512_loadu_si512(w + p * 2 * LANES);
            }
            for (int r = 0; r < R; ++r) {
                __m512bh both = pair_of(x[r] + 2 * pair);
                for (int p = 0; p < PARTS; ++p)
                    inner[r][p] = _mm512_dpbf16_ps(inner[r][p], part[p], both);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < PARTS; ++p) sums[r][p] = inner[r][p];
    }
};

struct Int4Weight {
    const uint8_t* codes;
    const bf16* scales;

    template <int R>
    void multiply(int block, int ins, const bf16* const* x, __m512 sums[][PARTS]) const {
        alignas(64) static const bf16 numbers[32] = {
            0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,  // -8 to -1
            0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,  // 0 to 7
        };
        const __m512i table = _mm512_load_si512(numbers), half = _mm512_set1_epi32(0x000F000F);
        const int groups = ins / INS;
        const uint8_t* c = codes + (int64_t)block * OUTS * ins / 2;
        const bf16* s = scales + (int64_t)block * OUTS * groups;
        for (int group = 0; group < groups; ++group, s += OUTS) {
            __m512 inner[R][PARTS];
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < PARTS; ++p) inner[r][p] = _mm512_setzero_ps();
            for (int pair = 0; pair < PAIRS; ++pair, c += OUTS) {
                __m512bh part[PARTS];
                for (int p = 0; p < PARTS; ++p) {
                    if (p == 0) _mm_prefetch((const char*)c + AHEAD, _MM_HINT_T0);
                    __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(c + p * LANES)));
                    __m512i codes_of = _mm512_and_si512(_mm512_or_si512(byte, _mm512_slli_epi32(byte, 12)), half);
                    part[p] = (__m512bh)_mm512_permutexvar_epi16(codes_of, table);
                }
                for (int r = 0; r < R; ++r) {
                    __m512bh both = pair_of(x[r] + group * INS + 2 * pair);
                    for (int p = 0; p < PARTS; ++p)
                        inner[r][p] = _mm512_dpbf16_ps(inner[r][p], part[p], both);
                }
            }
            for (int p = 0; p < PARTS; ++p) {
                __m512 scale = wide(s + p * LANES);
                for (int r = 0; r < R; ++r) sums[r][p] = _mm512_fmadd_ps(inner[r][p], scale, sums[r][p]);
            }
        }
    }
};

// The products of `num` rows, at most ROWS, with one block of outs, as floats [num][OUTS].
template <class Weight>
void products(const Weight& weight, int block, int ins, int num, const bf16* const* x, float* out) {
    __m512 sums[ROWS][PARTS];
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    switch (num) {
        case 1: weight.template multiply<1>(block, ins, x, sums); break;
        case 2: weight.template multiply<2>(block, ins, x, sums); break;
        case 3: weight.template multiply<3>(block, ins, x, sums); break;
        case 4: weight.template multiply<4>(block, ins, x, sums); break;
        case 5: weight.template multiply<5>(block, ins, x, sums); break;
        default: weight.template multiply<ROWS>(block, ins, x, sums);
    }
    for (int r = 0; r < num; ++r)
        for (int p = 0; p < PARTS; ++p) _mm512_storeu_ps(out + r * OUTS + p * LANES, sums[r][p]);
}

inline __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, whole);
}

inline void store(bf16* to, __m512 x) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
}

}  // namespace
