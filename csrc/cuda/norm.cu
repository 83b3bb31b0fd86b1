#include "gpu/norm.cuh"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cuda/act.cuh"
#include "host/norm.h"

namespace dflash::cuda {
namespace {

// The row's width and layout decide, never how many rows there are.
bool in_leaves(const NormArgs& args) {
  return args.columns % 4 == 0 && args.columns <= int64_t(gpu::kMostLeaves) * kLeaf &&
         in_fours(args.x) && in_fours({args.residual, 0, args.residual_type}) &&
         in_fours({args.capture, args.capture_stride, args.residual_type}) &&
         in_fours({args.weight, 0, args.weight_type});
}

}  // namespace

Tensor add_rms_norm(const OptionalTensor& x, const Tensor& residual, const Tensor& weight,
                    double eps, bool plus_one, int64_t act_mode, const OptionalTensor& capture) {
  NormPlan plan = plan_add_rms_norm(x, residual, weight, eps, plus_one, act_mode, capture);
  NormArgs& args = plan.args;
  if (args.rows == 0) return plan.out;
  const Launch launch(residual, args.rows * kLanes);
  if (in_leaves(args)) {
    const int64_t leaves = ceil_div<int64_t>(args.columns, kLeaf);
    const unsigned threads = unsigned(std::min<int64_t>(leaves, gpu::kNormWarps)) * kLanes;
    with_type(args.residual_type, [&]<class R>() {
      const auto kernel = leaves <= gpu::kNormWarps ? gpu::add_rms_norm_leaves<R, true>
                                                    : gpu::add_rms_norm_leaves<R, false>;
      launch_pdl(kernel, unsigned(args.rows), threads, 0, launch.stream, args);
    });
    return plan.out;
  }
  Tensor floats = float_rows_of(plan.out, args.rows, args.columns, act_mode);
  args.out = floats.mutable_data_ptr<float>();
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
