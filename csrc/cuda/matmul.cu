#include "gpu/matmul.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/act.cuh"
#include "host/matmul.h"
#include "host/tiles.h"

namespace dflash::cuda {
namespace {

void check(cudaError_t error, const char* op) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// Rows of GGUF bytes times m.count rows of activations.
void multiply(int64_t type, gpu::MatmulView m, const Tensor& on) {
  const Launch launch(on, m.rows * kLanes);
  const int64_t tiles = ceil_div<int64_t>(m.count, gpu::kMatmulRows);
  STD_TORCH_CHECK(tiles <= 65535, "dflash::qmm: x must have at most ", 65535 * gpu::kMatmulRows,
                  " rows, got ", m.count);
  const dim3 grid(launch.grid, unsigned(tiles));
  dispatch_format(type, [&]<class F>() {
    m.row_bytes = m.columns / F::kElems * F::kBytes;
    if constexpr (gpu::Scales<F>::kIntegers) {
      if (m.packed)
        return with_group(m.act_mode, [&]<class Group>() {
          gpu::qmm_integers<F, Group><<<grid, launch.threads, 0, launch.stream>>>(m);
        });
    }
    gpu::qmm_floats<F><<<grid, launch.threads, 0, launch.stream>>>(m);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

gpu::MatmulView view_of(const Tensor& x, const MatmulInput& input, int64_t columns) {
  gpu::MatmulView m{};
  m.act_mode = input.act_mode;
  if (m.act_mode != 0)
    m.packed = x.const_data_ptr();
  else
    m.floats = x.const_data_ptr<float>();
  m.count = input.rows;
  m.columns = columns;
  return m;
}

}  // namespace

// GGUF's rows, filled up with zeros to the size of the CPU's layout.
Tensor repack(const Tensor& packed, int64_t ggml_type, int64_t columns) {
  const RepackPlan plan = plan_repack(packed, ggml_type, columns);
  const int64_t bytes = cpu::repacked_bytes(ggml_type, plan.rows, columns);
  const int64_t used = plan.rows * plan.row_bytes;
  Tensor out = new_empty(packed, {bytes}, ScalarType::Byte);
  const Launch launch(packed, 1);
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  check(cudaMemcpyAsync(to, packed.const_data_ptr(), size_t(used), cudaMemcpyDeviceToDevice,
                        launch.stream),
        "dflash::repack");
  check(cudaMemsetAsync(to + used, 0, size_t(bytes - used), launch.stream), "dflash::repack");
  return out;
}

Tensor unpack(const Tensor& weight, int64_t ggml_type, int64_t rows, int64_t columns) {
  constexpr const char* op = "dflash::unpack";
  const QuantGeometry quant = quant_of(op, ggml_type, columns);
  check_weight_rows(op, rows, columns, 0);
  check_weight(op, weight, cpu::repacked_bytes(ggml_type, rows, columns));
  const int64_t row_bytes = columns / quant.elems * quant.bytes;
  Tensor out = new_empty(weight, {rows, row_bytes}, ScalarType::Byte);
  const Launch launch(weight, 1);
  check(cudaMemcpyAsync(out.mutable_data_ptr(), weight.const_data_ptr(), size_t(rows * row_bytes),
                        cudaMemcpyDeviceToDevice, launch.stream),
        op);
  return out;
}

Tensor qmm(const Tensor& x, const Tensor& weight, std::vector<int64_t> types,
           std::vector<int64_t> rows, int64_t columns, std::optional<Tensor> bias) {
  QmmPlan plan = plan_qmm(x, weight, types, rows, columns, bias, &cpu::repacked_bytes);
  if (plan.x.rows == 0) return plan.out;
  gpu::MatmulView m = view_of(x, plan.x, columns);
  m.out = plan.out.mutable_data_ptr<float>();
  m.out_stride = plan.total_rows;
  m.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  for (size_t s = 0; s < types.size(); ++s) {
    m.weight = weight.const_data_ptr<uint8_t>() + plan.byte_offsets[s];
    m.rows = rows[s];
    multiply(types[s], m, x);
    m.out += rows[s];
    if (m.bias) m.bias += rows[s];
  }
  return plan.out;
}

Tensor qmm_glu(const Tensor& x, const Tensor& weight, std::vector<int64_t> types, int64_t rows,
               int64_t columns, int64_t act_mode) {
  QmmGluPlan plan = plan_qmm_glu(x, weight, types, rows, columns, act_mode, &cpu::repacked_bytes);
  const int64_t n = plan.x.rows;
  if (n == 0) return plan.out;
  Tensor gate = new_empty(x, {n, rows}, ScalarType::Float);
  Tensor up = new_empty(x, {n, rows}, ScalarType::Float);
  Tensor product = float_rows_of(plan.out, n, rows, act_mode);
  gpu::MatmulView m = view_of(x, plan.x, columns);
  m.rows = m.out_stride = rows;
  m.weight = weight.const_data_ptr<uint8_t>();
  m.out = gate.mutable_data_ptr<float>();
  multiply(types[0], m, x);
  m.weight += plan.up_offset;
  m.out = up.mutable_data_ptr<float>();
  multiply(types[1], m, x);
  const Launch launch(x, n * rows);
  gpu::silu_times<<<launch.grid, launch.threads, 0, launch.stream>>>(
      gate.const_data_ptr<float>(), up.const_data_ptr<float>(), product.mutable_data_ptr<float>(),
      n * rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_activations(product, n, rows, act_mode, plan.out);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("repack", TORCH_BOX(&repack));
  m.impl("unpack", TORCH_BOX(&unpack));
  m.impl("qmm", TORCH_BOX(&qmm));
  m.impl("qmm_glu", TORCH_BOX(&qmm_glu));
}

}  // namespace dflash::cuda
