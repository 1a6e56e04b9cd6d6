// The CUDA encoders' one pass over a bucket: compacts the kept elements.
//
// A block takes tiles of 4096 elements by ticket. Its source (encode.cu: the gradient;
// prune_encode_kernel.cuh: gradient + residual, pruned) gives the tile's elements; the block turns
// them into one bit an element and, at the place that decoupled look-back finds, the values that
// are not zero. Both are staged, because a record's place and format depend on the counts of all
// segments before it. The last launch (place_kernel.cuh) moves bits and kept values to their
// records; it never reads elements that were not kept.
//
// Nothing waits for memory that can be asked for earlier. Each of eight warps handles 512
// neighbours, lane by lane, so a ballot is a word of bits and no buffer's alignment matters; as
// soon as a lane has used an element it requests the one a tile later. A ninth warp takes the
// tickets and looks back for the tile before, whose values wait in shared memory.
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

constexpr int kCompactWarps = 8;  // with elements
constexpr int kCompactThreads = 32 * (kCompactWarps + 1);
constexpr int kWarpWords = kTileWords / kCompactWarps;
static_assert(kSignGroups == kCompactWarps, "a warp flags its own words");

// A tile by its number, with what its source needs to know; without elements, there is no tile.
template <class Source>
struct TilePlace {
  int64_t number;
  int64_t begin;  // in the bucket
  int length;
  typename Source::Rule rule;
};

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

// The tile of a ticket.
template <class Source>
__device__ __forceinline__ TilePlace<Source> place_of(const Source& source, const Workspace& work,
                                                      const int64_t* segment_offsets,
                                                      int64_t segment_count, unsigned ticket) {
  TilePlace<Source> place = {};
  place.number = ticket;
  if (place.number >= work.tile_begin[segment_count]) return place;
  const int64_t segment = find_range(work.tile_begin, segment_count, place.number);
  place.begin = segment_offsets[segment] + (place.number - work.tile_begin[segment]) * kPiciTile;
  place.length = static_cast<int>(
      min(segment_offsets[segment + 1] - place.begin, static_cast<int64_t>(kPiciTile)));
  place.rule = source.rule_at(place.begin, place.length);
  return place;
}

// Element k of a lane's share of a tile is `first_of_lane() + 32 k`.
__device__ __forceinline__ int first_of_lane() {
  return static_cast<int>(threadIdx.x) / 32 * (32 * kWarpWords) + threadIdx.x % 32;
}

template <class Source>
__device__ __forceinline__ void load_share(const Source& source, const TilePlace<Source>& tile,
                                           typename Source::Element (&share)[kWarpWords]) {
  const int first = first_of_lane(), left = tile.length - first;
  const int64_t from = tile.begin + first;
#pragma unroll
  for (int k = 0; k < kWarpWords; ++k) {
    share[k] = {};
    if (32 * k < left) share[k] = source.load(from + 32 * k);
  }
}

// Calls emit(k, value) for each word k of the warp that may have values that are not +0; `share`
// is that of `tile` and becomes that of `next`. Called by a whole warp.
template <class Source, class Emit>
__device__ __forceinline__ void take_share(const Source& source, const TilePlace<Source>& tile,
                                           const TilePlace<Source>& next,
                                           typename Source::Element (&share)[kWarpWords],
                                           const Emit& emit) {
  const int first = first_of_lane(), left = tile.length - first;
  const int64_t from = tile.begin + first, next_from = next.begin + first;
  const bool next_whole = next.length == kPiciTile;
  const typename Source::Rule rule = tile.rule;  // shared memory is not read again
  uint32_t value;
  if (Source::is_uniform(rule)) {
#pragma unroll
    for (int k = 0; k < kWarpWords; ++k) {
      if (source.take(rule, from + 32 * k, 32 * k < left, share[k], value)) emit(k, value);
      if (next_whole) share[k] = source.load(next_from + 32 * k);
    }
    if (next_whole) return;
  } else {
#pragma unroll 1
    for (int k = 0; k < kWarpWords; ++k) {
      const bool inside = 32 * k < left;
      typename Source::Element in = {};
      if (inside) in = source.load(from + 32 * k);
      if (source.take(source.rule_at(from + 32 * k, 1), from + 32 * k, inside, in, value)) {
        emit(k, value);
      }
    }
  }
  load_share(source, next, share);
}

// A block's shared memory. Tiles take turns: this one and the one before; of places, two more.
template <class Source>
struct CompactMemory {
  typename RawType<Source::kGrad>::type kept[2 * kPiciTile];
  int nnz[2][kCompactWarps];
  int64_t staged_at[2][kCompactWarps];  // -1 where there is no room
  TilePlace<Source> places[4];
};

// The block's only barrier, where its two kinds of warps meet: twice at first, then once a tile,
// and once at the end. They wait at different places in the code, which PTX allows and
// __syncthreads() does not. A warp must come to its place together.
__device__ __forceinline__ void meet() {
#ifdef __CUDA_ARCH__
  __syncwarp();
  asm volatile("bar.sync 0;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The work of the ninth warp: a round finds where to stage the tile before this round's, and takes
// the ticket of the tile two rounds later.
template <class Source>
__device__ __forceinline__ void number_tiles(const Source& source, const Workspace& work,
                                             const int64_t* segment_offsets, int64_t segment_count,
                                             int block_size, CompactMemory<Source>& shared) {
  const int lane = threadIdx.x % 32;
  const auto take_ticket = [&] { return lane == 0 ? atomicAdd(work.ticket, 1u) : 0; };
  const auto find_place = [&](unsigned round, unsigned ticket) {
    ticket = __shfl_sync(kAllLanes, ticket, 0);
    const auto place = place_of(source, work, segment_offsets, segment_count, ticket);
    if (lane == 0) shared.places[round % 4] = place;
  };
  find_place(0, take_ticket());
  meet();
  find_place(1, take_ticket());
  meet();
  // A block ends its tiles in ascending order and waits for lower ones only, so the lowest that has
  // not published its count always can.
  for (unsigned round = 0;; ++round) {
    const bool ends = shared.places[round % 4].length == 0;
    const unsigned ticket = ends ? 0 : take_ticket();  // it comes while the warp looks back
    if (round > 0) {
      const unsigned before = (round - 1) % 2;
      const int64_t tile = shared.places[(round - 1) % 4].number;
      const int own = lane < kCompactWarps ? shared.nnz[before][lane] : 0;
      const int inclusive = warp_inclusive_sum(own);
      const int total = __shfl_sync(kAllLanes, inclusive, 31);
      const int64_t at = look_back(work.nnz_states, tile, total);
      if (lane < kCompactWarps) {
        const bool fits = at + total <= work.value_capacity;
        shared.staged_at[before][lane] = fits ? at + inclusive - own : -1;
      }
      if (work.block_states != nullptr) {
        const uint64_t blocks =
            fold_blocks(nonzero_words(work.words + tile * kTileWords), block_size / 64);
        look_back(work.block_states, tile, __popcll(blocks));
      }
    }
    if (!ends) find_place(round + 2, ticket);
    meet();
    if (ends) return;
  }
}

// Source: kGrad, kBlocks (resident on a multiprocessor), and
//   Element, load(at): what is read of an element; zeros stand for one behind a tile's end.
//   Rule, rule_at(begin, length): what applies to these elements, if is_uniform(rule).
//   take(rule, at, inside, element, value): called by a whole warp; false if all values are +0.
template <class Source>
__global__ void __launch_bounds__(kCompactThreads, Source::kBlocks)
    compact_kernel(Source source, Workspace work, const int64_t* segment_offsets,
                   int64_t segment_count, int value_dtype, int64_t block_size) {
  constexpr int GRAD = Source::kGrad;
  using Raw = typename RawType<GRAD>::type;
  constexpr uint32_t magnitude = GRAD == kFp32 ? 0x7fffffffu : 0x7fffu;
  constexpr uint32_t negative_zero = magnitude + 1;
  __shared__ CompactMemory<Source> shared;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == kCompactWarps) {
    number_tiles(source, work, segment_offsets, segment_count, static_cast<int>(block_size),
                 shared);
    return;
  }
  const unsigned lanes_before = (1u << lane) - 1;
  meet();
  typename Source::Element share[kWarpWords];
  load_share(source, shared.places[0], share);
  meet();
  int kept_begin = 0, kept_end = 0;
  for (unsigned round = 0;; ++round) {
    const TilePlace<Source>& tile = shared.places[round % 4];
    const bool ends = tile.length == 0;
    const int begin_before = kept_begin, end_before = kept_end;
    if (!ends) {
      // Lane k keeps the warp's words k.
      uint32_t my_word = 0, my_signs = 0;
      kept_begin = kept_end = (round % 2 * kCompactWarps + warp) * (32 * kWarpWords);
      const auto keep = [&](int k, uint32_t value) {
        const uint32_t word = __ballot_sync(kAllLanes, (value & magnitude) != 0);
        const uint32_t signs = __ballot_sync(kAllLanes, value == negative_zero);
        if (lane == k) {
          my_word = word;
          my_signs = signs;
        }
        if ((value & magnitude) != 0) {
          shared.kept[kept_end + __popc(word & lanes_before)] = static_cast<Raw>(value);
        }
        kept_end += __popc(word);
      };
      take_share(source, tile, shared.places[(round + 1) % 4], share, keep);
      const int64_t group = tile.number * kSignGroups + warp;
      const bool has_signs = __any_sync(kAllLanes, my_signs != 0);
      if (lane < kWarpWords) {
        work.words[group * kWarpWords + lane] = my_word;
        if (has_signs) work.signs[group * kWarpWords + lane] = my_signs;  // rare
      }
      if (lane == 0) {
        work.has_signs[group] = has_signs;
        shared.nnz[round % 2][warp] = kept_end - kept_begin;
      }
    }
    meet();
    if (round > 0) {
      const int64_t at = shared.staged_at[(round - 1) % 2][warp];
      for (int k = begin_before + lane; k < end_before && at >= 0; k += 32) {
        store_value<GRAD>(work.values, at + k - begin_before, value_dtype, shared.kept[k]);
      }
      __syncwarp();  // `kept` is free again
    }
    if (ends) return;
  }
}

}  // namespace megatron_sparse
