// Finds the piece of a table of ascending offsets that contains an element. Free of torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_sparse {

// The last range that begins at or before `at`: never empty, and inside the table for any content.
__device__ __forceinline__ int64_t find_range(const int64_t* offsets, int64_t count, int64_t at) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (offsets[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace megatron_sparse
