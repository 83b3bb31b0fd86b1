#include "cpu/head.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <tuple>
#include <vector>

#include "core/hd.h"
#include "core/topk.h"
#include "cpu/graph.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "host/head.h"

namespace dflash::cpu {
namespace {

constexpr int64_t kSegment = 16384;  // columns a thread searches at a time
constexpr int64_t kHeapK = 256;      // above it, sorting beats a heap

void report_nan(const TopkPlan& plan, const TopkArgs& args, int64_t row) {
  if (row == plan.rows) return;
  int64_t column = 0;
  const float* logits = args.logits + row * plan.vocabulary;
  while (column + 1 < plan.vocabulary && logits[column] == logits[column]) ++column;
  STD_TORCH_CHECK(false, "dflash::head_topk: logits must not hold NaN, got one in row ", row,
                  ", column ", column);
}

// The first k of `keys`, descending, to row `row` of the outputs.
void emit(uint64_t* keys, int64_t count, int64_t k, int64_t row, float* values, int64_t* ids) {
  if (count > k) std::nth_element(keys, keys + k - 1, keys + count, std::greater<>());
  std::sort(keys, keys + k, std::greater<>());
  for (int64_t i = 0; i < k; ++i) {
    values[row * k + i] = rank_value(keys[i]);
    ids[row * k + i] = rank_id(keys[i]);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> head_topk(const Tensor& logits, int64_t k, double multiplier,
                                     double softcap) {
  TopkPlan plan = plan_head_topk(logits, k, multiplier, softcap);
  const TopkArgs args{logits.const_data_ptr<float>(), plan.vocabulary, plan.multiplier,
                      plan.softcap};
  float* values = plan.values.mutable_data_ptr<float>();
  int64_t* ids = plan.ids.mutable_data_ptr<int64_t>();
  const bool wide = isa() == Isa::kAvx512;
  std::atomic<int64_t> bad_row{plan.rows};  // the lowest row with a NaN
  const auto found_nan = [&](int64_t row) {
    int64_t seen = bad_row.load();
    while (row < seen && !bad_row.compare_exchange_weak(seen, row)) {
    }
  };

  if (k > kHeapK) {
    parallel_for(plan.rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<uint64_t> keys(static_cast<size_t>(plan.vocabulary));
      for (int64_t row = begin; row < end; ++row) {
        if ((wide ? avx512::topk_keys : avx2::topk_keys)(args, row, 0, plan.vocabulary,
                                                         keys.data()))
          emit(keys.data(), plan.vocabulary, k, row, values, ids);
        else
          found_nan(row);
      }
    });
    report_nan(plan, args, bad_row);
    return {plan.values, plan.ids};
  }

  const int64_t segments = ceil_div(plan.vocabulary, kSegment);
  const int64_t last = std::min(k, plan.vocabulary - (segments - 1) * kSegment);
  const int64_t per_row = (segments - 1) * k + last;  // kHeapK <= kSegment: only the last is short
  std::vector<uint64_t> best(size_t(plan.rows * per_row));
  const int64_t grain = std::max<int64_t>(1, kSegment / std::min(kSegment, plan.vocabulary));
  parallel_for(plan.rows * segments, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = n / segments, segment = n % segments;
      const int64_t from = segment * kSegment, to = std::min(from + kSegment, plan.vocabulary);
      if (!(wide ? avx512::topk_best : avx2::topk_best)(args, row, from, to, std::min(k, to - from),
                                                        best.data() + row * per_row + segment * k))
        found_nan(row);
    }
  });
  report_nan(plan, args, bad_row);
  for (int64_t row = 0; row < plan.rows; ++row)
    emit(best.data() + row * per_row, per_row, k, row, values, ids);
  return {plan.values, plan.ids};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("head_topk", TORCH_BOX(&Recorded<&head_topk>::call));
}

}  // namespace dflash::cpu
