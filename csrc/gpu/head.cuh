// Top-k of logits, a thread block per row: k times the best of what is behind the last one found.
// For the small k of drafters; a row that holds a NaN answers ids of -1 and values of NaN.
#pragma once
#include "core/topk.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int kTopkThreads = 512;

struct TopkView {
  const float* logits;  // [rows, vocabulary]
  int64_t vocabulary, k;
  float multiplier, softcap;
  float* values;  // [rows, k]
  int64_t* ids;   // [rows, k]
};

__global__ void head_topk(TopkView t) {
  __shared__ unsigned long long best_of[kTopkThreads / kLanes];
  const int tid = int(threadIdx.x);
  const int64_t row = blockIdx.x;
  const float* logits = t.logits + row * t.vocabulary;
  unsigned long long last = ~0ull;
  for (int64_t i = 0; i < t.k; ++i) {
    unsigned long long best = 0;
    int has_nan = 0;
    for (int64_t id = tid; id < t.vocabulary; id += kTopkThreads) {
      const float value = logit_value(logits[id], t.multiplier, t.softcap);
      has_nan |= value != value;
      const unsigned long long key = rank_key(value, uint32_t(id));
      if (key < last && key > best) best = key;
    }
    if (__syncthreads_or(has_nan)) {
      for (int64_t n = tid; n < t.k; n += kTopkThreads) {
        t.values[row * t.k + n] = no_answer();
        t.ids[row * t.k + n] = -1;
      }
      return;
    }
    best = max_lanes(best);
    if (lane_id() == 0) best_of[tid / kLanes] = best;
    __syncthreads();
    for (int w = 0; w < kTopkThreads / kLanes; ++w) best = best_of[w] > best ? best_of[w] : best;
    __syncthreads();  // before the next round writes best_of
    if (tid == 0) {
      t.values[row * t.k + i] = rank_value(best);
      t.ids[row * t.k + i] = rank_id(best);
    }
    last = best;
  }
}

}  // namespace dflash::gpu
