// Sixteen floats: one AVX-512 register or two of AVX2. Include it after avx2.h or avx512.h.
//
// Everything here lives in a namespace of its own per instruction set, so that the linker never
// takes one unit's copy for the other.
#pragma once

namespace dflash::cpu::DFLASH_ISA {

#define DFLASH_VECTOR __attribute__((always_inline)) inline
#define DFLASH_INLINE static DFLASH_VECTOR

// Copies are spelled out: left to itself, gcc moves the struct as memory, in halves that a later
// whole load has to wait for.
#ifdef __AVX512F__
struct F32x16 {
  __m512 v;

  F32x16() = default;
  DFLASH_VECTOR F32x16(__m512 a) : v(a) {}
  DFLASH_VECTOR F32x16(const F32x16& a) : v(a.v) {}
  DFLASH_VECTOR F32x16& operator=(const F32x16& a) {
    v = a.v;
    return *this;
  }
};
DFLASH_INLINE F32x16 set1(float x) {
  return {_mm512_set1_ps(x)};
}
DFLASH_INLINE F32x16 load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
DFLASH_INLINE void store(float* p, F32x16 a) {
  _mm512_storeu_ps(p, a.v);
}
DFLASH_INLINE F32x16 add(F32x16 a, F32x16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
DFLASH_INLINE F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
DFLASH_INLINE F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
DFLASH_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
DFLASH_INLINE F32x16 max(F32x16 a, F32x16 b) {
  return {_mm512_max_ps(a.v, b.v)};
}
template <int kImm>
DFLASH_INLINE F32x16 shuffle(F32x16 a, F32x16 b) {
  return {_mm512_shuffle_ps(a.v, b.v, kImm)};
}
// Quarters q of four floats: swaps q with q^2, with q^1.
DFLASH_INLINE F32x16 swap_halves(F32x16 a) {
  return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
}
DFLASH_INLINE F32x16 swap_quarters(F32x16 a) {
  return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
}
DFLASH_INLINE float first(F32x16 a) {
  return _mm512_cvtss_f32(a.v);
}
#else
struct F32x16 {
  __m256 lo, hi;

  F32x16() = default;
  DFLASH_VECTOR F32x16(__m256 a, __m256 b) : lo(a), hi(b) {}
  DFLASH_VECTOR F32x16(const F32x16& a) : lo(a.lo), hi(a.hi) {}
  DFLASH_VECTOR F32x16& operator=(const F32x16& a) {
    lo = a.lo;
    hi = a.hi;
    return *this;
  }
};
DFLASH_INLINE F32x16 set1(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
DFLASH_INLINE F32x16 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
DFLASH_INLINE void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
DFLASH_INLINE F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
DFLASH_INLINE F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
DFLASH_INLINE F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
DFLASH_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
DFLASH_INLINE F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
template <int kImm>
DFLASH_INLINE F32x16 shuffle(F32x16 a, F32x16 b) {
  return {_mm256_shuffle_ps(a.lo, b.lo, kImm), _mm256_shuffle_ps(a.hi, b.hi, kImm)};
}
DFLASH_INLINE F32x16 swap_halves(F32x16 a) {
  return {a.hi, a.lo};
}
DFLASH_INLINE F32x16 swap_quarters(F32x16 a) {
  return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
}
DFLASH_INLINE float first(F32x16 a) {
  return _mm256_cvtss_f32(a.lo);
}
#endif

DFLASH_INLINE F32x16 zero() {
  return set1(0.f);
}

// Four floats from each pointer.
DFLASH_INLINE F32x16 quarters(const float* a, const float* b, const float* c, const float* d) {
  const __m256 low =
      _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
  const __m256 high =
      _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(c)), _mm_loadu_ps(d), 1);
#ifdef __AVX512F__
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
#else
  return {low, high};
#endif
}

// Transposes the 4x4 that the same quarter of four vectors makes; its own inverse.
DFLASH_INLINE void transpose_quarters(F32x16* v) {
  const F32x16 a = shuffle<0x44>(v[0], v[1]), b = shuffle<0xee>(v[0], v[1]);
  const F32x16 c = shuffle<0x44>(v[2], v[3]), d = shuffle<0xee>(v[2], v[3]);
  v[0] = shuffle<0x88>(a, c);
  v[1] = shuffle<0xdd>(a, c);
  v[2] = shuffle<0x88>(b, d);
  v[3] = shuffle<0xdd>(b, d);
}

// core/reduce.h's 128 accumulators, as eight vectors: acc[i] holds accumulators 16 i .. 16 i + 15.
struct Acc128 {
  F32x16 acc[8];
};

DFLASH_INLINE Acc128 zero128() {
  Acc128 a;
  for (F32x16& v : a.acc) v = zero();
  return a;
}

// fold() of core/reduce.h. After the two shuffled adds, position i of quarter q of `w` holds lane
// 4 i + q (+ 16 for the second); halving the lanes is then w0 + w1, and swaps of i and of q.
DFLASH_INLINE float fold(const Acc128& a) {
  F32x16 w[2];
  for (int half = 0; half < 2; ++half) {
    const F32x16* z = a.acc + 4 * half;
    const F32x16 t0 = add(shuffle<0x88>(z[0], z[1]), shuffle<0xdd>(z[0], z[1]));
    const F32x16 t1 = add(shuffle<0x88>(z[2], z[3]), shuffle<0xdd>(z[2], z[3]));
    w[half] = add(shuffle<0x88>(t0, t1), shuffle<0xdd>(t0, t1));
  }
  F32x16 s = add(w[0], w[1]);
  s = add(s, shuffle<0x4e>(s, s));  // lane ^ 8: i ^ 2
  s = add(s, shuffle<0xb1>(s, s));  // lane ^ 4: i ^ 1
  s = add(s, swap_halves(s));       // lane ^ 2: q ^ 2
  s = add(s, swap_quarters(s));     // lane ^ 1
  return first(s);
}

// One leaf of core/reduce.h's dot(): n <= 1024 elements.
DFLASH_INLINE float dot_leaf(const float* a, const float* b, int64_t n) {
  Acc128 sum = zero128();
  int64_t e = 0;
  for (; e + kAccumulators <= n; e += kAccumulators)
    for (int i = 0; i < 8; ++i)
      sum.acc[i] = fma(load(a + e + 16 * i), load(b + e + 16 * i), sum.acc[i]);
  if (e < n) {  // the rest, padded with zeros: fma(0, 0, x) is x (and -0 never occurs in a sum)
    alignas(64) float pa[kAccumulators] = {}, pb[kAccumulators] = {};
    memcpy(pa, a + e, size_t(n - e) * sizeof(float));
    memcpy(pb, b + e, size_t(n - e) * sizeof(float));
    for (int i = 0; i < 8; ++i) sum.acc[i] = fma(load(pa + 16 * i), load(pb + 16 * i), sum.acc[i]);
  }
  return fold(sum);
}

// dot() of core/reduce.h, bit for bit.
DFLASH_INLINE float dot(const float* a, const float* b, int64_t n) {
  if (n <= kLeaf) return n > 0 ? dot_leaf(a, b, n) : 0.f;
  Tree<float> tree;
  for (int64_t leaf = 0; leaf < n; leaf += kLeaf)
    tree.push(dot_leaf(a + leaf, b + leaf, std::min<int64_t>(kLeaf, n - leaf)));
  return tree.join();
}

}  // namespace dflash::cpu::DFLASH_ISA
