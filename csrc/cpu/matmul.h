// The matmul for other kernels of the same instruction set; include it after avx2.h or avx512.h.
#pragma once
#include "cpu/matmul_kernel.h"

namespace dflash::cpu::DFLASH_ISA {

// Rows 16 tile .. 16 tile + 15 of a segment times every row of x: out[n * out_stride + 16 tile + i]
// (+ bias[16 tile + i], if there is a bias), for the rows that exist.
void matmul_tile(const MatmulSegment& segment, const MatmulRows& x, int64_t tile, const float* bias,
                 float* out, int64_t out_stride);

// x~ of packed rows: out[count * columns].
void unpack_activations(const void* packed, int64_t act_mode, int64_t count, int64_t columns,
                        float* out);

}  // namespace dflash::cpu::DFLASH_ISA
