// Orders a rank's entries by partition, by counting; inside a partition they keep their order. The
// result is that of Algorithm 1 and a sort. It replaces Algorithm 1 if the order is needed anyway.
//
// One pass for each 8 bits of the partition's number (one up to 256 partitions, else two), three
// launches a pass: every block counts the digits of its tile of entries; a scan over (digit, tile)
// gives the place where each tile's entries of a digit begin; every block counts again, warp by
// warp, and puts its entries there. Inside a warp, lanes of the same digit find one another with
// __match_any_sync, so that no atomic decides an order: the result is the same for every schedule.
//
// Bytes an entry and pass: 2 x 8 read of the partitions, 4 read and written of the entries' numbers
// (8 written in the last pass), and 4 x 256 x 3 for each tile of 2048.
#include "hash_launch.h"
#include "launch_grid.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {
namespace {

constexpr int kDigits = 256;
constexpr int kSplitWarps = kScanThreads / 32;
constexpr int kWarpEntries = kScanTile / kSplitWarps;
static_assert(kDigits == kScanThreads, "a thread sees to one digit");

struct SplitWorkspace {
  uint32_t* counts;  // [256 * tiles]: of each digit the entries of each tile, then where they begin
  ScanState* states;  // zeroed, one for each tile of `counts`
  unsigned* ticket;   // zeroed
  uint32_t* order;    // [count], between two passes
  int64_t zeroed_bytes;
  int64_t bytes;
};

SplitWorkspace lay_out_split(void* base, int64_t count) {
  Carver memory(base);
  SplitWorkspace w = {};
  const int64_t tiles = scan_tiles(count);
  w.states = memory.take<ScanState>(scan_tiles(kDigits * tiles));
  w.ticket = memory.take<unsigned>(1);
  w.zeroed_bytes = memory.used();
  w.counts = memory.take<uint32_t>(kDigits * tiles);
  w.order = memory.take<uint32_t>(count);
  w.bytes = memory.used();
  return w;
}

// One pass: entries in the order of `from` (null: as they come) by bits [shift, shift + 8).
struct SplitPass {
  const int64_t* partition_of;
  int64_t count;
  int64_t tiles;
  int shift;
  const uint32_t* from;
  uint32_t* to;         // null in the last pass
  int64_t* last_order;  // of the last pass

  __device__ __forceinline__ uint32_t entry(int64_t place) const {
    return from == nullptr ? static_cast<uint32_t>(place) : from[place];
  }
  __device__ __forceinline__ unsigned digit(uint32_t entry) const {
    return static_cast<unsigned>(partition_of[entry] >> shift) & (kDigits - 1);
  }
};

// Where a warp's entries of the tile begin and end.
struct WarpRange {
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ WarpRange warp_range(const SplitPass& pass, int64_t tile) {
  const int64_t begin = tile * kScanTile + threadIdx.x / 32 * kWarpEntries;
  return {begin, min(begin + kWarpEntries, pass.count)};
}

// Counts the digits of this warp's entries of a tile; called by the whole block, which afterwards
// sees all warps' counts.
__device__ __forceinline__ void count_digits(const SplitPass& pass, int64_t tile,
                                             uint32_t counts[kSplitWarps][kDigits]) {
  const int lane = threadIdx.x % 32;
  uint32_t* mine = counts[threadIdx.x / 32];
  for (int d = lane; d < kDigits; d += 32) mine[d] = 0;
  __syncwarp();
  const WarpRange range = warp_range(pass, tile);
  for (int64_t at = range.begin; at < range.end; at += 32) {
    // Lanes past the end share a digit that no entry has.
    const bool inside = at + lane < range.end;
    const unsigned digit = inside ? pass.digit(pass.entry(at + lane)) : kDigits;
    const unsigned peers = __match_any_sync(kAllLanes, digit);
    if (inside && __ffs(static_cast<int>(peers)) - 1 == lane) mine[digit] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kScanThreads, 4)
    split_count_kernel(SplitPass pass, SplitWorkspace work) {
  __shared__ uint32_t counts[kSplitWarps][kDigits];
  for (int64_t tile = blockIdx.x; tile < pass.tiles; tile += gridDim.x) {
    count_digits(pass, tile, counts);
    uint32_t sum = 0;
    for (int warp = 0; warp < kSplitWarps; ++warp) sum += counts[warp][threadIdx.x];
    work.counts[threadIdx.x * pass.tiles + tile] = sum;
    __syncthreads();  // the counts are free again
  }
}

// Exclusive sums of all counts, in place.
__global__ void __launch_bounds__(kScanThreads, 4)
    split_scan_kernel(SplitWorkspace work, int64_t count) {
  __shared__ TileScan shared;
  const int64_t tiles = scan_tiles(count);
  for (int64_t tile = take_tile(shared, work.ticket); tile < tiles;
       tile = take_tile(shared, work.ticket)) {
    const int64_t begin = tile * kScanTile + threadIdx.x * kScanItems;
    uint32_t number[kScanItems];
    int64_t own = 0;
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      number[k] = begin + k < count ? work.counts[begin + k] : 0;
      own += number[k];
    }
    uint32_t before = static_cast<uint32_t>(tile_prefix(shared, work.states, tile, own));
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      if (begin + k < count) work.counts[begin + k] = before;
      before += number[k];
    }
  }
}

__global__ void __launch_bounds__(kScanThreads, 4)
    split_scatter_kernel(SplitPass pass, SplitWorkspace work) {
  __shared__ uint32_t places[kSplitWarps][kDigits];
  const int lane = threadIdx.x % 32;
  const unsigned lanes_before = (1u << lane) - 1;
  for (int64_t tile = blockIdx.x; tile < pass.tiles; tile += gridDim.x) {
    count_digits(pass, tile, places);
    // A digit's entries of the tile lie warp after warp.
    uint32_t place = work.counts[threadIdx.x * pass.tiles + tile];
    for (int warp = 0; warp < kSplitWarps; ++warp) {
      const uint32_t here = places[warp][threadIdx.x];
      places[warp][threadIdx.x] = place;
      place += here;
    }
    __syncthreads();
    uint32_t* mine = places[threadIdx.x / 32];
    const WarpRange range = warp_range(pass, tile);
    for (int64_t at = range.begin; at < range.end; at += 32) {
      const bool inside = at + lane < range.end;
      const uint32_t entry = inside ? pass.entry(at + lane) : 0;
      const unsigned digit = inside ? pass.digit(entry) : kDigits;
      const unsigned peers = __match_any_sync(kAllLanes, digit);
      if (inside) {
        const uint32_t target = mine[digit] + __popc(peers & lanes_before);
        if (pass.to != nullptr) {
          pass.to[target] = entry;
        } else {
          pass.last_order[target] = entry;
        }
      }
      __syncwarp();  // all have read their places
      if (inside && __ffs(static_cast<int>(peers)) - 1 == lane) mine[digit] += __popc(peers);
      __syncwarp();
    }
    __syncthreads();  // the places are free again
  }
}

// Finds where each partition begins, from the order, and checks that all partitions are in range.
__global__ void __launch_bounds__(kScanThreads) split_offsets_kernel(HashSplitArguments call) {
  for (int64_t i = first_item(); i <= call.count; i += item_stride()) {
    const bool last = i == call.count;
    int64_t here = call.partitions, before = -1;
    if (!last) here = call.partition_of[call.order[i]];
    if (i > 0) before = call.partition_of[call.order[i - 1]];
    if (!last && (here < 0 || here >= call.partitions)) {
      atomicMin(reinterpret_cast<unsigned long long*>(call.status),
                static_cast<unsigned long long>(call.order[i]));
      continue;
    }
    // An entry out of range gets no place; the caller raises an error.
    for (int64_t p = max(before, int64_t{-1}) + 1; p <= here; ++p) call.offsets[p] = i;
  }
}

}  // namespace

int64_t hash_split_workspace_bytes(int64_t count) {
  return lay_out_split(nullptr, count).bytes;
}

void launch_hash_split(const HashSplitArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const SplitWorkspace work = lay_out_split(call.workspace, call.count);
  const int64_t tiles = scan_tiles(call.count), most = multiprocessors() * 4;
  cudaMemsetAsync(call.status, 0xff, sizeof *call.status, stream);
  const int passes = call.partitions > kDigits ? 2 : 1;
  for (int number = 0; number < passes && call.count > 0; ++number) {
    const bool last = number + 1 == passes;
    const SplitPass pass = {call.partition_of,
                            call.count,
                            tiles,
                            8 * number,
                            number == 0 ? nullptr : work.order,
                            last ? nullptr : work.order,
                            call.order};
    cudaMemsetAsync(work.states, 0, static_cast<size_t>(work.zeroed_bytes), stream);
    const cudaLaunchConfig_t all = grid_for(tiles, most, kScanThreads, stream);
    cudaLaunchKernelEx(&all, split_count_kernel, pass, work);
    const cudaLaunchConfig_t scan =
        grid_for(scan_tiles(kDigits * tiles), most, kScanThreads, stream);
    cudaLaunchKernelEx(&scan, split_scan_kernel, work, kDigits * tiles);
    cudaLaunchKernelEx(&all, split_scatter_kernel, pass, work);
  }
  const cudaLaunchConfig_t items = grid_of_items(call.count + 1, kScanThreads, stream);
  cudaLaunchKernelEx(&items, split_offsets_kernel, call);
}

}  // namespace megatron_sparse
