#include "cpu/rope.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/graph.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "host/dispatch.h"
#include "host/rope.h"

namespace dflash::cpu {
namespace {

constexpr const char* kOp = "dflash::qk_norm_rope_store";
constexpr int64_t kMaxPosition = 1 << 21;  // beyond it a float angle says nothing

void check_values(const RopePlan& plan, const RopeArgs& args) {
  for (int64_t n = 0; n < plan.position_axes * plan.rows; ++n)
    STD_TORCH_CHECK(args.positions[n] >= 0 && args.positions[n] < kMaxPosition, kOp,
                    ": positions must be 0 .. ", kMaxPosition - 1, ", got ", args.positions[n],
                    " for row ", n % plan.rows);
  for (int64_t n = 0; n < plan.rows; ++n)
    STD_TORCH_CHECK(args.slots[n] < plan.cache_rows, kOp, ": slots must be below the ",
                    plan.cache_rows, " rows of k_cache (< 0: not stored), got ", args.slots[n],
                    " for row ", n);
}

}  // namespace

Tensor qk_norm_rope_store(const std::optional<Tensor>& q, const Tensor& k, const Tensor& v,
                          const std::optional<Tensor>& q_weight,
                          const std::optional<Tensor>& k_weight, double eps, bool plus_one,
                          const Tensor& positions, const Tensor& inv_freq, double attention_scaling,
                          const std::vector<int64_t>& sections, const Tensor& slots, Tensor k_cache,
                          Tensor v_cache) {
  const RopePlan plan = plan_rope(q, k, v, q_weight, k_weight, eps, positions, inv_freq,
                                  attention_scaling, sections, slots, k_cache, v_cache);
  RopeArgs args{};
  args.type = float_type(k_cache);
  args.q = q ? q->const_data_ptr<float>() : nullptr;
  args.k = k.const_data_ptr<float>();
  args.v = v.const_data_ptr<float>();
  args.q_row = plan.q_stride[0];
  args.q_head = plan.q_stride[1];
  args.k_row = plan.k_stride[0];
  args.k_head = plan.k_stride[1];
  args.v_row = plan.v_stride[0];
  args.v_head = plan.v_stride[1];
  args.q_weight = q_weight ? q_weight->const_data_ptr<float>() : nullptr;
  args.k_weight = k_weight ? k_weight->const_data_ptr<float>() : nullptr;
  args.eps = float(eps);
  args.attention_scaling = float(attention_scaling);
  args.plus_one = plus_one;
  args.positions = positions.const_data_ptr<int64_t>();
  args.inv_freq = inv_freq.const_data_ptr<float>();
  args.slots = slots.const_data_ptr<int64_t>();
  args.k_cache = k_cache.mutable_data_ptr();
  args.v_cache = v_cache.mutable_data_ptr();
  args.out = Tensor(plan.out).mutable_data_ptr<float>();
  args.rows = plan.rows;
  args.q_heads = plan.q_heads;
  args.kv_heads = plan.kv_heads;
  args.head_dim = plan.head_dim;
  args.frequencies = plan.frequencies;
  args.height = plan.height;
  args.width = plan.width;
  args.position_axes = plan.position_axes;
  check_values(plan, args);
  const int64_t row_work = (plan.q_heads + 2 * plan.kv_heads) * plan.head_dim;
  const bool wide = isa() == Isa::kAvx512;
  parallel_for(plan.rows, std::max<int64_t>(1, 8192 / row_work), [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    scratch.resize(size_t(2 * plan.frequencies + plan.head_dim + 32));
    (wide ? avx512::rope_rows : avx2::rope_rows)(args, begin, end, scratch.data());
  });
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("qk_norm_rope_store", TORCH_BOX(&Recorded<&qk_norm_rope_store>::call));
}

}  // namespace dflash::cpu
