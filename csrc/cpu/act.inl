#include "cpu/act.h"
#include "cpu/act_kernel.h"
#include "cpu/convert.h"

namespace dflash::cpu::DFLASH_ISA {

void quant_act(const QuantActCall& c) {
  const int64_t groups = ceil_div<int64_t>(c.columns, kActGroup);
  const int64_t bytes = group_bytes(c.act_mode);
  // a group takes about 0.2 us
  parallel_for(c.rows * groups, 32, [&](int64_t begin, int64_t end) {
    alignas(64) float buffer[kActGroup];
    for (int64_t g = begin; g < end; ++g) {
      const int64_t row = g / groups, from = g % groups * kActGroup;
      const int64_t n = std::min<int64_t>(kActGroup, c.columns - from);
      const float* x = as_float(c.x + row * c.row_bytes, c.type, from, n, buffer);
      quantize_row(x, n, c.act_mode, c.out + g * bytes);
    }
  });
}

void to_float32(const QuantActCall& c) {
  auto* out = reinterpret_cast<float*>(c.out);
  parallel_for(c.rows, std::max<int64_t>(1, 16384 / c.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = out + row * c.columns;
      const float* x = as_float(c.x + row * c.row_bytes, c.type, 0, c.columns, to);
      if (x != to) memcpy(to, x, size_t(c.columns) * sizeof(float));
    }
  });
}

}  // namespace dflash::cpu::DFLASH_ISA
