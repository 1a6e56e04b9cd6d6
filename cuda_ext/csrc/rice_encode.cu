// Instances of the kernels that encode messages of kind Rice, and their launches.
#include "encode_steps.cuh"
#include "rice_encode_kernel.cuh"
#include "rice_encode_measure.cuh"
#include "rice_encode_once.cuh"
#include "rice_encode_whole.cuh"

namespace megatron_sparse {
namespace {

int64_t chunk_slots(const EncodeArguments& a, const RiceArguments& rice) {
  return (most_tiles(a.numel, a.segment_count) >> log2_tiles(rice)) + a.segment_count;
}

Workspace rice_workspace_of(const EncodeArguments& a, const RiceArguments& rice) {
  // Without indices nothing is staged.
  if (rice.without_indices) {
    return lay_out_workspace(a.workspace, {0, a.segment_count, 0, 0, false, true, 0, false});
  }
  if (rice.at_once) {
    return lay_out_workspace(
        a.workspace, {a.numel, a.segment_count, 0, 0, false, true, chunk_slots(a, rice), true});
  }
  const int64_t value_bytes = dtype_bytes(a.value_dtype);
  // As for other formats. How many quantised values a message has room for depends on them.
  const bool all = a.most_nnz != nullptr || is_quantised(rice.dtype);
  return lay_out_workspace(
      a.workspace, {a.numel, a.segment_count, value_bytes, all ? a.numel : a.capacity / value_bytes,
                    false, true, chunk_slots(a, rice), false});
}

// The launches after compaction, for records with indices.
void launch_records(const RiceCall& call, const Workspace& work, cudaStream_t stream) {
  const cudaLaunchConfig_t measuring = grid_for(chunk_slots(call.encode, call.rice),
                                                multiprocessors() * 12, kMeasureThreads, stream);
  cudaLaunchKernelEx(&measuring, rice_measure_kernel, work, call.encode, call.rice);
  const int64_t tiles = most_tiles(call.encode.numel, call.encode.segment_count);
  const cudaLaunchConfig_t coding = grid_for((tiles + kRiceWarps - 1) / kRiceWarps,
                                             multiprocessors() * kRiceBlocks, kRiceThreads, stream);
  // bf16 and fp16 are copied.
  with_constant<kFp32, kQ8, kQ4, kQ3, kQ2, kBf16>(call.rice.dtype, [&](auto dtype) {
    cudaLaunchKernelEx(&coding, rice_kernel<dtype.value>, work, call);
  });
}

// The launch after the cut, without indices.
void launch_whole(const WholeCall& call, const Workspace& work, cudaStream_t stream) {
  const int64_t tiles = most_tiles(call.encode.numel, call.encode.segment_count);
  const cudaLaunchConfig_t config =
      grid_for((tiles + kRiceWarps - 1) / kRiceWarps, multiprocessors() * 3, kRiceThreads, stream);
  with_constant<kFp32, kBf16, kFp16>(call.encode.grad_dtype, [&](auto grad) {
    with_constant<kFp32, kBf16>(call.rice.residual_dtype, [&](auto residual) {
      with_constant<kQ8, kQ4>(call.rice.dtype, [&](auto dtype) {
        constexpr auto kernel = rice_whole_kernel<decltype(grad)::value, decltype(residual)::value,
                                                  decltype(dtype)::value>;
        cudaLaunchKernelEx(&config, kernel, work, call);
      });
    });
  });
}

// The launches after the cut, for chunks that are coded at once.
void launch_once(const WholeCall& call, const Workspace& work, cudaStream_t stream) {
  const int64_t slots = chunk_slots(call.encode, call.rice);
  const cudaLaunchConfig_t coding =
      grid_for(slots, multiprocessors() * kOnceBlocks, kRiceThreads, stream);
  with_constant<kFp32, kBf16, kFp16>(call.encode.grad_dtype, [&](auto grad) {
    with_constant<kFp32, kBf16>(call.rice.residual_dtype, [&](auto residual) {
      with_constant<kQ8, kQ4, kQ3, kQ2>(call.rice.dtype, [&](auto dtype) {
        constexpr auto kernel = rice_once_kernel<decltype(grad)::value, decltype(residual)::value,
                                                 decltype(dtype)::value>;
        cudaLaunchKernelEx(&coding, kernel, work, call);
      });
    });
  });
  const cudaLaunchConfig_t moving = grid_of_items(32 * slots, kRiceThreads, stream);
  cudaLaunchKernelEx(&moving, rice_move_kernel, work, call);
}

}  // namespace

int64_t rice_encode_workspace_bytes(const EncodeArguments& a, const RiceArguments& rice) {
  return rice_workspace_of(a, rice).bytes;
}

void launch_rice_encode(const EncodeArguments& a, const RiceArguments& rice, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Workspace work = rice_workspace_of(a, rice);
  launch_cut(a, work, stream);
  if (a.segment_count == 0) return;
  if (rice.without_indices) {
    return launch_whole({a, rice, {}, prune_seeds(rice.key)}, work, stream);
  }
  launch_compact_grad(a, work, stream);
  const HashSeed seed = prune_seeds(rice.key).residual;
  launch_records({a, rice, seed, false, rice.residual != nullptr}, work, stream);
}

void launch_rice_prune_encode(const EncodeArguments& a, const RiceArguments& rice,
                              const PruneArguments& p, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Workspace work = rice_workspace_of(a, rice);
  launch_cut(a, work, stream);
  if (a.segment_count == 0) return;
  if (rice.without_indices) return launch_whole({a, rice, p, prune_seeds(rice.key)}, work, stream);
  if (rice.at_once) return launch_once({a, rice, p, prune_seeds(rice.key)}, work, stream);
  launch_prune(a, p, work, stream);
  // The value that pruning leaves of an fp32 gradient is all of gradient + residual.
  const bool entries_rest = rice.residual != nullptr && a.grad_dtype != kFp32;
  launch_records({a, rice, prune_seeds(rice.key).residual, true, entries_rest}, work, stream);
}

}  // namespace megatron_sparse
