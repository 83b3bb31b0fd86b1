// How block_attention is cut into pieces: agreed on by the kernel that attends and the one that
// merges. Sums have their order from core/attention.h however it is cut.
#pragma once
#include "gpu/attention.cuh"

namespace dflash::cuda {

using gpu::AttentionView;

// A piece is a chunk, or a span where there are many; each row has one m, l and o per head of each
// of its pieces, and they lie one after the other as the pieces, rows and heads do.
struct AttentionPieces {
  int64_t most_chunks;  // up to so many, counted once per row, a piece is a chunk
  float* o;             // [slots, head_dim]
  float2* ml;           // [slots]: m, l
};

// What the rows of one sequence see together.
struct SequenceKeys {
  int row, rows, length;
  int first, end;  // chunks

  __device__ int pieces(int chunks) const {
    return rows == 0 ? 0 : ceil_div(end, chunks) - first / chunks;
  }
};

// No rows: they are none, or the sequence is one that the CPU refuses.
__device__ inline SequenceKeys sequence_keys(const AttentionView& a, int64_t s) {
  const gpu::RowRange own = gpu::rows_of(a.cu_seqlens, s, a.rows);
  const int64_t rows = own.end - own.begin, length = a.lengths[s];
  if (!own.valid || length < rows || length > a.table_pages * a.page_size || rows == 0)
    return {int(own.begin), 0, 0, 0, 0};
  const KeyRange first = visible_keys(length - rows, length, a.window, a.causal);
  const KeyRange last = visible_keys(length - 1, length, a.window, a.causal);
  return {int(own.begin), int(rows), int(length), int(first.begin / kChunkKeys),
          int(ceil_div<int64_t>(last.end, kChunkKeys))};
}

// Chunks of a piece: 1 or kSpanChunks. By a whole warp.
__device__ inline int chunks_of_piece(const AttentionView& a, const AttentionPieces& w) {
  int64_t count = 0;
  for (int64_t s = gpu::lane_id(); s < a.sequences; s += kLanes) {
    const SequenceKeys keys = sequence_keys(a, s);
    count += int64_t(keys.rows) * (keys.end - keys.first);
  }
  return gpu::sum_lanes(count) <= w.most_chunks ? 1 : kSpanChunks;
}

}  // namespace dflash::cuda
