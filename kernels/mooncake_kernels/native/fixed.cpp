// Products, gates and attention whose every number is summed in one order, whatever else is computed
// beside it and by however many threads: along the ins by lanes, the lanes at the end. Which rows and
// outs share a tile changes nothing, so neither a batch nor a cut between ranks does.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "rows.h"

namespace {

constexpr int OUTS = 4, ROWS_OF_TILE = LANES / OUTS;  // a tile's sums are as many as lanes
constexpr int BLOCK = 64;                             // rows and outs of a unit of work: both stay in the cache
constexpr int HEADS = 8;

inline Floats widened(const float* x) { return load(x); }
inline Floats widened(const bf16* x) { return wide(x); }

// The next `num` numbers, or as many as a vector has; zeros after them.
template <class T>
inline Floats some(const T* x, int num) {
    if (num >= LANES) return widened(x);
    alignas(64) T padded[LANES] = {};
    std::memcpy(padded, x, num * sizeof(T));
    return widened(padded);
}

// Returns the products of ROWS_OF_TILE rows of x with OUTS rows of a weight, row by row.
template <class T>
inline Floats tile(const float* const* x, const T* const* weight, int ins) {
    Floats sums[LANES];
    for (auto& sum : sums) sum = all(0.0f);
    for (int at = 0; at < ins; at += LANES) {
        Floats part[OUTS];
        for (int out = 0; out < OUTS; ++out) part[out] = some(weight[out] + at, ins - at);
        for (int row = 0; row < ROWS_OF_TILE; ++row) {
            const Floats value = some(x[row] + at, ins - at);
            for (int out = 0; out < OUTS; ++out) sums[row * OUTS + out] = plus(sums[row * OUTS + out], value, part[out]);
        }
    }
    return sums_of(sums);
}

// to[row * step + out] = x[row] . weight[out]; both lie `stride` numbers apart.
template <class T>
void products(const float* x, int rows, int64_t x_stride, const T* weight, int outs, int64_t stride, int ins,
              float* to, int64_t step) {
    for (int out = 0; out < outs; out += OUTS) {
        const T* of[OUTS];
        for (int i = 0; i < OUTS; ++i) of[i] = weight + std::min(out + i, outs - 1) * stride;
        for (int row = 0; row < rows; row += ROWS_OF_TILE) {
            const float* from[ROWS_OF_TILE];
            for (int i = 0; i < ROWS_OF_TILE; ++i) from[i] = x + std::min(row + i, rows - 1) * x_stride;
            alignas(64) float made[LANES];
            store(made, tile(from, of, ins));
            for (int i = 0; i < ROWS_OF_TILE && row + i < rows; ++i)
                for (int j = 0; j < OUTS && out + j < outs; ++j) to[(row + i) * step + out + j] = made[i * OUTS + j];
        }
    }
}

template <class T>
void product(const float* x, int rows, const T* weight, int outs, int ins, int slabs, int num, float* to, int threads) {
    const int row_blocks = (rows + BLOCK - 1) / BLOCK, out_blocks = (outs + BLOCK - 1) / BLOCK, width = ins / slabs;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int unit = 0; unit < num * row_blocks * out_blocks; ++unit) {
        const int which = unit / (row_blocks * out_blocks);
        const int row = unit / out_blocks % row_blocks * BLOCK, out = unit % out_blocks * BLOCK;
        for (int slab = 0; slab < slabs; ++slab)
            products(x + ((int64_t)which * rows + row) * ins + slab * width, std::min(BLOCK, rows - row), ins,
                     weight + ((int64_t)which * outs + out) * ins + slab * width, std::min(BLOCK, outs - out), ins,
                     width, to + (((int64_t)which * slabs + slab) * rows + row) * outs + out, outs);
    }
}

// Attention of up to HEADS heads of a row that sees `seen` tokens; scores: room for [HEADS, seen].
template <class T>
void attend(const float* q, int heads, const T* pages, const int32_t* table, int tokens, int width, int rank,
            int seen, float* scores, float* out) {
    for (int begin = 0; begin < seen; begin += tokens)
        products(q, heads, width, pages + (int64_t)table[begin / tokens] * tokens * width,
                 std::min(tokens, seen - begin), width, width, scores + begin, seen);
    float factor[HEADS];
    for (int head = 0; head < heads; ++head) {
        float* mine = scores + (int64_t)head * seen;
        float most = -INFINITY;
        for (int i = 0; i < seen; ++i) most = mine[i] > most ? mine[i] : most;
        Floats total = all(0.0f);
        for (int at = 0; at < seen; at += LANES) {
            const int num = std::min(LANES, seen - at);
            alignas(64) float shares[LANES];
            store(shares, exponential(some(mine + at, num) - all(most)));
            for (int i = num; i < LANES; ++i) shares[i] = 0;
            std::memcpy(mine + at, shares, num * sizeof(float));
            total = total + load(shares);
        }
        factor[head] = 1 / sum_of(total);
    }
    for (int at = 0; at < rank; at += LANES) {
        const int num = std::min(LANES, rank - at);
        Floats sums[HEADS];
        for (auto& sum : sums) sum = all(0.0f);
        for (int begin = 0; begin < seen; begin += tokens) {
            const T* page = pages + (int64_t)table[begin / tokens] * tokens * width + at;
            const int end = std::min(tokens, seen - begin);
            for (int i = 0; i < end; ++i) {
                const Floats part = some(page + (int64_t)i * width, num);
                for (int head = 0; head < heads; ++head)
                    sums[head] = plus(sums[head], all(scores[(int64_t)head * seen + begin + i]), part);
            }
        }
        for (int head = 0; head < heads; ++head) {
            alignas(64) float made[LANES];
            store(made, sums[head] * all(factor[head]));
            std::memcpy(out + (int64_t)head * rank + at, made, num * sizeof(float));
        }
    }
}

template <class T>
void attention(const float* q, const T* pages, const int32_t* row_start, const int32_t* lengths, const int32_t* table,
               int sequences, int columns, int heads, int tokens, int width, int rank, float* out, int threads) {
    const int groups = (heads + HEADS - 1) / HEADS, rows = row_start[sequences];
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scores;
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < rows * groups; ++unit) {
            const int row = unit / groups, head = unit % groups * HEADS, num = std::min(HEADS, heads - head);
            int sequence = 0;
            while (row_start[sequence + 1] <= row) ++sequence;
            const int seen = lengths[sequence] - (row_start[sequence + 1] - 1 - row);
            const int64_t place = (int64_t)row * heads + head;
            scores.resize(std::max<size_t>(scores.size(), (size_t)HEADS * seen));
            attend(q + place * width, num, pages, table + (int64_t)sequence * columns, tokens, width, rank, seen,
                   scores.data(), out + place * rank);
        }
    }
}

inline Floats sigmoid(Floats x) { return all(1.0f) / (all(1.0f) + exponential(all(0.0f) - x)); }

}  // namespace

extern "C" {

// x: [num, rows, ins]; weight: [num, outs, ins], bfloat16 if `half`, else floats; to: [num, slabs, rows,
// outs], of each slab of ins its own sums.
void fixed_product(const float* x, int rows, const void* weight, int half, int outs, int ins, int slabs, int num,
                   float* to, int threads) {
    if (half) product(x, rows, (const bf16*)weight, outs, ins, slabs, num, to, threads);
    else product(x, rows, (const float*)weight, outs, ins, slabs, num, to, threads);
}

// See `attention_bf16`; pages: bfloat16 if `half`, else floats; every context has tokens.
void fixed_attention(const float* q, const void* pages, int half, const int32_t* row_start, const int32_t* lengths,
                     const int32_t* table, int sequences, int columns, int heads, int tokens, int width, int rank,
                     float* out, int threads) {
    if (half)
        attention(q, (const bf16*)pages, row_start, lengths, table, sequences, columns, heads, tokens, width, rank, out, threads);
    else
        attention(q, (const float*)pages, row_start, lengths, table, sequences, columns, heads, tokens, width, rank, out, threads);
}

// to = sigmoid(x) * by, or sigmoid(x) where `by` is null; `num` numbers.
void fixed_sigmoid(const float* x, const float* by, int64_t num, float* to) {
    for (int64_t at = 0; at < num; at += LANES) {
        const int left = (int)std::min<int64_t>(LANES, num - at);
        alignas(64) float made[LANES];
        const Floats share = sigmoid(some(x + at, left));
        store(made, by ? share * some(by + at, left) : share);
        std::memcpy(to + at, made, left * sizeof(float));
    }
}
}
