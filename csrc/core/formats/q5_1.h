// Q5_1: { half d; half m; uint32 high; uint8 q[16]; }  value = d * (q | high << 4) + m.
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct Q5_1 {
  static constexpr int kType = 7, kElems = 32, kBytes = 24, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) {
    return {load_half(quant), load_half(quant + 2)};
  }

  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const uint32_t high = (load_u16(quant + 4 + 2 * g) >> j) & 1;
    return int(((quant[8 + j] >> 4 * g) & 15) | high << 4);
  }
};

}  // namespace dflash
