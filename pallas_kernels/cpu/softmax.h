// The softmax of a row of scores, sixteen at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace softmax {

// 16 numbers, which the compiler makes of whatever vectors the processor has.
constexpr int kLanes = 16;
using V = float __attribute__((vector_size(4 * kLanes)));
using I = int32_t __attribute__((vector_size(4 * kLanes)));

// pallas_kernels.softmax.NEG.
constexpr float kNeg = -0.7f * 3.4028234663852886e38f;

inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }

// exp(x) for x <= 0: within 2 units in the last place, 0 where that is below what a float holds, NaN of NaN.
inline V exponential(V x) {
  constexpr float kLeast = -87.0f, kMagic = 12582912.0f;  // 1.5 x 2^23: adding it rounds
  const V least = V{} + kLeast;
  const auto none = x < least;
  const V within = none ? least : x;
  const V shifted = within * 1.44269504088896341f + kMagic, n = shifted - kMagic;
  const V r = within - n * 0.693359375f - n * -2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // The lowest bits of `shifted` are n's, above those of kMagic.
  I bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  V power;
  std::memcpy(&power, &bits, sizeof power);
  return none ? V{} : p * power;
}

// Bounds scores: cap tanh(score / cap).
inline void bound(float* scores, int64_t count, float cap) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const V score = load(scores + j), size = score < 0.0f ? -score : score;
    const V shrunk = exponential(size * (-2.0f / cap));
    const V bounded = cap * (1.0f - shrunk) / (1.0f + shrunk);
    store(scores + j, score < 0.0f ? -bounded : bounded);
  }
}

// The largest of some scores, in whole vectors, or `peak` where that is larger.
inline float largest(const float* scores, int64_t count, float peak) {
  V peaks = V{} + peak;
  for (int64_t j = 0; j < count; j += kLanes) {
    const V s = load(scores + j);
    peaks = s > peaks ? s : peaks;
  }
  for (int i = 0; i < kLanes; ++i) peak = std::max(peak, peaks[i]);
  return peak;
}

// Makes weights of scores, none above `peak`; their sum.
inline float weigh(float* scores, int64_t count, float peak) {
  V masses = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const V weight = exponential(load(scores + j) - peak);
    masses += weight;
    store(scores + j, weight);
  }
  float mass = 0;
  for (int i = 0; i < kLanes; ++i) mass += masses[i];
  return mass;
}

// Adds to each sum a weight times exp(score - normaliser), which is at most 1.
inline void add_weighed(const float* scores, int64_t count, float normaliser, float weight, float* sums) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const V shifted = load(scores + j) - normaliser;
    store(sums + j, load(sums + j) + weight * exponential(shifted > 0.0f ? V{} : shifted));
  }
}

}  // namespace softmax
