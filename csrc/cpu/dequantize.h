// Rows of any format to float32, for CPU kernels that read weights without a layout of their own.
#pragma once
#include <cstdint>

namespace dflash::cpu {

// Decodes `count` consecutive quants: out[count * kElems].
using Decoder = void (*)(const uint8_t* quants, int64_t count, float* out);

// The decoder of a ggml type. The type is known: operators check it with check_format().
Decoder decoder(int64_t type);

// One row of packed bytes, a whole number of quants: out[columns].
void decode_row(int64_t type, const uint8_t* row, int64_t columns, float* out);

}  // namespace dflash::cpu
