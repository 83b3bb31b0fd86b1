// The layout in which the CPU matmul reads weights of the six types it decodes itself. It stands
// here because a weight has its size on every device.
//
// Sixteen rows side by side; the last tile's missing rows are zero quants. A vector of 64 bytes
// holds four consecutive values k of all sixteen rows, "a quad": byte 4 r + k % 4. So a row is a
// lane: activations are broadcast four bytes at a time, scales are vectors, and nothing is ever
// summed across lanes. Codes are stored unsigned.
//
//   K-quants, IQ4_XS   per superblock of 256: half d[16], half dmin[16] (or zeros), scales, mins,
//                      nibbles, high bits. Scales and mins: byte 4 r + g % 4 of vector g / 4.
//     nibbles          vector i: quad 2 i in the low nibbles, quad 2 i + 1 in the high ones
//     high bits Q5_K   vector g: bits i and i + 4 belong to quads 2 i and 2 i + 1 of group g
//     high bits Q6_K   vector g: bits 2 i and 2 i + 4, and the ones above, likewise
//   Q8_0, Q4_0         half d[blocks][16], filled up to 64 bytes; then the quads (Q8_0) or nibbles
#pragma once
#include "core/formats/all.h"

namespace dflash::cpu {

constexpr int kTileRows = 16, kVector = 64, kSuperblock = 256;

// kOffset: what is added to a code to make it unsigned. IQ4_XS keeps its table index instead.
template <class F>
struct Tile {
  static constexpr bool kIsTiled = false;
};

template <int kCodeBits, int kGroupCount, bool kMinsToo, int kCodeOffset>
struct SuperblockTile {
  static constexpr bool kIsTiled = true, kHasSuperblocks = true;
  static constexpr int kBits = kCodeBits, kGroups = kGroupCount, kOffset = kCodeOffset;
  static constexpr bool kHasMins = kMinsToo;
  static constexpr int kScales = kVector, kMins = kScales + kGroups / 4 * kVector;
  static constexpr int kNibbles = kMins + (kHasMins ? kGroups / 4 * kVector : 0);
  static constexpr int kHigh = kNibbles + 32 * kVector;
  static constexpr int kBytes = kHigh + (kBits - 4) * 8 * kVector;

  static int64_t bytes(int64_t columns) { return columns / kSuperblock * kBytes; }
};

template <int kCodeBits, int kCodeOffset>
struct BlockTile {
  static constexpr bool kIsTiled = true, kHasSuperblocks = false;
  static constexpr int kBits = kCodeBits, kOffset = kCodeOffset;
  static constexpr int kBlockBytes = 32 * kTileRows * kBits / 8;

  static constexpr int64_t codes(int64_t columns) {  // where they start
    return ceil_div<int64_t>(columns / 32 * kTileRows * 2, kVector) * kVector;
  }
  static int64_t bytes(int64_t columns) { return codes(columns) + columns / 32 * kBlockBytes; }
};

template <>
struct Tile<Q4_K> : SuperblockTile<4, 8, true, 0> {};
template <>
struct Tile<Q5_K> : SuperblockTile<5, 8, true, 0> {};
template <>
struct Tile<Q6_K> : SuperblockTile<6, 16, false, 32> {};
template <>
struct Tile<IQ4_XS> : SuperblockTile<4, 8, false, 0> {};
template <>
struct Tile<Q8_0> : BlockTile<8, 128> {};
template <>
struct Tile<Q4_0> : BlockTile<4, 8> {};

// Calls body.template operator()<F>() if `type` is one of the six.
template <class Body>
bool dispatch_tile(int64_t type, Body&& body) {
  bool tiled = false;
  dispatch_format(type, [&]<class F>() {
    if constexpr (Tile<F>::kIsTiled) {
      tiled = true;
      body.template operator()<F>();
    }
  });
  return tiled;
}

// Values and bytes of a quant of a known type.
struct QuantSize {
  int elems, bytes;
};

inline QuantSize quant_size(int64_t type) {
  QuantSize size{};
  dispatch_format(type, [&]<class F>() { size = {F::kElems, F::kBytes}; });
  return size;
}

// Bytes of a repacked segment: whole tiles, or the GGUF rows; filled up to whole vectors.
inline int64_t repacked_bytes(int64_t type, int64_t rows, int64_t columns) {
  int64_t bytes = 0;
  if (dispatch_tile(type, [&]<class F>() {
        bytes = ceil_div<int64_t>(rows, kTileRows) * Tile<F>::bytes(columns);
      }))
    return bytes;
  const QuantSize size = quant_size(type);
  return ceil_div<int64_t>(rows * (columns / size.elems) * size.bytes, kVector) * kVector;
}

}  // namespace dflash::cpu
