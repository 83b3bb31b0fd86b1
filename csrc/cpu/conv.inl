#include "core/conv.h"
#include "core/gdn_args.h"
#include "cpu/convert.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

constexpr int kBlock = 16;  // channels at a time

// One block of channels of one sequence. `count` < 16 channels at the end of a row.
template <class X, class S, int kTaps>
void conv_block(const ConvArgs& args, int64_t s, int64_t c, int count) {
  const int taps = kTaps ? kTaps : args.taps;
  const auto at = [count](const auto* p) __attribute__((always_inline)) {
    return count == kBlock ? load(p) : load_first(p, count);
  };
  const auto put = [count](auto* p, F32x16 v) __attribute__((always_inline)) {
    count == kBlock ? store(p, v) : store_first(p, v, count);
  };
  const int64_t first = args.cu_seqlens[s], last = args.cu_seqlens[s + 1];
  const int64_t slot = args.slot[s];
  float* out = args.out + first * args.channels + c;
  if (slot <= 0) {
    for (int64_t n = first; n < last; ++n, out += args.channels) put(out, zero());
    return;
  }

  F32x16 weight[kTaps ? kTaps : kMaxTaps];  // [tap][channel]
  const float* weights = args.weight + c * taps;
  if (kTaps == 4 && count == kBlock) {
    // vector i takes channels i, 4 + i, 8 + i, 12 + i; then each quarter is transposed
    for (int i = 0; i < 4; ++i)
      weight[i] = quarters(weights + 4 * i, weights + 16 + 4 * i, weights + 32 + 4 * i,
                           weights + 48 + 4 * i);
    transpose_quarters(weight);
  } else {
    alignas(64) float column[kBlock] = {};
    for (int t = 0; t < taps; ++t) {
      for (int i = 0; i < count; ++i) column[i] = weights[i * taps + t];
      weight[t] = load(column);
    }
  }
  const F32x16 start = args.bias ? at(args.bias + c) : zero();

  // window: the taps - 1 values before the row, oldest first
  S* state = static_cast<S*>(args.state) + slot * args.slot_stride + c;
  const int64_t accepted = args.num_accepted ? std::max(args.num_accepted[s], 1) : 1;
  F32x16 window[kTaps ? kTaps : kMaxTaps];
  for (int t = 0; t < taps - 1; ++t) window[t] = at(state + (accepted - 1 + t) * args.channels);
  for (int t = 1; t < taps - 1; ++t) put(state + (t - 1) * args.channels, window[t]);

  S* column_out = state + (taps - 2) * args.channels;
  const X* x = static_cast<const X*>(args.x.data) + first * args.x.stride + c;
  alignas(64) float y[kBlock];
  for (int64_t n = first; n < last; ++n) {
    const F32x16 newest = at(x);
    F32x16 sum = start;
    for (int t = 0; t < taps - 1; ++t) sum = conv_tap(sum, weight[t], window[t]);
    sum = conv_tap(sum, weight[taps - 1], newest);
    if (args.silu) {
      store(y, sum);
      for (float& v : y) v = dflash::silu(v);
      sum = load(y);
    }
    put(out, sum);
    // a later row reads the value as the state would have kept it
    const F32x16 kept = stored<S>(newest);
    put(column_out, kept);
    for (int t = 0; t + 2 < taps; ++t) window[t] = window[t + 1];
    window[taps - 2] = kept;
    x += args.x.stride;
    out += args.channels;
    column_out += args.channels;
  }
}

template <class X, class S>
void conv_blocks(const ConvArgs& args, int64_t blocks, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t s = i / blocks, c = i % blocks * kBlock;
    if (args.cu_seqlens[s] == args.cu_seqlens[s + 1]) continue;
    const int count = int(std::min<int64_t>(kBlock, args.channels - c));
    if (args.taps == 4)
      conv_block<X, S, 4>(args, s, c, count);
    else
      conv_block<X, S, 0>(args, s, c, count);
  }
}

}  // namespace

void ssm_conv_step(const ConvArgs& args) {
  if (args.rows == 0 || args.channels == 0) return;
  const int64_t covered = args.cu_seqlens[args.sequences];
  memset(args.out + covered * args.channels, 0,
         size_t(args.rows - covered) * size_t(args.channels) * sizeof(float));
  const int64_t blocks = ceil_div<int64_t>(args.channels, kBlock);
  const int64_t grain = std::max<int64_t>(
      1, 512 * args.sequences / std::max<int64_t>(1, covered));  // 512 row-blocks a piece
  parallel_for(args.sequences * blocks, grain, [&](int64_t begin, int64_t end) {
    with_type(args.x.type, [&]<class X>() {
      with_type(args.state_type, [&]<class S>() { conv_blocks<X, S>(args, blocks, begin, end); });
    });
  });
}

}  // namespace dflash::cpu::DFLASH_ISA
