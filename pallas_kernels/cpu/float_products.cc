// Products of a few rows of activations with a float32 matrix, for XLA's CPU backend: called as foreign functions.
//
// So few rows are bound by reading the matrix: it is asked for long before it is used, and read once. A row's result
// does not depend on the rows beside it or on threads: inputs are added in the same order.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "vectors.h"

namespace ffi = xla::ffi;

namespace {

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Result = ffi::ResultBuffer<ffi::F32, 2>;

// Numbers of a vector, and of a line of memory.
constexpr int kLanes = 16;
// Outputs that are multiplied together, of a matrix [N, K], and vectors of them, of one [K, N]: with kRows rows of
// activations, as many sums as there are registers for.
constexpr int kOutputs = kUnsigned ? 2 : 1, kVectors = kUnsigned ? 3 : 1;
// Inputs that are multiplied at a time with a matrix [N, K]: so few that rows of activations stay in the first cache.
constexpr int64_t kBlock = 640;
// How far ahead a matrix is asked for: rows of [K, N], and of [N, K], of which a block is read.
constexpr int64_t kRowsAhead = 32, kOutputsAhead = 8;

// Into the second cache: the first has too few lines on their way.
inline void prefetch(const float* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1); }

struct Problem {
  int64_t rows, inputs, outputs;
  const float *x, *weights;
  float* out;

  // The last row again, where there is no other.
  const float* row(int64_t i) const { return x + std::min(i, rows - 1) * inputs; }
  int64_t count(int64_t row) const { return std::min<int64_t>(kRows, rows - row); }
};

// A matrix [N, K] ------------------------------------------------------------------------------------------------

// Adds R rows from `row` on times O outputs from n on, of the inputs first..last. `ahead`: what is read later.
template <int R, int O>
void multiply_rows(const Problem& p, int64_t row, int64_t n, int64_t first, int64_t last, const float* ahead) {
  Floats sums[O][R];
  const float *x[R], *weights[O];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = p.row(row + r);
#pragma GCC unroll 2
  for (int o = 0; o < O; ++o) {
    weights[o] = p.weights + std::min(n + o, p.outputs - 1) * p.inputs;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[o][r] = broadcast(0.0f);
  }
  const auto add = [&](const auto& load) __attribute__((always_inline)) {
    Floats own[O];
#pragma GCC unroll 2
    for (int o = 0; o < O; ++o) own[o] = load(weights[o]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats value = in_register(load(x[r]));
#pragma GCC unroll 2
      for (int o = 0; o < O; ++o) sums[o][r] = fma(sums[o][r], own[o], value);
    }
  };
  int64_t k = first;
  for (; k + kLanes <= last; k += kLanes, ahead += kLanes) {
#pragma GCC unroll 2
    for (int o = 0; o < O; ++o) prefetch(ahead + o * p.inputs);
    add([&](const float* from) __attribute__((always_inline)) { return floats(from + k); });
  }
  if (k < last) {
    add([&](const float* from) __attribute__((always_inline)) {
      float some[kLanes] = {};
      std::copy_n(from + k, last - k, some);
      return floats(some);
    });
  }
  for (int64_t r = 0; r < std::min<int64_t>(R, p.rows - row); ++r) {
    float* to = p.out + (row + r) * p.outputs + n;
    for (int64_t o = 0; o < std::min<int64_t>(O, p.outputs - n); ++o) {
      to[o] = (first == 0 ? 0 : to[o]) + lane_sum(sums[o][r]);
    }
  }
}

// The outputs first..last of all rows.
void multiply_outputs(const Problem& p, int64_t first, int64_t last) {
  for (int64_t row = 0; row < p.rows; row += kRows) {
    const int64_t count = p.count(row);
    const auto run = count <= 2   ? multiply_rows<2, kOutputs>
                     : count <= 4 ? multiply_rows<4, kOutputs>
                                  : multiply_rows<kRows, kOutputs>;
    for (int64_t k = 0; k < std::max<int64_t>(p.inputs, 1); k += kBlock) {
      const int64_t end = std::min(k + kBlock, p.inputs);
      for (int64_t n = first; n < last; n += kOutputs) {
        // Behind the last output the next block begins, or the next task. Further rows of activations find all there.
        int64_t later = n + kOutputsAhead, from = k;
        if (later >= last && end < p.inputs) {
          later -= last - first, from = end;
        } else if (later >= last) {
          from = 0;
        }
        run(p, row, n, k, end, p.weights + (row > 0 ? n * p.inputs + k : later * p.inputs + from));
      }
    }
  }
}

// A matrix [K, N] ------------------------------------------------------------------------------------------------

// R rows from `row` on times `Vs` vectors of outputs from n on, which are there.
template <int R, int Vs>
void multiply_columns(const Problem& p, int64_t row, int64_t n) {
  Floats sums[R][Vs];
  const float* x[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    x[r] = p.row(row + r);
#pragma GCC unroll 3
    for (int v = 0; v < Vs; ++v) sums[r][v] = broadcast(0.0f);
  }
  const float* own = p.weights + n;
  for (int64_t k = 0; k < p.inputs; ++k, own += p.outputs) {
    // Behind the last row the next panel begins. Further rows of activations find all in the cache.
    const int64_t later = k + kRowsAhead;
    const float* ahead =
        later < p.inputs ? own + kRowsAhead * p.outputs : p.weights + (later - p.inputs) * p.outputs + n + Vs * kLanes;
    if (row > 0) ahead = own;
    Floats weights[Vs];
#pragma GCC unroll 3
    for (int v = 0; v < Vs; ++v) {
      weights[v] = floats(own + v * kLanes);
      prefetch(ahead + v * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats value = in_register(broadcast(x[r][k]));
#pragma GCC unroll 3
      for (int v = 0; v < Vs; ++v) sums[r][v] = fma(sums[r][v], weights[v], value);
    }
  }
  for (int64_t r = 0; r < std::min<int64_t>(R, p.rows - row); ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < Vs; ++v) store(p.out + (row + r) * p.outputs + n + v * kLanes, sums[r][v]);
  }
}

// One output, of those that fill no vector.
void multiply_column(const Problem& p, int64_t row, int64_t n) {
  float sum = 0;
  for (int64_t k = 0; k < p.inputs; ++k) sum = std::fma(p.weights[k * p.outputs + n], p.row(row)[k], sum);
  p.out[row * p.outputs + n] = sum;
}

// The outputs first..last of all rows.
void multiply_panel(const Problem& p, int64_t first, int64_t last) {
  const auto rows = [&](const auto& run) {
    for (int64_t row = 0; row < p.rows; row += kRows) run(row, p.count(row));
  };
  int64_t n = first;
  for (; n + kVectors * kLanes <= last; n += kVectors * kLanes) {
    rows([&](int64_t row, int64_t count) {
      (count <= 2   ? multiply_columns<2, kVectors>
       : count <= 4 ? multiply_columns<4, kVectors>
                    : multiply_columns<kRows, kVectors>)(p, row, n);
    });
  }
  for (; n + kLanes <= last; n += kLanes) {
    rows([&](int64_t row, int64_t) { multiply_columns<kRows, 1>(p, row, n); });
  }
  for (; n < last; ++n) {
    for (int64_t row = 0; row < p.rows; ++row) multiply_column(p, row, n);
  }
}

// x [S, K] times a matrix [K, N], or the transposed matrix [N, K].
template <bool transposed>
ffi::Error product(ffi::ThreadPool pool, Matrix x, Matrix matrix, Result out) {
  const auto size = matrix.dimensions();
  const Problem p{x.dimensions()[0], x.dimensions()[1],   size[transposed ? 0 : 1],
                  x.typed_data(),    matrix.typed_data(), out->typed_data()};
  if (size[transposed ? 1 : 0] != p.inputs) return ffi::Error::InvalidArgument("The matrix has other inputs.");
  if (p.rows == 0) return ffi::Error::Success();
  constexpr int64_t together = transposed ? kOutputs : kVectors * kLanes;
  const int64_t each = rows_of_a_task(pool, p.outputs, p.inputs * sizeof(float), together);
  const bool done = parallel(pool, p.outputs, each, [&](int64_t first, int64_t last) {
    transposed ? multiply_outputs(p, first, last) : multiply_panel(p, first, last);
  });
  return done ? ffi::Error::Success() : out_of_memory();
}

template <bool transposed>
ffi::Error guarded_product(ffi::ThreadPool pool, Matrix x, Matrix matrix, Result out) {
  return guarded([&] { return product<transposed>(pool, x, matrix, out); });
}

}  // namespace

#define KVJAX_PRODUCT(name, transposed)                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, guarded_product<transposed>, \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<Matrix>().Ret<Matrix>())

KVJAX_PRODUCT(kvjax_float_product, false);
KVJAX_PRODUCT(kvjax_float_product_nt, true);
