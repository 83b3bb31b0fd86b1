// Operators that other operators of this backend are made of.
#pragma once
#include <optional>
#include <vector>

#include "host/check.h"

namespace dflash::cuda {

Tensor embed_rows(const Tensor& packed, int64_t ggml_type, const Tensor& ids, double scale);
Tensor quant_act(const Tensor& x, int64_t act_mode);
Tensor qmm(const Tensor& x, const Tensor& weight, std::vector<int64_t> types,
           std::vector<int64_t> rows, int64_t columns, std::optional<Tensor> bias);

}  // namespace dflash::cuda
