// Floats to quants, compiled once per instruction set. The values that share a scale are a lane, so
// that no sum crosses lanes, and both instruction sets and any number of threads give equal bytes.
#include "core/formats/all.h"
#include "core/quantize.h"
#include "cpu/lane_floats.h"
#include "cpu/quantize.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

constexpr int kBatch = 16;  // groups at a time

struct alignas(64) Lanes {
  float lane[kBatch];

  Lanes() = default;
  DFLASH_VECTOR explicit Lanes(F32x16 v) { store(lane, v); }
};

// Quants of a batch: values in, bytes (zeros before) out. Short batches are filled up with zeros.
struct Batch {
  const F32x16* x;  // [values of a group]: lane g is group g
  uint8_t* quants;
  int64_t count;
};

// A half near `wanted` that is not much below it: where halves are coarse, the codes must still
// reach what they are for. Never 0 unless `wanted` is.
uint32_t scale_bits(float wanted) {
  const float size = fabsf(wanted);
  uint32_t bits = float_to_half_bits(size);
  if (half_bits_to_float(uint16_t(bits)) < size * 0.999f) ++bits;
  return bits | (wanted < 0.f ? 0x8000u : 0u);
}

// The best integer scale of each lane, of those within `around` of the fitted step.
template <class Grid, int kLow, int kHigh>
DFLASH_INLINE F32x16 best_scale(const F32x16* x, int n, F32x16 d, F32x16 step, int around) {
  const F32x16 low = set1(kLow), high = set1(kHigh);
  const F32x16 centre = round_even(mul(step, inverse(d)));
  F32x16 best = zero(), least = set1(std::numeric_limits<float>::infinity());
  for (int delta = -around; delta <= around; ++delta) {
    const F32x16 scale = max(min(add(centre, set1(float(delta))), high), low);
    const F32x16 error = step_error<Grid>(x, n, mul(d, scale));
    best = select_less(error, least, scale, best);
    least = min(error, least);
  }
  return best;
}

// Codes of every lane to the quants; F's own groups may be shorter than a lane.
template <class F, class Codes>
DFLASH_INLINE void put_codes(const Batch& b, int lane_values, Codes codes) {
  Lanes q[32];
  for (int i = 0; i < lane_values; ++i) store(q[i].lane, codes(b.x[i]));
  const int lanes = F::kElems / lane_values;
  for (int64_t l = 0; l < b.count * lanes; ++l) {
    uint8_t* quant = b.quants + l / lanes * F::kBytes;
    const int first = int(l % lanes) * lane_values;
    for (int i = 0; i < lane_values; ++i)
      F::put(quant, (first + i) / F::kGroup, (first + i) % F::kGroup, int(q[i].lane[l]));
  }
}

// A half for the quant, a signed integer for each of its groups (Q6_K, IQ4_XS).
template <class F, class Grid, int kValues, int kLow, int kHigh, int kAround>
void signed_scales(const Batch& b, int half_at) {
  constexpr int kGroups = F::kElems / kValues;
  const F32x16 step = fit_step<Grid>(b.x, kValues);
  const Lanes steps(step);
  Lanes d;
  for (int first = 0; first < kBatch; first += kGroups) {
    float top = 0.f;
    for (int g = 0; g < kGroups; ++g)
      if (fabsf(steps.lane[first + g]) > fabsf(top)) top = steps.lane[first + g];
    const uint32_t bits = scale_bits(top / float(kLow));
    if (first < b.count * kGroups)
      store_u16(b.quants + first / kGroups * F::kBytes + half_at, bits);
    for (int g = 0; g < kGroups; ++g) d.lane[first + g] = half_bits_to_float(uint16_t(bits));
  }
  const F32x16 half = load(d.lane);
  const F32x16 scale = best_scale<Grid, kLow, kHigh>(b.x, kValues, half, step, kAround);
  const Lanes scales(scale);
  for (int64_t g = 0; g < b.count * kGroups; ++g)
    F::put_scale(b.quants + g / kGroups * F::kBytes, int(g % kGroups), int(scales.lane[g]));
  const F32x16 inv = inverse(mul(half, scale));
  put_codes<F>(b, kValues, [inv](F32x16 x) __attribute__((always_inline)) {
    return Grid::nearest(mul(x, inv));
  });
}

// Two halves for the quant, a scale and a min of six bits for each of its groups (Q4_K, Q5_K).
template <class F, int kMax, int kAround>
void scales_and_mins(const Batch& b) {
  constexpr int kValues = 32, kGroups = F::kElems / kValues, kMost = 63;
  const auto fit = fit_step_offset<kMax>(b.x, kValues);
  const Lanes steps(fit.step), offsets(fit.offset);
  Lanes d, dmin;
  for (int first = 0; first < kBatch; first += kGroups) {
    float step = 0.f, offset = 0.f;
    for (int g = 0; g < kGroups; ++g) {
      step = std::max(step, steps.lane[first + g]);
      offset = std::max(offset, offsets.lane[first + g]);
    }
    const uint32_t bits = scale_bits(step / kMost), min_bits = scale_bits(offset / kMost);
    if (first < b.count * kGroups) {
      uint8_t* quant = b.quants + first / kGroups * F::kBytes;
      store_u16(quant, bits);
      store_u16(quant + 2, min_bits);
    }
    for (int g = 0; g < kGroups; ++g) {
      d.lane[first + g] = half_bits_to_float(uint16_t(bits));
      dmin.lane[first + g] = half_bits_to_float(uint16_t(min_bits));
    }
  }
  const F32x16 half = load(d.lane), half_min = load(dmin.lane), most = set1(kMost);
  const F32x16 near_scale = round_even(mul(fit.step, inverse(half)));
  const F32x16 near_min = round_even(mul(fit.offset, inverse(half_min)));
  F32x16 scale = zero(), low = zero(), least = set1(std::numeric_limits<float>::infinity());
  for (int i = -kAround; i <= kAround; ++i) {
    const F32x16 s = max(min(add(near_scale, set1(float(i))), most), zero());
    for (int j = -kAround; j <= kAround; ++j) {
      const F32x16 m = max(min(add(near_min, set1(float(j))), most), zero());
      const F32x16 error = step_offset_error<kMax>(b.x, kValues, mul(half, s), mul(half_min, m));
      scale = select_less(error, least, s, scale);
      low = select_less(error, least, m, low);
      least = min(error, least);
    }
  }
  const Lanes scales(scale), lows(low);
  for (int64_t g = 0; g < b.count * kGroups; ++g)
    put_scale_min(b.quants + g / kGroups * F::kBytes + 4, int(g % kGroups), int(scales.lane[g]),
                  int(lows.lane[g]));
  const F32x16 offset = mul(half_min, low), inv = inverse(mul(half, scale));
  put_codes<F>(b, kValues, [offset, inv](F32x16 x) __attribute__((always_inline)) {
    return code_above<kMax>(x, offset, inv);
  });
}

// A half of its own for every group (Q4_0). The extreme over the lowest code is ggml's choice: it
// stays a candidate, so that values which are already of this type come back as they were.
void own_halves(const Batch& b) {
  using F = Q4_0;
  using Grid = UniformGrid<-8, 7>;
  const F32x16 fits[] = {mul(extreme(b.x, F::kElems), set1(-0.125f)),
                         fit_step<Grid>(b.x, F::kElems)};
  F32x16 best = zero(), least = set1(std::numeric_limits<float>::infinity());
  for (const F32x16& fit : fits) {
    Lanes d(fit);
    for (float& half : d.lane) half = half_bits_to_float(uint16_t(scale_bits(half)));
    const F32x16 step = load(d.lane), error = step_error<Grid>(b.x, F::kElems, step);
    best = select_less(error, least, step, best);
    least = min(error, least);
  }
  const Lanes d(best);
  for (int64_t n = 0; n < b.count; ++n)
    store_u16(b.quants + n * F::kBytes, float_to_half_bits(d.lane[n]));
  const F32x16 inv = inverse(best);
  put_codes<F>(b, F::kElems, [inv](F32x16 x) __attribute__((always_inline)) {
    return Grid::nearest(mul(x, inv));
  });
}

// ggml's own rounding, byte for byte: the codes are those of the scale before it became a half.
void bytes(const float* x, uint8_t* quant) {
  F32x16 size = zero();
  for (int i = 0; i < 32; i += 16) size = max(size, max(load(x + i), sub(zero(), load(x + i))));
  const Lanes sizes(size);
  const float most = *std::max_element(sizes.lane, sizes.lane + 16);
  const float d = most / 127.f;
  store_u16(quant, float_to_half_bits(d));
  const F32x16 inv = set1(d > 0.f ? 1.f / d : 0.f);
  Lanes codes[2];
  for (int i = 0; i < 32; i += 16) store(codes[i / 16].lane, round_away(mul(load(x + i), inv)));
  for (int i = 0; i < 32; ++i) quant[2 + i] = uint8_t(int8_t(codes[i / 16].lane[i % 16]));
}

// Values of a lane, for the formats whose scales are searched.
template <class F>
constexpr int kLaneValues = std::is_same_v<F, Q6_K> ? 16 : 32;

void encode(const Batch& b, Q4_0) {
  own_halves(b);
}
void encode(const Batch& b, Q4_K) {
  scales_and_mins<Q4_K, 15, 2>(b);
}
void encode(const Batch& b, Q5_K) {
  scales_and_mins<Q5_K, 31, 2>(b);
}
void encode(const Batch& b, Q6_K) {
  signed_scales<Q6_K, UniformGrid<-32, 31>, 16, -128, 127, 3>(b, 208);
}
void encode(const Batch& b, IQ4_XS) {
  signed_scales<IQ4_XS, Iq4Grid, 32, -32, 31, 1>(b, 0);
}

// n values as floats, the vanishing ones as zeros. Returns the bits of the largest magnitude: as
// integers those are ordered like the values, with infinity and then NaN on top.
template <class T>
uint32_t read_values(const T* x, int n, float* out) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    const uint32_t size = bit_cast<uint32_t>(value) & 0x7fffffffu;
    most = most > size ? most : size;
    out[i] = size < bit_cast<uint32_t>(kVanishing) ? 0.f : value;
  }
  return most;
}

// Quant n of the call as floats; false if one of them cannot be stored.
template <class F>
bool read_quant(const QuantizeCall& c, int64_t n, float* out) {
  const int64_t per_row = c.columns / F::kElems, at = n % per_row * F::kElems;
  const uint8_t* row = c.x + n / per_row * c.row_bytes;
  uint32_t most = 0;
  with_type(c.x_type, [&]<class T>() {
    most = read_values(reinterpret_cast<const T*>(row) + at, F::kElems, out);
  });
  return most <= bit_cast<uint32_t>(c.largest);
}

// The lowest row that was reported, by any thread.
class LowestRow {
 public:
  explicit LowestRow(int64_t none) : row_(none) {}

  void lower(int64_t row) {
    int64_t seen = row_.load();
    while (row < seen && !row_.compare_exchange_weak(seen, row)) {
    }
  }
  int64_t get() const { return row_.load(); }

 private:
  std::atomic<int64_t> row_;
};

template <class F>
int64_t quantize_as(const QuantizeCall& c) {
  constexpr int kValues = kLaneValues<F>, kLanes = F::kElems / kValues;
  constexpr int kQuants = std::is_same_v<F, Q8_0> ? 16 : kBatch / kLanes;
  const int64_t per_row = c.columns / F::kElems, quants = c.rows * per_row;
  LowestRow bad(c.rows);
  // a batch takes 1 to 20 us
  parallel_for(ceil_div<int64_t>(quants, kQuants), 16, [&](int64_t begin, int64_t end) {
    alignas(64) float values[F::kElems];
    Lanes lanes[kValues] = {};
    for (int64_t batch = begin; batch < end; ++batch) {
      const int64_t first = batch * kQuants, count = std::min<int64_t>(kQuants, quants - first);
      uint8_t* out = c.out + first * F::kBytes;
      memset(out, 0, size_t(count * F::kBytes));
      for (int64_t n = 0; n < count; ++n) {
        if (!read_quant<F>(c, first + n, values)) bad.lower((first + n) / per_row);
        if constexpr (std::is_same_v<F, Q8_0>)
          bytes(values, out + n * F::kBytes);
        else
          for (int i = 0; i < F::kElems; ++i)
            lanes[i % kValues].lane[n * kLanes + i / kValues] = values[i];
      }
      if constexpr (!std::is_same_v<F, Q8_0>) {
        F32x16 x[kValues];
        for (int i = 0; i < kValues; ++i) x[i] = load(lanes[i].lane);
        encode({x, out, count}, F{});
      }
    }
  });
  return bad.get();
}

}  // namespace

int64_t quantize(const QuantizeCall& c) {
  switch (c.type) {
#define DFLASH_QUANTIZED(F, largest) \
  case F::kType:                     \
    return quantize_as<F>(c);
#include "core/formats/quantized.def"
#undef DFLASH_QUANTIZED
  }
  return 0;  // the plan knows the types
}

}  // namespace dflash::cpu::DFLASH_ISA
