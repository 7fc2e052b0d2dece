// Absorbed MLA of few rows over paged latent KV: each page is read where it lies, scored, and added
// with running maxima and sums. A unit of work is one row and HEADS heads.

#include <cmath>

#include "tiles.h"

namespace {

constexpr int HEADS = 8, MOST_TOKENS = 256, MOST_RANK = 1024, WORD = 32;

// The sums of 16 vectors, in their order.
inline __m512 sums_of(const __m512* a) {
    __m512 b[8], c[4], d[2];
    for (int i = 0; i < 8; ++i)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; ++i)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x44), _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xDD));
}

// The scores of `tokens` keys for each head: to[head][token].
void score(const bf16* q, int width, const bf16* keys, int tokens, float (*to)[MOST_TOKENS]) {
    for (int token = 0; token < tokens; token += 2) {
        const bf16* first = keys + (int64_t)token * width;
        const bf16* second = token + 1 < tokens ? first + width : first;
        __m512 sums[2 * HEADS];
        for (auto& sum : sums) sum = _mm512_setzero_ps();
        for (int at = 0; at < width; at += WORD) {
            const __m512bh k0 = (__m512bh)_mm512_loadu_si512(first + at);
            const __m512bh k1 = (__m512bh)_mm512_loadu_si512(second + at);
            for (int head = 0; head < HEADS; ++head) {
                const __m512bh part = (__m512bh)_mm512_loadu_si512(q + head * width + at);
                sums[head] = _mm512_dpbf16_ps(sums[head], part, k0);
                sums[HEADS + head] = _mm512_dpbf16_ps(sums[HEADS + head], part, k1);
            }
        }
        alignas(64) float both[2 * HEADS];
        _mm512_store_ps(both, sums_of(sums));
        for (int head = 0; head < HEADS; ++head) {
            to[head][token] = both[head];
            if (token + 1 < tokens) to[head][token + 1] = both[HEADS + head];
        }
    }
}

// made[head] = made[head] * kept[head] + the latents by their shares (bfloat16, an even number, the
// last 0 where tokens are odd). A vector of `made` holds 16 of 32 latents as unpacking leaves them.
void gather(const bf16 (*shares)[MOST_TOKENS], const bf16* latents, int width, int tokens, int rank,
            const float* kept, float (*made)[MOST_RANK]) {
    for (int at = 0; at < rank; at += WORD) {
        __m512 low[HEADS], high[HEADS];
        for (int head = 0; head < HEADS; ++head) {
            const __m512 factor = _mm512_set1_ps(kept[head]);
            low[head] = _mm512_mul_ps(_mm512_loadu_ps(made[head] + at), factor);
            high[head] = _mm512_mul_ps(_mm512_loadu_ps(made[head] + at + LANES), factor);
        }
        for (int token = 0; token < tokens; token += 2) {
            const bf16* row = latents + (int64_t)token * width + at;
            const __m512i v0 = _mm512_loadu_si512(row);
            const __m512i v1 = token + 1 < tokens ? _mm512_loadu_si512(row + width) : _mm512_setzero_si512();
            const __m512bh below = (__m512bh)_mm512_unpacklo_epi16(v0, v1);
            const __m512bh above = (__m512bh)_mm512_unpackhi_epi16(v0, v1);
            for (int head = 0; head < HEADS; ++head) {
                const __m512bh share = pair_of(shares[head] + token);
                low[head] = _mm512_dpbf16_ps(low[head], below, share);
                high[head] = _mm512_dpbf16_ps(high[head], above, share);
            }
        }
        for (int head = 0; head < HEADS; ++head) {
            _mm512_storeu_ps(made[head] + at, low[head]);
            _mm512_storeu_ps(made[head] + at + LANES, high[head]);
        }
    }
}

// Scores to shares of `tokens`, against the new maximum; returns what earlier results count for.
float share(float* scores, int tokens, float& maximum, float& sum, bf16* to) {
    float most = maximum;
    for (int token = 0; token < tokens; ++token) most = scores[token] > most ? scores[token] : most;
    const float kept = maximum == -INFINITY ? 0.0f : std::exp(maximum - most);
    const int padded = (tokens + LANES - 1) / LANES * LANES;
    for (int token = tokens; token < padded; ++token) scores[token] = -INFINITY;
    __m512 total = _mm512_setzero_ps();
    for (int token = 0; token < padded; token += LANES) {
        const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(scores + token), _mm512_set1_ps(most));
        const __mmask16 there = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        const __m512 part = _mm512_maskz_mov_ps(there, exponential(x));
        total = _mm512_add_ps(total, part);
        store(to + token, part);
    }
    sum = sum * kept + _mm512_reduce_add_ps(total);
    maximum = most;
    return kept;
}

}  // namespace

// q: [rows, heads, width]; pages: [any, tokens, width]; row_start: [sequences + 1]; lengths: of each
// context; table: [sequences, columns]; out: [rows, heads, rank]; lse: [rows, heads]. Row i of n of a
// sequence sees its first length - n + 1 + i tokens.
extern "C" void attention_bf16(const bf16* q, const bf16* pages, const int32_t* row_start,
                               const int32_t* lengths, const int32_t* table, int sequences,
                               int columns, int heads, int tokens, int width, int rank, bf16* out,
                               float* lse, int threads) {
    const int groups = heads / HEADS, rows = row_start[sequences];
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int unit = 0; unit < rows * groups; ++unit) {
        const int row = unit / groups, first_head = unit % groups * HEADS;
        int sequence = 0;
        while (row_start[sequence + 1] <= row) ++sequence;
        const int seen = lengths[sequence] - (row_start[sequence + 1] - 1 - row);
        const int64_t place = (int64_t)row * heads + first_head;
        alignas(64) float scores[HEADS][MOST_TOKENS], made[HEADS][MOST_RANK];
        alignas(64) bf16 shares[HEADS][MOST_TOKENS];
        float maximum[HEADS], sum[HEADS], kept[HEADS];
        for (int head = 0; head < HEADS; ++head) {
            maximum[head] = -INFINITY;
            sum[head] = 0;
            std::memset(made[head], 0, rank * sizeof(float));
        }
        for (int begin = 0; begin < seen; begin += tokens) {
            const int num = seen - begin < tokens ? seen - begin : tokens;
            const bf16* page = pages + (int64_t)table[(int64_t)sequence * columns + begin / tokens] * tokens * width;
            score(q + place * width, width, page, num, scores);
            for (int head = 0; head < HEADS; ++head)
                kept[head] = share(scores[head], num, maximum[head], sum[head], shares[head]);
            gather(shares, page, width, num, rank, kept, made);
        }
        for (int head = 0; head < HEADS; ++head) {
            const float factor = sum[head] > 0 ? 1 / sum[head] : 0;
            lse[place + head] = sum[head] > 0 ? maximum[head] + std::log(sum[head]) : -INFINITY;
            for (int at = 0; at < rank; at += WORD) {
                alignas(64) float ordered[WORD];  // four of the low vector, four of the high, ...
                for (int i = 0; i < WORD; ++i)
                    ordered[i] = made[head][at + i % 8 / 4 * LANES + i / 8 * 4 + i % 4] * factor;
                for (int i = 0; i < WORD; i += LANES)
                    store(out + (place + head) * rank + at + i, _mm512_load_ps(ordered + i));
            }
        }
    }
}
