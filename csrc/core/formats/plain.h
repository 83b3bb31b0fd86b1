// F32, F16, BF16: values stored as they are, one per quant.
#pragma once
#include "core/formats/format.h"

namespace dflash {

struct F32 {
  static constexpr int kType = 0, kElems = 1, kBytes = 4;

  DFLASH_HD static float value(const uint8_t* quant) { return bit_cast<float>(load_u32(quant)); }
};

struct F16 {
  static constexpr int kType = 1, kElems = 1, kBytes = 2;

  DFLASH_HD static float value(const uint8_t* quant) { return load_half(quant); }
};

struct BF16 {
  static constexpr int kType = 30, kElems = 1, kBytes = 2;

  DFLASH_HD static float value(const uint8_t* quant) {
    return bf16_bits_to_float(uint16_t(load_u16(quant)));
  }
};

}  // namespace dflash
