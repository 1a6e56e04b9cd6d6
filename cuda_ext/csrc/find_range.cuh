// Finds the piece of a table of ascending offsets that contains an element. Free of torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_sparse {

// The last of `count` pieces for which starts(piece), which is monotone, is true; 0 if there is
// none.
template <class Starts>
__device__ __forceinline__ int64_t find_last(int64_t count, Starts starts) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (starts(middle)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The last range that begins at or before `at`: never empty, and inside the table for any content.
__device__ __forceinline__ int64_t find_range(const int64_t* offsets, int64_t count, int64_t at) {
  return find_last(count, [&](int64_t range) { return offsets[range] <= at; });
}

}  // namespace megatron_sparse
