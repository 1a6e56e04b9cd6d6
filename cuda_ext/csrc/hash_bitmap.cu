// The hash bitmap on CUDA (ZEN, Algorithm 2); hash_bitmap.cpp is the same for the CPU.
//
// Packing is one launch: a block takes tiles of 4096 positions by ticket, holds them in registers,
// writes their bits, and stores the non-zero values at the place that decoupled look-back finds.
// Adding takes two launches: the bits of all tiles are counted and compared with what is expected,
// then each warp takes a tile, and each lane the bits of four words: the element of a set bit
// follows from the permutation's inverse, or is its position.
// Positions have different elements, so there are no atomics and the sums do not depend on the
// schedule.
//
// Bytes a position at density d and v bytes a value. Packing: v read, 1/8 + d v written. Adding:
// 2/8 + d v read, d sectors of 32 bytes of acc read and written, because hashed elements are
// scattered.
#include "elementwise.h"
#include "hash_launch.h"
#include "hash_partition.h"
#include "lanes.h"
#include "launch_grid.cuh"
#include "raw_type.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {
namespace {

constexpr int kBitmapThreads = 256;
constexpr int kBitmapTile = 4096;  // positions
constexpr int kBitmapWords = kBitmapTile / 32;
constexpr int kWarpRounds = kBitmapTile / kBitmapThreads;  // 32 positions a warp each
constexpr int kLaneWords = kBitmapWords / 32;

MS_INLINE int64_t bitmap_tiles(int64_t positions) {
  return (positions + kBitmapTile - 1) / kBitmapTile;
}

struct BitmapWorkspace {
  ScanState* states;     // zeroed, one for each tile
  unsigned* ticket;      // zeroed
  unsigned* stray_bits;  // zeroed; 1 if a bit is behind the last position
  int64_t zeroed_bytes;
  int64_t bytes;
};

BitmapWorkspace lay_out_bitmap(void* base, int64_t positions) {
  Carver memory(base);
  BitmapWorkspace w = {};
  w.states = memory.take<ScanState>(bitmap_tiles(positions));
  w.ticket = memory.take<unsigned>(1);
  w.stray_bits = memory.take<unsigned>(1);
  w.zeroed_bytes = w.bytes = memory.used();
  return w;
}

template <int VALUE>
__global__ void __launch_bounds__(kBitmapThreads, 4)
    bitmap_pack_kernel(BitmapPackArguments call, BitmapWorkspace work) {
  using Raw = typename RawType<VALUE>::type;
  constexpr uint32_t magnitude = VALUE == kFp32 ? 0x7fffffffu : 0x7fffu;
  __shared__ TileScan shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lanes_before = (1u << lane) - 1;
  const Raw* values = static_cast<const Raw*>(call.values);
  Raw* packed = static_cast<Raw*>(call.packed);
  const int64_t word_count = 2 * ((call.positions + 63) / 64);
  const int64_t tiles = bitmap_tiles(call.positions);
  for (int64_t tile = take_tile(shared, work.ticket); tile < tiles;
       tile = take_tile(shared, work.ticket)) {
    const int64_t first = tile * kBitmapTile + warp * kWarpRounds * 32 + lane;
    Raw mine[kWarpRounds];
#pragma unroll
    for (int k = 0; k < kWarpRounds; ++k) {
      mine[k] = first + 32 * k < call.positions ? values[first + 32 * k] : Raw{0};
    }
    // Lane k keeps the warp's word k.
    uint32_t my_word = 0;
#pragma unroll
    for (int k = 0; k < kWarpRounds; ++k) {
      const uint32_t word = __ballot_sync(kAllLanes, (mine[k] & magnitude) != 0);
      if (lane == k) my_word = word;
    }
    const int64_t word_at = tile * kBitmapWords + warp * kWarpRounds + lane;
    if (lane < kWarpRounds && word_at < word_count) call.words[word_at] = my_word;
    const int count = __popc(my_word);
    // A thread's prefix is that of its word; lanes without a word come after all words.
    const int64_t before = tile_prefix(shared, work.states, tile, count);
    if (tile + 1 == tiles && threadIdx.x == kBitmapThreads - 1) *call.nnz = before + count;
#pragma unroll
    for (int k = 0; k < kWarpRounds; ++k) {
      const uint32_t word = __shfl_sync(kAllLanes, my_word, k);
      const int64_t word_before = __shfl_sync(kAllLanes, before, k);
      if (word >> lane & 1) packed[word_before + __popc(word & lanes_before)] = mine[k];
    }
  }
}

// The words of a tile that this lane handles; zeros behind the last.
__device__ __forceinline__ int load_lane_words(const BitmapArguments& call, int64_t tile,
                                               uint32_t words[kLaneWords]) {
  const int64_t word_count = 2 * ((call.positions + 63) / 64);
  const int64_t first = tile * kBitmapWords + threadIdx.x % 32 * kLaneWords;
  int count = 0;
#pragma unroll
  for (int k = 0; k < kLaneWords; ++k) {
    words[k] = first + k < word_count ? call.words[first + k] : 0;
    count += __popc(words[k]);
  }
  return count;
}

// Counts the bits of every tile, and looks for bits behind the last position.
__global__ void __launch_bounds__(kBitmapThreads, 4)
    bitmap_count_kernel(BitmapArguments call, BitmapWorkspace work) {
  const int lane = threadIdx.x % 32;
  const int64_t tiles = bitmap_tiles(call.positions);
  for (;;) {
    unsigned ticket = 0;
    if (lane == 0) ticket = atomicAdd(work.ticket, 1u);
    const int64_t tile = __shfl_sync(kAllLanes, ticket, 0);
    if (tile >= tiles) return;
    uint32_t words[kLaneWords];
    const int count = load_lane_words(call, tile, words);
    look_back(work.states, tile, warp_sum(count));
    const int64_t left = call.positions - (tile * kBitmapWords + lane * kLaneWords) * 32;
#pragma unroll
    for (int k = 0; k < kLaneWords; ++k) {
      const int64_t inside = left - 32 * k;
      const bool stray = inside < 32 && (inside <= 0 ? words[k] : words[k] >> inside) != 0;
      if (stray) atomicMax(work.stray_bits, 1u);
    }
  }
}

// After the count: finds the first error of the bitmap; the first thread writes it.
__device__ __forceinline__ bool bitmap_fits(const BitmapArguments& call,
                                            const BitmapWorkspace& work, int64_t tiles) {
  const int64_t counted = prefix_after(work.states, tiles - 1);
  int64_t field = kFits, found = counted;
  if (*work.stray_bits != 0) {
    field = kFieldBitmap;
    found = call.positions;
  } else if (counted != call.nnz) {
    field = kFieldNnz;
  }
  if (first_item() == 0) {
    call.status[0] = field;
    call.status[1] = found;
  }
  return field == kFits;
}

template <int VALUE>
__global__ void __launch_bounds__(kBitmapThreads, 4)
    bitmap_add_kernel(BitmapArguments call, BitmapWorkspace work, Permutation permutation) {
  using Raw = typename RawType<VALUE>::type;
  const int64_t tiles = bitmap_tiles(call.positions);
  if (!bitmap_fits(call, work, tiles)) return;
  const Raw* values = reinterpret_cast<const Raw*>(call.values);
  const int lane = threadIdx.x % 32;
  for (int64_t tile = first_item() / 32; tile < tiles; tile += item_stride() / 32) {
    uint32_t words[kLaneWords];
    const int count = load_lane_words(call, tile, words);
    int64_t rank = prefix_after(work.states, tile - 1) + warp_inclusive_sum(count) - count;
    const int64_t first = (tile * kBitmapWords + lane * kLaneWords) * 32;
#pragma unroll
    for (int k = 0; k < kLaneWords; ++k) {
      for (uint32_t left = words[k]; left != 0; left &= left - 1) {
        const int64_t position = first + 32 * k + __ffs(static_cast<int>(left)) - 1;
        int64_t element = position;
        if (call.permuted) {
          const uint32_t permuted = static_cast<uint32_t>(call.first + position);
          element = unpermute_walk(permutation, unpermute_turn(permutation, permuted));
        }
        call.acc[element] += widen<ScalarLanes, VALUE>(values[rank++]);
      }
    }
  }
}

}  // namespace

int64_t bitmap_workspace_bytes(int64_t positions) {
  return lay_out_bitmap(nullptr, positions).bytes;
}

void launch_hash_bitmap_pack(const BitmapPackArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const BitmapWorkspace work = lay_out_bitmap(call.workspace, call.positions);
  cudaMemsetAsync(work.states, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  cudaMemsetAsync(call.nnz, 0, sizeof *call.nnz, stream);
  if (call.positions == 0) return;
  const cudaLaunchConfig_t all =
      grid_for(bitmap_tiles(call.positions), multiprocessors() * 4, kBitmapThreads, stream);
  // bf16 and fp16 differ only in what their bits mean.
  with_constant<kFp32, kBf16>(call.value_dtype, [&](auto value) {
    cudaLaunchKernelEx(&all, bitmap_pack_kernel<value.value>, call, work);
  });
}

void launch_hash_bitmap_add(const BitmapArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const BitmapWorkspace work = lay_out_bitmap(call.workspace, call.positions);
  cudaMemsetAsync(work.states, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  const Permutation permutation = make_permutation(call.numel, static_cast<uint64_t>(call.seed));
  // At least one block, to write the status.
  const int64_t tiles = bitmap_tiles(call.positions);
  const cudaLaunchConfig_t all =
      grid_of_items((tiles < 1 ? 1 : tiles) * 32, kBitmapThreads, stream);
  if (tiles > 0) cudaLaunchKernelEx(&all, bitmap_count_kernel, call, work);
  with_constant<kFp32, kBf16, kFp16>(call.value_dtype, [&](auto value) {
    cudaLaunchKernelEx(&all, bitmap_add_kernel<value.value>, call, work, permutation);
  });
}

}  // namespace megatron_sparse
