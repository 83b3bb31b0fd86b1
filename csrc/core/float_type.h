// The three float types that tensors come in, without torch: as values, and as an enum for structs
// that cross into a kernel.
#pragma once
#include "core/numeric.h"

namespace dflash {

// IEEE half bits, rounded to nearest even; NaN stays a (quiet) NaN.
DFLASH_HD uint16_t float_to_half_bits(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more
  // below 2^-14: next to 0.5 a float's last place is 2^-24, the unit of a subnormal half
  if (a < 0x38800000u)
    return uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(a) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

struct Half {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

DFLASH_HD float to_float(float x) {
  return x;
}
DFLASH_HD float to_float(Half x) {
  return half_bits_to_float(x.bits);
}
DFLASH_HD float to_float(Bf16 x) {
  return bf16_bits_to_float(x.bits);
}

DFLASH_HD void store_float(float* p, float x) {
  *p = x;
}
DFLASH_HD void store_float(Half* p, float x) {
  p->bits = float_to_half_bits(x);
}
DFLASH_HD void store_float(Bf16* p, float x) {
  p->bits = float_to_bf16_bits(x);
}

// What a later step would read back, had x been stored as a T.
template <class T>
DFLASH_HD float stored(float x) {
  T t;
  store_float(&t, x);
  return to_float(t);
}

enum class FloatType : int32_t { kF32, kF16, kBF16 };

constexpr int64_t bytes_of(FloatType type) {
  return type == FloatType::kF32 ? 4 : 2;
}

// body.operator()<T>() for the type named.
template <class Body>
void with_type(FloatType type, Body&& body) {
  switch (type) {
    case FloatType::kF32:
      return body.template operator()<float>();
    case FloatType::kF16:
      return body.template operator()<Half>();
    case FloatType::kBF16:
      return body.template operator()<Bf16>();
  }
}

// A matrix of any float type; the row stride counts elements, rows are dense.
struct FloatRows {
  const void* data;
  int64_t stride;
  FloatType type;
};

DFLASH_HD float load_float(const void* data, FloatType type, int64_t i) {
  if (type == FloatType::kF32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == FloatType::kF16 ? half_bits_to_float(bits) : bf16_bits_to_float(bits);
}

}  // namespace dflash
