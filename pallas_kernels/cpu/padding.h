// Rows of zeros, which padding of prompts is: their products with numbers that are finite are zeros, and nothing is
// multiplied for them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"

// Whether a number is not zero.
inline bool any_number(const float* from, int64_t count) {
  constexpr int64_t kTogether = 64;
  for (int64_t i = 0; i < count; i += kTogether) {
    uint32_t found = 0;
    for (int64_t j = i; j < std::min(i + kTogether, count); ++j) {
      uint32_t bits;
      std::memcpy(&bits, from + j, sizeof bits);
      found |= bits & 0x7fffffffu;  // both zeros are
    }
    if (found != 0) return true;
  }
  return false;
}

// Rows, `each` of which are multiplied together, that are to be: those with a number that is not zero.
class Live {
 public:
  Live(int64_t rows, int64_t each) : rows_(rows), each_(each), live_((rows + each - 1) / each) {}

  // Looks at the rows, [rows, count]. False without memory.
  [[nodiscard]] bool look(xla::ffi::ThreadPool& pool, const float* x, int64_t count) {
    const int64_t part = rows_of_a_task(pool, live_.size(), each_ * count * sizeof(float), 1);
    return parallel(pool, live_.size(), part, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = i * each_, own = std::min(each_, rows_ - row);
        live_[i] = any_number(x + row * count, own * count);
      }
    });
  }

  // Those of a row, which is the first of some.
  bool operator[](int64_t row) const { return live_[row / each_] != 0; }

 private:
  int64_t rows_, each_;
  std::vector<char> live_;
};

// Zeros for `rows` rows of results, `stride` apart.
inline void put_zeros(float* out, int64_t rows, int64_t count, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) std::fill_n(out + r * stride, count, 0.0f);
}
