// Greedy speculative decoding in llama.cpp, for compare_drafters.py: how many draft tokens it accepts.
//
//   accept TARGET.gguf DRAFTER.gguf TOKENS_TO_GENERATE DRAFT_TOKENS THREADS < prompts > results
//
// A prompt is a line of token ids; a result is a line "lengths of the steps;tokens".
// Links against libllama and the objects of llama.cpp's common/ of the same version.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "common.h"
#include "llama.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

namespace {

struct Models {
  common_params params;
  common_init_result_ptr target;
  common_speculative_init_result_ptr drafter;

  llama_context* target_context() { return target->context(); }
  llama_context* drafter_context() { return drafter->context(); }
};

common_params parameters(char** argv) {
  common_params p;
  p.model.path = argv[1];
  p.speculative.draft.mparams.path = argv[2];
  p.speculative.types = common_speculative_types_from_gguf(argv[2]);
  p.speculative.draft.n_max = std::atoi(argv[4]);
  p.n_ctx = 2048;
  p.n_batch = p.n_ubatch = 2048;
  p.warmup = false;
  p.fit_params = false;
  p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  p.cache_type_k = p.cache_type_v = GGML_TYPE_F32;
  p.speculative.draft.cache_type_k = p.speculative.draft.cache_type_v = GGML_TYPE_F32;
  p.cpuparams.n_threads = p.cpuparams_batch.n_threads = std::atoi(argv[5]);
  p.speculative.draft.cpuparams = p.speculative.draft.cpuparams_batch = p.cpuparams;
  p.sampling.temp = 0.f;
  const auto limits = common_speculative_get_output_limits(
      p.n_batch, p.n_parallel, common_speculative_n_max(&p.speculative));
  p.n_outputs_max = limits.total;
  p.n_outputs_max_per_seq = limits.per_seq;
  return p;
}

// One prompt: every step drafts, verifies the draft in one batch, and rolls back what was rejected.
void run(Models& m, const llama_tokens& prompt, int wanted) {
  llama_context *ctx = m.target_context(), *draft_ctx = m.drafter_context();
  llama_memory_clear(llama_get_memory(ctx), true);
  llama_memory_clear(llama_get_memory(draft_ctx), true);
  const bool whole = common_context_can_seq_rm(ctx) == COMMON_CONTEXT_SEQ_RM_TYPE_FULL;
  common_speculative_ptr spec(common_speculative_init(m.params.speculative, 1));
  common_sampler_ptr sampler(common_sampler_init(m.target->model(), m.params.sampling));
  if (!spec) throw std::runtime_error("no speculation for this drafter");

  common_batch batch(ctx);
  for (size_t i = 0; i + 1 < prompt.size(); ++i) batch.add(prompt[i], i, 0, false);
  llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
  common_speculative_process(spec.get(), batch);
  llama_tokens committed(prompt.begin(), prompt.end() - 1), out;
  llama_token anchor = prompt.back();
  common_speculative_begin(spec.get(), 0, committed);

  std::vector<size_t> lengths;
  while (int(out.size()) < wanted) {
    const int past = int(committed.size());
    llama_tokens draft;
    common_speculative_get_draft_params(spec.get(), 0) = {true, m.params.speculative.draft.n_max,
                                                          past, anchor, &committed, &draft};
    common_speculative_draft(spec.get());
    llama_memory_seq_rm(llama_get_memory(draft_ctx), 0, past, -1);
    common_prompt_checkpoint before;
    if (whole) {  // this context cannot forget a few rows: keep its state and replay
      before.update_pos(past, llama_memory_seq_pos_min(llama_get_memory(ctx), 0),
                        llama_memory_seq_pos_max(llama_get_memory(ctx), 0));
      before.update_tgt(ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    }
    llama_tokens ids;
    for (bool again = true; again;) {
      batch.clear();
      batch.add(anchor, past, 0, true);
      for (size_t i = 0; i < draft.size(); ++i) batch.add(draft[i], past + 1 + i, 0, true);
      llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
      common_speculative_process(spec.get(), batch);
      ids = common_sampler_sample_and_accept_n(sampler.get(), ctx, draft);
      again = whole && ids.size() - 1 < draft.size();
      if (!again) break;
      draft.assign(ids.begin(), ids.end() - 1);
      before.load_tgt(ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
      llama_memory_seq_rm(llama_get_memory(ctx), 0, before.pos_max + 1, -1);
      llama_memory_seq_rm(llama_get_memory(draft_ctx), 0, past, -1);
      common_sampler_reset(sampler.get());
    }
    common_speculative_accept(spec.get(), 0, ids.size() - 1);
    lengths.push_back(ids.size());
    for (llama_token id : ids) {
      committed.push_back(anchor);
      anchor = id;
      out.push_back(id);
    }
    llama_memory_seq_rm(llama_get_memory(ctx), 0, committed.size(), -1);
    llama_memory_seq_rm(llama_get_memory(draft_ctx), 0, committed.size(), -1);
  }
  for (size_t length : lengths) std::printf("%zu ", length);
  std::printf(";");
  for (llama_token id : out) std::printf("%d ", id);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: accept TARGET DRAFTER TOKENS DRAFT_TOKENS THREADS < prompts\n");
    return 2;
  }
  common_log_set_verbosity_thold(0);
  llama_backend_init();
  Models m{parameters(argv), {}, {}};
  m.target = common_init_from_params(m.params);
  if (!m.target->context()) return 1;
  auto drafter = common_base_params_to_speculative(m.params);
  m.drafter = common_speculative_init_from_params(drafter, m.target->model(), m.target_context());
  if (!m.drafter->context()) return 1;
  m.params.speculative.draft.ctx_tgt = m.target_context();
  m.params.speculative.draft.ctx_dft = m.drafter_context();
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream ids(line);
    llama_tokens prompt;
    for (llama_token id; ids >> id;) prompt.push_back(id);
    if (prompt.size() > 1) run(m, prompt, std::atoi(argv[3]));
  }
  return 0;
}
