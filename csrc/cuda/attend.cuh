// Attention over the pieces of the keys: a cluster of blocks takes a KV head's chunk for some of
// its queries. Each block scores its share of the keys, the probabilities go to every block, and
// each weighs its share of the dims, so that keys and values are read from memory once per chunk.
//
// A warp's lanes are core/reduce.h's virtual lanes: lane l multiplies dims 4 l .. 4 l + 3 (and 128
// further) of several queries and keys. Folding by halves is an exchange with lane l ^ 16, 8, ..;
// what a lane gives away is another query's or key's sum than what it keeps, so that each exchange
// serves two sums. Which of them stands in which register depends on the lane, so nothing is moved.
#pragma once
#include "cuda/attend_items.cuh"
#include "cuda/cluster.cuh"

namespace dflash::cuda {

// kRanks: blocks of a cluster; kResident: blocks of a multiprocessor. kQueries: queries of a
// cluster; kTile: of a warp that scores, even.
template <class Element, int kDims, int kBlocks, int kWarpsOfBlock, int kMostQueries, int kTileSize,
          int kKeysOfTile, int kQueriesEach, int kBlocksOfUnit>
struct Attend {
  using T = Element;
  static constexpr int kHeadDim = kDims, kRanks = kBlocks, kWarps = kWarpsOfBlock;
  static constexpr int kQueries = kMostQueries, kTile = kTileSize, kResident = kBlocksOfUnit;
  static constexpr int kThreads = kWarps * kLanes;
  static constexpr int kKeys = kChunkKeys / kRanks;  // scored by a block
  static constexpr int kValues = kHeadDim / kRanks;  // dims weighed by a block
  static constexpr int kKeyTile = kKeysOfTile;       // keys of a warp that scores
  static constexpr int kSteps = kHeadDim / kAccumulators;
  static constexpr int kPagesEach = kChunkKeys / kThreads;
  static constexpr int kMostEach = kQueriesEach;   // queries of a thread that weighs,
  static constexpr int kMostWide = 4;              // and dims
  static constexpr int kQuads = kKeys / 4;         // threads that soften the same query
  static constexpr int kSoft = kThreads / kQuads;  // queries softened at a time
  static constexpr int kRounds = ceil_div(kQueries, kSoft);
  static_assert(kHeadDim % kAccumulators == 0 && kTile % 2 == 0);
  static_assert(kKeys % kKeyTile == 0 && kValues % kMostWide == 0 && kQueries % kTile == 0);
  static_assert(kQueries / kTile <= kWarps && kQueries <= kThreads);
  static_assert(kQueries % kMostEach == 0);
  static_assert(kQueries / kMostEach * (kValues / kMostWide) <= kThreads);
  static_assert(kQuads <= kLanes && kQuads >= kRanks && kChunkKeys % kThreads == 0);

  struct Shared {
    T keys[kKeys * kHeadDim];
    T values[kChunkKeys * kValues];
    float score[kQueries][kKeys + 8];  // 8: two queries' scores in other banks
    float p[kQueries][kChunkKeys + 4];
    float most[kQueries][kRanks];    // of each block's scores
    float m[kQueries], l[kQueries];  // of the piece so far
    float a[kQueries], b[kQueries];  // weights of the piece so far and of the chunk
    int join[kQueries];              // how the chunk comes to its piece
    AttendQuery query[2][kQueries];
    AttendBounds bounds[2];
    int row_of_key[2][kChunkKeys];  // of the cache
    AttendItems items;
  };
  enum Join { kNothing, kFirst, kMerge };

  const AttentionView& a;
  const AttentionPieces& w;
  Shared& shared;
  const int tid = int(threadIdx.x), warp = tid / kLanes, lane = gpu::lane_id();
  const int rank = int(blockIdx.x) % kRanks;
  const int group = int(a.heads / a.kv_heads);
  float q[kTile][kSteps * kPerLane];
  float run[kMostEach][kMostWide];  // o of the piece so far

  __device__ __forceinline__ Attend(const AttentionView& a, const AttentionPieces& w,
                                    Shared& shared)
      : a(a), w(w), shared(shared) {}

  __device__ __forceinline__ void prepare(const AttendPlace& place, int buffer,
                                          const int (&page)[kPagesEach]) {
    const int left = place.keys.rows * group - place.part * kQueries;
    const int queries = left < kQueries ? left : kQueries, first = place.part * kQueries;
    const Keys<int> top = place.seen(a, w, first / group);
    const Keys<int> bottom = place.seen(a, w, (first + queries - 1) / group);
    if (tid == 0)
      shared.bounds[buffer] = {queries, top.begin, bottom.end, bottom.begin,
                               max(top.end, bottom.begin)};
    for (int i = tid; i < kQueries; i += kThreads) {
      AttendQuery query = {-1, 0, 0, 0};
      if (i < queries) {
        const int row = (first + i) / group, head = place.kv_head * group + (first + i) % group;
        const Keys<int> keys = place.seen(a, w, row);
        query = {(place.keys.row + row) * int(a.heads) + head,
                 (place.slot + row) * int(a.heads) + head, keys.begin, keys.end};
      }
      shared.query[buffer][i] = query;
    }
    for (int i = 0; i < kPagesEach; ++i) {
      const int key = tid + i * kThreads;
      shared.row_of_key[buffer][key] =
          key >= top.begin && key < bottom.end ? place.row_of(a, key, page[i]) : kNotThere;
    }
  }

  static __device__ __forceinline__ const T* head_of(const void* cache, const AttendPlace& place) {
    return static_cast<const T*>(cache) + place.kv_head * kHeadDim;
  }
  __device__ __forceinline__ void stage_keys(const AttendPlace& place, int buffer) {
    copy_rows<kKeys, kHeadDim, kThreads>(shared.keys, head_of(a.k, place),
                                         int(a.kv_heads) * kHeadDim,
                                         shared.row_of_key[buffer] + rank * kKeys, tid);
  }
  __device__ __forceinline__ void stage_values(const AttendPlace& place, int buffer) {
    copy_rows<kChunkKeys, kValues, kThreads>(shared.values, head_of(a.v, place) + rank * kValues,
                                             int(a.kv_heads) * kHeadDim, shared.row_of_key[buffer],
                                             tid);
  }

  // Warps that score the same tile of queries share the keys.
  struct Share {
    int tile, turn, turns;
  };
  __device__ __forceinline__ Share share(int queries) const {
    const int turns = kWarps / ceil_div(queries, kTile);
    return {warp / turns, warp % turns, turns};
  }

  __device__ __forceinline__ void load_queries(int buffer) {
    const int tile = share(shared.bounds[buffer].queries).tile;
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      const int i = tile * kTile + (t ^ lane >> 4);
      const int at = i < kQueries ? shared.query[buffer][i].at : -1;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float4 v = {0.f, 0.f, 0.f, 0.f};
        if (at >= 0)
          v = *reinterpret_cast<const float4*>(a.q + int64_t(at) * kHeadDim + step * kAccumulators +
                                               kPerLane * lane);
        q[t][4 * step] = v.x, q[t][4 * step + 1] = v.y;
        q[t][4 * step + 2] = v.z, q[t][4 * step + 3] = v.w;
      }
    }
  }

  __device__ __forceinline__ void score(int buffer) {
    const AttendBounds bounds = shared.bounds[buffer];
    const Share mine = share(bounds.queries);
    if (mine.tile * kTile >= bounds.queries) return;
    const int begin = bounds.begin - rank * kKeys, end = bounds.end - rank * kKeys;
    constexpr int kLast = kLanes / 2 / kKeyTile;  // lanes that end with the same sum
    const int turned = lane / kLast % kKeyTile;   // which key stands first
    for (int key = mine.turn * kKeyTile; key < kKeys; key += mine.turns * kKeyTile) {
      if (key + kKeyTile <= begin || key >= end) continue;
      float v[kTile / 2][kKeyTile];
#pragma unroll
      for (int j = 0; j < kKeyTile; ++j) {
        const T* at = shared.keys + (key + (j ^ turned)) * kHeadDim + kPerLane * lane;
        float k[kSteps][kPerLane], z[kTile];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_values(at + step * kAccumulators, k[step]);
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          float acc[kPerLane];
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) {
            acc[e] = 0.f;
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
              acc[e] = fma(q[t][kPerLane * step + e], k[step][e], acc[e]);
          }
          z[t] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        }
#pragma unroll
        for (int t = 0; t < kTile / 2; ++t) v[t][j] = z[2 * t] + gpu::exchange(z[2 * t + 1], 16);
      }
#pragma unroll
      for (int t = 0; t < kTile / 2; ++t) {
#pragma unroll
        for (int half = kKeyTile / 2; half > 0; half /= 2)
#pragma unroll
          for (int j = 0; j < half; ++j)
            v[t][j] = v[t][j] + gpu::exchange(v[t][j + half], kLast * half);
        const float sum = gpu::sum_lanes(v[t][0], kLast);
        store_if(lane % kLast == 0,
                 &shared.score[mine.tile * kTile + 2 * t + (lane >> 4)][key + turned],
                 mul(sum, a.scale));
      }
    }
  }

  // Scores to probabilities, in every block. Both halves of a cluster's meeting in between.
  __device__ __forceinline__ void soften(int buffer, bool first_chunk, bool& started) {
    const int queries = shared.bounds[buffer].queries;
    const int quad = tid % kQuads, slot = tid / kQuads, key = rank * kKeys + 4 * quad;
    const float none = -bit_cast<float>(0x7f800000u);
    float s[kRounds][4];
    int2 keys[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * kSoft + warp * kLanes / kQuads >= queries) break;
      const int i = r * kSoft + slot < kQueries ? r * kSoft + slot : kQueries - 1;
      keys[r] = {shared.query[buffer][i].begin - key, shared.query[buffer][i].end - key};
      load_values(&shared.score[i][4 * quad], s[r]);
      float most = none;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e >= keys[r].x && e < keys[r].y) most = select(s[r][e] > most, s[r][e], most);
      }
      most = gpu::max_lanes(most, kQuads);
      store_in_if(quad < kRanks && r * kSoft + slot < queries,
                  address_in(&shared.most[i][rank], quad % kRanks), most);
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int i = r * kSoft + slot;
      if (i >= queries) break;
      const float m = most_of(i);
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) p[e] = e >= keys[r].x && e < keys[r].y ? exp(s[r][e] - m) : 0.f;
#pragma unroll
      for (int other = 0; other < kRanks; ++other)
        store_in(address_in(&shared.p[i][key], other), float4{p[0], p[1], p[2], p[3]});
    }
    if (tid < queries) {
      const bool exists = shared.query[buffer][tid].begin < shared.query[buffer][tid].end;
      const float m = most_of(tid);
      if (first_chunk) started = false;
      int join = exists ? kFirst : kNothing;
      if (exists && started) {
        const MergeWeights weights = merge_weights(shared.m[tid], m);
        shared.a[tid] = weights.a;
        shared.b[tid] = weights.b;
        shared.m[tid] = weights.m;
        join = kMerge;
      } else if (exists) {
        shared.m[tid] = m;
      }
      started = started || exists;
      shared.join[tid] = join;
    }
  }
  __device__ __forceinline__ float most_of(int i) const {
    float m = shared.most[i][0];
#pragma unroll
    for (int r = 1; r < kRanks; ++r) m = select(shared.most[i][r] > m, shared.most[i][r], m);
    return m;
  }

  // o of this chunk for kEach queries and kWide dims of a thread, and how it comes to the piece.
  // What it reads of shared memory is what this takes, so threads have many of both.
  template <int kEach, int kWide>
  __device__ __forceinline__ void weigh(int buffer, bool last) {
    const AttendBounds bounds = shared.bounds[buffer];
    constexpr int kSame = kValues / kWide;  // threads of the same queries
    const int dim = tid % kSame * kWide, first = tid / kSame * kEach;
    if (first >= bounds.queries) return;
    const T* values = shared.values + dim;
    float o[kEach][kWide];
#pragma unroll
    for (int e = 0; e < kEach; ++e)
#pragma unroll
      for (int d = 0; d < kWide; ++d) o[e][d] = 0.f;
    const auto some = [&](int key) {  // four keys, of which a query may not see all
      for (int j = key; j < key + 4; ++j) {
        float v[kWide];
        load_values(values + j * kValues, v);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float p = shared.p[first + e][j];
          const bool visible =
              j >= shared.query[buffer][first + e].begin && j < shared.query[buffer][first + e].end;
#pragma unroll
          for (int d = 0; d < kWide; ++d) o[e][d] = select(visible, fma(p, v[d], o[e][d]), o[e][d]);
        }
      }
    };
    int key = bounds.begin / 4 * 4;
    const int full = (bounds.common_begin + 3) / 4 * 4, full_end = bounds.common_end / 4 * 4;
    for (; key < full && key < bounds.end; key += 4) some(key);
#pragma unroll 2
    for (; key < full_end; key += 4) {
      float v[4][kWide];
#pragma unroll
      for (int j = 0; j < 4; ++j) load_values(values + (key + j) * kValues, v[j]);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        float p[4];
        load_values(&shared.p[first + e][key], p);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int d = 0; d < kWide; ++d) o[e][d] = fma(p[j], v[j][d], o[e][d]);
      }
    }
    for (; key < bounds.end; key += 4) some(key);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (first + e >= bounds.queries) break;
      const int join = shared.join[first + e];
      const float before = shared.a[first + e], now = shared.b[first + e];
#pragma unroll
      for (int d = 0; d < kWide; ++d) {
        if (join == kFirst) run[e][d] = o[e][d];
        if (join == kMerge) run[e][d] = merge_value(run[e][d], before, o[e][d], now);
      }
      if (last)
        store_values(
            w.o + int64_t(shared.query[buffer][first + e].slot) * kHeadDim + rank * kValues + dim,
            run[e]);
    }
  }

  // l of this block's queries, a warp each.
  __device__ __forceinline__ void sum(int buffer, bool last) {
    for (int i = warp * kRanks + rank; i < shared.bounds[buffer].queries; i += kWarps * kRanks) {
      float low[4], high[4], acc[kPerLane];
      load_values(&shared.p[i][kPerLane * lane], low);
      load_values(&shared.p[i][kAccumulators + kPerLane * lane], high);
      for (int j = 0; j < kPerLane; ++j) acc[j] = low[j] + high[j];
      float l = gpu::fold_lanes(acc);
      const int join = shared.join[i];
      if (join == kNothing) l = shared.l[i];
      if (join == kMerge) l = merge_value(shared.l[i], shared.a[i], l, shared.b[i]);
      store_if(lane == 0, &shared.l[i], l);
      float2* ml = w.ml + shared.query[buffer][i].slot;
      store_if(lane == 0 && last, &ml->x, shared.m[i]);
      store_if(lane == 0 && last, &ml->y, l);
    }
  }

  __device__ __forceinline__ void weigh_all(int buffer, bool last) {
    // few queries: a thread each, so that all threads have some
    if (shared.bounds[buffer].queries <= kThreads / (kValues / kMostWide))
      weigh<1, kMostWide>(buffer, last);
    else
      weigh<kMostEach, kMostWide>(buffer, last);
  }

  __device__ __forceinline__ void work() {
    AttendItems& items = shared.items;
    if (warp == 0) items.count(a, w, kQueries);
    __syncthreads();
    if (tid == 0) items.find(a, w, kQueries, 0, int(blockIdx.x) / kRanks, items.place[0]);
    __syncthreads();
    if (!items.place[0].there) return;
    cluster_arrive();      // nobody writes into a block that has not begun
    bool started = false;  // of query tid: its piece has a chunk
    bool any = false;      // there is a place now; at first there is a next one only
    for (int at = 2, buffer = 1;; buffer ^= 1) {
      const AttendPlace& now = shared.items.place[at];
      at = at == 2 ? 0 : at + 1;
      const AttendPlace& next = shared.items.place[at];
      const bool more = next.there;
      const bool fresh = any && now.chunk == now.begin, last = any && now.chunk + 1 == now.end;
      int page[kPagesEach];
      for (int i = 0; more && i < kPagesEach; ++i) page[i] = next.page_of(a, tid + i * kThreads);
      if (any) {
        wait_copies<1>();
        __syncthreads();
        score(buffer);
      }
      if (more) prepare(next, buffer ^ 1, page);
      __syncthreads();
      if (more) {
        stage_keys(next, buffer ^ 1);
        if (next.chunk == next.begin) load_queries(buffer ^ 1);
      }
      end_copies();
      if (any) {
        soften(buffer, fresh, started);
        wait_copies<1>();
        cluster_arrive();
      }
      cluster_wait();
      if (more && tid == kThreads - 1)
        items.find_next(a, w, kQueries, kRanks, next, items.place[at == 2 ? 0 : at + 1]);
      if (any) {
        weigh_all(buffer, last);
        sum(buffer, last);
      }
      if (!more) return;
      __syncthreads();
      stage_values(next, buffer ^ 1);
      end_copies();
      any = true;
    }
  }
};

template <class A>
__global__ void __launch_bounds__(A::kThreads, A::kResident)
    attend_pieces(const __grid_constant__ AttentionView a,
                  const __grid_constant__ AttentionPieces w) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char memory[];
  gpu::start();
  A(a, w, *reinterpret_cast<typename A::Shared*>(memory)).work();
#endif
}

}  // namespace dflash::cuda
