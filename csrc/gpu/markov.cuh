// One slot of DSpark's chain, a thread block per sequence: the token, and what the next slot and
// the confidence head need. What the CPU refuses gives the token -1 and ends the sequence.
#pragma once
#include "core/draft.h"
#include "gpu/row.cuh"

namespace dflash::gpu {

struct MarkovSlot {
  const float* base;         // [sequences, slots, vocab]
  const float* hidden;       // [sequences, slots, hidden]
  const float* embedded;     // [sequences, rank]: w1's row of the token before
  float* logits;             // [sequences, vocab]: the bias, then the logits
  float* sums;               // [sequences, leaves]
  const float* head;         // [inputs] or null
  const float* head_bias;    // [1] or null
  const int64_t* d2t;        // [vocab] or null
  const float* temperature;  // [sequences] or null: greedy
  const float* uniform;      // [sequences, slots]
  int64_t slot, slots, vocab, hidden_size, rank, inputs, target_vocab, mask_id, draft_topk;
  float scale;
  int64_t* previous;  // [sequences]
  int64_t* tokens;    // [sequences, slots]
  float* q;           // [sequences, slots, vocab] or null
  float* confidence;  // [sequences, slots]
};

// Gated and recurrent heads, a thread block per sequence: before their matrix, and after it.
struct MarkovJoint {
  MarkovHead head;
  const float* embedded;  // [sequences, rank]: w1's row of the token before
  const float* hidden;    // [sequences, slots, hidden]
  const float* mixed;     // [sequences, rank or 3 rank]: what the matrix gave
  float* features;        // [sequences, hidden + rank or 2 rank]: what it reads
  float* state;           // [sequences, rank], zeros before the first slot; kRnn only
  float* row;             // [sequences, rank]: what w2 reads
  int64_t slot, slots, hidden_size, rank;
};

__global__ void markov_features(MarkovJoint m) {
  const int64_t sequence = blockIdx.x, R = m.rank, H = m.hidden_size;
  const float* e = m.embedded + sequence * R;
  const float* h = m.hidden + (sequence * m.slots + m.slot) * H;
  const bool gated = m.head == MarkovHead::kGated;
  float* to = m.features + sequence * (H + (gated ? R : 2 * R));
  for (int64_t i = threadIdx.x; i < H; i += blockDim.x) to[gated ? i : 2 * R + i] = h[i];
  for (int64_t r = threadIdx.x; r < R; r += blockDim.x) {
    to[gated ? H + r : R + r] = e[r];
    if (!gated) {
      if (m.slot == 0) m.state[sequence * R + r] = 0.f;
      to[r] = m.state[sequence * R + r];
    }
  }
}

__global__ void markov_row(MarkovJoint m) {
  const int64_t sequence = blockIdx.x, R = m.rank;
  const bool gated = m.head == MarkovHead::kGated;
  const float* mixed = m.mixed + sequence * (gated ? R : 3 * R);
  float* state = m.state + sequence * R;
  for (int64_t r = threadIdx.x; r < R; r += blockDim.x) {
    float& out = m.row[sequence * R + r];
    if (gated) {
      out = gated_row(mixed[r], m.embedded[sequence * R + r]);
    } else {
      state[r] = rnn_state(mixed[r], mixed[R + r], state[r]);
      out = rnn_row(mixed[2 * R + r]);
    }
  }
}

// The first largest of a row that may hold -inf; -1 for NaN, +inf, or -inf everywhere.
__device__ inline int64_t first_largest(RowShared& s, const float* x, int64_t n) {
  const float infinity = bit_cast<float>(0x7f800000u);
  bool bad = false;
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) bad = bad || !(x[i] < infinity);
  if (any(s, bad)) return kNoToken;
  const float top = largest(s, x, n);
  return top == -infinity ? kNoToken : first_equal(s, x, n, top);
}

__global__ void __launch_bounds__(kRowThreads) markov_slot(MarkovSlot m) {
  __shared__ RowShared s;
  const int64_t sequence = blockIdx.x, slot = sequence * m.slots + m.slot, V = m.vocab;
  const float* base = m.base + slot * V;
  const float* e = m.embedded + sequence * m.rank;
  float* logits = m.logits + sequence * V;
  float* sums = m.sums + sequence * ceil_div<int64_t>(V, kLeaf);
  const float never = bit_cast<float>(0xff800000u);
  for (int64_t v = threadIdx.x; v < V; v += kRowThreads)
    logits[v] = markov_logit(base[v], m.scale, logits[v]);
  __syncthreads();
  if (m.draft_topk > 0 && m.draft_topk < V)
    keep(
        s, V, uint64_t(m.draft_topk), [base](int64_t i) { return order_key(base[i]); },
        [](int64_t) { return uint64_t(1); }, logits, never);
  for (int64_t v = threadIdx.x; m.mask_id >= 0 && v < V; v += kRowThreads)
    if ((m.d2t ? m.d2t[v] : v) == m.mask_id) logits[v] = never;
  __syncthreads();

  const float t = m.temperature ? m.temperature[sequence] : 0.f;
  int64_t chosen = kNoToken;
  if (m.q) {
    float* q = m.q + slot * V;
    if (row_probs(s, logits, V, t, 0, 1.f, q, sums))
      chosen = t == 0.f ? first_equal(s, q, V, 1.f)
                        : draw(s, [q](int64_t v) { return q[v]; }, V, m.uniform[slot], sums);
  } else {
    chosen = first_largest(s, logits, V);
  }
  if (threadIdx.x < kLanes && m.head) {
    const float* hidden = m.hidden + slot * m.hidden_size;
    const float score = warp_dot(
        m.inputs, [&](int64_t i) { return i < m.hidden_size ? hidden[i] : e[i - m.hidden_size]; },
        [&](int64_t i) { return m.head[i]; });
    if (threadIdx.x == 0) m.confidence[slot] = confidence(score, m.head_bias ? *m.head_bias : 0.f);
  }
  if (threadIdx.x != 0) return;
  int64_t token = kNoToken;
  if (chosen >= 0) token = m.d2t ? m.d2t[chosen] : chosen;
  if (token < 0 || token >= m.target_vocab) token = kNoToken;
  m.previous[sequence] = token;  // -1: the next row of w1 is NaN, and so on to the end
  m.tokens[slot] = token;
}

}  // namespace dflash::gpu
