#include "cpu/isa.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string_view>

namespace dflash::cpu {

Isa isa() {
  static const Isa chosen = [] {
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
    const char* asked = std::getenv("DFLASH_ISA");
    if (!asked || !*asked) return wide ? Isa::kAvx512 : Isa::kAvx2;
    const std::string_view name(asked);
    if (name == "avx2") return Isa::kAvx2;
    STD_TORCH_CHECK(name == "avx512", "DFLASH_ISA must be avx2 or avx512, got ", asked);
    STD_TORCH_CHECK(wide, "DFLASH_ISA=avx512: this processor has no AVX-512 VNNI");
    return Isa::kAvx512;
  }();
  return chosen;
}

}  // namespace dflash::cpu
