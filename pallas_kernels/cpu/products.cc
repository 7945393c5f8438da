// Products of activations with a matrix of int8 numbers, for XLA's CPU backend: called as foreign functions.
//
// Activations are rounded as kvjax.model.quantised.rounded does; sums are exact in int32, so that a row's result does
// not depend on the rows beside it, on threads or on instructions.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace ffi = xla::ffi;

namespace {

using Rows = ffi::Buffer<ffi::F32, 2>;
using Matrix = ffi::Buffer<ffi::S8, 2>;
using Scales = ffi::Buffer<ffi::F32, 1>;
using Result = ffi::ResultBuffer<ffi::F32, 2>;

// Most rows of activations that a tile multiplies; outputs in a part of a matrix are a multiple of kTile.
constexpr int kRows = 8, kTile = 16;
// Bytes of a task, about: so few that threads end together, so many that a thread reads a long run of memory.
constexpr int64_t kTask = 64 << 10;
// Bytes that rows of activations are padded to, zeros: those of the widest vector.
constexpr int64_t kVector = 64;

// Rows of so many bytes in a task: a multiple of kTile.
int64_t rows_of_a_task(int64_t bytes) {
  const int64_t tiles = (kTask / std::max<int64_t>(bytes, 1) + kTile - 1) / kTile;
  return std::max<int64_t>(tiles, 1) * kTile;
}

// Rounded activations: of each row its parts, one after the other, whose sum stands for it.
struct Rounded {
  int64_t stride;                    // bytes from a row to the next
  std::vector<int8_t> values;        // [rows, stride], zeros beyond a row's own
  std::vector<float> step;           // [rows]
  std::vector<uint32_t> correction;  // [rows], the zero point times the sum of a row's values
};

// The largest absolute value; NaN if there is one, whose bits are the largest.
float largest(const float* row, int64_t count) {
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

// A sum without the weights' zero point. It wraps around, as the instructions do: what is within int32 is right.
inline float corrected(int32_t sum, uint32_t correction) {
  return static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(sum) - correction));
}

// Rounds a row; into `rest`, unless it is null, goes what that leaves. Returns the sum of the values.
uint32_t round_row(const float* row, int64_t count, int8_t* values, float* step, float* rest) {
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

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// The instruction multiplies unsigned numbers by signed ones: weights are read 128 larger than they are.
constexpr uint32_t kZeroPoint = 128;

// Lane i of the result is the sum of the lanes of a[i].
[[gnu::always_inline]] inline __m512i lane_sums(const __m512i (&a)[16]) {
  __m512i twos[8], fours[4], eights[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    twos[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_unpacklo_epi64(twos[2 * i], twos[2 * i + 1]);
    fours[i] = _mm512_add_epi32(low, _mm512_unpackhi_epi64(twos[2 * i], twos[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i even = _mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0x88);
    eights[i] = _mm512_add_epi32(even, _mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  }
  const __m512i even = _mm512_shuffle_i32x4(eights[0], eights[1], 0x88);
  return _mm512_add_epi32(even, _mm512_shuffle_i32x4(eights[0], eights[1], 0xdd));
}

// Sums of R rows of activations with 16 / R of weights: found[r * 16 / R + o].
//
// One output after the other: each is a stream of memory. With many rows, arithmetic keeps the processor from reading
// ahead by itself.
template <int R>
void tile(const int8_t* x, int64_t stride, const int8_t* const* weights, int64_t inputs, int32_t* found) {
  constexpr int O = kTile / R;
  __m512i sums[kTile];
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r * O + o] = _mm512_setzero_si512();
    const int8_t* own = weights[o];
    const auto add = [&](int64_t k, __m512i numbers) __attribute__((always_inline)) {
      const __m512i w = _mm512_xor_si512(numbers, sign);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        sums[r * O + o] = _mm512_dpbusd_epi32(sums[r * O + o], w, _mm512_loadu_si512(x + r * stride + k));
      }
    };
    int64_t k = 0;
    for (; k + 64 <= inputs; k += 64) {
      if (R > 2) _mm_prefetch(reinterpret_cast<const char*>(own + k + 4 * inputs), _MM_HINT_T0);
      add(k, _mm512_loadu_si512(own + k));
    }
    if (k < inputs) add(k, _mm512_maskz_loadu_epi8(~0ull >> (64 - (inputs - k)), own + k));
  }
  _mm512_storeu_si512(found, lane_sums(sums));
}

#elif defined(__AVX2__)

constexpr uint32_t kZeroPoint = 0;

[[gnu::always_inline]] inline int32_t lane_sum(__m256i a) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

// As above. |w| x with w's sign: of two such products, at most 2 x 127 x 128, int16 holds the sum.
template <int R>
void tile(const int8_t* x, int64_t stride, const int8_t* const* weights, int64_t inputs, int32_t* found) {
  constexpr int O = kTile / R;
  const __m256i ones = _mm256_set1_epi16(1);
  for (int o = 0; o < O; ++o) {
    __m256i sums[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = _mm256_setzero_si256();
    for (int64_t k = 0; k < inputs; k += 32) {
      const int8_t* own = weights[o] + k;
      if (R > 2) _mm_prefetch(reinterpret_cast<const char*>(own + 4 * inputs), _MM_HINT_T0);
      alignas(32) int8_t last[32] = {0};
      if (inputs - k < 32) own = static_cast<const int8_t*>(std::memcpy(last, own, inputs - k));
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(own)), size = _mm256_abs_epi8(w);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + r * stride + k));
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(row, w));
        sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) found[r * O + o] = lane_sum(sums[r]);
  }
}

#else
#error "These products are written for x86-64 with AVX2."
#endif

// Sums of R rows with the outputs first..last: into[r * (last - first) + o].
template <int R>
void sums_of(const Rounded& x, int64_t row, const int8_t* weights, int64_t inputs, int64_t first, int64_t last,
             int32_t* into) {
  constexpr int O = kTile / R;
  const int64_t width = last - first;
  int32_t found[kTile];
  const int8_t* rows[O];
  for (int64_t n = first; n < last; n += O) {
    for (int o = 0; o < O; ++o) rows[o] = weights + std::min(n + o, last - 1) * inputs;
    tile<R>(x.values.data() + row * x.stride, x.stride, rows, inputs, found);
    const int64_t count = std::min<int64_t>(O, last - n);
    for (int r = 0; r < R; ++r) std::copy_n(found + r * O, count, into + r * width + (n - first));
  }
}

// x [S, K] times a matrix [N, K] of numbers, each row of which has a scale; P is the parts that x is rounded into.
template <int P>
ffi::Error product(ffi::ThreadPool pool, Rows x, Matrix matrix, Scales scale, Result out) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = matrix.dimensions()[0];
  if (matrix.dimensions()[1] != inputs || scale.dimensions()[0] != outputs) {
    return ffi::Error::InvalidArgument("The matrix has other inputs, or its scales other outputs.");
  }
  // Tiles read as many rows as they are made for.
  const int64_t padded = (rows * P + kRows - 1) / kRows * kRows;
  Rounded rounded{(inputs + kVector - 1) / kVector * kVector, {}, {}, {}};
  rounded.values.resize(padded * rounded.stride);
  rounded.step.resize(padded);
  rounded.correction.resize(padded);
  const bool done = parallel(pool, rows, rows_of_a_task(inputs * sizeof(float)), [&](int64_t first, int64_t last) {
    std::vector<float> rest(P > 1 ? inputs : 0);
    for (int64_t row = first; row < last; ++row) {
      const float* own = x.typed_data() + row * inputs;
      for (int64_t i = row * P; i < (row + 1) * P; ++i, own = rest.data()) {
        float* left = i + 1 < (row + 1) * P ? rest.data() : nullptr;
        int8_t* values = rounded.values.data() + i * rounded.stride;
        rounded.correction[i] = kZeroPoint * round_row(own, inputs, values, &rounded.step[i], left);
      }
    }
  });
  if (!done) return out_of_memory();
  const int8_t* weights = matrix.typed_data();
  const float* scales = scale.typed_data();
  float* result = out->typed_data();
  const bool multiplied = parallel(pool, outputs, rows_of_a_task(inputs), [&](int64_t first, int64_t last) {
    const int64_t width = last - first;
    std::vector<int32_t> sums(kRows * width);
    for (int64_t row = 0; row < rows * P; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, rows * P - row);
      const auto fill = count == 1 ? sums_of<1> : count == 2 ? sums_of<2> : count <= 4 ? sums_of<4> : sums_of<8>;
      fill(rounded, row, weights, inputs, first, last, sums.data());
      for (int64_t r = 0; r < count; r += P) {
        float* __restrict own = result + (row + r) / P * outputs + first;
        const int32_t* __restrict sum = sums.data() + r * width;
        const float *step = rounded.step.data() + row + r, *of = scales + first;
        const uint32_t* correction = rounded.correction.data() + row + r;
        for (int64_t n = 0; n < width; ++n) {
          float found = corrected(sum[n], correction[0]) * step[0];
          if (P == 2) found += corrected(sum[width + n], correction[1]) * step[1];
          own[n] = found * of[n];
        }
      }
    }
  });
  return multiplied ? ffi::Error::Success() : out_of_memory();
}

template <int P>
ffi::Error guarded_product(ffi::ThreadPool pool, Rows x, Matrix matrix, Scales scale, Result out) {
  return guarded([&] { return product<P>(pool, x, matrix, scale, out); });
}

}  // namespace

#define KVJAX_PRODUCT(name, parts)  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(    \
      name, guarded_product<parts>, \
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Rows>().Arg<Matrix>().Arg<Scales>().Ret<Rows>())

KVJAX_PRODUCT(kvjax_int8_product, 1);
KVJAX_PRODUCT(kvjax_fine_int8_product, 2);
