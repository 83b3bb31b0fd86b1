// Checks and outputs of block_attention.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cmath>
#include <optional>

#include "host/act.h"
#include "host/check.h"
#include "host/dispatch.h"

namespace dflash {

struct AttentionPlan {
  int64_t rows, heads, kv_heads, head_dim;
  int64_t sequences, table_pages;  // page_table [sequences, table_pages]
  int64_t pages, page_size;
  int64_t window;
  float scale, value_scale;
  bool causal;
  std::array<int64_t, 2> gate_stride;
  Tensor out;  // activations [rows, heads * head_dim]

  int64_t capacity() const { return table_pages * page_size; }  // keys a sequence can have
};

inline AttentionPlan plan_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                    const Tensor& page_table, const Tensor& lengths,
                                    const Tensor& cu_seqlens, double scale, int64_t window,
                                    bool causal, const std::optional<Tensor>& sinks,
                                    const std::optional<Tensor>& gate, double value_scale,
                                    int64_t act_mode) {
  constexpr const char* op = "dflash::block_attention";
  AttentionPlan plan{};
  check_dim(op, "q", q, 3, "[rows, heads, head_dim]");
  plan.rows = q.size(0);
  plan.heads = q.size(1);
  plan.head_dim = q.size(2);
  check_dtype(op, "q", q, {ScalarType::Float});
  check_contiguous(op, "q", q);
  STD_TORCH_CHECK(plan.heads >= 1 && plan.head_dim >= 1, op,
                  ": q must be [rows, heads, head_dim] with heads, got shape ", shape_str(q));

  check_dim(op, "k_cache", k_cache, 4, "[pages, page_size, kv_heads, head_dim]");
  plan.pages = k_cache.size(0);
  plan.page_size = k_cache.size(1);
  plan.kv_heads = k_cache.size(2);
  check_tensor(op, "k_cache", k_cache, {plan.pages, plan.page_size, plan.kv_heads, plan.head_dim},
               "[pages, page_size, kv_heads, head_dim]", kFloatTypes, q);
  check_tensor(op, "v_cache", v_cache, {plan.pages, plan.page_size, plan.kv_heads, plan.head_dim},
               "[pages, page_size, kv_heads, head_dim] like k_cache", {k_cache.scalar_type()}, q);
  STD_TORCH_CHECK(plan.page_size >= 1, op, ": k_cache must have a page_size >= 1, got shape ",
                  shape_str(k_cache));
  STD_TORCH_CHECK(plan.kv_heads >= 1 && plan.heads % plan.kv_heads == 0, op, ": q must have a ",
                  "multiple of the cache's ", plan.kv_heads, " heads, got ", plan.heads);

  check_dim(op, "page_table", page_table, 2, "[sequences, pages of one]");
  plan.sequences = page_table.size(0);
  plan.table_pages = page_table.size(1);
  check_tensor(op, "page_table", page_table, {plan.sequences, plan.table_pages},
               "[sequences, pages of one]", {ScalarType::Int}, q);
  check_tensor(op, "lengths", lengths, {plan.sequences}, "[sequences]", {ScalarType::Int}, q);
  check_tensor(op, "cu_seqlens", cu_seqlens, {plan.sequences + 1}, "[sequences + 1]",
               {ScalarType::Int}, q);
  STD_TORCH_CHECK(std::isfinite(scale), op, ": scale must be finite, got ", scale);
  STD_TORCH_CHECK(std::isfinite(value_scale), op, ": value_scale must be finite, got ",
                  value_scale);
  STD_TORCH_CHECK(window >= 0, op, ": window must be >= 0 (0: none), got ", window);
  plan.scale = float(scale);
  plan.value_scale = float(value_scale);
  plan.window = window;
  plan.causal = causal;
  if (sinks) check_tensor(op, "sinks", *sinks, {plan.heads}, "[heads]", {ScalarType::Float}, q);
  if (gate) {
    check_shape(op, "gate", *gate, {plan.rows, plan.heads, plan.head_dim},
                "[rows, heads, head_dim] like q");
    check_dtype(op, "gate", *gate, {ScalarType::Float});
    check_same_device(op, "gate", *gate, q);
    STD_TORCH_CHECK(gate->stride(2) == 1 || plan.head_dim == 1, op,
                    ": gate must be dense in its last dimension, got stride ", gate->stride(2));
    plan.gate_stride = {gate->stride(0), gate->stride(1)};
  }
  plan.out = new_activations(op, q, plan.rows, plan.heads * plan.head_dim, act_mode);
  return plan;
}

}  // namespace dflash
