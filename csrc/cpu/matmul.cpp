#include "host/matmul.h"

#include <torch/csrc/stable/library.h>

#include <memory>

#include "cpu/graph.h"
#include "cpu/isa.h"
#include "cpu/matmul_kernel.h"
#include "host/tiles.h"

namespace dflash::cpu {
namespace {

// Working memory of one operator call, kept by its thread: a decode step makes dozens of calls.
class Scratch {
 public:
  float* take(int64_t floats) {
    if (floats > size_) {
      data_.reset();  // first, so that both are never held
      data_.reset(new float[size_t(floats)]);
      size_ = floats;
    }
    return data_.get();
  }
  // A prefill may have asked for much; what a decode step needs stays.
  void release() {
    if (size_ > (1 << 20)) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  std::unique_ptr<float[]> data_;
  int64_t size_ = 0;
};

thread_local Scratch scratch;

struct ScratchUse {
  ~ScratchUse() { scratch.release(); }
};

MatmulSegment segment(int64_t type, int64_t rows, const uint8_t* weight) {
  return {int32_t(type), dispatch_tile(type, []<class F>() {}), rows, weight};
}

// x as the kernels read it; `spare` has room for its values if a segment reads floats.
MatmulRows matmul_rows(const Tensor& x, const MatmulInput& input, int64_t columns, float* spare) {
  const void* data = x.const_data_ptr();
  if (input.act_mode == 0)
    return {input.rows, columns, 0, nullptr, static_cast<const float*>(data)};
  if (spare)
    (isa() == Isa::kAvx512 ? avx512::unpack_activations : avx2::unpack_activations)(
        data, input.act_mode, input.rows, columns, spare);
  return {input.rows, columns, input.act_mode, data, spare};
}

}  // namespace

Tensor qmm(const Tensor& x, const Tensor& weight, std::vector<int64_t> types,
           std::vector<int64_t> rows, int64_t columns, std::optional<Tensor> bias) {
  const auto plan = plan_qmm(x, weight, types, rows, columns, bias, &repacked_bytes);
  if (plan.x.rows == 0) return plan.out;
  const auto* bytes = static_cast<const uint8_t*>(weight.const_data_ptr());
  std::vector<MatmulSegment> segments;
  segments.reserve(types.size());
  bool floats = false;
  for (size_t s = 0; s < types.size(); ++s) {
    segments.push_back(segment(types[s], rows[s], bytes + plan.byte_offsets[s]));
    floats |= !segments.back().tiled;
  }
  const ScratchUse use;
  float* spare = plan.x.act_mode != 0 && floats ? scratch.take(plan.x.rows * columns) : nullptr;
  const MatmulCall call{
      matmul_rows(x, plan.x, columns, spare),
      segments.data(),
      int(segments.size()),
      bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
      static_cast<float*>(plan.out.mutable_data_ptr()),
      plan.total_rows,
  };
  (isa() == Isa::kAvx512 ? avx512::qmm : avx2::qmm)(call);
  return plan.out;
}

Tensor qmm_glu(const Tensor& x, const Tensor& weight, std::vector<int64_t> types, int64_t rows,
               int64_t columns, int64_t act_mode) {
  const auto plan = plan_qmm_glu(x, weight, types, rows, columns, act_mode, &repacked_bytes);
  if (plan.x.rows == 0) return plan.out;
  const auto* bytes = static_cast<const uint8_t*>(weight.const_data_ptr());
  const MatmulSegment gate = segment(types[0], rows, bytes);
  const MatmulSegment up = segment(types[1], rows, bytes + plan.up_offset);
  const bool pack = act_mode != 0, floats = plan.x.act_mode != 0 && !(gate.tiled && up.tiled);
  const int64_t n = plan.x.rows, outputs = n * rows, groups = ceil_div<int64_t>(rows, kActGroup);
  const ScratchUse use;
  float* work = scratch.take(outputs * (pack ? 2 : 1) + groups + (floats ? n * columns : 0));
  float* countdown = work + outputs;
  float* gate_out = countdown + groups;
  float* spare = gate_out + (pack ? outputs : 0);
  const MatmulGluCall call{
      matmul_rows(x, plan.x, columns, floats ? spare : nullptr),
      gate,
      up,
      pack ? gate_out : static_cast<float*>(plan.out.mutable_data_ptr()),
      work,
      pack ? static_cast<uint8_t*>(plan.out.mutable_data_ptr()) : nullptr,
      act_mode,
      reinterpret_cast<int32_t*>(countdown),
  };
  (isa() == Isa::kAvx512 ? avx512::qmm_glu : avx2::qmm_glu)(call);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("qmm", TORCH_BOX(&Recorded<&qmm>::call));
  m.impl("qmm_glu", TORCH_BOX(&Recorded<&qmm_glu>::call));
}

}  // namespace dflash::cpu
