#include "gpu/conv.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.cuh"
#include "host/conv.h"

namespace dflash::cuda {
namespace {

template <class X, class S, int kTaps, int kWide>
void launch_conv(const ConvArgs& args, cudaStream_t stream) {
  const int64_t blocks =
      args.sequences * ceil_div<int64_t>(args.channels, gpu::kConvVectors * kWide);
  STD_TORCH_CHECK(blocks <= 0x7fffffff, "dflash::ssm_conv_step: ", args.sequences,
                  " sequences exceed one launch");
  launch_pdl(gpu::ssm_conv_step<X, S, kTaps, kWide>, unsigned(blocks), gpu::kConvThreads, 0, stream,
             args);
}

// Whether four channels at a time can be read and written.
bool by_fours(const ConvArgs& args) {
  return args.channels % 4 == 0 && in_fours(args.x) &&
         in_fours({args.state, args.slot_stride, args.state_type}) &&
         in_fours({args.weight, 0, FloatType::kF32}) && in_fours({args.bias, 0, FloatType::kF32});
}

}  // namespace

Tensor ssm_conv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                     const OptionalTensor& bias, bool silu, const Tensor& slots,
                     const OptionalTensor& num_accepted, const Tensor& cu_seqlens) {
  const ConvPlan plan =
      plan_ssm_conv_step(x, state, weight, bias, silu, slots, num_accepted, cu_seqlens);
  const ConvArgs& args = plan.args;
  if (args.rows == 0 || args.channels == 0) return plan.out;
  const Launch launch(x, 0);
  if (args.sequences == 0) {
    launch.zero(args.out, args.rows * args.channels * int64_t(sizeof(float)));
    return plan.out;
  }
  with_type(args.x.type, [&]<class X>() {
    with_type(args.state_type, [&]<class S>() {
      if (args.taps == 4 && by_fours(args))
        launch_conv<X, S, 4, 4>(args, launch.stream);
      else
        launch_conv<X, S, 0, 1>(args, launch.stream);
    });
  });
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("ssm_conv_step", TORCH_BOX(&ssm_conv_step));
}

}  // namespace dflash::cuda
