// core/act.h's quantizer in vectors, bit for bit; include it after avx2.h or avx512.h. Every
// producer of packed activations on the CPU (quant_act and the fused epilogues) goes through here.
#pragma once
#include "core/act.h"
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {

namespace act_detail {

#ifdef __AVX512F__
constexpr int kStep = 16;
using Ints = __m512i;
using Floats = __m512;
#define DFLASH_ACT(op) _mm512_##op
DFLASH_INLINE Floats loadu(const float* x) {
  return _mm512_loadu_ps(x);
}
DFLASH_INLINE Ints bits(Floats x) {
  return _mm512_castps_si512(x);
}
DFLASH_INLINE Floats floats(Ints x) {
  return _mm512_castsi512_ps(x);
}
DFLASH_INLINE Ints both(Ints a, Ints b) {
  return _mm512_and_si512(a, b);
}
DFLASH_INLINE Ints either(Ints a, Ints b) {
  return _mm512_or_si512(a, b);
}
DFLASH_INLINE int32_t reduce_max(Ints a) {
  return _mm512_reduce_max_epi32(a);
}
// The sign of q on magnitude m.
DFLASH_INLINE Ints with_sign(Ints m, Ints q) {
  return _mm512_mask_sub_epi32(m, _mm512_movepi32_mask(q), _mm512_setzero_si512(), m);
}
DFLASH_INLINE void store_bytes(int8_t* out, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(a));
}
#else
constexpr int kStep = 8;
using Ints = __m256i;
using Floats = __m256;
#define DFLASH_ACT(op) _mm256_##op
DFLASH_INLINE Floats loadu(const float* x) {
  return _mm256_loadu_ps(x);
}
DFLASH_INLINE Ints bits(Floats x) {
  return _mm256_castps_si256(x);
}
DFLASH_INLINE Floats floats(Ints x) {
  return _mm256_castsi256_ps(x);
}
DFLASH_INLINE Ints both(Ints a, Ints b) {
  return _mm256_and_si256(a, b);
}
DFLASH_INLINE Ints either(Ints a, Ints b) {
  return _mm256_or_si256(a, b);
}
DFLASH_INLINE int32_t reduce_max(Ints a) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}
DFLASH_INLINE Ints with_sign(Ints m, Ints q) {
  return _mm256_sign_epi32(m, q);  // zeroes where q is 0, and there m is 0 as well
}
DFLASH_INLINE void store_bytes(int8_t* out, Ints a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
}
#endif

// Sum of 16 codes: as unsigned bytes (+128 each) by the sum-of-absolute-differences instruction.
DFLASH_INLINE int16_t sum16(const int8_t* codes) {
  const __m128i v =
      _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), _mm_set1_epi8(-128));
  const __m128i s = _mm_sad_epu8(v, _mm_setzero_si128());
  return int16_t(_mm_cvtsi128_si32(_mm_add_epi64(s, _mm_unpackhi_epi64(s, s))) - 16 * 128);
}

// The bit pattern of the largest |x| of n values, a multiple of kStep.
DFLASH_INLINE uint32_t amax_bits(const float* x, int n) {
  const Ints magnitude_bits = DFLASH_ACT(set1_epi32)(0x7fffffff);
  Ints largest = DFLASH_ACT(set1_epi32)(0);
  for (int i = 0; i < n; i += kStep)
    largest = DFLASH_ACT(max_epi32)(largest, both(bits(loadu(x + i)), magnitude_bits));
  return uint32_t(reduce_max(largest));
}

}  // namespace act_detail

// One full group: x[0 .. 256).
static inline void quantize_full_group(const float* x, ActGroup* group) {
  using namespace act_detail;
  const ActScale s = act_scale(amax_bits(x, kActGroup));
  memset(group, 0, 16);
  group->scale = s.scale;
  if (s.inv == 0.f) {
    memset(group->sum_hi, 0, sizeof(ActGroup) - offsetof(ActGroup, sum_hi));
    return;
  }
  const Floats inv = DFLASH_ACT(set1_ps)(s.inv);
  const Ints most = DFLASH_ACT(set1_epi32)(kActMax), least = DFLASH_ACT(set1_epi32)(-kActMax);
  const Ints half = DFLASH_ACT(set1_epi32)(126), reciprocal = DFLASH_ACT(set1_epi32)(33027);
  const Ints base = DFLASH_ACT(set1_epi32)(254);
  for (int i = 0; i < kActGroup; i += kStep) {
    // cvtps rounds to nearest even, as round_even() does
    Ints q = DFLASH_ACT(cvtps_epi32)(DFLASH_ACT(mul_ps)(loadu(x + i), inv));
    q = DFLASH_ACT(max_epi32)(DFLASH_ACT(min_epi32)(q, most), least);
    const Ints scaled =
        DFLASH_ACT(mullo_epi32)(DFLASH_ACT(add_epi32)(DFLASH_ACT(abs_epi32)(q), half), reciprocal);
    const Ints hi = with_sign(DFLASH_ACT(srli_epi32)(scaled, 23), q);
    store_bytes(group->hi + i, hi);
    store_bytes(group->lo + i, DFLASH_ACT(sub_epi32)(q, DFLASH_ACT(mullo_epi32)(hi, base)));
  }
  for (int g = 0; g < 16; ++g) {
    group->sum_hi[g] = sum16(group->hi + 16 * g);
    group->sum_lo[g] = sum16(group->lo + 16 * g);
  }
}

static inline void quantize_full_group(const float* x, Q8Group* group) {
  using namespace act_detail;
  const Ints sign = DFLASH_ACT(set1_epi32)(int(0x80000000u));
  const Ints half = bits(DFLASH_ACT(set1_ps)(0.49999997f));
  for (int q = 0; q < kQ8Quants; ++q, x += kQ8Values) {
    const ActScale s = q8_scale(amax_bits(x, kQ8Values));
    int8_t* code = group->code + q * kQ8Values;
    group->scale[q] = s.scale;
    if (s.inv == 0.f) {
      memset(code, 0, kQ8Values);
      group->sum[2 * q] = group->sum[2 * q + 1] = 0;
      continue;
    }
    const Floats inv = DFLASH_ACT(set1_ps)(s.inv);
    for (int i = 0; i < kQ8Values; i += kStep) {
      const Floats v = DFLASH_ACT(mul_ps)(loadu(x + i), inv);
      const Floats away = floats(either(both(bits(v), sign), half));
      store_bytes(code + i, DFLASH_ACT(cvttps_epi32)(DFLASH_ACT(add_ps)(v, away)));
    }
    group->sum[2 * q] = sum16(code);
    group->sum[2 * q + 1] = sum16(code + 16);
  }
}

#undef DFLASH_ACT

// x[0 .. n) of one group, n <= 256.
template <class Group>
static inline void quantize_group(const float* x, int64_t n, Group* group) {
  if (n == kActGroup) return quantize_full_group(x, group);
  alignas(64) float padded[kActGroup] = {};
  memcpy(padded, x, size_t(n) * sizeof(float));
  quantize_full_group(padded, group);
}

// A float row -> a packed row of packed_bytes(columns, act_mode); a part of one, if it starts at a
// group.
static inline void quantize_row(const float* x, int64_t columns, int64_t act_mode,
                                uint8_t* packed) {
  with_group(act_mode, [&]<class Group>() {
    auto* group = reinterpret_cast<Group*>(packed);
    for (int64_t k = 0; k < columns; k += kActGroup)
      quantize_group(x + k, std::min<int64_t>(kActGroup, columns - k), group++);
  });
}

}  // namespace dflash::cpu::DFLASH_ISA
