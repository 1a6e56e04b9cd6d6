// The packed coder of moves on CUDA: bit planes of tiles, and the moves that need more bits.
//
// A block takes a chunk, a warp a tile of it: lane i holds the moves 32 j + i. The first pass over
// a chunk finds the widths, so its size, so, by look-back, its place; the second writes the planes,
// which are ballots. It reads the numbers again, from the L2 cache.
// Bytes of device memory: two numbers read an element, and the record written.
#pragma once

#include "moves_encode_work.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {

inline constexpr int kChunkTiles = kPackedChunk / kMovesTile;
static_assert(kChunkTiles <= 64, "sums of widths and of escapes share a word");

// A chunk's tiles, in shared memory.
struct PackedTiles {
  uint8_t widths[kChunkTiles];
  uint8_t escapes[kChunkTiles];
  uint32_t planes_before[kChunkTiles];  // of the chunk's tiles before this one
  uint32_t escapes_before[kChunkTiles];
  uint32_t planes, listed;  // of all tiles
};

// Fills planes_before, escapes_before and their totals; called by a whole block of kScanThreads.
__device__ __forceinline__ void sum_tiles(PackedTiles& shared, int tiles, int64_t* warp_sums) {
  const int t = threadIdx.x;
  const int64_t own = t < tiles ? int64_t{shared.widths[t]} << 32 | int64_t{shared.escapes[t]} : 0;
  int64_t total;
  const int64_t before = block_exclusive_sum<kScanThreads>(own, warp_sums, total);
  if (t < tiles) {
    shared.planes_before[t] = static_cast<uint32_t>(before >> 32);
    shared.escapes_before[t] = static_cast<uint32_t>(before);
  }
  if (t == 0) {
    shared.planes = static_cast<uint32_t>(total >> 32);
    shared.listed = static_cast<uint32_t>(total);
  }
}

// This lane's moves of a tile; `left` numbers are left from its begin on.
template <int D>
__device__ __forceinline__ void load_moves(const MovesRaw<D>* old, const MovesRaw<D>* now,
                                           int64_t left, uint32_t (&z)[kTileItems]) {
  const int lane = threadIdx.x % 32;
  uint32_t was[kTileItems], is[kTileItems];
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) {
    const int i = 32 * j + lane;
    was[j] = i < left ? old[i] : 0;
    is[j] = i < left ? now[i] : 0;
  }
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) z[j] = zigzag_of<D>(was[j], is[j]);
}

// The narrowest width of those with the fewest bytes, and how many moves need more.
template <int D>
__device__ __forceinline__ void choose_width(const uint32_t (&z)[kTileItems], int& width,
                                             int& escapes) {
  uint32_t any = 0;
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) any |= z[j];
  any = __reduce_or_sync(kAllLanes, any);
  const int longest = any == 0 ? 0 : 32 - __clz(static_cast<int>(any));
  width = longest;
  escapes = 0;
  int best_bytes = longest * static_cast<int>(kPlaneBytes);
  for (int bits = longest - 1; bits >= 0; --bits) {
    unsigned above = 0;
#pragma unroll
    for (int j = 0; j < kTileItems; ++j) above += z[j] >> bits != 0;
    const int listed = static_cast<int>(__reduce_add_sync(kAllLanes, above));
    if (listed >= kMovesTile) return;
    const int bytes =
        bits * static_cast<int>(kPlaneBytes) + listed * (static_cast<int>(sizeof(MovesRaw<D>)) + 1);
    if (bytes <= best_bytes) {
      width = bits;
      escapes = listed;
      best_bytes = bytes;
    }
  }
}

// Writes a tile's planes; called by a warp.
__device__ __forceinline__ void write_planes(const uint32_t (&z)[kTileItems], int width,
                                             uint32_t* planes) {
  const int lane = threadIdx.x % 32;
  constexpr int kAtOnce = 32 / kTileItems;  // planes, a word in each lane
  for (int first = 0; first < width; first += kAtOnce) {
    const int count = min(width - first, kAtOnce);
    uint32_t kept = 0;
    for (int p = 0; p < count; ++p) {
#pragma unroll
      for (int j = 0; j < kTileItems; ++j) {
        const uint32_t word = __ballot_sync(kAllLanes, z[j] >> (first + p) & 1);
        if (lane == kTileItems * p + j) kept = word;
      }
    }
    if (lane < kTileItems * count) planes[kTileItems * first + lane] = kept;
  }
}

// Writes the upper bits and the positions of a tile's escapes; called by a warp.
template <class Raw>
__device__ __forceinline__ void write_escapes(const uint32_t (&z)[kTileItems], int width,
                                              Raw* values, uint8_t* positions) {
  const int lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll
  for (int j = 0; j < kTileItems; ++j) {
    const uint32_t high = z[j] >> width;
    const unsigned listed = __ballot_sync(kAllLanes, high != 0);
    const int at = before + __popc(listed & ((1u << lane) - 1));
    if (high != 0) {
      values[at] = static_cast<Raw>(high);
      positions[at] = static_cast<uint8_t>(32 * j + lane);
    }
    before += __popc(listed);
  }
}

template <int D>
__device__ __forceinline__ void write_packed_chunk(const MovesRaw<D>* old, const MovesRaw<D>* now,
                                                   int64_t count, int tiles,
                                                   const PackedTiles& shared, int64_t bytes,
                                                   uint8_t* target) {
  using Raw = MovesRaw<D>;
  const int64_t heads = round_up_16(2 * tiles);
  const int64_t values_at = heads + shared.planes * kPlaneBytes;
  const int64_t positions_at = values_at + shared.listed * sizeof(Raw);
  for (int i = threadIdx.x; i < heads; i += kScanThreads) {
    target[i] = i < tiles       ? shared.widths[i]
                : i < 2 * tiles ? shared.escapes[i - tiles]
                                : uint8_t{0};
  }
  for (int64_t i = positions_at + shared.listed + threadIdx.x; i < bytes; i += kScanThreads) {
    target[i] = 0;
  }
  for (int t = threadIdx.x / 32; t < tiles; t += kScanThreads / 32) {
    uint32_t z[kTileItems];
    const int64_t begin = int64_t{t} * kMovesTile;
    load_moves<D>(old + begin, now + begin, count - begin, z);
    const int width = shared.widths[t];
    write_planes(z, width,
                 reinterpret_cast<uint32_t*>(target + heads) +
                     int64_t{shared.planes_before[t]} * kTileItems);
    if (shared.escapes[t] != 0) {
      write_escapes(z, width, reinterpret_cast<Raw*>(target + values_at) + shared.escapes_before[t],
                    target + positions_at + shared.escapes_before[t]);
    }
  }
}

// Packs all chunks into their places.
template <int D>
__global__ void __launch_bounds__(kScanThreads, 4)
    moves_pack_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ TileScan scan;
  __shared__ PackedTiles shared;
  const int64_t chunks = chunk_count(kMovesPacked, call.numel);
  for (int64_t chunk = take_tile(scan, work.ticket); chunk < chunks;
       chunk = take_tile(scan, work.ticket)) {
    const int64_t first = chunk * kPackedChunk;
    const int64_t count = numbers_in_chunk(kMovesPacked, call.numel, chunk);
    const int tiles = static_cast<int>((count + kMovesTile - 1) / kMovesTile);
    const Raw* old = static_cast<const Raw*>(call.old) + first;
    const Raw* now = static_cast<const Raw*>(call.now) + first;
    for (int t = threadIdx.x / 32; t < tiles; t += kScanThreads / 32) {
      uint32_t z[kTileItems];
      const int64_t begin = int64_t{t} * kMovesTile;
      load_moves<D>(old + begin, now + begin, count - begin, z);
      int width, escapes;
      choose_width<D>(z, width, escapes);
      if (threadIdx.x % 32 == 0) {
        shared.widths[t] = static_cast<uint8_t>(width);
        shared.escapes[t] = static_cast<uint8_t>(escapes);
      }
    }
    __syncthreads();
    sum_tiles(shared, tiles, scan.warp_sums);
    __syncthreads();
    const int64_t packed = round_up_16(round_up_16(2 * tiles) + shared.planes * kPlaneBytes +
                                       shared.listed * (int64_t{sizeof(Raw)} + 1));
    const int64_t raw = round_up_16(count * sizeof(Raw));
    const int64_t bytes = packed < raw ? packed : raw;
    if (threadIdx.x < 32) {
      const int64_t before = place_chunk(call, work, chunk, chunks, bytes);
      if (threadIdx.x == 0) scan.before = before;
    }
    __syncthreads();
    uint8_t* target = chunks_of_record(call, work, chunks) + scan.before;
    if (packed < raw) {
      write_packed_chunk<D>(old, now, count, tiles, shared, bytes, target);
    } else {
      write_raw_chunk<D>(call, chunk, target);
    }
  }
}

}  // namespace megatron_sparse
