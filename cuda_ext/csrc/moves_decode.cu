// Records of moves on CUDA: the decoders' launches; moves.cpp is the same for the CPU.
//
// What is held changes in the last launch, and only where the ones before found nothing wrong.
#include "moves_launch.h"
#include "moves_planes.cuh"
#include "moves_rans_decode.cuh"

namespace megatron_sparse {
namespace {

constexpr int kCopyThreads = 256, kUnpackThreads = 128;
constexpr int kUnpackParts = 4;  // of a chunk, for a warp each

// The moves of a tile's bit planes in this lane; called by a warp.
template <int D>
__device__ __forceinline__ void read_planes(const uint8_t* planes, int width,
                                            uint32_t (&z)[kLaneWords<D>]) {
  const int plane = threadIdx.x % 4;  // of four
  const uint32_t* own =
      reinterpret_cast<const uint32_t*>(planes) + plane * kPlaneWords + threadIdx.x % 32 / 4;
  uint2 bytes[sizeof(MovesRaw<D>)];
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(MovesRaw<D>)); ++k) {
    bytes[k] = {0, 0};
    if (width <= 8 * k) continue;
    uint2 eight = {0, 0};
    if (8 * k + plane < width) eight.x = own[8 * k * kPlaneWords];
    if (8 * k + 4 + plane < width) eight.y = own[(8 * k + 4) * kPlaneWords];
    bytes[k] = transposed({exchanged(eight.x), exchanged(eight.y)});
  }
  from_bytes<D>(bytes, z);
}

// Adds the upper bits of a tile's escapes; `upper` has room for the tile's moves, in shared memory.
template <int D>
__device__ __forceinline__ void add_escapes(const MovesRaw<D>* values, const uint8_t* positions,
                                            int listed, int width, uint4* upper,
                                            uint32_t (&z)[kLaneWords<D>]) {
  using Raw = MovesRaw<D>;
  constexpr int kPerWord = kLaneMoves / kLaneWords<D>;
  uint4* own = upper + threadIdx.x % 32 * (kLaneWords<D> / 4);
#pragma unroll
  for (int v = 0; v < kLaneWords<D> / 4; ++v) own[v] = {0, 0, 0, 0};
  __syncwarp();
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < listed; e += 32) {
    // A full width leaves nothing above it. A position may stand twice in a damaged record.
    const uint32_t high = width < 32 ? uint32_t{values[e]} << width : 0;
    const int at = positions[e];
    atomicOr(reinterpret_cast<uint32_t*>(upper) + at / kPerWord,
             uint32_t{static_cast<Raw>(high)} << at % kPerWord * 16);
  }
  __syncwarp();
#pragma unroll
  for (int v = 0; v < kLaneWords<D> / 4; ++v) {
    const uint4 words = own[v];
    z[4 * v] |= words.x;
    z[4 * v + 1] |= words.y;
    z[4 * v + 2] |= words.z;
    z[4 * v + 3] |= words.w;
  }
  __syncwarp();
}

// A chunk's sections, the sizes of which were checked.
template <int D>
struct PackedSections {
  int tiles;
  uint32_t own, sums;  // planes << 16 | escapes, of this lane's tile, and of those up to it
  const uint8_t* planes;
  const MovesRaw<D>* values;
  const uint8_t* positions;

  // Called by a warp.
  __device__ __forceinline__ PackedSections(const uint8_t* chunk, int count)
      : tiles((count + kMovesTile - 1) / kMovesTile) {
    const int t = threadIdx.x % 32;
    own = t < tiles ? uint32_t{chunk[t]} << 16 | chunk[tiles + t] : 0;
    sums = warp_inclusive_sum(own);
    const uint32_t all = __shfl_sync(kAllLanes, sums, 31);
    planes = chunk + pad16(2 * tiles);
    values = reinterpret_cast<const MovesRaw<D>*>(planes + (all >> 16) * kPlaneBytes);
    positions = reinterpret_cast<const uint8_t*>(values + (all & 0xffffu));
  }

  // The moves of tile `t`; called by a warp.
  __device__ __forceinline__ void read_tile(int t, uint4* upper,
                                            uint32_t (&z)[kLaneWords<D>]) const {
    const uint32_t head = __shfl_sync(kAllLanes, own, t);
    const uint32_t before = __shfl_sync(kAllLanes, sums, t) - head;
    const int width = static_cast<int>(head >> 16), listed = static_cast<int>(head & 0xffffu);
    read_planes<D>(planes + (before >> 16) * kPlaneBytes, width, z);
    if (listed == 0) return;
    const uint32_t first = before & 0xffffu;
    add_escapes<D>(values + first, positions + first, listed, width, upper, z);
  }
};

// Applies a packed record; a warp takes eight tiles of a chunk.
template <int D>
__global__ void __launch_bounds__(kUnpackThreads, D == kFp32 ? 6 : 8)
    moves_unpack_kernel(MovesDecodeArguments call, MovesDecodeWork work) {
  using Raw = MovesRaw<D>;
  constexpr int kVectors = kLaneWords<D> / 4, kItems = 16 / sizeof(Raw);
  __shared__ uint4 upper[kUnpackThreads / 32][32 * kVectors];
  if (first_item() == 0) write_status(call, work);
  if (*work.fault != 0) return;
  const MovesSections s = sections_of_moves(call);
  const bool aligned = reinterpret_cast<uintptr_t>(call.held) % 16 == 0;
  const int lane = threadIdx.x % 32;
  for (int64_t part = first_item() / 32; part < s.chunks * kUnpackParts;
       part += item_stride() / 32) {
    const int64_t c = part / kUnpackParts;
    const int first = static_cast<int>(part % kUnpackParts) * (kPackedChunk / kUnpackParts);
    const int count = static_cast<int>(numbers_in_chunk(kMovesPacked, call.numel, c));
    const int end = min(count, first + static_cast<int>(kPackedChunk / kUnpackParts));
    if (first >= end) continue;
    const int64_t raw = pad16(count * sizeof(Raw)), bytes = s.chunk_bytes(c, raw);
    const uint8_t* chunk = s.data + int64_t{s.offsets[c]} * 16;
    Raw* held = static_cast<Raw*>(call.held) + c * kPackedChunk;
    if (bytes == raw) {
      for (int i = first + lane; i < end; i += 32) {
        held[i] = reinterpret_cast<const Raw*>(chunk)[i];
      }
      continue;
    }
    const PackedSections<D> sections(chunk, count);
    for (int begin = first; begin < end; begin += kMovesTile) {
      const int lane_first = begin + kLaneMoves * lane;
      const bool whole = aligned && begin + kMovesTile <= count;
      uint32_t was[kLaneWords<D>], z[kLaneWords<D>];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = lane_first + v * kItems;
        const uint4 words =
            whole ? *reinterpret_cast<const uint4*>(held + at) : vector_of<Raw>(held, at, count);
        was[4 * v] = words.x;
        was[4 * v + 1] = words.y;
        was[4 * v + 2] = words.z;
        was[4 * v + 3] = words.w;
      }
      sections.read_tile(begin / kMovesTile, upper[threadIdx.x / 32], z);
#pragma unroll
      for (int w = 0; w < kLaneWords<D>; ++w) z[w] = moved_word<D>(was[w], z[w]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = lane_first + v * kItems;
        if (whole) {
          *reinterpret_cast<uint4*>(held + at) = {z[4 * v], z[4 * v + 1], z[4 * v + 2],
                                                  z[4 * v + 3]};
          continue;
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const uint32_t word = z[4 * v + i * sizeof(Raw) / 4];
          if (at + i < count) held[at + i] = static_cast<Raw>(word >> i * 8 * sizeof(Raw) % 32);
        }
      }
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
    const int64_t blocks = (chunks * kUnpackParts * 32 + kUnpackThreads - 1) / kUnpackThreads;
    const cudaLaunchConfig_t warps =
        grid_for(blocks > 0 ? blocks : 1, resident * 16, kUnpackThreads, stream);
    cudaLaunchKernelEx(&warps, moves_unpack_kernel<D>, call, work);
    return;
  }
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
