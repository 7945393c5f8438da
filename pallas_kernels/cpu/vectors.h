// Vectors of sixteen numbers, with AVX-512 VNNI or AVX2, as products need them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// Rows of bytes in a panel, and bytes of a column of it: four inputs of each.
constexpr int kPanel = 16, kColumn = 4 * kPanel;
// Bytes of a row that are transposed at a time.
constexpr int kTransposed = 32;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
inline __m512i unpack_low32(__m512i a, __m512i b) { return _mm512_unpacklo_epi32(a, b); }
inline __m512i unpack_high32(__m512i a, __m512i b) { return _mm512_unpackhi_epi32(a, b); }
inline __m512i unpack_low64(__m512i a, __m512i b) { return _mm512_unpacklo_epi64(a, b); }
inline __m512i unpack_high64(__m512i a, __m512i b) { return _mm512_unpackhi_epi64(a, b); }
#else
inline __m256i unpack_low32(__m256i a, __m256i b) { return _mm256_unpacklo_epi32(a, b); }
inline __m256i unpack_high32(__m256i a, __m256i b) { return _mm256_unpackhi_epi32(a, b); }
inline __m256i unpack_low64(__m256i a, __m256i b) { return _mm256_unpacklo_epi64(a, b); }
inline __m256i unpack_high64(__m256i a, __m256i b) { return _mm256_unpackhi_epi64(a, b); }
#endif

// Of each 128 bits of four registers the four numbers of 32: out[i] has number i of a[0] to a[3].
template <typename Register>
inline void transpose_lanes(const Register (&a)[4], Register (&out)[4]) {
  const Register low = unpack_low32(a[0], a[1]), high = unpack_high32(a[0], a[1]);
  const Register low2 = unpack_low32(a[2], a[3]), high2 = unpack_high32(a[2], a[3]);
  out[0] = unpack_low64(low, low2), out[1] = unpack_high64(low, low2);
  out[2] = unpack_low64(high, high2), out[3] = unpack_high64(high, high2);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// Rows of activations that are multiplied together, of many.
constexpr int kRows = 8;
// The instruction multiplies unsigned numbers by signed ones: numbers are stored so much larger than they are.
constexpr bool kUnsigned = true;

using Ints = __m512i;
using Floats = __m512;

inline Ints ints(const void* from) { return _mm512_loadu_si512(from); }
inline Ints broadcast(int32_t value) { return _mm512_set1_epi32(value); }
inline void store(void* to, Ints a) { _mm512_storeu_si512(to, a); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints high_nibbles(Ints a) { return _mm512_srli_epi16(a, 4); }
inline Ints shuffle_bytes(Ints table, Ints place) { return _mm512_shuffle_epi8(table, place); }
inline Ints broadcast(__m128i a) { return _mm512_broadcast_i32x4(a); }
inline Floats floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Floats floats(const float* from) { return _mm512_loadu_ps(from); }
inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline float lane_sum(Floats a) { return _mm512_reduce_add_ps(a); }

// The same, which the compiler does not read from memory each time that it is used.
inline Floats in_register(Floats a) {
  asm("" : "+v"(a));
  return a;
}

// Adds the products of four numbers of each lane with four activations.
inline Ints add_dot4(Ints sum, Ints numbers, int32_t activations) {
  return _mm512_dpbusd_epi32(sum, numbers, broadcast(activations));
}

inline __m512i two(const uint8_t* a, const uint8_t* b) {
  const auto load = [](const uint8_t* from) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(load(a)), load(b), 1);
}

// The columns of kTransposed bytes of each of a panel's rows.
[[gnu::always_inline]] inline void transposed(const uint8_t* row, int64_t stride, Ints (&columns)[8]) {
  __m512i own[2][4];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, row += 4 * stride) {
    __m512i loaded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, row += stride) loaded[i] = two(row, row + 4 * stride);
    transpose_lanes(loaded, own[half]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    columns[i] = _mm512_shuffle_i32x4(own[0][i], own[1][i], 0x88);
    columns[4 + i] = _mm512_shuffle_i32x4(own[0][i], own[1][i], 0xdd);
  }
}

// Sixteen floats, or of twice as many those in even and in odd places.
inline void widen_floats(const void* from, float* to, float* to_odd) {
  const __m512 first = _mm512_loadu_ps(from);
  if (to_odd == nullptr) return _mm512_storeu_ps(to, first);
  const __m512 second = _mm512_loadu_ps(static_cast<const float*>(from) + 16);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(first, even, second));
  _mm512_storeu_ps(to_odd, _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second));
}

// The same of float16 or bfloat16 numbers, by their bits, in the lower halves of lanes.
inline __m512 wide(__m512i bits, bool float16) {
  return float16 ? _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)) : _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline void widen_halves(const void* from, bool float16, float* to, float* to_odd) {
  if (to_odd == nullptr) {
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    return _mm512_storeu_ps(to, wide(_mm512_cvtepu16_epi32(bits), float16));
  }
  const __m512i pairs = _mm512_loadu_si512(from);
  _mm512_storeu_ps(to, wide(pairs, float16));
  _mm512_storeu_ps(to_odd, wide(_mm512_srli_epi32(pairs, 16), float16));
}

#elif defined(__AVX2__)

constexpr int kRows = 4;
constexpr bool kUnsigned = false;

struct Ints {
  __m256i a, b;
};
struct Floats {
  __m256 a, b;
};

inline Ints ints(const void* from) {
  const auto* own = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(own), _mm256_loadu_si256(own + 1)};
}
inline Ints broadcast(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline void store(void* to, Ints a) {
  auto* own = static_cast<__m256i*>(to);
  _mm256_storeu_si256(own, a.a), _mm256_storeu_si256(own + 1, a.b);
}
inline Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.a, b.a), _mm256_and_si256(a.b, b.b)}; }
inline Ints bit_xor(Ints a, Ints b) { return {_mm256_xor_si256(a.a, b.a), _mm256_xor_si256(a.b, b.b)}; }
inline Ints high_nibbles(Ints a) { return {_mm256_srli_epi16(a.a, 4), _mm256_srli_epi16(a.b, 4)}; }
inline Ints shuffle_bytes(Ints table, Ints place) {
  return {_mm256_shuffle_epi8(table.a, place.a), _mm256_shuffle_epi8(table.b, place.b)};
}
inline Ints broadcast(__m128i a) { return {_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a)}; }
inline Floats floats(Ints a) { return {_mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b)}; }
inline Floats floats(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline void store(float* to, Floats a) { _mm256_storeu_ps(to, a.a), _mm256_storeu_ps(to + 8, a.b); }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline Floats fma(Floats sum, Floats a, Floats b) {
  return {_mm256_fmadd_ps(a.a, b.a, sum.a), _mm256_fmadd_ps(a.b, b.b, sum.b)};
}
inline float lane_sum(Floats a) {
  const __m256 eight = _mm256_add_ps(a.a, a.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Floats in_register(Floats a) {
  asm("" : "+x"(a.a), "+x"(a.b));
  return a;
}

// |number| times the activation with the number's sign: of two such products, at most 2 x 127 x 128, int16 holds the
// sum.
inline __m256i add_dot4(__m256i sum, __m256i numbers, __m256i activations) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(numbers), _mm256_sign_epi8(activations, numbers));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints add_dot4(Ints sum, Ints numbers, int32_t activations) {
  const __m256i x = _mm256_set1_epi32(activations);
  return {add_dot4(sum.a, numbers.a, x), add_dot4(sum.b, numbers.b, x)};
}

[[gnu::always_inline]] inline void transposed(const uint8_t* row, int64_t stride, Ints (&columns)[8]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256i own[2][4];
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      __m256i loaded[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i, row += stride) {
        loaded[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
      }
      transpose_lanes(loaded, own[part]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      (half ? columns[i].b : columns[i].a) = _mm256_permute2x128_si256(own[0][i], own[1][i], 0x20);
      (half ? columns[4 + i].b : columns[4 + i].a) = _mm256_permute2x128_si256(own[0][i], own[1][i], 0x31);
    }
  }
}

inline void widen_floats(const void* from, float* to, float* to_odd) {
  const auto* own = static_cast<const float*>(from);
  if (to_odd == nullptr) {
    std::copy_n(own, kPanel, to);
  } else {
    for (int i = 0; i < kPanel; ++i) to[i] = own[2 * i], to_odd[i] = own[2 * i + 1];
  }
}

inline void widen_halves(const void* from, bool float16, float* to, float* to_odd) {
  const auto* own = static_cast<const __m128i*>(from);
  float numbers[2 * kPanel];
  for (int i = 0; i < (to_odd == nullptr ? 2 : 4); ++i) {
    const __m128i bits = _mm_loadu_si128(own + i);
    const __m256 wide =
        float16 ? _mm256_cvtph_ps(bits) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    _mm256_storeu_ps(numbers + 8 * i, wide);
  }
  widen_floats(numbers, to, to_odd);
}

#else
#error "These products are written for x86-64 with AVX2."
#endif
