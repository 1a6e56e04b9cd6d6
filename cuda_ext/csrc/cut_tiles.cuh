// The CUDA encoders' launch before compaction: the cut into tiles, and zeros where they are needed.
#pragma once

#include "encode_launch.h"
#include "encode_workspace.cuh"
#include "launch_grid.cuh"
#include "scan.cuh"

namespace megatron_sparse {

constexpr int kCutThreads = 256;

// An area of zeros to be.
struct Cleared {
  void* begin;  // 16-byte aligned
  int64_t bytes;
};

struct TileCut {
  Workspace work;
  const int64_t* segment_offsets;
  const uint8_t* segment_kinds;
  int64_t segment_count;
  int64_t numel;
  int64_t* status;
  Cleared counters;
  Cleared slots;
};

// Slots, if there are any, are cleared: they are sent whole and must not contain older data.
inline TileCut tile_cut_of(const EncodeArguments& a, const Workspace& work) {
  Cleared slots = {};
  if (a.slots != nullptr) slots = {a.out, a.capacity};
  return {work,
          a.segment_offsets,
          a.segment_kinds,
          a.segment_count,
          a.numel,
          a.status,
          {work.nnz_states, work.zeroed_bytes},
          slots};
}

// At most a block for each of the multiprocessors.
inline int64_t cut_blocks(const TileCut& cut) {
  const int64_t vectors = (cut.counters.bytes + cut.slots.bytes) / 16;
  const int64_t wanted = vectors / kCutThreads + 1, most = multiprocessors();
  return wanted < most ? wanted : most;
}

__device__ __forceinline__ bool is_known_kind(uint8_t kind, const Workspace& work) {
  if (work.rice) return kind == kKindDense || kind == kKindRice;
  return kind == kKindDense || kind == kKindCoo || kind == kKindPici || kind == kKindPiciPaper ||
         kind == kKindAdaptive || (kind == kKindBlocks && work.block_states != nullptr);
}

// Called by `blocks` blocks of kCutThreads.
__device__ __forceinline__ void clear_area(const Cleared& area, int64_t block, int64_t blocks) {
  const int64_t whole = area.bytes / 16, stride = blocks * kCutThreads;
  const int64_t first = block * kCutThreads + threadIdx.x;
  uint4* vectors = static_cast<uint4*>(area.begin);
  uint8_t* bytes = static_cast<uint8_t*>(area.begin);
  for (int64_t i = first; i < whole; i += stride) vectors[i] = {0, 0, 0, 0};
  for (int64_t i = 16 * whole + first; i < area.bytes; i += stride) bytes[i] = 0;
}

// Called by `blocks` blocks of kCutThreads. All of them clear the counters and the slots. The first
// one finds the first tile of each segment. If the arguments are wrong, the status says so, there
// are no tiles, and the other launches do nothing.
__device__ __forceinline__ void cut_tiles(const TileCut& cut, int64_t block, int64_t blocks) {
  const Workspace& work = cut.work;
  const int64_t* segment_offsets = cut.segment_offsets;
  const uint8_t* segment_kinds = cut.segment_kinds;
  const int64_t segment_count = cut.segment_count, numel = cut.numel;
  int64_t* status = cut.status;
  __shared__ int64_t shared[kCutThreads / 32];
  __shared__ unsigned int first_wrong;
  clear_area(cut.counters, block, blocks);
  clear_area(cut.slots, block, blocks);
  if (block != 0) return;
  if (threadIdx.x == 0) first_wrong = 0xffffffffu;
  __syncthreads();
  int64_t tiles_before = 0;
  for (int64_t begin = 0; begin < segment_count; begin += kCutThreads) {
    const int64_t s = begin + threadIdx.x;
    int64_t tiles = 0;
    if (s < segment_count) {
      const int64_t from = segment_offsets[s], to = segment_offsets[s + 1];
      const bool cuts = (s > 0 || from == 0) && (s + 1 < segment_count || to == numel);
      const bool right = cuts && from >= 0 && from <= to && to <= numel &&
                         to - from <= kMaxSegmentNumel && is_known_kind(segment_kinds[s], work);
      if (right) {
        tiles = tiles_of(to - from);
      } else {
        atomicMin(&first_wrong, static_cast<unsigned int>(s));
      }
    }
    int64_t total;
    const int64_t before = block_exclusive_sum<kCutThreads>(tiles, shared, total);
    if (s < segment_count) work.tile_begin[s] = tiles_before + before;
    tiles_before += total;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool right = first_wrong == 0xffffffffu;
  work.tile_begin[segment_count] = right ? tiles_before : 0;
  for (int i = 0; i < 4; ++i) status[i] = 0;
  if (right) return;
  const uint8_t kind = segment_kinds[first_wrong];
  const bool known = is_known_kind(kind, work);
  status[0] = known ? kEncodeSegments : kEncodeFormat;
  status[1] = first_wrong;
  status[2] = known ? segment_offsets[first_wrong + 1] : kind;
  status[3] = known ? numel : 0;
}

}  // namespace megatron_sparse
