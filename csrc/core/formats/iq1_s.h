// IQ1_S: { half d; uint8 row[32]; uint16 h[8]; }  h per 32 values = four times three high bits of a
//   row number, three bits s, and the sign of delta:  value = d * (2 s + 1) * (trit +- 1/8).
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ1_S {
  static constexpr int kType = 19, kElems = 256, kBytes = 50, kGroup = 8;

  // An eighth of the scale, since codes are eight times the value: integers.
  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    const uint32_t s = load_u16(quant + 34 + g / 4 * 2) >> 12 & 7;
    return {mul(load_half(quant), float(2 * s + 1) * 0.125f), kNoBias};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const uint32_t h = load_u16(quant + 34 + g / 4 * 2);
    const int row = int(quant[2 + g] | (h >> 3 * (g % 4) & 7) << 8);
    return 8 * iq1_level(iq1_row(row), j) + (h >> 15 ? -1 : 1);
  }
};

}  // namespace dflash
