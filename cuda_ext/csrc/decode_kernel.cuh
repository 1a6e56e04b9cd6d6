// Second and third launch of decode_add_ on CUDA: check every index, word and prefix, then add.
//
// acc is changed only if the whole message is right. No two values of a message go to one element
// (indices ascend), so there are no atomics, and the sums do not depend on the schedule.
//
// A warp takes one unit after the other: a tile of 4096 elements in Pici, else up to 1024 entries.
// Bytes an element at density d and v bytes a value. COO: 4 d read by the checks, (4 + v) d by the
// sum. Pici: 1/8 and 1/8 + v d. Both: acc, d sectors of 32 bytes read and written if kept values
// are far apart, else 8 bytes in all.
#pragma once

#include "decode_walk.cuh"
#include "elementwise.h"
#include "lanes.h"
#include "tile_words.cuh"

namespace megatron_sparse {

constexpr int kDecodeThreads = 256;
constexpr int kDecodeWarps = kDecodeThreads / 32;

// A warp's unit: `entry` is its first entry, or its tile.
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
  atomicMin(work.wrong, static_cast<unsigned long long>(segment) << 33 |
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

// The last block is zero beyond the segment's end.
__device__ __forceinline__ void check_block_padding(const DecodeWorkspace& work, const Unit& unit,
                                                    const DecodeRecord& record,
                                                    int64_t value_bytes) {
  const int64_t last = record.blocks - 1;
  const int64_t last_end = (indices_of(record)[last] + int64_t{1}) * record.block_size;
  const int64_t halves = value_bytes / 2;
  // Not above zero if the last block ends inside the segment.
  const int64_t padded = min(last_end - record.numel, record.block_size) * halves;
  const uint16_t* end =
      reinterpret_cast<const uint16_t*>(record.payload + record.sections.values_end);
  for (int64_t k = threadIdx.x % 32; k < padded; k += 32) {
    if (end[k - padded] != 0) {
      report(work, unit.segment, last, true);
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
  if (length >= kPiciTile) return;
  bool stray = false;
  for (int w = lane; w < kTileWords; w += 32) {
    for (uint32_t left = bits.word[w]; left != 0; left &= left - 1) {
      const int bit = 32 * (w % 2) + __ffs(static_cast<int>(left)) - 1;
      const int element = record.kind == kKindPici ? 64 * (w / 2) + bit : 64 * bit + w / 2;
      stray |= element >= length;
    }
  }
  if (stray) report(work, unit.segment, unit.number, true);
}

template <int MOST>
__global__ void __launch_bounds__(kDecodeThreads, 4)
    check_kernel(const __grid_constant__ DecodeBatch<MOST> batch) {
  const DecodeArguments& call = batch.call[blockIdx.y];
  const DecodeWorkspace& work = batch.work[blockIdx.y];
  __shared__ TileWords tiles[kDecodeWarps];
  const int64_t unit_count = work.unit_begin[call.segment_count];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kDecodeWarps;
  for (int64_t u = static_cast<int64_t>(blockIdx.x) * kDecodeWarps + threadIdx.x / 32;
       u < unit_count; u += warps) {
    const Unit unit = find_unit(call, work, u);
    const DecodeRecord record = work.records[unit.segment];
    if (record.kind == kKindCoo) {
      check_indices(work, unit, indices_of(record), record.nnz, record.numel);
    } else if (record.kind == kKindBlocks) {
      const int64_t limit = (record.numel + record.block_size - 1) / record.block_size;
      // As many units as the values need; the indices need fewer, so some units find none.
      check_indices(work, unit, indices_of(record), record.blocks, limit);
      if (unit.number == 0) {
        check_block_padding(work, unit, record, dtype_bytes(call.value_dtype));
      }
    } else if (record.kind != kKindDense) {
      check_tile(work, unit, record, tiles[threadIdx.x / 32]);
    }
  }
}

// Between check and add, if the caller wants the message alone: clears the segments' part of acc,
// which is contiguous.
template <int MOST>
__global__ void __launch_bounds__(kDecodeThreads, 4)
    clear_kernel(const __grid_constant__ DecodeBatch<MOST> batch) {
  const DecodeArguments& call = batch.call[blockIdx.y];
  const DecodeWorkspace& work = batch.work[blockIdx.y];
  if (!call.fresh || call.segment_count == 0) return;
  if (call.status[0] != kDecodeOk || *work.wrong != kNothingWrong) return;
  const int64_t begin = call.segment_offsets[0] - call.base;
  const int64_t end = call.segment_offsets[call.segment_count] - call.base;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kDecodeThreads;
  for (int64_t at = begin + static_cast<int64_t>(blockIdx.x) * kDecodeThreads + threadIdx.x;
       at < end; at += threads) {
    call.acc[at] = 0;
  }
}

// Four neighbours a lane: one load of values, and one of acc where it is aligned.
template <int VALUE>
__device__ __forceinline__ void add_run(float* acc, const uint8_t* values, int64_t first,
                                        int count) {
  using Raw = typename RawType<VALUE>::type;
  using Vector = Neighbours<Raw, 4>;
  const Raw* from = reinterpret_cast<const Raw*>(values) + first;
  const bool values_aligned = reinterpret_cast<uintptr_t>(from) % alignof(Vector) == 0;
  const bool acc_aligned = reinterpret_cast<uintptr_t>(acc) % 16 == 0;
  for (int k = threadIdx.x % 32 * 4; k < count; k += 128) {
    if (values_aligned && acc_aligned && k + 4 <= count) {
      const Vector added = *reinterpret_cast<const Vector*>(from + k);
      float4 sum = *reinterpret_cast<const float4*>(acc + k);
      sum.x += widen<ScalarLanes, VALUE>(added.value[0]);
      sum.y += widen<ScalarLanes, VALUE>(added.value[1]);
      sum.z += widen<ScalarLanes, VALUE>(added.value[2]);
      sum.w += widen<ScalarLanes, VALUE>(added.value[3]);
      *reinterpret_cast<float4*>(acc + k) = sum;
    } else {
      for (int i = k; i < min(k + 4, count); ++i) acc[i] += widen<ScalarLanes, VALUE>(from[i]);
    }
  }
}

template <int VALUE>
__device__ __forceinline__ void add_coo(float* acc, const Unit& unit, const DecodeRecord& record) {
  using Raw = typename RawType<VALUE>::type;
  using Vector = Neighbours<Raw, 4>;
  const uint32_t* indices = indices_of(record);
  const uint8_t* values = record.payload + record.sections.values;
  const int64_t begin = unit.number * kUnitEntries;
  const int64_t end = min(begin + kUnitEntries, record.nnz);
  for (int64_t k = begin + threadIdx.x % 32 * 4; k < end; k += 128) {
    if (k + 4 <= end) {
      // Indices differ, so all of acc can be read before any of it is written.
      const uint4 at = *reinterpret_cast<const uint4*>(indices + k);
      const Vector added = *reinterpret_cast<const Vector*>(values + k * sizeof(Raw));
      const float x = acc[at.x], y = acc[at.y], z = acc[at.z], w = acc[at.w];
      acc[at.x] = x + widen<ScalarLanes, VALUE>(added.value[0]);
      acc[at.y] = y + widen<ScalarLanes, VALUE>(added.value[1]);
      acc[at.z] = z + widen<ScalarLanes, VALUE>(added.value[2]);
      acc[at.w] = w + widen<ScalarLanes, VALUE>(added.value[3]);
    } else {
      for (int64_t i = k; i < end; ++i) acc[indices[i]] += value_at<VALUE>(values, i);
    }
  }
}

// 32 elements at a time: each lane takes the element of its bit.
template <int VALUE>
__device__ __forceinline__ void add_tile(float* acc, const Unit& unit, const DecodeRecord& record,
                                         TileWords& bits) {
  const int lane = threadIdx.x % 32;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(record.payload);
  load_tile_words(bits, words + unit.number * kTileWords);
  float* sums = acc + unit.number * kPiciTile;
  const int64_t rank = indices_of(record)[unit.number];
  const uint8_t* values = record.payload + record.sections.values;
  if (record.kind == kKindPici) {
#pragma unroll 4
    for (int w = 0; w < kTileWords; ++w) {
      const uint32_t word = bits.word[w];
      if (!(word >> lane & 1)) continue;
      const int before = bits.before[w] + __popc(word & ((1u << lane) - 1));
      sums[32 * w + lane] += value_at<VALUE>(values, rank + before);
    }
    return;
  }
  // The paper's order: a lane has columns `lane` and `lane + 32`; a row at a time is 64 neighbours.
  const uint64_t column[2] = {wide_word(bits, lane), wide_word(bits, lane + 32)};
  const int64_t first[2] = {rank + bits.before[2 * lane], rank + bits.before[2 * lane + 64]};
  for (int row = 0; row < 64; ++row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!(column[half] >> row & 1)) continue;
      const int before = __popcll(column[half] & ((uint64_t{1} << row) - 1));
      sums[64 * row + 32 * half + lane] += value_at<VALUE>(values, first[half] + before);
    }
  }
}

template <int VALUE>
__device__ __forceinline__ void add_block(float* acc, const Unit& unit,
                                          const DecodeRecord& record) {
  const int64_t block = unit.number / record.units_per_block;
  const int64_t inside = (unit.number - block * record.units_per_block) * kUnitEntries;
  const int64_t first = indices_of(record)[block] * record.block_size + inside;
  // The last block may reach past the segment; values there are ignored.
  const int64_t room = min(record.numel - first, record.block_size - inside);
  const int count = static_cast<int>(min(room, static_cast<int64_t>(kUnitEntries)));
  add_run<VALUE>(acc + first, record.payload + record.sections.values,
                 block * record.block_size + inside, count);
}

// Writes the checks' findings; done by the first block's first thread.
__device__ inline void write_entry_error(const DecodeArguments& call, const DecodeWorkspace& work,
                                         unsigned long long wrong) {
  const int64_t segment = static_cast<int64_t>(wrong >> 33);
  const int64_t entry = static_cast<int64_t>(wrong >> 1 & 0xffffffffu);
  const bool beyond_numel = wrong & 1;
  const DecodeRecord& record = work.records[segment];
  const bool pici = record.kind == kKindPici || record.kind == kKindPiciPaper;
  call.status[0] = kDecodeMessage;
  call.status[1] = segment;
  if (pici) {
    call.status[2] = beyond_numel ? kDecodeWords : kDecodePrefix;
    call.status[3] = beyond_numel ? entry : indices_of(record)[entry + 1];
  } else {
    call.status[2] = beyond_numel ? kDecodePadding : kDecodeIndices;
    // Indices are signed on the wire.
    call.status[3] = static_cast<int32_t>(indices_of(record)[entry]);
  }
}

template <int VALUE, int MOST>
__global__ void __launch_bounds__(kDecodeThreads, 4)
    add_kernel(const __grid_constant__ DecodeBatch<MOST> batch) {
  const DecodeArguments& call = batch.call[blockIdx.y];
  const DecodeWorkspace& work = batch.work[blockIdx.y];
  __shared__ TileWords tiles[kDecodeWarps];
  const unsigned long long wrong = *work.wrong;
  if (wrong != kNothingWrong) {
    if (blockIdx.x == 0 && threadIdx.x == 0) write_entry_error(call, work, wrong);
    return;
  }
  const int64_t unit_count = work.unit_begin[call.segment_count];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kDecodeWarps;
  for (int64_t u = static_cast<int64_t>(blockIdx.x) * kDecodeWarps + threadIdx.x / 32;
       u < unit_count; u += warps) {
    const Unit unit = find_unit(call, work, u);
    const DecodeRecord record = work.records[unit.segment];
    float* acc = call.acc + record.acc_begin;
    if (record.kind == kKindDense) {
      const int64_t first = unit.number * kUnitEntries;
      add_run<VALUE>(
          acc + first, record.payload, first,
          static_cast<int>(min(record.numel - first, static_cast<int64_t>(kUnitEntries))));
    } else if (record.kind == kKindCoo) {
      add_coo<VALUE>(acc, unit, record);
    } else if (record.kind == kKindBlocks) {
      add_block<VALUE>(acc, unit, record);
    } else {
      add_tile<VALUE>(acc, unit, record, tiles[threadIdx.x / 32]);
    }
  }
}

}  // namespace megatron_sparse
