// Between GGUF quants and tiles, one row of one superblock (or block) at a time. Scalar: this runs
// at load time and where a single row of a tile is wanted.
#pragma once
#include <cstring>

#include "host/tiles.h"

namespace dflash::cpu {

// Unsigned codes, scales and mins of one quant, and back into its bytes (zero before).
template <class F>
struct QuantCodes {  // Q8_0, Q4_0
  static void read(const uint8_t* quant, uint8_t* codes) {
    for (int i = 0; i < F::kElems; ++i)
      codes[i] = uint8_t(F::code(quant, i / F::kGroup, i % F::kGroup) + Tile<F>::kOffset);
  }
  static void write(const uint8_t* codes, uint8_t* quant) {
    if constexpr (Tile<F>::kBits == 8)
      for (int i = 0; i < 32; ++i) quant[2 + i] = uint8_t(codes[i] - 128);
    else
      for (int i = 0; i < 16; ++i) quant[2 + i] = uint8_t(codes[i] | codes[16 + i] << 4);
  }
};

template <class F>
struct ScaleMinCodes {  // Q4_K, Q5_K
  static constexpr int kD = 0, kDmin = 2;

  static void read(const uint8_t* quant, uint8_t* codes, uint8_t* scales, uint8_t* mins) {
    for (int i = 0; i < 256; ++i) codes[i] = uint8_t(F::code(quant, i / 32, i % 32));
    for (int g = 0; g < 8; ++g) {
      const ScaleMin s = scale_min(quant + 4, g);
      scales[g] = uint8_t(s.scale);
      mins[g] = uint8_t(s.min);
    }
  }
  static bool write(const uint8_t* codes, const uint8_t* scales, const uint8_t* mins,
                    uint8_t* quant) {
    uint8_t* sm = quant + 4;
    for (int g = 0; g < 8; ++g)
      if (scales[g] > 63 || mins[g] > 63) return false;
    for (int g = 0; g < 4; ++g) {
      sm[g] = uint8_t(scales[g] | scales[g + 4] >> 4 << 6);
      sm[g + 4] = uint8_t(mins[g] | mins[g + 4] >> 4 << 6);
      sm[g + 8] = uint8_t((scales[g + 4] & 15) | (mins[g + 4] & 15) << 4);
    }
    uint8_t* nibbles = quant + F::kBytes - 128;
    for (int i = 0; i < 256; ++i) {
      nibbles[i / 64 * 32 + i % 32] |= uint8_t((codes[i] & 15) << 4 * (i / 32 % 2));
      if constexpr (Tile<F>::kBits == 5) quant[16 + i % 32] |= uint8_t(codes[i] >> 4 << i / 32);
    }
    return true;
  }
};

template <>
struct QuantCodes<Q4_K> : ScaleMinCodes<Q4_K> {};
template <>
struct QuantCodes<Q5_K> : ScaleMinCodes<Q5_K> {};

template <>
struct QuantCodes<Q6_K> {
  static constexpr int kD = 208;

  static void read(const uint8_t* quant, uint8_t* codes, uint8_t* scales, uint8_t*) {
    for (int i = 0; i < 256; ++i) codes[i] = uint8_t(Q6_K::code(quant, i / 16, i % 16) + 32);
    memcpy(scales, quant + 192, 16);
  }
  static bool write(const uint8_t* codes, const uint8_t* scales, const uint8_t*, uint8_t* quant) {
    for (int i = 0; i < 256; ++i) {
      const int half = i / 128, part = i / 32 % 4, j = i % 32;
      quant[half * 64 + i % 64] |= uint8_t((codes[i] & 15) << 4 * (part / 2));
      quant[128 + half * 32 + j] |= uint8_t(codes[i] >> 4 << 2 * part);
    }
    memcpy(quant + 192, scales, 16);
    return true;
  }
};

template <>
struct QuantCodes<IQ4_XS> {
  static constexpr int kD = 0;

  static void read(const uint8_t* quant, uint8_t* codes, uint8_t* scales, uint8_t*) {
    for (int i = 0; i < 256; ++i)
      codes[i] = (quant[8 + i / 32 * 16 + i % 16] >> 4 * (i / 16 % 2)) & 15;
    for (int b = 0; b < 8; ++b) scales[b] = uint8_t(IQ4_XS::scale(quant, b));
  }
  static bool write(const uint8_t* codes, const uint8_t* scales, const uint8_t*, uint8_t* quant) {
    uint32_t high = 0;
    for (int b = 0; b < 8; ++b) {
      const int scale = int8_t(scales[b]) + 32;
      if (scale < 0 || scale > 63) return false;
      quant[4 + b / 2] |= uint8_t((scale & 15) << 4 * (b % 2));
      high |= uint32_t(scale >> 4) << 2 * b;
    }
    quant[2] = uint8_t(high);
    quant[3] = uint8_t(high >> 8);
    for (int i = 0; i < 256; ++i)
      quant[8 + i / 32 * 16 + i % 16] |= uint8_t(codes[i] << 4 * (i / 16 % 2));
    return true;
  }
};

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}
inline void put_word(uint8_t* p, uint32_t word) {
  memcpy(p, &word, 4);
}

constexpr uint32_t kLowNibbles = 0x0f0f0f0fu;

// `count` codes of one row, its lane of the vectors at `lane`, as pairs of nibbles.
inline void put_nibbles(const uint8_t* codes, int count, uint8_t* lane) {
  for (int i = 0; i < count / 8; ++i)
    put_word(lane + i * kVector, (word_at(codes + 8 * i) & kLowNibbles) |
                                     (word_at(codes + 8 * i + 4) & kLowNibbles) << 4);
}
inline void get_nibbles(const uint8_t* lane, int count, uint8_t* codes) {
  for (int i = 0; i < count / 8; ++i) {
    const uint32_t pair = word_at(lane + i * kVector);
    put_word(codes + 8 * i, pair & kLowNibbles);
    put_word(codes + 8 * i + 4, pair >> 4 & kLowNibbles);
  }
}

// Where the high bits of quad j of a group lie in its vector's bytes.
template <int kPlanes>
constexpr int high_shift(int j) {
  return j / 2 * kPlanes + j % 2 * 4;
}

// Writes superblock b (K-quants) or block b (Q8_0, Q4_0) of row r of a tile from its quant.
template <class F>
void put_quant(const uint8_t* quant, int64_t columns, int64_t b, int r, uint8_t* tile) {
  using T = Tile<F>;
  uint8_t codes[F::kElems];
  if constexpr (T::kHasSuperblocks) {
    uint8_t scales[T::kGroups], mins[T::kGroups];
    QuantCodes<F>::read(quant, codes, scales, mins);
    uint8_t* to = tile + b * T::kBytes;
    memcpy(to + 2 * r, quant + QuantCodes<F>::kD, 2);
    if constexpr (T::kHasMins) memcpy(to + 32 + 2 * r, quant + QuantCodes<F>::kDmin, 2);
    for (int v = 0; v < T::kGroups / 4; ++v) {
      memcpy(to + T::kScales + v * kVector + 4 * r, scales + 4 * v, 4);
      if constexpr (T::kHasMins) memcpy(to + T::kMins + v * kVector + 4 * r, mins + 4 * v, 4);
    }
    put_nibbles(codes, 256, to + T::kNibbles + 4 * r);
    constexpr int kPlanes = T::kBits - 4;  // high bits of a code
    if constexpr (kPlanes > 0)
      for (int v = 0; v < 8 * kPlanes; ++v) {
        constexpr int kQuads = 8 / kPlanes;
        uint32_t word = 0;
        for (int j = 0; j < kQuads; ++j)
          word |= (word_at(codes + 4 * (v * kQuads + j)) >> 4 & kLowNibbles)
                  << high_shift<kPlanes>(j);
        put_word(to + T::kHigh + v * kVector + 4 * r, word);
      }
  } else {
    QuantCodes<F>::read(quant, codes);
    memcpy(tile + (b * kTileRows + r) * 2, quant, 2);
    uint8_t* lane = tile + T::codes(columns) + b * T::kBlockBytes + 4 * r;
    if constexpr (T::kBits == 4)
      put_nibbles(codes, 32, lane);
    else
      for (int i = 0; i < 8; ++i) memcpy(lane + i * kVector, codes + 4 * i, 4);
  }
}

// The inverse. False when the bytes are no tile of this type.
template <class F>
bool get_quant(const uint8_t* tile, int64_t columns, int64_t b, int r, uint8_t* quant) {
  using T = Tile<F>;
  uint8_t codes[F::kElems];
  memset(quant, 0, F::kBytes);
  if constexpr (T::kHasSuperblocks) {
    uint8_t scales[T::kGroups], mins[T::kGroups];
    const uint8_t* from = tile + b * T::kBytes;
    memcpy(quant + QuantCodes<F>::kD, from + 2 * r, 2);
    if constexpr (T::kHasMins) memcpy(quant + QuantCodes<F>::kDmin, from + 32 + 2 * r, 2);
    for (int v = 0; v < T::kGroups / 4; ++v) {
      memcpy(scales + 4 * v, from + T::kScales + v * kVector + 4 * r, 4);
      if constexpr (T::kHasMins) memcpy(mins + 4 * v, from + T::kMins + v * kVector + 4 * r, 4);
    }
    get_nibbles(from + T::kNibbles + 4 * r, 256, codes);
    constexpr int kPlanes = T::kBits - 4;
    if constexpr (kPlanes > 0)
      for (int v = 0; v < 8 * kPlanes; ++v) {
        constexpr int kQuads = 8 / kPlanes;
        const uint32_t word = word_at(from + T::kHigh + v * kVector + 4 * r);
        for (int j = 0; j < kQuads; ++j) {
          uint8_t* to = codes + 4 * (v * kQuads + j);
          put_word(to, word_at(to) |
                           (word >> high_shift<kPlanes>(j) & 0x01010101u * ((1u << kPlanes) - 1))
                               << 4);
        }
      }
    return QuantCodes<F>::write(codes, scales, mins, quant);
  } else {
    memcpy(quant, tile + (b * kTileRows + r) * 2, 2);
    const uint8_t* lane = tile + T::codes(columns) + b * T::kBlockBytes + 4 * r;
    if constexpr (T::kBits == 4)
      get_nibbles(lane, 32, codes);
    else
      for (int i = 0; i < 8; ++i) memcpy(codes + 4 * i, lane + i * kVector, 4);
    QuantCodes<F>::write(codes, quant);
    return true;
  }
}

}  // namespace dflash::cpu
