// Instances of decode_add_'s CUDA kernels and their launch.
#include <algorithm>

#include "decode_kernel.cuh"
#include "launch_grid.cuh"

namespace megatron_sparse {
namespace {

constexpr int kMostDecodes = 16;  // of one launch, whose parameters have at most 4 KB

template <int MOST>
void launch_add(const DecodeBatch<MOST>& batch, const cudaLaunchConfig_t& config) {
  const int dtype = batch.call[0].value_dtype;
  if (dtype == kFp32) {
    cudaLaunchKernelEx(&config, add_kernel<kFp32, MOST>, batch);
  } else if (dtype == kBf16) {
    cudaLaunchKernelEx(&config, add_kernel<kBf16, MOST>, batch);
  } else {
    cudaLaunchKernelEx(&config, add_kernel<kFp16, MOST>, batch);
  }
}

template <int MOST>
void launch_batch(const DecodeArguments* calls, int64_t count, DecodeParts parts,
                  cudaStream_t stream) {
  static_assert(sizeof(DecodeBatch<MOST>) <= 4096);
  DecodeBatch<MOST> batch = {};
  int64_t wanted = 0, segments = 0;
  bool clears = false;
  for (int64_t i = 0; i < count; ++i) {
    const DecodeArguments& call = calls[i];
    batch.call[i] = call;
    batch.work[i] = lay_out_decode_workspace(call.workspace, call.segment_count);
    // A unit is at least 512 bytes of the message, except for each segment's last.
    const int64_t warps = call.message_bytes / 512 + call.segment_count;
    wanted = std::max(wanted, (warps + kDecodeWarps - 1) / kDecodeWarps);
    segments += call.segment_count;
    clears |= call.fresh;
  }
  const int64_t resident = multiprocessors() * 8, most = std::max<int64_t>(resident / count, 1);
  const auto of_all = [&](int64_t blocks, int64_t limit, int threads) {
    cudaLaunchConfig_t config = grid_for(blocks, limit, threads, stream);
    config.gridDim.y = static_cast<unsigned>(count);
    return config;
  };
  const cudaLaunchConfig_t walk = of_all(1, 1, kWalkThreads);
  cudaLaunchKernelEx(&walk, walk_kernel<MOST>, batch);
  if (segments == 0) return;
  const cudaLaunchConfig_t check = of_all(wanted, most, kDecodeThreads);
  cudaLaunchKernelEx(&check, check_kernel<MOST>, batch);
  if (parts == DecodeParts::kApart || count == 1) {
    const cudaLaunchConfig_t clear = of_all(most, most, kDecodeThreads);
    if (clears) cudaLaunchKernelEx(&clear, clear_kernel<MOST>, batch);
    launch_add(batch, check);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const DecodeBatch<1> one = {{batch.call[i]}, {batch.work[i]}};
    const cudaLaunchConfig_t all = grid_for(resident, resident, kDecodeThreads, stream);
    if (calls[i].fresh) cudaLaunchKernelEx(&all, clear_kernel<1>, one);
    launch_add(one, grid_for(wanted, resident, kDecodeThreads, stream));
  }
}

}  // namespace

int64_t decode_workspace_bytes(int64_t segment_count) {
  return lay_out_decode_workspace(nullptr, segment_count).bytes;
}

void launch_decode_add(const DecodeArguments& call, void* stream) {
  launch_batch<1>(&call, 1, DecodeParts::kTheSame, static_cast<cudaStream_t>(stream));
}

void launch_decode_add_all(const DecodeArguments* calls, int64_t count, DecodeParts parts,
                           void* stream) {
  for (int64_t begin = 0; begin < count; begin += kMostDecodes) {
    launch_batch<kMostDecodes>(calls + begin, std::min<int64_t>(count - begin, kMostDecodes), parts,
                               static_cast<cudaStream_t>(stream));
  }
}

}  // namespace megatron_sparse
