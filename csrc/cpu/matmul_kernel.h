// The CPU matmul's arguments, for kernels that know nothing of torch.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/act.h"

namespace dflash::cpu {

// Rows of a weight of one ggml type, repacked (host/tiles.h).
struct MatmulSegment {
  int32_t type;
  bool tiled;
  int64_t rows;
  const uint8_t* weight;
};

// The rows of activations. `floats` is what types without tiles read: float32 rows themselves, else
// the decoded ones.
struct MatmulRows {
  int64_t count, columns, act_mode;
  const void* packed;   // [count, packed_bytes(columns, act_mode)], or null: float32
  const float* floats;  // [count, columns], or null when every segment is tiled
};

struct MatmulCall {
  MatmulRows x;
  const MatmulSegment* segments;
  int segment_count;
  const float* bias;   // [out_stride] or null
  float* out;          // [x.count, out_stride]
  int64_t out_stride;  // sum of the segments' rows
};

// silu(gate) * up; gate and up have `segments[i].rows` rows each.
struct MatmulGluCall {
  MatmulRows x;
  MatmulSegment gate, up;
  float* out;       // [x.count, gate.rows]
  float* up_out;    // the same, for up
  uint8_t* packed;  // [x.count, packed_bytes(gate.rows, act_mode)] or null
  int64_t act_mode;
  int32_t* countdown;  // [ceil(gate.rows / 256)], any contents; null without `packed`
};

// Tiles a thread claims at once: at most about a microsecond of work, so that a thread that was
// held up leaves little undone, and eight pieces at least; all of them when a second thread would
// not pay.
inline int64_t matmul_grain(int64_t tiles, const MatmulRows& x) {
  const int64_t per_tile = 16 * x.columns * x.count;
  if (tiles * per_tile < 98304) return tiles;
  return std::max<int64_t>(1, std::min(49152 / per_tile, tiles / 8));
}

namespace avx2 {
void qmm(const MatmulCall& c);
void qmm_glu(const MatmulGluCall& c);
void unpack_activations(const void* packed, int64_t act_mode, int64_t count, int64_t columns,
                        float* out);
}  // namespace avx2
namespace avx512 {
void qmm(const MatmulCall& c);
void qmm_glu(const MatmulGluCall& c);
void unpack_activations(const void* packed, int64_t act_mode, int64_t count, int64_t columns,
                        float* out);
}  // namespace avx512

}  // namespace dflash::cpu
