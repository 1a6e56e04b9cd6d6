// The launcher of sample_threshold's CUDA kernel, between nvcc (no torch) and the binding.
#pragma once

#include <cstdint>

namespace megatron_sparse {

// All pointers are on the device.
struct ThresholdArguments {
  const void* grad;  // [numel]
  int grad_dtype;
  const void* residual;  // [numel], or null for zeros
  int residual_dtype;
  int64_t numel;
  const int64_t* range_offsets;  // [range_count + 1], from 0 to numel
  const float* densities;        // [range_count], above 0
  const int64_t* keys;           // [range_count]
  int64_t range_count;
  int64_t samples;
  float* thresholds;   // [range_count], written
  float* tie_chances;  // [range_count], written
  int64_t* ties;       // [range_count], written
  void* workspace;
};

int64_t threshold_workspace_bytes(int64_t range_count, int64_t numel, int64_t samples);

// Launches on `stream` (a cudaStream_t) and returns at once; the caller reads the launch's error
// with cudaGetLastError.
void launch_sample_threshold(const ThresholdArguments& arguments, void* stream);

}  // namespace megatron_sparse
