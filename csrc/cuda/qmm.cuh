// Quantized matmul on repacked tiles (tile.cuh) and planes of activations, for up to 32 rows.
//
// A thread block owns a run of tile rows (16 rows of the weight over all of K) and stays until they
// are done. Its units of work are leaves: a tile row times 1024 of K. Warps take units in turn,
// each with a ring of tiles in shared memory that it fills for itself; one warp more brings the
// leaf of all activations, a few ahead, that the units of one moment share. A unit's leaf sums
// are stored; whoever finishes the last leaf of a tile row joins them by the tree of core/reduce.h.
// With two blocks to a cluster each has half of the leaves, and they join together.
//
// Integer sums are exact in any order; the float operations of an output, from superblock to tree,
// are the contract's, whoever executes them. So nothing here can change a bit: not the number of
// rows, the grid, the warps, or the ring.
#pragma once
#include <cooperative_groups.h>

#include "cuda/shared.cuh"
#include "cuda/tile_product.cuh"

namespace dflash::cuda {

constexpr int kMaxSegments = 8;

struct QmmSegment {
  const uint8_t* weight;
  int type, rows, column, tile_bytes;
};

struct QmmArgs {
  QmmSegment segment[kMaxSegments];
  int segments;
  int count;       // rows of activations
  int tiles;       // of 256 along K
  int chunk;       // tile rows whose leaf sums are stored at a time
  int buffers;     // of a chunk: 2, or 1 if a block has no more than a chunk
  int stages;      // of a warp's ring
  int x_buffers;   // leaves of activations: 2 or 3
  int span;        // tiles of a stage
  int slot_bytes;  // of a stage
  int64_t x_stride, out_stride;
  const uint8_t* x;
  const float* bias;  // or null
  float* out;
  float* sums;  // of leaves, where shared memory is too small; or null
};

// Shared memory of a block, by offsets.
struct QmmShared {
  int ring, sums, counters, barriers, bytes;
};

template <int kGroups>
constexpr int kLeafSums = kTileRows * kTokens * kGroups;

__host__ __device__ inline QmmShared qmm_shared(const QmmArgs& m, int groups, int warps, int leaves,
                                                bool sums_here) {
  QmmShared s{};
  s.ring = m.x_buffers * kTokens * groups * kRowBytes;
  s.sums = s.ring + warps * m.stages * m.slot_bytes;
  const int leaf_sums = kTileRows * kTokens * groups * 4;
  s.counters = s.sums + (sums_here ? m.buffers * m.chunk * leaves * leaf_sums : 0);
  s.barriers = (s.counters + m.buffers * m.chunk * 4 + 7) / 8 * 8;
  s.bytes = s.barriers + 8 * (warps * m.stages + 2 * m.x_buffers);
  return s;
}

// Leaf sums s[l * stride], s of this thread alone: joined in place, as Tree joins them.
template <int kCount>
__device__ __forceinline__ void join_leaves(float* s, int stride, int leaves, float (&out)[kCount],
                                            int between) {
  for (int step = 1; step < leaves; step *= 2)
    for (int l = 0; l + step < leaves; l += 2 * step) {
      float left[kCount], right[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) left[i] = s[l * stride + i * between];
#pragma unroll
      for (int i = 0; i < kCount; ++i) right[i] = s[(l + step) * stride + i * between];
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[l * stride + i * between] = left[i] + right[i];
    }
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = s[i * between];
}

// Element e of a leaf's sums: half e / (32 kGroups) of the rows, group of tokens, lane q 8 + g.
template <int kGroups>
__device__ inline void store_element(const QmmArgs& m, const QmmSegment& segment, int tile_row,
                                     int e, float value) {
  const int half = e / (32 * kGroups), t = e / 32 % kGroups, q = e % 32 / 8, g = e % 8;
  const int row = tile_row * kTileRows + 8 * half + g, token = kTokens * t + q;
  if (row >= segment.rows || token >= m.count) return;
  const int column = segment.column + row;
  m.out[token * m.out_stride + column] = m.bias ? value + m.bias[column] : value;
}

// The tile rows [first, first + count) of a segment that fall to this cluster: an equal share of
// the bytes of all segments.
struct Share {
  int first, count;
};

__device__ inline int64_t round_up_div(int64_t a, int64_t b) {
  return a <= 0 ? 0 : (a + b - 1) / b;
}

__device__ inline Share share_of(const QmmArgs& m, int segment, int64_t total, int64_t before,
                                 int64_t cluster, int64_t clusters) {
  const QmmSegment& s = m.segment[segment];
  const int64_t rows = (s.rows + kTileRows - 1) / kTileRows;
  const int64_t low = total * cluster / clusters - before;
  const int64_t high = total * (cluster + 1) / clusters - before;
  int64_t first = round_up_div(low, s.tile_bytes), end = round_up_div(high, s.tile_bytes);
  first = first < rows ? first : rows;
  end = end < rows ? end : rows;
  return {int(first), int(end - first)};
}

// A place in a ring, and the parity of the barrier there.
struct Turn {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void next(int slots) {
    if (++slot < slots) return;
    slot = 0;
    parity ^= 1;
  }
};

// What a warp carries from segment to segment.
struct Position {
  int sequence = 0;  // leaf of activations, counted over the kernel
  int chunk = 0;     // likewise: even and odd ones alternate between two places for their sums
  Turn x, tile;
};

template <int kGroups>
struct Block {
  const QmmArgs& m;
  uint8_t* memory;
  uint32_t base;
  QmmShared at;
  int warps, warp, lane;
  int leaf_begin, leaves, all_leaves;  // this block's share of the leaves
  float* sums;
  int* counters;

  __device__ Barrier ring_full(int slot) const {
    return {base + uint32_t(at.barriers + 8 * (warp * m.stages + slot))};
  }
  __device__ Barrier x_full(int buffer) const {
    return {base + uint32_t(at.barriers + 8 * (warps * m.stages + buffer))};
  }
  __device__ Barrier x_empty(int buffer) const { return x_full(m.x_buffers + buffer); }

  __device__ int tiles_of(int leaf) const {
    const int left = m.tiles - leaf * kLeafTiles;
    return left < kLeafTiles ? left : kLeafTiles;
  }
  // Sums of leaf `leaf` (counted from leaf_begin) of a tile row of a chunk.
  __device__ float* sums_of(int slot, int leaf) const {
    return sums + (int64_t(slot) * all_leaves + leaf) * kLeafSums<kGroups>;
  }
};

struct Unit {
  int chunk, leaf, row;  // row: tile row of the share

  __device__ Unit(int unit, int chunk_rows, int rows, int leaves) {
    chunk = unit / (chunk_rows * leaves);
    const int inside = unit - chunk * chunk_rows * leaves, left = rows - chunk * chunk_rows;
    const int size = left < chunk_rows ? left : chunk_rows;
    leaf = inside / size;
    row = chunk * chunk_rows + inside % size;
  }
};

// Brings the leaves of activations for one segment, chunk by chunk.
template <int kGroups>
__device__ void feed(const Block<kGroups>& b, int rows, Turn& x) {
  for (int chunk = 0; chunk * b.m.chunk < rows; ++chunk)
    for (int leaf = b.leaf_begin; leaf < b.leaf_begin + b.leaves; ++leaf) {
      b.x_empty(x.slot).wait(x.parity ^ 1);
      fetch_rows(b.base + uint32_t(x.slot * kTokens * kGroups * kRowBytes), kRowBytes,
                 b.m.x + int64_t(leaf) * kRowBytes, b.m.x_stride, b.m.count,
                 uint32_t(b.tiles_of(leaf) * kGroupBytes), b.x_full(x.slot), b.lane);
      x.next(b.m.x_buffers);
    }
}

// Until leaf `sequence` of activations is the current one; lets go of those before.
template <int kGroups>
__device__ __forceinline__ void advance(const Block<kGroups>& b, Position& at, int sequence) {
  for (; at.sequence < sequence; ++at.sequence) {
    b.x_full(at.x.slot).wait(at.x.parity);
    __syncwarp();
    if (b.lane == 0) b.x_empty(at.x.slot).arrive();
    at.x.next(b.m.x_buffers);
  }
}

template <class F, int kGroups>
__device__ void multiply_segment(const Block<kGroups>& b, const QmmSegment& segment, Share share,
                                 Position& at) {
  const QmmArgs& m = b.m;
  const int units = share.count * b.leaves, lane = b.lane;
  const int64_t row_bytes = int64_t(m.tiles) * Tile<F>::kBytes;
  const uint8_t* weight = segment.weight + share.first * row_bytes;
  const int ring = b.at.ring + b.warp * m.stages * m.slot_bytes;

  // the next tiles to bring
  int ahead_unit = b.warp, ahead_left = 0, ahead_slot = at.tile.slot;
  const uint8_t* from = nullptr;
  const auto fetch = [&] {
    if (ahead_left == 0) {
      if (ahead_unit >= units) return;
      const Unit u(ahead_unit, m.chunk, share.count, b.leaves);
      const int leaf = b.leaf_begin + u.leaf;
      from = weight + u.row * row_bytes + int64_t(leaf) * kLeafTiles * Tile<F>::kBytes;
      ahead_left = b.tiles_of(leaf);
      ahead_unit += b.warps;
    }
    const int count = ahead_left < m.span ? ahead_left : m.span;
    const uint32_t bytes = uint32_t(count * Tile<F>::kBytes);
    fetch_once(b.base + uint32_t(ring + ahead_slot * m.slot_bytes), from, bytes,
               b.ring_full(ahead_slot), lane);
    from += bytes;
    ahead_left -= count;
    ahead_slot = ahead_slot + 1 == m.stages ? 0 : ahead_slot + 1;
  };
  for (int i = 0; i < m.stages; ++i) fetch();

  const int first_sequence = at.sequence;
  for (int unit = b.warp; unit < units; unit += b.warps) {
    const Unit u(unit, m.chunk, share.count, b.leaves);
    advance(b, at, first_sequence + u.chunk * b.leaves + u.leaf);
    b.x_full(at.x.slot).wait(at.x.parity);
    const uint8_t* x = b.memory + at.x.slot * kTokens * kGroups * kRowBytes;
    float leaf[kGroups][2] = {};
    for (int left = b.tiles_of(b.leaf_begin + u.leaf); left > 0; left -= m.span) {
      b.ring_full(at.tile.slot).wait(at.tile.parity);
      const uint8_t* tile = b.memory + ring + at.tile.slot * m.slot_bytes;
      const uint8_t* end = tile + (left < m.span ? left : m.span) * Tile<F>::kBytes;
#pragma unroll 1
      for (; tile != end; tile += Tile<F>::kBytes, x += kGroupBytes)
        multiply_tile<F, kGroups>(tile, x, lane, leaf);
      at.tile.next(m.stages);
      __syncwarp();  // all have read the slot
      fetch();
    }
    const int slot = (at.chunk + u.chunk) % m.buffers * m.chunk + u.row % m.chunk;
    float* sums = b.sums_of(slot, u.leaf) + (lane % 4 * 8 + lane / 4);
#pragma unroll
    for (int t = 0; t < kGroups; ++t) {
      sums[32 * t] = leaf[t][0];
      sums[32 * (kGroups + t)] = leaf[t][1];
    }
    if (b.leaves < b.all_leaves) continue;  // the cluster joins at the end
    int before = 0;
    __threadfence_block();
    __syncwarp();
    if (lane == 0) before = atomicAdd(b.counters + slot, 1);
    before = __shfl_sync(gpu::kAllLanes, before, 0);
    if (before + 1 < b.leaves) continue;
    __threadfence_block();
    if (lane == 0) b.counters[slot] = 0;
    float value[2 * kGroups];
    join_leaves<2 * kGroups>(b.sums_of(slot, 0) + lane, kLeafSums<kGroups>, b.leaves, value, 32);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i)
      store_element<kGroups>(m, segment, share.first + u.row, 32 * i + lane, value[i]);
    __syncwarp();
  }
  const int chunks = (share.count + m.chunk - 1) / m.chunk;
  advance(b, at, first_sequence + chunks * b.leaves);
  at.chunk += chunks;
}

// The two blocks of a cluster have the leaf sums of the same tile rows: each brings the other's
// sums of half of the elements and joins them.
template <int kGroups>
__device__ void join_cluster(const Block<kGroups>& b, const QmmSegment& segment, Share share,
                             float* other, int rank) {
  constexpr int kElements = kLeafSums<kGroups>;
  const int begin = rank * kElements / 2, per_row = kElements / 2;
  const int first_half = (b.all_leaves + 1) / 2;
  for (int i = threadIdx.x; i < share.count * per_row; i += blockDim.x) {
    const int row = i / per_row, e = begin + i % per_row;
    float* mine = b.sums_of(row, 0) + e;
    const float* theirs = other + int64_t(row) * b.all_leaves * kElements + e;
    const int count = b.all_leaves - b.leaves;
    // in K's order: rank 0's leaves first
    if (rank == 0) {
#pragma unroll 4
      for (int l = 0; l < count; ++l) mine[(first_half + l) * kElements] = theirs[l * kElements];
    } else {
      for (int l = b.leaves - 1; l >= 0; --l)
        mine[(first_half + l) * kElements] = mine[l * kElements];
#pragma unroll 4
      for (int l = 0; l < count; ++l) mine[l * kElements] = theirs[l * kElements];
    }
    float value[1];
    join_leaves<1>(mine, kElements, b.all_leaves, value, 0);
    store_element<kGroups>(b.m, segment, share.first + row, e, value[0]);
  }
}

template <int kGroups, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) qmm_tiles(const __grid_constant__ QmmArgs m) {
  extern __shared__ __align__(128) uint8_t memory[];
#if DFLASH_COPY_ENGINE
  const auto cluster = cooperative_groups::this_cluster();
  const int parts = int(cluster.num_blocks()), rank = int(cluster.block_rank());
#else
  const int parts = 1, rank = 0;
#endif
  const int warps = int(blockDim.x) / kLanes - 1;
  const int all_leaves = (m.tiles + kLeafTiles - 1) / kLeafTiles;
  const int half = (all_leaves + 1) / 2;
  Block<kGroups> b{m, memory, shared_address(memory)};
  b.at = qmm_shared(m, kGroups, warps, all_leaves, m.sums == nullptr);
  b.warps = warps;
  b.warp = int(threadIdx.x) / kLanes;
  b.lane = int(threadIdx.x) % kLanes;
  b.leaf_begin = rank == 0 ? 0 : half;
  b.leaves = parts == 1 ? all_leaves : rank == 0 ? half : all_leaves - half;
  b.all_leaves = all_leaves;
  const int64_t sums_per_block = int64_t(m.buffers) * m.chunk * all_leaves * kLeafSums<kGroups>;
  b.sums =
      m.sums ? m.sums + blockIdx.x * sums_per_block : reinterpret_cast<float*>(memory + b.at.sums);
  b.counters = reinterpret_cast<int*>(memory + b.at.counters);
  for (int i = threadIdx.x; i < m.buffers * m.chunk; i += blockDim.x) b.counters[i] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < warps * m.stages; ++i)
      Barrier{b.base + uint32_t(b.at.barriers + 8 * i)}.init(kFetchArrivals);
    for (int i = 0; i < m.x_buffers; ++i) {
      b.x_full(i).init(kFetchArrivals);
      b.x_empty(i).init(warps);
    }
#if DFLASH_COPY_ENGINE
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  __syncthreads();

  int64_t total = 0;
  for (int s = 0; s < m.segments; ++s)
    total += int64_t((m.segment[s].rows + kTileRows - 1) / kTileRows) * m.segment[s].tile_bytes;
  const int64_t clusters = gridDim.x / parts, mine = blockIdx.x / parts;
  const bool feeds = b.warp == warps;
  if (feeds) gpu::wait_for_earlier();
  if (feeds) gpu::let_next_begin();
  Position at;
  Turn fed;
  int64_t before = 0;
  for (int s = 0; s < m.segments; ++s) {
    const QmmSegment& segment = m.segment[s];
    const Share share = share_of(m, s, total, before, mine, clusters);
    before += int64_t((segment.rows + kTileRows - 1) / kTileRows) * segment.tile_bytes;
    if (share.count == 0) continue;
    if (feeds) {
      feed(b, share.count, fed);
    } else {
      switch (segment.type) {
        case Q4_K::kType:
          multiply_segment<Q4_K, kGroups>(b, segment, share, at);
          break;
        case Q5_K::kType:
          multiply_segment<Q5_K, kGroups>(b, segment, share, at);
          break;
        case Q6_K::kType:
          multiply_segment<Q6_K, kGroups>(b, segment, share, at);
          break;
        case IQ4_XS::kType:
          multiply_segment<IQ4_XS, kGroups>(b, segment, share, at);
          break;
        case Q8_0::kType:
          multiply_segment<Q8_0, kGroups>(b, segment, share, at);
          break;
        case Q4_0::kType:
          multiply_segment<Q4_0, kGroups>(b, segment, share, at);
          break;
      }
    }
#if DFLASH_COPY_ENGINE
    if (parts == 2) {
      cluster.sync();
      float* other = m.sums ? m.sums + (blockIdx.x ^ 1) * sums_per_block
                            : cluster.map_shared_rank(b.sums, rank ^ 1);
      join_cluster(b, segment, share, other, rank);
      cluster.sync();  // before the sums are overwritten, or the block leaves
    }
#endif
  }
}

}  // namespace dflash::cuda
