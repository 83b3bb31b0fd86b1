// TQ2_0: { uint8 q[64]; half d; }  value = d * (q - 1).
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct TQ2_0 {
  static constexpr int kType = 35, kElems = 256, kBytes = 66, kGroup = 32;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) {
    return {load_half(quant + 64), kNoBias};
  }

  // 32 bytes hold 128 values: bits 0-1 of all, then bits 2-3, ...
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return ((quant[g / 4 * 32 + j] >> 2 * (g % 4)) & 3) - 1;
  }
};

}  // namespace dflash
