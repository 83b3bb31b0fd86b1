// Quantized matmul on GGUF's bytes: a warp per weight row and up to four activation rows. The
// arithmetic is the contract's; the speed of architecture-specific kernels is not sought here.
#pragma once
#include "core/formats/all.h"
#include "gpu/act.cuh"

namespace dflash::gpu {

constexpr int kMatmulRows = 4;  // activation rows that share a decoded weight
constexpr int kSuperblock = 256, kLeafSuperblocks = kLeaf / kSuperblock;
constexpr int kCodesPerLane = kSuperblock / kLanes;

struct MatmulView {
  const uint8_t* weight;  // [rows, row_bytes]
  const float* floats;    // [count, columns], or null:
  const void* packed;     // [count, ceil(columns / 256)] groups of act_mode
  int64_t act_mode;
  const float* bias;  // [rows] or null
  float* out;         // [count, out_stride]
  int64_t rows, row_bytes, count, columns, out_stride;
};

// Which types multiply in integers, and how a superblock's groups are scaled.
template <class F>
struct Scales {
  static constexpr bool kIntegers = false;
};

template <class F>
struct KScales {  // Q4_K, Q5_K
  static constexpr bool kIntegers = true, kSuperblocks = true, kMins = true;
  __device__ static int scale(const uint8_t* quant, int g) { return scale_min(quant + 4, g).scale; }
  __device__ static int min(const uint8_t* quant, int g) { return scale_min(quant + 4, g).min; }
  __device__ static float d(const uint8_t* quant) { return load_half(quant); }
  __device__ static float dmin(const uint8_t* quant) { return load_half(quant + 2); }
};
template <>
struct Scales<Q4_K> : KScales<Q4_K> {};
template <>
struct Scales<Q5_K> : KScales<Q5_K> {};
template <>
struct Scales<Q6_K> {
  static constexpr bool kIntegers = true, kSuperblocks = true, kMins = false;
  __device__ static int scale(const uint8_t* quant, int g) { return Q6_K::scale(quant, g); }
  __device__ static float d(const uint8_t* quant) { return load_half(quant + 208); }
};
template <>
struct Scales<IQ4_XS> {
  static constexpr bool kIntegers = true, kSuperblocks = true, kMins = false;
  __device__ static int scale(const uint8_t* quant, int g) { return IQ4_XS::scale(quant, g / 2); }
  __device__ static float d(const uint8_t* quant) { return load_half(quant); }
};
struct BlockScales {  // a half per 32 values
  static constexpr bool kIntegers = true, kSuperblocks = false, kMins = false;
  __device__ static float d(const uint8_t* quant) { return load_half(quant); }
};
template <>
struct Scales<Q8_0> : BlockScales {};
template <>
struct Scales<Q4_0> : BlockScales {};

// Eight consecutive codes of a quant as bytes.
template <class F>
__device__ void eight_codes(const uint8_t* quant, int first, int (&packed)[2]) {
  for (int half = 0; half < 2; ++half) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
      const int e = first + 4 * half + i;
      word |= uint32_t(uint8_t(F::code(quant, e / F::kGroup, e % F::kGroup))) << 8 * i;
    }
    packed[half] = int(word);
  }
}

struct PlaneSums {
  int hi, lo;

  __device__ float joined() const { return fma(float(hi), 254.f, float(lo)); }
};

// Lane l's eight activations, in two words of which the second lies `apart` after the first, times
// its eight codes.
__device__ inline int eight_products(const int (&codes)[2], const int8_t* x, int at, int apart) {
  const int* words = reinterpret_cast<const int*>(x);
  return dot4(codes[1], words[at + apart], dot4(codes[0], words[at], 0));
}
__device__ inline PlaneSums eight_products(const int (&codes)[2], const ActPlanes& x) {
  const int at = plane_word(lane_id() * kCodesPerLane);
  const int apart = plane_word(lane_id() * kCodesPerLane + 4) - at;
  return {eight_products(codes, x.hi, at, apart), eight_products(codes, x.lo, at, apart)};
}
__device__ inline int eight_products(const int (&codes)[2], const Q8Group& x) {
  return eight_products(codes, x.code, 2 * lane_id(), 1);
}

// Four lanes have a quant of 32 activations: the sum over the quants, by fma, of scale * what the
// lanes of each add up to.
__device__ inline float scaled_sum(int mine, const Q8Group& x) {
  const float quant = float(sum_lanes(mine, 4));
  float total = 0.f;
  for (int j = 0; j < kQ8Quants; ++j) total = fma(from_lane(quant, 4 * j), x.scale[j], total);
  return total;
}

// One superblock of a K-quant or IQ4_XS: leaf += its products. Sums are exact in int32.
template <class F>
struct SuperblockProduct {
  int codes[2], scale, min = 0;
  float d, dmin = 0.f;

  __device__ SuperblockProduct(const uint8_t* quants, int64_t superblock, int64_t) {
    const uint8_t* quant = quants + superblock * F::kBytes;
    const int first = lane_id() * kCodesPerLane;
    eight_codes<F>(quant, first, codes);
    scale = Scales<F>::scale(quant, first / F::kGroup);
    d = Scales<F>::d(quant);
    if constexpr (Scales<F>::kMins) {
      min = Scales<F>::min(quant, first / F::kGroup);
      dmin = Scales<F>::dmin(quant);
    }
  }
  __device__ float add_to(float leaf, const ActPlanes& x) const {
    const PlaneSums mine = eight_products(codes, x);
    const PlaneSums all{sum_lanes(scale * mine.hi), sum_lanes(scale * mine.lo)};
    leaf = fma(all.joined(), mul(d, x.scale), leaf);
    if constexpr (Scales<F>::kMins) {
      // four lanes share a sum of 32; as hi and lo apart, only the last step would round
      const int mins = sum_lanes(lane_id() % 4 == 0 ? min * x.sum[lane_id() / 4] : 0);
      leaf = fma(-float(mins), mul(dmin, x.scale), leaf);
    }
    return leaf;
  }
  __device__ float add_to(float leaf, const Q8Group& x) const {
    leaf = fma(scaled_sum(scale * eight_products(codes, x), x), d, leaf);
    if constexpr (Scales<F>::kMins) {
      // two lanes share a sum of 16
      const float mins = scaled_sum(lane_id() % 2 == 0 ? min * x.sum[lane_id() / 2] : 0, x);
      leaf = fma(-mins, dmin, leaf);
    }
    return leaf;
  }
};

// Up to eight quants of 32 that make up a superblock; four lanes have one quant.
template <class F>
struct BlockProduct {
  int codes[2] = {0, 0}, count;
  float d = 0.f;

  __device__ BlockProduct(const uint8_t* quants, int64_t superblock, int64_t columns) {
    const int64_t first = superblock * 8, left = columns / 32 - first;
    count = int(left < 8 ? left : 8);
    const int mine = lane_id() / 4;
    if (mine >= count) return;
    const uint8_t* quant = quants + (first + mine) * F::kBytes;
    eight_codes<F>(quant, lane_id() % 4 * kCodesPerLane, codes);
    d = Scales<F>::d(quant);
  }
  __device__ float add_to(float leaf, const ActPlanes& x) const {
    const PlaneSums mine = eight_products(codes, x);
    const PlaneSums quant{sum_lanes(mine.hi, 4), sum_lanes(mine.lo, 4)};
    const float joined = quant.joined();
    float value = 0.f;
    for (int j = 0; j < count; ++j)
      value = fma(from_lane(d, 4 * j), from_lane(joined, 4 * j), value);
    return fma(value, x.scale, leaf);
  }
  __device__ float add_to(float leaf, const Q8Group& x) const {
    const float quant = float(sum_lanes(eight_products(codes, x), 4));
    for (int j = 0; j < count; ++j)
      leaf = fma(from_lane(quant, 4 * j), mul(from_lane(d, 4 * j), x.scale[j]), leaf);
    return leaf;
  }
};

__device__ inline void store_rows(const MatmulView& m, int64_t row, int64_t first, int count,
                                  Tree<float>* trees) {
  for (int n = 0; n < count; ++n) {
    const float value = trees[n].join();
    if (lane_id() == 0)
      m.out[(first + n) * m.out_stride + row] = m.bias ? value + m.bias[row] : value;
  }
}

// Packed activations, integer weights.
template <class F, class Group>
__global__ void qmm_integers(MatmulView m) {
  using Product =
      std::conditional_t<Scales<F>::kSuperblocks, SuperblockProduct<F>, BlockProduct<F>>;
  const int64_t row = warp_id(), first = int64_t(blockIdx.y) * kMatmulRows;
  if (row >= m.rows) return;
  const int count = int(m.count - first < kMatmulRows ? m.count - first : kMatmulRows);
  const uint8_t* quants = m.weight + row * m.row_bytes;
  const auto* groups = static_cast<const Group*>(m.packed);
  const int64_t superblocks = ceil_div<int64_t>(m.columns, kSuperblock);
  Tree<float> trees[kMatmulRows];
  for (int64_t from = 0; from < superblocks; from += kLeafSuperblocks) {
    const int64_t end =
        from + kLeafSuperblocks < superblocks ? from + kLeafSuperblocks : superblocks;
    float leaf[kMatmulRows] = {};
    for (int64_t s = from; s < end; ++s) {
      const Product product(quants, s, m.columns);
      for (int n = 0; n < count; ++n)
        leaf[n] = product.add_to(leaf[n], groups[(first + n) * superblocks + s]);
    }
    for (int n = 0; n < count; ++n) trees[n].push(leaf[n]);
  }
  store_rows(m, row, first, count, trees);
}

// Value e of row n.
__device__ inline float value_at(const MatmulView& m, int64_t n, int64_t e) {
  if (m.floats) return m.floats[n * m.columns + e];
  const int64_t group = n * ceil_div<int64_t>(m.columns, kActGroup) + e / kActGroup;
  const int i = int(e % kActGroup);
  if (m.act_mode == kActPlanes) return act_value(static_cast<const ActPlanes*>(m.packed)[group], i);
  return act_value(static_cast<const Q8Group*>(m.packed)[group], i);
}

// Every other type, and float32 activations: dot() of core/reduce.h.
template <class F>
__global__ void qmm_floats(MatmulView m) {
  const int64_t row = warp_id(), first = int64_t(blockIdx.y) * kMatmulRows;
  if (row >= m.rows) return;
  const int count = int(m.count - first < kMatmulRows ? m.count - first : kMatmulRows);
  const uint8_t* quants = m.weight + row * m.row_bytes;
  Tree<float> trees[kMatmulRows];
  for (int64_t leaf = 0; leaf < m.columns; leaf += kLeaf) {
    const int64_t end = leaf + kLeaf < m.columns ? leaf + kLeaf : m.columns;
    float acc[kMatmulRows][kPerLane] = {};
    for (int64_t from = leaf + kPerLane * lane_id(); from < end; from += kAccumulators)
      for (int j = 0; j < kPerLane && from + j < end; ++j) {
        const int64_t e = from + j;
        const float w = decode<F>(quants + e / F::kElems * F::kBytes, int(e % F::kElems));
        for (int n = 0; n < count; ++n) acc[n][j] = fma(w, value_at(m, first + n, e), acc[n][j]);
      }
    for (int n = 0; n < count; ++n) trees[n].push(fold_lanes(acc[n]));
  }
  store_rows(m, row, first, count, trees);
}

// silu(gate) * up of one row's halves, as float32.
__global__ void silu_times(const float* both,  // [count, 2 rows]
                           float* out,         // [count, rows]
                           int64_t count, int64_t rows) {
  wait_for_earlier();
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= count * rows) return;
  const float* gate = both + n / rows * 2 * rows + n % rows;
  out[n] = mul(silu(gate[0]), gate[rows]);
}

// The same as packed activations, a warp per group.
template <class Group>
__global__ void silu_times_packed(const float* both, Group* groups, int64_t count, int64_t rows) {
  wait_for_earlier();
  let_next_begin();
  const int64_t per_row = ceil_div<int64_t>(rows, kActGroup), n = warp_id();
  if (n >= count * per_row) return;
  const int64_t first = n % per_row * kActGroup + lane_id() * kActPerLane;
  const float* gate = both + n / per_row * 2 * rows + first;
  float value[kActPerLane];
  for (int i = 0; i < kActPerLane; ++i)
    value[i] = first + i < rows ? mul(silu(gate[i]), gate[rows + i]) : 0.f;
  quantize_group(value, groups + n);
}

}  // namespace dflash::gpu
