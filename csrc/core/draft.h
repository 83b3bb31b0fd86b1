// Formulas of the drafters' own operators (DFlash2's convolution and selector, DSpark's chain).
#pragma once
#include "core/numeric.h"

namespace dflash {

// Grouped dynamic convolution along the rows of one block, at channel c of group c / (H / groups):
//   y_i = sum over t ascending of (base[t] + coef_i[t]) x_{i-t},  from 0, rows before the block out
// One tap of it:
DFLASH_HD float conv_tap(float base, float coef, float x, float sum) {
  return fma(base + coef, x, sum);
}

// Candidate selector: the predecessor's row meets the block's hidden row once, then each candidate.
//   score_c + dot(predecessor * hidden, successor_c)
DFLASH_HD float edge_score(float score, float compatibility) {
  return score + compatibility;
}

// Markov chain: logits of a slot given the token before it; the scale is that of the head too.
DFLASH_HD float markov_logit(float base, float logit_scale, float bias) {
  return mul(logit_scale, base + bias);
}

// Markov heads other than the vanilla one mix the token's row e with the hidden row h first; what
// they give takes e's place before w2. kGated: e through a gate, sigmoid(G [h; e] + b) * e.
// kRnn: (gate, candidate, out) = J [state; e; h] + b, and tanh(out), with a state that starts at 0.
enum class MarkovHead : int32_t { kVanilla, kGated, kRnn };

DFLASH_HD float gated_row(float gate, float e) {
  return mul(sigmoid(gate), e);
}

DFLASH_HD float rnn_state(float gate, float candidate, float state) {
  const float g = sigmoid(gate);
  return fma(g, state, mul(1.f - g, tanh(candidate)));
}

DFLASH_HD float rnn_row(float out) {
  return tanh(out);
}

// P(the slot's token is accepted, all before it accepted), from a dot over [hidden; w1 row].
DFLASH_HD float confidence(float dot, float bias) {
  return sigmoid(dot + bias);
}

}  // namespace dflash
