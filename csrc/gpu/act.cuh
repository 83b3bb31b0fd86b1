// core/act.h's quantizer, a warp per group of 256: lane l has values 8 l .. 8 l + 7.
#pragma once
#include "core/act.h"
#include "core/float_type.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int kActPerLane = kActGroup / kLanes;
constexpr int kQ8Lanes = kQ8Values / kActPerLane;  // that share a scale of Q8_1

__device__ inline uint32_t amax_bits(const float (&x)[kActPerLane]) {
  uint32_t amax = 0;
  for (float v : x) {
    const uint32_t bits = bit_cast<uint32_t>(v) & 0x7fffffffu;
    amax = bits > amax ? bits : amax;
  }
  return amax;
}

__device__ inline void quantize_group(const float (&x)[kActPerLane], Q8Group* group) {
  const ActScale s = q8_scale(max_lanes(amax_bits(x), kQ8Lanes));
  const int lane = lane_id();
  int sum = 0;
  for (int i = 0; i < kActPerLane; ++i) {
    const int32_t q = s.inv != 0.f ? q8_code(x[i], s.inv) : 0;
    group->code[lane * kActPerLane + i] = int8_t(q);
    sum += q;
  }
  sum += exchange(sum, 1);  // two lanes are 16 values
  if (lane % 2 == 0) group->sum[lane / 2] = int16_t(sum);
  if (lane % kQ8Lanes == 0) group->scale[lane / kQ8Lanes] = s.scale;
}

__device__ inline void quantize_group(const float (&x)[kActPerLane], ActGroup* group) {
  const ActScale s = act_scale(max_lanes(amax_bits(x)));
  const int lane = lane_id();
  int sum_hi = 0, sum_lo = 0;
  for (int i = 0; i < kActPerLane; ++i) {
    const int32_t q = s.inv != 0.f ? act_code(x[i], s.inv) : 0;
    const int32_t hi = act_hi(q), lo = q - 254 * hi;
    group->hi[lane * kActPerLane + i] = int8_t(hi);
    group->lo[lane * kActPerLane + i] = int8_t(lo);
    sum_hi += hi;
    sum_lo += lo;
  }
  sum_hi += exchange(sum_hi, 1);  // two lanes are 16 values
  sum_lo += exchange(sum_lo, 1);
  if (lane % 2 == 0) {
    group->sum_hi[lane / 2] = int16_t(sum_hi);
    group->sum_lo[lane / 2] = int16_t(sum_lo);
  }
  if (lane == 0) group->scale = s.scale;
  if (lane < 3) group->zero[lane] = 0;
}

}  // namespace dflash::gpu
