// Instances of decode_add_'s and decode_sum_'s CUDA kernels and their launches.
#include <algorithm>

#include "decode_kernel.cuh"
#include "encode_steps.cuh"
#include "launch_grid.cuh"

namespace megatron_sparse {
namespace {

constexpr int kMostDecodes = 16;  // of one launch, whose parameters have at most 4 KB

template <int MOST>
void launch_walk(const DecodeBatch<MOST>& batch, int count, const EncodeArguments* next,
                 cudaStream_t stream) {
  if (next == nullptr) {
    const cudaLaunchConfig_t config = grid_for(count, count, kWalkThreads, stream);
    cudaLaunchKernelEx(&config, walk_kernel<MOST>, batch);
    return;
  }
  const TileCut cut = tile_cut_of(*next, workspace_of(*next));
  const int64_t blocks = count + cut_blocks(cut);
  const cudaLaunchConfig_t config = grid_for(blocks, blocks, kWalkThreads, stream);
  cudaLaunchKernelEx(&config, walk_and_cut_kernel<MOST>, batch, count, cut);
}

// `groups` sums of `plan.count` messages each, one after the other in `calls`.
template <int MOST>
void launch_batch(const DecodeArguments* calls, int groups, const SumPlan& plan, bool fresh,
                  const EncodeArguments* next, cudaStream_t stream) {
  static_assert(sizeof(DecodeBatch<MOST>) + sizeof(SumPlan) + sizeof(TileCut) <= 4096);
  DecodeBatch<MOST> batch = {};
  const int count = groups * plan.count;
  int64_t tiles = 0, segments = 0;
  for (int i = 0; i < count; ++i) {
    const DecodeArguments& call = calls[i];
    batch.call[i] = call;
    batch.work[i] = lay_out_decode_workspace(call.workspace, call.segment_count);
    // Each segment's last tile may be short.
    tiles = std::max(tiles, most_tiles(call.acc_numel, call.segment_count));
    segments += call.segment_count;
  }
  const auto grid = [stream](int64_t blocks, int64_t most, int rows, int threads) {
    cudaLaunchConfig_t config = grid_for(blocks, most, threads, stream);
    config.gridDim.y = static_cast<unsigned>(rows);
    return config;
  };
  launch_walk(batch, count, next, stream);
  if (segments == 0) return;
  const int64_t resident = multiprocessors() * kDecodeBlocks;
  if constexpr (MOST == 1) {
    if (plan.checked) {
      // Most units are at least 512 bytes of the message; of shorter ones a warp takes several.
      const int64_t warps = calls[0].message_bytes / 512 + segments;
      const cudaLaunchConfig_t check =
          grid((warps + kDecodeWarps - 1) / kDecodeWarps, resident, 1, kDecodeThreads);
      cudaLaunchKernelEx(&check, check_kernel, batch);
    }
  }
  const bool in_place = MOST == 1 && !fresh;
  const int64_t at_once = in_place ? multiprocessors() * kInPlaceBlocks : resident;
  const cudaLaunchConfig_t sum =
      grid(tiles, std::max<int64_t>(at_once / groups, 1), groups, kDecodeThreads);
  // One instance serves all quantised dtypes.
  with_constant<kFp32, kBf16, kFp16, kQ8>(calls[0].value_dtype, [&](auto value) {
    with_constant<true, false>(fresh, [&](auto is_fresh) {
      constexpr auto kernel = sum_kernel<decltype(value)::value, decltype(is_fresh)::value, MOST>;
      cudaLaunchKernelEx(&sum, kernel, batch, plan);
    });
  });
}

}  // namespace

int64_t decode_workspace_bytes(int64_t segment_count) {
  return lay_out_decode_workspace(nullptr, segment_count).bytes;
}

void launch_decode_add(const DecodeArguments& call, void* stream) {
  launch_batch<1>(&call, 1, {1, true}, call.fresh, nullptr, static_cast<cudaStream_t>(stream));
}

void launch_decode_sum(const DecodeArguments* calls, int64_t count, void* stream,
                       const EncodeArguments* next) {
  for (int64_t begin = 0; begin < count; begin += kMostDecodes) {
    const int here = static_cast<int>(std::min<int64_t>(count - begin, kMostDecodes));
    launch_batch<kMostDecodes>(calls + begin, 1, {here, false}, begin == 0,
                               begin == 0 ? next : nullptr, static_cast<cudaStream_t>(stream));
  }
}

void launch_decode_place(const DecodeArguments* calls, int64_t count, void* stream) {
  for (int64_t begin = 0; begin < count; begin += kMostDecodes) {
    const int here = static_cast<int>(std::min<int64_t>(count - begin, kMostDecodes));
    launch_batch<kMostDecodes>(calls + begin, here, {1, false}, true, nullptr,
                               static_cast<cudaStream_t>(stream));
  }
}

}  // namespace megatron_sparse
