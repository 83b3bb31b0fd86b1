// RMSNorm, plain and gated. The sum of squares is reduce.h's dot(x, x).
#pragma once
#include "core/numeric.h"

namespace dflash {

DFLASH_HD float rms_scale(float square_sum, int64_t count, float eps) {
  return rsqrt(square_sum / float(count) + eps);
}

// `weight` already has the 1 that some checkpoints leave out.
DFLASH_HD float normed(float x, float scale, float weight) {
  return mul(mul(x, scale), weight);
}

// sigmoid(z) or silu(z), which differ in the numerator.
DFLASH_HD float output_gate(float z, bool sigmoid_gate) {
  return (sigmoid_gate ? 1.f : z) / (1.f + exp(-z));
}

}  // namespace dflash
