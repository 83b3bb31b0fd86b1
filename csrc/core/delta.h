// One row of the gated delta rule on one row s of a state [v_dim, k_dim]:
//   u = beta (v - g s.k),  s' = g s + u k,  o = s'.q
// with k and q of unit length, q also divided by sqrt(k_dim). The dots are reduce.h's.
//
// Include it in a kernel after the vectors are declared: F is a float or a vector of floats whose
// fma() and mul() are found by their type.
#pragma once
#include "core/gate.h"
#include "core/numeric.h"

namespace dflash {

DFLASH_HD float decay(float a, float A, float dt_bias) {
  return exp(log_decay(a, A, dt_bias));
}

DFLASH_HD float unit_scale(float square_sum) {
  return rsqrt(square_sum + 1e-6f);
}

DFLASH_HD float unit_key(float k, float scale) {
  return mul(k, scale);
}

// query_scale: 1 / sqrt(k_dim)
DFLASH_HD float unit_query(float q, float scale, float query_scale) {
  return mul(mul(q, scale), query_scale);
}

// The k head that v head h reads: Hugging Face groups v heads by k head, GGUF tiles them.
DFLASH_HD int k_head_of(int h, int k_heads, int v_heads, bool tiled) {
  return tiled ? h % k_heads : h / (v_heads / k_heads);
}

template <class F>
DFLASH_HD F delta_value(F v, F state_dot_key, F minus_decay, F strength) {
  return mul(fma(minus_decay, state_dot_key, v), strength);
}

// Also the whole of a replayed row: no dot, so a journal of (k, u, decay) gives the same bits.
template <class F>
DFLASH_HD F delta_state(F s, F key, F u, F decay) {
  return fma(key, u, mul(decay, s));
}

}  // namespace dflash
