// Absorbed MLA of few rows over paged latent KV: each page is read where it lies, scored, and added
// with running maxima and sums. A unit of work is one row and HEADS heads, by tiles twice as many.
// Alone, and as the middle of a whole attention layer of few rows.

#include <omp.h>

#include "rows.h"
#include "tiles.h"

namespace {

constexpr int HEADS = 8, MOST_TOKENS = 256, MOST_RANK = 1024, WORD = 2 * LANES;

// Products of R rows with each of `num` rows [num, width] that lie one after another: to[r][i], `step`
// numbers from row to row. width: a multiple of WORD.
template <int R>
void dots(const bf16* const* x, int width, const bf16* rows, int num, float* to, int64_t step) {
    constexpr int N = LANES / R;
    for (int first = 0; first < num; first += N) {
        const bf16* row[N];
        for (int n = 0; n < N; ++n) row[n] = rows + (int64_t)(first + n < num ? first + n : num - 1) * width;
        Floats sums[LANES];
        for (auto& sum : sums) sum = all(0.0f);
        for (int at = 0; at < width; at += WORD) {
            Pairs part[N];
            for (int n = 0; n < N; ++n) part[n] = pairs(row[n] + at);
            for (int r = 0; r < R; ++r) {
                const Pairs value = pairs(x[r] + at);
                for (int n = 0; n < N; ++n) sums[n * R + r] = dot(sums[n * R + r], value, part[n]);
            }
        }
        alignas(64) float made[LANES];
        store(made, sums_of(sums));
        for (int n = 0; n < N && first + n < num; ++n)
            for (int r = 0; r < R; ++r) to[r * step + first + n] = made[n * R + r];
    }
}

// made[head] = made[head] * kept[head] + the latents by their shares (bfloat16, an even number, the
// last 0 where tokens are odd). WORD latents lie in `made` as `beside` leaves them.
void gather(const bf16 (*shares)[MOST_TOKENS], const bf16* latents, int width, int tokens, int rank,
            const float* kept, float (*made)[MOST_RANK]) {
    for (int begin = 0; begin < HEADS; begin += HEADS_AT_ONCE)
        for (int at = 0; at < rank; at += WORD) {
            Floats low[HEADS_AT_ONCE], high[HEADS_AT_ONCE];
            for (int head = 0; head < HEADS_AT_ONCE; ++head) {
                const Floats factor = all(kept[begin + head]);
                low[head] = load(made[begin + head] + at) * factor;
                high[head] = load(made[begin + head] + at + LANES) * factor;
            }
            for (int token = 0; token < tokens; token += 2) {
                const bf16* row = latents + (int64_t)token * width + at;
                Pairs below, above;
                beside(row, token + 1 < tokens ? row + width : row, below, above);
                for (int head = 0; head < HEADS_AT_ONCE; ++head) {
                    const Pairs share = pair_of(shares[begin + head] + token);
                    low[head] = dot(low[head], below, share);
                    high[head] = dot(high[head], above, share);
                }
            }
            for (int head = 0; head < HEADS_AT_ONCE; ++head) {
                store(made[begin + head] + at, low[head]);
                store(made[begin + head] + at + LANES, high[head]);
            }
        }
}

// Scores to shares of `tokens`, against the new maximum; returns what earlier results count for.
float share(float* scores, int tokens, float& maximum, float& sum, bf16* to) {
    float most = maximum;
    for (int token = 0; token < tokens; ++token) most = scores[token] > most ? scores[token] : most;
    const float kept = maximum == -INFINITY ? 0.0f : std::exp(maximum - most);
    const int padded = (tokens + LANES - 1) / LANES * LANES;
    for (int token = tokens; token < padded; ++token) scores[token] = most;
    for (int token = 0; token < padded; token += LANES)
        store(scores + token, exponential(load(scores + token) - all(most)));
    for (int token = tokens; token < padded; ++token) scores[token] = 0;
    Floats total = all(0.0f);
    for (int token = 0; token < padded; token += LANES) {
        const Floats part = load(scores + token);
        total = total + part;
        store(to + token, part);
    }
    sum = sum * kept + sum_of(total);
    maximum = most;
    return kept;
}

// Tokens of some sequences in pages [any, tokens, width]; see `attention_bf16`.
struct Paged {
    const bf16* pages;
    const int32_t *row_start, *lengths, *table;
    int sequences, columns, tokens, width, rank;

    // The pages of the sequence of this row, and how many of its tokens the row sees.
    const int32_t* table_of(int row, int& seen) const {
        int sequence = 0;
        while (row_start[sequence + 1] <= row) ++sequence;
        seen = lengths[sequence] - (row_start[sequence + 1] - 1 - row);
        return table + (int64_t)sequence * columns;
    }
};

// to [heads, rank] = made / sum, in order; see `gather`.
template <class Out>
void finish(int heads, const float (*made)[MOST_RANK], const float* maximum, const float* sum, int rank, Out* to, float* lse) {
    for (int head = 0; head < heads; ++head) {
        const float factor = sum[head] > 0 ? 1 / sum[head] : 0;
        if (lse) lse[head] = sum[head] > 0 ? maximum[head] + std::log(sum[head]) : -INFINITY;
        for (int at = 0; at < rank; at += WORD) {
            float ordered[WORD];
            for (int i = 0; i < WORD; ++i) ordered[i] = made[head][at + place_of(i)] * factor;
            for (int i = 0; i < WORD; i += LANES) store(to + (int64_t)head * rank + at + i, load(ordered + i));
        }
    }
}

// Attention of HEADS heads q [HEADS, width] of row `row`; lse: null where nobody wants it.
template <class Out>
void attend(const Paged& of, int row, const bf16* q, Out* out, float* lse) {
    int seen;
    const int32_t* table = of.table_of(row, seen);
    alignas(64) float scores[HEADS][MOST_TOKENS], made[HEADS][MOST_RANK];
    alignas(64) bf16 shares[HEADS][MOST_TOKENS];
    float maximum[HEADS], sum[HEADS], kept[HEADS];
    const bf16* head_of[HEADS];
    for (int head = 0; head < HEADS; ++head) {
        head_of[head] = q + head * of.width;
        maximum[head] = -INFINITY;
        sum[head] = 0;
        std::memset(made[head], 0, of.rank * sizeof(float));
    }
    for (int begin = 0; begin < seen; begin += of.tokens) {
        const int num = seen - begin < of.tokens ? seen - begin : of.tokens;
        const bf16* page = of.pages + (int64_t)table[begin / of.tokens] * of.tokens * of.width;
        dots<HEADS>(head_of, of.width, page, num, scores[0], MOST_TOKENS);
        for (int head = 0; head < HEADS; ++head)
            kept[head] = share(scores[head], num, maximum[head], sum[head], shares[head]);
        gather(shares, page, of.width, num, of.rank, kept, made);
    }
    finish(HEADS, made, maximum, sum, of.rank, out, lse);
}

#ifdef __AMX_BF16__

constexpr int KEYS = 256;     // whose scores are kept at a time
constexpr int COLUMNS = 64;   // of latents that are summed at a time

// The same of `heads` heads, at most TILE, by tiles: scores [keys][heads], sums [heads][rank]. Rows
// behind the last token are multiplied only as keys, whose scores nobody reads.
template <class Out>
void attend_by_tiles(const Paged& of, int row, int heads, const bf16* q, Out* out, float* lse) {
    int seen;
    const int32_t* table = of.table_of(row, seen);
    alignas(64) float scores[KEYS][TILE], made[TILE][MOST_RANK], maximum[TILE], sum[TILE], kept[TILE];
    alignas(64) bf16 shares[TILE][KEYS], beside_one_another[KEYS * COLUMNS];
    alignas(64) __m512i of_pairs[KEYS / 2];
    const bf16* token[KEYS];
    bf16 *query = (bf16*)own_room(sizeof(bf16) * 2 * TILE * of.width), *all_heads = query + TILE * of.width;
    std::memset(all_heads, 0, sizeof(bf16) * TILE * of.width);
    std::memcpy(all_heads, q, sizeof(bf16) * heads * of.width);
    for (int in = 0; in < of.width; in += DEEP) {
        __m512i words[TILE];
        turn_words(all_heads + in, sizeof(bf16) * of.width, words);
        for (int i = 0; i < TILE; ++i) _mm512_storeu_si512(query + in * TILE + i * DEEP, words[i]);
    }
    for (int head = 0; head < TILE; ++head) {
        maximum[head] = -INFINITY;
        sum[head] = 0;
        std::memset(made[head], 0, of.rank * sizeof(float));
    }
    Tiles tiles;
    tiles.rows(ROWS_OF_TILES);
    for (int begin = 0; begin < seen; begin += KEYS) {
        const int num = std::min(KEYS, seen - begin), whole = (num + DEEP - 1) / DEEP * DEEP;
        for (int key = 0; key < num; ++key)
            token[key] = of.pages + ((int64_t)table[(begin + key) / of.tokens] * of.tokens + (begin + key) % of.tokens) * of.width;
        const int64_t row_bytes = sizeof(bf16) * of.width;
        for (int key = 0; key < num; key += 4 * TILE) {
            const bf16* rows[4];
            for (int i = 0; i < 4; ++i) rows[i] = token[std::min(key + i * TILE, (num - 1) / TILE * TILE)];
            clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
            for (int in = 0; in < of.width; in += DEEP) {
                load_tile<6>(query + in * TILE, 2 * DEEP);
                load_tile<4>(rows[0] + in, row_bytes);
                dot_tile<0, 4, 6>();
                load_tile<5>(rows[1] + in, row_bytes);
                dot_tile<1, 5, 6>();
                load_tile<4>(rows[2] + in, row_bytes);
                dot_tile<2, 4, 6>();
                load_tile<5>(rows[3] + in, row_bytes);
                dot_tile<3, 5, 6>();
            }
            store_tile<0>(scores[key], 4 * TILE), store_tile<1>(scores[key + TILE], 4 * TILE);
            store_tile<2>(scores[key + 2 * TILE], 4 * TILE), store_tile<3>(scores[key + 3 * TILE], 4 * TILE);
        }
        const Floats before = load(maximum);
        Floats now = before, total = all(0.0f);
        for (int key = 0; key < num; ++key) now = most(now, load(scores[key]));
        const Floats factor = exponential(before - now);
        for (int key = 0; key < whole; key += 2) {
            Floats each[2];
            for (int odd = 0; odd < 2; ++odd) {
                each[odd] = key + odd < num ? exponential(load(scores[key + odd]) - now) : all(0.0f);
                total = total + each[odd];
            }
            of_pairs[key / 2] = pairs_of(each[0], each[1]);
        }
        for (int key = 0; key < whole; key += DEEP) {
            __m512i words[TILE];
            turn_words(of_pairs + key / 2, sizeof(__m512i), words);
            for (int head = 0; head < TILE; ++head) _mm512_storeu_si512(shares[head] + key, words[head]);
        }
        store(maximum, now);
        store(sum, load(sum) * factor + total);
        store(kept, factor);
        if (begin && _mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ))
            for (int head = 0; head < heads; ++head)
                for (int at = 0; at < of.rank; at += LANES) store(made[head] + at, load(made[head] + at) * all(kept[head]));
        for (int at = 0; at < of.rank; at += COLUMNS) {
            const bool half = of.rank - at < COLUMNS;
            for (int key = 0; key < whole; key += 2)
                for (int column = 0; column < (half ? WORD : COLUMNS); column += WORD) {
                    const __m512i none = _mm512_setzero_si512();
                    const __m512i first = key < num ? _mm512_loadu_si512(token[key] + at + column) : none;
                    const __m512i second = key + 1 < num ? _mm512_loadu_si512(token[key + 1] + at + column) : none;
                    bf16* to = beside_one_another + key * COLUMNS + 2 * column;
                    _mm512_store_si512(to, _mm512_unpacklo_epi16(first, second));
                    _mm512_store_si512(to + 2 * TILE, _mm512_unpackhi_epi16(first, second));
                }
            float* sums = made[0] + at;
            constexpr int64_t SUMS = sizeof(float) * MOST_RANK, PAIRS = 2 * sizeof(bf16) * COLUMNS;
            load_tile<0>(sums, SUMS), load_tile<1>(sums + TILE, SUMS);
            if (!half) load_tile<2>(sums + 2 * TILE, SUMS), load_tile<3>(sums + 3 * TILE, SUMS);
            for (int key = 0; key < whole; key += DEEP) {
                const bf16* pair = beside_one_another + key * COLUMNS;
                load_tile<4>(shares[0] + key, sizeof(shares[0]));
                load_tile<6>(pair, PAIRS);
                dot_tile<0, 4, 6>();
                load_tile<7>(pair + 2 * TILE, PAIRS);
                dot_tile<1, 4, 7>();
                if (half) continue;
                load_tile<6>(pair + 4 * TILE, PAIRS);
                dot_tile<2, 4, 6>();
                load_tile<7>(pair + 6 * TILE, PAIRS);
                dot_tile<3, 4, 7>();
            }
            store_tile<0>(sums, SUMS), store_tile<1>(sums + TILE, SUMS);
            if (!half) store_tile<2>(sums + 2 * TILE, SUMS), store_tile<3>(sums + 3 * TILE, SUMS);
        }
    }
    finish(heads, made, maximum, sum, of.rank, out, lse);
}

#endif

// Units of work of all heads of a row.
inline int groups_of(const Paged& of, int heads) {
#ifdef __AMX_BF16__
    if (of.tokens % TILE == 0) return (heads + TILE - 1) / TILE;
#endif
    return heads / HEADS;
}

// Unit number `unit` of the rows q [rows, heads, width]; out: [rows, heads, rank], lse: [rows, heads]
// or null.
template <class Out>
void attend_unit(const Paged& of, int unit, int heads, const bf16* q, Out* out, float* lse) {
    const int groups = groups_of(of, heads), row = unit / groups;
#ifdef __AMX_BF16__
    if (of.tokens % TILE == 0) {
        const int head = unit % groups * TILE;
        const int64_t place = (int64_t)row * heads + head;
        return attend_by_tiles(of, row, std::min(TILE, heads - head), q + place * of.width, out + place * of.rank,
                               lse ? lse + place : nullptr);
    }
#endif
    const int64_t place = (int64_t)unit * HEADS;
    attend(of, row, q + place * of.width, out + place * of.rank, lse ? lse + place : nullptr);
}

// to[row] = the products of x[row], `stride` numbers apart, with weight [outs, ins] as it is; `step`
// numbers from row to row of `to`. room: [8, outs].
void product_of_head(const bf16* weight, int outs, int ins, const bf16* x, int64_t stride, int rows, bf16* to,
                     int64_t step, float* room) {
    for (int begin = 0; begin < rows; begin += 8) {
        const int num = rows - begin < 8 ? rows - begin : 8;
        const bf16* row[8];
        for (int r = 0; r < 8; ++r) row[r] = x + (begin + (r < num ? r : num - 1)) * stride;
        if (num == 1) dots<1>(row, ins, weight, outs, room, outs);
        else if (num == 2) dots<2>(row, ins, weight, outs, room, outs);
        else if (num <= 4) dots<4>(row, ins, weight, outs, room, outs);
        else dots<8>(row, ins, weight, outs, room, outs);
        for (int r = 0; r < num; ++r)
            for (int at = 0; at < outs; at += LANES)
                store(to + (begin + r) * step + at, load(room + r * outs + at));
    }
}

// A packed weight: bfloat16 where there are no factors, else FP8.
struct Packed {
    const void* values;
    const float* factors;
};

// See `each_product`.
template <class Take>
void each_product(const Packed& weight, int block, int ins, int rows, const bf16* x, const Take& take) {
    if (weight.factors) each_product(Fp8Weight{weight.values, weight.factors}, block, ins, 0, rows, x, ins, take);
    else each_product(Bf16Weight{(const bf16*)weight.values}, block, ins, 0, rows, x, ins, take);
}

}  // namespace

extern "C" {

// q: [rows, heads, width]; pages: [any, tokens, width]; row_start: [sequences + 1]; lengths: of each
// context; table: [sequences, columns]; out: [rows, heads, rank], floats if `wide`; lse:
// [rows, heads]. Row i of n of a sequence sees its first length - n + 1 + i tokens.
void attention_bf16(const bf16* q, const bf16* pages, const int32_t* row_start, const int32_t* lengths,
                    const int32_t* table, int sequences, int columns, int heads, int tokens, int width,
                    int rank, void* out, int wide, float* lse, int threads) {
    const Paged paged{pages, row_start, lengths, table, sequences, columns, tokens, width, rank};
    const int units = row_start[sequences] * groups_of(paged, heads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int unit = 0; unit < units; ++unit) {
        if (wide) attend_unit(paged, unit, heads, q, (float*)out, lse);
        else attend_unit(paged, unit, heads, q, (bf16*)out, lse);
    }
}

// The weights of one attention layer; `native/mla_layer.py` fills it. query_b: of null where queries
// are not compressed, and `query_rank` is all their width then. As they are: key_up [heads, rank, nope],
// value_up [heads, value, rank].
struct MlaLayer {
    Packed query_kv_a, query_b, output;
    const bf16 *input_norm, *query_norm, *kv_norm, *key_up, *value_up;
    double input_eps, inner_eps, scale;
    int32_t hidden, query_rank, heads, nope, rope, rank, value;
};

// Numbers of `room` that `mla_layer_bf16` needs for each row, beside those for each thread.
int64_t mla_layer_room(const MlaLayer* l) {
    return l->query_rank + l->rank + l->rope + (int64_t)l->heads * (l->nope + 2 * l->rope + 2 * l->rank + l->value);
}

// out = attention of the normed rows x [rows, hidden], whose KV is written to its places first; plus
// `add` [rows, hidden] where there is one.
void mla_layer_bf16(const MlaLayer* l, const bf16* x, const bf16* add, const float* rotation, const int64_t* places, bf16* pages,
                    int tokens, const int32_t* row_start, const int32_t* lengths, const int32_t* table,
                    int sequences, int columns, bf16* room, bf16* out, int threads) {
    const int rows = row_start[sequences], heads = l->heads, head_width = l->nope + l->rope, width = l->rank + l->rope;
    const int joined_width = l->query_rank + width, query_width = heads * head_width;
    const int normed_width = l->hidden > l->query_rank ? l->hidden : l->query_rank;
    const int attended_width = heads * l->value;
    const Paged paged{pages, row_start, lengths, table, sequences, columns, tokens, width, l->rank};
    bf16* joined = room;
    bf16* queries = joined + (int64_t)rows * joined_width;
    bf16* absorbed = queries + (int64_t)rows * query_width;
    bf16* latents = absorbed + (int64_t)rows * heads * width;
    bf16* attended = latents + (int64_t)rows * heads * l->rank;
    bf16* of_threads = attended + (int64_t)rows * attended_width;
#pragma omp parallel num_threads(threads)
    {
        // Each thread norms all rows for itself: sooner done than waiting for one another.
        bf16* normed = of_threads + (int64_t)omp_get_thread_num() * rows * normed_width;
        float made[8 * MOST_RANK];
        for (int row = 0; row < rows; ++row)
            norm(x + (int64_t)row * l->hidden, l->input_norm, l->hidden, l->input_eps, normed + (int64_t)row * l->hidden);
#pragma omp for schedule(dynamic, 1)
        for (int block = 0; block < joined_width / OUTS; ++block)
            each_product(l->query_kv_a, block, l->hidden, rows, normed, [=](int row, const float* sums) {
                store_sums(sums, nullptr, joined + (int64_t)row * joined_width + block * OUTS);
            });
        if (l->query_b.values)
            for (int row = 0; row < rows; ++row)
                norm(joined + (int64_t)row * joined_width, l->query_norm, l->query_rank, l->inner_eps, normed + (int64_t)row * l->query_rank);
        const int blocks = l->query_b.values ? query_width / OUTS : 0;
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < blocks + rows; ++unit) {
            if (unit < blocks) {
                each_product(l->query_b, unit, l->query_rank, rows, normed, [=](int row, const float* sums) {
                    store_sums(sums, nullptr, queries + (int64_t)row * query_width + unit * OUTS);
                });
                continue;
            }
            const int row = unit - blocks;
            const bf16* from = joined + (int64_t)row * joined_width;
            if (!l->query_b.values) std::memcpy(queries + (int64_t)row * query_width, from, query_width * sizeof(bf16));
            if (places[row] < 0) continue;
            bf16* to = pages + places[row] * width;
            norm(from + l->query_rank, l->kv_norm, l->rank, l->inner_eps, to);
            turn(from + l->query_rank + l->rank, rotation + (int64_t)row * l->rope, l->rope, to + l->rank);
        }
#pragma omp for schedule(dynamic, 1)
        for (int head = 0; head < heads; ++head) {
            for (int row = 0; row < rows; ++row) {
                bf16* query = queries + (int64_t)row * query_width + head * head_width;
                prepare_query(query, rotation + (int64_t)row * l->rope, (float)l->scale, l->nope, l->rope);
                std::memcpy(absorbed + ((int64_t)row * heads + head) * width + l->rank, query + l->nope, l->rope * sizeof(bf16));
            }
            product_of_head(l->key_up + (int64_t)head * l->rank * l->nope, l->rank, l->nope, queries + head * head_width,
                            query_width, rows, absorbed + (int64_t)head * width, (int64_t)heads * width, made);
        }
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < rows * groups_of(paged, heads); ++unit)
            attend_unit(paged, unit, heads, absorbed, latents, nullptr);
#pragma omp for schedule(dynamic, 1)
        for (int head = 0; head < heads; ++head)
            product_of_head(l->value_up + (int64_t)head * l->value * l->rank, l->value, l->rank, latents + (int64_t)head * l->rank,
                            (int64_t)heads * l->rank, rows, attended + (int64_t)head * l->value, attended_width, made);
#pragma omp for schedule(dynamic, 1)
        for (int block = 0; block < l->hidden / OUTS; ++block)
            each_product(l->output, block, attended_width, rows, attended, [=](int row, const float* sums) {
                const int64_t at = (int64_t)row * l->hidden + block * OUTS;
                store_sums(sums, add ? add + at : nullptr, out + at);
            });
    }
}
}
