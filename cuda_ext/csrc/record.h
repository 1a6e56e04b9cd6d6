// Where the sections of a record lie, for every format; for host and device.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "header.h"

namespace megatron_sparse {

// Formats that can be requested: the format code of the header and, above it, the order inside Pici
// tiles.
enum RecordKind : uint8_t {
  kKindDense = 0,
  kKindCoo = 1,
  kKindPici = 2,  // linear order
  kKindBlocks = 3,
  kKindPiciPaper = 0x12,
  kKindAdaptive = 0xff,  // the smallest of dense, COO and Pici
};
inline constexpr uint8_t kFormatPici = 2;
inline constexpr uint8_t kFormatBlocks = 3;
inline constexpr uint8_t kFlagLinear = 1;

inline constexpr int kPiciTile = 4096;  // elements
inline constexpr int kTileWords = kPiciTile / 32;
inline constexpr int64_t kBlocksSubheader = 16;  // bytes

MS_INLINE int64_t tiles_of(int64_t numel) {
  return (numel + kPiciTile - 1) / kPiciTile;
}

// The most tiles of segments, each of which can end in a partial one.
MS_INLINE int64_t most_tiles(int64_t numel, int64_t segments) {
  return numel / kPiciTile + segments;
}

MS_INLINE bool is_block_size(int64_t size) {
  return size >= 64 && size <= kPiciTile && (size & (size - 1)) == 0;
}

// Byte offsets from the end of the header.
struct Sections {
  int64_t indices;  // COO's or blocks' indices, Pici's prefix; Pici's words lie at 0
  int64_t values;
  int64_t values_end;
  int64_t payload;
};

MS_INLINE Sections sections_of(uint8_t kind, int64_t numel, int64_t nnz, int64_t blocks,
                               int64_t block_size, int64_t value_bytes) {
  Sections at = {0, 0, 0, 0};
  int64_t values = nnz;
  if (kind == kKindDense) {
    values = numel;
  } else if (kind == kKindCoo) {
    at.values = pad16(4 * nnz);
  } else if (kind == kKindBlocks) {
    at.indices = kBlocksSubheader;
    at.values = kBlocksSubheader + pad16(4 * blocks);
    values = blocks * block_size;
  } else {
    at.indices = tiles_of(numel) * (kPiciTile / 8);
    at.values = at.indices + pad16(4 * (tiles_of(numel) + 1));
  }
  at.values_end = at.values + values * value_bytes;
  at.payload = pad16(at.values_end);
  return at;
}

}  // namespace megatron_sparse
