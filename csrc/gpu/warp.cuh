// The 32 virtual lanes of core/reduce.h as threads of a warp, and the #ifdefs of this folder. A
// kernel that uses them lets whole warps leave early, never single threads.
#pragma once
#include "core/reduce.h"

namespace dflash::gpu {

constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__device__ T exchange(T value, int mask) {
#ifdef __HIPCC__
  return __shfl_xor(value, mask, kLanes);
#else
  return __shfl_xor_sync(kAllLanes, value, mask, kLanes);
#endif
}

template <class T>
__device__ T from_lane(T value, int lane) {
#ifdef __HIPCC__
  return __shfl(value, lane, kLanes);
#else
  return __shfl_sync(kAllLanes, value, lane, kLanes);
#endif
}

// a . b + c for four int8 in each of a and b.
__device__ inline int dot4(int a, int b, int c) {
#ifdef __HIPCC__
  for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
  return c;
#else
  return __dp4a(a, b, c);
#endif
}

// A kernel may be launched while the one in front of it on the stream still runs (launch_pdl). This
// waits for that one's end; all that earlier kernels wrote is then visible.
__device__ inline void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be launched once every block has called this or ended. It says nothing about
// what this kernel has written: that is for the next one's wait_for_earlier().
__device__ inline void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The beginning of a kernel that only launch latency matters to.
__device__ inline void start() {
  wait_for_earlier();
  let_next_begin();
}

__device__ inline int lane_id() {
  return int(threadIdx.x % kLanes);
}

// Index of this warp in the grid.
__device__ inline int64_t warp_id() {
  return (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
}

// Of `width` neighbouring lanes; every one of them gets the result.
template <class T>
__device__ T sum_lanes(T value, int width = kLanes) {
  for (int step = width / 2; step > 0; step /= 2) value += exchange(value, step);
  return value;
}

template <class T>
__device__ T max_lanes(T value, int width = kLanes) {
  for (int step = width / 2; step > 0; step /= 2) {
    const T other = exchange(value, step);
    value = other > value ? other : value;
  }
  return value;
}

// The largest of a warp's 64-bit keys, to every lane: its upper word, then the lower one among
// those that have it.
__device__ inline unsigned long long largest_key(unsigned long long key) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned upper = __reduce_max_sync(kAllLanes, unsigned(key >> 32));
  const unsigned mine = unsigned(key >> 32) == upper ? unsigned(key) : 0;
  return (unsigned long long)(upper) << 32 | __reduce_max_sync(kAllLanes, mine);
#else
  return max_lanes(key);
#endif
}

// fold() of core/reduce.h: acc[j] of lane l is accumulator 4 l + j. Addition commutes, so every
// lane gets the bits of lane 0.
__device__ inline float fold_lanes(const float (&acc)[kPerLane]) {
  return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

// dot() of core/reduce.h by one warp, of a(e) and b(e) for e in [0, n). Every lane gets it.
template <class A, class B>
__device__ float warp_dot(int64_t n, A&& a, B&& b) {
  if (n <= 0) return 0.f;
  Tree<float> tree;
  for (int64_t leaf = 0; leaf < n; leaf += kLeaf) {
    float acc[kPerLane] = {};
    const int64_t end = leaf + kLeaf < n ? leaf + kLeaf : n;
    for (int64_t e = leaf + kPerLane * lane_id(); e < end; e += kAccumulators)
      for (int j = 0; j < kPerLane; ++j)
        if (e + j < end) acc[j] = fma(a(e + j), b(e + j), acc[j]);
    tree.push(fold_lanes(acc));
  }
  return tree.join();
}

// sum_leaf() of core/sampling.h by one warp, n <= kLeaf. Every lane gets it.
template <class P>
__device__ float warp_sum_leaf(const P& p, int64_t n) {
  float acc[kPerLane] = {};
  for (int64_t e = kPerLane * lane_id(); e < n; e += kAccumulators)
    for (int j = 0; j < kPerLane && e + j < n; ++j) acc[j] = acc[j] + p(e + j);
  return fold_lanes(acc);
}

// Which lanes say so, lane 0 in the lowest bit.
__device__ inline uint32_t lanes_that(bool mine) {
#ifdef __HIPCC__
  // of a wavefront of 64, the half that this lane belongs to
  return uint32_t(__ballot(mine) >> (threadIdx.x % warpSize / kLanes * kLanes));
#else
  return __ballot_sync(kAllLanes, mine);
#endif
}

__device__ inline bool any_lane(bool mine) {
  return lanes_that(mine) != 0;
}

// The first lane that says so; 32 if none does.
__device__ inline int first_lane(bool mine) {
  const uint32_t lanes = lanes_that(mine);
  return lanes ? __ffs(int(lanes)) - 1 : kLanes;
}

// sum_leaf() of core/sampling.h over one value per lane: lane l is accumulator l, those behind are
// zeros, which change no sum of probabilities.
__device__ inline float sum_candidates(float value) {
  value = value + exchange(value, 1);
  value = value + exchange(value, 2);
  for (int step = 16; step > 2; step /= 2) value = value + exchange(value, step);
  return value;
}

constexpr uint32_t kQuietNaN = 0x7fc00000u;

// What a kernel answers with where the CPU reports an error: the host must not read the values.
__device__ inline float no_answer() {
  return bit_cast<float>(kQuietNaN);
}

}  // namespace dflash::gpu
