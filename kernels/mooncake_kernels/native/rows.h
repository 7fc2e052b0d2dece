// What is done to single rows between products: norms, rotation, queries. Rounded to bfloat16 where
// the references round.

#pragma once

#include <cmath>

#include "lanes.h"

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

inline float sum_of(Floats x) {
    alignas(64) float each[LANES];
    store(each, x);
    float sum = 0;
    for (float value : each) sum += value;
    return sum;
}

// to = rms_norm(x) * weight; rounded before it is weighted.
inline void norm(const bf16* x, const bf16* weight, int width, double eps, bf16* to) {
    const int end = width / LANES * LANES;
    Floats squares = all(0.0f);
    for (int at = 0; at < end; at += LANES) {
        const Floats part = wide(x + at);
        squares = part * part + squares;
    }
    float sum = sum_of(squares);
    for (int i = end; i < width; ++i) sum += number(x[i]) * number(x[i]);
    const float factor = 1 / std::sqrt(sum / width + (float)eps);
    for (int at = 0; at < end; at += LANES) {
        bf16 scaled[LANES];
        store(scaled, wide(x + at) * all(factor));
        store(to + at, wide(scaled) * wide(weight + at));
    }
    for (int i = end; i < width; ++i) to[i] = rounded(number(rounded(number(x[i]) * factor)) * number(weight[i]));
}

// Turns pairs side by side; rotation: cosine and sine of each pair.
inline void turn(const bf16* x, const float* rotation, int width, bf16* to) {
    for (int at = 0; at < width; at += 2) {
        const float a = number(x[at]), b = number(x[at + 1]), c = rotation[at], s = rotation[at + 1];
        to[at] = rounded(a * c - b * s);
        to[at + 1] = rounded(a * s + b * c);
    }
}

// x [nope + rope] times `factor`, its last `rope` numbers turned, in place.
inline void prepare_query(bf16* x, const float* rotation, float factor, int nope, int rope) {
    for (int i = 0; i < nope + rope; ++i) x[i] = rounded(number(x[i]) * factor);
    turn(x + nope, rotation, rope, x + nope);
}

}  // namespace
