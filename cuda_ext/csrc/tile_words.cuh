// The bits of one tile of 4096 elements, held by a warp: words and, for each, how many bits are set
// in the words before it.
#pragma once

#include "compact_kernel.cuh"

namespace megatron_sparse {

struct alignas(8) TileWords {
  uint32_t word[kTileWords];
  uint32_t before[kTileWords];
};

// Called by a whole warp: reads 128 words (16-byte aligned) and returns the number of bits set.
__device__ __forceinline__ int load_tile_words(TileWords& tile, const uint32_t* words) {
  const int lane = threadIdx.x % 32;
  const uint4 four = reinterpret_cast<const uint4*>(words)[lane];
  const int x = __popc(four.x), y = __popc(four.y), z = __popc(four.z), w = __popc(four.w);
  const int inclusive = warp_inclusive_sum(x + y + z + w);
  const int before = inclusive - (x + y + z + w);
  __syncwarp();  // the tile before may still be read
  tile.word[4 * lane] = four.x;
  tile.word[4 * lane + 1] = four.y;
  tile.word[4 * lane + 2] = four.z;
  tile.word[4 * lane + 3] = four.w;
  tile.before[4 * lane] = before;
  tile.before[4 * lane + 1] = before + x;
  tile.before[4 * lane + 2] = before + x + y;
  tile.before[4 * lane + 3] = before + x + y + z;
  __syncwarp();
  return __shfl_sync(kAllLanes, inclusive, 31);
}

}  // namespace megatron_sparse
