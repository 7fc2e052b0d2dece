// Routed experts of few tokens in one call: each touched weight is read once.

#include "tiles.h"

namespace {

struct Group {
    int expert, begin, end;  // of the sorted pairs
};

template <class Weight, class Of>
void run(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
         int experts, int hidden, int inner, int32_t* sorted, bf16* between, float* sums, bf16* out,
         int threads, const Of& weight_of) {
    const int pairs = rows * choices;
    Group* groups = new Group[experts];
    int used = 0, filled = 0;
    for (int expert = 0; expert < experts; ++expert) {
        int begin = filled;
        for (int pair = 0; pair < pairs; ++pair)
            if (chosen[pair] == expert) sorted[filled++] = pair;
        if (filled > begin) groups[used++] = {expert, begin, filled};
    }
    const int inner_blocks = inner / OUTS, hidden_blocks = hidden / OUTS;
#pragma omp parallel num_threads(threads)
    {
        const bf16* row[ROWS];
        float first[ROWS * OUTS], second[ROWS * OUTS];
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < used * inner_blocks; ++unit) {
            const Group& group = groups[unit / inner_blocks];
            const int block = unit % inner_blocks;
            const Weight weight = weight_of(group.expert, 0);
            for (int begin = group.begin; begin < group.end; begin += ROWS) {
                const int num = group.end - begin < ROWS ? group.end - begin : ROWS;
                for (int r = 0; r < num; ++r) row[r] = x + (int64_t)(sorted[begin + r] / choices) * hidden;
                products(weight, block, hidden, num, row, first);
                products(weight, inner_blocks + block, hidden, num, row, second);
                for (int i = 0; i < num * OUTS; i += LANES) {
                    __m512 gate = _mm512_loadu_ps(first + i);
                    __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
                    __m512 value = _mm512_mul_ps(_mm512_div_ps(gate, below), _mm512_loadu_ps(second + i));
                    store(between + (int64_t)(begin + i / OUTS) * inner + block * OUTS + i % OUTS, value);
                }
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int block = 0; block < hidden_blocks; ++block) {
            for (int token = 0; token < rows; ++token)
                std::memset(sums + (int64_t)token * hidden + block * OUTS, 0, OUTS * sizeof(float));
            for (int g = 0; g < used; ++g) {
                const Group& group = groups[g];
                const Weight weight = weight_of(group.expert, 1);
                for (int begin = group.begin; begin < group.end; begin += ROWS) {
                    const int num = group.end - begin < ROWS ? group.end - begin : ROWS;
                    for (int r = 0; r < num; ++r) row[r] = between + (int64_t)(begin + r) * inner;
                    products(weight, block, inner, num, row, first);
                    for (int r = 0; r < num; ++r) {
                        const int pair = sorted[begin + r];
                        float* sum = sums + (int64_t)(pair / choices) * hidden + block * OUTS;
                        const __m512 share = _mm512_set1_ps(weights[pair]);
                        for (int i = 0; i < OUTS; i += LANES)
                            _mm512_storeu_ps(sum + i, _mm512_fmadd_ps(share, _mm512_loadu_ps(first + r * OUTS + i), _mm512_loadu_ps(sum + i)));
                    }
                }
            }
            for (int token = 0; token < rows; ++token)
                for (int i = 0; i < OUTS; i += LANES) {
                    const int64_t at = (int64_t)token * hidden + block * OUTS + i;
                    store(out + at, _mm512_loadu_ps(sums + at));
                }
        }
    }
    delete[] groups;
}

}  // namespace

extern "C" {

// x, out: [rows, hidden]; chosen, weights: [rows, choices]. addresses: of each expert's gate and up,
// then of each expert's down. Room: sorted [pairs], between [pairs, inner], sums [rows, hidden].
void experts_bf16(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
                  int experts, int hidden, int inner, const uint64_t* addresses, int32_t* sorted,
                  bf16* between, float* sums, bf16* out, int threads) {
    run<Bf16Weight>(x, chosen, weights, rows, choices, experts, hidden, inner, sorted, between, sums,
                    out, threads, [=](int expert, int second) {
                        return Bf16Weight{(const bf16*)addresses[second * experts + expert]};
                    });
}

// As above; addresses: of the codes and of the scales of gate and up of all experts, then of down.
void experts_int4(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
                  int experts, int hidden, int inner, const uint64_t* addresses, int32_t* sorted,
                  bf16* between, float* sums, bf16* out, int threads) {
    run<Int4Weight>(x, chosen, weights, rows, choices, experts, hidden, inner, sorted, between, sums,
                    out, threads, [=](int expert, int second) {
                        const int64_t size = (int64_t)(second ? 1 : 2) * hidden * inner;
                        return Int4Weight{(const uint8_t*)addresses[2 * second] + expert * size / 2,
                                          (const bf16*)addresses[2 * second + 1] + expert * size / INS};
                    });
}
}
