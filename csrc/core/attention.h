// Attention over pieces of the keys, and how pieces are put together.
//
// A chunk is 256 keys at absolute positions 256 c ..; four chunks are a span. Each chunk gives
// m = max of its scores, l = sum of p = exp(score - m), o = sum of p * v. Chunks are merged
// ascending within their span, spans ascending, a sink last; a piece without a visible key does not
// exist. So the order depends on positions alone: not on rows, threads, pages or capacity.
#pragma once
#include "core/numeric.h"

namespace dflash {

constexpr int kChunkKeys = 256, kSpanChunks = 4, kSpanKeys = kChunkKeys * kSpanChunks;

// Merging piece b after piece a: x = merge_value(x_a, a, x_b, b) for l and every element of o.
struct MergeWeights {
  float m, a, b;
};

DFLASH_HD MergeWeights merge_weights(float m_a, float m_b) {
  const float m = select(m_b > m_a, m_b, m_a);
  return {m, exp(m_a - m), exp(m_b - m)};
}

DFLASH_HD float merge_value(float x_a, float a, float x_b, float b) {
  return fma(x_b, b, mul(x_a, a));
}

DFLASH_HD float attention_output(float o, float l, float value_scale) {
  return mul(o / l, value_scale);
}

DFLASH_HD float gated(float output, float gate) {
  return mul(output, sigmoid(gate));
}

}  // namespace dflash
