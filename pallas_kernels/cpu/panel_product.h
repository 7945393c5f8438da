// Products of a few rows with a panel, a matrix of a few vectors' columns that lie together.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

// Numbers of a vector, and of a line of memory.
constexpr int kLanes = 16;

// The first number from here on that begins a line of memory; a line more is there.
inline float* aligned(float* from) { return from + -(reinterpret_cast<uintptr_t>(from) / sizeof(float)) % kLanes; }

// Gives kRows rows of `out`, or adds to them, the products of rows of `a`, `inner` numbers each, with Vs vectors of
// each row of `b`. Rows are so many numbers apart.
template <int Vs, bool add>
void multiply_panel(const float* a, int64_t a_stride, int64_t inner, const float* b, int64_t b_stride, float* out,
                    int64_t out_stride) {
  Floats sums[kRows][Vs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < Vs; ++v) sums[r][v] = add ? floats(out + r * out_stride + v * kLanes) : broadcast(0.0f);
  }
  for (int64_t k = 0; k < inner; ++k, b += b_stride) {
    Floats own[Vs];
#pragma GCC unroll 3
    for (int v = 0; v < Vs; ++v) own[v] = floats(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Floats value = in_register(broadcast(a[r * a_stride + k]));
#pragma GCC unroll 3
      for (int v = 0; v < Vs; ++v) sums[r][v] = fma(sums[r][v], own[v], value);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < Vs; ++v) store(out + r * out_stride + v * kLanes, sums[r][v]);
  }
}

// The transposed of some rows of `count` numbers, `stride` apart: number k of row i at to[k * to_stride + i]. What is
// between the last row and the next multiple of kLanes is written too.
inline void transpose_floats(const float* from, int64_t stride, int64_t rows, int64_t count, float* to,
                             int64_t to_stride) {
  alignas(64) float copied[kLanes * 8] = {};
  for (int64_t row = 0; row < rows; row += kLanes) {
    const int64_t there = std::min<int64_t>(kLanes, rows - row);
    for (int64_t k = 0; k < count; k += 8) {
      const float* own = from + row * stride + k;
      const int64_t numbers = std::min<int64_t>(8, count - k);
      int64_t apart = stride;
      if (there < kLanes || numbers < 8) {
        for (int64_t i = 0; i < there; ++i) std::copy_n(own + i * stride, numbers, copied + i * 8);
        own = copied, apart = 8;
      }
      Ints columns[8];
      transposed(reinterpret_cast<const uint8_t*>(own), apart * sizeof(float), columns);
      for (int64_t i = 0; i < numbers; ++i) store(to + (k + i) * to_stride + row, columns[i]);
    }
  }
}
