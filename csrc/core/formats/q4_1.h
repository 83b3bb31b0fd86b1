// Q4_1: { half d; half m; uint8 q[16]; }  value = d * q + m.  Low nibbles are values 0..15.
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct Q4_1 {
  static constexpr int kType = 3, kElems = 32, kBytes = 20, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) {
    return {load_half(quant), load_half(quant + 2)};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return (quant[4 + j] >> 4 * g) & 15;
  }
};

}  // namespace dflash
