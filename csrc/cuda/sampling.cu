#include "gpu/sampling.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.cuh"
#include "host/sampling.h"

namespace dflash::cuda {
namespace {

// A row per blockIdx.x, a warp per leaf along blockIdx.y.
dim3 leaf_grid(int64_t rows, int64_t vocab) {
  const int64_t needed = ceil_div<int64_t>(vocab, kLeaf * (Launch::threads / kLanes));
  const int64_t blocks = needed > 0 ? needed : 1;
  STD_TORCH_CHECK(rows <= 0x7fffffff && blocks <= 65535, "dflash: ", rows, " rows of ", vocab,
                  " probabilities exceed one launch");
  return dim3(unsigned(rows), unsigned(blocks));
}

Tensor leaf_scratch(const Tensor& like, int64_t rows, int64_t vocab) {
  return torch::stable::new_empty(like, {rows, ceil_div<int64_t>(vocab, kLeaf)}, ScalarType::Float);
}

}  // namespace

Tensor uniform(const Tensor& seeds, const Tensor& positions, int64_t stream) {
  UniformPlan plan = plan_uniform(seeds, positions, stream);
  if (plan.count == 0) return plan.out;
  const Launch launch(seeds, plan.count);
  launch_pdl(gpu::uniform_kernel, launch.grid, launch.threads, 0, launch.stream,
             seeds.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), int(stream),
             plan.out.mutable_data_ptr<float>(), plan.count);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return plan.out;
}

Tensor sampling_probs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                      const Tensor& top_p) {
  SamplingProbsPlan plan = plan_sampling_probs(logits, temperature, top_k, top_p);
  if (plan.rows == 0) return plan.out;
  Tensor sums = leaf_scratch(logits, plan.rows, plan.vocab);
  // Which rows keep few ids is only known on the device; all have the room for it.
  const int64_t chunks = ceil_div<int64_t>(plan.vocab, gpu::kTopkChunk);
  const bool few = chunks * gpu::kTopkMost <= gpu::kTopkChunk;
  Tensor keys = torch::stable::new_empty(logits, {plan.rows, few ? chunks : 0, gpu::kTopkMost},
                                         ScalarType::Long);
  const gpu::ProbsView view = {
      logits.const_data_ptr<float>(),
      temperature.const_data_ptr<float>(),
      top_k.const_data_ptr<int64_t>(),
      top_p.const_data_ptr<float>(),
      plan.vocab,
      plan.out.mutable_data_ptr<float>(),
      sums.mutable_data_ptr<float>(),
      few ? static_cast<gpu::RankKey*>(keys.mutable_data_ptr()) : nullptr,
      chunks,
  };
  const Launch launch(logits, plan.rows);
  if (few)
    launch_pdl(gpu::sampling_keys, dim3(unsigned(plan.rows), unsigned(chunks)), gpu::kTopkThreads,
               0, launch.stream, view);
  launch_pdl(gpu::sampling_probs, unsigned(plan.rows), gpu::kRowThreads, 0, launch.stream, view);
  return plan.out;
}

Tensor categorical(const Tensor& probs, const Tensor& uniform) {
  CategoricalPlan plan = plan_categorical(probs, uniform);
  if (plan.rows == 0) return plan.out;
  Tensor sums = leaf_scratch(probs, plan.rows, plan.vocab);
  const Launch launch(probs, plan.rows);
  launch_pdl(gpu::categorical_leaves, leaf_grid(plan.rows, plan.vocab), launch.threads, 0,
             launch.stream, probs.const_data_ptr<float>(), plan.vocab,
             sums.mutable_data_ptr<float>());
  launch_pdl(gpu::categorical, unsigned(plan.rows), gpu::kRowThreads, 0, launch.stream,
             probs.const_data_ptr<float>(), uniform.const_data_ptr<float>(), plan.vocab,
             plan.out.mutable_data_ptr<int64_t>(), sums.mutable_data_ptr<float>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return plan.out;
}

std::tuple<Tensor, Tensor> accept(const Tensor& draft, const Tensor& offered, const Tensor& probs,
                                  std::optional<Tensor> q_ids, std::optional<Tensor> q,
                                  const Tensor& uniform, const Tensor& bonus_uniform) {
  AcceptPlan plan = plan_accept(draft, offered, probs, q_ids, q, uniform, bonus_uniform);
  if (plan.sequences == 0) return {plan.length, plan.next};
  Tensor sums = leaf_scratch(probs, plan.sequences, plan.vocab);
  const Launch launch(draft, plan.sequences);
  const gpu::AcceptArguments arguments = {
      draft.const_data_ptr<int64_t>(),
      offered.const_data_ptr<int32_t>(),
      probs.const_data_ptr<float>(),
      q_ids ? q_ids->const_data_ptr<int64_t>() : nullptr,
      q ? q->const_data_ptr<float>() : nullptr,
      uniform.const_data_ptr<float>(),
      bonus_uniform.const_data_ptr<float>(),
      plan.tokens,
      plan.vocab,
      plan.candidates,
      sums.mutable_data_ptr<float>(),
      plan.length.mutable_data_ptr<int32_t>(),
      plan.next.mutable_data_ptr<int64_t>(),
  };
  launch_pdl(gpu::accept_leaves, leaf_grid(plan.sequences, plan.vocab), launch.threads, 0,
             launch.stream, arguments);
  launch_pdl(gpu::accept, unsigned(plan.sequences), gpu::kRowThreads, 0, launch.stream, arguments);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {plan.length, plan.next};
}

std::tuple<Tensor, Tensor> accept_greedy(const Tensor& draft, const Tensor& offered,
                                         const Tensor& target_ids) {
  AcceptPlan plan = plan_accept_greedy(draft, offered, target_ids);
  if (plan.sequences == 0) return {plan.length, plan.next};
  const Launch launch(draft, plan.sequences * kLanes);
  launch_pdl(gpu::accept_greedy, launch.grid, launch.threads, 0, launch.stream,
             draft.const_data_ptr<int64_t>(), offered.const_data_ptr<int32_t>(),
             target_ids.const_data_ptr<int64_t>(), plan.sequences, plan.tokens,
             plan.length.mutable_data_ptr<int32_t>(), plan.next.mutable_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {plan.length, plan.next};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("uniform", TORCH_BOX(&uniform));
  m.impl("sampling_probs", TORCH_BOX(&sampling_probs));
  m.impl("categorical", TORCH_BOX(&categorical));
  m.impl("accept", TORCH_BOX(&accept));
  m.impl("accept_greedy", TORCH_BOX(&accept_greedy));
}

}  // namespace dflash::cuda
