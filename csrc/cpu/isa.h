// Which instruction set the kernels use. AVX2 and AVX-512 give the same bits: a choice of speed.
#pragma once

namespace dflash::cpu {

enum class Isa { kAvx2, kAvx512 };

// Asked of the processor once; DFLASH_ISA=avx2 lowers it (tests run both).
Isa isa();

}  // namespace dflash::cpu
