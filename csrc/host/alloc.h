// A new tensor through libtorch's C shim: half the cost of a boxed call of aten::new_empty, and a
// decode step allocates sixty times.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <array>
#include <initializer_list>
#include <vector>

namespace dflash {

// Tensors that one operator call made, in order; once `recorded`, it is given the same ones again.
struct Allocations {
  std::vector<torch::stable::Tensor> tensors;
  size_t next = 0;
  bool recorded = false;
};

inline thread_local Allocations* allocations = nullptr;  // of the call that runs, if it is recorded

// Contiguous, uninitialised, on the device of `like`; at most 8 dimensions.
inline torch::stable::Tensor new_empty(const torch::stable::Tensor& like,
                                       torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                       torch::headeronly::ScalarType dtype) {
  if (allocations && allocations->recorded) return allocations->tensors.at(allocations->next++);
  std::array<int64_t, 8> strides;
  const auto dims = int64_t(sizes.size());
  STD_TORCH_CHECK(dims <= int64_t(strides.size()), "dflash: a tensor of ", dims, " dimensions");
  int64_t stride = 1;
  for (int64_t d = dims; d-- > 0; stride *= sizes[size_t(d)] > 0 ? sizes[size_t(d)] : 1)
    strides[size_t(d)] = stride;
  const auto device = like.device();
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(),
                                                  int32_t(dtype), int32_t(device.type()),
                                                  int32_t(device.index()), &handle));
  torch::stable::Tensor made(handle);
  if (allocations) allocations->tensors.push_back(made);
  return made;
}

}  // namespace dflash
