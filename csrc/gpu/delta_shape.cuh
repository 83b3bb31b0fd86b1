// How the state of heads of 128 x 128 lies over blocks and lanes, and sums over its rows.
#pragma once
#include "core/act.h"
#include "gpu/four.cuh"

namespace dflash::gpu {

constexpr int kHead = 128;                      // k_dim and v_dim
constexpr int kHeads = kActGroup / kHead;       // of a cluster
constexpr int kHeadBlocks = 4;                  // that share a head
constexpr int kTeam = kHeads * kHeadBlocks;     // blocks of a cluster
constexpr int kTeamRows = kHead / kHeadBlocks;  // of the state, in a block
constexpr int kStepTile = 32;                   // rows of the batch at a time
constexpr int kReplayTile = 16;
constexpr int kFinished = kStepTile / kTeam;  // rows of a tile that a block finishes

// How a warp lies over the state.
template <int kWide, int kRows>
struct StepShape {
  static constexpr int kParts = kLanes / kWide;  // lanes of fold() in a thread
  static constexpr int kWarpRows = kParts * kRows;
  static constexpr int kWarps = kTeamRows / kWarpRows, kThreads = kWarps * kLanes;
  static constexpr int kBlocks = kWarps > 4 ? 2 : 3;  // on a multiprocessor, at least
  static_assert(kWide >= 2 * kRows && kWarps > 0);

  // The row of its group whose sum fold_both() leaves in this lane, and whether it is an output's.
  __device__ static int owned_row(int lane) {
    int row = 0;
    for (int n = kRows / 2, step = kWide / 4; n > 0; n /= 2, step /= 2) row += lane & step ? n : 0;
    return row;
  }
  __device__ static int owner_of(int row) {
    int lane = 0;
    for (int n = kRows / 2, step = kWide / 4; n > 0; n /= 2, step /= 2) lane += row & n ? step : 0;
    return lane;
  }
  __device__ static bool owns_output(int lane) { return lane & (kWide / 2); }
  // The lowest of the lanes with the same sum.
  __device__ static bool is_first(int lane) { return lane % (kWide / (2 * kRows)) == 0; }

  // The steps of fold() between threads, for the kRows of a and those of b at once.
  __device__ static float fold_both(const float (&a)[kRows], const float (&b)[kRows]) {
    const int lane = lane_id();
    const bool upper = lane & (kWide / 2);
    float x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      x[r] = (upper ? b[r] : a[r]) + exchange(upper ? a[r] : b[r], kWide / 2);
    int step = kWide / 4;
#pragma unroll
    for (int n = kRows / 2; n > 0; n /= 2, step /= 2) {
      const bool second = lane & step;
#pragma unroll
      for (int i = 0; i < n; ++i)
        x[i] = (second ? x[i + n] : x[i]) + exchange(second ? x[i] : x[i + n], step);
    }
    for (; step > 0; step /= 2) x[0] += exchange(x[0], step);
    return x[0];
  }

  // The steps before them.
  __device__ static float dot(const Four (&a)[kParts], const Four (&b)[kParts]) {
    float sum[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = fma(a[p].x[j], b[p].x[j], 0.f);
      sum[p] = (x[0] + x[1]) + (x[2] + x[3]);
    }
#pragma unroll
    for (int n = kParts / 2; n > 0; n /= 2)
#pragma unroll
      for (int p = 0; p < n; ++p) sum[p] = sum[p] + sum[p + n];
    return sum[0];
  }
};

}  // namespace dflash::gpu
