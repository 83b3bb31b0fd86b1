// What csrc/cpu/attention.cpp hands to the kernels of attention.inl. Free of torch.
#pragma once
#include <cstdint>

#include "core/float_type.h"

namespace dflash::cpu {

// Consecutive rows of one sequence and the query heads of one KV head. Its queries are numbered
// row by row: query j is row j / group, head kv_head * group + j % group.
struct AttentionBlock {
  int64_t sequence, kv_head, row, rows;
  int64_t position, length;        // of the first row; keys of the sequence
  int64_t chunk_begin, chunk_end;  // chunks of which some row sees a key
  float* partial;                  // [queries][chunks][2 + padded head_dim]: m, l, o; or null
};

struct AttentionArgs {
  FloatType type;
  const float* q;             // [rows, heads, head_dim]
  const void* k;              // [cache rows, kv_heads, head_dim]
  const void* v;              // like k
  const int32_t* page_table;  // [sequences, table_pages]
  int64_t table_pages, page_size;
  int64_t heads, kv_heads, head_dim, window;
  float scale, value_scale;
  bool causal;
  const float* sinks;  // [heads] or null
  const float* gate;   // [rows, heads, head_dim], strides free; or null
  int64_t gate_row, gate_head;
  float* out;  // [rows, heads, head_dim]

  int64_t group() const { return heads / kv_heads; }
  int64_t padded() const { return (head_dim + 15) / 16 * 16; }
};

// whole: every chunk of a block and its output; scratch: 2 * padded floats a query.
// chunk: one chunk of a block into its partial; merge: a block's output from its partials.
// pack_rows: float rows [begin, end) as packed activations.
#define DFLASH_ATTENTION_KERNELS                                                                \
  void attend_whole(const AttentionArgs& args, const AttentionBlock& block, float* scratch);    \
  void attend_chunk(const AttentionArgs& args, const AttentionBlock& block, int64_t chunk);     \
  void attend_merge(const AttentionArgs& args, const AttentionBlock& block, float* scratch);    \
  void pack_rows(const float* x, int64_t columns, int64_t begin, int64_t end, int64_t act_mode, \
                 uint8_t* packed);

namespace avx2 {
DFLASH_ATTENTION_KERNELS
}
namespace avx512 {
DFLASH_ATTENTION_KERNELS
}
#undef DFLASH_ATTENTION_KERNELS

}  // namespace dflash::cpu
