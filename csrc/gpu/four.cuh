// Four neighbouring floats of any float type, in one access of 8 or 16 aligned bytes.
#pragma once
#include "core/float_type.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

struct Four {
  float x[4];
};

__device__ inline Four load_four(const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  return {v.x, v.y, v.z, v.w};
}
__device__ inline Four load_four(const Bf16* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  return {bit_cast<float>(v.x << 16), bit_cast<float>(v.x & 0xffff0000u),
          bit_cast<float>(v.y << 16), bit_cast<float>(v.y & 0xffff0000u)};
}
__device__ inline float half_to_float(uint32_t bits) {  // the lower 16, in one instruction
#ifdef __HIPCC__
  return half_bits_to_float(uint16_t(bits));
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(uint16_t(bits)));
  return f;
#endif
}
__device__ inline Four load_four(const Half* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  return {half_to_float(v.x), half_to_float(v.x >> 16), half_to_float(v.y),
          half_to_float(v.y >> 16)};
}
__device__ inline Four load_four(const FloatRows& rows, int64_t i) {
  if (rows.type == FloatType::kF32) return load_four(static_cast<const float*>(rows.data) + i);
  if (rows.type == FloatType::kBF16) return load_four(static_cast<const Bf16*>(rows.data) + i);
  return load_four(static_cast<const Half*>(rows.data) + i);
}
__device__ inline void store_four(float* p, const Four& v) {
  *reinterpret_cast<float4*>(p) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
}
__device__ inline void store_four(Bf16* p, const Four& v) {
  uint2 bits;
  bits.x = uint32_t(float_to_bf16_bits(v.x[0])) | uint32_t(float_to_bf16_bits(v.x[1])) << 16;
  bits.y = uint32_t(float_to_bf16_bits(v.x[2])) | uint32_t(float_to_bf16_bits(v.x[3])) << 16;
  *reinterpret_cast<uint2*>(p) = bits;
}

__device__ inline void store_four(Half* p, const Four& v) {
  uint2 bits;
  bits.x = uint32_t(float_to_half_bits(v.x[0])) | uint32_t(float_to_half_bits(v.x[1])) << 16;
  bits.y = uint32_t(float_to_half_bits(v.x[2])) | uint32_t(float_to_half_bits(v.x[3])) << 16;
  *reinterpret_cast<uint2*>(p) = bits;
}

// Element i and its three neighbours into shared memory: this thread has them after copies_done(),
// the block after a barrier as well.
__device__ inline void copy_four(float* shared, const FloatRows& rows, int64_t i) {
  if (rows.type == FloatType::kF32)
    copy_16(shared, static_cast<const float*>(rows.data) + i);
  else
    store_four(shared, load_four(rows, i));
}

}  // namespace dflash::gpu
