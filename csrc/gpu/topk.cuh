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

__device__ inline void order(RankKey& a, RankKey& b) {
  const RankKey low = a < b ? a : b;
  a = a < b ? b : a;
  b = low;
}

// Batcher's network for eight: key[0] is the largest.
__device__ inline void sort_eight(RankKey (&key)[8]) {
  constexpr uint8_t pairs[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6},
                                    {5, 7}, {1, 2}, {5, 6}, {0, 4}, {1, 5}, {2, 6}, {3, 7},
                                    {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (int i = 0; i < 19; ++i) order(key[pairs[i][0]], key[pairs[i][1]]);
}

// The i-th largest of a warp's keys to lane i, i < k <= 32; each at most once but for kNoKey and
// kNaN, of which every lane's first counts.
__device__ inline RankKey warp_topk(RankKey (&key)[kTopkPerThread], int k) {
  static_assert(kTopkPerThread == 8);
  sort_eight(key);
  RankKey out = kNoKey;
  for (int i = 0; i < k; ++i) {
    const RankKey best = largest_key(key[0]);
    if (lane_id() == i) out = best;
    const bool taken = key[0] == best;
#pragma unroll
    for (int j = 0; j + 1 < kTopkPerThread; ++j) key[j] = taken ? key[j + 1] : key[j];
    if (taken) key[kTopkPerThread - 1] = kNoKey;
  }
  return out;
}

// How many of a descending list are ahead of a key.
__device__ inline int ahead_of(const RankKey* list, int k, RankKey key) {
  int low = 0;
  for (int step = kTopkMost / 2; step > 0; step /= 2)
    if (low + step <= k && list[low + step - 1] > key) low += step;
  return low < k && list[low] > key ? low + 1 : low;
}

// The k best of a thread block's keys, descending in lanes 0 .. k - 1 of warp 0. kTopkThreads
// threads. Every warp's k best are found first; then each of those counts the ones ahead of it.
__device__ inline RankKey block_topk(RankKey (&key)[kTopkPerThread], int k) {
  __shared__ RankKey found[kTopkWarps * kTopkMost], best[kTopkMost];
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
  const RankKey mine = warp_topk(key, k);
  if (lane < k) found[warp * k + lane] = mine;
  if (threadIdx.x < kTopkMost) best[threadIdx.x] = kNoKey;
  __syncthreads();
  if (lane < k && mine != kNoKey) {
    int rank = 0;
#pragma unroll 8
    for (int w = 0; w < kTopkWarps; ++w) rank += ahead_of(found + w * k, k, mine);
    if (rank < k) best[rank] = mine;  // of several kNaN any
  }
  __syncthreads();
  return warp == 0 && lane < k ? best[lane] : kNoKey;
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
