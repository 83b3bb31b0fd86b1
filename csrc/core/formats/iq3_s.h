// IQ3_S: { half d; uint8 row[64]; uint8 high[8]; uint8 signs[32]; uint8 scale[4]; }
//   value = d * (1 + 2 s) * +-level, a nibble s of `scale` for 32 values.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ3_S {
  static constexpr int kType = 21, kElems = 256, kBytes = 110, kGroup = 4;

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    const int s = (quant[106 + g / 16] >> 4 * (g / 8 % 2)) & 15;
    return {mul(load_half(quant), float(1 + 2 * s)), kNoBias};
  }

  // A row of four values has nine bits of number: one of `high` above the byte.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const int row = quant[2 + g] | ((quant[66 + g / 8] >> g % 8) & 1) << 8;
    return with_sign(iq3_s_level(iq3_s_row(row), j), quant[74 + g / 2] >> 4 * (g % 2), j);
  }
};

}  // namespace dflash
