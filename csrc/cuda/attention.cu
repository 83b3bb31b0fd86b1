#include "gpu/attention.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/act.cuh"
#include "host/attention.h"

namespace dflash::cuda {

Tensor block_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& lengths, const Tensor& cu_seqlens,
                       double scale, int64_t window, bool causal,
                       const std::optional<Tensor>& sinks, const std::optional<Tensor>& gate,
                       double value_scale, int64_t act_mode) {
  constexpr const char* op = "dflash::block_attention";
  AttentionPlan plan = plan_attention(q, k_cache, v_cache, page_table, lengths, cu_seqlens, scale,
                                      window, causal, sinks, gate, value_scale, act_mode);
  STD_TORCH_CHECK(plan.head_dim <= gpu::kMaxHeadDim, op,
                  ": q must have head_dim <= ", gpu::kMaxHeadDim, ", got ", plan.head_dim);
  STD_TORCH_CHECK(plan.heads <= 65535, op, ": q must have at most 65535 heads, got ", plan.heads);
  if (plan.rows == 0) return plan.out;
  const int64_t columns = plan.heads * plan.head_dim;
  Tensor floats = float_rows_of(plan.out, plan.rows, columns, act_mode);
  gpu::AttentionView view{};
  view.q = q.const_data_ptr<float>();
  view.k = k_cache.const_data_ptr();
  view.v = v_cache.const_data_ptr();
  view.page_table = page_table.const_data_ptr<int32_t>();
  view.lengths = lengths.const_data_ptr<int32_t>();
  view.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
  view.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  view.gate = gate ? gate->const_data_ptr<float>() : nullptr;
  view.gate_row = plan.gate_stride[0];
  view.gate_head = plan.gate_stride[1];
  view.rows = plan.rows;
  view.sequences = plan.sequences;
  view.table_pages = plan.table_pages;
  view.pages = plan.pages;
  view.page_size = plan.page_size;
  view.heads = plan.heads;
  view.kv_heads = plan.kv_heads;
  view.head_dim = plan.head_dim;
  view.window = plan.window;
  view.scale = plan.scale;
  view.value_scale = plan.value_scale;
  view.causal = plan.causal;
  view.out = floats.mutable_data_ptr<float>();
  const Launch launch(q, plan.rows);
  const dim3 grid(unsigned(plan.rows), unsigned(plan.heads));
  with_type(float_type(k_cache), [&]<class T>() {
    gpu::block_attention<T><<<grid, gpu::kAttentionThreads, 0, launch.stream>>>(view);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_activations(floats, plan.rows, columns, act_mode, plan.out);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("block_attention", TORCH_BOX(&block_attention));
}

}  // namespace dflash::cuda
