// q/k norm, rotation and the KV write, a warp per head of a row.
#pragma once
#include "core/float_type.h"
#include "core/rope.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int64_t kMaxPosition = 1 << 21;  // beyond it a float angle says nothing

struct RopeView {
  const float *q, *k, *v;  // [rows, heads, head_dim]; q may be null
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float *q_weight, *k_weight;  // [head_dim] or null: no norm
  float eps, attention_scaling;
  bool plus_one;
  const int64_t* positions;  // [position_axes, rows]
  const float* inv_freq;     // [frequencies]
  const int64_t* slots;      // [rows], < 0: not stored
  void *k_cache, *v_cache;   // [cache_rows, kv_heads, head_dim]
  float* out;                // [rows, q_heads, head_dim]
  int64_t rows, q_heads, kv_heads, head_dim, frequencies, height, width, position_axes, cache_rows;
};

constexpr int kRopeParts = 4;  // 128 values each, by registers; a longer head is read again
constexpr int kRopeTurns = 4;  // 32 frequencies each, likewise
constexpr int kRopeRest = 8;   // 32 values each that are not rotated

// Sines and cosines of row n, 32 frequencies a turn and one of them a lane.
__device__ inline void angle(const RopeView& r, int n, int i, float* sine, float* cosine) {
  const int64_t axis_stride = r.position_axes == 3 ? r.rows : 0;
  const int64_t position = r.positions[mrope_axis(i, r.height, r.width) * axis_stride + n];
  sincos(rope_angle(position, r.inv_freq[i]), sine, cosine);
  *sine = mul(*sine, r.attention_scaling);
  *cosine = mul(*cosine, r.attention_scaling);
}

// One head of row n, by a warp: put(d, value) for every dim. What does not depend on the sum of
// squares is computed while the head is on its way.
template <class Put>
__device__ void norm_rotate(const RopeView& r, int n, const float* x, const float* weight,
                            Put&& put) {
  const int dim = int(r.head_dim), half = int(r.frequencies), lane = lane_id();
  const bool short_head = dim <= kRopeParts * kAccumulators;
  float part[kRopeParts][kPerLane];
#pragma unroll
  for (int i = 0; i < kRopeParts; ++i)
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int d = i * kAccumulators + kPerLane * lane + j;
      part[i][j] = weight && short_head && d < dim ? x[d] : 0.f;
    }
  float sine[kRopeTurns], cosine[kRopeTurns];
#pragma unroll
  for (int t = 0; t < kRopeTurns; ++t)
    if (t * kLanes + lane < half) angle(r, n, t * kLanes + lane, &sine[t], &cosine[t]);

  float scale = 0.f;
  if (weight) {
    float sum;
    if (short_head) {
      float acc[kPerLane] = {};
#pragma unroll
      for (int i = 0; i < kRopeParts; ++i)
#pragma unroll
        for (int j = 0; j < kPerLane; ++j)
          if (i * kAccumulators + kPerLane * lane + j < dim)
            acc[j] = fma(part[i][j], part[i][j], acc[j]);
      sum = fold_lanes(acc);
    } else {
      sum = warp_dot(dim, [&](int64_t d) { return x[d]; }, [&](int64_t d) { return x[d]; });
    }
    scale = rms_scale(sum, float(dim), r.eps);
  }
  const float one = r.plus_one ? 1.f : 0.f;
  const auto value = [&](int d) { return weight ? mul(mul(x[d], scale), one + weight[d]) : x[d]; };
  // All is read before anything is written: the compiler must take them for the same memory.
  float first[kRopeTurns], second[kRopeTurns], rest[kRopeRest];
#pragma unroll
  for (int t = 0; t < kRopeTurns; ++t) {
    const int i = t * kLanes + lane;
    if (i < half) rotate_pair(value(i), value(i + half), sine[t], cosine[t], &first[t], &second[t]);
  }
#pragma unroll
  for (int t = 0; t < kRopeRest; ++t) {
    const int d = 2 * half + t * kLanes + lane;
    if (d < dim) rest[t] = value(d);
  }
#pragma unroll
  for (int t = 0; t < kRopeTurns; ++t) {
    const int i = t * kLanes + lane;
    if (i < half) put(i, first[t]);
    if (i < half) put(i + half, second[t]);
  }
#pragma unroll
  for (int t = 0; t < kRopeRest; ++t) {
    const int d = 2 * half + t * kLanes + lane;
    if (d < dim) put(d, rest[t]);
  }
  for (int i = kRopeTurns * kLanes + lane; i < half; i += kLanes) {
    float s, c, a, b;
    angle(r, n, i, &s, &c);
    rotate_pair(value(i), value(i + half), s, c, &a, &b);
    put(i, a);
    put(i + half, b);
  }
  for (int d = 2 * half + kRopeRest * kLanes + lane; d < dim; d += kLanes) put(d, value(d));
}

// A position or slot out of range gives a NaN query and stores nothing.
template <class T>
__global__ void qk_norm_rope_store(RopeView r) {
  start();
  const int heads = int(r.q_heads + r.kv_heads);
  const int64_t warp = warp_id();
  if (warp >= r.rows * heads) return;
  const int n = int(uint32_t(warp) / uint32_t(heads)), h = int(uint32_t(warp) % uint32_t(heads));
  const int64_t slot = r.slots[n];
  bool valid = slot < r.cache_rows;
  for (int axis = 0; axis < r.position_axes; ++axis) {
    const int64_t position = r.positions[axis * r.rows + n];
    valid = valid && position >= 0 && position < kMaxPosition;
  }
  if (h < r.q_heads) {
    float* out = r.out + (int64_t(n) * r.q_heads + h) * r.head_dim;
    norm_rotate(r, n, r.q + n * r.q_row + h * r.q_head, r.q_weight,
                [&](int d, float y) { out[d] = valid ? y : no_answer(); });
    return;
  }
  const bool stores = valid && slot >= 0;
  const int64_t head = h - r.q_heads, at = stores ? (slot * r.kv_heads + head) * r.head_dim : 0;
  T* keys = static_cast<T*>(r.k_cache) + at;
  T* values = static_cast<T*>(r.v_cache) + at;
  const float* v = r.v + n * r.v_row + head * r.v_head;
  const int dim = int(r.head_dim);
  float copied[kRopeRest];
#pragma unroll
  for (int t = 0; t < kRopeRest; ++t)
    copied[t] = t * kLanes + lane_id() < dim ? v[t * kLanes + lane_id()] : 0.f;
  norm_rotate(r, n, r.k + n * r.k_row + head * r.k_head, r.k_weight, [&](int d, float y) {
    if (stores) store_float(keys + d, y);
  });
  if (!stores) return;
#pragma unroll
  for (int t = 0; t < kRopeRest; ++t)
    if (t * kLanes + lane_id() < dim) store_float(values + t * kLanes + lane_id(), copied[t]);
  for (int d = kRopeRest * kLanes + lane_id(); d < dim; d += kLanes) store_float(values + d, v[d]);
}

}  // namespace dflash::gpu
