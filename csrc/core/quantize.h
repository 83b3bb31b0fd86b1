// The search for scales behind `quantize`. A scale is good when the plain squared error of its
// values is small; every weight counts alike.
//
// V holds one float of each of several groups, one a lane (cpu/lane_floats.h: sixteen), and groups
// never meet: add, sub, mul, div, fma, min, max, round_even, select_less and splat are found beside
// V. select_less(a, b, yes, no) is `a < b ? yes : no`, splat(v, x) a V of the constant x.
//
// A format stores few scales: integers times a half for 256 values. So a continuous fit only finds
// the neighbourhood, and what is compared in the end are scales that can be stored, by the error
// of the very values that `dequantize` will give.
#pragma once
#include "core/formats/grids.h"
#include "core/numeric.h"

namespace dflash {

// What is below 2^-40 counts as zero: no scale is under 2^-24, and squares must not vanish.
constexpr float kVanishing = 9.094947017729282e-13f;

// A grid says which codes there are: nearest(y) is the value of the code for y = x / step. The
// rungs of its ladder are the places a group's extreme is tried at; beyond the last code it is cut
// off.
template <int kLow, int kHigh>
struct UniformGrid {
  static constexpr int kRungs = 13;

  static constexpr float ladder(int i) { return kLow * (0.82f + 0.045f * float(i)); }

  template <class V>
  DFLASH_HD static V nearest(V y) {
    return max(min(round_even(y), splat(y, float(kHigh))), splat(y, float(kLow)));
  }
};

struct Iq4Grid {
  static constexpr int kRungs = 12;

  // both ways around: the two ends are not alike
  static constexpr float ladder(int i) {
    return (i % 2 ? 113.f : -127.f) * (0.84f + 0.06f * float(i / 2));
  }

  template <class V>
  DFLASH_HD static V nearest(V y) {
    V value = splat(y, float(iq4_value(0)));
    for (int i = 1; i < 16; ++i) {
      const float edge = 0.5f * float(iq4_value(i - 1) + iq4_value(i));
      value = select_less(splat(y, edge), y, splat(y, float(iq4_value(i))), value);
    }
    return value;
  }
};

// To the nearest integer, halves away from zero.
template <class V>
DFLASH_HD V round_away(V y) {
  const V none = splat(y, 0.f), one = splat(y, 1.f);
  const V size = max(y, sub(none, y)), even = round_even(size);
  const V r = select_less(sub(size, even), splat(y, 0.5f), even, add(even, one));
  return select_less(y, none, sub(none, r), r);
}

// 1 / step; 0 for a step of 0, which makes every code 0.
template <class V>
DFLASH_HD V inverse(V step) {
  const V none = splat(step, 0.f), size = max(step, sub(none, step));
  return select_less(none, size, div(splat(step, 1.f), step), none);
}

// The value of largest magnitude, the first of equals.
template <class V>
DFLASH_HD V extreme(const V* x, int n) {
  V found = x[0], size = max(x[0], sub(splat(x[0], 0.f), x[0]));
  for (int i = 1; i < n; ++i) {
    const V magnitude = max(x[i], sub(splat(x[i], 0.f), x[i]));
    found = select_less(size, magnitude, x[i], found);
    size = max(size, magnitude);
  }
  return found;
}

// Squared error of x[0 .. n) as step * code.
template <class Grid, class V>
DFLASH_HD V step_error(const V* x, int n, V step) {
  const V inv = inverse(step);
  V sum = splat(step, 0.f);
  for (int i = 0; i < n; ++i) {
    const V e = sub(x[i], mul(step, Grid::nearest(mul(x[i], inv))));
    sum = fma(e, e, sum);
  }
  return sum;
}

// The least-squares step of x[0 .. n) on a grid. For fixed codes q the best step is (x q) / (q q),
// and it takes (x q)^2 / (q q) off the squared error; the codes are those that the extreme makes at
// each rung of the ladder.
template <class Grid, class V>
DFLASH_HD V fit_step(const V* x, int n) {
  const V none = splat(x[0], 0.f);
  const V per_extreme = inverse(extreme(x, n));
  V best = none, best_gain = none;
  for (int rung = 0; rung < Grid::kRungs; ++rung) {
    const V inv = mul(per_extreme, splat(none, Grid::ladder(rung)));
    V xq = none, qq = none;
    for (int i = 0; i < n; ++i) {
      const V q = Grid::nearest(mul(x[i], inv));
      xq = fma(x[i], q, xq);
      qq = fma(q, q, qq);
    }
    const V step = mul(xq, inverse(qq)), gain = mul(xq, step);
    best = select_less(best_gain, gain, step, best);
    best_gain = max(best_gain, gain);
  }
  return best;
}

// x ~ step * code - offset, codes 0 .. kMax, offset >= 0.
template <class V>
struct StepOffset {
  V step, offset;
};

template <int kMax, class V>
DFLASH_HD V code_above(V x, V offset, V inv) {
  const V y = round_even(mul(add(x, offset), inv));
  return max(min(y, splat(x, float(kMax))), splat(x, 0.f));
}

template <int kMax, class V>
DFLASH_HD V step_offset_error(const V* x, int n, V step, V offset) {
  const V inv = inverse(step);
  V sum = splat(step, 0.f);
  for (int i = 0; i < n; ++i) {
    const V e = sub(x[i], sub(mul(step, code_above<kMax>(x[i], offset, inv)), offset));
    sum = fma(e, e, sum);
  }
  return sum;
}

// The least-squares step and offset of x[0 .. n): codes from a ladder of ranges inside that of the
// values, then the line through (code, x); where it would cross above 0, the one through 0.
template <int kMax, class V>
DFLASH_HD StepOffset<V> fit_step_offset(const V* x, int n) {
  const V none = splat(x[0], 0.f), count = splat(x[0], float(n));
  V low = none, high = x[0], sum_x = none;
  for (int i = 0; i < n; ++i) {
    low = min(low, x[i]);
    high = max(high, x[i]);
    sum_x = add(sum_x, x[i]);
  }
  // five widths, three places of the lower end
  const V range = sub(high, low);
  StepOffset<V> best{none, sub(none, low)};
  V best_gain = none;
  for (int rung = 0; rung < 15; ++rung) {
    const V inset = mul(range, splat(none, 0.02f * float(rung % 3)));
    const V inv = mul(inverse(range), splat(none, float(kMax) * (0.94f + 0.05f * float(rung / 3))));
    const V offset = sub(none, add(low, inset));
    V q1 = none, q2 = none, xq = none;
    for (int i = 0; i < n; ++i) {
      const V q = code_above<kMax>(x[i], offset, inv);
      q1 = add(q1, q);
      q2 = fma(q, q, q2);
      xq = fma(x[i], q, xq);
    }
    // the line's gain over 0 is step (x q) - offset (x 1); equal codes have no line
    const V det = sub(mul(count, q2), mul(q1, q1)), inv_det = inverse(det);
    V below = mul(sub(mul(q1, xq), mul(q2, sum_x)), inv_det);
    below = select_less(none, det, below, splat(none, -1.f));
    V step = mul(sub(mul(count, xq), mul(sum_x, q1)), inv_det);
    step = max(select_less(below, none, mul(xq, inverse(q2)), step), none);
    below = max(below, none);
    const V gain = sub(mul(step, xq), mul(below, sum_x));
    best.step = select_less(best_gain, gain, step, best.step);
    best.offset = select_less(best_gain, gain, below, best.offset);
    best_gain = max(best_gain, gain);
  }
  return best;
}

}  // namespace dflash
