// What csrc/cpu/draft.inl provides per instruction set. Free of torch.
#pragma once
#include <cstdint>

#include "core/act.h"
#include "cpu/isa.h"

namespace dflash::cpu {

struct GroupedConvCall {
  int64_t rows, columns, taps, groups;
  const float* x;             // [rows, columns]
  const float* coef;          // [rows, 2, taps, groups], of this side
  const float* base;          // [taps, columns], of this side
  const int32_t* cu_seqlens;  // [sequences + 1]
  float* out;                 // [rows, columns], or null:
  uint8_t* packed;            // [rows, packed_bytes(columns, act_mode)]
  int64_t act_mode;
};

struct DraftKernels {
  void (*grouped_conv)(const GroupedConvCall& call);
  // reduce.h's dot.
  float (*dot)(const float* a, const float* b, int64_t n);
  // A float row as packed activations.
  void (*quantize_row)(const float* x, int64_t columns, int64_t act_mode, uint8_t* packed);
};

namespace avx2 {
extern const DraftKernels kDraft;
}
namespace avx512 {
extern const DraftKernels kDraft;
}

inline const DraftKernels& draft_kernels() {
  return isa() == Isa::kAvx512 ? avx512::kDraft : avx2::kDraft;
}

}  // namespace dflash::cpu
