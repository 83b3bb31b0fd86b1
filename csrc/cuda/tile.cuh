// Repacked weights of the types that multiply in integers, in the order in which the tensor cores
// read them.
//
// A tile is 16 rows times 256 of K (a superblock, or eight quants of 32) and takes the bytes that
// its quants take in GGUF. The tiles of 16 rows lie side by side along K. Lane 4 g + q of a warp
// owns, of rows g and g + 8 and of each 32 of K (a step), values 4 q + e and 16 + 4 q + e, e < 4:
// its part of A of mma.m16n8k32. A tile holds
//
//   codes    nibbles: for every two steps 16 bytes a lane, a word for each of (step, row);
//            Q8_0: for every step 16 bytes a lane, in the order of A's registers
//   high     bits above the nibbles: Q5_K a word a lane for two steps, Q6_K a word for one
//   header   d, scales, mins of rows 0 .. 15
//
// The rows that a last tile lacks are zero bytes; what they give is not stored.
#pragma once
#include "core/formats/all.h"
#include "cuda/shared.cuh"

namespace dflash::cuda {

constexpr int kTileRows = 16, kTileColumns = 256, kSteps = 8;
constexpr int kNibbleBytes = kTileRows * kTileColumns / 2;

// Where one code lies: value 32 step + 16 half + 4 q + e of row g + 8 lower.
struct CodePlace {
  int lane, step, lower, half, e;
};

// A of two steps: rows g and g + 8 of the first 16 values, then of the others.
struct Codes {
  uint32_t a[2][4];
};

__device__ inline uint32_t* word_at(uint8_t* tile, int byte) {
  return reinterpret_cast<uint32_t*>(tile + byte);
}
__device__ inline uint32_t word_at(const uint8_t* tile, int byte) {
  return *reinterpret_cast<const uint32_t*>(tile + byte);
}

struct Nibbles {
  static constexpr int kHigh = kNibbleBytes;

  __device__ static int at(const CodePlace& p) {
    return 512 * (p.step / 2) + 16 * p.lane + 8 * (p.step % 2) + 4 * p.lower;
  }
  __device__ static int shift(const CodePlace& p) { return 8 * p.e + 4 * p.half; }
  __device__ static void split(const uint4& words, Codes& c) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c.a[i / 2][i % 2] = w[i] & 0x0f0f0f0fu;
      c.a[i / 2][i % 2 + 2] = w[i] >> 4 & 0x0f0f0f0fu;
    }
  }
};

// What K-quants and IQ4_XS have in common: integer scales per superblock.
struct SuperblockTile : Nibbles {
  static constexpr bool kIsTiled = true, kSuperblocks = true;
  static constexpr bool kMins = false, kSixteens = false;
  static constexpr int kCodeShift = 0;  // A holds codes times 2^kCodeShift
};

template <class F>
struct Tile {
  static constexpr bool kIsTiled = false;
};

// 16 bytes a row: GGUF's 12 of scales and mins, then d and dmin.
template <int kHeader>
struct MinTile : SuperblockTile {
  static constexpr bool kMins = true;
  static constexpr int kBytes = kHeader + 16 * kTileRows;

  struct Scales {
    uint32_t scale[2], min[2];
    float d, dmin;

    __device__ Scales(const uint8_t* tile, int row) {
      const uint4 w = load_as<uint4>(tile + kHeader + 16 * row);
      scale[0] = w.x & 0x3f3f3f3fu;
      min[0] = w.y & 0x3f3f3f3fu;
      scale[1] = (w.z & 0x0f0f0f0fu) | (w.x >> 2 & 0x30303030u);
      min[1] = (w.z >> 4 & 0x0f0f0f0fu) | (w.y >> 2 & 0x30303030u);
      d = half_value(w.w & 0xffffu);
      dmin = half_value(w.w >> 16);
    }
    template <int g>
    __device__ int scale_of() const {
      return unsigned_byte<g % 4>(scale[g / 4]);
    }
    template <int g>
    __device__ int min_of() const {
      return unsigned_byte<g % 4>(min[g / 4]);
    }
  };
  __device__ static void pack_header(const uint8_t* quant, uint8_t* tile, int row, int = 0) {
    for (int i = 0; i < 16; ++i) tile[kHeader + 16 * row + i] = quant[(i + 4) % 16];
  }
  __device__ static void unpack_header(const uint8_t* tile, uint8_t* quant, int row, int = 0) {
    for (int i = 0; i < 16; ++i) quant[(i + 4) % 16] = tile[kHeader + 16 * row + i];
  }
};

template <>
struct Tile<Q4_K> : MinTile<kNibbleBytes> {
  __device__ static void codes(const uint8_t* tile, int pair, int lane, Codes& c) {
    split(load_as<uint4>(tile + 512 * pair + 16 * lane), c);
  }
  __device__ static void put(uint8_t* tile, const CodePlace& p, int code) {
    *word_at(tile, at(p)) |= uint32_t(code) << shift(p);
  }
  __device__ static int get(const uint8_t* tile, const CodePlace& p) {
    return word_at(tile, at(p)) >> shift(p) & 15;
  }
};

template <>
struct Tile<Q5_K> : MinTile<kNibbleBytes + kTileRows * kTileColumns / 8> {
  // Bit 8 e + r of a lane's word of two steps, r the register of A.
  __device__ static int high_at(const CodePlace& p) {
    return kHigh + 128 * (p.step / 2) + 4 * p.lane;
  }
  __device__ static int high_shift(const CodePlace& p) {
    return 8 * p.e + 4 * (p.step % 2) + 2 * p.half + p.lower;
  }
  __device__ static void codes(const uint8_t* tile, int pair, int lane, Codes& c) {
    const uint32_t high = load_as<uint32_t>(tile + kHigh + 128 * pair + 4 * lane);
    split(load_as<uint4>(tile + 512 * pair + 16 * lane), c);
#pragma unroll
    for (int r = 0; r < 8; ++r)
      c.a[r / 4][r % 4] |= (r < 4 ? high << (4 - r) : high >> (r - 4)) & 0x10101010u;
  }
  __device__ static void put(uint8_t* tile, const CodePlace& p, int code) {
    *word_at(tile, at(p)) |= uint32_t(code & 15) << shift(p);
    *word_at(tile, high_at(p)) |= uint32_t(code >> 4) << high_shift(p);
  }
  __device__ static int get(const uint8_t* tile, const CodePlace& p) {
    return int(word_at(tile, at(p)) >> shift(p) & 15) |
           int(word_at(tile, high_at(p)) >> high_shift(p) & 1) << 4;
  }
};

// A byte of A is (code - 32) * 4: the two high bits, with the upper one flipped, on top.
template <>
struct Tile<Q6_K> : SuperblockTile {
  static constexpr bool kSixteens = true;
  static constexpr int kCodeShift = 2;
  static constexpr int kScalesAt = kHigh + kTileRows * kTileColumns / 4;
  static constexpr int kDAt = kScalesAt + 16 * kTileRows, kBytes = kDAt + 2 * kTileRows;

  struct Scales {
    uint32_t scale[4];
    float d;

    __device__ Scales(const uint8_t* tile, int row) {
      const uint4 w = load_as<uint4>(tile + kScalesAt + 16 * row);
      scale[0] = w.x;
      scale[1] = w.y;
      scale[2] = w.z;
      scale[3] = w.w;
      d = half_value(load_as<uint16_t>(tile + kDAt + 2 * row));
    }
    template <int g>
    __device__ int scale_of() const {
      return signed_byte<g % 4>(scale[g / 4]);
    }
  };
  __device__ static int high_at(const CodePlace& p) {
    return kHigh + 256 * (p.step / 2) + 8 * p.lane + 4 * (p.step % 2);
  }
  __device__ static int high_shift(const CodePlace& p) {
    return 8 * p.e + 2 * (2 * p.half + p.lower);
  }
  __device__ static void codes(const uint8_t* tile, int pair, int lane, Codes& c) {
    const uint2 high = load_as<uint2>(tile + kHigh + 256 * pair + 8 * lane);
    const uint4 low = load_as<uint4>(tile + 512 * pair + 16 * lane);
    const uint32_t w[4] = {low.x, low.y, low.z, low.w}, h[2] = {high.x, high.y};
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t word = w[2 * s + r % 2];
        c.a[s][r] =
            ((r < 2 ? word << 2 : word >> 2) & 0x3c3c3c3cu) | (h[s] << (6 - 2 * r) & 0xc0c0c0c0u);
      }
  }
  __device__ static void put(uint8_t* tile, const CodePlace& p, int code) {
    const uint32_t bits = uint32_t(code + 32) ^ 32u;
    *word_at(tile, at(p)) |= (bits & 15) << shift(p);
    *word_at(tile, high_at(p)) |= bits >> 4 << high_shift(p);
  }
  __device__ static int get(const uint8_t* tile, const CodePlace& p) {
    const uint32_t low = word_at(tile, at(p)) >> shift(p) & 15;
    const uint32_t high = word_at(tile, high_at(p)) >> high_shift(p) & 3;
    return int((low | high << 4) ^ 32u) - 32;
  }
  __device__ static void pack_header(const uint8_t* quant, uint8_t* tile, int row, int = 0) {
    for (int g = 0; g < 16; ++g) tile[kScalesAt + 16 * row + g] = quant[192 + g];
    for (int i = 0; i < 2; ++i) tile[kDAt + 2 * row + i] = quant[208 + i];
  }
  __device__ static void unpack_header(const uint8_t* tile, uint8_t* quant, int row, int = 0) {
    for (int g = 0; g < 16; ++g) quant[192 + g] = tile[kScalesAt + 16 * row + g];
    for (int i = 0; i < 2; ++i) quant[208 + i] = tile[kDAt + 2 * row + i];
  }
};

// Table values by byte permutes, eight at a time. Nibble n of a word is value n of the first 16,
// nibble 4 + n of the others. The header is d, then GGUF's low and high bits of the scales.
template <>
struct Tile<IQ4_XS> : SuperblockTile {
  static constexpr int kHeader = kNibbleBytes, kBytes = kHeader + 8 * kTileRows;

  __host__ __device__ static constexpr uint32_t table(int first) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= uint32_t(uint8_t(iq4_value(first + i))) << 8 * i;
    return word;
  }
  // Scales of even groups in scale[0], of odd ones in scale[1].
  struct Scales {
    uint32_t scale[2];
    float d;

    __device__ Scales(const uint8_t* tile, int row) {
      const uint2 w = load_as<uint2>(tile + kHeader + 8 * row);
      d = half_value(w.x & 0xffffu);
      // two bits a group: those of groups 2 i and 2 i + 1 to byte i
      const uint32_t h = w.x >> 16;
      uint32_t high = (h | h << 8) & 0x00ff00ffu;
      high = (high | high << 4) & 0x0f0f0f0fu;
      const uint32_t even = (w.y & 0x0f0f0f0fu) | (high << 4 & 0x30303030u);
      const uint32_t odd = (w.y >> 4 & 0x0f0f0f0fu) | (high << 2 & 0x30303030u);
      // minus 32 in every byte
      scale[0] = ((even | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
      scale[1] = ((odd | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
    }
    template <int g>
    __device__ int scale_of() const {
      return signed_byte<g / 2>(scale[g % 2]);
    }
  };
  __device__ static int shift(const CodePlace& p) { return 16 * p.half + 4 * p.e; }
  __device__ static void codes(const uint8_t* tile, int pair, int lane, Codes& c) {
    const uint4 words = load_as<uint4>(tile + 512 * pair + 16 * lane);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t index = w[i] & 0x77777777u;
      uint32_t upper = (w[i] >> 1 & 0x44444444u) | 0x32103210u;  // bit 3: the other half
      // or the compiler masks the halves one by one
      asm("" : "+r"(index), "+r"(upper));
      c.a[i / 2][i % 2] = lookup(index, upper);
      c.a[i / 2][i % 2 + 2] = lookup(index >> 16, upper >> 16);
    }
  }
  __device__ static uint32_t lookup(uint32_t index, uint32_t upper) {
    constexpr uint32_t t0 = table(0), t1 = table(4), t2 = table(8), t3 = table(12);
    return __byte_perm(__byte_perm(t0, t1, index), __byte_perm(t2, t3, index), upper);
  }
  __device__ static void put(uint8_t* tile, const CodePlace& p, int code) {
    uint32_t nibble = 0;
    while (iq4_value(int(nibble)) != code) ++nibble;
    *word_at(tile, at(p)) |= nibble << shift(p);
  }
  __device__ static int get(const uint8_t* tile, const CodePlace& p) {  // the nibble
    return int(word_at(tile, at(p)) >> shift(p) & 15);
  }
  __device__ static void pack_header(const uint8_t* quant, uint8_t* tile, int row, int = 0) {
    for (int i = 0; i < 8; ++i) tile[kHeader + 8 * row + i] = quant[i];
  }
  __device__ static void unpack_header(const uint8_t* tile, uint8_t* quant, int row, int = 0) {
    for (int i = 0; i < 8; ++i) quant[i] = tile[kHeader + 8 * row + i];
  }
};

// A half per 32 values: 16 bytes a row.
template <int kHeader>
struct BlockTile : Nibbles {
  static constexpr bool kIsTiled = true, kSuperblocks = false, kMins = false;
  static constexpr int kBytes = kHeader + 16 * kTileRows;

  struct Scales {
    uint4 halves;

    __device__ Scales(const uint8_t* tile, int row)
        : halves(load_as<uint4>(tile + kHeader + 16 * row)) {}
    template <int step>
    __device__ float d() const {
      const uint32_t w = step < 2 ? halves.x : step < 4 ? halves.y : step < 6 ? halves.z : halves.w;
      return half_value(step % 2 ? w >> 16 : w & 0xffffu);
    }
  };
  __device__ static void pack_header(const uint8_t* quant, uint8_t* tile, int row, int step) {
    for (int i = 0; i < 2; ++i) tile[kHeader + 16 * row + 2 * step + i] = quant[i];
  }
  __device__ static void unpack_header(const uint8_t* tile, uint8_t* quant, int row, int step) {
    for (int i = 0; i < 2; ++i) quant[i] = tile[kHeader + 16 * row + 2 * step + i];
  }
};

template <>
struct Tile<Q8_0> : BlockTile<kTileRows * kTileColumns> {
  static constexpr int kCodeShift = 0;

  __device__ static int byte_at(const CodePlace& p) {
    return 512 * p.step + 16 * p.lane + 4 * (2 * p.half + p.lower) + p.e;
  }
  __device__ static void codes(const uint8_t* tile, int pair, int lane, Codes& c) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint4 w = load_as<uint4>(tile + 1024 * pair + 512 * s + 16 * lane);
      c.a[s][0] = w.x;
      c.a[s][1] = w.y;
      c.a[s][2] = w.z;
      c.a[s][3] = w.w;
    }
  }
  __device__ static void put(uint8_t* tile, const CodePlace& p, int code) {
    tile[byte_at(p)] = uint8_t(code);
  }
  __device__ static int get(const uint8_t* tile, const CodePlace& p) {
    return int8_t(tile[byte_at(p)]);
  }
};

// A byte of A is (nibble - 8) * 16: the nibble, with its upper bit flipped, on top.
template <>
struct Tile<Q4_0> : BlockTile<kNibbleBytes> {
  static constexpr int kCodeShift = 4;

  __device__ static void codes(const uint8_t* tile, int pair, int lane, Codes& c) {
    const uint4 words = load_as<uint4>(tile + 512 * pair + 16 * lane);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c.a[i / 2][i % 2] = w[i] << 4 & 0xf0f0f0f0u;
      c.a[i / 2][i % 2 + 2] = w[i] & 0xf0f0f0f0u;
    }
  }
  __device__ static void put(uint8_t* tile, const CodePlace& p, int code) {
    *word_at(tile, at(p)) |= (uint32_t(code + 8) ^ 8u) << shift(p);
  }
  __device__ static int get(const uint8_t* tile, const CodePlace& p) {
    return int((word_at(tile, at(p)) >> shift(p) & 15) ^ 8u) - 8;
  }
};

}  // namespace dflash::cuda
