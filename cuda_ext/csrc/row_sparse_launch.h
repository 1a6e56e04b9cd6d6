// The launcher of row-sparse gradients on CUDA, between nvcc (no torch) and the binding.
//
// All pointers of the arguments are on the device. Launches go to `stream` (a cudaStream_t) and
// return at once; the caller reads their error with cudaGetLastError, and the status, where
// kNothingFound stands for no error.
#pragma once

#include <cstdint>

#include "hash_launch.h"

namespace megatron_sparse {

struct RowSumArguments {
  const void* rows;  // [row_count, width], of dtype
  int64_t row_count;
  int64_t width;
  int dtype;
  const int64_t* order;  // [order_count] rows, each in [0, row_count)
  int64_t order_count;
  const int64_t* offsets;  // [segments + 1], strictly ascending from 0 to order_count
  int64_t segments;
  void* out;        // [segments, width], written where nothing is wrong
  int64_t* status;  // [2], written: the first wrong place of order, and of offsets
};

void launch_row_sparse_sum(const RowSumArguments& arguments, void* stream);

}  // namespace megatron_sparse
