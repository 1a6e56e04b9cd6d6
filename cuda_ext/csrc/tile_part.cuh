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

// One without entries is a COO part with count 0. Rice's parts are Pici's, because their entries
// are found as bits, or dense ones.
struct TilePart {
  const uint8_t* values;    // of the first entry or block, or of the tile's first element (dense)
  const uint32_t* indices;  // of the first entry or block
  int64_t block_size;
  int count;  // entries or blocks
  uint8_t kind;
  uint8_t code_bits;  // of a quantised value; 0 for raw ones. `values` is then that of the chunk,
  int first;          // and this is the number of the part's first entry in it.
};

// Values of a part, which is in shared memory: registers are few.
template <int VALUE>
struct RawValues {
  const TilePart& part;

  __device__ __forceinline__ float operator()(int64_t at) const {
    return value_at<VALUE>(part.values, at);
  }
};

// Rice's quantised values; docs/wire-format.md.
struct QuantisedValues {
  const TilePart& part;

  __device__ __forceinline__ float operator()(int at) const {
    const int entry = part.first + at, place = entry % kPlane, bits = part.code_bits;
    const uint32_t* group = reinterpret_cast<const uint32_t*>(part.values) +
                            int64_t{entry / kRiceGroup} * (1 + kRiceGroup / kPlane * bits);
    const uint32_t* planes = group + 1 + entry % kRiceGroup / kPlane * bits;
    uint32_t code = 0;
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      if (p < bits) code |= (planes[p] >> place & 1) << p;
    }
    const float base = ScalarLanes::as_float(group[0] & 0xffff0000u);
    const float step = ScalarLanes::as_float(group[0] << 16);
    const float number = static_cast<float>(code & ((1u << (bits - 1)) - 1));
    // Compiled without contraction (sources.py); the product is exact anyway.
    const float level = base + number * step;
    return ScalarLanes::as_float(ScalarLanes::as_bits(level) | (code >> (bits - 1)) << 31);
  }
};

}  // namespace megatron_sparse
