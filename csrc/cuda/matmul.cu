#include "gpu/matmul.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.cuh"
#include "cuda/qmm.h"
#include "cuda/repack.cuh"
#include "host/matmul.h"
#include "host/tiles.h"

namespace dflash::cuda {
namespace {

// body.operator()<F>() if weights of the type and width are tiles here; else false.
template <class Body>
bool dispatch_tiled(int64_t type, int64_t columns, Body&& body) {
  bool tiled = false;
  if (columns % kTileColumns == 0)
    dispatch_format(type, [&]<class F>() {
      if constexpr (Tile<F>::kIsTiled) {
        tiled = true;
        body.template operator()<F>();
      }
    });
  return tiled;
}

int tile_bytes(int64_t type, int64_t columns) {
  int bytes = 0;
  dispatch_tiled(type, columns, [&]<class F>() { bytes = Tile<F>::kBytes; });
  return bytes;
}

void unpack_rows(int64_t type, const uint8_t* weight, uint8_t* out, int64_t rows, int64_t columns,
                 const Tensor& on) {
  const QuantGeometry quant = quant_of("dflash::unpack", type, columns);
  const int64_t row_bytes = columns / quant.elems * quant.bytes;
  const int64_t tiles = columns / kTileColumns;
  const Launch launch(on, ceil_div<int64_t>(rows, kTileRows) * tiles * kLanes);
  const bool tiled = dispatch_tiled(type, columns, [&]<class F>() {
    launch.zero(out, rows * row_bytes);
    unpack_tiles<F><<<launch.grid, launch.threads, 0, launch.stream>>>(weight, out, rows, tiles);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  if (!tiled)
    STD_CUDA_CHECK(cudaMemcpyAsync(out, weight, size_t(rows * row_bytes), cudaMemcpyDeviceToDevice,
                                   launch.stream));
}

// Rows of GGUF bytes times all rows of activations, by the portable kernels.
void multiply_rows(int64_t type, gpu::MatmulView m, const Tensor& on) {
  Tensor unpacked = new_empty(on, {0}, ScalarType::Byte);
  if (tile_bytes(type, m.columns) != 0) {
    const QuantGeometry quant = quant_of("dflash::qmm", type, m.columns);
    unpacked = new_empty(on, {m.rows * (m.columns / quant.elems) * quant.bytes}, ScalarType::Byte);
    auto* rows = static_cast<uint8_t*>(unpacked.mutable_data_ptr());
    unpack_rows(type, m.weight, rows, m.rows, m.columns, on);
    m.weight = rows;
  }
  const Launch launch(on, m.rows * kLanes);
  const int64_t blocks = ceil_div<int64_t>(m.count, gpu::kMatmulRows);
  STD_TORCH_CHECK(blocks <= 65535, "dflash::qmm: x must have at most ", 65535 * gpu::kMatmulRows,
                  " rows, got ", m.count);
  const dim3 grid(launch.grid, unsigned(blocks));
  dispatch_format(type, [&]<class F>() {
    m.row_bytes = m.columns / F::kElems * F::kBytes;
    if constexpr (gpu::Scales<F>::kIntegers) {
      if (m.packed)
        return gpu::with_gpu_group(m.act_mode, [&]<class Group>() {
          gpu::qmm_integers<F, Group><<<grid, launch.threads, 0, launch.stream>>>(m);
        });
    }
    gpu::qmm_floats<F><<<grid, launch.threads, 0, launch.stream>>>(m);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

QmmDevice device_of(const Tensor& on) {
  QmmDevice d{};
  const int device = on.get_device_index();
  STD_CUDA_CHECK(
      cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  STD_CUDA_CHECK(
      cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  d.clusters = has_sm90();
  return d;
}

// All of m's segments times m.count rows in one launch; false if shared memory is too small for
// that many.
bool multiply_tiles(QmmArgs m, const QmmDevice& device, const Tensor& on) {
  const Launch launch(on, 1);
  const QmmLaunch plan = plan_launch(m, device);
  if (plan.groups == 0) return false;
  Tensor sums = new_empty(on, {plan.global_sums}, ScalarType::Float);
  m.sums = plan.global_sums > 0 ? sums.mutable_data_ptr<float>() : nullptr;
  with_groups(plan.groups, [&]<int kGroups>() {
    const auto kernel = qmm_tiles<kGroups, kQmmThreads<kGroups>>;
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, m.at.bytes));
    launch_cluster(kernel, unsigned(m.cluster), plan.grid, unsigned((m.warps + 1) * kLanes),
                   size_t(m.at.bytes), launch.stream, m);
  });
  return true;
}

struct Segments {
  const std::vector<int64_t>&types, &rows, &offsets;
};

// out [x.rows, sum of rows] = x W^T + bias.
void multiply(const Tensor& x, const MatmulInput& input, const Tensor& weight,
              const Segments& segments, int64_t columns, const float* bias, float* out,
              int64_t out_stride) {
  const auto* bytes = weight.const_data_ptr<uint8_t>();
  QmmArgs m{};
  const QmmDevice device = device_of(x);
  int64_t most = kMostTokens;
  const auto flush = [&] {
    for (int64_t first = 0; m.segments > 0 && first < input.rows;) {
      const int64_t left = input.rows - first;
      m.count = int(left < most ? left : most);
      m.x = static_cast<const uint8_t*>(x.const_data_ptr()) + first * m.x_stride;
      m.out = out + first * out_stride;
      if (multiply_tiles(m, device, x)) {
        first += m.count;
      } else {
        STD_TORCH_CHECK(m.count > kTokens, "dflash::qmm: the device has too little shared memory");
        most = m.count / 2;
      }
    }
    m.segments = 0;
  };
  m.tiles = int(columns / kTileColumns);
  m.x_stride = packed_bytes(columns, kActPlanes);
  m.out_stride = out_stride;
  m.bias = bias;
  int64_t column = 0;
  for (size_t s = 0; s < segments.types.size(); ++s) {
    const int64_t type = segments.types[s], rows = segments.rows[s];
    const int tile = input.act_mode == kActPlanes ? tile_bytes(type, columns) : 0;
    if (tile != 0) {
      m.segment[m.segments++] = {bytes + segments.offsets[s], int(type), int(rows), int(column),
                                 tile};
      if (m.segments == kMaxSegments) flush();
    } else {
      gpu::MatmulView v{};
      v.act_mode = input.act_mode;
      if (v.act_mode != 0)
        v.packed = x.const_data_ptr();
      else
        v.floats = x.const_data_ptr<float>();
      v.count = input.rows;
      v.columns = columns;
      v.weight = bytes + segments.offsets[s];
      v.rows = rows;
      v.bias = bias ? bias + column : nullptr;
      v.out = out + column;
      v.out_stride = out_stride;
      multiply_rows(type, v, x);
    }
    column += rows;
  }
  flush();
}

}  // namespace

Tensor repack(const Tensor& packed, int64_t ggml_type, int64_t columns) {
  const RepackPlan plan = plan_repack(packed, ggml_type, columns);
  const int64_t bytes = cpu::repacked_bytes(ggml_type, plan.rows, columns);
  Tensor out = new_empty(packed, {bytes}, ScalarType::Byte);
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto* from = packed.const_data_ptr<uint8_t>();
  const int64_t tiles = columns / kTileColumns;
  const Launch launch(packed, ceil_div<int64_t>(plan.rows, kTileRows) * tiles * kLanes);
  int64_t used = plan.rows * plan.row_bytes;
  const bool tiled = dispatch_tiled(ggml_type, columns, [&]<class F>() {
    used = ceil_div<int64_t>(plan.rows, kTileRows) * tiles * Tile<F>::kBytes;
    if (used > 0)
      pack_tiles<F><<<launch.grid, launch.threads, 0, launch.stream>>>(from, to, plan.rows, tiles);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  if (!tiled)
    STD_CUDA_CHECK(
        cudaMemcpyAsync(to, from, size_t(used), cudaMemcpyDeviceToDevice, launch.stream));
  launch.zero(to + used, bytes - used);
  return out;
}

Tensor unpack(const Tensor& weight, int64_t ggml_type, int64_t rows, int64_t columns) {
  constexpr const char* op = "dflash::unpack";
  const QuantGeometry quant = quant_of(op, ggml_type, columns);
  check_weight_rows(op, rows, columns, 0);
  check_weight(op, weight, cpu::repacked_bytes(ggml_type, rows, columns));
  Tensor out = new_empty(weight, {rows, columns / quant.elems * quant.bytes}, ScalarType::Byte);
  if (rows > 0)
    unpack_rows(ggml_type, weight.const_data_ptr<uint8_t>(),
                static_cast<uint8_t*>(out.mutable_data_ptr()), rows, columns, weight);
  return out;
}

Tensor qmm(const Tensor& x, const Tensor& weight, std::vector<int64_t> types,
           std::vector<int64_t> rows, int64_t columns, std::optional<Tensor> bias) {
  QmmPlan plan = plan_qmm(x, weight, types, rows, columns, bias, &cpu::repacked_bytes);
  if (plan.x.rows == 0) return plan.out;
  multiply(x, plan.x, weight, {types, rows, plan.byte_offsets}, columns,
           bias ? bias->const_data_ptr<float>() : nullptr, plan.out.mutable_data_ptr<float>(),
           plan.total_rows);
  return plan.out;
}

Tensor qmm_glu(const Tensor& x, const Tensor& weight, std::vector<int64_t> types, int64_t rows,
               int64_t columns, int64_t act_mode) {
  QmmGluPlan plan = plan_qmm_glu(x, weight, types, rows, columns, act_mode, &cpu::repacked_bytes);
  const int64_t n = plan.x.rows;
  if (n == 0) return plan.out;
  Tensor both = new_empty(x, {n, 2 * rows}, ScalarType::Float);
  const std::vector<int64_t> each = {rows, rows}, offsets = {0, plan.up_offset};
  multiply(x, plan.x, weight, {types, each, offsets}, columns, nullptr,
           both.mutable_data_ptr<float>(), 2 * rows);
  const float* from = both.const_data_ptr<float>();
  if (act_mode == 0) {
    const Launch launch(x, n * rows);
    launch_pdl(gpu::silu_times, launch.grid, launch.threads, 0, launch.stream, from,
               plan.out.mutable_data_ptr<float>(), n, rows);
  } else {
    const Launch launch(x, n * ceil_div<int64_t>(rows, kActGroup) * kLanes);
    gpu::with_gpu_group(act_mode, [&]<class Group>() {
      launch_pdl(gpu::silu_times_packed<Group>, launch.grid, launch.threads, 0, launch.stream, from,
                 static_cast<Group*>(plan.out.mutable_data_ptr()), n, rows);
    });
  }
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("repack", TORCH_BOX(&repack));
  m.impl("unpack", TORCH_BOX(&unpack));
  m.impl("qmm", TORCH_BOX(&qmm));
  m.impl("qmm_glu", TORCH_BOX(&qmm_glu));
}

}  // namespace dflash::cuda
