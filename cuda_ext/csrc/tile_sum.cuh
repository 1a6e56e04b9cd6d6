// Adds the records of several ranks to one tile of 4096 elements, in rank order; by a whole block.
//
// First each warp finds one record's part of the tile: two searches in COO's and blocks' indices, a
// tile's words in Pici. The ranks' latencies overlap. Then the block adds one record after the
// other, so that an element receives its values in rank order whichever thread adds them. Within a
// record no two values go to one element: there are no atomics.
//
// A record's sums may lie where its loads may come from, as far as the compiler knows, so it keeps
// a load behind every store before it. Every loop here therefore loads several values before it
// stores a sum.
//
// Nothing in a record is trusted: every index, prefix and bit is checked before it is used. A wrong
// one adds nothing, and `report(k)` is called, where k is the record's number. Together the tiles
// of a record check all of it.
//
// Bytes an element at density d and v bytes a value, for each record: COO (4 + v) d, Pici
// 1/8 + v d, dense v; and the searches, 2 log32 nnz loads of 32 sectors a tile. Rice:
// tile_rice.cuh.
#pragma once

#include "tile_find.cuh"
#include "tile_rice.cuh"

namespace megatron_sparse {

constexpr int kSumWords = kTileWords / kSumWarps;  // of a tile, for each warp
constexpr int kLoadsAhead = 8;
constexpr int kSparseLoadsAhead = 4;
// A lane takes bits of its own half word up to this number of values of the warp's words, so that
// few lanes idle; above it 32 lanes take the bits of one word after the other.
constexpr int kCrowdedWords = kSumWords * 32 / 4;

// A block's shared memory.
struct SumMemory {
  union {
    struct {
      TilePart parts[kSumWarps];
      TileWords words[kSumWarps];  // of Pici's parts
    };
    RiceMemory rice;
  };
};

// Adds entry i of a COO part, whose index has been loaded already.
__device__ __forceinline__ void add_entry(const TilePart& part, int i, uint32_t index, float value,
                                          const SumTile& tile, int k, float* sums,
                                          const MarkWrong& report) {
  // An index before the tile wraps to far behind its end.
  const uint32_t at = index - static_cast<uint32_t>(tile.begin);
  if (at < static_cast<uint32_t>(tile.length) && (i == 0 || index > part.indices[i - 1])) {
    sums[at] += value;
  } else {
    report(k);
  }
}

// Adds every `step`th entry of a COO part from `first` on.
template <int VALUE>
__device__ __forceinline__ void add_coo_part(const TilePart& part, int first, int step,
                                             const SumTile& tile, int k, float* sums,
                                             const MarkWrong& report) {
#pragma unroll 1
  for (int i = first; i < part.count; i += step) {
    add_entry(part, i, part.indices[i], value_at<VALUE>(part.values, i), tile, k, sums, report);
  }
}

// Adds up to kSumWarps parts, all COO; each thread loads its first entry of all before it adds.
template <int VALUE>
__device__ __forceinline__ void add_coo_parts(const SumMemory& memory, int count, int first,
                                              const SumTile& tile, float* sums,
                                              const MarkWrong& report) {
  uint32_t index[kSumWarps] = {};
  float value[kSumWarps] = {};
  const int thread = threadIdx.x;
#pragma unroll
  for (int k = 0; k < kSumWarps; ++k) {
    if (k >= count || thread >= memory.parts[k].count) continue;
    index[k] = memory.parts[k].indices[thread];
    value[k] = value_at<VALUE>(memory.parts[k].values, thread);
  }
#pragma unroll
  for (int k = 0; k < kSumWarps; ++k) {
    if (k >= count) break;
    const TilePart& part = memory.parts[k];
    if (thread < part.count) {
      add_entry(part, thread, index[k], value[k], tile, first + k, sums, report);
    }
    add_coo_part<VALUE>(part, kSumThreads + thread, kSumThreads, tile, first + k, sums, report);
    __syncthreads();  // the next rank's values come after this one's
  }
}

// Finds and adds a COO record's part of a tile; called by a warp.
template <int VALUE>
__device__ __forceinline__ void add_coo_tile(const DecodeRecord& record, const SumTile& tile, int k,
                                             float* sums, const MarkWrong& report) {
  constexpr int64_t value_bytes = sizeof(typename RawType<VALUE>::type);
  TilePart part = {record.payload + record.sections.values, indices_of(record), 0, 0, kKindCoo};
  find_coo_part(record, tile, k, value_bytes, part, report);
  add_coo_part<VALUE>(part, threadIdx.x % 32, 32, tile, k, sums, report);
}

template <class Values>
__device__ __forceinline__ void add_dense_part(const TilePart& part, const Values& values,
                                               float* sums) {
#pragma unroll 1
  for (int begin = 0; begin < kPiciTile; begin += kLoadsAhead * kSumThreads) {
    float value[kLoadsAhead] = {}, sum[kLoadsAhead] = {};
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int at = begin + i * kSumThreads + threadIdx.x;
      if (at >= part.count) continue;
      value[i] = values(at);
      sum[i] = sums[at];
    }
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int at = begin + i * kSumThreads + threadIdx.x;
      if (at < part.count) sums[at] = sum[i] + value[i];
    }
  }
}

// A warp takes one piece of a block after the other.
template <int VALUE>
__device__ __forceinline__ void add_block_part(const TilePart& part, const SumTile& tile,
                                               float* sums) {
  constexpr int piece = 32 * kLoadsAhead;
  // Of a long block only the elements in the tile count.
  const int64_t most = min(part.block_size, int64_t{kPiciTile});
  const int pieces = static_cast<int>((most + piece - 1) / piece);
#pragma unroll 1
  for (int u = threadIdx.x / 32; u < part.count * pieces; u += kSumWarps) {
    const int block = u / pieces;
    // A block may begin before the tile. The last one may reach past the segment, with zeros.
    const int64_t begin = part.indices[block] * part.block_size - tile.begin;
    const int from = static_cast<int>(max(begin, int64_t{0})) + (u - block * pieces) * piece;
    const int end = static_cast<int>(min(begin + part.block_size, int64_t{tile.length}));
    const int64_t values = block * part.block_size - begin;
    float value[kLoadsAhead] = {}, sum[kLoadsAhead] = {};
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int at = from + i * 32 + threadIdx.x % 32;
      if (at >= end) continue;
      value[i] = value_at<VALUE>(part.values, values + at);
      sum[i] = sums[at];
    }
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int at = from + i * 32 + threadIdx.x % 32;
      if (at < end) sums[at] = sum[i] + value[i];
    }
  }
}

// Each warp adds the bits of its own words.
template <class Values>
__device__ __forceinline__ void add_bits_part(const TilePart& part, const Values& values,
                                              const TileWords& bits, float* sums) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kSumWords;
  const int last = first + kSumWords - 1;
  const int count = bits.before[last] + __popc(bits.word[last]) - bits.before[first];
  if (count <= kCrowdedWords) {
    const int w = first + lane / 2, shift = lane % 2 * 16;
    const uint32_t word = bits.word[w];
    int from = bits.before[w] + (shift == 0 ? 0 : __popc(word & 0xffffu));
    uint32_t left = word >> shift & 0xffffu;
    while (left != 0) {
      int at[kSparseLoadsAhead];
      float value[kSparseLoadsAhead] = {}, sum[kSparseLoadsAhead] = {};
#pragma unroll
      for (int i = 0; i < kSparseLoadsAhead; ++i) {
        at[i] = -1;
        if (left == 0) continue;
        at[i] = element_of_bit(part.kind, w, shift + __ffs(static_cast<int>(left)) - 1);
        left &= left - 1;
        value[i] = values(from++);
        sum[i] = sums[at[i]];
      }
#pragma unroll
      for (int i = 0; i < kSparseLoadsAhead; ++i) {
        if (at[i] >= 0) sums[at[i]] = sum[i] + value[i];
      }
    }
    return;
  }
  const unsigned lanes_before = (1u << lane) - 1;
#pragma unroll 1
  for (int begin = first; begin <= last; begin += kLoadsAhead) {
    float value[kLoadsAhead] = {}, sum[kLoadsAhead] = {};
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const uint32_t word = bits.word[begin + i];
      if (!(word >> lane & 1)) continue;
      value[i] = values(bits.before[begin + i] + __popc(word & lanes_before));
      sum[i] = sums[element_of_bit(part.kind, begin + i, lane)];
    }
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      if (!(bits.word[begin + i] >> lane & 1)) continue;
      sums[element_of_bit(part.kind, begin + i, lane)] = sum[i] + value[i];
    }
  }
}

// Adds records 0 to count - 1 of a tile's segment to `sums`, which has the tile's elements. Called
// by a block of kSumThreads; `sums` may have been written right before, by any thread, and is
// complete for all threads afterwards. `record_of(k)` is null for a record to leave out.
template <int VALUE, class RecordOf>
__device__ __forceinline__ void sum_tile(const RecordOf& record_of, int count, const SumTile& tile,
                                         SumMemory& memory, float* sums, const MarkWrong& report) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = 0, here; first < count; first += here) {
    // Records that follow each other and either are all Rice's, or none is.
    here = min(count - first, kSumWarps);
    const DecodeRecord* seen = lane < here ? record_of(first + lane) : nullptr;
    const unsigned rice = __ballot_sync(kAllLanes, seen != nullptr && seen->kind == kKindRice);
    const unsigned others = rice & 1 ? ~rice : rice;
    if (others != 0) here = min(here, __ffs(static_cast<int>(others)) - 1);
    if (rice & 1) {
      if (warp == 0 && lane < here) find_rice_chunk(*seen, tile, memory.rice.chunks[lane]);
      __syncthreads();
      if (warp < here && !find_rice_part(memory.rice, warp) && lane == 0) {
        report(first + warp);
      }
      __syncthreads();
      const bool is_whole = lane < here && memory.rice.chunks[lane].words < 0;
      const unsigned whole = __ballot_sync(kAllLanes, is_whole);
      for (int k = 0; k < here;) {
        const int listed = list_places(memory.rice, k, here);
        __syncthreads();
        while (k < listed) {
          k += add_rice_parts<VALUE>(memory.rice, whole, k, sums);
          __syncthreads();  // the next rank's values come after this one's
        }
      }
      continue;
    }
    const DecodeRecord* record = warp < here ? record_of(first + warp) : nullptr;
    if (record != nullptr) {
      find_part<VALUE>(*record, tile, first + warp, memory.parts[warp], memory.words[warp], report);
    } else if (lane == 0) {
      memory.parts[warp] = {nullptr, nullptr, 0, 0, kKindCoo};
    }
    __syncthreads();
    if constexpr (!is_quantised(VALUE)) {
      bool only_coo = true;
      for (int k = 0; k < here; ++k) only_coo &= memory.parts[k].kind == kKindCoo;
      if (only_coo) {
        add_coo_parts<VALUE>(memory, here, first, tile, sums, report);
        continue;
      }
    }
    for (int k = 0; k < here; ++k) {
      const TilePart& part = memory.parts[k];
      if (part.kind == kKindDense) {
        add_dense_part(part, RawValues<kDenseOf<VALUE>>{part}, sums);
      } else if constexpr (!is_quantised(VALUE)) {
        if (part.kind == kKindBlocks) {
          add_block_part<VALUE>(part, tile, sums);
        } else if (part.kind == kKindCoo) {
          add_coo_part<VALUE>(part, threadIdx.x, kSumThreads, tile, first + k, sums, report);
        } else {
          add_bits_part(part, RawValues<VALUE>{part}, memory.words[k], sums);
        }
      }
      __syncthreads();  // the next rank's values come after this one's
    }
  }
}

}  // namespace megatron_sparse
