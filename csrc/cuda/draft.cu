#include "gpu/draft.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.cuh"
#include "host/draft.h"

namespace dflash::cuda {
namespace {

// A row per blockIdx.x, its columns (the items of `launch`) along blockIdx.y.
dim3 grid_of(int64_t rows, const Launch& launch) {
  STD_TORCH_CHECK(rows <= 0x7fffffff && launch.grid <= 65535, "dflash: ", rows, " rows of ",
                  launch.grid, " blocks exceed one launch");
  return dim3(unsigned(rows), launch.grid);
}

void codebook_rows(int64_t type, const gpu::CodebookView& view, int first, int count,
                   const Launch& launch) {
  if (count == 0) return;
  dispatch_format(type, [&]<class F>() {
    launch_pdl(gpu::codebook_rows<F>, grid_of(count, launch), launch.threads, 0, launch.stream,
               view, first);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

Tensor grouped_conv(const Tensor& x, const Tensor& coef, const Tensor& base, int64_t side,
                    const Tensor& cu_seqlens, int64_t act_mode) {
  GroupedConvPlan plan = plan_grouped_conv(x, coef, base, side, cu_seqlens, act_mode);
  if (plan.rows == 0) return plan.out;
  const gpu::ConvolutionView view = {
      x.const_data_ptr<float>(),
      coef.const_data_ptr<float>() + side * plan.taps * plan.groups,
      base.const_data_ptr<float>() + side * plan.taps * plan.columns,
      cu_seqlens.const_data_ptr<int32_t>(),
      plan.sequences,
      int(plan.rows),
      int(plan.columns),
      int(plan.taps),
      int(plan.groups),
  };
  if (act_mode == 0) {
    const Launch launch(x, plan.columns);
    launch_pdl(gpu::grouped_conv, grid_of(plan.rows, launch), launch.threads, 0, launch.stream,
               view, plan.out.mutable_data_ptr<float>());
  } else {
    const Launch launch(x, ceil_div<int64_t>(plan.columns, kActGroup) * kLanes);
    gpu::with_gpu_group(act_mode, [&]<class Group>() {
      launch_pdl(gpu::grouped_conv_packed<Group>, grid_of(plan.rows, launch), launch.threads, 0,
                 launch.stream, view, static_cast<Group*>(plan.out.mutable_data_ptr()));
    });
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
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
  const int64_t C = ids.numel();
  STD_TORCH_CHECK(S + 2 * C <= 0x7fffffff && R <= 1 << 24, "dflash::selector_walk: ids must be ",
                  "fewer than 2^30, got ", C);
  // every row the walk may meet, since the path is only known on the device
  Tensor rows = new_empty(scores, {S + 2 * C, R}, ScalarType::Float);
  const gpu::CodebookView codebooks = {
      predecessor.const_data_ptr<uint8_t>(),
      successor.const_data_ptr<uint8_t>(),
      anchor.const_data_ptr<int64_t>(),
      ids.const_data_ptr<int64_t>(),
      rows.mutable_data_ptr<float>(),
      plan.vocab,
      int(S),
      int(C),
      int(R),
  };
  const Launch launch(ids, R);
  if (predecessor_type == successor_type) {
    codebook_rows(predecessor_type, codebooks, 0, int(S + 2 * C), launch);
  } else {
    codebook_rows(predecessor_type, codebooks, 0, int(S + C), launch);
    codebook_rows(successor_type, codebooks, int(S + C), int(C), launch);
  }
  const float* anchors = rows.const_data_ptr<float>();
  const size_t shared = size_t(2 * K * R) * sizeof(float);
  const bool wide = K > gpu::kWalkWarps || R > gpu::kWalkParts * kAccumulators || shared > 40960;
  Tensor score = floats(wide ? S * K : 0);
  Tensor sums = floats(wide ? S * ceil_div<int64_t>(K, kLeaf) : 0);
  const gpu::WalkArguments arguments = {
      ids.const_data_ptr<int64_t>(),
      scores.const_data_ptr<float>(),
      hidden.const_data_ptr<float>(),
      anchors,
      anchors + S * R,
      anchors + (S + C) * R,
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
  if (wide)
    launch_pdl(gpu::selector_walk_wide, unsigned(S), gpu::kRowThreads, 0, launch.stream, arguments);
  else
    launch_pdl(gpu::selector_walk, unsigned(S), gpu::kRowThreads, shared, launch.stream, arguments);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {plan.tokens, plan.q};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("grouped_conv", TORCH_BOX(&grouped_conv));
  m.impl("selector_walk", TORCH_BOX(&selector_walk));
}

}  // namespace dflash::cuda
