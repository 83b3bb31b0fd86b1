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

// One head of row n to y: put(d, value) for every dim.
template <class Put>
__device__ void norm_rotate(const RopeView& r, int64_t n, const float* x, const float* weight,
                            Put&& put) {
  const int64_t dim = r.head_dim, half = r.frequencies;
  float scale = 0.f;
  if (weight)
    scale = rms_scale(warp_dot(
                          dim, [&](int64_t d) { return x[d]; }, [&](int64_t d) { return x[d]; }),
                      float(dim), r.eps);
  const float one = r.plus_one ? 1.f : 0.f;
  const auto value = [&](int64_t d) {
    return weight ? mul(mul(x[d], scale), one + weight[d]) : x[d];
  };
  const int64_t axis_stride = r.position_axes == 3 ? r.rows : 0;
  for (int64_t i = lane_id(); i < half; i += kLanes) {
    const int64_t position = r.positions[mrope_axis(i, r.height, r.width) * axis_stride + n];
    float sine, cosine, a, b;
    sincos(rope_angle(position, r.inv_freq[i]), &sine, &cosine);
    rotate_pair(value(i), value(i + half), mul(sine, r.attention_scaling),
                mul(cosine, r.attention_scaling), &a, &b);
    put(i, a);
    put(i + half, b);
  }
  for (int64_t d = 2 * half + lane_id(); d < dim; d += kLanes) put(d, value(d));
}

// A position or slot out of range gives a NaN query and stores nothing.
template <class T>
__global__ void qk_norm_rope_store(RopeView r) {
  start();
  const int64_t heads = r.q_heads + r.kv_heads, n = warp_id() / heads, h = warp_id() % heads;
  if (n >= r.rows) return;
  bool valid = r.slots[n] < r.cache_rows;
  for (int64_t axis = 0; axis < r.position_axes; ++axis) {
    const int64_t position = r.positions[axis * r.rows + n];
    valid = valid && position >= 0 && position < kMaxPosition;
  }
  if (h < r.q_heads) {
    float* out = r.out + (n * r.q_heads + h) * r.head_dim;
    norm_rotate(r, n, r.q + n * r.q_row + h * r.q_head, r.q_weight,
                [&](int64_t d, float y) { out[d] = valid ? y : no_answer(); });
    return;
  }
  if (!valid || r.slots[n] < 0) return;
  const int64_t head = h - r.q_heads, at = (r.slots[n] * r.kv_heads + head) * r.head_dim;
  T* keys = static_cast<T*>(r.k_cache) + at;
  T* values = static_cast<T*>(r.v_cache) + at;
  const float* v = r.v + n * r.v_row + head * r.v_head;
  norm_rotate(r, n, r.k + n * r.k_row + head * r.k_head, r.k_weight,
              [&](int64_t d, float y) { store_float(keys + d, y); });
  for (int64_t d = lane_id(); d < r.head_dim; d += kLanes) store_float(values + d, v[d]);
}

}  // namespace dflash::gpu
