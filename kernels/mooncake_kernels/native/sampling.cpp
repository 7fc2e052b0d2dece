// Choosing tokens: thresholds of top-k and top-p without a sort, penalties, the most likely tokens.
// Rounded as the references round: no product is fused with a sum.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#pragma GCC optimize("fp-contract=off")

#include "lanes.h"

namespace {

// Scaled logits are at most 0, so the bits of their magnitudes order them: the best has the least.
constexpr uint32_t INFINITY_BITS = 0x7F800000, SIGN = 0x80000000;
constexpr uint32_t BINS = 256, FIRST_SHIFT = 19, FIRST_BIN = 120 << 4;  // sixteen a power, from 2^-7 on
constexpr size_t FEW = 48;
constexpr int STRIDE = 64, SUMS = 16;

struct Token {
    uint32_t bits;
    double amount;
};

inline uint32_t bits_of(float scaled) {
    uint32_t bits;
    std::memcpy(&bits, &scaled, sizeof bits);
    return bits & ~SIGN;
}

// The weight of a token that is not beyond `floor`, else 0. No branch: of half of the tokens none could be foretold.
inline float kept(float scaled, float weight, uint32_t floor) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    bits &= -(uint32_t)(bits_of(scaled) <= floor);
    std::memcpy(&weight, &bits, sizeof bits);
    return weight;
}

// An interval of bits, cut into BINS.
struct Interval {
    uint32_t low = 0, high = INFINITY_BITS + 1, first = FIRST_BIN, shift = FIRST_SHIFT;

    uint32_t bin_of(uint32_t bits) const {
        const uint32_t at = bits >> shift;
        return at <= first ? 0 : std::min(at - first, BINS - 1);
    }
    void narrow_to(uint32_t bin) {
        const uint32_t begin = (first + bin) << shift, end = (first + bin + 1) << shift;
        if (bin > 0) low = std::max(low, begin);
        if (bin < BINS - 1) high = std::min(high, end);
        for (shift = 0; (high - low - 1) >> shift >= BINS - 1;) ++shift;
        first = low >> shift;
    }
};

// WEIGHTED: tokens have amounts other than 1.
template <bool WEIGHTED>
struct Bins {
    double sums[WEIGHTED ? BINS : 1] = {};
    uint32_t counts[BINS] = {};

    void add(uint32_t bin, double amount) {
        if constexpr (WEIGHTED) sums[bin] += amount;
        ++counts[bin];
    }
    // The first bin at whose end the amounts come to `wanted`, else the last that has a token;
    // `before` grows by what lies before it.
    uint32_t reached(double wanted, double& before) const {
        uint32_t found = 0;
        double sum = before;
        for (uint32_t bin = 0; bin < BINS; ++bin) {
            if (!counts[bin]) continue;
            found = bin, before = sum;
            sum += WEIGHTED ? sums[bin] : counts[bin];
            if (sum >= wanted) break;
        }
        return found;
    }
};

// The bits of the token at which the amounts (1, or the weights), the nearest to the best first and none
// beyond `floor`, come to `wanted`: each pass over the tokens in question cuts their interval of bits.
template <bool WEIGHTED>
uint32_t reached(const float* scaled, const float* weights, int vocab, uint32_t floor, double wanted,
                 std::vector<Token>& tokens) {
    Interval interval;
    double before = 0;
    const auto amount = [&](int i) { return WEIGHTED ? (double)weights[i] : 1.0; };
    {
        Bins<WEIGHTED> bins;
        for (int i = 0; i < vocab; ++i) {
            const uint32_t bits = bits_of(scaled[i]);
            if (bits <= floor) bins.add(interval.bin_of(bits), amount(i));
        }
        const uint32_t bin = bins.reached(wanted, before);
        tokens.clear();
        for (int i = 0; i < vocab; ++i) {
            const uint32_t bits = bits_of(scaled[i]);
            if (bits <= floor && interval.bin_of(bits) == bin) tokens.push_back({bits, amount(i)});
        }
        interval.narrow_to(bin);
    }
    while (tokens.size() > FEW && interval.high - interval.low > 1) {
        Bins<WEIGHTED> bins;
        for (const Token& token : tokens) bins.add(interval.bin_of(token.bits), token.amount);
        const uint32_t bin = bins.reached(wanted, before);
        const auto is_out = [&](const Token& token) { return interval.bin_of(token.bits) != bin; };
        tokens.erase(std::remove_if(tokens.begin(), tokens.end(), is_out), tokens.end());
        interval.narrow_to(bin);
    }
    std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.bits < b.bits; });
    for (const Token& token : tokens) {
        before += token.amount;
        if (before >= wanted) return token.bits;
    }
    return tokens.empty() ? floor : tokens.back().bits;
}

// A number that orders tokens: the most likely first, of those that tie the lowest id, NaN last. Its low half is the id.
inline uint64_t order_of(float logit, uint32_t id) {
    uint32_t bits;
    logit = logit == logit ? logit + 0.0f : -INFINITY;  // one zero
    std::memcpy(&bits, &logit, sizeof bits);
    return (uint64_t)(bits & SIGN ? bits : ~(bits | SIGN)) << 32 | id;
}

// The logarithm of the sum of all exponentials; best: the largest.
float log_sum(const float* of, int vocab, float best) {
    Floats sums = all(0.0f);
    const int whole = vocab / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) sums = sums + exponential(load(of + i) - all(best));
    float each[LANES];
    store(each, sums);
    double sum = 0;
    for (float one : each) sum += one;
    for (int i = whole; i < vocab; ++i) sum += std::exp(of[i] - best);
    return (float)std::log(sum) + best;
}

}  // namespace

extern "C" {

// See the reference. scaled: [rows, vocab], at most 0; weights: their exponentials; least: where min-p
// ends, a scaled logit. A row's temperature is not 0.
void draw_rows(const float* scaled, const float* weights, const float* least, const int32_t* top_ks,
               const double* top_ps, const double* uniforms, int rows, int vocab, int64_t* chosen, int threads) {
#pragma omp parallel num_threads(threads) if (rows > 1)
    {
        std::vector<Token> tokens;
        std::vector<double> sums(vocab / STRIDE + 2);
#pragma omp for
        for (int row = 0; row < rows; ++row) {
            const float* of = scaled + (int64_t)row * vocab;
            const float* weight = weights + (int64_t)row * vocab;
            uint32_t floor = bits_of(least[row]);
            if (top_ks[row] > 0 && top_ks[row] < vocab)
                floor = std::min(floor, reached<false>(of, nullptr, vocab, INFINITY_BITS, top_ks[row], tokens));
            if (top_ps[row] < 1) {
                double masses[SUMS] = {};
                for (int i = 0; i < vocab; ++i) masses[i % SUMS] += kept(of[i], weight[i], floor);
                double mass = 0;
                for (double each : masses) mass += each;
                floor = std::min(floor, reached<true>(of, weight, vocab, floor, top_ps[row] * mass, tokens));
            }
            double sum = 0;
            int part = 0;
            for (int begin = 0; begin < vocab; begin += STRIDE) {
                sums[part++] = sum;
                const int end = std::min(begin + STRIDE, vocab);
                for (int i = begin; i < end; ++i) sum += kept(of[i], weight[i], floor);
            }
            // Rounding must not carry the target up to the total: there is no token beyond it.
            const double target = std::min(uniforms[row] * sum, std::nextafter(sum, 0.0));
            part = std::max<int>(std::upper_bound(sums.begin(), sums.begin() + part, target) - sums.begin() - 1, 0);
            sum = sums[part];
            int token = std::min(part * STRIDE, vocab - 1);
            for (int i = token; i < vocab; ++i) {
                sum += kept(of[i], weight[i], floor);
                token = i;
                if (sum > target) break;
            }
            chosen[row] = token;
        }
    }
}

// See the reference.
void penalize_rows(float* logits, const uint8_t* seen, const int32_t* counts, const float* repetitions,
                   const float* presences, const float* frequencies, int rows, int vocab, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int row = 0; row < rows; ++row) {
        float* of = logits + (int64_t)row * vocab;
        const uint8_t* was_seen = seen + (int64_t)row * vocab;
        const int32_t* count = counts + (int64_t)row * vocab;
        const float repetition = repetitions[row], presence = presences[row], frequency = frequencies[row];
        for (int i = 0; i < vocab; ++i) {
            const float divided = of[i] / repetition, multiplied = of[i] * repetition;
            const float repeated = of[i] > 0 ? divided : multiplied;
            const float times = (float)count[i], once = times < 1 ? times : 1;
            of[i] = (was_seen[i] ? repeated : of[i]) - (frequency * times + presence * once);
        }
    }
}

// See the reference. allowed: [rows, bytes].
void mask_rows(float* logits, const uint8_t* allowed, int bytes, int rows, int vocab, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int row = 0; row < rows; ++row) {
        float* of = logits + (int64_t)row * vocab;
        const uint8_t* bits = allowed + (int64_t)row * bytes;
        for (int at = 0; at < vocab / 8; ++at)
            for (int bit = 0; bit < 8; ++bit)
                of[8 * at + bit] = bits[at] & 1 << bit ? of[8 * at + bit] : -INFINITY;
        for (int i = vocab / 8 * 8; i < vocab; ++i) of[i] = bits[i / 8] & 1 << i % 8 ? of[i] : -INFINITY;
    }
}

// See the reference. best, ids: [rows, most]; most > 0. NaN counts as what is least likely.
void most_likely_rows(const float* logits, int64_t stride, const int64_t* tokens, int rows, int vocab, int most,
                      float* best, int64_t* ids, float* owns, int64_t* ranks, int threads) {
    const int parts = vocab / SUMS >= most ? (vocab + SUMS - 1) / SUMS : vocab;
#pragma omp parallel num_threads(threads) if (rows > 1)
    {
        std::vector<uint64_t> found;
        std::vector<float> largest(parts), sorted(parts);
#pragma omp for
        for (int row = 0; row < rows; ++row) {
            const float* of = logits + row * stride;
            const float own = of[tokens[row]];
            int rank = 1;
            for (int i = 0; i < vocab; ++i) rank += of[i] > own;
            ranks[row] = rank;
            // A part is every parts-th token.
            largest.assign(parts, -INFINITY);
            for (int begin = 0; begin < vocab; begin += parts) {
                const int num = std::min(parts, vocab - begin);
                for (int part = 0; part < num; ++part) {
                    const float logit = of[begin + part];
                    largest[part] = logit > largest[part] ? logit : largest[part];
                }
            }
            // So many parts have a token that is as likely as this: what is less likely is not wanted.
            sorted = largest;
            std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(), std::greater<float>());
            const float least = sorted[most - 1];
            found.clear();
            for (int part = 0; part < parts; ++part) {
                if (largest[part] < least) continue;
                for (int i = part; i < vocab; i += parts)
                    if (!(of[i] < least)) found.push_back(order_of(of[i], i));
            }
            std::partial_sort(found.begin(), found.begin() + most, found.end());
            const float whole = log_sum(of, vocab, of[(uint32_t)found[0]]);
            owns[row] = own - whole;
            for (int place = 0; place < most; ++place) {
                const uint32_t id = (uint32_t)found[place];
                best[(int64_t)row * most + place] = of[id] - whole;
                ids[(int64_t)row * most + place] = id;
            }
        }
    }
}
}
