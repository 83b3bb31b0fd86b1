// IQ1_M: { uint8 row[32]; uint8 h[16]; uint16 scale[4]; }  a nibble of h per 8 values: three high
//   bits of the row number and the sign of delta; scale = four times three bits s (one per 16
//   values) and, on top, a nibble of the half d:  value = d * (2 s + 1) * (trit +- 1/8).
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ1_M {
  static constexpr int kType = 29, kElems = 256, kBytes = 56, kGroup = 8;

  // An eighth of the scale, since codes are eight times the value: integers.
  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    uint32_t d = 0;
    for (int k = 0; k < 4; ++k) d |= uint32_t(quant[49 + 2 * k] >> 4) << 4 * k;
    const uint32_t s = load_u16(quant + 48 + g / 8 * 2) >> 3 * (g / 2 % 4) & 7;
    return {mul(half_bits_to_float(uint16_t(d)), float(2 * s + 1) * 0.125f), kNoBias};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const int h = quant[32 + g / 2] >> 4 * (g % 2);
    const int row = quant[g] | (h & 7) << 8;
    return 8 * iq1_level(iq1_row(row), j) + (h & 8 ? -1 : 1);
  }
};

}  // namespace dflash
