// One row of a vocabulary by one thread block: probabilities and draws, every sum in the order of
// core/sampling.h.
#pragma once
#include "core/sampling.h"
#include "gpu/warp.cuh"

namespace dflash::gpu {

constexpr int kRowThreads = 512;
constexpr int64_t kNoToken = -1, kNoMass = -2;

struct RowShared {
  unsigned long long histogram[kBuckets];
  float chunk[kDrawChunk];
  float lane[kRowThreads / kLanes];
  int64_t index;
  float value;
  int flag;
};

// A value of thread 0 for the whole block.
template <class T>
__device__ T broadcast(T* shared, T value) {
  __syncthreads();
  if (threadIdx.x == 0) *shared = value;
  __syncthreads();
  return *shared;
}

__device__ inline bool any(RowShared& s, bool mine) {
  broadcast(&s.flag, 0);
  if (mine) s.flag = 1;
  __syncthreads();
  return s.flag != 0;
}

__device__ inline float largest(RowShared& s, const float* x, int64_t n) {
  float top = bit_cast<float>(0xff800000u);
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) top = x[i] > top ? x[i] : top;
  top = max_lanes(top);
  __syncthreads();
  if (threadIdx.x % kLanes == 0) s.lane[threadIdx.x / kLanes] = top;
  __syncthreads();
  top = s.lane[0];
  for (int w = 1; w < kRowThreads / kLanes; ++w) top = s.lane[w] > top ? s.lane[w] : top;
  return top;
}

__device__ inline int64_t first_equal(RowShared& s, const float* x, int64_t n, float value) {
  broadcast(&s.index, n);
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads)
    if (x[i] == value) {
      atomicMin(reinterpret_cast<long long*>(&s.index), (long long)(i));
      break;
    }
  __syncthreads();
  return s.index;
}

// sums[leaf] of p over n entries.
template <class P>
__device__ void leaf_sums(const P& p, int64_t n, float* sums) {
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t leaves = ceil_div<int64_t>(n, kLeaf);
  for (int64_t l = warp; l < leaves; l += kRowThreads / kLanes) {
    const int64_t begin = l * kLeaf, size = n - begin < kLeaf ? n - begin : kLeaf;
    const float total = warp_sum_leaf([&](int64_t e) { return p(begin + e); }, size);
    if (lane == 0) sums[l] = total;
  }
  __syncthreads();
}

// core/reduce.h's Tree over leaves that all of the block sees, level by level: a node without a
// neighbour joins where it would have been joined from the right. The leaves are lost.
__device__ inline float join_leaves(float* leaf, int64_t leaves) {
  for (int64_t m = leaves; m > 1; m = (m + 1) / 2)
    for (int64_t base = 0; 2 * base < m; base += kRowThreads) {
      const int64_t i = base + threadIdx.x;
      float node = 0.f;
      if (2 * i < m) node = 2 * i + 1 < m ? leaf[2 * i] + leaf[2 * i + 1] : leaf[2 * i];
      __syncthreads();
      if (2 * i < m) leaf[i] = node;
      __syncthreads();
    }
  const float total = leaf[0];
  __syncthreads();
  return total;
}

__device__ inline void normalise(float* p, int64_t n, float* sums) {
  __syncthreads();
  leaf_sums([p](int64_t i) { return p[i]; }, n, sums);
  const float total = join_leaves(sums, ceil_div<int64_t>(n, kLeaf));
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) p[i] = p[i] / total;
  __syncthreads();
}

// Keeps x[i] where key(i) is inside the descending selection that reaches `target`, else `outside`.
template <class Key, class Weight>
__device__ void keep(RowShared& s, int64_t n, uint64_t target, const Key& key, const Weight& weight,
                     float* x, float outside = 0.f) {
  Cut cut = {0, 0};
  uint64_t each = 0;
  for (int digit = 0; digit < kDigits; ++digit) {
    for (int b = threadIdx.x; b < kBuckets; b += kRowThreads) s.histogram[b] = 0;
    __syncthreads();
    const uint32_t prefix = digit_prefix(cut.key, digit);
    for (int64_t i = threadIdx.x; i < n; i += kRowThreads) {
      const uint32_t k = key(i);
      if (digit_prefix(k, digit) == prefix)
        atomicAdd(&s.histogram[digit_of(k, digit)], (unsigned long long)(weight(i)));
    }
    __syncthreads();
    // every thread walks the same histogram to the same digit
    static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
    cut.key |= cut_digit(reinterpret_cast<const uint64_t*>(s.histogram), target, &cut.before)
               << digit_shift(digit);
    __syncthreads();
  }
  // the weight of one id at the cut, and how many there are
  broadcast(&s.index, int64_t(0));
  unsigned long long* equal = reinterpret_cast<unsigned long long*>(&s.index);
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads)
    if (key(i) == cut.key) {
      atomicAdd(equal, 1ull);
      s.histogram[0] = weight(i);  // the same for all of them
    }
  __syncthreads();
  const uint64_t count = uint64_t(s.index);
  each = count > 0 ? uint64_t(s.histogram[0]) : 0;
  const uint64_t ties = cut_ties(target, cut.before, each);
  __syncthreads();
  uint64_t seen = 0;  // equal ids in front of this round
  for (int64_t base = 0; base < n; base += kRowThreads) {
    const int64_t i = base + threadIdx.x;
    const uint32_t k = i < n ? key(i) : 0;
    bool drop = i < n && k < cut.key;
    if (count > ties) {
      s.chunk[threadIdx.x] = i < n && k == cut.key ? 1.f : 0.f;
      __syncthreads();
      uint64_t rank = seen;
      for (int j = 0; j < int(threadIdx.x); ++j) rank += s.chunk[j] != 0.f;
      drop = drop || (s.chunk[threadIdx.x] != 0.f && rank >= ties);
      for (int j = 0; j < kRowThreads; ++j) seen += s.chunk[j] != 0.f;
      __syncthreads();
    }
    if (drop) x[i] = outside;
  }
  __syncthreads();
}

// core/sampling.h's probabilities of one row; false (and NaN everywhere) for a row or a setting
// that the CPU refuses.
__device__ inline bool row_probs(RowShared& s, const float* x, int64_t n, float temperature,
                                 int64_t top_k, float top_p, float* p, float* sums) {
  const float infinity = bit_cast<float>(0x7f800000u);
  bool bad = !(temperature >= 0.f && temperature < infinity) || top_k < 0 ||
             !(top_p > 0.f && top_p <= 1.f);
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) bad = bad || !(x[i] < infinity);
  bad = any(s, bad);
  const float top = largest(s, x, n);
  if (bad || top == -infinity) {
    for (int64_t i = threadIdx.x; i < n; i += kRowThreads) p[i] = bit_cast<float>(0x7fc00000u);
    __syncthreads();
    return false;
  }
  if (temperature == 0.f) {
    const int64_t chosen = first_equal(s, x, n, top);
    for (int64_t i = threadIdx.x; i < n; i += kRowThreads) p[i] = i == chosen ? 1.f : 0.f;
    __syncthreads();
    return true;
  }
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads)
    p[i] = softmax_term(x[i], top, temperature);
  __syncthreads();
  if (top_k > 0 && top_k < n)
    keep(
        s, n, uint64_t(top_k), [x](int64_t i) { return order_key(x[i]); },
        [](int64_t) { return uint64_t(1); }, p);
  normalise(p, n, sums);
  if (top_p < 1.f) {
    keep(
        s, n, mass_target(top_p), [p](int64_t i) { return bit_cast<uint32_t>(p[i]); },
        [p](int64_t i) { return mass(p[i]); }, p);
    normalise(p, n, sums);
  }
  return true;
}

// core/sampling.h's draw_in_chunk() of [size], eight values at a time: the sums are the same chain
// of additions (of 0 where nothing can be drawn), only looked at later.
__device__ inline int64_t draw_ahead(const float* p, int size, double running, double threshold) {
  constexpr int kAhead = 8;
  int last = -1;
  for (int base = 0; base < size; base += kAhead) {
    float value[kAhead];
    double sum[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float v = base + j < size ? p[base + j] : 0.f;
      value[j] = v > 0.f ? v : 0.f;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) sum[j] = running = running + double(value[j]);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (!(value[j] > 0.f)) continue;
      last = base + j;
      if (sum[j] > threshold) return last;
    }
  }
  return last;
}

// The id that u falls on, of leaves that were summed; kNoMass.
template <class P>
__device__ int64_t draw_of_leaves(RowShared& s, const P& p, int64_t n, float u, const float* sums) {
  // every thread finds the chunk: the sums are few
  const int64_t chunks = ceil_div<int64_t>(n, kDrawChunk);
  double total = 0.;
  for (int64_t c = 0; c < chunks; ++c) total += double(sums[c]);
  if (!(total > 0. && total <= 3.4028234663852886e38)) return kNoMass;
  const double threshold = double(u) * total;
  double running = 0.;
  int64_t chunk = 0;
  while (chunk + 1 < chunks && !(running + double(sums[chunk]) > threshold))
    running += double(sums[chunk++]);
  const int64_t begin = chunk * kDrawChunk;
  const int64_t size = n - begin < kDrawChunk ? n - begin : kDrawChunk;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < size; i += kRowThreads) s.chunk[i] = p(begin + i);
  __syncthreads();
  int64_t id = kNoToken;
  if (threadIdx.x == 0) id = begin + draw_ahead(s.chunk, int(size), running, threshold);
  return broadcast(&s.index, id);
}

// The same of a row; kNoToken for a value that is no probability or no uniform.
template <class P>
__device__ int64_t draw(RowShared& s, const P& p, int64_t n, float u, float* sums) {
  bool bad = !(u >= 0.f && u < 1.f);
  for (int64_t i = threadIdx.x; i < n; i += kRowThreads) bad = bad || !(p(i) >= 0.f);
  if (any(s, bad)) return kNoToken;
  leaf_sums(p, n, sums);
  return draw_of_leaves(s, p, n, u, sums);
}

constexpr float kBadLeaf = -1.f;  // holds a value that is no probability

// One leaf of a row by one warp, as draw() checks and sums it.
template <class P>
__device__ void checked_leaf(const P& p, int64_t n, int64_t leaf, float* sums) {
  const int64_t begin = leaf * kLeaf, size = n - begin < kLeaf ? n - begin : kLeaf;
  bool bad = false;
  const float sum = warp_sum_leaf(
      [&](int64_t e) {
        const float value = p(begin + e);
        bad = bad || !(value >= 0.f);
        return value;
      },
      size);
  bad = any_lane(bad);
  if (lane_id() == 0) sums[leaf] = bad ? kBadLeaf : sum;
}

// draw() of leaves from checked_leaf().
template <class P>
__device__ int64_t draw_checked(RowShared& s, const P& p, int64_t n, float u, const float* sums) {
  bool bad = !(u >= 0.f && u < 1.f);
  for (int64_t l = threadIdx.x; l < ceil_div<int64_t>(n, kLeaf); l += kRowThreads)
    bad = bad || sums[l] == kBadLeaf;
  return any(s, bad) ? kNoToken : draw_of_leaves(s, p, n, u, sums);
}

}  // namespace dflash::gpu
