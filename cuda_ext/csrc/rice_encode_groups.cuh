// Chunks of Rice records on CUDA, and their entries, 128 at a time, from the bits and counts that
// compaction has staged.
//
// Slots: a chunk's slot is (tiles of earlier segments) / (tiles of a chunk) + segment + its number
// in the segment. A group's is (entries before its chunk) / 128 + the chunk's slot + its number in
// the chunk. So places in tables follow without a scan; some slots stay empty, at most one for each
// segment or chunk.
#pragma once

#include "launch_grid.cuh"
#include "rice_encode_launch.h"
#include "tile_words.cuh"

namespace megatron_sparse {

constexpr int kRiceThreads = 256;
constexpr int kRiceWarps = kRiceThreads / 32;
constexpr int kGroupSets = kRiceGroup / kPlane;  // a lane has one entry of each set of 32

// A warp's shared memory.
struct GroupMemory {
  int32_t element[kRiceGroup + 1];  // of the entries, behind the entry before them
  uint32_t window[32];              // of the unary part
};

MS_INLINE int log2_tiles(const RiceArguments& rice) {
  return rice.log2_span - 12;
}
static_assert(kPiciTile == 1 << 12);

__device__ __forceinline__ int64_t first_slot(const Workspace& work, const RiceArguments& rice,
                                              int64_t segment) {
  return (work.tile_begin[segment] >> log2_tiles(rice)) + segment;
}

// How many values a segment has staged before a tile, less what a limit has taken back.
struct StagedCounts {
  const ScanState* states;
  int64_t first;  // of all earlier segments
  int64_t most;

  __device__ __forceinline__ int64_t before(int64_t tile) const {
    return first + min(prefix_after(states, tile - 1) - first, most);
  }
};

__device__ __forceinline__ StagedCounts staged_counts(const Workspace& work,
                                                      const EncodeArguments& call,
                                                      int64_t segment) {
  return {work.nnz_states, prefix_after(work.nnz_states, work.tile_begin[segment] - 1),
          call.most_nnz != nullptr ? call.most_nnz[segment] : kMaxSegmentNumel};
}

struct ChunkPlace {
  int64_t segment;
  int64_t slot;
  int64_t number;  // in the segment
  int64_t begin;   // its first element in the bucket
  int64_t numel;   // 0 where the slot is empty
  int64_t first_tile;
  int64_t tile_end;
  StagedCounts counts;
  int64_t staged;   // its first value's place
  int64_t entries;  // with indices
};

__device__ __forceinline__ ChunkPlace chunk_at(const Workspace& work, const EncodeArguments& call,
                                               const RiceArguments& rice, int64_t slot) {
  ChunkPlace chunk = {};
  chunk.slot = slot;
  chunk.segment =
      find_last(call.segment_count, [&](int64_t s) { return first_slot(work, rice, s) <= slot; });
  chunk.number = slot - first_slot(work, rice, chunk.segment);
  const int64_t first = chunk.number << rice.log2_span;
  const int64_t from = call.segment_offsets[chunk.segment];
  const int64_t left = call.segment_offsets[chunk.segment + 1] - from - first;
  if (left <= 0) return chunk;
  chunk.begin = from + first;
  chunk.numel = min(left, int64_t{1} << rice.log2_span);
  chunk.first_tile = work.tile_begin[chunk.segment] + (chunk.number << log2_tiles(rice));
  chunk.tile_end = chunk.first_tile + tiles_of(chunk.numel);
  chunk.counts = staged_counts(work, call, chunk.segment);
  chunk.staged = chunk.counts.before(chunk.first_tile);
  chunk.entries = chunk.counts.before(chunk.tile_end) - chunk.staged;
  return chunk;
}

__device__ __forceinline__ int64_t group_slot(const ChunkPlace& chunk, int64_t group) {
  return chunk.staged / kRiceGroup + chunk.slot + group;
}

// Called by a whole warp: the tile in [tile, end), which there is, that has the staged value
// `place`.
__device__ __forceinline__ int64_t find_tile(const StagedCounts& counts, int64_t tile, int64_t end,
                                             int64_t place) {
  const int lane = threadIdx.x % 32;
  // It is mostly one of the next; where it is not, the rest is cut into 32 pieces again and again.
  int64_t piece = 1;
  for (;;) {
    const int64_t piece_end = min(tile + (lane + 1) * piece, end);
    const unsigned reached = __ballot_sync(kAllLanes, counts.before(piece_end) > place);
    if (reached != 0) {
      tile += (__ffs(static_cast<int>(reached)) - 1) * piece;
      if (piece == 1) return tile;
      end = min(tile + piece, end);
    } else {
      tile += 32 * piece;
    }
    piece = (end - tile + 31) / 32;
  }
}

// Called by a whole warp: the elements in the chunk of the `count` entries from number `first` on,
// and before them that of the entry before, or -1.
__device__ __forceinline__ void list_entries(const Workspace& work, const ChunkPlace& chunk,
                                             int64_t first, int count, int32_t* element) {
  const int lane = threadIdx.x % 32;
  const int64_t origin = chunk.staged + first - 1;  // the place of element[0]
  __syncwarp();                                     // the entries before may still be read
  int next = 0;
  if (first == 0) {
    if (lane == 0) element[0] = -1;
    next = 1;
  }
  for (int64_t tile = chunk.first_tile; next <= count; ++tile) {
    tile = find_tile(chunk.counts, tile, chunk.tile_end, origin + next);
    const uint4 four = reinterpret_cast<const uint4*>(work.words)[tile * 32 + lane];
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
    const int own = __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    const int inclusive = warp_inclusive_sum(own);
    const int tile_first = static_cast<int>(chunk.counts.before(tile) - origin);
    int at = tile_first + inclusive - own;
    if (at <= count && at + own > next) {
      const int lane_element =
          static_cast<int>(tile - chunk.first_tile) * kPiciTile + lane * (kPiciTile / 32);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        for (uint32_t left = words[w]; left != 0; left &= left - 1, ++at) {
          if (at < next || at > count) continue;
          element[at] = lane_element + 32 * w + __ffs(static_cast<int>(left)) - 1;
        }
      }
    }
    next = tile_first + __shfl_sync(kAllLanes, inclusive, 31);
  }
  __syncwarp();
}

// A group's gaps and unary code, of which every lane has the entries lane, 32 + lane, ...
struct UnaryCode {
  uint32_t gap[kGroupSets];
  uint32_t one[kGroupSets];  // the place of the entry's 1 in the group's bits
  uint32_t bits;             // of the group
};

__device__ __forceinline__ UnaryCode code_unary(const int32_t* element, int count, int r) {
  const int lane = threadIdx.x % 32;
  UnaryCode code = {};
#pragma unroll
  for (int set = 0; set < kGroupSets; ++set) {
    const int i = set * kPlane + lane;
    const bool is_entry = i < count;
    code.gap[set] = is_entry ? static_cast<uint32_t>(element[i + 1] - element[i] - 1) : 0;
    const uint32_t own = is_entry ? (code.gap[set] >> r) + 1 : 0;
    const uint32_t inclusive = warp_inclusive_sum(own);
    code.one[set] = code.bits + inclusive - 1;
    code.bits += __shfl_sync(kAllLanes, inclusive, 31);
  }
  return code;
}

}  // namespace megatron_sparse
