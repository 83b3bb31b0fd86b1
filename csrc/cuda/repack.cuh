// GGUF rows to tiles and back, a warp a tile.
#pragma once
#include <type_traits>

#include "cuda/tile.cuh"
#include "gpu/warp.cuh"

namespace dflash::cuda {

// Calls body(place, row, quant, value) for the lane's codes of a tile: value of quant `quant` of
// the row (both counted from the tile's).
template <class F, class Body>
__device__ void for_codes(Body&& body) {
  const int lane = gpu::lane_id(), g = lane / 4, q = lane % 4;
  for (int step = 0; step < kSteps; ++step)
    for (int i = 0; i < 16; ++i) {
      const CodePlace place{lane, step, i / 8, i / 4 % 2, i % 4};
      const int k = 32 * step + 16 * place.half + 4 * q + place.e;
      body(place, g + 8 * place.lower, k / F::kElems, k % F::kElems);
    }
}

template <class F>
__global__ void pack_tiles(const uint8_t* packed,  // [rows, tiles * kTileColumns / kElems quants]
                           uint8_t* out, int64_t rows, int64_t tiles) {
  using T = Tile<F>;
  constexpr int kQuants = kTileColumns / F::kElems;
  const int64_t n = gpu::warp_id();
  if (n >= ceil_div<int64_t>(rows, kTileRows) * tiles) return;
  const int64_t first = n / tiles * kTileRows;
  uint8_t* tile = out + n * T::kBytes;
  const auto quant_of = [&](int row, int quant) {
    return packed + (((first + row) * tiles + n % tiles) * kQuants + quant) * F::kBytes;
  };
  for (int i = gpu::lane_id(); i < T::kBytes / 4; i += kLanes) *word_at(tile, 4 * i) = 0;
  __syncwarp();
  for_codes<F>([&](const CodePlace& place, int row, int quant, int value) {
    if (first + row >= rows) return;
    T::put(tile, place, F::code(quant_of(row, quant), value / F::kGroup, value % F::kGroup));
  });
  const int row = gpu::lane_id();
  if (row >= kTileRows || first + row >= rows) return;
  for (int quant = 0; quant < kQuants; ++quant)
    T::pack_header(quant_of(row, quant), tile, row, quant);
}

// Into zeros.
template <class F>
__global__ void unpack_tiles(const uint8_t* weight, uint8_t* out, int64_t rows, int64_t tiles) {
  using T = Tile<F>;
  constexpr int kQuants = kTileColumns / F::kElems;
  const int64_t n = gpu::warp_id();
  if (n >= ceil_div<int64_t>(rows, kTileRows) * tiles) return;
  const int64_t first = n / tiles * kTileRows;
  const uint8_t* tile = weight + n * T::kBytes;
  const auto quant_of = [&](int row, int quant) {
    return out + (((first + row) * tiles + n % tiles) * kQuants + quant) * F::kBytes;
  };
  // the values that share a byte of a quant are one lane's
  for_codes<F>([&](const CodePlace& place, int row, int quant, int value) {
    if (first + row >= rows) return;
    const int group = value / F::kGroup, i = value % F::kGroup, code = T::get(tile, place);
    if constexpr (std::is_same_v<F, IQ4_XS>)
      F::put_nibble(quant_of(row, quant), group, i, code);
    else
      F::put(quant_of(row, quant), group, i, code);
  });
  const int row = gpu::lane_id();
  if (row >= kTileRows || first + row >= rows) return;
  for (int quant = 0; quant < kQuants; ++quant)
    T::unpack_header(tile, quant_of(row, quant), row, quant);
}

}  // namespace dflash::cuda
