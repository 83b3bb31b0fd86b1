// The pieces of a row put together, then sink, gate and packing: a thread block per row and 256
// columns.
#pragma once
#include "cuda/attention_pieces.cuh"
#include "gpu/act.cuh"

namespace dflash::cuda {

constexpr int kMergeThreads = kActGroup;
constexpr int kMergeSpans = kLanes;  // looked at together

// Of one head, for the spans that are looked at together.
struct MergeShared {
  float2 ml[kMergeSpans * kSpanChunks];          // of each piece
  float2 within[kMergeSpans * kSpanChunks];      // its weights a, b behind its span's earlier pieces
  float2 between[kMergeSpans];                   // a span's behind the earlier spans
  float most[kMergeSpans];                       // m of a span
};

// Group: what the row is packed as; float: not packed.
template <int kHeadDim, class Group>
__global__ void __launch_bounds__(kMergeThreads) merge_pieces(AttentionView a, AttentionPieces w,
                                                              Group* out) {
  constexpr int kHeads = kActGroup / kHeadDim;
  constexpr int kThreads = kHeadDim;  // of a head
  __shared__ MergeShared heads_shared[kHeads];
  __shared__ int64_t base_shared;
  __shared__ int chunks_shared;
  alignas(16) __shared__ float column[kActGroup];
  gpu::wait_for_earlier();
  gpu::let_next_begin();
  const int tid = int(threadIdx.x), d = tid % kHeadDim, lane = gpu::lane_id();
  const int64_t row = blockIdx.x, head = int64_t(blockIdx.y) * kHeads + tid / kHeadDim;
  MergeShared& shared = heads_shared[tid / kHeadDim];
  const bool there = head < a.heads;

  const auto finish = [&](float value) {
    if constexpr (std::is_same_v<Group, float>) {
      if (there) out[(row * a.heads + head) * kHeadDim + d] = value;
    } else {
      column[tid] = there ? value : 0.f;
      __syncthreads();
      if (tid >= kLanes) return;
      float mine[gpu::kActPerLane];
      for (int i = 0; i < gpu::kActPerLane; ++i) mine[i] = column[lane * gpu::kActPerLane + i];
      gpu::quantize_group(mine, out + row * gridDim.y + blockIdx.y);
    }
  };

  const int64_t s = gpu::sequence_of(a.cu_seqlens, a.sequences, row);
  if (s < 0 || a.lengths[s] == 0) return finish(0.f);
  const SequenceKeys sequence = sequence_keys(a, s);
  if (sequence.rows == 0) return finish(gpu::no_answer());

  if (tid < kLanes) {
    const int chunks = chunks_of_piece(a, w);
    int64_t before = 0;  // pieces of the sequences in front, counted once per row
    for (int64_t other = lane; other < s; other += kLanes) {
      const SequenceKeys keys = sequence_keys(a, other);
      before += int64_t(keys.rows) * keys.pieces(chunks);
    }
    before = gpu::sum_lanes(before);
    if (lane == 0) {
      base_shared = before;
      chunks_shared = chunks;
    }
  }
  __syncthreads();
  const int chunks = chunks_shared, in_span = kSpanChunks / chunks;
  const int own_row = int(row) - sequence.row;
  const KeyRange keys = visible_keys(sequence.length - sequence.rows + own_row, sequence.length,
                                     a.window, a.causal);
  const int first = int(keys.begin / kChunkKeys) / chunks;  // pieces of this row
  const int end = ceil_div(int(ceil_div<int64_t>(keys.end, kChunkKeys)), chunks);
  const auto slot = [&](int piece) {
    return ((base_shared + int64_t(piece - sequence.first / chunks) * sequence.rows + own_row) *
                a.heads +
            head);
  };

  float total = 0.f, l = 0.f, m = 0.f;
  bool exists = false;
  for (int from = first / in_span; from * in_span < end; from += kMergeSpans) {
    // pieces first_piece .. of spans from .. from + kMergeSpans - 1
    const int origin = from * in_span, begin = first > origin ? first : origin;
    const int stop = end < origin + kMergeSpans * in_span ? end : origin + kMergeSpans * in_span;
    __syncthreads();  // the last weights have been used
    if (there)
      for (int p = begin + d; p < stop; p += kThreads) shared.ml[p - origin] = w.ml[slot(p)];
    __syncthreads();
    for (int p = begin + d; p < stop; p += kThreads) {
      const int span_begin = p / in_span * in_span;
      float most = shared.ml[p - origin].x, before = most;
      bool any = false;
      for (int e = span_begin > begin ? span_begin : begin; e < p; ++e) {
        const float other = shared.ml[e - origin].x;
        before = any ? select(other > before, other, before) : other;
        any = true;
      }
      if (any) {
        const MergeWeights weights = merge_weights(before, most);
        most = weights.m;
        shared.within[p - origin] = {weights.a, weights.b};
      }
      if (p + 1 == stop || (p + 1) % in_span == 0) shared.most[p / in_span - from] = most;
    }
    __syncthreads();
    if (d < kLanes) {
      // the largest m of the spans up to each: a maximum has no order
      const int spans = ceil_div(stop, in_span) - from;
      const float mine = d < spans ? shared.most[d] : shared.most[spans - 1];
      float upto = mine;
      for (int step = 1; step < kLanes; step *= 2) {
        const float other = gpu::from_lane(upto, lane - step < 0 ? lane : lane - step);
        upto = select(other > upto, other, upto);
      }
      if (exists) upto = select(m > upto, m, upto);
      float before = gpu::from_lane(upto, lane == 0 ? 0 : lane - 1);
      if (lane == 0) before = m;
      const MergeWeights weights = merge_weights(before, mine);
      shared.between[d] = {weights.a, weights.b};
      shared.most[d] = upto;
    }
    __syncthreads();
    if (!there) continue;
    m = shared.most[kMergeSpans - 1];
    const float* o = w.o + slot(begin) * kHeadDim + d;
    const int64_t next = int64_t(sequence.rows) * a.heads * kHeadDim;
    for (int p = begin; p < stop;) {
      const int span = p / in_span - from;
      float value[kSpanChunks];
      int count = 0;
      for (int i = 0; i < kSpanChunks; ++i)
        if (p + i < stop && (p + i) / in_span - from == span) {
          value[i] = o[i * next];
          count = i + 1;
        }
      float span_o = value[0], span_l = shared.ml[p - origin].y;
      for (int i = 1; i < kSpanChunks; ++i)
        if (i < count) {
          const float2 weights = shared.within[p + i - origin];
          span_o = merge_value(span_o, weights.x, value[i], weights.y);
          span_l = merge_value(span_l, weights.x, shared.ml[p + i - origin].y, weights.y);
        }
      if (exists) {
        const float2 weights = shared.between[span];
        total = merge_value(total, weights.x, span_o, weights.y);
        l = merge_value(l, weights.x, span_l, weights.y);
      } else {
        total = span_o;
        l = span_l;
        exists = true;
      }
      p += count;
      o += count * next;
    }
  }
  float value = 0.f;
  if (there) {
    float shrink = 1.f;
    if (a.sinks) {
      const MergeWeights weights = merge_weights(m, a.sinks[head]);
      l = merge_value(l, weights.a, 1.f, weights.b);
      shrink = weights.a;
    }
    value = attention_output(mul(total, shrink), l, a.value_scale);
    if (a.gate) value = gated(value, a.gate[row * a.gate_row + head * a.gate_head + d]);
  }
  finish(value);
}

}  // namespace dflash::cuda
