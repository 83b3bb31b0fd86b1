// Residual addition and RMSNorm, a warp per row.
#pragma once
#include "core/gdn_args.h"
#include "core/norm.h"
#include "gpu/warp.cuh"

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

}  // namespace dflash::gpu
