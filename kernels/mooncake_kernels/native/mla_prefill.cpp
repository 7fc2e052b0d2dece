// Causal attention of many rows over paged latent KV, in the expanded form, by tiles: keys and values
// of a head are made from the latents, KEYS at a time, and stay in the core's cache while rows pass by.
//
// All is computed turned over: scores [keys][rows] and sums [value][rows]. So keys and values are rows
// of tiles as they are made, each lane of a vector is a row's, and what is the second operand (the
// rows, their shares of keys, the latents) is packed by whole words.

#ifdef __AMX_BF16__

#include <algorithm>
#include <cmath>

#include "amx.h"

namespace {

constexpr int KEYS = 1024;          // that are expanded at a time
constexpr int KEYS_OF_A_TURN = 128;  // whose scores are kept at a time, in the first cache
constexpr int ROWS_AT_ONCE = ROWS_OF_TILES;

struct Span {
    const bf16 *q, *latents, *packed, *key_up, *value_up;
    bf16* out;
    int rows, context, heads, rank, nope, rope, value;

    int width() const { return nope + rope; }
};

// exp(x) for x <= 0, as exact as bfloat16 needs.
inline Floats power_of_e(Floats x) {
    const Floats power = most(x * all(1.44269504f), all(-126.0f)), near = whole(power), rest = power - near;
    Floats sum = all(0.00961813f);
    for (float factor : {0.05550411f, 0.24022651f, 0.69314718f, 1.0f}) sum = plus(all(factor), sum, rest);
    return times_power(sum, near);
}

// to [num, nope + rope], bfloat16: keys of a head.
void make_keys(Tiles& tiles, const Span& of, const bf16* up, int first, int num, bf16* to) {
    const int row_width = of.rank + of.rope;
    alignas(64) float made[ROWS_OF_TILES * OUTS_OF_TILES];
    for (int key = 0; key < num; key += ROWS_OF_TILES) {
        const bf16* latent = of.latents + (int64_t)(first + key) * row_width;
        for (int out = 0; out < of.nope; out += OUTS_OF_TILES) {
            tiles.multiply(up + (int64_t)out * of.rank, 0, OUTS_OF_TILES, of.rank, ROWS_OF_TILES, latent, row_width, made);
            for (int row = 0; row < ROWS_OF_TILES; ++row)
                for (int at = 0; at < OUTS_OF_TILES; at += LANES)
                    store(to + (int64_t)(key + row) * of.width() + out + at, load(made + row * OUTS_OF_TILES + at));
        }
        for (int row = 0; row < ROWS_OF_TILES; ++row)
            std::memcpy(to + (int64_t)(key + row) * of.width() + of.nope, latent + (int64_t)row * row_width + of.rank,
                        of.rope * sizeof(bf16));
    }
}

// to [value, stride], bfloat16: values of a head, a column each key.
void make_values(Tiles& tiles, const Span& of, const bf16* up, int first, int num, bf16* to, int stride) {
    alignas(64) float made[ROWS_OF_TILES * OUTS_OF_TILES];
    for (int key = 0; key < num; key += OUTS_OF_TILES)
        for (int out = 0; out < of.value; out += ROWS_OF_TILES) {
            tiles.multiply(of.packed + (int64_t)(first + key) * of.rank, 0, OUTS_OF_TILES, of.rank, ROWS_OF_TILES,
                           up + (int64_t)out * of.rank, of.rank, made);
            for (int row = 0; row < ROWS_OF_TILES; ++row)
                for (int at = 0; at < OUTS_OF_TILES; at += LANES)
                    store(to + (int64_t)(out + row) * stride + key + at, load(made + row * OUTS_OF_TILES + at));
        }
}

// What is known of ROWS_AT_ONCE rows of a head after some keys: sums [value][rows].
struct Known {
    float *sums, *maximum, *total;
};

// Turns scores [num][ROWS_AT_ONCE] of LANES rows and of the keys from `first` on into shares in the
// order of a weight; `seen(key)`: which of the rows see it. Returns what earlier sums count for.
template <class Seen>
Floats share(const float* scores, int first, int num, float* maximum, float* total, bf16* shares, const Seen& seen) {
    Floats now = load(maximum);
    for (int key = 0; key < num; ++key) now = _mm512_mask_max_ps(now, seen(first + key), now, load(scores + key * ROWS_AT_ONCE));
    const Floats kept = power_of_e(load(maximum) - now);
    Floats sums[2] = {load(total) * kept, all(0.0f)};
    for (int key = 0; key < num; key += 2) {
        Floats each[2];
        for (int odd = 0; odd < 2; ++odd) {
            const Floats made = power_of_e(load(scores + (key + odd) * ROWS_AT_ONCE) - now);
            each[odd] = _mm512_maskz_mov_ps(seen(first + key + odd), made);
            sums[odd] = sums[odd] + each[odd];
        }
        _mm512_storeu_si512(shares + (int64_t)key * OUTS_OF_TILES, pairs_of(each[0], each[1]));
    }
    store(maximum, now);
    store(total, sums[0] + sums[1]);
    return kept;
}

// The same of all rows, at these positions, which see keys up to their own; weighs what is known of
// earlier keys against these.
void share(const float* scores, int first, int num, const int32_t* positions, int value, const Known& known, bf16* shares) {
    for (int half = 0; half < ROWS_AT_ONCE; half += LANES) {
        const __m512i position = _mm512_loadu_si512(positions + half);
        const auto up_to_own = [&](int key) { return _mm512_cmpge_epi32_mask(position, _mm512_set1_epi32(key)); };
        const auto each = [](int) { return (__mmask16)0xFFFF; };
        const Floats before = load(known.maximum + half);
        float *maximum = known.maximum + half, *total = known.total + half;
        bf16* to = shares + 2 * half;
        const bool whole = up_to_own(first + num - 1) == 0xFFFF;
        const Floats kept = whole ? share(scores + half, first, num, maximum, total, to, each)
                                  : share(scores + half, first, num, maximum, total, to, up_to_own);
        if (first && _mm512_cmp_ps_mask(before, load(maximum), _CMP_NEQ_UQ))
            for (int out = 0; out < value; ++out) {
                float* sum = known.sums + out * ROWS_AT_ONCE + half;
                store(sum, load(sum) * kept);
            }
    }
}

// out [num rows, heads * value] = sums / total, of one head.
void finish(const Known& known, int num, int value, bf16* out, int64_t stride) {
    for (int half = 0; half < num; half += LANES) {
        const Floats factor = all(1.0f) / load(known.total + half);
        for (int at = 0; at < value; at += LANES) {
            alignas(64) float scaled[LANES * LANES];
            for (int i = 0; i < LANES; ++i)
                store(scaled + i * LANES, load(known.sums + (at + i) * ROWS_AT_ONCE + half) * factor);
            __m512i turned[LANES];
            turn_words(scaled, LANES * sizeof(float), turned);
            for (int row = 0; row < LANES && half + row < num; ++row)
                store(out + (int64_t)(half + row) * stride + at, _mm512_castsi512_ps(turned[row]));
        }
    }
}

// Attention of the rows `begin` to `end` of one head.
void attend(const Span& of, int head, int begin, int end) {
    const int width = of.width(), blocks = (end - begin + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int before = of.context - of.rows, columns = KEYS + DEEP;  // so that rows of values lie in all sets of a cache
    const int known_size = (of.value + 2) * ROWS_AT_ONCE;
    const size_t floats = (size_t)KEYS_OF_A_TURN * ROWS_AT_ONCE + (size_t)blocks * known_size;
    const size_t halves = (size_t)KEYS * width + (size_t)of.value * columns + (size_t)of.rank * of.nope +
                          (size_t)ROWS_AT_ONCE * (2 * width + KEYS_OF_A_TURN);
    float* scores = (float*)own_room(4 * floats + 2 * halves);
    float* of_blocks = scores + KEYS_OF_A_TURN * ROWS_AT_ONCE;
    bf16* keys = (bf16*)(of_blocks + (int64_t)blocks * known_size);
    bf16* values = keys + (int64_t)KEYS * width;
    bf16* up = values + (int64_t)of.value * columns;
    bf16* query = up + (int64_t)of.rank * of.nope;
    bf16* padded = query + ROWS_AT_ONCE * width;
    bf16* shares = padded + ROWS_AT_ONCE * width;
    for (int block = 0; block < blocks; ++block) {
        float* known = of_blocks + (int64_t)block * known_size;
        std::fill(known + of.value * ROWS_AT_ONCE, known + (of.value + 1) * ROWS_AT_ONCE, -INFINITY);
        std::fill(known + (of.value + 1) * ROWS_AT_ONCE, known + known_size, 0.0f);
    }
    const bf16* key_up = of.key_up + (int64_t)head * of.rank * of.nope;
    for (int in = 0; in < of.rank; in += 2)  // [rank, nope] to a weight of `nope` outs
        for (int out = 0; out < of.nope; out += LANES) {
            const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(key_up + (int64_t)in * of.nope + out)));
            const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(key_up + (int64_t)(in + 1) * of.nope + out)));
            bf16* to = up + (int64_t)(out / OUTS_OF_TILES * of.rank + in) * OUTS_OF_TILES + out % OUTS_OF_TILES * 2;
            _mm512_storeu_si512(to, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
        }
    const bf16* value_up = of.value_up + (int64_t)head * of.value * of.rank;
    const int64_t row_stride = (int64_t)of.heads * width;
    const bf16* q = of.q + (int64_t)head * width;
    Tiles tiles;
    for (int chunk = 0; chunk < before + end; chunk += KEYS) {
        const int num = (std::min(KEYS, before + end - chunk) + DEEP - 1) / DEEP * DEEP;
        make_keys(tiles, of, up, chunk, num, keys);
        make_values(tiles, of, value_up, chunk, num, values, columns);
        for (int block = 0; block < blocks; ++block) {
            const int row = begin + block * ROWS_AT_ONCE, here = std::min(ROWS_AT_ONCE, end - row);
            const int seen = before + row + here;  // by the last of these rows
            if (seen <= chunk) continue;
            const bf16* from = q + row * row_stride;
            int64_t stride = row_stride;
            if (here < ROWS_AT_ONCE) {
                for (int i = 0; i < ROWS_AT_ONCE; ++i)
                    std::memcpy(padded + i * width, q + (row + std::min(i, here - 1)) * row_stride, width * sizeof(bf16));
                from = padded, stride = width;
            }
            pack_outs(from, stride, width, query);
            int32_t positions[ROWS_AT_ONCE];
            for (int i = 0; i < ROWS_AT_ONCE; ++i) positions[i] = before + row + std::min(i, here - 1);
            float* sums = of_blocks + (int64_t)block * known_size;
            const Known known{sums, sums + of.value * ROWS_AT_ONCE, sums + (of.value + 1) * ROWS_AT_ONCE};
            const int last = std::min(num, (seen - chunk + DEEP - 1) / DEEP * DEEP);
            for (int turn = 0; turn < last; turn += KEYS_OF_A_TURN) {
                const int some = std::min(KEYS_OF_A_TURN, last - turn);
                for (int key = 0; key < some; key += ROWS_OF_TILES)
                    tiles.multiply(query, 0, OUTS_OF_TILES, width, ROWS_OF_TILES, keys + (int64_t)(turn + key) * width,
                                   width, scores + key * ROWS_AT_ONCE);
                share(scores, chunk + turn, some, positions, of.value, known, shares);
                for (int out = 0; out < of.value; out += ROWS_OF_TILES) {
                    const bf16* from = values + (int64_t)out * columns + turn;
                    float* to = sums + out * ROWS_AT_ONCE;
                    if (chunk + turn) tiles.multiply<true>(shares, 0, OUTS_OF_TILES, some, ROWS_OF_TILES, from, columns, to);
                    else tiles.multiply(shares, 0, OUTS_OF_TILES, some, ROWS_OF_TILES, from, columns, to);
                }
            }
        }
    }
    for (int block = 0; block < blocks; ++block) {
        const int row = begin + block * ROWS_AT_ONCE;
        float* sums = of_blocks + (int64_t)block * known_size;
        const Known known{sums, sums + of.value * ROWS_AT_ONCE, sums + (of.value + 1) * ROWS_AT_ONCE};
        finish(known, std::min(ROWS_AT_ONCE, end - row), of.value, of.out + ((int64_t)row * of.heads + head) * of.value,
               (int64_t)of.heads * of.value);
    }
}

}  // namespace

extern "C" {

// See the reference, for one span. q: [rows, heads, nope + rope]; pages: [any, tokens, rank + rope];
// key_up: [heads, rank, nope]; value_up: [heads, value, rank]; out: [rows, heads, value]. room: for
// `context` rows of pages and of latents, filled up to whole 32. Widths are multiples of 32.
void mla_expanded_bf16(const bf16* q, const bf16* pages, const int32_t* table, int tokens, int rows, int context,
                       int heads, int rank, int nope, int rope, int value, const bf16* key_up, const bf16* value_up,
                       bf16* room, bf16* out, int threads) {
    const int width = rank + rope, padded = (context + DEEP - 1) / DEEP * DEEP;
    bf16* packed = room + (int64_t)padded * width;
    const Span span{q, room, packed, key_up, value_up, out, rows, context, heads, rank, nope, rope, value};
    const int parts = std::min((rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, std::max(1, 2 * threads / heads));
    const int each = ((rows + parts - 1) / parts + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int first = 0; first < padded; first += OUTS_OF_TILES) {
            for (int key = first; key < first + OUTS_OF_TILES; ++key) {
                bf16* to = room + (int64_t)key * width;
                if (key < context)
                    std::memcpy(to, pages + ((int64_t)table[key / tokens] * tokens + key % tokens) * width, width * sizeof(bf16));
                else
                    std::memset(to, 0, width * sizeof(bf16));
            }
            pack_outs(room + (int64_t)first * width, width, rank, packed + (int64_t)first * rank);
        }
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < heads * parts; ++unit) {
            const int begin = unit / heads * each, end = std::min(begin + each, rows);
            if (begin < end) attend(span, unit % heads, begin, end);
        }
    }
}
}

#endif
