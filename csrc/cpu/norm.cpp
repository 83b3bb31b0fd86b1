#include "host/norm.h"

#include <torch/csrc/stable/library.h>

#include "cpu/graph.h"
#include "cpu/isa.h"

namespace dflash::cpu {

namespace avx2 {
void add_rms_norm(const NormArgs& args);
}
namespace avx512 {
void add_rms_norm(const NormArgs& args);
}

Tensor add_rms_norm(const OptionalTensor& x, const Tensor& residual, const Tensor& weight,
                    double eps, bool plus_one, int64_t act_mode, const OptionalTensor& capture) {
  const NormPlan plan = plan_add_rms_norm(x, residual, weight, eps, plus_one, act_mode, capture);
  (isa() == Isa::kAvx512 ? avx512::add_rms_norm : avx2::add_rms_norm)(plan.args);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("add_rms_norm", TORCH_BOX(&Recorded<&add_rms_norm>::call));
}

}  // namespace dflash::cpu
