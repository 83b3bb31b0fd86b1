// Tensors -> the torch-free arguments of a kernel.
#pragma once
#include <optional>

#include "core/float_type.h"
#include "host/check.h"
#include "host/dispatch.h"

namespace dflash {

using OptionalTensor = std::optional<Tensor>;

// [rows, columns] of any float type, row stride free.
inline FloatRows float_rows(const char* op, const char* arg, const Tensor& t, const char* layout,
                            int64_t rows, int64_t columns, const Tensor& like) {
  check_same_device(op, arg, t, like);
  check_shape(op, arg, t, {rows, columns}, layout);
  check_dtype(op, arg, t, kFloatTypes);
  check_dense(op, arg, t, 1);
  return {t.const_data_ptr(), t.stride(0), float_type(t)};
}

inline const float* float_data(const char* op, const char* arg, const Tensor& t, const char* layout,
                               std::initializer_list<int64_t> sizes, const Tensor& like) {
  check_tensor(op, arg, t, sizes, layout, {ScalarType::Float}, like);
  return t.const_data_ptr<float>();
}

inline const int32_t* int_data(const char* op, const char* arg, const Tensor& t, const char* layout,
                               std::initializer_list<int64_t> sizes, const Tensor& like) {
  check_tensor(op, arg, t, sizes, layout, {ScalarType::Int}, like);
  return t.const_data_ptr<int32_t>();
}

// [sequences + 1]
inline int64_t count_sequences(const char* op, const Tensor& cu_seqlens) {
  check_dim(op, "cu_seqlens", cu_seqlens, 1, "[sequences + 1]");
  STD_TORCH_CHECK(cu_seqlens.size(0) > 0, op,
                  ": cu_seqlens must be [sequences + 1], got shape [0]");
  return cu_seqlens.size(0) - 1;
}

// The rest needs the values, so only the CPU can ask; a GPU kernel answers with NaN rows.
inline void check_offsets(const char* op, const int32_t* cu_seqlens, int64_t sequences,
                          int64_t rows) {
  STD_TORCH_CHECK(cu_seqlens[0] == 0, op, ": cu_seqlens must start at 0, got ", cu_seqlens[0]);
  for (int64_t s = 0; s < sequences; ++s)
    STD_TORCH_CHECK(cu_seqlens[s] <= cu_seqlens[s + 1] && cu_seqlens[s + 1] <= rows, op,
                    ": cu_seqlens must ascend to at most ", rows, " rows, got ", cu_seqlens[s + 1],
                    " after ", cu_seqlens[s]);
}

// low <= value[i] < limit; low 0 and below is any value below limit.
inline void check_values(const char* op, const char* arg, const int32_t* values, int64_t count,
                         int64_t limit, const char* wanted) {
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(values[i] < limit, op, ": ", arg, " must be ", wanted, " ", limit, ", got ",
                    values[i], " at ", i);
}

}  // namespace dflash
