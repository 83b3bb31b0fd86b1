// Rows of a weight tile as lanes: sixteen with AVX-512, and with AVX2 a tile in two parts of eight.
// Include it after avx2.h or avx512.h.
#pragma once
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {

#ifdef __AVX512F__

constexpr int kParts = 1, kPartRows = 16;

using Ints = __m512i;
struct Floats {
  __m512 v;
};
// Bytes per lane: a pattern for pick(), which works within 16 bytes.
#define DFLASH_PATTERN(a, b, c, d)                                                                 \
  _mm512_broadcast_i32x4(_mm_setr_epi8(a, b, c, d, pick_at(a, 4), pick_at(b, 4), pick_at(c, 4),    \
                                       pick_at(d, 4), pick_at(a, 8), pick_at(b, 8), pick_at(c, 8), \
                                       pick_at(d, 8), pick_at(a, 12), pick_at(b, 12),              \
                                       pick_at(c, 12), pick_at(d, 12)))

DFLASH_INLINE Ints load_ints(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}
DFLASH_INLINE Ints zero_ints() {
  return _mm512_setzero_si512();
}
DFLASH_INLINE Ints set1_bytes(int x) {
  return _mm512_set1_epi8(char(x));
}
DFLASH_INLINE Ints set1_words(int x) {
  return _mm512_set1_epi16(short(x));
}
DFLASH_INLINE Ints set1_ints(int x) {
  return _mm512_set1_epi32(x);
}
DFLASH_INLINE Ints add_ints(Ints a, Ints b) {
  return _mm512_add_epi32(a, b);
}
DFLASH_INLINE Ints sub_ints(Ints a, Ints b) {
  return _mm512_sub_epi32(a, b);
}
DFLASH_INLINE Ints mul_ints(Ints a, Ints b) {
  return _mm512_mullo_epi32(a, b);
}
DFLASH_INLINE Ints and_ints(Ints a, Ints b) {
  return _mm512_and_si512(a, b);
}
DFLASH_INLINE Ints xor_ints(Ints a, Ints b) {
  return _mm512_xor_si512(a, b);
}
// Bits of a where the mask has ones, of b elsewhere.
DFLASH_INLINE Ints select_bits(Ints mask, Ints a, Ints b) {
  return _mm512_ternarylogic_epi32(a, b, mask, 0xe4);
}
// Int16 lanes; the count is a constant once the loop around it is unrolled.
DFLASH_INLINE Ints shift_left(Ints a, int bits) {
  return bits < 0 ? Ints(__v32hu(a) >> -bits) : Ints(__v32hu(a) << bits);
}
DFLASH_INLINE Ints shift_ints_left(Ints a, int bits) {
  return _mm512_slli_epi32(a, bits);
}
DFLASH_INLINE Ints top_byte_signed(Ints a) {
  return _mm512_srai_epi32(a, 24);
}
DFLASH_INLINE Ints top_bytes_signed(Ints a) {
  return _mm512_srai_epi16(a, 8);
}
DFLASH_INLINE Ints pick(Ints a, Ints pattern) {
  return _mm512_shuffle_epi8(a, pattern);
}
DFLASH_INLINE Ints table16(const int8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
// sum + a.even * b.even + a.odd * b.odd, of int16 pairs
DFLASH_INLINE Ints dot_words(Ints sum, Ints a, Ints b) {
  return _mm512_dpwssd_epi32(sum, a, b);
}

DFLASH_INLINE Floats set1_lanes(float x) {
  return {_mm512_set1_ps(x)};
}
DFLASH_INLINE Floats to_floats(Ints a) {
  return {_mm512_cvtepi32_ps(a)};
}
DFLASH_INLINE Floats halves_to_floats(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
DFLASH_INLINE Floats mul_lanes(Floats a, Floats b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
DFLASH_INLINE Floats fma_lanes(Floats a, Floats b, Floats c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
// fma(-a, b, c)
DFLASH_INLINE Floats fnma_lanes(Floats a, Floats b, Floats c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
DFLASH_INLINE Floats operator+(Floats a, Floats b) {
  return {_mm512_add_ps(a.v, b.v)};
}
DFLASH_INLINE void store_lanes(float* p, Floats a) {
  _mm512_storeu_ps(p, a.v);
}

#else

constexpr int kParts = 2, kPartRows = 8;

using Ints = __m256i;
struct Floats {
  __m256 v;
};
#define DFLASH_PATTERN(a, b, c, d)                                                              \
  _mm256_broadcastsi128_si256(                                                                  \
      _mm_setr_epi8(a, b, c, d, pick_at(a, 4), pick_at(b, 4), pick_at(c, 4), pick_at(d, 4),     \
                    pick_at(a, 8), pick_at(b, 8), pick_at(c, 8), pick_at(d, 8), pick_at(a, 12), \
                    pick_at(b, 12), pick_at(c, 12), pick_at(d, 12)))

DFLASH_INLINE Ints load_ints(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
DFLASH_INLINE Ints zero_ints() {
  return _mm256_setzero_si256();
}
DFLASH_INLINE Ints set1_bytes(int x) {
  return _mm256_set1_epi8(char(x));
}
DFLASH_INLINE Ints set1_words(int x) {
  return _mm256_set1_epi16(short(x));
}
DFLASH_INLINE Ints set1_ints(int x) {
  return _mm256_set1_epi32(x);
}
DFLASH_INLINE Ints add_ints(Ints a, Ints b) {
  return _mm256_add_epi32(a, b);
}
DFLASH_INLINE Ints sub_ints(Ints a, Ints b) {
  return _mm256_sub_epi32(a, b);
}
DFLASH_INLINE Ints mul_ints(Ints a, Ints b) {
  return _mm256_mullo_epi32(a, b);
}
DFLASH_INLINE Ints and_ints(Ints a, Ints b) {
  return _mm256_and_si256(a, b);
}
DFLASH_INLINE Ints xor_ints(Ints a, Ints b) {
  return _mm256_xor_si256(a, b);
}
DFLASH_INLINE Ints select_bits(Ints mask, Ints a, Ints b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}
// Int16 lanes; the count is a constant once the loop around it is unrolled.
DFLASH_INLINE Ints shift_left(Ints a, int bits) {
  return bits < 0 ? Ints(__v16hu(a) >> -bits) : Ints(__v16hu(a) << bits);
}
DFLASH_INLINE Ints shift_ints_left(Ints a, int bits) {
  return _mm256_slli_epi32(a, bits);
}
DFLASH_INLINE Ints top_byte_signed(Ints a) {
  return _mm256_srai_epi32(a, 24);
}
DFLASH_INLINE Ints top_bytes_signed(Ints a) {
  return _mm256_srai_epi16(a, 8);
}
DFLASH_INLINE Ints pick(Ints a, Ints pattern) {
  return _mm256_shuffle_epi8(a, pattern);
}
DFLASH_INLINE Ints table16(const int8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
DFLASH_INLINE Ints dot_words(Ints sum, Ints a, Ints b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

DFLASH_INLINE Floats set1_lanes(float x) {
  return {_mm256_set1_ps(x)};
}
DFLASH_INLINE Floats to_floats(Ints a) {
  return {_mm256_cvtepi32_ps(a)};
}
DFLASH_INLINE Floats halves_to_floats(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
DFLASH_INLINE Floats mul_lanes(Floats a, Floats b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
DFLASH_INLINE Floats fma_lanes(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
DFLASH_INLINE Floats fnma_lanes(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.v, b.v, c.v)};
}
DFLASH_INLINE Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.v, b.v)};
}
DFLASH_INLINE void store_lanes(float* p, Floats a) {
  _mm256_storeu_ps(p, a.v);
}

#endif

// core/reduce.h's Tree, again: that one is compiled before avx512.h raises the target, and its
// functions cannot take in additions of wider vectors.
struct LaneTree {
  Floats node[24];
  int depth = 0;
  uint32_t leaves = 0;

  __attribute__((always_inline)) void push(Floats value) {
    for (uint32_t n = leaves; n & 1; n >>= 1) value = node[--depth] + value;
    node[depth++] = value;
    ++leaves;
  }
  __attribute__((always_inline)) Floats join() {
    Floats value = node[--depth];
    while (depth > 0) value = node[--depth] + value;
    return value;
  }
};

// Four bytes of an activation, or two of its int16 sums, to every lane.
DFLASH_INLINE Ints broadcast(const void* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return set1_ints(word);
}

constexpr int kBlank = -128;  // pick() puts a zero byte

DFLASH_INLINE constexpr char pick_at(int byte, int lane_offset) {
  return char(byte == kBlank ? kBlank : byte + lane_offset);
}

// A sum of products of weight codes and activation codes, four a lane and step; the user sets
// `total` first. (A member initialiser would make a constructor, which misses the raised target.)
//
// kBits <= 6: unsigned weights. kBits == 8: with VNNI unsigned weights (the caller corrects an
// offset), with AVX2 signed ones. The largest sum of a group fits int32: 32 * 255 * 127 < 2^20.1.
#ifdef __AVX512F__
constexpr bool kSignedBytes = false;

template <int kBits>
struct Dot {
  Ints total;

  __attribute__((always_inline)) void add(int, Ints weights, Ints x) {
    total = _mm512_dpbusd_epi32(total, weights, x);
  }
};
#else
constexpr bool kSignedBytes = true;

// maddubs gives int16 sums of two products; so many steps stay below 2^15 (two products are at most
// 2 * 15 * 127 = 3810, 7874, 16002) before they are widened.
template <int kBits>
struct Dot {
  static constexpr int kSteps = kBits == 4 ? 8 : kBits == 5 ? 4 : 2;
  Ints total;
  Ints words;

  __attribute__((always_inline)) void add(int step, Ints weights, Ints x) {
    const Ints products = _mm256_maddubs_epi16(weights, x);
    words = step % kSteps == 0 ? products : _mm256_add_epi16(words, products);
    if (step % kSteps == kSteps - 1)
      total = add_ints(total, _mm256_madd_epi16(words, set1_words(1)));
  }
};

// |w| <= 128 as an unsigned byte, its sign moved to x: 2 * 128 * 127 < 2^15.
template <>
struct Dot<8> {
  Ints total;

  __attribute__((always_inline)) void add(int, Ints weights, Ints x) {
    const Ints products =
        _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    total = add_ints(total, _mm256_madd_epi16(products, set1_words(1)));
  }
};
#endif

}  // namespace dflash::cpu::DFLASH_ISA
