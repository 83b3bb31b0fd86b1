#include "cpu/delta.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <memory>
#include <new>

#include "cpu/act_kernel.h"
#include "cpu/graph.h"
#include "cpu/isa.h"
#include "host/delta.h"

namespace dflash::cpu {

namespace avx2 {
void delta_window(const DeltaArgs& args, const DeltaWindow& window, int64_t threads);
}
namespace avx512 {
void delta_window(const DeltaArgs& args, const DeltaWindow& window, int64_t threads);
}

namespace {

constexpr std::align_val_t kLine{64};
struct Release {
  void operator()(float* p) const { ::operator delete[](p, kLine); }
};

using Floats = std::unique_ptr<float[], Release>;

Floats new_floats(int64_t count) {
  return Floats(new (kLine) float[size_t(count)]);
}

// Rows of a prefill at a time: their keys and queries stay in the first-level cache. The state goes
// through its slot between windows, which changes nothing: it is stored as it is computed.
constexpr int64_t kPrefillRows = 16;

void run(const DeltaArgs& args) {
  int64_t longest = 0;
  if (args.cu_seqlens) {
    for (int64_t s = 0; s < args.sequences; ++s)
      longest = std::max<int64_t>(longest, args.cu_seqlens[s + 1] - args.cu_seqlens[s]);
    const int64_t covered = args.cu_seqlens[args.sequences];
    std::memset(args.out + covered * args.out_columns(), 0,
                size_t((args.rows - covered) * args.out_columns()) * sizeof(float));
    if (longest == 0) return;
  }
  const int64_t count =
      args.mode == DeltaMode::kPrefill ? std::min(longest, kPrefillRows) : longest;
  int64_t replay = 0;
  if (args.mode == DeltaMode::kJournal || args.mode == DeltaMode::kCommit)
    for (int64_t s = 0; s < args.sequences; ++s)
      if (args.slot[s] > 0) replay = std::max<int64_t>(replay, args.num_accepted[s]);
  const DeltaScratch layout(args);
  const int64_t floats = args.sequences * count * layout.floats;
  const Floats scratch = new_floats(floats + args.sequences * replay * layout.queries);
  const int64_t threads = torch::stable::get_num_threads();
  int64_t first = 0;
  do {
    const DeltaWindow window{first, count, scratch.get(), replay, scratch.get() + floats};
    (isa() == Isa::kAvx512 ? avx512::delta_window : avx2::delta_window)(args, window, threads);
    first += count;
  } while (first < longest);
}

// Packed activations are made of whole rows: groups of 256 span heads.
Tensor run(DeltaPlan& plan) {
  DeltaArgs& args = plan.args;
  if (plan.act_mode == 0) {
    run(args);
    return plan.out;
  }
  const int64_t columns = args.out_columns();
  const Floats floats = new_floats(args.rows * columns);
  args.out = floats.get();
  run(args);
  const QuantActCall call{reinterpret_cast<const uint8_t*>(args.out),
                          FloatType::kF32,
                          args.rows,
                          columns,
                          columns * int64_t(sizeof(float)),
                          plan.act_mode,
                          static_cast<uint8_t*>(plan.out.mutable_data_ptr())};
  (isa() == Isa::kAvx512 ? avx512::quant_act : avx2::quant_act)(call);
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
  check_delta_values("dflash::gdn_step", plan.args);
  return run(plan);
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
  check_delta_values("dflash::gdn_journal_step", plan.args);
  return run(plan);
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
  check_delta_values("dflash::gdn_prefill", plan.args);
  return run(plan);
}

void gdn_commit(const Tensor& state, const Tensor& slots, const Tensor& num_accepted,
                const Tensor& parity, const Tensor& journal_k, const Tensor& journal_u,
                const Tensor& journal_decay, bool tiled) {
  const DeltaArgs args = plan_gdn_commit(state, slots, num_accepted, parity, journal_k, journal_u,
                                         journal_decay, tiled);
  check_delta_values("dflash::gdn_commit", args);
  run(args);
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("gdn_step", TORCH_BOX(&Recorded<&gdn_step>::call));
  m.impl("gdn_journal_step", TORCH_BOX(&Recorded<&gdn_journal_step>::call));
  m.impl("gdn_prefill", TORCH_BOX(&Recorded<&gdn_prefill>::call));
  m.impl("gdn_commit", TORCH_BOX(&Recorded<&gdn_commit>::call));
}

}  // namespace dflash::cpu
