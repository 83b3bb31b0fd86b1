#include "gpu/head.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/launch.cuh"
#include "host/head.h"

namespace dflash::cuda {

std::tuple<Tensor, Tensor> head_topk(const Tensor& logits, int64_t k, double multiplier,
                                     double softcap) {
  TopkPlan plan = plan_head_topk(logits, k, multiplier, softcap);
  if (plan.rows == 0) return {plan.values, plan.ids};
  const gpu::TopkView view{logits.const_data_ptr<float>(),
                           plan.vocabulary,
                           plan.k,
                           plan.multiplier,
                           plan.softcap,
                           plan.values.mutable_data_ptr<float>(),
                           plan.ids.mutable_data_ptr<int64_t>()};
  const Launch launch(logits, plan.rows);
  gpu::head_topk<<<unsigned(plan.rows), gpu::kTopkThreads, 0, launch.stream>>>(view);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {plan.values, plan.ids};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("head_topk", TORCH_BOX(&head_topk));
}

}  // namespace dflash::cuda
