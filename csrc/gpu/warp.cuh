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

// Before wait_for_earlier(): a value that an earlier kernel may be about to change, so that it is
// good for a guess only.
__device__ inline int peek(const int32_t* p) {
#ifdef __HIPCC__
  return *p;
#else
  return __ldcg(p);  // leaves nothing in L1 that could be read again later
#endif
}

// A guess of what will be read, multiples of 16 bytes.
__device__ inline void prefetch(const void* global, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
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

// The blocks of a cluster (launch_cluster) meet. Every thread calls both; what was written before
// the first is not thereby visible after the second.
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Floats that the blocks of a cluster send into this block's shared memory. One thread says how
// many bytes will come, before a cluster_wait() that the senders pass as well; who reads them waits
// for phase 0, then 1, 0 ...
struct Mailbox {
  unsigned long long state;

  __device__ void open() {  // once, one thread
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ void expect(unsigned bytes) {  // one thread, every phase
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // *shared = value in block `rank`, counted by its mailbox.
  __device__ void send(float* shared, int rank, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t to = uint32_t(__cvta_generic_to_shared(shared)), box = address();
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(to), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(box) : "r"(box), "r"(rank));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(bit_cast<uint32_t>(value)), "r"(box)
        : "memory");
#endif
  }
  __device__ void wait(int phase) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;}"
          : "=r"(done)
          : "r"(address()), "r"(phase)
          : "memory");
#endif
  }

 private:
#if defined(__CUDA_ARCH__)
  __device__ uint32_t address() { return uint32_t(__cvta_generic_to_shared(&state)); }
#endif
};

// 16 bytes from global into shared memory, both aligned; there after copies_done() and a barrier.
__device__ inline void copy_16(void* shared, const void* global) {
#ifdef __HIPCC__
  *static_cast<float4*>(shared) = *static_cast<const float4*>(global);
#else
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
#endif
}

__device__ inline void copies_done() {
#ifndef __HIPCC__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// What the lanes of a warp wrote to shared memory, all of them see.
__device__ inline void sync_warp() {
#ifdef __HIPCC__
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#else
  __syncwarp();
#endif
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
