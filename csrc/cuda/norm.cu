#include "gpu/norm.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/act.cuh"
#include "host/norm.h"

namespace dflash::cuda {

Tensor add_rms_norm(const OptionalTensor& x, const Tensor& residual, const Tensor& weight,
                    double eps, bool plus_one, int64_t act_mode, const OptionalTensor& capture) {
  NormPlan plan = plan_add_rms_norm(x, residual, weight, eps, plus_one, act_mode, capture);
  NormArgs& args = plan.args;
  if (args.rows == 0) return plan.out;
  Tensor floats = float_rows_of(plan.out, args.rows, args.columns, act_mode);
  args.out = floats.mutable_data_ptr<float>();
  const Launch launch(residual, args.rows * kLanes);
  with_type(args.residual_type, [&]<class R>() {
    gpu::add_rms_norm<R><<<launch.grid, launch.threads, 0, launch.stream>>>(args);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_activations(floats, args.rows, args.columns, act_mode, plan.out);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
}

}  // namespace dflash::cuda
