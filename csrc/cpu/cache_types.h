// Element types of a KV cache as vectors of 16. Include it after avx2.h or avx512.h.
#pragma once
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {

struct CacheF32 {
  using Element = float;
  DFLASH_INLINE F32x16 load(const float* p) { return DFLASH_ISA::load(p); }
  DFLASH_INLINE void store(float* p, F32x16 a) { DFLASH_ISA::store(p, a); }
};

struct CacheF16 {
  using Element = uint16_t;
#ifdef __AVX512F__
  DFLASH_INLINE F32x16 load(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  DFLASH_INLINE void store(uint16_t* p, F32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  DFLASH_INLINE F32x16 load(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  DFLASH_INLINE void store(uint16_t* p, F32x16 a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, kMode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, kMode));
  }
#endif
};

struct CacheBF16 {
  using Element = uint16_t;
#ifdef __AVX512F__
  DFLASH_INLINE F32x16 load(const uint16_t* p) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
#else
  DFLASH_INLINE __m256 load8(const uint16_t* p) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  DFLASH_INLINE F32x16 load(const uint16_t* p) { return {load8(p), load8(p + 8)}; }
#endif
  DFLASH_INLINE void store(uint16_t* p, F32x16 a) {
    alignas(64) float x[16];
    DFLASH_ISA::store(x, a);
    for (int i = 0; i < 16; ++i) p[i] = float_to_bf16_bits(x[i]);
  }
};

// The first n < 16 elements, the others zero; and back.
template <class Cache>
DFLASH_INLINE F32x16 load_part(const typename Cache::Element* p, int n) {
  typename Cache::Element part[16] = {};
  memcpy(part, p, size_t(n) * sizeof(*p));
  return Cache::load(part);
}

template <class Cache>
DFLASH_INLINE void store_part(typename Cache::Element* p, F32x16 a, int n) {
  typename Cache::Element part[16];
  Cache::store(part, a);
  memcpy(p, part, size_t(n) * sizeof(*p));
}

}  // namespace dflash::cpu::DFLASH_ISA
