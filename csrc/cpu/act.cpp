#include "host/act.h"

#include <torch/csrc/stable/library.h>

#include "cpu/act_kernel.h"
#include "cpu/graph.h"
#include "cpu/isa.h"
#include "host/dispatch.h"

namespace dflash::cpu {

Tensor quant_act(const Tensor& x, int64_t act_mode) {
  const auto plan = plan_quant_act(x, act_mode);
  if (plan.rows == 0) return plan.out;
  const FloatType type = float_type(x);
  const QuantActCall call{static_cast<const uint8_t*>(x.const_data_ptr()),
                          type,
                          plan.rows,
                          plan.columns,
                          plan.row_stride * bytes_of(type),
                          act_mode,
                          static_cast<uint8_t*>(plan.out.mutable_data_ptr())};
  const bool wide = isa() == Isa::kAvx512;
  if (act_mode == 0)
    (wide ? avx512::to_float32 : avx2::to_float32)(call);
  else
    (wide ? avx512::quant_act : avx2::quant_act)(call);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("quant_act", TORCH_BOX(&Recorded<&quant_act>::call));
}

}  // namespace dflash::cpu
