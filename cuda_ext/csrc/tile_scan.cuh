// Scans over tiles of numbers, by blocks that take tiles in the order of tickets.
#pragma once

#include "portability.h"
#include "scan.cuh"

namespace megatron_sparse {

constexpr int kScanThreads = 256;
constexpr int kScanItems = 8;  // neighbours that a thread handles
constexpr int kScanTile = kScanThreads * kScanItems;

MS_INLINE int64_t scan_tiles(int64_t count) {
  return (count + kScanTile - 1) / kScanTile;
}

// A block's shared memory for take_tile and tile_prefix.
struct TileScan {
  int64_t warp_sums[kScanThreads / 32];
  int64_t before;
  unsigned ticket;
};

// The next tile; called by the whole block, which has finished the one before.
__device__ __forceinline__ int64_t take_tile(TileScan& shared, unsigned* ticket) {
  __syncthreads();
  if (threadIdx.x == 0) shared.ticket = atomicAdd(ticket, 1u);
  __syncthreads();
  return shared.ticket;
}

// The sum over all threads of all earlier tiles and over this tile's threads before this one;
// `states` has a zeroed word for each tile. Called by the whole block.
__device__ __forceinline__ int64_t tile_prefix(TileScan& shared, ScanState* states, int64_t tile,
                                               int64_t own) {
  int64_t total = 0;
  const int64_t inside = block_exclusive_sum<kScanThreads>(own, shared.warp_sums, total);
  if (threadIdx.x < 32) {
    const int64_t before = look_back(states, tile, total);
    if (threadIdx.x == 0) shared.before = before;
  }
  __syncthreads();
  return shared.before + inside;
}

}  // namespace megatron_sparse
