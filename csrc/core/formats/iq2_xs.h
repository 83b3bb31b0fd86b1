// IQ2_XS: { half d; uint16 q[32]; uint8 scale[8]; }  q = row | signs << 9 of 8 values.
//   value = d * (0.5 + s) / 4 * +-level, a nibble s of `scale` for 16 values.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ2_XS {
  static constexpr int kType = 17, kElems = 256, kBytes = 74, kGroup = 8;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    const int s = (quant[66 + g / 4] >> 4 * (g / 2 % 2)) & 15;
    return {mul(load_half(quant), (0.5f + float(s)) * 0.25f), kNoBias};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const uint32_t q = load_u16(quant + 2 + 2 * g);
    return with_sign(iq2_level(iq2_xs_row(int(q & 511)), j), even_signs(q >> 9), j);
  }
};

}  // namespace dflash
