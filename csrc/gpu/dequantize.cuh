// Packed rows to float32, a value per thread: neighbours read the same quant and store side by
// side.
#pragma once
#include "core/formats/all.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

template <class F>
__global__ void dequantize(const uint8_t* packed,  // [count / kElems quants]
                           float* out,             // [count]
                           int64_t count) {
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n < count) out[n] = decode<F>(packed + n / F::kElems * F::kBytes, int(n % F::kElems));
}

// An id outside the table gives a NaN row: the host must not read ids to check them. A row's blocks
// stand in y.
template <class F>
__global__ void embed_rows(const uint8_t* packed,  // [rows, columns / kElems quants]
                           const int64_t* ids,     // [gridDim.x]
                           float* out,             // [gridDim.x, columns]
                           int64_t rows, int64_t columns, float scale) {
  start();
  const int64_t column = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float* to = out + blockIdx.x * columns + column;
  const int64_t row = ids[blockIdx.x];
  if (row < 0 || row >= rows) {
    *to = no_answer();
    return;
  }
  const int64_t quant = row * (columns / F::kElems) + column / F::kElems;
  *to = mul(decode<F>(packed + quant * F::kBytes, int(column % F::kElems)), scale);
}

}  // namespace dflash::gpu
