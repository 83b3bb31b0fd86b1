// One leaf (up to four superblocks) of a weight tile times N activation rows: the inner loop of the
// CPU matmul. docs/contracts.md, section 2, states its arithmetic.
//
// Integers stay exact. Per superblock and plane |sum of scale * dot|, offsets of unsigned codes
// included, is at most: Q4_K, Q5_K 63 * 31 * 127 * 256 = 6.4e7; Q6_K 128 * 63 * 127 * 256 = 2.7e8;
// IQ4_XS 32 * 241 * 127 * 256 = 2.6e8. The corrections are smaller. All are below 2^31. Q8_1's sums
// of 32, with the offsets taken off, are exact as floats too: at most Q4_K, Q5_K 63 * 31 * 127 * 32
// = 7.9e6; Q6_K 128 * 32 * 127 * 32, IQ4_XS 32 * 127 * 127 * 32 = 1.65e7, all below 2^24.
#pragma once
#include "core/act.h"
#include "cpu/lanes.h"
#include "host/tiles.h"

namespace dflash::cpu::DFLASH_ISA {

#define DFLASH_UNROLL _Pragma("GCC unroll 16")

constexpr int kLeafSuperblocks = kLeaf / kSuperblock;

// Weights are read once and in order, five clocks a vector with one activation row: the hardware's
// prefetcher starts anew at every page and comes too late at the head of every matrix.
constexpr int kAhead = 64 * kVector;

DFLASH_INLINE void prefetch_weights(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead, _MM_HINT_T0);
}

// IQ4_XS's values, for VNNI as unsigned bytes: 128 more.
DFLASH_INLINE Ints iq4_table() {
  alignas(16) int8_t table[16];
  for (int i = 0; i < 16; ++i) table[i] = int8_t(iq4_value(i) + (kSignedBytes ? 0 : 128));
  return table16(table);
}

template <class F>
constexpr int kDotBits = F::kType == IQ4_XS::kType ? 8 : Tile<F>::kBits;

// What the matmul subtracts: unsigned code = code + kCodeOffset.
template <class F>
constexpr int kCodeOffset = kDotBits<F> < 8 ? Tile<F>::kOffset
                            : kSignedBytes  ? 0
                                            : 128;

// The weight vectors of two quads: nibble vector i of a group whose high bits are in `high`.
template <class F>
DFLASH_INLINE void two_quads(const uint8_t* nibbles, Ints high, int i, Ints table, Ints (&w)[2]) {
  constexpr int kPlanes = F::kType == IQ4_XS::kType ? 0 : Tile<F>::kBits - 4;
  const Ints low_mask = set1_bytes(15);
  const Ints pair = load_ints(nibbles + i * kVector);
  prefetch_weights(nibbles + i * kVector);
  if constexpr (kPlanes == 0) {
    w[0] = and_ints(pair, low_mask);
    w[1] = and_ints(shift_left(pair, -4), low_mask);
  } else {
    // both quads' high bits: in the lower half of a byte and, where they belong, in the upper one
    const Ints bits =
        and_ints(shift_left(high, -kPlanes * i), set1_bytes(kPlanes == 1 ? 0x11 : 0x33));
    w[0] = select_bits(low_mask, pair, shift_left(bits, 4));
    w[1] = select_bits(low_mask, shift_left(pair, -4), bits);
  }
  if constexpr (F::kType == IQ4_XS::kType) {
    w[0] = pick(table, w[0]);
    w[1] = pick(table, w[1]);
  }
}

// Codes of plane p, and the sums of two times 16 of them.
DFLASH_INLINE const int8_t* codes_of(const ActGroup* x, int p) {
  return p ? x->lo : x->hi;
}
DFLASH_INLINE const int8_t* codes_of(const Q8Group* x, int) {
  return x->code;
}
DFLASH_INLINE const void* sums_at(const ActGroup* x, int p, int pair) {
  return (p ? x->sum_lo : x->sum_hi) + 2 * pair;
}
DFLASH_INLINE const void* sums_at(const Q8Group* x, int, int pair) {
  return x->sum + 2 * pair;
}

// Sums of products of a group with N rows, plane by plane.
template <int kBits, class Group, int N>
struct GroupDots {
  static constexpr int kPlanes = std::is_same_v<Group, Q8Group> ? 1 : 2;
  Dot<kBits> sum[N][kPlanes];

  __attribute__((always_inline)) void clear() {
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) DFLASH_UNROLL
    for (int p = 0; p < kPlanes; ++p) sum[n][p].total = zero_ints();
  }
  // Starts at minus what the codes' offset adds: factor times the sums of the pair's activations.
  __attribute__((always_inline)) void correct(Ints factor, const Group* const (&x)[N], int pair) {
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) DFLASH_UNROLL
    for (int p = 0; p < kPlanes; ++p)
      sum[n][p].total = dot_words(zero_ints(), factor, broadcast(sums_at(x[n], p, pair)));
  }
  __attribute__((always_inline)) void add(int quad, Ints weights, const Group* const (&x)[N],
                                          int at) {
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) DFLASH_UNROLL
    for (int p = 0; p < kPlanes; ++p)
      sum[n][p].add(quad, weights, broadcast(codes_of(x[n], p) + at));
  }
};

// Adds the products of group g of the superblock at `tile`.
template <class F, class Group, int N>
DFLASH_INLINE void add_group(GroupDots<kDotBits<F>, Group, N>& dots, const uint8_t* tile, int g,
                             Ints table, const Group* const (&x)[N]) {
  using T = Tile<F>;
  constexpr int kQuads = 64 / T::kGroups, kPlanes = kDotBits<F> == 8 ? 0 : T::kBits - 4;
  const Ints high = kPlanes ? load_ints(tile + T::kHigh + g * kVector) : zero_ints();
  const uint8_t* nibbles = tile + T::kNibbles + g * (kQuads / 2) * kVector;
  DFLASH_UNROLL
  for (int i = 0; i < kQuads / 2; ++i) {
    Ints w[2];
    two_quads<F>(nibbles, high, i, table, w);
    dots.add(2 * i, w[0], x, 4 * (g * kQuads + 2 * i));
    dots.add(2 * i + 1, w[1], x, 4 * (g * kQuads + 2 * i + 1));
  }
}

DFLASH_INLINE Floats join_planes(const Ints (&planes)[2]) {
  return fma_lanes(to_floats(planes[0]), set1_lanes(254.f), to_floats(planes[1]));
}

// Scale of group u of four, as an int.
template <bool kSigned>
DFLASH_INLINE Ints scale_of(Ints scales, int u) {
  if constexpr (kSigned)
    return top_byte_signed(pick(scales, DFLASH_PATTERN(kBlank, kBlank, kBlank, u)));
  else
    return pick(scales, DFLASH_PATTERN(u, kBlank, kBlank, kBlank));
}

// Superblock at `tile` (Q4_K, Q5_K, Q6_K, IQ4_XS): leaf[n] += its products with group x[n].
template <class F, int N>
DFLASH_INLINE void superblock(const uint8_t* tile, const uint8_t* halves,
                              const ActGroup* const (&x)[N], Ints table, Floats (&leaf)[N]) {
  using T = Tile<F>;
  constexpr bool kSignedScales = !T::kHasMins;
  Ints acc[N][2];
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) acc[n][0] = acc[n][1] = zero_ints();

  for (int v = 0; v < T::kGroups / 4; ++v) {
    const Ints scales = load_ints(tile + T::kScales + v * kVector);
    DFLASH_UNROLL
    for (int u = 0; u < 4; ++u) {
      const int g = 4 * v + u;
      GroupDots<kDotBits<F>, ActGroup, N> dots;
      dots.clear();
      add_group<F>(dots, tile, g, table, x);
      const Ints scale = scale_of<kSignedScales>(scales, u);
      DFLASH_UNROLL
      for (int n = 0; n < N; ++n) DFLASH_UNROLL
      for (int p = 0; p < 2; ++p)
        acc[n][p] = add_ints(acc[n][p], mul_ints(scale, dots.sum[n][p].total));
    }
  }

  // sum over groups of (min or scale) * (sum of the group's activations)
  Ints sums[N][2];
  if constexpr (T::kHasMins || kCodeOffset<F> != 0) {
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) sums[n][0] = sums[n][1] = zero_ints();
    for (int v = 0; v < T::kGroups / 4; ++v) {
      const Ints factors = load_ints(tile + (T::kHasMins ? T::kMins : T::kScales) + v * kVector);
      constexpr int kPairs = T::kGroups == 16 ? 2 : 4;
      DFLASH_UNROLL
      for (int u = 0; u < kPairs; ++u) {
        Ints pair;  // two int16 factors: of the two groups of 16, or twice that of a group of 32
        if constexpr (T::kHasMins)
          pair = pick(factors, DFLASH_PATTERN(u, kBlank, u, kBlank));
        else if constexpr (T::kGroups == 16)
          pair = top_bytes_signed(pick(factors, DFLASH_PATTERN(kBlank, 2 * u, kBlank, 2 * u + 1)));
        else
          pair = top_bytes_signed(pick(factors, DFLASH_PATTERN(kBlank, u, kBlank, u)));
        DFLASH_UNROLL
        for (int n = 0; n < N; ++n) DFLASH_UNROLL
        for (int p = 0; p < 2; ++p)
          sums[n][p] = dot_words(sums[n][p], pair, broadcast(sums_at(x[n], p, kPairs * v + u)));
      }
    }
  }
  if constexpr (kCodeOffset<F> != 0) {
    constexpr int kShift = kCodeOffset<F> == 128 ? 7 : 5;
    static_assert(kCodeOffset<F> == 1 << kShift);
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) DFLASH_UNROLL
    for (int p = 0; p < 2; ++p)
      acc[n][p] = sub_ints(acc[n][p], shift_ints_left(sums[n][p], kShift));
  }

  const Floats d = halves_to_floats(halves), dmin = halves_to_floats(halves + 32);
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) {
    const Floats s = set1_lanes(x[n]->scale);
    leaf[n] = fma_lanes(join_planes(acc[n]), mul_lanes(d, s), leaf[n]);
    if constexpr (T::kHasMins)
      leaf[n] = fnma_lanes(join_planes(sums[n]), mul_lanes(dmin, s), leaf[n]);
  }
}

// The same with Q8_1, whose scale changes every 32 values: the sums of 32 go to floats, and
// exactly.
template <class F, int N>
DFLASH_INLINE void superblock(const uint8_t* tile, const uint8_t* halves,
                              const Q8Group* const (&x)[N], Ints table, Floats (&leaf)[N]) {
  using T = Tile<F>;
  constexpr int kShared = T::kGroups / kQ8Quants;  // groups with one activation scale
  Floats value[N], low[N];
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) value[n] = low[n] = set1_lanes(0.f);

  for (int v = 0; v < T::kGroups / 4; ++v) {
    const Ints scales = load_ints(tile + T::kScales + v * kVector);
    Ints mins = zero_ints();
    if constexpr (T::kHasMins) mins = load_ints(tile + T::kMins + v * kVector);
    Ints acc[N];
    DFLASH_UNROLL
    for (int u = 0; u < 4; ++u) {
      const int g = 4 * v + u, quant = g / kShared;
      GroupDots<kDotBits<F>, Q8Group, N> dots;
      if constexpr (kCodeOffset<F> == 0) {
        dots.clear();
      } else {
        const uint32_t word = uint16_t(-kCodeOffset<F>);
        dots.correct(
            kShared == 1 ? set1_words(-kCodeOffset<F>) : set1_ints(int(word << u % 2 * 16)), x,
            quant);
      }
      add_group<F>(dots, tile, g, table, x);
      const Ints scale = scale_of<!T::kHasMins>(scales, u);
      DFLASH_UNROLL
      for (int n = 0; n < N; ++n) {
        const Ints scaled = mul_ints(scale, dots.sum[n][0].total);
        acc[n] = g % kShared == 0 ? scaled : add_ints(acc[n], scaled);
        if (g % kShared == kShared - 1)
          value[n] = fma_lanes(to_floats(acc[n]), set1_lanes(x[n]->scale[quant]), value[n]);
      }
      if constexpr (T::kHasMins) {
        static_assert(kShared == 1);
        const Ints min = pick(mins, DFLASH_PATTERN(u, kBlank, u, kBlank));
        DFLASH_UNROLL
        for (int n = 0; n < N; ++n) {
          const Ints sum = dot_words(zero_ints(), min, broadcast(sums_at(x[n], 0, quant)));
          low[n] = fma_lanes(to_floats(sum), set1_lanes(x[n]->scale[quant]), low[n]);
        }
      }
    }
  }

  const Floats d = halves_to_floats(halves), dmin = halves_to_floats(halves + 32);
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) {
    leaf[n] = fma_lanes(value[n], d, leaf[n]);
    if constexpr (T::kHasMins) leaf[n] = fnma_lanes(low[n], dmin, leaf[n]);
  }
}

// `count` blocks of 32 (Q8_0, Q4_0) that belong to one superblock.
template <class F, class Group, int N>
DFLASH_INLINE void blocks(const uint8_t* codes, const uint8_t* halves, int64_t count,
                          const Group* const (&x)[N], Floats (&leaf)[N]) {
  using T = Tile<F>;
  constexpr bool kQ8 = std::is_same_v<Group, Q8Group>;
  Floats value[N];
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) value[n] = set1_lanes(0.f);
  for (int b = 0; b < count; ++b, codes += T::kBlockBytes, halves += 2 * kTileRows) {
    GroupDots<T::kBits, Group, N> dots;
    if constexpr (kCodeOffset<F> == 0)
      dots.clear();
    else
      dots.correct(set1_words(-kCodeOffset<F>), x, b);
    DFLASH_UNROLL
    for (int i = 0; i < 4; ++i) {
      Ints w[2];
      if constexpr (T::kBits == 4) {
        two_quads<F>(codes, zero_ints(), i, zero_ints(), w);
      } else {
        DFLASH_UNROLL
        for (int half = 0; half < 2; ++half) {
          w[half] = load_ints(codes + (2 * i + half) * kVector);
          prefetch_weights(codes + (2 * i + half) * kVector);
          if (kSignedBytes) w[half] = xor_ints(w[half], set1_bytes(-128));
        }
      }
      dots.add(2 * i, w[0], x, 32 * b + 8 * i);
      dots.add(2 * i + 1, w[1], x, 32 * b + 8 * i + 4);
    }
    const Floats d = halves_to_floats(halves);
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) {
      if constexpr (kQ8) {
        const Floats scale = mul_lanes(d, set1_lanes(x[n]->scale[b]));
        leaf[n] = fma_lanes(to_floats(dots.sum[n][0].total), scale, leaf[n]);
      } else {
        const Ints planes[2] = {dots.sum[n][0].total, dots.sum[n][1].total};
        value[n] = fma_lanes(d, join_planes(planes), value[n]);
      }
    }
  }
  if constexpr (!kQ8) {
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) leaf[n] = fma_lanes(value[n], set1_lanes(x[n]->scale), leaf[n]);
  }
}

// Rows part * kPartRows .. of a tile times N activation rows over one leaf that starts at
// superblock `first`: out[n], n < N. `x` are whole rows of activations.
template <class F, int N, class Group>
void tile_leaf(const uint8_t* tile, int64_t columns, int64_t first, int part, const Group* const* x,
               Floats* out) {
  using T = Tile<F>;
  Floats leaf[N];
  const Group* group[N];
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) {
    leaf[n] = set1_lanes(0.f);
    group[n] = x[n] + first;
  }
  const int64_t end = std::min(ceil_div<int64_t>(columns, kSuperblock), first + kLeafSuperblocks);
  const int lanes = part * kPartRows;
  const Ints table = F::kType == IQ4_XS::kType ? iq4_table() : zero_ints();
  for (int64_t s = first; s < end; ++s) {
    if constexpr (T::kHasSuperblocks) {
      const uint8_t* at = tile + s * T::kBytes;
      superblock<F, N>(at + 4 * lanes, at + 2 * lanes, group, table, leaf);
    } else {
      const int64_t b = s * 8;
      blocks<F>(tile + T::codes(columns) + b * T::kBlockBytes + 4 * lanes,
                tile + (b * kTileRows + lanes) * 2, std::min<int64_t>(8, columns / 32 - b), group,
                leaf);
    }
    DFLASH_UNROLL
    for (int n = 0; n < N; ++n) ++group[n];
  }
  DFLASH_UNROLL
  for (int n = 0; n < N; ++n) out[n] = leaf[n];
}

}  // namespace dflash::cpu::DFLASH_ISA
