// What the kernels of norm, conv and the gated delta rule are given: raw pointers, no torch.
#pragma once
#include "core/float_type.h"

namespace dflash {

struct NormArgs {
  int64_t rows, columns;
  FloatRows x;     // [rows, columns]; data null: no addition
  void* residual;  // [rows, columns]
  FloatType residual_type;
  void* capture;  // [rows, columns] of residual's type, or null
  int64_t capture_stride;
  const void* weight;  // [columns]
  FloatType weight_type;
  float eps;
  bool plus_one;
  float* out;       // [rows, columns], or null:
  uint8_t* packed;  // [rows, packed_bytes(columns, act_mode)]
  int64_t act_mode;
};

constexpr int kMaxTaps = 16;

struct ConvArgs {
  int64_t rows, sequences, channels;
  int taps;
  bool silu;
  FloatRows x;  // [rows, channels]
  void* state;  // [slots, width, channels]
  FloatType state_type;
  int64_t slots, width, slot_stride;
  const float* weight;          // [channels, taps]
  const float* bias;            // [channels] or null
  const int32_t* slot;          // [sequences]
  const int32_t* num_accepted;  // [sequences] or null
  const int32_t* cu_seqlens;    // [sequences + 1]
  float* out;                   // [rows, channels]
};

enum class DeltaMode { kSnapshots, kJournal, kPrefill, kCommit };

struct DeltaArgs {
  DeltaMode mode;
  int64_t rows, sequences;
  int k_heads, k_dim, v_heads, v_dim;
  bool tiled, sigmoid_gate;
  float eps;
  FloatRows mixed;            // [rows, q | k | v]
  FloatRows a, b;             // [rows, v_heads]
  FloatRows z;                // [rows, v_heads * v_dim]
  const float* A;             // [v_heads]
  const float* dt_bias;       // [v_heads]
  const float* norm_weight;   // [v_dim] or null: no gated norm
  const int32_t* cu_seqlens;  // [sequences + 1]
  float* out;                 // [rows, v_heads * v_dim]
  uint8_t* packed;            // the same as activations of act_mode, for kernels that pack
  int64_t act_mode;

  void* state;  // [slots, v_heads, v_dim, k_dim]
  bool bf16_state;
  int64_t slots, slot_stride;
  const int32_t* slot;          // [sequences, columns]
  int64_t columns;              // 1, for snapshots one per row
  const int32_t* num_accepted;  // [sequences]; snapshots: may be null
  const int32_t* has_state;     // [sequences], prefill only

  const int32_t* parity;  // [sequences]; the rest: journal and commit only
  int64_t journal_rows;
  float* journal_k;      // [2, slots, journal_rows, k_heads, k_dim]
  float* journal_u;      // [2, slots, journal_rows, v_heads, v_dim]
  float* journal_decay;  // [2, slots, journal_rows, v_heads]

  DFLASH_HD int64_t v_offset() const { return 2 * int64_t(k_heads) * k_dim; }
  DFLASH_HD int64_t out_columns() const { return int64_t(v_heads) * v_dim; }
  // Row t of the journal that `half` (0 or 1) of a slot holds.
  DFLASH_HD int64_t journal_row(int half, int64_t at_slot, int64_t t) const {
    return (half * slots + at_slot) * journal_rows + t;
  }
};

}  // namespace dflash
