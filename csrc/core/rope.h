// Rotary position embedding: the angle of a frequency, and the rotation of one pair.
#pragma once
#include "core/numeric.h"

namespace dflash {

// Which position (0 temporal, 1 height, 2 width) frequency i of an interleaved M-RoPE turns with:
// every third one from 1 on is height, from 2 on width, as long as their sections last.
DFLASH_HD int mrope_axis(int64_t i, int64_t height, int64_t width) {
  const int64_t turn = i % 3;
  if (turn == 1 && i < 3 * height) return 1;
  if (turn == 2 && i < 3 * width) return 2;
  return 0;
}

DFLASH_HD float rope_angle(int64_t position, float inv_freq) {
  return mul(float(position), inv_freq);
}

// Dims i and i + half of a head (NeoX halves) turn by one angle.
DFLASH_HD void rotate_pair(float x, float y, float sine, float cosine, float* out_x, float* out_y) {
  *out_x = fma(x, cosine, mul(-y, sine));
  *out_y = fma(y, cosine, mul(x, sine));
}

// The factors of a q or k norm: y = (x * rms_scale) * norm_weight.
DFLASH_HD float rms_scale(float sum_of_squares, float count, float eps) {
  return rsqrt(sum_of_squares / count + eps);
}

}  // namespace dflash
