#include "gpu/markov.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/launch.cuh"
#include "cuda/operators.h"
#include "host/act.h"
#include "host/draft.h"
#include "host/tiles.h"

namespace dflash::cuda {
namespace {

bool is_float(int64_t type) {
  return type == F32::kType || type == F16::kType || type == BF16::kType;
}

// float32 activations with float weights, planes otherwise: the rule of every linear layer
Tensor linear(const Tensor& x, const Tensor& weight, int64_t type, int64_t rows, int64_t columns,
              std::optional<Tensor> bias) {
  return qmm(is_float(type) ? x : quant_act(x, kActPlanes), weight, {type}, {rows}, columns, bias);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> markov_chain(
    const Tensor& base, const Tensor& hidden, const Tensor& anchor, const Tensor& w1,
    int64_t w1_type, const Tensor& w2, int64_t w2_type, std::optional<Tensor> confidence_weight,
    std::optional<Tensor> confidence_bias, double logit_scale, std::optional<Tensor> d2t,
    std::optional<Tensor> temperature, std::optional<Tensor> uniform, int64_t mask_id,
    int64_t draft_topk, int64_t head_type, std::optional<Tensor> joint, int64_t joint_type,
    std::optional<Tensor> joint_bias) {
  MarkovPlan plan =
      plan_markov_chain(base, hidden, anchor, w1, w1_type, w2, w2_type, confidence_weight,
                        confidence_bias, d2t, temperature, uniform, draft_topk, head_type, joint,
                        joint_type, joint_bias, &cpu::repacked_bytes);
  const int64_t S = plan.sequences, N = plan.slots, V = plan.draft_vocab;
  if (S == 0 || N == 0) return {plan.tokens, plan.q, plan.confidence};
  const auto data = [](const std::optional<Tensor>& t) {
    return t ? t->const_data_ptr<float>() : nullptr;
  };
  const Launch launch(base, S);
  const unsigned blocks = unsigned(S);
  const bool greedy = !temperature && draft_topk == 0;
  const bool packs = !joint && !is_float(w2_type);  // the row of w1 is what w2 reads
  const int64_t chunks = ceil_div<int64_t>(V, gpu::kTopkChunk);
  STD_TORCH_CHECK(chunks <= 65535, "dflash::markov_chain: base must have fewer columns, got ", V);
  const auto floats = [&](int64_t rows, int64_t columns) {
    return new_empty(base, {rows, columns}, ScalarType::Float);
  };
  // w1's rows of the token before every slot, slot by slot
  Tensor embedded = floats(N * S, plan.rank);
  Tensor packed = packs ? new_activations("dflash::markov_chain", base, S, plan.rank, kActPlanes)
                        : new_empty(base, {0}, ScalarType::Byte);
  Tensor previous = new_empty(anchor, {S}, ScalarType::Long);
  Tensor sums = floats(greedy ? 0 : S, ceil_div<int64_t>(V, kLeaf));
  Tensor keys = new_empty(anchor, {greedy && chunks > 1 ? S * chunks : 0}, ScalarType::Long);

  gpu::MarkovSlot m{};
  m.base = base.const_data_ptr<float>();
  m.sums = sums.mutable_data_ptr<float>();
  m.d2t = d2t ? d2t->const_data_ptr<int64_t>() : nullptr;
  m.temperature = data(temperature);
  m.uniform = data(uniform);
  m.slots = N;
  m.vocab = V;
  m.target_vocab = plan.vocab;
  m.mask_id = mask_id;
  m.draft_topk = draft_topk;
  m.scale = float(logit_scale);
  m.previous = previous.mutable_data_ptr<int64_t>();
  m.tokens = plan.tokens.mutable_data_ptr<int64_t>();
  m.q = temperature ? plan.q.mutable_data_ptr<float>() : nullptr;
  gpu::MarkovTable table{};
  table.w1 = w1.const_data_ptr<uint8_t>();
  table.rows = plan.vocab;
  table.rank = int(plan.rank);
  table.embedded = embedded.mutable_data_ptr<float>();
  table.packed = packs ? static_cast<gpu::ActPlanes*>(packed.mutable_data_ptr()) : nullptr;
  gpu::MarkovJoint j{};
  Tensor features = floats(S, plan.joint_columns);
  Tensor state = floats(S, plan.rank), row = floats(S, plan.rank);
  j.head = plan.head;
  j.hidden = hidden.const_data_ptr<float>();
  j.features = features.mutable_data_ptr<float>();
  j.state = state.mutable_data_ptr<float>();
  j.row = row.mutable_data_ptr<float>();
  j.slots = N;
  j.hidden_size = plan.hidden;
  j.rank = plan.rank;

  // the table that the rows of the token before slot `slot` go to
  const auto table_of = [&](int64_t slot) {
    gpu::MarkovTable t = table;
    t.embedded += slot * S * plan.rank;
    return t;
  };
  const auto embed = [&](int64_t slot, const int64_t* tokens) {
    dispatch_format(w1_type, [&]<class F>() {
      launch_pdl(gpu::markov_embed<F>, blocks, launch.threads, 0, launch.stream, table_of(slot),
                 tokens);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  embed(0, anchor.const_data_ptr<int64_t>());
  for (m.slot = j.slot = 0; m.slot < N; j.slot = ++m.slot) {
    const Tensor before = torch::stable::narrow(embedded, 0, m.slot * S, S);
    if (joint) {
      j.embedded = before.const_data_ptr<float>();
      launch_pdl(gpu::markov_features, blocks, gpu::kRowThreads, 0, launch.stream, j);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      const Tensor mixed =
          linear(features, *joint, joint_type, plan.joint_rows, plan.joint_columns, joint_bias);
      j.mixed = mixed.const_data_ptr<float>();
      launch_pdl(gpu::markov_row, blocks, gpu::kRowThreads, 0, launch.stream, j);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    Tensor bias = packs ? qmm(packed, w2, {w2_type}, {V}, plan.rank, std::nullopt)
                        : linear(joint ? row : before, w2, w2_type, V, plan.rank, std::nullopt);
    m.logits = bias.mutable_data_ptr<float>();
    if (greedy) {
      auto* best = chunks > 1 ? static_cast<gpu::RankKey*>(keys.mutable_data_ptr()) : nullptr;
      if (best) {
        launch_pdl(gpu::markov_best, dim3(blocks, unsigned(chunks)), gpu::kTopkThreads, 0,
                   launch.stream, m, best);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      }
      dispatch_format(w1_type, [&]<class F>() {
        launch_pdl(gpu::markov_next<F>, blocks, gpu::kTopkThreads, 0, launch.stream, m, best,
                   chunks, table_of(m.slot + 1));
      });
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    } else {
      launch_pdl(gpu::markov_draw, blocks, gpu::kRowThreads, 0, launch.stream, m);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      if (m.slot + 1 < N) embed(m.slot + 1, m.previous);
    }
  }
  if (confidence_weight) {
    launch_pdl(gpu::markov_confidence, unsigned(S * N), launch.threads, 0, launch.stream,
               hidden.const_data_ptr<float>(), embedded.const_data_ptr<float>(),
               data(confidence_weight), data(confidence_bias), S, N, plan.hidden, plan.rank,
               plan.confidence_inputs, plan.confidence.mutable_data_ptr<float>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {plan.tokens, plan.q, plan.confidence};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("markov_chain", TORCH_BOX(&markov_chain));
}

}  // namespace dflash::cuda
