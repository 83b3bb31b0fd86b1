// Block attention, a thread block per row and head: chunks of 256 keys one after the other, in the
// order of core/attention.h.
#pragma once
#include "core/attention.h"
#include "core/float_type.h"
#include "core/mask.h"
#include "gpu/sequence.cuh"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int kAttentionThreads = kChunkKeys, kMaxHeadDim = 1024;
constexpr int kDimsPerThread = kMaxHeadDim / kAttentionThreads;

struct AttentionView {
  const float* q;             // [rows, heads, head_dim]
  const void* k;              // [pages, page_size, kv_heads, head_dim]
  const void* v;              // like k
  const int32_t* page_table;  // [sequences, table_pages]
  const int32_t* lengths;     // [sequences]
  const int32_t* cu_seqlens;  // [sequences + 1]
  const float* sinks;         // [heads] or null
  const float* gate;          // [rows, heads, head_dim], strides free; or null
  int64_t gate_row, gate_head;
  int64_t rows, sequences, table_pages, pages, page_size, heads, kv_heads, head_dim, window;
  float scale, value_scale;
  bool causal;
  float* out;  // [rows, heads, head_dim]
};

// m, l and this thread's dims of o, over some keys.
struct AttentionPiece {
  float m, l, o[kDimsPerThread];
  bool exists = false;

  __device__ void merge(const AttentionPiece& next) {
    if (!exists) {
      *this = next;
      return;
    }
    const MergeWeights w = merge_weights(m, next.m);
    m = w.m;
    l = merge_value(l, w.a, next.l, w.b);
    for (int i = 0; i < kDimsPerThread; ++i) o[i] = merge_value(o[i], w.a, next.o[i], w.b);
  }
};

template <class T>
__global__ void block_attention(AttentionView a) {
  __shared__ float probability[kChunkKeys];
  __shared__ int64_t offset[kChunkKeys];  // of each visible key, in elements
  __shared__ float chunk_m, chunk_l;
  __shared__ int bad_page;
  const int tid = int(threadIdx.x), warp = tid / kLanes, lane = lane_id();
  const int64_t row = blockIdx.x, head = blockIdx.y, dim = a.head_dim;
  const float* q = a.q + (row * a.heads + head) * dim;
  float* out = a.out + (row * a.heads + head) * dim;
  const auto fill = [&](float value) {
    for (int64_t d = tid; d < dim; d += kAttentionThreads) out[d] = value;
  };

  const int64_t s = sequence_of(a.cu_seqlens, a.sequences, row);
  if (s < 0 || a.lengths[s] == 0) return fill(0.f);
  const RowRange own = rows_of(a.cu_seqlens, s, a.rows);
  const int64_t length = a.lengths[s], count = own.end - own.begin;
  if (!own.valid || length < count || length > a.table_pages * a.page_size)
    return fill(no_answer());
  const KeyRange keys = visible_keys(length - count + row - own.begin, length, a.window, a.causal);
  if (tid == 0) bad_page = 0;

  const int64_t kv_head = head / (a.heads / a.kv_heads);
  const T* k_cache = static_cast<const T*>(a.k) + kv_head * dim;
  const T* v_cache = static_cast<const T*>(a.v) + kv_head * dim;
  AttentionPiece span, total;
  for (int64_t chunk = keys.begin / kChunkKeys; chunk * kChunkKeys < keys.end; ++chunk) {
    const int64_t start = chunk * kChunkKeys;
    const int begin = int(keys.begin > start ? keys.begin - start : 0);
    const int end = int(keys.end < start + kChunkKeys ? keys.end - start : kChunkKeys);
    const bool visible = tid >= begin && tid < end;
    __syncthreads();  // the last chunk's shared values have been read
    if (visible) {
      const int64_t position = start + tid;
      int64_t page = a.page_table[s * a.table_pages + position / a.page_size];
      if (page < 0 || page >= a.pages) {
        bad_page = 1;
        page = 0;
      }
      offset[tid] = (page * a.page_size + position % a.page_size) * a.kv_heads * dim;
    }
    __syncthreads();
    if (bad_page) return fill(no_answer());  // the whole block sees the same flag

    for (int key = begin + warp; key < end; key += kAttentionThreads / kLanes) {
      const T* at = k_cache + offset[key];
      const float score = warp_dot(
          dim, [&](int64_t d) { return q[d]; }, [&](int64_t d) { return to_float(at[d]); });
      if (lane == 0) probability[key] = mul(score, a.scale);
    }
    __syncthreads();
    if (warp == 0) {
      float m = probability[begin];
      for (int key = begin + lane; key < end; key += kLanes)
        m = select(probability[key] > m, probability[key], m);
      m = max_lanes(m);
      if (lane == 0) chunk_m = m;
    }
    __syncthreads();
    const float p = visible ? exp(probability[tid] - chunk_m) : 0.f;
    probability[tid] = p;
    __syncthreads();
    if (warp == 0) {
      float acc[kPerLane];
      for (int j = 0; j < kPerLane; ++j)
        acc[j] =
            probability[kPerLane * lane + j] + probability[kAccumulators + kPerLane * lane + j];
      const float l = fold_lanes(acc);
      if (lane == 0) chunk_l = l;
    }
    __syncthreads();
    AttentionPiece piece;
    piece.exists = true;
    piece.m = chunk_m;
    piece.l = chunk_l;
    for (int i = 0; i < kDimsPerThread; ++i) {
      const int64_t d = tid + i * kAttentionThreads;
      piece.o[i] = 0.f;
      if (d < dim)
        for (int key = begin; key < end; ++key)
          piece.o[i] = fma(probability[key], to_float(v_cache[offset[key] + d]), piece.o[i]);
    }
    if (chunk % kSpanChunks == 0 && span.exists) {
      total.merge(span);
      span.exists = false;
    }
    span.merge(piece);
  }
  if (span.exists) total.merge(span);
  if (!total.exists) return fill(0.f);

  float shrink = 1.f;
  if (a.sinks) {
    const MergeWeights w = merge_weights(total.m, a.sinks[head]);
    total.l = merge_value(total.l, w.a, 1.f, w.b);
    shrink = w.a;
  }
  for (int i = 0; i < kDimsPerThread; ++i) {
    const int64_t d = tid + i * kAttentionThreads;
    if (d >= dim) break;
    const float o = attention_output(mul(total.o[i], shrink), total.l, a.value_scale);
    out[d] = a.gate ? gated(o, a.gate[row * a.gate_row + head * a.gate_head + d]) : o;
  }
}

}  // namespace dflash::gpu
