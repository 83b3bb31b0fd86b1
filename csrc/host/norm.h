#pragma once
#include <torch/csrc/stable/ops.h>

#include "core/gdn_args.h"
#include "host/act.h"
#include "host/float_rows.h"

namespace dflash {

struct NormPlan {
  NormArgs args;
  Tensor out;  // float32 [rows, columns] or packed
};

inline NormPlan plan_add_rms_norm(const OptionalTensor& x, const Tensor& residual,
                                  const Tensor& weight, double eps, bool plus_one, int64_t act_mode,
                                  const OptionalTensor& capture) {
  constexpr const char* op = "dflash::add_rms_norm";
  check_dim(op, "residual", residual, 2, "[rows, columns]");
  check_dtype(op, "residual", residual, kFloatTypes);
  check_dense(op, "residual", residual);
  const int64_t rows = residual.size(0), columns = residual.size(1);
  STD_TORCH_CHECK(columns > 0, op, ": residual must have columns, got shape ", shape_str(residual));
  check_same_device(op, "weight", weight, residual);
  check_shape(op, "weight", weight, {columns}, "[columns]");
  check_dtype(op, "weight", weight, kFloatTypes);
  check_dense(op, "weight", weight);
  STD_TORCH_CHECK(!overlaps(weight, residual), op,
                  ": weight must not share memory with residual, which the operator writes");
  NormPlan plan{};
  NormArgs& args = plan.args;
  args.rows = rows;
  args.columns = columns;
  if (x) {
    args.x = float_rows(op, "x", *x, "[rows, columns] like residual", rows, columns, residual);
    STD_TORCH_CHECK(!overlaps(weight, *x), op, ": weight must not share memory with x");
    STD_TORCH_CHECK(!overlaps(*x, residual), op,
                    ": x must not share memory with residual, which the operator writes");
  }
  if (capture) {
    float_rows(op, "capture", *capture, "[rows, columns] like residual", rows, columns, residual);
    check_dtype(op, "capture", *capture, {residual.scalar_type()});
    for (const Tensor* other : {&residual, &weight, x ? &*x : &weight})
      STD_TORCH_CHECK(!overlaps(*capture, *other), op,
                      ": capture must share memory with no other argument");
    args.capture = capture->mutable_data_ptr();
    args.capture_stride = capture->stride(0);
  }
  args.residual = residual.mutable_data_ptr();
  args.residual_type = float_type(residual);
  args.weight = weight.const_data_ptr();
  args.weight_type = float_type(weight);
  args.eps = float(eps);
  args.plus_one = plus_one;
  args.act_mode = act_mode;
  plan.out = new_activations(op, residual, rows, columns, act_mode);
  if (act_mode == 0)
    args.out = plan.out.mutable_data_ptr<float>();
  else
    args.packed = static_cast<uint8_t*>(plan.out.mutable_data_ptr());
  return plan;
}

}  // namespace dflash
