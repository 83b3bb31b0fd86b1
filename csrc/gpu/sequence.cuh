// Sequences back to back: whose row is it?
#pragma once
#include "core/hd.h"

namespace dflash::gpu {

struct RowRange {
  int64_t begin, end;
  bool valid;  // offsets ascend within the batch
};

__device__ inline RowRange rows_of(const int32_t* cu_seqlens, int64_t sequence, int64_t rows) {
  const int64_t begin = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
  if (0 <= begin && begin <= end && end <= rows) return {begin, end, true};
  const int64_t from = begin < 0 ? 0 : begin > rows ? rows : begin;
  const int64_t to = end < from ? from : end > rows ? rows : end;
  return {from, to, false};
}

// The sequence of a row, or -1 behind the last one.
__device__ inline int64_t sequence_of(const int32_t* cu_seqlens, int64_t sequences, int64_t row) {
  int64_t low = 0, high = sequences;  // the last sequence that begins at or before the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return sequences > 0 && row >= cu_seqlens[low] && row < cu_seqlens[low + 1] ? low : -1;
}

}  // namespace dflash::gpu
