// What a ggml type is, for operators that take packed bytes.
#pragma once
#include "core/formats/all.h"
#include "host/check.h"

namespace dflash {

struct Geometry {
  int64_t elems, bytes;  // of one quant
};

// "F32 (0), F16 (1), ..."
inline std::string known_formats() {
  std::ostringstream s;
  const char* separator = "";
#define DFLASH_FORMAT(F)                        \
  s << separator << #F " (" << F::kType << ')'; \
  separator = ", ";
#include "core/formats/all.def"
#undef DFLASH_FORMAT
  return s.str();
}

// The geometry of type id `type`, which came as argument `arg` of `op`; an unknown id is an error.
inline Geometry check_format(const char* op, const char* arg, int64_t type) {
  Geometry geometry{};
  const bool known = dispatch_format(type, [&]<class F>() { geometry = {F::kElems, F::kBytes}; });
  STD_TORCH_CHECK(known, op, ": ", arg, " must be one of ", known_formats(), ", got ", type);
  return geometry;
}

// Rows of whole quants: uint8 [rows, bytes], contiguous. Returns the values of a row.
inline int64_t check_packed(const char* op, const char* arg, const Tensor& packed, Geometry quant) {
  check_dim(op, arg, packed, 2, "[rows, bytes]");
  check_dtype(op, arg, packed, {ScalarType::Byte});
  STD_TORCH_CHECK(packed.is_contiguous(), op, ": ", arg,
                  " must be contiguous, got strides of another layout; call .contiguous()");
  STD_TORCH_CHECK(packed.size(1) % quant.bytes == 0, op, ": ", arg,
                  " must have rows of a multiple of ", quant.bytes, " bytes, got ", packed.size(1));
  return packed.size(1) / quant.bytes * quant.elems;
}

}  // namespace dflash
