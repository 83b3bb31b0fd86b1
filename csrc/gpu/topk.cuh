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

// The largest of a warp's keys, in descending order, to lanes 0, 1, ..; at most k <= 32 of them and
// none below `least`. Returns how many. Keys differ but for kNoKey and kNaN.
__device__ inline int warp_topk(RankKey (&key)[kTopkPerThread], int k, RankKey least,
                                RankKey* mine) {
  static_assert(kTopkPerThread == 8);
  *mine = kNoKey;
  for (int i = 0; i < k; ++i) {
    const RankKey best = largest_key(key[0]);
    if (best < least) return i;
    if (lane_id() == i) *mine = best;
    const bool taken = key[0] == best;
#pragma unroll
    for (int j = 0; j + 1 < kTopkPerThread; ++j) key[j] = taken ? key[j + 1] : key[j];
    if (taken) key[kTopkPerThread - 1] = kNoKey;
  }
  return k;
}

// The k best of a thread block's keys, descending in lanes 0 .. k - 1 of warp 0. kTopkThreads
// threads. None of up to 16 is below the smallest of the 16 warps' largest, and none of up to 32
// below the smallest of their second largest: few are left, and each counts those ahead of it.
__device__ inline RankKey block_topk(RankKey (&key)[kTopkPerThread], int k) {
  __shared__ RankKey found[kTopkWarps * kTopkMost], bounds[kTopkWarps], best[kTopkMost];
  __shared__ int count;
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
  sort_eight(key);
  static_assert(kTopkMost == 2 * kTopkWarps);
  RankKey bound = largest_key(key[0]);
  if (k > kTopkWarps) bound = largest_key(key[0] == bound ? key[1] : key[0]);
  if (lane == 0) bounds[warp] = bound;
  if (threadIdx.x == 0) count = 0;
  if (threadIdx.x < kTopkMost) best[threadIdx.x] = kNoKey;
  __syncthreads();
  const RankKey smallest = ~largest_key(~bounds[lane % kTopkWarps]);
  const RankKey least = smallest > kNoKey ? smallest : kNoKey + 1;
  RankKey mine;
  const int mine_count = warp_topk(key, k, least, &mine);
  int at = 0;
  if (lane == 0 && mine_count > 0) at = atomicAdd(&count, mine_count);
  at = from_lane(at, 0);
  if (lane < mine_count) found[at + lane] = mine;
  __syncthreads();
  const int all = count;
  if (int(threadIdx.x) < all) {
    const RankKey my_key = found[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < all; ++i) rank += found[i] > my_key;
    if (rank < k) best[rank] = my_key;  // of several kNaN any
  }
  __syncthreads();
  return warp == 0 && lane < k ? best[lane] : kNoKey;
}

__device__ inline RankKey largest_of(const RankKey (&key)[kTopkPerThread]) {
  RankKey best = key[0];
#pragma unroll
  for (int j = 1; j < kTopkPerThread; ++j) best = key[j] > best ? key[j] : best;
  return best;
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
