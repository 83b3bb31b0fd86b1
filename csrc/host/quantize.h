#pragma once
#include "host/dispatch.h"
#include "host/quant.h"

namespace dflash {

constexpr const char* kQuantize = "dflash::quantize";

struct QuantizePlan {
  int64_t rows, columns, row_stride;
  const char* name;  // of the type
  float largest;     // magnitude it can store
  Tensor out;        // uint8 [rows, bytes]
};

inline QuantizePlan plan_quantize(const Tensor& x, int64_t ggml_type) {
  check_dim(kQuantize, "x", x, 2, "[rows, columns]");
  check_dtype(kQuantize, "x", x, kFloatTypes);
  check_dense(kQuantize, "x", x, 1);
  Geometry quant{};
  const char* name = nullptr;
  float largest = 0.f;
  std::ostringstream known;
#define DFLASH_QUANTIZED(F, most)   \
  if (ggml_type == F::kType) {      \
    quant = {F::kElems, F::kBytes}; \
    name = #F;                      \
    largest = most;                 \
  }                                 \
  known << (known.tellp() > 0 ? ", " : "") << #F " (" << F::kType << ')';
#include "core/formats/quantized.def"
#undef DFLASH_QUANTIZED
  STD_TORCH_CHECK(name != nullptr, kQuantize, ": ggml_type must be one of ", known.str(), ", got ",
                  ggml_type);
  STD_TORCH_CHECK(x.size(1) % quant.elems == 0, kQuantize, ": x must have rows of a multiple of ",
                  quant.elems, " values for ", name, ", got ", x.size(1));
  return {x.size(0),
          x.size(1),
          x.stride(0),
          name,
          largest,
          new_empty(x, {x.size(0), x.size(1) / quant.elems * quant.bytes}, ScalarType::Byte)};
}

// The kernel of every device but the CPU.
inline Tensor quantize_elsewhere(const Tensor& x, int64_t) {
  STD_TORCH_CHECK(false, kQuantize, ": x must be on the CPU, got a tensor of device type ",
                  int(x.device().type()), "; call .cpu() first");
}

}  // namespace dflash
