// Records of moves on CUDA: the decoders' launches; moves.cpp is the same for the CPU.
//
// What is held changes in the last launch, and only where the ones before found nothing wrong.
#include "moves_launch.h"
#include "moves_rans_decode.cuh"

namespace megatron_sparse {
namespace {

constexpr int kCopyThreads = 256;

// Puts raw or decoded numbers in the place of those that are held, if nothing is wrong.
template <int D>
__global__ void __launch_bounds__(kCopyThreads)
    moves_copy_kernel(MovesDecodeArguments call, MovesDecodeWork work) {
  using Raw = MovesRaw<D>;
  if (first_item() == 0) write_status(call, work);
  if (*work.fault != 0 || *work.damaged != 0) return;
  const Raw* from = static_cast<const Raw*>(call.coder == kMovesRaw ? sections_of_moves(call).data
                                                                    : work.decoded);
  Raw* held = static_cast<Raw*>(call.held);
  int64_t done = 0;  // the binding and the workspace align `from`
  if (reinterpret_cast<uintptr_t>(held) % 16 == 0) {
    constexpr int kItems = 16 / sizeof(Raw);
    const int64_t vectors = call.numel / kItems;
    for (int64_t v = first_item(); v < vectors; v += item_stride()) {
      reinterpret_cast<uint4*>(held)[v] = reinterpret_cast<const uint4*>(from)[v];
    }
    done = vectors * kItems;
  }
  for (int64_t i = done + first_item(); i < call.numel; i += item_stride()) held[i] = from[i];
}

template <int D>
void launch_decode_of(const MovesDecodeArguments& call, const MovesDecodeWork& work,
                      cudaStream_t stream) {
  const int64_t chunks = chunk_count(call.numel), resident = multiprocessors();
  if (call.coder == kMovesRans && chunks > 0) {
    const int warps = warps_for(chunks, kDecodeWarps);
    cudaLaunchConfig_t decodes =
        grid_for((chunks + warps - 1) / warps, resident * 2, 32 * warps, stream);
    decodes.dynamicSmemBytes = static_cast<size_t>(rans_shared_bytes(warps));
    cudaFuncSetAttribute(moves_rans_decode_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         rans_shared_bytes(kDecodeWarps));
    cudaLaunchKernelEx(&decodes, moves_rans_decode_kernel<D>, call, work);
  }
  const int64_t vectors = call.numel * int64_t{sizeof(MovesRaw<D>)} / 16 + 1;
  const cudaLaunchConfig_t items = grid_of_items(vectors, kCopyThreads, stream);
  cudaLaunchKernelEx(&items, moves_copy_kernel<D>, call, work);
}

}  // namespace

int64_t moves_decode_workspace_bytes(int64_t numel, int dtype, int coder) {
  return lay_out_decode(nullptr, numel, dtype, coder).bytes;
}

void launch_moves_decode(const MovesDecodeArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const MovesDecodeWork work = lay_out_decode(call.workspace, call.numel, call.dtype, call.coder);
  cudaMemsetAsync(call.workspace, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  // A block at least for each context of rans.
  int64_t items = call.body_bytes / 16;
  if (items < int64_t{kContexts} * kCheckThreads) items = int64_t{kContexts} * kCheckThreads;
  const cudaLaunchConfig_t checks = grid_of_items(items, kCheckThreads, stream);
  cudaLaunchKernelEx(&checks, moves_check_kernel, call, work);
  if (call.dtype == kFp32) {
    launch_decode_of<kFp32>(call, work, stream);
  } else if (call.dtype == kBf16) {
    launch_decode_of<kBf16>(call, work, stream);
  } else {
    launch_decode_of<kFp16>(call, work, stream);
  }
}

}  // namespace megatron_sparse
