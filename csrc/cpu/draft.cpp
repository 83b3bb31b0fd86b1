#include "cpu/draft.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <vector>

#include "core/draft.h"
#include "core/sampling.h"
#include "cpu/dequantize.h"
#include "cpu/draw.h"
#include "cpu/graph.h"
#include "cpu/parallel.h"
#include "host/draft.h"

namespace dflash::cpu {

Tensor grouped_conv(const Tensor& x, const Tensor& coef, const Tensor& base, int64_t side,
                    const Tensor& cu_seqlens, int64_t act_mode) {
  constexpr const char* op = "dflash::grouped_conv";
  GroupedConvPlan plan = plan_grouped_conv(x, coef, base, side, cu_seqlens, act_mode);
  const int32_t* offsets = cu_seqlens.const_data_ptr<int32_t>();
  bool rising = offsets[0] == 0 && offsets[plan.sequences] == plan.rows;
  for (int64_t s = 0; s < plan.sequences; ++s) rising = rising && offsets[s] <= offsets[s + 1];
  STD_TORCH_CHECK(rising, op, ": cu_seqlens must rise from 0 to the ", plan.rows,
                  " rows of x, got ", offsets[0], " .. ", offsets[plan.sequences]);
  const GroupedConvCall call = {
      plan.rows,
      plan.columns,
      plan.taps,
      plan.groups,
      x.const_data_ptr<float>(),
      coef.const_data_ptr<float>() + side * plan.taps * plan.groups,
      base.const_data_ptr<float>() + side * plan.taps * plan.columns,
      offsets,
      act_mode == 0 ? plan.out.mutable_data_ptr<float>() : nullptr,
      act_mode == 0 ? nullptr : static_cast<uint8_t*>(plan.out.mutable_data_ptr()),
      act_mode,
  };
  if (plan.rows > 0) draft_kernels().grouped_conv(call);
  return plan.out;
}

namespace {

constexpr const char* kWalk = "dflash::selector_walk";

// A codebook's rows as floats.
struct Codebook {
  const uint8_t* packed;
  int64_t type, row_bytes, rank;

  void row(int64_t id, float* out) const { decode_row(type, packed + id * row_bytes, rank, out); }
};

// One sequence of `selector_walk`.
struct Walk {
  const int64_t* ids;   // [N, K]
  const float* scores;  // [N, K]
  const float* hidden;  // [N, R]
  int64_t anchor;
  Codebook predecessor, successor;
  float temperature;
  const float* uniform;  // [N]
  int64_t slots, candidates, vocab, sequence;

  void check_id(const char* arg, int64_t id) const {
    STD_TORCH_CHECK(id >= 0 && id < vocab, kWalk, ": ", arg, " must be rows of the codebooks, [0, ",
                    vocab, "), got ", id, " in sequence ", sequence);
  }

  // tokens[N], q[N, K]
  void run(int64_t* tokens, float* q) const {
    const int64_t K = candidates, R = predecessor.rank;
    const DraftKernels& kernels = draft_kernels();
    const size_t rank = size_t(R);
    std::vector<float> met(rank), candidate(rank), score(static_cast<size_t>(K));
    Drawer drawer(kWalk, K);
    int64_t previous = anchor;
    check_id("anchor", previous);
    for (int64_t j = 0; j < slots; ++j) {
      predecessor.row(previous, met.data());
      for (int64_t r = 0; r < R; ++r) met[r] = mul(met[r], hidden[j * R + r]);
      for (int64_t k = 0; k < K; ++k) {
        check_id("ids", ids[j * K + k]);
        successor.row(ids[j * K + k], candidate.data());
        score[k] = edge_score(scores[j * K + k], kernels.dot(met.data(), candidate.data(), R));
      }
      const int64_t chosen =
          drawer.choose(score.data(), temperature, uniform[j], q + j * K, sequence, j);
      previous = ids[j * K + chosen];
      tokens[j] = previous;
    }
  }
};

}  // namespace

std::tuple<Tensor, Tensor> selector_walk(const Tensor& ids, const Tensor& scores,
                                         const Tensor& hidden, const Tensor& anchor,
                                         const Tensor& predecessor, int64_t predecessor_type,
                                         const Tensor& successor, int64_t successor_type,
                                         const Tensor& temperature, const Tensor& uniform) {
  SelectorPlan plan = plan_selector_walk(ids, scores, hidden, anchor, predecessor, predecessor_type,
                                         successor, successor_type, temperature, uniform);
  const int64_t N = plan.slots, K = plan.candidates, R = plan.rank;
  const Codebook before = {predecessor.const_data_ptr<uint8_t>(), predecessor_type,
                           plan.predecessor_bytes, R};
  const Codebook after = {successor.const_data_ptr<uint8_t>(), successor_type, plan.successor_bytes,
                          R};
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const float* score = scores.const_data_ptr<float>();
  const float* g = hidden.const_data_ptr<float>();
  const int64_t* first = anchor.const_data_ptr<int64_t>();
  const float* t = temperature.const_data_ptr<float>();
  const float* u = uniform.const_data_ptr<float>();
  int64_t* tokens = plan.tokens.mutable_data_ptr<int64_t>();
  float* q = plan.q.mutable_data_ptr<float>();
  for (int64_t s = 0; s < plan.sequences; ++s) check_temperature(kWalk, t[s], s);
  parallel_for(plan.sequences, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const Walk walk = {id + s * N * K,
                         score + s * N * K,
                         g + s * N * R,
                         first[s],
                         before,
                         after,
                         t[s],
                         u + s * N,
                         N,
                         K,
                         plan.vocab,
                         s};
      walk.run(tokens + s * N, q + s * N * K);
    }
  });
  return {plan.tokens, plan.q};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("grouped_conv", TORCH_BOX(&Recorded<&grouped_conv>::call));
  m.impl("selector_walk", TORCH_BOX(&Recorded<&selector_walk>::call));
}

}  // namespace dflash::cpu
