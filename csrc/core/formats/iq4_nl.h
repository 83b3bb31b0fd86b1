// IQ4_NL: { half d; uint8 q[16]; }  value = d * iq4_value(q).  Low nibbles are values 0..15.
#pragma once
#include "core/formats/grids.h"

namespace dflash {

struct IQ4_NL {
  static constexpr int kType = 20, kElems = 32, kBytes = 18, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) { return {load_half(quant), kNoBias}; }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return iq4_value((quant[2 + j] >> 4 * g) & 15);
  }
};

}  // namespace dflash
