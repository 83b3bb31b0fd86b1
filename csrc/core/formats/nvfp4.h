// NVFP4: { uint8 d[4]; uint8 q[32]; }  value = ue4m3(d) / 2 * fp4_value(q), a d per 16 values.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct NVFP4 {
  static constexpr int kType = 40, kElems = 64, kBytes = 36, kGroup = 4;

  // Half of an unsigned e4m3 number with bias 7; its NaN is 0, and its eighth bit is not used.
  DFLASH_HD static float scale(uint8_t d) {
    const uint32_t exponent = d >> 3 & 15, mantissa = d & 7;
    const float subnormal = float(mantissa) * 0.0009765625f;  // 2^-10
    const float normal = bit_cast<float>((exponent + 119) << 23 | mantissa << 20);
    return select(d == 0x7f, 0.f, select(exponent == 0, subnormal, normal));
  }

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    return {scale(quant[g / 4]), kNoBias};
  }

  // Eight bytes hold 16 values: low nibbles first, then high nibbles.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const uint32_t nibbles = load_u32(quant + 4 + g / 4 * 8 + g % 2 * 4) >> 4 * (g / 2 % 2);
    return fp4_value(int(nibbles >> 8 * j & 15));
  }
};

}  // namespace dflash
