// Rows of zeros, which padding of prompts is: their products with numbers that are finite are zeros, and nothing is
// multiplied for them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"

// Whether any of the numbers is not zero.
inline bool any_nonzero(const float* from, int64_t count) {
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

// Which groups of `each` rows, the rows that are multiplied together, have a number that is not zero.
class NonzeroRows {
 public:
  NonzeroRows(int64_t rows, int64_t each) : rows_(rows), each_(each), groups_((rows + each - 1) / each) {}

  // Finds them in x, [rows, count]. False without memory.
  [[nodiscard]] bool find(xla::ffi::ThreadPool& pool, const float* x, int64_t count) {
    const int64_t part = rows_of_a_task(pool, groups_.size(), each_ * count * sizeof(float), 1);
    return parallel(pool, groups_.size(), part, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = i * each_, own = std::min(each_, rows_ - row);
        groups_[i] = any_nonzero(x + row * count, own * count);
      }
    });
  }

  // Whether the group that a row begins is one of them.
  bool operator[](int64_t row) const { return groups_[row / each_] != 0; }

 private:
  int64_t rows_, each_;
  std::vector<char> groups_;
};

// Zeros for `rows` rows of results, `stride` apart.
inline void put_zeros(float* out, int64_t rows, int64_t count, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) std::fill_n(out + r * stride, count, 0.0f);
}
