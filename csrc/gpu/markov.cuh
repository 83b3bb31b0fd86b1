// DSpark's chain, slot by slot: w1's row of the token before it, w2 (a matmul in between), and the
// token. What the CPU refuses gives the token -1, whose row is NaN, and so on to the end.
#pragma once
#include "core/draft.h"
#include "core/formats/all.h"
#include "gpu/act.cuh"
#include "gpu/row.cuh"
#include "gpu/topk.cuh"

namespace dflash::gpu {

// Rows of w1, a thread block per sequence.
struct MarkovTable {
  const uint8_t* w1;  // [rows, rank / kElems quants]
  int64_t rows;
  int rank;
  float* embedded;    // [sequences, rank], of the slot that reads them
  ActPlanes* packed;  // the same for a quantized w2, or null
};

struct MarkovSlot {
  const float* base;         // [sequences, slots, vocab]
  float* logits;             // [sequences, vocab]: the bias, then (markov_draw) the logits
  float* sums;               // [sequences, leaves]
  const int64_t* d2t;        // [vocab] or null
  const float* temperature;  // [sequences] or null: greedy
  const float* uniform;      // [sequences, slots]
  int64_t slot, slots, vocab, target_vocab, mask_id, draft_topk;
  float scale;
  int64_t* previous;  // [sequences]
  int64_t* tokens;    // [sequences, slots]
  float* q;           // [sequences, slots, vocab] or null
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

// By a whole thread block.
template <class F>
__device__ void embed_token(const MarkovTable& m, int64_t sequence, int64_t token) {
  const int groups = ceil_div<int>(m.rank, kActGroup);
  const bool known = token >= 0 && token < m.rows;
  const uint8_t* row = m.w1 + (known ? token : 0) * (m.rank / F::kElems) * F::kBytes;
  for (int g = int(threadIdx.x) / kLanes; g < groups; g += int(blockDim.x) / kLanes) {
    float value[kActPerLane];
    for (int i = 0; i < kActPerLane; ++i) {
      const int r = g * kActGroup + lane_id() * kActPerLane + i;
      value[i] = 0.f;
      if (r >= m.rank) continue;
      value[i] = known ? decode<F>(row + r / F::kElems * F::kBytes, r % F::kElems) : no_answer();
      m.embedded[sequence * m.rank + r] = value[i];
    }
    if (m.packed) quantize_group(value, m.packed + sequence * groups + g);
  }
}

template <class F>
__global__ void markov_embed(MarkovTable table, const int64_t* tokens) {  // [sequences]
  start();
  embed_token<F>(table, blockIdx.x, tokens[blockIdx.x]);
}

__global__ void markov_features(MarkovJoint m) {
  start();
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
  start();
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

// What a slot's token is called in the target's vocabulary.
__device__ inline int64_t markov_token(const MarkovSlot& m, int64_t chosen) {
  int64_t token = kNoToken;
  if (chosen >= 0) token = m.d2t ? m.d2t[chosen] : chosen;
  return token < 0 || token >= m.target_vocab ? kNoToken : token;
}

__device__ inline bool is_mask(const MarkovSlot& m, int64_t v) {
  return m.mask_id >= 0 && (m.d2t ? m.d2t[v] : v) == m.mask_id;
}

// This thread's best logit of a chunk; kNaN for one that the CPU refuses.
__device__ inline RankKey best_of_chunk(const MarkovSlot& m, int64_t sequence, int64_t chunk) {
  const float infinity = bit_cast<float>(0x7f800000u);
  const float* base = m.base + (sequence * m.slots + m.slot) * m.vocab;
  const float* bias = m.logits + sequence * m.vocab;
  RankKey best = kNoKey;
#pragma unroll
  for (int j = 0; j < kTopkPerThread; ++j) {
    const int64_t v = chunk * kTopkChunk + j * kTopkThreads + threadIdx.x;
    if (v >= m.vocab) continue;
    const float x = is_mask(m, v) ? -infinity : markov_logit(base[v], m.scale, bias[v]);
    const RankKey key = x < infinity ? rank_key(x, uint32_t(v)) : kNaN;
    best = key > best ? key : best;
  }
  return best;
}

// Greedy, first stage, block (sequence, chunk): the best of a chunk to keys [sequences, chunks].
__global__ void __launch_bounds__(kTopkThreads) markov_best(MarkovSlot m, RankKey* keys) {
  start();
  const RankKey best = block_best(best_of_chunk(m, blockIdx.x, blockIdx.y));
  if (threadIdx.x == 0) keys[int64_t(blockIdx.x) * gridDim.y + blockIdx.y] = best;
}

// Second stage, a thread block per sequence: the token, and its row of w1 for the next slot. Of a
// vocabulary of one chunk (keys null) it is the only stage.
template <class F>
__global__ void __launch_bounds__(kTopkThreads)
    markov_next(MarkovSlot m, const RankKey* keys, int64_t chunks, MarkovTable table) {
  start();
  const int64_t sequence = blockIdx.x;
  RankKey best = kNoKey;
  if (!keys) best = best_of_chunk(m, sequence, 0);
  for (int64_t c = threadIdx.x; keys && c < chunks; c += kTopkThreads) {
    const RankKey key = keys[sequence * chunks + c];
    best = key > best ? key : best;
  }
  best = block_best(best);
  const bool none = best == kNaN || rank_value(best) == bit_cast<float>(0xff800000u);
  const int64_t token = markov_token(m, none ? kNoToken : int64_t(rank_id(best)));
  if (threadIdx.x == 0) m.tokens[sequence * m.slots + m.slot] = token;
  if (m.slot + 1 < m.slots) embed_token<F>(table, sequence, token);
}

// Sampled, or greedy among the largest of base, a thread block per sequence.
__global__ void __launch_bounds__(kRowThreads) markov_draw(MarkovSlot m) {
  start();
  __shared__ RowShared s;
  const int64_t sequence = blockIdx.x, slot = sequence * m.slots + m.slot, V = m.vocab;
  const float* base = m.base + slot * V;
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
  for (int64_t v = threadIdx.x; v < V; v += kRowThreads)
    if (is_mask(m, v)) logits[v] = never;
  __syncthreads();

  int64_t chosen = kNoToken;
  if (m.q) {
    const float t = m.temperature[sequence];
    float* q = m.q + slot * V;
    if (row_probs(s, logits, V, t, 0, 1.f, q, sums))
      chosen = t == 0.f ? first_equal(s, q, V, 1.f)
                        : draw(s, [q](int64_t v) { return q[v]; }, V, m.uniform[slot], sums);
  } else {
    chosen = first_largest(s, logits, V);
  }
  if (threadIdx.x != 0) return;
  const int64_t token = markov_token(m, chosen);
  m.previous[sequence] = token;
  m.tokens[slot] = token;
}

// The confidence head, a thread block per slot of a sequence, a warp per leaf of the dot.
__global__ void markov_confidence(const float* hidden,    // [sequences, slots, hidden]
                                  const float* embedded,  // [slots, sequences, rank]
                                  const float* weight,    // [inputs]: hidden, then rank or nothing
                                  const float* bias,      // [1] or null
                                  int64_t sequences, int64_t slots, int64_t hidden_size,
                                  int64_t rank, int64_t inputs,
                                  float* confidences) {  // [sequences, slots]
  start();
  __shared__ float leaf[kLanes];
  const int64_t at = blockIdx.x, sequence = at / slots, slot = at % slots;
  const float* h = hidden + at * hidden_size;
  const float* e = embedded + (slot * sequences + sequence) * rank;
  const int warp = int(threadIdx.x) / kLanes, warps = int(blockDim.x) / kLanes;
  Tree<float> tree;
  for (int64_t first = 0; first < inputs; first += warps * kLeaf) {
    const int64_t begin = first + warp * kLeaf, left = inputs - begin;
    const float sum = warp_dot(
        left < kLeaf ? left : kLeaf,
        [&](int64_t i) {
          const int64_t n = begin + i;
          return n < hidden_size ? h[n] : e[n - hidden_size];
        },
        [&](int64_t i) { return weight[begin + i]; });
    if (lane_id() == 0) leaf[warp] = sum;
    __syncthreads();
    for (int w = 0; threadIdx.x == 0 && w < warps && first + w * kLeaf < inputs; ++w)
      tree.push(leaf[w]);
    __syncthreads();
  }
  if (threadIdx.x == 0)
    confidences[at] = confidence(inputs > 0 ? tree.join() : 0.f, bias ? *bias : 0.f);
}

}  // namespace dflash::gpu
