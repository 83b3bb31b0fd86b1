#include "gpu/conv.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.cuh"
#include "host/conv.h"

namespace dflash::cuda {

Tensor ssm_conv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                     const OptionalTensor& bias, bool silu, const Tensor& slots,
                     const OptionalTensor& num_accepted, const Tensor& cu_seqlens) {
  const ConvPlan plan =
      plan_ssm_conv_step(x, state, weight, bias, silu, slots, num_accepted, cu_seqlens);
  const ConvArgs& args = plan.args;
  if (args.rows == 0 || args.channels == 0) return plan.out;
  const Launch launch(x, args.sequences * args.channels);
  launch.zero(args.out, args.rows * args.channels * int64_t(sizeof(float)));
  if (args.sequences == 0) return plan.out;
  with_type(args.x.type, [&]<class X>() {
    with_type(args.state_type, [&]<class S>() {
      if (args.taps == 4)
        gpu::ssm_conv_step<X, S, 4><<<launch.grid, launch.threads, 0, launch.stream>>>(args);
      else
        gpu::ssm_conv_step<X, S, 0><<<launch.grid, launch.threads, 0, launch.stream>>>(args);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("ssm_conv_step", TORCH_BOX(&ssm_conv_step));
}

}  // namespace dflash::cuda
