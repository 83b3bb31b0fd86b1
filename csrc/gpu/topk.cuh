// The best of many values: a value and its id are one integer (core/topk.h), so they are the same
// in any order.
#pragma once
#include "core/topk.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int kTopkThreads = 512, kTopkWarps = kTopkThreads / kLanes, kTopkPerThread = 8;
constexpr int kTopkChunk = kTopkThreads * kTopkPerThread;
constexpr int kTopkMost = kLanes;  // by chunks; a larger k takes head_topk_any

using RankKey = unsigned long long;          // of core/topk.h, what max_lanes() takes
constexpr RankKey kNoKey = 0, kNaN = ~0ull;  // behind all values, ahead of all

// The i-th largest of a warp's keys to lane i, i < k <= 32; kN keys a lane, each at most once but
// for kNoKey and kNaN.
template <int kN>
__device__ RankKey warp_topk(RankKey (&key)[kN], int k) {
  RankKey mine = kNoKey, out = kNoKey;
#pragma unroll
  for (int j = 0; j < kN; ++j) mine = key[j] > mine ? key[j] : mine;
  for (int i = 0; i < k; ++i) {
    const RankKey best = largest_key(mine);
    if (lane_id() == i) out = best;
    if (mine != best || best == kNoKey) continue;
    mine = kNoKey;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (key[j] == best) key[j] = kNoKey;
      mine = key[j] > mine ? key[j] : mine;
    }
  }
  return out;
}

// The k best of a thread block's keys, descending in lanes 0 .. k - 1 of warp 0. kTopkThreads
// threads.
__device__ inline RankKey block_topk(RankKey (&key)[kTopkPerThread], int k) {
  __shared__ RankKey found[kTopkWarps * kTopkMost];
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
  const RankKey best = warp_topk(key, k);
  if (lane < k) found[warp * k + lane] = best;
  __syncthreads();
  RankKey of_all[kTopkWarps * kTopkMost / kLanes];
#pragma unroll
  for (int j = 0; j < kTopkWarps * kTopkMost / kLanes; ++j)
    of_all[j] = j * kLanes + lane < kTopkWarps * k ? found[j * kLanes + lane] : kNoKey;
  return warp == 0 ? warp_topk(of_all, k) : kNoKey;
}

// The largest of a thread block's keys, to all of it.
__device__ inline RankKey block_best(RankKey key) {
  __shared__ RankKey of_warp[kTopkWarps];
  key = largest_key(key);
  if (lane_id() == 0) of_warp[threadIdx.x / kLanes] = key;
  __syncthreads();
  return largest_key(lane_id() < kTopkWarps ? of_warp[lane_id()] : kNoKey);
}

}  // namespace dflash::gpu
