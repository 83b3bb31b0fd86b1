// A drafter's choice of one token, with errors that say where.
#pragma once
#include <cmath>
#include <vector>

#include "core/sampling.h"
#include "cpu/sampling.h"
#include "host/check.h"

namespace dflash::cpu {

inline void check_temperature(const char* op, float temperature, int64_t row) {
  STD_TORCH_CHECK(temperature >= 0.f && std::isfinite(temperature), op,
                  ": temperature must be finite and >= 0, got ", temperature, " in row ", row);
}

inline void check_uniform(const char* op, const char* arg, float u, int64_t row) {
  STD_TORCH_CHECK(u >= 0.f && u < 1.f, op, ": ", arg, " must be in [0, 1), got ", u, " in row ",
                  row);
}

class Drawer {
 public:
  Drawer(const char* op, int64_t count)
      : op_(op), count_(count), sums_(size_t(ceil_div<int64_t>(count, kDrawChunk))) {}

  // The index of one of `scores` [count]: the first largest at temperature 0 (`u` is not read),
  // else drawn from softmax(scores / temperature). q [count] is that distribution; null with
  // temperature 0 alone.
  int64_t choose(const float* scores, float temperature, float u, float* q, int64_t sequence,
                 int64_t slot) {
    const SamplingKernels& kernels = sampling_kernels();
    const RowStatus status =
        q ? kernels.probs(scores, count_, temperature, 0, 1.f, q) : kernels.check(scores, count_);
    STD_TORCH_CHECK(status != RowStatus::kNotFinite, op_,
                    ": scores must be finite or -inf, got NaN or +inf in sequence ", sequence,
                    ", slot ", slot);
    STD_TORCH_CHECK(status != RowStatus::kAllMinusInfinity, op_,
                    ": scores must allow at least one token, got -inf everywhere in sequence ",
                    sequence, ", slot ", slot);
    if (temperature == 0.f) return kernels.arg_max(scores, count_);
    check_uniform(op_, "uniform", u, sequence);
    const int64_t id = kernels.draw(q, count_, u, sums_.data());
    STD_TORCH_CHECK(id >= 0, op_, ": no token can be drawn in sequence ", sequence, ", slot ",
                    slot);
    return id;
  }

 private:
  const char* op_;
  int64_t count_;
  std::vector<float> sums_;
};

}  // namespace dflash::cpu
