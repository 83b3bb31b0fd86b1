// Q6_K: { uint8 low[128]; uint8 high[64]; int8 scale[16]; half d; }  16 groups of 16.
//   value = d * scale[g] * ((low | high << 4) - 32).
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct Q6_K {
  static constexpr int kType = 14, kElems = 256, kBytes = 210, kGroup = 16;

  DFLASH_HD static int scale(const uint8_t* quant, int g) { return int8_t(quant[192 + g]); }

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    return {mul(load_half(quant + 208), float(scale(quant, g))), kNoBias};
  }

  // Half of the quant (128 values) by half: 64 bytes of low nibbles, then the same bytes' high
  // nibbles; the two upper bits of values 0..31, 32..63, ... are bits 0-1, 2-3, ... of 32 bytes.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    const int low = (quant[g / 8 * 64 + g % 4 * 16 + j] >> 4 * (g / 4 % 2)) & 15;
    const int high = (quant[128 + g / 8 * 32 + g % 2 * 16 + j] >> 2 * (g / 2 % 4)) & 3;
    return (low | high << 4) - 32;
  }
  DFLASH_HD static void put(uint8_t* quant, int g, int j, int code) {
    const int bits = code + 32;
    quant[g / 8 * 64 + g % 4 * 16 + j] |= uint8_t((bits & 15) << 4 * (g / 4 % 2));
    quant[128 + g / 8 * 32 + g % 2 * 16 + j] |= uint8_t(bits >> 4 << 2 * (g / 2 % 4));
  }
  DFLASH_HD static void put_scale(uint8_t* quant, int g, int scale) {
    quant[192 + g] = uint8_t(scale);
  }
};

}  // namespace dflash
