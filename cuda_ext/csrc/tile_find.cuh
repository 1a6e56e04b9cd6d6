// Finds a record's part of a tile, and checks it; by a warp. tile_sum.cuh adds the parts.
//
// A record's part of a tile is checked by its values' bounds: every index, prefix and bit, but
// COO's indices, which are checked when they are added. Together the tiles of a record check all of
// it.
#pragma once

#include "scan.cuh"
#include "tile_part.cuh"
#include "tile_words.cuh"

namespace megatron_sparse {

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

__device__ __forceinline__ void find_coo_part(const DecodeRecord& record, const SumTile& tile,
                                              int k, int64_t value_bytes, TilePart& part,
                                              const MarkWrong& report) {
  const uint32_t* indices = indices_of(record);
  const uint32_t begin = static_cast<uint32_t>(tile.begin);
  uint32_t found[2];
  count_below(indices, static_cast<uint32_t>(record.nnz), {begin, begin + kPiciTile}, found);
  if (found[0] > found[1] || (tile.is_last && found[1] != record.nnz)) {
    if (threadIdx.x % 32 == 0) report(k);
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
__device__ __forceinline__ void find_block_part(const DecodeRecord& record, const SumTile& tile,
                                                int k, int64_t value_bytes, TilePart& part,
                                                const MarkWrong& report) {
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
    if (threadIdx.x % 32 == 0) report(k);
    return;
  }
  const bool reaches_in = !tile.is_last && next * size < tile_end && found[1] < record.blocks &&
                          indices[found[1]] == next;
  part.indices += found[0];
  part.values += int64_t{found[0]} * record.block_size * value_bytes;
  part.count = static_cast<int>(found[1] - found[0]) + reaches_in;
  part.block_size = record.block_size;
  part.kind = kKindBlocks;
}

__device__ __forceinline__ void find_pici_part(const DecodeRecord& record, const SumTile& tile,
                                               int k, int64_t value_bytes, TilePart& part,
                                               TileWords& bits, const MarkWrong& report) {
  const int64_t number = tile.begin / kPiciTile;
  const uint32_t* prefix = indices_of(record) + number;
  const uint32_t before = prefix[0], after = prefix[1];
  const uint32_t* words = reinterpret_cast<const uint32_t*>(record.payload);
  const uint32_t nnz = static_cast<uint32_t>(load_tile_words(bits, words + number * kTileWords));
  if (before + nnz != after || after > record.nnz || after < before ||
      (number == 0 && before != 0) || (tile.is_last && after != record.nnz)) {
    if (threadIdx.x % 32 == 0) report(k);
    return;
  }
  if (tile.length < kPiciTile &&
      __any_sync(kAllLanes, has_stray_bits(bits, record.kind, tile.length))) {
    if (threadIdx.x % 32 == 0) report(k);
    return;
  }
  part.values += before * value_bytes;
  part.count = static_cast<int>(nnz);
  part.kind = record.kind;
}

// The dtype of dense records in messages of VALUE, which is kQ8 for all quantised dtypes.
template <int VALUE>
constexpr int kDenseOf = is_quantised(VALUE) ? kBf16 : VALUE;

// Finds and checks record k's part of a tile; called by a whole warp. COO's indices are checked
// when they are added.
template <int VALUE>
__device__ __forceinline__ void find_part(const DecodeRecord& record, const SumTile& tile, int k,
                                          TilePart& shared, TileWords& bits,
                                          const MarkWrong& report) {
  constexpr int64_t value_bytes = sizeof(typename RawType<kDenseOf<VALUE>>::type);
  TilePart part = {record.payload + record.sections.values, indices_of(record), 0, 0, kKindCoo};
  if (record.kind == kKindDense) {
    part.values += tile.begin * value_bytes;
    part.count = tile.length;
    part.kind = kKindDense;
  } else if (is_quantised(VALUE)) {
    // check_record lets no other kind through.
  } else if (record.kind == kKindCoo) {
    find_coo_part(record, tile, k, value_bytes, part, report);
  } else if (record.kind == kKindBlocks) {
    find_block_part(record, tile, k, value_bytes, part, report);
  } else if (record.kind == kKindPici || record.kind == kKindPiciPaper) {
    find_pici_part(record, tile, k, value_bytes, part, bits, report);
  }
  if (threadIdx.x % 32 == 0) shared = part;
}

}  // namespace megatron_sparse
