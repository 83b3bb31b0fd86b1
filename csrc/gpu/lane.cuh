// The 32 virtual lanes of core/reduce.h on a GPU: a warp, or each half of a wider wave.
#pragma once
#include "core/reduce.h"

namespace dflash::gpu {

template <class T>
__device__ T shuffle_down(T value, int step) {
#if defined(__HIP_DEVICE_COMPILE__)
  return __shfl_down(value, step, kLanes);
#else
  return __shfl_down_sync(0xffffffffu, value, step, kLanes);
#endif
}

// fold() of core/reduce.h for a lane's four accumulators; the result is lane 0's.
__device__ inline float fold_lanes(const float* acc) {
  float lane = (acc[0] + acc[1]) + (acc[2] + acc[3]);
  for (int step = kLanes / 2; step > 0; step /= 2) lane = lane + shuffle_down(lane, step);
  return lane;
}

// dot() of core/reduce.h over one leaf, by all lanes of a warp; the result is lane 0's.
template <class A, class B>
__device__ float dot_leaf(const A& a, const B& b, int64_t n, int lane) {
  float acc[kPerLane] = {};
  for (int64_t e = int64_t(kPerLane) * lane; e < n; e += kAccumulators)
    for (int j = 0; j < kPerLane && e + j < n; ++j) acc[j] = fma(a(e + j), b(e + j), acc[j]);
  return fold_lanes(acc);
}

// dot() of core/reduce.h; the result is lane 0's.
template <class A, class B>
__device__ float dot(const A& a, const B& b, int64_t n, int lane) {
  Tree<float> tree;
  for (int64_t leaf = 0; leaf < n; leaf += kLeaf) {
    const int64_t size = n - leaf < kLeaf ? n - leaf : kLeaf;
    tree.push(dot_leaf([&](int64_t e) { return a(leaf + e); },
                       [&](int64_t e) { return b(leaf + e); }, size, lane));
  }
  return n > 0 ? tree.join() : 0.f;
}

// sum_leaf() of core/sampling.h; the result is lane 0's.
template <class P>
__device__ float sum_leaf(const P& p, int64_t n, int lane) {
  float acc[kPerLane] = {};
  for (int64_t e = int64_t(kPerLane) * lane; e < n; e += kAccumulators)
    for (int j = 0; j < kPerLane && e + j < n; ++j) acc[j] = acc[j] + p(e + j);
  return fold_lanes(acc);
}

}  // namespace dflash::gpu
