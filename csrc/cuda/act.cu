#include "cuda/act.cuh"

#include <torch/csrc/stable/library.h>

#include "gpu/quant_act.cuh"

namespace dflash::cuda {

void to_activations(const FloatRows& x, int64_t rows, int64_t columns, int64_t act_mode,
                    Tensor& out) {
  if (rows == 0) return;
  if (act_mode == 0) {
    const Launch launch(out, rows * columns);
    launch_pdl(gpu::to_float32, launch.grid, launch.threads, 0, launch.stream, x,
               out.mutable_data_ptr<float>(), rows, columns);
  } else {
    const Launch launch(out, rows * ceil_div<int64_t>(columns, kActGroup) * kLanes);
    gpu::with_gpu_group(act_mode, [&]<class Group>() {
      launch_pdl(gpu::quant_act<Group>, launch.grid, launch.threads, 0, launch.stream, x,
                 static_cast<Group*>(out.mutable_data_ptr()), rows, columns);
    });
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor quant_act(const Tensor& x, int64_t act_mode) {
  QuantActPlan plan = plan_quant_act(x, act_mode);
  to_activations({x.const_data_ptr(), plan.row_stride, float_type(x)}, plan.rows, plan.columns,
                 act_mode, plan.out);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("quant_act", TORCH_BOX(&quant_act));
}

}  // namespace dflash::cuda
