// The drafters' own operators. Codebook rows arrive as floats (NaN for an id outside), so the walk
// knows nothing of formats; a score that is NaN ends a sequence with the token -1.
#pragma once
#include "core/draft.h"
#include "core/formats/all.h"
#include "gpu/act.cuh"
#include "gpu/row.cuh"

namespace dflash::gpu {

struct ConvolutionView {
  const float* x;             // [rows, columns]
  const float* coef;          // [rows, 2, taps, groups], of this side
  const float* base;          // [taps, columns], of this side
  const int32_t* cu_seqlens;  // [sequences + 1]
  int64_t sequences;
  int rows, columns, taps, groups;
};

// First row of the block that row n belongs to; rows behind the last block continue it.
__device__ inline int64_t first_of_block(const ConvolutionView& v, int64_t n) {
  int64_t first = 0;
  for (int64_t s = 0; s <= v.sequences && v.cu_seqlens[s] <= n; ++s)
    first = v.cu_seqlens[s] > 0 ? v.cu_seqlens[s] : 0;
  return first;
}

__device__ inline float convolved(const ConvolutionView& v, int64_t n, int64_t first, int c) {
  const int group = c / (v.columns / v.groups);
  float sum = 0.f;
  for (int t = 0; t < v.taps && n - t >= first; ++t)
    sum = conv_tap(v.base[int64_t(t) * v.columns + c],
                   v.coef[(n * 2 * v.taps + t) * v.groups + group], v.x[(n - t) * v.columns + c],
                   sum);
  return sum;
}

// A value per thread; blockIdx.x is the row.
__global__ void grouped_conv(ConvolutionView v, float* out) {  // [rows, columns]
  start();
  const int c = int(blockIdx.y * blockDim.x + threadIdx.x);
  if (c >= v.columns) return;
  const int64_t n = blockIdx.x;
  out[n * v.columns + c] = convolved(v, n, first_of_block(v, n), c);
}

// Packed: a group of activations per warp.
template <class Group>
__global__ void grouped_conv_packed(ConvolutionView v, Group* out) {  // [rows, groups of 256]
  start();
  const int per_row = ceil_div<int>(v.columns, kActGroup);
  const int64_t n = blockIdx.x;
  const int group = int(blockIdx.y * blockDim.x + threadIdx.x) / kLanes;
  if (group >= per_row) return;
  const int64_t first = first_of_block(v, n);
  float value[kActPerLane];
  for (int i = 0; i < kActPerLane; ++i) {
    const int c = group * kActGroup + lane_id() * kActPerLane + i;
    value[i] = c < v.columns ? convolved(v, n, first, c) : 0.f;
  }
  quantize_group(value, out + n * per_row + group);
}

// Rows of a codebook as floats: of two lists of ids, one behind the other.
template <class F>
__global__ void codebook_rows(const uint8_t* packed,  // [rows, rank / kElems quants]
                              const int64_t* few,     // [few_ids]
                              const int64_t* many,    // [ids - few_ids]
                              float* out,             // [ids, rank]
                              int64_t rows, int few_ids, int ids, int rank) {
  start();
  const int at = int(blockIdx.x), r = int(blockIdx.y * blockDim.x + threadIdx.x);
  if (r >= rank) return;
  const int64_t row = at < few_ids ? few[at] : many[at - few_ids];
  out[int64_t(at) * rank + r] =
      row < 0 || row >= rows
          ? no_answer()
          : decode<F>(packed + (row * (rank / F::kElems) + r / F::kElems) * F::kBytes,
                      r % F::kElems);
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

// row_probs() with top-k and top-p off, of up to 32 candidates, one a lane (-inf behind them).
__device__ inline bool lane_probs(float x, bool mine, float temperature, float* p) {
  const float infinity = bit_cast<float>(0x7f800000u);
  const bool setting = temperature >= 0.f && temperature < infinity;
  const float top = max_lanes(x);
  // a NaN compares with nothing: asked of every lane, not of the largest
  if (any_lane(!setting || (mine && !(x < infinity))) || top == -infinity) {
    *p = no_answer();
    return false;
  }
  if (temperature == 0.f) {
    *p = lane_id() == first_lane(mine && x == top) ? 1.f : 0.f;
    return true;
  }
  const float e = mine ? softmax_term(x, top, temperature) : 0.f;
  *p = e / sum_candidates(e);
  return true;
}

// draw() of up to 32 probabilities, one a lane; an index, or < 0.
__device__ inline int lane_draw(float p, int count, float u) {
  if (any_lane(!(u >= 0.f && u < 1.f) || !(p >= 0.f))) return int(kNoToken);
  const double total = double(sum_candidates(p));
  if (!(total > 0. && total <= 3.4028234663852886e38)) return int(kNoMass);
  // all lanes take part in every exchange, and hold the same running sum
  const double threshold = double(u) * total;
  double running = 0.;
  int last = int(kNoToken);
  bool found = false;
  for (int i = 0; i < count; ++i) {
    const float value = from_lane(p, i);
    if (found || !(value > 0.f)) continue;
    last = i;
    running += double(value);
    found = running > threshold;
  }
  return last;
}

// A thread block per sequence, a warp per candidate, for up to 32 of them; every warp then makes
// the same choice by itself.
__global__ void __launch_bounds__(kRowThreads) selector_walk(WalkArguments a) {
  start();
  __shared__ float score[2][kLanes];
  const int64_t n = blockIdx.x;
  const int K = int(a.candidates), R = int(a.rank);
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
  const float t = a.temperature[n];
  const float* previous = a.anchors + n * R;
  bool alive = true;
  for (int64_t j = 0; j < a.slots; ++j) {
    const int64_t slot = n * a.slots + j;
    const float* hidden = a.hidden + slot * R;
    float* scores = score[j % 2];  // the other half may still be read
    for (int k = warp; k < K; k += kRowThreads / kLanes) {
      const float* row = a.after + (slot * K + k) * R;
      const float compatibility = warp_dot(
          R, [&](int64_t r) { return mul(previous[r], hidden[r]); },
          [&](int64_t r) { return row[r]; });
      if (lane == 0) scores[k] = edge_score(a.scores[slot * K + k], compatibility);
    }
    __syncthreads();
    const bool mine = lane < K;
    float p;
    alive = lane_probs(mine ? scores[lane] : bit_cast<float>(0xff800000u), mine, t, &p) && alive;
    if (warp == 0 && mine) a.q[slot * K + lane] = p;
    int chosen = int(kNoToken);
    if (alive)
      chosen = t == 0.f ? first_lane(p == 1.f) : lane_draw(mine ? p : 0.f, K, a.uniform[slot]);
    alive = alive && chosen >= 0;
    if (alive) previous = a.before + (slot * K + chosen) * R;
    if (threadIdx.x == 0) a.tokens[slot] = alive ? a.ids[slot * K + chosen] : kNoToken;
  }
}

// The same for any number of candidates.
__global__ void __launch_bounds__(kRowThreads) selector_walk_wide(WalkArguments a) {
  start();
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
