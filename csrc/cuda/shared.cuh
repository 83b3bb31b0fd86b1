// Shared memory by 32-bit address, barriers that count arrivals and bytes, and copies into it that
// run beside the threads. From sm_90 on the copy engine makes them; sm_80 has cp.async, a piece of
// 16 bytes a lane.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace dflash::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

template <class T>
__device__ T load_as(const uint8_t* p) {
  return *reinterpret_cast<const T*>(p);
}

__device__ inline float half_value(uint32_t bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(uint16_t(bits)));
  return v;
}

template <int i>
__device__ int unsigned_byte(uint32_t word) {
  return int(__byte_perm(word, 0, 0x4440 | i));
}
template <int i>
__device__ int signed_byte(uint32_t word) {
  int v;  // with bit 3 a selector repeats the sign of its byte
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(v) : "r"(word), "n"(0x8880 + 0x1111 * i));
  return v;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DFLASH_COPY_ENGINE 1
#else
#define DFLASH_COPY_ENGINE 0
#endif

// A barrier in shared memory, 8 bytes. Its phases alternate between parity 0 and 1.
struct Barrier {
  uint32_t address;

  __device__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(address)
                 : "memory");
  }
  __device__ bool passed(uint32_t parity) const {
    int done;
#if DFLASH_COPY_ENGINE
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#endif
    return done != 0;
  }
  __device__ void wait(uint32_t parity) const {
    while (!passed(parity)) {
    }
  }
};

// Arrivals of one fetch at its barrier.
constexpr int kFetchArrivals = DFLASH_COPY_ENGINE ? 1 : 32;

#if DFLASH_COPY_ENGINE
__device__ inline void expect_bytes(Barrier full, uint32_t bytes) {
  asm volatile(
      "{\n.reg .b64 s;\nmbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;\n}" ::"r"(full.address),
      "r"(bytes)
      : "memory");
}
#endif

// By a whole warp: `bytes` (a multiple of 16, as the addresses) to shared memory, of what will not
// be read again soon; the barrier's phase ends when they are there.
__device__ inline void fetch_once(uint32_t to, const uint8_t* from, uint32_t bytes, Barrier full,
                                  int lane) {
#if DFLASH_COPY_ENGINE
  if (lane != 0) return;
  expect_bytes(full, bytes);
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], policy;\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(full.address)
      : "memory");
#else
  for (uint32_t at = 16 * lane; at < bytes; at += 16 * 32)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at)
                 : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full.address) : "memory");
#endif
}

// The same for rows that others will read too.
__device__ inline void fetch_rows(uint32_t to, uint32_t to_stride, const uint8_t* from,
                                  int64_t from_stride, int rows, uint32_t bytes, Barrier full,
                                  int lane) {
#if DFLASH_COPY_ENGINE
  if (lane == 0) expect_bytes(full, rows * bytes);
  __syncwarp();
  for (int r = lane; r < rows; r += 32)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to + r * to_stride),
        "l"(from + r * from_stride), "r"(bytes), "r"(full.address)
        : "memory");
#else
  for (int r = 0; r < rows; ++r)
    for (uint32_t at = 16 * lane; at < bytes; at += 16 * 32)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + r * to_stride + at),
                   "l"(from + r * from_stride + at)
                   : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full.address) : "memory");
#endif
}

}  // namespace dflash::cuda
