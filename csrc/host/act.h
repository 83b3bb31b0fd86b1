#pragma once
#include <torch/csrc/stable/ops.h>

#include "core/act.h"
#include "host/check.h"
#include "host/dispatch.h"

namespace dflash {

// Bytes of one row of activations.
inline int64_t act_bytes(const char* op, int64_t columns, int64_t act_mode) {
  STD_TORCH_CHECK(columns > 0 && columns <= kMostValues, op, ": columns must be 1 to 2^48, got ",
                  columns);
  STD_TORCH_CHECK(act_mode == 0 || act_mode == kActPlanes || act_mode == kActQ8_1, op,
                  ": act_mode must be 0 (float32), 1 (two int8 planes) or 2 (Q8_1), got ",
                  act_mode);
  return act_mode == 0 ? columns * 4 : packed_bytes(columns, act_mode);
}

// The dtype says what activations are: rows of one mode may be as wide as those of another with
// more columns.
constexpr std::initializer_list<ScalarType> kActTypes = {ScalarType::Float, ScalarType::Byte,
                                                         ScalarType::Char};

inline int64_t act_mode_of(const Tensor& x) {
  return x.scalar_type() == ScalarType::Byte   ? kActPlanes
         : x.scalar_type() == ScalarType::Char ? kActQ8_1
                                               : 0;
}

// The output of an operator that emits activations: float32 [rows, columns], planes as uint8 or
// Q8_1 as int8 [rows, act_bytes].
inline Tensor new_activations(const char* op, const Tensor& like, int64_t rows, int64_t columns,
                              int64_t act_mode) {
  const int64_t bytes = act_bytes(op, columns, act_mode);
  return act_mode == 0 ? new_empty(like, {rows, columns}, ScalarType::Float)
                       : new_empty(like, {rows, bytes}, kActTypes.begin()[act_mode]);
}

struct QuantActPlan {
  int64_t rows, columns, row_stride;
  Tensor out;  // as new_activations() makes it
};

inline QuantActPlan plan_quant_act(const Tensor& x, int64_t act_mode) {
  constexpr const char* op = "dflash::quant_act";
  check_dim(op, "x", x, 2, "[rows, columns]");
  check_dtype(op, "x", x, kFloatTypes);
  STD_TORCH_CHECK(x.size(1) > 0, op, ": x must have at least one column, got shape ", shape_str(x));
  STD_TORCH_CHECK(x.stride(1) == 1 || x.size(1) == 1, op,
                  ": rows of x must be dense (last stride 1), got last stride ", x.stride(1));
  return {x.size(0), x.size(1), x.stride(0),
          new_activations(op, x, x.size(0), x.size(1), act_mode)};
}

}  // namespace dflash
