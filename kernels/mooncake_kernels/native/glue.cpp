// What stands between the products of a step, each in one call: norms, the cached row of a token,
// scaled and rotated queries, the choice of experts.

#include <algorithm>

#include "rows.h"

extern "C" {

// See the reference. x: [rows, width], `stride` numbers from row to row; to: [rows, width].
void rms_norm_bf16(const bf16* x, int64_t stride, const bf16* weight, double eps, int rows, int width,
                   bf16* to, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 32)
    for (int row = 0; row < rows; ++row) norm(x + row * stride, weight, width, eps, to + (int64_t)row * width);
}

// See the reference. latent: [rows, rank] and key: [rows, rope], `stride` numbers from row to row.
void kv_write_bf16(const bf16* latent, const bf16* key, int64_t stride, const float* rotation,
                   const int64_t* places, const bf16* weight, double eps, bf16* kv, int rows,
                   int rank, int rope, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 32)
    for (int row = 0; row < rows; ++row) {
        if (places[row] < 0) continue;
        bf16* to = kv + places[row] * (rank + rope);
        norm(latent + row * stride, weight, rank, eps, to);
        turn(key + row * stride, rotation + (int64_t)row * rope, rope, to + rank);
    }
}

// Scales q [rows, heads, nope + rope] and turns its last `rope` numbers, in place.
void prepare_queries_bf16(bf16* q, const float* rotation, double scale, int rows, int heads,
                          int nope, int rope, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int row = 0; row < rows; ++row)
        for (int head = 0; head < heads; ++head)
            prepare_query(q + ((int64_t)row * heads + head) * (nope + rope), rotation + (int64_t)row * rope,
                          (float)scale, nope, rope);
}

// See the reference; one group. x: [rows, hidden]; router: [experts, hidden]; logits: room for [rows,
// experts]; chosen, weights: [rows, choices].
void route_bf16(const bf16* x, const float* router, const float* bias, int rows, int hidden, int experts,
                int choices, int normalize, double scale, float* logits, int64_t* chosen, float* weights,
                int threads) {
#pragma omp parallel num_threads(threads) if ((int64_t)rows * experts * hidden > 1 << 18)
    {
#pragma omp for
        for (int expert = 0; expert < experts; ++expert) {
            const float* of = router + (int64_t)expert * hidden;
            for (int row = 0; row < rows; ++row) {
                const bf16* from = x + (int64_t)row * hidden;
                Floats sums[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
                int at = 0;
                for (; at + 4 * LANES <= hidden; at += 4 * LANES)
                    for (int part = 0; part < 4; ++part)
                        sums[part] = wide(from + at + part * LANES) * load(of + at + part * LANES) + sums[part];
                float sum = sum_of(sums[0] + sums[1] + (sums[2] + sums[3]));
                for (; at < hidden; ++at) sum += number(from[at]) * of[at];
                logits[(int64_t)row * experts + expert] = sum;
            }
        }
#pragma omp for
        for (int row = 0; row < rows; ++row) {
            float* score = logits + (int64_t)row * experts;
            int64_t* to = chosen + (int64_t)row * choices;
            float* share = weights + (int64_t)row * choices;
            for (int expert = 0; expert < experts; ++expert) score[expert] = 1 / (1 + std::exp(-score[expert]));
            float total = 0;
            for (int choice = 0; choice < choices; ++choice) {
                int best = -1;
                for (int expert = 0; expert < experts; ++expert) {
                    if (std::find(to, to + choice, expert) != to + choice) continue;
                    if (best < 0 || score[expert] + bias[expert] > score[best] + bias[best]) best = expert;
                }
                to[choice] = best;
                share[choice] = score[best];
                total += score[best];
            }
            const float factor = (float)scale / (normalize ? total + 1e-20f : 1);
            for (int choice = 0; choice < choices; ++choice) share[choice] *= factor;
        }
    }
}
}
