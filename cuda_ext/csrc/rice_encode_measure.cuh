// How long the chunks of Rice records are: the launch between compaction and coding.
//
// The place of a chunk's words depends on the unary parts of all chunks before it, and those on
// where entries lie. A block takes one chunk after the other by ticket, a warp one group of 128
// entries after the other. It reads the staged bits only (1/8 byte an element) and leaves 8 bytes
// for each group, with which every warp of the last launch codes its group alone.
#pragma once

#include "rice_encode_groups.cuh"

namespace megatron_sparse {

// Called by a whole block: the bits of the chunk's unary part. Describes its groups.
__device__ __forceinline__ uint32_t measure_unary(const Workspace& work, const ChunkPlace& chunk,
                                                  int r, GroupMemory& memory, uint32_t* warp_bits) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t before = 0;
  for (int64_t round = 0; round < chunk.entries; round += kRiceWarps * kRiceGroup) {
    const int64_t first = round + warp * kRiceGroup;
    const int count =
        static_cast<int>(max(int64_t{0}, min(chunk.entries - first, int64_t{kRiceGroup})));
    UnaryCode code = {};
    if (count > 0) {
      list_entries(work, chunk, first, count, memory.element);
      code = code_unary(memory.element, count, r);
    }
    if (lane == 0) warp_bits[warp] = code.bits;
    __syncthreads();
    uint32_t all = 0, begin = before;
    for (int w = 0; w < kRiceWarps; ++w) {
      if (w == warp) begin += all;
      all += warp_bits[w];
    }
    before += all;
    if (count > 0) {
      uint32_t head = 0;
      for (int set = 0; set < kGroupSets; ++set) {
        const uint32_t place = begin + code.one[set];
        if (set * kPlane + lane < count && begin % 32 != 0 && place / 32 == begin / 32) {
          head |= uint32_t{1} << (place % 32);
        }
      }
      head = __reduce_or_sync(kAllLanes, head);
      if (lane == 0) work.groups[group_slot(chunk, first / kRiceGroup)] = {begin, head};
    }
    __syncthreads();
  }
  return before;
}

__global__ void __launch_bounds__(kRiceThreads, 4)
    rice_measure_kernel(Workspace work, EncodeArguments call, RiceArguments rice) {
  __shared__ GroupMemory groups[kRiceWarps];
  __shared__ uint32_t warp_bits[kRiceWarps];
  __shared__ unsigned int next_slot;
  if (call.status[0] != kEncodeOk) return;
  const int64_t slots = first_slot(work, rice, call.segment_count);
  for (;;) {
    if (threadIdx.x == 0) next_slot = atomicAdd(work.chunk_ticket, 1u);
    __syncthreads();
    const int64_t slot = next_slot;
    __syncthreads();
    if (slot >= slots) return;
    const ChunkPlace chunk = chunk_at(work, call, rice, slot);
    int64_t words = 0;
    if (chunk.entries > 0 && call.segment_kinds[chunk.segment] == kKindRice) {
      const int r = rice_parameter(chunk.numel, chunk.entries);
      const int64_t bits = measure_unary(work, chunk, r, groups[threadIdx.x / 32], warp_bits);
      words =
          value_words(rice.dtype, chunk.entries) + r * planes_of(chunk.entries) + (bits + 31) / 32;
    }
    if (threadIdx.x < 32) look_back(work.chunk_states, slot, words);
  }
}

}  // namespace megatron_sparse
