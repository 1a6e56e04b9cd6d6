// Records of moves on CUDA: the decoders' launches; moves.cpp is the same for the CPU.
//
// What is held changes in the last launch, and only where the ones before found nothing wrong.
#include <algorithm>

#include "moves_launch.h"
#include "moves_rans_decode.cuh"

namespace megatron_sparse {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kCopiedWords = 4;  // of `down`, by a warp at once

// `held` becomes `now`; bits of `down` are set for numbers that fall, cleared for those that rise.
// Called by whole warps.
template <int D>
__device__ __forceinline__ void keep_numbers(MovesRaw<D>* held, const MovesRaw<D>* now,
                                             int64_t numel, uint32_t* down) {
  constexpr int kNumbers = 32 * kCopiedWords;
  const int lane = threadIdx.x % 32;
  for (int64_t first = first_item() / 32 * kNumbers; first < numel;
       first += item_stride() / 32 * kNumbers) {
    MovesRaw<D> was[kCopiedWords], is[kCopiedWords];
#pragma unroll
    for (int w = 0; w < kCopiedWords; ++w) {
      const int64_t i = first + 32 * w + lane;
      was[w] = i < numel ? held[i] : 0;
      is[w] = i < numel ? now[i] : 0;
    }
#pragma unroll
    for (int w = 0; w < kCopiedWords; ++w) {
      const int64_t i = first + 32 * w + lane;
      const uint32_t old_order = ordered_high<D>(was[w]), new_order = ordered_high<D>(is[w]);
      const unsigned rose = __ballot_sync(kAllLanes, new_order > old_order);
      const unsigned fell = __ballot_sync(kAllLanes, new_order < old_order);
      if (i < numel) held[i] = is[w];
      if (i < numel && lane == 0) down[i / 32] = (down[i / 32] & ~rose) | fell;
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kCopyThreads) moves_keep_kernel(MovesKeepArguments call) {
  keep_numbers<D>(static_cast<MovesRaw<D>*>(call.held), static_cast<const MovesRaw<D>*>(call.now),
                  call.numel, call.down);
}

// Puts raw or decoded numbers in the place of those that are held, if nothing is wrong.
template <int D>
__global__ void __launch_bounds__(kCopyThreads)
    moves_copy_kernel(const __grid_constant__ MovesBatch batch) {
  using Raw = MovesRaw<D>;
  const MovesDecodeArguments& call = batch.call[blockIdx.y];
  const MovesDecodeWork& work = batch.work[blockIdx.y];
  if (first_item() == 0) write_status(call, work);
  if (work.found->fault != 0 || work.found->damaged != 0) return;
  const Raw* from = static_cast<const Raw*>(call.coder == kMovesRaw ? sections_of_moves(call).data
                                                                    : work.decoded);
  keep_numbers<D>(static_cast<Raw*>(call.held), from, call.numel, call.down);
}

// Threads that copy so many numbers.
int64_t copied_items(int64_t numel) {
  return numel / kCopiedWords + 1;
}

// A row of at most `blocks` for each record; all rows together have `most`, but one a row at least.
cudaLaunchConfig_t rows_of(int count, int64_t blocks, int64_t most, int threads,
                           cudaStream_t stream) {
  cudaLaunchConfig_t config = grid_for(blocks, std::max<int64_t>(most / count, 1), threads, stream);
  config.gridDim.y = static_cast<unsigned>(count);
  return config;
}

// The scratch memory of a batch, or only its bytes from a null base.
struct MovesScratch {
  int64_t zeroed_bytes, bytes;
};

MovesScratch lay_out(MovesBatch& batch, const MovesDecodeArguments* calls, int count, void* base) {
  Carver memory(base);
  for (int i = 0; i < count; ++i) {
    batch.call[i] = calls[i];
    batch.work[i].found = memory.take<MovesFindings>(1);
  }
  const int64_t zeroed_bytes = memory.used();
  for (int i = 0; i < count; ++i) {
    if (calls[i].coder != kMovesRans) continue;
    batch.work[i].tables = memory.take<RansDecoder>(1);
    batch.work[i].decoded = memory.take<uint8_t>(calls[i].numel * dtype_bytes(calls[i].dtype));
  }
  return {zeroed_bytes, memory.used()};
}

template <int D>
void launch_batch(const MovesBatch& batch, int count, cudaStream_t stream) {
  // The most that one record has, and the chunks of all.
  int64_t most_bytes = 0, most_numbers = 0, most_chunks = 0, all_chunks = 0;
  for (int i = 0; i < count; ++i) {
    const MovesDecodeArguments& call = batch.call[i];
    const int64_t chunks = call.coder == kMovesRans ? chunk_count(call.numel) : 0;
    most_bytes = std::max(most_bytes, call.body_bytes);
    most_numbers = std::max(most_numbers, call.numel);
    most_chunks = std::max(most_chunks, chunks);
    all_chunks += chunks;
  }
  const int64_t resident = multiprocessors();
  // A block for each context of rans, if there is room.
  const int64_t blocks = (most_bytes / 16 + kCheckThreads - 1) / kCheckThreads;
  const cudaLaunchConfig_t checks =
      rows_of(count, std::max<int64_t>(blocks, kContexts), resident * 8, kCheckThreads, stream);
  cudaLaunchKernelEx(&checks, moves_check_kernel, batch);
  if (most_chunks > 0) {
    const int warps = warps_for(all_chunks, kDecodeWarps);
    cudaLaunchConfig_t decodes =
        rows_of(count, (most_chunks + warps - 1) / warps, resident * 2, 32 * warps, stream);
    decodes.dynamicSmemBytes = static_cast<size_t>(rans_shared_bytes(warps));
    cudaFuncSetAttribute(moves_rans_decode_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         rans_shared_bytes(kDecodeWarps));
    cudaLaunchKernelEx(&decodes, moves_rans_decode_kernel<D>, batch);
  }
  const int64_t items = copied_items(most_numbers);
  const cudaLaunchConfig_t copies =
      rows_of(count, (items + kCopyThreads - 1) / kCopyThreads, resident * 8, kCopyThreads, stream);
  cudaLaunchKernelEx(&copies, moves_copy_kernel<D>, batch);
}

}  // namespace

int64_t moves_decode_workspace_bytes(const MovesDecodeArguments* calls, int64_t count) {
  int64_t most = 0;
  for (int64_t begin = 0; begin < count; begin += kMostMoves) {
    const int here = static_cast<int>(std::min<int64_t>(count - begin, kMostMoves));
    MovesBatch batch;
    most = std::max(most, lay_out(batch, calls + begin, here, nullptr).bytes);
  }
  return most;
}

void launch_moves_decode(const MovesDecodeArguments* calls, int64_t count, void* workspace,
                         void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  for (int64_t begin = 0; begin < count; begin += kMostMoves) {
    const int here = static_cast<int>(std::min<int64_t>(count - begin, kMostMoves));
    MovesBatch batch = {};
    const MovesScratch scratch = lay_out(batch, calls + begin, here, workspace);
    cudaMemsetAsync(workspace, 0, static_cast<size_t>(scratch.zeroed_bytes), stream);
    with_constant<kFp32, kBf16, kFp16>(
        calls[0].dtype, [&](auto dtype) { launch_batch<dtype.value>(batch, here, stream); });
  }
}

void launch_moves_keep(const MovesKeepArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const cudaLaunchConfig_t copies = grid_of_items(copied_items(call.numel), kCopyThreads, stream);
  with_constant<kFp32, kBf16, kFp16>(call.dtype, [&](auto dtype) {
    cudaLaunchKernelEx(&copies, moves_keep_kernel<dtype.value>, call);
  });
}

}  // namespace megatron_sparse
