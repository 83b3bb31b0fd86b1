// The float types of activations, for kernels that know nothing of torch.
#pragma once
#include <cstdint>

namespace dflash::cpu {

enum class FloatType : int32_t { kF32, kF16, kBF16 };

constexpr int64_t bytes_of(FloatType type) {
  return type == FloatType::kF32 ? 4 : 2;
}

}  // namespace dflash::cpu
