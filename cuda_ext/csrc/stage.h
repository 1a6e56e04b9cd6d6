// Staging: the result of one pass over a bucket before the layout of its message is known.
//
// A record's place and format follow from the non-zero counts of everything before it, which are
// known only after the pass over the whole bucket. So each chunk first leaves a bitmap (one bit an
// element) and its non-zero values, packed; placing them (place.h) then needs neither gradient nor
// residual. At density 1 % that is 1/32 + 1/100 of the gradient's bytes, which stay in cache.
//
// Chunks restart in each segment and do not depend on threads. The chunks that one thread stages in
// a row pack their values back to back, so that memory is touched only where there are values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "record.h"

namespace megatron_sparse {

// Elements of a chunk: whole tiles, whole words of every block, and it fits a second-level cache.
inline constexpr int64_t kStageChunk = 8 * kPiciTile;
// Packed values are stored a vector at a time: room for the excess of the last one.
inline constexpr int64_t kStageSlack = 64;

struct StageChunk {
  int64_t segment;
  int64_t begin;  // in the bucket
  int64_t end;
  uint64_t* words;  // bit i is set if element begin + i is not zero; cleared up to the tile's end
  uint64_t* signs;  // bit i is set if it is -0.0
  uint8_t* slot;    // room for the values of this chunk's elements and of later ones
  uint8_t* values;  // their place; set by the thread that stages the chunk
  int64_t nnz;
  int64_t nnz_before;  // in the segment
  int64_t blocks;      // that are not all zero, if blocks are requested
  int64_t blocks_before;
};

inline int64_t stage_words(int64_t numel) {
  return tiles_of(numel) * (kPiciTile / 64);
}

// Bytes of scratch, which must be aligned to 8. `chunk` is the elements of a chunk: whole tiles.
inline int64_t scratch_bytes(const int64_t* offsets, int64_t segment_count, int64_t value_bytes,
                             int64_t chunk = kStageChunk) {
  int64_t bytes = 0;
  for (int64_t s = 0; s < segment_count; ++s) {
    const int64_t numel = offsets[s + 1] - offsets[s], chunks = (numel + chunk - 1) / chunk;
    bytes += 2 * 8 * stage_words(numel) + numel * value_bytes + kStageSlack * chunks;
  }
  return bytes;
}

inline std::vector<StageChunk> cut_chunks(const int64_t* offsets, int64_t segment_count,
                                          int64_t value_bytes, void* scratch,
                                          int64_t chunk = kStageChunk) {
  int64_t all_words = 0;
  for (int64_t s = 0; s < segment_count; ++s) {
    all_words += stage_words(offsets[s + 1] - offsets[s]);
  }
  uint64_t* words = static_cast<uint64_t*>(scratch);
  uint64_t* signs = words + all_words;
  uint8_t* slot = reinterpret_cast<uint8_t*>(signs + all_words);
  std::vector<StageChunk> chunks;
  for (int64_t s = 0; s < segment_count; ++s) {
    for (int64_t begin = offsets[s]; begin < offsets[s + 1]; begin += chunk) {
      const int64_t end = std::min(begin + chunk, offsets[s + 1]);
      chunks.push_back({s, begin, end, words, signs, slot, nullptr, 0, 0, 0, 0});
      words += stage_words(end - begin);
      signs += stage_words(end - begin);
      slot += (end - begin) * value_bytes + kStageSlack;
    }
  }
  return chunks;
}

// Bits beyond the segment's end are part of Pici's last tile: they must be zero.
inline void clear_words_behind(const StageChunk& chunk) {
  const int64_t numel = chunk.end - chunk.begin;
  std::fill(chunk.words + (numel + 63) / 64, chunk.words + stage_words(numel), uint64_t{0});
}

// Blocks of `block_size` (a multiple of 64 that divides the chunk) that are not all zero.
inline int64_t count_blocks(const StageChunk& chunk, int64_t block_size) {
  const int64_t words = (chunk.end - chunk.begin + 63) / 64, step = block_size / 64;
  int64_t blocks = 0;
  for (int64_t begin = 0; begin < words; begin += step) {
    const uint64_t* end = chunk.words + std::min(begin + step, words);
    blocks += std::any_of(static_cast<const uint64_t*>(chunk.words) + begin, end,
                          [](uint64_t word) { return word != 0; });
  }
  return blocks;
}

// Fills in the counts before each chunk; returns each segment's non-zero elements and blocks.
struct SegmentCount {
  int64_t nnz = 0;
  int64_t blocks = 0;
};

inline std::vector<SegmentCount> add_up(std::vector<StageChunk>& chunks, int64_t segment_count) {
  std::vector<SegmentCount> counts(segment_count);
  for (StageChunk& chunk : chunks) {
    SegmentCount& count = counts[chunk.segment];
    chunk.nnz_before = count.nnz;
    chunk.blocks_before = count.blocks;
    count.nnz += chunk.nnz;
    count.blocks += chunk.blocks;
  }
  return counts;
}

}  // namespace megatron_sparse
