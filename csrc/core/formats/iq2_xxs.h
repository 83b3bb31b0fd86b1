// IQ2_XXS: { half d; { uint8 row[4]; uint32 w; } sub[8]; }  32 values a sub.
//   w = four times seven sign bits and, above them, s:  value = d * (0.5 + s) / 4 * +-level.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ2_XXS {
  static constexpr int kType = 16, kElems = 256, kBytes = 66, kGroup = 8;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    const uint32_t s = quant[2 + g / 4 * 8 + 7] >> 4;
    return {mul(load_half(quant), (0.5f + float(s)) * 0.25f), kNoBias};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const uint8_t* sub = quant + 2 + g / 4 * 8;
    const uint32_t signs = even_signs(load_u32(sub + 4) >> 7 * (g % 4) & 127);
    return with_sign(iq2_level(iq2_xxs_row(sub[g % 4]), j), signs, j);
  }
};

}  // namespace dflash
