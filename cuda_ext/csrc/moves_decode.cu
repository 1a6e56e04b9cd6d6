// Records of moves on CUDA: the decoders' launches; moves.cpp is the same for the CPU.
//
// What is held changes in the last launch, and only where the ones before found nothing wrong.
#include "moves_launch.h"
#include "moves_pack_kernel.cuh"
#include "moves_rans_decode.cuh"

namespace megatron_sparse {
namespace {

constexpr int kCopyThreads = 256;

// The moves of a tile's bit planes in this lane; called by a warp.
__device__ __forceinline__ void read_planes(const uint32_t* planes, int width,
                                            uint32_t (&z)[kTileItems]) {
  const int lane = threadIdx.x % 32;
  constexpr int kAtOnce = 32 / kTileItems;  // planes, a word in each lane
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) z[j] = 0;
  for (int first = 0; first < width; first += kAtOnce) {
    const int count = min(width - first, kAtOnce);
    const uint32_t words = lane < kTileItems * count ? planes[kTileItems * first + lane] : 0;
    for (int p = 0; p < count; ++p) {
#pragma unroll
      for (int j = 0; j < kTileItems; ++j) {
        const uint32_t word = __shfl_sync(kAllLanes, words, kTileItems * p + j);
        z[j] |= (word >> lane & 1) << (first + p);
      }
    }
  }
}

// Adds the upper bits of a tile's escapes; `upper` has a word for each move, in shared memory.
template <class Raw>
__device__ __forceinline__ void add_escapes(const Raw* values, const uint8_t* positions, int listed,
                                            int width, uint32_t* upper, uint32_t (&z)[kTileItems]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) upper[32 * j + lane] = 0;
  __syncwarp();
  for (int e = lane; e < listed; e += 32) {
    // A full width leaves nothing above it. A position may stand twice in a damaged record.
    const uint32_t high = width < 32 ? uint32_t{values[e]} << width : 0;
    atomicOr(&upper[positions[e]], static_cast<uint32_t>(static_cast<Raw>(high)));
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) z[j] |= upper[32 * j + lane];
  __syncwarp();
}

template <int D>
__device__ __forceinline__ void unpack_tile(MovesRaw<D>* held, int64_t left,
                                            const uint32_t (&z)[kTileItems]) {
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) {
    const int i = 32 * j + static_cast<int>(threadIdx.x % 32);
    if (i < left) held[i] = static_cast<MovesRaw<D>>(moved_by<D>(held[i], z[j]));
  }
}

// Applies a packed record; a block takes a chunk, a warp a tile of it.
template <int D>
__global__ void __launch_bounds__(kScanThreads, 4)
    moves_unpack_kernel(MovesDecodeArguments call, MovesDecodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ PackedTiles shared;
  __shared__ int64_t warp_sums[kScanThreads / 32];
  __shared__ uint32_t upper[kScanThreads / 32][kMovesTile];
  if (first_item() == 0) write_status(call, work);
  if (*work.fault != 0) return;
  const MovesSections s = sections_of_moves(call);
  for (int64_t c = blockIdx.x; c < s.chunks; c += gridDim.x) {
    const int64_t count = numbers_in_chunk(kMovesPacked, call.numel, c);
    const int64_t raw = round_up_16(count * sizeof(Raw)), bytes = s.chunk_bytes(c, raw);
    const uint8_t* chunk = s.data + int64_t{s.offsets[c]} * 16;
    Raw* held = static_cast<Raw*>(call.held) + c * kPackedChunk;
    if (bytes == raw) {
      for (int64_t i = threadIdx.x; i < count; i += kScanThreads) {
        held[i] = reinterpret_cast<const Raw*>(chunk)[i];
      }
      continue;
    }
    const int tiles = static_cast<int>((count + kMovesTile - 1) / kMovesTile);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < tiles) {
      shared.widths[threadIdx.x] = chunk[threadIdx.x];
      shared.escapes[threadIdx.x] = chunk[tiles + threadIdx.x];
    }
    __syncthreads();
    sum_tiles(shared, tiles, warp_sums);
    __syncthreads();
    const uint8_t* planes = chunk + round_up_16(2 * tiles);
    const Raw* values = reinterpret_cast<const Raw*>(planes + shared.planes * kPlaneBytes);
    const uint8_t* positions = reinterpret_cast<const uint8_t*>(values + shared.listed);
    for (int t = threadIdx.x / 32; t < tiles; t += kScanThreads / 32) {
      uint32_t z[kTileItems];
      const int width = shared.widths[t], listed = shared.escapes[t];
      read_planes(
          reinterpret_cast<const uint32_t*>(planes) + int64_t{shared.planes_before[t]} * kTileItems,
          width, z);
      if (listed != 0) {
        add_escapes(values + shared.escapes_before[t], positions + shared.escapes_before[t], listed,
                    width, upper[threadIdx.x / 32], z);
      }
      unpack_tile<D>(held + int64_t{t} * kMovesTile, count - int64_t{t} * kMovesTile, z);
    }
  }
}

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
  const int64_t chunks = chunk_count(call.coder, call.numel), resident = multiprocessors();
  if (call.coder == kMovesPacked) {
    const cudaLaunchConfig_t blocks =
        grid_for(chunks > 0 ? chunks : 1, resident * 8, kScanThreads, stream);
    cudaLaunchKernelEx(&blocks, moves_unpack_kernel<D>, call, work);
    return;
  }
  if (call.coder == kMovesRans && chunks > 0) {
    const cudaLaunchConfig_t warps = grid_for(chunks, resident * 32, 32, stream);
    cudaLaunchKernelEx(&warps, moves_rans_decode_kernel<D>, call, work);
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
  // A block at least for each context of rans, and warps for all chunks.
  const int64_t chunks = chunk_count(call.coder, call.numel);
  int64_t items = call.body_bytes / 16;
  if (items < 32 * chunks) items = 32 * chunks;
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
