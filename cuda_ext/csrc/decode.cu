// Instances of decode_add_'s CUDA kernels and their launch.
#include "decode_kernel.cuh"
#include "launch_grid.cuh"

namespace megatron_sparse {

int64_t decode_workspace_bytes(int64_t segment_count) {
  return lay_out_decode_workspace(nullptr, segment_count).bytes;
}

void launch_decode_add(const DecodeArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const DecodeWorkspace work = lay_out_decode_workspace(call.workspace, call.segment_count);
  const cudaLaunchConfig_t one = grid_for(1, 1, kWalkThreads, stream);
  cudaLaunchKernelEx(&one, walk_kernel, call, work);
  if (call.segment_count == 0) return;
  // A unit is at least 512 bytes of the message, but for each segment's last.
  const int64_t warps = call.message_bytes / 512 + call.segment_count;
  const int64_t wanted = (warps + kDecodeWarps - 1) / kDecodeWarps, most = multiprocessors() * 8;
  const cudaLaunchConfig_t all = grid_for(wanted, most, kDecodeThreads, stream);
  cudaLaunchKernelEx(&all, check_kernel, call, work);
  if (call.fresh) {
    const cudaLaunchConfig_t every = grid_for(most, most, kDecodeThreads, stream);
    cudaLaunchKernelEx(&every, clear_kernel, call, work);
  }
  if (call.value_dtype == kFp32) {
    cudaLaunchKernelEx(&all, add_kernel<kFp32>, call, work);
  } else if (call.value_dtype == kBf16) {
    cudaLaunchKernelEx(&all, add_kernel<kBf16>, call, work);
  } else {
    cudaLaunchKernelEx(&all, add_kernel<kFp16>, call, work);
  }
}

}  // namespace megatron_sparse
