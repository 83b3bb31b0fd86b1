// Sampling and acceptance: a thread block per row or sequence. What the CPU reports as an error
// becomes NaN, or the token -1: the host must not read values in a captured step.
#pragma once
#include "core/accept.h"
#include "core/random.h"
#include "gpu/row.cuh"

namespace dflash::gpu {

__global__ void uniform_kernel(const int64_t* seeds, const int64_t* positions, int stream,
                               float* out, int64_t count) {
  start();
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n < count) out[n] = uniform(seeds[n], positions[n], stream);
}

__global__ void __launch_bounds__(kRowThreads)
    sampling_probs(const float* logits,        // [rows, vocab]
                   const float* temperature,   // [rows]
                   const int64_t* top_k,       // [rows]
                   const float* top_p,         // [rows]
                   int64_t vocab, float* out,  // [rows, vocab]
                   float* sums) {              // [rows, leaves]
  start();
  __shared__ RowShared s;
  const int64_t r = blockIdx.x;
  row_probs(s, logits + r * vocab, vocab, temperature[r], top_k[r], top_p[r], out + r * vocab,
            sums + r * ceil_div<int64_t>(vocab, kLeaf));
}

__global__ void __launch_bounds__(kRowThreads)
    categorical(const float* probs,    // [rows, vocab]
                const float* uniform,  // [rows]
                int64_t vocab, int64_t* out, float* sums) {
  start();
  __shared__ RowShared s;
  const int64_t r = blockIdx.x;
  const float* p = probs + r * vocab;
  const int64_t id = draw(
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

__global__ void __launch_bounds__(kRowThreads) accept(AcceptArguments a) {
  start();
  __shared__ RowShared s;
  const int64_t n = blockIdx.x;
  const int64_t* draft = a.draft + n * a.tokens;
  const float* probs = a.probs + n * (a.tokens + 1) * a.vocab;
  const float* u = a.uniform + n * a.tokens;
  const int64_t q_row = n * a.tokens;
  float* sums = a.sums + n * ceil_div<int64_t>(a.vocab, kLeaf);
  const int32_t offered = a.offered[n];
  bool valid = offered >= 0 && offered <= a.tokens;
  // every thread follows the chain: it is short, and then all know where it ended
  int32_t i = 0;
  bool rejected = false;
  for (; valid && i < offered && draft[i] != -1; ++i) {
    valid = draft[i] >= 0 && draft[i] < a.vocab && u[i] >= 0.f && u[i] < 1.f;
    if (!valid) break;
    const int64_t at = (q_row + i) * a.candidates;
    const float q = draft_probability(a.q_ids ? a.q_ids + at : nullptr, a.q ? a.q + at : nullptr,
                                      a.candidates, draft[i], draft[i]);
    if (!accepts(u[i], q, probs[i * a.vocab + draft[i]])) {
      rejected = true;
      break;
    }
  }
  int64_t next = valid ? kNoMass : kNoToken;
  const float* p = probs + i * a.vocab;
  const float bonus = a.bonus_uniform[n * (a.tokens + 1) + i];
  if (rejected) {
    const int64_t at = (q_row + i) * a.candidates;
    const int64_t* ids = a.q_ids ? a.q_ids + at : nullptr;
    const float* q = a.q ? a.q + at : nullptr;
    next = draw(
        s, [&](int64_t v) { return residual_at(ids, q, a.candidates, draft[i], v, p[v]); }, a.vocab,
        bonus, sums);
  }
  if (next == kNoMass) next = draw(s, [p](int64_t v) { return p[v]; }, a.vocab, bonus, sums);
  if (threadIdx.x == 0) {
    a.length[n] = i;
    a.next[n] = next < 0 ? kNoToken : next;
  }
}

__global__ void accept_greedy(const int64_t* draft,       // [sequences, tokens]
                              const int32_t* offered,     // [sequences]
                              const int64_t* target_ids,  // [sequences, tokens + 1]
                              int64_t sequences, int64_t tokens, int32_t* length, int64_t* next) {
  start();
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= sequences) return;
  const bool valid = offered[n] >= 0 && offered[n] <= tokens;
  const int64_t* target = target_ids + n * (tokens + 1);
  const int32_t accepted = valid ? accepted_prefix(draft + n * tokens, target, offered[n]) : 0;
  length[n] = accepted;
  next[n] = valid && target[accepted] >= 0 ? target[accepted] : kNoToken;
}

}  // namespace dflash::gpu
