// IQ4_XS: { half d; uint16 scale_high; uint8 scale_low[4]; uint8 q[128]; }  scales per 32 values.
//   value = d * scale * iq4_value(q).
#pragma once
#include "core/formats/grids.h"

namespace dflash {

// The nibble of each value that iq4_value() has, by value + 128.
struct Iq4Nibbles {
  uint8_t of[256] = {};

  constexpr Iq4Nibbles() {
    for (int n = 0; n < 16; ++n) of[iq4_value(n) + 128] = uint8_t(n);
  }
};

struct IQ4_XS {
  static constexpr int kType = 23, kElems = 256, kBytes = 136, kGroup = 16;

  // Scale of the 32 values from 32 * b on.
  DFLASH_HD static int scale(const uint8_t* quant, int b) {
    const uint32_t low = (quant[4 + b / 2] >> 4 * (b % 2)) & 15;
    const uint32_t high = (load_u16(quant + 2) >> 2 * b) & 3;
    return int(low | high << 4) - 32;
  }

  DFLASH_HD static Affine affine(const uint8_t* quant, int g) {
    return {mul(load_half(quant), float(scale(quant, g / 2))), kNoBias};
  }

  // Sixteen bytes hold 32 values: low nibbles first, then high nibbles.
  DFLASH_HD static int code(const uint8_t* quant, int g, int j) {
    return iq4_value((quant[8 + g / 2 * 16 + j] >> 4 * (g % 2)) & 15);
  }
  DFLASH_HD static void put(uint8_t* quant, int g, int j, int code) {
    static constexpr Iq4Nibbles kNibbles;
    put_nibble(quant, g, j, kNibbles.of[code + 128]);
  }
  DFLASH_HD static void put_nibble(uint8_t* quant, int g, int j, int nibble) {
    quant[8 + g / 2 * 16 + j] |= uint8_t(nibble << 4 * (g % 2));
  }
  DFLASH_HD static void put_scale(uint8_t* quant, int b, int scale) {
    const int bits = scale + 32;
    quant[4 + b / 2] |= uint8_t((bits & 15) << 4 * (b % 2));
    store_u16(quant + 2, load_u16(quant + 2) | uint32_t(bits >> 4) << 2 * b);
  }
};

}  // namespace dflash
