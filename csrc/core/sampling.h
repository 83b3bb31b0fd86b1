// From logits to probabilities, and from probabilities to a token.
//
// Row of V logits, temperature t > 0:
//   top-k   the k first ids by (logit descending, id ascending)
//   e_i     = exp((x_i - max x) / t), 0 outside the top-k;   p_i = e_i / sum e
//   top-p   ids by (p descending, id ascending) while the probability before them is < top_p;
//           p_i = p_i / sum of the kept p
// Sums of e and p: reduce.h's order by id, outside ids counting as 0. Which ids are kept is decided
// with integers (counts; probabilities in units of 2^-60), whose sums have no order at all.
#pragma once
#include "core/reduce.h"

namespace dflash {

// Larger float, larger key; -0 and +0 are the same value and get the same key. No NaN.
DFLASH_HD uint32_t order_key(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A probability in units of 2^-60; exact down to p = 2^-36.
DFLASH_HD uint64_t mass(float p) {
  return uint64_t(int64_t(p * 1152921504606846976.f));
}

// The weight to reach: never 0, so that at least one id is kept.
DFLASH_HD uint64_t mass_target(float top_p) {
  const uint64_t m = mass(top_p);
  return m > 0 ? m : 1;
}

DFLASH_HD float softmax_term(float x, float max, float temperature) {
  return exp((x - max) / temperature);
}

// Where a descending selection ends: everything above `key` is kept, and of the ids at `key` the
// first `ties` in ascending order. `before` is the weight above `key`.
struct Cut {
  uint32_t key;
  uint64_t before;
};

// The radix digits a cut is found by, from the top: 11, 11 and 10 bits.
constexpr int kDigits = 3, kBuckets = 2048;
DFLASH_HD int digit_shift(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
DFLASH_HD uint32_t digit_of(uint32_t key, int digit) {
  return key >> digit_shift(digit) & (digit == 2 ? 1023u : 2047u);
}
// Bits above the digit: equal to the cut's so far in every id that still counts.
DFLASH_HD uint32_t digit_prefix(uint32_t key, int digit) {
  return digit == 0 ? 0u : key >> (digit == 1 ? 21 : 10);
}

// Descends through one histogram [kBuckets]: the digit in which `target` is reached, or 0 when the
// whole weight is less (then nothing is cut).
DFLASH_HD uint32_t cut_digit(const uint64_t* histogram, uint64_t target, uint64_t* before) {
  for (uint32_t d = kBuckets; d-- > 0;) {
    if (*before + histogram[d] >= target) return d;
    *before += histogram[d];
  }
  return 0;
}

// How many ids of weight `each` at the cut's key are kept.
DFLASH_HD uint64_t cut_ties(uint64_t target, uint64_t before, uint64_t each) {
  return each == 0 ? ~uint64_t(0) : (target - before + each - 1) / each;
}

// A draw is the inverse of the distribution function in id order: the first id whose running sum
// exceeds u * total. Chunks of kLeaf ids, each summed by reduce.h's leaf; running sums over chunks
// and inside the chunk are double and ascending, so every backend stops at the same id.
constexpr int kDrawChunk = kLeaf;

// One leaf of reduce.h's order over p(i) * 1, n <= kLeaf.
template <class P>
DFLASH_HD float sum_leaf(const P& p, int64_t n) {
  float acc[kAccumulators] = {};
  for (int64_t e = 0; e < n; ++e) acc[e % kAccumulators] = acc[e % kAccumulators] + p(e);
  return fold(acc);
}

// Inside the chunk: ids of probability 0 are never returned, and when rounding leaves nobody above
// the threshold the last possible id is. -1 when no id is possible.
template <class P>
DFLASH_HD int64_t draw_in_chunk(const P& p, int64_t begin, int64_t end, double running,
                                double threshold) {
  int64_t last = -1;
  for (int64_t i = begin; i < end; ++i) {
    const float value = p(i);
    if (!(value > 0.f)) continue;
    last = i;
    running += double(value);
    if (running > threshold) return i;
  }
  return last;
}

}  // namespace dflash
