#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "core/gdn_args.h"
#include "host/act.h"
#include "host/float_rows.h"

namespace dflash {

// What every form of the gated delta rule reads.
struct DeltaInputs {
  const Tensor &mixed, &a, &b, &A, &dt_bias;
  const OptionalTensor &z, &norm_weight;
  double eps;
  bool sigmoid_gate;
  int64_t k_heads, k_dim;
  bool tiled;
  int64_t act_mode;
};

struct DeltaPlan {
  DeltaArgs args;
  Tensor out;        // float32 [rows, v_heads * v_dim] or packed
  int64_t act_mode;  // packed: args.out is left to the kernel
};

inline void plan_state(const char* op, const Tensor& state, const Tensor& like, DeltaArgs& args) {
  check_dim(op, "state", state, 4, "[slots, v_heads, v_dim, k_dim]");
  check_same_device(op, "state", state, like);
  check_dtype(op, "state", state, {ScalarType::Float, ScalarType::BFloat16});
  check_dense(op, "state", state, 1);
  args.state = state.mutable_data_ptr();
  args.bf16_state = state.scalar_type() == ScalarType::BFloat16;
  args.slots = state.size(0);
  args.slot_stride = state.stride(0);
}

inline void check_heads(const char* op, int64_t k_heads, int64_t k_dim, int64_t v_heads) {
  STD_TORCH_CHECK(k_heads > 0, op, ": k_heads must be positive, got ", k_heads);
  STD_TORCH_CHECK((k_dim > 0 && k_dim <= 128) || k_dim == 256, op,
                  ": k_dim must be 1 to 128 or 256, got ", k_dim);
  STD_TORCH_CHECK(v_heads > 0 && v_heads % k_heads == 0, op, ": v heads must be a multiple of ",
                  k_heads, " k heads, got ", v_heads);
}

inline DeltaPlan plan_delta(const char* op, DeltaMode mode, const DeltaInputs& in,
                            const Tensor& state, const Tensor& slots, int64_t columns,
                            const Tensor& cu_seqlens) {
  DeltaPlan plan{};
  DeltaArgs& args = plan.args;
  args.mode = mode;
  const Tensor& like = in.mixed;
  check_dim(op, "mixed", in.mixed, 2, "[rows, q | k | v]");
  check_dim(op, "A", in.A, 1, "[v_heads]");
  const int64_t rows = in.mixed.size(0), v_heads = in.A.size(0);
  check_heads(op, in.k_heads, in.k_dim, v_heads);
  plan_state(op, state, like, args);
  const int64_t v_dim = state.size(2);
  check_shape(op, "state", state, {state.size(0), v_heads, v_dim, in.k_dim},
              "[slots, v_heads, v_dim, k_dim]");
  STD_TORCH_CHECK(v_dim > 0, op, ": state must have v_dim > 0, got shape ", shape_str(state));
  const int64_t sequences = count_sequences(op, cu_seqlens);

  args.rows = rows;
  args.sequences = sequences;
  args.k_heads = int(in.k_heads);
  args.k_dim = int(in.k_dim);
  args.v_heads = int(v_heads);
  args.v_dim = int(v_dim);
  args.tiled = in.tiled;
  args.sigmoid_gate = in.sigmoid_gate;
  args.eps = float(in.eps);
  args.mixed = float_rows(op, "mixed", in.mixed, "[rows, 2 * k_heads * k_dim + v_heads * v_dim]",
                          rows, 2 * in.k_heads * in.k_dim + v_heads * v_dim, like);
  args.a = float_rows(op, "a", in.a, "[rows, v_heads]", rows, v_heads, like);
  args.b = float_rows(op, "b", in.b, "[rows, v_heads]", rows, v_heads, like);
  args.A = float_data(op, "A", in.A, "[v_heads]", {v_heads}, like);
  args.dt_bias = float_data(op, "dt_bias", in.dt_bias, "[v_heads]", {v_heads}, like);
  STD_TORCH_CHECK(in.z.has_value() == in.norm_weight.has_value(), op,
                  ": z and norm_weight must come together, got only ", in.z ? "z" : "norm_weight");
  if (in.z) {
    args.z = float_rows(op, "z", *in.z, "[rows, v_heads * v_dim]", rows, v_heads * v_dim, like);
    args.norm_weight = float_data(op, "norm_weight", *in.norm_weight, "[v_dim]", {v_dim}, like);
  }
  args.cu_seqlens =
      int_data(op, "cu_seqlens", cu_seqlens, "[sequences + 1]", {sequences + 1}, like);
  args.columns = columns;
  args.slot =
      mode == DeltaMode::kSnapshots
          ? int_data(op, "state_indices", slots, "[sequences, columns]", {sequences, columns}, like)
          : int_data(op, "slots", slots, "[sequences]", {sequences}, like);
  plan.out = new_activations(op, in.mixed, rows, v_heads * v_dim, in.act_mode);
  plan.act_mode = in.act_mode;
  if (plan.act_mode == 0) args.out = plan.out.mutable_data_ptr<float>();
  return plan;
}

inline void plan_journal(const char* op, const Tensor& num_accepted, const Tensor& parity,
                         const Tensor& journal_k, const Tensor& journal_u,
                         const Tensor& journal_decay, const Tensor& like, DeltaArgs& args) {
  const int64_t n = args.sequences;
  args.num_accepted = int_data(op, "num_accepted", num_accepted, "[sequences]", {n}, like);
  args.parity = int_data(op, "parity", parity, "[sequences]", {n}, like);
  check_dim(op, "journal_k", journal_k, 5, "[2, slots, journal rows, k_heads, k_dim]");
  args.journal_rows = journal_k.size(2);
  const int64_t t = args.journal_rows;
  check_tensor(op, "journal_k", journal_k, {2, args.slots, t, args.k_heads, args.k_dim},
               "[2, slots, journal rows, k_heads, k_dim]", {ScalarType::Float}, like);
  check_tensor(op, "journal_u", journal_u, {2, args.slots, t, args.v_heads, args.v_dim},
               "[2, slots, journal rows, v_heads, v_dim]", {ScalarType::Float}, like);
  check_tensor(op, "journal_decay", journal_decay, {2, args.slots, t, args.v_heads},
               "[2, slots, journal rows, v_heads]", {ScalarType::Float}, like);
  args.journal_k = journal_k.mutable_data_ptr<float>();
  args.journal_u = journal_u.mutable_data_ptr<float>();
  args.journal_decay = journal_decay.mutable_data_ptr<float>();
}

inline DeltaPlan plan_gdn_step(const DeltaInputs& in, const Tensor& state,
                               const Tensor& state_indices, const OptionalTensor& num_accepted,
                               const Tensor& cu_seqlens) {
  constexpr const char* op = "dflash::gdn_step";
  check_dim(op, "state_indices", state_indices, 2, "[sequences, columns]");
  const int64_t columns = state_indices.size(1);
  STD_TORCH_CHECK(columns > 0, op, ": state_indices must have columns, got shape ",
                  shape_str(state_indices));
  DeltaPlan plan =
      plan_delta(op, DeltaMode::kSnapshots, in, state, state_indices, columns, cu_seqlens);
  if (num_accepted)
    plan.args.num_accepted =
        int_data(op, "num_accepted", *num_accepted, "[sequences]", {plan.args.sequences}, in.mixed);
  return plan;
}

inline DeltaPlan plan_gdn_journal_step(const DeltaInputs& in, const Tensor& state,
                                       const Tensor& slots, const Tensor& num_accepted,
                                       const Tensor& parity, const Tensor& journal_k,
                                       const Tensor& journal_u, const Tensor& journal_decay,
                                       const Tensor& cu_seqlens) {
  constexpr const char* op = "dflash::gdn_journal_step";
  DeltaPlan plan = plan_delta(op, DeltaMode::kJournal, in, state, slots, 1, cu_seqlens);
  plan_journal(op, num_accepted, parity, journal_k, journal_u, journal_decay, in.mixed, plan.args);
  return plan;
}

inline DeltaPlan plan_gdn_prefill(const DeltaInputs& in, const Tensor& state, const Tensor& slots,
                                  const Tensor& has_state, const Tensor& cu_seqlens) {
  constexpr const char* op = "dflash::gdn_prefill";
  DeltaPlan plan = plan_delta(op, DeltaMode::kPrefill, in, state, slots, 1, cu_seqlens);
  plan.args.has_state =
      int_data(op, "has_state", has_state, "[sequences]", {plan.args.sequences}, in.mixed);
  return plan;
}

inline DeltaArgs plan_gdn_commit(const Tensor& state, const Tensor& slots,
                                 const Tensor& num_accepted, const Tensor& parity,
                                 const Tensor& journal_k, const Tensor& journal_u,
                                 const Tensor& journal_decay, bool tiled) {
  constexpr const char* op = "dflash::gdn_commit";
  DeltaArgs args{};
  args.mode = DeltaMode::kCommit;
  plan_state(op, state, state, args);
  check_dim(op, "slots", slots, 1, "[sequences]");
  check_dim(op, "journal_k", journal_k, 5, "[2, slots, journal rows, k_heads, k_dim]");
  check_heads(op, journal_k.size(3), state.size(3), state.size(1));
  args.sequences = slots.size(0);
  args.k_heads = int(journal_k.size(3));
  args.k_dim = int(state.size(3));
  args.v_heads = int(state.size(1));
  args.v_dim = int(state.size(2));
  args.tiled = tiled;
  args.columns = 1;
  args.slot = int_data(op, "slots", slots, "[sequences]", {args.sequences}, state);
  plan_journal(op, num_accepted, parity, journal_k, journal_u, journal_decay, state, args);
  return args;
}

// Only the CPU can look at values before it starts.
inline void check_delta_values(const char* op, const DeltaArgs& args) {
  const bool snapshots = args.mode == DeltaMode::kSnapshots;
  const bool journal = args.mode == DeltaMode::kJournal || args.mode == DeltaMode::kCommit;
  if (args.cu_seqlens) check_offsets(op, args.cu_seqlens, args.sequences, args.rows);
  check_values(op, snapshots ? "state_indices" : "slots", args.slot, args.sequences * args.columns,
               args.slots, "below state's slots,");
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t n = args.cu_seqlens ? args.cu_seqlens[s + 1] - args.cu_seqlens[s] : 0;
    if (snapshots) {
      STD_TORCH_CHECK(n <= args.columns, op, ": state_indices must have a column for each of the ",
                      n, " rows of sequence ", s, ", got ", args.columns);
      if (args.num_accepted && n > 0)
        STD_TORCH_CHECK(args.num_accepted[s] <= args.columns, op, ": num_accepted must be at most ",
                        args.columns, ", the columns of state_indices, got ", args.num_accepted[s],
                        " at ", s);
    }
    if (journal && args.slot[s] > 0) {
      STD_TORCH_CHECK(n <= args.journal_rows, op, ": the journal must hold the ", n,
                      " rows of sequence ", s, ", got ", args.journal_rows, " journal rows");
      STD_TORCH_CHECK(args.num_accepted[s] >= 0 && args.num_accepted[s] <= args.journal_rows, op,
                      ": num_accepted must be 0 to ", args.journal_rows,
                      ", the journal's rows, got ", args.num_accepted[s], " at ", s);
      STD_TORCH_CHECK(args.parity[s] == 0 || args.parity[s] == 1, op,
                      ": parity must be 0 or 1, got ", args.parity[s], " at ", s);
    }
  }
}

}  // namespace dflash
