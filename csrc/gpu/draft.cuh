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

// First row of the block that row n belongs to, by a whole warp; rows behind the last block
// continue it.
__device__ inline int64_t first_of_block(const ConvolutionView& v, int64_t n) {
  int first = 0;
  for (int64_t s = lane_id(); s - lane_id() <= v.sequences; s += kLanes) {
    const int begin = s <= v.sequences ? v.cu_seqlens[s] : 0;
    first = begin <= n && begin > first ? begin : first;
  }
  return max_lanes(first);
}

// kN neighbouring values of row n from column c on; the tap loop is the outer one, so that their
// loads overlap.
template <int kN>
__device__ void convolve(const ConvolutionView& v, int64_t n, int64_t first, int c, float* sum) {
  const int size = v.columns / v.groups;
#pragma unroll
  for (int i = 0; i < kN; ++i) sum[i] = 0.f;
  for (int t = 0; t < v.taps && n - t >= first; ++t) {
    const float* base = v.base + int64_t(t) * v.columns + c;
    const float* coef = v.coef + (n * 2 * v.taps + t) * v.groups;
    const float* x = v.x + (n - t) * v.columns + c;
#pragma unroll
    for (int i = 0; i < kN; ++i)
      if (c + i < v.columns) sum[i] = conv_tap(base[i], coef[(c + i) / size], x[i], sum[i]);
  }
}

// A value per thread; blockIdx.x is the row.
__global__ void grouped_conv(ConvolutionView v, float* out) {  // [rows, columns]
  start();
  const int64_t n = blockIdx.x, first = first_of_block(v, n);
  const int c = int(blockIdx.y * blockDim.x + threadIdx.x);
  if (c >= v.columns) return;
  float sum[1];
  convolve<1>(v, n, first, c, sum);
  out[n * v.columns + c] = sum[0];
}

// Packed: a group of activations per warp.
template <class Group>
__global__ void grouped_conv_packed(ConvolutionView v, Group* out) {  // [rows, groups of 256]
  start();
  const int per_row = ceil_div<int>(v.columns, kActGroup);
  const int64_t n = blockIdx.x;
  const int group = int(blockIdx.y * blockDim.x + threadIdx.x) / kLanes;
  if (group >= per_row) return;
  float value[kActPerLane];
  convolve<kActPerLane>(v, n, first_of_block(v, n), group * kActGroup + lane_id() * kActPerLane,
                        value);
  quantize_group(value, out + n * per_row + group);
}

// The codebook rows that a walk may meet, as floats: predecessors of the anchors and of all
// candidates, successors of all candidates.
struct CodebookView {
  const uint8_t *predecessor, *successor;  // [rows, rank / kElems quants]
  const int64_t *anchors, *candidates;
  float* out;  // [anchors + 2 candidates, rank]
  int64_t rows;
  int anchor_count, candidate_count, rank;
};

// A row of `out` per blockIdx.x from `first` on, of a codebook in format F.
template <class F>
__global__ void codebook_rows(CodebookView v, int first) {
  start();
  const int at = first + int(blockIdx.x), r = int(blockIdx.y * blockDim.x + threadIdx.x);
  if (r >= v.rank) return;
  const int of_candidate = at - v.anchor_count;
  const bool after = of_candidate >= v.candidate_count;
  const int64_t row = of_candidate < 0
                          ? v.anchors[at]
                          : v.candidates[after ? of_candidate - v.candidate_count : of_candidate];
  const uint8_t* table = after ? v.successor : v.predecessor;
  v.out[int64_t(at) * v.rank + r] =
      row < 0 || row >= v.rows
          ? no_answer()
          : decode<F>(table + (row * (v.rank / F::kElems) + r / F::kElems) * F::kBytes,
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

constexpr int kWalkParts = 4;  // 128 values each: the rank of a narrow walk is at most 512
constexpr int kWalkValues = kWalkParts * kPerLane;

// A lane's part of a row, in the order of core/reduce.h.
struct LaneRow {
  float value[kWalkValues];

  __device__ void load(const float* row, int rank) {
#pragma unroll
    for (int e = 0; e < kWalkValues; ++e) {
      const int r = place(e);
      value[e] = r < rank ? row[r] : 0.f;
    }
  }
  __device__ void store(float* row, int rank) const {
#pragma unroll
    for (int e = 0; e < kWalkValues; ++e)
      if (place(e) < rank) row[place(e)] = value[e];
  }
  __device__ static int place(int e) {
    return e / kPerLane * kAccumulators + kPerLane * lane_id() + e % kPerLane;
  }
};

// The dot of (predecessor * hidden) and a successor, by one warp; beyond the rank nothing is added.
__device__ inline float compatibility(const float* previous, const LaneRow& hidden,
                                      const LaneRow& after, int rank) {
  float acc[kPerLane] = {};
#pragma unroll
  for (int e = 0; e < kWalkValues; ++e) {
    const int r = LaneRow::place(e);
    if (r < rank)
      acc[e % kPerLane] = fma(mul(previous[r], hidden.value[e]), after.value[e], acc[e % kPerLane]);
  }
  return fold_lanes(acc);
}

// A thread block per sequence, a warp per candidate, for up to kWalkWarps candidates and a rank of
// up to 512. Rows are fetched a slot ahead, and the candidates' own predecessor rows wait in shared
// memory for one of them to be chosen; every warp makes the same choice by itself.
constexpr int kWalkWarps = kRowThreads / kLanes;
__global__ void __launch_bounds__(kRowThreads) selector_walk(WalkArguments a) {
  extern __shared__ float before[];  // [2, candidates, rank]
  __shared__ float score[2][kWalkWarps];
  start();
  const int64_t n = blockIdx.x;
  const int K = int(a.candidates), R = int(a.rank);
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
  const float t = a.temperature[n];
  const bool mine = lane < K, works = warp < K;
  LaneRow hidden, after, own, next_hidden, next_after, next_own;
  const auto fetch = [&](int64_t j) {
    const int64_t slot = n * a.slots + j;
    if (j >= a.slots || !works) return;
    next_hidden.load(a.hidden + slot * R, R);
    next_after.load(a.after + (slot * K + warp) * R, R);
    next_own.load(a.before + (slot * K + warp) * R, R);
  };
  const float* previous = a.anchors + n * R;
  bool alive = true;
  fetch(0);
  for (int64_t j = 0; j < a.slots; ++j) {
    const int64_t slot = n * a.slots + j;
    hidden = next_hidden;
    after = next_after;
    own = next_own;
    // the other halves may still be read
    float* rows = before + j % 2 * K * R;
    float* scores = score[j % 2];
    const float given = mine ? a.scores[slot * K + lane] : 0.f;
    const int64_t id = mine ? a.ids[slot * K + lane] : kNoToken;
    const float uniform = a.uniform[slot];
    fetch(j + 1);
    if (works) {
      const float dot = compatibility(previous, hidden, after, R);
      own.store(rows + warp * R, R);
      if (lane == 0) scores[warp] = dot;
    }
    __syncthreads();
    const float x = mine ? edge_score(given, scores[lane]) : bit_cast<float>(0xff800000u);
    float p;
    alive = lane_probs(x, mine, t, &p) && alive;
    if (warp == 0 && mine) a.q[slot * K + lane] = p;
    int chosen = int(kNoToken);
    if (alive) chosen = t == 0.f ? first_lane(p == 1.f) : lane_draw(mine ? p : 0.f, K, uniform);
    alive = alive && chosen >= 0;
    // a sequence that has ended scores against the anchor, whose row stays
    previous = alive ? rows + chosen * R : a.anchors + n * R;
    const int64_t token = from_lane(id, alive ? chosen : 0);
    if (threadIdx.x == 0) a.tokens[slot] = alive ? token : kNoToken;
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
