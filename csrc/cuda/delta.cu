#include "gpu/delta.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/act.cuh"
#include "host/delta.h"

namespace dflash::cuda {
namespace {

template <class S>
void launch_rows(const DeltaArgs& args, const Launch& launch) {
  const auto kernel = args.k_dim <= kAccumulators ? gpu::delta_rows<S, 1> : gpu::delta_rows<S, 2>;
  kernel<<<launch.grid, gpu::kWarps * kLanes, 0, launch.stream>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void run(const DeltaArgs& args, const Tensor& on) {
  const int64_t blocks =
      args.sequences * args.v_heads * ceil_div<int64_t>(args.v_dim, gpu::kBlockRows);
  if (blocks == 0) return;
  const Launch launch(on, blocks * Launch::threads);
  if (args.bf16_state)
    launch_rows<Bf16>(args, launch);
  else
    launch_rows<float>(args, launch);
}

Tensor run(DeltaPlan& plan, const Tensor& on, int64_t act_mode) {
  DeltaArgs& args = plan.args;
  if (args.rows == 0) return plan.out;
  const int64_t columns = args.out_columns();
  Tensor floats = float_rows_of(plan.out, args.rows, columns, act_mode);
  args.out = floats.mutable_data_ptr<float>();
  const Launch launch(on, args.rows * args.v_heads * kLanes);
  launch.zero(args.out, args.rows * columns * int64_t(sizeof(float)));
  run(args, on);
  if (args.norm_weight) {
    gpu::delta_norm<<<launch.grid, launch.threads, 0, launch.stream>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  finish_activations(floats, args.rows, columns, act_mode, plan.out);
  return plan.out;
}

}  // namespace

Tensor gdn_step(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& A,
                const Tensor& dt_bias, const OptionalTensor& z, const OptionalTensor& norm_weight,
                double eps, bool sigmoid_gate, int64_t k_heads, int64_t k_dim, bool tiled,
                const Tensor& state, const Tensor& state_indices,
                const OptionalTensor& num_accepted, const Tensor& cu_seqlens, int64_t act_mode) {
  DeltaPlan plan = plan_gdn_step(
      {mixed, a, b, A, dt_bias, z, norm_weight, eps, sigmoid_gate, k_heads, k_dim, tiled, act_mode},
      state, state_indices, num_accepted, cu_seqlens);
  return run(plan, mixed, act_mode);
}

Tensor gdn_journal_step(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& A,
                        const Tensor& dt_bias, const OptionalTensor& z,
                        const OptionalTensor& norm_weight, double eps, bool sigmoid_gate,
                        int64_t k_heads, int64_t k_dim, bool tiled, const Tensor& state,
                        const Tensor& slots, const Tensor& num_accepted, const Tensor& parity,
                        const Tensor& journal_k, const Tensor& journal_u,
                        const Tensor& journal_decay, const Tensor& cu_seqlens, int64_t act_mode) {
  DeltaPlan plan = plan_gdn_journal_step(
      {mixed, a, b, A, dt_bias, z, norm_weight, eps, sigmoid_gate, k_heads, k_dim, tiled, act_mode},
      state, slots, num_accepted, parity, journal_k, journal_u, journal_decay, cu_seqlens);
  return run(plan, mixed, act_mode);
}

Tensor gdn_prefill(const Tensor& mixed, const Tensor& a, const Tensor& b, const Tensor& A,
                   const Tensor& dt_bias, const OptionalTensor& z,
                   const OptionalTensor& norm_weight, double eps, bool sigmoid_gate,
                   int64_t k_heads, int64_t k_dim, bool tiled, const Tensor& state,
                   const Tensor& slots, const Tensor& has_state, const Tensor& cu_seqlens,
                   int64_t act_mode) {
  DeltaPlan plan = plan_gdn_prefill(
      {mixed, a, b, A, dt_bias, z, norm_weight, eps, sigmoid_gate, k_heads, k_dim, tiled, act_mode},
      state, slots, has_state, cu_seqlens);
  return run(plan, mixed, act_mode);
}

void gdn_commit(const Tensor& state, const Tensor& slots, const Tensor& num_accepted,
                const Tensor& parity, const Tensor& journal_k, const Tensor& journal_u,
                const Tensor& journal_decay, bool tiled) {
  run(plan_gdn_commit(state, slots, num_accepted, parity, journal_k, journal_u, journal_decay,
                      tiled),
      state);
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("gdn_step", TORCH_BOX(&gdn_step));
  m.impl("gdn_journal_step", TORCH_BOX(&gdn_journal_step));
  m.impl("gdn_prefill", TORCH_BOX(&gdn_prefill));
  m.impl("gdn_commit", TORCH_BOX(&gdn_commit));
}

}  // namespace dflash::cuda
