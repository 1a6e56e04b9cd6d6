// The launchers of row-sparse gradients on CUDA, between nvcc (no torch) and the bindings.
//
// All pointers of the arguments are on the device; workspaces are 256-byte aligned. Launches go to
// `stream` (a cudaStream_t) and return at once; the caller reads their error with cudaGetLastError,
// and the status, where kNothingFound stands for no error.
#pragma once

#include <cstdint>

#include "hash_launch.h"

namespace megatron_sparse {

struct RowMatchArguments {
  const int64_t* local;  // [local_count], to be strictly ascending
  int64_t local_count;
  const int64_t* all;  // [all_count], the union; likewise
  int64_t all_count;
  int64_t* positions;  // [local_count], written: where each local index stands in the union
  // [3], written: the first place where local, and where the union, does not ascend, and the first
  // local index that is not in the union.
  int64_t* status;
};

void launch_row_sparse_match(const RowMatchArguments& arguments, void* stream);

struct RowExpandArguments {
  const int64_t* local;
  int64_t local_count;
  const int64_t* all;
  int64_t all_count;
  const void* rows;   // [local_count] rows
  void* out;          // [all_count] rows, written
  int64_t row_bytes;  // a multiple of 2
  // [3], written: as of RowMatchArguments, but the last is how many local rows are in the union.
  int64_t* status;
};

void launch_row_sparse_expand(const RowExpandArguments& arguments, void* stream);

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

struct RowUnionArguments {
  const int64_t* indices;  // [count]: all sets back to back, not trusted
  int64_t count;
  const int64_t* offsets;  // [sets + 1], ascending from 0 to count; checked by the caller
  int64_t sets;
  int64_t num_rows;
  int64_t* merged;  // [count], written where nothing is wrong: the union is at its front
  // [6], written: the size of the union, the first entry that is out of range or does not ascend,
  // and its description by row_sparse_union: {1, set, position in it, value}, or zeros.
  int64_t* status;
  void* workspace;
};

int64_t row_union_workspace_bytes(int64_t count);

void launch_row_sparse_union(const RowUnionArguments& arguments, void* stream);

}  // namespace megatron_sparse
