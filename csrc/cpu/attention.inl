// Block attention, compiled once per instruction set. The order of every sum is core/attention.h's.
#include "core/attention.h"
#include "core/mask.h"
#include "cpu/act.h"
#include "cpu/attention.h"
#include "cpu/cache_types.h"
#include "cpu/fold16.h"
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

constexpr int kTile = 4;                  // queries that share the loaded keys
constexpr int kScores = kChunkKeys + 16;  // a vector may be written past the last key
constexpr int kMaxPadded = 1024;
#ifdef __AVX512F__
constexpr int kValueVectors = 16;  // accumulators of the value loop that stay in registers
#else
constexpr int kValueVectors = 4;
#endif

// Merges the pieces of one query, chunks within their span, spans into the total.
struct Merger {
  struct Piece {
    float m, l;
    float* o;  // [padded]
    bool exists;
  };
  int64_t padded;
  int64_t span_index = -1;
  Piece span, total;

  Merger(float* scratch, int64_t padded)
      : padded(padded), span{0, 0, scratch, false}, total{0, 0, scratch + padded, false} {}

  void merge(Piece& into, float m, float l, const float* o) const {
    if (!into.exists) {
      memcpy(into.o, o, size_t(padded) * sizeof(float));
      into.m = m;
      into.l = l;
      into.exists = true;
      return;
    }
    const MergeWeights w = merge_weights(into.m, m);
    into.m = w.m;
    into.l = merge_value(into.l, w.a, l, w.b);
    const F32x16 a = set1(w.a), b = set1(w.b);
    for (int64_t d = 0; d < padded; d += 16)
      store(into.o + d, fma(load(o + d), b, mul(load(into.o + d), a)));
  }

  void close_span() {
    if (span.exists) merge(total, span.m, span.l, span.o);
    span.exists = false;
  }

  void push(int64_t chunk, float m, float l, const float* o) {
    if (chunk / kSpanChunks != span_index) {
      close_span();
      span_index = chunk / kSpanChunks;
    }
    merge(span, m, l, o);
  }

  void finish(const AttentionArgs& args, int64_t row, int64_t head) {
    close_span();
    float* out = args.out + (row * args.heads + head) * args.head_dim;
    if (!total.exists) {
      memset(out, 0, size_t(args.head_dim) * sizeof(float));
      return;
    }
    float shrink = 1.f;
    if (args.sinks) {
      const MergeWeights w = merge_weights(total.m, args.sinks[head]);
      total.l = merge_value(total.l, w.a, 1.f, w.b);
      shrink = w.a;
    }
    for (int64_t d = 0; d < args.head_dim; ++d)
      out[d] = attention_output(dflash::mul(total.o[d], shrink), total.l, args.value_scale);
    if (!args.gate) return;
    const float* gate = args.gate + row * args.gate_row + head * args.gate_head;
    for (int64_t d = 0; d < args.head_dim; ++d) out[d] = gated(out[d], gate[d]);
  }
};

// One chunk for the queries of a block. kVectors: head_dim / 16, or 0 for any head_dim.
template <class Cache, int kVectors>
struct Chunk {
  using Element = typename Cache::Element;
  const AttentionArgs& args;
  const AttentionBlock& block;
  const int64_t chunk;
  const int vectors = kVectors ? kVectors : int(args.padded() / 16);
  const int full = kVectors ? kVectors : int(args.head_dim / 16);
  const int tail = kVectors ? 0 : int(args.head_dim % 16);
  const Element* keys = static_cast<const Element*>(args.k) + block.kv_head * args.head_dim;
  const Element* values = static_cast<const Element*>(args.v) + block.kv_head * args.head_dim;
  int64_t offset[kChunkKeys];  // of each key of the chunk that some row sees, in elements

  Chunk(const AttentionArgs& args, const AttentionBlock& block, int64_t chunk)
      : args(args), block(block), chunk(chunk) {
    const KeyRange first = range(0), last = range(block.rows - 1);
    const int32_t* table = args.page_table + block.sequence * args.table_pages;
    int64_t key = first.begin;
    while (key < last.end) {
      const int64_t position = chunk * kChunkKeys + key;
      const int64_t within = position % args.page_size;
      const int64_t stop = std::min(last.end, key + args.page_size - within);
      const int64_t stride = args.kv_heads * args.head_dim;
      int64_t at = (int64_t(table[position / args.page_size]) * args.page_size + within) * stride;
      for (; key < stop; ++key, at += stride) offset[key] = at;
    }
  }

  // Keys of this chunk that a row of the block sees, counted from the chunk's first.
  KeyRange range(int64_t row) const {
    const KeyRange all = visible_keys(block.position + row, block.length, args.window, args.causal);
    const int64_t origin = chunk * kChunkKeys;
    const int64_t begin = std::clamp<int64_t>(all.begin - origin, 0, kChunkKeys);
    return {begin, std::max(begin, std::clamp<int64_t>(all.end - origin, 0, kChunkKeys))};
  }

  F32x16 part(const Element* p, int e) const {
    if constexpr (kVectors == 0)
      if (e == full) return load_part<Cache>(p + 16 * e, tail);
    return Cache::load(p + 16 * e);
  }

  // Scores of keys [begin, end) for T queries; may write 15 floats past `end`.
  template <int T>
  void score(const float* const* q, float (*s)[kScores], int64_t begin, int64_t end) const {
    const F32x16 scale = set1(args.scale);
    for (int64_t first = begin; first < end; first += 16) {
      const int count = int(std::min<int64_t>(16, end - first));
      F32x16 lanes[T][16];
      for (int j = 0; j < count; ++j) {
        const Element* key = keys + offset[first + j];
        if constexpr (kVectors) {
          score_key<T>(q, key, j, lanes);
        } else {
          for (int t = 0; t < T; ++t) lanes[t][j] = score_any(q[t], key);
        }
      }
      for (int t = 0; t < T; ++t) {
        for (int j = count; j < 16; ++j) lanes[t][j] = zero();
        store(s[t] + first, mul(fold16(lanes[t]), scale));
      }
    }
  }

  template <int T>
  DFLASH_INLINE void score_key(const float* const* q, const Element* key, int j,
                               F32x16 (*lanes)[16]) {
    constexpr int kSteps = (kVectors + 7) / 8;  // vectors e, e + 8, .. share an accumulator
    F32x16 sum[T];
    for (int half = 0; half < 2; ++half) {
      F32x16 k[kSteps][4];
      for (int step = 0; step < kSteps; ++step)
        for (int i = 0; i < 4; ++i) {
          const int e = 8 * step + 4 * half + i;
          k[step][i] = e < kVectors ? Cache::load(key + 16 * e) : zero();
        }
      for (int t = 0; t < T; ++t) {
        F32x16 z[4];
        for (int i = 0; i < 4; ++i) {
          z[i] = zero();
          for (int step = 0; step < kSteps; ++step) {
            const int e = 8 * step + 4 * half + i;
            if (e < kVectors) z[i] = fma(load(q[t] + 16 * e), k[step][i], z[i]);
          }
        }
        const F32x16 w = fold_half(z[0], z[1], z[2], z[3]);
        sum[t] = half == 0 ? w : add(sum[t], w);
      }
    }
    for (int t = 0; t < T; ++t) lanes[t][j] = sum[t];
  }

  F32x16 score_any(const float* q, const Element* key) const {
    F32x16 z[8];
    for (int i = 0; i < 8; ++i) {
      z[i] = zero();
      for (int e = i; e < vectors; e += 8) z[i] = fma(load(q + 16 * e), part(key, e), z[i]);
    }
    return add(fold_half(z[0], z[1], z[2], z[3]), fold_half(z[4], z[5], z[6], z[7]));
  }

  // s[begin .. end) to p = exp(s - m), zeros around them; returns m, gives l.
  static float soften(float* s, int64_t begin, int64_t end, float* l) {
    const int64_t low = begin / 16 * 16, high = (end + 15) / 16 * 16;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    std::fill(s + low, s + begin, kNone);
    std::fill(s + end, s + high, kNone);
    F32x16 most = load(s + low);
    for (int64_t e = low + 16; e < high; e += 16) most = max(most, load(s + e));
    alignas(64) float each[16];
    store(each, most);
    float m = each[0];
    for (int i = 1; i < 16; ++i) m = select(each[i] > m, each[i], m);
    for (int64_t e = low; e < high; ++e) s[e] = dflash::exp(s[e] - m);
    std::fill(s + low, s + begin, 0.f);
    std::fill(s + end, s + high, 0.f);
    Acc128 sum = zero128();
    for (int64_t e = low; e < high; e += 16) {
      F32x16& slot = sum.acc[e / 16 % 8];
      slot = add(slot, load(s + e));
    }
    *l = fold(sum);
    return m;
  }

  // o += p * v over keys [begin, end), ascending.
  template <int T>
  void weigh(float (*p)[kScores], float (*o)[kMaxPadded], int64_t begin, int64_t end) const {
    constexpr int kWide = std::max(1, std::min(kVectors, kValueVectors / T));
    for (int d = 0; d < vectors; d += kWide) {
      F32x16 acc[T][kWide];
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < kWide; ++i) acc[t][i] = load(o[t] + 16 * (d + i));
      for (int64_t key = begin; key < end; ++key) {
        const Element* value = values + offset[key];
        for (int i = 0; i < kWide; ++i) {
          const F32x16 v = part(value, d + i);
          for (int t = 0; t < T; ++t) acc[t][i] = fma(set1(p[t][key]), v, acc[t][i]);
        }
      }
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < kWide; ++i) store(o[t] + 16 * (d + i), acc[t][i]);
    }
  }

  // Queries first .. first + T - 1 of the block: done(query, m, l, o) for those that see a key.
  template <int T, class Done>
  void tile(int64_t first, Done&& done) const {
    const int64_t group = args.group();
    alignas(64) float s[T][kScores];
    alignas(64) float o[T][kMaxPadded];
    alignas(64) float copy[kVectors ? 1 : T][kVectors ? 1 : kMaxPadded];
    const float* q[T];
    KeyRange keys_of[T], shared{0, kChunkKeys};
    for (int t = 0; t < T; ++t) {
      const int64_t row = (first + t) / group, head = block.kv_head * group + (first + t) % group;
      q[t] = args.q + ((block.row + row) * args.heads + head) * args.head_dim;
      if constexpr (kVectors == 0) {
        memset(copy[t], 0, size_t(16 * vectors) * sizeof(float));
        memcpy(copy[t], q[t], size_t(args.head_dim) * sizeof(float));
        q[t] = copy[t];
      }
      keys_of[t] = range(row);
      shared.begin = std::max(shared.begin, keys_of[t].begin);
      shared.end = std::min(shared.end, keys_of[t].end);
    }
    if (shared.end < shared.begin) shared.end = shared.begin;
    // What only some of the queries see lies before and after what all see. If nothing is shared,
    // all of a query's keys lie on one side of the cut, or are cut in two.
    const auto before = [&](int t) { return std::min(shared.begin, keys_of[t].end); };
    const auto after = [&](int t) { return std::max(shared.end, keys_of[t].begin); };
    for (int t = 0; t < T; ++t) score<1>(q + t, s + t, keys_of[t].begin, before(t));
    score<T>(q, s, shared.begin, shared.end);
    for (int t = 0; t < T; ++t) score<1>(q + t, s + t, after(t), keys_of[t].end);

    float m[T], l[T];
    for (int t = 0; t < T; ++t) {
      if (keys_of[t].begin < keys_of[t].end)
        m[t] = soften(s[t], keys_of[t].begin, keys_of[t].end, &l[t]);
      memset(o[t], 0, size_t(16 * vectors) * sizeof(float));
    }
    for (int t = 0; t < T; ++t) weigh<1>(s + t, o + t, keys_of[t].begin, before(t));
    weigh<T>(s, o, shared.begin, shared.end);
    for (int t = 0; t < T; ++t) weigh<1>(s + t, o + t, after(t), keys_of[t].end);
    for (int t = 0; t < T; ++t)
      if (keys_of[t].begin < keys_of[t].end) done(first + t, m[t], l[t], o[t]);
  }

  template <class Done>
  void run(Done&& done) const {
    const int64_t queries = block.rows * args.group();
    int64_t j = 0;
    for (; j + kTile <= queries; j += kTile) tile<kTile>(j, done);
    for (; j + 2 <= queries; j += 2) tile<2>(j, done);
    for (; j < queries; ++j) tile<1>(j, done);
  }
};

// visit(chunk kernel) for the cache's type and the head's width
template <class Cache, class Visit>
void with_width(const AttentionArgs& args, const AttentionBlock& block, int64_t chunk,
                Visit&& visit) {
  switch (args.head_dim) {
    case 64:
      return visit(Chunk<Cache, 4>(args, block, chunk));
    case 128:
      return visit(Chunk<Cache, 8>(args, block, chunk));
    case 256:
      return visit(Chunk<Cache, 16>(args, block, chunk));
    default:
      return visit(Chunk<Cache, 0>(args, block, chunk));
  }
}

template <class Visit>
void with_chunk(const AttentionArgs& args, const AttentionBlock& block, int64_t chunk,
                Visit&& visit) {
  switch (args.type) {
    case FloatType::kF32:
      return with_width<CacheF32>(args, block, chunk, visit);
    case FloatType::kF16:
      return with_width<CacheF16>(args, block, chunk, visit);
    case FloatType::kBF16:
      return with_width<CacheBF16>(args, block, chunk, visit);
  }
}

constexpr int kMaxQueries = 256;

}  // namespace

void attend_chunk(const AttentionArgs& args, const AttentionBlock& block, int64_t chunk) {
  const int64_t chunks = block.chunk_end - block.chunk_begin, width = 2 + args.padded();
  const auto place = [&](int64_t query) {
    return block.partial + (query * chunks + chunk - block.chunk_begin) * width;
  };
  for (int64_t j = 0; j < block.rows * args.group(); ++j) place(j)[1] = 0.f;  // l of no key
  with_chunk(args, block, chunk, [&](const auto& kernel) {
    kernel.run([&](int64_t query, float m, float l, const float* o) {
      float* partial = place(query);
      partial[0] = m;
      partial[1] = l;
      memcpy(partial + 2, o, size_t(args.padded()) * sizeof(float));
    });
  });
}

void attend_merge(const AttentionArgs& args, const AttentionBlock& block, float* scratch) {
  const int64_t chunks = block.chunk_end - block.chunk_begin, width = 2 + args.padded();
  const int64_t group = args.group();
  for (int64_t j = 0; j < block.rows * group; ++j) {
    Merger merger(scratch, args.padded());
    for (int64_t c = 0; c < chunks; ++c) {
      const float* partial = block.partial + (j * chunks + c) * width;
      if (partial[1] != 0.f)
        merger.push(block.chunk_begin + c, partial[0], partial[1], partial + 2);
    }
    merger.finish(args, block.row + j / group, block.kv_head * group + j % group);
  }
}

void attend_whole(const AttentionArgs& args, const AttentionBlock& block, float* scratch) {
  const int64_t group = args.group(), queries = block.rows * group, padded = args.padded();
  alignas(Merger) unsigned char room[kMaxQueries * sizeof(Merger)];
  Merger* mergers = reinterpret_cast<Merger*>(room);
  for (int64_t j = 0; j < queries; ++j) new (mergers + j) Merger(scratch + 2 * j * padded, padded);
  for (int64_t chunk = block.chunk_begin; chunk < block.chunk_end; ++chunk)
    with_chunk(args, block, chunk, [&](const auto& kernel) {
      kernel.run([&](int64_t query, float m, float l, const float* o) {
        mergers[query].push(chunk, m, l, o);
      });
    });
  for (int64_t j = 0; j < queries; ++j)
    mergers[j].finish(args, block.row + j / group, block.kv_head * group + j % group);
}

void pack_rows(const float* x, int64_t columns, int64_t begin, int64_t end, int64_t act_mode,
               uint8_t* packed) {
  const int64_t bytes = packed_bytes(columns, act_mode);
  for (int64_t n = begin; n < end; ++n)
    quantize_row(x + n * columns, columns, act_mode, packed + n * bytes);
}

}  // namespace dflash::cpu::DFLASH_ISA
