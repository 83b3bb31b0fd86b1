// q/k norm, rotation and the KV write, compiled once per instruction set.
#include "core/rope.h"
#include "cpu/cache_types.h"
#include "cpu/rope.h"
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

struct Angles {
  const float *sine, *cosine;  // [frequencies], times attention_scaling
};

Angles angles_of(const RopeArgs& args, int64_t row, float* scratch) {
  float *sine = scratch, *cosine = scratch + args.frequencies;
  const int64_t axis_stride = args.position_axes == 3 ? args.rows : 0;
  for (int64_t i = 0; i < args.frequencies; ++i) {
    const int axis = mrope_axis(i, args.height, args.width);
    cosine[i] = rope_angle(args.positions[axis * axis_stride + row], args.inv_freq[i]);
  }
  for (int64_t i = 0; i < args.frequencies; ++i) {
    float s, c;
    sincos(cosine[i], &s, &c);
    sine[i] = dflash::mul(s, args.attention_scaling);
    cosine[i] = dflash::mul(c, args.attention_scaling);
  }
  return {sine, cosine};
}

// One head: norm if there is a weight, then the rotation. y may not be x.
void norm_rotate(const RopeArgs& args, const float* x, const float* weight, const Angles& angles,
                 float* y) {
  const int64_t dim = args.head_dim, half = args.frequencies;
  if (weight) {
    const float scale = rms_scale(dot(x, x, dim), float(dim), args.eps);
    const float one = args.plus_one ? 1.f : 0.f;
    for (int64_t d = 0; d < dim; ++d) y[d] = dflash::mul(dflash::mul(x[d], scale), one + weight[d]);
  } else {
    memcpy(y, x, size_t(dim) * sizeof(float));
  }
  for (int64_t i = 0; i < half; ++i)
    rotate_pair(y[i], y[i + half], angles.sine[i], angles.cosine[i], &y[i], &y[i + half]);
}

template <class Cache>
void put(typename Cache::Element* to, const float* x, int64_t dim) {
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) Cache::store(to + d, load(x + d));
  if (d < dim) store_part<Cache>(to + d, load_part<CacheF32>(x + d, int(dim - d)), int(dim - d));
}

template <class Cache>
void rows_of(const RopeArgs& args, int64_t begin, int64_t end, float* scratch) {
  using Element = typename Cache::Element;
  float* head = scratch + 2 * args.frequencies;
  for (int64_t n = begin; n < end; ++n) {
    const Angles angles = angles_of(args, n, scratch);
    for (int64_t h = 0; h < args.q_heads; ++h)
      norm_rotate(args, args.q + n * args.q_row + h * args.q_head, args.q_weight, angles,
                  args.out + (n * args.q_heads + h) * args.head_dim);
    if (args.slots[n] < 0) continue;
    for (int64_t h = 0; h < args.kv_heads; ++h) {
      const int64_t at = (args.slots[n] * args.kv_heads + h) * args.head_dim;
      norm_rotate(args, args.k + n * args.k_row + h * args.k_head, args.k_weight, angles, head);
      put<Cache>(static_cast<Element*>(args.k_cache) + at, head, args.head_dim);
      put<Cache>(static_cast<Element*>(args.v_cache) + at,
                 args.v + n * args.v_row + h * args.v_head, args.head_dim);
    }
  }
}

}  // namespace

void rope_rows(const RopeArgs& args, int64_t begin, int64_t end, float* scratch) {
  switch (args.type) {
    case FloatType::kF32:
      return rows_of<CacheF32>(args, begin, end, scratch);
    case FloatType::kF16:
      return rows_of<CacheF16>(args, begin, end, scratch);
    case FloatType::kBF16:
      return rows_of<CacheBF16>(args, begin, end, scratch);
  }
}

}  // namespace dflash::cpu::DFLASH_ISA
