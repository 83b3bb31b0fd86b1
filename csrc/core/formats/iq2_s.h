// IQ2_S: { half d; uint8 row[32]; uint8 signs[32]; uint8 high[8]; uint8 scale[8]; }
//   value = d * (0.5 + s) / 4 * +-level, a nibble s of `scale` for 16 values.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ2_S {
  static constexpr int kType = 22, kElems = 256, kBytes = 82, kGroup = 8;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    const int s = (quant[74 + g / 4] >> 4 * (g / 2 % 2)) & 15;
    return {mul(load_half(quant), (0.5f + float(s)) * 0.25f), kNoBias};
  }

  // A row number has ten bits: two of `high` above the byte.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const int row = quant[2 + g] | ((quant[66 + g / 4] >> 2 * (g % 4)) & 3) << 8;
    return with_sign(iq2_level(iq2_s_row(row), j), quant[34 + g], j);
  }
};

}  // namespace dflash
