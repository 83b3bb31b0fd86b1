#include "gpu/draft.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/act.cuh"
#include "gpu/dequantize.cuh"
#include "host/draft.h"

namespace dflash::cuda {
namespace {

// Rows `ids` [count] of a codebook as floats [count, rank].
void codebook_rows(const Tensor& packed, int64_t type, const Tensor& ids, int64_t rank,
                   float* out) {
  const int64_t count = ids.numel() * rank;
  if (count == 0) return;
  const Launch launch(packed, count);
  dispatch_format(type, [&]<class F>() {
    gpu::embed_rows<F><<<launch.grid, launch.threads, 0, launch.stream>>>(
        packed.const_data_ptr<uint8_t>(), ids.const_data_ptr<int64_t>(), out, packed.size(0), rank,
        count, 1.f);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

Tensor grouped_conv(const Tensor& x, const Tensor& coef, const Tensor& base, int64_t side,
                    const Tensor& cu_seqlens, int64_t act_mode) {
  GroupedConvPlan plan = plan_grouped_conv(x, coef, base, side, cu_seqlens, act_mode);
  const int64_t count = plan.rows * plan.columns;
  if (count == 0) return plan.out;
  Tensor floats = float_rows_of(plan.out, plan.rows, plan.columns, act_mode);
  const Launch launch(x, count);
  gpu::grouped_conv<<<launch.grid, launch.threads, 0, launch.stream>>>(
      x.const_data_ptr<float>(), coef.const_data_ptr<float>() + side * plan.taps * plan.groups,
      base.const_data_ptr<float>() + side * plan.taps * plan.columns,
      cu_seqlens.const_data_ptr<int32_t>(), floats.mutable_data_ptr<float>(), plan.sequences,
      plan.columns, plan.taps, plan.groups, count);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_activations(floats, plan.rows, plan.columns, act_mode, plan.out);
  return plan.out;
}

std::tuple<Tensor, Tensor> selector_walk(const Tensor& ids, const Tensor& scores,
                                         const Tensor& hidden, const Tensor& anchor,
                                         const Tensor& predecessor, int64_t predecessor_type,
                                         const Tensor& successor, int64_t successor_type,
                                         const Tensor& temperature, const Tensor& uniform) {
  SelectorPlan plan = plan_selector_walk(ids, scores, hidden, anchor, predecessor, predecessor_type,
                                         successor, successor_type, temperature, uniform);
  const int64_t S = plan.sequences, K = plan.candidates, R = plan.rank;
  if (S * plan.slots == 0) return {plan.tokens, plan.q};
  const auto floats = [&](int64_t count) { return new_empty(scores, {count}, ScalarType::Float); };
  // every row the walk may meet: the path is only known on the device
  Tensor anchors = floats(S * R), before = floats(ids.numel() * R), after = floats(ids.numel() * R);
  Tensor score = floats(S * K), sums = floats(S * ceil_div<int64_t>(K, kLeaf));
  codebook_rows(predecessor, predecessor_type, anchor, R, anchors.mutable_data_ptr<float>());
  codebook_rows(predecessor, predecessor_type, ids, R, before.mutable_data_ptr<float>());
  codebook_rows(successor, successor_type, ids, R, after.mutable_data_ptr<float>());
  const Launch launch(ids, S);
  const gpu::WalkArguments arguments = {
      ids.const_data_ptr<int64_t>(),
      scores.const_data_ptr<float>(),
      hidden.const_data_ptr<float>(),
      anchors.const_data_ptr<float>(),
      before.const_data_ptr<float>(),
      after.const_data_ptr<float>(),
      temperature.const_data_ptr<float>(),
      uniform.const_data_ptr<float>(),
      plan.slots,
      K,
      R,
      score.mutable_data_ptr<float>(),
      sums.mutable_data_ptr<float>(),
      plan.tokens.mutable_data_ptr<int64_t>(),
      plan.q.mutable_data_ptr<float>(),
  };
  gpu::selector_walk<<<unsigned(S), gpu::kRowThreads, 0, launch.stream>>>(arguments);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {plan.tokens, plan.q};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("grouped_conv", TORCH_BOX(&grouped_conv));
  m.impl("selector_walk", TORCH_BOX(&selector_walk));
}

}  // namespace dflash::cuda
