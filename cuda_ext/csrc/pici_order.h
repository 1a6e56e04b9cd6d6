// The paper's order inside a Pici tile (SpCCL, section III): one word for each column of 64 x 64.
#pragma once

#include <cstdint>

#include "record.h"

namespace megatron_sparse {

inline constexpr int kTileSide = 64;

// Transposes a 64 x 64 bit matrix in place: bit c of row r becomes bit r of row c.
inline void transpose_64(uint64_t* rows) {
  uint64_t mask = 0x00000000ffffffffull;
  for (int width = 32; width != 0; width >>= 1, mask ^= mask << width) {
    for (int r = 0; r < kTileSide; r = ((r | width) + 1) & ~width) {
      const uint64_t swapped = ((rows[r] >> width) ^ rows[r | width]) & mask;
      rows[r] ^= swapped << width;
      rows[r | width] ^= swapped;
    }
  }
}

// Calls take(r, c) for each set bit r of each word c, in the order of the values.
template <class Take>
inline void for_each_in_columns(const uint64_t* columns, Take take) {
  for (int c = 0; c < kTileSide; ++c) {
    for (uint64_t word = columns[c]; word != 0; word &= word - 1) {
      take(__builtin_ctzll(word), c);
    }
  }
}

}  // namespace megatron_sparse
