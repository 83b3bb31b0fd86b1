#include "gpu/markov.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/launch.cuh"
#include "cuda/operators.h"
#include "host/draft.h"
#include "host/tiles.h"

namespace dflash::cuda {
namespace {

// float32 activations with float weights, planes otherwise: the rule of every linear layer
Tensor linear(const Tensor& x, const Tensor& weight, int64_t type, int64_t rows, int64_t columns,
              std::optional<Tensor> bias) {
  const bool floats = type == F32::kType || type == F16::kType || type == BF16::kType;
  return qmm(floats ? x : quant_act(x, kActPlanes), weight, {type}, {rows}, columns, bias);
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
  Tensor previous = new_empty(anchor, {S}, ScalarType::Long);
  Tensor sums = new_empty(base, {S * ceil_div<int64_t>(V, kLeaf)}, ScalarType::Float);
  const cudaError_t error =
      cudaMemcpyAsync(previous.mutable_data_ptr(), anchor.const_data_ptr(),
                      size_t(S) * sizeof(int64_t), cudaMemcpyDeviceToDevice, launch.stream);
  STD_TORCH_CHECK(error == cudaSuccess, "dflash::markov_chain: ", cudaGetErrorString(error));

  gpu::MarkovSlot m{};
  m.base = base.const_data_ptr<float>();
  m.hidden = hidden.const_data_ptr<float>();
  m.sums = sums.mutable_data_ptr<float>();
  m.head = data(confidence_weight);
  m.head_bias = data(confidence_bias);
  m.d2t = d2t ? d2t->const_data_ptr<int64_t>() : nullptr;
  m.temperature = data(temperature);
  m.uniform = data(uniform);
  m.slots = N;
  m.vocab = V;
  m.hidden_size = plan.hidden;
  m.rank = plan.rank;
  m.inputs = plan.confidence_inputs;
  m.target_vocab = plan.vocab;
  m.mask_id = mask_id;
  m.draft_topk = draft_topk;
  m.scale = float(logit_scale);
  m.previous = previous.mutable_data_ptr<int64_t>();
  m.tokens = plan.tokens.mutable_data_ptr<int64_t>();
  m.q = temperature ? plan.q.mutable_data_ptr<float>() : nullptr;
  m.confidence = confidence_weight ? plan.confidence.mutable_data_ptr<float>() : nullptr;
  gpu::MarkovJoint j{};
  Tensor features = new_empty(base, {S, plan.joint_columns}, ScalarType::Float);
  Tensor state = new_empty(base, {S, plan.rank}, ScalarType::Float);
  Tensor row = new_empty(base, {S, plan.rank}, ScalarType::Float);
  j.head = plan.head;
  j.hidden = m.hidden;
  j.features = features.mutable_data_ptr<float>();
  j.state = state.mutable_data_ptr<float>();
  j.row = row.mutable_data_ptr<float>();
  j.slots = N;
  j.hidden_size = plan.hidden;
  j.rank = plan.rank;
  for (m.slot = j.slot = 0; m.slot < N; j.slot = ++m.slot) {
    const Tensor embedded = embed_rows(w1, w1_type, previous, 1.);
    if (joint) {
      j.embedded = embedded.const_data_ptr<float>();
      gpu::markov_features<<<unsigned(S), gpu::kRowThreads, 0, launch.stream>>>(j);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      const Tensor mixed =
          linear(features, *joint, joint_type, plan.joint_rows, plan.joint_columns, joint_bias);
      j.mixed = mixed.const_data_ptr<float>();
      gpu::markov_row<<<unsigned(S), gpu::kRowThreads, 0, launch.stream>>>(j);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    Tensor bias = linear(joint ? row : embedded, w2, w2_type, V, plan.rank, std::nullopt);
    m.embedded = embedded.const_data_ptr<float>();
    m.logits = bias.mutable_data_ptr<float>();
    gpu::markov_slot<<<unsigned(S), gpu::kRowThreads, 0, launch.stream>>>(m);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {plan.tokens, plan.q, plan.confidence};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("markov_chain", TORCH_BOX(&markov_chain));
}

}  // namespace dflash::cuda
