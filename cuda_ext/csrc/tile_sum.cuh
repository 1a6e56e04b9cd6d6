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
// one adds nothing, and `report(k, field, value)` gets it, where k is the record's number. Together
// the tiles of a record check all of it.
//
// Bytes an element at density d and v bytes a value, for each record: COO (4 + v) d, Pici
// 1/8 + v d, dense v; and the searches, 2 log32 nnz loads of 32 sectors a tile.
#pragma once

#include "decode_record.cuh"
#include "scan.cuh"
#include "tile_words.cuh"

namespace megatron_sparse {

constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / 32;
constexpr int kSumWords = kTileWords / kSumWarps;  // of a tile, for each warp
constexpr int kLoadsAhead = 8;
constexpr int kSparseLoadsAhead = 4;
// A lane takes bits of its own half word up to this number of values of the warp's words, so that
// few lanes idle; above it 32 lanes take the bits of one word after the other.
constexpr int kCrowdedWords = kSumWords * 32 / 4;

// A tile of a segment.
struct SumTile {
  int64_t begin;  // in the segment
  int length;
  bool is_last;
};

// A record's part of a tile. One without entries is a COO part with count 0.
struct TilePart {
  const uint8_t* values;    // of the first entry or block, or of the tile's first element (dense)
  const uint32_t* indices;  // of the first entry or block
  int64_t block_size;
  int count;  // entries or blocks
  uint8_t kind;
};

// A block's shared memory.
struct SumMemory {
  TilePart parts[kSumWarps];
  TileWords words[kSumWarps];  // of Pici parts
};

// The numbers of indices below two limits, searched for together; called by a whole warp. For
// indices that do not ascend the results are arbitrary, but the same for the same limit.
__device__ __forceinline__ void count_below(const uint32_t* indices, uint32_t count,
                                            const uint32_t (&limits)[2], uint32_t (&found)[2]) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t low[2] = {0, 0}, high[2] = {count, count};  // the result is in [low, high]
  while (low[0] < high[0] || low[1] < high[1]) {
    uint32_t step[2];
    bool below[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      step[i] = (high[i] - low[i] + 31) / 32;
      const uint32_t at = low[i] + lane * step[i];
      below[i] = at < high[i] && indices[at] < limits[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // The number of leading lanes that are below.
      const unsigned not_below = ~__ballot_sync(kAllLanes, below[i]);
      const uint32_t lanes_below = not_below == 0 ? 32 : __ffs(static_cast<int>(not_below)) - 1;
      if (lanes_below == 0) {
        high[i] = low[i];
      } else {
        const uint32_t last_below = low[i] + (lanes_below - 1) * step[i];
        high[i] = min(high[i], last_below + step[i]);
        low[i] = last_below + 1;
      }
    }
  }
  found[0] = low[0];
  found[1] = low[1];
}

// The element of a tile that a bit of one of its words stands for.
__device__ __forceinline__ int element_of_bit(uint8_t kind, int word, int bit) {
  return kind == kKindPici ? 32 * word + bit : 64 * (32 * (word % 2) + bit) + word / 2;
}

// Whether this lane's words of a tile have bits from `length` on; called by a whole warp.
__device__ __forceinline__ bool has_stray_bits(const TileWords& bits, uint8_t kind, int length) {
  bool stray = false;
  for (int w = threadIdx.x % 32; w < kTileWords; w += 32) {
    for (uint32_t left = bits.word[w]; left != 0; left &= left - 1) {
      stray |= element_of_bit(kind, w, __ffs(static_cast<int>(left)) - 1) >= length;
    }
  }
  return stray;
}

template <class Report>
__device__ __forceinline__ void find_coo_part(const DecodeRecord& record, const SumTile& tile,
                                              int k, int64_t value_bytes, TilePart& part,
                                              const Report& report) {
  const uint32_t* indices = indices_of(record);
  const uint32_t begin = static_cast<uint32_t>(tile.begin);
  uint32_t found[2];
  count_below(indices, static_cast<uint32_t>(record.nnz), {begin, begin + kPiciTile}, found);
  if (found[0] > found[1] || (tile.is_last && found[1] != record.nnz)) {
    if (threadIdx.x % 32 == 0) report(k, kDecodeIndices, found[1]);
    return;
  }
  part.indices += found[0];
  part.values += found[0] * value_bytes;
  part.count = static_cast<int>(found[1] - found[0]);
}

// Whether the last block is not zero beyond the segment's end; answers for this lane's elements.
__device__ __forceinline__ bool has_wrong_padding(const DecodeRecord& record, int64_t value_bytes) {
  if (record.blocks == 0) return false;
  const int64_t last_end = (indices_of(record)[record.blocks - 1] + int64_t{1}) * record.block_size;
  const int64_t halves = value_bytes / 2;
  // Not above zero if the last block ends inside the segment.
  const int64_t padded = min(last_end - record.numel, record.block_size) * halves;
  const uint16_t* end =
      reinterpret_cast<const uint16_t*>(record.payload + record.sections.values_end);
  bool wrong = false;
  for (int64_t k = threadIdx.x % 32; k < padded; k += 32) wrong |= end[k - padded] != 0;
  return wrong;
}

// A tile's blocks begin with the one that its first element is in. Those before the one that the
// next tile's first element is in are this tile's to check; that one may reach into this tile.
template <class Report>
__device__ __forceinline__ void find_block_part(const DecodeRecord& record, const SumTile& tile,
                                                int k, int64_t value_bytes, TilePart& part,
                                                const Report& report) {
  const uint32_t* indices = indices_of(record);
  const uint32_t size = static_cast<uint32_t>(record.block_size);  // as it is in the record
  const uint32_t begin = static_cast<uint32_t>(tile.begin), tile_end = begin + kPiciTile;
  const uint32_t first = begin / size;
  const uint32_t next =
      tile.is_last ? (static_cast<uint32_t>(record.numel) - 1) / size + 1 : tile_end / size;
  uint32_t found[2];
  count_below(indices, static_cast<uint32_t>(record.blocks), {first, next}, found);
  bool wrong = found[0] > found[1] || (tile.is_last && found[1] != record.blocks);
  if (tile.begin == 0) wrong |= has_wrong_padding(record, value_bytes);
  if (found[0] <= found[1]) {
    for (uint32_t at = found[0] + threadIdx.x % 32; at < found[1]; at += 32) {
      wrong |= indices[at] < first || indices[at] >= next ||
               (at > found[0] && indices[at] <= indices[at - 1]);
    }
  }
  if (__any_sync(kAllLanes, wrong)) {
    if (threadIdx.x % 32 == 0) report(k, kDecodeIndices, found[1]);
    return;
  }
  const bool reaches_in = !tile.is_last && next * size < tile_end && found[1] < record.blocks &&
                          indices[found[1]] == next;
  part.indices += found[0];
  part.values += int64_t{found[0]} * record.block_size * value_bytes;
  part.count = static_cast<int>(found[1] - found[0]) + reaches_in;
  part.kind = kKindBlocks;
}

template <class Report>
__device__ __forceinline__ void find_pici_part(const DecodeRecord& record, const SumTile& tile,
                                               int k, int64_t value_bytes, TilePart& part,
                                               TileWords& bits, const Report& report) {
  const int64_t number = tile.begin / kPiciTile;
  const uint32_t* prefix = indices_of(record) + number;
  const uint32_t before = prefix[0], after = prefix[1];
  const uint32_t* words = reinterpret_cast<const uint32_t*>(record.payload);
  const uint32_t nnz = static_cast<uint32_t>(load_tile_words(bits, words + number * kTileWords));
  if (before + nnz != after || after > record.nnz || after < before ||
      (number == 0 && before != 0) || (tile.is_last && after != record.nnz)) {
    if (threadIdx.x % 32 == 0) report(k, kDecodePrefix, after);
    return;
  }
  if (tile.length < kPiciTile &&
      __any_sync(kAllLanes, has_stray_bits(bits, record.kind, tile.length))) {
    if (threadIdx.x % 32 == 0) report(k, kDecodeWords, number);
    return;
  }
  part.values += before * value_bytes;
  part.count = static_cast<int>(nnz);
  part.kind = record.kind;
}

// Finds and checks record k's part of a tile; called by a whole warp. COO's indices are checked
// when they are added.
template <int VALUE, class Report>
__device__ __forceinline__ void find_part(const DecodeRecord& record, const SumTile& tile, int k,
                                          TilePart& shared, TileWords& bits, const Report& report) {
  constexpr int64_t value_bytes = sizeof(typename RawType<VALUE>::type);
  TilePart part = {record.payload + record.sections.values, indices_of(record), record.block_size,
                   0, kKindCoo};
  if (record.kind == kKindDense) {
    part.values += tile.begin * value_bytes;
    part.count = tile.length;
    part.kind = kKindDense;
  } else if (record.kind == kKindCoo) {
    find_coo_part(record, tile, k, value_bytes, part, report);
  } else if (record.kind == kKindBlocks) {
    find_block_part(record, tile, k, value_bytes, part, report);
  } else if (record.kind == kKindPici || record.kind == kKindPiciPaper) {
    find_pici_part(record, tile, k, value_bytes, part, bits, report);
  }
  if (threadIdx.x % 32 == 0) shared = part;
}

// Adds entry i of a COO part, whose index has been loaded already.
template <class Report>
__device__ __forceinline__ void add_entry(const TilePart& part, int i, uint32_t index, float value,
                                          const SumTile& tile, int k, float* sums,
                                          const Report& report) {
  // An index before the tile wraps to far behind its end.
  const uint32_t at = index - static_cast<uint32_t>(tile.begin);
  if (at < static_cast<uint32_t>(tile.length) && (i == 0 || index > part.indices[i - 1])) {
    sums[at] += value;
  } else {
    report(k, kDecodeIndices, static_cast<int32_t>(index));
  }
}

// Adds the entries of a COO part from `first` on.
template <int VALUE, class Report>
__device__ __forceinline__ void add_coo_part(const TilePart& part, int first, const SumTile& tile,
                                             int k, float* sums, const Report& report) {
#pragma unroll 1
  for (int i = first + threadIdx.x; i < part.count; i += kSumThreads) {
    add_entry(part, i, part.indices[i], value_at<VALUE>(part.values, i), tile, k, sums, report);
  }
}

// Adds up to kSumWarps parts, all COO; each thread loads its first entry of all before it adds.
template <int VALUE, class Report>
__device__ __forceinline__ void add_coo_parts(const SumMemory& memory, int count, int first,
                                              const SumTile& tile, float* sums,
                                              const Report& report) {
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
    add_coo_part<VALUE>(part, kSumThreads, tile, first + k, sums, report);
    __syncthreads();  // the next rank's values come after this one's
  }
}

template <int VALUE>
__device__ __forceinline__ void add_dense_part(const TilePart& part, float* sums) {
#pragma unroll 1
  for (int begin = 0; begin < kPiciTile; begin += kLoadsAhead * kSumThreads) {
    float value[kLoadsAhead] = {}, sum[kLoadsAhead] = {};
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) {
      const int at = begin + i * kSumThreads + threadIdx.x;
      if (at >= part.count) continue;
      value[i] = value_at<VALUE>(part.values, at);
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
template <int VALUE>
__device__ __forceinline__ void add_pici_part(const TilePart& part, const TileWords& bits,
                                              float* sums) {
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
        value[i] = value_at<VALUE>(part.values, from++);
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
      value[i] = value_at<VALUE>(part.values, bits.before[begin + i] + __popc(word & lanes_before));
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
template <int VALUE, class RecordOf, class Report>
__device__ __forceinline__ void sum_tile(const RecordOf& record_of, int count, const SumTile& tile,
                                         SumMemory& memory, float* sums, const Report& report) {
  const int warp = threadIdx.x / 32;
  for (int first = 0; first < count; first += kSumWarps) {
    const int here = min(count - first, kSumWarps);
    if (warp < here) {
      const DecodeRecord* record = record_of(first + warp);
      if (record != nullptr) {
        find_part<VALUE>(*record, tile, first + warp, memory.parts[warp], memory.words[warp],
                         report);
      } else if (threadIdx.x % 32 == 0) {
        memory.parts[warp] = {nullptr, nullptr, 0, 0, kKindCoo};
      }
    }
    __syncthreads();
    bool only_coo = true;
    for (int k = 0; k < here; ++k) only_coo &= memory.parts[k].kind == kKindCoo;
    if (only_coo) {
      add_coo_parts<VALUE>(memory, here, first, tile, sums, report);
      continue;
    }
    for (int k = 0; k < here; ++k) {
      const TilePart& part = memory.parts[k];
      if (part.kind == kKindDense) {
        add_dense_part<VALUE>(part, sums);
      } else if (part.kind == kKindBlocks) {
        add_block_part<VALUE>(part, tile, sums);
      } else if (part.kind == kKindCoo) {
        add_coo_part<VALUE>(part, 0, tile, first + k, sums, report);
      } else {
        add_pici_part<VALUE>(part, memory.words[k], sums);
      }
      __syncthreads();  // the next rank's values come after this one's
    }
  }
}

}  // namespace megatron_sparse
