// Causal depthwise convolution over the rows of a step, a thread per channel of a sequence.
#pragma once
#include "core/conv.h"
#include "core/gdn_args.h"
#include "gpu/sequence.cuh"
#include "gpu/warp.cuh"

namespace dflash::gpu {

// kTaps 0: args.taps. Rows of no sequence and of null slots are zero before this runs.
template <class X, class S, int kTaps>
__global__ void ssm_conv_step(ConvArgs args) {
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t s = n / args.channels, c = n % args.channels;
  if (s >= args.sequences) return;
  const int taps = kTaps ? kTaps : args.taps;
  const RowRange rows = rows_of(args.cu_seqlens, s, args.rows);
  const int64_t slot = args.slot[s];
  if (rows.begin == rows.end || slot <= 0) return;
  const int64_t given = args.num_accepted ? args.num_accepted[s] : 1;
  const int64_t accepted = given > 1 ? given : 1;
  if (!rows.valid || slot >= args.slots || accepted + taps - 2 > args.width ||
      rows.end - rows.begin + taps - 2 > args.width) {
    for (int64_t r = rows.begin; r < rows.end; ++r) args.out[r * args.channels + c] = no_answer();
    return;
  }

  float weight[kTaps ? kTaps : kMaxTaps];
  for (int t = 0; t < taps; ++t) weight[t] = args.weight[c * taps + t];
  const float start = args.bias ? args.bias[c] : 0.f;
  // window: the taps - 1 values before the row, oldest first
  float window[kTaps ? kTaps : kMaxTaps];
  S* state = static_cast<S*>(args.state) + slot * args.slot_stride + c;
  for (int t = 0; t < taps - 1; ++t)
    window[t] = to_float(state[(accepted - 1 + t) * args.channels]);
  for (int t = 1; t < taps - 1; ++t) store_float(state + (t - 1) * args.channels, window[t]);

  S* column_out = state + (taps - 2) * args.channels;
  const X* x = static_cast<const X*>(args.x.data) + c;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float newest = to_float(x[r * args.x.stride]);
    float sum = start;
    for (int t = 0; t < taps - 1; ++t) sum = conv_tap(sum, weight[t], window[t]);
    sum = conv_tap(sum, weight[taps - 1], newest);
    args.out[r * args.channels + c] = args.silu ? silu(sum) : sum;
    // a later row reads the value as the state would have kept it
    const float kept = stored<S>(newest);
    store_float(column_out, kept);
    for (int t = 0; t + 2 < taps; ++t) window[t] = window[t + 1];
    window[taps - 2] = kept;
    column_out += args.channels;
  }
}

}  // namespace dflash::gpu
