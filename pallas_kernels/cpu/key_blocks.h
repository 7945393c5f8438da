// Keys of prompts in blocks, transposed for products with a few queries at a time.

#pragma once

#include <algorithm>
#include <cstdint>

#include "panel_product.h"

// Vectors that a product adds to at once, of kRows rows.
constexpr int kVectors = kUnsigned ? 2 : 1;
// Keys of a block, and of a panel: what is transposed together. Blocks begin at multiples of it, so that a query's
// result does not depend on what is beside it.
constexpr int64_t kBlock = 128, kKeys = kVectors * kLanes;

// Numbers as floats: where they are, or converted to `to`. A bfloat16's bits are the upper half of a float's.
inline const float* as_floats(const void* from, bool narrow, int64_t start, int64_t count, float* to) {
  if (!narrow) return static_cast<const float*>(from) + start;
  const auto* own = static_cast<const uint16_t*>(from) + start;
  for (int64_t i = 0; i < count; i += kLanes) widen_halves(own + i, false, to + i, nullptr);
  return to;
}

// A block's keys transposed, [panels, dim, kKeys].
inline void transpose_keys(const float* from, int64_t count, int64_t dim, float* to) {
  for (int64_t key = 0; key < count; key += kKeys) {
    transpose_floats(from + key * dim, dim, std::min(kKeys, count - key), dim, to + key * dim, kKeys);
  }
}

// Products of kRows queries with a block's first keys, in whole vectors of them: into[r * kBlock + key].
inline void multiply_keys(const float* q, const float* keys, int64_t dim, int64_t wide, float* into) {
  int64_t key = 0;
  for (; key + kKeys <= wide; key += kKeys) {
    multiply_panel<kVectors, false>(q, dim, dim, keys + key * dim, kKeys, into + key, kBlock);
  }
  if (key < wide) multiply_panel<1, false>(q, dim, dim, keys + key * dim, kKeys, into + key, kBlock);
}
