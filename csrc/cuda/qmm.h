// How a quantized matmul of some shape is cut for a device. None of it reaches the arithmetic.
#pragma once
#include "cuda/qmm.cuh"

namespace dflash::cuda {

struct QmmDevice {
  int multiprocessors, shared_bytes;  // the latter of a block, at most
  bool clusters;
};

// Threads of the kernel for up to kTokens * groups rows: a warp brings activations, the others
// multiply. More rows need more registers.
template <int kGroups>
constexpr int kQmmThreads = kGroups <= 2   ? 512
                            : kGroups == 4 ? 384
                                           : 256;

// body.operator()<kGroups>() for 1, 2, 4 or 8 groups.
template <class Body>
void with_groups(int groups, Body&& body) {
  switch (groups) {
    case 1:
      return body.template operator()<1>();
    case 2:
      return body.template operator()<2>();
    case 4:
      return body.template operator()<4>();
    default:
      return body.template operator()<8>();
  }
}

struct QmmLaunch {
  int groups;  // 0: the device has too little shared memory
  unsigned grid;
  int64_t global_sums;  // floats, or 0: they fit shared memory
};

inline QmmShared place_shared(const QmmArgs& m, int groups, bool sums_here) {
  QmmShared s{};
  s.ring = m.x_buffers * kTokens * groups * kRowBytes;
  s.sums = s.ring + m.warps * m.stages * m.slot_bytes;
  const int leaf_sums = kTileRows * kTokens * groups * int(sizeof(float));
  s.counters = s.sums + (sums_here ? m.buffers * m.chunk * m.leaves * leaf_sums : 0);
  s.barriers = ceil_div(s.counters + m.buffers * m.chunk * int(sizeof(int)), 8) * 8;
  s.bytes = s.barriers + 8 * (m.warps * m.stages + 2 * m.x_buffers);
  return s;
}

// Fills in what of `m` belongs to the cut; segments, count and tiles are given. On an H200 two
// stages of a tile suffice, a third leaf of activations helps more than a third stage, and sums in
// global memory cost next to nothing.
inline QmmLaunch plan_launch(QmmArgs& m, const QmmDevice& device) {
  QmmLaunch launch{};
  launch.groups = m.count <= 4 ? 1 : m.count <= 8 ? 2 : m.count <= 16 ? 4 : 8;
  m.leaves = ceil_div(m.tiles, kLeafTiles);
  int64_t rows = 0;
  int tile_bytes = 0;
  for (int s = 0; s < m.segments; ++s) {
    rows += (m.segment[s].rows + kTileRows - 1) / kTileRows;
    tile_bytes = m.segment[s].tile_bytes > tile_bytes ? m.segment[s].tile_bytes : tile_bytes;
  }
  // leaves of the block that has most to do, without and with clusters of two
  const int64_t blocks = device.multiprocessors;
  const int64_t alone = ceil_div<int64_t>(rows, blocks) * m.leaves;
  const int64_t paired = ceil_div<int64_t>(rows, blocks / 2) * ceil_div(m.leaves, 2);
  m.cluster = device.clusters && m.leaves > 1 && paired * 20 < alone * 19 ? 2 : 1;
  const int64_t clusters = blocks / m.cluster;
  launch.grid = unsigned(rows < clusters ? rows : clusters) * m.cluster;
  with_groups(launch.groups, [&]<int kGroups>() { m.warps = kQmmThreads<kGroups> / kLanes - 1; });

  // All tile rows of a block in one chunk, one more than its share: that is cut by bytes. Where
  // there are many or several segments, two chunks.
  const int64_t most = ceil_div<int64_t>(rows, launch.grid / m.cluster) + (m.segments > 1 ? 1 : 0);
  const bool many = most > 32 && m.cluster == 1;
  m.chunk = many ? 16 : int(most);
  m.buffers = many || (m.segments > 1 && m.cluster == 1) ? 2 : 1;
  m.stages = 2;
  for (m.span = launch.groups == 8 ? 2 : 1; m.span >= 1; --m.span) {
    m.slot_bytes = m.span * tile_bytes;
    // with leaves = 1 a third would let a chunk's sums be overwritten
    for (m.x_buffers = m.leaves == 1 ? 2 : 3; m.x_buffers >= 2; --m.x_buffers)
      for (const bool here : {true, false}) {
        m.at = place_shared(m, launch.groups, here);
        if (m.at.bytes > device.shared_bytes) continue;
        const int row_sums = m.leaves * kTileRows * kTokens * launch.groups;
        if (!here) launch.global_sums = int64_t(launch.grid) * m.buffers * m.chunk * row_sums;
        return launch;
      }
  }
  launch.groups = 0;
  return launch;
}

}  // namespace dflash::cuda
