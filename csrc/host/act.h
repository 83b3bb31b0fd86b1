#pragma once
#include <torch/csrc/stable/ops.h>

#include "core/act.h"
#include "host/check.h"
#include "host/dispatch.h"

namespace dflash {

// Bytes of one row of activations.
inline int64_t act_bytes(int64_t columns, int64_t act_mode) {
  constexpr const char* op = "dflash::act_bytes";
  STD_TORCH_CHECK(columns > 0, op, ": columns must be positive, got ", columns);
  STD_TORCH_CHECK(act_mode != kActQ8_1, op,
                  ": act_mode 2 (Q8_1) is not built; use 1 (two int8 planes)");
  STD_TORCH_CHECK(act_mode == 0 || act_mode == kActPlanes, op,
                  ": act_mode must be 0 (float32) or 1 (two int8 planes), got ", act_mode);
  return act_mode == 0 ? columns * 4
                       : ceil_div<int64_t>(columns, kActGroup) * int64_t(sizeof(ActGroup));
}

// The output of an operator that emits activations: float32 [rows, columns] or uint8 packed rows.
inline Tensor new_activations(const Tensor& like, int64_t rows, int64_t columns, int64_t act_mode) {
  const int64_t bytes = act_bytes(columns, act_mode);
  return act_mode == 0 ? new_empty(like, {rows, columns}, ScalarType::Float)
                       : new_empty(like, {rows, bytes}, ScalarType::Byte);
}

struct QuantActPlan {
  int64_t rows, columns, row_stride;
  Tensor out;  // [rows, act_bytes] or float32 [rows, columns]
};

inline QuantActPlan plan_quant_act(const Tensor& x, int64_t act_mode) {
  constexpr const char* op = "dflash::quant_act";
  check_dim(op, "x", x, 2, "[rows, columns]");
  check_dtype(op, "x", x, kFloatTypes);
  STD_TORCH_CHECK(x.size(1) > 0, op, ": x must have at least one column, got shape ", shape_str(x));
  STD_TORCH_CHECK(x.stride(1) == 1 || x.size(1) == 1, op,
                  ": rows of x must be dense (last stride 1), got last stride ", x.stride(1));
  return {x.size(0), x.size(1), x.stride(0), new_activations(x, x.size(0), x.size(1), act_mode)};
}

}  // namespace dflash
