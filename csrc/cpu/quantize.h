// What csrc/cpu/quantize.cpp hands to the kernels of quantize.inl. Free of torch.
#pragma once
#include "core/float_type.h"

namespace dflash::cpu {

struct QuantizeCall {
  const uint8_t* x;  // [rows, columns] of `x_type`, row stride row_bytes
  FloatType x_type;
  int64_t rows, columns, row_bytes;
  int64_t type;   // ggml type id, one of core/formats/quantized.def
  float largest;  // magnitude that type can store
  uint8_t* out;   // [rows, bytes of columns]
};

// Returns the lowest row that holds NaN, infinity or too large a magnitude; `rows` if none does.
namespace avx2 {
int64_t quantize(const QuantizeCall& c);
}
namespace avx512 {
int64_t quantize(const QuantizeCall& c);
}

}  // namespace dflash::cpu
