// The gated delta rule, a warp per row of a head's state: element e of the row is in part e / 128,
// lane e % 128 / 4, so that a dot product is core/reduce.h's without a barrier. The replay of the
// journal, the new rows and the write-back run in one kernel; the gated norm follows in its own.
#pragma once
#include "core/delta.h"
#include "core/gdn_args.h"
#include "core/norm.h"
#include "gpu/sequence.cuh"
#include "gpu/warp.cuh"

namespace dflash::gpu {

// What the rows of one sequence do to the state of one slot.
struct DeltaSequence {
  RowRange rows;
  int64_t slot;    // journal, prefill, commit
  int64_t start;   // slot to start from; 0: from zeros
  int64_t replay;  // rows of the journal to replay
  int replay_half;
  bool skipped;  // nothing is read or written, its rows are zero
  bool valid;    // otherwise its rows are NaN and nothing is written
};

__device__ inline DeltaSequence delta_sequence(const DeltaArgs& args, int64_t s) {
  DeltaSequence q{};
  if (args.cu_seqlens) q.rows = rows_of(args.cu_seqlens, s, args.rows);
  const int64_t count = q.rows.end - q.rows.begin;
  const int64_t accepted = args.num_accepted ? args.num_accepted[s] : 1;
  q.valid = !args.cu_seqlens || q.rows.valid;
  if (args.mode == DeltaMode::kSnapshots) {
    const int64_t column = accepted > 1 ? accepted - 1 : 0;
    q.valid = q.valid && column < args.columns && count <= args.columns;
    if (!q.valid) return q;
    q.start = args.slot[s * args.columns + column];
    q.skipped = q.start <= 0;
    q.valid = q.start < args.slots;
    for (int64_t t = 0; t < count; ++t)
      q.valid = q.valid && args.slot[s * args.columns + t] < args.slots;
    return q;
  }
  q.slot = q.start = args.slot[s];
  q.skipped = q.slot <= 0;
  q.valid = q.valid && q.slot < args.slots;
  if (args.mode == DeltaMode::kPrefill) {
    if (!args.has_state[s]) q.start = 0;
  } else if (!q.skipped) {
    q.replay = accepted;
    q.replay_half = args.parity[s];
    q.valid = q.valid && accepted >= 0 && accepted <= args.journal_rows &&
              count <= args.journal_rows && (q.replay_half == 0 || q.replay_half == 1);
  }
  return q;
}

// A vector of k_dim <= 128 kParts elements over a warp; elements beyond it are 0.
template <int kParts>
struct Spread {
  float value[kParts][kPerLane];

  // visit(element index, value of this lane)
  template <class Visit>
  __device__ void each(int size, Visit&& visit) {
    for (int part = 0; part < kParts; ++part)
      for (int j = 0; j < kPerLane; ++j) {
        const int e = part * kAccumulators + lane_id() * kPerLane + j;
        if (e < size) visit(e, value[part][j]);
      }
  }
  template <class Value>
  __device__ void load(int size, Value&& value_at) {
    for (int part = 0; part < kParts; ++part)
      for (int j = 0; j < kPerLane; ++j) value[part][j] = 0.f;
    each(size, [&](int e, float& v) { v = value_at(e); });
  }
  __device__ float dot(const Spread& other) const {
    float acc[kPerLane] = {};
    for (int part = 0; part < kParts; ++part)
      for (int j = 0; j < kPerLane; ++j) acc[j] = fma(value[part][j], other.value[part][j], acc[j]);
    return fold_lanes(acc);
  }
};

template <class S, int kParts>
__global__ void delta_rows(DeltaArgs args) {
  const int64_t warp = warp_id();
  const int dk = args.k_dim, dv = args.v_dim;
  const int v = int(warp % dv), h = int(warp / dv % args.v_heads);
  const int64_t index = warp / dv / args.v_heads;
  if (index >= args.sequences) return;
  const DeltaSequence q = delta_sequence(args, index);
  const int64_t count = q.rows.end - q.rows.begin;
  if (args.cu_seqlens && count == 0) return;  // padding: nothing of it is touched
  if (q.skipped) return;
  const int lane = lane_id();
  const auto output = [&](int64_t t) {
    return args.out + ((q.rows.begin + t) * args.v_heads + h) * dv + v;
  };
  if (!q.valid) {
    for (int64_t t = lane; t < count; t += kLanes) *output(t) = no_answer();
    return;
  }
  const int kh = k_head_of(h, args.k_heads, args.v_heads, args.tiled);
  S* states = static_cast<S*>(args.state) + (int64_t(h) * dv + v) * dk;
  Spread<kParts> s;
  const auto write_back = [&](int64_t slot) {
    S* to = states + slot * args.slot_stride;
    s.each(dk, [&](int e, float& x) { store_float(to + e, x); });
  };
  s.load(dk, [&](int e) {
    return q.start > 0 ? to_float(states[q.start * args.slot_stride + e]) : 0.f;
  });

  Spread<kParts> key, query;
  const auto update = [&](float u, float g) {
    for (int part = 0; part < kParts; ++part)
      for (int j = 0; j < kPerLane; ++j)
        s.value[part][j] = stored<S>(delta_state(s.value[part][j], key.value[part][j], u, g));
  };
  for (int64_t t = 0; t < q.replay; ++t) {
    const int64_t at = args.journal_row(q.replay_half, q.slot, t);
    key.load(dk, [&](int e) { return args.journal_k[(at * args.k_heads + kh) * dk + e]; });
    update(args.journal_u[(at * args.v_heads + h) * dv + v],
           args.journal_decay[at * args.v_heads + h]);
  }
  if (q.replay > 0) write_back(q.slot);

  // one warp of a k head writes the row's key, one of a v head its decay
  const bool writes_key =
      v == 0 && (h == 0 || kh != k_head_of(h - 1, args.k_heads, args.v_heads, args.tiled)) &&
      (!args.tiled || h < args.k_heads);
  const float query_scale = rsqrt(float(dk));
  for (int64_t t = 0; t < count; ++t) {
    const int64_t n = q.rows.begin + t, row = n * args.mixed.stride;
    const auto mixed = [&](int64_t column) {
      return load_float(args.mixed.data, args.mixed.type, row + column);
    };
    key.load(dk, [&](int e) { return mixed((int64_t(args.k_heads) + kh) * dk + e); });
    const float key_scale = unit_scale(key.dot(key));
    key.each(dk, [&](int, float& x) { x = unit_key(x, key_scale); });
    query.load(dk, [&](int e) { return mixed(int64_t(kh) * dk + e); });
    const float scale = unit_scale(query.dot(query));
    query.each(dk, [&](int, float& x) { x = unit_query(x, scale, query_scale); });
    const float g = decay(load_float(args.a.data, args.a.type, n * args.a.stride + h), args.A[h],
                          args.dt_bias[h]);
    const float beta = write_strength(load_float(args.b.data, args.b.type, n * args.b.stride + h));

    const float u = delta_value(mixed(args.v_offset() + int64_t(h) * dv + v), s.dot(key), -g, beta);
    update(u, g);
    const float o = s.dot(query);
    if (lane == 0) *output(t) = o;
    if (args.mode == DeltaMode::kSnapshots) {
      const int64_t to = args.slot[index * args.columns + t];
      if (to > 0) write_back(to);
    } else if (args.mode == DeltaMode::kJournal) {
      const int64_t at = args.journal_row(1 - q.replay_half, q.slot, t);
      if (writes_key)
        key.each(dk,
                 [&](int e, float& x) { args.journal_k[(at * args.k_heads + kh) * dk + e] = x; });
      if (lane == 0) {
        args.journal_u[(at * args.v_heads + h) * dv + v] = u;
        if (v == 0) args.journal_decay[at * args.v_heads + h] = g;
      }
    }
  }
  if (args.mode == DeltaMode::kPrefill) write_back(q.slot);
}

// The gated norm in place, a warp per head of a row.
__global__ void delta_norm(DeltaArgs args) {
  const int64_t n = warp_id() / args.v_heads, h = warp_id() % args.v_heads;
  if (n >= args.rows) return;
  const int64_t s = sequence_of(args.cu_seqlens, args.sequences, n);
  if (s < 0 || delta_sequence(args, s).skipped) return;  // stays zero, whatever z holds
  const int dv = args.v_dim;
  float* o = args.out + (n * args.v_heads + h) * dv;
  const auto value = [&](int64_t e) { return o[e]; };
  const float scale = rms_scale(warp_dot(dv, value, value), dv, args.eps);
  // the dot has read every element: folding it was a barrier of the warp
  for (int64_t e = lane_id(); e < dv; e += kLanes) {
    const float z = load_float(args.z.data, args.z.type, n * args.z.stride + h * dv + e);
    o[e] = mul(normed(o[e], scale, args.norm_weight[e]), output_gate(z, args.sigmoid_gate));
  }
}

}  // namespace dflash::gpu
