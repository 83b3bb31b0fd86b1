// The gated delta rule, a warp per four rows of a head's state: element e of a row is in part e /
// 128, lane e % 128 / 4, so that a dot product is core/reduce.h's. The state stays in registers
// through the replay of the journal and the new rows; the gated norm follows in a kernel of its
// own.
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

// By whole warps.
__device__ inline DeltaSequence delta_sequence(const DeltaArgs& args, int64_t s) {
  DeltaSequence q{};
  if (args.cu_seqlens) q.rows = rows_of(args.cu_seqlens, s, args.rows);
  const int64_t count = q.rows.end - q.rows.begin;
  const int64_t accepted = args.num_accepted ? args.num_accepted[s] : 1;
  q.valid = !args.cu_seqlens || q.rows.valid;
  if (args.mode == DeltaMode::kSnapshots) {
    const int64_t column = accepted > 1 ? accepted - 1 : 0;
    bool wrong = false;
#pragma unroll 1
    for (int64_t first = 0; first < args.columns; first += kLanes) {
      const int64_t c = first + lane_id();
      const int slot = c < args.columns ? args.slot[s * args.columns + c] : 0;
      wrong = wrong || (c < count && slot >= args.slots);
      if (first <= column && column < first + kLanes)
        q.start = from_lane(slot, int(column - first));
    }
    q.valid = q.valid && column < args.columns && count <= args.columns;
    if (!q.valid) return q;
    q.skipped = q.start <= 0;
    q.valid = q.start < args.slots && !any_lane(wrong);
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

constexpr int kWarpRows = 4, kWarps = 4, kBlockRows = kWarpRows * kWarps;
constexpr int kTile = 16;  // rows whose unit keys and queries a block shares at a time

// fold_lanes() of four rows at once, in its order: lane l ends with the sum of row l / 8.
__device__ inline float fold_four(const float (&row)[kWarpRows]) {
  const bool upper = lane_id() & 16, second = lane_id() & 8;
  // a lane keeps the rows of its half and hands over the others
  const float a = (upper ? row[2] : row[0]) + exchange(upper ? row[0] : row[2], 16);
  const float b = (upper ? row[3] : row[1]) + exchange(upper ? row[1] : row[3], 16);
  return sum_lanes((second ? b : a) + exchange(second ? a : b, 8), 8);
}

// body(index of this lane's value, element, whether the vector has that element)
template <int kParts, class Body>
__device__ void each_element(int dk, const Body& body) {
#pragma unroll
  for (int i = 0; i < kParts * kPerLane; ++i) {
    const int e = i / kPerLane * kAccumulators + kPerLane * lane_id() + i % kPerLane;
    body(i, e, e < dk);
  }
}

// dot() of core/reduce.h up to this lane's sum.
template <int kValues>
__device__ float lane_sum(const float (&row)[kValues], const float (&unit)[kValues]) {
  float acc[kPerLane] = {};
#pragma unroll
  for (int i = 0; i < kValues; ++i) acc[i % kPerLane] = fma(row[i], unit[i], acc[i % kPerLane]);
  return (acc[0] + acc[1]) + (acc[2] + acc[3]);
}

// Unit key and query of one row, by one warp, into shared memory; the journal's copy of the key.
template <int kParts>
__device__ void unit_vectors(const DeltaArgs& args, const DeltaSequence& q, int64_t t, int kh,
                             bool writes_key, float* key, float* query) {
  constexpr int kValues = kParts * kPerLane;
  const int dk = args.k_dim;
  const int64_t row = (q.rows.begin + t) * args.mixed.stride;
  const int64_t query_at = row + int64_t(kh) * dk, key_at = query_at + int64_t(args.k_heads) * dk;
  float raw_key[kValues], raw_query[kValues];
  each_element<kParts>(dk, [&](int i, int e, bool inside) {
    raw_key[i] = inside ? load_float(args.mixed.data, args.mixed.type, key_at + e) : 0.f;
    raw_query[i] = inside ? load_float(args.mixed.data, args.mixed.type, query_at + e) : 0.f;
  });
  const float key_scale = unit_scale(sum_lanes(lane_sum(raw_key, raw_key)));
  const float scale = unit_scale(sum_lanes(lane_sum(raw_query, raw_query)));
  const float query_scale = rsqrt(float(dk));
  each_element<kParts>(dk, [&](int i, int e, bool inside) {
    key[e] = inside ? unit_key(raw_key[i], key_scale) : 0.f;
    query[e] = inside ? unit_query(raw_query[i], scale, query_scale) : 0.f;
    if (inside && writes_key)
      args.journal_k[(args.journal_row(1 - q.replay_half, q.slot, t) * args.k_heads + kh) * dk +
                     e] = key[e];
  });
}

// A block: kBlockRows rows of the state of one head of one sequence.
template <class S, int kParts>
__global__ void __launch_bounds__(kWarps* kLanes, 2) delta_rows(DeltaArgs args) {
  constexpr int kValues = kParts * kPerLane, kWidth = kParts * kAccumulators;
  __shared__ float keys[kTile][kWidth], queries[kTile][kWidth], decays[kTile], strengths[kTile];
  const int dk = args.k_dim, dv = args.v_dim, nv = args.v_heads;
  const int64_t pieces = ceil_div<int64_t>(dv, kBlockRows), piece = blockIdx.x % pieces;
  const int h = int(blockIdx.x / pieces % nv);
  const int64_t index = blockIdx.x / pieces / nv;
  const DeltaSequence q = delta_sequence(args, index);
  const int64_t count = q.rows.end - q.rows.begin;
  if (args.cu_seqlens && count == 0) return;  // padding: nothing of it is touched
  if (q.skipped) return;
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id();
  const int64_t v0 = piece * kBlockRows + warp * kWarpRows;
  const int64_t v = v0 + lane / 8;  // the row whose sums this lane ends with
  const bool stores = lane % 8 == 0 && v < dv;
  const auto output = [&](int64_t t) { return args.out + ((q.rows.begin + t) * nv + h) * dv + v; };
  if (!q.valid) {
    for (int64_t t = 0; t < count; ++t)
      if (stores) *output(t) = no_answer();
    return;
  }
  const int kh = k_head_of(h, args.k_heads, nv, args.tiled);
  // one block of a v head writes the row's decay, one of a k head its key
  const bool writes_decay = args.mode == DeltaMode::kJournal && piece == 0;
  const bool writes_key =
      writes_decay && (args.tiled ? h < args.k_heads : h % (nv / args.k_heads) == 0);

  S* states = static_cast<S*>(args.state) + (int64_t(h) * dv + v0) * dk;
  float s[kWarpRows][kValues];
  for (int r = 0; r < kWarpRows; ++r)
    each_element<kParts>(dk, [&](int i, int e, bool inside) {
      s[r][i] = q.start > 0 && inside && v0 + r < dv
                    ? to_float(states[q.start * args.slot_stride + int64_t(r) * dk + e])
                    : 0.f;
    });
  const auto write_back = [&](int64_t slot) {
    for (int r = 0; r < kWarpRows; ++r)
      each_element<kParts>(dk, [&](int i, int e, bool inside) {
        if (inside && v0 + r < dv)
          store_float(states + slot * args.slot_stride + int64_t(r) * dk + e, s[r][i]);
      });
  };
  const auto update = [&](const float (&key)[kValues], const float (&u)[kWarpRows], float g) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int i = 0; i < kValues; ++i) s[r][i] = stored<S>(delta_state(s[r][i], key[i], u[r], g));
  };

  float key[kValues], query[kValues], u[kWarpRows], sums[kWarpRows];
  for (int64_t t = 0; t < q.replay; ++t) {
    const int64_t at = args.journal_row(q.replay_half, q.slot, t);
    each_element<kParts>(dk, [&](int i, int e, bool inside) {
      key[i] = inside ? args.journal_k[(at * args.k_heads + kh) * dk + e] : 0.f;
    });
    for (int r = 0; r < kWarpRows; ++r)
      u[r] = v0 + r < dv ? args.journal_u[(at * nv + h) * dv + v0 + r] : 0.f;
    update(key, u, args.journal_decay[at * nv + h]);
  }
  if (q.replay > 0) write_back(q.slot);

  for (int64_t first = 0; first < count; first += kTile) {
    const int tile = int(count - first < kTile ? count - first : kTile);
    __syncthreads();
    for (int t = warp; t < tile; t += kWarps) {
      unit_vectors<kParts>(args, q, first + t, kh, writes_key, keys[t], queries[t]);
      if (lane > 0) continue;
      const int64_t n = q.rows.begin + first + t;
      decays[t] = decay(load_float(args.a.data, args.a.type, n * args.a.stride + h), args.A[h],
                        args.dt_bias[h]);
      strengths[t] = write_strength(load_float(args.b.data, args.b.type, n * args.b.stride + h));
      if (writes_decay)
        args.journal_decay[args.journal_row(1 - q.replay_half, q.slot, first + t) * nv + h] =
            decays[t];
    }
    __syncthreads();
    for (int t = 0; t < tile; ++t) {
      const int64_t row = (q.rows.begin + first + t) * args.mixed.stride;
      each_element<kParts>(dk, [&](int i, int e, bool) {
        key[i] = keys[t][e];
        query[i] = queries[t][e];
      });
      const float value = v < dv ? load_float(args.mixed.data, args.mixed.type,
                                              row + args.v_offset() + int64_t(h) * dv + v)
                                 : 0.f;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) sums[r] = lane_sum(s[r], key);
      const float written = delta_value(value, fold_four(sums), -decays[t], strengths[t]);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) u[r] = from_lane(written, 8 * r);
      update(key, u, decays[t]);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) sums[r] = lane_sum(s[r], query);
      const float o = fold_four(sums);
      if (stores) *output(first + t) = o;
      if (args.mode == DeltaMode::kSnapshots) {
        const int64_t to = args.slot[index * args.columns + first + t];
        if (to > 0) write_back(to);
      } else if (args.mode == DeltaMode::kJournal && stores) {
        const int64_t at = args.journal_row(1 - q.replay_half, q.slot, first + t);
        args.journal_u[(at * nv + h) * dv + v] = written;
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
