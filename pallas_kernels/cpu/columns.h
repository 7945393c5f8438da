// Rows of bytes transposed into columns, for products of int8 numbers: sixteen rows at a time become columns of four
// inputs, which an instruction multiplies by four activations. It then has a sum for each row of bytes, and nothing is
// left to add across lanes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

// Four inputs of each row of a panel.
struct alignas(kColumn) Column {
  uint8_t numbers[kColumn];
};

// Gives take(columns, count) what a panel of `count` rows has as columns, kTransposed bytes of each row at a time or
// what is left. `next` is where as much is read after that: asked for into the second cache where a panel is too large
// for the first beside what it is multiplied with.
template <_mm_hint cache, typename Take>
[[gnu::always_inline]] inline void for_each_column(const uint8_t* from, int64_t bytes, int64_t count,
                                                   const uint8_t* next, const Take& take) {
  // What is read beyond rows, or beyond their ends, is there and zero.
  const int64_t chunks = (bytes + kTransposed - 1) / kTransposed;
  const bool fits = count == kPanel && bytes == chunks * kTransposed;
  const int64_t stride = fits ? bytes : chunks * kTransposed;
  std::vector<uint8_t> copied(fits ? 0 : kPanel * stride);
  if (!fits) {
    for (int64_t i = 0; i < count; ++i) std::copy_n(from + i * bytes, bytes, copied.data() + i * stride);
    from = copied.data();
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk, from += kTransposed) {
    for (int i = 0; i < kPanel * kTransposed; i += 64, next += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(next), cache);
    }
    Ints columns[8];
    transposed(from, stride, columns);
    take(columns, static_cast<int>((std::min<int64_t>(kTransposed, bytes - chunk * kTransposed) + 3) / 4));
  }
}

// Adds four activations of each of R rows, so many bytes apart, times a column's numbers.
template <int R>
[[gnu::always_inline]] inline void add_column(const int8_t* x, int64_t stride, Ints numbers, Ints (&dots)[R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    int32_t four;
    std::memcpy(&four, x + r * stride, sizeof four);
    dots[r] = add_dot4(dots[r], numbers, four);
  }
}

// Numbers of 8 bits as the instruction takes them.
[[gnu::always_inline]] inline Ints as_multiplied(Ints bytes) {
  return kUnsigned ? bit_xor(bytes, broadcast(static_cast<int32_t>(0x80808080u))) : bytes;
}
