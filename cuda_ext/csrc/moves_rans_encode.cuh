// The rans coder of moves on CUDA: a warp encodes a chunk, a state in each lane. Of a short shard
// blocks have few warps, so that all multiprocessors have some.
//
// Chunks are coded apart, from their last number to their first, because a chunk's place depends on
// the sizes of those before; a second launch moves them there.
// Bytes of device memory: two numbers read an element; each byte of the record written twice and
// read once.
#pragma once

#include "moves_rans_tables.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {

inline constexpr int kRansWarps = 8;  // of a block, at most

// The numbers of some steps, in registers.
template <int D>
struct StepNumbers {
  uint32_t was[kRansSteps], is[kRansSteps];

  // The steps from number `first` on, all of which are there.
  __device__ __forceinline__ void load(const MovesRaw<D>* old, const MovesRaw<D>* now,
                                       const uint32_t* down, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < kRansSteps; ++s) {
      const uint32_t signs = down[first / 32 + s];
      was[s] = mirrored<D>(old[first + 32 * s + lane], signs, lane);
      is[s] = mirrored<D>(now[first + 32 * s + lane], signs, lane);
    }
  }
};

// A chunk's words, written from the end of their room on.
struct WordWriter {
  uint16_t* first;
  unsigned lower;  // lanes

  // The lower halves of the states in some lanes.
  __device__ __forceinline__ void emit(uint32_t& state, bool full) {
    const unsigned lanes = __ballot_sync(kAllLanes, full);
    first -= __popc(lanes);
    if (full) first[__popc(lanes & lower)] = static_cast<uint16_t>(state);
    state = full ? state >> 16 : state;
  }

  // At most 16 raw bits.
  __device__ __forceinline__ void push_raw(uint32_t& state, uint32_t bits, uint32_t raw) {
    emit(state, state >> 16 >> (16 - bits) != 0);
    state = state << bits | raw;
  }
};

template <int D>
__device__ __forceinline__ void push_move(uint32_t& state, WordWriter& words, uint32_t was,
                                          uint32_t z, bool active, uint32_t base,
                                          const uint2* entries) {
  uint32_t bits;
  const uint32_t symbol = symbol_of(z, bits);
  const uint2 entry = entries[context_of<D>(was, base) * kMaxSymbols + symbol];
  if (__any_sync(kAllLanes, bits != 0)) {
    const uint32_t raw = z >> 1 & ((1u << bits) - 1);
    const uint32_t low = D == kFp32 ? min(bits, 16u) : bits;
    if (D == kFp32) words.push_raw(state, bits - low, raw >> low);
    words.push_raw(state, low, raw & ((1u << low) - 1));
  }
  words.emit(state, active && state >> (32 - kScaleBits) >= (entry.x & 0x1fffu));
  if (active) state = push_symbol(state, entry);
}

// Encodes whole steps, the last one first.
template <int D>
__device__ __forceinline__ void push_steps(uint32_t& state, WordWriter& words,
                                           const StepNumbers<D>& numbers, uint32_t base,
                                           const uint2* entries) {
  uint32_t z[kRansSteps];
#pragma unroll
  for (int s = 0; s < kRansSteps; s += 2) {
    if constexpr (D == kFp32) {
      z[s] = zigzag_of<D>(numbers.was[s], numbers.is[s]);
      z[s + 1] = zigzag_of<D>(numbers.was[s + 1], numbers.is[s + 1]);
    } else {
      const uint32_t pair = zigzag_pair(numbers.was[s] | numbers.was[s + 1] << 16,
                                        numbers.is[s] | numbers.is[s + 1] << 16);
      z[s] = pair & 0xffffu;
      z[s + 1] = pair >> 16;
    }
  }
#pragma unroll
  for (int s = kRansSteps - 1; s >= 0; --s) {
    push_move<D>(state, words, numbers.was[s], z[s], true, base, entries);
  }
}

template <int D>
__global__ void __launch_bounds__(32 * kRansWarps, 5)
    moves_rans_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ uint2 entries[kTableEntries];
  for (int k = threadIdx.x; k < kTableEntries; k += blockDim.x)
    entries[k] = work.tables->entries[k];
  __syncthreads();
  const int lane = threadIdx.x % 32;
  // A shuffle, because the compiler would compute another mask anew for every word.
  const unsigned lower = __shfl_sync(kAllLanes, (1u << lane) - 1, lane);
  const uint32_t base = work.tables->base;
  const int64_t chunks = chunk_count(call.numel);
  for (int64_t chunk = first_item() / 32; chunk < chunks; chunk += item_stride() / 32) {
    const int count = static_cast<int>(numbers_in_chunk(call.numel, chunk));
    const Raw* old = static_cast<const Raw*>(call.old) + chunk * kRansChunk;
    const Raw* now = static_cast<const Raw*>(call.now) + chunk * kRansChunk;
    const uint32_t* down = call.down + chunk * kRansChunk / 32;
    // With more words the chunk is no shorter than its raw numbers.
    const int raw_bytes = static_cast<int>(pad16(count * sizeof(Raw)));
    const int most = (raw_bytes - 4 * kStates) / 2;
    uint16_t* const room = work.slots + chunk * slot_words(D) + kSlotSlack;
    WordWriter words = {room + most, lower};
    uint32_t state = kLowestState;
    constexpr int kGroup = 32 * kRansSteps;
    const int whole = count / kGroup * kGroup;
    StepNumbers<D> next;
    if (whole > 0) next.load(old, now, down, whole - kGroup);
    for (int first = (count - 1) / 32 * 32; first >= whole && words.first >= room; first -= 32) {
      const int i = first + lane;
      const bool active = i < count;
      const uint32_t was = active ? mirrored<D>(old[i], down[first / 32], lane) : 0;
      const uint32_t is = active ? mirrored<D>(now[i], down[first / 32], lane) : 0;
      push_move<D>(state, words, was, zigzag_of<D>(was, is), active, base, entries);
    }
    for (int first = whole - kGroup; first >= 0 && words.first >= room; first -= kGroup) {
      const StepNumbers<D> own = next;
      if (first > 0) next.load(old, now, down, first - kGroup);
      push_steps<D>(state, words, own, base, entries);
    }
    work.states[chunk * kStates + lane] = state;
    if (lane == 0) {
      const int count_words = static_cast<int>(room + most - words.first);
      const bool pays = words.first >= room && pad16(4 * kStates + 2 * count_words) < raw_bytes;
      work.words[chunk] = pays ? static_cast<uint32_t>(count_words) : kRawWords;
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
  const int64_t chunks = chunk_count(call.numel);
  for (int64_t chunk = take_tile(scan, work.ticket); chunk < chunks;
       chunk = take_tile(scan, work.ticket)) {
    const int64_t count = numbers_in_chunk(call.numel, chunk);
    const int64_t raw = pad16(count * sizeof(Raw));
    const uint32_t words = work.words[chunk];
    const int64_t bytes = words == kRawWords ? raw : pad16(4 * kStates + 2 * int64_t{words});
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
        work.slots + chunk * slot_words(D) + kSlotSlack + (raw / 2 - 2 * kStates - words);
    for (int64_t v = threadIdx.x; v < bytes / 16; v += kScanThreads) {
      sum += put_vector(
          call, target + 16 * v,
          v < kStateVectors ? states[v] : vector_of(first, 8 * (v - kStateVectors), words));
    }
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(work.chunk_sum, sum);
}

}  // namespace megatron_sparse
