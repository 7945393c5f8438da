// Causal attention of a chunk of queries, for XLA's CPU backend: called as a foreign function.
//
// A task has some tokens' queries of one KV head. Their keys are taken in blocks, transposed once for all of them, and
// folded into a running softmax for a few queries at a time, whose scores stay in the first cache. Values of no
// channels leave the log-sum-exps.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "key_blocks.h"
#include "parallel.h"
#include "softmax.h"

namespace ffi = xla::ffi;

namespace {

using softmax::kNeg;

// Queries of a task, about.
constexpr int64_t kQueries = 128;

// Keys and values of one kind, in float32 or bfloat16.
struct Source {
  const void *k, *v;  // [batch, heads, tokens, dim], [batch, heads, tokens, value_dim]
  bool narrow;
  int64_t tokens;
};

struct Problem {
  int64_t batch, heads, group, count, dim, value_dim;
  const float* q;  // [batch, heads, group, count, dim]
  Source prompt, kept;
  const int32_t *offset, *length;  // [batch]; a chunk's queries, or null for all
  const int32_t* kept_length;      // [batch, heads]
  const float* log_mass;           // [batch, heads], or null
  int64_t window;                  // 0: none
  float scale, soft_cap;           // 0: none
  float *out, *lse;                // [batch, heads, group, count, value_dim], and without value_dim
};

// What a thread works with.
struct Scratch {
  std::vector<float> memory;
  float *q, *out, *peak, *mass;        // [rows, dim], [rows, value_dim], [rows], [rows]
  float *keys, *values, *raw, *score;  // [panels, dim, kKeys], [kBlock, value_dim], [kBlock, dim], [kRows, kBlock]

  void resize(int64_t rows, int64_t dim, int64_t value_dim) {
    memory.resize((rows + kBlock) * (dim + value_dim) + 2 * rows + kBlock * (dim + kRows) + 9 * kLanes);
    float* next = memory.data();
    const auto take = [&](int64_t count) {
      float* taken = aligned(next);
      next = taken + count;
      return taken;
    };
    q = take(rows * dim), out = take(rows * value_dim), peak = take(rows), mass = take(rows);
    keys = take(kBlock * dim), values = take(kBlock * value_dim), raw = take(kBlock * dim);
    score = take(kRows * kBlock);
  }
};

// Some tokens' queries of one KV head. Row i is query head i % group's, of token first + i / group.
struct Task {
  const Problem& p;
  Scratch& s;
  int64_t batch, head, first, tokens;

  int64_t rows() const { return tokens * p.group; }
  int64_t place(int64_t row) const { return p.offset[batch] + first + std::min(row / p.group, tokens - 1); }
  int64_t own(int64_t row) const {  // of p.q and p.out
    return ((batch * p.heads + head) * p.group + row % p.group) * p.count + first + row / p.group;
  }

  // Folds a block's keys, block..end, into the softmax of kRows queries. Query `row` sees low(row)..high(row).
  template <typename Low, typename High>
  void fold(int64_t row, int64_t block, int64_t end, const float* values, float log_mass, const Low& low,
            const High& high) {
    int64_t from[kRows], to[kRows], most = 0;
    for (int r = 0; r < kRows; ++r) {
      from[r] = std::clamp<int64_t>(low(row + r) - block, 0, end - block);
      to[r] = std::clamp<int64_t>(high(row + r) - block, 0, end - block);
      if (from[r] < to[r]) most = std::max(most, to[r]);
    }
    if (most == 0) return;
    const float* q = s.q + row * p.dim;
    const int64_t wide = (most + kLanes - 1) / kLanes * kLanes;
    multiply_keys(q, s.keys, p.dim, wide, s.score);
    for (int r = 0; r < kRows; ++r) {
      float* score = s.score + r * kBlock;
      if (from[r] >= to[r]) {
        std::fill_n(score, wide, 0.0f);
        continue;
      }
      if (p.soft_cap > 0) softmax::bound(score, wide, p.soft_cap);
      if (log_mass != 0 && block == 0) score[0] += log_mass;
      std::fill(score, score + from[r], kNeg);
      std::fill(score + to[r], score + wide, kNeg);
      const float before = s.peak[row + r], peak = softmax::largest(score, wide, before);
      float sum = softmax::weigh(score, wide, peak);
      if (peak == kNeg) {  // what is not visible has this score too
        std::fill(score, score + from[r], 0.0f), std::fill(score + to[r], score + wide, 0.0f);
        sum = std::accumulate(score + from[r], score + to[r], 0.0f);
      }
      if (peak != before) {
        const float shrink = std::exp(before - peak);
        s.peak[row + r] = peak, s.mass[row + r] *= shrink;
        float* out = s.out + (row + r) * p.value_dim;
        for (int64_t d = 0; d < p.value_dim; ++d) out[d] *= shrink;
      }
      s.mass[row + r] += sum;
    }
    float* out = s.out + row * p.value_dim;
    int64_t d = 0;
    for (; d + kVectors * kLanes <= p.value_dim; d += kVectors * kLanes) {
      multiply_panel<kVectors, true>(s.score, kBlock, most, values + d, p.value_dim, out + d, p.value_dim);
    }
    for (; d < p.value_dim; d += kLanes)
      multiply_panel<1, true>(s.score, kBlock, most, values + d, p.value_dim, out + d, p.value_dim);
  }

  // Folds a source's keys, first..last, into the softmax of all queries; log_mass is added to the score of key 0.
  template <typename Low, typename High>
  void fold_source(const Source& source, int64_t first, int64_t last, float log_mass, const Low& low,
                   const High& high) {
    const int64_t start = (batch * p.heads + head) * source.tokens;
    for (int64_t block = std::max<int64_t>(first, 0) / kBlock * kBlock; block < last; block += kBlock) {
      const int64_t end = std::min(block + kBlock, last), at = (start + block) * p.dim;
      transpose_keys(as_floats(source.k, source.narrow, at, (end - block) * p.dim, s.raw), end - block, p.dim, s.keys);
      const int64_t value = (start + block) * p.value_dim, numbers = (end - block) * p.value_dim;
      const float* values = as_floats(source.v, source.narrow, value, numbers, s.values);
      for (int64_t row = 0; row < rows(); row += kRows) fold(row, block, end, values, log_mass, low, high);
    }
  }

  void run() {
    const int64_t padded = (rows() + kRows - 1) / kRows * kRows;
    s.resize(padded, p.dim, p.value_dim);
    std::fill_n(s.out, padded * p.value_dim, 0.0f), std::fill_n(s.mass, padded, 0.0f),
        std::fill_n(s.peak, padded, kNeg);
    for (int64_t row = 0; row < padded; ++row) {
      const float* q = p.q + own(std::min(row, rows() - 1)) * p.dim;
      for (int64_t d = 0; d < p.dim; ++d) s.q[row * p.dim + d] = q[d] * p.scale;
    }
    const int64_t nearest = place(0), furthest = place(rows() - 1);
    const int64_t kept =
        p.kept_length == nullptr ? 0 : std::clamp<int64_t>(p.kept_length[batch * p.heads + head], 0, p.kept.tokens);
    const auto low = [&](int64_t row) { return p.window > 0 ? place(row) - p.window + 1 : 0; };
    if (kept > 0) {
      const float log_mass = p.log_mass == nullptr ? 0 : p.log_mass[batch * p.heads + head];
      const auto from = [&](int64_t row) { return p.window > 0 ? kept + low(row) : 0; };
      fold_source(p.kept, from(0), kept, log_mass, from, [&](int64_t) { return kept; });
    }
    const int64_t last = std::clamp<int64_t>(furthest + 1, 0, p.prompt.tokens);
    fold_source(p.prompt, p.window > 0 ? nearest - p.window + 1 : 0, last, 0, low,
                [&](int64_t row) { return place(row) + 1; });
    for (int64_t row = 0; row < rows(); ++row) {
      const float mass = s.mass[row], divisor = mass == 0 ? 1 : mass;
      float* out = p.out + own(row) * p.value_dim;
      for (int64_t d = 0; d < p.value_dim; ++d) out[d] = s.out[row * p.value_dim + d] / divisor;
      p.lse[own(row)] = mass == 0 ? kNeg : s.peak[row] + std::log(mass);
    }
  }
};

// All queries; those beyond a row's length are 0.
ffi::Error solve(ffi::ThreadPool pool, const Problem& p) {
  const int64_t each = std::max<int64_t>(1, kQueries / p.group), tiles = (p.count + each - 1) / each;
  const bool done = parallel(pool, p.batch * p.heads * tiles, 1, [&](int64_t from, int64_t to) {
    thread_local Scratch scratch;
    for (int64_t i = from; i < to; ++i) {
      // The last tokens, which have the most keys, first.
      const int64_t first = (tiles - 1 - i / (p.batch * p.heads)) * each, head = i % (p.batch * p.heads);
      const int64_t real = p.length == nullptr ? p.count : std::clamp<int64_t>(p.length[head / p.heads], 0, p.count);
      const int64_t last = std::min(first + each, p.count), until = std::clamp(real, first, last);
      Task task{p, scratch, head / p.heads, head % p.heads, first, until - first};
      if (until > first) task.run();
      for (int64_t g = 0; g < p.group; ++g) {
        const int64_t own = (head * p.group + g) * p.count;
        std::fill(p.out + (own + until) * p.value_dim, p.out + (own + last) * p.value_dim, 0.0f);
        std::fill(p.lse + own + until, p.lse + own + last, kNeg);
      }
    }
  });
  return done ? ffi::Error::Success() : out_of_memory();
}

using Queries = ffi::Buffer<ffi::F32, 5>;
using LogSums = ffi::Buffer<ffi::F32, 4>;
using FloatBuffer = ffi::Buffer<ffi::F32>;
using IntBuffer = ffi::Buffer<ffi::S32>;

// Whether such are all of some keys and values.
bool all_of(ffi::DataType type, const ffi::AnyBuffer (&some)[4]) {
  return std::all_of(some, some + 4, [&](const ffi::AnyBuffer& one) {
    return one.element_type() == type && one.dimensions().size() == 4;
  });
}

// Whether keys and values are as many, of the rows, heads and channels of queries.
bool same_rows(const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const Problem& p) {
  const auto a = k.dimensions(), b = v.dimensions();
  return std::equal(a.begin(), a.begin() + 3, b.begin()) && a[0] == p.batch && a[1] == p.heads && a[3] == p.dim &&
         b[3] == p.value_dim;
}

ffi::Error attend(ffi::ThreadPool pool, Queries q, ffi::AnyBuffer k, ffi::AnyBuffer v, IntBuffer offset,
                  IntBuffer length, ffi::AnyBuffer kept_k, ffi::AnyBuffer kept_v, IntBuffer kept_length,
                  FloatBuffer log_mass, float scale, int64_t window, float soft_cap, ffi::Result<Queries> out,
                  ffi::Result<LogSums> lse) {
  const ffi::AnyBuffer given[] = {k, v, kept_k, kept_v};
  const bool narrow = all_of(ffi::BF16, given);
  const auto shape = q.dimensions();
  Problem p{};
  p.batch = shape[0], p.heads = shape[1], p.group = shape[2], p.count = shape[3], p.dim = shape[4];
  p.value_dim = v.dimensions().size() == 4 ? v.dimensions()[3] : 0;
  if (p.dim % kLanes != 0 || p.value_dim % kLanes != 0 || !(narrow || all_of(ffi::F32, given))) {
    return ffi::Error::InvalidArgument("Keys and values are not of float32 or bfloat16, or channels not 16 together.");
  }
  if (!same_rows(k, v, p) || !same_rows(kept_k, kept_v, p)) {
    return ffi::Error::InvalidArgument("Keys or values have other rows, heads or channels than queries.");
  }
  p.q = q.typed_data(), p.offset = offset.typed_data(), p.length = data_or_null(length);
  p.prompt = {k.untyped_data(), v.untyped_data(), narrow, k.dimensions()[2]};
  p.kept = {kept_k.untyped_data(), kept_v.untyped_data(), narrow, kept_k.dimensions()[2]};
  p.kept_length = data_or_null(kept_length), p.log_mass = data_or_null(log_mass);
  p.scale = scale, p.window = window, p.soft_cap = soft_cap;
  p.out = out->typed_data(), p.lse = lse->typed_data();
  return guarded([&] { return solve(pool, p); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_prefill, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Queries>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Ret<Queries>()
                                  .Ret<LogSums>());
