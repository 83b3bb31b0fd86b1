#include "cpu/sampling.h"

#include <torch/csrc/stable/library.h>

#include <memory>

#include "core/accept.h"
#include "core/sampling.h"
#include "cpu/draw.h"
#include "cpu/graph.h"
#include "cpu/parallel.h"
#include "host/sampling.h"

namespace dflash::cpu {
namespace {

// A draw's failure as an error; `arg` is the tensor that the probabilities came from.
void check_drawn(const char* op, const char* arg, int64_t id, int64_t row) {
  STD_TORCH_CHECK(id != kBadProbability, op, ": ", arg,
                  " must be probabilities >= 0, got a negative number or NaN in row ", row);
  STD_TORCH_CHECK(id != kNoMass, op, ": ", arg,
                  " must have a positive finite sum, got 0 or infinity in row ", row);
}

}  // namespace

Tensor uniform(const Tensor& seeds, const Tensor& positions, int64_t stream) {
  UniformPlan plan = plan_uniform(seeds, positions, stream);
  const int64_t* seed = seeds.const_data_ptr<int64_t>();
  const int64_t* position = positions.const_data_ptr<int64_t>();
  float* out = plan.out.mutable_data_ptr<float>();
  parallel_for(plan.count, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      out[n] = dflash::uniform(seed[n], position[n], int(stream));
  });
  return plan.out;
}

Tensor sampling_probs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                      const Tensor& top_p) {
  constexpr const char* op = "dflash::sampling_probs";
  SamplingProbsPlan plan = plan_sampling_probs(logits, temperature, top_k, top_p);
  const float* x = logits.const_data_ptr<float>();
  const float* t = temperature.const_data_ptr<float>();
  const int64_t* k = top_k.const_data_ptr<int64_t>();
  const float* p = top_p.const_data_ptr<float>();
  for (int64_t r = 0; r < plan.rows; ++r) {
    check_temperature(op, t[r], r);
    STD_TORCH_CHECK(k[r] >= 0, op, ": top_k must be >= 0 (0 is off), got ", k[r], " in row ", r);
    STD_TORCH_CHECK(p[r] > 0.f && p[r] <= 1.f, op, ": top_p must be in (0, 1] (1 is off), got ",
                    p[r], " in row ", r);
  }
  float* out = plan.out.mutable_data_ptr<float>();
  const SamplingKernels& kernels = sampling_kernels();
  parallel_for(plan.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = r * plan.vocab;
      const RowStatus status = kernels.probs(x + at, plan.vocab, t[r], k[r], p[r], out + at);
      STD_TORCH_CHECK(status != RowStatus::kNotFinite, op,
                      ": logits must be finite or -inf, got NaN or +inf in row ", r);
      STD_TORCH_CHECK(status != RowStatus::kAllMinusInfinity, op,
                      ": logits must allow at least one id, got -inf everywhere in row ", r);
    }
  });
  return plan.out;
}

Tensor categorical(const Tensor& probs, const Tensor& uniform) {
  constexpr const char* op = "dflash::categorical";
  CategoricalPlan plan = plan_categorical(probs, uniform);
  const float* p = probs.const_data_ptr<float>();
  const float* u = uniform.const_data_ptr<float>();
  int64_t* out = plan.out.mutable_data_ptr<int64_t>();
  const SamplingKernels& kernels = sampling_kernels();
  parallel_for(plan.rows, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> sums(
        new float[size_t(ceil_div<int64_t>(plan.vocab, kDrawChunk))]);
    for (int64_t r = begin; r < end; ++r) {
      check_uniform(op, "uniform", u[r], r);
      out[r] = kernels.draw(p + r * plan.vocab, plan.vocab, u[r], sums.get());
      check_drawn(op, "probs", out[r], r);
    }
  });
  return plan.out;
}

namespace {

constexpr const char* kAccept = "dflash::accept";

// One sequence of `accept`.
struct Verification {
  const int64_t* draft;        // [N]
  int32_t offered;             // <= N
  const float* probs;          // [N + 1, vocab]
  const int64_t* q_ids;        // [N, candidates] or null
  const float* q;              // [N, candidates], [N, vocab] or null
  const float* uniform;        // [N]
  const float* bonus_uniform;  // [N + 1], by the position that is drawn
  int64_t vocab, candidates, sequence;

  float draft_probability(int64_t i) const {
    if (!q) return 1.f;
    if (!q_ids) return q[i * vocab + draft[i]];
    float sum = 0.f;
    for (int64_t k = i * candidates; k < (i + 1) * candidates; ++k) {
      STD_TORCH_CHECK(q_ids[k] >= 0 && q_ids[k] < vocab, kAccept, ": q_ids must be in [0, ", vocab,
                      "), got ", q_ids[k], " at sequence ", sequence, ", token ", i);
      if (q_ids[k] == draft[i]) sum = sum + q[k];
    }
    return sum;
  }

  // [vocab]
  void write_residual(int64_t i, float* out) const {
    const float* p = probs + i * vocab;
    if (q && !q_ids) {
      const float* dense = q + i * vocab;
      for (int64_t v = 0; v < vocab; ++v) out[v] = residual(p[v], dense[v]);
      return;
    }
    memcpy(out, p, size_t(vocab) * sizeof(float));
    if (!q) {
      out[draft[i]] = residual(p[draft[i]], 1.f);
      return;
    }
    for (int64_t k = i * candidates; k < (i + 1) * candidates; ++k)
      out[q_ids[k]] = residual(out[q_ids[k]], q[k]);
  }

  // Accepted tokens; *next is the token after them.
  int32_t run(float* scratch, float* sums, int64_t* next) const {
    int32_t i = 0;
    bool rejected = false;
    for (; i < offered && draft[i] != -1; ++i) {
      STD_TORCH_CHECK(draft[i] >= 0 && draft[i] < vocab, kAccept, ": draft must hold ids in [0, ",
                      vocab, "), or -1 to end a chain, got ", draft[i], " at sequence ", sequence,
                      ", token ", i);
      check_uniform(kAccept, "uniform", uniform[i], sequence);
      if (!accepts(uniform[i], draft_probability(i), probs[i * vocab + draft[i]])) {
        rejected = true;
        break;
      }
    }
    const float bonus = bonus_uniform[i];
    check_uniform(kAccept, "bonus_uniform", bonus, sequence);
    const auto draw = [&](const float* p) {
      return sampling_kernels().draw(p, vocab, bonus, sums);
    };
    *next = kNoMass;
    if (rejected) {
      write_residual(i, scratch);
      *next = draw(scratch);
    }
    // nothing rejected, or the residual is empty: the target's own distribution
    if (*next == kNoMass) *next = draw(probs + i * vocab);
    STD_TORCH_CHECK(*next >= 0, kAccept, ": probs and q must be probabilities, got ",
                    *next == kNoMass ? "a row of sum 0 or infinity" : "a negative number or NaN",
                    " at sequence ", sequence, ", row ", i);
    return i;
  }
};

void check_offered(const char* op, int32_t offered, int64_t tokens, int64_t sequence) {
  STD_TORCH_CHECK(offered >= 0 && offered <= tokens, op, ": offered must be in [0, ", tokens,
                  "], got ", offered, " for sequence ", sequence);
}

}  // namespace

std::tuple<Tensor, Tensor> accept(const Tensor& draft, const Tensor& offered, const Tensor& probs,
                                  std::optional<Tensor> q_ids, std::optional<Tensor> q,
                                  const Tensor& uniform, const Tensor& bonus_uniform) {
  AcceptPlan plan = plan_accept(draft, offered, probs, q_ids, q, uniform, bonus_uniform);
  const int64_t N = plan.tokens, V = plan.vocab, K = plan.candidates;
  const int64_t* ids = q_ids ? q_ids->const_data_ptr<int64_t>() : nullptr;
  const float* q_data = q ? q->const_data_ptr<float>() : nullptr;
  const int64_t* draft_data = draft.const_data_ptr<int64_t>();
  const int32_t* offered_data = offered.const_data_ptr<int32_t>();
  const float* p = probs.const_data_ptr<float>();
  const float* u = uniform.const_data_ptr<float>();
  const float* bonus = bonus_uniform.const_data_ptr<float>();
  int32_t* length = plan.length.mutable_data_ptr<int32_t>();
  int64_t* next = plan.next.mutable_data_ptr<int64_t>();
  for (int64_t s = 0; s < plan.sequences; ++s) check_offered(kAccept, offered_data[s], N, s);
  parallel_for(plan.sequences, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[size_t(V)]);
    const std::unique_ptr<float[]> sums(new float[size_t(ceil_div<int64_t>(V, kDrawChunk))]);
    for (int64_t s = begin; s < end; ++s) {
      const Verification one = {draft_data + s * N,
                                offered_data[s],
                                p + s * (N + 1) * V,
                                ids ? ids + s * N * K : nullptr,
                                q_data ? q_data + s * N * K : nullptr,
                                u + s * N,
                                bonus + s * (N + 1),
                                V,
                                K,
                                s};
      length[s] = one.run(scratch.get(), sums.get(), next + s);
    }
  });
  return {plan.length, plan.next};
}

std::tuple<Tensor, Tensor> accept_greedy(const Tensor& draft, const Tensor& offered,
                                         const Tensor& target_ids) {
  constexpr const char* op = "dflash::accept_greedy";
  AcceptPlan plan = plan_accept_greedy(draft, offered, target_ids);
  const int64_t* draft_data = draft.const_data_ptr<int64_t>();
  const int32_t* offered_data = offered.const_data_ptr<int32_t>();
  const int64_t* target = target_ids.const_data_ptr<int64_t>();
  int32_t* length = plan.length.mutable_data_ptr<int32_t>();
  int64_t* next = plan.next.mutable_data_ptr<int64_t>();
  for (int64_t s = 0; s < plan.sequences; ++s) {
    check_offered(op, offered_data[s], plan.tokens, s);
    const int64_t* row = target + s * (plan.tokens + 1);
    const int32_t n = accepted_prefix(draft_data + s * plan.tokens, row, offered_data[s]);
    STD_TORCH_CHECK(row[n] >= 0, op, ": target_ids must be >= 0, got ", row[n], " at sequence ", s,
                    ", row ", n);
    length[s] = n;
    next[s] = row[n];
  }
  return {plan.length, plan.next};
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("uniform", TORCH_BOX(&Recorded<&uniform>::call));
  m.impl("sampling_probs", TORCH_BOX(&Recorded<&sampling_probs>::call));
  m.impl("categorical", TORCH_BOX(&Recorded<&categorical>::call));
  m.impl("accept", TORCH_BOX(&Recorded<&accept>::call));
  m.impl("accept_greedy", TORCH_BOX(&Recorded<&accept_greedy>::call));
}

}  // namespace dflash::cpu
