// Q3_K: { uint8 high[32]; uint8 q[64]; uint8 scale[12]; half d; }  16 groups of 16.
//   value = d * scale(g) * (q - (high ? 0 : 4)).
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct Q3_K {
  static constexpr int kType = 11, kElems = 256, kBytes = 110, kGroup = 16;

  // Six bits: a nibble of the first eight bytes (low nibbles are groups 0..7) and two bits of the
  // last four (bits 0-1 are groups 0..3, bits 2-3 groups 4..7, ...).
  DFLASH_HD static int scale(const uint8_t* quant, int g) {
    const int low = (quant[96 + g % 8] >> 4 * (g / 8)) & 15;
    const int high = (quant[104 + g % 4] >> 2 * (g / 4)) & 3;
    return (low | high << 4) - 32;
  }

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    return {mul(load_half(quant + 108), float(scale(quant, g))), kNoBias};
  }

  // q as in Q2_K; bit g / 2 of the same 16 bytes of `high` is the third bit.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const int low = (quant[32 + g / 8 * 32 + g % 2 * 16 + j] >> 2 * (g / 2 % 4)) & 3;
    const int high = (quant[g % 2 * 16 + j] >> g / 2) & 1;
    return (low | high << 2) - 4;
  }
};

}  // namespace dflash
