// Lossless acceptance of draft tokens (speculative sampling, arXiv:2211.17192).
#pragma once
#include "core/numeric.h"

namespace dflash {

// Strict, so that a token of target probability 0 is never accepted.
DFLASH_HD bool accepts(float u, float q, float p) {
  return mul(u, q) < p;
}

// What the rejected position is drawn from, up to its sum. A NaN stays one: the draw reports it.
DFLASH_HD float residual(float p, float q) {
  const float r = p - q;
  return r < 0.f ? 0.f : r;
}

// Greedy: how many leading draft tokens the target would have chosen itself. An id of -1 (no token,
// or no valid arg max) matches nothing.
DFLASH_HD int32_t accepted_prefix(const int64_t* draft,   // [>= offered]
                                  const int64_t* target,  // [> offered]
                                  int32_t offered) {
  int32_t n = 0;
  while (n < offered && draft[n] >= 0 && draft[n] == target[n]) ++n;
  return n;
}

}  // namespace dflash
