// Packed activations, in two formats.
//
//   planes   x ~ scale * (254 hi + lo)      |hi|, |lo| <= 127, a scale per 256 values of K
//   Q8_1     x ~ scale * code               |code| <= 127, a scale per 32: llama.cpp's rounding
//
// Groups stand at absolute multiples of 256; the last may be shorter, its codes beyond K are 0. The
// sums over 16 consecutive codes let a matmul correct unsigned weight codes and apply mins exactly.
#pragma once
#include "core/float_type.h"

namespace dflash {

constexpr int kActPlanes = 1, kActQ8_1 = 2;  // act_mode; 0 is float32
constexpr int kActGroup = 256;
constexpr int kActMax = 32385;  // 254 * 127 + 127
constexpr int kQ8Values = 32, kQ8Quants = kActGroup / kQ8Values;

struct ActGroup {
  float scale;
  int32_t zero[3];
  int16_t sum_hi[16], sum_lo[16];
  int8_t hi[kActGroup], lo[kActGroup];
};
static_assert(sizeof(ActGroup) == 592);

struct Q8Group {
  float scale[kQ8Quants];  // each the value of a half
  int16_t sum[16];
  int8_t code[kActGroup];
};
static_assert(sizeof(Q8Group) == 320);

// body.operator()<Group>() for a packed act_mode.
template <class Body>
void with_group(int64_t act_mode, Body&& body) {
  if (act_mode == kActPlanes)
    body.template operator()<ActGroup>();
  else
    body.template operator()<Q8Group>();
}

constexpr int64_t group_bytes(int64_t act_mode) {
  return act_mode == kActPlanes ? sizeof(ActGroup) : sizeof(Q8Group);
}
constexpr int64_t packed_bytes(int64_t columns, int64_t act_mode) {
  return (columns + kActGroup - 1) / kActGroup * group_bytes(act_mode);
}

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

// The same of 32 values as Q8_1: the codes are of the step, the scale is the step as a half. What a
// half cannot hold is NaN, as a value that is not finite; a scale of 0 makes every value 0.
DFLASH_HD ActScale q8_scale(uint32_t amax_bits) {
  const float step = bit_cast<float>(amax_bits) / 127.f;
  const float scale = stored<Half>(step);
  if (!(scale < 65536.f)) return {bit_cast<float>(0x7fc00000u), 0.f};
  if (scale == 0.f) return {0.f, 0.f};
  return {scale, 1.f / step};  // step > 2^-25
}

// To nearest, ties away from zero, as llama.cpp's reference does. The addend is the largest float
// below 1/2: 1/2 would round that float up to 1. |x inv| exceeds 127 by roundings alone.
DFLASH_HD int32_t q8_code(float x, float inv) {
  const float v = mul(x, inv), half = 0.49999997f;
  return int32_t(v + (v < 0.f ? -half : half));
}

// The scalar statement of one group of planes: x[0 .. n), n <= 256.
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
DFLASH_HD float act_value(const Q8Group& group, int i) {
  return mul(float(group.code[i]), group.scale[i / kQ8Values]);
}

}  // namespace dflash
