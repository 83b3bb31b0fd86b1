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

// Shared memory of a block, by offsets; activations come first.
struct QmmShared {
  int ring, sums, counters, barriers, bytes;
};

// Constants stay in constant memory: the kernel has no registers to spare for them.
struct QmmArgs {
  QmmSegment segment[kMaxSegments];
  QmmShared at;
  int segments;
  int count;       // rows of activations
  int tiles;       // of 256 along K
  int leaves;      // of 1024 along K
  int cluster;     // blocks that share tile rows: 1 or 2
  int warps;       // of a block that multiply
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

template <int kGroups>
constexpr int kLeafSums = kTileRows * kTokens * kGroups;

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

// A block's view of its arguments and shared memory.
template <int kGroups>
struct Block {
  static constexpr int kLeafBytes = kTokens * kGroups * kRowBytes;  // of activations

  const QmmArgs& m;
  uint8_t* memory;

  __device__ static int lane() { return int(threadIdx.x) % kLanes; }
  __device__ static int warp() { return int(threadIdx.x) / kLanes; }
  __device__ int rank() const { return int(blockIdx.x) % m.cluster; }
  // This block's leaves: all, or the first or the second half.
  __device__ int leaf_begin() const { return rank() == 0 ? 0 : (m.leaves + 1) / 2; }
  __device__ int leaves() const {
    return (m.leaves + (rank() == 0 ? m.cluster - 1 : 0)) / m.cluster;
  }
  __device__ int tiles_of(int leaf) const {
    const int left = m.tiles - leaf * kLeafTiles;
    return left < kLeafTiles ? left : kLeafTiles;
  }

  __device__ uint32_t address(int offset) const {
    return shared_address(memory) + uint32_t(offset);
  }
  __device__ Barrier barrier(int i) const { return {address(m.at.barriers + 8 * i)}; }
  __device__ Barrier ring_full(int slot) const { return barrier(warp() * m.stages + slot); }
  __device__ Barrier x_full(int buffer) const { return barrier(m.warps * m.stages + buffer); }
  __device__ Barrier x_empty(int buffer) const { return x_full(m.x_buffers + buffer); }
  __device__ int slot_at(int slot) const {
    return m.at.ring + (warp() * m.stages + slot) * m.slot_bytes;
  }

  // Sums of leaf `leaf` (counted from leaf_begin) of a tile row of a chunk, of a block.
  __device__ float* sums_of(int slot, int leaf) const { return sums_of(blockIdx.x, slot, leaf); }
  __device__ float* sums_of(unsigned block, int slot, int leaf) const {
    const int64_t n = (int64_t(slot) * m.leaves + leaf) * kLeafSums<kGroups>;
    if (!m.sums) return reinterpret_cast<float*>(memory + m.at.sums) + n;
    return m.sums + block * (int64_t(m.buffers) * m.chunk * m.leaves * kLeafSums<kGroups>)+n;
  }
  __device__ int* counter(int slot) const {
    return reinterpret_cast<int*>(memory + m.at.counters) + slot;
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
    for (int i = 0, leaf = b.leaf_begin(); i < b.leaves(); ++i, ++leaf) {
      b.x_empty(x.slot).wait(x.parity ^ 1);
      fetch_rows(b.address(x.slot * b.kLeafBytes), kRowBytes, b.m.x + int64_t(leaf) * kRowBytes,
                 b.m.x_stride, b.m.count, uint32_t(b.tiles_of(leaf) * kGroupBytes),
                 b.x_full(x.slot), b.lane());
      x.next(b.m.x_buffers);
    }
}

// Until leaf `sequence` of activations is the current one; lets go of those before.
template <int kGroups>
__device__ __forceinline__ void advance(const Block<kGroups>& b, Position& at, int sequence) {
  for (; at.sequence < sequence; ++at.sequence) {
    b.x_full(at.x.slot).wait(at.x.parity);
    __syncwarp();
    if (b.lane() == 0) b.x_empty(at.x.slot).arrive();
    at.x.next(b.m.x_buffers);
  }
}

template <class F, int kGroups>
__device__ void multiply_segment(const Block<kGroups>& b, const QmmSegment& segment, Share share,
                                 Position& at) {
  const QmmArgs& m = b.m;
  const int units = share.count * b.leaves(), lane = b.lane();
  const auto row_at = [&](int row) {
    return segment.weight + int64_t(share.first + row) * m.tiles * Tile<F>::kBytes;
  };

  // the next tiles to bring
  int ahead_unit = b.warp(), ahead_left = 0, ahead_slot = at.tile.slot;
  const uint8_t* from = nullptr;
  const auto fetch = [&] {
    if (ahead_left == 0) {
      if (ahead_unit >= units) return;
      const Unit u(ahead_unit, m.chunk, share.count, b.leaves());
      const int leaf = b.leaf_begin() + u.leaf;
      from = row_at(u.row) + int64_t(leaf) * kLeafTiles * Tile<F>::kBytes;
      ahead_left = b.tiles_of(leaf);
      ahead_unit += m.warps;
    }
    const int count = ahead_left < m.span ? ahead_left : m.span;
    const uint32_t bytes = uint32_t(count * Tile<F>::kBytes);
    fetch_once(b.address(b.slot_at(ahead_slot)), from, bytes, b.ring_full(ahead_slot), lane);
    from += bytes;
    ahead_left -= count;
    ahead_slot = ahead_slot + 1 == m.stages ? 0 : ahead_slot + 1;
  };
  for (int i = 0; i < m.stages; ++i) fetch();

  const int first_sequence = at.sequence;
  for (int unit = b.warp(); unit < units; unit += m.warps) {
    const Unit u(unit, m.chunk, share.count, b.leaves());
    advance(b, at, first_sequence + u.chunk * b.leaves() + u.leaf);
    b.x_full(at.x.slot).wait(at.x.parity);
    const uint8_t* x = b.memory + at.x.slot * b.kLeafBytes;
    float leaf[kGroups][2] = {};
    for (int left = b.tiles_of(b.leaf_begin() + u.leaf); left > 0; left -= m.span) {
      b.ring_full(at.tile.slot).wait(at.tile.parity);
      const uint8_t* tile = b.memory + b.slot_at(at.tile.slot);
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
    if (m.cluster > 1) continue;  // the cluster joins at the end
    int before = 0;
    __threadfence_block();
    __syncwarp();
    if (lane == 0) before = atomicAdd(b.counter(slot), 1);
    before = __shfl_sync(gpu::kAllLanes, before, 0);
    if (before + 1 < m.leaves) continue;
    __threadfence_block();
    if (lane == 0) *b.counter(slot) = 0;
    float value[2 * kGroups];
    join_leaves<2 * kGroups>(b.sums_of(slot, 0) + lane, kLeafSums<kGroups>, m.leaves, value, 32);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i)
      store_element<kGroups>(m, segment, share.first + u.row, 32 * i + lane, value[i]);
    __syncwarp();
  }
  const int chunks = (share.count + m.chunk - 1) / m.chunk;
  advance(b, at, first_sequence + chunks * b.leaves());
  at.chunk += chunks;
}

// The two blocks of a cluster have the leaf sums of the same tile rows: each brings the other's
// sums of half of the elements and joins them. other: its sums_of(0, 0).
template <int kGroups>
__device__ void join_cluster(const Block<kGroups>& b, const QmmSegment& segment, Share share,
                             const float* other) {
  constexpr int kElements = kLeafSums<kGroups>;
  const int rank = b.rank(), all = b.m.leaves, first = (all + 1) / 2;
  for (int i = threadIdx.x; i < share.count * (kElements / 2); i += blockDim.x) {
    const int row = i / (kElements / 2), e = rank * (kElements / 2) + i % (kElements / 2);
    float* mine = b.sums_of(row, 0) + e;
    const float* theirs = other + int64_t(row) * all * kElements + e;
    // in K's order: rank 0's leaves first
    if (rank == 0) {
#pragma unroll 4
      for (int l = first; l < all; ++l) mine[l * kElements] = theirs[(l - first) * kElements];
    } else {
      for (int l = all - 1; l >= first; --l) mine[l * kElements] = mine[(l - first) * kElements];
#pragma unroll 4
      for (int l = 0; l < first; ++l) mine[l * kElements] = theirs[l * kElements];
    }
    float value[1];
    join_leaves<1>(mine, kElements, all, value, 0);
    store_element<kGroups>(b.m, segment, share.first + row, e, value[0]);
  }
}

template <int kGroups, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) qmm_tiles(const __grid_constant__ QmmArgs m) {
  extern __shared__ __align__(128) uint8_t memory[];
  const Block<kGroups> b{m, memory};
  for (int i = threadIdx.x; i < m.buffers * m.chunk; i += blockDim.x) *b.counter(i) = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < m.warps * m.stages; ++i) b.barrier(i).init(kFetchArrivals);
    for (int i = 0; i < m.x_buffers; ++i) {
      b.x_full(i).init(kFetchArrivals);
      b.x_empty(i).init(m.warps);
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
  const int64_t clusters = gridDim.x / m.cluster, mine = blockIdx.x / m.cluster;
  const bool feeds = b.warp() == m.warps;
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
    if (m.cluster == 2) {
      const auto cluster = cooperative_groups::this_cluster();
      cluster.sync();
      join_cluster(b, segment, share,
                   m.sums ? b.sums_of(blockIdx.x ^ 1, 0, 0)
                          : cluster.map_shared_rank(b.sums_of(0, 0), b.rank() ^ 1));
      cluster.sync();  // before the sums are overwritten, or the block leaves
    }
#endif
  }
}

}  // namespace dflash::cuda
