// What csrc/cpu/head.cpp hands to the kernels of head.inl. Free of torch.
#pragma once
#include <cstdint>

namespace dflash::cpu {

struct TopkArgs {
  const float* logits;  // [rows, vocabulary]
  int64_t vocabulary;
  float multiplier, softcap;
};

// Keys of columns [begin, end) of a row, in the order of core/topk.h. Both return false on a NaN.
// best: the `k` greatest, as a heap with the least of them in front (k <= end - begin).
// keys: all of them, in order of the columns.
#define DFLASH_TOPK_KERNELS                                                                \
  bool topk_best(const TopkArgs& args, int64_t row, int64_t begin, int64_t end, int64_t k, \
                 uint64_t* best);                                                          \
  bool topk_keys(const TopkArgs& args, int64_t row, int64_t begin, int64_t end, uint64_t* keys);

namespace avx2 {
DFLASH_TOPK_KERNELS
}
namespace avx512 {
DFLASH_TOPK_KERNELS
}
#undef DFLASH_TOPK_KERNELS

}  // namespace dflash::cpu
