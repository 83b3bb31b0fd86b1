// Packed activations: two int8 planes with one scale per 256 values of K ("planes").
//
//   x ~ scale * (254 hi + lo)      |hi|, |lo| <= 127
//
// Groups stand at absolute multiples of 256; the last may be shorter, its codes beyond K are 0. The
// sums over 16 consecutive codes let a matmul correct unsigned weight codes and apply mins exactly.
#pragma once
#include "core/numeric.h"

namespace dflash {

constexpr int kActPlanes = 1, kActQ8_1 = 2;  // act_mode; 0 is float32
constexpr int kActGroup = 256;
constexpr int kActMax = 32385;  // 254 * 127 + 127

struct ActGroup {
  float scale;
  int32_t zero[3];
  int16_t sum_hi[16], sum_lo[16];
  int8_t hi[kActGroup], lo[kActGroup];
};
static_assert(sizeof(ActGroup) == 592);

// Scale and its inverse from the bit pattern of max |x|. As integers those patterns are ordered
// like the values, with infinity and then NaN on top. inv = 0 makes every code 0.
struct ActScale {
  float scale, inv;
};

DFLASH_HD ActScale act_scale(uint32_t amax_bits) {
  if (amax_bits >= 0x7f800000u) return {bit_cast<float>(0x7fc00000u), 0.f};
  const float amax = bit_cast<float>(amax_bits);
  if (amax < 7.888609052210118e-31f) return {0.f, 0.f};  // 2^-100: the inverse stays finite
  return {amax / float(kActMax), float(kActMax) / amax};
}

DFLASH_HD int32_t act_code(float x, float inv) {
  const int32_t q = int32_t(round_even(mul(x, inv)));
  return q > kActMax ? kActMax : q < -kActMax ? -kActMax : q;
}

// hi = (q + sign(q) 126) / 254 truncated, for |q| <= 32385. 33027 / 2^23 is 1/254 rounded up; the
// excess stays below one step, since 32511 * (33027 * 254 - 2^23) < 2^23.
DFLASH_HD int32_t act_hi(int32_t q) {
  const int32_t magnitude = ((q < 0 ? -q : q) + 126) * 33027 >> 23;
  return q < 0 ? -magnitude : magnitude;
}

// The scalar statement of one group: x[0 .. n), n <= 256.
DFLASH_HD void quantize_group(const float* x, int n, ActGroup* group) {
  uint32_t amax = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    amax = bits > amax ? bits : amax;
  }
  const ActScale s = act_scale(amax);
  group->scale = s.scale;
  for (int32_t& z : group->zero) z = 0;
  for (int g = 0; g < 16; ++g) {
    int sum_hi = 0, sum_lo = 0;
    for (int i = 16 * g; i < 16 * g + 16; ++i) {
      const int32_t q = i < n && s.inv != 0.f ? act_code(x[i], s.inv) : 0;
      const int32_t hi = act_hi(q), lo = q - 254 * hi;
      group->hi[i] = int8_t(hi);
      group->lo[i] = int8_t(lo);
      sum_hi += hi;
      sum_lo += lo;
    }
    group->sum_hi[g] = int16_t(sum_hi);
    group->sum_lo[g] = int16_t(sum_lo);
  }
}

DFLASH_HD float act_value(const ActGroup& group, int i) {
  return mul(float(254 * group.hi[i] + group.lo[i]), group.scale);
}

}  // namespace dflash
