// The drafters' own operators. Codebook rows arrive as floats (NaN for an id outside), so the walk
// knows nothing of formats; a score that is NaN ends a sequence with the token -1.
#pragma once
#include "core/draft.h"
#include "gpu/row.cuh"

namespace dflash::gpu {

// One output value per thread.
__global__ void grouped_conv(const float* x,             // [rows, columns]
                             const float* coef,          // [rows, 2, taps, groups], of this side
                             const float* base,          // [taps, columns], of this side
                             const int32_t* cu_seqlens,  // [sequences + 1]
                             float* out,                 // [rows, columns]
                             int64_t sequences, int64_t columns, int64_t taps, int64_t groups,
                             int64_t count) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const int64_t n = at / columns, c = at % columns, group = c / (columns / groups);
  int64_t first = 0;  // of the block that row n belongs to
  for (int64_t s = 0; s <= sequences && cu_seqlens[s] <= n; ++s)
    first = cu_seqlens[s] > 0 ? cu_seqlens[s] : 0;
  float sum = 0.f;
  for (int64_t t = 0; t < taps && n - t >= first; ++t)
    sum = conv_tap(base[t * columns + c], coef[(n * 2 * taps + t) * groups + group],
                   x[at - t * columns], sum);
  out[at] = sum;
}

struct WalkArguments {
  const int64_t* ids;        // [sequences, slots, candidates]
  const float* scores;       // [sequences, slots, candidates]
  const float* hidden;       // [sequences, slots, rank]
  const float* anchors;      // [sequences, rank], predecessor rows
  const float* before;       // [sequences, slots, candidates, rank], predecessor rows
  const float* after;        // the same, successor rows
  const float* temperature;  // [sequences]
  const float* uniform;      // [sequences, slots]
  int64_t slots, candidates, rank;
  float* score;     // [sequences, candidates]
  float* sums;      // [sequences, leaves]
  int64_t* tokens;  // [sequences, slots]
  float* q;         // [sequences, slots, candidates]
};

// A thread block per sequence, a warp per candidate.
__global__ void __launch_bounds__(kRowThreads) selector_walk(WalkArguments a) {
  __shared__ RowShared s;
  const int64_t n = blockIdx.x, K = a.candidates, R = a.rank;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float* score = a.score + n * K;
  float* sums = a.sums + n * ceil_div<int64_t>(K, kLeaf);
  const float t = a.temperature[n];
  const float* previous = a.anchors + n * R;
  bool alive = true;
  for (int64_t j = 0; j < a.slots; ++j) {
    const int64_t slot = n * a.slots + j;
    const float* hidden = a.hidden + slot * R;
    for (int64_t k = warp; k < K; k += kRowThreads / kLanes) {
      const float* row = a.after + (slot * K + k) * R;
      const float compatibility = warp_dot(
          R, [&](int64_t r) { return mul(previous[r], hidden[r]); },
          [&](int64_t r) { return row[r]; });
      if (lane == 0) score[k] = edge_score(a.scores[slot * K + k], compatibility);
    }
    __syncthreads();
    float* q = a.q + slot * K;
    alive = row_probs(s, score, K, t, 0, 1.f, q, sums) && alive;
    int64_t chosen = kNoToken;
    if (alive)
      chosen = t == 0.f ? first_equal(s, q, K, 1.f)
                        : draw(s, [q](int64_t k) { return q[k]; }, K, a.uniform[slot], sums);
    alive = alive && chosen >= 0;
    if (alive) previous = a.before + (slot * K + chosen) * R;
    if (threadIdx.x == 0) a.tokens[slot] = alive ? a.ids[slot * K + chosen] : kNoToken;
    __syncthreads();
  }
}

}  // namespace dflash::gpu
