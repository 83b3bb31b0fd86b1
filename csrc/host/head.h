// Checks and outputs of head_topk.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "host/check.h"

namespace dflash {

struct TopkPlan {
  int64_t rows, vocabulary, k;
  float multiplier, softcap;
  Tensor values, ids;  // float32, int64 [rows, k]
};

inline TopkPlan plan_head_topk(const Tensor& logits, int64_t k, double multiplier, double softcap) {
  constexpr const char* op = "dflash::head_topk";
  check_dim(op, "logits", logits, 2, "[rows, vocabulary]");
  check_dtype(op, "logits", logits, {ScalarType::Float});
  check_contiguous(op, "logits", logits);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  STD_TORCH_CHECK(vocabulary <= 0x7fffffff, op, ": logits must have fewer than 2^31 columns, got ",
                  vocabulary);
  STD_TORCH_CHECK(k >= 1 && k <= vocabulary, op, ": k must be 1 .. ", vocabulary,
                  " (the columns of logits), got ", k);
  STD_TORCH_CHECK(std::isfinite(multiplier) && float(multiplier) > 0, op,
                  ": multiplier must be finite and > 0 (1: none), got ", multiplier);
  STD_TORCH_CHECK(std::isfinite(softcap) && softcap >= 0, op,
                  ": softcap must be finite and >= 0 (0: none), got ", softcap);
  return {rows,
          vocabulary,
          k,
          float(multiplier),
          float(softcap),
          new_empty(logits, {rows, k}, ScalarType::Float),
          new_empty(logits, {rows, k}, ScalarType::Long)};
}

}  // namespace dflash
