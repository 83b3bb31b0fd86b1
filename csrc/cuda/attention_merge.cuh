// The pieces of a row put together, then sink, gate and packing: a thread block per row and 256
// columns.
#pragma once
#include "cuda/attention_pieces.cuh"
#include "cuda/cluster.cuh"
#include "gpu/act.cuh"

namespace dflash::cuda {

constexpr int kMergeThreads = kActGroup;
constexpr int kMergeSpans = kLanes;  // looked at together

// Of one head, for the spans that are looked at together.
struct MergeShared {
  float2 ml[kMergeSpans * kSpanChunks];      // of each piece
  float2 within[kMergeSpans * kSpanChunks];  // its weights a, b behind its span's earlier pieces
  float2 between[kMergeSpans];               // a span's behind the earlier spans
  float most[kMergeSpans];                   // m of a span
  float upto;                                // m of all spans so far
};

// Group: what the row is packed as; float: not packed.
template <int kHeadDim, class Group>
__global__ void __launch_bounds__(kMergeThreads, 1)
    merge_pieces(AttentionView a, AttentionPieces w, Group* out) {
  constexpr int kHeads = kActGroup / kHeadDim;
  constexpr int kThreads = kHeadDim;  // of a head
  __shared__ MergeShared heads_shared[kHeads];
  __shared__ int base_shared, chunks_shared;
  alignas(16) __shared__ float column[kActGroup];
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

  // Everything but the pieces was there before attend_pieces let this kernel begin.
  const int64_t s = gpu::sequence_of(a.cu_seqlens, a.sequences, row);
  const bool empty = s < 0 || a.lengths[s] == 0;
  SequenceKeys sequence{};
  if (!empty) sequence = sequence_keys(a, w, s);
  if (empty || sequence.rows == 0) {
    gpu::wait_for_earlier();
    return finish(empty ? 0.f : gpu::no_answer());
  }
  if (tid < kLanes) {
    const int chunks = chunks_of_piece(a, w);
    int64_t before = 0;  // pieces of the sequences in front, counted once per row
    for (int64_t other = lane; other < s; other += kLanes) {
      const SequenceKeys keys = sequence_keys(a, w, other);
      before += int64_t(keys.rows) * keys.pieces(chunks);
    }
    before = gpu::sum_lanes(before);
    store_if(lane == 0, &base_shared, int(before));
    store_if(lane == 0, &chunks_shared, chunks);
  }
  const float gate = there && a.gate ? a.gate[row * a.gate_row + head * a.gate_head + d] : 0.f;
  const float sink = there && a.sinks ? a.sinks[head] : 0.f;
  __syncthreads();
  const int chunks = chunks_shared, in_span = kSpanChunks / chunks;
  const int own_row = int(row) - sequence.row;
  const Keys<int> keys = sequence.seen(a, w, own_row);
  const int first = keys.begin / kChunkKeys / chunks;  // pieces of this row
  const int end = ceil_div(ceil_div(keys.end, kChunkKeys), chunks);
  const int64_t slot =
      (int64_t(base_shared) - int64_t(sequence.first / chunks) * sequence.rows + own_row) *
          a.heads +
      head;  // of piece 0, if it were one
  const int64_t next_slot = int64_t(sequence.rows) * a.heads;
  const float* o = w.o + (slot + first * next_slot) * kHeadDim + d;
  const float2* ml = w.ml + slot;
  // the pieces of a span that starts with piece p
  const auto count_of = [&](int p) { return min((p / in_span + 1) * in_span, end) - p; };
  float ahead[kSpanChunks];
  const auto load = [&](int p) {
    if (there && p < end)
#pragma unroll
      for (int i = 0; i < kSpanChunks; ++i)
        if (i < count_of(p)) ahead[i] = o[i * next_slot * kHeadDim];
  };
  gpu::wait_for_earlier();
  load(first);

  float total = 0.f, l = 0.f, m = 0.f;
  bool exists = false;
  for (int from = first / in_span; from * in_span < end; from += kMergeSpans) {
    // pieces begin .. stop - 1, of spans from .. from + kMergeSpans - 1
    const int origin = from * in_span, begin = max(first, origin);
    const int stop = min(end, origin + kMergeSpans * in_span);
    __syncthreads();  // the last weights have been used
    if (there)
      for (int p = begin + d; p < stop; p += kThreads) shared.ml[p - origin] = ml[p * next_slot];
    __syncthreads();
    for (int p = begin + d; p < stop; p += kThreads) {
      const int span_begin = max(p / in_span * in_span, begin);
      float most = shared.ml[p - origin].x, before = shared.ml[span_begin - origin].x;
      for (int e = span_begin + 1; e < p; ++e) {
        const float other = shared.ml[e - origin].x;
        before = select(other > before, other, before);
      }
      if (span_begin < p) {
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
      const float mine = shared.most[min(d, spans - 1)];
      float upto = mine;
      for (int step = 1; step < kLanes; step *= 2) {
        const float other = gpu::from_lane(upto, max(lane - step, 0));
        upto = select(other > upto, other, upto);
      }
      if (exists) upto = select(m > upto, m, upto);
      float before = gpu::from_lane(upto, max(lane - 1, 0));
      if (lane == 0) before = m;
      const MergeWeights weights = merge_weights(before, mine);
      shared.between[d] = {weights.a, weights.b};
      store_if(lane == kLanes - 1, &shared.upto, upto);
    }
    __syncthreads();
    if (!there) continue;
    m = shared.upto;
    for (int p = begin; p < stop;) {
      const int count = count_of(p), span = p / in_span - from;
      float value[kSpanChunks];
#pragma unroll
      for (int i = 0; i < kSpanChunks; ++i) value[i] = ahead[i];
      o += count * next_slot * kHeadDim;
      load(p + count);
      float span_o = value[0], span_l = shared.ml[p - origin].y;
#pragma unroll
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
    }
  }
  float value = 0.f;
  if (there) {
    float shrink = 1.f;
    if (a.sinks) {
      const MergeWeights weights = merge_weights(m, sink);
      l = merge_value(l, weights.a, 1.f, weights.b);
      shrink = weights.a;
    }
    value = attention_output(mul(total, shrink), l, a.value_scale);
    if (a.gate) value = gated(value, gate);
  }
  finish(value);
}

}  // namespace dflash::cuda
