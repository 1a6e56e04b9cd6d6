// Chunks of Rice records on CUDA, from the bits and counts that compaction has staged.
//
// A chunk's slot is (tiles of earlier segments) / (tiles of a chunk) + segment + its number in the
// segment. So places in tables follow without a scan; at most one slot for each segment stays
// empty.
#pragma once

#include "launch_grid.cuh"
#include "rice_encode_launch.h"
#include "tile_words.cuh"

namespace megatron_sparse {

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
  int64_t number;  // in the segment
  int64_t begin;   // its first element in the bucket
  int64_t numel;   // 0 where the slot is empty
  int64_t first_tile;
  int64_t tile_end;
  StagedCounts counts;
  int64_t staged;   // its first value's place
  int64_t entries;  // with indices

  // The number of entries before the chunk's tile number `tile`, or before its end.
  __device__ __forceinline__ int entries_before(int tile) const {
    return static_cast<int>(counts.before(first_tile + tile) - staged);
  }
};

// A slot's chunk, before its entries are counted.
__device__ __forceinline__ ChunkPlace uncounted_chunk_at(const Workspace& work,
                                                         const EncodeArguments& call,
                                                         const RiceArguments& rice, int64_t slot) {
  ChunkPlace chunk = {};
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
  return chunk;
}

__device__ __forceinline__ ChunkPlace chunk_at(const Workspace& work, const EncodeArguments& call,
                                               const RiceArguments& rice, int64_t slot) {
  ChunkPlace chunk = uncounted_chunk_at(work, call, rice, slot);
  if (chunk.numel == 0) return chunk;
  chunk.counts = staged_counts(work, call, chunk.segment);
  chunk.staged = chunk.counts.before(chunk.first_tile);
  chunk.entries = chunk.counts.before(chunk.tile_end) - chunk.staged;
  return chunk;
}

}  // namespace megatron_sparse
