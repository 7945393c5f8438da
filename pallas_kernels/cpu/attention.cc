// Attention of one query a row over a paged cache, for XLA's CPU backend: called as a foreign function.
//
// It reads no page that lies beyond a head's length or before its window, and each other page from memory once. A
// head's slots are taken in chunks of a fixed size, merged in order, so that a row's result does not depend on the rows
// beside it, on room or on threads.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "parallel.h"
#include "softmax.h"

namespace ffi = xla::ffi;

namespace {

using softmax::kLanes;
using softmax::kNeg;
using softmax::load;
using softmax::store;
using softmax::V;

// Slots of a chunk, about.
constexpr int64_t kChunk = 128;

inline V load(const int8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
#else
  const __m256 halves[] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
                           _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
  V v;
  std::memcpy(&v, halves, sizeof v);
  return v;
#endif
}

// The bits of bfloat16, the upper half of a float's.
inline V load(const uint16_t* p) {
  alignas(64) uint32_t bits[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint32_t>(p[i]) << 16;
  V v;
  std::memcpy(&v, bits, sizeof v);
  return v;
}

// What all tasks read. Pointers that may be missing are null.
struct Problem {
  int64_t rows, heads, group, key_dim, dim, pages, page_size, first_row;
  const float* q;                            // [rows, heads, group, key_dim], scaled
  const void *k, *v;                         // [.., pages, key_dim, page_size], [.., pages, page_size, dim]
  const int32_t *first, *length;             // [rows, heads]: a head's first page, and its slots
  const float *v_scale, *log_mass;           // [.., pages, page_size], [rows, heads]
  const int32_t *position, *query_position;  // [.., pages, page_size], [rows]
  const float* slopes;                       // [heads, group]
  int64_t window;                            // 0: none
  float soft_cap, ratio;                     // 0: none; what logits are scores times
  float* logits;                             // [rows, pages, group, page_size]
};

// A chunk of a head's pages, and the softmax over it, not yet divided by its mass.
struct Chunk {
  int64_t row, head, page, end;
  float *peak, *mass, *out;  // [group], [group], [group, dim]
};

// Scores of G queries with the slots of a page: out[g * stride + r].
template <typename T, int G, int N>
[[gnu::always_inline]] inline void scores_of(const T* keys, const float* q, int64_t key_dim, int64_t page_size,
                                             float* out, int64_t stride) {
  for (int64_t r = 0; r < page_size; r += N * kLanes) {
    V sums[G][N] = {};
    for (int64_t d = 0; d < key_dim; ++d) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const V key = load(keys + d * page_size + r + n * kLanes);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[g][n] += q[g * key_dim + d] * key;
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(out + g * stride + r + n * kLanes, sums[g][n]);
    }
  }
}

// Adds the values of a page, weighted, to N vectors of the results of G queries.
template <typename T, int G, int N>
[[gnu::always_inline]] inline void add_values(const T* values, const float* weight, int64_t stride, int64_t page_size,
                                              int64_t dim, float* out) {
  V sums[G][N];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[g][n] = load(out + g * dim + n * kLanes);
  }
  for (int64_t r = 0; r < page_size; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const V value = load(values + r * dim + n * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][n] += weight[g * stride + r] * value;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + g * dim + n * kLanes, sums[g][n]);
  }
}

template <typename T, int G>
void page_scores(const T* keys, const float* q, int64_t key_dim, int64_t page_size, float* out, int64_t stride) {
  if (page_size % (2 * kLanes) == 0) {
    scores_of<T, G, 2>(keys, q, key_dim, page_size, out, stride);
  } else {
    scores_of<T, G, 1>(keys, q, key_dim, page_size, out, stride);
  }
}

template <typename T, int G>
void page_values(const T* values, const float* weight, int64_t stride, int64_t page_size, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
    add_values<T, G, 4>(values + d, weight, stride, page_size, dim, out + d);
  }
  for (; d < dim; d += kLanes) add_values<T, G, 1>(values + d, weight, stride, page_size, dim, out + d);
}

// The scores of a page as they are in the softmax: bounded, with biases, kNeg where a slot is not visible.
void finish(const Problem& p, const Chunk& chunk, int64_t page, int64_t g, float* scores) {
  const int64_t head = chunk.row * p.heads + chunk.head, length = p.length[head];
  const int64_t own = page - std::clamp<int64_t>(p.first[head], 0, p.pages);
  const int64_t slot = own * p.page_size, stored = ((p.first_row + chunk.row) * p.pages + page) * p.page_size;
  const bool placed = p.position != nullptr;
  const int64_t low = p.window > 0 && !placed ? length - p.window : 0;
  float* logits = p.logits == nullptr ? nullptr : p.logits + ((chunk.row * p.pages + page) * p.group + g) * p.page_size;
  const float slope = p.slopes == nullptr ? 0 : p.slopes[chunk.head * p.group + g];
  const float mass = p.log_mass == nullptr ? 0 : p.log_mass[head];
  const auto score = [&](float raw, int64_t r) {
    float found = p.soft_cap > 0 ? p.soft_cap * std::tanh(raw / p.soft_cap) : raw;
    if (p.slopes != nullptr) {
      const uint32_t place = p.position[stored + r], query = p.query_position[chunk.row];
      found += slope * static_cast<float>(static_cast<int32_t>(place - query));
    }
    return slot + r == 0 ? found + mass : found;
  };
  if (p.soft_cap == 0 && !placed && logits == nullptr && slot >= low && slot + p.page_size <= length) {
    if (slot == 0) scores[0] += mass;
    return;
  }
  for (int64_t r = 0; r < p.page_size; ++r) {
    bool visible = slot + r < length && slot + r >= low;
    if (p.window > 0 && placed) visible &= p.position[stored + r] > p.query_position[chunk.row] - p.window;
    if (logits != nullptr) logits[r] = visible ? score(scores[r] * p.ratio, r) : kNeg;
    scores[r] = visible ? score(scores[r], r) : kNeg;
  }
}

// Scores, weights and weighted values of a chunk.
template <typename T>
void attend_to(const Problem& p, Chunk& chunk) {
  const int64_t count = chunk.end - chunk.page, slots = count * p.page_size;
  thread_local std::vector<float> scores;
  scores.resize(p.group * slots);
  std::fill_n(chunk.peak, p.group, kNeg), std::fill_n(chunk.mass, p.group, 0.0f);
  std::fill_n(chunk.out, p.group * p.dim, 0.0f);
  const float* q = p.q + (chunk.row * p.heads + chunk.head) * p.group * p.key_dim;
  const int64_t first = (p.first_row + chunk.row) * p.pages;
  using Scores = void (*)(const T*, const float*, int64_t, int64_t, float*, int64_t);
  using Values = void (*)(const T*, const float*, int64_t, int64_t, int64_t, float*);
  constexpr Scores of[] = {page_scores<T, 1>, page_scores<T, 2>, page_scores<T, 3>, page_scores<T, 4>};
  constexpr Values add[] = {page_values<T, 1>, page_values<T, 2>, page_values<T, 3>, page_values<T, 4>};
  for (int64_t i = 0; i < count; ++i) {
    const T* keys = static_cast<const T*>(p.k) + (first + chunk.page + i) * p.key_dim * p.page_size;
    for (int64_t g = 0; g < p.group; g += 4) {
      const int64_t some = std::min<int64_t>(4, p.group - g);
      of[some - 1](keys, q + g * p.key_dim, p.key_dim, p.page_size, scores.data() + g * slots + i * p.page_size, slots);
    }
    for (int64_t g = 0; g < p.group; ++g) {
      finish(p, chunk, chunk.page + i, g, scores.data() + g * slots + i * p.page_size);
    }
  }
  for (int64_t g = 0; g < p.group; ++g) {
    float* own = scores.data() + g * slots;
    const float peak = softmax::largest(own, slots, kNeg);
    chunk.peak[g] = peak;
    if (peak == kNeg) {  // nothing is visible, or has a score above it, or all of it is NaN
      bool empty = true;
      for (int64_t j = 0; j < slots; ++j) empty &= own[j] <= kNeg;
      if (empty) {
        std::fill_n(own, slots, 0.0f);
        continue;
      }
    }
    chunk.mass[g] = softmax::weigh(own, slots, peak);
    if (p.v_scale != nullptr) {
      const float* scale = p.v_scale + (first + chunk.page) * p.page_size;
      for (int64_t j = 0; j < slots; j += kLanes) store(own + j, load(own + j) * load(scale + j));
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const T* values = static_cast<const T*>(p.v) + (first + chunk.page + i) * p.page_size * p.dim;
    for (int64_t g = 0; g < p.group; g += 4) {
      const int64_t some = std::min<int64_t>(4, p.group - g);
      const float* weight = scores.data() + g * slots + i * p.page_size;
      add[some - 1](values, weight, slots, p.page_size, p.dim, chunk.out + g * p.dim);
    }
  }
}

// A head's result of its chunks, in order.
void merge(const Chunk* chunks, int64_t count, int64_t group, int64_t dim, float* out, float* lse) {
  for (int64_t g = 0; g < group; ++g) {
    float peak = kNeg, mass = 0;
    for (int64_t i = 0; i < count; ++i) peak = std::max(peak, chunks[i].peak[g]);
    float* own = out + g * dim;
    std::fill_n(own, dim, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      if (chunks[i].mass[g] == 0) continue;
      const float weight = std::exp(chunks[i].peak[g] - peak);
      mass += weight * chunks[i].mass[g];
      for (int64_t d = 0; d < dim; ++d) own[d] += weight * chunks[i].out[g * dim + d];
    }
    lse[g] = mass == 0 ? kNeg : peak + std::log(mass);
    if (mass != 0) {
      for (int64_t d = 0; d < dim; ++d) own[d] /= mass;
    }
  }
}

// All heads of all rows; `attend` is attend_to of the pages' type.
ffi::Error solve(ffi::ThreadPool pool, const Problem& p, void (*attend)(const Problem&, Chunk&), float* out,
                 float* lse) {
  const int64_t pages = std::max<int64_t>(1, kChunk / p.page_size), heads = p.rows * p.heads;
  std::vector<Chunk> chunks;
  std::vector<int64_t> begin(heads + 1);
  for (int64_t i = 0; i < heads; ++i) {
    begin[i] = chunks.size();
    // A head's pages end where the next one's begin.
    const int64_t start = std::clamp<int64_t>(p.first[i], 0, p.pages);
    const int64_t end_of = i % p.heads + 1 < p.heads ? std::clamp<int64_t>(p.first[i + 1], 0, p.pages) : p.pages;
    const int64_t most = std::max<int64_t>(0, end_of - start);
    const int64_t used = std::min<int64_t>(most, (std::max<int64_t>(0, p.length[i]) + p.page_size - 1) / p.page_size);
    const bool by_slot = p.window > 0 && p.position == nullptr;
    const int64_t hidden = by_slot ? std::max<int64_t>(0, p.length[i] - p.window) / p.page_size / pages * pages : 0;
    for (int64_t page = hidden; page < used; page += pages) {
      const int64_t end = std::min(page + pages, used);
      chunks.push_back({i / p.heads, i % p.heads, start + page, start + end, nullptr, nullptr, nullptr});
    }
  }
  begin[heads] = chunks.size();
  // One allocation for all that chunks find.
  const int64_t count = chunks.size(), each = p.group * (p.dim + 2);
  const std::unique_ptr<float[]> found(new float[count * each]);
  for (int64_t i = 0; i < count; ++i) {
    float* own = found.get() + i * each;
    chunks[i].peak = own, chunks[i].mass = own + p.group, chunks[i].out = own + 2 * p.group;
  }
  const bool done = parallel(pool, count, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) attend(p, chunks[i]);
  });
  if (!done) return out_of_memory();
  for (int64_t i = 0; i < heads; ++i) {
    merge(chunks.data() + begin[i], begin[i + 1] - begin[i], p.group, p.dim, out + i * p.group * p.dim,
          lse + i * p.group);
  }
  return ffi::Error::Success();
}

using Queries = ffi::Buffer<ffi::F32, 4>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Result = ffi::ResultBuffer<ffi::F32>;

ffi::Error attend(ffi::ThreadPool pool, Queries q, ffi::AnyBuffer k, ffi::AnyBuffer v, Ints first, Ints length,
                  Ints first_row, Floats v_scale, Floats log_mass, Ints position, Ints query_position, Floats slopes,
                  int64_t window, float soft_cap, float ratio, Result out, Result lse, Result logits) {
  const auto shape = q.dimensions(), keys = k.dimensions(), values = v.dimensions();
  const auto type = v.element_type();
  const auto attend = type == ffi::F32    ? attend_to<float>
                      : type == ffi::BF16 ? attend_to<uint16_t>
                      : type == ffi::S8   ? attend_to<int8_t>
                                          : nullptr;
  if (attend == nullptr || k.element_type() != type || keys.size() != 4 || values.size() != 4) {
    return ffi::Error::InvalidArgument("Keys and values are no pages of float32, bfloat16 or int8.");
  }
  Problem p{};
  p.rows = shape[0], p.heads = shape[1], p.group = shape[2], p.key_dim = shape[3];
  p.pages = values[1], p.page_size = values[2], p.dim = values[3];
  if (keys[2] != p.key_dim || p.page_size % kLanes != 0 || p.dim % kLanes != 0) {
    return ffi::Error::InvalidArgument(
        "Queries and keys differ in channels, or slots or channels are not 16 together.");
  }
  p.first_row = std::clamp<int64_t>(first_row.typed_data()[0], 0, values[0] - p.rows);
  p.q = q.typed_data(), p.k = k.untyped_data(), p.v = v.untyped_data();
  p.first = first.typed_data(), p.length = length.typed_data();
  p.v_scale = data_or_null(v_scale), p.log_mass = data_or_null(log_mass), p.slopes = data_or_null(slopes);
  p.position = data_or_null(position), p.query_position = data_or_null(query_position);
  p.window = window, p.soft_cap = soft_cap, p.ratio = ratio;
  p.logits = logits->element_count() == 0 ? nullptr : logits->typed_data();
  if (p.logits != nullptr) std::fill_n(p.logits, logits->element_count(), kNeg);
  return guarded([&] { return solve(pool, p, attend, out->typed_data(), lse->typed_data()); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_attention, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Queries>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("ratio")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());
