// How long the chunks of Rice records are: the launch between compaction and coding.
//
// The place of a chunk's words depends on the unary parts of all chunks before it, and those on
// where entries lie. A block takes one chunk after the other by ticket, a thread four neighbouring
// words of its bits. It reads the staged bits only (1/8 byte an element) and leaves for each word
// where its first entry's 1 lies (1/8 byte an element), with which every lane of the last launch
// codes a word alone. With r = 0 the unary part is the bitmap, and it leaves nothing.
#pragma once

#include "rice_encode_chunks.cuh"

namespace megatron_sparse {

constexpr int kMeasureThreads = 128;
constexpr int kMeasureWarps = kMeasureThreads / 32;
constexpr int kMeasureWords = 4;  // of a thread

// A block's shared memory.
struct MeasureMemory {
  int64_t slot;
  ChunkPlace chunk;                // in that slot
  uint32_t behind[kMeasureWarps];  // the element behind a warp's last entry, or 0
  uint32_t bits[kMeasureWarps];    // of a warp
};

// Called by a whole block: the bits of the chunk's unary part.
__device__ __forceinline__ uint32_t measure_unary(const Workspace& work, MeasureMemory& memory,
                                                  int r) {
  const ChunkPlace& chunk = memory.chunk;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_vector = chunk.first_tile * (kTileWords / kMeasureWords);
  const int vectors =
      static_cast<int>(chunk.tile_end - chunk.first_tile) * (kTileWords / kMeasureWords);
  uint32_t bits = 0, behind = 0;  // of the rounds before
  for (int round = 0; round < vectors; round += kMeasureThreads) {
    const int at = round + threadIdx.x;
    uint4 four = {0, 0, 0, 0};
    if (at < vectors) four = reinterpret_cast<const uint4*>(work.words)[first_vector + at];
    const uint32_t words[kMeasureWords] = {four.x, four.y, four.z, four.w};
    const uint32_t first_element = static_cast<uint32_t>(at) * (32 * kMeasureWords);
    uint32_t own_behind = 0;
#pragma unroll
    for (int w = 0; w < kMeasureWords; ++w) {
      if (words[w] != 0)
        own_behind = first_element + 32 * (w + 1) - __clz(static_cast<int>(words[w]));
    }
    const unsigned earlier = __ballot_sync(kAllLanes, own_behind != 0) & ((1u << lane) - 1);
    uint32_t previous = __shfl_sync(kAllLanes, own_behind, (31 - __clz(earlier)) & 31);
    const uint32_t warp_behind = __reduce_max_sync(kAllLanes, own_behind);
    if (lane == 0) memory.behind[warp] = warp_behind;
    __syncthreads();
    if (earlier == 0) previous = behind;
#pragma unroll
    for (int w = 0; w < kMeasureWarps; ++w) {
      behind = max(behind, memory.behind[w]);
      if (earlier == 0 && w < warp) previous = behind;
    }
    uint32_t own = 0, place[kMeasureWords] = {};
    if (r == 0) {
      if (own_behind != 0) own = own_behind - previous;
    } else {
#pragma unroll
      for (int w = 0; w < kMeasureWords; ++w) {
        const uint32_t word_element = first_element + 32 * w;
        const uint32_t first = word_element + __ffs(static_cast<int>(words[w])) - 1;
        place[w] = own + ((first - previous) >> r);  // without a meaning where there is none
        for (uint32_t left = words[w]; left != 0; left &= left - 1) {
          const uint32_t element = word_element + __ffs(static_cast<int>(left)) - 1;
          own += ((element - previous) >> r) + 1;
          previous = element + 1;
        }
      }
    }
    const uint32_t inclusive = warp_inclusive_sum(own);
    if (lane == 31) memory.bits[warp] = inclusive;
    __syncthreads();
    uint32_t before = bits + inclusive - own;
#pragma unroll
    for (int w = 0; w < kMeasureWarps; ++w) {
      if (w < warp) before += memory.bits[w];
      bits += memory.bits[w];
    }
    if (r != 0 && at < vectors) {
      reinterpret_cast<uint4*>(work.unary)[first_vector + at] = {
          before + place[0], before + place[1], before + place[2], before + place[3]};
    }
  }
  return bits;
}

__global__ void __launch_bounds__(kMeasureThreads, 12)
    rice_measure_kernel(Workspace work, EncodeArguments call, RiceArguments rice) {
  __shared__ MeasureMemory memory;
  if (call.status[0] != kEncodeOk) return;
  const int64_t slots = first_slot(work, rice, call.segment_count);
  const ChunkPlace& chunk = memory.chunk;
  for (;;) {
    if (threadIdx.x == 0) {
      memory.slot = atomicAdd(work.chunk_ticket, 1u);
      if (memory.slot < slots) memory.chunk = chunk_at(work, call, rice, memory.slot);
    }
    __syncthreads();
    const int64_t slot = memory.slot;
    if (slot >= slots) return;
    int64_t words = 0;
    if (chunk.entries > 0 && call.segment_kinds[chunk.segment] == kKindRice) {
      const int r = rice_parameter(chunk.numel, chunk.entries);
      const int64_t bits = measure_unary(work, memory, r);
      words =
          value_words(rice.dtype, chunk.entries) + r * planes_of(chunk.entries) + (bits + 31) / 32;
    }
    if (threadIdx.x < 32) look_back(work.chunk_states, slot, words);
    __syncthreads();  // shared memory is free again
  }
}

}  // namespace megatron_sparse
