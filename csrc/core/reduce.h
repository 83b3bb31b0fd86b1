// The one order in which floats are added up, on every backend.
//
// A leaf is 1024 consecutive elements. Element e of a leaf goes to accumulator e % 128, by one fma
// (or one add) in ascending e. Accumulator 4*lane + j belongs to virtual lane `lane` of 32: a warp
// reads a float4 a lane, a CPU eight vectors of 16. fold() adds the four of a lane, (0+1)+(2+3),
// then the lanes by halves: 16, 8, 4, 2, 1. Leaves are joined by Tree. So the order depends on the
// length alone: not on threads, tiles or the instruction set.
#pragma once
#include "core/hd.h"
#include "core/numeric.h"

namespace dflash {

constexpr int kLanes = 32, kPerLane = 4, kAccumulators = kLanes * kPerLane, kLeaf = 1024;

DFLASH_HD float fold(const float* acc) {  // [128]
  float lane[kLanes];
  for (int l = 0; l < kLanes; ++l)
    lane[l] = (acc[4 * l] + acc[4 * l + 1]) + (acc[4 * l + 2] + acc[4 * l + 3]);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int l = 0; l < step; ++l) lane[l] = lane[l] + lane[l + step];
  return lane[0];
}

// Pairwise joining of a stream of leaves, as a binary counter does it: a node covers 2^j leaves,
// what is left at the end is joined from the right. join(n leaves) splits at the largest power of
// two below n.
template <class T>
struct Tree {
  T node[24];
  int depth = 0;
  uint32_t leaves = 0;

  DFLASH_HD void push(T value) {
    for (uint32_t n = leaves; n & 1; n >>= 1) value = node[--depth] + value;
    node[depth++] = value;
    ++leaves;
  }
  DFLASH_HD T join() {
    T value = node[--depth];
    while (depth > 0) value = node[--depth] + value;
    return value;
  }
};

// The scalar statement of the order; backends copy it with vectors and must give its bits.
DFLASH_HD float dot(const float* a, const float* b, int64_t n) {
  if (n <= 0) return 0.f;
  Tree<float> tree;
  for (int64_t leaf = 0; leaf < n; leaf += kLeaf) {
    float acc[kAccumulators] = {};
    const int64_t end = leaf + kLeaf < n ? leaf + kLeaf : n;
    for (int64_t e = leaf; e < end; ++e) {
      float& slot = acc[(e - leaf) % kAccumulators];
      slot = fma(a[e], b[e], slot);
    }
    tree.push(fold(acc));
  }
  return tree.join();
}

}  // namespace dflash
