// The launcher of prune_'s CUDA kernel, between prune.cu (nvcc, no torch) and prune_cuda.cpp.
#pragma once

#include <cstdint>

#include "counter_hash.h"

namespace megatron_sparse {

struct PruneArguments {
  void* grad;
  void* residual;
  const int64_t* range_offsets;
  const float* thresholds;
  int64_t* nnz;
  int64_t range_count;
  int64_t numel;
  float leak;
  int64_t key;
  int grad_dtype;
  int residual_dtype;
  int wire_dtype;
};

// Launches on `stream` (a cudaStream_t) and returns at once; the launch's error is the caller's to
// read with cudaGetLastError.
void launch_prune(const PruneArguments& arguments, void* stream);

}  // namespace megatron_sparse
