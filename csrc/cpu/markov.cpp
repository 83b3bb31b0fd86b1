#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "core/draft.h"
#include "cpu/dequantize.h"
#include "cpu/draft.h"
#include "cpu/draw.h"
#include "cpu/graph.h"
#include "cpu/matmul_kernel.h"
#include "cpu/parallel.h"
#include "host/draft.h"
#include "host/tiles.h"

namespace dflash::cpu {
namespace {

constexpr const char* kChain = "dflash::markov_chain";

bool is_float(int64_t type) {
  return type == F32::kType || type == F16::kType || type == BF16::kType;
}

// W x + b for one row x of every sequence: float32 activations with float weights, planes
// otherwise, the rule of every linear layer.
class Linear {
 public:
  Linear(int64_t sequences, int64_t rows, int64_t columns, int64_t type, const uint8_t* weight,
         const float* bias)
      : segment_{int32_t(type), dispatch_tile(type, []<class F>() {}), rows, weight},
        bias_(bias),
        columns_(columns),
        planes_(!is_float(type)),
        row_groups_(ceil_div<int64_t>(columns, kActGroup)) {
    if (!planes_) return;
    groups_.resize(size_t(sequences * row_groups_));
    if (!segment_.tiled) values_.resize(size_t(sequences * columns));
  }

  // x [sequences, columns] -> out [sequences, rows]
  void run(const float* x, int64_t sequences, float* out) {
    const bool wide = isa() == Isa::kAvx512;
    const DraftKernels& kernels = draft_kernels();
    for (int64_t s = 0; planes_ && s < sequences; ++s)
      kernels.quantize_row(x + s * columns_, columns_, kActPlanes,
                           reinterpret_cast<uint8_t*>(groups_.data() + s * row_groups_));
    if (!values_.empty())
      (wide ? avx512::unpack_activations : avx2::unpack_activations)(
          groups_.data(), kActPlanes, sequences, columns_, values_.data());
    const float* floats = !planes_ ? x : values_.empty() ? nullptr : values_.data();
    const MatmulCall call = {
        {sequences, columns_, planes_ ? kActPlanes : 0, planes_ ? groups_.data() : nullptr, floats},
        &segment_,
        1,
        bias_,
        out,
        segment_.rows,
    };
    (wide ? avx512::qmm : avx2::qmm)(call);
  }

 private:
  MatmulSegment segment_;
  const float* bias_;
  int64_t columns_;
  bool planes_;
  int64_t row_groups_;
  std::vector<ActGroup> groups_;  // [sequences, row_groups]
  std::vector<float> values_;     // [sequences, columns]: what types without tiles read
};

// What a gated or recurrent head puts in the place of the token's row.
class Joint {
 public:
  Joint(const MarkovPlan& plan, int64_t type, const uint8_t* weight, const float* bias)
      : plan_(plan),
        linear_(plan.sequences, plan.joint_rows, plan.joint_columns, type, weight, bias),
        features_(size_t(plan.sequences * plan.joint_columns)),
        mixed_(size_t(plan.sequences * plan.joint_rows)),
        state_(size_t(plan.sequences * plan.rank)) {}

  // e [sequences, rank], h: the slot's row of the first sequence -> out [sequences, rank]
  void run(const float* e, const float* h, float* out) {
    const int64_t S = plan_.sequences, R = plan_.rank, H = plan_.hidden;
    const bool gated = plan_.head == MarkovHead::kGated;
    for (int64_t s = 0; s < S; ++s) {
      float* to = features_.data() + s * plan_.joint_columns;
      const float* row = h + s * plan_.slots * H;
      if (gated) {
        std::copy_n(row, H, to);
        std::copy_n(e + s * R, R, to + H);
      } else {
        std::copy_n(state_.data() + s * R, R, to);
        std::copy_n(e + s * R, R, to + R);
        std::copy_n(row, H, to + 2 * R);
      }
    }
    linear_.run(features_.data(), S, mixed_.data());
    for (int64_t s = 0; s < S; ++s) {
      const float* mixed = mixed_.data() + s * plan_.joint_rows;
      float* state = state_.data() + s * R;
      for (int64_t r = 0; r < R; ++r) {
        if (gated) {
          out[s * R + r] = gated_row(mixed[r], e[s * R + r]);
        } else {
          state[r] = rnn_state(mixed[r], mixed[R + r], state[r]);
          out[s * R + r] = rnn_row(mixed[2 * R + r]);
        }
      }
    }
  }

 private:
  const MarkovPlan& plan_;
  Linear linear_;
  std::vector<float> features_, mixed_, state_;  // [sequences, joint columns | joint rows | rank]
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> markov_chain(
    const Tensor& base, const Tensor& hidden, const Tensor& anchor, const Tensor& w1,
    int64_t w1_type, const Tensor& w2, int64_t w2_type, std::optional<Tensor> confidence_weight,
    std::optional<Tensor> confidence_bias, double logit_scale, std::optional<Tensor> d2t,
    std::optional<Tensor> temperature, std::optional<Tensor> uniform, int64_t mask_id,
    int64_t draft_topk, int64_t head_type, std::optional<Tensor> joint, int64_t joint_type,
    std::optional<Tensor> joint_bias) {
  const MarkovPlan plan = plan_markov_chain(
      base, hidden, anchor, w1, w1_type, w2, w2_type, confidence_weight, confidence_bias, d2t,
      temperature, uniform, draft_topk, head_type, joint, joint_type, joint_bias, &repacked_bytes);
  const int64_t S = plan.sequences, N = plan.slots, Vd = plan.draft_vocab, R = plan.rank;
  const int64_t H = plan.hidden;
  const uint8_t* table = w1.const_data_ptr<uint8_t>();
  const float* base_data = base.const_data_ptr<float>();
  const float* hidden_data = hidden.const_data_ptr<float>();
  const int64_t* to_target = d2t ? d2t->const_data_ptr<int64_t>() : nullptr;
  const float* t = temperature ? temperature->const_data_ptr<float>() : nullptr;
  const float* u = uniform ? uniform->const_data_ptr<float>() : nullptr;
  const float* head = confidence_weight ? confidence_weight->const_data_ptr<float>() : nullptr;
  const float head_bias = confidence_bias ? *confidence_bias->const_data_ptr<float>() : 0.f;
  int64_t* tokens = plan.tokens.mutable_data_ptr<int64_t>();
  float* q = t ? plan.q.mutable_data_ptr<float>() : nullptr;
  float* scores = head ? plan.confidence.mutable_data_ptr<float>() : nullptr;
  for (int64_t s = 0; t && s < S; ++s) check_temperature(kChain, t[s], s);
  if (S == 0 || N == 0) return {plan.tokens, plan.q, plan.confidence};

  std::vector<int64_t> masked;  // columns that mean the mask token
  for (int64_t v = 0; to_target && v < Vd; ++v) {
    STD_TORCH_CHECK(to_target[v] >= 0 && to_target[v] < plan.vocab, kChain,
                    ": d2t must hold absolute target ids, [0, ", plan.vocab, "), got ",
                    to_target[v], " at ", v);
    if (to_target[v] == mask_id) masked.push_back(v);
  }
  if (!to_target && mask_id >= 0 && mask_id < Vd) masked.push_back(mask_id);

  const float scale = float(logit_scale);
  const SamplingKernels& sampling = sampling_kernels();
  const DraftKernels& kernels = draft_kernels();
  std::vector<int64_t> previous(anchor.const_data_ptr<int64_t>(),
                                anchor.const_data_ptr<int64_t>() + S);
  std::vector<float> embedded(static_cast<size_t>(S * R)), z(static_cast<size_t>(S * Vd));
  Linear bias(S, Vd, R, w2_type, w2.const_data_ptr<uint8_t>(), nullptr);
  std::optional<Joint> mix;
  std::vector<float> mixed(joint ? embedded.size() : 0);
  if (joint)
    mix.emplace(plan, joint_type, joint->const_data_ptr<uint8_t>(),
                joint_bias ? joint_bias->const_data_ptr<float>() : nullptr);
  for (int64_t j = 0; j < N; ++j) {
    for (int64_t s = 0; s < S; ++s) {
      STD_TORCH_CHECK(previous[s] >= 0 && previous[s] < plan.vocab, kChain,
                      ": anchor must be rows of w1, [0, ", plan.vocab, "), got ", previous[s],
                      " in sequence ", s);
      decode_row(w1_type, table + previous[s] * plan.w1_bytes, R, embedded.data() + s * R);
    }
    if (mix) mix->run(embedded.data(), hidden_data + j * H, mixed.data());
    bias.run(mix ? mixed.data() : embedded.data(), S, z.data());
    parallel_for(S, 1, [&](int64_t begin, int64_t end) {
      Drawer drawer(kChain, Vd);
      std::vector<float> features(static_cast<size_t>(H + R));
      for (int64_t s = begin; s < end; ++s) {
        const int64_t slot = s * N + j;
        const float* row = base_data + slot * Vd;
        const float* e = embedded.data() + s * R;
        float* logits = z.data() + s * Vd;
        for (int64_t v = 0; v < Vd; ++v) logits[v] = markov_logit(row[v], scale, logits[v]);
        constexpr float kNever = -std::numeric_limits<float>::infinity();
        if (draft_topk > 0 && draft_topk < Vd)
          sampling.keep_top(row, Vd, draft_topk, kNever, logits);
        for (int64_t v : masked) logits[v] = kNever;
        const int64_t chosen = drawer.choose(logits, t ? t[s] : 0.f, u ? u[slot] : 0.f,
                                             q ? q + slot * Vd : nullptr, s, j);
        if (head) {
          memcpy(features.data(), hidden_data + slot * H, size_t(H) * sizeof(float));
          memcpy(features.data() + H, e, size_t(R) * sizeof(float));
          scores[slot] =
              confidence(kernels.dot(features.data(), head, plan.confidence_inputs), head_bias);
        }
        previous[s] = to_target ? to_target[chosen] : chosen;
        tokens[slot] = previous[s];
      }
    });
  }
  return {plan.tokens, plan.q, plan.confidence};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("markov_chain", TORCH_BOX(&Recorded<&markov_chain>::call));
}

}  // namespace dflash::cpu
