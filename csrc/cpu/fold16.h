// fold() of core/reduce.h for sixteen dot products at once. Include it after avx2.h or
// avx512.h.
//
// Folding one product is as much work as the product itself at 256 elements; sixteen of them share
// the last four levels. Same tree, same bits.
#pragma once
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {

#ifdef __AVX512F__
template <int kImm>
DFLASH_INLINE F32x16 shuffle_quarters(F32x16 a, F32x16 b) {
  return {_mm512_shuffle_f32x4(a.v, b.v, kImm)};
}
#else
template <int kImm>
DFLASH_INLINE F32x16 shuffle_quarters(F32x16 a, F32x16 b) {
  static_assert(kImm == 0x44 || kImm == 0xee || kImm == 0x88 || kImm == 0xdd);
  if constexpr (kImm == 0x44) return {a.lo, b.lo};
  if constexpr (kImm == 0xee) return {a.hi, b.hi};
  constexpr int kHalves = kImm == 0x88 ? 0x20 : 0x31;
  return {_mm256_permute2f128_ps(a.lo, a.hi, kHalves), _mm256_permute2f128_ps(b.lo, b.hi, kHalves)};
}
#endif

// Accumulators 64 h .. 64 h + 63 (h = 0, 1) to lanes 16 h .. 16 h + 15, as fold(Acc128) places
// them.
DFLASH_INLINE F32x16 fold_half(F32x16 z0, F32x16 z1, F32x16 z2, F32x16 z3) {
  const F32x16 t0 = add(shuffle<0x88>(z0, z1), shuffle<0xdd>(z0, z1));
  const F32x16 t1 = add(shuffle<0x88>(z2, z3), shuffle<0xdd>(z2, z3));
  return add(shuffle<0x88>(t0, t1), shuffle<0xdd>(t0, t1));
}

// w[j]: both halves of product j added. Element j of the result is product j.
DFLASH_INLINE F32x16 fold16(const F32x16* w) {
  F32x16 quarters[4];  // four products each, their lanes 2 and 1 still apart
  for (int r = 0; r < 4; ++r) {
    const F32x16* x = w + 4 * r;
    const F32x16 a = add(shuffle<0x44>(x[0], x[1]), shuffle<0xee>(x[0], x[1]));  // lane ^ 8
    const F32x16 b = add(shuffle<0x44>(x[2], x[3]), shuffle<0xee>(x[2], x[3]));
    quarters[r] = add(shuffle<0x88>(a, b), shuffle<0xdd>(a, b));  // lane ^ 4
  }
  const F32x16 c = add(shuffle_quarters<0x44>(quarters[0], quarters[1]),
                       shuffle_quarters<0xee>(quarters[0], quarters[1]));  // lane ^ 2
  const F32x16 d = add(shuffle_quarters<0x44>(quarters[2], quarters[3]),
                       shuffle_quarters<0xee>(quarters[2], quarters[3]));
  return add(shuffle_quarters<0x88>(c, d), shuffle_quarters<0xdd>(c, d));  // lane ^ 1
}

}  // namespace dflash::cpu::DFLASH_ISA
