// A record's part of a tile of 4096 elements, and the values of its entries.
#pragma once

#include "decode_record.cuh"

namespace megatron_sparse {

// A tile of a segment.
struct SumTile {
  int64_t begin;  // in the segment
  int length;
  bool is_last;
};

// One without entries is a COO part with count 0. Rice's parts: tile_rice.cuh.
struct TilePart {
  const uint8_t* values;    // of the first entry or block, or of the tile's first element (dense)
  const uint32_t* indices;  // of the first entry or block
  int64_t block_size;
  int count;  // entries or blocks
  uint8_t kind;
};

// Where the records that a tile finds wrong are marked: a bit for each, in shared memory.
struct MarkWrong {
  unsigned int* records;

  __device__ __forceinline__ void operator()(int k) const { atomicOr(records, 1u << k); }
};

// Values of a part, which is in shared memory: registers are few.
template <int VALUE>
struct RawValues {
  const TilePart& part;

  __device__ __forceinline__ float operator()(int64_t at) const {
    return value_at<VALUE>(part.values, at);
  }
};

}  // namespace megatron_sparse
