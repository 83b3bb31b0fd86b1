// Between cpu/delta.cpp and its kernels.
#pragma once
#include "core/gdn_args.h"

namespace dflash::cpu {

// Rows first .. first + count - 1 of every sequence; a sequence may have fewer.
struct DeltaWindow {
  int64_t first, count;
  float* scratch;  // DeltaScratch::floats for each row of each sequence, 64-byte aligned
  int64_t replay_count;
  float* replay;  // keys of the journal, [sequences, replay_count, k_heads, groups of 64]
};

// One row: unit keys and queries in groups of 64 (see delta.inl), decays, strengths, and v as
// float.
struct DeltaScratch {
  int64_t groups, queries, decays, strengths, values, floats;

  explicit DeltaScratch(const DeltaArgs& args)
      : groups(ceil_div(args.k_dim, 64)),
        queries(args.k_heads * groups * 64),
        decays(2 * queries),
        strengths(decays + ceil_div(args.v_heads, 16) * 16),
        values(strengths + ceil_div(args.v_heads, 16) * 16),
        floats(values + (args.mixed.type == FloatType::kF32
                             ? 0
                             : ceil_div<int64_t>(args.out_columns(), 16) * 16)) {}
};

}  // namespace dflash::cpu
