// The gated delta rule for heads of 128 x 128, gates, gated norm and packing in one launch.
//
// A cluster of eight blocks has two heads of a sequence, whose outputs are one group of packed
// activations: four blocks a head, 32 rows of the state each. kWide neighbouring lanes share a row
// of the state, or kRows of them; a lane holds lanes i, i + kWide, ... of core/reduce.h, so that
// the first steps of fold() are additions in registers. s.k of a row of the batch and s.q of the
// one before it are folded together: both read the state between the two.
//
// Blocks send their outputs to the block that finishes the row: there a warp has all 256 values.
#pragma once
#include "gpu/act.cuh"
#include "gpu/delta.cuh"
#include "gpu/delta_shape.cuh"

namespace dflash::gpu {

struct StepShared {
  float keys[kStepTile][kHead], queries[kStepTile][kHead];
  float replay_keys[kReplayTile][kHead], replay_u[kReplayTile][kTeamRows];
  float values[kStepTile][kTeamRows];
  float z[kStepTile][kTeamRows];
  float out[kFinished][kActGroup], gates[kFinished][kActGroup];  // of the rows this block finishes
  Mailbox mail;
  float decays[kStepTile], strengths[kStepTile];
  int slots[kStepTile];
};

// Eight neighbouring lanes have a key or a query of a tile: body(vector, its address in shared
// memory, this lane's first element of it, whether it is a key, its row). Whole warps.
template <int kThreads, class Body>
__device__ void each_vector(StepShared& shared, int tile, const Body& body) {
  const int mine = int(threadIdx.x) / 8;
#pragma unroll 1
  for (int base = 0; base + (mine & ~3) < 2 * tile; base += kThreads / 8) {
    const int vector = base + mine;
    const bool is_key = vector < tile, is_there = vector < 2 * tile;
    const int t = is_key ? vector : is_there ? vector - tile : 0;
    body((is_key ? shared.keys[t] : shared.queries[t]) + 4 * (threadIdx.x % 8), is_key, t,
         is_there);
  }
}

// The 256 values of a row and its two heads, eight a lane: as they are, or packed.
__device__ inline void store_heads(const DeltaArgs& args, int64_t n, int64_t team,
                                   const float (&y)[8]) {
  const int64_t columns = args.out_columns(), column = team * kActGroup + 8 * lane_id();
  if (args.act_mode == 0) {
    if (column >= columns) return;
    store_four(args.out + n * columns + column, {y[0], y[1], y[2], y[3]});
    store_four(args.out + n * columns + column + 4, {y[4], y[5], y[6], y[7]});
    return;
  }
  const int64_t group = n * ceil_div<int64_t>(columns, kActGroup) + team;
  if (args.act_mode == kActPlanes)
    quantize_group(y, reinterpret_cast<ActPlanes*>(args.packed) + group);
  else
    quantize_group(y, reinterpret_cast<Q8Group*>(args.packed) + group);
}

// A row's outputs of two heads, normed and gated by one warp.
__device__ inline void finish_row(const DeltaArgs& args, int64_t n, int64_t team, const float* out,
                                  const float* gates, const Four (&weight)[2]) {
  const int lane = lane_id();
  const bool has_head = kHeads * team + lane / (kLanes / kHeads) < args.v_heads;
  float y[8];
  Four o[2];
  float sum[2];
  for (int i = 0; i < 2; ++i) {
    o[i] = load_four(out + 8 * lane + 4 * i);
    float x[4];
    for (int j = 0; j < 4; ++j) x[j] = fma(o[i].x[j], o[i].x[j], 0.f);
    // dot() by 16 lanes: this one has lanes 2 l and 2 l + 1 of fold()
    sum[i] = sum_lanes((x[0] + x[1]) + (x[2] + x[3]), kLanes / kHeads);
  }
  const float scale = rms_scale(sum[0] + sum[1], kHead, args.eps);
  for (int i = 0; i < 2; ++i) {
    const Four gate = load_four(gates + 8 * lane + 4 * i);
    for (int j = 0; j < 4; ++j) {
      const float normal = mul(normed(o[i].x[j], scale, weight[i].x[j]), gate.x[j]);
      y[4 * i + j] = !has_head ? 0.f : args.norm_weight ? normal : o[i].x[j];
    }
  }
  store_heads(args, n, team, y);
}

// The rows of the two heads for which nothing is computed: those of no sequence, before the first
// and behind the last, and those of a sequence that is skipped or wrong.
__device__ inline void fill_heads(const DeltaArgs& args, const DeltaSequence& q, int64_t index,
                                  int64_t team, int rank) {
  const int warps = int(blockDim.x) / kLanes, warp = int(threadIdx.x) / kLanes;
  const bool computed = q.valid && !q.skipped;
  const int64_t begin = index == 0 ? 0 : q.rows.begin;
  const int64_t end = index == args.sequences - 1 ? args.rows : q.rows.end;
#pragma unroll 1
  for (int64_t n = begin + rank * warps + warp; n < end; n += kTeam * warps) {
    const bool inside = q.rows.begin <= n && n < q.rows.end;
    if (inside && computed) continue;
    const float value = inside && !q.skipped ? no_answer() : 0.f;
    const float y[8] = {value, value, value, value, value, value, value, value};
    store_heads(args, n, team, y);
  }
}

// While earlier kernels still run: the rows of the state that this block will probably start from.
template <class S>
__device__ void prefetch_state(const DeltaArgs& args, int64_t index, int h, int v0) {
  int64_t column = 0;
  if (args.mode == DeltaMode::kSnapshots && args.num_accepted) {
    const int accepted = peek(args.num_accepted + index);
    column = accepted > 1 ? accepted - 1 : 0;
  }
  if (column >= args.columns) return;
  const int64_t slot = peek(args.slot + index * args.columns + column);
  if (0 < slot && slot < args.slots)
    prefetch(static_cast<const S*>(args.state) + slot * args.slot_stride +
                 (int64_t(h) * kHead + v0) * kHead,
             kTeamRows * kHead * sizeof(S));
}

// kFused: blocks are clusters of kTeam, and every row of out is written, normed and packed;
// otherwise out gets the plain outputs of the rows that have some.
template <class S, bool kFused, int kWide, int kRows>
__global__ void __launch_bounds__(StepShape<kWide, kRows>::kThreads,
                                  StepShape<kWide, kRows>::kBlocks) delta_step(DeltaArgs args) {
  using Shape = StepShape<kWide, kRows>;
  constexpr int kParts = Shape::kParts, kThreads = Shape::kThreads, kWarps = Shape::kWarps;
  extern __shared__ __align__(16) unsigned char step_memory[];
  StepShared& shared = *reinterpret_cast<StepShared*>(step_memory);
  const int nv = args.v_heads, team = int(blockIdx.x) / kTeam, rank = int(blockIdx.x) % kTeam;
  const int h = team * kHeads + rank / kHeadBlocks, v0 = rank % kHeadBlocks * kTeamRows;
  const int64_t index = blockIdx.y;
  const bool has_head = h < nv;  // the last cluster may have one head alone
  const int kh = has_head ? k_head_of(h, args.k_heads, nv, args.tiled) : 0;
  // one block of a v head writes the row's decay, one of a k head its key
  const bool writes_decay = args.mode == DeltaMode::kJournal && v0 == 0;
  const bool writes_key =
      writes_decay && (args.tiled ? h < args.k_heads : h % (nv / args.k_heads) == 0);
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id(), sub = lane % kWide;
  const int row0 = warp * Shape::kWarpRows + lane / kWide * kRows;  // first of this lane's rows
  const int own = row0 + Shape::owned_row(lane);                    // the one it sums
  const bool sums_output = Shape::owns_output(lane), first_owner = Shape::is_first(lane);

  if (kFused && threadIdx.x == 0 && has_head) prefetch_state<S>(args, index, h, v0);
  wait_for_earlier();
  let_next_begin();
  const DeltaSequence q = delta_sequence(args, index);
  const int64_t count = q.rows.end - q.rows.begin;
  if constexpr (kFused) fill_heads(args, q, index, team, rank);
  if (args.cu_seqlens && count == 0) return;  // padding: nothing of it is touched
  if (q.skipped) return;
  if (!q.valid) {
    if constexpr (!kFused)
      for (int64_t i = threadIdx.x; h < nv && i < count * kTeamRows; i += kThreads)
        args.out[((q.rows.begin + i / kTeamRows) * nv + h) * kHead + v0 + i % kTeamRows] =
            no_answer();
    return;
  }
  const auto tile_at = [&](int64_t first) {
    return int(count - first < kStepTile ? count - first : kStepTile);
  };
  const bool gated = kFused && args.norm_weight;
  // Outputs and gates of the rows of a tile that this block finishes.
  const auto expect_mail = [&](int tile) {
    const int mine = (tile - rank + kTeam - 1) / kTeam;
    const int heads = kHeads * team + kHeads <= nv ? kHeads : 1;
    if (threadIdx.x == 0 && mine > 0)
      shared.mail.expect(unsigned(mine * heads * kHead * (gated ? 2 : 1)) * sizeof(float));
  };
  if (kFused && count > 0) {
    if (threadIdx.x == 0) shared.mail.open();
    expect_mail(tile_at(0));
    cluster_arrive();
  }

  S* states = static_cast<S*>(args.state) + (int64_t(h) * kHead + v0 + row0) * kHead + 4 * sub;
  Four s[kRows][kParts];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      s[r][p] = q.start > 0 && has_head
                    ? load_four(states + q.start * args.slot_stride + r * kHead + 4 * kWide * p)
                    : Four{};
  const auto write_back = [&](int64_t slot) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        store_four(states + slot * args.slot_stride + r * kHead + 4 * kWide * p, s[r][p]);
  };
  const auto read = [&](const float* vector, Four(&x)[kParts]) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) x[p] = load_four(vector + 4 * (sub + kWide * p));
  };
  const auto update = [&](Four(&row)[kParts], const Four(&key)[kParts], float u, float g) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        row[p].x[j] = stored<S>(delta_state(row[p].x[j], key[p].x[j], u, g));
  };

  // Raw keys, queries, values and z of a tile into shared memory. A thread copies what it will read
  // itself, so that it need not meet the others in between.
  const int64_t v_at = int64_t(h) * kHead + v0;
  const auto each_value = [&](int tile, const auto& body) {
  // not by the first warp, which has the vectors of a short tile
#pragma unroll 1
    for (int i = (threadIdx.x + kThreads - kLanes) % kThreads; i < tile * (kTeamRows / 4);
         i += kThreads)
      body(i / (kTeamRows / 4), i % (kTeamRows / 4) * 4);
  };
  const auto start_copies = [&](int64_t n0, int tile) {
    const int64_t row = n0 * args.mixed.stride;
    each_vector<kThreads>(shared, tile, [&](float* to, bool is_key, int t, bool is_there) {
      const int64_t at =
          row + t * args.mixed.stride + ((is_key ? args.k_heads : 0) + kh) * kHead + 4 * (lane % 8);
      if (!is_there) return;
#pragma unroll
      for (int p = 0; p < 4; ++p) copy_four(to + kLanes * p, args.mixed, at + kLanes * p);
    });
    each_value(tile, [&](int t, int e) {
      copy_four(shared.values[t] + e, args.mixed,
                row + t * args.mixed.stride + args.v_offset() + v_at + e);
      if (gated) copy_four(shared.z[t] + e, args.z, (n0 + t) * args.z.stride + v_at + e);
    });
  };
  const auto replay = [&] {
    for (int64_t first = 0; first < q.replay; first += kReplayTile) {
      const int tile = int(q.replay - first < kReplayTile ? q.replay - first : kReplayTile);
      const int64_t at = args.journal_row(q.replay_half, q.slot, first);
      if (first > 0) __syncthreads();
      for (int i = threadIdx.x; i < tile * (kHead / 4); i += kThreads) {
        const int t = i / (kHead / 4), e = i % (kHead / 4) * 4;
        copy_16(shared.replay_keys[t] + e,
                args.journal_k + ((at + t) * args.k_heads + kh) * kHead + e);
      }
      for (int i = threadIdx.x; i < tile * (kTeamRows / 4); i += kThreads) {
        const int t = i / (kTeamRows / 4), e = i % (kTeamRows / 4) * 4;
        copy_16(shared.replay_u[t] + e, args.journal_u + ((at + t) * nv + h) * kHead + v0 + e);
      }
      const float decay_of = lane < tile ? args.journal_decay[(at + lane) * nv + h] : 0.f;
      copies_done();
      __syncthreads();
#pragma unroll 2
      for (int t = 0; t < tile; ++t) {
        Four key[kParts];
        read(shared.replay_keys[t], key);
        const float g = from_lane(decay_of, t);
#pragma unroll
        for (int r = 0; r < kRows; ++r) update(s[r], key, shared.replay_u[t][row0 + r], g);
      }
    }
    if (q.replay > 0) write_back(q.slot);
  };

  for (int64_t first = 0; first == 0 || first < count; first += kStepTile) {
    const int tile = tile_at(first);
    const int64_t n0 = q.rows.begin + first;
    if (has_head) {
      if (first > 0) __syncthreads();
      start_copies(n0, tile);
      if (first == 0) replay();
      if (tile == 0) return;  // a commit
      const int64_t n = n0 + lane;
      if (warp == kWarps - 1 && lane < tile) {
        const float g = decay(load_float(args.a.data, args.a.type, n * args.a.stride + h),
                              args.A[h], args.dt_bias[h]);
        shared.decays[lane] = g;
        if (writes_decay)
          args.journal_decay[args.journal_row(1 - q.replay_half, q.slot, first + lane) * nv + h] =
              g;
      }
      if (warp == kWarps - 2 && lane < tile) {
        shared.strengths[lane] =
            write_strength(load_float(args.b.data, args.b.type, n * args.b.stride + h));
        if (args.mode == DeltaMode::kSnapshots)
          shared.slots[lane] = args.slot[index * args.columns + first + lane];
      }
      copies_done();
      each_vector<kThreads>(shared, tile, [&](float* at, bool is_key, int t, bool is_there) {
        using Shape8 = StepShape<8, 1>;
        Four raw[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) raw[p] = load_four(at + kLanes * p);
        const float scale = unit_scale(sum_lanes(Shape8::dot(raw, raw), 8));
        if (!is_there) return;
        float* kept =
            args.journal_k +
            (args.journal_row(1 - q.replay_half, q.slot, first + t) * args.k_heads + kh) * kHead +
            4 * (lane % 8);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          Four unit;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            unit.x[j] = is_key ? unit_key(raw[p].x[j], scale)
                               : unit_query(raw[p].x[j], scale, rsqrt(float(kHead)));
          store_four(at + kLanes * p, unit);
          if (is_key && writes_key) store_four(kept + kLanes * p, unit);
        }
      });
      if (kFused) cluster_wait();  // the others have started, and read what the last tile sent them
      if (gated)
        each_value(tile, [&](int t, int e) {
          const Four z = load_four(shared.z[t] + e);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            shared.mail.send(&shared.gates[t / kTeam][rank / kHeadBlocks * kHead + v0 + e + j],
                             t % kTeam, output_gate(z.x[j], args.sigmoid_gate));
        });
      __syncthreads();
      const auto put = [&](int t, float o) {
        if (!sums_output || !first_owner) return;
        if constexpr (kFused)
          shared.mail.send(&shared.out[t / kTeam][rank / kHeadBlocks * kHead + v0 + own], t % kTeam,
                           o);
        else
          args.out[((n0 + t) * nv + h) * kHead + v0 + own] = o;
      };
      Four key[kParts], query[kParts], next[kParts];
      float given[kRows], outputs[kRows] = {};
      read(shared.keys[0], key);
#pragma unroll
      for (int r = 0; r < kRows; ++r) given[r] = Shape::dot(s[r], key);
      for (int t = 0; t < tile; ++t) {
        const float g = shared.decays[t];
        const float sum = Shape::fold_both(given, outputs);
        if (t > 0) put(t - 1, sum);
        const float written = delta_value(shared.values[t][own], sum, -g, shared.strengths[t]);
        if (args.mode == DeltaMode::kJournal && !sums_output && first_owner)
          args.journal_u[(args.journal_row(1 - q.replay_half, q.slot, first + t) * nv + h) * kHead +
                         v0 + own] = written;
        read(shared.queries[t], query);
        read(shared.keys[t + 1 < tile ? t + 1 : t], next);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float u = from_lane(written, (lane & ~(kWide - 1)) + Shape::owner_of(r));
          update(s[r], key, u, g);
          given[r] = Shape::dot(s[r], next);
          outputs[r] = Shape::dot(s[r], query);
        }
        if (args.mode == DeltaMode::kSnapshots && shared.slots[t] > 0) write_back(shared.slots[t]);
#pragma unroll
        for (int p = 0; p < kParts; ++p) key[p] = next[p];
      }
      put(tile - 1, Shape::fold_both(given, outputs));
    } else if (kFused) {
      cluster_wait();
    }
    if (kFused && rank < tile) {
      Four weight[2] = {};
      if (gated)
        for (int i = 0; i < 2; ++i)
          weight[i] = load_four(args.norm_weight + 8 * lane % kHead + 4 * i);
      shared.mail.wait(int(first / kStepTile % 2));
#pragma unroll 1
      for (int mine = warp; mine * kTeam + rank < tile; mine += kWarps)
        finish_row(args, n0 + mine * kTeam + rank, team, shared.out[mine], shared.gates[mine],
                   weight);
    }
    if (kFused && first + kStepTile < count) {
      __syncthreads();  // nobody still reads or counts
      expect_mail(tile_at(first + kStepTile));
      cluster_arrive();
    }
  }
  if (args.mode == DeltaMode::kPrefill && has_head) write_back(q.slot);
}

}  // namespace dflash::gpu
