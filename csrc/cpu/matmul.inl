#include "cpu/matmul.h"

#include "cpu/act.h"
#include "cpu/convert.h"
#include "cpu/dequantize.h"
#include "cpu/matmul_leaf.h"
#include "cpu/tile_codes.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

constexpr int kPass = 4;   // activation rows whose sums stay in registers
constexpr int kBlock = 8;  // activation rows that share a visit of a leaf's weights

template <class F, int N, class Group>
DFLASH_INLINE void leaf_pass(const uint8_t* tile, int64_t columns, int64_t first, int part,
                             const Group* const* x, LaneTree* trees) {
  Floats leaf[N];
  tile_leaf<F, N>(tile, columns, first, part, x, leaf);
  for (int n = 0; n < N; ++n) trees[n].push(leaf[n]);
}

// The rows of one part of a tile times up to kBlock activation rows: out[n][kPartRows].
template <class F, class Group>
void tile_block(const uint8_t* tile, int64_t columns, int part, const Group* const* x, int count,
                float (*out)[kPartRows]) {
  LaneTree trees[kBlock];
  const int64_t superblocks = ceil_div<int64_t>(columns, kSuperblock);
  for (int64_t first = 0; first < superblocks; first += kLeafSuperblocks)
    for (int n = 0; n < count;) {
      // five rows as three and two rather than four and one
      const int left = count - n;
      const int take = left <= kPass ? left : left < 2 * kPass ? (left + 1) / 2 : kPass;
      switch (take) {
        case 1:
          leaf_pass<F, 1>(tile, columns, first, part, x + n, trees + n);
          break;
        case 2:
          leaf_pass<F, 2>(tile, columns, first, part, x + n, trees + n);
          break;
        case 3:
          leaf_pass<F, 3>(tile, columns, first, part, x + n, trees + n);
          break;
        default:
          leaf_pass<F, 4>(tile, columns, first, part, x + n, trees + n);
      }
      n += take;
    }
  for (int n = 0; n < count; ++n) store_lanes(out[n], trees[n].join());
}

template <class F, class Group>
void packed_tile(const uint8_t* tile, int rows, const MatmulRows& x, const float* bias, float* out,
                 int64_t out_stride) {
  const int64_t groups = ceil_div<int64_t>(x.columns, kActGroup);
  for (int part = 0; part * kPartRows < rows; ++part) {
    const int from = part * kPartRows, width = std::min(kPartRows, rows - from);
    for (int64_t n0 = 0; n0 < x.count; n0 += kBlock) {
      const int count = int(std::min<int64_t>(kBlock, x.count - n0));
      const Group* x_rows[kBlock];
      for (int n = 0; n < count; ++n)
        x_rows[n] = static_cast<const Group*>(x.packed) + (n0 + n) * groups;
      alignas(64) float result[kBlock][kPartRows];
      tile_block<F>(tile, x.columns, part, x_rows, count, result);
      for (int n = 0; n < count; ++n) {
        if (bias)
          for (int i = 0; i < width; ++i) result[n][i] += bias[from + i];
        memcpy(out + (n0 + n) * out_stride + from, result[n], size_t(width) * sizeof(float));
      }
    }
  }
}

// Values from .. from + n of one row of the segment, as floats; n <= 1024, `buffer` holds 1024.
const float* row_values(const MatmulSegment& segment, int64_t columns, int64_t row, int64_t from,
                        int64_t n, float* buffer) {
  if (segment.tiled) {
    dispatch_tile(segment.type, [&]<class F>() {
      const uint8_t* tile = segment.weight + row / kTileRows * Tile<F>::bytes(columns);
      for (int64_t k = 0; k < n; k += F::kElems) {
        uint8_t quant[F::kBytes];
        get_quant<F>(tile, columns, (from + k) / F::kElems, int(row % kTileRows), quant);
        decode_quant<F>(quant, buffer + k);
      }
    });
    return buffer;
  }
  const QuantSize size = quant_size(segment.type);
  const uint8_t* quants = segment.weight + (row * columns + from) / size.elems * size.bytes;
  switch (segment.type) {
    case F32::kType:
      return as_float(quants, FloatType::kF32, 0, n, buffer);
    case F16::kType:
      return as_float(quants, FloatType::kF16, 0, n, buffer);
    case BF16::kType:
      return as_float(quants, FloatType::kBF16, 0, n, buffer);
    default:
      decoder(segment.type)(quants, n / size.elems, buffer);
      return buffer;
  }
}

// The route of every other type, and of float32 activations: dot() of core/reduce.h.
void float_tile(const MatmulSegment& segment, const MatmulRows& x, int64_t first_row, int rows,
                const float* bias, float* out, int64_t out_stride) {
  constexpr int kShare = 16;  // activation rows that share a decoded leaf
  alignas(64) float buffer[kLeaf];
  for (int r = 0; r < rows; ++r)
    for (int64_t n0 = 0; n0 < x.count; n0 += kShare) {
      const int count = int(std::min<int64_t>(kShare, x.count - n0));
      Tree<float> trees[kShare];
      for (int64_t k = 0; k < x.columns; k += kLeaf) {
        const int64_t n = std::min<int64_t>(kLeaf, x.columns - k);
        const float* w = row_values(segment, x.columns, first_row + r, k, n, buffer);
        for (int i = 0; i < count; ++i)
          trees[i].push(dot_leaf(w, x.floats + (n0 + i) * x.columns + k, n));
      }
      for (int i = 0; i < count; ++i) {
        const float value = trees[i].join();
        out[(n0 + i) * out_stride + r] = bias ? value + bias[r] : value;
      }
    }
}

}  // namespace

void matmul_tile(const MatmulSegment& segment, const MatmulRows& x, int64_t tile, const float* bias,
                 float* out, int64_t out_stride) {
  const int64_t first = tile * kTileRows;
  const int rows = int(std::min<int64_t>(kTileRows, segment.rows - first));
  if (bias) bias += first;
  if (!segment.tiled || !x.packed)
    return float_tile(segment, x, first, rows, bias, out + first, out_stride);
  dispatch_tile(segment.type, [&]<class F>() {
    with_group(x.act_mode, [&]<class Group>() {
      packed_tile<F, Group>(segment.weight + tile * Tile<F>::bytes(x.columns), rows, x, bias,
                            out + first, out_stride);
    });
  });
}

void unpack_activations(const void* packed, int64_t act_mode, int64_t count, int64_t columns,
                        float* out) {
  with_group(act_mode, [&]<class Group>() {
    auto* group = static_cast<const Group*>(packed);
    for (int64_t n = 0; n < count; ++n)
      for (int64_t k = 0; k < columns; k += kActGroup, ++group) {
        const int size = int(std::min<int64_t>(kActGroup, columns - k));
        float* to = out + n * columns + k;
        for (int i = 0; i < size; ++i) to[i] = act_value(*group, i);
      }
  });
}

void qmm(const MatmulCall& c) {
  int64_t tiles = 0;
  for (int s = 0; s < c.segment_count; ++s)
    tiles += ceil_div<int64_t>(c.segments[s].rows, kTileRows);
  parallel_for(tiles, matmul_grain(tiles, c.x), [&](int64_t begin, int64_t end) {
    int64_t first_tile = 0, first_row = 0;
    for (int s = 0; s < c.segment_count && begin < end; ++s) {
      const MatmulSegment& segment = c.segments[s];
      const int64_t next_tile = first_tile + ceil_div<int64_t>(segment.rows, kTileRows);
      for (; begin < std::min(end, next_tile); ++begin)
        matmul_tile(segment, c.x, begin - first_tile, c.bias ? c.bias + first_row : nullptr,
                    c.out + first_row, c.out_stride);
      first_tile = next_tile;
      first_row += segment.rows;
    }
  });
}

void qmm_glu(const MatmulGluCall& c) {
  const int64_t rows = c.gate.rows, tiles = ceil_div<int64_t>(rows, kTileRows);
  const int64_t groups = ceil_div<int64_t>(rows, kActGroup);
  constexpr int kGroupTiles = kActGroup / kTileRows;
  if (c.packed)
    for (int64_t g = 0; g < groups; ++g)
      c.countdown[g] = int32_t(std::min<int64_t>(kGroupTiles, tiles - g * kGroupTiles));
  MatmulRows both = c.x;
  both.columns *= 2;
  parallel_for(tiles, matmul_grain(tiles, both), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      matmul_tile(c.gate, c.x, tile, nullptr, c.out, rows);
      matmul_tile(c.up, c.x, tile, nullptr, c.up_out, rows);
      const int64_t from = tile * kTileRows, width = std::min<int64_t>(kTileRows, rows - from);
      for (int64_t n = 0; n < c.x.count; ++n) {
        float* gate = c.out + n * rows + from;
        const float* up = c.up_out + n * rows + from;
        for (int64_t i = 0; i < width; ++i) gate[i] = dflash::mul(silu(gate[i]), up[i]);
      }
      if (!c.packed) continue;
      // whoever finishes the last tile of a group packs it
      const int64_t g = tile / kGroupTiles;
      if (__atomic_sub_fetch(&c.countdown[g], 1, __ATOMIC_ACQ_REL) > 0) continue;
      const int64_t first = g * kActGroup, size = std::min<int64_t>(kActGroup, rows - first);
      const int64_t bytes = group_bytes(c.act_mode);
      for (int64_t n = 0; n < c.x.count; ++n)
        quantize_row(c.out + n * rows + first, size, c.act_mode,
                     c.packed + (n * groups + g) * bytes);
    }
  });
}

}  // namespace dflash::cpu::DFLASH_ISA
