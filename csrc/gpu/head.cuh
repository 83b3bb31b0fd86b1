// Top-k of logits, in stages: the k best of every chunk of a row, then the k best of those, until a
// row is one chunk. A row that holds a NaN answers ids of -1 and values of NaN.
#pragma once
#include "gpu/topk.cuh"

namespace dflash::gpu {

struct TopkView {
  const float* logits;  // [rows, vocabulary]
  int64_t vocabulary, k;
  float multiplier, softcap;
  float* values;  // [rows, k]
  int64_t* ids;   // [rows, k]
};

// Results of a row from its keys, one per lane.
__device__ inline void store_topk(const TopkView& t, int64_t row, RankKey key) {
  const bool nan = from_lane(key, 0) == kNaN;
  if (lane_id() >= t.k) return;
  const int64_t at = row * t.k + lane_id();
  t.values[at] = nan ? no_answer() : rank_value(key);
  t.ids[at] = nan ? -1 : int64_t(rank_id(key));
}

// As block_topk() gives them.
__device__ inline RankKey best_of(RankKey (&key)[kTopkPerThread], int k) {
  if (k > 1) return block_topk(key, k);
  RankKey mine = key[0];
#pragma unroll
  for (int j = 1; j < kTopkPerThread; ++j) mine = key[j] > mine ? key[j] : mine;
  return block_best(mine);
}

// What a block found in its chunk of a row: the answer, if that was all, or for the next round.
__device__ inline void keep_best(const TopkView& t, int64_t row, RankKey best, RankKey* keys) {
  if (threadIdx.x >= kLanes) return;
  if (gridDim.y == 1)
    store_topk(t, row, best);
  else if (lane_id() < t.k)
    keys[(row * gridDim.y + blockIdx.y) * t.k + lane_id()] = best;
}

// Block (row, chunk): the best of a chunk to keys [rows, chunks, k], or to the results.
__global__ void __launch_bounds__(kTopkThreads) head_topk_logits(TopkView t, RankKey* keys) {
  start();
  const int64_t row = blockIdx.x, first = int64_t(blockIdx.y) * kTopkChunk + threadIdx.x;
  const float* logits = t.logits + row * t.vocabulary;
  RankKey key[kTopkPerThread];
#pragma unroll
  for (int j = 0; j < kTopkPerThread; ++j) {
    const int64_t id = first + j * kTopkThreads;
    const float value = id < t.vocabulary ? logit_value(logits[id], t.multiplier, t.softcap) : 0.f;
    key[j] = id >= t.vocabulary ? kNoKey : value != value ? kNaN : rank_key(value, uint32_t(id));
  }
  keep_best(t, row, best_of(key, int(t.k)), keys);
}

// The same of `count` keys of a row.
__global__ void __launch_bounds__(kTopkThreads)
    head_topk_keys(TopkView t, const RankKey* from, int64_t count, RankKey* keys) {
  start();
  const int64_t row = blockIdx.x, first = int64_t(blockIdx.y) * kTopkChunk + threadIdx.x;
  RankKey key[kTopkPerThread];
#pragma unroll
  for (int j = 0; j < kTopkPerThread; ++j) {
    const int64_t at = first + j * kTopkThreads;
    key[j] = at < count ? from[row * count + at] : kNoKey;
  }
  keep_best(t, row, best_of(key, int(t.k)), keys);
}

// Any k, a thread block per row: k times the best of what is behind the last one found.
__global__ void __launch_bounds__(kTopkThreads) head_topk_any(TopkView t) {
  start();
  __shared__ RankKey best_of[kTopkWarps];
  const int tid = int(threadIdx.x);
  const int64_t row = blockIdx.x;
  const float* logits = t.logits + row * t.vocabulary;
  RankKey last = kNaN;
  for (int64_t i = 0; i < t.k; ++i) {
    RankKey best = kNoKey;
    int has_nan = 0;
    for (int64_t id = tid; id < t.vocabulary; id += kTopkThreads) {
      const float value = logit_value(logits[id], t.multiplier, t.softcap);
      has_nan |= value != value;
      const RankKey key = rank_key(value, uint32_t(id));
      if (key < last && key > best) best = key;
    }
    if (__syncthreads_or(has_nan)) {
      for (int64_t n = tid; n < t.k; n += kTopkThreads) {
        t.values[row * t.k + n] = no_answer();
        t.ids[row * t.k + n] = -1;
      }
      return;
    }
    best = largest_key(best);
    if (lane_id() == 0) best_of[tid / kLanes] = best;
    __syncthreads();
    for (int w = 0; w < kTopkWarps; ++w) best = best_of[w] > best ? best_of[w] : best;
    __syncthreads();  // before the next round writes best_of
    if (tid == 0) {
      t.values[row * t.k + i] = rank_value(best);
      t.ids[row * t.k + i] = rank_id(best);
    }
    last = best;
  }
}

}  // namespace dflash::gpu
