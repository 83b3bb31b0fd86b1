// The usual checks of one argument in one call.
#pragma once
#include "host/check.h"

namespace dflash {

// dtype, number of dimensions, contiguity and device.
inline void check_argument(const char* op, const char* arg, const Tensor& t, ScalarType dtype,
                           int64_t dim, const char* layout, const Tensor& like) {
  check_dtype(op, arg, t, {dtype});
  check_dim(op, arg, t, dim, layout);
  check_contiguous(op, arg, t);
  check_same_device(op, arg, t, like);
}

// "x must have 4 <why>, got shape [2, 3]"
inline void check_size(const char* op, const char* arg, const Tensor& t, int64_t dim, int64_t want,
                       const char* why) {
  STD_TORCH_CHECK(t.size(dim) == want, op, ": ", arg, " must have ", want, " ", why, ", got shape ",
                  shape_str(t));
}

}  // namespace dflash
