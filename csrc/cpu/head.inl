// Top-k of logits, compiled once per instruction set.
#include "core/topk.h"
#include "cpu/head.h"
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

constexpr int64_t kStep = 256;

// Bits of the lanes that are above the threshold or NaN.
#ifdef __AVX512F__
DFLASH_INLINE uint32_t notable(F32x16 x, F32x16 threshold) {
  return _mm512_cmp_ps_mask(x.v, threshold.v, _CMP_NLE_UQ);
}
#else
DFLASH_INLINE uint32_t notable(F32x16 x, F32x16 threshold) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.lo, threshold.lo, _CMP_NLE_UQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.hi, threshold.hi, _CMP_NLE_UQ))) << 8;
}
#endif

// Values of `count` <= kStep logits: the logits themselves, or computed into `buffer`.
const float* values_of(const TopkArgs& args, const float* logits, int64_t count, float* buffer) {
  if (args.multiplier == 1.f && args.softcap == 0.f) return logits;
  const float multiplier = args.multiplier, softcap = args.softcap;  // the buffer aliases nothing
  for (int64_t i = 0; i < count; ++i) buffer[i] = dflash::mul(logits[i], multiplier);
  if (softcap > 0.f)
    for (int64_t i = 0; i < count; ++i) buffer[i] = soft_capped(buffer[i], softcap);
  return buffer;
}

// The k best so far, the least of them in front.
struct Heap {
  uint64_t* keys;
  int64_t capacity, size = 0;

  void offer(uint64_t key) {
    if (size < capacity) {
      int64_t at = size++;
      for (; at > 0 && keys[(at - 1) / 2] > key; at = (at - 1) / 2) keys[at] = keys[(at - 1) / 2];
      keys[at] = key;
    } else if (key > keys[0]) {
      int64_t at = 0;
      for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && keys[child + 1] < keys[child]) ++child;
        if (keys[child] > key) break;
        keys[at] = keys[child];
      }
      keys[at] = key;
    }
  }
};

}  // namespace

bool topk_best(const TopkArgs& args, int64_t row, int64_t begin, int64_t end, int64_t k,
               uint64_t* best) {
  const float* logits = args.logits + row * args.vocabulary;
  Heap heap{best, k};
  alignas(64) float buffer[kStep];
  for (int64_t first = begin; first < end; first += kStep) {
    const int64_t count = std::min(kStep, end - first);
    const float* values = values_of(args, logits + first, count, buffer);
    int64_t i = 0;
    for (; i < count && heap.size < k; ++i) {
      if (values[i] != values[i]) return false;
      heap.offer(rank_key(values[i], uint32_t(first + i)));
    }
    if (i == count) continue;
    // Ids ascend, so of equal values the later one loses: only a greater value enters.
    F32x16 threshold = set1(rank_value(best[0]));
    for (; i + 16 <= count; i += 16) {
      const uint32_t lanes = notable(load(values + i), threshold);
      if (!lanes) continue;
      for (uint32_t left = lanes; left; left &= left - 1) {
        const int64_t at = i + __builtin_ctz(left);
        if (values[at] != values[at]) return false;
        heap.offer(rank_key(values[at], uint32_t(first + at)));
      }
      threshold = set1(rank_value(best[0]));
    }
    for (; i < count; ++i) {
      if (values[i] != values[i]) return false;
      heap.offer(rank_key(values[i], uint32_t(first + i)));
    }
  }
  return true;
}

bool topk_keys(const TopkArgs& args, int64_t row, int64_t begin, int64_t end, uint64_t* keys) {
  const float* logits = args.logits + row * args.vocabulary;
  alignas(64) float buffer[kStep];
  bool clean = true;
  for (int64_t first = begin; first < end; first += kStep) {
    const int64_t count = std::min(kStep, end - first);
    const float* values = values_of(args, logits + first, count, buffer);
    for (int64_t i = 0; i < count; ++i) {
      clean = clean && values[i] == values[i];
      keys[first - begin + i] = rank_key(values[i], uint32_t(first + i));
    }
  }
  return clean;
}

}  // namespace dflash::cpu::DFLASH_ISA
