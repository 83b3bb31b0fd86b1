// llama.cpp's quantizers, Gated DeltaNet and convolution behind C functions, and the few functions
// of its runtime that its kernels call. `*_kernels.cu` are its files up to their graph operations.
#include "shared.h"

#include <cstdarg>

#include "gated_delta_net_kernels.cu"
#include "quantize.cu"
#include "ssm-conv_kernels.cu"

namespace {

constexpr size_t kPoolBytes = 64 << 20;

// One buffer, handed out to one user at a time; made before any stream is captured.
struct Pool : ggml_cuda_pool {
  void* buffer = nullptr;
  Pool() { CUDA_CHECK(cudaMalloc(&buffer, kPoolBytes)); }
  void* alloc(size_t size, size_t* actual) override {
    GGML_ASSERT(size <= kPoolBytes);
    *actual = size;
    return buffer;
  }
  void free(void*, size_t) override {}
};

}  // namespace

std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) {
  return std::make_unique<Pool>();
}

ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

ggml_backend_cuda_context& llama_context() {
  static auto* context = new ggml_backend_cuda_context(0);  // outlives CUDA's own clean-up
  return *context;
}

const ggml_cuda_device_info& ggml_cuda_info() {
  static const ggml_cuda_device_info info = [] {
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    ggml_cuda_device_info found{};
    found.device_count = found.physical_device_count = 1;
    auto& device = found.devices[0];
    device.cc = 100 * p.major + 10 * p.minor;
    device.nsm = p.multiProcessorCount;
    device.smpb = p.sharedMemPerBlock;
    device.smpbo = p.sharedMemPerBlockOptin;
    device.warp_size = p.warpSize;
    return found;
  }();
  return info;
}

int ggml_cuda_get_device() {
  return 0;
}
void ggml_cuda_set_device(int) {}

void ggml_cuda_error(const char* stmt, const char*, const char* file, int line, const char* text) {
  ggml_abort(file, line, "%s: %s", stmt, text);
}

extern "C" void ggml_abort(const char* file, int line, const char* format, ...) {
  fprintf(stderr, "%s:%d: ", file, line);
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  abort();
}

extern "C" void ggml_log_internal(ggml_log_level, const char*, ...) {}

extern "C" bool ggml_is_quantized(ggml_type) {
  return true;
}

// Makes the pool, so that nothing is allocated while a stream is captured.
extern "C" void llama_prepare() {
  llama_context().pool(0);
}

// x float32 [n, columns] -> what the matmul of `type` reads for this n.
extern "C" void llama_quantize(int type, const float* x, void* packed, int64_t columns, int64_t n,
                               cudaStream_t stream) {
  const auto quantize = n <= 8 ? quantize_row_q8_1_cuda : quantize_mmq_q8_1_cuda;
  quantize(x, nullptr, packed, ggml_type(type), columns, columns, columns * n, columns * n, columns,
           n, 1, 1, stream);
}

// One sequence; states [snapshots] [heads][128][128], slot 0 the newest. `gates` and `betas` are
// activated already, q and k normalised.
extern "C" void llama_gated_delta_net(const float* q, const float* k, const float* v,
                                      const float* gates, const float* betas, const float* state,
                                      float* dst, float* states, int64_t k_heads, int64_t heads,
                                      int64_t tokens, int snapshots, cudaStream_t stream) {
  constexpr int64_t kDim = 128;
  const auto launch =
      snapshots > 1 ? launch_gated_delta_net<false, true> : launch_gated_delta_net<false, false>;
  launch(q, k, v, gates, betas, state, dst, states, kDim, heads, tokens, 1, kDim, kDim * k_heads,
         kDim * k_heads * tokens, kDim, kDim * heads, kDim * heads * tokens, 1, heads,
         heads * tokens, k_heads, 1, 1.f / sqrtf(float(kDim)), kDim * kDim * heads, snapshots,
         stream);
}

// x [channels][taps - 1 + tokens], weight [channels][taps] -> silu(conv), [tokens][channels].
extern "C" void llama_ssm_conv(const float* x, const float* weight, float* dst, int64_t channels,
                               int64_t taps, int64_t tokens, cudaStream_t stream) {
  const int row = (taps - 1 + tokens) * sizeof(float), size = sizeof(float);
  ssm_conv_f32_cuda<true>(x, weight, nullptr, size, row, row * channels, taps * size, dst, size,
                          channels * size, channels * tokens * size, taps, channels, tokens, 1,
                          stream);
}
