// out[j * out_stride + i] = in[i * in_stride + j], tile by tile in registers. Strides count elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace grpo {

// 16 bytes, one row of a square tile. Interleaving rows i and i + N/2 of N rows, log2(N) times, transposes the tile.
template <typename T>
struct Tile {
    static constexpr int kSide = static_cast<int>(16 / sizeof(T));
    typedef T Vector __attribute__((vector_size(16)));

    static Vector low(Vector a, Vector b) {
        if constexpr (sizeof(T) == 1) return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        else if constexpr (sizeof(T) == 2) return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        else if constexpr (sizeof(T) == 4) return __builtin_shufflevector(a, b, 0, 4, 1, 5);
        else return __builtin_shufflevector(a, b, 0, 2);
    }
    static Vector high(Vector a, Vector b) {
        if constexpr (sizeof(T) == 1) return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        else if constexpr (sizeof(T) == 2) return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
        else if constexpr (sizeof(T) == 4) return __builtin_shufflevector(a, b, 2, 6, 3, 7);
        else return __builtin_shufflevector(a, b, 1, 3);
    }

    static void transpose(const T* in, int64_t in_stride, T* out, int64_t out_stride) {
        Vector rows[kSide], mixed[kSide];
        for (int i = 0; i < kSide; ++i) memcpy(&rows[i], in + i * in_stride, 16);
        for (int step = 1; step < kSide; step *= 2) {
            for (int i = 0; i < kSide / 2; ++i) {
                mixed[2 * i] = low(rows[i], rows[i + kSide / 2]);
                mixed[2 * i + 1] = high(rows[i], rows[i + kSide / 2]);
            }
            for (int i = 0; i < kSide; ++i) rows[i] = mixed[i];
        }
        for (int j = 0; j < kSide; ++j) memcpy(out + j * out_stride, &rows[j], 16);
    }
};

// Panels of one cache line's width go down all rows of `in`, so each line of `in` is read once and whole.
template <typename T>
void transpose(const T* in, int64_t in_stride, int64_t in_rows, int64_t in_columns, T* out, int64_t out_stride) {
    constexpr int64_t kSide = Tile<T>::kSide, kPanel = 64 / static_cast<int64_t>(sizeof(T)), kAhead = 2 * kSide;
    for (int64_t panel = 0; panel < in_columns; panel += kPanel) {
        const int64_t width = std::min(kPanel, in_columns - panel), whole = width / kSide * kSide;
        int64_t i = 0;
        for (; i + kSide <= in_rows; i += kSide) {
            if (i + kAhead + kSide <= in_rows)
                for (int64_t k = 0; k < kSide; ++k) __builtin_prefetch(in + (i + kAhead + k) * in_stride + panel);
            for (int64_t j = panel; j < panel + whole; j += kSide) Tile<T>::transpose(in + i * in_stride + j, in_stride, out + j * out_stride + i, out_stride);
            for (int64_t j = panel + whole; j < panel + width; ++j)
                for (int64_t k = i; k < i + kSide; ++k) out[j * out_stride + k] = in[k * in_stride + j];
        }
        for (; i < in_rows; ++i)
            for (int64_t j = panel; j < panel + width; ++j) out[j * out_stride + i] = in[i * in_stride + j];
    }
}

}  // namespace grpo
