// TQ1_0: { uint8 q[48]; uint8 last[4]; half d; }  value = d * trit, trits -1, 0, 1.
//   A byte holds five trits (`last`: four) as the fraction byte / 256 in base 3: times 3^n, modulo
//   256, the next trit is its integer part after one more factor of 3.
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct TQ1_0 {
  static constexpr int kType = 34, kElems = 256, kBytes = 54, kGroup = 16;

  DFLASH_HD static Affine affine(const uint8_t* quant, int) {
    return {load_half(quant + 52), kNoBias};
  }

  DFLASH_HD static int trit(int byte, int n) {
    const int power = int(0x511b090301ull >> 8 * n & 255);  // 3^n
    return ((byte * power & 255) * 3 >> 8) - 1;
  }

  // 160 values: trit n of bytes 0..31 for n = 0, 1, ...; 80 of bytes 32..47; 16 of `last`.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    if (g < 10) return trit(quant[g % 2 * 16 + j], g / 2);
    if (g < 15) return trit(quant[32 + j], g - 10);
    return trit(quant[48 + j % 4], j / 4);
  }
};

}  // namespace dflash
