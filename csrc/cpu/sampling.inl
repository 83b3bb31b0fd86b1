// The vocabulary-sized loops of sampling. Included by avx2/ and avx512/sampling.cpp.
#include "core/sampling.h"
#include "cpu/sampling.h"
#include "cpu/simd.h"

namespace dflash::cpu::DFLASH_ISA {
namespace {

// sum_leaf() of core/sampling.h, bit for bit.
float leaf_sum(const float* p, int64_t n) {
  Acc128 sum = zero128();
  int64_t e = 0;
  for (; e + kAccumulators <= n; e += kAccumulators)
    for (int i = 0; i < 8; ++i) sum.acc[i] = add(sum.acc[i], load(p + e + 16 * i));
  if (e < n) {
    alignas(64) float rest[kAccumulators] = {};
    memcpy(rest, p + e, size_t(n - e) * sizeof(float));
    for (int i = 0; i < 8; ++i) sum.acc[i] = add(sum.acc[i], load(rest + 16 * i));
  }
  return fold(sum);
}

float sum(const float* p, int64_t n) {
  Tree<float> tree;
  for (int64_t leaf = 0; leaf < n; leaf += kLeaf)
    tree.push(leaf_sum(p + leaf, std::min<int64_t>(kLeaf, n - leaf)));
  return tree.join();
}

float largest(const float* x, int64_t n) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  F32x16 top[4] = {set1(kLowest), set1(kLowest), set1(kLowest), set1(kLowest)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) top[j] = max(top[j], load(x + i + 16 * j));
  alignas(64) float lane[16];
  store(lane, max(max(top[0], top[1]), max(top[2], top[3])));
  float result = kLowest;
  for (float v : lane) result = v > result ? v : result;
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

int64_t first_equal(const float* x, int64_t n, float value) {
  for (int64_t begin = 0; begin < n; begin += kLeaf) {
    const int64_t end = std::min<int64_t>(begin + kLeaf, n);
    int found = 0;
    for (int64_t i = begin; i < end; ++i) found |= x[i] == value;
    if (!found) continue;
    for (int64_t i = begin; i < end; ++i)
      if (x[i] == value) return i;
  }
  return 0;
}

int64_t arg_max(const float* x, int64_t n) {
  return first_equal(x, n, largest(x, n));
}

// key(i): larger first; weight(i): what is added up until `target`.
template <class Key, class Weight>
Cut find_cut(int64_t n, uint64_t target, const Key& key, const Weight& weight) {
  Cut cut = {0, 0};
  for (int digit = 0; digit < kDigits; ++digit) {
    uint64_t histogram[kBuckets] = {};
    const uint32_t prefix = digit_prefix(cut.key, digit);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t k = key(i);
      if (digit_prefix(k, digit) == prefix) histogram[digit_of(k, digit)] += weight(i);
    }
    cut.key |= cut_digit(histogram, target, &cut.before) << digit_shift(digit);
  }
  return cut;
}

// Sets x[i] to `value` outside the selection.
template <class Key>
void apply_cut(int64_t n, uint32_t cut, uint64_t ties, const Key& key, float value, float* x) {
  uint64_t equal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t k = key(i);
    x[i] = k < cut ? value : x[i];
    equal += k == cut;
  }
  if (equal <= ties) return;
  uint64_t seen = 0;
  for (int64_t i = 0; i < n; ++i)
    if (key(i) == cut && ++seen > ties) x[i] = value;
}

void keep_top(const float* keys, int64_t n, int64_t k, float value, float* x) {
  const auto key = [&](int64_t i) { return order_key(keys[i]); };
  const Cut cut = find_cut(n, uint64_t(k), key, [](int64_t) { return uint64_t(1); });
  apply_cut(n, cut.key, cut_ties(uint64_t(k), cut.before, 1), key, value, x);
}

void keep_nucleus(float* p, int64_t n, float top_p) {
  const auto key = [p](int64_t i) { return bit_cast<uint32_t>(p[i]); };  // p >= 0
  const uint64_t target = mass_target(top_p);
  const Cut cut = find_cut(n, target, key, [p](int64_t i) { return mass(p[i]); });
  const uint64_t each = mass(bit_cast<float>(cut.key));
  apply_cut(n, cut.key, cut_ties(target, cut.before, each), key, 0.f, p);
}

void normalise(float* p, int64_t n) {
  const float total = sum(p, n);
  for (int64_t i = 0; i < n; ++i) p[i] = p[i] / total;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

RowStatus check_row(const float* x, int64_t n) {
  int bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(x[i] < kInfinity);
  if (bad) return RowStatus::kNotFinite;
  return largest(x, n) == -kInfinity ? RowStatus::kAllMinusInfinity : RowStatus::kOk;
}

RowStatus probs_row(const float* x, int64_t n, float temperature, int64_t top_k, float top_p,
                    float* p) {
  const RowStatus status = check_row(x, n);
  if (status != RowStatus::kOk) return status;
  const float top = largest(x, n);
  if (temperature == 0.f) {
    memset(p, 0, size_t(n) * sizeof(float));
    p[first_equal(x, n, top)] = 1.f;
    return RowStatus::kOk;
  }
  for (int64_t i = 0; i < n; ++i) p[i] = softmax_term(x[i], top, temperature);
  if (top_k > 0 && top_k < n) keep_top(x, n, top_k, 0.f, p);
  normalise(p, n);
  if (top_p < 1.f) {
    keep_nucleus(p, n, top_p);
    normalise(p, n);
  }
  return RowStatus::kOk;
}

int64_t draw(const float* p, int64_t n, float u, float* sums) {
  double total = 0.;
  for (int64_t begin = 0, c = 0; begin < n; begin += kDrawChunk, ++c) {
    const int64_t size = std::min<int64_t>(kDrawChunk, n - begin);
    int bad = 0;
    for (int64_t i = begin; i < begin + size; ++i) bad |= !(p[i] >= 0.f);
    if (bad) return kBadProbability;
    sums[c] = leaf_sum(p + begin, size);
    total += double(sums[c]);
  }
  if (!(total > 0. && total <= double(std::numeric_limits<float>::max()))) return kNoMass;
  const double threshold = double(u) * total;
  double running = 0.;
  for (int64_t begin = 0, c = 0; begin < n; begin += kDrawChunk, ++c) {
    const double next = running + double(sums[c]);
    if (next > threshold)
      return draw_in_chunk([p](int64_t i) { return p[i]; }, begin,
                           std::min<int64_t>(begin + kDrawChunk, n), running, threshold);
    running = next;
  }
  return kNoMass;  // unreachable: u < 1, so the last running sum, total, exceeds the threshold
}

}  // namespace

const SamplingKernels kSampling = {probs_row, draw, check_row, arg_max, keep_top};

}  // namespace dflash::cpu::DFLASH_ISA
