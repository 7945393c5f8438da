// Activations rounded to int8 numbers, as kvjax.model.quantised.rounded does.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// The largest absolute value; NaN if there is one, whose bits are the largest.
inline float largest(const float* row, int64_t count) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, row + i, sizeof bits);
    bits &= 0x7fffffffu;
    found = bits > found ? bits : found;
  }
  float value;
  std::memcpy(&value, &found, sizeof value);
  return value;
}

// Rounds a row; into `rest`, unless it is null, goes what that leaves. Returns the sum of the values.
inline uint32_t round_row(const float* row, int64_t count, int8_t* values, float* step, float* rest) {
  float s = largest(row, count) * (1.0f / 127);
  s = s == 0 ? 1.0f : s;
  const bool finite = std::isfinite(s);  // 0 times a step that is not is NaN
  uint32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t whole = finite ? static_cast<int32_t>(std::nearbyint(row[i] / s)) : 0;
    values[i] = static_cast<int8_t>(whole);
    sum += static_cast<uint32_t>(whole);
  }
  if (rest != nullptr) {
    for (int64_t i = 0; i < count; ++i) rest[i] = row[i] - static_cast<float>(values[i]) * s;
  }
  *step = s;
  return sum;
}
