// Tiles of bfloat16 (AMX): 16 rows of 64 bytes, which one instruction multiplies and adds. Linux
// wants to be asked for them once a process (`build.py` asks), and a thread configures them before
// it uses them.

#pragma once

#ifdef __AMX_BF16__

#include <memory>

#include "lanes.h"

namespace {

constexpr int TILE = 16;           // rows, and outs, of a tile of sums
constexpr int DEEP = 32;           // ins of a tile: 64 bytes
constexpr int ROWS_OF_TILES = 32;  // rows whose sums fit the tiles, with as many outs
constexpr int OUTS_OF_TILES = 32;

// The compiler's own functions do not say that they read and write memory.
template <int T>
inline void load_tile(const void* from, int64_t bytes_of_row) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes_of_row), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t bytes_of_row) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes_of_row), "i"(T) : "memory");
}
template <int T>
inline void clear_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
// The sums T grow by the rows A times the pairs B.
template <int T, int A, int B>
inline void dot_tile() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}

// This thread's tiles, until the end of the scope: 0 to 3 are sums (two tiles of rows, two of outs),
// 4 and 5 rows, 6 and 7 a weight.
class Tiles {
    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };
    int rows_ = 0;

    void shape(int first, int second) {
        Config config;
        const int rows[8] = {first, first, second, second, first, second, TILE, TILE};
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes[tile] = 64;
            config.rows[tile] = (uint8_t)rows[tile];
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }

  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (rows_) __asm__ volatile("tilerelease");
    }

    // From here on, tiles of `num` rows, at most ROWS_OF_TILES. With no more than TILE all sums are
    // of the same rows.
    void rows(int num) {
        if (num == rows_) return;
        rows_ = num;
        if (num <= TILE) shape(num, num);
        else shape(TILE, num - TILE);
    }

    // to [num][outs] = the products of `num` rows, at most ROWS_OF_TILES, with `outs` outs (64 for up
    // to TILE rows, else a multiple of 32), in the order of `Bf16Block`. ins: a multiple of DEEP. ADD:
    // they are added to what is there, of more than TILE rows.
    template <bool ADD = false>
    void multiply(const bf16* values, int64_t next, int outs, int ins, int num, const bf16* x, int64_t stride,
                  float* to) {
        constexpr int64_t PAIRS = 4 * OUTS_OF_TILES;  // bytes of a pair of ins
        constexpr int STEP = DEEP * OUTS_OF_TILES;    // numbers of a weight's tiles
        const int64_t row = 2 * stride, sums = 4 * outs;
        rows(num);
        if (num <= TILE) {
            clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
            for (int in = 0; in < ins; in += DEEP, values += STEP) {
                load_tile<4>(x + in, row);
                ask_tiles(values), ask_tiles(values + next);
                load_tile<6>(values, PAIRS);
                dot_tile<0, 4, 6>();
                load_tile<7>(values + DEEP, PAIRS);
                dot_tile<1, 4, 7>();
                load_tile<6>(values + next, PAIRS);
                dot_tile<2, 4, 6>();
                load_tile<7>(values + next + DEEP, PAIRS);
                dot_tile<3, 4, 7>();
            }
            store_tile<0>(to, sums), store_tile<1>(to + TILE, sums);
            store_tile<2>(to + 2 * TILE, sums), store_tile<3>(to + 3 * TILE, sums);
            return;
        }
        for (int out = 0; out < outs; out += OUTS_OF_TILES) {
            const bf16* w = values + out / OUTS_OF_TILES * next;
            float *above = to + out, *below = above + TILE * outs;
            if (ADD) {
                load_tile<0>(above, sums), load_tile<1>(above + TILE, sums);
                load_tile<2>(below, sums), load_tile<3>(below + TILE, sums);
            } else {
                clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
            }
            for (int in = 0; in < ins; in += DEEP, w += STEP) {
                load_tile<4>(x + in, row);
                load_tile<6>(w, PAIRS);
                dot_tile<0, 4, 6>();
                load_tile<7>(w + DEEP, PAIRS);
                dot_tile<1, 4, 7>();
                load_tile<5>(x + TILE * stride + in, row);
                dot_tile<2, 5, 6>();
                dot_tile<3, 5, 7>();
            }
            store_tile<0>(above, sums), store_tile<1>(above + TILE, sums);
            store_tile<2>(below, sums), store_tile<3>(below + TILE, sums);
        }
    }

  private:
    static void ask_tiles(const bf16* values) {
        for (int line = 0; line < DEEP; ++line) _mm_prefetch((const char*)values + 4096 + 64 * line, _MM_HINT_T0);
    }
};

// to[i] = the i-th words of the 16 rows, `bytes_of_row` apart; 16 words of each.
inline void turn_words(const void* from, int64_t bytes_of_row, __m512i* to) {
    __m512i row[16], two[16];
    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_si512((const char*)from + i * bytes_of_row);
    for (int i = 0; i < 16; i += 2) {
        two[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        two[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int high = 0; high < 2; ++high) {
            row[i + 2 * high] = _mm512_unpacklo_epi64(two[i + high], two[i + 2 + high]);
            row[i + 2 * high + 1] = _mm512_unpackhi_epi64(two[i + high], two[i + 2 + high]);
        }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(row[i], row[4 + i], 0x88), b = _mm512_shuffle_i32x4(row[i], row[4 + i], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(row[8 + i], row[12 + i], 0x88), d = _mm512_shuffle_i32x4(row[8 + i], row[12 + i], 0xDD);
        to[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        to[8 + i] = _mm512_shuffle_i32x4(a, c, 0xDD);
        to[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        to[12 + i] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}

// to = 32 rows of `ins` numbers as a weight of 32 outs, in the order of `Bf16Block`.
inline void pack_outs(const bf16* rows, int64_t stride, int ins, bf16* to) {
    for (int in = 0; in < ins; in += DEEP)
        for (int half = 0; half < 2; ++half) {
            __m512i words[16];
            turn_words(rows + half * TILE * stride + in, 2 * stride, words);
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (int64_t)(in + 2 * i) * OUTS_OF_TILES + half * DEEP, words[i]);
        }
}

// Pairs of two rows of 16 sums, rounded.
inline __m512i pairs_of(Floats first, Floats second) {
    alignas(64) static const uint16_t turns[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(turns), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

enum class Room { ROWS, WEIGHT };

// Memory of this thread until it next asks for some of this kind: `size` bytes, aligned to a line.
template <Room = Room::ROWS>
inline char* own_room(size_t size) {
    static thread_local std::unique_ptr<char[]> kept;
    static thread_local size_t room = 0;
    if (size + 64 > room) {
        kept.reset();
        kept.reset(new char[room = size + 64]);
    }
    return kept.get() + (64 - (uintptr_t)kept.get() % 64) % 64;
}

}  // namespace

#endif
