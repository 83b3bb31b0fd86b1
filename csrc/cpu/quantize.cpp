#include "cpu/quantize.h"

#include <torch/csrc/stable/library.h>

#include <cmath>

#include "cpu/isa.h"
#include "host/quantize.h"

namespace dflash::cpu {

Tensor quantize(const Tensor& x, int64_t ggml_type) {
  const QuantizePlan plan = plan_quantize(x, ggml_type);
  if (plan.out.numel() == 0) return plan.out;
  const FloatType type = float_type(x);
  const QuantizeCall call{static_cast<const uint8_t*>(x.const_data_ptr()),
                          type,
                          plan.rows,
                          plan.columns,
                          plan.row_stride * bytes_of(type),
                          ggml_type,
                          plan.largest,
                          plan.out.mutable_data_ptr<uint8_t>()};
  const int64_t bad = (isa() == Isa::kAvx512 ? avx512::quantize : avx2::quantize)(call);
  if (bad == plan.rows) return plan.out;
  float value = 0.f;
  for (int64_t i = 0; i < plan.columns && std::fabs(value) <= plan.largest; ++i)
    value = load_float(call.x + bad * call.row_bytes, type, i);
  STD_TORCH_CHECK(std::isfinite(value), kQuantize, ": x must be finite, got ", value, " in row ",
                  bad);
  STD_TORCH_CHECK(false, kQuantize, ": x must be within +-", plan.largest, " for ", plan.name,
                  ", got ", value, " in row ", bad);
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
}

}  // namespace dflash::cpu
