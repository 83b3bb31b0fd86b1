// Q4_0: { half d; uint8 q[16]; }  value = d * (q - 8).  Low nibbles are values 0..15.
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct Q4_0 {
  static constexpr int kType = 2, kElems = 32, kBytes = 18, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) { return {load_half(quant), kNoBias}; }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return ((quant[2 + j] >> 4 * g) & 15) - 8;
  }
  DFLASH_HD static void put(uint8_t* quant, int g, int j, int code) {
    quant[2 + j] |= uint8_t((code + 8) << 4 * g);
  }
};

}  // namespace dflash
