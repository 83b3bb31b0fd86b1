// Softmax of a row of a vocabulary at a temperature, top-k and top-p off, by many thread blocks: a
// warp per leaf of core/reduce.h's order. First the largest logit of every chunk (topk.cuh), then
// exponentials and their sum per leaf, then quotients and theirs.
#pragma once
#include "gpu/row.cuh"
#include "gpu/topk.cuh"

namespace dflash::gpu {

constexpr int kSpreadThreads = 4 * kLanes;
constexpr int64_t kSpreadLeaves = kLanes * kLanes;  // that one warp joins

// Tree's join of the values of lanes 0 .. n - 1, to every lane: pairs, pairs of pairs, and what has
// no neighbour as it is.
__device__ inline float join_lanes(float value, int n) {
  for (int step = 1; step < kLanes; step *= 2) {
    const float other = from_lane(value, (lane_id() + step) % kLanes);
    if (lane_id() + step < n) value = value + other;
  }
  return from_lane(value, 0);
}

// The same of up to kSpreadLeaves leaves, by one warp.
__device__ inline float join_spread(const float* leaf, int leaves) {
  const int groups = ceil_div<int>(leaves, kLanes), lane = lane_id();
  float node = 0.f;
  for (int g = 0; g < groups; ++g) {
    const int left = leaves - g * kLanes, n = left < kLanes ? left : kLanes;
    const float joined = join_lanes(lane < n ? leaf[g * kLanes + lane] : 0.f, n);
    if (lane == g) node = joined;
  }
  return join_lanes(node, groups);
}

// The largest of a row's keys, one per chunk and `stride` apart, by one warp.
__device__ inline RankKey best_of_row(const RankKey* keys, int64_t chunks, int64_t stride) {
  RankKey best = kNoKey;
  for (int64_t c = lane_id(); c < chunks; c += kLanes)
    best = keys[c * stride] > best ? keys[c * stride] : best;
  return largest_key(best);
}

// Whether the CPU refuses the row or its temperature: all of it is NaN then.
__device__ inline bool refused(RankKey best, float temperature) {
  const float infinity = bit_cast<float>(0x7f800000u);
  return best == kNaN || rank_value(best) == -infinity ||
         !(temperature >= 0.f && temperature < infinity);
}

// One leaf of the exponentials of x(id), by one warp. At temperature 0 the row is done with it: one
// at the best id, zeros elsewhere.
template <class X>
__device__ void spread_exp(const X& x, int64_t vocab, int64_t leaf, RankKey best, float temperature,
                           float* p, float* sums) {
  const int64_t begin = leaf * kLeaf, size = vocab - begin < kLeaf ? vocab - begin : kLeaf;
  const bool none = refused(best, temperature);
  const float top = rank_value(best);
  const float sum = warp_sum_leaf(
      [&](int64_t e) {
        const int64_t id = begin + e;
        float value = no_answer();
        if (!none && temperature == 0.f) value = id == int64_t(rank_id(best)) ? 1.f : 0.f;
        if (!none && temperature != 0.f) value = softmax_term(x(id), top, temperature);
        p[id] = value;
        return value;
      },
      size);
  if (lane_id() == 0) sums[leaf] = sum;
}

// One leaf of the quotients, of a row that was not refused and whose temperature is not 0.
__device__ inline void spread_divide(int64_t vocab, int64_t leaf, float* p, const float* sums,
                                     float* divided) {  // sums as checked_leaf() leaves them
  const int64_t begin = leaf * kLeaf, size = vocab - begin < kLeaf ? vocab - begin : kLeaf;
  const float total = join_spread(sums, int(ceil_div<int64_t>(vocab, kLeaf)));
  bool bad = false;
  const float sum = warp_sum_leaf(
      [&](int64_t e) {
        const float value = p[begin + e] / total;
        p[begin + e] = value;
        bad = bad || !(value >= 0.f);
        return value;
      },
      size);
  bad = any_lane(bad);
  if (divided && lane_id() == 0) divided[leaf] = bad ? kBadLeaf : sum;
}

}  // namespace dflash::gpu
