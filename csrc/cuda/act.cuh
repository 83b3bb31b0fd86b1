// Float rows to activations, for operators whose output may be packed.
#pragma once
#include "cuda/launch.cuh"
#include "host/act.h"

namespace dflash::cuda {

// x [rows, columns] to `out`, which new_activations() made for act_mode.
void to_activations(const FloatRows& x, int64_t rows, int64_t columns, int64_t act_mode,
                    Tensor& out);

// The float32 rows that a kernel writes before they are packed: `out` itself when it is float32.
inline Tensor float_rows_of(const Tensor& out, int64_t rows, int64_t columns, int64_t act_mode) {
  return act_mode == 0 ? out : new_empty(out, {rows, columns}, ScalarType::Float);
}

// Packs what float_rows_of() gave.
inline void finish_activations(const Tensor& floats, int64_t rows, int64_t columns,
                               int64_t act_mode, Tensor& out) {
  if (act_mode != 0)
    to_activations({floats.const_data_ptr(), columns, FloatType::kF32}, rows, columns, act_mode,
                   out);
}

}  // namespace dflash::cuda
