#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "cuda/act.cuh"
#include "cuda/attend.cuh"
#include "cuda/attention_merge.cuh"
#include "host/attention.h"

namespace dflash::cuda {
namespace {

constexpr int64_t kMost = 0x7fffffff;  // of what the kernels of pieces count with ints
constexpr int kDevices = 64;

// Clusters that the device holds at once; 0 if it cannot hold one. Found out once per device.
template <class A>
int64_t resident_clusters(int device) {
  static std::atomic<int64_t> known[kDevices];  // plus 1
  STD_TORCH_CHECK(device >= 0 && device < kDevices, "dflash: device ", device, " of at most ",
                  kDevices);
  if (const int64_t found = known[device]) return found - 1;
  int64_t count = 0;
  int most_shared = 0;
  STD_CUDA_CHECK(
      cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (has_sm90() && int(sizeof(typename A::Shared)) <= most_shared) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(attend_pieces<A>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        int(sizeof(typename A::Shared))));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(A::kRanks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(A::kRanks);
    config.blockDim = dim3(A::kThreads);
    config.dynamicSmemBytes = sizeof(typename A::Shared);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, attend_pieces<A>, &config));
    count = clusters;
  }
  known[device] = count + 1;
  return count;
}

struct Call {
  const gpu::AttentionView& view;
  const AttentionPlan& plan;
  int64_t act_mode;
  const Launch& launch;
};

// False if the device cannot hold a cluster of this shape.
template <class A>
bool attend(const Call& call, const Tensor& like, Tensor& out) {
  const AttentionPlan& plan = call.plan;
  const int64_t resident = resident_clusters<A>(like.get_device_index());
  if (resident == 0) return false;
  const int64_t chunks = ceil_div<int64_t>(plan.capacity(), kChunkKeys);
  const int64_t spans = ceil_div<int64_t>(plan.capacity(), kSpanKeys);
  AttentionPieces pieces{};
  pieces.most_chunks = 512;  // 12 MB of pieces for 24 heads of 256
  pieces.window = int(std::min<int64_t>(plan.window, kMostKeys));
  const int64_t slots = plan.heads * plan.rows *
                        std::max(spans, std::min<int64_t>(chunks, pieces.most_chunks / plan.rows));
  if (slots > kMost) return false;
  Tensor o = new_empty(like, {slots, plan.head_dim}, ScalarType::Float);
  Tensor ml = new_empty(like, {slots, 2}, ScalarType::Float);
  pieces.o = o.mutable_data_ptr<float>();
  pieces.ml = static_cast<float2*>(ml.mutable_data_ptr());

  const int64_t parts = plan.rows * plan.heads / plan.kv_heads / A::kQueries + plan.sequences;
  const int64_t items = std::max<int64_t>(1, chunks) * parts * plan.kv_heads;
  const dim3 grid(unsigned(std::min(resident, items) * A::kRanks));
  launch_cluster(attend_pieces<A>, A::kRanks, grid, dim3(A::kThreads), sizeof(typename A::Shared),
                 call.launch.stream, call.view, pieces);

  const dim3 merge_grid(unsigned(plan.rows),
                        unsigned(ceil_div<int64_t>(plan.heads * plan.head_dim, kActGroup)));
  const auto merge = [&]<class Group>(Group* to) {
    launch_pdl(merge_pieces<A::kHeadDim, Group>, merge_grid, dim3(kMergeThreads), 0,
               call.launch.stream, call.view, pieces, to);
  };
  if (call.act_mode == 0)
    merge(out.mutable_data_ptr<float>());
  else
    gpu::with_gpu_group(call.act_mode,
                        [&]<class Group>() { merge(static_cast<Group*>(out.mutable_data_ptr())); });
  return true;
}

bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// By a kernel for this shape, if there is one: the order of every sum is the same as in the
// portable one.
bool attend_in_pieces(const Call& call, FloatType type, const Tensor& like, Tensor& out) {
  const AttentionPlan& plan = call.plan;
  const gpu::AttentionView& view = call.view;
  if (plan.head_dim != 128 && plan.head_dim != 256) return false;
  if (plan.sequences > kMostSequences || plan.capacity() > kMostKeys ||
      plan.pages * plan.page_size > kMost || plan.kv_heads * plan.head_dim > kMost ||
      plan.rows * plan.heads > kMost)
    return false;
  if (!aligned(view.q) || !aligned(view.k) || !aligned(view.v)) return false;
  bool done = false;
  with_type(type, [&]<class T>() {
    if (plan.head_dim == 128)
      done = attend<Attend<T, 128, 2, 8, 32, 8, 4, 4, 1>>(call, like, out);
    else  // clusters of two were faster for 16 rows and more, but have not run on a GPU like this
      done = attend<Attend<T, 256, 4, 8, 24, 6, 8, 3, 1>>(call, like, out);
  });
  return done;
}

}  // namespace

Tensor block_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& lengths, const Tensor& cu_seqlens,
                       double scale, int64_t window, bool causal,
                       const std::optional<Tensor>& sinks, const std::optional<Tensor>& gate,
                       double value_scale, int64_t act_mode) {
  constexpr const char* op = "dflash::block_attention";
  AttentionPlan plan = plan_attention(q, k_cache, v_cache, page_table, lengths, cu_seqlens, scale,
                                      window, causal, sinks, gate, value_scale, act_mode);
  STD_TORCH_CHECK(plan.head_dim <= gpu::kMaxHeadDim, op,
                  ": q must have head_dim <= ", gpu::kMaxHeadDim, ", got ", plan.head_dim);
  STD_TORCH_CHECK(plan.heads <= 65535, op, ": q must have at most 65535 heads, got ", plan.heads);
  if (plan.rows == 0) return plan.out;
  gpu::AttentionView view{};
  view.q = q.const_data_ptr<float>();
  view.k = k_cache.const_data_ptr();
  view.v = v_cache.const_data_ptr();
  view.page_table = page_table.const_data_ptr<int32_t>();
  view.lengths = lengths.const_data_ptr<int32_t>();
  view.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
  view.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  view.gate = gate ? gate->const_data_ptr<float>() : nullptr;
  view.gate_row = plan.gate_stride[0];
  view.gate_head = plan.gate_stride[1];
  view.rows = plan.rows;
  view.sequences = plan.sequences;
  view.table_pages = plan.table_pages;
  view.pages = plan.pages;
  view.page_size = plan.page_size;
  view.heads = plan.heads;
  view.kv_heads = plan.kv_heads;
  view.head_dim = plan.head_dim;
  view.window = plan.window;
  view.scale = plan.scale;
  view.value_scale = plan.value_scale;
  view.causal = plan.causal;
  const Launch launch(q, plan.rows);
  const FloatType type = float_type(k_cache);
  if (attend_in_pieces({view, plan, act_mode, launch}, type, q, plan.out)) return plan.out;

  const int64_t columns = plan.heads * plan.head_dim;
  Tensor floats = float_rows_of(plan.out, plan.rows, columns, act_mode);
  view.out = floats.mutable_data_ptr<float>();
  const dim3 grid(unsigned(plan.rows), unsigned(plan.heads));
  with_type(type, [&]<class T>() {
    gpu::block_attention<T><<<grid, gpu::kAttentionThreads, 0, launch.stream>>>(view);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish_activations(floats, plan.rows, columns, act_mode, plan.out);
  return plan.out;
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CUDA, m) {
  m.impl("block_attention", TORCH_BOX(&block_attention));
}

}  // namespace dflash::cuda
