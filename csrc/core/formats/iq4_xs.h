// IQ4_XS: { half d; uint16 scale_high; uint8 scale_low[4]; uint8 q[128]; }  scales per 32 values.
//   value = d * scale * iq4_value(q).
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ4_XS {
  static constexpr int kType = 23, kElems = 256, kBytes = 136, kGroup = 16;

  // Scale of the 32 values from 32 * b on.
  DFLASH_HD static int scale(const uint8_t* quant, int b) {
    const uint32_t low = (quant[4 + b / 2] >> 4 * (b % 2)) & 15;
    const uint32_t high = (load_u16(quant + 2) >> 2 * b) & 3;
    return int(low | high << 4) - 32;
  }

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    return {mul(load_half(quant), float(scale(quant, g / 2))), kNoBias};
  }

  // Sixteen bytes hold 32 values: low nibbles first, then high nibbles.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return iq4_value((quant[8 + g / 2 * 16 + j] >> 4 * (g % 2)) & 15);
  }
};

}  // namespace dflash
