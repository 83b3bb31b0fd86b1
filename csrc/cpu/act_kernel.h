#pragma once
#include "core/float_type.h"

namespace dflash::cpu {

struct QuantActCall {
  const uint8_t* x;  // [rows, columns] of `type`, row stride row_bytes
  FloatType type;
  int64_t rows, columns, row_bytes, act_mode;
  uint8_t* out;  // [rows, act_bytes]
};

namespace avx2 {
void quant_act(const QuantActCall& c);
void to_float32(const QuantActCall& c);
}  // namespace avx2
namespace avx512 {
void quant_act(const QuantActCall& c);
void to_float32(const QuantActCall& c);
}  // namespace avx512

}  // namespace dflash::cpu
