// A row of a vocabulary that keeps at most 32 ids, by one thread block: its probabilities in the
// order of core/sampling.h, in which all others are zeros that change no sum.
#pragma once
#include "gpu/row.cuh"
#include "gpu/topk.cuh"

namespace dflash::gpu {

struct Few {
  int64_t id[kLanes];  // ascending
  float p[kLanes];
  int count;  // 0: a logit that the CPU refuses, or none above -inf

  // One warp: the k first of the keys, one a lane and descending, as e_i of core/sampling.h.
  __device__ void take(RankKey key, int k, float temperature) {
    const RankKey first = from_lane(key, 0);
    const float top = rank_value(first), infinity = bit_cast<float>(0x7f800000u);
    const bool good = first != kNaN && top < infinity && top > -infinity;
    if (lane_id() == 0) count = good ? k : 0;
    if (!good) return;
    const bool mine = lane_id() < k;
    const int64_t my_id = mine ? int64_t(rank_id(key)) : int64_t(1) << 40;
    int place = 0;
    for (int l = 0; l < kLanes; ++l) place += from_lane(my_id, l) < my_id;
    if (!mine) return;
    id[place] = my_id;
    p[place] = softmax_term(rank_value(key), top, temperature);
  }

  // The whole block: p / sum of p.
  __device__ void normalise(int64_t vocab, float* sums) {  // [leaves]
    const int64_t leaves = ceil_div<int64_t>(vocab, kLeaf);
    const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
    for (int64_t l = threadIdx.x; l < leaves; l += kRowThreads) sums[l] = 0.f;
    __syncthreads();
    for (int e = warp; e < count; e += kRowThreads / kLanes) {
      const int64_t leaf = id[e] / kLeaf;
      if (e > 0 && id[e - 1] / kLeaf == leaf) continue;  // the warp of its first id sums a leaf
      float acc[kPerLane] = {};
      for (int f = e; f < count && id[f] / kLeaf == leaf; ++f) {
        const int slot = int(id[f] % kAccumulators);
#pragma unroll
        for (int j = 0; j < kPerLane; ++j)
          if (slot == kPerLane * lane + j) acc[j] = acc[j] + p[f];
      }
      const float sum = fold_lanes(acc);
      if (lane == 0) sums[leaf] = sum;
    }
    __syncthreads();
    const float total = join_leaves(sums, leaves);
    if (int(threadIdx.x) < count) p[threadIdx.x] = p[threadIdx.x] / total;
    __syncthreads();
  }

  // One warp: zeros where the probability in front, by (p descending, id ascending), reaches the
  // target.
  __device__ void keep(uint64_t target) {
    const bool mine = lane_id() < count;
    const float my_p = mine ? p[lane_id()] : -1.f;
    uint64_t ahead = 0;
    for (int l = 0; l < count; ++l) {
      const float other = from_lane(my_p, l);
      if (other > my_p || (other == my_p && l < lane_id())) ahead += mass(other);
    }
    if (mine && ahead >= target) p[lane_id()] = 0.f;
  }
};

}  // namespace dflash::gpu
