#include "cpu/attention.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "core/attention.h"
#include "core/mask.h"
#include "cpu/graph.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "host/attention.h"
#include "host/dispatch.h"

namespace dflash::cpu {
namespace {

constexpr const char* kOp = "dflash::block_attention";
constexpr int64_t kBlockQueries = 16;  // enough to share loaded keys, little enough to spread
constexpr int64_t kFewQueries = 4;     // of a block when there are too few blocks for the threads
constexpr int64_t kWorthThreads = 1 << 17;  // queries * keys * head_dim: some microseconds
constexpr int64_t kMaxPartials = 1 << 24;   // floats

// Offsets, lengths and the pages that some row of a sequence reads.
void check_sequences(const AttentionPlan& plan, const AttentionArgs& args, const int32_t* starts,
                     const int32_t* lengths) {
  STD_TORCH_CHECK(starts[0] == 0 && starts[plan.sequences] == plan.rows, kOp,
                  ": cu_seqlens must run from 0 to the ", plan.rows, " rows of q, got ", starts[0],
                  " .. ", starts[plan.sequences]);
  for (int64_t s = 0; s < plan.sequences; ++s) {
    const int64_t rows = int64_t(starts[s + 1]) - starts[s], length = lengths[s];
    STD_TORCH_CHECK(rows >= 0, kOp, ": cu_seqlens must not fall, got ", starts[s], " then ",
                    starts[s + 1], " for sequence ", s);
    STD_TORCH_CHECK(length == 0 || (length >= rows && length <= plan.capacity()), kOp, ": lengths[",
                    s, "] must be 0 or ", rows, " (the sequence's own rows) .. ", plan.capacity(),
                    " (its pages), got ", length);
    if (rows == 0) continue;
    const KeyRange first = visible_keys(length - rows, length, plan.window, plan.causal);
    const KeyRange last = visible_keys(length - 1, length, plan.window, plan.causal);
    for (int64_t p = first.begin / plan.page_size; p * plan.page_size < last.end; ++p) {
      const int32_t page = args.page_table[s * plan.table_pages + p];
      STD_TORCH_CHECK(page >= 0 && page < plan.pages, kOp, ": page_table[", s, ", ", p,
                      "] must be 0 .. ", plan.pages - 1, ", got ", page);
    }
  }
}

std::vector<AttentionBlock> cut_blocks(const AttentionPlan& plan, const int32_t* starts,
                                       const int32_t* lengths, int64_t queries) {
  std::vector<AttentionBlock> blocks;
  const int64_t step = std::max<int64_t>(1, queries / (plan.heads / plan.kv_heads));
  for (int64_t s = 0; s < plan.sequences; ++s) {
    const int64_t begin = starts[s], end = starts[s + 1], length = lengths[s];
    for (int64_t row = begin; row < end; row += step) {
      const int64_t rows = std::min(step, end - row), position = length - (end - row);
      const KeyRange first = visible_keys(position, length, plan.window, plan.causal);
      const KeyRange last = visible_keys(position + rows - 1, length, plan.window, plan.causal);
      const int64_t chunk_begin = first.begin / kChunkKeys;
      const int64_t chunk_end = std::max(chunk_begin, ceil_div<int64_t>(last.end, kChunkKeys));
      for (int64_t head = 0; head < plan.kv_heads; ++head)
        blocks.push_back({s, head, row, rows, position, length, chunk_begin, chunk_end, nullptr});
    }
  }
  return blocks;
}

// With few blocks the chunks are shared out, and merged after all are there: the same merges.
void attend_split(const AttentionArgs& args, std::vector<AttentionBlock>& blocks) {
  struct Item {
    int64_t block, chunk;
  };
  std::vector<Item> items;
  const int64_t width = 2 + args.padded();
  size_t floats = 0;
  std::vector<size_t> begins;
  for (const AttentionBlock& b : blocks) {
    begins.push_back(floats);
    floats += size_t(b.rows * args.group() * (b.chunk_end - b.chunk_begin) * width);
    for (int64_t c = b.chunk_begin; c < b.chunk_end; ++c)
      items.push_back({int64_t(begins.size()) - 1, c});
  }
  thread_local std::vector<float> partials;
  if (partials.size() < floats) partials.resize(floats);
  for (size_t b = 0; b < blocks.size(); ++b) blocks[b].partial = partials.data() + begins[b];
  const bool wide = isa() == Isa::kAvx512;
  parallel_for(int64_t(items.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      (wide ? avx512::attend_chunk : avx2::attend_chunk)(
          args, blocks[size_t(items[size_t(n)].block)], items[size_t(n)].chunk);
  });
  const int64_t merge_grain = floats < 65536 ? int64_t(blocks.size()) : 1;
  parallel_for(int64_t(blocks.size()), merge_grain, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    scratch.resize(size_t(2 * args.padded()));
    for (int64_t n = begin; n < end; ++n)
      (wide ? avx512::attend_merge : avx2::attend_merge)(args, blocks[size_t(n)], scratch.data());
  });
}

// How the work is cut changes its speed only.
void attend(const AttentionPlan& plan, const AttentionArgs& args, const int32_t* starts,
            const int32_t* lengths) {
  std::vector<AttentionBlock> blocks = cut_blocks(plan, starts, lengths, kBlockQueries);
  const int64_t threads = int64_t(torch::stable::get_num_threads());
  int64_t chunks = 0, most_chunks = 0, partials = 0, work = 0;
  for (const AttentionBlock& b : blocks) {
    const int64_t queries = b.rows * args.group(), own = b.chunk_end - b.chunk_begin;
    chunks += own;
    most_chunks = std::max(most_chunks, own);
    partials += queries * own * (2 + args.padded());
    work += queries * plan.head_dim *
            (std::min(b.length, b.chunk_end * kChunkKeys) - b.chunk_begin * kChunkKeys);
  }
  const bool share = threads > 1 && work >= kWorthThreads;
  if (share && chunks < 2 * threads) blocks = cut_blocks(plan, starts, lengths, kFewQueries);
  const int64_t count = int64_t(blocks.size());
  if (share && most_chunks > 1 && count < 4 * threads && partials <= kMaxPartials)
    return attend_split(args, blocks);
  const bool wide = isa() == Isa::kAvx512;
  parallel_for(count, share ? 1 : count, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    for (int64_t n = begin; n < end; ++n) {
      const AttentionBlock& block = blocks[size_t(n)];
      const size_t floats = size_t(2 * block.rows * args.group() * args.padded());
      if (scratch.size() < floats) scratch.resize(floats);
      (wide ? avx512::attend_whole : avx2::attend_whole)(args, block, scratch.data());
    }
  });
}

}  // namespace

Tensor block_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& lengths, const Tensor& cu_seqlens,
                       double scale, int64_t window, bool causal,
                       const std::optional<Tensor>& sinks, const std::optional<Tensor>& gate,
                       double value_scale, int64_t act_mode) {
  const AttentionPlan plan =
      plan_attention(q, k_cache, v_cache, page_table, lengths, cu_seqlens, scale, window, causal,
                     sinks, gate, value_scale, act_mode);
  STD_TORCH_CHECK(plan.head_dim <= 1024, kOp, ": q must have head_dim <= 1024, got ",
                  plan.head_dim);
  STD_TORCH_CHECK(plan.heads / plan.kv_heads <= 256, kOp,
                  ": q must have at most 256 heads for one of the cache, got ",
                  plan.heads / plan.kv_heads);
  AttentionArgs args{};
  args.type = float_type(k_cache);
  args.q = q.const_data_ptr<float>();
  args.k = k_cache.const_data_ptr();
  args.v = v_cache.const_data_ptr();
  args.page_table = page_table.const_data_ptr<int32_t>();
  args.table_pages = plan.table_pages;
  args.page_size = plan.page_size;
  args.heads = plan.heads;
  args.kv_heads = plan.kv_heads;
  args.head_dim = plan.head_dim;
  args.window = plan.window;
  args.scale = plan.scale;
  args.value_scale = plan.value_scale;
  args.causal = plan.causal;
  args.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  args.gate = gate ? gate->const_data_ptr<float>() : nullptr;
  args.gate_row = plan.gate_stride[0];
  args.gate_head = plan.gate_stride[1];
  const int64_t columns = plan.heads * plan.head_dim;
  std::vector<float> floats(act_mode == 0 ? 0 : size_t(plan.rows * columns));
  args.out = act_mode == 0 ? Tensor(plan.out).mutable_data_ptr<float>() : floats.data();
  const int32_t* starts = cu_seqlens.const_data_ptr<int32_t>();
  const int32_t* keys = lengths.const_data_ptr<int32_t>();
  check_sequences(plan, args, starts, keys);
  attend(plan, args, starts, keys);
  if (act_mode != 0) {
    auto* packed = static_cast<uint8_t*>(plan.out.mutable_data_ptr());
    const bool wide = isa() == Isa::kAvx512;
    parallel_for(plan.rows, std::max<int64_t>(1, 16384 / columns), [&](int64_t begin, int64_t end) {
      (wide ? avx512::pack_rows : avx2::pack_rows)(floats.data(), columns, begin, end, act_mode,
                                                   packed);
    });
  }
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("block_attention", TORCH_BOX(&Recorded<&block_attention>::call));
}

}  // namespace dflash::cpu
