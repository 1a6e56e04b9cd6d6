// Second and third launch of decode_add_ on CUDA: check every index, word and prefix, then add.
// decode_sum_ has no check of its own: its sums check what they read.
//
// decode_add_ changes acc only if the whole message is right. decode_sum_ ignores acc's content, so
// after an error there is nothing to preserve, and the messages are read once. Every tile of the
// sum is made in shared memory (tile_sum.cuh) and written once for each 16 messages; where
// decode_add_ adds to what acc holds, it is changed in place.
//
// A check takes one unit after the other for each warp: a tile of 4096 elements in Pici, a chunk in
// Rice, else up to 256 indices. The sum takes one tile after the other for each block.
// Bytes an element, at density d and v bytes a value, for each message: tile_sum.cuh; and the
// checks, COO 4 d, Pici 1/8, Rice its index words. acc: 4 written or, in place, d sectors of 32
// bytes read and written if kept values are far apart, else 8 in all.
#pragma once

#include "decode_walk.cuh"
#include "elementwise.h"
#include "lanes.h"
#include "tile_sum.cuh"

namespace megatron_sparse {

constexpr int kDecodeThreads = kSumThreads;
constexpr int kDecodeWarps = kSumWarps;
constexpr int kDecodeBlocks = 4;   // resident on a multiprocessor
constexpr int kInPlaceBlocks = 3;  // likewise, of sums in place, which need more registers

// A warp's unit of a check.
struct Unit {
  int64_t segment;
  int64_t number;  // in the record
};

__device__ __forceinline__ Unit find_unit(const DecodeArguments& call, const DecodeWorkspace& work,
                                          int64_t unit) {
  const int64_t segment = find_range(work.unit_begin, call.segment_count, unit);
  return {segment, unit - work.unit_begin[segment]};
}

// The lowest wrong entry is reported, whichever warp finds one first.
__device__ __forceinline__ void report(const DecodeWorkspace& work, int64_t segment, int64_t entry,
                                       bool beyond_numel) {
  atomicMin(&work.state->wrong, static_cast<unsigned long long>(segment) << 33 |
                                    static_cast<unsigned long long>(entry) << 1 | beyond_numel);
}

// Indices strictly ascend below `limit`.
__device__ __forceinline__ void check_indices(const DecodeWorkspace& work, const Unit& unit,
                                              const uint32_t* indices, int64_t count,
                                              int64_t limit) {
  const int64_t begin = unit.number * kUnitEntries;
  const int64_t end = min(begin + kUnitEntries, count);
  for (int64_t k = begin + threadIdx.x % 32; k < end; k += 32) {
    const uint32_t index = indices[k];
    if (index >= limit || (k > 0 && index <= indices[k - 1])) {
      report(work, unit.segment, k, false);
      return;
    }
  }
}

__device__ __forceinline__ void check_tile(const DecodeWorkspace& work, const Unit& unit,
                                           const DecodeRecord& record, TileWords& bits) {
  const int lane = threadIdx.x % 32;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(record.payload);
  const int64_t nnz = load_tile_words(bits, words + unit.number * kTileWords);
  const uint32_t* prefix = indices_of(record) + unit.number;
  // The first entry is 0, each follows from the one before, and the last is nnz; so none is above
  // nnz.
  const int64_t wanted_end = unit.number + 1 == tiles_of(record.numel) ? record.nnz : prefix[1];
  if (lane == 0 && (prefix[1] != wanted_end || prefix[0] + nnz != wanted_end ||
                    (unit.number == 0 && prefix[0] != 0))) {
    report(work, unit.segment, unit.number, false);
  }
  const int64_t length = record.numel - unit.number * kPiciTile;
  if (length < kPiciTile && has_stray_bits(bits, record.kind, static_cast<int>(length))) {
    report(work, unit.segment, unit.number, true);
  }
}

// Checks a message's sections; called by each of `warps` warps, which have `bits` to write to.
__device__ __attribute__((noinline)) inline void check_sections(const DecodeArguments& call,
                                                                const DecodeWorkspace& work,
                                                                TileWords& bits, int64_t warp,
                                                                int64_t warps) {
  const int64_t unit_count = work.unit_begin[call.segment_count];
  for (int64_t u = warp; u < unit_count; u += warps) {
    const Unit unit = find_unit(call, work, u);
    const DecodeRecord record = work.records[unit.segment];
    if (record.kind == kKindCoo) {
      check_indices(work, unit, indices_of(record), record.nnz, record.numel);
    } else if (record.kind == kKindBlocks) {
      const int64_t limit = (record.numel + record.block_size - 1) / record.block_size;
      check_indices(work, unit, indices_of(record), record.blocks, limit);
      if (unit.number == 0 && has_wrong_padding(record, dtype_bytes(record.dtype))) {
        report(work, unit.segment, record.blocks - 1, true);
      }
    } else if (record.kind == kKindRice) {
      // The record in memory, so that the call needs no copy of it.
      const DecodeRecord& there = work.records[unit.segment];
      const bool right = check_rice_chunk(there, unit.number, nullptr);
      if (!right && threadIdx.x % 32 == 0) report(work, unit.segment, unit.number, false);
    } else if (record.kind != kKindDense) {
      check_tile(work, unit, record, bits);
    }
  }
}

__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocks)
    check_kernel(const __grid_constant__ DecodeBatch<1> batch) {
  __shared__ TileWords tiles[kDecodeWarps];
  const int warp = threadIdx.x / 32;
  check_sections(batch.call[0], batch.work[0], tiles[warp],
                 static_cast<int64_t>(blockIdx.x) * kDecodeWarps + warp,
                 static_cast<int64_t>(gridDim.x) * kDecodeWarps);
}

// Writes the lowest wrong entry to the status; called by a whole warp.
__device__ __attribute__((noinline)) inline void write_entry_error(const DecodeArguments& call,
                                                                   const DecodeWorkspace& work) {
  const unsigned long long wrong = work.state->wrong;
  const int64_t segment = static_cast<int64_t>(wrong >> 33);
  const int64_t entry = static_cast<int64_t>(wrong >> 1 & 0xffffffffu);
  const bool beyond_numel = wrong & 1;
  const DecodeRecord& record = work.records[segment];
  const bool pici = record.kind == kKindPici || record.kind == kKindPiciPaper;
  if (record.kind == kKindRice) check_rice_chunk(record, entry, call.status + 2);
  if (threadIdx.x % 32 != 0) return;
  call.status[0] = kDecodeMessage;
  call.status[1] = segment;
  if (pici) {
    call.status[2] = beyond_numel ? kFieldWords : kFieldPrefix;
    call.status[3] = beyond_numel ? entry : indices_of(record)[entry + 1];
  } else if (record.kind != kKindRice) {
    call.status[2] = beyond_numel ? kFieldBlockPadding : kFieldIndices;
    // Indices are signed on the wire.
    call.status[3] = static_cast<int32_t>(indices_of(record)[entry]);
  }
}

// How a launch adds its messages.
struct SumPlan {
  int count;     // of the messages that add to the same elements: to those of the first
  bool checked;  // by check_kernel, so an error stops everything
};

// A block has met an error in a section. The first one that does checks all of the message, so that
// the status is that of the CPU's decoder. Called by a whole block.
__device__ __attribute__((noinline)) inline void report_sections(const DecodeArguments& call,
                                                                 const DecodeWorkspace& work,
                                                                 SumMemory& memory) {
  const int warp = threadIdx.x / 32;
  const bool claims = threadIdx.x == 0 && atomicExch(&work.state->claimed, 1u) == 0;
  if (!__syncthreads_or(claims)) return;
  check_sections(call, work, memory.words[warp], warp, kDecodeWarps);
  __syncthreads();
  if (warp == 0) write_entry_error(call, work);
}

// Writes a tile's sums; called by a whole block.
__device__ __forceinline__ void store_tile(float* out, const float* sums, int length) {
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    const int whole = length / 4;
#pragma unroll
    for (int begin = 0; begin < kPiciTile / 4; begin += kDecodeThreads) {
      const int at = begin + threadIdx.x;
      if (at < whole) {
        reinterpret_cast<float4*>(out)[at] = reinterpret_cast<const float4*>(sums)[at];
      }
    }
    const int at = 4 * whole + threadIdx.x;
    if (at < length) out[at] = sums[at];
  } else {
    for (int at = threadIdx.x; at < length; at += kDecodeThreads) out[at] = sums[at];
  }
}

// A tile of all segments and where its sums go; `out` is null behind the last one.
struct PlacedTile {
  int group;  // the first of the messages that add to it
  int64_t number;
  int64_t segment;
  SumTile tile;
  float* out;
  bool added;  // by a warp alone
};

// Finds the tile that has `place.number`.
__device__ __forceinline__ void find_tile(const DecodeArguments& call, const DecodeWorkspace& work,
                                          PlacedTile& place) {
  place.out = nullptr;
  if (place.number >= work.tile_begin[call.segment_count]) return;
  const int64_t segment = find_range(work.tile_begin, call.segment_count, place.number);
  const int64_t offset = call.segment_offsets[segment];
  const int64_t left = call.segment_offsets[segment + 1] - offset;
  const int64_t begin = (place.number - work.tile_begin[segment]) * kPiciTile;
  const int length = static_cast<int>(min(left - begin, static_cast<int64_t>(kPiciTile)));
  place.segment = segment;
  place.tile = {begin, length, begin + kPiciTile >= left};
  place.out = call.acc + (offset - call.base) + begin;
}

// Without FRESH the messages are added to what acc holds: one in place, because few elements may
// change; several in shared memory. In place each warp of a block finds a tile, and adds it if it
// is COO's: its searches take longer than the additions. All other tiles are added by the block.
template <int VALUE, bool FRESH, int MOST>
__global__ void __launch_bounds__(kDecodeThreads,
                                  FRESH || MOST > 1 ? kDecodeBlocks : kInPlaceBlocks)
    sum_kernel(const __grid_constant__ DecodeBatch<MOST> batch, SumPlan plan) {
  constexpr bool IN_PLACE = !FRESH && MOST == 1;
  __shared__ __align__(16) float sums[IN_PLACE ? 4 : kPiciTile];
  __shared__ SumMemory memory;
  constexpr int TILES = IN_PLACE && !is_quantised(VALUE) ? kSumWarps : 1;  // at a time
  __shared__ PlacedTile places[TILES];  // not in registers, of which there are few
  __shared__ unsigned int wrong;
  const int count = MOST == 1 ? 1 : plan.count;
  const int warp = threadIdx.x / 32;
  const bool finds = threadIdx.x % 32 == 0 && warp < TILES;
  if constexpr (MOST == 1) {
    const DecodeArguments& call = batch.call[0];
    const DecodeWorkspace& work = batch.work[0];
    if (plan.checked && work.state->wrong != kNothingWrong) {
      if (blockIdx.x == 0 && threadIdx.x < 32) write_entry_error(call, work);
      return;
    }
    if (plan.checked && !work.state->readable) return;
  }
  if (threadIdx.x == 0) wrong = 0;
  if (finds) {
    places[warp].group = blockIdx.y * count;
    places[warp].number = blockIdx.x + int64_t{gridDim.x} * warp;
  }
  __syncthreads();
  while (true) {
    if (finds) {
      PlacedTile& place = places[warp];
      find_tile(batch.call[place.group], batch.work[place.group], place);
    }
    if (FRESH) {
#pragma unroll
      for (int at = 0; at < kPiciTile / 4; at += kDecodeThreads) {
        reinterpret_cast<float4*>(sums)[at + threadIdx.x] = {0, 0, 0, 0};
      }
    }
    if constexpr (TILES > 1) {
      __syncwarp();
      PlacedTile& place = places[warp];
      const DecodeRecord* record =
          place.out == nullptr ? nullptr : batch.work[0].records + place.segment;
      const bool is_coo = record != nullptr && record->kind == kKindCoo;
      if (is_coo) add_coo_tile<VALUE>(*record, place.tile, 0, place.out, MarkWrong{&wrong});
      if (finds) place.added = is_coo;
    }
    __syncthreads();
    if (places[0].out == nullptr) break;
    for (int t = 0; t < TILES; ++t) {
      const PlacedTile& place = places[t];
      if (TILES > 1 && (place.out == nullptr || place.added)) continue;
      if (!FRESH && !IN_PLACE) {
        for (int at = threadIdx.x; at < place.tile.length; at += kDecodeThreads) {
          sums[at] = place.out[at];
        }
      }
      const auto record_of = [&](int k) {
        const DecodeWorkspace& of = batch.work[place.group + k];
        return of.state->readable ? of.records + place.segment : nullptr;
      };
      sum_tile<VALUE>(record_of, count, place.tile, memory, IN_PLACE ? place.out : sums,
                      MarkWrong{&wrong});
      if (!IN_PLACE) store_tile(place.out, sums, place.tile.length);
    }
    __syncthreads();  // shared memory is free again
    if (finds) places[warp].number += int64_t{gridDim.x} * TILES;
  }
  // Behind the loop, whose registers a call would take. The messages that are left stay in shared
  // memory: nothing is in registers during the call.
  while (wrong != 0) {
    const int k = places[0].group + __ffs(static_cast<int>(wrong)) - 1;
    report_sections(batch.call[k], batch.work[k], memory);
    if (threadIdx.x == 0) wrong &= wrong - 1;
    __syncthreads();
  }
}

}  // namespace megatron_sparse
