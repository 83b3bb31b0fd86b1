// MXFP4: { uint8 e; uint8 q[16]; }  value = 2^(e - 128) * fp4_value(q), e2m1 numbers doubled.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct MXFP4 {
  static constexpr int kType = 39, kElems = 32, kBytes = 17, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) {
    const uint32_t e = quant[0];
    // 2^-128 and 2^-127 are subnormal
    return {bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23), kNoBias};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return fp4_value((quant[1 + j] >> 4 * g) & 15);
  }
};

}  // namespace dflash
