// Checks and outputs of the drafters' own operators.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "host/act.h"
#include "host/argument.h"
#include "host/quant.h"

namespace dflash {

struct GroupedConvPlan {
  int64_t rows, columns, taps, groups, sequences;
  Tensor out;  // float32 [rows, columns] or packed activations
};

inline GroupedConvPlan plan_grouped_conv(const Tensor& x, const Tensor& coef, const Tensor& base,
                                         int64_t side, const Tensor& cu_seqlens, int64_t act_mode) {
  constexpr const char* op = "dflash::grouped_conv";
  check_argument(op, "x", x, ScalarType::Float, 2, "[rows, columns]", x);
  check_argument(op, "base", base, ScalarType::Float, 3, "[2, taps, columns]", x);
  check_argument(op, "coef", coef, ScalarType::Float, 2, "[rows, 2 * taps * groups]", x);
  check_argument(op, "cu_seqlens", cu_seqlens, ScalarType::Int, 1, "[sequences + 1]", x);
  const int64_t rows = x.size(0), columns = x.size(1), taps = base.size(1);
  STD_TORCH_CHECK(columns > 0, op, ": x must have at least one column");
  check_size(op, "base", base, 0, 2, "sides");
  STD_TORCH_CHECK(taps > 0, op, ": base must have at least one tap, got shape ", shape_str(base));
  check_size(op, "base", base, 2, columns, "columns, as x has");
  check_size(op, "coef", coef, 0, rows, "rows, as x has");
  STD_TORCH_CHECK(coef.size(1) > 0 && coef.size(1) % (2 * taps) == 0, op,
                  ": coef must have a positive multiple of 2 * ", taps, " columns, got shape ",
                  shape_str(coef));
  const int64_t groups = coef.size(1) / (2 * taps);
  STD_TORCH_CHECK(columns % groups == 0, op, ": the ", columns,
                  " columns of x must divide into the ", groups, " groups of coef");
  STD_TORCH_CHECK(side == 0 || side == 1, op, ": side must be 0 (prepare) or 1 (finish), got ",
                  side);
  STD_TORCH_CHECK(cu_seqlens.size(0) > 0, op, ": cu_seqlens must have at least one entry");
  return {rows,
          columns,
          taps,
          groups,
          cu_seqlens.size(0) - 1,
          new_activations(x, rows, columns, act_mode)};
}

struct SelectorPlan {
  int64_t sequences, slots, candidates, rank, vocab;
  int64_t predecessor_bytes, successor_bytes;  // of a codebook row
  Tensor tokens, q;                            // int64 [S, N], float32 [S, N, K]
};

// temperature [S] and uniform [S, N] of a drafter that samples.
inline void check_draws(const char* op, const Tensor& temperature, const Tensor& uniform,
                        int64_t sequences, int64_t slots, const Tensor& like) {
  check_argument(op, "temperature", temperature, ScalarType::Float, 1, "[sequences]", like);
  check_size(op, "temperature", temperature, 0, sequences, "entries, one per sequence");
  check_argument(op, "uniform", uniform, ScalarType::Float, 2, "[sequences, slots]", like);
  check_size(op, "uniform", uniform, 0, sequences, "sequences");
  check_size(op, "uniform", uniform, 1, slots, "columns, one per slot");
}

inline SelectorPlan plan_selector_walk(const Tensor& ids, const Tensor& scores,
                                       const Tensor& hidden, const Tensor& anchor,
                                       const Tensor& predecessor, int64_t predecessor_type,
                                       const Tensor& successor, int64_t successor_type,
                                       const Tensor& temperature, const Tensor& uniform) {
  constexpr const char* op = "dflash::selector_walk";
  check_argument(op, "ids", ids, ScalarType::Long, 3, "[sequences, slots, candidates]", ids);
  check_argument(op, "scores", scores, ScalarType::Float, 3, "[sequences, slots, candidates]", ids);
  check_argument(op, "hidden", hidden, ScalarType::Float, 3, "[sequences, slots, rank]", ids);
  check_argument(op, "anchor", anchor, ScalarType::Long, 1, "[sequences]", ids);
  SelectorPlan plan{};
  plan.sequences = ids.size(0);
  plan.slots = ids.size(1);
  plan.candidates = ids.size(2);
  STD_TORCH_CHECK(plan.candidates > 0, op, ": ids must have at least one candidate per slot");
  for (int64_t d = 0; d < 3; ++d)
    check_size(op, "scores", scores, d, ids.size(d), "entries there, as ids has");
  check_size(op, "hidden", hidden, 0, plan.sequences, "sequences, as ids has");
  check_size(op, "hidden", hidden, 1, plan.slots, "slots, as ids has");
  check_size(op, "anchor", anchor, 0, plan.sequences, "entries, one per sequence of ids");
  plan.rank = check_packed(op, "predecessor", predecessor,
                           check_format(op, "predecessor_type", predecessor_type));
  const int64_t successor_rank =
      check_packed(op, "successor", successor, check_format(op, "successor_type", successor_type));
  STD_TORCH_CHECK(plan.rank == successor_rank, op, ": successor must have rows of ", plan.rank,
                  " values, as predecessor has, got ", successor_rank);
  STD_TORCH_CHECK(predecessor.size(0) == successor.size(0), op, ": successor must have ",
                  predecessor.size(0), " rows, as predecessor has, got ", successor.size(0));
  check_same_device(op, "predecessor", predecessor, ids);
  check_same_device(op, "successor", successor, ids);
  check_size(op, "hidden", hidden, 2, plan.rank, "columns, the rank of the codebooks");
  plan.vocab = predecessor.size(0);
  plan.predecessor_bytes = predecessor.size(1);
  plan.successor_bytes = successor.size(1);
  check_draws(op, temperature, uniform, plan.sequences, plan.slots, ids);
  plan.tokens = torch::stable::new_empty(ids, {plan.sequences, plan.slots}, ScalarType::Long);
  plan.q = torch::stable::new_empty(ids, {plan.sequences, plan.slots, plan.candidates},
                                    ScalarType::Float);
  return plan;
}

}  // namespace dflash
