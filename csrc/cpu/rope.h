// What csrc/cpu/rope.cpp hands to the kernel of rope.inl. Free of torch; strides count elements.
#pragma once
#include <cstdint>

#include "core/float_type.h"

namespace dflash::cpu {

struct RopeArgs {
  FloatType type;
  const float *q, *k, *v;  // [rows, heads, head_dim]; q may be null
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float *q_weight, *k_weight;  // [head_dim] or null: no norm
  float eps, attention_scaling;
  bool plus_one;
  const int64_t* positions;  // [position_axes, rows]
  const float* inv_freq;     // [frequencies]
  const int64_t* slots;      // [rows], < 0: not stored
  void *k_cache, *v_cache;   // [cache rows, kv_heads, head_dim]
  float* out;                // [rows, q_heads, head_dim]
  int64_t rows, q_heads, kv_heads, head_dim, frequencies, height, width, position_axes;
};

// Rows [begin, end); scratch: 2 * frequencies + head_dim + 32 floats.
namespace avx2 {
void rope_rows(const RopeArgs& args, int64_t begin, int64_t end, float* scratch);
}
namespace avx512 {
void rope_rows(const RopeArgs& args, int64_t begin, int64_t end, float* scratch);
}

}  // namespace dflash::cpu
