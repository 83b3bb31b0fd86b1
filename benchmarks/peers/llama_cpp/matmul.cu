// llama.cpp's matmul kernels of one type behind one C function. Compiled against a llama.cpp source
// tree by build_llama.py, once per type: -DTYPE=GGML_TYPE_Q4_K -DENTRY=llama_matmul_12. Nothing of
// llama.cpp is kept here; `mmvq_kernels.cu` is its mmvq.cu up to the switch over all types.
#include "mmq.cuh"
#include "mmvq_kernels.cu"
#include "shared.h"

struct Matmul {
  const void* weight;  // [rows, columns], GGUF bytes
  const void* gate;    // like weight, or null; N = 1 only: dst = (W x) * silu(G x)
  const void* packed;  // what llama_quantize wrote for this N
  float* dst;          // [n, rows]
  int64_t rows, columns;
  cudaStream_t stream;
};

// The type is a parameter although a file has but one: nvcc gives templates of unnamed namespaces
// common names, and the linker would take one type's for all.

template <ggml_type kType, int kN>
void vector_kernel(const Matmul& m) {  // a strip of llama.cpp's mul_mat_vec_q_switch_ncols_dst
  const auto table = get_device_table_id(ggml_cuda_info().devices[0].cc);
  const auto dims = calc_launch_params<kType>(kN, m.rows, 1, 1, 32, table);
  const int quants = m.columns / ggml_cuda_type_traits<kType>::qk, y = m.columns / QK8_1;
  const uint3 one = init_fastdiv_values(1);
  ggml_cuda_mm_fusion_args_device fusion{};
  fusion.gate = m.gate;
  fusion.glu_op = GGML_GLU_OP_SWIGLU;
  mul_mat_vec_q_switch_fusion<kType, kN>(
      m.weight, m.packed, nullptr, fusion, m.dst, m.columns, make_uint3(0, 0, 0), quants, y, m.rows,
      one, m.rows * quants, kN * y, kN * m.rows, one, m.rows * quants, kN * y, kN * m.rows,
      dims.first, dims.second, 0, 0, m.stream);
}

template <ggml_type kType, int kTile>
void tile_kernel(const Matmul& m, int64_t n) {
  const int64_t quants = m.columns / ggml_cuda_type_traits<kType>::qk;
  const int64_t y = n * m.columns * sizeof(block_q8_1) / (QK8_1 * sizeof(int));
  const mmq_args args = {(const char*)m.weight,
                         kType,
                         (const int*)m.packed,
                         nullptr,
                         nullptr,
                         m.dst,
                         nullptr,
                         m.columns,
                         m.rows,
                         n,
                         quants,
                         n,
                         m.rows,
                         1,
                         1,
                         m.rows * quants,
                         y,
                         n * m.rows,
                         1,
                         1,
                         m.rows * quants,
                         y,
                         n * m.rows,
                         n,
                         n};
  launch_mul_mat_q<kType, kTile, false>(llama_context(), args, m.stream);
}

// 0: launched; 1: this N, gate or shape has no kernel here.
extern "C" int ENTRY(const void* weight, const void* gate, const void* packed, float* dst,
                     int64_t rows, int64_t columns, int64_t n, cudaStream_t stream) {
  const Matmul m = {weight, gate, packed, dst, rows, columns, stream};
  // Below, llama.cpp gives a row fewer warps; tiles of other heights need its bounds checks.
  if (columns < 4096 || rows % 128 != 0 || (gate != nullptr && n != 1)) return 1;
  switch (n) {
    case 1:
      vector_kernel<TYPE, 1>(m);
      break;
    case 2:
      vector_kernel<TYPE, 2>(m);
      break;
    case 4:
      vector_kernel<TYPE, 4>(m);
      break;
    case 8:
      vector_kernel<TYPE, 8>(m);
      break;
    case 16:
      tile_kernel<TYPE, 16>(m, n);
      break;
    case 32:
      tile_kernel<TYPE, 32>(m, n);
      break;
    default:
      return 1;
  }
  return 0;
}
