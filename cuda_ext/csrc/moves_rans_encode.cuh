// The rans coder of moves on CUDA: a warp encodes a chunk, a state in each lane.
//
// Chunks are coded apart, from their last number to their first, because a chunk's place depends on
// the sizes of those before; a second launch moves them there.
// Bytes of device memory: two numbers read an element; each byte of the record written twice and
// read once.
#pragma once

#include "moves_rans_tables.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {

inline constexpr int kRansSteps = 4;  // of 32 numbers, loaded while those before are coded

// The numbers of some steps, in registers.
template <int D>
struct StepNumbers {
  uint32_t was[kRansSteps], is[kRansSteps];

  // Steps from `step` down; those below zero are not read.
  __device__ __forceinline__ void load(const MovesRaw<D>* old, const MovesRaw<D>* now, int64_t step,
                                       int64_t count) {
#pragma unroll
    for (int s = 0; s < kRansSteps; ++s) {
      const int64_t i = 32 * (step - s) + threadIdx.x % 32;
      const bool there = step - s >= 0 && i < count;
      was[s] = there ? old[i] : 0;
      is[s] = there ? now[i] : 0;
    }
  }
};

// A chunk's words, written from the end of their room on.
struct WordWriter {
  uint16_t* room;
  int64_t at;  // of the first word; negative where the room is too small

  // The lower halves of the states in some lanes.
  __device__ __forceinline__ void emit(uint32_t& state, bool full) {
    const unsigned lanes = __ballot_sync(kAllLanes, full);
    at -= __popc(lanes);
    if (!full) return;
    const int64_t place = at + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
    if (place >= 0) room[place] = static_cast<uint16_t>(state);
    state >>= 16;
  }

  // At most 16 raw bits.
  __device__ __forceinline__ void push_raw(uint32_t& state, uint32_t bits, uint32_t raw) {
    emit(state, state >> 16 >> (16 - bits) != 0);
    state = state << bits | raw;
  }
};

template <int D>
__device__ __forceinline__ void push_number(uint32_t& state, WordWriter& words, uint32_t was,
                                            uint32_t is, bool active, uint32_t base,
                                            const uint32_t* entries) {
  const uint32_t z = active ? zigzag_of<D>(was, is) : 0;
  uint32_t bits;
  const uint32_t symbol = symbol_of(z, bits);
  if (__any_sync(kAllLanes, bits != 0)) {
    const uint32_t raw = z & ((1u << bits) - 1);
    const uint32_t low = D == kFp32 ? min(bits, 16u) : bits;
    if (D == kFp32) words.push_raw(state, bits - low, raw >> low);
    words.push_raw(state, low, raw & ((1u << low) - 1));
  }
  const uint32_t entry = entries[context_of<D>(was, base) * kMaxSymbols + symbol];
  const uint32_t frequency = entry & 0xffffu;
  words.emit(state, active && state >> (32 - kScaleBits) >= frequency);
  if (active) {
    const uint32_t quotient = state / frequency;
    state = (quotient << kScaleBits) + (state - quotient * frequency) + (entry >> 16);
  }
}

template <int D>
__global__ void __launch_bounds__(32)
    moves_rans_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ uint32_t entries[kTableEntries];
  const int lane = threadIdx.x;
  for (int k = lane; k < kTableEntries; k += 32) entries[k] = work.tables->entries[k];
  __syncwarp();
  const uint32_t base = work.tables->base;
  const int64_t chunks = chunk_count(kMovesRans, call.numel);
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t count = numbers_in_chunk(kMovesRans, call.numel, chunk);
    const Raw* old = static_cast<const Raw*>(call.old) + chunk * kRansChunk;
    const Raw* now = static_cast<const Raw*>(call.now) + chunk * kRansChunk;
    // With more words the chunk is no shorter than its raw numbers.
    const int64_t most = (round_up_16(count * sizeof(Raw)) - 4 * kStates) / 2;
    WordWriter words = {work.slots + chunk * (kRansChunk * sizeof(Raw) / 2), most};
    uint32_t state = kLowestState;
    StepNumbers<D> next;
    const int64_t last = (count - 1) / 32;
    next.load(old, now, last, count);
    for (int64_t step = last; step >= 0 && words.at >= 0; step -= kRansSteps) {
      const StepNumbers<D> own = next;
      next.load(old, now, step - kRansSteps, count);
#pragma unroll
      for (int s = 0; s < kRansSteps; ++s) {
        if (step - s < 0) break;
        const bool active = 32 * (step - s) + lane < count;
        push_number<D>(state, words, own.was[s], own.is[s], active, base, entries);
      }
    }
    work.states[chunk * kStates + lane] = state;
    if (lane == 0) {
      const bool pays = words.at >= 0 && round_up_16(4 * kStates + 2 * (most - words.at)) <
                                             round_up_16(count * sizeof(Raw));
      work.words[chunk] = pays ? static_cast<uint32_t>(most - words.at) : kRawWords;
    }
  }
}

// Moves all chunks to their places.
template <int D>
__global__ void __launch_bounds__(kScanThreads, 4)
    moves_place_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ TileScan scan;
  uint32_t sum = 0;
  const int64_t chunks = chunk_count(kMovesRans, call.numel);
  for (int64_t chunk = take_tile(scan, work.ticket); chunk < chunks;
       chunk = take_tile(scan, work.ticket)) {
    const int64_t count = numbers_in_chunk(kMovesRans, call.numel, chunk);
    const int64_t raw = round_up_16(count * sizeof(Raw));
    const uint32_t words = work.words[chunk];
    const int64_t bytes = words == kRawWords ? raw : round_up_16(4 * kStates + 2 * int64_t{words});
    if (threadIdx.x < 32) {
      const int64_t before = place_chunk(call, work, chunk, chunks, bytes);
      if (threadIdx.x == 0) scan.before = before;
    }
    __syncthreads();
    uint8_t* target = chunks_of_record(call, work, chunks) + scan.before;
    if (words == kRawWords) {
      sum += write_raw_chunk<D>(call, chunk, target);
      continue;
    }
    constexpr int kStateVectors = 4 * kStates / 16;
    const uint4* states = reinterpret_cast<const uint4*>(work.states + chunk * kStates);
    const uint16_t* first =
        work.slots + chunk * (kRansChunk * sizeof(Raw) / 2) + (raw / 2 - 2 * kStates - words);
    for (int64_t v = threadIdx.x; v < bytes / 16; v += kScanThreads) {
      sum += put_vector(
          call, target + 16 * v,
          v < kStateVectors ? states[v] : vector_of(first, 8 * (v - kStateVectors), words));
    }
  }
  add_chunk_sum(work, sum);
}

}  // namespace megatron_sparse
