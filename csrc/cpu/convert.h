// float16 and bfloat16 to float32, exactly; include it after avx2.h or avx512.h.
#pragma once
#include "cpu/float_type.h"
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

}  // namespace dflash::cpu::DFLASH_ISA
