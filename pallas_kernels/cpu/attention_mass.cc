// Attention of queries summed by key, for XLA's CPU backend: called as a foreign function.
//
// A task has a block of one KV head's keys, transposed once, and takes the queries that see some of them in order, a
// few at a time, so that a key's sum does not depend on what is beside it or on threads.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "key_blocks.h"
#include "parallel.h"
#include "softmax.h"

namespace ffi = xla::ffi;

namespace {

using softmax::kNeg;

struct Problem {
  int64_t batch, heads, group, count, dim;
  const float* q;         // [batch, heads, group, count, dim], scaled
  const float* lse;       // [batch, heads, group, count]
  const float* weight;    // [batch, count]
  const int32_t* offset;  // [batch]
  int64_t window;         // 0: none
  float soft_cap;         // 0: none
};

// Keys of one kind, and the masses that they have so far.
struct Keys {
  const void* k;  // [batch, heads, tokens, dim], in float32 or bfloat16
  bool narrow;
  int64_t tokens;
  const int32_t* length;  // [batch, heads] of kept rows, which all queries see; null for the prompt's
  const float* log_mass;  // [batch, heads], added to the scores of key 0, or null
  float* mass;            // [batch, heads, group, tokens]
};

// What a thread works with.
struct Scratch {
  std::vector<float> memory;
  float *q, *raw, *keys, *score, *sums;  // [kRows, dim], [kBlock, dim] twice, [kRows, kBlock], [kBlock]

  void resize(int64_t dim) {
    memory.resize((kRows + 2 * kBlock) * dim + (kRows + 1) * kBlock + 5 * kLanes);
    float* next = memory.data();
    const auto take = [&](int64_t count) {
      float* taken = aligned(next);
      next = taken + count;
      return taken;
    };
    q = take(kRows * dim), raw = take(kBlock * dim), keys = take(kBlock * dim);
    score = take(kRows * kBlock), sums = take(kBlock);
  }
};

// The block's keys from `block` on, of one KV head.
struct Task {
  const Problem& p;
  const Keys& keys;
  Scratch& s;
  int64_t batch, head, block;

  int64_t own() const { return batch * p.heads + head; }

  // Adds the attention of kRows queries of one query head, of which `there` exist, to the block's sums.
  template <typename Low, typename High>
  void add(int64_t query, int64_t first, int64_t there, int64_t end, const Low& low, const High& high) {
    const float* weight = p.weight + batch * p.count + first;
    int64_t from[kRows], to[kRows], most = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      const bool counts = r < there && weight[r] != 0;
      from[r] = counts ? std::clamp<int64_t>(low(first + r) - block, 0, end - block) : 0;
      to[r] = counts ? std::clamp<int64_t>(high(first + r) - block, 0, end - block) : 0;
      if (from[r] < to[r]) most = std::max(most, to[r]);
    }
    if (most == 0) return;
    const float *q = p.q + query * p.dim, *lse = p.lse + query;
    if (there < kRows) {
      std::copy_n(q, there * p.dim, s.q);
      std::fill(s.q + there * p.dim, s.q + kRows * p.dim, 0.0f);
      q = s.q;
    }
    const int64_t wide = (most + kLanes - 1) / kLanes * kLanes;
    multiply_keys(q, s.keys, p.dim, wide, s.score);
    for (int64_t r = 0; r < kRows; ++r) {
      if (from[r] >= to[r]) continue;
      float* score = s.score + r * kBlock;
      if (p.soft_cap > 0) softmax::bound(score, wide, p.soft_cap);
      if (keys.log_mass != nullptr && block == 0) score[0] += keys.log_mass[own()];
      std::fill(score, score + from[r], kNeg);
      std::fill(score + to[r], score + wide, kNeg);
      // The normaliser of a query that sees nothing stands for no number.
      softmax::add_weighed(score, wide, lse[r] > 0.5f * kNeg ? lse[r] : 0.0f, weight[r], s.sums);
    }
  }

  void run() {
    const int64_t rows = keys.length == nullptr ? keys.tokens : std::clamp<int64_t>(keys.length[own()], 0, keys.tokens);
    const int64_t end = std::min(block + kBlock, rows), offset = p.offset[batch];
    const bool kept = keys.length != nullptr;
    // Query i sees low(i)..high(i): kept rows are those right before the first key.
    const int64_t before = offset + (kept ? rows : 0) - p.window + 1;
    const auto low = [&](int64_t i) { return p.window > 0 ? before + i : 0; };
    const auto high = [&](int64_t i) { return kept ? rows : offset + i + 1; };
    const int64_t first = kept ? 0 : std::clamp<int64_t>(block - offset, 0, p.count);
    const int64_t last = p.window > 0 ? std::clamp<int64_t>(end - before, first, p.count) : p.count;
    if (block >= end || first >= last) return;
    s.resize(p.dim);
    const int64_t at = (own() * keys.tokens + block) * p.dim, count = end - block;
    transpose_keys(as_floats(keys.k, keys.narrow, at, count * p.dim, s.raw), count, p.dim, s.keys);
    for (int64_t g = 0; g < p.group; ++g) {
      const int64_t query = (own() * p.group + g) * p.count;
      std::fill_n(s.sums, kBlock, 0.0f);
      for (int64_t i = first; i < last; i += kRows) {
        add(query + i, i, std::min<int64_t>(kRows, last - i), end, low, high);
      }
      float* mass = keys.mass + (own() * p.group + g) * keys.tokens + block;
      for (int64_t j = 0; j < count; ++j) mass[j] += s.sums[j];
    }
  }
};

// All keys of both kinds.
ffi::Error solve(ffi::ThreadPool pool, const Problem& p, const Keys& prompt, const Keys& kept) {
  const auto blocks = [](const Keys& keys) { return (keys.tokens + kBlock - 1) / kBlock; };
  const int64_t each = blocks(prompt) + blocks(kept);
  const bool done = parallel(pool, p.batch * p.heads * each, 1, [&](int64_t from, int64_t to) {
    thread_local Scratch scratch;
    for (int64_t i = from; i < to; ++i) {
      const int64_t head = i / each, block = i % each, first = blocks(kept);
      const Keys& keys = block < first ? kept : prompt;
      Task{p, keys, scratch, head / p.heads, head % p.heads, (block < first ? block : block - first) * kBlock}.run();
    }
  });
  return done ? ffi::Error::Success() : out_of_memory();
}

using Queries = ffi::Buffer<ffi::F32, 5>;
using Floats4 = ffi::Buffer<ffi::F32, 4>;
using Floats2 = ffi::Buffer<ffi::F32, 2>;
using FloatBuffer = ffi::Buffer<ffi::F32>;
using IntBuffer = ffi::Buffer<ffi::S32>;

// Whether keys and the masses they are added to are those of some queries.
bool belong(const Problem& p, const ffi::AnyBuffer& k, const Floats4& onto) {
  const auto a = k.dimensions(), b = onto.dimensions();
  return a.size() == 4 && a[0] == p.batch && a[1] == p.heads && a[3] == p.dim && b[0] == p.batch && b[1] == p.heads &&
         b[2] == p.group && b[3] == a[2];
}

ffi::Error sum(ffi::ThreadPool pool, Queries q, ffi::AnyBuffer k, Floats4 lse, Floats2 weight, IntBuffer offset,
               ffi::AnyBuffer kept_k, IntBuffer kept_length, FloatBuffer log_mass, Floats4 onto, Floats4 onto_kept,
               int64_t window, float soft_cap, ffi::Result<Floats4> mass, ffi::Result<Floats4> kept_mass) {
  const auto shape = q.dimensions();
  Problem p{};
  p.batch = shape[0], p.heads = shape[1], p.group = shape[2], p.count = shape[3], p.dim = shape[4];
  const auto type = k.element_type();
  if (p.dim % kLanes != 0 || (type != ffi::F32 && type != ffi::BF16) || kept_k.element_type() != type) {
    return ffi::Error::InvalidArgument("Keys are not of float32 or bfloat16, or channels not 16 together.");
  }
  if (!belong(p, k, onto) || !belong(p, kept_k, onto_kept)) {
    return ffi::Error::InvalidArgument("Keys or masses have other rows, heads or channels than queries.");
  }
  p.q = q.typed_data(), p.lse = lse.typed_data(), p.weight = weight.typed_data(), p.offset = offset.typed_data();
  p.window = window, p.soft_cap = soft_cap;
  const bool narrow = type == ffi::BF16;
  const Keys prompt{k.untyped_data(), narrow, k.dimensions()[2], nullptr, nullptr, mass->typed_data()};
  const Keys kept{kept_k.untyped_data(),  narrow,
                  kept_k.dimensions()[2], kept_length.typed_data(),
                  data_or_null(log_mass), kept_mass->typed_data()};
  // The masses of before are in place, unless XLA keeps them.
  if (mass->typed_data() != onto.typed_data()) std::copy_n(onto.typed_data(), onto.element_count(), mass->typed_data());
  if (kept_mass->typed_data() != onto_kept.typed_data()) {
    std::copy_n(onto_kept.typed_data(), onto_kept.element_count(), kept_mass->typed_data());
  }
  return guarded([&] { return solve(pool, p, prompt, kept); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_attention_mass, sum,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Queries>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats4>()
                                  .Arg<Floats2>()
                                  .Arg<IntBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<Floats4>()
                                  .Arg<Floats4>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Ret<Floats4>()
                                  .Ret<Floats4>());
