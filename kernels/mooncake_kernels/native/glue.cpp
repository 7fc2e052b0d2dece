// What stands between the products of a decode step, each in one call: the cached row of a token,
// scaled and rotated queries, the choice of experts. Rounded to bfloat16 where the references are.

#include <algorithm>
#include <cmath>

#include "tiles.h"

namespace {

inline float number(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float made;
    std::memcpy(&made, &bits, sizeof made);
    return made;
}

inline bf16 rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7FC0;
    return (bf16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Turns pairs side by side; rotation: cosine and sine of each pair.
inline void turn(const bf16* x, const float* rotation, int width, bf16* to) {
    for (int at = 0; at < width; at += 2) {
        const float a = number(x[at]), b = number(x[at + 1]), c = rotation[at], s = rotation[at + 1];
        to[at] = rounded(a * c - b * s);
        to[at + 1] = rounded(a * s + b * c);
    }
}

}  // namespace

extern "C" {

// See the reference. latent: [rows, rank] and key: [rows, rope], `stride` numbers from row to row.
void kv_write_bf16(const bf16* latent, const bf16* key, int64_t stride, const float* rotation,
                   const int64_t* places, const bf16* weight, double eps, bf16* kv, int rows,
                   int rank, int rope, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int row = 0; row < rows; ++row) {
        if (places[row] < 0) continue;
        const bf16* x = latent + row * stride;
        bf16* to = kv + places[row] * (rank + rope);
        float sum = 0;
        for (int i = 0; i < rank; ++i) sum += number(x[i]) * number(x[i]);
        const float factor = 1 / std::sqrt(sum / rank + (float)eps);
        for (int i = 0; i < rank; ++i) to[i] = rounded(number(rounded(number(x[i]) * factor)) * number(weight[i]));
        turn(key + row * stride, rotation + (int64_t)row * rope, rope, to + rank);
    }
}

// Scales q [rows, heads, nope + rope] and turns its last `rope` numbers, in place.
void prepare_queries_bf16(bf16* q, const float* rotation, double scale, int rows, int heads,
                          int nope, int rope, int threads) {
    const float factor = (float)scale;
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int row = 0; row < rows; ++row)
        for (int head = 0; head < heads; ++head) {
            bf16* x = q + ((int64_t)row * heads + head) * (nope + rope);
            for (int i = 0; i < nope + rope; ++i) x[i] = rounded(number(x[i]) * factor);
            turn(x + nope, rotation + (int64_t)row * rope, rope, x + nope);
        }
}

// See the reference; one group. logits: [rows, experts]; chosen, weights: [rows, choices].
void choose_float(const float* logits, const float* bias, int rows, int experts, int choices,
                  int normalize, double scale, int64_t* chosen, float* weights, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int row = 0; row < rows; ++row) {
        const float* x = logits + (int64_t)row * experts;
        int64_t* to = chosen + (int64_t)row * choices;
        float* share = weights + (int64_t)row * choices;
        float total = 0;
        for (int choice = 0; choice < choices; ++choice) {
            int best = -1;
            float most = 0, score = 0;
            for (int expert = 0; expert < experts; ++expert) {
                if (std::find(to, to + choice, expert) != to + choice) continue;
                const float plain = 1 / (1 + std::exp(-x[expert]));
                if (best < 0 || plain + bias[expert] > most) {
                    best = expert;
                    most = plain + bias[expert];
                    score = plain;
                }
            }
            to[choice] = best;
            share[choice] = score;
            total += score;
        }
        const float factor = (float)scale / (normalize ? total + 1e-20f : 1);
        for (int choice = 0; choice < choices; ++choice) share[choice] *= factor;
    }
}
}
