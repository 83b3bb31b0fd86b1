// core/act.h's quantizers, a warp per group of 256: lane l has values 8 l .. 8 l + 7.
#pragma once
#include "core/act.h"
#include "core/float_type.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int kActPerLane = kActGroup / kLanes;
constexpr int kQ8Lanes = kQ8Values / kActPerLane;  // that share a scale of Q8_1

// A group of planes as the tensor cores read it. Bytes 16 c + 4 q' .. of a plane are a lane's part
// of B for two steps of 32 (plane_word()); with 320 bytes from plane to plane and 592 from group to
// group, eight neighbouring reads of 16 bytes meet in no bank of shared memory.
struct ActPlanes {
  int8_t hi[kActGroup];
  int32_t sum[kQ8Quants];  // 254 hi + lo over 32 values
  float scale;
  int32_t zero[7];
  int8_t lo[kActGroup];
  int32_t zero_too[4];
};
static_assert(sizeof(ActPlanes) == sizeof(ActGroup));
constexpr int kLoPlane = 320, kPlaneSums = 256, kPlaneScale = 288;

// Where values k .. k + 3 (k % 4 == 0) of a plane lie, in words: value 64 c + 32 s + 16 half + 4 q
// + e is byte 64 c + 16 q + 8 s + 4 half + e.
__device__ constexpr int plane_word(int k) {
  return k / 64 * 16 + k / 4 % 4 * 4 + k / 32 % 2 * 2 + k / 16 % 2;
}

// What the kernels here take for a packed act_mode.
template <class Body>
void with_gpu_group(int64_t act_mode, Body&& body) {
  if (act_mode == kActPlanes)
    body.template operator()<ActPlanes>();
  else
    body.template operator()<Q8Group>();
}

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

__device__ inline void quantize_group(const float (&x)[kActPerLane], ActPlanes* group) {
  const ActScale s = act_scale(max_lanes(amax_bits(x)));
  const int lane = lane_id();
  int sum = 0;
  uint32_t hi[2] = {}, lo[2] = {};
  for (int i = 0; i < kActPerLane; ++i) {
    const int32_t q = s.inv != 0.f ? act_code(x[i], s.inv) : 0;
    const int32_t h = act_hi(q), l = q - 254 * h;
    hi[i / 4] |= uint32_t(uint8_t(h)) << 8 * (i % 4);
    lo[i / 4] |= uint32_t(uint8_t(l)) << 8 * (i % 4);
    sum += q;
  }
  for (int w = 0; w < 2; ++w) {
    const int at = plane_word(kActPerLane * lane + 4 * w);
    reinterpret_cast<uint32_t*>(group->hi)[at] = hi[w];
    reinterpret_cast<uint32_t*>(group->lo)[at] = lo[w];
  }
  sum = sum_lanes(sum, kQ8Lanes);
  if (lane % kQ8Lanes == 0) group->sum[lane / kQ8Lanes] = sum;
  if (lane == 0) group->scale = s.scale;
  if (lane < 7) group->zero[lane] = 0;
  if (lane < 4) group->zero_too[lane] = 0;
}

__device__ inline float act_value(const ActPlanes& group, int i) {
  const int at = 4 * plane_word(i / 4 * 4) + i % 4;
  return mul(float(254 * group.hi[at] + group.lo[at]), group.scale);
}

}  // namespace dflash::gpu
