// Capacity on the CPU: takes back the elements that a segment has staged beyond its limit.
//
// The first elements in index order stay, for any number of threads. A removed element counts as
// not selected: its residual becomes leak * (value + residual), rounded as any residual is. Where
// values are not narrowed value + residual is x = gradient + residual, bit for bit, so the residual
// is that of an element that the threshold dropped. Infinity and NaN are not held back: if one is
// removed, the last value that stays becomes NaN, so that the step ends as it would without a
// limit, and the removed element's residual becomes 0, as if it was sent. If no value stays, the
// residual becomes NaN instead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "stage.h"

namespace megatron_sparse {

// The most non-zero elements of each segment of a call, or as many as there are.
struct Capacity {
  const int64_t* nnz;  // [segments], or null

  int64_t of(int64_t segment, int64_t numel) const {
    return nnz == nullptr ? numel : std::min(nnz[segment], numel);
  }
};

// How many of the chunk's values stay. The values before the chunk were counted without a limit.
inline int64_t staying(const StageChunk& chunk, const Capacity& capacity) {
  const int64_t left = capacity.of(chunk.segment, INT64_MAX) - chunk.nnz_before;
  return std::clamp(left, int64_t{0}, chunk.nnz);
}

// Unstages all but the first `stay` values; give_back(element, value) is called for the others.
template <class GiveBack>
void limit_chunk(StageChunk& chunk, int64_t stay, int64_t value_bytes, GiveBack give_back) {
  int64_t seen = 0;
  for (int64_t w = 0; w < stage_words(chunk.end - chunk.begin); ++w) {
    uint64_t left = chunk.words[w];
    for (; left != 0 && seen < stay; left &= left - 1) ++seen;
    chunk.words[w] ^= left;
    for (; left != 0; left &= left - 1, ++seen) {
      give_back(chunk.begin + 64 * w + __builtin_ctzll(left), chunk.values + seen * value_bytes);
    }
  }
  chunk.nnz = stay;
}

inline void store_nan(void* at, int dtype) {
  const uint32_t bits = dtype == kFp32 ? 0x7fc00000u : dtype == kBf16 ? 0x7fc0u : 0x7e00u;
  std::memcpy(at, &bits, dtype_bytes(dtype));  // little endian, as the wire is
}

// Overwrites a segment's last value; the segment must have one.
inline void make_last_nan(std::vector<StageChunk>& chunks, int64_t segment, int value_dtype) {
  const auto last = std::find_if(chunks.rbegin(), chunks.rend(), [&](const StageChunk& chunk) {
    return chunk.segment == segment && chunk.nnz > 0;
  });
  store_nan(last->values + (last->nnz - 1) * dtype_bytes(value_dtype), value_dtype);
}

}  // namespace megatron_sparse
