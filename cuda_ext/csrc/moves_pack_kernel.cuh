// The packed coder of moves on CUDA: bit planes of tiles, and the moves that need more bits.
//
// A block takes a chunk, a warp four of its tiles, whose moves stay in registers. The last warp has
// no tiles: it chooses the widths of all, so the chunk's size, so, by look-back, its place, while
// the others write the chunk into shared memory. Then all move it to its place and sum it.
// Bytes of device memory: two numbers read an element, and the record written.
#pragma once

#include "moves_encode_work.cuh"
#include "moves_planes.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {

inline constexpr int kChunkTiles = kPackedChunk / kMovesTile;
static_assert(kChunkTiles == 32, "a lane chooses the width of a tile");
inline constexpr int kPackWarps = 8;  // that have tiles
inline constexpr int kWarpTiles = kChunkTiles / kPackWarps;
inline constexpr int kPackThreads = 32 * (kPackWarps + 1);

template <int D>
inline constexpr int kEscapeBytes = static_cast<int>(sizeof(MovesRaw<D>)) + 1;

// A tile in its chunk.
struct PackedTile {
  int width, planes_at;  // bytes
  int escapes, escapes_before;
};

// A chunk, in shared memory.
template <int D>
struct PackedChunk {
  uint4 bytes[kPackedChunk * sizeof(MovesRaw<D>) / 16];
  MovesRaw<D> moves[kPackWarps][kMovesTile];  // of a tile of each warp, 16-byte aligned
  // How many moves of a tile have bits from width 8 k + i on, and << 16 from 8 k + 4 + i on, at
  // 4 k + i. The odd word is for the banks.
  uint32_t counts[kChunkTiles][4 * sizeof(MovesRaw<D>) + 1];
  uint32_t counted[kChunkTiles];  // bytes of moves whose widths have counts << 16 | moves beyond
  PackedTile tiles[kChunkTiles];
  int values_at, positions_at, used;  // bytes
  int64_t before;                     // bytes of the chunks before
  int64_t next;                       // chunk
};

// The moves of a warp's tiles from number `first` of the chunk on.
template <int D>
__device__ __forceinline__ void load_moves(const MovesRaw<D>* old, const MovesRaw<D>* now,
                                           int first, int count,
                                           uint32_t (&z)[kWarpTiles][kLaneWords<D>]) {
  constexpr int kVectors = kLaneWords<D> / 4, kItems = 16 / sizeof(MovesRaw<D>);
  uint4 was[kWarpTiles][kVectors], is[kWarpTiles][kVectors];
  const int lane_first = first + static_cast<int>(threadIdx.x % 32) * kLaneMoves;
  const auto each = [&](auto load) {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = lane_first + t * kMovesTile + v * kItems;
        was[t][v] = load(old, at);
        is[t][v] = load(now, at);
      }
    }
  };
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(old) | reinterpret_cast<uintptr_t>(now);
  if (count == kPackedChunk && addresses % 16 == 0) {
    each(
        [](const MovesRaw<D>* from, int at) { return *reinterpret_cast<const uint4*>(from + at); });
  } else {
    each([&](const MovesRaw<D>* from, int at) { return vector_of(from, at, count); });
  }
#pragma unroll
  for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      z[t][4 * v] = zigzag_word<D>(was[t][v].x, is[t][v].x);
      z[t][4 * v + 1] = zigzag_word<D>(was[t][v].y, is[t][v].y);
      z[t][4 * v + 2] = zigzag_word<D>(was[t][v].z, is[t][v].z);
      z[t][4 * v + 3] = zigzag_word<D>(was[t][v].w, is[t][v].w);
    }
  }
}

// How many moves of a tile have bits from each of eight widths on, as PackedChunk has them, in the
// lanes i % 4; also the bit planes, and how many moves have bits beyond. Called by a warp.
template <int D>
__device__ __forceinline__ uint32_t count_widths(const uint32_t (&z)[kLaneWords<D>], int k,
                                                 uint2& planes, uint32_t& listed) {
  planes = planes_of<D>(z, k);
  const uint32_t above = beyond<D>(z, 8 * (k + 1));
  uint2 reach = planes;
  reach.y |= reach.y >> 8;
  reach.y |= reach.y >> 16 | above * 0x01010101u;
  reach.x |= reach.x >> 8;
  reach.x |= reach.x >> 16 | (reach.y & 255) * 0x01010101u;
  uint32_t sums =
      static_cast<uint32_t>(__popc(exchanged(reach.x)) | __popc(exchanged(reach.y)) << 16);
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) sums += __shfl_xor_sync(kAllLanes, sums, apart);
  listed = __reduce_add_sync(kAllLanes, static_cast<unsigned>(__popc(above)));
  return sums;
}

// Counts for the warp's tiles from `first` on, a byte of widths at a time, up to where a wider
// plane cannot pay. Returns the lowest planes.
template <int D>
__device__ __forceinline__ void count_tiles(const uint32_t (&z)[kWarpTiles][kLaneWords<D>],
                                            int first, uint2 (&planes)[kWarpTiles],
                                            PackedChunk<D>& shared) {
  const int lane = threadIdx.x % 32;
  uint32_t kept = 0;  // by lanes 4 t + i, and for `counted` by lanes 16 + t
#pragma unroll
  for (int t = 0; t < kWarpTiles; ++t) {
    uint32_t listed;
    const uint32_t sums = count_widths<D>(z[t], 0, planes[t], listed);
    if (lane / 4 == t) kept = sums;
    uint32_t bytes = 1;
#pragma unroll
    for (int k = 1; k < static_cast<int>(sizeof(MovesRaw<D>)); ++k) {
      if (listed * kEscapeBytes<D> < kPlaneBytes) break;
      uint2 unused;
      const uint32_t more = count_widths<D>(z[t], k, unused, listed);
      if (lane < 4) shared.counts[first + t][4 * k + lane] = more;
      bytes = static_cast<uint32_t>(k) + 1;
    }
    if (lane == 16 + t) kept = bytes << 16 | listed;
  }
  if (lane < 16) {
    shared.counts[first + lane / 4][lane % 4] = kept;
  } else if (lane < 16 + kWarpTiles) {
    shared.counted[first + lane - 16] = kept;
  }
}

// The narrowest width of those with the fewest bytes, for this lane's tile, and how many moves need
// more. As all 256 in a list would take more than full planes, these are not chosen.
template <int D>
__device__ __forceinline__ void choose_width(const PackedChunk<D>& shared, int& width,
                                             int& escapes) {
  const int t = threadIdx.x % 32, counted = static_cast<int>(shared.counted[t] >> 16);
  int best_bytes = INT32_MAX;
  const auto offer = [&](int bits, uint32_t listed) {
    const int bytes =
        bits * static_cast<int>(kPlaneBytes) + static_cast<int>(listed) * kEscapeBytes<D>;
    if (bytes >= best_bytes) return;
    best_bytes = bytes;
    width = bits;
    escapes = static_cast<int>(listed);
  };
  for (int k = 0; k < counted; ++k) {
    const uint32_t* counts = shared.counts[t] + 4 * k;
#pragma unroll
    for (int i = 0; i < 4; ++i) offer(8 * k + i, counts[i] & 0xffffu);
#pragma unroll
    for (int i = 0; i < 4; ++i) offer(8 * k + 4 + i, counts[i] >> 16);
  }
  offer(8 * counted, shared.counted[t] & 0xffffu);
}

// Chooses all widths, and writes the chunk's heads and padding, if there is room; called by a warp.
template <int D>
__device__ __forceinline__ void lay_out_chunk(PackedChunk<D>& shared, int tiles) {
  const int t = threadIdx.x % 32;
  int width = 0, escapes = 0;
  if (t < tiles) choose_width<D>(shared, width, escapes);
  const uint32_t own = static_cast<uint32_t>(width << 16 | escapes);
  const uint32_t sums = warp_inclusive_sum(own);  // at most 1024 planes and 8160 escapes
  const uint32_t all = __shfl_sync(kAllLanes, sums, 31);
  const int plane_bytes = static_cast<int>(kPlaneBytes), raw_bytes = sizeof(MovesRaw<D>);
  const int heads = static_cast<int>(pad16(2 * tiles));
  const int planes = static_cast<int>(all >> 16), listed = static_cast<int>(all & 0xffffu);
  const int planes_before = static_cast<int>((sums - own) >> 16);
  const int values_at = heads + planes * plane_bytes;
  const int positions_at = values_at + listed * raw_bytes, used = positions_at + listed;
  shared.tiles[t] = {width, heads + planes_before * plane_bytes, escapes,
                     static_cast<int>((sums - own) & 0xffffu)};
  if (t == 0) {
    shared.values_at = values_at;
    shared.positions_at = positions_at;
    shared.used = static_cast<int>(pad16(used));
  }
  if (used > static_cast<int>(sizeof shared.bytes)) return;
  uint8_t* chunk = reinterpret_cast<uint8_t*>(shared.bytes);
  if (t < heads - 2 * tiles) chunk[2 * tiles + t] = 0;
  if (t < tiles) {
    chunk[t] = static_cast<uint8_t>(width);
    chunk[tiles + t] = static_cast<uint8_t>(escapes);
  }
  if (t < pad16(used) - used) chunk[used + t] = 0;
}

// Writes a tile's planes, the lowest eight of which are known; called by a warp.
template <int D>
__device__ __forceinline__ void write_planes(const uint32_t (&z)[kLaneWords<D>], uint2 lowest,
                                             const PackedTile& tile, uint8_t* chunk) {
  const int plane = threadIdx.x % 4;  // of four
  uint8_t* words = chunk + tile.planes_at + plane * kPlaneBytes + threadIdx.x % 32 / 4 * 4;
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(MovesRaw<D>)); ++k) {
    if (tile.width <= 8 * k) return;
    const uint2 eight = k == 0 ? lowest : planes_of<D>(z, k);
#pragma unroll
    for (int b = 8 * k; b < 8 * k + 8; b += 4) {
      if (tile.width <= b) return;
      const uint32_t word = exchanged(b % 8 == 0 ? eight.x : eight.y);
      if (b + plane < tile.width) *reinterpret_cast<uint32_t*>(words + b * kPlaneBytes) = word;
    }
  }
}

// Writes the upper bits and positions of the escapes of a warp's tiles from `first` on.
template <int D>
__device__ __forceinline__ void write_escapes(const uint32_t (&z)[kWarpTiles][kLaneWords<D>],
                                              int first, PackedChunk<D>& shared) {
  using Raw = MovesRaw<D>;
  static_assert(kWarpTiles == 4, "a byte of a word is for the sums of each tile");
  const int lane = threadIdx.x % 32;
  uint32_t listed[kWarpTiles], counts = 0;
#pragma unroll
  for (int t = 0; t < kWarpTiles; ++t) {
    listed[t] = beyond<D>(z[t], shared.tiles[first + t].width);
    counts += static_cast<uint32_t>(__popc(listed[t])) << 8 * t;
  }
  const uint32_t before = warp_inclusive_sum(counts) - counts;
  uint8_t* chunk = reinterpret_cast<uint8_t*>(shared.bytes);
  Raw* moves = shared.moves[first / kWarpTiles];
#pragma unroll
  for (int t = 0; t < kWarpTiles; ++t) {
    const PackedTile tile = shared.tiles[first + t];
    if (tile.escapes == 0) continue;
    Raw* values = reinterpret_cast<Raw*>(chunk + shared.values_at) + tile.escapes_before;
    uint8_t* positions = chunk + shared.positions_at + tile.escapes_before;
#pragma unroll
    for (int v = 0; v < kLaneWords<D> / 4; ++v) {
      reinterpret_cast<uint4*>(moves)[lane * (kLaneWords<D> / 4) + v] = {
          z[t][4 * v], z[t][4 * v + 1], z[t][4 * v + 2], z[t][4 * v + 3]};
    }
    uint8_t* own = positions + (before >> 8 * t & 255);
#pragma unroll 1
    for (uint32_t left = listed[t]; left != 0; left &= left - 1) {
      *own++ = static_cast<uint8_t>(lane * kLaneMoves + __ffs(static_cast<int>(left)) - 1);
    }
    __syncwarp();
#pragma unroll 1
    for (int e = lane; e < tile.escapes; e += 32) {
      values[e] = static_cast<Raw>(moves[positions[e]] >> tile.width);
    }
    __syncwarp();
  }
}

// Packs all chunks into their places.
template <int D>
__global__ void __launch_bounds__(kPackThreads, D == kFp32 ? 2 : 4)
    moves_pack_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ PackedChunk<D> shared;
  const int64_t chunks = chunk_count(kMovesPacked, call.numel);
  const int warp = threadIdx.x / 32;
  uint8_t* const chunk_bytes = reinterpret_cast<uint8_t*>(shared.bytes);
  uint32_t sum = 0;
  if (threadIdx.x == 0) shared.next = atomicAdd(work.ticket, 1u);
  __syncthreads();
  for (int64_t chunk = shared.next; chunk < chunks; chunk = shared.next) {
    const int count = static_cast<int>(numbers_in_chunk(kMovesPacked, call.numel, chunk));
    const int tiles = (count + kMovesTile - 1) / kMovesTile;
    const int raw = static_cast<int>(pad16(count * sizeof(Raw)));
    uint32_t z[kWarpTiles][kLaneWords<D>];
    uint2 planes[kWarpTiles];
    if (warp < kPackWarps) {
      load_moves<D>(static_cast<const Raw*>(call.old) + chunk * kPackedChunk,
                    static_cast<const Raw*>(call.now) + chunk * kPackedChunk,
                    warp * kWarpTiles * kMovesTile, count, z);
      count_tiles<D>(z, warp * kWarpTiles, planes, shared);
    }
    __syncthreads();
    if (warp == kPackWarps) lay_out_chunk<D>(shared, tiles);
    __syncthreads();
    const int bytes = min(shared.used, raw);
    if (warp == kPackWarps) {
      const int64_t before = place_chunk(call, work, chunk, chunks, bytes);
      if (threadIdx.x % 32 == 0) {
        shared.before = before;
        shared.next = atomicAdd(work.ticket, 1u);
      }
    } else if (bytes < raw) {
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        write_planes<D>(z[i], planes[i], shared.tiles[warp * kWarpTiles + i], chunk_bytes);
      }
      write_escapes<D>(z, warp * kWarpTiles, shared);
    }
    __syncthreads();
    uint8_t* target = chunks_of_record(call, work, chunks) + shared.before;
    if (bytes < raw) {
      for (int v = threadIdx.x; v < bytes / 16; v += kPackThreads) {
        sum += put_vector(call, target + 16 * v, shared.bytes[v]);
      }
    } else {
      sum += write_raw_chunk<D>(call, chunk, target);
    }
  }
  add_chunk_sum(work, sum);
}

}  // namespace megatron_sparse
