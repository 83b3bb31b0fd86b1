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

// An id outside the table gives a NaN row: the host must not read ids to check them.
template <class F>
__global__ void embed_rows(const uint8_t* packed,  // [rows, columns / kElems quants]
                           const int64_t* ids,     // [count / columns]
                           float* out,             // [count / columns, columns]
                           int64_t rows, int64_t columns, int64_t count, float scale) {
  start();
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= count) return;
  const int64_t row = ids[n / columns];
  if (row < 0 || row >= rows) {
    out[n] = bit_cast<float>(0x7fc00000u);
    return;
  }
  const int64_t quant = row * (columns / F::kElems) + n % columns / F::kElems;
  // a row is whole quants, so n and n % columns agree modulo kElems
  out[n] = mul(decode<F>(packed + quant * F::kBytes, int(n % F::kElems)), scale);
}

}  // namespace dflash::gpu
