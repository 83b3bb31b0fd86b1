// Residual addition and RMSNorm: a block per row, a warp per leaf of core/reduce.h at a time; or a
// warp per row, for rows that cannot be read four values at a time.
#pragma once
#include "core/gdn_args.h"
#include "core/norm.h"
#include "gpu/act.cuh"
#include "gpu/four.cuh"

namespace dflash::gpu {

// A lane reads back only what it wrote itself, so the row needs no barrier.
template <class R>
__global__ void add_rms_norm(NormArgs args) {
  const int64_t row = warp_id(), columns = args.columns;
  if (row >= args.rows) return;
  R* residual = static_cast<R*>(args.residual) + row * columns;
  const auto add = [&](int64_t c) {
    if (args.x.data)
      store_float(residual + c, to_float(residual[c]) +
                                    load_float(args.x.data, args.x.type, row * args.x.stride + c));
    if (args.capture) static_cast<R*>(args.capture)[row * args.capture_stride + c] = residual[c];
    return to_float(residual[c]);
  };
  Tree<float> tree;
  for (int64_t leaf = 0; leaf < columns; leaf += kLeaf) {
    float acc[kPerLane] = {};
    const int64_t end = leaf + kLeaf < columns ? leaf + kLeaf : columns;
    for (int64_t c = leaf + kPerLane * lane_id(); c < end; c += kAccumulators)
      for (int j = 0; j < kPerLane && c + j < end; ++j) {
        const float value = add(c + j);
        acc[j] = fma(value, value, acc[j]);
      }
    tree.push(fold_lanes(acc));
  }
  const float scale = rms_scale(tree.join(), columns, args.eps);
  for (int64_t c = kPerLane * lane_id(); c < columns; c += kAccumulators)
    for (int j = 0; j < kPerLane && c + j < columns; ++j) {
      const float w = load_float(args.weight, args.weight_type, c + j);
      args.out[row * columns + c + j] =
          normed(to_float(residual[c + j]), scale, args.plus_one ? 1.f + w : w);
    }
}

constexpr int kNormWarps = 8, kMostLeaves = 32, kLeafParts = kLeaf / kAccumulators;

// Tree of core/reduce.h over n <= kNormWarps leaves, level by level: a node without a neighbour
// goes up as it is. In registers, which Tree's stack is not.
__device__ inline float join_leaves(const float* sums, int n) {
  float node[kNormWarps];
#pragma unroll
  for (int i = 0; i < kNormWarps; ++i) node[i] = sums[i];
#pragma unroll
  for (int step = 1; step < kNormWarps; step *= 2)
#pragma unroll
    for (int i = 0; i + step < kNormWarps; i += 2 * step)
      if (i + step < n) node[i] = node[i] + node[i + step];
  return node[0];
}

__device__ inline float join_tree(const float* sums, int n) {
  Tree<float> tree;
  for (int i = 0; i < n; ++i) tree.push(sums[i]);
  return tree.join();
}

// kHeld: no warp has two leaves, so that it keeps its values in registers.
template <class R, bool kHeld>
__global__ void __launch_bounds__(kNormWarps* kLanes, 2) add_rms_norm_leaves(NormArgs args) {
  __shared__ float sums[kHeld ? kNormWarps : kMostLeaves];
  __shared__ __align__(16) float values[kNormWarps][kLeaf];
  const int warp = int(threadIdx.x) / kLanes, lane = lane_id(), warps = int(blockDim.x) / kLanes;
  const int64_t row = blockIdx.x, columns = args.columns;
  const int leaves = int(ceil_div<int64_t>(columns, kLeaf));
  wait_for_earlier();
  let_next_begin();
  R* residual = static_cast<R*>(args.residual) + row * columns;
  Four x[kLeafParts];
  for (int leaf = warp; leaf < leaves; leaf += warps) {
    const int64_t first = int64_t(leaf) * kLeaf + kPerLane * lane;
    Four added[kLeafParts];
#pragma unroll
    for (int p = 0; p < kLeafParts; ++p) {
      const int64_t c = first + p * kAccumulators;
      x[p] = c < columns ? load_four(residual + c) : Four{};
      added[p] = args.x.data && c < columns ? load_four(args.x, row * args.x.stride + c) : Four{};
    }
    float acc[kPerLane] = {};
#pragma unroll
    for (int p = 0; p < kLeafParts; ++p) {
      const int64_t c = first + p * kAccumulators;
      if (c >= columns) continue;
      if (args.x.data) {
        for (int j = 0; j < kPerLane; ++j) x[p].x[j] = stored<R>(x[p].x[j] + added[p].x[j]);
        store_four(residual + c, x[p]);
      }
      if (args.capture)
        store_four(static_cast<R*>(args.capture) + row * args.capture_stride + c, x[p]);
      for (int j = 0; j < kPerLane; ++j) acc[j] = fma(x[p].x[j], x[p].x[j], acc[j]);
    }
    const float sum = fold_lanes(acc);
    if (lane == 0) sums[leaf] = sum;
  }
  __syncthreads();
  const float total = kHeld ? join_leaves(sums, leaves) : join_tree(sums, leaves);
  const float scale = rms_scale(total, columns, args.eps);

  for (int leaf = warp; leaf < leaves; leaf += warps) {
    const int64_t first = int64_t(leaf) * kLeaf + kPerLane * lane;
#pragma unroll
    for (int p = 0; p < kLeafParts; ++p) {
      const int64_t c = first + p * kAccumulators;
      Four y = {};
      if (c < columns) {
        if (!kHeld) x[p] = load_four(residual + c);
        const Four w = load_four({args.weight, 0, args.weight_type}, c);
        for (int j = 0; j < kPerLane; ++j)
          y.x[j] = normed(x[p].x[j], scale, args.plus_one ? 1.f + w.x[j] : w.x[j]);
        if (args.act_mode == 0) store_four(args.out + row * columns + c, y);
      }
      if (args.act_mode != 0) store_four(values[warp] + p * kAccumulators + kPerLane * lane, y);
    }
    if (args.act_mode == 0) continue;
    sync_warp();
    for (int g = 0; g < kLeaf / kActGroup; ++g) {
      const int64_t group = int64_t(leaf) * (kLeaf / kActGroup) + g;
      if (group * kActGroup >= columns) break;
      const float* at = values[warp] + g * kActGroup + kActPerLane * lane;
      float y[kActPerLane];
      for (int i = 0; i < kActPerLane; ++i) y[i] = at[i];
      const int64_t n = row * ceil_div<int64_t>(columns, kActGroup) + group;
      if (args.act_mode == kActPlanes)
        quantize_group(y, reinterpret_cast<ActPlanes*>(args.packed) + n);
      else
        quantize_group(y, reinterpret_cast<Q8Group*>(args.packed) + n);
    }
    sync_warp();
  }
}

}  // namespace dflash::gpu
