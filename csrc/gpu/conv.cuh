// Causal depthwise convolution over the rows of a step: a block per sequence and 16 vectors of
// channels, a thread per row and vector.
#pragma once
#include "core/conv.h"
#include "core/gdn_args.h"
#include "gpu/four.cuh"
#include "gpu/sequence.cuh"

namespace dflash::gpu {

constexpr int kConvVectors = 16, kConvRows = 16, kConvThreads = kConvVectors * kConvRows;
static_assert(kConvRows >= kMaxTaps - 1);  // who reads the window does so in its first round

// kWide neighbouring channels of a row.
template <int kWide>
struct Channels {
  float x[kWide];
};

template <int kWide, class T>
__device__ Channels<kWide> load_channels(const T* p) {
  if constexpr (kWide == 4) {
    const Four v = load_four(p);
    return {v.x[0], v.x[1], v.x[2], v.x[3]};
  } else {
    return {to_float(*p)};
  }
}

template <int kWide, class T>
__device__ void store_channels(T* p, const Channels<kWide>& v) {
  if constexpr (kWide == 4)
    store_four(p, {v.x[0], v.x[1], v.x[2], v.x[3]});
  else
    store_float(p, v.x[0]);
}

// Rows begin .. end - 1 of this block's channels, all of one value.
template <int kWide>
__device__ void fill_channels(const ConvArgs& args, int64_t begin, int64_t end, int64_t c,
                              float value) {
  Channels<kWide> all;
  for (float& x : all.x) x = value;
  for (int64_t r = begin + threadIdx.x / kConvVectors; r < end; r += kConvRows)
    store_channels<kWide>(args.out + r * args.channels + c, all);
}

// kTaps 0: args.taps.
template <class X, class S, int kTaps, int kWide>
__global__ void __launch_bounds__(kConvThreads, 2) ssm_conv_step(ConvArgs args) {
  constexpr int kMost = kTaps ? kTaps : kMaxTaps;
  const int taps = kTaps ? kTaps : args.taps, row = int(threadIdx.x) / kConvVectors;
  const int64_t pieces = ceil_div<int64_t>(args.channels, kConvVectors * kWide);
  const int64_t s = blockIdx.x / pieces;
  const int64_t c = (blockIdx.x % pieces * kConvVectors + threadIdx.x % kConvVectors) * kWide;
  const bool inside = c < args.channels;
  wait_for_earlier();
  let_next_begin();

  const RowRange rows = rows_of(args.cu_seqlens, s, args.rows);
  const int64_t slot = args.slot[s], given = args.num_accepted ? args.num_accepted[s] : 1;
  const int64_t accepted = given > 1 ? given : 1, count = rows.end - rows.begin;
  // rows of no sequence, then of a null slot
  if (inside && s == 0) fill_channels<kWide>(args, 0, rows.begin, c, 0.f);
  if (inside && s == args.sequences - 1) fill_channels<kWide>(args, rows.end, args.rows, c, 0.f);
  if (count == 0) return;
  const bool valid = rows.valid && slot < args.slots && accepted + taps - 2 <= args.width &&
                     count + taps - 2 <= args.width;
  if (slot <= 0 || !valid) {
    if (inside) fill_channels<kWide>(args, rows.begin, rows.end, c, slot <= 0 ? 0.f : no_answer());
    return;
  }

  S* state = static_cast<S*>(args.state) + slot * args.slot_stride + c;
  const X* x = static_cast<const X*>(args.x.data) + rows.begin * args.x.stride + c;
  // value[t]: taps - 1 - t rows before the row, of the batch or of the window
  Channels<kWide> value[kMost], newest, weight[kMost], start = {};
  const auto load_row = [&](int64_t r) {
    newest = load_channels<kWide>(x + r * args.x.stride);
#pragma unroll
    for (int t = 0; t < kMost; ++t) {
      const int64_t at = r - (taps - 1 - t);
      if (t < taps - 1)
        value[t] = at < 0 ? load_channels<kWide>(state + (accepted + taps - 2 + at) * args.channels)
                          : load_channels<kWide>(x + at * args.x.stride);
    }
  };
  const bool first_round = inside && row < count;
  if (first_round) {
    load_row(row);
    if (args.bias) start = load_channels<kWide>(args.bias + c);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if constexpr (kTaps == 4) {
        const Four w = load_four(args.weight + (c + j) * 4);
        for (int t = 0; t < 4; ++t) weight[t].x[j] = w.x[t];
      } else {
#pragma unroll
        for (int t = 0; t < kMost; ++t)
          if (t < taps) weight[t].x[j] = args.weight[(c + j) * taps + t];
      }
    }
  }
  __syncthreads();  // the window has been read
  if (!first_round) return;
  if (row == 0) {
#pragma unroll
    for (int t = 1; t < kMost; ++t)
      if (t < taps - 1) store_channels<kWide>(state + (t - 1) * args.channels, value[t]);
  }
  for (int64_t r = row; r < count; r += kConvRows) {
    if (r > row) load_row(r);
    Channels<kWide> sum = start;
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
#pragma unroll
      for (int t = 0; t < kMost; ++t) {
        // a value of the batch is read as the state would have kept it, one of the state is itself
        if (t < taps - 1) sum.x[j] = conv_tap(sum.x[j], weight[t].x[j], stored<S>(value[t].x[j]));
        if (t == taps - 1) sum.x[j] = conv_tap(sum.x[j], weight[t].x[j], newest.x[j]);
      }
      if (args.silu) sum.x[j] = silu(sum.x[j]);
    }
    store_channels<kWide>(args.out + (rows.begin + r) * args.channels + c, sum);
    store_channels<kWide>(state + (taps - 2 + r) * args.channels, newest);
  }
}

}  // namespace dflash::gpu
