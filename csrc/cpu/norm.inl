#include <cstring>

#include "core/gdn_args.h"
#include "core/norm.h"
#include "cpu/act.h"
#include "cpu/convert.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

// residual += x, rounded to R; returns the sum of squares of what is stored.
template <class R>
float add_row(const NormArgs& args, int64_t row) {
  alignas(64) float sum[kLeaf], addend[kLeaf];
  R* residual = static_cast<R*>(args.residual) + row * args.columns;
  Tree<float> tree;
  for (int64_t c = 0; c < args.columns; c += kLeaf) {
    const int64_t n = std::min<int64_t>(kLeaf, args.columns - c);
    const float* values = as_float(residual, args.residual_type, c, n, sum);
    if (args.x.data) {
      const float* x = as_float(args.x.data, args.x.type, row * args.x.stride + c, n, addend);
      for (int64_t i = 0; i < n; ++i) sum[i] = values[i] + x[i];
      int64_t i = 0;
      for (; i + 16 <= n; i += 16) {
        const F32x16 rounded = stored<R>(load(sum + i));
        store(residual + c + i, rounded);
        store(sum + i, rounded);
      }
      for (; i < n; ++i) {
        store_float(residual + c + i, sum[i]);
        sum[i] = to_float(residual[c + i]);
      }
      values = sum;
    }
    if (args.capture)
      std::memcpy(static_cast<R*>(args.capture) + row * args.capture_stride + c, residual + c,
                  size_t(n) * sizeof(R));
    tree.push(dot_leaf(values, values, n));
  }
  return tree.join();
}

template <class R>
void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  static_assert(kLeaf % kActGroup == 0);
  const int64_t row_bytes = args.packed ? packed_bytes(args.columns, args.act_mode) : 0;
  alignas(64) float value[kLeaf], weight[kLeaf], unpacked[kLeaf];
  for (int64_t row = begin; row < end; ++row) {
    const float scale = rms_scale(add_row<R>(args, row), args.columns, args.eps);
    const R* residual = static_cast<const R*>(args.residual) + row * args.columns;
    for (int64_t c = 0; c < args.columns; c += kLeaf) {
      const int64_t n = std::min<int64_t>(kLeaf, args.columns - c);
      const float* values = as_float(residual, args.residual_type, c, n, value);
      const float* weights = as_float(args.weight, args.weight_type, c, n, weight);
      float* y = args.out ? args.out + row * args.columns + c : unpacked;
      if (args.plus_one)
        for (int64_t i = 0; i < n; ++i) y[i] = normed(values[i], scale, 1.f + weights[i]);
      else
        for (int64_t i = 0; i < n; ++i) y[i] = normed(values[i], scale, weights[i]);
      if (args.packed)
        quantize_row(y, n, args.act_mode,
                     args.packed + row * row_bytes + packed_bytes(c, args.act_mode));
    }
  }
}

}  // namespace

void add_rms_norm(const NormArgs& args) {
  const int64_t grain = std::max<int64_t>(1, 16384 / args.columns);
  parallel_for(args.rows, grain, [&](int64_t begin, int64_t end) {
    if (args.residual_type == FloatType::kF32)
      norm_rows<float>(args, begin, end);
    else if (args.residual_type == FloatType::kF16)
      norm_rows<Half>(args, begin, end);
    else
      norm_rows<Bf16>(args, begin, end);
  });
}

}  // namespace dflash::cpu::DFLASH_ISA
