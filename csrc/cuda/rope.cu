#include "gpu/rope.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.cuh"
#include "host/rope.h"

namespace dflash::cuda {

Tensor qk_norm_rope_store(const std::optional<Tensor>& q, const Tensor& k, const Tensor& v,
                          const std::optional<Tensor>& q_weight,
                          const std::optional<Tensor>& k_weight, double eps, bool plus_one,
                          const Tensor& positions, const Tensor& inv_freq, double attention_scaling,
                          const std::vector<int64_t>& sections, const Tensor& slots, Tensor k_cache,
                          Tensor v_cache) {
  RopePlan plan = plan_rope(q, k, v, q_weight, k_weight, eps, positions, inv_freq,
                            attention_scaling, sections, slots, k_cache, v_cache);
  if (plan.rows == 0) return plan.out;
  gpu::RopeView view{};
  view.q = q ? q->const_data_ptr<float>() : nullptr;
  view.k = k.const_data_ptr<float>();
  view.v = v.const_data_ptr<float>();
  view.q_row = plan.q_stride[0];
  view.q_head = plan.q_stride[1];
  view.k_row = plan.k_stride[0];
  view.k_head = plan.k_stride[1];
  view.v_row = plan.v_stride[0];
  view.v_head = plan.v_stride[1];
  view.q_weight = q_weight ? q_weight->const_data_ptr<float>() : nullptr;
  view.k_weight = k_weight ? k_weight->const_data_ptr<float>() : nullptr;
  view.eps = float(eps);
  view.attention_scaling = float(attention_scaling);
  view.plus_one = plus_one;
  view.positions = positions.const_data_ptr<int64_t>();
  view.inv_freq = inv_freq.const_data_ptr<float>();
  view.slots = slots.const_data_ptr<int64_t>();
  view.k_cache = k_cache.mutable_data_ptr();
  view.v_cache = v_cache.mutable_data_ptr();
  view.out = plan.out.mutable_data_ptr<float>();
  view.rows = plan.rows;
  view.q_heads = plan.q_heads;
  view.kv_heads = plan.kv_heads;
  view.head_dim = plan.head_dim;
  view.frequencies = plan.frequencies;
  view.height = plan.height;
  view.width = plan.width;
  view.position_axes = plan.position_axes;
  view.cache_rows = plan.cache_rows;
  const int64_t warps = plan.rows * (plan.q_heads + plan.kv_heads);
  STD_TORCH_CHECK(
      warps <= 0x7fffffff && plan.head_dim <= 0x7fffffff,
      "dflash::qk_norm_rope_store: q and k must have fewer than 2^31 heads in all, got ", warps);
  const Launch launch(k, warps * kLanes);
  with_type(float_type(k_cache), [&]<class T>() {
    launch_pdl(gpu::qk_norm_rope_store<T>, launch.grid, launch.threads, 0, launch.stream, view);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("qk_norm_rope_store", TORCH_BOX(&qk_norm_rope_store));
}

}  // namespace dflash::cuda
