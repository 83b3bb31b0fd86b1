// Checks and outputs of the sampling and acceptance operators.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "core/random.h"
#include "host/argument.h"

namespace dflash {

struct UniformPlan {
  int64_t count;
  Tensor out;  // float32, the shape of seeds
};

inline UniformPlan plan_uniform(const Tensor& seeds, const Tensor& positions, int64_t stream) {
  constexpr const char* op = "dflash::uniform";
  check_dtype(op, "seeds", seeds, {ScalarType::Long});
  check_dtype(op, "positions", positions, {ScalarType::Long});
  bool same = seeds.dim() == positions.dim();
  for (int64_t d = 0; same && d < seeds.dim(); ++d) same = seeds.size(d) == positions.size(d);
  STD_TORCH_CHECK(same, op, ": positions must have the shape of seeds ", shape_str(seeds), ", got ",
                  shape_str(positions));
  STD_TORCH_CHECK(seeds.is_contiguous() && positions.is_contiguous(), op,
                  ": seeds and positions must be contiguous; call .contiguous()");
  check_same_device(op, "positions", positions, seeds);
  STD_TORCH_CHECK(stream >= 0 && stream < kStreams, op,
                  ": stream must be 0 (target), 1 (draft) or 2 (acceptance), got ", stream);
  return {seeds.numel(), new_empty(seeds, seeds.sizes(), ScalarType::Float)};
}

struct SamplingProbsPlan {
  int64_t rows, vocab;
  Tensor out;  // float32 [rows, vocab]
};

inline SamplingProbsPlan plan_sampling_probs(const Tensor& logits, const Tensor& temperature,
                                             const Tensor& top_k, const Tensor& top_p) {
  constexpr const char* op = "dflash::sampling_probs";
  check_argument(op, "logits", logits, ScalarType::Float, 2, "[rows, vocab]", logits);
  STD_TORCH_CHECK(logits.size(1) > 0, op, ": logits must have at least one column");
  check_argument(op, "temperature", temperature, ScalarType::Float, 1, "[rows]", logits);
  check_argument(op, "top_k", top_k, ScalarType::Long, 1, "[rows]", logits);
  check_argument(op, "top_p", top_p, ScalarType::Float, 1, "[rows]", logits);
  const int64_t rows = logits.size(0);
  check_size(op, "temperature", temperature, 0, rows, "entries, one per row of logits");
  check_size(op, "top_k", top_k, 0, rows, "entries, one per row of logits");
  check_size(op, "top_p", top_p, 0, rows, "entries, one per row of logits");
  return {rows, logits.size(1), new_empty(logits, {rows, logits.size(1)}, ScalarType::Float)};
}

struct CategoricalPlan {
  int64_t rows, vocab;
  Tensor out;  // int64 [rows]
};

inline CategoricalPlan plan_categorical(const Tensor& probs, const Tensor& uniform) {
  constexpr const char* op = "dflash::categorical";
  check_argument(op, "probs", probs, ScalarType::Float, 2, "[rows, vocab]", probs);
  check_argument(op, "uniform", uniform, ScalarType::Float, 1, "[rows]", probs);
  check_size(op, "uniform", uniform, 0, probs.size(0), "entries, one per row of probs");
  return {probs.size(0), probs.size(1), new_empty(probs, {probs.size(0)}, ScalarType::Long)};
}

struct AcceptPlan {
  int64_t sequences, tokens, vocab, candidates;  // candidates: the last dimension of q, 0 without
  Tensor length, next;                           // int32 [S], int64 [S]
};

inline AcceptPlan plan_proposal(const char* op, const Tensor& draft, const Tensor& offered) {
  check_argument(op, "draft", draft, ScalarType::Long, 2, "[sequences, tokens]", draft);
  check_argument(op, "offered", offered, ScalarType::Int, 1, "[sequences]", draft);
  const int64_t sequences = draft.size(0);
  check_size(op, "offered", offered, 0, sequences, "entries, one per sequence of draft");
  return {sequences,
          draft.size(1),
          0,
          0,
          new_empty(draft, {sequences}, ScalarType::Int),
          new_empty(draft, {sequences}, ScalarType::Long)};
}

inline AcceptPlan plan_accept(const Tensor& draft, const Tensor& offered, const Tensor& probs,
                              const std::optional<Tensor>& q_ids, const std::optional<Tensor>& q,
                              const Tensor& uniform, const Tensor& bonus_uniform) {
  constexpr const char* op = "dflash::accept";
  AcceptPlan plan = plan_proposal(op, draft, offered);
  check_argument(op, "probs", probs, ScalarType::Float, 3, "[sequences, tokens + 1, vocab]", draft);
  check_size(op, "probs", probs, 0, plan.sequences, "sequences, as draft has");
  check_size(op, "probs", probs, 1, plan.tokens + 1, "rows per sequence, one more than draft");
  plan.vocab = probs.size(2);
  STD_TORCH_CHECK(plan.vocab > 0, op, ": probs must have at least one column");
  STD_TORCH_CHECK(!q_ids || q, op, ": q must be given when q_ids is, got None");
  if (q) {
    check_argument(op, "q", *q, ScalarType::Float, 3, "[sequences, tokens, vocab or candidates]",
                   draft);
    check_size(op, "q", *q, 0, plan.sequences, "sequences, as draft has");
    check_size(op, "q", *q, 1, plan.tokens, "rows per sequence, as draft has");
    plan.candidates = q->size(2);
    if (q_ids) {
      check_argument(op, "q_ids", *q_ids, ScalarType::Long, 3, "[sequences, tokens, candidates]",
                     draft);
      for (int64_t d = 0; d < 3; ++d)
        check_size(op, "q_ids", *q_ids, d, q->size(d), "entries there, as q has");
    } else {
      check_size(op, "q", *q, 2, plan.vocab, "columns, as probs has (or pass q_ids)");
    }
  }
  check_argument(op, "uniform", uniform, ScalarType::Float, 2, "[sequences, tokens]", draft);
  check_size(op, "uniform", uniform, 0, plan.sequences, "sequences, as draft has");
  check_size(op, "uniform", uniform, 1, plan.tokens, "columns, as draft has");
  check_argument(op, "bonus_uniform", bonus_uniform, ScalarType::Float, 2,
                 "[sequences, tokens + 1]", draft);
  check_size(op, "bonus_uniform", bonus_uniform, 0, plan.sequences, "sequences, as draft has");
  check_size(op, "bonus_uniform", bonus_uniform, 1, plan.tokens + 1,
             "columns, one more than draft");
  return plan;
}

inline AcceptPlan plan_accept_greedy(const Tensor& draft, const Tensor& offered,
                                     const Tensor& target_ids) {
  constexpr const char* op = "dflash::accept_greedy";
  const AcceptPlan plan = plan_proposal(op, draft, offered);
  check_argument(op, "target_ids", target_ids, ScalarType::Long, 2, "[sequences, tokens + 1]",
                 draft);
  check_size(op, "target_ids", target_ids, 0, plan.sequences, "sequences, as draft has");
  check_size(op, "target_ids", target_ids, 1, plan.tokens + 1, "columns, one more than draft");
  return plan;
}

}  // namespace dflash
