// Products of activations with a matrix whose numbers, of 4 or 8 bits, have a scale for each group of inputs, for XLA's
// CPU backend: called as a foreign function. pallas_kernels/quantised_matmul/weight_tiles.py has the layout.
//
// Each row's activations are rounded to int8 in the same groups. A group's sum is exact in int32, and groups are added
// in their order, so that a row's result does not depend on the rows beside it, on threads or on their number.
//
// Sixteen rows of bytes at a time are transposed into columns of four inputs, which an instruction multiplies by four
// activations of a row: it then has a sum for each output, and nothing is left to add across lanes.

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
using Result = ffi::ResultBuffer<ffi::F32, 2>;

// Inputs of a group are a multiple of it.
constexpr int64_t kGroups = 16;
// Most rows of activations that are multiplied by bytes as they are transposed; of more, columns are kept.
constexpr int kFew = 4;

// The arguments of a product.
struct Problem {
  int64_t rows, inputs, outputs, tiles, tile, bytes, groups, group;  // bytes: rows of them in a tile
  int halves;                                                        // outputs in a row of bytes
  bool fp4;
  const float* x;
  const uint8_t* values;
  ffi::AnyBuffer scale, minimum;
  float* out;
  int8_t numbers[16];

  bool minima() const { return minimum.element_count() > 0; }

  // Groups in a tile.
  int64_t tile_groups() const { return tile / group; }

  const uint8_t* bytes_of(int64_t t, int64_t row) const { return values + (t * bytes + row) * tile; }

  // What is added to numbers for instructions that multiply unsigned ones.
  int zero() const { return !kUnsigned ? 0 : halves == 1 ? 128 : fp4 ? 16 : minima() ? 0 : 8; }

  // What four bits stand for, and the above.
  Ints table() const { return broadcast(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))); }

  void fill_table() {
    for (int i = 0; i < 16; ++i) {
      const int place = i < 8 ? i : i - 16;
      const int fp4_number = 4 * place - std::clamp(place, -4, 4) - 2 * std::clamp(place, -6, 6);
      numbers[i] = static_cast<int8_t>(zero() + (fp4 ? fp4_number : minima() ? place + 8 : place));
    }
  }
};

// Rounded activations.
struct Rounded {
  std::vector<int8_t> values;    // [rows, inputs]
  std::vector<float> step;       // [rows, groups]
  std::vector<float> sum;        // [rows, groups] of the rounded activations
  std::vector<int32_t> initial;  // [rows, groups], what sums of products begin with
};

// Results by half, row of activations and row of bytes.
struct Found {
  alignas(kColumn) float of[2][8][kPanel] = {};
};

// The scales, or minima, of `groups` groups from g on for `count` rows of bytes from `row` on, in float32 and by half.
void widen(const Problem& p, const ffi::AnyBuffer& from, int64_t g, int64_t groups, int64_t row, int64_t count,
           float* to) {
  const bool wide = from.element_type() == ffi::F32, half = from.element_type() == ffi::S16;
  const int64_t size = wide ? sizeof(float) : sizeof(uint16_t), bytes = count * p.halves * size;
  const auto* own = static_cast<const uint8_t*>(from.untyped_data()) + (g * p.outputs + row * p.halves) * size;
  alignas(kColumn) uint8_t last[2 * kColumn] = {0};
  for (int64_t i = 0; i < groups; ++i, own += p.outputs * size, to += kPanel) {
    _mm_prefetch(reinterpret_cast<const char*>(own + kPanel * p.halves * size), _MM_HINT_T0);  // the next panel's
    const uint8_t* source = own;
    if (count < kPanel) source = static_cast<const uint8_t*>(std::memcpy(last, own, bytes));
    float* to_high = p.halves == 2 ? to + groups * kPanel : nullptr;
    if (wide) {
      widen_floats(source, to, to_high);
    } else {
      widen_halves(source, half, to, to_high);
    }
  }
}

// Scales and minima of some groups, by half: [halves, groups, kPanel].
struct Steps {
  std::vector<float> scale, minimum;

  void widen(const Problem& p, int64_t g, int64_t groups, int64_t row, int64_t count) {
    scale.resize(p.halves * groups * kPanel);
    minimum.resize(p.minima() ? scale.size() : 0);
    ::widen(p, p.scale, g, groups, row, count, scale.data());
    if (p.minima()) ::widen(p, p.minimum, g, groups, row, count, minimum.data());
  }
};

// The numbers of a column of bytes, by half.
template <int H>
[[gnu::always_inline]] inline void split(Ints bytes, Ints table, Ints (&numbers)[H]) {
  if (H == 1) {
    numbers[0] = as_multiplied(bytes);
  } else {
    const Ints mask = broadcast(0x0f0f0f0f);
    numbers[0] = shuffle_bytes(table, bit_and(bytes, mask));
    numbers[H - 1] = shuffle_bytes(table, bit_and(high_nibbles(bytes), mask));
  }
}

// Sums before the first number of a group.
template <int R>
[[gnu::always_inline]] inline void begin_group(const Problem& p, const Rounded& x, int64_t row, int64_t g,
                                               Ints (&dots)[R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) dots[r] = broadcast(x.initial[(row + r) * p.groups + g]);
}

// The sums of group g times its scales, and its minima, added to totals; they are at `at` of the steps.
template <int R>
[[gnu::always_inline]] inline void add_group(const Problem& p, const Rounded& x, int64_t row, int64_t g,
                                             const Steps& steps, int64_t at, const Ints (&dots)[R],
                                             Floats (&total)[R]) {
  const int64_t first = row * p.groups + g;
  const Floats scale = floats(steps.scale.data() + at * kPanel);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    total[r] = fma(total[r], mul(floats(dots[r]), scale), broadcast(x.step[first + r * p.groups]));
  }
  if (steps.minimum.empty()) return;
  const Floats minimum = floats(steps.minimum.data() + at * kPanel);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) total[r] = fma(total[r], broadcast(x.sum[first + r * p.groups]), minimum);
}

// Adds products of R rows of activations with tile t of a panel, H outputs for each row of its bytes, which are used as
// they are transposed.
template <int R, int H>
void multiply_bytes(const Problem& p, const Rounded& x, int64_t t, int64_t row, int64_t count, const uint8_t* next,
                    const Steps& steps, Found& found) {
  const Ints table = p.table();
  const int64_t groups = p.tile_groups();
  Floats total[H][R];
  Ints dots[H][R];
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h) {
    begin_group(p, x, 0, t * groups, dots[h]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[h][r] = floats(found.of[h][r]);
  }
  const int8_t* own = x.values.data() + t * p.tile;
  int64_t g = 0, left = p.group;
  for_each_column<_MM_HINT_T0>(p.bytes_of(t, row), p.tile, count, next,
                               [&](const Ints(&columns)[8], int count) __attribute__((always_inline)) {
#pragma GCC unroll 2
                                 for (int i = 0; i < 8; i += 4) {
                                   if (i == count) break;
#pragma GCC unroll 4
                                   for (int j = i; j < i + 4; ++j, own += 4) {
                                     Ints numbers[H];
                                     split(columns[j], table, numbers);
#pragma GCC unroll 2
                                     for (int h = 0; h < H; ++h) add_column(own, p.inputs, numbers[h], dots[h]);
                                   }
                                   left -= kGroups;
                                   if (left > 0) continue;
#pragma GCC unroll 2
                                   for (int h = 0; h < H; ++h) {
                                     add_group(p, x, 0, t * groups + g, steps, h * groups + g, dots[h], total[h]);
                                     begin_group(p, x, 0, std::min(t * groups + g + 1, p.groups - 1), dots[h]);
                                   }
                                   left = p.group, ++g;
                                 }
                               });
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(found.of[h][r], total[h][r]);
  }
}

// A panel as columns [H, inputs / 4], for many rows of activations.
template <int H>
void fill(const Problem& p, int64_t row, int64_t count, Column* to) {
  const Ints table = p.table();
  for (int64_t t = 0; t < p.tiles; ++t) {
    const auto* next = p.bytes_of(t + 1, row);
    for_each_column<_MM_HINT_T0>(p.bytes_of(t, row), p.tile, count, next,
                                 [&](const Ints(&columns)[8], int count) __attribute__((always_inline)) {
#pragma GCC unroll 8
                                   for (int i = 0; i < 8; ++i) {
                                     if (i == count) break;
                                     Ints numbers[H];
                                     split(columns[i], table, numbers);
#pragma GCC unroll 2
                                     for (int h = 0; h < H; ++h) store(to + h * p.inputs / 4, numbers[h]);
                                     ++to;
                                   }
                                 });
  }
}

// Products of R rows of activations with one half of a panel.
template <int R>
void multiply_columns(const Problem& p, const Rounded& x, int64_t row, const Column* column, const Steps& steps,
                      int half, Found& found) {
  const int8_t* own = x.values.data() + row * p.inputs;
  Floats total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) total[r] = broadcast(0.0f);
  for (int64_t g = 0; g < p.groups; ++g) {
    Ints dots[R];
    begin_group(p, x, row, g, dots);
    for (int64_t k = 0; k < p.group; k += 4, ++column, own += 4) add_column(own, p.inputs, ints(column), dots);
    add_group(p, x, row, g, steps, half * p.groups + g, dots, total);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(found.of[half][r], total[r]);
}

// The results of `rows` rows of activations for `count` rows of bytes.
void put(const Problem& p, const Found& found, int64_t row, int64_t rows, int64_t first, int64_t count) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *low = found.of[0][r], *high = found.of[1][r];
    float* to = p.out + (row + r) * p.outputs + first * p.halves;
    if (p.halves == 1) {
      std::copy_n(low, count, to);
    } else if (count == kPanel) {
      for (int i = 0; i < kPanel; ++i) to[2 * i] = low[i], to[2 * i + 1] = high[i];
    } else {
      for (int64_t i = 0; i < count; ++i) to[2 * i] = low[i], to[2 * i + 1] = high[i];
    }
  }
}

void round_rows(const Problem& p, int64_t first, int64_t last, Rounded& x) {
  for (int64_t i = first * p.groups; i < last * p.groups; ++i) {
    const auto sum =
        static_cast<int32_t>(round_row(p.x + i * p.group, p.group, &x.values[i * p.group], &x.step[i], nullptr));
    x.initial[i] = -p.zero() * sum;
    x.sum[i] = x.step[i] * static_cast<float>(sum);
  }
}

// Few rows of activations: tile by tile, so that memory is read in long runs.
template <int H>
void multiply_few(const Problem& p, const Rounded& x, int64_t first, int64_t last) {
  const auto run = p.rows == 1 ? multiply_bytes<1, H> : p.rows == 2 ? multiply_bytes<2, H> : multiply_bytes<kFew, H>;
  std::vector<Found> found((last - first + kPanel - 1) / kPanel);
  Steps steps;
  for (int64_t t = 0; t < p.tiles; ++t) {
    for (int64_t row = first; row < last; row += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, last - row);
      const uint8_t* next = row + kPanel < last ? p.bytes_of(t, row + kPanel) : p.bytes_of(t + 1, first);
      steps.widen(p, t * p.tile_groups(), p.tile_groups(), row, count);
      run(p, x, t, row, count, next, steps, found[(row - first) / kPanel]);
    }
  }
  for (int64_t row = first; row < last; row += kPanel) {
    put(p, found[(row - first) / kPanel], 0, p.rows, row, std::min<int64_t>(kPanel, last - row));
  }
}

// Many rows of activations: panel by panel.
template <int H>
void multiply_many(const Problem& p, const Rounded& x, const NonzeroRows& nonzero, int64_t first, int64_t last) {
  std::vector<Column> columns(H * p.inputs / 4);
  Steps steps;
  Found found;
  for (int64_t row = first; row < last; row += kPanel) {
    const int64_t count = std::min<int64_t>(kPanel, last - row);
    steps.widen(p, 0, p.groups, row, count);
    fill<H>(p, row, count, columns.data());
    for (int64_t s = 0; s < p.rows; s += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, p.rows - s);
      if (!nonzero[s]) {
        put_zeros(p.out + s * p.outputs + row * H, rows, count * H, p.outputs);
        continue;
      }
      const auto run = 2 * rows > kRows ? multiply_columns<kRows> : multiply_columns<kRows / 2>;
      for (int half = 0; half < H; ++half) run(p, x, s, columns.data() + half * p.inputs / 4, steps, half, found);
      put(p, found, s, rows, row, count);
    }
  }
}

void multiply(const Problem& p, const Rounded& x, const NonzeroRows& nonzero, int64_t first, int64_t last) {
  if (p.rows <= kFew) {
    p.halves == 1 ? multiply_few<1>(p, x, first, last) : multiply_few<2>(p, x, first, last);
  } else {
    p.halves == 1 ? multiply_many<1>(p, x, nonzero, first, last) : multiply_many<2>(p, x, nonzero, first, last);
  }
}

bool is_scale(const ffi::AnyBuffer& scale) {
  const auto type = scale.element_type();
  return scale.dimensions().size() == 2 && (type == ffi::F32 || type == ffi::BF16 || type == ffi::S16);
}

bool is_alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const auto one = a.dimensions(), other = b.dimensions();
  return a.element_type() == b.element_type() && std::equal(one.begin(), one.end(), other.begin(), other.end());
}

// x [S, K] times the matrix [N, K] whose numbers are values [T, N, L], or [T, N / 2, L] of 4 bits, and whose scales,
// and minima unless they are empty, are [G, N].
ffi::Error product(ffi::ThreadPool pool, Rows x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer minimum,
                   Result out, bool fp4) {
  const auto size = values.dimensions(), groups = scale.dimensions();
  if (size.size() != 3 || (values.element_type() != ffi::U8 && values.element_type() != ffi::S8) || !is_scale(scale) ||
      (minimum.element_count() > 0 && !is_alike(minimum, scale))) {
    return ffi::Error::InvalidArgument("Numbers, scales or minima have another shape or type.");
  }
  const int halves = values.element_type() == ffi::U8 ? 2 : 1;
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], group = inputs / std::max<int64_t>(groups[0], 1);
  Problem p{rows,    inputs,  size[1] * halves, size[0],
            size[2], size[1], groups[0],        group,
            halves,  fp4,     x.typed_data(),   static_cast<const uint8_t*>(values.untyped_data()),
            scale,   minimum, out->typed_data()};
  p.fill_table();
  if (p.tiles * p.tile != inputs || group == 0 || group * p.groups != inputs || group % kGroups != 0 ||
      p.tile % group != 0 || p.outputs != groups[1]) {
    return ffi::Error::InvalidArgument(
        "The matrix has other inputs, its scales other outputs, or groups are not of 16.");
  }
  // Rows that are multiplied together with the last ones are zeros.
  const int64_t padded = (rows + kRows - 1) / kRows * kRows;
  Rounded rounded;
  rounded.values.resize(padded * inputs);
  rounded.step.resize(padded * p.groups), rounded.sum.resize(padded * p.groups);
  rounded.initial.resize(padded * p.groups);
  const int64_t few = rows_of_a_task(pool, rows, inputs * sizeof(float), 1);
  if (!parallel(pool, rows, few, [&](int64_t first, int64_t last) { round_rows(p, first, last, rounded); })) {
    return out_of_memory();
  }
  NonzeroRows nonzero(rows, kRows);
  if (rows > kFew && !nonzero.find(pool, p.x, inputs)) return out_of_memory();
  const int64_t each = rows_of_a_task(pool, p.bytes, inputs, kPanel);
  const bool done =
      parallel(pool, p.bytes, each, [&](int64_t first, int64_t last) { multiply(p, rounded, nonzero, first, last); });
  return done ? ffi::Error::Success() : out_of_memory();
}

ffi::Error guarded_product(ffi::ThreadPool pool, Rows x, ffi::AnyBuffer values, ffi::AnyBuffer scale,
                           ffi::AnyBuffer minimum, Result out, bool fp4) {
  return guarded([&] { return product(pool, x, values, scale, minimum, out, fp4); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_group_product, guarded_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Rows>()
                                  .Attr<bool>("fp4"));
