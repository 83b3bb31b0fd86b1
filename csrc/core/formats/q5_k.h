// Q5_K: { half d; half dmin; uint8 sm[12]; uint8 high[32]; uint8 q[128]; }  8 groups of 32.
//   value = d * scale[g] * (q | high << 4) - dmin * min[g];  sm as in scale_min.h.
#pragma once
#include "core/formats/scale_min.h"

namespace dflash {

struct Q5_K {
  static constexpr int kType = 13, kElems = 256, kBytes = 176, kGroup = 32;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) { return scale_min_affine(quant, g); }

  // q as in Q4_K; bit g of high[j] is the fifth bit of value j of group g.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const int low = (quant[48 + g / 2 * 32 + j] >> 4 * (g % 2)) & 15;
    return low | ((quant[16 + j] >> g) & 1) << 4;
  }
  DFLASH_HD static void put(uint8_t* quant, int g, int j, int code) {
    quant[48 + g / 2 * 32 + j] |= uint8_t((code & 15) << 4 * (g % 2));
    quant[16 + j] |= uint8_t(code >> 4 << g);
  }
};

}  // namespace dflash
