// IQ3_XXS: { half d; uint8 row[64]; uint32 w[8]; }  rows of 4 values, a w per 32 values.
//   w = four times seven sign bits and, above them, s:  value = d * (0.5 + s) / 2 * +-level.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ3_XXS {
  static constexpr int kType = 18, kElems = 256, kBytes = 98, kGroup = 4;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    const uint32_t s = quant[66 + g / 8 * 4 + 3] >> 4;
    return {mul(load_half(quant), (0.5f + float(s)) * 0.5f), kNoBias};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const uint32_t w = load_u32(quant + 66 + g / 8 * 4);
    const uint32_t signs = even_signs(w >> 7 * (g / 2 % 4) & 127) >> 4 * (g % 2);
    return with_sign(iq3_xxs_level(iq3_xxs_row(quant[2 + g]), j), signs, j);
  }
};

}  // namespace dflash
