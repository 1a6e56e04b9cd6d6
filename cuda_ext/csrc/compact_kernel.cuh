// The CUDA encoders' one pass over a bucket: compacts the kept elements.
//
// A block takes tiles of 4096 elements by ticket. Its source (encode_kernel.cuh: the gradient;
// prune_encode_kernel.cuh: gradient + residual, pruned) leaves the tile's elements in shared
// memory; the block turns them into one bit an element and, at the place that decoupled look-back
// finds, the values that are not zero. Both are staged, because a record's place and format depend
// on the counts of all segments before it. The last launch (place_kernel.cuh) moves bits and kept
// values to their records; it never reads elements that were not kept.
//
// A dense record keeps the sign of -0.0, which counts as zero: if there is one, a warp stages its
// words of signs too.
//
// Bytes an element, at density d and v bytes a value: here, the source's own + 1/8 written for the
// bits + d v; there, 1/8 + d v read and the message written. No dense intermediate.
#pragma once

#include "elementwise.h"
#include "encode_workspace.cuh"
#include "find_range.cuh"
#include "lanes.h"
#include "raw_type.cuh"

namespace megatron_sparse {

constexpr int kCompactThreads = 256;
constexpr int kCompactWarps = kCompactThreads / 32;
constexpr int kWarpWords = kTileWords / kCompactWarps;
static_assert(kSignGroups == kCompactWarps, "a warp flags its own words");
constexpr int kCompactBlocks = 4;  // resident on a multiprocessor: 64 registers a thread

// N neighbours, moved by the fewest accesses of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
  T value[N];
};

// A tile's position, and the distance of its first element from the 16-byte border before it.
struct TilePlace {
  int64_t begin;  // in the bucket
  int length;
  int head;  // elements
};

// The element of the tile's edges (before its first and behind its last whole vector: fewer than
// two vectors in all) that this thread handles, or -1.
template <int VECTOR>
__device__ __forceinline__ int edge_element(const TilePlace& place) {
  const int thread = threadIdx.x, shifted_end = place.length + place.head;
  const int whole_begin = place.head == 0 ? 0 : VECTOR;
  int at = -1;
  if (thread < VECTOR) {
    if (thread >= place.head && thread < whole_begin) at = thread;
  } else if (thread < 2 * VECTOR) {
    at = max(shifted_end / VECTOR * VECTOR, whole_begin) + thread - VECTOR;
  }
  return at >= 0 && at < shifted_end ? at - place.head : -1;
}

// A bit for the first word of each block that is not zero, from a bit for each 64-bit word of a
// tile that is not zero.
__device__ __forceinline__ uint64_t fold_blocks(uint64_t nonzero_words, int words_per_block) {
  for (int step = 1; step < words_per_block; step *= 2) nonzero_words |= nonzero_words >> step;
  uint64_t firsts = 1;
  for (int at = words_per_block; at < 64; at *= 2) firsts |= firsts << at;
  return nonzero_words & firsts;
}

// A bit for each of the tile's 64-bit words that is not zero; called by a whole warp.
__device__ __forceinline__ uint64_t nonzero_words(const uint32_t* words) {
  const int lane = threadIdx.x % 32;
  const unsigned low = __ballot_sync(kAllLanes, (words[2 * lane] | words[2 * lane + 1]) != 0);
  const unsigned high =
      __ballot_sync(kAllLanes, (words[64 + 2 * lane] | words[64 + 2 * lane + 1]) != 0);
  return static_cast<uint64_t>(high) << 32 | low;
}

// A raw gradient element as a value of the message, as the CPU encoder converts it.
template <int GRAD>
__device__ __forceinline__ void store_value(void* values, int64_t at, int value_dtype,
                                            uint32_t raw) {
  using L = ScalarLanes;
  uint32_t out = raw;
  if (value_dtype != GRAD) {
    const uint32_t bits = L::as_bits(widen<L, GRAD>(raw));
    out = value_dtype == kFp32   ? convert_bits<L, kFp32>(bits)
          : value_dtype == kBf16 ? convert_bits<L, kBf16>(bits)
                                 : convert_bits<L, kFp16>(bits);
  }
  if (value_dtype == kFp32) {
    static_cast<uint32_t*>(values)[at] = out;
  } else {
    static_cast<uint16_t*>(values)[at] = static_cast<uint16_t>(out);
  }
}

// Source: kGrad, kVector, kBlocks (resident on a multiprocessor), `const void* grad`, and
//   fill(tile, raw): element p of the tile to raw[p + tile.head], for all p < tile.length.
template <class Source>
__global__ void __launch_bounds__(kCompactThreads, Source::kBlocks)
    compact_kernel(Source source, Workspace work, const int64_t* segment_offsets,
                   int64_t segment_count, int value_dtype, int64_t block_size) {
  constexpr int GRAD = Source::kGrad;
  using Raw = typename RawType<GRAD>::type;
  constexpr uint32_t magnitude = GRAD == kFp32 ? 0x7fffffffu : 0x7fffu;
  constexpr uint32_t negative_zero = magnitude + 1;
  // The head of an unaligned tile shifts all elements by less than a vector.
  __shared__ __align__(16) Raw raw[kPiciTile + Source::kVector];
  __shared__ uint32_t words[kTileWords];
  __shared__ int warp_nnz[kCompactWarps];
  // There is no register left for a bit in every thread.
  __shared__ bool has_signs[kCompactWarps];
  __shared__ int64_t staged_before;
  __shared__ unsigned int next_tile;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lanes_before = (1u << lane) - 1;
  const int64_t tile_count = work.tile_begin[segment_count];
  if (threadIdx.x == 0) next_tile = atomicAdd(work.ticket, 1u);
  __syncthreads();
  int64_t tile = next_tile;
  __syncthreads();
  while (tile < tile_count) {
    const int64_t segment = find_range(work.tile_begin, segment_count, tile);
    TilePlace place;
    place.begin = segment_offsets[segment] + (tile - work.tile_begin[segment]) * kPiciTile;
    place.length = static_cast<int>(
        min(segment_offsets[segment + 1] - place.begin, static_cast<int64_t>(kPiciTile)));
    const Raw* first = static_cast<const Raw*>(source.grad) + place.begin;
    place.head =
        static_cast<int>(reinterpret_cast<uintptr_t>(first) / sizeof(Raw) % Source::kVector);
    if (lane == 0) has_signs[warp] = false;
    source.fill(place, raw);
    // Taken early, to hide the wait. A block finishes its tiles in ascending order, so the lowest
    // unfinished tile can always continue.
    if (threadIdx.x == 0) next_tile = atomicAdd(work.ticket, 1u);
    __syncthreads();

    // Lane k keeps the warp's word k, and how many kept elements of the warp come before it.
    uint32_t my_word = 0;
#pragma unroll
    for (int k = 0; k < kWarpWords; ++k) {
      const int at = (warp * kWarpWords + k) * 32 + lane;
      const uint32_t value = at < place.length ? raw[at + place.head] : 0;
      const uint32_t word = __ballot_sync(kAllLanes, (value & magnitude) != 0);
      if (lane == k) my_word = word;
      if (value == negative_zero) has_signs[warp] = true;
    }
    __syncwarp();
    if (lane == 0) work.has_signs[tile * kSignGroups + warp] = has_signs[warp];
    if (has_signs[warp]) {  // rare
#pragma unroll 1
      for (int k = 0; k < kWarpWords; ++k) {
        const int at = (warp * kWarpWords + k) * 32 + lane;
        const uint32_t value = at < place.length ? raw[at + place.head] : 0;
        const uint32_t word = __ballot_sync(kAllLanes, value == negative_zero);
        if (lane == 0) work.signs[tile * kTileWords + warp * kWarpWords + k] = word;
      }
    }
    const int count = __popc(my_word);
    const int inclusive = warp_inclusive_sum(count);
    if (lane < kWarpWords) {
      words[warp * kWarpWords + lane] = my_word;
      work.words[tile * kTileWords + warp * kWarpWords + lane] = my_word;
    }
    if (lane == 31) warp_nnz[warp] = inclusive;
    __syncthreads();

    int nnz = 0, warp_before = 0;
#pragma unroll
    for (int w = 0; w < kCompactWarps; ++w) {
      if (w == warp) warp_before = nnz;
      nnz += warp_nnz[w];
    }
    if (warp == 0) {
      const int64_t before = look_back(work.nnz_states, tile, nnz);
      if (lane == 0) staged_before = before;
    } else if (warp == 1 && work.block_states != nullptr) {
      const uint64_t blocks = fold_blocks(nonzero_words(words), static_cast<int>(block_size / 64));
      look_back(work.block_states, tile, __popcll(blocks));
    }
    __syncthreads();

    const int64_t stage_at = staged_before + warp_before;
    if (staged_before + nnz <= work.value_capacity) {
      for (int k = 0; k < kWarpWords; ++k) {
        const uint32_t word = __shfl_sync(kAllLanes, my_word, k);
        if (word == 0) continue;
        const int word_before = __shfl_sync(kAllLanes, inclusive - count, k);
        if (word >> lane & 1) {
          const int at = (warp * kWarpWords + k) * 32 + lane + place.head;
          store_value<GRAD>(work.values, stage_at + word_before + __popc(word & lanes_before),
                            value_dtype, raw[at]);
        }
      }
    }
    tile = next_tile;
    __syncthreads();  // shared memory is free again
  }
}

}  // namespace megatron_sparse
