#pragma once
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "core/formats/all.h"
#include "host/act.h"

namespace dflash {

// Values and bytes of a quant; refuses a type without a format and a ragged row.
struct QuantGeometry {
  int64_t elems, bytes;
};

inline QuantGeometry quant_of(const char* op, int64_t type, int64_t columns) {
  QuantGeometry quant{};
  const bool known = dispatch_format(type, [&]<class F>() { quant = {F::kElems, F::kBytes}; });
  STD_TORCH_CHECK(known, op, ": no quant format has ggml type ", type);
  STD_TORCH_CHECK(columns > 0 && columns % quant.elems == 0, op,
                  ": columns must be a positive multiple of ", quant.elems, " for ggml type ", type,
                  ", got ", columns);
  return quant;
}

// Positive, and few enough that no product with the bytes of a value overflows.
inline void check_weight_rows(const char* op, int64_t rows, int64_t columns, int64_t least = 1) {
  STD_TORCH_CHECK(rows >= least, op, ": rows must be at least ", least, ", got ", rows);
  STD_TORCH_CHECK(columns <= kMostValues && rows <= kMostValues / columns, op, ": rows times the ",
                  columns, " columns must be at most 2^48, got ", rows, " rows");
}

struct RepackPlan {
  int64_t rows, row_bytes;
};

inline RepackPlan plan_repack(const Tensor& packed, int64_t type, int64_t columns) {
  constexpr const char* op = "dflash::repack";
  check_dim(op, "packed", packed, 2, "[rows, bytes]");
  check_dtype(op, "packed", packed, {ScalarType::Byte});
  STD_TORCH_CHECK(packed.is_contiguous(), op, ": packed must be contiguous");
  const QuantGeometry quant = quant_of(op, type, columns);
  const int64_t row_bytes = columns / quant.elems * quant.bytes;
  STD_TORCH_CHECK(packed.size(1) == row_bytes, op, ": ", columns, " values of ggml type ", type,
                  " take ", row_bytes, " bytes a row, got ", packed.size(1));
  return {packed.size(0), row_bytes};
}

// Bytes of a repacked segment on the device of the kernel.
using SegmentBytes = int64_t (*)(int64_t type, int64_t rows, int64_t columns);

inline void check_weight(const char* op, const Tensor& weight, int64_t bytes) {
  check_dim(op, "weight", weight, 1, "[bytes]");
  check_dtype(op, "weight", weight, {ScalarType::Byte});
  STD_TORCH_CHECK(weight.is_contiguous(), op, ": weight must be contiguous");
  STD_TORCH_CHECK(weight.size(0) == bytes, op, ": weight must be the ", bytes,
                  " bytes that repack() gives for these types and shapes, got ", weight.size(0));
}

// What both matmuls check about x: float32 [rows, columns] or packed rows.
struct MatmulInput {
  int64_t rows, act_mode;
};

inline MatmulInput check_matmul_input(const char* op, const Tensor& x, const Tensor& weight,
                                      int64_t columns) {
  check_dim(op, "x", x, 2, "[rows, columns] or [rows, act_bytes]");
  check_dtype(op, "x", x, kActTypes);
  STD_TORCH_CHECK(x.is_contiguous(), op, ": x must be contiguous");
  check_same_device(op, "weight", weight, x);
  const int64_t act_mode = act_mode_of(x);
  STD_TORCH_CHECK(columns > 0, op, ": columns must be positive, got ", columns);
  const int64_t width = act_mode == 0 ? columns : act_bytes(op, columns, act_mode);
  constexpr const char* kNames[] = {"float32", "packed (uint8: planes)", "packed (int8: Q8_1)"};
  STD_TORCH_CHECK(x.size(1) == width, op, ": ", kNames[act_mode], " x must be [rows, ", width,
                  "] for ", columns, " columns, got shape ", shape_str(x));
  return {x.size(0), act_mode};
}

struct QmmPlan {
  MatmulInput x;
  int64_t total_rows;                 // of the weight: columns of the output
  std::vector<int64_t> byte_offsets;  // of each segment in the weight
  Tensor out;                         // float32 [x.rows, total_rows]
};

inline QmmPlan plan_qmm(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& types,
                        const std::vector<int64_t>& rows, int64_t columns,
                        const std::optional<Tensor>& bias, SegmentBytes segment_bytes) {
  constexpr const char* op = "dflash::qmm";
  const MatmulInput input = check_matmul_input(op, x, weight, columns);
  STD_TORCH_CHECK(!types.empty() && types.size() == rows.size(), op,
                  ": types and rows must name the same segments, got ", types.size(), " and ",
                  rows.size());
  QmmPlan plan{input, 0, {}, {}};
  plan.byte_offsets.reserve(types.size());
  int64_t bytes = 0;
  for (size_t s = 0; s < types.size(); ++s) {
    quant_of(op, types[s], columns);
    check_weight_rows(op, rows[s], columns);
    plan.byte_offsets.push_back(bytes);
    bytes += segment_bytes(types[s], rows[s], columns);
    plan.total_rows += rows[s];
  }
  check_weight(op, weight, bytes);
  if (bias) {
    check_dim(op, "bias", *bias, 1, "[sum(rows)]");
    check_dtype(op, "bias", *bias, {ScalarType::Float});
    check_same_device(op, "bias", *bias, x);
    STD_TORCH_CHECK(bias->is_contiguous() && bias->size(0) == plan.total_rows, op,
                    ": bias must be contiguous [", plan.total_rows, "], got shape ",
                    shape_str(*bias));
  }
  plan.out = new_empty(x, {input.rows, plan.total_rows}, ScalarType::Float);
  return plan;
}

struct QmmGluPlan {
  MatmulInput x;
  int64_t up_offset;  // bytes
  Tensor out;         // float32 [x.rows, rows] or packed
};

inline QmmGluPlan plan_qmm_glu(const Tensor& x, const Tensor& weight,
                               const std::vector<int64_t>& types, int64_t rows, int64_t columns,
                               int64_t act_mode, SegmentBytes segment_bytes) {
  constexpr const char* op = "dflash::qmm_glu";
  const MatmulInput input = check_matmul_input(op, x, weight, columns);
  STD_TORCH_CHECK(types.size() == 2, op, ": types must be those of gate and up, got ", types.size(),
                  " types");
  check_weight_rows(op, rows, columns);
  for (int64_t type : types) quant_of(op, type, columns);
  const int64_t up_offset = segment_bytes(types[0], rows, columns);
  check_weight(op, weight, up_offset + segment_bytes(types[1], rows, columns));
  return {input, up_offset, new_activations(op, x, input.rows, rows, act_mode)};
}

}  // namespace dflash
