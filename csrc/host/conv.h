#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "core/gdn_args.h"
#include "host/float_rows.h"

namespace dflash {

struct ConvPlan {
  ConvArgs args;
  Tensor out;  // float32 [rows, channels]
};

inline ConvPlan plan_ssm_conv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                                   const OptionalTensor& bias, bool silu, const Tensor& slots,
                                   const OptionalTensor& num_accepted, const Tensor& cu_seqlens) {
  constexpr const char* op = "dflash::ssm_conv_step";
  check_dim(op, "x", x, 2, "[rows, channels]");
  const int64_t rows = x.size(0), channels = x.size(1);
  const int64_t sequences = count_sequences(op, cu_seqlens);
  ConvPlan plan{};
  ConvArgs& args = plan.args;
  args.x = float_rows(op, "x", x, "[rows, channels]", rows, channels, x);
  args.rows = rows;
  args.channels = channels;
  args.sequences = sequences;
  args.silu = silu;

  check_dim(op, "weight", weight, 2, "[channels, taps]");
  const int64_t taps = weight.size(1);
  args.weight = float_data(op, "weight", weight, "[channels, taps]", {channels, taps}, x);
  STD_TORCH_CHECK(taps >= 2 && taps <= kMaxTaps, op, ": weight must have 2 to ", kMaxTaps,
                  " taps, got shape ", shape_str(weight));
  args.taps = int(taps);
  if (bias) args.bias = float_data(op, "bias", *bias, "[channels]", {channels}, x);

  check_dim(op, "state", state, 3, "[slots, width, channels]");
  check_same_device(op, "state", state, x);
  check_dtype(op, "state", state, kFloatTypes);
  check_shape(op, "state", state, {state.size(0), state.size(1), channels},
              "[slots, width, channels]");
  check_dense(op, "state", state, 1);
  STD_TORCH_CHECK(state.size(1) >= taps - 1, op, ": state must be at least ", taps - 1,
                  " columns wide, taps - 1, got shape ", shape_str(state));
  args.state = state.mutable_data_ptr();
  args.state_type = float_type(state);
  args.slots = state.size(0);
  args.width = state.size(1);
  args.slot_stride = state.stride(0);
  args.slot = int_data(op, "slots", slots, "[sequences]", {sequences}, x);
  if (num_accepted)
    args.num_accepted = int_data(op, "num_accepted", *num_accepted, "[sequences]", {sequences}, x);
  args.cu_seqlens = int_data(op, "cu_seqlens", cu_seqlens, "[sequences + 1]", {sequences + 1}, x);

  plan.out = new_empty(x, {rows, channels}, ScalarType::Float);
  args.out = plan.out.mutable_data_ptr<float>();
  return plan;
}

inline void check_conv_values(const ConvArgs& args) {
  constexpr const char* op = "dflash::ssm_conv_step";
  check_offsets(op, args.cu_seqlens, args.sequences, args.rows);
  check_values(op, "slots", args.slot, args.sequences, args.slots, "below state's slots,");
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t n = args.cu_seqlens[s + 1] - args.cu_seqlens[s];
    if (n == 0 || args.slot[s] <= 0) continue;
    STD_TORCH_CHECK(args.width >= args.taps - 2 + n, op, ": state must be at least ",
                    args.taps - 2 + n, " columns wide for sequence ", s, " of ", n,
                    " rows (taps - 2 + rows), got ", args.width);
    if (args.num_accepted)
      STD_TORCH_CHECK(args.num_accepted[s] <= args.width - args.taps + 2, op,
                      ": num_accepted must be at most ", args.width - args.taps + 2,
                      " with a state ", args.width, " columns wide, got ", args.num_accepted[s],
                      " at ", s);
  }
}

}  // namespace dflash
