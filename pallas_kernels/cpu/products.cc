// Products of activations with a matrix of int8 numbers, for XLA's CPU backend: called as foreign functions.
//
// Activations are rounded as kvjax.model.quantised.rounded does; sums are exact in int32, so that a row's result does
// not depend on the rows beside it, on threads or on instructions.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "columns.h"
#include "padding.h"
#include "parallel.h"
#include "rounding.h"

namespace ffi = xla::ffi;

namespace {

using Rows = ffi::Buffer<ffi::F32, 2>;
using Matrix = ffi::Buffer<ffi::S8, 2>;
using Scales = ffi::Buffer<ffi::F32, 1>;
using Result = ffi::ResultBuffer<ffi::F32, 2>;

// Outputs in a part of a matrix are a multiple of it.
constexpr int kTile = 16;
static_assert(kTile == kPanel);
// Most rows of activations that are multiplied by rows of numbers as they are; of more, numbers are transposed into
// columns.
constexpr int kFew = 8;
// What rows of rounded activations are padded to.
constexpr int kPadded = std::max(kFew, kRows);
// Bytes between what R rows of activations are multiplied with and what is asked for of a matrix.
template <int R>
constexpr int64_t kAhead = R > 2 ? 8 << 10 : 2 << 10;
// What rows of activations are padded to with zeros, and begin at a multiple of: the widest vector.
struct alignas(64) Line {
  int8_t values[64];
};
constexpr int64_t kVector = sizeof(Line);

// The instruction may multiply unsigned numbers by signed ones: weights are read 128 larger than they are.
constexpr uint32_t kZeroPoint = kUnsigned ? 128 : 0;

// Rounded activations: of each row its parts, one after the other, whose sum stands for it.
struct Rounded {
  int64_t stride;                    // bytes from a row to the next, a multiple of kVector
  std::vector<Line> lines;           // [rows, stride / kVector], zeros beyond a row's own
  std::vector<float> step;           // [rows]
  std::vector<uint32_t> correction;  // [rows], the zero point times the sum of a row's values

  Rounded(int64_t rows, int64_t inputs) : stride((inputs + kVector - 1) / kVector * kVector) {
    lines.resize(rows * stride / kVector), step.resize(rows), correction.resize(rows);
  }

  int8_t* row(int64_t i) { return lines.data()->values + i * stride; }
  const int8_t* row(int64_t i) const { return lines.data()->values + i * stride; }
};

// A sum without the weights' zero point. It wraps around, as the instructions do: what is within int32 is right.
inline float corrected(int32_t sum, uint32_t correction) {
  return static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(sum) - correction));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

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
      _mm_prefetch(reinterpret_cast<const char*>(own + k + kAhead<R>), _MM_HINT_T1);
      add(k, _mm512_loadu_si512(own + k));
    }
    if (k < inputs) add(k, _mm512_maskz_loadu_epi8(~0ull >> (64 - (inputs - k)), own + k));
  }
  _mm512_storeu_si512(found, lane_sums(sums));
}

#elif defined(__AVX2__)

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
      _mm_prefetch(reinterpret_cast<const char*>(own + kAhead<R>), _MM_HINT_T1);
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
void sums_of(const Rounded& x, const int8_t* weights, int64_t inputs, int64_t first, int64_t last, int32_t* into) {
  constexpr int O = kTile / R;
  const int64_t width = last - first;
  int32_t found[kTile];
  const int8_t* rows[O];
  for (int64_t n = first; n < last; n += O) {
    for (int o = 0; o < O; ++o) rows[o] = weights + std::min(n + o, last - 1) * inputs;
    tile<R>(x.row(0), x.stride, rows, inputs, found);
    const int64_t count = std::min<int64_t>(O, last - n);
    for (int r = 0; r < R; ++r) std::copy_n(found + r * O, count, into + r * width + (n - first));
  }
}

// Sums of R rows with a panel that was transposed into columns: into[r * kPanel + o].
template <int R>
void sums_of_columns(const Rounded& x, int64_t row, const std::vector<Column>& columns, int32_t* into) {
  Ints sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = broadcast(0);
  const int8_t* own = x.row(row);
  for (const Column& column : columns) {
    add_column(own, x.stride, ints(column.numbers), sums);
    own += 4;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(into + r * kPanel, sums[r]);
}

// The arguments of a product with activations that are rounded into P parts.
template <int P>
struct Problem {
  int64_t rows, inputs, outputs;
  const float* x;
  const int8_t* weights;
  const float* scale;
  float* out;

  void round(int64_t first, int64_t last, Rounded& rounded) const {
    std::vector<float> rest(P > 1 ? inputs : 0);
    for (int64_t row = first; row < last; ++row) {
      const float* own = x + row * inputs;
      for (int64_t i = row * P; i < (row + 1) * P; ++i, own = rest.data()) {
        float* left = i + 1 < (row + 1) * P ? rest.data() : nullptr;
        int8_t* values = rounded.row(i);
        rounded.correction[i] = kZeroPoint * round_row(own, inputs, values, &rounded.step[i], left);
      }
    }
  }

  // Results of `count` rounded rows for the outputs first..first + width, of their sums.
  void put(const Rounded& rounded, const int32_t* sums, int64_t row, int64_t count, int64_t first, int64_t width,
           int64_t stride) const {
    for (int64_t r = 0; r < count; r += P) {
      float* __restrict own = out + (row + r) / P * outputs + first;
      const int32_t* __restrict sum = sums + r * stride;
      const float *step = rounded.step.data() + row + r, *of = scale + first;
      const uint32_t* correction = rounded.correction.data() + row + r;
      for (int64_t n = 0; n < width; ++n) {
        float found = corrected(sum[n], correction[0]) * step[0];
        if (P == 2) found += corrected(sum[stride + n], correction[1]) * step[1];
        own[n] = found * of[n];
      }
    }
  }

  // Few rows, with rows of numbers as they are.
  void multiply_few(const Rounded& rounded, int64_t first, int64_t last) const {
    const int64_t count = rows * P, width = last - first;
    std::vector<int32_t> sums(kFew * width);
    const auto fill = count == 1 ? sums_of<1> : count == 2 ? sums_of<2> : count <= 4 ? sums_of<4> : sums_of<kFew>;
    fill(rounded, weights, inputs, first, last, sums.data());
    put(rounded, sums.data(), 0, count, first, width, width);
  }

  // Many rows, with each panel of numbers transposed into columns once.
  void multiply_many(const Rounded& rounded, const NonzeroRows& nonzero, int64_t first, int64_t last) const {
    std::vector<Column> columns((inputs + 3) / 4);
    alignas(kColumn) int32_t sums[kRows * kPanel];
    for (int64_t n = first; n < last; n += kPanel) {
      const int64_t width = std::min<int64_t>(kPanel, last - n);
      const auto* own = reinterpret_cast<const uint8_t*>(weights + n * inputs);
      Column* to = columns.data();
      const auto keep = [&](const Ints(&found)[8], int count) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          if (i == count) break;
          store(to++, as_multiplied(found[i]));
        }
      };
      for_each_column<_MM_HINT_T1>(own, inputs, width, own + kPanel * inputs, keep);
      for (int64_t row = 0; row < rows * P; row += kRows) {
        const int64_t count = std::min<int64_t>(kRows, rows * P - row);
        if (!nonzero[row / P]) {
          put_zeros(out + row / P * outputs + n, count / P, width, outputs);
          continue;
        }
        (2 * count > kRows ? sums_of_columns<kRows> : sums_of_columns<kRows / 2>)(rounded, row, columns, sums);
        put(rounded, sums, row, count, n, width, kPanel);
      }
    }
  }
};

// x [S, K] times a matrix [N, K] of numbers, each row of which has a scale; P is the parts that x is rounded into.
template <int P>
ffi::Error product(ffi::ThreadPool pool, Rows x, Matrix matrix, Scales scale, Result out) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = matrix.dimensions()[0];
  if (matrix.dimensions()[1] != inputs || scale.dimensions()[0] != outputs) {
    return ffi::Error::InvalidArgument("The matrix has other inputs, or its scales other outputs.");
  }
  const Problem<P> p{rows, inputs, outputs, x.typed_data(), matrix.typed_data(), scale.typed_data(), out->typed_data()};
  // Rows that are multiplied together with the last ones are zeros.
  const int64_t padded = (rows * P + kPadded - 1) / kPadded * kPadded;
  Rounded rounded(padded, inputs);
  const bool done = parallel(pool, rows, rows_of_a_task(pool, rows, inputs * sizeof(float), 1),
                             [&](int64_t first, int64_t last) { p.round(first, last, rounded); });
  const bool few = rows * P <= kFew;
  NonzeroRows nonzero(rows, kRows / P);
  if (!done || (!few && !nonzero.find(pool, p.x, inputs))) return out_of_memory();
  const bool multiplied =
      parallel(pool, outputs, rows_of_a_task(pool, outputs, inputs, kTile), [&](int64_t first, int64_t last) {
        few ? p.multiply_few(rounded, first, last) : p.multiply_many(rounded, nonzero, first, last);
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
