// Checks and outputs of qk_norm_rope_store.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "host/check.h"
#include "host/dispatch.h"

namespace dflash {

// What the kernel needs to know; strides count elements.
struct RopePlan {
  int64_t rows, q_heads, kv_heads, head_dim, frequencies;
  int64_t height, width;  // M-RoPE sections; 0: every frequency turns with the temporal position
  int64_t position_axes;  // 1 or 3
  int64_t cache_rows;     // slots run from 0 to cache_rows - 1
  std::array<int64_t, 2> q_stride, k_stride, v_stride;
  Tensor out;  // float32 [rows, q_heads, head_dim], or [0] without q
};

namespace rope_checks {

constexpr const char* kOp = "dflash::qk_norm_rope_store";

inline std::array<int64_t, 2> heads(const char* arg, const Tensor& t, const Tensor& like,
                                    int64_t rows, int64_t heads, int64_t head_dim) {
  check_shape(kOp, arg, t, {rows, heads, head_dim}, "[rows, heads, head_dim]");
  check_dtype(kOp, arg, t, {ScalarType::Float});
  check_same_device(kOp, arg, t, like);
  STD_TORCH_CHECK(t.stride(2) == 1 || head_dim == 1, kOp, ": ", arg,
                  " must be dense in its last dimension, got stride ", t.stride(2));
  return {t.stride(0), t.stride(1)};
}

inline void sections(const std::vector<int64_t>& given, RopePlan& plan) {
  plan.height = plan.width = 0;
  if (given.empty()) return;
  STD_TORCH_CHECK(given.size() == 3 || (given.size() == 4 && given[3] == 0), kOp,
                  ": sections must be [temporal, height, width], got ", given.size(),
                  " of them (a fourth must be 0)");
  for (int64_t s : given) STD_TORCH_CHECK(s >= 0, kOp, ": sections must not be negative, got ", s);
  STD_TORCH_CHECK((given[1] == 0 || 3 * given[1] - 2 < plan.frequencies) &&
                      (given[2] == 0 || 3 * given[2] - 1 < plan.frequencies),
                  kOp, ": sections must interleave within ", plan.frequencies,
                  " frequencies, got height ", given[1], ", width ", given[2]);
  plan.height = given[1];
  plan.width = given[2];
}

}  // namespace rope_checks

inline RopePlan plan_rope(const std::optional<Tensor>& q, const Tensor& k, const Tensor& v,
                          const std::optional<Tensor>& q_weight,
                          const std::optional<Tensor>& k_weight, double eps,
                          const Tensor& positions, const Tensor& inv_freq, double attention_scaling,
                          const std::vector<int64_t>& sections, const Tensor& slots,
                          const Tensor& k_cache, const Tensor& v_cache) {
  constexpr const char* op = rope_checks::kOp;
  RopePlan plan{};
  check_dim(op, "k", k, 3, "[rows, kv_heads, head_dim]");
  plan.rows = k.size(0);
  plan.kv_heads = k.size(1);
  plan.head_dim = k.size(2);
  STD_TORCH_CHECK(plan.head_dim >= 1 && plan.kv_heads >= 1, op,
                  ": k must be [rows, kv_heads, head_dim] with heads, got shape ", shape_str(k));
  plan.k_stride = rope_checks::heads("k", k, k, plan.rows, plan.kv_heads, plan.head_dim);
  plan.v_stride = rope_checks::heads("v", v, k, plan.rows, plan.kv_heads, plan.head_dim);
  if (q) {
    check_dim(op, "q", *q, 3, "[rows, heads, head_dim]");
    plan.q_heads = q->size(1);
    plan.q_stride = rope_checks::heads("q", *q, k, plan.rows, plan.q_heads, plan.head_dim);
  }
  STD_TORCH_CHECK(q || !q_weight, op, ": q_weight must be absent without q");
  if (q_weight)
    check_tensor(op, "q_weight", *q_weight, {plan.head_dim}, "[head_dim]", {ScalarType::Float}, k);
  if (k_weight)
    check_tensor(op, "k_weight", *k_weight, {plan.head_dim}, "[head_dim]", {ScalarType::Float}, k);
  STD_TORCH_CHECK(std::isfinite(eps) && eps >= 0, op, ": eps must be finite and >= 0, got ", eps);

  check_dim(op, "inv_freq", inv_freq, 1, "[frequencies]");
  plan.frequencies = inv_freq.size(0);
  check_tensor(op, "inv_freq", inv_freq, {plan.frequencies}, "[frequencies]", {ScalarType::Float},
               k);
  STD_TORCH_CHECK(2 * plan.frequencies <= plan.head_dim, op, ": inv_freq must have at most ",
                  plan.head_dim / 2, " frequencies (head_dim / 2), got ", plan.frequencies);
  STD_TORCH_CHECK(std::isfinite(attention_scaling) && attention_scaling > 0, op,
                  ": attention_scaling must be finite and > 0, got ", attention_scaling);
  rope_checks::sections(sections, plan);
  STD_TORCH_CHECK(positions.dim() == 1 || positions.dim() == 2, op,
                  ": positions must be [rows] or [3, rows], got shape ", shape_str(positions));
  plan.position_axes = positions.dim() == 1 ? 1 : 3;
  if (positions.dim() == 1)
    check_tensor(op, "positions", positions, {plan.rows}, "[rows]", {ScalarType::Long}, k);
  else
    check_tensor(op, "positions", positions, {3, plan.rows}, "[3, rows]", {ScalarType::Long}, k);
  STD_TORCH_CHECK(positions.dim() == 1 || !sections.empty(), op,
                  ": positions must be [rows] when sections is empty, got shape ",
                  shape_str(positions));
  check_tensor(op, "slots", slots, {plan.rows}, "[rows]", {ScalarType::Long}, k);

  check_dim(op, "k_cache", k_cache, 4, "[pages, page_size, kv_heads, head_dim]");
  const int64_t pages = k_cache.size(0), page_size = k_cache.size(1);
  plan.cache_rows = pages * page_size;
  check_tensor(op, "k_cache", k_cache, {pages, page_size, plan.kv_heads, plan.head_dim},
               "[pages, page_size, kv_heads, head_dim]", kFloatTypes, k);
  check_tensor(op, "v_cache", v_cache, {pages, page_size, plan.kv_heads, plan.head_dim},
               "[pages, page_size, kv_heads, head_dim] like k_cache", {k_cache.scalar_type()}, k);
  plan.out = q ? new_empty(k, {plan.rows, plan.q_heads, plan.head_dim}, ScalarType::Float)
               : new_empty(k, {0}, ScalarType::Float);
  return plan;
}

}  // namespace dflash
