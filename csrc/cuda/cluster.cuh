// Shared memory filled beside the threads, and shared memory of the other blocks of a cluster.
#pragma once
#include "core/hd.h"

namespace dflash::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// 16 bytes, both sides aligned; there after the wait for its group and a barrier.
__device__ inline void copy_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
// Ends a group of copies of this thread, an empty one too.
__device__ inline void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for this thread's groups but the last `kLeft`.
template <int kLeft>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// A meeting of all threads of a cluster: what was written before arriving, also into another
// block's shared memory, is seen after the wait.
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What follows an exchange between lanes is stored under a predicate, not a branch: ptxas would
// copy the exchange into both sides of it, and there the lanes wait for each other every time.
template <class T>
__device__ void store_if(bool really, T* at, T value) {
  static_assert(sizeof(T) == 4);
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.b32 [%1], %2;\n}" ::"r"(int(really)),
               "l"(at), "r"(bit_cast<uint32_t>(value))
               : "memory");
}

// The address of `shared` in block `rank` of the cluster.
__device__ inline uint32_t address_in(const void* shared, int rank) {
  uint32_t at = shared_address(shared);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(rank));
#endif
  return at;
}
__device__ inline void store_in_if(bool really, uint32_t at, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared::cluster.f32 [%1], %2;\n}" ::"r"(
          int(really)),
      "r"(at), "f"(value)
      : "memory");
#endif
}
__device__ inline void store_in(uint32_t at, float4 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
#endif
}

}  // namespace dflash::cuda
