// Causal depthwise convolution: y = sum over taps, oldest first, of weight * value.
//
// Include it in a kernel after the vectors are declared: F is a float or a vector of floats whose
// fma() is found by its type.
#pragma once
#include "core/numeric.h"

namespace dflash {

template <class F>
DFLASH_HD F conv_tap(F sum, F weight, F value) {
  return fma(weight, value, sum);
}

}  // namespace dflash
