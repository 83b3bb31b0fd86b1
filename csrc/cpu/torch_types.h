// Torch's dtypes as the kernels know them.
#pragma once
#include "cpu/float_type.h"
#include "host/check.h"

namespace dflash::cpu {

// Of a tensor whose dtype was checked to be one of kFloatTypes.
inline FloatType float_type(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return FloatType::kF16;
    case ScalarType::BFloat16:
      return FloatType::kBF16;
    default:
      return FloatType::kF32;
  }
}

}  // namespace dflash::cpu
