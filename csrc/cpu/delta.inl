#include "core/delta.h"
#include "core/norm.h"
#include "cpu/convert.h"
#include "cpu/delta.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

// Four rows of a state, or one unit key or query, lie in groups of 64 floats: four vectors, each
// quarter of which is transposed (its own inverse). Vector j of a group then holds element 4 l + j
// of lane l, so that the first two steps of reduce.h's fold are plain additions of whole vectors.
constexpr int kGroup = 64;

// dot() of reduce.h up to lane sums of 16: position i of quarter q is lane 4 i + q and its 16th
// neighbour.
template <int kGroups>
DFLASH_INLINE F32x16 lane_sums(const F32x16* row, const F32x16* unit) {
  F32x16 acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = i < 4 * kGroups ? fma(row[i], unit[i], zero()) : zero();
#pragma GCC unroll 8
  for (int i = 8; i < 4 * kGroups; ++i) acc[i - 8] = fma(row[i], unit[i], acc[i - 8]);
  const F32x16 low = add(add(acc[0], acc[1]), add(acc[2], acc[3]));
  const F32x16 high = add(add(acc[4], acc[5]), add(acc[6], acc[7]));
  return add(low, high);
}

// What one row does to one row of the state.
template <class S, int kGroups>
DFLASH_INLINE void update_row(F32x16* row, const F32x16* key, F32x16 u, F32x16 g) {
#pragma GCC unroll 16
  for (int i = 0; i < 4 * kGroups; ++i) row[i] = stored<S>(delta_state(row[i], key[i], u, g));
}

// The rest of fold() for four rows at once: every quarter becomes their four sums.
DFLASH_INLINE F32x16 fold_four(const F32x16* lanes) {
  const F32x16 ab = add(shuffle<0x44>(lanes[0], lanes[1]), shuffle<0xee>(lanes[0], lanes[1]));
  const F32x16 cd = add(shuffle<0x44>(lanes[2], lanes[3]), shuffle<0xee>(lanes[2], lanes[3]));
  F32x16 s = add(shuffle<0x88>(ab, cd), shuffle<0xdd>(ab, cd));
  s = add(s, swap_halves(s));
  return add(s, swap_quarters(s));
}

// Four floats in every quarter.
DFLASH_INLINE F32x16 load_quad(const float* p, int count) {
  alignas(16) float part[4] = {};
  if (count < 4) {
    for (int i = 0; i < count; ++i) part[i] = p[i];
    p = part;
  }
#ifdef __AVX512F__
  return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))};
#else
  const __m256 v = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {v, v};
#endif
}

DFLASH_INLINE void store_quad(float* p, F32x16 a, int count) {
#ifdef __AVX512F__
  const __m128 v = _mm512_castps512_ps128(a.v);
#else
  const __m128 v = _mm256_castps256_ps128(a.lo);
#endif
  if (count == 4) return _mm_storeu_ps(p, v);
  alignas(16) float part[4];
  _mm_store_ps(part, v);
  for (int i = 0; i < count; ++i) p[i] = part[i];
}

// n <= 64 kGroups elements from memory, reordered; the rest is 0.
template <int kGroups, class T>
DFLASH_INLINE void load_row(const T* p, int n, F32x16* v) {
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g, v += 4, p += kGroup, n -= kGroup) {
    for (int i = 0; i < 4; ++i) {
      const int left = n - 16 * i;
      v[i] = left >= 16 ? load(p + 16 * i) : left > 0 ? load_first(p + 16 * i, left) : zero();
    }
    transpose_quarters(v);
  }
}

template <int kGroups, class T>
DFLASH_INLINE void store_row(T* p, int n, const F32x16* v) {
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g, v += 4, p += kGroup, n -= kGroup) {
    F32x16 plain[4] = {v[0], v[1], v[2], v[3]};
    transpose_quarters(plain);
    for (int i = 0; i < 4; ++i) {
      const int left = n - 16 * i;
      if (left >= 16)
        store(p + 16 * i, plain[i]);
      else if (left > 0)
        store_first(p + 16 * i, plain[i], left);
    }
  }
}

// The reordered copy of one vector of n elements, width floats.
DFLASH_INLINE void reorder(const float* p, int n, int width, float* out) {
  for (int i = 0; i < width; i += kGroup) {
    F32x16 v[4];
    load_row<1>(p + i, n - i, v);
    for (int j = 0; j < 4; ++j) store(out + i + 16 * j, v[j]);
  }
}

// What the rows of one sequence do to the state of one slot.
struct Sequence {
  int64_t first_row;  // of the window, in the batch
  int64_t rows;
  int64_t index;    // of the sequence
  int64_t slot;     // journal, prefill, commit
  int64_t start;    // slot to start from; 0: from zeros
  int64_t replay;   // rows of the journal to replay
  int replay_half;  // of the journal
  bool skipped;
};

Sequence sequence_of(const DeltaArgs& args, const DeltaWindow& window, int64_t s) {
  Sequence q{};
  q.index = s;
  if (args.cu_seqlens) {
    q.first_row = args.cu_seqlens[s] + window.first;
    q.rows = std::clamp<int64_t>(args.cu_seqlens[s + 1] - q.first_row, 0, window.count);
  }
  const int64_t accepted = args.num_accepted ? args.num_accepted[s] : 1;
  if (args.mode == DeltaMode::kSnapshots) {
    q.start = args.slot[s * args.columns + std::max<int64_t>(accepted, 1) - 1];
    q.skipped = q.start <= 0;
    return q;
  }
  q.slot = q.start = args.slot[s];
  q.skipped = q.slot <= 0;
  if (args.mode == DeltaMode::kPrefill) {
    if (window.first == 0 && !args.has_state[s]) q.start = 0;
  } else if (!q.skipped) {
    q.replay = accepted;
    q.replay_half = args.parity[s];
  }
  return q;
}

// Unit key and query of one k head of one row, and with the first head the row's gates.
void prepare(const DeltaArgs& args, const DeltaWindow& window, const DeltaScratch& layout,
             const Sequence& sequence, int64_t t, int head) {
  const int dk = args.k_dim, width = int(layout.groups) * kGroup;
  const int64_t n = sequence.first_row + t;
  float* scratch = window.scratch + (sequence.index * window.count + t) * layout.floats;
  const FloatRows& mixed = args.mixed;
  const int64_t row = n * mixed.stride;

  alignas(64) float raw[256], unit[256];
  const auto vector_at = [&](int64_t offset) {
    return as_float(mixed.data, mixed.type, row + offset, dk, raw);
  };
  const float* k = vector_at((int64_t(args.k_heads) + head) * dk);
  const float k_scale = unit_scale(dot(k, k, dk));
  for (int i = 0; i < dk; ++i) unit[i] = unit_key(k[i], k_scale);
  if (args.mode == DeltaMode::kJournal) {
    const int64_t at = args.journal_row(1 - sequence.replay_half, sequence.slot, t);
    memcpy(args.journal_k + (at * args.k_heads + head) * dk, unit, size_t(dk) * sizeof(float));
  }
  reorder(unit, dk, width, scratch + head * width);
  const float* q = vector_at(int64_t(head) * dk);
  const float q_scale = unit_scale(dot(q, q, dk)), query_scale = rsqrt(float(dk));
  for (int i = 0; i < dk; ++i) unit[i] = unit_query(q[i], q_scale, query_scale);
  reorder(unit, dk, width, scratch + layout.queries + head * width);
  if (head != 0) return;

  const int heads = args.v_heads;
  float* g = scratch + layout.decays;
  float* beta = scratch + layout.strengths;
  const float* a = as_float(args.a.data, args.a.type, n * args.a.stride, heads, g);
  const float* b = as_float(args.b.data, args.b.type, n * args.b.stride, heads, beta);
  for (int h = 0; h < heads; ++h) g[h] = decay(a[h], args.A[h], args.dt_bias[h]);
  for (int h = 0; h < heads; ++h) beta[h] = write_strength(b[h]);
  if (args.mode == DeltaMode::kJournal) {
    const int64_t at = args.journal_row(1 - sequence.replay_half, sequence.slot, t);
    memcpy(args.journal_decay + at * heads, g, size_t(heads) * sizeof(float));
  }
  if (mixed.type != FloatType::kF32)
    as_float(mixed.data, mixed.type, row + args.v_offset(), args.out_columns(),
             scratch + layout.values);
}

// A key of the journal as prepare() leaves the new ones.
void prepare_replay(const DeltaArgs& args, const DeltaWindow& window, const DeltaScratch& layout,
                    const Sequence& q, int64_t t, int head) {
  const int width = int(layout.groups) * kGroup;
  const int64_t at = args.journal_row(q.replay_half, q.slot, t) * args.k_heads + head;
  const int64_t to = (q.index * window.replay_count + t) * args.k_heads + head;
  reorder(args.journal_k + at * args.k_dim, args.k_dim, width, window.replay + to * width);
}

// Rows v0 .. v0 + count - 1 (count <= 4) of the state of head h, through replay and window.
template <class S, int kGroups>
void four_rows(const DeltaArgs& args, const DeltaWindow& window, const DeltaScratch& layout,
               const Sequence& q, int h, int v0, int count) {
  constexpr int kVectors = 4 * kGroups, kWidth = kGroups * kGroup;
  const int dk = args.k_dim, dv = args.v_dim;
  const int kh = k_head_of(h, args.k_heads, args.v_heads, args.tiled);
  S* states = static_cast<S*>(args.state) + (int64_t(h) * dv + v0) * dk;
  const auto load_units = [](const float* p, F32x16* v) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) v[i] = load(p + 16 * i);
  };
  F32x16 s[4][kVectors], key[kVectors], query[kVectors];
  const auto write_back = [&](int64_t slot) __attribute__((always_inline)) {
    S* to = states + slot * args.slot_stride;
    for (int r = 0; r < count; ++r) store_row<kGroups>(to + int64_t(r) * dk, dk, s[r]);
  };

  if (q.start > 0) {
    const S* from = states + q.start * args.slot_stride;
    for (int r = 0; r < 4; ++r) load_row<kGroups>(from + int64_t(r) * dk, r < count ? dk : 0, s[r]);
  } else {
    for (auto& row : s)
      for (F32x16& v : row) v = zero();
  }

  for (int64_t t = 0; t < q.replay; ++t) {
    const int64_t at = args.journal_row(q.replay_half, q.slot, t);
    load_units(window.replay + ((q.index * window.replay_count + t) * args.k_heads + kh) * kWidth,
               key);
    const F32x16 u = load_quad(args.journal_u + (at * args.v_heads + h) * dv + v0, count);
    const F32x16 each[4] = {shuffle<0x00>(u, u), shuffle<0x55>(u, u), shuffle<0xaa>(u, u),
                            shuffle<0xff>(u, u)};
    const F32x16 g = set1(args.journal_decay[at * args.v_heads + h]);
    for (int r = 0; r < 4; ++r) update_row<S, kGroups>(s[r], key, each[r], g);
  }
  if (q.replay > 0) write_back(q.slot);

  const bool floats = args.mixed.type == FloatType::kF32;
  for (int64_t t = 0; t < q.rows; ++t) {
    const float* scratch = window.scratch + (q.index * window.count + t) * layout.floats;
    const float* v = floats ? static_cast<const float*>(args.mixed.data) +
                                  (q.first_row + t) * args.mixed.stride + args.v_offset()
                            : scratch + layout.values;
    const float g = scratch[layout.decays + h];
    load_units(scratch + kh * kWidth, key);
    load_units(scratch + layout.queries + kh * kWidth, query);

    F32x16 lanes[4];
#pragma GCC unroll 1
    for (int r = 0; r < 4; ++r) lanes[r] = lane_sums<kGroups>(s[r], key);
    const F32x16 u = delta_value(load_quad(v + int64_t(h) * dv + v0, count), fold_four(lanes),
                                 set1(-g), set1(scratch[layout.strengths + h]));
    const F32x16 each[4] = {shuffle<0x00>(u, u), shuffle<0x55>(u, u), shuffle<0xaa>(u, u),
                            shuffle<0xff>(u, u)};
#pragma GCC unroll 1
    for (int r = 0; r < 4; ++r) {
      update_row<S, kGroups>(s[r], key, each[r], set1(g));
      lanes[r] = lane_sums<kGroups>(s[r], query);
    }
    store_quad(args.out + ((q.first_row + t) * args.v_heads + h) * dv + v0, fold_four(lanes),
               count);
    if (args.mode == DeltaMode::kSnapshots) {
      const int64_t to = args.slot[q.index * args.columns + t];
      if (to > 0) write_back(to);
    } else if (args.mode == DeltaMode::kJournal) {
      const int64_t at = args.journal_row(1 - q.replay_half, q.slot, t);
      store_quad(args.journal_u + (at * args.v_heads + h) * dv + v0, u, count);
    }
  }
  if (args.mode == DeltaMode::kPrefill && q.rows > 0) write_back(q.slot);
}

template <class S>
void state_rows(const DeltaArgs& args, const DeltaWindow& window, const DeltaScratch& layout,
                const Sequence& q, int h, int begin, int end) {
  for (int v0 = begin; v0 < end; v0 += 4) {
    const int count = std::min(4, end - v0);
    switch (layout.groups) {
      case 1:
        four_rows<S, 1>(args, window, layout, q, h, v0, count);
        break;
      case 2:
        four_rows<S, 2>(args, window, layout, q, h, v0, count);
        break;
      default:
        four_rows<S, 4>(args, window, layout, q, h, v0, count);
    }
  }
}

// The gated norm of head h in row n, in place.
void norm_head(const DeltaArgs& args, int64_t n, int h) {
  const int dv = args.v_dim;
  float* o = args.out + (n * args.v_heads + h) * dv;
  const float scale = rms_scale(dot(o, o, dv), dv, args.eps);
  alignas(64) float gate[64];
  for (int i = 0; i < dv; i += 64) {
    const int count = std::min(64, dv - i);
    const float* z =
        as_float(args.z.data, args.z.type, n * args.z.stride + int64_t(h) * dv + i, count, gate);
    if (args.sigmoid_gate)
      for (int j = 0; j < count; ++j) gate[j] = output_gate(z[j], true);
    else
      for (int j = 0; j < count; ++j) gate[j] = output_gate(z[j], false);
    for (int j = 0; j < count; ++j)
      o[i + j] = dflash::mul(normed(o[i + j], scale, args.norm_weight[i + j]), gate[j]);
  }
}

}  // namespace

void delta_window(const DeltaArgs& args, const DeltaWindow& window, int64_t threads) {
  const DeltaScratch layout(args);
  const int dv = args.v_dim;
  const int64_t slots = args.sequences * window.count;
  const int64_t replays = args.sequences * window.replay_count;
  parallel_for((slots + replays) * args.k_heads, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i / args.k_heads;
      const int head = int(i % args.k_heads);
      if (at < slots) {
        const Sequence q = sequence_of(args, window, at / window.count);
        if (!q.skipped && at % window.count < q.rows)
          prepare(args, window, layout, q, at % window.count, head);
      } else {
        const int64_t t = (at - slots) % window.replay_count;
        const Sequence q = sequence_of(args, window, (at - slots) / window.replay_count);
        if (t < q.replay) prepare_replay(args, window, layout, q, t, head);
      }
    }
  });

  // A head's rows are cut only when the heads alone do not feed every thread.
  const int64_t heads = args.sequences * args.v_heads;
  const int64_t work = std::max<int64_t>(1, window.count) * dv * args.k_dim;
  const int64_t wanted =
      heads * work < 32768 || heads >= threads ? 1 : ceil_div(2 * threads, heads);
  const int64_t piece = ceil_div<int64_t>(ceil_div<int64_t>(dv, wanted), 4) * 4;
  const int64_t pieces = ceil_div<int64_t>(dv, piece);
  const int64_t grain = std::max<int64_t>(1, 32768 / (work / pieces + 1));
  const auto finish = [&](const Sequence& q, int h) {
    if (!args.norm_weight || q.skipped) return;
    for (int64_t t = 0; t < q.rows; ++t) norm_head(args, q.first_row + t, h);
  };
  parallel_for(heads * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int h = int(i / pieces % args.v_heads);
      const int v0 = int(i % pieces * piece), v1 = int(std::min<int64_t>(dv, v0 + piece));
      const Sequence q = sequence_of(args, window, i / pieces / args.v_heads);
      if (q.skipped) {
        for (int64_t t = 0; t < q.rows; ++t)
          memset(args.out + ((q.first_row + t) * args.v_heads + h) * dv + v0, 0,
                 size_t(v1 - v0) * sizeof(float));
        continue;
      }
      // a sequence without rows is padding: nothing of it is touched
      if (args.cu_seqlens && q.rows == 0) continue;
      if (args.bf16_state)
        state_rows<Bf16>(args, window, layout, q, h, v0, v1);
      else
        state_rows<float>(args, window, layout, q, h, v0, v1);
      if (pieces == 1) finish(q, h);
    }
  });
  if (pieces > 1 && args.norm_weight)
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        finish(sequence_of(args, window, i / args.v_heads), int(i % args.v_heads));
    });
}

}  // namespace dflash::cpu::DFLASH_ISA
