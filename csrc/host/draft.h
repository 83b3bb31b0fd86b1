// Checks and outputs of the drafters' own operators.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "host/argument.h"
#include "host/matmul.h"
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
          new_activations(op, x, rows, columns, act_mode)};
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
  plan.tokens = new_empty(ids, {plan.sequences, plan.slots}, ScalarType::Long);
  plan.q = new_empty(ids, {plan.sequences, plan.slots, plan.candidates}, ScalarType::Float);
  return plan;
}

struct MarkovPlan {
  int64_t sequences, slots, draft_vocab, vocab, rank, hidden, w1_bytes;
  int64_t confidence_inputs;  // 0 without a head
  MarkovHead head;            // and of the matrix J in front of w2, 0 for kVanilla:
  int64_t joint_rows, joint_columns;
  Tensor tokens, q, confidence;  // int64 [S, N], float32 [S, N, Vd] or [0], [S, N] or [0]
};

// The matrix of a gated or recurrent head, and its bias.
inline void check_joint(const char* op, MarkovPlan& plan, int64_t head_type,
                        const std::optional<Tensor>& joint, int64_t joint_type,
                        const std::optional<Tensor>& bias, const Tensor& like,
                        SegmentBytes segment_bytes) {
  STD_TORCH_CHECK(head_type >= 0 && head_type <= 2, op,
                  ": head_type must be 0 (vanilla), 1 (gated) or 2 (rnn), got ", head_type);
  plan.head = MarkovHead(head_type);
  const bool vanilla = plan.head == MarkovHead::kVanilla;
  STD_TORCH_CHECK(joint.has_value() != vanilla, op, ": joint must ",
                  vanilla ? "be None with head_type 0" : "be given with head_type 1 and 2",
                  ", got ", vanilla ? "a tensor" : "None");
  STD_TORCH_CHECK(joint || !bias, op, ": joint_bias must be None without joint, got a tensor");
  if (vanilla) return;
  const bool gated = plan.head == MarkovHead::kGated;
  plan.joint_rows = gated ? plan.rank : 3 * plan.rank;
  plan.joint_columns = plan.hidden + (gated ? plan.rank : 2 * plan.rank);
  const Geometry quant = check_format(op, "joint_type", joint_type);
  STD_TORCH_CHECK(plan.joint_columns % quant.elems == 0, op, ": joint must have rows of ",
                  plan.joint_columns, " values, but a quant of its type holds ", quant.elems);
  check_argument(op, "joint", *joint, ScalarType::Byte, 1, "[bytes]", like);
  check_size(op, "joint", *joint, 0, segment_bytes(joint_type, plan.joint_rows, plan.joint_columns),
             "bytes, what repack() gives for its rows and columns");
  if (!bias) return;
  check_argument(op, "joint_bias", *bias, ScalarType::Float, 1, "[joint's rows]", like);
  check_size(op, "joint_bias", *bias, 0, plan.joint_rows, "entries, one per row of joint");
}

inline MarkovPlan plan_markov_chain(
    const Tensor& base, const Tensor& hidden, const Tensor& anchor, const Tensor& w1,
    int64_t w1_type, const Tensor& w2, int64_t w2_type, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& d2t,
    const std::optional<Tensor>& temperature, const std::optional<Tensor>& uniform,
    int64_t draft_topk, int64_t head_type, const std::optional<Tensor>& joint, int64_t joint_type,
    const std::optional<Tensor>& joint_bias, SegmentBytes segment_bytes) {
  constexpr const char* op = "dflash::markov_chain";
  check_argument(op, "base", base, ScalarType::Float, 3, "[sequences, slots, draft vocab]", base);
  check_argument(op, "hidden", hidden, ScalarType::Float, 3, "[sequences, slots, hidden]", base);
  check_argument(op, "anchor", anchor, ScalarType::Long, 1, "[sequences]", base);
  MarkovPlan plan{};
  plan.sequences = base.size(0);
  plan.slots = base.size(1);
  plan.draft_vocab = base.size(2);
  plan.hidden = hidden.size(2);
  STD_TORCH_CHECK(plan.draft_vocab > 0, op, ": base must have at least one column");
  check_size(op, "hidden", hidden, 0, plan.sequences, "sequences, as base has");
  check_size(op, "hidden", hidden, 1, plan.slots, "slots, as base has");
  check_size(op, "anchor", anchor, 0, plan.sequences, "entries, one per sequence of base");
  plan.rank = check_packed(op, "w1", w1, check_format(op, "w1_type", w1_type));
  STD_TORCH_CHECK(plan.rank > 0, op, ": w1 must have at least one column");
  check_same_device(op, "w1", w1, base);
  plan.vocab = w1.size(0);
  plan.w1_bytes = w1.size(1);
  const Geometry quant = check_format(op, "w2_type", w2_type);
  STD_TORCH_CHECK(plan.rank % quant.elems == 0, op, ": w2 must have rows of the ", plan.rank,
                  " values that w1 has, but a quant of its type holds ", quant.elems);
  check_argument(op, "w2", w2, ScalarType::Byte, 1, "[bytes]", base);
  check_size(op, "w2", w2, 0, segment_bytes(w2_type, plan.draft_vocab, plan.rank),
             "bytes, what repack() gives for its rows and columns");
  if (d2t) {
    check_argument(op, "d2t", *d2t, ScalarType::Long, 1, "[draft vocab]", base);
    check_size(op, "d2t", *d2t, 0, plan.draft_vocab, "entries, one per column of base");
  } else {
    STD_TORCH_CHECK(plan.draft_vocab <= plan.vocab, op, ": w1 must have a row for each of the ",
                    plan.draft_vocab, " columns of base (or pass d2t), got ", plan.vocab, " rows");
  }
  STD_TORCH_CHECK(weight || !bias, op,
                  ": confidence_weight must be given when confidence_bias is, got None");
  if (weight) {
    check_argument(op, "confidence_weight", *weight, ScalarType::Float, 1,
                   "[hidden + rank] or [hidden]", base);
    plan.confidence_inputs = weight->size(0);
    STD_TORCH_CHECK(
        plan.confidence_inputs == plan.hidden + plan.rank || plan.confidence_inputs == plan.hidden,
        op, ": confidence_weight must have ", plan.hidden + plan.rank, " or ", plan.hidden,
        " entries, got ", plan.confidence_inputs);
    if (bias) {
      check_argument(op, "confidence_bias", *bias, ScalarType::Float, 1, "[1]", base);
      check_size(op, "confidence_bias", *bias, 0, 1, "entry");
    }
  }
  STD_TORCH_CHECK(temperature.has_value() == uniform.has_value(), op, ": ",
                  temperature ? "uniform must be given when temperature is, got None"
                              : "temperature must be given when uniform is, got None");
  if (temperature) check_draws(op, *temperature, *uniform, plan.sequences, plan.slots, base);
  STD_TORCH_CHECK(draft_topk >= 0, op, ": draft_topk must be >= 0 (0 is off), got ", draft_topk);
  check_joint(op, plan, head_type, joint, joint_type, joint_bias, base, segment_bytes);
  plan.tokens = new_empty(base, {plan.sequences, plan.slots}, ScalarType::Long);
  plan.q = temperature ? new_empty(base, base.sizes(), ScalarType::Float)
                       : new_empty(base, {0}, ScalarType::Float);
  plan.confidence = weight ? new_empty(base, {plan.sequences, plan.slots}, ScalarType::Float)
                           : new_empty(base, {0}, ScalarType::Float);
  return plan;
}

}  // namespace dflash
