// Instances of the encoder's kernels that do not depend on pruning, and their launch.
#include "encode_kernel.cuh"
#include "encode_steps.cuh"
#include "place_kernel.cuh"

namespace megatron_sparse {
namespace {

template <class Value>
void launch_place_values(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  const cudaLaunchConfig_t one = grid_for(1, 1, kPlanThreads, stream);
  cudaLaunchKernelEx(&one, plan_records_kernel<Value>, work, a);
  const int64_t tiles = a.numel / kPiciTile + a.segment_count;
  const cudaLaunchConfig_t all = grid_for((tiles + kPlaceWarps - 1) / kPlaceWarps,
                                          multiprocessors() * 8, kPlaceThreads, stream);
  cudaLaunchKernelEx(&all, place_kernel<Value>, work, a);
}

}  // namespace

int64_t encode_workspace_bytes(const EncodeArguments& arguments) {
  return workspace_of(arguments).bytes;
}

void launch_cut(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  cudaMemsetAsync(work.nnz_states, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  const cudaLaunchConfig_t one = grid_for(1, 1, kPlanThreads, stream);
  cudaLaunchKernelEx(&one, cut_tiles_kernel, work, a.segment_offsets, a.segment_kinds,
                     a.segment_count, a.numel, a.status);
}

void launch_place_records(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  if (a.value_dtype == kFp32) {
    launch_place_values<uint32_t>(a, work, stream);
  } else {
    launch_place_values<uint16_t>(a, work, stream);
  }
}

void launch_place(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  if (a.slots != nullptr) cudaMemsetAsync(a.out, 0, static_cast<size_t>(a.capacity), stream);
  launch_place_records(a, work, stream);
}

void launch_compact_grad(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  if (a.grad_dtype == kFp32) {
    launch_compact(a, GradSource<kFp32>{a.grad}, work, stream);
  } else if (a.grad_dtype == kBf16) {
    launch_compact(a, GradSource<kBf16>{a.grad}, work, stream);
  } else {
    launch_compact(a, GradSource<kFp16>{a.grad}, work, stream);
  }
}

void launch_encode(const EncodeArguments& a, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Workspace work = workspace_of(a);
  launch_cut(a, work, stream);
  if (a.segment_count == 0) return;
  launch_compact_grad(a, work, stream);
  launch_place(a, work, stream);
}

}  // namespace megatron_sparse
