#include "host/conv.h"

#include <torch/csrc/stable/library.h>

#include "cpu/graph.h"
#include "cpu/isa.h"

namespace dflash::cpu {

namespace avx2 {
void ssm_conv_step(const ConvArgs& args);
}
namespace avx512 {
void ssm_conv_step(const ConvArgs& args);
}

Tensor ssm_conv_step(const Tensor& x, const Tensor& state, const Tensor& weight,
                     const OptionalTensor& bias, bool silu, const Tensor& slots,
                     const OptionalTensor& num_accepted, const Tensor& cu_seqlens) {
  const ConvPlan plan =
      plan_ssm_conv_step(x, state, weight, bias, silu, slots, num_accepted, cu_seqlens);
  check_conv_values(plan.args);
  (isa() == Isa::kAvx512 ? avx512::ssm_conv_step : avx2::ssm_conv_step)(plan.args);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("ssm_conv_step", TORCH_BOX(&Recorded<&ssm_conv_step>::call));
}

}  // namespace dflash::cpu
