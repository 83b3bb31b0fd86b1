// The vector loops of the drafters' own operators. Included by avx2/ and avx512/draft.cpp.
#include "core/draft.h"
#include "cpu/act.h"
#include "cpu/draft.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

// Row n of a block that began at row `first`: y[columns].
void conv_row(const GroupedConvCall& c, int64_t n, int64_t first, float* __restrict__ y) {
  memset(y, 0, size_t(c.columns) * sizeof(float));
  const int64_t width = c.columns / c.groups;
  for (int64_t t = 0; t < c.taps && n - t >= first; ++t) {
    const float* coef = c.coef + (n * 2 * c.taps + t) * c.groups;
    for (int64_t g = 0; g < c.groups; ++g) {
      const float* __restrict__ base = c.base + t * c.columns + g * width;
      const float* __restrict__ x = c.x + (n - t) * c.columns + g * width;
      float* __restrict__ sum = y + g * width;
      for (int64_t i = 0; i < width; ++i) sum[i] = conv_tap(base[i], coef[g], x[i], sum[i]);
    }
  }
}

void grouped_conv(const GroupedConvCall& c) {
  const int64_t row_bytes = c.packed ? packed_bytes(c.columns, c.act_mode) : 0;
  const int64_t grain = std::max<int64_t>(1, 16384 / (c.columns * c.taps));
  parallel_for(c.rows, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> spare(c.packed ? new float[size_t(c.columns)] : nullptr);
    const int32_t* sequence = c.cu_seqlens;
    for (int64_t n = begin; n < end; ++n) {
      while (sequence[1] <= n) ++sequence;
      conv_row(c, n, sequence[0], c.packed ? spare.get() : c.out + n * c.columns);
      if (c.packed) quantize_row(spare.get(), c.columns, c.act_mode, c.packed + n * row_bytes);
    }
  });
}

float dot_rows(const float* a, const float* b, int64_t n) {
  return dot(a, b, n);
}

void pack_row(const float* x, int64_t columns, int64_t act_mode, uint8_t* packed) {
  quantize_row(x, columns, act_mode, packed);
}

}  // namespace

const DraftKernels kDraft = {grouped_conv, dot_rows, pack_row};

}  // namespace dflash::cpu::DFLASH_ISA
