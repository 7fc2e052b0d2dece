// Linear layers on packed weights, and the orders that weights are packed in.

#include "tiles.h"

namespace {

// Calls take(row, block, products) for all rows and blocks.
template <class Weight, class Take>
void linear(const bf16* x, int64_t stride, int rows, int outs, int ins, const Weight& weight, int threads,
            const Take& take) {
    const int piece = by_tiles(rows) ? rows_in_cache(2 * ins) : MANY;
    const int blocks = outs / OUTS, pieces = (rows + piece - 1) / piece;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int unit = 0; unit < blocks * pieces; ++unit) {
        const int block = unit % blocks, begin = unit / blocks * piece, end = std::min(begin + piece, rows);
        each_product(weight, block, ins, begin, end, x, stride, [&](int row, const float* sums) { take(row, block, sums); });
    }
}

}  // namespace

extern "C" {

int outs_of_a_block() { return OUTS; }
int outs_together() { return TOGETHER; }

// x: [rows, ins], `stride` numbers from row to row; out: [rows, outs], float32 where `widened`, else
// bfloat16 with `add` [rows, outs] (or nothing) added before rounding.
void linear_bf16(const bf16* x, int64_t stride, int rows, int outs, int ins, const bf16* values, const bf16* add,
                 void* out, int widened, int threads) {
    linear(x, stride, rows, outs, ins, Bf16Weight{values}, threads, [=](int row, int block, const float* sums) {
        const int64_t at = (int64_t)row * outs + block * OUTS;
        if (widened) std::memcpy((float*)out + at, sums, OUTS * sizeof(float));
        else store_sums(sums, add ? add + at : nullptr, (bf16*)out + at);
    });
}

// x: [rows, ins]; add (or nothing) and out: [rows, outs].
void linear_fp8(const bf16* x, int rows, int outs, int ins, const void* codes, const float* factors,
                const bf16* add, bf16* out, int threads) {
    linear(x, ins, rows, outs, ins, Fp8Weight{codes, factors}, threads, [=](int row, int block, const float* sums) {
        const int64_t at = (int64_t)row * outs + block * OUTS;
        store_sums(sums, add ? add + at : nullptr, out + at);
    });
}

// from: [outs, ins / 2], the even in in the low half.
void pack_int4(const uint8_t* from, int64_t outs, int ins, Int4Block::Word* to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < outs / OUTS; ++block)
        for (int pair = 0; pair < ins / 2; ++pair) {
            Int4Block::Word* words = to + block * LANES * ins + (int64_t)pair * 2 * LANES;
            std::memset(words, 0, 2 * LANES * sizeof *words);
            for (int out = 0; out < OUTS; ++out) {
                const uint8_t both = from[(block * OUTS + out) * (ins / 2) + pair];
                for (int odd = 0; odd < 2; ++odd) {
                    int word, shift;
                    Int4Block::place(out, odd, word, shift);
                    words[word] |= (both >> 4 * odd & 15) << shift;
                }
            }
        }
}

// from: [outs, ins].
void pack_fp8(const uint8_t* from, int64_t outs, int ins, uint8_t* to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < outs / OUTS; ++block)
        for (int pair = 0; pair < ins / 2; ++pair)
            for (int out = 0; out < OUTS; ++out)
                for (int odd = 0; odd < 2; ++odd)
                    to[block * OUTS * ins + (int64_t)pair * 2 * OUTS + Fp8Block::place(out, odd)] =
                        from[(block * OUTS + out) * ins + 2 * pair + odd];
}
}
