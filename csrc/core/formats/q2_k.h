// Q2_K: { uint8 sm[16]; uint8 q[64]; half d; half dmin; }  16 groups of 16.
//   value = d * (sm[g] & 15) * q - dmin * (sm[g] >> 4).
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct Q2_K {
  static constexpr int kType = 10, kElems = 256, kBytes = 84, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    return {mul(load_half(quant + 80), float(quant[g] & 15)),
            -mul(load_half(quant + 82), float(quant[g] >> 4))};
  }

  // 32 bytes hold 128 values: bits 0-1 of all, then bits 2-3, ...
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return (quant[16 + g / 8 * 32 + g % 2 * 16 + j] >> 2 * (g / 2 % 4)) & 3;
  }
};

}  // namespace dflash
