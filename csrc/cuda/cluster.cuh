// Shared memory filled beside the threads, and shared memory of the other blocks of a cluster.
#pragma once
#include "core/float_type.h"

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

// Rows of a cache that are none, and those of a page that is none.
enum { kNotThere = -1, kBadPage = -2 };

// kCount rows (of `from`, `stride` values apart, by their numbers), kWidth values of each. A page
// that is none is NaN. By kThreads threads, of which this is `tid`.
template <int kCount, int kWidth, int kThreads, class T>
__device__ __forceinline__ void copy_rows(T* to, const T* from, int stride, const int* rows,
                                          int tid) {
  constexpr int kPiece = 16 / int(sizeof(T)), kPieces = kWidth / kPiece, kStep = kThreads / kPieces;
  static_assert(kWidth % kPiece == 0 && kThreads % kPieces == 0 && kCount % kStep == 0);
  const int first = tid / kPieces, piece = tid % kPieces * kPiece;
  T* at = to + first * kWidth + piece;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const int row = rows[first + i];
    if (row >= 0) copy_16(at + i * kWidth, from + int64_t(row) * stride + piece);
    if (row == kBadPage)
      *reinterpret_cast<uint4*>(at + i * kWidth) = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu,
                                                    0x7fff7fffu};
  }
}

__device__ inline void load_values(const float* p, float (&x)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ inline void load_values(const float* p, float (&x)[2]) {
  const float2 v = *reinterpret_cast<const float2*>(p);
  x[0] = v.x, x[1] = v.y;
}
template <class T>
__device__ void load_values(const T* p, float (&x)[4]) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  x[0] = to_float(T{uint16_t(v.x)}), x[1] = to_float(T{uint16_t(v.x >> 16)});
  x[2] = to_float(T{uint16_t(v.y)}), x[3] = to_float(T{uint16_t(v.y >> 16)});
}
template <class T>
__device__ void load_values(const T* p, float (&x)[2]) {
  const uint32_t v = *reinterpret_cast<const uint32_t*>(p);
  x[0] = to_float(T{uint16_t(v)}), x[1] = to_float(T{uint16_t(v >> 16)});
}

__device__ inline void store_values(float* p, const float (&x)[4]) {
  *reinterpret_cast<float4*>(p) = {x[0], x[1], x[2], x[3]};
}

}  // namespace dflash::cuda
