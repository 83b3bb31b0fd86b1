// float16 and bfloat16 from and to float32, the bits of core/float_type.h; include it after avx2.h
// or avx512.h.
#pragma once
#include "core/float_type.h"
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {

DFLASH_INLINE void half_to_float(const uint16_t* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < n; ++i) out[i] = half_bits_to_float(x[i]);
}

DFLASH_INLINE void bf16_to_float(const uint16_t* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_bits_to_float(x[i]);
}

// x[from .. from + n) as floats: the row itself when it is float32 already, else `buffer`.
DFLASH_INLINE const float* as_float(const void* x, FloatType type, int64_t from, int64_t n,
                                    float* buffer) {
  if (type == FloatType::kF32) return static_cast<const float*>(x) + from;
  const uint16_t* narrow = static_cast<const uint16_t*>(x) + from;
  if (type == FloatType::kF16)
    half_to_float(narrow, n, buffer);
  else
    bf16_to_float(narrow, n, buffer);
  return buffer;
}

// Sixteen at a time.
DFLASH_INLINE F32x16 load(const Half* p) {
#ifdef __AVX512F__
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#else
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
#endif
}

DFLASH_INLINE void store(Half* p, F32x16 a) {
#ifdef __AVX512F__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
#endif
}

// The bf16 bits of each float, in the upper half of its 32 bits; the lower half is 0.
#ifdef __AVX512F__
DFLASH_INLINE __m512i bf16_high(__m512 a) {
  const __m512i u = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_and_si512(_mm512_mask_blend_epi32(nan, rounded, quiet),
                          _mm512_set1_epi32(int(0xffff0000u)));
}
#else
DFLASH_INLINE __m256i bf16_high(__m256 a) {
  const __m256i u = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_and_si256(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)),
                          _mm256_set1_epi32(int(0xffff0000u)));
}
#endif

DFLASH_INLINE F32x16 load(const Bf16* p) {
#ifdef __AVX512F__
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
#else
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  const auto widen = [](__m128i bits) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  };
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
#endif
}

DFLASH_INLINE void store(Bf16* p, F32x16 a) {
#ifdef __AVX512F__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_high(a.v), 16)));
#else
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(bf16_high(a.lo), 16),
                                             _mm256_srli_epi32(bf16_high(a.hi), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
#endif
}

// stored<T>() of core/float_type.h: what a later load of a T would give.
template <class T>
DFLASH_INLINE F32x16 stored(F32x16 a) {
  if constexpr (std::is_same_v<T, float>) {
    return a;
  } else if constexpr (std::is_same_v<T, Bf16>) {
#ifdef __AVX512F__
    return {_mm512_castsi512_ps(bf16_high(a.v))};
#else
    return {_mm256_castsi256_ps(bf16_high(a.lo)), _mm256_castsi256_ps(bf16_high(a.hi))};
#endif
  } else {
    alignas(32) T half[16];
    store(half, a);
    return load(half);
  }
}

// The first n < 16 of sixteen; the rest is 0 and is not touched in memory.
template <class T>
DFLASH_INLINE F32x16 load_first(const T* p, int n) {
  alignas(64) T part[16] = {};
  memcpy(part, p, size_t(n) * sizeof(T));
  return load(part);
}

template <class T>
DFLASH_INLINE void store_first(T* p, F32x16 a, int n) {
  alignas(64) T part[16];
  store(part, a);
  memcpy(p, part, size_t(n) * sizeof(T));
}

}  // namespace dflash::cpu::DFLASH_ISA
