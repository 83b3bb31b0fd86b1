// Float rows to activations.
#pragma once
#include "gpu/act.cuh"

namespace dflash::gpu {

template <class Group>
__global__ void quant_act(FloatRows x,    // [rows, columns]
                          Group* groups,  // [rows, ceil(columns / 256)]
                          int64_t rows, int64_t columns) {
  const int64_t per_row = ceil_div<int64_t>(columns, kActGroup), n = warp_id();
  wait_for_earlier();
  let_next_begin();
  if (n >= rows * per_row) return;
  const int64_t row = n / per_row, first = n % per_row * kActGroup + lane_id() * kActPerLane;
  float value[kActPerLane];
  for (int i = 0; i < kActPerLane; ++i)
    value[i] = first + i < columns ? load_float(x.data, x.type, row * x.stride + first + i) : 0.f;
  quantize_group(value, groups + n);
}

// act_mode 0: the values themselves.
__global__ void to_float32(FloatRows x, float* out, int64_t rows, int64_t columns) {
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_earlier();
  let_next_begin();
  if (n < rows * columns) out[n] = load_float(x.data, x.type, n / columns * x.stride + n % columns);
}

}  // namespace dflash::gpu
