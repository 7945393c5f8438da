// Products of rows of activations with a float32 matrix, for XLA's CPU backend: called as foreign functions.
//
// A few rows are bound by reading the matrix: it is asked for long before it is used, and read once. Many rows are
// bound by arithmetic: panels of the matrix are copied, so that what a row is multiplied with lies together. A row's
// result does not depend on threads, nor, of a few rows or of many, on those beside it: inputs are added in the same
// order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "padding.h"
#include "panel_product.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace {

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Result = ffi::ResultBuffer<ffi::F32, 2>;

// Outputs that are multiplied together, of a matrix [N, K], and vectors of them, of one [K, N]: with kRows rows of
// activations, as many sums as there are registers for.
constexpr int kOutputs = kUnsigned ? 2 : 1, kVectors = kUnsigned ? 3 : 1;
// Inputs that are multiplied at a time with a matrix [N, K]: so few that rows of activations stay in the first cache.
constexpr int64_t kBlock = 640;
// Rows that are few.
constexpr int64_t kFew = 32;
// Outputs of a panel that is copied, and its inputs.
constexpr int64_t kPanelOutputs = kVectors * kLanes, kPanelInputs = 1024;
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
void multiply_all(const Problem& p, int64_t first, int64_t last) {
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

// Many rows ------------------------------------------------------------------------------------------------------

// Inputs first..last of a panel's outputs n.., [inputs, kPanelOutputs]; beyond the last output are any numbers.
template <bool transposed>
void copy_panel(const Problem& p, int64_t n, int64_t first, int64_t last, float* to) {
  const int64_t outputs = std::min(kPanelOutputs, p.outputs - n);
  if (transposed) {
    transpose_floats(p.weights + n * p.inputs + first, p.inputs, outputs, last - first, to, kPanelOutputs);
  } else {
    for (int64_t k = first; k < last; ++k) {
      std::copy_n(p.weights + k * p.outputs + n, outputs, to + (k - first) * kPanelOutputs);
    }
  }
}

// The outputs n.. of a panel, of the rows first..last; first is a multiple of kRows.
template <bool transposed>
void multiply_many(const Problem& p, const NonzeroRows& nonzero, int64_t n, int64_t first, int64_t last) {
  if (first == last) return;
  thread_local std::vector<float> memory;
  memory.resize(kPanelInputs * kPanelOutputs + kRows * (kPanelInputs + kPanelOutputs) + kLanes);
  float* panel = aligned(memory.data());
  float *some = panel + kPanelInputs * kPanelOutputs, *found = some + kRows * kPanelInputs;
  const int64_t outputs = std::min(kPanelOutputs, p.outputs - n);
  for (int64_t k = 0; k < p.inputs; k += kPanelInputs) {
    const int64_t inputs = std::min(kPanelInputs, p.inputs - k);
    copy_panel<transposed>(p, n, k, k + inputs, panel);
    const auto run = k == 0 ? multiply_panel<kVectors, false> : multiply_panel<kVectors, true>;
    for (int64_t row = first; row < last; row += kRows) {
      const float* x = p.x + row * p.inputs + k;
      float* out = p.out + row * p.outputs + n;
      const int64_t rows = std::min<int64_t>(kRows, last - row);
      if (!nonzero[row]) {
        if (k == 0) put_zeros(out, rows, outputs, p.outputs);
        continue;
      }
      if (rows == kRows && outputs == kPanelOutputs) {
        run(x, p.inputs, inputs, panel, kPanelOutputs, out, p.outputs);
        continue;
      }
      for (int64_t r = 0; r < kRows; ++r) {
        std::copy_n(p.row(row + r) + k, inputs, some + r * kPanelInputs);
        if (k > 0 && r < rows) std::copy_n(out + r * p.outputs, outputs, found + r * kPanelOutputs);
      }
      run(some, kPanelInputs, inputs, panel, kPanelOutputs, found, kPanelOutputs);
      for (int64_t r = 0; r < rows; ++r) std::copy_n(found + r * kPanelOutputs, outputs, out + r * p.outputs);
    }
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
  if (p.rows > kFew && p.inputs > 0) {
    NonzeroRows nonzero(p.rows, kRows);
    if (!nonzero.find(pool, p.x, p.inputs)) return out_of_memory();
    // Panels, and where these are too few for the threads, parts of their rows.
    const int64_t panels = (p.outputs + kPanelOutputs - 1) / kPanelOutputs, tasks = 4 * pool.num_threads();
    const int64_t parts = std::max<int64_t>(1, std::min(tasks / std::max<int64_t>(panels, 1), p.rows / (8 * kRows)));
    const int64_t each = (p.rows + parts * kRows - 1) / (parts * kRows) * kRows;
    const bool done = parallel(pool, panels * parts, 1, [&](int64_t task, int64_t) {
      const int64_t first = std::min(task % parts * each, p.rows), last = std::min(first + each, p.rows);
      multiply_many<transposed>(p, nonzero, task / parts * kPanelOutputs, first, last);
    });
    return done ? ffi::Error::Success() : out_of_memory();
  }
  constexpr int64_t together = transposed ? kOutputs : kVectors * kLanes;
  const int64_t each = rows_of_a_task(pool, p.outputs, p.inputs * sizeof(float), together);
  const bool done = parallel(pool, p.outputs, each, [&](int64_t first, int64_t last) {
    transposed ? multiply_outputs(p, first, last) : multiply_all(p, first, last);
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
