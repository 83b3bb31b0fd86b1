#include <torch/csrc/stable/library.h>

#include "cuda/act.cuh"
#include "gpu/delta_step.cuh"
#include "host/delta.h"

namespace dflash::cuda {
namespace {

// What delta_step reads and writes four at a time. The model decides, never the batch.
bool has_step(const DeltaArgs& args) {
  const FloatType state_type = args.bf16_state ? FloatType::kBF16 : FloatType::kF32;
  bool fours = in_fours({args.state, args.slot_stride, state_type}) && in_fours(args.mixed) &&
               in_fours(args.z);
  for (const float* p : {args.norm_weight, static_cast<const float*>(args.journal_k),
                         static_cast<const float*>(args.journal_u)})
    fours = fours && in_fours({p, 0, FloatType::kF32});
  return fours && args.k_dim == gpu::kHead && args.v_dim == gpu::kHead;
}

template <class S, bool kFused, int kWide, int kRows>
void launch_step(const DeltaArgs& args, cudaStream_t stream) {
  const auto kernel = gpu::delta_step<S, kFused, kWide, kRows>;
  STD_TORCH_CHECK(args.sequences <= 65535, "dflash: ", args.sequences,
                  " sequences exceed one launch");
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      int(sizeof(gpu::StepShared))));
  const dim3 grid(unsigned(ceil_div(args.v_heads, gpu::kHeads) * gpu::kTeam),
                  unsigned(args.sequences));
  launch_cluster(kernel, kFused ? gpu::kTeam : 1, grid, gpu::StepShape<kWide, kRows>::kThreads,
                 sizeof(gpu::StepShared), stream, args);
}

template <bool kFused>
void launch_step(const DeltaArgs& args, cudaStream_t stream) {
  if (args.bf16_state)
    launch_step<Bf16, kFused, 8, 2>(args, stream);
  else
    launch_step<float, kFused, kFused ? 16 : 8, 2>(args, stream);  // measured
}

template <class S>
void launch_rows(const DeltaArgs& args, cudaStream_t stream) {
  const auto kernel = args.k_dim <= kAccumulators ? gpu::delta_rows<S, 1> : gpu::delta_rows<S, 2>;
  const int64_t blocks =
      args.sequences * args.v_heads * ceil_div<int64_t>(args.v_dim, gpu::kBlockRows);
  STD_TORCH_CHECK(blocks <= 0x7fffffff, "dflash: ", args.sequences, " sequences exceed one launch");
  kernel<<<unsigned(blocks), gpu::kWarps * kLanes, 0, stream>>>(args);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// The rule alone, into args.out.
void launch_rule(const DeltaArgs& args, cudaStream_t stream) {
  if (args.sequences == 0) return;
  if (has_step(args))
    launch_step<false>(args, stream);
  else if (args.bf16_state)
    launch_rows<Bf16>(args, stream);
  else
    launch_rows<float>(args, stream);
}

Tensor run(DeltaPlan& plan, const Tensor& on, int64_t act_mode) {
  DeltaArgs& args = plan.args;
  if (args.rows == 0) return plan.out;
  const int64_t columns = args.out_columns();
  const Launch launch(on, args.rows * args.v_heads * kLanes);
  if (args.sequences > 0 && has_step(args) && has_sm90()) {
    args.act_mode = act_mode;
    args.packed = static_cast<uint8_t*>(plan.out.mutable_data_ptr());
    launch_step<true>(args, launch.stream);
    return plan.out;
  }
  Tensor floats = float_rows_of(plan.out, args.rows, columns, act_mode);
  args.out = floats.mutable_data_ptr<float>();
  launch.zero(args.out, args.rows * columns * int64_t(sizeof(float)));
  launch_rule(args, launch.stream);
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
  const DeltaArgs args = plan_gdn_commit(state, slots, num_accepted, parity, journal_k, journal_u,
                                         journal_decay, tiled);
  const Launch launch(state, 0);
  launch_rule(args, launch.stream);
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("gdn_step", TORCH_BOX(&gdn_step));
  m.impl("gdn_journal_step", TORCH_BOX(&gdn_journal_step));
  m.impl("gdn_prefill", TORCH_BOX(&gdn_prefill));
  m.impl("gdn_commit", TORCH_BOX(&gdn_commit));
}

}  // namespace dflash::cuda
