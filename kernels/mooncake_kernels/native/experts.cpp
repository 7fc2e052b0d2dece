// Routed experts in one call: of few tokens each touched weight is read once. Of many, where the CPU
// has tiles, a thread computes whole experts of as many tokens as its cache holds.

#include <vector>

#include "tiles.h"

namespace {

struct Group {
    int expert, begin, end;  // of the sorted pairs
};

// Pairs of token and choice, sorted by expert, in groups of at most `most`; an expert of -1 is another rank's.
std::vector<Group> grouped(const int64_t* chosen, int pairs, int experts, int most, int32_t* sorted) {
    std::vector<int> ends(experts + 1, 0);
    for (int pair = 0; pair < pairs; ++pair) ++ends[chosen[pair] + 1];
    for (int expert = 0; expert < experts; ++expert) ends[expert + 1] += ends[expert];
    std::vector<Group> groups;
    for (int expert = 0; expert < experts; ++expert)
        for (int begin = ends[expert]; begin < ends[expert + 1]; begin += most)
            groups.push_back({expert, begin, std::min(begin + most, ends[expert + 1])});
    for (int pair = 0; pair < pairs; ++pair)
        if (chosen[pair] >= 0) sorted[ends[chosen[pair]]++] = pair;
    return groups;
}

inline Floats gated(const float* gates, const float* ups) {
    const Floats gate = load(gates);
    return gate / (all(1.0f) + exponential(all(0.0f) - gate)) * load(ups);
}

// The gated products of one group with a block of gate and of up, to `between`.
template <class Weight>
void first_products(const Weight& weight, int block, int hidden, int inner, const Group& group,
                    const bf16* x, const int32_t* sorted, int choices, bf16* between) {
    alignas(64) float gates[MANY * OUTS], ups[MANY * OUTS];
    const bf16* row[MANY];
    const int num = group.end - group.begin;
    for (int r = 0; r < num; ++r) row[r] = x + (int64_t)(sorted[group.begin + r] / choices) * hidden;
    products(weight, block, hidden, num, row, gates);
    products(weight, inner / OUTS + block, hidden, num, row, ups);
    for (int i = 0; i < num * OUTS; i += LANES)
        store(between + (int64_t)(group.begin + i / OUTS) * inner + block * OUTS + i % OUTS, gated(gates + i, ups + i));
}

// Adds the weighted products of one group with a block of down to its tokens' sums.
template <class Weight>
void second_products(const Weight& weight, int block, int hidden, int inner, const Group& group,
                     const bf16* between, const int32_t* sorted, int choices, const float* weights,
                     float* sums) {
    alignas(64) float made[MANY * OUTS];
    const bf16* row[MANY];
    const int num = group.end - group.begin;
    for (int r = 0; r < num; ++r) row[r] = between + (int64_t)(group.begin + r) * inner;
    products(weight, block, inner, num, row, made);
    for (int r = 0; r < num; ++r) {
        const int pair = sorted[group.begin + r];
        float* sum = sums + (int64_t)(pair / choices) * hidden + block * OUTS;
        const Floats share = all(weights[pair]);
        for (int i = 0; i < OUTS; i += LANES) store(sum + i, share * load(made + r * OUTS + i) + load(sum + i));
    }
}

#ifdef __AMX_BF16__

// The same by tiles. made: room for [pairs, hidden], each pair's result.
template <class Of>
void run_tiles(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
               int experts, int hidden, int inner, int32_t* sorted, bf16* made, const bf16* add, bf16* out,
               int threads, const Of& weight_of) {
    const int pairs = rows * choices;
    const int each = (pairs / (4 * threads) + ROWS_OF_TILES - 1) / ROWS_OF_TILES * ROWS_OF_TILES;
    const int most = std::max(ROWS_OF_TILES, std::min(each, rows_in_cache(2 * (hidden + inner))));
    const std::vector<Group> groups = grouped(chosen, pairs, experts, most, sorted);
    const int num = groups.size();
#pragma omp parallel num_threads(threads)
    {
        bf16 *taken = (bf16*)own_room(sizeof(bf16) * most * (hidden + inner)), *between = taken + (int64_t)most * hidden;
        using Weight = decltype(weight_of(0, 0));
        const int64_t block_numbers = std::is_same_v<Weight, Bf16Weight> ? 0 : (int64_t)OUTS * std::max(hidden, inner);
        bf16* room = (bf16*)own_room<Room::WEIGHT>(sizeof(bf16) * 2 * block_numbers);
        alignas(64) float gates[ROWS_OF_TILES * OUTS], ups[ROWS_OF_TILES * OUTS];
        Tiles tiles;
        // Calls take(first row, rows) for as many rows of a group as tiles hold.
        const auto each_part = [](const Group& group, const auto& take) {
            for (int row = 0; row < group.end - group.begin; row += ROWS_OF_TILES)
                take(row, std::min(ROWS_OF_TILES, group.end - group.begin - row));
        };
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < num; ++unit) {
            const Group& group = groups[unit];
            const int32_t* pair_of_row = sorted + group.begin;
            for (int row = 0; row < group.end - group.begin; ++row)
                std::memcpy(taken + (int64_t)row * hidden, x + (int64_t)(pair_of_row[row] / choices) * hidden, hidden * sizeof(bf16));
            const Weight first = weight_of(group.expert, 0), second = weight_of(group.expert, 1);
            for (int block = 0; block < inner / OUTS; ++block) {
                const Bf16Block gate = decoded(first.at(block, hidden), hidden, room);
                const Bf16Block up = decoded(first.at(inner / OUTS + block, hidden), hidden, room + block_numbers);
                each_part(group, [&](int row, int part) {
                    const bf16* from = taken + (int64_t)row * hidden;
                    tiles.multiply(gate.values, gate.next, OUTS, hidden, part, from, hidden, gates);
                    tiles.multiply(up.values, up.next, OUTS, hidden, part, from, hidden, ups);
                    for (int i = 0; i < part * OUTS; i += LANES)
                        store(between + (int64_t)(row + i / OUTS) * inner + block * OUTS + i % OUTS, gated(gates + i, ups + i));
                });
            }
            for (int block = 0; block < hidden / OUTS; ++block) {
                const Bf16Block down = decoded(second.at(block, inner), inner, room);
                each_part(group, [&](int row, int part) {
                    tiles.multiply(down.values, down.next, OUTS, inner, part, between + (int64_t)row * inner, inner, gates);
                    for (int i = 0; i < part * OUTS; i += LANES)
                        store(made + (int64_t)pair_of_row[row + i / OUTS] * hidden + block * OUTS + i % OUTS, load(gates + i));
                });
            }
        }
#pragma omp for schedule(static)
        for (int row = 0; row < rows; ++row)
            for (int at = 0; at < hidden; at += LANES) {
                Floats sum = add ? wide(add + (int64_t)row * hidden + at) : all(0.0f);
                for (int pair = row * choices; pair < (row + 1) * choices; ++pair)
                    if (chosen[pair] >= 0) sum = all(weights[pair]) * wide(made + (int64_t)pair * hidden + at) + sum;
                store(out + (int64_t)row * hidden + at, sum);
            }
    }
}

#endif

template <class Of>
void run(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
         int experts, int hidden, int inner, int32_t* sorted, bf16* between, float* sums,
         const bf16* add, bf16* out, int threads, const Of& weight_of) {
#ifdef __AMX_BF16__
    if (by_tiles(rows * choices / experts))
        return run_tiles(x, chosen, weights, rows, choices, experts, hidden, inner, sorted, (bf16*)sums, add, out,
                         threads, weight_of);
#endif
    const std::vector<Group> groups = grouped(chosen, rows * choices, experts, MANY, sorted);
    const int num = groups.size(), inner_blocks = inner / OUTS, hidden_blocks = hidden / OUTS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < num * inner_blocks; ++unit) {
            const Group& group = groups[unit / inner_blocks];
            first_products(weight_of(group.expert, 0), unit % inner_blocks, hidden, inner, group, x,
                           sorted, choices, between);
        }
#pragma omp for schedule(dynamic, 1)
        for (int block = 0; block < hidden_blocks; ++block) {
            for (int token = 0; token < rows; ++token)
                for (int i = 0; i < OUTS; i += LANES) {
                    const int64_t at = (int64_t)token * hidden + block * OUTS + i;
                    store(sums + at, add ? wide(add + at) : all(0.0f));
                }
            for (const Group& group : groups)
                second_products(weight_of(group.expert, 1), block, hidden, inner, group, between,
                                sorted, choices, weights, sums);
            for (int token = 0; token < rows; ++token)
                for (int i = 0; i < OUTS; i += LANES) {
                    const int64_t at = (int64_t)token * hidden + block * OUTS + i;
                    store(out + at, load(sums + at));
                }
        }
    }
}

}  // namespace

extern "C" {

// x, out: [rows, hidden]; chosen, weights: [rows, choices]. addresses: of each expert's gate and up,
// then of each expert's down. Room: sorted [pairs], between [pairs, inner], sums [rows, hidden], or half
// as much as [pairs, hidden] if that is more.
// add: [rows, hidden], added before the sum is rounded, or null.
void experts_bf16(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
                  int experts, int hidden, int inner, const uint64_t* addresses, int32_t* sorted,
                  bf16* between, float* sums, const bf16* add, bf16* out, int threads) {
    run(x, chosen, weights, rows, choices, experts, hidden, inner, sorted, between, sums, add, out, threads,
        [=](int expert, int second) { return Bf16Weight{(const bf16*)addresses[second * experts + expert]}; });
}

// As above; addresses: of the codes and of the scales of gate and up of all experts, then of down.
void experts_int4(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
                  int experts, int hidden, int inner, const uint64_t* addresses, int32_t* sorted,
                  bf16* between, float* sums, const bf16* add, bf16* out, int threads) {
    run(x, chosen, weights, rows, choices, experts, hidden, inner, sorted, between, sums, add, out, threads,
        [=](int expert, int second) {
            const int64_t size = (int64_t)(second ? 1 : 2) * hidden * inner;
            return Int4Weight{(const char*)addresses[2 * second] + expert * size / 2,
                              (const bf16*)addresses[2 * second + 1] + expert * size / Int4Block::GROUP};
        });
}

void experts_fp8(const bf16* x, const int64_t* chosen, const float* weights, int rows, int choices,
                 int experts, int hidden, int inner, const uint64_t* addresses, int32_t* sorted,
                 bf16* between, float* sums, const bf16* add, bf16* out, int threads) {
    run(x, chosen, weights, rows, choices, experts, hidden, inner, sorted, between, sums, add, out, threads,
        [=](int expert, int second) {
            const int64_t outs = second ? hidden : 2 * inner, ins = second ? inner : hidden;
            const int64_t groups = outs / OUTS * ((ins + Fp8Block::GROUP - 1) / Fp8Block::GROUP);
            return Fp8Weight{(const char*)addresses[2 * second] + expert * outs * ins,
                             (const float*)addresses[2 * second + 1] + expert * groups};
        });
}
}
