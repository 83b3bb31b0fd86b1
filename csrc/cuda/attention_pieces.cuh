// How block_attention is cut into pieces: agreed on by the kernel that attends and the one that
// merges. Sums have their order from core/attention.h however it is cut.
#pragma once
#include "gpu/attention.cuh"

namespace dflash::cuda {

using gpu::AttentionView;

// A piece is a chunk, or a span where there are many; each row has one m, l and o per head of each
// of its pieces, and they lie one after the other as the pieces, rows and heads do.
struct AttentionPieces {
  int most_chunks;  // up to so many, counted once per row, a piece is a chunk
  int window;       // the view's; one behind all keys is none
  float* o;         // [slots, head_dim]
  float2* ml;       // [slots]: m, l
};
constexpr int kMostKeys = 1 << 30;  // of a sequence, so that positions and windows are ints

// What the rows of one sequence see together.
struct SequenceKeys {
  int row, rows, length;
  int first, end;  // chunks

  __device__ int pieces(int chunks) const {
    return rows == 0 ? 0 : ceil_div(end, chunks) - first / chunks;
  }
  // Of row `own` of the sequence.
  __device__ Keys<int> seen(const AttentionView& a, const AttentionPieces& w, int own) const {
    return visible_keys(length - rows + own, length, w.window, a.causal);
  }
};

// No rows: they are none, or the sequence is one that the CPU refuses.
__device__ inline SequenceKeys sequence_keys(const AttentionView& a, const AttentionPieces& w,
                                             int64_t s) {
  const int begin = a.cu_seqlens[s], end = a.cu_seqlens[s + 1], length = a.lengths[s];
  SequenceKeys keys = {begin, end - begin, length, 0, 0};
  if (begin < 0 || end <= begin || end > a.rows || length < keys.rows ||
      length > a.table_pages * a.page_size)
    return {begin, 0, 0, 0, 0};
  keys.first = keys.seen(a, w, 0).begin / kChunkKeys;
  keys.end = ceil_div(keys.seen(a, w, keys.rows - 1).end, kChunkKeys);
  return keys;
}

// Chunks of a piece: 1 or kSpanChunks. By a whole warp.
__device__ inline int chunks_of_piece(const AttentionView& a, const AttentionPieces& w) {
  int64_t count = 0;
  for (int64_t s = gpu::lane_id(); s < a.sequences; s += kLanes) {
    const SequenceKeys keys = sequence_keys(a, w, s);
    count += int64_t(keys.rows) * (keys.end - keys.first);
  }
  return gpu::sum_lanes(count) <= w.most_chunks ? 1 : kSpanChunks;
}

}  // namespace dflash::cuda
