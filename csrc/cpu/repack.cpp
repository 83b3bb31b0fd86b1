#include <torch/csrc/stable/library.h>

#include <atomic>

#include "cpu/parallel.h"
#include "cpu/tile_codes.h"
#include "host/matmul.h"

namespace dflash::cpu {
namespace {

// Tiles a thread claims at once.
constexpr int64_t kGrain = 4;

void fill_with_zeros(uint8_t* from, const uint8_t* end) {
  memset(from, 0, size_t(end - from));
}

}  // namespace

int64_t repack_bytes(int64_t ggml_type, int64_t rows, int64_t columns) {
  constexpr const char* op = "dflash::repack_bytes";
  quant_of(op, ggml_type, columns);
  check_weight_rows(op, rows, columns, 0);
  return repacked_bytes(ggml_type, rows, columns);
}

Tensor repack(const Tensor& packed, int64_t ggml_type, int64_t columns) {
  const auto plan = plan_repack(packed, ggml_type, columns);
  const int64_t bytes = repacked_bytes(ggml_type, plan.rows, columns);
  Tensor out = new_empty(packed, {bytes}, ScalarType::Byte);
  const auto* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const bool tiled = dispatch_tile(ggml_type, [&]<class F>() {
    const int64_t tiles = ceil_div<int64_t>(plan.rows, kTileRows), quants = columns / F::kElems;
    parallel_for(tiles, kGrain, [&](int64_t begin, int64_t end) {
      constexpr uint8_t kZeroQuant[F::kBytes] = {};
      for (int64_t t = begin; t < end; ++t) {
        uint8_t* tile = to + t * Tile<F>::bytes(columns);
        fill_with_zeros(tile, tile + Tile<F>::bytes(columns));  // gaps stay zero
        for (int r = 0; r < kTileRows; ++r) {
          const int64_t row = t * kTileRows + r;
          for (int64_t b = 0; b < quants; ++b)
            put_quant<F>(row < plan.rows ? from + row * plan.row_bytes + b * F::kBytes : kZeroQuant,
                         columns, b, r, tile);
        }
      }
    });
  });
  if (!tiled) {
    const int64_t used = plan.rows * plan.row_bytes;
    memcpy(to, from, size_t(used));
    fill_with_zeros(to + used, to + bytes);
  }
  return out;
}

Tensor unpack(const Tensor& weight, int64_t ggml_type, int64_t rows, int64_t columns) {
  constexpr const char* op = "dflash::unpack";
  const QuantGeometry quant = quant_of(op, ggml_type, columns);
  check_weight_rows(op, rows, columns, 0);
  check_weight(op, weight, repacked_bytes(ggml_type, rows, columns));
  const int64_t row_bytes = columns / quant.elems * quant.bytes;
  Tensor out = new_empty(weight, {rows, row_bytes}, ScalarType::Byte);
  const auto* from = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  std::atomic<bool> valid{true};
  const bool tiled = dispatch_tile(ggml_type, [&]<class F>() {
    parallel_for(rows, kGrain * kTileRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const uint8_t* tile = from + row / kTileRows * Tile<F>::bytes(columns);
        for (int64_t b = 0; b < columns / F::kElems; ++b)
          if (!get_quant<F>(tile, columns, b, int(row % kTileRows),
                            to + row * row_bytes + b * F::kBytes))
            valid = false;
      }
    });
  });
  if (!tiled) memcpy(to, from, size_t(rows * row_bytes));
  STD_TORCH_CHECK(valid, op, ": weight holds a scale beyond 6 bits: it is not ggml type ",
                  ggml_type, " as repack() writes it");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CompositeExplicitAutograd, m) {
  m.impl("repack_bytes", TORCH_BOX(&repack_bytes));
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CPU, m) {
  m.impl("repack", TORCH_BOX(&repack));
  m.impl("unpack", TORCH_BOX(&unpack));
}

}  // namespace dflash::cpu
