#include "gpu/head.cuh"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "cuda/launch.cuh"
#include "host/head.h"

namespace dflash::cuda {
namespace {

// What a stage leaves to the next one: keys [rows, chunks, k]; the last stage leaves nothing.
std::optional<Tensor> keys_of(const Tensor& like, int64_t rows, int64_t chunks, int64_t k) {
  if (chunks == 1) return std::nullopt;
  return new_empty(like, {rows, chunks, k}, ScalarType::Long);
}

gpu::RankKey* data(std::optional<Tensor>& keys) {
  return keys ? static_cast<gpu::RankKey*>(keys->mutable_data_ptr()) : nullptr;
}

}  // namespace

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
  const auto chunks_of = [](int64_t count) { return ceil_div<int64_t>(count, gpu::kTopkChunk); };
  int64_t chunks = chunks_of(plan.vocabulary);
  if (plan.k > gpu::kTopkMost || chunks > 65535) {
    launch_pdl(gpu::head_topk_any, unsigned(plan.rows), gpu::kTopkThreads, 0, launch.stream, view);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return {plan.values, plan.ids};
  }
  const auto grid = [&](int64_t chunks) { return dim3(unsigned(plan.rows), unsigned(chunks)); };
  std::optional<Tensor> keys = keys_of(logits, plan.rows, chunks, plan.k);
  launch_pdl(gpu::head_topk_logits, grid(chunks), gpu::kTopkThreads, 0, launch.stream, view,
             data(keys));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  while (chunks > 1) {
    const int64_t count = chunks * plan.k;
    chunks = chunks_of(count);
    std::optional<Tensor> fewer = keys_of(logits, plan.rows, chunks, plan.k);
    launch_pdl(gpu::head_topk_keys, grid(chunks), gpu::kTopkThreads, 0, launch.stream, view,
               data(keys), count, data(fewer));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    keys = fewer;
  }
  return {plan.values, plan.ids};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("head_topk", TORCH_BOX(&head_topk));
}

}  // namespace dflash::cuda
