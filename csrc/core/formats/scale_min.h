// The twelve bytes in which Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit mins.
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct ScaleMin {
  int scale, min;
};

DFLASH_HD ScaleMin scale_min(const uint8_t* sm, int g) {
  if (g < 4) return {sm[g] & 63, sm[g + 4] & 63};
  // the high two bits of entries 4..7 live above the first eight bytes
  return {(sm[g + 4] & 15) | ((sm[g - 4] >> 6) << 4), (sm[g + 4] >> 4) | ((sm[g] >> 6) << 4)};
}

DFLASH_HD void put_scale_min(uint8_t* sm, int g, int scale, int min) {
  if (g < 4) {
    sm[g] |= uint8_t(scale);
    sm[g + 4] |= uint8_t(min);
  } else {
    sm[g + 4] |= uint8_t((scale & 15) | (min & 15) << 4);
    sm[g - 4] |= uint8_t(scale >> 4 << 6);
    sm[g] |= uint8_t(min >> 4 << 6);
  }
}

// Scale and bias of a quant that starts with { half d; half dmin; uint8 sm[12]; }.
DFLASH_HD Affine scale_min_affine(const uint8_t* quant, int g) {
  const ScaleMin s = scale_min(quant + 4, g);
  return {mul(load_half(quant), float(s.scale)), -mul(load_half(quant + 2), float(s.min))};
}

}  // namespace dflash
