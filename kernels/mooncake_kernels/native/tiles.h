// Products of rows with a packed weight. Few rows read it once, at the speed of memory; of many, a
// panel at a time is decoded into the cache and multiplied with all of them.
//
// A weight [out, in] lies in blocks of OUTS outs; in each, pairs of ins follow one another, OUTS of
// a pair together. bfloat16: [pairs][TOGETHER][2], for each TOGETHER of the outs: oneDNN's own order
// for packed linear layers on CPUs with AVX-512 (blocks of 64) and with AMX (of 32), so both work on
// one copy. Quantized: as `place` says, so that few instructions unpack a vector; codes are
// multiplied as they are (bfloat16 has each of their values), and the sums of a group of ins with
// the group's scale.

#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "lanes.h"

namespace {

constexpr int AHEAD = 4096;  // bytes of a weight that are asked for before they are multiplied
constexpr int OUTS = LANES * PARTS;
#ifdef __AMX_BF16__
constexpr int TOGETHER = OUTS_OF_TILES;
#else
constexpr int TOGETHER = OUTS;
#endif
constexpr int PANEL = 512;    // ins that are decoded at a time: 64 KiB
constexpr int MANY = 96;      // rows that are multiplied with a decoded panel

inline void ask(const void* place) { _mm_prefetch((const char*)place + AHEAD, _MM_HINT_T0); }

struct Bf16Block {
    static constexpr int GROUP = 0;  // no scales
    const bf16* values;
    int64_t next;  // numbers from TOGETHER outs to the next

    void pair(int pair, Pairs* part) const {
        for (int p = 0; p < PARTS; ++p) {
            const int out = p * LANES;
            const bf16* w = values + out / TOGETHER * next + ((int64_t)pair * TOGETHER + out % TOGETHER) * 2;
            ask(w);
            part[p] = pairs(w);
        }
    }
};

struct Bf16Weight {
    const bf16* values;

    Bf16Block at(int block, int ins) const { return {values + (int64_t)block * OUTS * ins, (int64_t)TOGETHER * ins}; }
};

// A nibble of Word w of a pair is the code (value + 8) of lane w / 2 and in w % 2, a part a nibble.
struct Int4Block {
    static constexpr int GROUP = 32;
    using Word = std::conditional_t<PARTS == 4, uint16_t, uint8_t>;
    const Word* codes;
    const bf16* scales;  // [groups][OUTS]

    static void place(int out, int odd, int& word, int& shift) {
        word = out % LANES * 2 + odd;
        shift = out / LANES * 4;
    }

    void pair(int pair, Pairs* part) const {
        const Word* c = codes + (int64_t)pair * 2 * LANES;
        ask(c);
#ifdef __AVX512BF16__
        // The table twice: of a word's five lowest bits the fifth is the next nibble's.
        alignas(64) static const bf16 numbers[32] = {
            0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
            0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
            0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
        };
        const __m512i table = _mm512_load_si512(numbers), words = _mm512_loadu_si512(c);
        part[0] = (Pairs)_mm512_permutexvar_epi16(words, table);
        part[1] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
        part[2] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
        part[3] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
#else
        // Bits of 2^23 + code make a float of it.
        const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)c));
        const __m256i low = _mm256_set1_epi32(15), bits = _mm256_set1_epi32(0x4B000000);
        for (int p = 0; p < PARTS; ++p) {
            const __m256i first = _mm256_and_si256(_mm256_srli_epi32(words, 4 * p), low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi32(words, 16 + 4 * p), low);
            part[p].first = _mm256_castsi256_ps(_mm256_or_si256(first, bits)) - all(8388616.0f);
            part[p].second = _mm256_castsi256_ps(_mm256_or_si256(second, bits)) - all(8388616.0f);
        }
#endif
    }

    Floats scale(int group, int part) const { return wide(scales + (int64_t)group * OUTS + part * LANES); }
};

struct Int4Weight {
    const void* codes;
    const bf16* scales;

    Int4Block at(int block, int ins) const {
        return {(const Int4Block::Word*)codes + (int64_t)block * LANES * ins, scales + (int64_t)block * OUTS * (ins / Int4Block::GROUP)};
    }
};

struct Fp8Block {
    static constexpr int GROUP = 128;
    const uint8_t* codes;  // e4m3
    const float* factors;  // [groups]

#ifdef __AVX512BF16__
    // Two parts a vector, their fours of lanes in turn: as unpacking bytes leaves them.
    static int place(int out, int odd) {
        const int part = out / LANES, lane = out % LANES;
        return part / 2 * 64 + lane / 4 * 16 + part % 2 * 8 + lane % 4 * 2 + odd;
    }

    struct Tables {  // both bytes of the bfloat16 of each code without its sign
        alignas(64) uint8_t low[128], high[128];

        Tables() {
            for (int code = 0; code < 128; ++code) {
                const int exponent = code >> 3, mantissa = code & 7;
                float number = exponent ? (8 + mantissa) / 8.0f : mantissa / 8.0f;
                for (int i = exponent ? exponent : 1; i < 7; ++i) number /= 2;
                for (int i = 7; i < exponent; ++i) number *= 2;
                uint32_t bits;
                std::memcpy(&bits, &number, sizeof bits);
                if (code == 127) bits = 0x7FC00000;
                low[code] = bits >> 16;
                high[code] = bits >> 24;
            }
        }
    };

    void pair(int pair, Pairs* part) const {
        static const Tables tables;
        const uint8_t* c = codes + (int64_t)pair * 2 * OUTS;
        const __m512i low = _mm512_load_si512(tables.low), low_end = _mm512_load_si512(tables.low + 64);
        const __m512i high = _mm512_load_si512(tables.high), high_end = _mm512_load_si512(tables.high + 64);
        for (int p = 0; p < PARTS; p += 2, c += 64) {
            ask(c);
            const __m512i code = _mm512_loadu_si512(c);
            const __m512i below = _mm512_permutex2var_epi8(low, code, low_end);
            const __m512i above = _mm512_permutex2var_epi8(high, code, high_end);
            // above | code & 0x80
            const __m512i signs = _mm512_ternarylogic_epi32(above, code, _mm512_set1_epi8((char)0x80), 0xF8);
            part[p] = (Pairs)_mm512_unpacklo_epi8(below, signs);
            part[p + 1] = (Pairs)_mm512_unpackhi_epi8(below, signs);
        }
    }
#else
    static int place(int out, int odd) { return out / LANES * 2 * LANES + odd * LANES + out % LANES; }

    void pair(int pair, Pairs* part) const {
        const uint8_t* c = codes + (int64_t)pair * 2 * OUTS;
        ask(c);
        for (int p = 0; p < PARTS; ++p, c += 2 * LANES) {
            // A half of the same bits is 2^8 times smaller.
            const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)c));
            const __m256i number = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(0x3F80));
            const __m256i half = _mm256_or_si256(number, _mm256_and_si256(code, _mm256_set1_epi16((short)0x8000)));
            part[p].first = _mm256_cvtph_ps(_mm256_castsi256_si128(half)) * all(256.0f);
            part[p].second = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * all(256.0f);
        }
    }
#endif

    Floats scale(int group, int) const { return all(factors[group]); }
};

struct Fp8Weight {
    const void* codes;
    const float* factors;

    Fp8Block at(int block, int ins) const {
        const int groups = (ins + Fp8Block::GROUP - 1) / Fp8Block::GROUP;
        return {(const uint8_t*)codes + (int64_t)block * OUTS * ins, factors + (int64_t)block * groups};
    }
};

// Ins of a block from `first` on, decoded.
template <class Block>
struct Panel {
    static constexpr int GROUP = Block::GROUP;
    const bf16* values;
    int first;
    const Block& from;

    void pair(int pair, Pairs* part) const {
        const bf16* w = values + (int64_t)(pair - first / 2) * 2 * OUTS;
        for (int p = 0; p < PARTS; ++p) part[p] = pairs(w + p * 2 * LANES);
    }
    Floats scale(int group, int part) const { return from.scale(group, part); }
};

// Adds the products of R rows with ins `begin` to `end` of a block to out [R][OUTS].
template <int R, class Block>
void multiply(const Block& block, int begin, int end, const bf16* const* x, float* out) {
    const int group = Block::GROUP ? Block::GROUP : end - begin;
    for (int at = begin; at < end; at += group) {
        Floats sums[R][PARTS];  // these stay in registers
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < PARTS; ++p) sums[r][p] = all(0.0f);
        const int stop = std::min(at + group, end) / 2;
        for (int pair = at / 2; pair < stop; ++pair) {
            Pairs part[PARTS];
            block.pair(pair, part);
            for (int r = 0; r < R; ++r) {
                const Pairs both = pair_of(x[r] + 2 * pair);
                for (int p = 0; p < PARTS; ++p) sums[r][p] = dot(sums[r][p], part[p], both);
            }
        }
        for (int p = 0; p < PARTS; ++p) {
            Floats scale = all(1.0f);
            if constexpr (Block::GROUP) scale = block.scale(at / group, p);
            for (int r = 0; r < R; ++r) {
                float* to = out + r * OUTS + p * LANES;
                store(to, sums[r][p] * scale + load(to));
            }
        }
    }
}

template <class Block>
void multiply_rows(const Block& block, int begin, int end, int num, const bf16* const* x, float* out) {
    switch (num) {
        case 1: return multiply<1>(block, begin, end, x, out);
        case 2: return multiply<2>(block, begin, end, x, out);
        case 3: return multiply<3>(block, begin, end, x, out);
        case 4: return multiply<4>(block, begin, end, x, out);
        case 5: return multiply<std::min(5, ROWS)>(block, begin, end, x, out);
        default: return multiply<ROWS>(block, begin, end, x, out);
    }
}

// The products of `num` rows, at most MANY, with one block of outs: out [num][OUTS].
template <class Weight>
void products(const Weight& weight, int block, int ins, int num, const bf16* const* x, float* out) {
    const auto here = weight.at(block, ins);
    std::memset(out, 0, (size_t)num * OUTS * sizeof(float));
    if (num <= ROWS) return multiply_rows(here, 0, ins, num, x, out);
    for (int begin = 0; begin < ins; begin += PANEL) {
        const int end = std::min(begin + PANEL, ins);
        const auto rows = [&](const auto& panel) {
            for (int r = 0; r < num; r += ROWS)
                multiply_rows(panel, begin, end, std::min(ROWS, num - r), x + r, out + r * OUTS);
        };
        if constexpr (std::is_same_v<Weight, Bf16Weight>) {
            rows(here);
        } else {
            alignas(64) bf16 values[PANEL * OUTS];
            for (int pair = begin / 2; pair < end / 2; ++pair) {
                Pairs part[PARTS];
                here.pair(pair, part);
                for (int p = 0; p < PARTS; ++p)
                    store(values + (int64_t)(pair - begin / 2) * 2 * OUTS + p * 2 * LANES, part[p]);
            }
            rows(Panel<std::decay_t<decltype(here)>>{values, begin, here});
        }
    }
}

// Stores OUTS sums as bfloat16, `add` (or nothing) added before they are rounded.
inline void store_sums(const float* sums, const bf16* add, bf16* to) {
    for (int i = 0; i < OUTS; i += LANES) {
        const Floats sum = load(sums + i);
        store(to + i, add ? sum + wide(add + i) : sum);
    }
}

// Whether tiles multiply `rows` rows, and then any number of them at once.
constexpr bool by_tiles(int rows) {
#ifdef __AMX_BF16__
    return rows > ROWS;
#else
    return false;
#endif
}

#ifdef __AMX_BF16__

// A block as tiles multiply it: as it is, or decoded to `room` (OUTS * ins numbers), each number
// times its scale and rounded once.
inline Bf16Block decoded(const Bf16Block& block, int, bf16*) { return block; }

template <class Block>
Bf16Block decoded(const Block& block, int ins, bf16* room) {
    const Bf16Block made{room, (int64_t)TOGETHER * ins};
    for (int begin = 0; begin < ins; begin += Block::GROUP) {
        Floats scales[PARTS];
        for (int p = 0; p < PARTS; ++p) scales[p] = block.scale(begin / Block::GROUP, p);
        const int end = std::min(begin + Block::GROUP, ins);
        for (int pair = begin / 2; pair < end / 2; ++pair) {
            Pairs part[PARTS];
            block.pair(pair, part);
            for (int p = 0; p < PARTS; ++p) {
                const int out = p * LANES;
                bf16* to = room + out / TOGETHER * made.next + ((int64_t)pair * TOGETHER + out % TOGETHER) * 2;
                _mm512_storeu_si512(to, pairs_of(even(part[p]) * scales[p], odd(part[p]) * scales[p]));
            }
        }
    }
    return made;
}

#endif

// How many rows of so many bytes a core keeps while weights pass by them: a multiple of 32.
inline int rows_in_cache(int64_t bytes) { return (int)std::min(std::max((1 << 20) / bytes / 32, (int64_t)2), (int64_t)16) * 32; }

// Calls take(row, its OUTS products) for rows `begin` to `end`, at most MANY without tiles, of x and
// one block of outs; `stride` numbers from row to row.
template <class Weight, class Take>
void each_product(const Weight& weight, int block, int ins, int begin, int end, const bf16* x, int64_t stride,
                  const Take& take) {
#ifdef __AMX_BF16__
    if (by_tiles(end - begin)) {
        const bool is_decoded = std::is_same_v<Weight, Bf16Weight>;
        bf16* room = is_decoded ? nullptr : (bf16*)own_room<Room::WEIGHT>(sizeof(bf16) * OUTS * ins);
        const Bf16Block here = decoded(weight.at(block, ins), ins, room);
        alignas(64) float made[ROWS_OF_TILES * OUTS];
        Tiles tiles;
        for (int first = begin; first < end; first += ROWS_OF_TILES) {
            const int num = std::min(ROWS_OF_TILES, end - first);
            tiles.multiply(here.values, here.next, OUTS, ins, num, x + first * stride, stride, made);
            for (int r = 0; r < num; ++r) take(first + r, made + r * OUTS);
        }
        return;
    }
#endif
    alignas(64) float made[MANY * OUTS];
    const bf16* row[MANY];
    for (int r = begin; r < end; ++r) row[r - begin] = x + r * stride;
    products(weight, block, ins, end - begin, row, made);
    for (int r = begin; r < end; ++r) take(r, made + (r - begin) * OUTS);
}

}  // namespace
