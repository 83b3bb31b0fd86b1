// Sampling and acceptance. What the CPU reports as an error
// becomes NaN, or the token -1: the host must not read values in a captured step.
#pragma once
#include "core/accept.h"
#include "core/random.h"
#include "gpu/few.cuh"

namespace dflash::gpu {

__global__ void uniform_kernel(const int64_t* seeds, const int64_t* positions, int stream,
                               float* out, int64_t count) {
  start();
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n < count) out[n] = uniform(seeds[n], positions[n], stream);
}

struct ProbsView {
  const float* logits;       // [rows, vocab]
  const float* temperature;  // [rows]
  const int64_t* top_k;      // [rows]
  const float* top_p;        // [rows]
  int64_t vocab;
  float* out;     // [rows, vocab]
  float* sums;    // [rows, leaves]
  RankKey* keys;  // [rows, chunks, kTopkMost], or null: no row takes the short way
  int64_t chunks;
};

// Whether a row keeps so few ids that they are sorted out first, and the rest is zeros.
__device__ inline bool keeps_few(const ProbsView& v, int64_t row) {
  const float t = v.temperature[row], top_p = v.top_p[row];
  const int64_t k = v.top_k[row];
  return v.keys && t > 0.f && t < bit_cast<float>(0x7f800000u) && k > 0 && k <= kTopkMost &&
         k < v.vocab && top_p > 0.f && top_p <= 1.f;
}

// Block (row, chunk): the best of a chunk to the keys, zeros to the probabilities.
__global__ void __launch_bounds__(kTopkThreads) sampling_keys(ProbsView v) {
  start();
  const int64_t row = blockIdx.x, first = int64_t(blockIdx.y) * kTopkChunk + threadIdx.x;
  if (!keeps_few(v, row)) return;
  RankKey key[kTopkPerThread];
#pragma unroll
  for (int j = 0; j < kTopkPerThread; ++j) {
    const int64_t id = first + j * kTopkThreads;
    key[j] = kNoKey;
    if (id >= v.vocab) continue;
    const float x = v.logits[row * v.vocab + id];
    v.out[row * v.vocab + id] = 0.f;
    key[j] = x < bit_cast<float>(0x7f800000u) ? rank_key(x, uint32_t(id)) : kNaN;
  }
  const RankKey best = block_topk(key, kTopkMost);
  if (threadIdx.x < kLanes) v.keys[(row * v.chunks + blockIdx.y) * kTopkMost + lane_id()] = best;
}

// A row that keeps few ids, of its chunks' keys.
__device__ inline void few_probs(const ProbsView& v, int64_t row) {
  __shared__ Few few;
  const int64_t count = v.chunks * kTopkMost;
  RankKey key[kTopkPerThread];
#pragma unroll
  for (int j = 0; j < kTopkPerThread; ++j) {
    const int64_t at = int64_t(threadIdx.x) + j * kTopkThreads;
    key[j] = at < count ? v.keys[row * count + at] : kNoKey;
  }
  const RankKey best = block_topk(key, kTopkMost);
  if (threadIdx.x < kLanes) few.take(best, int(v.top_k[row]), v.temperature[row]);
  __syncthreads();
  float* out = v.out + row * v.vocab;
  if (few.count == 0) {  // a logit that the CPU refuses, or none above -inf
    for (int64_t i = threadIdx.x; i < v.vocab; i += kRowThreads) out[i] = no_answer();
    return;
  }
  float* sums = v.sums + row * ceil_div<int64_t>(v.vocab, kLeaf);
  few.normalise(v.vocab, sums);
  if (v.top_p[row] < 1.f) {
    if (threadIdx.x < kLanes) few.keep(mass_target(v.top_p[row]));
    __syncthreads();
    few.normalise(v.vocab, sums);
  }
  if (int(threadIdx.x) < few.count) out[few.id[threadIdx.x]] = few.p[threadIdx.x];
}

__global__ void __launch_bounds__(kRowThreads) sampling_probs(ProbsView v) {
  start();
  __shared__ RowShared s;
  const int64_t r = blockIdx.x;
  if (keeps_few(v, r)) return few_probs(v, r);
  row_probs(s, v.logits + r * v.vocab, v.vocab, v.temperature[r], v.top_k[r], v.top_p[r],
            v.out + r * v.vocab, v.sums + r * ceil_div<int64_t>(v.vocab, kLeaf));
}

// A warp per leaf along blockIdx.y.
__device__ inline int64_t leaf_id() {
  return (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) / kLanes;
}

// Block (row, leaves): their sums.
__global__ void categorical_leaves(const float* probs, int64_t vocab, float* sums) {
  start();
  const int64_t row = blockIdx.x, leaf = leaf_id(), leaves = ceil_div<int64_t>(vocab, kLeaf);
  const float* p = probs + row * vocab;
  if (leaf < leaves)
    checked_leaf([p](int64_t i) { return p[i]; }, vocab, leaf, sums + row * leaves);
}

__global__ void __launch_bounds__(kRowThreads) categorical(const float* probs,    // [rows, vocab]
                                                           const float* uniform,  // [rows]
                                                           int64_t vocab, int64_t* out,
                                                           const float* sums) {  // [rows, leaves]
  start();
  __shared__ RowShared s;
  const int64_t r = blockIdx.x;
  const float* p = probs + r * vocab;
  const int64_t id = draw_checked(
      s, [p](int64_t i) { return p[i]; }, vocab, uniform[r],
      sums + r * ceil_div<int64_t>(vocab, kLeaf));
  if (threadIdx.x == 0) out[r] = id < 0 ? kNoToken : id;
}

struct AcceptArguments {
  const int64_t* draft;        // [sequences, tokens]
  const int32_t* offered;      // [sequences]
  const float* probs;          // [sequences, tokens + 1, vocab]
  const int64_t* q_ids;        // [sequences, tokens, candidates] or null
  const float* q;              // [sequences, tokens, candidates or vocab] or null
  const float* uniform;        // [sequences, tokens]
  const float* bonus_uniform;  // [sequences, tokens + 1]
  int64_t tokens, vocab, candidates;
  float* sums;      // [sequences, leaves]
  int32_t* length;  // [sequences]
  int64_t* next;    // [sequences]
};

// q of one token at id v.
__device__ inline float draft_probability(const int64_t* ids, const float* q, int64_t candidates,
                                          int64_t token, int64_t v) {
  if (!q) return v == token ? 1.f : 0.f;
  if (!ids) return q[v];
  float sum = 0.f;
  for (int64_t k = 0; k < candidates; ++k)
    if (ids[k] == v) sum = sum + q[k];
  return sum;
}

__device__ inline float residual_at(const int64_t* ids, const float* q, int64_t candidates,
                                    int64_t token, int64_t v, float p) {
  if (!q) return v == token ? residual(p, 1.f) : p;
  if (!ids) return residual(p, q[v]);
  for (int64_t k = 0; k < candidates; ++k)
    if (ids[k] == v) p = residual(p, q[k]);
  return p;
}

// Where a sequence's chain ends. Every thread follows it: it is short, and then all know.
struct Chain {
  int32_t accepted;
  bool valid, rejected;
  const float* p;      // of the position behind the accepted ones
  const int64_t* ids;  // of its q, where it was rejected
  const float* q;
  int64_t token;
};

__device__ inline Chain follow(const AcceptArguments& a, int64_t n) {
  const int64_t* draft = a.draft + n * a.tokens;
  const float* probs = a.probs + n * (a.tokens + 1) * a.vocab;
  const float* u = a.uniform + n * a.tokens;
  const int32_t offered = a.offered[n];
  Chain c = {0, offered >= 0 && offered <= a.tokens, false, probs, nullptr, nullptr, kNoToken};
  int32_t& i = c.accepted;
  for (; c.valid && i < offered && draft[i] != -1; ++i) {
    c.valid = draft[i] >= 0 && draft[i] < a.vocab && u[i] >= 0.f && u[i] < 1.f;
    if (!c.valid) break;
    const int64_t at = (n * a.tokens + i) * a.candidates;
    c.token = draft[i];
    c.ids = a.q_ids ? a.q_ids + at : nullptr;
    c.q = a.q ? a.q + at : nullptr;
    const float q = draft_probability(c.ids, c.q, a.candidates, c.token, c.token);
    c.rejected = !accepts(u[i], q, probs[i * a.vocab + c.token]);
    if (c.rejected) break;
  }
  c.p = probs + i * a.vocab;
  return c;
}

// What is drawn from: the residual of a rejected token, or the target's own distribution.
__device__ inline float drawn_from(const AcceptArguments& a, const Chain& c, int64_t v) {
  return c.rejected ? residual_at(c.ids, c.q, a.candidates, c.token, v, c.p[v]) : c.p[v];
}

// Block (sequence, leaves): their sums.
__global__ void accept_leaves(AcceptArguments a) {
  start();
  const int64_t n = blockIdx.x, leaf = leaf_id(), leaves = ceil_div<int64_t>(a.vocab, kLeaf);
  const Chain c = follow(a, n);
  if (c.valid && leaf < leaves)
    checked_leaf([&](int64_t v) { return drawn_from(a, c, v); }, a.vocab, leaf,
                 a.sums + n * leaves);
}

__global__ void __launch_bounds__(kRowThreads) accept(AcceptArguments a) {
  start();
  __shared__ RowShared s;
  const int64_t n = blockIdx.x;
  float* sums = a.sums + n * ceil_div<int64_t>(a.vocab, kLeaf);
  const Chain c = follow(a, n);
  const float bonus = a.bonus_uniform[n * (a.tokens + 1) + c.accepted];
  int64_t next = kNoToken;
  if (c.valid)
    next = draw_checked(s, [&](int64_t v) { return drawn_from(a, c, v); }, a.vocab, bonus, sums);
  if (next == kNoMass && c.rejected)  // nothing is left of the residual
    next = draw(s, [&](int64_t v) { return c.p[v]; }, a.vocab, bonus, sums);
  if (threadIdx.x == 0) {
    a.length[n] = c.accepted;
    a.next[n] = next < 0 ? kNoToken : next;
  }
}

__global__ void accept_greedy(const int64_t* draft,       // [sequences, tokens]
                              const int32_t* offered,     // [sequences]
                              const int64_t* target_ids,  // [sequences, tokens + 1]
                              int64_t sequences, int64_t tokens, int32_t* length, int64_t* next) {
  start();
  const int64_t n = warp_id();
  if (n >= sequences) return;
  const int32_t count = offered[n];
  const bool valid = count >= 0 && count <= tokens;
  const int64_t* proposed = draft + n * tokens;
  const int64_t* target = target_ids + n * (tokens + 1);
  // core/accept.h's accepted_prefix(), 32 tokens at a time
  int32_t accepted = 0;
  int64_t following = kNoToken;
  for (int32_t base = 0; valid && base <= count; base += kLanes) {
    const int32_t i = base + lane_id();
    const int64_t wanted = i <= count ? target[i] : kNoToken;
    const bool ends = i >= count || proposed[i] < 0 || proposed[i] != wanted;
    const int end = first_lane(ends);
    if (end == kLanes) continue;
    accepted = base + end;
    following = from_lane(wanted, end);
    break;
  }
  if (lane_id() != 0) return;
  length[n] = accepted;
  next[n] = valid && following >= 0 ? following : kNoToken;
}

}  // namespace dflash::gpu
