// What csrc/cpu/sampling.inl provides per instruction set. Free of torch.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

namespace dflash::cpu {

enum class RowStatus { kOk, kNotFinite, kAllMinusInfinity };

// Instead of an id: a negative or NaN probability; a sum that is 0 or infinite.
constexpr int64_t kBadProbability = -1, kNoMass = -2;

struct SamplingKernels {
  // probs[vocab] of core/sampling.h; temperature 0: one-hot arg max. Nothing is written on failure.
  RowStatus (*probs)(const float* logits, int64_t vocab, float temperature, int64_t top_k,
                     float top_p, float* probs);
  // The id that `u` in [0, 1) falls on; sums[ceil(n / kDrawChunk)] is scratch.
  int64_t (*draw)(const float* p, int64_t n, float u, float* sums);
  // Whether probs() would accept the row.
  RowStatus (*check)(const float* logits, int64_t vocab);
  // Smallest id of the largest value of a row that passed check().
  int64_t (*arg_max)(const float* x, int64_t n);
  // Sets to `value` every x[i] that is not among the k largest keys[i] (ties: lowest ids first).
  void (*keep_top)(const float* keys, int64_t n, int64_t k, float value, float* x);
};

namespace avx2 {
extern const SamplingKernels kSampling;
}
namespace avx512 {
extern const SamplingKernels kSampling;
}

inline const SamplingKernels& sampling_kernels() {
  return isa() == Isa::kAvx512 ? avx512::kSampling : avx2::kSampling;
}

}  // namespace dflash::cpu
