// A tile of weights times rows of activations in shared memory, by one warp.
#pragma once
#include "core/reduce.h"
#include "cuda/tile.cuh"
#include "gpu/act.cuh"

namespace dflash::cuda {

constexpr int kLeafTiles = kLeaf / kTileColumns;
constexpr int kTokens = 4;       // rows of activations in one mma: a column for each plane
constexpr int kMostTokens = 32;  // in one launch
constexpr int kGroupBytes = sizeof(gpu::ActPlanes), kRowBytes = kLeafTiles * kGroupBytes;

__device__ inline void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}
__device__ inline void mma(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %7, %7, %7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}

template <int i, int n, class Body>
__device__ __forceinline__ void unrolled(Body&& body) {
  if constexpr (i < n) {
    body.template operator()<i>();
    unrolled<i + 1, n>(body);
  }
}

// Rows g and g + 8 of a tile times token 4 t + q for every t < kGroups: leaf += ..., by core's
// expressions. x: the group of 256 of token 0, in shared memory; a token is kRowBytes.
template <class F, int kGroups>
__device__ __forceinline__ void multiply_tile(const uint8_t* tile, const uint8_t* x, int lane,
                                              float (&leaf)[kGroups][2]) {
  using T = Tile<F>;
  const int g = lane / 4, q = lane % 4;
  const typename T::Scales upper(tile, g), lower(tile, g + 8);
  // column g of B is plane g % 2 of token g / 2
  const uint8_t* b = x + g / 2 * kRowBytes + g % 2 * gpu::kLoPlane + 16 * q;
  int acc[kGroups][4] = {};
  float value[kGroups][2] = {};
  unrolled<0, kSteps / 2>([&]<int pair>() {
    Codes codes;
    T::codes(tile, pair, lane, codes);
#pragma unroll
    for (int t = 0; t < kGroups; ++t) {
      const uint4 w = load_as<uint4>(b + t * kTokens * kRowBytes + 64 * pair);
      const uint32_t words[2][2] = {{w.x, w.y}, {w.z, w.w}};
      unrolled<0, 2>([&]<int s>() {
        constexpr int step = 2 * pair + s;
        int c[4];
        if constexpr (!T::kSuperblocks) {
          mma(c, codes.a[s], words[s][0], words[s][1]);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int joined = (254 * c[2 * r] + c[2 * r + 1]) >> T::kCodeShift;
            const float d = r == 0 ? upper.template d<step>() : lower.template d<step>();
            value[t][r] = fma(d, float(joined), value[t][r]);
          }
        } else if constexpr (T::kSixteens) {
          unrolled<0, 2>([&]<int half>() {
            mma(c, codes.a[s][2 * half], codes.a[s][2 * half + 1], words[s][half]);
            constexpr int group = 2 * step + half;
            const int su = upper.template scale_of<group>(), sl = lower.template scale_of<group>();
            acc[t][0] += su * c[0];
            acc[t][1] += su * c[1];
            acc[t][2] += sl * c[2];
            acc[t][3] += sl * c[3];
          });
        } else {
          mma(c, codes.a[s], words[s][0], words[s][1]);
          const int su = upper.template scale_of<step>(), sl = lower.template scale_of<step>();
          acc[t][0] += su * c[0];
          acc[t][1] += su * c[1];
          acc[t][2] += sl * c[2];
          acc[t][3] += sl * c[3];
        }
      });
    }
  });
#pragma unroll
  for (int t = 0; t < kGroups; ++t) {
    const uint8_t* token = x + (kTokens * t + q) * kRowBytes;
    const float scale = load_as<float>(token + gpu::kPlaneScale);
    if constexpr (!T::kSuperblocks) {
      for (int r = 0; r < 2; ++r) leaf[t][r] = fma(value[t][r], scale, leaf[t][r]);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int hi = acc[t][2 * r] >> T::kCodeShift, lo = acc[t][2 * r + 1] >> T::kCodeShift;
        const float d = r == 0 ? upper.d : lower.d;
        leaf[t][r] = fma(fma(float(hi), 254.f, float(lo)), mul(d, scale), leaf[t][r]);
      }
    }
    if constexpr (T::kMins) {
      // fma(float(min_hi), 254, float(min_lo)) of the contract: |min_hi| < 2^24, so it rounds once
      const uint4 s0 = load_as<uint4>(token + gpu::kPlaneSums);
      const uint4 s1 = load_as<uint4>(token + gpu::kPlaneSums + 16);
      const int sums[8] = {int(s0.x), int(s0.y), int(s0.z), int(s0.w),
                           int(s1.x), int(s1.y), int(s1.z), int(s1.w)};
      int min_upper = 0, min_lower = 0;
      unrolled<0, kSteps>([&]<int step>() {
        min_upper += upper.template min_of<step>() * sums[step];
        min_lower += lower.template min_of<step>() * sums[step];
      });
      leaf[t][0] = fma(-float(min_upper), mul(upper.dmin, scale), leaf[t][0]);
      leaf[t][1] = fma(-float(min_lower), mul(lower.dmin, scale), leaf[t][1]);
    }
  }
}

}  // namespace dflash::cuda
