// The order of candidates: larger value first, and of equal values the lower id. -0 equals +0.
#pragma once
#include "core/numeric.h"

namespace dflash {

// Soft cap of a logit that the multiplier was applied to.
DFLASH_HD float soft_capped(float z, float softcap) {
  return mul(softcap, tanh(z / softcap));
}

// multiplier, then soft cap (0: none).
DFLASH_HD float logit_value(float logit, float multiplier, float softcap) {
  const float z = mul(logit, multiplier);
  return softcap > 0.f ? soft_capped(z, softcap) : z;
}

// One integer to compare: greater means ahead. Not for NaN. Ids below 2^32.
DFLASH_HD uint64_t rank_key(float value, uint32_t id) {
  const uint32_t bits = bit_cast<uint32_t>(value + 0.f);  // -0 becomes +0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(ordered) << 32 | uint32_t(~id);
}

DFLASH_HD uint32_t rank_id(uint64_t key) {
  return ~uint32_t(key);
}

DFLASH_HD float rank_value(uint64_t key) {
  const uint32_t ordered = uint32_t(key >> 32);
  return bit_cast<float>(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

}  // namespace dflash
